"""A small checkpoint of DeepSeek-V3.2 or GLM-5 with seeded random weights, made locally.

It has every part of the real architecture at a size that a CPU can serve: MLA with a latent cache of the real width
(512 + 64), the lightning indexer with 32 heads of 128, a dense first layer followed by mixture-of-experts layers with
grouped sigmoid routing, and YaRN. Tensor names, shapes and config keys are those of the published checkpoints
(deepseek-ai/DeepSeek-V3.2, zai-org/GLM-5). GLM-5 has the same tensors; its indexer rotates neighbours as MLA does, its
RoPE is plain, and later layers may reuse the selection of an earlier one (IndexShare). Weights may be stored in fp8 as
the published ones are, or the routed experts in INT4.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa_plugin.tools.checkpoints.common import (
    SHARED_EXPERTS,
    SHARED_HEADS,
    SeededWeights,
    check_spec,
    config_of,
    mix,
    write_files,
    yarn,
)
from nsa_plugin.tools.checkpoints.quantized import CONFIGS, FP8, GROUP, OF_EXPERTS, QUANTIZATIONS, stored

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16")
# Share of a layer's latent projections that it has in common with the layer whose selection it reuses: training shares
# a selection between layers that attend alike, so that what was selected has the weight.
SHARED_SELECTION = 0.98

# Standard deviation of a projection's output for input of unit variance; 1 for projections not listed.
_GAINS = {"q_b_proj": 3.5, "o_proj": 0.5, "down_proj": 0.25, "lm_head": 3.0}


# What makes a small checkpoint one of GLM-5's shape: plain RoPE, values wider than the keys' NoPE part, one group of
# experts, and layers that reuse a selection (IndexShare).
SMALL_GLM: dict[str, Any] = {
    "glm": True,
    "index_topk_pattern": "FSFS",
    "qk_nope_head_dim": 96,
    "v_head_dim": 128,
    "n_group": 1,
    "topk_group": 1,
    "rope_theta": 1000000.0,
    "rope_factor": 1.0,
    "rope_original_positions": 2560,
}


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """The checkpoint's shape. Fields have the names of the config's keys where it has one.

    Attributes:
        seed: of the weights; the same spec gives the same bytes on every machine.
        dtype: of the stored weights, "float32" or "bfloat16".
        quantization: one of `QUANTIZATIONS`, see `quantized`: "fp8" for the linear layers of attention, its indexer and
            the experts, the others for the routed experts; empty: all are stored in `dtype`.
        sparse: with the indexer (DeepseekV32ForCausalLM), or the same model without it (DeepseekV3ForCausalLM).
        glm: GLM-5's architecture and config keys (GlmMoeDsaForCausalLM).
        index_topk_pattern: a letter for each layer, "F" for its own selection and "S" for the previous one's; empty:
            every layer has its own. GLM-5 only.
        rope_factor, rope_original_positions: YaRN's factor and the context it extends, in tokens. The
            product is the longest position. 1: plain RoPE.
        num_nextn_predict_layers: 1 adds a multi-token prediction layer (DeepSeek-V3, section 2.2) for speculative
            decoding. Its weights are random too, so its draft tokens are rarely accepted.
        rope_mscale, rope_mscale_all_dim: YaRN's attention temperature, see `reference_model`.
    """

    seed: int = 0
    dtype: str = "bfloat16"
    quantization: str = ""
    sparse: bool = True
    glm: bool = False
    index_topk_pattern: str = ""
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
        if self.quantization and self.quantization not in QUANTIZATIONS:
            raise ValueError(f"quantization is {self.quantization!r}; allowed: {', '.join(QUANTIZATIONS)}, or none")
        if self.quantization and (self.hidden_size % GROUP or self.moe_intermediate_size % GROUP):
            raise ValueError(
                f"hidden_size {self.hidden_size} and moe_intermediate_size {self.moe_intermediate_size} must be "
                f"multiples of the {GROUP} values that share a scale"
            )
        if self.n_routed_experts % self.n_group or self.n_routed_experts // self.n_group < 2:
            raise ValueError(
                f"n_routed_experts {self.n_routed_experts} must be n_group {self.n_group} groups of at least 2: "
                "a group is scored by its two best experts"
            )
        if self.num_experts_per_tok > self.topk_group * (self.n_routed_experts // self.n_group):
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} is more than topk_group {self.topk_group} groups have"
            )
        if self.glm and (self.rope_factor != 1.0 or not self.sparse):
            raise ValueError("a GLM-5 checkpoint has plain RoPE (rope_factor 1) and an indexer")
        pattern = self.index_topk_pattern
        if pattern and (not self.glm or len(pattern) != self.num_hidden_layers or pattern.strip("FS")):
            raise ValueError(
                f"index_topk_pattern is {pattern!r}; it has F or S for each of {self.num_hidden_layers} layers of GLM-5"
            )
        if pattern.startswith("S"):
            raise ValueError(f"index_topk_pattern is {pattern!r}; the first layer has no selection to reuse")
        check_spec(self)

    @property
    def max_position_embeddings(self) -> int:
        """Longest context in tokens."""
        return int(self.rope_original_positions * self.rope_factor)

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        left_out = ["dtype", "quantization", "sparse", "glm", "rope_mscale", "rope_mscale_all_dim"]
        left_out += [] if self.sparse else ["index_topk", "index_n_heads", "index_head_dim"]
        left_out += [] if self.index_topk_pattern else ["index_topk_pattern"]
        rope: dict[str, Any]
        if self.glm:
            architecture, model_type = "GlmMoeDsaForCausalLM", "glm_moe_dsa"
            left_out.append("rope_theta")
            parameters = {"rope_type": "default", "rope_theta": self.rope_theta}
            rope = {"rope_parameters": parameters, "indexer_rope_interleave": True}
        else:
            number = "V32" if self.sparse else "V3"
            architecture, model_type = f"Deepseek{number}ForCausalLM", f"deepseek_{number.lower()}"
            scaling = yarn(self, mscale=self.rope_mscale, mscale_all_dim=self.rope_mscale_all_dim)
            rope = {"rope_scaling": None if self.rope_factor == 1.0 else scaling}
        return config_of(
            self,
            left_out,
            architectures=[architecture],
            model_type=model_type,
            num_key_value_heads=self.num_attention_heads,
            scoring_func="sigmoid",
            max_position_embeddings=self.max_position_embeddings,
            **rope,
            ep_size=1,
            torch_dtype=self.dtype,
            **({"quantization_config": CONFIGS[self.quantization]} if self.quantization else {}),
        )

    def selects(self, layer: int) -> int:
        """The layer whose selection a layer attends to: itself, or with `index_topk_pattern` an earlier one."""
        return layer if layer >= len(self.index_topk_pattern) else self.index_topk_pattern.rindex("F", 0, layer + 1)


def write_checkpoint(directory: Path, spec: CheckpointSpec) -> Path:
    """Write the checkpoint; see `common.write_files`."""
    return write_files(directory, spec.config(), make_weights(spec))


def make_weights(spec: CheckpointSpec) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint by name, in `spec.dtype` (the router's bias is float32, as published).

    With a quantization a linear layer X is X.weight and X.weight_scale_inv (fp8), X.weight_packed, X.weight_scale and
    X.weight_shape (int4), or X.qweight, X.qzeros, X.scales (gptq, awq) and X.g_idx (gptq).
    """
    import torch

    make = _V32Weights(spec)
    make.embeddings()
    for layer in range(spec.num_hidden_layers):
        make.layer(layer)
    if spec.num_nextn_predict_layers:
        make.nextn(spec.num_hidden_layers)
    dtype = getattr(torch, spec.dtype)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in make.tensors.items():
        if _is_quantized(name, spec.quantization):
            layer_name = name.removesuffix("weight")
            found |= {layer_name + part: one for part, one in stored(tensor, spec.quantization).items()}
        else:
            found[name] = tensor.to(torch.float32 if name.endswith("e_score_correction_bias") else dtype)
    return found


# Those that deepseek-ai/DeepSeek-V3.2 has in fp8.
_FP8_LINEARS = (
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    *("wq_b", "wk"),
    *("gate_proj", "up_proj", "down_proj"),
)


def _is_quantized(name: str, quantization: str) -> bool:
    if quantization == FP8:
        return name.split(".")[-2] in _FP8_LINEARS
    return quantization in OF_EXPERTS and ".mlp.experts." in name


class _V32Weights(SeededWeights):
    """Fills `tensors` in float32."""

    def __init__(self, spec: CheckpointSpec):
        super().__init__(spec.seed, spec.hidden_size)
        self.spec = spec
        self.tensors: dict[str, torch.Tensor] = {}

    def embeddings(self) -> None:
        spec = self.spec
        self.tensors["model.embed_tokens.weight"] = self._embedding("model.embed_tokens", spec.vocab_size)
        self._norm("model.norm", spec.hidden_size)
        self._linear("lm_head", spec.vocab_size, spec.hidden_size)

    def layer(self, layer: int) -> None:
        spec, prefix = self.spec, f"model.layers.{layer}"
        self._norm(f"{prefix}.input_layernorm", spec.hidden_size)
        self._norm(f"{prefix}.post_attention_layernorm", spec.hidden_size)
        self._attention(f"{prefix}.self_attn", f"model.layers.{spec.selects(layer)}.self_attn")
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
        """The multi-token prediction layer; it stores the model's embedding and head again."""
        spec, prefix = self.spec, f"model.layers.{layer}"
        self.layer(layer)
        for part in ("enorm", "hnorm", "shared_head.norm"):
            self._norm(f"{prefix}.{part}", spec.hidden_size)
        self._linear(f"{prefix}.eh_proj", spec.hidden_size, 2 * spec.hidden_size)
        for name, source in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
            self.tensors[f"{prefix}.{name}.weight"] = self.tensors[f"{source}.weight"].clone()

    def _attention(self, name: str, selects: str) -> None:
        """Attention of a layer.

        Args:
            selects: name of the attention whose selection it attends to; its own or an earlier layer's.
        """
        spec = self.spec
        heads, nope, rope = spec.num_attention_heads, spec.qk_nope_head_dim, spec.qk_rope_head_dim
        self._linear(f"{name}.q_a_proj", spec.q_lora_rank, spec.hidden_size, like=f"{selects}.q_a_proj")
        self._norm(f"{name}.q_a_layernorm", spec.q_lora_rank)
        latent = "kv_a_proj_with_mqa"
        self._linear(f"{name}.{latent}", spec.kv_lora_rank + rope, spec.hidden_size, like=f"{selects}.{latent}")
        self._norm(f"{name}.kv_a_layernorm", spec.kv_lora_rank)
        self._linear(f"{name}.o_proj", spec.hidden_size, heads * spec.v_head_dim)

        query = self._matrix(f"{selects}.shared_query", nope + rope, spec.q_lora_rank)
        own = self._matrix(f"{name}.q_b_proj", heads, nope + rope, spec.q_lora_rank)
        self.tensors[f"{name}.q_b_proj.weight"] = mix(query, own, SHARED_HEADS).flatten(0, 1)
        key = self._matrix(f"{selects}.shared_key", nope, spec.kv_lora_rank)
        own = self._matrix(f"{name}.kv_b_proj", heads, nope + spec.v_head_dim, spec.kv_lora_rank)
        own[:, :nope] = mix(key, own[:, :nope], SHARED_HEADS)
        self.tensors[f"{name}.kv_b_proj.weight"] = own.flatten(0, 1)
        if spec.sparse and selects == name:
            self._indexer(f"{name}.indexer", query, key, self.tensors[f"{name}.kv_a_proj_with_mqa.weight"])

    def _indexer(self, name: str, query: torch.Tensor, key: torch.Tensor, kv_a: torch.Tensor) -> None:
        """An indexer whose scores nearly follow the heads' shared query and key.

        Args:
            query: [qk_nope_head_dim + qk_rope_head_dim, q_lora_rank]. key: [qk_nope_head_dim, kv_lora_rank].
            kv_a: [kv_lora_rank + qk_rope_head_dim, hidden_size].
        """
        import torch

        spec = self.spec
        heads, dim, nope, rope = (
            spec.index_n_heads, spec.index_head_dim, spec.qk_nope_head_dim, spec.qk_rope_head_dim,
        )  # fmt: skip
        # The indexer's rotated dimensions come first. V3.2's rotates halves where MLA rotates neighbours.
        neighbours = torch.arange(rope)
        halves = neighbours if spec.glm else torch.cat([neighbours[::2], neighbours[1::2]])
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

        queries, gates = self._index_queries(name, shared_query, heads)
        self.tensors[f"{name}.wq_b.weight"] = queries
        self.tensors[f"{name}.weights_proj.weight"] = gates

    def _mlp(self, name: str, size: int, like: str | None = None) -> None:
        hidden = self.spec.hidden_size
        for part, rows, columns in (
            ("gate_proj", size, hidden),
            ("up_proj", size, hidden),
            ("down_proj", hidden, size),
        ):
            weight = self._matrix(f"{name}.{part}", rows, columns)
            if like is not None:
                weight = mix(self._matrix(f"{like}.{part}", rows, columns), weight, SHARED_EXPERTS)
            self.tensors[f"{name}.{part}.weight"] = weight

    def _linear(self, name: str, rows: int, columns: int, like: str | None = None) -> None:
        weight = self._matrix(name, rows, columns)
        if like is not None and like != name:
            weight = mix(self._matrix(like, rows, columns), weight, SHARED_SELECTION)
        self.tensors[f"{name}.weight"] = weight

    def _norm(self, name: str, size: int) -> None:
        self.tensors[f"{name}.weight"] = 1 + 0.1 * self._random(name, size)

    def _matrix(self, name: str, *shape: int, gain: float | None = None) -> torch.Tensor:
        kind = name.split(".")[-1].replace("shared_query", "q_b_proj")
        return super()._matrix(name, *shape, gain=_GAINS.get(kind, 1.0) if gain is None else gain)
