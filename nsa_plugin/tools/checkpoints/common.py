"""What the checkpoints share: seeded weights, the constant part of config.json, the tokenizer, and the files.

Two properties of trained weights are built in, because comparing answers needs them:

* Attention decides the next token: its scores are peaked, and its contribution to the residual stream is as large as
  the embedding. If attention hardly mattered, every comparison would pass.
* A choice between nearly equal candidates hardly matters. The indexer ranks tokens as attention does (training aligns
  the two, DeepSeek-V3.2-Exp, section 2.1), so the last selected token has little weight, and experts resemble each
  other. With unrelated random weights, a rounding error that swaps the last selected token for the first rejected one
  would change the answer as much as a wrong kernel does.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Share of a query's or key's direction that all heads of a layer have in common; the indexer follows it.
SHARED_HEADS = 0.98
# Share of an expert's weights that all experts of a layer have in common.
SHARED_EXPERTS = 0.95
# Share of an embedding that is the same for every token. The indexer's head weights get their sign from it.
COMMON = 0.5

SPECIAL_TOKENS = {"bos_token_id": 509, "eos_token_id": 510, "pad_token_id": 511}
TOKENIZER_SIZE = 512
_CONSTANTS: dict[str, Any] = {
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    **SPECIAL_TOKENS,
    "initializer_range": 0.02,
    "use_cache": True,
}
# Fields of both specs that config.json has in another form, or not at all.
_OWN = ("seed", "rope_factor", "rope_original_positions")


def config_of(spec: Any, without: Collection[str] = (), **more: Any) -> dict[str, Any]:
    """The content of config.json: the spec's fields but `without`, the constants, and `more`."""
    fields = {name: value for name, value in asdict(spec).items() if name not in (*_OWN, *without)}
    return deepcopy({**_CONSTANTS, **fields, **more})


def yarn(spec: Any, **more: Any) -> dict[str, Any]:
    return {
        "type": "yarn",
        "factor": spec.rope_factor,
        "original_max_position_embeddings": spec.rope_original_positions,
        "beta_fast": 32,
        "beta_slow": 1,
        **more,
    }


def check_spec(spec: Any) -> None:
    """Check what every spec must satisfy.

    Raises:
        ValueError: the message names the field.
    """
    if spec.num_nextn_predict_layers not in (0, 1):
        raise ValueError(f"num_nextn_predict_layers is {spec.num_nextn_predict_layers}; allowed: 0, 1")
    if spec.vocab_size < TOKENIZER_SIZE:
        raise ValueError(f"vocab_size {spec.vocab_size} is less than the tokenizer's {TOKENIZER_SIZE}")


def write_files(directory: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    """Write config.json, model.safetensors and the tokenizer into `directory`, and create it if needed.

    Returns:
        `directory`.

    Raises:
        OSError: the files cannot be written.
    """
    from safetensors.torch import save

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _write_tokenizer(directory)
    return directory


class SeededWeights:
    """Random tensors that depend only on the seed and on their own names."""

    def __init__(self, seed: int, hidden_size: int):
        self._seed = seed
        # The direction that all embeddings share, with elements of unit variance.
        self._common = self._random("common", hidden_size)

    def _matrix(self, name: str, *shape: int, gain: float = 1.0) -> torch.Tensor:
        """A linear layer's weight [..., outputs, inputs]: input of unit variance gives output of variance gain²."""
        return self._random(name, *shape) * (gain / math.sqrt(shape[-1]))

    def _embedding(self, name: str, vocab_size: int) -> torch.Tensor:
        """[vocab_size, hidden_size]: embeddings that share a direction."""
        return mix(self._common, self._random(name, vocab_size, len(self._common)), COMMON)

    def _index_queries(self, name: str, query: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The indexer's query projection [heads * dim, q_lora_rank] and its heads' weights [heads, hidden_size].

        Half of the heads have inverted queries and count against: relu(s) - relu(-s) = s. So no token's score is a sum
        of zeros, and ties never decide the selection.

        Args:
            name: the indexer's.
            query: [dim, q_lora_rank], the part that all heads share.
        """
        import torch

        sign = torch.ones(heads)
        sign[1::2] = -1
        hidden_size = len(self._common)
        gates = self._matrix(f"{name}.weights_proj", heads, hidden_size, gain=0.25)
        queries = sign[:, None, None] * mix(query, self._matrix(f"{name}.wq_b", heads, *query.shape), SHARED_HEADS)
        return queries.flatten(0, 1), sign[:, None] * (self._common * (2 / hidden_size)) + gates

    def _random(self, name: str, *shape: int) -> torch.Tensor:
        """Uniform float32 values of unit variance. The bits of a normal variable would depend on the CPU."""
        import torch

        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return (torch.rand(*shape, generator=generator) * 2 - 1) * math.sqrt(3)


def mix(shared: torch.Tensor, own: torch.Tensor, share: float) -> torch.Tensor:
    """A tensor with the variance of its parts and a correlation of `share` with `shared`."""
    return share * shared + math.sqrt(1 - share**2) * own


# The tokenizer: bytes, the 253 most plain two-letter merges, and three special tokens.
_CONSONANTS = "bcdfghjklmnpqrstvwxyz"
_VOWELS = "aeiou"
_MERGES = [pair for a in _CONSONANTS for b in _VOWELS for pair in ((a, b), (b, a))] + [
    (first, second) for first in "nrst" for second in _CONSONANTS
]
_NUM_MERGES = 253


def _write_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json: byte-level BPE, trained on nothing."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    merges = _MERGES[:_NUM_MERGES]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = alphabet + ["".join(pair) for pair in merges]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special.values()])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
