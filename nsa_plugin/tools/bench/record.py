"""The record of a suite: measurements, host and commit.

    {"schema": 1, "suite", "command", "date",
     "host": {"gpu", "gpus", "torch", "triton", "libraries", "commit", "l2",
              "copy_gb_s", "matmul_tflops", "fp8_matmul_tflops"},
     "rows": [{"op", "case", "provider", "median_us", "min_us", "runs", "timing", "floor_us", "baseline",
               "baseline_us", "speedup", "max_error", ...}],
     "refused": [{"op", "case", "provider", "reason"}], "failed": [the same], "skipped": [{"op", "case"}]}

`host` has "emulates", an SM version, where the plugin's kernels ran as on that GPU, and since 2026-11-27
"emulates_blocks": a multiprocessor held no more blocks of a kernel than that GPU's would. Some rows have more:
`tflops` (useful operations over the median), `gather_us`, `extra_mib`, `up_projection_us`, `absorb_us`. Failed and
wrong results are not among the rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa_plugin.tools import records
from nsa_plugin.tools.bench.cases import BenchError, Suite
from nsa_plugin.tools.bench.floors import Rates

if TYPE_CHECKING:
    from nsa_plugin.tools.bench.outcome import Outcome

# Options that name local paths, and the commit, which the host part of a record has.
_WHERE = ("--json", "--commit")
FLUSHED, BACK_TO_BACK = "flushed", "back to back"  # how a timed run finds the L2 cache
PORTABLE = "portable-"
BACK_TO_BACK_SUITE, RIVALS_SUITE = "-back-to-back", "-beside-rivals"
"""Suffixes of the suites that time call after call, and that had an engine's other kernels beside them."""
_ROW_KEYS = frozenset(
    {"op", "case", "provider", "median_us", "min_us", "runs", "floor_us", "baseline", "baseline_us", "speedup"}
    | {"max_error"}
)
_HOST_KEYS = frozenset({"gpu", "gpus", "torch", "triton", "libraries", "commit"})
_HEAD: dict[str, type] = {"suite": str, "command": str, "date": str, "host": dict, "rows": list}
_IN_JSON: dict[type, str] = {str: "a string", dict: "an object", list: "an array"}


def describe_host(rates: Rates, *, l2: str, commit: str | None = None) -> dict[str, Any]:
    """The host part of a record made on this machine's current GPU.

    Args:
        l2: the state of the L2 cache at the start of a run: FLUSHED or BACK_TO_BACK.
        commit: source commit; None: read it from the checkout.
    """
    import torch

    return {
        "gpu": torch.cuda.get_device_name(),
        "gpus": 1,
        **records.software(commit),
        "l2": l2,
        **{name: None if value is None else round(value, 1) for name, value in asdict(rates).items()},
    }


def as_record(suite: Suite, outcome: Outcome, host: Mapping[str, Any], command: Sequence[str]) -> dict[str, Any]:
    """The record of one run of a suite. Other ways to run it are other suites: SUITE-back-to-back, portable-SUITE, and
    SUITE-beside-rivals where SGLang or vLLM is installed with kernels of `rivals`."""
    from nsa_plugin.tools.bench.rivals import RIVALS  # imports torch, which reading records does without

    name = suite.name + BACK_TO_BACK_SUITE * (host["l2"] == BACK_TO_BACK)
    name = f"{PORTABLE}{name}" if host.get("emulates") else name
    name += RIVALS_SUITE * any(row["provider"] in RIVALS for row in outcome.rows)
    return {
        **records.head(name, " ".join(records.portable(command, _WHERE)), host),
        "rows": outcome.rows,
        "refused": outcome.refused,
        "failed": outcome.failed,
        "skipped": [{"op": case.op, "case": case.as_dict()} for case in outcome.skipped],
    }


def suite_name(name: str) -> str:
    """The suite of `nsa-plugin bench` that a record's `suite` is a way to run."""
    return name.removesuffix(RIVALS_SUITE).removesuffix(BACK_TO_BACK_SUITE).removeprefix(PORTABLE)


def check(record: Any, where: str) -> dict[str, Any]:
    """Return the record if it has this schema.

    Raises:
        BenchError: something is missing or of another type; the message names it and `where`.
    """
    return check_parts(record, where, {}, _ROW_KEYS)


def check_parts(record: Any, where: str, more: Mapping[str, type], row_keys: frozenset[str]) -> dict[str, Any]:
    """Return the record if it has what every record has, `more` at its top, and these keys in each row.

    Args:
        more: types of the keys that only this kind of record has: str, dict or list.

    Raises:
        BenchError: something is missing or of another type; the message names it and `where`.
    """
    if not isinstance(record, dict) or record.get("schema") != records.SCHEMA:
        raise BenchError(f"{where}: not a record of schema {records.SCHEMA}")
    for name, kind in {**_HEAD, **more}.items():
        if name not in record:
            raise BenchError(f"{where}: {name!r} is missing")
        if not isinstance(record[name], kind):
            raise BenchError(f"{where}: {name!r} is not {_IN_JSON[kind]}")
    if missing := _HOST_KEYS - record["host"].keys():
        raise BenchError(f"{where}: host lacks {', '.join(sorted(missing))}")
    for position, row in enumerate(record["rows"]):
        if not isinstance(row, dict):
            raise BenchError(f"{where}: row {position} is not {_IN_JSON[dict]}")
        if missing := row_keys - row.keys():
            raise BenchError(f"{where}: row {position} lacks {', '.join(sorted(missing))}")
    return record


def is_timing(record: Any) -> bool:
    """Whether a record holds timings: `docs/benchmarks` also has records of comparisons and of the demo."""
    rows = record.get("rows") if isinstance(record, dict) else None
    return isinstance(rows, list) and bool(rows) and isinstance(rows[0], dict) and "median_us" in rows[0]


def write(record: Mapping[str, Any], folder: Path) -> Path:
    """Write the record completely or not at all to FOLDER/<host>/<suite>.json."""
    path = records.path_of(record, folder)
    records.save(check(record, str(path)), path)
    return path


def read_all(folder: Path) -> Iterator[tuple[Path, Any]]:
    """What every FOLDER/<host>/*.json holds, of whatever kind, sorted by path.

    Raises:
        BenchError: a file is not JSON.
    """
    for path in sorted(folder.glob("*/*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:  # also of a file that is not UTF-8
            raise BenchError(f"{path}: not JSON: {error}") from error
        yield path, record


def read(folder: Path) -> dict[str, list[tuple[Path, dict[str, Any]]]]:
    """The timing records in FOLDER/<host>/*.json, by host, sorted by name.

    Raises:
        BenchError: a file is not JSON, or a timing record does not have this schema.
    """
    hosts: dict[str, list[tuple[Path, dict[str, Any]]]] = {}
    for path, record in read_all(folder):
        if is_timing(record):
            hosts.setdefault(path.parent.name, []).append((path, check(record, str(path))))
    return hosts
