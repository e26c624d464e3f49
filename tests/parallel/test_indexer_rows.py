"""The indexer selects the same tokens for a rank's rows alone as for all rows of the batch."""

import pytest
import torch

from nsa_plugin.kernels.indexer import fold_weights, quantize, reference_topk
from nsa_plugin.kernels.triton.indexer import topk as triton_topk
from nsa_plugin.parallel.partition import Weights, by_cost, by_count, requests

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, DIM, TOPK = 2, 128, 6

# Prompts, continued prompts, decode and verify rows, and an idle request; then padding.
Q_LENS = [9, 1, 1, 17, 0, 4, 1, 3, 26, 1]
KV_LENS = [9, 40, 3, 60, 12, 4, 1, 33, 51, 70]
PADDING = 3


def inputs() -> tuple[torch.Tensor, ...]:
    made = torch.Generator().manual_seed(0)
    rows, keys = sum(Q_LENS) + PADDING, sum(KV_LENS)
    k, k_scale = quantize(torch.randn(keys, DIM, generator=made))
    q, q_scale = quantize(torch.randn(rows, HEADS, DIM, generator=made))
    weights = fold_weights(torch.randn(rows, HEADS, generator=made), q_scale, 1.0)
    ks, ke, first = [], [], 0
    for q_len, kv_len in zip(Q_LENS, KV_LENS, strict=True):
        ks += [first] * q_len
        ke += [first + kv_len - q_len + row + 1 for row in range(q_len)]
        first += kv_len
    ranges = [torch.tensor([*bound, *[0] * PADDING], dtype=torch.int32) for bound in (ks, ke)]
    return tuple(tensor.to(DEVICE) for tensor in (q, k, k_scale.squeeze(1), weights, *ranges))


@pytest.mark.parametrize(("ranks", "rows_per_chunk"), [(3, None), (8, 5)])
def test_a_ranks_rows_select_as_in_the_whole_batch(ranks: int, rows_per_chunk: int | None) -> None:
    q, k, k_scale, weights, ks, ke = inputs()
    whole = reference_topk(q, k, k_scale, weights, ks, ke, TOPK)
    costs = Weights(row=9, attention=2, indexer=1)
    for partition in (by_cost(Q_LENS, KV_LENS, ranks, topk=TOPK, weights=costs), by_count(len(q), ranks)):
        for rank in range(ranks):
            own = partition.rows(rank)
            mine = requests(own, Q_LENS, KV_LENS)
            selected = triton_topk(
                q[own], k, k_scale, weights[own], ks[own], ke[own], TOPK, rows_per_chunk=rows_per_chunk, requests=mine
            )
            assert torch.equal(selected.sort(1).values, whole[own].sort(1).values)
            # No logits beyond the keys that the request's last row on this rank sees.
            for first, end, key_first, key_end in mine:
                assert ks[own][first:end].tolist() == [key_first] * (end - first)
                assert int(ke[own][first:end].max()) == key_end
