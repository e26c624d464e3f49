"""vLLM's indexer on GPUs without DeepGEMM's kernels: the plugin selects for all query tokens of a batch."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.vllm.v32 import portable
from nsa_plugin.backends.vllm.v32.indexer import ATTRIBUTE, planned_indexer_builder, prefill_chunks, wrap_indexer
from nsa_plugin.backends.vllm.v32.portable import warm_indexer, warm_inputs
from nsa_plugin.backends.vllm.v32.routes import VllmPlanner
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.errors import NoProviderError
from nsa_plugin.kernels.indexer import reference_paged_topk
from nsa_plugin.kernels.kv_cache import open_cache, reference_read_codes, reference_write
from nsa_plugin.libraries.devices import MIB, synthetic
from tests.backends.fake_vllm.indexer import DIM, PAGE, TOPK, StockIndexerBuilder, a_call, split_indexer_prefill_chunks
from tests.backends.fake_vllm.v32 import MAX_LEN, World, planner

AMPERE = synthetic(86, libraries=("triton",))
# Steps, a dense prompt, prompts that select with and without a prefix.
BATCH = [(1, 40), (1, 9), (6, 6), (30, 60), (5, 70), (4, 96)]


def stock(
    hidden_states: torch.Tensor,
    k_cache_prefix: str,
    kv_cache: torch.Tensor,
    q_quant: torch.Tensor,
    k: torch.Tensor | None,
    weights: torch.Tensor,
    topk_tokens: int,
    max_model_len: int,
    topk_indices_buffer: torch.Tensor,
    skip_k_cache_insert: bool = True,
    dense_mha_metadata_layer_name: str = "mla",
) -> torch.Tensor:
    raise AssertionError("vLLM's indexer ran")


def chunk_of(common: Any, kv_lens: list[int], requests: slice, rows: slice, gathered: bool) -> Any:
    """A chunk as vLLM's builder makes it."""
    starts = common.query_start_loc_cpu.tolist()
    first = starts[requests.start]
    lens = kv_lens[requests]
    bounds = [0, *accumulate(lens)]
    ks, ke = [], []
    for place, request in enumerate(range(requests.start, requests.stop)):
        q_len = starts[request + 1] - starts[request]
        ks += [bounds[place]] * q_len
        ke += [bounds[place] + lens[place] - q_len + 1 + row for row in range(q_len)]
    return SimpleNamespace(
        block_table=common.block_table_tensor[requests],
        cu_seqlen_ks=torch.tensor(ks[rows], dtype=torch.int32),
        cu_seqlen_ke=torch.tensor(ke[rows], dtype=torch.int32),
        cu_seq_lens=torch.tensor(bounds, dtype=torch.int32),
        total_seq_lens=bounds[-1],
        token_start=first + rows.start,
        token_end=first + rows.stop,
        skip_kv_gather=gathered,
    )


def batch_of(deciding: VllmPlanner, lengths: list[tuple[int, int]], steps: int, budget: int) -> tuple[Any, Any]:
    """vLLM's metadata of a batch whose first `steps` requests are steps, and the batch."""
    step = World(deciding).step(lengths)
    metadata = planned_indexer_builder(StockIndexerBuilder, lambda: deciding)().build(0, step.common)
    rows, kv_lens = ([length[place] for length in lengths] for place in (0, 1))
    given = torch.tensor(kv_lens[steps:]), torch.tensor(rows[steps:]), 1000, budget
    chunks = prefill_chunks(split_indexer_prefill_chunks, lambda: deciding)(*given, request_offset=steps)
    made = []
    for requests, some in chunks:
        made.append(chunk_of(step.common, kv_lens, requests, some, gathered=some.start > 0))
    metadata.prefill = SimpleNamespace(chunks=made)
    return metadata, step


@pytest.mark.parametrize("sm", [86, 0])
@pytest.mark.parametrize("free", [1 << 40, 4 * 60 * 10 * 4])
def test_every_query_token_that_selects_gets_the_references_selection(sm: int, free: int):
    """Little free memory splits a prompt into chunks; only the first gathers keys."""
    deciding = planner(device=replace(AMPERE, memory_free=free))
    deciding.portable = True
    metadata, step = batch_of(deciding, BATCH, 2, 512 * MIB)
    assert hasattr(metadata, ATTRIBUTE), "steps are selected for by the plugin even within the budget"
    rows = step.common.num_actual_tokens
    call = a_call(rows)
    providers = Providers("v32_fp8", sm)
    ours = wrap_indexer(stock, lambda: {"indexer": metadata}, lambda: providers, lambda: True)
    pages = call.cache.data.view(160, PAGE, -1)
    hidden = torch.empty(rows, 1)
    for _ in range(2):  # a second layer reads the first one's slots
        result = ours(hidden, "indexer", pages, call.q, None, call.weights, TOPK, MAX_LEN, call.buffer)
        assert result is call.buffer
        place = 0
        for request, (q_len, kv_len) in enumerate(BATCH):
            some = slice(place, place + q_len)
            place += q_len
            if q_len == kv_len:  # dense
                assert bool((call.buffer[some] == -1).all())
                continue
            expected = reference_paged_topk(
                call.q[some].unsqueeze(0),
                call.cache,
                call.weights[some],
                torch.tensor([kv_len]),
                step.common.block_table_tensor[request : request + 1],
                TOPK,
            )
            assert [set(row) for row in call.buffer[some].tolist()] == [set(row) for row in expected.tolist()]
        assert bool((call.buffer[rows:] == 9).all())
        call.buffer[:rows] = 9


@pytest.mark.parametrize("sm", [86, 0])
def test_an_upper_bound_on_the_keys_of_a_chunk_does_not_change_the_selection(sm: int):
    """With async scheduling and speculated tokens the host does not know the exact length of a step among prefills."""
    selections, providers = [], Providers("v32_fp8", sm)
    for more in (0, 1, 3):
        deciding = planner(device=AMPERE, step_tokens=2)
        deciding.portable = True
        metadata, _ = batch_of(deciding, [(2, 60), (1, 64)], 1, 512 * MIB)
        (chunk,) = metadata.prefill.chunks
        assert chunk.total_seq_lens == 64
        chunk.total_seq_lens += more
        call = a_call(3)
        ours = wrap_indexer(stock, lambda metadata=metadata: {"indexer": metadata}, lambda: providers, lambda: True)
        pages = call.cache.data.view(160, PAGE, -1)
        ours(torch.empty(3, 1), "indexer", pages, call.q, None, call.weights, TOPK, MAX_LEN, call.buffer)
        assert len(chunk.nsa_plugin_slots) == 64 + more
        selections.append([set(row) for row in call.buffer[:3].tolist()])
    assert selections[0] == selections[1] == selections[2]
    assert -1 not in selections[0][2]


def test_new_keys_are_stored_unless_the_model_has_stored_them():
    deciding = planner(device=AMPERE)
    deciding.portable = True
    metadata, _ = batch_of(deciding, [(30, 60), (5, 70)], 0, 512 * MIB)
    metadata.slot_mapping = torch.tensor([3, -1, 77])
    call = a_call(35)
    providers = Providers("v32_fp8", 86)
    ours = wrap_indexer(stock, lambda: {"indexer": metadata}, lambda: providers, lambda: True)
    keys = torch.randn(35, DIM, generator=torch.Generator().manual_seed(1)).bfloat16()
    before = call.cache.data.clone()
    given = (torch.empty(35, 1), "indexer", call.cache.data.view(160, PAGE, -1), call.q, keys, call.weights)
    ours(*given, TOPK, MAX_LEN, call.buffer)
    assert torch.equal(call.cache.data, before)
    ours(*given, TOPK, MAX_LEN, call.buffer, skip_k_cache_insert=False)
    wanted = open_cache(before.view(160, PAGE, -1), "indexer_fp8")
    reference_write(wanted, keys[[0, 2]], torch.tensor([3, 77]), power_of_two_scales=True)
    every = torch.arange(call.cache.num_slots)
    for found, right in zip(reference_read_codes(call.cache, every), reference_read_codes(wanted, every), strict=True):
        assert torch.equal(found.view(torch.uint8), right.view(torch.uint8))


def test_the_profiling_run_is_left_to_vllm():
    """The profiling run has no batch, and vLLM reserves memory for the stock kernels."""
    ours = wrap_indexer(stock, lambda: None, lambda: Providers("v32_fp8", 86), lambda: True)
    call = a_call(2)
    with pytest.raises(AssertionError, match="vLLM's indexer ran"):
        ours(torch.empty(2, 1), "indexer", call.cache.data, call.q, None, call.weights, TOPK, MAX_LEN, call.buffer)


@pytest.mark.parametrize("layout", ["v32_fp8", "bf16"])
def test_the_warm_up_runs_the_kernels_of_vllms_model_code(layout: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(portable, "MANY_ROWS", 8)  # interpreted, thousands take minutes
    ran: list[str] = []
    providers = Providers(layout, 86)
    load = providers.registry.load

    def loading(op: str, name: str, **more: Any) -> Any:
        ran.append(op)
        return load(op, name, **more)

    providers.registry = SimpleNamespace(load=loading)  # type: ignore[assignment]
    shape = ModelShape(kv_layout=layout, index_n_heads=32, index_topk=128)
    warm_inputs(providers, shape, torch.device("cpu"))
    warm_indexer(providers, shape, torch.device("cpu"), step_tokens=2)
    written = {"mla_norm_rope", "indexer_keys", "kv_cache_write"}
    assert written | {"kv_cache_read_codes", "indexer_topk", "indexer_topk_paged"} <= set(ran)
    providers._loaded["mla_norm_rope", "triton"] = lambda *_, **__: 1 / 0
    with pytest.raises(NoProviderError, match="norms, RoPE and the caches' new entries: ZeroDivisionError"):
        warm_inputs(providers, shape, torch.device("cpu"))
