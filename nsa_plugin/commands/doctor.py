"""``nsa-plugin doctor``: what is installed here, what works, and why something does not work."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata, util
from itertools import product
from typing import Any

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

from nsa_plugin import __version__
from nsa_plugin.commands.engines import ENGINES, Engine, holds
from nsa_plugin.commands.explain import FAMILY_DIMS
from nsa_plugin.commands.output import add_json, add_verbose, print_json
from nsa_plugin.decision.dispatch import decide
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.errors import NsaPluginError, SettingsError
from nsa_plugin.libraries.devices import DeviceProfile, InstalledLibrary
from nsa_plugin.libraries.manifest import MANIFEST
from nsa_plugin.libraries.probe import probe
from nsa_plugin.patches.ledger import Need
from nsa_plugin.settings import ResolvedSettings, Settings, resolve
from nsa_plugin.switch import killed
from nsa_plugin.telemetry import check_files
from nsa_plugin.tools.terminal import console, table

EPILOG = """The check passes if at least one installed engine can serve a model here
with the plugin. That takes: a supported version of the engine; the plugin's
entry point, installed and allowed; every object that the plugin changes where
the ledger expects it; valid NSA_PLUGIN_* variables that do not turn the plugin
off; a supported attention path for every batch of the model. Engines are not
imported."""


@dataclass(frozen=True)
class EngineState:
    """Whether the plugin can serve in one engine here.

    Attributes:
        engine: its name.
        distribution, version: the installed one; "" if there is none.
        supported: the versions that the plugin supports on this kind of device.
        ready: the plugin can serve at least one model.
        reason: "ready", or why it cannot.
        models: the models that it can serve.
        refused: why it cannot serve the others, by model; empty if it serves none for another reason.
        fix: a shell command that changes `reason`; "" if it is ready or nothing here helps.
    """

    engine: str
    distribution: str
    version: str
    supported: str
    ready: bool
    reason: str
    models: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    fix: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"{EPILOG}\n\n{parser.epilog}"
    add_json(parser)
    add_verbose(parser, "every kernel library and the attention path of typical batches")


def engine_state(engine: Engine, device: DeviceProfile, rows: Sequence[Mapping[str, Any]]) -> EngineState:
    """The state of an engine on a device; `rows` are those of `routes`."""
    cpu = device.kind == "cpu"
    supported = engine.supported(cpu=cpu, portable=engine.portable(device))
    found = engine.installed()
    # The last distribution is the one for CPUs.
    install = f'pip install "{engine.distributions[-1 if cpu else 0]}{supported}"'
    if found is None:
        fix = "" if engine.not_on(device) else install
        return EngineState(engine.name, "", "", supported, False, "not installed", fix=fix)
    distribution, version = found
    reason: str | None
    fix = ""
    if not holds(supported, version):
        reason = f"version {version} is outside {supported}, the versions supported on {'a CPU' if cpu else 'a GPU'}"
        fix = "" if engine.not_on(device) else install
    elif device.kind == "unknown":
        reason, fix = device.name, install
    else:
        missing = engine.targets_missing(version, set(Need) - set(engine.needs_elsewhere(device)))
        not_loaded = engine.not_loaded()
        reason = not_loaded or "; ".join(missing) or engine.not_on(device)
        fix = _loading_fix(engine) if not_loaded else ""
    whys = {name: _refusal(engine, device, name, rows) for name in _MODELS}
    refused = {name: why for name, why in whys.items() if why is not None}
    models = tuple(name for name in _MODELS if name not in refused)
    if reason is None and not models:
        reason = "; ".join(dict.fromkeys(refused.values()))
    served, others = ((), {}) if reason else (models, refused)
    return EngineState(
        engine.name, distribution, str(version), supported, reason is None, reason or "ready", served, others, fix
    )


def _loading_fix(engine: Engine) -> str:
    """The command that makes an engine load the plugin: allow it, or install its entry point."""
    allowed = os.environ.get(engine.allow_list)
    if allowed is None or "nsa_plugin" in allowed:
        return "pip install --force-reinstall --no-deps nsa-plugin"
    return f"export {engine.allow_list}={','.join(filter(None, [allowed, 'nsa_plugin']))}"


def _refusal(engine: Engine, device: DeviceProfile, name: str, rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Why an engine cannot serve a model on a device, or None."""
    unsupported = engine.not_for(_MODELS[name], device)
    return unsupported or next((row["reason"] for row in rows if row["model"] == name and not row["works"]), None)


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
    "V4 fp8": ModelShape(family="v4", kv_layout="v4_fp8", **FAMILY_DIMS["v4"]),
}


def routes(device: DeviceProfile, settings: Settings) -> list[dict[str, Any]]:
    """The attention path that `decide` picks for each model and batch, or why there is none."""
    rows: list[dict[str, Any]] = []
    for (model_name, model), (batch_name, batch) in product(_MODELS.items(), _BATCHES.items()):
        row: dict[str, Any] = {"model": model_name, "batch": batch_name}
        try:
            plan = decide(model, batch, device, settings)
            row |= {"works": True, "route": str(plan.attention), "provider": plan.provider, "reason": ""}
        except NsaPluginError as error:
            row |= {"works": False, "route": "", "provider": "", "reason": str(error)}
        rows.append(row)
    return rows


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


def run(args: argparse.Namespace) -> int:
    device = probe()
    resolved, environment_error = _environment()
    rows = routes(device, resolved.settings)
    states = [engine_state(engine, device, rows) for engine in ENGINES.values()]
    ok = any(state.ready for state in states) and not environment_error and not killed()
    if args.json:
        print_json(
            {
                "ok": ok,
                "version": __version__,
                "python": platform.python_version(),
                "torch": _torch_version(),
                "engines": [asdict(state) for state in states],
                "device": device.as_dict(),
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
        _show(out, device, resolved, environment_error, states, ok)
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


_ENABLE = {
    "vllm": """vllm serve MODEL --additional-config '{"nsa_plugin": {"enabled": true}}'""",
    "sglang": "python -m sglang.launch_server --model-path MODEL --enable-nsa-plugin",
}


def _show(
    out: Console,
    device: DeviceProfile,
    resolved: ResolvedSettings,
    environment_error: str,
    states: list[EngineState],
    ok: bool,
) -> None:
    """Print one screen: what serves here, what does not, and the commands that change it."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    describe, _, kernels = device.describe().partition(", kernels: ")
    rows.add_row("device", describe)
    if kernels:
        rows.add_row("kernels", kernels)
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
        off = "a setting is wrong" if environment_error else "the plugin is switched off" if killed() else ""
        said = f"would serve, but {off}: see below" if state.ready and off else state.reason
        rows.add_row("", "")
        rows.add_row(
            state.engine, f"{installed}: {said}" if installed else f"{said}; supported here: {state.supported}"
        )
        if state.models and not off:
            rows.add_row("", f"serves {', '.join(state.models)}")
        for model, why in () if off else state.refused.items():
            rows.add_row("", f"not {model}: {why.partition('. ')[0]}")
        if state.fix:
            rows.add_row("", f"fix: {state.fix}")
        if state.ready and not off and state.engine in _ENABLE:
            rows.add_row("", f"enable: {_ENABLE[state.engine]}")
    out.print(rows)
    out.print()
    if ok:
        can = "; ".join(f"{state.engine} can serve {', '.join(state.models)}" for state in states if state.ready)
        out.print(f"ok: {can} here with the plugin", style="green")
        return
    reason = environment_error or "no installed engine can serve here with the plugin"
    if killed() and not environment_error:
        reason = (
            "NSA_PLUGIN_ENABLED=0 turns the plugin off in every engine (kill switch)\nfix: unset NSA_PLUGIN_ENABLED"
        )
    out.print(f"not ok: {reason}", style="red")


def _show_all(
    out: Console, device: DeviceProfile, states: Sequence[EngineState], rows: Sequence[Mapping[str, Any]]
) -> None:
    engines = [(one.engine, _installed(one) or "-", one.supported, one.reason) for one in states]
    out.print(table("Engines", "engine", "installed", "supported here", "state", rows=engines))

    libraries = table("Kernel libraries", "library", "installed", "state")
    for library in device.libraries.values():
        operations = ", ".join(dict.fromkeys(str(capability.op) for capability in library.capabilities))
        state = operations if library.available else library.reason
        libraries.add_row(library.name, _installed(library) or "-", state)
    out.print(libraries)

    paths = (
        f"{row['route']} with {row['provider']}" if row["works"] else f"not supported: {row['reason']}" for row in rows
    )
    routed = [(row["model"], row["batch"], path) for row, path in zip(rows, paths, strict=True)]
    title = "Attention paths here, where the engine supports the model"
    out.print(table(title, "model", "batch", "path", rows=routed))


def _installed(one: EngineState | InstalledLibrary) -> str:
    """The distribution and its version; "" if it is not installed."""
    return f"{one.distribution} {one.version}".strip()
