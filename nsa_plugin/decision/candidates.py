"""The kernels that could carry a batch, in order of preference, and why one cannot.

The order is what upstream found, and where the plugin's own measurements cover several routes, theirs.
Pure data and arithmetic for `dispatch`: no torch, no engine, no I/O.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nsa_plugin.decision import timings as measured
from nsa_plugin.decision.plan import Attention
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.libraries.capabilities import Capability, Op
from nsa_plugin.libraries.devices import DeviceProfile
from nsa_plugin.libraries.manifest import MANIFEST
from nsa_plugin.settings import Settings

# Where nothing was measured: up to this many heads the plugin's CUDA kernel, which pads none, comes before
# FlashMLA's, which pad to 64 (sglang #13646).
FEW_HEADS = 16
# Times that differ by less than this keep their order: another run may turn them around.
NEARLY_EQUAL = 0.03
# Bytes read and written to bring a context token to bf16; V4's selected keys are every fourth token's.
COPY_BYTES = {"v32_fp8": 656 + 2 * 576, "v4_fp8": (584 + 2 * 512) // 4}
# Of the device memory's rate, in bytes a microsecond, what such a copy reaches on SM90 at least.
COPY_RATE = 3e6
# On SM100 the trtllm kernel is quicker than a padded FlashMLA up to this many heads (vLLM #35807, #33451).
TRTLLM_HEADS = 16
# On SM100 copying a cache of fewer context tokens than this per query row to bf16 costs less than reading
# fp8 in the decode kernel (SGLang, `set_dsa_prefill_impl`).
DEQUANTIZE_KV_PER_ROW = 512

OPS = {
    Attention.MHA_ONE_SHOT: Op.MHA_ONE_SHOT,
    Attention.SPARSE_PREFILL: Op.SPARSE_MLA_PREFILL,
    Attention.SPARSE_DECODE: Op.SPARSE_MLA_DECODE,
}

# Libraries with a place in the order of candidates below.
RANKED = frozenset({"flash_mla", "fa3", "trtllm", "cuda", "triton", "reference"})


@dataclass(frozen=True)
class Route:
    """A kernel of a library, and whether the cache is brought to bf16 for it.

    `attention` names the kernel's shape, not the phase: FlashMLA's decode kernel carries an fp8 prefill,
    and its prefill kernel carries the decode of a bf16 cache.
    """

    attention: Attention
    library: str
    dequantize_kv: bool = False

    def __str__(self) -> str:
        return self._words

    @functools.cached_property
    def _words(self) -> str:
        return f"{self.library} {self.attention}" + (" after dequantisation" if self.dequantize_kv else "")

    def layout_read(self, model: ModelShape) -> str:
        """The layout that the kernel itself sees."""
        return "bf16" if self.dequantize_kv else model.kv_layout


FLASH_MLA_DECODE = Route(Attention.SPARSE_DECODE, "flash_mla")


@dataclass(frozen=True)
class Refusal:
    """A route that does not carry a batch, and why."""

    route: Route
    reason: str

    def __str__(self) -> str:
        return f"{self.route}: {self.reason}"


@dataclass(frozen=True)
class Load:
    """What a kernel would be given: rows and heads differ from the batch's when tokens are sharded."""

    rows: int
    heads: int


@dataclass(frozen=True)
class Case:
    """The inputs of one decision.

    Attributes:
        routes: of `sparse_routes`, which a decision asks for several times.
    """

    model: ModelShape
    batch: BatchShape
    device: DeviceProfile
    settings: Settings
    routes: dict[Load, tuple[Route, ...]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def extend(self) -> bool:
        return self.batch.phase is Phase.EXTEND

    @property
    def backend_setting(self) -> str:
        """The setting that names the library of this phase; verify and draft go with decode (sglang #17662)."""
        return "prefill_backend" if self.extend else "decode_backend"

    @property
    def asked(self) -> str:
        """The library that the settings name for this phase, or "auto"."""
        return str(getattr(self.settings, self.backend_setting))

    @property
    def own_load(self) -> Load:
        return Load(self.batch.num_tokens, self.model.heads_per_rank)

    @property
    def sharded_load(self) -> Load:
        return Load(-(-self.batch.num_tokens // self.model.attn_tp_size), self.model.num_heads)

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
        """Whether a V4 prefill has more rows than `large_q_rows` (sglang #25502); a graph keeps one kernel."""
        return (
            self.extend
            and self.model.family == "v4"
            and not self.batch.cuda_graph
            and 0 < self.settings.large_q_rows < rows
        )


def dense_routes() -> tuple[Route, ...]:
    """One-shot dense attention (sglang #12788: FA3 on SM90, TRT-LLM ragged on SM100)."""
    return _dense(tuple(MANIFEST))


@functools.cache
def _dense(known: tuple[str, ...]) -> tuple[Route, ...]:
    libraries = ("fa3", "trtllm", "triton", *_unranked(Op.MHA_ONE_SHOT, known), "reference")
    return tuple(Route(Attention.MHA_ONE_SHOT, library) for library in libraries)


def _unranked(op: Op, known: tuple[str, ...]) -> tuple[str, ...]:
    """Libraries of the manifest that support an op and have no rank here; they come after all ranked kernels."""
    return tuple(name for name in known if name not in RANKED and MANIFEST[name].supports(op))


def sparse_routes(case: Case, load: Load) -> tuple[Route, ...]:
    """Every route for a batch that attends to selected tokens, the preferred first.

    The routes that were measured come in the order of their times, in the places that they had among the others.
    """
    known = case.routes.get(load)
    if known is None:
        *usual, last = usual_sparse_routes(case, load)
        known = case.routes[load] = (*_by_time(case, usual, load), last)
    return known


def usual_sparse_routes(case: Case, load: Load) -> tuple[Route, ...]:
    """The same in the order that holds where nothing was measured; the last one's place is the last in any case."""
    return _usual(
        case.extend, case.device.sm, load.heads, case.model.fp8_cache, case.dequantizing_pays, tuple(MANIFEST)
    )


@functools.cache  # the same objects every time, so that each makes its words once
def _usual(
    extend: bool, sm: int, heads: int, fp8_cache: bool, dequantizing_pays: bool, known: tuple[str, ...]
) -> tuple[Route, ...]:
    shape = Attention.SPARSE_PREFILL if extend else Attention.SPARSE_DECODE
    names = ("cuda", "triton", "trtllm", "fa3", "reference")
    cuda, triton, trtllm, fa3, reference = (Route(shape, library) for library in names)
    flash_mla = _flash_mla_routes(fp8_cache, dequantizing_pays)
    few, many = ((cuda,), ()) if heads <= FEW_HEADS else ((), (cuda,))
    if not extend:
        # SGLang's own defaults: FA3 on SM90 and TRT-LLM on SM100 for a bf16 cache, FlashMLA for fp8.
        routes = (fa3, trtllm, *few, *flash_mla, *many)
    elif sm >= 100 and heads <= TRTLLM_HEADS:
        routes = (*few, trtllm, *flash_mla, *many)
    else:
        routes = (*few, *flash_mla, trtllm, *many)
    unranked = (Route(shape, library) for library in _unranked(OPS[shape], known))
    return (*routes, triton, *unranked, reference)


def estimate_us(case: Case, route: Route, load: Load) -> float | None:
    """Microseconds that the route takes for the batch by `measured`, or None where that does not say.

    The measurements of a route that copies the cache hold a copy of `measured.COPIED_CONTEXT` tokens: a longer
    context is added, a shorter one is not taken off. With fewer rows than were measured the copy is most of the
    time, and what a row costs besides is not known.
    """
    model, sm = case.model, case.device.sm
    op = Op.SPARSE_MLA_PREFILL if case.extend else Op.SPARSE_MLA_DECODE
    if measured.SELECTIONS[model.kv_layout] != (model.index_topk, model.sliding_window):
        return None
    time = measured.estimate_us(sm, op, model.kv_layout, load.heads, load.rows, str(route))
    if time is None or not route.dequantize_kv:
        return time
    if load.rows < measured.points(sm, op, model.kv_layout, load.heads, str(route))[0][0]:
        return None
    longer = max(case.batch.total_kv_len - measured.COPIED_CONTEXT, 0)
    return time + longer * COPY_BYTES[model.kv_layout] / COPY_RATE


def _by_time(case: Case, routes: Sequence[Route], load: Load) -> tuple[Route, ...]:
    times = [estimate_us(case, route, load) for route in routes]
    waiting = [(time, route) for time, route in zip(times, routes, strict=True) if time is not None]
    ordered: list[Route] = []
    while waiting:
        quickest = min(time for time, _ in waiting)
        place = next(place for place, (time, _) in enumerate(waiting) if time <= quickest * (1 + NEARLY_EQUAL))
        ordered.append(waiting.pop(place)[1])
    taken = iter(ordered)
    return tuple(route if time is None else next(taken) for time, route in zip(times, routes, strict=True))


def _flash_mla_routes(fp8_cache: bool, dequantizing_pays: bool) -> tuple[Route, ...]:
    if not fp8_cache:
        return (Route(Attention.SPARSE_PREFILL, "flash_mla"),)
    copied = Route(Attention.SPARSE_PREFILL, "flash_mla", dequantize_kv=True)
    return (copied, FLASH_MLA_DECODE) if dequantizing_pays else (FLASH_MLA_DECODE, copied)


def first(routes: Sequence[Route], refusal: Callable[[Route], str | None]) -> tuple[Route | None, list[Refusal]]:
    """The first route that is not refused, and the refusals before it."""
    refused: list[Refusal] = []
    for route in routes:
        reason = refusal(route)
        if reason is None:
            return route, refused
        refused.append(Refusal(route, reason))
    return None, refused


def route_refusal(case: Case, route: Route, load: Load, asked: str = "auto") -> str | None:
    """Why a route does not carry the batch, or None if it does.

    Args:
        load: the rows and heads that its kernel would be given.
        asked: the library that the settings name, or "auto".
    """
    model, device = case.model, case.device
    library = device.libraries.get(route.library)
    if library is None or not library.available:
        return library.reason if library else "unknown to this device profile"
    if route.library == "reference" and asked != "reference" and device.kind != "cpu":
        return "plain torch, taken on a GPU only where a setting asks for it"
    op, layout = OPS[route.attention], route.layout_read(model)
    capability = device.capability(route.library, op, layout)
    if capability is None:
        excluded = device.exclusion(route.library, op, layout)
        return excluded or f"no {op} kernel for a {layout} cache on {device.where}"
    if route.dequantize_kv and case.batch.cuda_graph:
        return "the cache rows to bring to bf16 depend on lengths, which a captured graph cannot read"
    if route == FLASH_MLA_DECODE and case.exceeds_large_q(load.rows):
        return f"{load.rows} query rows exceed large_q_rows {case.settings.large_q_rows}"
    if route.attention is Attention.MHA_ONE_SHOT:
        return capability_refusal(capability, heads=load.heads, rows=load.rows, dims=model.mha_dims)
    # V4 selects tokens and attends to a window besides; each is a list of its own to the kernel.
    selections = tuple(count for count in (model.index_topk, model.sliding_window) if count)
    return capability_refusal(capability, heads=load.heads, rows=load.rows, dims=model.row_dims, selections=selections)


def capability_refusal(
    capability: Capability, *, heads: int, rows: int, dims: tuple[int, ...], selections: Sequence[int] = ()
) -> str | None:
    """Why a kernel does not take this, or None if it does.

    Args:
        heads: heads of the op; the kernel may be given more (`Capability.heads_given`).
        rows: query rows of one call.
        dims: elements of a head, as `Capability.dims` has them.
        selections: numbers of selected tokens, each of which must fit `topk_multiple`.
    """
    if capability.dims and dims not in capability.dims:
        allowed = " or ".join(map(str, capability.dims))
        return f"takes heads of {allowed} elements; the model's have {dims}"
    if capability.heads_given(heads) is None:
        return f"takes {capability.heads_in_words} heads; there are {heads}"
    for count in selections:
        if count % capability.topk_multiple:
            return f"takes selections in multiples of {capability.topk_multiple} tokens; the model's is {count}"
    if capability.max_rows is not None and rows > capability.max_rows:
        return f"{rows} query rows exceed the {capability.max_rows} that this build takes on this device"
    return None
