"""Attention over unions of neighbouring query tokens, against the float32 reference on the same device."""

from __future__ import annotations

import pytest
import torch

from nsa_plugin.kernels.sparse_mla import reference_prefill
from nsa_plugin.tools.bench import inputs, judges
from nsa_plugin.tools.bench.selections import CAUTIOUS, LIKELY, neighbouring

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a GPU with SM90", allow_module_level=True)

from nsa_plugin.kernels.cuda import sparse_mla_union

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
KV = 4096


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


@pytest.mark.parametrize("group", sparse_mla_union.GROUPS)
@pytest.mark.parametrize("name", ["shared", "random", "twice", "with gaps", "short"])
@pytest.mark.parametrize(("heads", "tokens", "topk"), [(8, 13, 256), (16, 9, 2048), (5, 33, 320), (24, 10, 100)])
def test_unions_against_the_reference(group: int, name: str, heads: int, tokens: int, topk: int) -> None:
    cache = inputs.filled_cache(DEVICE, "v32_fp8", KV, 64, 1)
    q = inputs.normal(DEVICE, 2, tokens, heads, 576)
    indices = selections(name, tokens, topk)
    lengths = torch.arange(tokens, device=DEVICE) * topk // tokens + 1 if heads == 5 else None
    sink = torch.randn(heads, device=DEVICE) if heads == 24 else None
    more = {"scale": 576**-0.5, "topk_length": lengths, "attn_sink": sink}
    found = sparse_mla_union.prefill(q, cache, indices, **more, group=group)
    expected = reference_prefill(q, cache, indices, **more, out_dtype=torch.float32)
    judges.close("out", found.out, expected.out, judges.PREFILL_OUT)
    judges.close("lse", found.lse, expected.lse, judges.STATISTIC)
    judges.close("max_logits", found.max_logits, expected.max_logits, judges.STATISTIC)
    again = sparse_mla_union.prefill(q, cache, indices, **more, group=group)
    assert torch.equal(found.out, again.out)
    assert torch.equal(found.lse, again.lse)
