"""Dense ragged MHA against a float64 loop over requests, rows and heads."""

import math

import numpy as np
import pytest
import torch

from nsa_plugin.kernels import mha
from nsa_plugin.kernels.checks import KernelArgumentError

from .oracles import HEAD_COUNTS, noncontiguous, to_numpy

REQUESTS = [
    [(5, 5)],  # a fresh prompt
    [(3, 11), (1, 1), (4, 4)],  # a prefix beside fresh prompts
    [(0, 7), (2, 2), (3, 0)],  # no rows; no keys
    [(6, 2)],  # more rows than keys: the first see none
]


def cumulative(counts):
    return torch.tensor([sum(counts[:i]) for i in range(len(counts) + 1)], dtype=torch.int32)


def case(requests, heads, d_qk=12, d_v=8, padding=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(heads)
    rows = sum(sq for sq, _ in requests)
    keys = sum(sk for _, sk in requests)
    q = torch.randn(rows + padding, heads, d_qk, generator=generator).to(dtype)
    k = torch.randn(keys + padding, heads, d_qk, generator=generator).to(dtype)
    v = torch.randn(keys + padding, heads, d_v, generator=generator).to(dtype)
    if padding:
        q[rows:], k[keys:], v[keys:] = math.nan, math.nan, math.nan
    return q, k, v, cumulative([sq for sq, _ in requests]), cumulative([sk for _, sk in requests])


def oracle(q, k, v, requests, scale, causal):
    q, k, v = to_numpy(q), to_numpy(k), to_numpy(v)
    out, lse = np.zeros((*q.shape[:2], v.shape[-1])), np.full(q.shape[:2], np.inf)
    first_row = first_key = 0
    for sq, sk in requests:
        for i in range(sq):
            seen = min(sk, sk - sq + i + 1) if causal else sk
            if seen <= 0:
                continue
            for head in range(q.shape[1]):
                logits = k[first_key : first_key + seen, head] @ q[first_row + i, head] * scale
                top = logits.max()
                weights = np.exp(logits - top)
                lse[first_row + i, head] = top + math.log(weights.sum())
                out[first_row + i, head] = weights @ v[first_key : first_key + seen, head] / weights.sum()
        first_row, first_key = first_row + sq, first_key + sk
    return out, lse


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("requests", REQUESTS)
@pytest.mark.parametrize("heads", HEAD_COUNTS)
def test_ragged_requests(heads, requests, causal):
    q, k, v, cu_q, cu_k = case(requests, heads, padding=3)
    result = mha.reference(q, k, v, cu_q, cu_k, scale=0.4, causal=causal, return_lse=True)
    out, lse = oracle(q, k, v, requests, 0.4, causal)
    np.testing.assert_allclose(to_numpy(result.out), out, atol=1e-5, rtol=1e-4)
    np.testing.assert_allclose(to_numpy(result.lse), lse, atol=1e-5, rtol=1e-5)
    assert (result.out[-3:] == 0).all()


def test_real_widths_in_bfloat16():
    requests = [(20, 33), (7, 7)]
    q, k, v, cu_q, cu_k = case(requests, 4, d_qk=192, d_v=128, dtype=torch.bfloat16)
    result = mha.reference(q, k, v, cu_q, cu_k, scale=192**-0.5, out_dtype=torch.float32, return_lse=True)
    out, lse = oracle(q, k, v, requests, 192**-0.5, True)
    np.testing.assert_allclose(to_numpy(result.out), out, atol=1e-5, rtol=1e-4)
    np.testing.assert_allclose(to_numpy(result.lse), lse, atol=1e-5, rtol=1e-5)
    rounded = mha.reference(q, k, v, cu_q, cu_k, scale=192**-0.5)
    assert torch.equal(rounded.out, result.out.bfloat16())
    assert rounded.lse is None


def test_chunks_strides_and_a_caller_s_output(monkeypatch):
    q, k, v, cu_q, cu_k = case([(9, 14), (5, 5)], 3)
    whole = mha.reference(q, k, v, cu_q, cu_k, scale=0.4, return_lse=True)
    monkeypatch.setattr(mha, "LOGITS_BYTES", 4 * 3 * 14 * 2)
    out = noncontiguous(torch.zeros(14, 3, 8))
    chunked = mha.reference(
        noncontiguous(q),
        noncontiguous(k),
        noncontiguous(v),
        cu_q.long(),
        cu_k.long(),
        scale=0.4,
        out=out,
        return_lse=True,
    )
    assert chunked.out is out
    assert torch.allclose(out, whole.out, atol=1e-6)
    assert torch.allclose(chunked.lse, whole.lse, atol=1e-6)


def test_padding_and_empty_rows_of_a_caller_s_output_are_overwritten():
    requests = [(3, 2), (2, 0)]
    q, k, v, cu_q, cu_k = case(requests, 2, padding=2)
    out = torch.full((7, 2, 8), math.nan)
    mha.reference(q, k, v, cu_q, cu_k, scale=0.4, out=out)
    np.testing.assert_allclose(to_numpy(out), oracle(q, k, v, requests, 0.4, True)[0], atol=1e-5, rtol=1e-4)


def test_empty_inputs():
    q, k, v, cu_q, cu_k = case([], 4)
    assert mha.reference(q, k, v, cu_q, cu_k, scale=1.0).out.shape == (0, 4, 8)
    q, k, v, cu_q, cu_k = case([(0, 0), (0, 3)], 4)
    assert mha.reference(q, k, v, cu_q, cu_k, scale=1.0).out.shape == (0, 4, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(8, 12)}, "mha_one_shot: q has shape"),
        ({"k": torch.zeros(16, 2, 12)}, r"k has shape \[16, 2, 12\]; expected \[kv_tokens, 3, 12\]"),
        ({"v": torch.zeros(15, 3, 8)}, "v has shape"),
        ({"v": torch.zeros(16, 3, 8, dtype=torch.int32)}, "v has dtype int32"),
        ({"cu_seqlens_q": torch.tensor([0, 3, 9])}, r"cu_seqlens_q is \[0, 3, 9\]; it must rise from 0 to at most 8"),
        ({"cu_seqlens_q": torch.tensor([1, 3, 8])}, "cu_seqlens_q is"),
        ({"cu_seqlens_k": torch.tensor([0, 12, 11])}, "cu_seqlens_k is"),
        ({"cu_seqlens_k": torch.tensor([0, 16])}, "cu_seqlens_k has 2 entries; expected 3"),
        ({"cu_seqlens_k": torch.tensor([0.0, 12.0, 16.0])}, "cu_seqlens_k has dtype float32"),
        ({"out": torch.zeros(8, 3, 9)}, "out has shape"),
        ({"out": torch.zeros(8, 3, 8), "out_dtype": torch.float16}, "out_dtype"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    q, k, v, cu_q, cu_k = case([(3, 11), (5, 5)], 3)
    arguments = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "scale": 1.0}
    with pytest.raises(KernelArgumentError, match=message):
        mha.reference(**(arguments | changes))
