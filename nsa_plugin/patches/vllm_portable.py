"""vLLM's ledger for GPUs that FlashMLA and DeepGEMM do not support: SM80, SM86, SM89 and SM120.

These entries come on top of those of `vllm_gpu`, and only there. vLLM's FlashMLA-sparse layers and its indexer then run
with the plugin's kernels alone.
"""

from __future__ import annotations

from nsa_plugin.patches.ledger import Need
from nsa_plugin.patches.section import Section

_SECTION = Section(
    engine="vllm",
    prefix="vllm.portable-",
    need=Need.PORTABLE,
    versions=">=0.28",
    names={
        "sparse": "v1.attention.backends.mla.flashmla_sparse",
        "indexer": "v1.attention.backends.mla.indexer",
        "model": "models.deepseek_v32.attention",
    },
)

PORTABLE = _SECTION.patches(
    """
    capability: {sparse}:FlashMLASparseBackend.supports_compute_capability(capability)
        vLLM has no backend for sparse MLA there. The plugin attends with its kernels in this backend's layers.
        replacement: v32.patches:supports_compute_capability
        until: vLLM has sparse MLA kernels for these GPUs
    indexer-library: {indexer}:has_deep_gemm
        vLLM schedules DeepGEMM's logits if the library is installed, also on GPUs that it has no kernels for.
        replacement: v32.patches:has_deep_gemm
        until: vLLM checks whether DeepGEMM supports the GPU
    norms: {model}:fused_norm_rope(positions, q_c, q_rms_norm_w, q_rms_eps, kv_c, kv_rms_norm_w, kv_rms_eps, k_pe,
        k_rope_cos_sin_cache, index_k, index_k_layer_norm_w, index_k_layer_norm_bias, index_k_layer_norm_eps,
        index_k_rope_cos_sin_cache, topk_indices_buffer, slot_mapping, indexer_k_cache, mla_kv_cache, has_indexer,
        index_rope_interleave, q_c_out)
        Norms, RoPE, and both caches' new entries. Its Triton kernel converts to fp8 by an instruction that SM80 and
        SM86 lack.
        replacement: v32.patches:fused_norm_rope
        until: vLLM's kernel compiles for SM80
    queries: {model}:fused_q(positions, q_pe, q_pe_cos_sin_cache, index_q, index_q_cos_sin_cache, index_weights,
        index_weights_softmax_scale, index_weights_head_scale, has_indexer, index_rope_interleave, quantize_mqa)
        RoPE of the queries, and the indexer's fp8 queries. Its Triton kernel converts to fp8 by an instruction that
        SM80 and SM86 lack.
        replacement: v32.patches:fused_q
        until: vLLM's kernel compiles for SM80
    warm-up [>=0.30]: v1.attention.ops.common:PackSeqTritonKernel.get_warmup_keys(self, dtype, pad_value)
        vLLM compiles a Triton kernel with fp8 arguments before it serves, which fails on SM80 and SM86 and ends the
        start. It is for a selection that the plugin makes.
        replacement: v32.patches:pack_warmup_keys
        until: vLLM compiles it only where its indexer launches it
    chunk: class {indexer}:DeepseekV32IndexerPrefillChunkMetadata(block_table, cu_seqlen_ks, cu_seqlen_ke, cu_seq_lens,
        total_seq_lens, token_start, token_end, skip_kv_gather)
        The plugin gathers and scores the keys of such a chunk of a prefill.
    """
)
