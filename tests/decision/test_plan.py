"""A Plan as a value: consistency, equality, and its JSON form."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from mypy import api

from nsa_plugin.decision.plan import Attention, IndexerMode, IndexerPlan, Plan
from nsa_plugin.decision.shapes import Phase


def plan(attention: Attention, mode: IndexerMode, **fields: object) -> Plan:
    values: dict[str, object] = {"phase": Phase.EXTEND, "provider": "flash_mla"} | fields
    return Plan(attention=attention, indexer=IndexerPlan(mode=mode), **values)  # type: ignore[arg-type]


READS_SELECTION = {Attention.SPARSE_PREFILL, Attention.SPARSE_DECODE}


@pytest.mark.parametrize("attention", Attention)
@pytest.mark.parametrize("mode", IndexerMode)
def test_sparse_attention_and_top_k_go_together(attention: Attention, mode: IndexerMode) -> None:
    # sglang #12816, vllm #52512: attention without a selection reads only -1.
    if (attention in READS_SELECTION) == (mode is IndexerMode.TOPK):
        assert plan(attention, mode).indexer.mode is mode
    else:
        with pytest.raises(ValueError, match=f"attention {attention} contradicts indexer mode {mode}"):
            plan(attention, mode)


def test_reasons_do_not_make_two_plans_differ() -> None:
    one = plan(Attention.SPARSE_DECODE, IndexerMode.TOPK, reasons={"attention": "8 query rows"})
    two = plan(Attention.SPARSE_DECODE, IndexerMode.TOPK, reasons={"attention": "9 query rows"})
    assert one == two
    assert hash(one) == hash(two)
    assert one != plan(Attention.SPARSE_DECODE, IndexerMode.TOPK, head_padding=64)


def test_the_type_checker_keeps_a_plan_from_being_changed(tmp_path: Path) -> None:
    source = tmp_path / "changes.py"
    source.write_text(
        "from nsa_plugin.decision.plan import Plan\n"
        "from nsa_plugin.decision.shapes import BatchShape\n"
        "def change(plan: Plan, batch: BatchShape) -> None:\n"
        "    plan.provider = 'fa3'\n"
        "    plan.indexer.rows_per_chunk = 1\n"
        "    batch.num_tokens = 1\n"
        "    batch.num_tokens + plan.head_padding\n"
    )
    said, _, status = api.run(["--cache-dir", str(tmp_path / "cache"), str(source)])
    assert status == 1
    assert [line.split(":")[1] for line in said.splitlines()[:-1]] == ["4", "5", "6"]
    assert said.count("is read-only") == 3


def test_as_dict_is_the_plan_in_json() -> None:
    original = plan(Attention.SPARSE_PREFILL, IndexerMode.TOPK, dequantize_kv=True, reasons={"phase": "extend"})
    assert json.loads(json.dumps(original.as_dict())) == {
        "phase": "extend",
        "attention": "sparse_prefill",
        "provider": "flash_mla",
        "dequantize_kv": True,
        "head_padding": 0,
        "token_shard": False,
        "token_shard_chunks": 1,
        "indexer": {"mode": "topk", "provider": "", "rows_per_chunk": 0, "metadata_provider": ""},
        "stock_attention": False,
        "stock_selection": False,
        "reasons": {"phase": "extend"},
    }


def test_the_route_is_a_property_of_the_plan_and_no_field() -> None:
    one = plan(Attention.SPARSE_DECODE, IndexerMode.TOPK)
    before = one.as_dict()
    assert one.route == "extend/sparse_decode/flash_mla"
    assert one.route is one.route  # made once
    # The cached route is not copied to a changed plan, not shown, and does not affect equality.
    assert replace(one, provider="", phase=Phase.DECODE).route == "decode/sparse_decode/none"
    assert one.as_dict() == before
    assert one == plan(Attention.SPARSE_DECODE, IndexerMode.TOPK)
