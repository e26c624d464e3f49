"""Rows between the ranks of a group, and the second stream on which that happens beside attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist

from nsa_plugin.errors import NsaPluginError


class MismatchError(NsaPluginError, RuntimeError):
    """The ranks of a group do not agree on what they are about to exchange."""


def all_to_all(group: dist.ProcessGroup, into: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
    """given[r] of every rank goes to into[own rank] of rank r. Each is contiguous and may be empty.

    Parts that do not lie behind each other, so that no buffer holds them all: a chunk of every rank's rows. Where no
    rank has any rows of the chunk, this rank neither sends nor receives any, and nothing happens on any rank.
    """
    if not any(part.numel() for part in (*into, *given)):
        return
    if not given[0].is_cuda:  # gloo, whose list form takes parts of one size only
        received = into[0].new_empty(sum(part.numel() for part in into))
        sent = torch.cat([part.reshape(-1) for part in given])
        sizes = [[part.numel() for part in parts] for parts in (into, given)]
        dist.all_to_all_single(received, sent, *sizes, group=group)
        for part, found in zip(into, received.split(sizes[0]), strict=True):
            part.copy_(found.view(part.shape))
        return
    dist.all_to_all(list(into), list(given), group=group)


def require_agreement(
    group: dist.ProcessGroup, device: torch.device, names: Sequence[str], numbers: Sequence[int]
) -> None:
    """Compare numbers over the group; a wait for every rank and for the device.

    Args:
        names: of the numbers, for the error.
        numbers: as many on every rank.

    Raises:
        MismatchError: they differ, on every rank with the same message: the numbers of each.
    """
    own = torch.tensor(list(numbers), dtype=torch.int64, device=device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    table = [row.tolist() for row in gathered]
    if all(row == table[0] for row in table):
        return
    differing = [name for name, *column in zip(names, *table, strict=True) if len(set(column)) > 1]
    listed = "; ".join(
        f"rank {rank}: " + ", ".join(f"{name} {number}" for name, number in zip(names, row, strict=True))
        for rank, row in enumerate(table)
    )
    raise MismatchError(f"token_shard: the ranks differ in {', '.join(differing)}. {listed}")


class SideStream:
    """A second stream of a device; on a CPU everything happens in turn.

    High in priority: as blocks of attention end, those of an exchange are next.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @contextmanager
    def after_caller(self) -> Iterator[None]:
        """The block's work runs on the side, behind what the caller's stream has been given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with self.aside():
            yield

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The block's work runs on the side, behind nothing but what the side has been given before."""
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            yield

    def mark(self) -> torch.cuda.Event | None:
        """The end of what the side has been given so far, for `caller_waits`."""
        return None if self._stream is None else self._stream.record_event()

    def caller_waits(self, mark: torch.cuda.Event | None) -> None:
        """The caller's stream goes on behind the mark."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(mark)
