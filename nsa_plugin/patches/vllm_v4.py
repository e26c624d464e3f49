"""The part of vLLM's ledger that DeepSeek-V4 needs besides a GPU's: what is changed or built on, by version.

| changed | 0.20, 0.21 | 0.22 | from 0.23 on |
|---|---|---|---|
| `_forward_prefill`, `_forward_decode` | `deepseek_v4_attention.DeepseekV4MLAAttention` | class methods of \
`nvidia.flashmla.DeepseekV4FlashMLASparseImpl` | `nvidia.flashmla.DeepseekV4FlashMLAAttention` |
| builder of the window's metadata | `DeepseekSparseSWABackend.get_builder_cls` | the same | the same |
| indexer's builder class | `DeepseekV4IndexerBackend.get_builder_cls` (inherited) | the same | the same |

DeepSeek-V4.1 has modules of its own in vLLM, and nothing of them is changed. These entries come after a GPU's: the
indexer's builder is made from the one that stands there.
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

_SECTION = Section(
    engine=ENGINE,
    prefix="vllm.v4-",
    need=Need.GPU_V4,
    versions=">=0.20",
    package="vllm",
    replacements="nsa_plugin.backends.vllm",
)

CHANGES = (
    _SECTION.change(
        "prefill",
        "v4.patches:prefill",
        "vLLM brings the context of every prefill to bf16 rows, whatever its size, and pads fewer than 64 heads.",
        "vLLM attends in place where that is quicker, and has kernels for few heads",
        {
            _UNTIL_21: "model_executor.layers.deepseek_v4_attention:DeepseekV4MLAAttention._forward_prefill(self, "
            f"{_PREFILL})",
            _22: f"{_FLASHMLA}:DeepseekV4FlashMLASparseImpl._forward_prefill(layer, {_PREFILL})",
            _SINCE_23: f"{_FLASHMLA}:DeepseekV4FlashMLAAttention._forward_prefill(self, {_PREFILL})",
        },
    ),
    _SECTION.change(
        "decode",
        "v4.patches:decode",
        "vLLM pads fewer than 64 heads; taken only where decode_backend names a library.",
        "vLLM has kernels for few heads",
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
        "The batch's plans lie on the window's metadata: made once, read by every layer.",
        "as vllm.v4-prefill",
        f"{_SWA}:DeepseekSparseSWABackend.get_builder_cls",
    ),
    _SECTION.change(
        "indexer-builder",
        "v4.patches:indexer_builder_class",
        "The logits of a decode batch, [rows, max_model_len / 4] float32, have no bound in vLLM.",
        "vLLM bounds them",
        f"{_INDEXER}:DeepseekV4IndexerBackend.get_builder_cls",
    ),
)

REQUIREMENTS = (
    _SECTION.requirement(
        "stock-swa-builder",
        "The builder derives from it.",
        f"{_SWA}:DeepseekSparseSWAMetadataBuilder.build(self, common_prefix_len, common_attn_metadata, fast_build)",
    ),
    *(
        _SECTION.requirement(
            f"swa-{field.replace('_', '-')}",
            f"{what}, of a batch's window metadata.",
            f"value {_SWA}:DeepseekSparseSWAMetadata.{field}",
        )
        for field, what in (
            ("num_decodes", "Requests that are steps"),
            ("num_decode_tokens", "Rows of steps"),
            ("num_prefills", "Requests that are prefills"),
            ("token_to_req_indices", "Whose row is whose"),
            ("is_valid_token", "Which rows only pad"),
            ("decode_swa_indices", "Slots of the steps' windows"),
        )
    ),
    _SECTION.requirement(
        "swa-prefill-swa-indices",
        "Slots of the prefills' windows; made by the plugin before, of a batch's window metadata.",
        {">=0.24": f"value {_SWA}:DeepseekSparseSWAMetadata.prefill_swa_indices"},
    ),
    _SECTION.requirement(
        "rows-kernel",
        "Called over bf16 rows; the control gives it other indices.",
        {
            _UNTIL_21: "value model_executor.layers.deepseek_v4_attention:flash_mla_sparse_fwd",
            ">=0.22": f"value {_FLASHMLA}:flash_mla_sparse_fwd",
        },
    ),
    _SECTION.requirement(
        "decode-kernel",
        "FlashMLA's decode kernel by vLLM's function, for prefills that it carries.",
        "value v1.attention.ops.flashmla:flash_mla_with_kvcache",
    ),
    _SECTION.requirement(
        "decode-kernel-schedule", "An empty schedule for it.", "value v1.attention.ops.flashmla:get_mla_metadata"
    ),
)

V4 = CHANGES + REQUIREMENTS
