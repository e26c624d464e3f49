"""The references against the libraries whose contracts they state, on a GPU.

flash_mla (sgl-flash-mla 1.0.0, the kernels that its `use_legacy=True` selects) and deep_gemm
(sgl-deep-gemm 0.1.4.post1) read caches that `kv_cache` wrote, so equal results prove the byte layouts;
equal lse and max_logits prove their units. Each library's own restrictions are respected: 64 or 128
heads, top-k in multiples of 128, only -1 as an invalid index in decode, and for V3.2 records no
topk_length and no extra cache.
"""

from __future__ import annotations

import importlib
import math
from types import ModuleType

import pytest
import torch

from nsa_plugin.kernels.index_transform import request_slots
from nsa_plugin.kernels.indexer import fold_weights, quantize, reference_logits, reference_paged_logits
from nsa_plugin.kernels.kv_cache import PagedCache, open_cache, reference_read, reference_write
from nsa_plugin.kernels.sparse_mla import DecodeOutput, PrefillOutput, reference_decode, reference_prefill
from nsa_plugin.layouts import Fp8Layout, get_layout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

INVALID_PREFILL = [-(2**31), -123456, -1, "s_kv", 2**31 - 1]


def library(name: str) -> ModuleType:
    """An installed kernel library on an architecture that it has kernels for, or a skip with the reason."""
    major, minor = torch.cuda.get_device_capability()
    if major not in (9, 10):
        pytest.skip(f"{name} has these kernels for SM90 and SM100, not for SM{major}{minor}")
    try:
        module = importlib.import_module(name)
    except (ImportError, OSError) as error:
        pytest.skip(f"{name} does not import: {error}")
    if name == "flash_mla" and not module.has_legacy():
        pytest.skip("this flash_mla was built without its legacy kernels, which read these caches")
    return module


@pytest.fixture(autouse=True)
def exact_float32_matmul():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).cuda()


def make_indices(rows: int, topk: int, s_kv: int, seed: int, invalid: list, share: float = 0.2) -> torch.Tensor:
    """[rows, topk] int32 on the GPU: distinct rows in random order, a share replaced by invalid ones."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(rows, max(topk, s_kv), generator=generator).argsort(1)[:, :topk]
    candidates = torch.tensor([s_kv if value == "s_kv" else value for value in invalid])
    bad = candidates[torch.randint(len(candidates), (rows, topk), generator=generator)]
    drop = (torch.rand(rows, topk, generator=generator) < share) | (order >= s_kv)
    drop[0] = True  # a row without a valid key
    return torch.where(drop, bad, order).int().cuda()


def make_sink(heads: int, seed: int) -> torch.Tensor:
    sink = randn(heads, seed=seed, dtype=torch.float32)
    sink[0], sink[1] = math.inf, -math.inf
    return sink


def filled_cache(
    layout: str, num_pages: int, page_size: int, used: torch.Tensor, seed: int, power_of_two_scales: bool = True
) -> PagedCache:
    """A cache of 0xFF bytes (NaN in every field) but for the slots named in `used`."""
    spec = get_layout(layout)
    assert isinstance(spec, Fp8Layout)
    memory = torch.full((num_pages, spec.page_bytes(page_size)), 0xFF, dtype=torch.uint8, device="cuda")
    cache = open_cache(memory, spec, page_size)
    slots = used[used >= 0].unique()
    rows = randn(len(slots), spec.dim, seed=seed) / 4
    reference_write(cache, rows, slots, power_of_two_scales=power_of_two_scales)
    return cache


def assert_out(actual: torch.Tensor, expected: torch.Tensor, atol: float, rtol: float) -> None:
    actual, expected = actual.float(), expected.float()
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)
    pair = actual.double().flatten(), expected.double().flatten()
    similarity = torch.nn.functional.cosine_similarity(*pair, dim=0)
    assert 1 - float(similarity) < 7e-6


def assert_statistic(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=8.01 / 65536)


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("with_length", [False, True])
@pytest.mark.parametrize(("s_kv", "topk"), [(95, 128), (2048, 256)])
@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize("heads", [64, 128])
def test_sparse_prefill(heads, d_qk, s_kv, topk, with_length, with_sink):
    flash_mla = library("flash_mla")
    tokens = 62
    q, kv = randn(tokens, heads, d_qk, seed=1), randn(s_kv, 1, d_qk, seed=2) / 4
    indices = make_indices(tokens, topk, s_kv, 3, INVALID_PREFILL)
    generator = torch.Generator().manual_seed(4)
    length = torch.randint(0, topk + 1, (tokens,), generator=generator, dtype=torch.int32).cuda()
    length = length if with_length else None
    sink = make_sink(heads, 5) if with_sink else None
    scale = d_qk**-0.5

    expected = reference_prefill(
        q, kv, indices, scale=scale, topk_length=length, attn_sink=sink, out_dtype=torch.float32
    )
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(
        q, kv, indices.unsqueeze(1), scale, 512, attn_sink=sink, topk_length=length, use_legacy=True
    )
    assert_out(out, expected.out, atol=8e-4, rtol=3.01 / 128)
    assert_statistic(max_logits, expected.max_logits)
    assert_statistic(lse, expected.lse)
    assert lse[0].isposinf().all()
    assert max_logits[0].isneginf().all()


def flash_mla_decode(flash_mla: ModuleType, q, cache, indices, scale, sink, **extra) -> DecodeOutput:
    metadata, _ = flash_mla.get_mla_metadata()
    out, lse = flash_mla.flash_mla_with_kvcache(
        q,
        cache.as_records(),
        None,
        None,
        512,
        metadata,
        softmax_scale=scale,
        is_fp8_kvcache=True,
        indices=indices,
        attn_sink=sink,
        use_legacy=True,
        **extra,
    )
    return DecodeOutput(out, lse)


@pytest.mark.parametrize("power_of_two_scales", [True, False])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize(("batch", "s_q"), [(2, 1), (4, 3)])
@pytest.mark.parametrize("heads", [64, 128])
def test_v32_decode(heads, batch, s_q, with_sink, power_of_two_scales):
    flash_mla = library("flash_mla")
    topk, num_pages = 256, 24
    indices = make_indices(batch * s_q, topk, num_pages * 64, 3, [-1]).view(batch, s_q, topk)
    cache = filled_cache("v32_fp8", num_pages, 64, indices, 1, power_of_two_scales)
    q, scale = randn(batch, s_q, heads, 576, seed=2), 576**-0.5
    sink = make_sink(heads, 5) if with_sink else None

    expected = reference_decode(q, cache, indices, scale=scale, attn_sink=sink, out_dtype=torch.float32)
    actual = flash_mla_decode(flash_mla, q, cache, indices, scale, sink)
    assert actual.lse.shape == expected.lse.shape == (batch, heads, s_q)
    if power_of_two_scales:
        assert_out(actual.out, expected.out, atol=1e-3, rtol=2.01 / 128)
        assert_statistic(actual.lse, expected.lse)
    else:
        # The library rounds float32 scales to bfloat16, which moves a row by up to 2 ** -9 of itself.
        torch.testing.assert_close(actual.out.float(), expected.out, atol=4e-3, rtol=3 / 128)
        torch.testing.assert_close(actual.lse, expected.lse, atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize("with_extra", [False, True])
@pytest.mark.parametrize("with_length", [False, True])
@pytest.mark.parametrize(("page_size", "extra_page_size"), [(64, 64), (256, 64), (256, 2)])
@pytest.mark.parametrize(("batch", "s_q"), [(2, 1), (4, 3)])
@pytest.mark.parametrize("heads", [64, 128])
def test_v4_decode(heads, batch, s_q, page_size, extra_page_size, with_length, with_extra):
    flash_mla = library("flash_mla")
    window, selected, scale = 128, 512, 512**-0.5
    rows, num_slots, extra_slots = batch * s_q, 2048, 1024
    generator = torch.Generator().manual_seed(7)

    def scope(topk: int, slots: int, size: int, seed: int) -> tuple[PagedCache, torch.Tensor, torch.Tensor | None]:
        indices = make_indices(rows, topk, slots, seed, [-1]).view(batch, s_q, topk)
        if not with_length:
            return filled_cache("v4_fp8", slots // size, size, indices, seed), indices, None
        length = torch.randint(0, topk + 1, (batch,), generator=generator, dtype=torch.int32).cuda()
        length[0] = 0
        counted = torch.arange(topk, device="cuda") < length.view(batch, 1, 1)
        # What lies behind the length points into memory that holds NaN.
        used = torch.where(counted, indices, -1)
        return filled_cache("v4_fp8", slots // size, size, used, seed), indices, length

    cache, indices, length = scope(window, num_slots, page_size, 11)
    q, sink = randn(batch, s_q, heads, 512, seed=2), make_sink(heads, 5)
    ours: dict[str, object] = {"topk_length": length}
    theirs: dict[str, object] = {"topk_length": length}
    if with_extra:
        extra_cache, extra_indices, extra_length = scope(selected, extra_slots, extra_page_size, 13)
        ours |= {"extra_cache": extra_cache, "extra_indices": extra_indices, "extra_topk_length": extra_length}
        theirs |= {
            "extra_k_cache": extra_cache.as_records(),
            "extra_indices_in_kvcache": extra_indices,
            "extra_topk_length": extra_length,
        }

    expected = reference_decode(q, cache, indices, scale=scale, attn_sink=sink, out_dtype=torch.float32, **ours)
    actual = flash_mla_decode(flash_mla, q, cache, indices, scale, sink, **theirs)
    assert_out(actual.out, expected.out, atol=1e-3, rtol=2.01 / 128)
    assert_statistic(actual.lse, expected.lse)
    assert actual.lse[0, :, 0].isposinf().all()


@pytest.mark.parametrize("heads", [64, 128])
def test_v4_prefill_over_a_flat_workspace(heads):
    """Dequantised [window; selected] rows with combined indices are what two paged caches are together."""
    flash_mla = library("flash_mla")
    tokens, scale = 40, 512**-0.5
    window_slots, selected_slots = 1024, 512
    window = make_indices(tokens, 128, window_slots, 3, [-1])
    selected = make_indices(tokens, 512, selected_slots, 4, [-1])
    window_length = torch.arange(tokens, dtype=torch.int32, device="cuda") * 128 // (tokens - 1)
    selected_length = window_length.flip(0) * 4
    cache = filled_cache("v4_fp8", window_slots // 256, 256, window, 1)
    extra = filled_cache("v4_fp8", selected_slots // 64, 64, selected, 2)
    q, sink = randn(tokens, heads, 512, seed=5), make_sink(heads, 6)

    expected = reference_prefill(
        q,
        cache,
        window,
        scale=scale,
        topk_length=window_length,
        attn_sink=sink,
        extra_kv=extra,
        extra_indices=selected,
        extra_topk_length=selected_length,
        out_dtype=torch.float32,
    )
    workspace = torch.zeros(window_slots + selected_slots, 512, dtype=torch.bfloat16, device="cuda")
    for source, used, first in ((cache, window, 0), (extra, selected, window_slots)):
        slots = used[used >= 0].unique()
        workspace[first + slots.long()] = reference_read(source, slots)

    def counted(indices: torch.Tensor, lengths: torch.Tensor, first: int) -> torch.Tensor:
        kept = (indices >= 0) & (torch.arange(indices.shape[1], device="cuda") < lengths.unsqueeze(1))
        return torch.where(kept, indices + first, -1)

    combined = [counted(window, window_length, 0), counted(selected, selected_length, window_slots)]
    actual = PrefillOutput(
        *flash_mla.flash_mla_sparse_fwd(
            q,
            workspace.unsqueeze(1),
            torch.cat(combined, dim=1).unsqueeze(1),
            scale,
            512,
            attn_sink=sink,
            use_legacy=True,
        )
    )
    assert_out(actual.out, expected.out, atol=8e-4, rtol=3.01 / 128)
    assert_statistic(actual.max_logits, expected.max_logits)
    assert_statistic(actual.lse, expected.lse)


def relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """1 - 2xy / (xx + yy), DeepGEMM's own measure."""
    x, y = actual.double(), expected.double()
    return 1 - 2 * float((x * y).sum()) / float((x * x + y * y).sum())


def indexer_queries(rows: int, heads: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 queries [rows, heads, 128] and their folded weights [rows, heads]."""
    q, q_scale = quantize(randn(rows, heads, 128, seed=seed))
    gates = randn(rows, heads, seed=seed + 1, dtype=torch.float32)
    return q, fold_weights(gates, q_scale, 128**-0.5 * heads**-0.5)


@pytest.mark.parametrize(("rows", "keys"), [(1, 256), (300, 1000), (129, 4096)])
@pytest.mark.parametrize("heads", [32, 64])
def test_indexer_logits(heads, rows, keys):
    deep_gemm = library("deep_gemm")
    q, weights = indexer_queries(rows, heads, 1)
    k, k_scale = quantize(randn(keys, 128, seed=3))
    k_scale = k_scale.squeeze(1)
    bounds = torch.randint(0, keys + 1, (2, rows), generator=torch.Generator().manual_seed(4)).sort(0).values
    ks, ke = bounds.int().cuda()
    ks[0], ke[0] = 0, keys

    expected = reference_logits(q, k, k_scale, weights, ks, ke)
    actual = deep_gemm.fp8_mqa_logits(q, (k, k_scale), weights, ks, ke, clean_logits=True)
    assert actual.shape == expected.shape
    assert torch.equal(actual.isneginf(), expected.isneginf())
    seen = ~expected.isneginf()
    assert relative_difference(actual[seen], expected[seen]) < 1e-3


@pytest.mark.parametrize("next_n", [1, 2])
def test_paged_indexer_logits(next_n):
    deep_gemm = library("deep_gemm")
    heads, lengths = 64, [700, 65, 1, 1024]
    batch, pages = len(lengths), 16
    order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(1))
    table = order.view(batch, pages).int().cuda()
    used, _ = request_slots(table, torch.tensor(lengths, device="cuda"), 64)
    cache = filled_cache("indexer_fp8", batch * pages, 64, used, 2)
    q, weights = indexer_queries(batch * next_n, heads, 3)
    q = q.view(batch, next_n, heads, 128)
    behind = torch.arange(next_n - 1, -1, -1)
    seen = (torch.tensor(lengths).unsqueeze(1) - behind).clamp(min=1).int().cuda()

    expected = reference_paged_logits(q, cache, weights, seen, table, max_len=pages * 64)
    schedule = deep_gemm.get_paged_mqa_logits_metadata(seen, 64, deep_gemm.get_num_sms())
    actual = deep_gemm.fp8_paged_mqa_logits(
        q, cache.as_records(), weights, seen, table, schedule, pages * 64, clean_logits=False
    )
    inside = ~expected.isneginf()
    assert int(inside.sum()) == int(seen.sum())
    assert actual.shape == expected.shape
    assert relative_difference(actual[inside], expected[inside]) < 1e-3
