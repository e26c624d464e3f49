"""Activation for DeepSeek-V4 in a scheduler process, on a fake SGLang."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nsa_plugin.backends.sglang.startup import activation, model, serving
from nsa_plugin.backends.sglang.startup.activation import SglangProcess
from nsa_plugin.backends.sglang.startup.flags import PassedFlags
from nsa_plugin.errors import LeftToStockError, NoProviderError, PatchError
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.patches import sglang as data
from tests.backends.fake_sglang.scheduler import V4_CONFIG, read, runner, scheduler, start
from tests.backends.fake_sglang.v4 import MODEL, Engine

pytestmark = pytest.mark.usefixtures("clean_environment")
REFUSE_COPIES = SglangProcess._refuse_copies  # a fixture takes it away

V4_MODULE = "sglang.srt.layers.attention.deepseek_v4_backend"


class StockV4Backend(Engine):
    """The parts of SGLang's class that the plugin reads."""

    def __init__(self, model_runner: Any, skip_prefill: bool = False, speculative_step_id: int = 0) -> None: ...


@pytest.fixture
def registry(process: SglangProcess, monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's registry, whose entry for V4 imports the class when it is called; with what the ledger does to both."""
    built: list[Any] = []

    def create(runner: Any) -> Any:
        cls = sys.modules[V4_MODULE].DeepseekV4AttnBackend
        built.append(cls)
        return cls

    parts = V4_MODULE.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    monkeypatch.setattr(sys.modules[V4_MODULE], "DeepseekV4AttnBackend", StockV4Backend, raising=False)
    name = "sglang.srt.layers.attention.attention_registry"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[name].ATTENTION_BACKENDS = {"dsv4": create}  # type: ignore[attr-defined]
    process.ledger.patches = data.V4_ENTRY + data.V4
    monkeypatch.setattr(SglangProcess, "_refuse_copies", REFUSE_COPIES)
    return SimpleNamespace(backends=sys.modules[name].ATTENTION_BACKENDS, built=built)


def enabled(process: SglangProcess, monkeypatch: pytest.MonkeyPatch, **settings: str) -> None:
    """A scheduler's process that has just been entered, on a GPU."""
    monkeypatch.setattr(model, "device_sm", lambda: 90)
    PassedFlags({"enabled": "true", **settings}, {}).write()
    process.enter_scheduler()


@pytest.fixture
def adopted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The backends of V4 that were to serve; nothing is decided or run for them."""
    seen: list[Any] = []
    begun = SimpleNamespace(
        adopt=lambda backend, runner: seen.append(backend),
        settle=lambda: None,
        active=True,
        model=MODEL,
        device=synthetic(sm=90),
        routes={},
        warm_seconds=0.0,
        notes=[],
    )
    monkeypatch.setattr(serving.SglangServing, "begin", lambda *arguments, **named: begun)
    return seen


@pytest.mark.parametrize("algorithm", [None, "EAGLE"])
def test_v4_serves_with_and_without_speculative_decoding(
    process: SglangProcess,
    registry: Any,
    adopted: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    algorithm: str | None,
) -> None:
    enabled(process, monkeypatch, report=str(tmp_path / "report.json"))
    of = runner(config=V4_CONFIG, speculative_algorithm=algorithm)
    built = [registry.backends["dsv4"](of)(of) for _ in range(2 if algorithm else 1)]  # with a draft model, two
    process.leave_scheduler(scheduler(V4_CONFIG))
    assert adopted == built
    report = read(tmp_path / "report.json")
    assert (report["active"], report["notes"]) == (True, [])


@pytest.mark.parametrize("value", ["fa3", "flashmla_kv"])
def test_flags_of_v32s_backend_set_nothing_for_v4(
    process: SglangProcess,
    registry: Any,
    adopted: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    value: str,
) -> None:
    """SGLang does not read them for V4: before, fa3 ended the start, and flashmla_kv set `decode_backend`."""
    monkeypatch.setattr(model, "device_sm", lambda: 90)
    settings = {"enabled": "true", "report": str(tmp_path / "report.json")}
    PassedFlags(settings, {"decode_backend": ("--dsa-decode-backend", value)}).write()
    process.enter_scheduler()
    of = runner(config=V4_CONFIG)
    registry.backends["dsv4"](of)(of)
    process.leave_scheduler(scheduler(V4_CONFIG))
    report = read(tmp_path / "report.json")
    assert report["notes"] == [
        f"--dsa-decode-backend {value}: SGLang does not read it for DeepSeek-V4, so decode_backend is not set"
    ]
    assert report["settings"]["decode_backend"] == "auto"


def test_speculative_decoding_of_v32_is_served(process: SglangProcess) -> None:
    PassedFlags({"enabled": "true"}, {}).write()
    start(process, build=runner(scaled_fp8=True, speculative_algorithm="EAGLE"))
    assert process.serving is not None
    assert process.serving.active


@pytest.mark.parametrize("config", [vars(V4_CONFIG), {"index_topk": 2048}, {}])
def test_speculative_decoding_is_not_refused_before_anything_is_started(
    process: SglangProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: dict[str, Any]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(activation, "_check_files", lambda version: None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    PassedFlags({"enabled": "true"}, {}).write()
    arguments = SimpleNamespace(model_path=str(tmp_path), device="cuda", speculative_algorithm="EAGLE")
    process.check_before_serving(arguments)
    arguments.device = "cpu"
    if "index_topk" in config:  # it was looked at
        with pytest.raises(NoProviderError, match="needs a GPU"):
            process.check_before_serving(arguments)


def test_v4s_class_is_replaced_just_before_the_first_backend_is_built(
    process: SglangProcess, registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    enabled(process, monkeypatch)
    states = {status.patch.name: status.state for status in process.statuses}
    assert states == {"sglang.v4-registered": "applied"}
    assert sys.modules[V4_MODULE].DeepseekV4AttnBackend is StockV4Backend  # type: ignore[attr-defined]
    for _ in range(2):  # a draft model's after the target's
        made = registry.backends["dsv4"](runner())
        assert made.nsa_plugin_replaces is StockV4Backend
    states = {status.patch.name: status.state for status in process.statuses}
    assert states == {"sglang.v4-registered": "applied", "sglang.v4-backend": "applied"}
    process.ledger.undo()
    assert sys.modules[V4_MODULE].DeepseekV4AttnBackend is StockV4Backend  # type: ignore[attr-defined]


@pytest.mark.parametrize("strict", [True, False])
def test_a_v4_class_imported_before_the_patch_is_refused(
    process: SglangProcess, registry: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, strict: bool
) -> None:
    report, words = tmp_path / "report.json", "sglang.other.Backend is still the stock StockV4Backend"
    enabled(process, monkeypatch, strict=str(strict), report=str(report))
    monkeypatch.setitem(sys.modules, "sglang.other", ModuleType("sglang.other"))
    sys.modules["sglang.other"].Backend = StockV4Backend  # type: ignore[attr-defined]
    if strict:
        with pytest.raises(PatchError, match=re.escape(words)):
            registry.backends["dsv4"](runner())
        assert registry.built == []
        return
    built = registry.backends["dsv4"](runner())(runner())
    assert built.nsa_plugin is None, "every batch is SGLang's own"
    process.leave_scheduler(scheduler(V4_CONFIG))
    assert read(report)["active"] is False
    (note,) = read(report)["notes"]
    assert note.startswith("strict is off and the stock engine serves: ")
    assert words in note


def test_while_off_v4_starts_unchanged(process: SglangProcess, registry: Any) -> None:
    process.enter_v4()
    assert registry.backends["dsv4"](runner()) is StockV4Backend
    assert sys.modules[V4_MODULE].DeepseekV4AttnBackend is StockV4Backend  # type: ignore[attr-defined]


def test_v4_by_another_backend_is_not_reported_as_the_plugins(process: SglangProcess) -> None:
    PassedFlags({"enabled": "true", "strict": "full"}, {}).write()
    with pytest.raises(LeftToStockError, match=r"another attention backend than dsa .* or dsv4"):
        start(process, config=V4_CONFIG)


def test_a_model_is_refused_on_a_cpu_before_anything_is_started(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = tmp_path / "config.json"
    arguments = SimpleNamespace(model_path=str(tmp_path), device="cpu")
    model.refuse_model(arguments)  # what cannot be read is SGLang's to complain about
    config.write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    model.refuse_model(arguments)
    config.write_text(json.dumps(vars(V4_CONFIG)))
    with pytest.raises(NoProviderError, match=f"{tmp_path}.*needs a GPU"):
        model.refuse_model(arguments)
    arguments.device = "cuda"
    model.refuse_model(arguments)


@pytest.mark.parametrize(
    "config", [V4_CONFIG, vars(V4_CONFIG), {"text_config": vars(V4_CONFIG)}, SimpleNamespace(text_config=V4_CONFIG)]
)
def test_sparse_attention_is_found_in_a_configuration(config: Any) -> None:
    assert model.has_sparse_attention(config)
