"""A trial at start of other projects' SM120 kernels, which nobody has run with this plugin: the portable path decides.

Each kernel runs once on a small random input beside the plugin's own. One that fails, or gives another result, is taken
out of the device's profile with the reason, which is logged, so that every plan uses the plugin's kernels instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.kernels.checks import FP8_DTYPE
from nsa_plugin.kernels.kv_cache import allocate_cache
from nsa_plugin.libraries.architectures import is_sm120
from nsa_plugin.libraries.capabilities import SPARSE_OPS, Op
from nsa_plugin.libraries.devices import DeviceProfile

logger = logging.getLogger("nsa_plugin")

OWN = "triton"
TRIED = {"flashinfer_sm120": SPARSE_OPS, "deep_gemm": (Op.INDEXER_TOPK,)}
"""Libraries that are tried, and the ops that they serve on SM120."""

SLOTS, TOPK, PAGE_SIZE = 512, 128, 64
QUERIES = {"sparse_mla_prefill": 96, "sparse_mla_decode": 4}
"""Query tokens of a trial: FlashInfer's decode kernel takes up to 64."""
OUT_TOLERANCE = 0.02
"""Largest difference of attention's outputs, as a share of their largest value; the kernels round differently."""
SHARED_SELECTION = 0.95
"""Least share of a selection that two indexers have in common; only near ties may differ."""


def tried(device: DeviceProfile, model: ModelShape, providers: Providers, on: torch.device) -> DeviceProfile:
    """Return the profile without the SM120 libraries that fail their trial.

    Args:
        on: where to run the kernels.
    """
    if not is_sm120(device.sm):
        return device
    for name, ops in TRIED.items():
        found = device.libraries.get(name)
        if found is None or not any(device.has(name, op, model.kv_layout) for op in ops):
            continue
        why = trial(name, model, providers, on)
        if why:
            reason = f"its trial against the plugin's kernels failed on {device.where}: {why}"
            logger.warning("nsa-plugin: %s is not used: %s", name, reason)
            failed = replace(found, available=False, capabilities=(), reason=reason)
            device = replace(device, libraries={**device.libraries, name: failed})
    return device


def trial(name: str, model: ModelShape, providers: Providers, on: torch.device) -> str:
    """Why a library is not used on a device, or ""."""
    checks = (_indexer_ragged, _indexer_paged) if name == "deep_gemm" else (_attention_prefill, _attention_decode)
    try:
        for check in checks:
            if why := check(name, model, providers, on):
                return why
    except Exception as error:  # from the library, its compiler, the driver or CUDA
        return repr(error)
    return ""


def _attention(op: str, name: str, model: ModelShape, providers: Providers, on: torch.device) -> str:
    generator = torch.Generator(on).manual_seed(1)
    rows, dim = QUERIES[op], model.kv_lora_rank + model.qk_rope_head_dim
    cache = allocate_cache(model.kv_layout, SLOTS // PAGE_SIZE, PAGE_SIZE, device=on)
    values = torch.randn(SLOTS, dim, generator=generator, device=on).bfloat16()
    providers.helper("kv_cache_write")(cache, values, torch.arange(SLOTS, device=on))
    q = torch.randn(rows, model.heads_per_rank, dim, generator=generator, device=on).bfloat16()
    chosen = torch.randint(-SLOTS // 8, SLOTS, (rows, TOPK), generator=generator, device=on).clamp(min=-1).int()
    chosen[0] = -1
    outs = [
        providers.attend(op, one, q, cache, chosen, scale=dim**-0.5, d_v=model.kv_lora_rank).float()
        for one in (name, OWN)
    ]
    difference = float((outs[0] - outs[1]).abs().max() / outs[1].abs().max())
    # Written so that NaN fails.
    return "" if difference <= OUT_TOLERANCE else f"{op} differs by {difference:.3g} of the largest value"


_attention_prefill: Callable[..., str] = partial(_attention, "sparse_mla_prefill")
_attention_decode: Callable[..., str] = partial(_attention, "sparse_mla_decode")


def _queries(rows: int, model: ModelShape, on: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Generator]:
    generator = torch.Generator(on).manual_seed(2)
    q = torch.randn(rows, model.index_n_heads, model.index_head_dim, generator=generator, device=on).to(FP8_DTYPE)
    return q, torch.rand(rows, model.index_n_heads, generator=generator, device=on), generator


def _indexer_ragged(name: str, model: ModelShape, providers: Providers, on: torch.device) -> str:
    rows = QUERIES["sparse_mla_prefill"]
    q, weights, generator = _queries(rows, model, on)
    keys = torch.randn(SLOTS, model.index_head_dim, generator=generator, device=on).to(FP8_DTYPE)
    scales = torch.rand(SLOTS, generator=generator, device=on) + 0.5
    ends = torch.arange(SLOTS - rows, SLOTS, dtype=torch.int32, device=on)
    return _same_selection(
        *(
            providers.load("indexer_topk", one)(q, keys, scales, weights, torch.zeros_like(ends), ends, TOPK)
            for one in (name, OWN)
        )
    )


def _indexer_paged(name: str, model: ModelShape, providers: Providers, on: torch.device) -> str:
    rows = QUERIES["sparse_mla_decode"]
    q, weights, generator = _queries(rows, model, on)
    cache = allocate_cache("indexer_fp8", SLOTS // PAGE_SIZE, PAGE_SIZE, device=on)
    keys = torch.randn(SLOTS, model.index_head_dim, generator=generator, device=on).bfloat16()
    providers.helper("kv_cache_write")(cache, keys, torch.arange(SLOTS, device=on))
    table = torch.arange(SLOTS // PAGE_SIZE, dtype=torch.int32, device=on).expand(rows, -1).contiguous()
    lengths = torch.full((rows,), SLOTS - 1, dtype=torch.int32, device=on)
    return _same_selection(
        *(
            providers.load("indexer_topk_paged", one)(
                q.unsqueeze(1), cache, weights, lengths, table, TOPK, max_len=SLOTS
            )
            for one in (name, OWN)
        )
    )


def _same_selection(found: torch.Tensor, own: torch.Tensor) -> str:
    shared = min(len(set(a) & set(b)) / len(b) for a, b in zip(found.tolist(), own.tolist(), strict=True))
    return "" if shared >= SHARED_SELECTION else f"a selection has {shared:.0%} of the plugin's tokens"
