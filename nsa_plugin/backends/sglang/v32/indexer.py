"""A prefill's selection under a Plan: the logits of no more rows at once than the plan says, none of another request.

SGLang's `Indexer._get_topk_ragged` scores every query row against the keys of every request, in one buffer of
[rows, all keys] or, where that is over a budget, in chunks of as many columns. `wrap_topk_ragged` gives the plan's
provider the requests' ranges instead, so that a chunk is no wider than its longest request, and hands back what
SGLang's `topk_transform` would have:

    unfused            positions within the request
    fused, PAGED       page_table_1[request, position]: slots of the cache
    fused, RAGGED      position + topk_indices_offset[row]: rows of the copy of the batch's keys

each -1 behind the last, in rows of index_topk. Which members of a tie are taken, and the order in a row, may differ.

Where a prefill's plan trades heads for tokens (`token_shard`), rows of other ranks are neither scored nor selected for:
they are -1, in a buffer of SGLang's too, whatever it held.

The original function runs instead, untouched, where the batch has no plan of the plugin's or one that selects nothing;
where --{nsa,dsa}-topk-backend is not sgl-kernel (its tie-breaking is asked for); where the model forces its first or
last tokens into the selection; under context parallelism; and where the lengths on the host do not add up to the rows.
Decode, verify and draft steps (`_get_topk_paged`) are SGLang's own: where such a step's ranks trade heads for tokens,
each still selects for all rows, and attention reads its own rows of the selection.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.common.token_shard import Share
from nsa_plugin.decision.plan import IndexerMode, Plan
from nsa_plugin.decision.shapes import Phase
from nsa_plugin.kernels.topk import Request
from nsa_plugin.libraries.registry import REFERENCE
from nsa_plugin.parallel.partition import requests as requests_within
from nsa_plugin.patches.ledger import wrap

ATTRIBUTE = "nsa_plugin_selection"


@dataclass(frozen=True)
class Selection:
    """What the indexer needs of the backend.

    Attributes:
        plan: the batch's.
        pool: SGLang's pool, which holds the indexer's keys.
        providers: where the plan's provider comes from.
        share: this rank's rows, where heads are traded for tokens.
    """

    plan: Plan
    pool: Any
    providers: Providers
    share: Share | None = None


def attach(metadata: Any, selection: Selection) -> None:
    """Hand the selection on with SGLang's indexer metadata, which is frozen."""
    object.__setattr__(metadata, ATTRIBUTE, selection)


def wrap_topk_ragged(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `Indexer._get_topk_ragged`. 0.5.13 added `topk_result`, a buffer of [rows, index_topk] of -1 to be filled."""

    def around(
        original: Callable[..., Any],
        indexer: Any,
        enable_dual_stream: bool,
        forward_batch: Any,
        layer_id: int,
        q_fp8: torch.Tensor,
        weights: torch.Tensor,
        metadata: Any,
        *topk_result: torch.Tensor | None,
        **named: torch.Tensor | None,
    ) -> Any:
        selection: Selection | None = getattr(metadata, ATTRIBUTE, None)
        requests = None if selection is None else _covered(selection, indexer, metadata)
        if selection is None or requests is None:
            given = (enable_dual_stream, forward_batch, layer_id, q_fp8, weights, metadata)
            return original(indexer, *given, *topk_result, **named)
        out = next(iter((*topk_result, *named.values())), None)
        if out is None:
            out = torch.full((q_fp8.shape[0], indexer.index_topk), -1, dtype=torch.int32, device=q_fp8.device)
        return _select(selection, indexer, layer_id, q_fp8, weights, metadata, requests, out)

    return wrap(original, around)


def _covered(selection: Selection, indexer: Any, metadata: Any) -> list[Request] | None:
    """The requests' rows and keys, or None where the original function has to run.

    Of a share, what lies in its rows; rows count from the first of them.
    """
    plan = selection.plan
    if plan.phase is not Phase.EXTEND or plan.indexer.mode is not IndexerMode.TOPK:
        return None
    backend = getattr(metadata, "topk_backend", None)  # before 0.5.13 there was sgl-kernel alone
    if backend is not None and not backend.is_sgl_kernel():
        return None
    if getattr(indexer, "num_init_tokens", 0) or getattr(indexer, "num_local_tokens", 0):
        return None
    if any(getattr(indexer, name, False) for name in ("nsa_enable_prefill_cp", "dsa_enable_prefill_cp")):
        return None
    rows = metadata.get_indexer_kvcache_range()[0].shape[0]
    q_lens = _extend_lens(metadata)
    kv_lens = [int(length) for length in metadata.get_indexer_seq_len_cpu().tolist()]
    if rows == 0 or sum(q_lens) != rows or len(q_lens) != len(kv_lens):
        return None
    if selection.share is not None and selection.share.partition.total != rows:
        return None
    return requests_within(_own_rows(selection, rows), q_lens, kv_lens)


def _own_rows(selection: Selection, rows: int) -> slice:
    """The rows that this rank selects for, of so many."""
    return slice(0, rows) if selection.share is None else selection.share.rows


def _extend_lens(metadata: Any) -> list[int]:
    """Query rows of each request."""
    renamed = hasattr(metadata, "get_dsa_extend_len_cpu")
    lens = metadata.get_dsa_extend_len_cpu() if renamed else metadata.get_nsa_extend_len_cpu()
    return [int(length) for length in lens]


def _select(
    selection: Selection,
    indexer: Any,
    layer_id: int,
    q_fp8: torch.Tensor,
    weights: torch.Tensor,
    metadata: Any,
    requests: list[Request],
    out: torch.Tensor,
) -> torch.Tensor:
    plan, topk = selection.plan.indexer, indexer.index_topk
    ks, ke = metadata.get_indexer_kvcache_range()
    own = _own_rows(selection, ks.shape[0])
    if selection.share is not None:
        out.fill_(-1)
        if own.start == own.stop:
            return out
    seq_lens = metadata.get_indexer_seq_len_cpu()
    # Since 0.5.23 the keys' pages may differ from the attention's.
    table = getattr(metadata, "get_logical_page_table", None) or metadata.get_page_table_64
    total, longest = sum(seq_lens.tolist()), max(seq_lens.tolist())
    keys = selection.pool.get_index_k_scale_buffer(layer_id, metadata.get_indexer_seq_len(), table(), total, longest)
    k, k_scale = keys[0].view(torch.float8_e4m3fn), keys[1].view(torch.float32).squeeze(-1)

    arguments: dict[str, Any] = {"rows_per_chunk": plan.rows_per_chunk}
    if plan.provider != REFERENCE:
        arguments["requests"] = requests
    score = selection.providers.load("indexer_topk", plan.provider)
    unfused = not _fused(metadata)
    # A pipeline's receive may run beside the kernel, which then has to leave it an SM.
    with getattr(indexer, "_with_real_sm_count", nullcontext)():
        positions = score(
            q_fp8[own],
            k,
            k_scale,
            weights[own].squeeze(-1),
            ks[own],
            ke[own],
            topk,
            out=out[own] if unfused else None,
            **arguments,
        )
    if not unfused:
        out[own] = _transformed(selection, metadata, positions, own)
    return out


def _transformed(selection: Selection, metadata: Any, positions: torch.Tensor, own: slice) -> torch.Tensor:
    """int32 [rows, topk]: slots or rows of the copied keys, as SGLang's fused transform gives them."""
    attention = metadata.attn_metadata
    if metadata.topk_transform_method.name == "RAGGED":
        ragged = selection.providers.helper("index_transform_ragged")
        return ragged(positions, attention.topk_indices_offset[own])  # type: ignore[no-any-return]
    paged = selection.providers.helper("index_transform_paged")
    request = metadata.get_token_to_batch_idx()[own]
    return paged(positions, attention.page_table_1, page_size=1, row_to_request=request)  # type: ignore[no-any-return]


def _fused(metadata: Any) -> bool:
    """Whether the selection is transformed here rather than before attention."""
    if getattr(metadata, "force_unfused_topk", False):
        return False
    from sglang.srt.environ import envs

    name = "SGLANG_DSA_FUSE_TOPK" if hasattr(envs, "SGLANG_DSA_FUSE_TOPK") else "SGLANG_NSA_FUSE_TOPK"
    setting = getattr(envs, name)
    return bool(setting.get())
