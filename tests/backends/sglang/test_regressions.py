"""Failures reported by users of the engines that the plugin's SGLang adapter could bring back.

docs/regressions.md has the whole list, with tests in other files and the reasons for missing ones.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_plugin.backends.sglang.v32.batch import prefill_batch, step_batch
from nsa_plugin.backends.sglang.v32.indexer import Selection, attach, wrap_topk_ragged
from nsa_plugin.backends.sglang.v32.routes import PLANNED, SglangPlanner
from nsa_plugin.decision.plan import Attention, IndexerMode
from nsa_plugin.decision.shapes import Phase
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.settings import Settings
from tests.backends.fake_sglang.v32 import (
    D_QK,
    D_V,
    DRAFT_TOKENS,
    H200,
    HEADS,
    MODEL,
    DsaBackend,
    ForwardMode,
    Layer,
    NsaBackend,
    filled_cache,
    forward_batch,
    started,
    stock_attention,
)

BOTH = pytest.mark.parametrize("original", [DsaBackend, NsaBackend])
STEPS = {
    ForwardMode.DECODE: Phase.DECODE,
    ForwardMode.TARGET_VERIFY: Phase.TARGET_VERIFY,
    ForwardMode.DRAFT_EXTEND_V2: Phase.DRAFT_EXTEND,
}
LONG = forward_batch(ForwardMode.EXTEND, [3000], [3000])
OLD_FLASH_MLA = {"flash_mla": ("sgl-flash-mla", "0.9.0")}
TOPK = 2048


def queries(rows: int) -> torch.Tensor:
    return torch.randn(rows, HEADS, D_QK, generator=torch.Generator().manual_seed(3)).bfloat16()


def slots_of(rows: int, slots: int = 256) -> torch.Tensor:
    """[rows, topk] int32: 30 slots of each row, then -1."""
    chosen = torch.full((rows, TOPK), -1, dtype=torch.int32)
    for row in range(rows):
        chosen[row, :30] = torch.randperm(slots, generator=torch.Generator().manual_seed(row))[:30].int()
    return chosen


def attend(backend: Any, path: str, q: torch.Tensor, slots: torch.Tensor, metadata: Any = None) -> torch.Tensor:
    layout = "v32_fp8" if path == "flashmla_kv" else "bf16"
    given = {"q_all": q, "kv_cache": filled_cache(layout)[1], "page_table_1": slots, "sm_scale": 0.1, "v_head_dim": D_V}
    if path == "flashmla_kv":
        given |= {"layer": Layer(), "metadata": metadata or SimpleNamespace()}
    out: torch.Tensor = getattr(backend, f"_forward_{path}")(**given)
    return out.reshape(len(q), HEADS, D_V)


def captured(backend: Any, mode: ForwardMode, bs: int, *, capture: bool) -> Any:
    """Prepare a captured batch of `bs` requests, padded ones included, as the engine does; its route."""
    if hasattr(backend, "_apply_cuda_graph_metadata"):
        backend._apply_cuda_graph_metadata(bs, None, None, None, mode, None)
    elif capture:
        backend.init_forward_metadata_capture_cuda_graph(bs, bs, None, None, None, mode, None)
    else:
        backend.init_forward_metadata_replay_cuda_graph(bs, None, None, 0, None, mode, None, None)
    return backend.nsa_plugin.route


@pytest.mark.regression(1)
@BOTH
@pytest.mark.parametrize("mode", STEPS)
@pytest.mark.parametrize("context", [1, 100, 2048, 3000])
def test_a_step_always_selects_and_is_never_dense(original: type, mode: ForwardMode, context: int):
    """sglang #12816: a verify step of short contexts skipped its selection inside a graph, and attended without one."""
    backend = started(original)
    backend.init_forward_metadata(forward_batch(ForwardMode.EXTEND, [5], [5]))  # dense, and not to be left behind
    assert backend.use_mha
    eager = forward_batch(mode, [DRAFT_TOKENS] * 2, [context] * 2)
    for prepare in (
        lambda: captured(backend, mode, 2, capture=True),
        lambda: captured(backend, mode, 2, capture=False),
        lambda: backend.init_forward_metadata(eager),
    ):
        prepare()
        plan = backend.nsa_plugin.route.plan
        assert (plan.phase, plan.attention, plan.indexer.mode) == (
            STEPS[mode],
            Attention.SPARSE_DECODE,
            IndexerMode.TOPK,
        )
        assert not backend.use_mha


@pytest.mark.regression(5)
@pytest.mark.regression(12)
@pytest.mark.parametrize("mode", STEPS)
def test_rows_of_every_step_attend_as_requests_of_their_own(mode: ForwardMode):
    """vllm #31845, sglang #17662: verify and draft rows had no path, or one for a single row of a request."""
    backend = started(decode_backend="reference")
    captured(backend, mode, 3, capture=True)
    rows = backend.nsa_plugin.route.plan.indexer.rows_per_chunk
    assert rows == 3 * (1 if mode is ForwardMode.DECODE else DRAFT_TOKENS)
    q, slots = queries(rows), slots_of(rows)
    expected = stock_attention(q, filled_cache("v32_fp8")[1], slots, 0.1)
    torch.testing.assert_close(attend(backend, "flashmla_kv", q, slots), expected, atol=2e-2, rtol=2e-2)


# What the engine may leave in the rows of padded requests: slots of another request, a whole row of slots, and what
# was in the memory before.
STALE = {
    "none": torch.full((TOPK,), -1, dtype=torch.int32),
    "one": torch.cat([torch.zeros(1), torch.full((TOPK - 1,), -1)]).int(),
    "all": (torch.arange(TOPK) % 256).int(),
    "garbage": torch.randint(
        -(2**31), 2**31 - 1, (TOPK,), dtype=torch.int32, generator=torch.Generator().manual_seed(0)
    ),
    "just outside": torch.full((TOPK,), 256, dtype=torch.int32),
}


@pytest.mark.regression(26)
@pytest.mark.parametrize("stale", STALE)
@pytest.mark.parametrize("path", ["flashmla_kv", "flashmla_sparse"])
@pytest.mark.parametrize("setting", ["prefill_backend", "decode_backend"])
def test_values_in_padding_do_not_reach_the_output(stale: str, path: str, setting: str):
    """A graph of 8 requests is replayed with 5, or 5 rows are padded to a multiple of the ranks."""
    layout = "v32_fp8" if path == "flashmla_kv" else "bf16"
    backend = started(layout=layout, **{setting: "reference"})
    if setting == "prefill_backend":
        backend.init_forward_metadata(LONG)
    else:
        captured(backend, ForwardMode.DECODE, 8, capture=False)
    q, slots = queries(8), slots_of(8)
    alone = attend(backend, path, q[:5], slots[:5])
    slots[5:] = STALE[stale]
    padded = attend(backend, path, q, slots)
    torch.testing.assert_close(padded[:5], alone, atol=0, rtol=0)
    assert padded.isfinite().all()
    if stale in ("none", "garbage", "just outside"):
        assert not padded[5:].any()


@BOTH
def test_a_replay_has_the_route_of_its_capture_whatever_ran_between(original: type):
    """A graph replays the kernels of its capture, with the captured sizes, padding included."""
    backend = started(original)
    sizes = {bs: captured(backend, ForwardMode.DECODE, bs, capture=True) for bs in (8, 4, 2, 1)}
    for bs, route in sizes.items():
        backend.init_forward_metadata(LONG)
        backend.nsa_plugin.planner.free_memory = lambda: 1 << 20  # what is free is another number by now
        assert captured(backend, ForwardMode.DECODE, bs, capture=False) is route
        assert backend.impls == ("flashmla_kv", route.path)


@pytest.mark.parametrize("layout", ["v32_fp8", "bf16"])
def test_draft_steps_that_the_engine_prepares_together_keep_no_wrong_route(layout: str):
    """For more than three draft steps SGLang copies the metadata of the first three in one kernel.

    Of the backend's methods only `set_dsa_prefill_impl()` runs for them. What is replayed reads none of Python's
    state; whatever runs eagerly is prepared first.
    """
    kernel = {"prefill": "flashmla_sparse", "prefill_backend": "cuda"} if layout == "v32_fp8" else {}
    steps = [started(layout=layout, **kernel) for _ in range(5)]
    routes = [captured(step, ForwardMode.DECODE, 4, capture=True) for step in steps]
    assert len({route.plan.provider for route in routes}) == 1
    for step in steps:  # a batch that was too large for a graph, dense, then sparse
        step.init_forward_metadata(forward_batch(ForwardMode.EXTEND, [5], [5]))
        step.init_forward_metadata(LONG)
    assert steps[0].impls[0] == ("flashmla_kv" if layout == "v32_fp8" else "flashmla_sparse")
    for step in steps[:3]:
        step.set_dsa_prefill_impl(forward_batch=None)
    for step in steps[3:]:
        step.init_forward_metadata_replay_cuda_graph_from_precomputed(4, None, ForwardMode.DECODE)
    for step in steps:
        assert not step.use_mha
        assert step.impls[0] == step.nsa_plugin.prefill_impl == "flashmla_sparse"
        assert step.impls[1] in PLANNED[layout, False]
    assert [step.nsa_plugin.route for step in steps[3:]] == routes[3:]
    for step, route in zip(steps, routes, strict=True):
        step.init_forward_metadata(forward_batch(ForwardMode.DECODE, [], [9] * 4))
        assert step.nsa_plugin.route == route


@pytest.mark.parametrize("layout", ["v32_fp8", "bf16"])
def test_decode_paths_that_a_plan_may_change_between_have_the_same_buffers(layout: str):
    """The schedule of flashmla_kv is the only thing that SGLang allocates, and copies to a replay, for one path."""
    assert len({impl == "flashmla_kv" for impl in PLANNED[layout, False]}) == 1


@pytest.mark.regression(9)
@pytest.mark.parametrize("path", ["flashmla_kv", "flashmla_sparse"])
def test_a_prefill_without_rows_runs_nothing(path: str):
    """vllm #51486: a prefill whose tokens all came with the KV transfer; a kernel was launched over nothing."""
    backend = started(layout="v32_fp8" if path == "flashmla_kv" else "bf16", prefill_backend="reference")
    backend.init_forward_metadata(forward_batch(ForwardMode.EXTEND, [0, 0], [70, 5000]))
    route = backend.nsa_plugin.route
    assert (route.plan.attention, route.plan.indexer.mode) == (Attention.NONE, IndexerMode.NONE)
    assert not route.own
    backend.init_forward_metadata(LONG)
    assert attend(backend, path, queries(0), slots_of(0)).shape == (0, HEADS, D_V)


@pytest.mark.regression(9)
def test_a_selection_of_no_rows_is_the_engines():
    route = SglangPlanner(MODEL, H200, Settings()).prefill(prefill_batch(LONG))
    assert route is not None
    empty = torch.empty(0, dtype=torch.int32)
    metadata = SimpleNamespace(
        attn_metadata=None,
        get_indexer_kvcache_range=lambda: (empty, empty),
        get_dsa_extend_len_cpu=lambda: [0],
        get_indexer_seq_len_cpu=lambda: torch.tensor([70]),
    )
    attach(metadata, Selection(route.plan, None, None))  # type: ignore[arg-type]
    ran = wrap_topk_ragged(lambda *arguments, **named: "the engine's")
    assert ran(SimpleNamespace(), False, LONG, 0, empty, empty, metadata) == "the engine's"


@pytest.mark.regression(3)
@pytest.mark.regression(11)
def test_no_length_reaches_the_plugins_kernels():
    """vllm #51970, sglang #13236: lengths of zero or of the wrong row, in a capture and in draft rows."""
    backend = started(prefill_backend="reference", decode_backend="reference")
    for prepare in (
        lambda: backend.init_forward_metadata(LONG),
        lambda: captured(backend, ForwardMode.DECODE, 4, capture=True),
    ):
        prepare()
        q, slots = queries(4), slots_of(4)
        right = attend(backend, "flashmla_kv", q, slots)
        for lengths in (torch.zeros(4), torch.full((4,), -7), torch.full((9,), 1 << 30)):
            wrong = SimpleNamespace(dsa_cache_seqlens_int32=lengths.int(), flashmla_metadata=None)
            torch.testing.assert_close(attend(backend, "flashmla_kv", q, slots, wrong), right, atol=0, rtol=0)


class Strict:
    """Check as FlashMLA's host code does: one length per row."""

    def _forward_flashmla_kv(self, q_all: Any, kv_cache: Any, page_table_1: Any, metadata: Any, **rest: Any) -> Any:
        lengths = getattr(metadata, f"{self.x}_cache_seqlens_int32")  # type: ignore[attr-defined]
        if len(lengths) != len(q_all) or len(page_table_1) != len(q_all):
            raise RuntimeError("seqlens_k must have shape (batch_size)")
        given = {"q_all": q_all, "kv_cache": kv_cache, "page_table_1": page_table_1, "metadata": metadata}
        return super()._forward_flashmla_kv(**given, **rest)  # type: ignore[misc]


class StrictDsa(Strict, DsaBackend): ...


class StrictNsa(Strict, NsaBackend): ...


@pytest.mark.regression(25)
@pytest.mark.parametrize("original", [StrictDsa, StrictNsa])
@pytest.mark.parametrize(
    ("batch", "settings"),
    [
        (forward_batch(ForwardMode.DECODE, [], [50] * 7), {"decode_backend": "flash_mla"}),
        (forward_batch(ForwardMode.MIXED, [6, 1], [3000, 9]), {"prefill_backend": "flash_mla"}),
    ],
)
def test_rows_that_have_no_length_do_not_reach_the_engines_flash_mla(original: type, batch: Any, settings: Any):
    """Thread of sglang #13646: 7 rows padded to 8 under partial data parallelism, with 7 lengths."""
    backend = started(original, **settings)
    backend.init_forward_metadata(batch)
    q, slots = queries(8), slots_of(8)
    slots[7] = -1
    metadata = SimpleNamespace(**{f"{backend.x}_cache_seqlens_int32": torch.full((7,), 30).int()})
    with pytest.raises(RuntimeError, match="seqlens_k"):
        attend(original(), "flashmla_kv", q, slots, metadata)
    out = attend(backend, "flashmla_kv", q, slots, metadata)
    assert backend.calls[-1] == "flashmla_kv"
    torch.testing.assert_close(out[:7], stock_attention(q[:7], filled_cache("v32_fp8")[1], slots[:7], 0.1))
    assert not out[7].any()
    whole = SimpleNamespace(**{f"{backend.x}_cache_seqlens_int32": torch.full((8,), 30).int()})
    torch.testing.assert_close(attend(backend, "flashmla_kv", q, slots, whole), out, atol=0, rtol=0)


@pytest.mark.regression(6)
@pytest.mark.parametrize(
    ("rows", "old", "new"), [(11622, "kv", "kv"), (11623, "sparse", "kv"), (16384, "sparse", "kv")]
)
def test_the_row_limit_is_that_of_the_installed_flash_mla(rows: int, old: str, new: str):
    """sglang #25502: 11623 rows asked for more shared memory than the scheduler's kernel has.

    There is no memory for a bf16 copy, so the kernel that has the limit is wanted. Beyond the limit it is copied as
    SGLang itself would, because an error in a batch would end the server.
    """
    for versions, path in ((OLD_FLASH_MLA, old), (None, new)):
        device = synthetic(90, libraries=("flash_mla", "fa3", "deep_gemm"), versions=versions, memory_free=1 << 20)
        batch = prefill_batch(forward_batch(ForwardMode.EXTEND, [rows], [60000]))
        route = SglangPlanner(MODEL, device, Settings()).prefill(batch)
        assert route is not None
        assert (route.path, route.plan.dequantize_kv) == (f"flashmla_{path}", path == "sparse")


@pytest.mark.regression(22, "the plugin pads no batch")
@pytest.mark.parametrize("layout", ["v32_fp8", "bf16"])
@pytest.mark.parametrize(("tokens", "rows"), [(7, 8), (1, 8), (13, 16)])
def test_padding_does_not_count_in_a_batchs_plan(layout: str, tokens: int, rows: int):
    """sglang #13646: 7 tokens padded to 8; the indexer's selection has 7 rows, the queries 8."""
    path = "flashmla_kv" if layout == "v32_fp8" else "flashmla_sparse"
    backend = started(layout=layout, prefill_backend="reference")
    padded = forward_batch(ForwardMode.EXTEND, [tokens], [3000, *[1] * (rows - tokens)], rids=["a"])
    backend.init_forward_metadata(padded)
    plan = backend.nsa_plugin.route.plan
    assert plan.reasons["phase"].startswith(f"extend: 1 request, {tokens} query token")
    q, slots = queries(rows), slots_of(tokens)
    out = attend(backend, path, q, slots)
    torch.testing.assert_close(out[:tokens], attend(backend, path, q[:tokens], slots), atol=0, rtol=0)
    assert not out[tokens:].any()


@pytest.mark.regression(21)
def test_a_mixed_batch_is_one_prefill_with_requests_of_one_row():
    """vllm #41836: metadata by token and by request of a mixed batch did not line up."""
    mixed = forward_batch(ForwardMode.MIXED, [3000, 1, 1], [3000, 9000, 70])
    batch = prefill_batch(mixed)
    assert batch.mixed
    assert [(rows, context) for _, rows, context in batch.requests] == [(3000, 3000), (1, 9000), (1, 70)]
    backend = started(layout="bf16", prefill_backend="reference")
    backend.init_forward_metadata(mixed)
    plan = backend.nsa_plugin.route.plan
    assert (plan.attention, plan.phase, backend.use_mha) == (Attention.SPARSE_PREFILL, Phase.EXTEND, False)


@pytest.mark.parametrize("layout", ["v32_fp8", "bf16"])
def test_one_answer_for_a_batch_because_sglang_calls_one_kernel_for_all_of_it(layout: str):
    """One long prompt makes the whole batch sparse; the reason states its length."""
    planner = started(layout=layout).nsa_plugin.planner
    short = planner.prefill(prefill_batch(forward_batch(ForwardMode.EXTEND, [30, 40], [30, 40])), no_dense="")
    mixed = forward_batch(ForwardMode.EXTEND, [30, 40, 3000], [30, 40, 3000])
    long = planner.prefill(prefill_batch(mixed), no_dense="")
    assert short is not None
    assert long is not None
    assert (short.dense, long.dense) == (True, False)
    assert "the longest context of 3000 tokens exceeds" in long.plan.reasons["attention"]


def test_the_halves_of_an_overlapped_batch_have_answers_of_their_own():
    """Two-batch overlap prepares a backend for the whole batch and one for each half; the halves attend by theirs."""
    whole, left, right = (started() for _ in range(3))
    whole.init_forward_metadata(forward_batch(ForwardMode.EXTEND, [30, 3000], [30, 3000]))
    left.init_forward_metadata(forward_batch(ForwardMode.EXTEND, [30], [30]))
    right.init_forward_metadata(forward_batch(ForwardMode.EXTEND, [3000], [3000]))
    for backend, dense in ((whole, False), (left, True), (right, False)):
        plan = backend.nsa_plugin.route.plan
        assert backend.use_mha is dense
        assert (plan.indexer.mode is IndexerMode.STORE_ONLY) is dense


@pytest.mark.regression(18)
@pytest.mark.parametrize(("tp", "dp"), [(8, 1), (8, 2), (8, 4), (8, 8), (16, 2)])
@pytest.mark.parametrize("layout", ["v32_fp8", "bf16"])
def test_every_split_of_the_heads_has_its_routes(tp: int, dp: int, layout: str):
    """dp_size below tp_size leaves 128 * dp / tp heads on a rank."""
    model = replace(MODEL, num_heads=128, attn_tp_size=tp // dp, kv_layout=layout)
    assert model.heads_per_rank == 128 * dp // tp
    planner = SglangPlanner(model, H200, Settings())
    for rows in (1, 100, 4096):
        prefill = prefill_batch(forward_batch(ForwardMode.EXTEND, [rows], [max(rows, 3000)]))
        assert planner.prefill(prefill) is not None
    for phase in STEPS.values():
        assert planner.step(step_batch(phase, 64, 64, 65536)).path in PLANNED[layout, False]
