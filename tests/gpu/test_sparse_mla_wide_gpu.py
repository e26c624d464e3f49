"""Sparse MLA prefill of many heads over the fp8 cache in place, against the float32 reference on the same device."""

from __future__ import annotations

import pytest
import torch
from sm90 import needs_sm90

from nsa_plugin.kernels.cuda import attention, sparse_mla, sparse_mla_wide
from nsa_plugin.kernels.kv_cache import reference_write
from nsa_plugin.kernels.sparse_mla import prefill_op, reference_prefill
from tests.kernels.sparse_mla_cases import assert_same, prefill_case, some_tokens, strided

pytestmark = [pytest.mark.gpu, needs_sm90]
attend = prefill_op(sparse_mla_wide.attend)


def some_rows(tokens: int) -> torch.Tensor:
    """The first, which have no entry or few, the last, and others between."""
    rows = torch.randperm(tokens, generator=torch.Generator().manual_seed(tokens))[:20]
    return torch.cat([torch.arange(min(3, tokens)), torch.tensor([tokens - 1]), rows]).unique().cuda()


@pytest.mark.parametrize(
    ("heads", "tokens", "slots", "topk", "page_size", "plain"),
    [
        (64, 3, 256, 64, 64, True),
        (32, 3, 256, 64, 64, True),
        (32, 1, 256, 1, 64, True),
        (64, 62, 2048, 333, 64, False),
        (32, 62, 2048, 333, 1, False),
        (20, 213, 8192, 2048, 64, False),
        (48, 500, 8192, 2048, 256, False),
        (128, 213, 65536, 2048, 64, True),
        (70, 300, 8192, 640, 64, False),
        (64, 1000, 65520, 2048, 48, False),
        (32, 4096, 65536, 2048, 64, True),
        (64, 62, 64, 8192, 64, True),
        (3, 40, 512, 130, 64, False),
    ],
)
def test_many_heads_against_the_reference(heads, tokens, slots, topk, page_size, plain):
    case = prefill_case(
        tokens=tokens,
        heads=heads,
        slots=slots,
        topk=topk,
        layout="v32_fp8",
        page_size=page_size,
        with_length=not plain,
        with_sink=not plain,
        seed=heads,
    )
    result = attend(**case)
    rows = some_rows(tokens)
    assert not result.out.isnan().any()
    expected = reference_prefill(**some_tokens(case, rows), out_dtype=torch.float32)
    assert_same(type(expected)(*(part[rows] for part in result)), expected)
    again = attend(**case)
    assert all(torch.equal(one, other) for one, other in zip(result, again, strict=True))


@pytest.mark.parametrize("heads", [32, 64])
def test_scales_and_logits_that_grow_from_step_to_step(heads):
    case = prefill_case(tokens=140, heads=heads, slots=1024, topk=1024, layout="v32_fp8", with_length=False)
    case["indices"] = torch.arange(1024, device="cuda", dtype=torch.int32).repeat(140, 1)
    case["q"] = case["q"] * 32
    data = torch.randn(1024, 576, device="cuda") * torch.logspace(-5, -0.6, 1024, device="cuda").unsqueeze(1)
    reference_write(case["kv"], data.bfloat16(), torch.arange(1024, device="cuda"))
    expected = reference_prefill(**case, out_dtype=torch.float32)
    assert_same(attend(**case), expected)


@pytest.mark.parametrize("heads", [32, 64])
def test_queries_and_outputs_behind_strides(heads):
    case = prefill_case(tokens=150, heads=heads, slots=2048, topk=256, layout="v32_fp8")
    out = torch.empty(150, heads + 1, 512 + 8, dtype=torch.bfloat16, device="cuda")[:, :heads, :512]
    result = attend(**case | {"q": strided(case["q"]), "out": out})
    assert result.out.data_ptr() == out.data_ptr()
    expected = reference_prefill(**case, out_dtype=torch.float32)
    assert_same(result, expected)


@pytest.mark.parametrize(("heads", "tokens"), [(17, 4096), (64, 200), (64, 20), (128, 70)])
def test_the_choice_between_both_kernels_changes_no_result(heads, tokens):
    case = prefill_case(tokens=tokens, heads=heads, slots=4096, topk=512, layout="v32_fp8")
    chosen, few = attention.prefill(**case), prefill_op(sparse_mla.attend)(**case)
    assert_same(chosen, few)


def test_in_a_cuda_graph():
    case = prefill_case(tokens=200, heads=64, slots=4096, topk=512, layout="v32_fp8")
    out = torch.empty(200, 64, 512, dtype=torch.bfloat16, device="cuda")
    attend(**case, out=out)
    expected, graph = out.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(**case, out=out)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)
