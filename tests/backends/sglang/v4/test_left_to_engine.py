"""SGLang's V4 attention: which batches, layers and calls stay SGLang's own code."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_plugin.backends.common.paths import BF16_ROWS, DECODE_KERNEL, DIRECT
from nsa_plugin.backends.sglang.v4.attention import release, with_v4_plans
from nsa_plugin.errors import PatchError
from nsa_plugin.libraries.devices import synthetic
from tests.backends.fake_sglang.v4 import (
    LAYERS,
    OLD_H200,
    Engine,
    LateEngine,
    attend,
    batch,
    envs,
    prepared,
    started,
)
from tests.backends.fake_sglang.v32 import ForwardMode

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


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Outputs of about 0.1 in bfloat16."""
    assert got.shape == expected.shape
    torch.testing.assert_close(got.double(), expected, atol=4e-3, rtol=2e-2)


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
