"""Attention metadata of a batch in pieces, and its builder: a subclass of vLLM's FlashMLA-sparse builder.

The metadata has the fields that vLLM's MLA layer reads (0.20 to 0.33), and `SparsePiece`s and `DensePiece`s for the
plugin's implementation. A captured batch reads fixed addresses only: vLLM's block table, and `RowOwners`. Nothing here
waits for the device or for torch's threads, which `torch.repeat_interleave` would wake on a host: see
`metadata.owner_of_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from nsa_plugin.backends.common.dense import DensePiece, context_slots, dense_piece, rows_of, to_device
from nsa_plugin.backends.common.paths import MIXED, PROVIDER, SEPARATE, VLLM, path_of
from nsa_plugin.backends.common.token_shard import Share
from nsa_plugin.backends.vllm.cpu.metadata import MLAMetadata, PrefillMetadata, owner_of_rows
from nsa_plugin.backends.vllm.v32.routes import Split, VllmPlanner
from nsa_plugin.backends.vllm.v32.token_shard import Assigned, Copied, OwnRows
from nsa_plugin.decision.plan import Plan

# Head counts that make vLLM's builder (0.20 to 0.29) use one mixed batch of steps and prefills (fewer than 32) or
# separate ones. From 0.30 on the builder keeps the answer in `MIXED_FLAG`.
FEW_HEADS, MANY_HEADS = 1, 128
MIXED_FLAG = "fp8_use_mixed_batch"
FORMS = {MIXED: True, SEPARATE: False}
"""The execution paths that name a variant of vLLM's builder, and whether it is the mixed one."""

Planning = Callable[[], VllmPlanner | None]
"""Returns the planner of this process, or None while stock vLLM serves."""


@dataclass(frozen=True)
class SparsePiece:
    """Query tokens that attend to selected tokens, in one call.

    Attributes:
        plan: the decision.
        path: its execution path.
        rows: the query tokens in the batch: a slice, or int64 [n] if they are not contiguous.
        request_of_row: int32 [n], the block table row of each, -1 for padding; None for vLLM's calls.
        stock: vLLM's metadata of these query tokens; None for the plugin's kernels.
        share: this rank's query tokens, if the batch reshards; vLLM's call and metadata are not used then.
        copied: this rank's query tokens that attend over a bf16 copy of an fp8 cache.
    """

    plan: Plan
    path: str
    rows: slice | torch.Tensor
    request_of_row: torch.Tensor | None = None
    stock: Any = None
    share: Share | None = None
    copied: tuple[Copied, ...] = ()


@dataclass(kw_only=True)
class PlannedMetadata(MLAMetadata):
    """A batch's metadata. `num_decode_tokens` counts all query tokens before the first dense request, of any phase.

    Attributes:
        decode: vLLM only checks that it is not None; with context parallelism it is, and vLLM reads `seq_lens`.
        mqa: pieces of `forward_mqa`, in order; they cover its query tokens. Steps and prefills are one piece if vLLM's
            call attends both.
        mha: dense pieces of `forward_mha`.
        tail: sparse piece of `forward_mha`: prefills that select, after the first dense one.
    """

    mqa: tuple[SparsePiece, ...]
    mha: tuple[DensePiece, ...]
    tail: SparsePiece | None
    decode: str | None = "nsa_plugin"


class RowOwners:
    """The request of each query token of a batch, at a fixed address.

    Every batch copies it to the device, because vLLM's sleep mode drops the memory that its builders allocate. The
    copy on the host is kept: consecutive decode steps mostly need the same one.

    Args:
        rows: most query tokens of a batch.
    """

    def __init__(self, rows: int, device: torch.device | str) -> None:
        self._on_device = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self._on_host = torch.empty(0, dtype=torch.int32)
        self._of: tuple[tuple[int, ...], int] = (), 0

    def of(self, split: Split) -> torch.Tensor:
        """Return int32 [num_rows] on the device: the request of each query token, -1 for padding."""
        of = split.starts, split.num_rows
        if of != self._of:
            owners = np.full(split.num_rows, -1, dtype=np.int32)
            owners[: split.starts[-1]] = owner_of_rows(split.starts)
            on_host = torch.from_numpy(owners)
            self._on_host = on_host.pin_memory() if self._on_device.is_cuda else on_host
            self._of = of
        return self._on_device[: split.num_rows].copy_(self._on_host, non_blocking=True)


def planned_builder(stock: type, planning: Planning) -> type:
    """Make a subclass of vLLM's builder with the plugin's `build`; it acts as vLLM's while `planning()` is None."""

    class Builder(stock):
        # Later draft steps build anew: an update in place would change vLLM's fields only.
        supports_draft_decode_metadata_update = False

        def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any, **more: Any) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device, **more)
            self.nsa_plugin = planner = planning()
            if planner is None:
                return
            # From 0.28 on vLLM counts requests of up to 256 query tokens as steps here; the plans' steps are shorter.
            self.reorder_batch_threshold = planner.step_tokens
            if planner.dcp is not None:
                planner.dcp = planner.dcp.interleaved(int(vllm_config.parallel_config.cp_kv_cache_interleave_size))
            self.nsa_plugin_owners = RowOwners(most_rows(vllm_config, planner), device)
            self.nsa_plugin_last: tuple[Split, PlannedMetadata] | None = None

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            planner: VllmPlanner | None = self.nsa_plugin
            if planner is None:
                return super().build(common_prefix_len, common_attn_metadata, fast_build)
            build = super().build

            def stock_metadata(common: Any, path: str) -> Any:
                # Most decode steps come here, and the context manager takes longer than the rest of this.
                if path in FORMS and getattr(self, MIXED_FLAG, None) is not FORMS[path]:
                    with _form(self, FORMS[path]):
                        return build(common_prefix_len, common, fast_build)
                return build(common_prefix_len, common, fast_build)

            split, owners = planner.split(common_attn_metadata), self.nsa_plugin_owners
            last = self.nsa_plugin_last
            # The planner returns the last batch's split again for steps alone with the same query tokens.
            if last is not None and last[0] is split:
                return steps_again(*last, common_attn_metadata, owners, stock_metadata)
            page_size = int(self.kv_cache_spec.block_size)
            made = assemble(split, planner, common_attn_metadata, page_size, owners, stock_metadata)
            self.nsa_plugin_last = (split, made) if split.only_steps and split.steps_assigned is None else None
            return made

    Builder.__name__ = Builder.__qualname__ = f"Planned{stock.__name__}"
    return Builder


def most_rows(vllm_config: Any, planner: VllmPlanner) -> int:
    """Return the most query tokens of a batch, padding for a CUDA graph included."""
    scheduler = vllm_config.scheduler_config
    captured = getattr(vllm_config.compilation_config, "max_cudagraph_capture_size", None) or 0
    return max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * planner.step_tokens, int(captured))


@contextmanager
def _form(builder: Any, mixed: bool) -> Iterator[None]:
    """Make vLLM's builder use a variant of a batch over an fp8 cache."""
    heads = FEW_HEADS if mixed else MANY_HEADS
    name, value = (MIXED_FLAG, mixed) if hasattr(builder, MIXED_FLAG) else ("num_heads", heads)
    before = getattr(builder, name)
    setattr(builder, name, value)
    try:
        yield
    finally:
        setattr(builder, name, before)


def assemble(
    split: Split,
    planner: VllmPlanner,
    common: Any,
    page_size: int,
    row_owners: RowOwners,
    stock_metadata: Callable[[Any, str], Any],
) -> PlannedMetadata:
    """Assemble the metadata of a split batch.

    Args:
        common: vLLM's CommonAttentionMetadata of the batch.
        page_size: tokens per page of the block table.
        row_owners: of the builder; captured graphs keep its address.
        stock_metadata: makes vLLM's metadata from (a part's CommonAttentionMetadata, its execution path).
    """
    layout, table = planner.model.kv_layout, common.block_table_tensor

    def piece(
        plan: Plan, rows: slice | torch.Tensor, requests: Sequence[int], given: Assigned | None, keep: bool = False
    ) -> SparsePiece:
        path = path_of(VLLM, layout, plan).path
        if given is not None:
            assert planner.exchange is not None
            most = planner.max_model_len
            copied = _copied(given.own, table, page_size, most) if plan.dequantize_kv else ()
            share = Share(planner.exchange, given.partition, plan.token_shard_chunks)
            return SparsePiece(plan, path, rows, row_owners.of(split)[rows], share=share, copied=copied)
        if path == PROVIDER:
            return SparsePiece(plan, path, rows, row_owners.of(split)[rows])
        whole = len(requests) == split.num_requests
        stock = stock_metadata(common if whole else part_of(common, split, requests), path)
        # vLLM's builder has one buffer for the request of each query token, which the next part overwrites.
        if keep and isinstance(getattr(stock, "req_id_per_token", None), torch.Tensor):
            stock = replace(stock, req_id_per_token=stock.req_id_per_token.clone())
        return SparsePiece(plan, path, rows, stock=stock)

    first_dense, head, behind = split.mha_request, split.head_requests, split.tail_requests
    mqa: list[SparsePiece] = []
    tail = None
    # The part built last may use the buffers of vLLM's builder, so a batch of one part equals vLLM's.
    if behind:
        assert split.sparse is not None
        tail = piece(split.sparse, rows_of(split.starts, behind, table), behind, split.tail_assigned, keep=True)
    together = _by_one_call(split, planner)
    if head:
        assert split.sparse is not None
        rows = slice(0 if together else split.step_rows, split.mha_row)
        requests: Sequence[int] = range(first_dense) if together else head
        keep = split.steps is not None and not together
        mqa.append(piece(split.sparse, rows, requests, split.head_assigned, keep=keep))
    if split.steps is not None and not together:
        steps = range(split.num_steps)
        mqa.insert(0, piece(split.steps, slice(0, split.step_rows), steps, split.steps_assigned))
    dense = tuple(
        dense_piece(
            part.plan,
            part.requests,
            part.q_lens,
            part.kv_lens,
            rows=rows_of(split.starts, part.requests, table),
            block_table=table,
            page_size=page_size,
            shard=planner.shard,
        )
        for part in split.dense
    )
    prefill = None
    if split.num_steps < split.num_requests:
        bounds = split.starts[split.num_steps :]
        longest = max(end - start for start, end in pairwise(bounds))
        prefill = PrefillMetadata(use_dense_mha=bool(dense), max_query_len=longest, chunked_context="nsa_plugin")
    return PlannedMetadata.of(
        common,
        num_decodes=first_dense,
        num_prefills=split.num_requests - first_dense,
        num_decode_tokens=split.mha_row,
        topk_tokens=planner.model.index_topk,
        prefill_max_seq_len=common.max_seq_len,
        prefill=prefill,
        mqa=tuple(mqa),
        mha=dense,
        tail=tail,
        decode="nsa_plugin" if planner.shard is None else None,
    )


def steps_again(
    split: Split,
    last: PlannedMetadata,
    common: Any,
    row_owners: RowOwners,
    stock_metadata: Callable[[Any, str], Any],
) -> PlannedMetadata:
    """Assemble the metadata of steps alone from that of the last batch, which had the same split.

    Most decode steps come here: what depends on the split alone is taken over, since the GPU waits for the host between
    the steps of a small model.
    """
    (piece,) = last.mqa
    if piece.path == PROVIDER:
        row_owners.of(split)  # at the address that the piece has
    else:
        piece = SparsePiece(piece.plan, piece.path, piece.rows, stock=stock_metadata(common, piece.path))
    return PlannedMetadata.of(
        common,
        num_decodes=last.num_decodes,
        num_prefills=0,
        num_decode_tokens=last.num_decode_tokens,
        topk_tokens=last.topk_tokens,
        prefill_max_seq_len=common.max_seq_len,
        prefill=None,
        mqa=(piece,),
        mha=(),
        tail=None,
        decode=last.decode,
    )


def _by_one_call(split: Split, planner: VllmPlanner) -> bool:
    """Whether vLLM's call attends the steps and the prefills of `forward_mqa` at once, as it does without the plugin.

    In two calls each result would be copied into the batch's: with 128 heads, a gigabyte per layer of a long prefill.
    """
    if split.steps is None or split.sparse is None or not split.head_requests:
        return False
    if planner.shard is not None or split.steps_assigned is not None or split.head_assigned is not None:
        return False
    return planner.calls_vllm(split.steps) and planner.calls_vllm(split.sparse)


def part_of(common: Any, split: Split, requests: Sequence[int]) -> Any:
    """Make vLLM's CommonAttentionMetadata of some requests of a batch, as if there were no others."""
    q_lens = [split.starts[request + 1] - split.starts[request] for request in requests]
    starts = torch.tensor([0, *accumulate(q_lens)], dtype=torch.int32)
    on_host = _places(requests)
    chosen = on_host if isinstance(on_host, slice) else to_device(on_host, common.seq_lens)
    rows = rows_of(split.starts, requests, common.slot_mapping)
    changed: dict[str, Any] = {
        "query_start_loc": to_device(starts, common.query_start_loc),
        "query_start_loc_cpu": starts,
        "num_reqs": len(requests),
        "num_actual_tokens": sum(q_lens),
        "max_query_len": max(q_lens),
        "slot_mapping": common.slot_mapping[rows],
        "seq_lens": common.seq_lens[chosen],
        "block_table_tensor": common.block_table_tensor[chosen],
    }
    # Other fields depend on the version: a value per request or query token, or a value derived from all of them.
    for name in {field.name for field in fields(common)} - set(changed):
        value = getattr(common, name)
        if name.endswith("_cache"):
            changed[name] = None
        elif isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == common.num_reqs:
            changed[name] = value[chosen if value.is_cuda else on_host]
        elif isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == split.num_rows:
            changed[name] = value[rows]
    return replace(common, **changed)


def _copied(own: Sequence[OwnRows], block_table: torch.Tensor, page_size: int, most: int) -> tuple[Copied, ...]:
    """Group this rank's query tokens so that one copy has the contexts of a group.

    Args:
        most: context tokens of a group of several requests.
    """
    parts: list[list[OwnRows]] = []
    for rows in own:
        if parts and sum(one.context for one in parts[-1]) + rows.context <= most:
            parts[-1].append(rows)
        else:
            parts.append([rows])
    found: list[Copied] = []
    first = 0
    for part in parts:
        contexts = [rows.context for rows in part]
        begins = np.asarray(list(accumulate(contexts[:-1], initial=0)), dtype=np.int32)
        offsets = to_device(torch.from_numpy(np.repeat(begins, [rows.count for rows in part])), block_table)
        slots = context_slots([rows.request for rows in part], contexts, block_table, page_size)
        found.append(Copied(slice(first, first + len(offsets)), slots, offsets))
        first += len(offsets)
    return tuple(found)


def _places(requests: Sequence[int]) -> slice | torch.Tensor:
    """Return the places of requests in the batch, as an index: a slice, or int64 on the host."""
    if requests[-1] - requests[0] + 1 == len(requests):
        return slice(requests[0], requests[-1] + 1)
    return torch.tensor(list(requests))
