"""Dense prefills with prefill graphs: which batches run eagerly, alike on all ranks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from nsa_plugin.backends.sglang.v32.batch import prefill_batch
from nsa_plugin.backends.sglang.v32.patches import wrap_can_run_graph
from nsa_plugin.decision.plan import Attention
from tests.backends.fake_sglang.v32 import DsaBackend, ForwardMode, forward_batch, started

SHORT = forward_batch(ForwardMode.EXTEND, [3, 30], [3, 30])


def replayed(backend: Any, batch: Any, engine_says: bool = True) -> bool:
    """Return whether SGLang replays the batch from a graph."""
    asked = []

    def can_run_graph(self: Any, forward_batch: Any) -> bool:
        asked.append(forward_batch)
        return engine_says

    runner = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=backend))
    answer = wrap_can_run_graph(can_run_graph)(runner, batch)
    assert asked == [batch]
    return answer


@pytest.mark.parametrize("layout", ["v32_fp8", "bf16"])
@pytest.mark.parametrize("batch", [SHORT, forward_batch(ForwardMode.MIXED, [3, 1], [3, 9])])
def test_a_dense_batch_leaves_the_graph_if_mha_max_kv_is_set(layout: str, batch: Any):
    backend = started(layout=layout, mha_max_kv=64)
    assert not replayed(backend, batch)
    backend.init_forward_metadata(batch)  # what follows, outside the graph
    assert backend.use_mha
    assert backend.nsa_plugin.route.plan.attention is Attention.MHA_ONE_SHOT
    assert backend.nsa_plugin.planner.trace.counts.total() == 1  # the question itself is no batch


@pytest.mark.parametrize(
    ("settings", "batch"),
    [
        ({}, SHORT),  # nobody asked
        ({"mha_max_kv": 0}, SHORT),
        ({"mha_max_kv": 64}, forward_batch(ForwardMode.EXTEND, [65], [65])),
        ({"mha_max_kv": 64}, forward_batch(ForwardMode.EXTEND, [3, 3], [3, 65])),
        ({"mha_max_kv": 64}, forward_batch(ForwardMode.DRAFT_EXTEND_V2, [4], [9])),
        ({"mha_max_kv": 64}, forward_batch(ForwardMode.TARGET_VERIFY, [], [9])),
        # Each group of ranks has a different batch, and all replay or none.
        ({"mha_max_kv": 64}, forward_batch(ForwardMode.EXTEND, [3], [3], global_num_tokens_cpu=[3, 900])),
        ({"mha_max_kv": 64}, forward_batch(ForwardMode.EXTEND, [3], [3], attn_cp_metadata=object())),
        ({"mha_max_kv": 64}, forward_batch(ForwardMode.SPLIT_PREFILL, [3], [9])),
    ],
)
def test_every_other_batch_is_replayed(settings: dict[str, int], batch: Any):
    assert replayed(started(**settings), batch)


def exchanging(rows: int = 64, **settings: Any) -> Any:
    """A backend of two ranks, which exchange up to `rows` query tokens."""
    backend = started(**settings)
    backend.nsa_plugin.planner = replace(backend.nsa_plugin.planner, exchange_rows=rows, no_exchange="")
    backend.nsa_plugin.exchange = SimpleNamespace(in_graph=lambda: False, shard=SimpleNamespace(max_rows=rows))
    return backend


LONG = forward_batch(ForwardMode.EXTEND, [40], [9000])


def test_a_prefill_that_reshards_leaves_the_graph_if_token_shard_is_on():
    backend = exchanging(token_shard="on")
    assert not replayed(backend, LONG)
    backend.init_forward_metadata(LONG)  # what follows, outside the graph
    assert backend.nsa_plugin.share is not None
    assert backend.nsa_plugin.route.plan.token_shard


@pytest.mark.parametrize(
    ("settings", "batch"),
    [
        ({"token_shard": "off"}, LONG),
        ({"token_shard": "on"}, forward_batch(ForwardMode.EXTEND, [65], [9000])),  # more than the buffers hold
        ({"token_shard": "on"}, SHORT),  # dense outside a graph, which pads no heads
        ({"token_shard": "on"}, forward_batch(ForwardMode.EXTEND, [40], [9000], global_num_tokens_cpu=[40, 900])),
        ({"token_shard": "on"}, forward_batch(ForwardMode.DRAFT_EXTEND_V2, [40], [9000])),
    ],
)
def test_a_prefill_that_keeps_its_heads_is_replayed(settings: dict[str, str], batch: Any):
    assert replayed(exchanging(**settings), batch)


def test_auto_keeps_the_graph_of_a_prefill_that_it_would_reshard():
    """Graphs save time too, and the two were not timed against each other."""
    backend = exchanging(8192, token_shard="auto")
    batch = forward_batch(ForwardMode.EXTEND, [8192], [65536])
    outside = backend.nsa_plugin.planner.prefill_execution(prefill_batch(batch))
    assert outside is not None
    assert outside.plan.token_shard
    assert replayed(backend, batch)


def test_the_engines_rules_count_too():
    backend = started(mha_max_kv=64)
    backend.dense_allowed = False
    assert replayed(backend, SHORT)


@pytest.mark.parametrize("backend", [DsaBackend(), SimpleNamespace()])
def test_a_stock_backend_keeps_its_graphs(backend: Any):
    assert replayed(backend, SHORT)


def test_a_prefill_that_sglang_runs_eagerly_stays_eager():
    assert not replayed(started(mha_max_kv=64), forward_batch(ForwardMode.EXTEND, [900], [900]), engine_says=False)


def test_a_replayed_prefill_has_a_sparse_plan():
    """Inside a graph SGLang's rules exclude dense attention, and the plan follows."""
    backend = started()
    assert replayed(backend, SHORT)
    backend.dense_allowed = False  # as `is_in_breakable_cuda_graph()` makes it
    backend.init_forward_metadata(SHORT)
    assert not backend.use_mha
    assert backend.nsa_plugin.route.plan.attention is not Attention.MHA_ONE_SHOT
