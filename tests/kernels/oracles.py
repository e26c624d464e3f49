"""Independent oracles of the kernels: float64, one element at a time, sharing no code with the package."""

from __future__ import annotations

import math
import struct

import numpy as np
import torch

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
HEAD_COUNTS = (1, 2, 3, 5, 7, 8, 16, 20, 32, 64, 128)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().numpy()


def decode_e4m3(byte: int) -> float:
    """The value of a float8 e4m3fn byte by definition: 1 sign, 4 exponent (bias 7), 3 mantissa bits."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 0xF, byte & 0x7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3_TABLE = np.array([decode_e4m3(byte) for byte in range(256)])


def decode_record(memory: bytes, layout: str, slot: int, page_size: int) -> np.ndarray:
    """A token's row from the bytes of a whole cache, by the documented formats."""
    if layout == "v32_fp8":
        row = memory[slot * 656 : (slot + 1) * 656]
        scales = struct.unpack("<4f", row[512:528])
        values = [E4M3_TABLE[row[i]] * scales[i // 128] for i in range(512)]
        return np.array(values + decode_bf16(row[528:656]))
    page, position = divmod(slot, page_size)
    if layout == "v4_fp8":
        page_bytes = math.ceil(page_size * 584 / 576) * 576
        row = memory[page * page_bytes + position * 576 :][:576]
        scales = memory[page * page_bytes + page_size * 576 + position * 8 :][:8]
        values = [E4M3_TABLE[row[i]] * 2.0 ** (scales[i // 64] - 127) for i in range(448)]
        return np.array(values + decode_bf16(row[448:576]))
    assert layout == "indexer_fp8"
    start = page * page_size * 132
    row = memory[start + position * 128 :][:128]
    (scale,) = struct.unpack("<f", memory[start + page_size * 128 + position * 4 :][:4])
    return np.array([E4M3_TABLE[byte] * scale for byte in row])


def decode_bf16(data: bytes) -> list[float]:
    halves = struct.unpack(f"<{len(data) // 2}H", data)
    return [struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in halves]


def memory_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def sparse_attention(q, scopes, scale, d_v, sink=None):
    """out, max_logits, lse in float64 of q [rows, heads, d].

    scopes: pairs of (rows by index, i.e. an array [n, d]; a list of index lists, one for each query row,
    already cut to its length).
    """
    rows, heads, _ = q.shape
    out = np.zeros((rows, heads, d_v))
    max_logits = np.full((rows, heads), -np.inf)
    lse = np.full((rows, heads), np.inf)
    for row in range(rows):
        keys = [kv[index] for kv, indices in scopes for index in indices[row] if 0 <= int(index) < len(kv)]
        if not keys:
            continue
        keys = np.stack(keys)
        for head in range(heads):
            logits = keys @ q[row, head] * scale
            top = logits.max()
            weights = np.exp(logits - top)
            max_logits[row, head] = top
            lse[row, head] = top + math.log(weights.sum())
            out[row, head] = weights @ keys[:, :d_v] / weights.sum()
            if sink is not None:
                out[row, head] *= sink_factor(lse[row, head], sink[head])
    return out, max_logits, lse


def sink_factor(lse: float, sink: float) -> float:
    """exp(lse) / (exp(lse) + exp(sink))."""
    if sink == math.inf:
        return 0.0
    return 1.0 / (1.0 + math.exp(sink - lse))


def index_logits(q, k, k_scale, weights):
    """float64 [rows, keys] of the indexer's definition."""
    products = np.einsum("rhd,kd->rhk", q, k)
    return np.einsum("rhk,rh->rk", np.maximum(products, 0.0), weights) * k_scale


def topk_by_full_sort(logits, start, end, topk):
    """Positions relative to start of the largest logits of [start, end); the lowest win among equals."""
    order = sorted(range(start, end), key=lambda key: (-logits[key], key))[:topk]
    return sorted(key - start for key in order)


def noncontiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The same values behind strides that are not the dense ones, with NaN (or junk) in between."""
    fill = math.nan if tensor.is_floating_point() else 77
    wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), fill, dtype=tensor.dtype)
    view = wide[..., 1::2]
    view.copy_(tensor)
    assert tensor.numel() < 2 or not view.is_contiguous()
    return view
