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

from nsa_plugin.patches.ledger import Kind, Need, Section, Target

ENGINE = "vllm"
_PATCHES = "nsa_plugin.backends.vllm.v4.patches"
_OLD = "vllm.model_executor.layers.deepseek_v4_attention:DeepseekV4MLAAttention"
_IMPL = "vllm.models.deepseek_v4.nvidia.flashmla:DeepseekV4FlashMLASparseImpl"
_LAYER = "vllm.models.deepseek_v4.nvidia.flashmla:DeepseekV4FlashMLAAttention"
_SWA = "vllm.v1.attention.backends.mla.sparse_swa"
_INDEXER = "vllm.v1.attention.backends.mla.indexer"
_ANY = ">=0.20"
_UNTIL_21, _22, _SINCE_23 = ">=0.20,<0.22", ">=0.22,<0.23", ">=0.23"

_PREFILL = ("q", "positions", "compressed_k_cache", "swa_k_cache", "output", "attn_metadata", "swa_metadata")
_DECODE = ("q", "kv_cache", "swa_metadata", "attn_metadata", "swa_only", "output")


def _of_layer(method: str, *params: str) -> tuple[Target, ...]:
    """The targets of a method of vLLM's FlashMLA layer."""
    return (
        Target(path=f"{_OLD}.{method}", params=("self", *params), versions=_UNTIL_21),
        Target(path=f"{_IMPL}.{method}", params=("layer", *params), versions=_22),
        Target(path=f"{_LAYER}.{method}", params=("self", *params), versions=_SINCE_23),
    )


_SECTION = Section(ENGINE, "vllm.v4-", Need.GPU_V4, _PATCHES)
_change, _requirement = _SECTION.change, _SECTION.requirement


CHANGES = (
    _change(
        "prefill",
        "prefill",
        "vLLM brings the context of every prefill to bf16 rows, whatever its size, and pads fewer than 64 heads.",
        "vLLM attends in place where that is quicker, and has kernels for few heads",
        *_of_layer("_forward_prefill", *_PREFILL),
    ),
    _change(
        "decode",
        "decode",
        "vLLM pads fewer than 64 heads; taken only where decode_backend names a library.",
        "vLLM has kernels for few heads",
        *_of_layer("_forward_decode", *_DECODE),
    ),
    _change(
        "swa-builder",
        "swa_builder_class",
        "The batch's plans lie on the window's metadata: made once, read by every layer.",
        "as vllm.v4-prefill",
        Target(path=f"{_SWA}:DeepseekSparseSWABackend.get_builder_cls", versions=_ANY),
    ),
    _change(
        "indexer-builder",
        "indexer_builder_class",
        "The logits of a decode batch, [rows, max_model_len / 4] float32, have no bound in vLLM.",
        "vLLM bounds them",
        Target(path=f"{_INDEXER}:DeepseekV4IndexerBackend.get_builder_cls", versions=_ANY),
    ),
)

REQUIREMENTS = (
    _requirement(
        "stock-swa-builder",
        "The builder derives from it.",
        Target(
            path=f"{_SWA}:DeepseekSparseSWAMetadataBuilder.build",
            params=("self", "common_prefix_len", "common_attn_metadata", "fast_build"),
            versions=_ANY,
        ),
    ),
    *(
        _requirement(
            f"swa-{field.replace('_', '-')}",
            f"{what}, of a batch's window metadata.",
            Target(path=f"{_SWA}:DeepseekSparseSWAMetadata.{field}", kind=Kind.VALUE, versions=versions),
        )
        for field, what, versions in (
            ("num_decodes", "Requests that are steps", _ANY),
            ("num_decode_tokens", "Rows of steps", _ANY),
            ("num_prefills", "Requests that are prefills", _ANY),
            ("token_to_req_indices", "Whose row is whose", _ANY),
            ("is_valid_token", "Which rows only pad", _ANY),
            ("decode_swa_indices", "Slots of the steps' windows", _ANY),
            ("prefill_swa_indices", "Slots of the prefills' windows; made by the plugin before", ">=0.24"),
        )
    ),
    _requirement(
        "rows-kernel",
        "Called over bf16 rows; the control gives it other indices.",
        Target(
            path="vllm.model_executor.layers.deepseek_v4_attention:flash_mla_sparse_fwd",
            kind=Kind.VALUE,
            versions=_UNTIL_21,
        ),
        Target(
            path="vllm.models.deepseek_v4.nvidia.flashmla:flash_mla_sparse_fwd",
            kind=Kind.VALUE,
            versions=">=0.22",
        ),
    ),
    _requirement(
        "decode-kernel",
        "FlashMLA's decode kernel by vLLM's function, for prefills that it carries.",
        Target(
            path="vllm.v1.attention.ops.flashmla:flash_mla_with_kvcache",
            kind=Kind.VALUE,
            versions=_ANY,
        ),
    ),
    _requirement(
        "decode-kernel-schedule",
        "An empty schedule for it.",
        Target(path="vllm.v1.attention.ops.flashmla:get_mla_metadata", kind=Kind.VALUE, versions=_ANY),
    ),
)

V4 = CHANGES + REQUIREMENTS
