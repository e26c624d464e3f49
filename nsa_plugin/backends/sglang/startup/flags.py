"""The plugin's flags on SGLang's command line, and their way to the scheduler processes.

SGLang drops flags that are not fields of ServerArgs. What the user gave is therefore carried in one
environment variable, which the processes that SGLang starts inherit. Its name does not begin with
``NSA_PLUGIN_``: those are the user's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from nsa_plugin import settings
from nsa_plugin.errors import SettingsError
from nsa_plugin.settings import BACKEND_OPS, ResolvedSettings, Settings, backends, parse_source

ENABLE_FLAG = "--enable-nsa-plugin"
CARRIER = "_NSA_PLUGIN_SGLANG"
FLAG_SOURCE = "the command line"
ENGINE_SOURCE = "SGLang's own flag"

# SGLang's names of attention kernels to the libraries that they come from. The plugin chooses among a
# library's kernels by the batch. tilelang, aiter, intel_xpu and flashinfer_sparse_mla are none of its libraries.
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


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return ENABLE_FLAG if name == "enabled" else "--nsa-plugin-" + name.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting; a value that is not allowed ends the parse with a message that says so."""
    group = parser.add_argument_group("nsa-plugin")
    for spec in fields(Settings):
        text = spec.metadata["doc"]
        if spec.name == "enabled":
            group.add_argument(ENABLE_FLAG, action="store_true", help=_literal(text))
        else:
            text += f" Allowed: {Settings.allowed(spec.name)}. Default: {spec.default!r}."
            group.add_argument(flag_of(spec.name), type=_checked(spec.name), metavar="VALUE", help=_literal(text))


def _literal(text: str) -> str:
    """For argparse, which formats its help texts."""
    return text.replace("%", "%%")


def _checked(name: str) -> Callable[[str], str]:
    """For argparse: the text as it is, once it is seen to be allowed."""

    def check(text: str) -> str:
        try:
            parse_source({name: text}, flag_of(name))
        except SettingsError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return check


def given(namespace: Any) -> dict[str, str]:
    """The settings that the user gave as flags, by name, as text."""
    found = {name: getattr(namespace, f"nsa_plugin_{name}", None) for name in Settings.names()}
    values = {name: value for name, value in found.items() if value is not None}
    if getattr(namespace, "enable_nsa_plugin", False):
        values["enabled"] = "true"
    return values


def engine_backends(server_args: Any) -> dict[str, tuple[str, str]]:
    """What SGLang's own flags say about a setting: (flag, value), by setting; only those that the user gave.

    Args:
        server_args: ServerArgs or an argparse namespace, before SGLang fills in what was left open.
    """
    found: dict[str, tuple[str, str]] = {}
    for name in BACKEND_OPS:
        for prefix in ("dsa", "nsa"):
            value = getattr(server_args, f"{prefix}_{name}", None)
            if value is not None:
                found[name] = (f"--{prefix}-{name.replace('_', '-')}", str(value))
                break
    return found


@dataclass(frozen=True)
class Carried:
    """What the main process knows and the processes that it starts cannot.

    Attributes:
        flags: see `given`.
        engine: see `engine_backends`.
    """

    flags: Mapping[str, str] = field(default_factory=dict)
    engine: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Carried:
        text = (os.environ if environ is None else environ).get(CARRIER)
        if not text:
            return cls()
        data = json.loads(text)
        return cls(data["flags"], {name: (flag, value) for name, (flag, value) in data["engine"].items()})

    def write(self, environ: MutableMapping[str, str] | None = None) -> None:
        (os.environ if environ is None else environ)[CARRIER] = json.dumps(asdict(self))

    def resolve(self) -> tuple[ResolvedSettings, list[str]]:
        """The settings from all sources, and a sentence for each flag of SGLang that cannot be honoured.

        Raises:
            SettingsError: an unknown name or a value that is not allowed, in any source.
        """
        config: dict[str, str] = {}
        notes: list[str] = []
        for name, (flag, value) in self.engine.items():
            library = LIBRARY_OF.get(value)
            if library in backends(name):
                config[name] = library
            else:
                notes.append(f"{flag} {value} names no kernel library of the plugin: it does not set {name}")
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
    """Whether the command line or the environment names the plugin and the kill switch is off."""
    if settings.killed():
        return False
    named = any(argument == ENABLE_FLAG or argument.startswith("--nsa-plugin-") for argument in sys.argv)
    return named or bool(Carried.read().flags) or os.environ.get(f"{settings.ENV_PREFIX}ENABLED", "").strip() != ""
