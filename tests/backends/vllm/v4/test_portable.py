"""DeepSeek-V4 under vLLM on a GPU without FlashMLA: the plugin's kernels select for every query token and attend."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_plugin.backends.common.paths import DIRECT
from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.common.trial import tried
from nsa_plugin.backends.common.v4 import RATIOS
from nsa_plugin.backends.vllm.v4.batch import ATTRIBUTE as PLANS
from nsa_plugin.backends.vllm.v4.routes import VllmV4Planner, path
from nsa_plugin.backends.vllm.v32.indexer import ATTRIBUTE, wrap_indexer
from nsa_plugin.errors import NoProviderError
from nsa_plugin.kernels.indexer import reference_paged_topk
from nsa_plugin.kernels.kv_cache import open_cache
from nsa_plugin.libraries.devices import DeviceProfile, synthetic
from tests.backends.fake_vllm.indexer import PAGE, TOPK, a_call
from tests.backends.fake_vllm.v4 import MAX_LEN, MODEL, World, planner
from tests.backends.fake_vllm.v4_cases import close
from tests.backends.fake_vllm.v4_indexer import RATIO, builder_of, common

SM120 = synthetic(120, libraries=("triton",))
# Steps, one of them without a compressed key yet; prefills with and without a prefix, and one shorter than a key.
BATCH = [(1, 90), (1, 3), (30, 300), (9, 9), (3, 3), (5, 71)]
STEPS = 2


def on_the_portable_path(device: DeviceProfile = SM120, **more: Any) -> VllmV4Planner:
    deciding = planner(device, **more)
    deciding.portable = True
    return deciding


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
    skip_k_cache_insert: bool,
) -> torch.Tensor:
    raise AssertionError("vLLM's indexer ran")


def chunks_of(batch: Any) -> list[Any]:
    """Two chunks of the prefills' compressed keys, as vLLM's builder makes them: one request, then the others."""
    starts, contexts = batch.query_start_loc_cpu.tolist(), batch.seq_lens.tolist()
    made = []
    for requests in (range(STEPS, STEPS + 1), range(STEPS + 1, len(contexts))):
        bounds = [0, *accumulate(contexts[request] // RATIO for request in requests)]
        ks, ke = [], []
        for request, (first, _) in zip(requests, pairwise(bounds), strict=True):
            for row in range(starts[request], starts[request + 1]):
                position = contexts[request] - starts[request + 1] + row
                ks.append(first)
                ke.append(first + (position + 1) // RATIO)
        chunk = SimpleNamespace(
            block_table=batch.block_table_tensor[requests.start : requests.stop],
            cu_seqlen_ks=torch.tensor(ks, dtype=torch.int32),
            cu_seqlen_ke=torch.tensor(ke, dtype=torch.int32),
            cu_seq_lens=torch.tensor(bounds, dtype=torch.int32),
            total_seq_lens=bounds[-1],
            token_start=starts[requests.start],
            token_end=starts[requests.stop],
            skip_kv_gather=False,
        )
        made.append(chunk)
    return made


@pytest.mark.parametrize("sm", [120, 0])
@pytest.mark.parametrize("free", [1 << 40, 4 * MAX_LEN])
def test_every_query_token_selects_among_its_compressed_keys(sm: int, free: int):
    """vLLM's pages of the indexer lie among those of the other caches, and the layer's compressor wrote the keys."""
    batch = common(BATCH)
    metadata = builder_of(on_the_portable_path(replace(SM120, memory_free=free))).build(0, batch)
    assert hasattr(metadata, ATTRIBUTE), "steps are selected for by the plugin even within the budget"
    assert metadata.num_decode_tokens == STEPS, "the layer fills a batch of short contexts by this count"
    metadata.prefill = SimpleNamespace(chunks=chunks_of(batch))
    rows = batch.num_actual_tokens
    call = a_call(rows)
    among = torch.full((len(call.cache.data), 3 * call.cache.data.shape[1]), 0xFF, dtype=torch.uint8)
    pages = among[:, : call.cache.data.shape[1]].copy_(call.cache.data).unflatten(1, (PAGE, -1))
    ours = wrap_indexer(stock, lambda: {"indexer": metadata}, lambda: Providers("v4_fp8", sm), lambda: True)
    hidden = torch.empty(rows, 1)
    result = ours(hidden, "indexer", pages, call.q, None, call.weights, TOPK, MAX_LEN // RATIO, call.buffer, True)
    assert result is call.buffer
    owner = [request for request, (count, _) in enumerate(BATCH) for _ in range(count)]
    seen = [(context - count + place + 1) // RATIO for count, context in BATCH for place in range(count)]
    expected = reference_paged_topk(
        call.q.unsqueeze(1),
        open_cache(pages, "indexer_fp8"),
        call.weights,
        torch.tensor(seen, dtype=torch.int32),
        batch.block_table_tensor[owner],
        TOPK,
    )
    assert [set(row) for row in call.buffer[:rows].tolist()] == [set(row) for row in expected.tolist()]
    assert bool((call.buffer[rows:] == 9).all())


@pytest.mark.parametrize("ratio", RATIOS)
def test_the_plugins_kernels_attend_for_prefills_and_steps(ratio: int):
    world = World(on_the_portable_path(), [(1, 40), (1, 300), (3, 133), (2, 2)], triton=True)
    metadata = world.metadata()
    batch = getattr(metadata, PLANS)
    assert (path(batch.steps), path(batch.prefill)) == (DIRECT, DIRECT)
    found, wanted, layer = world.run(ratio, metadata)
    assert close(found, wanted)
    assert layer.own == [], "vLLM's functions call FlashMLA"


def test_without_the_portable_path_nothing_runs_the_steps_there():
    with pytest.raises(NoProviderError):
        planner(SM120).step_plan(4, 4, 1)
    on_the_portable_path().validate(prefill_rows=8192, step_requests=256)


def test_flashinfers_kernels_are_not_tried_for_caches_that_they_do_not_read(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []
    monkeypatch.setattr("nsa_plugin.backends.common.trial.trial", lambda name, *_: asked.append(name) or "")
    tried(synthetic(120), MODEL, Providers("v4_fp8", 120), torch.device("cpu"))
    assert asked == ["deep_gemm"]
