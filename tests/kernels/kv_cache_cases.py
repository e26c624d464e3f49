"""Cases of the cache writers and readers, shared by the interpreted tests and the GPU's.

Each check runs the Triton kernels on `device` and the reference on the CPU, over the same bytes, and
compares every byte of the cache and every value bit for bit.
"""

from __future__ import annotations

import math

import torch

from nsa_plugin.kernels import kv_cache as contract
from nsa_plugin.kernels.kv_cache import PagedCache, open_cache
from nsa_plugin.kernels.triton import kv_cache as kernels
from nsa_plugin.layouts import Fp8Layout, get_layout

from .oracles import noncontiguous

FP8_NAMES = ["v32_fp8", "v4_fp8", "indexer_fp8"]
FP8_PAGES = [("v32_fp8", 64), ("v32_fp8", 1), ("v4_fp8", 64), ("v4_fp8", 256), ("v4_fp8", 2), ("indexer_fp8", 64)]


def fp8_layout(name: str) -> Fp8Layout:
    layout = get_layout(name)
    assert isinstance(layout, Fp8Layout)
    return layout


def poisoned(layout: str, num_pages: int, page_size: int, gap: int = 0) -> torch.Tensor:
    """Memory of a cache on the CPU, every byte 0xFF (NaN in every field), with `gap` bytes between pages."""
    page_bytes = fp8_layout(layout).page_bytes(page_size) + gap
    return torch.full((num_pages, page_bytes), 0xFF, dtype=torch.uint8)


def random_rows(count: int, dim: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows whose tiles differ in magnitude by orders; among them zeros, tiny tiles, and a constant tile."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-20, 8, (count, dim // 64, 1), generator=generator).float()
    exponents = exponents.clamp(min=-8) if dtype is torch.float16 else exponents
    rows = torch.randn(count, dim // 64, 64, generator=generator) * torch.exp2(exponents)
    rows[torch.rand(count, dim // 64, generator=generator) < 0.1] = 0.0
    rows[:1, :1] = 448.0
    return rows.view(count, dim).to(dtype)


def random_slots(count: int, num_slots: int, seed: int) -> torch.Tensor:
    """Distinct int64 slots in random order, some replaced by negative ones but not the first."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(num_slots, generator=generator)[:count]
    slots[1:][torch.rand(max(len(slots) - 1, 0), generator=generator) < 0.15] = -1
    slots[1:2] = -(2**31)
    return slots


def filled(layout: str, num_pages: int, page_size: int, seed: int, share: float = 0.7, gap: int = 0) -> PagedCache:
    """A cache on the CPU with a share of its slots written and NaN bytes everywhere else."""
    memory = poisoned(layout, num_pages, page_size, gap)
    cache = open_cache(memory, layout, page_size)
    slots = random_slots(max(1, int(share * cache.num_slots)), cache.num_slots, seed)
    contract.reference_write(cache, random_rows(len(slots), cache.dim, seed), slots, power_of_two_scales=seed % 2 == 0)
    return cache


def on(cache: PagedCache, device: str) -> PagedCache:
    """The same cache in another device's memory, with the same distance between pages."""
    stride = cache.data.stride(0)
    memory = cache.data.as_strided((cache.num_pages * stride - (stride - cache.data.shape[1]),), (1,))
    moved = torch.empty(cache.num_pages * stride, dtype=torch.uint8, device=device)
    moved[: len(memory)] = memory.to(device)
    return open_cache(moved.view(cache.num_pages, stride), cache.layout, cache.page_size)


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bit for bit, but that one NaN is like another."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    actual = actual.cpu()
    if actual.dtype is torch.float8_e4m3fn:
        actual, expected = actual.view(torch.uint8), expected.view(torch.uint8)
    if actual.is_floating_point():
        assert torch.equal(actual.isnan(), expected.isnan())
        assert torch.equal(actual.signbit() & ~actual.isnan(), expected.signbit() & ~expected.isnan())
        actual, expected = actual.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0)
    assert torch.equal(actual, expected)


def check_write(
    layout: str,
    page_size: int,
    count: int,
    seed: int,
    device: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    rope_dtype: torch.dtype | None = None,
    power_of_two_scales: bool = False,
    strided: bool = False,
    gap: int = 0,
) -> None:
    """Random rows at random slots of a poisoned cache: the same bytes as the reference everywhere."""
    num_pages = -(-count // page_size) + 2
    memory = poisoned(layout, num_pages, page_size, gap)
    moved = memory.clone().to(device)
    dim = fp8_layout(layout).dim
    rows = random_rows(count + 3, dim, seed, dtype)
    slots = random_slots(count, num_pages * page_size, seed).to(torch.int32 if seed % 2 else torch.int64)
    rope = None
    if rope_dtype is not None:
        rope = random_rows(count + 3, 64, seed + 1, rope_dtype).unsqueeze(1)
        rows = rows[:, :-64]
    if strided:
        rows, slots = noncontiguous(rows), noncontiguous(slots)
        rope = None if rope is None else noncontiguous(rope)
    wanted = {"power_of_two_scales": power_of_two_scales}
    contract.reference_write(open_cache(memory, layout, page_size), rows, slots, rope=rope, **wanted)
    moved_rows, moved_slots = to_device(rows, device), to_device(slots, device)
    moved_rope = None if rope is None else to_device(rope, device)
    kernels.write(open_cache(moved, layout, page_size), moved_rows, moved_slots, rope=moved_rope, **wanted)
    assert torch.equal(moved.cpu(), memory)
    assert not torch.equal(memory, torch.full_like(memory, 0xFF))


def to_device(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """The tensor on a device; strided as `noncontiguous` makes it if it is so here."""
    if tensor.is_contiguous() or device == "cpu":
        return tensor.to(device)
    wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), -1, device=device).to(tensor.dtype)
    wide[..., 1::2] = tensor.to(device)
    return wide[..., 1::2]


def reference_read_pages(
    cache: PagedCache, pages: torch.Tensor, *, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Whole pages: pages [n] -> [n, page_size, cache.dim]; zeros for a negative page."""
    slots = pages[:, None].long() * cache.page_size + torch.arange(cache.page_size)
    return contract.reference_read(cache, torch.where(pages[:, None] < 0, -1, slots), dtype=dtype)


def check_read(
    layout: str, page_size: int, count: int, seed: int, device: str, *, dtype: torch.dtype, gap: int
) -> None:
    """Slots, pages and codes of a half-written cache, NaN where nothing was written."""
    cache = filled(layout, max(3, -(-count // page_size)), page_size, seed, gap=gap)
    moved = on(cache, device)
    slots = random_slots(count, cache.num_slots, seed + 1).to(torch.int32 if seed % 2 else torch.int64)
    same(kernels.read(moved, slots.to(device), dtype=dtype), contract.reference_read(cache, slots, dtype=dtype))
    pages = random_slots(cache.num_pages, cache.num_pages, seed + 2)
    expected = reference_read_pages(cache, pages, dtype=dtype)
    same(kernels.read_pages(moved, pages.to(device), dtype=dtype), expected)
    slots = slots[slots >= 0]
    for actual, wanted in zip(
        kernels.read_codes(moved, slots.to(device)), contract.reference_read_codes(cache, slots), strict=True
    ):
        same(actual, wanted)


def check_workspace(layout: str, device: str) -> None:
    """Reading into a part of a wider workspace, slots of two dimensions, strided ones, and what lies beyond."""
    cache = filled(layout, 3, 4, 6, share=1.0) if layout != "bf16" else contract.allocate_cache("bf16", 3, 4)
    if layout == "bf16":
        contract.reference_write(cache, random_rows(12, 576, 1), torch.arange(12))
    moved = on(cache, device) if layout != "bf16" else open_cache(cache.data.to(device), layout)
    slots = torch.tensor([[11, 0, 3], [3, -1, 7]])
    expected = contract.reference_read(cache, slots)
    workspace = torch.full((2, 3, cache.dim + 9), math.nan, dtype=torch.bfloat16, device=device)
    view = workspace[..., 4:-5]
    assert kernels.read(moved, to_device(noncontiguous(slots), device), out=view) is view
    same(view, expected)
    assert workspace[..., :4].isnan().all()
    assert workspace[..., -5:].isnan().all()
    # Rows that no single stride describes.
    turned = torch.full((3, 2, cache.dim), math.nan, dtype=torch.bfloat16, device=device).transpose(0, 1)
    kernels.read(moved, slots.to(device), out=turned)
    same(turned, expected)
    # The reference refuses a slot beyond the cache; on the device it is like a negative one.
    beyond = torch.tensor([12, 2**31 - 1, 2**40, 3], device=device)
    same(kernels.read(moved, beyond)[:3], torch.zeros(3, cache.dim, dtype=torch.bfloat16))
    same(kernels.read(moved, beyond)[3], contract.reference_read(cache, torch.tensor([3]))[0])
    before = moved.data.clone()
    kernels.write(moved, torch.ones(3, cache.dim, device=device), beyond[:3])
    assert torch.equal(moved.data.view(torch.uint8), before.view(torch.uint8))


def check_far_slots(layout: str, device: str) -> None:
    """Slot numbers beyond 2 ** 31: all pages are one memory, and 48 does not divide 2 ** 32."""
    slot = torch.tensor([48 * 2**26 + 5])
    if layout == "bf16":
        memory = torch.full((1, 48, 64), math.nan, device=device)
        cache, one = open_cache(memory.expand(2**27, 48, 64), "bf16"), torch.arange(64.0).unsqueeze(0)
        kernels.write(cache, one.to(device), slot.to(device))
        assert int((~memory.isnan()).sum()) == 64
        same(memory[0, 5], one[0])
        same(kernels.read(cache, slot.to(device), dtype=torch.float32), one)
        same(kernels.read_pages(cache, (slot // 48).to(device), dtype=torch.float32)[0, 5], one[0])
        return
    expected = poisoned(layout, 1, 48)
    memory = expected.clone().to(device)
    row = random_rows(1, fp8_layout(layout).dim, 3)
    contract.reference_write(open_cache(expected, layout, 48), row, torch.tensor([5]))
    cache = open_cache(memory.expand(2**27, -1), layout, 48)
    kernels.write(cache, row.to(device), slot.to(device))
    assert torch.equal(memory.cpu(), expected)
    wanted = contract.reference_read(open_cache(expected, layout, 48), torch.tensor([5]))
    same(kernels.read(cache, slot.to(device)), wanted)
    same(kernels.read_pages(cache, (slot // 48).to(device))[0, 5], wanted[0])


def check_plain(
    cache_dtype: torch.dtype, dim: int, rows_dtype: torch.dtype, out_dtype: torch.dtype, split: int, device: str
) -> None:
    """Plain rows of any float type and width, between rows of another layer, in one or two parts."""
    expected = torch.full((3, 5, 2, dim), math.nan, dtype=cache_dtype)
    memory = expected.clone().to(device)
    cache, moved = open_cache(expected[:, :, 1], "bf16"), open_cache(memory[:, :, 1], "bf16")
    rows = torch.randn(6, dim, generator=torch.Generator().manual_seed(dim)).to(rows_dtype)
    slots = torch.tensor([14, -1, 5, 0, -7, 9], dtype=torch.int32)
    first, rope = (rows, None) if split == dim else (rows[:, :split], rows[:, None, split:].float())
    contract.reference_write(cache, first, slots, rope=rope)
    kernels.write(moved, first.to(device), slots.to(device), rope=None if rope is None else rope.to(device))
    same(memory, expected)
    slots = torch.tensor([[14, -1, 0], [3, 5, 9]])
    same(kernels.read(moved, slots.to(device), dtype=out_dtype), contract.reference_read(cache, slots, dtype=out_dtype))
    pages = torch.tensor([1, -1], dtype=torch.int32)
    wanted = reference_read_pages(cache, pages, dtype=out_dtype)
    same(kernels.read_pages(moved, pages.to(device), dtype=out_dtype), wanted)


def check_every_code(layout: str, device: str) -> None:
    """All 256 fp8 bytes, and all 256 ue8m0 scales, read as the reference reads them."""
    spec = fp8_layout(layout)
    memory = torch.randint(0, 256, (2, spec.page_bytes(256)), generator=torch.Generator().manual_seed(1)).byte()
    rows = memory[:, : 256 * spec.data_stride].unflatten(1, (256, spec.data_stride))
    rows[0, :, :64] = torch.arange(256).byte().unsqueeze(1)
    if spec.scales_after_page and spec.scale_bytes == 1:
        scales = memory[:, 256 * spec.data_stride : 256 * spec.row_bytes].unflatten(1, (256, spec.scale_slot_bytes))
        scales[1] = torch.arange(256).byte().unsqueeze(1)
    cache = open_cache(memory, layout, 256)
    slots = torch.arange(512)
    expected = contract.reference_read(cache, slots, dtype=torch.float32)
    same(kernels.read(on(cache, device), slots.to(device), dtype=torch.float32), expected)


def check_scale_boundaries(layout: str, power_of_two_scales: bool, device: str) -> None:
    """Largest magnitudes on and beside those whose scale is a power of two, the floor, and tiles of zeros."""
    spec = fp8_layout(layout)
    edges = 448.0 * torch.exp2(torch.arange(-30.0, 30.0))
    edges = torch.cat([edges, torch.tensor([0.0, 1e-4, spec.amax_floor, 2.0**-126, 3e-38])])
    largest = torch.cat([edges, edges.nextafter(edges + edges), edges.nextafter(torch.zeros(()))])
    rows = torch.linspace(-1, 1, spec.dim).expand(len(largest), -1) * largest.unsqueeze(1)
    rows[:, : spec.fp8_dim : spec.tile] = largest.unsqueeze(1)
    expected = poisoned(layout, 1, len(rows))
    memory = expected.clone().to(device)
    slots = torch.arange(len(rows))
    wanted = {"power_of_two_scales": power_of_two_scales}
    contract.reference_write(open_cache(expected, layout, len(rows)), rows, slots, **wanted)
    kernels.write(open_cache(memory, layout, len(rows)), rows.to(device), slots.to(device), **wanted)
    assert torch.equal(memory.cpu(), expected)


def check_every_rounding(device: str) -> None:
    """Quotients around each boundary between two codes, and the ties themselves, become the reference's codes."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[1:] + codes[:-1]) / 2
    near = torch.cat([codes, ties, ties.nextafter(ties + 1), ties.nextafter(ties - 1)])
    values = torch.cat([near, -near, torch.zeros(128 - 2 * len(near) % 128)])
    rows = values.view(-1, 128)
    rows[:, 127] = 448.0  # the tile's scale is 1
    expected = poisoned("indexer_fp8", 1, len(rows))
    memory = expected.clone().to(device)
    slots = torch.arange(len(rows))
    contract.reference_write(open_cache(expected, "indexer_fp8", len(rows)), rows, slots)
    kernels.write(open_cache(memory, "indexer_fp8", len(rows)), rows.to(device), slots.to(device))
    assert torch.equal(memory.cpu(), expected)
