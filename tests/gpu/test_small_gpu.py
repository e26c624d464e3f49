"""Every kernel of the plugin on cases so small that a memory checker gets through them: `make sanitize-gpu`."""

from __future__ import annotations

import importlib
from functools import partial

import pytest
import torch

from nsa_plugin.kernels import sparse_mla
from nsa_plugin.kernels.indexer import reference_topk
from nsa_plugin.kernels.topk import reference_topk_rows
from tests.kernels import index_cases, kv_cache_cases, mha_cases
from tests.kernels.sparse_mla_cases import assert_same, decode_case, prefill_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sanitize,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OWN = ("triton", "cuda")
EXTRA = ("v4_fp8", 128, 70, 64)


def kernel(provider: str, module: str, function: str):
    if provider == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the CUDA kernels are for SM90")
    return getattr(importlib.import_module(f"nsa_plugin.kernels.{provider}.{module}"), function)


@pytest.mark.parametrize(
    ("layout", "heads", "extra"),
    [("v32_fp8", 5, None), ("v32_fp8", 16, None), ("v32_fp8", 33, None), ("v4_fp8", 5, EXTRA), ("v4_fp8", 16, EXTRA)],
)
@pytest.mark.parametrize("provider", OWN)
def test_sparse_prefill(provider, layout, heads, extra):
    case = prefill_case(tokens=3, heads=heads, slots=192, topk=150, layout=layout, extra=extra)
    assert_same(kernel(provider, "sparse_mla", "prefill")(**case), sparse_mla.reference_prefill(**case))


@pytest.mark.parametrize(("layout", "extra"), [("v32_fp8", None), ("v4_fp8", EXTRA)])
@pytest.mark.parametrize("provider", OWN)
def test_split_decode(provider, layout, extra):
    case = decode_case(batch=2, s_q=2, heads=8, layout=layout, slots=512, topk=400, extra=extra)
    assert_same(kernel(provider, "sparse_mla", "decode")(**case), sparse_mla.reference_decode(**case))


@pytest.mark.parametrize("is_cluster", [True, False])
@pytest.mark.parametrize(("layout", "extra"), [("v32_fp8", None), ("v4_fp8", EXTRA)])
def test_shares_add_up_as_a_cluster_and_in_memory(monkeypatch, layout, extra, is_cluster):
    decode = kernel("cuda", "sparse_mla", "decode")
    asked = []
    monkeypatch.setattr(
        "nsa_plugin.kernels.cuda.sparse_mla_launch.clusters", lambda *_: asked.append(1) or (10**6 if is_cluster else 0)
    )
    case = decode_case(batch=2, s_q=2, heads=17, layout=layout, slots=512, topk=400, extra=extra)
    assert_same(decode(**case, splits=3), sparse_mla.reference_decode(**case))
    assert asked


@pytest.mark.parametrize("provider", OWN)
def test_topk_rows(provider):
    logits = torch.randn(5, 6000, device="cuda")
    logits[1] = 1.0
    starts = torch.tensor([0, 3, 10, 6000, 0], dtype=torch.int32, device="cuda")
    ends = torch.tensor([6000, 5999, 40, 6000, 4097], dtype=torch.int32, device="cuda")
    select = kernel(provider, "topk", "topk_rows")
    expected = reference_topk_rows(logits, starts, ends, 512)
    assert torch.equal(select(logits, starts, ends, 512).sort(1).values, expected.sort(1).values)


def test_indexer():
    q = torch.randn(4, 64, 128, device="cuda").to(torch.float8_e4m3fn)
    k = torch.randn(300, 128, device="cuda").to(torch.float8_e4m3fn)
    weights, scale = torch.rand(4, 64, device="cuda"), torch.rand(300, device="cuda")
    ks = torch.tensor([0, 0, 100, 7], dtype=torch.int32, device="cuda")
    ke = torch.tensor([300, 1, 300, 7], dtype=torch.int32, device="cuda")
    run = partial(reference_topk, q, k, scale, weights, ks, ke)
    expected, found = run(300), kernel("triton", "indexer", "topk")(q, k, scale, weights, ks, ke, 300)
    # As many positions as keys are seen, so rounding cannot change the set.
    assert torch.equal(found.sort(1).values, expected.sort(1).values)


@pytest.mark.parametrize("layout", ["bf16", "v32_fp8", "v4_fp8", "indexer_fp8"])
def test_caches(layout):
    kv_cache_cases.check_far_slots(layout, "cuda")
    if layout != "bf16":
        kv_cache_cases.check_workspace(layout, "cuda")


def test_index_kernels():
    index_cases.check_paged(1, 5, 17, 3, 6, 4, "cuda")
    index_cases.check_ragged(2, 5, 17, "cuda")
    index_cases.check_window(4, 3, 8, 2, "cuda")


def test_dense():
    case = mha_cases.make([(40, 70), (0, 3), (5, 5)], 2, device="cuda")
    attend = kernel("triton", "mha", "mha")
    mha_cases.check(attend(*case, scale=case.scale, return_lse=True), case)
