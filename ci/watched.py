"""Engine code that picks an attention backend, a kernel or a KV cache format, and that the ledger does not have.

A ledger entry stops the start where its object moved. The plugin starts without these objects, but a change in one can
take its patches out of the path that a batch runs on. `ci.moved` lists such a change, so that a person reads it.
"""

from __future__ import annotations

from nsa_plugin.patches.ledger import Kind, Need, Patch, Target

WATCHED: dict[str, dict[str, str]] = {
    "sglang": {
        "srt.arg_groups.overrides:_dsa_split_backend_resolution": "picks the DSA prefill and decode kernels",
        "srt.arg_groups.overrides:_dsa_kv_cache_dtype_default": "picks the KV cache dtype, and with it the kernels",
        "srt.arg_groups.overrides:_check_dsa_backend_constraints": "refuses pairs of DSA kernels",
        "srt.arg_groups.hisparse_hook:_hisparse_default_backend": "picks the DSA kernels under HiSparse",
        "srt.arg_groups.model_overrides.deepseek_v2:_deepseek_family_overrides": "picks dsa and its page size",
        "srt.arg_groups.model_overrides.deepseek_v2:_dsa_dcp_overrides": "picks the DSA kernels under DCP",
        "srt.models.deepseek_v2:DeepseekV2AttentionMLA.dispatch_attn_forward_method": "picks the backend's handler",
        "srt.models.deepseek_common.attention_backend_handler:handle_attention_dsa": "picks dense or sparse attention",
        "srt.layers.attention.dsa.dsa_indexer:Indexer.forward_cuda": "picks the indexer's paged or ragged selection",
        "srt.layers.attention.dsa.dsa_topk_backend:DSATopKBackend": "picks the top-k kernel",
        "srt.layers.attention.graph_variants:create_attention_graph_variants": "adds dense decode graphs, on ROCm only",
        "srt.arg_groups.cuda_graph_hook:disable_breakable_cudagraph_if_incompatible": "turns prefill graphs off",
        "srt.model_executor.runner.prefill_cuda_graph_runner:PrefillCudaGraphRunner.can_replay_locally": (
            "holds most conditions of can_run_graph"
        ),
        "srt.arg_groups.model_overrides.deepseek_v4:_deepseek_v4_overrides": "picks dsv4 and its page size",
        "srt.arg_groups.overrides:_deepseek_v4_kv_cache_dtype": "picks DeepSeek-V4's KV cache dtype",
        "srt.arg_groups.deepseek_v4_hook:_default_dsv4_attention_backend": "picks DeepSeek-V4's kernels",
        "srt.layers.attention.deepseek_v4_backend:DeepseekV4AttnBackend.can_run_prefill_cuda_graph": (
            "says which DeepSeek-V4 prefills run in a graph"
        ),
    },
    "vllm": {
        "platforms.cuda:_get_backend_priorities": "orders the backends by GPU, heads and KV cache dtype",
        "platforms.cuda:CudaPlatformBase.get_valid_backends": "leaves out the backends that do not fit",
        "platforms.cuda:CudaPlatformBase.get_attn_backend_cls": "picks the backend",
        "v1.attention.selector:get_attn_backend": "says what a backend is chosen by",
        "v1.attention.selector:_cached_get_attn_backend": "asks the platform for the backend",
        "v1.attention.backend:AttentionBackend.validate_configuration": "says whether a backend fits",
        "v1.attention.backends.registry:AttentionBackendEnum": "names the class of each backend",
        "v1.attention.backends.mla.flashmla_sparse:FlashMLASparseBackend.supports_combination": (
            "says where FlashMLA, the patched backend, fits"
        ),
        "v1.attention.backends.mla.flashattn_mla_sparse:FlashAttnMLASparseBackend.supports_combination": (
            "says where FlashAttention, first on SM90, fits"
        ),
        "v1.attention.backends.mla.flashinfer_mla_sparse_sm90:FlashInferMLASparseSM90Backend.supports_combination": (
            "says where FlashInfer fits on SM90"
        ),
        "v1.attention.backends.mla.flashinfer_mla_sparse:FlashInferMLASparseTRTLLMBackend.supports_combination": (
            "says where FlashInfer fits on SM100"
        ),
        "v1.attention.backends.mla.flashattn_mla_sparse:FlashAttnMLASparseFA4Backend.supports_combination": (
            "says where FlashAttention 4, first on SM100 with few heads, fits"
        ),
        "v1.attention.backends.mla.flashinfer_mla_sparse:FlashInferMLASparseSM120Backend.supports_combination": (
            "says where FlashInfer fits on SM120"
        ),
        "model_executor.layers.attention.mla_attention:_canonicalize_sparse_mla_kv_cache_dtype": (
            "picks the KV cache format of a sparse backend"
        ),
        "platforms.interface:Platform.get_mla_prefill_backend_cls": "picks the kernel of dense prefill",
        "v1.attention.backends.mla.prefill.selector:get_mla_prefill_backend": "says what that kernel is chosen by",
        "models.deepseek_v4.nvidia.model:_select_dsv4_attn_cls": "picks DeepSeek-V4's attention class",
    },
}
"""By engine: "module:qualified name", relative to the engine's package, and what the object does."""


class Watched(Patch):
    """A watched object in a ledger entry's form, so that `ci.moved` compares both in the same way."""


def entries(engine: str) -> tuple[Watched, ...]:
    """The watched objects of an engine, as named in WATCHED.

    Raises:
        KeyError: WATCHED does not have the engine.
    """
    return tuple(
        Watched(
            name="watched",
            engine=engine,
            need=Need.ENABLED,
            why=why,
            targets=(Target(path=f"{engine}.{path}", kind=Kind.VALUE),),  # of a value only the existence is checked
        )
        for path, why in WATCHED[engine].items()
    )
