"""The memory of a server's processes over time."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from ci.soak import census
from ci.soak.measured import Sample
from nsa_plugin.tools.serving.process import Server

MIB = 2**20
_COMPILES = "torch/_inductor/compile_worker"
"""In the command of the processes that torch.compile starts, and ends again, as many as there are cores."""


class Watch:
    """Samples the server's memory in a thread, as a context manager.

    Args:
        clock: seconds since the start of the load.
        gpu: read the GPUs' memory too.
        counts: the folder of the counts of `census`.
    """

    def __init__(self, server: Server, clock: Callable[[], float], every: float, *, gpu: bool, counts: Path):
        self.samples: list[Sample] = []
        self._server, self._clock, self._every, self._gpu, self._counts = server, clock, every, gpu, counts
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            self.samples.append(sample(self._server.pids(), self._clock(), gpu=self._gpu, counts=self._counts))


def sample(pids: list[int], at: float, *, gpu: bool, counts: Path) -> Sample:
    """The memory of the processes now, without those of torch.compile. One that has just ended counts nothing."""
    import psutil

    rss = files = count = 0
    for pid in pids:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if any(_COMPILES in word for word in process.cmdline()):
                continue
            rss += process.memory_info().rss
            files += process.num_fds()
            count += 1
    return Sample(
        at=round(at, 2),
        rss=rss,
        processes=count,
        files=files,
        gpu=gpu_bytes(pids) if gpu else None,
        objects=census.read(counts, pids),
    )


def gpu_bytes(pids: Collection[int] = ()) -> int | None:
    """Bytes that these processes use on the GPUs of CUDA_VISIBLE_DEVICES, since others may share them; all bytes in use
    there where nvidia-smi names none of the processes, as in many containers; None if nvidia-smi is not there.
    """
    if shutil.which("nvidia-smi") is None:
        return None
    own = [int(size) for pid, size in _smi("--query-compute-apps=pid,used_memory") if int(pid) in pids]
    used = own or [int(size) for (size,) in _smi("--query-gpu=memory.used")]
    return sum(used) * MIB if used else None


def _smi(query: str) -> list[list[str]]:
    """Rows of nvidia-smi whose fields are all numbers; a size that it does not know is none."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):  # which nvidia-smi does not read
        command += ["-i", visible]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    rows = [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if all(field.isdecimal() for field in row)]
