"""SGLang's ledger for GPUs that FlashMLA and DeepGEMM do not support: SM80, SM86 and SM89.

These entries come on top of those for every GPU, and only there. SGLang's `dsa` backend and its indexer then run with
the plugin's kernels alone.
"""

from __future__ import annotations

from nsa_plugin.patches.ledger import Need
from nsa_plugin.patches.section import Section

_SECTION = Section(
    engine="sglang",
    prefix="sglang.portable-",
    need=Need.PORTABLE,
    versions=">=0.5.23",
    names={"backend": "srt.layers.attention.dsa_backend", "indexer": "srt.layers.attention.dsa.dsa_indexer"},
)

PORTABLE = _SECTION.patches(
    """
    schedule: {backend}:resolve_paged_mqa_logits_metadata_fn
        DeepGEMM's schedule for the logits of decode steps. The plugin's kernels have none.
        replacement: v32.patches:wrap_schedule
        until: SGLang checks whether DeepGEMM supports the GPU
    sm-count: {backend}:resolve_num_sms
        SGLang gets the number of SMs from DeepGEMM, which may be missing there.
        replacement: v32.patches:wrap_sm_count
        until: SGLang reads it from the device
    sm-count-indexer: {indexer}:resolve_num_sms
        SGLang gets the number of SMs from DeepGEMM, which may be missing there.
        replacement: v32.patches:wrap_sm_count
        until: SGLang reads it from the device
    selection: {indexer}:Indexer._get_topk_paged(self, forward_batch, layer_id, q_fp8, weights, metadata)
        The selection of decode, verify and draft steps, whose logits SGLang computes with DeepGEMM.
        replacement: v32.patches:wrap_topk_paged
        until: SGLang has logits for these GPUs
    short-prefills: {indexer}:Indexer._should_skip_logits_computation(self, forward_batch)
        SGLang selects every key of a short prefill with a kernel that needs 128 KiB of shared memory; SM86 and SM89
        have 99 KiB. The plugin selects for them as for others.
        replacement: v32.patches:wrap_skip_logits
        until: SGLang's top-k fits 99 KiB of shared memory
    quantisation: kernels.ops.quantization.act_quant_triton:act_quant(x, block_size, scale_fmt)
        Quantises the indexer's queries. Its Triton kernel converts to fp8 by an instruction that SM80 and SM86 lack.
        replacement: v32.patches:wrap_act_quant
        until: SGLang's kernel compiles for SM80
    cache: srt.mem_cache.memory_pool:MLATokenToKVPool._write_mla_kv_buffer(self, dst_buffer, loc, cache_k_nope,
        cache_k_rope)
        Writes the fp8 KV cache. Its Triton kernel converts to fp8 by an instruction that SM80 and SM86 lack.
        replacement: v32.patches:wrap_write
        until: SGLang's kernel compiles for SM80
    """
)
