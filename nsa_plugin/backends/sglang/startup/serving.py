"""State that the attention backends of one scheduler process share, and how each starts to take plans.

The backend's class names its model family (`nsa_plugin_family`; none for V3.2).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from packaging.version import Version

from nsa_plugin.backends.common.late import watch
from nsa_plugin.backends.common.planner import Execution
from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.common.shape import architectures, check_shape
from nsa_plugin.backends.common.token_shard import free_memory_of, has_sinks
from nsa_plugin.backends.common.trial import tried
from nsa_plugin.backends.common.warm import warm, warm_dense, warm_logits, warm_reading, warm_selection, warm_unpaged
from nsa_plugin.backends.sglang.startup import samples
from nsa_plugin.backends.sglang.startup.metrics import metrics_of
from nsa_plugin.backends.sglang.startup.model import (
    argument_of,
    attends_half,
    impls_of,
    kv_layout,
    model_shape,
    prefix_of,
    ranks,
)
from nsa_plugin.backends.sglang.v4 import attention as v4_attention
from nsa_plugin.backends.sglang.v4.kernels import longest_context
from nsa_plugin.backends.sglang.v4.routes import SglangV4Planner, asked_by_engine, makes_rows, v4_shape
from nsa_plugin.backends.sglang.v4.state import V4State
from nsa_plugin.backends.sglang.v4.warm import warm_v4
from nsa_plugin.backends.sglang.v32.arrival import loaded_prefixes
from nsa_plugin.backends.sglang.v32.portable import warm_portable
from nsa_plugin.backends.sglang.v32.routes import PLANNED, SglangPlanner, dense_beyond, why_no_copy
from nsa_plugin.backends.sglang.v32.split import why_whole
from nsa_plugin.backends.sglang.v32.state import State, adopt, release
from nsa_plugin.backends.sglang.v32.token_shard import SglangExchange, open_exchange
from nsa_plugin.decision.dispatch import validate
from nsa_plugin.decision.indexer import UNPAGED
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.errors import LeftToStockError, NoProviderError
from nsa_plugin.libraries.capabilities import Op
from nsa_plugin.libraries.devices import DeviceProfile
from nsa_plugin.libraries.registry import REFERENCE
from nsa_plugin.patches.ledger import TURN_OFF
from nsa_plugin.settings import FULL, ResolvedSettings
from nsa_plugin.telemetry import SHORT_WITH_LONG, Metrics, Trace

OWN_HEADS_FIRST = Version("0.5.14")
"""See `V4State`."""


@dataclass
class SglangServing:
    """The plugin in one scheduler process; speculative decoding and two-batch overlap build several backends in it.

    Attributes:
        resolved, model, device: inputs of decisions; the model of the first backend.
        trace, metrics: see `Planner`.
        backends: those that take plans.
        routes: execution paths of sample batches of the first backend, with reasons, for the start-up report.
        notes: what falls back to the stock path although the plugin is on.
        exchange: for resharding, once a backend has opened it; all backends that reshard have the same heads.
        portable: whether the ledger's entries for the portable path are applied.
        warm_seconds: what running the kernels once has taken.
    """

    resolved: ResolvedSettings
    model: ModelShape
    device: DeviceProfile
    trace: Trace
    metrics: Metrics | None
    backends: list[Any] = field(default_factory=list)
    routes: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    exchange: SglangExchange | None = None
    portable: bool = False
    warm_seconds: float = 0.0
    _warmed: set[ModelShape] = field(default_factory=set)

    @classmethod
    def begin(
        cls,
        resolved: ResolvedSettings,
        backend: Any,
        model_runner: Any,
        device: DeviceProfile,
        *,
        portable: bool = False,
    ) -> SglangServing:
        """Check the settings against the model and the device, before any batch.

        Args:
            backend: the first one that SGLang builds in the process, fully built.
            model_runner: the runner that the backend was built for.
            portable: whether the ledger's entries for the portable path are applied.

        Raises:
            ShapeError, SettingsError, NoProviderError, PatchError: see `refuse_trtllm`, `model_shape` and `validate`.
        """
        refuse_trtllm(backend, device)
        model = shape_of(backend, model_runner)
        if portable and any(
            path in PLANNED[model.kv_layout, prefill]
            for prefill, path in zip((True, False), impls_of(backend).values(), strict=True)
        ):
            providers = Providers(model.kv_layout, device.sm)
            device = tried(device, model, providers, torch.device(backend.device))
        validate(model, device, resolved.settings)
        where, server_args = ranks(model_runner), model_runner.server_args
        first = where["tp_rank"] % model.attn_tp_size == 0  # all ranks of an attention group make the same plans
        mode = resolved.settings.trace
        trace = Trace(mode if first or mode.endswith(".jsonl") else "off", rank=where["tp_rank"])
        counts = first or getattr(server_args, "enable_metrics_for_all_schedulers", False)
        metrics = metrics_of(server_args, where) if counts else None
        return cls(resolved, model, device, trace, metrics, portable=portable)

    @functools.cached_property
    def providers(self) -> Providers:
        """The providers for what no plan names."""
        return Providers(self.model.kv_layout, self.device.sm)

    @property
    def active(self) -> bool:
        """Whether any backend takes plans."""
        return bool(self.backends)

    def adopt(self, backend: Any, model_runner: Any) -> None:
        """Let a newly built backend take plans, once its kernels have run.

        Raises:
            ShapeError, SettingsError, NoProviderError, PatchError, MismatchError: it cannot; it stays a stock backend.
        """
        try:
            routes = self._adopt_v4(backend, model_runner) if is_v4(backend) else self._adopt_v32(backend, model_runner)
        except Exception:
            hand_back(backend)
            raise
        if backend.nsa_plugin is not None:
            self.routes = self.routes or {name: samples.describe(route) for name, route in routes.items()}
            if not is_v4(backend) and backend.nsa_plugin.plans_prefill:
                self.routes.setdefault(SHORT_WITH_LONG, backend.nsa_plugin.planner.describe_split())
            self.backends.append(backend)

    def _adopt_v32(self, backend: Any, model_runner: Any) -> dict[str, Execution]:
        """Return the execution paths of sample batches by name; none if every batch is left to the stock path."""
        model, settings = model_shape(backend, model_runner), self.resolved.settings
        exchange, keeps = self._exchange_for(backend, model_runner, model)
        planner = SglangPlanner(
            model,
            self.device,
            settings,
            self.trace,
            self.metrics,
            free_memory_of(exchange, free_device_memory),
            exchange_rows=0 if exchange is None else exchange.shard.max_tokens,
            no_exchange=keeps,
            sinks=has_sinks(model_runner.model_config.hf_text_config),
            asked_by=asked_by(self.resolved, prefix_of(backend)),
            whole=why_whole(
                model_runner,
                self.device.sm,
                setting=settings.split_prefill,
                resharding=exchange is not None,
                portable=self.portable,
            ),
            portable=self.portable,
            mixes=bool(argument_of(model_runner.server_args, "enable_mixed_chunk")),
            no_copy=why_no_copy(backend, model_runner),
            dense_up_to=dense_beyond(prefix_of(backend), model, settings, portable=self.portable),
            has_half=functools.partial(attends_half, backend, model_runner),
        )
        left = adopt(backend, planner, model_runner.server_args, exchange)
        if left and settings.strict == FULL:
            raise LeftToStockError(left[0])
        self._note(left)
        state: State | None = backend.nsa_plugin
        if state is not None and not getattr(model_runner, "is_draft_worker", False):
            state.loaded = loaded_prefixes(model_runner.server_args)
        if state is None or not (state.plans_prefill or state.plans_steps):
            release(backend)
            return {}
        longest, draft = backend.max_context_len, backend.speculative_num_draft_tokens
        routes = samples.routes(state, longest, draft)
        if model not in self._warmed:
            with self._warming(model):
                self._warm_v32(state, model, longest, exchange is not None, torch.device(backend.device))
        return routes

    def _warm_v32(self, state: State, model: ModelShape, longest: int, reshards: bool, device: torch.device) -> None:
        """Run the kernels that batches may take; see `common.warm`."""
        warm(samples.own_kernels(state, longest), state.providers, model, device)
        if reshards:
            sharded = samples.own_kernels(state, longest, sharded=True)
            warm(sharded, state.providers, replace(model, attn_tp_size=1), device)
        if state.plans_prefill:
            _warm_selection(state.planner, state.providers, longest, device)
        if not state.planner.whole:
            warm_reading(state.providers, model, device)
        if samples.attends_densely(state.planner, longest):
            warm_dense(state.providers, model, device)
        if self.portable:
            warm_portable(state.providers, model, device)

    @contextmanager
    def _warming(self, model: ModelShape) -> Iterator[None]:
        """Count the time of a model's warm-up, which is done once."""
        started = time.perf_counter()
        yield
        self.warm_seconds += time.perf_counter() - started
        self._warmed.add(model)

    def _exchange_for(self, backend: Any, model_runner: Any, model: ModelShape) -> tuple[SglangExchange | None, str]:
        """(the exchange or None, why there is none); see `open_exchange`."""
        if getattr(model_runner, "is_draft_worker", False):
            # Later draft steps may read the selection of query tokens that another rank has.
            return None, "later draft steps read a draft model's selection again"
        if self.exchange is None:
            settings = self.resolved.settings
            self.exchange, keeps = open_exchange(backend, model_runner, model, self.device, settings)
            return self.exchange, keeps
        return self.exchange, ""

    def _adopt_v4(self, backend: Any, model_runner: Any) -> dict[str, Execution]:
        """As `_adopt_v32`."""
        from sglang.srt.environ import envs
        from sglang.version import __version__

        heads_first = Version(__version__) >= OWN_HEADS_FIRST
        model, settings = v4_shape(model_runner), self.resolved.settings
        if not heads_first:  # the kernels attend all heads, wherever the rank's are among them
            model = replace(model, attn_tp_size=1)
        planner = SglangV4Planner(
            model,
            self.device,
            settings,
            self.trace,
            self.metrics,
            free_device_memory,
            asked=asked_by_engine(envs),
            engine_makes_rows=makes_rows(envs),
            has_half=functools.partial(attends_half, backend, model_runner),
        )
        left = v4_attention.adopt(backend, planner, model_runner.server_args, own_heads_first=heads_first)
        state: V4State | None = backend.nsa_plugin
        if state is None and settings.strict == FULL:
            raise LeftToStockError(left[0])
        self._note(left)
        if state is None:
            return {}
        # A library that a setting names may be on this device without a route under SGLang.
        of_prefill, of_steps = (planner.constraints(prefill=prefill) for prefill in (True, False))
        validate(model, planner.device, settings, constraints=of_prefill, decode_constraints=of_steps)
        longest = longest_context(backend)
        routes = samples.v4_prefills(planner, longest)
        if state.plans_steps:
            routes |= samples.step_routes(planner, longest, backend.speculative_num_draft_tokens)
        if model not in self._warmed:
            device = torch.device(backend.device)
            with self._warming(model):
                warm_v4(routes.values(), state, device)
                _warm_selection(planner, state.providers, longest, device)
        return {f"V4 {name}": route for name, route in routes.items()}

    def _note(self, notes: list[str]) -> None:
        self.notes += [note for note in notes if note not in self.notes]

    def settle(self) -> None:
        """Read the free memory again, now that SGLang has captured its graphs."""
        for backend in self.backends:
            state = backend.nsa_plugin
            state.planner.measure(free_memory_of(getattr(state, "exchange", None), free_device_memory))
        watch(self.resolved.settings.trace)

    def end(self) -> None:
        """Hand every backend back to SGLang."""
        for backend in self.backends:
            hand_back(backend)
        self.backends.clear()


def _warm_selection(planner: SglangPlanner, providers: Providers, max_context: int, device: torch.device) -> None:
    """Run the kernels that select for prefills; see `warm`."""
    model, indexers = planner.model, samples.indexers(planner, max_context)
    warm_selection(providers, model, device)
    if UNPAGED in indexers:
        warm_unpaged(providers, model, device)
    warm_logits(indexers - {UNPAGED, REFERENCE}, providers, model, device)


def asked_by(resolved: ResolvedSettings, prefix: str) -> dict[str, str]:
    """Return SGLang's flags that set a backend setting, each with the user's value, by setting.

    Args:
        prefix: see `prefix_of`.
    """
    return {
        name: f"SGLang's --{prefix}-{name.replace('_', '-')} {path}" for name, path in resolved.engine_paths.items()
    }


def is_v4(backend: Any) -> bool:
    """Whether one of the plugin's backends is for DeepSeek-V4."""
    return getattr(backend, "nsa_plugin_family", "v3.2") == "v4"


def shape_of(backend: Any, model_runner: Any) -> ModelShape:
    """Return the shape of the model on one rank of its attention group.

    Raises:
        ShapeError: see `model_shape`.
    """
    return v4_shape(model_runner) if is_v4(backend) else model_shape(backend, model_runner)


def hand_back(backend: Any) -> None:
    """Let a backend fall back to the stock path for all later batches."""
    if is_v4(backend):
        v4_attention.release(backend)
    else:
        release(backend)


def refuse_trtllm(backend: Any, device: DeviceProfile) -> None:
    """Raise NoProviderError if SGLang is set to TRT-LLM's kernels on a device that does not support them.

    SGLang accepts the flag there, and has laid an fp8 cache out for these kernels, which fails later in obscure ways.
    """
    if is_v4(backend) or device.has("trtllm", Op.SPARSE_MLA_DECODE):
        return
    for flag, impl in impls_of(backend).items():
        if impl == "trtllm":
            raise NoProviderError(
                f"{flag} is trtllm, but TRT-LLM's sparse MLA kernels need SM100 and flashinfer, and this is "
                f"{device.name} ({device.where}). Give another {flag}, or none. {TURN_OFF}"
            )


def check_model(backend: Any, model_runner: Any) -> None:
    """Check that the plugin supports the shape of a backend's model, before anything depends on it.

    Raises:
        LeftToStockError: see `check_shape`.
    """
    configured = model_runner.model_config
    names = architectures(getattr(configured, "hf_config", None))
    check_shape(configured.hf_text_config, "v4" if is_v4(backend) else "v3.2", ", ".join(names) or "the model")


def check_cache(backend: Any, model_runner: Any, device: DeviceProfile) -> None:
    """Check that the plugin supports the cache that SGLang has laid out for a backend's kernels.

    If SGLang runs TRT-LLM's kernels for prefill and decode, by its flags or by default on SM100, an fp8 cache has no
    scales. On a device without these kernels, `refuse_trtllm` raises instead.

    Raises:
        LeftToStockError: the plugin does not support the cache.
    """
    if is_v4(backend) or kv_layout(backend, model_runner) is not None:
        return  # `v4_attention.adopt` checks V4's cache
    impls = impls_of(backend).values()
    if any(impl in planned for impl in impls for planned in PLANNED.values()):
        return
    if "trtllm" in impls and not device.has("trtllm", Op.SPARSE_MLA_DECODE):
        return
    raise LeftToStockError(
        f"SGLang runs {' and '.join(dict.fromkeys(impls))} over a cache of {model_runner.kv_cache_dtype} without "
        "scales, which the plugin does not support"
    )


def free_device_memory() -> int:
    """Free bytes of the current device that PyTorch does not hold."""
    return int(torch.cuda.mem_get_info()[0])
