"""The SGLang adapter. `register` is the entry point of the group ``sglang.srt.plugins``."""

from __future__ import annotations

import multiprocessing
import os
import sys

from nsa_plugin.switch import SCHEDULER_MODULE, VARIABLE, killed


def _has_read_arguments() -> bool:
    """Whether SGLang started this process after it had read its arguments, so that no flag is parsed here."""
    started = multiprocessing.parent_process() is not None
    return started and (VARIABLE in os.environ or SCHEDULER_MODULE in sys.modules)


def register() -> None:
    """Called by SGLang in every process that loads plugins, before its arguments are read; may be called again.

    Raises:
        SystemExit: the plugin is asked for and cannot even read its settings in this SGLang. Anything that is
            an Exception would be logged and forgotten, and the stock engine would serve.
    """
    if killed() and _has_read_arguments():
        return  # elsewhere SGLang must still accept the plugin's flags
    try:
        from nsa_plugin.backends.sglang.startup.activation import process

        process().bootstrap()
    except Exception as error:
        from nsa_plugin.backends.sglang.startup.flags import asked_for

        if asked_for():
            raise SystemExit(f"nsa-plugin: error: {error}") from error
        raise
