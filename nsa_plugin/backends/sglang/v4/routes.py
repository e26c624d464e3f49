"""SGLang's V4 batches in terms of plans: the settings of SGLang that a plan respects, and the planner of one backend.

`backends.common.paths` says how a plan is executed; the path over bf16 rows is `kernels.v4_prefill`.

SGLang's variables, if a user has set them and no setting of the plugin names a library:

    SGLANG_OPT_FLASHMLA_SPARSE_PREFILL   1: bf16 rows and FlashMLA's prefill kernel; 0: its decode kernel, as far as the
                                         installed build supports the query tokens, and the routes of `auto` above
    SGLANG_FP8_PAGED_MQA_LOGITS_TORCH    the indexer is SGLang's torch code (`indexer`)
    SGLANG_OPT_USE_JIT_INDEXER_METADATA  which kernel schedules SGLang's paged logits; beyond what the library's
                                         scheduling kernel supports, 0 is ignored and SGLang's kernel schedules

In small prefills SGLang's code selects, and attends too if it would make bf16 rows as well: see `ENGINE_TOKENS`.

Left to the stock path: context parallelism, hisparse, the fp4 indexer, DSpark, --dsv4-prefill-backend other than auto,
the trtllm and unified caches, V4.1's caches and ratios, bounded replay, deterministic inference; decode, verify and
draft steps unless `decode_backend` names a library.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from nsa_plugin.backends.common.paths import BF16_ROWS, DECODE_KERNEL, SGLANG, routes_of
from nsa_plugin.backends.common.v4 import LAYOUT
from nsa_plugin.backends.sglang.startup.model import attention_ranks, stock_feature
from nsa_plugin.backends.sglang.v4.batch import spans, workspace_bytes
from nsa_plugin.backends.sglang.v32.batch import Batch
from nsa_plugin.backends.sglang.v32.routes import SglangPlanner
from nsa_plugin.decision.constraints import Constraints
from nsa_plugin.decision.routes import BF16_COPY, FLASH_MLA_DECODE, Route
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.decision.v4_memory import ROWS_BYTES

SPARSE_PREFILL_VARIABLE = "SGLANG_OPT_FLASHMLA_SPARSE_PREFILL"
JIT_METADATA_VARIABLE = "SGLANG_OPT_USE_JIT_INDEXER_METADATA"
TORCH_LOGITS_VARIABLE = "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH"

WINDOW = 128
"""Tokens of the window; SGLang hardcodes them."""
WINDOW_PAGE = 256

ENGINE_TOKENS = 8192
"""Up to this many context tokens over all requests of a prefill, SGLang's code selects, and attends over bf16 rows
if that is its path too.

Its kernels do the same work there, and attention ends in the same FlashMLA kernel. The plugin's kernels save less GPU
time than the plugin's CPU overhead adds, and a prefill of so few tokens is CPU-bound."""


def asked_by_engine(envs: Any) -> frozenset[str]:
    """Return the execution paths that SGLang's variable selects; none if no user has set it.

    Args:
        envs: SGLang's `environ.envs`; 0.5.12 has no such variable.
    """
    field = getattr(envs, SPARSE_PREFILL_VARIABLE, None)
    if field is None or not field.is_set():
        return frozenset()
    return frozenset({BF16_ROWS if field.get() else DECODE_KERNEL})


def makes_rows(envs: Any) -> bool:
    """Whether SGLang's prefill path is over bf16 rows, whatever its size: since 0.5.15 unless switched off.

    Args:
        envs: see `asked_by_engine`.
    """
    field = getattr(envs, SPARSE_PREFILL_VARIABLE, None)
    return field is not None and bool(field.get())


def _over_rows() -> frozenset[Route]:
    return routes_of(SGLANG, LAYOUT, prefill=True, only=frozenset({BF16_ROWS}))


@dataclass
class SglangV4Planner(SglangPlanner):
    """The decisions of one SGLang V4 backend; see `Planner`.

    Attributes:
        asked: execution paths that SGLang's variable asks for, for prefills; see `asked_by_engine`.
        engine_makes_rows: see `makes_rows`.
        engine_tokens: see `ENGINE_TOKENS`.
    """

    asked: frozenset[str] = frozenset()
    engine_makes_rows: bool = False
    engine_tokens: int = ENGINE_TOKENS

    def _prefill_key(self, batch: Batch, no_split: str) -> tuple[Hashable, ...]:
        return batch.shape, batch.q_lens, batch.kv_lens

    def prefill_constraints(self, batch: Batch, no_dense: str = "", no_split: str = "") -> Constraints:
        """Return the constraints of a prefill. A V4 model has no dense attention to rule out."""
        preferred: frozenset[Route] = frozenset()
        if self.asked:
            preferred = routes_of(SGLANG, LAYOUT, prefill=True, only=self.asked)
        stock_rows = self.engine_makes_rows and self.settings.fault == "none"
        return self.constraints(
            prefill=True,
            preferred=preferred,
            preferred_by=SPARSE_PREFILL_VARIABLE,
            copy_bytes=workspace_bytes(spans(batch.q_lens, batch.kv_lens), WINDOW, WINDOW_PAGE),
            copy_budget=min(ROWS_BYTES, self.device.memory_free // 4),
            copy_budget_from="the budget of bf16 rows",
            stock_prefill=BF16_COPY if self.engine_makes_rows else FLASH_MLA_DECODE,
            stock_tokens=self.engine_tokens,
            stock_attends_by=_over_rows() if stock_rows else frozenset(),
        )


def v4_shape(model_runner: Any) -> ModelShape:
    """Return the shape of the model on one rank of its attention group, with a cache of fp8 records."""
    config = model_runner.model_config.hf_text_config
    return ModelShape(
        family="v4",
        num_heads=config.num_attention_heads,
        attn_tp_size=attention_ranks(model_runner),
        kv_lora_rank=512,
        qk_nope_head_dim=448,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=512,
        index_topk=config.index_topk,
        index_n_heads=config.index_n_heads,
        index_head_dim=config.index_head_dim,
        kv_layout=LAYOUT,
        sliding_window=WINDOW,
    )


def v4_stock_feature(backend: Any, server_args: Any) -> str | None:
    """As `stock_feature`, with the features of V4's backend. Several of these names exist only in some versions."""
    features = {
        "trtllm_attn": "trtllm's uniform fp8 cache",
        "is_dspark_draft": "DSpark's draft",
        "is_dsv41": "DeepSeek-V4.1",
        "enable_decoder_swa_bounded_replay": "bounded replay of the window",
    }
    for name, feature in features.items():
        if getattr(backend, name, False):
            return feature
    pool = getattr(backend, "token_to_kv_pool", None)
    if getattr(pool, "_unified_kv", False):
        return "the unified KV cache"
    if getattr(pool, "request_window", None) is not None:
        return "a window kept by request"
    if (asked := getattr(backend, "dsv4_prefill_backend", "auto")) != "auto":
        return f"--dsv4-prefill-backend {asked}"
    return stock_feature(backend, server_args)
