"""The indexer on a GPU: `topk_rows` of CUDA and Triton on hard rows, and the indexer over DeepGEMM and Triton.

Sets are compared with float64 references on the GPU; logits of different kernels may differ by 1e-3.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch

from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.common.warm import warm_logits
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.kernels.cuda.topk import topk_rows as cuda_topk_rows
from nsa_plugin.kernels.indexer import reference_logits, reference_paged_logits
from nsa_plugin.kernels.providers import deep_gemm as deep_gemm_provider
from nsa_plugin.kernels.topk import reference_topk_rows
from nsa_plugin.kernels.triton import indexer as triton_indexer
from nsa_plugin.kernels.triton.topk import topk_rows as triton_topk_rows
from tests.kernels.indexer_cases import (
    assert_selected,
    hard_rows,
    indexer_inputs,
    paged_keys,
    ragged_requests,
    schedule_oracle,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SELECTORS: dict[str, Callable[..., torch.Tensor]] = {"cuda": cuda_topk_rows, "triton": triton_topk_rows}
TOLERANCE = 1e-3
RERUNS = 20


@pytest.fixture(params=list(SELECTORS))
def select(request) -> Callable[..., torch.Tensor]:
    return SELECTORS[request.param]


def need_deep_gemm():
    major, minor = torch.cuda.get_device_capability()
    if major not in deep_gemm_provider.HEADS:
        pytest.skip(f"deep_gemm has these kernels for SM90 and SM100, not for SM{major}{minor}")
    try:
        return importlib.import_module("deep_gemm")
    except (ImportError, OSError) as error:
        pytest.skip(f"deep_gemm does not import: {error}")


@pytest.fixture(params=["triton", "deep_gemm"])
def provider(request):
    if request.param == "triton":
        return triton_indexer
    need_deep_gemm()
    return deep_gemm_provider


def spread(columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hard rows on the GPU in a buffer of odd row stride, with starts of every alignment, poison outside the ranges."""
    rows = torch.stack(list(hard_rows(columns).values())).cuda()
    starts = (torch.arange(len(rows), dtype=torch.int32) % 5).cuda()
    ends = torch.full_like(starts, columns) - torch.arange(len(rows), device="cuda").int() % 3
    wide = torch.full((len(rows), columns + 7), torch.inf, device="cuda")
    position = torch.arange(columns, device="cuda")
    inside = (position >= starts.unsqueeze(1)) & (position < ends.unsqueeze(1))
    wide[:, 2 : columns + 2] = torch.where(inside, rows, torch.inf)
    return wide[:, 2 : columns + 2], starts, ends


@pytest.mark.parametrize("topk", [1, 100, 512, 1024, 2048, 4096])
@pytest.mark.parametrize("columns", [3000, 8200, 20000, 131072, 300_001])
def test_topk_rows_on_hard_rows(select, columns, topk):
    logits, starts, ends = spread(columns)
    result = select(logits, starts, ends, topk)
    assert_selected(result, logits, starts, ends, topk)
    # Ascending and the lowest of a tie: all implementations give the same bits.
    assert torch.equal(result, reference_topk_rows(logits, starts, ends, topk))


@pytest.mark.parametrize("topk", [512, 2048])
def test_topk_rows_at_every_length(select, topk):
    lengths = [
        0,
        1,
        2,
        topk - 1,
        topk,
        topk + 1,
        topk + 2,
        8191,
        8192,
        8193,
        8194,
        8195,
        8196,
        12345,
        16384,
        65537,
        131072,
    ]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4 * len(lengths), 131072 + 4, generator=generator).cuda()
    starts = torch.arange(4, dtype=torch.int32).repeat_interleave(len(lengths)).cuda()
    ends = starts + torch.tensor(lengths, dtype=torch.int32).repeat(4).cuda()
    result = select(logits, starts, ends, topk)
    assert torch.equal(result, reference_topk_rows(logits, starts, ends, topk))


def test_topk_rows_of_many_rows(select):
    """Rows enough for several waves, some of them with ties that defeat a sampled threshold."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2000, 30000, generator=generator).cuda()
    logits[::7] = logits[::7].mul(2).round()
    starts = torch.randint(0, 100, (2000,), generator=generator).int().cuda()
    ends = torch.randint(0, 30001, (2000,), generator=generator).int().cuda()
    result = select(logits, starts, ends.maximum(starts), 2048)
    for rows in torch.arange(2000, device="cuda").split(200):
        part = (logits[rows], starts[rows], ends.maximum(starts)[rows], 2048)
        assert torch.equal(result[rows], reference_topk_rows(*part))


def test_topk_rows_reruns_are_identical(select):
    logits, starts, ends = spread(131072)
    first = select(logits, starts, ends, 2048)
    for _ in range(RERUNS):
        assert torch.equal(select(logits, starts, ends, 2048), first)


def test_topk_rows_clamps_ranges_and_takes_strides(select):
    logits = torch.randn(5, 20000, generator=torch.Generator().manual_seed(0)).cuda()
    starts = torch.tensor([-7, 30000, 15000, 3, 0]).cuda()
    ends = torch.tensor([20000, 40000, 99999, -(2**31), 12000]).cuda()
    clamped = reference_topk_rows(logits, starts.clamp(min=0), ends.clamp(0, 20000), 600)
    out = torch.full((5, 1200), 7, dtype=torch.int32, device="cuda")
    select(logits, starts, ends, 600, out=out[:, ::2])
    assert torch.equal(out[:, ::2], clamped)
    assert bool((out[:, 1::2] == 7).all())
    assert torch.equal(select(logits.t().contiguous().t(), starts, ends, 600), clamped)


def test_topk_rows_in_a_cuda_graph(select):
    logits, starts, ends = spread(20000)
    out = select(logits, starts, ends, 512)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        select(logits, starts, ends, 512, out=out)
    logits.copy_(logits.roll(1, 0))
    out.zero_()
    graph.replay()
    assert torch.equal(out, reference_topk_rows(logits, starts, ends, 512))


def check(result, q, k, k_scale, weights, ks, ke, topk):
    logits = reference_logits(q, k, k_scale, weights, ks, ke)
    assert_selected(result, logits, ks, ke, topk, TOLERANCE)


@pytest.mark.parametrize(("rows", "keys", "topk"), [(1, 256, 64), (300, 1000, 512), (129, 20000, 2048)])
@pytest.mark.parametrize("heads", [32, 64])
def test_indexer_topk(provider, select, heads, rows, keys, topk):
    inputs = indexer_inputs(rows, keys, heads, device="cuda")
    bounds = torch.randint(0, keys + 1, (2, rows), generator=torch.Generator().manual_seed(4)).sort(0).values
    ks, ke = bounds.int().cuda()
    ks[0], ke[0] = 0, keys
    ke[rows // 2 :: 10] = ks[rows // 2 :: 10] - 1
    ke.clamp_(min=0)
    result = provider.topk(*inputs, ks, ke, topk, selector=select)
    check(result, *inputs, ks, ke, topk)
    for rows_per_chunk in (1, 64) if rows < 200 else (64, 128):
        chunked = provider.topk(*inputs, ks, ke, topk, selector=select, rows_per_chunk=rows_per_chunk)
        assert torch.equal(chunked, result)


@pytest.mark.parametrize("heads", [1, 5, 16])
def test_indexer_topk_of_any_heads(heads):
    inputs = indexer_inputs(50, 3000, heads, device="cuda")
    ks, ke = torch.zeros(50, dtype=torch.int32, device="cuda"), torch.arange(2950, 3000, device="cuda").int()
    check(triton_indexer.topk(*inputs, ks, ke, 100), *inputs, ks, ke, 100)


@pytest.mark.parametrize("rows_per_chunk", [None, 16, 100])
def test_requests_are_scored_against_their_own_keys(provider, select, rows_per_chunk):
    requests, ks, ke = ragged_requests(
        [(40, 601), (0, 9), (1, 1403), (3, 3), (2, 0), (120, 5000), (7, 7), (33, 333)], device="cuda"
    )
    ks, ke = (torch.cat([bound, bound.new_zeros(5)]) for bound in (ks, ke))
    inputs = indexer_inputs(len(ks), 8000, 64, device="cuda")
    result = provider.topk(*inputs, ks, ke, 512, requests=requests, rows_per_chunk=rows_per_chunk, selector=select)
    check(result, *inputs, ks, ke, 512)
    assert torch.equal(result, provider.topk(*inputs, ks, ke, 512, selector=select))


@pytest.mark.parametrize(("heads", "topk"), [(64, 2048), (32, 2048), (64, 512)])
@pytest.mark.parametrize("name", ["triton", "deep_gemm"])
def test_the_warm_up_of_a_prefills_selection_holds(name, heads, topk):
    if name == "deep_gemm":
        need_deep_gemm()
    model = ModelShape(num_heads=16, kv_layout="v32_fp8", index_n_heads=heads, index_topk=topk)
    major, minor = torch.cuda.get_device_capability()
    warm_logits([name], Providers("v32_fp8", 10 * major + minor), model, torch.device("cuda"))


def test_poison_outside_the_ranges_has_no_influence(provider):
    q, k, k_scale, weights = indexer_inputs(64, 5000, 64, device="cuda")
    ks, ke = torch.full((64,), 100, device="cuda").int(), torch.arange(100, 4196, 64, device="cuda").int()
    clean = provider.topk(q, k, k_scale, weights, ks, ke, 300)
    k.view(torch.uint8)[:100] = k.view(torch.uint8)[4200:] = 0x7F
    k_scale[:100] = k_scale[4200:] = torch.nan
    assert torch.equal(provider.topk(q, k, k_scale, weights, ks, ke, 300), clean)


def test_indexer_reruns_are_identical(provider):
    inputs = indexer_inputs(200, 20000, 64, device="cuda")
    ks, ke = torch.zeros(200, dtype=torch.int32, device="cuda"), torch.arange(19800, 20000, device="cuda").int()
    first = provider.topk(*inputs, ks, ke, 2048)
    for _ in range(RERUNS):
        assert torch.equal(provider.topk(*inputs, ks, ke, 2048), first)


LENGTHS = [700, 65, 1, 0, 4096, -1, 2049, 64]


@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
@pytest.mark.parametrize("heads", [32, 64])
def test_paged_topk(provider, select, heads, next_n):
    cache, table = paged_keys(LENGTHS, 70, device="cuda")
    batch, topk = len(LENGTHS), 512
    q, _, _, weights = indexer_inputs(batch * next_n, 1, heads, device="cuda")
    q, lens = q.view(batch, next_n, heads, 128), torch.tensor(LENGTHS, device="cuda")
    logits = reference_paged_logits(q, cache, weights, lens, table, max_len=4096)
    seen = (~logits.isneginf()).sum(1)
    result = provider.paged_topk(q, cache, weights, lens, table, topk, selector=select)
    assert_selected(result, logits, torch.zeros_like(seen), seen, topk, TOLERANCE)
    for rows_per_chunk in (1, 5):
        chunked = provider.paged_topk(
            q, cache, weights, lens, table, topk, selector=select, rows_per_chunk=rows_per_chunk
        )
        assert torch.equal(chunked, result)
    assert torch.equal(provider.paged_topk(q, cache, weights, lens, table, topk, max_len=4096), result)


def test_paged_topk_in_a_cuda_graph(provider):
    cache, table = paged_keys(LENGTHS, 70, device="cuda")
    q, _, _, weights = indexer_inputs(len(LENGTHS), 1, 64, device="cuda")
    arguments = (q.view(-1, 1, 64, 128), cache, weights, torch.tensor(LENGTHS, device="cuda").int(), table, 256)
    out = provider.paged_topk(*arguments)
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        provider.paged_topk(*arguments, out=out)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)


def test_paged_topk_with_deep_gemms_schedule(select):
    need_deep_gemm()
    cache, table = paged_keys(LENGTHS, 70, device="cuda")
    q, _, _, weights = indexer_inputs(len(LENGTHS), 1, 64, device="cuda")
    arguments = (q.view(-1, 1, 64, 128), cache, weights, torch.tensor(LENGTHS, device="cuda"), table, 256)
    own = deep_gemm_provider.paged_topk(*arguments, selector=select)
    theirs = deep_gemm_provider.paged_topk(*arguments, selector=select, metadata_provider="deep_gemm")
    assert torch.equal(own, theirs)


@pytest.mark.parametrize("next_n", [1, 2])
@pytest.mark.parametrize("requests", [1, 31, 1000, 20000])
def test_paged_metadata(requests, next_n):
    generator = torch.Generator().manual_seed(requests)
    lens = torch.randint(1, 9000, (requests, next_n), generator=generator).int().cuda()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    schedule = triton_indexer.paged_metadata(lens, sms)
    assert schedule.tolist() == schedule_oracle(lens[:, -1].tolist(), next_n, sms)


def test_paged_metadata_is_the_library_s():
    """For sgl-deep-gemm from 0.1.4 on; earlier ones give the surplus splits to the first multiprocessors."""
    deep_gemm = need_deep_gemm()
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the library schedules otherwise on SM100")
    lens = torch.randint(1, 9000, (777, 2), generator=torch.Generator().manual_seed(0)).int().cuda()
    theirs = deep_gemm.get_paged_mqa_logits_metadata(lens, 64, deep_gemm.get_num_sms())
    assert torch.equal(triton_indexer.paged_metadata(lens, deep_gemm.get_num_sms()), theirs)


def test_paged_topk_of_more_rows_than_the_library_schedules():
    need_deep_gemm()
    batch, topk = 60_000, 64
    cache, table = paged_keys([200] * 8, 4, device="cuda")
    q, _, _, weights = indexer_inputs(64, 1, 64, device="cuda")
    pick = torch.arange(batch, device="cuda")
    q, weights = q[pick % 64].view(batch, 1, 64, 128), weights[pick % 64]
    lens = (pick % 190 + 1).int()
    result = deep_gemm_provider.paged_topk(q, cache, weights, lens, table[pick % 8], topk, max_len=200)
    some = torch.arange(0, batch, 1999, device="cuda")
    logits = reference_paged_logits(q[some], cache, weights[some], lens[some], table[some % 8], max_len=200)
    assert_selected(result[some], logits, torch.zeros_like(some), lens[some], topk, TOLERANCE)
