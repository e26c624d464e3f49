"""The ledger of vLLM: every vLLM object that the plugin changes or builds on, by version."""

from __future__ import annotations

from nsa_plugin.patches.ledger import Need, Section
from nsa_plugin.patches.vllm_gpu import GPU
from nsa_plugin.patches.vllm_portable import PORTABLE
from nsa_plugin.patches.vllm_v4 import V4

ENGINE = "vllm"
SUPPORTED = ">=0.20,<0.34"
# On a CPU: vLLM raises for MLA on a CPU before 0.28.
SUPPORTED_CPU = ">=0.28,<0.34"
# The portable path: its entries know the model code of DeepSeek-V3.2 in these versions.
SUPPORTED_PORTABLE = ">=0.28,<0.34"

# No bounds: the first hooks tell the user that a version is not supported.
_ANY = ">=0"
_CPU_VERSIONS = ">=0.28"
_MLA = "model_executor.layers.attention.mla_attention"

_BOOTSTRAP = Section(engine=ENGINE, prefix="vllm.", need=Need.BOOTSTRAP, versions=_ANY)
_CPU = Section(engine=ENGINE, prefix="vllm.cpu-", need=Need.CPU, versions=_CPU_VERSIONS)
_BASES = Section(engine=ENGINE, prefix="vllm.", need=Need.CPU, versions=_CPU_VERSIONS)

BOOTSTRAP = (
    _BOOTSTRAP.change(
        "engine-config",
        "startup.activation:wrap_create_engine_config",
        "vLLM has no hook for a plugin's options. The plugin checks its settings in additional_config here, before "
        "anything starts.",
        "vLLM lets a general plugin validate its part of additional_config",
        "engine.arg_utils:EngineArgs.create_engine_config(self, usage_context, headless)",
    ),
    _BOOTSTRAP.change(
        "worker",
        "startup.activation:wrap_worker_init",
        "The first place in a worker that has the configuration, before the model is built: the plugin applies and "
        "verifies the other patches here.",
        "vLLM calls general plugins with the configuration",
        "v1.worker.worker_base:WorkerBase.__init__(self, vllm_config, local_rank, rank, distributed_init_method)",
    ),
    _BOOTSTRAP.change(
        "cpu-platform-config",
        "startup.activation:wrap_check_and_update_config",
        "vLLM turns chunked prefill and prefix caching off for MLA on a CPU without AMX, because its kernels there "
        "cannot continue a prompt. The plugin's kernels can.",
        "vLLM asks the attention backend instead",
        {_CPU_VERSIONS: "platforms.cpu:CpuPlatform.check_and_update_config(vllm_config)"},
    ),
)

CPU = (
    _CPU.change(
        "attention-backend",
        "cpu.patches:attention_backend",
        "vLLM raises 'Sparse Attention is not supported on CPU.'; the plugin returns its CPU backend instead.",
        "vLLM selects a registered backend for sparse attention on a CPU",
        "platforms.cpu:CpuPlatform.get_attn_backend_cls(selected_backend, attn_selector_config)",
    ),
    _CPU.change(
        "indexer-cache",
        "cpu.patches:indexer_cache_backend",
        "vLLM's backend for the indexer's key cache requires pages of 64 tokens and builds its metadata with Triton, "
        "which does not support CPUs.",
        "vLLM's indexer cache has a CPU backend",
        "model_executor.models.deepseek_v2:DeepseekV32IndexerCache.get_attn_backend(self)",
    ),
    _CPU.change(
        "indexer-quantise",
        "cpu.patches:per_token_group_quant_fp8",
        "vLLM quantises the indexer's queries to fp8 with a Triton or CUDA kernel.",
        "vLLM has a CPU version of per_token_group_quant_fp8",
        "model_executor.models.deepseek_v2:per_token_group_quant_fp8(x, group_size)",
    ),
    _CPU.change(
        "indexer-native",
        "cpu.patches:indexer_forward",
        "vLLM's indexer cannot continue a prompt for any top-k on a CPU. vLLM calls forward_native when its custom "
        "operators are off.",
        "vLLM's SparseAttnIndexer runs on a CPU for DeepSeek-V3.2",
        "model_executor.layers.sparse_attn_indexer:SparseAttnIndexer.forward_native(self)",
    ),
    _CPU.change(
        "indexer-cpu",
        "cpu.patches:indexer_forward",
        "vLLM's indexer cannot continue a prompt for any top-k on a CPU. vLLM calls forward_cpu when its custom "
        "operators are on.",
        "vLLM's SparseAttnIndexer runs on a CPU for DeepSeek-V3.2",
        "model_executor.layers.sparse_attn_indexer:SparseAttnIndexer.forward_cpu(self)",
    ),
    _CPU.change(
        "attention-order",
        "cpu.patches:attention_forward",
        "Under torch.compile the graph does not show that attention reads the indexer's selection. On a GPU vLLM "
        "splits the graph there, on a CPU it does not.",
        "vLLM's attention operator takes the selection as an argument",
        f"{_MLA}:MLAAttention.forward(self, q, kv_c_normed, k_pe)",
    ),
    _CPU.change(
        "rotary",
        "cpu.patches:rotary_forward",
        "vLLM's CPU rotary kernel returns wrong values for queries of shape [tokens, heads, dim] with more than one "
        "head on some processors. The native version is correct everywhere.",
        "the kernel agrees with forward_native for 3-D queries on AVX2 processors",
        "model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward_cpu(self, positions, query, key)",
    ),
    _CPU.change(
        "keep-kv-b-proj",
        "cpu.patches:keep_kv_b_proj",
        "vLLM's packing for the CPU drops kv_b_proj.weight, from which MLA then builds its absorbed weights.",
        "vLLM 0.30 is no longer supported",
        {">=0.28,<0.31": "model_executor.layers.utils:dispatch_cpu_unquantized_gemm(layer, remove_weight)"},
        upstream="kv_b_proj._cpu_skip_gemm_dispatch, in vLLM since 0.31",
    ),
)

REQUIREMENTS = (
    _BASES.requirement(
        "mla-impl",
        "Base class of the attention implementation; the MLA layer constructs it with these arguments.",
        "class v1.attention.backend:MLAAttentionImpl(num_heads, head_size, scale, kv_lora_rank, qk_nope_head_dim, "
        "v_head_dim, kv_b_proj)",
    ),
    _BASES.requirement("mla-backend", "Base class of the attention backend.", f"class {_MLA}:MLACommonBackend"),
    _BASES.requirement(
        "mla-layer",
        "Splits a batch between forward_mha and forward_mqa.",
        f"{_MLA}:MLAAttention.forward_impl(self, q, k_c_normed, k_pe, kv_cache, attn_metadata, output)",
    ),
    _BASES.requirement(
        "metadata-builder",
        "Base class of the metadata builders, which override build().",
        "v1.attention.backend:AttentionMetadataBuilder.build(self, common_prefix_len, common_attn_metadata, "
        "fast_build)",
    ),
    _BASES.requirement(
        "split-batch",
        "Counts the decode tokens, which the runner sorts to the front.",
        "v1.attention.backends.utils:split_decodes_and_prefills(common_attn_metadata, decode_threshold)",
    ),
    _BASES.requirement(
        "indexer-backend",
        "Base class of the backend for the indexer's key cache.",
        "class v1.attention.backends.mla.indexer:DeepseekV32IndexerBackend",
    ),
)

PATCHES = BOOTSTRAP + CPU + REQUIREMENTS + GPU + PORTABLE + V4
