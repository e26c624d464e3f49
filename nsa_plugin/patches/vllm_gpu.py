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

from nsa_plugin.patches.ledger import Kind, Need, Section, Target

ENGINE = "vllm"
_PATCHES = "nsa_plugin.backends.vllm.v32.patches"
_SPARSE = "vllm.v1.attention.backends.mla.flashmla_sparse"
_INDEXER = "vllm.v1.attention.backends.mla.indexer"
_OPERATOR = "vllm.model_executor.layers.sparse_attn_indexer"
_MLA = "vllm.model_executor.layers.attention.mla_attention"
_BASE = "vllm.v1.attention.backend"
_ANY = ">=0.20"
_BEFORE_DENSE = ">=0.20,<0.26"
_SINCE_DENSE = ">=0.26"

_INDEXER_PARAMS = (
    "hidden_states",
    "k_cache_prefix",
    "kv_cache",
    "q_quant",
    "q_scale",
    "k",
    "weights",
    "topk_tokens",
    "max_model_len",
    "topk_indices_buffer",
)
_IMPL_PARAMS = ("num_heads", "head_size", "scale", "kv_cache_dtype")
_FORWARD_MHA = ("q", "kv_c_normed", "k_pe", "kv_c_and_k_pe_cache", "attn_metadata", "k_scale", "output")


_SECTION = Section(ENGINE, "vllm.gpu-", Need.GPU, _PATCHES)
_change, _requirement = _SECTION.change, _SECTION.requirement


CHANGES = (
    _change(
        "load",
        "worker_load",
        "A worker has chosen its GPU here and built no layer: what does not fit is refused, and the kernels run once.",
        "vLLM tells a plugin that a worker has its device",
        Target(path="vllm.v1.worker.gpu_worker:Worker.load_model", params=("self",), versions=_ANY),
    ),
    _change(
        "impl",
        "impl_class",
        "Before 0.26 vLLM's sparse layers cannot attend densely, later only whole batches do; its kernels pad fewer "
        "than 64 heads.",
        "vLLM decides for each request, and has kernels for few heads",
        Target(path=f"{_SPARSE}:FlashMLASparseBackend.get_impl_cls", versions=_ANY),
    ),
    _change(
        "builder",
        "builder_class",
        "The batch's plans are its metadata: made once, read by every layer.",
        "as vllm.gpu-impl",
        Target(path=f"{_SPARSE}:FlashMLASparseBackend.get_builder_cls", versions=_ANY),
    ),
    _change(
        "indexer-builder",
        "indexer_builder_class",
        "The logits of a decode batch, [rows, max_model_len] float32, have no bound in vLLM.",
        "vLLM bounds them",
        Target(path=f"{_INDEXER}:DeepseekV32IndexerBackend.get_builder_cls", versions=_ANY),
    ),
    _change(
        "prefill-chunks",
        "prefill_chunks",
        "vLLM's bound of a prefill's logits is a constant, and it selects for requests that attend densely.",
        "vLLM's bound follows the free memory, and its selection the attention's decision",
        Target(
            path=f"{_INDEXER}:split_indexer_prefill_chunks",
            params=("seq_lens_cpu", "query_lens_cpu", "workspace_size", "max_logits_bytes", "request_offset"),
            versions=">=0.20,<0.30",
        ),
    ),
    _change(
        "prefill-topk",
        "prefill_topk",
        "The plugin's top-k reads the logits once.",
        "vLLM's is no slower",
        Target(
            path="vllm._custom_ops:top_k_per_row_prefill",
            params=("logits", "cu_seqlen_ks", "cu_seqlen_ke", "raw_topk_indices", "num_rows", "topk_tokens"),
            versions=">=0.22",
        ),
    ),
    _change(
        "indexer",
        "indexer_operator",
        "Selects for decode batches in pieces; and from 0.28 on vLLM leaves a whole batch without a selection when any "
        "of it attends densely.",
        "as vllm.gpu-indexer-builder",
        Target(path=f"{_OPERATOR}:sparse_attn_indexer", params=_INDEXER_PARAMS, versions=_ANY),
    ),
    _change(
        "warm-up",
        "worker_warm_up",
        "The memory that batches have is what is free once vLLM has allocated its cache and captured its graphs.",
        "vLLM tells a plugin that a worker is ready",
        Target(path="vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model", params=("self",), versions=_ANY),
    ),
    _change(
        "indexer-in-model",
        "indexer_function",
        "As vllm.gpu-indexer: this model calls the function itself, inside an operator of its own.",
        "as vllm.gpu-indexer-builder",
        Target(
            path="vllm.models.deepseek_v32.attention:sparse_attn_indexer", params=_INDEXER_PARAMS, versions=">=0.27"
        ),
    ),
)

REQUIREMENTS = (
    _requirement(
        "stock-impl",
        "The implementation derives from it; its forward_mqa runs vLLM's own FlashMLA calls.",
        Target(path=f"{_SPARSE}:FlashMLASparseImpl", kind=Kind.CLASS, params=_IMPL_PARAMS, versions=_ANY),
    ),
    _requirement(
        "forward-mqa",
        "Called with absorbed queries, and calls vLLM's own.",
        Target(
            path=f"{_SPARSE}:FlashMLASparseImpl.forward_mqa",
            params=("self", "q", "kv_c_and_k_pe_cache", "attn_metadata", "layer"),
            versions=_ANY,
        ),
    ),
    _requirement(
        "stock-builder",
        "The builder derives from it; its build makes the metadata of vLLM's own calls.",
        Target(
            path=f"{_SPARSE}:FlashMLASparseMetadataBuilder.build",
            params=("self", "common_prefix_len", "common_attn_metadata", "fast_build"),
            versions=_ANY,
        ),
    ),
    _requirement(
        "stock-indexer-builder",
        "The indexer's builder derives from it.",
        Target(
            path=f"{_INDEXER}:DeepseekV32IndexerMetadataBuilder.build",
            params=("self", "common_prefix_len", "common_attn_metadata", "fast_build"),
            versions=_ANY,
        ),
    ),
    _requirement(
        "dense-base",
        "What an implementation derives from that vLLM hands prefill rows to forward_mha of.",
        Target(path=f"{_BASE}:MLAAttentionImpl.forward_mha", params=("self", *_FORWARD_MHA), versions=_ANY),
    ),
    _requirement(
        "sparse-base",
        "vLLM sends every row of an implementation that derives from it to forward_mqa.",
        Target(path=f"{_BASE}:SparseMLAAttentionImpl", kind=Kind.CLASS, versions=_BEFORE_DENSE),
    ),
    _requirement(
        "layer",
        "Splits a batch between forward_mqa and forward_mha by the metadata's num_decode_tokens.",
        Target(
            path=f"{_MLA}:MLAAttention.forward_impl",
            params=("self", "q", "k_c_normed", "k_pe", "kv_cache", "attn_metadata", "output"),
            versions=_ANY,
        ),
    ),
    _requirement(
        "profiled-workspace",
        "Says how many tokens' keys and values vLLM's profiling run has set memory aside for.",
        Target(
            path=f"{_MLA}:MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size",
            params=("vllm_config",),
            versions=_ANY,
        ),
    ),
    _requirement(
        "prefill-chunks-method",
        "Overridden in the indexer's builder, as vllm.gpu-prefill-chunks before.",
        Target(
            path=f"{_INDEXER}:DeepseekV32IndexerMetadataBuilder._split_indexer_prefill_chunks",
            params=("workspace_size", "max_logits_bytes", "request_offset"),
            versions=">=0.30",
        ),
    ),
    _requirement(
        "prefill-chunk",
        "Where ranks trade heads for tokens, one says anew whether its keys are to be gathered.",
        Target(
            path=f"{_INDEXER}:DeepseekV32IndexerPrefillChunkMetadata",
            kind=Kind.CLASS,
            params=("block_table", "token_start", "token_end", "num_reqs", "skip_kv_gather"),
            versions=_ANY,
        ),
    ),
    _requirement(
        "flash-mla-prefill",
        "Called for the rows of a rank with all heads, where ranks trade heads for tokens.",
        Target(path=f"{_SPARSE}:flash_mla_sparse_fwd", versions=_ANY),
    ),
    _requirement(
        "flash-mla-decode",
        "As vllm.gpu-flash-mla-prefill, over fp8 pages.",
        Target(path=f"{_SPARSE}:flash_mla_with_kvcache", versions=_ANY),
    ),
    _requirement(
        "flash-mla-schedule",
        "What vllm.gpu-flash-mla-decode is scheduled by; made without arguments, by its first call.",
        Target(path=f"{_SPARSE}:get_mla_metadata", versions=_ANY),
    ),
    _requirement(
        "tensor-parallel-group",
        "Whose ranks trade heads for tokens.",
        Target(path="vllm.distributed.parallel_state:get_tp_group", versions=_ANY),
    ),
    _requirement(
        "backend-name",
        "What the attention backend is set to where the user gave none.",
        Target(
            path="vllm.v1.attention.backends.registry:AttentionBackendEnum.FLASHMLA_SPARSE",
            kind=Kind.VALUE,
            versions=_ANY,
        ),
    ),
    _requirement(
        "forward-context",
        "Where a layer finds its batch's metadata, and the plugin its layer.",
        Target(path="vllm.forward_context:get_forward_context", versions=_ANY),
    ),
)

GPU = CHANGES + REQUIREMENTS
