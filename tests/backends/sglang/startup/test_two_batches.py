"""Two-batch overlap (`--enable-two-batch-overlap`): SGLang runs the layers of two batches in turn.

SGLang builds three backends: one that it prepares with the whole batch, and one for each half.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.sglang.startup import serving
from nsa_plugin.backends.sglang.startup.serving import SglangServing
from nsa_plugin.backends.sglang.v32.indexer import ATTRIBUTE, wrap_topk_ragged
from nsa_plugin.kernels.indexer import reference_topk
from nsa_plugin.settings import ResolvedSettings, Settings
from tests.backends.fake_sglang.model_runner import built, runner
from tests.backends.fake_sglang.v32 import (
    D_QK,
    D_V,
    H200,
    HEADS,
    DsaBackend,
    ForwardMode,
    Layer,
    filled_cache,
    forward_batch,
    stock_attention,
)

LAYERS, SLOTS, TOPK, SCALE = 3, 256, 16, 0.1
INDEX_HEADS, INDEX_DIM = 16, 128


def topk(*arguments: Any, requests: Any = None, **named: Any) -> torch.Tensor:
    """The reference as a provider that takes requests."""
    return reference_topk(*arguments, **named)


class Pool:
    """Keys of the indexer and a latent cache for each layer. SGLang has one pool for all backends."""

    def __init__(self) -> None:
        seeded = torch.Generator().manual_seed(0)
        self.keys = torch.randn(LAYERS, SLOTS, INDEX_DIM, generator=seeded).to(torch.float8_e4m3fn)
        self.scales = torch.rand(LAYERS, SLOTS, generator=seeded) + 0.5
        rows = filled_cache("v32_fp8")[1].view(torch.uint8)
        self.latent = [rows.roll(7 * layer, dims=0).view(torch.float8_e4m3fn) for layer in range(LAYERS)]

    def get_index_k_scale_buffer(self, layer: int, lengths: Any, table: torch.Tensor, total: int, longest: int) -> Any:
        assert (total, longest) == (int(lengths.sum()), int(lengths.max()))
        keys, scales = self.keys[layer, table], self.scales[layer, table].unsqueeze(1)
        return keys.view(torch.uint8), scales.view(torch.uint8)


@dataclass
class Metadata:
    """SGLang's indexer metadata of a prefill."""

    batch: Batch
    force_unfused_topk: bool = True

    @property
    def attn_metadata(self) -> Any:
        return self.batch.attn_metadata

    def get_page_table_64(self) -> torch.Tensor:
        return torch.cat(self.batch.slots)

    def get_indexer_kvcache_range(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.batch.ks, self.batch.ke

    def get_indexer_seq_len(self) -> torch.Tensor:
        return torch.tensor(self.batch.kv_lens, dtype=torch.int32)

    get_indexer_seq_len_cpu = get_indexer_seq_len

    def get_dsa_extend_len_cpu(self) -> list[int]:
        return self.batch.q_lens


class Batch:
    """Half of a batch: its requests, the inputs of each layer and the outputs so far."""

    def __init__(self, mode: ForwardMode, q_lens: list[int], kv_lens: list[int], first_slot: int):
        seeded = torch.Generator().manual_seed(first_slot + 1)
        self.q_lens, self.kv_lens, self.attn_metadata = q_lens, kv_lens, SimpleNamespace()
        mine = torch.arange(first_slot, first_slot + sum(kv_lens))
        self.slots = list(mine[torch.randperm(len(mine), generator=seeded)].split(kv_lens))
        self.given = forward_batch(mode, q_lens if mode.is_extend() else [], kv_lens, fake=self)
        self.request = torch.repeat_interleave(torch.arange(len(q_lens)), torch.tensor(q_lens)).tolist()
        starts = [sum(kv_lens[:place]) for place in self.request]
        seen = [kv - q + row + 1 for q, kv in zip(q_lens, kv_lens, strict=True) for row in range(q)]
        self.ks = torch.tensor(starts, dtype=torch.int32)
        self.ke = self.ks + torch.tensor(seen, dtype=torch.int32)
        rows = sum(q_lens)
        self.q = torch.randn(LAYERS, rows, HEADS, D_QK, generator=seeded).bfloat16()
        self.index_q = torch.randn(LAYERS, rows, INDEX_HEADS, INDEX_DIM, generator=seeded).to(torch.float8_e4m3fn)
        self.weights = torch.randn(LAYERS, rows, INDEX_HEADS, 1, generator=seeded)
        self.outputs: list[torch.Tensor] = []

    def run_layer(self, backend: Any, layer: int) -> None:
        """Select as SGLang's indexer does in a prefill, and attend."""
        expected = self.selected(backend.token_to_kv_pool, layer)
        slots = self._select(backend, layer) if self.given.forward_mode.is_extend() else expected
        backend.calls.append(f"layer {layer}")
        out = backend._forward_flashmla_kv(
            q_all=self.q[layer],
            kv_cache=backend.token_to_kv_pool.latent[layer],
            page_table_1=slots,
            sm_scale=SCALE,
            v_head_dim=D_V,
            layer=Layer(),
            metadata=SimpleNamespace(),
        )
        self.outputs.append(out.squeeze(1))

    def _select(self, backend: Any, layer: int) -> torch.Tensor:
        metadata = backend.get_indexer_metadata(layer, self.given)
        indexer = SimpleNamespace(index_topk=TOPK, num_init_tokens=0, num_local_tokens=0)
        given = (indexer, False, self.given, layer, self.index_q[layer], self.weights[layer], metadata)
        positions = wrap_topk_ragged(no_stock_selection)(*given)
        chosen = [
            self.slots[place][row.clamp(min=0).long()] for place, row in zip(self.request, positions, strict=True)
        ]
        return torch.stack(chosen).where(positions >= 0, -1).int()

    def selected(self, pool: Pool, layer: int) -> torch.Tensor:
        """The reference: slots of each query token, from logits in float64."""
        found = torch.full((len(self.request), TOPK), -1, dtype=torch.int32)
        table = torch.cat(self.slots)
        for row in range(len(self.request)):
            seen = table[self.ks[row] : self.ke[row]]
            products = (self.index_q[layer, row].double() @ pool.keys[layer, seen].double().T).relu()
            logits = (self.weights[layer, row].double() * products).sum(0) * pool.scales[layer, seen].double()
            best = seen[logits.topk(min(TOPK, len(seen))).indices]
            found[row, : len(best)] = best.int()
        return found

    def reference(self, pool: Pool, layer: int) -> torch.Tensor:
        return stock_attention(self.q[layer], pool.latent[layer], self.selected(pool, layer), SCALE)


def no_stock_selection(*arguments: Any, **named: Any) -> torch.Tensor:
    raise AssertionError("SGLang's own selection ran")


class Indexed(DsaBackend):
    def get_indexer_metadata(self, layer_id: int, forward_batch: Any) -> Any:
        return Metadata(forward_batch.fake)


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch, library: str) -> list[Any]:
    """The backends that SGLang builds: of the whole batch, and of its halves."""
    for name in ("warm", "_warm_selection"):
        monkeypatch.setattr(serving, name, lambda *given: None)
    monkeypatch.setattr(serving, "free_device_memory", lambda: 8 << 30)
    settings = Settings(prefill_backend=library, decode_backend=library, mha_max_kv=0, token_shard="off")
    model_runner, pool = runner(enable_two_batch_overlap=True), Pool()
    made: list[Any] = [built(Indexed) for _ in range(3)]
    process = SglangServing.begin(ResolvedSettings(settings, {}), made[0], model_runner, H200)
    for backend in made:
        backend.token_to_kv_pool = pool
        process.adopt(backend, model_runner)
        backend.nsa_plugin.providers = OnCpu("v32_fp8", 0)
    assert (process.backends, process.notes) == (made, [])
    model_runner.attn_backend = SimpleNamespace(primary=made[0], children=made[1:])
    return made


class OnCpu(Providers):
    """Loads the reference in place of any library for the indexer."""

    def load(self, op: str, name: str) -> Any:
        return topk if op == "indexer_topk" else super().load(op, name)


@pytest.mark.parametrize("library", ["reference", "flash_mla"])
@pytest.mark.parametrize(
    ("mode", "halves"),
    [
        (ForwardMode.EXTEND, [([5, 9, 20], [40, 9, 50]), ([30], [120])]),
        (ForwardMode.DECODE, [([1, 1, 1], [40, 9, 50]), ([1, 1], [60, 33])]),
    ],
    ids=["prefill", "decode"],
)
def test_two_batches_that_run_layer_by_layer_keep_their_own_plans_and_outputs(
    backends: list[Any], library: str, mode: ForwardMode, halves: list[tuple[list[int], list[int]]]
) -> None:
    primary, *children = backends
    batches = [Batch(mode, *lengths, first_slot=100 * place) for place, lengths in enumerate(halves)]
    q_lens, kv_lens = ([*first, *second] for first, second in zip(*halves, strict=True))
    primary.init_forward_metadata(forward_batch(mode, q_lens if mode.is_extend() else [], kv_lens))
    plans = []
    for child, batch in zip(children, batches, strict=True):
        child.init_forward_metadata(batch.given)
        plans.append(child.nsa_plugin.route.plan)
    assert primary.nsa_plugin.planner.trace.counts.total() == 1, "one batch, not its halves too"
    for layer in range(LAYERS):
        for child, batch in zip(children, batches, strict=True):
            batch.run_layer(child, layer)

    for child, batch, plan in zip(children, batches, plans, strict=True):
        assert child.nsa_plugin.route.plan is plan
        assert plan.provider == library
        stock = [] if library == "reference" else ["flashmla_kv"]
        ran = [call for call in child.calls if call != "schedule"]
        assert ran == [call for layer in range(LAYERS) for call in (f"layer {layer}", *stock)]
        for layer, out in enumerate(batch.outputs):
            expected = batch.reference(child.token_to_kv_pool, layer)
            torch.testing.assert_close(out.float(), expected.float(), atol=2e-2, rtol=2e-2)
    if mode.is_extend():
        first, second = (child.nsa_plugin.selection for child in children)
        assert first is not second
        for child, batch, plan in zip(children, batches, plans, strict=True):
            selection = getattr(child.get_indexer_metadata(0, batch.given), ATTRIBUTE)
            assert selection is child.nsa_plugin.selection
            assert selection.plan is plan
