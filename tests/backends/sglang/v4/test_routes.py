"""Which route a V4 prefill takes, and the pages and keys of a batch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_plugin.backends.common.paths import BF16_ROWS, DECODE_KERNEL, DIRECT, PATHS, SGLANG, routes_of
from nsa_plugin.backends.common.planner import Execution, execution_of
from nsa_plugin.backends.sglang.startup.model import attention_ranks
from nsa_plugin.backends.sglang.startup.samples import v4_prefills
from nsa_plugin.backends.sglang.v4.batch import (
    PAGE,
    Prefill,
    Span,
    page_places,
    spans,
    window_page_count,
    window_places,
    workspace_bytes,
)
from nsa_plugin.backends.sglang.v4.routes import (
    ENGINE_TOKENS,
    SglangV4Planner,
    asked_by_engine,
    makes_rows,
    v4_shape,
)
from nsa_plugin.backends.sglang.v32.batch import Batch, prefill_batch
from nsa_plugin.decision.plan import Attention
from nsa_plugin.decision.shapes import ModelShape, Phase
from nsa_plugin.decision.v4_memory import INDICES_BYTES, ROWS_BYTES, held_bytes
from nsa_plugin.errors import NoProviderError
from nsa_plugin.libraries.devices import MIB, synthetic
from nsa_plugin.settings import Settings
from tests.backends.fake_sglang.v4 import batch, envs
from tests.backends.fake_sglang.v32 import ForwardMode, forward_batch

FLASH = ModelShape(family="v4", num_heads=64, kv_layout="v4_fp8", index_topk=512, index_n_heads=64, sliding_window=128)
VARIABLE = "SGLANG_OPT_FLASHMLA_SPARSE_PREFILL"
LENS = st.lists(st.tuples(st.integers(0, 600), st.integers(0, 2000)), min_size=1, max_size=4)
OLD = {"flash_mla": ("sglang-kernel", "0.4.4")}


def planner(device: Any = None, asked: frozenset[str] = frozenset(), **settings: Any) -> SglangV4Planner:
    return SglangV4Planner(FLASH, device or synthetic(90), Settings(**settings), asked=asked)


def prefill(q_len: int, kv_len: int | None = None) -> Batch:
    return prefill_batch(forward_batch(ForwardMode.EXTEND, [q_len], [kv_len or q_len]))


@pytest.mark.usefixtures("nothing_measured")
@pytest.mark.parametrize(
    ("rows", "expected"), [(11622, DECODE_KERNEL), (11623, BF16_ROWS), (11674, BF16_ROWS), (32768, BF16_ROWS)]
)
def test_the_decode_kernel_takes_the_rows_that_the_installed_build_takes(rows: int, expected: str):
    # 11622 = (227 KiB / 4 - 1) // 5: an H200's shared memory; SGLang's own number of 11673 counts 228 KiB.
    route = planner(synthetic(90, versions=OLD), prefill_backend="flash_mla").prefill_execution(prefill(rows))
    assert route is not None
    assert route.path == expected


def executed(route: Execution) -> tuple[str | None, bool, bool]:
    """(path, the plugin's code attends, the plugin's code selects)."""
    return route.path, route.own, not route.plan.stock_selection


def by_rows(*, engine_makes_rows: bool = True, **settings: Any) -> SglangV4Planner:
    wanted = Settings(prefill_backend="flash_mla", large_q_rows=1, **settings)
    return SglangV4Planner(FLASH, synthetic(90), wanted, engine_makes_rows=engine_makes_rows)


@pytest.mark.usefixtures("nothing_measured")
@pytest.mark.parametrize(("tokens", "own"), [(300, False), (ENGINE_TOKENS, False), (ENGINE_TOKENS + 1, True)])
def test_a_small_prefill_over_rows_is_sglangs(tokens: int, own: bool):
    for lengths in ([tokens], [100, tokens - 100], [2] * 100 + [tokens - 200]):
        few = prefill_batch(forward_batch(ForwardMode.EXTEND, [2] * len(lengths), lengths))
        route = by_rows().prefill_execution(few)
        assert route is not None
        assert executed(route) == (BF16_ROWS, own, own)
        said = f"{tokens} context tokens: up to {ENGINE_TOKENS}, SGLang's own code costs the host less"
        for field in ("stock_attention", "stock_selection"):
            assert (route.plan.reasons[field] == said) is not own


@pytest.mark.usefixtures("nothing_measured")
@pytest.mark.parametrize("given", [{"engine_makes_rows": False}, {"fault": "shift_indices"}])
def test_a_small_prefill_whose_rows_sglang_does_not_make(given: dict[str, Any]):
    route = by_rows(**given).prefill_execution(prefill(2, 4096))
    assert route is not None
    assert executed(route) == (BF16_ROWS, True, False)


@pytest.mark.usefixtures("nothing_measured")
def test_a_small_prefill_whose_logits_do_not_fit_at_once_is_the_plugins():
    route = by_rows(logits_budget_mb=1).prefill_execution(prefill(2048, 4096))
    assert route is not None
    assert 0 < route.plan.indexer.rows_per_chunk < 2048
    assert executed(route) == (BF16_ROWS, True, True)


@pytest.mark.usefixtures("nothing_measured")
@pytest.mark.parametrize(("backend", "impl"), [("reference", DIRECT), ("flash_mla", DECODE_KERNEL)])
def test_sglang_selects_for_a_small_prefill_over_caches_in_place(backend: str, impl: str):
    wanted = Settings(prefill_backend=backend, large_q_rows=4096)  # up to so many the decode kernel comes first
    made = SglangV4Planner(FLASH, synthetic(90), wanted, engine_makes_rows=True)
    for tokens, selects in ((300, False), (ENGINE_TOKENS + 1, True)):
        route = made.prefill_execution(prefill(300, tokens))
        assert route is not None
        assert (route.path, not route.plan.stock_selection) == (impl, selects)


def test_whether_sglang_makes_rows_of_any_prefill(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not makes_rows(SimpleNamespace())  # 0.5.12
    assert not makes_rows(envs)  # 0.5.13 and 0.5.14
    monkeypatch.setenv(VARIABLE, "1")
    assert makes_rows(envs)
    monkeypatch.setenv(VARIABLE, "0")
    assert not makes_rows(envs)


@pytest.mark.usefixtures("nothing_measured")
def test_a_build_without_a_limit_has_none():
    route = planner(prefill_backend="flash_mla").prefill_execution(prefill(32768))
    assert route is not None
    assert route.path == DECODE_KERNEL


@pytest.mark.parametrize("rows", [1, 512, 4096, 8192, 11623, 16384, 32768])
@pytest.mark.parametrize("versions", [OLD, None])
def test_every_prefill_has_an_execution_path(rows: int, versions: Any):
    made = planner(synthetic(90, versions=versions))
    for context in (rows, 131072, 393216):
        route = made.prefill_execution(prefill(min(rows, context), context))
        assert route is not None
        assert route.path in {entry.path for entry in PATHS}
        logits = route.plan.indexer.rows_per_chunk * 4 * -(-context // 4)
        held = 0
        if route.path == BF16_ROWS:
            held = workspace_bytes(spans([min(rows, context)], [context]), 128, 256) + INDICES_BYTES
        assert logits + held + -(-context // 4) * 136 <= 512 * MIB


@pytest.mark.usefixtures("nothing_measured")
@given(LENS, st.integers(0, 8_000_000))
def test_buffers_and_logits_of_a_prefill_stay_within_the_budget(lens: list[tuple[int, int]], more: int):
    """Over bf16 rows where they may be taken, in place else; of one request with a long context and others."""
    q_lens = [4096, *(rows for rows, _ in lens)]
    kv_lens = [4096 + more, *(rows + prefix for rows, prefix in lens)]
    made = planner(synthetic(90, libraries=("flash_mla", "triton")), large_q_rows=1)
    given_batch = prefill_batch(forward_batch(ForwardMode.EXTEND, q_lens, kv_lens))
    route = made.prefill_execution(given_batch)
    assert route is not None
    requests = spans(q_lens, kv_lens)
    rows = workspace_bytes(requests, 128, 256)
    assert (route.path == BF16_ROWS) == (rows <= ROWS_BYTES)
    keys = sum(request.pages for request in requests) * 64 * 136
    held = keys + (rows + INDICES_BYTES if route.path == BF16_ROWS else 0)
    assert held <= held_bytes(FLASH, given_batch.shape, over_rows=route.path == BF16_ROWS)
    logits = route.plan.indexer.rows_per_chunk * 4 * -(-max(kv_lens) // 4)
    assert logits + held <= 512 * MIB


@pytest.mark.usefixtures("nothing_measured")
def test_rows_that_would_take_too_much_memory_are_read_in_place():
    settings: dict[str, Any] = {"prefill_backend": "flash_mla", "large_q_rows": 1000}
    made = planner(**settings)
    fits, not_fits = prefill(32768, 393216), prefill(32768, 2_000_000)
    route = made.prefill_execution(fits)
    assert route is not None
    assert route.path == BF16_ROWS
    assert workspace_bytes(spans([32768], [393216]), 128, 256) <= ROWS_BYTES
    wide = planner()
    wide.device = synthetic(90, libraries=("flash_mla", "triton"))
    wide.settings = replace(wide.settings, large_q_rows=1000)
    route = wide.prefill_execution(fits)
    assert route is not None
    assert route.path == BF16_ROWS
    route = wide.prefill_execution(not_fits)
    assert route is not None
    assert route.path == DIRECT
    assert "a bf16 copy would take" in route.plan.reasons["dequantize_kv"]
    # Where a setting leaves no other kernel for so many rows, they are copied all the same.
    route = made.prefill_execution(not_fits)
    assert route is not None
    assert route.path == BF16_ROWS


def test_context_parallel_prefills_are_the_engines():
    given_batch = prefill(4096)
    parallel = replace(given_batch, shape=replace(given_batch.shape, context_parallel=True))
    assert planner().prefill_execution(parallel) is None


@pytest.mark.parametrize(
    ("value", "expected"), [(None, frozenset()), ("1", frozenset({BF16_ROWS})), ("0", frozenset({DECODE_KERNEL}))]
)
def test_the_engines_variable_asks_only_where_a_user_has_set_it(
    value: str | None, expected: frozenset[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    assert asked_by_engine(envs) == expected
    assert asked_by_engine(SimpleNamespace()) == frozenset()


@pytest.mark.parametrize("asked", [BF16_ROWS, DECODE_KERNEL])
def test_sglangs_variable_selects_the_route(asked: str):
    made = planner(asked=frozenset({asked}))
    route = made.prefill_execution(prefill(4096))
    assert route is not None
    assert route.path == asked
    assert VARIABLE in route.plan.reasons["attention"]
    assert planner(asked=frozenset({asked}), prefill_backend="triton").prefill_execution(prefill(4096)) == planner(
        prefill_backend="triton"
    ).prefill_execution(prefill(4096))


def test_a_requested_decode_kernel_keeps_its_row_limit():
    made = planner(synthetic(90, versions=OLD), asked=frozenset({DECODE_KERNEL}))
    route = made.prefill_execution(prefill(11650))
    assert route is not None
    assert route.path != DECODE_KERNEL


@pytest.mark.parametrize("prefill", [True, False])
def test_v4_has_sparse_paths_alone(prefill: bool):
    routes = routes_of(SGLANG, "v4_fp8", prefill=prefill)
    assert {route.attention for route in routes} == {Attention.SPARSE_PREFILL, Attention.SPARSE_DECODE}
    assert {route.library for route in routes if route.dequantize_kv} == {"flash_mla"}
    assert not {"trtllm", "fa3"} & {route.library for route in routes}


def test_a_plan_without_an_execution_path_is_refused():
    route = planner(prefill_backend="triton").prefill_execution(prefill(64))
    assert route is not None
    with pytest.raises(NoProviderError, match="SGLang has no execution path for trtllm sparse_prefill"):
        execution_of(SGLANG, "v4_fp8", replace(route.plan, provider="trtllm"))


def test_steps_are_decided_once():
    made = planner(decode_backend="triton")
    shape = replace(prefill(8).shape, phase=Phase.DECODE, cuda_graph=True)
    assert made.step_execution(Batch(shape)) is made.step_execution(Batch(shape))


def test_samples_for_the_report_are_decided():
    routes = v4_prefills(planner(), 131072)
    assert len(routes) == 10
    assert "prefill, 32768 of 131072 tokens" in routes
    assert set(v4_prefills(planner(), 2048)) == {
        "prefill, 1024 of 1024 tokens",
        "prefill, 1024 of 2048 tokens",
        "prefill, 2048 of 2048 tokens",
    }


def test_the_models_shape_is_read_from_its_configuration():
    config = SimpleNamespace(
        num_attention_heads=64, qk_rope_head_dim=64, index_topk=512, index_n_heads=64, index_head_dim=128
    )
    runner = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=config), attn_tp_size=4)
    shape = v4_shape(runner)
    assert (shape.family, shape.heads_per_rank, shape.row_dims) == ("v4", 16, (512, 512))
    assert attention_ranks(SimpleNamespace(ps=SimpleNamespace(attn_tp_size=2))) == 2


@given(LENS)
def test_the_pages_of_the_windows_are_those_that_the_windows_reach(lens: list[tuple[int, int]]):
    requests = spans([rows for rows, _ in lens], [rows + prefix for rows, prefix in lens])
    rows, columns = window_places(requests, 128, PAGE)
    assert len(rows) == sum(window_page_count(request, 128, PAGE) for request in requests)
    named = []
    for row, column in zip(rows, columns, strict=True):
        request = next(one for one in requests if one.first <= row < one.end)
        position = request.prefix + row - request.first - column
        assert 0 <= column < min(128, request.prefix + row - request.first + 1)
        named.append((request.first, position // PAGE))
    reached = {
        (request.first, position // PAGE)
        for request in requests
        for position in range(max(0, request.prefix - 127), request.context)
    }
    assert sorted(named) == sorted(reached)


@given(LENS)
def test_the_pages_of_the_compressed_caches_are_each_requests_own(lens: list[tuple[int, int]]):
    requests = spans([rows for rows, _ in lens], [rows + prefix for rows, prefix in lens])
    rows, columns = page_places(requests)
    assert list(zip(rows, columns, strict=True)) == [
        (request.first, page) for request in requests for page in range((request.context + PAGE - 1) // PAGE)
    ]


def test_requests_without_rows_are_none():
    assert spans([0, 3, 0, 2], [0, 5, 9, 2]) == (Span(0, 3, 5), Span(3, 5, 2))
    assert spans([0], [4]) == ()


def test_keys_of_the_indexer_start_at_pages():
    of = batch((4, 700), (3, 3), (2, 258))
    core = of.core()
    requests = spans([4, 3, 2], [700, 3, 258])
    keys = Prefill(requests, 128).keys(core, core.c4_lengths, 64)
    assert keys.requests == [(0, 4, 0, 192), (4, 7, 192, 256), (7, 9, 256, 384)]
    assert keys.ks.tolist() == [0] * 4 + [192] * 3 + [256] * 2
    assert (keys.ke - keys.ks).tolist() == [174, 174, 174, 175, 0, 0, 0, 64, 64]
    for (_, _, first, _), request in zip(keys.requests, of.requests, strict=True):
        count = request.kv_len // 4
        assert torch.equal(keys.slots[first : first + count], request.slots(64, count).int())
