"""Layer code for SGLang on GPUs of the portable path: SM80, SM86, SM89 and SM120.

SGLang builds its `dsa` backend there, and every plan names a kernel of the plugin. `select_steps` replaces SGLang's
selection for decode, verify and draft steps; `indexer.wrap_topk_ragged` selects for prefills, as on other GPUs.
`attend_dense` replaces SGLang's dense kernel, and `rules_for` says which batches may take it. On GPUs without fp8
instructions (SM80, SM86) `quantize` and `write` replace the two Triton kernels of SGLang that need them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.common.warm import DENSE, MANY_ROWS, PAGE_SIZE, ROWS, expect_zeros
from nsa_plugin.backends.sglang.v32.batch import ShortPrompts
from nsa_plugin.backends.sglang.v32.indexer import Selection, is_fused
from nsa_plugin.backends.sglang.v32.routes import NO_DENSE_BESIDE_DRAFTS, SglangPlanner
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.errors import PatchError
from nsa_plugin.kernels.kv_cache import allocate_cache, open_cache
from nsa_plugin.libraries.architectures import FIRST_WITH_FP8
from nsa_plugin.patches.ledger import TURN_OFF

PROVIDER = "triton"
KEYS = "indexer_fp8"
NOTED = "nsa_plugin_dense"
"""Attribute of a prefill: whether it attends densely."""
DENSE_SM = 90
"""An SM version with which SGLang's rules allow dense attention."""
NO_FP8_PREFIX = "SGLang reads the prefix of an fp8 cache with a kernel that needs fp8 instructions"


def no_schedule(context_lens: torch.Tensor, block_size: int, num_sms: int) -> torch.Tensor:
    """Return a tensor like DeepGEMM's schedule, int32 [num_sms + 1, 2], which nothing reads."""
    return torch.zeros(num_sms + 1, 2, dtype=torch.int32, device=context_lens.device)


def no_dense(planner: SglangPlanner, forward_batch: Any) -> str:
    """Return why a prefill does not attend densely, whatever SGLang's rules say; "" if they decide."""
    if getattr(forward_batch, "spec_info", None) is not None:
        return NO_DENSE_BESIDE_DRAFTS
    if isinstance(forward_batch, ShortPrompts):  # the plugin reads a split batch's prefixes
        return ""
    has_prefix = any(getattr(forward_batch, "extend_prefix_lens_cpu", None) or ())
    needs_fp8 = has_prefix and planner.model.fp8_cache and planner.device.sm < FIRST_WITH_FP8
    return NO_FP8_PREFIX if needs_fp8 else ""


@contextmanager
def rules_for(backend: Any, *, dense: bool) -> Iterator[None]:
    """Let SGLang's rules on dense attention see a GPU with its kernel, or without one.

    They ask for SM90 or SM100; the plugin's kernel runs elsewhere as well. From 0.5.20 on the backend keeps the
    function that tells them; before, they import it from `sglang.srt.utils`, where it stands for the whole process as
    long as the rules run.
    """
    name = "_get_device_sm"
    place = backend if hasattr(backend, name) else importlib.import_module("sglang.srt.utils")
    name = name if place is backend else "get_device_sm"
    kept = getattr(place, name)
    setattr(place, name, lambda: DENSE_SM if dense else 0)
    try:
        yield
    finally:
        setattr(place, name, kept)


def note_dense(forward_batch: Any, dense: bool) -> None:
    """Note for `is_dense` whether a prefill attends densely."""
    setattr(forward_batch, NOTED, dense)


def is_dense(forward_batch: Any) -> bool:
    return bool(getattr(forward_batch, NOTED, False))


def attend_dense(
    providers: Providers, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, metadata: Any
) -> torch.Tensor:
    """Attend a prefill densely and causally: [tokens, heads, v_head_dim].

    Args:
        q, k, v: of any shape [tokens, ...] with the layer's heads; q may have padding after the last request.
        metadata: SGLang's, with the boundaries and the longest lengths of the requests.
    """
    out: torch.Tensor = providers.load("mha_one_shot", DENSE)(
        q.view(-1, layer.tp_q_head_num, layer.head_dim),
        k.view(-1, layer.tp_k_head_num, layer.head_dim),
        v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
        metadata.cu_seqlens_q,
        metadata.cu_seqlens_k,
        scale=layer.scaling,
        max_seqlen_q=metadata.max_seq_len_q,
        max_seqlen_k=metadata.max_seq_len_k,
    ).out
    return out


def select_steps(
    selection: Selection,
    indexer: Any,
    q: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    metadata: Any,
) -> torch.Tensor:
    """Select for the query tokens of decode, verify and draft steps.

    Args:
        q: [n, heads, dim] fp8, padding included.
        keys: the layer's indexer cache, uint8 [pages, page_size * (dim + 4)].
        weights: [n, heads, 1] float32.
        lengths: int32 [query tokens], keys that each sees.
        metadata: SGLang's, of the batch.

    Returns:
        int32 [n, topk]: slots, or positions if SGLang transforms them later; -1 where there is no key.

    Raises:
        PatchError: SGLang was told to force tokens into the selection.
    """
    if indexer.num_init_tokens or indexer.num_local_tokens:
        raise PatchError(
            f"the model forces its first or last tokens into the selection, which the portable path lacks. {TURN_OFF}"
        )
    table, topk = metadata.get_page_table_64(), indexer.index_topk
    rows = min(len(lengths), len(table), len(q))
    cache = open_cache(keys.view(keys.shape[0], PAGE_SIZE, -1), KEYS)
    out = torch.full((len(q), topk), -1, dtype=torch.int32, device=q.device)
    score = selection.providers.load("indexer_topk_paged", PROVIDER)
    positions = score(
        q[:rows].unsqueeze(1),
        cache,
        weights[:rows].squeeze(-1).float(),
        lengths[:rows].int(),
        table[:rows],
        topk,
        rows_per_chunk=selection.plan.indexer.rows_per_chunk or None,
        out=None if is_fused(metadata) else out[:rows],
    )
    if is_fused(metadata):
        own = torch.arange(rows, dtype=torch.int32, device=q.device)
        paged = selection.providers.helper("index_transform_paged")
        out[:rows] = paged(positions, table, page_size=PAGE_SIZE, row_to_request=own)
    return out


def quantize(x: torch.Tensor, providers: Providers) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the last dimension of x with scales that are powers of two: fp8 codes, and scales [..., 1] float32."""
    rows = x.view(-1, 1, x.shape[-1])
    ones = torch.ones(len(rows), 1, dtype=torch.float32, device=x.device)
    # The op rotates queries first. Here the angle is 0.
    positions = torch.zeros(len(rows), dtype=torch.int64, device=x.device)
    cos_sin = torch.cat([torch.ones(1, 32, device=x.device), torch.zeros(1, 32, device=x.device)], dim=-1)
    codes, scales = providers.helper("indexer_queries")(rows, ones, positions, cos_sin, scale=1.0, interleaved=False)
    return codes.view(x.shape), scales.view(*x.shape[:-1], 1)


def write(
    providers: Providers, buffer: torch.Tensor, loc: torch.Tensor, nope: torch.Tensor, rope: torch.Tensor
) -> None:
    """Quantise new entries into a layer's fp8 cache.

    Args:
        buffer: the layer's cache, [slots, 1, 656] bytes.
        loc: [n] slots.
        nope, rope: [n, 1, 512] and [n, 1, 64] or without the 1.
    """
    cache = open_cache(buffer.view(torch.uint8).view(len(buffer), 1, 1, -1), "v32_fp8")
    providers.helper("kv_cache_write")(cache, nope.flatten(1), loc, rope=rope.flatten(1))


def warm_portable(providers: Providers, model: ModelShape, device: torch.device) -> None:
    """Run the kernels of this module but the dense one once; see `common.warm`.

    Raises:
        NoProviderError: a kernel does not run on this device; says which and why.
    """
    heads, dim, topk = model.index_n_heads, model.index_head_dim, model.index_topk
    keys = allocate_cache(KEYS, 2, PAGE_SIZE, device=device)
    table = torch.zeros(ROWS, 2, dtype=torch.int32, device=device)
    lengths = torch.full((ROWS,), PAGE_SIZE, dtype=torch.int32, device=device)

    def step() -> torch.Tensor:
        q = quantize(torch.zeros(ROWS, heads, dim, dtype=torch.bfloat16, device=device), providers)[0]
        weights = torch.zeros(ROWS, heads, device=device)
        found: torch.Tensor = providers.load("indexer_topk_paged", PROVIDER)(
            q.unsqueeze(1), keys, weights, lengths, table, topk
        )
        paged = providers.helper("index_transform_paged")
        return paged(found, table, page_size=PAGE_SIZE, row_to_request=lengths * 0) >= PAGE_SIZE  # type: ignore[no-any-return]

    expect_zeros("the indexer's selection for a step", step)
    if providers.sm >= FIRST_WITH_FP8 or model.kv_layout != "v32_fp8":
        return
    main = allocate_cache("v32_fp8", MANY_ROWS // PAGE_SIZE, PAGE_SIZE, device=device)

    def written(count: int) -> torch.Tensor:
        slots = torch.arange(count, device=device)
        nope = torch.zeros(count, 512, dtype=torch.bfloat16, device=device)
        write(providers, main.data.view(-1, 1, 656), slots, nope, nope[:, :64])
        found: torch.Tensor = providers.helper("kv_cache_read")(main, slots, dtype=torch.bfloat16)
        return found

    for count in (ROWS, MANY_ROWS):
        expect_zeros("writing the KV cache", partial(written, count))
