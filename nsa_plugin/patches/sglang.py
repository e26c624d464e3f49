"""The ledger of SGLang: every object of it that the plugin changes, or builds on, version by version.

SGLang renamed NSA to DSA in 0.5.13; the old modules that are left (`nsa_backend`, until 0.5.20) raise when
they are imported, so no target goes through them.

DeepSeek-V4 (0.5.12 on) has a backend of its own, `dsv4`, whose module SGLang imports only to build one: so does the
plugin, by way of the registry's entry. What it changes and builds on there is `GPU_V4`, of which the method's names and
parameters are those of `backends.sglang.v4_table`.
"""

from __future__ import annotations

from nsa_plugin.patches.ledger import Kind, Need, Patch, Target

ENGINE = "sglang"
SUPPORTED = ">=0.5.11,<0.5.24"

_SRT = "sglang.srt"
_HOOKS = "nsa_plugin.backends.sglang.startup.hooks"
_NSA = ">=0.5.11,<0.5.13"
_DSA = ">=0.5.13"
# Open at the top: a newer SGLang is to be told that it is not supported, and that takes these.
_ANY = ">=0.5.11"

_NSA_BACKEND = f"{_SRT}.layers.attention.nsa_backend:NativeSparseAttnBackend"
_DSA_BACKEND = f"{_SRT}.layers.attention.dsa_backend:DeepseekSparseAttnBackend"

BOOTSTRAP = (
    Patch(
        name="sglang.flags",
        engine=ENGINE,
        need=Need.BOOTSTRAP,
        targets=(Target(path=f"{_SRT}.server_args:ServerArgs.add_cli_args", params=("parser",), versions=_ANY),),
        replacement=f"{_HOOKS}:wrap_add_cli_args",
        why="SGLang has no hook for a plugin's own flags.",
        remove_when="SGLang lets a plugin declare flags",
    ),
    Patch(
        name="sglang.flag-values",
        engine=ENGINE,
        need=Need.BOOTSTRAP,
        targets=(Target(path=f"{_SRT}.server_args:ServerArgs.from_cli_args", params=("args",), versions=_ANY),),
        replacement=f"{_HOOKS}:wrap_from_cli_args",
        why="Flags that are not fields of ServerArgs are dropped here; the plugin's are kept for the schedulers.",
        remove_when="SGLang lets a plugin declare flags",
    ),
    Patch(
        name="sglang.gate",
        engine=ENGINE,
        need=Need.BOOTSTRAP,
        targets=(
            Target(
                path=f"{_SRT}.server_args:ServerArgs.__post_init__",
                params=("self",),
                versions=">=0.5.11,<0.5.19",
            ),
            Target(path=f"{_SRT}.server_args:ServerArgs.resolve_once", params=("self",), versions=">=0.5.19"),
        ),
        replacement=f"{_HOOKS}:wrap_resolve",
        why="SGLang logs and forgets what a plugin raises while it is loaded. Every way to a running engine passes "
        "here, outside that net and before a process is started: the settings and the ledger are checked here.",
        remove_when="SGLang lets a plugin refuse to start",
    ),
)

SCHEDULER = (
    Patch(
        name="sglang.scheduler",
        engine=ENGINE,
        need=Need.BOOTSTRAP,
        targets=(
            Target(
                path=f"{_SRT}.managers.scheduler:Scheduler.__init__",
                params=("self", "server_args", "port_args"),
                versions=_ANY,
            ),
        ),
        replacement=f"{_HOOKS}:wrap_scheduler_init",
        why="The first place in a scheduler process outside the net that swallows a plugin's errors, and before the "
        "model is built: the other patches are applied and verified here.",
        remove_when="SGLang lets a plugin refuse to start",
    ),
)

ENABLED = (
    Patch(
        name="sglang.backend",
        engine=ENGINE,
        need=Need.ENABLED,
        targets=(
            Target(path=_NSA_BACKEND, kind=Kind.CLASS, params=("self", "model_runner"), versions=_NSA),
            Target(path=_DSA_BACKEND, kind=Kind.CLASS, params=("self", "model_runner"), versions=_DSA),
        ),
        replacement="nsa_plugin.backends.sglang.startup.backend:make",
        why="The attention backend of DeepSeek sparse attention. Its registered name stays, because SGLang keys the "
        "model's MLA route and its speculative workers on that name; every user of the class imports it from here "
        "when it builds one.",
        upstream="sglang #12788, #13544, #13646",
        remove_when="SGLang takes the decisions of these changes itself",
    ),
)


def _requirement(name: str, need: Need, why: str, *targets: Target) -> Patch:
    return Patch(name=f"sglang.{name}", engine=ENGINE, need=need, targets=targets, why=why)


def _method(name: str, *params: str, only: str = "") -> tuple[Target, ...]:
    """A method of the attention backend, before and after the renaming; {x} in the name is nsa or dsa.

    Args:
        only: the side of the renaming that has it, where the other has none.
    """
    return tuple(
        Target(path=f"{backend}.{name.format(x=x)}", params=("self", *params), versions=versions)
        for backend, x, versions in ((_NSA_BACKEND, "nsa", _NSA), (_DSA_BACKEND, "dsa", _DSA))
        if only in ("", versions)
    )


def _renamed(module: str, name: str, *params: str, kind: Kind = Kind.FUNCTION) -> tuple[Target, ...]:
    """An object whose module and name carry nsa, then dsa, at each {x}."""
    return tuple(
        Target(path=f"{_SRT}.{module.format(x=x)}:{name.format(x=x)}", params=params, kind=kind, versions=versions)
        for x, versions in (("nsa", _NSA), ("dsa", _DSA))
    )


_CAPTURED_BEFORE, _CAPTURED = ">=0.5.11,<0.5.14", ">=0.5.14"
_RUNNER_UTILS = f"{_SRT}.model_executor.runner_backend_utils"

GPU = (
    Patch(
        name="sglang.indexer-ragged",
        engine=ENGINE,
        need=Need.GPU,
        targets=_renamed(
            "layers.attention.{x}.{x}_indexer",
            "Indexer._get_topk_ragged",
            *("self", "enable_dual_stream", "forward_batch", "layer_id", "q_fp8", "weights", "metadata"),
        ),
        replacement="nsa_plugin.backends.sglang.v32.indexer:wrap_topk_ragged",
        why="A prefill's selection: SGLang scores every row against the keys of every request of the batch; the plugin "
        "scores each against its own request's, as many rows at once as the plan says.",
        upstream="sglang #13646, #39095",
        remove_when="SGLang's logits are no wider than a request and bounded by the free memory",
    ),
    Patch(
        name="sglang.prefill-graph",
        engine=ENGINE,
        need=Need.GPU,
        targets=(
            Target(
                path=f"{_SRT}.model_executor.runner.prefill_cuda_graph_runner:PrefillCudaGraphRunner.can_run_graph",
                params=("self", "forward_batch"),
                versions=">=0.5.17",
            ),
        ),
        replacement="nsa_plugin.backends.sglang.v32.prefill_graph:wrap_can_run_graph",
        why="A prefill that is replayed from a graph is always sparse; where the user gives mha_max_kv, one that the "
        "plan makes dense runs eagerly. Before 0.5.17 prefills of these models are not captured.",
        upstream="sglang #12788",
        remove_when="SGLang captures dense prefills too",
    ),
)

_REGISTRY = "layers.attention.attention_registry"
_FORWARD = ("q", "k", "v", "layer", "forward_batch", "save_kv_cache", "q_rope", "k_rope", "topk_indices")

REQUIREMENTS = (
    _requirement(
        "registered",
        Need.ENABLED,
        "The model runner builds the backend through this entry, which imports the class when it is called.",
        *_renamed(_REGISTRY, "ATTENTION_BACKENDS[{x}]", "runner"),
    ),
    _requirement(
        "registered-alias",
        Need.ENABLED,
        "--attention-backend nsa still works after the renaming and leads to the same class.",
        Target(path=f"{_SRT}.{_REGISTRY}:ATTENTION_BACKENDS[nsa]", params=("runner",), versions=_DSA),
    ),
    _requirement(
        "draft-decode",
        Need.GPU,
        "Speculative decoding builds the backend here without the registry, importing the class when it is called.",
        *_renamed("speculative.draft_utils", "DraftBackendFactory._create_{x}_decode_backend", "self"),
    ),
    _requirement(
        "draft-prefill",
        Need.GPU,
        "As for draft-decode, for the draft model's prefill.",
        *_renamed("speculative.draft_utils", "DraftBackendFactory._create_{x}_prefill_backend", "self"),
    ),
    _requirement(
        "draft-steps",
        Need.GPU,
        "Holds one backend a draft step; it takes the class from its module's globals, so it gets the plugin's.",
        Target(
            path=f"{_SRT}.layers.attention.nsa_backend:NativeSparseAttnMultiStepBackend",
            kind=Kind.CLASS,
            params=("self", "model_runner", "topk", "speculative_num_steps"),
            versions=_NSA,
        ),
        Target(
            path=f"{_SRT}.layers.attention.dsa_backend:DeepseekSparseAttnMultiStepBackend",
            kind=Kind.CLASS,
            params=("self", "model_runner", "topk", "speculative_num_steps"),
            versions=_DSA,
        ),
    ),
    _requirement(
        "metadata",
        Need.GPU,
        "Prepares a batch: where one Plan a batch is made.",
        *_method("init_forward_metadata", "forward_batch"),
    ),
    _requirement(
        "metadata-out-graph",
        Need.GPU,
        "The part of the preparation that stays outside a CUDA graph; before 0.5.13 capture and replay had one each.",
        *_method("init_forward_metadata_out_graph", "forward_batch", "in_capture", only=_DSA),
    ),
    _requirement(
        "graph-metadata",
        Need.GPU,
        "Prepares a captured batch, at capture and at replay: its route is set before.",
        *_method(
            "_apply_cuda_graph_metadata",
            *("bs", "req_pool_indices", "seq_lens", "seq_lens_cpu", "forward_mode", "spec_info"),
            only=_DSA,
        ),
    ),
    _requirement(
        "graph-capture",
        Need.GPU,
        "As graph-metadata, at capture.",
        *_method(
            "init_forward_metadata_capture_cuda_graph",
            *("bs", "num_tokens", "req_pool_indices", "seq_lens", "encoder_lens", "forward_mode", "spec_info"),
            only=_NSA,
        ),
    ),
    _requirement(
        "graph-replay",
        Need.GPU,
        "As graph-metadata, at replay.",
        *_method(
            "init_forward_metadata_replay_cuda_graph",
            *("bs", "req_pool_indices", "seq_lens", "seq_lens_sum", "encoder_lens", "forward_mode", "spec_info"),
            only=_NSA,
        ),
    ),
    _requirement(
        "graph-precomputed",
        Need.GPU,
        "As graph-metadata, for the draft steps of speculative decoding.",
        *_method("init_forward_metadata_replay_cuda_graph_from_precomputed", *("bs", "precomputed", "forward_mode")),
    ),
    _requirement(
        "prefill-impl",
        Need.GPU,
        "Decides between dense MHA and a sparse kernel for a prefill batch.",
        *_method("set_{x}_prefill_impl", "forward_batch"),
    ),
    _requirement(
        "extend", Need.GPU, "Attention of prefill, verify and draft rows.", *_method("forward_extend", *_FORWARD)
    ),
    _requirement("decode", Need.GPU, "Attention of decode rows.", *_method("forward_decode", *_FORWARD)),
    _requirement(
        "dense",
        Need.GPU,
        "Dense MHA over a prefill's own keys.",
        *_method("_forward_standard_mha", "q", "k", "v", "layer", "forward_batch", "metadata"),
    ),
    _requirement(
        "flashmla-kv",
        Need.GPU,
        "The end of the path over fp8 pages: the plan's kernel runs in its place, with no padding of heads.",
        *_method(
            "_forward_flashmla_kv",
            *("q_all", "kv_cache", "v_head_dim", "sm_scale", "layer", "metadata", "page_table_1"),
        ),
    ),
    _requirement(
        "flashmla-schedule",
        Need.GPU,
        "FlashMLA's schedule, which is not made where the plugin's kernel attends.",
        *_method("_compute_flashmla_metadata", "cache_seqlens", "seq_len_q"),
    ),
    _requirement(
        "flashmla-sparse",
        Need.GPU,
        "The end of the path over bf16 rows, as flashmla-kv.",
        *_method("_forward_flashmla_sparse", "q_all", "kv_cache", "v_head_dim", "page_table_1", "sm_scale"),
    ),
    _requirement(
        "fa3",
        Need.GPU,
        "FlashAttention-3 over bf16 rows: the engine's own kernel, which only the deliberate fault of a test changes.",
        *_method("_forward_fa3", "q_rope", "kv_cache", "v_head_dim", "q_nope", "page_table", "sm_scale"),
    ),
    _requirement(
        "trtllm",
        Need.GPU,
        "The TRT-LLM kernels of decode, verify and draft rows.",
        *_method("_forward_trtllm", "q", "k", "v", "layer", "forward_batch", "seq_lens", "topk_indices"),
    ),
    _requirement(
        "pad-topk",
        Need.GPU,
        "Pads the selection to the rows that MLP-sync padded the batch to.",
        *_method("_pad_topk_indices", "topk_indices", "num_tokens"),
    ),
    _requirement(
        "indexer-metadata",
        Need.GPU,
        "What the backend hands the indexer, top-k included.",
        *_method("get_indexer_metadata", "layer_id", "forward_batch"),
    ),
    _requirement(
        "indexer-paged",
        Need.GPU,
        "The indexer's selection for decode, from the paged key cache.",
        *_renamed(
            "layers.attention.{x}.{x}_indexer",
            "Indexer._get_topk_paged",
            *("self", "forward_batch", "layer_id", "q_fp8", "weights", "metadata"),
        ),
    ),
    _requirement(
        "attention-group",
        Need.GPU,
        "The ranks that share a batch's heads: with token_shard they trade them for tokens.",
        Target(path=f"{_SRT}.distributed.parallel_state:get_attn_tp_group", versions=_ANY),
    ),
    _requirement(
        "breakable-graph",
        Need.GPU,
        "Whether a prefill is captured or replayed in pieces, around attention over fixed rows: no heads are traded.",
        Target(
            path=f"{_SRT}.model_executor.breakable_cuda_graph.context:is_in_breakable_cuda_graph",
            versions=_CAPTURED_BEFORE,
        ),
        Target(
            path=f"{_RUNNER_UTILS}.breakable_cuda_graph.context:is_in_breakable_cuda_graph",
            versions=_CAPTURED,
        ),
    ),
    _requirement(
        "piecewise-graph",
        Need.GPU,
        "As breakable-graph, where torch.compile makes the pieces.",
        Target(
            path=f"{_SRT}.compilation.piecewise_context_manager:is_in_piecewise_cuda_graph",
            versions=_CAPTURED_BEFORE,
        ),
        Target(
            path=f"{_RUNNER_UTILS}.tc_piecewise_cuda_graph.context_manager:is_in_tc_piecewise_cuda_graph",
            versions=_CAPTURED,
        ),
    ),
)

# ---------------------------------------------------------------------------------------------------
# DeepSeek-V4

_V4 = ">=0.5.12"
_V4_MODULE = f"{_SRT}.layers.attention.deepseek_v4_backend"
_V4_BACKEND = f"{_V4_MODULE}:DeepseekV4AttnBackend"
_V4_POOL = f"{_SRT}.mem_cache.deepseek_v4_memory_pool:DeepSeekV4TokenToKVPool"
_V4_INDEXER = f"{_SRT}.layers.attention.dsv4.indexer:C4IndexerBackendMixin"
_V4_FORWARD = ("q", "k", "v", "layer", "forward_batch", "compress_ratio", "save_kv_cache", "attn_sink")
_V4_PREPARED = ("x", "q_lora", "c4_indexer", "positions", "forward_batch")


def _of_v4(name: str, why: str, path: str, *params: str, versions: str = _V4, kind: Kind = Kind.FUNCTION) -> Patch:
    target = Target(path=path, params=params, versions=versions, kind=kind)
    return _requirement(f"v4-{name}", Need.GPU_V4, why, target)


V4_ENTRY = (
    Patch(
        name="sglang.v4-registered",
        engine=ENGINE,
        need=Need.GPU,
        targets=(Target(path=f"{_SRT}.{_REGISTRY}:ATTENTION_BACKENDS[dsv4]", params=("runner",), versions=_V4),),
        replacement=f"{_HOOKS}:wrap_v4_entry",
        why="The model runner builds DeepSeek-V4's backend through this entry, which imports the class when it is "
        "called: right before, the plugin takes the class's place. For another model nothing of V4 is imported.",
        remove_when="nsa-plugin needs no class of its own for DeepSeek-V4",
    ),
)

V4_REQUIREMENTS = (
    _of_v4(
        "attention",
        "Attention of every row; from 0.5.21 on the inner one of two.",
        f"{_V4_BACKEND}._forward_attention",
        *("self", *_V4_FORWARD),
        versions=">=0.5.21",
    ),
    _of_v4(
        "forward",
        "Attention of every row, before 0.5.21.",
        f"{_V4_BACKEND}.forward",
        *("self", *_V4_FORWARD),
        versions=">=0.5.12,<0.5.21",
    ),
    _of_v4(
        "metadata",
        "Prepares an eager batch: where a prefill's plan is made.",
        f"{_V4_BACKEND}.init_forward_metadata",
        *("self", "forward_batch"),
    ),
    _of_v4(
        "indexer-schedule",
        "Schedules SGLang's own paged logits; for more rows than the library's kernel takes, by SGLang's kernel.",
        f"{_V4_BACKEND}.init_forward_metadata_indexer",
        *("self", "core_attn_metadata"),
    ),
    _of_v4(
        "graph-replay",
        "Prepares a prefill whose graph breaks at attention: where its plan is made.",
        f"{_V4_BACKEND}.prepare_forward_metadata_for_breakable_cuda_graph_replay",
        *("self", "capture_metadata", "forward_batch", "static_forward_batch"),
        versions=">=0.5.13",
    ),
    _of_v4(
        "graph-capture",
        "As graph-replay, at capture, which is SGLang's own.",
        f"{_V4_BACKEND}.init_forward_metadata_for_breakable_cuda_graph_capture",
        *("self", "forward_batch"),
        versions=">=0.5.13",
    ),
    _of_v4(
        "step-replay",
        "Prepares a captured step to be replayed: where it is recorded.",
        f"{_V4_BACKEND}.init_forward_metadata_out_graph",
        *("self", "forward_batch", "in_capture"),
        versions=">=0.5.13",
    ),
    _of_v4(
        "step-replay-before",
        "As step-replay, in 0.5.12.",
        f"{_V4_BACKEND}.init_forward_metadata_replay_cuda_graph",
        *("self", "bs", "req_pool_indices", "seq_lens", "seq_lens_sum", "encoder_lens", "forward_mode"),
        versions=">=0.5.12,<0.5.13",
    ),
    _of_v4(
        "tables",
        "Whether SGLang makes the tables of its route over bf16 rows.",
        f"{_V4_BACKEND}._use_sparse_prefill",
        *("self", "forward_batch", "num_qo_tokens"),
        versions=">=0.5.22",
    ),
    _of_v4(
        "store",
        "Stores a layer's keys before its attention.",
        f"{_V4_BACKEND}.store_cache",
        *("self", "layer_id", "swa_k", "forward_batch"),
    ),
    _of_v4(
        "indexer",
        "A prefill's selection.",
        f"{_V4_INDEXER}.forward_c4_indexer",
        *("self", "x", "q_lora", "c4_indexer", "forward_batch", "alt_streams", "enable_multi_stream", "q_lora_ready"),
    ),
    _of_v4(
        "indexer-prepare",
        "The indexer's queries and weights; stores its keys.",
        f"{_V4_INDEXER}._forward_prepare_normal",
        *("self", *_V4_PREPARED),
    ),
    _of_v4(
        "indexer-prepare-streams",
        "As indexer-prepare, on several streams.",
        f"{_V4_INDEXER}._forward_prepare_multi_stream",
        *("self", *_V4_PREPARED),
    ),
    *(
        _of_v4(f"pool-{name}", why, f"{_V4_POOL}.{method}", "self", "layer_id")
        for name, method, why in (
            ("window", "get_swa_key_buffer_radix", "The window's cache of a layer."),
            ("extra", "get_extra_key_buffer", "The compressed cache of a layer."),
            ("extra-page", "get_extra_key_page_size", "Entries of a page of the compressed cache."),
            ("indexer", "get_index_k_with_scale_buffer", "The indexer's cache of a layer."),
        )
    ),
    _of_v4(
        "pool-window-page",
        "Tokens of a page of the window's cache; before, a field of the window's pool.",
        f"{_V4_POOL}.get_swa_key_page_size",
        "self",
        versions=">=0.5.22",
    ),
    _of_v4(
        "pool-record",
        "Bytes of a token in the window's cache; before, a field of the window's pool.",
        f"{_V4_POOL}.get_swa_key_bytes_per_token",
        "self",
        versions=">=0.5.21",
    ),
    _of_v4(
        "draft-decode",
        "Speculative decoding builds its backends here without the registry, importing the class when it is called; "
        "the target's backend is built before.",
        f"{_SRT}.speculative.draft_utils:DraftBackendFactory._create_dsv4_decode_backend",
        "self",
    ),
    _of_v4(
        "draft-prefill",
        "As for draft-decode, for the draft model's prefill.",
        f"{_SRT}.speculative.draft_utils:DraftBackendFactory._create_dsv4_prefill_backend",
        "self",
    ),
    _of_v4(
        "draft-steps",
        "Holds one backend a draft step; it takes the class from its module's globals, so it gets the plugin's.",
        f"{_V4_MODULE}:DeepseekV4MultiStepBackend",
        *("self", "model_runner", "topk", "speculative_num_steps"),
        kind=Kind.CLASS,
    ),
)

V4 = (
    Patch(
        name="sglang.v4-backend",
        engine=ENGINE,
        need=Need.GPU_V4,
        targets=(Target(path=_V4_BACKEND, kind=Kind.CLASS, params=("self", "model_runner"), versions=_V4),),
        replacement="nsa_plugin.backends.sglang.startup.backend:make_v4",
        why="DeepSeek-V4's attention backend: prefills of any number of rows by the plan's route, and selections whose "
        "logits are bounded.",
        upstream="sglang #25418, #25502",
        remove_when="SGLang's prefill takes any number of rows by the quickest route, with bounded memory",
    ),
)

BACKENDS = ENABLED + V4
"""The attention backends' classes, in whose place the plugin's stand."""

# What the class of the backend has to have is looked up before the plugin's stands in its place.
PATCHES = BOOTSTRAP + SCHEDULER + REQUIREMENTS + ENABLED + GPU + V4_ENTRY + V4_REQUIREMENTS + V4
