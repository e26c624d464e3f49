"""The part of vLLM's ledger that a GPU needs: what is changed or built on, with its signature by version.

| changed | where | versions |
|---|---|---|
| implementation class | `FlashMLASparseBackend.get_impl_cls` | 0.20 on |
| metadata builder class | `FlashMLASparseBackend.get_builder_cls` | 0.20 on |
| indexer's builder class | `DeepseekV32IndexerBackend.get_builder_cls` | 0.20 on |
| chunks of a prefill's logits | `split_indexer_prefill_chunks` (from 0.30 on a method, overridden) | 0.20 to 0.29 |
| top-k of a prefill's logits | `_custom_ops.top_k_per_row_prefill` | 0.22 on |
| indexer | `sparse_attn_indexer`, the function and the operator's kernel | 0.20 on |
| before a worker loads its model | `Worker.load_model` | 0.20 on |
| end of a worker's start | `Worker.compile_or_warm_up_model` | 0.20 on |
| indexer, called as a function | `models.deepseek_v32.attention.sparse_attn_indexer` | 0.27 on |

The backend class, and with it its name, its selection and its cache shape, is vLLM's own throughout.
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

_SECTION = Section(
    engine=ENGINE,
    prefix="vllm.gpu-",
    need=Need.GPU,
    versions=">=0.20",
    package="vllm",
    replacements="nsa_plugin.backends.vllm",
)

CHANGES = (
    _SECTION.change(
        "load",
        "v32.patches:worker_load",
        "A worker has chosen its GPU here and built no layer: what does not fit is refused, and the kernels run once.",
        "vLLM tells a plugin that a worker has its device",
        "v1.worker.gpu_worker:Worker.load_model(self)",
    ),
    _SECTION.change(
        "impl",
        "v32.patches:impl_class",
        "Before 0.26 vLLM's sparse layers cannot attend densely, later only whole batches do; its kernels pad fewer "
        "than 64 heads.",
        "vLLM decides for each request, and has kernels for few heads",
        f"{_SPARSE}:FlashMLASparseBackend.get_impl_cls",
    ),
    _SECTION.change(
        "builder",
        "v32.patches:builder_class",
        "The batch's plans are its metadata: made once, read by every layer.",
        "as vllm.gpu-impl",
        f"{_SPARSE}:FlashMLASparseBackend.get_builder_cls",
    ),
    _SECTION.change(
        "indexer-builder",
        "v32.patches:indexer_builder_class",
        "The logits of a decode batch, [rows, max_model_len] float32, have no bound in vLLM.",
        "vLLM bounds them",
        f"{_INDEXER}:DeepseekV32IndexerBackend.get_builder_cls",
    ),
    _SECTION.change(
        "prefill-chunks",
        "v32.patches:prefill_chunks",
        "vLLM's bound of a prefill's logits is a constant, and it selects for requests that attend densely.",
        "vLLM's bound follows the free memory, and its selection the attention's decision",
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
        "vLLM's is no slower",
        {
            ">=0.22": "_custom_ops:top_k_per_row_prefill(logits, cu_seqlen_ks, cu_seqlen_ke, raw_topk_indices, "
            "num_rows, "
            "topk_tokens)"
        },
    ),
    _SECTION.change(
        "indexer",
        "v32.patches:indexer_operator",
        "Selects for decode batches in pieces; and from 0.28 on vLLM leaves a whole batch without a selection when "
        "any of it attends densely.",
        "as vllm.gpu-indexer-builder",
        f"model_executor.layers.sparse_attn_indexer:sparse_attn_indexer({_INDEXER_PARAMS})",
    ),
    _SECTION.change(
        "warm-up",
        "v32.patches:worker_warm_up",
        "The memory that batches have is what is free once vLLM has allocated its cache and captured its graphs.",
        "vLLM tells a plugin that a worker is ready",
        "v1.worker.gpu_worker:Worker.compile_or_warm_up_model(self)",
    ),
    _SECTION.change(
        "indexer-in-model",
        "v32.patches:indexer_function",
        "As vllm.gpu-indexer: this model calls the function itself, inside an operator of its own.",
        "as vllm.gpu-indexer-builder",
        {">=0.27": f"models.deepseek_v32.attention:sparse_attn_indexer({_INDEXER_PARAMS})"},
    ),
)

REQUIREMENTS = (
    _SECTION.requirement(
        "stock-impl",
        "The implementation derives from it; its forward_mqa runs vLLM's own FlashMLA calls.",
        f"class {_SPARSE}:FlashMLASparseImpl(num_heads, head_size, scale, kv_cache_dtype)",
    ),
    _SECTION.requirement(
        "forward-mqa",
        "Called with absorbed queries, and calls vLLM's own.",
        f"{_SPARSE}:FlashMLASparseImpl.forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer)",
    ),
    _SECTION.requirement(
        "stock-builder",
        "The builder derives from it; its build makes the metadata of vLLM's own calls.",
        f"{_SPARSE}:FlashMLASparseMetadataBuilder.build(self, common_prefix_len, common_attn_metadata, fast_build)",
    ),
    _SECTION.requirement(
        "stock-indexer-builder",
        "The indexer's builder derives from it.",
        f"{_INDEXER}:DeepseekV32IndexerMetadataBuilder.build(self, common_prefix_len, common_attn_metadata, "
        "fast_build)",
    ),
    _SECTION.requirement(
        "dense-base",
        "What an implementation derives from that vLLM hands prefill rows to forward_mha of.",
        "v1.attention.backend:MLAAttentionImpl.forward_mha(self, q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, "
        "attn_metadata, k_scale, output)",
    ),
    _SECTION.requirement(
        "sparse-base",
        "vLLM sends every row of an implementation that derives from it to forward_mqa.",
        {">=0.20,<0.26": "class v1.attention.backend:SparseMLAAttentionImpl"},
    ),
    _SECTION.requirement(
        "layer",
        "Splits a batch between forward_mqa and forward_mha by the metadata's num_decode_tokens.",
        f"{_MLA}:MLAAttention.forward_impl(self, q, k_c_normed, k_pe, kv_cache, attn_metadata, output)",
    ),
    _SECTION.requirement(
        "profiled-workspace",
        "Says how many tokens' keys and values vLLM's profiling run has set memory aside for.",
        f"{_MLA}:MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size(vllm_config)",
    ),
    _SECTION.requirement(
        "prefill-chunks-method",
        "Overridden in the indexer's builder, as vllm.gpu-prefill-chunks before.",
        {
            ">=0.30": f"{_INDEXER}:DeepseekV32IndexerMetadataBuilder._split_indexer_prefill_chunks(workspace_size, "
            "max_logits_bytes, request_offset)"
        },
    ),
    _SECTION.requirement(
        "prefill-chunk",
        "Where ranks trade heads for tokens, one says anew whether its keys are to be gathered.",
        f"class {_INDEXER}:DeepseekV32IndexerPrefillChunkMetadata(block_table, token_start, token_end, num_reqs, "
        "skip_kv_gather)",
    ),
    _SECTION.requirement(
        "flash-mla-prefill",
        "Called for the rows of a rank with all heads, where ranks trade heads for tokens.",
        f"{_SPARSE}:flash_mla_sparse_fwd",
    ),
    _SECTION.requirement(
        "flash-mla-decode", "As vllm.gpu-flash-mla-prefill, over fp8 pages.", f"{_SPARSE}:flash_mla_with_kvcache"
    ),
    _SECTION.requirement(
        "flash-mla-schedule",
        "What vllm.gpu-flash-mla-decode is scheduled by; made without arguments, by its first call.",
        f"{_SPARSE}:get_mla_metadata",
    ),
    _SECTION.requirement(
        "tensor-parallel-group", "Whose ranks trade heads for tokens.", "distributed.parallel_state:get_tp_group"
    ),
    _SECTION.requirement(
        "backend-name",
        "What the attention backend is set to where the user gave none.",
        "value v1.attention.backends.registry:AttentionBackendEnum.FLASHMLA_SPARSE",
    ),
    _SECTION.requirement(
        "forward-context",
        "Where a layer finds its batch's metadata, and the plugin its layer.",
        "forward_context:get_forward_context",
    ),
)

GPU = CHANGES + REQUIREMENTS
