"""Reading SGLang's batches."""

from __future__ import annotations

import pytest

from nsa_plugin.backends.sglang.v32.batch import captured_step, eager_step, phase_of, prefill_batch, step_batch
from nsa_plugin.decision.shapes import Phase
from nsa_plugin.errors import ShapeError
from tests.backends.fake_sglang.v32 import DRAFT_TOKENS, ForwardMode, forward_batch


def test_every_mode_has_a_phase_or_is_not_supported():
    phases = {mode.name: phase_of(mode) for mode in ForwardMode}
    assert phases == {
        "EXTEND": Phase.EXTEND,
        "MIXED": Phase.EXTEND,
        "DECODE": Phase.DECODE,
        "IDLE": Phase.IDLE,
        "TARGET_VERIFY": Phase.TARGET_VERIFY,
        "DRAFT_EXTEND": Phase.DRAFT_EXTEND,
        "DRAFT_EXTEND_V2": Phase.DRAFT_EXTEND,
        "SPLIT_PREFILL": None,
    }


def test_a_prefill_has_its_real_lengths():
    batch = prefill_batch(forward_batch(ForwardMode.EXTEND, [3, 5], [10, 5]))
    shape = batch.shape
    assert (shape.phase, shape.num_requests, shape.num_tokens) == (Phase.EXTEND, 2, 8)
    assert (shape.max_kv_len, shape.total_kv_len, shape.has_prefix) == (10, 15, True)
    assert (shape.cuda_graph, shape.context_parallel, shape.attention_workspace_tokens) == (False, False, 128 * 1024)
    assert batch.requests == [("request-0", 3, 10), ("request-1", 5, 5)]
    assert not batch.mixed


def test_without_a_prefix_there_is_none():
    assert not prefill_batch(forward_batch(ForwardMode.EXTEND, [4], [4])).shape.has_prefix


def test_requests_padded_by_mlp_sync_have_no_query_tokens():
    """The lengths of the contexts are padded with ones, the list of the rows is not, nor are the names."""
    padded = forward_batch(ForwardMode.EXTEND, [7], [7, 1], rids=["a"])
    batch = prefill_batch(padded)
    assert (batch.shape.num_requests, batch.shape.num_tokens, batch.shape.total_kv_len) == (1, 7, 7)
    assert batch.requests == [("a", 7, 7), ("", 0, 1)]


def test_a_mixed_batch_is_marked():
    assert prefill_batch(forward_batch(ForwardMode.MIXED, [5, 1], [5, 90])).mixed


def test_context_parallelism_is_read_from_its_metadata():
    assert prefill_batch(forward_batch(ForwardMode.EXTEND, [4], [4], attn_cp_metadata=object())).shape.context_parallel


def test_contradicting_lengths_are_an_error():
    with pytest.raises(ShapeError, match="request 0 has 5 rows and a context of 4 tokens"):
        prefill_batch(forward_batch(ForwardMode.EXTEND, [5], [4]))


@pytest.mark.parametrize(
    ("mode", "rows"),
    [
        (ForwardMode.DECODE, 3),
        (ForwardMode.TARGET_VERIFY, 3 * DRAFT_TOKENS),
        (ForwardMode.DRAFT_EXTEND_V2, 3 * DRAFT_TOKENS),
    ],
)
def test_an_eager_step_equals_a_captured_one(mode: ForwardMode, rows: int):
    phase = phase_of(mode)
    assert phase is not None
    eager = eager_step(forward_batch(mode, [], [10, 20, 30]), phase, DRAFT_TOKENS, 4096)
    captured = captured_step(phase, 3, DRAFT_TOKENS, 4096)
    assert eager.shape == captured.shape
    assert (eager.shape.num_tokens, eager.shape.max_kv_len, eager.shape.cuda_graph) == (rows, 4096, True)


def test_a_step_reads_no_lengths():
    """Batches of speculative decoding have none on the host, and asking for them would wait for the device."""
    unknown = forward_batch(ForwardMode.DECODE, [], [1, 1], seq_lens_cpu=None)
    assert eager_step(unknown, Phase.DECODE, None, 4096).shape.num_tokens == 2


def test_the_older_draft_extend_reads_its_lengths():
    shape = eager_step(forward_batch(ForwardMode.DRAFT_EXTEND, [2, 4, 1], [9, 9, 9]), Phase.DRAFT_EXTEND, 4, 4096).shape
    assert (shape.num_requests, shape.num_tokens) == (3, 7)


@pytest.mark.parametrize("phase", [Phase.IDLE, Phase.DECODE])
def test_an_idle_rank_has_no_query_tokens(phase: Phase):
    requests = 3 if phase is Phase.IDLE else 0  # padded rows are no rows either
    assert step_batch(phase, requests, requests, 4096).shape.num_tokens == 0
    assert eager_step(forward_batch(ForwardMode.IDLE, [], []), Phase.IDLE, None, 4096).shape.phase is Phase.IDLE


def test_more_rows_than_the_server_allows_are_still_a_shape():
    """At start-up SGLang captures with made-up lengths."""
    assert step_batch(Phase.TARGET_VERIFY, 1, 8, 4).shape.max_kv_len == 8


def test_equal_steps_share_a_batch_and_different_ones_do_not():
    usual = (Phase.DECODE, 8, 8, 4096)
    batch = step_batch(*usual)
    assert step_batch(*usual) is batch
    others = [(Phase.TARGET_VERIFY, 8, 8, 4096), (Phase.DECODE, 4, 8, 4096), (Phase.DECODE, 8, 16, 4096)]
    for other in (*others, (Phase.DECODE, 8, 8, 8192)):
        assert step_batch(*other).shape != batch.shape
        assert step_batch(*other).shape.phase is other[0]


def test_the_names_of_a_step_do_not_leak_into_the_next():
    named = step_batch(Phase.TARGET_VERIFY, 2, 8, 4096, ["a", "b"])
    assert named.requests == [("a", 4, 4096), ("b", 4, 4096)]
    assert step_batch(Phase.TARGET_VERIFY, 2, 8, 4096).requests == []
    assert step_batch(Phase.TARGET_VERIFY, 2, 8, 4096, ["c"]).requests == [("c", 4, 4096)]
    assert step_batch(Phase.IDLE, 2, 2, 4096, ["a", "b"]).requests == []
