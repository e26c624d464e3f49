"""The SGLang adapter. `register` is the entry point of the group ``sglang.srt.plugins``."""

from __future__ import annotations


def register() -> None:
    """Called by SGLang in every process that loads plugins, before its arguments are read; may be called again.

    Raises:
        SystemExit: the plugin is asked for and cannot even read its settings in this SGLang. Anything that is
            an Exception would be logged and forgotten, and the stock engine would serve.
    """
    try:
        from nsa_plugin.backends.sglang.startup.activation import process

        process().bootstrap()
    except Exception as error:
        from nsa_plugin.backends.sglang.startup.flags import asked_for

        if asked_for():
            raise SystemExit(f"nsa-plugin: error: {error}") from error
        raise
