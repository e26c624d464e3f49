"""What every test of the adapters has."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest


@pytest.fixture(autouse=True)
def sglang_variables(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang's `envs`, without any variable until a test sets one as `SimpleNamespace(get=...)`."""
    module = ModuleType("sglang.srt.environ")
    module.envs = found = SimpleNamespace()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return found
