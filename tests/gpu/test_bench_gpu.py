"""The clock of ``nsa-plugin bench`` on a device, and every suite at tiny sizes with every provider that is there."""

from __future__ import annotations

import pytest
import torch

from nsa_plugin.libraries.registry import Registry
from nsa_plugin.tools.bench.cases import SUITES, Suite
from nsa_plugin.tools.bench.floors import Rates
from nsa_plugin.tools.bench.runner import BenchOptions, run_suite
from nsa_plugin.tools.bench.timing import CudaTimer, measure_rates
from nsa_plugin.tools.bench.workload import Context

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def timer() -> CudaTimer:
    return CudaTimer()


@pytest.mark.parametrize("graph", [False, True])
def test_result_of_the_last_run_is_kept(timer: CudaTimer, graph: bool) -> None:
    counter = torch.zeros(1, device="cuda")
    timing = timer.time(lambda: counter.add_(1), graph=graph, seconds=0.01, runs=5)
    assert (timing.runs, timing.how) == (5, "graph" if graph else "eager")
    assert 0 < timing.min_us <= timing.median_us
    assert float(timing.result) == float(counter) >= 5


def test_back_to_back_no_run_waits_for_an_event() -> None:
    counter = torch.zeros(1, device="cuda")
    once, many = CudaTimer(), CudaTimer(back_to_back=True)
    assert (once.l2, many.l2) == ("flushed", "back to back")
    timing = many.time(lambda: counter.add_(1), graph=True, seconds=0.01, runs=5)
    assert timing.runs == 5
    assert float(counter) > 100  # a reading is the mean of many
    assert 0 < timing.min_us <= timing.median_us


def test_call_that_waits_for_the_device_is_timed_as_it_is(timer: CudaTimer) -> None:
    values = torch.ones(1000, device="cuda")
    timing = timer.time(lambda: torch.full((int(values.sum()),), 2.0), graph=True, seconds=0.01, runs=5)
    assert timing.how == "eager"
    assert timing.result.shape == (1000,)
    # The device is still of use.
    assert timer.time(lambda: values * 2, graph=True, seconds=0.01, runs=5).how == "graph"


def test_extra_memory_is_the_peak_beyond_what_is_there(timer: CudaTimer) -> None:
    def call() -> torch.Tensor:
        whole = torch.empty(8 * 2**20, dtype=torch.uint8, device="cuda")
        return torch.empty(8 * 2**20, dtype=torch.uint8, device="cuda").add_(whole)

    assert timer.extra_mib(call) == pytest.approx(16, abs=0.1)
    assert timer.extra_mib(lambda: None) == 0


def test_rates_are_measured(timer: CudaTimer) -> None:
    rates = measure_rates(timer, copy_bytes=2**26, side=1024)
    assert rates.copy_gb_s > 0
    assert rates.matmul_tflops > 0


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_every_provider_that_takes_a_tiny_case_is_right(suite: Suite, timer: CudaTimer) -> None:
    major, minor = torch.cuda.get_device_capability()
    context = Context(torch.device("cuda", torch.cuda.current_device()), 10 * major + minor, Registry())
    outcome = run_suite(suite, suite.tiny, context, timer, Rates(1000.0, 100.0, None), BenchOptions(runs=3))
    assert outcome.failed == []
    assert outcome.skipped == []
    assert outcome.rows or outcome.refused
