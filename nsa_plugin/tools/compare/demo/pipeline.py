"""The demo, step by step: checkpoint, server, requests, reference, control."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa_plugin.errors import NsaPluginError
from nsa_plugin.tools.checkpoints.v32 import CheckpointSpec, write_checkpoint
from nsa_plugin.tools.compare.demo.requests import Answer, Request, send, workload
from nsa_plugin.tools.compare.demo.rule import TOLERANCES, Comparison, Tolerance, compare, control_holds
from nsa_plugin.tools.compare.demo.trace import Route, Trace, read_trace
from nsa_plugin.tools.serving.process import Server, ServerError, ServerSpec, python_path_with_vllm_name, vllm_version
from nsa_plugin.tools.terminal import Steps

if TYPE_CHECKING:
    from nsa_plugin.tools.reference import ReferenceModel

MODEL_NAME = "tiny-deepseek-v3.2"
# Checkpoint, logs and traces of two servers, with room to spare.
_DISK_BYTES = 500 * 2**20
_PAGE_TOKENS = 16
_MAX_SEQS = 8


class CannotRunError(NsaPluginError):
    """The demo cannot run here or as asked."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user may choose; see `run.add_arguments`."""

    work_dir: Path
    dtype: str = "float32"
    seed: int = 2
    index_topk: int = 64
    max_num_batched_tokens: int = 256
    tensor_parallel_size: int = 1
    compile: bool = False
    small_cache: bool = False
    control: bool = True
    port: int = 0
    timeout: float = 300.0


@dataclass(frozen=True, kw_only=True)
class RequestResult:
    answer: Answer
    comparison: Comparison
    routes: Sequence[Route]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that the run must have shown."""

    name: str
    holds: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """What the run showed.

    Attributes:
        control: the answers of the server that attends to wrong tokens; empty where it was skipped.
        startup_report: as the plugin wrote it.
    """

    options: Options
    engine_version: str
    command: Sequence[str]
    start_seconds: float
    tolerance: Tolerance
    requests: Sequence[RequestResult]
    checks: Sequence[Check]
    control: Sequence[Comparison]
    startup_report: dict[str, Any]

    @property
    def ok(self) -> bool:
        return (
            all(result.comparison.agrees for result in self.requests)
            and all(check.holds for check in self.checks)
            and self.tolerance.outliers_hold([result.comparison for result in self.requests])
            and (not self.options.control or control_holds(self.control))
        )


def run_pipeline(options: Options, steps: Steps) -> DemoResult:
    """All steps.

    Raises:
        CannotRunError: something that the demo needs is missing here, or the options do not go together.
        ServerError, RequestError, TraceError: the served side failed.
    """
    with steps.step("Looking at this environment") as say:
        version = _check_environment(options)
        say(f"vLLM {version}")
    requests, max_model_len, spec = _plan(options)

    with steps.step(f"Writing a DeepSeek-V3.2 checkpoint ({spec.dtype}, seed {spec.seed})"):
        model = write_checkpoint(options.work_dir / "model", spec)

    serve = _server_spec(options, model, max_model_len, "server")
    with _started(serve, steps, "Starting vllm serve with the plugin") as server:
        answers = _send(server, requests, options, steps, f"Sending {len(requests)} requests")
        preemptions = _preemptions(server.get("/metrics"))
        command, start_seconds = server.command(), server.start_seconds

    with steps.step("Loading the reference model"):
        from nsa_plugin.tools.reference import ReferenceModel

        reference = ReferenceModel.load(model)
    tolerance = TOLERANCES[options.dtype]
    comparisons = _compare(reference, answers, tolerance, steps, "Comparing every token with the reference")
    trace = read_trace(Path(serve.plugin["trace"]), [request.name for request in requests])

    control: list[Comparison] = []
    if options.control:
        wrong = _server_spec(options, model, max_model_len, "control", fault="shift_indices")
        with _started(wrong, steps, "Control: starting a server that attends to wrong tokens") as server:
            chosen = [request for request in requests if request.control]
            wrong_answers = _send(server, chosen, options, steps, f"Control: sending {len(chosen)} requests")
        control = _compare(reference, wrong_answers, tolerance, steps, "Control: comparing")

    return DemoResult(
        options=options,
        engine_version=version,
        command=command,
        start_seconds=start_seconds,
        tolerance=tolerance,
        requests=[
            RequestResult(answer=answer, comparison=comparison, routes=trace.routes(answer.request.name))
            for answer, comparison in zip(answers, comparisons, strict=True)
        ],
        checks=coverage(options, answers, trace, preemptions, compilation_mode(serve.log.read_text(errors="replace"))),
        control=control,
        startup_report=_startup_report(Path(serve.plugin["report"])),
    )


def _check_environment(options: Options) -> str:
    try:
        version = vllm_version()
    except ServerError as error:
        raise CannotRunError(str(error)) from error
    options.work_dir.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(options.work_dir).free
    if free < _DISK_BYTES:
        raise CannotRunError(
            f"{options.work_dir} has {free // 2**20} MiB free; the demo needs {_DISK_BYTES // 2**20} MiB. "
            "Name another place with --work-dir"
        )
    return version


def _plan(options: Options) -> tuple[list[Request], int, CheckpointSpec]:
    """The workload, the longest context in tokens that it needs, and the checkpoint."""
    try:
        requests = workload(
            options.index_topk, options.max_num_batched_tokens, options.seed, long_answers=options.small_cache
        )
        spec = CheckpointSpec(seed=options.seed, dtype=options.dtype, index_topk=options.index_topk)
    except ValueError as error:
        raise CannotRunError(str(error)) from error
    longest = max(request.total_tokens for request in requests)
    if longest > spec.max_position_embeddings:
        raise CannotRunError(
            f"the longest request has {longest} tokens and the model {spec.max_position_embeddings} positions; "
            "lower --index-topk or --max-num-batched-tokens"
        )
    if spec.num_attention_heads % options.tensor_parallel_size:
        raise CannotRunError(
            f"--tensor-parallel-size {options.tensor_parallel_size} does not divide "
            f"the model's {spec.num_attention_heads} heads"
        )
    max_model_len = -(-longest // 64) * 64
    if options.small_cache:
        # So small that the shared prefix may be evicted before it is asked for again.
        requests = [replace(request, cached_tokens=0) for request in requests]
    return requests, max_model_len, spec


def _server_spec(options: Options, model: Path, max_model_len: int, name: str, **plugin: Any) -> ServerSpec:
    """How to start a server whose files begin with `name`."""
    trace, report = (options.work_dir / f"{name}.{end}" for end in ("trace.jsonl", "report.json"))
    for path in (trace, report):
        path.unlink(missing_ok=True)
    arguments = [
        *("--served-model-name", MODEL_NAME),
        *("--dtype", options.dtype),
        *("--max-model-len", str(max_model_len)),
        *("--max-num-seqs", str(_MAX_SEQS)),
        *("--max-num-batched-tokens", str(options.max_num_batched_tokens)),
        "--enable-chunked-prefill",
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        *("--block-size", str(_PAGE_TOKENS)),
        *("--kv-cache-memory-bytes", str(256 * 2**20)),
        *("--tensor-parallel-size", str(options.tensor_parallel_size)),
        *("--generation-config", "vllm"),
        "--disable-uvicorn-access-log",
    ]
    if options.small_cache:
        arguments += ["--num-gpu-blocks-override", str(max_model_len // _PAGE_TOKENS + 2)]
    # vLLM compiles nothing on a CPU unless it is asked for the mode; it then traces once and uses inductor.
    arguments += ["--compilation-config", '{"mode": 3}'] if options.compile else ["--enforce-eager"]
    return ServerSpec(
        model=model,
        log=options.work_dir / f"{name}.log",
        arguments=arguments,
        plugin={"enabled": True, "trace": str(trace), "report": str(report), **plugin},
        environ=_environment(options),
        port=options.port,
        start_timeout=options.timeout,
    )


def _environment(options: Options) -> dict[str, str]:
    variables = {
        "PYTHONPATH": python_path_with_vllm_name(options.work_dir / "site"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # The model is too small for threads to help, and several processes that spin while they wait
        # for each other starve a machine of two cores.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
    }
    if options.compile:
        # For this architecture vLLM prefers CUDA graphs that it can break up, on a CPU too, and then compiles nothing.
        variables["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "0"
    return variables


@contextmanager
def _started(spec: ServerSpec, steps: Steps, title: str) -> Iterator[Server]:
    """The server, with a step for its start and one for its end."""
    try:
        with steps.step(title) as say:
            server = Server(spec, lambda seconds, line: say(f"{seconds:.0f} s, {line}"))
            server.start()
        yield server
        with steps.step("Stopping the server"):
            server.stop()
    finally:
        server.stop()


def _send(server: Server, requests: Sequence[Request], options: Options, steps: Steps, title: str) -> list[Answer]:
    done = 0
    with steps.step(title) as say:

        def on_answer(answer: Answer) -> None:
            nonlocal done
            done += 1
            say(f"{done} of {len(requests)} answered")

        try:
            return send(server.url, MODEL_NAME, requests, options.timeout, on_answer)
        except NsaPluginError:
            server.check_alive(patience=5.0)  # why the server died says more than that the connection broke
            raise


def _compare(
    reference: ReferenceModel, answers: Sequence[Answer], tolerance: Tolerance, steps: Steps, title: str
) -> list[Comparison]:
    comparisons = []
    with steps.step(title) as say:
        for number, answer in enumerate(answers, 1):
            say(f"{number} of {len(answers)}, {answer.request.name}")
            run = reference.run([*answer.request.prompt, *answer.token_ids])
            comparisons.append(compare(answer, run, tolerance))
    return comparisons


def coverage(
    options: Options, answers: Sequence[Answer], trace: Trace, preemptions: int, compilation: str
) -> list[Check]:
    """Whether the run took every way that it is there to show.

    Args:
        preemptions: as counted by the server. compilation: vLLM's name of its mode, "" if it is not known.
    """
    counts = trace.attention_counts()
    checks = [
        Check(name=name, holds=counts[attention] > 0, detail=f"{counts[attention]} request steps as {attention}")
        for name, attention in (
            ("dense attention for short prompts", "mha_one_shot"),
            ("sparse prefill", "sparse_prefill"),
            ("sparse decode", "sparse_decode"),
        )
    ]
    checks.append(
        Check(
            name="prefill and decode in one batch",
            holds=trace.mixed_batches > 0,
            detail=f"{trace.mixed_batches} batches held both",
        )
    )
    for answer in answers:
        request, chunk = answer.request, options.max_num_batched_tokens
        computed = len(request.prompt) - answer.cached_tokens
        if computed > 2 * chunk:
            chunks = trace.prefill_chunks(request.name)
            checks.append(
                Check(
                    name="chunked prefill",
                    holds=chunks >= 3,
                    detail=f"{request.name}: {computed} prompt tokens in {chunks} batches of up to {chunk}",
                )
            )
        if request.cached_tokens:
            checks.append(
                Check(
                    name="prefix cache",
                    holds=answer.cached_tokens >= request.cached_tokens,
                    detail=f"{request.name}: {answer.cached_tokens} of {len(request.prompt)} prompt tokens cached",
                )
            )
    if options.small_cache:
        checks.append(
            Check(name="preemption", holds=preemptions > 0, detail=f"requests were preempted {preemptions} times")
        )
    if options.compile:
        checks.append(
            Check(
                name="torch.compile",
                holds=compilation not in ("", "NONE"),
                detail=f"the server's mode is {compilation or 'not in its log'}",
            )
        )
    return checks


def compilation_mode(log: str) -> str:
    """vLLM's compilation mode as the engine logs it at its start; "" if it does not."""
    found = re.search(r"compilation_config=\{'mode': <CompilationMode\.(\w+)", log)
    return found[1] if found else ""


def _preemptions(metrics: str) -> int:
    values = re.findall(r"^vllm:num_preemptions_total(?:\{[^}]*\})? ([\d.e+]+)$", metrics, re.MULTILINE)
    return int(sum(map(float, values)))


def _startup_report(path: Path) -> dict[str, Any]:
    try:
        report: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ServerError(f"the plugin wrote no start-up report to {path}: {error}") from error
    return report
