"""Cases of sparse MLA for every provider: arguments by keyword, and how a result is compared.

Every cache is NaN (0xFF bytes) but for the slots that a counted, valid entry names, so that reading
anything else shows. Row 0 of a case has no valid entry, and its length, if it has one, is not 0.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from nsa_plugin.kernels.cuda import sparse_mla
from nsa_plugin.kernels.kv_cache import PagedCache, allocate_cache, open_cache, reference_write
from nsa_plugin.kernels.sparse_mla import DecodeOutput, PrefillOutput
from nsa_plugin.kernels.triton.device import DeviceFacts
from nsa_plugin.layouts import Fp8Layout, get_layout
from nsa_plugin.libraries.architectures import shared_memory_per_block

from .oracles import INT_MAX, INT_MIN

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIMS = {"rows": 576, "bf16": 576, "v32_fp8": 576, "v4_fp8": 512}
HOST_TOKENS, HOST_TOPK = 5, 70
INVALID = (INT_MIN, -123456, -1, "end", INT_MAX)

# Bytes between the pages of a cache that do not belong to it.
PAGE_GAP = 576 * 16

# Absolute and relative tolerance of the output, of a bfloat16 result.
PREFILL_TOLERANCE = (8e-4, 3.01 / 128)
DECODE_TOLERANCE = (1e-3, 2.01 / 128)
COSINE_DISTANCE = 7e-6
STATISTIC_TOLERANCE = (1e-6, 8.01 / 65536)


def portable_forms() -> list[tuple[str, sparse_mla.Variant]]:
    """Layouts and the forms of the CUDA kernel for older GPUs that take them."""
    variants = sparse_mla.PORTABLE_VARIANTS
    return [(layout, one) for layout in ("v32_fp8", "v4_fp8") for one in variants if one.takes(layout)]


def generator(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed), device=DEVICE).to(dtype)


def make_indices(rows: int, topk: int, slots: int, seed: int, first: int = 0, share: float = 0.2) -> torch.Tensor:
    """[rows, topk] int32: slots from `first` on, some twice; a share of every invalid value; row 0 all invalid."""
    made = generator(seed)
    indices = torch.randint(first, slots, (rows, topk), generator=made, device=DEVICE)
    candidates = torch.tensor([slots if value == "end" else value for value in INVALID], device=DEVICE)
    bad = candidates[torch.randint(len(candidates), (rows, topk), generator=made, device=DEVICE)]
    drop = torch.rand(rows, topk, generator=made, device=DEVICE) < share
    drop[:1] = True
    return torch.where(drop, bad, indices).int()


def make_lengths(shape: tuple[int, ...], topk: int, seed: int) -> torch.Tensor:
    """int32 lengths from 0 to topk; of several, one is 0 and one topk."""
    lengths = torch.randint(0, topk + 1, shape, generator=generator(seed), device=DEVICE, dtype=torch.int32)
    flat = lengths.view(-1)
    flat[:1] = topk
    flat[1:2] = 0
    return lengths


def make_sink(heads: int, seed: int) -> torch.Tensor:
    """[heads] float32; of several heads, one sink is +inf and one -inf."""
    sink = 2 * randn(heads, seed=seed, dtype=torch.float32)
    sink[1:2] = math.inf
    sink[2:3] = -math.inf
    return sink


def counted(indices: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """The entries that lie before their row's length, the others -1: indices [..., topk], lengths [...]."""
    if lengths is None:
        return indices
    return torch.where(torch.arange(indices.shape[-1], device=DEVICE) < lengths.unsqueeze(-1), indices, -1)


def make_cache(
    layout: str, slots: int, page_size: int, used: torch.Tensor, seed: int, dim: int | None = None, gap: int = PAGE_GAP
) -> PagedCache:
    """A cache with `gap` bytes between its pages, NaN but for the valid slots among `used`."""
    spec, pages = get_layout(layout), slots // page_size
    if isinstance(spec, Fp8Layout):
        memory = torch.full((pages, spec.page_bytes(page_size) + gap), 0xFF, dtype=torch.uint8, device=DEVICE)
        cache = open_cache(memory, spec, page_size)
    else:
        shape = (pages, page_size + gap // 1152, dim or DIMS[layout])
        cache = open_cache(torch.full(shape, math.nan, dtype=torch.bfloat16, device=DEVICE)[:, :page_size], spec)
    named = used[(used >= 0) & (used < slots)].unique()
    reference_write(cache, randn(len(named), cache.dim, seed=seed) / 4, named)
    return cache


def make_rows(slots: int, dim: int, used: torch.Tensor, seed: int) -> torch.Tensor:
    """bfloat16 rows [slots, 1, dim], NaN but for the valid ones among `used`."""
    return make_cache("bf16", slots, 1, used, seed, dim, gap=0).data


def facts_of(sm: int) -> DeviceFacts:
    """Those of a GPU of an SM version, with as much L2 cache as an A100 has."""
    return DeviceFacts(sms=100, architecture=sm, shared_memory=shared_memory_per_block(sm), l2_cache=40 << 20)


def host_arguments(heads: int, **changes: Any) -> dict[str, Any]:
    """Arguments of a prefill on the CPU, which a CUDA kernel would take on a GPU but for those changed."""
    made = {
        "q": torch.zeros(HOST_TOKENS, heads, 576, dtype=torch.bfloat16),
        "kv": allocate_cache("v32_fp8", 2, 64),
        "indices": torch.zeros(HOST_TOKENS, HOST_TOPK, dtype=torch.int32),
        "scale": 0.1,
    }
    return made | changes


def prefill_case(
    *,
    tokens: int,
    heads: int,
    slots: int,
    topk: int,
    layout: str = "rows",
    dim: int | None = None,
    page_size: int = 64,
    with_length: bool = True,
    with_sink: bool = True,
    extra: tuple[str, int, int, int] | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of a prefill.

    Args:
        layout: of the cache; "rows": a plain tensor.
        dim: of plain rows or a plain cache.
        slots, topk, page_size: of the cache.
        extra: layout, slots, topk and page size of a second cache.
    """
    dim = dim or DIMS[layout]
    case: dict[str, Any] = {"q": randn(tokens, heads, dim, seed=seed + 1), "scale": dim**-0.5}
    if with_sink:
        case["attn_sink"] = make_sink(heads, seed + 2)
    scopes = [("", layout, slots, topk, page_size)]
    if extra is not None:
        scopes.append(("extra_", *extra))
    for number, (prefix, kind, many, width, size) in enumerate(scopes):
        indices = make_indices(tokens, width, many, seed + 10 * number + 3)
        lengths = make_lengths((tokens,), width, seed + 10 * number + 4) if with_length else None
        used = counted(indices, lengths)
        case[f"{prefix}indices"] = indices
        case[f"{prefix}topk_length"] = lengths
        if kind == "rows":
            case[f"{prefix}kv"] = make_rows(many, dim, used, seed + 10 * number + 5)
        else:
            case[f"{prefix}kv"] = make_cache(kind, many, size, used, seed + 10 * number + 5, dim)
    return case


def decode_case(
    *,
    batch: int,
    s_q: int,
    heads: int,
    layout: str,
    slots: int,
    topk: int,
    page_size: int = 64,
    with_length: bool = True,
    length_per_query: bool = False,
    with_sink: bool = True,
    extra: tuple[str, int, int, int] | None = None,
    dim: int | None = None,
    seed: int = 0,
    first: int = 0,
    gap: int = PAGE_GAP,
) -> dict[str, Any]:
    """Arguments of a decode.

    Args:
        slots, topk, page_size: of the cache; `first`: the least slot that an index names.
        length_per_query: lengths [batch, s_q], not [batch].
        extra: layout, slots, topk and page size of a second cache.
        dim: of a plain cache.
        gap: see `make_cache`.
    """
    dim = dim or DIMS[layout]
    case: dict[str, Any] = {"q": randn(batch, s_q, heads, dim, seed=seed + 1), "scale": dim**-0.5}
    if with_sink:
        case["attn_sink"] = make_sink(heads, seed + 2)
    scopes = [("", layout, slots, topk, page_size)]
    if extra is not None:
        scopes.append(("extra_", *extra))
    for number, (prefix, kind, many, width, size) in enumerate(scopes):
        indices = make_indices(batch * s_q, width, many, seed + 10 * number + 3, first).view(batch, s_q, width)
        lengths = None
        if with_length:
            lengths = make_lengths((batch, s_q) if length_per_query else (batch,), width, seed + 10 * number + 4)
        by_query = lengths if lengths is None or length_per_query else lengths.unsqueeze(1)
        used = counted(indices, by_query)
        case[f"{prefix}indices"] = indices
        case[f"{prefix}topk_length"] = lengths
        case[f"{prefix}cache"] = make_cache(kind, many, size, used, seed + 10 * number + 5, dim, gap)
    return case


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values on the same device behind strides that are not the dense ones, with NaN or junk between."""
    fill = math.nan if tensor.is_floating_point() else 77
    wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), fill, dtype=tensor.dtype, device=tensor.device)
    view = wide[..., 1::2]
    return view.copy_(tensor)


def layouts_of(case: dict[str, Any]) -> set[str]:
    """The layouts that a case has, "rows" for a plain tensor."""
    found = [case.get(name) for name in ("kv", "extra_kv", "cache", "extra_cache")]
    return {kv.layout.name if isinstance(kv, PagedCache) else "rows" for kv in found if kv is not None}


def some_tokens(case: dict[str, Any], rows: torch.Tensor) -> dict[str, Any]:
    """A prefill case of some of its tokens alone."""
    by_token = ("q", "indices", "topk_length", "extra_indices", "extra_topk_length")
    return {name: value[rows] if name in by_token and value is not None else value for name, value in case.items()}


def assert_out(actual: torch.Tensor, expected: torch.Tensor, tolerance: tuple[float, float]) -> None:
    assert actual.shape == expected.shape
    actual, expected = actual.float(), expected.float()
    assert not expected.isnan().any()
    torch.testing.assert_close(actual, expected, atol=tolerance[0], rtol=tolerance[1])
    pair = actual.double().flatten(), expected.double().flatten()
    if pair[1].any():
        assert 1 - float(torch.nn.functional.cosine_similarity(*pair, dim=0)) < COSINE_DISTANCE


def assert_statistic(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """lse or max_logits: infinities in the same places, of the same sign."""
    assert actual.shape == expected.shape
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=STATISTIC_TOLERANCE[0], rtol=STATISTIC_TOLERANCE[1])


def assert_same(
    actual: PrefillOutput | DecodeOutput,
    expected: PrefillOutput | DecodeOutput,
    tolerance: tuple[float, float] | None = None,
) -> None:
    """Compare a result with the reference's, by default within the op's tolerance for bfloat16."""
    default = PREFILL_TOLERANCE if isinstance(expected, PrefillOutput) else DECODE_TOLERANCE
    assert_out(actual.out, expected.out, tolerance or default)
    assert_statistic(actual.lse, expected.lse)
    if isinstance(expected, PrefillOutput):
        assert isinstance(actual, PrefillOutput)
        assert_statistic(actual.max_logits, expected.max_logits)
