"""SGLang methods that the V4 adapter overrides or calls, by version.

SGLang has DeepSeek-V4 since 0.5.12, on the backend class `deepseek_v4_backend:DeepseekV4AttnBackend` (`dsv4`).
Signatures only grew at their end, except that 0.5.21 split `forward` in two: an outer function of `*args, **kwargs`
that also commits a window of V4.1, and `_forward_attention` with the earlier arguments.

Every entry is a method: (name, the first parameters without `self`, the versions that have it in this form).
"""

from __future__ import annotations

import inspect

from nsa_plugin.errors import PatchError
from nsa_plugin.patches.ledger import TURN_OFF

SINCE = ">=0.5.12"

_ATTENTION = ("q", "k", "v", "layer", "forward_batch", "compress_ratio", "save_kv_cache", "attn_sink")
_C4_INDEXER = ("x", "q_lora", "c4_indexer", "forward_batch", "alt_streams", "enable_multi_stream", "q_lora_ready")
_CAPTURE = "init_forward_metadata_for_breakable_cuda_graph_capture"
_REPLAY = "prepare_forward_metadata_for_breakable_cuda_graph_replay"
_REPLAY_PARAMS = ("bs", "req_pool_indices", "seq_lens", "seq_lens_sum", "encoder_lens", "forward_mode")
_PREPARE = ("x", "q_lora", "c4_indexer", "positions", "forward_batch")

ATTENTION = (("_forward_attention", _ATTENTION, ">=0.5.21"), ("forward", _ATTENTION, ">=0.5.12,<0.5.21"))
"""The function that attends: the first that the class has."""

OVERRIDES = (
    ("init_forward_metadata", ("forward_batch",), SINCE),
    ("forward_c4_indexer", _C4_INDEXER, SINCE),
    ("init_forward_metadata_indexer", ("core_attn_metadata",), SINCE),
)
"""Overridden in every version. The indexer's later parameters `skip_compressor` (0.5.13) and `q_lora_quant` (0.5.23)
are passed through."""

OPTIONAL = (
    (_REPLAY, ("capture_metadata", "forward_batch", "static_forward_batch"), ">=0.5.13"),
    (_CAPTURE, ("forward_batch",), ">=0.5.13"),
    ("_use_sparse_prefill", ("forward_batch", "num_qo_tokens"), ">=0.5.22"),
    ("init_forward_metadata_out_graph", ("forward_batch", "in_capture"), ">=0.5.13"),
    ("init_forward_metadata_replay_cuda_graph", _REPLAY_PARAMS, ">=0.5.12,<0.5.13"),
)
"""Overridden in the versions that have them."""

READS = (
    ("_forward_prepare_normal", _PREPARE, SINCE),
    ("_forward_prepare_multi_stream", _PREPARE, SINCE),
    ("store_cache", ("layer_id", "swa_k", "forward_batch"), SINCE),
)
"""Methods that the adapter calls. Until 0.5.14 both preparations also took `token_to_kv_pool` and returned the cache as
a third value."""

POOL = ("get_swa_key_buffer_radix", "get_extra_key_buffer", "get_extra_key_page_size", "get_index_k_with_scale_buffer")
"""Methods of `DeepSeekV4TokenToKVPool` that the adapter calls, each with a layer_id."""

SLOTS = ("swa_page_indices", "c4_sparse_page_indices", "c128_page_indices")
"""Fields of `DSV4AttnMetadata` with the slots that each query token attends to. The window's row is the token's slot,
then backwards, padded with -1 (`BuildCausalSwaPageIndices`). `page_table` [query tokens, pages] repeats a request's
pages of 256 tokens for each of its tokens; a page has the same number in the compressed caches, where it has 64 (c4) or
2 (c128) entries."""


def check_class(original: type) -> str:
    """Return the name of the method that attends, after checking every entry of the tables.

    Raises:
        PatchError: the class differs from the tables, so SGLang would not call the plugin's method as expected.
    """
    attention = next((entry for entry in ATTENTION if hasattr(original, entry[0])), None)
    problems = [] if attention else ["no " + " or ".join(name for name, *_ in ATTENTION)]
    present = [entry for entry in (*OPTIONAL, attention) if entry and hasattr(original, entry[0])]
    for name, params, _ in (*OVERRIDES, *READS, *present):
        method = getattr(original, name, None)
        if method is None:
            problems.append(f"no {name}")
            continue
        found = tuple(inspect.signature(method).parameters)[1:]
        if found[: len(params)] != params:
            problems.append(f"{name}({', '.join(found)}), expected it to begin with ({', '.join(params)})")
    if problems or attention is None:
        raise PatchError(f"SGLang's {original.__name__} has {'; '.join(problems)}. {TURN_OFF}")
    return attention[0]
