"""Host logic of the FlashAttention-3 provider, over stand-ins with the libraries' own signatures.

The stand-ins compute what FA3 documents (bottom-right causal mask, zero and -inf for a row that sees no key)
and check what FA3 demands; what they leave unwritten is NaN, as a real kernel leaves memory as it was.
"""

import math
import sys
from types import ModuleType

import pytest
import torch

from nsa_plugin.kernels import mha as mha_contract
from nsa_plugin.kernels import sparse_mla
from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.kv_cache import allocate_cache, open_cache
from nsa_plugin.kernels.providers import fa3

from . import mha_cases
from .oracles import noncontiguous

DECODE = {"scale": 0.05}


def dense(q, k, v, cu_q, cu_k, max_q, max_k, scale, causal, out):
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert all(tensor.stride(-1) == 1 for tensor in (q, k, v))
    assert isinstance(max_q, int)
    assert isinstance(max_k, int)
    assert int((cu_q[1:] - cu_q[:-1]).max()) <= max_q
    assert int((cu_k[1:] - cu_k[:-1]).max()) <= max_k
    result = mha_contract.reference(q, k, v, cu_q, cu_k, scale=scale, causal=causal, return_lse=True)
    used = int(cu_q[-1])
    out = torch.full_like(result.out, math.nan) if out is None else out
    assert out.dtype == q.dtype
    out[:used] = result.out[:used]
    lse = torch.full_like(result.lse, math.nan)
    lse[:used] = result.lse[:used].masked_fill(result.lse[:used] == math.inf, -math.inf)
    return out, lse.T.contiguous()


def paged(q, k_cache, v_cache, qv, page_table, lengths, cu_q, scale, out):
    tokens = q.shape[0]
    assert q.shape[-1] == k_cache.shape[-1] == 64
    assert qv.shape[-1] == v_cache.shape[-1] == 512
    assert k_cache.shape[1:3] == v_cache.shape[1:3] == (1, 1)
    assert page_table.dtype == lengths.dtype == torch.int32
    assert torch.equal(cu_q, torch.arange(tokens + 1, dtype=torch.int32))
    attended = torch.arange(page_table.shape[1]) < lengths[:, None]
    assert bool((page_table[attended] >= 0).all())
    rows = torch.cat([v_cache, k_cache], -1).view(-1, 576)
    result = sparse_mla.reference_prefill(torch.cat([qv, q], -1), rows, page_table, scale=scale, topk_length=lengths)
    out = torch.empty_like(result.out) if out is None else out
    out.copy_(result.out)
    return out, result.lse.masked_fill(result.lse == math.inf, -math.inf).T.contiguous()


def sgl_kernel_module(with_out=True):
    """`sgl_kernel.flash_attn` of sglang-kernel 0.4.5, shortened to what may be passed; 0.4.2 has no `out`."""

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None, seqused_k=None,
        page_table=None, softmax_scale=None, causal=False, qv=None, num_splits=1, return_softmax_lse=False, out=None,
    ):  # fmt: skip
        result = dense(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, out
        )  # fmt: skip
        return (*result, None, None) if return_softmax_lse else result[0]

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, qv=None, cache_seqlens=None, page_table=None, cu_seqlens_q=None,
        max_seqlen_q=None, softmax_scale=None, causal=False, num_splits=0, return_softmax_lse=False, out=None,
    ):  # fmt: skip
        assert causal
        assert max_seqlen_q == 1
        result = paged(q, k_cache, v_cache, qv, page_table, cache_seqlens, cu_seqlens_q, softmax_scale, out)
        return (*result, None, None) if return_softmax_lse else result[0]

    def without_out(function):
        def older(q, *arguments, **keywords):
            return function(q, *arguments, **keywords)

        return older

    module = ModuleType("sgl_kernel.flash_attn")
    wrap = (lambda function: function) if with_out else without_out
    module.flash_attn_varlen_func = wrap(flash_attn_varlen_func)
    module.flash_attn_with_kvcache = wrap(flash_attn_with_kvcache)
    return module


def vllm_module(with_q_v=True):
    """`vllm.vllm_flash_attn` of vLLM 0.24, shortened to what may be passed."""

    def flash_attn_varlen_func(
        q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None, dropout_p=0.0,
        softmax_scale=None, causal=False, block_table=None, return_softmax_lse=False, out=None, num_splits: int = 0,
        fa_version: int = 2,
    ):  # fmt: skip
        assert fa_version == 3
        assert causal or q_v is None
        assert (cu_seqlens_k is None) != (seqused_k is None)
        if q_v is None:
            result = dense(
                q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, out
            )  # fmt: skip
        else:
            assert max_seqlen_k >= int(seqused_k.max())
            result = paged(q, k, v, q_v, block_table, seqused_k, cu_seqlens_q, softmax_scale, out)
        return result if return_softmax_lse else result[0]

    module = ModuleType("vllm.vllm_flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func if with_q_v else (lambda q, k, v: None)
    return module


def install(monkeypatch, name, module):
    parent, _, child = name.partition(".")
    package = ModuleType(parent)
    package.__path__ = []
    if module is not None:
        setattr(package, child, module)
    monkeypatch.setitem(sys.modules, parent, package)
    monkeypatch.setitem(sys.modules, name, module)


LIBRARIES = {
    "sgl_kernel": ("sgl_kernel.flash_attn", sgl_kernel_module),
    "sgl_kernel without out": ("sgl_kernel.flash_attn", lambda: sgl_kernel_module(with_out=False)),
    "vllm": ("vllm.vllm_flash_attn", vllm_module),
}


@pytest.fixture(autouse=True)
def _forget():
    fa3.load.cache_clear()
    yield
    fa3.load.cache_clear()


@pytest.fixture(params=LIBRARIES)
def library(request, monkeypatch):
    for name, _ in LIBRARIES.values():
        install(monkeypatch, name, None)
    name, make = LIBRARIES[request.param]
    install(monkeypatch, name, make())
    return request.param


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", mha_cases.REQUESTS)
def test_mha(library, name, causal):
    case = mha_cases.make(mha_cases.REQUESTS[name], 3)
    actual = fa3.mha(*case, scale=case.scale, causal=causal, return_lse=True)
    mha_cases.check(actual, case, causal=causal)


def test_mha_into_a_caller_s_output_with_lengths_and_strides(library):
    case = mha_cases.make([(3, 30), (20, 20)], 2)
    strided = case._replace(
        q=noncontiguous(case.q), k=noncontiguous(case.k), v=noncontiguous(case.v), cu_seqlens_q=case.cu_seqlens_q.long()
    )
    for out in (
        torch.full((28, 2, 128), math.nan, dtype=torch.bfloat16),
        torch.full((28, 2, 128), math.nan),
        noncontiguous(torch.full((28, 2, 128), math.nan, dtype=torch.bfloat16)),
    ):
        actual = fa3.mha(*strided, scale=case.scale, out=out, max_seqlen_q=20, max_seqlen_k=30)
        assert actual.out is out
        assert actual.lse is None
        mha_cases.check(actual, case)


def test_mha_leaves_rows_after_the_last_request_where_the_caller_has_none(library):
    case = mha_cases.make([(3, 30), (20, 20)], 2)
    used = int(case.cu_seqlens_q[-1])
    whole = fa3.mha(*case, scale=case.scale).out
    out = torch.full_like(whole[:used], math.nan)
    fa3.mha(case.q[:used], *case[1:], scale=case.scale, out=out, padded=False)
    assert torch.equal(out, whole[:used])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(8, 2, 192)}, "q has dtype float32; allowed: bfloat16, float16"),
        ({"k": torch.zeros(16, 2, 192, dtype=torch.float16)}, "k has dtype float16; allowed: bfloat16"),
        ({"cu_seqlens_k": torch.tensor([0, 16])}, "cu_seqlens_k has 2 entries; expected 3"),
        ({"out": torch.zeros(8, 2, 9)}, "out has shape"),
    ],
)
def test_mha_names_wrong_arguments(library, changes, message):
    case = mha_cases.make([(3, 11), (5, 5)], 2, padding=0)
    with pytest.raises(KernelArgumentError, match=message):
        fa3.mha(**(case._asdict() | changes), scale=1.0)


def decode_case(batch=3, s_q=2, heads=5, topk=40, pages=4, page_size=16, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(pages, page_size, 576, generator=generator).to(dtype)
    q = torch.randn(batch, s_q, heads, 576, generator=generator).to(dtype)
    indices = torch.randint(-20, pages * page_size + 20, (batch, s_q, topk), generator=generator)
    indices[0, 0] = -1
    indices[0, 1, 0] = 2**31 - 1
    return q, open_cache(data, "bf16"), indices.int()


@pytest.mark.parametrize("length", [None, "by sequence", "by query"])
def test_decode(library, length):
    q, cache, indices = decode_case()
    lengths = {
        None: None,
        "by sequence": torch.tensor([40, 0, 7], dtype=torch.int32),
        "by query": torch.tensor([[40, 3], [-1, 0], [99, 7]], dtype=torch.int32),
    }[length]
    expected = sparse_mla.reference_decode(q, cache, indices, topk_length=lengths, out_dtype=torch.float32, **DECODE)
    actual = fa3.decode(q, cache, indices, topk_length=lengths, **DECODE)
    torch.testing.assert_close(actual.out.float(), expected.out, atol=1e-3, rtol=2.01 / 128)
    torch.testing.assert_close(actual.lse, expected.lse, atol=1e-6, rtol=8.01 / 65536)
    assert actual.lse.shape == (3, 5, 2)
    assert actual.lse[0, :, 0].isposinf().all()


def test_decode_into_a_caller_s_output(library):
    q, cache, indices = decode_case()
    expected = sparse_mla.reference_decode(q, cache, indices, out_dtype=torch.float32, **DECODE)
    for dtype in (torch.bfloat16, torch.float32):
        for out in (torch.empty(3, 2, 5, 512, dtype=dtype), noncontiguous(torch.empty(3, 2, 5, 512, dtype=dtype))):
            actual = fa3.decode(q, cache, indices.long(), out=out, **DECODE)
            assert actual.out is out
            torch.testing.assert_close(out.float(), expected.out, atol=1e-3, rtol=2.01 / 128)


def test_decode_without_a_row_or_an_entry(library):
    q, cache, indices = decode_case()
    assert fa3.decode(q[:0], cache, indices[:0], **DECODE).out.shape == (0, 2, 5, 512)
    none = fa3.decode(q, cache, indices[..., :0], **DECODE)
    assert (none.out == 0).all()
    assert none.lse.isposinf().all()
    assert none.lse.shape == (3, 5, 2)


def gapped():
    return open_cache(torch.zeros(4, 20, 576, dtype=torch.bfloat16)[:, :16], "bf16")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_sink": torch.zeros(5)}, "attn_sink is given; provider fa3"),
        ({"extra_cache": gapped(), "extra_indices": torch.zeros(3, 2, 1, dtype=torch.int32)}, "extra_cache is given"),
        ({"cache": allocate_cache("v32_fp8", 2, 16)}, "cache has layout v32_fp8"),
        ({"cache": gapped()}, "takes pages without gaps"),
        ({"d_v": 256}, "d_v is 256; provider fa3 takes 512"),
        ({"q": torch.zeros(3, 2, 5, 576)}, "q has dtype float32; allowed: bfloat16"),
        (
            {
                "cache": open_cache(torch.zeros(2, 16, 512, dtype=torch.bfloat16), "bf16"),
                "q": torch.zeros(3, 2, 5, 512, dtype=torch.bfloat16),
            },
            "rows of 512 values; this provider takes 576",
        ),
    ],
)
def test_decode_refuses_unsupported_arguments(library, changes, message):
    q, cache, indices = decode_case()
    with pytest.raises(KernelArgumentError, match=message):
        fa3.decode(**({"q": q, "cache": cache, "indices": indices} | changes), **DECODE)


def test_without_a_library_the_error_says_why_for_each(monkeypatch):
    install(monkeypatch, "sgl_kernel.flash_attn", None)
    install(monkeypatch, "vllm.vllm_flash_attn", vllm_module(with_q_v=False))
    case = mha_cases.make([(3, 3)], 1)
    with pytest.raises(ImportError, match=r"sgl_kernel.flash_attn: .*vllm.vllm_flash_attn: .* no parameter q_v"):
        fa3.mha(*case, scale=1.0)
