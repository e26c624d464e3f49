"""The V4 prefill route, interpreted, against attention straight from the two caches."""

import inspect
import math
import re
from importlib import import_module

import pytest
import torch

from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.kv_cache import allocate_cache
from nsa_plugin.kernels.sparse_mla import PrefillOutput, reference_prefill
from nsa_plugin.kernels.v4_prefill import PrefillKeys, attend_rows, combine, combined_width, fill, route

from . import v4_prefill_cases as cases

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("large_read_programs")


@pytest.mark.parametrize("by_slot", [True, False])
@pytest.mark.parametrize(
    ("window", "extra", "with_lengths", "with_sink"),
    [
        ((16, 64, 7, 3), (24, 64, 9, 2), True, True),
        ((16, 256, 3, 1), (24, 2, 40, 11), True, False),
        ((16, 64, 5, 2), (24, 2, 30, 7), False, True),
        ((16, 64, 5, 2), None, True, True),
        ((5, 2, 9, 4), None, False, False),
    ],
)
def test_the_route_is_attention_over_both_caches(window, extra, with_lengths, with_sink, by_slot):
    case = cases.make_case(6, 3, window, extra, 11, DEVICE, with_lengths=with_lengths, with_sink=with_sink)
    cases.check(case, by_slot=by_slot)


@pytest.mark.parametrize("by_slot", [True, False])
def test_the_reference_route_agrees(by_slot):
    case = cases.make_case(6, 3, (16, 64, 7, 3), (24, 2, 30, 5), 21, DEVICE)
    assert case.extra is not None
    window, extra = case.window.keys(by_slot=by_slot), case.extra.keys(by_slot=by_slot)
    actual = cases.reference_route(
        case.q, window, extra, scale=case.scale, attn_sink=case.sink, out_dtype=torch.float32
    )
    for part, wanted in zip(actual, case.expected, strict=True):
        assert torch.equal(part, wanted)


@pytest.mark.parametrize("by_slot", [True, False])
@pytest.mark.parametrize("extra", [(24, 2, 30, 5), None])
def test_query_tokens_are_attended_in_parts_over_one_filled_workspace(extra, by_slot):
    case = cases.make_case(6, 3, (16, 64, 7, 3), extra, 41, DEVICE)
    halves = [half.keys(by_slot=by_slot) for half in (case.window, case.extra) if half is not None]
    workspace = torch.full((sum(keys.rows for keys in halves), 512), math.nan, dtype=torch.bfloat16, device=DEVICE)
    fill(workspace, *halves)
    filled = workspace.clone()
    width = combined_width(*(keys.indices.shape[1] for keys in halves))
    for parts in ((0, 6),), ((0, 1), (1, 5), (5, 6)), ((2, 4), (4, 6), (0, 2)), ((0, 0), (0, 6)):
        out = torch.full_like(case.q, math.nan)
        statistics = torch.full((2, 6, 3), math.nan, device=DEVICE)
        buffer = torch.full((6, width), 77, dtype=torch.int32, device=DEVICE)
        for first, end in parts:
            part = slice(first, end)
            result = attend_rows(
                case.q[part],
                workspace,
                combine(*(keys.of(part) for keys in halves), out=buffer[: end - first], again=True),
                scale=case.scale,
                attn_sink=case.sink,
                attention=reference_prefill,
                out=out[part],
            )
            statistics[0, first:end], statistics[1, first:end] = result.max_logits, result.lse
        cases.assert_close(PrefillOutput(out, *statistics), case.expected)
        assert torch.equal(workspace.view(torch.int16), filled.view(torch.int16))  # rows of no key are NaN


def test_what_is_filled_fits_the_workspace_and_its_device():
    given = arguments()
    window, extra = given["window"], given["extra"]
    with pytest.raises(KernelArgumentError, match=r"workspace has 11264 bytes \(11 rows\)"):
        fill(torch.zeros(11, 512).bfloat16(), window, extra)
    with pytest.raises(KernelArgumentError, match=r"window\.cache is on"):
        fill(torch.zeros(12, 512, device="meta"), window, extra)


def test_what_the_attention_is_given():
    """Indices in the contract's order, -1 where an index names no listed page, lengths, and the caller's buffers."""
    window_cache, extra_cache = (allocate_cache("v4_fp8", 8, 2, device=DEVICE) for _ in range(2))

    def int32(values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    window = PrefillKeys(
        window_cache, int32([5, 2]), int32([[4, 11, 6, 10], [5, -1, 99, 0]]), int32([4, 1]), int32([1] * 8)
    )
    extra = PrefillKeys(extra_cache, int32([7, -1, 0]), int32([[1, 14, 2], [15, 0, 3]]), int32([2, 7]), int32([0] * 8))
    combined, seen = torch.full((2, 8), 77, dtype=torch.int32, device=DEVICE), {}

    def attention(q, kv, indices, **arguments):
        seen.update(arguments, kv=kv, indices=indices)
        return PrefillOutput(q, q[..., 0], q[..., 0])

    workspace = torch.zeros(12, 512, dtype=torch.bfloat16, device=DEVICE)
    q, out = torch.zeros(2, 1, 512, device=DEVICE), torch.zeros(2, 1, 512, device=DEVICE)
    arguments = {"workspace": workspace, "scale": 0.5, "alignment": 8, "combined": combined, "out": out}
    route(q, window, extra, attention=attention, **arguments)
    # Slots 4, 11, 6 (page 3 is not listed), 10; then from row 4 on: 1 in page 0, 14 in page 7.
    assert combined.tolist() == [[2, 1, -1, 0, 9, 4, -1, -1], [3, 5, 8, -1, -1, -1, -1, -1]]
    assert seen["indices"] is combined
    assert seen["topk_length"].tolist() == [6, 4]
    assert seen["kv"].shape == (10, 512)
    assert seen["kv"].data_ptr() == workspace.data_ptr()
    assert (seen["d_v"], seen["scale"], seen["attn_sink"], seen["out_dtype"]) == (512, 0.5, None, None)
    assert seen["out"] is out


def test_rows_of_the_share_that_hold_no_page_and_lengths_below_zero():
    cache = allocate_cache("v4_fp8", 8, 2, device=DEVICE)

    def int32(values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    # Rows 2 and 3 are a padding entry's; page 8, for rows 4 and 5, is beyond the cache.
    window = PrefillKeys(cache, int32([5, -1, 8, 7]), int32([[0, 2, 3, 4, 5, 6], [7, 8, -1, 1, 1, 1]]), int32([9, -1]))
    extra = PrefillKeys(cache, int32([1]), int32([[1, 0], [0, 2]]), None)
    combined = torch.full((2, 8), 77, dtype=torch.int32, device=DEVICE)

    def attention(q, kv, indices, **arguments):
        assert arguments["topk_length"].tolist() == [8, 2]
        return PrefillOutput(q, q[..., 0], q[..., 0])

    workspace = torch.full((10, 512), math.nan, dtype=torch.bfloat16, device=DEVICE)
    q = torch.zeros(2, 1, 512, device=DEVICE)
    route(q, window, extra, workspace=workspace, scale=1.0, alignment=8, combined=combined, attention=attention)
    assert combined.tolist() == [[0, -1, -1, -1, -1, 6, 9, 8], [8, -1, -1, -1, -1, -1, -1, -1]]
    assert (workspace == 0).all()


def test_rows_wider_than_a_program(monkeypatch):
    from nsa_plugin.kernels.triton import v4_prefill as kernels

    monkeypatch.setattr(kernels, "MAX_BLOCK", 16)
    monkeypatch.setattr(kernels, "MAP_BLOCK", 2)
    cases.check(cases.make_case(4, 1, (37, 2, 60, 31), (50, 2, 60, 13), 5, DEVICE), by_slot=True)


@pytest.mark.parametrize("by_slot", [True, False])
def test_strided_arguments(by_slot):
    case = cases.make_case(5, 2, (16, 64, 7, 3), (24, 2, 30, 5), 31, DEVICE)
    assert case.extra is not None

    def strided(tensor):
        wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), 3, dtype=tensor.dtype, device=DEVICE)
        wide[..., 1::2] = tensor
        return wide[..., 1::2]

    halves = []
    for half in (case.window, case.extra):
        keys = half.keys(by_slot=by_slot)
        page_map = None if keys.page_map is None else strided(keys.page_map)
        halves.append(
            PrefillKeys(keys.cache, strided(keys.pages), strided(keys.indices), strided(keys.lengths), page_map)
        )
    workspace = torch.full((halves[0].rows + halves[1].rows, 512), math.nan, dtype=torch.bfloat16, device=DEVICE)
    actual = route(
        case.q, *halves, workspace=workspace, scale=case.scale, attn_sink=case.sink, attention=reference_prefill
    )
    cases.assert_close(actual, case.expected)


@pytest.mark.parametrize(("tokens", "topk", "pages"), [(0, 4, 2), (2, 0, 2), (2, 4, 0)])
def test_nothing_to_attend(tokens, topk, pages):
    cache = allocate_cache("v4_fp8", 4, 2, device=DEVICE)
    keys = PrefillKeys(
        cache,
        torch.arange(pages, device=DEVICE),
        torch.zeros(tokens, topk, dtype=torch.int32, device=DEVICE),
        page_map=torch.zeros(4, dtype=torch.int32, device=DEVICE),
    )
    q = torch.randn(tokens, 3, 512, device=DEVICE).bfloat16()
    workspace = torch.zeros(2 * pages, 512, dtype=torch.bfloat16, device=DEVICE)

    def attention(*_, **__):
        raise AssertionError("there is nothing to attend")

    result = route(q, keys, workspace=workspace, scale=1.0, attention=attention, out_dtype=torch.float32)
    assert result.out.shape == (tokens, 3, 512)
    assert result.out.dtype is torch.float32
    assert (result.out == 0).all()
    assert result.lse.isposinf().all()
    assert result.max_logits.isneginf().all()
    assert result.lse.shape == result.max_logits.shape == (tokens, 3)


def test_combined_widths_are_multiples_of_the_alignment():
    assert (combined_width(128), combined_width(128, 512), combined_width(100, 29), combined_width(0)) == (
        128,
        640,
        256,
        0,
    )


def arguments(**changes):
    cache = allocate_cache("v4_fp8", 4, 2)
    indices = torch.zeros(2, 3, dtype=torch.int32)
    keys = {"cache": cache, "pages": torch.arange(3), "indices": indices, "page_map": torch.zeros(4).int()}
    other = keys | {"page_map": torch.zeros(4).int()}
    given = {
        "q": torch.zeros(2, 1, 512),
        "window": PrefillKeys(**(keys | changes.pop("window", {}))),
        "extra": PrefillKeys(**(other | changes.pop("extra", {}))),
        "workspace": torch.zeros(12, 512),
        "scale": 1.0,
        "attention": reference_prefill,
    }
    return given | changes


SHARED_MAP = torch.zeros(4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(2, 1, 576)}, "q has shape"),
        ({"window": {"indices": torch.zeros(3, 3).int()}}, "window.indices has shape"),
        ({"window": {"pages": torch.zeros(3)}}, "window.pages has dtype float32"),
        ({"extra": {"lengths": torch.zeros(3).int()}}, "extra.lengths has shape"),
        ({"extra": {"cache": allocate_cache("v32_fp8", 4, 2)}}, "extra.cache has rows of 576 values"),
        ({"extra": {"page_map": torch.zeros(3).int()}}, "extra.page_map has 3 entries; the cache has 4 pages"),
        ({"window": {"page_map": SHARED_MAP}, "extra": {"page_map": SHARED_MAP}}, "each cache needs its own"),
        (
            {"workspace": torch.zeros(11, 512).bfloat16()},
            r"workspace has 11264 bytes \(11 rows\); the listed pages need 12288 bytes \(12 rows\)",
        ),
        ({"workspace": torch.zeros(12, 1024)[:, ::2]}, "workspace has strides"),
        ({"combined": torch.zeros(2, 6).int()}, "combined has shape"),
        ({"alignment": 0}, "alignment is 0"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    with pytest.raises(KernelArgumentError, match=message):
        route(**arguments(**changes))


def test_no_width_of_the_selection_compiles_the_kernel_anew():
    """At 128 : 1 it grows with the context: a part of what is compiled, it would stop every longer prompt for that."""
    kernel = import_module("nsa_plugin.kernels.triton.v4_prefill")._combine_rows
    parameters = inspect.signature(kernel.fn).parameters
    constant = {name for name, one in parameters.items() if "constexpr" in str(one.annotation)}
    assert constant == {"HAS_EXTRA", "WINDOW_WIDTH", "WINDOW_PAGE", "EXTRA_PAGE", "BLOCK"}
    source = inspect.getsource(import_module("nsa_plugin.kernels.triton.v4_prefill"))
    (varying,) = re.findall(r"do_not_specialize=\[([^]]*)\],?\s*\)\s*def _combine_rows", source)
    assert '"extra_width"' in varying
