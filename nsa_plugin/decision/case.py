"""The inputs of one decision, which every rule reads, and the phrases that reasons share."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from nsa_plugin.decision import timings
from nsa_plugin.decision.constraints import UNCONSTRAINED, Constraints
from nsa_plugin.decision.plan import Attention
from nsa_plugin.decision.routes import (
    BF16_COPY,
    FLASH_MLA_DECODE,
    OPS,
    KernelLoad,
    Refusal,
    Route,
    capability_refusal,
    rows_refusal,
)
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.libraries.capabilities import Op
from nsa_plugin.libraries.devices import DeviceProfile
from nsa_plugin.settings import Settings

# On SM100 copying a cache of fewer context tokens than this per query token to bf16 costs less than reading
# fp8 in the decode kernel (SGLang, `set_dsa_prefill_impl`).
DEQUANTIZE_KV_PER_ROW = 512


T = TypeVar("T")


@dataclass(frozen=True)
class Kernel:
    """What is known of a route's kernel before any batch.

    Attributes:
        missing: why its library is not available; None if it is.
        absent: why the library has no kernel that reads the cache; None if it has one.
        unfit: why the kernel does not support the model, whatever the batch; None if it does.
        max_rows: most query tokens of a call; None = no limit.
        padding: heads that the kernel gets where it does not support the number given, else 0; and why.
        times: the measured head count, and (query tokens, microseconds) of its calls; empty if none fits.
    """

    missing: str | None
    absent: str | None
    unfit: str | None
    max_rows: int | None
    padding: tuple[int, str]
    times: tuple[int, timings.Points]

    @property
    def usable(self) -> bool:
        """Whether it supports some batch."""
        return self.missing is None and self.absent is None and self.unfit is None


@dataclass(eq=False)
class Case:
    """The inputs of one decision.

    Attributes:
        known: what follows from the model, the device and the settings alone; see `once`.
        dense: what `dense.dense_provider` found, once it has looked.
        extend: the batch is a prefill.
        own_load: the load of the sparse kernel's call without resharding.
        dense_load: the load of the dense kernel's call.
    """

    model: ModelShape
    batch: BatchShape
    device: DeviceProfile
    settings: Settings
    constraints: Constraints = UNCONSTRAINED
    known: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    dense: tuple[Route | None, list[Refusal]] | None = field(default=None, init=False, repr=False)
    extend: bool = field(init=False, repr=False)
    own_load: KernelLoad = field(init=False, repr=False)
    dense_load: KernelLoad = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.extend = self.batch.phase is Phase.EXTEND
        self.own_load = KernelLoad(self.batch.num_tokens, self.model.attended_heads)
        dcp = self.model.dcp_size > 1
        self.dense_load = KernelLoad(self.batch.num_tokens, self.model.heads_per_rank) if dcp else self.own_load

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` returned for this key in any case of the same model, device and settings.

        It must not depend on the batch, nor on constraints that the key lacks. Threads may make it twice.
        """
        try:
            return self.known[key]  # type: ignore[no-any-return]
        except KeyError:
            made = self.known[key] = make()
            return made

    def kernel(self, route: Route, heads: int) -> Kernel:
        """What is known of a route's kernel for `heads` query heads."""
        key = route, heads, self.extend
        known: Kernel | None = self.known.get(key)
        if known is None:
            known = self.known[key] = _kernel(self, route, heads)
        return known

    @property
    def backend_setting(self) -> str:
        """The setting that names the library of this phase; verify and draft follow decode (sglang #17662)."""
        return "prefill_backend" if self.extend else "decode_backend"

    @property
    def asked(self) -> str:
        """The library that the settings name for this phase, or "auto"."""
        return self.settings.prefill_backend if self.extend else self.settings.decode_backend

    @property
    def sharded_load(self) -> KernelLoad:
        return KernelLoad(-(-self.batch.num_tokens // self.model.attn_tp_size), self.model.num_heads)

    @property
    def filed(self) -> str:
        """What stands for the layout in the times of this model's selection and window; "" if none were measured."""
        return timings.filed(self.model.kv_layout, (self.model.index_topk, self.model.sliding_window))

    @property
    def timed(self) -> bool:
        """Whether the times that are filed by layout alone are of this model's selection and window."""
        return self.filed == self.model.kv_layout

    @property
    def measured(self) -> bool:
        """Whether some route of the model's selection and heads was measured on this device, for this phase."""
        op = Op.SPARSE_MLA_PREFILL if self.extend else Op.SPARSE_MLA_DECODE
        return timings.measured(self.device.sm, op, self.filed, self.model.attended_heads)

    @property
    def stock_prefill(self) -> Route | None:
        """The stock engine's route for a prefill over an fp8 cache; None = the first of the usual order."""
        if not self.extend or not self.model.fp8_cache:
            return None
        return self.constraints.stock_prefill or (BF16_COPY if self.model.family == "v4" else None)

    @property
    def dequantizing_pays(self) -> bool:
        """SGLang's rule for a V3.2 fp8 prefill on SM100."""
        return (
            100 <= self.device.sm < 110  # first: it is false for most
            and self.extend
            and self.model.family == "v3.2"
            and self.model.fp8_cache
            and self.batch.total_kv_len < DEQUANTIZE_KV_PER_ROW * self.batch.num_tokens
        )

    def exceeds_large_q(self, rows: int) -> bool:
        """Whether a V4 prefill exceeds `large_q_rows` query tokens (sglang #25502); a graph keeps one kernel."""
        return (
            self.extend
            and self.model.family == "v4"
            and not self.batch.cuda_graph
            and 0 < self.settings.large_q_rows < rows
        )


def _kernel(case: Case, route: Route, heads: int) -> Kernel:
    model, device = case.model, case.device
    op, layout = OPS[route.attention], route.layout_read(model)
    library = device.libraries.get(route.library)
    missing = None
    if library is None or not library.available:
        missing = library.reason if library else "unknown to this device profile"
    timed_op = Op.SPARSE_MLA_PREFILL if case.extend else Op.SPARSE_MLA_DECODE
    times = timings.fitting(device.sm, timed_op, case.filed, heads, str(route))
    capability = device.capability(route.library, op, layout)
    given = capability.heads_given(heads) if capability else None
    unpadded = 0, f"{route.library} supports {count(heads, 'head')} without padding"
    if capability is None:
        absent = f"no {op} kernel for a {layout} cache on {device.where}"
        if library is not None and (
            others := [name for kernel in library.capabilities if kernel.op == op for name in kernel.layouts]
        ):
            absent += f" (it reads {' and '.join(dict.fromkeys(others))})"
        return Kernel(missing, absent, None, None, unpadded, times)
    if route.attention is Attention.MHA_ONE_SHOT:
        unfit = capability_refusal(capability, heads=heads, dims=model.mha_dims)
    else:
        # V4 attends selected tokens and a window; the kernel gets two index lists.
        selections = tuple(count for count in (model.index_topk, model.sliding_window) if count)
        unfit = capability_refusal(capability, heads=heads, dims=model.row_dims, selections=selections)
    padding = unpadded
    if given is not None and given != heads:
        supported = f"supports {capability.heads_in_words} heads; there are {heads}"
        padding = given, f"{route.library}'s kernel on {device.where} {supported}"
    return Kernel(missing, None, unfit, capability.max_rows, padding, times)


def route_refusal(case: Case, route: Route, load: KernelLoad, asked: str = "auto") -> str | None:
    """Why a route does not support the batch, or None if it does.

    Args:
        load: what its kernel call would get.
        asked: the library that the settings name, or "auto".
    """
    constraints, kernel = case.constraints, case.kernel(route, load.heads)
    if kernel.missing is not None:
        return kernel.missing
    if route.library == "reference" and asked != "reference" and case.device.kind != "cpu":
        return "plain torch, chosen on a GPU only if a setting asks for it"
    if kernel.absent is not None:
        hint = constraints.no_path.get(route.library) if asked == route.library else None
        return f"{kernel.absent}; {hint}" if hint else kernel.absent
    if constraints.paths is not None and route not in constraints.paths:
        of_library = constraints.no_path.get(route.library, f"{constraints.engine} has no execution path for it")
        return constraints.no_path.get(route, of_library)
    if route.dequantize_kv and case.batch.cuda_graph:
        return "which cache rows to copy to bf16 depends on lengths, which a captured graph cannot read"
    if route.dequantize_kv and constraints.no_copy:
        return constraints.no_copy
    if route.dequantize_kv and not constraints.copy_fits:
        return constraints.copy_refusal
    if route == FLASH_MLA_DECODE and case.exceeds_large_q(load.rows):
        return f"{load.rows} query tokens exceed large_q_rows {case.settings.large_q_rows}"
    return kernel.unfit or rows_refusal(kernel.max_rows, load.rows)


def batch_sentence(batch: BatchShape) -> str:
    """The batch in words."""
    return (
        f"{batch.phase}: {count(batch.num_requests, 'request')}, {count(batch.num_tokens, 'query token')}, "
        f"longest context {batch.max_kv_len}, {count(batch.total_kv_len, 'context token')} in all"
    )


def count(number: int, noun: str) -> str:
    """ "1 request", "2 requests"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def each_of(number: int, noun: str) -> str:
    """ "one request", "each of 2 requests"."""
    return f"one {noun}" if number == 1 else f"each of {number} {noun}s"


def in_time(us: float) -> str:
    """ "18.2 us", "1.36 ms"."""
    return f"{us / 1e3:.2f} ms" if us >= 999.5 else f"{us:.3g} us"
