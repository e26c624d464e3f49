"""Calls of the command line in this process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nsa_plugin import cli
from nsa_plugin.patches.ledger import Need, Patch, Target


def call(capsys: pytest.CaptureFixture[str], command: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command line."""
    try:
        code = cli.main(command.split())
    except SystemExit as error:
        code = int(error.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def data(capsys: pytest.CaptureFixture[str], command: str) -> dict[str, Any]:
    code, out, err = call(capsys, f"{command} --json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    assert found["schema"] == 1
    return found


def fake_patch(path: str, **changes: Any) -> Patch:
    fields: dict[str, Any] = {"name": f"toy.{path}", "engine": "toy", "need": Need.ENABLED, "why": "for the test"}
    versions = changes.pop("versions", "")
    return Patch(targets=(Target(path=path, versions=versions),), **fields | changes)
