"""Steps of V4 that have plans are in the trace, the metrics and the report, eager and replayed."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_plugin.backends.sglang.v4.attention import with_v4_plans
from nsa_plugin.decision.plan import Plan
from tests.backends.counted import Counted
from tests.backends.fake_sglang.v4 import Engine, batch, started
from tests.backends.fake_sglang.v32 import ForwardMode, ReplayedBySize, forward_batch

pytestmark = pytest.mark.usefixtures("nothing_measured")

STEP = "decode/sparse_decode/reference"
VERIFY = "target_verify/sparse_decode/reference"


class FirstEngine(ReplayedBySize, Engine):
    """The backend of 0.5.12, which stores the batch to replay."""

    def __init__(self, of: Any) -> None:
        super().__init__(of)
        self._replay_forward_batch: Any = None

    def replay(self, bs: int) -> None:
        self.calls.append(f"replayed {bs}")


def stepping(original: type = Engine, draft_tokens: int | None = None, **settings: Any) -> Any:
    """A backend whose planner's plans are in `counted`."""
    backend = started(batch((1, 300), (1, 7), mode=ForwardMode.DECODE), original, **settings)
    backend.speculative_num_draft_tokens = draft_tokens
    backend.counted = backend.nsa_plugin.planner.metrics = Counted()
    return backend


def routes(backend: Any) -> dict[str, int]:
    return dict(backend.nsa_plugin.planner.trace.counts)


def test_an_eager_step_is_recorded_once_and_not_by_each_layer():
    backend = stepping(decode_backend="reference")
    for _ in range(2):
        backend.init_forward_metadata(backend.batch.forward)
    assert routes(backend) == {STEP: 2}
    plan: Plan = backend.counted[0]
    assert (plan.provider, len(backend.counted)) == ("reference", 2)


def test_a_captured_step_is_recorded_where_it_is_replayed_and_not_at_capture():
    backend = stepping(decode_backend="reference")
    backend.init_forward_metadata_out_graph(backend.batch.forward, in_capture=True)
    assert routes(backend) == {}
    backend.init_forward_metadata_out_graph(backend.batch.forward)
    backend.init_forward_metadata_out_graph(backend.batch.forward, False)
    assert routes(backend) == {STEP: 2}
    assert backend.calls == ["captured step", "replayed step", "replayed step"]


def test_verified_rows_count_for_each_request():
    backend = stepping(draft_tokens=4, decode_backend="reference")
    backend.init_forward_metadata_out_graph(forward_batch(ForwardMode.TARGET_VERIFY, [4, 4], [300, 7]))
    assert routes(backend) == {VERIFY: 1}
    assert backend.counted[0].reasons["phase"].startswith("target_verify: 2 requests, 8 query tokens")


@pytest.mark.parametrize(("replay", "rows"), [(True, 8), (False, 3)])
def test_drafted_rows_of_a_replay_are_those_of_its_capture(replay: bool, rows: int):
    backend = stepping(draft_tokens=4, decode_backend="reference")
    given = forward_batch(ForwardMode.DRAFT_EXTEND, [1, 2], [300, 7])
    (backend.init_forward_metadata_out_graph if replay else backend.init_forward_metadata)(given)
    assert f"2 requests, {rows} query tokens" in backend.counted[0].reasons["phase"]


def test_a_rank_without_requests_records_nothing():
    backend = stepping(decode_backend="reference")
    idle = forward_batch(ForwardMode.DECODE, [1], [1], actual_forward_mode=ForwardMode.IDLE)
    backend.init_forward_metadata_out_graph(idle)
    backend.init_forward_metadata(forward_batch(ForwardMode.IDLE, [], []))
    assert routes(backend) == {}
    assert "replayed step" in backend.calls


def test_steps_that_stay_sglangs_are_not_recorded():
    backend = stepping(prefill_backend="reference")
    backend.init_forward_metadata(backend.batch.forward)
    backend.init_forward_metadata_out_graph(backend.batch.forward)
    assert routes(backend) == {}
    plain = with_v4_plans(Engine)(backend.batch)
    plain.init_forward_metadata_out_graph(backend.batch.forward)
    assert plain.calls == ["replayed step"]


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY])
def test_a_replay_of_the_first_version_is_recorded_by_its_size(mode: ForwardMode):
    backend = stepping(FirstEngine, draft_tokens=4, decode_backend="reference")
    given = {name: None for name in ("req_pool_indices", "seq_lens", "encoder_lens", "spec_info", "seq_lens_cpu")}
    replay = {"bs": 8, "seq_lens_sum": 0, "forward_mode": mode} | given
    backend._replay_forward_batch = SimpleNamespace(forward_mode=mode, rids=["a"])
    backend.init_forward_metadata_replay_cuda_graph(**replay)
    rows = 8 if mode is ForwardMode.DECODE else 32
    assert f"8 requests, {rows} query tokens" in backend.counted[0].reasons["phase"]
    backend._replay_forward_batch = SimpleNamespace(forward_mode=ForwardMode.IDLE)
    backend.init_forward_metadata_replay_cuda_graph(**replay)
    assert len(backend.counted) == 1
    assert backend.calls == ["replayed 8", "replayed 8"]


def held(backend: Any) -> weakref.ref[torch.Tensor]:
    """Prepare a prefill; return what the state's tables of it would hold."""
    backend.init_forward_metadata(forward_batch(ForwardMode.EXTEND, [9], [300]))
    backend.nsa_plugin.prefill.tables = kept = torch.zeros(4)
    return weakref.ref(kept)


@pytest.mark.parametrize("steps", ["auto", "reference"])
@pytest.mark.parametrize("in_capture", [True, False])
def test_a_captured_step_frees_the_prefill_before_it(steps: str, in_capture: bool):
    backend = stepping(prefill_backend="reference", decode_backend=steps)
    kept = held(backend)
    assert kept() is not None
    backend.init_forward_metadata_out_graph(backend.batch.forward, in_capture=in_capture)
    gc.collect()
    assert kept() is None
    assert (backend.nsa_plugin.route, backend.nsa_plugin.schedules) == (None, {})


def test_a_replay_of_the_first_version_frees_the_prefill_before_it():
    backend = stepping(FirstEngine, prefill_backend="reference")
    kept = held(backend)
    given = {name: None for name in ("req_pool_indices", "seq_lens", "encoder_lens", "spec_info", "seq_lens_cpu")}
    backend.init_forward_metadata_replay_cuda_graph(bs=8, seq_lens_sum=0, forward_mode=ForwardMode.DECODE, **given)
    gc.collect()
    assert kept() is None


def test_an_eager_prefill_that_passes_there_keeps_its_plan():
    """SGLang's base class prepares one through the same function."""
    backend = stepping(prefill_backend="reference")
    backend.init_forward_metadata(given := forward_batch(ForwardMode.EXTEND, [9], [300]))
    backend.init_forward_metadata_out_graph(given)
    assert backend.nsa_plugin.route is not None
    assert backend.nsa_plugin.prefill is not None
