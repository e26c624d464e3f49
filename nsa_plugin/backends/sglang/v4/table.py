"""SGLang's V4 backend class as the plugin builds on it: checked against the ledger before the plugin extends it.

SGLang has DeepSeek-V4 since 0.5.12, on the class `deepseek_v4_backend:DeepseekV4AttnBackend` (`dsv4`). Signatures only
grew at their end, except that 0.5.21 split `forward` in two: an outer function of `*args, **kwargs` that also commits a
window of V4.1, and `_forward_attention` with the earlier arguments. Until 0.5.14 both preparations of the indexer also
took `token_to_kv_pool` and returned the cache as a third value.
"""

from __future__ import annotations

import inspect

from nsa_plugin.errors import PatchError
from nsa_plugin.patches.ledger import TURN_OFF
from nsa_plugin.patches.sglang import V4_EVERY, V4_METHODS

ATTENTION = ("_forward_attention", "forward")
"""The method that attends: the first that the class has."""

POOL = ("get_swa_key_buffer_radix", "get_extra_key_buffer", "get_extra_key_page_size", "get_index_k_with_scale_buffer")
"""Methods of `DeepSeekV4TokenToKVPool` that the adapter calls, each with a layer_id."""

SLOTS = ("swa_page_indices", "c4_sparse_page_indices", "c128_page_indices")
"""Fields of `DSV4AttnMetadata` with the slots that each query token attends to. The window's row is the token's slot,
then backwards, padded with -1 (`BuildCausalSwaPageIndices`). `page_table` [query tokens, pages] repeats a request's
pages of 256 tokens for each of its tokens; a page has the same number in the compressed caches, where it has 64 (c4) or
2 (c128) entries."""


def check_class(original: type) -> str:
    """Return the name of the method that attends, after checking the class against the ledger's requirements.

    Raises:
        PatchError: the class differs from them, so SGLang would not call the plugin's method as expected.
    """
    attention = next((name for name in ATTENTION if hasattr(original, name)), None)
    problems = [] if attention else ["no " + " or ".join(ATTENTION)]
    for target in V4_METHODS:
        name, params = target.attributes[-1], target.params[1:]
        method = getattr(original, name, None)
        if method is None:
            if target.versions == V4_EVERY:
                problems.append(f"no {name}")
        elif name == attention or name not in ATTENTION:
            found = tuple(inspect.signature(method).parameters)[1:]
            if found[: len(params)] != params:
                problems.append(f"{name}({', '.join(found)}), expected it to begin with ({', '.join(params)})")
    if problems or attention is None:
        raise PatchError(f"SGLang's {original.__name__} has {'; '.join(problems)}. {TURN_OFF}")
    return attention
