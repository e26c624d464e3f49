"""A V4 worker before any batch: refusals, warm-up, the start-up report; and the ledger."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.vllm.startup.model import check_on_cpu, check_on_gpu, family_of, v4_shape
from nsa_plugin.backends.vllm.v4 import patches as v4_patches
from nsa_plugin.backends.vllm.v4 import serving as v4_serving
from nsa_plugin.backends.vllm.v4.serving import V4Serving, warm_v4
from nsa_plugin.backends.vllm.v32 import patches
from nsa_plugin.errors import LeftToStockError, NoProviderError, SettingsError
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.patches.ledger import Need, load
from nsa_plugin.patches.vllm import PATCHES
from nsa_plugin.patches.vllm_v4 import CHANGES, V4
from nsa_plugin.settings import ResolvedSettings, Settings
from nsa_plugin.telemetry import Trace
from tests.backends.fake_vllm.v4 import H200, MODEL
from tests.backends.fake_vllm.v4_config import config, layer
from tests.backends.fake_vllm.v4_indexer import Stock


def changed(**hf: Any) -> Any:
    given = config()
    vars(given.model_config.hf_config).update(hf)
    return given


def serving(vllm_config: Any = None, device: Any = H200, **settings: Any) -> V4Serving:
    resolved = ResolvedSettings(Settings(**settings), {})
    return V4Serving(
        resolved=resolved, trace=Trace(), vllm_config=vllm_config or config(), device_profile=lambda: device
    )


@pytest.mark.parametrize(
    ("sm", "words"),
    [(75, "vLLM's FLASHMLA_SPARSE_DSV4, which needs an SM80 or later GPU"), (80, "cannot run DeepSeek-V4 on SM80")],
)
def test_a_device_that_lacks_kernels_is_left_to_vllm(sm: int, words: str):
    with pytest.raises(LeftToStockError, match=words):
        serving(device=synthetic(sm)).planning()


def test_every_batch_of_the_portable_path_runs_the_plugins_kernels(monkeypatch: pytest.MonkeyPatch):
    warmed: list[Any] = []
    monkeypatch.setattr(v4_serving, "warm_v4", lambda kernels, *_: warmed.append(kernels))
    monkeypatch.setattr(v4_serving, "warm_indexer", lambda *given: warmed.append(given[3]))
    for name in ("warm_selection", "warm_slots"):
        monkeypatch.setattr(v4_serving, name, lambda *_, **__: None)
    found = serving(device=synthetic(120, libraries=("triton",)))
    found.portable = True
    found.prepare(torch.device("cpu"))
    assert warmed == [{("sparse_mla_prefill", "triton"), ("sparse_mla_decode", "triton")}, 1]
    found.vllm_config.compilation_config.static_forward_context["a"] = layer("FLASHMLA_SPARSE_DSV4")
    assert found.left() == []
    assert found.facts()["decode, 1 request"].startswith("direct by triton; ")


def test_v4_on_a_cpu_is_left_to_vllm():
    with pytest.raises(LeftToStockError, match="does not support DeepSeek-V4 under vLLM on a CPU"):
        check_on_cpu(config())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (changed(architectures=["DeepseekV41ForCausalLM"]), "supports DeepseekV4ForCausalLM here, not DeepseekV41"),
        (changed(compress_ratios=[0, 4, 2]), "compress_ratios of the model has 2; nsa-plugin supports 0, 1, 4, 128"),
        (changed(head_dim=256), "^head_dim of DeepseekV4ForCausalLM is 256; nsa-plugin supports 512"),
        (changed(head_dim=None), "^head_dim of DeepseekV4ForCausalLM is None; nsa-plugin supports 512"),
        (changed(qk_rope_head_dim=32), "qk_rope_head_dim of DeepseekV4ForCausalLM is 32; nsa-plugin supports 64"),
        (changed(index_head_dim=64), "index_head_dim of DeepseekV4ForCausalLM is 64; nsa-plugin supports 128"),
        (config(attention_config=SimpleNamespace(use_fp4_indexer_cache=True)), "an fp4 indexer cache"),
        (
            config(speculative_config=SimpleNamespace(num_speculative_tokens=3, parallel_drafting=True)),
            "parallel_drafting of --speculative-config",
        ),
        (
            config(parallel_config=SimpleNamespace(tensor_parallel_size=1, decode_context_parallel_size=2)),
            "--decode-context-parallel-size 2",
        ),
    ],
)
def test_unsupported_configurations(given: Any, words: str):
    with pytest.raises(LeftToStockError, match=words):
        check_on_gpu(given)


def test_a_cache_without_fp8_records_is_not_supported():
    with pytest.raises(LeftToStockError, match="--kv-cache-dtype is bfloat16; nsa-plugin supports auto, fp8"):
        check_on_gpu(config("bfloat16"))


def test_the_model_as_a_rank_sees_it():
    found = v4_shape(config())
    assert (found.family, found.heads_per_rank, found.kv_layout, found.sliding_window) == ("v4", 4, "v4_fp8", 128)
    assert found.row_dims == (512, 512)
    assert family_of(config()) == "v4"
    plain = changed(architectures=["DeepseekV32ForCausalLM"])
    assert family_of(plain) == "v4", "by its compress ratios"
    del plain.model_config.hf_config.compress_ratios
    assert family_of(plain) == "v3.2"


def test_a_worker_reports_the_paths_of_its_batches(monkeypatch: pytest.MonkeyPatch):
    warmed: list[Any] = []
    monkeypatch.setattr(v4_serving, "warm_v4", lambda kernels, *_: warmed.append(kernels))
    for name in ("warm_selection", "warm_slots"):
        monkeypatch.setattr(v4_serving, name, lambda *_, **__: None)
    given = config(speculative_config=SimpleNamespace(num_speculative_tokens=3))
    found = serving(given, prefill_backend="triton")
    for _ in range(2):
        found.prepare(torch.device("cpu"))
    assert warmed == [{("sparse_mla_prefill", "triton")}], "once"
    assert given.attention_config.backend is None, "V4's layers choose theirs"
    assert (found.planning().step_tokens, found.active) == (4, False)
    layers = given.compilation_config.static_forward_context
    layers |= {"a": layer("FLASHMLA_SPARSE_DSV4"), "b": layer("V4_FLASHMLA_SPARSE"), "c": SimpleNamespace()}
    assert found.active
    why = "decode_backend is auto: decode, verify and draft steps of DeepSeek-V4 run on the stock path"
    assert found.left() == [why]
    facts = found.facts()
    assert facts["attention"] == "2 layers on vLLM's FLASHMLA_SPARSE_DSV4"
    assert facts["prefill, 1024 of 1024 tokens"].startswith("direct by triton; ")
    assert facts["target_verify, 64 requests"].startswith("decode kernel by flash_mla, vLLM's FlashMLA; ")
    layers["d"] = layer("FLASHINFER_MLA_SPARSE_DSV4")
    assert "layers on vLLM's backend FLASHINFER_MLA_SPARSE_DSV4 are left to vLLM" in found.left()[0]
    del layers["a"], layers["b"]
    assert not found.active
    assert "prefill, 1024 of 1024 tokens" not in found.facts()


def test_settings_that_no_batch_can_satisfy_are_refused_at_once():
    with pytest.raises(SettingsError, match="token_shard is on and cannot work here"):
        serving(token_shard="on").planning()
    with pytest.raises(SettingsError, match="decode_backend is cuda"):
        serving(device=synthetic(90, libraries=("triton", "flash_mla")), decode_backend="cuda").planning()
    with pytest.raises(NoProviderError):
        serving(device=synthetic(90, libraries=("triton",))).planning()


@pytest.mark.parametrize("provider", ["reference", "triton"])
def test_kernels_are_run_over_every_compress_ratio(provider: str):
    providers = Providers("v4_fp8", 90 if provider == "triton" else 0)
    kernels = {("sparse_mla_prefill", provider), ("sparse_mla_decode", provider)}
    asked: list[Any] = []
    load = providers.load

    def counted(op: str, *args: Any, **kwargs: Any) -> Any:
        asked.append(op)
        return load(op, *args, **kwargs)

    providers.load = counted  # type: ignore[method-assign]
    warm_v4(kernels, providers, MODEL, torch.device("cpu"))
    assert asked == ["sparse_mla_decode"] * 3 + ["sparse_mla_prefill"] * 3


@pytest.mark.parametrize(("value", "words"), [(1.0, "is not zero"), (0.0, "is not zero"), (None, "KeyError")])
def test_the_error_names_a_kernel_that_does_not_run(value: float | None, words: str):
    """One that raises, one that writes ones, and (0.0) one that writes nothing."""
    providers = Providers("v4_fp8", 0)

    def broken(q: torch.Tensor, *_: Any, out: torch.Tensor, **__: Any) -> Any:
        if value is None:
            raise KeyError("a symbol")
        if value:
            out.fill_(value)
        return SimpleNamespace(out=out)

    providers._loaded["sparse_mla_prefill", "cuda"] = broken
    with pytest.raises(NoProviderError, match=f"cuda's sparse_mla_prefill for DeepSeek-V4.*{words}"):
        warm_v4({("sparse_mla_prefill", "cuda")}, providers, MODEL, torch.device("cpu"))


# ---------------------------------------------------------------------------------------------------
# The ledger


@pytest.mark.parametrize(
    ("version", "where"),
    [
        ("0.20.0", "deepseek_v4_attention:DeepseekV4MLAAttention"),
        ("0.21.0", "deepseek_v4_attention:DeepseekV4MLAAttention"),
        ("0.22.1", "nvidia.flashmla:DeepseekV4FlashMLASparseImpl"),
        ("0.23.0", "nvidia.flashmla:DeepseekV4FlashMLAAttention"),
        ("0.28.0", "nvidia.flashmla:DeepseekV4FlashMLAAttention"),
        ("0.33.0", "nvidia.flashmla:DeepseekV4FlashMLAAttention"),
    ],
)
def test_where_the_layer_is_by_version(version: str, where: str):
    targets = {patch.name: patch.target(Version(version)) for patch in V4}
    for name in ("vllm.v4-prefill", "vllm.v4-decode"):
        target = targets[name]
        assert target is not None
        assert where in target.path
    assert (targets["vllm.v4-swa-prefill-swa-indices"] is None) == (version < "0.24")
    builder = targets["vllm.v4-swa-builder"]
    assert builder is not None
    own = "nvidia.flashmla:DeepseekSparseSWAFlashMLABackend"  # 0.28 on; the base class's is for other layers then
    assert builder.path.partition(".get_builder_cls")[0].endswith(own) == (version >= "0.28")


def test_v4_is_checked_for_v4_only():
    assert {patch.need for patch in V4} == {Need.GPU_V4}
    assert [patch for patch in PATCHES if patch.need is Need.GPU_V4] == list(V4)
    names = [patch.name for patch in PATCHES]
    assert names.index("vllm.gpu-indexer-builder") < names.index("vllm.v4-indexer-builder")


def test_the_patches_make_the_plugins_classes(monkeypatch: pytest.MonkeyPatch):
    class Backend:
        @staticmethod
        def get_builder_cls() -> type:
            return Stock

    class Inheriting(Backend):
        pass

    deciding: list[Any] = [None]
    monkeypatch.setattr(patches, "planning", lambda: deciding[0])
    ours = patches.indexer_builder_class(Inheriting.get_builder_cls).__func__
    window = v4_patches.swa_builder_class(vars(Backend)["get_builder_cls"]).__func__
    assert ours() is Stock
    assert window() is Stock
    deciding[0] = object()
    assert ours().__mro__[1] is Stock
    assert ours() is ours(), "one class for every caller"
    assert window().__mro__[1] is Stock
    assert all(callable(load(patch.replacement)) for patch in CHANGES)
