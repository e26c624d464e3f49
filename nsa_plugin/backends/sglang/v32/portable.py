"""Layer code for SGLang on GPUs that FlashMLA and DeepGEMM do not support: SM80, SM86 and SM89.

SGLang builds its `dsa` backend there, and every plan names a kernel of the plugin. `select_steps` replaces SGLang's
selection for decode, verify and draft steps; `indexer.wrap_topk_ragged` selects for prefills, as on other GPUs. On GPUs
without fp8 instructions (SM80, SM86) `quantize` and `write` replace the two Triton kernels of SGLang that need them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.common.warm import MANY_ROWS, PAGE_SIZE, ROWS, expect_zeros
from nsa_plugin.backends.sglang.v32.indexer import Selection, is_fused
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.errors import PatchError
from nsa_plugin.kernels.kv_cache import allocate_cache, open_cache
from nsa_plugin.libraries.architectures import FIRST_WITH_FP8
from nsa_plugin.patches.ledger import TURN_OFF

PROVIDER = "triton"
KEYS = "indexer_fp8"


def no_schedule(context_lens: torch.Tensor, block_size: int, num_sms: int) -> torch.Tensor:
    """Return a tensor like DeepGEMM's schedule, int32 [num_sms + 1, 2], which nothing reads."""
    return torch.zeros(num_sms + 1, 2, dtype=torch.int32, device=context_lens.device)


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
    """Run the kernels of this module on zeros.

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
