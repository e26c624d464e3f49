"""SGLang's V3.2 backend with plans: routes, kernels, and what is left to the stock path."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_plugin.backends.sglang.v32.attention import with_plans
from nsa_plugin.backends.sglang.v32.indexer import ATTRIBUTE
from nsa_plugin.decision import timings
from nsa_plugin.decision.plan import Attention, IndexerMode
from nsa_plugin.decision.shapes import Phase
from tests.backends.fake_sglang.v32 import (
    D_QK,
    D_V,
    DRAFT_TOKENS,
    HEADS,
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
LONG = forward_batch(ForwardMode.EXTEND, [3000], [3000])
SHORT = forward_batch(ForwardMode.EXTEND, [3, 30], [3, 30])
DECODE = forward_batch(ForwardMode.DECODE, [], [100, 200, 300])


def queries(rows: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, HEADS, D_QK, generator=torch.Generator().manual_seed(seed)).bfloat16()


def selection(rows: int, slots: int = 256, topk: int = 2048) -> torch.Tensor:
    """[rows, topk] int32: some slots of a row, the others -1; the last row has none, as a padded row."""
    chosen = torch.full((rows, topk), -1, dtype=torch.int32)
    for row in range(rows - 1):
        count = 20 + 7 * row
        chosen[row, :count] = torch.randperm(slots, generator=torch.Generator().manual_seed(row))[:count].int()
    return chosen


def leaf(backend: Any, path: str, q: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor, **more: Any):
    """Call a path's kernel as `forward_extend` and `forward_decode` do."""
    given = {"q_all": q, "kv_cache": kv_cache, "page_table_1": slots, "sm_scale": 0.1, "v_head_dim": D_V}
    if path == "flashmla_kv":
        given |= {"layer": Layer(), "metadata": SimpleNamespace()}
    return getattr(backend, f"_forward_{path}")(**given, **more)


@BOTH
@pytest.mark.parametrize("batch", [SHORT, LONG, DECODE, forward_batch(ForwardMode.IDLE, [], [])])
def test_a_backend_that_was_not_adopted_is_the_engines(original: type, batch: Any):
    plain, backend = original(), with_plans(original)()
    for each in (plain, backend):
        each.init_forward_metadata(batch)
    assert backend.impls == plain.impls
    assert backend.use_mha == plain.use_mha
    assert backend.calls == plain.calls
    assert not hasattr(backend.get_indexer_metadata(0, batch), ATTRIBUTE)


@pytest.mark.regression(10)
@BOTH
def test_the_plan_decides_on_dense_attention(original: type):
    backend = started(original)
    for batch, dense in ((SHORT, True), (LONG, False), (SHORT, True), (DECODE, False)):
        backend.init_forward_metadata(batch)
        plan = backend.nsa_plugin.route.plan
        assert backend.use_mha == dense
        assert dense == (plan.attention is Attention.MHA_ONE_SHOT)
        assert dense == (plan.indexer.mode is IndexerMode.STORE_ONLY)


@BOTH
def test_the_plan_may_narrow_dense_attention_and_never_widens_it(original: type):
    narrow = started(original, mha_max_kv=10)
    narrow.init_forward_metadata(SHORT)
    assert not narrow.use_mha
    ruled_out = started(original)
    ruled_out.dense_allowed = False
    ruled_out.init_forward_metadata(SHORT)
    assert not ruled_out.use_mha
    assert ruled_out.nsa_plugin.route.plan.indexer.mode is IndexerMode.TOPK


@BOTH
def test_the_prefill_path_is_set_per_batch_and_reset(original: type):
    backend = started(original, prefill="flashmla_sparse", prefill_backend="cuda")
    backend.init_forward_metadata(LONG)
    assert backend.impls == ("flashmla_kv", "flashmla_kv")
    assert backend.nsa_plugin.route.own
    backend.init_forward_metadata(forward_batch(ForwardMode.SPLIT_PREFILL, [3000], [3000]))
    assert backend.nsa_plugin.route is None
    assert backend.impls == ("flashmla_sparse", "flashmla_kv")


@BOTH
@pytest.mark.parametrize("prefill", ["flashmla_kv", "flashmla_sparse", "flashmla_auto"])
def test_a_prefill_with_decode_steps_is_attended_in_place(original: type, prefill: str):
    backend = started(original, prefill=prefill, prefill_backend="reference")
    backend.init_forward_metadata(forward_batch(ForwardMode.MIXED, [3000, 1, 1], [3000, 9, 4000]))
    assert backend.impls == ("flashmla_kv", "flashmla_kv")
    assert backend.nsa_plugin.route.own
    _, kv_cache = filled_cache("v32_fp8")
    q, slots = queries(5), selection(5)
    out = leaf(backend, "flashmla_kv", q, kv_cache, slots)
    assert backend.calls == []
    torch.testing.assert_close(
        out.float(), leaf(original(), "flashmla_kv", q, kv_cache, slots).float(), atol=2e-2, rtol=2e-2
    )  # type: ignore[arg-type]


def test_the_decode_path_is_set_per_batch_and_reset():
    backend = started(layout="bf16", decode_backend="triton")
    backend.init_forward_metadata(DECODE)
    assert backend.impls == ("flashmla_sparse", "flashmla_sparse")
    backend.init_forward_metadata(LONG)
    assert backend.impls[1] == "fa3"


@pytest.mark.regression(6)
@BOTH
def test_an_unread_schedule_is_not_made(original: type):
    own = started(original, prefill_backend="cuda", decode_backend="flash_mla")
    own.init_forward_metadata(LONG)
    assert own.forward_metadata.flashmla_metadata is None
    assert own.calls == []
    own.init_forward_metadata(DECODE)
    assert own.forward_metadata.flashmla_metadata == "schedule"


def test_a_captured_batch_keeps_its_schedule():
    """SGLang copies schedules into captured ones, whether read or not."""
    backend = started(decode_backend="cuda")
    backend.init_forward_metadata(LONG)
    backend._apply_cuda_graph_metadata(4, None, None, None, ForwardMode.DECODE, None)
    assert backend.nsa_plugin.route.own
    assert backend.calls[-2:] == ["apply", "schedule"]


def graph(backend: Any, mode: ForwardMode, bs: int, replay: bool) -> Any:
    """Prepare a captured batch as the engine does and return its route."""
    if isinstance(backend, DsaBackend):
        given = {"req_pool_indices": None, "seq_lens": None, "seq_lens_cpu": None, "spec_info": None}
        backend._apply_cuda_graph_metadata(bs=bs, forward_mode=mode, **given)
    elif replay:
        backend.init_forward_metadata_replay_cuda_graph(bs, None, None, 0, None, mode, None, None)
    else:
        backend.init_forward_metadata_capture_cuda_graph(bs, bs, None, None, None, mode, None)
    return backend.nsa_plugin.route


@BOTH
@pytest.mark.parametrize(
    ("mode", "phase", "rows"),
    [
        (ForwardMode.DECODE, Phase.DECODE, 3),
        (ForwardMode.TARGET_VERIFY, Phase.TARGET_VERIFY, 3 * DRAFT_TOKENS),
        (ForwardMode.DRAFT_EXTEND_V2, Phase.DRAFT_EXTEND, 3 * DRAFT_TOKENS),
    ],
)
def test_eager_capture_and_replay_have_one_route(original: type, mode: ForwardMode, phase: Phase, rows: int):
    backend = started(original)
    captured = graph(backend, mode, 3, replay=False)
    assert (captured.plan.phase, captured.plan.indexer.rows_per_chunk) == (phase, rows)
    backend.init_forward_metadata(LONG)
    assert backend.nsa_plugin.route is not captured
    assert graph(backend, mode, 3, replay=True) is captured
    assert not backend.use_mha
    backend.init_forward_metadata(forward_batch(mode, [DRAFT_TOKENS] * 3, [50, 60, 70]))
    assert backend.nsa_plugin.route is captured


@pytest.mark.parametrize(("layout", "path"), [("v32_fp8", "flashmla_kv"), ("bf16", "flashmla_sparse")])
def test_dflash_verifies_whole_blocks_as_the_engine_does(layout: str, path: str):
    """DFLASH drafts a block of query tokens at once, more than MTP's steps have."""
    block, requests = 16, 2
    fixed = property(lambda _: block, lambda *_: None)
    original = type("Drafted", (DsaBackend,), {"speculative_num_draft_tokens": fixed})
    backend = started(original, layout=layout, decode_backend="reference")
    backend.init_forward_metadata(forward_batch(ForwardMode.TARGET_VERIFY, [block] * requests, [50, 60]))
    plan = backend.nsa_plugin.route.plan
    assert (plan.phase, plan.indexer.rows_per_chunk) == (Phase.TARGET_VERIFY, block * requests)
    backend.calls.clear()
    _, kv_cache = filled_cache(layout)
    q, slots = queries(block * requests), selection(block * requests)
    out = leaf(backend, path, q, kv_cache, slots)
    assert backend.calls == []
    expected = leaf(DsaBackend(), path, q, kv_cache, slots)
    torch.testing.assert_close(out.float(), expected.float(), atol=2e-2, rtol=2e-2)


def test_mtp_draft_steps_have_routes():
    backend = started()
    backend.init_forward_metadata(LONG)
    backend.init_forward_metadata_replay_cuda_graph_from_precomputed(
        bs=2, precomputed=None, forward_mode=ForwardMode.DECODE
    )
    assert backend.nsa_plugin.route.plan.phase is Phase.DECODE
    assert backend.calls[-1] == "precomputed"


@BOTH
def test_an_idle_rank_runs_nothing(original: type):
    backend = started(original)
    for requests in (0, 3):  # MLP-sync pads idle ranks too
        backend.init_forward_metadata(forward_batch(ForwardMode.IDLE, [], [1] * requests))
        route = backend.nsa_plugin.route
        assert (route.plan.attention, route.own, backend.use_mha) == (Attention.NONE, False, False)


@pytest.mark.parametrize(
    ("layout", "path", "phase_batch", "setting"),
    [
        ("v32_fp8", "flashmla_kv", LONG, "prefill_backend"),
        ("v32_fp8", "flashmla_kv", DECODE, "decode_backend"),
        ("bf16", "flashmla_sparse", LONG, "prefill_backend"),
        ("bf16", "flashmla_sparse", DECODE, "decode_backend"),
    ],
)
def test_the_plans_provider_runs_and_agrees_with_the_engine(layout: str, path: str, phase_batch: Any, setting: str):
    backend = started(layout=layout, **{setting: "reference"})
    backend.init_forward_metadata(phase_batch)
    backend.calls.clear()
    _, kv_cache = filled_cache(layout)
    q, slots = queries(5), selection(5)
    out = leaf(backend, path, q, kv_cache, slots)
    assert backend.calls == []  # the engine's own kernel did not run
    expected = leaf(DsaBackend(), path, q, kv_cache, slots)
    assert out.shape == expected.shape
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out.float(), expected.float(), atol=2e-2, rtol=2e-2)
    assert not out[-1].any()  # the padded row
    assert out[:-1].float().abs().max() > 0.1


@pytest.mark.regression(26)
def test_mlp_sync_padding_may_lack_a_selection():
    backend = started(prefill_backend="reference")
    backend.init_forward_metadata(LONG)
    _, kv_cache = filled_cache("v32_fp8")
    q, slots = queries(8), selection(8)
    whole = leaf(backend, "flashmla_kv", q, kv_cache, slots)
    torch.testing.assert_close(leaf(backend, "flashmla_kv", q, kv_cache, slots[:7]), whole, atol=0, rtol=0)


def test_both_names_of_the_page_size_are_read():
    backend = started(prefill_backend="reference")
    backend.init_forward_metadata(LONG)
    _, kv_cache = filled_cache("v32_fp8")
    q, slots = queries(3), selection(3)
    before = leaf(backend, "flashmla_kv", q, kv_cache, slots)
    backend.physical_page_size, backend.real_page_size = backend.real_page_size, 1
    backend.nsa_plugin.caches.clear()
    torch.testing.assert_close(leaf(backend, "flashmla_kv", q, kv_cache, slots), before, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("layout", "path", "batch", "settings"),
    [
        ("v32_fp8", "flashmla_kv", DECODE, {"decode_backend": "flash_mla"}),
        ("bf16", "flashmla_sparse", LONG, {"prefill_backend": "flash_mla"}),
        (
            "v32_fp8",
            "flashmla_kv",
            forward_batch(ForwardMode.MIXED, [3000, 1], [3000, 9]),
            {"prefill_backend": "flash_mla"},
        ),
        ("v32_fp8", "flashmla_kv", forward_batch(ForwardMode.SPLIT_PREFILL, [9], [9]), {}),
    ],
)
def test_otherwise_the_upstream_kernel_runs(layout: str, path: str, batch: Any, settings: dict[str, str]):
    backend = started(layout=layout, **settings)
    backend.init_forward_metadata(batch)
    backend.calls.clear()
    _, kv_cache = filled_cache(layout)
    q, slots = queries(4), selection(4)
    later = {"topk_length": None} if path == "flashmla_sparse" else {}
    out = leaf(backend, path, q, kv_cache, slots, **later)
    assert backend.calls == [path]
    torch.testing.assert_close(out, leaf(DsaBackend(), path, q, kv_cache, slots), atol=0, rtol=0)


def test_a_topk_length_changes_nothing_where_the_rest_is_minus_one():
    backend = started(layout="bf16", prefill_backend="reference")
    backend.init_forward_metadata(LONG)
    _, kv_cache = filled_cache("bf16")
    q, slots = queries(4), selection(4)
    counts = (slots >= 0).sum(1).int()
    with_length = leaf(backend, "flashmla_sparse", q, kv_cache, slots, topk_length=counts)
    torch.testing.assert_close(with_length, leaf(backend, "flashmla_sparse", q, kv_cache, slots), atol=0, rtol=0)


def test_an_attention_sink_reaches_the_provider():
    backend = started(layout="bf16", prefill_backend="reference")
    backend.init_forward_metadata(LONG)
    _, kv_cache = filled_cache("bf16")
    q, slots = queries(3), selection(3)
    everything_in_the_sink = torch.full((HEADS,), float("inf"))
    assert not leaf(backend, "flashmla_sparse", q, kv_cache, slots, attn_sink=everything_in_the_sink).any()


@pytest.mark.parametrize(("library", "ran"), [("reference", []), ("flash_mla", ["flashmla_kv"])])
def test_the_fault_is_injected_whoever_attends(library: str, ran: list[str]):
    _, kv_cache = filled_cache("v32_fp8")
    q, slots = queries(4), selection(4)
    backend = started(decode_backend=library, fault="shift_indices")
    backend.init_forward_metadata(DECODE)
    backend.calls.clear()
    wrong = leaf(backend, "flashmla_kv", q, kv_cache, slots)
    assert backend.calls == ran
    right = stock_attention(q, kv_cache, slots, 0.1).unsqueeze(1)
    assert (wrong - right)[:-1].float().abs().max() > 0.1
    assert not wrong[-1].any()


def test_the_fault_is_injected_into_fa3_too():
    _, kv_cache = filled_cache("bf16")
    q, slots = queries(4), selection(4)
    named = {"q_rope": q[..., 512:], "q_nope": q[..., :512], "kv_cache": kv_cache, "v_head_dim": 512, "sm_scale": 0.1}
    right = stock_attention(q, kv_cache, slots, 0.1)
    for fault in ("none", "shift_indices"):
        backend = started(layout="bf16", decode="fa3", fault=fault)
        backend.init_forward_metadata(DECODE)
        backend.calls.clear()
        out = backend._forward_fa3(page_table=slots, **named)
        assert backend.calls == ["fa3"]
        assert bool((out - right)[:-1].float().abs().max() > 0.1) is (fault != "none")


@pytest.mark.parametrize(
    ("options", "notes", "route"),
    [
        (
            {"prefill": "tilelang"},
            ["SGLang's --dsa-prefill-backend is tilelang: prefills fall back to the stock path"],
            None,
        ),
        ({"prefill": "flashmla_sparse_q8"}, ["SGLang's --dsa-prefill-backend is flashmla_sparse_q8: prefills"], None),
        ({"server_args": SimpleNamespace(enable_prefill_cp=True)}, ["context-parallel prefill is on, which"], None),
        ({"decode": "trtllm"}, ["SGLang's --dsa-decode-backend is trtllm: decode, verify and draft steps"], "prefill"),
        ({"prefill": "flashmla_auto"}, [], "prefill"),
        ({"layout": "bf16", "sinks": True}, ["the model has attention sinks: decode, verify and draft"], "prefill"),
    ],
)
def test_stock_choices_are_left_alone_and_noted(options: dict[str, Any], notes: list[str], route: str | None):
    backend = started(**options)
    assert len(backend.notes) == len(notes)
    assert all(said.startswith(note) for said, note in zip(backend.notes, notes, strict=True))
    backend.init_forward_metadata(LONG)
    planned = backend.nsa_plugin is not None and backend.nsa_plugin.route is not None
    assert planned == (route is not None)
    if not planned:
        assert backend.impls[0] == options.get("prefill", "flashmla_kv")


def test_steps_of_a_model_with_sinks_are_left_to_the_stock_path(monkeypatch):
    """SGLang's FA3, which a plan takes for a bf16 cache where no times say otherwise, refuses them."""
    monkeypatch.setattr(timings, "TIMINGS", {})
    for sinks, decode in ((False, "fa3"), (True, "flashmla_sparse")):
        backend = started(layout="bf16", decode="flashmla_sparse", sinks=sinks)
        backend.init_forward_metadata(DECODE)
        assert backend.impls[1] == decode


def test_a_layers_cache_is_opened_once():
    backend = started(prefill_backend="reference")
    backend.init_forward_metadata(LONG)
    q, slots = queries(3), selection(3)
    caches = [filled_cache("v32_fp8")[1] for _ in range(2)]
    caches[1].view(torch.uint8).copy_(caches[0].view(torch.uint8).flip(0))
    first, other = (leaf(backend, "flashmla_kv", q, kv_cache, slots) for kv_cache in caches)
    assert len(backend.nsa_plugin.caches) == 2
    assert not torch.equal(first, other)
    for kv_cache, before in zip(caches, (first, other), strict=True):  # SGLang's pool makes another view each time
        assert torch.equal(leaf(backend, "flashmla_kv", q, kv_cache.view(kv_cache.shape), slots), before)
    assert len(backend.nsa_plugin.caches) == 2


def test_all_layers_of_a_batch_share_a_selection_and_no_two_batches_do():
    backend = started()
    found = []
    for batch in (LONG, LONG):
        backend.init_forward_metadata(batch)
        found += [getattr(backend.get_indexer_metadata(layer, batch), ATTRIBUTE) for layer in range(2)]
    assert found[0] is found[1] is not found[2]
    assert found[2] is found[3]


def test_the_indexer_gets_the_plan():
    backend = started()
    backend.init_forward_metadata(LONG)
    selected = getattr(backend.get_indexer_metadata(0, LONG), ATTRIBUTE)
    assert selected.plan is backend.nsa_plugin.route.plan
    assert selected.pool is backend.token_to_kv_pool


def test_older_versions_have_the_pool_on_the_batch():
    backend = started(NsaBackend)
    del backend.token_to_kv_pool
    batch = forward_batch(ForwardMode.EXTEND, [3000], [3000], token_to_kv_pool="the batch's")
    backend.init_forward_metadata(batch)
    assert getattr(backend.get_indexer_metadata(0, batch), ATTRIBUTE).pool == "the batch's"


def test_each_batch_is_recorded_and_each_plan_logged_once(caplog: pytest.LogCaptureFixture):
    backend = started()
    backend.nsa_plugin.planner.trace.mode = "log"
    with caplog.at_level("INFO", "nsa_plugin"):
        for _ in range(3):
            backend.init_forward_metadata(DECODE)
    assert sum("new plan" in record.message for record in caplog.records) == 1
    assert backend.nsa_plugin.planner.trace.counts.total() == 3
