"""The ledger of vLLM: every vLLM object that the plugin changes or builds on, by version."""

from __future__ import annotations

from functools import partial

from nsa_plugin.patches.ledger import Need
from nsa_plugin.patches.section import Section
from nsa_plugin.patches.vllm_gpu import GPU
from nsa_plugin.patches.vllm_portable import PORTABLE
from nsa_plugin.patches.vllm_v4 import V4

ENGINE = "vllm"
SUPPORTED = ">=0.20,<0.34"
# On a CPU: vLLM raises for MLA on a CPU before 0.28.
SUPPORTED_CPU = ">=0.28,<0.34"
# The portable path: its entries know the model code of DeepSeek-V3.2 in these versions.
SUPPORTED_PORTABLE = ">=0.28,<0.34"
# The portable path for DeepSeek-V4: what its model code needs besides attention was read in these versions.
SUPPORTED_PORTABLE_V4 = ">=0.33,<0.34"
# Decode context parallelism: before 0.29 vLLM's FlashMLA-sparse layers return no lse.
SUPPORTED_DCP = ">=0.29,<0.34"

_section = partial(
    Section,
    engine=ENGINE,
    prefix="vllm.",
    need=Need.CPU,
    versions=">=0.28",
    names={"mla": "model_executor.layers.attention.mla_attention"},
)

# No bounds: the first hooks tell the user that a version is not supported.
BOOTSTRAP = _section(need=Need.BOOTSTRAP, versions=">=0").patches(
    """
    engine-config: engine.arg_utils:EngineArgs.create_engine_config(self, usage_context, headless)
        vLLM has no hook for a plugin's options. The plugin checks its settings in additional_config here, before
        anything starts.
        replacement: startup.activation:wrap_create_engine_config
        until: vLLM lets a general plugin validate its part of additional_config
    worker: v1.worker.worker_base:WorkerBase.__init__(self, vllm_config, local_rank, rank, distributed_init_method)
        The first place in a worker that has the configuration, before the model is built: the plugin applies and
        verifies the other patches here.
        replacement: startup.activation:wrap_worker_init
        until: vLLM calls general plugins with the configuration
    cpu-platform-config [>=0.28]: platforms.cpu:CpuPlatform.check_and_update_config(vllm_config)
        vLLM turns chunked prefill and prefix caching off for MLA on a CPU without AMX, because its kernels there cannot
        continue a prompt. The plugin's kernels can.
        replacement: startup.activation:wrap_check_and_update_config
        until: vLLM lets the attention backend decide
    """
)

CPU = _section(prefix="vllm.cpu-").patches(
    """
    attention-backend: platforms.cpu:CpuPlatform.get_attn_backend_cls(selected_backend, attn_selector_config)
        vLLM raises 'Sparse Attention is not supported on CPU.'; the plugin returns its CPU backend instead.
        replacement: cpu.patches:attention_backend
        until: vLLM selects a registered backend for sparse attention on a CPU
    indexer-cache: model_executor.models.deepseek_v2:DeepseekV32IndexerCache.get_attn_backend(self)
        vLLM's backend for the indexer's key cache requires pages of 64 tokens and builds its metadata with Triton,
        which does not support CPUs.
        replacement: cpu.patches:indexer_cache_backend
        until: vLLM's indexer cache has a CPU backend
    indexer-quantise: model_executor.models.deepseek_v2:per_token_group_quant_fp8(x, group_size)
        vLLM quantises the indexer's queries to fp8 with a Triton or CUDA kernel.
        replacement: cpu.patches:per_token_group_quant_fp8
        until: vLLM has a CPU version of per_token_group_quant_fp8
    indexer-native: model_executor.layers.sparse_attn_indexer:SparseAttnIndexer.forward_native(self)
        vLLM's indexer cannot continue a prompt for any top-k on a CPU. vLLM calls forward_native when its custom
        operators are off.
        replacement: cpu.patches:indexer_forward
        until: vLLM's SparseAttnIndexer runs on a CPU for DeepSeek-V3.2
    indexer-cpu: model_executor.layers.sparse_attn_indexer:SparseAttnIndexer.forward_cpu(self)
        vLLM's indexer cannot continue a prompt for any top-k on a CPU. vLLM calls forward_cpu when its custom operators
        are on.
        replacement: cpu.patches:indexer_forward
        until: vLLM's SparseAttnIndexer runs on a CPU for DeepSeek-V3.2
    attention-order: {mla}:MLAAttention.forward(self, q, kv_c_normed, k_pe)
        Under torch.compile the graph does not show that attention reads the indexer's selection. On a GPU vLLM splits
        the graph there, on a CPU it does not.
        replacement: cpu.patches:attention_forward
        until: vLLM's attention operator takes the selection as an argument
    rotary: model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward_cpu(self, positions, query, key)
        vLLM's CPU rotary kernel returns wrong values for queries of shape [tokens, heads, dim] with more than one head
        on some processors. The native version is correct everywhere.
        replacement: cpu.patches:rotary_forward
        until: the kernel agrees with forward_native for 3-D queries on AVX2 processors
    keep-kv-b-proj [>=0.28,<0.31]: model_executor.layers.utils:dispatch_cpu_unquantized_gemm(layer, remove_weight)
        vLLM's packing for the CPU drops kv_b_proj.weight, from which MLA then builds its absorbed weights.
        replacement: cpu.patches:keep_kv_b_proj
        upstream: kv_b_proj._cpu_skip_gemm_dispatch, in vLLM since 0.31
        until: vLLM 0.30 is no longer supported
    """
)

REQUIREMENTS = _section().patches(
    """
    mla-impl: class v1.attention.backend:MLAAttentionImpl(num_heads, head_size, scale, kv_lora_rank, qk_nope_head_dim,
        v_head_dim, kv_b_proj)
        Base class of the attention implementation; the MLA layer constructs it with these arguments.
    mla-backend: class {mla}:MLACommonBackend
        Base class of the attention backend.
    mla-layer: {mla}:MLAAttention.forward_impl(self, q, k_c_normed, k_pe, kv_cache, attn_metadata, output)
        Splits a batch between forward_mha and forward_mqa.
    metadata-builder: v1.attention.backend:AttentionMetadataBuilder.build(self, common_prefix_len, common_attn_metadata,
        fast_build)
        Base class of the metadata builders, which override build().
    split-batch: v1.attention.backends.utils:split_decodes_and_prefills(common_attn_metadata, decode_threshold)
        Counts the decode tokens, which the runner sorts to the front.
    indexer-backend: class v1.attention.backends.mla.indexer:DeepseekV32IndexerBackend
        Base class of the backend for the indexer's key cache.
    """
)

PATCHES = BOOTSTRAP + CPU + REQUIREMENTS + GPU + PORTABLE + V4
