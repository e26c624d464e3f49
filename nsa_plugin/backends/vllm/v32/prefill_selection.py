"""How a prefill's selection is made under vLLM: by the plugin's top-k, or without logits.

For each chunk of a prefill vLLM's `sparse_attn_indexer` calls `fp8_fp4_mqa_logits`, then `top_k_per_row_prefill` with
the result. Where the plan has the indexer that keeps no logits (`decision.indexer.UNPAGED`), the first call only keeps
its arguments, and the second one selects by them. What else vLLM does for a chunk stays as it is: gathering its keys,
and ranks that select for a share of its query tokens each (0.32 on).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.decision.indexer import UNPAGED
from nsa_plugin.errors import PatchError
from nsa_plugin.kernels.selector import default_selector
from nsa_plugin.patches.ledger import TURN_OFF, wrap

CUDA_TOPK = "nsa_plugin.kernels.cuda.topk"
STOCK_KEYS = 16384
"""Keys up to which vLLM's top-k stays. That of vLLM 0.33 was measured to be quicker than the plugin's up to here, and
slower from 65,536 on (docs/benchmarks/h100/topk.md); between the two nothing was timed."""


@dataclass(frozen=True)
class Unscored:
    """A chunk whose logits vLLM asked for and does not get.

    Attributes:
        logits: what vLLM got: float32 [rows, 0].
        inputs: the first arguments of `kernels.cuda.indexer.topk`, q to ke.
    """

    logits: torch.Tensor
    inputs: tuple[torch.Tensor, ...]


class _Call(threading.local):
    """The call of vLLM's indexer that this thread is in."""

    without_logits: bool = False
    chunk: Unscored | None = None


_call = _Call()


@contextmanager
def without_logits() -> Iterator[None]:
    """While vLLM's indexer runs in this thread, select for the prefills of its batch without logits.

    Raises:
        PatchError: vLLM asked for a chunk's logits and did not select from them.
    """
    _call.without_logits = True
    try:
        yield
        left = _call.chunk
    finally:
        _call.without_logits, _call.chunk = False, None
    if left is not None:
        _not_selected()


def prefill_logits(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """For `fp8_fp4_mqa_logits` in vLLM's indexer, with the same arguments."""

    def around(
        original: Callable[..., torch.Tensor],
        q: tuple[torch.Tensor, torch.Tensor | None],
        kv: tuple[torch.Tensor, torch.Tensor],
        weights: torch.Tensor,
        cu_seqlen_ks: torch.Tensor,
        cu_seqlen_ke: torch.Tensor,
        *rest: Any,
        **named: Any,
    ) -> torch.Tensor:
        codes, scales = q
        if not _call.without_logits or scales is not None:  # only fp4 queries have scales
            return original(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, *rest, **named)
        if _call.chunk is not None:
            _not_selected()
        logits = codes.new_empty((len(codes), 0), dtype=torch.float32)
        _call.chunk = Unscored(logits, (codes, *kv, weights.float(), cu_seqlen_ks, cu_seqlen_ke))
        return logits

    return wrap(original, around)


def _not_selected() -> NoReturn:
    raise PatchError(
        f"vLLM's indexer asked for the logits of a prefill and did not select from them; nsa-plugin expects both. "
        f"{TURN_OFF}"
    )


def vllms_is_quicker(logits: torch.Tensor, select: Callable[..., Any]) -> bool:
    """Whether vLLM's top-k stays for these logits [rows, keys], instead of the plugin's `select`.

    Triton's kernel reads the logits more often than vLLM's does, and was slower wherever both were timed.
    """
    return logits.is_cuda and (select.__module__ != CUDA_TOPK or logits.shape[1] <= STOCK_KEYS)


def prefill_topk(
    original: Callable[..., None], active: Callable[[], bool], providers: Callable[[], Providers]
) -> Callable[..., None]:
    """For `top_k_per_row_prefill` of `vllm._custom_ops` (0.22 on), with the same arguments.

    Args:
        active: whether the plugin serves.
        providers: returns those of this process.
    """

    def around(
        original: Callable[..., None],
        logits: torch.Tensor,
        cu_seqlen_ks: torch.Tensor,
        cu_seqlen_ke: torch.Tensor,
        raw_topk_indices: torch.Tensor,
        num_rows: int,
        stride0: int,
        stride1: int,
        topk_tokens: int,
    ) -> None:
        chunk = _call.chunk
        if chunk is not None and logits is chunk.logits:
            _call.chunk = None
            providers().load("indexer_topk", UNPAGED)(
                *chunk.inputs,
                topk_tokens,
                rows_per_chunk=num_rows,  # no more memory than the logits would take, which vLLM's chunks bound
                out=raw_topk_indices,
            )
            return None
        given = (logits, cu_seqlen_ks, cu_seqlen_ke, raw_topk_indices, num_rows, stride0, stride1, topk_tokens)
        if not active():
            return original(*given)
        select = default_selector(logits.device, topk_tokens)
        if vllms_is_quicker(logits, select):
            return original(*given)
        # Positions count from the row's first key, as vLLM's do.
        select(logits[:num_rows], cu_seqlen_ks, cu_seqlen_ke, topk_tokens, out=raw_topk_indices)
        return None

    return wrap(original, around)
