"""Attention over unions of neighbouring query tokens, always or where they share: against the float32 reference.

As the GPU is, and as on SM86 and SM89.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from nsa_plugin.kernels.cuda import attention, sparse_mla, sparse_mla_neighbours, sparse_mla_union
from nsa_plugin.kernels.sparse_mla import prefill_op, reference_prefill
from nsa_plugin.kernels.triton import device
from nsa_plugin.tools.bench import inputs, judges
from nsa_plugin.tools.bench.selections import CAUTIOUS, LIKELY, neighbouring

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE = torch.device("cuda")
KV = 4096


@pytest.fixture(autouse=True, params=[None, 86, 89], ids=["native", "as SM86", "as SM89"])
def emulation(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param and torch.cuda.get_device_capability() < divmod(request.param, 10):
        pytest.skip(f"this GPU cannot emulate SM{request.param}")
    device.emulate(request.param)
    yield
    device.emulate(None)


def selections(name: str, tokens: int, topk: int) -> torch.Tensor:
    if name == "random":
        return inputs.selection(DEVICE, tokens, KV, topk, 3)
    if name == "twice":  # a token may have a slot twice, which then counts twice
        chosen = inputs.selection(DEVICE, tokens, KV, topk, 3)
        chosen[:, 1] = chosen[:, 0]
        return chosen
    if name == "with gaps":
        chosen = neighbouring(torch.arange(KV - tokens, KV, device=DEVICE), topk, 3, CAUTIOUS)
        gaps = torch.rand(chosen.shape, generator=inputs.generator(DEVICE, 4), device=DEVICE) < 0.3
        chosen = chosen.masked_fill(gaps, -1)
        chosen[2] = -1  # a token without any
        chosen[4:8] = -1  # a group without any
        chosen[0, :3] = torch.tensor([KV, KV + 63, 2**31 - 1], device=DEVICE)  # behind the cache
        return chosen
    if name == "short":
        return neighbouring(torch.arange(tokens, device=DEVICE), topk, 3, LIKELY)
    return neighbouring(torch.arange(KV - tokens, KV, device=DEVICE), topk, 3, LIKELY)


@pytest.mark.parametrize("name", ["shared", "random", "twice", "with gaps", "short"])
@pytest.mark.parametrize(("heads", "tokens", "topk"), [(8, 13, 256), (16, 9, 2048), (5, 33, 320), (24, 10, 100)])
def test_unions_against_the_reference(name: str, heads: int, tokens: int, topk: int) -> None:
    cache = inputs.filled_cache(DEVICE, "v32_fp8", KV, 64, 1)
    q = inputs.normal(DEVICE, 2, tokens, heads, 576)
    indices = selections(name, tokens, topk)
    lengths = torch.arange(tokens, device=DEVICE) * topk // tokens + 1 if heads == 5 else None
    sink = torch.randn(heads, device=DEVICE) if heads == 24 else None
    more = {"scale": 576**-0.5, "topk_length": lengths, "attn_sink": sink}
    found = sparse_mla_union.prefill(q, cache, indices, **more)
    expected = reference_prefill(q, cache, indices, **more, out_dtype=torch.float32)
    judges.close("out", found.out, expected.out, judges.PREFILL_OUT)
    judges.close("lse", found.lse, expected.lse, judges.STATISTIC)
    judges.close("max_logits", found.max_logits, expected.max_logits, judges.STATISTIC)
    again = sparse_mla_union.prefill(q, cache, indices, **more)
    assert torch.equal(found.out, again.out)
    assert torch.equal(found.lse, again.lse)


@pytest.mark.parametrize("out", ["new", "float32", "strided"])
@pytest.mark.parametrize("name", ["shared", "random", "twice", "with gaps", "short"])
@pytest.mark.parametrize(
    ("heads", "tokens", "topk"),
    [(8, 301, 256), (8, 40, 2048), (5, 33, 320), (1, 1, 64), (16, 130, 256), (32, 67, 200), (20, 9, 2048)],
)
def test_the_gpu_takes_unions_where_neighbours_share(name: str, heads: int, tokens: int, topk: int, out: str) -> None:
    """One of both kernels runs, to the bit as it does alone, and the one that the sample calls for."""
    if name == "with gaps" and tokens == 1:
        pytest.skip("its gaps need several tokens")
    facts = device.facts_of(DEVICE)
    if heads > sparse_mla_neighbours.limits(facts).heads:
        pytest.skip("tokens of so many heads are attended alone on this GPU")
    cache = inputs.filled_cache(DEVICE, "v32_fp8", KV, 64, 1)
    q, indices = inputs.normal(DEVICE, 2, tokens, heads, 576), selections(name, tokens, topk)
    lengths = torch.arange(tokens, device=DEVICE) * topk // tokens + 1 if heads == 5 else None
    more = {"scale": 576**-0.5, "topk_length": lengths}
    width = 512 if out == "new" else 1024 if out == "strided" else 512
    dtype = torch.float32 if out == "float32" else torch.bfloat16
    given = None if out == "new" else torch.full((tokens, heads, width), torch.nan, dtype=dtype, device=DEVICE)
    given = given[..., ::2] if out == "strided" else given
    found = sparse_mla_neighbours.prefill(q, cache, indices, **more, out=given)
    expected = reference_prefill(q, cache, indices, **more, out_dtype=torch.float32)
    judges.close("out", found.out, expected.out, judges.PREFILL_OUT)
    judges.close("lse", found.lse, expected.lse, judges.STATISTIC)
    judges.close("max_logits", found.max_logits, expected.max_logits, judges.STATISTIC)
    shared, all_entries = pairs(indices, lengths)
    united = sparse_mla_union.prefill(q, cache, indices, **more)
    variant = sparse_mla_neighbours.alone(heads, facts)
    alone = prefill_op(sparse_mla.attend)(q, cache, indices, **more, splits=1, variant=variant)
    least = sparse_mla_union.variant_for(heads, facts).least_shared / 100 * all_entries
    if shared >= 1.1 * least:
        assert torch.equal(found.lse, united.lse)
    elif shared < 0.9 * least:
        assert torch.equal(found.lse, alone.lse)


@pytest.mark.parametrize("name", ["shared", "random"])
@pytest.mark.parametrize("fewer", [0, 1])
def test_which_kernel_a_long_prefill_gets(name: str, fewer: int) -> None:
    """To the bit that of unions where neighbours share, and from so many query tokens on."""
    least = sparse_mla_neighbours.limits(device.facts_of(DEVICE)).rows
    tokens = least - fewer
    cache = inputs.filled_cache(DEVICE, "v32_fp8", KV, 64, 1)
    q, indices = inputs.normal(DEVICE, 2, tokens, 8, 576), selections("random", tokens, 256)
    if name == "shared":
        indices = neighbouring(torch.arange(tokens, device=DEVICE), 256, 3, LIKELY)
    found = attention.prefill(q, cache, indices, scale=576**-0.5)
    united = name == "shared" and not fewer
    alone = prefill_op(sparse_mla.attend)
    expected = (sparse_mla_union.prefill if united else alone)(q, cache, indices, scale=576**-0.5)
    assert torch.equal(found.lse, expected.lse)
    assert torch.equal(found.out, expected.out)
    other = (alone if united else sparse_mla_union.prefill)(q, cache, indices, scale=576**-0.5)
    assert not torch.equal(found.lse, other.lse)


def test_selections_too_large_for_unions_are_attended_token_by_token() -> None:
    cache = inputs.filled_cache(DEVICE, "v32_fp8", 2 * 8256, 64, 1)
    q, indices = inputs.normal(DEVICE, 2, 3, 8, 576), inputs.selection(DEVICE, 3, 2 * 8256, 8256, 3)
    found = sparse_mla_neighbours.prefill(q, cache, indices, scale=576**-0.5)
    alone = prefill_op(sparse_mla.attend)(q, cache, indices, scale=576**-0.5)
    assert torch.equal(found.out, alone.out)
    assert torch.equal(found.lse, alone.lse)


def pairs(indices: torch.Tensor, lengths: torch.Tensor | None) -> tuple[int, int]:
    """(entries of second rows that the sampled pairs' first rows have too, all of them), counted in Python."""
    rows, topk = indices.shape
    groups, shared, all_entries = rows // 2, 0, 0
    for number in range(min(groups, sparse_mla_neighbours.PAIRS)):
        first = 2 * (number * groups // min(groups, sparse_mla_neighbours.PAIRS))
        kept = [topk if lengths is None else int(lengths[row]) for row in (first, first + 1)]
        one, two = (indices[row, :n].tolist() for row, n in zip((first, first + 1), kept, strict=True))
        valid = [slot for slot in two if 0 <= slot < KV]
        shared, all_entries = shared + len([slot for slot in valid if slot in set(one)]), all_entries + len(valid)
    return shared, all_entries


@pytest.mark.parametrize("name", ["shared", "random", "twice", "with gaps", "short"])
@pytest.mark.parametrize(("tokens", "topk"), [(2, 64), (9, 2048), (301, 256), (1, 64)])
def test_the_sample_counts_what_neighbours_share(name: str, tokens: int, topk: int) -> None:
    """Hashing may add a few, and takes none away."""
    if name == "with gaps" and tokens < 8:
        pytest.skip("its gaps need several tokens")
    indices = selections(name, tokens, topk).int()
    scope = sparse_mla.CudaScope(
        indices=indices.data_ptr(), indices_stride=topk, lengths_divisor=1, num_slots=KV, topk=topk
    )
    # 100 for each shared entry; and the same less 37 for each entry.
    shared, margin = (sparse_mla_neighbours.sample(tokens, scope, least, DEVICE).item() for least in (0, 37))
    expected, all_entries = pairs(indices, None)
    assert shared - margin == 37 * all_entries
    assert 100 * expected <= shared <= 100 * (expected + 0.05 * all_entries)
