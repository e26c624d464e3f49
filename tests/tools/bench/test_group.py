"""The group's benchmark, dry: tiny shapes, the reference as the kernel, gloo; and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ci import measured as generator
from nsa_plugin.tools.bench import record
from nsa_plugin.tools.bench.cases import BenchError
from nsa_plugin.tools.bench.group import __main__ as program
from nsa_plugin.tools.bench.group import workloads
from nsa_plugin.tools.bench.group.__main__ import main, measure, parser
from nsa_plugin.tools.bench.group.group import GroupTimer, on_all_ranks
from nsa_plugin.tools.bench.workload import WrongResultError
from tests.parallel.ranks import on_ranks

SHARDED = [workloads.chunked(chunks, "reference") for chunks in workloads.CHUNKS]
IN_PLACE = workloads.chunked(1, "reference decode kernel")
HOST = {"gpu": "none", "gpus": 2, "torch": "", "triton": "", "libraries": {}, "commit": "", "l2": GroupTimer.l2}


def dry(device: torch.device) -> None:
    chosen, outcome, _ = measure(parser().parse_args(["--tiny", "--runs", "2"]), device)
    assert not outcome.failed
    assert not outcome.skipped
    made = record.check(record.as_record(chosen, outcome, HOST, ["torchrun"]), "the dry run")
    assert made["suite"] == "token-shard-tp2"
    rows = made["rows"]
    assert {row["op"] for row in rows} == {workloads.ATTENTION, workloads.LAYER}
    assert [row["case"]["tp"] for row in rows] == [2] * len(rows)
    prefill = [row["provider"] for row in rows if row["op"] == workloads.ATTENTION and "q" in row["case"]]
    assert prefill == ["reference", *SHARDED, IN_PLACE]
    sharded = [row for row in rows if row["provider"].startswith(workloads.SHARDED)]
    assert len(sharded) == 4 + 1 + 3
    filed = [measured for row in sharded for measured in generator._of_row(as_on_gpus(row))]
    heads, tp = 2, f"tp{dist.get_world_size()}"
    assert [place[:5] for place in filed] == [
        (f"token_shard_attention {tp}", "v32_fp8", f"token_shard by {route}", heads, 7)
        for route in (
            "flash_mla sparse_prefill after dequantisation",
            "flash_mla sparse_prefill after dequantisation, 2 chunks",
            "flash_mla sparse_prefill after dequantisation, 4 chunks",
            "flash_mla sparse_decode",
        )
    ] + [(f"token_shard_steps {tp}", "v32_fp8", "token_shard by flash_mla sparse_decode", heads, 5)]
    assert all(row["bit_equal"] is True for row in sharded)
    assert not [row for row in rows if row not in sharded and "bit_equal" in row]
    # The engine's way needs libraries of a GPU: listed, with the reason.
    # SGLang's top-k is one of them; beside it the plugin's selection would stand in, were there a GPU.
    for op, names in (
        (workloads.ATTENTION, {"flash_mla padded"}),
        (workloads.LAYER, {"deep_gemm, sgl_kernel.fast_topk_v2, flash_mla padded", "reference, flash_mla padded"}),
    ):
        assert {entry["provider"] for entry in outcome.refused if entry["op"] == op} == names

    with pytest.raises(BenchError, match="allowed: token_shard_attention, token_shard_layer"):
        measure(parser().parse_args(["--tiny", "--op", "attention"]), device)


def recorded(device: torch.device, folder: Path) -> None:
    """The record of a run, as it is written."""
    chosen, outcome, rates = measure(
        parser().parse_args(["--tiny", "--runs", "1", "--op", workloads.ATTENTION]), device
    )
    program.record.describe_host = lambda *given, commit, **named: HOST | {"commit": commit}  # type: ignore[assignment]
    given = ["--runs", "1", "--json", str(folder / "records"), "--commit", "0123abc"]
    if dist.get_rank() == 0:
        program._report(given, parser().parse_args(given), chosen, outcome, rates)
        (written,) = (folder / "records").rglob("*.json")
        found = json.loads(written.read_text())
        assert found["command"] == "torchrun --nproc-per-node 2 -m nsa_plugin.tools.bench.group --runs 1"
        assert found["host"]["commit"] == "0123abc"
        assert found["host"]["gpus"] == 2


def as_on_gpus(row: dict[str, Any]) -> dict[str, Any]:
    """A row as it would be of FlashMLA and a model's selection: what a decision compares."""
    case = row["case"] | {"topk": 2048}
    return row | {"case": case, "provider": row["provider"].replace("reference", "flash_mla")}


def wrong_ranks(device: torch.device) -> None:
    """One rank's wrong result fails on all, and times are the slowest rank's."""
    rank = dist.get_rank()

    def judge(result: float) -> float:
        if result > 1:
            raise WrongResultError("too large")
        return result

    assert on_all_ranks(judge)(0.5 * rank) == 0.5
    with pytest.raises(WrongResultError, match="rank 1: too large"):
        on_all_ranks(judge)(2.0 * rank)
    timing = GroupTimer(device, 3).time(lambda: rank, graph=True, seconds=0.0, runs=None)
    assert (timing.runs, timing.how, timing.result) == (3, "eager", rank)
    medians: list[float] = [0.0, 0.0]
    dist.all_gather_object(medians, timing.median_us)
    assert medians[0] == medians[1] > 0


def all_of_it(device: torch.device, folder: Path) -> None:
    dry(device)
    wrong_ranks(device)
    recorded(device, folder)


def test_dry_run(tmp_path: Path) -> None:
    on_ranks(2, all_of_it, tmp_path / "ranks", tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_refuses_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(BenchError, match="torchrun"):
        main([])
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(BenchError, match="--tiny"):
        main([])


def test_heads_divide_among_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    for heads in ("30", "0"):
        with pytest.raises(BenchError, match=f"4 ranks; the number must divide {heads} heads"):
            measure(parser().parse_args(["--tiny", "--heads", heads]), torch.device("cpu"))


def test_options_are_not_shortened(capsys: pytest.CaptureFixture[str]) -> None:
    """A shortened one would stay in the record."""
    with pytest.raises(SystemExit):
        parser().parse_args(["--js", "/of/one/machine"])
    assert "--js" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "heads", "name"),
    [
        *((ranks, 128, f"token-shard-tp{ranks}") for ranks in (2, 4, 8)),
        *((2, heads, f"token-shard-tp2-{heads}heads") for heads in (32, 64)),
    ],
)
def test_suites_are_of_the_model(ranks: int, heads: int, name: str) -> None:
    suite = workloads.suite(ranks, heads)
    assert suite.name == name
    for case in suite.cases:
        assert case.number("heads") * ranks == heads
        assert case.number("tp") == ranks
    shapes = [(case.op, case.as_dict().get("q"), case.number("kv")) for case in suite.cases]
    wanted = [(8192, 65536), (8192, 131072), (2048, 8192)]
    assert [shape[1:] for shape in shapes if shape[0] == workloads.LAYER] == wanted
    decodes = [(None, 8192)] * len(workloads.DECODES)
    assert [shape[1:] for shape in shapes if shape[0] == workloads.ATTENTION] == [*wanted, *decodes]
    batches = [case.number("batch") for case in suite.cases if "batch" in case.as_dict()]
    assert batches == list(workloads.DECODES)
    assert max(batches) == batches[0] == 512  # its cache is the others'
