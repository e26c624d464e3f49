"""Where the host's time goes while a server answers: stacks of its Python threads, sampled by py-spy."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa_plugin.errors import NsaPluginError

RATE = 400  # samples a second
LISTED = 40  # functions of the thread that a record names, those in most samples
PATH_PARTS = 3
PATIENCE_S = 60.0  # for py-spy to attach and to write its file
MODEL_RUNNER = "model_runner"  # part of the file names of both engines' model runners
MODEL_CALLS = frozenset({"execute_model", "forward", "forward_extend"})
# 'process PID:"COMMAND";' once for each ancestor, 'thread (ID): NAME;', the frames, and the samples. A command may
# contain semicolons and quotes: multiprocessing starts a worker with "from multiprocessing.spawn import …; spawn_main".
LINE = re.compile(r"(?P<processes>.*?)thread \((?P<thread>\w+)\)(?:: (?P<name>[^;]*))?;(?P<frames>.*) (?P<count>\d+)")
PROCESS = re.compile(r'process (\d+):"')
FRAME = re.compile(r"(?P<function>.+) \((?P<file>.+?)(?::\d+)?\)")
# The first in a path: the plugin's folders are named like the engines.
PACKAGE = re.compile(r"(?:^|[(/])(nsa_plugin|vllm|sglang)/")
INSTALLED = "site-packages/"


class HostError(NsaPluginError):
    """py-spy is missing, failed, or sampled no thread that runs the model."""


def frame_name(frame: str) -> str | None:
    """ "function (file)" without the line number, the file as its last parts. None if the text is not a frame."""
    found = FRAME.fullmatch(frame)
    return found and f"{found['function']} ({'/'.join(Path(found['file']).parts[-PATH_PARTS:])})"


def runs_model(name: str) -> bool:
    """Whether a frame is a call of the engine's model runner. py-spy may prefix the function with its class."""
    function, _, file = name.rpartition(" (")
    return function.rpartition(".")[2] in MODEL_CALLS and MODEL_RUNNER in file.rpartition("/")[2]


def is_plugins(frames: Iterable[str]) -> bool:
    """Whether the plugin and not the engine called what a stack ends with."""
    paths = (frame.rpartition(INSTALLED)[2] for frame in frames)
    called = [found[1] for path in paths if (found := PACKAGE.search(path))]
    return called[-1:] == ["nsa_plugin"]


def host_table(lines: Iterable[str]) -> dict[str, Any]:
    """Host time of the thread that runs the model, as shares of the thread's samples.

    Args:
        lines: py-spy's raw format, with processes, threads and idle samples.

    Returns:
        the thread, its samples, `idle_share` (samples outside the model runner), `plugin_share` (samples of the
        plugin's own code and of libraries that it called) and the functions by inclusive share.

    Raises:
        HostError: no sampled thread ran the model.
    """
    stacks: dict[tuple[str, str, str], Counter[tuple[str, ...]]] = defaultdict(Counter)
    plugins: Counter[tuple[str, str, str]] = Counter()
    for line in lines:
        if found := LINE.fullmatch(line.strip()):
            process = (PROCESS.findall(found["processes"]) or ["?"])[-1]
            called = found["frames"].split(";")
            frames = tuple(name for frame in called if (name := frame_name(frame)))
            of_thread, count = (process, found["thread"], found["name"] or ""), int(found["count"])
            stacks[of_thread][frames] += count
            plugins[of_thread] += count * is_plugins(called)
    busy = {
        thread: sum(count for frames, count in samples.items() if any(map(runs_model, frames)))
        for thread, samples in stacks.items()
    }
    chosen = max(busy, key=busy.__getitem__, default=None)
    if chosen is None or not busy[chosen]:
        raise HostError(f"py-spy sampled {len(stacks)} threads, none of which ran the model")
    inclusive: Counter[str] = Counter()
    own: Counter[str] = Counter()
    for frames, count in stacks[chosen].items():
        inclusive.update(dict.fromkeys(frames, count))  # a recursive function counts once
        own.update({name: count for name in frames[-1:]})
    total = stacks[chosen].total()
    process, thread, name = chosen
    return {
        "thread": f"process {process}, thread {thread} {name}".rstrip(),
        "samples": total,
        "idle_share": round(1 - busy[chosen] / total, 4),
        "plugin_share": round(plugins[chosen] / total, 4),
        "functions": [
            {"name": name, "inclusive": round(count / total, 4), "self": round(own[name] / total, 4)}
            for name, count in inclusive.most_common(LISTED)
        ],
    }


def first_process(pids: Collection[int]) -> int:
    """The server's process that started the others."""
    import psutil  # comes with the engines

    try:
        return min(pid for pid in pids if psutil.Process(pid).ppid() not in pids)
    except (ValueError, psutil.Error) as error:
        raise HostError(f"the server's process was not found: {error}") from error


@dataclass(frozen=True)
class Sampler:
    """py-spy, and for how many seconds it samples."""

    py_spy: str
    seconds: int

    @classmethod
    def found(cls, seconds: int, environ: Mapping[str, str] = os.environ) -> Sampler:
        """The sampler with the executable that PY_SPY names, or else with the one on the PATH.

        Raises:
            HostError: there is none.
        """
        named = environ.get("PY_SPY")
        path = shutil.which(named or "py-spy")
        if path is None:
            raise HostError(f"PY_SPY={named} is not an executable" if named else "py-spy is not on the PATH")
        return cls(path, seconds)

    def sample(self, pids: Collection[int], output: Path) -> dict[str, Any]:
        """`host_table` of a server's processes.

        Raises:
            HostError: py-spy failed, or no sampled thread ran the model.
        """
        output.unlink(missing_ok=True)
        # Without --threads the stacks name no thread, and without --idle a thread that waits is not sampled.
        command = [
            self.py_spy, "record", "--pid", str(first_process(pids)), "--subprocesses", "--threads", "--idle",
            "--full-filenames",  # short ones lack the package where a folder has no __init__.py, as in SGLang
            "--rate", str(RATE), "--format", "raw", "--output", str(output), "--duration", str(self.seconds),
            "--nonblocking",
        ]  # fmt: skip
        try:
            ran = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self.seconds + PATIENCE_S,
            )
            if ran.returncode:
                said = ran.stderr.partition("Stack backtrace")[0].strip()
                raise HostError(f"py-spy failed (exit code {ran.returncode}): {said[-500:]}")
            return host_table(output.read_text(errors="replace").splitlines())
        except (OSError, subprocess.TimeoutExpired) as error:
            raise HostError(f"py-spy failed: {error}") from error


def sampled(sampler: Sampler, pids: Collection[int], ask: Callable[[], object], output: Path) -> dict[str, Any]:
    """Sample a server's stacks while a thread keeps sending prompts. A failure is returned, so that the run goes on.

    Args:
        pids: of the server.
        ask: sends one prompt and waits for the answer.
        output: file for py-spy's stacks.

    Returns:
        `host`, or else `host_error`.
    """
    over = threading.Event()

    def keep_asking() -> None:
        while not over.is_set():
            ask()

    found: dict[str, Any]
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(keep_asking)
        try:
            found = {"host": sampler.sample(pids, output)}
        except HostError as error:
            found = {"host_error": str(error)}
        finally:
            over.set()
    try:
        asking.result()
    except NsaPluginError as error:  # explains a server that ran no model
        found = {"host_error": str(error)}
    return found
