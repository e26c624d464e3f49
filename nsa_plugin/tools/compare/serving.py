"""The server of a role: an engine's server as a process of its own, of which nothing stays behind."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from nsa_plugin.tools.compare.measured import Run
from nsa_plugin.tools.compare.rule import CONTROL, PLUGIN
from nsa_plugin.tools.serving.engine import Engine
from nsa_plugin.tools.serving.process import Server, ServerError, ServerSpec, log_tail

_PLAN = re.compile(r"new plan \S+: (\S+) on (\S+)")


class EngineServer(Server):
    """`demo.server.Server` for any engine; see there for how it starts and ends.

    Args:
        flags: of the engine.
        plugin: whether the plugin is on.
        environ: variables beside the inherited ones and the engine's.
        log: gets everything that the server prints.
        port: TCP port on 127.0.0.1.
        start_timeout: seconds until it must be healthy.
        on_progress: called several times a second until then, with the seconds since the start.
    """

    def __init__(
        self,
        engine: Engine,
        model: Path,
        flags: Sequence[str],
        *,
        plugin: bool,
        environ: Mapping[str, str],
        log: Path,
        port: int,
        start_timeout: float,
        on_progress: Callable[[float], None],
    ):
        spec = ServerSpec(
            model=model,
            arguments=flags,
            environ={**engine.environ(plugin=plugin), **environ},
            log=log,
            port=port,
            start_timeout=start_timeout,
        )
        super().__init__(spec, lambda seconds, line: on_progress(seconds))
        self._engine, self._plugin = engine, plugin

    def command(self) -> list[str]:
        return self._engine.command(self.spec.model, self._port, self.spec.arguments, plugin=self._plugin)

    def tail(self, count: int) -> list[str]:
        """The last lines of the log."""
        return log_tail(self.spec.log, count)


class StartCancelledError(Exception):
    """The server is not wanted any more; it was stopped while it started."""


class RoleServer:
    """The server of a role, and the run that it fills.

    `start` and `finish` may be called by another thread, `cancel` meanwhile by any.

    Args:
        logs: directory of its log and of the plugin's report.
        port, start_timeout: see `EngineServer`.

    Attributes:
        run: filled as it goes; its `error` is for others to set.
        server: the process.
        up: whether it was healthy and has not been stopped.
        seconds: since the start, while it starts.
    """

    def __init__(
        self,
        role: str,
        *,
        engine: Engine,
        model: Path,
        flags: Sequence[str],
        logs: Path,
        port: int,
        start_timeout: float,
    ):
        self.run = Run(role=role)
        self.up = False
        self.seconds = 0.0
        self._engine = engine
        self._cancelled = threading.Event()
        self._report = logs / f"{role}-report.json"
        self._plugin = role in (PLUGIN, CONTROL)
        environ = {"NSA_PLUGIN_REPORT": str(self._report), "NSA_PLUGIN_TRACE": "log"} if self._plugin else {}
        if role == CONTROL:
            environ["NSA_PLUGIN_FAULT"] = "shift_indices"
        self.server = EngineServer(
            engine,
            model,
            flags,
            plugin=self._plugin,
            environ=environ,
            log=logs / f"{role}.log",
            port=port,
            start_timeout=start_timeout,
            on_progress=self._progress,
        )

    @property
    def role(self) -> str:
        return self.run.role

    def start(self) -> None:
        """Start it and wait until it is healthy.

        Raises:
            ServerError: it died, or was not healthy in time. StartCancelledError: `cancel` was called. It is gone then.
        """
        self._report.unlink(missing_ok=True)
        self.server.start()
        self.up = True
        self.run.start_seconds = round(self.server.start_seconds, 1)
        self.run.command = " ".join(self.server.command())

    def cancel(self) -> None:
        """Have `start` stop the server and end, within the seconds that a look at its health and a stop take."""
        self._cancelled.set()

    def _progress(self, seconds: float) -> None:
        self.seconds = seconds
        if self._cancelled.is_set():
            raise StartCancelledError

    def finish(self) -> str:
        """Have a last look at what the plugin says of itself, and stop the server. Does nothing where it is gone.

        Returns:
            What could not be seen, or "".

        Raises:
            ServerError: a process of the server is still there.
        """
        up, self.up = self.up, False
        try:
            return self.note_plugin() if up else ""
        finally:
            self.server.stop()

    def note_plugin(self) -> str:
        """Take down what the plugin says of itself, as far as it is there; nothing here fails a run.

        Returns:
            What could not be seen, or "".
        """
        if not self._plugin:
            return ""
        run, problem = self.run, ""
        try:
            run.report = json.loads(self._report.read_text())
        except (OSError, ValueError):
            run.report = {}
        try:
            run.routes = (
                dict(self._engine.routes(self.server.get(self._engine.metrics_path, timeout=5.0))) or run.routes
            )
        except ServerError as error:
            problem = f"no metrics: {error}"
        log = self.server.spec.log
        found = _PLAN.findall(log.read_text(errors="replace")) if log.exists() else []
        run.planned = list(dict.fromkeys(f"{route}/{provider}" for route, provider in found))
        return problem
