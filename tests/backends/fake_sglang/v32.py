"""SGLang's attention backend in miniature, before and after its renaming, on the CPU.

What is here is what the adapter relies on: when the engine asks for the path of a batch, what it hands to the functions
at the end of a path, and stock results there, computed densely.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum, auto
from types import SimpleNamespace
from typing import Any

import torch

from nsa_plugin.backends.sglang.v32.attention import with_plans
from nsa_plugin.backends.sglang.v32.routes import SglangPlanner
from nsa_plugin.backends.sglang.v32.state import adopt
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.kernels.kv_cache import PagedCache, allocate_cache, reference_read, reference_write
from nsa_plugin.libraries.devices import DeviceProfile, synthetic
from nsa_plugin.settings import Settings

HEADS, PAGE, D_V, D_QK = 4, 64, 512, 576
MODEL = ModelShape(num_heads=HEADS * 2, attn_tp_size=2, kv_layout="v32_fp8")
H200 = synthetic(90)
DRAFT_TOKENS = 4


class ForwardMode(IntEnum):
    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()
    DRAFT_EXTEND = auto()
    DRAFT_EXTEND_V2 = auto()
    SPLIT_PREFILL = auto()

    def is_extend(self) -> bool:
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED)


DSAFlashMLAMetadata = SimpleNamespace


@dataclass
class Layer:
    tp_q_head_num: int = HEADS
    tp_k_head_num: int = HEADS
    tp_v_head_num: int = HEADS
    head_dim: int = D_QK
    v_head_dim: int = D_V
    scaling: float = 0.1


def forward_batch(mode: ForwardMode, q_lens: list[int], kv_lens: list[int], **more: Any) -> Any:
    """A ForwardBatch with what the host knows of it."""
    extend = mode.is_extend() or mode is ForwardMode.DRAFT_EXTEND
    fields: dict[str, Any] = {
        "forward_mode": mode,
        "batch_size": len(kv_lens),
        "seq_lens_cpu": torch.tensor(kv_lens, dtype=torch.int64),
        "extend_seq_lens_cpu": list(q_lens) if extend else None,
        "extend_prefix_lens_cpu": [kv - q for q, kv in zip(q_lens, kv_lens, strict=False)] if extend else None,
        "rids": [f"request-{place}" for place in range(len(kv_lens))],
        "attn_cp_metadata": None,
        "get_max_chunk_capacity": lambda: 128 * 1024,
    }
    return SimpleNamespace(**(fields | more))


class StockBackend:
    """Base of both names of the class. `calls` lists the stock functions that ran."""

    x = "dsa"

    def __init__(self, prefill: str = "flashmla_kv", decode: str = "flashmla_kv", page_size: int = PAGE) -> None:
        setattr(self, f"{self.x}_prefill_impl", prefill)
        setattr(self, f"{self.x}_decode_impl", decode)
        self.real_page_size = page_size
        self.speculative_num_draft_tokens = DRAFT_TOKENS
        self.max_context_len = 4096
        self.use_mha = False
        self.dense_allowed = True
        self.token_to_kv_pool = SimpleNamespace(name="pool")
        self.calls: list[str] = []

    @property
    def impls(self) -> tuple[str, str]:
        return getattr(self, f"{self.x}_prefill_impl"), getattr(self, f"{self.x}_decode_impl")

    def _set(self, forward_batch: Any) -> None:
        extend = forward_batch is not None and forward_batch.forward_mode.is_extend()
        short = extend and int(forward_batch.seq_lens_cpu.max()) <= 2048
        sm = getattr(self, "_get_device_sm", lambda: 90)()
        self.use_mha = bool(short and self.dense_allowed and sm in (90, 100))

    def _metadata(self, forward_batch: Any) -> None:
        extend = forward_batch.forward_mode.is_extend()
        impl = self.impls[0 if extend else 1]
        schedule = None
        if impl == "flashmla_kv" and not self.use_mha:
            schedule = self._compute_flashmla_metadata(torch.zeros(1), 1)
        self.forward_metadata = SimpleNamespace(flashmla_metadata=schedule)

    def _compute_flashmla_metadata(self, cache_seqlens: torch.Tensor, seq_len_q: int) -> Any:
        self.calls.append("schedule")
        return "schedule"

    def get_indexer_metadata(self, layer_id: int, forward_batch: Any) -> Any:
        return FrozenMetadata()

    def _forward_flashmla_kv(
        self, q_all: Any, kv_cache: Any, v_head_dim: int, sm_scale: float, layer: Any, metadata: Any, page_table_1: Any
    ) -> torch.Tensor:
        self.calls.append("flashmla_kv")
        return stock_attention(q_all.view(-1, HEADS, D_QK), kv_cache, page_table_1, sm_scale).unsqueeze(1)

    def _forward_flashmla_sparse(
        self, q_all: Any, kv_cache: Any, v_head_dim: int, page_table_1: Any, sm_scale: float, topk_length: Any = None
    ) -> torch.Tensor:
        self.calls.append("flashmla_sparse")
        return stock_attention(q_all, kv_cache, page_table_1, sm_scale)

    def _forward_fa3(
        self, q_rope: Any, kv_cache: Any, v_head_dim: int, q_nope: Any, page_table: Any, sm_scale: float
    ) -> torch.Tensor:
        self.calls.append("fa3")
        return stock_attention(torch.cat([q_nope, q_rope], dim=-1), kv_cache, page_table, sm_scale)


class DsaBackend(StockBackend):
    """The class from 0.5.13 on."""

    def set_dsa_prefill_impl(self, forward_batch: Any = None) -> None:
        self._set(forward_batch)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.set_dsa_prefill_impl(forward_batch)
        self._metadata(forward_batch)

    def _apply_cuda_graph_metadata(
        self, bs: int, req_pool_indices: Any, seq_lens: Any, seq_lens_cpu: Any, forward_mode: Any, spec_info: Any
    ) -> None:
        self.set_dsa_prefill_impl(forward_batch=None)
        self.calls.append("apply")
        if self.dsa_decode_impl == "flashmla_kv":  # type: ignore[attr-defined]
            self._compute_flashmla_metadata(torch.zeros(1), 1)

    def init_forward_metadata_replay_cuda_graph_from_precomputed(
        self, bs: int, precomputed: Any, forward_mode: Any
    ) -> None:
        self.set_dsa_prefill_impl(forward_batch=None)
        self.calls.append("precomputed")


class ReplayedBySize:
    """The class before 0.5.13, which selects a replay by its size."""

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: Any,
        seq_lens: Any,
        seq_lens_sum: int,
        encoder_lens: Any,
        forward_mode: Any,
        spec_info: Any,
        seq_lens_cpu: Any,
    ) -> None:
        self.replay(bs)

    def replay(self, bs: int) -> None:
        raise NotImplementedError


class NsaBackend(ReplayedBySize, StockBackend):
    """The class before 0.5.13."""

    x = "nsa"

    def set_nsa_prefill_impl(self, forward_batch: Any = None) -> None:
        self._set(forward_batch)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.set_nsa_prefill_impl(forward_batch)
        self._metadata(forward_batch)

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: Any,
        seq_lens: Any,
        encoder_lens: Any,
        forward_mode: Any,
        spec_info: Any,
    ) -> None:
        self.set_nsa_prefill_impl(forward_batch=None)
        self.calls.append("capture")

    def replay(self, bs: int) -> None:
        self.set_nsa_prefill_impl(forward_batch=None)
        self.calls.append("replay")


@dataclass(frozen=True)
class FrozenMetadata:
    """SGLang's indexer metadata is frozen too."""

    force_unfused_topk: bool = False


def started(
    original: type = DsaBackend,
    *,
    layout: str = "v32_fp8",
    prefill: str | None = None,
    decode: str | None = None,
    server_args: Any = None,
    sinks: bool = False,
    device: DeviceProfile = H200,
    portable: bool = False,
    dense_up_to: int = 0,
    **settings: Any,
) -> Any:
    """A backend of the plugin that serves; `notes` has what `adopt` said."""
    defaults = ("flashmla_kv", "flashmla_kv") if layout == "v32_fp8" else ("flashmla_sparse", "fa3")
    backend = with_plans(original)(prefill or defaults[0], decode or defaults[1])
    model = replace(MODEL, kv_layout=layout)
    chosen = Settings(**settings)
    planner = SglangPlanner(model, device, chosen, sinks=sinks, portable=portable, dense_up_to=dense_up_to)
    if portable:
        backend._get_device_sm = lambda: device.sm
    backend.notes = adopt(backend, planner, server_args or SimpleNamespace())
    return backend


def filled_cache(layout: str, pages: int = 4) -> tuple[PagedCache, torch.Tensor]:
    """A cache of seeded rows, and the tensor [slots, 1, bytes or values] that SGLang's pool has of it."""
    cache = allocate_cache(layout, pages, PAGE, dim=D_QK if layout == "bf16" else None)
    rows = torch.randn(cache.num_slots, D_QK, generator=torch.Generator().manual_seed(0)).bfloat16()
    slots = torch.arange(cache.num_slots)
    if layout == "bf16":
        reference_write(cache, rows, slots)
        return cache, cache.data.view(cache.num_slots, 1, D_QK)
    reference_write(cache, rows[:, :D_V], slots, rope=rows[:, D_V:])
    return cache, cache.data.view(cache.num_slots, 1, -1).view(torch.float8_e4m3fn)


def stock_attention(q: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor, scale: float) -> torch.Tensor:
    """[tokens, heads, d_v] in float64, of a cache as SGLang's pool has it."""
    if kv_cache.dtype == torch.bfloat16:
        rows = kv_cache.view(-1, D_QK)
    else:
        from nsa_plugin.kernels.kv_cache import open_cache

        cache = open_cache(kv_cache.view(-1, PAGE, 1, kv_cache.shape[-1]), "v32_fp8")
        rows = reference_read(cache, torch.arange(cache.num_slots), dtype=torch.float32)
    logits = torch.einsum("thd,nd->thn", q.double(), rows.double()) * scale
    chosen = torch.zeros(q.shape[0], rows.shape[0], dtype=torch.bool)
    for row, entries in enumerate(slots):
        chosen[row, entries[entries >= 0].long()] = True
    weights = logits.masked_fill(~chosen.unsqueeze(1), float("-inf")).softmax(-1).nan_to_num(0.0)
    return torch.einsum("thn,nd->thd", weights, rows[:, :D_V].double()).to(q.dtype)
