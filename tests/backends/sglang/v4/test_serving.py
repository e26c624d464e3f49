"""DeepSeek-V4's backends in a scheduler process: what is shared with V3.2's, what is run first, what is handed back."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nsa_plugin.backends.sglang.startup import serving
from nsa_plugin.backends.sglang.startup.serving import SglangServing, check_cache, is_v4
from nsa_plugin.backends.sglang.v4.attention import with_v4_plans
from nsa_plugin.decision.shapes import Phase
from nsa_plugin.errors import LeftToStockError, NoProviderError, SettingsError
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.settings import ResolvedSettings, Settings
from tests.backends.counted import Counted
from tests.backends.fake_sglang.v4 import H200, MODEL, Batch, Engine, attend, batch, envs

pytestmark = pytest.mark.usefixtures("nothing_measured")
MIXED = ((4, 700), (3, 3), (4, 258))
CONFIG = SimpleNamespace(
    num_attention_heads=MODEL.num_heads,
    qk_rope_head_dim=64,
    index_topk=MODEL.index_topk,
    index_n_heads=MODEL.index_n_heads,
    index_head_dim=MODEL.index_head_dim,
)


@pytest.fixture(autouse=True)
def _engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's modules that are asked, and no run of kernels that need a GPU."""
    for name, attribute, value in (("sglang.srt.environ", "envs", envs), ("sglang.version", "__version__", "0.5.16")):
        module = ModuleType(name)
        setattr(module, attribute, value)
        monkeypatch.setitem(sys.modules, name, module)
    for package in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setattr(serving, "_warm_selection", lambda *arguments: None)
    monkeypatch.setattr(serving, "free_device_memory", lambda: 64 << 30)
    monkeypatch.delenv("SGLANG_OPT_FLASHMLA_SPARSE_PREFILL", raising=False)


@pytest.fixture
def warmed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The routes that were to be run before serving."""
    seen: list[Any] = []
    monkeypatch.setattr(serving, "warm_v4", lambda routes, state, device: seen.append(list(routes)))
    return seen


def runner(**server_args: Any) -> Any:
    return SimpleNamespace(
        tp_rank=0,
        pp_rank=0,
        attn_tp_size=1,
        model_config=SimpleNamespace(hf_text_config=CONFIG),
        server_args=SimpleNamespace(**server_args),
    )


def built(of: Batch, original: type = Engine) -> Any:
    backend = with_v4_plans(original)(of)
    backend.device = "cpu"
    return backend


def begun(backend: Any, device: Any = H200, **settings: Any) -> SglangServing:
    return SglangServing.begin(ResolvedSettings(Settings(**settings), {}), backend, runner(), device)


def run(backend: Any) -> None:
    """A prefill through the backend, as SGLang's model does."""
    of: Batch = backend.batch
    backend.init_forward_metadata(of.forward)
    of.select_something(backend.forward_metadata.core_attn_metadata)
    attend(backend, 1)


def test_a_backend_serves_once_its_kernels_have_run():
    """For real: the reference is what runs on this machine's CPU."""
    backend = built(batch(*MIXED))
    made = begun(backend, prefill_backend="reference")
    assert (made.model.family, made.model.heads_per_rank, made.model.kv_layout) == ("v4", MODEL.num_heads, "v4_fp8")
    made.adopt(backend, runner())
    assert made.active
    assert made.backends == [backend]
    assert made.notes == ["decode_backend is auto: decode, verify and draft steps of DeepSeek-V4 run on the stock path"]
    run(backend)
    assert not {"sparse", "decode kernel"} & set(backend.calls)
    assert made.trace.counts == {"extend/sparse_prefill/reference": 1}


def test_the_report_names_a_few_prefills_and_why(warmed: list[Any]):
    backend = built(batch(*MIXED))
    made = begun(backend, prefill_backend="triton")
    made.adopt(backend, runner())
    words = made.routes["V4 prefill, 4096 of 4096 tokens"]
    assert words.startswith("sparse_prefill by triton on SGLang's path direct; prefill_backend asks for triton")
    assert "query tokens at once" in words
    assert made.trace.counts.total() == 0  # none of them was scheduled


def test_the_report_names_a_few_steps_where_a_setting_names_a_library(warmed: list[Any]):
    backend = built(batch(*MIXED))
    backend.speculative_num_draft_tokens = 4
    made = begun(backend, prefill_backend="triton", decode_backend="triton")
    made.adopt(backend, runner())
    steps = {name: words for name, words in made.routes.items() if "prefill" not in name}
    assert list(steps) == ["V4 decode, 1 request", "V4 decode, 64 requests", "V4 verify, 64 requests"]
    assert all(words.startswith("sparse_decode by triton on SGLang's path direct") for words in steps.values())


def test_several_backends_share_counters_and_warm_up_once(warmed: list[Any], monkeypatch: pytest.MonkeyPatch):
    counted = Counted()
    monkeypatch.setattr(serving, "metrics_of", lambda server_args, labels: counted)
    of = batch(*MIXED)
    target, draft = built(of), built(of)
    made = begun(target, prefill_backend="reference")
    for backend in (target, draft):
        made.adopt(backend, runner())
        run(backend)
    assert made.trace.counts.total() == 2
    assert [plan.phase for plan in counted] == [Phase.EXTEND] * 2
    assert len(warmed) == 1
    assert len(made.notes) == 1
    assert target.nsa_plugin.planner is not draft.nsa_plugin.planner


def test_free_memory_is_read_again_at_the_first_prefill_after_start(warmed: list[Any], monkeypatch: pytest.MonkeyPatch):
    free = iter([64 << 20, 32 << 20])
    monkeypatch.setattr(serving, "free_device_memory", lambda: next(free))
    backend = built(batch((16, 65536)))
    made = begun(backend, prefill_backend="triton")
    made.adopt(backend, runner())

    def budget() -> str:
        backend.init_forward_metadata(backend.batch.forward)
        return str(backend.nsa_plugin.route.plan.reasons["indexer.rows_per_chunk"])

    assert "16.0 MiB (a quarter of the free memory)" in budget()
    assert "16.0 MiB" in budget()
    made.settle()
    assert "8.0 MiB (a quarter of the free memory)" in budget()


def test_the_end_hands_every_backend_back(warmed: list[Any]):
    backend = built(batch(*MIXED))
    made = begun(backend, prefill_backend="reference")
    made.adopt(backend, runner())
    made.end()
    assert (backend.nsa_plugin, made.active) == (None, False)
    run(backend)
    assert backend.calls[-1] == "decode kernel"


def test_a_kernel_that_fails_leaves_the_backend_to_sglang(monkeypatch: pytest.MonkeyPatch):
    def broken(*arguments: Any) -> None:
        raise NoProviderError("does not compile")

    monkeypatch.setattr(serving, "warm_v4", broken)
    backend = built(batch(*MIXED))
    made = begun(backend, prefill_backend="reference")
    with pytest.raises(NoProviderError, match="does not compile"):
        made.adopt(backend, runner())
    assert backend.nsa_plugin is None
    assert not made.active


def test_a_library_that_sglang_has_no_route_for_is_refused(warmed: list[Any]):
    """The device's libraries are checked first, then those that SGLang's backend supports."""
    backend = built(batch(*MIXED))
    with pytest.raises(SettingsError, match="prefill_backend is trtllm"):
        begun(backend, synthetic(90), prefill_backend="trtllm")
    made = begun(backend, synthetic(90), prefill_backend="triton")
    made.resolved = ResolvedSettings(Settings(prefill_backend="trtllm"), {})
    with pytest.raises(SettingsError, match="prefill_backend is trtllm"):
        made.adopt(backend, runner())
    assert backend.nsa_plugin is None
    assert warmed == []


@pytest.mark.parametrize(
    ("attribute", "server_args", "said"),
    [
        ("hisparse_coordinator", {}, "hisparse"),
        ("trtllm_attn", {}, "trtllm's uniform fp8 cache"),
        (None, {"enable_deterministic_inference": True}, "deterministic inference"),
    ],
)
def test_where_every_batch_stays_sglangs_the_plugin_is_not_active(
    warmed: list[Any], attribute: str | None, server_args: dict[str, Any], said: str
):
    class Featured(Engine):
        def __init__(self, of: Any) -> None:
            super().__init__(of)
            if attribute:
                setattr(self, attribute, object())

    backend = built(batch(*MIXED), Featured)
    made = begun(backend)
    made.adopt(backend, runner(**server_args))
    assert not made.active
    assert backend.nsa_plugin is None
    assert made.notes == [f"{said} is on, which the plugin does not support: every batch falls back to the stock path"]
    assert made.routes == {}
    assert warmed == []
    with pytest.raises(LeftToStockError, match=f"{said} is on, which the plugin does not support"):
        begun(backend, strict="full").adopt(backend, runner(**server_args))


@pytest.mark.parametrize("original", [Engine, type("Trtllm", (Engine,), {})])
def test_the_family_is_the_classs(original: type):
    backend = built(batch(*MIXED), original)
    assert is_v4(backend)
    assert not is_v4(SimpleNamespace())
    # V3.2's question of kernel paths is not asked of V4's backend, which has none.
    check_cache(backend, runner(), H200)
