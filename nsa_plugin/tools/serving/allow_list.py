"""The environment variables that restrict which plugins an engine loads, read as the engine reads its own.

vLLM splits the value at the commas and compares each part as it is, so a space belongs to the name and an empty value
allows no plugin (0.33, `envs.py` and `plugins/__init__.py`). SGLang strips each part, and takes an empty value as if
the variable was not set (0.5.23, `srt/plugins/__init__.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

PLUGIN = "nsa_plugin"
SGLANG_PLUGINS, VLLM_PLUGINS = "SGLANG_PLUGINS", "VLLM_PLUGINS"


def kept_out(variable: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Why the engine ignores the plugin because of its variable, or None. Any but SGLang's is read as vLLM's."""
    value = environ.get(variable)
    if value is None or (variable == SGLANG_PLUGINS and not value):
        return None
    names = value.split(",")
    stripped = [name.strip() for name in names]
    if PLUGIN in (stripped if variable == SGLANG_PLUGINS else names):
        return None
    if PLUGIN in stripped:
        return f"{variable}={value!r} lists {PLUGIN} with a space, which the engine takes as part of the name"
    return f"{variable}={value!r} does not list {PLUGIN}, so the engine ignores it"


def allowing(variable: str, environ: Mapping[str, str] = os.environ) -> str:
    """The value that allows the plugin and every plugin that the variable names."""
    names = (name.strip() for name in environ.get(variable, "").split(","))
    return ",".join(dict.fromkeys([*filter(None, names), PLUGIN]))
