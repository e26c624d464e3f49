"""The floors of a comparison follow from their record, and the command measures what the record says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from nsa_plugin.tools.checkpoints.v32 import CheckpointSpec, make_weights
from nsa_plugin.tools.compare import floors
from nsa_plugin.tools.compare.floors import (
    BF16,
    BF16_FP8,
    BF16_ROW,
    FIRST_JUDGED,
    FLOAT32,
    FP8_ROW,
    LENGTHS,
    RoundedModel,
)
from nsa_plugin.tools.compare.tolerance import FLOORS
from nsa_plugin.tools.reference import ReferenceModel

RECORD = Path(__file__).parents[3] / "docs" / "benchmarks" / "cpu" / "compare-floors.json"


def up(value: float) -> float:
    """The value rounded up to one decimal."""
    return math.ceil(value * 10) / 10


def test_the_floors_follow_from_the_record() -> None:
    record = json.loads(RECORD.read_text())
    assert record["suite"] == "compare-floors"
    rows = {row["what"]: row for row in record["rows"]}
    assert rows.keys() == {BF16_ROW, FP8_ROW}
    assert {row["positions"] for row in rows.values()} == {sum(LENGTHS) - FIRST_JUDGED * len(LENGTHS)}

    def largest(row: floors.records.Row) -> float:
        return max(row["likeliest_max"], row["gap_max"])

    bf16, fp8 = FLOORS["bf16"], FLOORS["fp8"]
    both = max(up(math.sqrt(2) * largest(rows[BF16_ROW])), up(largest(rows[FP8_ROW])))
    assert bf16.outlier == fp8.outlier == both
    # The means are given. They cover the rounding, and wrong tokens (1.9) exceed them by far.
    for floor, row, servers in ((bf16, rows[BF16_ROW], 2), (fp8, rows[FP8_ROW], 1)):
        assert math.sqrt(servers) * row["likeliest_mean"] < floor.mean < 0.2
        assert math.sqrt(servers) * row["prompt_mean"] < floor.forced <= 0.2


@pytest.fixture(scope="module")
def small() -> CheckpointSpec:
    return CheckpointSpec(index_topk=16, num_hidden_layers=3)


def test_no_rounding_is_the_reference_model(small: CheckpointSpec) -> None:
    config, weights, tokens = small.config(), make_weights(small), list(range(10, 60))
    expected = ReferenceModel(config, weights).run(tokens).logprobs
    assert torch.equal(RoundedModel(config, weights, FLOAT32).run(tokens).logprobs, expected)


def test_each_rounding_moves_the_log_probabilities_further(small: CheckpointSpec) -> None:
    rows = {"none": (FLOAT32, FLOAT32), "bf16": (FLOAT32, BF16), "fp8": (BF16, BF16_FP8)}
    none, bf16, fp8 = floors.measure(small, lengths=(120, 90), first_judged=20, rows=rows)
    assert (none["what"], bf16["what"], fp8["what"]) == tuple(rows)
    assert none["positions"] == bf16["positions"] == fp8["positions"] == 170
    for name in ("likeliest_mean", "likeliest_max", "prompt_mean", "prompt_max", "other_tokens", "gap_max"):
        assert none[name] == 0 < bf16[name] < fp8[name], name


def test_an_fp8_latent_has_a_scale_for_each_tile() -> None:
    x = torch.zeros(1, 256)
    x[0, 0], x[0, 1], x[0, 128], x[0, 129] = 448.0, 1.06, 448.0 / 1024, 1.06 / 1024
    rounded = floors.round_fp8(x)
    assert rounded[0, [0, 1, 128, 129]].tolist() == [448.0, 1.0, 448.0 / 1024, 1.0 / 1024]
    assert rounded.count_nonzero() == 4


def test_differences_and_gaps_by_hand() -> None:
    """The runs prefer the same token at the first position, and others at the second and the third."""
    baseline = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.2, -4.0], [-3.0, -1.0, -1.5]])
    rounded = torch.tensor([[-1.1, -2.5, -3.0], [-1.6, -1.3, -4.0], [-3.0, -1.4, -1.3]])
    found = floors.differences(baseline, rounded, [1, 2])
    torch.testing.assert_close(found.likeliest, torch.tensor([0.1, 0.6, 0.4]))
    torch.testing.assert_close(found.prompt, torch.tensor([0.5, 0.0]))
    # Second position: 0.2 and 0.3. Third: 0.5 and 0.1.
    torch.testing.assert_close(found.gaps, torch.tensor([0.3, 0.5]))
    assert floors.row("by hand", [found, floors.differences(baseline, baseline, [1, 2])]) == {
        "what": "by hand",
        "positions": 6,
        "likeliest_mean": pytest.approx(1.1 / 6, abs=1e-4),
        "likeliest_max": pytest.approx(0.6),
        "prompt_mean": pytest.approx(0.5 / 4),
        "prompt_max": pytest.approx(0.5),
        "other_tokens": 2,
        "gap_max": pytest.approx(0.5),
    }


def test_the_command_writes_its_rows(
    tmp_path: Path, small: CheckpointSpec, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(floors, "SPEC", small)
    monkeypatch.setattr(floors, "LENGTHS", (220,))
    floors.main(["--json", str(tmp_path), "--commit", "abc"])
    made = json.loads((tmp_path / "compare-floors.json").read_text())
    assert made["command"] == "python -m nsa_plugin.tools.compare.floors"
    assert made["host"]["cpu"]
    assert made["host"]["commit"] == "abc"
    assert [row["what"] for row in made["rows"]] == [BF16_ROW, FP8_ROW]
    assert capsys.readouterr().out.count("20 positions") == 2
