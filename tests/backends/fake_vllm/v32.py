"""vLLM's sparse MLA in miniature, before and after 0.26, on the CPU: a layer, its implementation, its builders.

This module has the parts that the adapter uses. The stock implementation attends densely in float32, by its metadata
and the top-k buffer, so that a wrong query token, request or slot shows in the output.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import torch

if not torch.cuda.is_available():  # before Triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

from nsa_plugin.backends.common.fault import AttendedTokens
from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.vllm.v32.attention import planned_impl, rebased
from nsa_plugin.backends.vllm.v32.metadata import planned_builder
from nsa_plugin.backends.vllm.v32.routes import VllmPlanner
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.kernels.kv_cache import PagedCache, allocate_cache, reference_read, reference_write
from nsa_plugin.kernels.shard_indices import KvShard
from nsa_plugin.libraries.devices import DeviceProfile, synthetic
from nsa_plugin.settings import Settings

T = TypeVar("T")
HEADS, NOPE, ROPE, LORA, V, TOPK, PAGE = 4, 128, 64, 512, 128, 24, 8
MAX_ROWS, MAX_REQUESTS, MAX_LEN = 256, 16, 96
SCALE = (NOPE + ROPE) ** -0.5
# Steps, a long prompt, short ones before and behind it, a chunk of a long one, a short one with a prefix.
MIXED = [(1, 40), (1, 9), (6, 6), (30, 60), (20, 20), (5, 70), (4, 21)]
CPU = synthetic(0)
TRITON = synthetic(90, libraries=("triton", "deep_gemm"))
WITH_FLASH_MLA = synthetic(90, libraries=("triton", "deep_gemm", "flash_mla"))


def model(layout: str = "bf16", heads: int = HEADS, topk: int = TOPK, dcp: int = 1) -> ModelShape:
    return ModelShape(
        num_heads=heads * dcp,
        attn_tp_size=dcp,
        dcp_size=dcp,
        kv_layout=layout,
        kv_lora_rank=LORA,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=V,
        index_topk=topk,
        index_n_heads=32,
    )


def planner(
    layout: str = "bf16",
    *,
    device: DeviceProfile = CPU,
    step_tokens: int = 1,
    workspace_tokens: int = 0,
    heads: int = HEADS,
    topk: int = TOPK,
    dcp: int = 1,
    **settings: Any,
) -> VllmPlanner:
    """Return a planner of one rank; `heads` are its own, and `dcp` ranks share the KV cache."""
    return VllmPlanner(
        model=model(layout, heads, topk, dcp),
        device=device,
        settings=Settings(**settings),
        max_model_len=MAX_LEN,
        step_tokens=step_tokens,
        workspace_tokens=workspace_tokens,
    )


@dataclass
class CommonAttentionMetadata:
    """The fields of vLLM's that a builder reads."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    _seq_lens_cpu: torch.Tensor | None = None
    is_prefilling: torch.Tensor | None = None
    causal: bool = True
    _num_computed_tokens_cache: torch.Tensor | None = None


class ImplBase(ABC, Generic[T]):
    """AttentionImplBase: its `__new__` sets what every implementation has."""

    shard: KvShard | None = None
    dcp_world_size: int

    def __new__(cls, *_: Any, **__: Any) -> Any:
        impl = super().__new__(cls)
        impl.dcp_world_size = 1 if cls.shard is None else cls.shard.ranks
        return impl


class SparseBase(ImplBase[T], Generic[T]):
    """SparseMLAAttentionImpl of 0.20 to 0.25: every row goes to forward_mqa."""


class DenseBase(ImplBase[T], Generic[T]):
    """MLAAttentionImpl."""

    is_sparse = False

    @abstractmethod
    def __init__(self, num_heads: int) -> None: ...

    @abstractmethod
    def forward_mha(self, q: torch.Tensor) -> None: ...

    @abstractmethod
    def forward_mqa(self, q: Any) -> Any: ...


@dataclass
class StockMetadata:
    num_actual_tokens: int
    req_id_per_token: torch.Tensor
    block_table: torch.Tensor
    common: CommonAttentionMetadata
    mixed: bool


class StockBuilder:
    """FlashMLASparseMetadataBuilder: one buffer of owners, and a form by its heads, or from 0.30 on by a flag."""

    fp8_use_mixed_batch: bool

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        self.kv_cache_spec, self.device = kv_cache_spec, device
        self.num_heads = HEADS
        self.reorder_batch_threshold = 128
        self.req_id_per_token_buffer = torch.zeros(MAX_ROWS, dtype=torch.int32)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> StockMetadata:
        common = common_attn_metadata
        lens = common.query_start_loc_cpu.diff().long()
        owners = torch.repeat_interleave(torch.arange(common.num_reqs, dtype=torch.int32), lens)
        self.req_id_per_token_buffer.zero_()
        self.req_id_per_token_buffer[: len(owners)] = owners
        rows = common.num_actual_tokens
        table = common.block_table_tensor
        mixed = getattr(self, "fp8_use_mixed_batch", self.num_heads < 32)
        return StockMetadata(rows, self.req_id_per_token_buffer[:rows], table, common, mixed)


class StockImpl(SparseBase[StockMetadata]):
    """FlashMLASparseImpl as of 0.24. `calls` has the metadata of every forward_mqa."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        kv_cache_dtype: str,
        topk_indices_buffer: torch.Tensor | None = None,
        indexer: Any = None,
        **mla_args: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_lora_rank: int = mla_args["kv_lora_rank"]
        self.topk_indices_buffer = topk_indices_buffer
        self.q_concat_buffer = torch.full((MAX_ROWS, num_heads, head_size), torch.nan, dtype=torch.bfloat16)
        self.calls: list[StockMetadata] = []

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: StockMetadata, layer: Any) -> Any:
        self.calls.append(attn_metadata)
        if isinstance(q, tuple):
            joined = self.q_concat_buffer[: q[0].shape[0]]
            joined[..., :LORA], joined[..., LORA:] = q
            q = joined
        assert q.shape[0] == attn_metadata.num_actual_tokens
        assert self.topk_indices_buffer is not None
        out = torch.zeros(q.shape[0], q.shape[1], LORA)
        lse = torch.full(q.shape[:2], -torch.inf)
        for row in range(q.shape[0]):
            chosen = self.topk_indices_buffer[row]
            chosen = chosen[chosen >= 0].long()
            if (shard := self.shard) is not None:
                chosen = chosen[chosen // shard.interleave % shard.ranks == shard.rank]
                turns, within = chosen // (shard.interleave * shard.ranks), chosen % shard.interleave
                chosen = turns * shard.interleave + within
            if len(chosen):
                pages = attn_metadata.block_table[int(attn_metadata.req_id_per_token[row])]
                slots = pages[chosen // PAGE].long() * PAGE + chosen % PAGE
                rows = self.rows(kv_c_and_k_pe_cache, slots)
                logits = q[row].float() @ rows.T * self.scale
                out[row], lse[row] = logits.softmax(-1) @ rows[:, :LORA], logits.logsumexp(-1)
        return out.to(q.dtype), None if self.shard is None else lse

    def rows(self, kv_cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        from nsa_plugin.kernels.kv_cache import open_cache

        layout = "v32_fp8" if self.kv_cache_dtype == "fp8_ds_mla" else "bf16"
        return reference_read(open_cache(kv_cache, layout), slots, dtype=torch.float32)


class LaterImpl(DenseBase[StockMetadata]):
    """From 0.26 on: derives from the dense base class and is marked as sparse."""

    is_sparse = True
    __init__ = StockImpl.__init__
    forward_mqa = StockImpl.forward_mqa
    rows = StockImpl.rows

    def forward_mha(self, *_: Any, **__: Any) -> None:
        raise AssertionError("vLLM's own dense prefill ran")


@dataclass
class Layer:
    """MLAAttention: the split of a batch between forward_mqa and forward_mha, and the absorbed weights."""

    impl: Any
    W_UK_T: torch.Tensor
    W_UV: torch.Tensor
    dcp_manager: Any = None

    def forward_impl(
        self, q: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, metadata: Any
    ) -> torch.Tensor:
        """[rows, heads * v]; rows behind num_actual_tokens are NaN."""
        output = torch.full((q.shape[0], self.impl.num_heads * V), torch.nan, dtype=q.dtype)
        rows = metadata.num_actual_tokens
        q, kv_c, k_pe = q[:rows], kv_c[:rows], k_pe[:rows]
        shared = self.impl.dcp_world_size > 1
        if isinstance(self.impl, SparseBase):
            mqa = rows
        else:
            mqa = metadata.num_decode_tokens
            dense = metadata.prefill is not None and metadata.prefill.use_dense_mha
            assert metadata.prefill is None or metadata.prefill.chunked_context is not None
            if self.impl.is_sparse and mqa < rows and not dense:
                mqa = rows
        if mqa < rows:
            some = slice(mqa, rows)
            self.impl.forward_mha(
                q[some], kv_c[some], k_pe[some], kv_cache, metadata, torch.ones(1), output=output[some]
            )
        if mqa:
            nope, rope = q[:mqa].split([NOPE, ROPE], dim=-1)
            absorbed = torch.bmm(nope.transpose(0, 1), self.W_UK_T).transpose(0, 1)
            assert self.impl.is_sparse or metadata.decode is not None
            query: Any = (absorbed, rope)
            if shared:
                query = self.dcp_manager.query_gather(torch.cat(query, dim=-1))
            attended, lse = self.impl.forward_mqa(query, kv_cache, metadata, self)
            assert (lse is not None) == shared
            if shared:
                assert attended.is_contiguous()
                assert metadata.decode is None
                requests = metadata.num_decodes
                bounds = metadata.query_start_loc[: requests + 1]
                attended = self.dcp_manager.combine(
                    attended, lse, seq_lens=metadata.seq_lens[:requests], query_start_loc=bounds
                )
            latent = attended.view(-1, self.impl.num_heads, LORA).transpose(0, 1)
            output[:mqa] = torch.bmm(latent, self.W_UV).transpose(0, 1).reshape(mqa, -1)
        return output


@dataclass
class World:
    """A model's layer on one rank, its cache, and batches of requests over it.

    What the heads have is the rank's own; all else is the same on every rank.
    """

    planner: VllmPlanner
    later: bool = False
    rank: int = 0
    shard: KvShard | None = None
    requests: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def heads(self) -> int:
        return self.planner.model.heads_per_rank

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(3)
        self.random, self.random_heads = random, torch.Generator().manual_seed(100 + self.rank)
        layout = self.planner.model.kv_layout
        self.cache: PagedCache = allocate_cache(layout, 160, PAGE, dim=LORA + ROPE if layout == "bf16" else None)
        shape = (160, PAGE, -1)
        self.kv_cache = self.cache.data.view(shape)
        self.weight = (torch.randn(LORA, self.heads, NOPE + V, generator=self.random_heads) * 0.08).bfloat16()
        self.buffer = torch.full((MAX_ROWS, self.planner.model.index_topk), 7, dtype=torch.int32)
        self.layers: dict[str, Any] = {"another": SimpleNamespace()}
        self.kv_cache.view(torch.uint8).fill_(0xFF)  # not a number in any layout, where nothing is written
        stock: Any = LaterImpl if self.later else StockImpl
        if self.shard is not None:
            stock = type(stock.__name__, (stock,), {"shard": self.shard})
        attended = AttendedTokens.of(self.planner.settings)
        providers = Providers(layout, self.planner.device.sm, helpers="reference", attended=attended)
        impl_cls = planned_impl(
            rebased(stock, SparseBase, DenseBase), lambda: self.planner, lambda: providers, lambda: self.layers
        )
        self.impl = impl_cls(
            num_heads=self.heads,
            head_size=LORA + ROPE,
            scale=SCALE,
            kv_cache_dtype="fp8_ds_mla" if layout == "v32_fp8" else "auto",
            topk_indices_buffer=self.buffer,
            kv_lora_rank=LORA,
            qk_nope_head_dim=NOPE,
            qk_rope_head_dim=ROPE,
            v_head_dim=V,
            kv_b_proj=lambda latent: (latent @ self.weight.flatten(1), None),
        )
        w_uk, w_uv = self.weight.split([NOPE, V], dim=-1)
        self.layer = Layer(self.impl, w_uk.permute(1, 2, 0).contiguous(), w_uv.permute(1, 0, 2).contiguous())
        self.layers["mla"] = self.layer
        self.builder = make_builder(self.planner)

    def step(self, lengths: list[tuple[int, int]], *, padded_rows: int = 0, padded_requests: int = 0) -> Step:
        """One batch of requests given by (rows, context); padded as for a CUDA graph."""
        return Step(self, lengths, padded_rows, padded_requests)


def vllm_config(**more: Any) -> Any:
    scheduler = SimpleNamespace(max_num_batched_tokens=MAX_ROWS, max_num_seqs=MAX_REQUESTS)
    compilation = SimpleNamespace(max_cudagraph_capture_size=None)
    return SimpleNamespace(scheduler_config=scheduler, compilation_config=compilation, **more)


def make_builder(planner: VllmPlanner | None) -> Any:
    spec = SimpleNamespace(block_size=PAGE)
    interleave = 1 if planner is None or planner.dcp is None else planner.dcp.shard.interleave
    given = vllm_config(parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=interleave))
    return planned_builder(StockBuilder, lambda: planner)(spec, ["mla"], given, torch.device("cpu"))


class Step:
    """One batch: its queries and new latents, its selection, its metadata, and what has to come out."""

    def __init__(self, world: World, lengths: list[tuple[int, int]], padded_rows: int, padded_requests: int) -> None:
        self.world, self.lengths = world, lengths
        random, planner = world.random, world.planner
        self.num_rows = sum(rows for rows, _ in lengths)
        total = self.num_rows + padded_rows
        num_requests = len(lengths) + padded_requests

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=random).bfloat16()

        self.q = torch.randn(total, world.heads, NOPE + ROPE, generator=world.random_heads).bfloat16()
        self.kv_c, self.k_pe = normal(total, LORA), normal(total, 1, ROPE)
        pages = MAX_LEN // PAGE + 1
        self.table = torch.zeros(num_requests, pages, dtype=torch.int32)
        permuted = torch.randperm(world.cache.num_pages - 1, generator=random).int() + 1
        self.table[: len(lengths)] = permuted[: len(lengths) * pages].view(len(lengths), pages)
        starts = [0]
        for rows, _ in lengths:
            starts.append(starts[-1] + rows)
        starts += [starts[-1]] * padded_requests
        self.starts = starts
        kv_lens = [context for _, context in lengths] + [0] * padded_requests
        slot_mapping = torch.full((total,), -1, dtype=torch.int64)
        for request, (rows, context) in enumerate(lengths):
            mine = slice(starts[request], starts[request + 1])
            latent = normal(context, LORA + ROPE)
            latent[context - rows :] = torch.cat([self.kv_c[mine], self.k_pe[mine].squeeze(1)], dim=-1)
            held, slots = self.held(request)
            reference_write(world.cache, latent[held, :LORA], slots, rope=latent[held, LORA:])
            of_token = torch.full((context,), -1)
            of_token[held] = slots
            slot_mapping[mine] = of_token[context - rows :]
        self.common = CommonAttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(kv_lens, dtype=torch.int32),
            num_reqs=num_requests,
            num_actual_tokens=total,
            max_query_len=max((rows for rows, _ in lengths), default=0),
            max_seq_len=max(kv_lens, default=0),
            block_table_tensor=self.table,
            slot_mapping=slot_mapping,
            seq_lens_cpu_upper_bound=torch.tensor(kv_lens, dtype=torch.int32),
            positions=torch.arange(total),
            is_prefilling=torch.tensor(kv_lens) < 0,
            _num_computed_tokens_cache=torch.tensor(kv_lens),
        )
        self.metadata = world.builder.build(0, self.common)
        split = planner.current
        assert split is not None
        self.split = split
        self._select()

    def slots(self, request: int) -> torch.Tensor:
        position = torch.arange(self.lengths[request][1])
        return self.table[request][position // PAGE].long() * PAGE + position % PAGE

    def held(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(positions of the tokens that this rank's cache has, their slots)."""
        position, shard = torch.arange(self.lengths[request][1]), self.world.shard
        if shard is None:
            return position, self.slots(request)
        position = position[position // shard.interleave % shard.ranks == shard.rank]
        local = torch.arange(len(position))
        return position, self.table[request][local // PAGE].long() * PAGE + local % PAGE

    def _select(self) -> None:
        """Write the indexer's buffer: -1 for padding, arbitrary values for rows that must not be read."""
        buffer = self.world.buffer
        buffer.fill_(5)
        buffer[: self.common.num_actual_tokens] = -1
        for request, (rows, context) in enumerate(self.lengths):
            for place in range(rows):
                row, seen = self.starts[request] + place, context - rows + place + 1
                if request in self.split.dense_requests:
                    buffer[row] = 3
                    continue
                count = min(seen, buffer.shape[1])
                chosen = torch.randperm(seen, generator=self.world.random)[:count].sort().values
                buffer[row, :count] = chosen.int()

    def run(self) -> torch.Tensor:
        """[rows, heads, v] of the layer."""
        world = self.world
        out = world.layer.forward_impl(self.q, self.kv_c, self.k_pe, world.kv_cache, self.metadata)
        return out.view(-1, world.heads, V)

    def expected(self) -> torch.Tensor:
        """float32 [rows, heads, v], densely, head by head: keys and values projected, unselected ones masked."""
        world = self.world
        out = torch.zeros(self.common.num_actual_tokens, world.heads, V)
        weight = world.weight.float()
        for request, (rows, context) in enumerate(self.lengths):
            latent = reference_read(world.cache, self.slots(request), dtype=torch.float32)
            mine = slice(self.starts[request], self.starts[request] + rows)
            dense = request in self.split.dense_requests
            if dense:
                latent[context - rows :] = torch.cat([self.kv_c[mine], self.k_pe[mine].squeeze(1)], dim=-1).float()
            kv = torch.einsum("nl,lhd->nhd", latent[:, :LORA], weight)
            k = torch.cat([kv[..., :NOPE], latent[:, None, LORA:].expand(-1, world.heads, -1)], dim=-1)
            for place in range(rows):
                row, seen = mine.start + place, context - rows + place + 1
                visible = torch.zeros(context, dtype=torch.bool)
                if dense:
                    visible[:seen] = True
                else:
                    entries = world.buffer[row]
                    visible[entries[entries >= 0].long()] = True
                logits = torch.einsum("hd,nhd->hn", self.q[row].float(), k) * SCALE
                weights = logits.masked_fill(~visible, float("-inf")).softmax(-1)
                out[row] = torch.einsum("hn,nhv->hv", weights, kv[..., NOPE:])
        return out

    def check(self) -> None:
        torch.testing.assert_close(self.run().float(), self.expected(), atol=0.03, rtol=0.03)
