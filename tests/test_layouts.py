"""Byte layouts: sizes and offsets against hand-computed numbers, and records that never overlap."""

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_plugin.errors import NsaPluginError
from nsa_plugin.layouts import (
    BF16,
    INDEXER_FP8,
    INDEXER_LAYOUTS,
    LAYOUTS,
    V4_FP8,
    V32_FP8,
    Fp8Layout,
    LayoutError,
    get_layout,
)

FP8_LAYOUTS = [V32_FP8, V4_FP8, INDEXER_FP8]


def value_offset(layout: Fp8Layout, slot: int, page_size: int) -> int:
    page, position = divmod(slot, page_size)
    return page * layout.page_bytes(page_size) + position * layout.data_stride


def tail_offset(layout: Fp8Layout, slot: int, page_size: int) -> int:
    return value_offset(layout, slot, page_size) + layout.tail_start


def scale_offset(layout: Fp8Layout, slot: int, page_size: int, index: int = 0) -> int:
    page, position = divmod(slot, page_size)
    if layout.scales_after_page:
        first = page_size * layout.data_stride + position * layout.scale_slot_bytes
    else:
        first = position * layout.data_stride + layout.fp8_dim
    return page * layout.page_bytes(page_size) + first + index * layout.scale_bytes


def test_importing_layouts_and_the_registry_does_not_import_torch():
    code = "import nsa_plugin.layouts, nsa_plugin.libraries.registry, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_names_are_the_ones_used_all_over_the_project():
    assert list(LAYOUTS) == ["bf16", "v32_fp8", "v4_fp8"]
    assert list(INDEXER_LAYOUTS) == ["indexer_fp8"]
    assert [layout.is_fp8 for layout in LAYOUTS.values()] == [False, True, True]
    for name, layout in {**LAYOUTS, **INDEXER_LAYOUTS}.items():
        assert get_layout(name) is layout
        assert layout.name == name


def test_unknown_name_is_an_error_that_lists_the_known_ones():
    with pytest.raises(LayoutError, match=r"'fp8'; allowed: bf16, v32_fp8, v4_fp8, indexer_fp8") as error:
        get_layout("fp8")
    assert isinstance(error.value, NsaPluginError)


@pytest.mark.parametrize(
    ("layout", "row_bytes", "data_stride", "dim", "num_scales"),
    [(V32_FP8, 656, 656, 576, 4), (V4_FP8, 584, 576, 512, 7), (INDEXER_FP8, 132, 128, 128, 1)],
)
def test_record_sizes(layout, row_bytes, data_stride, dim, num_scales):
    assert layout.row_bytes == row_bytes
    assert layout.data_stride == data_stride
    assert layout.dim == dim
    assert layout.num_scales == num_scales


@pytest.mark.parametrize(
    ("layout", "page_size", "page_bytes"),
    [
        (V32_FP8, 64, 64 * 656),
        (V32_FP8, 1, 656),
        (V4_FP8, 64, 37440),  # 64 * 584 = 37376, up to 65 * 576
        (V4_FP8, 256, 149760),  # 256 * 584 = 149504, up to 260 * 576
        (V4_FP8, 2, 1728),  # the compressed cache of ratio 128: 2 * 584 = 1168, up to 3 * 576
        (INDEXER_FP8, 64, 8448),
    ],
)
def test_page_sizes(layout, page_size, page_bytes):
    assert layout.page_bytes(page_size) == page_bytes


def test_v32_offsets():
    assert value_offset(V32_FP8, 3, 64) == 3 * 656
    assert scale_offset(V32_FP8, 3, 64, 2) == 3 * 656 + 512 + 8
    assert tail_offset(V32_FP8, 64, 64) == 64 * 656 + 528


def test_v4_offsets():
    assert value_offset(V4_FP8, 64 + 5, 64) == 37440 + 5 * 576
    assert tail_offset(V4_FP8, 64 + 5, 64) == 37440 + 5 * 576 + 448
    assert scale_offset(V4_FP8, 64 + 5, 64, 6) == 37440 + 64 * 576 + 5 * 8 + 6
    assert scale_offset(V4_FP8, 255, 256) == 256 * 576 + 255 * 8


def test_indexer_offsets():
    assert value_offset(INDEXER_FP8, 2 * 64 + 1, 64) == 2 * 8448 + 128
    assert scale_offset(INDEXER_FP8, 2 * 64 + 1, 64) == 2 * 8448 + 64 * 128 + 4


def test_plain_rows():
    assert BF16.dims == (576, 512)
    assert BF16.row_bytes(576) == 1152
    assert BF16.page_bytes(64, 512) == 64 * 1024
    assert BF16.page_bytes(64, 512, value_bytes=4) == 64 * 2048


@given(layout=st.sampled_from(FP8_LAYOUTS), page_size=st.integers(1, 256), page=st.integers(0, 3))
def test_the_fields_of_a_page_never_overlap_and_stay_inside_it(layout: Fp8Layout, page_size: int, page: int):
    spans = []
    for slot in range(page * page_size, (page + 1) * page_size):
        spans.append((value_offset(layout, slot, page_size), layout.fp8_dim))
        for index in range(layout.num_scales):
            spans.append((scale_offset(layout, slot, page_size, index), layout.scale_bytes))
        if layout.bf16_dim:
            spans.append((tail_offset(layout, slot, page_size), 2 * layout.bf16_dim))
    spans.sort()
    assert spans[0][0] == page * layout.page_bytes(page_size)
    for (start, size), (following, _) in pairwise(spans):
        assert start + size <= following
    assert spans[-1][0] + spans[-1][1] <= (page + 1) * layout.page_bytes(page_size)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: V4_FP8.page_bytes(0), "v4_fp8: page_size is 0"),
        (lambda: BF16.page_bytes(-1, 576), "bf16: page_size is -1"),
        (lambda: BF16.row_bytes(0), "bf16: dim is 0"),
    ],
)
def test_impossible_questions_are_errors(call, message):
    with pytest.raises(LayoutError, match=message):
        call()
