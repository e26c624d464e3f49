"""Settings: one frozen dataclass, resolved from the engine's flags, its config, the environment and defaults.

The first source that sets a value wins: engine flag, engine config, ``NSA_PLUGIN_<NAME>`` in the environment,
default. ``NSA_PLUGIN_ENABLED=0`` is the one exception: it is the kill switch and wins over everything. If two sources
disagree, `ResolvedSettings.notes` lists both, and the start-up report prints it.

The choices of `prefill_backend` and `decode_backend` come from the manifest of kernel libraries, which is plain data
below this module: `libraries` imports neither settings nor torch.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from nsa_plugin import switch
from nsa_plugin.errors import LeftToStockError, NsaPluginError, SettingsError
from nsa_plugin.libraries.capabilities import Op
from nsa_plugin.libraries.manifest import supporting

# The settings that select a kernel library, and the op that the library must support.
ENV_PREFIX, _FALSE = switch.ENV_PREFIX, switch.FALSE
BACKEND_OPS = {"prefill_backend": Op.SPARSE_MLA_PREFILL, "decode_backend": Op.SPARSE_MLA_DECODE}
TOKEN_SHARD_MODES = ("auto", "on", "off")
PORTABLE_MODES = ("auto", "on")
SPLIT_MODES = ("off", "on")
FAULTS = ("none", "shift_indices")
FULL = "full"
"""`strict`: what the plugin does not support ends the start, too."""
LEFT = "left to the stock engine"
"""The words of logs and the start-up report for a configuration that the plugin does not support."""

_TRUE = ("1", "true", "yes", "on")


def _parse_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.strip().lower() in _TRUE + _FALSE:
        return value.strip().lower() in _TRUE
    raise ValueError("true or false (1/0, yes/no, on/off)")


def _parse_strict(value: object) -> bool | str:
    if isinstance(value, str) and value.strip().lower() == FULL:
        return FULL
    try:
        return _parse_bool(value)
    except ValueError:
        raise ValueError("true or false (1/0, yes/no, on/off), or full") from None


def _is_number(text: str) -> bool:
    """Whether a text is a whole number; Python converts only so many digits."""
    return text.isdecimal() and len(text) <= 20


def _parse_count(low: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and value >= low:
            return value
        if isinstance(value, str) and _is_number(value.strip()) and int(value) >= low:
            return int(value)
        raise ValueError(f"a whole number of at least {low}")

    return parse


def _parse_max_kv(value: object) -> int:
    text = str(value).strip() if isinstance(value, (int, str)) and not isinstance(value, bool) else ""
    if text == "-1" or _is_number(text):
        return int(text)
    raise ValueError("-1 (the model's index_topk) or a whole number of tokens of at least 0")


def backends(setting: str) -> tuple[str, ...]:
    """The allowed values of `prefill_backend` or `decode_backend`: "auto" and the libraries of the manifest."""
    return ("auto", *supporting(BACKEND_OPS[setting]))


def _parse_choice(choices: Callable[[], tuple[str, ...]]) -> Callable[[object], str]:
    def parse(value: object) -> str:
        # YAML and JSON turn a bare on/off into a boolean; the user meant the word.
        if isinstance(value, bool):
            value = "on" if value else "off"
        if isinstance(value, str) and value.strip().lower() in choices():
            return value.strip().lower()
        raise ValueError("one of " + ", ".join(choices()))

    return parse


def _parse_trace(value: object) -> str:
    if isinstance(value, str) and value.strip().endswith(".jsonl"):
        return value.strip()
    try:
        return "log" if _parse_bool(value) else "off"
    except ValueError:
        word = value.strip().lower() if isinstance(value, str) else value
        if word in ("log", "off"):
            return str(word)
        raise ValueError("off, log, or a path that ends in .jsonl") from None


def _parse_path(value: object) -> str:
    if isinstance(value, str) and (not value or value.strip().endswith(".json")):
        return value.strip()
    raise ValueError("a path that ends in .json, or empty for none")


def _setting(default: Any, parse: Callable[[object], Any], allowed: str | Callable[[], str], doc: str) -> Any:
    return field(default=default, metadata={"parse": parse, "allowed": allowed, "doc": doc})


def _choice(default: str, choices: Callable[[], tuple[str, ...]], doc: str) -> Any:
    """A setting whose value is one of `choices()`, read at each use because the manifest may grow."""
    return _setting(default, _parse_choice(choices), lambda: ", ".join(choices()), doc)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a user. Units are in the name or in the field's documentation."""

    enabled: bool = _setting(
        False,
        _parse_bool,
        "true, false",
        "Serve sparse attention with the plugin. `NSA_PLUGIN_ENABLED=0` turns it off whatever else is set.",
    )
    strict: bool | str = _setting(
        True,
        _parse_strict,
        "true, false, full",
        "Refuse to start if a change to the engine cannot be applied and verified. "
        "False: run the stock engine instead and report why at start-up. `full`: also refuse to start with a "
        "configuration that the plugin does not support; otherwise the stock engine serves it, and the start-up "
        "report says why.",
    )
    prefill_backend: str = _choice(
        "auto",
        lambda: backends("prefill_backend"),
        "Kernel library for sparse prefill (phase extend). `auto`: the fastest measured library that supports the "
        "batch; without measurements, the first in the default order.",
    )
    decode_backend: str = _choice(
        "auto",
        lambda: backends("decode_backend"),
        "Kernel library for sparse decode, target_verify and draft_extend.",
    )
    mha_max_kv: int = _setting(
        -1,
        _parse_max_kv,
        "-1 or a number of tokens up to the model's index_topk",
        "Longest context, in tokens, that is prefilled with dense multi-head attention. "
        "-1: the model's index_topk. 0: never. More than index_topk is an error: dense and sparse attention "
        "agree only while the indexer selects every token.",
    )
    logits_budget_mb: int = _setting(
        512,
        _parse_count(1),
        "a number of MiB, at least 1",
        "Memory limit, in MiB, of the indexer's float32 logits at any one time. Under SGLang a DeepSeek-V4 prefill "
        "also counts the buffers of its execution path. A quarter of the free memory is the limit if that is less.",
    )
    token_shard: str = _choice(
        "auto",
        lambda: TOKEN_SHARD_MODES,
        "Reshard attention from heads to query tokens across the tensor-parallel ranks (head/token all-to-all). `on` "
        "is an error, with the reason, if resharding is not supported.",
    )
    large_q_rows: int = _setting(
        0,
        _parse_count(0),
        "0 or a number of query tokens, at least 1",
        "DeepSeek-V4: a prefill with more query tokens than this uses the sparse prefill kernel instead of the "
        "decode kernel. 0: the row limit of the installed FlashMLA, if it has one.",
    )
    trace: str = _setting(
        "off",
        _parse_trace,
        "off, log, PATH.jsonl",
        "`log`: log each kind of plan once, with its reasons. A path that ends in .jsonl: append every batch to that "
        "file, as one JSON line with its requests, and compare the ranks' rows before each head/token all-to-all.",
    )
    report: str = _setting(
        "",
        _parse_path,
        "empty, PATH.json",
        "Also write the start-up report to this file, as JSON.",
    )
    portable: str = _choice(
        "auto",
        lambda: PORTABLE_MODES,
        "The portable path serves GPUs that FlashMLA and DeepGEMM do not support (SM80, SM86, SM89, SM120) with "
        "kernels of the plugin. `auto`: on those GPUs. `on`: on any GPU, as if it were SM86 (99 KiB of shared memory, "
        "no fp8 instructions); slow, for tests. vLLM 0.28 and SGLang 0.5.16, or later; DeepSeek-V4 under vLLM 0.33 "
        "on SM120, and with `on`.",
    )
    split_prefill: str = _choice(
        "off",
        lambda: SPLIT_MODES,
        "SGLang 0.5.16 and later, DeepSeek-V3.2 and GLM-5: short prompts attend densely even in a prefill with long "
        "ones, and such a prefill runs eagerly. Off by default, because less was gained with it where it was timed. "
        "vLLM's prefills are always decided request by request.",
    )
    fault: str = _choice(
        "none",
        lambda: FAULTS,
        "For tests and demonstrations only: `shift_indices` attends to deliberately wrong tokens, to prove that a "
        "comparison detects them. Every start logs a warning.",
    )

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls))

    def ends_start(self, error: NsaPluginError) -> bool:
        """Whether an error ends the start of the engine, rather than leaving the serving to the stock engine."""
        return self.strict == FULL or (bool(self.strict) and not isinstance(error, LeftToStockError))

    @classmethod
    def allowed(cls, name: str) -> str:
        """The allowed values of a setting, as text."""
        words: str | Callable[[], str] = cls.__dataclass_fields__[name].metadata["allowed"]
        return words if isinstance(words, str) else words()


@dataclass(frozen=True)
class ResolvedSettings:
    """Settings from all sources.

    Attributes:
        settings: the values.
        sources: the source of each value, by setting.
        notes: a sentence for every source that another one overrides.
        engine_paths: the engine's name for the chosen execution path, by backend setting, where the user chose it with
            the engine's flag ("flashmla_kv", of which `prefill_backend` keeps the library, "flash_mla").
    """

    settings: Settings
    sources: Mapping[str, str]
    notes: tuple[str, ...] = ()
    engine_paths: Mapping[str, str] = field(default_factory=dict)


def _unknown(name: str, source: str) -> SettingsError:
    close = difflib.get_close_matches(name, Settings.names(), n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return SettingsError(
        f"unknown nsa-plugin setting {name!r} in {source}.{hint} Allowed: {', '.join(Settings.names())}. "
        f"{_next_step(source)}"
    )


def _next_step(source: str) -> str:
    """What to do about a setting that is refused; an environment variable is in the parentheses of its source."""
    variable = re.fullmatch(rf"the environment \(({ENV_PREFIX}\S+)\)", source, re.IGNORECASE)
    return f"Correct it, or: unset {variable[1]}" if variable else f"Correct or remove it in {source}"


def parse_source(values: Mapping[str, object], source: str) -> dict[str, Any]:
    """Parse the values of one source.

    Raises:
        SettingsError: a name is unknown or a value is not allowed; the message names the source and the setting.
    """
    if not isinstance(values, Mapping):
        raise SettingsError(
            f"{source} must be a mapping of settings to values, got {values!r}. "
            f"Allowed settings: {', '.join(Settings.names())}. {_next_step(source)}"
        )
    specs = {f.name: f.metadata for f in fields(Settings)}
    parsed: dict[str, Any] = {}
    for name, value in values.items():
        if name not in specs:
            raise _unknown(str(name), source)
        try:
            parsed[name] = specs[name]["parse"](value)
        except ValueError as error:
            raise SettingsError(
                f"nsa-plugin setting {name!r} in {source} is {value!r}; allowed: {error}. {_next_step(source)}"
            ) from None
    return parsed


_OF_KUBERNETES = re.compile(
    ENV_PREFIX + r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_[A-Z]+(_(PROTO|PORT|ADDR))?)?)"
)
"""Variables that Kubernetes sets in every container next to a Service whose name is or begins with nsa-plugin."""


def _environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """The settings in the environment; an empty variable counts as unset, as Docker Compose passes one."""
    found: dict[str, Any] = {}
    for key, value in environ.items():
        if not key.startswith(ENV_PREFIX) or not value.strip() or _OF_KUBERNETES.fullmatch(key):
            continue
        name = key.removeprefix(ENV_PREFIX).lower()
        source = f"the environment ({key})"
        if key != key.upper():
            raise _unknown(key, source)
        found |= parse_source({name: value}, source)
    return found


def resolve(
    *,
    flags: Mapping[str, object] | None = None,
    config: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    engine_paths: Mapping[str, str] | None = None,
    flag_source: str = "the engine's command line",
    config_source: str = "the engine's configuration",
) -> ResolvedSettings:
    """Resolve the settings from all sources; the first source that sets a value wins.

    Args:
        flags: values given as engine flags, by setting name; only those that the user gave.
        config: values given in the engine's configuration.
        environ: the process environment; `os.environ` if None.
        engine_paths: the engine's names of execution paths from which values of `config` were made, by setting.

    Raises:
        SettingsError: an unknown name or a value that is not allowed, in any source, overridden or not.
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
    exact = {name: path for name, path in (engine_paths or {}).items() if origin[name] == config_source}
    return ResolvedSettings(Settings(**values), origin, tuple(notes), exact)


def why_stock(error: NsaPluginError) -> str:
    """Why the stock engine serves although the plugin is enabled: a sentence for the log and the start-up report."""
    if isinstance(error, LeftToStockError):
        return f"{LEFT}: {error}"
    return f"strict is off and the stock engine serves: {error}"
