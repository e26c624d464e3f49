"""The vLLM adapter. `register` is the entry point of the group ``vllm.general_plugins``."""

from __future__ import annotations

import functools
import logging
import os

RAY_PREFIXES = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"


def register() -> None:
    """Called by vLLM in every process that it starts, before any configuration is known; may be called again.

    Raises:
        PatchError: the plugin is enabled and cannot read its settings in this vLLM.
    """
    from nsa_plugin.switch import killed

    _copy_settings_to_ray()
    if killed():
        _say_off()
        return
    from nsa_plugin.backends.vllm.startup.activation import process

    process().bootstrap()


def _copy_settings_to_ray() -> None:
    """Let vLLM copy the settings to engines and workers that Ray starts, as it copies its own variables."""
    from nsa_plugin.switch import ENV_PREFIX

    prefixes = [one for one in os.environ.get(RAY_PREFIXES, "").split(",") if one]
    if ENV_PREFIX not in prefixes:
        os.environ[RAY_PREFIXES] = ",".join([*prefixes, ENV_PREFIX])


@functools.cache
def _say_off() -> None:
    """Log once, below vLLM's logger. The adapter, which is slow to import, stays unloaded."""
    logging.getLogger("vllm.nsa_plugin").info("nsa-plugin is off: NSA_PLUGIN_ENABLED=0")
