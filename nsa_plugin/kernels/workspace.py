"""Scratch memory of kernels, shared safely between threads, streams and CUDA graphs.

A buffer belongs to one thread, one device and one stream. Two threads that launch on the same stream may
still interleave their launches, and two streams run at once, so neither may share a buffer; launches of
one thread on one stream are ordered, so everything in them may. Uses that have to live at the same
time take different names.

Buffers only grow. A captured CUDA graph contains their addresses, so

- a buffer handed out during capture stays allocated, at its address, until `release`: if it has to grow
  later, the graph keeps the old one and everything after takes a new one;
- growing (or first allocating) during capture is an error: run once before, on the stream that captures.

Dequantising a cached prefix for dense attention is one read into such a buffer, of the slots of all
requests in order, which the caller up-projects:

    rows = workspace.get("prefix_kv", (len(slots), cache.dim), torch.bfloat16, cache.device)
    kv_cache_read(cache, slots, out=rows)
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nsa_plugin.errors import NsaPluginError

# Sizes are rounded up to this, in bytes, which keeps every view aligned.
GRANULE = 256


class WorkspaceError(NsaPluginError, RuntimeError):
    """A buffer would have to grow while a CUDA graph is captured."""


@dataclass
class _Buffer:
    memory: torch.Tensor  # uint8 [bytes]
    captured: bool = False


class _Buffers(threading.local):
    """A thread's own buffers, by name, device and stream; they end with the thread."""

    def __init__(self) -> None:
        self.of: dict[tuple[str, torch.device, int], _Buffer] = {}


class Workspace:
    """Named scratch buffers; any number of threads may use one `Workspace`."""

    def __init__(self) -> None:
        self._buffers = _Buffers()
        self._captured: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def get(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, *, zeroed: bool = False
    ) -> torch.Tensor:
        """A contiguous tensor at the start of the buffer `name`; the next `get` of that name overlaps it.

        Args:
            name: the use. Same name, thread, device and stream: same memory.
            shape, dtype, device: of the tensor.
            zeroed: a new buffer is zeroed, and only a new one: for kernels that leave their semaphores at
                zero. Otherwise the content is undefined.

        Raises:
            WorkspaceError: the buffer is too small and a CUDA graph is being captured.
        """
        device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        needed = math.prod(shape) * dtype.itemsize
        buffer = self._buffer(name, needed, device, zeroed)
        return buffer.memory[:needed].view(dtype).view(tuple(shape))

    def release(self) -> None:
        """Forget this thread's buffers and all that graphs captured. No captured graph may run afterwards."""
        self._buffers.of.clear()
        with self._lock:
            self._captured.clear()

    def _buffer(self, name: str, nbytes: int, device: torch.device, zeroed: bool) -> _Buffer:
        capturing = _is_capturing(device)
        key = (name, device, _stream(device))
        buffer = self._buffers.of.get(key)
        if buffer is None or buffer.memory.numel() < nbytes:
            if capturing:
                held = 0 if buffer is None else buffer.memory.numel()
                raise WorkspaceError(
                    f"workspace {name!r} holds {held} bytes on this thread and stream of {device} and needs {nbytes}, "
                    "but a CUDA graph is being captured; run once on this stream before the capture"
                )
            size = -(-max(nbytes, 1) // GRANULE) * GRANULE
            allocate = torch.zeros if zeroed else torch.empty
            buffer = _Buffer(allocate(size, dtype=torch.uint8, device=device))
            self._buffers.of[key] = buffer
        if capturing and not buffer.captured:
            buffer.captured = True
            with self._lock:
                self._captured.append(buffer.memory)
        return buffer


# The workspace of callers that bring none.
SHARED = Workspace()


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0
