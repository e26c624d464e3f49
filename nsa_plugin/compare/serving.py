"""An engine's server as a process of its own, of which nothing stays behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from nsa_plugin.compare.engine import Engine
from nsa_plugin.demo.server import Server, ServerSpec, log_tail


class EngineServer(Server):
    """`demo.server.Server` for any engine; see there for how it starts and ends.

    Args:
        flags: of the engine.
        plugin: whether the plugin is on.
        environ: variables beside the inherited ones and the engine's.
        log: gets everything that the server prints.
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
        start_timeout: float,
        on_progress: Callable[[float], None],
    ):
        spec = ServerSpec(
            model=model,
            arguments=flags,
            environ={**engine.environ(plugin=plugin), **environ},
            log=log,
            start_timeout=start_timeout,
        )
        super().__init__(spec, lambda seconds, line: on_progress(seconds))
        self._engine, self._plugin = engine, plugin

    def command(self) -> list[str]:
        return self._engine.command(self.spec.model, self._port, self.spec.arguments, plugin=self._plugin)

    def tail(self, count: int) -> list[str]:
        """The last lines of the log."""
        return log_tail(self.spec.log, count)
