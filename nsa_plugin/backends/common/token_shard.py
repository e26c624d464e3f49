"""Heads for tokens in an engine: the exchange of one process, and the share of one batch.

The plan says whether a batch's ranks reshard (`decision.token_shard`), `parallel.token_shard` does it. Here is
what every engine has to do with it: what the ranks agree on before any of them may wait for another, the proof that
the exchange works before anything is served, and a batch's rows. What only one engine has is in its own module.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F

from nsa_plugin.backends.common.warm import refusal
from nsa_plugin.decision import token_shard as sharding
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.errors import NsaPluginError, PatchError, SettingsError
from nsa_plugin.libraries.devices import DeviceProfile
from nsa_plugin.parallel.exchange import require_agreement
from nsa_plugin.parallel.partition import Partition, by_count
from nsa_plugin.parallel.token_shard import TokenShard
from nsa_plugin.patches.ledger import TURN_OFF
from nsa_plugin.settings import Settings

SINKS = "the model has attention sinks (learnable_sink in its config), and a rank holds those of its own heads only"

AttendShare = Callable[[torch.Tensor, torch.Tensor, slice], torch.Tensor]
"""(q [n, H, d_qk], selection [n, topk], the rows of the batch that these are) -> out [n, H, d_v], which no later call
writes; see `TokenShard.attend`. Called for every piece of this rank's rows, in order, so that whatever it reads of rows
has to be of these, and what all pieces share is made once a layer.
"""


@dataclass(frozen=True)
class Exchange:
    """What the attention layers of a process share.

    Attributes:
        shard: the two exchanges, with their buffers; of one stream, so one batch after the other.
        host_group: the ranks of `shard`, for what they agree on without their devices.
    """

    shard: TokenShard
    host_group: dist.ProcessGroup

    def least(self, number: int) -> int:
        """The least number of all ranks, each of which has to ask: a wait for them."""
        return least(self.host_group, number)

    def prove(self, heads: int, d_qk: int, d_v: int, dtype: torch.dtype, device: torch.device) -> None:
        """Exchange rows that say where they come from: compiles, connects and checks, before anything is served.

        In one piece, then in two, which go other ways.

        Raises:
            NoProviderError: on every rank, where one of them did not get what the others sent.
        """
        shard = self.shard
        rows = min(2 * shard.ranks + 1, shard.max_tokens)  # not a multiple of the ranks
        row = torch.arange(rows, device=device).remainder(16).view(-1, 1, 1).expand(rows, heads, d_qk)
        q = (row + 16 * shard.rank).to(dtype).contiguous()  # whole numbers that bfloat16 holds, up to 16 ranks
        partition = by_count(rows, shard.ranks)
        sender = torch.arange(shard.ranks, device=device)
        sent = row[partition.rows(shard.rank), :1, :1] + 16 * sender.repeat_interleave(heads).view(1, -1, 1)
        wanted = sent.to(dtype).expand(-1, -1, d_qk)
        for chunks in (1, 2):
            right, why = self._proven(q, partition, wanted, d_v, chunks)
            # Between the two, too: a rank that fails would keep the others waiting in the next exchange.
            if not self.least(int(right)):
                raise refusal("the exchange of token_shard", why)

    def _proven(
        self, q: torch.Tensor, partition: Partition, wanted: torch.Tensor, d_v: int, chunks: int
    ) -> tuple[bool, str]:
        """(whether what arrived here is `wanted`, of all pieces, and what came back is right; why not)."""
        arrived = [wanted[:0]]

        def attend_rows(q_rows: torch.Tensor, rows: slice) -> torch.Tensor:
            arrived.append(q_rows.clone())
            return q_rows[..., :d_v] + 1

        try:
            back = self.shard.attend(q, partition, attend_rows, chunks=chunks)
            right = torch.equal(back, q[..., :d_v] + 1) and torch.equal(torch.cat(arrived), wanted)
        except RuntimeError as error:  # the group's, a compiler's or CUDA's own
            return False, repr(error)
        return right, "a rank did not get what the others sent"


E = TypeVar("E", bound=Exchange)


@dataclass
class Share:
    """Whose rows of one batch, or of one call of it, are whose, for all layers.

    Attributes:
        partition: the same on every rank.
        chunks: pieces in which the rows are exchanged and attended, by the plan; the same on every rank.
        schedules: what the engine's FlashMLA schedules for a piece of this rank's rows, by the first of them; see
            `scheduled`.
        first_layer: the layer that made them.
    """

    exchange: Exchange
    partition: Partition
    chunks: int = 1
    schedules: dict[int, Any] = field(default_factory=dict)
    first_layer: Hashable = None

    @property
    def rows(self) -> slice:
        """This rank's rows."""
        return self.partition.rows(self.exchange.shard.rank)

    def attend(self, q: torch.Tensor, selection: torch.Tensor, attend_rows: AttendShare) -> torch.Tensor:
        """[T, h, d_v]: this rank's heads of all rows, by one rank a row.

        A view of a buffer: valid until the next layer attends, which comes after the engine has projected it.

        Args:
            q: [T, h, d_qk]; rows behind the requests', which an engine pads on every rank alike, have no output: zeros.
            selection: [rows or fewer, topk], of which own rows alone are read; rows that are missing attend to nothing.
            attend_rows: not called for a piece in which this rank has no rows.
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
        """What `make` gave the first layer that asked for these rows, a piece; the layers behind it share it.

        Where that layer comes again, the model has begun again, with other lengths in the same tensors or under capture
        after a run without: it is made again, and so is in the graph that reads it.
        """
        if rows.start not in self.schedules or self.first_layer == layer:
            self.schedules[rows.start], self.first_layer = make(), layer
        return self.schedules[rows.start]


def has_sinks(config: Any) -> bool:
    """Whether a model has learned attention sinks, by its Hugging Face configuration (of its text model)."""
    return bool(getattr(config, "learnable_sink", False))


def least(group: dist.ProcessGroup, number: int) -> int:
    """The least number of a group's ranks, each of which has to ask."""
    found = torch.tensor([number], dtype=torch.int64, device="cpu")  # whatever device an engine builds its layers on
    dist.all_reduce(found, op=dist.ReduceOp.MIN, group=group)
    return int(found)


def free_memory_of(exchange: Exchange | None, read: Callable[[], int]) -> Callable[[], int]:
    """What reads the free memory that plans are made from: with an exchange, the least of its ranks.

    Ranks that exchange have to plan alike, and a plan may turn on it.

    Args:
        read: gives the free bytes of this rank's device.
    """
    return read if exchange is None else lambda: exchange.least(read())


def checked_group(engine: str, getter: tuple[str, str], model: ModelShape) -> Any:
    """An engine's coordinator of the ranks that share the attention's heads.

    Args:
        engine: its name, for errors.
        getter: the module and the name of the engine's function that gives it.

    Raises:
        PatchError: there is none, or not of these ranks.
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
        raise PatchError(f"{engine}'s attention group has {size} ranks, and heads for {model.attn_tp_size}. {TURN_OFF}")
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
    made: Callable[[TokenShard, dist.ProcessGroup], E],
) -> tuple[E | None, str]:
    """(the exchange of this process or None, why there is none).

    All ranks of an attention group come here in the same order, and leave with the same answer.

    Args:
        where: the device of the buffers.
        group: finds the engine's coordinator; see `checked_group`.
        impossible: what of this server has no part in it, or None.
        max_tokens: most query rows of a batch that the buffers hold.
        made: the engine's exchange of the two.

    Raises:
        SettingsError: `token_shard` is on, and this server or another rank of the group cannot.
        PatchError: the engine's groups are not as expected.
        MismatchError: the ranks would not decide alike.
        NoProviderError: the exchange does not run.
    """
    # But for its links, which only a rank itself knows, a device is the same on every rank.
    if reason := sharding.never(model, replace(device, nvlink=True), settings):
        return None, reason
    if not settings.strict:  # no rank may wait for one that has left serving to its engine
        return None, _kept(settings, "strict is off, and a rank that does not serve would keep the others waiting")
    ranks = group()
    reason = impossible() or sharding.pointless(model, device, settings, max_tokens())
    if not least(ranks.cpu_group, int(not reason)):
        return None, _kept(
            settings, reason or "another rank of the attention group cannot, and its own report says why"
        )
    most, check_rows = max_tokens(), settings.trace.endswith(".jsonl")
    decides_by = repr(replace(settings, trace="off", report=""))
    libraries = sorted((one.name, one.available, one.version) for one in device.libraries.values())
    numbers = {
        "the SM version": device.sm,
        "heads": model.heads_per_rank,
        "tokens of a prefill": most,
        "settings (their checksum)": zlib.crc32(decides_by.encode()),
        "whether trace is a .jsonl file": int(check_rows),
        "kernel libraries (their checksum)": zlib.crc32(repr(libraries).encode()),
    }
    require_agreement(ranks.cpu_group, torch.device("cpu"), tuple(numbers), tuple(numbers.values()))
    d_qk, d_v = model.row_dims
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
    exchange = made(shard, ranks.cpu_group)
    exchange.prove(model.heads_per_rank, d_qk, d_v, torch.bfloat16, where)
    return exchange, ""


def _kept(settings: Settings, reason: str) -> str:
    """The reason why heads are kept.

    Raises:
        SettingsError: the settings ask for the trade.
    """
    if settings.token_shard == "on":
        raise SettingsError(f"token_shard is on and cannot work here: {reason}; allowed here: auto, off")
    return reason
