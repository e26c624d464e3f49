"""The demo's steps: checkpoint, server with the plugin, reference, and a control server with a deliberate fault."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa_plugin.errors import NsaPluginError
from nsa_plugin.tools.checkpoints.v32 import SMALL_GLM, CheckpointSpec, write_checkpoint
from nsa_plugin.tools.compare.demo.checks import compilation_mode, coverage, preemptions
from nsa_plugin.tools.compare.demo.trace import RequestTrace, read_trace
from nsa_plugin.tools.compare.demo.workload import demo_workload
from nsa_plugin.tools.compare.measured import CONTROL, PLUGIN, Run
from nsa_plugin.tools.compare.role_server import RoleServer
from nsa_plugin.tools.compare.rule import Compared, compare_with_reference
from nsa_plugin.tools.compare.tolerance import TOLERANCES, ReferenceTolerance
from nsa_plugin.tools.compare.verdict import Check, Verdict, judge_with_reference
from nsa_plugin.tools.serving.client import send
from nsa_plugin.tools.serving.engine import GLM, V32, CompareError
from nsa_plugin.tools.serving.process import ServerError
from nsa_plugin.tools.serving.requests import PromptRequest, RequestGroup
from nsa_plugin.tools.serving.vllm import VllmCpuEngine, python_path_with_vllm_name
from nsa_plugin.tools.terminal import Steps

if TYPE_CHECKING:
    from nsa_plugin.tools.reference import ReferenceModel

ENGINE = VllmCpuEngine()
GROUP = "demo"
NUM_LOGPROBS = 5
# The checkpoint, logs and traces of two servers, with room to spare.
_DISK_BYTES = 500 * 2**20
_PAGE_TOKENS = 16
_MAX_SEQS = 8


MODELS = {V32: "DeepSeek-V3.2", GLM: "GLM-5"}
"""The families of checkpoints that the demo can make."""


class CannotRunError(NsaPluginError):
    """The demo cannot run here, or not with these options."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The command's options; see `nsa-plugin demo --help`."""

    work_dir: Path
    family: str = V32
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
class DemoResult:
    """What the run showed.

    Attributes:
        plugin, control: the servers' runs, their answers under the group "demo"; `control` is empty if skipped.
        trace: its batches.
        verdict: its answers against the reference.
        coverage: one check for each execution path.
    """

    options: DemoOptions
    engine_version: str
    command: Sequence[str]
    requests: Sequence[PromptRequest]
    plugin: Run
    control: Run
    trace: RequestTrace
    verdict: Verdict
    coverage: Sequence[Check]

    @property
    def tolerance(self) -> ReferenceTolerance:
        return TOLERANCES[self.options.dtype]

    @property
    def failures(self) -> list[str]:
        """Each check that failed, in a few words."""
        failed = [check.detail for check in self.verdict.checks if not check.holds]
        return failed + [f"not shown: {check.name}" for check in self.coverage if not check.holds]

    @property
    def ok(self) -> bool:
        return not self.failures


def run_pipeline(options: DemoOptions, steps: Steps) -> DemoResult:
    """Run all steps.

    Raises:
        CannotRunError: this environment lacks something, or the options contradict each other.
        ServerError, CompareError, TraceError: the server failed.
    """
    with steps.step("Looking at this environment") as say:
        version = _check_environment(options)
        say(f"vLLM {version}")
    requests, max_model_len, spec = _plan(options)

    with steps.step(f"Writing a {MODELS[options.family]} checkpoint ({spec.dtype}, seed {spec.seed})"):
        model = write_checkpoint(options.work_dir / "model", spec)

    with _started(PLUGIN, model, max_model_len, options, steps, "Starting vllm serve with the plugin") as plugin:
        _send(plugin, requests, options, steps, f"Sending {len(requests)} requests")
        preempted = preemptions(plugin.server.get(ENGINE.metrics_path))
        command = plugin.server.command()

    with steps.step("Loading the reference model"):
        from nsa_plugin.tools.reference import ReferenceModel

        reference = ReferenceModel.load(model)
    compared = _compare(reference, requests, plugin.run, steps, "Comparing every token with the reference")
    trace = read_trace(plugin.trace, [request.name for request in requests])

    control, control_run = None, Run(role=CONTROL)
    if options.control:
        title = "Control: starting a server that attends to wrong tokens"
        sent_again = [request for request in requests if request.control]
        with _started(CONTROL, model, max_model_len, options, steps, title) as wrong:
            _send(wrong, sent_again, options, steps, f"Control: sending {len(sent_again)} requests")
        control_run = wrong.run
        control = _compare(reference, sent_again, control_run, steps, "Control: comparing")

    plugin.run.report = _startup_report(plugin.report)
    compilation = compilation_mode(plugin.log.read_text(errors="replace"))
    return DemoResult(
        options=options,
        engine_version=version,
        command=command,
        requests=requests,
        plugin=plugin.run,
        control=control_run,
        trace=trace,
        verdict=judge_with_reference(compared, control, TOLERANCES[options.dtype]),
        coverage=coverage(
            requests,
            plugin.run.answers[GROUP],
            trace,
            chunk=options.max_num_batched_tokens,
            preempted=preempted if options.small_cache else None,
            compilation=compilation if options.compile else None,
        ),
    )


def _check_environment(options: DemoOptions) -> str:
    try:
        version = ENGINE.version()
    except CompareError as error:
        raise CannotRunError(str(error)) from error
    options.work_dir.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(options.work_dir).free
    if free < _DISK_BYTES:
        raise CannotRunError(
            f"{options.work_dir} has {free // 2**20} MiB free; the demo needs {_DISK_BYTES // 2**20} MiB. "
            "Choose another place with --work-dir"
        )
    return version


def _plan(options: DemoOptions) -> tuple[list[PromptRequest], int, CheckpointSpec]:
    """The requests, the longest context they need in tokens, and the checkpoint."""
    try:
        requests = demo_workload(
            options.index_topk, options.max_num_batched_tokens, options.seed, long_answers=options.small_cache
        )
        shape = SMALL_GLM if options.family == GLM else {}
        spec = CheckpointSpec(seed=options.seed, dtype=options.dtype, index_topk=options.index_topk, **shape)
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
        # The cache is so small that the shared prefix may be evicted before it is needed again.
        requests = [replace(request, cached_tokens=0) for request in requests]
    return requests, max_model_len, spec


def _flags(options: DemoOptions, max_model_len: int) -> list[str]:
    flags = [
        *("--dtype", options.dtype),
        *("--max-model-len", str(max_model_len)),
        *("--max-num-seqs", str(_MAX_SEQS)),
        *("--max-num-batched-tokens", str(options.max_num_batched_tokens)),
        "--enable-chunked-prefill",
        "--enable-prefix-caching",
        *("--block-size", str(_PAGE_TOKENS)),
        *("--kv-cache-memory-bytes", str(256 * 2**20)),
        *("--tensor-parallel-size", str(options.tensor_parallel_size)),
        *("--generation-config", "vllm"),
        "--disable-uvicorn-access-log",
    ]
    if options.small_cache:
        flags += ["--num-gpu-blocks-override", str(max_model_len // _PAGE_TOKENS + 2)]
    # On a CPU vLLM compiles only if asked for the mode; it then traces once and uses inductor.
    return flags + (["--compilation-config", '{"mode": 3}'] if options.compile else ["--enforce-eager"])


def _environment(options: DemoOptions) -> dict[str, str]:
    variables = {
        "PYTHONPATH": python_path_with_vllm_name(options.work_dir / "site"),
        "DO_NOT_TRACK": "1",
        # The model is too small for threads to help, and several processes that spin while they wait for each other
        # starve a machine of two cores.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
    }
    if options.compile:
        # For this architecture vLLM prefers breakable CUDA graphs, on a CPU too, and then compiles nothing.
        variables["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "0"
    return variables


@contextmanager
def _started(
    role: str, model: Path, max_model_len: int, options: DemoOptions, steps: Steps, title: str
) -> Iterator[RoleServer]:
    """The server of a role, with one step for its start and one for its end."""
    with steps.step(title) as say:
        one = RoleServer(
            role,
            engine=ENGINE,
            model=model,
            flags=_flags(options, max_model_len),
            logs=options.work_dir,
            port=options.port,
            start_timeout=options.timeout,
            environ=_environment(options),
            trace_file=True,
            on_progress=lambda seconds, line: say(f"{seconds:.0f} s, {line}"),
        )
        one.start()
    try:
        yield one
        with steps.step("Stopping the server"):
            one.server.stop()
    finally:
        one.server.stop()


def _send(one: RoleServer, requests: Sequence[PromptRequest], options: DemoOptions, steps: Steps, title: str) -> None:
    """Send the requests; the server's run keeps the answers."""
    group = RequestGroup(name=GROUP, case=GROUP, how="at once", requests=tuple(requests), top=NUM_LOGPROBS, traced=True)
    number = itertools.count(1)
    with steps.step(title) as say:
        try:
            one.run.answers[GROUP] = send(
                ENGINE,
                one.server.url,
                group,
                options.timeout,
                lambda name, answer: say(f"{next(number)} of {len(requests)} answered"),
            )
        except CompareError:
            one.server.check_alive(patience=5.0)  # the server's own error says more than a broken connection
            raise


def _compare(
    reference: ReferenceModel, requests: Sequence[PromptRequest], run: Run, steps: Steps, title: str
) -> list[Compared]:
    compared = []
    with steps.step(title) as say:
        for number, request in enumerate(requests, 1):
            say(f"{number} of {len(requests)}, {request.name}")
            answer = run.answers[GROUP][request.name]
            given = reference.run([*request.prompt, *answer.token_ids])
            compared.append(compare_with_reference(request, answer, given, group=GROUP))
    return compared


def _startup_report(path: Path) -> dict[str, Any]:
    try:
        report: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ServerError(f"the plugin wrote no start-up report to {path}: {error}") from error
    return report
