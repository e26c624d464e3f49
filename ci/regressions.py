"""Failures that users of the engines met, and the tests that guard against each: the table of docs/regressions.md.

A test names the failures it guards against with `@pytest.mark.regression(number)`, or with what it covers as a second
argument. A test of an engine (tests/backends/<engine>, tests/<engine>) counts for that engine, any other for both. Each
failure needs a test or a reason for each engine.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ci.rows import ROOT
from nsa_plugin.tools.pages.markdown import markdown_table

SGLANG, VLLM = ENGINES = ("sglang", "vllm")
MARKER = "pytest.mark.regression"


@dataclass(frozen=True)
class Failure:
    """A failure that users met.

    Attributes:
        seen: repository and number.
        sglang, vllm: why the failure cannot reach the plugin there, or what else there is to say.
    """

    what: str
    seen: str
    sglang: str = ""
    vllm: str = ""


@dataclass(frozen=True, order=True)
class Guard:
    """A test that guards against a failure.

    Attributes:
        note: what the test covers; "" if that is all of the failure.
    """

    number: int
    note: str
    test: str
    path: str

    @property
    def engines(self) -> Sequence[str]:
        parts = self.path.split("/")
        return [engine for engine in ENGINES if engine in parts[1:3]] or ENGINES


FAILURES = {
    1: Failure("selection skipped inside a graph, attention without it", "sglang #12816"),
    2: Failure("wrong key ranges in a ragged selection", "sglang #12583"),
    3: Failure("wrong lengths for draft tokens", "sglang #13236", sglang="the lengths are stock code"),
    4: Failure(
        "layout of the indexer's rotary embedding",
        "sglang #13530",
        sglang="stock code: the indexer's queries and keys are used as they are",
        vllm="stock code: the indexer's queries and keys are used as they are",
    ),
    5: Failure("no path for verify and draft tokens", "sglang #17662"),
    6: Failure(
        "more query tokens than a library schedules",
        "sglang #25502",
        vllm="for V3.2, vLLM passes a prefill as one sequence",
    ),
    7: Failure("a long prefill's logits run out of memory", "sglang #39095"),
    8: Failure(
        "a second copy of the code without the bound",
        "sglang #37712",
        sglang="one budget, `IndexerPlan.rows_per_chunk`",
        vllm="one budget, `IndexerPlan.rows_per_chunk`",
    ),
    9: Failure("a prefill without query tokens", "vllm #51486"),
    10: Failure("dense attention chosen, sparse attention run without a selection", "vllm #52512"),
    11: Failure("zero lengths during capture", "vllm #51970"),
    12: Failure("several query tokens for a request in a sparse decode", "vllm #31845"),
    13: Failure("an eager prefill over a live graph's workspace", "vllm #56771"),
    14: Failure(
        "slots beyond a row's length attended",
        "flashinfer #5095",
        sglang="for V3.2, -1 follows the last slot",
        vllm="for V3.2, -1 follows the last slot",
    ),
    15: Failure("32-bit addresses", "vllm #41834"),
    16: Failure("the second request of a batch read the first's", "vllm #41834"),
    17: Failure(
        "different tokens without head padding",
        "sglang #39235",
        sglang="only visible on a GPU: the tokens and log probabilities of [`nsa-plugin compare`](compare.md)",
        vllm="only visible on a GPU: the tokens and log probabilities of [`nsa-plugin compare`](compare.md)",
    ),
    18: Failure("a head count that another version's kernel supports", "vllm #48047"),
    19: Failure("a negative length read as a large one", "idle ranks"),
    20: Failure("padding rows under context parallelism", "-"),
    21: Failure("prefill and decode in one call", "vllm #41836"),
    22: Failure("a batch padded to a bucket far above it", "sglang-jax #1508", vllm="the plugin pads no batch"),
    23: Failure(
        "an indexer split over ranks",
        "vllm #53691",
        sglang="only when [resharding](token-shard.md), where a rank selects for the query tokens it attends; "
        "otherwise every rank selects for itself, as in stock SGLang",
        vllm="only when [resharding](token-shard.md), where each query token is scored and attended by the same rank; "
        "vLLM's own split of a prefill (0.32 on) is off for such a batch",
    ),
    24: Failure(
        "a kernel compiled again for every ragged chunk",
        "-",
        sglang="chunks are a power of two",
        vllm="steps: chunks are a power of two; prefills: stock call, stock chunks",
    ),
    25: Failure(
        "`seqlens_k must have shape (batch_size)`",
        "thread of sglang #13646",
        sglang="the plugin's kernels read no lengths",
        vllm="the plugin's kernels read no lengths for V3.2",
    ),
    26: Failure(
        "7 query tokens selected, 8 attended",
        "sglang #13646",
        vllm="the selection buffer has a row for every scheduled token",
    ),
    27: Failure(
        "an engine upgrade broke it",
        "vllm-ascend #4400",
        sglang="`python -m ci.seams` for every version",
        vllm="`python -m ci.seams` for every version",
    ),
    28: Failure("silently not enabled", "sglang #37847"),
}


def guards(root: Path = ROOT) -> Iterator[Guard]:
    """The tests that carry the marker.

    Raises:
        ValueError: a marker is not a number and at most one string.
    """
    for path in sorted((root / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == MARKER:
                    number, note = _arguments(decorator, path)
                    yield Guard(number, note, node.name, str(path.relative_to(root)))


def _arguments(decorator: ast.Call, path: Path) -> tuple[int, str]:
    match [argument.value if isinstance(argument, ast.Constant) else None for argument in decorator.args]:
        case [int(number)] if not decorator.keywords:
            return number, ""
        case [int(number), str(note)] if not decorator.keywords:
            return number, note
    raise ValueError(f"{path}:{decorator.lineno}: {ast.unparse(decorator)} is not a number and at most one note")


def table(found: Sequence[Guard] | None = None, failures: Mapping[int, Failure] = FAILURES) -> str:
    """The table of failures.

    Raises:
        ValueError: a failure has neither a test nor a reason for an engine, or a test names an unknown failure.
    """
    by_number: dict[int, list[Guard]] = defaultdict(list)
    for guard in sorted(guards() if found is None else found):
        if guard.number not in failures:
            raise ValueError(f"{guard.path}: {guard.test} names failure {guard.number}, which ci/regressions.py lacks")
        by_number[guard.number].append(guard)
    rows = []
    for number, failure in failures.items():
        reasons = {SGLANG: failure.sglang, VLLM: failure.vllm}
        cells = [_cell([one for one in by_number[number] if e in one.engines], reasons[e]) for e in ENGINES]
        for engine, cell in zip(ENGINES, cells, strict=True):
            if not cell:
                raise ValueError(
                    f"failure {number} ({failure.what}) has neither a test nor a reason for {engine}: mark a test with "
                    f"@{MARKER}({number}), or say in ci/regressions.py why it cannot reach the plugin"
                )
        rows.append([str(number), failure.what, failure.seen, *cells])
    return markdown_table(["#", "failure", "seen in", "SGLang", "vLLM"], rows)


def _cell(found: Sequence[Guard], reason: str) -> str:
    """The tests, those with the same note together, then the reason."""
    notes: dict[str, dict[str, None]] = defaultdict(dict)
    for guard in found:
        notes[guard.note].setdefault(f"`{guard.test}`")
    parts = [f"{note}: {', '.join(tests)}" if note else ", ".join(tests) for note, tests in notes.items()]
    return "; ".join([*parts, *([reason] if reason else [])])
