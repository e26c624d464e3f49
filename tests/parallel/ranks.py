"""Runs a function on the ranks of a real process group, each a process of its own, and never longer than said."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Only what hangs comes to these: ranks that share a few busy cores take minutes.
COLLECTIVE_SECONDS = 120.0
ALL_SECONDS = 300.0
GRACE_SECONDS = 3.0


def on_ranks(ranks: int, body: Callable[..., None], folder: Path, *given: Any, device: str = "cpu") -> None:
    """Call `body(device, *given)` on each rank; fail with what the first failing ranks printed.

    Args:
        body: a function of a module, as processes import it.
        folder: an empty one, for the group's meeting point and for tracebacks.
        device: "cpu" for gloo, "cuda" for NCCL with a GPU a rank.
    """
    context = mp.get_context("spawn")
    folder.mkdir(parents=True, exist_ok=True)
    started = [
        context.Process(target=_entry, args=(rank, ranks, body, str(folder), device, given), daemon=True)
        for rank in range(ranks)
    ]
    for process in started:
        process.start()
    deadline = time.monotonic() + ALL_SECONDS
    while (running := [process for process in started if process.is_alive()]) and time.monotonic() < deadline:
        wait([process.sentinel for process in running], timeout=deadline - time.monotonic())
        if any(process.exitcode for process in started):  # what the others say of it is worth a moment
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


def _entry(rank: int, ranks: int, body: Callable[..., None], folder: str, device: str, given: tuple[Any, ...]) -> None:
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
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"failure-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)  # without waiting for a group that others have left
    # The rank's work is done, and its group destroyed. What is left is the interpreter's end, in which a process now
    # and then aborted ("terminate called without an active exception", no Python frame).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
