"""The portable path's changes on SGLang's own objects: the ledger installs them, SGLang's code calls them.

A GPU is taken out, and so is DeepGEMM: a stand-in for its module ends a test that reaches it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version
from sglang_case import STUBS, needs_engine

pytestmark = [pytest.mark.engine_sglang, pytest.mark.timeout(600), needs_engine()]
BACKEND = "sglang.srt.layers.attention.dsa_backend"
INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer"
SM_COUNT, TOPK, HEADS, LENGTHS = 108, 16, 4, [1, 64, 40, 130]


@pytest.fixture
def serves(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The portable entries are installed, and the plugin serves on an SM86 GPU; the names of the applied entries."""
    import torch

    from nsa_plugin.backends.common.providers import Providers
    from nsa_plugin.backends.sglang.v32 import patches
    from nsa_plugin.libraries.devices import synthetic
    from nsa_plugin.patches import sglang as data
    from nsa_plugin.patches.ledger import Ledger, Need

    monkeypatch.syspath_prepend(str(STUBS))
    for name in (BACKEND, INDEXER):
        # SGLang imports DeepGEMM here, before 0.5.22, only where there is a GPU.
        monkeypatch.setattr(importlib.import_module(name), "deep_gemm", ModuleType("deep_gemm"), raising=False)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda *device: SimpleNamespace(multi_processor_count=SM_COUNT)
    )
    serving = SimpleNamespace(device=synthetic(86), providers=Providers("v32_fp8", 86, helpers="triton"), active=True)
    monkeypatch.setattr(patches, "process", lambda: SimpleNamespace(serving=serving))
    version = Version(metadata.version("sglang"))
    ledger = Ledger(engine=data.ENGINE, version=version, supported=data.SUPPORTED, patches=data.PORTABLE)
    states = {status.patch.name: status.state for status in ledger.install(Need.PORTABLE)}
    yield {name for name, state in states.items() if state == "applied"}
    ledger.undo()


def backend() -> Any:
    return object.__new__(importlib.import_module(BACKEND).DeepseekSparseAttnBackend)


def portable_backend(monkeypatch: pytest.MonkeyPatch, **more: Any) -> Any:
    """SGLang's backend with plans on an SM86 GPU, with the attributes that its own start would set."""
    import torch

    from nsa_plugin.backends.sglang.v32.attention import with_plans
    from nsa_plugin.backends.sglang.v32.routes import SglangPlanner
    from nsa_plugin.backends.sglang.v32.state import adopt
    from nsa_plugin.decision.shapes import ModelShape
    from nsa_plugin.libraries.devices import synthetic
    from nsa_plugin.settings import Settings

    module = importlib.import_module(BACKEND)
    monkeypatch.setattr(importlib.import_module("sglang.srt.utils"), "get_device_sm", lambda: 86)
    made = object.__new__(with_plans(module.DeepseekSparseAttnBackend))
    fields = {
        "device": "cpu",
        "dsa_prefill_impl": "flashmla_kv",
        "dsa_decode_impl": "flashmla_kv",
        "dsa_kv_cache_store_fp8": True,
        "dsa_index_topk": 2048,
        "dsa_index_kpool": 1,
        "dcp_size": 1,
        "_kv_shard_pool": None,
        "max_context_len": 4096,
        "speculative_num_draft_tokens": 4,
        "real_page_size": 64,
        "physical_page_size": 64,
        "enable_auto_select_prefill_impl": False,
        "hisparse_coordinator": None,
        "use_mha": False,
        "supports_mha_one_shot": True,
        "token_to_kv_pool": SimpleNamespace(dtype=torch.float8_e4m3fn),
    }
    if "self._get_device_sm" in inspect.getsource(module.DeepseekSparseAttnBackend):  # its names since 0.5.20
        fields |= {
            "_get_device_sm": lambda: 86,
            "_is_blackwell": lambda: False,
            "_is_in_breakable_cuda_graph": lambda: False,
            "_is_in_tc_piecewise_cuda_graph": lambda: False,
        }
    for name, value in (fields | more).items():
        setattr(made, name, value)
    model = ModelShape(num_heads=128, attn_tp_size=8, kv_layout="v32_fp8")
    planner = SglangPlanner(model, synthetic(86, libraries=("triton",)), Settings(), portable=True)
    assert adopt(made, planner, SimpleNamespace()) == []
    return made


def mode(name: str) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return ForwardMode[name]


def test_every_entry_of_this_version_is_applied(serves: set[str]) -> None:
    from nsa_plugin.patches import sglang as data

    version = Version(metadata.version("sglang"))
    assert serves == {patch.name for patch in data.PORTABLE if patch.target(version) is not None}


def test_sglang_gets_its_schedule_without_deepgemm(serves: set[str]) -> None:
    import torch

    batch = SimpleNamespace(paged_mqa_schedule_metadata=None)
    lengths = torch.ones(3, 1, dtype=torch.int32)
    backend()._refresh_paged_mqa_schedule_metadata(batch, lengths)
    made = batch.paged_mqa_schedule_metadata
    assert (made.shape, made.dtype) == ((SM_COUNT + 1, 2), torch.int32)
    backend()._refresh_paged_mqa_schedule_metadata(batch, lengths)  # a replay copies it into the captured one
    assert batch.paged_mqa_schedule_metadata is made


def test_sglang_plans_no_top_k_with_a_kernel_that_does_not_compile_there(serves: set[str]) -> None:
    import torch

    if "sglang.portable-topk-plan" not in serves:
        pytest.skip("this SGLang's kernel compiles for GPUs before SM90")
    backend_ = backend()
    assert backend_._build_topk_v2_plan(torch.ones(3, dtype=torch.int32)) is None
    backend_._refresh_topk_v2_plan(SimpleNamespace(topk_v2_plan=None))  # and so makes none at a replay


def test_sglang_prepares_a_decode_step_without_deepgemm_and_flashmla(
    serves: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of `init_forward_metadata` runs as on a GPU; a stand-in's missing function would end it."""
    import torch

    module = importlib.import_module(BACKEND)
    monkeypatch.setattr(module, "is_cuda", lambda: True)
    # For context parallelism; it asks for the configuration of a running server.
    monkeypatch.setattr(module, "pad_dsa_cache_seqlens", lambda batch, lengths: lengths)
    made = portable_backend(
        monkeypatch,
        req_to_token_pool=SimpleNamespace(req_to_token=torch.arange(2 * 256).view(2, 256).int()),
        _arange_buf=torch.arange(64, dtype=torch.int32),
        # SGLang plans from 0.5.21 on with a kernel that compiles there; a CPU cannot run it.
        dsa_topk_backend=SimpleNamespace(should_use_topk_v2=lambda: False),
    )
    lengths = torch.tensor([70, 200])
    batch = SimpleNamespace(
        forward_mode=mode("DECODE"),
        batch_size=2,
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        seq_lens_sum=270,
        req_pool_indices=torch.tensor([1, 0]),
        attn_cp_metadata=None,
        global_num_tokens_cpu=None,
        rids=None,
        spec_info=None,
    )
    made.init_forward_metadata(batch)
    found = made.forward_metadata
    assert found.paged_mqa_schedule_metadata.shape == (SM_COUNT + 1, 2)
    assert found.flashmla_metadata.num_splits.shape == (3,)
    assert found.topk_v2_plan is None
    assert found.real_page_table[:, 0].tolist() == [256 // 64, 0]
    assert made.nsa_plugin.route.plan.indexer.provider == "triton"


@pytest.mark.parametrize(
    ("prefix", "max_chunk", "dense"),
    [(0, 1 << 17, True), (8, 1 << 17, False), (0, 64, False)],
    ids=["new", "fp8 prefix", "SGLang's rules"],
)
def test_sglangs_rules_allow_dense_attention_with_the_plugins_kernel(
    serves: set[str], monkeypatch: pytest.MonkeyPatch, prefix: int, max_chunk: int, dense: bool
) -> None:
    import torch

    from nsa_plugin.backends.sglang.v32.preparation import setter_of

    module = importlib.import_module(BACKEND)
    monkeypatch.setattr(module, "is_dsa_enable_prefill_cp", lambda: False)  # it asks a running server
    made = portable_backend(monkeypatch)
    lengths = torch.tensor([70, 200])
    batch = SimpleNamespace(
        forward_mode=mode("EXTEND"),
        batch_size=2,
        seq_lens_cpu=lengths,
        seq_lens_sum=270,
        extend_seq_lens_cpu=(lengths - prefix).tolist(),
        extend_prefix_lens_cpu=[prefix, prefix],
        extend_num_tokens=270 - 2 * prefix,
        get_max_chunk_capacity=lambda: max_chunk,
        attn_cp_metadata=None,
        rids=None,
        spec_info=None,
    )
    getattr(made, setter_of(module.DeepseekSparseAttnBackend))(batch)
    assert made.use_mha is dense
    assert made.nsa_plugin.route.dense is dense
    assert not dense or made.nsa_plugin.route.plan.provider == "triton"


@pytest.mark.parametrize("name", ["DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2"])
def test_steps_select_as_the_reference_from_sglangs_metadata(serves: set[str], name: str) -> None:
    import torch
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import TopkTransformMethod

    from nsa_plugin.backends.common.providers import Providers
    from nsa_plugin.backends.sglang.v32.indexer import Selection, attach
    from nsa_plugin.kernels.indexer import reference_paged_topk
    from tests.kernels.indexer_cases import indexer_inputs, paged_keys

    module = importlib.import_module(INDEXER)
    cache, table = paged_keys(LENGTHS, 16)
    q, _, _, weights = indexer_inputs(len(LENGTHS) + 2, 1, HEADS)
    seen = torch.tensor(LENGTHS, dtype=torch.int32)
    attention = SimpleNamespace(cache_seqlens_int32=seen, dsa_seqlens_expanded=seen, real_page_table=table)
    of_batch = importlib.import_module(BACKEND).DSAIndexerMetadata(attention, TopkTransformMethod.PAGED)
    plan = SimpleNamespace(indexer=SimpleNamespace(rows_per_chunk=3))
    pool = SimpleNamespace(get_index_k_with_scale_buffer=lambda layer_id: cache.data.view(cache.num_pages, -1))
    attach(of_batch, Selection(plan, pool, Providers("v32_fp8", 86, helpers="triton"), portable=True))
    indexer = module.Indexer.__new__(module.Indexer)
    torch.nn.Module.__init__(indexer)
    indexer.index_topk, indexer.num_init_tokens, indexer.num_local_tokens = TOPK, 0, 0
    batch = SimpleNamespace(forward_mode=mode(name))
    found = indexer._get_topk_paged(batch, 3, q, weights.unsqueeze(-1), of_batch)
    rows = len(LENGTHS)
    wanted = reference_paged_topk(q[:rows, None], cache, weights[:rows], seen, table, TOPK)
    for row, positions in enumerate(wanted.tolist()):
        slots = {int(table[row, at // 64]) * 64 + at % 64 for at in positions if at >= 0}
        assert set(found[row].tolist()) - {-1} == slots
    assert bool((found[rows:] == -1).all())  # padding


def test_short_prefills_are_selected_for_while_the_plugin_serves(
    serves: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from nsa_plugin.backends.sglang.v32 import patches, portable

    indexer, short = (
        SimpleNamespace(index_topk=2048),
        SimpleNamespace(forward_mode=mode("EXTEND"), seq_lens_cpu=torch.tensor([5, 9])),
    )
    skips = importlib.import_module(INDEXER).Indexer._should_skip_logits_computation
    assert skips(indexer, short) is False
    portable.note_dense(short, True)
    assert skips(indexer, short) is True
    del short.nsa_plugin_dense
    monkeypatch.setattr(patches, "process", lambda: SimpleNamespace(serving=None))
    assert skips(indexer, short) is True


def test_sglangs_forward_finds_the_quantisation_without_fp8_instructions(serves: set[str]) -> None:
    import inspect
    import re

    import torch

    from nsa_plugin.kernels.indexer import quantize

    forward = inspect.getsource(importlib.import_module(INDEXER).Indexer.forward_cuda)
    (name,) = re.findall(r"from (\S+triton\S*) import act_quant", forward)  # where the layers look it up when they run
    x = torch.randn(5, 3, 128, generator=torch.Generator().manual_seed(1)).bfloat16() * 3
    codes, scales = importlib.import_module(name).act_quant(x, 128, "ue8m0")
    right, right_scales = quantize(x, ue8m0=True)
    assert torch.equal(codes.view(torch.uint8), right.view(torch.uint8))
    assert torch.equal(scales, right_scales)


def test_sglangs_pool_writes_the_cache_without_fp8_instructions(serves: set[str]) -> None:
    import torch
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    from nsa_plugin.kernels.kv_cache import open_cache, reference_write

    pool = object.__new__(MLATokenToKVPool)
    pool.dsa_kv_cache_store_fp8, pool.write_loc_is_dcp_resolved = True, False
    generator = torch.Generator().manual_seed(2)
    nope = torch.randn(5, 1, 512, generator=generator).bfloat16()
    rope = torch.randn(5, 1, 64, generator=generator).bfloat16()
    buffer, slots = torch.zeros(128, 1, 656, dtype=torch.uint8), torch.tensor([3, 127, 0, 64, 9])
    pool._write_mla_kv_buffer(buffer, slots, nope, rope)
    wanted = open_cache(torch.zeros(2, 64, 1, 656, dtype=torch.uint8), "v32_fp8")
    reference_write(wanted, torch.cat([nope, rope], -1).squeeze(1), slots)
    assert torch.equal(buffer.view(-1), wanted.data.view(-1))
