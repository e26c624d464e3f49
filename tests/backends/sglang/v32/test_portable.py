"""The portable path under SGLang: selection, quantisation and the writer of the cache, without fp8 instructions."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.sglang.v32 import patches, portable
from nsa_plugin.backends.sglang.v32.indexer import Selection, attach, wrap_topk_ragged
from nsa_plugin.backends.sglang.v32.routes import NO_DENSE_BESIDE_DRAFTS
from nsa_plugin.decision.plan import IndexerMode
from nsa_plugin.errors import PatchError
from nsa_plugin.kernels.indexer import quantize, reference_paged_topk
from nsa_plugin.kernels.kv_cache import open_cache, reference_read, reference_write
from nsa_plugin.kernels.mha import reference as reference_mha
from nsa_plugin.libraries.devices import synthetic
from tests.backends.fake_sglang.v32 import DsaBackend, ForwardMode, forward_batch, started
from tests.kernels.indexer_cases import indexer_inputs, paged_keys

TOPK, HEADS, LENGTHS = 16, 4, [1, 64, 40, 130]
PROVIDERS = Providers("v32_fp8", 0, helpers="triton")
PLAN = SimpleNamespace(indexer=SimpleNamespace(mode=IndexerMode.TOPK, provider="triton", rows_per_chunk=3))


@dataclass(frozen=True)
class Metadata:
    """SGLang's indexer metadata of a step."""

    table: torch.Tensor
    force_unfused_topk: bool = False
    attn_metadata: Any = None
    lengths: torch.Tensor = field(default_factory=lambda: torch.tensor(LENGTHS, dtype=torch.int32))

    def get_page_table_64(self) -> torch.Tensor:
        return self.table

    def get_seqlens_int32(self) -> torch.Tensor:
        return self.lengths

    def get_seqlens_expanded(self) -> torch.Tensor:
        return self.lengths


class Step:
    """A step of four query tokens, and two of padding."""

    def __init__(self) -> None:
        self.cache, self.table = paged_keys(LENGTHS, 16)
        self.q, _, _, self.weights = indexer_inputs(len(LENGTHS) + 2, 1, HEADS)
        self.indexer = SimpleNamespace(
            index_topk=TOPK,
            num_init_tokens=0,
            num_local_tokens=0,
            _get_index_k_read_buffer=lambda pool, layer_id: self.cache.data.view(self.cache.num_pages, -1),
        )

    def run(self, metadata: Metadata, mode: ForwardMode = ForwardMode.DECODE, selection: Any = None) -> torch.Tensor:
        selection = Selection(PLAN, "pool", PROVIDERS, portable=True) if selection is None else selection
        attach(metadata, selection)
        found: torch.Tensor = patches.wrap_topk_paged(lambda *given: pytest.fail("stock"))(
            self.indexer, forward_batch(mode, [], LENGTHS), 3, self.q, self.weights.unsqueeze(-1), metadata
        )
        return found

    def expected(self) -> list[set[int]]:
        rows = len(LENGTHS)
        seen = torch.tensor(LENGTHS)
        found = reference_paged_topk(self.q[:rows, None], self.cache, self.weights[:rows], seen, self.table, TOPK)
        return [set(row) - {-1} for row in found.tolist()]


@pytest.fixture(autouse=True)
def modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the fake's modes answer as SGLang's do."""
    monkeypatch.setattr(ForwardMode, "is_target_verify", lambda self: self is ForwardMode.TARGET_VERIFY, raising=False)
    monkeypatch.setattr(ForwardMode, "is_draft_extend_v2", lambda self: False, raising=False)


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY], ids=str)
@pytest.mark.parametrize("fused", [True, False])
def test_steps_select_as_the_reference(monkeypatch: pytest.MonkeyPatch, fused: bool, mode: ForwardMode) -> None:
    monkeypatch.setattr(portable, "is_fused", lambda metadata: fused)
    step = Step()
    found = step.run(Metadata(step.table), mode)
    assert found.shape == (len(LENGTHS) + 2, TOPK)
    assert bool((found[len(LENGTHS) :] == -1).all())  # padding
    for row, wanted in enumerate(step.expected()):
        chosen = set(found[row].tolist()) - {-1}
        if fused:
            wanted = {int(step.table[row, position // 64]) * 64 + position % 64 for position in wanted}
        assert chosen == wanted


def test_a_batch_without_a_plan_is_left_to_sglang() -> None:
    step = Step()
    stock = patches.wrap_topk_paged(lambda *given: "stock")
    assert stock(step.indexer, None, 3, step.q, step.weights, Metadata(step.table)) == "stock"


def test_tokens_forced_into_the_selection_are_refused() -> None:
    step = Step()
    step.indexer.num_init_tokens = 4
    with pytest.raises(PatchError, match="forces its first or last tokens"):
        step.run(Metadata(step.table))


def test_a_prefill_that_the_plugin_cannot_select_for_is_refused_and_not_left_to_deepgemm() -> None:
    metadata = Metadata(torch.zeros(1, 1))
    # Without SGLang's key ranges the plan's selection does not cover the batch.
    decode_plan = SimpleNamespace(phase=None, indexer=PLAN.indexer)
    attach(metadata, Selection(decode_plan, "pool", PROVIDERS, portable=True))
    wrapped = wrap_topk_ragged(lambda *given: "stock")
    given = (SimpleNamespace(), False, None, 3, torch.zeros(2, 1), None, metadata)
    with pytest.raises(PatchError, match="the portable path lacks"):
        wrapped(*given)
    attach(metadata, Selection(decode_plan, "pool", PROVIDERS))
    assert wrapped(*given) == "stock"


SM86, SM89 = (synthetic(sm, libraries=("triton",)) for sm in (86, 89))
NEW, CACHED = ([20, 30], [20, 30]), ([20, 30], [50, 30])
"""(query tokens, context) of two requests, without and with a prefix."""


@pytest.mark.parametrize(
    ("device", "layout", "lengths", "more", "reason"),
    [
        (SM89, "v32_fp8", CACHED, {"forward_mode": ForwardMode.MIXED}, ""),
        (SM89, "bf16", CACHED, {"forward_mode": ForwardMode.MIXED}, ""),
        (SM86, "v32_fp8", NEW, {}, ""),
        (SM86, "bf16", CACHED, {}, ""),
        (SM89, "v32_fp8", CACHED, {}, ""),
        (SM86, "v32_fp8", CACHED, {}, portable.NO_FP8_PREFIX),
        (SM86, "v32_fp8", NEW, {"spec_info": object()}, NO_DENSE_BESIDE_DRAFTS),
        (SM86, "v32_fp8", ([20], [3000]), {}, "exceeds mha_max_kv 2048"),
    ],
)
def test_short_prefills_attend_densely(
    device: Any, layout: str, lengths: tuple[list[int], list[int]], more: dict[str, Any], reason: str
) -> None:
    backend = started(DsaBackend, layout=layout, device=device, portable=True)
    batch = forward_batch(ForwardMode.EXTEND, *lengths, **more)
    backend.init_forward_metadata(batch)
    assert backend.use_mha is portable.is_dense(batch) is (not reason)
    assert reason in backend.nsa_plugin.route.plan.reasons["attention"]
    assert backend._get_device_sm() == device.sm  # for SGLang's other code
    # SGLang's flags and graphs still rule it out.
    backend.dense_allowed = False
    backend.init_forward_metadata(batch)
    assert not backend.use_mha


def test_a_prefill_that_is_not_planned_is_not_dense() -> None:
    backend = started(DsaBackend, device=SM89, portable=True)
    batch = forward_batch(ForwardMode.EXTEND, *NEW)
    backend.nsa_plugin.planner.prefill = lambda *given, **named: None  # as under context parallelism
    backend.init_forward_metadata(batch)
    assert (backend.use_mha, portable.is_dense(batch)) == (False, False)
    backend.nsa_plugin.plans_prefill = False
    backend.init_forward_metadata(batch)
    assert (backend.use_mha, portable.is_dense(batch)) == (False, False)


def test_sglangs_rules_see_another_gpu_before_0_5_20(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = ModuleType("sglang.srt.utils")
    utils.get_device_sm = lambda: 86  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.utils", utils)
    for dense in (True, False):
        with suppress(ZeroDivisionError), portable.rules_for(SimpleNamespace(), dense=dense):
            seen = utils.get_device_sm()
            raise ZeroDivisionError
        assert (seen == 90) is dense
        assert utils.get_device_sm() == 86


def test_a_dense_prefill_agrees_with_the_reference() -> None:
    heads, d_qk, d_v, tokens, keys = 3, 192, 128, 40, 70
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(tokens + 5, heads * d_qk, generator=generator).bfloat16()  # five of padding
    k = torch.randn(keys, heads, d_qk, generator=generator).bfloat16()
    v = torch.randn(keys, heads, 128 + d_v, generator=generator).bfloat16()[..., 128:]
    bounds = torch.tensor([0, 10, 40], dtype=torch.int32), torch.tensor([0, 40, 70], dtype=torch.int32)
    layer = SimpleNamespace(
        tp_q_head_num=heads, tp_k_head_num=heads, tp_v_head_num=heads, head_dim=d_qk, v_head_dim=d_v, scaling=0.07
    )
    metadata = SimpleNamespace(cu_seqlens_q=bounds[0], cu_seqlens_k=bounds[1], max_seq_len_q=30, max_seq_len_k=40)
    found = portable.attend_dense(PROVIDERS, q, k, v, layer, metadata)
    wanted = reference_mha(q.view(-1, heads, d_qk), k, v.contiguous(), *bounds, scale=0.07).out
    torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)
    assert found[:tokens].abs().max() > 0.1
    assert found[tokens:].abs().max() == 0


def test_only_a_dense_prefill_goes_without_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    skips = patches.wrap_skip_logits(lambda indexer, batch: "stock")
    monkeypatch.setattr(patches, "process", lambda: SimpleNamespace(serving=None))
    assert skips(None, SimpleNamespace()) == "stock"
    monkeypatch.setattr(patches, "process", lambda: SimpleNamespace(serving=SimpleNamespace(active=True)))
    for dense in (True, False):
        batch = SimpleNamespace()
        portable.note_dense(batch, dense)
        assert skips(None, batch) is dense
    assert skips(None, SimpleNamespace()) is False  # a decode step


@pytest.mark.parametrize("shape", [(7, 128), (5, 3, 128), (0, 128)])
def test_queries_are_quantised_with_scales_that_are_powers_of_two(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16() * 3
    codes, scales = portable.quantize(x, PROVIDERS)
    right, right_scales = quantize(x, ue8m0=True)
    assert torch.equal(codes.view(torch.uint8), right.view(torch.uint8))
    assert torch.equal(scales, right_scales)
    assert codes.shape == x.shape


def test_new_entries_are_written_as_flashmla_reads_them() -> None:
    generator = torch.Generator().manual_seed(2)
    nope = torch.randn(5, 1, 512, generator=generator).bfloat16()
    rope = torch.randn(5, 1, 64, generator=generator).bfloat16()
    buffer, slots = torch.zeros(128, 1, 656, dtype=torch.uint8), torch.tensor([3, 127, 0, 64, 9])
    portable.write(PROVIDERS, buffer, slots, nope, rope)
    wanted = open_cache(torch.zeros(2, 64, 1, 656, dtype=torch.uint8), "v32_fp8")
    reference_write(wanted, torch.cat([nope, rope], -1).squeeze(1), slots)
    assert torch.equal(buffer.view(-1), wanted.data.view(-1))
    assert bool(reference_read(wanted, slots, dtype=torch.float32).any())


@pytest.mark.parametrize(("sm", "ours"), [(86, True), (89, False), (None, False)])
def test_kernels_with_fp8_instructions_are_replaced_only_where_the_gpu_lacks_them(
    monkeypatch: pytest.MonkeyPatch, sm: int | None, ours: bool
) -> None:
    serving = None if sm is None else SimpleNamespace(device=synthetic(sm), providers=PROVIDERS, active=True)
    monkeypatch.setattr(patches, "process", lambda: SimpleNamespace(serving=serving))
    asked: list[str] = []
    quantise = patches.wrap_act_quant(lambda *given: asked.append("quantise"))
    write = patches.wrap_write(lambda *given: asked.append("write"))
    x, slots = torch.ones(2, 128).bfloat16(), torch.tensor([1, 0])
    quantise(x, 128, "ue8m0")
    buffer, nope, rope = torch.zeros(64, 1, 656, dtype=torch.uint8), torch.ones(2, 512), torch.ones(2, 64)
    write(SimpleNamespace(dsa_kv_cache_store_fp8=True), buffer, slots, nope.bfloat16(), rope.bfloat16())
    assert asked == ([] if ours else ["quantise", "write"])
    assert bool(buffer.any()) == ours
    # A cache without fp8 codes and scales of another form are SGLang's.
    asked.clear()
    write(SimpleNamespace(dsa_kv_cache_store_fp8=False), buffer, slots, nope, rope)
    quantise(x, 128, None)
    assert asked == ["write", "quantise"]


@pytest.mark.parametrize("serves", [True, False])
def test_deepgemm_is_not_asked_while_the_plugin_serves(monkeypatch: pytest.MonkeyPatch, serves: bool) -> None:
    monkeypatch.setattr(patches, "process", lambda: SimpleNamespace(serving=SimpleNamespace(active=serves)))
    schedule = patches.wrap_schedule(lambda: "DeepGEMM's")()
    skips = patches.wrap_skip_logits(lambda indexer, batch: True)
    assert skips("indexer", "batch") is not serves
    if serves:
        assert schedule(torch.zeros(3, 1), 64, 132).shape == (133, 2)
    else:
        assert schedule == "DeepGEMM's"


@pytest.mark.parametrize("serves", [True, False])
def test_deepgemm_is_not_asked_where_sglang_has_its_module(monkeypatch: pytest.MonkeyPatch, serves: bool) -> None:
    """Before 0.5.22 SGLang calls the module, and where it could not import it the name holds the error."""
    monkeypatch.setattr(patches, "process", lambda: SimpleNamespace(serving=SimpleNamespace(active=serves)))
    device = SimpleNamespace(multi_processor_count=84)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda: device)
    theirs = SimpleNamespace(get_paged_mqa_logits_metadata=lambda *given: "DeepGEMM's", fp8_mqa_logits="logits")
    for module in (theirs, ImportError("no module named deep_gemm")):
        wrapped = patches.wrap_deep_gemm(module)
        assert wrapped.get_num_sms() == 84
        if serves:
            assert wrapped.get_paged_mqa_logits_metadata(torch.zeros(3, 1), 64, 84).shape == (85, 2)
    if not serves:
        wrapped = patches.wrap_deep_gemm(theirs)
        assert wrapped.get_paged_mqa_logits_metadata(torch.zeros(3, 1), 64, 84) == "DeepGEMM's"
        assert wrapped.fp8_mqa_logits == "logits"


@pytest.mark.parametrize("serves", [True, False])
def test_sglangs_top_k_is_planned_only_where_it_selects(monkeypatch: pytest.MonkeyPatch, serves: bool) -> None:
    monkeypatch.setattr(patches, "process", lambda: SimpleNamespace(serving=SimpleNamespace(active=serves)))
    plan = patches.wrap_topk_plan(lambda backend, lengths: "plan")("backend", torch.ones(3))
    assert plan == (None if serves else "plan")


def test_flashmla_makes_no_schedule_on_the_portable_path() -> None:
    backend = started(device=SM86, portable=True)
    made = backend._compute_flashmla_metadata(torch.ones(5, dtype=torch.int32), 1)
    assert (made.num_splits.shape, backend.calls) == ((6,), [])
