"""Run a function on every rank of a real process group, one process a rank, under a time limit."""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import set_forkserver_preload
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Only a hang reaches these limits: ranks that share a few busy cores take minutes.
COLLECTIVE_SECONDS = 120.0
ALL_SECONDS = 300.0
GRACE_SECONDS = 3.0


def on_ranks(
    ranks: int, body: Callable[..., None], folder: Path, *given: Any, device: str = "cpu", group_stays: bool = False
) -> None:
    """Call `body(device, *given)` on each rank; fail with what the first failing ranks printed.

    Args:
        body: a module-level function, which the processes import.
        folder: an empty folder for the group's rendezvous file and for tracebacks.
        device: "cpu" for gloo, "cuda" for NCCL with one GPU a rank.
        group_stays: PyTorch itself keeps the group after the body, so a rank exits without finalization (`_end_group`).
    """
    # On CPUs ranks are forked from a server that has imported torch, which takes seconds in a new process. It has the
    # environment of its start, so ranks get this process's. With CUDA they start afresh.
    context = mp.get_context("forkserver" if device == "cpu" else "spawn")
    if device == "cpu":
        set_forkserver_preload(["torch", "torch.distributed", "triton", "nsa_plugin.parallel.token_shard", __name__])
    folder.mkdir(parents=True, exist_ok=True)
    started = [
        context.Process(
            target=_entry,
            args=(dict(os.environ), rank, ranks, body, str(folder), device, group_stays, given),
            daemon=True,
        )
        for rank in range(ranks)
    ]
    for process in started:
        process.start()
    deadline = time.monotonic() + ALL_SECONDS
    while (running := [process for process in started if process.is_alive()]) and time.monotonic() < deadline:
        wait([process.sentinel for process in running], timeout=deadline - time.monotonic())
        if any(process.exitcode for process in started):  # give the others a moment to report as well
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    hung = [rank for rank, process in enumerate(started) if process.is_alive()]
    for process in started:
        process.kill()
        process.join()
    failures = [path.read_text() for path in sorted(folder.glob("failure-*"))]
    codes = [process.exitcode for process in started]
    assert not failures, "\n".join(failures)
    assert not hung, f"ranks {hung} did not end within {ALL_SECONDS} s"
    assert codes == [0] * ranks


def _entry(
    environ: dict[str, str],
    rank: int,
    ranks: int,
    body: Callable[..., None],
    folder: str,
    device: str,
    group_stays: bool,
    given: tuple[Any, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environ)
    torch.set_num_threads(1)
    place, bound = torch.device("cpu"), {}
    if device == "cuda":
        place = torch.device("cuda", rank)
        torch.cuda.set_device(place)
        bound = {"device_id": place}
    try:
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            init_method=f"file://{folder}/meeting",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=COLLECTIVE_SECONDS),
            **bound,
        )
        body(place, *given)
        dist.barrier()
        if group_stays:
            dist.destroy_process_group()
            os._exit(0)
        _end_group()
    except BaseException:
        Path(folder, f"failure-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)  # without waiting for a group that others have left


def _end_group() -> None:
    """Destroy the group together with its threads.

    A gloo thread that releases a collective's tensor takes the GIL to release its Python object too. If the interpreter
    is shutting down by then, CPython ends the thread with pthread_exit, which unwinds through a C++ destructor: the
    process aborts with "terminate called without an active exception". `destroy_process_group` joins the threads only
    if nothing else refers to the group, so a reference that is left is an error here.
    """
    gc.collect()  # cycles through a caught exception's traceback
    dist.destroy_process_group()
    left = [task for task in Path("/proc/self/task").iterdir() if "gloo_runloop" in (task / "comm").read_text()]
    assert not left, f"{len(left)} threads of the destroyed group are alive: something still refers to it"
