"""Host properties that the probe reads: main memory, and NVLink connections between GPUs."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any


def cpu_memory() -> tuple[int, int]:
    """(total, available) bytes of main memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return total, page * os.sysconf("SC_AVPHYS_PAGES")
    # Unlike SC_AVPHYS_PAGES, MemAvailable counts the page cache, which the kernel frees on demand.
    available = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return total, int(available) * 1024 if available else page * os.sysconf("SC_AVPHYS_PAGES")


def has_nvlink(uuid: str) -> bool:
    """Whether NVLink connects a GPU to another of this machine; False if NVML is not available."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # pynvml may be missing, and so may the driver's library
        return False
    try:
        this = nvml.nvmlDeviceGetHandleByUUID(uuid)
        return any(
            _nvlink_between(nvml, this, nvml.nvmlDeviceGetHandleByIndex(index))
            for index in range(nvml.nvmlDeviceGetCount())
            if index != nvml.nvmlDeviceGetIndex(this)
        )
    except nvml.NVMLError:
        return False
    finally:
        nvml.nvmlShutdown()


def _nvlink_between(nvml: Any, one: Any, other: Any) -> bool:
    try:
        status = nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except nvml.NVMLError:
        return False
    return bool(status == nvml.NVML_P2P_STATUS_OK)
