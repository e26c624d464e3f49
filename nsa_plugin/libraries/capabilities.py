"""What each kernel of each library takes: the facts, in two tables, with their sources.

`KERNELS` holds what a kernel's own host code checks; `ROW_LIMITS` how many query rows one call takes,
which depends on the installed build and on the device's shared memory. `kernels_of` joins the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from nsa_plugin.layouts import LAYOUTS


class Op(StrEnum):
    """An operation that a kernel library may provide."""

    MHA_ONE_SHOT = "mha_one_shot"
    SPARSE_MLA_PREFILL = "sparse_mla_prefill"
    SPARSE_MLA_DECODE = "sparse_mla_decode"
    INDEXER_TOPK = "indexer_topk"  # logits and top-k
    INDEXER_METADATA = "indexer_metadata"  # scheduling metadata of the paged logits
    TOKEN_SHARD = "token_shard"  # heads for tokens, over the attention group


@dataclass(frozen=True, kw_only=True)
class Capability:
    """What one kernel of a library takes.

    Attributes:
        op: the operation.
        layouts: KV-cache layouts that it reads; empty = it reads no KV cache, or any.
        sm_min, sm_max: SM versions it is built for, inclusive (90, 100, 103, 120; 0 is a CPU).
        head_counts: head counts it takes; empty = `head_multiple` alone decides. Query heads, and
            for the indexer's ops the indexer's heads.
        head_multiple: the head count must be a multiple of this.
        dims: (query, value) elements of a head that it takes; empty = any. The indexer has (query,).
        topk_multiple: the number of selected tokens must be a multiple of this.
        max_rows: most query rows of one call; None = no limit.
    """

    op: Op
    layouts: tuple[str, ...]
    sm_min: int
    sm_max: int
    head_counts: tuple[int, ...] = ()
    head_multiple: int = 1
    dims: tuple[tuple[int, ...], ...] = ()
    topk_multiple: int = 1
    max_rows: int | None = None

    def heads_given(self, heads: int) -> int | None:
        """The head count the kernel is run with for `heads` heads; None if it takes no such count."""
        if self.head_counts:
            return min((count for count in self.head_counts if count >= heads), default=None)
        return -(-heads // self.head_multiple) * self.head_multiple

    @property
    def heads_in_words(self) -> str:
        """The head counts it takes: "64 or 128", "1 to 64 or 128", "multiples of 64"."""
        if not self.head_counts:
            return f"multiples of {self.head_multiple}"
        counts = sorted(self.head_counts)
        starts = [count for count in counts if count - 1 not in counts]
        ends = [count for count in counts if count + 1 not in counts]
        return " or ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True))


_ANY_SM = (0, 9999)
_V32_ROW = (576, 512)  # kv_lora_rank 512 + rope 64, values are the first 512
_V4_ROW = (512, 512)  # rope is inside the 512
# (qk, v) of DeepSeek (nope 128 + rope 64), of its rope-free variants, and of GLM-5 (nope 192 + rope 64).
_MHA_DIMS = ((192, 128), (128, 128), (256, 256))

# What each kernel takes, as its own host code checks it. `max_rows` comes from `ROW_LIMITS`.
KERNELS: Mapping[str, tuple[Capability, ...]] = {
    "flash_mla": (
        # flash_mla_sparse_fwd: bf16 rows; h_q padded to 64 on SM90 and to 128 on SM100 (sglang #13646,
        # dsa_backend.py `required_padding`), and on SM90 no other count than 64 and 128 is taken ("Unsupported
        # h_q", seen on H200 with 96, 192 and 256); topk % (2 * B_TOPK) == 0 with B_TOPK 64.
        Capability(
            op=Op.SPARSE_MLA_PREFILL,
            layouts=("bf16",),
            sm_min=90,
            sm_max=90,
            head_counts=(64, 128),
            dims=(_V32_ROW, _V4_ROW),
            topk_multiple=128,
        ),
        # sgl-flash-mla 1.0.0 has a 64-head kernel for SM100 as well; it is left out until it has been run.
        Capability(
            op=Op.SPARSE_MLA_PREFILL,
            layouts=("bf16",),
            sm_min=100,
            sm_max=109,
            head_counts=(128,),
            dims=(_V32_ROW, _V4_ROW),
            topk_multiple=128,
        ),
        # flash_mla_with_kvcache with indices: fp8 pages only, h_q 64 or 128 on both architectures
        # (its docstring, and vLLM's `_compute_fp8_decode_padded_heads`); topk % 64 == 0.
        Capability(
            op=Op.SPARSE_MLA_DECODE,
            layouts=("v32_fp8",),
            sm_min=90,
            sm_max=109,
            head_counts=(64, 128),
            dims=(_V32_ROW,),
            topk_multiple=64,
        ),
        Capability(
            op=Op.SPARSE_MLA_DECODE,
            layouts=("v4_fp8",),
            sm_min=90,
            sm_max=109,
            head_counts=(64, 128),
            dims=(_V4_ROW,),
            topk_multiple=64,
        ),
    ),
    "deep_gemm": (
        # fp8_mqa_logits and fp8_paged_mqa_logits: "(arch_major == 10 and num_heads in 8, 16, 32, 64) or
        # (arch_major == 9 and num_heads in 32, 64)", head_dim 32, 64 or 128 (assertions in the wheel).
        Capability(
            op=Op.INDEXER_TOPK,
            layouts=(),
            sm_min=90,
            sm_max=99,
            head_counts=(32, 64),
            dims=((32,), (64,), (128,)),
        ),
        Capability(
            op=Op.INDEXER_TOPK,
            layouts=(),
            sm_min=100,
            sm_max=109,
            head_counts=(8, 16, 32, 64),
            dims=((32,), (64,), (128,)),
        ),
        Capability(op=Op.INDEXER_METADATA, layouts=(), sm_min=90, sm_max=109),
    ),
    "fa3": (
        # flash_attn_varlen_func over the request's own keys (sglang #12788: SM90 takes FA3).
        Capability(op=Op.MHA_ONE_SHOT, layouts=("bf16", "v32_fp8"), sm_min=90, sm_max=90, dims=_MHA_DIMS),
        # flash_attn_with_kvcache with `qv` and a page table of single rows: any head count, bf16 cache
        # (vLLM FLASH_ATTN_MLA_SPARSE, sglang `_forward_fa3`).
        Capability(op=Op.SPARSE_MLA_DECODE, layouts=("bf16",), sm_min=90, sm_max=90, dims=(_V32_ROW,)),
    ),
    "trtllm": (
        # trtllm_ragged_attention_deepseek, flashinfer 0.6.8 to 0.7.2 (sglang #12788: SM100 takes it
        # rather than FA4, which was less accurate); it asserts these dimensions.
        # (256, 256) is taken since 0.6.12 only, and left out.
        Capability(op=Op.MHA_ONE_SHOT, layouts=("bf16", "v32_fp8"), sm_min=100, sm_max=109, dims=_MHA_DIMS[:2]),
        # trtllm_batch_decode_with_kv_cache_mla with sparse_mla_top_k, for decode and for extend
        # (sglang #16758, #17662). It reads plain rows: not the 656-byte fp8 layout (vLLM
        # FlashInferMLASparseTRTLLMBackend). Between 64 and 128 heads it has no kernel (its host check since 0.6.16).
        *(
            Capability(
                op=op,
                layouts=("bf16",),
                sm_min=100,
                sm_max=109,
                head_counts=(*range(1, 65), 128),
                dims=(_V32_ROW,),
            )
            for op in (Op.SPARSE_MLA_PREFILL, Op.SPARSE_MLA_DECODE)
        ),
    ),
    # The plugin's own, as their wrappers check it: any number of heads, any number of selected tokens.
    "cuda": tuple(
        Capability(op=op, layouts=(layout,), sm_min=90, sm_max=90, dims=(row,))
        for op in (Op.SPARSE_MLA_PREFILL, Op.SPARSE_MLA_DECODE)
        for layout, row in (("v32_fp8", _V32_ROW), ("v4_fp8", _V4_ROW))
    ),
    "triton": (
        *(
            Capability(op=op, layouts=tuple(LAYOUTS), sm_min=80, sm_max=_ANY_SM[1], dims=(_V32_ROW, _V4_ROW))
            for op in (Op.SPARSE_MLA_PREFILL, Op.SPARSE_MLA_DECODE)
        ),
        Capability(op=Op.MHA_ONE_SHOT, layouts=("bf16", "v32_fp8"), sm_min=80, sm_max=_ANY_SM[1], dims=_MHA_DIMS),
        Capability(op=Op.INDEXER_TOPK, layouts=(), sm_min=80, sm_max=_ANY_SM[1]),
        # The schedule of DeepGEMM's kernel for SM90; that for SM100 is laid out otherwise.
        Capability(op=Op.INDEXER_METADATA, layouts=(), sm_min=90, sm_max=90),
        # The transposes around the exchange, which is the group's own.
        Capability(op=Op.TOKEN_SHARD, layouts=(), sm_min=80, sm_max=_ANY_SM[1]),
    ),
    "reference": tuple(
        Capability(op=op, layouts=layouts, sm_min=_ANY_SM[0], sm_max=_ANY_SM[1])
        for op, layouts in (
            (Op.MHA_ONE_SHOT, ("bf16", "v32_fp8")),
            (Op.SPARSE_MLA_PREFILL, tuple(LAYOUTS)),
            (Op.SPARSE_MLA_DECODE, tuple(LAYOUTS)),
            (Op.INDEXER_TOPK, ()),
            (Op.INDEXER_METADATA, ()),
        )
    ),
}


@dataclass(frozen=True, kw_only=True)
class RowLimit:
    """Rows that fit a kernel's working arrays: 4 * (words_per_row * rows + words) bytes of shared memory.

    Attributes:
        library, op: the kernel.
        distribution, versions: builds that the entry describes; "" = any build not described before it.
        sm_min, sm_max: SM versions that it describes, inclusive.
        words_per_row, words: size of the arrays in 4-byte words; words_per_row 0 = no limit.
        static_bytes: the arrays are static, with this limit; 0 = dynamic, the device's own limit.
        multiple: rows are rounded up to this before they are counted.
    """

    library: str
    op: Op
    distribution: str = ""
    versions: str = ""
    sm_min: int = _ANY_SM[0]
    sm_max: int = _ANY_SM[1]
    words_per_row: int = 0
    words: int = 0
    static_bytes: int = 0
    multiple: int = 1

    def describes(self, distribution: str, version: str, sm: int) -> bool:
        if not self.sm_min <= sm <= self.sm_max:
            return False
        if not self.distribution:
            return True
        if self.distribution != distribution:
            return False
        try:
            return SpecifierSet(self.versions, prereleases=True).contains(Version(version))
        except InvalidVersion:
            return False

    def rows(self, smem_per_block: int) -> int | None:
        """Most rows of a call, or None; `smem_per_block` in bytes."""
        if not self.words_per_row:
            return None
        rows = ((self.static_bytes or smem_per_block) // 4 - self.words) // self.words_per_row
        return max(rows // self.multiple * self.multiple, 0)


# The first entry that describes the installed build counts. The last of each kernel is the strictest
# known, so a build that nobody has looked at is not trusted with more.
ROW_LIMITS: tuple[RowLimit, ...] = (
    # sgl-flash-mla 1.0.0 keeps 3 arrays, and takes a low-shared-memory kernel where they do not fit: on
    # an H200 19370 rows ran without it and 32768 with it.
    RowLimit(library="flash_mla", op=Op.SPARSE_MLA_DECODE, distribution="sgl-flash-mla", versions=">=1.0.0"),
    # get_decoding_sched_meta.cu: 4 * (5 * b + 1) bytes for b query rows (sglang #25502). 228 KiB
    # would be 11673 rows; an H200 grants a block 227 KiB, which is 11622.
    RowLimit(library="flash_mla", op=Op.SPARSE_MLA_DECODE, words_per_row=5, words=1),
    # paged_mqa_logits_metadata without `indices`, dynamic since 0.1.4: on SM90 one array of the rows (on
    # an H200 58112 ran and 58144 failed its assertion), on SM100 two and a word a warp.
    RowLimit(
        library="deep_gemm",
        op=Op.INDEXER_METADATA,
        distribution="sgl-deep-gemm",
        versions=">=0.1.4",
        sm_min=90,
        sm_max=99,
        words_per_row=1,
        multiple=32,
    ),
    RowLimit(
        library="deep_gemm",
        op=Op.INDEXER_METADATA,
        distribution="sgl-deep-gemm",
        versions=">=0.1.4",
        words_per_row=2,
        words=33,
        multiple=32,
    ),
    # Before: one static array, which CUDA 12's assembler holds to 48 KiB (deepseek-ai/DeepGEMM #322,
    # sglang #25484); CUDA 13's took more rows of 0.1.3, and failed at 16384 (sglang #25855).
    RowLimit(library="deep_gemm", op=Op.INDEXER_METADATA, words_per_row=1, static_bytes=48 << 10, multiple=32),
)


def spans(capabilities: Iterable[Capability]) -> str:
    """The SM versions that kernels are built for, in words."""
    ranges = sorted({(capability.sm_min, capability.sm_max) for capability in capabilities})
    return ", ".join(f"SM{low}" if low == high else f"SM{low} to SM{high}" for low, high in ranges)


def kernels_of(
    library: str,
    kernels: Iterable[Capability],
    *,
    distribution: str,
    version: str,
    sm: int,
    smem_per_block: int,
) -> tuple[Capability, ...]:
    """Those of a library's kernels that run on a device, each with the row limit of the installed build.

    Args:
        library: its name.
        kernels: all of its kernels.
        distribution, version: the installed build.
        sm: the device's SM version, 0 for a CPU.
        smem_per_block: most shared memory that a block may ask for, in bytes.
    """
    limits = tuple(limit for limit in ROW_LIMITS if limit.library == library)
    return tuple(
        _with_row_limit(kernel, limits, distribution, version, sm, smem_per_block)
        for kernel in kernels
        if kernel.sm_min <= sm <= kernel.sm_max
    )


def _with_row_limit(
    kernel: Capability,
    limits: Iterable[RowLimit],
    distribution: str,
    version: str,
    sm: int,
    smem_per_block: int,
) -> Capability:
    for limit in limits:
        if limit.op == kernel.op and limit.describes(distribution, version, sm):
            return replace(kernel, max_rows=limit.rows(smem_per_block))
    return kernel
