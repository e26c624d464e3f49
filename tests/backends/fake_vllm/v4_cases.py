"""Settings for each V4 execution path, and the tolerance of their outputs."""

from __future__ import annotations

import torch

from tests.backends.fake_vllm.v4 import CPU

DIRECTLY = {"device": CPU}


DECODES = {"prefill_backend": "flash_mla", "large_q_rows": 8192}  # up to so many the decode kernel comes first


OVER_ROWS = {"prefill_backend": "flash_mla", "large_q_rows": 1}


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Every head of every row within 2 % of its length: bfloat16 rounds to 0.4 %."""
    error = (found.float() - wanted.float()).norm(dim=-1) / wanted.float().norm(dim=-1)
    return bool((error <= 0.02).all())
