"""The ledger of SGLang: every object of it that the plugin changes, or builds on, version by version.

SGLang renamed NSA to DSA in 0.5.13; the old modules that are left (`nsa_backend`, until 0.5.20) raise when
they are imported, so no target goes through them.

DeepSeek-V4 (0.5.12 on) has a backend of its own, `dsv4`, whose module SGLang imports only to build one: so does the
plugin, by way of the registry's entry. What it changes and builds on there is `GPU_V4`, of which the method's names and
parameters are those of `backends.sglang.v4_table`.
"""

from __future__ import annotations

from nsa_plugin.patches.ledger import Need, Section

ENGINE = "sglang"
SUPPORTED = ">=0.5.11,<0.5.24"

_NSA, _DSA = ">=0.5.11,<0.5.13", ">=0.5.13"
_CAPTURED_BEFORE, _CAPTURED = ">=0.5.11,<0.5.14", ">=0.5.14"
_RUNNER_UTILS = "model_executor.runner_backend_utils"
_V4_BACKEND = "layers.attention.deepseek_v4_backend:DeepseekV4AttnBackend"
_V4_POOL = "mem_cache.deepseek_v4_memory_pool:DeepSeekV4TokenToKVPool"
_V4_INDEXER = "layers.attention.dsv4.indexer:C4IndexerBackendMixin"
# Open at the top: the first hooks tell the user that a newer SGLang is not supported.
_ANY = ">=0.5.11"

_BOOTSTRAP = Section(
    engine=ENGINE,
    prefix="sglang.",
    need=Need.BOOTSTRAP,
    versions=_ANY,
    package="sglang.srt",
    replacements="nsa_plugin.backends.sglang",
)
_ENABLED = Section(
    engine=ENGINE,
    prefix="sglang.",
    need=Need.ENABLED,
    versions=_ANY,
    package="sglang.srt",
    replacements="nsa_plugin.backends.sglang",
)
_GPU = Section(
    engine=ENGINE,
    prefix="sglang.",
    need=Need.GPU,
    versions=_ANY,
    package="sglang.srt",
    replacements="nsa_plugin.backends.sglang",
)
_V4 = Section(
    engine=ENGINE,
    prefix="sglang.v4-",
    need=Need.GPU_V4,
    versions=">=0.5.12",
    package="sglang.srt",
    replacements="nsa_plugin.backends.sglang",
)


def _renamed(where: str, *, only: str = "") -> dict[str, str]:
    """A target before and after the renaming: {x} is nsa or dsa, {owner} the prefix of the backend's classes.

    Args:
        only: the side of the renaming that has it, where the other has none.
    """
    sides = ((_NSA, "nsa", "NativeSparseAttn"), (_DSA, "dsa", "DeepseekSparseAttn"))
    return {
        versions: where.replace("{x}", x).replace("{owner}", owner)
        for versions, x, owner in sides
        if only in ("", versions)
    }


def _method(where: str, *, only: str = "") -> dict[str, str]:
    """A method of the attention backend. See `_renamed`."""
    return _renamed(f"layers.attention.{{x}}_backend:{{owner}}Backend.{where}", only=only)


BOOTSTRAP = (
    _BOOTSTRAP.change(
        "flags",
        "startup.hooks:wrap_add_cli_args",
        "SGLang has no hook for a plugin's own flags.",
        "SGLang lets a plugin declare flags",
        "server_args:ServerArgs.add_cli_args(parser)",
    ),
    _BOOTSTRAP.change(
        "flag-values",
        "startup.hooks:wrap_from_cli_args",
        "Flags that are not fields of ServerArgs are dropped here; the plugin's are kept for the schedulers.",
        "SGLang lets a plugin declare flags",
        "server_args:ServerArgs.from_cli_args(args)",
    ),
    _BOOTSTRAP.change(
        "gate",
        "startup.hooks:wrap_resolve",
        "SGLang logs and forgets what a plugin raises while it is loaded. Every way to a running engine passes here, "
        "outside that net and before a process is started: the settings and the ledger are checked here.",
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
        "The first place in a scheduler process outside the net that swallows a plugin's errors, and before the "
        "model is built: the other patches are applied and verified here.",
        "SGLang lets a plugin refuse to start",
        "managers.scheduler:Scheduler.__init__(self, server_args, port_args)",
    ),
)

ENABLED = (
    _ENABLED.change(
        "backend",
        "startup.backend:make",
        "The attention backend of DeepSeek sparse attention. Its registered name stays, because SGLang keys the "
        "model's MLA route and its speculative workers on that name; every user of the class imports it from here "
        "when it builds one.",
        "SGLang takes the decisions of these changes itself",
        _renamed("class layers.attention.{x}_backend:{owner}Backend(self, model_runner)"),
        upstream="sglang #12788, #13544, #13646",
    ),
)

GPU = (
    _GPU.change(
        "indexer-ragged",
        "v32.indexer:wrap_topk_ragged",
        "A prefill's selection: SGLang scores every row against the keys of every request of the batch; the plugin "
        "scores each against its own request's, as many rows at once as the plan says.",
        "SGLang's logits are no wider than a request and bounded by the free memory",
        _renamed(
            "layers.attention.{x}.{x}_indexer:Indexer._get_topk_ragged(self, enable_dual_stream, forward_batch, "
            "layer_id, q_fp8, weights, metadata)"
        ),
        upstream="sglang #13646, #39095",
    ),
    _GPU.change(
        "prefill-graph",
        "v32.prefill_graph:wrap_can_run_graph",
        "A prefill that is replayed from a graph is always sparse; where the user gives mha_max_kv, one that the "
        "plan makes dense runs eagerly. Before 0.5.17 prefills of these models are not captured.",
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
        "The model runner builds the backend through this entry, which imports the class when it is called.",
        _renamed("layers.attention.attention_registry:ATTENTION_BACKENDS[{x}](runner)"),
    ),
    _ENABLED.requirement(
        "registered-alias",
        "--attention-backend nsa still works after the renaming and leads to the same class.",
        {_DSA: "layers.attention.attention_registry:ATTENTION_BACKENDS[nsa](runner)"},
    ),
    _GPU.requirement(
        "draft-decode",
        "Speculative decoding builds the backend here without the registry, importing the class when it is called.",
        _renamed("speculative.draft_utils:DraftBackendFactory._create_{x}_decode_backend(self)"),
    ),
    _GPU.requirement(
        "draft-prefill",
        "As for draft-decode, for the draft model's prefill.",
        _renamed("speculative.draft_utils:DraftBackendFactory._create_{x}_prefill_backend(self)"),
    ),
    _GPU.requirement(
        "draft-steps",
        "Holds one backend a draft step; it takes the class from its module's globals, so it gets the plugin's.",
        _renamed(
            "class layers.attention.{x}_backend:{owner}MultiStepBackend(self, model_runner, topk, "
            "speculative_num_steps)"
        ),
    ),
    _GPU.requirement(
        "metadata",
        "Prepares a batch: where one Plan a batch is made.",
        _method("init_forward_metadata(self, forward_batch)"),
    ),
    _GPU.requirement(
        "metadata-out-graph",
        "The part of the preparation that stays outside a CUDA graph; before 0.5.13 capture and replay had one each.",
        _method("init_forward_metadata_out_graph(self, forward_batch, in_capture)", only=_DSA),
    ),
    _GPU.requirement(
        "graph-metadata",
        "Prepares a captured batch, at capture and at replay: its route is set before.",
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
        "As graph-metadata, for the draft steps of speculative decoding.",
        _method("init_forward_metadata_replay_cuda_graph_from_precomputed(self, bs, precomputed, forward_mode)"),
    ),
    _GPU.requirement(
        "prefill-impl",
        "Decides between dense MHA and a sparse kernel for a prefill batch.",
        _method("set_{x}_prefill_impl(self, forward_batch)"),
    ),
    _GPU.requirement(
        "extend",
        "Attention of prefill, verify and draft rows.",
        _method("forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache, q_rope, k_rope, topk_indices)"),
    ),
    _GPU.requirement(
        "decode",
        "Attention of decode rows.",
        _method("forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache, q_rope, k_rope, topk_indices)"),
    ),
    _GPU.requirement(
        "dense",
        "Dense MHA over a prefill's own keys.",
        _method("_forward_standard_mha(self, q, k, v, layer, forward_batch, metadata)"),
    ),
    _GPU.requirement(
        "flashmla-kv",
        "The end of the path over fp8 pages: the plan's kernel runs in its place, with no padding of heads.",
        _method("_forward_flashmla_kv(self, q_all, kv_cache, v_head_dim, sm_scale, layer, metadata, page_table_1)"),
    ),
    _GPU.requirement(
        "flashmla-schedule",
        "FlashMLA's schedule, which is not made where the plugin's kernel attends.",
        _method("_compute_flashmla_metadata(self, cache_seqlens, seq_len_q)"),
    ),
    _GPU.requirement(
        "flashmla-sparse",
        "The end of the path over bf16 rows, as flashmla-kv.",
        _method("_forward_flashmla_sparse(self, q_all, kv_cache, v_head_dim, page_table_1, sm_scale)"),
    ),
    _GPU.requirement(
        "fa3",
        "FlashAttention-3 over bf16 rows: the engine's own kernel, which only the deliberate fault of a test changes.",
        _method("_forward_fa3(self, q_rope, kv_cache, v_head_dim, q_nope, page_table, sm_scale)"),
    ),
    _GPU.requirement(
        "trtllm",
        "The TRT-LLM kernels of decode, verify and draft rows.",
        _method("_forward_trtllm(self, q, k, v, layer, forward_batch, seq_lens, topk_indices)"),
    ),
    _GPU.requirement(
        "pad-topk",
        "Pads the selection to the rows that MLP-sync padded the batch to.",
        _method("_pad_topk_indices(self, topk_indices, num_tokens)"),
    ),
    _GPU.requirement(
        "indexer-metadata",
        "What the backend hands the indexer, top-k included.",
        _method("get_indexer_metadata(self, layer_id, forward_batch)"),
    ),
    _GPU.requirement(
        "indexer-paged",
        "The indexer's selection for decode, from the paged key cache.",
        _renamed(
            "layers.attention.{x}.{x}_indexer:Indexer._get_topk_paged(self, forward_batch, layer_id, q_fp8, weights, "
            "metadata)"
        ),
    ),
    _GPU.requirement(
        "attention-group",
        "The ranks that share a batch's heads: with token_shard they trade them for tokens.",
        "distributed.parallel_state:get_attn_tp_group",
    ),
    _GPU.requirement(
        "breakable-graph",
        "Whether a prefill is captured or replayed in pieces, around attention over fixed rows: no heads are traded.",
        {
            _CAPTURED_BEFORE: "model_executor.breakable_cuda_graph.context:is_in_breakable_cuda_graph",
            _CAPTURED: f"{_RUNNER_UTILS}.breakable_cuda_graph.context:is_in_breakable_cuda_graph",
        },
    ),
    _GPU.requirement(
        "piecewise-graph",
        "As breakable-graph, where torch.compile makes the pieces.",
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
        "The model runner builds DeepSeek-V4's backend through this entry, which imports the class when it is "
        "called: right before, the plugin takes the class's place. For another model nothing of V4 is imported.",
        "nsa-plugin needs no class of its own for DeepSeek-V4",
        {">=0.5.12": "layers.attention.attention_registry:ATTENTION_BACKENDS[dsv4](runner)"},
    ),
)

V4_REQUIREMENTS = (
    _V4.requirement(
        "attention",
        "Attention of every row; from 0.5.21 on the inner one of two.",
        {
            ">=0.5.21": f"{_V4_BACKEND}._forward_attention(self, q, k, v, layer, forward_batch, compress_ratio, "
            "save_kv_cache, attn_sink)"
        },
    ),
    _V4.requirement(
        "forward",
        "Attention of every row, before 0.5.21.",
        {
            ">=0.5.12,<0.5.21": f"{_V4_BACKEND}.forward(self, q, k, v, layer, forward_batch, compress_ratio, "
            "save_kv_cache, attn_sink)"
        },
    ),
    _V4.requirement(
        "metadata",
        "Prepares an eager batch: where a prefill's plan is made.",
        f"{_V4_BACKEND}.init_forward_metadata(self, forward_batch)",
    ),
    _V4.requirement(
        "indexer-schedule",
        "Schedules SGLang's own paged logits; for more rows than the library's kernel takes, by SGLang's kernel.",
        f"{_V4_BACKEND}.init_forward_metadata_indexer(self, core_attn_metadata)",
    ),
    _V4.requirement(
        "graph-replay",
        "Prepares a prefill whose graph breaks at attention: where its plan is made.",
        {
            _DSA: f"{_V4_BACKEND}.prepare_forward_metadata_for_breakable_cuda_graph_replay(self, capture_metadata, "
            "forward_batch, static_forward_batch)"
        },
    ),
    _V4.requirement(
        "graph-capture",
        "As graph-replay, at capture, which is SGLang's own.",
        {_DSA: f"{_V4_BACKEND}.init_forward_metadata_for_breakable_cuda_graph_capture(self, forward_batch)"},
    ),
    _V4.requirement(
        "step-replay",
        "Prepares a captured step to be replayed: where it is recorded.",
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
        "Whether SGLang makes the tables of its route over bf16 rows.",
        {">=0.5.22": f"{_V4_BACKEND}._use_sparse_prefill(self, forward_batch, num_qo_tokens)"},
    ),
    _V4.requirement(
        "store",
        "Stores a layer's keys before its attention.",
        f"{_V4_BACKEND}.store_cache(self, layer_id, swa_k, forward_batch)",
    ),
    _V4.requirement(
        "indexer",
        "A prefill's selection.",
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
        "pool-window", "The window's cache of a layer.", f"{_V4_POOL}.get_swa_key_buffer_radix(self, layer_id)"
    ),
    _V4.requirement(
        "pool-extra", "The compressed cache of a layer.", f"{_V4_POOL}.get_extra_key_buffer(self, layer_id)"
    ),
    _V4.requirement(
        "pool-extra-page",
        "Entries of a page of the compressed cache.",
        f"{_V4_POOL}.get_extra_key_page_size(self, layer_id)",
    ),
    _V4.requirement(
        "pool-indexer", "The indexer's cache of a layer.", f"{_V4_POOL}.get_index_k_with_scale_buffer(self, layer_id)"
    ),
    _V4.requirement(
        "pool-window-page",
        "Tokens of a page of the window's cache; before, a field of the window's pool.",
        {">=0.5.22": f"{_V4_POOL}.get_swa_key_page_size(self)"},
    ),
    _V4.requirement(
        "pool-record",
        "Bytes of a token in the window's cache; before, a field of the window's pool.",
        {">=0.5.21": f"{_V4_POOL}.get_swa_key_bytes_per_token(self)"},
    ),
    _V4.requirement(
        "draft-decode",
        "Speculative decoding builds its backends here without the registry, importing the class when it is called; "
        "the target's backend is built before.",
        "speculative.draft_utils:DraftBackendFactory._create_dsv4_decode_backend(self)",
    ),
    _V4.requirement(
        "draft-prefill",
        "As for draft-decode, for the draft model's prefill.",
        "speculative.draft_utils:DraftBackendFactory._create_dsv4_prefill_backend(self)",
    ),
    _V4.requirement(
        "draft-steps",
        "Holds one backend a draft step; it takes the class from its module's globals, so it gets the plugin's.",
        "class layers.attention.deepseek_v4_backend:DeepseekV4MultiStepBackend(self, model_runner, topk, "
        "speculative_num_steps)",
    ),
)

V4 = (
    _V4.change(
        "backend",
        "startup.backend:make_v4",
        "DeepSeek-V4's attention backend: prefills of any number of rows by the plan's route, and selections whose "
        "logits are bounded.",
        "SGLang's prefill takes any number of rows by the quickest route, with bounded memory",
        f"class {_V4_BACKEND}(self, model_runner)",
        upstream="sglang #25418, #25502",
    ),
)

BACKENDS = ENABLED + V4
"""The attention backends' classes, in whose place the plugin's stand."""

# What the class of the backend has to have is looked up before the plugin's stands in its place.
PATCHES = BOOTSTRAP + SCHEDULER + REQUIREMENTS + ENABLED + GPU + V4_ENTRY + V4_REQUIREMENTS + V4
