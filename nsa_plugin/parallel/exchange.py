"""Exchange rows between the ranks of a group, on a second stream that overlaps with attention."""

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

    The parts need not be contiguous with each other. If no rank has rows of a chunk, nothing is exchanged on any rank.
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
    group: dist.ProcessGroup,
    device: torch.device,
    names: Sequence[str],
    numbers: Sequence[int],
    *,
    what: str = "token_shard",
) -> None:
    """Compare numbers over the group. Waits for every rank and for the device.

    Args:
        names: of the numbers, for the error.
        numbers: as many on every rank.
        what: the feature that needs the agreement, for the error.

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
    raise MismatchError(f"{what}: the ranks differ in {', '.join(differing)}. {listed}")


class SideStream:
    """A second stream of a device; on a CPU everything happens in turn.

    It has high priority: as blocks of attention end, the exchange's blocks run next.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @contextmanager
    def after_caller(self) -> Iterator[None]:
        """Run the block on this stream, after all work queued so far on the caller's stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with self.aside():
            yield

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run the block on this stream, after only the work queued on it before."""
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            yield

    def mark(self) -> torch.cuda.Event | None:
        """The end of the work queued so far on this stream, for `caller_waits`."""
        return None if self._stream is None else self._stream.record_event()

    def caller_waits(self, mark: torch.cuda.Event | None) -> None:
        """Make the caller's stream wait for the mark."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(mark)
