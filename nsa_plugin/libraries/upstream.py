"""Kernel libraries of other projects: one entry of the manifest each."""

from __future__ import annotations

from functools import partial
from typing import Any

from nsa_plugin.libraries.capabilities import (
    MHA_DIMS,
    MHA_LAYOUTS,
    SPARSE_OPS,
    V4_ROW,
    V32_ROW,
    Capability,
    HostModule,
    KernelLibrary,
    Op,
    RowLimit,
)

_SGL_KERNEL = ("sglang-kernel", "sgl-kernel")


def _sgl_kernel_problem(module: Any) -> str:
    # sgl_kernel.flash_mla keeps the error of its extension for the first call.
    failure = getattr(module, "_flashmla_import_error", None)
    return f"its extension does not load: {failure}" if failure else ""


def _flash_mla_problem(module: Any) -> str:
    # Builds without `has_legacy` predate the split that it reports, and have the kernels.
    has_legacy = getattr(module, "has_legacy", lambda: True)()
    return "" if has_legacy else "it does not have the kernels for the V3.2 and V4 caches (`has_legacy()` is false)"


_PREFILL_FACTS = (
    "flash_mla_sparse_fwd reads bf16 rows and needs topk % (2 * B_TOPK) == 0, B_TOPK 64. "
    "sglang #13646, dsa_backend.py `required_padding`: 64 or 128 heads on SM90, 128 on SM100. "
)
_DECODE_FACTS = (
    "flash_mla_with_kvcache with indices: fp8 pages, 64 or 128 heads (its docstring; vLLM "
    "`_compute_fp8_decode_padded_heads`), topk % 64 == 0"
)

FLASH_MLA = KernelLibrary(
    name="flash_mla",
    hosts=(
        # Upstream's `flash_mla` distribution is not listed: since its release of 2026-09-30 it has no SM90 kernels and
        # reads neither the V3.2 nor the V4 cache. SGLang's fork keeps both.
        HostModule(module="flash_mla", distributions=("sgl-flash-mla",), problem=_flash_mla_problem),
        HostModule(module="sgl_kernel.flash_mla", distributions=_SGL_KERNEL, problem=_sgl_kernel_problem),
        HostModule(module="vllm._flashmla_C", distributions=("vllm",), imports=False),
    ),
    targets={
        "sparse_mla_prefill": "nsa_plugin.kernels.providers.flash_mla:prefill",
        "sparse_mla_decode": "nsa_plugin.kernels.providers.flash_mla:decode",
    },
    requires=("flash_mla",),
    assumed=("sgl-flash-mla", "1.0.0"),
    kernels=(
        *(
            Capability(
                op=Op.SPARSE_MLA_PREFILL,
                layouts=("bf16",),
                sm_min=low,
                sm_max=high,
                head_counts=heads,
                dims=(V32_ROW, V4_ROW),
                topk_multiple=128,
                source=_PREFILL_FACTS + facts,
            )
            for low, high, heads, facts in (
                (90, 90, (64, 128), '"Unsupported h_q" on an H200 with 96, 192 and 256 heads'),
                (100, 109, (128,), "sgl-flash-mla 1.0.0 also has a 64-head kernel for SM100, not run yet"),
            )
        ),
        *(
            Capability(
                op=Op.SPARSE_MLA_DECODE,
                layouts=(layout,),
                sm_min=90,
                sm_max=109,
                head_counts=(64, 128),
                dims=(row,),
                topk_multiple=64,
                source=_DECODE_FACTS,
            )
            for layout, row in (("v32_fp8", V32_ROW), ("v4_fp8", V4_ROW))
        ),
    ),
    row_limits=(
        RowLimit(
            op=Op.SPARSE_MLA_DECODE,
            distribution="sgl-flash-mla",
            versions=">=1.0.0",
            source="sgl-flash-mla 1.0.0 switches to a kernel with less shared memory where its 3 arrays do not fit: "
            "on an H200 19370 rows ran without it and 32768 with it",
        ),
        RowLimit(
            op=Op.SPARSE_MLA_DECODE,
            words_per_row=5,
            words=1,
            source="get_decoding_sched_meta.cu: 4 * (5 * b + 1) bytes for b query rows (sglang #25502). 228 KiB "
            "would be 11673 rows; an H200 grants a block 227 KiB, which is 11622",
        ),
    ),
)

_DEEP_GEMM_FACTS = (
    "fp8_mqa_logits and fp8_paged_mqa_logits assert (arch_major == 10 and num_heads in 8, 16, 32, 64) or "
    "(arch_major == 9 and num_heads in 32, 64), and head_dim 32, 64 or 128"
)
_UNIFIED = (("vllm", ">=0.33"), ("sgl-deep-gemm", ">=0.2.5"))
_UNIFIED_FACTS = (
    ". vLLM 0.33's copy and sgl-deep-gemm 0.2.5 take packed UE8M0 scales and bf16 weights on SM100 (vLLM's "
    "utils/deep_gemm.py `mqa_logits_use_mx_scales`; `is_mx_sf == (arch_major == 10 or ...)`), which the provider does "
    "not write"
)
_BEFORE_SM120 = (("vllm", "<0.33"), ("sgl-deep-gemm", "<0.2.3.post2"), ("deep-gemm", ">=0"))
_SM120_FACTS = (
    "fp8_mqa_logits and fp8_paged_mqa_logits of sgl-deep-gemm 0.2.3.post2 and 0.2.5 and of vLLM 0.33's copy "
    "(sm120_fp8_mqa_logits.cuh): 128 % num_heads == 0, pages of 32 to 256. 32 and 64 heads of 128 elements only: other "
    "head sizes gave wrong logits (deepseek-ai/DeepGEMM #433). Not run on SM120 by this project"
)
_SINCE_0_1_4: dict[str, Any] = {"distribution": "sgl-deep-gemm", "versions": ">=0.1.4"}
_schedule_limit = partial(RowLimit, op=Op.INDEXER_METADATA, multiple=32)
_SCHEDULE_FACTS = "paged_mqa_logits_metadata without `indices`, dynamic arrays since 0.1.4: "

DEEP_GEMM = KernelLibrary(
    name="deep_gemm",
    hosts=(
        HostModule(module="deep_gemm", distributions=("sgl-deep-gemm", "deep-gemm")),
        HostModule(module="vllm.third_party.deep_gemm", distributions=("vllm",), imports=False),
    ),
    targets={
        "indexer_topk": "nsa_plugin.kernels.providers.deep_gemm:topk",
        "indexer_topk_paged": "nsa_plugin.kernels.providers.deep_gemm:paged_topk",
    },
    requires=("deep_gemm",),
    assumed=("sgl-deep-gemm", "0.2.3.post2"),
    kernels=(
        *(
            Capability(
                op=Op.INDEXER_TOPK,
                sm_min=low,
                sm_max=high,
                head_counts=heads,
                dims=((32,), (64,), (128,)),
                not_in=not_in,
                source=_DEEP_GEMM_FACTS + facts,
            )
            for low, high, heads, not_in, facts in (
                (90, 99, (32, 64), (), ""),
                (100, 109, (8, 16, 32, 64), _UNIFIED, _UNIFIED_FACTS),
            )
        ),
        Capability(
            op=Op.INDEXER_TOPK,
            sm_min=120,
            sm_max=121,
            head_counts=(32, 64),
            dims=((128,),),
            not_in=_BEFORE_SM120,
            source=_SM120_FACTS,
        ),
        Capability(op=Op.INDEXER_METADATA, sm_min=90, sm_max=109, source=_DEEP_GEMM_FACTS),
        Capability(op=Op.INDEXER_METADATA, sm_min=120, sm_max=121, not_in=_BEFORE_SM120, source=_SM120_FACTS),
        Capability(
            op=Op.SCHEDULED_LOGITS,
            sm_min=90,
            sm_max=99,
            not_in=_UNIFIED,
            source="sgl-deep-gemm 0.1.4 to 0.2.3: splits of 256 keys. That of vLLM 0.33's copy and of 0.2.5 is "
            "compiled in, unseen",
        ),
    ),
    row_limits=(
        _schedule_limit(
            **_SINCE_0_1_4,
            sm_min=90,
            sm_max=99,
            words_per_row=1,
            source=_SCHEDULE_FACTS + "one array of the rows; on an H200 58112 ran and 58144 failed its assertion",
        ),
        _schedule_limit(
            **_SINCE_0_1_4,
            words_per_row=2,
            words=33,
            source=_SCHEDULE_FACTS + "two arrays of the rows and one word per warp on SM100",
        ),
        _schedule_limit(
            words_per_row=1,
            static_bytes=48 << 10,
            source="Before 0.1.4 one static array, which CUDA 12's assembler limits to 48 KiB (deepseek-ai/DeepGEMM "
            "#322, sglang #25484). CUDA 13's allowed 0.1.3 more rows, and failed at 16384 (sglang #25855)",
        ),
    ),
)

FA3 = KernelLibrary(
    name="fa3",
    hosts=(
        HostModule(module="sgl_kernel.flash_attn", distributions=_SGL_KERNEL),
        HostModule(module="vllm.vllm_flash_attn._vllm_fa3_C", distributions=("vllm",), imports=False),
    ),
    targets={
        "mha_one_shot": "nsa_plugin.kernels.providers.fa3:mha",
        "sparse_mla_decode": "nsa_plugin.kernels.providers.fa3:decode",
    },
    assumed=("sglang-kernel", "0.4.10"),
    kernels=(
        Capability(
            op=Op.MHA_ONE_SHOT,
            layouts=MHA_LAYOUTS,
            sm_min=90,
            sm_max=90,
            dims=MHA_DIMS,
            source="flash_attn_varlen_func over the request's keys (sglang #12788 uses FA3 on SM90)",
        ),
        Capability(
            op=Op.SPARSE_MLA_DECODE,
            layouts=("bf16",),
            sm_min=90,
            sm_max=90,
            dims=(V32_ROW,),
            source="flash_attn_with_kvcache with `qv` and a page table of single rows: any head count, bf16 cache "
            "(vLLM FLASH_ATTN_MLA_SPARSE, sglang `_forward_fa3`)",
        ),
    ),
)

TRTLLM = KernelLibrary(
    name="trtllm",
    hosts=(HostModule(module="flashinfer", distributions=("flashinfer-python",)),),
    targets={
        "mha_one_shot": "nsa_plugin.kernels.providers.trtllm:mha",
        "sparse_mla_prefill": "nsa_plugin.kernels.providers.trtllm:prefill",
        "sparse_mla_decode": "nsa_plugin.kernels.providers.trtllm:decode",
    },
    requires=("flashinfer",),
    assumed=("flashinfer-python", "0.7.2"),
    kernels=(
        Capability(
            op=Op.MHA_ONE_SHOT,
            layouts=MHA_LAYOUTS,
            sm_min=100,
            sm_max=109,
            dims=MHA_DIMS[:2],
            source="trtllm_ragged_attention_deepseek, flashinfer 0.6.8 to 0.7.2, asserts these dimensions (256, 256 "
            "since 0.6.12 only). sglang #12788 uses it on SM100 because FA4 was less accurate",
        ),
        *(
            Capability(
                op=op,
                layouts=("bf16",),
                sm_min=100,
                sm_max=109,
                head_counts=(*range(1, 65), 128),
                dims=(V32_ROW,),
                source="trtllm_batch_decode_with_kv_cache_mla with sparse_mla_top_k, for decode and extend (sglang "
                "#16758, #17662). It reads plain rows, not the 656-byte fp8 records (vLLM "
                "FlashInferMLASparseTRTLLMBackend). No kernel between 64 and 128 heads (its host check since 0.6.16)",
            )
            for op in SPARSE_OPS
        ),
    ),
)

FLASHINFER_SM120 = KernelLibrary(
    name="flashinfer_sm120",
    hosts=(HostModule(module="flashinfer", distributions=("flashinfer-python",)),),
    targets={
        "sparse_mla_prefill": "nsa_plugin.kernels.providers.flashinfer_sm120:prefill",
        "sparse_mla_decode": "nsa_plugin.kernels.providers.flashinfer_sm120:decode",
    },
    requires=("flashinfer",),
    assumed=("flashinfer-python", "0.7.2"),
    kernels=tuple(
        Capability(
            op=op,
            layouts=("v32_fp8",),
            sm_min=120,
            sm_max=121,
            head_counts=(8, 16, 32, 64, 128),
            dims=(V32_ROW,),
            topk_multiple=64,
            not_in=(("flashinfer-python", "<0.7.1"),),
            source="trtllm_batch_decode_with_kv_cache_mla with backend sparse, flashinfer 0.7.1 to 0.7.2.post1 "
            "(mla/_core.py, csrc/sparse_mla_sm120/attention_resolve.cu and attention_plan.h): packed 656-byte records, "
            "bf16 queries; the prefill kernel has these head counts and topk % 64 == 0. Releases from 0.6.14 on have "
            "it for fixed head counts and top-k. vLLM 0.33 runs it (FLASHINFER_MLA_SPARSE_SM120), for index_topk 2048 "
            "alone. Not run on SM120 by this project",
        )
        for op in SPARSE_OPS
    ),
)
