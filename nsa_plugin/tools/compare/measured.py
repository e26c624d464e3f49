"""The measurements of a comparison: plain data, saved after every step and read back to be judged."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa_plugin.tools.serving.requests import Answer

SCHEMA = 1
# The facts that a verdict and a record read, which files of every release have.
_NEEDED: dict[str, type] = {
    **dict.fromkeys(("suite", "engine", "command", "kv"), str),
    **dict.fromkeys(("heads", "tp", "dp", "index_topk", "context"), int),
    "flags": list,
    **dict.fromkeys(("model", "host"), dict),
}
# What a cross-engine verdict reads besides, where `cross_engine.check_same` does not say that it is missing.
_NEEDED_BESIDE = {"selects_above": int}
_JSON_TYPES = {str: "a string", int: "a whole number", list: "a list", dict: "an object"}
STOCK, AGAIN, PLUGIN, PLUGIN_AGAIN, CONTROL = "stock", "stock-again", "plugin", "plugin-again", "control"


@dataclass(kw_only=True)
class Run:
    """One server, and its answers.

    Attributes:
        role: see `runner.ROLES`.
        command: its command line.
        start_seconds: until it was healthy; 0 if it never was.
        answers: by group, then by request.
        speed: by load and measure (see `load`), one reading per repetition.
        report: the plugin's start-up report, or empty.
        routes: batches by "phase/attention/provider", from the plugin's counters.
        combined: prefills with requests of two kinds, by kind, from the plugin's counters.
        resharded: query tokens of batches that reshard, by phase, from the plugin's counters.
        planned: plans in the server's log, as "phase/attention/provider".
        built_late: kernels of the plugin that were built while it was measured, by the server's log; None if unknown.
        skipped: groups without enough time, and loads that were not completed.
        fell: how the server failed at a prompt that was meant to make it fail (`workload.LIMIT`), or "".
        error: any other reason why the run ended early, or "".
        done: the run was completed.
    """

    role: str
    command: str = ""
    start_seconds: float = 0.0
    answers: dict[str, dict[str, Answer]] = field(default_factory=dict)
    speed: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    routes: dict[str, int] = field(default_factory=dict)
    combined: dict[str, int] = field(default_factory=dict)
    resharded: dict[str, int] = field(default_factory=dict)
    planned: list[str] = field(default_factory=list)
    built_late: list[str] | None = None
    skipped: list[str] = field(default_factory=list)
    fell: str = ""
    error: str = ""
    done: bool = False

    @property
    def active(self) -> bool:
        """Whether the plugin reported that it serves and was seen to plan batches."""
        return bool(self.report.get("active")) and bool(sum(self.routes.values()) or self.planned)


@dataclass(kw_only=True)
class Measured:
    """A whole comparison.

    Attributes:
        facts: what is the same for all runs: the engine, the model, the flags, the host.
        asked: the requested roles and cases.
        together: all servers ran at the same time and were timed in turns.
        prompts: tokens of each request's prompt, by group and request.
        digests: `RequestGroup.digest` by group.
        forced: log probabilities of a prompt that requests with forced positions request.
        least_cached: tokens that must come from the prefix cache, by request.
        runs: by role, in the order in which they were made.
        ended: why the comparison ended early, or "".
    """

    facts: dict[str, Any]
    asked: dict[str, list[str]]
    together: bool = False
    prompts: dict[str, dict[str, int]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    forced: int = 0
    least_cached: dict[str, int] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    ended: str = ""
    # A group's answers do not change: each is turned into text once.
    _lines: dict[tuple[str, str], str] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the file completely or not at all: one line without answers, then one line per group of answers."""
        runs = {role: vars(run) | {"answers": {}} for role, run in self.runs.items()}
        head = {"schema": SCHEMA, **vars(self), "runs": runs}
        del head["_lines"]
        for role, run in self.runs.items():
            for group, found in run.answers.items():
                if (role, group) not in self._lines:
                    answers = {name: one.as_dict() for name, one in found.items()}
                    self._lines[role, group] = _line({"role": role, "group": group, "answers": answers})
        partial = path.with_suffix(".partial")
        partial.write_text("".join([_line(head), *self._lines.values()]))
        os.replace(partial, path)

    @classmethod
    def load(cls, path: Path) -> Measured:
        """Read what `save` wrote.

        Raises:
            OSError, ValueError, KeyError, TypeError: the file is missing or has another format.
        """
        head, *lines = (json.loads(line) for line in path.read_text().splitlines())
        if head.pop("schema") != SCHEMA:
            raise ValueError(f"not of schema {SCHEMA}")
        _check_types(head, {"facts": dict, "asked": dict, "runs": dict})
        _check_types(head["asked"], {"runs": list, "cases": list})
        if empty := [name for name in ("runs", "cases") if not head["asked"][name]]:
            raise ValueError(f"it asked for no {' and no '.join(empty)}")  # nothing would be missing, and it would pass
        made = cls(**head | {"runs": {role: Run(**run) for role, run in head["runs"].items()}})
        for line in lines:
            answers = {name: Answer.from_dict(one) for name, one in line["answers"].items()}
            made.runs[line["role"]].answers[line["group"]] = answers
        return made

    def check_facts(self, *, beside: bool = False) -> None:
        """Check that the facts have all that a verdict and a record read.

        Args:
            beside: those of the cross-engine comparison too.

        Raises:
            ValueError: one is missing or of another type.
        """
        _check_types(self.facts, {**_NEEDED, **(_NEEDED_BESIDE if beside else {})})
        _check_types(self.facts["host"], {"gpu": str})


def _check_types(data: Mapping[str, Any], types: Mapping[str, type]) -> None:
    for name, wanted in types.items():
        if name not in data:
            raise ValueError(f"it has no {name}")
        if not isinstance(data[name], wanted):
            raise ValueError(f"{name} is {json.dumps(data[name])}; allowed: {_JSON_TYPES[wanted]}")


def _line(data: Mapping[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":")) + "\n"
