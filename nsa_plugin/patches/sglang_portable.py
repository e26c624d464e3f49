"""SGLang's ledger for GPUs of the portable path: SM80, SM86, SM89 and SM120.

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
    versions=">=0.5.16",
    names={"backend": "srt.layers.attention.dsa_backend", "indexer": "srt.layers.attention.dsa.dsa_indexer"},
)

PORTABLE = _SECTION.patches(
    """
    deep-gemm [>=0.5.16,<0.5.22]: value {backend}:deep_gemm
        SGLang calls DeepGEMM here for the schedule of decode steps' logits and for the number of SMs. The plugin's
        kernels have no schedule.
        replacement: v32.patches:wrap_deep_gemm
        until: nsa-plugin does not support SGLang before 0.5.22
    deep-gemm-indexer [>=0.5.16,<0.5.22]: value {indexer}:deep_gemm
        As deep-gemm. SGLang imports DeepGEMM here only if it can.
        replacement: v32.patches:wrap_deep_gemm
        until: nsa-plugin does not support SGLang before 0.5.22
    topk-plan [>=0.5.16,<0.5.21]: {backend}:DeepseekSparseAttnBackend._build_topk_v2_plan(self, seqlens_expanded)
        The plan of SGLang's top-k kernel, which the plugin's selection does not use. Before 0.5.21 the kernel's source
        does not compile for GPUs before SM90: it has thread-block clusters.
        replacement: v32.patches:wrap_topk_plan
        until: nsa-plugin does not support SGLang before 0.5.21
    schedule [>=0.5.22]: {backend}:resolve_paged_mqa_logits_metadata_fn
        DeepGEMM's schedule for the logits of decode steps. The plugin's kernels have none.
        replacement: v32.patches:wrap_schedule
        until: SGLang checks whether DeepGEMM supports the GPU
    sm-count [>=0.5.22]: {backend}:resolve_num_sms
        SGLang gets the number of SMs from DeepGEMM, which may be missing there.
        replacement: v32.patches:wrap_sm_count
        until: SGLang reads it from the device
    sm-count-indexer [>=0.5.22]: {indexer}:resolve_num_sms
        SGLang gets the number of SMs from DeepGEMM, which may be missing there.
        replacement: v32.patches:wrap_sm_count
        until: SGLang reads it from the device
    selection: {indexer}:Indexer._get_topk_paged(self, forward_batch, layer_id, q_fp8, weights, metadata)
        The selection of decode, verify and draft steps, whose logits SGLang computes with DeepGEMM.
        replacement: v32.patches:wrap_topk_paged
        until: SGLang has logits for these GPUs
    short-prefills: {indexer}:Indexer._should_skip_logits_computation(self, forward_batch)
        SGLang selects every key of a short prefill with a kernel that needs 128 KiB of shared memory; SM86 and SM89
        have 99 KiB. The plugin selects for them as for others, or attends densely without a selection.
        replacement: v32.patches:wrap_skip_logits
        until: SGLang's top-k fits 99 KiB of shared memory
    quantisation [>=0.5.16,<0.5.23]: kernels.ops.attention.dsa.triton_kernel:act_quant(x, block_size, scale_fmt)
    quantisation [>=0.5.23]: kernels.ops.quantization.act_quant_triton:act_quant(x, block_size, scale_fmt)
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
