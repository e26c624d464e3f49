"""Host side of the CUDA sparse MLA over bfloat16 rows: what it refuses before anything is compiled, and how it cuts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.cuda import sparse_mla, sparse_mla_rows
from nsa_plugin.kernels.kv_cache import allocate_cache, open_cache
from nsa_plugin.kernels.sparse_mla import prefill_op
from nsa_plugin.kernels.triton.device import DeviceFacts
from nsa_plugin.layouts import BF16
from nsa_plugin.libraries.architectures import shared_memory_per_block
from tests.kernels.sparse_mla_cases import HOST_TOKENS, host_arguments

HEADS = 5
H200 = DeviceFacts(sms=132, architecture=90, shared_memory=shared_memory_per_block(90))
prefill = prefill_op(sparse_mla_rows.attend)


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "q is on cpu; the CUDA kernel needs a CUDA device"),
        ({"kv": rows(128, 576)}, "q is on cpu"),
        ({"kv": open_cache(rows(2, 80, 576)[:, :64], BF16)}, "q is on cpu"),  # a gap between pages
        ({"q": torch.zeros(HOST_TOKENS, HEADS, 576)}, "q has dtype float32; allowed: bfloat16"),
        (
            {"kv": allocate_cache("bf16", 2, 64, dim=512), "q": rows(HOST_TOKENS, HEADS, 512)},
            "kv has layout bf16 of torch.bfloat16 in rows of 512; this kernel reads bf16 in rows of 576",
        ),
        ({"kv": rows(128, 576, dtype=torch.float16)}, "layout bf16 of torch.float16"),
        ({"kv": allocate_cache("v32_fp8", 2, 64)}, "kv has layout v32_fp8"),
        ({"kv": open_cache(rows(2, 64, 1152)[..., :576], BF16)}, "this kernel reads pages of rows without gaps"),
        ({"kv": open_cache(rows(2, 64, 1152)[..., ::2], BF16)}, "this kernel reads pages of rows without gaps"),
        ({"kv": rows(128 * 576 + 4)[4:].view(128, 576)}, "off a multiple of 16 B"),
        ({"d_v": 256}, "d_v is 256; this kernel has values of 512"),
        (
            {"extra_kv": rows(64, 576), "extra_indices": torch.zeros(HOST_TOKENS, 4, dtype=torch.int32)},
            "an extra cache is given; this kernel reads one",
        ),
    ],
)
def test_what_is_refused_and_by_which_name(changes, message):
    with pytest.raises(KernelArgumentError, match=message):
        prefill(**host_arguments(HEADS, **({"kv": allocate_cache("bf16", 2, 64)} | changes)))


@pytest.mark.parametrize("variant", sparse_mla_rows.VARIANTS, ids=str)
def test_blocks_fit_into_shared_memory(variant):
    # 228 KiB an SM, of which every block takes 1 KiB more than it asks for (CUDA C++ Programming Guide).
    assert variant.blocks * (variant.shared_bytes + 1024) <= 228 * 1024


@pytest.mark.parametrize(
    ("sm", "heads", "blocks"), [(80, 16, [8, 16]), (86, 128, [8, 16, 32, 64]), (89, 8, [8]), (120, 32, [8, 16, 32])]
)
def test_variants_of_other_gpus(sm, heads, blocks):
    facts = DeviceFacts(sms=100, architecture=sm, shared_memory=shared_memory_per_block(sm))
    assert [one.heads for one in sparse_mla_rows.possible_variants(heads, facts)] == blocks


@pytest.mark.parametrize(("sm", "stages"), [(80, 8), (86, 5), (87, 8), (89, 5), (120, 5)])
@pytest.mark.parametrize("heads", [8, 16])
def test_rows_in_turn_have_as_many_stages_as_fit(sm, heads, stages):
    facts = DeviceFacts(sms=100, architecture=sm, shared_memory=shared_memory_per_block(sm))
    (variant,) = (one for one in sparse_mla_rows.possible_variants(16, facts) if one.heads == heads)
    assert (variant.in_turn, variant.stages) == (True, stages)
    assert variant.shared_bytes <= facts.shared_memory


def test_warps_in_teams_take_heads_of_their_own():
    """The block has the heads of all its teams; the source is told of both."""
    variant = sparse_mla_rows.RowsVariant(tiles=4, keys=32, blocks=1, stages=2, teams=2, sums=2)
    assert variant.heads == 64
    block = {"NT": 4, "MIN_BLOCKS": 1, "KEYS": 32, "STAGES": 2, "WARPS": 8, "PRODUCERS": 0, "IN_TURN": 0}
    parts = {"VALUE_PARTS": 4, "HEAD_PARTS": 1, "SUMS": 2}
    assert variant.definitions == block | parts | {"TEAMS": 2}


def test_the_host_and_the_source_agree_on_constants():
    source = (Path(sparse_mla.__file__).parent / "sparse_mla_rows_steps.cuh").read_text()
    assert int(re.search(r" COPIED = (\d+);", source)[1]) == sparse_mla_rows.ROW_BYTES
    gap = int(re.search(r" ROW = SWIZZLED \? COPIED : COPIED \+ (\d+);", source)[1])
    assert sparse_mla_rows.ROW_BYTES + gap == sparse_mla_rows.ROW_STRIDE
    assert f" UNIT = IN_TURN ? {sparse_mla_rows.UNIT} : KEYS;" in source
