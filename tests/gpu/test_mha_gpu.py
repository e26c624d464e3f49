"""Dense ragged attention and FA3's sparse decode on a GPU: every provider that is installed, against the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nsa_plugin.kernels import sparse_mla
from nsa_plugin.kernels.kv_cache import PagedCache, open_cache
from nsa_plugin.kernels.providers import fa3
from nsa_plugin.kernels.triton import mha as triton_mha
from nsa_plugin.kernels.triton.compact import compact
from nsa_plugin.kernels.workspace import Workspace, WorkspaceError
from tests.kernels import mha_cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

HEADS = [1, 2, 3, 5, 7, 8, 16, 20, 32, 64, 128]
PROVIDERS = ["triton", "fa3"]


def filler(mha: Callable[..., Any]) -> float:
    """What lies behind the last request: FA3 multiplies it by probabilities of 0, so there it has to be finite."""
    return 0.0 if mha is fa3.mha else math.nan


def need_fa3() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashAttention-3 runs on SM90")
    try:
        fa3.load()
    except ImportError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def exact_float32_matmul():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(params=PROVIDERS)
def mha(request: pytest.FixtureRequest) -> Callable[..., Any]:
    if request.param == "triton":
        return triton_mha.mha
    need_fa3()
    return fa3.mha


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", [*mha_cases.REQUESTS, *(f"large: {name}" for name in mha_cases.LARGE_REQUESTS)])
@pytest.mark.parametrize("heads", [3, 16])
def test_ragged_requests(mha, heads, name, causal):
    requests = (mha_cases.REQUESTS | {f"large: {key}": case for key, case in mha_cases.LARGE_REQUESTS.items()})[name]
    case = mha_cases.make(requests, heads, device="cuda", filler=filler(mha))
    actual = mha(*case, scale=case.scale, causal=causal, return_lse=True)
    mha_cases.check(actual, case, causal=causal)
    assert (actual.out[-mha_cases.PADDING :] == 0).all()


@pytest.mark.parametrize("heads", HEADS)
def test_heads(mha, heads):
    case = mha_cases.make([(200, 330), (4, 4), (0, 9), (63, 63)], heads, device="cuda", filler=filler(mha))
    mha_cases.check(mha(*case, scale=case.scale, return_lse=True), case)


@pytest.mark.parametrize(("d_qk", "d_v"), [(192, 128), (128, 128), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_widths(mha, dtype, d_qk, d_v):
    case = mha_cases.make(
        [(300, 300), (33, 150)], 4, d_qk=d_qk, d_v=d_v, dtype=dtype, device="cuda", filler=filler(mha)
    )
    mha_cases.check(mha(*case, scale=case.scale, return_lse=True), case)


@pytest.mark.parametrize(("d_qk", "d_v"), [(192, 128), (128, 128), (256, 256), (40, 100)])
def test_float32_in_triton(d_qk, d_v):
    case = mha_cases.make([(70, 70), (33, 150)], 3, d_qk=d_qk, d_v=d_v, dtype=torch.float32, device="cuda")
    mha_cases.check(triton_mha.mha(*case, scale=case.scale, return_lse=True), case, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("lengths", [{}, {"max_seqlen_q": 33, "max_seqlen_k": 150}])
def test_strides_lengths_and_a_caller_s_output(mha, lengths):
    case = mha_cases.make([(20, 20), (33, 150)], 4, device="cuda", filler=filler(mha))
    # As engines have them: k and v are slices of one up-projected tensor.
    kv = torch.cat([case.k, case.v], -1)
    sliced = case._replace(k=kv[..., :192], v=kv[..., 192:], cu_seqlens_q=case.cu_seqlens_q.long())
    for dtype in (torch.bfloat16, torch.float32):
        out = torch.full((*case.q.shape[:2], 128), math.nan, dtype=dtype, device="cuda")
        actual = mha(*sliced, scale=case.scale, out=out, **lengths)
        assert actual.out is out
        mha_cases.check(actual, case)


def test_reruns_are_bit_identical(mha):
    case = mha_cases.make(mha_cases.LARGE_REQUESTS["ragged"], 16, device="cuda", filler=filler(mha))
    first = mha(*case, scale=case.scale, return_lse=True)
    for _ in range(20):
        again = mha(*case, scale=case.scale, return_lse=True)
        assert torch.equal(first.out, again.out)
        assert torch.equal(first.lse, again.lse)


def test_nothing_is_read_on_the_host(mha):
    case = mha_cases.make([(20, 20), (33, 150)], 4, device="cuda", filler=filler(mha))
    expected = mha(*case, scale=case.scale, return_lse=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = mha(*case, scale=case.scale, return_lse=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(expected.out, actual.out)
    assert torch.equal(expected.lse, actual.lse)


def test_boundaries_of_a_captured_graph_may_change():
    """The same graph, with other boundaries in the same tensors: the grid covers every division into requests."""
    first = mha_cases.make([(100, 100), (28, 60), (2, 2)], 4, device="cuda")
    second = mha_cases.make([(1, 1), (128, 160), (1, 1)], 4, device="cuda")
    static = first._replace(**{name: tensor.clone() for name, tensor in first._asdict().items()})
    triton_mha.mha(*static, scale=first.scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = triton_mha.mha(*static, scale=first.scale, return_lse=True)
    for case in (second, first):
        for target, source in zip(static, case, strict=True):
            target.copy_(source)
        graph.replay()
        mha_cases.check(captured, case)


def test_memory_beyond_2_gib():
    """Rows and strides whose product passes 2**31."""
    tokens, heads = 90_000, 128
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB")
    q, k, v = (torch.empty(tokens, heads, dim, dtype=torch.bfloat16, device="cuda") for dim in (192, 192, 128))
    for tensor in (q, k, v):
        tensor[:-64].zero_()
        tensor[-64:].normal_(std=0.25 if tensor is v else 1.0)
    bounds = torch.tensor([0, tokens - 64, tokens], dtype=torch.int32, device="cuda")
    last_bounds = torch.tensor([0, 64], dtype=torch.int32, device="cuda")
    last = mha_cases.Case(q[-64:], k[-64:], v[-64:], last_bounds, last_bounds)
    actual = triton_mha.mha(q, k, v, bounds, bounds, scale=last.scale)
    mha_cases.check(triton_mha.MhaOutput(actual.out[-64:], None), last)
    assert not actual.out[:-64].any()


def decode_case(batch: int, s_q: int, heads: int, topk: int) -> tuple[torch.Tensor, PagedCache, torch.Tensor]:
    generator = torch.Generator().manual_seed(heads)
    data = (torch.randn(40, 64, 576, generator=generator) / 4).bfloat16().cuda()
    q = torch.randn(batch, s_q, heads, 576, generator=generator).bfloat16().cuda()
    indices = torch.randint(-300, 40 * 64 + 300, (batch, s_q, topk), generator=generator).int().cuda()
    indices[0, 0] = -1
    return q, open_cache(data, "bf16"), indices


@pytest.mark.parametrize("with_length", [False, True])
@pytest.mark.parametrize(("batch", "s_q", "topk"), [(1, 1, 100), (4, 3, 512), (74, 1, 2048)])
@pytest.mark.parametrize("heads", [1, 8, 16, 20, 64, 128])
def test_fa3_decode(heads, batch, s_q, topk, with_length):
    need_fa3()
    q, cache, indices = decode_case(batch, s_q, heads, topk)
    length = torch.arange(batch, dtype=torch.int32, device="cuda") * topk // batch if with_length else None
    options: dict[str, Any] = {"scale": 576**-0.5, "topk_length": length}
    expected = sparse_mla.reference_decode(q, cache, indices, out_dtype=torch.float32, **options)
    actual = fa3.decode(q, cache, indices, **options)
    torch.testing.assert_close(actual.out.float(), expected.out, atol=1e-3, rtol=2.01 / 128)
    torch.testing.assert_close(actual.lse, expected.lse, atol=1e-6, rtol=8.01 / 65536)
    assert (actual.out[0, 0] == 0).all()


def test_fa3_decode_in_a_graph():
    need_fa3()
    q, cache, indices = decode_case(8, 1, 16, 512)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        fa3.decode(q, cache, indices, scale=0.05)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fa3.decode(q, cache, indices, scale=0.05)
    indices.copy_(indices.flip(0))
    graph.replay()
    expected = sparse_mla.reference_decode(q, cache, indices, scale=0.05, out_dtype=torch.float32)
    torch.testing.assert_close(captured.out.float(), expected.out, atol=1e-3, rtol=2.01 / 128)


def test_compact_rows():
    _, cache, indices = decode_case(74, 2, 1, 2000)
    length = torch.randint(-5, 2100, (74, 2), device="cuda")
    actual = compact(indices, length, cache.num_slots, multiple=128)
    counted = torch.arange(2000, device="cuda") < length.unsqueeze(-1)
    valid = (counted & (indices >= 0) & (indices < cache.num_slots)).view(-1, 2000)
    order = (~valid).to(torch.int8).argsort(dim=1, stable=True)
    expected = torch.where(valid, indices.view(-1, 2000), -1).gather(1, order)
    assert torch.equal(actual.indices, torch.nn.functional.pad(expected, (0, 48), value=-1))
    assert torch.equal(actual.counts, valid.sum(1).int())


def test_workspace_of_a_captured_graph():
    workspace, side = Workspace(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        with pytest.raises(WorkspaceError, match="needs 4096"), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=side):
            workspace.get("scratch", (1024,), torch.float32, "cuda")
        workspace.get("scratch", (1024,), torch.float32, "cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            captured = workspace.get("scratch", (1024,), torch.float32, "cuda")
            captured.add_(1.0)
        captured.zero_()
        address = captured.data_ptr()
        del captured
        assert workspace.get("scratch", (1 << 20,), torch.float32, "cuda").data_ptr() != address
        kept = workspace._captured[0].view(torch.float32)
        assert kept.data_ptr() == address
        graph.replay()
        side.synchronize()
        assert (kept == 1.0).all()
    assert workspace.get("scratch", (1024,), torch.float32, "cuda").data_ptr() != address
