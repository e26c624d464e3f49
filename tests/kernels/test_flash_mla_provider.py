"""Calls and results of the flash_mla provider, against a stand-in library.

The stand-in refuses what the library refuses (dtypes, 64 or 128 heads, top-k multiples, only -1 as an
invalid index in decode) and computes by the references, so that equal results prove padding and slicing.
"""

import sys
from types import SimpleNamespace

import pytest
import torch

from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.kv_cache import allocate_cache, open_cache
from nsa_plugin.kernels.providers import flash_mla as provider
from nsa_plugin.kernels.sparse_mla import reference_decode, reference_prefill

from .oracles import HEAD_COUNTS
from .sparse_mla_cases import DEVICE, assert_same, decode_case, make_lengths, prefill_case, strided

EXACT = (1e-6, 1e-2)


class Library:
    """The stand-in; `calls` has the arguments of every call by name."""

    def __init__(self):
        self.calls = []
        self.schedules = 0

    def get_mla_metadata(self):
        self.schedules += 1
        return f"schedule {self.schedules}", None

    def flash_mla_sparse_fwd(
        self, q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, use_legacy=False
    ):
        self.calls.append(SimpleNamespace(q=q, kv=kv, indices=indices, topk_length=topk_length))
        assert use_legacy
        self.check(q, kv, indices, attn_sink, 128)
        assert q.dim() == kv.dim() == indices.dim() == 3
        assert kv.dtype == torch.bfloat16
        if topk_length is not None:
            self.check_lengths(topk_length, q.shape[0], indices.shape[-1])
        return reference_prefill(q, kv, indices, scale=sm_scale, d_v=d_v, attn_sink=attn_sink, topk_length=topk_length)

    def flash_mla_with_kvcache(
        self,
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits=None,
        softmax_scale=None,
        is_fp8_kvcache=None,
        indices=None,
        attn_sink=None,
        extra_k_cache=None,
        extra_indices_in_kvcache=None,
        topk_length=None,
        extra_topk_length=None,
        use_legacy=False,
    ):
        self.calls.append(SimpleNamespace(q=q, indices=indices, topk_length=topk_length, extra=extra_k_cache,
                                          metadata=tile_scheduler_metadata))  # fmt: skip
        assert use_legacy
        assert is_fp8_kvcache
        assert block_table is cache_seqlens is num_splits is None
        layout = "v32_fp8" if q.shape[-1] == 576 else "v4_fp8"
        if layout == "v32_fp8":
            assert topk_length is extra_k_cache is None
        scopes = [(k_cache, indices, topk_length)]
        if extra_k_cache is not None:
            scopes.append((extra_k_cache, extra_indices_in_kvcache, extra_topk_length))
        for cache, entries, lengths in scopes:
            self.check(q, cache, entries, attn_sink, 64)
            assert cache.dim() == 4
            assert cache.stride(0) % 16 == 0
            assert int(entries.min()) >= -1
            assert int(entries.max()) < cache.shape[0] * cache.shape[1]
            if lengths is not None:
                self.check_lengths(lengths, q.shape[0], entries.shape[-1])
        caches = [open_cache(cache, layout) for cache, _, _ in scopes]
        more = {}
        if len(scopes) > 1:
            more = {"extra_cache": caches[1], "extra_indices": scopes[1][1], "extra_topk_length": scopes[1][2]}
        result = reference_decode(
            q,
            caches[0],
            indices,
            scale=softmax_scale,
            d_v=head_dim_v,
            attn_sink=attn_sink,
            topk_length=topk_length,
            **more,
        )
        return result.out, result.lse

    @staticmethod
    def check(q, kv, indices, attn_sink, multiple):
        heads = q.shape[-2]
        assert q.dtype == torch.bfloat16
        assert q.is_contiguous()
        assert heads in (64, 128)
        assert indices.dtype == torch.int32
        assert indices.is_contiguous()
        assert indices.shape[-1] > 0
        assert indices.shape[-1] % multiple == 0
        assert kv.stride(-1) == 1
        assert attn_sink is None or (attn_sink.shape == (heads,) and attn_sink.is_contiguous())

    @staticmethod
    def check_lengths(lengths, rows, topk):
        assert lengths.dtype == torch.int32
        assert lengths.shape == (rows,)
        assert lengths.is_contiguous()
        assert 0 <= int(lengths.min()) <= int(lengths.max()) <= topk


@pytest.fixture
def library(monkeypatch):
    stand_in = Library()
    monkeypatch.setitem(sys.modules, "flash_mla", stand_in)
    return stand_in


@pytest.mark.parametrize("with_length", [True, False])
@pytest.mark.parametrize("heads", HEAD_COUNTS)
def test_prefill_pads_heads_and_topk(library, heads, with_length):
    case = prefill_case(tokens=3, heads=heads, slots=95, topk=70, with_length=with_length)
    result = provider.prefill(**case)
    assert_same(result, reference_prefill(**case), EXACT)
    assert library.calls[0].q.shape == (3, 64 if heads <= 64 else 128, 576)
    assert library.calls[0].indices.shape == (3, 1, 128)


def test_what_fits_is_handed_over_as_it_is(library):
    case = prefill_case(tokens=3, heads=64, slots=95, topk=128, dim=512, with_length=False)
    result = provider.prefill(**case)
    assert_same(result, reference_prefill(**case), EXACT)
    call = library.calls[0]
    for ours, theirs in ((case["q"], call.q), (case["indices"], call.indices), (case["kv"], call.kv)):
        assert ours.data_ptr() == theirs.data_ptr()


def test_entries_behind_a_length_do_not_reach_the_library(library):
    case = prefill_case(tokens=4, heads=64, slots=95, topk=128)
    case["topk_length"] = torch.tensor([500, 0, -3, 17], device=DEVICE)
    provider.prefill(**case)
    call = library.calls[0]
    assert call.topk_length.tolist() == [128, 0, 0, 17]
    assert (call.indices[1:3] == -1).all()
    assert (call.indices[3, 0, 17:] == -1).all()
    assert torch.equal(call.indices[3, 0, :17], torch.where(
        (case["indices"][3, :17] >= 0) & (case["indices"][3, :17] < 95), case["indices"][3, :17], -1))  # fmt: skip


def test_prefill_reads_a_bf16_cache_in_place(library):
    case = prefill_case(tokens=3, heads=5, slots=64, topk=70)
    rows = case["kv"].view(64, 576)
    paged = provider.prefill(**(case | {"kv": open_cache(rows.view(4, 16, 576), "bf16")}))
    assert library.calls[0].kv.data_ptr() == rows.data_ptr()
    assert_same(paged, reference_prefill(**case), EXACT)


def test_noncontiguous_arguments_and_an_output(library):
    case = prefill_case(tokens=3, heads=5, slots=64, topk=70)
    spread = {name: strided(case[name]) for name in ("q", "indices", "topk_length", "attn_sink")}
    out = strided(torch.zeros(3, 5, 512, device=DEVICE))
    result = provider.prefill(**(case | spread | {"indices": spread["indices"].long()}), out=out)
    assert result.out is out
    assert_same(result, reference_prefill(**case, out_dtype=torch.float32), (1e-3, 2e-2))


@pytest.mark.parametrize("heads", [1, 16, 64, 128])
@pytest.mark.parametrize(("batch", "s_q"), [(3, 1), (2, 3)])
def test_v32_decode(library, batch, s_q, heads):
    case = decode_case(batch=batch, s_q=s_q, heads=heads, layout="v32_fp8", slots=128, topk=70, with_length=False)
    result = provider.decode(**case)
    assert_same(result, reference_decode(**case), EXACT)
    assert library.calls[0].indices.shape == (batch, s_q, 128)
    assert library.calls[0].metadata == "schedule 1"


@pytest.mark.parametrize("extra", [None, ("v4_fp8", 128, 45, 64)])
@pytest.mark.parametrize("per_query", [False, True])
@pytest.mark.parametrize("with_length", [False, True])
def test_v4_decode(library, with_length, per_query, extra):
    case = decode_case(
        batch=2, s_q=3, heads=5, layout="v4_fp8", slots=512, page_size=256, topk=64,
        with_length=with_length, length_per_query=per_query, extra=extra,
    )  # fmt: skip
    result = provider.decode(**case, metadata="mine")
    assert_same(result, reference_decode(**case), EXACT)
    assert library.calls[0].metadata == "mine"
    assert library.schedules == 0


def test_a_cache_without_rows_is_not_shown_to_the_library(library):
    case = decode_case(batch=2, s_q=1, heads=5, layout="v4_fp8", slots=128, topk=64, extra=("v4_fp8", 128, 45, 64))
    empty = allocate_cache("v4_fp8", 0, 64, device=DEVICE)
    for changes in ({"cache": empty}, {"extra_cache": empty}):
        result = provider.decode(**(case | changes))
        assert_same(result, reference_decode(**(case | changes)), EXACT)
        assert library.calls[-1].extra is None


@pytest.mark.parametrize(("tokens", "slots", "topk"), [(0, 64, 5), (3, 0, 5), (3, 64, 0)])
def test_empty_inputs_do_not_reach_the_library(library, tokens, slots, topk):
    q = torch.ones(tokens, 4, 576, dtype=torch.bfloat16, device=DEVICE)
    indices = torch.zeros(tokens, topk, dtype=torch.int32, device=DEVICE)
    kv = torch.ones(slots, 576, dtype=torch.bfloat16, device=DEVICE)
    assert_same(provider.prefill(q, kv, indices, scale=1.0), reference_prefill(q, kv, indices, scale=1.0))
    cache = allocate_cache("v32_fp8", slots, 1, device=DEVICE)
    decoded = provider.decode(q[:, None], cache, indices[:, None], scale=1.0)
    assert_same(decoded, reference_decode(q[:, None], cache, indices[:, None], scale=1.0))
    assert library.calls == []


def odd_pages(layout, page_bytes):
    return open_cache(torch.zeros(2, page_bytes, dtype=torch.uint8, device=DEVICE), layout, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(3, 5, 576)}, "q has dtype torch.float32; flash_mla takes bfloat16"),
        ({"kv": torch.zeros(64, 576)}, "kv has dtype torch.float32"),
        ({"kv": allocate_cache("v32_fp8", 1, 64, device=DEVICE)}, "kv has layout v32_fp8.*dequantise first"),
        ({"d_v": 64}, "d_v is 64; flash_mla has 512"),
        ({"d_v": 600}, "d_v is 600"),
        (
            {"q": torch.zeros(3, 129, 576, dtype=torch.bfloat16), "attn_sink": None},
            "129 heads; flash_mla takes up to 128",
        ),
        ({"kv": torch.zeros(64, 1152, dtype=torch.bfloat16)[:, ::2]}, "flash_mla takes dense rows"),
        (
            {"extra_kv": torch.zeros(9, 576, dtype=torch.bfloat16), "extra_indices": torch.zeros(3, 5).int()},
            "extra_kv is given; flash_mla reads one cache",
        ),
    ],
)
def test_prefill_refuses(library, changes, message):
    changes = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in changes.items()}
    with pytest.raises(KernelArgumentError, match=message):
        provider.prefill(**(prefill_case(tokens=3, heads=5, slots=64, topk=5) | changes))
    assert library.calls == []


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("v32_fp8", {"topk_length": make_lengths((2,), 5, 0)}, "topk_length is given; flash_mla has none for v32_fp8"),
        (
            "v32_fp8",
            {
                "extra_cache": allocate_cache("v32_fp8", 1, 64, device=DEVICE),
                "extra_indices": torch.zeros(2, 1, 5).int().to(DEVICE),
            },
            "extra_cache is given; flash_mla reads one cache of v32_fp8",
        ),
        ("v32_fp8", {"cache": allocate_cache("bf16", 1, 64, device=DEVICE)}, "cache has layout bf16"),
        ("v32_fp8", {"cache": odd_pages("v32_fp8", 660)}, "cache has pages every 660 bytes"),
        ("v4_fp8", {"cache": odd_pages("v4_fp8", 584)}, "cache has pages every 584 bytes"),
    ],
)
def test_decode_refuses(library, layout, changes, message):
    case = decode_case(batch=2, s_q=1, heads=5, layout=layout, slots=64, topk=5, with_length=False)
    with pytest.raises(KernelArgumentError, match=message):
        provider.decode(**(case | changes))
    assert library.calls == []
