"""What the V4 adapter overrides of SGLang, and what it builds on: the one table, by version.

SGLang has DeepSeek-V4 since 0.5.12, on a backend of its own, `deepseek_v4_backend:DeepseekV4AttnBackend` (`dsv4`),
whose name never changed. Signatures only ever grew at their end, except that 0.5.21 split `forward` in two: an outer
one of `*args, **kwargs` that also commits a window of V4.1's, and `_forward_attention` with the arguments of before.

A parameter list here is what the method's has to begin with, `self` left out.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from nsa_plugin.errors import PatchError
from nsa_plugin.patches.ledger import TURN_OFF

BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend:DeepseekV4AttnBackend"
SINCE = ">=0.5.12"


@dataclass(frozen=True)
class Override:
    """A method of the engine's backend class that the adapter stands in front of.

    Attributes:
        name: the method.
        params: what its parameters begin with, from `versions` on.
        why: what the adapter does there.
        versions: where the engine has it in this form.
    """

    name: str
    params: tuple[str, ...]
    why: str
    versions: str = SINCE


_ATTENTION = ("q", "k", "v", "layer", "forward_batch", "compress_ratio", "save_kv_cache", "attn_sink")

ATTENTION = (
    Override("_forward_attention", _ATTENTION, "attends by the plan's route", ">=0.5.21"),
    Override("forward", _ATTENTION, "attends by the plan's route", ">=0.5.12,<0.5.21"),
)
"""The function that attends: the first that the class has."""

OVERRIDES = (
    Override("init_forward_metadata", ("forward_batch",), "one plan for each eager prefill"),
    Override(
        "forward_c4_indexer",
        ("x", "q_lora", "c4_indexer", "forward_batch", "alt_streams", "enable_multi_stream", "q_lora_ready"),
        "the selection, with no more logits at once than the plan says",
    ),
    Override(
        "init_forward_metadata_indexer",
        ("core_attn_metadata",),
        "schedules for any number of rows where the library's own scheduling kernel has a limit",
    ),
)
"""What every version has; `skip_compressor` (0.5.13) and `q_lora_quant` (0.5.23) of the indexer are handed through."""

OPTIONAL = (
    Override(
        "prepare_forward_metadata_for_breakable_cuda_graph_replay",
        ("capture_metadata", "forward_batch", "static_forward_batch"),
        "one plan for each prefill whose graph breaks at attention",
        ">=0.5.13",
    ),
    Override(
        "init_forward_metadata_for_breakable_cuda_graph_capture",
        ("forward_batch",),
        "a graph is captured with the engine's own kernels",
        ">=0.5.13",
    ),
    Override(
        "_use_sparse_prefill",
        ("forward_batch", "num_qo_tokens"),
        "no tables for the engine's route where a plan has another",
        ">=0.5.22",
    ),
    Override(
        "init_forward_metadata_out_graph",
        ("forward_batch", "in_capture"),
        "records a step that is replayed, where steps have plans",
        ">=0.5.13",
    ),
    Override(
        "init_forward_metadata_replay_cuda_graph",
        ("bs", "req_pool_indices", "seq_lens", "seq_lens_sum", "encoder_lens", "forward_mode"),
        "records a step that is replayed, where steps have plans",
        ">=0.5.12,<0.5.13",
    ),
)
"""What only some versions have."""

READS = (
    ("_forward_prepare_normal", ("x", "q_lora", "c4_indexer", "positions", "forward_batch"), SINCE),
    ("_forward_prepare_multi_stream", ("x", "q_lora", "c4_indexer", "positions", "forward_batch"), SINCE),
    ("store_cache", ("layer_id", "swa_k", "forward_batch"), SINCE),
)
"""Methods that the adapter calls: (name, what the parameters begin with, versions). Until 0.5.14 both preparations took
`token_to_kv_pool` besides and returned the cache as a third value."""

POOL = ("get_swa_key_buffer_radix", "get_extra_key_buffer", "get_extra_key_page_size", "get_index_k_with_scale_buffer")
"""Methods that the adapter calls of `DeepSeekV4TokenToKVPool`, each with a layer_id."""

SLOTS = ("swa_page_indices", "c4_sparse_page_indices", "c128_page_indices")
"""Fields of `DSV4AttnMetadata` with the slots that each row attends to."""

CORE = ("page_table", "swa_page_indices", "swa_topk_lengths", "c4_sparse_page_indices", "c4_sparse_topk_lengths")
"""Fields that the adapter reads of `DSV4AttnMetadata`, besides c128_page_indices, c128_topk_lengths_clamp1, positions
and, from 0.5.13 on, c4_sparse_raw_indices. A row of the window is the query's own slot first, then backwards, -1
behind (`BuildCausalSwaPageIndices`); page_table [rows, pages] repeats the request's pages of 256 tokens in each of its
rows, and a page has the same number in the compressed caches, where it holds 64 (c4) or 2 (c128) entries."""


def check_class(original: type) -> str:
    """The name of the method that attends, once everything else is seen to be there.

    Raises:
        PatchError: the class is not as the table has it; nobody would call the plugin's method, or not as it expects.
    """
    attention = next((entry for entry in ATTENTION if hasattr(original, entry.name)), None)
    problems = [] if attention else ["no " + " or ".join(entry.name for entry in ATTENTION)]
    required = [(entry.name, entry.params) for entry in OVERRIDES] + [(name, params) for name, params, _ in READS]
    present = [(entry.name, entry.params) for entry in OPTIONAL if hasattr(original, entry.name)]
    for name, params in (*required, *present, *([(attention.name, attention.params)] if attention else [])):
        method = getattr(original, name, None)
        if method is None:
            problems.append(f"no {name}")
            continue
        found = tuple(inspect.signature(method).parameters)[1:]
        if found[: len(params)] != params:
            problems.append(f"{name}({', '.join(found)}), expected it to begin with ({', '.join(params)})")
    if problems or attention is None:
        raise PatchError(f"SGLang's {original.__name__} has {'; '.join(problems)}. {TURN_OFF}")
    return attention.name
