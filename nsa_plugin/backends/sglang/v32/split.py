"""Prefills whose short prompts attend densely while the long ones select, under SGLang 0.5.16 and later.

SGLang picks dense (MHA) or absorbed (MLA) attention for a whole forward, before the projections. A split batch runs as
an absorbed one, and the plugin attends each layer's dense query tokens as well (`decision.dispatch.partition` says
which):

    prepare  `forward_absorb_prepare`: SGLang projects all query tokens and stores all indexer keys. The plugin keeps
             the queries of `q_b_proj_forward`; the indexer selects for the sparse query tokens only
    core     `forward_absorb_core`: the plugin attends the dense query tokens with SGLang's dense kernel
             (`_forward_standard_mha`). SGLang stores all KV entries; its attention call gets the sparse query tokens
             only, and zeros stand for the others up to `o_proj`, whose input takes the dense output

Each step fails if SGLang did not run the others: a wrong result cannot go unnoticed. `why_whole` lists the servers on
which no batch is split; by default that is every one (`split_prefill`): less was gained with it where it was timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch

from nsa_plugin.backends.common.dense import DensePiece, dense_piece, keys_and_values, rows_of
from nsa_plugin.backends.sglang.startup.model import argument_of
from nsa_plugin.backends.sglang.v32.routes import SplitExecution
from nsa_plugin.errors import PatchError
from nsa_plugin.kernels.kv_cache import PagedCache
from nsa_plugin.kernels.topk import Request
from nsa_plugin.patches.ledger import TURN_OFF, wrap

ATTRIBUTE = "nsa_plugin_split"
SPLITS = "nsa_plugin_splits"
"""Attribute of the wrapped `forward_absorb_core`."""
FEATURES = {
    "enable_two_batch_overlap": "two-batch overlap runs the layers of two batches at once",
    "enable_lora": "LoRA adapters apply to the query tokens of whole batches",
    "enable_return_indexer_topk": "the selection is returned to users, also for short prompts",
}
AttendPart = Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]
"""(q [n, heads, d_qk], slots [n, topk], their query tokens in the batch) -> [n, heads, d_v]."""
LAYER_FEATURES = {
    "prepare_attention_output_gate": "its attention has an output gate",
    "_kimi_split_gguf_kv_b": "its kv_b_proj is split",
    "learnable_sink_param": "it has attention sinks",
}


@dataclass
class SplitBatch:
    """One split batch on one attention backend.

    Attributes:
        execution: of the sparse part, with the dense parts.
        q_lens, kv_lens: query and context tokens of every request.
        backend: SGLang's attention backend.
        cache: opens a layer's KV cache, by its number.
        read: reads bf16 rows of a cache.
        queries: the layer that is running and its projected queries, from its prepare to its core.
        open: a layer's core is running.
        attended: its sparse query tokens were attended.
    """

    execution: SplitExecution
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    backend: Any
    cache: Callable[[int], PagedCache]
    read: Callable[..., torch.Tensor]
    queries: tuple[Any, torch.Tensor] | None = None
    open: bool = False
    attended: bool = False
    schedule: Any = None
    _rows: slice | torch.Tensor | None = None
    _pieces: tuple[DensePiece, ...] = ()

    def rows(self, like: torch.Tensor) -> slice | torch.Tensor:
        """Return the query tokens that select: a slice, or int64 on `like`'s device."""
        if self._rows is None:
            self._rows = rows_of(self._starts(), self.execution.requests, like)
        return self._rows

    def selecting(self) -> list[Request]:
        """Return the query tokens of each request that selects, counted without the others, and its keys."""
        key_ends, found, first = list(accumulate(self.kv_lens)), [], 0
        for request in self.execution.requests:
            rows, keys = self.q_lens[request], self.kv_lens[request]
            found.append((first, first + rows, key_ends[request] - keys, key_ends[request]))
            first += rows
        return found

    def attend(self, q: torch.Tensor, slots: torch.Tensor, attend_rows: AttendPart) -> torch.Tensor:
        """Attend the query tokens that select: [tokens, heads, d_v], 0 for all others.

        Args:
            q, slots: of the whole batch; q [tokens, heads, d_qk], padding by MLP-sync included.

        Raises:
            PatchError: SGLang calls it outside a layer's `forward_absorb_core`.
        """
        if not self.open:
            raise PatchError(f"SGLang attends a split batch outside forward_absorb_core. {TURN_OFF}")
        rows = self.rows(q)
        part = attend_rows(q[rows], slots[rows], rows)
        out = part.new_zeros(len(q), *part.shape[1:])  # an fp8 projection scales by the largest value
        out[rows] = part
        self.attended = True
        return out

    def attend_dense(
        self, layer: Any, q: torch.Tensor, q_pe: torch.Tensor, k_nope: torch.Tensor, k_pe: torch.Tensor
    ) -> list[tuple[slice | torch.Tensor, torch.Tensor]]:
        """Return (query tokens, output [n, heads * v_head_dim]) of each dense part.

        Args:
            layer: SGLang's attention module.
            q: [tokens, heads, nope + rope], before RoPE.
            q_pe: [tokens, heads, rope], after RoPE.
            k_nope, k_pe: [tokens, 1, kv_lora_rank] normalised, [tokens, 1, rope] after RoPE.
        """
        heads, nope = layer.num_local_heads, layer.qk_nope_head_dim
        found = []
        for piece in self._dense_pieces():
            rows = piece.rows
            k, v = keys_and_values(
                piece,
                k_nope[rows].flatten(1),
                k_pe[rows].flatten(1),
                read=lambda slots: self.read(self.cache(layer.attn_mqa.layer_id), slots, dtype=q.dtype),
                kv_b_proj=layer.kv_b_proj,
                heads=heads,
                nope=nope,
            )
            metadata = SimpleNamespace(
                cu_seqlens_q=piece.cu_seqlens_q,
                cu_seqlens_k=piece.cu_seqlens_k,
                max_seq_len_q=max(piece.q_lens),
                max_seq_len_k=max(piece.kv_lens),
                cache_seqlens_int32=piece.cu_seqlens_k.diff(),
            )
            out = self.backend._forward_standard_mha(
                q=torch.cat([q[rows][..., :nope], q_pe[rows]], dim=-1),
                k=k,
                v=v,
                layer=layer.attn_mha,
                forward_batch=SimpleNamespace(batch_size=len(piece.q_lens)),
                metadata=metadata,
            )
            found.append((rows, out.reshape(len(out), -1)))
        return found

    def _dense_pieces(self) -> tuple[DensePiece, ...]:
        if not self._pieces:
            table = self.backend.forward_metadata.page_table_1
            self._pieces = tuple(
                dense_piece(
                    part.plan,
                    part.requests,
                    tuple(self.q_lens[request] for request in part.requests),
                    tuple(self.kv_lens[request] for request in part.requests),
                    rows=rows_of(self._starts(), part.requests, table),
                    block_table=table,
                    page_size=1,
                )
                for part in self.execution.dense_parts
            )
        return self._pieces

    def _starts(self) -> Sequence[int]:
        return list(accumulate(self.q_lens, initial=0))


def why_whole(model_runner: Any, sm: int, *, setting: str, resharding: bool, portable: bool = False) -> str:
    """Return why this server attends every prefill as a whole; "" if it may split one.

    Args:
        setting: `split_prefill`.
        sm: the device's SM version.
        resharding: whether batches may reshard (`token_shard`).
        portable: whether the plugin's kernel attends densely instead of SGLang's.
    """
    if setting == "off":
        return "split_prefill is off"
    if not portable and sm != 90 and sm // 10 != 10:
        return "SGLang attends densely on SM90 and SM100 only"
    if resharding:
        return "token_shard may reshard this server's batches, which are not split as well"
    for flag, why in FEATURES.items():
        if argument_of(model_runner.server_args, flag):
            return why
    model = getattr(model_runner, "model", None)
    layers = [] if model is None else [layer for layer in model.modules() if hasattr(layer, "attn_mqa")]
    if not layers:
        return "the model has no MLA layers"
    for layer in layers:
        name = type(layer).__name__
        if not getattr(getattr(type(layer), "forward_absorb_core", None), SPLITS, False):
            return f"{name} has another forward_absorb_core, or this SGLang is older than 0.5.16"
        if getattr(layer, "q_lora_rank", None) is None:
            return f"{name} has no q_lora_rank"
        for attribute, why in LAYER_FEATURES.items():
            if (value := getattr(layer, attribute, None)) is not None and value is not False:
                return f"{name}: {why}"
    return ""


def wrap_prepare(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `forward_absorb_prepare`: keep a split batch's projected queries."""

    def around(
        original: Callable[..., Any],
        layer: Any,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: Any,
        *more: Any,
        **named: Any,
    ) -> Any:
        split: SplitBatch | None = getattr(forward_batch, ATTRIBUTE, None)
        if split is None:
            return original(layer, positions, hidden_states, forward_batch, *more, **named)
        project, kept = layer.q_b_proj_forward, []

        def keep(q_lora: torch.Tensor) -> torch.Tensor:
            kept.append(project(q_lora))
            return kept[-1]

        layer.q_b_proj_forward = keep
        try:
            prepared = original(layer, positions, hidden_states, forward_batch, *more, **named)
        finally:
            del layer.q_b_proj_forward
        if len(kept) != 1:
            raise PatchError(f"SGLang projected a layer's queries {len(kept)} times in a split batch. {TURN_OFF}")
        split.queries = layer, kept[0]
        return prepared

    return wrap(original, around)


def wrap_core(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `forward_absorb_core`: attend a split batch's dense query tokens."""

    def around(
        original: Callable[..., Any],
        layer: Any,
        q_pe: torch.Tensor,
        k_pe: torch.Tensor,
        q_nope_out: torch.Tensor,
        k_nope: torch.Tensor,
        forward_batch: Any,
        *more: Any,
        **named: Any,
    ) -> Any:
        split: SplitBatch | None = getattr(forward_batch, ATTRIBUTE, None)
        if split is None:
            return original(layer, q_pe, k_pe, q_nope_out, k_nope, forward_batch, *more, **named)
        if split.queries is None or split.queries[0] is not layer:
            raise PatchError(f"SGLang did not prepare this layer of a split batch. {TURN_OFF}")
        (_, q), split.queries = split.queries, None
        dense = split.attend_dense(layer, q, q_pe, k_nope, k_pe)
        filled = []

        def fill(_: Any, given: tuple[torch.Tensor, ...]) -> None:
            for rows, out in dense:
                given[0][rows] = out.to(given[0].dtype)
            filled.append(given[0].shape)

        split.open, split.attended = True, False
        hook = layer.o_proj.register_forward_pre_hook(fill)
        try:
            result = original(layer, q_pe, k_pe, q_nope_out, k_nope, forward_batch, *more, **named)
        finally:
            hook.remove()
            split.open = False
        if len(filled) != 1 or not split.attended:
            raise PatchError(f"SGLang did not attend and project a split batch once in this layer. {TURN_OFF}")
        return result

    wrapped = wrap(original, around)
    setattr(wrapped, SPLITS, True)
    return wrapped
