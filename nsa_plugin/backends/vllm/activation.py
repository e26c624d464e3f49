"""From installed to serving: reads the settings, applies the ledger, and refuses to start where it cannot.

In the process that parses the command line `wrap_create_engine_config` checks everything that can be
checked before anything is started. In each worker `wrap_worker_init` applies and verifies the patches
before the model is built. While the plugin is off, both pass straight through.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from packaging.version import Version

from nsa_plugin import settings as settings_module
from nsa_plugin.devices import DeviceProfile, probe
from nsa_plugin.dispatch import validate
from nsa_plugin.errors import NsaPluginError, PatchError, SettingsError
from nsa_plugin.patches import vllm as ledger_data
from nsa_plugin.patches.ledger import TURN_OFF, Ledger, Need, wrap
from nsa_plugin.settings import ResolvedSettings
from nsa_plugin.shapes import ModelShape
from nsa_plugin.telemetry import StartupReport, Trace

logger = logging.getLogger("nsa_plugin")
CONFIG_KEY = "nsa_plugin"
CONFIG_SOURCE = f"--additional-config {{{CONFIG_KEY!r}: ...}}"


@dataclass
class Serving:
    """What the backend of one worker works with, once the plugin serves its model."""

    resolved: ResolvedSettings
    model: ModelShape
    device: DeviceProfile
    trace: Trace
    worker: Callable[[], Any] = lambda: None

    def request_ids(self) -> list[str]:
        """Ids of the running batch's requests, in the batch's order."""
        worker = self.worker()
        batch = getattr(getattr(worker, "model_runner", None), "input_batch", None)
        return list(getattr(batch, "req_ids", ()))


@dataclass
class Process:
    """The plugin in this process. One instance a process, because patches are the process's."""

    ledger: Ledger
    serving: Serving | None = None
    said: set[str] = field(default_factory=set)

    def bootstrap(self) -> None:
        if settings_module.killed():
            self.say_once("nsa-plugin is switched off by NSA_PLUGIN_ENABLED=0")
            return
        try:
            self.ledger.install(Need.BOOTSTRAP)
        except PatchError:
            # Without its first hooks the plugin cannot know whether it is wanted, so look where a user asks for it.
            if asked_for(sys.argv, os.environ):
                raise
            logger.exception("nsa-plugin is installed but not asked for, and does not know this vLLM")

    def say_once(self, message: str) -> None:
        if message not in self.said:
            self.said.add(message)
            use_engine_log()
            logger.info(message)


def use_engine_log() -> None:
    """Write the plugin's log where vLLM writes its own; vLLM sets up handlers for its own loggers only."""
    engine = logging.getLogger("vllm")
    logger.handlers[:] = engine.handlers
    logger.setLevel(engine.getEffectiveLevel())
    logger.propagate = not engine.handlers


def asked_for(argv: list[str], environ: Mapping[str, str]) -> bool:
    """Whether the command line or the environment names the plugin."""
    return any(CONFIG_KEY in argument for argument in argv) or environ.get("NSA_PLUGIN_ENABLED", "0") not in ("", "0")


@functools.cache
def process() -> Process:
    import vllm

    return Process(
        Ledger(
            engine=ledger_data.ENGINE,
            version=Version(vllm.__version__),
            supported=ledger_data.SUPPORTED_CPU if on_cpu() else ledger_data.SUPPORTED,
            patches=ledger_data.PATCHES,
        )
    )


def on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def settings_of(vllm_config: Any) -> ResolvedSettings:
    """The plugin's settings in a configuration of vLLM.

    Raises:
        SettingsError: a setting is unknown or not allowed.
    """
    additional = vllm_config.additional_config
    config = additional.get(CONFIG_KEY, {}) if isinstance(additional, Mapping) else {}
    return settings_module.resolve(config=config, config_source=CONFIG_SOURCE)


def is_sparse(vllm_config: Any) -> bool:
    model_config = vllm_config.model_config
    return model_config is not None and hasattr(model_config.hf_text_config, "index_topk")


def model_shape(vllm_config: Any) -> ModelShape:
    """The model as one rank of the tensor-parallel group sees it."""
    layouts = {"fp8_ds_mla": "v32_fp8"}
    return ModelShape.from_config(
        vllm_config.model_config.hf_text_config,
        attn_tp_size=vllm_config.parallel_config.tensor_parallel_size,
        kv_layout=layouts.get(vllm_config.cache_config.cache_dtype, "bf16"),
    )


def check_here(vllm_config: Any) -> None:
    """Raise what would keep the plugin from serving this configuration, before anything is started.

    Raises:
        NsaPluginError: the version, the platform, the configuration or a patch's target does not fit.
    """
    ledger = process().ledger
    ledger.check_version()
    if not on_cpu():
        raise PatchError(
            "this release of nsa-plugin serves sparse attention on vLLM's CPU platform only; its GPU backend for "
            f"vLLM is not part of it. {TURN_OFF}"
        )
    if vllm_config.speculative_config is not None:
        raise SettingsError(
            f"nsa-plugin does not carry speculative decoding on a CPU: drop --speculative-config. {TURN_OFF}"
        )
    cache_dtype = vllm_config.cache_config.cache_dtype
    if cache_dtype not in ("auto", "bfloat16", "float16"):
        raise SettingsError(
            f"nsa-plugin on a CPU keeps the KV cache in the model's dtype; --kv-cache-dtype is {cache_dtype}, "
            f"allowed: auto, bfloat16, float16. {TURN_OFF}"
        )
    parallel = vllm_config.parallel_config
    if (
        getattr(parallel, "decode_context_parallel_size", 1) > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1
    ):
        raise SettingsError(f"nsa-plugin does not carry context parallelism on a CPU. {TURN_OFF}")
    ledger.check(Need.CPU)
    validate(
        model_shape(vllm_config),
        probe(),
        settings_of(vllm_config).settings,
        max_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        max_decode_tokens=vllm_config.scheduler_config.max_num_seqs,
    )


def wanted(vllm_config: Any, resolved: ResolvedSettings) -> bool:
    """Whether the plugin is to serve this configuration; says once why not."""
    if not resolved.settings.enabled:
        return False
    if vllm_config.model_config is None:
        return False
    if not is_sparse(vllm_config):
        process().say_once(
            f"nsa-plugin is enabled and stays out: {vllm_config.model_config.model} has no sparse attention "
            "(its configuration has no index_topk)"
        )
        return False
    return True


def wrap_create_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        vllm_config = original(*args, **kwargs)
        resolved = settings_of(vllm_config)
        if wanted(vllm_config, resolved):
            try:
                check_here(vllm_config)
            except NsaPluginError as error:
                if resolved.settings.strict:
                    raise
                use_engine_log()
                logger.warning("NSA_PLUGIN_STRICT is off: the stock engine serves. %s", error)
        return vllm_config

    return wrap(original, around)


def wrap_check_and_update_config(original: Any) -> Any:
    function = original.__func__

    @functools.wraps(function)
    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        asked = (scheduler.enable_chunked_prefill, cache.enable_prefix_caching, scheduler.max_num_batched_tokens)
        function(cls, vllm_config)
        if (
            vllm_config.model_config is not None
            and is_sparse(vllm_config)
            and settings_of(vllm_config).settings.enabled
        ):
            scheduler.enable_chunked_prefill, cache.enable_prefix_caching, scheduler.max_num_batched_tokens = asked

    return classmethod(check_and_update_config)


def wrap_worker_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def around(original: Callable[..., Any], worker: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        serve = start_serving(vllm_config)
        original(worker, vllm_config, *args, **kwargs)
        if serve is not None:
            serve.worker = weakref.ref(worker)
            serve.trace.rank = worker.rank

    return wrap(original, around)


def start_serving(vllm_config: Any) -> Serving | None:
    """Apply and verify the patches for this worker, and publish the start-up report.

    Raises:
        NsaPluginError: something does not fit and `strict` is on.
    """
    this = process()
    resolved = settings_of(vllm_config)
    if not wanted(vllm_config, resolved):
        return None
    try:
        check_here(vllm_config)
        statuses = this.ledger.install(Need.CPU)
    except NsaPluginError as error:
        if resolved.settings.strict:
            raise
        _report(resolved, active=False, notes=[f"strict is off and the stock engine serves: {error}"])
        return None
    device = probe()
    model = model_shape(vllm_config)
    this.serving = Serving(
        resolved=resolved,
        model=model,
        device=device,
        trace=Trace(mode=resolved.settings.trace),
    )
    facts = {
        "model": f"{vllm_config.model_config.model}, index_topk {model.index_topk}, "
        f"{model.heads_per_rank} heads a rank of {model.num_heads}",
        "device": device.describe(),
        "scheduler": f"chunked prefill {_on(vllm_config.scheduler_config.enable_chunked_prefill)} at "
        f"{vllm_config.scheduler_config.max_num_batched_tokens} tokens, prefix caching "
        f"{_on(vllm_config.cache_config.enable_prefix_caching)}",
    }
    _report(resolved, active=True, statuses=statuses, facts=facts)
    return this.serving


def _report(resolved: ResolvedSettings, **what: Any) -> None:
    use_engine_log()
    ledger = process().ledger
    StartupReport(engine=ledger.engine, engine_version=str(ledger.version), resolved=resolved, **what).publish()


def _on(flag: bool | None) -> str:
    return "on" if flag else "off"
