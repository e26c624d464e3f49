"""The page of an engine comparison: every row and check of one record of ``nsa-plugin compare``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nsa_plugin.tools.compare.record import OURS
from nsa_plugin.tools.compare.report import AGREEMENT_COLUMNS, serve_columns, tables
from nsa_plugin.tools.compare.verdict import AGREES
from nsa_plugin.tools.pages.markdown import FAILED, STOPPED, generated_notice, markdown_table
from nsa_plugin.tools.records import Row

_LINKS = "[All records](../records.md#engine-comparisons). [How to read this](../../compare.md#how-to-read-a-record)."


def page(path: Path, record: Row) -> str:
    """The Markdown page of the record at `path`."""
    parts = [generated_notice(path.name), f"# {record['suite']}", _LINKS, f"Result: {result(record)}."]
    facts = {
        "Record": f"[{path.name}]({path.name}), {record['date']}, commit {record['host']['commit'] or 'unknown'}",
        "Command": f"`{record['command']}`",
        "Served by": _software(record),
    }
    if other := record.get("beside"):
        facts["Compared with"] = f"{_software(other)}, commit {other['host']['commit'] or 'unknown'}"
        facts["Its command"] = f"`{other['command']}`"
        facts["Checkpoint"] = f"{record['checkpoint'][:12]}; both engines got the same files and requests"
    parts.append("\n".join(f"- {name}: {value}" for name, value in facts.items()))
    agreement, serve = tables(record)
    if agreement:
        parts += ["## Agreement", markdown_table(["between", *AGREEMENT_COLUMNS], agreement)]
    if serve:
        parts += [f"## Speed\n\nMedians; servers were timed {record['timed']}."]
        parts.append(markdown_table(serve_columns(record), serve))
    parts += [f"Left out: {load}, {why}." for load, why in record.get("left_out", {}).items()]
    parts.append("## Checks")
    checks = record["verdict"]["checks"]
    parts.append("\n".join(f"- {'passed' if c['holds'] else '**failed**'}: {c['name']}: {c['detail']}" for c in checks))
    return "\n\n".join(parts) + "\n"


def _software(record: Row) -> str:
    host = record["host"]
    libraries = "".join(f", {name} {version}" for name, version in host["libraries"].items())
    cpus = f" and {host['cpus']} CPUs" if "cpus" in host else ""
    return f"{record['engine']} on {host['gpus']} {host['gpu']}{cpus}, torch {host['torch']}{libraries}"


def failure(record: Row) -> str:
    """Why a comparison does not hold; "" if it does."""
    checks = record["verdict"]["checks"]
    failed = [check["name"] for check in checks if not check["holds"]]
    if not failed:
        return ""
    if failed == ["complete"]:
        return STOPPED
    if any(name.startswith(AGREES) for name in failed):
        return FAILED
    # The answers agreed as far as they were compared: only the checks by name say what failed.
    count = "one check" if len(failed) == 1 else f"{len(failed)} checks"
    apart = ", not its tolerance" if any(check["name"].startswith(AGREES) for check in checks) else ""
    names = ", ".join(f'"{name}"' for name in failed)
    return f"failed {count}{apart} (kept for the record): {names}"


def result(record: Row) -> str:
    """The outcome of a comparison."""
    if why := failure(record):
        return f"**{why}**"
    if compared(record):
        return "passed its tolerance"
    if any(row["op"] == "limit" for row in record["rows"]):
        return "the plugin answers a prompt that the stock engine fails at"
    return "speed only; answers were not compared"


def compared(record: Row) -> bool:
    """Whether answers were compared, so that a tolerance applied."""
    return any(row["op"] == "agreement" and row["provider"] == OURS for row in record["rows"])


_OVERVIEW = (
    "comparison",
    "result",
    "requests compared",
    "rejected",
    "control's requests rejected",
    "first token, speed-up",
)


def overview(records: Sequence[tuple[str, Row]]) -> str:
    """One line for each comparison. records: the link to each one's page, and the record."""
    lines = []
    for link, record in records:
        agreement = [row for row in record["rows"] if row["op"] == "agreement" and row["provider"] == OURS]
        wrong = [row for row in agreement if "fault" in row["case"]]
        right = [row for row in agreement if "fault" not in row["case"]]
        counts = ["-", "-", "-"]
        if right:
            counts = [str(sum(row[name] for row in right)) for name in ("requests", "rejected")]
            counts.append(f"{sum(row['rejected'] for row in wrong)} of {sum(row['requests'] for row in wrong)}")
        alone = [row for row in record["rows"] if row["op"] == "serve" and row["case"]["requests"] == 1]
        longest = max(alone, key=lambda row: int(row["case"]["prompt"]), default=None)
        timed = "-" if longest is None else f"{longest['speedup']:.2f} ({longest['case']['prompt']} tokens)"
        lines.append([f"[{record['suite']}]({link})", result(record), *counts, timed])
    return markdown_table(_OVERVIEW, lines)
