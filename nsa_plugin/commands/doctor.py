"""``nsa-plugin doctor``: what is installed here, what works and what does not, and why."""

from __future__ import annotations

import argparse
import platform
from dataclasses import asdict, dataclass
from importlib import metadata, util
from typing import Any

from nsa_plugin import __version__
from nsa_plugin.commands.engines import ENGINES, Engine, holds
from nsa_plugin.commands.output import add_json, print_json
from nsa_plugin.decision.dispatch import decide
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.errors import NsaPluginError, SettingsError
from nsa_plugin.libraries.devices import DeviceProfile
from nsa_plugin.libraries.probe import probe
from nsa_plugin.patches.ledger import Need
from nsa_plugin.settings import ResolvedSettings, Settings, killed, resolve
from nsa_plugin.tools.terminal import console, table

EPILOG = """The check holds when at least one installed engine can serve here with the plugin: its version is
supported, the plugin's entry point is installed and allowed, every object of the engine that the plugin
changes is where it is expected, and the NSA_PLUGIN_* variables are valid. Engines are not imported."""


@dataclass(frozen=True)
class EngineState:
    """One engine: installed or not, and why the plugin could not serve there."""

    engine: str
    distribution: str
    version: str
    supported: str
    ready: bool
    reason: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"{EPILOG}\n\n{parser.epilog}"
    add_json(parser)


def engine_state(engine: Engine, device: DeviceProfile) -> EngineState:
    cpu = device.kind == "cpu"
    supported = engine.supported(cpu=cpu)
    found = engine.installed()
    if found is None:
        return EngineState(engine.name, "", "", supported, False, "not installed")
    distribution, version = found
    where = "a CPU" if cpu else "a GPU"
    if not holds(supported, version):
        reason: str | None = f"version {version} is outside {supported}, the versions supported on {where}"
    else:
        here = {Need.CPU} if cpu else {Need.GPU, Need.GPU_V4}
        missing = engine.targets_missing(version, {Need.BOOTSTRAP, Need.ENABLED, *here})
        reason = engine.not_loaded() or "; ".join(missing) or engine.not_on(device)
    return EngineState(engine.name, distribution, str(version), supported, reason is None, reason or "ready")


# Batches that stand for what an engine asks: a short prompt, a long one, and decoding.
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
    "V4 fp8": ModelShape(
        family="v4", kv_layout="v4_fp8", qk_nope_head_dim=448, v_head_dim=512, index_topk=512, sliding_window=128
    ),
}


def routes(device: DeviceProfile, settings: Settings) -> list[dict[str, Any]]:
    """What `decide` says here for each model and batch: the route, or why there is none."""
    rows: list[dict[str, Any]] = []
    for model_name, model in _MODELS.items():
        for batch_name, batch in _BATCHES.items():
            row: dict[str, Any] = {"model": model_name, "batch": batch_name}
            try:
                plan = decide(model, batch, device, settings)
                row |= {"works": True, "route": str(plan.attention), "provider": plan.provider, "reason": ""}
            except NsaPluginError as error:
                row |= {"works": False, "route": "", "provider": "", "reason": str(error)}
            rows.append(row)
    return rows


def _environment() -> tuple[ResolvedSettings, str]:
    """The settings that the environment gives, and what is wrong with it ("" if nothing)."""
    try:
        return resolve(), ""
    except SettingsError as error:
        return resolve(environ={}), str(error)


def run(args: argparse.Namespace) -> int:
    device = probe()
    resolved, environment_error = _environment()
    states = [engine_state(engine, device) for engine in ENGINES.values()]
    ok = any(state.ready for state in states) and not environment_error
    rows = routes(device, resolved.settings)
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
        _show(device, resolved, environment_error, states, rows, ok)
    return 0 if ok else 1


def _torch_version() -> str:
    return metadata.version("torch") if util.find_spec("torch") else ""


def _show(
    device: DeviceProfile,
    resolved: ResolvedSettings,
    environment_error: str,
    states: list[EngineState],
    rows: list[dict[str, Any]],
    ok: bool,
) -> None:
    out = console()
    out.print(
        f"nsa-plugin {__version__}, Python {platform.python_version()}, torch {_torch_version() or 'not installed'}"
    )
    out.print(f"device: {device.describe()}\n")

    engines = table("Engines", "engine", "installed", "supported here", "state")
    for state in states:
        installed = f"{state.distribution} {state.version}".strip() or "-"
        engines.add_row(state.engine, installed, state.supported, state.reason)
    out.print(engines)

    libraries = table("Kernel libraries", "library", "installed", "state")
    for library in device.libraries.values():
        operations = ", ".join(dict.fromkeys(str(capability.op) for capability in library.capabilities))
        installed = f"{library.distribution} {library.version}".strip() or "-"
        libraries.add_row(library.name, installed, operations if library.available else library.reason)
    out.print(libraries)

    routed = table("Routes that the installed kernels carry here", "model", "batch", "route")
    for row in rows:
        route = f"{row['route']} by {row['provider']}" if row["works"] else f"not here: {row['reason']}"
        routed.add_row(row["model"], row["batch"], route)
    out.print(routed)

    given = [
        f"{name}={getattr(resolved.settings, name)!r}"
        for name, source in resolved.sources.items()
        if source != "default"
    ]
    if environment_error:
        out.print(f"environment: {environment_error}")
    elif killed():
        out.print("environment: NSA_PLUGIN_ENABLED=0, the kill switch: no engine uses the plugin")
    elif given:
        out.print(f"environment: {', '.join(given)}")
    ready = [state.engine for state in states if state.ready]
    if ok:
        out.print(f"ok: {' and '.join(ready)} can serve here with the plugin")
    else:
        out.print(
            "not ok: " + (environment_error or "no installed engine can serve here with the plugin; see Engines above")
        )
