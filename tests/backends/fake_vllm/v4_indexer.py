"""vLLM's V4 indexer in miniature: its metadata builder and the batches it is built for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from nsa_plugin.backends.vllm.v4.routes import VllmV4Planner
from nsa_plugin.backends.vllm.v32.indexer import planned_indexer_builder
from tests.backends.fake_vllm.indexer import PAGE, StockIndexerBuilder
from tests.backends.fake_vllm.v4 import H200, MAX_LEN, planner
from tests.backends.fake_vllm.v32 import CommonAttentionMetadata

RATIO = 4


MIB = 1 << 20


class Stock(StockIndexerBuilder):
    """The indexer's builder for a compressed cache."""

    compress_ratio = RATIO

    def __init__(self, *_: Any) -> None:
        scheduler = SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=8)
        self.vllm_config = SimpleNamespace(
            scheduler_config=scheduler, compilation_config=SimpleNamespace(max_cudagraph_capture_size=None)
        )
        self.device = torch.device("cpu")


def small_budget(step_tokens: int = 1, rows: int = 4) -> VllmV4Planner:
    """Free memory for the logits of `rows` query tokens at once, of MAX_LEN / 4 compressed tokens each."""
    return planner(replace(H200, memory_free=4 * MAX_LEN * rows), step_tokens=step_tokens)


def common(lengths: list[tuple[int, int]], padding: int = 0) -> CommonAttentionMetadata:
    """A batch whose blocks hold PAGE compressed tokens; `padding` requests without a token, a row each."""
    rows = torch.tensor([count for count, _ in lengths] + [0] * padding)
    starts = torch.cat([torch.zeros(1), rows.cumsum(0)]).int()
    contexts = torch.tensor([context for _, context in lengths] + [0] * padding).int()
    each = -(-MAX_LEN // RATIO // PAGE)
    table = torch.randint(0, 160, (len(rows), each), generator=torch.Generator().manual_seed(2)).int()
    count = int(rows.sum()) + padding * max(1, lengths[0][0])
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=contexts,
        num_reqs=len(rows),
        num_actual_tokens=count,
        max_query_len=int(rows.max()),
        max_seq_len=int(contexts.max()),
        block_table_tensor=table,
        slot_mapping=torch.arange(count),
        seq_lens_cpu_upper_bound=contexts.clone(),
    )


def builder_of(deciding: VllmV4Planner | None, stock: type = Stock) -> Any:
    return planned_indexer_builder(stock, lambda: deciding)()
