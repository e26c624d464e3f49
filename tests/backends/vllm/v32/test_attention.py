"""vLLM's layer with plans: every kind of batch against dense float32 attention, and the stock path."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_plugin.backends.common.paths import STOCK
from nsa_plugin.backends.vllm.v32 import attention
from nsa_plugin.backends.vllm.v32.attention import rebased
from nsa_plugin.backends.vllm.v32.metadata import PlannedMetadata, part_of
from nsa_plugin.decision.plan import Attention
from nsa_plugin.decision.shapes import Phase
from nsa_plugin.errors import PatchError
from nsa_plugin.kernels.mha import reference
from nsa_plugin.kernels.providers import trtllm
from nsa_plugin.libraries.devices import synthetic
from tests.backends.fake_vllm.v32 import (
    MIXED,
    TOPK,
    TRITON,
    WITH_FLASH_MLA,
    DenseBase,
    LaterImpl,
    SparseBase,
    StockImpl,
    StockMetadata,
    World,
    make_builder,
    planner,
)

LAYOUTS = pytest.mark.parametrize("layout", ["bf16", "v32_fp8"])
LATER = pytest.mark.parametrize("later", [False, True], ids=["to 0.25", "from 0.26"])


@pytest.mark.regression(16)
@pytest.mark.regression(21)
@LAYOUTS
@LATER
def test_a_mixed_batch(layout: str, later: bool):
    """vllm #41836: steps and prefills in one call, where one was attended with the other's metadata."""
    world = World(planner(layout, device=TRITON), later)
    step = world.step(MIXED)
    assert step.split.num_steps == 2
    assert step.split.sparse_requests == (3, 5)
    assert step.split.dense_requests == {2, 4, 6}
    assert step.metadata.prefill.max_query_len == 30
    step.check()


@LAYOUTS
@pytest.mark.parametrize("lengths", [[(30, 60), (6, 6)], [(6, 6), (30, 60)], [(1, 30), (60, 60)], [(3, 3)], [(1, 70)]])
def test_a_long_prompt_does_not_take_dense_attention_from_short_ones(layout: str, lengths: list[tuple[int, int]]):
    step = World(planner(layout)).step(lengths)
    short = {place for place, (rows, context) in enumerate(lengths) if rows > 1 and context <= TOPK}
    assert step.split.dense_requests == short
    step.check()


@pytest.mark.parametrize("library", ["triton", "reference"])
def test_each_provider(library: str):
    asked = {"prefill_backend": library, "decode_backend": library}
    step = World(planner("v32_fp8", device=TRITON, **asked)).step(MIXED)
    assert {piece.plan.provider for piece in step.metadata.mqa} == {library}
    step.check()


@pytest.mark.regression(5)
@pytest.mark.regression(12)
@LAYOUTS
@pytest.mark.parametrize("next_n", [2, 3, 4])
def test_steps_of_several_query_tokens(layout: str, next_n: int):
    """vllm #31845: speculative decoding with this backend died at the first request."""
    step = World(planner(layout, step_tokens=next_n)).step(
        [(next_n, 50), (next_n, 8), (1, 33), (9, 40), (next_n + 1, 7)]
    )
    assert step.split.steps is not None
    assert step.split.steps.phase is Phase.TARGET_VERIFY
    assert step.split.num_steps == 3
    step.check()


@pytest.mark.regression(11)
@LAYOUTS
@pytest.mark.parametrize("next_n", [1, 3])
def test_padded_rows_of_a_captured_batch(layout: str, next_n: int):
    """vllm #51970: requests without tokens in a captured batch."""
    world = World(planner(layout, step_tokens=next_n))
    step = world.step([(next_n, 50), (next_n, 8)], padded_rows=2 * next_n, padded_requests=2)
    assert step.metadata.num_decode_tokens == 4 * next_n
    step.check()
    assert not bool(step.run()[2 * next_n :].any())


def test_a_batch_of_padding_alone():
    step = World(planner()).step([], padded_rows=4, padded_requests=4)
    assert step.run().shape[0] == 4
    assert not bool(step.run().any())


@pytest.mark.regression(9)
def test_a_request_without_query_tokens():
    """vllm #51486: a prefill without query tokens aborted the worker."""
    step = World(planner()).step([(1, 20), (0, 12), (30, 60), (0, 5), (4, 4)])
    step.check()
    # No piece is without rows: a kernel launched on nothing is what aborted.
    metadata = World(planner()).step([(0, 20), (0, 12), (30, 30)]).metadata
    assert [piece.rows for piece in metadata.mqa] == [slice(0, 30)]


def test_captured_batches_have_the_same_plan_and_addresses():
    """The plan depends on the number of query tokens alone, and the owners keep their address."""
    world = World(planner("v32_fp8"))
    capture = world.step([(1, 1)] * 8).metadata
    replay = world.step([(1, 50), (1, 90), (1, 3)], padded_rows=5, padded_requests=5).metadata
    assert capture.mqa[0].plan is replay.mqa[0].plan
    assert capture.mqa[0].request_of_row.data_ptr() == replay.mqa[0].request_of_row.data_ptr()
    assert replay.mqa[0].request_of_row.tolist() == [0, 1, 2, -1, -1, -1, -1, -1]


def test_owners_are_copied_for_every_batch():
    """The rows of a mixed batch are not those of the steps before it, and a sleeping engine loses the device's copy."""
    world = World(planner("v32_fp8"))
    steps = [(1, 50), (1, 90), (1, 3)]
    for batch, owners in ((steps, [0, 1, 2]), ([(1, 50), (2, 30)], [0, 1, 1]), (steps, [0, 1, 2])):
        for _ in range(2):
            found = [piece.request_of_row for piece in world.step(batch).metadata.mqa]
            assert torch.cat(found).tolist() == owners
            for rows in found:
                rows.fill_(7)


def test_dense_parts_within_the_workspace():
    step = World(planner(workspace_tokens=30)).step([(20, 20), (8, 8), (24, 24), (2, 2)])
    assert [part.requests for part in step.split.dense] == [(0, 1), (2, 3)]
    step.check()


@LAYOUTS
def test_trtllm_gets_the_lengths_from_the_host(layout: str):
    """Without lengths trtllm copies the boundaries from the device, and every layer waits for it."""
    device = synthetic(100, libraries=("triton", "trtllm"))
    world = World(planner(layout, device=device, decode_backend="triton"))
    given = []

    def mha(q: Any, k: Any, v: Any, *bounds: torch.Tensor, scale: float, out: Any, **lengths: tuple[int, ...]) -> Any:
        given.append(lengths)
        return reference(q, k, v, *bounds, scale=scale, out=out)

    world.impl.nsa_plugin_providers._loaded["mha_one_shot", "trtllm"] = mha
    step = world.step([(1, 40), (20, 20), (5, 21)])
    assert [piece.plan.provider for piece in step.metadata.mha] == ["trtllm"]
    step.check()
    assert given == [{"seqlens_q": (20, 5), "seqlens_k": (20, 21)}]
    assert given[0].keys() <= inspect.signature(trtllm.attend_dense).parameters.keys()


@pytest.mark.regression(13)
def test_joined_queries_are_not_in_vllms_workspace():
    """vllm #56771: a prefill wrote into memory that a live decode graph reads."""
    world = World(planner("v32_fp8"))
    world.step(MIXED).check()
    assert bool(world.impl.q_concat_buffer.isnan().all())
    assert world.impl.calls == []


def test_queries_on_a_gpu_are_joined_by_vllms_kernel(monkeypatch: pytest.MonkeyPatch):
    class OnGpu(torch.Tensor):
        is_cuda = True

    def concat_mla_q(ql_nope: torch.Tensor, q_pe: torch.Tensor, q_out: torch.Tensor) -> None:
        given.append(q_out)
        q_out[..., :512], q_out[..., 512:] = ql_nope, q_pe

    given: list[torch.Tensor] = []
    monkeypatch.setitem(sys.modules, attention.CUSTOM_OPS, SimpleNamespace(concat_mla_q=concat_mla_q))
    nope, rope = torch.randn(16, 5, 512).transpose(0, 1), torch.randn(5, 16, 192)[..., 128:]
    joined = attention._joined((nope.as_subclass(OnGpu), rope.as_subclass(OnGpu)))
    assert joined is given[0]
    assert torch.equal(torch.Tensor(joined), torch.cat([nope, rope], -1))


@pytest.mark.parametrize("by_vllm", [False, True], ids=["plugin's kernel", "vLLM's call"])
@pytest.mark.parametrize("padded", [0, 2])
def test_steps_like_the_last_ones_take_over_what_their_split_decides_and_nothing_else(by_vllm: bool, padded: int):
    backends = {"device": WITH_FLASH_MLA, "prefill_backend": "flash_mla", "decode_backend": "flash_mla"}
    world = World(planner(topk=128, **backends) if by_vllm else planner("v32_fp8"))
    padding = {"padded_rows": padded, "padded_requests": padded}
    first = world.step([(1, 40), (1, 9)], **padding)
    first.check()
    for lengths in ([(1, 41), (1, 10)], [(1, 7), (1, 90)]):
        world.builder.nsa_plugin_owners._on_device.fill_(-1)  # as after vLLM's sleep
        step = world.step(lengths, **padding)
        assert step.split is first.split
        assert step.metadata is not first.metadata
        step.check()
        world.builder.nsa_plugin_last = None
        anew = world.builder.build(0, step.common)
        _assert_same(step.metadata, anew)
    world.step(MIXED).check()
    step = world.step([(1, 40), (1, 9)], **padding)
    assert step.split is not first.split
    step.check()
    world.step([(1, 3), (1, 5), (1, 66)]).check()


def _assert_same(one: object, other: object) -> None:
    """Compare two objects' attributes, whatever they hold."""
    assert vars(one).keys() == vars(other).keys()
    for name, value in vars(one).items():
        expected = getattr(other, name)
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, expected), name
        elif isinstance(value, tuple) and value and hasattr(value[0], "__dict__"):
            assert len(value) == len(expected)
            for part, counterpart in zip(value, expected, strict=True):
                _assert_same(part, counterpart)
        elif isinstance(value, StockMetadata):
            assert value.common is expected.common
        else:
            assert value == expected, name


# ---------------------------------------------------------------------------------------------------
# vLLM's own FlashMLA calls under a plan


def test_a_stock_batch_gets_vllms_metadata():
    world = World(planner(device=WITH_FLASH_MLA, prefill_backend="flash_mla", decode_backend="flash_mla", topk=128))
    step = world.step([(1, 40), (1, 9)])
    assert [piece.path for piece in step.metadata.mqa] == [STOCK]
    step.check()
    (given,) = world.impl.calls
    assert given.common is step.common
    assert bool(world.impl.q_concat_buffer[:2].isfinite().all())


@LAYOUTS
@LATER
@pytest.mark.parametrize("dense", [False, True])
def test_vllms_call_attends_steps_and_prefills_at_once(layout: str, later: bool, dense: bool):
    """In two calls each result would be copied into the batch's."""
    asked = {"prefill_backend": "flash_mla", "decode_backend": "flash_mla", "mha_max_kv": 24}
    world = World(planner(layout, device=WITH_FLASH_MLA, topk=128, **asked), later)
    step = world.step([(1, 40), (1, 9), (30, 60), (5, 70), *([(6, 6)] if dense else [])])
    (piece,) = step.metadata.mqa
    assert (piece.plan.phase, piece.rows) == (Phase.EXTEND, slice(0, 37))
    step.check()
    (given,) = world.impl.calls
    assert given.req_id_per_token.tolist() == [0, 1, *[2] * 30, *[3] * 5]
    if not dense:
        assert given.common is step.common


def test_steps_with_a_kernel_of_the_plugin_are_attended_apart_from_vllms_prefills():
    asked = {"prefill_backend": "flash_mla", "decode_backend": "triton", "mha_max_kv": 24}
    step = World(planner("v32_fp8", device=WITH_FLASH_MLA, topk=128, **asked)).step([(1, 40), (30, 60)])
    assert [piece.rows for piece in step.metadata.mqa] == [slice(0, 1), slice(1, 31)]
    step.check()


@pytest.mark.regression(21)
@LATER
@pytest.mark.parametrize(("layout", "mixed"), [("bf16", None), ("v32_fp8", True)])
def test_vllms_calls_together_with_dense_attention(layout: str, mixed: bool | None, later: bool):
    asked = {"prefill_backend": "flash_mla", "decode_backend": "flash_mla", "mha_max_kv": 24}
    world = World(planner(layout, device=WITH_FLASH_MLA, topk=128, **asked), later)
    step = world.step(MIXED)
    assert step.metadata.tail is not None
    step.check()
    behind, *before = world.impl.calls
    assert [given.num_actual_tokens for given in (behind, *before)] == [35, 2]
    # The builder rewrote its buffer for the steps; entries behind them are unchanged.
    assert behind.req_id_per_token.tolist() == [0] * 30 + [1] * 5
    if mixed is not None:
        assert behind.mixed is mixed
    assert world.builder.num_heads == 4


@pytest.mark.regression(21)
@pytest.mark.regression(25)
def test_a_part_of_a_batch_is_a_batch():
    world = World(planner())
    step = world.step(MIXED)
    part = part_of(step.common, step.split, [3, 5])
    assert part.query_start_loc.tolist() == part.query_start_loc_cpu.tolist() == [0, 30, 35]
    assert (part.num_reqs, part.num_actual_tokens, part.max_query_len) == (2, 35, 30)
    assert part.seq_lens.tolist() == part.seq_lens_cpu_upper_bound.tolist() == [60, 70]
    rows = [*range(8, 38), *range(58, 63)]
    assert part.positions.tolist() == rows
    assert torch.equal(part.slot_mapping, step.common.slot_mapping[rows])
    assert torch.equal(part.block_table_tensor, step.table[[3, 5]])
    assert part.is_prefilling.shape == (2,)
    assert part._num_computed_tokens_cache is None
    assert part.causal


@pytest.mark.parametrize("flag", [None, False, True])
def test_the_plan_sets_the_variant_of_a_prefill_over_an_fp8_cache(flag: bool | None):
    """With 64 heads vLLM would separate steps and prefills; the plan's kernel is the one for mixed batches."""
    asked = {"prefill_backend": "flash_mla", "mha_max_kv": 24}
    world = World(planner("v32_fp8", device=WITH_FLASH_MLA, topk=128, **asked))
    world.builder.num_heads = 64
    if flag is not None:  # 0.30 on
        world.builder.fp8_use_mixed_batch = flag
    step = world.step([(30, 60), (1, 40)][::-1])
    (prefill,) = [piece for piece in step.metadata.mqa if piece.plan.phase is Phase.EXTEND]
    expected = {Attention.SPARSE_DECODE: True, Attention.SPARSE_PREFILL: False}
    assert prefill.stock.mixed is expected[prefill.plan.attention]
    assert world.builder.num_heads == 64
    assert getattr(world.builder, "fp8_use_mixed_batch", None) is flag
    step.check()


def test_the_deliberate_fault_changes_the_output():
    clean, faulty = (
        World(planner("v32_fp8", fault=fault)).step([(1, 60), (30, 60)]) for fault in ("none", "shift_indices")
    )
    clean.check()
    assert not torch.allclose(faulty.run().float(), faulty.expected(), atol=0.03, rtol=0.03)


# ---------------------------------------------------------------------------------------------------
# Classes


def test_rebased_moves_vllms_class_to_the_dense_base():
    moved = rebased(StockImpl, SparseBase, DenseBase)
    assert not issubclass(moved, SparseBase)
    assert issubclass(moved, DenseBase)
    assert moved.forward_mqa is StockImpl.forward_mqa
    assert not inspect.isabstract(moved)
    assert rebased(LaterImpl, SparseBase, DenseBase) is LaterImpl
    assert rebased(LaterImpl, None, DenseBase) is LaterImpl


def test_rebased_refuses_a_class_between():
    class Between(StockImpl):
        pass

    with pytest.raises(PatchError, match="does not derive from SparseBase directly"):
        rebased(Between, SparseBase, DenseBase)


def test_without_a_planner_everything_is_left_to_vllm():
    world = World(planner())
    step = world.step([(1, 40)])
    builder = make_builder(None)
    assert builder.reorder_batch_threshold == 128
    own = builder.build(0, step.common)
    assert isinstance(own, StockMetadata)
    out, _ = world.impl.forward_mqa(torch.ones(1, 4, 576).bfloat16(), world.kv_cache, own, world.layer)
    assert world.impl.calls == [own]
    assert out.shape == (1, 4, 512)


def test_a_layer_without_a_topk_buffer_is_refused():
    world = World(planner())
    arguments: dict[str, Any] = {name: 1 for name in ("kv_lora_rank", "v_head_dim", "qk_nope_head_dim")}
    with pytest.raises(PatchError, match="without a top-k buffer"):
        type(world.impl)(num_heads=4, head_size=576, scale=1.0, kv_cache_dtype="auto", kv_b_proj=None, **arguments)


def test_a_step_is_decided_and_traced_once_for_all_builders():
    world = World(planner())
    step = world.step(MIXED)
    again = world.builder.build(0, step.common)
    assert isinstance(again, PlannedMetadata)
    assert world.planner.split(step.common) is step.split
    assert sum(world.planner.trace.counts.values()) == 3  # steps, dense, sparse


def test_a_batch_is_laid_out_without_torchs_threads(monkeypatch: pytest.MonkeyPatch):
    """On a host `torch.repeat_interleave` wakes and waits for all of torch's threads, even for two requests."""
    world = World(planner("v32_fp8"))
    batches = [world.step(lengths).common for lengths in (MIXED, [(1, 50), (1, 8)])]

    def woken(*_: Any, **__: Any) -> None:
        raise AssertionError("torch's threads were woken for a batch's metadata")

    monkeypatch.setattr(torch, "repeat_interleave", woken)
    for common in batches:
        assert isinstance(world.builder.build(0, common), PlannedMetadata)
