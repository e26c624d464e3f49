"""SGLang's V4 attention backend in miniature, on the CPU: its pools, its metadata of a batch, and what it does itself.

Pages are of the engine's sizes and lie in the pools in no order; the window's pool holds the tokens that some new
token's window reaches, and NaN elsewhere.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

from nsa_plugin.backends.sglang.v4.attention import adopt, with_v4_plans
from nsa_plugin.backends.sglang.v4.routes import SglangV4Planner
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.kernels.indexer import quantize
from nsa_plugin.kernels.kv_cache import open_cache, reference_read, reference_write
from nsa_plugin.kernels.sparse_mla import reference_prefill
from nsa_plugin.layouts import INDEXER_FP8, V4_FP8
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.settings import Settings
from tests.backends.fake_sglang.v32 import ForwardMode, forward_batch

HEADS, WINDOW, PAGE, TOPK, INDEX_HEADS, INDEX_DIM = 4, 128, 256, 128, 32, 128
LAYERS = {0: 0, 1: 4, 2: 128}
"""Compress ratio by layer."""

MODEL = ModelShape(
    family="v4",
    num_heads=HEADS,
    kv_layout="v4_fp8",
    index_topk=TOPK,
    index_n_heads=INDEX_HEADS,
    index_head_dim=INDEX_DIM,
    sliding_window=WINDOW,
)
# DeepGEMM and the CUDA kernels run on a GPU only.
H200 = synthetic(90, libraries=("triton", "flash_mla"))
OLD_H200 = synthetic(90, libraries=("triton", "flash_mla"), versions={"flash_mla": ("sglang-kernel", "0.4.4")})

_LARGE_INDEXER_QUERY_THRESHOLD = 11673


class EnvField:
    """SGLang's variable: read with `get`; raises if used as a bool."""

    def __init__(self, name: str, default: bool) -> None:
        self.name, self.default = name, default

    def get(self) -> bool:
        value = os.environ.get(self.name)
        return self.default if value is None else value.lower() in ("true", "1", "yes", "y")

    def is_set(self) -> bool:
        return self.name in os.environ

    def __bool__(self) -> bool:
        raise RuntimeError("Please use `envs.YOUR_FLAG.get()` instead of `envs.YOUR_FLAG`")


class Envs:
    SGLANG_OPT_FLASHMLA_SPARSE_PREFILL = EnvField("SGLANG_OPT_FLASHMLA_SPARSE_PREFILL", False)
    SGLANG_OPT_USE_JIT_INDEXER_METADATA = EnvField("SGLANG_OPT_USE_JIT_INDEXER_METADATA", True)
    SGLANG_FP8_PAGED_MQA_LOGITS_TORCH = EnvField("SGLANG_FP8_PAGED_MQA_LOGITS_TORCH", False)
    SGLANG_OPT_USE_TILELANG_INDEXER = EnvField("SGLANG_OPT_USE_TILELANG_INDEXER", False)


envs = Envs()
recording: list[Any] = []


def get_global_indexer_capturer() -> Any:
    return recording[0] if recording else None


def _random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Request:
    """q_len new tokens behind a context of kv_len - q_len; `pages` are its pages in every pool."""

    q_len: int
    kv_len: int
    pages: torch.Tensor

    def slots(self, tokens_a_page: int, count: int) -> torch.Tensor:
        at = torch.arange(count)
        return self.pages[at // tokens_a_page] * tokens_a_page + at % tokens_a_page


class Pool:
    """`DeepSeekV4TokenToKVPool` with a layer of each compress ratio; the window's pool orders its pages differently."""

    def __init__(self, requests: list[Request], seed: int = 0) -> None:
        self.num_pages = 1 + max(int(request.pages.max()) for request in requests)
        self.page_size = PAGE
        self.swa_kv_pool = SimpleNamespace(kv_cache_total_dim=584, page_size=PAGE)
        self.to_window = torch.randperm(self.num_pages, generator=torch.Generator().manual_seed(seed))
        self.window = self._empty(PAGE)
        self.extra = {ratio: self._empty(PAGE // ratio) for ratio in (4, 128)}
        self.index = torch.zeros(self.num_pages, 64 * 132, dtype=torch.uint8)
        self.keys = open_cache(self.index, INDEXER_FP8, 64)
        for number, request in enumerate(requests):
            first = max(0, request.kv_len - request.q_len - WINDOW + 1)
            rows = _random(100 + number, request.kv_len, 512) / 8
            self.write(self.window, PAGE, rows[first:], self.window_slots(request)[first:])
            for ratio in (4, 128):
                count = request.kv_len // ratio
                values = _random(200 + number + ratio, count, 512) / 8
                self.write(self.extra[ratio], PAGE // ratio, values, request.slots(PAGE // ratio, count))
            keys = _random(300 + number, request.kv_len // 4, INDEX_DIM).bfloat16()
            reference_write(self.keys, keys, request.slots(64, len(keys)))

    def _empty(self, page_size: int) -> torch.Tensor:
        return torch.full((self.num_pages, V4_FP8.page_bytes(page_size)), 0xFF, dtype=torch.uint8)

    def write(self, buffer: torch.Tensor, page_size: int, rows: torch.Tensor, slots: torch.Tensor) -> None:
        reference_write(open_cache(buffer, V4_FP8, page_size), rows.bfloat16(), slots)

    def window_slots(self, request: Request) -> torch.Tensor:
        slots = request.slots(PAGE, request.kv_len)
        return self.to_window[slots // PAGE] * PAGE + slots % PAGE

    def get_swa_key_buffer_radix(self, layer_id: int) -> torch.Tensor:
        return self.window.view(torch.float8_e4m3fn)

    def get_extra_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.extra[LAYERS[layer_id]].view(torch.float8_e4m3fn)

    def get_extra_key_page_size(self, layer_id: int) -> int:
        return PAGE // LAYERS[layer_id]

    def get_index_k_with_scale_buffer(self, layer_id: int) -> torch.Tensor:
        return self.index


@dataclass
class Batch:
    """Requests, their pool, and what the engine is given: built by `batch`."""

    requests: list[Request]
    pool: Pool
    forward: Any
    padded: int = 0
    heads: int = HEADS
    q: torch.Tensor = field(init=False)
    k: torch.Tensor = field(init=False)
    sink: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.q = (_random(1, self.rows + self.padded, self.heads, 512) / 4).bfloat16()
        self.k = (_random(2, self.rows + self.padded, 1, 512) / 8).bfloat16()
        self.sink = _random(3, self.heads)

    @property
    def rows(self) -> int:
        return sum(request.q_len for request in self.requests)

    def places(self) -> list[tuple[Request, int]]:
        """(request, position) of each row."""
        return [
            (request, position)
            for request in self.requests
            for position in range(request.kv_len - request.q_len, request.kv_len)
        ]

    def core(self, padded: int = 0) -> Any:
        """SGLang's `DSV4AttnMetadata`; as in SGLang, `padded` rows belong to one token of the last request."""
        places = self.places() + [(self.requests[-1], 0)] * padded
        lengths = torch.tensor([position + 1 for _, position in places], dtype=torch.int32)
        width = -(-max(request.kv_len for request in self.requests) // PAGE)
        table = torch.zeros(len(places), width + 1, dtype=torch.int32)
        window = torch.full((len(places), WINDOW), -1, dtype=torch.int32)
        c128 = torch.full((len(places), -(-2 * width // 64) * 64), -1, dtype=torch.int32)
        for row, (request, position) in enumerate(places):
            table[row, : len(request.pages)] = request.pages.int()
            count = min(position + 1, WINDOW)
            window[row, :count] = self.pool.window_slots(request)[position + 1 - count : position + 1].flip(0).int()
            entries = (position + 1) // 128
            c128[row, :entries] = request.slots(2, entries).int()
        c4_lengths = lengths // 4
        selected = torch.full((len(places), TOPK), -1, dtype=torch.int32)
        return SimpleNamespace(
            page_table=table,
            positions=lengths - 1,
            swa_page_indices=window,
            swa_topk_lengths=lengths.clamp(max=WINDOW),
            c4_lengths=c4_lengths,
            c4_sparse_page_indices=selected,
            c4_sparse_raw_indices=torch.full_like(selected, -7),
            c4_sparse_topk_lengths=c4_lengths.clamp(1, TOPK),
            c128_page_indices=c128,
            c128_topk_lengths_clamp1=(lengths // 128).clamp(min=1),
        )

    def select_something(self, core: Any) -> None:
        """A selection of c4 entries, as an indexer leaves it."""
        for row, (request, position) in enumerate(self.places()):
            entries = (position + 1) // 4
            chosen = torch.randperm(entries, generator=torch.Generator().manual_seed(row))[:TOPK].int()
            core.c4_sparse_raw_indices[row, : len(chosen)] = chosen
            core.c4_sparse_page_indices[row, : len(chosen)] = request.slots(64, entries)[chosen.long()].int()

    def expected(self, core: Any, layer_id: int, scale: float = 512**-0.5) -> torch.Tensor:
        """[rows, heads, 512] float64: softmax over positions, the sink in the denominator."""
        ratio, result = LAYERS[layer_id], torch.zeros(self.rows, self.heads, 512, dtype=torch.float64)
        window = open_cache(self.pool.window, V4_FP8, PAGE)
        for row, (request, position) in enumerate(self.places()):
            first = max(0, position - WINDOW + 1)
            keys = [reference_read(window, self.pool.window_slots(request)[first : position + 1], dtype=torch.float32)]
            if ratio:
                entries = (position + 1) // ratio
                chosen = torch.arange(entries)
                if ratio == 4:
                    chosen = core.c4_sparse_raw_indices[row][: min(entries, TOPK)].long()
                slots = request.slots(PAGE // ratio, max(entries, 1))[chosen]
                extra = open_cache(self.pool.extra[ratio], V4_FP8, PAGE // ratio)
                keys.append(reference_read(extra, slots, dtype=torch.float32))
            values = torch.cat(keys).double()
            logits = self.q[row].double() @ values.T * scale
            weights = torch.cat([logits, self.sink.double().unsqueeze(1)], dim=1).softmax(-1)[:, :-1]
            result[row] = weights @ values
        return result


def batch(*lens: tuple[int, int], padded: int = 0, mode: ForwardMode = ForwardMode.EXTEND, heads: int = HEADS) -> Batch:
    """(q_len, kv_len) of each request; `padded` queries behind them, as MLP-sync adds; `heads` of the rank."""
    pages = [-(-kv_len // PAGE) for _, kv_len in lens]
    order = torch.randperm(sum(pages) + 3, generator=torch.Generator().manual_seed(9))
    requests, at = [], 0
    for (q_len, kv_len), count in zip(lens, pages, strict=True):
        requests.append(Request(q_len, kv_len, order[at : at + count]))
        at += count
    given = forward_batch(mode, [q_len for q_len, _ in lens], [kv_len for _, kv_len in lens])
    return Batch(requests, Pool(requests), given, padded, heads)


class Engine:
    """`DeepseekV4AttnBackend` of 0.5.13 to 0.5.20; `calls` lists the stock functions that ran."""

    def __init__(self, of: Batch) -> None:
        self.batch, self.token_to_kv_pool = of, of.pool
        self.softmax_scale, self.page_size, self.MAX_SEQ_LEN_FOR_CAPTURE = 512**-0.5, PAGE, 4096
        self.speculative_num_draft_tokens: int | None = None
        self.hisparse_coordinator: Any = None
        self.debug_use_external_c4_sparse_indices = False
        self.forward_metadata: Any = None
        self.calls: list[str] = []

    def init_forward_metadata(self, forward_batch: Any) -> None:
        core = self.batch.core()
        self.forward_metadata = SimpleNamespace(
            core_attn_metadata=core, indexer_metadata=self.init_forward_metadata_indexer(core)
        )

    def init_forward_metadata_indexer(self, core_attn_metadata: Any, *, use_prefill_cuda_graph: bool = False) -> Any:
        self.calls.append("jit" if envs.SGLANG_OPT_USE_JIT_INDEXER_METADATA.get() else "library")
        lengths = core_attn_metadata.c4_lengths
        return SimpleNamespace(c4_seq_lens=lengths, page_table=core_attn_metadata.page_table)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self.calls.append("captured step" if in_capture else "replayed step")

    def init_forward_metadata_for_breakable_cuda_graph_capture(self, forward_batch: Any) -> Any:
        self.calls.append("capture")

    def prepare_forward_metadata_for_breakable_cuda_graph_replay(
        self, capture_metadata: Any, forward_batch: Any, *, static_forward_batch: Any = None
    ) -> None:
        self.calls.append("replay")
        self.forward_metadata = capture_metadata

    def store_cache(self, layer_id: int, swa_k: torch.Tensor, forward_batch: Any) -> None:
        self.calls.append("store")
        slots = torch.cat([self.batch.pool.window_slots(one)[-one.q_len :] for one in self.batch.requests])
        self.batch.pool.write(self.batch.pool.window, PAGE, swa_k[: len(slots), 0], slots)

    def _forward_prepare_normal(
        self, x: Any, q_lora: Any, c4_indexer: Any, positions: Any, forward_batch: Any, skip_compressor: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert x.shape[0] == q_lora.shape[0] == positions.shape[0]
        self.calls.append("prepare")
        rows = x.shape[0]
        codes, scales = quantize(_random(5, rows, INDEX_HEADS, INDEX_DIM))
        return codes, scales * _random(6, rows, INDEX_HEADS, 1)

    def _forward_prepare_multi_stream(
        self,
        x: Any,
        q_lora: Any,
        c4_indexer: Any,
        positions: Any,
        forward_batch: Any,
        alt_streams: Any = None,
        q_lora_ready: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("a prefill has one stream")

    def forward_c4_indexer(
        self,
        x: Any,
        q_lora: Any,
        c4_indexer: Any,
        forward_batch: Any,
        alt_streams: Any = None,
        enable_multi_stream: bool = False,
        q_lora_ready: Any = None,
        skip_compressor: bool = False,
    ) -> None:
        self.calls.append("indexer")

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        compress_ratio: int,
        save_kv_cache: bool = True,
        attn_sink: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        extend = forward_batch.forward_mode.is_extend()
        many = q.shape[0] > _LARGE_INDEXER_QUERY_THRESHOLD
        sparse = extend and (many or envs.SGLANG_OPT_FLASHMLA_SPARSE_PREFILL.get())
        self.calls.append("sparse" if sparse else "decode kernel")
        core = self.forward_metadata.core_attn_metadata
        window = open_cache(self.batch.pool.window, V4_FP8, PAGE)
        given: dict[str, Any] = {"topk_length": core.swa_topk_lengths, "attn_sink": attn_sink}
        if compress_ratio:
            cache = open_cache(self.batch.pool.extra[compress_ratio], V4_FP8, PAGE // compress_ratio)
            four = compress_ratio == 4
            given |= {
                "extra_kv": cache,
                "extra_indices": core.c4_sparse_page_indices if four else core.c128_page_indices,
                "extra_topk_length": core.c4_sparse_topk_lengths if four else core.c128_topk_lengths_clamp1,
            }
        return reference_prefill(q, window, core.swa_page_indices, scale=self.softmax_scale, **given).out


class LateEngine(Engine):
    """From 0.5.22 on, `forward` is an outer function."""

    forward = None  # type: ignore[assignment]

    def _forward_attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        compress_ratio: int,
        save_kv_cache: bool = True,
        attn_sink: torch.Tensor | None = None,
        cos_sin_cache: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        return Engine.forward(self, q, k, v, layer, forward_batch, compress_ratio, save_kv_cache, attn_sink)

    def _use_sparse_prefill(self, forward_batch: Any, *, num_qo_tokens: int) -> bool:
        return True


def attend(backend: Any, layer_id: int, *, save: bool = False, q: torch.Tensor | None = None, **more: Any) -> Any:
    """A layer's attention, with the names that the model uses."""
    of: Batch = backend.batch
    q = of.q if q is None else q
    keys = of.k if save else q
    given = {
        "q": q,
        "k": keys,
        "v": keys,
        "layer": SimpleNamespace(layer_id=layer_id, tp_q_head_num=of.heads),
        "forward_batch": of.forward,
        "compress_ratio": LAYERS[layer_id],
        "save_kv_cache": save,
        "attn_sink": of.sink,
    }
    name = "_forward_attention" if hasattr(backend, "_forward_attention") else "forward"
    return getattr(backend, name)(**(given | more))


def started(
    of: Batch,
    original: type = Engine,
    *,
    device: Any = H200,
    asked: frozenset[str] = frozenset(),
    server_args: Any = None,
    own_heads_first: bool = True,
    rows_attention: Any = lambda q: None,
    engine_makes_rows: bool = False,
    engine_tokens: int = 0,
    **settings: Any,
) -> Any:
    """A backend of the plugin that serves the batch; `notes` has what `adopt` said.

    Batches are small here, and with `engine_tokens` of 0 the plugin's own all the same.
    """
    backend = with_v4_plans(original)(of)
    planner = SglangV4Planner(
        replace(MODEL, num_heads=of.heads),
        device,
        Settings(**settings),
        asked=asked,
        engine_makes_rows=engine_makes_rows,
        engine_tokens=engine_tokens,
    )
    backend.notes = adopt(backend, planner, server_args or SimpleNamespace(), own_heads_first=own_heads_first)
    if backend.nsa_plugin is not None:
        # FlashMLA runs on a GPU only.
        backend.nsa_plugin.rows_attention = rows_attention
    return backend


def prepared(of: Batch, original: type = Engine, **more: Any) -> Any:
    """Call `started`, then prepare the batch and make its selection."""
    backend = started(of, original, **more)
    backend.init_forward_metadata(of.forward)
    of.select_something(backend.forward_metadata.core_attn_metadata)
    return backend
