"""SGLang's ledger for GPUs that FlashMLA and DeepGEMM do not support: SM80, SM86 and SM89.

These entries come on top of those for every GPU, and only there. SGLang's `dsa` backend and its indexer then run with
the plugin's kernels alone.
"""

from __future__ import annotations

from nsa_plugin.patches.ledger import Need, Section

ENGINE = "sglang"
_BACKEND = "srt.layers.attention.dsa_backend"
_INDEXER = "srt.layers.attention.dsa.dsa_indexer"
_COUNT = "SGLang asks DeepGEMM for the number of SMs, which may be missing there."
_NO_FP8 = "Its Triton kernel converts to fp8 by an instruction that SM80 and SM86 lack."

_SECTION = Section(engine=ENGINE, prefix="sglang.portable-", need=Need.PORTABLE, versions=">=0.5.23")

PORTABLE = (
    _SECTION.change(
        "schedule",
        "v32.patches:wrap_schedule",
        "DeepGEMM's schedule for the logits of decode steps. The plugin's kernels have none.",
        "SGLang asks whether DeepGEMM supports the GPU",
        f"{_BACKEND}:resolve_paged_mqa_logits_metadata_fn",
    ),
    _SECTION.change(
        "sm-count",
        "v32.patches:wrap_sm_count",
        _COUNT,
        "SGLang reads it from the device",
        f"{_BACKEND}:resolve_num_sms",
    ),
    _SECTION.change(
        "sm-count-indexer",
        "v32.patches:wrap_sm_count",
        _COUNT,
        "SGLang reads it from the device",
        f"{_INDEXER}:resolve_num_sms",
    ),
    _SECTION.change(
        "selection",
        "v32.patches:wrap_topk_paged",
        "The selection of decode, verify and draft steps, whose logits SGLang computes with DeepGEMM.",
        "SGLang has logits for these GPUs",
        f"{_INDEXER}:Indexer._get_topk_paged(self, forward_batch, layer_id, q_fp8, weights, metadata)",
    ),
    _SECTION.change(
        "short-prefills",
        "v32.patches:wrap_skip_logits",
        "SGLang selects every key of a short prefill with a kernel that needs 128 KiB of shared memory; SM86 and SM89 "
        "have 99 KiB. The plugin selects for them as for others.",
        "SGLang's top-k fits 99 KiB of shared memory",
        f"{_INDEXER}:Indexer._should_skip_logits_computation(self, forward_batch)",
    ),
    _SECTION.change(
        "quantisation",
        "v32.patches:wrap_act_quant",
        f"Quantises the indexer's queries. {_NO_FP8}",
        "SGLang's kernel compiles for SM80",
        "kernels.ops.quantization.act_quant_triton:act_quant(x, block_size, scale_fmt)",
    ),
    _SECTION.change(
        "cache",
        "v32.patches:wrap_write",
        f"Writes the fp8 KV cache. {_NO_FP8}",
        "SGLang's kernel compiles for SM80",
        "srt.mem_cache.memory_pool:MLATokenToKVPool._write_mla_kv_buffer(self, dst_buffer, loc, cache_k_nope, "
        "cache_k_rope)",
    ),
)
