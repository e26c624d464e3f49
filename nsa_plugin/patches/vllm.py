"""The ledger of vLLM: every object of it that the plugin changes, or builds on, version by version."""

from __future__ import annotations

from nsa_plugin.patches.ledger import Kind, Need, Patch, Section, Target
from nsa_plugin.patches.vllm_gpu import GPU
from nsa_plugin.patches.vllm_v4 import V4

ENGINE = "vllm"
SUPPORTED = ">=0.20,<0.34"
# Where the plugin serves on a CPU: vLLM raises for MLA on a CPU before 0.28.
SUPPORTED_CPU = ">=0.28,<0.34"

_HOOKS = "nsa_plugin.backends.vllm.startup.activation"
_CPU = "nsa_plugin.backends.vllm.cpu.patches"
# Of the first hooks: a version that is not supported is told so by them.
_ANY = ">=0"
_CPU_VERSIONS = ">=0.28"

BOOTSTRAP = (
    Patch(
        name="vllm.engine-config",
        engine=ENGINE,
        need=Need.BOOTSTRAP,
        targets=(
            Target(
                path="vllm.engine.arg_utils:EngineArgs.create_engine_config",
                params=("self", "usage_context", "headless"),
                versions=_ANY,
            ),
        ),
        replacement=f"{_HOOKS}:wrap_create_engine_config",
        why="vLLM has no hook for a plugin's own options: the settings in additional_config are checked here, "
        "before anything is started.",
        remove_when="vLLM lets a general plugin validate its part of additional_config",
    ),
    Patch(
        name="vllm.worker",
        engine=ENGINE,
        need=Need.BOOTSTRAP,
        targets=(
            Target(
                path="vllm.v1.worker.worker_base:WorkerBase.__init__",
                params=("self", "vllm_config", "local_rank", "rank", "distributed_init_method"),
                versions=_ANY,
            ),
        ),
        replacement=f"{_HOOKS}:wrap_worker_init",
        why="The first place in a worker that knows the configuration and comes before the model is built: "
        "the other patches are applied and verified here.",
        remove_when="vLLM calls general plugins with the configuration",
    ),
    Patch(
        name="vllm.cpu-platform-config",
        engine=ENGINE,
        need=Need.BOOTSTRAP,
        targets=(
            Target(
                path="vllm.platforms.cpu:CpuPlatform.check_and_update_config",
                params=("vllm_config",),
                versions=_CPU_VERSIONS,
            ),
        ),
        replacement=f"{_HOOKS}:wrap_check_and_update_config",
        why="vLLM switches chunked prefill and prefix caching off for MLA on a CPU without AMX, because its own "
        "kernels there cannot continue a prompt; the plugin's can.",
        remove_when="vLLM asks the attention backend instead",
    ),
)

CPU = (
    Patch(
        name="vllm.cpu-attention-backend",
        engine=ENGINE,
        need=Need.CPU,
        targets=(
            Target(
                path="vllm.platforms.cpu:CpuPlatform.get_attn_backend_cls",
                params=("selected_backend", "attn_selector_config"),
                versions=_CPU_VERSIONS,
            ),
        ),
        replacement=f"{_CPU}:attention_backend",
        why="vLLM raises 'Sparse Attention is not supported on CPU.'; the plugin's backend takes its place.",
        remove_when="vLLM selects a registered backend for sparse attention on a CPU",
    ),
    Patch(
        name="vllm.cpu-indexer-cache",
        engine=ENGINE,
        need=Need.CPU,
        targets=(
            Target(
                path="vllm.model_executor.models.deepseek_v2:DeepseekV32IndexerCache.get_attn_backend",
                params=("self",),
                versions=_CPU_VERSIONS,
            ),
        ),
        replacement=f"{_CPU}:indexer_cache_backend",
        why="vLLM's backend of the indexer's key cache wants pages of 64 tokens and builds its metadata with Triton, "
        "which has no CPU target.",
        remove_when="vLLM's indexer cache has a CPU backend",
    ),
    Patch(
        name="vllm.cpu-indexer-quantise",
        engine=ENGINE,
        need=Need.CPU,
        targets=(
            Target(
                path="vllm.model_executor.models.deepseek_v2:per_token_group_quant_fp8",
                params=("x", "group_size"),
                versions=_CPU_VERSIONS,
            ),
        ),
        replacement=f"{_CPU}:per_token_group_quant_fp8",
        why="The fp8 quantisation of the indexer's queries is a Triton or CUDA kernel.",
        remove_when="vLLM has a CPU form of per_token_group_quant_fp8",
    ),
    *(
        Patch(
            name=f"vllm.cpu-indexer-{form}",
            engine=ENGINE,
            need=Need.CPU,
            targets=(
                Target(
                    path=f"vllm.model_executor.layers.sparse_attn_indexer:SparseAttnIndexer.forward_{form}",
                    params=("self",),
                    versions=_CPU_VERSIONS,
                ),
            ),
            replacement=f"{_CPU}:indexer_forward",
            why=f"The indexer has no CPU form that continues a prompt for any top-k; forward_{form} is what vLLM "
            f"calls when its custom operators are {state}.",
            remove_when="vLLM's SparseAttnIndexer runs on a CPU for DeepSeek-V3.2",
        )
        for form, state in (("native", "off"), ("cpu", "on"))
    ),
    Patch(
        name="vllm.cpu-attention-order",
        engine=ENGINE,
        need=Need.CPU,
        targets=(
            Target(
                path="vllm.model_executor.layers.attention.mla_attention:MLAAttention.forward",
                params=("self", "q", "kv_c_normed", "k_pe"),
                versions=_CPU_VERSIONS,
            ),
        ),
        replacement=f"{_CPU}:attention_forward",
        why="Under torch.compile nothing tells the graph that the attention reads what the indexer has selected; on a "
        "GPU vLLM cuts the graph there, on a CPU it does not.",
        remove_when="vLLM's attention operator takes the selection as an argument",
    ),
    Patch(
        name="vllm.cpu-rotary",
        engine=ENGINE,
        need=Need.CPU,
        targets=(
            Target(
                path="vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward_cpu",
                params=("self", "positions", "query", "key"),
                versions=_CPU_VERSIONS,
            ),
        ),
        replacement=f"{_CPU}:rotary_forward",
        why="vLLM's CPU rotary kernel returns wrong values for queries of shape [tokens, heads, dim] with more than "
        "one head on some processors; the native form is right everywhere.",
        remove_when="the kernel agrees with forward_native for 3-D queries on AVX2 processors",
    ),
    Patch(
        name="vllm.cpu-keep-kv-b-proj",
        engine=ENGINE,
        need=Need.CPU,
        targets=(
            Target(
                path="vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
                params=("layer", "remove_weight"),
                versions=">=0.28,<0.31",
            ),
        ),
        replacement=f"{_CPU}:keep_kv_b_proj",
        why="Packing for the CPU drops kv_b_proj.weight, from which MLA then builds its absorbed weights.",
        upstream="kv_b_proj._cpu_skip_gemm_dispatch, in vLLM since 0.31",
        remove_when="vLLM 0.30 is no longer supported",
    ),
)


_requirement = Section(ENGINE, "vllm.", Need.CPU).requirement

REQUIREMENTS = (
    _requirement(
        "mla-impl",
        "The attention implementation derives from it; the MLA layer constructs it with these arguments.",
        Target(
            path="vllm.v1.attention.backend:MLAAttentionImpl",
            kind=Kind.CLASS,
            params=("num_heads", "head_size", "scale", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "kv_b_proj"),
            versions=_CPU_VERSIONS,
        ),
    ),
    _requirement(
        "mla-backend",
        "The attention backend derives from it.",
        Target(
            path="vllm.model_executor.layers.attention.mla_attention:MLACommonBackend",
            kind=Kind.CLASS,
            versions=_CPU_VERSIONS,
        ),
    ),
    _requirement(
        "mla-layer",
        "The layer that calls forward_mha and forward_mqa and splits the batch between them.",
        Target(
            path="vllm.model_executor.layers.attention.mla_attention:MLAAttention.forward_impl",
            params=("self", "q", "k_c_normed", "k_pe", "kv_cache", "attn_metadata", "output"),
            versions=_CPU_VERSIONS,
        ),
    ),
    _requirement(
        "metadata-builder",
        "The metadata builders derive from it and override build().",
        Target(
            path="vllm.v1.attention.backend:AttentionMetadataBuilder.build",
            params=("self", "common_prefix_len", "common_attn_metadata", "fast_build"),
            versions=_CPU_VERSIONS,
        ),
    ),
    _requirement(
        "split-batch",
        "Counts the decode rows that the runner has sorted to the front.",
        Target(
            path="vllm.v1.attention.backends.utils:split_decodes_and_prefills",
            params=("common_attn_metadata", "decode_threshold"),
            versions=_CPU_VERSIONS,
        ),
    ),
    _requirement(
        "indexer-backend",
        "The backend of the indexer's key cache derives from it.",
        Target(
            path="vllm.v1.attention.backends.mla.indexer:DeepseekV32IndexerBackend",
            kind=Kind.CLASS,
            versions=_CPU_VERSIONS,
        ),
    ),
)

PATCHES = BOOTSTRAP + CPU + REQUIREMENTS + GPU + V4
