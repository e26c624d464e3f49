"""Each contender is measured, refused or fails; every suite runs at tiny sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nsa_plugin.libraries.registry import OPS, REFERENCE, Provider, Registry
from nsa_plugin.tools.bench import inputs
from nsa_plugin.tools.bench.cases import SUITES, BenchCase, BenchError, Suite, case
from nsa_plugin.tools.bench.floors import Rates
from nsa_plugin.tools.bench.outcome import Outcome
from nsa_plugin.tools.bench.runner import BenchOptions, run_suite
from nsa_plugin.tools.bench.workload import Context, Workload
from tests.tools.bench import fakes
from tests.tools.bench.fakes import CPU, RATES, FakeTimer

PREFILL = SUITES["sparse-mla-prefill"]


def run(suite: Suite, *wanted: str, registry: Registry | None = None, timer: FakeTimer | None = None) -> Outcome:
    where = fakes.context(registry, *wanted)
    return run_suite(suite, suite.tiny, where, timer or FakeTimer(), RATES, BenchOptions())


class WithTopk(Registry):
    """The registry with the op `topk_rows`, where it is not in the table yet."""

    def __init__(self) -> None:
        super().__init__()
        if "topk_rows" not in OPS:
            target = "nsa_plugin.kernels.topk:reference_topk_rows"
            self._providers["topk_rows"] = {REFERENCE: Provider(op="topk_rows", name=REFERENCE, target=target)}


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_every_suite_measures_and_judges_the_references(suite: Suite) -> None:
    timer = FakeTimer()
    outcome = run(suite, REFERENCE, registry=WithTopk(), timer=timer)
    assert outcome.failed == []
    measured = [row for row in outcome.rows if REFERENCE in row["provider"]]
    assert {row["op"] for row in measured} == {one.op for one in suite.tiny} == {one.op for one in suite.cases}
    for row in measured:
        assert row["floor_us"] > 0
        assert 0 <= row["max_error"] < 0.2
        assert row["runs"] == 7
    # The stock paths need libraries that no CPU has.
    libraries = ("flash_mla", "deep_gemm", "fa3", "SGLang", "vLLM", ".")
    assert all(any(name in r["provider"] for name in libraries) for r in outcome.refused), outcome.refused


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_cases_of_a_suite_have_the_same_fields_and_are_listed_once(suite: Suite) -> None:
    assert len(set(suite.cases)) == len(suite.cases)
    for one in (*suite.cases, *suite.tiny):
        (model,) = {tuple(other.as_dict()) for other in suite.cases if other.op == one.op}
        assert tuple(one.as_dict()) == model


def test_providers_that_refuse_fail_or_are_wrong_are_listed_with_the_reason() -> None:
    registry = fakes.registry("good", "wrong", "silent", "picky", "broken", "absent")
    registry.register(
        Provider(op="sparse_mla_prefill", name="fake_library", target="no:where", modules=("no_such_library",))
    )
    outcome = run(
        PREFILL,
        *(f"fake_{n}" for n in ("good", "wrong", "silent", "picky", "broken", "absent", "library")),
        registry=registry,
    )
    assert [row["provider"] for row in outcome.rows] == ["fake_good"] * len(PREFILL.tiny)
    refused = {entry["provider"]: entry["reason"] for entry in outcome.refused}
    assert refused["fake_picky"] == "fake: heads is 3; allowed: 64"
    assert "does not load" in refused["fake_absent"]
    assert "not installed: no_such_library" in refused["fake_library"]
    assert "flash_mla" in refused["flash_mla padded"]
    failed = {entry["provider"]: entry["reason"] for entry in outcome.failed}
    assert failed.keys() == {"fake_wrong", "fake_silent", "fake_broken"}
    assert failed["fake_broken"] == "ValueError: an assertion of the library"
    assert failed["fake_wrong"].startswith("wrong result: out: 1 of")
    assert failed["fake_silent"] == "wrong result: out has values that are not finite"
    assert outcome.failed[0]["case"] == PREFILL.tiny[0].as_dict()


def test_reference_is_measured_only_if_it_is_asked_for() -> None:
    everything = run(PREFILL, registry=fakes.registry("good"))
    names = {row["provider"] for row in everything.rows} | {entry["provider"] for entry in everything.refused}
    assert "fake_good" in names
    assert REFERENCE not in names


def test_op_that_is_not_registered_is_refused_by_name() -> None:
    (contender,) = fakes.context().contenders("an_op_of_another_release", lambda function: function)
    with pytest.raises(Exception, match="an_op_of_another_release"):
        contender.load()


def test_first_baseline_that_runs_is_compared_with() -> None:
    outcome = run(fakes.SUITE, timer=FakeTimer({1.0: 300.0, 2.0: 100.0, 3.0: 600.0, 9.0: 11.0}))
    stock, ours, other = outcome.rows
    for row in outcome.rows:
        assert (row["baseline"], row["baseline_us"]) == ("stock", 300.0)
    assert [row["speedup"] for row in outcome.rows] == [1.0, 3.0, 0.5]
    assert (ours["median_us"], ours["min_us"], ours["timing"]) == (100.0, 50.0, "eager")
    assert ours["floor_us"] == 1.0  # 4 MB at 4000 GB/s
    assert other["floor_us"] == 10.0  # its own work: 6 Gflop at 600 TFLOPS
    assert ours["absorb_us"] == 11.0
    assert "absorb_us" not in stock
    assert ours["extra_mib"] == 1.5
    assert [entry["provider"] for entry in outcome.refused] == ["absent"]


def test_without_a_baseline_there_is_no_speed_up() -> None:
    rows = run(PREFILL, "fake_good", registry=fakes.registry("good")).rows
    assert [(row["baseline"], row["baseline_us"], row["speedup"]) for row in rows] == [(None, None, None)] * 2


def test_cases_beyond_the_time_are_listed() -> None:
    outcome = run_suite(
        fakes.SUITE,
        fakes.SCALARS,
        fakes.context(),
        FakeTimer(),
        RATES,
        BenchOptions(seconds=1.0),
        clock=fakes.Clock(0.4),
    )
    assert {row["case"]["q"] for row in outcome.rows} == {1}
    assert outcome.skipped == list(fakes.SCALARS[1:])


@pytest.mark.parametrize(("load", "measure", "reached"), [(100.0, 0.0, 3), (0.0, 100.0, 1)])
def test_loading_and_compilation_do_not_count_as_time_but_measuring_does(
    load: float, measure: float, reached: int
) -> None:
    clock = fakes.Clock(0.0)
    timer = FakeTimer()
    timer.before = lambda: clock.advance(measure)
    options = BenchOptions(seconds=1.0)
    suite = fakes.compiling(lambda: clock.advance(load))
    outcome = run_suite(suite, fakes.SCALARS, fakes.context(), timer, RATES, options, clock=clock)
    assert len(outcome.rows) == reached
    assert len(outcome.skipped) == 3 - reached


def test_decode_is_timed_in_a_graph_and_prefill_is_not() -> None:
    for name, graph in (("sparse-mla-decode", True), ("sparse-mla-prefill", False)):
        timer = FakeTimer()
        run(SUITES[name], REFERENCE, timer=timer)
        assert timer.graphs == [graph] * len(SUITES[name].tiny)


def test_inputs_that_cannot_be_made_end_the_run() -> None:
    with pytest.raises(BenchError, match="inputs cannot be made: CUDA error: an illegal memory access"):
        run(fakes.BROKEN_INPUTS)


def test_inputs_are_shared_by_neighbouring_cases() -> None:
    made = []
    where = fakes.context()
    for key in (1, 2, 1, 3, 4, 5, 6, 7, 1):
        where.shared(key, lambda key=key: made.append(key) or key)
    assert made == [1, 2, 3, 4, 5, 6, 7]  # 1 was used again before it was the oldest
    where.forget()
    where.shared(1, lambda: made.append(1))
    assert made[-1] == 1
    assert len(made) == 8


def test_selection_has_different_keys_in_a_row() -> None:
    chosen = inputs.selection(CPU, 7, 40, 12, 1)
    assert ((chosen >= 0) & (chosen < 40)).all()
    assert all(len(set(row)) == 12 for row in chosen.tolist())
    few = inputs.selection(CPU, 2, 5, 8, 1)
    assert (few[:, 5:] == -1).all()
    assert all(set(row) == {-1, 0, 1, 2, 3, 4} for row in few.tolist())
    assert inputs.distinct_rows(few, 40) == 5


def test_selection_keeps_to_the_keys_that_a_row_has() -> None:
    counts = torch.tensor([0, 3, 12, 40])
    chosen = inputs.selection(CPU, 4, 40, 12, 1, counts)
    for row, count in zip(chosen.tolist(), counts.tolist(), strict=True):
        held = min(count, 12)
        assert all(0 <= key < count for key in row[:held])
        assert len(set(row[:held])) == held
        assert row[held:] == [-1] * (12 - held)


def test_extra_memory_is_beyond_the_output_and_holds_what_a_call_keeps() -> None:
    def one(case: BenchCase, context: Context) -> Workload:
        made = fakes.scalars(case, context)
        ours = replace(made.contenders[2], output_bytes=2**19, kept_bytes=lambda call: 3 * 2**20)
        return replace(made, contenders=(made.contenders[1], ours))

    suite = fakes.building(one)
    rows = run_suite(suite, suite.tiny, fakes.context(), FakeTimer(), RATES, BenchOptions()).rows
    assert [row["extra_mib"] for row in rows] == [1.5, 1.5 + 3 - 0.5]


def test_large_cache_repeats_pages_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_OWN_ROWS", 8)
    cache = inputs.filled_cache(CPU, "v32_fp8", 40, 4, 1)
    assert cache.num_slots == 40
    assert len(cache.data.unique(dim=0)) == 2
    assert inputs.filled_cache(CPU, "v4_fp8", 5, 4, 1).num_slots == 8


def test_floor_of_a_case_follows_the_rates() -> None:
    half = Rates(RATES.copy_gb_s / 2, RATES.matmul_tflops / 2, None)
    tiny = run_suite(fakes.SUITE, fakes.SCALARS[:1], fakes.context(), FakeTimer(), half, BenchOptions(runs=3))
    assert tiny.rows[0]["floor_us"] == 2.0
    assert tiny.rows[0]["runs"] == 3


def test_case_reads_as_text() -> None:
    assert str(case("an_op", heads=16, layout="bf16")) == "an_op heads 16, layout bf16"
