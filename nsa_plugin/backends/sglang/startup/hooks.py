"""Wrappers that the ledger puts around SGLang's functions. While the plugin is off, they only call the original.

SGLang only logs an Exception of a plugin that it loads, and kills the server with a traceback for one in a scheduler's
start. The plugin's errors therefore leave as SystemExit.

Every process of SGLang builds the first wrappers, and few read flags: `flags` is imported where it is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nsa_plugin.backends.sglang.startup.activation import process
from nsa_plugin.errors import NsaPluginError
from nsa_plugin.patches.ledger import wrap


@contextmanager
def _clear_exit() -> Iterator[None]:
    """End the process with the message alone, without a traceback."""
    try:
        yield
    except NsaPluginError as error:
        raise SystemExit(f"nsa-plugin: error: {error}") from error


def wrap_add_cli_args(original: Any) -> Any:
    function = original.__func__

    @functools.wraps(function)
    def add_cli_args(parser: Any) -> None:
        from nsa_plugin.backends.sglang.startup.flags import add_flags

        function(parser)
        add_flags(parser)

    return staticmethod(add_cli_args)


def wrap_from_cli_args(original: Any) -> Any:
    function = original.__func__

    @functools.wraps(function)
    def from_cli_args(cls: type, args: Any) -> Any:
        from nsa_plugin.backends.sglang.startup import flags

        flags.PassedFlags(flags.given(args)).write()
        with _clear_exit():
            process().check_before_serving(args)
        return function(cls, args)

    return classmethod(from_cli_args)


def wrap_resolve(original: Callable[..., Any]) -> Callable[..., Any]:
    def around(original: Callable[..., Any], server_args: Any) -> Any:
        # Resolved arguments pass here again, but no longer tell what the user gave.
        if not process().child and not getattr(server_args, "_resolution_finished", False):
            process().check_before_serving(server_args)
        return original(server_args)

    return wrap(original, around)


def wrap_scheduler_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def around(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> None:
        with _clear_exit():
            process().enter_scheduler()
            original(scheduler, *args, **kwargs)
            process().leave_scheduler(scheduler)

    return wrap(original, around)


def wrap_v4_entry(original: Callable[..., Any]) -> Callable[..., Any]:
    def around(original: Callable[..., Any], runner: Any) -> Any:
        process().enter_v4()
        return original(runner)

    return wrap(original, around)
