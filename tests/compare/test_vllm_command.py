"""`nsa-plugin compare vllm` from end to end, with a stand-in for vLLM's server in processes of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compare.command import Behave, Read, arguments, call, failed
from tests.demo.processes import alive


def test_agreement_and_speed_together(
    fake: Behave, pids: Path, read: Read, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = arguments(tmp_path, fake(), "--speed", "--together", engine="vllm")
    code, out, _ = call(capsys, [*line, "--", "--kv-cache-memory-bytes", "4G", "--gpu-memory-utilization", "0.2"])
    record = read()
    assert (code, failed(record)) == (0, []), out
    assert alive(pids) == []
    assert (record["suite"], record["engine"]) == ("vllm-0.24.0-v32-16heads-bf16", "vllm 0.24.0")
    stock, plugin = record["servers"]["stock"], record["servers"]["plugin"]
    assert "--additional-config" not in stock["command"]
    assert "--kv-cache-memory-bytes 4G --gpu-memory-utilization 0.2" in stock["command"]
    assert plugin["routes"]["decode/sparse_decode/cuda"] > 0
    ours = {
        row["case"]["requests"]: row
        for row in record["rows"]
        if row["op"] == "agreement" and row["provider"] == "nsa-plugin" and "fault" not in row["case"]
    }
    # vLLM has the log probabilities of all of a prompt's tokens: of 48, 96 and 136, all but the first.
    assert ours["forced"]["positions"] == 48 + 96 + 136 - 3
    assert 0 < ours["batch"]["max_error"] < 0.05
    assert {row["case"]["measure"] for row in record["rows"] if row["op"] == "serve"} >= {"ttft_ms", "itl_ms"}


def test_plugin_that_refuses_fails_the_comparison_with_its_message(
    fake: Behave, pids: Path, read: Read, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = call(capsys, arguments(tmp_path, fake("refuses"), "--case", "single", engine="vllm"))
    record = read()
    assert code == 1
    assert alive(pids) == []
    assert {"complete", "the plugin served"} <= set(failed(record))
    assert "PatchError: nsa-plugin's backend for vLLM does not serve there" in record["servers"]["plugin"]["error"]
    assert "does not serve there" in out


def test_v4_is_refused(fake: Behave, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake()
    code, _, err = call(capsys, ["compare", "vllm", "--family", "v4", "--workdir", str(tmp_path / "work")])
    assert code == 2
    assert "does not serve DeepSeek-V4 with vLLM" in err
    assert not (tmp_path / "work").exists()
