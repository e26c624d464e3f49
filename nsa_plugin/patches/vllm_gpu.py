"""vLLM's ledger for a GPU: the objects that the plugin changes or builds on, with their signatures by version.

| changed | where | versions |
|---|---|---|
| implementation class | `FlashMLASparseBackend.get_impl_cls` | 0.20 on |
| metadata builder class | `FlashMLASparseBackend.get_builder_cls` | 0.20 on |
| indexer's builder class | `DeepseekV32IndexerBackend.get_builder_cls` | 0.20 on |
| chunks of a prefill's logits | `split_indexer_prefill_chunks` (a method from 0.30 on, overridden) | 0.20 to 0.29 |
| top-k of a prefill's logits | `_custom_ops.top_k_per_row_prefill` | 0.22 on |
| indexer | `sparse_attn_indexer`, the function and the operator's kernel | 0.20 on |
| before a worker loads the model | `Worker.load_model` | 0.20 on |
| end of a worker's start | `Worker.compile_or_warm_up_model` | 0.20 on |
| indexer, called as a function | `models.deepseek_v32.attention.sparse_attn_indexer` | 0.27 on |

The plugin does not change the backend class, its name, its selection or its cache shape.
"""

from __future__ import annotations

from nsa_plugin.patches.ledger import Need, Section

ENGINE = "vllm"
_SPARSE = "v1.attention.backends.mla.flashmla_sparse"
_INDEXER = "v1.attention.backends.mla.indexer"
_MLA = "model_executor.layers.attention.mla_attention"
_INDEXER_PARAMS = (
    "hidden_states, k_cache_prefix, kv_cache, q_quant, q_scale, k, weights, topk_tokens, max_model_len, "
    "topk_indices_buffer"
)

_SECTION = Section(engine=ENGINE, prefix="vllm.gpu-", need=Need.GPU, versions=">=0.20")

CHANGES = (
    _SECTION.change(
        "load",
        "v32.patches:worker_load",
        "The worker has its GPU and no layer yet: the plugin refuses what does not fit and runs its kernels once.",
        "vLLM tells a plugin that a worker has its device",
        "v1.worker.gpu_worker:Worker.load_model(self)",
    ),
    _SECTION.change(
        "impl",
        "v32.patches:impl_class",
        "Before 0.26 vLLM's sparse layers cannot attend densely, later they do so only for whole batches. Its kernels "
        "pad fewer than 64 heads.",
        "vLLM decides for each request, and has kernels for fewer than 64 heads",
        f"{_SPARSE}:FlashMLASparseBackend.get_impl_cls",
    ),
    _SECTION.change(
        "builder",
        "v32.patches:builder_class",
        "The metadata holds the batch's plans: made once, read by every layer.",
        "as vllm.gpu-impl",
        f"{_SPARSE}:FlashMLASparseBackend.get_builder_cls",
    ),
    _SECTION.change(
        "indexer-builder",
        "v32.patches:indexer_builder_class",
        "vLLM does not bound the logits of a decode batch, [query tokens, max_model_len] float32.",
        "vLLM bounds them",
        f"{_INDEXER}:DeepseekV32IndexerBackend.get_builder_cls",
    ),
    _SECTION.change(
        "prefill-chunks",
        "v32.patches:prefill_chunks",
        "vLLM bounds a prefill's logits by a constant, and it selects for requests that attend densely.",
        "vLLM's bound follows the free memory, and it does not select for dense requests",
        {
            ">=0.20,<0.30": f"{_INDEXER}:split_indexer_prefill_chunks(seq_lens_cpu, query_lens_cpu, workspace_size, "
            "max_logits_bytes, "
            "request_offset)"
        },
    ),
    _SECTION.change(
        "prefill-topk",
        "v32.patches:prefill_topk",
        "The plugin's top-k reads the logits once.",
        "vLLM's top-k is as fast",
        {
            ">=0.22": "_custom_ops:top_k_per_row_prefill(logits, cu_seqlen_ks, cu_seqlen_ke, raw_topk_indices, "
            "num_rows, "
            "topk_tokens)"
        },
    ),
    _SECTION.change(
        "indexer",
        "v32.patches:indexer_operator",
        "The plugin selects for decode batches in pieces. From 0.28 on vLLM skips the selection of a whole batch when "
        "any part of it attends densely.",
        "as vllm.gpu-indexer-builder",
        f"model_executor.layers.sparse_attn_indexer:sparse_attn_indexer({_INDEXER_PARAMS})",
    ),
    _SECTION.change(
        "warm-up",
        "v32.patches:worker_warm_up",
        "vLLM has allocated its cache and captured its graphs: the memory still free is what batches can use.",
        "vLLM tells a plugin that a worker is ready",
        "v1.worker.gpu_worker:Worker.compile_or_warm_up_model(self)",
    ),
    _SECTION.change(
        "indexer-in-model",
        "v32.patches:indexer_function",
        "As vllm.gpu-indexer: this model calls the function directly, inside a separate operator.",
        "as vllm.gpu-indexer-builder",
        {">=0.27": f"models.deepseek_v32.attention:sparse_attn_indexer({_INDEXER_PARAMS})"},
    ),
)

REQUIREMENTS = (
    _SECTION.requirement(
        "stock-impl",
        "Base class of the implementation; its forward_mqa runs vLLM's FlashMLA calls.",
        f"class {_SPARSE}:FlashMLASparseImpl(num_heads, head_size, scale, kv_cache_dtype)",
    ),
    _SECTION.requirement(
        "forward-mqa",
        "Attends with absorbed queries; the plugin overrides it and falls back to it.",
        f"{_SPARSE}:FlashMLASparseImpl.forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer)",
    ),
    _SECTION.requirement(
        "stock-builder",
        "Base class of the builder; its build makes the metadata of vLLM's calls.",
        f"{_SPARSE}:FlashMLASparseMetadataBuilder.build(self, common_prefix_len, common_attn_metadata, fast_build)",
    ),
    _SECTION.requirement(
        "stock-indexer-builder",
        "Base class of the indexer's builder.",
        f"{_INDEXER}:DeepseekV32IndexerMetadataBuilder.build(self, common_prefix_len, common_attn_metadata, "
        "fast_build)",
    ),
    _SECTION.requirement(
        "dense-base",
        "Base class of implementations whose forward_mha vLLM calls for prefill tokens.",
        "v1.attention.backend:MLAAttentionImpl.forward_mha(self, q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, "
        "attn_metadata, k_scale, output)",
    ),
    _SECTION.requirement(
        "sparse-base",
        "Base class of implementations for which vLLM calls only forward_mqa.",
        {">=0.20,<0.26": "class v1.attention.backend:SparseMLAAttentionImpl"},
    ),
    _SECTION.requirement(
        "layer",
        "Splits a batch between forward_mqa and forward_mha by the metadata's num_decode_tokens.",
        f"{_MLA}:MLAAttention.forward_impl(self, q, k_c_normed, k_pe, kv_cache, attn_metadata, output)",
    ),
    _SECTION.requirement(
        "profiled-workspace",
        "Number of tokens for whose keys and values vLLM's profiling run has reserved memory.",
        f"{_MLA}:MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size(vllm_config)",
    ),
    _SECTION.requirement(
        "prefill-chunks-method",
        "Overridden in the indexer's builder, for the reason of vllm.gpu-prefill-chunks.",
        {
            ">=0.30": f"{_INDEXER}:DeepseekV32IndexerMetadataBuilder._split_indexer_prefill_chunks(workspace_size, "
            "max_logits_bytes, request_offset)"
        },
    ),
    _SECTION.requirement(
        "prefill-chunk",
        "With token_shard, the plugin changes whether a chunk gathers its keys.",
        f"class {_INDEXER}:DeepseekV32IndexerPrefillChunkMetadata(block_table, token_start, token_end, num_reqs, "
        "skip_kv_gather)",
    ),
    _SECTION.requirement(
        "flash-mla-prefill",
        "With token_shard, each rank calls it for its query tokens with all heads.",
        f"{_SPARSE}:flash_mla_sparse_fwd",
    ),
    _SECTION.requirement(
        "flash-mla-decode", "As vllm.gpu-flash-mla-prefill, over fp8 pages.", f"{_SPARSE}:flash_mla_with_kvcache"
    ),
    _SECTION.requirement(
        "flash-mla-schedule",
        "Makes the schedule of vllm.gpu-flash-mla-decode; called without arguments.",
        f"{_SPARSE}:get_mla_metadata",
    ),
    _SECTION.requirement(
        "tensor-parallel-group",
        "The group whose ranks reshard heads to tokens with token_shard.",
        "distributed.parallel_state:get_tp_group",
    ),
    _SECTION.requirement(
        "backend-name",
        "The plugin sets the attention backend to it if the user chose none.",
        "value v1.attention.backends.registry:AttentionBackendEnum.FLASHMLA_SPARSE",
    ),
    _SECTION.requirement(
        "forward-context",
        "Holds the batch's metadata for the layers, and the layers for the plugin.",
        "forward_context:get_forward_context",
    ),
)

GPU = CHANGES + REQUIREMENTS
