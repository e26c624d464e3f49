"""The DeepGEMM provider's host side, over a stand-in that asks for what the library asks for and writes what it
writes: junk outside the ranges, and of paged logits only what the schedule deals out."""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.common.warm import warm_logits
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.indexer import reference_logits, reference_paged_logits, reference_paged_topk, reference_topk
from nsa_plugin.kernels.kv_cache import allocate_cache
from nsa_plugin.kernels.providers import deep_gemm as provider
from nsa_plugin.kernels.topk import reference_topk_rows

from .indexer_cases import assert_selected, indexer_inputs, paged_keys, ragged_requests, schedule_oracle
from .oracles import noncontiguous

JUNK = 1e30
NUM_SMS = 7


class FakeDeepGemm(ModuleType):
    """`fp8_mqa_logits`, `fp8_paged_mqa_logits` and their like of sgl-deep-gemm 0.1.4 on SM90."""

    def __init__(self) -> None:
        super().__init__("deep_gemm")
        self.__spec__ = ModuleSpec("deep_gemm", None)  # it counts as installed
        self.calls: list[tuple] = []
        self.schedules = 0
        self.compiled: set[bool] = set()

    def get_num_sms(self):
        return NUM_SMS

    def fp8_mqa_logits(self, q, kv, weights, ks, ke, clean_logits=False, max_seqlen_k=0):
        k, k_scale = kv
        assert not clean_logits
        for values in (q, k, k_scale, weights, ks, ke):
            assert values.is_contiguous()
        for values in (q, k, k_scale, weights):
            assert values.data_ptr() % 16 == 0
        assert q.dtype == k.dtype == torch.float8_e4m3fn
        assert k_scale.dtype == weights.dtype == torch.float32
        assert ks.dtype == ke.dtype == torch.int32
        keys = len(k)
        assert len(k_scale) == keys
        assert len(ks) == len(ke) == len(q) == len(weights) > 0
        assert bool(((ks >= 0) & (ks <= ke) & (ke <= keys)).all())
        full = reference_logits(q, k, k_scale, weights, ks, ke)
        width = max_seqlen_k or keys
        self.calls.append((len(q), width))
        self.compiled.add(max_seqlen_k > 0)  # a template parameter of the kernel
        logits = torch.full((len(q), -(-(width + 256) // 4) * 4), JUNK)[:, :width]
        for row, (start, end) in enumerate(zip(ks.tolist(), ke.tolist(), strict=True)):
            first = 0 if max_seqlen_k else start
            assert end - start <= width
            logits[row, first : first + end - start] = full[row, start:end]
        return logits

    def get_paged_mqa_logits_metadata(self, context_lens, block_kv, num_sms, indices=None):
        assert (block_kv, num_sms, indices) == (64, NUM_SMS, None)
        assert context_lens.dtype == torch.int32
        assert context_lens.is_contiguous()
        self.schedules += 1
        return torch.tensor(schedule_oracle(context_lens[:, -1].tolist(), context_lens.shape[1], num_sms)).int()

    def fp8_paged_mqa_logits(
        self, q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits=False
    ):
        batch, next_n, _, _ = q.shape
        assert next_n in (1, 2)
        assert kv_cache.shape[1:] == (64, 1, 132)
        assert context_lens.shape == (batch, next_n)
        assert len(block_table) == batch
        assert block_table.dtype == context_lens.dtype == schedule_meta.dtype == torch.int32
        assert block_table.stride(1) == 1
        assert schedule_meta.shape == (NUM_SMS + 1, 2)
        for values in (q, weights, context_lens, schedule_meta):
            assert values.is_contiguous()
        last = context_lens[:, -1]
        # A request without keys, or one that does not fit, breaks the kernel's schedule or its buffer.
        assert bool(((last >= 1) & (last <= max_context_len)).all())
        self.calls.append((batch * next_n, max_context_len))
        from nsa_plugin.kernels.kv_cache import open_cache
        from nsa_plugin.layouts import INDEXER_FP8

        cache = open_cache(kv_cache, INDEXER_FP8)
        ke = last.unsqueeze(1).expand(-1, next_n).contiguous()
        # Idle requests have no page; the tensor map reads zeros for one that is not there.
        table = torch.where(block_table < 0, 0, block_table)
        full = reference_paged_logits(q, cache, weights, ke, table, max_len=max_context_len).view(batch, next_n, -1)
        logits = torch.full((batch, next_n, -(-max_context_len // 256) * 256), JUNK)
        for (block, split), (end_block, end_split) in zip(
            schedule_meta[:-1].tolist(), schedule_meta[1:].tolist(), strict=True
        ):
            while (block, split) != (end_block, end_split):
                keys = slice(256 * split, min(256 * (split + 1), int(last[block])))
                assert bool((logits[block, :, keys] == JUNK).all()), "scored twice"
                logits[block, :, keys] = full[block, :, keys]
                split += 1
                if 256 * split >= last[block]:
                    block, split = block + 1, 0
        return logits.view(batch * next_n, -1)[:, :max_context_len]


@pytest.fixture
def library(monkeypatch):
    fake = FakeDeepGemm()
    monkeypatch.setitem(sys.modules, "deep_gemm", fake)
    monkeypatch.setattr(provider, "_sm_major", lambda device: 9)
    return fake


def ranges(rows, keys, seed=0):
    generator = torch.Generator().manual_seed(seed)
    bounds = torch.randint(0, keys + 1, (2, rows), generator=generator).sort(0).values.int()
    bounds[0, 0], bounds[1, 0] = 0, keys
    bounds[1, rows // 2] = bounds[0, rows // 2] - 1  # empty, and the library must not see it so
    return bounds[0], bounds[1].clamp(min=0)


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("rows_per_chunk", [None, 1, 4])
def test_topk(library, heads, rows_per_chunk):
    inputs, (ks, ke) = indexer_inputs(9, 300, heads), ranges(9, 300)
    out = torch.full((9, 20), 7, dtype=torch.int32)
    result = provider.topk(*inputs, ks, ke, 20, rows_per_chunk=rows_per_chunk, out=out)
    assert result is out
    assert torch.equal(result, reference_topk(*inputs, ks, ke, 20))
    expected = {None: [9], 1: [1] * 9, 4: [4, 4, 1]}[rows_per_chunk]
    assert library.calls == [(rows, 300) for rows in expected]


@pytest.mark.regression(16)
@pytest.mark.parametrize("rows_per_chunk", [None, 2, 5])
def test_requests_are_scored_against_their_own_keys(library, rows_per_chunk):
    requests, ks, ke = ragged_requests([(4, 61), (0, 9), (1, 140), (3, 3), (2, 0), (2, 33)])
    ks, ke = (torch.cat([bound, bound.new_zeros(2)]) for bound in (ks, ke))
    inputs = indexer_inputs(len(ks), 246, 32)
    result = provider.topk(*inputs, ks, ke, 16, requests=requests, rows_per_chunk=rows_per_chunk)
    assert torch.equal(result, reference_topk(*inputs, ks, ke, 16))
    assert max(width for _, width in library.calls) <= 143
    if rows_per_chunk == 2:
        # Alone in its chunk, a request's keys start at a multiple of four: 70 -> 68, 210 -> 208, 213 -> 212.
        assert library.calls == [(2, 61), (2, 61), (1, 142), (2, 5), (1, 5), (2, 34)]


@pytest.mark.parametrize("rows_per_chunk", [None, 2])
def test_what_is_scored_at_once_is_cut_once_for_all_layers(library, rows_per_chunk, monkeypatch):
    requests, ks, ke = ragged_requests([(4, 61), (0, 9), (1, 140), (3, 3), (2, 0), (2, 33)])
    shared = {}
    for seed in range(2):
        inputs = [values.flip(0) if seed else values for values in indexer_inputs(len(ks), 246, 32)]
        result = provider.topk(*inputs, ks, ke, 16, rows_per_chunk=rows_per_chunk, requests=requests, shared=shared)
        assert torch.equal(result, reference_topk(*inputs, ks, ke, 16))
        monkeypatch.setattr(provider, "cut", None)


def test_the_warm_up_compiles_every_kernel_that_prefills_need(library):
    """SGLang's first batch of two prompts waited for the compiler on an empty cache."""
    model = ModelShape(num_heads=16, attn_tp_size=1, kv_layout="v32_fp8", index_n_heads=32, index_topk=16)
    warm_logits(["deep_gemm"], Providers("v32_fp8", 90), model, torch.device("cpu"))
    assert library.compiled == {False, True}


def test_a_bound_on_the_keys_of_a_row_bounds_the_buffer(library):
    inputs, (ks, ke) = indexer_inputs(6, 200, 32), ranges(6, 200)
    result = provider.topk(*inputs, ks, ke, 12, max_key_span=50)
    assert library.calls == [(6, 50)]
    assert torch.equal(result, reference_topk(*inputs, ks, torch.minimum(ke, ks + 50), 12))


def test_unaligned_and_strided_inputs_and_no_scales(library):
    q, k, k_scale, weights = indexer_inputs(5, 90, 32)
    bounds = ranges(5, 90)
    shifted = torch.zeros(91)
    shifted[1:] = k_scale
    result = provider.topk(
        noncontiguous(q), noncontiguous(k), shifted[1:], noncontiguous(weights), *map(torch.Tensor.long, bounds), 9
    )
    assert torch.equal(result, reference_topk(q, k, k_scale, weights, *bounds, 9))
    assert torch.equal(provider.topk(q, k, None, weights, *bounds, 9), reference_topk(q, k, None, weights, *bounds, 9))


@pytest.mark.parametrize(("rows", "keys"), [(0, 10), (3, 0), (0, 0)])
def test_empty_inputs_do_not_reach_the_library(library, rows, keys):
    zeros = torch.zeros(rows, dtype=torch.int32)
    assert provider.topk(*indexer_inputs(rows, keys, 32), zeros, zeros, 5).tolist() == [[-1] * 5] * rows
    assert library.calls == []


def test_the_selector_given_is_the_one_used(library):
    inputs, bounds = indexer_inputs(5, 90, 32), ranges(5, 90)
    used = []

    def select(logits, starts, ends, topk, out):
        used.append(len(logits))
        return reference_topk_rows(logits, starts, ends, topk, out)

    result = provider.topk(*inputs, *bounds, 9, rows_per_chunk=3, selector=select)
    assert used == [3, 2]
    assert torch.equal(result, reference_topk(*inputs, *bounds, 9))


LENGTHS = [130, 0, 2, 64, -1, 700, 257]


@pytest.mark.regression(11, "DeepGEMM's schedule")
@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
@pytest.mark.parametrize("rows_per_chunk", [None, 1, 5])
@pytest.mark.parametrize("metadata_provider", [None, "deep_gemm"])
def test_paged_topk(library, next_n, rows_per_chunk, metadata_provider):
    cache, table = paged_keys(LENGTHS, 12)
    batch = len(LENGTHS)
    q, _, _, weights = indexer_inputs(batch * next_n, 1, 32)
    q, lens = q.view(batch, next_n, 32, 128), torch.tensor(LENGTHS)
    result = provider.paged_topk(
        q, cache, weights, lens, table, 40, rows_per_chunk=rows_per_chunk, metadata_provider=metadata_provider
    )
    expected = reference_paged_topk(q, cache, weights, lens, table, 40)
    logits = reference_paged_logits(q, cache, weights, lens, table, max_len=700)
    limits = (expected >= 0).sum(1)
    seen = (~logits.isneginf()).sum(1)
    assert torch.equal(limits, seen.clamp(max=40))
    assert_selected(result, logits, torch.zeros_like(seen), seen, 40, 1e-6)
    assert max(rows for rows, _ in library.calls) <= (rows_per_chunk or batch * next_n)
    assert sum(rows for rows, _ in library.calls) == batch * next_n
    assert library.schedules == (len(library.calls) if metadata_provider else 0)


def test_paged_topk_with_a_limit_for_each_row(library):
    cache, table = paged_keys([300, 90], 5)
    q, _, _, weights = indexer_inputs(4, 1, 64)
    q, limits = q.view(2, 2, 64, 128), torch.tensor([[300, 20], [0, 90]], dtype=torch.int32)
    for given in (limits, limits.T.contiguous().T):
        result = provider.paged_topk(q, cache, weights, given, table, 25, max_len=310)
        assert torch.equal(result, reference_paged_topk(q, cache, weights, limits, table, 25))
    assert library.calls == [(4, 310)] * 2


class UnifiedDeepGemm(ModuleType):
    """vLLM 0.33's copy: q is (values, scales), the columns always count from ks, and there is no `clean_logits`."""

    def __init__(self, older: FakeDeepGemm) -> None:
        super().__init__("deep_gemm")
        self.older = older
        self.get_num_sms = older.get_num_sms
        self.get_paged_mqa_logits_metadata = older.get_paged_mqa_logits_metadata

    def fp8_fp4_mqa_logits(self, q, kv, weights, ks, ke, max_seqlen_k, schedule_meta=None):
        values, scales = q
        assert scales is None
        assert max_seqlen_k > 0
        return self.older.fp8_mqa_logits(values, kv, weights, ks, ke, max_seqlen_k=max_seqlen_k)

    def fp8_fp4_paged_mqa_logits(
        self, q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, indices=None
    ):
        values, scales = q
        assert scales is None
        return self.older.fp8_paged_mqa_logits(
            values, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len
        )


@pytest.fixture
def unified(library, monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_gemm", UnifiedDeepGemm(library))
    return library


@pytest.mark.parametrize("rows_per_chunk", [None, 4])
def test_vllm_s_copy_scores_ragged_rows(unified, rows_per_chunk):
    inputs, (ks, ke) = indexer_inputs(9, 300, 32), ranges(9, 300)
    result = provider.topk(*inputs, ks, ke, 20, rows_per_chunk=rows_per_chunk)
    assert torch.equal(result, reference_topk(*inputs, ks, ke, 20))


@pytest.mark.parametrize("rows_per_chunk", [None, 40])
def test_vllm_s_copy_scores_several_requests(unified, rows_per_chunk):
    requests, ks, ke = ragged_requests([(5, 90), (1, 33), (7, 200)])
    inputs = indexer_inputs(13, 323, 32)
    result = provider.topk(*inputs, ks, ke, 20, rows_per_chunk=rows_per_chunk, requests=requests)
    assert torch.equal(result, reference_topk(*inputs, ks, ke, 20))


@pytest.mark.parametrize("next_n", [1, 2, 3])
def test_vllms_copy_scores_pages_by_deep_gemms_schedule(unified, next_n):
    """That of the plugin is unproven there. A decode beyond the logits' budget ended the start (vLLM 0.33.0)."""
    cache, table = paged_keys([300, 90], 5)
    q, _, _, weights = indexer_inputs(2 * next_n, 1, 32)
    q, lens = q.view(2, next_n, 32, 128), torch.tensor([300, 90])
    result = provider.paged_topk(q, cache, weights, lens, table, 25)
    assert torch.equal(result, reference_paged_topk(q, cache, weights, lens, table, 25))
    assert unified.schedules == len(unified.calls)
    with pytest.raises(KernelArgumentError, match="metadata_provider is 'triton'; for this build on SM9x"):
        provider.paged_topk(q, cache, weights, lens, table, 25, metadata_provider="triton")


def test_deep_gemm_schedules_few_requests_at_a_time(library, monkeypatch):
    monkeypatch.setattr(provider, "LIBRARY_SCHEDULE_REQUESTS", 3)
    cache, table = paged_keys([70] * 5, 2)
    q, _, _, weights = indexer_inputs(5, 1, 32)
    arguments = (q.view(5, 1, 32, 128), cache, weights, torch.full((5,), 70), table, 8)
    expected = reference_paged_topk(*arguments)
    assert torch.equal(provider.paged_topk(*arguments, metadata_provider="deep_gemm"), expected)
    assert [rows for rows, _ in library.calls] == [3, 2]
    library.calls.clear()
    assert torch.equal(provider.paged_topk(*arguments), expected)
    assert [rows for rows, _ in library.calls] == [5]


def ragged(heads=32, dim=128, **changes):
    q, k, k_scale, weights = indexer_inputs(3, 9, heads)
    bounds = {"ks": torch.zeros(3, dtype=torch.int32), "ke": torch.full((3,), 9)}
    return provider.topk(
        **({"q": q[..., :dim], "k": k[:, :dim], "k_scale": k_scale, "weights": weights, **bounds, "topk": 4} | changes)
    )


def paged(page_size=64, **changes):
    cache, table = paged_keys([9, 5], 2, page_size)
    q, _, _, weights = indexer_inputs(2, 1, 32)
    arguments = {"q": q.view(2, 1, 32, 128), "cache": cache, "weights": weights, "page_table": table, "topk": 4}
    return provider.paged_topk(**(arguments | {"seq_lens": torch.tensor([9, 5])} | changes))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ragged(heads=16), "indexer_topk: q has 16 heads; deep_gemm takes 32 or 64 on SM9x"),
        (lambda: ragged(dim=96), "q has 96 values a head; deep_gemm takes 32, 64 or 128"),
        (lambda: ragged(q=torch.zeros(3, 32, 128)), "q has dtype float32; allowed: float8_e4m3fn"),
        (lambda: ragged(topk=0), "topk is 0"),
        (lambda: ragged(rows_per_chunk=0), "rows_per_chunk is 0"),
        (lambda: paged(page_size=32), "cache has pages of 32; deep_gemm reads 64"),
        (lambda: paged(cache=allocate_cache("v32_fp8", 1, 64)), "expected indexer_fp8"),
        (lambda: paged(metadata_provider="vllm"), "metadata_provider is 'vllm'"),
        (lambda: paged(seq_lens=torch.tensor([9])), "seq_lens has shape"),
    ],
)
def test_wrong_arguments_are_named(library, call, message):
    with pytest.raises(KernelArgumentError, match=message):
        call()


def test_a_device_without_these_kernels_is_named():
    with pytest.raises(
        KernelArgumentError, match="q is on cpu, SM0x; deep_gemm has these kernels for SM90, SM100 and SM120"
    ):
        ragged()


def test_the_module_imports_no_library():
    before = sys.modules.pop("deep_gemm", None)
    importlib.reload(provider)
    assert "deep_gemm" not in sys.modules
    if before is not None:
        sys.modules["deep_gemm"] = before
