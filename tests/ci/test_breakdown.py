"""Where a first token's time goes: the engine's trace, and the table made from the record."""

from __future__ import annotations

import gzip
import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ci import breakdown, served, stacks
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
    """Listens nowhere, and keeps what it was started with. Each start takes a second longer than the one before."""

    started: ClassVar[list[Any]] = []
    facts: ClassVar[dict[str, str] | None] = None  # of the report that the plugin's server writes
    url = "http://server"

    def __init__(self, spec: Any) -> None:
        self.started.append(spec)
        self.start_seconds = 0.0

    def __enter__(self) -> FakeServer:
        self.start_seconds = 20.04 + len(self.started)
        environ = self.started[-1].environ
        if self.facts is not None and environ["NSA_PLUGIN_ENABLED"] == "1":
            Path(environ["NSA_PLUGIN_REPORT"]).write_text(json.dumps({"facts": self.facts}))
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def pids(self) -> list[int]:
        return [os.getpid()]


class Fakes:
    """What servers are asked, and how long each prompt takes by a clock of its own."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.prompts: list[tuple[int, ...]] = []
        self.seconds: list[float] = []
        """Of the prompts to come; the others take 9 s."""
        self.clock = 0.0
        self.folder = tmp_path
        self.profiled: list[Path] = []
        for name, value in {"Server": FakeServer, "post": self.post, "send": self.send}.items():
            monkeypatch.setattr(breakdown, name, value)
        monkeypatch.setattr(breakdown.time, "perf_counter", lambda: self.clock)
        monkeypatch.setattr(FakeServer, "started", [])
        monkeypatch.setattr(served.model, "make_checkpoint", lambda spec, directory, say: None)
        for engine in breakdown.ENGINES.values():
            monkeypatch.setattr(engine, "version", lambda self: "1.2")

    def post(self, url: str, body: Mapping[str, Any] | None = None) -> None:
        self.asked.append(url.rpartition("/")[2])
        if body:
            self.folder = Path(body["output_dir"])
        else:
            number = self.profiled.count(self.folder)  # of the server's profiles before this one
            self.profiled.append(self.folder)
            with gzip.open(self.folder / f"{number}-TP-0.trace.json.gz", "wt") as file:
                json.dump({"traceEvents": [*EVENTS, *number * [kernel("later", 20_000.0, 1000.0)]]}, file)

    def send(self, engine: Any, url: str, group: Any, timeout: float) -> dict[str, Answer]:
        (request,) = group.requests
        self.asked.append(f"{len(request.prompt)} tokens, {request.new_tokens} new")
        self.prompts.append(request.prompt)
        self.clock += self.seconds.pop(0) if self.seconds else 9.0
        return {"prompt": Answer(token_ids=(1,))}


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(tmp_path, monkeypatch)


def record_of(tmp_path: Path, engine: str, *options: str) -> dict[str, Any]:
    """The record of a run with prompts of 300 tokens."""
    folder = tmp_path / "records"
    words = ["--tokens", "300", "--workdir", str(tmp_path), "--json", str(folder), *options, "--", "--flag", "7"]
    breakdown.main([engine, *words])
    (path,) = folder.iterdir()
    return dict(json.loads(path.read_text()))


PROMPT = "300 tokens, 1 new"


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_both_servers_are_profiled_and_recorded(
    engine: str, tmp_path: Path, fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    record = record_of(tmp_path, engine)
    assert fakes.asked == 2 * [PROMPT, PROMPT, PROMPT, "start_profile", PROMPT, "stop_profile"]
    stock, plugin = FakeServer.started
    for spec in (stock, plugin):
        command = spec.command(8000)
        assert "--flag" in command
        assert ("--profiler-config" in command) == (engine == "vllm")
    assert stock.environ["NSA_PLUGIN_ENABLED"] == "0"
    assert plugin.environ["NSA_PLUGIN_ENABLED"] == "1"
    assert record["engine"] == f"{engine} 1.2"
    assert record["flags"] == ["--flag", "7"]
    assert [row["server"] for row in record["rows"]] == ["stock", "plugin"]
    assert [row["start_s"] for row in record["rows"]] == [21.0, 22.0]
    assert not any(key.startswith("host") for row in record["rows"] for key in row)
    length, heading, _, _, second = capsys.readouterr().out.splitlines()
    assert length == "300 tokens"
    assert heading.startswith(f"| {engine} 1.2 |")
    assert heading.endswith("| start |")
    cells = ["plugin", "0", "4", "0", "2", "0", "2", "8", "9,000", "22.0 s"]
    assert [cell.strip(" |") for cell in second.split(" | ")] == cells


def test_readings_are_timed_after_the_warm_up_and_their_median_counts(tmp_path: Path, fakes: Fakes) -> None:
    fakes.seconds = [8.0, 4.0, 0.5, 0.25, 2.0, 7.0, 8.0, 4.0, 1.0, 3.0, 1.5, 7.0]
    stock, plugin = record_of(tmp_path, "sglang", "--readings", "3")["rows"]
    assert fakes.asked == 2 * [*5 * [PROMPT], "start_profile", PROMPT, "stop_profile"]
    assert stock["readings_ms"] == [500.0, 250.0, 2000.0]
    assert stock["first_token_ms"] == 500.0
    assert plugin["readings_ms"] == [1000.0, 3000.0, 1500.0]
    assert plugin["first_token_ms"] == 1500.0
    assert len(set(fakes.prompts[:6])) == 6
    assert fakes.prompts[:6] == fakes.prompts[6:]


def test_servers_are_started_before_those_that_are_recorded(tmp_path: Path, fakes: Fakes) -> None:
    warm_ups, profiled = [8.0, 8.0], 7.0
    starts = [[1.0, 3.0, 2.0], [5.0, 4.0, 6.0], [0.5, 0.25, 1.0], [9.0, 11.0, 10.0]]
    seconds = [[*warm_ups, *readings] for readings in starts]
    fakes.seconds = [*seconds[0], *seconds[1], *seconds[2], profiled, *seconds[3], profiled]
    record = record_of(tmp_path, "vllm", "--starts", "2", "--readings", "3")
    assert [spec.environ["NSA_PLUGIN_ENABLED"] for spec in FakeServer.started] == ["0", "1", "0", "1"]
    commands = [spec.command(8000) for spec in FakeServer.started]
    assert commands[:2] == commands[2:]
    assert [row["start_s"] for row in record["rows"]] == [23.0, 24.0]
    assert record["starts"] == 2
    assert [row["starts_ms"] for row in record["rows"]] == [[2000.0, 500.0], [5000.0, 10000.0]]
    assert [row["starts_s"] for row in record["rows"]] == [[21.0, 23.0], [22.0, 24.0]]
    assert record["suite"] == "first-token-vllm-v3.2-16heads-300"


def test_the_host_is_timed_beside_the_prompts_of_each_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fakes: Fakes
) -> None:
    loops = iter([9.5, 9.25, 14.0, 14.5])
    asked: list[int] = []

    def loop() -> float:
        asked.append(len(fakes.asked))
        return next(loops)

    monkeypatch.setattr(breakdown, "loop_ms", loop)
    stock, plugin = record_of(tmp_path, "vllm", "--starts", "2")["rows"]
    assert (stock["loops_ms"], plugin["loops_ms"]) == ([9.5, 14.0], [9.25, 14.5])
    assert (stock["loop_ms"], plugin["loop_ms"]) == (14.0, 14.5)
    assert asked == [3, 6, 9, 15], "after the timed prompts, before one is profiled"


def test_the_loop_takes_the_median_time_in_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert breakdown.loop_ms() > 0
    ends = iter([0.010, 0.050, 0.012, 0.011, 0.030])
    clock = iter(time for end in ends for time in (0.0, end))
    monkeypatch.setattr(breakdown.time, "perf_counter", lambda: next(clock))
    assert breakdown.loop_ms() == 12.0


def test_medians_have_two_decimals() -> None:
    assert breakdown.Readings([1.01, 1.04], 9.0).median in {1.02, 1.03}


def test_a_start_ends_at_its_timeout(tmp_path: Path, fakes: Fakes) -> None:
    record_of(tmp_path, "vllm")
    assert {spec.start_timeout for spec in FakeServer.started} == {600.0}
    FakeServer.started.clear()
    record_of(tmp_path, "vllm", "--start-timeout", "77")
    assert {spec.start_timeout for spec in FakeServer.started} == {77.0}
    with pytest.raises(SystemExit):
        record_of(tmp_path, "vllm", "--start-timeout", "0")


def test_without_a_folder_nothing_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    breakdown.main(["vllm", "--tokens", "300", "--workdir", "work"])
    assert capsys.readouterr().out.startswith("300 tokens\n| vllm 1.2 |")
    assert {path.name for path in tmp_path.rglob("*.json")} == set()


def test_a_start_measures_every_length_and_each_makes_a_record(
    tmp_path: Path, fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    short, long = ([8.0, 8.0, 1.0], [9.0, 9.0, 3.0]), ([8.0, 8.0, 2.0], [9.0, 9.0, 5.0])
    profiled = 7.0
    starts = [*short[0], *short[1], *long[0], *long[1]]
    last = [*short[0], profiled, *short[1], profiled, *long[0], profiled, *long[1], profiled]
    fakes.seconds = [*starts, *last]
    folder = tmp_path / "records"
    breakdown.main(
        ["sglang", "--tokens", "300,700,300", "--starts", "2", "--workdir", str(tmp_path), "--json", str(folder)]
    )
    asked = [int(words.partition(" ")[0]) for words in fakes.asked if words.endswith(" new")]
    assert asked == 2 * [300, 300, 300, 700, 700, 700] + 2 * [300, 300, 300, 300, 700, 700, 700, 700]
    assert len(FakeServer.started) == 4
    found = {path.stem: json.loads(path.read_text()) for path in folder.iterdir()}
    assert sorted(found) == ["first-token-sglang-v3.2-16heads-300", "first-token-sglang-v3.2-16heads-700"]
    for record, tokens, stock, plugin in zip(
        (found[name] for name in sorted(found)), (300, 700), (1000.0, 3000.0), (2000.0, 5000.0), strict=True
    ):
        assert record["suite"].endswith(f"-{tokens}")
        assert record["tokens"] == tokens
        assert [row["starts_ms"] for row in record["rows"]] == [[stock, stock], [plugin, plugin]]
        assert [row["starts_s"] for row in record["rows"]] == [[21.0, 23.0], [22.0, 24.0]]
        # Not the trace of the length before.
        assert [row["span_ms"] for row in record["rows"]] == 2 * [7.5 if tokens == 300 else 20.0]
    printed = capsys.readouterr().out
    assert printed.count(" tokens\n") == 2
    assert "| 1,000 (1,000 to 1,000) |" in printed


def test_a_first_token_below_a_tenth_of_a_second_has_a_decimal() -> None:
    assert breakdown._first_token([33.04]) == "33.0"
    assert breakdown._first_token([31.26, 99.0, 40.0]) == "40.0 (31.3 to 99.0)"
    assert breakdown._first_token([99.0, 120.0, 110.0]) == "110.0 (99.0 to 120.0)"
    assert breakdown._first_token([100.0, 1246.2]) == "673 (100 to 1,246)"


@pytest.mark.parametrize(
    ("facts", "said"), [({"warm-up": "in 0.6 s"}, {"warm_up": "in 0.6 s"}), ({}, {"warm_up": "none"}), (None, {})]
)
def test_the_plugins_server_says_what_its_warm_up_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fakes: Fakes, facts: dict[str, str] | None, said: dict[str, str]
) -> None:
    (tmp_path / "plugin-report.json").write_text(json.dumps({"facts": {"warm-up": "of another run"}}))
    monkeypatch.setattr(FakeServer, "facts", facts)
    stock, plugin = record_of(tmp_path, "vllm")["rows"]
    assert "warm_up" not in stock
    assert {key: plugin[key] for key in plugin if key == "warm_up"} == said


def test_the_page_has_the_longest_prompts_first(tmp_path: Path) -> None:
    times: dict[str, Any] = {"parts": dict.fromkeys(breakdown.ALL_PARTS, 2.4)}
    times |= {"server": "stock", "span_ms": 20.0, "busy_ms": 12.0, "first_token_ms": 33.0}
    for tokens, heads in ((2000, 8), (100_000, 16)):
        record = {"engine": "sglang 0.5.23", "family": "v3.2", "heads": heads, "tokens": tokens, "rows": [times]}
        (tmp_path / f"{tokens}.json").write_text(json.dumps(record))
    first, second = breakdown.page_table(tmp_path).splitlines()[2:]
    shared = "| stock | 2 | 2 | 2 | 2 | 2 | 8 | 20 | 33.0 |"
    assert first == f"| SGLang 0.5.23, V3.2, 16 heads, 100,000 tokens {shared}"
    assert second == f"| SGLang 0.5.23, V3.2, 8 heads, 2,000 tokens {shared}"


def test_an_answer_that_fails_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fakes: Fakes) -> None:
    monkeypatch.setattr(breakdown, "send", lambda *arguments: {"prompt": Answer(error="too long")})
    with pytest.raises(CompareError, match="stock: too long"):
        record_of(tmp_path, "sglang")


PARENT = 'process 7:"vllm serve x --profiler-config {"a": "b; c"}"'
WORKER = f'{PARENT};process 9:"python -c from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=4)"'
RUN = "Thread.run (threading.py:982);Core.loop (vllm/v1/engine/core.py:{})"
EXECUTE = RUN + ";GPUModelRunner.execute_model (vllm/v1/worker/gpu_model_runner.py:{})"
STACKS = [
    # The process that only waits for the model has more samples, and calls a function of the same name.
    f"{PARENT};thread (7): MainThread;main (a.py:1);Executor.execute_model (vllm/v1/executor/multiproc.py:3) 900",
    f"{WORKER};thread (9): MainThread;{RUN.format(10)};wait (threading.py:300) 20",
    f"{WORKER};thread (9): MainThread;{RUN.format(11)} 4",
    f"{WORKER};thread (9): MainThread;{EXECUTE.format(12, 50)};call (/x/torch/nn/a/module.py:1)"
    ";call (torch/nn/a/module.py:2);call (/y/torch/nn/a/module.py:2) 40",
    f"{WORKER};thread (9): MainThread;{EXECUTE.format(12, 51)} 16",
    f"{WORKER};thread (12): copier; x;{EXECUTE.format(12, 50)} 30",
    "py-spy said something else",
    "",
]


def test_stacks_become_the_functions_of_the_thread_that_runs_the_model() -> None:
    found = stacks.host_table(STACKS)
    assert found["thread"] == "process 9, thread 9 MainThread"
    assert found["samples"] == 80
    assert found["idle_share"] == 0.3
    assert found["plugin_share"] == 0
    assert {one["name"]: (one["inclusive"], one["self"]) for one in found["functions"]} == {
        "Thread.run (threading.py)": (1.0, 0.0),
        "Core.loop (v1/engine/core.py)": (1.0, 0.05),
        "GPUModelRunner.execute_model (v1/worker/gpu_model_runner.py)": (0.7, 0.2),
        "call (nn/a/module.py)": (0.5, 0.5),  # recursive
        "wait (threading.py)": (0.25, 0.25),
    }
    shares = [one["inclusive"] for one in found["functions"]]
    assert shares == sorted(shares, reverse=True)


def test_what_the_plugin_calls_is_its_own_unless_the_engine_calls_it() -> None:
    run = "GPUModelRunner.execute_model (vllm/v1/worker/gpu_model_runner.py:5)"
    build = "Builder.build (nsa_plugin/backends/vllm/v32/metadata.py:9)"
    ends = {
        f"{run};{build}": 1,
        f"{run};{build};cat (torch/functional.py:3)": 2,
        f"{run};{build};Indexer.build (/site/vllm/v1/indexer.py:3);cat (torch/functional.py:3)": 4,
        f"{run};cat (torch/functional.py:3)": 8,
        f"{run};wrap (/site/nsa_plugin/backends/vllm/v4/attention.py:3)": 16,
        # A folder on the way to what is installed does not make it the plugin's.
        f"{run};{build};call (/home/nsa_plugin/.venv/site-packages/vllm/v1/worker.py:3)": 32,
    }
    lines = [f'process 1:"s";thread (1);{frames} {count}' for frames, count in ends.items()]
    assert stacks.host_table(lines)["plugin_share"] == round(19 / 63, 4)


def test_a_table_lists_the_functions_with_most_samples() -> None:
    frame = "ModelRunner.forward_extend (sglang/srt/model_executor/model_runner.py:5)"
    lines = [f'process 1:"s";thread (1);{frame};f{number} (a.py:1) {number}' for number in range(1, 61)]
    names = [one["name"] for one in stacks.host_table(lines)["functions"]]
    assert len(names) == 40
    assert names[1:] == [f"f{number} (a.py)" for number in range(60, 21, -1)]


@pytest.mark.parametrize(
    ("frame", "runs"),
    [
        ("execute_model (vllm/v1/worker/gpu/model_runner.py)", True),
        ("GPUModelRunner.execute_model (v1/worker/gpu_model_runner.py)", True),
        ("ModelRunner.forward (srt/model_executor/model_runner.py)", True),
        ("ModelRunner.forward_idle_later (srt/model_executor/model_runner.py)", False),
        ("Worker.execute_model (v1/worker/gpu_worker.py)", False),
        ("Linear.forward (model_runner/nn/linear.py)", False),
    ],
)
def test_calls_of_the_model_runner_are_known(frame: str, runs: bool) -> None:
    assert stacks.runs_model(frame) == runs


@pytest.mark.parametrize("lines", [[], STACKS[:3]])
def test_stacks_without_the_model_are_an_error(lines: list[str]) -> None:
    with pytest.raises(stacks.HostError, match="none of which ran the model"):
        stacks.host_table(lines)


def fake_py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """An executable that runs code, to which `option` gives py-spy's options, named by PY_SPY."""
    path = tmp_path / "fake-py-spy"
    prelude = (
        "import json, sys, time\nfrom pathlib import Path\noption = lambda name: sys.argv[sys.argv.index(name) + 1]"
    )
    path.write_text(f"#!{sys.executable}\n{prelude}\n{code}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PY_SPY", str(path))


def test_the_host_is_sampled_while_prompts_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fakes: Fakes
) -> None:
    answered = threading.Event()
    real = fakes.send

    def send(*arguments: Any) -> dict[str, Answer]:
        if threading.current_thread() is not threading.main_thread():
            answered.wait(0.01)
            (tmp_path / "answers").open("a").write("x")
        return real(*arguments)

    monkeypatch.setattr(breakdown, "send", send)
    code = (
        "answers = Path(__file__).with_name('answers')\n"
        "answers.unlink(missing_ok=True)\n"
        "until = time.monotonic() + 20\n"
        "while time.monotonic() < until and not (answers.exists() and len(answers.read_text()) > 3): time.sleep(0.01)\n"
        "assert len(answers.read_text()) > 3\n"
        f"Path(option('--output')).write_text({chr(10).join(STACKS)!r})\n"
        "Path(option('--output')).with_suffix('.json').write_text(json.dumps(sys.argv[1:]))"
    )
    fake_py_spy(tmp_path, monkeypatch, code)
    rows = record_of(tmp_path, "vllm", "--host", "3", "--readings", "2")["rows"]
    for row in rows:
        assert row["host"] == stacks.host_table(STACKS)
        assert "host_error" not in row
        assert len(row["readings_ms"]) == 2
        assert (tmp_path / f"{row['server']}-300-host.txt").exists()
        words = json.loads((tmp_path / f"{row['server']}-300-host.json").read_text())
        assert words[words.index("--pid") + 1] == str(os.getpid())
        assert words[words.index("--duration") + 1] == "3"
        assert {"record", "--subprocesses", "--threads", "--idle", "--nonblocking"} <= set(words)
    first = fakes.asked.index("start_profile")
    assert fakes.asked[:first] == first * [PROMPT]
    assert first > 4 + 3
    assert set(fakes.prompts[4:first]) <= set(fakes.prompts[:4])
    assert fakes.prompts[first] not in fakes.prompts[:first]


def test_a_py_spy_that_fails_leaves_the_rest_of_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_py_spy(tmp_path, monkeypatch, "sys.exit('Error: Permission denied\\n\\nStack backtrace:\\n 0: x')")
    (tmp_path / "stock-300-host.txt").write_text("\n".join(STACKS))  # of an earlier run
    for row in record_of(tmp_path, "sglang", "--host", "3")["rows"]:
        assert row["host_error"] == "py-spy failed (exit code 1): Error: Permission denied"
        assert "host" not in row
        assert row["span_ms"] == 7.5
    assert "plugin: host not sampled: py-spy failed" in capsys.readouterr().err


def test_a_py_spy_without_stacks_or_an_end_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "host.txt"
    output.write_text("\n".join(STACKS))  # of an earlier run
    fake_py_spy(tmp_path, monkeypatch, "pass")
    with pytest.raises(stacks.HostError, match="No such file"):
        stacks.Sampler.found(1).sample([os.getpid()], output)
    fake_py_spy(tmp_path, monkeypatch, "time.sleep(60)")
    monkeypatch.setattr(stacks, "PATIENCE_S", -0.8)
    with pytest.raises(stacks.HostError, match="timed out"):
        stacks.Sampler.found(1).sample([os.getpid()], output)
    with pytest.raises(stacks.HostError, match="process was not found"):
        stacks.Sampler.found(1).sample([], output)


def test_a_prompt_that_fails_while_the_host_is_sampled_is_recorded(tmp_path: Path) -> None:
    class Waits(stacks.Sampler):
        def sample(self, pids: Any, output: Path) -> dict[str, Any]:
            raise stacks.HostError("no thread ran the model")

    def ask() -> None:
        raise CompareError("stock: too long")

    found = stacks.sampled(Waits("py-spy", 1), [1], ask, tmp_path / "host.txt")
    assert found == {"host_error": "stock: too long"}


@pytest.mark.parametrize("named", ["", "/nowhere/py-spy"])
def test_a_missing_py_spy_ends_the_run_before_a_server_starts(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PY_SPY", named)
    with pytest.raises(SystemExit):
        record_of(tmp_path, "vllm", "--host", "3")
    assert (f"PY_SPY={named} is not" if named else "py-spy is not on the PATH") in capsys.readouterr().err
    assert not FakeServer.started
    record_of(tmp_path, "vllm")  # which needs none


def test_the_first_process_is_the_one_that_none_of_the_others_started(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    parents = {41: 40, 30: 41, 50: 30}
    monkeypatch.setattr(psutil, "Process", lambda pid: type("P", (), {"ppid": lambda self: parents[pid]})())
    assert stacks.first_process([30, 41, 50]) == 41
