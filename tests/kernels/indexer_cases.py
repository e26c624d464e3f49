"""Rows that are hard to select from, and what a selection has to fulfil; for CPU and GPU tests alike."""

from __future__ import annotations

import torch

from nsa_plugin.kernels.indexer import fold_weights, quantize
from nsa_plugin.kernels.kv_cache import PagedCache, open_cache, reference_write
from nsa_plugin.layouts import INDEXER_FP8

LARGEST = torch.finfo(torch.float32).max


def hard_rows(columns: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """float32 [columns] by name."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(columns, generator=generator)
    ascending = torch.arange(columns, dtype=torch.float32)
    one_huge = torch.ones(columns)
    one_huge[columns // 3] = 1e30
    mixed = normal.clone()
    mixed[::2], mixed[1::8], mixed[3::8] = torch.nan, torch.inf, -torch.inf
    mostly_least = torch.full((columns,), -torch.inf)
    mostly_least[::7], mostly_least[5::11] = torch.nan, normal[5::11]
    signed_zeros = normal.clamp(min=0)
    signed_zeros[::3] *= -1
    late = normal - 100
    late[-columns // 16 :] += 200
    return {
        "normal": normal,
        "equal": torch.full((columns,), 0.5),
        "ascending": ascending,
        "descending": -ascending,
        "one huge": one_huge,
        "all -inf": torch.full((columns,), -torch.inf),
        "all NaN": torch.full((columns,), torch.nan),
        "all +inf": torch.full((columns,), torch.inf),
        "mixed": mixed,
        "mostly least": mostly_least,
        "signed zeros": signed_zeros,
        "few values": (normal * 3).round(),
        "close together": 1000 + normal * 1e-4,
        "subnormal": normal * 1e-40,
        "late": late,
    }


def ranked(logits: torch.Tensor) -> torch.Tensor:
    """float64 logits as the contract ranks them: NaN and -inf least, +inf largest."""
    return logits.nan_to_num(nan=-LARGEST, neginf=-LARGEST, posinf=LARGEST).double()


def assert_selected(
    result: torch.Tensor,
    logits: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    topk: int,
    tolerance: float = 0.0,
) -> None:
    """Every row holds min(topk, ends - starts) different positions of its range, then -1; all that lie more
    than `tolerance` above the topk-th largest logit are there, and none that lies more than that below it."""
    assert result.dtype == torch.int32
    assert result.shape == (len(logits), topk)
    result, logits, starts, ends = (values.cpu() for values in (result, logits, starts, ends))
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        length = max(0, end - start)
        count = min(topk, length)
        chosen = result[row, :count].long()
        assert bool((result[row, count:] == -1).all()), f"row {row}: not -1 behind {count} positions"
        if count == 0:
            continue
        inside = (chosen >= 0) & (chosen < length)
        assert bool(inside.all()), f"row {row}: a position outside its range"
        assert len(chosen.unique()) == count, f"row {row}: a position twice"
        values = ranked(logits[row, start:end])
        threshold = values.topk(count).values[-1]
        is_chosen = torch.zeros(length, dtype=torch.bool)
        is_chosen[chosen] = True
        missing = (values > threshold + tolerance) & ~is_chosen
        assert not bool(missing.any()), f"row {row}: {int(missing.sum())} logits above the threshold are missing"
        surplus = is_chosen & (values < threshold - tolerance)
        assert not bool(surplus.any()), f"row {row}: {int(surplus.sum())} logits below the threshold are there"


def indexer_inputs(
    rows: int, keys: int, heads: int, seed: int = 0, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp8 q [rows, heads, 128] and k [keys, 128], the keys' scales [keys] and folded weights [rows, heads]."""
    generator = torch.Generator().manual_seed(seed)
    q, q_scale = quantize(torch.randn(rows, heads, 128, generator=generator).to(device))
    k, k_scale = quantize(torch.randn(keys, 128, generator=generator).to(device))
    gates = torch.randn(rows, heads, generator=generator).to(device)
    return q, k, k_scale.squeeze(1), fold_weights(gates, q_scale, (128 * heads) ** -0.5)


def ragged_requests(
    lengths: list[tuple[int, int]], device: str = "cpu"
) -> tuple[list[tuple[int, int, int, int]], torch.Tensor, torch.Tensor]:
    """Requests of (queries, keys) one after the other, causal: (host ranges, ks, ke)."""
    requests, ks, ke = [], [], []
    row = key = 0
    for queries, keys in lengths:
        requests.append((row, row + queries, key, key + keys))
        ks += [key] * queries
        ke += [key + max(0, keys - queries + 1 + i) for i in range(queries)]
        row, key = row + queries, key + keys
    return requests, *(torch.tensor(values, dtype=torch.int32, device=device) for values in (ks, ke))


def paged_keys(
    lengths: list[int], pages: int, page_size: int = 64, seed: int = 0, device: str = "cpu"
) -> tuple[PagedCache, torch.Tensor]:
    """An indexer cache of NaN bytes but for the requests' tokens, and its page table, -1 behind a request."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randperm(len(lengths) * pages, generator=generator).view(len(lengths), pages).int()
    shape = (table.numel(), INDEXER_FP8.page_bytes(page_size))
    cache = open_cache(torch.full(shape, 0xFF, dtype=torch.uint8, device=device), INDEXER_FP8, page_size)
    for request, length in enumerate(lengths):
        position = torch.arange(max(0, length))
        slots = table[request, position // page_size].long() * page_size + position % page_size
        rows = torch.randn(len(slots), 128, generator=generator)
        reference_write(cache, rows.to(device), slots.to(device), power_of_two_scales=True)
        table[request, -(-max(0, length) // page_size) :] = -1
    return cache, table.to(device)


def schedule_oracle(last_lens: list[int], next_n: int, num_sms: int, split: int = 256) -> list[list[int]]:
    """DeepGEMM's `sm90_paged_mqa_logits_metadata` (0.1.4), one multiprocessor after the other."""
    blocks = -(-next_n // 2)
    work = [(request * blocks + block, s) for request, length in enumerate(last_lens)
            for block in range(blocks) for s in range(-(-length // split))]  # fmt: skip
    share, rest = divmod(len(work), num_sms)
    starts = [sm * share + max(0, sm - (num_sms - rest)) for sm in range(num_sms)]
    return [list(work[start]) if start < len(work) else [len(last_lens) * blocks, 0] for start in starts] + [
        [len(last_lens) * blocks, 0]
    ]
