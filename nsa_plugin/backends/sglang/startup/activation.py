"""Activation under SGLang: read the settings, apply the ledger, and refuse to start if that fails.

The process that reads SGLang's arguments checks as much as possible before it starts other processes. It looks the
ledger's targets up in SGLang's files, so that it imports nothing that SGLang would not import there. Each scheduler
process applies and verifies the patches before the model is built and reports the result afterwards. `hooks` calls all
this from inside SGLang.

SGLang's entry point imports this module in every process, so that what only an enabled plugin needs is imported where
it is used.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from nsa_plugin.errors import LeftToStockError, NsaPluginError, PatchError, SettingsError
from nsa_plugin.patches import sglang as ledger_data
from nsa_plugin.patches.ledger import TURN_OFF, Ledger, Need, Patch, PatchStatus
from nsa_plugin.switch import SCHEDULER_MODULE, VARIABLE, killed

if TYPE_CHECKING:
    from nsa_plugin.backends.sglang.startup.serving import SglangServing
    from nsa_plugin.settings import ResolvedSettings

logger = logging.getLogger("nsa_plugin")
NO_PORTABLE_V4 = "DeepSeek-V4 needs an SM90 or SM100 GPU: the portable path is for DeepSeek-V3.2 and GLM-5"


@dataclass
class SglangProcess:
    """The plugin in this process. There is one instance per process, because patches change the process.

    Attributes:
        child: whether SGLang started this process; its parent has then checked the arguments.
        resolved: the settings, in a scheduler process with the plugin enabled.
        serving: set once one of the plugin's backends is built; without it they fall back to the stock path.
        portable: whether the ledger's entries for the portable path are applied.
        left: what is left to stock SGLang although the plugin is on, and why.
        stock_because: why the stock engine serves although the plugin is enabled (`why_stock`); "" if it does not.
        too_old: why the portable path does not serve in this version of SGLang, if a model has sparse attention.
        sm: the SM version of the GPU, in a scheduler process with the plugin enabled; 0 without one.
        paths: SGLang's flags that the plugin has set: {setting: (flag, value)}; see `flags.run_portable`.
    """

    ledger: Ledger
    child: bool
    resolved: ResolvedSettings | None = None
    statuses: Sequence[PatchStatus] = ()
    notes: list[str] = field(default_factory=list)
    serving: SglangServing | None = None
    portable: bool = False
    left: list[str] = field(default_factory=list)
    stock_because: str = ""
    too_old: LeftToStockError | None = None
    sm: int = 0
    paths: dict[str, tuple[str, str]] = field(default_factory=dict)
    _said: set[str] = field(default_factory=set)

    def bootstrap(self) -> None:
        if not self.child:
            # A server in the parent process may have left it.
            os.environ.pop(VARIABLE, None)
        try:
            hooks = self.ledger.install(Need.BOOTSTRAP)
            if any(hook.state == "unused" for hook in hooks):
                self.ledger.check_version()  # an SGLang for which the ledger has no such hook
        except PatchError:
            # Without the first hooks the plugin cannot read its flags, so look for them directly.
            from nsa_plugin.backends.sglang.startup.flags import asked_for

            if asked_for():
                self.ledger.check_version()  # raises a clearer error if the version is the cause
                raise
            logger.warning("nsa-plugin is installed but not enabled, and does not support this SGLang", exc_info=True)

    def check_before_serving(self, server_args: Any) -> None:
        """Check everything in the main process, before SGLang processes its arguments.

        Raises:
            NsaPluginError: a setting is wrong, or (strict) the plugin cannot serve here.
        """
        from nsa_plugin.backends.sglang.startup import flags

        given = flags.PassedFlags.read().flags
        if killed():
            if given:
                self._say_once(logging.INFO, "nsa-plugin is off: NSA_PLUGIN_ENABLED=0 overrides its flags")
            return
        engine = flags.engine_backends(server_args).items()
        passed = flags.PassedFlags(given, {name: one for name, one in engine if self.paths.get(name) != one})
        passed.write()
        resolved, _ = passed.resolve()
        if not resolved.settings.enabled:
            return
        from nsa_plugin.backends.sglang.startup import model

        # Arguments pass here as parsed and as SGLang's object: the second time the flags are still not the user's.
        self.paths |= (trtllm := flags.run_trtllm(server_args, resolved.settings, model.device_sm))
        for flag, value in trtllm.values():
            self._say_once(logging.INFO, f"nsa-plugin: a setting asks for trtllm, which SGLang runs: {flag} {value}")
        from nsa_plugin.telemetry import check_files

        try:
            sm = 0 if model.configured_for_cpu(server_args) else model.device_sm()
            if model.is_left(sm):
                if model.is_sparse(server_args):
                    model.check_gpu(sm, resolved)
                return  # nothing is patched there
            _check_files(self.ledger.version)
            check_files(resolved.settings)
            if resolved.settings.portable == "on":
                check_portable_version(self.ledger.version, sm, forced=True)
            if getattr(server_args, "use_ray", False):
                raise LeftToStockError("SGLang does not load plugins in Ray actors, which --use-ray asks for")
            model.refuse_model(server_args)
            if warning := model.unserved_weights(server_args, sm):
                self._say_once(logging.WARNING, f"nsa-plugin: {warning}")
            self._prepare_sm120(server_args, sm)
        except NsaPluginError as error:
            if resolved.settings.ends_start(error):
                raise
            from nsa_plugin.settings import why_stock

            self._say_once(logging.WARNING, f"nsa-plugin: {why_stock(error)}")

    def _prepare_sm120(self, server_args: Any, sm: int) -> None:
        """Have SGLang take the paths that the portable path extends, on SM120.

        Raises:
            LeftToStockError: this SGLang is not served there.
        """
        from nsa_plugin.backends.sglang.startup import flags, model
        from nsa_plugin.libraries.architectures import is_sm120, name_of

        if not is_sm120(sm) or not model.has_sparse_attention(config := model.config_of(server_args)):
            return
        check_portable_version(self.ledger.version, sm)
        self.paths |= (extended := flags.run_portable(server_args, config))
        for flag, value in extended.values():
            self._say_once(logging.INFO, f"nsa-plugin: the portable path on {name_of(sm)} extends {flag} {value}")

    def enter_scheduler(self) -> None:
        """Apply and verify the patches, before a scheduler builds its model.

        Raises:
            NsaPluginError: a setting is wrong, or (strict) something does not fit.
        """
        if killed():
            return
        from nsa_plugin.backends.sglang.startup import flags, model

        passed = flags.PassedFlags.read()
        resolved, notes = passed.resolve()
        if not resolved.settings.enabled:
            return
        self.sm = sm = model.device_sm()
        portable = model.is_portable(sm) or bool(sm and resolved.settings.portable == "on")
        if portable:
            resolved, notes = passed.resolve(portable=True)
        self.resolved, self.notes = resolved, notes
        if portable:
            try:
                check_portable_version(self.ledger.version, sm)
            except LeftToStockError as error:
                self.too_old, self.stock_because = error, str(error)
                return  # as below
        if model.is_left(sm):
            # Nothing is patched. `leave_scheduler` checks the settings, once the model is known.
            self.stock_because = f"the GPU is SM{sm}"
            return
        needs = (Need.ENABLED, Need.GPU) if sm else (Need.ENABLED,)
        with self._or_stock():
            if model.on_rocm():
                raise LeftToStockError("nsa-plugin's kernels are for NVIDIA GPUs, and this PyTorch is for ROCm")
            if portable:
                needs, self.portable = (*needs, Need.PORTABLE), True
            self.statuses = self.ledger.install(*needs)
            self._refuse_copies()

    def enter_v4(self) -> None:
        """Apply and verify the patches for DeepSeek-V4, just before SGLang builds its first attention backend.

        Raises:
            NsaPluginError: (strict) something does not fit.
        """
        if self.resolved is None or self.stock_because:
            return
        from nsa_plugin.backends.sglang.startup import flags

        with self._or_stock():
            if self.portable:
                if self.resolved.settings.portable == "on":
                    raise SettingsError(
                        "portable is on and cannot work for DeepSeek-V4, which needs an SM90 or SM100 GPU; allowed "
                        "here: auto"
                    )
                raise LeftToStockError(NO_PORTABLE_V4)
            self.resolved, self.notes = flags.PassedFlags.read().resolve(v4=True)
            self.statuses = self.ledger.install(Need.GPU_V4)
            self._refuse_copies()

    def _refuse_copies(self) -> None:
        """Raise PatchError if a module of SGLang imported a backend's class before the plugin replaced it."""
        targets = [target for patch in ledger_data.BACKENDS if (target := patch.target(self.ledger.version))]
        live = [getattr(sys.modules.get(target.module), target.attributes[-1], None) for target in targets]
        originals = (getattr(one, "nsa_plugin_replaces", None) for one in live)
        replaced = {id(original) for original in originals if original is not None}
        for name, module in list(sys.modules.items()):
            copies = vars(module).items() if name.partition(".")[0] == ledger_data.ENGINE else ()
            for attribute, value in list(copies):
                if id(value) in replaced:
                    raise PatchError(
                        f"{name}.{attribute} is still the stock {value.__name__}: it was imported before nsa-plugin "
                        f"could replace it. {TURN_OFF}"
                    )

    def backend_built(self, backend: Any, model_runner: Any) -> None:
        """Start serving with one of the plugin's attention backends; speculative decoding builds several.

        Raises:
            NsaPluginError: (strict) it cannot serve with these settings on this device.
        """
        if self.resolved is None or self.stock_because:
            return
        from nsa_plugin.backends.common.providers import device_in_use  # imports torch
        from nsa_plugin.backends.sglang.startup.serving import SglangServing, check_cache, check_model
        from nsa_plugin.libraries.probe import probe

        with self._or_stock():
            try:
                check_model(backend, model_runner)
                settings = self.resolved.settings
                device = device_in_use(probe(), settings) if self.serving is None else self.serving.device
                check_cache(backend, model_runner, device)
                if self.serving is None:
                    begin = functools.partial(SglangServing.begin, portable=self.portable)
                    self.serving = begin(self.resolved, backend, model_runner, device)
                self.serving.adopt(backend, model_runner)
            except LeftToStockError as error:
                if self.resolved.settings.ends_start(error):
                    raise
                # Other backends are still served, such as the target's if this is a draft's.
                if str(error) not in self.left:
                    self.left.append(str(error))

    def leave_scheduler(self, scheduler: Any) -> None:
        """Verify the patches again and report, after a scheduler has built its model.

        Raises:
            NsaPluginError: (strict) the plugin does not serve the model's sparse attention.
        """
        if self.resolved is None:
            return
        from nsa_plugin.backends.sglang.startup import model

        config = scheduler.model_config.hf_config
        architecture = (getattr(config, "architectures", None) or ["the model"])[0]
        facts = {"model": architecture}
        sparse = model.has_sparse_attention(config)
        if not sparse:
            self.notes.append(
                f"enabled, but {architecture} has no DeepSeek sparse attention (no index_topk in its configuration): "
                "the plugin changes nothing"
            )
        elif not self.stock_because or model.is_left(self.sm) or self.too_old is not None:
            with self._or_stock():
                model.check_gpu(self.sm, self.resolved)
                if self.too_old is not None:
                    raise self.too_old
                self.ledger.verify()
                if self.serving is None and not self.left:
                    raise LeftToStockError(
                        f"SGLang serves the sparse attention of {architecture} with another attention backend than "
                        "dsa (nsa before 0.5.13) or dsv4, which nsa-plugin extends"
                    )
        if self.serving is not None:
            from nsa_plugin.backends.common.warm import warmed_in

            shape = self.serving.model
            facts["model"] += (
                f", index_topk {shape.index_topk}, {shape.heads_per_rank} of {shape.num_heads} heads per rank, "
                f"KV cache {shape.kv_layout}"
            )
            facts["device"] = self.serving.device.describe()
            facts |= self.serving.routes | warmed_in(self.serving.warm_seconds)
            self.left += self.serving.notes
            self.serving.settle()
        if _rank() == 0:
            from nsa_plugin.backends.sglang.startup import metrics
            from nsa_plugin.telemetry import StartupReport

            StartupReport(
                engine=self.ledger.engine,
                engine_version=str(self.ledger.version),
                active=self.serving is not None and self.serving.active,
                resolved=self.resolved,
                statuses=self.statuses,
                facts=facts,
                left=self.left,
                notes=self.notes,
            ).publish()
            metrics.show(getattr(scheduler, "server_args", None), str(self.ledger.version), self.left)

    @contextmanager
    def _or_stock(self) -> Iterator[None]:
        """Let the stock engine serve if the block raises, and keep the reason, unless the error ends the start."""
        assert self.resolved is not None
        try:
            yield
        except NsaPluginError as error:
            if self.resolved.settings.ends_start(error):
                raise
            from nsa_plugin.settings import why_stock

            self.stock_because = why_stock(error)
            if isinstance(error, LeftToStockError):
                self.left.append(str(error))
            else:
                self.notes.append(self.stock_because)
            if self.serving is not None:
                self.serving.end()
                self.serving = None

    def _say_once(self, level: int, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.log(level, message)


@functools.cache
def process() -> SglangProcess:
    from sglang.version import __version__

    started = multiprocessing.parent_process() is not None
    # Only a scheduler process has loaded the scheduler's module when it loads plugins. Elsewhere the ledger must not
    # import it, because SGLang has not read its arguments yet.
    in_scheduler = started and SCHEDULER_MODULE in sys.modules
    return SglangProcess(
        ledger=_ledger(Version(__version__), ledger_data.PATCHES if in_scheduler else ledger_data.BOOTSTRAP),
        child=started and VARIABLE in os.environ,
    )


def _ledger(version: Version, patches: tuple[Patch, ...]) -> Ledger:
    return Ledger(engine=ledger_data.ENGINE, version=version, supported=ledger_data.SUPPORTED, patches=patches)


@functools.cache
def _check_files(version: Version) -> None:
    """Raise PatchError unless the version is supported and SGLang's files have all targets of the ledger.

    SGLang's arguments pass `check_before_serving` twice; the files are read once.
    """
    from nsa_plugin.patches import static

    static.check_installed(_ledger(version, ledger_data.PATCHES), *Need)


def check_portable_version(version: Version, sm: int, *, forced: bool = False) -> None:
    """Check that the portable path serves with this SGLang.

    Args:
        sm: SM version of the GPU.
        forced: `portable` is on.
    """
    from nsa_plugin.libraries.architectures import is_sm120, name_of

    new = is_sm120(sm)
    supported = ledger_data.SUPPORTED_SM120 if new else ledger_data.SUPPORTED_PORTABLE
    where = f" on {name_of(sm)}" if new else ""
    if SpecifierSet(supported, prereleases=True).contains(version):
        return
    if forced:
        raise SettingsError(
            f"portable is on and cannot work with SGLang {version}{where}: it is for SGLang {supported}; allowed here: "
            "auto"
        )
    raise LeftToStockError(f"nsa-plugin's portable path{where} supports SGLang {supported}; this is {version}")


def _rank() -> int:
    """Return this process's rank among those that share the model; each data-parallel replica has a rank 0."""
    from torch import distributed

    return int(distributed.get_rank()) if distributed.is_initialized() else 0
