"""SGLang's own offline tests of DeepSeek sparse attention, passed by the plugin's backend on a GPU.

The cases, the small model and the comparison are SGLang's (`sglang.test.kits.attention_unittest`); see `sglang_kit` for
how the plugin comes into them, and for the tolerance, which is stricter than the kit's. Each test asserts besides which
kernel was planned and which ran, so that none passes by SGLang's own attention. For SGLang 0.5.16 to 0.5.23, whose kits
have the same cases under the same names (0.5.13 to 0.5.15 build their runner in another way; older wheels have no kit).

Not here, because the plugin leaves it to SGLang: the paths tilelang, trtllm and aiter; context-parallel decode
(`test_dsa_dcp_trtllm` of SGLang's repository); the seed that a draft's prefill hands on over flashmla_sparse_q8 (in the
kit from 0.5.23 on). Of the other paths that stay SGLang's, `test_paths_that_stay_sglangs` runs some.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import sglang_kit
import torch
from sglang_kit import Kit, Plugged, strict

from nsa_plugin.decision.shapes import Phase

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DENSE = (
    "dsa_mha_one_shot_no_prefix_ragged",
    "dsa_mha_one_shot_no_prefix_exact_page",
    "dsa_mha_one_shot_no_prefix_seq_below_page",
    "dsa_mha_one_shot_ragged_below_at_above_page",
    "dsa_mha_one_shot_prefix_ragged",
    "dsa_mha_one_shot_cross_page_boundary",
    "dsa_mha_one_shot_prefix_exact_page",
    "dsa_mha_one_shot_total_exact_page",
)
PREFILL = (
    "dsa_sparse_prefill_flashmla_sparse_topk",
    "dsa_sparse_prefill_long_extend",
    "dsa_sparse_prefill_multi_request",
)
DECODE = (
    "dsa_sparse_decode_flashmla_kv_topk",
    "dsa_sparse_decode_short_prefix_padding",
    "dsa_sparse_decode_ragged_prefix",
    "dsa_sparse_decode_long_prefix",
)

# (cache, setting prefill_backend or decode_backend, the library that is to be planned for 4 heads on SM90).
PREFILL_ROUTES = [
    ("bf16", "auto", "flash_mla"),
    ("bf16", "flash_mla", "flash_mla"),
    ("bf16", "triton", "triton"),
    ("fp8", "auto", "cuda"),
    ("fp8", "cuda", "cuda"),
    ("fp8", "flash_mla", "flash_mla"),
    ("fp8", "triton", "triton"),
]
DECODE_ROUTES = [
    ("bf16", "auto", "fa3"),
    ("bf16", "fa3", "fa3"),
    ("bf16", "flash_mla", "flash_mla"),
    ("bf16", "triton", "triton"),
    ("fp8", "auto", "cuda"),
    ("fp8", "cuda", "cuda"),
    ("fp8", "flash_mla", "flash_mla"),
    ("fp8", "triton", "triton"),
]
PREFILL_OVER = {cache: [route for route in PREFILL_ROUTES if route[0] == cache] for cache in ("bf16", "fp8")}
DECODE_OVER = {cache: [route for route in DECODE_ROUTES if route[0] == cache] for cache in ("bf16", "fp8")}
# SGLang's paths by default on SM90. The kit's own default for decode, flashmla_kv, is for fp8 caches; over a bf16
# cache it quantises all of it at every step.
PATHS = {
    "bf16": {"dsa_prefill_backend": "flashmla_auto", "dsa_decode_backend": "fa3"},
    "fp8": {"dsa_prefill_backend": "flashmla_auto", "dsa_decode_backend": "flashmla_kv"},
}
ROUTE = "cache", "setting", "provider"

Plug = Callable[..., Plugged]


@pytest.fixture(scope="module")
def kit() -> Kit:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the routes that are expected are those of SM90")
    return sglang_kit.load()


@pytest.fixture(scope="module")
def graphs(kit: Kit) -> ModuleType:
    return sglang_kit.runner_mode("cuda_graph_decode_runner")


@pytest.fixture(scope="module")
def drafts(kit: Kit) -> ModuleType:
    return sglang_kit.runner_mode("speculative_draft_runner")


@pytest.fixture
def plug(monkeypatch: pytest.MonkeyPatch, kit: Kit) -> Plug:
    return functools.partial(sglang_kit.plug, monkeypatch, kit)


def run(kit: Kit, case: Any, cache: str, **more: Any) -> None:
    """The kit's sparse case over a cache of either format, eagerly."""
    paths = PATHS[cache] | {"fp8_kv_cache": cache == "fp8"}
    kit.attention.run_dsa_sparse_attention_case(strict(), case, **(paths | more))


def replay(kit: Kit, graphs: ModuleType, cache: str, path: str) -> None:
    """The kit's decode replay."""
    case = kit.sparse_case("replay", "DECODE", (127, 128))
    graphs.run_dsa_sparse_cuda_graph_decode_case(strict(), case, dsa_decode_backend=path, fp8_kv_cache=cache == "fp8")


def test_every_case_of_the_kit_is_here(kit):
    assert [case.name for case in kit.cases()] == [*DENSE, *PREFILL, *DECODE]


# --- Dense attention. The sparse libraries requested by the settings are not used.


@pytest.mark.parametrize("name", DENSE)
def test_dense_prefill(kit, plug, name):
    seen = plug()
    kit.attention.run_dsa_attention_case(strict(), kit.case(name), head_dim=128)
    seen.check_dense()


@pytest.mark.parametrize("layout", ["interleaved_pages", "non_monotonic_extend"])
def test_dense_prefill_over_scattered_slots(kit, plug, layout):
    seen = plug()
    case = kit.attention.make_dsa_case_with_prefix_lens(kit.case(DENSE[4]), f"dense_{layout}", (0, 32))
    kit.attention.run_dsa_attention_case(strict(), case, head_dim=128, loc_layout=layout)
    seen.check_dense()


# --- Sparse prefill and decode.


@pytest.mark.parametrize(ROUTE, PREFILL_ROUTES)
@pytest.mark.parametrize("name", PREFILL)
def test_prefill(kit, plug, name, cache, setting, provider):
    seen = plug(prefill_backend=setting)
    run(kit, kit.case(name), cache)
    seen.check(Phase.EXTEND, provider)


@pytest.mark.parametrize(ROUTE, DECODE_ROUTES)
@pytest.mark.parametrize("name", DECODE)
def test_decode(kit, plug, name, cache, setting, provider):
    seen = plug(decode_backend=setting)
    run(kit, kit.case(name), cache)
    seen.check(Phase.DECODE, provider)


@pytest.mark.parametrize(ROUTE, PREFILL_ROUTES)
@pytest.mark.parametrize("pattern", ["strided", "head_tail"])
def test_prefill_of_scattered_tokens(kit, plug, pattern, cache, setting, provider):
    seen = plug(prefill_backend=setting)
    run(kit, kit.case(PREFILL[1]), cache, index_pattern=pattern)
    seen.check(Phase.EXTEND, provider)


@pytest.mark.parametrize(ROUTE, DECODE_ROUTES)
@pytest.mark.parametrize("pattern", ["strided", "head_tail"])
def test_decode_of_scattered_tokens(kit, plug, pattern, cache, setting, provider):
    seen = plug(decode_backend=setting)
    run(kit, kit.case(DECODE[3]), cache, index_pattern=pattern)
    seen.check(Phase.DECODE, provider)


@pytest.mark.parametrize(ROUTE, DECODE_ROUTES)
def test_decode_over_scattered_slots(kit, plug, cache, setting, provider):
    seen = plug(decode_backend=setting)
    run(kit, kit.case(DECODE[2]), cache, loc_layout="interleaved_pages")
    seen.check(Phase.DECODE, provider)


# By auto the measurements decide, which there are for this many tokens.
@pytest.mark.parametrize(ROUTE, [route for route in DECODE_ROUTES if route[1] != "auto"])
def test_decode_of_the_models_own_selection(kit, plug, cache, setting, provider):
    """2048 tokens, with which the kit runs tilelang alone."""
    seen = plug(decode_backend=setting)
    run(kit, kit.sparse_case("topk_2048", "DECODE", (4096,)), cache, index_topk=2048)
    seen.check(Phase.DECODE, provider)


# --- Whichever path the flags name: the plan's is taken.


@pytest.mark.parametrize(ROUTE, PREFILL_OVER["bf16"])
def test_prefill_paths(kit, plug, cache, setting, provider):
    seen = plug(prefill_backend=setting)
    case = kit.sparse_case("prefill_path", "EXTEND", (2048,), (1,))
    kit.attention.run_dsa_sparse_prefill_impl_variant_case(strict(), case, "flashmla_sparse")
    seen.check(Phase.EXTEND, provider)


@pytest.mark.parametrize(ROUTE, PREFILL_OVER["fp8"])
@pytest.mark.parametrize("path", ["flashmla_sparse", "flashmla_kv"])
def test_fp8_prefill_paths(kit, plug, path, cache, setting, provider):
    seen = plug(prefill_backend=setting)
    case = kit.sparse_case("fp8_prefill_path", "EXTEND", (2048,), (1,))
    kit.attention.run_dsa_sparse_fp8_prefill_case(strict(), case, dsa_prefill_backend=path)
    seen.check(Phase.EXTEND, provider)


@pytest.mark.parametrize(ROUTE, DECODE_OVER["bf16"])
@pytest.mark.parametrize("path", ["flashmla_sparse", "fa3"])
def test_decode_paths(kit, plug, path, cache, setting, provider):
    seen = plug(decode_backend=setting)
    case = kit.sparse_case("decode_path", "DECODE", (128,))
    kit.attention.run_dsa_sparse_decode_impl_variant_case(strict(), case, path)
    seen.check(Phase.DECODE, provider)


@pytest.mark.parametrize(ROUTE, DECODE_OVER["fp8"])
def test_fp8_decode_paths(kit, plug, cache, setting, provider):
    seen = plug(decode_backend=setting)
    case = kit.sparse_case("fp8_decode_path", "DECODE", (128,))
    kit.attention.run_dsa_sparse_fp8_decode_case(strict(), case, dsa_decode_backend="flashmla_kv")
    seen.check(Phase.DECODE, provider)


# The kit compares these within its tolerance for fp8: over a bf16 cache flashmla_kv reads a quantised copy.
@pytest.mark.parametrize(
    ("mode", "rows", "paths", "kernel"),
    [
        ("EXTEND", (3,), {"dsa_prefill_backend": "flashmla_kv"}, "flash_mla"),
        ("EXTEND", (3,), {"dsa_prefill_backend": "fa3"}, "fa3"),
        ("DECODE", (), {"dsa_decode_backend": "flashmla_kv"}, "flash_mla"),
    ],
    ids=["prefill-flashmla_kv", "prefill-fa3", "decode-flashmla_kv"],
)
def test_paths_that_stay_sglangs(kit, plug, monkeypatch, mode, rows, paths, kernel):
    """Over a bf16 cache, which the plugin plans for other paths: the engine's class computes as it does by itself."""
    seen = plug()
    monkeypatch.setattr(kit.attention, "DSA_SPARSE_ATOL", kit.attention.DSA_SPARSE_FP8_ATOL)
    run(kit, kit.sparse_case("left", mode, (2048,), rows), "bf16", **paths)
    seen.check_left(kernel)


# --- Speculative decoding and graphs.


@pytest.mark.parametrize(ROUTE, DECODE_ROUTES)
@pytest.mark.parametrize(
    ("mode", "phase"), [("TARGET_VERIFY", Phase.TARGET_VERIFY), ("DRAFT_EXTEND_V2", Phase.DRAFT_EXTEND)]
)
def test_speculative_steps(kit, plug, mode, phase, cache, setting, provider):
    seen = plug(decode_backend=setting)
    case = kit.sparse_case(f"speculative_{mode.lower()}", mode, (128,), (3,))
    if cache == "bf16":
        path = PATHS[cache]["dsa_decode_backend"]
        kit.attention.run_dsa_sparse_speculative_forward_mode_case(strict(), case, dsa_decode_backend=path)
    else:
        run(kit, case, cache)
    seen.check(phase, provider)


@pytest.mark.parametrize(ROUTE, DECODE_OVER["bf16"])
@pytest.mark.parametrize("path", ["flashmla_sparse", "fa3"])
def test_decode_replay(kit, graphs, plug, path, cache, setting, provider):
    seen = plug(decode_backend=setting)
    case = kit.sparse_case("replay", "DECODE", (127, 128))
    kit.attention.run_dsa_sparse_cuda_graph_decode_impl_variant_case(strict(), case, path)
    # An eager batch, what is captured, and what is replayed.
    seen.check(Phase.DECODE, provider, batches=3)


@pytest.mark.parametrize(ROUTE, DECODE_OVER["fp8"])
def test_fp8_decode_replay(kit, graphs, plug, cache, setting, provider):
    seen = plug(decode_backend=setting)
    replay(kit, graphs, cache, "flashmla_kv")
    seen.check(Phase.DECODE, provider, batches=3)


@pytest.mark.parametrize(ROUTE, DECODE_ROUTES)
def test_eagle_draft_steps_in_a_graph(kit, drafts, plug, monkeypatch, cache, setting, provider):
    """SGLang's own runner captures and replays a graph of the draft steps; the kit compares it with eager steps."""
    seen = plug(decode_backend=setting)
    # The kit builds this model over a bf16 cache and SGLang's path for fp8.
    build = functools.partial(
        kit.attention.build_dsa_sparse_attention_fixture, **PATHS[cache], fp8_kv_cache=cache == "fp8"
    )
    monkeypatch.setattr(drafts, "build_dsa_sparse_attention_fixture", build)
    case = kit.sparse_case("eagle_chain", "DECODE", (128, 192))
    drafts.run_dsa_eagle_draft_cuda_graph_runner_case(strict(), case)
    seen.check(Phase.DECODE, provider, batches=3)
    # Two models, and of each the backend of the runner and that of its one draft step.
    assert len(seen.backends) == 4


# --- What shows that the tests above would notice wrong tokens.


@pytest.mark.parametrize(("cache", "provider"), [("bf16", "triton"), ("bf16", "flash_mla"), ("fp8", "cuda")])
@pytest.mark.parametrize("name", PREFILL)
def test_wrong_tokens_of_a_prefill_are_noticed(kit, plug, name, cache, provider):
    seen = plug(prefill_backend=provider, fault="shift_indices")
    with pytest.raises(AssertionError, match="not close"):
        run(kit, kit.case(name), cache)
    seen.check(Phase.EXTEND, provider)


@pytest.mark.parametrize(("cache", "provider"), [("bf16", "triton"), ("fp8", "cuda"), ("fp8", "flash_mla")])
@pytest.mark.parametrize("name", DECODE)
def test_wrong_tokens_of_a_decode_are_noticed(kit, plug, name, cache, provider):
    seen = plug(decode_backend=provider, fault="shift_indices")
    with pytest.raises(AssertionError, match="not close"):
        run(kit, kit.case(name), cache)
    seen.check(Phase.DECODE, provider)


@pytest.mark.parametrize(("cache", "path", "provider"), [("bf16", "fa3", "triton"), ("fp8", "flashmla_kv", "cuda")])
def test_wrong_tokens_of_a_replay_are_noticed(kit, graphs, plug, cache, path, provider):
    seen = plug(decode_backend=provider, fault="shift_indices")
    with pytest.raises(AssertionError, match="not close"):
        replay(kit, graphs, cache, path)
    seen.check(Phase.DECODE, provider)
