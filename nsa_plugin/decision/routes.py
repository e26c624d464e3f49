"""Routes: a kernel of a library, and whether the cache is copied to bf16 for it. And the inputs of one decision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from nsa_plugin.decision.plan import Attention
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.libraries.capabilities import Capability, Op, alternatives
from nsa_plugin.libraries.manifest import MANIFEST

OPS = {
    Attention.MHA_ONE_SHOT: Op.MHA_ONE_SHOT,
    Attention.SPARSE_PREFILL: Op.SPARSE_MLA_PREFILL,
    Attention.SPARSE_DECODE: Op.SPARSE_MLA_DECODE,
}
"""The registry's op of each attention path."""


# Libraries whose rank in the order of routes is fixed.
RANKED = frozenset({"flash_mla", "fa3", "trtllm", "cuda", "triton", "reference"})


def unranked(op: Op, known: tuple[str, ...]) -> tuple[str, ...]:
    """Libraries of the manifest that support an op and have no fixed rank; they follow the ranked ones."""
    return tuple(name for name in known if name not in RANKED and MANIFEST[name].supports(op))


class Route(NamedTuple):
    """A kernel of a library, and whether the cache is copied to bf16 for it.

    `attention` names the kernel, not the phase: FlashMLA's decode kernel can run an fp8 prefill, and its prefill kernel
    runs the decode of a bf16 cache.
    """

    attention: Attention
    library: str
    dequantize_kv: bool = False

    def __str__(self) -> str:
        return f"{self.library} {self.attention}" + (" after dequantisation" if self.dequantize_kv else "")

    def layout_read(self, model: ModelShape) -> str:
        """The KV layout that the kernel itself reads."""
        return "bf16" if self.dequantize_kv else model.kv_layout


FLASH_MLA_DECODE = Route(Attention.SPARSE_DECODE, "flash_mla")
BF16_COPY = Route(Attention.SPARSE_PREFILL, "flash_mla", dequantize_kv=True)


class Refusal(NamedTuple):
    """A route that does not support a batch, and why."""

    route: Route
    reason: str

    def __str__(self) -> str:
        return f"{self.route}: {self.reason}"


class KernelLoad(NamedTuple):
    """The load of one kernel call; with resharding it differs from the batch's.

    Attributes:
        rows: query tokens.
        heads: query heads.
    """

    rows: int
    heads: int


def first(routes: Iterable[Route], refusal: Callable[[Route], str | None]) -> tuple[Route | None, list[Refusal]]:
    """The first route without a refusal, and the refusals before it."""
    refused: list[Refusal] = []
    for route in routes:
        reason = refusal(route)
        if reason is None:
            return route, refused
        refused.append(Refusal(route, reason))
    return None, refused


def capability_refusal(
    capability: Capability, *, heads: int, dims: tuple[int, ...], selections: Sequence[int] = ()
) -> str | None:
    """Why a kernel does not support a model, or None if it does.

    Args:
        heads: heads of the op; the kernel may get more (`Capability.heads_given`).
        dims: elements of a head, as in `Capability.dims`.
        selections: numbers of selected tokens; each must be a multiple of `topk_multiple`.
    """
    if capability.dims and dims not in capability.dims:
        allowed = alternatives(capability.dims)
        return f"supports heads of {allowed} elements; the model's have {dims}"
    if capability.heads_given(heads) is None:
        return f"supports {capability.heads_in_words} heads; there are {heads}"
    for count in selections:
        if count % capability.topk_multiple:
            return f"supports selections in multiples of {capability.topk_multiple} tokens; the model's is {count}"
    return None


def rows_refusal(max_rows: int | None, rows: int) -> str | None:
    """Why a kernel does not support a call of `rows` query tokens, or None if it does."""
    if max_rows is None or rows <= max_rows:
        return None
    return f"{rows} query tokens exceed the {max_rows} that this build supports on this device"
