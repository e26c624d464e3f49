"""A clock and a judge for calls that all ranks of the default group make together.

Every rank runs the same calls the same number of times, whatever its clock says: a rank that stopped earlier would
leave the others waiting in a collective.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from nsa_plugin.tools.bench.floors import Rates
from nsa_plugin.tools.bench.record import FLUSHED
from nsa_plugin.tools.bench.timing import (
    QUEUED_MARGIN,
    CudaTimer,
    Timing,
    event_pairs,
    l2_flusher,
    measure_rates,
    run_aside,
)
from nsa_plugin.tools.bench.workload import TimedCall, WrongResultError

_WARM_UPS = 10
_CYCLES_A_SECOND = 2e9  # of a GPU's clock, at most


def gather(value: Any) -> list[Any]:
    """The value of every rank, in order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class GroupTimer:
    """Times a call that every rank makes: the maximum over the ranks of their medians, and of their minima.

    On a GPU a run starts when a small collective on the device has synchronised the ranks, with the L2 cache emptied by
    reading and the call already enqueued; decode-size calls are replays of a CUDA graph. On a CPU, for dry runs, it is
    the host's clock after a barrier.
    """

    l2 = FLUSHED

    def __init__(self, device: torch.device, runs: int):
        self._device, self._runs = device, runs
        if device.type == "cuda":
            self._flushed = l2_flusher(device)
            self._together = torch.zeros(1, device=device)

    def time(self, call: TimedCall, *, graph: bool, seconds: float, runs: int | None) -> Timing:
        """Time `runs` runs, or the timer's own number if None. `seconds` is ignored."""
        count = runs or self._runs
        held: list[Any] = [None]

        def eager() -> None:
            held[0] = call()

        if self._device.type == "cpu":
            measured, how = self._on_host(eager, count), "eager"
        else:
            recorded = self._captured(call, held) if graph else None
            how = "eager" if recorded is None else "graph"
            measured = self._on_device(eager if recorded is None else recorded.replay, count)
        medians, leasts = zip(*gather((statistics.median(measured), min(measured))), strict=True)
        return Timing(max(medians), max(leasts), count, how, held[0])

    def extra_mib(self, call: TimedCall) -> float:
        raise NotImplementedError("no group workload reports memory")

    def _on_host(self, run: Callable[[], None], count: int) -> list[float]:
        measured = []
        for _ in range(count):
            dist.barrier()
            began = time.perf_counter()
            run()
            measured.append((time.perf_counter() - began) * 1e6)
        return measured

    def _on_device(self, run: Callable[[], None], count: int) -> list[float]:
        host = []
        for _ in range(_WARM_UPS):
            began = time.perf_counter()
            run()
            host.append(time.perf_counter() - began)
            torch.cuda.synchronize()
        queued = int(max(gather(statistics.median(host))) * QUEUED_MARGIN * _CYCLES_A_SECOND)
        events = event_pairs(count)
        for start, end in events:
            dist.barrier()
            self._flushed.amax()
            torch.cuda._sleep(queued)
            dist.all_reduce(self._together)
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in events]

    def _captured(self, call: TimedCall, held: list[Any]) -> torch.cuda.CUDAGraph | None:
        """A graph of the call whose replays write `held`'s result; None on every rank if one rank cannot capture it."""
        run_aside(call)
        graph, failure = torch.cuda.CUDAGraph(), ""
        try:
            # This thread only: NCCL's watchdog queries its events meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                held[0] = call()
        except RuntimeError as error:  # e.g. a host sync
            torch.cuda.synchronize()
            failure = str(error)
        return None if any(gather(failure)) else graph


def on_all_ranks(judge: Callable[[Any], float]) -> Callable[[Any], float]:
    """The largest error of all ranks; a wrong result on one rank raises `WrongResultError` on all."""

    def judged(result: Any) -> float:
        error, wrong = 0.0, ""
        try:
            error = judge(result)
        except WrongResultError as found:
            wrong = str(found)
        verdicts = gather((error, wrong))
        for rank, (_, reason) in enumerate(verdicts):
            if reason:
                raise WrongResultError(f"rank {rank}: {reason}")
        return float(max(found for found, _ in verdicts))

    return judged


def measured_rates(device: torch.device) -> Rates:
    """This rank's rates; on a CPU, rough ones for a dry run."""
    if device.type == "cuda":
        return measure_rates(CudaTimer())
    side = 256
    a, b = torch.ones(side, side), torch.empty(side, side)
    copied, multiplied = _seconds(lambda: b.copy_(a)), _seconds(lambda: torch.mm(a, a, out=b))
    return Rates(copy_gb_s=8 * side**2 / copied / 1e9, matmul_tflops=2 * side**3 / multiplied / 1e12)


def _seconds(run: Callable[[], object]) -> float:
    run()
    began = time.perf_counter()
    run()
    return max(time.perf_counter() - began, 1e-9)
