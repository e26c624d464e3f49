"""The kernels that could carry a batch, in order of preference, and why one cannot.

Pure data and arithmetic for `dispatch`: no torch, no engine, no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nsa_plugin.devices import Capability, DeviceProfile, Op
from nsa_plugin.plan import Attention
from nsa_plugin.settings import Settings
from nsa_plugin.shapes import BatchShape, ModelShape, Phase

# Fewer query heads than one tile of FlashMLA's kernels, which then pad (sglang #13646).
FEW_HEADS = 64
# On SM100 the trtllm kernel is quicker than a padded FlashMLA up to this many heads (vLLM #35807, #33451).
TRTLLM_HEADS = 16
# On SM100 copying a cache of fewer context tokens than this per query row to bf16 costs less than reading
# fp8 in the decode kernel (sglang, `set_dsa_prefill_impl`).
DEQUANTIZE_KV_PER_ROW = 512

OPS = {
    Attention.MHA_ONE_SHOT: Op.MHA_ONE_SHOT,
    Attention.SPARSE_PREFILL: Op.SPARSE_MLA_PREFILL,
    Attention.SPARSE_DECODE: Op.SPARSE_MLA_DECODE,
}


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
        return f"{self.library} {self.attention}" + (" after dequantisation" if self.dequantize_kv else "")


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


def dense_routes() -> tuple[Route, ...]:
    """One-shot dense attention (sglang #12788: FA3 on SM90, TRT-LLM ragged on SM100)."""
    return tuple(Route(Attention.MHA_ONE_SHOT, library) for library in ("fa3", "trtllm", "triton", "reference"))


def sparse_routes(model: ModelShape, batch: BatchShape, device: DeviceProfile, heads: int) -> tuple[Route, ...]:
    """Every route for a batch that attends to selected tokens, the preferred first."""
    extend = batch.phase is Phase.EXTEND
    shape = Attention.SPARSE_PREFILL if extend else Attention.SPARSE_DECODE
    triton, trtllm, fa3 = (Route(shape, library) for library in ("triton", "trtllm", "fa3"))
    flash_mla = _flash_mla_routes(model, batch, device)
    reference = Route(shape, "reference")
    few = (triton,) if heads < FEW_HEADS else ()
    many = () if few else (triton,)
    if not extend:
        # SGLang's own defaults: FA3 on SM90 and TRT-LLM on SM100 for a bf16 cache, FlashMLA for fp8.
        return (fa3, trtllm, *few, *flash_mla, *many, reference)
    if device.sm >= 100 and heads <= TRTLLM_HEADS:
        return (*few, trtllm, *flash_mla, *many, reference)
    return (*few, *flash_mla, trtllm, *many, reference)


def _flash_mla_routes(model: ModelShape, batch: BatchShape, device: DeviceProfile) -> tuple[Route, ...]:
    if not model.fp8_cache:
        return (Route(Attention.SPARSE_PREFILL, "flash_mla"),)
    in_place = Route(Attention.SPARSE_DECODE, "flash_mla")
    copied = Route(Attention.SPARSE_PREFILL, "flash_mla", dequantize_kv=True)
    if dequantizing_pays(model, batch, device):
        return (copied, in_place)
    return (in_place, copied)


def dequantizing_pays(model: ModelShape, batch: BatchShape, device: DeviceProfile) -> bool:
    """SGLang's rule for a V3.2 fp8 prefill on SM100; a captured graph cannot branch on lengths."""
    return (
        model.family == "v3.2"
        and model.fp8_cache
        and batch.phase is Phase.EXTEND
        and not batch.cuda_graph
        and 100 <= device.sm < 110
        and batch.total_kv_len < DEQUANTIZE_KV_PER_ROW * batch.num_tokens
    )


def route_refusal(
    route: Route,
    model: ModelShape,
    batch: BatchShape,
    device: DeviceProfile,
    settings: Settings,
    load: Load,
    asked: str = "auto",
) -> str | None:
    """Why a route does not carry the batch, or None if it does.

    Args:
        load: the rows and heads that its kernel would be given.
        asked: the library that the settings name, or "auto".
    """
    library = device.libraries.get(route.library)
    if library is None or not library.available:
        return "not known to this device profile" if library is None else library.reason
    if route.library == "reference" and asked != "reference" and device.kind != "cpu":
        return "plain torch, taken on a GPU only where a setting asks for it"
    layout = "bf16" if route.dequantize_kv else model.kv_layout
    capability = device.capability(route.library, OPS[route.attention], layout)
    if capability is None:
        return f"no {OPS[route.attention]} kernel for a {layout} cache on {device.where}"
    if route.dequantize_kv and batch.cuda_graph:
        return "the cache rows to bring to bf16 depend on lengths, which a captured graph cannot read"
    if route == Route(Attention.SPARSE_DECODE, "flash_mla") and exceeds_large_q(model, batch, settings, load.rows):
        return f"{load.rows} query rows exceed large_q_rows {settings.large_q_rows}"
    dims = model.mha_dims if route.attention is Attention.MHA_ONE_SHOT else model.row_dims
    selected = () if route.attention is Attention.MHA_ONE_SHOT else _selections(model)
    return capability_refusal(capability, heads=load.heads, rows=load.rows, dims=dims, selections=selected)


def exceeds_large_q(model: ModelShape, batch: BatchShape, settings: Settings, rows: int) -> bool:
    """Whether a V4 prefill has more rows than `large_q_rows` (sglang #25502); graphs keep one kernel."""
    return (
        model.family == "v4"
        and batch.phase is Phase.EXTEND
        and not batch.cuda_graph
        and 0 < settings.large_q_rows < rows
    )


def _selections(model: ModelShape) -> tuple[int, ...]:
    return (model.index_topk, model.sliding_window) if model.sliding_window else (model.index_topk,)


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
        allowed = " or ".join(str(allowed) for allowed in capability.dims)
        return f"takes heads of {allowed} elements; the model's are {dims}"
    if capability.heads_given(heads) is None:
        return f"takes {' or '.join(map(str, capability.head_counts))} heads; this batch has {heads}"
    for count in selections:
        if count % capability.topk_multiple:
            return f"takes selections in multiples of {capability.topk_multiple} tokens; the model's is {count}"
    if capability.max_rows is not None and rows > capability.max_rows:
        return f"{rows} query rows exceed the {capability.max_rows} that this build takes on this device"
    return None
