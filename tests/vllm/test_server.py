"""A real server: its /metrics show the plugin's routes, and a worker that dies is reported as vLLM does."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from ci.soak.engines import count_of
from nsa_plugin.tools.checkpoints.v32 import write_checkpoint
from nsa_plugin.tools.reference import ReferenceModel
from nsa_plugin.tools.serving.common import routes
from nsa_plugin.tools.serving.process import Server, ServerError, ServerSpec
from nsa_plugin.tools.serving.vllm import python_path_with_vllm_name, serve_command
from tests.vllm.outcome import SPEC, TOLERANCE, Answer, compare, prompt

pytestmark = pytest.mark.engine_vllm

# Only a hang reaches these limits: two cores that others use take several times the seconds of an idle machine.
SECONDS = 300
START_SECONDS = 600
ROUTE = ("phase", "attention", "provider")


def worker_pids(server: Server) -> list[int]:
    """The processes that run the model: vLLM names them in their command line."""
    return [pid for pid in server.pids() if b"Worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def post(url: str, given: dict[str, object]) -> tuple[int, bytes]:
    """Return the status and the answer of /v1/completions, to a greedy request."""
    body = json.dumps({"model": "tiny", "temperature": 0, **given}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        return response.status, response.read()


def ask(url: str, answers: list[object], tokens: int = 900) -> None:
    """Append the HTTP status, or what failed."""
    try:
        answers.append(post(url, {"prompt": list(range(100)), "max_tokens": tokens, "ignore_eos": True})[0])
    except urllib.error.HTTPError as error:
        answers.append(error.code)
    except OSError as error:
        answers.append(error)


def dies(server: Server) -> bool:
    for _ in range(SECONDS):
        try:
            server.check_alive()
        except ServerError:
            return True
        time.sleep(1)
    return False


def server_spec(tmp_path: Path, checkpoint: Path, *arguments: str) -> ServerSpec:
    flags = [
        *("--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "1024"),
        *("--enforce-eager", "--kv-cache-memory-bytes", str(1 << 28)),
        *arguments,
    ]
    plugin = {"enabled": True, "trace": str(tmp_path / "trace.jsonl")}
    return ServerSpec(
        command=lambda port: serve_command(checkpoint, port, flags, plugin),
        log=tmp_path / "server.log",
        start_timeout=START_SECONDS,
        environ={"PYTHONPATH": python_path_with_vllm_name(tmp_path / "name"), "HF_HUB_OFFLINE": "1"},
    )


def assert_metrics_have_every_batch(server: Server, trace: Path) -> None:
    answers: list[object] = []
    ask(server.url, answers, tokens=8)
    assert answers == [200]
    text = server.get("/metrics", timeout=SECONDS)
    batches = [json.loads(line) for line in trace.read_text().splitlines()]
    plans = [plan for batch in batches for plan in batch["plans"].values()]
    assert routes(text, "vllm") == Counter("/".join(plan[key] for key in ROUTE) for plan in plans)
    assert {plan["attention"] for plan in plans} == {"sparse_prefill", "sparse_decode"}
    tokens = sum(request["q_tokens"] for batch in batches for request in batch["requests"])
    assert count_of(text, ["vllm:nsa_plugin_query_tokens_total"]) == tokens == 107
    assert count_of(text, ["vllm:nsa_plugin_decision_seconds_count"]) == len(batches)
    assert count_of(text, ["vllm:nsa_plugin_build_info"]) == 1
    assert "vllm:generation_tokens_total{" in text


def test_metrics_of_two_api_servers_have_every_batch_of_the_trace(tmp_path: Path, checkpoint: Path) -> None:
    with Server(server_spec(tmp_path, checkpoint, "--api-server-count", "2")) as server:
        assert_metrics_have_every_batch(server, tmp_path / "trace.jsonl")


def test_two_data_parallel_engines_answer_right(tmp_path: Path) -> None:
    # A dense layer alone: vLLM's CPU build cannot exchange tokens for experts.
    checkpoint = write_checkpoint(tmp_path / "checkpoint", replace(SPEC, num_hidden_layers=1))
    reference = ReferenceModel.load(checkpoint)
    prompts = [prompt(length, length) for length in (20, 50, 70, 100, 130, 150, 200, 310)]
    with Server(server_spec(tmp_path, checkpoint, "--data-parallel-size", "2")) as server:

        def complete(ids: list[int]) -> Answer:
            given = {"prompt": ids, "max_tokens": 16, "ignore_eos": True, "logprobs": 1, "return_token_ids": True}
            choice = json.loads(post(server.url, given)[1])["choices"][0]
            logprobs = choice["logprobs"]["token_logprobs"]
            return compare(reference, {"ids": ids, "tokens": choice["token_ids"], "logprobs": logprobs, "cached": 0})

        with ThreadPoolExecutor(len(prompts)) as clients:
            answers = list(clients.map(complete, prompts))
        text = server.get("/metrics", timeout=SECONDS)
    assert all(all(answer.equal) and len(answer.equal) == 16 for answer in answers)
    assert max(error for answer in answers for error in answer.logprob_errors) < TOLERANCE
    for engine in "01":
        batches = [line for line in text.splitlines() if line.startswith("vllm:nsa_plugin_batches_total{")]
        assert any(f'engine="{engine}"' in line and float(line.split()[-1]) > 0 for line in batches)


def test_metrics_have_every_batch_until_a_killed_worker_ends_the_server(tmp_path: Path, checkpoint: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    spec = server_spec(tmp_path, checkpoint)
    with Server(spec) as server:
        assert_metrics_have_every_batch(server, trace)
        before = len(trace.read_text().splitlines())
        answers: list[object] = []
        client = threading.Thread(target=ask, args=(server.url, answers), daemon=True)
        client.start()
        deadline = time.monotonic() + SECONDS
        while len(trace.read_text().splitlines()) <= before + 5:
            assert time.monotonic() < deadline, spec.log.read_text()[-3000:]
            time.sleep(0.05)
        workers = worker_pids(server)
        assert workers
        os.kill(workers[0], signal.SIGKILL)
        client.join(SECONDS)
        assert not client.is_alive()
        assert answers
        assert answers[0] != 200
        assert dies(server)  # vLLM ends a server whose engine is dead
