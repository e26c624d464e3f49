"""The plugin's flags on SGLang's command line, and how the scheduler processes get them.

SGLang drops flags that are not fields of ServerArgs, so one environment variable passes them to the processes that
SGLang starts. Its name does not begin with ``NSA_PLUGIN_``, the prefix of the user's variables.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from nsa_plugin import settings, switch
from nsa_plugin.errors import SettingsError
from nsa_plugin.settings import BACKEND_OPS, ResolvedSettings, Settings, backends, parse_source

ENABLE_FLAG = "--enable-nsa-plugin"
VARIABLE = switch.VARIABLE
FLAG_SOURCE = "the command line"
ENGINE_SOURCE = "SGLang's flag"

# SGLang's names of attention kernels -> their libraries. The plugin picks a library's kernel for each batch. It does
# not support tilelang, aiter, intel_xpu and flashinfer_sparse_mla.
LIBRARY_OF = {
    "flashmla_sparse": "flash_mla",
    "flashmla_sparse_q8": "flash_mla",
    "flashmla_kv": "flash_mla",
    "flashmla_auto": "flash_mla",
    "fa3": "fa3",
    "trtllm": "trtllm",
    "triton": "triton",
    "triton_sparse_mla": "triton",
}


GLM, V4 = "GlmMoeDsaForCausalLM", "DeepseekV4"
SM120_DTYPES = {"None": "fp8_e4m3", "auto": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "bf16": "bf16", "bfloat16": "bf16"}
"""What SGLang makes of --kv-cache-dtype on SM120."""
SM90_PATHS = {"fp8_e4m3": ("flashmla_kv", "flashmla_kv"), "bf16": ("flashmla_sparse", "fa3")}
"""The paths of prefills and of steps that SGLang chooses on SM90."""


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return ENABLE_FLAG if name == "enabled" else "--nsa-plugin-" + name.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting; a value that is not allowed ends the parse with an error."""
    group = parser.add_argument_group("nsa-plugin")
    for spec in fields(Settings):
        text = spec.metadata["doc"]
        if spec.name == "enabled":
            group.add_argument(ENABLE_FLAG, action="store_true", help=_literal(text))
        else:
            text += f" Allowed: {Settings.allowed(spec.name)}. Default: {spec.default!r}."
            group.add_argument(flag_of(spec.name), type=_checked(spec.name), metavar="VALUE", help=_literal(text))


def _literal(text: str) -> str:
    """Escape a help text for argparse, which formats it."""
    return text.replace("%", "%%")


def _checked(name: str) -> Callable[[str], str]:
    """Return an argparse type that checks a value and keeps its text."""

    def check(text: str) -> str:
        try:
            parse_source({name: text}, flag_of(name))
        except SettingsError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return check


def given(namespace: Any) -> dict[str, str]:
    """Return the settings that the user gave as flags: {name: text}."""
    found = {name: getattr(namespace, f"nsa_plugin_{name}", None) for name in Settings.names()}
    values = {name: value for name, value in found.items() if value is not None}
    if getattr(namespace, "enable_nsa_plugin", False):
        values["enabled"] = "true"
    return values


def engine_backends(server_args: Any) -> dict[str, tuple[str, str]]:
    """Return SGLang's flags that the user gave and that name a setting's backend: {setting: (flag, value)}.

    Args:
        server_args: ServerArgs or an argparse namespace, before SGLang fills in defaults.
    """
    found: dict[str, tuple[str, str]] = {}
    for name in BACKEND_OPS:
        for prefix in ("dsa", "nsa"):
            value = getattr(server_args, f"{prefix}_{name}", None)
            if value is not None:
                found[name] = (f"--{prefix}-{name.replace('_', '-')}", str(value))
                break
    return found


def run_trtllm(server_args: Any, chosen: Settings, device_sm: Callable[[], int]) -> dict[str, tuple[str, str]]:
    """Set SGLang's flag for each phase whose setting is trtllm.

    Only SGLang's own code runs these kernels, and lays an fp8 cache out for them. A flag that the user gave stays, and
    on another GPU than SM100 none is set: there the setting is refused.

    Args:
        server_args: see `engine_backends`.
        device_sm: returns the SM version of the GPU.

    Returns:
        The flags that were set, as `engine_backends` does.
    """
    asked = [name for name in BACKEND_OPS if getattr(chosen, name) == "trtllm"]
    if not asked or device_sm() // 10 != 10:
        return {}
    found = {}
    for name in asked:
        fields_of = (f"{prefix}_{name}" for prefix in ("dsa", "nsa"))
        field_name = next((one for one in fields_of if hasattr(server_args, one)), None)
        if field_name is not None and getattr(server_args, field_name) is None:
            setattr(server_args, field_name, "trtllm")
            found[name] = ("--" + field_name.replace("_", "-"), "trtllm")
    return found


def run_portable(server_args: Any, config: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """On SM120, set SGLang's flags for the paths and the cache that it has on SM90.

    SGLang chooses TRT-LLM's kernels there, which only SM100 has, and lays an fp8 cache out for them without scales. The
    plugin attends in place of the paths that are set here, as on other GPUs of the portable path. A flag that the user
    gave stays. What SGLang 0.5.23 serves on SM120 by itself stays too (`arg_groups/overrides.py`): GLM-5 over an fp8
    cache.

    Args:
        server_args: see `engine_backends`.
        config: of the model, which has sparse attention.

    Returns:
        The flags that were set, as `engine_backends` does.
    """
    dtype = SM120_DTYPES.get(str(getattr(server_args, "kv_cache_dtype", None)))
    architecture = (config.get("architectures") or [""])[0]
    if dtype is None or (dtype == "fp8_e4m3" and architecture == GLM) or architecture.startswith(V4):
        return {}
    # SGLang chooses for these whatever the GPU is.
    shared = (getattr(server_args, "dcp_size", None) or 1) > 1
    if shared or config.get("learnable_sink") or getattr(server_args, "enable_hisparse", False):
        return {}
    found = {}
    for name, value in zip(BACKEND_OPS, SM90_PATHS[dtype], strict=True):
        if getattr(server_args, f"dsa_{name}", value) is None:
            setattr(server_args, f"dsa_{name}", value)
            found[name] = (f"--dsa-{name.replace('_', '-')}", value)
    return found


@dataclass(frozen=True)
class PassedFlags:
    """Flags that the main process passes to the processes it starts.

    Attributes:
        flags: see `given`.
        engine: see `engine_backends`.
    """

    flags: Mapping[str, str] = field(default_factory=dict)
    engine: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> PassedFlags:
        text = (os.environ if environ is None else environ).get(VARIABLE)
        if not text:
            return cls()
        data = json.loads(text)
        return cls(data["flags"], {name: (flag, value) for name, (flag, value) in data["engine"].items()})

    def write(self, environ: MutableMapping[str, str] | None = None) -> None:
        (os.environ if environ is None else environ)[VARIABLE] = json.dumps(asdict(self))

    def resolve(self, *, portable: bool = False, v4: bool = False) -> tuple[ResolvedSettings, list[str]]:
        """Resolve the settings from all sources; also return a note for each SGLang flag that cannot be honoured.

        Args:
            portable: the portable path serves, which attends in place of SGLang's own paths.
            v4: the model is DeepSeek-V4, for which SGLang does not read these flags.

        Raises:
            SettingsError: an unknown name or a value that is not allowed, in any source.
        """
        config: dict[str, str] = {}
        notes: list[str] = []
        for name, (flag, value) in self.engine.items():
            if v4:
                notes.append(f"{flag} {value}: SGLang does not read it for DeepSeek-V4, so {name} is not set")
                continue
            library = LIBRARY_OF.get(value)
            if portable and library in ("flash_mla", "fa3"):
                notes.append(f"{flag} {value}: the portable path attends in its place")
                continue
            if library in backends(name):
                config[name] = library
            else:
                notes.append(f"{flag} {value} names no kernel library that the plugin supports: {name} is not set")
        used = ", ".join(flag for name, (flag, _) in self.engine.items() if name in config)
        resolved = settings.resolve(
            flags=self.flags,
            config=config,
            engine_paths={name: self.engine[name][1] for name in config},
            flag_source=FLAG_SOURCE,
            config_source=used or ENGINE_SOURCE,
        )
        return resolved, notes


def asked_for() -> bool:
    """Whether the command line or the environment enables the plugin and the kill switch is off."""
    if switch.killed():
        return False
    named = any(argument == ENABLE_FLAG or argument.startswith("--nsa-plugin-") for argument in sys.argv)
    return named or bool(PassedFlags.read().flags) or os.environ.get(f"{settings.ENV_PREFIX}ENABLED", "").strip() != ""
