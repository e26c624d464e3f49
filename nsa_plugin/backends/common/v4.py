"""The three ways to carry a DeepSeek-V4 batch over both fp8 caches, whatever the engine.

The plugin's kernel straight from both caches; the pages that the batch reads brought to bfloat16 rows, then FlashMLA's
sparse prefill kernel; FlashMLA's decode kernel. Which one, is `decide()`'s; what no engine's adapter carries is taken
out of the device's profile before.
"""

from __future__ import annotations

from collections.abc import Iterable

from nsa_plugin.decision.plan import Attention, Plan
from nsa_plugin.libraries.capabilities import Capability, Op
from nsa_plugin.libraries.devices import DeviceProfile

LAYOUT = "v4_fp8"

RATIOS = (0, 4, 128)
"""Compress ratios of layers; 0: the sliding window alone."""

DIRECT, ROWS, DECODE_KERNEL = "direct", "bf16 rows", "decode kernel"

_Key = tuple[Attention, str, bool]

CARRIERS: dict[_Key, str] = {
    **{
        (shape, library, False): DIRECT
        for shape in (Attention.SPARSE_PREFILL, Attention.SPARSE_DECODE)
        for library in ("cuda", "triton", "reference")
    },
    (Attention.SPARSE_PREFILL, "flash_mla", True): ROWS,
    (Attention.SPARSE_DECODE, "flash_mla", False): DECODE_KERNEL,
}
"""(shape of the kernel, library, after dequantisation): the route's name."""

_SHAPES = {Op.SPARSE_MLA_PREFILL: Attention.SPARSE_PREFILL, Op.SPARSE_MLA_DECODE: Attention.SPARSE_DECODE}


def runnable(device: DeviceProfile, only: Iterable[str] = ()) -> DeviceProfile:
    """The profile without the kernels that no carrier has, or none of `only` if any are given."""
    wanted = frozenset(only) or frozenset(CARRIERS.values())

    def kept(library: str, capability: Capability) -> bool:
        if capability.op in (Op.MHA_ONE_SHOT, Op.TOKEN_SHARD):
            return False
        shape = _SHAPES.get(capability.op)
        if shape is None:
            return True
        copied = LAYOUT not in capability.layouts
        if copied and "bf16" not in capability.layouts:
            return False
        return CARRIERS.get((shape, library, copied)) in wanted

    return device.keeping(kept)


def carrier_name(plan: Plan) -> str | None:
    """The carrier of a plan that attends; None where there is none."""
    return CARRIERS.get((plan.attention, plan.provider, plan.dequantize_kv))
