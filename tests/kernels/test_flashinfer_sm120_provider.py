"""FlashInfer's SM120 kernels behind the contract, over a stand-in with the checks and the signature of 0.7.2."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from nsa_plugin.kernels import sparse_mla
from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.kv_cache import PagedCache, allocate_cache, open_cache, reference_write
from nsa_plugin.kernels.providers import flashinfer_sm120 as provider
from nsa_plugin.kernels.providers.trtllm import LibraryContractError
from nsa_plugin.layouts import V32_FP8


def function(
    query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens,
    max_seq_len, sparse_mla_top_k=0, out=None, bmm1_scale=1.0, bmm2_scale=1.0, sinks=None,
    skip_softmax_threshold_scale_factor=None, enable_pdl=None, backend="auto", is_var_seq=True,
    uses_shared_paged_kv_idx=True, lse=None, return_lse=False, cute_dsl_impl="auto", kv_scale_format="auto",
    cum_seq_lens_q=None, max_q_len=None, return_lse_base=None,
):  # fmt: skip
    rows, q_len, heads, dim = query.shape
    assert (backend, kv_scale_format, seq_lens, sinks, return_lse_base) == (
        "sparse",
        "arbitrary_fp32",
        None,
        None,
        "basee",
    )
    assert (q_len, dim, kv_lora_rank, qk_rope_head_dim) == (1, 576, 512, 64)
    assert query.dtype == torch.bfloat16
    assert query.is_contiguous()
    assert heads in (8, 16, 32, 64, 128)
    assert kv_cache.dtype == torch.uint8
    assert kv_cache.shape[1] == 1
    assert kv_cache.shape[3] == 656
    assert kv_cache.is_contiguous()
    assert block_tables.dtype == torch.int32
    assert block_tables.shape == (rows, 1, sparse_mla_top_k)
    assert block_tables.is_contiguous()
    assert sparse_mla_top_k % 64 == 0
    assert bmm2_scale == 1.0
    assert isinstance(bmm1_scale, float)
    slots = kv_cache.shape[0] * kv_cache.shape[2]
    assert int(block_tables.max()) < slots
    assert int(block_tables.min()) >= -1
    cache = open_cache(kv_cache.view(kv_cache.shape[0], -1), V32_FP8, kv_cache.shape[2])
    result = sparse_mla.reference_prefill(
        query.squeeze(1), cache, block_tables.squeeze(1), scale=bmm1_scale, out_dtype=torch.float32
    )
    # A row without entries holds anything: the provider must not rely on it.
    empty = (block_tables.squeeze(1) < 0).all(-1)
    out.copy_(torch.where(empty.view(-1, 1, 1), 7.0, result.out).unsqueeze(1))
    lse.copy_(torch.where(empty.view(-1, 1), 7.0, result.lse))
    return out, lse


def install(monkeypatch: pytest.MonkeyPatch, found: Any, version: str = "0.7.2") -> None:
    package, decode = ModuleType("flashinfer"), ModuleType("flashinfer.decode")
    package.__version__, package.__path__ = version, []
    decode.trtllm_batch_decode_with_kv_cache_mla = found
    for module in (package, decode):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(provider, "WORKSPACE", 1 << 12)


@pytest.fixture
def flashinfer(monkeypatch):
    install(monkeypatch, function)


def inputs(heads: int, page_size: int = 64, pages: int = 3) -> tuple[torch.Tensor, PagedCache, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    cache = allocate_cache("v32_fp8", pages, page_size)
    slots = pages * page_size
    reference_write(cache, torch.randn(slots, 576, generator=generator).bfloat16(), torch.arange(slots))
    q = torch.randn(6, heads, 576, generator=generator).bfloat16()
    indices = torch.randint(-20, slots + 20, (6, 40), generator=generator).int()
    indices[0] = -1
    return q, cache, indices


@pytest.mark.parametrize(("heads", "page_size"), [(3, 64), (8, 32), (16, 64), (40, 17)])
def test_prefill(flashinfer, heads, page_size):
    q, cache, indices = inputs(heads, page_size)
    length = torch.tensor([40, 0, 7, 40, 99, 12], dtype=torch.int32)
    expected = sparse_mla.reference_prefill(q, cache, indices, scale=0.05, topk_length=length)
    actual = provider.prefill(q, cache, indices, scale=0.05, topk_length=length)
    torch.testing.assert_close(actual.out, expected.out, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(actual.lse, expected.lse, atol=1e-4, rtol=1e-4)
    assert (actual.out[:2] == 0).all()
    assert actual.lse[:2].isposinf().all()
    assert actual.max_logits.isnan().all()


def test_decode_into_a_caller_s_output(flashinfer):
    q, cache, indices = inputs(5)
    q, indices = q.view(3, 2, 5, 576), indices.view(3, 2, 40)
    expected = sparse_mla.reference_decode(q, cache, indices, scale=0.05)
    out = torch.full((3, 2, 5, 512), float("nan")).bfloat16()
    actual = provider.decode(q, cache, indices, scale=0.05, out=out)
    assert actual.out is out
    torch.testing.assert_close(out, expected.out, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(actual.lse, expected.lse, atol=1e-4, rtol=1e-4)


def gaps(cache: PagedCache) -> PagedCache:
    data = torch.zeros(cache.num_pages, cache.data.shape[1] + 64, dtype=torch.uint8)
    return open_cache(data[:, : cache.data.shape[1]], V32_FP8, cache.page_size)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, c, i: (q.float(), c, i, {}), "q has dtype torch.float32"),
        (lambda q, c, i: (q, gaps(c), i, {}), "takes pages without gaps, aligned to 16 bytes"),
        (lambda q, c, i: (q, open_cache(torch.zeros(3, 64, 576).bfloat16(), "bf16"), i, {}), "layout bf16"),
        (lambda q, c, i: (q, c, i, {"attn_sink": torch.zeros(3)}), "attn_sink is given"),
        (lambda q, c, i: (torch.zeros(6, 129, 576).bfloat16(), c, i, {}), "q has 129 heads; .* takes up to 128"),
    ],
)
def test_what_it_does_not_take_is_named(flashinfer, change, message):
    q, cache, indices, more = change(*inputs(3))
    with pytest.raises(KernelArgumentError, match=message):
        provider.prefill(q, cache, indices, scale=1.0, **more)


def test_a_flashinfer_without_the_scale_format_is_named(monkeypatch):
    def older(query, kv_cache, workspace_buffer, backend="auto"):
        raise AssertionError

    install(monkeypatch, older, "0.6.13")
    with pytest.raises(LibraryContractError, match=r"of flashinfer 0.6.13 has no parameter"):
        provider.prefill(*inputs(3), scale=1.0)
