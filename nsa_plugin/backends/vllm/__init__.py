"""The vLLM adapter. `register` is the entry point of the group ``vllm.general_plugins``."""

from __future__ import annotations


def register() -> None:
    """Called by vLLM in every process that it starts, before any configuration is known; may be called again.

    Raises:
        PatchError: the plugin is asked for and cannot even read its settings in this vLLM.
    """
    from nsa_plugin.backends.vllm.startup.activation import process

    process().bootstrap()
