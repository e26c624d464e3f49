"""What the engines' servers share: the plugin's entry point and counters, and how flags and numbers are read."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any

from nsa_plugin.telemetry import BATCHES, COMBINED_PREFILLS, RESHARDED_TOKENS, Metric
from nsa_plugin.tools.serving.allow_list import PLUGIN, allowing, kept_out
from nsa_plugin.tools.serving.engine import V4, CompareError

# Engines read the numbers of their flags like this: 8192, 8k (8000), 8K (8192).
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmM]?)")
_FACTORS = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
_LABEL = re.compile(r'(\w+)="([^"]*)"')
# A value that is not a path, and names of variables that hold addresses or secrets.
_PLAIN = re.compile(r"[\w.+-]+")
_PRIVATE = re.compile(r"KEY$|TOKEN$|SECRET|PASSWORD|HOST|_IP$|USER")
# Off is the kill switch: it overrides the plugin's flags, which both servers may get.
_SWITCH = "NSA_PLUGIN_ENABLED"


def installed(distribution: str, title: str, entry_points: str, allow_list: str) -> str:
    """The installed version of an engine that will load the plugin.

    Args:
        distribution: name on the package index.
        title: name in messages.
        entry_points: the group in which the engine looks for plugins.
        allow_list: the environment variable that restricts which of them it loads.

    Raises:
        CompareError: the engine is not installed, or would not find or load the plugin.
    """
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        raise CompareError(
            f"{title} is not installed in {sys.prefix}; install it there: pip install {distribution} "
            "('nsa-plugin doctor' has the versions)"
        ) from None
    if not metadata.entry_points(group=entry_points, name=PLUGIN):
        raise CompareError(
            f"{title} would not find the plugin: no installed distribution has the entry point {PLUGIN} of "
            f"{entry_points}; install nsa-plugin into {sys.prefix}"
        )
    if why := kept_out(allow_list):
        raise CompareError(f"{why}; set {allow_list}={allowing(allow_list)} or unset it")
    return version


def environ(*, plugin: bool) -> dict[str, str]:
    """Variables for every engine's server."""
    return {
        _SWITCH: "1" if plugin else "0",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def switches(engine: str, variables: Mapping[str, str]) -> list[str]:
    """NAME=value of the engine's own variables, for a record's command. Paths, addresses and secrets are left out.

    Args:
        engine: prefix of the variables' names.
    """
    return [
        f"{name}={value}"
        for name, value in sorted(variables.items())
        if name.startswith(f"{engine.upper()}_") and _PLAIN.fullmatch(value) and not _PRIVATE.search(name)
    ]


def routes(metrics: str, prefix: str) -> Counter[str]:
    """Batches by "phase/attention/provider", from the plugin's counters in the text of /metrics."""
    return _counted(metrics, prefix, BATCHES)


def combined(metrics: str, prefix: str) -> Counter[str]:
    """Prefills with requests of two kinds, by kind (`telemetry.COMBINED_PREFILLS`), from the text of /metrics."""
    return _counted(metrics, prefix, COMBINED_PREFILLS)


def resharded(metrics: str, prefix: str) -> Counter[str]:
    """Query tokens of batches that reshard, by phase (`telemetry.RESHARDED_TOKENS`), from the text of /metrics."""
    return _counted(metrics, prefix, RESHARDED_TOKENS)


def _counted(metrics: str, prefix: str, metric: Metric) -> Counter[str]:
    """A counter's values by the metric's own labels, joined by slashes, summed over the processes."""
    counted: Counter[str] = Counter()
    line = re.compile(rf"^{prefix}:{metric.name}\{{(?P<labels>[^}}]*)\}} (?P<value>\S+)", re.MULTILINE)
    for found in line.finditer(metrics):
        labels = dict(_LABEL.findall(found["labels"]))
        counted["/".join(labels.get(name, "?") for name in metric.labels)] += int(float(found["value"]))
    return counted


@contextmanager
def reading(engine: str, data: Any) -> Iterator[None]:
    """Turn an error while reading an engine's reply into a CompareError."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CompareError(
            f"{engine}'s reply is not as expected ({type(error).__name__}: {error}): {str(data)[:300]}"
        ) from error


def number(value: float | None, digits: int = 5) -> float:
    """A log probability, rounded; NaN for null, which an engine's JSON has for a value that is not a number."""
    return math.nan if value is None else round(float(value), digits)


def flag_name(flag: str) -> str:
    """A flag's name, without "=value" and with "-" for "_", as vLLM reads it.

    vLLM replaces them in names that begin with "--", up to the first dot (0.33, `utils/argparse_utils.py`). No flag of
    SGLang has a "_" (0.5.23), so its server refuses what is read as another flag here.
    """
    name = flag.partition("=")[0]
    before, dot, after = name.partition(".")
    return f"{before.replace('_', '-')}{dot}{after}" if name.startswith("--") else name


def flag_value(flags: Sequence[str], *names: str) -> str | None:
    """The last value that the flags give one of `names`, as "--name value" or "--name=value"."""
    found = None
    for position, flag in enumerate(flags):
        if flag_name(flag) in names:
            _, equals, value = flag.partition("=")
            found = value if equals else (flags[position + 1] if position + 1 < len(flags) else None)
    return found


def rank_count(flags: Sequence[str], *names: str) -> int:
    """The number of ranks that the flags give one of `names`; 1 if they do not.

    Raises:
        CompareError: it is not a number, or below 1.
    """
    text = flag_value(flags, *names)
    if text is None:
        return 1
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        name = next(name for flag in reversed(flags) if (name := flag_name(flag)) in names)
        raise CompareError(f"{name} is {text!r}, which is not a whole number of at least 1")
    return count


def token_count(text: str | None) -> int | None:
    """The number of tokens in a flag's value; None if it is not a number of at least 1 (not given, "auto", -1)."""
    found = _COUNT.fullmatch(text or "")
    return int(float(found[1]) * _FACTORS[found[2]]) or None if found else None


def facts(
    flags: Sequence[str], family: str, *, tp: Sequence[str], dp: Sequence[str], chunk: str, max_len: str
) -> dict[str, Any]:
    """The part of `ServedEngine.facts` that both engines' flags give; the arguments name an engine's flags.

    Raises:
        CompareError: the number of ranks is not a number, or below 1.
    """
    cache = flag_value(flags, "--kv-cache-dtype") or "auto"
    return {
        # V4's pages are fp8 whatever the flag says (SGLang: `mem_cache/deepseek_v4_memory_pool.py`; vLLM:
        # `models/deepseek_v4/attention.py`).
        "kv": "fp8" if cache.startswith("fp8") or family == V4 else "bf16",
        "tp": rank_count(flags, *tp),
        "dp": rank_count(flags, *dp),
        # Without the flag the device decides.
        "chunk": token_count(flag_value(flags, chunk)),
        "max_len": token_count(flag_value(flags, max_len)),
    }
