"""The CUDA sparse MLA's host side: what it refuses before anything is compiled, and how it cuts the work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.cuda import sparse_mla, sparse_mla_launch
from nsa_plugin.kernels.kv_cache import allocate_cache
from nsa_plugin.kernels.triton.device import DeviceFacts
from nsa_plugin.libraries.architectures import resident_blocks, shared_memory_per_block
from tests.kernels.sparse_mla_cases import HOST_TOKENS, HOST_TOPK, host_arguments

HEADS = 5
H200 = DeviceFacts(sms=132, architecture=90, shared_memory=shared_memory_per_block(90))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "q is on cpu; the CUDA kernel needs a CUDA device"),
        ({"q": torch.zeros(HOST_TOKENS, HEADS, 576)}, "q has dtype float32; allowed: bfloat16"),
        ({"q": torch.zeros(HOST_TOKENS, HEADS, 512, dtype=torch.bfloat16)}, "kv has rows of 576 values; q has 512"),
        ({"kv": torch.zeros(128, 576, dtype=torch.bfloat16)}, "kv has layout bf16; this kernel reads v32_fp8, v4_fp8"),
        ({"indices": torch.zeros(HOST_TOKENS + 1, HOST_TOPK, dtype=torch.int32)}, r"indices has shape \[6, 70\]"),
        ({"indices": torch.zeros(HOST_TOKENS, HOST_TOPK)}, "indices has dtype float32"),
        ({"topk_length": torch.zeros(HOST_TOKENS + 1, dtype=torch.int32)}, "topk_length has shape"),
        ({"d_v": 256}, "d_v is 256; this kernel has values of 512"),
        ({"attn_sink": torch.zeros(HEADS + 1)}, "attn_sink has shape"),
        ({"extra_indices": torch.zeros(HOST_TOKENS, 4, dtype=torch.int32)}, "extra_indices is given without extra_kv"),
        ({"extra_kv": allocate_cache("v32_fp8", 1, 64)}, "extra_indices is missing beside extra_kv"),
        (
            {
                "kv": allocate_cache("v4_fp8", 2, 64),
                "q": torch.zeros(HOST_TOKENS, HEADS, 512, dtype=torch.bfloat16),
                "extra_kv": torch.zeros(64, 512, dtype=torch.bfloat16),
                "extra_indices": torch.zeros(HOST_TOKENS, 4, dtype=torch.int32),
            },
            "extra_kv has layout bf16",
        ),
        ({"out": torch.zeros(HOST_TOKENS, HEADS, 100)}, "out has shape"),
        ({"out_dtype": torch.int32}, "out_dtype is torch.int32; allowed: a float"),
    ],
)
def test_what_is_refused_and_by_which_name(changes, message):
    with pytest.raises(KernelArgumentError, match=message):
        sparse_mla.prefill(**host_arguments(HEADS, **changes))


def test_a_decode_names_its_own_arguments():
    q = torch.zeros(2, 2, HEADS, 576, dtype=torch.bfloat16)
    cache, indices = allocate_cache("v32_fp8", 2, 64), torch.zeros(2, 2, HOST_TOPK, dtype=torch.int32)
    with pytest.raises(KernelArgumentError, match="sparse_mla_decode: topk_length has shape"):
        sparse_mla.decode(q, cache, indices, scale=0.1, topk_length=torch.zeros(3, dtype=torch.int32))
    with pytest.raises(KernelArgumentError, match="sparse_mla_decode: q is on cpu"):
        sparse_mla.decode(q, cache, indices, scale=0.1)


@pytest.mark.parametrize(
    ("rows", "heads", "topk", "tiles", "producers", "splits"),
    [
        (4096, 16, 2048, 2, 0, 1),  # a prefill fills the device by itself
        (4096, 64, 64, 4, 0, 1),
        (128, 16, 2048, 2, 0, 2),
        (1, 8, 2048, 1, 4, 16),  # the most
        (1, 16, 2048, 1, 4, 16),  # two groups read the same records, in twice as many blocks
        (4, 16, 2048, 1, 4, 8),  # eight clusters of 16 do not run at once
        (8, 16, 2048, 1, 4, 6),
        (9, 16, 2048, 2, 4, 8),  # with one tile 8 shares of 18 groups would not have an SM for each block
        (16, 16, 2048, 2, 4, 6),
        (64, 16, 2048, 2, 4, 2),
        (67, 8, 2048, 1, 0, 3),
        (1, 8, 512, 1, 4, 4),  # each share has at least two steps of 64 entries
        (1, 8, 64, 1, 4, 1),
        (1, 8, 0, 1, 4, 1),
        (33, 256, 2048, 4, 0, 1),
    ],
)
def test_a_call_fills_the_device_once(rows, heads, topk, tiles, producers, splits):
    def resident(variant: sparse_mla.Variant, shares: int) -> int:
        """As on a GPU of seven parts of 18 SMs each: a cluster lies in one."""
        return 7 * (18 * variant.blocks // shares)

    variants = sparse_mla.possible_variants(heads, "v32_fp8", H200)
    variant, shares = sparse_mla_launch.choose_variant(rows, heads, topk, 132, variants, resident)
    assert (variant.tiles, variant.producers, shares) == (tiles, producers, splits)


def test_without_clusters_another_kernel_adds_up_any_number_of_shares():
    facts = DeviceFacts(sms=132, architecture=86, shared_memory=shared_memory_per_block(86))
    variants = sparse_mla.possible_variants(8, "v32_fp8", facts)
    assert sparse_mla_launch.choose_variant(8, 8, 2048, 132, variants)[1] == 16
    assert sparse_mla_launch.choose_variant(33, 8, 2048, 132, variants)[1] == 8, "two blocks an SM"
    of_v4 = sparse_mla.possible_variants(8, "v4_fp8", facts)
    assert sparse_mla_launch.choose_variant(16, 8, 2048, 132, of_v4)[1] == 8, "one block an SM"
    assert sparse_mla_launch.choose_variant(16, 8, 2048, 132, of_v4, lambda variant, shares: 5)[1] == 2
    assert sparse_mla_launch.choose_variant(33, 8, 2048, 132, variants, lambda variant, shares: 5)[1] == 2


@pytest.mark.parametrize(
    ("rows", "room", "blocks"),
    [
        (1, 132, 1),
        (132, 132, 132),  # a block each
        (133, 132, 67),  # two each, by as few blocks
        (512, 132, 128),
        (4096, 132, 512),  # eight each: 32 at most one after the other, as with one each
        (8192, 132, 1171),  # seven each: 63
        (4096, 1, 512),
    ],
)
def test_blocks_attend_rows_in_turn(rows: int, room: int, blocks: int) -> None:
    in_turn, _, one = sparse_mla.PORTABLE_VARIANTS[:3]
    assert in_turn.in_turn
    assert in_turn.blocks_of(rows, room) == blocks
    assert one.blocks_of(rows, room) == rows


def test_every_variant_that_a_batch_may_use_is_built_with_the_first():
    """Engines warm up with a few batch sizes; another size must not compile a kernel while it serves."""
    for heads in (1, 5, 8, 16, 24, 32, 40, 64, 128):
        built = sparse_mla.possible_variants(heads, "v32_fp8", H200)
        for topk in (64, 128, 512, 640, 2048):
            used = {sparse_mla_launch.choose_variant(rows, heads, topk, 132, built)[0] for rows in range(1, 300)}
            assert used <= set(built)


@pytest.mark.parametrize(
    ("sm", "layout", "heads", "tiles"),
    [
        (80, "v32_fp8", 16, [1, 2]),
        (80, "v32_fp8", 8, [1]),
        (80, "v32_fp8", 128, [1, 2, 4, 8]),
        (86, "v32_fp8", 16, [1, 2]),
        (86, "v32_fp8", 24, [1, 2, 4]),
        (80, "v4_fp8", 64, [1, 2, 4, 8]),
        (89, "v4_fp8", 64, [1, 2, 4, 8]),
        (90, "v32_fp8", 64, [1, 2, 1, 2, 4]),  # for blocks that have an SM alone, and others
        (90, "v4_fp8", 8, [1, 1]),
        (120, "v32_fp8", 128, [1, 2, 4, 8]),
    ],
)
def test_variants_by_the_shared_memory_of_a_block(sm, layout, heads, tiles):
    facts = DeviceFacts(sms=100, architecture=sm, shared_memory=shared_memory_per_block(sm))
    found = list(sparse_mla.possible_variants(heads, layout, facts))
    assert [one.tiles for one in found] == tiles
    if sm != 90 and tiles[-1] == 8:
        assert found[-1].converts == (layout == "v32_fp8")
    if tiles[-1] == 8 and layout == "v4_fp8":
        assert found[-1].sums == (4 if sm == 80 else 2), "where shared memory suffices, no two sums share theirs"
    warps = 4 if layout == "v32_fp8" else 8
    assert next(one for one in found if not one.eager).warps == warps, (
        "V4 has a scale for as many values as one of 8 warps takes"
    )
    assert all(one.warps == warps for one in found if one.blocks == 2), "of blocks that share an SM"


@pytest.mark.parametrize("sm", [80, 86])
def test_a_second_cache_is_not_for_the_form_that_converts(sm):
    facts = DeviceFacts(sms=100, architecture=sm, shared_memory=shared_memory_per_block(sm))
    forms = [
        list(sparse_mla.possible_variants(64, "v32_fp8", facts, has_extra=has_extra))[-1] for has_extra in (False, True)
    ]
    assert [(one.heads, one.converts) for one in forms] == [(64, True), (64, False)]


@pytest.mark.parametrize("layout", ["v32_fp8", "v4_fp8"])
@pytest.mark.parametrize("variant", [*sparse_mla.ALONE, *sparse_mla.VARIANTS], ids=str)
def test_blocks_fit_into_shared_memory(variant, layout):
    # 228 KiB an SM, of which every block takes 1 KiB more than it asks for (CUDA C++ Programming Guide).
    assert variant.blocks * (variant.shared_bytes(layout) + 1024) <= 228 * 1024


@pytest.mark.parametrize("layout", ["v32_fp8", "v4_fp8"])
@pytest.mark.parametrize(("sm", "left_out"), [(86, [5]), (80, [])])
def test_portable_blocks_that_fit(sm, left_out, layout):
    one_block = shared_memory_per_block(sm)
    fit = [one.shared_bytes(layout) <= one_block for one in sparse_mla.PORTABLE_VARIANTS]
    assert [number for number, one in enumerate(fit) if not one] == left_out
    for one in (one for one in sparse_mla.PORTABLE_VARIANTS if one.takes(layout)):
        assert one.blocks == 1 or resident_blocks(one.shared_bytes(layout), one_block) >= one.blocks


@pytest.mark.parametrize(("stride", "itself"), [(HEADS * 512, True), (4100, True), (4098, False), (4097, False)])
@pytest.mark.parametrize("shape", [(3, 1), (1, 3)])
def test_an_output_whose_rows_the_kernel_cannot_write_four_values_at_a_time_is_copied_to(
    shape: tuple[int, int], stride: int, itself: bool
) -> None:
    memory = torch.empty(16 + 3 * stride, dtype=torch.bfloat16)
    memory = memory[-memory.data_ptr() // 2 % 8 :]
    strides = (stride, 7) if shape[1] == 1 else (3 * stride, stride)
    out = memory.as_strided((*shape, HEADS, 512), (*strides, 512, 1))
    found = sparse_mla_launch.writable_rows(out)
    assert (found.data_ptr() == out.data_ptr()) == itself
    assert found.shape == (3, HEADS, 512)


def test_the_host_and_the_source_agree_on_constants():
    folder = Path(sparse_mla.__file__).parent
    parts = ("code_bits", "few", "shares", "softmax")
    source = "".join((folder / f"sparse_mla_{part}.cuh").read_text() for part in parts)
    assert f"constexpr int RAW = {sparse_mla.RAW};" in source
    assert f"constexpr int NOTHINGS = {sparse_mla_launch.NOTHINGS};" in source
    assert f"constexpr int D_V = {sparse_mla_launch.D_V};" in source
    assert f"constexpr int MAX_SHARES = {sparse_mla_launch.MAX_SPLITS};" in source
    assert float.fromhex(re.search(r"NOT_COUNTED = (\S+)f;", source)[1]) == sparse_mla_launch.NOT_COUNTED


def test_sources_include_nothing_that_nvrtc_lacks():
    folder = Path(sparse_mla.__file__).parent
    for path in (*folder.glob("*.cu"), *folder.glob("*.cuh")):
        for name in re.findall(r"#include\s+(\S+)", path.read_text()):
            assert (folder / name.strip('"')).is_file(), (path.name, name)
