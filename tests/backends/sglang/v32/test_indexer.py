"""Top-k selection of a prefill: bounded, request by request, in SGLang's form."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.sglang.v32.indexer import Selection, attach, wrap_topk_ragged
from nsa_plugin.backends.sglang.v32.routes import SglangPlanner
from nsa_plugin.decision.plan import Plan
from nsa_plugin.kernels import indexer as kernels
from nsa_plugin.libraries.registry import Provider, Registry
from nsa_plugin.settings import Settings
from tests.backends.fake_sglang.v32 import H200, MODEL, ForwardMode, forward_batch

INDEX_HEADS, DIM, TOPK = 4, 128, 16
# Rows of each request and its context; the second has no rows in this step.
Q_LENS, KV_LENS = [5, 0, 9], [40, 20, 9]
ROWS, PADDED = sum(Q_LENS), 16
calls: list[dict[str, Any]] = []


def spied_topk(*arguments: Any, **named: Any) -> torch.Tensor:
    """The reference as a provider that takes requests, which it only notes."""
    calls.append(named)
    return kernels.reference_topk(*arguments, **{name: named[name] for name in ("rows_per_chunk", "out")})


@dataclass(frozen=True)
class Metadata:
    """SGLang's DSAIndexerMetadata, of 0.5.13 and later."""

    attn_metadata: Any
    topk_transform_method: Any
    topk_backend: Any = field(default_factory=lambda: SimpleNamespace(is_sgl_kernel=lambda: True))
    force_unfused_topk: bool = False
    q_lens: tuple[int, ...] = tuple(Q_LENS)

    def get_page_table_64(self) -> torch.Tensor:
        return torch.zeros(len(KV_LENS), 1, dtype=torch.int32)

    def get_indexer_kvcache_range(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.attn_metadata.ranges

    def get_indexer_seq_len(self) -> torch.Tensor:
        return torch.tensor(KV_LENS, dtype=torch.int32)

    def get_indexer_seq_len_cpu(self) -> torch.Tensor:
        return torch.tensor(KV_LENS)

    def get_dsa_extend_len_cpu(self) -> list[int]:
        return list(self.q_lens)

    def get_token_to_batch_idx(self) -> torch.Tensor:
        return self.attn_metadata.token_to_batch_idx


@dataclass(frozen=True)
class OlderMetadata:
    """The indexer of 0.5.11 and 0.5.12: another name for the list of rows, and a single top-k kernel."""

    attn_metadata: Any
    topk_transform_method: Any
    force_unfused_topk: bool = False
    get_page_table_64 = Metadata.get_page_table_64
    get_indexer_kvcache_range = Metadata.get_indexer_kvcache_range
    get_indexer_seq_len = Metadata.get_indexer_seq_len
    get_indexer_seq_len_cpu = Metadata.get_indexer_seq_len_cpu
    get_token_to_batch_idx = Metadata.get_token_to_batch_idx

    def get_nsa_extend_len_cpu(self) -> list[int]:
        return list(Q_LENS)


class Case:
    """One prefill of three requests, its keys, and what SGLang's function would return."""

    def __init__(self) -> None:
        seeded = torch.Generator().manual_seed(0)
        self.q = torch.randn(PADDED, INDEX_HEADS, DIM, generator=seeded).to(torch.float8_e4m3fn)
        self.k = torch.randn(sum(KV_LENS), DIM, generator=seeded).to(torch.float8_e4m3fn)
        self.k_scale = torch.rand(sum(KV_LENS), generator=seeded) + 0.5
        self.weights = torch.randn(PADDED, INDEX_HEADS, generator=seeded)
        request = torch.repeat_interleave(torch.arange(len(Q_LENS)), torch.tensor(Q_LENS))
        first_key = torch.tensor([0, 40, 60])[request]
        position = torch.cat([torch.arange(kv - q, kv) for q, kv in zip(Q_LENS, KV_LENS, strict=True)])
        self.ks, self.ke = first_key.int(), (first_key + position + 1).int()
        self.request = request
        # Some slot for each position, different in each request.
        self.page_table_1 = (torch.arange(40).repeat(3, 1) * 7 + torch.tensor([[0], [1000], [2000]])).int()
        self.attention = SimpleNamespace(
            ranges=(self.ks, self.ke),
            token_to_batch_idx=request.int(),
            topk_indices_offset=first_key.int(),
            page_table_1=self.page_table_1,
        )
        self.indexer = SimpleNamespace(index_topk=TOPK, num_init_tokens=0, num_local_tokens=0)
        self.stock_calls = 0

        def keys(layer_id: int, seq_lens: Any, pages: Any, total: int, longest: int) -> tuple[torch.Tensor, ...]:
            assert (layer_id, total, longest) == (3, sum(KV_LENS), max(KV_LENS))
            return self.k.view(torch.uint8), self.k_scale.unsqueeze(1).view(torch.uint8)

        self.pool = SimpleNamespace(get_index_k_scale_buffer=keys)

    def metadata(self, kind: type = Metadata, method: str = "PAGED", **more: Any) -> Any:
        return kind(self.attention, SimpleNamespace(name=method), **more)

    def run(self, metadata: Any, *arguments: Any, **named: Any) -> torch.Tensor:
        def stock(*arguments: Any, **named: Any) -> torch.Tensor:
            self.stock_calls += 1
            return torch.full((1, 1), 77)

        batch = forward_batch(ForwardMode.EXTEND, Q_LENS, KV_LENS)
        weights = self.weights.unsqueeze(-1)
        return wrap_topk_ragged(stock)(self.indexer, False, batch, 3, self.q, weights, metadata, *arguments, **named)

    def expected(self) -> list[set[int]]:
        """The positions of each row, from logits in float64."""
        products = torch.einsum("thd,nd->thn", self.q[:ROWS].double(), self.k.double()).relu()
        logits = torch.einsum("th,thn->tn", self.weights[:ROWS].double(), products) * self.k_scale.double()
        rows = []
        for row in range(ROWS):
            inside = logits[row, self.ks[row] : self.ke[row]]
            rows.append(set(inside.topk(min(TOPK, len(inside))).indices.tolist()))
        return rows


@pytest.fixture
def case() -> Case:
    calls.clear()
    return Case()


@pytest.fixture
def plan() -> Plan:
    planner = SglangPlanner(MODEL, H200, Settings())
    from nsa_plugin.backends.sglang.v32.batch import prefill_batch

    route = planner.prefill(prefill_batch(forward_batch(ForwardMode.EXTEND, [8], [4096])))
    assert route is not None
    return replace(route.plan, indexer=replace(route.plan.indexer, provider="spied", rows_per_chunk=6))


@pytest.fixture
def providers() -> Providers:
    registry = Registry()
    registry.register(Provider(op="indexer_topk", name="spied", target=f"{__name__}:spied_topk"))
    return Providers("v32_fp8", 0, registry)


class EnvField:
    """SGLang's: it wants to be asked by `get`, and raises where it is used as a value."""

    def __init__(self, get: Any) -> None:
        self.get = get

    def __bool__(self) -> bool:
        raise RuntimeError("Please use `envs.YOUR_FLAG.get()` instead of `envs.YOUR_FLAG`")


@pytest.fixture(autouse=True)
def fuse(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang's setting, under its newer name; `value` may be changed."""
    setting = SimpleNamespace(value=True)
    flag = EnvField(lambda: setting.value)
    module = ModuleType("sglang.srt.environ")
    module.envs = SimpleNamespace(SGLANG_DSA_FUSE_TOPK=flag)  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.environ", module)
    return setting


def given(case: Case, plan: Plan, providers: Providers, metadata: Any) -> Any:
    attach(metadata, Selection(plan, case.pool, providers))
    return metadata


def sets(result: torch.Tensor) -> list[set[int]]:
    assert (result[ROWS:] == -1).all()
    return [set(row[row >= 0].tolist()) for row in result[:ROWS]]


@pytest.mark.regression(2)
@pytest.mark.regression(16)
@pytest.mark.parametrize("kind", [Metadata, OlderMetadata])
@pytest.mark.parametrize("variant", ["unfused", "forced", "PAGED", "RAGGED"])
def test_the_selection_is_sglangs(case: Case, plan: Plan, providers: Providers, fuse: Any, kind: type, variant: str):
    fuse.value = variant != "unfused"
    method = "RAGGED" if variant == "RAGGED" else "PAGED"
    metadata = given(case, plan, providers, case.metadata(kind, method=method, force_unfused_topk=variant == "forced"))
    result = case.run(metadata)
    assert (result.shape, result.dtype, case.stock_calls) == ((PADDED, TOPK), torch.int32, 0)
    expected = case.expected()
    if variant == "PAGED":
        expected = [
            set(case.page_table_1[request, sorted(row)].tolist())
            for request, row in zip(case.request, expected, strict=True)
        ]
    if variant == "RAGGED":
        expected = [{int(first) + one for one in row} for first, row in zip(case.ks, expected, strict=True)]
    assert sets(result) == expected


def test_the_lengths_are_read_once_for_all_layers_of_a_batch(case: Case, plan: Plan, providers: Providers):
    read = []

    @dataclass(frozen=True)
    class Counting(Metadata):
        def get_dsa_extend_len_cpu(self) -> list[int]:
            read.append(self.attn_metadata)
            return super().get_dsa_extend_len_cpu()

    selection = Selection(plan, case.pool, providers)
    for _ in range(3):  # SGLang makes each layer's metadata anew, from that of the batch
        metadata = case.metadata(Counting)
        attach(metadata, selection)
        case.run(metadata)
    assert read == [case.attention]
    later = SimpleNamespace(**vars(case.attention))
    metadata = Counting(later, SimpleNamespace(name="PAGED"))
    attach(metadata, selection)
    case.run(metadata)
    assert read == [case.attention, later]


def test_slots_are_written_into_sglangs_buffer(case: Case, plan: Plan, providers: Providers):
    written = []
    transform = providers.helper("index_transform_paged")

    def watched(*given: Any, out: torch.Tensor | None = None, **named: Any) -> torch.Tensor:
        written.append(out)
        return transform(*given, out=out, **named)

    providers._loaded["index_transform_paged", "reference"] = watched
    buffer = torch.full((PADDED, TOPK), -1, dtype=torch.int32)
    result = case.run(given(case, plan, providers, case.metadata()), buffer)
    assert result is buffer
    assert [one.data_ptr() for one in written] == [buffer.data_ptr()]
    assert len(sets(result)[0]) == TOPK


def test_the_older_name_of_the_setting(case: Case, plan: Plan, providers: Providers, monkeypatch: pytest.MonkeyPatch):
    envs = SimpleNamespace(SGLANG_NSA_FUSE_TOPK=EnvField(lambda: False))
    monkeypatch.setattr(sys.modules["sglang.srt.environ"], "envs", envs, raising=False)
    assert sets(case.run(given(case, plan, providers, case.metadata(OlderMetadata)))) == case.expected()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("request_", "contiguous"), [(0, True), (2, True), (2, False)])
def test_dense_requests_of_a_split_batch_have_no_selection(
    case: Case, plan: Plan, providers: Providers, fuse: Any, request_: int, contiguous: bool, fused: bool
):
    fuse.value = fused
    whole = case.run(given(case, plan, providers, case.metadata()))
    calls.clear()
    rows = (case.request == request_).nonzero().flatten()
    first_key = int(case.ks[rows[0]])
    split: Any = SimpleNamespace(
        q_lens=tuple(Q_LENS),
        kv_lens=tuple(KV_LENS),
        rows=lambda like: slice(int(rows[0]), int(rows[-1]) + 1) if contiguous else rows,
        selecting=lambda: [(0, len(rows), first_key, first_key + KV_LENS[request_])],
    )
    metadata = case.metadata()
    attach(metadata, Selection(plan, case.pool, providers, split=split))
    result = case.run(metadata, torch.full((PADDED, TOPK), 7, dtype=torch.int32))
    assert torch.equal(result[rows], whole[rows])
    others = torch.ones(PADDED, dtype=torch.bool).index_fill(0, rows, False)
    assert (result[others] == -1).all()
    assert calls[0]["requests"] == split.selecting()
    metadata = case.metadata()
    attach(metadata, Selection(plan, case.pool, providers, split=SimpleNamespace(q_lens=(1,), kv_lens=(1,))))  # type: ignore[arg-type]
    assert case.run(metadata).shape == (1, 1)  # SGLang selects for all if the lengths differ


@pytest.mark.regression(7)
def test_logits_are_bounded_by_rows_and_by_request(case: Case, plan: Plan, providers: Providers):
    case.run(given(case, plan, providers, case.metadata()))
    (call,) = calls
    assert call["rows_per_chunk"] == 6
    assert call["requests"] == [(0, 5, 0, 40), (5, 14, 60, 69)]  # none without rows


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_given_buffer_is_filled(case: Case, plan: Plan, providers: Providers, fuse: Any, named: bool, fused: bool):
    """A captured graph reads it at its address."""
    fuse.value = fused
    fresh = case.run(given(case, plan, providers, case.metadata()))
    buffer = torch.full((PADDED, TOPK), -1, dtype=torch.int32)
    metadata = given(case, plan, providers, case.metadata())
    result = case.run(metadata, topk_result=buffer) if named else case.run(metadata, buffer)
    assert result.data_ptr() == buffer.data_ptr()
    assert torch.equal(buffer, fresh)


def test_a_buffer_of_none_by_name_is_allowed(case: Case, plan: Plan, providers: Providers):
    assert case.run(given(case, plan, providers, case.metadata()), topk_result=None).shape == (PADDED, TOPK)


def test_the_reference_takes_no_requests(case: Case, plan: Plan, providers: Providers, fuse: Any):
    fuse.value = False
    plain = replace(plan, indexer=replace(plan.indexer, provider="reference"))
    assert sets(case.run(given(case, plain, providers, case.metadata()))) == case.expected()
    assert calls == []


def test_a_pipelines_receive_keeps_its_sm(case: Case, plan: Plan, providers: Providers):
    entered = []

    class Leaves:
        def __enter__(self) -> None:
            entered.append(len(calls))

        def __exit__(self, *error: object) -> None:
            entered.append(len(calls))

    case.indexer._with_real_sm_count = Leaves
    case.run(given(case, plan, providers, case.metadata()))
    assert entered == [0, 1]


@pytest.mark.parametrize(
    "why",
    ["no plan", "selects nothing", "another phase", "another top-k", "init tokens", "local tokens", "cp", "lengths"],
)
def test_otherwise_the_original_runs(case: Case, plan: Plan, providers: Providers, why: str):
    more: dict[str, Any] = {}
    if why == "another top-k":
        more["topk_backend"] = SimpleNamespace(is_sgl_kernel=lambda: False)
    if why == "lengths":
        more["q_lens"] = (5, 0, 8)
    metadata = case.metadata(**more)
    planner = SglangPlanner(MODEL, H200, Settings())
    from nsa_plugin.backends.sglang.v32.batch import prefill_batch, step_batch
    from nsa_plugin.decision.shapes import Phase

    if why == "selects nothing":
        short = prefill_batch(forward_batch(ForwardMode.EXTEND, [8], [8]))
        route = planner.prefill(short, no_dense="")
        assert route is not None
        plan = route.plan
    if why == "another phase":
        plan = planner.step(step_batch(Phase.DECODE, 2, 2, 4096)).plan
    if why == "init tokens":
        case.indexer.num_init_tokens = 4
    if why == "local tokens":
        case.indexer.num_local_tokens = 4
    if why == "cp":
        case.indexer.dsa_enable_prefill_cp = True
    if why != "no plan":
        given(case, plan, providers, metadata)
    buffer = torch.empty(0)
    assert case.run(metadata, topk_result=buffer).item() == 77
    assert (case.stock_calls, calls) == (1, [])
