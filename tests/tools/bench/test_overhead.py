"""The overhead bench runs without a GPU or an engine, and its record says on which CPU."""

from __future__ import annotations

import json
from pathlib import Path

from nsa_plugin.tools.bench import overhead


def test_a_record_has_every_row_and_the_cpu(tmp_path: Path) -> None:
    overhead.main(["--runs", "20", "--starts", "1", "--json", str(tmp_path)])
    made = json.loads((tmp_path / "overhead.json").read_text())
    assert made["host"]["cpu"]
    assert len(made["rows"]) == 8
    assert all(row.get("p50_us", row.get("p50_ms")) > 0 for row in made["rows"])
