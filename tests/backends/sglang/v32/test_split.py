"""Prefills whose short prompts attend densely next to long ones: the same answers, and no step without the others."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nsa_plugin.backends.sglang.v32 import routes
from nsa_plugin.backends.sglang.v32.split import why_whole
from nsa_plugin.decision.plan import Attention as Kind
from nsa_plugin.decision.plan import IndexerMode
from nsa_plugin.errors import PatchError
from nsa_plugin.libraries.devices import synthetic
from tests.backends.counted import Counted
from tests.backends.fake_sglang import layer as fake
from tests.backends.fake_sglang.layer import TOPK, Case
from tests.backends.fake_sglang.model_runner import decided, keep_arguments_raw
from tests.backends.fake_sglang.v32 import ForwardMode, started

pytestmark = pytest.mark.usefixtures("nothing_measured", "large_read_programs")
# (query tokens, context) of each request. More than 2048 tokens of context select.
BATCHES = {
    "short first": [(20, 20), (6, 2100)],
    "long first": [(6, 2100), (20, 20)],
    "long on both sides, cached prefixes, an idle request": [(3, 2060), (9, 9), (7, 30), (0, 40), (5, 2100), (2, 500)],
    "decode steps in short and long contexts": [(8, 8), (6, 2100), (1, 500), (1, 2070)],
}


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "SPLIT_TOKENS", 8)


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(
    ("layout", "settings", "ran"),
    [
        ("bf16", {"prefill_backend": "reference"}, []),
        ("bf16", {"prefill_backend": "flash_mla"}, ["flashmla_sparse"]),
        ("v32_fp8", {"prefill_backend": "reference"}, []),
        ("v32_fp8", {"prefill_backend": "flash_mla"}, ["flashmla_kv"]),
    ],
)
def test_a_split_batch_has_the_answers_of_a_whole_one(
    lengths: list[tuple[int, int]], layout: str, settings: dict[str, Any], ran: list[str]
):
    whole, case = Case(lengths, layout, **settings), Case(lengths, layout, **settings)
    wanted, found = whole.run(split=False), case.run()
    assert "dense" not in whole.backend.calls
    assert [call for call in case.backend.calls if call != "schedule"] == ["dense", *ran]
    # An fp8 cache rounds new tokens for sparse attention, but not for dense attention.
    torch.testing.assert_close(found, wanted, atol=2e-2 if layout == "bf16" else 0.15, rtol=2e-2)
    assert (found - wanted).float().abs().mean() < 0.1 * wanted.float().abs().mean()
    torch.testing.assert_close(found[~case.short], wanted[~case.short], atol=0, rtol=0)
    assert not case.backend.use_mha


@pytest.mark.parametrize(("sm", "portable", "split"), [(86, True, True), (86, False, False), (90, False, True)])
def test_a_prefill_is_split_where_some_kernel_attends_densely(sm: int, portable: bool, split: bool):
    case = Case(BATCHES["short first"], prefill_backend="reference")
    runner = SimpleNamespace(server_args=SimpleNamespace(), model=nn.ModuleList([case.layer]))
    why = why_whole(runner, sm, setting="on", resharding=False, portable=portable)
    assert why == ("" if split else "SGLang attends densely on SM90 and SM100 only")


@pytest.mark.parametrize("layout", ["bf16", "v32_fp8"])
def test_the_plugins_kernel_attends_the_short_prompts_where_sglang_has_none(
    monkeypatch: pytest.MonkeyPatch, layout: str
):
    monkeypatch.setattr(fake, "DSAFlashMLAMetadata", SimpleNamespace, raising=False)
    lengths = BATCHES["long on both sides, cached prefixes, an idle request"]
    given = {"device": synthetic(86, libraries=("triton",)), "portable": True, "prefill_backend": "reference"}
    whole, case = Case(lengths, layout, **given), Case(lengths, layout, **given)
    wanted, found = whole.run(split=False), case.run()
    assert case.split is not None
    assert case.backend.calls == []  # nothing of SGLang's
    torch.testing.assert_close(found, wanted, atol=2e-2 if layout == "bf16" else 0.15, rtol=2e-2)
    assert (found - wanted).float().abs().mean() < 0.1 * wanted.float().abs().mean()


@pytest.mark.parametrize("mode", [ForwardMode.MIXED, ForwardMode.EXTEND])
@pytest.mark.parametrize("layout", ["v32_fp8", "bf16"])
def test_decode_steps_in_short_contexts_select_with_the_long_prompts(mode: ForwardMode, layout: str):
    """SGLang's eager runner turns MIXED into EXTEND from 0.5.19 on."""
    case = Case(BATCHES["decode steps in short and long contexts"], layout, prefill_backend="reference")
    case.batch.forward_mode = mode
    case.prepare()
    assert case.split is not None
    assert case.split.execution.requests == (1, 2, 3)
    assert [part.requests for part in case.split.execution.dense_parts] == [(0,)]
    assert case.backend.dsa_prefill_impl == ("flashmla_kv" if layout == "v32_fp8" else "flashmla_sparse")


def test_each_part_is_recorded():
    case = Case(BATCHES["long on both sides, cached prefixes, an idle request"], prefill_backend="reference")
    counted = case.planner.metrics = Counted()
    case.run()
    assert case.planner.trace.counts == {"extend/sparse_prefill/reference": 1, "extend/mha_one_shot/fa3": 1}
    assert [(plan.attention, plan.indexer.mode) for plan in counted] == [
        (Kind.SPARSE_PREFILL, IndexerMode.TOPK),
        (Kind.MHA_ONE_SHOT, IndexerMode.STORE_ONLY),
    ]
    assert "exceeds mha_max_kv 2048" in counted[0].reasons["attention"]
    assert "within mha_max_kv 2048" in counted[1].reasons["attention"]


def test_padding_behind_the_batch_stays_zero():
    case = Case(BATCHES["short first"], padding=6, prefill_backend="reference")
    assert case.run()[-6:].abs().max() == 0


def test_a_later_layer_and_a_later_batch_are_attended_too():
    case = Case(BATCHES["long first"], prefill_backend="reference")
    first, second = case.run(), fake.run(case.layer, case.batch, case.hidden, case.slots)
    torch.testing.assert_close(first, second, atol=0, rtol=0)
    torch.testing.assert_close(first, case.run(), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("lengths", "more", "reason"),
    [
        ([(20, 20), (6, 2100)], {"whole": "LoRA"}, "LoRA"),
        ([(5, 5), (6, 2100)], {}, "fewer than 8 query tokens are in short contexts"),
        ([(6, 2100), (6, 2200)], {}, "fewer than 8 query tokens are in short contexts"),
        ([*[(1, 20)] * 9, (6, 2100)], {}, "fewer than 8 query tokens are in short contexts"),
        ([(20, 20), (6, 2100)], {"spec_info": object()}, "the draft model reads the selection of every prompt"),
        ([(20, 20), (6, 2100)], {"dense_allowed": False}, "SGLang's rules exclude it for this batch"),
        ([(20, 20), (6, 2100)], {"mha_max_kv": 10}, "fewer than 8 query tokens are in short contexts"),
    ],
)
def test_a_batch_that_is_not_split_says_why(lengths: list[tuple[int, int]], more: dict[str, Any], reason: str):
    settings = {"mha_max_kv": more["mha_max_kv"]} if "mha_max_kv" in more else {}
    case = Case(lengths, prefill_backend="reference", **settings)
    case.planner.whole = more.get("whole", "")
    case.backend.dense_allowed = more.get("dense_allowed", True)
    case.batch.spec_info = more.get("spec_info")
    case.backend.init_forward_metadata(case.batch)
    assert case.split is None
    route = case.backend.nsa_plugin.route
    assert f"and the batch is not split: {reason}" in route.plan.reasons["attention"]


@pytest.mark.parametrize("lengths", [[(20, 20), (30, 30)], [(6, 2100)]])
def test_a_batch_of_one_kind_is_attended_as_a_whole(lengths: list[tuple[int, int]]):
    case = Case(lengths, prefill_backend="reference")
    case.prepare()
    assert case.split is None
    assert case.backend.use_mha is (lengths[0][1] <= TOPK)
    assert "not split" not in case.backend.nsa_plugin.route.plan.reasons["attention"]


def test_sglangs_rules_are_asked_about_the_short_prompts_alone():
    case = Case(BATCHES["long first"], prefill_backend="reference", mha_max_kv=100)
    asked = []
    original = case.backend._set

    def rules(batch: Any) -> None:
        asked.append(batch.seq_lens_cpu.tolist())
        original(batch)

    case.backend._set = rules
    case.prepare()
    assert asked == [[2100, 20], [20], [2100, 20]]
    assert case.split is not None


def test_a_later_batch_without_a_split_is_stock():
    case = Case(BATCHES["long first"], prefill_backend="reference")
    case.run()
    later = Case([(6, 2100)], prefill_backend="reference")
    later.backend.init_forward_metadata(case.batch)
    assert case.batch.nsa_plugin_split is None


class TestFailsClosed:
    def test_attention_outside_the_core(self):
        case = Case(BATCHES["short first"], prefill_backend="reference")
        case.prepare()
        plain = fake.Attention(case.backend, "bf16")
        with pytest.raises(PatchError, match="outside forward_absorb_core"):
            fake.run(plain, case.batch, case.hidden, case.slots)

    def test_a_core_without_its_prepare(self):
        case = Case(BATCHES["short first"], prefill_backend="reference")
        case.prepare()
        case.layer.slots = case.slots
        prepared = fake.Attention(case.backend, "bf16").forward_absorb_prepare(None, case.hidden, case.batch, None)
        with pytest.raises(PatchError, match="did not prepare this layer"):
            case.layer.forward_absorb_core(*prepared)

    def test_queries_that_are_not_projected_once(self, monkeypatch: pytest.MonkeyPatch):
        case = Case(BATCHES["short first"], prefill_backend="reference")
        case.prepare()
        original = fake.SplitAttention.q_b_proj_forward
        monkeypatch.setattr(
            fake.Attention,
            "forward_absorb_prepare",
            lambda self, positions, hidden, *more: original(self, hidden[:, : fake.Q_LORA]),
        )
        layer = type("Other", (fake.Attention,), {"forward_absorb_prepare": fake.wrap_prepare(lambda *given: None)})
        with pytest.raises(PatchError, match="queries 0 times"):
            layer(case.backend, "bf16").forward_absorb_prepare(None, case.hidden, case.batch, None)

    def test_an_output_that_is_not_projected(self):
        case = Case(BATCHES["short first"], prefill_backend="reference")
        case.prepare()
        layer = type("Other", (fake.SplitAttention,), {"forward_absorb_core": fake.wrap_core(lambda *given: None)})
        with pytest.raises(PatchError, match="attend and project a split batch once"):
            fake.run(layer(case.backend, "bf16"), case.batch, case.hidden, case.slots)

    def test_the_layer_is_left_as_it_was(self):
        case = Case(BATCHES["short first"], prefill_backend="reference")
        case.run()
        assert "q_b_proj_forward" not in vars(case.layer)
        assert not case.layer.o_proj._forward_pre_hooks


def runner(*layers: Any, **server_args: Any) -> Any:
    return SimpleNamespace(
        model=torch.nn.ModuleList(layers) if layers else None, server_args=SimpleNamespace(**server_args)
    )


def test_the_server_decides_whether_prefills_are_split():
    backend = started(fake.SplitBackend, layout="bf16")
    layer = fake.SplitAttention(backend, "bf16")
    assert why_whole(runner(layer), 90, setting="off", resharding=False) == "split_prefill is off"
    assert why_whole(runner(layer), 90, setting="on", resharding=False) == ""
    assert (
        why_whole(runner(layer), 86, setting="on", resharding=False) == "SGLang attends densely on SM90 and SM100 only"
    )
    assert "token_shard" in why_whole(runner(layer), 90, setting="on", resharding=True)
    assert "LoRA" in why_whole(runner(layer, enable_lora=True), 90, setting="on", resharding=False)
    assert "two-batch overlap" in why_whole(
        runner(layer, enable_two_batch_overlap=True), 90, setting="on", resharding=False
    )
    assert why_whole(runner(), 90, setting="on", resharding=False) == "the model has no MLA layers"
    plain = fake.Attention(backend, "bf16")
    assert "older than 0.5.16" in why_whole(runner(layer, plain), 90, setting="on", resharding=False)
    other = torch.nn.Module()
    other.attn_mqa = torch.nn.Identity()
    assert "Module has another forward_absorb_core" in why_whole(
        runner(layer, other), 90, setting="on", resharding=False
    )
    layer.learnable_sink_param = torch.nn.Parameter(torch.zeros(1))
    assert "attention sinks" in why_whole(runner(layer), 90, setting="on", resharding=False)


def test_lora_that_sglang_turned_on_itself_leaves_prefills_whole(monkeypatch: pytest.MonkeyPatch):
    """--lora-paths does."""
    keep_arguments_raw(monkeypatch)
    layer = fake.SplitAttention(started(fake.SplitBackend, layout="bf16"), "bf16")
    assert "LoRA" in why_whole(runner(layer, **decided(enable_lora=True)), 90, setting="on", resharding=False)
    assert why_whole(runner(layer, **decided(enable_lora=False)), 90, setting="on", resharding=False) == ""


def test_the_request_ranges_of_a_selection_leave_dense_requests_out():
    lengths = BATCHES["long on both sides, cached prefixes, an idle request"]
    case = Case(lengths, prefill_backend="reference")
    case.prepare()
    assert case.split is not None
    ends = list(accumulate(kv for _, kv in lengths))
    assert case.split.selecting() == [(0, 3, 0, 2060), (3, 8, ends[3], ends[4])]
    assert torch.equal(torch.as_tensor(case.split.rows(case.slots)), torch.tensor([0, 1, 2, 19, 20, 21, 22, 23]))
    assert replace(case.split, _rows=None).rows(case.slots) is not None
