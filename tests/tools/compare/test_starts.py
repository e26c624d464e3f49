"""Pairs of servers, with stand-ins for the engines: what is recorded, and how a line of it reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ci import starts
from nsa_plugin.tools.compare import load


@pytest.fixture
def run(tmp_path: Path, fake: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs the command with the stand-in's model; the record, or None if there is none."""
    monkeypatch.setattr(starts, "CONTEXT", 40)
    monkeypatch.setattr(load, "_STEPS", 5)
    monkeypatch.setattr(starts, "checkpoint_of", lambda given: (tmp_path / "model", 256))

    def call(engine: str, *more: str, mode: str = "") -> Any:
        fake(mode)
        folder = tmp_path / "records"
        line = [engine, "--workdir", str(tmp_path / "work"), "--json", str(folder), "--commit", "0123abc", *more]
        starts.main(line)
        found = list(folder.glob("*.json"))
        return json.loads(found[0].read_text()) if found else None

    return call


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_pairs_of_servers_are_timed_in_changing_order(
    engine: str, run: Callable[..., Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_PLUGIN_DECODE_BACKEND", "flash_mla")
    record = run(engine, "--pairs", "2", "--answers", "1", "--", "--kv-cache-dtype", "fp8_e4m3")
    assert record["suite"] == f"starts-{engine}-v3.2-64heads"
    assert record["set"] == {"NSA_PLUGIN_DECODE_BACKEND": "flash_mla"}
    assert record["flags"] == ["--kv-cache-dtype", "fp8_e4m3"]
    assert {role: len(found) for role, found in record["servers"].items()} == {"stock": 2, "plugin": 2}
    for servers in record["servers"].values():
        for one in servers:
            assert one["start_s"] > 0
            assert len(one["steps_ms"]) == 1
    assert {one["warm_up"] for one in record["servers"]["stock"]} == {""}
    assert {one["warm_up"] for one in record["servers"]["plugin"]} == {"none"}
    first, second, third = (line for line in capsys.readouterr().out.splitlines() if line.startswith("pair "))
    assert first.index("plugin") < first.index("stock")
    assert second.index("stock") < second.index("plugin")
    assert third.index("plugin") < third.index("stock")


@pytest.mark.parametrize("off", ["it is not switched on", "it leaves the model to stock"])
def test_no_pair_counts_where_the_plugin_does_not_serve(
    off: str, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if off == "it is not switched on":
        made = starts.server_spec
        monkeypatch.setattr(starts, "server_spec", lambda engine, role, *more: made(engine, starts.STOCK, *more))
    with pytest.raises(SystemExit) as ended:
        run("sglang", "--pairs", "2", "--answers", "1", mode="inactive" if "leaves" in off else "")
    assert ended.value.code == 1


def test_one_pair_has_no_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        starts.main(["vllm", "--pairs", "1"])
    assert ended.value.code == 2
    assert "--pairs is 1; a standard error needs at least 2" in capsys.readouterr().err


RECORD: dict[str, Any] = {
    "engine": "vllm 0.33.0",
    "family": "v3.2",
    "heads": 64,
    "set": {"NSA_PLUGIN_DECODE_BACKEND": "flash_mla"},
    "servers": {
        "stock": [{"start_s": 30.0, "steps_ms": [2.0, 9.0, 1.0]}, {"start_s": 32.0, "steps_ms": [4.0]}],
        "plugin": [{"start_s": 31.0, "steps_ms": [2.02]}, {"start_s": 32.0, "steps_ms": [4.12]}],
    },
}


def test_a_line_has_means_over_the_pairs() -> None:
    assert starts.line_of(RECORD) == [
        "vLLM 0.33.0, V3.2, 64 heads, decode_backend=flash_mla",
        "2",
        "31.0 s",
        "+0.50 ± 0.50 s",
        "3.000 ms",
        "+2.00% ± 1.00%",
    ]
