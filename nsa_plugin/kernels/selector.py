"""The choice among the implementations of `topk_rows`, which the contract in `topk` does not know."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

from nsa_plugin.kernels.topk import CUDA_MAX_TOPK, Selector, reference_topk_rows

# The modules that compile and launch the CUDA kernel.
CUDA_MODULES = ("cuda.bindings", "cuda.pathfinder")


def default_selector(device: torch.device, topk: int) -> Selector:
    """The fastest `topk_rows` that runs on a device: the CUDA kernel, Triton's, or the reference."""
    compiles = device.type == "cuda" and not torch.version.hip and all(map(_installed, CUDA_MODULES))
    if compiles and topk <= CUDA_MAX_TOPK:
        from nsa_plugin.kernels.cuda.topk import topk_rows as cuda_topk_rows

        return cuda_topk_rows
    if _installed("triton"):
        from nsa_plugin.kernels.triton.topk import topk_rows as triton_topk_rows

        return triton_topk_rows
    return reference_topk_rows


@cache
def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False
