"""Start of serving with a backend that SGLang has built: checks, warm-up, shared state."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_plugin.backends.common import warm as warming
from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.common.warm import warm, warm_logits, warm_selection, warm_unpaged
from nsa_plugin.backends.sglang.startup import samples, serving
from nsa_plugin.backends.sglang.startup.model import ranks
from nsa_plugin.backends.sglang.startup.serving import SglangServing
from nsa_plugin.backends.sglang.v32.attention import with_plans
from nsa_plugin.backends.sglang.v32.state import PAGE_SIZES, release
from nsa_plugin.decision import timings
from nsa_plugin.decision.shapes import Phase
from nsa_plugin.errors import NoProviderError, PatchError, SettingsError
from nsa_plugin.kernels.indexer import reference_topk
from nsa_plugin.kernels.topk import Request, reference_topk_rows
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.libraries.registry import Provider, Registry
from nsa_plugin.settings import ResolvedSettings, Settings
from tests.backends.counted import Counted
from tests.backends.fake_sglang.model_runner import built, runner
from tests.backends.fake_sglang.v32 import H200, MODEL, DsaBackend, ForwardMode, NsaBackend, forward_batch, started

CPU = torch.device("cpu")


def begun(backend: Any, model_runner: Any = None, device: Any = H200, **settings: Any) -> SglangServing:
    resolved = ResolvedSettings(Settings(**settings), {})
    return SglangServing.begin(resolved, backend, model_runner or runner(), device)


@pytest.fixture(autouse=True)
def no_trade(monkeypatch: pytest.MonkeyPatch) -> None:
    """No measured times of resharding, so no group of ranks is asked for; there is none here."""
    known = {key: labels for key, labels in timings.TIMINGS.items() if "token_shard" not in key[1]}
    monkeypatch.setattr(timings, "TIMINGS", known)


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "free_device_memory", lambda: 8 << 30)


@pytest.fixture
def warmed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the kernels to warm up instead of running them."""
    seen: list[Any] = []
    monkeypatch.setattr(serving, "warm", lambda kernels, providers, model, device: seen.append((kernels, model)))
    monkeypatch.setattr(serving, "warm_selection", lambda providers, model, device: seen.append(("topk", model)))
    monkeypatch.setattr(serving, "warm_unpaged", lambda providers, model, device: seen.append(("unpaged", model)))
    monkeypatch.setattr(serving, "warm_logits", lambda names, providers, model, device: seen.append(("logits", names)))
    return seen


@pytest.mark.parametrize("original", [DsaBackend, NsaBackend])
def test_a_backend_serves_once_its_kernels_have_run(original: type, monkeypatch: pytest.MonkeyPatch):
    """Run the reference kernels, which work on a CPU."""
    monkeypatch.setattr(serving, "_warm_selection", lambda *arguments: None)  # Triton's, for the H200 of the tests
    backend = built(original)
    made = begun(backend, decode_backend="reference", prefill_backend="reference")
    made.adopt(backend, runner())
    assert made.active
    assert made.notes == []
    backend.init_forward_metadata(forward_batch(ForwardMode.DECODE, [], [100, 200]))
    assert backend.nsa_plugin.route.plan.provider == "reference"
    assert made.trace.counts == {"decode/sparse_decode/reference": 1}


@pytest.mark.parametrize(("value", "path"), [("flashmla_kv", "flashmla_kv"), ("flashmla_sparse", "flashmla_sparse")])
def test_the_users_exact_path_reaches_the_plans_and_the_report(warmed: list[Any], value: str, path: str):
    """Field defect 4: SGLang's flag sets the library, and its exact value the path."""
    backend = built(prefill=value)
    settings = Settings(prefill_backend="flash_mla", mha_max_kv=0)
    resolved = ResolvedSettings(settings, {}, engine_paths={"prefill_backend": value})
    made = SglangServing.begin(resolved, backend, runner(), H200)
    made.adopt(backend, runner())
    line = made.routes["prefill, 4096 of 4096 tokens"]
    assert f"on SGLang's path {path}; SGLang's --dsa-prefill-backend {value} asks for flash_mla" in line
    release(backend)
    assert backend.dsa_prefill_impl == value


def test_the_backends_of_a_process_share_counters_and_warm_up_once(warmed: list[Any]):
    target, draft = built(), built()
    made = begun(target)
    for backend in (target, draft):
        made.adopt(backend, runner())
        backend.init_forward_metadata(forward_batch(ForwardMode.DECODE, [], [100, 200]))
    assert made.trace.counts.total() == 2
    assert [what if isinstance(what, str) else "kernels" for what, _ in warmed] == ["kernels", "topk", "logits"]


@pytest.mark.parametrize("lmcache", [False, True])
def test_loaded_prefixes_are_looked_at_for_the_target_model_alone(warmed: list[Any], lmcache: bool):
    """A draft model without its keys guesses worse, and its answers are verified."""
    target, draft, model_runner = built(), built(), runner()
    model_runner.server_args.enable_lmcache = lmcache
    made = begun(target, model_runner)
    made.adopt(target, model_runner)
    model_runner.is_draft_worker = True
    made.adopt(draft, model_runner)
    assert (target.nsa_plugin.loaded is not None) == lmcache
    assert draft.nsa_plugin.loaded is None


def test_the_report_describes_sample_batches_with_reasons(warmed: list[Any]):
    backend = built()
    made = begun(backend, decode_backend="triton")
    made.adopt(backend, runner())
    assert list(made.routes) == [
        "prefill, 1024 of 1024 tokens",
        "prefill, 4096 of 4096 tokens",  # the fake's context is no longer
        "decode, 1 request",
        "decode, 64 requests",
        "verify, 64 requests",
        "short prompts batched with long ones",
    ]
    assert made.routes["short prompts batched with long ones"] == "attend as the long ones: split_prefill is off"
    assert made.routes["decode, 1 request"].startswith("sparse_decode by triton on SGLang's path flashmla_kv; ")
    assert "decode_backend asks for triton" in made.routes["verify, 64 requests"]
    assert "query tokens at once" in made.routes["prefill, 4096 of 4096 tokens"]
    assert made.trace.counts.total() == 0  # none of them was scheduled


def test_the_report_omits_verify_without_speculation_and_stock_phases(warmed: list[Any]):
    backend = built(prefill="tilelang")
    backend.speculative_num_draft_tokens = None
    made = begun(backend)
    made.adopt(backend, runner())
    assert list(made.routes) == ["decode, 1 request", "decode, 64 requests"]
    assert made.notes == ["SGLang's --dsa-prefill-backend is tilelang: prefills fall back to the stock path"]
    assert [what for what, _ in warmed if what == "topk"] == []


@pytest.mark.parametrize(
    ("prefill", "decode", "server_args"),
    [("tilelang", "tilelang", {}), ("flashmla_kv", "flashmla_kv", {"enable_deterministic_inference": True})],
)
def test_where_every_batch_stays_sglangs_the_plugin_is_not_active(
    warmed: list[Any], prefill: str, decode: str, server_args: dict[str, Any]
):
    backend = built(prefill=prefill, decode=decode)
    made = begun(backend)
    made.adopt(backend, runner(**server_args))
    assert not made.active
    assert backend.nsa_plugin is None
    assert made.notes
    assert warmed == []


def test_a_note_appears_once(warmed: list[Any]):
    made = begun(built())
    for _ in range(3):
        made.adopt(built(prefill="tilelang"), runner())
    assert len(made.notes) == 1


def test_a_library_that_does_not_support_the_model_is_refused_before_serving():
    with pytest.raises(SettingsError, match="decode_backend is trtllm"):
        begun(built(), decode_backend="trtllm")


@pytest.mark.parametrize("fp8", [True, False])
def test_trtllm_by_sglangs_flag_is_refused_and_the_error_has_the_flag(fp8: bool):
    """Over fp8 SGLang then has a cache without scales, but the message is about the flag."""
    backend = built(decode="trtllm")
    setattr(backend, f"{DsaBackend.x}_kv_cache_store_fp8", False)
    dtype = "torch.float8_e4m3fn" if fp8 else "torch.bfloat16"
    with pytest.raises(NoProviderError, match=r"--(dsa|nsa)-decode-backend is trtllm, .*this is .*SM90"):
        begun(backend, SimpleNamespace(**vars(runner()) | {"kv_cache_dtype": dtype}))


def test_a_backend_without_impl_attributes_is_one_error():
    backend = built()
    delattr(backend, f"{DsaBackend.x}_decode_impl")
    with pytest.raises(PatchError, match=r"has no dsa_decode_impl\. Turn the plugin off"):
        begun(backend)


def test_a_library_that_sglang_has_no_path_for_is_refused():
    """On SM100 trtllm supports a bf16 prefill, but SGLang was started with another path."""
    backend = built(prefill="flashmla_sparse", decode="flashmla_sparse")
    backend.dsa_kv_cache_store_fp8 = False
    model_runner = runner()
    model_runner.kv_cache_dtype = "torch.bfloat16"
    made = begun(backend, model_runner, synthetic(100), prefill_backend="trtllm")
    with pytest.raises(SettingsError, match="prefill_backend is trtllm"):
        made.adopt(backend, model_runner)
    assert backend.nsa_plugin is None
    assert not made.active


def test_trtllm_is_left_to_sglang_if_sglang_was_started_with_it(warmed: list[Any]):
    backend = built(prefill="flashmla_sparse", decode="trtllm")
    backend.dsa_kv_cache_store_fp8 = False
    model_runner = runner()
    model_runner.kv_cache_dtype = "torch.bfloat16"
    made = begun(backend, model_runner, synthetic(100), decode_backend="trtllm")
    made.adopt(backend, model_runner)
    assert [name for name in made.routes if name.startswith("decode")] == []
    backend.init_forward_metadata(forward_batch(ForwardMode.DECODE, [], [100]))
    assert backend.impls[1] == "trtllm"


@pytest.mark.parametrize("lacking", ["max_context_len", "speculative_num_draft_tokens", "real_page_size"])
def test_a_backend_without_an_attribute_that_the_plugin_reads_is_refused(warmed: list[Any], lacking: str):
    backend = built()
    made = begun(backend)
    delattr(backend, lacking)
    said = " or ".join(PAGE_SIZES) if lacking in PAGE_SIZES else lacking
    with pytest.raises(PatchError, match=f"has no {said}.*NSA_PLUGIN_ENABLED=0"):
        made.adopt(backend, runner())
    assert backend.nsa_plugin is None


@pytest.mark.parametrize(
    "method",
    ["set_dsa_prefill_impl", "_apply_cuda_graph_metadata", "_forward_flashmla_kv", "_compute_flashmla_metadata"],
)
def test_a_class_that_lacks_an_overridden_method_is_refused(method: str):
    """SGLang would never call the override, and the stock attention would serve unnoticed."""
    names = {name for cls in (DsaBackend, *DsaBackend.__bases__) for name in vars(cls)}
    methods = {name: getattr(DsaBackend, name) for name in names if not name.startswith("__") and name != method}
    with pytest.raises(PatchError, match=f"no method .*{method}"):
        with_plans(type("Changed", (), methods))


def test_a_kernel_that_fails_leaves_the_backend_to_sglang(monkeypatch: pytest.MonkeyPatch):
    def broken(*arguments: Any) -> None:
        raise NoProviderError("does not compile")

    monkeypatch.setattr(serving, "warm", broken)
    backend = built()
    made = begun(backend)
    with pytest.raises(NoProviderError, match="does not compile"):
        made.adopt(backend, runner())
    assert backend.nsa_plugin is None
    assert not made.active


def test_the_end_hands_every_backend_back(warmed: list[Any]):
    backend = built(prefill="flashmla_sparse")
    made = begun(backend, prefill_backend="triton")
    made.adopt(backend, runner())
    long = forward_batch(ForwardMode.EXTEND, [3000], [3000])
    backend.init_forward_metadata(long)
    assert backend.impls[0] == "flashmla_kv"
    made.end()
    assert backend.impls == ("flashmla_sparse", "flashmla_kv")
    backend.init_forward_metadata(long)
    assert (backend.nsa_plugin, backend.impls[0], made.active) == (None, "flashmla_sparse", False)
    release(backend)  # again changes nothing


def test_the_free_memory_is_read_at_the_next_prefill_after_the_start(
    warmed: list[Any], monkeypatch: pytest.MonkeyPatch
):
    free = iter([64 << 20, 32 << 20])
    monkeypatch.setattr(serving, "free_device_memory", lambda: next(free))
    backend = built()
    backend.max_context_len = 32768
    made = begun(backend)
    made.adopt(backend, runner())
    long = forward_batch(ForwardMode.EXTEND, [4096], [32768])

    def rows() -> int:
        backend.init_forward_metadata(long)
        return int(backend.nsa_plugin.route.plan.indexer.rows_per_chunk)

    assert [rows(), rows()] == [128, 128]  # 16 MiB of 32768 * 4 bytes, as when a prefill's graph was captured
    watched: list[str] = []
    monkeypatch.setattr(serving, "watch", watched.append)
    made.settle()
    assert watched == ["off"]
    assert [rows(), rows()] == [64, 64]


def test_the_ranks_of_an_attention_group_log_and_count_once(monkeypatch: pytest.MonkeyPatch):
    labelled: list[Any] = []

    def metrics_of(server_args: Any, labels: dict[str, int]) -> Any:
        labelled.append(labels)
        return Counted()

    monkeypatch.setattr(serving, "metrics_of", metrics_of)
    seen = {}
    for rank in (0, 1, 2, 3):  # attn_tp_size is 2
        made = begun(built(), runner(tp_rank=rank), trace="log")
        seen[rank] = (made.trace.mode, made.trace.rank, made.metrics is not None)
    assert seen == {0: ("log", 0, True), 1: ("off", 1, False), 2: ("log", 2, True), 3: ("off", 3, False)}
    assert labelled == [{"tp_rank": 0, "pp_rank": 0}, {"tp_rank": 2, "pp_rank": 0}]
    assert begun(built(), runner(tp_rank=1, enable_metrics_for_all_schedulers=True)).metrics is not None


def test_every_rank_writes_to_a_trace_file(tmp_path: Any):
    path = str(tmp_path / "trace.jsonl")
    assert begun(built(), runner(tp_rank=1), trace=path).trace.mode == path


def test_ranks_are_found_where_each_version_keeps_them(monkeypatch: pytest.MonkeyPatch):
    here = {"tp_rank": 3, "pp_rank": 1, "dp_rank": 0}
    assert ranks(SimpleNamespace(**here)) == here
    assert ranks(SimpleNamespace(tp_rank=3, pp_rank=1)) == {"tp_rank": 3, "pp_rank": 1}  # 0.5.11
    assert ranks(SimpleNamespace(ps=SimpleNamespace(**here | {"dp_rank": None}))) == {"tp_rank": 3, "pp_rank": 1}
    context = ModuleType("sglang.srt.runtime_context")
    context.get_parallel = lambda: SimpleNamespace(**here)  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    assert ranks(SimpleNamespace()) == here


@pytest.mark.parametrize(
    ("settings", "kernels"),
    [
        (
            {"prefill_backend": "triton", "decode_backend": "triton"},
            {("sparse_mla_prefill", "triton"), ("sparse_mla_decode", "triton")},
        ),
        ({"prefill_backend": "flash_mla", "decode_backend": "cuda"}, {("sparse_mla_decode", "cuda")}),
        ({"prefill_backend": "flash_mla", "decode_backend": "flash_mla"}, set()),
    ],
)
def test_the_kernels_that_batches_may_take(settings: dict[str, str], kernels: set[tuple[str, str]]):
    assert samples.own_kernels(started(**settings).nsa_plugin, 65536) == kernels


def test_a_kernel_that_only_some_sizes_take_is_among_them(monkeypatch: pytest.MonkeyPatch):
    state = started().nsa_plugin
    original = state.planner.step_execution

    def cuda_for_one_row(batch: Any) -> Any:
        route = original(batch)
        provider = "triton" if batch.shape.num_tokens == 512 else "cuda"
        return replace(route, plan=replace(route.plan, provider=provider), own=True)

    monkeypatch.setattr(state.planner, "step_execution", cuda_for_one_row)
    found = samples.own_kernels(state, 65536)
    assert {("sparse_mla_decode", "triton"), ("sparse_mla_decode", "cuda")} <= found


def registered(function: str) -> Providers:
    registry = Registry()
    for op in ("sparse_mla_prefill", "sparse_mla_decode"):
        registry.register(Provider(op=op, name="tried", target=f"{__name__}:{function}"))
    return Providers("v32_fp8", 0, registry)


def raises(*arguments: Any, **named: Any) -> Any:
    raise RuntimeError("CUDA error: no kernel image is available")


def wrong(q: torch.Tensor, *arguments: Any, **named: Any) -> Any:
    return SimpleNamespace(out=torch.ones_like(q[..., :512]))


@pytest.mark.parametrize("layout", ["v32_fp8", "bf16"])
@pytest.mark.parametrize("op", ["sparse_mla_prefill", "sparse_mla_decode"])
def test_a_kernel_that_runs_is_accepted(op: str, layout: str):
    warm([(op, "reference")], Providers(layout, 0), replace(MODEL, kv_layout=layout), CPU)


@pytest.mark.parametrize("op", ["sparse_mla_prefill", "sparse_mla_decode"])
@pytest.mark.parametrize(("function", "words"), [("raises", "no kernel image is available"), ("wrong", "is not zero")])
def test_a_kernel_that_does_not_run_is_an_error_that_names_it(op: str, function: str, words: str):
    with pytest.raises(NoProviderError, match=f"tried's {op}: .*{words}.*NSA_PLUGIN_ENABLED=0"):
        warm([(op, "tried")], registered(function), MODEL, CPU)


def test_the_selection_is_run_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(warming, "default_selector", lambda device, topk: reference_topk_rows)
    warm_selection(Providers("v32_fp8", 0), MODEL, CPU)
    monkeypatch.setattr(
        warming, "default_selector", lambda device, topk: lambda logits, starts, ends, topk: logits[:, :topk].int()
    )
    with pytest.raises(NoProviderError, match="does not select the largest"):
        warm_selection(Providers("v32_fp8", 0), MODEL, CPU)


@pytest.mark.parametrize(("reset", "chosen"), [({}, {"deep_gemm"}), ({"prefill_backend": "triton"}, {"deep_gemm"})])
def test_the_library_that_scores_prefills_is_warmed_up(warmed: list[Any], reset: dict[str, str], chosen: set[str]):
    backend = built(NsaBackend)
    begun(backend, **reset).adopt(backend, runner())
    assert ("logits", chosen) in warmed


def test_both_ways_to_score_a_prefill_are_run():
    model = replace(MODEL, index_n_heads=2, index_topk=4)
    asked: list[int] = []

    def select(q: torch.Tensor, *given: Any, requests: list[Request]) -> torch.Tensor:
        asked.append(len(requests))
        return reference_topk(q, *given)

    providers = Scoring("v32_fp8", 90)
    providers.function = select
    warm_logits(["some"], providers, model, CPU)
    assert asked == [1, 2]
    providers.function = lambda q, *given, requests: reference_topk(q, *given) * (len(requests) == 1)
    with pytest.raises(NoProviderError, match="some's selection of a prefill: it does not select the largest logits"):
        warm_logits(["some"], providers, model, CPU)


class Scoring(Providers):
    """Has a function that scores and selects."""

    function: Any = None

    def load(self, op: str, name: str) -> Any:
        assert (op, name) == ("indexer_topk", "some")
        return self.function


class Unpaged(Providers):
    """Has a function for the indexer without logits, which needs SM90."""

    function: Any = None

    def load(self, op: str, name: str) -> Any:
        assert (op, name) == ("indexer_topk", "cuda")
        return self.function


def test_the_selection_without_logits_is_run_too():
    providers = Unpaged("v32_fp8", 90)
    providers.function = reference_topk
    warm_unpaged(providers, replace(MODEL, index_n_heads=2, index_topk=4), CPU)
    providers.function = lambda q, *arguments: torch.zeros(len(q), 4, dtype=torch.int32)
    with pytest.raises(NoProviderError, match="of equal keys it does not select the first"):
        warm_unpaged(providers, replace(MODEL, index_n_heads=2, index_topk=4), CPU)


@pytest.mark.parametrize(("us", "expected"), [(900.0, True), (1100.0, False)])
def test_the_selection_without_logits_is_warmed_up_where_it_is_measured_to_be_faster(
    warmed: list[Any], monkeypatch: pytest.MonkeyPatch, us: float, expected: bool
):
    rows = {"cuda": {64: ((512, us),)}, "deep_gemm": {64: ((512, 1000.0),)}}
    found = {(90, "indexer_topk", timings.selected_from(MODEL.index_topk, 4096)): rows}
    monkeypatch.setattr(timings, "TIMINGS", found)
    backend = built(NsaBackend)
    begun(backend).adopt(backend, runner())
    assert (("unpaged", MODEL) in warmed) == expected


def test_a_step_reaches_the_metrics(warmed: list[Any], monkeypatch: pytest.MonkeyPatch):
    counted = Counted()
    monkeypatch.setattr(serving, "metrics_of", lambda server_args, labels: counted)
    backend = built()
    made = begun(backend)
    made.adopt(backend, runner())
    backend._apply_cuda_graph_metadata(4, None, None, None, ForwardMode.DECODE, None)
    assert [plan.phase for plan in counted] == [Phase.DECODE]
    assert counted.tokens == [4]
