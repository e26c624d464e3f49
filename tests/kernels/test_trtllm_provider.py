"""Host logic of the trtllm provider, over stand-ins with the signatures of old and new FlashInfer versions.

The stand-ins check what FlashInfer's Python and launcher check, compute what the kernels compute (log2 lse)
and leave what the kernels leave alone as NaN. The kernels themselves run on SM100 only.
"""

import math
import sys
from types import ModuleType

import pytest
import torch

from nsa_plugin.kernels import mha as mha_contract
from nsa_plugin.kernels import sparse_mla
from nsa_plugin.kernels.checks import FP8_DTYPE, KernelArgumentError
from nsa_plugin.kernels.kv_cache import allocate_cache, open_cache
from nsa_plugin.kernels.providers import trtllm

from . import mha_cases
from .oracles import noncontiguous

LOG2_E = math.log2(math.e)


def check_workspace(buffer):
    assert buffer.dtype == torch.uint8
    assert buffer.is_contiguous()
    assert not buffer[:64].any()


def ragged(
    query, key, value, workspace_buffer, seq_lens, max_q_len, max_kv_len, bmm1_scale, cum_q, cum_kv, causal, out
):
    check_workspace(workspace_buffer)
    assert query.is_contiguous()
    assert cum_q.dtype == cum_kv.dtype == seq_lens.dtype == torch.int32
    q_lens, kv_lens = cum_q[1:] - cum_q[:-1], cum_kv[1:] - cum_kv[:-1]
    assert torch.equal(kv_lens, seq_lens)
    assert bool((q_lens > 0).all())
    assert bool((kv_lens > 0).all())
    assert (max_q_len, max_kv_len) == (int(q_lens.max()), int(kv_lens.max()))
    assert out.shape == (*query.shape[:2], value.shape[2])
    assert query.shape[0] == int(cum_q[-1])
    result = mha_contract.reference(query, key, value, cum_q, cum_kv, scale=bmm1_scale, causal=causal, return_lse=True)
    out.copy_(result.out)
    return out, result.lse * LOG2_E


def ragged_0_6_8(
    query, key, value, workspace_buffer, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale, o_sf_scale,
    batch_size, window_left, cum_seq_lens_q, cum_seq_lens_kv, enable_pdl, is_causal, return_lse, attention_sinks=None,
    skip_softmax_threshold_scale_factor=None, out=None, lse=None,
):  # fmt: skip
    assert (query.shape[2], value.shape[2]) in ((192, 128), (128, 128))
    assert batch_size == len(seq_lens)
    assert (bmm2_scale, window_left) == (1.0, -1)
    result = ragged(
        query, key, value, workspace_buffer, seq_lens, max_q_len, max_kv_len, bmm1_scale, cum_seq_lens_q,
        cum_seq_lens_kv, is_causal, out,
    )  # fmt: skip
    return result if return_lse else result[0]


def ragged_0_7_2(
    query, key, value, workspace_buffer, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale, o_sf_scale,
    batch_size, window_left, cum_seq_lens_q, cum_seq_lens_kv, enable_pdl, is_causal, return_lse, attention_sinks=None,
    skip_softmax_threshold_scale_factor=None, out=None, lse=None, backend="trtllm-gen", q_seq_lens_cpu=None,
    kv_seq_lens_cpu=None, skip_all_rows_active_check=True,
):  # fmt: skip
    for lengths, tensor in ((q_seq_lens_cpu, query), (kv_seq_lens_cpu, key)):
        assert lengths.device.type == "cpu"
        assert lengths.shape == (batch_size,)
        assert int(lengths.sum()) == tensor.shape[0]
    result = ragged(
        query, key, value, workspace_buffer, seq_lens, max_q_len, max_kv_len, bmm1_scale, cum_seq_lens_q,
        cum_seq_lens_kv, is_causal, out,
    )  # fmt: skip
    return result if return_lse else result[0]


def sparse(query, kv_cache, block_tables, seq_lens, max_seq_len, top_k, out, bmm1_scale, bmm2_scale, workspace):
    check_workspace(workspace)
    batch, q_len, _, dim = query.shape
    assert (q_len, dim) == (1, 576)
    assert kv_cache.dtype == query.dtype
    assert kv_cache.shape[1] in (32, 64)
    assert kv_cache.is_contiguous()
    assert block_tables.shape == (batch, 1, top_k)
    assert top_k % 128 == 0
    assert max_seq_len == top_k
    assert block_tables.dtype == seq_lens.dtype == torch.int32
    assert bool((seq_lens >= 1).all())
    attended = torch.arange(top_k) < seq_lens[:, None]
    assert bool((block_tables.squeeze(1)[attended] >= 0).all())
    assert out.dtype == torch.bfloat16
    rows = kv_cache.reshape(-1, 576).float()
    result = sparse_mla.reference_prefill(
        query.squeeze(1).float(), rows, block_tables, scale=bmm1_scale, topk_length=seq_lens, out_dtype=torch.float32
    )
    out.copy_((result.out * bmm2_scale).unsqueeze(1))
    return out, result.lse * LOG2_E


def mla_0_6_8(
    query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens,
    max_seq_len, sparse_mla_top_k=0, out=None, bmm1_scale=1.0, bmm2_scale=1.0, sinks=None,
    skip_softmax_threshold_scale_factor=None, enable_pdl=None, backend="auto", is_var_seq=True,
    uses_shared_paged_kv_idx=True,
):  # fmt: skip
    assert (qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, backend) == (128, 512, 64, "trtllm-gen")
    return sparse(
        query, kv_cache, block_tables, seq_lens, max_seq_len, sparse_mla_top_k, out, bmm1_scale, bmm2_scale,
        workspace_buffer,
    )[0]  # fmt: skip


def mla_0_7_2(
    query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens,
    max_seq_len, sparse_mla_top_k=0, out=None, bmm1_scale=1.0, bmm2_scale=1.0, sinks=None,
    skip_softmax_threshold_scale_factor=None, enable_pdl=None, backend="auto", is_var_seq=True,
    uses_shared_paged_kv_idx=True, lse=None, return_lse=False, cute_dsl_impl="auto", return_lse_base=None,
):  # fmt: skip
    assert (qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, backend) == (128, 512, 64, "trtllm-gen")
    result = sparse(
        query, kv_cache, block_tables, seq_lens, max_seq_len, sparse_mla_top_k, out, bmm1_scale, bmm2_scale,
        workspace_buffer,
    )  # fmt: skip
    return result if return_lse else result[0]


FUNCTIONS = {"0.6.8": (ragged_0_6_8, mla_0_6_8), "0.7.2": (ragged_0_7_2, mla_0_7_2)}


def install(monkeypatch, version, ragged_function, mla_function):
    package, prefill, decode = (ModuleType(name) for name in ("flashinfer", "flashinfer.prefill", "flashinfer.decode"))
    package.__version__ = version
    package.__path__ = []
    prefill.trtllm_ragged_attention_deepseek = ragged_function
    decode.trtllm_batch_decode_with_kv_cache_mla = mla_function
    for module in (package, prefill, decode):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture(params=FUNCTIONS)
def flashinfer(request, monkeypatch):
    install(monkeypatch, request.param, *FUNCTIONS[request.param])
    return request.param


@pytest.fixture(autouse=True)
def _small_workspace(monkeypatch):
    monkeypatch.setattr(trtllm, "BASE_WORKSPACE", 1 << 16)


CARRIED = [name for name in mha_cases.REQUESTS if name != "more rows than keys"]


@pytest.mark.parametrize("with_lengths", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", CARRIED)
def test_mha(flashinfer, name, causal, with_lengths):
    requests = mha_cases.REQUESTS[name]
    case = mha_cases.make(requests, 3)
    lengths = {"seqlens_q": [sq for sq, _ in requests], "seqlens_k": [sk for _, sk in requests]} if with_lengths else {}
    actual = trtllm.mha(*case, scale=case.scale, causal=causal, return_lse=True, **lengths)
    mha_cases.check(actual, case, causal=causal)


def test_mha_into_a_caller_s_output(flashinfer):
    case = mha_cases.make([(3, 30), (20, 20)], 2)
    strided = case._replace(q=noncontiguous(case.q), k=noncontiguous(case.k), cu_seqlens_q=case.cu_seqlens_q.long())
    for dtype in (torch.bfloat16, torch.float32):
        contiguous = torch.full((28, 2, 128), math.nan, dtype=dtype)
        for out in (contiguous, noncontiguous(contiguous)):
            actual = trtllm.mha(*strided, scale=case.scale, out=out)
            assert actual.out is out
            assert actual.lse is None
            mha_cases.check(actual, case)


@pytest.mark.parametrize(
    ("requests", "options", "message"),
    [
        ([(6, 2)], {}, "request 0 has 6 queries and 2 keys"),
        ([(6, 6)], {"seqlens_q": [6, 1]}, "seqlens_q has 2 entries; cu_seqlens_q has 1 requests"),
        ([(6, 6)], {"seqlens_q": [12]}, r"seqlens_q gives requests of \[12\] tokens; they must add up to at most 11"),
    ],
)
def test_mha_refuses_lengths(flashinfer, requests, options, message):
    case = mha_cases.make(requests, 2)
    with pytest.raises(KernelArgumentError, match=message):
        trtllm.mha(*case, scale=1.0, **options)


@pytest.mark.parametrize(
    ("dims", "dtype", "message"),
    [
        ((192, 128), torch.float16, "q has dtype float16; allowed: bfloat16"),
        ((64, 64), torch.bfloat16, r"heads of 64 and 64 values; provider trtllm takes \(192, 128\)"),
        ((256, 256), torch.bfloat16, "need flashinfer 0.6.12, not 0.6.8"),
    ],
)
def test_mha_refuses_widths_and_types(monkeypatch, dims, dtype, message):
    install(monkeypatch, "0.6.8", *FUNCTIONS["0.6.8"])
    case = mha_cases.make([(6, 6)], 2, d_qk=dims[0], d_v=dims[1], dtype=dtype)
    with pytest.raises(KernelArgumentError, match=message):
        trtllm.mha(*case, scale=1.0)


def test_wider_heads_with_a_newer_version(monkeypatch):
    install(monkeypatch, "0.7.2", *FUNCTIONS["0.7.2"])
    case = mha_cases.make([(6, 6)], 2, d_qk=256, d_v=256)
    mha_cases.check(trtllm.mha(*case, scale=case.scale), case)


def sparse_case(rows=5, heads=3, topk=40, pages=4, page_size=32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(pages, page_size, 576, generator=generator).bfloat16()
    q = torch.randn(rows, heads, 576, generator=generator).bfloat16()
    indices = torch.randint(-20, pages * page_size + 20, (rows, topk), generator=generator).int()
    indices[0] = -1
    indices[1, 0] = 2**31 - 1
    return q, open_cache(data, "bf16"), indices


def check_out(actual, expected):
    torch.testing.assert_close(actual.float(), expected, atol=1e-3, rtol=3.01 / 128)


@pytest.mark.parametrize("page_size", [64, 32, 16, 1])
def test_prefill(flashinfer, page_size):
    q, cache, indices = sparse_case()
    cache = open_cache(cache.data.view(-1, page_size, 576), "bf16")
    length = torch.tensor([40, 40, 0, 7, 99], dtype=torch.int32)
    expected = sparse_mla.reference_prefill(q, cache, indices, scale=0.05, topk_length=length, out_dtype=torch.float32)
    actual = trtllm.prefill(q, cache, indices, scale=0.05, topk_length=length)
    check_out(actual.out, expected.out)
    assert (actual.out[[0, 2]] == 0).all()
    assert actual.max_logits.shape == actual.lse.shape == (5, 3)
    assert actual.max_logits.isnan().all()
    assert actual.lse.isnan().all()


def test_prefill_over_flat_rows(flashinfer):
    q, cache, indices = sparse_case()
    rows = cache.data.view(-1, 1, 576)
    expected = sparse_mla.reference_prefill(q, rows, indices, scale=0.05, out_dtype=torch.float32)
    check_out(trtllm.prefill(q, rows, indices.unsqueeze(1).long(), scale=0.05).out, expected.out)


@pytest.mark.parametrize("by_query", [True, False])
def test_decode(flashinfer, by_query):
    q, cache, indices = sparse_case(rows=6)
    q, indices = q.view(3, 2, 3, 576), indices.view(3, 2, 40)
    length = torch.tensor([[40, 3], [-1, 0], [99, 7]] if by_query else [40, 0, 7])
    options = {"scale": 0.05, "topk_length": length}
    expected = sparse_mla.reference_decode(q, cache, indices, out_dtype=torch.float32, **options)
    for dtype in (torch.bfloat16, torch.float32):
        contiguous = torch.full((3, 2, 3, 512), math.nan, dtype=dtype)
        for out in (contiguous, noncontiguous(contiguous)):
            actual = trtllm.decode(q, cache, indices, out=out, **options)
            assert actual.out is out
            check_out(out, expected.out)
            assert actual.lse.shape == (3, 3, 2)


def test_lse_is_natural_where_the_version_has_it(monkeypatch):
    q, cache, indices = sparse_case()
    install(monkeypatch, "0.7.2", *FUNCTIONS["0.7.2"])
    expected = sparse_mla.reference_prefill(q, cache, indices, scale=0.05)
    actual = trtllm.prefill(q, cache, indices, scale=0.05, return_lse=True)
    torch.testing.assert_close(actual.lse, expected.lse, atol=1e-6, rtol=8.01 / 65536)
    assert actual.lse[0].isposinf().all()
    install(monkeypatch, "0.6.8", *FUNCTIONS["0.6.8"])
    with pytest.raises(
        trtllm.LibraryContractError, match=r"of flashinfer 0.6.8 has no parameter return_lse, .* since 0.6.12"
    ):
        trtllm.prefill(q, cache, indices, scale=0.05, return_lse=True)


@pytest.mark.parametrize("quantised_q", [True, False])
def test_fp8_rows_with_one_scale(flashinfer, quantised_q):
    q, cache, indices = sparse_case()
    q_scale, k_scale = 0.02, 0.01
    codes = (cache.data.float() / k_scale).clamp(-448, 448).to(FP8_DTYPE)
    q_codes = (q.float() / q_scale).clamp(-448, 448).to(FP8_DTYPE)
    expected = sparse_mla.reference_prefill(
        q_codes.float() * q_scale, open_cache(codes.float() * k_scale, "bf16"), indices, scale=0.05
    )
    actual = trtllm.prefill(
        q_codes if quantised_q else q,
        trtllm.open_fp8_cache(codes),
        indices,
        scale=0.05,
        q_scale=q_scale,
        k_scale=k_scale,
    )
    assert actual.out.dtype == torch.bfloat16
    torch.testing.assert_close(actual.out.float(), expected.out, atol=1e-3, rtol=3.01 / 128)


def test_many_rows_go_in_several_calls(flashinfer, monkeypatch):
    monkeypatch.setattr(trtllm, "MAX_ROWS", 2)
    q, cache, indices = sparse_case()
    expected = sparse_mla.reference_prefill(q, cache, indices, scale=0.05, out_dtype=torch.float32)
    check_out(trtllm.prefill(q, cache, indices, scale=0.05).out, expected.out)


def test_without_a_row_or_an_entry(flashinfer):
    q, cache, indices = sparse_case()
    assert trtllm.prefill(q[:0], cache, indices[:0], scale=1.0).out.shape == (0, 3, 512)
    none = trtllm.prefill(q, cache, indices[:, :0], scale=1.0, return_lse=True)
    assert (none.out == 0).all()
    assert none.lse.isposinf().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_sink": torch.zeros(3)}, "attn_sink is given; provider trtllm"),
        ({"extra_kv": torch.zeros(8, 576), "extra_indices": torch.zeros(5, 1).int()}, "an extra cache is given"),
        ({"kv": allocate_cache("v32_fp8", 2, 64)}, "cache has layout v32_fp8 of uint8"),
        (
            {"kv": torch.zeros(33, 576, dtype=torch.bfloat16)},
            "33 rows in pages of 1; provider trtllm takes pages of 32",
        ),
        ({"kv": open_cache(torch.zeros(2, 40, 576).bfloat16()[:, :32], "bf16")}, "takes contiguous pages"),
        ({"d_v": 256}, "d_v is 256; provider trtllm takes 512"),
        ({"q": torch.zeros(5, 3, 576)}, "q has dtype float32; allowed: bfloat16"),
        ({"q": torch.zeros(5, 3, 576).to(FP8_DTYPE)}, "q has dtype float8_e4m3fn; allowed: bfloat16"),
        ({"q": torch.zeros(5, 96, 576).bfloat16()}, "q has 96 heads; provider trtllm takes 1 to 64, or 128"),
        ({"k_scale": 0.5}, "q_scale and k_scale are 1.0 and 0.5; they belong to an fp8 cache"),
        ({"indices": torch.zeros(4, 40).int()}, "indices has shape"),
    ],
)
def test_what_it_cannot_carry_is_refused(flashinfer, changes, message):
    q, cache, indices = sparse_case()
    with pytest.raises(KernelArgumentError, match=message):
        trtllm.prefill(**({"q": q, "kv": cache, "indices": indices, "scale": 1.0} | changes))


def test_a_changed_library_is_named(monkeypatch):
    def renamed(query, kv_cache, workspace_buffer, block_table, new_one, **_):
        raise AssertionError

    install(monkeypatch, "9.1", ragged_0_7_2, renamed)
    q, cache, indices = sparse_case()
    with pytest.raises(
        trtllm.LibraryContractError, match=r"trtllm_batch_decode_with_kv_cache_mla of flashinfer 9.1 has no parameter"
    ):
        trtllm.prefill(q, cache, indices, scale=1.0)


def test_an_unknown_required_parameter_is_named(monkeypatch):
    def demanding(*, new_one, **keywords):
        raise AssertionError

    parameters = dict.fromkeys(trtllm.CALLS[trtllm.MLA_FUNCTION].always)
    taken = trtllm.inspect.signature(demanding).parameters
    known = {name: trtllm.inspect.Parameter(name, trtllm.inspect.Parameter.KEYWORD_ONLY) for name in parameters}
    with pytest.raises(trtllm.LibraryContractError, match=r"flashinfer 9.1 requires new_one, which is not known"):
        trtllm.arguments_of(trtllm.MLA_FUNCTION, known | {"new_one": taken["new_one"]}, "9.1", parameters)
