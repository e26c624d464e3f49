"""Real SGLang processes for the tests: a model that it can serve on a CPU, a witness inside it, and its start.

The witness is a second plugin of SGLang. It writes down what it sees in each process, as JSON lines, and can
break SGLang first: what the tests claim does not rest on the plugin's own word.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from nsa_plugin.tools.serving.process import free_ports

# Those that ask for the torch whose CPU build the tests run with.
RUNS_ON_CPU = ">=0.5.18,<0.5.22"
STUBS = Path(__file__).parents[2] / "ci" / "stubs" / "sglang-cpu"
# Read before any test runs: a test may put the stubs on sys.path.
STUBBED = util.find_spec("torchvision") is None
# Generous: two cores that others use take several times the 25 seconds of an idle machine.
START_TIMEOUT_S = 420

# GPT-2 has no rotary embedding, for which SGLang without its kernel library would import vLLM.
MODEL = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "n_inner": 128,
    "activation_function": "gelu_new",
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SPARSE_MODEL = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "vocab_size": 256,
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_topk": 2048,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "torch_dtype": "bfloat16",
}
ENGINE = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "skip_server_warmup": True,
    "mem_fraction_static": 0.3,
    "max_total_tokens": 1024,
    "max_running_requests": 2,
    "cuda_graph_backend_prefill": "disabled",
    "cuda_graph_backend_decode": "disabled",
    "log_level": "info",
}

WITNESS = """
import json, multiprocessing, os, sys

def say(event, **facts):
    with open(os.environ["WITNESS_FILE"], "a") as file:
        file.write(json.dumps({"event": event, "pid": os.getpid(), "parent": os.getppid(), **facts}) + "\\n")

def modules(prefix):
    return sorted(name for name in sys.modules if name.startswith(prefix))

def after_scheduler(result, scheduler, *args, **kwargs):
    backend = sys.modules.get("sglang.srt.layers.attention.dsa_backend")
    say(
        "scheduler",
        backend=[cls.__name__ for cls in backend.DeepseekSparseAttnBackend.__mro__] if backend else None,
        vllm=modules("nsa_plugin.backends.vllm") + modules("nsa_plugin.patches.vllm") + modules("vllm"),
    )

def register():
    if version := os.environ.get("WITNESS_VERSION"):
        import sglang.version
        sglang.version.__version__ = version
    scheduler = multiprocessing.parent_process() is not None and "sglang.srt.managers.scheduler" in sys.modules
    say("loaded", scheduler=scheduler, vllm=modules("nsa_plugin.backends.vllm") + modules("nsa_plugin.patches.vllm"))
    if scheduler:
        if os.environ.get("WITNESS_BREAK"):
            from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
            del ATTENTION_BACKENDS["dsa"]
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
        HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", after_scheduler, HookType.AFTER)
"""
RUN_ENGINE = """
import json, sys

if __name__ == "__main__":
    import sglang

    engine = sglang.Engine(**json.loads(sys.argv[1]))
    try:
        out = engine.generate(
            input_ids=[[5, 6, 7]], sampling_params={"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
        )
        with open("tokens.json", "w") as file:
            json.dump(out[0]["output_ids"], file)
    finally:
        engine.shutdown()
"""


def needs_engine() -> pytest.MarkDecorator:
    """Skip unless the plugin and an SGLang that starts on a CPU are installed."""
    reason = ""
    try:
        version = metadata.version("sglang")
        if not SpecifierSet(RUNS_ON_CPU).contains(version, prereleases=True):
            reason = f"sglang {version} is installed; {RUNS_ON_CPU} start on a CPU"
        elif not any(point.name == "nsa_plugin" for point in metadata.entry_points(group="sglang.srt.plugins")):
            reason = "nsa-plugin is not installed in this environment, so SGLang would not find it"
    except metadata.PackageNotFoundError:
        reason = "sglang is not installed"
    return pytest.mark.skipif(bool(reason), reason=reason)


@dataclass
class Place:
    """A folder with everything that one start of SGLang needs, and what came out of it."""

    folder: Path

    def __post_init__(self) -> None:
        for name, config in (("model", MODEL), ("sparse", SPARSE_MODEL)):
            (self.folder / name).mkdir()
            (self.folder / name / "config.json").write_text(json.dumps(config))
        plugins = self.folder / "plugins"
        (plugins / "witness-1.dist-info").mkdir(parents=True)
        (plugins / "witness.py").write_text(WITNESS)
        (plugins / "witness-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: witness\nVersion: 1\n")
        (plugins / "witness-1.dist-info" / "entry_points.txt").write_text(
            "[sglang.srt.plugins]\nwitness = witness:register\n"
        )
        (self.folder / "run_engine.py").write_text(RUN_ENGINE)

    @property
    def report_file(self) -> Path:
        return self.folder / "report.json"

    @property
    def witness_file(self) -> Path:
        return self.folder / "witness.jsonl"

    def report(self) -> dict[str, Any]:
        return dict(json.loads(self.report_file.read_text()))

    def seen(self, event: str) -> list[dict[str, Any]]:
        """Return the records of the witness."""
        file = self.witness_file
        lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
        return [line for line in lines if line["event"] == event]

    def log(self) -> str:
        return (self.folder / "log.txt").read_text()

    def forget(self) -> None:
        """Remove what an earlier start wrote, so that the next one's records are its own."""
        for file in (self.witness_file, self.report_file):
            file.unlink(missing_ok=True)

    def environment(self, **extra: str) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.lstrip("_").startswith("NSA_PLUGIN")}
        # In front of the installed packages, so that the witness is loaded before the plugin.
        path = [str(self.folder / "plugins")]
        if STUBBED:
            path.append(str(STUBS))
        if inherited := os.environ.get("PYTHONPATH"):
            path.append(inherited)
        return kept | {
            "PYTHONPATH": os.pathsep.join(path),
            "WITNESS_FILE": str(self.witness_file),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            **extra,
        }

    @contextmanager
    def started(self, command: list[str], **extra: str) -> Iterator[subprocess.Popen[bytes]]:
        """A process with all that it starts, ended when the block ends."""
        with (self.folder / "log.txt").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=self.folder,  # not where a folder named sglang is on the import path
                env=self.environment(**extra),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                yield process
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def run_engine(self, arguments: dict[str, Any] | None = None, **extra: str) -> tuple[int, list[int] | None]:
        """Exit status and greedy tokens of an offline engine that answers one request."""
        arguments = {"model_path": "model", **ENGINE, **(arguments or {})}
        with self.started(["run_engine.py", json.dumps(arguments)], **extra) as process:
            status = process.wait(START_TIMEOUT_S)
        answer = self.folder / "tokens.json"
        return status, json.loads(answer.read_text()) if answer.exists() else None

    def run_program(self, text: str, **extra: str) -> Any:
        """Return a program's result.json; the log is no source, because several processes write to it."""
        (self.folder / "program.py").write_text(text)
        with self.started(["program.py"], **extra) as process:
            assert process.wait(START_TIMEOUT_S) == 0, self.log()[-4000:]
        return json.loads((self.folder / "result.json").read_text())

    def run_command_line(self, *arguments: str, model: str = "model", **extra: str) -> int:
        """Exit status of a server that is not expected to come up."""
        with self.started([*server_command(model), *arguments], **extra) as process:
            return process.wait(START_TIMEOUT_S)

    @contextmanager
    def server(self, *arguments: str, **extra: str) -> Iterator[str]:
        """The address of a server that answers."""
        (port,) = free_ports(1)
        url = f"http://127.0.0.1:{port}"
        command = [*server_command("model"), "--port", str(port), *arguments]
        with ExitStack() as stack:
            process = stack.enter_context(self.started(command, **extra))
            if not self._answers_at(url, process) and "ReadTimeout" in self.log():
                # SGLang's first request to itself gives up after 10 s, and a busy machine can take longer.
                stack.close()
                self.forget()
                process = stack.enter_context(self.started(command, **extra))
                self._answers_at(url, process)
            assert process.poll() is None, f"the server ended with {process.returncode}:\n{self.log()[-4000:]}"
            yield url

    def _answers_at(self, url: str, process: subprocess.Popen[bytes]) -> bool:
        """Whether the server comes up, rather than ends."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _answers(f"{url}/model_info"):
            if process.poll() is not None:
                return False
            assert time.monotonic() < deadline, f"no server after {START_TIMEOUT_S} s:\n{self.log()[-4000:]}"
            time.sleep(0.5)
        return True


def server_command(model: str) -> list[str]:
    command = ["-m", "sglang.launch_server", "--model-path", model]
    for name, value in ENGINE.items():
        command.append("--" + name.replace("_", "-"))
        command += [] if value is True else [str(value)]
    return command


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=START_TIMEOUT_S) as answer:
        return json.load(answer)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
