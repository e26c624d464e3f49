"""The inputs of one decision, which every rule reads, and the words that reasons share."""

from __future__ import annotations

from dataclasses import dataclass, field

from nsa_plugin.decision import timings
from nsa_plugin.decision.constraints import UNCONSTRAINED, Constraints
from nsa_plugin.decision.plan import Attention
from nsa_plugin.decision.routes import BF16_COPY, FLASH_MLA_DECODE, OPS, KernelLoad, Route, capability_refusal
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.libraries.devices import DeviceProfile
from nsa_plugin.settings import Settings

# On SM100 copying a cache of fewer context tokens than this per query token to bf16 costs less than reading
# fp8 in the decode kernel (SGLang, `set_dsa_prefill_impl`).
DEQUANTIZE_KV_PER_ROW = 512


@dataclass(frozen=True)
class Case:
    """The inputs of one decision.

    Attributes:
        routes: the ordered routes of `sparse.sparse_routes`, which one decision needs several times.
    """

    model: ModelShape
    batch: BatchShape
    device: DeviceProfile
    settings: Settings
    constraints: Constraints = UNCONSTRAINED
    routes: dict[KernelLoad, tuple[Route, ...]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def extend(self) -> bool:
        return self.batch.phase is Phase.EXTEND

    @property
    def backend_setting(self) -> str:
        """The setting that names the library of this phase; verify and draft follow decode (sglang #17662)."""
        return "prefill_backend" if self.extend else "decode_backend"

    @property
    def asked(self) -> str:
        """The library that the settings name for this phase, or "auto"."""
        return str(getattr(self.settings, self.backend_setting))

    @property
    def own_load(self) -> KernelLoad:
        return KernelLoad(self.batch.num_tokens, self.model.heads_per_rank)

    @property
    def sharded_load(self) -> KernelLoad:
        return KernelLoad(-(-self.batch.num_tokens // self.model.attn_tp_size), self.model.num_heads)

    @property
    def timed(self) -> bool:
        """Whether the measured times are of this model's selection and window; for another there is no estimate."""
        return (self.model.index_topk, self.model.sliding_window) == timings.SELECTIONS[self.model.kv_layout]

    @property
    def stock_prefill(self) -> Route:
        """The route by which the stock engine runs a V4 prefill: bf16 rows, unless the constraints name another."""
        return self.constraints.stock_prefill or BF16_COPY

    @property
    def dequantizing_pays(self) -> bool:
        """SGLang's rule for a V3.2 fp8 prefill on SM100."""
        return (
            self.extend
            and self.model.family == "v3.2"
            and self.model.fp8_cache
            and 100 <= self.device.sm < 110
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


def route_refusal(case: Case, route: Route, load: KernelLoad, asked: str = "auto") -> str | None:
    """Why a route does not support the batch, or None if it does.

    Args:
        load: what its kernel call would get.
        asked: the library that the settings name, or "auto".
    """
    model, device, constraints = case.model, case.device, case.constraints
    library = device.libraries.get(route.library)
    if library is None or not library.available:
        return library.reason if library else "unknown to this device profile"
    if route.library == "reference" and asked != "reference" and device.kind != "cpu":
        return "plain torch, chosen on a GPU only if a setting asks for it"
    op, layout = OPS[route.attention], route.layout_read(model)
    capability = device.capability(route.library, op, layout)
    if capability is None:
        return f"no {op} kernel for a {layout} cache on {device.where}"
    if constraints.paths is not None and route not in constraints.paths:
        return constraints.no_path.get(route.library, f"{constraints.engine} has no execution path for it")
    if route.dequantize_kv and case.batch.cuda_graph:
        return "which cache rows to copy to bf16 depends on lengths, which a captured graph cannot read"
    if route.dequantize_kv and not constraints.copy_fits:
        return constraints.copy_refusal
    if route == FLASH_MLA_DECODE and case.exceeds_large_q(load.rows):
        return f"{load.rows} query tokens exceed large_q_rows {case.settings.large_q_rows}"
    if route.attention is Attention.MHA_ONE_SHOT:
        return capability_refusal(capability, heads=load.heads, rows=load.rows, dims=model.mha_dims)
    # V4 attends selected tokens and a window; the kernel gets two index lists.
    selections = tuple(count for count in (model.index_topk, model.sliding_window) if count)
    return capability_refusal(capability, heads=load.heads, rows=load.rows, dims=model.row_dims, selections=selections)


def batch_sentence(batch: BatchShape) -> str:
    """The batch in words."""
    return (
        f"{batch.phase}: {count(batch.num_requests, 'request')}, {count(batch.num_tokens, 'query token')}, "
        f"longest context {batch.max_kv_len}, {count(batch.total_kv_len, 'context token')} in all"
    )


def count(number: int, noun: str) -> str:
    """ "1 request", "2 requests"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def in_time(us: float) -> str:
    """ "18.2 us", "1.36 ms"."""
    return f"{us / 1e3:.2f} ms" if us >= 999.5 else f"{us:.3g} us"
