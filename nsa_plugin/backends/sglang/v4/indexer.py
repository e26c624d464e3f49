"""Top-k selection of a V4 prefill by its plan: bounded logits, and only those of each token's request.

SGLang's `forward_c4_indexer` prepares the queries, stores the layer's new keys, scores every query token against its
request's compressed keys and selects. Until 0.5.20 the logits are one float32 buffer of [query tokens, longest context
/ 4], 4 GiB for 32768 tokens of a context of 128K; later SGLang scores in chunks. The plugin also lets SGLang prepare.
It then gathers the requests' keys once a layer, and the plan's provider scores and selects in chunks of query tokens.

The output is SGLang's: `c4_sparse_page_indices` [query tokens, index_topk], slots of the compressed cache, and the
positions in `c4_sparse_raw_indices` in versions that have it, padded with -1. Ties and the order may differ.

The stock function runs for a batch without a plan or a small one (`Plan.stock_selection`), in a captured graph, with
the fp4 indexer, with hisparse, if a variable of SGLang or --dsa-topk-backend selects other code, and if something
records the selection.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.sglang.v4.batch import Prefill
from nsa_plugin.backends.sglang.v4.routes import TORCH_LOGITS_VARIABLE
from nsa_plugin.backends.sglang.v4.state import V4State
from nsa_plugin.decision.plan import IndexerMode, IndexerPlan
from nsa_plugin.kernels.kv_cache import reference_read_codes
from nsa_plugin.layouts import INDEXER_FP8
from nsa_plugin.libraries.registry import REFERENCE

PAGE = 64
"""Compressed keys per page."""

OTHER_CODE = (TORCH_LOGITS_VARIABLE, "SGLANG_OPT_USE_TILELANG_INDEXER", "SGLANG_OPT_USE_AITER_INDEXER")
TORCH_TOPK_VARIABLE = "SGLANG_TOPK_TRANSFORM_512_TORCH"
IN_GRAPH = ("is_in_breakable_cuda_graph", "is_in_tc_piecewise_cuda_graph")


def covered(backend: Any, prefill: Prefill, plan: IndexerPlan, c4_indexer: Any, names: Mapping[str, Any]) -> bool:
    """Whether the plugin selects instead of SGLang; see the module.

    Args:
        names: `engine_names` of the engine's `forward_c4_indexer`.
    """
    if plan.mode is not IndexerMode.TOPK or getattr(c4_indexer, "use_fp4_indexer", False):
        return False
    topk_backend = getattr(backend, "dsa_topk_backend", None)  # before 0.5.17 there was one alone
    if topk_backend is not None and (topk_backend.is_torch() or topk_backend.is_flashinfer()):
        return False
    # SGLang's variables are read with `get`; once a batch.
    if prefill.selects is None:
        envs = names["envs"]
        fields = (getattr(envs, name, None) for name in (*OTHER_CODE, TORCH_TOPK_VARIABLE))
        prefill.selects = not any(field is not None and field.get() for field in fields)
    if not prefill.selects:
        return False
    if getattr(backend, "hisparse_coordinator", None) is not None:
        return False
    if getattr(backend, "debug_use_external_c4_sparse_indices", False):
        return False
    capturer = names.get("get_global_indexer_capturer")
    if capturer is not None and capturer() is not None:
        return False
    if any(names[name]() for name in IN_GRAPH if name in names):
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def select(
    backend: Any, state: V4State, prefill: Prefill, plan: IndexerPlan, pool: Any, topk: int, given: Mapping[str, Any]
) -> None:
    """Prepare, score and select; replaces SGLang's `forward_c4_indexer`.

    Args:
        pool: SGLang's KV pool.
        topk: the model's index_topk.
        given: the arguments of `forward_c4_indexer`, by name.
    """
    metadata, providers = backend.forward_metadata, state.providers
    core, paged = metadata.core_attn_metadata, metadata.indexer_metadata
    c4_indexer = given["c4_indexer"]
    rows = min(given["x"].shape[0], given["q_lora"].shape[0], core.positions.shape[0])
    q, weights = _prepared(backend, pool, {**given, "positions": core.positions[:rows]}, rows)

    lengths = paged.compressed_seq_lens if hasattr(paged, "compressed_seq_lens") else paged.c4_seq_lens  # since 0.5.20
    layer_id = int(c4_indexer.layer_id)
    buffer = pool.get_index_k_with_scale_buffer(layer_id=layer_id)
    cache = state.cache(layer_id, "indexer", buffer, INDEXER_FP8, lambda: PAGE)
    keys = prefill.keys(core, lengths, PAGE)
    codes, scales = _read_codes(providers)(cache, keys.slots)

    count = prefill.rows
    arguments: dict[str, Any] = {"rows_per_chunk": plan.rows_per_chunk}
    if plan.provider != REFERENCE:
        arguments["requests"] = keys.requests
    if plan.provider == "deep_gemm":
        arguments["shared"] = keys.shared
    raw = getattr(core, "c4_sparse_raw_indices", None)
    slots = core.c4_sparse_page_indices
    into = raw[:count] if raw is not None and raw.shape[1] == topk else None
    score = providers.load("indexer_topk", plan.provider)
    positions = score(
        q[:count],
        codes,
        scales.squeeze(1),
        weights[:count].reshape(count, -1),
        keys.ks,
        keys.ke,
        topk,
        out=into,
        **arguments,
    )
    if raw is not None and into is None:  # a top-k that is no multiple of 64: SGLang pads its rows
        raw[:count, :topk] = positions
    transform, table = providers.helper("index_transform_paged"), core.page_table[:count]
    if slots.shape[1] == topk and slots.is_contiguous():
        transform(positions, table, page_size=PAGE, out=slots[:count])
    else:
        slots[:count, :topk] = transform(positions, table, page_size=PAGE)


def _prepared(backend: Any, pool: Any, given: dict[str, Any], rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Let SGLang prepare q [rows, heads, dim] float8 and weights [rows, heads, 1] float32."""
    if given["q_lora"].shape[0] != rows:
        given["q_lora_quant"] = None  # since 0.5.23: for all query tokens
    given["x"], given["q_lora"] = given["x"][:rows], given["q_lora"][:rows]
    given["token_to_kv_pool"] = pool  # until 0.5.14
    several = given.get("enable_multi_stream", False)
    prepare = backend._forward_prepare_multi_stream if several else backend._forward_prepare_normal
    wanted = _parameters(getattr(prepare, "__func__", prepare))
    q, weights, *_ = prepare(**{name: value for name, value in given.items() if name in wanted and name != "self"})
    return q, weights


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _read_codes(providers: Providers) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    if not providers.sm:
        return reference_read_codes
    from nsa_plugin.kernels.triton.kv_cache import read_codes

    return read_codes
