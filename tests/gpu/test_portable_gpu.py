"""The Triton kernels as on an SM86 or SM89 GPU: 99 KiB of shared memory, and no fp8 instructions on SM86."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.sglang.v32 import portable as sglang
from nsa_plugin.kernels import mla_inputs as contract
from nsa_plugin.kernels.indexer import quantize, reference_logits, reference_paged_topk
from nsa_plugin.kernels.kv_cache import open_cache, reference_write
from nsa_plugin.kernels.sparse_mla import reference_decode, reference_prefill
from nsa_plugin.kernels.triton import device, indexer, mha, mla_inputs, sparse_mla
from nsa_plugin.kernels.triton.kv_cache_kernels import decode_fp8_packed
from tests.kernels import mha_cases
from tests.kernels.indexer_cases import assert_selected, indexer_inputs, paged_keys
from tests.kernels.sparse_mla_cases import assert_same, decode_case, prefill_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

EMULATED = (86, 89)
PLACE = "cuda"
LOGIT_TOLERANCE = 5e-3


@pytest.fixture(autouse=True, params=EMULATED, ids="as SM{}".format)
def emulation(request: pytest.FixtureRequest) -> Iterator[None]:
    if torch.cuda.get_device_capability() < divmod(request.param, 10):
        pytest.skip(f"this GPU cannot emulate SM{request.param}")
    device.emulate(request.param)
    yield
    device.emulate(None)


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("layout", ["v32_fp8", "bf16"])
def test_sparse_attention(layout: str, heads: int) -> None:
    case = prefill_case(tokens=24, heads=heads, slots=4096, topk=512, layout=layout)
    assert_same(sparse_mla.prefill(**case), reference_prefill(**case, out_dtype=torch.float32))
    steps = decode_case(batch=5, s_q=2, heads=heads, layout=layout, slots=4096, topk=512)
    assert_same(sparse_mla.decode(**steps), reference_decode(**steps, out_dtype=torch.float32))


@pytest.mark.parametrize("heads", [32, 64])
def test_the_indexers_selection(heads: int) -> None:
    rows, keys, topk = 65, 5000, 2048
    inputs = indexer_inputs(rows, keys, heads, device=PLACE)
    ks = torch.zeros(rows, dtype=torch.int32, device=PLACE)
    ke = torch.arange(keys - rows, keys, dtype=torch.int32, device=PLACE) + 1
    logits = reference_logits(*inputs, ks, ke)
    assert_selected(indexer.topk(*inputs, ks, ke, topk), logits, ks, ke, topk, LOGIT_TOLERANCE)

    lengths = [1, 64, 700, 3001]
    cache, table = paged_keys(lengths, 48, device=PLACE)
    q, _, _, weights = indexer_inputs(len(lengths), 1, heads, seed=3, device=PLACE)
    seen = torch.tensor(lengths, device=PLACE)
    found = indexer.paged_topk(q.unsqueeze(1), cache, weights, seen, table, 512)
    right = reference_paged_topk(q.unsqueeze(1), cache, weights, seen, table, 512)
    for one, other in zip(found.tolist(), right.tolist(), strict=True):
        assert len(set(one) ^ set(other)) <= 8, "more than keys that score nearly alike"


@triton.jit
def decode_codes(codes_ptr, values_ptr, COUNT: tl.constexpr):
    offsets = tl.arange(0, COUNT)
    tl.store(values_ptr + offsets, decode_fp8_packed(tl.load(codes_ptr + offsets)))


@pytest.mark.parametrize("count", [256, 1024])
def test_every_code_is_converted_exactly(count: int) -> None:
    codes = torch.arange(count, device=PLACE).roll(1).to(torch.uint8)
    values = torch.empty(count, dtype=torch.float16, device=PLACE)
    decode_codes[(1,)](codes, values, COUNT=count)
    assert torch.equal(values.isnan(), (codes & 0x7F) == 0x7F)
    right = codes.view(torch.float8_e4m3fn).half()
    assert torch.equal(values.nan_to_num().view(torch.int16), right.nan_to_num().view(torch.int16)), "signs of zero too"


def test_the_selection_over_more_keys_and_rows_than_one_conversion() -> None:
    """NaN keys among them, requests whose ranges begin at odd places, and the CUDA graph of it."""
    rows, keys, topk, heads = indexer.CONVERTED_ROWS + 37, indexer.CONVERTED_KEYS + 1001, 512, 32
    q, k, k_scale, weights = indexer_inputs(rows, keys, heads, device=PLACE)
    k.view(torch.uint8)[::97, 5] = 0x7F
    ks = (torch.arange(rows, dtype=torch.int32, device=PLACE) * 31) % 1500
    ke = keys - torch.arange(rows, dtype=torch.int32, device=PLACE) % 777
    found = indexer.topk(q, k, k_scale, weights, ks, ke, topk)
    graph, again = torch.cuda.CUDAGraph(), torch.empty_like(found)
    with torch.cuda.graph(graph):
        indexer.topk(q, k, k_scale, weights, ks, ke, topk, out=again)
    graph.replay()
    assert torch.equal(again, found)
    for part in (slice(0, 40), slice(rows - 60, rows)):  # the rest are the same program's
        bounds = ks[part], ke[part]
        logits = reference_logits(q[part], k, k_scale, weights[part], *bounds)
        assert_selected(found[part], logits, *bounds, topk, LOGIT_TOLERANCE)


@pytest.mark.parametrize(("d_qk", "d_v"), [(192, 128), (256, 256)])
def test_dense_attention(d_qk: int, d_v: int) -> None:
    case = mha_cases.make([(300, 300), (17, 900), (1, 5)], 16, d_qk=d_qk, d_v=d_v, device=PLACE)
    mha_cases.check(mha.mha(*case, scale=case.scale, return_lse=True), case)


@pytest.mark.parametrize("rows", [1, 77, 5000])
@pytest.mark.parametrize("interleaved", [False, True])
def test_what_a_layer_computes_before_attention(rows: int, interleaved: bool) -> None:
    made = torch.Generator().manual_seed(rows)

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        wide = torch.randn((*shape[:-1], shape[-1] + 16), generator=made).to(dtype).to(PLACE)
        return wide[..., 8 : 8 + shape[-1]]

    angles = torch.rand(4096, 32, generator=made) * 6.28
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(PLACE)
    where = torch.randint(0, 4096, (rows,), generator=made).to(PLACE)
    norms = randn(rows, 1536), randn(rows, 512), randn(rows, 64), where, cos_sin, randn(1536), randn(512)
    norms = (*norms[:5], *(weight.contiguous() for weight in norms[5:]))
    found = mla_inputs.norm_rope(*norms, q_eps=1e-6, kv_eps=1e-6)
    for one, other in zip(found, contract.reference_norm_rope(*norms, q_eps=1e-6, kv_eps=1e-6), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2 if one.dtype == torch.bfloat16 else 1e-4, atol=1e-4)
    affine = (torch.rand(128, generator=made).to(PLACE), torch.rand(128, generator=made).to(PLACE))
    keys = randn(rows, 128), where, cos_sin, *affine
    torch.testing.assert_close(
        mla_inputs.indexer_keys(*keys, eps=1e-6, interleaved=interleaved),
        contract.reference_indexer_keys(*keys, eps=1e-6, interleaved=interleaved),
        rtol=1e-4,
        atol=1e-4,
    )
    queries = randn(rows, 64, 128), randn(rows, 64), where, cos_sin
    codes, gates = mla_inputs.indexer_queries(*queries, scale=0.01, interleaved=interleaved)
    right, expected = contract.reference_indexer_queries(*queries, scale=0.01, interleaved=interleaved)
    # A product rounded in another place may move the largest magnitude across a power of two.
    assert float((gates / expected - 1).abs().gt(1e-6).float().mean()) < 1e-3
    steps = (codes.view(torch.uint8).int() & 0x7F) - (right.view(torch.uint8).int() & 0x7F)
    assert float((steps != 0).float().mean()) < 0.02
    q_pe = randn(rows, 16, 64)
    torch.testing.assert_close(
        mla_inputs.rope(q_pe, where, cos_sin), contract.reference_rope(q_pe, where, cos_sin), rtol=1e-2, atol=1e-2
    )


def providers_here() -> Providers:
    return Providers("v32_fp8", device.facts_of(torch.device(PLACE)).architecture)


def test_what_sglang_quantises_and_writes() -> None:
    providers = providers_here()
    x = torch.randn(300, 3, 128, generator=torch.Generator().manual_seed(1)).bfloat16() * 3
    codes, scales = sglang.quantize(x.to(PLACE), providers)
    right, right_scales = quantize(x, ue8m0=True)
    assert torch.equal(codes.cpu().view(torch.uint8), right.view(torch.uint8))
    assert torch.equal(scales.cpu(), right_scales)

    nope, rope = torch.randn(2000, 1, 512).bfloat16(), torch.randn(2000, 1, 64).bfloat16()
    slots = torch.randperm(4096)[:2000]
    buffer = torch.zeros(4096, 1, 656, dtype=torch.uint8, device=PLACE)
    sglang.write(providers, buffer, slots.to(PLACE), nope.to(PLACE), rope.to(PLACE))
    wanted = open_cache(torch.zeros(64, 64, 1, 656, dtype=torch.uint8), "v32_fp8")
    reference_write(wanted, torch.cat([nope, rope], -1).squeeze(1), slots)
    assert torch.equal(buffer.cpu().view(-1), wanted.data.view(-1))


@pytest.mark.parametrize("fused", [True, False])
def test_what_sglang_selects_for_steps(monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    lengths, topk = [1, 64, 700, 3001], 512
    cache, table = paged_keys(lengths, 48, device=PLACE)
    q, _, _, weights = indexer_inputs(len(lengths) + 2, 1, 64, seed=3, device=PLACE)
    monkeypatch.setattr(sglang, "is_fused", lambda metadata: fused)
    plan = SimpleNamespace(indexer=SimpleNamespace(rows_per_chunk=3))
    seen = torch.tensor(lengths, dtype=torch.int32, device=PLACE)
    found = sglang.select_steps(
        SimpleNamespace(plan=plan, providers=providers_here()),
        SimpleNamespace(index_topk=topk, num_init_tokens=0, num_local_tokens=0),
        q,
        cache.data.view(cache.num_pages, -1),
        weights.unsqueeze(-1),
        seen,
        SimpleNamespace(get_page_table_64=lambda: table),
    )
    right = reference_paged_topk(q[:4].unsqueeze(1), cache, weights[:4], seen, table, topk).long()
    if fused:
        slots = table.long().gather(1, right.clamp(min=0) // 64) * 64 + right.clamp(min=0) % 64
        right = torch.where(right < 0, right, slots)
    assert bool((found[4:] == -1).all())
    for one, other in zip(found[:4].tolist(), right.tolist(), strict=True):
        assert len(set(one) ^ set(other)) <= 8, "more than keys that score nearly alike"
