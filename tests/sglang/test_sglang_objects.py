"""SGLang's own classes under plans, in isolation: its code runs, with what a GPU would do taken out.

The stand-ins of tests/backends say what the plugin takes SGLang to do; these tests ask SGLang itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version
from sglang_case import STUBS, needs_engine

pytestmark = [pytest.mark.engine_sglang, pytest.mark.timeout(600), needs_engine()]
ATTENTION = "sglang.srt.layers.attention.dsa_backend"
GRAPH = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph"
PREFILL = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner"
COPIES = (
    "sglang.kernels.ops.attention.dsa.fused_metadata_copy",
    "sglang.kernels.ops.attention.fused_metadata_copy",
    "sglang.jit_kernel.fused_metadata_copy",
)


@pytest.fixture(autouse=True)
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(STUBS))


def built(**settings: Any) -> Any:
    """SGLang's backend with plans and an H200 profile; SGLang's constructor is skipped, because it needs a GPU."""
    import torch

    from nsa_plugin.backends.sglang.v32.attention import with_plans
    from nsa_plugin.backends.sglang.v32.routes import SglangPlanner
    from nsa_plugin.backends.sglang.v32.state import adopt
    from nsa_plugin.decision.shapes import ModelShape
    from nsa_plugin.libraries.devices import synthetic
    from nsa_plugin.settings import Settings

    original = importlib.import_module(ATTENTION).DeepseekSparseAttnBackend
    backend = object.__new__(with_plans(original))
    fields = {
        "dsa_prefill_impl": "flashmla_kv",
        "dsa_decode_impl": "flashmla_kv",
        "max_context_len": 65536,
        "speculative_num_draft_tokens": 4,
        "real_page_size": 64,
        "dsa_kv_cache_store_fp8": True,
        "enable_auto_select_prefill_impl": False,
        "hisparse_coordinator": None,
        "supports_mha_one_shot": True,
        "token_to_kv_pool": SimpleNamespace(dtype=torch.float8_e4m3fn),
        "forward_metadata": None,
        "experimental_kpool_metadata_fusion": False,
        # Since 0.5.20 these are looked up once.
        "_get_device_sm": lambda: 90,
        "_is_blackwell": lambda: False,
        "_is_in_breakable_cuda_graph": importlib.import_module(GRAPH).is_in_breakable_cuda_graph,
        "_is_in_tc_piecewise_cuda_graph": lambda: False,
    }
    for name, value in fields.items():
        setattr(backend, name, value)
    planner = SglangPlanner(
        ModelShape(num_heads=128, attn_tp_size=8, kv_layout="v32_fp8"), synthetic(90), Settings(**settings)
    )
    planner.whole = "" if planner.settings.split_prefill == "on" else planner.whole
    assert adopt(backend, planner, SimpleNamespace()) == []
    return backend


def prefill(*lengths: int, **more: Any) -> Any:
    import torch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    fields: dict[str, Any] = {
        "forward_mode": ForwardMode.EXTEND,
        "batch_size": len(lengths),
        "seq_lens_cpu": torch.tensor(lengths),
        "extend_seq_lens_cpu": list(lengths),
        "extend_prefix_lens_cpu": [0] * len(lengths),
        "global_num_tokens_cpu": None,
        "get_max_chunk_capacity": lambda: 128 * 1024,
        "attn_cp_metadata": None,
        "rids": None,
    }
    return SimpleNamespace(**(fields | more))


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the device and server properties that SGLang's rules read."""
    attention = importlib.import_module(ATTENTION)
    monkeypatch.setattr("sglang.srt.utils.get_device_sm", lambda: 90)
    monkeypatch.setattr("sglang.srt.utils.is_blackwell", lambda: False)
    monkeypatch.setattr(attention, "is_dsa_enable_prefill_cp", lambda: False)
    monkeypatch.setattr(attention.envs.SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD, "get", lambda: 2048)


@pytest.mark.regression(10)
@pytest.mark.parametrize(
    ("lengths", "captured", "dense"), [((5, 2048), False, True), ((5, 2049), False, False), ((5,), True, False)]
)
def test_sglangs_rules_and_the_plan_agree_on_dense_attention(
    h200: None, lengths: Any, captured: bool, dense: bool
) -> None:
    backend = built(mha_max_kv=2048)
    graph = importlib.import_module(f"{GRAPH}.context")
    with graph.enable_breakable_cuda_graph() if captured else nullcontext():
        backend.set_dsa_prefill_impl(prefill(*lengths))
    assert backend.use_mha is dense
    assert backend.nsa_plugin.route.dense is dense


def test_prefills_that_sglangs_variable_makes_dense_beyond_index_topk_are_left(h200: None) -> None:
    from sglang.srt.environ import envs

    from nsa_plugin.backends.sglang.v32.routes import dense_beyond

    backend = built()
    planner = backend.nsa_plugin.planner
    assert dense_beyond("dsa", planner.model, planner.settings, portable=False) == 0  # as SGLang itself sets it
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(envs.SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD, "get", lambda: 4096)
        planner.dense_up_to = dense_beyond("dsa", planner.model, planner.settings, portable=False)
        for lengths, left in (((5, 2048), False), ((5, 3000), True), ((5, 5000), False)):
            backend.set_dsa_prefill_impl(prefill(*lengths))
            assert (backend.nsa_plugin.route is None) is left
            assert backend.use_mha is (max(lengths) <= 4096)


def test_what_the_counters_and_the_copies_depend_on_has_these_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that moved would go unnoticed: batches would count twice, or a selection be rows where slots are read."""
    from sglang.srt.environ import envs
    from sglang.srt.layers.attention.tbo_backend import TboAttnBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.version import __version__

    from nsa_plugin.backends.sglang.startup.model import attends_half, selection_is_broadcast
    from nsa_plugin.backends.sglang.v32.batch import prefill_batch
    from nsa_plugin.backends.sglang.v32.routes import SEEDS

    pools = dict.fromkeys(("token_to_kv_pool", "req_to_token_pool", "kv_index_translator"))
    whole, *halves = (SimpleNamespace(**pools) for _ in range(3))
    runner = SimpleNamespace(attn_backend=TboAttnBackend(whole, halves))
    assert [attends_half(one, runner) for one in (whole, *halves)] == [False, True, True]

    assert "_original_forward_mode" in ForwardBatch.__dataclass_fields__
    assert prefill_batch(prefill(8, _original_forward_mode=ForwardMode.IDLE)).made_up
    assert not prefill_batch(prefill(8, _original_forward_mode=ForwardMode.DECODE)).made_up

    assert not selection_is_broadcast()
    monkeypatch.setattr(envs.SGLANG_DSA_TOPK_BROADCAST, "get", lambda: True)
    assert selection_is_broadcast()
    makes_seeds = hasattr(importlib.import_module(ATTENTION).DeepseekSparseAttnBackend, SEEDS)
    assert makes_seeds is (Version(__version__) >= Version("0.5.23"))


@pytest.mark.parametrize("asked", ["auto", "flash_mla"])
def test_sglang_selects_slots_for_a_prefill_with_decode_steps(h200: None, asked: str) -> None:
    """Metadata is made in mode MIXED; a prefill graph then runs the layers in mode EXTEND."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    backend = built(prefill_backend=asked)
    lengths = {"extend_seq_lens_cpu": [3000, 1, 1], "forward_mode": ForwardMode.MIXED}
    backend.set_dsa_prefill_impl(prefill(3000, 900, 5000, **lengths))
    assert not backend.use_mha
    assert backend.dsa_prefill_impl == "flashmla_kv"
    assert backend.nsa_plugin.route.own is (asked == "auto")
    for mode in (ForwardMode.MIXED, ForwardMode.EXTEND):
        assert backend.get_topk_transform_method(mode).name == "PAGED"
    # The same batch without decode steps may be copied, and then has rows of the copy.
    backend.set_dsa_prefill_impl(prefill(3000, 900, 5000, **lengths | {"forward_mode": ForwardMode.EXTEND}))
    copied = backend.nsa_plugin.route.plan.dequantize_kv
    assert backend.get_topk_transform_method(ForwardMode.EXTEND).name == ("RAGGED" if copied else "PAGED")
    assert copied is (asked == "flash_mla")


@pytest.mark.parametrize("engine_says", [True, False])
@pytest.mark.parametrize(
    ("settings", "lengths", "more", "leaves"),
    [
        ({"mha_max_kv": 2048}, (5, 2048), {}, True),
        ({"mha_max_kv": 2048}, (5, 2049), {}, False),
        ({}, (5,), {}, False),
        ({"mha_max_kv": 2048}, (5,), {"global_num_tokens_cpu": [5, 9]}, False),
        ({"split_prefill": "on"}, (3000, 1500), {}, True),
        ({"split_prefill": "on"}, (3000, 1500, 900), {"extend_seq_lens_cpu": [3000, 1500, 1]}, True),
        ({"split_prefill": "on"}, (3000, 400), {}, False),
        ({"split_prefill": "on"}, (1500, 900), {}, False),
        ({"split_prefill": "on"}, (3000, 1500), {"global_num_tokens_cpu": [4500, 9]}, False),
        ({"split_prefill": "on"}, (3000, 1500), {"spec_info": object()}, False),
        ({}, (3000, 1500), {}, False),
    ],
)
def test_a_batch_leaves_sglangs_prefill_graph(
    h200: None, monkeypatch: pytest.MonkeyPatch, engine_says: bool, settings: Any, lengths: Any, more: Any, leaves: bool
) -> None:
    from nsa_plugin.backends.sglang.v32.patches import wrap_can_run_graph

    original = importlib.import_module(PREFILL).PrefillCudaGraphRunner
    changed = type("Changed", (original,), {"can_run_graph": wrap_can_run_graph(original.can_run_graph)})
    monkeypatch.setattr(original, "can_replay_locally", lambda self, **facts: engine_says)
    runner = object.__new__(changed)
    runner.model_runner = SimpleNamespace(attn_backend=built(**settings))
    runner.enable_lora = runner._capture_chunked_prefix = False
    runner.max_context_size = runner.max_seq_len = runner._backend_can_run_prefill_cuda_graph = None
    facts = dict.fromkeys(("input_embeds", "replace_embeds", "capture_hidden_mode", "return_logprob"))
    batch = prefill(*lengths, input_ids=range(sum(lengths)), contains_mm_inputs=lambda: False, **facts, **more)
    batch.can_run_dp_breakable_cuda_graph = batch.can_run_dp_prefill_cuda_graph = True
    assert runner.can_run_graph(batch) is (engine_says and not leaves)


@pytest.mark.parametrize("steps", [3, 4, 6])
def test_sglangs_draft_steps_are_left_with_routes_that_hold(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """SGLang prepares the first three backends with one kernel if there are 4 or more steps."""
    import torch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    copied: list[Any] = []
    for name in COPIES:
        copies = ModuleType(name)
        copies.fused_metadata_copy_multi_cuda = lambda *tensors: copied.append(tensors)  # type: ignore[attr-defined]
        copies.fused_metadata_copy_cuda = lambda *tensors: None  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, copies)

    backends = [built() for _ in range(steps - 1)]
    names = "cache_seqlens_int32 cu_seqlens_k page_table_1 dsa_cache_seqlens_int32 dsa_cu_seqlens_k real_page_table"
    tensors = {name: torch.zeros(1) for name in (*names.split(), "dsa_seqlens_expanded", "paged_mqa_ctx_lens_2d")}
    schedule = SimpleNamespace(num_splits=None, flashmla_metadata=None)
    precomputed = SimpleNamespace(
        **{
            name: None
            for name in (
                "cache_seqlens",
                "cu_seqlens_k",
                "page_indices",
                "dsa_cache_seqlens",
                "seqlens_expanded",
                "dsa_cu_seqlens_k",
                "real_page_table",
                "max_len",
                "max_seqlen_k",
                "seqlens_expanded_size",
            )
        },
        flashmla_metadata=schedule,
    )
    for backend in backends:
        backend.decode_cuda_graph_metadata = {4: SimpleNamespace(**tensors, flashmla_metadata=schedule)}
        backend._precompute_replay_metadata = lambda **facts: precomputed
        backend._update_kpool_metadata_from_precomputed = lambda *arguments: None
        backend.set_dsa_prefill_impl(prefill(4000))  # the last eager batch
        assert backend.nsa_plugin.route.op == "sparse_mla_prefill"
    multi = object.__new__(importlib.import_module(ATTENTION).DeepseekSparseAttnMultiStepBackend)
    multi.speculative_num_steps, multi.attn_backends = steps, backends
    batch = SimpleNamespace(
        batch_size=4, req_pool_indices=None, seq_lens=None, seq_lens_cpu=None, forward_mode=ForwardMode.DECODE
    )
    multi.init_forward_metadata_out_graph(batch)
    assert len(copied) == (steps > 3)
    together = 3 if steps > 3 else 0
    for place, backend in enumerate(backends):
        assert (backend.use_mha, backend.dsa_prefill_impl, backend.dsa_decode_impl) == (False, *["flashmla_kv"] * 2)
        assert (backend.nsa_plugin.route.op == "sparse_mla_decode") is (place >= together)


@pytest.mark.parametrize("lengths", [((20, 20), (6, 2100)), ((3, 2060), (9, 9), (7, 30), (5, 2100))])
@pytest.mark.parametrize("layout", ["bf16", "v32_fp8"])
def test_a_split_batch_through_sglangs_own_layer_code(
    monkeypatch: pytest.MonkeyPatch, lengths: list[tuple[int, int]], layout: str
) -> None:
    """SGLang projects, absorbs and projects the output; the stand-ins are the pool, the indexer and the kernels."""
    import torch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from nsa_plugin.backends.sglang.v32 import split
    from tests.backends.fake_sglang import layer as fake

    mla = importlib.import_module("sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla")
    model = importlib.import_module("sglang.srt.models.deepseek_v2")
    original = model.DeepseekV2AttentionMLA
    hidden: list[torch.Tensor] = []
    monkeypatch.setattr("nsa_plugin.backends.sglang.v32.routes.SPLIT_TOKENS", 8)
    latent = SimpleNamespace(fetch_qkv_latent=lambda: hidden[-1].clone())
    monkeypatch.setattr(mla, "get_attn_tp_context", lambda: latent)
    monkeypatch.setattr(mla, "get_parallel", lambda: SimpleNamespace(dcp_replicate_q_proj=False, dcp_enabled=False))
    monkeypatch.setattr(mla, "get_attn_backend", lambda: None)
    unchanged = lambda layer, batch, k_nope, k_pe, **more: (k_nope, k_pe)  # noqa: E731
    monkeypatch.setattr(mla, "prepare_kv_for_attention", unchanged, raising=False)
    for name in ("dsa_use_prefill_cp", "mla_use_prefill_cp"):
        monkeypatch.setattr(mla, name, lambda batch: False, raising=False)
    monkeypatch.setattr(mla, "maybe_capture_indexer_topk", lambda layer_id, topk: topk, raising=False)

    class Real(original):  # type: ignore[valid-type, misc]
        forward_absorb_prepare = split.wrap_prepare(original.forward_absorb_prepare)
        forward_absorb_core = split.wrap_core(original.forward_absorb_core)

        def __init__(self, stand_in: Any) -> None:
            torch.nn.Module.__init__(self)
            self.stand_in = stand_in
            for name in ("q_lora_rank", "num_local_heads", "qk_nope_head_dim", "w_kc", "w_vc", "attn_mha"):
                setattr(self, name, getattr(stand_in, name))
            self.q_b_proj, self.kv_b_proj, self.o_proj = stand_in.q_b_proj, stand_in.kv_b_proj, stand_in.o_proj
            fields = {
                "qk_rope_head_dim": 64,
                "qk_head_dim": 192,
                "v_head_dim": 128,
                "kv_lora_rank": 512,
                "alt_stream": None,
                "use_dsa": True,
                "dcp_size": 1,
                "use_deep_gemm_bmm": False,
                "w_kc_qrep": None,
                "use_min_latency_q_b_gemm": False,
                "_use_min_latency_q_b_gemm": False,
                "layer_id": 3,
                "skip_topk": False,
                "next_skip_topk": None,
                "is_nextn": False,
                "current_attention_backend": "dsa",
                "rotary_emb": lambda positions, q_pe, k_pe: (-q_pe, -k_pe),
                "q_a_layernorm": lambda x: x,
                "kv_a_layernorm": lambda x: x,
                "indexer": lambda **given: torch.zeros(1),
                "_fuse_rope_for_trtllm_mla": lambda batch: False,
                "_skip_rope_for_dsa_tilelang_fused": lambda: False,
            }
            for name, value in fields.items():
                object.__setattr__(self, name, value)

        def attn_mqa(self, q: Any, k: Any, v: Any, batch: Any, q_rope: Any, k_rope: Any, **more: Any) -> Any:
            return self.stand_in.attend(q, k, q_rope, k_rope, batch)

        attn_mqa.layer_id = 3

    def run(of: Any, *, splits: bool) -> torch.Tensor:
        of.prepare(split=splits)
        of.batch.forward_mode = ForwardMode.EXTEND
        layer = Real(fake.Attention(of.backend, layout))
        layer.stand_in.slots = of.slots.masked_fill(of.short.unsqueeze(1), -1) if splits else of.slots
        hidden.append(of.hidden)
        prepared = layer.forward_absorb_prepare(None, of.hidden, of.batch, None)
        return layer.forward_absorb_core(*prepared)  # type: ignore[no-any-return]

    whole, parts = (fake.Case(list(lengths), layout, prefill_backend="reference") for _ in range(2))
    wanted, found = run(whole, splits=False), run(parts, splits=True)
    assert parts.backend.calls == ["dense"]
    torch.testing.assert_close(found, wanted, atol=2e-2 if layout == "bf16" else 0.15, rtol=2e-2)
    torch.testing.assert_close(found[~parts.short], wanted[~parts.short], atol=0, rtol=0)


def test_sglangs_arguments_have_the_fields_that_trtllm_as_a_setting_sets() -> None:
    """Parsed arguments and SGLang's object both take the value before SGLang resolves them."""
    import argparse

    from sglang.srt.server_args import ServerArgs

    from nsa_plugin.backends.sglang.startup import flags
    from nsa_plugin.settings import Settings

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    every = [parser.parse_args(["--model-path", "m"])]
    if hasattr(ServerArgs, "resolve_once"):  # before 0.5.19 the constructor resolves
        every.append(ServerArgs(model_path="m"))
    asked = Settings(prefill_backend="trtllm", decode_backend="trtllm")
    for arguments in every:
        assert flags.run_trtllm(arguments, asked, lambda: 100) == {
            "prefill_backend": ("--dsa-prefill-backend", "trtllm"),
            "decode_backend": ("--dsa-decode-backend", "trtllm"),
        }
        assert (arguments.dsa_prefill_backend, arguments.dsa_decode_backend) == ("trtllm", "trtllm")
        assert flags.run_trtllm(arguments, asked, lambda: 100) == {}
