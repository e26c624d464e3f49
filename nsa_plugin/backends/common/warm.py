"""Warm-up: run the plugin's kernels once before an engine captures a graph or serves.

A kernel that does not compile or load then fails at start-up, not in a capture or a batch. Code specialised to a
batch's shape is built later, since engines run each batch before they capture it. The warm-up also keeps buffers that
outlive a call (`cuda.sparse_mla`'s records) out of a graph's memory pool.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

import torch

from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.decision.indexer import UNPAGED
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.errors import NoProviderError
from nsa_plugin.kernels.checks import FP8_DTYPE
from nsa_plugin.kernels.kv_cache import PagedCache, allocate_cache
from nsa_plugin.kernels.selector import default_selector
from nsa_plugin.kernels.shard_indices import KvShard
from nsa_plugin.kernels.topk import Request
from nsa_plugin.patches.ledger import TURN_OFF

PAGE_SIZE = 64
ROWS = 4
SELECTED = 64
WHOLE_ROWS = 512
MANY_ROWS = 2048
"""More than `kernels.triton.kv_cache.FEW_ROWS`."""
DENSE = "triton"
"""The provider of dense attention where the engine has no kernel for it."""
MANY_KEYS = 16384
"""More than the indexer without logits gathers without a sampled threshold."""


def hash_triton() -> threading.Thread | None:
    """Let Triton hash its own files in a thread, while the process waits for its GPU.

    Triton's first launch in a process hashes its compiler, about 500 MB, for the keys of its cache: 0.4 s. It keeps the
    result. hashlib lets other threads run meanwhile.

    Returns:
        The thread; None where the function was not found, so that the first launch hashes.
    """
    try:
        key = import_module("triton.runtime.cache").triton_key
    except Exception:  # of a Triton that the warm-up will report, or that has the function elsewhere
        return None

    def run() -> None:
        with suppress(Exception):  # the first launch reports it
            key()

    thread = threading.Thread(target=run, name="nsa_plugin_triton", daemon=True)
    thread.start()
    return thread


def warm(kernels: Iterable[tuple[str, str]], providers: Providers, model: ModelShape, device: torch.device) -> None:
    """Run each kernel once on a few query tokens and wait for it.

    Args:
        kernels: (op, provider) of sparse attention.
        providers: of the backend.
        model: has the heads, the row dimensions and the number of selected tokens.
        device: of the backend.

    Raises:
        NoProviderError: a kernel does not run on this device; says which and why.
    """
    (d_qk, d_v), cache = model.row_dims, _zeros(model, device)
    named = min(SELECTED, model.index_topk)
    for count in row_counts(device):
        q = torch.zeros(count, model.attended_heads, d_qk, dtype=torch.bfloat16, device=device)
        slots = torch.full((count, model.index_topk), -1, dtype=torch.int32, device=device)
        slots[:, :named] = torch.arange(named, dtype=torch.int32, device=device)
        given: dict[str, Any] = {"scale": 1.0, "d_v": d_v}
        if model.dcp_size > 1:
            given["topk_length"] = torch.full((count,), named, dtype=torch.int32, device=device)
        for op, name in sorted(kernels):
            expect_zeros(f"{name}'s {op}", partial(providers.attend, op, name, q, cache, slots, **given))


def row_counts(device: torch.device) -> tuple[int, ...]:
    """Query tokens to run a kernel with: few, and on a GPU many.

    Triton's kernel splits the keys of few query tokens over programs, and is compiled anew for many.
    """
    return (ROWS, WHOLE_ROWS) if device.type == "cuda" else (ROWS,)


def warm_selection(providers: Providers, model: ModelShape, device: torch.device, *, page_size: int = 1) -> None:
    """As `warm`, for the kernels that turn a prefill's logits into a selection.

    Args:
        page_size: of the block tables that turn positions into slots; kernels are compiled for it.

    Raises:
        NoProviderError: as `warm`.
    """
    topk = model.index_topk
    logits = torch.arange(2.0 * topk, device=device).repeat(ROWS, 1)
    starts = torch.zeros(ROWS, dtype=torch.int32, device=device)
    ends = torch.full_like(starts, logits.shape[1])

    def missed() -> torch.Tensor:
        chosen = default_selector(device, topk)(logits, starts, ends, topk)
        rows = providers.helper("index_transform_ragged")(chosen, starts)
        table = torch.arange(-(-logits.shape[1] // page_size), dtype=torch.int32, device=device).repeat(ROWS, 1)
        paged = providers.helper("index_transform_paged")
        slots = paged(chosen, table, page_size=page_size, row_to_request=torch.arange(ROWS, device=device).int())
        # The logits ascend, and both transforms map positions to themselves.
        wanted = torch.arange(topk, logits.shape[1], device=device)
        return torch.stack([found.sort(1).values != wanted for found in (chosen, rows, slots)])

    expect_zeros("the top-k of a prefill", missed, "it does not select the largest logits")


def warm_shard(
    providers: Providers, model: ModelShape, device: torch.device, *, page_size: int, interleave: int
) -> None:
    """As `warm`, for one rank's slots of a selection.

    Raises:
        NoProviderError: as `warm`.
    """
    chosen = torch.arange(model.index_topk, dtype=torch.int32, device=device).repeat(ROWS, 1)
    table = torch.zeros((1, -(-model.index_topk // page_size)), dtype=torch.int32, device=device)
    table[0] = torch.arange(table.shape[1])
    owners = torch.zeros(ROWS, dtype=torch.int32, device=device)

    def missed() -> torch.Tensor:
        found = torch.zeros(ROWS, dtype=torch.int64, device=device)
        for rank in range(model.dcp_size):
            part = KvShard(model.dcp_size, rank, interleave)
            transform = providers.helper("index_transform_shard")
            found += transform(chosen, table, part, page_size=page_size, row_to_request=owners).counts
        return found != model.index_topk

    expect_zeros("a rank's slots of a selection", missed, "the ranks do not have every selected token once")


def warm_logits(names: Iterable[str], providers: Providers, model: ModelShape, device: torch.device) -> None:
    """As `warm`, for the kernels that score and select for a prefill: one with one request, and one with two, for which
    DeepGEMM has another kernel.

    Args:
        names: providers of `indexer_topk`; they take `requests`.

    Raises:
        NoProviderError: as `warm`.
    """
    topk, count = model.index_topk, 2 * model.index_topk
    heads, dim, half = model.index_n_heads, model.index_head_dim, ROWS // 2
    q = torch.ones(ROWS, heads, dim, device=device).to(FP8_DTYPE)
    weights = torch.ones(ROWS, heads, device=device)
    keys = torch.ones(2 * count, dim, device=device).to(FP8_DTYPE)
    scales = torch.arange(1.0, 1.0 + count, device=device).repeat(2)
    one, two = [(0, ROWS, 0, count)], [(0, half, 0, count), (half, ROWS, count, 2 * count)]

    def missed(name: str, requests: list[Request]) -> torch.Tensor:
        starts = torch.zeros(ROWS, dtype=torch.int32, device=device)
        for first, end, first_key, _ in requests:
            starts[first:end] = first_key
        of_keys = slice(0, len(requests) * count)
        select = providers.load("indexer_topk", name)
        chosen = select(q, keys[of_keys], scales[of_keys], weights, starts, starts + count, topk, requests=requests)
        # The logits ascend within a request.
        return chosen.sort(1).values != torch.arange(topk, count, device=device)  # type: ignore[no-any-return]

    for name in sorted(names):
        for requests in (one, two):
            what = f"{name}'s selection of a prefill"
            expect_zeros(what, partial(missed, name, requests), "it does not select the largest logits")


def warm_unpaged(providers: Providers, model: ModelShape, device: torch.device) -> None:
    """As `warm`, for the indexer that keeps no logits: equal keys, of which it selects the first.

    Raises:
        NoProviderError: as `warm`.
    """
    select = providers.load("indexer_topk", UNPAGED)
    q = torch.zeros(ROWS, model.index_n_heads, model.index_head_dim, device=device).to(FP8_DTYPE)
    starts = torch.zeros(ROWS, dtype=torch.int32, device=device)
    ends = torch.full_like(starts, MANY_KEYS)

    def missed() -> torch.Tensor:
        keys = torch.zeros(MANY_KEYS, model.index_head_dim, device=device).to(FP8_DTYPE)
        weights = torch.ones(ROWS, model.index_n_heads, device=device)
        chosen = select(q, keys, None, weights, starts, ends, model.index_topk)
        return chosen != torch.arange(model.index_topk, device=device)

    expect_zeros("the selection of a long prefill", missed, "of equal keys it does not select the first")


def warm_dense(providers: Providers, model: ModelShape, device: torch.device) -> None:
    """As `warm`, for Triton's dense attention of short prompts: of a few query tokens, and of many.

    Raises:
        NoProviderError: as `warm`.
    """
    heads, (d_qk, d_v) = model.heads_per_rank, model.mha_dims

    def missed(count: int) -> torch.Tensor:
        q, k = torch.zeros(2, count, heads, d_qk, dtype=torch.bfloat16, device=device)
        # As engines project them: a part of each head's keys and values.
        kv = torch.ones(count, heads, model.qk_nope_head_dim + d_v, dtype=torch.bfloat16, device=device)
        v = kv[:, :, model.qk_nope_head_dim :]
        bounds = torch.tensor([0, count], dtype=torch.int32, device=device)
        lengths = {"max_seqlen_q": count, "max_seqlen_k": count}
        out: torch.Tensor = providers.load("mha_one_shot", DENSE)(q, k, v, bounds, bounds, scale=1.0, **lengths).out
        return out != 1  # the average of ones

    for count in row_counts(device):
        expect_zeros(f"{DENSE}'s mha_one_shot", partial(missed, count))


def warm_reading(providers: Providers, model: ModelShape, device: torch.device) -> None:
    """As `warm`, for reading a cached prefix: few and many rows, which different kernels read.

    Raises:
        NoProviderError: as `warm`.
    """
    read, cache = providers.helper("kv_cache_read"), _zeros(model, device)
    for count in (ROWS, MANY_ROWS):
        slots = torch.zeros(count, dtype=torch.int64, device=device)
        expect_zeros("reading the KV cache", partial(read, cache, slots, dtype=torch.bfloat16))


def _zeros(model: ModelShape, device: torch.device) -> PagedCache:
    """Allocate a cache of the model's layout, of two pages of zeros."""
    dim = model.row_dims[0] if model.kv_layout == "bf16" else None
    return allocate_cache(model.kv_layout, 2, PAGE_SIZE, dim=dim, device=device)


def expect_zeros(
    what: str, run: Callable[[], torch.Tensor], otherwise: str = "its output over a cache of zeros is not zero"
) -> None:
    """Run kernels and wait for them.

    Args:
        what: the kernels, for the error.
        run: returns zeros (or False) unless a kernel is wrong.
        otherwise: what is wrong then, for the error.

    Raises:
        NoProviderError: they fail, or not all is zero.
    """
    try:
        zero = not bool(run().any())
    except Exception as error:  # from the compiler, the driver or CUDA
        raise refusal(what, repr(error)) from error
    if not zero:
        raise refusal(what, otherwise)


def warmed_in(seconds: float) -> dict[str, str]:
    """Say for the start-up report what the warm-up took; nothing without one."""
    return {"warm-up": f"the plugin's kernels ran once, in {seconds:.1f} s"} if seconds else {}


def refusal(what: str, why: str) -> NoProviderError:
    """Return the error of a kernel that failed or gave a wrong result."""
    return NoProviderError(f"nsa-plugin's kernels do not run on this device: {what}: {why}. {TURN_OFF}")
