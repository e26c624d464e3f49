"""Settings: one frozen dataclass, resolved from the engine's flags, its config, the environment and defaults.

The first source that names a setting wins: engine flag, engine config, ``NSA_PLUGIN_<NAME>``
in the environment, default. ``NSA_PLUGIN_ENABLED=0`` is the one exception: it is the kill
switch and wins over everything. Where two sources disagree, the winner and the loser are both
kept in `ResolvedSettings.notes`, which the start-up report prints.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from nsa_plugin.errors import SettingsError

ENV_PREFIX = "NSA_PLUGIN_"
PREFILL_BACKENDS = ("auto", "flash_mla", "trtllm", "cuda", "triton", "reference")
DECODE_BACKENDS = ("auto", "flash_mla", "fa3", "trtllm", "cuda", "triton", "reference")
TOKEN_SHARD_MODES = ("auto", "on", "off")
FAULTS = ("none", "shift_indices")

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def _parse_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.strip().lower() in _TRUE + _FALSE:
        return value.strip().lower() in _TRUE
    raise ValueError("true or false (1/0, yes/no, on/off)")


def _parse_count(low: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and value >= low:
            return value
        if isinstance(value, str) and value.strip().isdecimal() and int(value) >= low:
            return int(value)
        raise ValueError(f"a whole number of at least {low}")

    return parse


def _parse_max_kv(value: object) -> int:
    text = str(value).strip() if isinstance(value, (int, str)) and not isinstance(value, bool) else ""
    if text == "-1" or text.isdecimal():
        return int(text)
    raise ValueError("-1 (the model's index_topk) or a whole number of tokens of at least 0")


def _parse_choice(choices: tuple[str, ...]) -> Callable[[object], str]:
    def parse(value: object) -> str:
        # YAML and JSON turn a bare on/off into a boolean; the word is what was meant.
        if isinstance(value, bool):
            value = "on" if value else "off"
        if isinstance(value, str) and value.strip().lower() in choices:
            return value.strip().lower()
        raise ValueError("one of " + ", ".join(choices))

    return parse


def _parse_trace(value: object) -> str:
    if isinstance(value, str) and value.strip().endswith(".jsonl"):
        return value.strip()
    try:
        return "log" if _parse_bool(value) else "off"
    except ValueError:
        if value in ("log", "off"):
            return str(value)
        raise ValueError("off, log, or a path that ends in .jsonl") from None


def _parse_path(value: object) -> str:
    if isinstance(value, str) and (not value or value.strip().endswith(".json")):
        return value.strip()
    raise ValueError("a path that ends in .json, or empty for none")


def _setting(default: Any, parse: Callable[[object], Any], allowed: str, doc: str) -> Any:
    return field(default=default, metadata={"parse": parse, "allowed": allowed, "doc": doc})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a user may choose. Units are in the name or in the field's documentation."""

    enabled: bool = _setting(
        False,
        _parse_bool,
        "true, false",
        "Serve sparse attention through the plugin. `NSA_PLUGIN_ENABLED=0` switches it off whatever else is set.",
    )
    strict: bool = _setting(
        True,
        _parse_bool,
        "true, false",
        "Refuse to start when a change to the engine cannot be applied and verified. "
        "False: serve the stock engine instead and say so in the start-up report.",
    )
    prefill_backend: str = _setting(
        "auto",
        _parse_choice(PREFILL_BACKENDS),
        ", ".join(PREFILL_BACKENDS),
        "Kernel library of sparse prefill (phase extend). `auto` takes the first that carries the batch, those that "
        "were measured in the order of their times.",
    )
    decode_backend: str = _setting(
        "auto",
        _parse_choice(DECODE_BACKENDS),
        ", ".join(DECODE_BACKENDS),
        "Kernel library of sparse decode, target_verify and draft_extend.",
    )
    mha_max_kv: int = _setting(
        -1,
        _parse_max_kv,
        "-1 or a number of tokens up to the model's index_topk",
        "Longest context, in tokens, whose prefill runs as dense multi-head attention. "
        "-1: the model's index_topk. 0: never. More than index_topk is an error: dense and sparse attention "
        "agree only while the indexer would select every token.",
    )
    logits_budget_mb: int = _setting(
        512,
        _parse_count(1),
        "a number of MiB, at least 1",
        "Most memory, in MiB, that the indexer's float32 logits may take at once; of a DeepSeek-V4 prefill, "
        "with what its route holds. A quarter of the free memory is the limit where that is less.",
    )
    token_shard: str = _setting(
        "auto",
        _parse_choice(TOKEN_SHARD_MODES),
        ", ".join(TOKEN_SHARD_MODES),
        "Trade attention heads for tokens across the ranks of a tensor-parallel group. `on` where it cannot "
        "work is an error that says why.",
    )
    large_q_rows: int = _setting(
        0,
        _parse_count(0),
        "0 or a number of query rows, at least 1",
        "DeepSeek-V4: a prefill of more query rows than this takes the sparse prefill kernel instead of the "
        "decode kernel. 0: the row limit of the installed FlashMLA, if it has one.",
    )
    trace: str = _setting(
        "off",
        _parse_trace,
        "off, log, PATH.jsonl",
        "`log`: write each distinct plan to the log once, with its reasons. A path that ends in .jsonl: append "
        "every batch to that file, request by request, as JSON lines, and compare the ranks' rows before each trade of "
        "heads for tokens.",
    )
    report: str = _setting(
        "",
        _parse_path,
        "empty, PATH.json",
        "Write the start-up report to this file as JSON, beside the log.",
    )
    fault: str = _setting(
        "none",
        _parse_choice(FAULTS),
        ", ".join(FAULTS),
        "For tests and demonstrations only: `shift_indices` attends to deliberately wrong tokens, so that a "
        "comparison can show that it would notice. Warned about at every start.",
    )

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls))


@dataclass(frozen=True)
class ResolvedSettings:
    """Settings with the source of each value and a sentence for every disagreement."""

    settings: Settings
    sources: Mapping[str, str]
    notes: tuple[str, ...] = ()


def _unknown(name: str, source: str) -> SettingsError:
    close = difflib.get_close_matches(name, Settings.names(), n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return SettingsError(
        f"unknown nsa-plugin setting {name!r} in {source}.{hint} Allowed: {', '.join(Settings.names())}"
    )


def parse_source(values: Mapping[str, object], source: str) -> dict[str, Any]:
    """Values of one source, each parsed to its type.

    Raises:
        SettingsError: a name is unknown or a value is not allowed; names the source and the setting.
    """
    if not isinstance(values, Mapping):
        raise SettingsError(
            f"{source} must be a mapping of settings to values, got {values!r}. "
            f"Allowed settings: {', '.join(Settings.names())}"
        )
    specs = {f.name: f.metadata for f in fields(Settings)}
    parsed: dict[str, Any] = {}
    for name, value in values.items():
        if name not in specs:
            raise _unknown(str(name), source)
        try:
            parsed[name] = specs[name]["parse"](value)
        except ValueError as error:
            raise SettingsError(f"nsa-plugin setting {name!r} in {source} is {value!r}; allowed: {error}") from None
    return parsed


def _environment(environ: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in environ.items():
        if not key.startswith(ENV_PREFIX):
            continue
        name = key.removeprefix(ENV_PREFIX).lower()
        source = f"the environment ({key})"
        if key != key.upper():
            raise _unknown(key, source)
        found |= parse_source({name: value}, source)
    return found


def killed(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the kill switch, ``NSA_PLUGIN_ENABLED=0``, is set; never raises."""
    value = (os.environ if environ is None else environ).get(f"{ENV_PREFIX}ENABLED", "")
    return value.strip().lower() in _FALSE


def resolve(
    *,
    flags: Mapping[str, object] | None = None,
    config: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    flag_source: str = "the engine's command line",
    config_source: str = "the engine's configuration",
) -> ResolvedSettings:
    """Settings from all sources, the first that names a setting wins.

    Args:
        flags: values given as engine flags, by setting name; only those that the user gave.
        config: values given in the engine's configuration.
        environ: the process environment; `os.environ` if None.

    Raises:
        SettingsError: an unknown name or a value that is not allowed, in any source, used or not.
    """
    environment = _environment(os.environ if environ is None else environ)
    sources = (
        (flag_source, parse_source(flags or {}, flag_source)),
        (config_source, parse_source(config or {}, config_source)),
        ("the environment", environment),
    )
    values: dict[str, Any] = {}
    origin: dict[str, str] = {name: "default" for name in Settings.names()}
    notes: list[str] = []
    for source, given in sources:
        for name, value in given.items():
            if name not in values:
                values[name], origin[name] = value, source
            elif values[name] != value:
                notes.append(f"{name} is {values[name]!r} from {origin[name]}; {value!r} from {source} is ignored")
    if environment.get("enabled") is False and values.get("enabled"):
        notes = [note for note in notes if not note.startswith("enabled ")]
        notes.append(f"switched off by {ENV_PREFIX}ENABLED=0, which wins over {origin['enabled']}")
        values["enabled"], origin["enabled"] = False, "the environment"
    return ResolvedSettings(Settings(**values), origin, tuple(notes))
