"""Steps of a DeepSeek-V3.2 layer before attention: norms, RoPE, and fp8 queries of the indexer.

vLLM fuses these steps into Triton kernels that convert to fp8 by an instruction, which GPUs before SM89 lack. Here each
step is an op that any GPU runs. Keys and latents are returned as float32, unrounded, for `kv_cache_write`.

RoPE rotates pairs of values: (2i, 2i + 1) where interleaved, else (i, i + rope_dim / 2). `cos_sin` has a row for each
position: rope_dim / 2 cosines, then as many sines, of any float dtype. All arithmetic is float32.
"""

from __future__ import annotations

import torch

from nsa_plugin.kernels.checks import FLOAT_DTYPES, check_tensor, require
from nsa_plugin.kernels.indexer import fold_weights, quantize


def reference_norm_rope(
    q_c: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor,
    kv_weight: torch.Tensor,
    *,
    q_eps: float,
    kv_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """RMS-norm the compressed queries and latents, and rotate the keys' RoPE part (interleaved).

    Args:
        q_c: [n, q_lora_rank] float. kv_c: [n, kv_lora_rank] float. k_pe: [n, rope_dim] float.
        positions: [n] int64.
        cos_sin: [max_position, rope_dim] float.
        q_weight, kv_weight: [q_lora_rank] and [kv_lora_rank] float.
        q_eps, kv_eps: added to the mean square.

    Returns:
        queries [n, q_lora_rank] of q_c's dtype; latents [n, kv_lora_rank] and keys [n, rope_dim] float32.

    Raises:
        KernelArgumentError: a shape or dtype is wrong.
    """
    check_norm_rope(q_c, kv_c, k_pe, positions, cos_sin, q_weight, kv_weight)
    queries = _rms_norm(q_c, q_weight, q_eps).to(q_c.dtype)
    rotated = _rope(k_pe.float(), positions, cos_sin, interleaved=True)
    return queries, _rms_norm(kv_c, kv_weight, kv_eps), rotated


def reference_indexer_keys(
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    eps: float,
    interleaved: bool,
) -> torch.Tensor:
    """Layer-norm the indexer's keys and rotate their first rope_dim values: [n, dim] float32.

    Args:
        k: [n, dim] float.
        positions, cos_sin: see `reference_norm_rope`.
        weight, bias: [dim] float, of the norm.
        eps: added to the variance.
        interleaved: see the module.

    Raises:
        KernelArgumentError: a shape or dtype is wrong.
    """
    check_indexer_keys(k, positions, cos_sin, weight, bias)
    normed = torch.nn.functional.layer_norm(k.float(), (k.shape[1],), weight.float(), bias.float(), eps)
    return _rope(normed, positions, cos_sin, interleaved=interleaved)


def reference_indexer_queries(
    q: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    scale: float,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the indexer's queries, quantise each head to fp8, and fold the scales into the head gates.

    Args:
        q: [n, heads, dim] float.
        weights: [n, heads] float, the gates.
        positions, cos_sin: see `reference_norm_rope`.
        scale: constant factor of a logit.
        interleaved: see the module.

    Returns:
        codes [n, heads, dim] float8_e4m3fn; weights [n, heads] float32, gate * scale of the codes * `scale`. Scales
        are powers of two.

    Raises:
        KernelArgumentError: a shape or dtype is wrong.
    """
    check_indexer_queries(q, weights, positions, cos_sin)
    rotated = _rope(q.float(), positions, cos_sin, interleaved=interleaved)
    codes, scales = quantize(rotated, q.shape[-1])
    return codes, fold_weights(weights, scales, scale)


def reference_rope(q: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate queries (interleaved): [n, heads, rope_dim] of q's dtype.

    Args:
        q: [n, heads, rope_dim] float.
        positions, cos_sin: see `reference_norm_rope`.

    Raises:
        KernelArgumentError: a shape or dtype is wrong.
    """
    check_rope(q, positions, cos_sin)
    return _rope(q.float(), positions, cos_sin, interleaved=True).to(q.dtype)


def check_norm_rope(
    q_c: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor,
    kv_weight: torch.Tensor,
) -> None:
    """Check the arguments of `reference_norm_rope`."""
    op = "mla_norm_rope"
    check_tensor(op, "q_c", q_c, ("n", "q_lora_rank"), dtypes=FLOAT_DTYPES)
    rows, device = q_c.shape[0], q_c.device
    check_tensor(op, "kv_c", kv_c, (rows, "kv_lora_rank"), dtypes=FLOAT_DTYPES, device=device)
    check_tensor(op, "k_pe", k_pe, (rows, "rope_dim"), dtypes=FLOAT_DTYPES, device=device)
    check_tensor(op, "q_weight", q_weight, (q_c.shape[1],), dtypes=FLOAT_DTYPES, device=device)
    check_tensor(op, "kv_weight", kv_weight, (kv_c.shape[1],), dtypes=FLOAT_DTYPES, device=device)
    _check_positions(op, positions, cos_sin, rows, device, width=k_pe.shape[1])
    require(cos_sin.shape[1] == k_pe.shape[1], op, f"cos_sin rotates {cos_sin.shape[1]} of {k_pe.shape[1]} values")


def check_indexer_keys(
    k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> None:
    """Check the arguments of `reference_indexer_keys`."""
    op = "indexer_keys"
    check_tensor(op, "k", k, ("n", "dim"), dtypes=FLOAT_DTYPES)
    for name, values in (("weight", weight), ("bias", bias)):
        check_tensor(op, name, values, (k.shape[1],), dtypes=FLOAT_DTYPES, device=k.device)
    _check_positions(op, positions, cos_sin, k.shape[0], k.device, width=k.shape[1])


def check_indexer_queries(
    q: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> None:
    """Check the arguments of `reference_indexer_queries`."""
    op = "indexer_queries"
    check_tensor(op, "q", q, ("n", "heads", "dim"), dtypes=FLOAT_DTYPES)
    check_tensor(op, "weights", weights, tuple(q.shape[:2]), dtypes=FLOAT_DTYPES, device=q.device)
    _check_positions(op, positions, cos_sin, q.shape[0], q.device, width=q.shape[2])


def check_rope(q: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Check the arguments of `reference_rope`."""
    op = "rope"
    check_tensor(op, "q", q, ("n", "heads", "rope_dim"), dtypes=FLOAT_DTYPES)
    _check_positions(op, positions, cos_sin, q.shape[0], q.device, width=q.shape[2])
    require(cos_sin.shape[1] == q.shape[2], op, f"cos_sin rotates {cos_sin.shape[1]} of {q.shape[2]} values")


def _check_positions(
    op: str, positions: torch.Tensor, cos_sin: torch.Tensor, rows: int, device: torch.device, *, width: int
) -> None:
    check_tensor(op, "positions", positions, (rows,), dtypes=(torch.int64,), device=device)
    check_tensor(op, "cos_sin", cos_sin, ("max_position", "rope_dim"), dtypes=FLOAT_DTYPES, device=device)
    rotated = cos_sin.shape[1]
    require(rotated % 2 == 0 and rotated <= width, op, f"cos_sin rotates {rotated} of {width} values")


def _rms_norm(values: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    values = values.float()
    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * weight.float()


def _rope(values: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Rotate the first values of the last dimension, as many as `cos_sin` has columns; float32, a new tensor."""
    width = cos_sin.shape[1]
    table = cos_sin[positions].float()
    table = table.view(len(positions), *(1,) * (values.dim() - 2), width)
    cos, sin = table.chunk(2, dim=-1)
    head, rest = values[..., :width], values[..., width:]
    if interleaved:
        first, second = head[..., 0::2], head[..., 1::2]
    else:
        first, second = head.chunk(2, dim=-1)
    parts = first * cos - second * sin, second * cos + first * sin
    rotated = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
    return torch.cat([rotated, rest], dim=-1)
