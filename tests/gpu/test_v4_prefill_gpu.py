"""The compiled V4 prefill route against attention straight from the two caches, and the memory that it takes."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from nsa_plugin.backends.common.paths import BF16_ROWS
from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.common.v4 import CacheSelection, LayerCall
from nsa_plugin.backends.sglang.v4.batch import Prefill, spans
from nsa_plugin.backends.sglang.v4.kernels import attend
from nsa_plugin.backends.sglang.v4.state import V4State
from nsa_plugin.kernels.sparse_mla import PrefillOutput, reference_prefill
from nsa_plugin.kernels.v4_prefill import combined_width, route
from nsa_plugin.tools.bench.inputs import filled_cache
from nsa_plugin.tools.bench.stock import flash_mla_rows
from tests.kernels import v4_prefill_cases as cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# topk, page size, pages of the cache, pages that the batch reads
WINDOW_2, WINDOW_64, WINDOW_256 = (100, 2, 900, 400), (128, 64, 60, 17), (128, 256, 20, 5)
EXTRA_64, EXTRA_2 = (512, 64, 60, 9), (256, 2, 3000, 700)


def attention_of(name: str):
    if name == "reference":
        return reference_prefill
    flash_mla = pytest.importorskip("flash_mla", exc_type=ImportError)
    if torch.cuda.get_device_capability()[0] != 9 or not flash_mla.has_legacy():
        pytest.skip("flash_mla's kernels for these shapes run on SM90")
    return import_module("nsa_plugin.kernels.providers.flash_mla").prefill


@pytest.fixture(autouse=True)
def exact_float32_matmul():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize(
    ("attention", "heads", "tokens", "window", "extra", "lengths", "sink", "by_slot"),
    [
        ("reference", 64, 62, WINDOW_64, EXTRA_64, False, True, True),
        ("flash_mla", 128, 213, WINDOW_64, EXTRA_64, True, False, False),
        ("reference", 64, 2, WINDOW_64, EXTRA_64, True, True, False),
        ("flash_mla", 64, 62, WINDOW_256, EXTRA_64, True, False, True),
        ("reference", 128, 213, WINDOW_256, EXTRA_64, False, True, False),
        ("flash_mla", 64, 2, WINDOW_256, EXTRA_64, False, False, True),
        ("reference", 64, 62, WINDOW_256, EXTRA_2, True, False, False),
        ("flash_mla", 128, 213, WINDOW_256, EXTRA_2, False, True, True),
        ("reference", 64, 2, WINDOW_256, EXTRA_2, True, False, True),
        ("reference", 64, 62, WINDOW_256, None, False, False, False),
        ("flash_mla", 128, 213, WINDOW_256, None, True, True, True),
        ("flash_mla", 64, 2, WINDOW_256, None, False, False, False),
        ("reference", 64, 62, WINDOW_2, None, False, True, True),
        ("flash_mla", 128, 213, WINDOW_2, None, True, False, False),
        ("flash_mla", 64, 2, WINDOW_2, None, False, True, False),
    ],
)
def test_the_route_is_attention_over_both_caches(attention, heads, tokens, window, extra, lengths, sink, by_slot):
    """Every pair of values of two parameters; heads and tokens, and window and extra, count as one each."""
    case = cases.make_case(tokens, heads, window, extra, tokens, "cuda", with_lengths=lengths, with_sink=sink)
    cases.check(case, by_slot=by_slot, attention=attention_of(attention), surplus=100)


@pytest.mark.parametrize("attention", ["flash_mla", "reference"])
def test_many_queries(attention):
    case = cases.make_case(2048, 64, (128, 256, 40, 10), (512, 64, 90, 40), 3, "cuda")
    cases.check(case, by_slot=True, attention=attention_of(attention))


@pytest.mark.parametrize("by_slot", [True, False])
def test_caches_beyond_2_to_the_31_bytes(by_slot):
    case = cases.make_case(20, 64, (128, 64, 120000, 20), EXTRA_2, 7, "cuda")
    assert int(case.window.pages.max()) * case.window.cache.data.stride(0) > 2**31
    cases.check(case, by_slot=by_slot)


def test_nothing_waits_and_nothing_is_allocated_but_indices_and_lengths():
    case = cases.make_case(300, 64, WINDOW_256, EXTRA_64, 5, "cuda")
    assert case.extra is not None
    window, extra = case.window.keys(by_slot=True), case.extra.keys(by_slot=True)
    workspace = torch.empty(window.rows + extra.rows, 512, dtype=torch.bfloat16, device="cuda")
    combined = torch.empty(300, combined_width(128, 512), dtype=torch.int32, device="cuda")
    seen: list[torch.Tensor] = []

    def attention(q, kv, indices, **arguments):
        seen.append(kv)
        return PrefillOutput(q, q[..., 0], q[..., 0])

    def once() -> None:
        route(case.q, window, extra, workspace=workspace, scale=case.scale, combined=combined, attention=attention)

    once()
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["allocated_bytes.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        once()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # The lengths: 300 int32, in blocks of 512 bytes.
    assert torch.cuda.memory_stats()["allocated_bytes.all.allocated"] - allocated <= 1536
    assert all(kv.data_ptr() == workspace.data_ptr() for kv in seen)


def test_a_map_left_by_another_batch_changes_nothing():
    """One buffer for the maps of a run, never cleared: a second batch over other pages gives what a first one does."""
    first = cases.make_case(62, 64, WINDOW_64, EXTRA_64, 13, "cuda")
    second = cases.make_case(62, 64, WINDOW_64, EXTRA_64, 14, "cuda")
    assert first.extra is not None
    assert second.extra is not None
    maps = [torch.empty(60, dtype=torch.int32, device="cuda") for _ in range(2)]
    results = []
    for case in (first, second, first):
        assert case.extra is not None
        halves = [half.keys(by_slot=True) for half in (case.window, case.extra)]
        halves = [replace(keys, page_map=page_map) for keys, page_map in zip(halves, maps, strict=True)]
        rows = sum(keys.rows for keys in halves)
        workspace = torch.full((rows, 512), math.nan, dtype=torch.bfloat16, device="cuda")
        result = route(
            case.q, *halves, workspace=workspace, scale=case.scale, attn_sink=case.sink, attention=reference_prefill
        )
        cases.assert_close(result, case.expected)
        results.append(result)
    assert all(torch.equal(one, again) for one, again in zip(results[0], results[2], strict=True))


def test_the_same_bits_every_time():
    attention = attention_of("flash_mla")
    case = cases.make_case(213, 64, WINDOW_256, EXTRA_64, 17, "cuda")
    first = cases.check(case, by_slot=True, attention=attention)
    for _ in range(20):
        again = cases.check(case, by_slot=True, attention=attention)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize("library", ["sgl_kernel.flash_mla", "flash_mla"])
def test_what_sglangs_adapter_holds_for_the_largest_prefill_is_bounded(library):
    """32768 rows of a context of 393216 tokens, attended as in a layer with 4 : 1 compressed keys.

    Beyond the caches, the queries, the batch's indices and the output: bf16 rows, combined indices, maps and FlashMLA's
    statistics.
    """
    pytest.importorskip(library, exc_type=ImportError)
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("flash_mla's kernels for these shapes run on SM90")
    device, tokens, context, heads, window, topk = torch.device("cuda"), 32768, 393216, 64, 128, 512
    position = torch.arange(context - tokens, context, dtype=torch.int32, device=device)
    # Pages as SGLang has them: of 256 tokens, of which the window's pool keeps those that a window reaches.
    kept = (context - tokens - window + 1) // 256
    window_cache = filled_cache(device, "v4_fp8", context - 256 * kept, 256, 1)
    extra_cache = filled_cache(device, "v4_fp8", context // 4, 64, 2)
    reached = -torch.arange(window, dtype=torch.int32, device=device)  # SGLang names the newest token first
    in_window = CacheSelection(
        window_cache,
        position.unsqueeze(1) + reached - 256 * kept,
        torch.full((tokens,), window, dtype=torch.int32, device=device),
    )
    in_extra = CacheSelection(
        extra_cache,
        torch.randint((context - tokens) // 4, (tokens, topk), dtype=torch.int32, device=device),
        torch.full((tokens,), topk, dtype=torch.int32, device=device),
    )
    pages = torch.arange(context // 256, dtype=torch.int32, device=device)
    core = SimpleNamespace(swa_page_indices=in_window.indices, page_table=pages.expand(tokens, -1))
    q = torch.randn(tokens, heads, 512, dtype=torch.bfloat16, device=device)
    call = LayerCall(q, in_window, in_extra, None, 512**-0.5, heads, 4, core)
    batch = Prefill(spans([tokens], [context]), window)
    state = V4State(planner=None, providers=Providers("v4_fp8", 90), prefill=batch)
    if library == "flash_mla":
        state.rows_attention = flash_mla_rows()
    chosen = SimpleNamespace(path=BF16_ROWS)

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = attend(state, chosen, call)
    torch.cuda.synchronize()
    held = (torch.cuda.max_memory_allocated() - before - out.nbytes) / 2**20
    rows = (129 * 256 + context // 4) / 1024  # 1 KiB each
    combined = tokens * 640 * 4 / 2**20
    assert rows + combined < held <= 512

    rows_of = torch.tensor([0, 127, 128, 20000, tokens - 1], device=device)
    expected = reference_prefill(
        q[rows_of],
        window_cache,
        in_window.indices[rows_of],
        scale=512**-0.5,
        topk_length=in_window.lengths[rows_of],
        extra_kv=extra_cache,
        extra_indices=in_extra.indices[rows_of],
        extra_topk_length=in_extra.lengths[rows_of],
        out_dtype=torch.float32,
    )
    torch.testing.assert_close(out[rows_of].float(), expected.out, atol=1e-3, rtol=2.01 / 128)
