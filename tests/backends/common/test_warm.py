"""What a warm-up prepares while the process waits for its GPU."""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import Any

import pytest

from nsa_plugin.backends.common import warm
from nsa_plugin.backends.common.warm import hash_triton


def triton_with(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    cache = ModuleType("triton.runtime.cache")
    vars(cache).update(functions)
    monkeypatch.setitem(sys.modules, cache.__name__, cache)


def test_triton_hashes_its_files_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first launch took 0.4 s for it."""
    threads: list[threading.Thread] = []
    triton_with(monkeypatch, triton_key=lambda: threads.append(threading.current_thread()))
    thread = hash_triton()
    assert thread is not None
    thread.join()
    assert threads == [thread]
    assert thread.daemon, "it does not keep a process that ends"


def test_a_triton_that_cannot_hash_its_files_says_so_at_the_first_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)

    def key() -> None:
        raise OSError("no file")

    triton_with(monkeypatch, triton_key=key)
    thread = hash_triton()
    assert thread is not None
    thread.join()
    assert raised == []


def test_a_triton_without_the_function_hashes_at_the_first_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_with(monkeypatch)
    assert hash_triton() is None
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", None)
    assert hash_triton() is None

    def fail(name: str) -> ModuleType:
        raise OSError("libtriton.so: cannot open shared object file")

    monkeypatch.setattr(warm, "import_module", fail)
    assert hash_triton() is None
