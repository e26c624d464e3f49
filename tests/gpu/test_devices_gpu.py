"""The probe on a real GPU, and the capability tables against the installed kernels.

A library that is not installed is skipped with the probe's own reason; nothing here is faked.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest

from nsa_plugin.decision.dispatch import decide
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.libraries.capabilities import Capability, Op
from nsa_plugin.libraries.devices import DeviceProfile
from nsa_plugin.libraries.manifest import MANIFEST
from nsa_plugin.libraries.probe import probe
from nsa_plugin.settings import Settings

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")]

PAGE = 64
ROW_BYTES = 656
KV_TOKENS = 4096


@pytest.fixture(scope="module")
def device() -> DeviceProfile:
    return probe()


def installed(device: DeviceProfile, name: str, module: str) -> object:
    """The module of a library, or a skip that says why it is not there."""
    library = device.libraries[name]
    if not library.available:
        pytest.skip(f"{name}: {library.reason}")
    if library.module != module:
        pytest.skip(f"{name} comes from {library.module}; this test calls {module}")
    return importlib.import_module(module)


def capability(device: DeviceProfile, name: str, op: Op, layout: str | None = None) -> Capability:
    found = device.capability(name, op, layout)
    assert found is not None, f"{name} has no {op} kernel for {layout} on {device.where}"
    return found


def test_the_gpu_is_described_as_cuda_sees_it(device: DeviceProfile) -> None:
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    assert (device.kind, device.name) == ("cuda", properties.name)
    assert device.sm == 10 * properties.major + properties.minor
    assert device.memory_total == total
    assert 0 < device.memory_free <= total
    assert abs(device.memory_free - free) < total // 2
    assert device.smem_per_block == properties.shared_memory_per_block_optin


def test_an_h200_is_sm90_and_grants_a_block_227_kib(device: DeviceProfile) -> None:
    if "H200" not in device.name:
        pytest.skip(f"this is {device.name}")
    assert (device.sm, device.smem_per_block) == (90, 227 << 10)
    assert device.memory_total > 130 << 30


def test_several_h200s_are_linked(device: DeviceProfile) -> None:
    if "H200" not in device.name or torch.cuda.device_count() < 2:
        pytest.skip(f"{torch.cuda.device_count()} GPU, {device.name}")
    pytest.importorskip("pynvml")
    assert device.nvlink


def test_every_library_is_there_or_says_why_not(device: DeviceProfile) -> None:
    assert set(device.libraries) == set(MANIFEST)
    for library in device.libraries.values():
        if library.available:
            assert library.version
            assert library.capabilities
            assert importlib.util.find_spec(library.module.split(".")[0]) is not None
        else:
            assert library.reason
            assert library.capabilities == ()
    assert device.libraries["reference"].available


def test_what_is_installed_decides_a_prefill(device: DeviceProfile) -> None:
    """Whatever is installed, the plan names an installed library and the reference always can."""
    model = ModelShape(attn_tp_size=8)
    batch = BatchShape.from_lengths(Phase.EXTEND, [4096], [65536])
    plan = decide(model, batch, device, Settings(prefill_backend="reference", decode_backend="reference"))
    assert plan.provider == "reference"
    if device.libraries["flash_mla"].available and device.libraries["deep_gemm"].available:
        few = decide(replace(model, kv_layout="v32_fp8"), batch, device, Settings())
        quickest = ("cuda", "cuda") if device.libraries["cuda"].available else ("flash_mla", "deep_gemm")
        assert (few.provider, few.indexer.provider) == quickest, "16 heads"
        every = decide(replace(model, kv_layout="v32_fp8", attn_tp_size=1), batch, device, Settings())
        assert (every.provider, every.indexer.provider) == ("flash_mla", quickest[1]), "128 heads"


def flash_mla_decode(flash_mla: object, rows: int, heads: int, topk: int = 2048) -> object:
    """flash_mla_with_kvcache over a V3.2 fp8 cache of zeros."""
    cache = torch.zeros(KV_TOKENS // PAGE, PAGE, 1, ROW_BYTES, dtype=torch.uint8, device="cuda")
    indices = torch.arange(topk, dtype=torch.int32, device="cuda").expand(rows, 1, topk).contiguous()
    query = torch.zeros(rows, 1, heads, 576, dtype=torch.bfloat16, device="cuda")
    metadata, _ = flash_mla.get_mla_metadata()  # type: ignore[attr-defined]
    out, _ = flash_mla.flash_mla_with_kvcache(  # type: ignore[attr-defined]
        query, cache, None, None, 512, metadata, is_fp8_kvcache=True, indices=indices, use_legacy=True
    )
    torch.cuda.synchronize()
    return out


def flash_mla_prefill(flash_mla: object, heads: int, dim: int = 576, topk: int = 2048) -> object:
    """flash_mla_sparse_fwd over 128 query rows of zeros."""
    rows = 128
    kv = torch.zeros(KV_TOKENS, 1, dim, dtype=torch.bfloat16, device="cuda")
    indices = torch.arange(topk, dtype=torch.int32, device="cuda").expand(rows, 1, topk).contiguous()
    query = torch.zeros(rows, heads, dim, dtype=torch.bfloat16, device="cuda")
    out, _, _ = flash_mla.flash_mla_sparse_fwd(query, kv, indices, 1.0, use_legacy=True)  # type: ignore[attr-defined]
    torch.cuda.synchronize()
    return out


def test_flash_mla_decode_takes_the_rows_of_the_table(device: DeviceProfile) -> None:
    flash_mla = installed(device, "flash_mla", "flash_mla")
    limit = capability(device, "flash_mla", Op.SPARSE_MLA_DECODE, "v32_fp8").max_rows
    for rows in (1, 11623, 16384) if limit is None else (1, limit):
        assert flash_mla_decode(flash_mla, rows, heads=64).shape == (rows, 1, 64, 512)  # type: ignore[attr-defined]


@pytest.mark.parametrize("heads", [1, 16, 32, 64, 96, 128])
def test_flash_mla_decode_takes_the_heads_of_the_table(device: DeviceProfile, heads: int) -> None:
    flash_mla = installed(device, "flash_mla", "flash_mla")
    given = capability(device, "flash_mla", Op.SPARSE_MLA_DECODE, "v32_fp8").heads_given(heads)
    assert given is not None
    assert flash_mla_decode(flash_mla, 2, given).shape == (2, 1, given, 512)  # type: ignore[attr-defined]
    if given != heads:
        with pytest.raises((RuntimeError, AssertionError)):
            flash_mla_decode(flash_mla, 2, heads)


@pytest.mark.parametrize("dim", [576, 512], ids=["v3.2", "v4"])
@pytest.mark.parametrize("heads", [16, 64, 96, 128])
def test_flash_mla_prefill_takes_the_heads_of_the_table(device: DeviceProfile, heads: int, dim: int) -> None:
    flash_mla = installed(device, "flash_mla", "flash_mla")
    given = capability(device, "flash_mla", Op.SPARSE_MLA_PREFILL, "bf16").heads_given(heads)
    assert given is not None
    assert flash_mla_prefill(flash_mla, given, dim).shape == (128, given, 512)  # type: ignore[attr-defined]
    if given != heads and device.sm == 90:  # on SM100 newer builds take 64 besides, which the table does not use
        with pytest.raises((RuntimeError, AssertionError)):
            flash_mla_prefill(flash_mla, heads, dim)


def test_flash_mla_prefill_takes_no_more_than_the_table_says(device: DeviceProfile) -> None:
    flash_mla = installed(device, "flash_mla", "flash_mla")
    assert capability(device, "flash_mla", Op.SPARSE_MLA_PREFILL, "bf16").heads_given(129) is None
    with pytest.raises(RuntimeError, match="h_q"):
        flash_mla_prefill(flash_mla, 192)


@pytest.mark.parametrize("topk", [512, 640, 2048])
def test_flash_mla_takes_selections_in_the_tables_multiples(device: DeviceProfile, topk: int) -> None:
    flash_mla = installed(device, "flash_mla", "flash_mla")
    prefill = capability(device, "flash_mla", Op.SPARSE_MLA_PREFILL, "bf16")
    decode = capability(device, "flash_mla", Op.SPARSE_MLA_DECODE, "v32_fp8")
    assert topk % prefill.topk_multiple == 0 == topk % decode.topk_multiple
    heads = prefill.heads_given(1)
    assert heads is not None
    flash_mla_prefill(flash_mla, heads, topk=topk)
    flash_mla_decode(flash_mla, 2, 64, topk=topk)


@pytest.mark.parametrize("topk", [100, 192])
def test_flash_mla_refuses_other_selections(device: DeviceProfile, topk: int) -> None:
    flash_mla = installed(device, "flash_mla", "flash_mla")
    if device.sm != 90:
        pytest.skip("the multiples were read off the SM90 kernels")
    for op, layout, call in (
        (Op.SPARSE_MLA_PREFILL, "bf16", lambda: flash_mla_prefill(flash_mla, 64, topk=topk)),
        (Op.SPARSE_MLA_DECODE, "v32_fp8", lambda: flash_mla_decode(flash_mla, 2, 64, topk=topk)),
    ):
        if topk % capability(device, "flash_mla", op, layout).topk_multiple:
            with pytest.raises(RuntimeError, match="topk"):
                call()
        else:
            call()


def test_deep_gemm_schedules_the_rows_of_the_table(device: DeviceProfile) -> None:
    deep_gemm = installed(device, "deep_gemm", "deep_gemm")
    limit = capability(device, "deep_gemm", Op.INDEXER_METADATA).max_rows
    assert limit is not None
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for rows in (1, limit):
        lengths = torch.full((rows, 1), 4096, dtype=torch.int32, device="cuda")
        schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE, processors)  # type: ignore[attr-defined]
        torch.cuda.synchronize()
        assert schedule.shape == (processors + 1, 2)


@pytest.mark.parametrize("heads", [32, 64])
def test_deep_gemm_scores_the_heads_of_the_table(device: DeviceProfile, heads: int) -> None:
    deep_gemm = installed(device, "deep_gemm", "deep_gemm")
    assert capability(device, "deep_gemm", Op.INDEXER_TOPK).heads_given(heads) == heads
    rows, keys = 128, 1024
    query = torch.zeros(rows, heads, 128, device="cuda").to(torch.float8_e4m3fn)
    key = torch.zeros(keys, 128, device="cuda").to(torch.float8_e4m3fn), torch.ones(keys, device="cuda")
    weights = torch.ones(rows, heads, device="cuda")
    start = torch.zeros(rows, dtype=torch.int32, device="cuda")
    logits = deep_gemm.fp8_mqa_logits(query, key, weights, start, start + keys)  # type: ignore[attr-defined]
    torch.cuda.synchronize()
    assert logits.shape == (rows, keys)
    assert not logits.any()
