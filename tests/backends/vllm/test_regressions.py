"""Failures reported by users of the engines that the plugin's vLLM adapter could bring back.

docs/regressions.md has the whole list, with tests in other files and the reasons for missing ones.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_plugin.backends.common.paths import BF16_ROWS, DECODE_KERNEL, PROVIDER, VLLM, path_of
from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.common.v4 import RATIOS
from nsa_plugin.backends.vllm.startup.model import check_on_cpu
from nsa_plugin.backends.vllm.v4.routes import VllmV4Planner
from nsa_plugin.backends.vllm.v4.routes import path as v4_path
from nsa_plugin.backends.vllm.v32.indexer import ATTRIBUTE, StepSelection, planned_indexer_builder, wrap_indexer
from nsa_plugin.backends.vllm.v32.metadata import PlannedMetadata
from nsa_plugin.backends.vllm.v32.routes import VllmPlanner
from nsa_plugin.decision import timings
from nsa_plugin.decision.plan import Attention, IndexerMode
from nsa_plugin.decision.routes import BF16_COPY, FLASH_MLA_DECODE
from nsa_plugin.decision.shapes import Phase
from nsa_plugin.errors import LeftToStockError
from nsa_plugin.kernels.kv_cache import allocate_cache, open_cache, reference_write
from nsa_plugin.libraries.capabilities import Op
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.settings import Settings
from tests.backends.counted import Counted
from tests.backends.fake_vllm import v4 as fake_v4
from tests.backends.fake_vllm.config import config
from tests.backends.fake_vllm.indexer import (
    MIXED,
    PAGE,
    TOPK,
    IndexerMetadata,
    StockIndexerBuilder,
    a_call,
    small_budget,
    split_indexer_prefill_chunks,
    stock_indexer,
)
from tests.backends.fake_vllm.v4_cases import DECODES, DIRECTLY, OVER_ROWS, close
from tests.backends.fake_vllm.v4_indexer import builder_of as v4_builder_of
from tests.backends.fake_vllm.v4_indexer import common
from tests.backends.fake_vllm.v4_indexer import small_budget as small_v4_budget
from tests.backends.fake_vllm.v32 import (
    MAX_LEN,
    TRITON,
    WITH_FLASH_MLA,
    CommonAttentionMetadata,
    World,
    make_builder,
    model,
    planner,
)

LAYOUTS = pytest.mark.parametrize("layout", ["bf16", "v32_fp8"])
SELECTS = (Attention.SPARSE_PREFILL, Attention.SPARSE_DECODE)


class IndexerBuilder(StockIndexerBuilder):
    """DeepseekV32IndexerMetadataBuilder of 0.30 on, which cuts what it takes for prefills into chunks."""

    _split_indexer_prefill_chunks = staticmethod(split_indexer_prefill_chunks)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> IndexerMetadata:
        batch = common_attn_metadata
        lens = batch.query_start_loc_cpu.diff()
        steps = (lens <= self.threshold) & (lens == lens[0])
        padded = bool(((lens == lens[0]) | (lens == 0)).all()) and int(lens[0]) <= self.threshold
        first = len(lens) if padded or bool(steps.all()) else steps.tolist().index(False)
        rows = batch.num_actual_tokens if first == len(lens) else int(lens[:first].sum())
        bound = batch.seq_lens_cpu_upper_bound[first:]
        chunks = self._split_indexer_prefill_chunks(bound, lens[first:], 150, 1 << 29, request_offset=first)
        return IndexerMetadata(first, rows, len(lens) - first, decode="vLLM's", prefill=chunks)


def rows_of(rows: slice | torch.Tensor) -> list[int]:
    return list(range(rows.start, rows.stop)) if isinstance(rows, slice) else rows.tolist()


def selected_rows(metadata: Any, starts: list[int]) -> list[int]:
    """The rows that vLLM's indexer selects for with this metadata, and that the plugin does."""
    steps: StepSelection | None = getattr(metadata, ATTRIBUTE, None)
    found = list(range(metadata.num_decode_tokens if steps is None else steps.rows))
    for requests, rows in metadata.prefill:
        found += rows_of(slice(starts[requests.start] + rows.start, starts[requests.start] + rows.stop))
    return found


# ---------------------------------------------------------------------------------------------------
# What selects and what attends


@pytest.mark.regression(1)
@LAYOUTS
@pytest.mark.parametrize("next_n", [1, 3])
def test_a_step_always_selects_and_is_never_dense(layout: str, next_n: int):
    """sglang #12816: inside a graph the selection was skipped. That a prefill would be dense is no reason to."""
    world = World(planner(layout, device=TRITON, step_tokens=next_n))
    for lengths, padding in ([(next_n, next_n)], 0), ([(next_n, 5), (next_n, next_n)], 2), ([(next_n, 90)] * 4, 0):
        step = world.step(lengths, padded_rows=padding * next_n, padded_requests=padding)
        rows = (len(lengths) + padding) * next_n
        plan = step.split.steps
        assert plan is not None
        assert plan.phase is (Phase.DECODE if next_n == 1 else Phase.TARGET_VERIFY)
        assert plan.attention in SELECTS
        assert plan.indexer.mode is IndexerMode.TOPK
        assert step.metadata.num_decode_tokens == rows
        assert (step.metadata.prefill, step.metadata.mha, step.metadata.tail) == (None, (), None)
        for deciding in (world.planner, small_budget(next_n, rows=1)):
            indexer = planned_indexer_builder(IndexerBuilder, lambda deciding=deciding: deciding)()
            assert selected_rows(indexer.build(0, step.common), step.starts) == list(range(rows))


@pytest.mark.regression(10)
@settings(deadline=None, max_examples=150)
@given(
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 90)), max_size=4),
    prefills=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 50)), max_size=6),
    attention_first=st.booleans(),
    tight=st.booleans(),
    threshold=st.sampled_from([0, 1, 2]),
)
def test_exactly_the_sparse_query_tokens_have_a_selection(
    steps: list[tuple[int, int]], prefills: list[tuple[int, int]], attention_first: bool, tight: bool, threshold: int
):
    """vllm #52512: the metadata said dense and the selection was skipped, and the layer attended to stale indices.

    Either builder may come first, each with a copy of the batch, and vLLM's indexer may put the border between steps
    and prefills anywhere.
    """
    lengths = [(rows, rows + prefix) for rows, prefix in (*steps, *prefills)]
    batch = common([length for length in lengths if length[1]] or [(1, 1)])
    starts = batch.query_start_loc_cpu.tolist()
    deciding = small_budget(2) if tight else planner(step_tokens=2, device=TRITON)

    class Stock(IndexerBuilder): ...

    Stock.threshold = threshold
    indexer_builder = planned_indexer_builder(Stock, lambda: deciding)()
    attention: PlannedMetadata | None = None
    if attention_first:
        attention = make_builder(deciding).build(0, replace(batch))
    # Another group of caches has a separate block table.
    indexer = indexer_builder.build(0, replace(batch, block_table_tensor=batch.block_table_tensor + 1))
    if attention is None:
        attention = make_builder(deciding).build(0, replace(batch))
    pieces = [*attention.mqa, *([] if attention.tail is None else [attention.tail])]
    sparse = [row for piece in pieces for row in rows_of(piece.rows)]
    dense = [row for piece in attention.mha for row in rows_of(piece.rows)]
    assert sorted(selected_rows(indexer, starts)) == sorted(sparse)
    assert sorted(sparse + dense) == list(range(starts[-1])), "every row is attended once"
    assert all(piece.plan.indexer.mode is IndexerMode.TOPK for piece in pieces)
    assert all(piece.plan.attention is Attention.MHA_ONE_SHOT for piece in attention.mha)


# ---------------------------------------------------------------------------------------------------
# Captured batches


@pytest.mark.regression(11)
@pytest.mark.regression(19)
@pytest.mark.parametrize("provider", ["triton", "reference"])
@pytest.mark.parametrize("next_n", [1, 3])
@pytest.mark.parametrize("family", ["v32", "v4"])
def test_lengths_of_zero_in_a_capture(family: str, next_n: int, provider: str):
    """vllm #51970: vLLM captures with lengths of zero for requests that have rows; what is behind a length was read."""
    deciding: VllmPlanner = small_budget(next_n) if family == "v32" else small_v4_budget(next_n)
    batch = common([(next_n, 9)] * 5)
    batch.seq_lens.zero_()
    if family == "v32":
        metadata = planned_indexer_builder(StockIndexerBuilder, lambda: deciding)().build(0, batch)
    else:
        assert isinstance(deciding, VllmV4Planner)
        metadata = v4_builder_of(deciding).build(0, batch)
    steps: StepSelection = getattr(metadata, ATTRIBUTE)
    plan = replace(steps.plan, indexer=replace(steps.plan.indexer, provider=provider, metadata_provider=""))
    setattr(metadata, ATTRIBUTE, replace(steps, plan=plan))
    call = a_call(5 * next_n)
    call.cache.data.fill_(0x7F)  # every code and scale is NaN
    pages = call.cache.data.view(160, PAGE, -1)
    sm = 90 if provider == "triton" else 0
    ours = wrap_indexer(stock_indexer, lambda: {"indexer": metadata}, lambda: Providers("bf16", sm))
    ours(torch.empty(steps.rows, 1), "indexer", pages, call.q, call.weights, TOPK, MAX_LEN, call.buffer)
    assert bool((call.buffer[: steps.rows] == -1).all())
    assert bool((call.buffer[steps.rows :] == 9).all())


@pytest.mark.regression(3, "attention reads no lengths")
@pytest.mark.regression(11)
def test_no_length_reaches_attention_over_a_selection():
    """vllm #51970, sglang #13236: neither zeros in a capture nor wrong lengths of draft rows."""
    for lengths, next_n in (([(3, 50), (3, 8)], 3), ([(1, 40), (6, 60), (5, 70), (4, 9)], 1)):
        step = World(planner("v32_fp8", device=TRITON, step_tokens=next_n)).step(lengths)
        right = step.run()
        for wrong in (0, -7, 1 << 30):
            step.common.seq_lens.fill_(wrong)
            step.metadata.seq_lens.fill_(wrong)
            assert torch.equal(step.run(), right)


STALE = {
    "zeros": torch.zeros(24),
    "a whole row": torch.arange(24),
    "outside": torch.full((24,), MAX_LEN * 8),
    "garbage": torch.randint(-(2**31), 2**31 - 1, (24,), generator=torch.Generator().manual_seed(0)),
}


@pytest.mark.regression(26)
@pytest.mark.parametrize("library", ["triton", "reference"])
@pytest.mark.parametrize("stale", STALE)
@LAYOUTS
def test_values_in_padding_do_not_reach_the_output(layout: str, stale: str, library: str):
    """Padding of a graph's batch, or of the ranks' (sglang #13646), with any values left by the indexer."""
    asked = {"prefill_backend": library, "decode_backend": library}
    step = World(planner(layout, device=TRITON, **asked)).step([(1, 50), (1, 8)], padded_rows=3, padded_requests=3)
    step.check()
    alone = step.run()[:2].clone()
    step.world.buffer[2:5] = STALE[stale].int()
    padded = step.run()
    assert torch.equal(padded[:2], alone)
    assert not bool(padded[2:].any())


@pytest.mark.regression(13)
@pytest.mark.parametrize("library", ["triton", "reference"])
def test_prefills_between_replays_do_not_overwrite_a_graphs_inputs(library: str):
    """vllm #56771: an eager prefill wrote where a captured decode step reads.

    A graph keeps addresses and no Python objects. So the test runs the metadata of the capture again, after a prefill
    with other owners, chunks and selections, and after making the replay's metadata.
    """
    asked = {"prefill_backend": library, "decode_backend": library}
    world = World(planner("v32_fp8", device=TRITON, **asked))
    capture = world.step([(1, 1)] * 6)
    capture.run()
    prefill = world.step([(1, 70), (9, 60), (6, 6), (4, 96)])
    prefill.check()
    replay = world.step([(1, 50), (1, 90), (1, 30), (1, 24)], padded_rows=2, padded_requests=2)
    capture.common.block_table_tensor.copy_(replay.common.block_table_tensor)  # vLLM's buffer, which stays
    (piece,) = capture.metadata.mqa
    assert piece.request_of_row.tolist() == [0, 1, 2, 3, -1, -1]
    wanted = replay.expected()
    replay.metadata = capture.metadata
    torch.testing.assert_close(replay.run().float(), wanted, atol=0.03, rtol=0.03)


# ---------------------------------------------------------------------------------------------------
# Batches


@pytest.mark.regression(9, "DeepSeek-V4")
@pytest.mark.parametrize("execution", [DIRECTLY, DECODES, OVER_ROWS])
@pytest.mark.parametrize("ratio", RATIOS)
def test_requests_without_query_tokens_among_v4_prefills(ratio: int, execution: dict[str, Any]):
    """vllm #51486: a prefill whose tokens all came with the KV transfer."""
    deciding = fake_v4.planner(**execution)
    if execution is DIRECTLY:  # a CPU has no FlashMLA for the steps
        deciding.step_execution_of = fake_v4.planner().step_execution_of  # type: ignore[method-assign]
    world = fake_v4.World(deciding, [(1, 300), (9, 9), (0, 140), (20, 400), (0, 12)])
    found, wanted, _ = world.run(ratio)
    assert len(found) == 30
    assert close(found, wanted)


@pytest.mark.regression(9)
@LAYOUTS
def test_a_batch_of_requests_without_query_tokens_attends_nothing(layout: str):
    """vllm #51486: without a row there is neither a piece, nor a selection, nor a plan."""
    counted = Counted()
    deciding = planner(layout)
    deciding.metrics = counted  # type: ignore[assignment]
    step = World(deciding).step([(0, 20), (0, 70)])
    assert (step.metadata.mqa, step.metadata.mha, step.metadata.tail) == ((), (), None)
    assert step.run().shape[0] == 0
    assert counted == []
    indexer = planned_indexer_builder(IndexerBuilder, lambda: deciding)()
    assert selected_rows(indexer.build(0, step.common), step.starts) == []


@pytest.mark.regression(9, "between steps")
@pytest.mark.parametrize("each", [1, 2, 3])
@pytest.mark.parametrize("family", ["v32", "v4"])
def test_a_request_without_query_tokens_between_steps_moves_no_selection(family: str, each: int):
    """vllm #51486: as many rows as requests times some number, and yet not that number of each."""
    lengths = [(each, 40), (0, 20), (each, 9), (0, 30), (0, 31), (each, 70), (each, 90), (0, 5)]
    batch = common(lengths)
    if family == "v32":
        metadata = planned_indexer_builder(StockIndexerBuilder, lambda: small_budget(each, rows=2))().build(0, batch)
    else:
        metadata = v4_builder_of(small_v4_budget(each, rows=2)).build(0, batch)
    steps: StepSelection = getattr(metadata, ATTRIBUTE)
    ratio = 1 if family == "v32" else 4
    live = [place for place, (rows, _) in enumerate(lengths) if rows]
    assert steps.rows == len(live) * each
    seen = [(lengths[place][1] - each + row + 1) // ratio for place in live for row in range(each)]
    assert steps.lengths.tolist() == seen
    owners = [place for place in live for _ in range(each)]
    assert torch.equal(steps.page_table, batch.block_table_tensor[owners])


CPU_PROGRAM = """
from types import SimpleNamespace
import torch
from nsa_plugin.backends.vllm.cpu import indexer as cpu_indexer
from nsa_plugin.backends.vllm.cpu.backend import CpuSparseMLAMetadataBuilder as Builder
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.kernels.kv_cache import allocate_cache
from nsa_plugin.settings import ResolvedSettings, Settings
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.telemetry import Trace

torch.repeat_interleave = None  # on a host it wakes every thread that torch has, for a few rows
cache = allocate_cache("indexer_fp8", 128, 8)
layer = "model.layers.0.self_attn"
for starts, kv_lens, num_decodes in ([0, 1, 1], [40, 20], 2), ([0, 0, 1, 31, 31], [40, 20, 60, 5], 2):
    rows, settings = starts[-1], Settings()
    serving = SimpleNamespace(
        model=ModelShape(num_heads=4, kv_layout="bf16", index_topk=24, index_n_heads=4), device=synthetic(0),
        resolved=ResolvedSettings(settings, {}), request_ids=tuple, trace=Trace(), metrics=None,
    )
    groups = Builder._groups(SimpleNamespace(serving=serving), starts, kv_lens, num_decodes, len(kv_lens))
    owners = {row: owner for group in groups for row, owner in zip(group.rows.tolist(), group.request_of_row.tolist())}
    assert owners == {
        row: owner for owner in range(len(kv_lens)) for row in range(starts[owner], starts[owner + 1])
    }
    table = torch.arange(128, dtype=torch.int32).view(4, 32)
    stored = cpu_indexer.CpuIndexerMetadata(torch.full((rows,), -1), table)
    context = SimpleNamespace(
        attn_metadata={
            f"{layer}.indexer.k_cache": stored, f"{layer}.attn": SimpleNamespace(groups=groups, settings=settings)
        },
        no_compile_layers={f"{layer}.indexer.k_cache": SimpleNamespace(kv_cache=cache.data.view(128, 8, -1))},
    )
    cpu_indexer.get_forward_context = lambda: context
    buffer = torch.full((rows + 2, 24), 9, dtype=torch.int32)
    q, k = torch.ones(rows, 4, 128).to(torch.float8_e4m3fn), torch.ones(rows, 128)
    cpu_indexer.sparse_attn_indexer(q, k, torch.ones(rows, 4), buffer, f"{layer}.indexer.k_cache")
    seen = [kv - q + place + 1 for q, kv in zip(torch.tensor(starts).diff().tolist(), kv_lens) for place in range(q)]
    assert (buffer[:rows] >= 0).sum(1).tolist() == [min(24, keys) for keys in seen]
    assert bool((buffer[rows:] == 9).all())
print("all held")
"""


@pytest.mark.regression(9, "CPU")
@pytest.mark.engine_vllm
def test_requests_without_query_tokens_on_a_cpu():
    """vllm #51486, in a separate process that imports vLLM."""
    if find_spec("vllm") is None:
        pytest.skip("vllm is not installed here")
    done = subprocess.run([sys.executable, "-c", CPU_PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip().endswith("all held"), done.stderr[-3000:]


@pytest.mark.regression(16, "DeepSeek-V4")
@pytest.mark.parametrize("since_24", [True, False])
@pytest.mark.parametrize("execution", [DIRECTLY, DECODES])
@pytest.mark.parametrize("ratio", RATIOS)
def test_each_prefill_of_a_v4_batch_reads_only_its_keys(ratio: int, execution: dict[str, Any], since_24: bool):
    """vllm #41834: the second request of a batch attended to what had been selected for the first."""
    world = fake_v4.World(fake_v4.planner(**execution), [(9, 600), (9, 600), (130, 600), (2, 2)], since_24=since_24)
    found, wanted, _ = world.run(ratio)
    assert close(found, wanted)


@pytest.mark.regression(15)
@pytest.mark.parametrize("library", ["triton", "reference"])
@pytest.mark.parametrize("op", ["sparse_mla_prefill", "sparse_mla_decode"])
def test_tokens_of_a_page_beyond_2_to_the_31_bytes_are_attended(op: str, library: str):
    """vllm #41834: the number of a block times the bytes of a block, in 32 bits."""
    page_bytes = 64 * 656
    pages = 2**31 // page_bytes + 3
    # Untouched memory: only the page that is written becomes resident.
    far = open_cache(torch.empty(pages, page_bytes, dtype=torch.uint8), "v32_fp8", 64)
    near = allocate_cache("v32_fp8", 1, 64)
    random = torch.Generator().manual_seed(0)
    values, q = torch.randn(64, 576, generator=random), torch.randn(3, 4, 576, generator=random).bfloat16()
    selected = torch.stack([torch.randperm(64, generator=random)[:32] for _ in range(3)]).int()
    providers = Providers("v32_fp8", 90, helpers=library)
    kernel, found = providers.load(op, library), []
    for cache, page in (far, pages - 1), (near, 0):
        reference_write(cache, values[:, :512], page * 64 + torch.arange(64), rope=values[:, 512:])
        owners = torch.zeros(3, dtype=torch.int32)
        transform = providers.helper("index_transform_paged")
        slots = transform(selected, torch.tensor([[page]]).int(), page_size=64, row_to_request=owners)
        steps = op == "sparse_mla_decode"
        given_q, given_slots = (q.unsqueeze(1), slots.unsqueeze(1)) if steps else (q, slots)
        found.append(kernel(given_q, cache, given_slots, scale=0.1, d_v=512).out)
    assert torch.equal(*found)
    assert float(found[0].abs().max()) > 0.1


@pytest.mark.regression(6, "DeepSeek-V4")
@pytest.mark.parametrize(("rows", "path"), [(11622, DECODE_KERNEL), (11623, BF16_ROWS)])
def test_more_v4_query_tokens_than_flash_mla_schedules_are_attended_over_bf16_rows(
    rows: int, path: str, monkeypatch: pytest.MonkeyPatch
):
    """sglang #25502: 11623 query tokens needed more shared memory than the scheduling kernel has.

    For V3.2 vLLM passes the query tokens of a prefill to that kernel as one sequence.
    """
    device = synthetic(90, versions={"flash_mla": ("vllm", "0.32.0")})
    planner = fake_v4.planner(device, prefill_backend="flash_mla")
    # Times that put the decode kernel first, so that only its limit keeps a batch from it.
    model = planner.model
    times = {str(FLASH_MLA_DECODE): {model.num_heads: ((1, 1.0),)}, str(BF16_COPY): {model.num_heads: ((1, 9e9),)}}
    monkeypatch.setattr(timings, "TIMINGS", {(90, "sparse_mla_prefill", model.kv_layout): times})
    monkeypatch.setattr(timings, "SELECTIONS", {model.kv_layout: (model.index_topk, model.sliding_window)})
    assert v4_path(planner.prefill_plan(rows, 60000)) == path


@pytest.mark.regression(18)
@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
@LAYOUTS
def test_every_split_of_the_heads_has_its_routes(tp: int, layout: str):
    """vllm #48047: ranks of fewer heads than a kernel takes ended in a ValueError of the first batch."""
    shape = replace(model(layout, 128, 2048), attn_tp_size=tp)
    for library in ("auto", "flash_mla", "triton"):
        asked = Settings(prefill_backend=library, decode_backend=library)
        deciding = VllmPlanner(model=shape, device=synthetic(90), settings=asked, max_model_len=163840, step_tokens=3)
        for rows in (1, 100, 4096):
            plans = [deciding.prefill_plan(rows, 9000), deciding.step_plan(rows, rows, 1)]
            for plan in [*plans, deciding.step_plan(rows, 3 * rows, 3)]:
                assert plan.attention in SELECTS
                heads = max(plan.head_padding, 128 // tp)
                if path_of(VLLM, layout, plan).path == PROVIDER:
                    assert plan.head_padding == 0
                else:
                    assert heads in (64, 128)
                op = Op.SPARSE_MLA_PREFILL if plan.attention is Attention.SPARSE_PREFILL else Op.SPARSE_MLA_DECODE
                assert deciding.device.has(plan.provider, op)


@pytest.mark.regression(25)
def test_lengths_that_belong_to_other_rows_do_not_reach_vllms_flash_mla():
    """Thread of sglang #13646: rows and lengths of two batches. A part's call of vLLM's has those of the part alone."""
    asked = {"prefill_backend": "flash_mla", "decode_backend": "flash_mla", "mha_max_kv": 24}
    world = World(planner(device=WITH_FLASH_MLA, topk=128, **asked))
    step = world.step(MIXED)
    step.check()
    assert len(world.impl.calls) == 2
    for call in world.impl.calls:
        part: CommonAttentionMetadata = call.common
        assert int(part.query_start_loc[-1]) == part.num_actual_tokens == len(part.slot_mapping)
        assert len(part.seq_lens) == len(part.block_table_tensor) == part.num_reqs == len(part.query_start_loc) - 1
        assert int(part.seq_lens.max()) <= part.max_seq_len


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"speculative_config": SimpleNamespace(num_speculative_tokens=1)}, "--speculative-config on a CPU"),
        ({"parallel_config": SimpleNamespace(decode_context_parallel_size=2)}, "--decode-context-parallel-size 2"),
        ({"parallel_config": SimpleNamespace(prefill_context_parallel_size=2)}, "--prefill-context-parallel-size 2"),
    ],
)
def test_a_cpu_refuses_unsupported_cache_rows(change: dict[str, Any], words: str):
    """Its attention knows steps of one row and prefills, and ranks that have every token."""
    check_on_cpu(config("auto"))
    with pytest.raises(LeftToStockError, match=words):
        check_on_cpu(config("auto", **change))
