"""Resharding of heads to tokens in an engine: the exchange of one process, and this rank's share of one batch.

The plan says whether a batch's ranks reshard (`decision.token_shard`); `parallel.token_shard` does it. This module has
what both engines need: the agreement of the ranks before any of them waits for another, a test of the exchange before
serving, and the query tokens of each rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F

from nsa_plugin.backends.common.warm import refusal
from nsa_plugin.decision import token_shard as sharding
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.errors import NsaPluginError, PatchError, SettingsError
from nsa_plugin.libraries.devices import MIB, DeviceProfile
from nsa_plugin.parallel.exchange import require_agreement
from nsa_plugin.parallel.partition import Partition, by_count
from nsa_plugin.parallel.token_shard import TokenShard, buffer_bytes
from nsa_plugin.patches.ledger import TURN_OFF
from nsa_plugin.settings import Settings

SINKS = "the model has attention sinks (learnable_sink in its config), and each rank has only those of its local heads"

MOST_OF_FREE = 4
"""`auto` takes this part of the free memory for buffers at most, as budgets do."""

AttendShare = Callable[[torch.Tensor, torch.Tensor, slice], torch.Tensor]
"""(q [n, H, d_qk], selection [n, topk], their query tokens in the batch) -> out [n, H, d_v], which no later call
writes; see `TokenShard.attend`. Called in order for every piece of this rank's query tokens; it must read per-token
data of these tokens only.
"""


class RanksThatAgree(Protocol):
    """Ranks that need the same plans."""

    def least(self, number: int) -> int:
        """Return the smallest number of all ranks; waits until every rank has called."""


@dataclass(frozen=True)
class Exchange:
    """The exchange that the attention layers of a process share.

    Attributes:
        shard: the two exchanges with their buffers, on one stream: one batch after the other.
        host_group: the ranks of `shard`, for agreement through the CPU.
    """

    shard: TokenShard
    host_group: dist.ProcessGroup

    def least(self, number: int) -> int:
        """Return the smallest number of all ranks; waits until every rank has called."""
        return least(self.host_group, number)

    def prove(self, heads: int, d_qk: int, d_v: int, dtype: torch.dtype, device: torch.device) -> None:
        """Exchange test data whose values tell their origin: compiles, connects and checks, before serving.

        Runs in one piece, then in two, which take different code paths.

        Raises:
            NoProviderError: on every rank, if one of them did not receive what the others sent.
        """
        shard = self.shard
        rows = min(2 * shard.ranks + 1, shard.max_tokens)  # not a multiple of the ranks
        row = torch.arange(rows, device=device).remainder(16).view(-1, 1, 1).expand(rows, heads, d_qk)
        q = (row + 16 * shard.rank).to(dtype).contiguous()  # integers exact in bfloat16, up to 16 ranks
        partition = by_count(rows, shard.ranks)
        sender = torch.arange(shard.ranks, device=device)
        sent = row[partition.rows(shard.rank), :1, :1] + 16 * sender.repeat_interleave(heads).view(1, -1, 1)
        wanted = sent.to(dtype).expand(-1, -1, d_qk)
        for chunks in (1, 2):
            right, why = self._proven(q, partition, wanted, d_v, chunks)
            # After each run: a rank that failed would keep the others waiting in the next exchange.
            if not self.least(int(right)):
                raise refusal("the exchange of token_shard", why)

    def _proven(
        self, q: torch.Tensor, partition: Partition, wanted: torch.Tensor, d_v: int, chunks: int
    ) -> tuple[bool, str]:
        """(whether this rank received `wanted`, over all pieces, and a correct output came back; why not)."""
        arrived = [wanted[:0]]

        def attend_rows(q_rows: torch.Tensor, rows: slice) -> torch.Tensor:
            arrived.append(q_rows.clone())
            return q_rows[..., :d_v] + 1

        try:
            back = self.shard.attend(q, partition, attend_rows, chunks=chunks)
            right = torch.equal(back, q[..., :d_v] + 1) and torch.equal(torch.cat(arrived), wanted)
        except RuntimeError as error:  # from the group, a compiler or CUDA
            return False, repr(error)
        return right, "a rank did not receive what the others sent"


E = TypeVar("E", bound=Exchange)


@dataclass
class Share:
    """How the ranks share the query tokens of one batch, or of one attention call of it, for all layers.

    Attributes:
        partition: the same on every rank.
        chunks: pieces in which the query tokens are exchanged and attended, from the plan; the same on every rank.
        schedules: FlashMLA's schedule for each piece of this rank's query tokens, by its first token; see `scheduled`.
        first_layer: the layer that made them.
    """

    exchange: Exchange
    partition: Partition
    chunks: int = 1
    schedules: dict[int, Any] = field(default_factory=dict)
    first_layer: Hashable = None

    @property
    def rows(self) -> slice:
        """This rank's query tokens."""
        return self.partition.rows(self.exchange.shard.rank)

    def attend(self, q: torch.Tensor, selection: torch.Tensor, attend_rows: AttendShare) -> torch.Tensor:
        """Attend with resharded heads. Each query token is attended by one rank with all heads.

        Args:
            q: [T, h, d_qk], this rank's heads. An engine pads T alike on every rank; padding gets zeros.
            selection: [T or fewer, topk], read only for this rank's query tokens; missing ones attend to nothing.
            attend_rows: not called for a piece in which this rank has no query tokens.

        Returns:
            [T, h, d_v], this rank's heads of all query tokens: a view of a buffer that the next layer overwrites.
        """
        total, rows = self.partition.total, q.shape[0]
        if rows < total:
            raise NsaPluginError(f"the engine attends {rows} query tokens of a batch that it prepared with {total}")
        if selection.shape[0] < total:
            selection = F.pad(selection, (0, 0, 0, total - selection.shape[0]), value=-1)
        out = self.exchange.shard.attend(
            q[:total].contiguous(),
            self.partition,
            lambda q_rows, own: attend_rows(q_rows, selection[own], own),
            chunks=self.chunks,
        )
        return out if rows == total else F.pad(out, (0, 0, 0, 0, 0, rows - total))

    def scheduled(self, layer: Hashable, rows: slice, make: Callable[[], Any]) -> Any:
        """Return a piece's schedule, made with `make` by the first layer that asks and shared by later layers.

        When the first layer comes again, the model has started again, with other lengths in the same tensors or under
        capture. The schedule is then made again, so that it is part of the graph that reads it.
        """
        if rows.start not in self.schedules or self.first_layer == layer:
            self.schedules[rows.start], self.first_layer = make(), layer
        return self.schedules[rows.start]


def planned_from(model: ModelShape, device: DeviceProfile, settings: Settings) -> dict[str, int]:
    """What a rank's plans depend on, besides its batches and its free memory, as numbers to compare between ranks."""
    decides_by = repr(replace(settings, trace="off", report=""))
    libraries = sorted((one.name, one.available, one.version) for one in device.libraries.values())
    return {
        "the SM version": device.sm,
        "heads": model.heads_per_rank,
        "settings (their checksum)": zlib.crc32(decides_by.encode()),
        "kernel libraries (their checksum)": zlib.crc32(repr(libraries).encode()),
    }


def has_sinks(config: Any) -> bool:
    """Whether a model has learned attention sinks, by the Hugging Face configuration of its text model."""
    return bool(getattr(config, "learnable_sink", False))


def least(group: dist.ProcessGroup, number: int) -> int:
    """Return the smallest number of a group's ranks; every rank has to call."""
    found = torch.tensor([number], dtype=torch.int64, device="cpu")  # an engine may have set another default device
    dist.all_reduce(found, op=dist.ReduceOp.MIN, group=group)
    return int(found)


def free_memory_of(ranks: RanksThatAgree | None, read: Callable[[], int]) -> Callable[[], int]:
    """Return a function that reads the free memory for plans: the smallest of the ranks that need the same plans.

    Ranks that exchange must make the same plans, and a plan may depend on the free memory.

    Args:
        ranks: an exchange, or other ranks that agree; None: no others.
        read: returns the free bytes of this rank's device.
    """
    return read if ranks is None else lambda: ranks.least(read())


def checked_group(engine: str, getter: tuple[str, str], model: ModelShape) -> Any:
    """Return an engine's coordinator of the ranks that share the attention heads.

    Args:
        engine: its name, for errors.
        getter: module and name of the engine's function that returns the coordinator.

    Raises:
        PatchError: there is none, or it has other ranks.
    """
    module, name = getter
    try:
        group = getattr(import_module(module), name)()
    except (ImportError, AttributeError) as error:
        raise PatchError(f"{engine} has no {module}.{name}, which token_shard needs. {TURN_OFF}") from error
    lacks = [part for part in ("device_group", "cpu_group") if getattr(group, part, None) is None]
    if lacks:
        raise PatchError(f"{engine}'s attention group has no {' and no '.join(lacks)}. {TURN_OFF}")
    size = dist.get_world_size(group.device_group)
    if size != model.attn_tp_size:
        raise PatchError(f"{engine}'s attention group has {size} ranks, but heads for {model.attn_tp_size}. {TURN_OFF}")
    return group


def open_exchange(
    model: ModelShape,
    device: DeviceProfile,
    settings: Settings,
    where: torch.device,
    *,
    group: Callable[[], Any],
    impossible: Callable[[], str | None],
    max_tokens: Callable[[], int],
    max_context: Callable[[], int],
    made: Callable[[TokenShard, dist.ProcessGroup], E],
) -> tuple[E | None, str]:
    """Open the exchange of this process, if its batches may reshard.

    All ranks of an attention group call this in the same order and get the same answer.

    Args:
        where: the device of the buffers.
        group: finds the engine's coordinator; see `checked_group`.
        impossible: returns why this server does not support it, or None.
        max_tokens: returns the most query tokens of a batch that the buffers hold.
        max_context: returns the most tokens of a request.
        made: makes the engine's exchange.

    Returns:
        (the exchange or None, why there is none).

    Raises:
        SettingsError: `token_shard` is on, but this server or another rank of the group cannot reshard.
        PatchError: the engine's groups are not as expected.
        MismatchError: the ranks would decide differently.
        NoProviderError: the exchange does not run.
    """
    # Devices are the same on every rank except for their links, which only the rank knows.
    if reason := sharding.never(model, replace(device, nvlink=True), settings):
        return None, reason
    if not settings.strict:  # no rank may wait for one that the stock engine serves
        return None, _kept(settings, "strict is off, and a rank that does not serve would keep the others waiting")
    ranks = group()
    reason = impossible() or sharding.pointless(model, device, settings, max_tokens(), max_context())
    if not least(ranks.cpu_group, int(not reason)):
        return None, _kept(
            settings, reason or "another rank of the attention group cannot, and its own report says why"
        )
    most, check_rows = max_tokens(), settings.trace.endswith(".jsonl")
    numbers = {
        **planned_from(model, device, settings),
        "tokens of a prefill": most,
        "whether trace is a .jsonl file": int(check_rows),
    }
    require_agreement(ranks.cpu_group, torch.device("cpu"), tuple(numbers), tuple(numbers.values()))
    d_qk, d_v = model.row_dims
    shard: TokenShard | None = None
    needed = buffer_bytes(most, model.attn_tp_size, model.heads_per_rank, d_qk, d_v, torch.bfloat16)
    lacks = _lacks_memory(settings, where, needed)
    if not lacks:
        try:
            shard = TokenShard(
                ranks.device_group,
                heads=model.heads_per_rank,
                d_qk=d_qk,
                d_v=d_v,
                dtype=torch.bfloat16,
                device=where,
                max_tokens=most,
                check_rows=check_rows,
            )
        except torch.OutOfMemoryError:
            lacks = "more than this rank can allocate"
    if not least(ranks.cpu_group, int(shard is not None)) or shard is None:
        whose = lacks or "and another rank of the attention group lacks memory for them"
        buffers = f"the exchange's buffers of {most} query tokens take {needed / MIB:.0f} MiB"
        return None, _kept(settings, f"{buffers}, {whose}")
    exchange = made(shard, ranks.cpu_group)
    exchange.prove(model.heads_per_rank, d_qk, d_v, torch.bfloat16, where)
    return exchange, ""


def _lacks_memory(settings: Settings, where: torch.device, needed: int) -> str:
    """Return why `auto` takes no buffers of so many bytes, or "": CUDA graphs and activations need memory, too."""
    if settings.token_shard == "on" or where.type != "cuda":
        return ""
    free, _ = torch.cuda.mem_get_info(where)
    if needed <= free // MOST_OF_FREE:
        return ""
    return f"more than a quarter of this rank's free memory, {free / MIB:.0f} MiB"


def _kept(settings: Settings, reason: str) -> str:
    """Return the reason why heads stay local.

    Raises:
        SettingsError: the settings ask for resharding.
    """
    if settings.token_shard == "on":
        raise SettingsError(f"token_shard is on and cannot work here: {reason}; allowed here: auto, off")
    return reason
