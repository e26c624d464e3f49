"""vLLM's own offline tests of DeepSeek sparse attention, passed by the plugin's classes on a GPU.

The cases, the reference and the comparison are vLLM's (`tests/v1/attention` and `tests/kernels` of its source
distribution, which TESTS_OF_VLLM names); see `vllm_own` for how the plugin comes into them, and for the tolerance,
which is stricter than vLLM's. Each test also asserts what was planned and what ran, so that none passes on the stock
path.

Not here, because the plugin leaves it to vLLM: FlashInfer's and TRTLLM's sparse backends, the conversion of positions
to slots inside vLLM's FlashMLA calls, DeepGEMM's logits, and the top-k of decode batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_own
from vllm_own import Own, Plugged

from nsa_plugin.decision.shapes import Phase

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# vLLM's batches of its test of sparse backends, and of its test of dense ones those that are all decode rows.
PREFILLS = ("small_prefill", "medium_prefill", "single_prefill", "large_q_prefill", "large_q_pure_prefill")
MIXED = ("mixed_small", "mixed_medium")
DECODES = ("small_decode", "medium_decode", "large_decode", "single_decode")
VERIFIES = {"spec_decode_small": 3, "spec_decode_medium": 7}
# Of the test of dense backends, those in which no request is longer than the 2048 tokens that are selected.
DENSE = ("small_prefill", "medium_prefill", "single_prefill", "mixed_small", "mixed_medium")
# One row of wrong tokens may come near to what is right.
SEVERAL_ROWS = [batch for batch in DECODES if batch != "single_decode"]
RANKS = (1, 2, 4)
SCALES = ((1.0, 1.0), (2.0, 3.0))

# (--kv-cache-dtype, setting prefill_backend or decode_backend, the library).
PREFILL_ROUTES = [
    ("auto", "flash_mla"),
    ("auto", "triton"),
    *(("fp8_ds_mla", name) for name in ("cuda", "flash_mla", "triton")),
]
DECODE_ROUTES = [("auto", "fa3"), *PREFILL_ROUTES]
CACHES = ("auto", "fp8_ds_mla")

Plug = Callable[..., Plugged]


@pytest.fixture(scope="module")
def own() -> Own:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the routes that are expected are those of SM90")
    return vllm_own.load()


@pytest.fixture(scope="module")
def _group(own: Own, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The group of one rank that vLLM's linear layers ask for."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel

    store = tmp_path_factory.mktemp("group") / "store"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        initialize_model_parallel(1, 1)
        yield
    cleanup_dist_env_and_memory()


@pytest.fixture
def plug(monkeypatch: pytest.MonkeyPatch, own: Own, _group: None, tmp_path: Path) -> Iterator[Plug]:
    from vllm.platforms import current_platform
    from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager

    plugged: list[Plugged] = []

    def put_in(**given: Any) -> Plugged:
        plugged.append(vllm_own.plug(monkeypatch, own, tmp_path, **given))
        return plugged[-1]

    init_workspace_manager(torch.device(current_platform.device_type))
    yield put_in
    reset_workspace_manager()
    for one in plugged:
        one.stop()


@pytest.fixture
def attend(own: Own, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return functools.partial(vllm_own.attend, own, monkeypatch)


@pytest.fixture
def attend_all(own: Own, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    return functools.partial(vllm_own.attend_all, own, monkeypatch, tmp_path)


def phases(batch: str) -> set[Phase]:
    """Of the parts of one of vLLM's batches."""
    if batch in DECODES:
        return {Phase.DECODE}
    return {Phase.DECODE, Phase.EXTEND} if batch in MIXED else {Phase.EXTEND}


def test_every_case_of_vllm_is_here(own):
    """Whatever its tests are parametrised with runs here, or is of another backend, cache or page size."""
    given = own.parameters(own.sparse.test_sparse_backend_decode_correctness)
    assert set(given["batch_name"]) == {*PREFILLS, *MIXED}
    assert given["tensor_parallel_size"] == [*RANKS]
    assert set(given["kv_cache_dtype"]) == {*CACHES, "fp8"}
    assert vllm_own.PAGE_SIZE in given["block_size"]
    dense = set(own.parameters(own.mla.test_backend_correctness)["batch_spec_name"])
    assert dense == {*DENSE, *DECODES, *VERIFIES, "large_prefill"}
    topk = own.parameters(own.topk.test_top_k_per_row)
    assert (topk["num_rows"], topk["top_k"]) == ([1, 32, 2050], [2048, 3000])


# --- Sparse attention: vLLM's own cases, by whichever library the plugin takes.


@pytest.mark.parametrize("scales", SCALES, ids=["unscaled", "scaled"])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("batch", [*PREFILLS, *MIXED])
def test_sparse_attention(plug, attend, batch, cache, ranks, scales):
    # vLLM's test selects half of what the model would: where the plugin attends densely, that is not looked at.
    seen = plug(mha_max_kv=0)
    attend(batch, cache, ranks, scales)
    seen.check(phases(batch))


# --- The same, by each library that a user may name.


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("cache", "library"), PREFILL_ROUTES)
@pytest.mark.parametrize("batch", PREFILLS)
def test_prefill_by(plug, attend, batch, cache, library, ranks):
    seen = plug(mha_max_kv=0, prefill_backend=library)
    attend(batch, cache, ranks)
    seen.check({Phase.EXTEND}, library)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("cache", "library"), DECODE_ROUTES)
@pytest.mark.parametrize("batch", DECODES)
def test_decode_by(plug, attend, batch, cache, library, ranks):
    seen = plug(mha_max_kv=0, decode_backend=library)
    attend(batch, cache, ranks)
    seen.check({Phase.DECODE}, library)


@pytest.mark.parametrize(("cache", "library"), DECODE_ROUTES)
@pytest.mark.parametrize("batch", VERIFIES)
def test_verify_by(plug, attend, batch, cache, library):
    seen = plug(mha_max_kv=0, decode_backend=library, drafts=VERIFIES[batch])
    attend(batch, cache, 1)
    seen.check({Phase.TARGET_VERIFY}, library)


@pytest.mark.parametrize(("cache", "prefill", "decode"), [("auto", "triton", "fa3"), ("fp8_ds_mla", "cuda", "triton")])
@pytest.mark.parametrize("batch", MIXED)
def test_decode_and_prefill_by_two_libraries(plug, attend, batch, cache, prefill, decode):
    seen = plug(mha_max_kv=0, prefill_backend=prefill, decode_backend=decode)
    attend(batch, cache, 1)
    seen.check(phases(batch))
    assert {plan.provider for plan in seen.plans} == {prefill, decode}


# --- Dense attention of short contexts, by vLLM's test of its dense backends.


@pytest.mark.parametrize("ranks", [1, 4, 8, 16])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("batch", DENSE)
def test_dense_attention(plug, attend_all, batch, cache, ranks):
    seen = plug()
    attend_all(batch, cache, ranks)
    seen.check(phases(batch), rows_dense=True)


# --- The indexer.


def test_chunks_of_the_indexers_logits(plug, own):
    """vLLM's cases, the bound of the logits from the plugin's planner rather than from vLLM's constant."""
    from vllm.v1.attention.backends.mla import indexer

    seen = plug(mha_max_kv=0)
    own.sparse.create_vllm_config(max_model_len=4096)
    seen.start()
    planner = seen.planner
    for seq_lens, query_lens, workspace, bound, expected in own.parameters(
        own.sparse.test_split_indexer_prefill_chunks
    )["seq_lens,query_lens,workspace_size,max_logits_bytes,expected"]:
        batch = own.utils.BatchSpec(seq_lens.tolist(), query_lens.tolist())
        planner.step_tokens = 0  # none of these requests is a step, though some have one row
        planner.split(own.utils.create_common_attn_metadata(batch, vllm_own.PAGE_SIZE, torch.device("cpu")))
        planner.device = replace(planner.device, memory_free=4 * bound)
        found = indexer.split_indexer_prefill_chunks(seq_lens, query_lens, workspace, 1 << 40)
        assert found == expected


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("topk", [2048, 3000])
@pytest.mark.parametrize("rows", [1, 32, 2050])
def test_topk_of_a_prefill(plug, own, monkeypatch, rows, topk, clean):
    seen = plug()
    own.sparse.create_vllm_config(max_model_len=4096)
    seen.start()
    vllm_own.select(own, monkeypatch, rows, topk, clean)
    assert [shape[0] for shape in seen.own_topk] == [rows]


def test_a_compressed_cache_keeps_vllms_slots(plug, own, monkeypatch):
    """vLLM's test of DeepSeek-V4's indexer, whose batches the plugin's builder leaves as they are."""
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend

    seen = plug()
    builders = []
    make = own.slots.create_vllm_config

    def started(**kwargs: Any) -> Any:
        config = make(**kwargs)
        seen.start()
        return config

    def builder(**kwargs: Any) -> Any:
        builders.append(DeepseekV32IndexerBackend.get_builder_cls())
        return builders[-1](**kwargs)

    monkeypatch.setattr(own.slots, "create_vllm_config", started)
    monkeypatch.setattr(own.slots, "DeepseekV32IndexerMetadataBuilder", builder)
    own.slots.test_indexer_builder_deepseek_v4_compressed_slot_mapping_uses_storage_block_size()
    assert [cls.__name__ for cls in builders] == ["PlannedDeepseekV32IndexerMetadataBuilder"]


# --- What shows that the tests above would notice wrong tokens.


@pytest.mark.parametrize(("cache", "library"), PREFILL_ROUTES)
@pytest.mark.parametrize("batch", PREFILLS)
def test_wrong_tokens_of_a_prefill_are_noticed(plug, attend, batch, cache, library):
    seen = plug(mha_max_kv=0, prefill_backend=library, fault="shift_indices")
    with pytest.raises(AssertionError, match="not close"):
        attend(batch, cache, 1)
    seen.check({Phase.EXTEND}, library)


@pytest.mark.parametrize(("cache", "library"), DECODE_ROUTES)
@pytest.mark.parametrize("batch", SEVERAL_ROWS)
def test_wrong_tokens_of_a_decode_are_noticed(plug, attend, batch, cache, library):
    seen = plug(mha_max_kv=0, decode_backend=library, fault="shift_indices")
    with pytest.raises(AssertionError, match="not close"):
        attend(batch, cache, 1)
    seen.check({Phase.DECODE}, library)


@pytest.mark.parametrize(("cache", "library"), [route for route in DECODE_ROUTES if route[1] != "flash_mla"])
@pytest.mark.parametrize("batch", SEVERAL_ROWS)
def test_other_tokens_of_the_same_requests_are_noticed(plug, attend, monkeypatch, batch, cache, library):
    seen = plug(mha_max_kv=0, decode_backend=library)
    vllm_own.shift_positions(monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        attend(batch, cache, 1)
    seen.check({Phase.DECODE}, library)


@pytest.mark.parametrize("batch", DENSE)
def test_wrong_contexts_of_dense_attention_are_noticed(plug, attend_all, monkeypatch, batch):
    seen = plug()
    vllm_own.shift_contexts(monkeypatch)
    with pytest.raises(pytest.fail.Exception, match="differs from SDPA"):
        attend_all(batch, "auto", 1)
    seen.check(phases(batch), rows_dense=True)
