"""vLLM's ledger for DeepSeek-V4 on a GPU: the objects that the plugin changes or builds on, by version.

| changed | 0.20, 0.21 | 0.22 | from 0.23 on |
|---|---|---|---|
| `_forward_prefill`, `_forward_decode` | `deepseek_v4_attention.DeepseekV4MLAAttention` | class methods of \
`nvidia.flashmla.DeepseekV4FlashMLASparseImpl` | `nvidia.flashmla.DeepseekV4FlashMLAAttention` |
| builder of the sliding-window metadata | `DeepseekSparseSWABackend.get_builder_cls` | the same | from 0.28 on that \
of the FlashMLA layers, `nvidia.flashmla.DeepseekSparseSWAFlashMLABackend`, which overrides it |
| indexer's builder class | `DeepseekV4IndexerBackend.get_builder_cls` (inherited) | the same | the same |

vLLM has separate modules for DeepSeek-V4.1, which the plugin does not change. These entries follow those of
`vllm_gpu`: the indexer's builder derives from the class that they leave in place.
"""

from __future__ import annotations

from nsa_plugin.patches.ledger import Need
from nsa_plugin.patches.section import Section

_SECTION = Section(
    engine="vllm",
    prefix="vllm.v4-",
    need=Need.GPU_V4,
    versions=">=0.20",
    names={
        "flashmla": "models.deepseek_v4.nvidia.flashmla",
        "swa": "v1.attention.backends.mla.sparse_swa",
        "indexer": "v1.attention.backends.mla.indexer",
        "prefill": "q, positions, compressed_k_cache, swa_k_cache, output, attn_metadata, swa_metadata",
        "decode": "q, kv_cache, swa_metadata, attn_metadata, swa_only, output",
    },
)

CHANGES = _SECTION.patches(
    """
    prefill [>=0.20,<0.22]: model_executor.layers.deepseek_v4_attention:DeepseekV4MLAAttention._forward_prefill(self,
        {prefill})
    prefill [>=0.22,<0.23]: {flashmla}:DeepseekV4FlashMLASparseImpl._forward_prefill(layer, {prefill})
    prefill [>=0.23]: {flashmla}:DeepseekV4FlashMLAAttention._forward_prefill(self, {prefill})
        vLLM copies the context of every prefill to bf16, whatever its size, and pads fewer than 64 heads.
        replacement: v4.attention:prefill
        until: vLLM attends in place where that is faster, and has kernels for fewer than 64 heads
    decode [>=0.20,<0.22]: model_executor.layers.deepseek_v4_attention:DeepseekV4MLAAttention._forward_decode(self,
        {decode})
    decode [>=0.22,<0.23]: {flashmla}:DeepseekV4FlashMLASparseImpl._forward_decode(layer, {decode})
    decode [>=0.23]: {flashmla}:DeepseekV4FlashMLAAttention._forward_decode(self, {decode})
        vLLM pads fewer than 64 heads. The plugin's kernel runs only if decode_backend is set to a library.
        replacement: v4.attention:decode
        until: vLLM has kernels for fewer than 64 heads
    swa-builder [>=0.20,<0.28]: {swa}:DeepseekSparseSWABackend.get_builder_cls
    swa-builder [>=0.28]: {flashmla}:DeepseekSparseSWAFlashMLABackend.get_builder_cls
        The sliding-window metadata holds the batch's plans: made once, read by every layer.
        replacement: v4.patches:swa_builder_class
        until: as vllm.v4-prefill
    indexer-builder: {indexer}:DeepseekV4IndexerBackend.get_builder_cls
        vLLM does not bound the logits of a decode batch, [query tokens, max_model_len / 4] float32.
        replacement: v32.patches:indexer_builder_class
        until: vLLM bounds them
    """
)

REQUIREMENTS = _SECTION.patches(
    """
    stock-swa-builder: {swa}:DeepseekSparseSWAMetadataBuilder.build(self, common_prefix_len, common_attn_metadata,
        fast_build)
        Base class of the builder.
    swa-num-decodes: value {swa}:DeepseekSparseSWAMetadata.num_decodes
        Number of decode requests, in a batch's sliding-window metadata.
    swa-num-decode-tokens: value {swa}:DeepseekSparseSWAMetadata.num_decode_tokens
        Number of decode tokens, in a batch's sliding-window metadata.
    swa-num-prefills: value {swa}:DeepseekSparseSWAMetadata.num_prefills
        Number of prefill requests, in a batch's sliding-window metadata.
    swa-token-to-req-indices: value {swa}:DeepseekSparseSWAMetadata.token_to_req_indices
        Request of each query token, in a batch's sliding-window metadata.
    swa-is-valid-token: value {swa}:DeepseekSparseSWAMetadata.is_valid_token
        Whether each query token is real, not padding, in a batch's sliding-window metadata.
    swa-decode-swa-indices: value {swa}:DeepseekSparseSWAMetadata.decode_swa_indices
        Window slots of the decode tokens, in a batch's sliding-window metadata.
    swa-prefill-swa-indices [>=0.24]: value {swa}:DeepseekSparseSWAMetadata.prefill_swa_indices
        Window slots of the prefill tokens, in a batch's sliding-window metadata; the plugin makes them before 0.24.
    rows-kernel [>=0.20,<0.22]: value model_executor.layers.deepseek_v4_attention:flash_mla_sparse_fwd
    rows-kernel [>=0.22]: value {flashmla}:flash_mla_sparse_fwd
        Attends over a bf16 copy; the deliberate fault of a test gives it other indices.
    decode-kernel: value v1.attention.ops.flashmla:flash_mla_with_kvcache
        vLLM's wrapper of FlashMLA's decode kernel, for prefills whose plan uses it.
    decode-kernel-schedule: value v1.attention.ops.flashmla:get_mla_metadata
        Makes the empty schedule of decode-kernel.
    """
)

V4 = CHANGES + REQUIREMENTS
