"""Top-k selection of a prefill with a plan: each request against its keys only, in chunks of the plan's size.

SGLang's `Indexer._get_topk_ragged` scores every query token against the keys of all requests, in one buffer of
[query tokens, all keys] or, above a budget, in chunks with as many columns. `wrap_topk_ragged` gives the plan's
provider the range of each request instead, so that a chunk is no wider than its longest request. It returns what
SGLang's `topk_transform` would:

    unfused            positions within the request
    fused, PAGED       page_table_1[request, position]: slots of the cache
    fused, RAGGED      position + topk_indices_offset[row]: rows of the copy of the batch's keys

Each row has index_topk entries, padded with -1. The choice among ties and the order within a row may differ.

If a prefill's plan reshards (`token_shard`), this rank does not score or select for query tokens of other ranks, and if
the batch is split (`split`), no rank does for dense ones. Their selection is -1, also in a buffer that SGLang passes.

The original function runs unchanged if the batch has no plan, or one without a selection; if --{nsa,dsa}-topk-backend
is not sgl-kernel (the user asked for its tie-breaking); if the model forces its first or last tokens into the
selection; with context parallelism; and if the lengths on the host do not add up to the query tokens. Decode, verify
and draft steps (`_get_topk_paged`) are left to SGLang: if such a step reshards, each rank still selects for all query
tokens, and attention reads the selection of this rank's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.common.token_shard import Share
from nsa_plugin.backends.sglang.startup.model import variable_of
from nsa_plugin.backends.sglang.v32.split import SplitBatch
from nsa_plugin.decision.plan import IndexerMode, Plan
from nsa_plugin.decision.shapes import Phase
from nsa_plugin.errors import PatchError
from nsa_plugin.kernels.topk import Request
from nsa_plugin.libraries.registry import REFERENCE
from nsa_plugin.parallel.partition import requests as requests_within
from nsa_plugin.patches.ledger import TURN_OFF, wrap

ATTRIBUTE = "nsa_plugin_selection"


class Ranges(NamedTuple):
    """What the layers of a batch select from; nothing here depends on the layer.

    Attributes:
        of: SGLang's attention metadata of the batch.
        requests: query tokens of each request and its keys; None: SGLang's own function must run.
        total, longest: context tokens of all requests, and of the longest.
        fused: see `is_fused`.
    """

    of: Any
    requests: list[Request] | None
    total: int = 0
    longest: int = 0
    fused: bool = True


@dataclass(eq=False)
class Selection:
    """State that the indexer needs from the backend, for all layers of a batch.

    Attributes:
        plan: of the batch.
        pool: SGLang's pool, which holds the indexer's keys.
        providers: loads the plan's provider.
        share: this rank's query tokens, if the batch reshards.
        split: the batch, if its short prompts attend densely; they have no selection.
        portable: whether SGLang has no kernels for a selection, so that nothing may be left to it.
    """

    plan: Plan
    pool: Any
    providers: Providers
    share: Share | None = None
    split: SplitBatch | None = None
    portable: bool = False
    _ranges: Ranges | None = None

    def ranges(self, indexer: Any, metadata: Any) -> Ranges:
        """Return what this batch's layers select from; found in the first of them.

        Args:
            indexer: of the layer. All of a model's are configured alike.
            metadata: SGLang's indexer metadata, made for each layer from that of the batch.
        """
        known = self._ranges
        if known is None or known.of is not metadata.attn_metadata:
            known = self._ranges = _ranges(self, indexer, metadata)
        return known


def attach(metadata: Any, selection: Selection) -> None:
    """Attach the selection to SGLang's indexer metadata, a frozen dataclass."""
    object.__setattr__(metadata, ATTRIBUTE, selection)


def wrap_topk_ragged(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Indexer._get_topk_ragged`. 0.5.13 added `topk_result`, a buffer [tokens, index_topk] of -1 to fill."""

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
        ranges = None if selection is None else selection.ranges(indexer, metadata)
        if selection is None or ranges is None or ranges.requests is None:
            if selection is not None and selection.portable and q_fp8.shape[0]:
                raise PatchError(f"SGLang asks for a selection that the portable path lacks. {TURN_OFF}")
            given = (enable_dual_stream, forward_batch, layer_id, q_fp8, weights, metadata)
            return original(indexer, *given, *topk_result, **named)
        out = next(iter((*topk_result, *named.values())), None)
        return _select(selection, ranges, indexer, layer_id, q_fp8, weights, metadata, out)

    return wrap(original, around)


def _ranges(selection: Selection, indexer: Any, metadata: Any) -> Ranges:
    of = metadata.attn_metadata
    if not _supported(selection.plan, indexer, metadata):
        return Ranges(of, None)
    q_lens = _extend_lens(metadata)
    kv_lens = [int(length) for length in metadata.get_indexer_seq_len_cpu().tolist()]
    rows = metadata.get_indexer_kvcache_range()[0].shape[0]
    requests = _covered(selection, rows, q_lens, kv_lens)
    if requests is None:
        return Ranges(of, None)
    return Ranges(of, requests, sum(kv_lens), max(kv_lens), is_fused(metadata))


def _supported(plan: Plan, indexer: Any, metadata: Any) -> bool:
    """Whether the plan has a selection, and nothing is configured that only the original function does."""
    if plan.phase is not Phase.EXTEND or plan.indexer.mode is not IndexerMode.TOPK:
        return False
    backend = getattr(metadata, "topk_backend", None)  # before 0.5.13 there was sgl-kernel alone
    if backend is not None and not backend.is_sgl_kernel():
        return False
    if getattr(indexer, "num_init_tokens", 0) or getattr(indexer, "num_local_tokens", 0):
        return False
    return not any(getattr(indexer, name, False) for name in ("nsa_enable_prefill_cp", "dsa_enable_prefill_cp"))


def _covered(selection: Selection, rows: int, q_lens: list[int], kv_lens: list[int]) -> list[Request] | None:
    """Return the query tokens and keys of each request, or None if the lengths do not add up to the query tokens.

    With a share, only its query tokens count, numbered from the first of them.

    Args:
        rows: query tokens of the batch.
    """
    if rows == 0 or sum(q_lens) != rows or len(q_lens) != len(kv_lens):
        return None
    if selection.share is not None and selection.share.partition.total != rows:
        return None
    if selection.split is not None:
        same = (tuple(q_lens), tuple(kv_lens)) == (selection.split.q_lens, selection.split.kv_lens)
        return selection.split.selecting() if same else None
    share = selection.share
    return requests_within(slice(0, rows) if share is None else share.rows, q_lens, kv_lens)


def _extend_lens(metadata: Any) -> list[int]:
    """Return the query tokens of each request."""
    renamed = hasattr(metadata, "get_dsa_extend_len_cpu")
    lens = metadata.get_dsa_extend_len_cpu() if renamed else metadata.get_nsa_extend_len_cpu()
    return [int(length) for length in lens]


def _select(
    selection: Selection,
    ranges: Ranges,
    indexer: Any,
    layer_id: int,
    q_fp8: torch.Tensor,
    weights: torch.Tensor,
    metadata: Any,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Return int32 [query tokens, topk], padding included: `out`, a buffer of -1, if SGLang gives one."""
    plan, topk = selection.plan.indexer, indexer.index_topk
    ks, ke = metadata.get_indexer_kvcache_range()
    own: slice | torch.Tensor = slice(0, ks.shape[0])
    if selection.split is not None:
        own = selection.split.rows(ks)
    elif selection.share is not None:
        own = selection.share.rows
    elif out is None:
        # Only padding stays as it is here.
        out = torch.empty((len(q_fp8), topk), dtype=torch.int32, device=q_fp8.device)
        out[ks.shape[0] :] = -1
    if out is None:
        out = torch.full((len(q_fp8), topk), -1, dtype=torch.int32, device=q_fp8.device)
    elif selection.split is not None or selection.share is not None:
        out.fill_(-1)
    in_place = isinstance(own, slice)
    if isinstance(own, slice) and own.start == own.stop:
        return out
    # Since 0.5.23 the keys' pages may differ from the attention's.
    table = getattr(metadata, "get_logical_page_table", None) or metadata.get_page_table_64
    keys = selection.pool.get_index_k_scale_buffer(
        layer_id, metadata.get_indexer_seq_len(), table(), ranges.total, ranges.longest
    )
    k, k_scale = keys[0].view(torch.float8_e4m3fn), keys[1].view(torch.float32).squeeze(-1)

    arguments: dict[str, Any] = {"rows_per_chunk": plan.rows_per_chunk}
    if plan.provider != REFERENCE:
        arguments["requests"] = ranges.requests
    score = selection.providers.load("indexer_topk", plan.provider)
    target = out[own] if in_place else None
    # A pipeline's receive may run at the same time and needs an SM.
    with getattr(indexer, "_with_real_sm_count", nullcontext)():
        positions = score(
            q_fp8[own],
            k,
            k_scale,
            weights[own].squeeze(-1),
            ks[own],
            ke[own],
            topk,
            out=None if ranges.fused else target,
            **arguments,
        )
    if ranges.fused:
        positions = _transformed(selection, metadata, positions, own, target)
    if positions is not target:
        out[own] = positions
    return out


def _transformed(
    selection: Selection,
    metadata: Any,
    positions: torch.Tensor,
    own: slice | torch.Tensor,
    target: torch.Tensor | None,
) -> torch.Tensor:
    """Return int32 [rows, topk]: slots or rows of the copied keys, as SGLang's fused transform does.

    Args:
        target: where slots are written; None: in a new tensor.
    """
    attention = metadata.attn_metadata
    if metadata.topk_transform_method.name == "RAGGED":
        ragged = selection.providers.helper("index_transform_ragged")
        return ragged(positions, attention.topk_indices_offset[own])  # type: ignore[no-any-return]
    paged = selection.providers.helper("index_transform_paged")
    request = metadata.get_token_to_batch_idx()[own]
    return paged(positions, attention.page_table_1, page_size=1, row_to_request=request, out=target)  # type: ignore[no-any-return]


def is_fused(metadata: Any) -> bool:
    """Whether the selection is transformed here, not before attention."""
    if getattr(metadata, "force_unfused_topk", False):
        return False
    fuses = variable_of("SGLANG_DSA_FUSE_TOPK")
    return bool(variable_of("SGLANG_NSA_FUSE_TOPK") if fuses is None else fuses)
