"""The plugin's and SGLang's flags on the command line, and how other processes get them; no engine needed."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from types import SimpleNamespace

import pytest

from nsa_plugin.backends.sglang.startup import flags
from nsa_plugin.backends.sglang.startup.flags import VARIABLE, PassedFlags, add_flags, engine_backends, given
from nsa_plugin.settings import ENV_PREFIX, Settings, backends

# Every choice of --{nsa,dsa}-{prefill,decode}-backend in SGLang 0.5.11 to 0.5.23.
ENGINE_CHOICES = (
    *("flashmla_sparse", "flashmla_sparse_q8", "flashmla_kv", "flashmla_auto", "flashinfer_sparse_mla"),
    *("triton_sparse_mla", "fa3", "tilelang", "triton", "aiter", "trtllm", "intel_xpu"),
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [key for key in os.environ if key.startswith(ENV_PREFIX) or key == VARIABLE]:
        monkeypatch.delenv(name)


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sglang serve")
    parser.add_argument("--model-path")
    add_flags(parser)
    return parser


def test_every_setting_has_its_flag_with_its_documentation(parser: argparse.ArgumentParser) -> None:
    text = " ".join(parser.format_help().split())
    for spec in dataclasses.fields(Settings):
        flag = "--enable-nsa-plugin" if spec.name == "enabled" else f"--nsa-plugin-{spec.name.replace('_', '-')}"
        assert f" {flag} " in text
        # argparse breaks lines at hyphens too.
        assert spec.metadata["doc"].replace(" ", "") in text.replace(" ", "")


def test_given_has_only_the_users_flags(parser: argparse.ArgumentParser) -> None:
    assert given(parser.parse_args(["--model-path", "m"])) == {}
    arguments = ["--enable-nsa-plugin", "--nsa-plugin-mha-max-kv", "-1", "--nsa-plugin-token-shard=off"]
    assert given(parser.parse_args(arguments)) == {"enabled": "true", "mha_max_kv": "-1", "token_shard": "off"}


def test_given_is_empty_without_flags() -> None:
    assert given(SimpleNamespace(model_path="m")) == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--nsa-plugin-prefill-backend", "cutlass"],
            ["--nsa-plugin-prefill-backend", "'cutlass'", *backends("prefill_backend")],
        ),
        (["--nsa-plugin-logits-budget-mb", "0"], ["--nsa-plugin-logits-budget-mb", "at least 1"]),
        (["--nsa-plugin-strict", "perhaps"], ["--nsa-plugin-strict", "true or false"]),
        (["--nsa-plugin-preffil-backend", "triton"], ["unrecognized arguments", "--nsa-plugin-preffil-backend"]),
    ],
)
def test_a_wrong_flag_ends_the_parse_and_names_the_allowed_values(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert all(word in error for word in words), error


@pytest.mark.parametrize("value", ENGINE_CHOICES)
@pytest.mark.parametrize("setting", ["prefill_backend", "decode_backend"])
@pytest.mark.parametrize("prefix", ["nsa", "dsa"])
def test_an_engine_flag_sets_the_library_or_gives_a_note(prefix: str, setting: str, value: str) -> None:
    engine = engine_backends(SimpleNamespace(**{f"{prefix}_{setting}": value}))
    flag = f"--{prefix}-{setting.replace('_', '-')}"
    assert engine == {setting: (flag, value)}
    resolved, notes = PassedFlags(engine=engine).resolve()
    allowed = backends(setting)
    library = flags.LIBRARY_OF.get(value)
    if library in allowed:
        assert getattr(resolved.settings, setting) == library
        assert resolved.sources[setting] == flag
        assert resolved.engine_paths == {setting: value}
        assert notes == []
    else:
        assert getattr(resolved.settings, setting) == "auto"
        assert resolved.engine_paths == {}
        assert notes == [f"{flag} {value} names no kernel library that the plugin supports: {setting} is not set"]


def test_which_engine_choices_have_no_equivalent() -> None:
    assert set(ENGINE_CHOICES) - set(flags.LIBRARY_OF) == {"tilelang", "aiter", "intel_xpu", "flashinfer_sparse_mla"}


def test_an_engine_flag_that_was_not_given_is_not_a_source() -> None:
    assert engine_backends(SimpleNamespace(dsa_prefill_backend=None, dsa_decode_backend=None)) == {}
    assert engine_backends(SimpleNamespace()) == {}


@pytest.mark.parametrize("prefix", ["nsa", "dsa"])
def test_trtllm_as_a_setting_sets_sglangs_flag_on_sm100(prefix: str) -> None:
    """Field defect 2: SGLang ran its default kernel, and the start failed. Not run on SM100 here."""
    asked = Settings(decode_backend="trtllm")
    for sm, value in ((100, "trtllm"), (103, "trtllm"), (90, None), (120, None), (0, None)):
        arguments = SimpleNamespace(**{f"{prefix}_decode_backend": None, f"{prefix}_prefill_backend": None})
        flag = f"--{prefix}-decode-backend"
        set_here = {"decode_backend": (flag, "trtllm")} if value else {}
        assert flags.run_trtllm(arguments, asked, lambda sm=sm: sm) == set_here
        assert vars(arguments) == {f"{prefix}_decode_backend": value, f"{prefix}_prefill_backend": None}
    given = SimpleNamespace(**{f"{prefix}_decode_backend": "flashmla_kv"})
    assert flags.run_trtllm(given, asked, lambda: 100) == {}
    assert vars(given) == {f"{prefix}_decode_backend": "flashmla_kv"}
    assert flags.run_trtllm(SimpleNamespace(), asked, lambda: 100) == {}


def test_without_trtllm_the_gpu_is_not_read() -> None:
    def device_sm() -> int:
        raise AssertionError("the main process has not read SGLang's arguments yet")

    assert (
        flags.run_trtllm(SimpleNamespace(dsa_decode_backend=None), Settings(decode_backend="triton"), device_sm) == {}
    )


def test_flag_before_engine_flag_before_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_PLUGIN_DECODE_BACKEND", "triton")
    monkeypatch.setenv("NSA_PLUGIN_PREFILL_BACKEND", "triton")
    passed = PassedFlags(
        flags={"decode_backend": "flash_mla"},
        engine={
            "decode_backend": ("--dsa-decode-backend", "fa3"),
            "prefill_backend": ("--dsa-prefill-backend", "trtllm"),
        },
    )
    resolved, _ = passed.resolve()
    assert resolved.settings.decode_backend == "flash_mla"
    assert resolved.settings.prefill_backend == "trtllm"
    assert resolved.engine_paths == {"prefill_backend": "trtllm"}
    assert sum("decode_backend is 'flash_mla' from the command line" in note for note in resolved.notes) == 2
    assert any("'triton' from the environment is ignored" in note for note in resolved.notes)


def test_passed_flags_arrive_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = PassedFlags({"enabled": "true", "trace": "log"}, {"decode_backend": ("--nsa-decode-backend", "fa3")})
    environ: dict[str, str] = {}
    sent.write(environ)
    assert list(environ) == [VARIABLE]
    assert not VARIABLE.startswith(ENV_PREFIX)  # or the settings would refuse it as unknown
    assert PassedFlags.read(environ) == sent
    assert PassedFlags.read({}) == PassedFlags()
    monkeypatch.setenv(VARIABLE, environ[VARIABLE])
    resolved, _ = PassedFlags.read().resolve()
    assert resolved.settings.trace == "log"
    assert json.loads(environ[VARIABLE])["flags"]["trace"] == "log"


@pytest.mark.parametrize(
    ("argv", "environ", "asked"),
    [
        ([], {}, False),
        (["--model-path", "m"], {}, False),
        (["--enable-nsa-plugin"], {}, True),
        (["--nsa-plugin-trace", "log"], {}, True),
        ([], {"NSA_PLUGIN_ENABLED": "1"}, True),
        ([], {"NSA_PLUGIN_ENABLED": "perhaps"}, True),
        ([], {VARIABLE: '{"flags": {"enabled": "true"}, "engine": {}}'}, True),
        ([], {VARIABLE: '{"flags": {}, "engine": {}}'}, False),
        (["--enable-nsa-plugin"], {"NSA_PLUGIN_ENABLED": "0"}, False),
    ],
)
def test_asked_for(monkeypatch: pytest.MonkeyPatch, argv: list[str], environ: dict[str, str], asked: bool) -> None:
    monkeypatch.setattr("sys.argv", ["launch_server.py", *argv])
    for key, value in environ.items():
        monkeypatch.setenv(key, value)
    assert flags.asked_for() is asked
