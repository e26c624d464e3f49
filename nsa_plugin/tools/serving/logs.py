"""Read an engine server's log: its last lines, its last message and its errors."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path

# "(EngineCore pid=123) ERROR 11-21 11:05:00 [core.py:12] text"
_LOG_PREFIX = re.compile(r"^(\(\w[^)]*\)\s*)?((DEBUG|INFO|WARNING|ERROR|CRITICAL)\s[-\d]+\s[:\d.]+\s(\[[^\]]*\]\s)?)?")
# What `backends.common.late` logs.
_WATCHES = b"kernels that are built from now on are named here"
_BUILT_LATE = re.compile(r"kernel (\S+) was built while serving")
_ERROR_LINE = re.compile(r"^[\w.]*(Error|Exception|Interrupt)(: .+)?$|error: ")


def log_tail(path: Path, count: int) -> list[str]:
    """The last `count` lines that are not blank, without vLLM's prefixes."""
    if not path.exists():
        return []
    lines: deque[str] = deque(maxlen=count)
    with path.open(errors="replace") as file:
        for raw in file:
            line = _LOG_PREFIX.sub("", raw.rstrip(), count=1).rstrip()
            if line.strip():
                lines.append(line)
    return list(lines)


def last_message(path: Path) -> str:
    """The last message of vLLM's loggers; other lines rarely say what the server is doing."""
    with path.open(errors="replace") as file:
        messages = [_LOG_PREFIX.sub("", line.strip(), count=1) for line in file if " INFO " in f" {line}"]
    return next((message for message in reversed(messages) if message), "nothing logged yet")


def error_lines(path: Path, count: int = 6) -> list[str]:
    """The last distinct lines that name an error, in order: the root cause comes before its echoes."""
    found = dict.fromkeys(line.strip() for line in log_tail(path, 100_000) if _ERROR_LINE.search(line.strip()))
    return list(found)[-count:]


def built_late(path: Path, start: int) -> list[str] | None:
    """Kernels of the plugin that were built while serving, by the log from byte `start` on; None if nothing watched."""
    log = path.read_bytes()
    if _WATCHES not in log:
        return None
    return list(dict.fromkeys(_BUILT_LATE.findall(log[start:].decode(errors="replace"))))


def excerpt(path: Path) -> str:
    """The log's errors, or its last lines if it has none, as part of a message."""
    lines = error_lines(path) or log_tail(path, 15)
    shown = "\n".join(f"  {line}" for line in lines) or "  (it printed nothing)"
    return f"Its log, {path}, says:\n{shown}"
