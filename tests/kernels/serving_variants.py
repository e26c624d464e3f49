"""python -m tests.kernels.serving_variants SM: the kernel variants that batches need and no warm-up has; a JSON line.

As `compile_program`, with tensors of a GPU that is not there; nothing is compiled, the variants are counted. The
warm-up of each adapter runs first, then what its batches launch, in sizes and at offsets that it did not use.

SM90 selects with Triton's indexer where DeepGEMM is not installed. SM86 and SM89 have the portable path, whose
selection and inputs run on the plugin's kernels as well, and on SM86 SGLang's cache writes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.runtime.jit import JITFunction, compute_cache_key

from nsa_plugin.backends.common import warm as warming
from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.common.v4 import CacheSelection, LayerCall, attend_in_place
from nsa_plugin.backends.sglang.v32 import indexer as sglang_indexer
from nsa_plugin.backends.sglang.v32 import portable as sglang_portable
from nsa_plugin.backends.vllm.v4 import serving as v4_serving
from nsa_plugin.backends.vllm.v32 import portable as vllm_portable
from nsa_plugin.backends.vllm.v32.steps import StepSelection
from nsa_plugin.decision.plan import IndexerMode, IndexerPlan
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.kernels.cuda import (
    attention,
    sparse_mla_copy,
    sparse_mla_launch,
    sparse_mla_neighbours,
    sparse_mla_union,
    sparse_mla_wide,
)
from nsa_plugin.kernels.shard_indices import KvShard
from nsa_plugin.kernels.triton import topk
from nsa_plugin.kernels.triton.device import facts_of
from tests.kernels.compile_program import BF16, F32, FP8, cache, empty, without_a_gpu

ROWS = (1, 2, 3, 7, 16, 17, 100, 1000, 4096)
OFFSETS = (0, 1, 3, 8)
WIDTHS = (1, 2, 3, 16, 63, 64, 513)
KEYS = (1, 3, 100, 2048, 5000, 65536)
STEP_TOKENS = 3
"""Most query tokens of a request in a verify step."""
REQUESTS = (
    [(0, 100, 0, 100)],
    [(0, 1, 0, 1)],
    [(0, 7, 0, 4096), (7, 4096, 4096, 69632)],  # a chunk starts at query token 7
    [(0, 33, 0, 33), (33, 40, 33, 5000), (40, 1000, 5000, 70001)],
)
"""(first query token, end, first key, end) of each request of SGLang's prefills."""
DEVICE = torch.device("cuda")
V32 = ModelShape(num_heads=128, attn_tp_size=8, kv_layout="v32_fp8")
V32_FEW_HEADS = ModelShape(num_heads=64, attn_tp_size=8, kv_layout="v32_fp8")
V32_ALL_HEADS = ModelShape(num_heads=128, kv_layout="v32_fp8")
V32_ROWS = ModelShape(num_heads=128, attn_tp_size=8, kv_layout="bf16")
V4 = ModelShape(
    family="v4",
    num_heads=64,
    attn_tp_size=4,
    kv_layout="v4_fp8",
    qk_nope_head_dim=448,
    v_head_dim=512,
    index_topk=512,
    sliding_window=128,
)


class Variants:
    """Counts the variants of each kernel that a launch needs instead of compiling them."""

    def __init__(self) -> None:
        self.serving = ""
        self.known: dict[str, set[str]] = {}
        self.missed: dict[str, list[str]] = {}
        variants = self

        def count(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            _, kernel_keys, _, _, binder = self.device_caches[0]
            _, specialization, options = binder(*args, **kwargs, debug=False)
            key = compute_cache_key(kernel_keys, specialization, options)
            known = variants.known.setdefault(self.fn.__name__, set())
            if key not in known and variants.serving:
                variants.missed.setdefault(self.fn.__name__, []).append(variants.serving)
            known.add(key)

        JITFunction.run = count

    def loaded(self, source: str, name: str, *, defines: dict[str, int] | None = None, **_: Any) -> Any:
        """As `build.load_kernel`, without NVRTC."""
        known, key = self.known.setdefault(f"{source}: {name}", set()), str(sorted((defines or {}).items()))
        if key not in known and self.serving:
            self.missed.setdefault(f"{source}: {name}", []).append(self.serving)
        known.add(key)
        return CudaKernel()


class CudaKernel:
    """A compiled CUDA kernel that does nothing."""

    def __call__(self, *_: Any, **__: Any) -> None: ...

    def resident_clusters(self, *_: Any, **__: Any) -> int:
        return 16


def addresses() -> None:
    """Give tensors the addresses that an allocator and slices would: 512 bytes apart, and as far in as the slice."""
    item = FakeTensor.__getitem__

    def sliced(tensor: torch.Tensor, key: Any) -> torch.Tensor:
        found, offset = item(tensor, key), 0
        for dim, one in enumerate(key if isinstance(key, tuple) else (key,)):
            start = one.start or 0 if isinstance(one, slice) else one
            offset += (start or 0) * tensor.stride(dim)
        found.address = getattr(tensor, "address", 0) + offset * tensor.element_size()  # type: ignore[attr-defined]
        return found

    FakeTensor.__getitem__ = sliced
    FakeTensor.__setitem__ = lambda *_: None
    FakeTensor.data_ptr = lambda self: getattr(self, "address", 0)


def providers_of(model: ModelShape) -> Providers:
    """With the CUDA kernels, whose libraries need not be installed here."""
    cuda = {("sparse_mla_prefill", "cuda"): attention.prefill, ("sparse_mla_decode", "cuda"): attention.decode}
    major, minor = torch.cuda.get_device_capability()
    return Providers(model.kv_layout, 10 * major + minor, _loaded=dict(cuda))


def sizes() -> Iterator[tuple[int, int]]:
    return ((rows, offset) for rows in ROWS for offset in OFFSETS)


def v32(variants: Variants) -> None:
    """vLLM's and SGLang's V3.2 batches: slots of a selection, attention in place, a cached prefix, the selection."""
    providers = providers_of(V32)
    kernels = {(op, name) for op in ("sparse_mla_prefill", "sparse_mla_decode") for name in ("cuda", "triton")}
    warming.warm(kernels, providers, V32, DEVICE)
    for page_size in (1, 64):
        warming.warm_selection(providers, V32, DEVICE, page_size=page_size)
    warming.warm_reading(providers, V32, DEVICE)
    warming.warm_dense(providers, V32, DEVICE)
    paged, ragged = (providers.helper(f"index_transform_{form}") for form in ("paged", "ragged"))
    read, keys = providers.helper("kv_cache_read"), cache("v32_fp8", 64, 64)
    for rows, offset in sizes():
        numbers, selected = empty(rows + offset), empty(rows + offset, 2048)[offset:]
        variants.serving = f"{rows} rows from {offset} on"
        ragged(selected, numbers[offset:])
        topk.topk_rows(empty(rows, 4096, dtype=F32), numbers[offset:], numbers[offset:], 2048)
        read(keys, empty(rows, dtype=torch.int64), dtype=BF16)
        for op, name in kernels:
            providers.attend(op, name, empty(rows, 16, 576, dtype=BF16), keys, selected, scale=1.0, d_v=512)
        for requests in (1, 3):
            attend_densely(providers, requests, rows, offset)
        for width in WIDTHS:
            variants.serving = f"{rows} rows from {offset} on, {width} pages"
            for page_size in (1, 64):
                paged(selected, empty(rows, width), page_size=page_size, row_to_request=numbers[offset:])


def attend_densely(providers: Providers, requests: int, rows: int, prefix: int) -> None:
    """A dense prefill of some requests, as vLLM's and SGLang's adapters attend it: values are part of a projection."""
    keys, bounds = rows + prefix, [empty(requests + 1), empty(requests + 1)]
    q, k = empty(rows, 16, 192, dtype=BF16), empty(keys, 16, 192, dtype=BF16)
    v = empty(keys, 16, 256, dtype=BF16)[:, :, 128:]
    for out in (None, empty(rows + prefix, 16, 128, dtype=BF16)[prefix:]):
        lengths = {"max_seqlen_q": rows, "max_seqlen_k": keys}
        providers.load("mha_one_shot", "triton")(q, k, v, *bounds, scale=1.0, out=out, **lengths)


def shared(variants: Variants) -> None:
    """vLLM's batches with decode context parallelism: a rank's slots of a selection, and attention of that many."""
    variants.serving = ""
    model, shard = replace(V32, attn_tp_size=8, dcp_size=2), KvShard(2, 1)
    providers = providers_of(model)
    kernels = {(op, name) for op in ("sparse_mla_prefill", "sparse_mla_decode") for name in ("cuda", "triton")}
    warming.warm(kernels, providers, model, DEVICE)
    warming.warm_shard(providers, model, DEVICE, page_size=64, interleave=1)
    transform, keys = providers.helper("index_transform_shard"), cache("v32_fp8", 64, 64)
    for rows, offset in sizes():
        selected, owners = empty(rows + offset, 2048)[offset:], empty(rows + offset)[offset:]
        for width in WIDTHS:
            variants.serving = f"two ranks' cache, {rows} rows from {offset} on, {width} pages"
            own = transform(selected, empty(rows, width), shard, page_size=64, row_to_request=owners)
        for op, name in kernels:
            q = empty(rows, model.attended_heads, 576, dtype=BF16)
            out = empty(rows, model.attended_heads, 512, dtype=BF16)
            given = {"scale": 1.0, "d_v": 512, "topk_length": own.counts, "out": out}
            providers.attend_part(op, name, q, keys, own.slots, **given)


def v32_few_heads(variants: Variants) -> None:
    """V3.2's prefills with 8 heads, of which long ones may attend unions of neighbouring query tokens."""
    v32_prefills(variants, V32_FEW_HEADS)
    assert sparse_mla_neighbours.HOPPER_LIMITS.rows in ROWS


def v32_all_heads(variants: Variants) -> None:
    """V3.2's prefills with 128 heads, of which long ones may attend a bfloat16 copy."""
    v32_prefills(variants, V32_ALL_HEADS)
    assert max(ROWS) > warming.WHOLE_ROWS >= sparse_mla_copy.LEAST_TOKENS  # the warm-up runs one, too
    copies = any(sparse_mla_copy.SOURCE in name for name in variants.known)
    assert copies == (facts_of(DEVICE).architecture != sparse_mla_launch.HOPPER)


def v32_prefills(variants: Variants, model: ModelShape) -> None:
    variants.serving = ""
    providers, heads = providers_of(model), model.attended_heads
    warming.warm({("sparse_mla_prefill", "cuda")}, providers, model, DEVICE)
    for rows, offset in sizes():
        variants.serving = f"{heads} heads, {rows} rows from {offset} on"
        q, selected = empty(rows, heads, 576, dtype=BF16), empty(rows + offset, 2048)[offset:]
        providers.attend("sparse_mla_prefill", "cuda", q, cache("v32_fp8", 64, 64), selected, scale=1.0, d_v=512)


def v32_rows(variants: Variants) -> None:
    """V3.2 batches over a bf16 cache: attention in place."""
    variants.serving = ""
    providers = providers_of(V32_ROWS)
    kernels = {(op, "cuda") for op in ("sparse_mla_prefill", "sparse_mla_decode")}
    warming.warm(kernels, providers, V32_ROWS, DEVICE)
    for rows, offset in sizes():
        variants.serving = f"bf16, {rows} rows from {offset} on"
        q, selected = empty(rows, 16, 576, dtype=BF16), empty(rows + offset, 2048)[offset:]
        for op, name in kernels:
            providers.attend(op, name, q, cache("bf16", 64, 64), selected, scale=1.0, d_v=512)


def v4(variants: Variants) -> None:
    """vLLM's V4 batches: slots of both caches, and attention in place."""
    variants.serving = ""
    providers = providers_of(V4)
    kernels = {("sparse_mla_prefill", "cuda"), ("sparse_mla_decode", "cuda"), ("sparse_mla_prefill", "triton")}
    v4_serving.warm_v4(kernels, providers, V4, DEVICE)
    warming.warm_selection(providers, V4, DEVICE, page_size=64)
    v4_serving.warm_slots(providers, V4, DEVICE)
    paged = providers.helper("index_transform_paged")
    for rows, offset in sizes():
        numbers = empty(rows + offset)[offset:]
        variants.serving = f"V4, {rows} rows from {offset} on"
        for page_size, widths in ((64, (512,)), (2, (128, 256, 384, 1024, 8192))):
            for width in widths:
                given = {"page_size": page_size, "row_to_request": numbers, "lengths": numbers}
                paged(empty(rows, width), empty(rows, 63), **given)
        window = CacheSelection(cache("v4_fp8", 16, 64), empty(rows, 128), numbers)
        for ratio, width, page_size in ((0, 0, 0), (4, 512, 64), (128, 384, 2)):
            extra = CacheSelection(cache("v4_fp8", 16, page_size), empty(rows, width), numbers) if ratio else None
            q = empty(rows, 64, 512, dtype=BF16)
            call = LayerCall(q, window, extra, empty(64, dtype=F32), 1.0, 16, ratio)
            for op, name in kernels:
                attend_in_place(providers, op, name, call, empty(rows, 64, 512, dtype=BF16))


def sglang_prefills(variants: Variants) -> None:
    """SGLang's selection for V3.2's prefills with Triton's indexer: chunks of several requests."""
    variants.serving = ""
    providers = providers_of(V32)
    warming.warm_selection(providers, V32, DEVICE)
    warming.warm_logits({"triton"}, providers, V32, DEVICE)
    for requests in REQUESTS:
        (_, rows, _, keys), table = requests[-1], empty(len(requests), 63)
        found = (empty(keys, 128, dtype=FP8), empty(keys, 4, dtype=torch.uint8))
        pool = SimpleNamespace(get_index_k_scale_buffer=lambda *_, found=found: found)
        ranges = (empty(rows), empty(rows))
        for name, chunk in product(("PAGED", "RAGGED"), chunks_of(rows)):
            variants.serving = f"SGLang's prefill of {requests}, {chunk} query tokens at a time, {name}"
            metadata = SimpleNamespace(
                attn_metadata=SimpleNamespace(page_table_1=empty(len(requests), keys), topk_indices_offset=empty(rows)),
                topk_transform_method=SimpleNamespace(name=name),
                get_indexer_kvcache_range=lambda ranges=ranges: ranges,
                get_page_table_64=lambda table=table: table,
                get_indexer_seq_len=lambda: None,
                get_token_to_batch_idx=lambda rows=rows: empty(rows),
            )
            selection = sglang_indexer.Selection(plan_of(chunk), pool, providers)
            of = sglang_indexer.Ranges(metadata, list(requests), keys, keys)
            q, weights = empty(rows, 64, 128, dtype=FP8), empty(rows, 64, 1, dtype=F32)
            sglang_indexer._select(selection, of, SimpleNamespace(index_topk=2048), 0, q, weights, metadata, None)


def sglang_portable_steps(variants: Variants) -> None:
    """SGLang's decode and verify steps on the portable path, and the new entries of its cache."""
    variants.serving = ""
    providers = providers_of(V32)
    sglang_portable.is_fused = lambda metadata: metadata.fused
    sglang_portable.warm_portable(providers, V32, DEVICE)
    keys, buffer = cache("indexer_fp8", 64, 64).data, cache("v32_fp8", 64, 64).data.view(-1, 1, 656)
    for rows in ROWS:
        if not facts_of(DEVICE).native_fp8:  # otherwise SGLang's own kernel writes
            variants.serving = f"SGLang's portable path, {rows} new tokens"
            nope, rope = empty(rows, 1, 512, dtype=BF16), empty(rows, 1, 64, dtype=BF16)
            sglang_portable.write(providers, buffer, empty(rows, dtype=torch.int64), nope, rope)
        for width, chunk in product(WIDTHS, chunks_of(rows)):
            variants.serving = f"SGLang's portable step, {rows} rows, {width} pages, {chunk} at a time"
            q, _ = sglang_portable.quantize(empty(rows, 64, 128, dtype=BF16), providers)
            table = empty(rows, width)
            metadata = SimpleNamespace(fused=width % 2 == 0, get_page_table_64=lambda table=table: table)
            indexer = SimpleNamespace(num_init_tokens=0, num_local_tokens=0, index_topk=2048)
            selection = sglang_indexer.Selection(plan_of(chunk), None, providers)
            weights = empty(rows, 64, 1, dtype=F32)
            sglang_portable.select_steps(selection, indexer, q, keys, weights, empty(rows), metadata)


def vllm_portable_batches(variants: Variants) -> None:
    """vLLM's batches on the portable path: inputs, new entries of both caches, selections of prefills and steps."""
    variants.serving = ""
    providers = providers_of(V32)
    vllm_portable.rounds_scales = lambda: True
    vllm_portable.warm_indexer(providers, V32, DEVICE, STEP_TOKENS)
    vllm_portable.warm_inputs(providers, V32, DEVICE)
    keys = cache("indexer_fp8", 64, 64).data.view(64, 64, -1)
    given = {"kv_cache": keys, "topk_tokens": 2048, "skip_k_cache_insert": False, "max_model_len": 32832}
    for rows, offset in sizes():
        total = rows + offset
        given |= {
            "k": empty(total, 128, dtype=BF16),
            "q_quant": empty(total, 64, 128, dtype=FP8),
            "weights": empty(total, 64, dtype=F32),
            "hidden_states": empty(total, 7168, dtype=BF16),
            "topk_indices_buffer": empty(8192, 2048),
        }
        metadata = SimpleNamespace(slot_mapping=empty(total, dtype=torch.int64), prefill=None)
        for number, count in enumerate(KEYS):
            variants.serving = f"vLLM's portable prefill, {rows} rows from {offset} on, {count} keys"
            chunk = SimpleNamespace(
                token_start=offset,
                token_end=total,
                skip_kv_gather=False,
                cu_seqlen_ks=empty(total)[offset:],
                cu_seqlen_ke=empty(total)[offset:],
                max_seqlen_k=None if number % 2 else count,
                nsa_plugin_slots=empty(count, dtype=torch.int64),
            )
            metadata.prefill = SimpleNamespace(chunks=[chunk])
            vllm_portable.select(given, metadata, None, providers)
        metadata.prefill = None
        for number, (width, chunk) in enumerate(product(WIDTHS, chunks_of(rows))):
            each = number % STEP_TOKENS + 1
            requests = total // each - offset
            if requests < 1:
                continue
            variants.serving = f"vLLM's portable step, {requests} requests of {each} from {offset} on, {width} pages"
            lengths, table = empty(requests + offset)[offset:], empty(requests + offset, width)[offset:]
            steps = StepSelection(plan_of(chunk), requests * each, lengths, table)
            vllm_portable.select(given, metadata, steps, providers)


def chunks_of(rows: int) -> tuple[int, int]:
    """Query tokens whose logits are held at once: powers of two, as in a plan, one with which a batch has chunks."""
    return 1 << (max(1, rows // 8).bit_length() - 1), 2048


def plan_of(chunk: int) -> Any:
    """The part of a plan that a selection reads, with the logits of so many query tokens at a time."""
    return SimpleNamespace(indexer=IndexerPlan(mode=IndexerMode.TOPK, provider="triton", rows_per_chunk=chunk))


Family = Callable[[Variants], None]
FAMILIES: tuple[Family, ...] = (v32, v32_few_heads, v32_all_heads, v32_rows, shared, v4, sglang_prefills)
PORTABLE: tuple[Family, ...] = (sglang_portable_steps, vllm_portable_batches)


def main() -> None:
    sm = int(sys.argv[1])
    without_a_gpu(sm)
    addresses()
    # The warm-up looks at results, which nobody has computed.
    FakeTensor.any = lambda self: False
    FakeTensor.all = lambda self: True
    warming.default_selector = lambda device, topk_: topk.topk_rows
    variants = Variants()
    for module in (sparse_mla_copy, sparse_mla_launch, sparse_mla_neighbours, sparse_mla_union, sparse_mla_wide):
        module.load_kernel = variants.loaded  # type: ignore[attr-defined]
    for module in (sparse_mla_copy, sparse_mla_launch):
        module.compile_together = lambda source, sets: None  # type: ignore[attr-defined]
    with FakeTensorMode():
        for family in (*FAMILIES, *(PORTABLE if sm < sparse_mla_launch.HOPPER else ())):
            family(variants)
    print(json.dumps(variants.missed))


if __name__ == "__main__":
    main()
