"""The Triton cache writers and readers against the reference, bit for bit."""

import pytest
import torch

from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.kv_cache import allocate_cache, open_cache
from nsa_plugin.kernels.triton import kv_cache as kernels

from . import kv_cache_cases as cases

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("name", "page_size"), cases.FP8_PAGES)
@pytest.mark.parametrize("power_of_two_scales", [False, True])
def test_writing(name, page_size, power_of_two_scales):
    seed = page_size + power_of_two_scales
    cases.check_write(name, page_size, 21, seed, DEVICE, power_of_two_scales=power_of_two_scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("name", cases.FP8_NAMES)
def test_writing_rows_of_every_float_type_behind_strides(name, dtype):
    cases.check_write(name, 8, 9, 5, DEVICE, dtype=dtype, strided=True, gap=64)


@pytest.mark.parametrize(("dtype", "rope_dtype"), [(torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)])
@pytest.mark.parametrize("name", ["v32_fp8", "v4_fp8", "indexer_fp8"])
def test_writing_rows_in_two_parts(name, dtype, rope_dtype):
    cases.check_write(name, 8, 9, 7, DEVICE, dtype=dtype, rope_dtype=rope_dtype, strided=dtype is torch.float16)


def test_many_rows_take_the_larger_programs(monkeypatch):
    monkeypatch.setattr(kernels, "FEW_ROWS", 4)
    cases.check_write("v4_fp8", 64, 37, 3, DEVICE)
    cases.check_write("v32_fp8", 64, 37, 3, DEVICE)
    cases.check_read("v4_fp8", 64, 37, 2, DEVICE, dtype=torch.bfloat16, gap=0)


@pytest.mark.parametrize(("name", "page_size"), cases.FP8_PAGES)
@pytest.mark.parametrize(("dtype", "gap"), [(torch.bfloat16, 0), (torch.float32, 1728), (torch.float16, 4)])
def test_reading(name, page_size, dtype, gap):
    cases.check_read(name, page_size, 19, page_size + gap, DEVICE, dtype=dtype, gap=gap)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random scales overflow
@pytest.mark.parametrize("name", cases.FP8_NAMES)
def test_every_code_and_scale_reads_as_the_reference_reads_it(name):
    cases.check_every_code(name, DEVICE)


@pytest.mark.parametrize("power_of_two_scales", [False, True])
@pytest.mark.parametrize("name", cases.FP8_NAMES)
def test_scale_boundaries(name, power_of_two_scales):
    cases.check_scale_boundaries(name, power_of_two_scales, DEVICE)


def test_every_rounding():
    cases.check_every_rounding(DEVICE)


@pytest.mark.parametrize("name", ["bf16", *cases.FP8_NAMES])
def test_workspaces_and_slots_beyond_the_cache(name):
    cases.check_workspace(name, DEVICE)


@pytest.mark.regression(15)
@pytest.mark.parametrize("name", ["bf16", *cases.FP8_NAMES])
def test_slot_numbers_beyond_2_to_the_31(name):
    cases.check_far_slots(name, DEVICE)


@pytest.mark.parametrize(
    ("cache_dtype", "dim", "rows_dtype", "out_dtype", "split"),
    [
        (torch.bfloat16, 576, torch.bfloat16, torch.bfloat16, 512),
        (torch.bfloat16, 576, torch.float32, torch.float32, 576),
        (torch.float32, 96, torch.float64, torch.bfloat16, 96),
        (torch.float64, 96, torch.float64, torch.float64, 32),
        (torch.float16, 512, torch.bfloat16, torch.float32, 448),
        (torch.float32, 7, torch.float32, torch.float16, 7),
    ],
)
def test_plain_rows(cache_dtype, dim, rows_dtype, out_dtype, split):
    cases.check_plain(cache_dtype, dim, rows_dtype, out_dtype, split, DEVICE)


def test_empty_inputs():
    for name in ("bf16", *cases.FP8_NAMES):
        for pages in (0, 1):
            cache = allocate_cache(name, pages, 4, device=DEVICE)
            before = cache.data.clone()
            kernels.write(cache, torch.zeros(0, cache.dim, device=DEVICE), torch.zeros(0, dtype=torch.int32).to(DEVICE))
            kernels.write(cache, torch.ones(2, cache.dim, device=DEVICE), torch.tensor([-1, -1], device=DEVICE))
            assert torch.equal(cache.data, before)
            nothing = torch.zeros(0, dtype=torch.int64, device=DEVICE)
            assert kernels.read(cache, nothing).shape == (0, cache.dim)
            assert kernels.read_pages(cache, nothing).shape == (0, 4, cache.dim)
            if name != "bf16":
                assert kernels.read_codes(cache, nothing)[0].shape == (0, cache.layout.fp8_dim)
            assert (kernels.read(cache, torch.tensor([-1, 4], device=DEVICE)) == 0).all()


def test_codes_of_a_slot_outside_the_cache_are_zero():
    cache = cases.on(cases.filled("v4_fp8", 2, 4, 1, share=1.0), DEVICE)
    codes, scales = kernels.read_codes(cache, torch.tensor([-1, 8], device=DEVICE))
    assert (codes.view(torch.uint8) == 0).all()
    assert (scales == 0).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: kernels.write(c, torch.zeros(2, 575), torch.arange(2)), "rows has shape"),
        (lambda c: kernels.write(c, torch.zeros(2, 576), torch.arange(3)), "slot_mapping has 3 slots for 2"),
        (lambda c: kernels.write(c, torch.zeros(2, 576), torch.zeros(2)), "slot_mapping has dtype float32"),
        (lambda c: kernels.write(c, torch.zeros(2, 512), torch.arange(2), rope=torch.zeros(3, 64)), "rope has"),
        (lambda c: kernels.write(c, torch.zeros(2, 576), torch.arange(2), rope=torch.zeros(2, 64)), "rows has"),
        (lambda c: kernels.read(c, torch.zeros(2)), "slots has dtype float32"),
        (lambda c: kernels.read(c, torch.tensor([0]), out=torch.zeros(1, 575)), "out has shape"),
        (lambda c: kernels.read(c, torch.tensor([0]), dtype=torch.int32), "dtype is torch.int32"),
        (lambda c: kernels.read_pages(c, torch.zeros(1, 1, dtype=torch.int32)), "pages has shape"),
        (lambda c: kernels.read_codes(allocate_cache("bf16", 1, 1), torch.tensor([0])), "no fp8 codes"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(KernelArgumentError, match=message):
        call(allocate_cache("v32_fp8", 2, 4))


def test_a_cache_at_an_odd_address_is_refused():
    memory = torch.zeros(2 * 656 * 4 + 1, dtype=torch.uint8, device=DEVICE)
    cache = open_cache(memory[1:].view(2, 4, 656), "v32_fp8")
    with pytest.raises(KernelArgumentError, match="needs multiples of 4"):
        kernels.read(cache, torch.tensor([0], device=DEVICE))
