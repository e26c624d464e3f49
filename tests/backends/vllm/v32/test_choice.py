"""Which attention backend the layers of a GPU worker get: the user's choice, vLLM's or the plugin's."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_plugin.backends.vllm.v32 import serving as gpu_serving
from nsa_plugin.backends.vllm.v32.choice import BACKEND
from nsa_plugin.backends.vllm.v32.serving import GpuServing
from nsa_plugin.errors import LeftToStockError, NoProviderError, SettingsError
from nsa_plugin.libraries.devices import synthetic
from tests.backends.fake_vllm.config import config, drafting, layer
from tests.backends.fake_vllm.start import serving
from tests.backends.fake_vllm.v32 import TRITON

AMPERE = synthetic(86, libraries=("triton",))


@pytest.fixture(autouse=True)
def profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_serving, "dense_workspace_tokens", lambda vllm_config: 4096)


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """vLLM's enumeration of its backends."""
    module = ModuleType("vllm.v1.attention.backends.registry")
    module.AttentionBackendEnum = {BACKEND: object()}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(GpuServing, "warm", lambda *_: None)
    return module.AttentionBackendEnum  # type: ignore[attr-defined]


def test_the_plugin_chooses_the_backend_if_the_user_did_not(backends: dict[str, object]):
    here = serving()
    here.prepare(torch.device("cpu"))
    assert here.vllm_config.attention_config.backend is backends[BACKEND]
    assert here.facts()["attention"].endswith("FLASHMLA_SPARSE, the plugin's choice")


class Newer(dict[str, object]):
    """The enumeration of vLLM 0.25 and later."""

    FLASH_ATTN_MLA_SPARSE = "FLASH_ATTN_MLA_SPARSE"


@pytest.mark.parametrize(
    ("layout", "settings", "chose"),
    [
        ("bfloat16", {}, False),
        ("bfloat16", {"prefill_backend": "triton"}, True),
        ("bfloat16", {"decode_backend": "triton"}, True),
        ("fp8", {}, True),
    ],
)
def test_vllms_choice_over_a_bf16_cache_is_kept_without_times(
    backends: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    settings: dict[str, str],
    chose: bool,
):
    """Field defect 7: before, padded FlashMLA replaced vLLM's FA3, which pads no heads, without a measurement."""
    registry = sys.modules["vllm.v1.attention.backends.registry"]
    monkeypatch.setattr(registry, "AttentionBackendEnum", Newer(backends))
    here = serving(config(layout), **settings)
    here.prepare(torch.device("cpu"))
    assert here.chose == chose
    here.vllm_config.compilation_config.static_forward_context["attn"] = layer(False, "FLASH_ATTN_MLA_SPARSE")
    if not chose:
        words = r"vLLM chose FLASH_ATTN_MLA_SPARSE, on SM90 \(no times on SM90 for 4 heads and a bf16 cache"
        with pytest.raises(LeftToStockError, match=words):
            here.check_layers()


@pytest.mark.parametrize(("sm", "given"), [(90, "FLASH_ATTN_MLA_SPARSE"), (100, None)])
def test_another_choice_is_the_users_or_vllms(backends: dict[str, object], sm: int, given: str | None):
    chosen = SimpleNamespace(backend=given)
    here = serving(config(attention_config=chosen), device=synthetic(sm, libraries=("triton", "deep_gemm")))
    here.prepare(torch.device("cpu"))
    assert (chosen.backend, here.chose) == (given, False)


@pytest.mark.parametrize(
    ("draft", "sm", "chose"),
    [
        (drafting(sparse=True), 90, True),
        (drafting(sparse=False), 90, False),
        (drafting(sparse=False), 86, False),
        (drafting(sparse=False), 120, True),  # vLLM would have no backend for the target
        (drafting(sparse=False, attention_backend="FLASH_ATTN"), 90, True),
        (drafting(sparse=False, method="draft_model", attention_backend="FLASH_ATTN"), 90, False),
    ],
)
def test_a_dense_draft_model_does_not_get_the_targets_backend(
    backends: dict[str, object], draft: Any, sm: int, chose: bool
):
    """vLLM's second model runner keeps the target's for a draft: before, such a model could not start."""
    here = serving(config(speculative_config=draft), device=synthetic(sm, libraries=("triton", "deep_gemm")))
    here.portable = sm != 90
    here.prepare(torch.device("cpu"))
    assert (here.vllm_config.attention_config.backend is not None, here.chose) == (chose, chose)
    layers = here.vllm_config.compilation_config.static_forward_context
    layers["attn"] = layer(False, "FLASH_ATTN_MLA_SPARSE")
    if not chose:
        words = r"vLLM chose FLASH_ATTN_MLA_SPARSE, on SM\d+ \(the draft model, which has no sparse attention"
        with pytest.raises(LeftToStockError, match=words) as left:
            here.check_layers()
        assert "Select it" not in str(left.value)
        assert ("with attention_backend of --spec" in str(left.value)) is (draft.method != "draft_model")
    layers["attn"] = layer(True)  # vLLM may choose the same
    here.check_layers()


@pytest.mark.parametrize("portable", [False, True])
def test_the_users_backend_for_a_kind_of_layers_is_a_choice(backends: dict[str, object], portable: bool):
    def model_of(kind: str, name: str) -> GpuServing:
        chosen = SimpleNamespace(backend=None, backend_per_kind={kind: name})
        here = serving(config(attention_config=chosen), device=AMPERE if portable else TRITON)
        here.portable = portable
        here.prepare(torch.device("cpu"))
        assert here.chose is (chosen.backend is not None) is (kind != "mla_attention")
        here.vllm_config.compilation_config.static_forward_context["attn"] = layer(name == BACKEND, name)
        return here

    own = model_of("mla_attention", BACKEND)
    own.check_layers()
    assert own.facts()["attention"] == "1 layers on vLLM's FLASHMLA_SPARSE"
    model_of("full_attention", BACKEND).check_layers()
    with pytest.raises(LeftToStockError) as left:
        model_of("mla_attention", "FLASHINFER_MLA_SPARSE").check_layers()
    said = str(left.value)
    assert f"attention_config.backend_per_kind['mla_attention']={BACKEND}" in said
    assert "FLASHINFER_MLA_SPARSE" in said
    assert "vLLM chose" not in said
    assert "--attention-backend" not in said


def test_a_kernel_that_does_not_run_leaves_the_backend_alone(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: Any) -> None:
        raise NoProviderError("it does not run")

    monkeypatch.setattr(gpu_serving, "warm", fails)
    here = serving()
    with pytest.raises(NoProviderError, match="it does not run"):
        here.prepare(torch.device("cpu"))
    assert here.vllm_config.attention_config.backend is None


def test_a_model_without_planned_layers_is_left_to_vllm(backends: dict[str, object]):
    def model_of(*layers: Any, backend: str | None = None, **given: Any) -> GpuServing:
        here = serving(config(attention_config=SimpleNamespace(backend=backend)), **given)
        here.prepare(torch.device("cpu"))
        here.vllm_config.compilation_config.static_forward_context |= dict(enumerate(layers))
        return here

    other = layer(False, "FLASHINFER_MLA_SPARSE")
    mixed, alone = model_of(layer(True), other), model_of(layer(True), strict="full")
    for here in (mixed, alone):
        here.check_layers()
    needed = "layers on vLLM's backend FLASHINFER_MLA_SPARSE need every request's selection"
    assert (mixed.planning().no_dense, alone.planning().no_dense) == (needed, "")
    with pytest.raises(LeftToStockError, match="layers on vLLM's backend FLASHINFER_MLA_SPARSE are left"):
        model_of(layer(True), other, strict="full", token_shard="on").check_layers()
    with pytest.raises(LeftToStockError, match="layers on vLLM's backend FLASHINFER_MLA_SPARSE are left"):
        model_of(other, backend="FLASHINFER_MLA_SPARSE").check_layers()
    with pytest.raises(SettingsError, match="token_shard is on and cannot work here: no layer attends"):
        model_of(other, backend="FLASHINFER_MLA_SPARSE", token_shard="on").check_layers()
    words = f"no layer of the model attends by vLLM's {BACKEND}.*"
    with pytest.raises(LeftToStockError, match=words + "vLLM chose FLASHINFER_MLA_SPARSE, on SM90"):
        model_of(other).check_layers()  # the plugin's own choice was not kept to
    with pytest.raises(LeftToStockError, match=words + "vLLM chose FLASHINFER_MLA_SPARSE, on SM100"):
        model_of(other, device=synthetic(100, libraries=("triton", "deep_gemm"))).check_layers()
    with pytest.raises(LeftToStockError, match=words + "no sparse layer that the plugin supports"):
        model_of().check_layers()
