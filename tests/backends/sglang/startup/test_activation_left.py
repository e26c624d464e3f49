"""GPUs on which everything is left to SGLang, on a fake SGLang: SM110, and those before SM80."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from nsa_plugin.backends.sglang.startup import activation, backend, model
from nsa_plugin.backends.sglang.startup.activation import SglangProcess
from nsa_plugin.backends.sglang.startup.flags import PassedFlags
from nsa_plugin.errors import LeftToStockError, PatchError, SettingsError
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.patches.ledger import Need
from nsa_plugin.settings import ResolvedSettings, Settings
from tests.backends.fake_sglang.scheduler import HF_CONFIG, picking, read, runner, scheduler

pytestmark = pytest.mark.usefixtures("clean_environment")

OLD_OR_NEW = pytest.mark.parametrize("sm", [70, 75, 110])
DENSE = SimpleNamespace(architectures=["LlamaForCausalLM"])
REASON = "under SGLang nsa-plugin serves SM80 to SM89, SM90, SM100 and SM120 GPUs, and this one is SM{}"


@pytest.fixture
def installed(process: SglangProcess, monkeypatch: pytest.MonkeyPatch) -> list[Need]:
    """The needs whose patches a scheduler installs, on SGLang 0.5.23."""
    needs: list[Need] = []
    process.ledger.version = Version("0.5.23")
    monkeypatch.setattr(process.ledger, "install", lambda *given: needs.extend(given) or ())
    return needs


def on(monkeypatch: pytest.MonkeyPatch, sm: int) -> None:
    monkeypatch.setattr(model, "device_sm", lambda: sm)
    monkeypatch.setattr("nsa_plugin.libraries.probe.probe", lambda: synthetic(sm))


def serve(
    process: SglangProcess, prefill: str, decode: str, *, scaled_fp8: bool, config: Any = HF_CONFIG, v4: bool = False
) -> Any:
    """Start a scheduler whose backend has the kernels that SGLang or the user picked."""
    process.enter_scheduler()
    if v4:
        process.enter_v4()
    dtype = "torch.float8_e4m3fn" if scaled_fp8 or prefill == "trtllm" else "torch.bfloat16"
    built = backend.make(picking(prefill, decode))(runner(scaled_fp8=scaled_fp8, dtype=dtype))
    process.leave_scheduler(scheduler(config))
    return built


@OLD_OR_NEW
@pytest.mark.parametrize(
    ("prefill", "decode", "scaled_fp8"),
    [
        ("trtllm", "trtllm", False),  # 0.5.23's default for DeepSeek-V3.2 over an fp8 cache
        ("flashmla_sparse", "trtllm", False),  # and over a bf16 cache
        ("flashinfer_sparse_mla", "flashinfer_sparse_mla", True),  # and for GLM-5 over an fp8 cache
        ("flashmla_kv", "flashmla_kv", True),
    ],
)
def test_everything_is_left_to_sglang_with_one_reason(
    process: SglangProcess,
    installed: list[Need],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    sm: int,
    prefill: str,
    decode: str,
    scaled_fp8: bool,
) -> None:
    on(monkeypatch, sm)
    PassedFlags({"enabled": "true", "report": str(tmp_path / "report.json")}, {}).write()
    built = serve(process, prefill, decode, scaled_fp8=scaled_fp8)
    assert built.nsa_plugin is None
    assert (built.dsa_prefill_impl, built.dsa_decode_impl) == (prefill, decode)
    assert installed == []
    report = read(tmp_path / "report.json")
    assert (report["active"], report["notes"]) == (False, [])
    assert report["left_to_stock"] == [REASON.format(sm)]


@OLD_OR_NEW
def test_it_is_shown_on_metrics(
    process: SglangProcess, installed: list[Need], monkeypatch: pytest.MonkeyPatch, sm: int
) -> None:
    shown: list[list[str]] = []
    monkeypatch.setattr(
        "nsa_plugin.backends.sglang.startup.metrics.show", lambda args, version, left: shown.append(left)
    )
    on(monkeypatch, sm)
    PassedFlags({"enabled": "true"}, {}).write()
    serve(process, "trtllm", "trtllm", scaled_fp8=False)
    assert shown == [[REASON.format(sm)]]


@OLD_OR_NEW
def test_deepseek_v4_is_left_too(
    process: SglangProcess, installed: list[Need], monkeypatch: pytest.MonkeyPatch, sm: int
) -> None:
    on(monkeypatch, sm)
    PassedFlags({"enabled": "true"}, {}).write()
    serve(process, "flashmla_kv", "flashmla_kv", scaled_fp8=True, v4=True)
    assert (installed, process.left) == ([], [REASON.format(sm)])


@OLD_OR_NEW
@pytest.mark.parametrize("value", ["trtllm", "flashmla_kv", "flashinfer_sparse_mla"])
def test_sglangs_own_flags_are_left_to_it(
    process: SglangProcess, installed: list[Need], monkeypatch: pytest.MonkeyPatch, sm: int, value: str
) -> None:
    on(monkeypatch, sm)
    engine = {f"{what}_backend": (f"--dsa-{what}-backend", value) for what in ("prefill", "decode")}
    PassedFlags({"enabled": "true"}, engine).write()
    serve(process, value, value, scaled_fp8=value != "trtllm")
    assert process.left == [REASON.format(sm)]


@OLD_OR_NEW
def test_strict_full_refuses(
    process: SglangProcess, installed: list[Need], monkeypatch: pytest.MonkeyPatch, sm: int
) -> None:
    on(monkeypatch, sm)
    PassedFlags({"enabled": "true", "strict": "full"}, {}).write()
    with pytest.raises(LeftToStockError, match=rf"{REASON.format(sm)}$"):
        serve(process, "trtllm", "trtllm", scaled_fp8=False)


@OLD_OR_NEW
@pytest.mark.parametrize("strict", [True, False, "full"])
@pytest.mark.parametrize(
    ("setting", "value"),
    [("prefill_backend", "cuda"), ("decode_backend", "triton"), ("portable", "on"), ("token_shard", "on")],
)
def test_a_setting_that_asks_by_name_is_refused(
    process: SglangProcess,
    installed: list[Need],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    sm: int,
    strict: bool | str,
    setting: str,
    value: str,
) -> None:
    on(monkeypatch, sm)
    report = tmp_path / "report.json"
    PassedFlags({"enabled": "true", "strict": str(strict), "report": str(report), setting: value}, {}).write()
    said = f"{setting} is {value} and cannot work on SM{sm}, which is left to SGLang; allowed here: auto"
    if strict:
        with pytest.raises(SettingsError, match=f"^{said}$"):
            serve(process, "trtllm", "trtllm", scaled_fp8=False)
        return
    serve(process, "trtllm", "trtllm", scaled_fp8=False)
    assert read(report)["notes"] == [f"strict is off and the stock engine serves: {said}"]


@OLD_OR_NEW
@pytest.mark.parametrize("given", [{}, {"strict": "full"}, {"portable": "on"}])
def test_a_model_without_sparse_attention_is_not_left(
    process: SglangProcess,
    installed: list[Need],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    sm: int,
    given: dict[str, str],
) -> None:
    on(monkeypatch, sm)
    PassedFlags({"enabled": "true", "report": str(tmp_path / "report.json"), **given}, {}).write()
    process.enter_scheduler()
    process.leave_scheduler(scheduler(DENSE))
    report = read(tmp_path / "report.json")
    assert (installed, report["left_to_stock"]) == ([], [])
    assert any("LlamaForCausalLM has no DeepSeek sparse attention" in note for note in report["notes"])


class TestBeforeServing:
    """The process that reads the arguments."""

    ARGUMENTS = SimpleNamespace(model_path="checkpoint", device="cuda", use_ray=True)

    @pytest.fixture(autouse=True)
    def refusing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Everything else that this process checks refuses."""

        def refuse(version: Version) -> None:
            raise PatchError("a target is gone")

        monkeypatch.setattr(activation, "_check_files", refuse)
        self.configured(monkeypatch, {"index_topk": 2048})

    def configured(self, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]) -> None:
        monkeypatch.setattr("transformers.PretrainedConfig.get_config_dict", lambda *args, **kwargs: (config, {}))

    @OLD_OR_NEW
    def test_it_warns_once(
        self, process: SglangProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, sm: int
    ) -> None:
        on(monkeypatch, sm)
        PassedFlags({"enabled": "true"}, {}).write()
        for _ in range(2):  # as parsed and as SGLang's object
            process.check_before_serving(self.ARGUMENTS)
        assert [(one.levelno, one.getMessage()) for one in caplog.records] == [
            (logging.WARNING, f"nsa-plugin: left to the stock engine: {REASON.format(sm)}")
        ]

    @OLD_OR_NEW
    @pytest.mark.parametrize(
        ("given", "error"), [({"strict": "full"}, LeftToStockError), ({"decode_backend": "cuda"}, SettingsError)]
    )
    def test_it_refuses_before_a_model_is_loaded(
        self, process: SglangProcess, monkeypatch: pytest.MonkeyPatch, sm: int, given: dict[str, str], error: type
    ) -> None:
        on(monkeypatch, sm)
        PassedFlags({"enabled": "true", **given}, {}).write()
        with pytest.raises(error, match=f"SM{sm}"):
            process.check_before_serving(self.ARGUMENTS)

    @OLD_OR_NEW
    def test_a_model_without_sparse_attention_is_not_checked(
        self, process: SglangProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, sm: int
    ) -> None:
        on(monkeypatch, sm)
        self.configured(monkeypatch, {})
        PassedFlags({"enabled": "true", "strict": "full"}, {}).write()
        process.check_before_serving(self.ARGUMENTS)
        assert caplog.records == []

    def test_an_engine_on_the_cpu_is_no_matter_of_the_gpu(
        self, process: SglangProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        on(monkeypatch, 75)
        PassedFlags({"enabled": "true"}, {}).write()
        with pytest.raises(PatchError, match="a target is gone"):
            process.check_before_serving(SimpleNamespace(model_path="checkpoint", device="cpu"))


@pytest.mark.parametrize("sm", [0, 80, 86, 87, 89, 90, 100, 103, 120, 121])
def test_other_gpus_are_not_left(sm: int) -> None:
    model.check_gpu(sm, ResolvedSettings(Settings(strict="full", prefill_backend="cuda"), {}))
