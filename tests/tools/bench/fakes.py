"""A clock that is told the times, providers that refuse, fail and are wrong, and a suite of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.sparse_mla import PrefillOutput, reference_prefill
from nsa_plugin.libraries.registry import Provider, Registry
from nsa_plugin.tools.bench.cases import BenchCase, Suite, case
from nsa_plugin.tools.bench.floors import Rates, Work
from nsa_plugin.tools.bench.judges import close
from nsa_plugin.tools.bench.record import BACK_TO_BACK, FLUSHED
from nsa_plugin.tools.bench.timing import Timing
from nsa_plugin.tools.bench.workload import Contender, Context, TimedCall, Workload

CPU = torch.device("cpu")
RATES = Rates(copy_gb_s=4000.0, matmul_tflops=600.0, fp8_matmul_tflops=1200.0)


class FakeTimer:
    """Calls once and says that it took what `times` holds for what the call returns, else 100 µs."""

    def __init__(self, times: Mapping[Any, float] | None = None, *, back_to_back: bool = False):
        self.times = dict(times or {})
        self.l2 = BACK_TO_BACK if back_to_back else FLUSHED
        self.graphs: list[bool] = []
        self.before: Callable[[], None] = lambda: None

    def time(self, call: TimedCall, *, graph: bool, seconds: float, runs: int | None) -> Timing:
        self.before()
        result = call()
        self.graphs.append(graph)
        key = float(result) if isinstance(result, torch.Tensor) and result.numel() == 1 else None
        median = self.times.get(key, 100.0)
        return Timing(median, median / 2, runs or 7, "graph" if graph else "eager", result)

    def extra_mib(self, call: TimedCall) -> float:
        call()
        return 1.5


class Clock:
    """Seconds that go on by `step` each time it is looked at."""

    def __init__(self, step: float):
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.advance(self.step)
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def registry(*providers: str) -> Registry:
    """The plugin's registry as it is, and sparse prefill providers that are functions of this module."""
    made = Registry()
    for name in providers:
        made.register(Provider(op="sparse_mla_prefill", name=f"fake_{name}", target=f"{__name__}:{name}"))
    return made


def context(made: Registry | None = None, *wanted: str) -> Context:
    return Context(CPU, None, made or Registry(), wanted)


def good(*args: Any, **kwargs: Any) -> PrefillOutput:
    return reference_prefill(*args, **kwargs)


def wrong(*args: Any, **kwargs: Any) -> PrefillOutput:
    result = reference_prefill(*args, **kwargs)
    result.out[-1, -1, -1] += 0.1
    return result


def silent(q: torch.Tensor, *_: Any, out: torch.Tensor, **__: Any) -> PrefillOutput:
    """Writes nothing."""
    return PrefillOutput(out, q.new_zeros(q.shape[:2]), q.new_zeros(q.shape[:2]))


def picky(q: torch.Tensor, *_: Any, **__: Any) -> PrefillOutput:
    raise KernelArgumentError(f"fake: heads is {q.shape[1]}; allowed: 64")


def broken(*_: Any, **__: Any) -> PrefillOutput:
    raise ValueError("an assertion of the library\nand its second line")


# ---------------------------------------------------------------------------------- a suite of scalars

SCALARS: tuple[BenchCase, ...] = tuple(case("scalar", q=q, kv=1) for q in (1, 2, 4))


def scalars(case: BenchCase, context: Context) -> Workload:
    """Contenders that return 1, 2 and 3; the first baseline is not installed."""

    def returns(value: float) -> Callable[[], TimedCall]:
        return lambda: lambda: torch.tensor(value)

    def absent() -> TimedCall:
        raise ImportError("No module named 'absent'")

    def judge(result: torch.Tensor) -> float:
        return close("out", result, torch.tensor(2.0), (1.0, 0.0))

    return Workload(
        work=Work(bytes=4_000_000 * case.number("q")),
        contenders=(
            Contender("absent", absent),
            Contender("stock", returns(1.0)),
            Contender("ours", returns(2.0), extra_call=("absorb_us", lambda: torch.tensor(9.0))),
            Contender("other", returns(3.0), work=Work(bytes=0, flops=6_000_000_000)),
        ),
        judge=judge,
        baselines=("absent", "stock"),
        memory=True,
    )


SUITE = Suite("scalars", "for the tests", f"{__name__}:scalars", SCALARS, SCALARS[:1])


def with_a_wrong_one(case: BenchCase, context: Context) -> Workload:
    right = scalars(case, context)
    far = Contender("far", lambda: lambda: torch.tensor(9.0))
    return replace(right, contenders=(*right.contenders, far))


def suite_with_a_wrong_contender() -> Suite:
    return replace(SUITE, target=f"{__name__}:with_a_wrong_one")


@dataclass(frozen=True)
class _BuiltSuite(Suite):
    made_by: Callable[[BenchCase, Context], Workload] = scalars

    def build(self) -> Callable[[BenchCase, Context], Workload]:
        return self.made_by


def building(made_by: Callable[[BenchCase, Context], Workload]) -> Suite:
    """A suite of one scalar case, made ready by a function that no module has to hold."""
    return _BuiltSuite("built", "for the tests", "", SCALARS[:1], SCALARS[:1], made_by)


@dataclass(frozen=True)
class _CompilingSuite(Suite):
    take_time: Callable[[], None] = lambda: None

    def build(self) -> Callable[[BenchCase, Context], Workload]:
        def build(case: BenchCase, context: Context) -> Workload:
            def load() -> TimedCall:
                self.take_time()
                return lambda: torch.tensor(2.0)

            return Workload(Work(bytes=1), (Contender("compiled", load),), lambda result: 0.0)

        return build


def compiling(take_time: Callable[[], None]) -> Suite:
    """A suite whose one contender takes time to load."""
    return _CompilingSuite("compiling", "for the tests", "", SCALARS, SCALARS, take_time)


def broken_inputs(case: BenchCase, context: Context) -> Workload:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")


BROKEN_INPUTS = Suite("broken", "for the tests", f"{__name__}:broken_inputs", SCALARS, SCALARS)

HOST: dict[str, Any] = {
    "gpu": "NVIDIA H200",
    "gpus": 1,
    "torch": "2.11.0",
    "triton": "3.6.0",
    "libraries": {"sgl-flash-mla": "1.0.0"},
    "commit": "0123abc",
    "l2": "flushed",
    "copy_gb_s": 4250.0,
    "matmul_tflops": 686.0,
    "fp8_matmul_tflops": None,
}
