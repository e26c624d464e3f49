"""Where a first token's time goes: the engine's trace, and the table made from the record."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ci import breakdown
from nsa_plugin.tools.serving.engine import CompareError
from nsa_plugin.tools.serving.requests import Answer


def kernel(name: str, start: float, us: float, cat: str = "kernel", ph: str = "X") -> dict[str, Any]:
    return {"name": name, "ts": start, "dur": us, "cat": cat, "ph": ph}


EVENTS = [
    kernel("indexer_scan", 1000.0, 3000.0),
    kernel("nvjet_tst_128x256", 3000.0, 2000.0),  # the first of them beside the scan
    kernel("indexer_scan", 6000.0, 1000.0),
    kernel("fused_moe_kernel", 6500.0, 250.0),  # all of it beside the scan
    kernel("Memcpy HtoD", 8000.0, 500.0, cat="gpu_memcpy"),
    kernel("cudaLaunchKernel", 0.0, 9000.0, cat="cuda_runtime"),
    {"name": "process_name", "ph": "M", "cat": "kernel"},
]


def test_a_trace_becomes_the_time_of_each_part() -> None:
    found = breakdown.summary(EVENTS)
    assert found["span_ms"] == 7.5
    assert found["busy_ms"] == 5.5
    assert found["parts"] == {
        "experts": 0.25,
        "indexer": 4.0,
        "attention": 0.0,
        "matrix products": 2.0,
        "everything else": 0.5,
    }
    assert found["kernels"][0] == {"name": "indexer_scan", "calls": 2, "ms": 4.0}
    assert [one["name"] for one in found["kernels"][1:]] == ["nvjet_tst_128x256", "Memcpy HtoD", "fused_moe_kernel"]


def test_the_order_of_a_trace_does_not_matter() -> None:
    assert breakdown.summary(EVENTS[::-1]) == breakdown.summary(EVENTS)


def test_a_trace_without_kernels_is_an_error() -> None:
    with pytest.raises(CompareError, match="recorded no kernel"):
        breakdown.summary([kernel("cudaLaunchKernel", 0.0, 1.0, cat="cuda_runtime")])


def test_a_trace_that_is_still_written_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = gzip.compress(json.dumps({"traceEvents": EVENTS}).encode())
    path = tmp_path / "deep" / "1-TP-0.trace.json.gz"
    path.parent.mkdir()
    path.write_bytes(written[:40])
    monkeypatch.setattr(breakdown.time, "sleep", lambda seconds: path.write_bytes(written))
    assert breakdown.trace_in(tmp_path) == EVENTS
    path.write_bytes(written[:40])
    monkeypatch.setattr(breakdown.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(breakdown, "TRACE_S", 0.05)
    with pytest.raises(CompareError, match="no trace"):
        breakdown.trace_in(tmp_path)


class FakeServer:
    """Listens nowhere, and keeps what it was started with."""

    started: ClassVar[list[Any]] = []
    url = "http://server"

    def __init__(self, spec: Any) -> None:
        self.started.append(spec)

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_both_servers_are_profiled_and_recorded(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    folders: list[Path] = []

    def post(url: str, body: Mapping[str, Any] | None = None) -> None:
        asked.append(url.rpartition("/")[2])
        if body:
            folders.append(Path(body["output_dir"]))
        else:
            with gzip.open(folders[-1] / "1-TP-0.trace.json.gz", "wt") as file:
                json.dump({"traceEvents": EVENTS}, file)

    def send(engine: Any, url: str, group: Any, timeout: float) -> dict[str, Answer]:
        (request,) = group.requests
        asked.append(f"{len(request.prompt)} tokens, {request.new_tokens} new")
        return {"prompt": Answer(token_ids=(1,))}

    for name, value in {"Server": FakeServer, "post": post, "send": send}.items():
        monkeypatch.setattr(breakdown, name, value)
    monkeypatch.setattr(FakeServer, "started", [])
    monkeypatch.setattr(breakdown.model, "make_checkpoint", lambda spec, directory, say: None)
    monkeypatch.setattr(breakdown.ENGINES[engine], "version", lambda self: "1.2")
    folder = tmp_path / "records"
    breakdown.main([engine, "--tokens", "300", "--workdir", str(tmp_path), "--json", str(folder), "--", "--flag", "7"])

    prompt = "300 tokens, 1 new"
    assert asked == 2 * [prompt, prompt, "start_profile", prompt, "stop_profile"]
    stock, plugin = FakeServer.started
    for spec in (stock, plugin):
        command = spec.command(8000)
        assert "--flag" in command
        assert ("--profiler-config" in command) == (engine == "vllm")
    assert stock.environ["NSA_PLUGIN_ENABLED"] == "0"
    assert plugin.environ["NSA_PLUGIN_ENABLED"] == "1"
    (path,) = folder.iterdir()
    record = json.loads(path.read_text())
    assert record["engine"] == f"{engine} 1.2"
    assert record["flags"] == ["--flag", "7"]
    assert [row["server"] for row in record["rows"]] == ["stock", "plugin"]
    heading, _, _, second = capsys.readouterr().out.splitlines()
    assert heading.startswith(f"| {engine} 1.2 |")
    assert [cell.strip(" |") for cell in second.split(" | ")][:-1] == ["plugin", "0", "4", "0", "2", "0", "2", "8"]


def test_an_answer_that_fails_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breakdown, "Server", FakeServer)
    monkeypatch.setattr(breakdown, "send", lambda *arguments: {"prompt": Answer(error="too long")})
    with pytest.raises(CompareError, match="stock: too long"):
        breakdown.profile(breakdown.ENGINES["sglang"](), "stock", tmp_path, [], 300, 100, tmp_path)
