"""What the plugin builds on with decode context parallelism, against the installed vLLM's own code."""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version

from nsa_plugin.kernels.shard_indices import KvShard
from nsa_plugin.kernels.sparse_mla import reference_decode
from nsa_plugin.patches.vllm import SUPPORTED_DCP

vllm = pytest.importorskip("vllm")

pytestmark = [
    pytest.mark.engine_vllm,
    pytest.mark.skipif(Version(vllm.__version__) < Version("0.29"), reason=f"served in vLLM {SUPPORTED_DCP}"),
]


@pytest.mark.parametrize(("ranks", "interleave"), [(2, 1), (2, 64), (3, 2), (8, 16)])
def test_a_rank_holds_the_tokens_that_vllm_counts(ranks: int, interleave: int) -> None:
    from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

    lengths = torch.arange(4 * ranks * interleave, dtype=torch.int32)
    for rank in range(ranks):
        shard = KvShard(ranks, rank, interleave)
        assert torch.equal(shard.lengths(lengths), get_dcp_local_seq_lens(lengths, ranks, rank, interleave))


def test_vllm_merges_the_ranks_parts_into_attention_over_all_tokens() -> None:
    """By its reference of the merge. The kernels' lse is +inf for a query token without a key on a rank."""
    from vllm.v1.attention.ops.dcp import _lse_weighted_combine, mask_dcp_empty_shards_

    from nsa_plugin.kernels.kv_cache import allocate_cache, reference_write

    random = torch.Generator().manual_seed(0)
    cache = allocate_cache("bf16", 4, 8, dim=576)
    values = torch.randn(32, 576, generator=random)
    reference_write(cache, values[:, :512].bfloat16(), torch.arange(32), rope=values[:, 512:].bfloat16())
    q = torch.randn(4, 1, 3, 576, generator=random)
    chosen = torch.stack([torch.randperm(32, generator=random)[:12] for _ in range(4)]).int().unsqueeze(1)
    chosen[1] = torch.where(chosen[1] % 2 == 0, chosen[1], -1)  # the second rank holds none
    chosen[3] = -1  # padding: no rank holds any
    whole = reference_decode(q, cache, chosen, scale=0.05)
    outs, lses = [], []
    for rank in range(2):
        own = torch.where((chosen >= 0) & (chosen % 2 == rank), chosen, -1)
        part = reference_decode(q, cache, own, scale=0.05)
        lse = torch.nan_to_num(part.lse.squeeze(-1), posinf=float("-inf"))
        masked = lse.clone()
        mask_dcp_empty_shards_(masked, torch.tensor([5, 12, 9, 0]), torch.tensor([0, 1, 2, 3, 4]))
        assert torch.equal(masked, lse), "vLLM masks only what is masked already"
        outs.append(part.out.squeeze(1))
        lses.append(lse)
    assert bool(lses[1][1].isneginf().all())
    out, lse = _lse_weighted_combine(torch.stack(outs), torch.stack(lses), return_lse=True)
    torch.testing.assert_close(out, whole.out.squeeze(1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse[:3], whole.lse[:3].squeeze(-1), atol=1e-5, rtol=1e-5)
    assert not bool(out[3].any())


def test_vllms_layers_expect_a_natural_logarithm_and_let_a_subclass_return_it() -> None:
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseImpl

    assert FlashMLASparseImpl.can_return_lse_for_decode
    assert FlashMLASparseImpl.lse_base_on_e
