"""A small DeepSeek-V3.2 checkpoint with seeded random weights, made locally.

Every part of the real architecture is there at a size that a CPU serves: MLA with a latent cache of
the real width (512 + 64), the lightning indexer with 32 heads of 128, a dense first layer and then
mixture-of-experts layers with grouped sigmoid routing, and YaRN. Tensor names, shapes and config keys are
those of the published checkpoints (deepseek-ai/DeepSeek-V3.2).

Two properties of trained weights are built in, because a comparison of answers needs them:

* Attention decides the next token: its scores are peaked, and what it adds to the residual stream is as
  large as the embedding. Where attention hardly mattered, every comparison would pass.
* A choice between nearly equal candidates hardly matters. The indexer ranks tokens as attention does (training
  aligns the two, DeepSeek-V3.2-Exp, section 2.1), so the last token selected weighs little, and experts
  resemble each other. With unrelated random weights, the one rounding that swaps the last selected token for
  the first rejected one moves the answer as much as a wrong kernel does.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16")

# Standard deviation of what a projection gives for an input of unit variance; 1 where none is named.
_GAINS = {"q_b_proj": 3.5, "o_proj": 0.5, "down_proj": 0.25, "lm_head": 3.0}

# Share of a query's or key's direction that all heads of a layer have in common, and that the indexer follows.
_SHARED_HEADS = 0.98
# Share of an expert's weights that all experts of a layer have in common.
_SHARED_EXPERTS = 0.95
# Share of an embedding that is the same for every token. The indexer's head weights read their sign from it.
_COMMON = 0.5


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """What to write. The fields carry the names of the config they become, where it has one.

    Attributes:
        seed: of the weights; the same spec gives the same bytes on every machine.
        dtype: of the stored weights, "float32" or "bfloat16".
        sparse: with the indexer (DeepseekV32ForCausalLM), or the same model without (DeepseekV3ForCausalLM).
        rope_factor, rope_original_positions: YaRN's factor and the context it extends, in tokens. The
            product is the longest position. 1: plain RoPE.
        num_nextn_predict_layers: 1 adds a layer that predicts the token after the next (DeepSeek-V3, section 2.2),
            for speculative decoding. Its weights are random too, so what it proposes is rarely taken.
        rope_mscale, rope_mscale_all_dim: YaRN's attention temperature, see `reference_model`.
    """

    seed: int = 0
    dtype: str = "bfloat16"
    sparse: bool = True
    vocab_size: int = 512
    hidden_size: int = 256
    intermediate_size: int = 512
    moe_intermediate_size: int = 64
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    q_lora_rank: int = 128
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 64
    v_head_dim: int = 64
    index_topk: int = 64
    index_n_heads: int = 32
    index_head_dim: int = 128
    first_k_dense_replace: int = 1
    n_routed_experts: int = 16
    n_shared_experts: int = 1
    num_experts_per_tok: int = 4
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 2.5
    rope_theta: float = 10000.0
    rope_factor: float = 40.0
    rope_original_positions: int = 64
    rope_mscale: float = 1.0
    rope_mscale_all_dim: float = 1.0
    num_nextn_predict_layers: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; allowed: {', '.join(DTYPES)}")
        if self.n_routed_experts % self.n_group or self.n_routed_experts // self.n_group < 2:
            raise ValueError(
                f"n_routed_experts {self.n_routed_experts} must be n_group {self.n_group} groups of at least 2: "
                "a group is scored by its two best experts"
            )
        if self.num_experts_per_tok > self.topk_group * (self.n_routed_experts // self.n_group):
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} is more than topk_group {self.topk_group} groups hold"
            )
        if self.num_nextn_predict_layers not in (0, 1):
            raise ValueError(f"num_nextn_predict_layers is {self.num_nextn_predict_layers}; allowed: 0, 1")
        if self.vocab_size < TOKENIZER_SIZE:
            raise ValueError(f"vocab_size {self.vocab_size} is less than the tokenizer's {TOKENIZER_SIZE}")

    @property
    def max_position_embeddings(self) -> int:
        """Longest context in tokens."""
        return int(self.rope_original_positions * self.rope_factor)

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        config: dict[str, Any] = {
            "architectures": ["DeepseekV32ForCausalLM" if self.sparse else "DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v32" if self.sparse else "deepseek_v3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "moe_intermediate_size": self.moe_intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_attention_heads,
            "q_lora_rank": self.q_lora_rank,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_nope_head_dim": self.qk_nope_head_dim,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "v_head_dim": self.v_head_dim,
            "first_k_dense_replace": self.first_k_dense_replace,
            "moe_layer_freq": 1,
            "n_routed_experts": self.n_routed_experts,
            "n_shared_experts": self.n_shared_experts,
            "num_experts_per_tok": self.num_experts_per_tok,
            "n_group": self.n_group,
            "topk_group": self.topk_group,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "routed_scaling_factor": self.routed_scaling_factor,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            **SPECIAL_TOKENS,
            "initializer_range": 0.02,
            "num_nextn_predict_layers": self.num_nextn_predict_layers,
            "ep_size": 1,
            "use_cache": True,
            "torch_dtype": self.dtype,
        }
        if self.rope_factor != 1.0:
            config["rope_scaling"] = {
                "type": "yarn",
                "factor": self.rope_factor,
                "original_max_position_embeddings": self.rope_original_positions,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": self.rope_mscale,
                "mscale_all_dim": self.rope_mscale_all_dim,
            }
        if self.sparse:
            config["index_topk"] = self.index_topk
            config["index_n_heads"] = self.index_n_heads
            config["index_head_dim"] = self.index_head_dim
        return config


def write_checkpoint(directory: Path, spec: CheckpointSpec) -> Path:
    """Write config.json, model.safetensors and the tokenizer into `directory`, which is made if needed.

    Returns:
        `directory`.

    Raises:
        OSError: the files cannot be written.
    """
    return write_files(directory, spec.config(), make_weights(spec))


def write_files(directory: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    """`write_checkpoint` of any model.

    Args:
        config: the content of config.json; its special tokens are those of the tokenizer, `SPECIAL_TOKENS`.
        weights: by name.
    """
    from safetensors.torch import save

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _write_tokenizer(directory)
    return directory


def make_weights(spec: CheckpointSpec) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint by name, in `spec.dtype` (the router's bias is float32, as published)."""
    import torch

    make = _V32Weights(spec)
    make.embeddings()
    for layer in range(spec.num_hidden_layers):
        make.layer(layer)
    if spec.num_nextn_predict_layers:
        make.nextn(spec.num_hidden_layers)
    dtype = getattr(torch, spec.dtype)
    return {
        name: tensor.to(torch.float32 if name.endswith("e_score_correction_bias") else dtype)
        for name, tensor in make.tensors.items()
    }


class _V32Weights:
    """Fills `tensors` in float32. A linear layer's weight is [outputs, inputs]."""

    def __init__(self, spec: CheckpointSpec):
        self.spec = spec
        self.tensors: dict[str, torch.Tensor] = {}
        # The direction that all embeddings share, with elements of unit variance.
        self._common = self._random("common", spec.hidden_size)

    def embeddings(self) -> None:
        spec = self.spec
        own = self._random("model.embed_tokens", spec.vocab_size, spec.hidden_size)
        self.tensors["model.embed_tokens.weight"] = mix(self._common, own, _COMMON)
        self._norm("model.norm", spec.hidden_size)
        self._linear("lm_head", spec.vocab_size, spec.hidden_size)

    def layer(self, layer: int) -> None:
        spec, prefix = self.spec, f"model.layers.{layer}"
        self._norm(f"{prefix}.input_layernorm", spec.hidden_size)
        self._norm(f"{prefix}.post_attention_layernorm", spec.hidden_size)
        self._attention(f"{prefix}.self_attn")
        if layer < spec.first_k_dense_replace:
            self._mlp(f"{prefix}.mlp", spec.intermediate_size)
            return
        self._linear(f"{prefix}.mlp.gate", spec.n_routed_experts, spec.hidden_size)
        bias = f"{prefix}.mlp.gate.e_score_correction_bias"
        self.tensors[bias] = 0.1 * self._random(bias, spec.n_routed_experts)
        for expert in range(spec.n_routed_experts):
            self._mlp(f"{prefix}.mlp.experts.{expert}", spec.moe_intermediate_size, like=f"{prefix}.mlp.expert")
        self._mlp(f"{prefix}.mlp.shared_experts", spec.moe_intermediate_size * spec.n_shared_experts)

    def nextn(self, layer: int) -> None:
        """The layer that predicts a token further; embedding and head are the model's own, stored again."""
        spec, prefix = self.spec, f"model.layers.{layer}"
        self.layer(layer)
        for part in ("enorm", "hnorm", "shared_head.norm"):
            self._norm(f"{prefix}.{part}", spec.hidden_size)
        self._linear(f"{prefix}.eh_proj", spec.hidden_size, 2 * spec.hidden_size)
        for name, source in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
            self.tensors[f"{prefix}.{name}.weight"] = self.tensors[f"{source}.weight"].clone()

    def _attention(self, name: str) -> None:
        spec = self.spec
        heads, nope, rope = spec.num_attention_heads, spec.qk_nope_head_dim, spec.qk_rope_head_dim
        self._linear(f"{name}.q_a_proj", spec.q_lora_rank, spec.hidden_size)
        self._norm(f"{name}.q_a_layernorm", spec.q_lora_rank)
        self._linear(f"{name}.kv_a_proj_with_mqa", spec.kv_lora_rank + rope, spec.hidden_size)
        self._norm(f"{name}.kv_a_layernorm", spec.kv_lora_rank)
        self._linear(f"{name}.o_proj", spec.hidden_size, heads * spec.v_head_dim)

        query = self._matrix(f"{name}.shared_query", nope + rope, spec.q_lora_rank)
        own = self._matrix(f"{name}.q_b_proj", heads, nope + rope, spec.q_lora_rank)
        self.tensors[f"{name}.q_b_proj.weight"] = mix(query, own, _SHARED_HEADS).flatten(0, 1)
        key = self._matrix(f"{name}.shared_key", nope, spec.kv_lora_rank)
        own = self._matrix(f"{name}.kv_b_proj", heads, nope + spec.v_head_dim, spec.kv_lora_rank)
        own[:, :nope] = mix(key, own[:, :nope], _SHARED_HEADS)
        self.tensors[f"{name}.kv_b_proj.weight"] = own.flatten(0, 1)
        if spec.sparse:
            self._indexer(f"{name}.indexer", query, key, self.tensors[f"{name}.kv_a_proj_with_mqa.weight"])

    def _indexer(self, name: str, query: torch.Tensor, key: torch.Tensor, kv_a: torch.Tensor) -> None:
        """An indexer that scores tokens nearly as the heads' shared query and key do.

        Args:
            query: [qk_nope_head_dim + qk_rope_head_dim, q_lora_rank]. key: [qk_nope_head_dim, kv_lora_rank].
            kv_a: [kv_lora_rank + qk_rope_head_dim, hidden_size].
        """
        import torch

        spec = self.spec
        heads, dim, nope, rope = (
            spec.index_n_heads, spec.index_head_dim, spec.qk_nope_head_dim, spec.qk_rope_head_dim,
        )  # fmt: skip
        # The indexer's rotated dimensions come first, and it rotates halves where MLA rotates neighbours.
        halves = torch.cat([torch.arange(0, rope, 2), torch.arange(1, rope, 2)])
        used = min(nope, dim - rope)
        shared_query = self._matrix(f"{name}.spare_query", dim, spec.q_lora_rank)
        shared_query[:rope] = query[nope:][halves]
        shared_query[rope : rope + used] = query[:used]
        keys = self._matrix(f"{name}.wk", dim, spec.hidden_size)
        keys[:rope] = kv_a[spec.kv_lora_rank :][halves]
        keys[rope : rope + used] = (key @ kv_a[: spec.kv_lora_rank])[:used]
        self.tensors[f"{name}.wk.weight"] = keys
        self._norm(f"{name}.k_norm", dim)
        self.tensors[f"{name}.k_norm.bias"] = 0.1 * self._random(f"{name}.k_norm.bias", dim)

        # Half of the heads ask for the opposite and count against: relu(s) - relu(-s) = s. So no token's
        # score is a sum of zeros, and the selection is never a matter of ties.
        sign = torch.ones(heads)
        sign[1::2] = -1
        own = self._matrix(f"{name}.wq_b", heads, dim, spec.q_lora_rank)
        queries = sign[:, None, None] * mix(shared_query, own, _SHARED_HEADS)
        self.tensors[f"{name}.wq_b.weight"] = queries.flatten(0, 1)
        own = self._matrix(f"{name}.weights_proj", heads, spec.hidden_size, gain=0.25)
        toward = self._common * (2 / spec.hidden_size)
        self.tensors[f"{name}.weights_proj.weight"] = sign[:, None] * toward + own

    def _mlp(self, name: str, size: int, like: str | None = None) -> None:
        hidden = self.spec.hidden_size
        for part, rows, columns in (
            ("gate_proj", size, hidden),
            ("up_proj", size, hidden),
            ("down_proj", hidden, size),
        ):
            weight = self._matrix(f"{name}.{part}", rows, columns)
            if like is not None:
                weight = mix(self._matrix(f"{like}.{part}", rows, columns), weight, _SHARED_EXPERTS)
            self.tensors[f"{name}.{part}.weight"] = weight

    def _linear(self, name: str, rows: int, columns: int) -> None:
        self.tensors[f"{name}.weight"] = self._matrix(name, rows, columns)

    def _norm(self, name: str, size: int) -> None:
        self.tensors[f"{name}.weight"] = 1 + 0.1 * self._random(name, size)

    def _matrix(self, name: str, *shape: int, gain: float | None = None) -> torch.Tensor:
        gain = _GAINS.get(name.split(".")[-1].replace("shared_query", "q_b_proj"), 1.0) if gain is None else gain
        return self._random(name, *shape) * (gain / math.sqrt(shape[-1]))

    def _random(self, name: str, *shape: int) -> torch.Tensor:
        return uniform(self.spec.seed, name, *shape)


def uniform(seed: int, name: str, *shape: int) -> torch.Tensor:
    """Uniform values of unit variance, float32. Uniform, not normal: the bits of a normal variable depend on the
    CPU's vector instructions. Seeded by name: a tensor does not depend on which others there are."""
    import torch

    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return (torch.rand(*shape, generator=generator) * 2 - 1) * math.sqrt(3)


def mix(shared: torch.Tensor, own: torch.Tensor, share: float) -> torch.Tensor:
    """Of the same variance as its parts, and correlated with `shared` by `share`."""
    return share * shared + math.sqrt(1 - share**2) * own


# The tokenizer: bytes, the 253 most plain two-letter merges, and three special tokens.
_CONSONANTS = "bcdfghjklmnpqrstvwxyz"
_VOWELS = "aeiou"
_MERGES = [pair for a in _CONSONANTS for b in _VOWELS for pair in ((a, b), (b, a))] + [
    (first, second) for first in "nrst" for second in _CONSONANTS
]
_NUM_MERGES = 253
SPECIAL_TOKENS = {"bos_token_id": 509, "eos_token_id": 510, "pad_token_id": 511}
TOKENIZER_SIZE = 512


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
