"""SGLang's V4 backend under plans: every route against a dense computation, and what stays the engine's own."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_plugin.backends.common import v4
from nsa_plugin.backends.common.fault import shifted
from nsa_plugin.backends.common.paths import BF16_ROWS, DECODE_KERNEL, DIRECT
from nsa_plugin.backends.sglang.v4 import batch as v4_batch
from nsa_plugin.backends.sglang.v4 import rows as v4_rows
from nsa_plugin.backends.sglang.v4 import state as v4_state
from nsa_plugin.backends.sglang.v4.attention import release, with_v4_plans
from nsa_plugin.backends.sglang.v4.table import SLOTS
from nsa_plugin.backends.sglang.v4.warm import warm_v4
from nsa_plugin.backends.sglang.v32.batch import step_batch
from nsa_plugin.decision.dispatch import Decider
from nsa_plugin.decision.plan import IndexerMode
from nsa_plugin.decision.shapes import Phase
from nsa_plugin.errors import NoProviderError, PatchError
from nsa_plugin.kernels.v4_prefill import combined_width
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
    envs,
    prepared,
    started,
)
from tests.backends.fake_sglang.v32 import ForwardMode
from tests.kernels.v4_prefill_cases import reference_route

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
pytestmark = pytest.mark.usefixtures("nothing_measured", "by_reference")


@pytest.fixture
def by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The route over rows by its reference, which takes the same pages and indices; the kernels have their own file."""
    filled: list[tuple[torch.Tensor, Any]] = []

    def filling(workspace: torch.Tensor, *keys: Any, again: bool, mapped: bool) -> None:
        assert len(workspace) == sum(part.rows for part in keys)
        assert mapped or not again
        filled[:] = [(workspace, keys)]

    def combining(*keys: Any, out: torch.Tensor, again: bool) -> Any:
        assert out.shape == (len(keys[0].indices), combined_width(*(part.indices.shape[1] for part in keys)))
        return [replace(part, indices=part.indices.clone(), lengths=part.lengths.clone()) for part in keys]

    def attending(
        q: torch.Tensor, workspace: torch.Tensor, keys: Any, *, attention: Any, out: Any = None, **more: Any
    ) -> Any:
        of, caches = filled[0]
        assert of is workspace
        attention(q)  # a test counts the calls
        # What another layer combined is attended in this one's caches.
        own = [replace(part, cache=one.cache) for part, one in zip(keys, caches, strict=True)]
        if hasattr(attention, "__wrapped__"):  # the fault's kernel, which shifts what it is given
            own = [replace(part, indices=shifted(part.indices)) for part in own]
        return reference_route(q, *own, out=out, **more)

    monkeypatch.setattr(v4_rows, "fill", filling)
    monkeypatch.setattr(v4_rows, "combine", combining)
    monkeypatch.setattr(v4_rows, "attend_rows", attending)


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


def test_a_backend_that_was_not_adopted_is_the_engines():
    of = batch(*MIXED)
    plain, backend = Engine(of), with_v4_plans(Engine)(of)
    for each in (plain, backend):
        each.init_forward_metadata(of.forward)
        of.select_something(each.forward_metadata.core_attn_metadata)
        each.forward_c4_indexer(of.q, of.q, SimpleNamespace(), of.forward)
    for layer_id in LAYERS:
        assert torch.equal(attend(backend, layer_id), attend(plain, layer_id))
    assert backend.calls == plain.calls
    released = prepared(of, **SETTINGS[DIRECT])
    release(released)
    attend(released, 0)
    assert released.calls[-1] == "decode kernel"


def test_steps_are_the_engines_unless_a_setting_names_a_library():
    of = batch((1, 300), (1, 7), mode=ForwardMode.DECODE)
    backend = prepared(of, **SETTINGS[DIRECT])
    expected = attend(backend, 1)
    assert backend.calls[-1] == "decode kernel"
    assert any("decode_backend is auto" in note for note in backend.notes)

    named = prepared(of, decode_backend="reference")
    got = attend(named, 1)
    assert "decode kernel" not in named.calls
    torch.testing.assert_close(got, expected, atol=4e-3, rtol=2e-2)


@pytest.mark.parametrize("before", [None, "1"])
def test_the_decode_kernel_is_the_engines_own_call(before: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(VARIABLE, before)
    backend = prepared(batch(*MIXED), prefill_backend="flash_mla", device=OLD_H200)
    assert backend.nsa_plugin.route.path == DECODE_KERNEL
    attend(backend, 1)
    # Even where SGLang's variable would have taken its other route: a setting of the plugin's names the library.
    assert backend.calls[-1] == "decode kernel"
    assert os.environ.get(VARIABLE) == before


def test_a_layer_changes_no_environment_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setenv(JIT, "0")
    old = synthetic(90, versions={"deep_gemm": ("sgl-deep-gemm", "0.1.3")})
    selecting = started(batch((9, 300)), device=old, **SETTINGS[DIRECT])
    attending = prepared(batch(*MIXED), prefill_backend="flash_mla", device=OLD_H200)
    changed: list[object] = []
    for name in ("__setitem__", "__delitem__"):
        monkeypatch.setattr(type(os.environ), name, lambda _, key, *value: changed.append(key))
    attend(attending, 1)
    selecting.init_forward_metadata_indexer(SimpleNamespace(page_table=torch.empty(12289, 0), c4_lengths=None))
    monkeypatch.undo()
    assert attending.calls[-1] == "decode kernel"
    assert selecting.calls[-1] == "jit"
    assert changed == []


def test_the_variable_is_as_it_was_after_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "1")
    backend = prepared(batch(*MIXED), prefill_backend="flash_mla", device=OLD_H200)
    backend.forward_metadata = SimpleNamespace(late_layer_tail=None)
    with pytest.raises(AttributeError):
        attend(backend, 1)
    assert envs.SGLANG_OPT_FLASHMLA_SPARSE_PREFILL.get()


def selected(backend: Any) -> list[str]:
    """Return the stock functions called while a layer selected."""
    of, before = backend.batch, len(backend.calls)
    backend.forward_c4_indexer(x=of.q, q_lora=of.q, c4_indexer=SimpleNamespace(), forward_batch=of.forward)
    return backend.calls[before:]  # type: ignore[no-any-return]


@pytest.mark.parametrize("original", [Engine, LateEngine])
@EVERY_LAYER
def test_a_small_prefill_over_rows_is_sglangs_own_code(original: type, layer_id: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "1")
    of = batch(*MIXED)
    backend = prepared(of, original, engine_makes_rows=True, engine_tokens=10_000, **SETTINGS[BF16_ROWS])
    assert backend.nsa_plugin.route.path == BF16_ROWS
    close(attend(backend, layer_id), of.expected(backend.forward_metadata.core_attn_metadata, layer_id))
    assert backend.calls[-1] == "sparse"
    assert selected(backend) == ["indexer"]
    assert original is Engine or backend._use_sparse_prefill(of.forward, num_qo_tokens=9)


@pytest.mark.parametrize("route", SETTINGS)
def test_a_small_prefill_is_selected_by_sglang_and_attended_by_the_plugin(route: str):
    of = batch(*MIXED)
    backend = prepared(of, engine_tokens=10_000, **SETTINGS[route])
    assert backend.nsa_plugin.route.path == route
    close(attend(backend, 1), of.expected(backend.forward_metadata.core_attn_metadata, 1))
    assert not {"decode kernel", "sparse"} & set(backend.calls)
    assert selected(backend) == ["indexer"]


def test_the_control_of_a_small_prefill_is_wrong_by_the_plugins_code(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "1")
    more: dict[str, Any] = {"engine_makes_rows": True, "engine_tokens": 10_000, "fault": "shift_indices"}
    backend = prepared(batch(*MIXED), **more, **SETTINGS[BF16_ROWS])
    expected = backend.batch.expected(backend.forward_metadata.core_attn_metadata, 1)
    assert not torch.allclose(attend(backend, 1).double(), expected, atol=4e-3, rtol=2e-2)
    assert "sparse" not in backend.calls


def test_a_batch_whose_graph_breaks_at_attention_has_a_plan_at_its_replay():
    of = batch((9, 300))
    backend = started(of, **SETTINGS[DIRECT])
    backend.init_forward_metadata_for_breakable_cuda_graph_capture(of.forward)
    assert backend.nsa_plugin.route is None
    core = of.core(padded=7)  # of the size that was captured
    of.select_something(core)
    capture = SimpleNamespace(core_attn_metadata=core)
    backend.prepare_forward_metadata_for_breakable_cuda_graph_replay(capture, of.forward, static_forward_batch=None)
    close(attend(backend, 1), of.expected(core, 1))
    backend.init_forward_metadata_for_breakable_cuda_graph_capture(of.forward)
    assert backend.nsa_plugin.route is None


def test_a_batch_of_another_kind_forgets_the_last_plan():
    backend = prepared(batch((9, 300)), **SETTINGS[DIRECT])
    assert backend.nsa_plugin.route is not None
    for mode in (ForwardMode.DECODE, ForwardMode.SPLIT_PREFILL, ForwardMode.IDLE):
        backend.init_forward_metadata(batch((1, 300), mode=mode).forward)
        assert backend.nsa_plugin.route is None


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        ("backend", "encoder_replay", True),
        ("backend", "encoder_row_floor", torch.zeros(1)),
        ("batch", "seq_lens_cpu", None),
        ("batch", "extend_seq_lens_cpu", None),
        ("batch", "attn_cp_metadata", object()),
    ],
)
def test_a_prefill_left_to_the_stock_path(place: str, name: str, value: Any):
    of = batch((9, 300))
    backend = started(of, **SETTINGS[DIRECT])
    setattr(backend if place == "backend" else of.forward, name, value)
    backend.init_forward_metadata(of.forward)
    assert backend.nsa_plugin.route is None


def test_rotations_and_tails_and_other_ratios_are_the_engines():
    backend = prepared(batch((9, 300)), LateEngine, **SETTINGS[DIRECT])
    attend(backend, 0, cos_sin_cache=torch.zeros(1))
    backend.forward_metadata.late_layer_tail = object()
    attend(backend, 0)
    assert backend.calls[-2:] == ["decode kernel", "decode kernel"]
    assert not backend._use_sparse_prefill(backend.batch.forward, num_qo_tokens=9)
    backend.nsa_plugin.route = None
    assert backend._use_sparse_prefill(backend.batch.forward, num_qo_tokens=9)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("hisparse_coordinator", object(), "hisparse"),
        ("trtllm_attn", True, "trtllm"),
        ("is_dspark_draft", True, "DSpark"),
        ("is_dsv41", True, "V4.1"),
        ("enable_decoder_swa_bounded_replay", True, "bounded replay"),
        ("dsv4_prefill_backend", "flashmla_sparse_q8", "--dsv4-prefill-backend flashmla_sparse_q8"),
    ],
)
def test_features_that_stay_the_engines(name: str, value: Any, said: str):
    class Featured(Engine):
        def __init__(self, of: Any) -> None:
            super().__init__(of)
            setattr(self, name, value)

    backend = started(batch((9, 300)), Featured)
    assert backend.nsa_plugin is None
    assert said in backend.notes[0]


def test_flags_and_caches_that_stay_the_engines():
    of = batch((9, 300))
    for flag in ("enable_prefill_cp", "enable_deterministic_inference", "enable_hisparse"):
        assert started(of, server_args=SimpleNamespace(**{flag: True})).nsa_plugin is None
    of.pool.swa_kv_pool.kv_cache_total_dim = 528
    assert "528 bytes a token" in started(of).notes[0]
    of.pool.swa_kv_pool.kv_cache_total_dim = 584
    of.pool.request_window = object()
    assert "by request" in started(of).notes[0]


def test_a_backend_or_pool_that_lacks_something_is_refused():
    of = batch((9, 300))

    class Small(Engine):
        def __init__(self, of: Any) -> None:
            super().__init__(of)
            self.page_size = 64

    with pytest.raises(PatchError, match="pages of 64"):
        started(of, Small)
    kept = of.pool.get_index_k_with_scale_buffer
    of.pool = SimpleNamespace(get_index_k_with_scale_buffer=kept)
    with pytest.raises(PatchError, match=r"token_to_kv_pool\.get_swa_key_buffer_radix"):
        started(of)


def test_a_class_that_differs_from_the_table_is_refused():
    class Without(Engine):
        forward_c4_indexer = None  # type: ignore[assignment]

    class Renamed(Engine):
        def store_cache(self, layer: int, keys: torch.Tensor, forward_batch: Any) -> None:  # type: ignore[override]
            raise AssertionError

    with pytest.raises(PatchError, match="no forward_c4_indexer"):
        with_v4_plans(Without)
    with pytest.raises(PatchError, match=r"store_cache\(layer, keys, forward_batch\)"):
        with_v4_plans(Renamed)
    with pytest.raises(PatchError, match="no _forward_attention or forward"):
        with_v4_plans(type("Empty", (), {}))


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
