"""The vLLM adapter. `register` is the entry point of the group ``vllm.general_plugins``."""

from __future__ import annotations

import functools
import logging


def register() -> None:
    """Called by vLLM in every process that it starts, before any configuration is known; may be called again.

    Raises:
        PatchError: the plugin is enabled and cannot read its settings in this vLLM.
    """
    from nsa_plugin.switch import killed

    if killed():
        _say_off()
        return
    from nsa_plugin.backends.vllm.startup.activation import process

    process().bootstrap()


@functools.cache
def _say_off() -> None:
    """Log once, below vLLM's logger. The adapter, which is slow to import, stays unloaded."""
    logging.getLogger("vllm.nsa_plugin").info("nsa-plugin is off: NSA_PLUGIN_ENABLED=0")
