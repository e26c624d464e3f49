"""SGLang's MLA attention module in miniature, 0.5.16 and later: `forward_absorb_prepare` and `forward_absorb_core`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from nsa_plugin.backends.sglang.v32.split import SplitBatch, wrap_core, wrap_prepare
from nsa_plugin.kernels.kv_cache import open_cache, reference_write
from nsa_plugin.kernels.mha import reference as reference_mha
from tests.backends.fake_sglang.v32 import (
    D_QK,
    D_V,
    HEADS,
    PAGE,
    DsaBackend,
    ForwardMode,
    Layer,
    filled_cache,
    forward_batch,
    started,
)

NOPE, ROPE, V, SCALE = 128, 64, 128, 0.1
Q_LORA, TOPK = 32, 2048


class Projection(nn.Module):
    """A linear layer of SGLang, which returns (output, bias)."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x @ self.weight.T, None


class SplitBackend(DsaBackend):
    """The backend with a pool and SGLang's dense call."""

    def _forward_standard_mha(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, metadata: Any
    ) -> torch.Tensor:
        self.calls.append("dense")
        assert forward_batch.batch_size == len(metadata.cu_seqlens_q) - 1
        assert metadata.max_seq_len_k == int(metadata.cache_seqlens_int32.max())
        bounds = metadata.cu_seqlens_q, metadata.cu_seqlens_k
        return reference_mha(q, k.contiguous(), v.contiguous(), *bounds, scale=layer.scaling).out


class Attention(nn.Module):
    """One layer. `slots` [tokens, topk] stands for the indexer's selection."""

    def __init__(self, backend: Any, layout: str):
        super().__init__()
        seeded = torch.Generator().manual_seed(1)

        def weight(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, generator=seeded) / shape[-1] ** 0.5).bfloat16()

        self.backend, self.layout = backend, layout
        self.q_lora_rank, self.num_local_heads, self.qk_nope_head_dim = Q_LORA, HEADS, NOPE
        self.q_b_proj = Projection(weight(HEADS * (NOPE + ROPE), Q_LORA))
        self.kv_b_proj = Projection(weight(HEADS * (NOPE + V), D_V))
        self.o_proj = Projection(weight(64, HEADS * V))
        w_k, w_v = self.kv_b_proj.weight.view(HEADS, NOPE + V, D_V).split([NOPE, V], dim=1)
        self.w_kc, self.w_vc = w_k, w_v.transpose(1, 2)
        self.attn_mqa, self.attn_mha = Layer(), Layer(head_dim=NOPE + ROPE, v_head_dim=V)
        self.attn_mqa.layer_id = 3  # type: ignore[attr-defined]

    def q_b_proj_forward(self, q_lora: torch.Tensor) -> torch.Tensor:
        return self.q_b_proj(q_lora)[0].view(-1, HEADS, NOPE + ROPE)  # type: ignore[no-any-return]

    def forward_absorb_prepare(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any, zero_allocator: Any
    ) -> Any:
        """`hidden_states`: [tokens, Q_LORA + 576], q_lora and latents; RoPE only negates."""
        q_lora, k_nope, k_pe = hidden_states.split([Q_LORA, D_V, ROPE], dim=-1)
        q_nope, q_pe = self.q_b_proj_forward(q_lora).split([NOPE, ROPE], dim=-1)
        absorbed = torch.bmm(q_nope.transpose(0, 1), self.w_kc).transpose(0, 1)
        rotated = -k_pe.unsqueeze(1)
        return -q_pe, rotated, absorbed, k_nope.unsqueeze(1), forward_batch, zero_allocator, positions

    def forward_absorb_core(
        self,
        q_pe: Any,
        k_pe: Any,
        q_nope_out: Any,
        k_nope: Any,
        forward_batch: Any,
        zero_allocator: Any,
        positions: Any,
    ) -> torch.Tensor:
        out = self.attend(q_nope_out, k_nope, q_pe, k_pe, forward_batch)
        value = torch.bmm(out.view(-1, HEADS, D_V).transpose(0, 1), self.w_vc).transpose(0, 1).flatten(1)
        return self.o_proj(value)[0]  # type: ignore[no-any-return]

    def attend(self, q_nope_out: Any, k_nope: Any, q_pe: Any, k_pe: Any, forward_batch: Any) -> torch.Tensor:
        """Store the new tokens and attend, as SGLang's `attn_mqa` does."""
        cache = open_cache(self.buffer.view(-1, PAGE, 1, self.buffer.shape[-1]), self.layout)
        new = torch.cat([k_nope, k_pe], dim=-1).squeeze(1)[: len(forward_batch.out_cache_loc)]
        rope = {} if self.layout == "bf16" else {"rope": new[:, D_V:].contiguous()}
        reference_write(cache, new if self.layout == "bf16" else new[:, :D_V], forward_batch.out_cache_loc, **rope)
        q = torch.cat([q_nope_out, q_pe], dim=-1)
        metadata = self.backend.forward_metadata
        named = {"kv_cache": self.buffer, "v_head_dim": D_V, "sm_scale": SCALE, "page_table_1": self.slots}
        if self.backend.dsa_prefill_impl == "flashmla_kv":
            return self.backend._forward_flashmla_kv(q_all=q, layer=self.attn_mqa, metadata=metadata, **named)  # type: ignore[no-any-return]
        return self.backend._forward_flashmla_sparse(q_all=q, **named)  # type: ignore[no-any-return]

    @property
    def buffer(self) -> torch.Tensor:
        return self.backend.token_to_kv_pool.get_key_buffer(self.attn_mqa.layer_id)  # type: ignore[no-any-return,attr-defined]


class SplitAttention(Attention):
    """The module with the ledger's patches."""

    forward_absorb_prepare = wrap_prepare(Attention.forward_absorb_prepare)
    forward_absorb_core = wrap_core(Attention.forward_absorb_core)


def run(layer: Attention, forward_batch: Any, hidden: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Attend one layer as SGLang's model does: [tokens, 64]."""
    layer.slots = slots  # type: ignore[assignment]
    prepared = layer.forward_absorb_prepare(None, hidden, forward_batch, None)
    return layer.forward_absorb_core(*prepared)  # type: ignore[no-any-return]


def pool_of(buffer: torch.Tensor) -> Any:
    return SimpleNamespace(get_key_buffer=lambda layer_id: buffer)


class Case:
    """A batch, its cache and one layer; `splits` or not, the selection of short contexts is all of their tokens.

    `short`: query tokens of short prompts, which attend densely if the batch is split; decode steps do not.
    """

    def __init__(self, lengths: list[tuple[int, int]], layout: str = "bf16", *, padding: int = 0, **settings: Any):
        self.q_lens, self.kv_lens = [q for q, _ in lengths], [kv for _, kv in lengths]
        seeded = torch.Generator().manual_seed(2)
        pages = -(-sum(self.kv_lens) // 64) + 1
        _, self.buffer = filled_cache(layout, pages)
        # A context's tokens lie anywhere in the cache.
        order = torch.randperm(len(self.buffer), generator=seeded)[: sum(self.kv_lens)]
        contexts = order.split(self.kv_lens)
        self.table = torch.zeros(len(lengths), max(self.kv_lens), dtype=torch.int32)
        self.slots = torch.full((sum(self.q_lens), TOPK), -1, dtype=torch.int32)
        new, row = [], 0
        for request, (q_len, kv_len) in enumerate(lengths):
            self.table[request, :kv_len] = contexts[request].int()
            new.append(contexts[request][kv_len - q_len :])
            for position in range(kv_len - q_len, kv_len):
                seen = torch.randperm(position + 1, generator=seeded)[:TOPK]
                self.slots[row, : len(seen)] = contexts[request][seen].int()
                row += 1
        fields = {"out_cache_loc": torch.cat(new), "spec_info": None}
        self.batch = forward_batch(ForwardMode.EXTEND, self.q_lens, self.kv_lens, **fields)
        self.hidden = torch.randn(row + padding, Q_LORA + D_QK, generator=seeded).bfloat16()
        self.short = torch.tensor([q > 1 and kv <= TOPK for q, kv in lengths for _ in range(q)])
        self.backend = started(SplitBackend, layout=layout, **settings)
        self.backend.token_to_kv_pool = pool_of(self.buffer.clone())
        self.planner = self.backend.nsa_plugin.planner
        self.layer = SplitAttention(self.backend, layout)

    def prepare(self, *, split: bool = True) -> None:
        self.planner.whole = "" if split else "not here"
        self.backend.init_forward_metadata(self.batch)
        self.backend.forward_metadata.page_table_1 = self.table
        lengths = (self.slots >= 0).sum(1).int()
        self.backend.forward_metadata.dsa_cache_seqlens_int32 = lengths

    def run(self, *, split: bool = True) -> torch.Tensor:
        self.prepare(split=split)
        # The indexer has no selection for prompts that attend densely.
        slots = self.slots.masked_fill(self.short.unsqueeze(1), -1) if split else self.slots
        return run(self.layer, self.batch, self.hidden, slots)

    @property
    def split(self) -> SplitBatch | None:
        return self.backend.nsa_plugin.split  # type: ignore[no-any-return]
