"""Writing and reading paged caches: bytes against hand-computed ones, values against a decoder."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_plugin.kernels import kv_cache
from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.fp8 import ceil_exponents, exponents_to_scales, quantize_tiles
from nsa_plugin.kernels.kv_cache import (
    allocate_cache,
    open_cache,
    reference_read,
    reference_read_codes,
    reference_write,
)
from nsa_plugin.layouts import LayoutError, get_layout

from . import oracles

FP8_NAMES = ["v32_fp8", "v4_fp8", "indexer_fp8"]
PAGES = [("v32_fp8", 64), ("v32_fp8", 1), ("v4_fp8", 64), ("v4_fp8", 256), ("v4_fp8", 2), ("indexer_fp8", 64)]


def poisoned(layout: str, num_pages: int, page_size: int):
    """A cache whose every byte is 0xFF: NaN as float8, bfloat16, float32 and as a ue8m0 scale."""
    page_bytes = get_layout(layout).page_bytes(page_size)
    memory = torch.full((num_pages, page_bytes), 0xFF, dtype=torch.uint8)
    return memory, open_cache(memory, layout, page_size)


def random_rows(count: int, dim: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows whose tiles differ in magnitude by orders, as latents do."""
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.exp2(torch.randint(-6, 5, (count, dim // 64, 1), generator=generator).float())
    return (torch.randn(count, dim // 64, 64, generator=generator) * magnitude).view(count, dim).to(dtype)


def test_v32_bytes_by_hand():
    row = torch.zeros(1, 576)
    row[0, :128] = 1.0
    row[0, 5] = 448.0  # largest of tile 0: scale 1
    row[0, 128:256] = -1.0
    row[0, 130] = 224.0  # largest of tile 1: scale 0.5, so -1 is stored as -2
    row[0, 256] = 3.0  # alone in tile 2: scale 3 / 448
    row[0, 512:] = 1.0
    row[0, 513] = -2.0
    memory, cache = poisoned("v32_fp8", 2, 4)
    reference_write(cache, row, torch.tensor([5]))

    flat = memory.flatten().tolist()
    record = flat[5 * 656 : 6 * 656]
    assert record[:5] == [0x38] * 5  # 1.0
    assert record[5] == 0x7E  # 448
    assert record[128:130] == [0xC0] * 2  # -2.0
    assert record[130] == 0x7E
    assert record[256] == 0x7E
    assert record[257:384] == [0] * 127
    assert record[384:512] == [0] * 128
    assert record[512:520] == [0, 0, 0x80, 0x3F, 0, 0, 0, 0x3F]  # 1.0, 0.5
    assert record[520:524] == list(np.float32(3.0 / 448.0).tobytes())
    assert record[524:528] == [0, 0, 0x80, 0]  # the least normal float32, of a tile of zeros
    assert record[528:532] == [0x80, 0x3F, 0, 0xC0]  # bfloat16 1.0, -2.0
    assert set(flat[: 5 * 656] + flat[6 * 656 :]) == {0xFF}


def test_v4_bytes_by_hand():
    row = torch.zeros(1, 512)
    row[0, 0] = 448.0  # tile 0: scale 1, exponent byte 127
    row[0, 1] = 1.0
    row[0, 64] = 450.0  # tile 1: above 448, so scale 2, and 450 / 2 rounds to 224
    row[0, 128] = 0.875  # tile 2: 448 / 512, scale 2 ** -9
    row[0, 448] = 1.0
    memory, cache = poisoned("v4_fp8", 2, 64)
    reference_write(cache, row, torch.tensor([64 + 3]))

    page = memory[1].tolist()
    record, scales = page[3 * 576 : 4 * 576], page[64 * 576 + 3 * 8 : 64 * 576 + 4 * 8]
    assert record[:2] == [0x7E, 0x38]
    assert record[64] == 0x76  # 224
    assert record[128] == 0x7E
    assert record[448:450] == [0x80, 0x3F]
    assert scales[:3] == [127, 128, 127 - 9]
    assert set(scales[3:7]) == {127 - 22}  # zeros: the floor 1e-4 / 448, up to 2 ** -22
    assert scales[7] == 0xFF  # the pad byte is left alone
    written = set(range(3 * 576, 4 * 576)) | set(range(64 * 576 + 24, 64 * 576 + 31))
    assert {page[i] for i in range(37440) if i not in written} == {0xFF}
    assert set(memory[0].tolist()) == {0xFF}


def test_indexer_bytes_by_hand():
    row = torch.zeros(2, 128)
    row[0, 0], row[0, 1] = 448.0, -1.0
    row[1, 127] = 300.0
    memory, cache = poisoned("indexer_fp8", 1, 64)
    reference_write(cache, row, torch.tensor([2, 63]), power_of_two_scales=True)

    page = memory[0].tolist()
    assert page[2 * 128 : 2 * 128 + 2] == [0x7E, 0xB8]
    assert page[64 * 128 + 8 : 64 * 128 + 12] == [0, 0, 0x80, 0x3F]
    assert page[63 * 128 + 127] == 0x79  # 300 / 1 between 288 (0x79) and 320: rounds to 288
    assert page[64 * 128 + 63 * 4 :] == [0, 0, 0x80, 0x3F]


@pytest.mark.parametrize(("name", "page_size"), PAGES)
@pytest.mark.parametrize("power_of_two_scales", [False, True])
def test_round_trip_against_an_independent_decoder(name, page_size, power_of_two_scales):
    layout = get_layout(name)
    num_pages = max(2, 40 // page_size)
    memory, cache = poisoned(name, num_pages, page_size)
    count = min(num_pages * page_size, 24)
    slots = torch.randperm(num_pages * page_size, generator=torch.Generator().manual_seed(1))[:count]
    rows = random_rows(count, layout.dim)
    reference_write(cache, rows, slots, power_of_two_scales=power_of_two_scales)

    read = reference_read(cache, slots, dtype=torch.float32)
    stored = oracles.memory_of(memory)
    by_bytes = np.stack([oracles.decode_record(stored, name, int(slot), page_size) for slot in slots])
    np.testing.assert_array_equal(oracles.to_numpy(read), by_bytes.astype(np.float32))

    # An e4m3 value is off by at most half a step, 1/16 of itself, or of the least normal 2 ** -6 * scale.
    # The scale is at most amax / 448, doubled where it is rounded up to a power of two.
    head = oracles.to_numpy(rows)[:, : layout.fp8_dim].reshape(count, layout.num_scales, layout.tile)
    error = np.abs(by_bytes[:, : layout.fp8_dim].reshape(head.shape) - head)
    scale = np.abs(head).max(-1, keepdims=True) / 448 * (2 if power_of_two_scales or name == "v4_fp8" else 1)
    assert (error <= np.maximum(np.abs(head) / 16, scale * 2.0**-10) * (1 + 1e-6)).all()
    np.testing.assert_array_equal(by_bytes[:, layout.fp8_dim :], oracles.to_numpy(rows)[:, layout.fp8_dim :])


@pytest.mark.parametrize("name", FP8_NAMES)
def test_rewriting_a_row_that_was_read_gives_the_same_bytes_with_power_of_two_scales(name):
    _, cache = poisoned(name, 1, 8)
    slots = torch.arange(8)
    reference_write(cache, random_rows(8, cache.dim, seed=3), slots, power_of_two_scales=True)
    first = reference_read(cache, slots, dtype=torch.float32)
    reference_write(cache, first, slots, power_of_two_scales=True)
    assert torch.equal(reference_read(cache, slots, dtype=torch.float32), first)


@pytest.mark.parametrize("name", FP8_NAMES)
def test_negative_slots_are_skipped_and_surplus_rows_ignored(name):
    memory, cache = poisoned(name, 2, 4)
    rows = random_rows(5, cache.dim)
    reference_write(cache, rows, torch.tensor([-1, 6, -(2**31)], dtype=torch.int32))
    read = reference_read(cache, torch.arange(8), dtype=torch.float32)
    assert read[[0, 1, 2, 3, 4, 5, 7]].isnan().all()
    assert not read[6].isnan().any()
    only_row_1, other = poisoned(name, 2, 4)
    reference_write(other, rows[1:2], torch.tensor([6]))
    assert torch.equal(memory, only_row_1)


@pytest.mark.parametrize("name", FP8_NAMES)
def test_a_tile_of_zeros_reads_as_zeros(name):
    _, cache = poisoned(name, 1, 2)
    reference_write(cache, torch.zeros(1, cache.dim), torch.tensor([0]))
    assert (reference_read(cache, torch.tensor([0])) == 0).all()


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 96), (torch.bfloat16, 576), (torch.float16, 512)])
def test_plain_rows_of_any_float_type_and_width(dtype, dim):
    memory = torch.full((3, 4, 2, dim), math.nan, dtype=dtype)
    cache = open_cache(memory[:, :, 1], "bf16")  # another layer's rows lie between this one's
    assert cache.dim == dim
    assert cache.num_slots == 12
    rows = torch.randn(3, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(dim))
    reference_write(cache, rows, torch.tensor([11, -1, 4]))
    assert torch.equal(memory[2, 3, 1], rows[0].to(dtype))
    assert torch.equal(memory[1, 0, 1], rows[2].to(dtype))
    assert int((~memory.isnan()).sum()) == 2 * dim
    read = reference_read(cache, torch.tensor([4, -1, 11]), dtype=torch.float64)
    assert torch.equal(read, torch.stack([rows[2].to(dtype).double(), torch.zeros(dim), rows[0].to(dtype).double()]))


def test_rows_given_in_two_parts():
    whole, parts = allocate_cache("v32_fp8", 1, 4), allocate_cache("v32_fp8", 1, 4)
    rows = random_rows(4, 576)
    reference_write(whole, rows, torch.arange(4))
    reference_write(parts, rows[:, :512], torch.arange(4), rope=rows[:, None, 512:])
    assert torch.equal(whole.data, parts.data)


def test_noncontiguous_rows_and_slots():
    dense, strided = allocate_cache("v4_fp8", 2, 8), allocate_cache("v4_fp8", 2, 8)
    rows, slots = random_rows(5, 512), torch.tensor([3, 9, 15, 0, 7])
    reference_write(dense, rows, slots)
    reference_write(strided, oracles.noncontiguous(rows), oracles.noncontiguous(slots))
    assert torch.equal(dense.data, strided.data)
    assert torch.equal(reference_read(strided, oracles.noncontiguous(slots)), reference_read(dense, slots))


@pytest.mark.parametrize("name", ["bf16", *FP8_NAMES])
def test_reading_into_a_workspace_in_chunks(name, monkeypatch):
    cache = allocate_cache(name, 3, 5)
    reference_write(cache, random_rows(15, cache.dim), torch.arange(15))
    slots = torch.tensor([[14, 0, 3], [3, -1, 7]])
    whole = reference_read(cache, slots)
    monkeypatch.setattr(kv_cache, "READ_CHUNK_ROWS", 2)
    workspace = torch.full((2, 3, cache.dim), math.nan, dtype=torch.bfloat16)
    assert reference_read(cache, slots, out=workspace) is workspace
    assert torch.equal(workspace, whole)
    wide = torch.full((2, 3, cache.dim + 9), math.nan)
    reference_read(cache, slots, out=wide[..., 4:-5])
    assert torch.equal(wide[..., 4:-5].bfloat16(), whole)
    assert wide[..., :4].isnan().all()
    assert (whole[1, 1] == 0).all()


def test_codes_and_scales_are_the_stored_ones():
    cache = allocate_cache("indexer_fp8", 2, 64)
    rows = random_rows(70, 128)
    reference_write(cache, rows, torch.arange(70))
    codes, scales = reference_read_codes(cache, torch.tensor([69, 5]))
    assert codes.dtype == torch.float8_e4m3fn
    expected_codes, expected_scales = quantize_tiles(rows[[69, 5]], 128, amax_floor=1e-4, power_of_two=False)
    assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))
    assert torch.equal(scales, expected_scales)


@pytest.mark.parametrize(("name", "page_size"), [("v32_fp8", 64), ("v4_fp8", 64), ("indexer_fp8", 64)])
def test_every_accepted_form_of_a_tensor_addresses_the_same_memory(name, page_size):
    layout = get_layout(name)
    memory = torch.zeros(3, layout.page_bytes(page_size), dtype=torch.uint8)
    row = layout.row_bytes
    flat = open_cache(memory, name, page_size)
    reference_write(flat, random_rows(9, layout.dim), torch.arange(60, 69))
    expected = reference_read(flat, torch.arange(60, 69))
    strides = (layout.page_bytes(page_size), row, row, 1)
    as_engine = memory.as_strided((3, page_size, 1, row), strides)
    for data in (as_engine, as_engine[:, :, 0], as_engine.view(torch.float8_e4m3fn), as_engine.view(torch.int8)):
        assert torch.equal(reference_read(open_cache(data, name), torch.arange(60, 69)), expected)
    records = flat.as_records()
    assert records.shape == (3, page_size, 1, row)
    assert records.stride() == strides
    assert records.data_ptr() == memory.data_ptr()


def test_plain_records_are_a_view_with_a_head_dimension():
    cache = allocate_cache("bf16", 2, 4)
    assert cache.as_records().shape == (2, 4, 1, 576)
    assert cache.as_records().data_ptr() == cache.data.data_ptr()


@pytest.mark.regression(15)
def test_slots_of_a_page_beyond_2_to_the_31_bytes():
    page_bytes = 149760
    pages = 2**31 // page_bytes + 3
    # Untouched memory: only the pages of the rows written become resident.
    memory = torch.empty(pages, page_bytes, dtype=torch.uint8)
    cache = open_cache(memory, "v4_fp8", 256)
    last = torch.tensor([pages * 256 - 1, 256 * (pages - 1)])
    rows = random_rows(2, 512)
    reference_write(cache, rows, last)
    small = allocate_cache("v4_fp8", 1, 256)
    reference_write(small, rows, torch.tensor([255, 0]))
    assert torch.equal(reference_read(cache, last), reference_read(small, torch.tensor([255, 0])))


@pytest.mark.regression(15)
@pytest.mark.filterwarnings("ignore:Use of index_put_ on expanded tensors")
def test_slot_numbers_beyond_2_to_the_31():
    # All pages are the same memory, so that the caches cost nothing. 48 does not divide 2 ** 32: a slot
    # number cut to 32 bits would be at another position of its page.
    slot = 48 * 2**26 + 5
    assert slot > 2**31
    plain = torch.zeros(1, 48, 16)
    plain[0, 5] = torch.arange(16.0)
    cache = open_cache(plain.expand(2**27, 48, 16), "bf16")
    assert torch.equal(reference_read(cache, torch.tensor([slot]), dtype=torch.float32)[0], torch.arange(16.0))
    for name in FP8_NAMES:
        memory, one_page = poisoned(name, 1, 48)
        row = random_rows(1, one_page.dim)
        reference_write(one_page, row, torch.tensor([5]))
        expected = memory.clone()
        memory.fill_(0xFF)
        many = open_cache(memory.expand(2**27, -1), name, 48)
        reference_write(many, row, torch.tensor([slot]))
        assert torch.equal(memory, expected)
        assert not reference_read(many, torch.tensor([slot])).isnan().any()


def test_empty_inputs():
    for name in ("bf16", *FP8_NAMES):
        cache = allocate_cache(name, 1, 4)
        before = cache.data.clone()
        reference_write(cache, torch.zeros(0, cache.dim), torch.zeros(0, dtype=torch.int32))
        reference_write(cache, torch.ones(2, cache.dim), torch.tensor([-1, -1]))
        assert torch.equal(cache.data, before)
        assert reference_read(cache, torch.zeros(0, dtype=torch.int64)).shape == (0, cache.dim)


@settings(max_examples=300)
@given(st.floats(min_value=2.0**-126, max_value=2.0**126, width=32))
def test_scales_round_up_to_the_next_power_of_two(scale):
    mantissa, exponent = math.frexp(scale)
    expected = exponent - 1 if mantissa == 0.5 else exponent
    byte = ceil_exponents(torch.tensor([scale]))
    assert int(byte) == expected + 127
    assert float(exponents_to_scales(byte)) == 2.0**expected


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=64, max_size=64), st.booleans())
def test_codes_never_overflow(values, power_of_two):
    codes, scales = quantize_tiles(torch.tensor([values]), 64, amax_floor=1e-4, power_of_two=power_of_two)
    assert not codes.float().isnan().any()
    assert float(scales) > 0
    error = (codes.float() * scales - torch.tensor([values])).abs()
    assert bool((error <= torch.tensor([values]).abs() / 16 + float(scales) * 2.0**-9).all())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: open_cache(torch.zeros(1, 64, 3, 656, dtype=torch.uint8), "v32_fp8"), "must be 1 KV head"),
        (lambda c: open_cache(torch.zeros(4, 656, dtype=torch.uint8), "v32_fp8"), "page_size is None"),
        (lambda c: open_cache(torch.zeros(4, 64, 576, dtype=torch.uint8), "v32_fp8"), "data has shape"),
        (lambda c: open_cache(torch.zeros(4, 64, 656), "v32_fp8"), "data has dtype float32; allowed: uint8"),
        (lambda c: open_cache(torch.zeros(4, 64, 656, dtype=torch.uint8), "v32_fp8", 32), "page_size is 32"),
        (lambda c: open_cache(torch.zeros(4, 64, 657, dtype=torch.uint8)[..., 1:], "v32_fp8"), "data has strides"),
        (lambda c: open_cache(torch.zeros(4, 37375, dtype=torch.uint8), "v4_fp8", 64), "needs 37376"),
        (lambda c: open_cache(torch.zeros(4, 64, 576, dtype=torch.uint8), "bf16"), "data has dtype uint8"),
        (lambda c: allocate_cache("v4_fp8", 1, 64, dim=576), "dim is 576"),
        (lambda c: reference_write(c, torch.zeros(2, 575), torch.arange(2)), "rows has shape"),
        (lambda c: reference_write(c, torch.zeros(2, 576), torch.arange(3)), "slot_mapping has 3 slots for 2"),
        (lambda c: reference_write(c, torch.zeros(2, 576), torch.tensor([0, 8])), "slot_mapping has slot 8"),
        (lambda c: reference_write(c, torch.zeros(2, 576), torch.zeros(2)), "slot_mapping has dtype float32"),
        (lambda c: reference_write(c, torch.zeros(2, 512), torch.arange(2), rope=torch.zeros(3, 64)), "rope has"),
        (lambda c: reference_read(c, torch.tensor([8])), "slots has slot 8; the cache has 8 slots"),
        (lambda c: reference_read(c, torch.tensor([0]), out=torch.zeros(1, 575)), "out has shape"),
        (lambda c: reference_read_codes(c, torch.tensor([-1])), "negative"),
        (lambda c: reference_read_codes(allocate_cache("bf16", 1, 1), torch.tensor([0])), "no fp8 codes"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(KernelArgumentError, match=message):
        call(allocate_cache("v32_fp8", 2, 4))


def test_unknown_layout():
    with pytest.raises(LayoutError, match="layout is 'fp8'"):
        open_cache(torch.zeros(1, 1, 1), "fp8")
