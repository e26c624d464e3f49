"""Heads for tokens under SGLang: the exchange of one process, and the share of one batch.

The plan says whether the ranks reshard (`decision.token_shard`), `parallel.token_shard` does it, and
`backends.common.token_shard` has what both engines need. Here is what is SGLang's: the group, which is the
attention's and not the world's; the size of the buffers; what of SGLang's has no part in it; its FlashMLA's schedule.

    indexer    of a prefill: scores and selects for this rank's rows; all others of the selection are -1, so that
               whatever read them would attend to nothing. Of a later step it is SGLang's own, for all rows
    attention  absorbed q [T, h, 576] -> exchange -> the route's kernel over own rows with all heads -> exchange

A prefill's rows may come in pieces; the bf16 copy of an fp8 cache is SGLang's, made before attention is called.

The cache holds every token on every rank, so own rows find theirs. Layers that take over another's selection
(`skip_topk`) take it for the same rows, because a batch has one share for all layers.

A later step may be captured in a CUDA graph: its rows are dealt out by their number, which the captured batch has with
every replay, padded rows included; buffers stay where they are, and FlashMLA's schedule of own rows is made in the
graph, by the first layer, from the lengths that SGLang writes before it replays. The ranks of an attention group have
the same batches, idle ones too, so that they capture and replay the same exchanges.
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
from nsa_plugin.backends.sglang.startup.model import impls_of
from nsa_plugin.backends.sglang.v32.routes import PLANNED, sglangs_own
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.errors import PatchError
from nsa_plugin.libraries.devices import DeviceProfile
from nsa_plugin.patches.ledger import TURN_OFF
from nsa_plugin.settings import Settings

GROUP = "sglang.srt.distributed.parallel_state", "get_attn_tp_group"
"""What gives SGLang's coordinator of the attention's tensor-parallel ranks."""
# Whether a prefill is captured or replayed in pieces: of each kind the first name that a version has.
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
    """What the attention backends of a process share.

    Attributes:
        in_graph: whether a prefill is being captured or replayed in pieces.
    """

    in_graph: Callable[[], bool]


def impossible(backend: Any, model_runner: Any, model: ModelShape) -> str | None:
    """What of this server has no part in trading heads for tokens, or None."""
    server_args = model_runner.server_args
    if feature := sglangs_own(backend, server_args):
        return f"{feature} is on, whose batches stay SGLang's own"
    (flag, prefill), (_, decode) = impls_of(backend).items()
    if prefill not in PLANNED[model.kv_layout, True] and decode not in PLANNED[model.kv_layout, False]:
        return f"SGLang's {flag} is {prefill} and its decode backend {decode}, which stay SGLang's own"
    if has_sinks(model_runner.model_config.hf_text_config):
        return SINKS
    if getattr(server_args, "enable_two_batch_overlap", False):
        return "two-batch overlap is on, which attends two batches at once"
    if getattr(server_args, "enable_return_indexer_topk", False):
        return "the selection is returned to users, and a rank has its own rows of it only"
    if _selection_is_broadcast():
        return "SGLANG_DSA_TOPK_BROADCAST gives every rank the selection of the first, which has its own rows only"
    return None


def _selection_is_broadcast() -> bool:
    from sglang.srt.environ import envs

    setting = getattr(envs, "SGLANG_DSA_TOPK_BROADCAST", None)
    return setting is not None and bool(setting.get())


def open_exchange(
    backend: Any, model_runner: Any, model: ModelShape, device: DeviceProfile, settings: Settings
) -> tuple[SglangExchange | None, str]:
    """(the exchange of this process or None, why there is none); see `token_shard.open_exchange`.

    Raises: as that.
    """
    return token_shard.open_exchange(
        model,
        device,
        settings,
        torch.device(backend.device),
        group=lambda: checked_group("SGLang", GROUP, model),
        impossible=lambda: impossible(backend, model_runner, model),
        max_tokens=lambda: _max_tokens(model_runner.server_args),
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
    """Most query rows of a batch; larger ones, prefills that no chunking bounds, keep their heads."""
    chunk = getattr(server_args, "chunked_prefill_size", None)
    return int(chunk if chunk and chunk > 0 else server_args.max_prefill_tokens)


@contextmanager
def all_heads(backend: Any, heads: int) -> Iterator[None]:
    """Let SGLang's FlashMLA over fp8 pages, and its schedule, have so many heads instead of a rank's own."""
    own = backend.flashmla_kv_num_q_heads
    backend.flashmla_kv_num_q_heads = heads
    try:
        yield
    finally:
        backend.flashmla_kv_num_q_heads = own


def schedule_of(
    share: Share,
    layer_id: int,
    rows: slice,
    compute: Callable[[torch.Tensor, int], Any],
    lengths: torch.Tensor,
    x: str,
) -> Any:
    """The metadata that SGLang's `_forward_flashmla_kv` reads, for own rows; made as `Share.scheduled` says.

    Args:
        rows: those of the batch, all of this rank's or a piece of them.
        layer_id: of the layer that attends.
        compute: SGLang's `_compute_flashmla_metadata`.
        lengths: selected tokens of every row of the batch; rows behind them, which are padded, count as one token's.
        x: "nsa" or "dsa".
    """

    def make() -> Any:
        own = lengths[rows]
        if missing := rows.stop - rows.start - own.shape[0]:
            own = F.pad(own, (0, missing), value=1)
        return SimpleNamespace(**{f"{x}_cache_seqlens_int32": own}, flashmla_metadata=compute(own, 1))

    return share.scheduled(layer_id, rows, make)
