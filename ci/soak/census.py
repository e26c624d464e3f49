"""Count the plugin's objects in each process of a server, from inside it.

A soak copies this file as ``sitecustomize.py`` into a folder on the server's PYTHONPATH, so it imports only the
standard library. Each process writes its count into a file that has its process id as name, every few seconds.
"""

from __future__ import annotations

import gc
import itertools
import operator
import os
import sys
import threading
import time
from pathlib import Path

VARIABLE = "_SOAK_CENSUS"
"""The folder of the counts; without it nothing is counted."""
EVERY_S = 10.0


def count(package: str = "nsa_plugin") -> int:
    """Instances of the package's classes that are alive.

    The list of all objects holds tuples that other threads are still filling, such as one of a generator's items. To
    grow, a tuple must have no second reference: SystemError, bad argument to internal function. So the list lives
    within one call of C code, in which the interpreter does not switch threads, and only types leave it.
    """
    start = f"{package}."
    kinds = list(map(type, itertools.chain.from_iterable(map(operator.call, [gc.get_objects]))))
    modules = (getattr(kind, "__module__", None) for kind in kinds)
    return sum(isinstance(module, str) and module.startswith(start) for module in modules)


def read(folder: Path, pids: list[int]) -> int | None:
    """The last counts of these processes, added up; None if none of them has counted."""
    counts = [path.read_text() for pid in pids if (path := folder / str(pid)).exists()]
    numbers = [int(text) for text in counts if text]
    return sum(numbers) if numbers else None


def write(folder: Path) -> None:
    """Write this process's count, unless the plugin is not imported here."""
    if "nsa_plugin" in sys.modules:
        temporary = folder / f"{os.getpid()}.new"
        temporary.write_text(str(count()))
        temporary.replace(folder / str(os.getpid()))


def _run(folder: Path) -> None:
    while True:
        time.sleep(EVERY_S)
        write(folder)


def _start() -> None:
    threading.Thread(target=_run, name=VARIABLE, args=(Path(os.environ[VARIABLE]),), daemon=True).start()


if __name__ == "sitecustomize" and os.environ.get(VARIABLE):
    _start()
    os.register_at_fork(after_in_child=_start)
