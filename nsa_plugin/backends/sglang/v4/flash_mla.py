"""The FlashMLA prefill kernel that comes with the installed SGLang, behind the contract of a V4 prefill's attention.

The plugin's provider uses the distribution sgl-flash-mla, which SGLang requires only since 0.5.23. From 0.5.13 on
sglang-kernel has the same kernels. 0.5.12 needs a separate FlashMLA for V4, because the function in its sglang-kernel
takes no sinks and lengths. If FlashMLA has two implementations, `use_legacy` selects the one for Hopper.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

from nsa_plugin.errors import NoProviderError
from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.sparse_mla import PrefillOutput

MODULES = ("sglang.kernels.ops.attention.flash_mla_interface", "sgl_kernel.flash_mla", "flash_mla")
"""Modules with `flash_mla_sparse_fwd`: since 0.5.23, from 0.5.13 to 0.5.22, and in 0.5.12."""

NEEDED = frozenset({"attn_sink", "topk_length"})
"""Parameters of it that a V4 prefill needs."""

HEADS = (64, 128)


@cache
def _sparse_fwd() -> Callable[..., Any]:
    without = []
    for name in MODULES:
        try:
            missing = find_spec(name) is None
        except ModuleNotFoundError:  # a package above it
            missing = True
        if missing:
            continue
        function: Callable[..., Any] = import_module(name).flash_mla_sparse_fwd
        takes = inspect.signature(function).parameters.keys()
        if takes >= NEEDED:
            return partial(function, use_legacy=True) if "use_legacy" in takes else function
        without.append(name)
    said = f"; of {', '.join(without)} it takes no {' and no '.join(sorted(NEEDED))}" if without else ""
    raise NoProviderError(f"flash_mla_sparse_fwd for DeepSeek-V4 is in none of {', '.join(MODULES)}{said}")


def sparse_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    *,
    scale: float,
    d_v: int = 512,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> PrefillOutput:
    """`reference_prefill` over one cache of bfloat16 rows, by `flash_mla_sparse_fwd`.

    Args:
        q: [tokens, heads, 512] bfloat16; other counts than 64 and 128 heads are padded.
        kv: [rows, 512] bfloat16.
        indices: [tokens, topk] int32, topk a multiple of 128.
        Others: as `reference_prefill`.

    Raises:
        KernelArgumentError: more heads than the kernel takes.
        NoProviderError: there is no FlashMLA, or none that takes sinks and lengths.
    """
    heads = q.shape[1]
    given = next((count for count in HEADS if heads <= count), None)
    if given is None:
        raise KernelArgumentError(f"sparse_mla_prefill: q has {heads} heads; flash_mla takes up to {HEADS[-1]}")
    missing = given - heads
    result, max_logits, lse = _sparse_fwd()(
        q=F.pad(q, (0, 0, 0, missing)) if missing else q.contiguous(),
        kv=kv.unsqueeze(1),
        indices=indices.unsqueeze(1),
        sm_scale=scale,
        d_v=d_v,
        attn_sink=F.pad(attn_sink, (0, missing)) if missing and attn_sink is not None else attn_sink,
        topk_length=topk_length,
    )
    result = result[:, :heads]
    delivered = result.to(out_dtype or q.dtype) if out is None else out.copy_(result)
    return PrefillOutput(delivered, max_logits[:, :heads], lse[:, :heads])
