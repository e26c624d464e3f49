"""From installed to serving: reads the settings, applies the ledger, and refuses to start where it cannot.

In the process that reads SGLang's arguments `wrap_resolve` checks everything that can be checked before a
process is started; the ledger's targets are looked up in SGLang's files, so that nothing is imported that
SGLang would not import there. In each scheduler process `wrap_scheduler_init` applies and verifies the
patches before the model is built, and reports once it is. While the plugin is off, all pass straight through.

SGLang catches and logs every Exception of a plugin while it loads it, and those of a scheduler's start by
killing the server with a traceback: what is raised on purpose leaves a scheduler as SystemExit instead.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import Any

from packaging.version import Version

from nsa_plugin.backends.sglang import flags, model
from nsa_plugin.devices import DeviceProfile, probe
from nsa_plugin.dispatch import validate
from nsa_plugin.errors import NsaPluginError, PatchError
from nsa_plugin.patches import sglang as ledger_data
from nsa_plugin.patches.ledger import TURN_OFF, Ledger, Need, Patch, PatchStatus, find, wrap
from nsa_plugin.patches.static import SourceTree
from nsa_plugin.settings import ResolvedSettings, killed
from nsa_plugin.shapes import ModelShape
from nsa_plugin.telemetry import StartupReport, Trace

logger = logging.getLogger("nsa_plugin")
SCHEDULER_MODULE = "sglang.srt.managers.scheduler"


@dataclass
class Serving:
    """What the attention backends of one scheduler process work with, once the plugin serves its model."""

    resolved: ResolvedSettings
    model: ModelShape
    device: DeviceProfile
    trace: Trace


@dataclass
class Process:
    """The plugin in this process. One instance a process, because patches are the process's.

    Attributes:
        child: whether SGLang started this process; then the arguments were checked by the one that did.
        resolved: the settings, in a scheduler process where the plugin is enabled.
        stock_because: why the stock engine serves although the plugin is enabled; only with strict off.
    """

    ledger: Ledger
    child: bool
    resolved: ResolvedSettings | None = None
    statuses: Sequence[PatchStatus] = ()
    notes: list[str] = field(default_factory=list)
    serving: Serving | None = None
    stock_because: str = ""
    _said: set[str] = field(default_factory=set)

    def bootstrap(self) -> None:
        if not self.child:
            # Left from a server in whose process this one was started.
            os.environ.pop(flags.CARRIER, None)
        try:
            self.ledger.install(Need.BOOTSTRAP)
        except PatchError:
            # Without its first hooks the plugin cannot know whether it is wanted, so look where a user asks for it.
            if flags.asked_for():
                self.ledger.check_version()  # the better reason, where it is one
                raise
            logger.warning("nsa-plugin is installed but not asked for, and does not know this SGLang", exc_info=True)

    def check_before_serving(self, server_args: Any) -> None:
        """In the main process, before SGLang works on its arguments.

        Raises:
            NsaPluginError: a setting is wrong, or (strict) the plugin cannot serve here.
        """
        given = flags.Carried.read().flags
        if killed():
            if given:
                self._say_once(logging.INFO, "nsa-plugin is switched off by NSA_PLUGIN_ENABLED=0; its flags are ignored")
            return
        carried = flags.Carried(given, flags.engine_backends(server_args))
        carried.write()
        resolved, _ = carried.resolve()
        if not resolved.settings.enabled:
            return
        try:
            _check_files(self.ledger.version)
            if getattr(server_args, "use_ray", False):
                raise PatchError(
                    f"SGLang loads no plugins in Ray actors: nsa-plugin does not work with --use-ray. {TURN_OFF}"
                )
            model.refuse_sparse_model_on_cpu(server_args)
        except NsaPluginError as error:
            if resolved.settings.strict:
                raise
            self._say_once(logging.WARNING, f"nsa-plugin: strict is off and the stock engine serves: {error}")

    def enter_scheduler(self) -> None:
        """Apply and verify the patches, before a scheduler builds its model.

        Raises:
            NsaPluginError: a setting is wrong, or (strict) something does not fit.
        """
        if killed():
            return
        resolved, notes = flags.Carried.read().resolve()
        if not resolved.settings.enabled:
            return
        self.resolved, self.notes = resolved, notes
        import torch  # not `probe`: the rank has not chosen its GPU yet

        needs = (Need.ENABLED, Need.GPU) if torch.cuda.is_available() else (Need.ENABLED,)
        with self._or_stock():
            self.statuses = self.ledger.install(*needs)
            self._refuse_copies()

    def _refuse_copies(self) -> None:
        """Raise PatchError if a module of SGLang took the backend's class by name before the plugin replaced it."""
        (patch,) = ledger_data.ENABLED
        target = patch.target(self.ledger.version)
        assert target is not None
        original = find(target)[2].__base__
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == ledger_data.ENGINE:
                copies = [attribute for attribute, value in list(vars(module).items()) if value is original]
                if copies:
                    raise PatchError(
                        f"{name}.{copies[0]} is still SGLang's own {original.__name__}: it was imported before "
                        f"nsa-plugin could take its place. {TURN_OFF}"
                    )

    def backend_built(self, backend: Any, model_runner: Any) -> None:
        """An attention backend of the plugin has started; speculative decoding builds several."""
        if self.serving is not None or self.resolved is None or self.stock_because:
            return
        with self._or_stock():
            shape = model.model_shape(backend, model_runner)
            device = probe()
            validate(shape, device, self.resolved.settings)
            self.serving = Serving(self.resolved, shape, device, Trace(mode=self.resolved.settings.trace))

    def leave_scheduler(self, scheduler: Any) -> None:
        """Check once more and report, after a scheduler has built its model.

        Raises:
            NsaPluginError: (strict) the model's sparse attention is not the plugin's.
        """
        if self.resolved is None:
            return
        config = scheduler.model_config.hf_config
        architecture = (getattr(config, "architectures", None) or ["the model"])[0]
        facts = {"model": architecture}
        sparse = model.has_sparse_attention(config)
        if not sparse:
            self.notes.append(
                f"enabled, but {architecture} has no DeepSeek sparse attention (its configuration has no index_topk): "
                "the plugin stays out"
            )
        elif not self.stock_because:
            with self._or_stock():
                self.ledger.verify()
                if self.serving is None:
                    raise PatchError(
                        f"{architecture} has sparse attention, but not by SGLang's backend dsa (nsa before 0.5.13), "
                        f"the one that nsa-plugin takes the place of. {TURN_OFF}"
                    )
        if self.stock_because:
            self.notes.append(f"strict is off and the stock engine serves: {self.stock_because}")
        if self.serving is not None:
            shape = self.serving.model
            facts["model"] += (
                f", index_topk {shape.index_topk}, {shape.heads_per_rank} heads a rank of {shape.num_heads}, "
                f"KV cache {shape.kv_layout}"
            )
            facts["device"] = self.serving.device.describe()
            self.serving.trace.rank = _rank()
        if _rank() == 0:
            StartupReport(
                engine=self.ledger.engine,
                engine_version=str(self.ledger.version),
                active=sparse and not self.stock_because,
                resolved=self.resolved,
                statuses=self.statuses,
                facts=facts,
                notes=self.notes,
            ).publish()

    @contextmanager
    def _or_stock(self) -> Iterator[None]:
        """With strict off, what the block raises on purpose becomes the reason why the stock engine serves."""
        assert self.resolved is not None
        try:
            yield
        except NsaPluginError as error:
            if self.resolved.settings.strict:
                raise
            self.stock_because = str(error)
            self.serving = None

    def _say_once(self, level: int, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.log(level, message)


@functools.cache
def process() -> Process:
    from sglang.version import __version__

    started = multiprocessing.parent_process() is not None
    # Only a scheduler process has the scheduler's module loaded when it loads its plugins, and only there may
    # the ledger import it: elsewhere it would be loaded before SGLang has read its arguments.
    in_scheduler = started and SCHEDULER_MODULE in sys.modules
    return Process(
        ledger=_ledger(Version(__version__), ledger_data.PATCHES if in_scheduler else ledger_data.BOOTSTRAP),
        child=started and flags.CARRIER in os.environ,
    )


def _ledger(version: Version, patches: tuple[Patch, ...]) -> Ledger:
    return Ledger(engine=ledger_data.ENGINE, version=version, supported=ledger_data.SUPPORTED, patches=patches)


def _check_files(version: Version) -> None:
    """Raise PatchError unless the version is supported and SGLang's files have every target of the ledger."""
    spec = util.find_spec(ledger_data.ENGINE)
    assert spec is not None
    assert spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0]).parent

    def read(path: str) -> str | None:
        file = root / path
        return file.read_text(encoding="utf-8") if file.is_file() else None

    _ledger(version, ledger_data.PATCHES).check(*Need, look=SourceTree(read).check)


def _rank() -> int:
    """This process's rank among those that share the model; each data-parallel replica has its own."""
    from torch import distributed

    return int(distributed.get_rank()) if distributed.is_initialized() else 0


@contextmanager
def _clear_exit() -> Iterator[None]:
    """What is raised on purpose ends the process with its message alone."""
    try:
        yield
    except NsaPluginError as error:
        raise SystemExit(f"nsa-plugin: error: {error}") from error


def wrap_add_cli_args(original: Any) -> Any:
    function = original.__func__

    @functools.wraps(function)
    def add_cli_args(parser: Any) -> None:
        function(parser)
        flags.add_flags(parser)

    return staticmethod(add_cli_args)


def wrap_from_cli_args(original: Any) -> Any:
    function = original.__func__

    @functools.wraps(function)
    def from_cli_args(cls: type, args: Any) -> Any:
        flags.Carried(flags.given(args)).write()
        with _clear_exit():
            process().check_before_serving(args)
        return function(cls, args)

    return classmethod(from_cli_args)


def wrap_resolve(original: Callable[..., Any]) -> Callable[..., Any]:
    def around(original: Callable[..., Any], server_args: Any) -> Any:
        # Resolved arguments come by here again, and there what the user gave can no longer be told.
        if not process().child and not getattr(server_args, "_resolution_finished", False):
            process().check_before_serving(server_args)
        return original(server_args)

    return wrap(original, around)


def wrap_scheduler_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def around(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> None:
        with _clear_exit():
            process().enter_scheduler()
            original(scheduler, *args, **kwargs)
            process().leave_scheduler(scheduler)

    return wrap(original, around)
