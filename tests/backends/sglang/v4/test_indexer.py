"""A V4 prefill's selection under a plan: the engine prepares, the plan selects; and what stays the engine's own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.kernels.indexer import reference_topk
from nsa_plugin.kernels.kv_cache import reference_read_codes
from nsa_plugin.libraries.registry import REFERENCE
from tests.backends.fake_sglang import v4 as fake_v4
from tests.backends.fake_sglang.v4 import TOPK, Engine, batch, started
from tests.backends.fake_sglang.v32 import ForwardMode

pytestmark = pytest.mark.usefixtures("nothing_measured")

LENS = ((6, 700), (3, 3), (5, 258), (4, 900))
INDEXER = SimpleNamespace(layer_id=1)  # as of 0.5.12; fp4 came later


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan's provider by its reference; the kernels have their own tests."""
    load = Providers.load

    def reference(self: Providers, op: str, name: str) -> Any:
        function = load(self, op, REFERENCE)
        if op != "indexer_topk":
            return function

        def score(*args: Any, requests: Any = None, **kwargs: Any) -> torch.Tensor:
            chunks.append((kwargs["rows_per_chunk"], requests))
            return function(*args, **kwargs)

        return score

    chunks.clear()
    monkeypatch.setattr(Providers, "load", reference)
    monkeypatch.setattr("nsa_plugin.backends.sglang.v4.indexer._read_codes", lambda providers: reference_read_codes)


chunks: list[tuple[int, Any]] = []


def ready(of: Any, **more: Any) -> Any:
    backend = started(of, prefill_backend="reference", **more)
    backend.init_forward_metadata(of.forward)
    return backend


def select(backend: Any, *, rows: int | None = None, indexer: Any = INDEXER, **more: Any) -> Any:
    of = backend.batch
    x = torch.zeros(of.rows + of.padded if rows is None else rows, 8)
    backend.forward_c4_indexer(x=x, q_lora=x, forward_batch=of.forward, c4_indexer=indexer, **more)
    return backend.forward_metadata.core_attn_metadata


def expected(of: Any, rows: int) -> list[set[int]]:
    """The positions that each row selects, one request's keys after the other."""
    q, weights = Engine(of)._forward_prepare_normal(*[torch.zeros(rows, 8)] * 2, None, torch.zeros(rows), None)
    found, row = [], 0
    for request in of.requests:
        count = request.kv_len // 4
        codes, scales = reference_read_codes(of.pool.keys, request.slots(64, count).int())
        some = slice(row, row + request.q_len)
        ke = torch.tensor([(position + 1) // 4 for one, position in of.places() if one is request])
        chosen = reference_topk(
            q[some], codes, scales.squeeze(1), weights[some].squeeze(2), torch.zeros_like(ke), ke, TOPK
        )
        found += [set(entries[entries >= 0].tolist()) for entries in chosen]
        row += request.q_len
    return found


@pytest.mark.parametrize("rows_per_chunk", [1, 4, 5, 7, 1000])
def test_a_selection_is_each_rows_largest_logits(rows_per_chunk: int):
    of = batch(*LENS)
    backend = ready(of)
    route = backend.nsa_plugin.route
    plan = replace(route.plan, indexer=replace(route.plan.indexer, rows_per_chunk=rows_per_chunk))
    backend.nsa_plugin.route = replace(route, plan=plan)
    core = select(backend)
    assert backend.calls[-1] == "prepare"
    assert chunks[0][0] == rows_per_chunk
    for row, ((request, _), wanted) in enumerate(zip(of.places(), expected(of, of.rows), strict=True)):
        raw, slots = core.c4_sparse_raw_indices[row], core.c4_sparse_page_indices[row]
        count = len(wanted)
        assert set(raw[:count].tolist()) == wanted
        assert (raw[count:] == -1).all()
        assert (slots[count:] == -1).all()
        assert torch.equal(slots[:count].long(), request.slots(64, request.kv_len // 4)[raw[:count].long()])
        assert count == min(TOPK, (of.places()[row][1] + 1) // 4)


def test_no_request_is_scored_against_the_keys_of_another():
    of = batch(*LENS)
    backend = started(of, prefill_backend="flash_mla", large_q_rows=1)  # plans the provider of a GPU
    backend.init_forward_metadata(of.forward)
    select(backend)
    assert chunks[0][1] == [(0, 6, 0, 192), (6, 9, 192, 256), (9, 14, 256, 384), (14, 18, 384, 640)]


def test_logits_keep_to_the_budget():
    backend = ready(batch((40, 3000)), logits_budget_mb=1)
    select(backend)
    (rows, _), *_ = chunks
    assert rows * 4 * 750 <= 1 << 20


def test_the_second_layer_selects_separately_with_the_same_tables(monkeypatch: pytest.MonkeyPatch):
    of = batch(*LENS)
    backend = ready(of)
    first = select(backend).c4_sparse_raw_indices.clone()
    keys = backend.nsa_plugin.prefill._made["keys"]
    of.pool.index.copy_(of.pool.index.flip(0))
    again = select(backend).c4_sparse_raw_indices
    assert backend.nsa_plugin.prefill._made["keys"] is keys
    assert not torch.equal(first, again)


def test_the_engines_variables_are_asked_once_a_batch(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []
    get = fake_v4.EnvField.get
    monkeypatch.setattr(fake_v4.EnvField, "get", lambda self: (asked.append(self.name), get(self))[1])
    backend = ready(batch(*LENS))
    for expected in (1, 1, 2):
        if expected == 2:
            backend.init_forward_metadata(backend.batch.forward)
        select(backend)
        assert backend.calls[-1] == "prepare"
        assert asked.count("SGLANG_FP8_PAGED_MQA_LOGITS_TORCH") == expected


def test_too_few_or_unknown_arguments_are_said_by_their_names():
    backend = ready(batch(*LENS))
    x = torch.zeros(backend.batch.rows, 8)
    with pytest.raises(TypeError, match="c4_indexer"):
        backend.forward_c4_indexer(x=x, q_lora=x, forward_batch=backend.batch.forward)
    with pytest.raises(TypeError, match="sideways"):
        select(backend, sideways=True)


def test_padded_queries_select_nothing():
    of = batch((6, 700), (3, 30), padded=4)
    backend = ready(of)
    core = select(backend)
    assert core.c4_sparse_page_indices.shape[0] == of.rows
    padded = of.core(padded=4)
    backend.forward_metadata.core_attn_metadata = padded
    select(backend)
    assert torch.equal(padded.c4_sparse_page_indices[: of.rows], core.c4_sparse_page_indices)
    assert (padded.c4_sparse_page_indices[of.rows :] == -1).all()


@pytest.mark.parametrize("name", ["c4_sparse_page_indices", "c4_sparse_raw_indices"])
def test_rows_that_sglang_pads_to_a_multiple_of_64(name: str):
    of = batch(*LENS)
    plain = select(ready(of))
    backend = ready(of)
    core = backend.forward_metadata.core_attn_metadata
    setattr(core, name, torch.full((of.rows, TOPK + 3), -1, dtype=torch.int32))
    select(backend)
    for each in ("c4_sparse_page_indices", "c4_sparse_raw_indices"):
        assert torch.equal(getattr(core, each)[:, :TOPK], getattr(plain, each))
    assert (getattr(core, name)[:, TOPK:] == -1).all()


def test_a_version_without_raw_indices_and_with_another_preparation():
    class First(Engine):
        """0.5.12: no raw indices; until 0.5.14 the pool is an argument, and the cache a third result."""

        def _forward_prepare_normal(  # type: ignore[override]
            self, x: Any, q_lora: Any, c4_indexer: Any, positions: Any, forward_batch: Any, token_to_kv_pool: Any
        ) -> tuple[Any, ...]:
            assert token_to_kv_pool is self.batch.pool
            return *super()._forward_prepare_normal(x, q_lora, c4_indexer, positions, forward_batch), "cache"

    of = batch(*LENS)
    new = select(ready(of)).c4_sparse_page_indices
    old = ready(of, original=First)
    del old.forward_metadata.core_attn_metadata.c4_sparse_raw_indices
    assert torch.equal(select(old).c4_sparse_page_indices, new)


def test_both_names_of_the_lengths_are_read():
    of = batch(*LENS)
    old = select(ready(of)).c4_sparse_page_indices
    backend = ready(of)
    paged = backend.forward_metadata.indexer_metadata
    paged.compressed_seq_lens = paged.c4_seq_lens
    del paged.c4_seq_lens
    assert torch.equal(select(backend).c4_sparse_page_indices, old)


def test_fewer_queries_than_rows_are_prepared():
    of = batch((6, 700))
    assert select(ready(of), rows=9).c4_sparse_page_indices.shape == (6, TOPK)


@pytest.mark.parametrize("variable", ["SGLANG_FP8_PAGED_MQA_LOGITS_TORCH", "SGLANG_OPT_USE_TILELANG_INDEXER"])
def test_the_engines_variables_keep_their_meaning(variable: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(variable, "1")
    backend = ready(batch(*LENS))
    select(backend)
    assert backend.calls[-1] == "indexer"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hisparse_coordinator", object()),
        ("debug_use_external_c4_sparse_indices", True),
        ("dsa_topk_backend", SimpleNamespace(is_torch=lambda: True, is_flashinfer=lambda: False)),
        ("dsa_topk_backend", SimpleNamespace(is_torch=lambda: False, is_flashinfer=lambda: True)),
    ],
)
def test_unsupported_backend_options_use_the_stock_selection(name: str, value: Any):
    backend = ready(batch(*LENS))
    setattr(backend, name, value)
    select(backend)
    assert backend.calls[-1] == "indexer"


def test_the_engines_own_topk_is_the_plans():
    backend = ready(batch(*LENS))
    backend.dsa_topk_backend = SimpleNamespace(is_torch=lambda: False, is_flashinfer=lambda: False)
    select(backend)
    assert backend.calls[-1] == "prepare"


def test_other_indexers_recorders_graphs_and_phases_are_the_engines(monkeypatch: pytest.MonkeyPatch):
    backend = ready(batch(*LENS))
    select(backend, indexer=SimpleNamespace(layer_id=1, use_fp4_indexer=True))
    assert backend.calls[-1] == "indexer"
    with monkeypatch.context() as patch:
        patch.setattr(fake_v4, "recording", [object()])
        select(backend)
        assert backend.calls.count("indexer") == 2
    with monkeypatch.context() as patch:
        patch.setattr(fake_v4, "is_in_breakable_cuda_graph", lambda: True, raising=False)
        select(backend)
        assert backend.calls.count("indexer") == 3
    select(backend)
    assert backend.calls.count("indexer") == 3
    backend.batch.forward.forward_mode = ForwardMode.TARGET_VERIFY
    select(backend)
    assert backend.calls.count("indexer") == 4
    backend.nsa_plugin.route = None
    backend.batch.forward.forward_mode = ForwardMode.EXTEND
    select(backend)
    assert backend.calls.count("indexer") == 5
