"""Resharding of heads to tokens under SGLang: the exchange of one process, and this rank's share of one batch.

The plan says whether the ranks reshard (`decision.token_shard`), `parallel.token_shard` does it, and
`backends.common.token_shard` has what both engines need. This module has SGLang's part: the attention tensor-parallel
group, the size of the buffers, the features that do not support resharding, and FlashMLA's schedule.

    indexer    prefill: scores and selects for this rank's query tokens; the selection of all others is -1.
               Decode, verify and draft steps: left to SGLang, which selects for all query tokens
    attention  absorbed q [T, h, 576] -> exchange -> the route's kernel, own query tokens, all heads -> exchange

A prefill's query tokens may come in pieces. SGLang makes the bf16 copy of an fp8 cache before it calls attention.

Every rank's cache holds all tokens. A layer that reuses another's selection (`skip_topk`) reads it for the same query
tokens, because a batch has one share for all layers.

A decode, verify or draft step may be captured in a CUDA graph. It is partitioned by its number of query tokens, which
is the same at every replay, padding included. Buffers keep their addresses, and the first layer makes FlashMLA's
schedule in the graph, from the lengths that SGLang writes before a replay. The ranks of an attention group have the
same batches, idle ones too, so they capture and replay the same exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from nsa_plugin.backends.common import token_shard
from nsa_plugin.backends.common.token_shard import SINKS, Share, checked_group, has_sinks
from nsa_plugin.backends.sglang.startup.model import argument_of, impls_of, selection_is_broadcast
from nsa_plugin.backends.sglang.v32.routes import PLANNED, v32_stock_feature
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.errors import PatchError
from nsa_plugin.libraries.devices import DeviceProfile
from nsa_plugin.patches.ledger import TURN_OFF
from nsa_plugin.settings import Settings

GROUP = "sglang.srt.distributed.parallel_state", "get_attn_tp_group"
"""The function that returns SGLang's coordinator of the attention tensor-parallel ranks."""
# Functions that say whether a prefill is captured or replayed in pieces; of each kind, by version.
_BACKEND = "sglang.srt.model_executor.runner_backend_utils"
IN_GRAPH = (
    (
        (f"{_BACKEND}.breakable_cuda_graph.context", "is_in_breakable_cuda_graph"),
        ("sglang.srt.model_executor.breakable_cuda_graph.context", "is_in_breakable_cuda_graph"),
    ),
    (
        (f"{_BACKEND}.tc_piecewise_cuda_graph.context_manager", "is_in_tc_piecewise_cuda_graph"),
        ("sglang.srt.compilation.piecewise_context_manager", "is_in_piecewise_cuda_graph"),
    ),
)


@dataclass(frozen=True)
class SglangExchange(token_shard.Exchange):
    """The exchange that the attention backends of a process share.

    Attributes:
        in_graph: whether a prefill is being captured or replayed in pieces.
    """

    in_graph: Callable[[], bool]


def impossible(backend: Any, model_runner: Any, model: ModelShape) -> str | None:
    """Return why this server does not support resharding, or None."""
    server_args = model_runner.server_args
    if feature := v32_stock_feature(backend, server_args):
        return f"{feature} is on: its batches fall back to the stock path"
    (flag, prefill), (_, decode) = impls_of(backend).items()
    if prefill not in PLANNED[model.kv_layout, True] and decode not in PLANNED[model.kv_layout, False]:
        return f"SGLang's {flag} is {prefill} and its decode backend {decode}: both fall back to the stock path"
    if has_sinks(model_runner.model_config.hf_text_config):
        return SINKS
    if argument_of(server_args, "enable_two_batch_overlap"):
        return "two-batch overlap is on, which attends two batches at once"
    if argument_of(server_args, "enable_return_indexer_topk"):
        return "the selection is returned to users, but each rank has it for some query tokens only"
    if selection_is_broadcast():
        return "SGLANG_DSA_TOPK_BROADCAST sends the first rank's selection, which has some query tokens only, to all"
    return None


def open_exchange(
    backend: Any, model_runner: Any, model: ModelShape, device: DeviceProfile, settings: Settings
) -> tuple[SglangExchange | None, str]:
    """(the exchange of this process or None, why there is none); see `token_shard.open_exchange`."""
    return token_shard.open_exchange(
        model,
        device,
        settings,
        torch.device(backend.device),
        group=lambda: checked_group("SGLang", GROUP, model),
        impossible=lambda: impossible(backend, model_runner, model),
        max_tokens=lambda: _max_tokens(model_runner.server_args),
        max_context=lambda: int(backend.max_context_len),
        made=lambda shard, host_group: SglangExchange(shard, host_group, _in_graph()),
    )


def _in_graph() -> Callable[[], bool]:
    flags: list[Callable[[], bool]] = []
    for names in IN_GRAPH:
        for module, name in names:
            try:
                flags.append(getattr(import_module(module), name))
                break
            except (ImportError, AttributeError):
                continue
        else:
            raise PatchError(
                f"SGLang has none of {', '.join(f'{module}.{name}' for module, name in names)}. {TURN_OFF}"
            )
    return lambda: any(flag() for flag in flags)


def _max_tokens(server_args: Any) -> int:
    """Return the most query tokens of a batch that reshards; larger prefills, without chunking, keep heads local."""
    chunk = argument_of(server_args, "chunked_prefill_size")
    return int(chunk if chunk and chunk > 0 else argument_of(server_args, "max_prefill_tokens"))


@contextmanager
def all_heads(backend: Any, heads: int) -> Iterator[None]:
    """Let SGLang's FlashMLA over fp8 pages and its schedule use `heads` heads instead of this rank's."""
    own = backend.flashmla_kv_num_q_heads
    backend.flashmla_kv_num_q_heads = heads
    try:
        yield
    finally:
        backend.flashmla_kv_num_q_heads = own


def schedule_of(
    share: Share, layer_id: int, rows: slice, compute: Callable[[torch.Tensor, int], Any], lengths: torch.Tensor, x: str
) -> Any:
    """Return the metadata that SGLang's `_forward_flashmla_kv` reads, for some query tokens; see `Share.scheduled`.

    Args:
        rows: this rank's query tokens of the batch, or a piece of them.
        layer_id: of the layer that attends.
        compute: SGLang's `_compute_flashmla_metadata`.
        lengths: number of selected tokens of each query token in the batch; padding behind them counts as 1.
        x: "nsa" or "dsa".
    """

    def make() -> Any:
        own = lengths[rows]
        if missing := rows.stop - rows.start - own.shape[0]:
            own = F.pad(own, (0, missing), value=1)
        return flash_mla_metadata(compute, own, x)

    return share.scheduled(layer_id, rows, make)


def flash_mla_metadata(compute: Callable[[torch.Tensor, int], Any], lengths: torch.Tensor, x: str) -> Any:
    """Return what SGLang's `_forward_flashmla_kv` reads, for query tokens with these lengths; see `schedule_of`."""
    return SimpleNamespace(**{f"{x}_cache_seqlens_int32": lengths}, flashmla_metadata=compute(lengths, 1))
