"""The server of a role: an engine's server with or without the plugin, and the run it fills."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from nsa_plugin.tools.compare.measured import CONTROL, PLUGIN, PLUGIN_AGAIN, Run
from nsa_plugin.tools.serving.engine import ServedEngine
from nsa_plugin.tools.serving.logs import built_late, log_tail
from nsa_plugin.tools.serving.process import Server, ServerError, ServerSpec

_PLAN = re.compile(r"new plan \S+: (\S+) on (\S+)")


class StartCancelledError(Exception):
    """The server is no longer wanted; it was stopped during its start."""


class RoleServer:
    """The server of a role, and the run that it fills.

    Another thread may call `start` and `finish`, and any thread `cancel` meanwhile.

    Args:
        flags: of the engine.
        logs: directory for the log, the plugin's report and its trace.
        port: TCP port; 0 picks a free one.
        start_timeout: seconds until the server must be healthy.
        environ: variables added to the inherited ones and the engine's.
        trace_file: write the plugin's trace to `trace` instead of the log.
        on_progress: called during the start, with the seconds since the start and the last message of the log.
        say: called with messages about the server.

    Attributes:
        run: filled as the run goes; its `error` is set by others.
        server: the process.
        up: the server was healthy and has not been stopped.
        seconds: since the start, during the start.
        report: the file of the plugin's start-up report.
        trace: the file of the plugin's trace, with `trace_file`.
    """

    def __init__(
        self,
        role: str,
        *,
        engine: ServedEngine,
        model: Path,
        flags: Sequence[str],
        logs: Path,
        port: int = 0,
        start_timeout: float,
        environ: Mapping[str, str] | None = None,
        trace_file: bool = False,
        on_progress: Callable[[float, str], None] = lambda seconds, line: None,
        say: Callable[[str], None] = lambda text: None,
    ):
        self.run = Run(role=role)
        self.up = False
        self.seconds = 0.0
        self.report = logs / f"{role}-report.json"
        self.trace = logs / f"{role}-trace.jsonl"
        self._engine = engine
        self._cancelled = threading.Event()
        self._ready_at = 0  # size of the log
        self._on_progress = on_progress
        self._say = say
        self._plugin = plugin = role in (PLUGIN, PLUGIN_AGAIN, CONTROL)
        variables = {**engine.environ(plugin=plugin), **(environ or {})}
        if plugin:
            trace = str(self.trace) if trace_file else "log"
            variables |= {"NSA_PLUGIN_REPORT": str(self.report), "NSA_PLUGIN_TRACE": trace}
        if role == CONTROL:
            variables["NSA_PLUGIN_FAULT"] = "shift_indices"
        spec = ServerSpec(
            command=lambda port: engine.command(model, port, flags, plugin=plugin),
            environ=variables,
            log=logs / f"{role}.log",
            port=port,
            start_timeout=start_timeout,
        )
        self.server = Server(spec, self._progress)

    @property
    def role(self) -> str:
        return self.run.role

    @property
    def log(self) -> Path:
        return self.server.spec.log

    def start(self) -> None:
        """Start the server and wait until it is healthy.

        Raises:
            ServerError: the server died or was not healthy in time.
            StartCancelledError: `cancel` was called. In both cases the server is gone.
        """
        for path in (self.report, self.trace):
            path.unlink(missing_ok=True)
        self.server.start()
        self.up = True
        self._ready_at = self.log.stat().st_size if self.log.exists() else 0
        self.run.start_seconds = round(self.server.start_seconds, 1)
        self.run.command = " ".join(self.server.command())

    def cancel(self) -> None:
        """Make `start` stop the server and end, within the seconds of one health check and one stop."""
        self._cancelled.set()

    def _progress(self, seconds: float, line: str) -> None:
        self.seconds = seconds
        if self._cancelled.is_set():
            raise StartCancelledError
        self._on_progress(seconds, line)

    def tail(self, count: int) -> list[str]:
        """The last lines of the log."""
        return log_tail(self.log, count)

    def say(self, text: str) -> None:
        self._say(f"{self.role}: {text}")

    def fail(self, error: Exception) -> None:
        """End the run with an error, and stop the server so that it does not disturb the others."""
        self.run.error = str(error)
        self.say(f"FAILED: {error}")
        self.finish()

    def finish(self) -> None:
        """Record the plugin's report and routes, and stop the server. Does nothing if the server is gone.

        The run gets an error if a process of the server still runs.
        """
        up, self.up = self.up, False
        try:
            if up:
                self.note_plugin()
        finally:
            try:
                self.server.stop()
            except ServerError as error:
                self.run.error = self.run.error or str(error)
                self.say(str(error))

    def note_plugin(self) -> None:
        """Record the plugin's report, routes and plans. A failure to read them is logged and does not fail the run."""
        if not self._plugin:
            return
        run = self.run
        try:
            run.report = json.loads(self.report.read_text())
        except (OSError, ValueError):
            run.report = {}
        try:
            metrics = self.server.get(self._engine.metrics_path, timeout=5.0)
            run.routes = dict(self._engine.routes(metrics)) or run.routes
            run.combined = dict(self._engine.combined(metrics)) or run.combined
            run.resharded = dict(self._engine.resharded(metrics)) or run.resharded
        except ServerError as error:
            self.say(f"no metrics: {error}")
        found = list[tuple[str, str]]()
        if self.log.exists():
            found = _PLAN.findall(self.log.read_text(errors="replace"))
            run.built_late = built_late(self.log, self._ready_at)
        run.planned = list(dict.fromkeys(f"{route}/{provider}" for route, provider in found))
