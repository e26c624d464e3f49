"""Every configuration of `ci.support.CONFIGURATIONS` is started: its outcome and its reason are those of the table."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from ci.support import CONFIGURATIONS, Configuration, Handling
from nsa_plugin.backends.common import token_shard as common_shard
from nsa_plugin.backends.common.paths import SGLANG, VLLM
from nsa_plugin.backends.sglang.startup import activation as sglang_activation
from nsa_plugin.backends.sglang.startup import model as sglang_model
from nsa_plugin.backends.sglang.startup.activation import SglangProcess
from nsa_plugin.backends.sglang.startup.flags import VARIABLE, PassedFlags
from nsa_plugin.backends.sglang.startup.serving import check_cache, check_model, refuse_trtllm
from nsa_plugin.backends.sglang.v32 import token_shard as sglang_shard
from nsa_plugin.backends.sglang.v32.routes import dense_beyond
from nsa_plugin.backends.vllm.startup import activation as vllm_activation
from nsa_plugin.backends.vllm.startup.model import check_on_gpu
from nsa_plugin.backends.vllm.v4.serving import V4Serving
from nsa_plugin.backends.vllm.v32 import serving as gpu_serving
from nsa_plugin.backends.vllm.v32.choice import BACKEND, BF16_BACKEND, SM120_BACKEND, check_device
from nsa_plugin.errors import LeftToStockError, NsaPluginError
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.patches.ledger import Ledger
from nsa_plugin.settings import ResolvedSettings, Settings, resolve
from nsa_plugin.telemetry import Trace
from tests.backends.fake_sglang import v4 as sglang_v4
from tests.backends.fake_sglang import v32 as sglang_v32
from tests.backends.fake_sglang.model_runner import CONFIG, built, runner
from tests.backends.fake_sglang.scheduler import scheduler
from tests.backends.fake_sglang.v4 import batch
from tests.backends.fake_sglang.v32 import MODEL, DsaBackend, started
from tests.backends.fake_vllm import v4_config
from tests.backends.fake_vllm.config import config, layer
from tests.backends.fake_vllm.config import drafting as with_draft

Start = Callable[[pytest.MonkeyPatch], object]
"""Starts a configuration: raises what the plugin raises, or returns the notes of the start-up report."""


def vllm(of: Callable[..., Any] = config, *, model: dict[str, Any] | None = None, **fields: dict[str, Any]) -> Start:
    def start(monkeypatch: pytest.MonkeyPatch) -> None:
        made = of()
        for name, values in fields.items():
            vars(getattr(made, name)).update(values)
        vars(made.model_config.hf_config).update(model or {})
        check_on_gpu(made)

    return start


def breaking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    check_on_gpu(config())  # V3.2's module of vLLM 0.32, where the plugin's indexer is called between two graphs
    vllm(model={"architectures": ["DeepseekV3ForCausalLM"]})(monkeypatch)


def drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    check_on_gpu(config(speculative_config=SimpleNamespace(parallel_drafting=True, num_speculative_tokens=2)))


def drafting_over(cache_dtype: str) -> Start:
    """An MTP draft with a cache of its own format."""
    return lambda monkeypatch: check_on_gpu(
        config(speculative_config=with_draft(sparse=True, kv_cache_dtype=cache_dtype))
    )


def trimming(monkeypatch: pytest.MonkeyPatch) -> None:
    check_on_gpu(
        config(speculative_config=SimpleNamespace(enable_adaptive_verification=True, num_speculative_tokens=2))
    )


def invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    check_on_gpu(config())


def sharing(version: str = "0.33.0", sm: int = 90, **settings: Any) -> Start:
    """Two ranks that share the KV cache, in the process that reads the command line."""

    def start(monkeypatch: pytest.MonkeyPatch) -> None:
        ledger = SimpleNamespace(check_version=lambda: None, version=Version(version))
        monkeypatch.setattr(vllm_activation, "process", lambda: SimpleNamespace(ledger=ledger))
        monkeypatch.setattr(vllm_activation, "device_kind", lambda: "cuda")
        monkeypatch.setattr(vllm_activation, "device_sm", lambda: sm)
        made = config()
        made.parallel_config.decode_context_parallel_size = 2
        vllm_activation.check_here(made, resolve(config={"enabled": True} | settings, environ={}))

    return start


def interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    made = config(speculative_config=SimpleNamespace(num_speculative_tokens=2))
    vars(made.parallel_config).update(decode_context_parallel_size=2, cp_kv_cache_interleave_size=64)
    check_on_gpu(made)


def resharding_over_a_shared_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_serving, "dense_workspace_tokens", lambda vllm_config: 4096)
    made = config()
    made.parallel_config.decode_context_parallel_size = 2
    resolved = ResolvedSettings(Settings(token_shard="on"), {})
    device = synthetic(90, libraries=("triton", "deep_gemm"))
    gpu_serving.GpuServing(resolved=resolved, trace=Trace(), vllm_config=made, device_profile=lambda: device).planning()


def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.utils.deep_gemm.mqa_logits_use_mx_scales", lambda: True, raising=False)
    check_device(synthetic(100))


def platform(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = SimpleNamespace(check_version=lambda: None)
    monkeypatch.setattr(vllm_activation, "process", lambda: SimpleNamespace(ledger=ledger))
    monkeypatch.setattr(vllm_activation, "device_kind", lambda: "RocmPlatform")
    vllm_activation.check_here(config(), SimpleNamespace(settings=Settings()))


def layers_on(
    backend: str, sm: int, *, cache: str = "fp8_ds_mla", flag: bool = False, draft: Any = None, **settings: Any
) -> Start:
    """A layer with the backend that vLLM picked, or the user's flag."""

    def start(monkeypatch: pytest.MonkeyPatch) -> None:
        known = type("Known", (), {name: name for name in (BACKEND, backend)})
        registry = ModuleType("vllm.v1.attention.backends.registry")
        registry.AttentionBackendEnum = known  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, registry.__name__, registry)
        monkeypatch.setattr(gpu_serving, "dense_workspace_tokens", lambda vllm_config: 4096)
        monkeypatch.setattr(gpu_serving.GpuServing, "warm", lambda *_: None)
        made = config(cache, speculative_config=draft)
        made.attention_config.backend = backend if flag else None
        serving = gpu_serving.GpuServing(
            resolved=resolve(config={"enabled": True, "strict": "full"} | settings, environ={}),
            trace=Trace(),
            vllm_config=made,
            portable=sm == 120,
            device_profile=lambda: synthetic(sm),
        )
        if sm != 120:
            serving.prepare(torch.device("cpu"))
        assert made.attention_config.backend == (backend if flag else None)
        made.compilation_config.static_forward_context["attn"] = layer(False, backend)
        serving.check_layers()

    return start


def v4_serving(**settings: Any) -> V4Serving:
    given = v4_config.config()
    given.compilation_config.static_forward_context["a"] = v4_config.layer(V4Serving.backend)
    resolved = ResolvedSettings(Settings(**settings), {})
    made = V4Serving(resolved=resolved, trace=Trace(), vllm_config=given, device_profile=lambda: synthetic(90))
    if not settings:
        made.planning()
    return made


def v4_on(sm: int, version: str = "0.33.0") -> Start:
    """V4's layers, on the backend that vLLM picks on a GPU of the portable path."""

    def start(monkeypatch: pytest.MonkeyPatch) -> None:
        ledger = SimpleNamespace(check_version=lambda: None, version=Version(version), check=lambda *_, **__: None)
        monkeypatch.setattr(vllm_activation, "process", lambda: SimpleNamespace(ledger=ledger))
        monkeypatch.setattr(vllm_activation, "device_kind", lambda: "cuda")
        monkeypatch.setattr(vllm_activation, "device_sm", lambda: sm)
        monkeypatch.setattr("nsa_plugin.patches.static.check_installed", lambda ledger, *needs, live: None)
        given, resolved = v4_config.config(), ResolvedSettings(Settings(), {})
        vllm_activation.check_here(given, resolved)
        given.compilation_config.static_forward_context["a"] = v4_config.layer("FLASHINFER_MLA_SPARSE_DSV4")
        made = V4Serving(
            resolved=resolved,
            trace=Trace(),
            vllm_config=given,
            portable=True,
            device_profile=lambda: synthetic(sm, libraries=("triton",)),
        )
        made.check_layers()

    return start


def sglang(backend: dict[str, Any] | None = None, **server_args: Any) -> Start:
    """A V3.2 backend of SGLang with a feature switched on."""
    original = type("Featured", (DsaBackend,), backend or {})
    return lambda monkeypatch: started(original, server_args=SimpleNamespace(**server_args)).notes


def dense_by_sglang(monkeypatch: pytest.MonkeyPatch) -> Any:
    variable = SimpleNamespace(get=lambda: 8192)
    envs = SimpleNamespace(SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD=variable)
    monkeypatch.setattr(sys.modules["sglang.srt.environ"], "envs", envs)
    return started(dense_up_to=dense_beyond("dsa", MODEL, Settings(), portable=False)).notes


def without_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = built(prefill="trtllm", decode="trtllm")
    backend.dsa_kv_cache_store_fp8 = False
    check_cache(backend, runner(), synthetic(100))


def another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = SimpleNamespace(**vars(CONFIG) | {"kv_lora_rank": 256})
    check_model(built(), SimpleNamespace(model_config=SimpleNamespace(hf_text_config=narrow)))


def another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """No backend of the plugin's has been built when the scheduler is."""
    monkeypatch.setenv(VARIABLE, "")
    PassedFlags({"enabled": "true", "strict": "full"}, {}).write()
    monkeypatch.setattr(sglang_model, "device_sm", lambda: 90)
    process = SglangProcess(
        Ledger(engine="sglang", version=Version("0.5.23"), supported=">=0.5.11", patches=()), child=True
    )
    process.enter_scheduler()
    process.leave_scheduler(scheduler())


def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_activation, "_check_files", lambda version: None)
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setenv("NSA_PLUGIN_ENABLED", "1")
    monkeypatch.setenv("NSA_PLUGIN_STRICT", "full")
    process = SglangProcess(
        Ledger(engine="sglang", version=Version("0.5.23"), supported=">=0.5.11", patches=()), child=False
    )
    process.check_before_serving(SimpleNamespace(use_ray=True))


def on_a_portable_gpu(version: str = "0.5.23", sm: int = 80, **server_args: Any) -> Start:
    """The first backend of a scheduler on a GPU of the portable path; V4's with `v4`."""

    def start(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(VARIABLE, "")
        PassedFlags({"enabled": "true", "strict": "full"}, {}).write()
        monkeypatch.setattr(sglang_model, "device_sm", lambda: sm)
        monkeypatch.setattr("nsa_plugin.libraries.probe.probe", lambda: synthetic(sm, libraries=("triton",)))
        ledger = Ledger(engine="sglang", version=Version(version), supported=">=0.5.11", patches=())
        process = SglangProcess(ledger, child=True)
        process.enter_scheduler()
        if server_args.pop("v4", False):
            process.enter_v4()
        process.backend_built(built(), runner(**server_args))
        process.leave_scheduler(scheduler())

    return start


def on_a_left_gpu(sm: int, **flags: str) -> Start:
    """A scheduler whose backend has TRT-LLM's kernels, SGLang's default on GPUs from SM100 on over an fp8 cache."""

    def start(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(VARIABLE, "")
        PassedFlags({"enabled": "true", "strict": "full"} | flags, {}).write()
        monkeypatch.setattr(sglang_model, "device_sm", lambda: sm)
        monkeypatch.setattr("nsa_plugin.libraries.probe.probe", lambda: synthetic(sm))
        ledger = Ledger(engine="sglang", version=Version("0.5.23"), supported=">=0.5.11", patches=())
        process = SglangProcess(ledger, child=True)
        process.enter_scheduler()
        backend = built(prefill="trtllm", decode="trtllm")
        backend.dsa_kv_cache_store_fp8 = False
        process.backend_built(backend, runner())
        process.leave_scheduler(scheduler())

    return start


def portable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_activation, "_check_files", lambda version: None)
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setenv("NSA_PLUGIN_ENABLED", "1")
    monkeypatch.setenv("NSA_PLUGIN_PORTABLE", "on")
    process = SglangProcess(
        Ledger(engine="sglang", version=Version("0.5.15"), supported=">=0.5.11", patches=()), child=False
    )
    process.check_before_serving(SimpleNamespace())


def trtllm_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_trtllm(built(decode="trtllm"), synthetic(90))


def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    configured = ({"index_topk": 2048}, {})
    monkeypatch.setattr("transformers.PretrainedConfig.get_config_dict", lambda *args, **kwargs: configured)
    sglang_model.refuse_model(SimpleNamespace(device="cpu", model_path="checkpoint"))


def on_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    PassedFlags({"enabled": "true", "strict": "full"}, {}).write()
    monkeypatch.setattr("torch.version.hip", "7.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    ledger = Ledger(engine="sglang", version=Version("0.5.23"), supported=">=0.5.11", patches=())
    SglangProcess(ledger, child=True).enter_scheduler()


def v4_steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    notes: list[str] = sglang_v4.started(batch((9, 300))).notes
    return notes


def v4_fp4(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    server_args = SimpleNamespace(enable_deepseek_v4_fp4_indexer=True)
    notes: list[str] = sglang_v4.started(batch((9, 300)), server_args=server_args).notes
    return notes


def v41(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    original = type("Featured", (sglang_v4.Engine,), {"is_dsv41": True})
    notes: list[str] = sglang_v4.started(batch((9, 300)), original).notes
    return notes


def resharding_two_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening the exchange of the one rank of a group."""
    monkeypatch.setattr(sglang_shard, "checked_group", lambda *_: SimpleNamespace(cpu_group=None))
    monkeypatch.setattr(common_shard, "least", lambda group, value: value)
    given, on = runner(enable_two_batch_overlap=True), Settings(token_shard="on")
    sglang_shard.open_exchange(built(), given, sglang_v32.MODEL, sglang_v32.H200, on)


STARTS: dict[tuple[str, str], Start] = {
    (VLLM, "decode context parallelism in an older vLLM"): sharing("0.28.0"),
    (VLLM, "decode context parallelism over a bf16 cache"): vllm(
        parallel_config={"decode_context_parallel_size": 2}, cache_config={"cache_dtype": "bfloat16"}
    ),
    (VLLM, "decode context parallelism of DeepSeek-V4"): vllm(
        v4_config.config, parallel_config={"decode_context_parallel_size": 2}
    ),
    (VLLM, "decode context parallelism on a GPU of the portable path"): sharing(sm=80),
    (VLLM, "decode context parallelism with `strict` off"): sharing(strict=False),
    (VLLM, "verify steps with decode context parallelism and an interleave"): interleaved,
    (VLLM, "resharding with decode context parallelism"): resharding_over_a_shared_cache,
    (VLLM, "prefill context parallelism"): vllm(parallel_config={"prefill_context_parallel_size": 2}),
    (VLLM, "two batches at once"): vllm(parallel_config={"enable_dbo": True}),
    (VLLM, "microbatches"): vllm(parallel_config={"enable_dbo": False, "ubatch_size": 2}),
    (VLLM, "an fp4 indexer cache"): vllm(attention_config={"use_fp4_indexer_cache": True}),
    (VLLM, "an fp4 indexer cache, since vLLM 0.28"): vllm(attention_config={"indexer_kv_dtype": "mxfp4"}),
    (VLLM, "another fp8 cache of DeepSeek-V3.2 and GLM-5"): vllm(cache_config={"cache_dtype": "fp8_e4m3"}),
    (VLLM, "graphs that break at the indexer"): breaking,
    (VLLM, "HiSparse"): vllm(attention_config={"hisparse_config": object()}),
    (VLLM, "parallel drafting"): drafting,
    (VLLM, "adaptive verification"): trimming,
    (VLLM, "batch invariance"): invariant,
    (VLLM, "another KV-cache format"): vllm(cache_config={"cache_dtype": "nvfp4"}),
    (VLLM, "a model whose attention has another shape"): vllm(model={"kv_lora_rank": 256}),
    (VLLM, "pooled indexer keys"): vllm(model={"index_kpool": 4}),
    (VLLM, "a model with other model code"): vllm(model={"architectures": ["HYV4ForCausalLM"]}),
    (VLLM, "DeepSeek-V4.1"): vllm(v4_config.config, model={"architectures": ["DeepseekV41ForCausalLM"]}),
    (VLLM, "a GPU before SM80"): lambda monkeypatch: check_device(synthetic(75)),
    (VLLM, "DeepSeek-V4 on SM80, SM86 and SM89"): v4_on(89),
    (VLLM, "DeepSeek-V4 on SM120"): v4_on(120),
    (VLLM, "DeepSeek-V4 on SM120 in an older vLLM"): v4_on(120, "0.32.0"),
    (VLLM, "DeepSeek-V3.2 on SM120 over an fp8 cache"): layers_on(SM120_BACKEND, 120),
    (VLLM, "another attention backend"): layers_on("FLASHINFER_MLA_SPARSE", 90, flag=True),
    (VLLM, "vLLM's default backend on SM100"): layers_on("FLASHINFER_MLA_SPARSE", 100),
    (VLLM, "a bf16 cache on SM90"): layers_on(BF16_BACKEND, 90, cache="auto"),
    (VLLM, "a draft model without sparse attention"): layers_on(
        BF16_BACKEND, 90, cache="auto", draft=with_draft(sparse=False), prefill_backend="triton"
    ),
    (VLLM, "some layers with a cache of another format"): vllm(cache_config={"kv_cache_dtype_skip_layers": ["0"]}),
    (VLLM, "a draft's layers with a cache of another format"): drafting_over("auto"),
    (VLLM, "packed indexer scales"): packed,
    (VLLM, "another platform"): platform,
    (VLLM, "decode and verify steps of DeepSeek-V4"): lambda monkeypatch: v4_serving().left(),
    (VLLM, "resharding where it cannot work"): lambda monkeypatch: v4_serving(token_shard="on").planning(),
    (SGLANG, "HiSparse"): sglang(enable_hisparse=True),
    (SGLANG, "prefill context parallelism"): sglang(enable_prefill_cp=True),
    (SGLANG, "decode context parallelism"): sglang({"dcp_size": 2}),
    (SGLANG, "a model whose attention has another shape"): another_shape,
    (SGLANG, "pooled indexer keys"): sglang({"dsa_index_kpool": 4}),
    (SGLANG, "a sharded KV cache"): sglang({"_kv_shard_pool": object()}),
    (SGLANG, "deterministic inference"): sglang(enable_deterministic_inference=True),
    (SGLANG, "another attention kernel for prefill or decode"): lambda monkeypatch: started(prefill="tilelang").notes,
    (SGLANG, "SM100's default kernels over a bf16 cache"): lambda monkeypatch: (
        started(layout="bf16", prefill="flashmla_sparse", decode="trtllm").notes
    ),
    (SGLANG, "another platform"): on_rocm,
    (SGLANG, "a cache without scales"): without_scales,
    (SGLANG, "another attention backend"): another_backend,
    (SGLANG, "dense prefills beyond index_topk"): dense_by_sglang,
    (SGLANG, "decode steps of a model with attention sinks"): lambda monkeypatch: (
        started(layout="bf16", sinks=True).notes
    ),
    (SGLANG, "decode, verify and draft steps of DeepSeek-V4"): v4_steps,
    (SGLANG, "DeepSeek-V4's fp4 indexer"): v4_fp4,
    (SGLANG, "DeepSeek-V4.1"): v41,
    (SGLANG, "Ray actors"): ray,
    (SGLANG, "DeepSeek-V4 on a GPU of the portable path"): on_a_portable_gpu(v4=True),
    (SGLANG, "an older SGLang on a GPU of the portable path"): on_a_portable_gpu("0.5.15"),
    (SGLANG, "a GPU before SM80"): on_a_left_gpu(75),
    (SGLANG, "an older SGLang on SM120"): on_a_portable_gpu("0.5.22", sm=120),
    (SGLANG, "SM110"): on_a_left_gpu(110),
    (SGLANG, "a kernel library by name on SM110 or before SM80"): on_a_left_gpu(110, decode_backend="cuda"),
    (SGLANG, "the portable path by name in an older SGLang"): portable,
    (SGLANG, "resharding with two-batch overlap"): resharding_two_batches,
    (SGLANG, "trtllm by SGLang's flag where it cannot run"): trtllm_flag,
    (SGLANG, "a model with sparse attention on a CPU"): on_a_cpu,
}


def test_every_configuration_is_started() -> None:
    assert STARTS.keys() == {(one.engine, one.what) for one in CONFIGURATIONS}


def outcome_of(start: Start, monkeypatch: pytest.MonkeyPatch) -> tuple[Handling, str]:
    """Return the plugin's outcome for a configuration and its message, which SGLang's backends return as notes."""
    try:
        notes = start(monkeypatch)
    except LeftToStockError as error:
        return Handling.STOCK, str(error)
    except NsaPluginError as error:
        return Handling.REFUSED, str(error)
    assert isinstance(notes, list)
    whole = any("every batch" in note for note in notes)
    return Handling.STOCK if whole else Handling.PARTLY, "\n".join(notes)


@pytest.mark.parametrize("one", CONFIGURATIONS, ids=lambda one: f"{one.engine}: {one.what}")
def test_each_configuration_has_the_outcome_in_the_table(one: Configuration, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, said = outcome_of(STARTS[one.engine, one.what], monkeypatch)
    assert outcome is one.outcome
    assert one.says in said


@pytest.mark.parametrize(
    "name",
    ["tilelang", "flashmla_sparse_q8", "triton_sparse_mla", "aiter", "triton", "flashinfer_sparse_mla", "intel_xpu"],
)
@pytest.mark.parametrize("layout", ["bf16", "v32_fp8"])
def test_each_kernel_that_sglang_has_and_the_plugin_does_not_is_left_by_its_name(name: str, layout: str) -> None:
    """As the flag for prefills; steps are served. For both phases every batch is left."""
    steps = "fa3" if layout == "bf16" else "flashmla_kv"
    found = started(layout=layout, prefill=name, decode=steps)
    assert found.notes == [f"SGLang's --dsa-prefill-backend is {name}: prefills fall back to the stock path"]
    both = started(layout=layout, prefill=name, decode=name)
    assert len(both.notes) == 2
    assert all(f"is {name}: " in note for note in both.notes)


def test_sglangs_two_batch_overlap_is_served() -> None:
    """Each of the two batches has a backend of its own, and so a plan."""
    assert started(server_args=SimpleNamespace(enable_two_batch_overlap=True)).notes == []


@pytest.mark.parametrize("layout", ["bf16", "v32_fp8"])
def test_mixed_chunks_are_served(layout: str) -> None:
    assert started(layout=layout, server_args=SimpleNamespace(enable_mixed_chunk=True)).notes == []


@pytest.mark.parametrize("algorithm", ["DFLASH", "DSPARK", "EAGLE", "NEXTN"])
def test_sglangs_speculative_algorithms_are_served(algorithm: str) -> None:
    """All verify in steps of equal numbers of query tokens; a dense draft model has another attention backend."""
    assert started(server_args=SimpleNamespace(speculative_algorithm=algorithm)).notes == []
