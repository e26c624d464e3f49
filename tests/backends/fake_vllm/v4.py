"""vLLM's DeepSeek-V4 attention layer in miniature, on the CPU: its caches, its metadata of a batch, its two functions.

The window's pages hold 64 tokens, the compressed ones 64 and 2 entries; each page has the padding behind it that vLLM
gives it, they lie in no order, and what no token of the batch may see is NaN. The layer's own functions attend densely
in float32 over what metadata, block tables and the top-k buffer say, and count their calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

from nsa_plugin.backends.common.fault import AttendedTokens
from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.common.v4 import LAYOUT
from nsa_plugin.backends.vllm.v4 import attention as v4_attention
from nsa_plugin.backends.vllm.v4.batch import planned_swa_builder
from nsa_plugin.backends.vllm.v4.routes import VllmV4Planner
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.kernels.kv_cache import open_cache, reference_read, reference_write
from nsa_plugin.kernels.sparse_mla import reference_decode
from nsa_plugin.layouts import V4_FP8
from nsa_plugin.libraries.devices import DeviceProfile, synthetic
from nsa_plugin.settings import Settings
from tests.backends.fake_vllm.v32 import CommonAttentionMetadata

HEADS, PADDED, WINDOW, BLOCK, TOPK, MAX_LEN, MAX_ROWS = 4, 64, 128, 256, 128, 1024, 1024
WINDOW_PAGE = 64
SCALE = 512**-0.5
STRIDE = 576

MODEL = ModelShape(
    family="v4", num_heads=HEADS, kv_layout=LAYOUT, index_topk=TOPK, index_n_heads=32, sliding_window=WINDOW
)
CPU = synthetic(0)
H200 = synthetic(90, libraries=("triton", "flash_mla"))


def planner(
    device: DeviceProfile = H200, *, step_tokens: int = 1, heads: int = HEADS, **settings: Any
) -> VllmV4Planner:
    return VllmV4Planner(
        model=replace(MODEL, num_heads=heads),
        device=device,
        settings=Settings(**settings),
        max_model_len=MAX_LEN,
        step_tokens=step_tokens,
    )


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pages_of(count: int, page_size: int) -> torch.Tensor:
    """uint8 [count, page_size, 584] of NaN, the pages padded to a multiple of 576 bytes."""
    stride = -(-page_size * V4_FP8.row_bytes // STRIDE) * STRIDE
    flat = torch.full((count, stride), 0xFF, dtype=torch.uint8)
    return flat[:, : page_size * V4_FP8.row_bytes].unflatten(1, (page_size, V4_FP8.row_bytes))


@dataclass
class SWAMetadata:
    """`DeepseekSparseSWAMetadata`."""

    block_table: torch.Tensor
    block_size: int
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    is_valid_token: torch.Tensor
    token_to_req_indices: torch.Tensor
    decode_swa_indices: torch.Tensor
    decode_swa_lens: torch.Tensor
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


@dataclass
class NewSWAMetadata(SWAMetadata):
    """Since 0.24."""

    prefill_swa_indices: torch.Tensor | None = None
    prefill_swa_lens: torch.Tensor | None = None


class SWABuilder:
    """`DeepseekSparseSWAMetadataBuilder`; `since_24` for what 0.24 added."""

    def __init__(self, world: World, *, since_24: bool = True, decode_threshold: int = 1) -> None:
        self.world, self.since_24, self.decode_threshold = world, since_24, decode_threshold

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> SWAMetadata:
        common, world = common_attn_metadata, self.world
        starts = common.query_start_loc_cpu.tolist()
        lens = [end - start for start, end in pairwise(starts)]
        decodes = next((place for place, rows in enumerate(lens) if rows > self.decode_threshold), len(lens))
        rows = common.num_actual_tokens if decodes == len(lens) else starts[decodes]
        owners = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens)).int()
        slots, lengths = world.window_slots(starts[-1])
        count = common.num_actual_tokens
        padded = torch.zeros(count, WINDOW, dtype=torch.int32)  # stale slots, as vLLM's buffers have
        padded[: len(slots)] = slots
        counts = torch.zeros(count, dtype=torch.int32)
        counts[: len(slots)] = lengths
        given: dict[str, Any] = {
            "block_table": world.window_table,
            "block_size": WINDOW_PAGE,
            "seq_lens": common.seq_lens,
            "query_start_loc": common.query_start_loc,
            "query_start_loc_cpu": common.query_start_loc_cpu,
            "is_valid_token": common.slot_mapping >= 0,
            "token_to_req_indices": owners,
            "decode_swa_indices": padded[:rows].unsqueeze(1),
            "decode_swa_lens": counts[:rows],
            "num_decodes": decodes,
            "num_prefills": len(lens) - decodes,
            "num_decode_tokens": rows,
            "num_prefill_tokens": count - rows,
        }
        if not self.since_24:
            return SWAMetadata(**given)
        return NewSWAMetadata(**given, prefill_swa_indices=padded[rows:].unsqueeze(1), prefill_swa_lens=counts[rows:])


@dataclass
class Named:
    """`DeepseekV4FlashMLAMetadata` of the layers of a compress ratio."""

    block_table: torch.Tensor
    block_size: int = BLOCK
    c128a_global_decode_topk_indices: torch.Tensor | None = None
    c128a_decode_topk_lens: torch.Tensor | None = None
    c128a_prefill_topk_indices: torch.Tensor | None = None


class Layer:
    """`DeepseekV4FlashMLAAttention`, and what its base calls it with."""

    def __init__(self, world: World, ratio: int) -> None:
        self.world, self.compress_ratio = world, max(1, ratio)
        self.n_local_heads, self.scale = world.heads, SCALE
        self.attn_sink = torch.cat([random(7, world.heads), torch.full((world.padded - world.heads,), -torch.inf)])
        self.topk_indices_buffer = world.topk
        self.kv_cache = world.compressed[ratio] if ratio else torch.zeros(0)
        self.swa_cache_layer = SimpleNamespace(kv_cache=world.window)
        self.own: list[str] = []

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: "FLASHMLA_SPARSE_DSV4")

    def forward_mqa(self, q: torch.Tensor, positions: torch.Tensor, output: torch.Tensor, metadata: Any) -> None:
        named = self.world.named.get(self.compress_ratio)
        cache, first = (self.kv_cache if named else None), metadata.num_decode_tokens
        if metadata.num_prefills:
            self._forward_prefill(
                q=q[first:],
                positions=positions[first:],
                compressed_k_cache=cache,
                swa_k_cache=self.swa_cache_layer.kv_cache,
                output=output[first:],
                attn_metadata=named,
                swa_metadata=metadata,
            )
        if metadata.num_decodes:
            self._forward_decode(
                q=q[:first],
                kv_cache=cache,
                swa_metadata=metadata,
                attn_metadata=named,
                swa_only=named is None,
                output=output[:first],
            )

    def _forward_prefill(
        self,
        q: torch.Tensor,
        positions: torch.Tensor,
        compressed_k_cache: torch.Tensor | None,
        swa_k_cache: torch.Tensor,
        output: torch.Tensor,
        attn_metadata: Any,
        swa_metadata: Any,
    ) -> None:
        self.own.append("prefill")
        first, count = swa_metadata.num_decode_tokens, int(swa_metadata.query_start_loc_cpu[-1])
        all_of_them = None if attn_metadata is None else attn_metadata.c128a_prefill_topk_indices
        for row in range(count - first):
            chosen = None
            if self.compress_ratio == 4:
                chosen = self.topk_indices_buffer[first + row]
            elif self.compress_ratio == 128:
                chosen = all_of_them[row]
            keys = self.world.keys(self, first + row, chosen)
            flash_mla_sparse_fwd(
                q=q[row : row + 1],
                kv=keys.unsqueeze(1),
                indices=torch.arange(len(keys), dtype=torch.int32).view(1, 1, -1),
                sm_scale=SCALE,
                attn_sink=self.attn_sink,
                topk_length=torch.tensor([len(keys)]),
                out=output[row : row + 1],
            )

    def _forward_decode(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor | None,
        swa_metadata: Any,
        attn_metadata: Any,
        swa_only: bool,
        output: torch.Tensor,
    ) -> None:
        self.own.append("decode")
        for row in range(min(len(q), int(swa_metadata.query_start_loc_cpu[-1]))):
            output[row] = self.world.attended(self, q[row], row, self.world.chosen(self.compress_ratio, row))


def dense(q: torch.Tensor, keys: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """[heads, 512] of one row over [keys, 512]."""
    logits = torch.cat([q.float() @ keys.T * SCALE, sink.unsqueeze(1)], dim=1)
    return (logits.softmax(-1)[:, :-1] @ keys).to(q.dtype)


def flash_mla_sparse_fwd(**given: Any) -> None:
    """vLLM's function over rows, for one query row."""
    (q,), (named,) = given["q"], given["indices"][:, 0]
    keys = given["kv"][named[: int(given["topk_length"])].long(), 0]
    given["out"].copy_(dense(q, keys, given["attn_sink"]))


class OldImpl:
    """`DeepseekV4FlashMLASparseImpl` of 0.22: class methods that are given the layer."""

    @classmethod
    def _forward_prefill(cls, layer: Layer, **given: Any) -> None:
        Layer._forward_prefill(layer, **given)

    @classmethod
    def _forward_decode(cls, layer: Layer, **given: Any) -> None:
        Layer._forward_decode(layer, **given)


def flash_mla_with_kvcache(**given: Any) -> tuple[torch.Tensor, None]:
    """vLLM's function, with FlashMLA's decode kernel in float32; it takes 64 or 128 heads."""
    assert given["q"].shape[2] in (64, 128)
    assert given["indices"].shape[-1] % 64 == 0
    assert int(given["topk_length"].max()) <= given["indices"].shape[-1]
    given["tile_scheduler_metadata"].calls += 1
    second: dict[str, Any] = {}
    if given["extra_k_cache"] is not None:
        assert given["extra_indices_in_kvcache"].shape[-1] % 64 == 0
        assert int(given["extra_topk_length"].max()) <= given["extra_indices_in_kvcache"].shape[-1]
        second = {
            "extra_cache": open_cache(given["extra_k_cache"], V4_FP8),
            "extra_indices": given["extra_indices_in_kvcache"],
            "extra_topk_length": given["extra_topk_length"],
        }
    cache = open_cache(given["k_cache"], V4_FP8)
    arguments = {"scale": given["softmax_scale"], "attn_sink": given["attn_sink"], "out": given["out"]}
    reference_decode(given["q"], cache, given["indices"], topk_length=given["topk_length"], **arguments, **second)
    return given["out"], None


@dataclass
class World:
    """A batch of requests (rows, context), decodes first, with everything that a layer reads of it.

    Attributes:
        planner: None where vLLM serves by itself.
        padding: rows behind the last request's, for a CUDA graph.
        since_24: see `SWABuilder`.
    """

    planner: VllmV4Planner | None
    lengths: list[tuple[int, int]]
    padding: int = 0
    since_24: bool = True
    triton: bool = False
    schedules: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        requests = len(self.lengths)
        order = torch.Generator().manual_seed(3)
        pages, blocks = -(-MAX_LEN // WINDOW_PAGE), -(-MAX_LEN // BLOCK)
        self.window_table = torch.randperm(requests * pages + 3, generator=order)[: requests * pages].int()
        self.window_table = self.window_table.view(requests, pages)
        self.table = torch.randperm(requests * blocks + 3, generator=order)[: requests * blocks].int()
        self.table = self.table.view(requests, blocks)
        self.window = pages_of(requests * pages + 3, WINDOW_PAGE)
        self.compressed = {ratio: pages_of(requests * blocks + 3, BLOCK // ratio) for ratio in (4, 128)}
        rows = [count for count, _ in self.lengths]
        self.owner = [request for request, count in enumerate(rows) for _ in range(count)]
        self.position = [context - count + place for count, context in self.lengths for place in range(count)]
        self._write()
        self._select()

    def _write(self) -> None:
        for request, (rows, context) in enumerate(self.lengths):
            values = random(100 + request, context, 512).bfloat16()
            at = torch.arange(max(0, context - rows - WINDOW + 1), context)
            reference_write(open_cache(self.window, V4_FP8), values[at], self._slots(at, request, 1))
            for ratio, cache in self.compressed.items():
                at = torch.arange(context // ratio)
                values = random(200 + request + ratio, len(at), 512).bfloat16()
                reference_write(open_cache(cache, V4_FP8), values, self._slots(at, request, ratio))

    def _slots(self, at: torch.Tensor, request: int, ratio: int) -> torch.Tensor:
        size, table = (WINDOW_PAGE, self.window_table) if ratio == 1 else (BLOCK // ratio, self.table)
        return table[request][at // size].long() * size + at % size

    def _select(self) -> None:
        """Write the outputs of the indexer and of vLLM's builder of the compressed layers' metadata."""
        count = len(self.owner) + self.padding
        self.topk = torch.full((MAX_ROWS, TOPK), 5, dtype=torch.int32)  # left from other batches
        self.topk[:count] = -1
        steps = self.step_rows
        all_of_them = torch.full((count, MAX_LEN // 128 * 16), -1, dtype=torch.int32)
        for row, position in enumerate(self.position):
            seen = (position + 1) // 4
            some = torch.randperm(seen, generator=torch.Generator().manual_seed(row))[:TOPK]
            self.topk[row, : len(some)] = some.int()
            all_of_them[row, : (position + 1) // 128] = torch.arange((position + 1) // 128)
        slots = all_of_them[:steps].clamp(min=1)  # stale ones behind the lengths
        for row in range(min(steps, len(self.owner))):
            some = all_of_them[row][all_of_them[row] >= 0].long()
            slots[row, : len(some)] = self._slots(some, self.owner[row], 128).int()
        self.named = {
            4: Named(self.table),
            128: Named(
                self.table,
                c128a_global_decode_topk_indices=slots.unsqueeze(1),
                c128a_decode_topk_lens=(all_of_them[:steps] >= 0).sum(1).int(),
                c128a_prefill_topk_indices=all_of_them[steps:],
            ),
        }

    @property
    def heads(self) -> int:
        return HEADS if self.planner is None else self.planner.model.heads_per_rank

    @property
    def padded(self) -> int:
        """Heads of the layer's queries: vLLM pads them to a number that FlashMLA supports."""
        return PADDED if self.heads <= PADDED else 2 * PADDED

    @property
    def step_rows(self) -> int:
        limit = 1 if self.planner is None else self.planner.step_tokens
        place = next((n for n, (rows, _) in enumerate(self.lengths) if rows > limit), len(self.lengths))
        rows = sum(count for count, _ in self.lengths[:place])
        return rows + self.padding if place == len(self.lengths) else rows

    def window_slots(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(slots [rows, window] int32, lengths [rows] int32), as vLLM's kernel makes them; stale slots behind them."""
        slots = torch.full((rows, WINDOW), 1, dtype=torch.int32)
        lengths = torch.zeros(rows, dtype=torch.int32)
        for row in range(rows):
            at = torch.arange(max(0, self.position[row] - WINDOW + 1), self.position[row] + 1)
            slots[row, : len(at)] = self._slots(at, self.owner[row], 1).int()
            lengths[row] = len(at)
        return slots, lengths

    def chosen(self, ratio: int, row: int) -> torch.Tensor | None:
        if ratio == 4:
            return self.topk[row]
        return torch.arange((self.position[row] + 1) // 128) if ratio == 128 else None

    def attended(self, layer: Layer, q: torch.Tensor, row: int, chosen: torch.Tensor | None) -> torch.Tensor:
        """[heads, 512] of one row, from the caches, densely."""
        return dense(q, self.keys(layer, row, chosen), layer.attn_sink)

    def keys(self, layer: Layer, row: int, chosen: torch.Tensor | None) -> torch.Tensor:
        """[keys, 512] float32 that a row attends to: its window's, then the compressed ones."""
        request, position = self.owner[row], self.position[row]
        at = torch.arange(max(0, position - WINDOW + 1), position + 1)
        keys = reference_read(open_cache(self.window, V4_FP8), self._slots(at, request, 1), dtype=torch.float32)
        if chosen is not None and (some := chosen[chosen >= 0].long()).numel():
            ratio = layer.compress_ratio
            slots = self._slots(some, request, ratio)
            more = reference_read(open_cache(self.compressed[ratio], V4_FP8), slots, dtype=torch.float32)
            keys = torch.cat([keys, more])
        return keys

    def common(self) -> CommonAttentionMetadata:
        rows = torch.tensor([count for count, _ in self.lengths])
        starts = torch.cat([torch.zeros(1), rows.cumsum(0)]).int()
        contexts = torch.tensor([context for _, context in self.lengths]).int()
        count = len(self.owner)
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts.clone(),
            seq_lens=contexts,
            num_reqs=len(self.lengths),
            num_actual_tokens=count + self.padding,
            max_query_len=int(rows.max()),
            max_seq_len=int(contexts.max()),
            block_table_tensor=self.table,
            slot_mapping=torch.cat([torch.arange(count), torch.full((self.padding,), -1)]),
            seq_lens_cpu_upper_bound=contexts.clone(),
        )

    def schedule(self) -> tuple[Any]:
        self.schedules.append(SimpleNamespace(calls=0))
        return (self.schedules[-1],)

    def providers(self) -> Providers:
        attended = AttendedTokens() if self.planner is None else AttendedTokens.of(self.planner.settings)
        return Providers(LAYOUT, 90 if self.triton else 0, attended=attended)

    def metadata(self) -> Any:
        threshold = 1 if self.planner is None else self.planner.step_tokens
        builder = planned_swa_builder(SWABuilder, lambda: self.planner, self.providers)
        return builder(self, since_24=self.since_24, decode_threshold=threshold).build(0, self.common())

    def layer_class(self) -> type[Layer]:
        """The layer's class under the ledger's patches."""

        class Patched(Layer):
            _forward_prefill = v4_attention.prefill(
                Layer._forward_prefill, lambda: (flash_mla_with_kvcache, self.schedule)
            )
            _forward_decode = v4_attention.decode(Layer._forward_decode)

        return Patched

    def run(self, ratio: int, metadata: Any = None) -> tuple[torch.Tensor, torch.Tensor, Layer]:
        """(what the layer gives, what it should give, the layer); both of the real rows and the rank's own heads."""
        layer = self.layer_class()(self, ratio)
        count = len(self.owner) + self.padding
        q = torch.zeros(count, self.padded, 512, dtype=torch.bfloat16)
        q[:, : self.heads] = random(1, count, self.heads, 512).bfloat16()
        out = torch.full_like(q, torch.nan)
        positions = torch.tensor(self.position + [0] * self.padding)
        layer.forward_mqa(q, positions, out, self.metadata() if metadata is None else metadata)
        wanted = torch.stack(
            [self.attended(layer, q[row], row, self.chosen(ratio, row)) for row in range(len(self.owner))]
        )
        return out[: len(self.owner), : self.heads], wanted[:, : self.heads], layer
