"""How many GPUs a model needs on the portable path: the table of docs/older-gpus.md.

Weights follow from the number of parameters, KV caches from the layouts. What a rank holds more than its share of the
weights (MLA's down-projections, the indexer, norms) is below one GiB and not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from nsa_plugin.layouts import INDEXER_FP8, V32_FP8
from nsa_plugin.tools.pages.markdown import markdown_table

GIB = 1 << 30
CARDS = {
    "A100 80GB": 80,
    "A100 40GB": 40,
    "A40, L40S": 48,
    "RTX PRO 6000": 96,
    "RTX 5090": 32,
    "RTX 3090, RTX 4090": 24,
}
"""GiB of a card."""
COUNTS = (4, 8, 16)
USED = 0.9  # of a card, as vLLM's --gpu-memory-utilization sets it by default
KEPT = 4 * GIB  # of that, for activations, CUDA graphs and the indexer's logits
REQUEST = 32_768  # tokens


@dataclass(frozen=True, kw_only=True)
class Served:
    """A released model, as its config.json gives it; elements and numbers.

    Attributes:
        selecting: layers whose indexer stores keys.
    """

    hidden_size: int
    num_layers: int
    dense_layers: int
    n_routed_experts: int
    moe_intermediate_size: int
    intermediate_size: int
    vocab_size: int
    q_lora_rank: int
    num_heads: int
    qk_nope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    selecting: int
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    index_head_dim: int = 128

    @property
    def routed(self) -> int:
        """Parameters of the routed experts."""
        one = 3 * self.hidden_size * self.moe_intermediate_size
        return (self.num_layers - self.dense_layers) * self.n_routed_experts * one

    @property
    def others(self) -> int:
        """All other parameters."""
        hidden, heads = self.hidden_size, self.num_heads
        attention = (
            hidden * self.q_lora_rank
            + self.q_lora_rank * heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
            + hidden * (self.kv_lora_rank + self.qk_rope_head_dim)
            + self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
            + heads * self.v_head_dim * hidden
        )
        index_dims = self.index_n_heads * self.index_head_dim
        indexer = self.q_lora_rank * index_dims + hidden * (self.index_head_dim + self.index_n_heads)
        shared = 3 * hidden * self.moe_intermediate_size + hidden * self.n_routed_experts  # and the router
        sparse_layers = self.num_layers - self.dense_layers
        return (
            self.num_layers * attention
            + self.selecting * indexer
            + self.dense_layers * 3 * hidden * self.intermediate_size
            + sparse_layers * shared
            + 2 * self.vocab_size * hidden
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in an fp8 KV cache, the indexer's keys included."""
        return self.num_layers * V32_FP8.row_bytes + self.selecting * INDEXER_FP8.row_bytes


MODELS = {
    "DeepSeek-V3.2": Served(
        hidden_size=7168,
        num_layers=61,
        dense_layers=3,
        n_routed_experts=256,
        moe_intermediate_size=2048,
        intermediate_size=18432,
        vocab_size=129_280,
        q_lora_rank=1536,
        num_heads=128,
        qk_nope_head_dim=128,
        v_head_dim=128,
        index_n_heads=64,
        selecting=61,
    ),
    "GLM-5": Served(
        hidden_size=6144,
        num_layers=78,
        dense_layers=3,
        n_routed_experts=256,
        moe_intermediate_size=2048,
        intermediate_size=12288,
        vocab_size=154_880,
        q_lora_rank=2048,
        num_heads=64,
        qk_nope_head_dim=192,
        v_head_dim=256,
        index_n_heads=32,
        selecting=21,
    ),
}
WEIGHTS = {"INT4 experts": (0.53, 2.0), "fp8": (1.0, 1.0)}
"""Bytes of a routed expert's parameter (INT4: with a scale for 128 or fewer of them), and of any other."""


def tokens(model: Served, card_gib: int, cards: int, weights: str) -> int:
    """Tokens of an fp8 KV cache that fit beside the weights; every rank holds the whole cache. 0 or less: none does."""
    routed, other = WEIGHTS[weights]
    share = (model.routed * routed + model.others * other) / cards
    return int((card_gib * GIB * USED - KEPT - share) // model.token_bytes)


def table() -> str:
    """Tokens of KV cache by card, number of cards and weights; a line for each card and model."""
    lines = []
    for card, gib in CARDS.items():
        for name, model in MODELS.items():
            cells = [_cell(tokens(model, gib, cards, weights)) for weights in WEIGHTS for cards in COUNTS]
            lines.append([card, name, *cells])
    header = ["GPU", "model", *(f"{cards} GPUs, {weights}" for weights in WEIGHTS for cards in COUNTS)]
    return markdown_table(header, lines)


def _cell(count: int) -> str:
    return "-" if count < REQUEST else f"{count // 1000 * 1000:,}"
