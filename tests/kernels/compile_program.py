"""python -m tests.kernels.compile_program SM [EMULATED]: compile every Triton kernel for a GPU that is not there.

It prints a JSON line. With EMULATED the GPU acts as one of that SM version.

The launchers themselves are called, with tensors that have a device and no memory, and what they launch is compiled and
not run. So what is compiled is what a GPU of that SM version would be given. Not a test module: Triton must not have
been told to interpret (tests/conftest.py), so `test_triton_compiles` runs it as a process of its own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from nsa_plugin.kernels.kv_cache import PagedCache, open_cache
from nsa_plugin.kernels.shard_indices import KvShard
from nsa_plugin.kernels.triton import (
    compact,
    device,
    index_transform,
    indexer,
    kv_cache,
    mha,
    mla_inputs,
    shard_indices,
    sparse_mla,
    sparse_mla_indices,
    swa_indices,
    topk,
    v4_prefill,
)
from nsa_plugin.layouts import Fp8Layout, get_layout
from nsa_plugin.libraries.architectures import shared_memory_per_block
from nsa_plugin.libraries.capabilities import MHA_DIMS
from nsa_plugin.parallel import transpose_triton

BF16, FP8, F32, I32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int32

DENSE_INPUTS = ((8, BF16), (300, BF16), (300, F32))
"""Query rows and type of the dense attention that is compiled."""
INDEXER_HEADS = (64, 32)
"""Heads of DeepSeek-V3.2's and V4's indexer, and of GLM-5's."""
# What a launcher takes from the table of tiles, by its names in a launch.
TILE = ("BLOCK_H", "BLOCK_K", "BLOCK_M", "BLOCK_N", "num_warps", "num_stages")


class Driver:
    """The part of a GPU driver that Triton uses before it compiles."""

    def __init__(self, sm: int):
        self.sm = sm

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.sm, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def without_a_gpu(sm: int) -> dict[str, list[dict[str, Any]]]:
    """Have launches compiled for an SM version instead: {kernel: what a block of each compilation needs}."""
    driver.set_active(Driver(sm))
    facts = {"multi_processor_count": 132, "major": sm // 10, "minor": sm % 10, "L2_cache_size": 50 << 20}
    properties = SimpleNamespace(**facts, shared_memory_per_block_optin=shared_memory_per_block(sm))
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.get_device_capability = lambda device=None: divmod(sm, 10)
    torch.cuda.device = torch.cuda.device_of = lambda device: nullcontext()
    # Triton asks whether addresses are multiples of 16, as an allocator's are; torch built without CUDA cannot index
    # or copy.
    FakeTensor.data_ptr = lambda self: 0
    FakeTensor.copy_ = lambda self, other: self
    FakeTensor.__getitem__ = _item
    compiled: dict[str, list[dict[str, Any]]] = defaultdict(list)
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        needs = {"shared": kernel.metadata.shared, "threads": 32 * kernel.metadata.num_warps}
        tile = {"tile": {name: kwargs[name] for name in TILE if name in kwargs}}
        code = resources(kernel.asm["cubin"]) | {
            "wgmma": kernel.asm["ptx"].count("wgmma.mma_async"),
            "packed": kernel.asm["ptx"].count("mul.rn.f16x2"),  # of `decode_fp8_packed`
        }
        compiled[f"{self.fn.__module__}.{self.fn.__name__}"].append(needs | tile | code)
        return kernel

    JITFunction.run = compile_only
    return compiled


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of spilled registers of a thread, as cuobjdump reads them from the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", said)[1]) for name in ("REG", "STACK", "LOCAL"))
    return {"registers": registers, "spilled": stack + local}


def _item(tensor: torch.Tensor, key: Any) -> torch.Tensor:
    dim = 0
    for one in key if isinstance(key, tuple) else (key,):
        if one is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(one, int):
            tensor, dim = tensor.select(dim, one), dim - 1
        elif isinstance(one, slice):
            tensor = torch.ops.aten.slice(tensor, dim, one.start, one.stop, one.step or 1)
        else:
            raise TypeError(f"a launcher indexes by {one!r}")
        dim += 1
    return tensor


def empty(*shape: int, dtype: torch.dtype = I32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def cache(name: str, pages: int, page_size: int, dim: int = 576) -> PagedCache:
    layout = get_layout(name)
    if isinstance(layout, Fp8Layout):
        return open_cache(empty(pages, layout.page_bytes(page_size), dtype=torch.uint8), layout, page_size)
    return open_cache(empty(pages, page_size, dim, dtype=BF16), layout)


def attention() -> None:
    """Heads of every tile, prefill rows and decode steps, every cache, with a second cache and without.

    Dense attention in the widths of the engines' models, long and short, and in float32.
    """
    for heads in (16, 32, 64):
        for name in ("v32_fp8", "bf16"):
            keys = cache(name, 64, 64)
            sparse_mla.prefill(empty(300, heads, 576, dtype=BF16), keys, empty(300, 2048), scale=1.0)
            sparse_mla.decode(empty(4, 2, heads, 576, dtype=BF16), keys, empty(4, 2, 2048), scale=1.0)
        window, extra = cache("v4_fp8", 16, 256), cache("v4_fp8", 16, 64)
        sparse_mla.prefill(
            empty(300, heads, 512, dtype=BF16),
            window,
            empty(300, 128),
            scale=1.0,
            topk_length=empty(300),
            attn_sink=empty(heads, dtype=F32),
            extra_kv=extra,
            extra_indices=empty(300, 512),
            extra_topk_length=empty(300),
        )
    for (d_qk, d_v), (rows, dtype) in product(MHA_DIMS, DENSE_INPUTS):
        q, k, v = (empty(rows, 16, dim, dtype=dtype) for dim in (d_qk, d_qk, d_v))
        mha.mha(q, k, v, empty(3), empty(3), scale=1.0, max_seqlen_q=rows, max_seqlen_k=rows)


def selection() -> None:
    """The indexer's logits of a prefill and of steps, the top-k, and what makes slots of positions."""
    for rows, heads in product((4, 300), INDEXER_HEADS):
        q, weights = empty(rows, heads, 128, dtype=FP8), empty(rows, heads, dtype=F32)
        keys, scales = empty(4096, 128, dtype=FP8), empty(4096, dtype=F32)
        indexer.topk(q, keys, scales, weights, empty(rows), empty(rows), 2048, selector=select)
    paged = cache("indexer_fp8", 64, 64)
    for heads in INDEXER_HEADS:
        q, weights = empty(4, 2, heads, 128, dtype=FP8), empty(8, heads, dtype=F32)
        indexer.paged_topk(q, paged, weights, empty(4), empty(4, 16), 2048, max_len=1024, selector=select)
    indexer.paged_metadata(empty(4, 1), 132)
    topk.topk_rows(empty(300, 4096, dtype=F32), empty(300), empty(300), 2048)
    index_transform.paged(empty(8, 2048), empty(8, 64), page_size=64)
    index_transform.paged(empty(8, 512), empty(8, 63), page_size=64, lengths=empty(8))
    index_transform.ragged(empty(8, 2048), empty(8))
    owners = {"page_size": 64, "row_to_request": empty(8)}
    shard_indices.shard(empty(8, 2048), empty(8, 64), KvShard(2, 1), **owners)
    shard_indices.shard(empty(8, 512), empty(8, 63), KvShard(4, 0, 64), **owners)
    compact.compact(empty(8, 1, 2048), None, 4096)
    sparse_mla_indices.masked_rows(empty(4, 2, 2048), 4096, empty(4, 2), 2048)
    swa_indices.window(empty(3), empty(2), 128, num_tokens=64)


def select(*args: Any, out: torch.Tensor, **_: Any) -> torch.Tensor:
    """In the place of a top-k, which is compiled by itself."""
    return out


def caches() -> None:
    """Writers and readers of each layout."""
    for name, dim in (("v32_fp8", 576), ("v4_fp8", 512), ("indexer_fp8", 128), ("bf16", 576)):
        page_size = 64
        one = cache(name, 64, page_size)
        for count in (3, 3000):
            kv_cache.write(one, empty(count, dim, dtype=BF16), empty(count))
            kv_cache.read(one, empty(count))
            kv_cache.read_pages(one, empty(-(-count // page_size)))
            if name == "indexer_fp8":
                kv_cache.read_codes(one, empty(count))


def inputs() -> None:
    """Steps of a layer before attention."""
    rows, angles, where = 8, empty(4096, 64, dtype=BF16), empty(8, dtype=torch.int64)
    q_c, kv_c, k_pe = (empty(rows, dim, dtype=BF16) for dim in (1536, 512, 64))
    weights = empty(1536, dtype=BF16), empty(512, dtype=BF16)
    mla_inputs.norm_rope(q_c, kv_c, k_pe, where, angles, *weights, q_eps=1e-6, kv_eps=1e-6)
    mla_inputs.rope(empty(rows, 16, 64, dtype=BF16), where, angles)
    for interleaved, heads in product((False, True), INDEXER_HEADS):
        norm = empty(128, dtype=F32), empty(128, dtype=F32)
        mla_inputs.indexer_keys(empty(rows, 128, dtype=BF16), where, angles, *norm, eps=1e-6, interleaved=interleaved)
        gates = empty(rows, heads, dtype=BF16)
        mla_inputs.indexer_queries(
            empty(rows, heads, 128, dtype=BF16), gates, where, angles, scale=1.0, interleaved=interleaved
        )


def v4_routes() -> None:
    """Combining the indices of a V4 prefill's two caches."""
    v4_prefill.map_pages(empty(8), empty(64))

    def part(width: int, page_size: int) -> v4_prefill.RowsPart:
        return v4_prefill.RowsPart(empty(64, width), empty(64), empty(8), empty(64), 64, page_size)

    v4_prefill.combine_rows(part(128, 256), None, empty(64, 128))
    for width, page_size in ((512, 64), (320, 2)):
        out = empty(64, -(-(128 + width) // 128) * 128)
        v4_prefill.combine_rows(part(128, 256), part(width, page_size), out)


def exchange() -> None:
    """The transpose of the head/token all-to-all."""
    transpose_triton.swap_blocks(empty(4, 64, 16, 576, dtype=BF16), empty(64, 4, 16, 576, dtype=BF16))


GROUPS: tuple[Callable[[], None], ...] = (attention, selection, caches, inputs, v4_routes, exchange)


def main() -> None:
    sm, *emulated = map(int, sys.argv[1:])
    compiled = without_a_gpu(sm)
    for one in emulated:
        device.emulate(one)
    with FakeTensorMode():
        for group in GROUPS:
            group()
    print(json.dumps(compiled))


if __name__ == "__main__":
    main()
