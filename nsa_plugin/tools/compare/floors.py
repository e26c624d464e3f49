"""python -m nsa_plugin.tools.compare.floors [--json DIR] [--commit HASH]: how far rounding alone moves V3.2's answers.

The floors of a comparison (`FLOORS` in `nsa_plugin.tools.compare.tolerance`) follow from the record. The float32
reference model runs random prompts on a CPU, with the weights of the comparison's checkpoint, and runs them again with
values rounded as a server rounds them. It takes about four minutes on two cores.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa_plugin.kernels.fp8 import dequantize_tiles, quantize_tiles
from nsa_plugin.tools import records
from nsa_plugin.tools.checkpoints.v32 import CheckpointSpec, make_weights
from nsa_plugin.tools.compare.model import SPEC
from nsa_plugin.tools.compare.workload import random_tokens
from nsa_plugin.tools.reference import ReferenceModel

SUITE = "compare-floors"
# Tokens of each prompt: below and above the 2048 that the model selects.
LENGTHS = (700, 1500, 1500, 3000, 3000)
# The first position that counts: those before it attend to few tokens.
FIRST_JUDGED = 200
_FP8_TILE = 128


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """What is rounded. The arithmetic stays float32.

    Attributes:
        bf16: input and output of every linear layer and RMS norm, to bfloat16.
        fp8_latent: the normed KV latent, to fp8 e4m3 in tiles of 128, each with a float32 scale.
    """

    bf16: bool = False
    fp8_latent: bool = False


FLOAT32, BF16, BF16_FP8 = Rounding(), Rounding(bf16=True), Rounding(bf16=True, fp8_latent=True)
BF16_ROW, FP8_ROW = "bfloat16 instead of float32", "an fp8 latent, both in bfloat16"
# Each row compares a rounding, the second one, with a baseline.
ROWS = {BF16_ROW: (FLOAT32, BF16), FP8_ROW: (BF16, BF16_FP8)}


class RoundedModel(ReferenceModel):
    """The reference model with a server's rounding."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Tensor], rounding: Rounding):
        super().__init__(config, weights)
        self.rounding = rounding

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return self._round(super()._linear(name, self._round(x)))

    def _rms_norm(self, name: str, x: Tensor) -> Tensor:
        normed = self._round(super()._rms_norm(name, self._round(x)))
        return round_fp8(normed) if self.rounding.fp8_latent and name.endswith("kv_a_layernorm") else normed

    def _round(self, x: Tensor) -> Tensor:
        return x.bfloat16().to(x.dtype) if self.rounding.bf16 else x


def round_fp8(x: Tensor) -> Tensor:
    """`x` rounded to fp8 e4m3 in tiles of 128 of the last dimension, as an fp8 KV cache holds a latent."""
    return dequantize_tiles(*quantize_tiles(x, _FP8_TILE, amax_floor=1e-10, power_of_two=False))


@dataclass(frozen=True, kw_only=True)
class Differences:
    """How two runs on one prompt differ, in nats.

    Attributes:
        likeliest: of the log probability of the baseline's likeliest token, at each judged position.
        prompt: of the log probability of the prompt's own next token; the last position has none.
        gaps: how much a run prefers its own likeliest token to the other's, the larger of the two, at each position
            where these tokens differ; see `nsa_plugin.tools.compare.rule.Compared`.
    """

    likeliest: Tensor
    prompt: Tensor
    gaps: Tensor


def differences(baseline: Tensor, rounded: Tensor, next_tokens: Sequence[int]) -> Differences:
    """Compare two runs on one prompt.

    Args:
        baseline, rounded: [positions, vocab_size] log probabilities.
        next_tokens: the prompt's token after each position; one fewer than there are positions.
    """
    ours, theirs, following = baseline.argmax(-1), rounded.argmax(-1), torch.tensor(next_tokens)
    gaps = torch.maximum(_of(baseline, ours) - _of(baseline, theirs), _of(rounded, theirs) - _of(rounded, ours))
    return Differences(
        likeliest=(_of(baseline, ours) - _of(rounded, ours)).abs(),
        prompt=(_of(baseline[:-1], following) - _of(rounded[:-1], following)).abs(),
        gaps=gaps[ours != theirs],
    )


def _of(logprobs: Tensor, tokens: Tensor) -> Tensor:
    """The log probability of one token at each position."""
    return logprobs.gather(1, tokens[:, None])[:, 0]


def row(what: str, prompts: Sequence[Differences]) -> records.Row:
    """A row of the record."""
    likeliest, prompt, gaps = (
        torch.cat([getattr(one, name) for one in prompts]) for name in ("likeliest", "prompt", "gaps")
    )
    return {
        "what": what,
        "positions": len(likeliest),
        "likeliest_mean": round(likeliest.mean().item(), 4),
        "likeliest_max": round(likeliest.max().item(), 4),
        "prompt_mean": round(prompt.mean().item(), 4),
        "prompt_max": round(prompt.max().item(), 4),
        "other_tokens": len(gaps),
        "gap_max": round(gaps.max().item(), 4) if len(gaps) else 0.0,
    }


def measure(
    spec: CheckpointSpec,
    lengths: Sequence[int],
    first_judged: int,
    rows: Mapping[str, tuple[Rounding, Rounding]] = ROWS,
) -> list[records.Row]:
    """The rows of a record.

    Args:
        spec: the checkpoint, whose weights are made here.
        lengths: tokens of each prompt. first_judged: the first position that counts.
        rows: a baseline and a rounding for each row, by the row's name.
    """
    # In float32 here, so that the models share them.
    weights = {name: tensor.float() for name, tensor in make_weights(spec).items()}
    models = {rounding: RoundedModel(spec.config(), weights, rounding) for rounding in set(chain(*rows.values()))}
    found: dict[str, list[Differences]] = {what: [] for what in rows}
    for seed, length in enumerate(lengths, 1):
        prompt = random_tokens(seed, length, spec.vocab_size)
        logprobs = {rounding: model.run(prompt).logprobs[first_judged:] for rounding, model in models.items()}
        for what, (baseline, rounded) in rows.items():
            found[what].append(differences(logprobs[baseline], logprobs[rounded], prompt[first_judged + 1 :]))
    return [row(what, prompts) for what, prompts in found.items()]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure how far rounding alone moves V3.2's log probabilities.")
    parser.add_argument("--json", type=Path, metavar="DIR", help=f"write DIR/{SUITE}.json")
    parser.add_argument("--commit", help="source commit, where the source is in no checkout")
    given = parser.parse_args(argv)
    rows = measure(SPEC, LENGTHS, FIRST_JUDGED)
    for one in rows:
        print(
            f"{one['what']}, {one['positions']} positions: likeliest token {one['likeliest_mean']:.3f} on average and "
            f"{one['likeliest_max']:.3f} at most, the prompt's {one['prompt_mean']:.3f} and {one['prompt_max']:.3f}; "
            f"{one['other_tokens']} other tokens, gap {one['gap_max']:.3f} at most"
        )
    if given.json:
        host = {"cpu": records.processor(), "python": platform.python_version(), **records.software(given.commit)}
        made = records.head(SUITE, "python -m nsa_plugin.tools.compare.floors", host) | {"rows": rows}
        records.save(made, given.json / f"{SUITE}.json")


if __name__ == "__main__":
    main()
