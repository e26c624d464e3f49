"""Looks for processes that a test's server has started."""

from pathlib import Path

import psutil


def alive(pids: Path) -> list[int]:
    """Those of the pids in the file that still run."""

    def runs(pid: int) -> bool:
        try:
            # A zombie holds nothing but its number, until whoever has inherited it looks.
            return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    return [int(pid) for pid in pids.read_text().split() if runs(int(pid))]
