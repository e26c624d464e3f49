"""The table of docs/hardware.md: which kernel library `auto` picks on SM90."""

from __future__ import annotations

from nsa_plugin.decision.dispatch import decide
from nsa_plugin.decision.plan import Plan
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.settings import Settings
from nsa_plugin.tools.pages.markdown import markdown_table

HEADS = (8, 16, 32, 64, 128)
LAYOUTS = {"v32_fp8": "fp8 cache", "bf16": "bf16 cache"}
PREFILL, CONTEXT = 4096, 65536
STEPS = (1, 8, 32, 128)
"""Requests of the decode steps."""
DEVICE = synthetic(90, libraries=("flash_mla", "deep_gemm", "fa3", "cuda", "triton"))


def table() -> str:
    """Libraries of a prefill and of decode steps, by the heads of a GPU and the KV cache."""
    header = ["heads a GPU", *(f"{phase}, {cache}" for cache in LAYOUTS.values() for phase in ("prefill", "decode"))]
    rows = [[str(heads), *(cell for layout in LAYOUTS for cell in _cells(heads, layout))] for heads in HEADS]
    return markdown_table(header, rows)


def _cells(heads: int, layout: str) -> tuple[str, str]:
    model = ModelShape(num_heads=heads, attn_tp_size=1, kv_layout=layout)
    prefill = BatchShape.from_lengths(Phase.EXTEND, [PREFILL], [CONTEXT])
    steps = {count: BatchShape.from_lengths(Phase.DECODE, [1] * count, [CONTEXT] * count) for count in STEPS}
    chosen = {count: _library(decide(model, batch, DEVICE, Settings())) for count, batch in steps.items()}
    by_library: dict[str, list[str]] = {}
    for count, library in chosen.items():
        by_library.setdefault(library, []).append(str(count))
    parts = [
        f"{library} with {', '.join(counts)} {'request' if counts == ['1'] else 'requests'}"
        for library, counts in by_library.items()
    ]
    decode = "; ".join(parts) if len(parts) > 1 else next(iter(by_library))
    return _library(decide(model, prefill, DEVICE, Settings())), decode


def _library(plan: Plan) -> str:
    copied = ", over a bf16 copy" if plan.dequantize_kv else ""
    padded = f", padded to {plan.head_padding} heads" if plan.head_padding else ""
    return f"`{plan.provider}`{copied}{padded}"
