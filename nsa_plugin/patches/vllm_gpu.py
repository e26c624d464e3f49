"""vLLM's ledger for a GPU: the objects that the plugin changes or builds on, with their signatures by version.

| changed | where | versions |
|---|---|---|
| implementation class | `FlashMLASparseBackend.get_impl_cls` | 0.20 on |
| metadata builder class | `FlashMLASparseBackend.get_builder_cls` | 0.20 on |
| indexer's builder class | `DeepseekV32IndexerBackend.get_builder_cls` | 0.20 on |
| chunks of a prefill's logits | `split_indexer_prefill_chunks` (a method from 0.30 on, overridden) | 0.20 to 0.29 |
| logits of a prefill | `sparse_attn_indexer.fp8_fp4_mqa_logits` | 0.22 on |
| top-k of a prefill's logits | `_custom_ops.top_k_per_row_prefill` | 0.22 on |
| indexer | `sparse_attn_indexer`, the function and the operator's kernel | 0.20 on |
| before a worker loads the model | `Worker.load_model` | 0.20 on |
| end of a worker's start | `Worker.compile_or_warm_up_model` | 0.20 on |
| indexer, called as a function | `models.deepseek_v32.attention.sparse_attn_indexer` | 0.27 on |

The plugin does not change the backend class, its name, its selection or its cache shape.
"""

from __future__ import annotations

from nsa_plugin.patches.ledger import Need
from nsa_plugin.patches.section import Section

_SECTION = Section(
    engine="vllm",
    prefix="vllm.gpu-",
    need=Need.GPU,
    versions=">=0.20",
    names={
        "sparse": "v1.attention.backends.mla.flashmla_sparse",
        "indexer": "v1.attention.backends.mla.indexer",
        "mla": "model_executor.layers.attention.mla_attention",
        "indexer_params": "hidden_states, k_cache_prefix, kv_cache, q_quant, q_scale, k, weights, topk_tokens, "
        "max_model_len, topk_indices_buffer",
    },
)

CHANGES = _SECTION.patches(
    """
    load: v1.worker.gpu_worker:Worker.load_model(self)
        The worker has its GPU and no layer yet: the plugin refuses what does not fit and runs its kernels once.
        replacement: v32.patches:worker_load
        until: vLLM tells a plugin that a worker has its device
    impl: {sparse}:FlashMLASparseBackend.get_impl_cls
        Before 0.26 vLLM's sparse layers cannot attend densely, later they do so only for whole batches. Its kernels pad
        fewer than 64 heads.
        replacement: v32.patches:impl_class
        until: vLLM decides for each request, and has kernels for fewer than 64 heads
    builder: {sparse}:FlashMLASparseBackend.get_builder_cls
        The metadata holds the batch's plans: made once, read by every layer.
        replacement: v32.patches:builder_class
        until: as vllm.gpu-impl
    indexer-builder: {indexer}:DeepseekV32IndexerBackend.get_builder_cls
        vLLM does not bound the logits of a decode batch, [query tokens, max_model_len] float32.
        replacement: v32.patches:indexer_builder_class
        until: vLLM bounds them
    prefill-chunks [>=0.20,<0.30]: {indexer}:split_indexer_prefill_chunks(seq_lens_cpu, query_lens_cpu, workspace_size,
        max_logits_bytes, request_offset)
        vLLM bounds a prefill's logits by a constant, and it selects for requests that attend densely.
        replacement: v32.patches:prefill_chunks
        until: vLLM's bound follows the free memory, and it does not select for dense requests
    prefill-logits [>=0.22]: model_executor.layers.sparse_attn_indexer:fp8_fp4_mqa_logits(q, kv, weights, cu_seqlen_ks,
        cu_seqlen_ke)
        The plugin selects for long prefills without logits in memory.
        replacement: v32.patches:prefill_logits
        until: vLLM selects without them
    prefill-topk [>=0.22]: _custom_ops:top_k_per_row_prefill(logits, cu_seqlen_ks, cu_seqlen_ke, raw_topk_indices,
        num_rows, topk_tokens)
        The plugin's top-k of more than 16384 keys reads the logits once; and it selects here for what
        vllm.gpu-prefill-logits kept.
        replacement: v32.patches:prefill_topk
        until: vLLM's top-k is as fast
    indexer: model_executor.layers.sparse_attn_indexer:sparse_attn_indexer({indexer_params})
        The plugin selects for decode batches in pieces. From 0.28 on vLLM skips the selection of a whole batch when any
        part of it attends densely.
        replacement: v32.patches:indexer_operator
        until: as vllm.gpu-indexer-builder
    warm-up: v1.worker.gpu_worker:Worker.compile_or_warm_up_model(self)
        vLLM has allocated its cache and captured its graphs: the memory still free is what batches can use.
        replacement: v32.patches:worker_warm_up
        until: vLLM tells a plugin that a worker is ready
    indexer-in-model [>=0.27]: models.deepseek_v32.attention:sparse_attn_indexer({indexer_params})
        As vllm.gpu-indexer: this model calls the function directly, inside a separate operator.
        replacement: v32.patches:indexer_function
        until: as vllm.gpu-indexer-builder
    """
)

REQUIREMENTS = _SECTION.patches(
    """
    stock-impl: class {sparse}:FlashMLASparseImpl(num_heads, head_size, scale, kv_cache_dtype)
        Base class of the implementation; its forward_mqa runs vLLM's FlashMLA calls.
    forward-mqa: {sparse}:FlashMLASparseImpl.forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer)
        Attends with absorbed queries; the plugin overrides it and falls back to it.
    stock-builder: {sparse}:FlashMLASparseMetadataBuilder.build(self, common_prefix_len, common_attn_metadata,
        fast_build)
        Base class of the builder; its build makes the metadata of vLLM's calls.
    stock-indexer-builder: {indexer}:DeepseekV32IndexerMetadataBuilder.build(self, common_prefix_len,
        common_attn_metadata, fast_build)
        Base class of the indexer's builder.
    dense-base: v1.attention.backend:MLAAttentionImpl.forward_mha(self, q, kv_c_normed, k_pe, kv_c_and_k_pe_cache,
        attn_metadata, k_scale, output)
        Base class of implementations whose forward_mha vLLM calls for prefill tokens.
    sparse-base [>=0.20,<0.26]: class v1.attention.backend:SparseMLAAttentionImpl
        Base class of implementations for which vLLM calls only forward_mqa.
    layer: {mla}:MLAAttention.forward_impl(self, q, k_c_normed, k_pe, kv_cache, attn_metadata, output)
        Splits a batch between forward_mqa and forward_mha by the metadata's num_decode_tokens.
    profiled-workspace: {mla}:MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size(vllm_config)
        Context tokens of a dense prefill that vLLM's profiling run has reserved memory for.
    prefill-chunks-method [>=0.30]: {indexer}:DeepseekV32IndexerMetadataBuilder._split_indexer_prefill_chunks(
        workspace_size, max_logits_bytes, request_offset)
        Overridden in the indexer's builder, for the reason of vllm.gpu-prefill-chunks.
    prefill-chunk: class {indexer}:DeepseekV32IndexerPrefillChunkMetadata(block_table, token_start, token_end, num_reqs,
        skip_kv_gather)
        With token_shard, the plugin changes whether a chunk gathers its keys.
    join-queries: _custom_ops:concat_mla_q(ql_nope, q_pe, q_out)
        Joins the two parts of absorbed queries in a tensor of the plugin's.
    flash-mla-prefill: {sparse}:flash_mla_sparse_fwd
        With token_shard, each rank calls it for its query tokens with all heads.
    flash-mla-decode: {sparse}:flash_mla_with_kvcache
        As vllm.gpu-flash-mla-prefill, over fp8 pages.
    flash-mla-schedule: {sparse}:get_mla_metadata
        Makes the schedule of vllm.gpu-flash-mla-decode; called without arguments.
    tensor-parallel-group: distributed.parallel_state:get_tp_group
        The group whose ranks reshard heads to tokens with token_shard.
    context-parallel-group [>=0.29]: distributed.parallel_state:get_dcp_group
        The group whose ranks share each request's KV cache with decode context parallelism.
    context-parallel-merge [>=0.29]: class v1.attention.ops.dcp:MLADCPManager(vllm_config, num_heads, is_lse_base_on_e)
        Gathers the queries of these ranks, and merges what each attends by a natural-logarithm lse.
    backend-name: value v1.attention.backends.registry:AttentionBackendEnum.FLASHMLA_SPARSE
        The plugin sets the attention backend to it if the user chose none.
    forward-context: forward_context:get_forward_context
        Holds the batch's metadata for the layers, and the layers for the plugin.
    """
)

GPU = CHANGES + REQUIREMENTS
