"""The table of tiles: what each architecture gets, and that it can hold it."""

from __future__ import annotations

import pytest

from nsa_plugin.kernels.triton.tiles import SHARED_RESERVE, STREAMS, TILES, mha_tile, sparse_tile, tiles_of
from nsa_plugin.libraries.architectures import SHARED_MEMORY_PER_BLOCK
from nsa_plugin.libraries.capabilities import MHA_DIMS


def test_every_known_architecture_has_a_line():
    assert TILES.keys() == SHARED_MEMORY_PER_BLOCK.keys()


@pytest.mark.parametrize("sm", sorted(TILES))
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("d_qk", "d_v"), MHA_DIMS)
@pytest.mark.parametrize("max_seqlen_q", [None, 8])
def test_dense_tiles_fit_the_shared_memory(sm, d_qk, d_v, itemsize, max_seqlen_q):
    shared = SHARED_MEMORY_PER_BLOCK[sm]
    tile = mha_tile(sm, shared, d_qk, d_v, itemsize, max_seqlen_q)
    assert tile.shared_bytes(d_qk, d_v, itemsize) + SHARED_RESERVE <= shared


@pytest.mark.parametrize(("sm", "heads", "block"), [(90, 8, 16), (90, 17, 32), (90, 33, 64), (90, 128, 64)])
def test_sparse_tiles_hold_all_heads_or_are_the_largest(sm, heads, block):
    assert sparse_tile(sm, heads).block_h == block


@pytest.mark.parametrize("sm", [80, 86, 89, 100, 120])
def test_tiles_of_64_heads_are_for_sm90_alone(sm):
    """They are made for its warpgroup products, and need more than 99 KiB."""
    assert sparse_tile(sm, 64).block_h == 32


def test_sparse_tiles_rise():
    for line in TILES.values():
        assert [tile.block_h for tile in line.sparse_mla] == sorted(tile.block_h for tile in line.sparse_mla)


def test_the_indexers_tiles_are_those_that_were_timed_for_how_a_gpu_multiplies():
    """float16 by warps, fp8 by warps, and fp8 by warpgroups or Blackwell's tensor memory."""
    found = {sm: (*tiles_of(sm).logits, *tiles_of(sm).paged_logits) for sm in TILES}
    by_warps, with_fp8 = (64, 128, 2, 2, 64, 128, 4, 2), (64, 128, 2, 3, 64, 128, 2, 2)
    assert {sm for sm, tiles in found.items() if tiles == by_warps} == {80, 86, 87}
    assert {sm for sm, tiles in found.items() if tiles == with_fp8} == {89, 120, 121}
    assert {found[sm] for sm in (90, 100, 103, 110)} == {(128, 128, 8, 3) * 2}


@pytest.mark.parametrize(("sm", "like"), [(0, 86), (75, 86), (999, 120)])
def test_an_architecture_without_a_line_gets_what_the_least_shared_memory_holds(sm, like):
    assert tiles_of(sm) == tiles_of(like)


def test_blocks_of_streams_are_powers_of_two():
    """`tl.arange` takes no other."""
    assert all(size & (size - 1) == 0 for stream in STREAMS.values() for size in (stream.block, stream.rows))
