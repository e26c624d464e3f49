"""Host side of attention over unions: what it refuses before anything is compiled, and what fits."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.cuda import sparse_mla, sparse_mla_launch, sparse_mla_neighbours, sparse_mla_union
from nsa_plugin.kernels.kv_cache import allocate_cache
from nsa_plugin.kernels.triton.device import DeviceFacts
from nsa_plugin.libraries.architectures import shared_memory_per_block
from tests.kernels.sparse_mla_cases import HOST_TOKENS, facts_of, host_arguments

HEADS = 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "q is on cpu; the CUDA kernel needs a CUDA device"),
        ({"q": torch.zeros(HOST_TOKENS, HEADS, 576)}, "q has dtype float32; allowed: bfloat16"),
        ({"kv": torch.zeros(128, 576, dtype=torch.bfloat16)}, "kv has layout bf16; this kernel reads v32_fp8"),
        ({"d_v": 256}, "d_v is 256"),
        (
            {
                "extra_kv": allocate_cache("v32_fp8", 1, 64),
                "extra_indices": torch.zeros(HOST_TOKENS, 4, dtype=torch.int32),
            },
            "an extra cache is given; this kernel reads one",
        ),
    ],
)
def test_what_is_refused_and_by_which_name(changes, message):
    with pytest.raises(KernelArgumentError, match=message):
        sparse_mla_union.prefill(**host_arguments(HEADS, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "q is on cpu; the CUDA kernel needs a CUDA device"),
        (
            {"q": torch.zeros(HOST_TOKENS, 9, 576, dtype=torch.bfloat16)},
            "there are 9 heads; on this GPU unions are faster with up to 8",
        ),
        ({"kv": torch.zeros(128, 576, dtype=torch.bfloat16)}, "kv has layout bf16; this kernel reads v32_fp8"),
    ],
)
def test_what_is_refused_where_the_gpu_decides(monkeypatch, changes, message):
    if "heads" in message:
        monkeypatch.setattr(sparse_mla_neighbours, "require_records", lambda call: call.scopes[0])
        monkeypatch.setattr(sparse_mla_neighbours, "facts_of", lambda device: facts_of(90))
    with pytest.raises(KernelArgumentError, match=message):
        sparse_mla_neighbours.prefill(**host_arguments(HEADS, **changes))


@pytest.mark.parametrize(
    ("sm", "topk", "num_slots", "group", "fits"),
    [
        (90, 8192, 2**28 - 2, 2, True),
        (90, 8193, 64, 2, False),
        (90, 1, 2**28 - 1, 2, False),
        (80, 8192, 64, 2, True),
        (80, 4096, 64, 4, True),
        (80, 4097, 64, 4, False),
        (86, 4096, 2**28 - 2, 2, True),
        (86, 4097, 64, 2, False),
        (86, 2048, 64, 4, True),
        (86, 2049, 64, 4, False),
        (120, 4096, 64, 2, True),
        (120, 4097, 64, 2, False),
    ],
)
def test_what_fits_an_entry_and_the_table(sm, topk, num_slots, group, fits):
    assert sparse_mla_union.fits(topk, num_slots, group, facts_of(sm)) is fits


def test_the_table_leaves_room_for_the_rest_of_the_block():
    facts = DeviceFacts(sms=100, architecture=86, shared_memory=8 * 8192)
    assert sparse_mla_union.most_entries(facts) == 4096
    assert sparse_mla_union.most_entries(facts._replace(shared_memory=8 * 8192 + sparse_mla_union.STATIC)) == 8192


@pytest.mark.parametrize(
    ("sm", "heads", "topk", "most"), [(86, 8, 2049, 8192), (86, 16, 4097, 8192), (90, 8, 8193, 16384)]
)
def test_a_selection_that_is_too_large_for_the_table_is_refused(monkeypatch, sm, heads, topk, most):
    monkeypatch.setattr(sparse_mla_union, "require_records", lambda call: call.scopes[0])
    monkeypatch.setattr(sparse_mla_union, "facts_of", lambda device: facts_of(sm))
    indices = torch.zeros(HOST_TOKENS, topk, dtype=torch.int32)
    group = most // (topk - 1)
    with pytest.raises(
        KernelArgumentError, match=f"topk is {topk}; {group} tokens may select {most} together on this GPU"
    ):
        sparse_mla_union.prefill(**host_arguments(heads, indices=indices))
    # What would have fitted goes on, as far as it gets without a GPU.
    with pytest.raises(KernelArgumentError, match="needs a CUDA device"):
        sparse_mla_union.prefill(**host_arguments(heads, indices=indices[:, :-1]))


def test_a_cache_of_more_slots_than_an_entry_can_name_is_refused(monkeypatch):
    monkeypatch.setattr(sparse_mla_union, "SLOT_BITS", 5)
    with pytest.raises(KernelArgumentError, match=r"kv has \d+ slots; an entry of a union has 5 bits for one"):
        sparse_mla_union.prefill(**host_arguments(HEADS))


@pytest.mark.parametrize(("sm", "topk", "alone"), [(86, 2049, True), (86, 2048, False), (90, 2049, False)])
def test_what_does_not_fit_is_attended_token_by_token(monkeypatch, sm, topk, alone):
    """And what fits has a result made, which is as far as it gets without a GPU."""
    monkeypatch.setattr(sparse_mla_neighbours, "require_records", lambda call: call.scopes[0])
    monkeypatch.setattr(sparse_mla_neighbours, "facts_of", lambda device: facts_of(sm))
    monkeypatch.setattr(sparse_mla, "attend", lambda call: "alone")
    monkeypatch.setattr(sparse_mla_neighbours, "new_result", lambda call: "united")
    scope = SimpleNamespace(topk=topk, cache=SimpleNamespace(num_slots=64))
    q = SimpleNamespace(device="cuda", numel=lambda: 0)
    call = SimpleNamespace(heads=HEADS, scopes=(scope,), q=q, require=lambda condition, message: None)
    assert sparse_mla_neighbours.attend(call) == ("alone" if alone else "united")


@pytest.mark.parametrize(
    ("sm", "heads", "group", "taken"),
    [
        (90, 1, 2, 8),
        (90, 64, 2, 8),
        (80, 1, 4, 8),
        (86, 8, 4, 8),
        (86, 9, 2, 16),
        (120, 16, 2, 16),
        (89, 17, 2, 16),
        (86, 64, 2, 16),
    ],
)
def test_each_gpu_has_the_forms_that_were_made_for_it(sm, heads, group, taken):
    variant = sparse_mla_union.variant_for(heads, facts_of(sm))
    assert (variant.group, variant.heads) == (group, taken)


@pytest.mark.parametrize("sm", [80, 86, 89, 90, 120])
def test_blocks_fit_into_shared_memory(sm):
    for heads in (8, 16, 32):
        variant = sparse_mla_union.variant_for(heads, facts_of(sm))
        each = variant.shared_bytes("v32_fp8")
        assert each <= shared_memory_per_block(sm)
        # 228 KiB an SM of SM90, of which every block takes 1 KiB more than it asks for (CUDA C++ Programming Guide).
        assert variant.blocks * (each + 1024) <= 228 * 1024


@pytest.mark.parametrize("variant", [*sparse_mla_union.HOPPER_VARIANTS, *sparse_mla_union.PORTABLE_VARIANTS], ids=str)
def test_an_entry_has_a_bit_for_each_token_and_tokens_have_whole_tiles(variant):
    assert 1 < variant.group <= 32 - sparse_mla_union.SLOT_BITS
    assert variant.heads * variant.group == 8 * variant.tiles
    # Unions of tokens that share nothing cost more than the tokens alone, and of those that share all, less.
    assert 0 < variant.least_shared < 100


@pytest.mark.parametrize("group", [2, 4])
@pytest.mark.parametrize("topk", [1, 3, 64, 2047, 2048])
def test_the_table_has_two_words_for_each_entry_and_fits(topk, group):
    words = 1 << sparse_mla_union.table_bits(topk, group)
    assert 2 * group * topk <= words < 4 * group * topk + 2
    assert topk <= sparse_mla_union.steps(topk) * sparse_mla_union.THREADS[0] < topk + sparse_mla_union.THREADS[0]
    assert 4 * words <= shared_memory_per_block(86)


@pytest.mark.parametrize("sm", [86, 90])
def test_tokens_alone_are_attended_by_a_block_each_where_unions_may_be(sm):
    facts = facts_of(sm)
    for heads in (1, 8, sparse_mla_neighbours.limits(facts).heads):
        variant = sparse_mla_neighbours.alone(heads, facts)
        assert variant.heads >= heads
        assert variant in sparse_mla.possible_variants(heads, "v32_fp8", facts)


def test_the_host_and_the_sources_agree_on_constants():
    folder = Path(sparse_mla.__file__).parent
    union, block = (folder / sparse_mla_union.SOURCE).read_text(), (folder / "sparse_mla_block.cuh").read_text()
    for source in (union, block):
        assert int(re.search(r"SLOT_BITS = (\d+);", source)[1]) == sparse_mla_union.SLOT_BITS
    assert (int(re.search(r"THREADS = (\d+);", union)[1]), 1, 1) == sparse_mla_union.THREADS


def test_the_host_and_the_gate_agree():
    folder = Path(sparse_mla.__file__).parent
    gate, sample = (folder / "gate.cuh").read_text(), (folder / sparse_mla_neighbours.SOURCE).read_text()
    assert f"GATE == {sparse_mla_launch.UNLESS_NEGATIVE})" in gate
    assert "#define GATE 0 " in gate
    assert (sparse_mla_launch.NO_GATE, sparse_mla_launch.IF_NEGATIVE) == (0, 2)
    assert (int(re.search(r"THREADS = (\d+);", sample)[1]), 1, 1) == sparse_mla_neighbours.THREADS


def test_the_docs_have_the_limits_and_forms():
    docs = (Path(__file__).parents[2] / "docs/kernels.md").read_text()
    hopper, portable = sparse_mla_neighbours.HOPPER_LIMITS, sparse_mla_neighbours.PORTABLE_LIMITS
    for name, limits, variants in (
        ("SM90", hopper, sparse_mla_union.HOPPER_VARIANTS),
        ("portable path", portable, sparse_mla_union.PORTABLE_VARIANTS),
    ):
        rows = [line.split("|")[1:-1] for line in docs.splitlines() if re.match(rf"\| {name} \| .*%", line)]
        assert len(rows) == len(variants)
        assert limits.heads == variants[-1].heads
        for (_, heads, tokens, group, shared), variant in zip(rows, variants, strict=True):
            assert f"to {variant.heads} heads" in heads
            assert int(tokens.replace(",", "")) == limits.rows
            assert (int(group), int(re.match(r" (\d+)%", shared)[1])) == (variant.group, variant.least_shared)
