"""Calls of `nsa-plugin doctor` in this process."""

from __future__ import annotations

import re
from typing import Any

import pytest

from nsa_plugin.commands import doctor, engines
from nsa_plugin.libraries.devices import DeviceProfile, synthetic
from nsa_plugin.settings import Settings
from tests.command_line import call

MODELS = ("V3.2 bf16", "V3.2 fp8", "GLM-5 bf16", "GLM-5 fp8", "V4 fp8")


def state_of(engine: engines.Engine, device: DeviceProfile, **settings: Any) -> doctor.EngineState:
    chosen = Settings(**settings)
    return doctor.engine_state(engine, device, chosen, doctor.routes(device, chosen))


def run_doctor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, **known: engines.Engine
) -> tuple[int, str, str]:
    monkeypatch.setattr(doctor, "ENGINES", known)
    return call(capsys, command)


def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *states: doctor.EngineState) -> str:
    """The screen of these engines, 80 columns wide."""
    monkeypatch.setenv("COLUMNS", "80")
    doctor._show(doctor.console(), synthetic(86), doctor.resolve(environ={}), None, states)
    return capsys.readouterr().out


def enabling(screen: str) -> str:
    """The command behind "enable:", as a user copies it from the screen."""
    found = re.search(r"enable: (.+?)\n\n", screen, re.DOTALL)
    assert found is not None, screen
    return found[1]
