"""The inputs of a decision as plain data: the model's shape on one rank, and the batch's shape."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from nsa_plugin.decision.frozen import static_frozen
from nsa_plugin.errors import ShapeError
from nsa_plugin.layouts import FAMILY_LAYOUTS, LAYOUTS

FAMILIES = tuple(FAMILY_LAYOUTS)

# Fields that `config.json` has by the same name, and those of them that may be 0.
_CONFIGURED = (
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_topk", "index_n_heads",
    "index_head_dim",
)  # fmt: skip
_MAY_BE_ZERO = ("qk_nope_head_dim", "qk_rope_head_dim")
# What a layer that selects is called in `indexer_types` and in `index_topk_pattern`.
_SELECTS = ("full", "F")


class Phase(StrEnum):
    """The purpose of a batch; the names are SGLang's forward modes."""

    EXTEND = "extend"  # prefill, a chunk of one, or prefill after a cached prefix
    DECODE = "decode"  # one new token a request
    TARGET_VERIFY = "target_verify"  # several speculated tokens a request, checked by the target model
    DRAFT_EXTEND = "draft_extend"  # the draft model catches up on accepted tokens
    IDLE = "idle"  # no rows on this rank, but it takes part in collectives


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model as one rank of its attention group sees it.

    Attributes:
        family: "v3.2" (one cache, top-k over all of it) or "v4" (sliding window + compressed cache).
        num_heads: query heads of the whole model.
        attn_tp_size: ranks that share the heads; each has num_heads / attn_tp_size of them, for every token.
        dcp_size: ranks that share each request's KV cache (decode context parallelism); they are among the
            attn_tp_size. Each attends its part of the selected tokens with the heads of all of them.
        kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim: MLA dimensions in elements. A V4 cache
            row is kv_lora_rank elements of which the last qk_rope_head_dim have RoPE; a V3.2 row has
            its RoPE elements in addition.
        index_topk: tokens that the indexer selects for a query.
        index_n_heads, index_head_dim: the indexer's own heads.
        kv_layout: name of the KV cache's byte layout, one of `FAMILY_LAYOUTS`. On a CPU `bf16` stands
            for plain rows of any float dtype.
        sliding_window: tokens of the window that V4 attends in addition to the selected ones; 0 for V3.2.
        selecting_layers: share of the layers whose indexer selects, above 0 and up to 1. The others reuse a selection
            (GLM-5's IndexShare).
    """

    family: str = "v3.2"
    num_heads: int = 128
    attn_tp_size: int = 1
    dcp_size: int = 1
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    index_topk: int = 2048
    index_n_heads: int = 64
    index_head_dim: int = 128
    kv_layout: str = "bf16"
    sliding_window: int = 0
    selecting_layers: float = 1.0

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ShapeError(f"family is {self.family!r}; allowed: {', '.join(FAMILIES)}")
        if self.kv_layout not in FAMILY_LAYOUTS[self.family]:
            raise ShapeError(
                f"kv_layout is {self.kv_layout!r}; allowed for family {self.family}: "
                f"{', '.join(FAMILY_LAYOUTS[self.family])}"
            )
        for name in ("num_heads", "attn_tp_size", "dcp_size", *_CONFIGURED):
            least = 0 if name in _MAY_BE_ZERO else 1
            if getattr(self, name) < least:
                raise ShapeError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.num_heads % self.attn_tp_size:
            raise ShapeError(f"num_heads {self.num_heads} does not divide among attn_tp_size {self.attn_tp_size} ranks")
        if self.attn_tp_size % self.dcp_size:
            raise ShapeError(f"attn_tp_size {self.attn_tp_size} does not divide among dcp_size {self.dcp_size} ranks")
        if (self.family == "v4") != (self.sliding_window > 0):
            raise ShapeError(
                f"sliding_window is {self.sliding_window} for family {self.family}; "
                "v4 has a window of at least 1, v3.2 has none (0)"
            )
        if not 0 < self.selecting_layers <= 1:
            raise ShapeError(f"selecting_layers is {self.selecting_layers}; it must be above 0 and at most 1")

    @classmethod
    def from_config(cls, config: Any, *, attn_tp_size: int, kv_layout: str, dcp_size: int = 1) -> ModelShape:
        """The shape that a DeepSeek-V3.2 `config.json` describes, read from an object with its keys as attributes."""
        return cls(
            num_heads=config.num_attention_heads,
            attn_tp_size=attn_tp_size,
            dcp_size=dcp_size,
            kv_layout=kv_layout,
            selecting_layers=_selecting_layers(config),
            **{name: getattr(config, name) for name in _CONFIGURED},
        )

    @functools.cached_property
    def heads_per_rank(self) -> int:
        return self.num_heads // self.attn_tp_size

    @functools.cached_property
    def attended_heads(self) -> int:
        """Query heads of a sparse attention call: with decode context parallelism those of all ranks of the group."""
        return self.heads_per_rank * self.dcp_size

    @functools.cached_property
    def fp8_cache(self) -> bool:
        return LAYOUTS[self.kv_layout].is_fp8

    @property
    def row_dims(self) -> tuple[int, int]:
        """(query, value) elements of a head over cache rows: (576, 512) for V3.2, (512, 512) for V4."""
        rope = self.qk_rope_head_dim if self.family == "v3.2" else 0
        return self.kv_lora_rank + rope, self.kv_lora_rank

    @property
    def mha_dims(self) -> tuple[int, int]:
        """(query, value) elements of a head of dense multi-head attention: (192, 128) for V3.2."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim, self.v_head_dim


def _selecting_layers(config: Any) -> float:
    """The share of layers that select, by whichever key of IndexShare the config has; 1 without one."""
    kinds = getattr(config, "indexer_types", None) or getattr(config, "index_topk_pattern", None)
    if kinds:
        return max(1, sum(kind in _SELECTS for kind in kinds)) / len(kinds)
    return 1 / max(1, int(getattr(config, "index_topk_freq", None) or 1))


@static_frozen
class BatchShape:
    """A batch, or the part of one that shares a plan.

    Attributes:
        phase: see `Phase`.
        num_requests: requests with at least one row.
        num_tokens: query rows over all requests.
        max_kv_len: longest context of a request, in tokens, its new ones included.
        total_kv_len: sum of the contexts, in tokens.
        scored: pairs of a query token and a token that it may select, over all requests; 0 = not known.
        has_prefix: some request's context is longer than its rows, so older tokens come from the cache.
        cuda_graph: the batch is captured or replayed; nothing may branch on lengths then.
        context_parallel: the prefill is split over a context-parallel group.
        attention_workspace_tokens: most tokens whose keys and values one-shot MHA may hold at once; 0 = no limit.
    """

    phase: Phase
    num_requests: int = 0
    num_tokens: int = 0
    max_kv_len: int = 0
    total_kv_len: int = 0
    scored: int = 0
    has_prefix: bool = False
    cuda_graph: bool = False
    context_parallel: bool = False
    attention_workspace_tokens: int = 0

    def __post_init__(self) -> None:
        numbers = (self.num_requests, self.num_tokens, self.max_kv_len, self.total_kv_len, self.scored)
        if min(numbers) < 0 or self.attention_workspace_tokens < 0:
            raise ShapeError(f"a BatchShape holds no negative counts: {self}")
        if self.num_requests > self.num_tokens:
            raise ShapeError(
                f"num_requests {self.num_requests} exceeds num_tokens {self.num_tokens}: each request has a row"
            )
        if self.max_kv_len > self.total_kv_len:
            raise ShapeError(f"max_kv_len {self.max_kv_len} exceeds total_kv_len {self.total_kv_len}")

    @classmethod
    def from_lengths(
        cls,
        phase: Phase,
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        *,
        cuda_graph: bool = False,
        context_parallel: bool = False,
        attention_workspace_tokens: int = 0,
    ) -> BatchShape:
        """The shape of requests given by their rows and their contexts, both in tokens.

        Raises:
            ShapeError: the lists differ in length, or a request has more rows than context.
        """
        if len(q_lens) != len(kv_lens):
            raise ShapeError(f"q_lens has {len(q_lens)} entries and kv_lens {len(kv_lens)}")
        for request, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
            if q_len < 0 or q_len > kv_len:
                raise ShapeError(f"request {request} has {q_len} rows and a context of {kv_len} tokens")
        live = [(q_len, kv_len) for q_len, kv_len in zip(q_lens, kv_lens, strict=True) if q_len > 0]
        return cls(
            phase=phase,
            num_requests=len(live),
            num_tokens=sum(q_len for q_len, _ in live),
            max_kv_len=max((kv_len for _, kv_len in live), default=0),
            total_kv_len=sum(kv_len for _, kv_len in live),
            # Of n query tokens the last one sees the whole context, the one before it one token less, and so on.
            scored=sum(q_len * kv_len - q_len * (q_len - 1) // 2 for q_len, kv_len in live),
            has_prefix=any(kv_len > q_len for q_len, kv_len in live),
            cuda_graph=cuda_graph,
            context_parallel=context_parallel,
            attention_workspace_tokens=attention_workspace_tokens,
        )
