"""Resharding under SGLang on real process groups (the `shard` bodies), and tests of one rank."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nsa_plugin.backends.common import token_shard as shared
from nsa_plugin.backends.sglang.startup.serving import SglangServing
from nsa_plugin.backends.sglang.v32 import token_shard
from nsa_plugin.backends.sglang.v32.batch import prefill_batch, step_batch
from nsa_plugin.backends.sglang.v32.routes import NO_DENSE, SglangPlanner
from nsa_plugin.backends.sglang.v32.token_shard import all_heads, impossible
from nsa_plugin.decision import timings
from nsa_plugin.decision.shapes import Phase
from nsa_plugin.errors import PatchError, SettingsError
from nsa_plugin.parallel.partition import by_count
from nsa_plugin.settings import ResolvedSettings, Settings
from tests.backends.fake_sglang import shard_prefills, shard_steps
from tests.backends.fake_sglang.model_runner import built, decided, keep_arguments_raw, runner
from tests.backends.fake_sglang.v32 import H200, MODEL, DsaBackend, ForwardMode, forward_batch
from tests.parallel.ranks import on_ranks

LONG = prefill_batch(forward_batch(ForwardMode.EXTEND, [3000], [9000]))
SHORT = prefill_batch(forward_batch(ForwardMode.EXTEND, [30], [30]))


@pytest.mark.regression(23)
@pytest.mark.parametrize("ranks", [2, 4])
def test_indexer_and_attention_are_the_unsharded_ones_bit_for_bit(ranks: int, tmp_path: Path):
    on_ranks(ranks, shard_prefills.on_ranks_of_cpus, tmp_path)


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 4), (4, 2)])  # both numbers of each, and each the larger once
def test_pieces_are_the_unsharded_ones_bit_for_bit(ranks: int, chunks: int, tmp_path: Path):
    on_ranks(ranks, shard_prefills.pieces_on_ranks_of_cpus, tmp_path, chunks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_decode_verify_and_draft_steps_reshard_bit_for_bit(ranks: int, tmp_path: Path):
    on_ranks(ranks, shard_steps.on_ranks_of_cpus, tmp_path)


def planner(**fields: Any) -> SglangPlanner:
    settings = Settings(token_shard=fields.pop("token_shard", "on"))
    return SglangPlanner(MODEL, H200, settings, **({"exchange_rows": 8192, "no_exchange": ""} | fields))


def reason(made: SglangPlanner, batch: Any, *, dense: bool = False) -> tuple[bool, str]:
    route = made.prefill(batch, no_dense="" if dense else NO_DENSE)
    assert route is not None
    return route.plan.token_shard, route.plan.reasons["token_shard"]


def test_a_planner_with_an_exchange_reshards():
    assert reason(planner(), LONG)[0]
    for phase, rows, reshards in (
        (Phase.DECODE, 64, True),
        (Phase.TARGET_VERIFY, 64, True),
        (Phase.DECODE, 1, False),
        (Phase.DRAFT_EXTEND, 64, False),
        (Phase.IDLE, 64, False),
    ):
        assert planner().step(step_batch(phase, rows, rows, 4096)).plan.token_shard is reshards


@pytest.mark.parametrize(
    ("fields", "phase", "why"),
    [
        ({"no_exchange": "two-batch overlap is on"}, Phase.DECODE, "two-batch overlap is on"),
        ({"exchange_rows": 63}, Phase.TARGET_VERIFY, "64 query tokens exceed the 63 that the exchange's buffers hold"),
        ({"no_exchange": "whatever"}, Phase.DRAFT_EXTEND, "draft_extend: draft steps do not reshard"),
        ({"token_shard": "off", "no_exchange": "whatever"}, Phase.DECODE, "token_shard is off"),
    ],
)
def test_a_planner_keeps_a_steps_heads_local_with_a_reason(fields: dict[str, Any], phase: Phase, why: str):
    plan = planner(**fields).step(step_batch(phase, 64, 64, 4096)).plan
    assert (plan.token_shard, plan.reasons["token_shard"]) == (False, why)


@pytest.mark.regression(23)
def test_a_step_is_partitioned_by_its_number_of_query_tokens():
    """A replay has its capture's shares, whatever its lengths are."""
    made = planner()
    for rows in (2, 7, 64):
        batches = [step_batch(Phase.DECODE, rows, rows, context) for context in (64, 4096)]
        shares = [made.shares(made.step(batch).plan, batch, 8192) for batch in batches]
        assert shares[0] == shares[1] == by_count(rows, 2)


@pytest.mark.parametrize(
    ("fields", "batch", "why"),
    [
        ({"no_exchange": "two-batch overlap is on"}, LONG, "two-batch overlap is on"),
        ({"exchange_rows": 2999}, LONG, "3000 query tokens exceed the 2999 that the exchange's buffers hold"),
        ({}, replace(LONG, in_graph=True), "SGLang captures or replays this prefill in pieces"),
        ({}, SHORT, "dense attention pads no heads"),
        ({"no_exchange": "whatever"}, SHORT, "dense attention pads no heads"),
        ({"token_shard": "off", "no_exchange": "whatever"}, LONG, "token_shard is off"),
    ],
)
def test_a_planner_keeps_heads_local_with_a_reason(fields: dict[str, Any], batch: Any, why: str):
    reshards, said = reason(planner(**fields), batch, dense=batch is SHORT)
    assert not reshards
    assert said.startswith(why)


@pytest.mark.regression(23)
def test_without_an_exchange_nothing_reshards():
    """Whatever the settings say: a plan that reshards and a backend that cannot would be wrong rows."""
    plain = SglangPlanner(MODEL, H200, Settings(token_shard="on"))
    assert reason(plain, LONG) == (False, "this backend has no exchange")


def begun(monkeypatch: pytest.MonkeyPatch) -> SglangServing:
    """Make the plan for `auto` without running a kernel."""
    for name in ("warm", "_warm_selection"):
        monkeypatch.setattr(f"nsa_plugin.backends.sglang.startup.serving.{name}", lambda *given: None)
    monkeypatch.setattr("nsa_plugin.backends.sglang.startup.serving.free_device_memory", lambda: 8 << 30)
    backend, model_runner = built(), runner(chunked_prefill_size=8192)
    made = SglangServing.begin(ResolvedSettings(Settings(), {}), backend, model_runner, H200)
    made.adopt(backend, model_runner)
    return made


def test_auto_without_measured_times_asks_no_group(monkeypatch: pytest.MonkeyPatch):
    """Neither SGLang's groups nor memory: the fakes have none."""
    others = {key: labels for key, labels in timings.TIMINGS.items() if not key[1].endswith(" tp2")}
    monkeypatch.setattr(timings, "TIMINGS", others)
    made = begun(monkeypatch)
    assert made.exchange is None
    words = made.routes["prefill, 4096 of 4096 tokens"]
    assert f"; heads stay local: no times on SM90 for 2 ranks that reshard {MODEL.heads_per_rank} heads each" in words


def test_auto_allocates_nothing_if_no_batch_was_measured_faster(monkeypatch: pytest.MonkeyPatch):
    """The ranks say so to each other: one that has other kernel libraries than the rest might not."""
    group = SimpleNamespace(device_group=2, cpu_group=object())
    group_module(monkeypatch, get_attn_tp_group=lambda: group)
    monkeypatch.setattr(dist, "get_world_size", lambda size: size)
    said: list[Any] = []
    monkeypatch.setattr(shared, "least", lambda *given: said.append(given) or 0)
    made = begun(monkeypatch)
    assert said == [(group.cpu_group, 0)]
    assert made.exchange is None
    words = made.routes["prefill, 4096 of 4096 tokens"]
    assert "; heads stay local: by the times on SM90, no batch of up to 8192 query tokens is quicker" in words


@pytest.mark.parametrize("own", [True, False])
def test_auto_without_memory_for_the_buffers_keeps_heads_local(monkeypatch: pytest.MonkeyPatch, own: bool):
    """All ranks, if any of them has too little; `on` is refused then."""
    monkeypatch.setattr(dist, "get_world_size", lambda size: size)
    group_module(monkeypatch, get_attn_tp_group=lambda: SimpleNamespace(device_group=2, cpu_group=object()))
    monkeypatch.setattr(shared, "require_agreement", lambda *given: None)
    monkeypatch.setattr(shared.sharding, "pointless", lambda *given: None)
    answers: list[int] = []

    def made(*given: Any, **named: Any) -> Any:
        if own:
            raise torch.OutOfMemoryError("Tried to allocate 2.25 GiB")
        return object()

    def least(_: Any, number: int) -> int:
        answers.append(number)
        return 1 if len(answers) == 1 else 0

    monkeypatch.setattr(shared, "TokenShard", made)
    monkeypatch.setattr(shared, "least", least)
    monkeypatch.setattr(shared.sharding, "never", lambda *given: None)
    which = (
        "more than this rank can allocate" if own else "and another rank of the attention group lacks memory for them"
    )
    reason = f"the exchange's buffers of 8192 query tokens take 176 MiB, {which}"
    given = (built(), runner(chunked_prefill_size=8192), MODEL, H200)
    found, why = token_shard.open_exchange(*given, Settings())
    assert found is None
    assert why == reason
    assert answers == [1, int(not own)]
    answers.clear()
    with pytest.raises(SettingsError, match=f"token_shard is on and cannot work here: {reason}"):
        token_shard.open_exchange(*given, Settings(token_shard="on"))


def test_auto_leaves_most_of_the_free_memory_to_graphs_and_activations(monkeypatch: pytest.MonkeyPatch):
    """A quarter at most; `on` takes what it is asked to take."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4000 << 20, 80 << 30))
    gpu = torch.device("cuda")
    assert shared._lacks_memory(Settings(), gpu, 1000 << 20) == ""
    reason = "more than a quarter of this rank's free memory, 4000 MiB"
    assert shared._lacks_memory(Settings(), gpu, 1001 << 20) == reason
    assert shared._lacks_memory(Settings(token_shard="on"), gpu, 1001 << 20) == ""


@pytest.mark.parametrize(
    ("impls", "args", "broadcast", "why"),
    [
        ("flashmla_kv", {}, None, None),
        ("flashmla_kv", {}, False, None),
        ("flashmla_kv", {}, True, "SGLANG_DSA_TOPK_BROADCAST"),
        ("flashmla_kv", {"enable_two_batch_overlap": True}, None, "two-batch overlap"),
        ("flashmla_kv", {"enable_return_indexer_topk": True}, None, "returned to users"),
        ("flashmla_kv", {"enable_prefill_cp": True}, None, "context-parallel prefill is on"),
        ("flashmla_kv", {"enable_deterministic_inference": True}, None, "deterministic inference is on"),
        ("tilelang", {}, None, "--dsa-prefill-backend is tilelang and its decode backend tilelang: both fall back"),
        ("flashmla_kv, tilelang", {}, None, None),
        ("tilelang, flashmla_kv", {}, None, None),
    ],
)
def test_servers_that_do_not_support_resharding(
    sglang_variables: SimpleNamespace, impls: str, args: dict[str, Any], broadcast: bool | None, why: str | None
):
    if broadcast is not None:
        sglang_variables.SGLANG_DSA_TOPK_BROADCAST = SimpleNamespace(get=lambda: broadcast)
    prefill, *decode = impls.split(", ")
    said = impossible(built(prefill=prefill, decode=(decode or [prefill])[0]), runner(**args), MODEL)
    assert (said is None) if why is None else (said is not None and why in said)


def test_buffers_hold_the_chunks_that_sglang_decided_on(monkeypatch: pytest.MonkeyPatch):
    sizes = {"max_prefill_tokens": 16384}
    assert token_shard._max_tokens(SimpleNamespace(chunked_prefill_size=4096, **sizes)) == 4096  # an older version
    keep_arguments_raw(monkeypatch)
    assert token_shard._max_tokens(SimpleNamespace(**sizes, **decided(chunked_prefill_size=4096))) == 4096
    assert token_shard._max_tokens(SimpleNamespace(**sizes, **decided(chunked_prefill_size=-1))) == 16384
    assert token_shard._max_tokens(SimpleNamespace(chunked_prefill_size=2048, **sizes)) == 2048


@pytest.mark.parametrize("flag", ["enable_two_batch_overlap", "enable_deterministic_inference"])
def test_what_sglang_turned_on_itself_stops_resharding(monkeypatch: pytest.MonkeyPatch, flag: str):
    keep_arguments_raw(monkeypatch)
    assert impossible(built(), runner(**decided(**{flag: True})), MODEL) is not None
    assert impossible(built(), runner(**decided(**{flag: False})), MODEL) is None


def group_module(monkeypatch: pytest.MonkeyPatch, **members: Any) -> None:
    module = ModuleType(token_shard.GROUP[0])
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (None, "has no sglang.srt.distributed.parallel_state.get_attn_tp_group"),
        (SimpleNamespace(device_group=None, cpu_group=object()), "has no device_group"),
        (SimpleNamespace(device_group=3, cpu_group=object()), "has 3 ranks, but heads for 2"),
    ],
)
def test_an_unexpected_group_is_refused(monkeypatch: pytest.MonkeyPatch, group: Any, message: str):
    monkeypatch.setattr(dist, "get_world_size", lambda size: size)
    group_module(monkeypatch, **({} if group is None else {"get_attn_tp_group": lambda: group}))
    with pytest.raises(PatchError, match=message):
        token_shard.open_exchange(built(), runner(), MODEL, H200, Settings(token_shard="on"))


def test_graph_flags_are_found_in_every_version(monkeypatch: pytest.MonkeyPatch):
    answers = {name: False for kind in token_shard.IN_GRAPH for _, name in kind}
    for old in (0, 1):
        for kind in token_shard.IN_GRAPH:
            for place, (path, name) in enumerate(kind):
                module = ModuleType(path)
                if place == old:
                    setattr(module, name, lambda name=name: answers[name])
                monkeypatch.setitem(sys.modules, path, module)
        asks = token_shard._in_graph()
        for kind in token_shard.IN_GRAPH:
            assert not asks()
            answers[kind[old][1]] = True
            assert asks()
            answers[kind[old][1]] = False
    for kind in token_shard.IN_GRAPH:
        for path, _ in kind:
            monkeypatch.setitem(sys.modules, path, ModuleType(path))
    with pytest.raises(PatchError, match=r"SGLang has none of .*is_in_breakable_cuda_graph"):
        token_shard._in_graph()


def test_the_engines_head_count_is_restored_after_an_error():
    backend = DsaBackend()
    backend.flashmla_kv_num_q_heads = 64  # type: ignore[attr-defined]
    seen = []

    def call() -> None:
        with all_heads(backend, 128):
            seen.append(backend.flashmla_kv_num_q_heads)  # type: ignore[attr-defined]
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        call()
    assert seen == [128]
    assert backend.flashmla_kv_num_q_heads == 64  # type: ignore[attr-defined]
