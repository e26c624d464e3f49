"""Activation under vLLM: read the settings, apply the ledger, and refuse to start if that fails.

In the process that parses the command line, `wrap_create_engine_config` checks as much as possible before anything
starts. In each worker, `wrap_worker_init` applies and verifies the patches before the model is built; on a GPU the rest
follows once the worker has its device (`v32.patches`). While the plugin is off, both only call the original.

vLLM's entry point imports this module in every process, so that what only a configured or an enabled plugin needs is
imported where it is used.
"""

from __future__ import annotations

import difflib
import functools
import gc
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from nsa_plugin.errors import LeftToStockError, NsaPluginError, PatchError, SettingsError
from nsa_plugin.patches import vllm as ledger_data
from nsa_plugin.patches.ledger import Ledger, Need, replacement

if TYPE_CHECKING:
    from nsa_plugin.backends.vllm.startup.serving import VllmServing
    from nsa_plugin.backends.vllm.v32.serving import GpuServing
    from nsa_plugin.settings import ResolvedSettings

logger = logging.getLogger("nsa_plugin")
CONFIG_KEY = "nsa_plugin"
CONFIG_SOURCE = f"--additional-config {{{CONFIG_KEY!r}: ...}}"


@dataclass
class VllmProcess:
    """The plugin in this process. There is one instance per process, because patches change the process.

    Attributes:
        serving: set in a worker that the plugin serves.
        counters: in the process that answers /metrics, the folder of the workers' counters.
    """

    ledger: Ledger
    serving: VllmServing | None = None
    counters: TemporaryDirectory[str] | None = None
    _said: set[str] = field(default_factory=set)
    _read: tuple[Any, ResolvedSettings] | None = None

    def bootstrap(self) -> None:
        try:
            self.ledger.install(Need.BOOTSTRAP)
        except PatchError:
            # Without the first hooks the plugin cannot read its settings, so look for them directly.
            if asked_for(sys.argv, os.environ):
                raise
            logger.exception("nsa-plugin is installed but not enabled, and does not support this vLLM")

    def settings(self, vllm_config: Any) -> ResolvedSettings:
        """Return the plugin's settings in a vLLM configuration; reads each configuration once.

        Raises:
            SettingsError: a setting is unknown or not allowed.
        """
        if self._read is None or self._read[0] is not vllm_config:
            self._read = vllm_config, settings_of(vllm_config)
        return self._read[1]

    def collect_counters(self) -> None:
        from nsa_plugin.backends.vllm.startup import counters

        if self.counters is None:
            self.counters = counters.collect_here()

    def end_earlier(self, vllm_config: Any) -> None:
        """Forget an earlier engine of this process, before another one starts.

        Raises:
            PatchError: it is still there. The patches are of the process: the other's layers would be planned for it.
        """
        from nsa_plugin.backends.vllm.startup.model import is_sparse

        if self.serving is None:
            return
        if self.serving.is_running():
            gc.collect()  # an engine that nobody refers to any more may wait for this
        running = self.serving.is_running()
        if running is False:
            self.serving = None
        elif running and vllm_config.model_config is not None and is_sparse(vllm_config):
            raise PatchError(
                "nsa-plugin serves another engine in this process, and two with sparse attention cannot share one. "
                "Shut the other down first (LLM.llm_engine.engine_core.shutdown()), start this one in a process of its "
                "own (unset VLLM_ENABLE_V1_MULTIPROCESSING), or leave the plugin off for both"
            )

    def give_up(self, error: NsaPluginError, resolved: ResolvedSettings, *, report: bool = True) -> None:
        """Let stock vLLM serve in this worker: strict is off, or the plugin does not support the configuration."""
        self.serving = None
        if report:
            from nsa_plugin.settings import why_stock

            left = isinstance(error, LeftToStockError)
            what = {"left": [str(error)]} if left else {"notes": [why_stock(error)]}
            self.report(resolved, active=False, **what)

    def report_gpu(self, serving: GpuServing) -> None:
        """Publish the start-up report of a GPU worker that is ready."""
        if serving.first:
            what = {"statuses": serving.statuses, "facts": serving.facts(), "left": serving.left()}
            self.report(serving.resolved, active=serving.active, **what)

    def report(self, resolved: ResolvedSettings, **what: Any) -> None:
        from nsa_plugin.backends.vllm.startup import counters
        from nsa_plugin.telemetry import StartupReport

        use_engine_log()
        version = str(self.ledger.version)
        if what["active"] and self._read is not None:
            what["notes"] = [*what.get("notes", ()), *transfer_notes(self._read[0])]
        StartupReport(engine=self.ledger.engine, engine_version=version, resolved=resolved, **what).publish()
        counters.show(version, what.get("left", ()))

    def say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            use_engine_log()
            logger.info(message)


def transfer_notes(vllm_config: Any) -> list[str]:
    """What to check where a KV connector is configured; empty without one that transfers KV.

    vLLM's hooks for a layer (`wait_for_layer_load`, `save_kv_layer`) are called around attention and never around the
    indexer, and load errors name blocks, not layers.
    """
    from nsa_plugin.backends.vllm.startup.arrival import connector_of
    from nsa_plugin.backends.vllm.startup.model import decode_context_parallel_size, family_of

    connector = connector_of(vllm_config)
    if not connector:
        return []
    looks = family_of(vllm_config) != "v4" and decode_context_parallel_size(vllm_config) == 1
    found = "The plugin does not look for them here"
    if looks:
        found = "A request whose prefix comes without any ends the server"
    return [
        f"KV connector {connector}: vLLM does not report whether it transfers the indexer's keys, and without them the "
        f"answers are wrong. {found}; compare one prompt computed and transferred (docs/faq.md)"
    ]


def use_engine_log() -> None:
    """Send the plugin's log to vLLM's handlers, which vLLM sets up for its loggers only."""
    engine = logging.getLogger("vllm")
    logger.handlers[:] = engine.handlers
    logger.setLevel(engine.getEffectiveLevel())
    logger.propagate = not engine.handlers


def asked_for(argv: list[str], environ: Mapping[str, str]) -> bool:
    """Whether the command line or the environment enables the plugin."""
    enabled = environ.get("NSA_PLUGIN_ENABLED", "").strip()
    return any(CONFIG_KEY in argument for argument in argv) or enabled not in ("", "0")


@functools.cache
def process() -> VllmProcess:
    import vllm

    return VllmProcess(
        Ledger(
            engine=ledger_data.ENGINE,
            version=Version(vllm.__version__),
            supported=ledger_data.SUPPORTED_CPU if device_kind() == "cpu" else ledger_data.SUPPORTED,
            patches=ledger_data.PATCHES,
        )
    )


def device_kind() -> str:
    """Return "cpu", "cuda" (NVIDIA's), or a description of another platform for an error."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "cpu"
    if current_platform.is_cuda():
        return "cuda"
    # Not the bare name: another vendor's platform may call its devices "cuda" or "cpu".
    return f"vLLM's platform {type(current_platform).__name__}"


def device_sm() -> int:
    """Return the SM version of vLLM's device, which NVML knows without touching the GPU; 0 if vLLM does not say."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    return 0 if capability is None else 10 * int(capability.major) + int(capability.minor)


def settings_of(vllm_config: Any) -> ResolvedSettings:
    """Return the plugin's settings in a vLLM configuration.

    Raises:
        SettingsError: a setting is unknown or not allowed, or the key of the settings is misspelt.
    """
    from nsa_plugin.settings import resolve

    additional = vllm_config.additional_config
    if not isinstance(additional, Mapping):
        additional = {}
    config = additional.get(CONFIG_KEY, {})
    for key in additional.keys() - {CONFIG_KEY}:
        if difflib.get_close_matches(str(key).lower(), [CONFIG_KEY], 1, 0.8):  # vLLM takes any key and reads none
            raise SettingsError(
                f"unknown key {key!r} in --additional-config. Did you mean {CONFIG_KEY!r}? Correct or remove it"
            )
    return resolve(config=config, config_source=CONFIG_SOURCE)


def check_here(vllm_config: Any, resolved: ResolvedSettings, *, installs: bool = False) -> tuple[Need, ...]:
    """Check that the plugin can serve this configuration, before anything starts.

    Args:
        installs: whether the caller installs the patches next, which checks each target in the live engine.

    Returns:
        The needs of the patches to install.

    Raises:
        NsaPluginError: the version, the platform, the configuration or a patch's target does not fit.
    """
    from nsa_plugin.backends.vllm.startup import model
    from nsa_plugin.telemetry import check_files

    ledger = process().ledger
    ledger.check_version()
    check_files(resolved.settings)
    kind = device_kind()
    if kind not in ("cpu", "cuda"):
        raise LeftToStockError(f"nsa-plugin serves vLLM on CPUs and NVIDIA GPUs; it does not support {kind}")
    forced = resolved.settings.portable == "on"
    if forced and kind == "cpu":
        raise SettingsError("portable is on and cannot work on a CPU; allowed here: auto")
    if kind == "cpu":
        from nsa_plugin.decision.dispatch import validate
        from nsa_plugin.libraries.probe import probe

        model.check_on_cpu(vllm_config)
        ledger.check(Need.CPU)
        validate(
            model.model_shape(vllm_config, model.CPU_LAYOUTS),
            probe(),
            resolved.settings,
            max_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            max_decode_tokens=vllm_config.scheduler_config.max_num_seqs,
        )
        return (Need.CPU,)
    model.check_on_gpu(vllm_config)
    if (size := model.decode_context_parallel_size(vllm_config)) > 1:
        _check_dcp(size, ledger.version, resolved)
    is_v4 = model.family_of(vllm_config) == "v4"
    needs: tuple[Need, ...] = (Need.GPU, Need.GPU_V4) if is_v4 else (Need.GPU,)
    if forced or model.is_portable(device_sm()):
        if is_v4 and not forced:
            model.check_portable_v4(device_sm())
        check_portable_version(ledger.version, v4=is_v4)
        needs = (*needs, Need.PORTABLE)
    # With strict off, the process that starts the workers may leave the serving to vLLM for what its files lack. Each
    # worker then has to read them, too, or it might serve what that process left to vLLM.
    if not (installs and resolved.settings.strict):
        from nsa_plugin.patches import static

        # vLLM forks its workers from this process, so nothing here may touch the GPU: import nothing. With strict off
        # this process and the workers, which have loaded other modules, must find the same: read files only.
        static.check_installed(ledger, *needs, live=bool(resolved.settings.strict))
    return needs


def check_portable_version(version: Version, *, v4: bool) -> None:
    """Check that the portable path serves a model with this vLLM."""
    supported = ledger_data.SUPPORTED_PORTABLE_V4 if v4 else ledger_data.SUPPORTED_PORTABLE
    if not SpecifierSet(supported, prereleases=True).contains(version):
        what = "portable path for DeepSeek-V4" if v4 else "portable path"
        raise LeftToStockError(f"nsa-plugin's {what} supports vLLM {supported}; this is {version}")


def _check_dcp(size: int, version: Version, resolved: ResolvedSettings) -> None:
    """Check that the plugin serves this vLLM with the KV cache shared between `size` ranks."""
    from nsa_plugin.backends.vllm.startup import model

    given, settings = f"{model.DCP_FLAG} {size}", resolved.settings
    if settings.portable == "on":
        raise SettingsError(f"portable is on and cannot work with {given}; allowed here: auto")
    if model.is_portable(device_sm()):
        raise LeftToStockError(f"nsa-plugin's portable path does not support {given}")
    supported = ledger_data.SUPPORTED_DCP
    if not SpecifierSet(supported, prereleases=True).contains(version):
        raise LeftToStockError(f"nsa-plugin supports {given} in vLLM {supported}; this is {version}")
    if not settings.strict:
        raise LeftToStockError(
            f"strict is off, and with {given} a rank that the plugin does not serve would keep the others waiting"
        )


def wanted(vllm_config: Any, resolved: ResolvedSettings) -> bool:
    """Whether the plugin is to serve this configuration; logs once why not."""
    if not resolved.settings.enabled:
        return False
    if vllm_config.model_config is None:
        return False
    from nsa_plugin.backends.vllm.startup.model import is_sparse

    if not is_sparse(vllm_config):
        process().say_once(
            f"nsa-plugin is enabled but changes nothing: {vllm_config.model_config.model} has no sparse attention "
            "(no index_topk in its configuration)"
        )
        return False
    return True


@replacement
def wrap_create_engine_config(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    vllm_config = original(*args, **kwargs)
    resolved = process().settings(vllm_config)
    if wanted(vllm_config, resolved):
        try:
            check_here(vllm_config, resolved)
        except NsaPluginError as error:
            if resolved.settings.ends_start(error):
                raise
            from nsa_plugin.settings import why_stock

            use_engine_log()
            logger.warning("nsa-plugin: %s", why_stock(error))
        process().collect_counters()  # what is left to vLLM is in /metrics, too
    return vllm_config


@replacement
def wrap_check_and_update_config(original: Callable[..., Any], cls: type, vllm_config: Any) -> None:
    scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
    given = (scheduler.enable_chunked_prefill, cache.enable_prefix_caching, scheduler.max_num_batched_tokens)
    original(cls, vllm_config)
    from nsa_plugin.backends.vllm.startup.model import is_sparse

    if is_sparse(vllm_config) and process().settings(vllm_config).settings.enabled:
        scheduler.enable_chunked_prefill, cache.enable_prefix_caching, scheduler.max_num_batched_tokens = given


@replacement
def wrap_worker_init(original: Callable[..., Any], worker: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    serving = start_serving(vllm_config)
    original(worker, vllm_config, *args, **kwargs)
    if serving is not None:
        serving.enter(worker)


def start_serving(vllm_config: Any) -> VllmServing | None:
    """Apply and verify the patches for this worker. On a CPU this completes the start, so report.

    Raises:
        NsaPluginError: something does not fit; see `Settings.ends_start`.
    """
    this = process()
    resolved = this.settings(vllm_config)
    serves = wanted(vllm_config, resolved)
    this.end_earlier(vllm_config)
    if not serves:
        return None
    try:
        needs = check_here(vllm_config, resolved, installs=True)
        statuses = this.ledger.install(*needs)
    except NsaPluginError as error:
        if resolved.settings.ends_start(error):
            raise
        this.give_up(error, resolved)
        return None
    from nsa_plugin.telemetry import Trace

    trace = Trace(mode=resolved.settings.trace)
    if Need.GPU in needs:
        from nsa_plugin.backends.common.warm import hash_triton

        serving_class: type[GpuServing]
        if Need.GPU_V4 in needs:
            from nsa_plugin.backends.vllm.v4.serving import V4Serving as serving_class
        else:
            from nsa_plugin.backends.vllm.v32.serving import GpuServing as serving_class

        this.serving = serving_class(
            resolved=resolved,
            trace=trace,
            vllm_config=vllm_config,
            statuses=statuses,
            portable=Need.PORTABLE in needs,
            hashing=hash_triton(),
        )
        return this.serving
    from nsa_plugin.backends.vllm.startup.model import CPU_LAYOUTS, model_shape
    from nsa_plugin.backends.vllm.startup.serving import CpuServing
    from nsa_plugin.libraries.probe import probe

    device, model = probe(), model_shape(vllm_config, CPU_LAYOUTS)
    this.serving = CpuServing(resolved=resolved, trace=trace, model=model, device=device)
    facts = {
        "model": f"{vllm_config.model_config.model}, index_topk {model.index_topk}, "
        f"{model.heads_per_rank} of {model.num_heads} heads per rank",
        "device": device.describe(),
        "scheduler": f"chunked prefill {_on(vllm_config.scheduler_config.enable_chunked_prefill)} at "
        f"{vllm_config.scheduler_config.max_num_batched_tokens} tokens, prefix caching "
        f"{_on(vllm_config.cache_config.enable_prefix_caching)}",
    }
    this.report(resolved, active=True, statuses=statuses, facts=facts)
    return this.serving


def _on(flag: bool | None) -> str:
    return "on" if flag else "off"
