"""The Triton kernel of dense ragged attention, interpreted, against the reference."""

import math

import pytest
import torch

from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.triton import mha as triton_mha
from nsa_plugin.kernels.triton.tiles import MhaTile

from . import mha_cases
from .oracles import noncontiguous

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted; tests/gpu has the compiled kernel")

mha = triton_mha.mha


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", mha_cases.REQUESTS)
def test_ragged_requests(name, causal):
    case = mha_cases.make(mha_cases.REQUESTS[name], 2)
    actual = mha(*case, scale=case.scale, causal=causal, return_lse=True)
    mha_cases.check(actual, case, causal=causal)
    assert (actual.out[-mha_cases.PADDING :] == 0).all()
    assert actual.lse[-mha_cases.PADDING :].isposinf().all()


@pytest.mark.parametrize("heads", [1, 3, 5, 20])
def test_heads(heads):
    case = mha_cases.make([(17, 40), (4, 4)], heads)
    mha_cases.check(mha(*case, scale=case.scale), case)


@pytest.mark.parametrize(("d_qk", "d_v"), [(128, 128), (256, 256), (192, 128), (12, 8), (40, 100), (17, 1), (1, 33)])
def test_widths(d_qk, d_v):
    case = mha_cases.make([(9, 40), (35, 35)], 2, d_qk=d_qk, d_v=d_v)
    mha_cases.check(mha(*case, scale=case.scale, return_lse=True), case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_types(dtype):
    case = mha_cases.make([(20, 33), (7, 7)], 2, dtype=dtype)
    exact = mha(*case, scale=case.scale, out_dtype=torch.float32, return_lse=True)
    mha_cases.check(exact, case, atol=1e-5, rtol=1e-4)
    rounded = mha(*case, scale=case.scale)
    assert rounded.out.dtype == dtype
    assert rounded.lse is None
    # Not `torch.equal`: the interpreter cuts the low bits off where a GPU rounds.
    torch.testing.assert_close(rounded.out.float(), exact.out, atol=1e-6, rtol=2**-7)


def test_mixed_types_are_multiplied_in_float32():
    case = mha_cases.make([(20, 33)], 2, dtype=torch.float32)
    mixed = case._replace(k=case.k.half(), v=case.v.bfloat16())
    mha_cases.check(mha(*mixed, scale=case.scale, out_dtype=torch.float32), mixed, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("max_seqlen_q", [1, 16, 128])
def test_the_result_does_not_depend_on_the_tile(max_seqlen_q):
    """A tile of any height, also one lower than a request that the caller did not announce."""
    case = mha_cases.make(mha_cases.REQUESTS["a prefix beside fresh prompts"], 2)
    actual = mha(*case, scale=case.scale, max_seqlen_q=max_seqlen_q, max_seqlen_k=131, return_lse=True)
    mha_cases.check(actual, case)


def test_every_tile_height_covers_every_row(monkeypatch):
    """Lengths around multiples of the tile's height: no row is left out, none is written twice."""
    monkeypatch.setattr(triton_mha, "mha_tile", lambda *_: MhaTile(16, 16, 4, 1))
    lengths = [15, 16, 17, 1, 0, 31, 32, 33, 0, 0, 48]
    case = mha_cases.make([(length, length) for length in lengths], 1, d_qk=16, d_v=16)
    actual = mha(*case, scale=case.scale, out=torch.full_like(case.q, math.nan), return_lse=True)
    mha_cases.check(actual, case)


def test_strides_and_a_caller_s_output():
    case = mha_cases.make([(9, 40), (5, 5)], 3, dtype=torch.float32)
    strided = case._replace(q=noncontiguous(case.q), k=noncontiguous(case.k), v=noncontiguous(case.v))
    strided = strided._replace(
        cu_seqlens_q=noncontiguous(case.cu_seqlens_q.long()), cu_seqlens_k=noncontiguous(case.cu_seqlens_k.long())
    )
    out = noncontiguous(torch.full((14 + mha_cases.PADDING, 3, 128), math.nan))
    actual = mha(*strided, scale=case.scale, out=out)
    assert actual.out is out
    mha_cases.check(actual, case, atol=1e-5, rtol=1e-4)


def test_memory_of_other_requests_has_no_influence():
    case = mha_cases.make([(9, 20), (5, 5), (4, 30)], 2)
    expected = mha(*case, scale=case.scale, return_lse=True)
    for tensor in (case.k, case.v):
        tensor[20:25] = math.nan
    actual = mha(*case, scale=case.scale, return_lse=True)
    for before, after in ((expected.out, actual.out), (expected.lse, actual.lse)):
        assert torch.equal(before[:9], after[:9])
        assert torch.equal(before[14:], after[14:])
        assert after[9:14].isnan().all()


def test_boundaries_beyond_the_tensors_stay_inside():
    """Boundaries that the reference refuses and a device cannot report: nothing outside q, k and v is touched."""
    case = mha_cases.make([(9, 20), (5, 5)], 1, d_qk=16, d_v=16, padding=0)
    wrong = case._replace(
        cu_seqlens_q=torch.tensor([0, 9, 2000], dtype=torch.int32),
        cu_seqlens_k=torch.tensor([0, 20, 1 << 30], dtype=torch.int32),
    )
    actual = mha(*wrong, scale=case.scale)
    mha_cases.check(actual, case)


def test_reruns_are_bit_identical():
    case = mha_cases.make([(33, 64), (16, 16)], 2)
    runs = [mha(*case, scale=case.scale, return_lse=True) for _ in range(2)]
    assert torch.equal(runs[0].out, runs[1].out)
    assert torch.equal(runs[0].lse, runs[1].lse)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(8, 12)}, "mha_one_shot: q has shape"),
        ({"q": torch.zeros(8, 3, 12, dtype=torch.float64)}, "q has dtype float64"),
        ({"k": torch.zeros(16, 2, 12)}, r"k has shape \[16, 2, 12\]; expected \[kv_tokens, 3, 12\]"),
        ({"v": torch.zeros(15, 3, 8)}, "v has shape"),
        ({"v": torch.zeros(16, 3, 300)}, "heads of 12 and 300 values; this provider takes 1 to 256"),
        ({"cu_seqlens_q": torch.tensor([], dtype=torch.int32)}, "cu_seqlens_q is"),
        ({"cu_seqlens_k": torch.tensor([0, 16])}, "cu_seqlens_k has 2 entries; expected 3"),
        ({"cu_seqlens_k": torch.tensor([0.0, 12.0, 16.0])}, "cu_seqlens_k has dtype float32"),
        ({"out": torch.zeros(8, 3, 9)}, "out has shape"),
        ({"out": torch.zeros(8, 3, 8), "out_dtype": torch.float16}, "out_dtype"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    case = mha_cases.make([(3, 11), (5, 5)], 3, d_qk=12, d_v=8, padding=0, dtype=torch.float32)
    with pytest.raises(KernelArgumentError, match=message):
        mha(**(case._asdict() | changes), scale=1.0)
