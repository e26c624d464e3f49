"""A small DeepSeek-V4 checkpoint with seeded random weights, made locally.

It has every part of the architecture with DeepSeek-V4-Flash's widths: attention over one shared head of 512, a sliding
window of 128, layers that also attend to tokens compressed 4 : 1 (selected by an indexer) and 128 : 1, a sink for each
head, grouped output projections, hyper-connections, mixture-of-experts layers, and fp8 weights in blocks of 128 x 128.
Tensor names and shapes are those that SGLang reads (0.5.16, `models/deepseek_v4.py`).

The indexer's queries and compressed keys are the dimensions of attention's with most of a query's weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
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
from nsa_plugin.tools.checkpoints.quantized import BLOCK, FP8_CONFIG, fp8_blocks

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

# Tokens that a layer attends to besides its window: none, every 4 compressed to one, or every 128.
COMPRESS_RATIOS = (0, 4, 128)

# Scores are a normal variable times the size of the keys, of the window's tokens and of compressed ones.
_KV_NORM = 2.5
# Size of a query's other dimensions, where those that the indexer has too are 1.
_OTHER_DIMENSIONS = 0.25
# Standard deviation of a projection's output for input of unit variance; 1 for all others.
_DOWN, _HEAD = 0.3, 3.0
# Of hyper-connections and compressors: the scale of what is projected, and of what is added to it.
_BIAS = 0.3


def compress_ratios(layers: int) -> tuple[int, ...]:
    """Ratios of `layers` layers: 0, 4, 128, 4, 0, 4, 128, ..."""
    return tuple(islice(cycle((0, 4, 128, 4)), layers))


@dataclass(frozen=True, kw_only=True)
class V4CheckpointSpec:
    """The checkpoint's shape. Fields have the names of the config's keys where it has one.

    Attributes:
        seed: of the weights; the same spec gives the same bytes on every machine.
        compress_ratios: of each layer, see `COMPRESS_RATIOS`.
        rope_factor, rope_original_positions: YaRN's, for the layers that compress.
        num_nextn_predict_layers: 1 adds a multi-token prediction layer, which attends to its window only.
    """

    seed: int = 0
    vocab_size: int = 4096
    hidden_size: int = 4096
    compress_ratios: tuple[int, ...] = compress_ratios(5)
    num_attention_heads: int = 64
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1024
    o_lora_rank: int = 1024
    o_groups: int = 8
    sliding_window: int = 128
    index_topk: int = 512
    index_n_heads: int = 64
    index_head_dim: int = 128
    hc_mult: int = 4
    n_routed_experts: int = 16
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 512
    routed_scaling_factor: float = 1.5
    max_position_embeddings: int = 524_288
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_factor: float = 16.0
    rope_original_positions: int = 65536
    num_nextn_predict_layers: int = 0

    def __post_init__(self) -> None:
        for ratio in self.compress_ratios:
            if ratio not in COMPRESS_RATIOS:
                allowed = ", ".join(map(str, COMPRESS_RATIOS))
                raise ValueError(f"compress_ratios has {ratio}; allowed: {allowed}")
        if not self.compress_ratios:
            raise ValueError("compress_ratios is empty; at least one layer is needed")
        if self.num_attention_heads % self.o_groups:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} does not divide among o_groups {self.o_groups}"
            )
        for name, size in self._fp8_sizes().items():
            if size % BLOCK:
                raise ValueError(f"{name} is {size}, which is no multiple of the {BLOCK} that share a scale")
        if self.index_head_dim > self.head_dim:
            raise ValueError(f"index_head_dim {self.index_head_dim} is more than head_dim {self.head_dim}")
        if not 0 < self.num_experts_per_tok <= self.n_routed_experts:
            raise ValueError(f"num_experts_per_tok is {self.num_experts_per_tok} of {self.n_routed_experts} experts")
        check_spec(self)

    @property
    def group_width(self) -> int:
        """Width of a head group's input to its output projection."""
        return self.num_attention_heads * self.head_dim // self.o_groups

    def _fp8_sizes(self) -> dict[str, int]:
        names = ("hidden_size", "head_dim", "q_lora_rank", "o_lora_rank", "moe_intermediate_size")
        return {name: getattr(self, name) for name in names} | {
            "num_attention_heads * head_dim / o_groups": self.group_width,
            "index_n_heads * index_head_dim": self.index_n_heads * self.index_head_dim,
        }

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        return config_of(
            self,
            architectures=["DeepseekV4ForCausalLM"],
            model_type="deepseek_v4",
            intermediate_size=self.moe_intermediate_size,
            num_hidden_layers=len(self.compress_ratios),
            num_key_value_heads=1,
            qk_nope_head_dim=self.head_dim - self.qk_rope_head_dim,
            v_head_dim=self.head_dim,
            kv_lora_rank=self.head_dim,
            window_size=self.sliding_window,
            # The multi-token prediction layer has an entry too.
            compress_ratios=[*self.compress_ratios, *[0] * self.num_nextn_predict_layers],
            hc_sinkhorn_iters=20,
            hc_eps=1e-6,
            first_k_dense_replace=0,
            n_shared_experts=1,
            # vLLM assumes fp4 experts by default; SGLang looks at the weights.
            expert_dtype="fp8",
            n_group=1,
            topk_group=1,
            scoring_func="sqrtsoftplus",
            num_hash_layers=0,
            swiglu_limit=10.0,
            rope_scaling=yarn(self, rope_type="yarn"),
            torch_dtype="bfloat16",
            quantization_config=FP8_CONFIG,
        )


def write_v4_checkpoint(directory: Path, spec: V4CheckpointSpec) -> Path:
    """Write the checkpoint; see `common.write_files`."""
    return write_files(directory, spec.config(), make_v4_weights(spec))


def make_v4_weights(spec: V4CheckpointSpec) -> Tensors:
    """All tensors of the checkpoint by name, in the dtypes that they are stored in.

    A linear layer X is X.weight in float8_e4m3fn and X.scale in float32, which is a power of two for each `BLOCK` rows
    and columns. Compressors, the gate and what is outside the layers are bfloat16; norms of compressors, sinks,
    biases and hyper-connections float32.
    """
    with ThreadPoolExecutor() as pool:
        parts = list(pool.map(lambda part: part(), _V4Weights(spec).parts()))
    return {name: tensor for part in parts for name, tensor in part.items()}


class _V4Weights(SeededWeights):
    """Makes the tensors in parts. No part depends on another, so threads can make them at the same time."""

    def __init__(self, spec: V4CheckpointSpec):
        super().__init__(spec.seed, spec.hidden_size)
        self.spec = spec

    def parts(self) -> Iterator[Callable[[], Tensors]]:
        spec = self.spec
        yield self._outside
        layers = [(f"layers.{layer}", ratio) for layer, ratio in enumerate(spec.compress_ratios)]
        if spec.num_nextn_predict_layers:
            layers.append(("mtp.0", 0))
            yield partial(self._nextn, "mtp.0")
        for prefix, ratio in layers:
            yield partial(self._layer, prefix)
            yield partial(self._attention, f"{prefix}.attn", ratio)
            for name, rows, columns in self._projections():
                yield partial(self._experts, f"{prefix}.ffn", name, rows, columns)

    def _outside(self) -> Tensors:
        spec = self.spec
        return {
            "embed.weight": _stored(self._embedding("embed", spec.vocab_size)),
            "head.weight": _stored(self._matrix("head", spec.vocab_size, spec.hidden_size, gain=_HEAD)),
            **self._norm("norm", spec.hidden_size),
            **self._hyper_connection("hc_head", spec.hc_mult, 1),
        }

    def _nextn(self, prefix: str) -> Tensors:
        """The parts that only a multi-token prediction layer has."""
        hidden = self.spec.hidden_size
        made = self._hyper_connection(f"{prefix}.hc_head", self.spec.hc_mult, 1)
        for part in ("e_proj", "h_proj"):
            made |= self._linear(f"{prefix}.{part}", hidden, hidden)
        for part in ("enorm", "hnorm", "norm"):
            made |= self._norm(f"{prefix}.{part}", hidden)
        return made

    def _layer(self, prefix: str) -> Tensors:
        spec = self.spec
        mixed = (2 + spec.hc_mult) * spec.hc_mult
        gate = f"{prefix}.ffn.gate"
        return {
            **self._norm(f"{prefix}.attn_norm", spec.hidden_size),
            **self._norm(f"{prefix}.ffn_norm", spec.hidden_size),
            **self._hyper_connection(f"{prefix}.hc_attn", mixed, 3),
            **self._hyper_connection(f"{prefix}.hc_ffn", mixed, 3),
            f"{gate}.weight": _stored(self._matrix(gate, spec.n_routed_experts, spec.hidden_size)),
            f"{gate}.bias": 0.1 * self._random(f"{gate}.bias", spec.n_routed_experts),
        }

    def _attention(self, name: str, ratio: int) -> Tensors:
        spec = self.spec
        hidden, heads, dim, used = spec.hidden_size, spec.num_attention_heads, spec.head_dim, spec.index_head_dim
        query = self._matrix(f"{name}.shared_query", dim, spec.q_lora_rank)
        # The indexer uses the last dimensions, which are rotated in both. A query is normalised as a whole.
        query[:-used] *= _OTHER_DIMENSIONS
        own = self._matrix(f"{name}.wq_b", heads, dim, spec.q_lora_rank)
        own[:, :-used] *= _OTHER_DIMENSIONS
        made = {
            **self._linear(f"{name}.wq_a", spec.q_lora_rank, hidden),
            **self._norm(f"{name}.q_norm", spec.q_lora_rank),
            **_quantized(f"{name}.wq_b", mix(query, own, SHARED_HEADS).flatten(0, 1)),
            **self._linear(f"{name}.wkv", dim, hidden),
            **self._norm(f"{name}.kv_norm", dim, size=_KV_NORM),
            **self._linear(f"{name}.wo_a", spec.o_groups * spec.o_lora_rank, spec.group_width),
            **self._linear(f"{name}.wo_b", hidden, spec.o_groups * spec.o_lora_rank),
            f"{name}.attn_sink": self._random(f"{name}.attn_sink", heads),
        }
        if ratio:
            made |= self._compressor(f"{name}.compressor", ratio)
        if ratio == 4:
            made |= self._indexer(f"{name}.indexer", query[-used:], made, f"{name}.compressor")
        return made

    def _compressor(self, name: str, ratio: int) -> Tensors:
        spec = self.spec
        # Each 4 tokens overlap the 4 before, which have values and gates of their own.
        dims = (2 if ratio == 4 else 1) * spec.head_dim
        norm = _KV_NORM * (1 + 0.1 * self._random(f"{name}.norm", spec.head_dim))
        return {
            f"{name}.ape": _BIAS * self._random(f"{name}.ape", ratio, dims),
            f"{name}.wkv.weight": _stored(self._matrix(f"{name}.wkv", dims, spec.hidden_size)),
            f"{name}.wgate.weight": _stored(self._matrix(f"{name}.wgate", dims, spec.hidden_size)),
            f"{name}.norm.weight": norm,
        }

    def _indexer(self, name: str, query: torch.Tensor, attention: Tensors, compressor: str) -> Tensors:
        """An indexer whose scores of compressed tokens nearly follow the heads' shared query.

        Args:
            query: [index_head_dim, q_lora_rank], the part that all heads' queries share, in a head's last dimensions.
            attention: tensors with attention's compressor.
            compressor: its name.
        """
        spec = self.spec
        used = spec.index_head_dim

        def last(tensor: torch.Tensor, dim: int) -> torch.Tensor:
            """The indexer's dimensions of both halves of the overlap."""
            halves = tensor.unflatten(dim, (2, spec.head_dim)).narrow(dim + 1, spec.head_dim - used, used)
            return halves.flatten(dim, dim + 1).contiguous()

        queries, gates = self._index_queries(name, query, spec.index_n_heads)
        return {
            **_quantized(f"{name}.wq_b", queries),
            f"{name}.weights_proj.weight": _stored(gates),
            f"{name}.compressor.ape": last(attention[f"{compressor}.ape"], 1),
            f"{name}.compressor.wkv.weight": last(attention[f"{compressor}.wkv.weight"], 0),
            f"{name}.compressor.wgate.weight": last(attention[f"{compressor}.wgate.weight"], 0),
            f"{name}.compressor.norm.weight": attention[f"{compressor}.norm.weight"][-used:].clone(),
        }

    def _projections(self) -> tuple[tuple[str, int, int], ...]:
        """An expert's gate, down and up projection: name, rows and columns."""
        hidden, size = self.spec.hidden_size, self.spec.moe_intermediate_size
        return (("w1", size, hidden), ("w2", hidden, size), ("w3", size, hidden))

    def _experts(self, prefix: str, part: str, rows: int, columns: int) -> Tensors:
        """One projection of all experts of a layer, the shared one included."""
        gain = _DOWN if part == "w2" else 1.0
        made = self._linear(f"{prefix}.shared_experts.{part}", rows, columns, gain=gain)
        shared = self._matrix(f"{prefix}.expert.{part}", rows, columns, gain=gain)
        for expert in range(self.spec.n_routed_experts):
            name = f"{prefix}.experts.{expert}.{part}"
            made |= _quantized(name, mix(shared, self._matrix(name, rows, columns, gain=gain), SHARED_EXPERTS))
        return made

    def _hyper_connection(self, name: str, mixed: int, scales: int) -> Tensors:
        import torch

        spec = self.spec
        return {
            f"{name}_fn": self._matrix(f"{name}_fn", mixed, spec.hc_mult * spec.hidden_size),
            f"{name}_base": _BIAS * self._random(f"{name}_base", mixed),
            f"{name}_scale": torch.full((scales,), _BIAS),
        }

    def _linear(self, name: str, rows: int, columns: int, gain: float = 1.0) -> Tensors:
        return _quantized(name, self._matrix(name, rows, columns, gain=gain))

    def _norm(self, name: str, width: int, size: float = 1.0) -> Tensors:
        return {f"{name}.weight": _stored(size * (1 + 0.1 * self._random(name, width)))}


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.to(torch.bfloat16)


def _quantized(name: str, weight: torch.Tensor) -> Tensors:
    """A linear layer in fp8, of a float32 weight [rows, columns]."""
    codes, scale = fp8_blocks(weight)
    return {f"{name}.weight": codes, f"{name}.scale": scale}
