"""Start an engine's server as a subprocess, wait until it is healthy, and leave no process behind."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from types import TracebackType

from nsa_plugin.errors import NsaPluginError
from nsa_plugin.tools.serving.logs import excerpt, last_message

_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_POLL_SECONDS = 0.2
_STOP_SECONDS = 40.0


class ServerError(NsaPluginError):
    """The server did not start, died, or left a process behind."""


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """How to start a server.

    Attributes:
        command: the command line of a server that listens on a given port of 127.0.0.1.
        log: file for everything the server prints.
        environ: variables added to those of this process.
        port: TCP port; 0 picks a free one.
        start_timeout: seconds until the server must be healthy.
    """

    command: Callable[[int], Sequence[str]]
    log: Path
    environ: Mapping[str, str] = field(default_factory=dict)
    port: int = 0
    start_timeout: float = 180.0


class Server:
    """A running server, as a context manager.

    The whole process tree ends however the block is left: success, an error, Ctrl-C, a signal turned into an
    exception, even SIGKILL of this process; see `supervisor`.

    Args:
        on_progress: called several times a second during the start, with the seconds since the start and the last
            message of the log.
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
        return list(self.spec.command(self._port))

    def __enter__(self) -> Server:
        self.start()
        return self

    def start(self) -> None:
        """Start the server and wait until it is healthy.

        Raises:
            ServerError: the server died or was not healthy in time; the message quotes its log. The server is gone.
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
                    # A terminal sends Ctrl-C to its foreground group; only this process may stop the server.
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
        """Check that the server runs.

        Args:
            patience: seconds to wait for its end, if something else suggests that it is failing.

        Raises:
            ServerError: the server is gone; the message quotes its log.
        """
        code = None
        if self._process is not None:
            try:
                code = self._process.wait(patience)
            except subprocess.TimeoutExpired:
                return
        raise ServerError(f"the server died (exit code {code}).\n{excerpt(self.spec.log)}")

    def stop(self) -> None:
        """End the whole process tree and check that it is gone. Does nothing if the server is not running.

        Raises:
            ServerError: a process of the server still runs.
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
            ServerError: no connection, an HTTP status other than 200, or a reply that is not HTTP.
        """
        try:
            with urllib.request.urlopen(self.url + path, timeout=timeout) as response:
                return str(response.read().decode())
        except (OSError, HTTPException) as error:
            # HTTPException: a port that nobody listens on may connect to itself and reply with the request.
            raise ServerError(f"GET {self.url}{path}: {error}") from error

    def _wait_healthy(self, started: float) -> None:
        while True:
            self.check_alive()
            with suppress(ServerError):
                self.get("/health", timeout=2.0)
                return
            elapsed = time.monotonic() - started
            if elapsed > self.spec.start_timeout:
                raise ServerError(
                    f"the server was not healthy after {self.spec.start_timeout:.0f} s.\n{excerpt(self.spec.log)}"
                )
            self._on_progress(elapsed, last_message(self.spec.log))
            time.sleep(_POLL_SECONDS)

    def _kill_members(self, supervisor_pid: int) -> list[int]:
        """Kill what a supervisor that was itself killed left running. Pids of what could not be killed."""
        from nsa_plugin.tools.serving.supervisor import kill_members  # psutil comes with the engines

        return kill_members(self._marker, supervisor_pid)

    def pids(self) -> list[int]:
        """Pids of the server's running processes."""
        from nsa_plugin.tools.serving.supervisor import members

        return [] if self._process is None else [member.pid for member in members(self._marker, self._process.pid)]


@contextmanager
def _signals_held() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the block ends: a clean-up must not stop half-way."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Handlers, not a signal mask: Python runs a handler in this thread for a signal sent to any thread.
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


# Below the ports that Linux gives to outgoing connections: a connection to a server that does not listen yet could
# get the server's own port and reach itself. SGLang 0.5.12 also uses the port 10000 above its server's.
PORTS = range(20_000, 32_768)


def free_ports(count: int) -> list[int]:
    """Distinct TCP ports of 127.0.0.1, from `PORTS`, that nobody listens on now."""
    found: list[int] = []
    with ExitStack() as held:
        while len(found) < count:
            probe, port = held.enter_context(socket.socket()), random.choice(PORTS)
            with suppress(OSError):  # the port is taken
                probe.bind(("127.0.0.1", port))
                found.append(port)
    return found
