"""The compiled cache writers and readers against the reference, bit for bit, and what only a GPU can show."""

from __future__ import annotations

import pytest
import torch

from nsa_plugin.kernels import kv_cache as contract
from nsa_plugin.kernels.kv_cache import PagedCache, allocate_cache, open_cache
from nsa_plugin.kernels.triton import device
from nsa_plugin.kernels.triton import kv_cache as kernels
from tests.kernels import kv_cache_cases as cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(params=["native", "portable"])
def conversion(request, monkeypatch):
    """Both ways of converting fp8: the GPU's instructions, and the integers that older GPUs take."""
    if request.param == "portable":
        monkeypatch.setattr(device, "_emulated", 86)
    elif torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8 conversion")


@pytest.mark.usefixtures("conversion")
@pytest.mark.parametrize(("name", "page_size"), cases.FP8_PAGES)
@pytest.mark.parametrize("power_of_two_scales", [False, True])
@pytest.mark.parametrize("count", [1, 7, 1000, 5000])
def test_writing(name, page_size, count, power_of_two_scales):
    cases.check_write(name, page_size, count, count + page_size, "cuda", power_of_two_scales=power_of_two_scales)


@pytest.mark.usefixtures("conversion")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("count", [9, 1500])
@pytest.mark.parametrize("name", cases.FP8_NAMES)
def test_writing_rows_of_every_float_type_behind_strides(name, count, dtype):
    cases.check_write(name, 64, count, 5, "cuda", dtype=dtype, strided=True, gap=1728)


@pytest.mark.parametrize(("dtype", "rope_dtype"), [(torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)])
@pytest.mark.parametrize("count", [9, 1500])
@pytest.mark.parametrize("name", cases.FP8_NAMES)
def test_writing_rows_in_two_parts(name, count, dtype, rope_dtype):
    strided = dtype is torch.float16
    cases.check_write(name, 64, count, 7, "cuda", dtype=dtype, rope_dtype=rope_dtype, strided=strided)


@pytest.mark.usefixtures("conversion")
@pytest.mark.parametrize(("name", "page_size"), cases.FP8_PAGES)
@pytest.mark.parametrize(("dtype", "gap"), [(torch.bfloat16, 0), (torch.float32, 1728), (torch.float16, 4)])
@pytest.mark.parametrize("count", [3, 3000])
def test_reading(name, page_size, count, dtype, gap):
    cases.check_read(name, page_size, count, page_size + gap, "cuda", dtype=dtype, gap=gap)


@pytest.mark.usefixtures("conversion")
@pytest.mark.parametrize("name", cases.FP8_NAMES)
def test_every_code_and_scale_reads_as_the_reference_reads_it(name):
    cases.check_every_code(name, "cuda")


@pytest.mark.usefixtures("conversion")
@pytest.mark.parametrize("power_of_two_scales", [False, True])
@pytest.mark.parametrize("name", cases.FP8_NAMES)
def test_scale_boundaries(name, power_of_two_scales):
    cases.check_scale_boundaries(name, power_of_two_scales, "cuda")


@pytest.mark.usefixtures("conversion")
def test_every_rounding():
    cases.check_every_rounding("cuda")


@pytest.mark.parametrize("name", ["bf16", *cases.FP8_NAMES])
def test_workspaces_and_slots_beyond_the_cache(name):
    cases.check_workspace(name, "cuda")


@pytest.mark.parametrize("name", ["bf16", *cases.FP8_NAMES])
def test_slot_numbers_beyond_2_to_the_31(name):
    cases.check_far_slots(name, "cuda")


@pytest.mark.parametrize(
    ("cache_dtype", "dim", "rows_dtype", "out_dtype", "split"),
    [
        (torch.bfloat16, 576, torch.bfloat16, torch.bfloat16, 512),
        (torch.bfloat16, 512, torch.float32, torch.float32, 512),
        (torch.float32, 96, torch.float64, torch.bfloat16, 96),
        (torch.float64, 96, torch.float64, torch.float64, 32),
        (torch.float16, 512, torch.bfloat16, torch.float32, 448),
        (torch.float32, 7, torch.float32, torch.float16, 7),
    ],
)
def test_plain_rows(cache_dtype, dim, rows_dtype, out_dtype, split):
    cases.check_plain(cache_dtype, dim, rows_dtype, out_dtype, split, "cuda")


@pytest.mark.parametrize("name", cases.FP8_NAMES)
def test_a_cache_beyond_2_to_the_31_bytes(name):
    page_bytes = cases.fp8_layout(name).page_bytes(64)
    pages = 2**31 // page_bytes + 3
    cache = open_cache(torch.empty(pages, page_bytes, dtype=torch.uint8, device="cuda"), name, 64)
    far, near = torch.arange(64) + 64 * (pages - 1), torch.arange(64)
    rows = cases.random_rows(128, cache.dim, 4)
    kernels.write(cache, rows.cuda(), torch.cat([far, near]).cuda())
    expected = allocate_cache(name, 2, 64)
    contract.reference_write(expected, rows, torch.arange(128))
    both = cases.reference_read_pages(expected, torch.tensor([0, 1]))
    cases.same(kernels.read_pages(cache, torch.tensor([pages - 1, 0], device="cuda")), both)
    cases.same(kernels.read(cache, torch.cat([far, near]).cuda()), both.flatten(0, 1))


def test_a_result_beyond_2_to_the_31_values():
    cache = cases.on(cases.filled("v4_fp8", 3, 64, 2, share=1.0), "cuda")
    order = torch.arange(2**31 // (512 * 64) + 2, device="cuda") % 3
    read = kernels.read_pages(cache, order)
    assert read.numel() > 2**31
    expected = kernels.read_pages(cache, torch.arange(3, device="cuda"))
    assert torch.equal(read[-3:].nan_to_num(), expected[order[-3:]].nan_to_num())
    assert torch.equal(read[:3].nan_to_num(), expected.nan_to_num())


def written(name: str) -> tuple[PagedCache, torch.Tensor, torch.Tensor]:
    cache = allocate_cache(name, 40, 64, device="cuda")
    return cache, cases.random_rows(2000, cache.dim, 3).cuda(), cases.random_slots(2000, 2560, 3).cuda()


@pytest.mark.parametrize("name", ["bf16", *cases.FP8_NAMES])
def test_only_the_result_is_allocated_and_nothing_waits(name):
    cache, rows, slots = written(name)
    pages = torch.arange(40, device="cuda")
    out, paged = torch.empty(2000, cache.dim, device="cuda"), torch.empty(40, 64, cache.dim, device="cuda")

    def everything() -> None:
        kernels.write(cache, rows, slots)
        kernels.write(cache, rows[:, :-64], slots, rope=rows[:, -64:]) if name != "indexer_fp8" else None
        kernels.read(cache, slots, out=out)
        kernels.read_pages(cache, pages, out=paged)

    everything()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("name", ["bf16", *cases.FP8_NAMES])
def test_in_a_cuda_graph(name):
    cache, rows, slots = written(name)
    out = torch.empty(2000, cache.dim, device="cuda")
    kernels.write(cache, rows, slots)
    kernels.read(cache, slots, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.write(cache, rows, slots)
        kernels.read(cache, slots, out=out)
    rows.copy_(cases.random_rows(2000, cache.dim, 9))
    slots.copy_(cases.random_slots(2000, 2560, 9))
    cache.data.zero_()
    graph.replay()
    expected = allocate_cache(name, 40, 64)
    contract.reference_write(expected, rows.cpu(), slots.cpu())
    assert torch.equal(cache.data.cpu(), expected.data)
    cases.same(out, contract.reference_read(expected, slots.cpu(), dtype=torch.float32))


@pytest.mark.parametrize("name", cases.FP8_NAMES)
def test_the_same_bits_every_time(name):
    cache, rows, slots = written(name)
    kernels.write(cache, rows, slots)
    first, read = cache.data.clone(), kernels.read(cache, slots)
    for _ in range(20):
        cache.data.zero_()
        kernels.write(cache, rows, slots)
        assert torch.equal(cache.data, first)
        assert torch.equal(kernels.read(cache, slots), read)
