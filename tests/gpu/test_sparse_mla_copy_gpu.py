"""Attention of many heads over a bfloat16 copy of fp8 records: against the float32 reference, as on SM86 and SM89."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nsa_plugin.kernels.cuda import attention, sparse_mla, sparse_mla_copy, sparse_mla_rows
from nsa_plugin.kernels.kv_cache import gather_rows
from nsa_plugin.kernels.sparse_mla import prefill_op, reference_prefill
from nsa_plugin.kernels.triton import device
from nsa_plugin.tools.bench import inputs, judges
from tests.kernels.sparse_mla_cases import assert_same, prefill_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
OUT = (8e-3, 3.01 / 128)
"""Absolute and relative tolerance against records as they are: a value of up to 4 is rounded to bfloat16, and where
few entries count, nothing averages that out."""


@pytest.fixture(autouse=True, params=[86, 89], ids=["as SM86", "as SM89"])
def emulation(request: pytest.FixtureRequest) -> Iterator[None]:
    if torch.cuda.get_device_capability() < divmod(request.param, 10):
        pytest.skip(f"this GPU cannot emulate SM{request.param}")
    device.emulate(request.param)
    torch.use_deterministic_algorithms(True)  # new tensors are full of NaN until they are written
    yield
    torch.use_deterministic_algorithms(False)
    device.emulate(None)


def over_records(case: dict[str, Any]) -> Any:
    variant = sparse_mla_copy.over_records(case["q"].shape[1], device.facts_of(DEVICE))
    return prefill_op(sparse_mla.attend)(**case, variant=variant, splits=1)


def rounded(case: dict[str, Any]) -> dict[str, Any]:
    """The case with bfloat16 rows."""
    cache = case["kv"]
    return case | {"kv": gather_rows(cache, torch.arange(cache.num_slots, device=DEVICE)).to(BF16)}


def over_rows(case: dict[str, Any]) -> Any:
    variant = sparse_mla_copy.over_copy(case["q"].shape[1], device.facts_of(DEVICE))
    return prefill_op(sparse_mla_rows.attend)(**rounded(case), variant=variant, splits=1)


@pytest.mark.parametrize("page_size", [64, 16, 1])
@pytest.mark.parametrize("with_length", [True, False])
@pytest.mark.parametrize(
    ("heads", "tokens", "slots", "topk"),
    [(64, 213, 4096, 2048), (40, 33, 512, 150), (128, 70, 2048, 333), (72, 1, 64, 64), (65, 1100, 1024, 96)],
)
def test_a_copy_against_the_reference(
    heads: int, tokens: int, slots: int, topk: int, with_length: bool, page_size: int
) -> None:
    """With room, and with room for one page less than the batch selects from. Slots that nobody selects are NaN."""
    given = {"page_size": page_size, "with_length": with_length, "with_sink": with_length}
    case = prefill_case(tokens=tokens, heads=heads, slots=slots, topk=topk, layout="v32_fp8", **given)
    found = sparse_mla_copy.prefill(**case)
    assert_same(found, reference_prefill(**rounded(case), out_dtype=torch.float32))
    judges.close("out", found.out, reference_prefill(**case, out_dtype=torch.float32).out, OUT)
    rows = over_rows(case)
    assert torch.equal(found.out, rows.out)
    assert torch.equal(found.lse, rows.lse)
    assert torch.equal(found.max_logits, rows.max_logits)
    valid = (case["indices"] >= 0) & (case["indices"] < slots)
    if with_length:
        valid &= torch.arange(topk, device=DEVICE) < case["topk_length"].unsqueeze(1)
    pages = len(torch.unique(case["indices"][valid] // page_size))
    exact = sparse_mla_copy.prefill(**case, most_rows=max(1, pages) * page_size)
    assert torch.equal(exact.lse, rows.lse)
    if pages > 1:
        alone, few = over_records(case), sparse_mla_copy.prefill(**case, most_rows=(pages - 1) * page_size)
        assert torch.equal(few.out, alone.out)
        assert torch.equal(few.lse, alone.lse)


@pytest.mark.parametrize("out", ["new", "float32", "strided"])
@pytest.mark.parametrize("most_rows", [65536, 64])
def test_outputs_that_a_caller_gives(most_rows: int, out: str) -> None:
    cache = inputs.filled_cache(DEVICE, "v32_fp8", 4096, 64, 1)
    q, indices = inputs.normal(DEVICE, 2, 67, 64, 576), inputs.selection(DEVICE, 67, 4096, 320, 3)
    dtype = torch.float32 if out == "float32" else BF16
    given = None if out == "new" else torch.full((67, 64, 1024), torch.nan, dtype=dtype, device=DEVICE)
    given = given[..., ::2] if out == "strided" else given if given is None else given[..., :512]
    found = sparse_mla_copy.prefill(q, cache, indices, scale=576**-0.5, out=given, most_rows=most_rows)
    expected = reference_prefill(q, cache, indices, scale=576**-0.5, out_dtype=torch.float32)
    judges.close("out", found.out, expected.out, judges.PREFILL_OUT)
    judges.close("lse", found.lse, expected.lse, judges.STATISTIC)


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("kv", [8192, 131072])
def test_long_prefills_take_a_copy_where_it_has_room(kv: int, heads: int) -> None:
    cache = inputs.filled_cache(DEVICE, "v32_fp8", kv, 64, 1)
    tokens = sparse_mla_copy.LEAST_TOKENS
    q, indices = inputs.normal(DEVICE, 2, tokens, heads, 576), inputs.selection(DEVICE, tokens, kv, 2048, 3)
    case = {"q": q, "kv": cache, "indices": indices, "scale": 576**-0.5}
    found = attention.prefill(**case)
    assert torch.equal(found.lse, (over_rows(case) if kv <= sparse_mla_copy.MOST_ROWS else over_records(case)).lse)
    rows = torch.arange(0, tokens, 97, device=DEVICE)
    some = case | {"q": q[rows], "indices": indices[rows]}
    judges.close("out", found.out[rows], reference_prefill(**some, out_dtype=torch.float32).out, judges.PREFILL_OUT)
    again = attention.prefill(**case)
    assert torch.equal(found.out, again.out)


def test_a_graph_copies_anew() -> None:
    cache = inputs.filled_cache(DEVICE, "v32_fp8", 4096, 64, 1)
    q, indices = inputs.normal(DEVICE, 2, 130, 64, 576), inputs.selection(DEVICE, 130, 4096, 320, 3)
    sparse_mla_copy.prefill(q, cache, indices, scale=576**-0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = sparse_mla_copy.prefill(q, cache, indices, scale=576**-0.5)
    indices.copy_(inputs.selection(DEVICE, 130, 4096, 320, 4))
    cache.data.copy_(inputs.filled_cache(DEVICE, "v32_fp8", 4096, 64, 5).data)
    for _ in range(2):
        graph.replay()
        expected = reference_prefill(q, cache, indices, scale=576**-0.5, out_dtype=torch.float32)
        judges.close("out", found.out, expected.out, judges.PREFILL_OUT)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_of_nan_is_that_of_the_query_tokens_that_select_it(code: int) -> None:
    case = prefill_case(tokens=40, heads=64, slots=512, topk=96, layout="v32_fp8", with_length=False)
    slot = int(case["indices"][7][(case["indices"][7] >= 0) & (case["indices"][7] < 512)][0])
    case["kv"].data[slot // 64, slot % 64 * 656 + 300] = code
    taken = (case["indices"] == slot).any(-1)
    out = sparse_mla_copy.prefill(**case).out
    assert out[taken].isnan().all()
    assert not out[~taken].isnan().any()
