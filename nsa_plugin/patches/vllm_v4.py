"""vLLM's ledger for DeepSeek-V4 on a GPU: the objects that the plugin changes or builds on, by version.

| changed | 0.20, 0.21 | 0.22 | from 0.23 on |
|---|---|---|---|
| `_forward_prefill`, `_forward_decode` | `deepseek_v4_attention.DeepseekV4MLAAttention` | class methods of \
`nvidia.flashmla.DeepseekV4FlashMLASparseImpl` | `nvidia.flashmla.DeepseekV4FlashMLAAttention` |
| builder of the sliding-window metadata | `DeepseekSparseSWABackend.get_builder_cls` | the same | the same |
| indexer's builder class | `DeepseekV4IndexerBackend.get_builder_cls` (inherited) | the same | the same |

vLLM has separate modules for DeepSeek-V4.1, which the plugin does not change. These entries follow those of
`vllm_gpu`: the indexer's builder derives from the class that they leave in place.
"""

from __future__ import annotations

from nsa_plugin.patches.ledger import Need, Section

ENGINE = "vllm"
_FLASHMLA = "models.deepseek_v4.nvidia.flashmla"
_SWA = "v1.attention.backends.mla.sparse_swa"
_INDEXER = "v1.attention.backends.mla.indexer"
_UNTIL_21, _22, _SINCE_23 = ">=0.20,<0.22", ">=0.22,<0.23", ">=0.23"
_PREFILL = "q, positions, compressed_k_cache, swa_k_cache, output, attn_metadata, swa_metadata"
_DECODE = "q, kv_cache, swa_metadata, attn_metadata, swa_only, output"

_SECTION = Section(engine=ENGINE, prefix="vllm.v4-", need=Need.GPU_V4, versions=">=0.20")

CHANGES = (
    _SECTION.change(
        "prefill",
        "v4.attention:prefill",
        "vLLM copies the context of every prefill to bf16, whatever its size, and pads fewer than 64 heads.",
        "vLLM attends in place where that is faster, and has kernels for fewer than 64 heads",
        {
            _UNTIL_21: "model_executor.layers.deepseek_v4_attention:DeepseekV4MLAAttention._forward_prefill(self, "
            f"{_PREFILL})",
            _22: f"{_FLASHMLA}:DeepseekV4FlashMLASparseImpl._forward_prefill(layer, {_PREFILL})",
            _SINCE_23: f"{_FLASHMLA}:DeepseekV4FlashMLAAttention._forward_prefill(self, {_PREFILL})",
        },
    ),
    _SECTION.change(
        "decode",
        "v4.attention:decode",
        "vLLM pads fewer than 64 heads. The plugin's kernel runs only if decode_backend names a library.",
        "vLLM has kernels for fewer than 64 heads",
        {
            _UNTIL_21: "model_executor.layers.deepseek_v4_attention:DeepseekV4MLAAttention._forward_decode(self, "
            f"{_DECODE})",
            _22: f"{_FLASHMLA}:DeepseekV4FlashMLASparseImpl._forward_decode(layer, {_DECODE})",
            _SINCE_23: f"{_FLASHMLA}:DeepseekV4FlashMLAAttention._forward_decode(self, {_DECODE})",
        },
    ),
    _SECTION.change(
        "swa-builder",
        "v4.patches:swa_builder_class",
        "The sliding-window metadata holds the batch's plans: made once, read by every layer.",
        "as vllm.v4-prefill",
        f"{_SWA}:DeepseekSparseSWABackend.get_builder_cls",
    ),
    _SECTION.change(
        "indexer-builder",
        "v32.patches:indexer_builder_class",
        "vLLM does not bound the logits of a decode batch, [query tokens, max_model_len / 4] float32.",
        "vLLM bounds them",
        f"{_INDEXER}:DeepseekV4IndexerBackend.get_builder_cls",
    ),
)

REQUIREMENTS = (
    _SECTION.requirement(
        "stock-swa-builder",
        "Base class of the builder.",
        f"{_SWA}:DeepseekSparseSWAMetadataBuilder.build(self, common_prefix_len, common_attn_metadata, fast_build)",
    ),
    *(
        _SECTION.requirement(
            f"swa-{field.replace('_', '-')}",
            f"{what}, in a batch's sliding-window metadata.",
            f"value {_SWA}:DeepseekSparseSWAMetadata.{field}",
        )
        for field, what in (
            ("num_decodes", "Number of decode requests"),
            ("num_decode_tokens", "Number of decode tokens"),
            ("num_prefills", "Number of prefill requests"),
            ("token_to_req_indices", "Request of each query token"),
            ("is_valid_token", "Whether each query token is real, not padding"),
            ("decode_swa_indices", "Window slots of the decode tokens"),
        )
    ),
    _SECTION.requirement(
        "swa-prefill-swa-indices",
        "Window slots of the prefill tokens, in a batch's sliding-window metadata; the plugin makes them before 0.24.",
        {">=0.24": f"value {_SWA}:DeepseekSparseSWAMetadata.prefill_swa_indices"},
    ),
    _SECTION.requirement(
        "rows-kernel",
        "Attends over a bf16 copy; the deliberate fault of a test gives it other indices.",
        {
            _UNTIL_21: "value model_executor.layers.deepseek_v4_attention:flash_mla_sparse_fwd",
            ">=0.22": f"value {_FLASHMLA}:flash_mla_sparse_fwd",
        },
    ),
    _SECTION.requirement(
        "decode-kernel",
        "vLLM's wrapper of FlashMLA's decode kernel, for prefills whose plan names it.",
        "value v1.attention.ops.flashmla:flash_mla_with_kvcache",
    ),
    _SECTION.requirement(
        "decode-kernel-schedule",
        "Makes the empty schedule of decode-kernel.",
        "value v1.attention.ops.flashmla:get_mla_metadata",
    ),
)

V4 = CHANGES + REQUIREMENTS
