"""The execution-path table: how each engine executes a plan's route, for both engines and both model families.

A route is an attention kernel of a library, over the cache in place or over a bf16 copy (`decision.routes.Route`). An
execution path is how the adapter runs it: the stock code path that the batch takes, and whether the plugin's kernel
runs at its end. The planner passes the routes of this table to `decide` as `Constraints.paths`, so a route without an
entry for an engine and a KV layout is never planned there.

A new route is added here and nowhere else in the adapters.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import partial
from typing import Any

from nsa_plugin.decision.plan import Attention, Plan
from nsa_plugin.decision.routes import Route
from nsa_plugin.decision.shapes import Phase
from nsa_plugin.errors import NoProviderError
from nsa_plugin.layouts import FAMILY_LAYOUTS
from nsa_plugin.libraries.manifest import MANIFEST

SGLANG, VLLM = "SGLang", "vLLM"

PREFILL, DECODE, DENSE = Attention.SPARSE_PREFILL, Attention.SPARSE_DECODE, Attention.MHA_ONE_SHOT

# Execution paths of DeepSeek-V3.2 under SGLang, by SGLang's names.
FLASHMLA_KV, FLASHMLA_SPARSE, FA3, MHA = "flashmla_kv", "flashmla_sparse", "fa3", "mha"
# Of DeepSeek-V3.2 under vLLM: the plugin's kernel; vLLM's FlashMLA call; for a prefill over an fp8 cache, one of the
# call's two variants: the fp8 decode kernel for all tokens, or a bf16 copy and the prefill kernel.
PROVIDER, STOCK, MIXED, SEPARATE = "provider", "stock", "mixed", "separate"
# Of DeepSeek-V4: the plugin's kernel over both fp8 caches; a bf16 copy of the pages that the batch reads, then
# FlashMLA's prefill kernel; FlashMLA's decode kernel.
DIRECT, BF16_ROWS, DECODE_KERNEL = "direct", "bf16 rows", "decode kernel"


@dataclass(frozen=True, kw_only=True)
class PathEntry:
    """Routes with the same execution path.

    Attributes:
        path: the execution path.
        own: the plugin runs the kernel; else the stock engine does.
        engines, layouts: the engines and KV layouts that the entry applies to.
        attention: the kernels of the routes.
        libraries: their libraries; () = every library whose kernel the plugin calls.
        dequantize_kv: whether they read a bf16 copy of the cache.
        prefill: only prefills (True), only decode, verify and draft steps (False), or both (None).
        portable: only where the engine's own libraries do not support the GPU.
    """

    path: str
    own: bool
    engines: tuple[str, ...]
    layouts: tuple[str, ...]
    attention: tuple[Attention, ...]
    libraries: tuple[str, ...] = ()
    dequantize_kv: bool = False
    prefill: bool | None = None
    portable: bool = False


_FP8, _BF16, _V4, _V32 = ("v32_fp8",), ("bf16",), ("v4_fp8",), FAMILY_LAYOUTS["v3.2"]
_SPARSE, _FLASH_MLA = (PREFILL, DECODE), ("flash_mla",)
_sglang, _vllm = partial(PathEntry, engines=(SGLANG,)), partial(PathEntry, engines=(VLLM,))
_both = partial(PathEntry, engines=(SGLANG, VLLM), layouts=_V4)
_COPIES: dict[str, Any] = {"attention": (PREFILL,), "libraries": _FLASH_MLA, "dequantize_kv": True}

PATHS: tuple[PathEntry, ...] = (
    # Only this path passes slots and the fp8 pages.
    _sglang(path=FLASHMLA_KV, own=True, layouts=_FP8, attention=_SPARSE),
    # SGLang keeps FlashMLA's schedule for all layers and in graphs.
    _sglang(path=FLASHMLA_KV, own=False, layouts=_FP8, attention=(DECODE,), libraries=_FLASH_MLA),
    # SGLang gathers and dequantises the contexts of the batch's requests, then calls FlashMLA.
    _sglang(path=FLASHMLA_SPARSE, own=False, layouts=_FP8, **_COPIES),
    # This path passes slots and the bf16 cache, and needs no scheduling metadata.
    _sglang(path=FLASHMLA_SPARSE, own=True, layouts=_BF16, attention=_SPARSE),
    # SGLang pads the heads.
    _sglang(path=FLASHMLA_SPARSE, own=False, layouts=_BF16, attention=(PREFILL,), libraries=_FLASH_MLA),
    _sglang(path=FA3, own=False, layouts=_BF16, attention=(DECODE,), libraries=("fa3",)),
    _sglang(path=MHA, own=False, layouts=_V32, attention=(DENSE,), libraries=("fa3", "trtllm")),
    # SGLang projects keys and values for its own call; the plugin's kernel replaces the call.
    _sglang(path=MHA, own=True, layouts=_V32, attention=(DENSE,), libraries=("triton",), portable=True),
    _vllm(path=MHA, own=True, layouts=_V32, attention=(DENSE,), libraries=tuple(MANIFEST)),
    _vllm(path=PROVIDER, own=True, layouts=_V32, attention=_SPARSE, libraries=("fa3", "trtllm")),
    _vllm(path=PROVIDER, own=True, layouts=_V32, attention=_SPARSE),
    _vllm(path=MIXED, own=False, layouts=_FP8, attention=(DECODE,), libraries=_FLASH_MLA, prefill=True),
    _vllm(path=SEPARATE, own=False, layouts=_FP8, prefill=True, **_COPIES),
    _vllm(path=STOCK, own=False, layouts=_FP8, attention=(DECODE,), libraries=_FLASH_MLA, prefill=False),
    _vllm(path=STOCK, own=False, layouts=_BF16, attention=(PREFILL,), libraries=_FLASH_MLA),
    _both(path=DIRECT, own=True, attention=_SPARSE),
    _both(path=BF16_ROWS, own=True, **_COPIES),
    _both(path=DECODE_KERNEL, own=False, attention=(DECODE,), libraries=_FLASH_MLA),
)

# Libraries that the engines install and call; each of their routes has a separate entry.
ENGINE_LIBRARIES = frozenset({"flash_mla", "fa3", "trtllm", "deep_gemm"})


def path_of(engine: str, layout: str, plan: Plan) -> PathEntry:
    """Return the execution path of a plan that attends.

    Raises:
        NoProviderError: the engine has none; `routes_of` keeps `decide` from making such a plan.
    """
    # A dense route copies only the prefix of an fp8 cache, on the same path.
    route = Route(plan.attention, plan.provider, plan.dequantize_kv and plan.attention is not DENSE)
    entry = _table(engine, layout, plan.phase is Phase.EXTEND, tuple(MANIFEST)).get(route)
    if entry is None:
        raise NoProviderError(f"{engine} has no execution path for {route} in {plan.phase} over a {layout} cache")
    return entry


def routes_of(
    engine: str, layout: str, *, prefill: bool, only: frozenset[str] = frozenset(), portable: bool = False
) -> frozenset[Route]:
    """Return the routes that an engine can execute over a KV layout.

    Args:
        only: the execution paths to look at; none: all.
        portable: the engine's own libraries do not support the GPU.
    """
    return _routes(engine, layout, prefill, only, portable, tuple(MANIFEST))


@functools.cache
def _routes(
    engine: str, layout: str, prefill: bool, only: frozenset[str], portable: bool, known: tuple[str, ...]
) -> frozenset[Route]:
    table = _table(engine, layout, prefill, known)
    return frozenset(
        route for route, entry in table.items() if (not only or entry.path in only) and (portable or not entry.portable)
    )


@functools.cache
def _table(engine: str, layout: str, prefill: bool, known: tuple[str, ...]) -> dict[Route, PathEntry]:
    """{route: entry}; `known`: the manifest's libraries, to which a test may add."""
    table: dict[Route, PathEntry] = {}
    for entry in PATHS:
        if engine not in entry.engines or layout not in entry.layouts or entry.prefill not in (None, prefill):
            continue
        libraries = entry.libraries or tuple(name for name in known if name not in ENGINE_LIBRARIES)
        for attention in entry.attention:
            for library in libraries:
                table[Route(attention, library, entry.dequantize_kv)] = entry
    return table
