"""The soak: its judge on made-up measurements, its requests, and how it reads a server's answers."""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from soak_case import MARGIN, SPLIT, by_rule, failed, good

from ci.rows import ROOT
from ci.soak import census
from ci.soak.__main__ import parser
from ci.soak.client import Client, compared, new_session
from ci.soak.engines import CENSUS, PREEMPTIONS, SETUPS, count_of, preemptions_of
from ci.soak.judge import CHECKS, MIB, RULES, judge, quantile
from ci.soak.measured import REFUSED_KINDS, End, Kind, Repeat, Sent, Soak
from ci.soak.report import RECORDS, as_record, print_report, runs_table
from ci.soak.run import Finished, Options
from ci.soak.traffic import SHARES, Limits, Traffic, malformed, oversized
from ci.soak.watch import gpu_bytes, sample
from nsa_plugin.tools.serving.requests import Answer, PromptRequest
from nsa_plugin.tools.serving.sglang import SglangEngine

LIMITS = Limits(context=1024, topk=64, chunk=256, running=8)


def test_good_soak_passes_every_check() -> None:
    assert failed(good()) == []
    assert len({check.name for check in judge(good())}) == len(CHECKS)


def test_soak_without_measurements_fails_every_check() -> None:
    nothing = Soak(minutes=10, margin=MARGIN, split_share=SPLIT)
    assert len(failed(nothing)) == len(CHECKS)


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_of_request_is_needed(kind: Kind) -> None:
    soak = good()
    soak.sent = [one for one in soak.sent if one.kind is not kind]
    assert "traffic" in failed(soak)


@pytest.mark.parametrize("end", [End.SHORT, End.LOST, End.HUNG, End.REFUSED, End.LEFT])
def test_well_formed_request_without_its_answer_fails(end: End) -> None:
    soak = good()
    soak.sent.append(Sent(kind=Kind.PLAIN, end=end))
    assert failed(soak) == ["answers"]


@pytest.mark.parametrize(("errors", "passes"), [(1, True), (3, False)])
def test_errors_are_allowed_if_they_are_rare(errors: int, passes: bool) -> None:
    soak = good()
    soak.sent += [Sent(kind=Kind.PLAIN, end=End.ANSWERED)] * 100
    soak.sent += [Sent(kind=Kind.BURST, end=End.ERROR, status=503)] * errors
    assert failed(soak) == ([] if passes else ["answers"])


@pytest.mark.parametrize("end", [End.ANSWERED, End.ERROR, End.LOST, End.HUNG])
@pytest.mark.parametrize("kind", REFUSED_KINDS)
def test_malformed_request_that_is_not_refused_fails(kind: Kind, end: End) -> None:
    soak = good()
    soak.sent.append(Sent(kind=kind, end=end, status=200, detail="no prompt"))
    assert failed(soak) == ["refusals"]


@pytest.mark.parametrize(("after", "name"), [(False, "tokens under load"), (True, "afterwards")])
def test_other_tokens_fail_unless_they_are_a_near_tie(after: bool, name: str) -> None:
    soak = good()
    soak.repeats.append(Repeat(name="probe", tokens=24, same=3, gap=MARGIN / 2, after=after))
    assert failed(soak) == []
    for gap in (2 * MARGIN, math.inf, math.nan):
        soak.repeats[-1] = replace(soak.repeats[-1], gap=gap)
        assert failed(soak) == [name]


@pytest.mark.parametrize(("after", "name"), [(False, "tokens under load"), (True, "afterwards")])
@pytest.mark.parametrize("dtype", RULES)
def test_other_log_probabilities_of_the_same_tokens_fail(dtype: str, after: bool, name: str) -> None:
    soak = by_rule(good(), dtype)
    soak.repeats.append(Repeat(name="probe", tokens=24, same=24, logprob_error=soak.margin, after=after))
    assert failed(soak) == []
    for error in (1.1 * soak.margin, math.inf, math.nan):
        soak.repeats[-1] = replace(soak.repeats[-1], logprob_error=error)
        assert failed(soak) == [name]


@pytest.mark.parametrize("path", sorted(RECORDS.glob("*.json")), ids=lambda path: path.stem)
def test_the_recorded_log_probabilities_are_within_the_margin(path: Path) -> None:
    """So the bound is one that real engines keep."""
    record = json.loads(path.read_text())
    server = record["server"]
    margin, _ = RULES["float32" if "float32" in server else "bfloat16"]
    assert record["probes"]["max_logprob_error"] <= margin


def test_many_near_ties_fail() -> None:
    soak = good()
    soak.repeats += [Repeat(name="probe", tokens=24, same=3, gap=MARGIN / 2)] * 2
    assert failed(soak) == ["tokens under load"]
    assert failed(by_rule(soak, "bfloat16")) == []


def test_request_that_the_idle_server_still_holds_fails() -> None:
    soak = good()
    soak.running = 1
    assert failed(soak) == ["afterwards"]


@pytest.mark.parametrize("preemptions", [0, None])
def test_cache_that_is_never_too_small_fails(preemptions: int | None) -> None:
    soak = good()
    soak.preemptions = preemptions
    assert failed(soak) == ["cache pressure"]


def test_soak_that_the_plugin_did_not_serve_fails() -> None:
    soak = good()
    soak.routes = {"extend/sparse_prefill/portable": 10, "decode/sparse_decode/portable": 0}
    assert failed(soak) == ["plugin"]


@pytest.mark.parametrize(
    ("name", "growth"),
    [
        ("host memory", {"rss": MIB // 3}),
        ("GPU memory", {"gpu": MIB}),
        ("plugin objects", {"objects": 2}),  # one object for each batch
        ("open files", {"files": 1}),
    ],
)
def test_memory_that_grows_after_warm_up_fails(name: str, growth: dict[str, int]) -> None:
    def grown(soak: Soak, start: float, end: float) -> Soak:
        soak.memory = [
            replace(one, **{key: (getattr(one, key) or 0) + int(a_second * min(max(one.at - start, 0), end - start))})
            for one in soak.memory
            for key, a_second in growth.items()
        ]
        return soak

    assert failed(grown(good(), 0, 600)) == [name]
    assert failed(grown(good(), 0, 150)) == []  # warm-up


def counted(objects: Callable[[float], float]) -> Soak:
    """A good soak with that many of the plugin's objects, by seconds."""
    soak = good()
    soak.memory = [replace(one, objects=int(objects(one.at))) for one in soak.memory]
    return soak


def test_objects_that_wait_for_the_garbage_collector_are_not_kept() -> None:
    """As an SGLang server's: 40 more each second, until a full collection every 190 seconds."""
    assert failed(counted(lambda at: 500 + 40 * ((at + 10) % 190))) == []
    assert failed(counted(lambda at: 500 + 2 * at + 40 * ((at + 10) % 190))) == ["plugin objects"]


def test_memory_without_samples_fails() -> None:
    soak = good()
    soak.memory = soak.memory[:60]
    assert failed(soak) == ["host memory", "GPU memory", "plugin objects", "open files"]


def test_server_whose_processes_do_not_count_their_objects_fails() -> None:
    soak = good()
    soak.memory = [replace(one, objects=None) for one in soak.memory]
    assert failed(soak) == ["plugin objects"]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"ended": False, "status": 200}, "worker killed"),
        ({"ended": False, "status": 0}, "worker killed"),
        ({"in_flight": Counter({End.HUNG: 1})}, "worker killed"),
        ({"in_flight": Counter({End.SHORT: 1})}, "worker killed"),
        ({"in_flight": Counter()}, "worker killed"),
        ({"left": ["77 EngineCore"]}, "processes left"),
    ],
)
def test_bad_end_after_a_killed_worker_fails(change: dict[str, Any], name: str) -> None:
    soak = good()
    assert soak.ending is not None
    soak.ending = replace(soak.ending, **change)
    assert failed(soak) == [name]


def test_server_that_answers_with_an_error_instead_of_ending_passes() -> None:
    soak = good()
    assert soak.ending is not None
    soak.ending = replace(soak.ending, ended=False, status=500)
    assert failed(soak) == []


def test_traffic_fits_the_server_and_follows_the_seed() -> None:
    one, other = Traffic(LIMITS, 3), Traffic(LIMITS, 3)
    drawn = [(one.kind(), one.request()) for _ in range(500)]
    assert drawn == [(other.kind(), other.request()) for _ in range(500)]
    requests = [request for _, request in drawn] + one.probes + [one.long_answer()]
    assert all(0 < request.total_tokens <= LIMITS.context and request.prompt for request in requests)
    # SGLang would end an answer that reaches the context's end earlier.
    assert max(len(request.prompt) for _, request in drawn) == LIMITS.context - LIMITS.answer - 2
    assert {kind for kind, _ in drawn} == set(SHARES) == set(Kind) - {Kind.BURST}
    lengths = sorted(len(request.prompt) for request in requests)
    assert lengths[0] < LIMITS.topk < LIMITS.chunk < lengths[-1]
    starts = Counter(request.prompt[:64] for request in requests if len(request.prompt) >= 64)
    assert starts.most_common(1)[0][1] > 10  # a shared prefix


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_every_bad_request_differs_from_a_good_one(setup: Any) -> None:
    body = setup.engine.body([[7, 8, 9]], 4)
    # SGLang answers an empty prompt.
    kinds = 12 if isinstance(setup.engine, SglangEngine) else 13
    bad = [*islice(malformed(setup.engine), kinds), *islice(oversized(setup.engine, setup.limits), 3)]
    assert len({what for what, _ in bad}) == len({text for _, text in bad}) == kinds + 3
    assert ("empty prompt" in {what for what, _ in bad}) == (kinds == 13)
    assert json.dumps(body).encode() not in {text for _, text in bad}
    traffic = Traffic(setup.limits, 1)
    assert all(probe.total_tokens <= setup.limits.context for probe in traffic.probes)
    assert all(word.isprintable() for word in setup.flags)


def test_probe_is_compared_up_to_its_first_different_token() -> None:
    idle = Answer(token_ids=(1, 2, 3), logprobs=(-0.1, -0.2, -0.3), top=({1: -0.1}, {2: -0.2, 9: -0.25}, {3: -0.3}))
    again = replace(idle, logprobs=(-0.1, -0.21, -0.3))
    same = compared("probe", idle, again)
    assert (same.same, same.tokens, same.gap) == (3, 3, 0.0)
    assert same.logprob_error == pytest.approx(0.01)
    tie = compared("probe", idle, replace(idle, token_ids=(1, 9, 4)))
    assert (tie.same, tie.gap) == (1, pytest.approx(0.05))
    assert compared("probe", idle, replace(idle, token_ids=(1, 8, 4))).gap == math.inf
    assert compared("probe", idle, replace(idle, logprobs=(-0.1, math.nan, -0.3))).logprob_error == math.inf


def test_sums_of_metrics() -> None:
    text = 'vllm:num_preemptions_total{engine="0"} 2.0\nvllm:num_preemptions_total{engine="1"} 3.0\nother 7\n'
    assert count_of(text, PREEMPTIONS) == 5
    assert count_of("other 7", PREEMPTIONS) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('vllm:num_preemptions_total{engine="0"} 0.0\n', 0),
        ('vllm:num_preemptions_total{engine="0"} 3.0\n', 3),
        ('sglang:num_retracted_requests_total{tp_rank="0"} 2.0\nsglang:num_running_reqs{tp_rank="0"} 1.0\n', 2),
        ('sglang:num_running_reqs{tp_rank="0"} 0.0\n', 0),  # before the first retraction
        ("# HELP sglang:num_retracted_requests_total Total number of retracted requests.\nother 7\n", None),
        ("", None),
    ],
)
def test_a_counter_without_a_sample_has_counted_nothing(text: str, found: int | None) -> None:
    assert preemptions_of(text) == found


@pytest.mark.parametrize("name", SETUPS)
def test_sglang_reserves_less_than_an_answer_so_that_it_has_to_retract(name: str, tmp_path: Path) -> None:
    setup = SETUPS[name]
    reserved = setup.environ(tmp_path).get("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION")
    assert (reserved is None) == (name != "sglang")
    assert reserved is None or int(reserved) < setup.limits.answer // 8


def test_quantiles() -> None:
    assert [quantile([4, 1, 3, 2], share) for share in (0.5, 0.99)] == [2, 4]
    assert math.isnan(quantile([], 0.5))


def test_sample_counts_a_process_and_skips_one_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / str(os.getpid())).write_text("7")
    (tmp_path / "1").write_text("9")
    found = sample([os.getpid(), 2**22 + 1], 1.0, gpu=False, counts=tmp_path)
    assert found.processes == 1
    assert found.rss > MIB
    assert found.gpu is None
    assert found.objects == 7
    assert sample([os.getpid()], 1.0, gpu=False, counts=tmp_path / "absent").objects is None


def test_processes_of_torch_compile_are_not_counted(tmp_path: Path) -> None:
    """It starts one for each core when something compiles, and ends them later: 2300 open files on 32 cores."""
    script = tmp_path / "torch" / "_inductor" / "compile_worker" / "__main__.py"
    script.parent.mkdir(parents=True)
    script.write_text("input()")
    with subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE) as worker:
        found = sample([os.getpid(), worker.pid], 1.0, gpu=False, counts=tmp_path)
        worker.communicate(b"\n")
    assert found.processes == 1


SMI = """#!/bin/sh
case "$1" in
--query-compute-apps=pid,used_memory) printf '%b' "$APPS" ;;
--query-gpu=memory.used) case "$3 $4" in
  "-i 1") printf '500\\n' ;;
  *) printf '7000\\n500\\n' ;;
  esac ;;
esac
"""


@pytest.mark.parametrize(
    ("apps", "visible", "mebibytes"),
    [
        ("11, 300\\n12, 40\\n99, 5000\\n", "", 340),  # another's process shares the GPU
        ("99, 5000\\n", "", 7500),  # a container: the server's processes have other ids outside
        ("11, [N/A]\\n", "", 7500),
        ("", "", 7500),
        ("", "1", 500),  # another GPU's memory is not the server's
    ],
)
def test_gpu_memory_is_the_servers_where_nvidia_smi_knows_it(
    apps: str, visible: str, mebibytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("APPS", apps)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_bytes([11, 12]) == mebibytes * MIB


COUNTING = """
import os, pathlib, sitecustomize, sys, threading
def started():
    return sum(thread.name == sitecustomize.VARIABLE for thread in threading.enumerate())
folder = pathlib.Path(os.environ[sitecustomize.VARIABLE])
sitecustomize.write(folder)
assert not list(folder.iterdir())  # the plugin is not imported
import nsa_plugin.layouts
first = sitecustomize.count()
from nsa_plugin.decision.shapes import ModelShape
kept = [ModelShape() for _ in range(100)]
child = os.fork()
sitecustomize.write(folder)
os.write(1, f"{started()} {sitecustomize.count() - first >= 100}\\n".encode())
if child:
    sys.exit(os.waitpid(child, 0)[1])
"""


def test_processes_of_the_server_count_the_plugins_objects(tmp_path: Path) -> None:
    environ = dict(SETUPS["vllm"].environ(tmp_path))
    environ["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
    done = subprocess.run([sys.executable, "-c", COUNTING], env=os.environ | environ, capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (["1", "True"] * 2, "")
    counts = [int(path.read_text()) for path in (tmp_path / CENSUS).iterdir()]
    assert len(counts) == 2
    assert all(count >= 100 for count in counts)


def test_a_limit_of_malloc_that_the_user_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "7")
    environ = SETUPS["sglang"].environ(tmp_path)
    assert (environ["MALLOC_ARENA_MAX"], environ["MALLOC_TRIM_THRESHOLD_"]) == ("7", str(MIB))


@pytest.mark.parametrize("problem", ["", "the server died"])
def test_record_and_table(problem: str, tmp_path: Path) -> None:
    setup = SETUPS["vllm-cpu"]
    finished = Finished(good(), "0.32.0", ["/python", "serve", "--dtype", "float32"], 9.0, problem)
    finished.soak.sent.append(Sent(kind=Kind.STREAM, end=End.ANSWERED, seconds=2.0, first_token=0.5))
    options = Options(setup, 10, 1, tmp_path)
    checks = judge(finished.soak)
    record = json.loads(json.dumps(as_record(finished, options, checks, ["python", "-m", "ci.soak"])))
    assert record["ok"] is (problem == "")
    assert record["requests"]["plain"] == {"answered": 10}
    assert record["ending"]["in_flight"] == {"error": 6}
    assert record["latency_s"]["first token of a stream"]["p50"] == 0.5
    assert record["server"] == ["serve", "--dtype", "float32"]
    console = Console(width=80, record=True, file=io.StringIO())
    print_report(finished, checks, console)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert all(check.name in text for check in checks)
    assert problem in text


@pytest.mark.parametrize(
    ("preemptions", "then", "row"),
    [
        (5, [], "passed | 10 answered | 5"),
        (None, [], 'passed; by the current checks "cache pressure" fails | 10 answered | none counted'),
        (5, ["plugin objects"], 'failed; by the current checks "plugin objects" passes | 10 answered | 5'),
        (5, ["traffic"], "failed | 10 answered | 5"),
    ],
)
def test_table_judges_a_record_by_the_current_checks(
    preemptions: int | None, then: list[str], row: str, tmp_path: Path
) -> None:
    soak = good()
    soak.sent = soak.sent[:10]
    options = Options(SETUPS["sglang"], 10, 1, tmp_path)
    checks = [replace(check, holds=check.name not in then) for check in judge(good())]
    record = as_record(Finished(soak, "0.5.23", ["/python"], 9.0, ""), options, checks, ["python"])
    (tmp_path / "one.json").write_text(json.dumps(record | {"preemptions": preemptions}))
    assert f"| sglang 0.5.23, 10 minutes | {row} |" in runs_table(tmp_path)


@pytest.mark.parametrize("words", [["--engine", "toy"], ["--minutes", "0"], ["--minutes", "-3"]])
def test_bad_options_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(words)


def test_flags_of_the_engine_follow_two_dashes() -> None:
    assert parser().parse_args(["--minutes", "2", "--", "--tp", "2"]).flags == ["--tp", "2"]


# How the client reads a server's behaviour, one handler each.


def events(*counts: int) -> bytes:
    lines = [{"choices": [], "usage": {"completion_tokens": count}} for count in counts]
    return b"".join(b"data: " + json.dumps(line).encode() + b"\n\n" for line in lines)


def asked(handler: Callable[[Any], Awaitable[Any]], kind: Kind, leave_after: float = 0.0) -> Sent:
    """What the client says of a request for three tokens to a server with this handler."""
    web = pytest.importorskip("aiohttp.web")
    from aiohttp.test_utils import TestServer

    async def ask() -> Sent:
        app = web.Application()
        app.router.add_post("/v1/completions", handler)
        async with TestServer(app) as server, new_session() as session:
            client = Client(SETUPS["vllm"].engine, str(server.make_url("")).rstrip("/"), session, lambda: 0.0, 1.0)
            request = PromptRequest(name="one", prompt=(1, 2), new_tokens=3)
            return await client.send(kind, request, leave_after)

    return asyncio.run(ask())


def replying(body: bytes, status: int = 200) -> Callable[[Any], Awaitable[Any]]:
    async def handler(request: Any) -> Any:
        from aiohttp import web

        return web.Response(body=body, status=status)

    return handler


async def hanging(request: Any) -> Any:
    await asyncio.sleep(60)


async def breaking(request: Any) -> Any:
    request.transport.close()
    await asyncio.sleep(0)


WHOLE = b'{"usage": {"completion_tokens": 3}}'


@pytest.mark.parametrize(
    ("handler", "kind", "end"),
    [
        (replying(WHOLE), Kind.PLAIN, End.ANSWERED),
        (replying(b'{"usage": {"completion_tokens": 2}}'), Kind.PLAIN, End.SHORT),
        (replying(b'{"error": {"message": "no"}}'), Kind.PLAIN, End.ERROR),
        (replying(b"no", 500), Kind.PLAIN, End.ERROR),
        (replying(b"no", 400), Kind.PLAIN, End.REFUSED),
        (replying(b"no JSON"), Kind.PLAIN, End.LOST),
        (breaking, Kind.PLAIN, End.LOST),
        (hanging, Kind.PLAIN, End.HUNG),
        (hanging, Kind.CANCEL, End.LEFT),
        (replying(WHOLE), Kind.CANCEL, End.ANSWERED),
        (replying(events(1, 2, 3) + b"data: [DONE]\n\n"), Kind.STREAM, End.ANSWERED),
        (replying(events(1, 2)), Kind.STREAM, End.SHORT),
        (replying(events(1) + b'data: {"error": "no"}\n\n'), Kind.STREAM, End.ERROR),
        (replying(events(1, 2, 3)), Kind.SLOW, End.ANSWERED),
        (replying(events(1, 2, 3)), Kind.DISCONNECT, End.LEFT),
    ],
)
def test_ends_of_requests(handler: Callable[[Any], Awaitable[Any]], kind: Kind, end: End) -> None:
    assert asked(handler, kind, leave_after=0.2 if kind is Kind.CANCEL else 2).end is end


def test_counting_leaves_the_tuples_of_other_threads_alone() -> None:
    """A list of all objects refers to tuples that are still filled, and such a tuple can no longer grow."""
    counted, errors = threading.Event(), list[SystemError]()

    def fill() -> None:
        while not counted.is_set():
            try:
                tuple(number for number in range(2000))
            except SystemError as error:
                errors.append(error)

    threads = [threading.Thread(target=fill) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(12):
            census.count()
    finally:
        counted.set()
        for thread in threads:
            thread.join()
    assert errors == []
