"""SGLang in miniature for the tests of resharding: its ranks, batches, selection and cache.

Every rank has the same batch, its local heads of q, and the whole cache.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.sglang.v32 import token_shard
from nsa_plugin.backends.sglang.v32.attention import with_plans
from nsa_plugin.backends.sglang.v32.indexer import wrap_topk_ragged
from nsa_plugin.backends.sglang.v32.routes import SglangPlanner
from nsa_plugin.backends.sglang.v32.state import adopt
from nsa_plugin.backends.sglang.v32.token_shard import SglangExchange
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.kernels.kv_cache import open_cache, reference_read
from nsa_plugin.kernels.sparse_mla import reference_prefill
from nsa_plugin.libraries.capabilities import Op
from nsa_plugin.parallel.token_shard import TokenShard
from nsa_plugin.settings import Settings
from tests.backends.fake_sglang.v32 import (
    D_QK,
    D_V,
    H200,
    PAGE,
    DsaBackend,
    ForwardMode,
    NsaBackend,
    filled_cache,
    forward_batch,
)

HEADS, TOPK, INDEX_HEADS, INDEX_DIM = 2, 128, 2, 128
MAX_TOKENS, SLOTS = 120, 1024
SCALE = 0.1


@dataclass(frozen=True)
class Step:
    """A batch: query rows and context of each request, and rows that MLP-sync pads behind them."""

    q_lens: list[int]
    kv_lens: list[int]
    padding: int = 0
    mode: ForwardMode = ForwardMode.EXTEND

    @property
    def rows(self) -> int:
        return sum(self.q_lens)


# Prompts, continued prompts, single rows, an idle request; then one after the other of any size.
MANY = Step([9, 1, 1, 17, 0, 4, 1, 3, 26, 1], [9, 140, 3, 160, 12, 4, 1, 33, 51, 70])
STEPS = (
    MANY,
    Step([37], [37 + 130]),
    Step([1, 1, 1, 5], [150, 3, 90, 5], padding=3),
    Step([MAX_TOKENS], [MAX_TOKENS + 64], padding=8),
    Step([3], [160]),  # of 4 ranks: fewer rows than ranks
    Step([0, 0], [140, 9], padding=4),
    Step([MAX_TOKENS + 1], [MAX_TOKENS + 64]),  # more than the buffers hold
    Step([30, 2, 7], [30, 139, 200], padding=1),
    MANY,
)


@dataclass(frozen=True)
class Metadata:
    """SGLang's indexer metadata of a batch."""

    attn_metadata: Any
    topk_transform_method: Any
    q_lens: list[int]
    kv_lens: list[int]
    topk_backend: Any = field(default_factory=lambda: SimpleNamespace(is_sgl_kernel=lambda: True))
    force_unfused_topk: bool = False

    def get_page_table_64(self) -> torch.Tensor:
        return torch.zeros(len(self.kv_lens), 1, dtype=torch.int32)

    def get_indexer_kvcache_range(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.attn_metadata.ranges

    def get_indexer_seq_len(self) -> torch.Tensor:
        return torch.tensor(self.kv_lens, dtype=torch.int32)

    def get_indexer_seq_len_cpu(self) -> torch.Tensor:
        return torch.tensor(self.kv_lens)

    def get_dsa_extend_len_cpu(self) -> list[int]:
        return self.q_lens

    def get_token_to_batch_idx(self) -> torch.Tensor:
        return self.attn_metadata.token_to_batch_idx


class Wide:
    """Check as SGLang's FlashMLA does: schedule, lengths and queries have the same rows and heads."""

    flashmla_kv_num_q_heads = 128  # SGLang's for the heads of a rank; 64 for all of the tests' heads

    def _compute_flashmla_metadata(self, cache_seqlens: torch.Tensor, seq_len_q: int) -> Any:
        self.calls.append("schedule")  # type: ignore[attr-defined]
        return cache_seqlens.shape[0], self.flashmla_kv_num_q_heads

    def get_indexer_metadata(self, layer_id: int, forward_batch: Any) -> Any:
        return self.engine.metadata(self)  # type: ignore[attr-defined]

    def _forward_flashmla_kv(
        self, q_all: Any, kv_cache: Any, v_head_dim: int, sm_scale: float, layer: Any, metadata: Any, page_table_1: Any
    ) -> torch.Tensor:
        self.calls.append("flashmla_kv")  # type: ignore[attr-defined]
        rows, heads = q_all.shape[0], layer.tp_q_head_num
        lengths = getattr(metadata, f"{self.x}_cache_seqlens_int32")  # type: ignore[attr-defined]
        assert self.flashmla_kv_num_q_heads == (128 if self.nsa_plugin.share is None else 64)  # type: ignore[attr-defined]
        assert lengths.tolist() == (page_table_1 >= 0).sum(1).clamp(min=1).tolist()
        assert metadata.flashmla_metadata == (rows, self.flashmla_kv_num_q_heads)
        q = q_all.view(-1, heads, layer.head_dim)
        return row_by_row(q, kv_cache, page_table_1, sm_scale).unsqueeze(1)

    def _forward_flashmla_sparse(
        self, q_all: Any, kv_cache: Any, v_head_dim: int, page_table_1: Any, sm_scale: float, topk_length: Any = None
    ) -> torch.Tensor:
        self.calls.append("flashmla_sparse")  # type: ignore[attr-defined]
        assert topk_length is None or topk_length.shape[0] == q_all.shape[0]
        return row_by_row(q_all, kv_cache, page_table_1, sm_scale)


class WideDsa(Wide, DsaBackend):
    pass


class WideNsa(Wide, NsaBackend):
    pass


def row_by_row(q: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor, scale: float) -> torch.Tensor:
    """The engine's own kernel, in float64, which computes a row alike among however many."""
    rows = kv_cache.view(-1, kv_cache.shape[-1])
    if kv_cache.dtype != torch.bfloat16:
        paged = open_cache(kv_cache.view(-1, PAGE, 1, kv_cache.shape[-1]), "v32_fp8")
        rows = reference_read(paged, torch.arange(paged.num_slots), dtype=torch.float32)
    out = q.new_zeros(q.shape[0], q.shape[1], D_V)
    for row, chosen in enumerate(slots):
        selected = rows[chosen[chosen >= 0].long()].double()
        logits = (q[row].double() @ selected.T) * scale
        out[row] = (logits.softmax(-1) @ selected[:, :D_V]).to(q.dtype)
    return out


def reference_row_by_row(q: torch.Tensor, kv: Any, slots: torch.Tensor, **named: Any) -> Any:
    """The plugin's own kernel, likewise: the last bit of a matrix product may turn on how many rows it has."""
    parts = [reference_prefill(q[row : row + 1], kv, slots[row : row + 1], **named).out for row in range(q.shape[0])]
    return SimpleNamespace(out=torch.cat(parts))


def reference_step(q: torch.Tensor, kv: Any, slots: torch.Tensor, **named: Any) -> Any:
    return SimpleNamespace(out=reference_row_by_row(q.squeeze(1), kv, slots.squeeze(1), **named).out.unsqueeze(1))


def score(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    topk: int,
    *,
    rows_per_chunk: int,
    requests: list[tuple[int, int, int, int]],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The indexer's op, row by row, each within the request that it is said to be of."""
    result = torch.full((q.shape[0], topk), -1, dtype=torch.int32)
    scored = 0
    for first, end, key_first, key_end in requests:
        for row in range(first, end):
            assert (scored := scored + 1) == row + 1  # every row, once, in order
            assert key_first == int(ks[row]) < int(ke[row]) <= key_end
            keys = slice(key_first, int(ke[row]))
            products = (k[keys].double() @ q[row].double().T).relu() @ weights[row].double()
            chosen = (products * k_scale[keys].double()).topk(min(topk, len(products))).indices
            result[row, : len(chosen)] = chosen.int()
    assert scored == q.shape[0]
    return result if out is None else out.copy_(result)


class Engine:
    """A batch on every rank: seeded tensors, and what SGLang makes of its lengths."""

    def __init__(self, step: Step, layout: str, heads: int, seed: int):
        self.step, self.layout = step, layout
        made = torch.Generator().manual_seed(seed)
        rows, keys = step.rows + step.padding, sum(step.kv_lens)
        self.all_q = torch.randn(rows, heads, D_QK, generator=made).bfloat16()
        self.all_q[step.rows :] = float("nan")
        self.index_q = torch.randn(rows, INDEX_HEADS, INDEX_DIM, generator=made).to(torch.float8_e4m3fn)
        self.index_k = torch.randn(keys, INDEX_DIM, generator=made).to(torch.float8_e4m3fn)
        self.k_scale = torch.rand(keys, generator=made) + 0.5
        self.weights = torch.randn(rows, INDEX_HEADS, generator=made)
        _, self.cache = filled_cache(layout, pages=SLOTS // PAGE)
        self.slots = torch.randperm(SLOTS, generator=made)[:keys].int()  # of each key of the batch
        q_lens, kv_lens = torch.tensor(step.q_lens), torch.tensor(step.kv_lens)
        self.request = torch.repeat_interleave(torch.arange(len(q_lens)), q_lens)
        first_key = (kv_lens.cumsum(0) - kv_lens)[self.request]
        seen = torch.cat([torch.arange(k - q, k) for q, k in zip(step.q_lens, step.kv_lens, strict=True)]) + 1
        self.lengths = seen.clamp(max=TOPK).int()
        table = torch.zeros(len(kv_lens), int(kv_lens.max()), dtype=torch.int32)
        for request, part in enumerate(self.slots.split(step.kv_lens)):
            table[request, : len(part)] = part
        self.attention = SimpleNamespace(
            ranges=(first_key.int(), (first_key + seen).int()),
            token_to_batch_idx=self.request.int(),
            topk_indices_offset=first_key.int(),
            page_table_1=table,
        )
        self.forward_batch = forward_batch(step.mode, step.q_lens, step.kv_lens)
        self.index_calls = 0

    def metadata(self, backend: Any) -> Metadata:
        ragged = self._copies(backend) and self.step.mode is ForwardMode.EXTEND
        method = SimpleNamespace(name="RAGGED" if ragged else "PAGED")
        return Metadata(self.attention, method, self.step.q_lens, self.step.kv_lens)

    def _copies(self, backend: Any) -> bool:
        """Whether SGLang copies the selected keys of an fp8 cache for a prefill in mode EXTEND; in MIXED it fails."""
        return self.layout == "v32_fp8" and backend.impls[0] == "flashmla_sparse"

    def prepare(self, backend: Any) -> Any:
        backend.engine = self
        pool = SimpleNamespace(
            get_index_k_scale_buffer=lambda *given: (
                self.index_k.view(torch.uint8),
                self.k_scale.unsqueeze(1).view(torch.uint8),
            )
        )
        backend.token_to_kv_pool = pool
        backend.init_forward_metadata(self.forward_batch)
        return backend.nsa_plugin.route.plan

    def select(self, backend: Any, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """[rows, topk], as the model's indexer would have it for a layer."""

        def stock(*given: Any, **named: Any) -> torch.Tensor:
            raise AssertionError("the engine's own selection ran")

        indexer = SimpleNamespace(index_topk=TOPK, num_init_tokens=0, num_local_tokens=0)
        metadata = backend.get_indexer_metadata(0, self.forward_batch)
        given = (indexer, False, self.forward_batch, 0, self.index_q, self.weights.unsqueeze(-1), metadata)
        return wrap_topk_ragged(stock)(*given, topk_result=buffer)

    def attend(self, backend: Any, selected: torch.Tensor, heads: slice, layer_id: int = 0) -> torch.Tensor:
        """[rows, heads, d_v], as `forward_extend` and `forward_decode` do at the end of the backend's path."""
        q = self.all_q[:, heads].contiguous()
        cache, impl = self.cache, backend.impls[0 if self.step.mode.is_extend() else 1]
        if self._copies(backend) and self.step.mode.is_extend():
            assert self.step.mode is ForwardMode.EXTEND, "kv must have dtype kBFloat16"
            paged = open_cache(cache.view(-1, PAGE, 1, cache.shape[-1]), "v32_fp8")
            cache = reference_read(paged, self.slots.long(), dtype=torch.bfloat16).unsqueeze(1)
        named = {"q_all": q, "kv_cache": cache, "page_table_1": selected, "sm_scale": SCALE, "v_head_dim": D_V}
        if impl == "flashmla_sparse":
            return backend._forward_flashmla_sparse(**named)  # type: ignore[no-any-return]
        layer = SimpleNamespace(tp_q_head_num=q.shape[1], head_dim=D_QK, layer_id=layer_id)
        lengths = {f"{backend.x}_cache_seqlens_int32": self.lengths}
        schedule = len(self.lengths), backend.flashmla_kv_num_q_heads
        metadata = SimpleNamespace(**lengths, flashmla_metadata=schedule)
        out = backend._forward_flashmla_kv(**named, layer=layer, metadata=metadata)
        assert out.shape[1] == 1
        return out.squeeze(1)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Way:
    """How a batch is attended: the cache, the library, and whether FlashMLA reads a copy of an fp8 cache."""

    layout: str
    library: str
    copied: bool = False
    original: type = WideDsa


WAYS = (
    Way("v32_fp8", "reference"),
    Way("bf16", "reference"),
    Way("bf16", "flash_mla", original=WideNsa),
    Way("v32_fp8", "flash_mla", copied=True),
    Way("v32_fp8", "flash_mla"),
    Way("v32_fp8", "flash_mla", original=WideNsa),
)


def exchange_of(**changed: Any) -> SglangExchange:
    sizes = {"heads": HEADS, "d_qk": D_QK, "d_v": D_V, "max_tokens": MAX_TOKENS} | changed
    shard = TokenShard(None, dtype=torch.bfloat16, device="cpu", **sizes)
    return SglangExchange(shard, dist.group.WORLD, lambda: False)


def model_of(way: Way, ranks: int) -> ModelShape:
    return ModelShape(num_heads=ranks * HEADS, attn_tp_size=ranks, kv_layout=way.layout, index_topk=TOPK)


def backend_of(way: Way, model: ModelShape, exchange: SglangExchange | None, **settings: Any) -> Any:
    chosen = Settings(prefill_backend=way.library, token_shard="off" if exchange is None else "on", **settings)
    rows = {} if exchange is None else {"exchange_rows": exchange.shard.max_tokens, "no_exchange": ""}
    other = Op.SPARSE_MLA_DECODE if way.copied else None
    device = H200.keeping(lambda library, kernel: library != "flash_mla" or kernel.op is not other)
    planner = SglangPlanner(model, device, chosen, **rows)
    paths = ("flashmla_kv", "flashmla_kv") if way.layout == "v32_fp8" else ("flashmla_sparse", "fa3")
    backend = with_plans(way.original)(*paths)
    adopt(backend, planner, SimpleNamespace(), exchange)
    providers = Providers(way.layout, 0)
    providers._loaded["indexer_topk", "deep_gemm"] = score
    providers._loaded["sparse_mla_prefill", "reference"] = reference_row_by_row
    providers._loaded["sparse_mla_decode", "reference"] = reference_step
    backend.nsa_plugin.providers = providers
    return backend


def environment() -> None:
    """SGLang's modules that the adapter reads, in miniature."""
    flag = SimpleNamespace(get=lambda: True)
    contents: dict[str, dict[str, Any]] = {
        "sglang.srt.environ": {"envs": SimpleNamespace(SGLANG_DSA_FUSE_TOPK=flag)},
        "sglang.srt.distributed.parallel_state": {
            "get_attn_tp_group": lambda: SimpleNamespace(device_group=dist.group.WORLD, cpu_group=dist.group.WORLD)
        },
        token_shard.IN_GRAPH[0][0][0]: {"is_in_breakable_cuda_graph": lambda: False},
        token_shard.IN_GRAPH[1][1][0]: {"is_in_piecewise_cuda_graph": lambda: False},
    }
    for name, members in contents.items():
        parts = name.split(".")
        for length in range(1, len(parts)):
            sys.modules.setdefault(".".join(parts[:length]), ModuleType(".".join(parts[:length])))
        module = ModuleType(name)
        vars(module).update(members)
        sys.modules[name] = module


def poison(exchange: SglangExchange) -> None:
    for buffer in vars(exchange.shard).values():
        if isinstance(buffer, torch.Tensor):
            buffer.fill_(float("nan"))


def heads_of(rank: int) -> slice:
    return slice(rank * HEADS, (rank + 1) * HEADS)


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape
    assert torch.equal(found, wanted)


# ---------------------------------------------------------------------------------------------------
