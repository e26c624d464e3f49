"""The manifest: every kernel library that the plugin knows, one entry each.

To add a kernel library, write its provider module and add an entry here. The registry, the device profile, the
choices of `prefill_backend` and `decode_backend`, `nsa-plugin doctor` and the tables in docs/kernels.md are derived
from the entries. The entries of other projects' libraries are in `upstream`.

This module is plain data. It imports neither torch nor settings, because `nsa_plugin.settings` imports it.
"""

from __future__ import annotations

from typing import Any

from nsa_plugin.layouts import LAYOUTS
from nsa_plugin.libraries.capabilities import (
    LATEST_SM,
    MHA_DIMS,
    MHA_LAYOUTS,
    SPARSE_OPS,
    V4_ROW,
    V32_ROW,
    Capability,
    HostModule,
    KernelLibrary,
    Op,
)
from nsa_plugin.libraries.upstream import DEEP_GEMM, FA3, FLASH_MLA, FLASHINFER_SM120, TRTLLM

CUDA = KernelLibrary(
    name="cuda",
    # cuda.pathfinder comes with cuda-bindings since 12.9.1; it finds NVRTC, which compiles the kernels.
    hosts=(HostModule(module="cuda.pathfinder", distributions=("cuda-bindings",)),),
    targets={
        "sparse_mla_prefill": "nsa_plugin.kernels.cuda.attention:prefill",
        "sparse_mla_decode": "nsa_plugin.kernels.cuda.attention:decode",
        "indexer_topk": "nsa_plugin.kernels.cuda.indexer:topk",
        "topk_rows": "nsa_plugin.kernels.cuda.topk:topk_rows",
    },
    requires=("cuda",),
    assumed=("cuda-bindings", "13.0.3"),
    # SM100 has kernels of FlashMLA and TRT-LLM.
    kernels=(
        *(
            Capability(
                op=op,
                layouts=(layout,),
                sm_min=first,
                sm_max=last,
                dims=(row,),
                source=f"nsa_plugin/kernels/cuda/{module}.py",
            )
            for op in SPARSE_OPS
            for layout, row, module in (
                ("v32_fp8", V32_ROW, "sparse_mla"),
                ("v4_fp8", V4_ROW, "sparse_mla"),
                ("bf16", V32_ROW, "sparse_mla_rows"),
            )
            for first, last in ((80, 90), (120, 121))
        ),
        # Of a prefill alone: the kernel does not read pages.
        Capability(
            op=Op.INDEXER_TOPK,
            sm_min=90,
            sm_max=90,
            head_counts=(32, 64),
            dims=((128,),),
            source="nsa_plugin/kernels/cuda/indexer.py",
        ),
    ),
)


def _triton(op: Op, source: str, **limits: Any) -> Capability:
    fields: dict[str, Any] = {"sm_min": 80, "sm_max": LATEST_SM, "source": source}
    return Capability(op=op, **(fields | limits))


TRITON = KernelLibrary(
    name="triton",
    hosts=(HostModule(module="triton", distributions=("triton", "pytorch-triton")),),
    targets={
        "sparse_mla_prefill": "nsa_plugin.kernels.triton.sparse_mla:prefill",
        "sparse_mla_decode": "nsa_plugin.kernels.triton.sparse_mla:decode",
        "mha_one_shot": "nsa_plugin.kernels.triton.mha:mha",
        "indexer_topk": "nsa_plugin.kernels.triton.indexer:topk",
        "indexer_topk_paged": "nsa_plugin.kernels.triton.indexer:paged_topk",
        "kv_cache_write": "nsa_plugin.kernels.triton.kv_cache:write",
        "kv_cache_read": "nsa_plugin.kernels.triton.kv_cache:read",
        "index_transform_paged": "nsa_plugin.kernels.triton.index_transform:paged",
        "index_transform_ragged": "nsa_plugin.kernels.triton.index_transform:ragged",
        "index_transform_shard": "nsa_plugin.kernels.triton.shard_indices:shard",
        "swa_window_indices": "nsa_plugin.kernels.triton.swa_indices:window",
        "topk_rows": "nsa_plugin.kernels.triton.topk:topk_rows",
        "mla_norm_rope": "nsa_plugin.kernels.triton.mla_inputs:norm_rope",
        "indexer_keys": "nsa_plugin.kernels.triton.mla_inputs:indexer_keys",
        "indexer_queries": "nsa_plugin.kernels.triton.mla_inputs:indexer_queries",
        "rope": "nsa_plugin.kernels.triton.mla_inputs:rope",
        "kv_cache_read_codes": "nsa_plugin.kernels.triton.kv_cache:read_codes",
    },
    requires=("triton",),
    assumed=("triton", "3.9.0"),
    interpreted=True,
    kernels=(
        *(
            _triton(op, "nsa_plugin/kernels/triton/sparse_mla.py", layouts=tuple(LAYOUTS), dims=(V32_ROW, V4_ROW))
            for op in SPARSE_OPS
        ),
        _triton(Op.MHA_ONE_SHOT, "nsa_plugin/kernels/triton/mha.py", layouts=MHA_LAYOUTS, dims=MHA_DIMS),
        _triton(Op.INDEXER_TOPK, "nsa_plugin/kernels/triton/indexer.py"),
        # The schedule of DeepGEMM's SM90 kernel; its SM100 kernel expects another.
        _triton(Op.INDEXER_METADATA, "nsa_plugin/kernels/triton/indexer.py", sm_min=90, sm_max=90),
        # The transposes around the all-to-all, which the process group runs.
        _triton(Op.TOKEN_SHARD, "nsa_plugin/parallel/transpose_triton.py"),
    ),
)

REFERENCE = KernelLibrary(
    name="reference",
    hosts=(HostModule(module="torch", distributions=("torch",)),),
    targets={
        "sparse_mla_prefill": "nsa_plugin.kernels.sparse_mla:reference_prefill",
        "sparse_mla_decode": "nsa_plugin.kernels.sparse_mla:reference_decode",
        "mha_one_shot": "nsa_plugin.kernels.mha:reference",
        "indexer_topk": "nsa_plugin.kernels.indexer:reference_topk",
        "indexer_topk_paged": "nsa_plugin.kernels.indexer:reference_paged_topk",
        "kv_cache_write": "nsa_plugin.kernels.kv_cache:reference_write",
        "kv_cache_read": "nsa_plugin.kernels.kv_cache:reference_read",
        "index_transform_paged": "nsa_plugin.kernels.index_transform:reference_paged",
        "index_transform_ragged": "nsa_plugin.kernels.index_transform:reference_ragged",
        "index_transform_shard": "nsa_plugin.kernels.shard_indices:reference_shard",
        "swa_window_indices": "nsa_plugin.kernels.swa_indices:reference_window",
        "topk_rows": "nsa_plugin.kernels.topk:reference_topk_rows",
        "mla_norm_rope": "nsa_plugin.kernels.mla_inputs:reference_norm_rope",
        "indexer_keys": "nsa_plugin.kernels.mla_inputs:reference_indexer_keys",
        "indexer_queries": "nsa_plugin.kernels.mla_inputs:reference_indexer_queries",
        "rope": "nsa_plugin.kernels.mla_inputs:reference_rope",
        "kv_cache_read_codes": "nsa_plugin.kernels.kv_cache:reference_read_codes",
    },
    assumed=("torch", "2.14.1"),
    kernels=tuple(
        Capability(op=op, layouts=layouts, sm_min=0, sm_max=LATEST_SM, source="the float32 references of the contracts")
        for op, layouts in (
            (Op.MHA_ONE_SHOT, MHA_LAYOUTS),
            (Op.SPARSE_MLA_PREFILL, tuple(LAYOUTS)),
            (Op.SPARSE_MLA_DECODE, tuple(LAYOUTS)),
            (Op.INDEXER_TOPK, ()),
            (Op.INDEXER_METADATA, ()),
        )
    ),
)

MANIFEST: dict[str, KernelLibrary] = {
    library.name: library for library in (FLASH_MLA, DEEP_GEMM, FA3, TRTLLM, FLASHINFER_SM120, CUDA, TRITON, REFERENCE)
}
"""Every kernel library by name, in the order in which reports list them."""


def supporting(op: Op) -> tuple[str, ...]:
    """Names of the libraries that have a kernel for an op on any device."""
    return tuple(name for name, library in MANIFEST.items() if library.supports(op))


def distributions() -> tuple[str, ...]:
    """Every distribution that may install a kernel library, for the versions in a record."""
    return tuple(
        dict.fromkeys(name for library in MANIFEST.values() for host in library.hosts for name in host.distributions)
    )
