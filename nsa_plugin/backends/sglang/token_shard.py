"""Heads for tokens under SGLang: the exchange of one process, and the share of one batch.

A plan says whether a batch's ranks trade (`nsa_plugin.sharding`), `nsa_plugin.parallel.token_shard` does it. Here is
what SGLang has to do with it: the group, which is the attention's and not the world's; the size of the buffers; what
of SGLang's has no part in it; and what the ranks have to agree on before any of them may wait for another.

    indexer    of a prefill: scores and selects for this rank's rows; all others of the selection are -1, so that
               whatever read them would attend to nothing. Of a later step it is SGLang's own, for all rows
    attention  absorbed q [T, h, 576] -> exchange -> the route's kernel over own rows with all heads -> exchange

The cache holds every token on every rank, so own rows find theirs. Layers that take over another's selection
(`skip_topk`) take it for the same rows, because a batch has one share for all layers.

A later step may be captured in a CUDA graph: its rows are dealt out by their number, which the captured batch has with
every replay, padded rows included; buffers stay where they are, and FlashMLA's schedule of own rows is made in the
graph, by the first layer, from the lengths that SGLang writes before it replays. The ranks of an attention group have
the same batches, idle ones too, so that they capture and replay the same exchanges.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from nsa_plugin import sharding
from nsa_plugin.backends.sglang.model import impls_of
from nsa_plugin.backends.sglang.routes import PLANNED, sglangs_own
from nsa_plugin.backends.warm import refusal
from nsa_plugin.devices import DeviceProfile
from nsa_plugin.errors import NsaPluginError, PatchError, SettingsError
from nsa_plugin.parallel.exchange import require_agreement
from nsa_plugin.parallel.partition import Partition, by_count
from nsa_plugin.parallel.token_shard import TokenShard
from nsa_plugin.patches.ledger import TURN_OFF
from nsa_plugin.settings import Settings
from nsa_plugin.shapes import ModelShape

GROUP = "sglang.srt.distributed.parallel_state", "get_attn_tp_group"
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

AttendRows = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(q [n, H, d_qk], slots [n, topk]) -> out [n, H, d_v]."""


@dataclass(frozen=True)
class Exchange:
    """What the attention backends of a process share.

    Attributes:
        shard: the two exchanges, with their buffers; of one stream, so one batch after the other.
        host_group: the ranks of `shard`, for what they agree on without their devices.
        in_graph: whether a prefill is being captured or replayed in pieces.
    """

    shard: TokenShard
    host_group: dist.ProcessGroup
    in_graph: Callable[[], bool]

    def least(self, number: int) -> int:
        """The least number of all ranks, each of which has to ask: a wait for them."""
        return least(self.host_group, number)

    def prove(self, heads: int, d_qk: int, d_v: int, dtype: torch.dtype, device: torch.device) -> None:
        """Exchange rows that say where they come from: compiles, connects and checks, before anything is served.

        Raises:
            NoProviderError: on every rank, where one of them did not get what the others sent.
        """
        shard = self.shard
        rows = min(2 * shard.ranks + 1, shard.max_tokens)  # not a multiple of the ranks
        row = torch.arange(rows, device=device).remainder(16).view(-1, 1, 1).expand(rows, heads, d_qk)
        q = (row + 16 * shard.rank).to(dtype).contiguous()  # whole numbers that bfloat16 holds, up to 16 ranks
        partition = by_count(rows, shard.ranks)
        right, why = True, "a rank did not get what the others sent"
        arrived: list[torch.Tensor] = []

        def attend_rows(q_rows: torch.Tensor, own: slice) -> torch.Tensor:
            arrived.append(q_rows.clone())
            return q_rows[..., :d_v] + 1

        try:
            back = shard.attend(q, partition, attend_rows)
            right = torch.equal(back, q[..., :d_v] + 1)
            own, sender = partition.rows(shard.rank), torch.arange(shard.ranks, device=device)
            wanted = row[own, :1, :1] + 16 * sender.repeat_interleave(heads).view(1, -1, 1)
            right &= all(torch.equal(found, wanted.to(dtype).expand_as(found)) for found in arrived)
        except RuntimeError as error:  # the group's, a compiler's or CUDA's own
            right, why = False, repr(error)
        if not self.least(int(right)):
            raise refusal("the exchange of token_shard", why)


@dataclass
class Share:
    """Whose rows of one batch are whose, for all of its layers.

    Attributes:
        partition: the same on every rank.
        schedule: what SGLang's FlashMLA schedules for this rank's rows; the first layer that needs it makes it.
        first_layer: that layer's number.
    """

    exchange: Exchange
    partition: Partition
    schedule: Any = None
    first_layer: int | None = None

    @property
    def rows(self) -> slice:
        """This rank's rows of the batch."""
        return self.partition.rows(self.exchange.shard.rank)

    def attend(self, q: torch.Tensor, slots: torch.Tensor, attend_rows: AttendRows) -> torch.Tensor:
        """[T, h, d_v]: this rank's heads of all rows, by one rank a row.

        A view of a buffer: valid until the next layer attends, which comes after SGLang has projected it.

        Args:
            q: [T, h, d_qk]; rows behind the requests', which MLP-sync pads on every rank alike, have no output: zeros.
            slots: [rows or fewer, topk], of which own rows alone are read; rows that are missing attend to nothing.
            attend_rows: not called where this rank has no rows.
        """
        total, rows = self.partition.total, q.shape[0]
        if rows < total:
            raise NsaPluginError(f"SGLang attends {rows} query rows of a batch that it prepared with {total}")
        if slots.shape[0] < total:
            slots = F.pad(slots, (0, 0, 0, total - slots.shape[0]), value=-1)
        out = self.exchange.shard.attend(
            q[:total].contiguous(), self.partition, lambda q_rows, own: attend_rows(q_rows, slots[own])
        )
        return out if rows == total else F.pad(out, (0, 0, 0, 0, 0, rows - total))


def least(group: dist.ProcessGroup, number: int) -> int:
    """The least number of a group's ranks, each of which has to ask."""
    found = torch.tensor([number], dtype=torch.int64)
    dist.all_reduce(found, op=dist.ReduceOp.MIN, group=group)
    return int(found)


def impossible(backend: Any, model_runner: Any, model: ModelShape) -> str | None:
    """What of this server has no part in trading heads for tokens, or None."""
    server_args = model_runner.server_args
    if feature := sglangs_own(backend, server_args):
        return f"{feature} is on, whose batches stay SGLang's own"
    (flag, prefill), (_, decode) = impls_of(backend).items()
    if prefill not in PLANNED[model.kv_layout, True] and decode not in PLANNED[model.kv_layout, False]:
        return f"SGLang's {flag} is {prefill} and its decode backend {decode}, which stay SGLang's own"
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
) -> tuple[Exchange | None, str]:
    """(the exchange of this process or None, why there is none).

    All ranks of an attention group come here in the same order, and leave with the same answer.

    Raises:
        SettingsError: `token_shard` is on, and this server or another rank of the group cannot.
        PatchError: SGLang's groups are not as expected.
        MismatchError: the ranks would not decide alike.
        NoProviderError: the exchange does not run.
    """
    # But for its links, which only a rank itself knows, a device is the same on every rank.
    if reason := sharding.never(model, replace(device, nvlink=True), settings):
        return None, reason
    group = _group(model)
    reason = sharding.never(model, device, settings) or impossible(backend, model_runner, model) or ""
    if not least(group.cpu_group, int(not reason)):
        reason = reason or "another rank of the attention group cannot, and its own report says why"
        if settings.token_shard == "on":
            raise SettingsError(f"token_shard is on and cannot work here: {reason}; allowed here: auto, off")
        return None, reason
    in_graph = _in_graph()
    max_tokens = _max_tokens(model_runner.server_args)
    decides_by = repr(replace(settings, trace="off", report="")).encode()
    numbers = (device.sm, model.heads_per_rank, max_tokens, zlib.crc32(decides_by))
    names = ("the SM version", "heads", "tokens of a prefill", "settings (their checksum)")
    require_agreement(group.cpu_group, torch.device("cpu"), names, numbers)
    d_qk, d_v = model.row_dims
    where = torch.device(backend.device)
    shard = TokenShard(
        group.device_group,
        heads=model.heads_per_rank,
        d_qk=d_qk,
        d_v=d_v,
        dtype=torch.bfloat16,
        device=where,
        max_tokens=max_tokens,
        check_rows=settings.trace.endswith(".jsonl"),
    )
    made = Exchange(shard, group.cpu_group, in_graph)
    made.prove(model.heads_per_rank, d_qk, d_v, torch.bfloat16, where)
    return made, ""


def _group(model: ModelShape) -> Any:
    """SGLang's coordinator of the attention's tensor-parallel ranks."""
    module, name = GROUP
    try:
        group = getattr(import_module(module), name)()
    except (ImportError, AttributeError) as error:
        raise PatchError(f"SGLang has no {module}.{name}, which token_shard needs. {TURN_OFF}") from error
    lacks = [part for part in ("device_group", "cpu_group") if getattr(group, part, None) is None]
    if lacks:
        raise PatchError(f"SGLang's attention group has no {' and no '.join(lacks)}. {TURN_OFF}")
    size = dist.get_world_size(group.device_group)
    if size != model.attn_tp_size:
        raise PatchError(f"SGLang's attention group has {size} ranks, and heads for {model.attn_tp_size}. {TURN_OFF}")
    return group


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
    share: Share, layer_id: int, compute: Callable[[torch.Tensor, int], Any], lengths: torch.Tensor, x: str
) -> Any:
    """The metadata that SGLang's `_forward_flashmla_kv` reads, for own rows.

    Where the layer that made it comes again, the model has begun again, with other lengths in the same tensor or under
    capture after a run without: it is made again, and so is in the graph that reads it.

    Args:
        layer_id: of the layer that attends.
        compute: SGLang's `_compute_flashmla_metadata`.
        lengths: selected tokens of every row of the batch; rows behind them, which are padded, count as one token's.
        x: "nsa" or "dsa".
    """
    if share.schedule is None or share.first_layer == layer_id:
        share.first_layer = layer_id
        own = lengths[share.rows]
        if missing := share.rows.stop - share.rows.start - own.shape[0]:
            own = F.pad(own, (0, missing), value=1)
        share.schedule = SimpleNamespace(**{f"{x}_cache_seqlens_int32": own}, flashmla_metadata=compute(own, 1))
    return share.schedule
