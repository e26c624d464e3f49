"""Model and batch shapes: derived values and refused ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nsa_plugin.decision.shapes import FAMILIES, FAMILY_LAYOUTS, BatchShape, ModelShape, Phase
from nsa_plugin.errors import ShapeError
from nsa_plugin.layouts import INDEXER_LAYOUTS, LAYOUTS

V4 = {"family": "v4", "kv_layout": "v4_fp8", "sliding_window": 128, "index_topk": 512}


def test_a_rank_has_its_share_of_the_heads() -> None:
    assert ModelShape(num_heads=128, attn_tp_size=8).heads_per_rank == 16


@pytest.mark.parametrize(
    ("fields", "row_dims", "mha_dims"),
    [
        ({}, (576, 512), (192, 128)),
        ({"kv_lora_rank": 64, "qk_rope_head_dim": 32}, (96, 64), (160, 128)),
        (V4, (512, 512), (192, 128)),  # a V4 row's RoPE elements are inside its 512
    ],
    ids=["v3.2", "small", "v4"],
)
def test_dims_of_a_head(fields: dict[str, object], row_dims: tuple[int, int], mha_dims: tuple[int, int]) -> None:
    model = ModelShape(**fields)
    assert (model.row_dims, model.mha_dims) == (row_dims, mha_dims)


def test_fp8_is_read_from_the_layout() -> None:
    assert not ModelShape(kv_layout="bf16").fp8_cache
    assert ModelShape(kv_layout="v32_fp8").fp8_cache
    assert ModelShape(**V4).fp8_cache


def test_each_family_has_layouts_of_attention_caches_only() -> None:
    assert tuple(FAMILY_LAYOUTS) == FAMILIES
    for layouts in FAMILY_LAYOUTS.values():
        assert set(layouts) <= set(LAYOUTS)
        assert not set(layouts) & set(INDEXER_LAYOUTS)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"family": "v5"}, r"family is 'v5'; allowed: v3.2, v4"),
        ({"kv_layout": "indexer_fp8"}, r"kv_layout is 'indexer_fp8'; allowed for family v3.2: bf16, v32_fp8"),
        ({"kv_layout": "v4_fp8"}, r"kv_layout is 'v4_fp8'; allowed for family v3.2"),
        (V4 | {"kv_layout": "v32_fp8"}, r"allowed for family v4: bf16, v4_fp8"),
        ({"num_heads": 0}, r"num_heads is 0; it must be at least 1"),
        ({"index_head_dim": 0}, r"index_head_dim is 0"),
        ({"qk_rope_head_dim": -1}, r"qk_rope_head_dim is -1; it must be at least 0"),
        ({"num_heads": 10, "attn_tp_size": 4}, r"num_heads 10 does not divide among attn_tp_size 4"),
        ({"sliding_window": 128}, r"sliding_window is 128 for family v3.2"),
        (V4 | {"sliding_window": 0}, r"sliding_window is 0 for family v4"),
    ],
)
def test_an_impossible_model_names_the_field(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        ModelShape(**fields)


def test_a_batch_is_summed_from_its_requests() -> None:
    batch = BatchShape.from_lengths(Phase.EXTEND, [100, 7], [100, 900], cuda_graph=True, attention_workspace_tokens=64)
    assert batch == BatchShape(
        phase=Phase.EXTEND,
        num_requests=2,
        num_tokens=107,
        max_kv_len=900,
        total_kv_len=1000,
        scored=100 * 101 // 2 + (894 + 900) * 7 // 2,
        has_prefix=True,
        cuda_graph=True,
        attention_workspace_tokens=64,
    )


def test_a_request_without_rows_does_not_count() -> None:
    batch = BatchShape.from_lengths(Phase.EXTEND, [5, 0], [5, 9000])
    assert (batch.num_requests, batch.max_kv_len, batch.total_kv_len, batch.has_prefix) == (1, 5, 5, False)


def test_no_requests_are_an_empty_batch() -> None:
    assert BatchShape.from_lengths(Phase.DECODE, [], []) == BatchShape(phase=Phase.DECODE)


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "message"),
    [
        ([1, 2], [3], r"q_lens has 2 entries and kv_lens 1"),
        ([1, 5], [1, 4], r"request 1 has 5 rows and a context of 4"),
        ([-1], [4], r"request 0 has -1 rows"),
    ],
)
def test_impossible_lengths_name_the_request(q_lens: list[int], kv_lens: list[int], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        BatchShape.from_lengths(Phase.EXTEND, q_lens, kv_lens)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_tokens": -1}, "no negative counts"),
        ({"attention_workspace_tokens": -1}, "no negative counts"),
        ({"num_requests": 3, "num_tokens": 2}, "num_requests 3 exceeds num_tokens 2"),
        ({"max_kv_len": 5, "total_kv_len": 4}, "max_kv_len 5 exceeds total_kv_len 4"),
    ],
)
def test_an_impossible_batch_is_refused_with_a_reason(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        BatchShape(phase=Phase.EXTEND, **fields)


def test_shape_of_a_model_configuration() -> None:
    config = SimpleNamespace(
        num_attention_heads=128,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        index_topk=1024,
        index_n_heads=32,
        index_head_dim=128,
    )
    shape = ModelShape.from_config(config, attn_tp_size=8, kv_layout="v32_fp8")
    assert (shape.heads_per_rank, shape.index_topk, shape.index_n_heads) == (16, 1024, 32)
    assert shape.fp8_cache
