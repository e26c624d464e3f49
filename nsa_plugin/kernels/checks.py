"""Host-side checks of kernel arguments: the error names the op, the argument and what is allowed.

None of them reads a tensor's values, so none waits for a device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nsa_plugin.errors import NsaPluginError

INDEX_DTYPES = (torch.int32, torch.int64)
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FP8_DTYPE = torch.float8_e4m3fn


class KernelArgumentError(NsaPluginError, ValueError):
    """An argument of a kernel has the wrong shape, dtype, device or value."""


def require(condition: bool, op: str, message: str) -> None:
    """Raise `KernelArgumentError` with `message` unless `condition` is true."""
    if not condition:
        raise KernelArgumentError(f"{op}: {message}")


def check_tensor(
    op: str,
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | str],
    *,
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
) -> None:
    """Check a tensor's rank, its known sizes, its dtype and its device.

    Args:
        shape: one entry a dimension: a number that must match, or a name that stands for any size.
        dtypes: the allowed dtypes.
        device: the device it must be on, if that matters.
    """
    fits = tensor.dim() == len(shape) and all(
        not isinstance(size, int) or size == actual for size, actual in zip(shape, tensor.shape, strict=True)
    )
    if fits and tensor.dtype in dtypes and (device is None or tensor.device == device):
        return
    # The words are put together only for an error: a decode step checks dozens of tensors.
    wanted = "[" + ", ".join(str(size) for size in shape) + "]"
    require(fits, op, f"{name} has shape {list(tensor.shape)}; expected {wanted}")
    allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    actual_dtype = str(tensor.dtype).removeprefix("torch.")
    require(tensor.dtype in dtypes, op, f"{name} has dtype {actual_dtype}; allowed: {allowed}")
    raise KernelArgumentError(f"{op}: {name} is on {tensor.device}; expected {device}")
