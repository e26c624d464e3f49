"""python -m tests.decision.fuzz [COUNT] [--seed N]: decide for random inputs, and check every plan.

Inputs come from a seeded generator, an order of magnitude quicker than hypothesis: a million take minutes. The first
input that fails is printed, with the seed that makes it.
"""

from __future__ import annotations

import argparse
from collections import Counter
from itertools import product
from random import Random
from typing import TypeVar

from nsa_plugin.decision.constraints import Constraints
from nsa_plugin.decision.plan import Attention, Plan
from nsa_plugin.decision.routes import BF16_COPY, FLASH_MLA_DECODE, Route
from nsa_plugin.decision.shapes import FAMILY_LAYOUTS, BatchShape, ModelShape, Phase
from nsa_plugin.libraries.devices import GIB, MIB, DeviceProfile, synthetic
from nsa_plugin.libraries.manifest import MANIFEST
from nsa_plugin.settings import TOKEN_SHARD_MODES, Settings, backends
from tests.decision.plan_checks import check_decision

LIBRARIES = (
    None,
    (),
    ("triton",),
    ("flash_mla", "deep_gemm"),
    ("flash_mla", "deep_gemm", "fa3", "trtllm"),
    ("fa3", "triton"),
    ("trtllm", "deep_gemm"),
    ("cuda", "triton"),
)
MACHINES = [
    synthetic(sm, libraries=libraries, memory_free=free, nvlink=nvlink)
    for sm, libraries, free, nvlink in product(
        (0, 75, 80, 86, 89, 90, 100, 103, 120), LIBRARIES, (0, 64 * MIB, 40 * GIB), (False, True)
    )
]
# Most measured times are of SM90; with few of them a random machine has every kernel that they compare.
MEASURED = synthetic(90, memory_free=40 * GIB, nvlink=True)
# Also paths that no library has.
ROUTES = [
    Route(attention, library, copied) for attention, library, copied in product(Attention, MANIFEST, (False, True))
]

T = TypeVar("T")


def mostly(random: Random, usual: T, *rare: T) -> T:
    """The usual value nine times in ten: most random combinations are refused, and plans are what counts."""
    return usual if random.random() < 0.9 else random.choice(rare)


def length(random: Random) -> int:
    return random.randint(0, random.choice((1, 40, 3000, 200_000)))


def model(random: Random) -> ModelShape:
    family, ranks = random.choice(("v3.2", "v3.2", "v4")), random.choice((1, 2, 3, 4, 8, 16))
    return ModelShape(
        family=family,
        num_heads=ranks * random.choice((1, 8, 12, 16, 32, 64, 96, 128, 200)),
        attn_tp_size=ranks,
        dcp_size=mostly(random, 1, *(size for size in (1, 2, 3, 4, 8, 16) if not ranks % size)),
        kv_lora_rank=mostly(random, 512, 64),
        qk_nope_head_dim=random.choice((128, 192)),
        v_head_dim=mostly(random, 128, 256, 80),
        index_topk=mostly(random, 2048, 64, 512, 1024, 2000),
        index_n_heads=random.choice((64, 32)) if random.random() < 0.9 else 8,
        index_head_dim=mostly(random, 128, 96),
        kv_layout=random.choice(FAMILY_LAYOUTS[family]),
        sliding_window=mostly(random, 128, 100) if family == "v4" else 0,
        selecting_layers=random.choice((1.0, 1.0, 1.0, 0.5, 0.25, 21 / 78, 1 / 61)),
    )


def batch(random: Random) -> BatchShape:
    requests = random.choice((1, 1, 3, 300)) if random.random() < 0.95 else 0
    tokens, longest = requests + length(random) if requests else 0, length(random)
    return BatchShape(
        phase=random.choice((Phase.EXTEND, Phase.DECODE, *Phase)),
        num_requests=requests,
        num_tokens=tokens,
        max_kv_len=longest,
        total_kv_len=longest + length(random),
        scored=random.choice((0, random.randint(0, tokens * longest), tokens * longest)),
        has_prefix=random.random() < 0.5,
        cuda_graph=random.random() < 0.3,
        context_parallel=random.random() < 0.05,
        attention_workspace_tokens=random.choice((0, 0, 1, 1000, 100_000)),
    )


def settings(random: Random) -> Settings:
    return Settings(
        prefill_backend=mostly(random, *backends("prefill_backend")),
        decode_backend=mostly(random, *backends("decode_backend")),
        mha_max_kv=mostly(random, -1, 0, 1, 64, 500, 2049),
        logits_budget_mb=random.choice((1, 16, 512, 4096)),
        token_shard=mostly(random, *TOKEN_SHARD_MODES),
        large_q_rows=mostly(random, 0, 1, 4096, 11622, 20_000),
    )


def routes(random: Random, share: float) -> frozenset[Route]:
    return frozenset(route for route in ROUTES if random.random() < share)


def constraints(random: Random) -> Constraints:
    """Restrictions of an engine; none in half of the inputs."""
    if random.random() < 0.5:
        return Constraints()
    preferred = routes(random, random.choice((0, 0, 0.1, 0.5)))
    return Constraints(
        no_dense=random.choice(("", "", "the engine rules dense attention out")),
        no_split=random.choice(("", "the engine attends every batch as a whole")),
        paths=None if random.random() < 0.6 else routes(random, mostly(random, 0.9, 0, 0.5)),
        no_path=random.choice(({}, {"cuda": "cuda has no path here"})),
        preferred=preferred,
        preferred_by="a flag" if preferred else "",
        asked_by=random.choice(("", "the engine's flag")),
        no_copy=random.choice(("", "", "", "the engine makes no copy")),
        copy_bytes=random.choice((None, 0, 100 * MIB)),
        copy_budget=random.choice((0, 99 * MIB, 100 * MIB)),
        copy_budget_from="a quarter of the free memory",
        keep_heads=random.choice(("", "", "the exchange has no buffers")),
        keep_heads_on=dict.fromkeys(routes(random, random.choice((0, 0.3))), "this path attends all tokens"),
        selection_split=random.choice(("", "each rank selects for its share")),
        stock_prefill=random.choice((None, BF16_COPY, FLASH_MLA_DECODE)),
        stock_tokens=random.choice((0, 0, 8192, 10**9)),
        stock_attends_by=routes(random, random.choice((0, 0.5))),
        workspace_reserved=random.random() < 0.3,
        stock_selects_prefills=random.random() < 0.3,
    )


def run(count: int, seed: int) -> Counter[str]:
    """Check `count` decisions; return how many ended in each attention path, or in an error.

    Raises:
        AssertionError: a plan is wrong, or the plugin raised an error that it does not raise on purpose.
    """
    outcomes: Counter[str] = Counter()
    for number in range(count):
        random = Random(f"{seed}:{number}")
        case = model(random), batch(random), machine(random), settings(random), constraints(random)
        try:
            found = check_decision(*case)
        except Exception as error:
            raise AssertionError(f"input {number} of seed {seed}: {error!r}\n{case}") from error
        outcomes[str(found.attention) if isinstance(found, Plan) else "error"] += 1
    return outcomes


def machine(random: Random) -> DeviceProfile:
    return MEASURED if random.random() < 0.2 else random.choice(MACHINES)


def main() -> None:
    parser = argparse.ArgumentParser(description="Decide for random inputs, and check every plan.")
    parser.add_argument("count", type=int, nargs="?", default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for name, times in run(given.count, given.seed).most_common():
        print(f"{times:9} {name}")


if __name__ == "__main__":
    main()
