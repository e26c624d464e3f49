"""Calls `nsa-plugin compare` on the stand-in, and reads its record."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nsa_plugin import cli

Behave = Callable[..., Path]
Read = Callable[[], dict[str, Any]]


def arguments(tmp_path: Path, model: Path, *more: str, engine: str = "sglang") -> list[str]:
    return [
        *("compare", engine, "--model", str(model), "--context", "136", "--workdir", str(tmp_path / "work")),
        *("--json", str(tmp_path / "records"), "--commit", "0123abc", *more),
    ]


def v4(directory: Path) -> Path:
    """Turn the stand-in's model into a V4: above 64 tokens it selects 16 of the tokens compressed 4 : 1."""
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "deepseek_v4", "index_topk": 16, "compress_ratios": [0, 4, 128], "sliding_window": 24}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def call(capsys: pytest.CaptureFixture[str], line: list[str]) -> tuple[int, str, str]:
    """Exit code, output and errors."""
    try:
        code = cli.main(line)
    except SystemExit as error:
        code = int(str(error.code))
    out, err = capsys.readouterr()
    return code, out, err


def spawn(line: list[str]) -> subprocess.Popen[str]:
    """Run the command in a separate process, which Ctrl-C reaches as in a terminal."""
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\nfrom nsa_plugin.cli import main\n"
    code += f"raise SystemExit(main({line!r}))"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def failed(record: dict[str, Any]) -> list[str]:
    """Names of the failed checks."""
    return [check["name"] for check in record["verdict"]["checks"] if not check["holds"]]


def until(holds: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait for a condition, and fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
