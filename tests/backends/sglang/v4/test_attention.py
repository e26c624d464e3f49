"""SGLang's V4 backend under plans: every route against a dense computation, and what stays the engine's own."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_plugin.backends.common import v4
from nsa_plugin.backends.common.paths import BF16_ROWS, DECODE_KERNEL, DIRECT
from nsa_plugin.backends.sglang.v4 import batch as v4_batch
from nsa_plugin.backends.sglang.v4 import rows as v4_rows
from nsa_plugin.backends.sglang.v4 import state as v4_state
from nsa_plugin.backends.sglang.v4.table import SLOTS
from nsa_plugin.backends.sglang.v4.warm import warm_v4
from nsa_plugin.backends.sglang.v32.batch import step_batch
from nsa_plugin.decision.dispatch import Decider
from nsa_plugin.decision.plan import IndexerMode
from nsa_plugin.decision.shapes import Phase
from nsa_plugin.errors import NoProviderError, PatchError
from nsa_plugin.libraries.devices import synthetic
from tests.backends.fake_sglang.v4 import (
    HEADS,
    LAYERS,
    OLD_H200,
    TOPK,
    Engine,
    LateEngine,
    attend,
    batch,
    prepared,
    started,
)

# A chunk of a long request, a fresh one too short for a compressed entry, and one whose rows cross a page.
MIXED = ((4, 700), (3, 3), (4, 258))
VARIABLE = "SGLANG_OPT_FLASHMLA_SPARSE_PREFILL"
JIT = "SGLANG_OPT_USE_JIT_INDEXER_METADATA"

# The settings that lead to a route, whatever was measured.
SETTINGS: dict[str, dict[str, Any]] = {
    DIRECT: {"prefill_backend": "reference"},
    BF16_ROWS: {"prefill_backend": "flash_mla", "large_q_rows": 1},
}
EVERY_LAYER = pytest.mark.parametrize("layer_id", LAYERS)
pytestmark = pytest.mark.usefixtures("nothing_measured", "by_reference", "large_read_programs")


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Outputs of about 0.1 in bfloat16."""
    assert got.shape == expected.shape
    torch.testing.assert_close(got.double(), expected, atol=4e-3, rtol=2e-2)


@pytest.mark.parametrize("original", [Engine, LateEngine])
@EVERY_LAYER
@pytest.mark.parametrize("route", SETTINGS)
def test_every_route_matches_dense_attention(route: str, layer_id: int, original: type):
    backend = prepared(batch(*MIXED), original, **SETTINGS[route])
    assert backend.nsa_plugin.route.path == route
    got = attend(backend, layer_id)
    close(got, backend.batch.expected(backend.forward_metadata.core_attn_metadata, layer_id))
    assert not {"decode kernel", "sparse"} & set(backend.calls)


@EVERY_LAYER
@pytest.mark.parametrize("route", SETTINGS)
def test_queries_with_a_dimension_of_one(route: str, layer_id: int):
    backend = prepared(batch((9, 300)), **SETTINGS[route])
    got = attend(backend, layer_id, q=backend.batch.q.unsqueeze(1))
    close(got, backend.batch.expected(backend.forward_metadata.core_attn_metadata, layer_id))


@EVERY_LAYER
@pytest.mark.parametrize("route", SETTINGS)
def test_padded_queries_have_no_keys(route: str, layer_id: int):
    of = batch((7, 300), (4, 4), padded=5)
    backend = prepared(of, **SETTINGS[route])
    got = attend(backend, layer_id)
    close(got[: of.rows], of.expected(backend.forward_metadata.core_attn_metadata, layer_id))
    assert not got[of.rows :].any()


@EVERY_LAYER
@pytest.mark.parametrize("route", SETTINGS)
def test_rows_that_the_engine_padded_itself_leave_the_others_alone(route: str, layer_id: int):
    of = batch((7, 300), (4, 4), padded=3)
    backend = prepared(of, **SETTINGS[route])
    core = of.core(padded=3)
    of.select_something(core)
    backend.forward_metadata.core_attn_metadata = core
    close(attend(backend, layer_id)[: of.rows], of.expected(core, layer_id))


@pytest.mark.parametrize("layer_id", [1, 2])
@pytest.mark.parametrize("route", SETTINGS)
def test_a_context_without_a_compressed_entry(route: str, layer_id: int):
    backend = prepared(batch((3, 3)), **SETTINGS[route])
    core = backend.forward_metadata.core_attn_metadata
    close(attend(backend, layer_id), backend.batch.expected(core, 0))


@pytest.mark.parametrize("rows", [1, 7, 31, 32, 100])
@EVERY_LAYER
def test_combined_indices_are_made_by_parts(rows: int, layer_id: int, monkeypatch: pytest.MonkeyPatch):
    of = batch((24, 700), (8, 8))
    monkeypatch.setattr(v4_rows, "INDICES_BYTES", rows * 4 * {0: 128, 1: 256, 2: 256}[layer_id])
    backend = prepared(of, **SETTINGS[BF16_ROWS])
    sizes: list[int] = []
    fill, fills = v4_rows.fill, []
    monkeypatch.setattr(v4_rows, "fill", lambda *given, **more: (fill(*given, **more), fills.append(given)))

    def counted(q: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        sizes.append(q.shape[0])

    backend.nsa_plugin.rows_attention = counted
    close(attend(backend, layer_id), of.expected(backend.forward_metadata.core_attn_metadata, layer_id))
    assert sum(sizes) == 32
    assert max(sizes) == min(rows, 32)
    assert len(fills) == 1  # the pages are brought to bfloat16 once, however many parts there are


def test_shared_tables_are_made_once_per_batch(monkeypatch: pytest.MonkeyPatch):
    backend = prepared(batch(*MIXED), **SETTINGS[BF16_ROWS])
    filled: list[tuple[bool, bool]] = []
    combined: list[int] = []
    copied: list[int] = []
    fill, combine, put = v4_rows.fill, v4_rows.combine, v4_batch.put

    def filling(*given: Any, again: bool, mapped: bool) -> None:
        filled.append((again, mapped))
        fill(*given, again=again, mapped=mapped)

    def combining(*keys: Any, **more: Any) -> Any:
        combined.append(keys[-1].cache.page_size)
        return combine(*keys, **more)

    def putting(*lists: Any, **more: Any) -> Any:
        copied.append(len(lists))
        return put(*lists, **more)

    monkeypatch.setattr(v4_rows, "fill", filling)
    monkeypatch.setattr(v4_rows, "combine", combining)
    monkeypatch.setattr(v4_batch, "put", putting)
    for expected in (1, 2):  # a second batch begins anew
        for layer_id in (0, 1, 2, 1, 0, 2):
            attend(backend, layer_id)
        # The window's and 128 : 1's for all layers, 4 : 1's for each; every layer of a new ratio is checked.
        assert combined == [256, 64, 2, 64] * expected
        assert [again for again, _ in filled] == [False, False, False, True, True, True] * expected
        assert [mapped for _, mapped in filled] == [False, False, True, True, True, True] * expected
        assert len(copied) == expected
        backend.init_forward_metadata(backend.batch.forward)


def test_the_next_layers_selection_is_attended():
    of = batch((24, 900))
    backend = prepared(of, **SETTINGS[BF16_ROWS])
    core = backend.forward_metadata.core_attn_metadata
    first = attend(backend, 1)
    core.c4_sparse_raw_indices[:, :TOPK] = torch.arange(TOPK, dtype=torch.int32)
    core.c4_sparse_page_indices[:, :TOPK] = of.requests[0].slots(64, TOPK).int()
    again = attend(backend, 1)
    assert not torch.equal(first, again)
    close(again, of.expected(core, 1))


def test_a_second_batch_takes_the_memory_of_the_first():
    backend = prepared(batch((24, 700), (8, 8)), **SETTINGS[BF16_ROWS])
    scratch = backend.nsa_plugin.workspace
    held: list[dict[Any, int]] = []
    for _ in range(2):
        for layer_id in LAYERS:
            attend(backend, layer_id)
            held.append({key: buffer.memory.data_ptr() for key, buffer in scratch._buffers.of.items()})
        backend.init_forward_metadata(backend.batch.forward)
    # Rows and indices do not grow within the batch either.
    names = {"v4_rows", "v4_combined", "v4_window_map"}
    assert all(
        {key[0]: at for key, at in one.items() if key[0] in names}
        == {key[0]: at for key, at in held[-1].items() if key[0] in names}
        for one in held
    )
    assert held[-1] == held[2]


def test_caches_are_opened_once(monkeypatch: pytest.MonkeyPatch):
    opened: list[int] = []
    original = v4_state.open_cache
    monkeypatch.setattr(v4_state, "open_cache", lambda *given: (opened.append(1), original(*given))[1])
    backend = prepared(batch((9, 300)), **SETTINGS[BF16_ROWS])
    for _ in range(3):
        for layer_id in LAYERS:
            attend(backend, layer_id)
    assert len(opened) == 1 + 2 + 2
    # The engine may put a cache elsewhere.
    backend.batch.pool.window = backend.batch.pool.window.clone()
    close(attend(backend, 0), backend.batch.expected(backend.forward_metadata.core_attn_metadata, 0))
    assert len(opened) == 6


def test_prefills_of_the_same_lengths_are_decided_once(monkeypatch: pytest.MonkeyPatch):
    decided: list[int] = []
    decide = Decider.decide
    monkeypatch.setattr(Decider, "decide", lambda *given: (decided.append(1), decide(*given))[1])
    read: list[int] = []
    backend = started(batch((9, 300)), **SETTINGS[BF16_ROWS])
    backend.nsa_plugin.planner.free_memory = lambda: read.append(1) or 64 << 30
    for lens in (((9, 300),), ((9, 300),), ((9, 301),), ((4, 150), (5, 150))):
        backend.batch = batch(*lens)
        backend.init_forward_metadata(backend.batch.forward)
    assert len(decided) == 3
    assert len(read) == 1  # the driver is asked once


def test_no_copy_is_larger_than_the_pages_that_the_batch_reads(monkeypatch: pytest.MonkeyPatch):
    of = batch((24, 700), (8, 8))
    backend = prepared(of, **SETTINGS[BF16_ROWS])
    taken: dict[str, int] = {}
    scratch = backend.nsa_plugin.workspace
    get = scratch.get

    def seen(name: str, shape: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        taken[name] = shape[0]
        return get(name, shape, *args, **kwargs)

    monkeypatch.setattr(scratch, "get", seen)
    attend(backend, 1)
    # Positions 549 to 699 and 0 to 7 lie in a page of the window's each; 700 and 8 tokens have 3 and 1 of the others.
    assert taken["v4_rows"] == (1 + 1) * 256 + (3 + 1) * 64


@pytest.mark.parametrize("route", SETTINGS)
def test_keys_are_stored_where_the_engine_asks_for_it(route: str):
    of = batch((9, 300), (4, 4))
    backend = prepared(of, **SETTINGS[route])
    got = attend(backend, 0, save=True)
    assert backend.calls.count("store") == 1
    close(got, of.expected(backend.forward_metadata.core_attn_metadata, 0))


def test_keys_apart_from_values_are_refused():
    backend = prepared(batch((9, 300)), **SETTINGS[DIRECT])
    with pytest.raises(PatchError, match="keys that are not its values"):
        attend(backend, 0, v=backend.batch.q.clone())


@pytest.mark.parametrize("first", [True, False])
def test_heads_that_the_model_added_are_left_out_where_they_are_the_last(first: bool):
    of = batch((9, 300))
    backend = prepared(of, own_heads_first=first, **SETTINGS[DIRECT])
    given: list[int] = []
    load = backend.nsa_plugin.providers.load

    def seen(op: str, name: str) -> Any:
        def kernel(q: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            given.append(q.shape[-2])
            return load(op, name)(q, *arguments, **named)

        return kernel

    backend.nsa_plugin.providers.load = seen
    junk = torch.full((of.rows, 4, 512), float("nan")).bfloat16() if first else torch.zeros(of.rows, 4, 512).bfloat16()
    got = attend(backend, 1, q=torch.cat([of.q, junk], 1), attn_sink=torch.cat([of.sink, torch.zeros(4)]))
    assert given == [HEADS if first else HEADS + 4]
    assert got.shape[1] == HEADS + 4
    close(got[:, :HEADS], of.expected(backend.forward_metadata.core_attn_metadata, 1))


@EVERY_LAYER
@pytest.mark.parametrize("route", [*SETTINGS, DECODE_KERNEL])
def test_the_deliberate_fault_changes_the_output_of_every_route(route: str, layer_id: int):
    """The engine's own call of its decode kernel too: a control on that route would otherwise be right."""
    settings = SETTINGS.get(route, {"prefill_backend": "flash_mla", "device": OLD_H200})
    right, wrong = (prepared(batch(*MIXED), fault=fault, **settings) for fault in ("none", "shift_indices"))
    # An unwritten slot is NaN: zeros are wrong as well, and can be told from what is right.
    for buffer in (wrong.batch.pool.window, *wrong.batch.pool.extra.values()):
        buffer[buffer == 0xFF] = 0
    assert {right.nsa_plugin.route.path, wrong.nsa_plugin.route.path} == {route}
    core = wrong.forward_metadata.core_attn_metadata
    before = {name: getattr(core, name) for name in SLOTS}
    expected, got = attend(right, layer_id).float(), attend(wrong, layer_id).float()
    assert got.isfinite().all()
    assert (got - expected).abs().mean() > 0.2 * expected.abs().mean()
    assert (wrong.calls[-1] == "decode kernel") == (route == DECODE_KERNEL)
    # Who selects for the next layer, and who stores keys, finds the slots as they were.
    assert all(getattr(core, name) is slots for name, slots in before.items())


def test_a_fault_leaves_the_engines_slots_alone_after_an_error():
    backend = prepared(batch(*MIXED), prefill_backend="flash_mla", device=OLD_H200, fault="shift_indices")
    core = backend.forward_metadata.core_attn_metadata
    slots = core.swa_page_indices
    del backend.batch.pool.window
    with pytest.raises(AttributeError):
        attend(backend, 1)
    assert core.swa_page_indices is slots


@pytest.mark.parametrize(("asked", "expected"), [(None, "jit"), ("1", "jit"), ("0", "library")])
def test_who_schedules_is_the_engines_variable(asked: str | None, expected: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(JIT, raising=False)
    if asked is not None:
        monkeypatch.setenv(JIT, asked)
    backend = prepared(batch((9, 300)), device=synthetic(90), **SETTINGS[DIRECT])
    assert backend.calls[0] == expected


def test_more_rows_than_the_library_schedules_go_to_the_engines_kernel(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(JIT, "0")
    old = synthetic(90, versions={"deep_gemm": ("sgl-deep-gemm", "0.1.3")})
    backend = started(batch((9, 300)), device=old, **SETTINGS[DIRECT])
    for rows, expected in ((12288, "library"), (12289, "jit")):
        core = SimpleNamespace(page_table=torch.empty(rows, 0), c4_lengths=None)
        backend.init_forward_metadata_indexer(core)
        assert backend.calls[-1] == expected
    assert os.environ[JIT] == "0"


@pytest.mark.parametrize("rows", [4, 300])
@pytest.mark.parametrize("route", SETTINGS)
def test_kernels_are_run_before_serving(route: str, rows: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(v4, "row_counts", lambda device: (rows,))
    backend = prepared(batch((9, 300)), **SETTINGS[route])
    chosen = backend.nsa_plugin.route
    assert chosen.plan.indexer.mode is IndexerMode.TOPK
    warm_v4([chosen], backend.nsa_plugin, torch.device("cpu"))
    assert backend.nsa_plugin.route is None


def test_prefills_and_steps_by_one_library_both_run_before_serving():
    backend = prepared(batch((9, 300)), **SETTINGS[DIRECT], decode_backend="reference")
    state, ran = backend.nsa_plugin, []
    load = state.providers.load

    def seen(op: str, name: str) -> Any:
        ran.append(op)
        return load(op, name)

    state.providers.load = seen
    step = state.planner.step_execution(step_batch(Phase.DECODE, 1, 1, 4096))
    warm_v4([state.route, step], state, torch.device("cpu"))
    assert {"sparse_mla_prefill", "sparse_mla_decode"} <= set(ran)


def test_a_kernel_that_does_not_run_is_an_error_before_serving():
    backend = prepared(batch((9, 300)), **SETTINGS[BF16_ROWS])
    chosen = backend.nsa_plugin.route

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no such kernel")

    backend.nsa_plugin.rows_attention = broken
    with pytest.raises(NoProviderError, match="no such kernel"):
        warm_v4([chosen], backend.nsa_plugin, torch.device("cpu"))
