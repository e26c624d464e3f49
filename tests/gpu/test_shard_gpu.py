"""Decode context parallelism on one GPU: the parts of two and four ranks, by the compiled kernels, merged."""

from __future__ import annotations

import pytest
import torch

from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.kernels.kv_cache import allocate_cache, reference_write
from nsa_plugin.kernels.shard_indices import KvShard, reference_shard
from nsa_plugin.kernels.sparse_mla import reference_prefill
from nsa_plugin.kernels.triton import shard_indices as kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PAGE, CONTEXT, TOPK, SCALE = 64, 8192, 2048, 192**-0.5


@pytest.mark.parametrize(("ranks", "interleave"), [(2, 1), (4, 1), (2, 64)])
@pytest.mark.parametrize(("op", "rows"), [("sparse_mla_decode", 5), ("sparse_mla_prefill", 700)])
@pytest.mark.parametrize("name", ["cuda", "triton"])
@pytest.mark.parametrize("heads", [16, 32, 64])
def test_the_parts_of_all_ranks_are_attention_over_the_undivided_cache(heads, name, op, rows, ranks, interleave):
    major, minor = torch.cuda.get_device_capability()
    providers = Providers("v32_fp8", 10 * major + minor)
    random = torch.Generator("cuda").manual_seed(1)
    whole = allocate_cache("v32_fp8", CONTEXT // PAGE, PAGE, device="cuda")
    values = torch.randn(CONTEXT, 576, generator=random, device="cuda").bfloat16()
    reference_write(whole, values[:, :512], torch.arange(CONTEXT, device="cuda"), rope=values[:, 512:])
    q = torch.randn(rows, heads, 576, generator=random, device="cuda").bfloat16()
    chosen = torch.stack([torch.randperm(CONTEXT, generator=random, device="cuda")[:TOPK] for _ in range(rows)]).int()
    chosen[0] = torch.where(chosen[0] // interleave % ranks == 0, chosen[0], -1)  # nothing on the other ranks
    chosen[1] = -1
    owners = torch.zeros(rows, dtype=torch.int32, device="cuda")
    outs, lses = [], []
    for rank in range(ranks):
        shard = KvShard(ranks, rank, interleave)
        cache = allocate_cache("v32_fp8", CONTEXT // PAGE // ranks, PAGE, device="cuda")
        records = whole.data.view(torch.uint8).reshape(CONTEXT // interleave, interleave, -1)
        cache.data.view(torch.uint8).copy_(records[rank::ranks].reshape(cache.data.view(torch.uint8).shape))
        table = torch.arange(cache.num_pages, dtype=torch.int32, device="cuda").unsqueeze(0)
        given = {"page_size": PAGE, "row_to_request": owners}
        own, expected = kernels.shard(chosen, table, shard, **given), reference_shard(chosen, table, shard, **given)
        assert torch.equal(own.slots, expected.slots)
        assert torch.equal(own.counts, expected.counts)
        arguments = {"scale": SCALE, "d_v": 512, "topk_length": own.counts}
        out, lse = providers.attend_part(op, name, q, cache, own.slots, **arguments)
        assert torch.equal(lse.isposinf(), (own.counts == 0).unsqueeze(1).expand_as(lse))
        assert not bool(out[own.counts == 0].any())
        outs.append(out.float())
        lses.append(lse.nan_to_num(posinf=float("-inf"), neginf=float("-inf")))
    lse = torch.stack(lses)
    total = lse.logsumexp(0)
    weights = (lse - total).exp().nan_to_num(nan=0.0)
    merged = (torch.stack(outs) * weights.unsqueeze(-1)).sum(0)
    wanted = reference_prefill(q.float(), whole, chosen, scale=SCALE, d_v=512)
    torch.testing.assert_close(merged, wanted.out.float(), atol=0.02, rtol=0.02)
    torch.testing.assert_close(total[2:], wanted.lse[2:], atol=0.01, rtol=0.01)
    assert not bool(merged[1].any())
