"""Run a command and end all of its processes, however the process that started the supervisor ends.

usage: supervisor.py MARKER COMMAND [ARGUMENT...]

The supervisor leads the session of the command and its descendants, and sets NSA_TOOLS_PROCESS=MARKER in their
environment. Either one identifies a process: some leave the session, and some (vLLM's workers, by setting their title)
overwrite their environment.

The supervisor reads standard input. It ends all of these processes when standard input ends (the parent closed it or
died, even of SIGKILL), on SIGTERM, or when the command ends by itself.

Exit code: the command's own; 0 if it was told to stop; 70 if a process could not be ended.

This is a script and not a module to import: it must start fast and import little.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import psutil

MARK = "NSA_TOOLS_PROCESS"
EXIT_LEFT_BEHIND = 70
# A running vLLM ends within a second of SIGTERM; one that is starting does not react.
_GRACE_SECONDS = 4.0
_KILL_SECONDS = 10.0


def members(marker: str, session: int) -> list[psutil.Process]:
    """The running processes of the command: those in `session` except its leader, and those with the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            belongs = os.getsid(process.pid) == session or process.environ().get(MARK) == marker
            if belongs and process.pid != session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue  # it has just ended, or is another user's
    return found


def kill_members(marker: str, session: int) -> list[int]:
    """Kill the running processes of the command. Returns the pids of those that could not be killed."""
    deadline = time.monotonic() + _KILL_SECONDS
    # In a loop: a process may start another one between the search and the kill.
    while (left := members(marker, session)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.05)
    return [process.pid for process in left]


def end_all(command: subprocess.Popen[bytes], marker: str) -> list[int]:
    """Ask the command to end, then kill what is left of it. Returns the pids of what could not be killed."""
    if command.poll() is None:
        command.terminate()
        try:
            command.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            command.kill()
            command.wait()
    return kill_members(marker, os.getpid())


def main(marker: str, arguments: list[str]) -> int:
    if os.getsid(0) != os.getpid():
        os.setsid()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        command = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            env={**os.environ, MARK: marker},
        )
    except OSError as error:
        print(f"cannot start {arguments[0]}: {error}", file=sys.stderr, flush=True)
        return 127

    def wait_for_parent() -> None:
        while os.read(0, 4096):
            pass
        stop.set()

    threading.Thread(target=wait_for_parent, daemon=True).start()
    while command.poll() is None and not stop.wait(0.1):
        pass
    told_to_stop = stop.is_set()
    if end_all(command, marker):
        return EXIT_LEFT_BEHIND
    return 0 if told_to_stop else command.returncode


if __name__ == "__main__":
    # os._exit: the thread that reads standard input may never return.
    exit_code = main(sys.argv[1], sys.argv[2:])
    os._exit(exit_code if exit_code >= 0 else 128 - exit_code)
