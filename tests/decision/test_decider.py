"""`Decider` keeps facts between batches; its plans and reasons are those of `decide`, which keeps none."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from nsa_plugin.decision import (
    Attention,
    BatchShape,
    Constraints,
    Decider,
    ModelShape,
    Phase,
    Plan,
    Route,
    decide,
    partition,
    timings,
)
from nsa_plugin.decision.dense import dense_routes
from nsa_plugin.decision.plan import Reasons
from nsa_plugin.errors import NoProviderError, SettingsError
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.settings import Settings
from tests.decision import fuzz

V32_TP8 = ModelShape(num_heads=128, attn_tp_size=8, kv_layout="v32_fp8")


def outcome(plan: Callable[..., Plan], *inputs: object) -> object:
    """The plan with its reasons, or the error."""
    try:
        return plan(*inputs).as_dict()
    except (SettingsError, NoProviderError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("seed", range(4))
def test_a_decider_plans_random_batches_as_decide_does(seed: int) -> None:
    random = Random(seed)
    for _ in range(60):
        model, device, settings = fuzz.model(random), fuzz.machine(random), fuzz.settings(random)
        decider = Decider(model, device, settings)
        restricted = [fuzz.constraints(random) for _ in range(3)]
        for number in range(15):
            batch, constraints = fuzz.batch(random), restricted[number % 3]
            kept = outcome(decider.decide, batch, constraints)
            assert kept == outcome(decide, model, batch, device, settings, constraints), (batch, constraints)


def test_a_limit_of_dense_attention_is_that_of_the_batchs_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept under one batch's constraints must not answer for another's."""
    monkeypatch.setattr(timings, "dense_limit", lambda sm, layout, heads, dense, sparse, dims: 100 * len(sparse))
    decider = Decider(V32_TP8, synthetic(90), Settings())
    batch = BatchShape(phase=Phase.EXTEND, num_requests=1, num_tokens=150, max_kv_len=150, total_kv_len=150)
    cuda = Route(Attention.SPARSE_PREFILL, "cuda")
    for paths, dense in ((None, True), (frozenset({cuda, *dense_routes()}), False)):
        plan = decider.decide(batch, Constraints(paths=paths))
        assert (plan.attention is Attention.MHA_ONE_SHOT) == dense, plan.reasons["attention"]


def test_the_indexer_of_one_phase_does_not_answer_for_another() -> None:
    """On a GPU the reference's indexer comes only with its attention, which a setting selects for one phase."""
    device, settings = synthetic(90, libraries=("flash_mla",)), Settings(prefill_backend="reference")
    decider = Decider(V32_TP8, device, settings)
    prefill, step = (outcome(decider.decide, batch_of(number)) for number in (3, 2))
    assert prefill == outcome(decide, V32_TP8, batch_of(3), device, settings)
    assert step == outcome(decide, V32_TP8, batch_of(2), device, settings)
    assert isinstance(prefill, dict)
    assert not isinstance(step, dict)


def test_a_decider_splits_random_prefills_as_partition_does() -> None:
    random, device, settings = Random(5), synthetic(90), Settings()
    decider = Decider(V32_TP8, device, settings)
    for _ in range(200):
        q_lens = [fuzz.length(random) for _ in range(random.randint(0, 5))]
        kv_lens = [rows + fuzz.length(random) for rows in q_lens]
        parts = decider.partition(q_lens, kv_lens, Phase.EXTEND)
        alone = partition(V32_TP8, q_lens, kv_lens, Phase.EXTEND, device, settings)
        assert parts == alone
        assert [part.plan.reasons for part in parts] == [part.plan.reasons for part in alone]


def batch_of(number: int) -> BatchShape:
    phase = Phase.EXTEND if number % 2 else Phase.DECODE
    rows = 1 + number * 7
    return BatchShape(phase=phase, num_requests=1, num_tokens=rows, max_kv_len=9000 + rows, total_kv_len=9000 + rows)


def test_what_a_decider_keeps_does_not_grow_with_its_batches() -> None:
    decider = Decider(V32_TP8, synthetic(90), Settings())
    sizes = []
    for number in range(400):
        outcome(decider.decide, batch_of(number))
        sizes.append(len(decider._known))
    assert len(set(sizes[100:])) == 1


def test_threads_share_a_decider() -> None:
    device, settings = synthetic(90), Settings()
    decider = Decider(V32_TP8, device, settings)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: decider.decide(batch_of(number)).as_dict(), range(200)))
    assert found == [decide(V32_TP8, batch_of(number), device, settings).as_dict() for number in range(200)]


def test_reasons_are_rendered_once_and_when_read() -> None:
    rendered: list[str] = []

    def render() -> str:
        rendered.append("late")
        return "late"

    reasons = Reasons(lambda: {"a": "early", "b": render})
    assert list(reasons) == ["a", "b"]
    assert rendered == []
    assert reasons == {"a": "early", "b": "late"}
    assert reasons["b"] == "late"
    assert rendered == ["late"]


def test_a_plan_is_copied_and_pickled_with_its_reasons() -> None:
    plan = decide(V32_TP8, batch_of(3), synthetic(90), Settings())
    for other in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert other == plan
        assert other.reasons == plan.reasons
