"""What the records of resharding on several GPUs say, for the tests of the decision that follows them."""

from __future__ import annotations

import json
import math
from pathlib import Path

from nsa_plugin.decision import token_shard as sharding
from nsa_plugin.decision.constraints import Constraints

RECORDS = Path(__file__).parents[2] / "docs" / "benchmarks" / "h200"
ATTENTION_ALONE = Constraints(selection_split="the ranks share the selection")
LAYER = "token_shard_layer"


def recorded(ranks: int, op: str = sharding.ATTENTION) -> dict[tuple[str, int, int], tuple[float, float]]:
    """{(phase, rows, context): (microseconds of the fastest way with local heads, of the fastest with resharding)}.

    Args:
        op: attention alone, or LAYER, with the indexer; on H200s.
    """
    record = json.loads((RECORDS / f"token-shard-tp{ranks}.json").read_text())
    found: dict[tuple[str, int, int], tuple[float, float]] = {}
    for row in record["rows"]:
        case = row["case"]
        if row["op"] != op:
            continue
        step = "batch" in case
        place = ("decode" if step else "extend", case["batch"] if step else case["q"], case["kv"])
        local, resharded = found.get(place, (math.inf, math.inf))
        reshards = row["provider"].startswith("token_shard")
        time = row["median_us"]
        found[place] = (local, min(resharded, time)) if reshards else (min(local, time), resharded)
    return found
