"""Replacements of vLLM's ledger for DeepSeek-V4 (`patches.vllm_v4`) that need this worker's planner."""

from __future__ import annotations

import functools
from typing import Any

from nsa_plugin.backends.vllm.v4.batch import planned_swa_builder
from nsa_plugin.backends.vllm.v32.patches import planned_class, planning, providers


def swa_builder_class(original: Any) -> Any:
    """For `DeepseekSparseSWABackend.get_builder_cls`."""
    return planned_class(original, functools.cache(lambda stock: planned_swa_builder(stock, planning, providers)))
