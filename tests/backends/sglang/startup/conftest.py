"""Fixtures for tests of a scheduler process without SGLang."""

from __future__ import annotations

import os

import pytest
from packaging.version import Version

from nsa_plugin.backends.sglang.startup import backend, hooks, serving
from nsa_plugin.backends.sglang.startup.activation import SglangProcess
from nsa_plugin.backends.sglang.startup.flags import VARIABLE
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.patches import sglang as data
from nsa_plugin.patches.ledger import Ledger
from nsa_plugin.settings import ENV_PREFIX


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [key for key in os.environ if key.startswith(ENV_PREFIX) or key == VARIABLE]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(VARIABLE, "")  # so that what a test writes there is taken back


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> SglangProcess:
    """The plugin in a scheduler process on an H200, with no patches to apply."""
    ledger = Ledger(engine="sglang", version=Version("0.5.16"), supported=data.SUPPORTED, patches=())
    this = SglangProcess(ledger=ledger, child=True)
    monkeypatch.setattr(backend, "process", lambda: this)
    monkeypatch.setattr(hooks, "process", lambda: this)
    monkeypatch.setattr(
        "nsa_plugin.libraries.probe.probe", lambda: synthetic(sm=90, libraries=("flash_mla", "fa3", "deep_gemm"))
    )
    monkeypatch.setattr(SglangProcess, "_refuse_copies", lambda self: None)
    monkeypatch.setattr(serving, "warm", lambda *arguments: None)
    monkeypatch.setattr(serving, "_warm_selection", lambda *arguments: None)
    return this
