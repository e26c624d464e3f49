"""DeepSeek-V3.2 and GLM-5 in plain torch, written to be read: the reference for the served model's answers.

It is independent of the plugin and of every engine. It reads a checkpoint's config.json and model.safetensors, runs the
whole sequence at once without a cache, forms every head's keys and values from the latent (no weight absorption), and
attends under a mask built from the indexer's selection.

Sources: DeepSeek-V2 (arXiv 2405.04434, MLA), DeepSeek-V3 (arXiv 2412.19437, routing without auxiliary loss),
DeepSeek-V3.2-Exp (the lightning indexer, with its fp8 keys and queries), YaRN (arXiv 2309.00071), the configuration of
zai-org/GLM-5 (`indexer_rope_interleave`, `index_topk_pattern`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_FP8_MAX = 448.0
_ROWS_PER_CHUNK = 256


@dataclass(frozen=True)
class ReferenceRun:
    """One sequence, teacher-forced.

    Attributes:
        logprobs: [num_tokens, vocab_size] log probabilities; row t is the distribution of token t + 1.
        selected: for each layer, [num_tokens, index_topk] int64 positions that each token attends to, -1 if the context
            is shorter; empty for a model without an indexer. A layer that reuses a selection has that one.
        index_margin: [num_layers, num_tokens] difference between the last selected and the first rejected index score,
            divided by the standard deviation of the row's scores; infinite if nothing was rejected. Near zero, rounding
            decides which token is attended to.
        router_margin: [num_moe_layers, num_tokens] the same for the choice of experts or of expert groups, whichever is
            smaller, in units of the router's probability.
    """

    logprobs: Tensor
    selected: tuple[Tensor, ...]
    index_margin: Tensor
    router_margin: Tensor


class ReferenceModel:
    """A checkpoint, ready to run.

    Args:
        config: the content of config.json.
        weights: the checkpoint's tensors by name.
        dtype: of the arithmetic. float32 is the reference; float64 shows how much rounding alone changes.
    """

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float32):
        self.config = dict(config)
        self.dtype = dtype
        self._weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
        self._sparse = "index_topk" in config

    @classmethod
    def load(cls, directory: Path, dtype: torch.dtype = torch.float32) -> ReferenceModel:
        """Read the checkpoint in `directory`.

        Raises:
            OSError: a file of the checkpoint is missing or cannot be read.
        """
        from safetensors.torch import load_file

        config = json.loads((directory / "config.json").read_text())
        return cls(config, load_file(directory / "model.safetensors"), dtype)

    @torch.inference_mode()
    def run(self, token_ids: Sequence[int], *, quantize_index: bool = True, broken: bool = False) -> ReferenceRun:
        """Log probabilities after every token of `token_ids`.

        Args:
            token_ids: the whole sequence, prompt and answer.
            quantize_index: score with fp8 keys and queries, as the model is served. False: as in full precision.
            broken: attend to the tokens with the *lowest* index scores. For tests: a comparison that still
                passes is blind.
        """
        config = self.config
        hidden = self._weights["model.embed_tokens.weight"][torch.tensor(token_ids)]
        rope = _RopeTable(config, len(token_ids), self.dtype)
        selected: list[Tensor] = []
        index_margins: list[Tensor] = []
        router_margins: list[Tensor] = []
        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            normed = self._rms_norm(f"{prefix}.input_layernorm", hidden)
            q_latent = self._rms_norm(
                f"{prefix}.self_attn.q_a_layernorm", self._linear(f"{prefix}.self_attn.q_a_proj", normed)
            )
            if self._selects(layer):
                indices, margin = self._select(
                    f"{prefix}.self_attn.indexer", normed, q_latent, rope, quantize_index, broken
                )
            if self._sparse:
                selected.append(indices)
                index_margins.append(margin)
            topk_indices = selected[-1] if self._sparse else None
            hidden = hidden + self._attention(f"{prefix}.self_attn", normed, q_latent, rope, topk_indices)

            normed = self._rms_norm(f"{prefix}.post_attention_layernorm", hidden)
            if layer < config["first_k_dense_replace"]:
                hidden = hidden + self._mlp(f"{prefix}.mlp", normed)
            else:
                routed, margin = self._mixture_of_experts(f"{prefix}.mlp", normed)
                router_margins.append(margin)
                hidden = hidden + routed
        logits = self._linear("lm_head", self._rms_norm("model.norm", hidden))
        return ReferenceRun(
            logprobs=logits.float().log_softmax(-1),
            selected=tuple(selected),
            index_margin=torch.stack(index_margins) if index_margins else torch.empty(0, len(token_ids)),
            router_margin=torch.stack(router_margins) if router_margins else torch.empty(0, len(token_ids)),
        )

    def _selects(self, layer: int) -> bool:
        """Whether a layer has an indexer; of a sparse model's, the others reuse the selection of the one before."""
        pattern = self.config.get("index_topk_pattern", "")
        return self._sparse and (not pattern or pattern[layer] == "F")

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self._weights[f"{name}.weight"].T

    def _rms_norm(self, name: str, x: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(variance + self.config["rms_norm_eps"]) * self._weights[f"{name}.weight"]

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        gate, up = self._linear(f"{name}.gate_proj", x), self._linear(f"{name}.up_proj", x)
        return self._linear(f"{name}.down_proj", functional.silu(gate) * up)

    def _attention(
        self, name: str, normed: Tensor, q_latent: Tensor, rope: _RopeTable, topk_indices: Tensor | None
    ) -> Tensor:
        """Multi-head latent attention over the selected tokens, or over all where `topk_indices` is None.

        Args:
            normed: [T, hidden_size] input of the layer. q_latent: [T, q_lora_rank].
            topk_indices: [T, index_topk] int64 positions, -1 for none.
        """
        c, tokens = self.config, normed.shape[0]
        heads, nope_dim, rope_dim = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        q = self._linear(f"{name}.q_b_proj", q_latent).view(tokens, heads, nope_dim + rope_dim)
        q = torch.cat([q[..., :nope_dim], rope.rotate_interleaved(q[..., nope_dim:])], -1)

        kv_latent, k_rope = self._linear(f"{name}.kv_a_proj_with_mqa", normed).split([c["kv_lora_rank"], rope_dim], -1)
        kv_latent = self._rms_norm(f"{name}.kv_a_layernorm", kv_latent)
        kv = self._linear(f"{name}.kv_b_proj", kv_latent).view(tokens, heads, nope_dim + c["v_head_dim"])
        k_nope, v = kv.split([nope_dim, c["v_head_dim"]], -1)
        k_rope = rope.rotate_interleaved(k_rope[:, None, :]).expand(tokens, heads, rope_dim)
        k = torch.cat([k_nope, k_rope], -1)

        outputs = []
        for start in range(0, tokens, _ROWS_PER_CHUNK):
            rows = torch.arange(start, min(start + _ROWS_PER_CHUNK, tokens))
            allowed = torch.arange(tokens)[None, :] <= rows[:, None]
            if topk_indices is not None:
                # One extra column takes the -1 entries.
                chosen = torch.zeros(len(rows), tokens + 1, dtype=torch.bool)
                chosen.scatter_(1, topk_indices[rows].where(topk_indices[rows] >= 0, tokens), True)
                allowed &= chosen[:, :tokens]
            scores = torch.einsum("qhd,khd->hqk", q[rows], k) * self._softmax_scale()
            weights = scores.masked_fill(~allowed, -math.inf).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
        return self._linear(f"{name}.o_proj", torch.cat(outputs))

    def _softmax_scale(self) -> float:
        """1/sqrt(d), times YaRN's temperature squared: it is meant for the query and for the key."""
        scale = float((self.config["qk_nope_head_dim"] + self.config["qk_rope_head_dim"]) ** -0.5)
        scaling = self.config.get("rope_scaling")
        if scaling and scaling.get("mscale_all_dim"):
            scale *= yarn_mscale(scaling["factor"], scaling["mscale_all_dim"]) ** 2
        return scale

    def _select(
        self, name: str, normed: Tensor, q_latent: Tensor, rope: _RopeTable, quantize: bool, broken: bool
    ) -> tuple[Tensor, Tensor]:
        """The lightning indexer: positions with the highest scores, and how clear the choice was.

        score[t, s] = sum over heads h of weight[t, h] * relu(q[t, h] . k[s]), for s <= t.

        Returns:
            [T, index_topk] int64 positions with -1 for none, and [T] margins as in `ReferenceRun`.
        """
        c, tokens = self.config, normed.shape[0]
        heads, dim, rope_dim, topk = c["index_n_heads"], c["index_head_dim"], c["qk_rope_head_dim"], c["index_topk"]
        rotate = rope.rotate_interleaved if c.get("indexer_rope_interleave", False) else rope.rotate_halves
        q = self._linear(f"{name}.wq_b", q_latent).view(tokens, heads, dim)
        q = torch.cat([rotate(q[..., :rope_dim]), q[..., rope_dim:]], -1)
        k = functional.layer_norm(
            self._linear(f"{name}.wk", normed),
            (dim,),
            self._weights[f"{name}.k_norm.weight"],
            self._weights[f"{name}.k_norm.bias"],
            eps=1e-6,
        )
        k = torch.cat([rotate(k[:, None, :rope_dim])[:, 0], k[:, rope_dim:]], -1)
        if quantize:
            q, k = quantize_fp8(q), quantize_fp8(k)
        head_weights = self._linear(f"{name}.weights_proj", normed) * dim**-0.5 * heads**-0.5

        width = min(topk, tokens)
        topk_indices = torch.full((tokens, topk), -1, dtype=torch.int64)
        margin = torch.full((tokens,), math.inf, dtype=self.dtype)
        for start in range(0, tokens, _ROWS_PER_CHUNK):
            rows = torch.arange(start, min(start + _ROWS_PER_CHUNK, tokens))
            future = torch.arange(tokens)[None, :] > rows[:, None]
            logits = torch.einsum("qhd,kd->qhk", q[rows], k).relu()
            scores = torch.einsum("qhk,qh->qk", logits, head_weights[rows])
            ranked, order = (-scores if broken else scores).masked_fill(future, -math.inf).sort(-1, descending=True)
            topk_indices[rows, :width] = order[:, :width].where(ranked[:, :width] > -math.inf, -1)
            full = rows >= topk
            if full.any():
                count = rows[full].to(self.dtype) + 1
                seen = scores[full].masked_fill(future[full], 0.0)
                spread = (seen.pow(2).sum(-1) / count - (seen.sum(-1) / count).pow(2)).clamp(min=0).sqrt()
                margin[rows[full]] = (ranked[full, topk - 1] - ranked[full, topk]) / spread
        return topk_indices, margin

    def _mixture_of_experts(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """Grouped top-k of sigmoid scores. The bias steers the choice and does not weigh the result.

        Returns:
            [T, hidden_size] shared and routed experts' sum, and [T] margins as in `ReferenceRun`.
        """
        c, tokens = self.config, x.shape[0]
        scores = self._linear(f"{name}.gate", x).sigmoid()
        biased = scores + self._weights[f"{name}.gate.e_score_correction_bias"]

        group_scores = biased.view(tokens, c["n_group"], -1).topk(2, -1).values.sum(-1)
        best_groups = group_scores.topk(c["topk_group"], -1).indices
        open_groups = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, best_groups, True)
        closed = ~open_groups.repeat_interleave(c["n_routed_experts"] // c["n_group"], dim=1)
        eligible = biased.masked_fill(closed, -math.inf)
        experts = eligible.topk(c["num_experts_per_tok"], -1).indices
        margin = torch.minimum(_rank_gap(group_scores, c["topk_group"]), _rank_gap(eligible, c["num_experts_per_tok"]))

        gates = scores.gather(1, experts)
        if c["norm_topk_prob"]:
            gates = gates / gates.sum(-1, keepdim=True)
        gates = gates * c["routed_scaling_factor"]
        output = self._mlp(f"{name}.shared_experts", x)
        for expert in range(c["n_routed_experts"]):
            rows, slot = (experts == expert).nonzero(as_tuple=True)
            if rows.numel():
                routed = self._mlp(f"{name}.experts.{expert}", x[rows]) * gates[rows, slot, None]
                output = output.index_add(0, rows, routed)
        return output, margin


def _rank_gap(scores: Tensor, count: int) -> Tensor:
    """[T] distance of the last of `count` winners from the first loser; infinite where nobody loses."""
    if count >= scores.shape[-1]:
        return torch.full(scores.shape[:1], math.inf, dtype=scores.dtype)
    top = scores.topk(count + 1, -1).values
    return top[:, -2] - top[:, -1]


def quantize_fp8(x: Tensor) -> Tensor:
    """`x` as the indexer's caches hold it: fp8 e4m3, one power-of-two (ue8m0) scale for the last dimension.

    The smallest power of two that brings the largest magnitude to at most 448 is the scale.
    """
    amax = x.abs().amax(-1, keepdim=True).clamp(min=1e-10)
    scale = torch.exp2(torch.ceil(torch.log2(amax / _FP8_MAX)))
    return (x / scale).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).to(x.dtype) * scale


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature, section 3.4 of the paper: 0.1 m ln(s) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def yarn_frequencies(dim: int, theta: float, scaling: Mapping[str, Any] | None) -> Tensor:
    """[dim / 2] float32 rotary frequencies in radians a token.

    Frequencies that turn more than `beta_fast` times within the original context stay; those that turn less
    than `beta_slow` times are divided by `factor`; between the two a linear ramp over the dimensions blends.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if not scaling:
        return frequencies

    def dimension_of(turns: float) -> float:
        original = scaling["original_max_position_embeddings"]
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension_of(scaling["beta_fast"])), 0)
    high = min(math.ceil(dimension_of(scaling["beta_slow"])), dim - 1)
    # A ramp of no width is a step; DeepSeek's code widens it by a thousandth.
    width = (high - low) or 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / scaling["factor"] * ramp + frequencies * (1 - ramp)


class _RopeTable:
    """cos and sin of every position: [T, 1, qk_rope_head_dim / 2] in `dtype`, from float32 angles."""

    def __init__(self, config: Mapping[str, Any], tokens: int, dtype: torch.dtype):
        scaling = config.get("rope_scaling")
        theta = config["rope_theta"] if "rope_theta" in config else config["rope_parameters"]["rope_theta"]
        frequencies = yarn_frequencies(config["qk_rope_head_dim"], theta, scaling)
        angles = torch.arange(tokens, dtype=torch.float32)[:, None, None] * frequencies
        magnitude = 1.0
        if scaling:
            # One temperature is in the softmax scale already (mscale_all_dim); what is left scales cos and sin.
            magnitude = yarn_mscale(scaling["factor"], scaling["mscale"]) / yarn_mscale(
                scaling["factor"], scaling["mscale_all_dim"]
            )
        self._cos = (angles.cos() * magnitude).to(dtype)
        self._sin = (angles.sin() * magnitude).to(dtype)

    def rotate_interleaved(self, x: Tensor) -> Tensor:
        """Rotate pairs (0, 1), (2, 3), ... of [T, heads, dim]: MLA's queries and keys."""
        even, odd = x[..., 0::2], x[..., 1::2]
        rotated = torch.stack([even * self._cos - odd * self._sin, odd * self._cos + even * self._sin], -1)
        return rotated.flatten(-2)

    def rotate_halves(self, x: Tensor) -> Tensor:
        """Rotate pairs (0, d/2), (1, d/2 + 1), ... of [T, heads, dim]: the indexer's."""
        first, second = x.chunk(2, -1)
        return torch.cat([first * self._cos - second * self._sin, second * self._cos + first * self._sin], -1)
