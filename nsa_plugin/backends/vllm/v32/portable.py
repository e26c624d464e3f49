"""Layer code for vLLM on GPUs that FlashMLA and DeepGEMM do not support: SM80, SM86, SM89 and SM120.

vLLM builds its FlashMLA-sparse layers there, and every plan runs a kernel of the plugin. `select` replaces vLLM's
indexer, and reads vLLM's metadata. On GPUs without fp8 instructions (SM80, SM86) `norm_rope` and `queries` replace the
two Triton kernels of vLLM's model code that need them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from packaging.version import Version

from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.common.warm import MANY_ROWS, PAGE_SIZE, expect_zeros
from nsa_plugin.backends.common.warm import ROWS as FEW_ROWS
from nsa_plugin.backends.vllm.v32.steps import StepSelection, select_steps
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.errors import PatchError
from nsa_plugin.kernels.checks import FP8_DTYPE
from nsa_plugin.kernels.kv_cache import allocate_cache, open_cache
from nsa_plugin.patches.ledger import TURN_OFF

SLOTS = "nsa_plugin_slots"
"""Attribute of a prefill chunk: the slots of its keys, made by the first layer."""
ROUNDS_SCALES = Version("0.31")
"""From this version on vLLM rounds the scales of its fp8 MLA cache up to powers of two."""

NamedArguments = Mapping[str, Any]
"""The arguments of the vLLM function that is replaced, by name."""


def select(given: NamedArguments, metadata: Any, steps: StepSelection | None, providers: Providers) -> torch.Tensor:
    """Store the batch's new keys and select for all its query tokens: vLLM's `sparse_attn_indexer`.

    Args:
        metadata: vLLM's DeepseekV32IndexerMetadata, without the decode and verify steps.
        steps: those steps; None without any.

    Returns:
        vLLM's buffer, int32 [max query tokens, topk]; -1 where a query token has no selection.
    """
    buffer: torch.Tensor = given["topk_indices_buffer"]
    cache = open_cache(given["kv_cache"], "indexer_fp8")
    if not given["skip_k_cache_insert"]:
        slots = metadata.slot_mapping
        providers.helper("kv_cache_write")(cache, given["k"][: len(slots)], slots, power_of_two_scales=True)
    if not given.get("skip_topk_buffer_clear"):
        buffer[: given["hidden_states"].shape[0]] = -1
    keys: tuple[torch.Tensor, torch.Tensor] | None = None
    for chunk in metadata.prefill.chunks if metadata.prefill is not None else ():
        if keys is None or not chunk.skip_kv_gather:
            keys = providers.helper("kv_cache_read_codes")(cache, slots_of(chunk, cache.page_size))
        rows = slice(chunk.token_start, chunk.token_end)
        codes, scales = keys
        providers.load("indexer_topk", providers.indexer)(
            given["q_quant"][rows],
            codes,
            scales.squeeze(-1),
            given["weights"][rows].float(),
            chunk.cu_seqlen_ks,
            chunk.cu_seqlen_ke,
            given["topk_tokens"],
            max_key_span=getattr(chunk, "max_seqlen_k", None),
            out=buffer[rows, : given["topk_tokens"]],
        )
    if steps is not None and steps.rows:
        select_steps(steps, given, providers)
    return buffer


def slots_of(chunk: Any, page_size: int) -> torch.Tensor:
    """Return int64 [total_seq_lens]: slots of the chunk's keys in the indexer's cache, made once a batch."""
    found: torch.Tensor | None = getattr(chunk, SLOTS, None)
    if found is None:
        bounds = chunk.cu_seq_lens.long()
        # With async scheduling and speculated tokens vLLM's `total_seq_lens` is an upper bound, and reading the exact
        # one would wait for the device. Places beyond it repeat the last key, and no query token's keys reach there.
        places = torch.arange(chunk.total_seq_lens, device=bounds.device).minimum(bounds[-1] - 1)
        request = torch.searchsorted(bounds[1:], places, right=True)
        position = places - bounds[request]
        found = chunk.block_table[request, position // page_size].long() * page_size + position % page_size
        setattr(chunk, SLOTS, found)
    return found


def norm_rope(given: NamedArguments, providers: Providers) -> torch.Tensor:
    """Norm and rotate a layer's inputs and write both caches: vLLM's `fused_norm_rope`.

    Returns:
        The compressed queries, normed: [n, q_lora_rank].
    """
    positions, rows = given["positions"], len(given["positions"])
    queries, latents, keys = providers.helper("mla_norm_rope")(
        given["q_c"],
        given["kv_c"],
        given["k_pe"],
        positions,
        given["k_rope_cos_sin_cache"],
        given["q_rms_norm_w"],
        given["kv_rms_norm_w"],
        q_eps=given["q_rms_eps"],
        kv_eps=given["kv_rms_eps"],
    )
    write = providers.helper("kv_cache_write")
    slots = given["slot_mapping"]
    if given["mla_kv_cache"] is not None:
        main = open_cache(given["mla_kv_cache"], providers.layout)
        write(main, latents, slots[:rows], rope=keys, power_of_two_scales=rounds_scales())
    for name, values in (("kv_c_out", latents), ("k_pe_out", keys), ("q_c_out", queries)):
        if given.get(name) is not None:
            given[name].copy_(values)
    if given["has_indexer"]:
        given["topk_indices_buffer"][:rows] = -1
        if given["indexer_k_cache"] is not None:
            indexer_keys = providers.helper("indexer_keys")(
                given["index_k"],
                positions,
                given["index_k_rope_cos_sin_cache"],
                given["index_k_layer_norm_w"],
                given["index_k_layer_norm_bias"],
                eps=given["index_k_layer_norm_eps"],
                interleaved=given["index_rope_interleave"],
            )
            indexer_slots = given.get("indexer_slot_mapping")
            slots = slots if indexer_slots is None else indexer_slots
            cache = open_cache(given["indexer_k_cache"], "indexer_fp8")
            write(cache, indexer_keys, slots[:rows], power_of_two_scales=True)
    out: torch.Tensor = queries if given.get("q_c_out") is None else given["q_c_out"]
    return out


@functools.cache
def rounds_scales() -> bool:
    """Whether the installed vLLM rounds the scales of its fp8 MLA cache up to powers of two."""
    import vllm

    return Version(vllm.__version__) >= ROUNDS_SCALES


def queries(given: NamedArguments, providers: Providers) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotate a layer's queries and quantise the indexer's: vLLM's `fused_q`.

    Returns:
        The indexer's queries [n, heads, dim] fp8 and head gates [n, heads] float32, both empty without an indexer; the
        queries' RoPE part [n, heads, rope_dim].
    """
    if given["quantize_mqa"]:
        raise PatchError(f"vLLM wants fp8 queries, which its FlashMLA-sparse layers do not support. {TURN_OFF}")
    positions, q_pe = given["positions"], given["q_pe"]
    rotated = providers.helper("rope")(q_pe, positions, given["q_pe_cos_sin_cache"])
    if not given["has_indexer"]:
        return q_pe.new_empty((0, 0, 0), dtype=FP8_DTYPE), q_pe.new_empty((0, 0), dtype=torch.float32), rotated
    codes, gates = providers.helper("indexer_queries")(
        given["index_q"],
        given["index_weights"],
        positions,
        given["index_q_cos_sin_cache"],
        scale=given["index_weights_softmax_scale"] * given["index_weights_head_scale"],
        interleaved=given["index_rope_interleave"],
    )
    return codes, gates, rotated


def warm_indexer(providers: Providers, model: ModelShape, device: torch.device, step_tokens: int) -> None:
    """Run the kernels of `select` on zeros: a prefill's, and those of steps of up to `step_tokens` query tokens.

    Raises:
        NoProviderError: a kernel does not run on this device; says which and why.
    """
    heads, dim, topk = model.index_n_heads, model.index_head_dim, model.index_topk
    cache = allocate_cache("indexer_fp8", 2, PAGE_SIZE, device=device)
    table = torch.zeros(FEW_ROWS, 2, dtype=torch.int32, device=device)
    lengths = torch.full((FEW_ROWS,), PAGE_SIZE, dtype=torch.int32, device=device)

    def inputs(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        q = torch.zeros(rows, heads, dim, device=device).to(FP8_DTYPE)
        return q, torch.zeros(rows, heads, dtype=torch.float32, device=device)

    def prefill(keys: int) -> torch.Tensor:
        slots = torch.zeros(keys, dtype=torch.int64, device=device)
        # vLLM's model code may leave new keys to the indexer. They are bfloat16; those of `norm_rope` are float32.
        new = torch.zeros(keys, dim, dtype=torch.bfloat16, device=device)
        providers.helper("kv_cache_write")(cache, new, slots, power_of_two_scales=True)
        codes, scales = providers.helper("kv_cache_read_codes")(cache, slots)
        q, weights = inputs(FEW_ROWS)
        score = providers.load("indexer_topk", providers.indexer)
        found: torch.Tensor = score(q, codes, scales.squeeze(-1), weights, lengths * 0, lengths, topk)
        return found >= PAGE_SIZE

    def step(rows_each: int) -> torch.Tensor:
        q, weights = inputs(FEW_ROWS * rows_each)
        score = providers.load("indexer_topk_paged", providers.indexer)
        q = q.unflatten(0, (FEW_ROWS, rows_each))
        found: torch.Tensor = score(q, cache, weights, lengths, table, topk, max_len=2 * PAGE_SIZE)
        return found >= PAGE_SIZE

    for keys in (PAGE_SIZE, MANY_ROWS):
        expect_zeros("the indexer's selection for a prefill", partial(prefill, keys))
    for rows_each in range(1, step_tokens + 1):
        expect_zeros("the indexer's selection for a step", partial(step, rows_each))


def warm_inputs(providers: Providers, model: ModelShape, device: torch.device) -> None:
    """Run `norm_rope` on zeros, few and many query tokens; see `common.warm`. `queries` runs in vLLM's profiling run.

    Raises:
        NoProviderError: a kernel does not run on this device; says which and why.
    """
    dim, rope, latent = model.index_head_dim, model.qk_rope_head_dim, model.kv_lora_rank
    keys = allocate_cache("indexer_fp8", 2, PAGE_SIZE, device=device)
    main = allocate_cache(model.kv_layout, 2, PAGE_SIZE, dim=model.row_dims[0], device=device)

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def run(rows: int) -> torch.Tensor:
        given = {
            "positions": zeros(rows, dtype=torch.int64),
            "q_c": zeros(rows, latent),
            "q_rms_norm_w": zeros(latent),
            "q_rms_eps": 1.0,
            "kv_c": zeros(rows, latent),
            "kv_rms_norm_w": zeros(latent),
            "kv_rms_eps": 1.0,
            "k_pe": zeros(rows, rope),
            "k_rope_cos_sin_cache": zeros(1, rope),
            "index_k": zeros(rows, dim),
            "index_k_layer_norm_w": zeros(dim, dtype=torch.float32),
            "index_k_layer_norm_bias": zeros(dim, dtype=torch.float32),
            "index_k_layer_norm_eps": 1.0,
            "index_k_rope_cos_sin_cache": zeros(1, rope),
            "index_rope_interleave": False,
            "topk_indices_buffer": zeros(rows, 1, dtype=torch.int32),
            "slot_mapping": zeros(rows, dtype=torch.int64),
            "mla_kv_cache": main.data.view(2, PAGE_SIZE, -1),
            "indexer_k_cache": keys.data.view(2, PAGE_SIZE, -1),
            "has_indexer": True,
        }
        norm_rope(given, providers)
        stored = providers.helper("kv_cache_read")(main, given["slot_mapping"], dtype=torch.bfloat16)
        codes, _ = providers.helper("kv_cache_read_codes")(keys, given["slot_mapping"])
        return torch.cat([stored.flatten(), codes.flatten().bfloat16()])

    for rows in (FEW_ROWS, MANY_ROWS):
        expect_zeros("norms, RoPE and the caches' new entries", partial(run, rows))
