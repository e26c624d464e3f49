"""The routes of SGLang's V4 backend by their Triton kernels, interpreted, against a dense computation.

As few rows as have all kinds of keys: what surrounds the kernels has its tests in `test_attention`.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nsa_plugin.backends.common.paths import BF16_ROWS, DIRECT
from nsa_plugin.backends.sglang.v4.indexer import select
from nsa_plugin.backends.sglang.v4.warm import warm_v4
from nsa_plugin.kernels.sparse_mla import reference_prefill
from tests.backends.fake_sglang.v4 import LAYERS, TOPK, attend, batch, prepared

pytestmark = [
    pytest.mark.usefixtures("nothing_measured", "large_read_programs"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the fakes are on the CPU"),
]


@pytest.mark.parametrize("layer_id", LAYERS)
@pytest.mark.parametrize(
    ("impl", "settings"),
    [(DIRECT, {"prefill_backend": "triton"}), (BF16_ROWS, {"prefill_backend": "flash_mla", "large_q_rows": 1})],
)
def test_kernels_match_dense_attention(impl: str, settings: dict[str, object], layer_id: int):
    of = batch((2, 600), (2, 2), padded=1)
    backend = prepared(of, rows_attention=reference_prefill, **settings)
    assert backend.nsa_plugin.route.path == impl
    got = attend(backend, layer_id)
    expected = of.expected(backend.forward_metadata.core_attn_metadata, layer_id)
    torch.testing.assert_close(got[: of.rows].double(), expected, atol=4e-3, rtol=2e-2)
    assert not got[of.rows :].any()


def test_layers_of_a_batch_share_maps_and_indices():
    """Layers in turn, each of them twice: what was made for the first is right for the others."""
    of = batch((2, 600), (2, 2))
    backend = prepared(of, rows_attention=reference_prefill, prefill_backend="flash_mla", large_q_rows=1)
    core = backend.forward_metadata.core_attn_metadata
    for layer_id in (0, 1, 2, 1, 0, 2):
        if layer_id == 1:  # each of these layers selects separately
            core.c4_sparse_raw_indices[0, :100] = core.c4_sparse_raw_indices[0, :100].flip(0)
            core.c4_sparse_raw_indices[0, 0] = core.c4_sparse_raw_indices[0, 1]
            chosen = core.c4_sparse_raw_indices[0, :100].long()
            core.c4_sparse_page_indices[0, :100] = of.requests[0].slots(64, 149)[chosen].int()
        torch.testing.assert_close(
            attend(backend, layer_id).double(), of.expected(core, layer_id), atol=4e-3, rtol=2e-2
        )


def test_kernels_are_run_before_serving():
    backend = prepared(batch((2, 2)), rows_attention=reference_prefill, prefill_backend="flash_mla", large_q_rows=1)
    warm_v4([backend.nsa_plugin.route], backend.nsa_plugin, torch.device("cpu"))


def test_kernels_select_as_the_references():
    of = batch((2, 600), (2, 2))
    selected = []
    for provider, sm in (("reference", 0), ("triton", 90)):
        backend = prepared(of, prefill_backend="reference")
        state, x = backend.nsa_plugin, torch.zeros(of.rows, 8)
        state.providers.sm = sm
        given = {"x": x, "q_lora": x, "c4_indexer": SimpleNamespace(layer_id=1), "forward_batch": of.forward}
        plan = replace(state.route.plan.indexer, provider=provider)
        select(backend, state, state.prefill, plan, of.pool, TOPK, given)
        selected.append(backend.forward_metadata.core_attn_metadata.c4_sparse_page_indices.sort(1).values)
    assert torch.equal(*selected)
    assert (selected[0][:2] >= 0).all()
