"""Sparse MLA for vLLM on a CPU: plans in the batch's metadata, attention by the plugin's reference kernels.

vLLM's MLA layer passes the first query tokens of a batch to `forward_mqa` (absorbed queries) and the rest to
`forward_mha` (queries as projected). The plan decides request by request, so short prompts stay dense in a batch
with a long one. If any request is dense, all prefills go to `forward_mha`, which absorbs the queries of the sparse
ones.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, MLAAttentionImpl, MultipleOf
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from nsa_plugin.backends.common.planner import logits_budget
from nsa_plugin.backends.vllm.cpu.metadata import MLAMetadata, PrefillMetadata, owner_of_rows
from nsa_plugin.backends.vllm.startup.activation import process
from nsa_plugin.backends.vllm.startup.serving import CpuServing
from nsa_plugin.decision.dispatch import partition
from nsa_plugin.decision.plan import Attention, Plan
from nsa_plugin.decision.shapes import Phase
from nsa_plugin.errors import PatchError
from nsa_plugin.kernels import index_transform, mha, sparse_mla
from nsa_plugin.kernels.kv_cache import open_cache, reference_read, reference_write
from nsa_plugin.settings import Settings

_MLA_PREFILL = "vllm.v1.attention.backends.mla.prefill"


@dataclass
class Group:
    """Requests of one batch that share a plan.

    Attributes:
        plan: the decision.
        requests: their places in the batch.
        rows: [num_rows] int64, their query tokens in the batch, request after request.
        request_of_row: [num_rows] int32, place in the batch of each query token's request.
        q_lens, kv_lens: query tokens and context of each, the query tokens included.
    """

    plan: Plan
    requests: list[int]
    rows: torch.Tensor
    request_of_row: torch.Tensor
    q_lens: list[int]
    kv_lens: list[int]


@dataclass(kw_only=True)
class CpuSparseMLAMetadata(MLAMetadata):
    """Metadata that vLLM's MLA layer reads, and the groups that the kernels attend.

    Attributes:
        groups: the requests by plan, decodes first: those with one query token, at the front of the batch.
        settings: of the plugin.
    """

    groups: list[Group]
    settings: Settings
    decode: None = None


class CpuSparseMLABackend(MLACommonBackend):
    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar = ["auto", "bfloat16", "float16"]

    @staticmethod
    def get_name() -> str:
        return "NSA_PLUGIN_CPU"

    @staticmethod
    def get_impl_cls() -> type[CpuSparseMLAImpl]:
        return CpuSparseMLAImpl

    @staticmethod
    def get_builder_cls() -> type[CpuSparseMLAMetadataBuilder]:
        return CpuSparseMLAMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # any

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]

    @classmethod
    def is_sparse(cls) -> bool:
        return True


class CpuSparseMLAMetadataBuilder(AttentionMetadataBuilder[CpuSparseMLAMetadata]):
    _cudagraph_support: ClassVar = AttentionCGSupport.NEVER
    # vLLM sorts requests with this many query tokens to the front: the decodes.
    reorder_batch_threshold = 1

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any, **kwargs: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, **kwargs)
        serving = process().serving
        if not isinstance(serving, CpuServing):
            raise PatchError("the sparse attention backend of nsa-plugin was selected, but the plugin does not serve")
        self.serving = serving

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> CpuSparseMLAMetadata:
        common = common_attn_metadata
        num_decodes, num_prefills, num_decode_tokens, _ = split_decodes_and_prefills(common, decode_threshold=1)
        starts = common.query_start_loc_cpu.tolist()
        kv_lens = common.seq_lens.tolist()
        groups = self._groups(starts, kv_lens, num_decodes, common.num_reqs)
        prefill = None
        if num_prefills:
            dense = any(group.plan.attention is Attention.MHA_ONE_SHOT for group in groups)
            longest = max(end - start for start, end in pairwise(starts[num_decodes:]))
            prefill = PrefillMetadata(use_dense_mha=dense, max_query_len=longest, chunked_context=None)
        return CpuSparseMLAMetadata.of(
            common,
            num_decodes=num_decodes,
            num_prefills=num_prefills,
            num_decode_tokens=num_decode_tokens,
            topk_tokens=self.serving.model.index_topk,
            prefill_max_seq_len=max(kv_lens[num_decodes : common.num_reqs], default=0),
            prefill=prefill,
            groups=groups,
            settings=self.serving.resolved.settings,
        )

    def _groups(self, starts: list[int], kv_lens: list[int], num_decodes: int, num_requests: int) -> list[Group]:
        """Group a batch: its decodes, then its prefills as `partition` splits them."""
        serving = self.serving
        owners = torch.from_numpy(owner_of_rows(starts))
        groups: list[Group] = []
        seconds = 0.0
        for phase, first, last in ((Phase.DECODE, 0, num_decodes), (Phase.EXTEND, num_decodes, num_requests)):
            q_lens = [starts[request + 1] - starts[request] for request in range(first, last)]
            started = time.perf_counter()
            parts = partition(
                serving.model, q_lens, kv_lens[first:last], phase, serving.device, serving.resolved.settings
            )
            seconds += time.perf_counter() - started
            for part in parts:
                requests = [first + request for request in part.requests]
                spans = [torch.arange(starts[request], starts[request + 1]) for request in requests]
                rows = torch.cat(spans)
                groups.append(
                    Group(
                        plan=part.plan,
                        requests=requests,
                        rows=rows,
                        request_of_row=owners[rows],
                        q_lens=[len(span) for span in spans],
                        kv_lens=[kv_lens[request] for request in requests],
                    )
                )
        names, traced = dict(enumerate(serving.request_ids())), []
        for group in groups:
            ids = [names.get(request, "") for request in group.requests]
            traced.append((group.plan, list(zip(ids, group.q_lens, group.kv_lens, strict=True))))
        serving.trace.record(traced)
        if serving.metrics is not None:
            serving.metrics.decided(seconds, logits_budget(serving.resolved.settings, serving.device))
            for group in groups:
                serving.metrics.batch(group.plan, sum(group.q_lens))
        return groups


class CpuSparseMLAImpl(MLAAttentionImpl[CpuSparseMLAMetadata]):
    """One layer's attention with the plugin's kernels, for any head count and float dtype."""

    is_sparse: ClassVar[bool] = True
    # This class does dense prefills in any case. If vLLM has a CPU version (0.29 on), True keeps it from logging that
    # there is none; if not, True would make it import a CUDA one.
    supports_dense_mha_prefill: ClassVar[bool] = find_spec(f"{_MLA_PREFILL}.cpu_sdpa") is not None
    can_return_lse_for_decode = False
    masked_mha_available = False
    supports_quant_query_input = False
    q_pad_num_heads = None
    index_group = None
    index_group_index = 0
    dcp_world_size = 1

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: Any,
        sliding_window: Any,
        kv_cache_dtype: str,
        logits_soft_cap: Any,
        attn_type: str,
        kv_sharing_target_layer_name: Any,
        *,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
        indexer: Any = None,
        topk_indices_buffer: torch.Tensor | None = None,
        **other: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_lora_rank, self.v_head_dim = kv_lora_rank, v_head_dim
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.kv_b_proj = kv_b_proj
        buffer = topk_indices_buffer if indexer is None else indexer.topk_indices_buffer
        if buffer is None:
            raise PatchError(
                "vLLM built a sparse MLA layer without a top-k buffer, from which nsa-plugin reads the selection"
            )
        self.topk_indices_buffer = buffer
        self._absorbed: tuple[torch.Tensor, torch.Tensor] | None = None

    # vLLM 0.32 calls these around a batch; there is nothing to prepare.
    def record_logical_topk_ready(self) -> None: ...

    def prepare_for_batch(self, attn_metadata: CpuSparseMLAMetadata) -> None: ...

    def masked_mha_workspace_fits(self, prefill: PrefillMetadata) -> bool:
        return False

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self._absorbed = None

    def absorbed_weights(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """W_UK [num_heads, qk_nope_head_dim, kv_lora_rank] and W_UV [num_heads, kv_lora_rank, v_head_dim].

        Computed with the projection, because vLLM repacks its weight for the CPU.
        """
        if self._absorbed is None:
            identity = torch.eye(self.kv_lora_rank, dtype=dtype)
            weight = self.kv_b_proj(identity)[0].view(self.kv_lora_rank, self.num_heads, -1)
            w_uk, w_uv = weight.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
            self._absorbed = w_uk.permute(1, 2, 0).contiguous(), w_uv.permute(1, 0, 2).contiguous()
        return self._absorbed

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        if kv_cache.numel() == 0:  # the profiling run comes before the cache
            return
        slots = slot_mapping.flatten()
        reference_write(open_cache(kv_cache, "bf16"), kv_c_normed, slots, rope=k_pe)

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: CpuSparseMLAMetadata, layer: Any
    ) -> tuple[torch.Tensor, None]:
        """Attend the first tokens, queries absorbed: ([rows, num_heads, kv_lora_rank], [.., qk_rope_head_dim])."""
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        out = query.new_empty(query.shape[0], self.num_heads, self.kv_lora_rank)
        for group in attn_metadata.groups:
            if group.rows.numel() and int(group.rows[-1]) < query.shape[0]:
                out[group.rows] = self._sparse(query[group.rows], kv_c_and_k_pe_cache, attn_metadata, group)
        return out, None

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: CpuSparseMLAMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Attend prefills, queries as projected: [rows, num_heads, qk_nope_head_dim + qk_rope_head_dim]."""
        first = attn_metadata.num_decode_tokens
        out = output.view(-1, self.num_heads, self.v_head_dim)
        for group in attn_metadata.groups:
            if group.requests and group.requests[0] < attn_metadata.num_decodes:
                continue
            rows = group.rows - first
            if group.plan.attention is Attention.MHA_ONE_SHOT:
                out[rows] = self._dense(q[rows], kv_c_and_k_pe_cache, attn_metadata, group)
            else:
                w_uk, w_uv = self.absorbed_weights(q.dtype)
                nope, rope = q[rows].split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
                absorbed = torch.cat([torch.einsum("thp,hpl->thl", nope, w_uk), rope], dim=-1)
                latent = self._sparse(absorbed, kv_c_and_k_pe_cache, attn_metadata, group)
                out[rows] = torch.einsum("thl,hlv->thv", latent, w_uv)

    def _dense(
        self, q: torch.Tensor, kv_cache: torch.Tensor, metadata: CpuSparseMLAMetadata, group: Group
    ) -> torch.Tensor:
        """Attend whole requests densely and causally; the new tokens are in the cache already."""
        cache = open_cache(kv_cache, "bf16")
        slots, cu_seqlens_k = index_transform.request_slots(
            metadata.block_table[group.requests], torch.tensor(group.kv_lens), cache.page_size
        )
        latent = reference_read(cache, slots, dtype=q.dtype)
        kv_c, k_pe = latent.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        kv = self.kv_b_proj(kv_c.contiguous())[0].view(-1, self.num_heads, self.qk_nope_head_dim + self.v_head_dim)
        k_nope, v = kv.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        k = torch.cat([k_nope, k_pe.unsqueeze(1).expand(-1, self.num_heads, -1)], dim=-1)
        cu_seqlens_q = torch.tensor([0, *accumulate(group.q_lens)], dtype=torch.int32)
        return mha.reference(q, k, v, cu_seqlens_q, cu_seqlens_k, scale=self.scale).out

    def _sparse(
        self, q: torch.Tensor, kv_cache: torch.Tensor, metadata: CpuSparseMLAMetadata, group: Group
    ) -> torch.Tensor:
        """Attend absorbed queries over the tokens that the indexer selected."""
        cache = open_cache(kv_cache, "bf16")
        slots = index_transform.reference_paged(
            self.topk_indices_buffer[group.rows],
            metadata.block_table,
            page_size=cache.page_size,
            row_to_request=group.request_of_row,
        )
        return sparse_mla.reference_prefill(q, cache, slots, scale=self.scale, d_v=self.kv_lora_rank).out
