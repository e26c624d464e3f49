"""Attention backends that replace SGLang's, for both model families.

They inherit from SGLang's classes, so that its isinstance checks and speculative workers still work, and add plans
(`v32.attention`, `v4.attention`) and the plugin's start-up.
"""

from __future__ import annotations

import functools
from typing import Any

from nsa_plugin.backends.sglang.startup.activation import process
from nsa_plugin.backends.sglang.startup.model import NEEDS_GPU
from nsa_plugin.backends.sglang.v4.attention import with_v4_plans
from nsa_plugin.backends.sglang.v32.attention import with_plans
from nsa_plugin.errors import NoProviderError


def make(original: type) -> type:
    """Make the plugin's subclass of the engine's backend class, which exists only once its module is loaded.

    Raises:
        PatchError: the class is not as expected.
    """
    return _started(with_plans(original), original)


def make_v4(original: type) -> type:
    """As `make`, for the engine's DeepSeek-V4 backend class."""
    return _started(with_v4_plans(original), original)


def _started(planned: type, original: type) -> type:
    """Make a subclass of `planned`, itself a subclass of `original`, that reports to the plugin once built."""

    class Backend(planned):
        nsa_plugin_replaces = original

        # `wraps` keeps the signature, which the ledger checks.
        @functools.wraps(original.__init__)  # type: ignore[misc]
        def __init__(self, model_runner: Any, *args: Any, **kwargs: Any) -> None:
            if str(model_runner.device).partition(":")[0] == "cpu":
                raise NoProviderError(NEEDS_GPU)
            super().__init__(model_runner, *args, **kwargs)
            process().backend_built(self, model_runner)

    Backend.__name__ = Backend.__qualname__ = f"NsaPlugin{original.__name__}"
    return Backend
