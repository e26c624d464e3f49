"""The plugin's selection for decode and verify steps under vLLM, with the logits of some query tokens at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.vllm.v32.dcp import DcpGroup, LogitsOfSelected
from nsa_plugin.decision.plan import Plan
from nsa_plugin.kernels.kv_cache import open_cache
from nsa_plugin.kernels.selector import default_selector
from nsa_plugin.kernels.topk import reference_topk_rows
from nsa_plugin.libraries.registry import REFERENCE


@dataclass(frozen=True)
class StepSelection:
    """Decode and verify steps that the plugin selects for.

    Attributes:
        plan: of the steps.
        rows: number of query tokens, at the front of the batch.
        lengths: int32 [requests or query tokens], keys that the last query token of each sees; 0 or less for padding.
        page_table: int32, a row for each of `lengths`.
        dcp: the ranks that share the keys, if there are any: `lengths` then counts this rank's keys, for every query
            token.
    """

    plan: Plan
    rows: int
    lengths: torch.Tensor
    page_table: torch.Tensor
    dcp: DcpGroup | None = None


def select_steps(steps: StepSelection, given: Mapping[str, Any], providers: Providers) -> None:
    """Write the steps' selection into vLLM's buffer, with the logits of some query tokens at a time.

    Args:
        given: the arguments of vLLM's function, by name.
    """
    cache = open_cache(given["kv_cache"], "indexer_fp8")
    requests = len(steps.lengths)
    q = given["q_quant"][: steps.rows].unflatten(0, (requests, steps.rows // requests))
    plan = steps.plan.indexer
    arguments: dict[str, Any] = {"rows_per_chunk": plan.rows_per_chunk}
    if plan.provider != REFERENCE:
        longest = given["max_model_len"]
        arguments["max_len"] = longest if steps.dcp is None else steps.dcp.longest(longest)
    if plan.provider == "deep_gemm":
        arguments["metadata_provider"] = plan.metadata_provider or None
    score = providers.load("indexer_topk_paged", plan.provider)
    topk = given["topk_tokens"]
    out = given["topk_indices_buffer"][: steps.rows, :topk]
    weights = given["weights"][: steps.rows].float()
    kept = None
    if steps.dcp is not None:
        selector = default_selector(out.device, topk) if plan.provider != REFERENCE else reference_topk_rows
        arguments["selector"] = kept = LogitsOfSelected(selector, out)
    score(q, cache, weights, steps.lengths.int(), steps.page_table, topk, out=out, **arguments)
    if steps.dcp is not None and kept is not None:
        steps.dcp.merge(out, kept.logits)
