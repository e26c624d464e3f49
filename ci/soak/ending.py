"""Kill a worker process of a server that is answering, and watch how the server ends."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ci.soak.client import Client
from ci.soak.measured import End, Ending, Kind
from ci.soak.traffic import Traffic
from nsa_plugin.tools.serving.process import Server

# Words in the titles of processes: vLLM's "VLLM::EngineCore", SGLang's "sglang::scheduler".
WORKERS = ("EngineCore", "scheduler")
# A worker that is in the middle of a step on a busy machine notices the end of the others after it.
_END_SECONDS, _GRACE_SECONDS, _IN_FLIGHT = 60.0, 60.0, 6


class NoWorkerError(Exception):
    """The server has no process that looks like a worker."""


def title(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:80]
    return ""


async def kill_worker(server: Server, client: Client, traffic: Traffic) -> Ending:
    """Kill a worker while requests are being answered, and wait for the server's end.

    Raises:
        NoWorkerError: no process has one of the `WORKERS` titles.
    """
    names = {pid: title(pid) for pid in server.pids()}
    worker = next((pid for pid, name in names.items() if any(word in name for word in WORKERS)), None)
    if worker is None:
        raise NoWorkerError(f"none of the server's processes is a worker: {', '.join(names.values())}")
    kinds = [Kind.PLAIN, Kind.STREAM] * (_IN_FLIGHT // 2)
    requests = [traffic.long_answer() for _ in kinds]
    asking = [asyncio.create_task(client.send(*one)) for one in zip(kinds, requests, strict=True)]
    await asyncio.sleep(1.0)
    with _supervisor_paused(server):
        os.kill(worker, signal.SIGKILL)
        killed = time.monotonic()
        ended = await _ends(server)
        seconds = time.monotonic() - killed
        sent = await asyncio.gather(*asking)
        left = [f"{pid} {title(pid)}" for pid in server.pids()] if ended else []
    status = 0
    if not ended:
        status = (await client.send(Kind.PLAIN, traffic.probe())).status
    return Ending(
        killed=names[worker],
        ended=ended,
        status=status,
        seconds=round(seconds, 2),
        in_flight=Counter(End(one.end) for one in sent),
        left=left,
    )


async def _ends(server: Server) -> bool:
    """Whether the server's first process ends in time; then the others have a while to follow."""
    first = next((pid for pid in server.pids() if _parent(pid) == os.getsid(pid)), None)
    deadline = time.monotonic() + _END_SECONDS
    while time.monotonic() < deadline:
        running = server.pids()
        if first not in running:
            grace = time.monotonic() + _GRACE_SECONDS
            while server.pids() and time.monotonic() < grace:
                await asyncio.sleep(0.1)
            return True
        await asyncio.sleep(0.1)
    return False


@contextmanager
def _supervisor_paused(server: Server) -> Iterator[None]:
    """Stop the supervisor meanwhile: it would end what the engine left behind before anyone could see it."""
    supervisor = os.getsid(server.pids()[0])
    os.kill(supervisor, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(supervisor, signal.SIGCONT)


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
