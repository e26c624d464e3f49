"""A DeepSeek-V4 layer's attention over its caches in place, for both engines.

Each engine adapter reads its batch into a `LayerCall`; `attend_in_place` runs the plan's kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.common.warm import row_counts
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.kernels.kv_cache import PagedCache, allocate_cache
from nsa_plugin.layouts import V4_FP8

LAYOUT = V4_FP8.name

RATIOS = (0, 4, 128)
"""Compress ratios of layers; 0: the sliding window alone."""

D_V = 512


@dataclass(frozen=True)
class CacheSelection:
    """A cache of one layer and the KV tokens selected in it.

    Attributes:
        indices: int32 [query tokens, topk] slots, -1 for none.
        lengths: int32 [query tokens], how many count; None = all that are not -1.
    """

    cache: PagedCache
    indices: torch.Tensor
    lengths: torch.Tensor | None


@dataclass(frozen=True)
class LayerCall:
    """One layer's attention.

    Attributes:
        q: [query tokens, heads, 512] bfloat16. The engine may have padded the rank's heads for FlashMLA.
        window, extra: the sliding window's cache and the compressed one, which layers of ratio 0 lack.
        attn_sink: float32 [heads] or None.
        scale: of the logits.
        num_heads: heads to attend; the padding behind them is skipped.
        ratio: the layer's compress ratio.
        core: the engine's metadata of the batch.
    """

    q: torch.Tensor
    window: CacheSelection
    extra: CacheSelection | None
    attn_sink: torch.Tensor | None
    scale: float
    num_heads: int
    ratio: int
    core: Any = None

    def second(self, cache: str, *, by_sequence: bool = False) -> dict[str, Any]:
        """The compressed cache's arguments, under the kernel's name for that cache; none without one."""
        if self.extra is None:
            return {}
        indices = self.extra.indices.unsqueeze(1) if by_sequence else self.extra.indices
        return {cache: self.extra.cache, "extra_indices": indices, "extra_topk_length": self.extra.lengths}


def attend_in_place(providers: Providers, op: str, name: str, call: LayerCall, out: torch.Tensor) -> None:
    """Attend with the kernel that provider `name` has for `op`, straight from both caches.

    Args:
        out: [query tokens, heads, 512]; heads from `num_heads` on stay as they are.
    """
    heads, window = call.num_heads, call.window
    by_sequence = op == "sparse_mla_decode"

    def shaped(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unsqueeze(1) if by_sequence else tensor

    providers.load(op, name)(
        shaped(call.q[:, :heads]),
        window.cache,
        shaped(window.indices),
        scale=call.scale,
        d_v=D_V,
        topk_length=window.lengths,
        attn_sink=None if call.attn_sink is None else call.attn_sink[:heads],
        out=shaped(out[:, :heads]),
        **call.second("extra_cache" if by_sequence else "extra_kv", by_sequence=by_sequence),
    )


def warm_calls(
    model: ModelShape, device: torch.device, *, heads: int, page_sizes: Mapping[int, int], all_keys: tuple[int, ...]
) -> Iterator[LayerCall]:
    """Calls over caches of zeros for the warm-up: for each compress ratio, width of its selection and `row_counts`.

    Args:
        heads: of q, those that the engine adds included.
        page_sizes: slots of a page by compress ratio; 0: of the window's cache.
        all_keys: widths of the selection at ratio 128, which grow with the context.
    """
    for tokens in row_counts(device):
        q = torch.zeros(tokens, heads, D_V, dtype=torch.bfloat16, device=device)
        sink = torch.zeros(heads, dtype=torch.float32, device=device)
        seen = torch.arange(1, tokens + 1, dtype=torch.int32, device=device)
        for ratio in RATIOS:
            for width in {0: (0,), 4: (model.index_topk,), 128: all_keys}[ratio]:
                window = _newest(page_sizes[0], model.sliding_window, seen)
                extra = _newest(page_sizes[ratio], width, seen) if ratio else None
                yield LayerCall(q, window, extra, sink, 1.0, model.heads_per_rank, ratio)


def _newest(page_size: int, width: int, seen: torch.Tensor) -> CacheSelection:
    """A page of zeros, and each query token's newest slots in it, newest first, as the engines write a window."""
    lengths = seen.clamp(max=page_size)
    column = torch.arange(width, dtype=torch.int32, device=seen.device)
    slots = (lengths.unsqueeze(1) - 1 - column).clamp(min=-1)
    return CacheSelection(allocate_cache(LAYOUT, 1, page_size, device=seen.device), slots, lengths.clamp(max=width))
