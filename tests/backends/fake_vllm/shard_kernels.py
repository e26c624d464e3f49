"""The attention for the tests of resharding under vLLM: the plugin's ops, and vLLM's FlashMLA.

Computed in float64, so that the result in bfloat16 depends neither on the number of heads nor on that of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from nsa_plugin.kernels.kv_cache import PagedCache, open_cache, reference_read
from nsa_plugin.kernels.mha import reference as dense_reference
from tests.backends.fake_vllm.v32 import LORA


def attended(q: torch.Tensor, rows: torch.Tensor, chosen: torch.Tensor, scale: float) -> torch.Tensor:
    """[n, heads, LORA] in q's dtype.

    Args:
        q: [n, heads, LORA + ROPE]. rows: [tokens, LORA + ROPE] that entries of `chosen`, [n, topk], name; -1 for none.
    """
    out = torch.zeros(*q.shape[:2], LORA, dtype=torch.float64)
    for row, entries in enumerate(chosen):
        keys = rows[entries[entries >= 0].long()].double()
        if len(keys):
            out[row] = (q[row].double() @ keys.T * scale).softmax(-1) @ keys[:, :LORA]
    return out.to(q.dtype)


def rows_read(cache: PagedCache, slots: torch.Tensor, read: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(the rows that slots name, read as `read`; the slots as places among them)."""
    used = slots[slots >= 0].long().unique()
    places = torch.searchsorted(used, slots.long().contiguous())
    return reference_read(cache, used, dtype=read), places.masked_fill(slots < 0, -1)


def kernels(read: torch.dtype) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The ops of prefill and decode, over a cache whose rows are read as `read`."""

    def prefill(
        q: torch.Tensor, cache: PagedCache, slots: torch.Tensor, *, scale: float, d_v: int, out: Any = None
    ) -> Any:
        found = attended(q, *rows_read(cache, slots, read), scale)
        return SimpleNamespace(out=found if out is None else out.copy_(found))

    def decode(
        q: torch.Tensor, cache: PagedCache, slots: torch.Tensor, *, scale: float, d_v: int, out: Any = None
    ) -> Any:
        into = None if out is None else out.squeeze(1)
        found = prefill(q.squeeze(1), cache, slots.squeeze(1), scale=scale, d_v=d_v, out=into)
        return SimpleNamespace(out=found.out.unsqueeze(1))

    return prefill, decode


def dense(*given: Any, max_seqlen_q: int, max_seqlen_k: int, **named: Any) -> Any:
    """Not resharded, and quicker than Triton's interpreted one."""
    return dense_reference(*given, **named)


schedules: list[Any] = []


def get_mla_metadata() -> tuple[Any, None]:
    schedules.append(SimpleNamespace(shape=None))
    return schedules[-1], None


def flash_mla_sparse_fwd(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float, topk_length: torch.Tensor
) -> tuple[torch.Tensor]:
    """vLLM's: 64 or 128 heads, rows of bf16, and lengths behind which nothing is read."""
    assert q.shape[1] % 64 == 0
    assert q.dtype == kv.dtype == torch.bfloat16
    assert indices.shape[:2] == (q.shape[0], 1)
    chosen = indices[:, 0].clone()
    chosen[torch.arange(chosen.shape[1]) >= topk_length.unsqueeze(1)] = -1
    return (attended(q, kv[:, 0], chosen, sm_scale),)


def flash_mla_with_kvcache(
    *,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: None,
    head_dim_v: int,
    cache_seqlens: None,
    tile_scheduler_metadata: Any,
    is_fp8_kvcache: bool,
    indices: torch.Tensor,
    softmax_scale: float,
) -> tuple[torch.Tensor, None]:
    """vLLM's over fp8 pages: a schedule is of the shapes of the first call with it."""
    assert is_fp8_kvcache
    assert q.shape[0] == indices.shape[0] == 1
    assert q.shape[2] in (64, 128)
    schedule = tile_scheduler_metadata
    schedule.shape = schedule.shape or q.shape
    assert schedule.shape == q.shape
    cache = open_cache(k_cache.squeeze(2), "v32_fp8")
    return attended(q[0], *rows_read(cache, indices[0], torch.float32), softmax_scale).unsqueeze(0), None
