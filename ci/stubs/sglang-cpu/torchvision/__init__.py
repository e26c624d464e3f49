"""Stands in for torchvision, whose wheels are built for CUDA and do not load beside a CPU build of torch.

transformers and SGLang import it for image models. No image is ever processed here: every function raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

__version__ = "0.28.0"


def absent(module: str) -> Callable[[str], Callable[..., NoReturn]]:
    """A module's `__getattr__`: any public name is a function that says that it is not there."""

    def __getattr__(name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def stub(*_: object, **__: object) -> NoReturn:
            raise RuntimeError(f"{module}.{name} was called, and torchvision is a stub in this environment")

        return stub

    return __getattr__
