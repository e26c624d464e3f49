"""vLLM's indexer with plans: which query tokens it selects for, and how much memory its logits take.

vLLM's operator `sparse_attn_indexer` stores the new keys and selects for the query tokens in its metadata. The plugin
changes it in three places, and how a prefill's selection is made (`prefill_selection`):

- `prefill_chunks`: chunks leave out requests that attend densely (their selection stays -1 and is not read) and, if
  the batch reshards, query tokens of other ranks. A chunk's logits fit the planner's budget, which follows the free
  memory.
- `planned_indexer_builder`: the planner splits the batch before vLLM makes chunks. Decode steps whose logits,
  [query tokens, max_model_len], exceed the budget are removed from vLLM's metadata and get a `StepSelection`. This
  depends on the number of query tokens alone, so a captured batch and its replays agree. In DeepSeek-V4's compressed
  cache an entry covers `compress_ratio` tokens, and the query token at position p sees (p + 1) // ratio entries.
- `wrap_indexer`: runs vLLM's function, then selects for such steps in pieces. From 0.26 on vLLM's function skips
  *every* prefill of a batch whose metadata says that dense attention runs. If only some prefills are dense, the
  name of that metadata is withheld (otherwise vllm #52512 happens).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import torch

from nsa_plugin.backends.common.dense import to_device
from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.vllm.cpu.metadata import owner_of_rows
from nsa_plugin.backends.vllm.startup.arrival import Arrival, arrival_of
from nsa_plugin.backends.vllm.v32.metadata import PlannedMetadata, Planning, most_rows
from nsa_plugin.backends.vllm.v32.portable import select
from nsa_plugin.backends.vllm.v32.prefill_selection import without_logits
from nsa_plugin.backends.vllm.v32.routes import Split, VllmPlanner, host_lengths
from nsa_plugin.backends.vllm.v32.steps import StepSelection, select_steps
from nsa_plugin.backends.vllm.v32.token_shard import OwnRows
from nsa_plugin.decision.indexer import is_unpaged
from nsa_plugin.patches.ledger import wrap

ATTRIBUTE = "nsa_plugin_steps"
NO_LOGITS = "nsa_plugin_no_logits"
"""Attribute of a batch's metadata: its prefills are selected for without logits."""
DENSE_METADATA = "dense_mha_metadata_layer_name"
CANDIDATES = "candidate_blocks"

Chunk = tuple[slice, slice]
"""(requests of the batch, query tokens counted from the first of those requests)."""


def prefill_chunks(original: Callable[..., list[Chunk]], planning: Planning) -> Callable[..., list[Chunk]]:
    """For `split_indexer_prefill_chunks` (0.20 to 0.29), and for the builder's method of 0.30 on."""

    def around(
        original: Callable[..., list[Chunk]],
        seq_lens_cpu: torch.Tensor,
        query_lens_cpu: torch.Tensor,
        workspace_size: int,
        max_logits_bytes: int,
        request_offset: int = 0,
    ) -> list[Chunk]:
        planner = planning()
        split = None if planner is None else planner.current
        count = len(seq_lens_cpu)
        if planner is None or split is None or split.num_requests != request_offset + count:
            return original(seq_lens_cpu, query_lens_cpu, workspace_size, max_logits_bytes, request_offset)
        chunks: list[Chunk] = []
        own = own_rows(split)
        dense: Container[int] = () if planner.scores_dense else split.dense_requests
        for first, end in runs(split, query_lens_cpu.tolist(), request_offset, dense):
            some = slice(first, end)
            given = (seq_lens_cpu[some], query_lens_cpu[some], workspace_size, planner.logits_budget)
            if own is None or request_offset + first < split.num_steps:
                chunks += original(*given, request_offset + first)
            else:
                chunks += _own_chunks(original, given, request_offset + first, own)
        return chunks

    return wrap(original, around)


def own_rows(split: Split) -> dict[int, OwnRows] | None:
    """This rank's query tokens by prefill; None if no prefill reshards."""
    given = [one for one in (split.head_assigned, split.tail_assigned) if one is not None]
    return {rows.request: rows for one in given for rows in one.own} if given else None


def _own_chunks(
    original: Callable[..., list[Chunk]], given: tuple[Any, ...], first: int, own: dict[int, OwnRows]
) -> list[Chunk]:
    """Return the chunks of this rank's query tokens in contiguous requests, from `first` on.

    This rank's query tokens are contiguous, so only a chunk's first request may begin after its first query token. The
    chunk is shifted by that much.
    """
    kv_lens, q_lens, *limits = given
    places = [place for place in range(len(q_lens)) if first + place in own]
    if not places:
        return []
    counts = torch.tensor([own[first + place].count for place in places], dtype=q_lens.dtype)
    chunks = original(kv_lens[places[0] : places[-1] + 1], counts, *limits, first + places[0])
    found: list[Chunk] = []
    for requests, rows in chunks:
        begin = own[requests.start].first
        found.append((requests, slice(begin + rows.start, begin + rows.stop)))
    return found


def runs(split: Split, q_lens: list[int], offset: int, dense: Container[int]) -> list[tuple[int, int]]:
    """(first, end) of contiguous requests that select: those with query tokens, but for the dense ones.

    If a prefill reshards, steps that vLLM's indexer takes for prefills form a separate run.

    Args:
        q_lens: query tokens of the requests from `offset` on.
        dense: the requests of the batch that need no selection.
    """
    apart = own_rows(split) is not None
    selects = [
        (rows > 0 and offset + place not in dense, apart and offset + place < split.num_steps)
        for place, rows in enumerate(q_lens)
    ]
    found: list[tuple[int, int]] = []
    place = 0
    for (chosen, _), group in groupby(selects):
        end = place + len(list(group))
        if chosen:
            found.append((place, end))
        place = end
    return found


def planned_indexer_builder(stock: type, planning: Planning) -> type:
    """Make a subclass of vLLM's indexer metadata builder that splits the batch first."""
    if stock.build.__module__ == __name__:  # type: ignore[attr-defined]
        return stock  # V4's backend inherits V3.2's builder

    class Builder(stock):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.nsa_plugin: VllmPlanner | None = planning()
            self.nsa_plugin_ratio = int(getattr(self, "compress_ratio", 1))
            self.nsa_plugin_arrival: Arrival | None = None
            if self.nsa_plugin is not None and self.nsa_plugin_ratio == 1:
                config, names = getattr(self, "vllm_config", None), getattr(self, "layer_names", ())
                self.nsa_plugin_arrival = arrival_of(config, names)
            if self.nsa_plugin is None or not self._nsa_plugin_counts():
                return
            rows = most_rows(self.vllm_config, self.nsa_plugin)
            self.nsa_plugin_lengths = torch.zeros(rows, dtype=torch.int32, device=self.device)
            self.nsa_plugin_table: torch.Tensor | None = None

        def _nsa_plugin_counts(self) -> bool:
            """Whether a query token sees another number of keys than of tokens: the keys are counted in buffers."""
            return self.nsa_plugin is not None and (self.nsa_plugin_ratio > 1 or self.nsa_plugin.model.dcp_size > 1)

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            planner = self.nsa_plugin
            split = None if planner is None else planner.split(common_attn_metadata)
            # Metadata of draft steps, which belong to the batch before, is built fast.
            arrival = None if fast_build else self.nsa_plugin_arrival
            if planner is not None and split is not None and arrival is not None:
                names = partial(planner.request_ids, common_attn_metadata)
                kv_lens = partial(host_lengths, common_attn_metadata)
                arrival.batch(names, split.starts, kv_lens, common_attn_metadata.block_table_tensor)
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            if planner is None or split is None:
                return metadata
            if own_rows(split) is not None:
                _select_for_own(metadata.prefill)
            if metadata.num_decode_tokens and (planner.portable or over_budget(split)):
                metadata = _without_steps(self, metadata, split, common_attn_metadata)
            if split.sparse is not None and is_unpaged(split.sparse):
                setattr(metadata, NO_LOGITS, True)
            return metadata

    if hasattr(stock, "_split_indexer_prefill_chunks"):
        split_chunks = staticmethod(prefill_chunks(stock._split_indexer_prefill_chunks, planning))
        Builder._split_indexer_prefill_chunks = split_chunks  # type: ignore[attr-defined]
    Builder.__name__ = Builder.__qualname__ = f"Planned{stock.__name__}"
    return Builder


def _select_for_own(prefill: Any) -> None:
    """Change vLLM's prefill metadata so that this rank selects for its query tokens.

    vLLM gathers a chunk's keys if the chunk begins with its first request's first query token; this rank's may begin
    anywhere. Ranks must not select for each other either (`row_shard_sizes`, 0.32 on): nobody reads the result.
    """
    if prefill is None:
        return
    gathered = None
    for chunk in prefill.chunks:
        requests = (chunk.block_table.data_ptr(), chunk.num_reqs)
        chunk.skip_kv_gather = requests == gathered
        gathered = requests
    if getattr(prefill, "row_shard_sizes", None) is not None:
        prefill.row_shard_sizes = None


def over_budget(split: Split) -> bool:
    """Whether the logits of all steps together exceed what the plan allows."""
    return split.steps is not None and 0 < split.steps.indexer.rows_per_chunk < split.step_rows


def _without_steps(builder: Any, metadata: Any, split: Split, common: Any) -> Any:
    """Return vLLM's metadata with prefills to select for only, and with the steps' `StepSelection` attached.

    It still counts the steps' query tokens: DeepSeek-V4's layers select every key of a batch with short contexts by
    themselves (0.27 on), for as many query tokens as it counts; and ranks that share a prefill's selection count from
    its first query token.
    """
    assert split.steps is not None
    # vLLM's indexer still selects for steps that it takes for prefills because their query tokens differ in number.
    requests, rows = int(metadata.num_decodes), int(metadata.num_decode_tokens)
    starts = split.starts[: requests + 1]
    lengths, table = common.seq_lens[:requests], common.block_table_tensor[:requests]
    dcp = builder.nsa_plugin.dcp
    if builder._nsa_plugin_counts():
        seen, pages = _by_token(starts, lengths, table)
        # Each query token sees keys up to its own, of which a rank holds those of its turns.
        seen = seen.clamp(min=0) if dcp is None else dcp.shard.lengths(seen.clamp(min=0))
        lengths, table = _in_buffers(builder, rows, seen // builder.nsa_plugin_ratio, pages)
    elif not _equal_steps(starts, rows):  # never captured; a request may have no query token (vllm #51486)
        lengths, table = _by_token(starts, lengths, table)
        rows = len(lengths)
    changed = replace(metadata, num_decodes=0, decode=None)
    setattr(changed, ATTRIBUTE, StepSelection(split.steps, rows, lengths, table, dcp))
    return changed


def _equal_steps(starts: Sequence[int], rows: int) -> bool:
    """Whether all requests have the same number of query tokens, except for padding at the end, which has none."""
    q_lens = [end - start for start, end in pairwise(starts)]
    live, each, requests = sum(count > 0 for count in q_lens), q_lens[0], len(q_lens)
    return q_lens == [each] * live + [0] * (requests - live) and rows == requests * (each or rows // requests)


def _by_token(starts: Sequence[int], lengths: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the context length and the block table row of each query token instead of each request."""
    owner = owner_of_rows(starts).astype(np.int64)
    behind = np.asarray(starts[1:])[owner] - 1 - np.arange(starts[0], starts[-1])
    of_token = to_device(torch.from_numpy(owner), table)
    return lengths[of_token] - to_device(torch.from_numpy(behind.astype(np.int32)), table), table[of_token]


def _in_buffers(
    builder: Any, rows: int, lengths: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy lengths and table rows into the builder's buffers, whose addresses captured graphs keep.

    Padding, up to `rows`, sees no key.
    """
    if builder.nsa_plugin_table is None:
        shape = (len(builder.nsa_plugin_lengths), table.shape[1])
        builder.nsa_plugin_table = torch.zeros(shape, dtype=torch.int32, device=table.device)
    kept, pages = builder.nsa_plugin_lengths[:rows], builder.nsa_plugin_table[:rows, : table.shape[1]]
    kept.zero_()
    kept[: len(lengths)], pages[: len(lengths)] = lengths, table
    return kept, pages


def wrap_indexer(
    original: Callable[..., Any],
    metadata: Callable[[], Any],
    providers: Callable[[], Providers],
    portable: Callable[[], bool] = lambda: False,
) -> Any:
    """For vLLM's function `sparse_attn_indexer` and the implementation of its operator of that name.

    Args:
        metadata: returns `forward_context.attn_metadata`: a dict by layer, or None in the profiling run.
        providers: returns those of this process.
        portable: whether the plugin selects for all query tokens (`portable.select`).
    """
    signature = inspect.signature(original)
    names = list(signature.parameters)
    place = names.index("k_cache_prefix")
    dense_place = names.index(DENSE_METADATA) if DENSE_METADATA in names else None
    default = "" if dense_place is None else signature.parameters[DENSE_METADATA].default
    candidates_place = names.index(CANDIDATES) if CANDIDATES in names else len(names)

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batch = metadata()
        if not isinstance(batch, dict):
            return original(*args, **kwargs)
        prefix = args[place] if len(args) > place else kwargs["k_cache_prefix"]
        own = batch.get(getattr(prefix, "value", prefix))
        steps: StepSelection | None = getattr(own, ATTRIBUTE, None)
        # Every layer comes here, and binding all arguments takes longer than the rest.
        if portable():
            return select(_by_name(signature, args, kwargs), own, steps, providers())
        withheld, named = args, kwargs
        if dense_place is not None:
            name = args[dense_place] if len(args) > dense_place else kwargs.get(DENSE_METADATA, default)
            if name and not all_dense(batch.get(getattr(name, "value", name))):
                withheld, named = _with(args, kwargs, dense_place, DENSE_METADATA, "")
        # DeepSeek-V4.1's indexer reads the logits for its candidates.
        candidates = args[candidates_place] if len(args) > candidates_place else kwargs.get(CANDIDATES)
        with without_logits() if candidates is None and getattr(own, NO_LOGITS, False) else nullcontext():
            result = original(*withheld, **named)
        if steps is not None and steps.rows:
            select_steps(steps, _by_name(signature, args, kwargs), providers())
        return result

    return wrap(original, around)


def all_dense(metadata: Any) -> bool:
    """Whether no query token of a batch selects, by the metadata of its attention."""
    return isinstance(metadata, PlannedMetadata) and not metadata.mqa and metadata.tail is None


def _with(
    args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with another value for one of them."""
    if len(args) > place:
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: value}


def _by_name(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments
