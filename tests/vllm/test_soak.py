"""A short soak of a real server: every check but those that need a longer load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ci.rows import ROOT
from ci.soak.judge import CHECKS, TOO_FEW

pytestmark = pytest.mark.engine_vllm

# In seconds of load the memory is still warming up, and a slow machine may preempt nothing.
NEED_TIME = {"host memory", "open files", "cache pressure", "traffic"}


def test_short_soak(tmp_path: Path) -> None:
    record = tmp_path / "soak.json"
    done = subprocess.run(
        [sys.executable, "-m", "ci.soak", "--minutes", "0.3", "--json", str(record), "--work-dir", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
    )
    assert record.exists(), done.stdout
    found = json.loads(record.read_text())
    checks = {check["name"]: check for check in found["checks"]}
    assert len(checks) == len(CHECKS)
    # A slow machine may count its first objects in the last quarter.
    failed = [check for name, check in checks.items() if not check["holds"] and name not in NEED_TIME]
    assert [check for check in failed if (check["name"], check["detail"]) != ("plugin objects", TOO_FEW)] == []
    assert any(sample["objects"] for sample in found["memory"]), "no instance of the plugin's classes was counted"
    assert found["problem"] == ""
    assert found["ok"] is (done.returncode == 0)
