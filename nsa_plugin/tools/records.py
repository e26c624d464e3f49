"""What all benchmark records share: where they lie, what they say about the host, and how they are written."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from nsa_plugin.libraries.manifest import distributions

SCHEMA = 1
Row = dict[str, Any]


def gpu_name(gpu: str) -> str:
    """What pages call a GPU: "H100" for "NVIDIA H100 80GB HBM3"."""
    return re.sub(r" \d+GB\b.*", "", gpu.removeprefix("NVIDIA ")) or "GPU"


def host_slug(gpu: str) -> str:
    """The folder of a GPU's records: "h200" for "NVIDIA H200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu_name(gpu).lower()).strip("-")


def path_of(record: Mapping[str, Any], folder: Path) -> Path:
    """FOLDER/<host>/<suite>.json."""
    return folder / host_slug(record["host"]["gpu"]) / f"{record['suite']}.json"


def save(record: Mapping[str, Any], path: Path, indent: int = 1) -> None:
    """Write the record completely or not at all: the documentation is generated from these files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=indent) + "\n")
    os.replace(partial, path)


def head(suite: str, command: str, host: Mapping[str, Any]) -> dict[str, Any]:
    """What every record begins with; its date is today's."""
    return {
        "schema": SCHEMA,
        "suite": suite,
        "command": command,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "host": dict(host),
    }


def software(commit: str | None = None) -> dict[str, Any]:
    """The host's software as a record lists it.

    Args:
        commit: source commit; None: read it from the checkout.
    """
    return {
        "torch": version("torch"),
        "triton": version("triton"),
        "libraries": libraries(name for name in (*distributions(), "sglang") if name not in ("torch", "triton")),
        "commit": checkout() if commit is None else commit,
    }


def libraries(names: Iterable[str]) -> dict[str, str]:
    """Versions of those distributions that are installed."""
    return {name: found for name in names if (found := version(name))}


def version(distribution: str) -> str:
    """The installed version, or "" if the distribution is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def checkout() -> str:
    """The checkout's commit, with "+changes" if tracked files differ from it; "" outside a checkout."""
    here = str(Path(__file__).parent)

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", here, *arguments], capture_output=True, text=True)

    try:
        found, changes = git("rev-parse", "--short", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    except OSError:  # git is not installed
        return ""
    if found.returncode:
        return ""
    return found.stdout.strip() + ("+changes" if changes.stdout.strip() else "")


def gpu_and_driver() -> tuple[str, str]:
    """Name and driver of the first GPU, ("", "") without one. From nvidia-smi: torch would use GPU memory."""
    command: Sequence[str] = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "", ""
    first = done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ","
    name, _, driver = first.partition(",")
    return name.strip(), driver.strip()


def processor() -> str:
    """The CPU's model name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor()


def portable(command: Sequence[str], local_options: Sequence[str]) -> list[str]:
    """The command as one would type it on another machine.

    Args:
        command: its words. Words after "--" belong to the engine and are kept.
        local_options: options to drop, each with a value: "--name value" or "--name=value", never abbreviated.
    """
    return list(_portable(iter(command), local_options))


def _portable(words: Iterator[str], local_options: Sequence[str]) -> Iterator[str]:
    for word in words:
        if word == "--":
            yield word
            yield from words
            return
        name, has_value, _ = word.partition("=")
        if name not in local_options:
            yield word
        elif not has_value:
            next(words, None)
