"""`nsa-plugin compare vllm` from end to end, with a stand-in for vLLM's server in processes of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_plugin.tools.compare import model
from nsa_plugin.tools.compare.measured import Measured
from nsa_plugin.tools.compare.model import SPEC_V4
from tests.tools.compare.command import Behave, Read, arguments, call, failed, v4
from tests.tools.processes import alive


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


def test_v4_is_compared_by_what_matters_to_it(
    fake: Behave, pids: Path, read: Read, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = arguments(tmp_path, v4(fake()), "--together", engine="vllm")
    flags = ("--kv-cache-dtype", "fp8", "--max-num-batched-tokens", "128")
    code, out, _ = call(capsys, [*line, "--", *flags])
    record = read()
    assert (code, failed(record)) == (0, []), out
    assert alive(pids) == []
    assert record["suite"] == "vllm-0.24.0-v4-16heads-fp8-chunk128"
    rows = {row["case"]["requests"]: row for row in record["rows"] if "fault" in row["case"]}
    assert {23, 24, 25, 63, 64, 65, 67, 68, 69, 127, 128, 129} <= {one["prompt"] for one in rows["single"]["each"]}
    assert [one["prompt"] for one in rows["rows"]["each"]] == [129]  # a whole chunk and a prefill of one row
    (noticed,) = (check for check in record["verdict"]["checks"] if check["name"] == "wrong tokens are noticed")
    assert "requests longer than 64 tokens rejected" in noticed["detail"]


@pytest.mark.parametrize(("asked", "heads"), [((), 64), (("--heads", "16"), 16), (("--heads", "128"), 128)])
def test_v4s_checkpoint_is_the_one_that_sglang_gets(
    asked: tuple[str, ...],
    heads: int,
    fake: Behave,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake()
    tiny = replace(SPEC_V4, vocab_size=512, hidden_size=128, moe_intermediate_size=128, n_routed_experts=4)
    tiny = replace(tiny, q_lora_rank=128, o_lora_rank=128, index_n_heads=1, compress_ratios=(0, 4))
    monkeypatch.setattr(model, "SPEC_V4", tiny)
    stated = []
    for engine in ("sglang", "vllm"):
        logs = tmp_path / engine
        line = ["compare", engine, "--family", "v4", *asked, "--workdir", str(tmp_path / "work"), "--logs", str(logs)]
        # Nothing is left of the time once the checkpoint is written.
        call(capsys, [*line, "--context", "4096", "--case", "single", "--budget", "0.001"])
        stated.append(Measured.load(logs / "measured.jsonl").facts)
    ours, theirs = stated
    assert ours["heads"] == theirs["heads"] == heads
    assert ours["checkpoint"] == theirs["checkpoint"]
    (config,) = (tmp_path / "work").glob("*/config.json")
    # Without it vLLM takes the experts for fp4.
    assert json.loads(config.read_text())["expert_dtype"] == "fp8"


def test_a_prompt_that_stock_fails_at(
    fake: Behave, pids: Path, read: Read, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = arguments(tmp_path, v4(fake("exhausts")), "--stock-fails-at", "900,1500,2500", engine="vllm")
    code, out, _ = call(capsys, line)
    record = read()
    assert (code, failed(record)) == (0, []), out
    assert alive(pids) == []
    assert record["suite"] == "vllm-0.24.0-v4-16heads-fp8-limit"
    (row,) = record["rows"]
    assert (row["baseline_answered"], row["baseline_failed_at"]) == ([900], 1500)
    assert "the server answered 500" in row["baseline_error"]
    assert row["answered"] == [900, 1500, 2500]
