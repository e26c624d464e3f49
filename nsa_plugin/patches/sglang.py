"""The ledger of SGLang: every SGLang object that the plugin changes or builds on, by version.

SGLang renamed NSA to DSA in 0.5.13. The old modules that remain (`nsa_backend`, until 0.5.20) raise on import, so no
target goes through them.

DeepSeek-V4 (0.5.12 on) has a separate backend, `dsv4`. SGLang imports its module only to build one, and the plugin does
the same through the registry entry. Its entries have the need `GPU_V4`.
"""

from __future__ import annotations

from nsa_plugin.patches.ledger import Need, Section
from nsa_plugin.patches.sglang_portable import PORTABLE

ENGINE = "sglang"
SUPPORTED = ">=0.5.11,<0.5.24"
SUPPORTED_PORTABLE = ">=0.5.23,<0.5.24"

_NSA, _DSA = ">=0.5.11,<0.5.13", ">=0.5.13"
_CAPTURED_BEFORE, _CAPTURED = ">=0.5.11,<0.5.14", ">=0.5.14"
_RUNNER_UTILS = "model_executor.runner_backend_utils"
_V4_BACKEND = "layers.attention.deepseek_v4_backend:DeepseekV4AttnBackend"
_V4_POOL = "mem_cache.deepseek_v4_memory_pool:DeepSeekV4TokenToKVPool"
_V4_INDEXER = "layers.attention.dsv4.indexer:C4IndexerBackendMixin"
# No upper bound: the first hooks tell the user that a newer SGLang is not supported.
_ANY = ">=0.5.11"

_BOOTSTRAP = Section(engine=ENGINE, prefix="sglang.", need=Need.BOOTSTRAP, versions=_ANY, package="sglang.srt")
_ENABLED = Section(engine=ENGINE, prefix="sglang.", need=Need.ENABLED, versions=_ANY, package="sglang.srt")
_GPU = Section(engine=ENGINE, prefix="sglang.", need=Need.GPU, versions=_ANY, package="sglang.srt")
_V4 = Section(engine=ENGINE, prefix="sglang.v4-", need=Need.GPU_V4, versions=">=0.5.12", package="sglang.srt")


def _renamed(where: str, *, only: str = "") -> dict[str, str]:
    """Targets before and after the renaming: {x} is nsa or dsa, {owner} the prefix of the backend's classes.

    Args:
        only: the versions on one side of the renaming, for a target that the other side does not have.
    """
    sides = ((_NSA, "nsa", "NativeSparseAttn"), (_DSA, "dsa", "DeepseekSparseAttn"))
    return {
        versions: where.replace("{x}", x).replace("{owner}", owner)
        for versions, x, owner in sides
        if only in ("", versions)
    }


def _method(where: str, *, only: str = "") -> dict[str, str]:
    """Targets of a method of the attention backend. See `_renamed`."""
    return _renamed(f"layers.attention.{{x}}_backend:{{owner}}Backend.{where}", only=only)


BOOTSTRAP = (
    _BOOTSTRAP.change(
        "flags",
        "startup.hooks:wrap_add_cli_args",
        "SGLang has no hook through which a plugin can add flags.",
        "SGLang lets a plugin declare flags",
        "server_args:ServerArgs.add_cli_args(parser)",
    ),
    _BOOTSTRAP.change(
        "flag-values",
        "startup.hooks:wrap_from_cli_args",
        "SGLang drops flags that are not fields of ServerArgs here; the plugin keeps its flags for the schedulers.",
        "SGLang lets a plugin declare flags",
        "server_args:ServerArgs.from_cli_args(args)",
    ),
    _BOOTSTRAP.change(
        "gate",
        "startup.hooks:wrap_resolve",
        "SGLang only logs the errors that a plugin raises while it is loaded. Every way to start an engine passes "
        "here, where errors are raised and no process has started: the plugin checks its settings and ledger here.",
        "SGLang lets a plugin refuse to start",
        {
            ">=0.5.11,<0.5.19": "server_args:ServerArgs.__post_init__(self)",
            ">=0.5.19": "server_args:ServerArgs.resolve_once(self)",
        },
    ),
)

SCHEDULER = (
    _BOOTSTRAP.change(
        "scheduler",
        "startup.hooks:wrap_scheduler_init",
        "The first place in a scheduler process where SGLang does not swallow a plugin's errors, before the model is "
        "built: the plugin applies and verifies the other patches here.",
        "SGLang lets a plugin refuse to start",
        "managers.scheduler:Scheduler.__init__(self, server_args, port_args)",
    ),
)

ENABLED = (
    _ENABLED.change(
        "backend",
        "startup.backend:make",
        "The attention backend of DeepSeek sparse attention. It keeps its registered name, because SGLang selects "
        "the model's MLA path and its speculative workers by that name. Every user of the class imports it from here.",
        "SGLang makes these decisions itself",
        _renamed("class layers.attention.{x}_backend:{owner}Backend(self, model_runner)"),
        upstream="sglang #12788, #13544, #13646",
    ),
)

GPU = (
    _GPU.change(
        "indexer-ragged",
        "v32.indexer:wrap_topk_ragged",
        "Top-k selection of a prefill. SGLang scores every query token against the keys of all requests in the "
        "batch; the plugin scores it against the keys of its request, in pieces of the size in the plan.",
        "SGLang's logits are no wider than one request and fit the free memory",
        _renamed(
            "layers.attention.{x}.{x}_indexer:Indexer._get_topk_ragged(self, enable_dual_stream, forward_batch, "
            "layer_id, q_fp8, weights, metadata)"
        ),
        upstream="sglang #13646, #39095",
    ),
    _GPU.change(
        "prefill-graph",
        "v32.prefill_graph:wrap_can_run_graph",
        "A prefill replayed from a graph is always sparse. If the user sets mha_max_kv, prefills that the plan makes "
        "dense run eagerly. Before 0.5.17 SGLang does not capture prefills of these models.",
        "SGLang captures dense prefills too",
        {
            ">=0.5.17": ""
            "model_executor.runner.prefill_cuda_graph_runner:PrefillCudaGraphRunner.can_run_graph(self, forward_batch)"
        },
        upstream="sglang #12788",
    ),
)

REQUIREMENTS = (
    _ENABLED.requirement(
        "registered",
        "The model runner builds the backend through this entry, which imports the class when called.",
        _renamed("layers.attention.attention_registry:ATTENTION_BACKENDS[{x}](runner)"),
    ),
    _ENABLED.requirement(
        "registered-alias",
        "--attention-backend nsa still works after the renaming and selects the same class.",
        {_DSA: "layers.attention.attention_registry:ATTENTION_BACKENDS[nsa](runner)"},
    ),
    _GPU.requirement(
        "draft-decode",
        "Speculative decoding builds the backend here without the registry; it imports the class when called.",
        _renamed("speculative.draft_utils:DraftBackendFactory._create_{x}_decode_backend(self)"),
    ),
    _GPU.requirement(
        "draft-prefill",
        "As draft-decode, for the draft model's prefill.",
        _renamed("speculative.draft_utils:DraftBackendFactory._create_{x}_prefill_backend(self)"),
    ),
    _GPU.requirement(
        "draft-steps",
        "Holds one backend per draft step. It looks the class up in its module, so it gets the plugin's.",
        _renamed(
            "class layers.attention.{x}_backend:{owner}MultiStepBackend(self, model_runner, topk, "
            "speculative_num_steps)"
        ),
    ),
    _GPU.requirement(
        "metadata",
        "Prepares a batch; the plugin makes the batch's plan here.",
        _method("init_forward_metadata(self, forward_batch)"),
    ),
    _GPU.requirement(
        "metadata-out-graph",
        "The part of the preparation outside a CUDA graph. Before 0.5.13 capture and replay had one each.",
        _method("init_forward_metadata_out_graph(self, forward_batch, in_capture)", only=_DSA),
    ),
    _GPU.requirement(
        "graph-metadata",
        "Prepares a captured batch, at capture and at replay; the plugin sets its execution path before.",
        _method(
            "_apply_cuda_graph_metadata(self, bs, req_pool_indices, seq_lens, seq_lens_cpu, forward_mode, spec_info)",
            only=_DSA,
        ),
    ),
    _GPU.requirement(
        "graph-capture",
        "As graph-metadata, at capture.",
        _method(
            "init_forward_metadata_capture_cuda_graph(self, bs, num_tokens, req_pool_indices, seq_lens, encoder_lens, "
            "forward_mode, spec_info)",
            only=_NSA,
        ),
    ),
    _GPU.requirement(
        "graph-replay",
        "As graph-metadata, at replay.",
        _method(
            "init_forward_metadata_replay_cuda_graph(self, bs, req_pool_indices, seq_lens, seq_lens_sum, encoder_lens, "
            "forward_mode, spec_info)",
            only=_NSA,
        ),
    ),
    _GPU.requirement(
        "graph-precomputed",
        "As graph-metadata, for draft steps.",
        _method("init_forward_metadata_replay_cuda_graph_from_precomputed(self, bs, precomputed, forward_mode)"),
    ),
    _GPU.requirement(
        "prefill-impl",
        "Decides between dense MHA and a sparse kernel for a prefill batch.",
        _method("set_{x}_prefill_impl(self, forward_batch)"),
    ),
    _GPU.requirement(
        "extend",
        "Attention of prefills, verify steps and draft steps.",
        _method("forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache, q_rope, k_rope, topk_indices)"),
    ),
    _GPU.requirement(
        "decode",
        "Attention of decode steps.",
        _method("forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache, q_rope, k_rope, topk_indices)"),
    ),
    _GPU.requirement(
        "dense",
        "Dense MHA over the keys of a prefill.",
        _method("_forward_standard_mha(self, q, k, v, layer, forward_batch, metadata)"),
    ),
    _GPU.requirement(
        "flashmla-kv",
        "The attention kernel over fp8 pages; the plan's kernel replaces it and does not pad heads.",
        _method("_forward_flashmla_kv(self, q_all, kv_cache, v_head_dim, sm_scale, layer, metadata, page_table_1)"),
    ),
    _GPU.requirement(
        "flashmla-schedule",
        "FlashMLA's schedule, not made for a batch that another kernel attends.",
        _method("_compute_flashmla_metadata(self, cache_seqlens, seq_len_q)"),
    ),
    _GPU.requirement(
        "flashmla-sparse",
        "The attention kernel over a bf16 cache, as flashmla-kv.",
        _method("_forward_flashmla_sparse(self, q_all, kv_cache, v_head_dim, page_table_1, sm_scale)"),
    ),
    _GPU.requirement(
        "fa3",
        "FlashAttention-3 over a bf16 cache, the upstream kernel. Only the deliberate fault of a test changes it.",
        _method("_forward_fa3(self, q_rope, kv_cache, v_head_dim, q_nope, page_table, sm_scale)"),
    ),
    _GPU.requirement(
        "trtllm",
        "The TRT-LLM kernels for decode, verify and draft steps.",
        _method("_forward_trtllm(self, q, k, v, layer, forward_batch, seq_lens, topk_indices)"),
    ),
    _GPU.requirement(
        "pad-topk",
        "Pads the selection to the size that MLP-sync padded the batch to.",
        _method("_pad_topk_indices(self, topk_indices, num_tokens)"),
    ),
    _GPU.requirement(
        "indexer-metadata",
        "Metadata that the backend gives the indexer, top-k included.",
        _method("get_indexer_metadata(self, layer_id, forward_batch)"),
    ),
    _GPU.requirement(
        "indexer-paged",
        "Top-k selection of decode steps, from the paged key cache.",
        _renamed(
            "layers.attention.{x}.{x}_indexer:Indexer._get_topk_paged(self, forward_batch, layer_id, q_fp8, weights, "
            "metadata)"
        ),
    ),
    _GPU.requirement(
        "attention-group",
        "The attention tensor-parallel group, whose ranks reshard heads to tokens with token_shard.",
        "distributed.parallel_state:get_attn_tp_group",
    ),
    _GPU.requirement(
        "breakable-graph",
        "Whether a prefill is captured or replayed in pieces. Its batch size is fixed, so heads are not resharded.",
        {
            _CAPTURED_BEFORE: "model_executor.breakable_cuda_graph.context:is_in_breakable_cuda_graph",
            _CAPTURED: f"{_RUNNER_UTILS}.breakable_cuda_graph.context:is_in_breakable_cuda_graph",
        },
    ),
    _GPU.requirement(
        "piecewise-graph",
        "As breakable-graph, for pieces made by torch.compile.",
        {
            _CAPTURED_BEFORE: "compilation.piecewise_context_manager:is_in_piecewise_cuda_graph",
            _CAPTURED: f"{_RUNNER_UTILS}.tc_piecewise_cuda_graph.context_manager:is_in_tc_piecewise_cuda_graph",
        },
    ),
)

V4_ENTRY = (
    _GPU.change(
        "v4-registered",
        "startup.hooks:wrap_v4_entry",
        "The model runner builds DeepSeek-V4's backend through this entry, which imports the class when called. The "
        "plugin replaces the class just before that, so other models import nothing of V4.",
        "nsa-plugin does not replace the class of DeepSeek-V4's backend",
        {">=0.5.12": "layers.attention.attention_registry:ATTENTION_BACKENDS[dsv4](runner)"},
    ),
)

V4_REQUIREMENTS = (
    _V4.requirement(
        "attention",
        "Attention of every batch; from 0.5.21 on the inner one of two methods.",
        {
            ">=0.5.21": f"{_V4_BACKEND}._forward_attention(self, q, k, v, layer, forward_batch, compress_ratio, "
            "save_kv_cache, attn_sink)"
        },
    ),
    _V4.requirement(
        "forward",
        "Attention of every batch, before 0.5.21.",
        {
            ">=0.5.12,<0.5.21": f"{_V4_BACKEND}.forward(self, q, k, v, layer, forward_batch, compress_ratio, "
            "save_kv_cache, attn_sink)"
        },
    ),
    _V4.requirement(
        "metadata",
        "Prepares an eager batch; the plugin makes a prefill's plan here.",
        f"{_V4_BACKEND}.init_forward_metadata(self, forward_batch)",
    ),
    _V4.requirement(
        "indexer-schedule",
        "Schedules SGLang's paged logits; batches above the library kernel's limit use SGLang's scheduling kernel.",
        f"{_V4_BACKEND}.init_forward_metadata_indexer(self, core_attn_metadata)",
    ),
    _V4.requirement(
        "graph-replay",
        "Prepares a prefill whose graph breaks at attention; the plugin makes its plan here.",
        {
            _DSA: f"{_V4_BACKEND}.prepare_forward_metadata_for_breakable_cuda_graph_replay(self, capture_metadata, "
            "forward_batch, static_forward_batch)"
        },
    ),
    _V4.requirement(
        "graph-capture",
        "As graph-replay, at capture, which the plugin leaves to SGLang.",
        {_DSA: f"{_V4_BACKEND}.init_forward_metadata_for_breakable_cuda_graph_capture(self, forward_batch)"},
    ),
    _V4.requirement(
        "step-replay",
        "Prepares the replay of a captured decode step; the plugin records it here.",
        {_DSA: f"{_V4_BACKEND}.init_forward_metadata_out_graph(self, forward_batch, in_capture)"},
    ),
    _V4.requirement(
        "step-replay-before",
        "As step-replay, in 0.5.12.",
        {
            ">=0.5.12,<0.5.13": f"{_V4_BACKEND}.init_forward_metadata_replay_cuda_graph(self, bs, req_pool_indices, "
            "seq_lens, seq_lens_sum, "
            "encoder_lens, forward_mode)"
        },
    ),
    _V4.requirement(
        "tables",
        "Whether SGLang makes the tables of its path over a bf16 copy.",
        {">=0.5.22": f"{_V4_BACKEND}._use_sparse_prefill(self, forward_batch, num_qo_tokens)"},
    ),
    _V4.requirement(
        "store",
        "Stores a layer's keys before its attention.",
        f"{_V4_BACKEND}.store_cache(self, layer_id, swa_k, forward_batch)",
    ),
    _V4.requirement(
        "indexer",
        "Top-k selection of a prefill.",
        f"{_V4_INDEXER}.forward_c4_indexer(self, x, q_lora, c4_indexer, forward_batch, alt_streams, "
        "enable_multi_stream, q_lora_ready)",
    ),
    _V4.requirement(
        "indexer-prepare",
        "The indexer's queries and weights; stores its keys.",
        f"{_V4_INDEXER}._forward_prepare_normal(self, x, q_lora, c4_indexer, positions, forward_batch)",
    ),
    _V4.requirement(
        "indexer-prepare-streams",
        "As indexer-prepare, on several streams.",
        f"{_V4_INDEXER}._forward_prepare_multi_stream(self, x, q_lora, c4_indexer, positions, forward_batch)",
    ),
    _V4.requirement(
        "pool-window", "Sliding-window cache of a layer.", f"{_V4_POOL}.get_swa_key_buffer_radix(self, layer_id)"
    ),
    _V4.requirement("pool-extra", "Compressed cache of a layer.", f"{_V4_POOL}.get_extra_key_buffer(self, layer_id)"),
    _V4.requirement(
        "pool-extra-page",
        "Entries per page of the compressed cache.",
        f"{_V4_POOL}.get_extra_key_page_size(self, layer_id)",
    ),
    _V4.requirement(
        "pool-indexer", "Indexer cache of a layer.", f"{_V4_POOL}.get_index_k_with_scale_buffer(self, layer_id)"
    ),
    _V4.requirement(
        "pool-window-page",
        "Tokens per page of the sliding-window cache; in older versions a field of its pool.",
        {">=0.5.22": f"{_V4_POOL}.get_swa_key_page_size(self)"},
    ),
    _V4.requirement(
        "pool-record",
        "Bytes per token in the sliding-window cache; in older versions a field of its pool.",
        {">=0.5.21": f"{_V4_POOL}.get_swa_key_bytes_per_token(self)"},
    ),
    _V4.requirement(
        "draft-decode",
        "Speculative decoding builds its backends here without the registry; it imports the class when called, after "
        "the target's backend is built.",
        "speculative.draft_utils:DraftBackendFactory._create_dsv4_decode_backend(self)",
    ),
    _V4.requirement(
        "draft-prefill",
        "As draft-decode, for the draft model's prefill.",
        "speculative.draft_utils:DraftBackendFactory._create_dsv4_prefill_backend(self)",
    ),
    _V4.requirement(
        "draft-steps",
        "Holds one backend per draft step. It looks the class up in its module, so it gets the plugin's.",
        "class layers.attention.deepseek_v4_backend:DeepseekV4MultiStepBackend(self, model_runner, topk, "
        "speculative_num_steps)",
    ),
)

V4 = (
    _V4.change(
        "backend",
        "startup.backend:make_v4",
        "DeepSeek-V4's attention backend: prefills of any size take the plan's execution path, and the indexer's "
        "logits fit the free memory.",
        "SGLang's prefill takes the fastest path at any size, with bounded memory",
        f"class {_V4_BACKEND}(self, model_runner)",
        upstream="sglang #25418, #25502",
    ),
)

V4_EVERY = _V4.versions
V4_METHODS = tuple(
    target
    for patch in V4_REQUIREMENTS
    for target in patch.targets
    if target.path.startswith((f"sglang.srt.{_V4_BACKEND}.", f"sglang.srt.{_V4_INDEXER}."))
)
"""Methods of the V4 backend that the plugin overrides or calls; those not of all versions have others than V4_EVERY."""

BACKENDS = ENABLED + V4
"""Attention backend classes that the plugin replaces."""

# Requirements come first: they look up attributes of the stock backend class, before the plugin replaces it.
PATCHES = BOOTSTRAP + SCHEDULER + REQUIREMENTS + ENABLED + GPU + PORTABLE + V4_ENTRY + V4_REQUIREMENTS + V4
