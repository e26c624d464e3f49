"""Settings: every source, every refusal, and what the user is told."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as property_settings
from hypothesis import strategies as st

from nsa_plugin.errors import LeftToStockError, PatchError, SettingsError
from nsa_plugin.settings import Settings, backends, parse_source, resolve, why_stock
from nsa_plugin.switch import killed

DEFAULTS = Settings()
ROOT = Path(__file__).parents[1]


def test_without_any_source_every_setting_is_its_default() -> None:
    resolved = resolve(environ={})
    assert resolved.settings == DEFAULTS
    assert set(resolved.sources) == set(Settings.names())
    assert set(resolved.sources.values()) == {"default"}
    assert resolved.notes == ()


def test_every_default_passes_its_own_parser() -> None:
    values = dataclasses.asdict(DEFAULTS)
    assert parse_source(values, "a test") == values
    assert parse_source({name: str(value) for name, value in values.items()}, "a test") == values


def test_every_setting_says_what_is_allowed_and_what_it_does() -> None:
    for field in dataclasses.fields(Settings):
        assert Settings.allowed(field.name)
        assert field.metadata["doc"].endswith(".")


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("enabled", True, True),
        ("enabled", 1, True),
        ("enabled", "1", True),
        ("enabled", " Yes ", True),
        ("enabled", "ON", True),
        ("enabled", 0, False),
        ("strict", "false", False),
        ("strict", "off", False),
        ("strict", " FULL ", "full"),
        ("prefill_backend", " FLASH_MLA ", "flash_mla"),
        ("decode_backend", "fa3", "fa3"),
        ("mha_max_kv", -1, -1),
        ("mha_max_kv", " -1 ", -1),
        ("mha_max_kv", "0", 0),
        ("mha_max_kv", 2048, 2048),
        ("logits_budget_mb", "64", 64),
        ("token_shard", "auto", "auto"),
        ("token_shard", True, "on"),  # YAML reads a bare `on` as true
        ("token_shard", False, "off"),
        ("large_q_rows", 0, 0),
        ("trace", "log", "log"),
        ("trace", " Log ", "log"),
        ("trace", "OFF", "off"),
        ("trace", True, "log"),
        ("trace", "0", "off"),
        ("trace", " /tmp/a.jsonl ", "/tmp/a.jsonl"),
        ("report", "", ""),
        ("report", "/tmp/a.json", "/tmp/a.json"),
        ("fault", "shift_indices", "shift_indices"),
    ],
)
def test_value_is_parsed(name: str, given: object, expected: object) -> None:
    parsed = parse_source({name: given}, "a test")[name]
    assert parsed == expected
    assert type(parsed) is type(expected)


@pytest.mark.parametrize(
    ("name", "given", "allowed"),
    [
        ("enabled", "maybe", "true or false"),
        ("enabled", 2, "true or false"),
        ("enabled", None, "true or false"),
        ("enabled", "", "true or false"),
        ("enabled", 1.0, "true or false"),
        ("strict", [], "true or false"),
        ("prefill_backend", "fa3", "one of auto, flash_mla"),  # decode only
        ("prefill_backend", "FlashMLA", "one of auto"),
        ("decode_backend", 3, "one of auto"),
        ("mha_max_kv", -2, "-1"),
        ("mha_max_kv", -1.0, "-1"),
        ("mha_max_kv", True, "-1"),
        ("mha_max_kv", "2k", "whole number"),
        ("logits_budget_mb", 0, "at least 1"),
        ("logits_budget_mb", "-5", "at least 1"),
        ("logits_budget_mb", 1.5, "at least 1"),
        ("logits_budget_mb", True, "at least 1"),
        ("logits_budget_mb", "1e3", "at least 1"),
        ("token_shard", "maybe", "one of auto, on, off"),
        ("large_q_rows", -1, "at least 0"),
        ("trace", "/tmp/a.json", ".jsonl"),
        ("trace", None, ".jsonl"),
        ("report", "report.txt", ".json"),
        ("report", None, ".json"),
        ("fault", "zero_indices", "one of none, shift_indices"),
    ],
)
def test_value_that_is_not_allowed_is_refused_by_name(name: str, given: object, allowed: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_source({name: given}, "the config file")
    message = str(caught.value)
    assert repr(name) in message
    assert "the config file" in message
    assert repr(given) in message
    assert allowed in message


@pytest.mark.parametrize("source", ["flags", "config", "environ"])
def test_unknown_name_is_refused_in_every_source(source: str) -> None:
    given = {"NSA_PLUGIN_PREFILL_BACKENT": "auto"} if source == "environ" else {"prefill_backent": "auto"}
    with pytest.raises(SettingsError, match="unknown nsa-plugin setting 'prefill_backent'") as caught:
        resolve(**{"environ": {}, source: given})
    assert "Did you mean 'prefill_backend'?" in str(caught.value)
    assert all(name in str(caught.value) for name in Settings.names())


def test_unknown_name_without_a_near_one_gets_no_suggestion() -> None:
    with pytest.raises(SettingsError) as caught:
        parse_source({"zzzz": 1}, "a test")
    assert "Did you mean" not in str(caught.value)


def test_environment_variable_in_mixed_case_is_refused() -> None:
    with pytest.raises(SettingsError, match="NSA_PLUGIN_strict"):
        resolve(environ={"NSA_PLUGIN_strict": "0"})


def test_bad_value_in_the_environment_names_the_variable() -> None:
    with pytest.raises(SettingsError, match="NSA_PLUGIN_LOGITS_BUDGET_MB"):
        resolve(environ={"NSA_PLUGIN_LOGITS_BUDGET_MB": "lots"})


@pytest.mark.parametrize(
    "value", [{"NSA_PLUGIN_STRICT": "maybe"}, {"NSA_PLUGIN_STRIKT": "1"}, {"NSA_PLUGIN_strict": "0"}]
)
def test_a_refused_variable_says_how_to_get_rid_of_it(value: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match=rf"Correct it, or: unset {next(iter(value))}$"):
        resolve(environ=value)


def test_a_refused_flag_says_where_to_correct_it() -> None:
    with pytest.raises(SettingsError, match=r"Correct or remove it in --nsa-plugin-strict$"):
        parse_source({"strict": "maybe"}, "--nsa-plugin-strict")


def test_other_variables_are_left_alone() -> None:
    assert resolve(environ={"NSA": "1", "MY_NSA_PLUGIN_STRICT": "?", "VLLM_X": "y"}).settings == DEFAULTS


@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_variable_is_unset(value: str) -> None:
    """As `${STRICT:-}` of Docker Compose."""
    resolved = resolve(environ={"NSA_PLUGIN_STRICT": value, "NSA_PLUGIN_ENABLED": value})
    assert (resolved.settings, resolved.notes) == (DEFAULTS, ())


def test_variables_of_a_kubernetes_service_are_no_settings() -> None:
    service = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP", "PORT_80_TCP_ADDR")
    service += ("VLLM_SERVICE_HOST",)  # of one that is named nsa-plugin-vllm
    assert resolve(environ={f"NSA_PLUGIN_{name}": "tcp://10.0.0.1:80" for name in service}).settings == DEFAULTS
    with pytest.raises(SettingsError, match="unknown nsa-plugin setting 'port_able'"):
        resolve(environ={"NSA_PLUGIN_PORT_ABLE": "on"})


@pytest.mark.parametrize("config", ["enabled", [("enabled", True)], 3])
def test_source_that_is_no_mapping_is_refused(config: object) -> None:
    with pytest.raises(SettingsError, match="must be a mapping"):
        resolve(config=config, environ={})  # type: ignore[arg-type]


def test_first_source_wins_and_each_loser_is_told() -> None:
    resolved = resolve(
        flags={"logits_budget_mb": 1},
        config={"logits_budget_mb": 2, "large_q_rows": 7},
        environ={"NSA_PLUGIN_LOGITS_BUDGET_MB": "3", "NSA_PLUGIN_LARGE_Q_ROWS": "8", "NSA_PLUGIN_STRICT": "0"},
        flag_source="--flags",
        config_source="config.yaml",
    )
    assert resolved.settings == Settings(logits_budget_mb=1, large_q_rows=7, strict=False)
    assert resolved.sources["logits_budget_mb"] == "--flags"
    assert resolved.sources["large_q_rows"] == "config.yaml"
    assert resolved.sources["strict"] == "the environment"
    assert resolved.notes == (
        "logits_budget_mb is 1 from --flags; 2 from config.yaml is ignored",
        "logits_budget_mb is 1 from --flags; 3 from the environment is ignored",
        "large_q_rows is 7 from config.yaml; 8 from the environment is ignored",
    )


def test_sources_that_agree_make_no_note() -> None:
    resolved = resolve(flags={"strict": False}, config={"strict": "no"}, environ={"NSA_PLUGIN_STRICT": "0"})
    assert resolved.notes == ()
    assert resolved.settings.strict is False


def test_bad_value_is_refused_even_where_another_source_wins() -> None:
    with pytest.raises(SettingsError, match="NSA_PLUGIN_LOGITS_BUDGET_MB"):
        resolve(flags={"logits_budget_mb": 1}, environ={"NSA_PLUGIN_LOGITS_BUDGET_MB": "x"})


@pytest.mark.parametrize("source", ["flags", "config"])
def test_kill_switch_wins_over_every_source(source: str) -> None:
    resolved = resolve(**{source: {"enabled": True}, "environ": {"NSA_PLUGIN_ENABLED": "0"}})
    assert resolved.settings.enabled is False
    assert resolved.sources["enabled"] == "the environment"
    (note,) = resolved.notes
    assert "switched off by NSA_PLUGIN_ENABLED=0" in note
    assert "command line" in note or "configuration" in note


def test_environment_that_enables_does_not_win_over_a_flag_that_disables() -> None:
    resolved = resolve(flags={"enabled": False}, environ={"NSA_PLUGIN_ENABLED": "1"})
    assert resolved.settings.enabled is False
    assert resolved.notes == ("enabled is False from the engine's command line; True from the environment is ignored",)


@pytest.mark.parametrize("value", ["0", "false", " Off ", "no"])
def test_kill_switch_is_seen_without_reading_anything_else(value: str) -> None:
    assert killed({"NSA_PLUGIN_ENABLED": value, "NSA_PLUGIN_NONSENSE": "1"})


@pytest.mark.parametrize("environ", [{}, {"NSA_PLUGIN_ENABLED": "1"}, {"NSA_PLUGIN_ENABLED": "nonsense"}])
def test_without_the_kill_switch_nothing_is_killed(environ: dict[str, str]) -> None:
    assert not killed(environ)


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_PLUGIN_ENABLED", "1")
    assert resolve().settings.enabled
    assert not killed()
    monkeypatch.setenv("NSA_PLUGIN_ENABLED", "0")
    assert killed()


def test_the_engines_exact_path_is_kept_beside_its_library() -> None:
    given = {"config": {"prefill_backend": "flash_mla"}, "engine_paths": {"prefill_backend": "flashmla_kv"}}
    resolved = resolve(**given, environ={})
    assert (resolved.settings.prefill_backend, resolved.engine_paths) == (
        "flash_mla",
        {"prefill_backend": "flashmla_kv"},
    )
    overridden = resolve(**given, flags={"prefill_backend": "triton"}, environ={})
    assert (overridden.settings.prefill_backend, overridden.engine_paths) == ("triton", {})


def test_backends_are_the_libraries_that_support_the_op() -> None:
    sparse = ("flash_mla", "fa3", "trtllm", "flashinfer_sm120", "cuda", "triton", "reference")
    assert backends("prefill_backend") == ("auto", *sparse[:1], *sparse[2:])
    assert backends("decode_backend") == ("auto", *sparse)


def test_importing_settings_is_cheap() -> None:
    code = (
        "import sys, nsa_plugin.settings\n"
        "print(sorted({'torch', 'packaging', 'importlib.metadata', 'vllm', 'sglang'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("strict", "failure", "left"), [(True, True, False), (False, False, False), ("full", True, True)]
)
def test_only_strict_full_ends_the_start_for_what_is_left_to_stock(
    strict: bool | str, failure: bool, left: bool
) -> None:
    settings = Settings(strict=strict)
    assert settings.ends_start(PatchError("a method is gone")) is failure
    assert settings.ends_start(LeftToStockError("another cache")) is left


def test_the_reason_says_whether_it_is_a_failure() -> None:
    assert why_stock(LeftToStockError("another cache")) == "left to the stock engine: another cache"
    assert why_stock(PatchError("it is gone")) == "strict is off and the stock engine serves: it is gone"


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=5),
    st.lists(st.integers(), max_size=2),
    st.sampled_from(
        ["on", "OFF ", "auto", "full", "triton", "log", "x.jsonl", "x.json", "-1", "007", "1e3", "٣", "9" * 5000]
    ),
)


@property_settings(max_examples=400, deadline=None)
@given(st.sampled_from(Settings.names()), VALUES, st.sampled_from(["config", "flags", "environ"]))
def test_any_value_is_accepted_as_it_is_or_refused_by_name(name: str, value: Any, source: str) -> None:
    """Nothing is clamped: an accepted number is the number given, and what was accepted is accepted again."""
    key = f"NSA_PLUGIN_{name.upper()}" if source == "environ" else name
    value = str(value).replace("\0", "") if source == "environ" else value
    refused = ""
    try:
        found = getattr(resolve(**({"environ": {}} | {source: {key: value}})).settings, name)
    except SettingsError as error:
        refused = str(error)
    if refused:
        assert repr(name) in refused
        assert "allowed: " in refused
        assert "digits" not in refused
        return
    assert getattr(resolve(config={name: found}, environ={}).settings, name) == found
    if source == "environ" and not value.strip():
        assert found == getattr(DEFAULTS, name), "unset"
    elif isinstance(found, int) and not isinstance(found, bool) and not isinstance(value, bool):
        assert found == int(value)
