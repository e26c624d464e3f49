"""Activation of the portable path, on a fake SGLang."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from nsa_plugin.backends.common.providers import device_in_use
from nsa_plugin.backends.sglang.startup import activation, model, serving
from nsa_plugin.backends.sglang.startup.activation import SglangProcess
from nsa_plugin.backends.sglang.startup.flags import PassedFlags
from nsa_plugin.decision.dispatch import decide
from nsa_plugin.decision.shapes import BatchShape, Phase
from nsa_plugin.errors import LeftToStockError, SettingsError
from nsa_plugin.libraries.devices import emulating, synthetic
from nsa_plugin.patches.ledger import Need
from nsa_plugin.settings import Settings
from nsa_plugin.telemetry import SHORT_WITH_LONG
from tests.backends.fake_sglang.model_runner import decided, keep_arguments_raw
from tests.backends.fake_sglang.scheduler import read, runner, start
from tests.decision.dispatch_cases import V32_FP8

pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.fixture
def installed(process: SglangProcess, monkeypatch: pytest.MonkeyPatch) -> list[Need]:
    """The needs whose patches a scheduler installs, on SGLang 0.5.23."""
    needs: list[Need] = []
    process.ledger.version = Version("0.5.23")
    install = process.ledger.install
    monkeypatch.setattr(process.ledger, "install", lambda *given: needs.extend(given) or install(*given))
    monkeypatch.setattr(serving, "warm_portable", lambda *given: None)
    monkeypatch.setattr(serving, "warm_dense", lambda *given: None)
    return needs


def on(monkeypatch: pytest.MonkeyPatch, sm: int, *libraries: str) -> None:
    monkeypatch.setattr(model, "device_sm", lambda: sm)
    monkeypatch.setattr("nsa_plugin.libraries.probe.probe", lambda: synthetic(sm, libraries=libraries))


@pytest.mark.parametrize(
    ("version", "sm"),
    [("0.5.23", 80), ("0.5.23", 86), ("0.5.23", 89), ("0.5.16", 86), ("0.5.23", 120), ("0.5.23", 121)],
)
def test_the_portable_path_serves_gpus_without_kernels_of_flashmla(
    process: SglangProcess, installed: list[Need], monkeypatch: pytest.MonkeyPatch, version: str, sm: int
) -> None:
    process.ledger.version = Version(version)
    on(monkeypatch, sm, "triton")
    PassedFlags({"enabled": "true"}, {}).write()
    start(process, build=runner(scaled_fp8=True))
    assert installed == [Need.ENABLED, Need.GPU, Need.PORTABLE]
    assert process.serving is not None
    (backend,) = process.serving.backends
    assert (process.serving.portable, backend.nsa_plugin.planner.portable) == (True, True)
    routes = dict(process.serving.routes)
    assert routes.pop(SHORT_WITH_LONG) == "attend as the long ones: split_prefill is off"
    assert all("triton" in text for text in routes.values())


@pytest.mark.parametrize(
    ("sm", "more", "warns"),
    [
        (80, {}, True),
        (86, {}, True),
        (89, {}, False),
        (90, {}, False),
        (86, {"quantization_config": {"quant_method": "awq"}}, False),
        (86, {"quantization_config": None}, False),
        (86, {"n_routed_experts": None}, False),
        (86, {"index_topk": None}, False),
    ],
)
def test_fp8_experts_are_warned_of_where_sglang_has_none(
    process: SglangProcess,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    sm: int,
    more: dict[str, Any],
    warns: bool,
) -> None:
    said = _said_of_weights(process, monkeypatch, caplog, sm, {"quantization_config": {"quant_method": "fp8"}} | more)
    assert len(said) == warns
    assert all(f"no kernels on SM{sm}" in one and "INT4" in one for one in said)


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize(
    ("kept", "more", "warns"),
    [
        (["self_attn"], {}, True),
        (["lm_head", "model.layers.0."], {}, True),
        (["model.layers.60.self_attn.kv_a_proj_with_mqa"], {}, True),
        (["model.layers.61.self_attn"], {}, False),
        (["lm_head", "kv_b_proj", "indexer", "mlp.gate"], {}, False),
        ([], {}, False),
        (None, {}, False),
        (["self_attn"], {"index_topk": None}, False),
        (["self_attn"], {"kv_lora_rank": None}, False),
    ],
    ids=str,
)
def test_awq_without_attention_is_warned_of(
    process: SglangProcess,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    sm: int,
    kept: list[str] | None,
    more: dict[str, Any],
    warns: bool,
) -> None:
    stored = {"quant_method": "awq", "modules_to_not_convert": kept}
    said = _said_of_weights(process, monkeypatch, caplog, sm, {"quantization_config": stored} | more)
    assert len(said) == warns
    assert all("sglang #28305" in one and "compressed-tensors" in one for one in said)


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize(
    ("more", "arguments", "warns"),
    [
        ({}, {}, True),
        ({}, {"dtype": "auto"}, True),
        ({"torch_dtype": None, "dtype": "bfloat16"}, {"dtype": "auto"}, True),
        ({"torch_dtype": "float16"}, {"dtype": "bfloat16"}, True),
        ({"torch_dtype": "float16"}, {"dtype": "auto"}, False),
        ({}, {"dtype": "half"}, False),
        ({}, {"dtype": "float16"}, False),
        ({}, {"quantization": "gptq_marlin"}, True),
        ({}, {"quantization": "moe_wna16"}, False),
        ({"n_routed_experts": None}, {}, False),
        ({"index_topk": None}, {}, False),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, {}, False),
    ],
    ids=str,
)
def test_gptq_experts_are_warned_of(
    process: SglangProcess,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    sm: int,
    more: dict[str, Any],
    arguments: dict[str, str],
    warns: bool,
) -> None:
    config = {"quantization_config": {"quant_method": "gptq"}, "torch_dtype": "bfloat16"} | more
    said = _said_of_weights(process, monkeypatch, caplog, sm, config, **arguments)
    assert len(said) == warns
    assert all("sglang #20599" in one and "compressed-tensors" in one for one in said)


def _said_of_weights(
    process: SglangProcess,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    sm: int,
    more: dict[str, Any],
    **arguments: str,
) -> list[str]:
    """What is logged before serving, which is asked for twice, of a model whose configuration has `more`."""
    process.ledger.version = Version("0.5.23")
    config = {"index_topk": 2048, "n_routed_experts": 256, "num_hidden_layers": 61, "kv_lora_rank": 512} | more
    monkeypatch.setattr("transformers.PretrainedConfig.get_config_dict", lambda *given, **named: (config, {}))
    monkeypatch.setattr(activation, "_check_files", lambda version: None)
    on(monkeypatch, sm)
    PassedFlags({"enabled": "true"}, {}).write()
    for _ in range(2):
        process.check_before_serving(
            SimpleNamespace(model_path="checkpoint", device="cuda", use_ray=False, **arguments)
        )
    return [one.getMessage() for one in caplog.records]


@pytest.mark.parametrize("flags", [{}, {"mha_max_kv": "0"}, {"split_prefill": "on"}], ids=str)
def test_the_dense_kernel_runs_at_start_if_prompts_may_take_it(
    process: SglangProcess, installed: list[Need], monkeypatch: pytest.MonkeyPatch, flags: dict[str, str]
) -> None:
    on(monkeypatch, 86, "triton")
    ran: list[str] = []
    monkeypatch.setattr(serving, "warm_dense", lambda *given: ran.append("dense"))
    PassedFlags({"enabled": "true", **flags}, {}).write()
    start(process, build=runner(scaled_fp8=True))
    assert process.serving is not None
    assert len(ran) == ("mha_max_kv" not in flags)
    if "split_prefill" in flags:
        assert "SM90" not in process.serving.routes[SHORT_WITH_LONG]


@pytest.mark.parametrize("sm", [90, 100])
def test_other_gpus_are_served_without_its_changes(
    process: SglangProcess, installed: list[Need], monkeypatch: pytest.MonkeyPatch, sm: int
) -> None:
    monkeypatch.setattr(model, "device_sm", lambda: sm)
    PassedFlags({"enabled": "true"}, {}).write()
    process.enter_scheduler()
    assert Need.PORTABLE not in installed


def test_it_leaves_an_older_sglang_to_itself(
    process: SglangProcess, installed: list[Need], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on(monkeypatch, 86, "triton")
    process.ledger.version = Version("0.5.15")
    PassedFlags({"enabled": "true", "report": str(tmp_path / "report.json")}, {}).write()
    start(process, build=runner(scaled_fp8=True))
    assert process.serving is None
    assert read(tmp_path / "report.json")["left_to_stock"] == [
        "nsa-plugin's portable path supports SGLang >=0.5.16,<0.5.24; this is 0.5.15"
    ]


def test_portable_on_emulates_an_older_gpu(
    process: SglangProcess, installed: list[Need], monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated: list[int] = []
    monkeypatch.setattr("nsa_plugin.kernels.triton.device.emulate", emulated.append)
    on(monkeypatch, 90, "triton", "flash_mla", "fa3", "deep_gemm")
    PassedFlags({"enabled": "true", "portable": "on"}, {}).write()
    start(process, build=runner(scaled_fp8=True))
    assert process.serving is not None
    assert (process.serving.device.sm, emulated, Need.PORTABLE in installed) == (86, [86], True)
    assert all(" by triton" in text for name, text in process.serving.routes.items() if name != SHORT_WITH_LONG)


@pytest.mark.parametrize(("sm", "allowed"), [(80, "auto, which serves SM80 as it is"), (75, "auto")])
def test_a_gpu_older_than_the_emulated_one_is_refused(sm: int, allowed: str) -> None:
    with pytest.raises(SettingsError, match=rf"portable is on, .* cannot work on SM{sm}; allowed here: {allowed}$"):
        device_in_use(synthetic(sm), Settings(portable="on"))


@pytest.mark.parametrize(("setting", "library"), [("prefill_backend", "flash_mla"), ("decode_backend", "fa3")])
def test_a_library_that_the_emulated_gpu_lacks_is_refused_with_what_works(setting: str, library: str) -> None:
    device = emulating(synthetic(90), 86)
    batch = (Phase.EXTEND, [4096], [65536]) if setting == "prefill_backend" else (Phase.DECODE, [1], [65536])
    with pytest.raises(SettingsError, match=rf"{setting} is {library}, .* What works here: cuda, triton, reference$"):
        decide(V32_FP8, BatchShape.from_lengths(*batch), device, Settings(portable="on", **{setting: library}))


def test_v4_is_refused_where_portable_is_asked_for_by_name(
    process: SglangProcess, installed: list[Need], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, 90, "triton")
    PassedFlags({"enabled": "true", "portable": "on"}, {}).write()
    process.enter_scheduler()
    with pytest.raises(SettingsError, match=r"portable is on and cannot work for DeepSeek-V4, .* allowed here: auto"):
        process.enter_v4()


def test_v4_is_left_to_sglang(process: SglangProcess, installed: list[Need], monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, 86, "triton")
    PassedFlags({"enabled": "true", "strict": "full"}, {}).write()
    process.enter_scheduler()
    with pytest.raises(LeftToStockError, match="DeepSeek-V4 needs an SM90 or SM100 GPU"):
        process.enter_v4()


def test_prefills_with_decode_steps_are_served_too(
    process: SglangProcess, installed: list[Need], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, 86, "triton")
    PassedFlags({"enabled": "true", "strict": "full"}, {}).write()
    start(process, build=runner(scaled_fp8=True, enable_mixed_chunk=True))
    assert process.serving is not None
    (sample,) = (text for name, text in process.serving.routes.items() if name.startswith("prefill with decode steps"))
    assert sample.startswith("sparse_prefill by triton on SGLang's path flashmla_kv")


def test_mixed_batches_that_sglang_turned_off_are_not_reported(
    process: SglangProcess, installed: list[Need], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with speculative decoding."""
    keep_arguments_raw(monkeypatch)
    on(monkeypatch, 86, "triton")
    PassedFlags({"enabled": "true", "strict": "full"}, {}).write()
    start(process, build=runner(scaled_fp8=True, **decided(enable_mixed_chunk=False) | {"enable_mixed_chunk": True}))
    assert process.serving is not None
    assert not any(name.startswith("prefill with decode steps") for name in process.serving.routes)
