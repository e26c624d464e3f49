"""The ledger of SGLang: every SGLang object that the plugin changes or builds on, by version.

SGLang renamed NSA to DSA in 0.5.13. The old modules that remain (`nsa_backend`, until 0.5.20) raise on import, so no
target goes through them.

DeepSeek-V4 (0.5.12 on) has a separate backend, `dsv4`. SGLang imports its module only to build one, and the plugin does
the same through the registry entry. Its entries have the need `GPU_V4`.
"""

from __future__ import annotations

from functools import partial

from nsa_plugin.patches.ledger import Need
from nsa_plugin.patches.section import Section
from nsa_plugin.patches.sglang_portable import PORTABLE

ENGINE = "sglang"
SUPPORTED = ">=0.5.11,<0.5.24"
SUPPORTED_PORTABLE = ">=0.5.16,<0.5.24"
# Of the portable path on SM120: only there SGLang's code for that GPU was read.
SUPPORTED_SM120 = ">=0.5.23,<0.5.24"

# No upper bound: the first hooks tell the user that a newer SGLang is not supported.
_section = partial(
    Section,
    engine=ENGINE,
    package="sglang.srt",
    prefix="sglang.",
    versions=">=0.5.11",
    names={
        "runner_utils": "model_executor.runner_backend_utils",
        "mla": "models.deepseek_common.attention_forward_methods.forward_mla:DeepseekMLAForwardMixin",
    },
    renamed={
        ">=0.5.11,<0.5.13": {
            "x": "nsa",
            "owner": "NativeSparseAttn",
            "backend": "layers.attention.nsa_backend:NativeSparseAttnBackend",
        },
        ">=0.5.13": {
            "x": "dsa",
            "owner": "DeepseekSparseAttn",
            "backend": "layers.attention.dsa_backend:DeepseekSparseAttnBackend",
        },
    },
)
_BOOTSTRAP, _ENABLED, _GPU = _section(need=Need.BOOTSTRAP), _section(need=Need.ENABLED), _section(need=Need.GPU)
_V4 = _section(
    prefix="sglang.v4-",
    need=Need.GPU_V4,
    versions=">=0.5.12",
    names={
        "backend": "layers.attention.deepseek_v4_backend:DeepseekV4AttnBackend",
        "indexer": "layers.attention.dsv4.indexer:C4IndexerBackendMixin",
        "pool": "mem_cache.deepseek_v4_memory_pool:DeepSeekV4TokenToKVPool",
    },
    renamed={},
)

BOOTSTRAP = _BOOTSTRAP.patches(
    """
    flags: server_args:ServerArgs.add_cli_args(parser)
        SGLang has no hook through which a plugin can add flags.
        replacement: startup.hooks:wrap_add_cli_args
        until: SGLang lets a plugin declare flags
    flag-values: server_args:ServerArgs.from_cli_args(args)
        SGLang drops flags that are not fields of ServerArgs here; the plugin keeps its flags for the schedulers.
        replacement: startup.hooks:wrap_from_cli_args
        until: SGLang lets a plugin declare flags
    gate [>=0.5.11,<0.5.19]: server_args:ServerArgs.__post_init__(self)
    gate [>=0.5.19]: server_args:ServerArgs.resolve_once(self)
        SGLang only logs the errors that a plugin raises while it is loaded. Every way to start an engine passes here,
        where errors are raised and no process has started: the plugin checks its settings and ledger here.
        replacement: startup.hooks:wrap_resolve
        until: SGLang lets a plugin refuse to start
    """
)

SCHEDULER = _BOOTSTRAP.patches(
    """
    scheduler: managers.scheduler:Scheduler.__init__(self, server_args, port_args)
        The first place in a scheduler process where SGLang does not swallow a plugin's errors, before the model
        is built: the plugin applies and verifies the other patches here.
        replacement: startup.hooks:wrap_scheduler_init
        until: SGLang lets a plugin refuse to start
    """
)

ENABLED = _ENABLED.patches(
    """
    backend: class layers.attention.{x}_backend:{owner}Backend(self, model_runner)
        The attention backend of DeepSeek sparse attention. It keeps its registered name, because SGLang selects the
        model's MLA path and its speculative workers by that name. Every user of the class imports it from here.
        replacement: startup.backend:make
        upstream: sglang #12788, #13544, #13646
        until: SGLang makes these decisions itself
    """
)

GPU = _GPU.patches(
    """
    indexer-ragged: layers.attention.{x}.{x}_indexer:Indexer._get_topk_ragged(self, enable_dual_stream, forward_batch,
        layer_id, q_fp8, weights, metadata)
        Top-k selection of a prefill. SGLang scores every query token against the keys of all requests in the batch; the
        plugin scores it against the keys of its request, in pieces of the size in the plan.
        replacement: v32.indexer:wrap_topk_ragged
        upstream: sglang #13646, #39095
        until: SGLang's logits are no wider than one request and fit the free memory
    prefill-graph [>=0.5.17]: model_executor.runner.prefill_cuda_graph_runner:PrefillCudaGraphRunner.can_run_graph(self,
        forward_batch)
        A prefill replayed from a graph is always sparse and keeps heads local. If the user sets mha_max_kv,
        prefills that the plan makes dense run eagerly; with split_prefill on, those that it splits; with token_shard
        on, those that it reshards. Before 0.5.17 SGLang does not capture prefills of these models.
        replacement: v32.patches:wrap_can_run_graph
        upstream: sglang #12788
        until: SGLang captures dense prefills too
    split-prepare [>=0.5.16]: {mla}.forward_absorb_prepare(self, positions, hidden_states, forward_batch,
        zero_allocator)
        SGLang attends a prefill densely only if every prompt in it is short. The plugin keeps the projected queries of
        a batch whose short prompts attend densely next to long ones.
        replacement: v32.split:wrap_prepare
        until: SGLang decides for each request
    split-core [>=0.5.16]: {mla}.forward_absorb_core(self, q_pe, k_pe, q_nope_out, k_nope, forward_batch,
        zero_allocator)
        As split-prepare: attends the short prompts with SGLang's dense kernel, and the others as SGLang does.
        replacement: v32.split:wrap_core
        until: SGLang decides for each request
    """
)

REQUIREMENTS = _ENABLED.patches(
    """
    registered: layers.attention.attention_registry:ATTENTION_BACKENDS[{x}](runner)
        The model runner builds the backend through this entry, which imports the class when called.
    registered-alias [>=0.5.13]: layers.attention.attention_registry:ATTENTION_BACKENDS[nsa](runner)
        --attention-backend nsa still works after the renaming and selects the same class.
    """
) + _GPU.patches(
    """
    draft-decode: speculative.draft_utils:DraftBackendFactory._create_{x}_decode_backend(self)
        Speculative decoding builds the backend here without the registry; it imports the class when called.
    draft-prefill: speculative.draft_utils:DraftBackendFactory._create_{x}_prefill_backend(self)
        As draft-decode, for the draft model's prefill.
    draft-steps: class layers.attention.{x}_backend:{owner}MultiStepBackend(self, model_runner, topk,
        speculative_num_steps)
        Holds one backend per draft step. It looks the class up in its module, so it gets the plugin's.
    metadata: {backend}.init_forward_metadata(self, forward_batch)
        Prepares a batch; the plugin makes the batch's plan here.
    metadata-out-graph [>=0.5.13]: {backend}.init_forward_metadata_out_graph(self, forward_batch, in_capture)
        The part of the preparation outside a CUDA graph. Before 0.5.13 capture and replay had one each.
    graph-metadata [>=0.5.13]: {backend}._apply_cuda_graph_metadata(self, bs, req_pool_indices, seq_lens, seq_lens_cpu,
        forward_mode, spec_info)
        Prepares a captured batch, at capture and at replay; the plugin sets its execution path before.
    graph-capture [>=0.5.11,<0.5.13]: {backend}.init_forward_metadata_capture_cuda_graph(self, bs, num_tokens,
        req_pool_indices, seq_lens, encoder_lens, forward_mode, spec_info)
        As graph-metadata, at capture.
    graph-replay [>=0.5.11,<0.5.13]: {backend}.init_forward_metadata_replay_cuda_graph(self, bs, req_pool_indices,
        seq_lens, seq_lens_sum, encoder_lens, forward_mode, spec_info)
        As graph-metadata, at replay.
    graph-precomputed: {backend}.init_forward_metadata_replay_cuda_graph_from_precomputed(self, bs, precomputed,
        forward_mode)
        As graph-metadata, for draft steps.
    prefill-impl: {backend}.set_{x}_prefill_impl(self, forward_batch)
        Decides between dense MHA and a sparse kernel for a prefill batch.
    topk-form: {backend}.get_topk_transform_method(self, forward_mode)
        Says whether a prefill over an fp8 cache selects slots or rows of a copy; slots with decode steps (mode MIXED).
    extend: {backend}.forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache, q_rope, k_rope, topk_indices)
        Attention of prefills, verify steps and draft steps.
    decode: {backend}.forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache, q_rope, k_rope, topk_indices)
        Attention of decode steps.
    dense: {backend}._forward_standard_mha(self, q, k, v, layer, forward_batch, metadata)
        Dense MHA over the keys of a prefill.
    flashmla-kv: {backend}._forward_flashmla_kv(self, q_all, kv_cache, v_head_dim, sm_scale, layer, metadata,
        page_table_1)
        The attention kernel over fp8 pages; the plan's kernel replaces it and does not pad heads.
    flashmla-schedule: {backend}._compute_flashmla_metadata(self, cache_seqlens, seq_len_q)
        FlashMLA's schedule, not made for a batch that another kernel attends.
    flashmla-sparse: {backend}._forward_flashmla_sparse(self, q_all, kv_cache, v_head_dim, page_table_1, sm_scale)
        The attention kernel over a bf16 cache, as flashmla-kv.
    fa3: {backend}._forward_fa3(self, q_rope, kv_cache, v_head_dim, q_nope, page_table, sm_scale)
        FlashAttention-3 over a bf16 cache, the upstream kernel. Only the deliberate fault of a test changes it.
    split-queries [>=0.5.16]: models.deepseek_v2:DeepseekV2AttentionMLA.q_b_proj_forward(self, q_lora)
        Projects a layer's queries, which the dense part of a split batch needs before they are absorbed.
    trtllm: {backend}._forward_trtllm(self, q, k, v, layer, forward_batch, seq_lens, topk_indices)
        The TRT-LLM kernels for decode, verify and draft steps.
    pad-topk: {backend}._pad_topk_indices(self, topk_indices, num_tokens)
        Pads the selection to the size that MLP-sync padded the batch to.
    indexer-metadata: {backend}.get_indexer_metadata(self, layer_id, forward_batch)
        Metadata that the backend gives the indexer, top-k included.
    indexer-paged: layers.attention.{x}.{x}_indexer:Indexer._get_topk_paged(self, forward_batch, layer_id, q_fp8,
        weights, metadata)
        Top-k selection of decode steps, from the paged key cache.
    attention-group: distributed.parallel_state:get_attn_tp_group
        The attention tensor-parallel group, whose ranks reshard heads to tokens with token_shard.
    breakable-graph [>=0.5.11,<0.5.14]: model_executor.breakable_cuda_graph.context:is_in_breakable_cuda_graph
    breakable-graph [>=0.5.14]: {runner_utils}.breakable_cuda_graph.context:is_in_breakable_cuda_graph
        Whether a prefill is captured or replayed in pieces. Its batch size is fixed, so heads are not resharded.
    piecewise-graph [>=0.5.11,<0.5.14]: compilation.piecewise_context_manager:is_in_piecewise_cuda_graph
    piecewise-graph [>=0.5.14]: {runner_utils}.tc_piecewise_cuda_graph.context_manager:is_in_tc_piecewise_cuda_graph
        As breakable-graph, for pieces made by torch.compile.
    """
)

V4_ENTRY = _GPU.patches(
    """
    v4-registered [>=0.5.12]: layers.attention.attention_registry:ATTENTION_BACKENDS[dsv4](runner)
        The model runner builds DeepSeek-V4's backend through this entry, which imports the class when called. The
        plugin replaces the class just before that, so other models import nothing of V4.
        replacement: startup.hooks:wrap_v4_entry
        until: nsa-plugin does not replace the class of DeepSeek-V4's backend
    """
)

V4_REQUIREMENTS = _V4.patches(
    """
    attention [>=0.5.21]: {backend}._forward_attention(self, q, k, v, layer, forward_batch, compress_ratio,
        save_kv_cache, attn_sink)
        Attention of every batch; from 0.5.21 on the inner one of two methods.
    forward [>=0.5.12,<0.5.21]: {backend}.forward(self, q, k, v, layer, forward_batch, compress_ratio, save_kv_cache,
        attn_sink)
        Attention of every batch, before 0.5.21.
    metadata: {backend}.init_forward_metadata(self, forward_batch)
        Prepares an eager batch; the plugin makes a prefill's plan here.
    indexer-schedule: {backend}.init_forward_metadata_indexer(self, core_attn_metadata)
        Schedules SGLang's paged logits; batches above the library kernel's limit use SGLang's scheduling kernel.
    graph-replay [>=0.5.13]: {backend}.prepare_forward_metadata_for_breakable_cuda_graph_replay(self, capture_metadata,
        forward_batch, static_forward_batch)
        Prepares a prefill whose graph breaks at attention; the plugin makes its plan here.
    graph-capture [>=0.5.13]: {backend}.init_forward_metadata_for_breakable_cuda_graph_capture(self, forward_batch)
        As graph-replay, at capture, which the plugin leaves to SGLang.
    step-replay [>=0.5.13]: {backend}.init_forward_metadata_out_graph(self, forward_batch, in_capture)
        Prepares the replay of a captured decode step; the plugin records it here.
    step-replay-before [>=0.5.12,<0.5.13]: {backend}.init_forward_metadata_replay_cuda_graph(self, bs, req_pool_indices,
        seq_lens, seq_lens_sum, encoder_lens, forward_mode)
        As step-replay, in 0.5.12.
    tables [>=0.5.22]: {backend}._use_sparse_prefill(self, forward_batch, num_qo_tokens)
        Whether SGLang makes the tables of its path over a bf16 copy.
    store: {backend}.store_cache(self, layer_id, swa_k, forward_batch)
        Stores a layer's keys before its attention.
    indexer: {indexer}.forward_c4_indexer(self, x, q_lora, c4_indexer, forward_batch, alt_streams, enable_multi_stream,
        q_lora_ready)
        Top-k selection of a prefill.
    indexer-prepare: {indexer}._forward_prepare_normal(self, x, q_lora, c4_indexer, positions, forward_batch)
        The indexer's queries and weights; stores its keys.
    indexer-prepare-streams: {indexer}._forward_prepare_multi_stream(self, x, q_lora, c4_indexer, positions,
        forward_batch)
        As indexer-prepare, on several streams.
    pool-window: {pool}.get_swa_key_buffer_radix(self, layer_id)
        Sliding-window cache of a layer.
    pool-extra: {pool}.get_extra_key_buffer(self, layer_id)
        Compressed cache of a layer.
    pool-extra-page: {pool}.get_extra_key_page_size(self, layer_id)
        Entries per page of the compressed cache.
    pool-indexer: {pool}.get_index_k_with_scale_buffer(self, layer_id)
        Indexer cache of a layer.
    pool-window-page [>=0.5.22]: {pool}.get_swa_key_page_size(self)
        Tokens per page of the sliding-window cache; in older versions a field of its pool.
    pool-record [>=0.5.21]: {pool}.get_swa_key_bytes_per_token(self)
        Bytes per token in the sliding-window cache; in older versions a field of its pool.
    draft-decode: speculative.draft_utils:DraftBackendFactory._create_dsv4_decode_backend(self)
        Speculative decoding builds its backends here without the registry; it imports the class when called, after the
        target's backend is built.
    draft-prefill: speculative.draft_utils:DraftBackendFactory._create_dsv4_prefill_backend(self)
        As draft-decode, for the draft model's prefill.
    draft-steps: class layers.attention.deepseek_v4_backend:DeepseekV4MultiStepBackend(self, model_runner, topk,
        speculative_num_steps)
        Holds one backend per draft step. It looks the class up in its module, so it gets the plugin's.
    """
)

V4 = _V4.patches(
    """
    backend: class {backend}(self, model_runner)
        DeepSeek-V4's attention backend: prefills of any size take the plan's execution path, and the indexer's logits
        fit the free memory.
        replacement: startup.backend:make_v4
        upstream: sglang #25418, #25502
        until: SGLang's prefill takes the fastest path at any size, with bounded memory
    """
)

V4_EVERY = _V4.versions
V4_METHODS = tuple(
    target
    for patch in V4_REQUIREMENTS
    for target in patch.targets
    if target.path.startswith(tuple(f"sglang.srt.{_V4.names[owner]}." for owner in ("backend", "indexer")))
)
"""Methods of the V4 backend that the plugin overrides or calls; those not of all versions have others than V4_EVERY."""

BACKENDS = ENABLED + V4
"""Attention backend classes that the plugin replaces."""

# Requirements come first: they look up attributes of the stock backend class, before the plugin replaces it.
PATCHES = BOOTSTRAP + SCHEDULER + REQUIREMENTS + ENABLED + GPU + PORTABLE + V4_ENTRY + V4_REQUIREMENTS + V4
