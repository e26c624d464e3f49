"""Sparse MLA on a GPU: every provider that the machine has, against the references on the same device.

A provider may refuse a case (`KernelArgumentError`) only as `MAY_REFUSE` says. Shapes are a sample of
FlashMLA's published grid; of many tokens a part is compared.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from sm90 import needs_sm90

from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.cuda import sparse_mla, sparse_mla_rows
from nsa_plugin.kernels.sparse_mla import decode_op, reference_decode, reference_prefill
from nsa_plugin.kernels.triton import device
from tests.kernels.oracles import HEAD_COUNTS
from tests.kernels.sparse_mla_cases import (
    assert_same,
    decode_case,
    layouts_of,
    make_cache,
    make_indices,
    make_sink,
    portable_forms,
    prefill_case,
    randn,
    some_tokens,
    strided,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Without bulk copies and clusters, in 99 KiB of shared memory; SM89 converts fp8 by an instruction, SM86 in integers.
EMULATED = {"cuda as on SM86": 86, "cuda as on SM89": 89}
PROVIDERS = ("triton", "cuda", *EMULATED, "flash_mla")
MODULES = {
    "triton": "nsa_plugin.kernels.triton.sparse_mla",
    "cuda": "nsa_plugin.kernels.cuda.attention",
    **dict.fromkeys(EMULATED, "nsa_plugin.kernels.cuda.attention"),
    "flash_mla": "nsa_plugin.kernels.providers.flash_mla",
}


def cuda_reads(case: dict[str, Any]) -> bool:
    """Whether a case's caches are ones that provider cuda reads: of fp8 records two, of bfloat16 rows one of V3.2."""
    layouts = layouts_of(case)
    rows = layouts <= {"rows", "bf16"} and case["q"].shape[-1] == 576
    return layouts <= {"v32_fp8", "v4_fp8"} or (rows and {"extra_kv", "extra_cache"}.isdisjoint(case))


# Whether a provider may refuse a case. flash_mla's limits are the library's and have tests of their own.
MAY_REFUSE: dict[str, Callable[[dict[str, Any]], bool]] = {
    "triton": lambda case: False,
    "cuda": lambda case: not cuda_reads(case),
    **dict.fromkeys(EMULATED, lambda case: not cuda_reads(case)),
    "flash_mla": lambda case: True,
}

V4_EXTRA = ("v4_fp8", 8192, 512, 64)
COMPARED_TOKENS = 24


@pytest.fixture(autouse=True)
def exact_float32_matmul():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(params=PROVIDERS)
def provider(request) -> Iterator[str]:
    """A provider that this machine can run, or a skip with the reason."""
    name = request.param
    capability = torch.cuda.get_device_capability()
    if name == "cuda" and capability[0] in (10, 11):
        pytest.skip(f"provider cuda is not for SM{capability[0]}{capability[1]}")
    if name == "flash_mla":
        if capability[0] not in (9, 10):
            pytest.skip(f"flash_mla has these kernels for SM90 and SM100, not for SM{capability[0]}{capability[1]}")
        if importlib.util.find_spec("flash_mla") is None:
            pytest.skip("flash_mla is not installed")
        if not importlib.import_module("flash_mla").has_legacy():
            pytest.skip("this flash_mla was built without its legacy kernels, which read these caches")
    with emulating(EMULATED[name]) if name in EMULATED else nullcontext():
        yield name


@pytest.fixture(params=EMULATED.values(), ids=EMULATED)
def emulated(request) -> Iterator[None]:
    with emulating(request.param):
        yield


@contextmanager
def emulating(sm: int) -> Iterator[None]:
    """Kernels act as on an SM version, or a skip if the GPU cannot."""
    major, minor = torch.cuda.get_device_capability()
    if major in (10, 11):
        pytest.skip("provider cuda is not for SM100 to SM119")
    if 10 * major + minor < sm:
        pytest.skip(f"SM{major}{minor} cannot emulate SM{sm}")
    device.emulate(sm)
    yield
    device.emulate(None)


def run(provider: str, op: str, case: dict[str, Any], **options: Any) -> Any:
    """The result of a provider's op, or a skip if it may refuse the case and does."""
    function = getattr(importlib.import_module(MODULES[provider]), op)
    try:
        return function(**case, **options)
    except KernelArgumentError as error:
        if not MAY_REFUSE[provider](case):
            raise
        pytest.skip(f"provider {provider}: {error}")


def check_prefill(provider: str, case: dict[str, Any]) -> None:
    result = run(provider, "prefill", case)
    assert result.out.dtype == torch.bfloat16
    tokens = case["q"].shape[0]
    rows = torch.arange(tokens, device="cuda")
    if tokens > COMPARED_TOKENS:
        order = torch.randperm(tokens, generator=torch.Generator().manual_seed(tokens)).cuda()
        # The first rows and the last are those with special indices and lengths.
        rows = torch.cat([rows[:3], rows[-1:], order[: COMPARED_TOKENS - 4]])
        assert not result.out.isnan().any()
        assert not result.lse.isnan().any()
    expected = reference_prefill(**some_tokens(case, rows), out_dtype=torch.float32)
    assert_same(type(expected)(*(part[rows] for part in result)), expected)


def check_decode(provider: str, case: dict[str, Any]) -> None:
    result = run(provider, "decode", case)
    expected = reference_decode(**case, out_dtype=torch.float32)
    assert result.out.dtype == torch.bfloat16
    assert_same(result, expected)


@pytest.mark.parametrize("dim", [576, 512])
@pytest.mark.parametrize(
    ("tokens", "heads", "slots", "topk", "plain"),
    [
        (1, 128, 95, 128, False),
        (62, 64, 95, 128, True),
        (213, 64, 2048, 256, False),
        (62, 128, 64, 8192, False),
        (1, 64, 8192, 2048, False),
        (1024, 64, 32, 2048, False),
        (4096, 64, 8192, 2048, False),
        (1024, 128, 65536, 2048, True),
        (4096, 16, 65536, 2048, False),
        (213, 5, 2048, 333, False),
    ],
)
def test_prefill_over_rows(provider, tokens, heads, slots, topk, plain, dim):
    case = prefill_case(
        tokens=tokens, heads=heads, slots=slots, topk=topk, dim=dim, with_length=not plain, with_sink=not plain
    )
    check_prefill(provider, case)


@pytest.mark.parametrize(
    ("layout", "page_size", "tokens", "heads", "slots", "topk"),
    [
        ("bf16", 64, 62, 16, 2048, 256),
        ("v32_fp8", 64, 4096, 16, 65536, 2048),
        ("v32_fp8", 64, 213, 128, 8192, 2048),
        ("v32_fp8", 256, 62, 8, 2048, 1000),
        ("v32_fp8", 1, 62, 3, 2048, 77),
        ("v4_fp8", 64, 213, 64, 8192, 640),
        ("v4_fp8", 256, 62, 20, 2048, 130),
    ],
)
@pytest.mark.parametrize("plain", [False, True])
def test_prefill_straight_from_a_cache(provider, layout, page_size, tokens, heads, slots, topk, plain):
    case = prefill_case(
        tokens=tokens,
        heads=heads,
        layout=layout,
        slots=slots,
        topk=topk,
        page_size=page_size,
        with_length=not plain,
        with_sink=not plain,
    )
    check_prefill(provider, case)


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("tokens", [3, 1024])
def test_prefill_over_window_and_selected(provider, tokens, heads):
    case = prefill_case(
        tokens=tokens, heads=heads, layout="v4_fp8", slots=16384, topk=128, page_size=256, extra=V4_EXTRA
    )
    check_prefill(provider, case)


@pytest.mark.parametrize(
    ("layout", "extra"),
    [
        ("rows", ("rows", 512, 45, 1)),
        ("rows", ("v32_fp8", 512, 145, 64)),
        ("v32_fp8", ("v32_fp8", 512, 145, 64)),
        ("bf16", ("v4_fp8", 512, 145, 64)),
    ],
)
def test_a_second_cache_of_any_layout(provider, layout, extra):
    dim = 512 if extra[0] == "v4_fp8" else 576
    check_prefill(provider, prefill_case(tokens=5, heads=16, layout=layout, slots=512, topk=200, dim=dim, extra=extra))


@pytest.mark.parametrize("heads", HEAD_COUNTS)
@pytest.mark.parametrize("layout", ["rows", "v32_fp8"])
def test_prefill_of_any_number_of_heads(provider, layout, heads):
    check_prefill(provider, prefill_case(tokens=9, heads=heads, layout=layout, slots=704, topk=200))


@pytest.mark.parametrize("heads", HEAD_COUNTS)
@pytest.mark.parametrize("layout", ["v32_fp8", "v4_fp8", "bf16"])
def test_decode_of_any_number_of_heads(provider, layout, heads):
    extra = V4_EXTRA if layout == "v4_fp8" else None
    with_length = layout == "v4_fp8" or provider != "flash_mla"
    check_decode(
        provider,
        decode_case(
            batch=3, s_q=1, heads=heads, layout=layout, slots=2048, topk=333, with_length=with_length, extra=extra
        ),
    )


@pytest.mark.parametrize(
    ("batch", "s_q", "heads", "topk"),
    [(1, 1, 16, 2048), (1, 3, 128, 2048), (4, 1, 64, 256), (74, 1, 8, 2048), (74, 3, 64, 512), (321, 1, 16, 640)],
)
@pytest.mark.parametrize(("layout", "page_size"), [("v32_fp8", 64), ("v32_fp8", 256), ("v4_fp8", 256), ("bf16", 64)])
def test_decode(provider, layout, page_size, batch, s_q, heads, topk):
    case = decode_case(
        batch=batch,
        s_q=s_q,
        heads=heads,
        layout=layout,
        slots=16384,
        topk=topk,
        page_size=page_size,
        with_length=layout != "v32_fp8",
    )
    check_decode(provider, case)


@pytest.mark.parametrize("layout", ["v32_fp8", "v4_fp8", "bf16"])
@pytest.mark.parametrize("per_query", [False, True])
def test_decode_lengths(provider, layout, per_query):
    case = decode_case(
        batch=7, s_q=3, heads=16, layout=layout, slots=2048, topk=700, length_per_query=per_query, with_sink=False
    )
    check_decode(provider, case)


@pytest.mark.parametrize("page_size", [64, 256])
@pytest.mark.parametrize(("batch", "s_q", "heads"), [(1, 1, 16), (4, 3, 128), (74, 1, 64), (321, 1, 8)])
def test_v4_decode_with_a_second_cache(provider, batch, s_q, heads, page_size):
    case = decode_case(
        batch=batch, s_q=s_q, heads=heads, layout="v4_fp8", slots=16384, topk=128, page_size=page_size, extra=V4_EXTRA
    )
    check_decode(provider, case)


@pytest.mark.regression(15)
@pytest.mark.parametrize("layout", ["v32_fp8", "v4_fp8", "bf16"])
def test_a_cache_beyond_two_gibibytes(provider, layout):
    row = {"v32_fp8": 656, "v4_fp8": 584, "bf16": 1152}[layout]
    slots = -(-(2**31 + 2**26) // row) // 64 * 64
    case = decode_case(
        batch=3, s_q=1, heads=16, layout=layout, slots=slots, topk=300, first=slots - 20000, with_length=False, gap=0
    )
    data = case["cache"].data
    assert data.numel() * data.element_size() > 2**31
    check_decode(provider, case)
    prefill = {"kv": case["cache"], "q": case["q"][:, 0], "indices": case["indices"][:, 0], "scale": case["scale"]}
    if provider != "flash_mla" or layout == "bf16":
        check_prefill(provider, prefill)


@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_empty_inputs(provider, op):
    layout = "rows" if provider == "flash_mla" and op == "prefill" else "v4_fp8"
    for tokens, topk, slots in ((0, 64, 128), (3, 0, 128), (3, 64, 0)):
        q = randn(tokens, 16, 512, seed=1)
        indices = make_indices(tokens, topk, max(1, slots), 2)
        if op == "prefill":
            kv = make_cache("bf16", slots, 1, indices, 3, 512).data if layout == "rows" else None
            kv = make_cache("v4_fp8", slots, 64, indices, 3) if kv is None else kv
            result = run(provider, op, {"q": q, "kv": kv, "indices": indices, "scale": 1.0})
            assert result.max_logits.isneginf().all()
        else:
            cache = make_cache("v4_fp8", slots, 64, indices, 3)
            result = run(provider, op, {"q": q[:, None], "cache": cache, "indices": indices[:, None], "scale": 1.0})
        assert (result.out == 0).all()
        assert result.lse.isposinf().all()


def test_lengths_of_zero_everywhere(provider):
    case = decode_case(batch=5, s_q=1, heads=16, layout="v4_fp8", slots=2048, topk=128, extra=V4_EXTRA)
    for name in ("topk_length", "extra_topk_length"):
        case[name].zero_()
    result = run(provider, "decode", case)
    assert (result.out == 0).all()
    assert result.lse.isposinf().all()


def test_noncontiguous_arguments_and_outputs(provider):
    case = prefill_case(tokens=9, heads=16, layout="rows", slots=512, topk=200)
    spread = {name: strided(case[name]) for name in ("q", "indices", "topk_length", "attn_sink")}
    out = strided(torch.zeros(9, 16, 512, device="cuda"))
    result = run(provider, "prefill", case | spread, out=out)
    assert result.out is out
    assert_same(result, reference_prefill(**case, out_dtype=torch.float32))

    case = decode_case(batch=4, s_q=3, heads=16, layout="v4_fp8", slots=2048, topk=200, extra=V4_EXTRA)
    names = ("q", "indices", "extra_indices", "topk_length", "extra_topk_length", "attn_sink")
    out = strided(torch.zeros(4, 3, 16, 512, device="cuda"))
    result = run(provider, "decode", case | {name: strided(case[name]) for name in names}, out=out)
    assert result.out is out
    assert_same(result, reference_decode(**case, out_dtype=torch.float32))


@pytest.mark.parametrize("first", [1, 2, 3, 4])
def test_queries_at_any_element(provider, first):
    """A kernel may read several values at a time; queries may start and stride at any element."""
    case = prefill_case(tokens=5, heads=16, slots=512, topk=130, layout="v32_fp8")
    wide = torch.full((5, 16, 576 + first), torch.nan, dtype=case["q"].dtype, device="cuda")
    case["q"] = wide[..., first:].copy_(case["q"])
    check_prefill(provider, case)


@needs_sm90
@pytest.mark.parametrize("layout", ["v32_fp8", "v4_fp8"])
@pytest.mark.parametrize("heads", [5, 16, 40])
@pytest.mark.parametrize("variant", sparse_mla.VARIANTS, ids=str)
@pytest.mark.parametrize("splits", [1, 2, 3, 16])
def test_every_variant_of_the_cuda_kernel(layout, heads, variant, splits):
    if not variant.takes(layout):
        pytest.skip("the form does not read this layout")
    extra = V4_EXTRA if layout == "v4_fp8" else None
    case = decode_case(layout=layout, batch=3, s_q=2, heads=heads, slots=2048, topk=700, extra=extra)
    result = sparse_mla.decode(**case, splits=splits, variant=variant)
    assert_same(result, reference_decode(**case, out_dtype=torch.float32))


@needs_sm90
@pytest.mark.parametrize("heads", [5, 16, 40])
@pytest.mark.parametrize("splits", [1, 2, 3, 16])
@pytest.mark.parametrize("with_length", [False, True])
def test_every_variant_of_the_cuda_kernel_over_rows(heads, splits, with_length):
    case = decode_case(
        layout="bf16", batch=3, s_q=2, heads=heads, slots=2048, topk=700, with_length=with_length, seed=heads
    )
    expected = reference_decode(**case, out_dtype=torch.float32)
    for variant in sparse_mla_rows.VARIANTS:
        assert_same(decode_op(sparse_mla_rows.attend)(**case, splits=splits, variant=variant), expected)


@pytest.mark.parametrize("heads", [5, 16, 40, 72])
@pytest.mark.parametrize("variant", sparse_mla_rows.PORTABLE_VARIANTS, ids=str)
@pytest.mark.parametrize("splits", [1, 3, 16])
@pytest.mark.parametrize("with_length", [False, True])
def test_every_variant_of_the_cuda_kernel_over_rows_as_on_older_gpus(heads, variant, splits, with_length, emulated):
    case = decode_case(
        layout="bf16", batch=3, s_q=2, heads=heads, slots=2048, topk=700, with_length=with_length, seed=heads
    )
    result = decode_op(sparse_mla_rows.attend)(**case, splits=splits, variant=variant)
    assert_same(result, reference_decode(**case, out_dtype=torch.float32))


@pytest.mark.parametrize(("layout", "variant"), portable_forms(), ids=str)
@pytest.mark.parametrize("heads", [5, 16, 40, 72])
@pytest.mark.parametrize("splits", [1, 3, 16])
def test_every_variant_of_the_cuda_kernel_as_on_older_gpus(layout, heads, variant, splits, emulated):
    extra = V4_EXTRA if layout == "v4_fp8" else None
    case = decode_case(layout=layout, batch=3, s_q=2, heads=heads, slots=2048, topk=700, extra=extra)
    result = sparse_mla.decode(**case, splits=splits, variant=variant)
    assert_same(result, reference_decode(**case, out_dtype=torch.float32))


@pytest.mark.parametrize("layout", ["v32_fp8", "v4_fp8"])
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("provider", ["cuda", *EMULATED], indirect=True)
def test_every_code_of_e4m3(layout, heads, provider):
    """Codes are converted by integer operations, of keys and values or of values alone: all, also those below 2^-6."""
    case = prefill_case(tokens=9, heads=heads, layout=layout, slots=512, topk=200)
    codes = torch.arange(448 if layout == "v4_fp8" else 512, device="cuda").to(torch.uint8)
    codes = torch.where((codes & 0x7F) == 0x7F, 0, codes)
    stride = 576 if layout == "v4_fp8" else 656
    for slot in range(512):
        page, start = slot // 64, slot % 64 * stride
        case["kv"].data[page, start : start + len(codes)] = codes.roll(slot)
    check_prefill(provider, case)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("provider", ["cuda", *EMULATED], indirect=True)
def test_the_code_of_nan(heads, code, provider):
    """It makes the query tokens that select its record NaN, all values of them, and no others."""
    case = prefill_case(tokens=12, heads=heads, layout="v32_fp8", slots=512, topk=128, with_length=False)
    valid = case["indices"][5][(case["indices"][5] >= 0) & (case["indices"][5] < 512)]
    slot = int(valid[0])
    case["kv"].data[slot // 64, slot % 64 * 656 + 300] = code
    result = run(provider, "prefill", case)
    hit = (case["indices"] == slot).any(1)
    assert hit.any()
    assert not hit.all()
    assert torch.equal(result.out.isnan().all(-1).all(-1), hit)
    assert torch.equal(result.out.isnan().any(-1).any(-1), hit)
    assert torch.equal(result.lse.isnan().all(-1), hit)


@pytest.mark.parametrize("heads", [16, 64])
def test_twenty_reruns_are_identical(provider, heads):
    prefill = prefill_case(
        tokens=213, heads=heads, layout="rows" if provider == "flash_mla" else "v32_fp8", slots=8192, topk=512
    )
    decode = decode_case(batch=4, s_q=1, heads=heads, layout="v4_fp8", slots=8192, topk=1024, extra=V4_EXTRA)
    rows = prefill_case(tokens=213, heads=heads, layout="rows", slots=8192, topk=512)
    for op, case in (("prefill", prefill), ("prefill", rows), ("decode", decode)):
        first = run(provider, op, case)
        for _ in range(20):
            for again, before in zip(run(provider, op, case), first, strict=True):
                assert torch.equal(again, before)


@pytest.mark.parametrize(("layout", "heads"), [("v32_fp8", 16), ("bf16", 16), ("v4_fp8", 16), ("v4_fp8", 64)])
@pytest.mark.parametrize("batch", [2, 74])
def test_a_captured_decode_sees_changed_contents(provider, layout, heads, batch):
    def make(seed: int) -> dict[str, Any]:
        extra = V4_EXTRA if layout == "v4_fp8" else None
        return decode_case(
            batch=batch,
            s_q=1,
            heads=heads,
            layout=layout,
            slots=8192,
            topk=512,
            with_length=layout == "v4_fp8",
            extra=extra,
            seed=seed,
        )

    static = make(0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(provider, "decode", static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(provider, "decode", static)
    for seed in (100, 200):
        fresh = make(seed)
        for name, value in fresh.items():
            if isinstance(value, torch.Tensor):
                static[name].copy_(value)
            elif name in ("cache", "extra_cache"):
                static[name].data.copy_(value.data)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(result, reference_decode(**fresh, out_dtype=torch.float32))


@pytest.mark.parametrize("with_sink", [False, True])
def test_sinks_leave_the_statistics(provider, with_sink):
    layout = "rows" if provider == "flash_mla" else "v32_fp8"
    case = prefill_case(tokens=9, heads=16, layout=layout, slots=512, topk=200, with_sink=False, with_length=with_sink)
    without = run(provider, "prefill", case)
    sunk = run(provider, "prefill", case | {"attn_sink": make_sink(16, 5)})
    assert torch.equal(sunk.lse, without.lse)
    assert torch.equal(sunk.max_logits, without.max_logits)
    assert (sunk.out[:, 1] == 0).all()
    assert torch.equal(sunk.out[:, 2], without.out[:, 2])
