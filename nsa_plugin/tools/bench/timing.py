"""The clock: CUDA events around single calls, and the device's own rates.

How a call is timed:

- The warm-up lasts a time, not a number of calls, so that clocks settle for short calls too.
- *Reading* a large buffer empties the L2 cache before every run. Writing one would leave dirty lines, and the timed
  call would pay for their write-back. Between two uses of a cache a model runs its other layers, so serving sees a
  cold L2; rows that one call reads twice may still hit.
- The device is kept busy while the host enqueues the call, so a run measures device time and not Python's launch
  time, unless the call itself waits for the device.
- Decode-size calls are replays of a CUDA graph, as engines run them. A call that cannot be captured is timed
  directly, and the record's row says "eager".

The median and the minimum of the runs are kept.

Published kernel figures are usually measured back to back: each call finds the L2 cache as the previous one left it and
waits for no event. `CudaTimer(back_to_back=True)` does the same, for comparison with such figures only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from nsa_plugin.tools.bench.floors import Rates
from nsa_plugin.tools.bench.record import BACK_TO_BACK, FLUSHED
from nsa_plugin.tools.bench.workload import TimedCall

_WARM_UP_SECONDS = 0.03
_MIN_RUNS, _MAX_RUNS = 10, 200
_FLUSH_OF_L2 = 4  # bytes read, as a multiple of the L2 cache
_BATCH_SECONDS = 0.002  # of the runs between two events, back to back
QUEUED_MARGIN = 1.5  # the device is kept busy this much longer than the host takes to enqueue a call


@dataclass(frozen=True)
class Timing:
    """The time of one call: microseconds over `runs` runs, how they ran, and the last result."""

    median_us: float
    min_us: float
    runs: int
    how: str  # "graph" or "eager"
    result: Any


class Timer(Protocol):
    """The clock that the runner needs."""

    def time(self, call: TimedCall, *, graph: bool, seconds: float, runs: int | None) -> Timing:
        """Time `call` for about `seconds`, or `runs` times."""
        ...

    def extra_mib(self, call: TimedCall) -> float:
        """Peak memory in MiB that a call needs besides what was allocated before it."""
        ...


class CudaTimer:
    """Times calls on the current CUDA device; see the module.

    Args:
        back_to_back: do not empty the L2 cache; each reading is the mean of consecutive runs.
    """

    def __init__(self, *, back_to_back: bool = False) -> None:
        self.l2 = BACK_TO_BACK if back_to_back else FLUSHED
        self._flushed = l2_flusher(torch.device("cuda", torch.cuda.current_device()))
        self._cycles_a_second = _sleep_rate()

    def time(self, call: TimedCall, *, graph: bool, seconds: float, runs: int | None) -> Timing:
        held: list[Any] = [None]

        def eager() -> None:
            held[0] = call()

        run, how = eager, "eager"
        if graph and (captured := _capture(call)) is not None:
            recorded, held[0] = captured
            run, how = recorded.replay, "graph"
        host, device = _warm_up(run)
        batch = max(1, int(_BATCH_SECONDS / max(device, 1e-6))) if self.l2 == BACK_TO_BACK else 1
        queued = int(host * QUEUED_MARGIN * self._cycles_a_second * batch)
        count = runs or min(_MAX_RUNS, max(_MIN_RUNS, int(seconds / max(device, 1e-6))))
        events = event_pairs(count)
        for start, end in events:
            if self.l2 == FLUSHED:
                self._flushed.amax()
            torch.cuda._sleep(queued)
            start.record()
            for _ in range(batch):
                run()
            end.record()
        torch.cuda.synchronize()
        measured = [start.elapsed_time(end) * 1e3 / batch for start, end in events]
        return Timing(statistics.median(measured), min(measured), count, how, held[0])

    def extra_mib(self, call: TimedCall) -> float:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        del result
        return (peak - before) / 2**20


def l2_flusher(device: torch.device) -> torch.Tensor:
    """A buffer whose reading empties the L2 cache."""
    size = _FLUSH_OF_L2 * torch.cuda.get_device_properties(device).L2_cache_size
    return torch.zeros(size // 4, dtype=torch.int32, device=device)


def event_pairs(count: int) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
    """`count` pairs of timing events, for the start and the end of a run."""
    return [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]


def _capture(call: TimedCall) -> tuple[torch.cuda.CUDAGraph, Any] | None:
    """A CUDA graph of the call and the result that its replays write; None if the call cannot be captured."""
    run_aside(call)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            result = call()
    except RuntimeError:  # e.g. a host sync, which a capture does not permit; the capture is over by now
        torch.cuda.synchronize()
        return None
    graph.replay()
    torch.cuda.synchronize()
    return graph, result


def run_aside(call: TimedCall) -> None:
    """Call a few times on another stream before a capture: what is allocated at first use is allocated here."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


def _warm_up(run: Callable[[], None]) -> tuple[float, float]:
    """Warm up. Returns seconds that the host needs to enqueue a run, and seconds that a whole run takes."""
    torch.cuda.synchronize()
    began, host, count = time.perf_counter(), [], 0
    while count < 3 or time.perf_counter() - began < _WARM_UP_SECONDS:
        before = time.perf_counter()
        run()
        host.append(time.perf_counter() - before)
        torch.cuda.synchronize()
        count += 1
    return statistics.median(host), (time.perf_counter() - began) / count


def _sleep_rate() -> float:
    """Cycles of `torch.cuda._sleep` a second."""
    cycles = 1_000_000
    torch.cuda._sleep(cycles)
    ((start, end),) = event_pairs(1)
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize()
    return cycles / (start.elapsed_time(end) * 1e-3)


def measure_rates(timer: Timer, *, copy_bytes: int = 2**31, side: int = 8192) -> Rates:
    """The device's rates for a large copy and large matrix products on random data, by the median run."""
    copy_us = _copy_us(timer, copy_bytes)
    a, b = (torch.randn(side, side, device="cuda").bfloat16() for _ in range(2))
    bf16 = timer.time(lambda: a @ b, graph=False, seconds=0.2, runs=None)
    flops = 2 * side**3
    return Rates(
        copy_gb_s=2 * copy_bytes / copy_us / 1e3,
        matmul_tflops=flops / bf16.median_us / 1e6,
        fp8_matmul_tflops=_fp8_rate(timer, a, b, flops),
    )


def _copy_us(timer: Timer, size: int) -> float:
    source = torch.randint(0, 2**31 - 1, (size // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return timer.time(lambda: target.copy_(source), graph=False, seconds=0.1, runs=None).median_us


def _fp8_rate(timer: Timer, a: torch.Tensor, b: torch.Tensor, flops: int) -> float | None:
    """TFLOPS of an fp8 product, or None if this torch or device does not support it."""
    one = torch.ones((), device="cuda")
    left, right = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()

    def product() -> Any:
        return torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    try:
        product()
    except (RuntimeError, AttributeError, TypeError):
        return None
    return flops / timer.time(product, graph=False, seconds=0.2, runs=None).median_us / 1e6
