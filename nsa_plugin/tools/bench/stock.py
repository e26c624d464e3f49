"""The kernels that the engines run today, called as SGLang and vLLM call them: the baselines.

Every function makes a call from a case's inputs. It imports its library when the call is made, so that a missing one
refuses with ImportError. Padding of heads is part of the call, as it is part of an engine's step; scheduler metadata,
which an engine makes once for all layers, is not.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch

from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.kv_cache import PagedCache
from nsa_plugin.kernels.sparse_mla import DecodeOutput, PrefillOutput
from nsa_plugin.kernels.swa_indices import IndexRows
from nsa_plugin.kernels.v4_prefill import RowsAttention
from nsa_plugin.tools.bench.judges import Attended
from nsa_plugin.tools.bench.workload import TimedCall

D_V = 512

# What the libraries support on SM90.
HEADS = (64, 128)
PREFILL_TOPK_MULTIPLE, DECODE_TOPK_MULTIPLE = 128, 64
INDEXER_HEADS = (32, 64)


def padded_heads(heads: int) -> int:
    """The head count that FlashMLA gets for `heads`.

    Raises:
        KernelArgumentError: FlashMLA does not support as many.
    """
    for count in HEADS:
        if heads <= count:
            return count
    raise KernelArgumentError(f"flash_mla: heads is {heads}; the most it supports is {HEADS[-1]}")


def _require_multiple(indices: torch.Tensor, multiple: int) -> None:
    topk = indices.shape[-1]
    if topk % multiple:
        raise KernelArgumentError(f"flash_mla: topk is {topk}; it must be a multiple of {multiple}")


def pad(q: torch.Tensor) -> torch.Tensor:
    """q [..., heads, d_qk] with zero heads added up to what FlashMLA supports; q itself if none are needed."""
    heads = q.shape[-2]
    padded = padded_heads(heads)
    if padded == heads:
        return q
    wide = q.new_zeros((*q.shape[:-2], padded, q.shape[-1]))
    wide[..., :heads, :] = q
    return wide


def flash_mla_prefill(
    q: torch.Tensor, rows: torch.Tensor, indices: torch.Tensor, scale: float, lengths: torch.Tensor | None = None
) -> TimedCall:
    """flash_mla_sparse_fwd over bf16 rows [s_kv, d_qk], heads padded."""
    attend = flash_mla_rows()
    padded_heads(q.shape[-2])
    _require_multiple(indices, PREFILL_TOPK_MULTIPLE)
    return partial(attend, q, rows, indices, scale=scale, d_v=D_V, topk_length=lengths)


def flash_mla_decode(
    q: torch.Tensor,
    cache: PagedCache,
    indices: torch.Tensor,
    scale: float,
    *,
    topk_length: torch.Tensor | None = None,
    extra_cache: PagedCache | None = None,
    extra: IndexRows | None = None,
) -> TimedCall:
    """flash_mla_with_kvcache on an fp8 cache, heads padded; indices [batch, s_q, topk]."""
    library: Any = import_module("flash_mla")
    heads = q.shape[-2]
    padded_heads(heads)
    for entries in (indices,) if extra is None else (indices, extra.indices):
        _require_multiple(entries, DECODE_TOPK_MULTIPLE)
    metadata, _ = library.get_mla_metadata()
    more: dict[str, Any] = {"topk_length": topk_length}
    if extra_cache is not None and extra is not None:
        more |= {
            "extra_k_cache": extra_cache.as_records(),
            "extra_indices_in_kvcache": extra.indices.unsqueeze(1),
            "extra_topk_length": extra.lengths,
        }

    def call() -> DecodeOutput:
        out, lse = library.flash_mla_with_kvcache(
            pad(q),
            cache.as_records(),
            None,
            None,
            D_V,
            metadata,
            softmax_scale=scale,
            is_fp8_kvcache=True,
            indices=indices,
            use_legacy=True,
            **more,
        )
        return DecodeOutput(out[..., :heads, :], lse[:, :heads])

    return call


def flash_mla_rows() -> RowsAttention:
    """flash_mla_sparse_fwd as the attention over a workspace of bf16 rows, heads padded.

    It is called as the SGLang adapter calls it: the kernel's output and the combined indices are used without copies.
    The provider behind the op's contract copies both. It supports neither a sink nor an output argument.
    """
    library: Any = import_module("flash_mla")

    def attend(
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        *,
        scale: float,
        d_v: int,
        topk_length: torch.Tensor | None,
        attn_sink: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> PrefillOutput:
        if attn_sink is not None or out is not None or out_dtype is not None:
            raise KernelArgumentError("flash_mla_rows: attn_sink, out or out_dtype is given, which it does not support")
        heads = q.shape[-2]
        made, max_logits, lse = library.flash_mla_sparse_fwd(
            pad(q), kv.unsqueeze(1), indices.unsqueeze(1), scale, d_v, topk_length=topk_length, use_legacy=True
        )
        return PrefillOutput(made[:, :heads], max_logits[:, :heads], lse[:, :heads])

    return attend


class SglangSparsePrefill:
    """SGLang's prefill over bf16 rows of a V4 layer with a compress ratio of 4, with SGLang's own functions.

    It follows `DeepseekV4AttnBackend._forward_prefill_sparse` of SGLang 0.5.16:

    - once per batch, in its first layer, and not in the call: `SparsePrefillChunkCache.build` (the window's slots
      through both maps of the pool, the lengths, the combined indices of layers without a compressed cache),
      `ensure_c4` (the slots of the compressed entries), and the buffers of the combined indices;
    - in every layer, and in the call: `combine_c4_layer` (selection and window in one row of indices),
      `dequantize_k_cache_paged` of each cache into its part of the backend's workspace, and `flash_mla_sparse_fwd` of
      sgl_kernel. The first call allocates the workspace, which is kept.

    There is no attention sink, as in the other contenders. SGLang uses none of the statistics, and its lse has another
    base, so only the output is judged.

    Args:
        q: [tokens, heads, 512], the last tokens of one request of `context` tokens.
        window: the window's cache.
        window_slots: [context] int64: slot of a position's row in it; any value for positions that no query reaches.
        extra: the compressed cache; entry i of the request is in slot i.
        selected: [tokens, topk] int32: entries of the request. The first ones count: as many as there are before the
            query, at most topk.
        window_size: tokens.

    Raises:
        ImportError: SGLang is missing, or its version has other functions.
        KernelArgumentError: more heads than FlashMLA supports.
    """

    def __init__(
        self,
        q: torch.Tensor,
        window: PagedCache,
        window_slots: torch.Tensor,
        extra: PagedCache,
        selected: torch.Tensor,
        window_size: int,
        scale: float,
    ):
        padded_heads(q.shape[1])
        library: Any = import_module("sglang.srt.layers.attention.dsv4.sparse_prefill_utils")
        rows: Any = import_module("sglang.kernels.ops.attention.dsv4.dequant_k_cache")
        made_once = library.SparsePrefillChunkCache
        for place, owner, name in (
            ("dequant_k_cache", rows, "dequantize_k_cache_paged"),
            ("sparse_prefill_utils", library, "SparsePrefillWorkspace"),
            ("SparsePrefillChunkCache", made_once, "ensure_c4"),
            ("SparsePrefillChunkCache", made_once, "combine_c4_layer"),
        ):
            if not hasattr(owner, name):
                raise ImportError(f"this SGLang's {place} has no {name}; 0.5.16 has")
        self._dequantize: Any = rows.dequantize_k_cache_paged
        self._sparse_fwd: Any = import_module("sgl_kernel.flash_mla").flash_mla_sparse_fwd
        self._q, self._selected, self._scale = q, selected, scale
        self._window, self._extra = _whole_pages(window), _whole_pages(extra)
        device, context = q.device, len(window_slots)
        self._chunk = made_once.build(
            seq_lens=torch.tensor([context], dtype=torch.int32, device=device),
            extend_seq_lens=torch.tensor([len(q)], dtype=torch.int32, device=device),
            req_pool_indices=torch.zeros(1, dtype=torch.int32, device=device),
            req_to_token=torch.arange(context, dtype=torch.int32, device=device).unsqueeze(0),
            full_to_swa=window_slots,
            swa_window_size=window_size,
            swa_page_size=window.page_size,
            num_qo_tokens=len(q),
            max_seq_len=context,
        )
        pages = torch.arange(extra.num_pages, dtype=torch.int32, device=device)
        self._chunk.ensure_c4(pages.expand(len(q), -1), extra.page_size)
        self._entries = self._chunk.c4_flat_token_ids
        self._rows = len(self._entries) + len(self._chunk.swa_token_ids)
        self._workspace = library.SparsePrefillWorkspace(device)
        self._kept = 0

    def __call__(self) -> Attended:
        """out [tokens, heads, 512], without lse."""
        heads, entries = self._q.shape[1], len(self._entries)
        indices, lengths = self._chunk.combine_c4_layer(c4_sparse_raw_indices=self._selected)
        workspace = self._workspace.get(self._rows)
        pages, slots = self._extra, self._entries
        self._dequantize(pages.data, slots, page_size=pages.page_size, out=workspace[:entries])
        pages, slots = self._window, self._chunk.swa_token_ids
        self._dequantize(pages.data, slots, page_size=pages.page_size, out=workspace[entries:])
        out, _, _ = self._sparse_fwd(
            q=pad(self._q),
            kv=workspace,
            indices=indices.unsqueeze(1),
            sm_scale=self._scale,
            d_v=D_V,
            attn_sink=None,
            topk_length=lengths,
        )
        self._kept = workspace.nbytes + indices.nbytes + lengths.nbytes
        return Attended(out[:, :heads], None)

    def kept_bytes(self) -> int:
        """Bytes kept from one layer to the next: the workspace and the combined indices."""
        return self._kept


def _whole_pages(cache: PagedCache) -> PagedCache:
    """The cache including the padding after each page, contiguous as in SGLang's pools."""
    pages, stride = cache.data.shape[0], cache.data.stride(0)
    return replace(cache, data=cache.data.as_strided((pages, stride), (stride, 1), cache.data.storage_offset()))


def _deep_gemm(heads: int) -> Any:
    library = import_module("deep_gemm")
    if heads not in INDEXER_HEADS:
        raise KernelArgumentError(f"deep_gemm: heads is {heads}; it must be 32 or 64")
    return library


def deep_gemm_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
) -> TimedCall:
    """All logits in one float32 buffer [rows, keys]. Not cleaned outside the ranges, as in SGLang."""
    library = _deep_gemm(q.shape[1])
    return lambda: library.fp8_mqa_logits(q, (k, k_scale), weights, ks, ke, clean_logits=False)


def deep_gemm_paged_logits(
    q: torch.Tensor,
    cache: PagedCache,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    max_len: int,
) -> TimedCall:
    """Logits of decode rows from the paged cache, [batch, max_len]; the schedule is made once, as for all layers."""
    library = _deep_gemm(q.shape[2])
    lengths = seq_lens.unsqueeze(1)
    schedule = library.get_paged_mqa_logits_metadata(lengths, cache.page_size, library.get_num_sms())
    return lambda: library.fp8_paged_mqa_logits(
        q, cache.as_records(), weights, lengths, page_table, schedule, max_len, clean_logits=False
    )


class LibraryTopK:
    """A library's top-k of whole rows of logits: positions, int32 or int64. `name` is one of `SELECTORS`."""

    def __init__(self, name: str, rows: int, keys: int, topk: int, device: torch.device):
        self._topk = topk
        self._lengths = torch.full((rows,), keys, dtype=torch.int32, device=device)
        self._offsets = torch.zeros(rows, dtype=torch.int32, device=device)
        module, self._function = SELECTORS[name]
        self._library: Any = import_module(module)
        if module == "vllm._custom_ops" and not hasattr(torch.ops._C, self._function):
            raise ImportError(f"this build of vLLM has no {self._function}")
        if self._function == "fast_topk_v2" and topk != 2048:
            raise KernelArgumentError(f"fast_topk_v2: topk is {topk}; it must be 2048")
        if topk > keys:
            raise KernelArgumentError(f"{name}: topk is {topk}; a row has {keys} logits")

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        function: Any = getattr(self._library, self._function)
        # FlashInfer needs dense rows, and DeepGEMM's logits have gaps between theirs: the copy is part of its cost.
        if self._library.__name__ == "flashinfer":
            logits = logits.contiguous()
        if self._function == "fast_topk_v2":
            found = function(logits, self._lengths, self._topk)
        elif self._function == "top_k_ragged_transform":
            found = function(logits, self._offsets, self._lengths, self._topk)
        elif self._function == "top_k_per_row_prefill":
            found = torch.empty((len(logits), self._topk), dtype=torch.int32, device=logits.device)
            function(logits, self._offsets, self._lengths, found, len(logits), *logits.stride(), self._topk)
        elif self._function == "topk":
            found = function(logits, self._topk, dim=-1, sorted=False).indices
        else:
            found = function(logits, self._topk)[1]
        selected: torch.Tensor = found
        return selected


SELECTORS = {
    "sgl_kernel.fast_topk_v2": ("sgl_kernel", "fast_topk_v2"),
    "vllm.top_k_per_row_prefill": ("vllm._custom_ops", "top_k_per_row_prefill"),
    "torch.topk": ("torch", "topk"),
    "flashinfer.top_k": ("flashinfer", "top_k"),
    "flashinfer.top_k_ragged_transform": ("flashinfer", "top_k_ragged_transform"),
}
"""Name: (module, function). The engines' come first: the first that is installed is the baseline."""
