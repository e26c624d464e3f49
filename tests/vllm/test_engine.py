"""A real vLLM engine on the CPU, DeepSeek-V3.2 through the plugin, token by token against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nsa_plugin.tools.checkpoints.v32 import SMALL_GLM
from tests.vllm.outcome import ONE_PROCESS, SPEC, TWO_RANKS, Outcome, assert_right, prompt

pytestmark = pytest.mark.engine_vllm

TOKENS = 24
Run = Callable[..., Outcome]


def requests(*prompts: list[int], max_tokens: int = TOKENS) -> list[dict[str, Any]]:
    return [{"ids": ids, "max_tokens": max_tokens} for ids in prompts]


SHARED = prompt(150, 4)
# Below and above index_topk in one step, and longer than a chunk of 128 tokens; then a cached prefix.
MIXED = [
    requests(prompt(20, 1), prompt(100, 3), prompt(50, 2), SHARED, prompt(310, 5)),
    requests(SHARED + prompt(9, 6)),
]


def routes(outcome: Outcome, kv_tokens: range) -> set[str]:
    """Attention routes of the batches' requests whose context after the step lies in the range."""
    return {
        batch["plans"][request["plan"]]["attention"]
        for batch in outcome.trace
        for request in batch["requests"]
        if request["kv_tokens"] in kv_tokens
    }


@pytest.mark.regression(4, "CPU")
@pytest.mark.regression(10, "CPU: the indexer reads the attention's own metadata")
@pytest.mark.regression(21, "CPU")
def test_chunked_prefill_prefix_cache_and_mixed_batches(run_engine: Run) -> None:
    outcome = run_engine(MIXED, environ=ONE_PROCESS)
    assert_right(outcome)
    assert outcome.rounds[1][0].cached_tokens > 0
    batches = [
        {(batch["plans"][r["plan"]]["phase"], batch["plans"][r["plan"]]["attention"]) for r in batch["requests"]}
        for batch in outcome.trace
    ]
    # One step has decodes and prefills, and another dense and sparse prefills: decided per request.
    assert any({"decode", "extend"} <= {phase for phase, _ in batch} for batch in batches)
    assert any({("extend", "mha_one_shot"), ("extend", "sparse_prefill")} <= batch for batch in batches)
    assert routes(outcome, range(SPEC.index_topk + 1)) >= {"mha_one_shot", "sparse_decode"}
    assert "mha_one_shot" not in routes(outcome, range(SPEC.index_topk + 1, 1024))
    chunks = [r for batch in outcome.trace for r in batch["requests"] if r["kv_tokens"] in (310,) and r["q_tokens"] > 1]
    assert chunks
    assert all(r["q_tokens"] <= 128 for r in chunks)
    assert all(r["request_id"] for batch in outcome.trace for r in batch["requests"])


def test_wrong_indices_change_the_tokens(run_engine: Run) -> None:
    outcome = run_engine(MIXED, plugin={"fault": "shift_indices"}, environ=ONE_PROCESS)
    long = [answer for answer in outcome.answers if answer.prompt_tokens > 2 * SPEC.index_topk]
    assert long
    assert all(sum(answer.equal) < TOKENS // 2 for answer in long)
    assert "deliberately wrong" in outcome.log


def test_dense_prefill_can_be_switched_off(run_engine: Run) -> None:
    outcome = run_engine(MIXED[:1], plugin={"mha_max_kv": 0, "logits_budget_mb": 1}, environ=ONE_PROCESS)
    assert_right(outcome)
    assert routes(outcome, range(1024)) == {"sparse_prefill", "sparse_decode"}


def test_preempted_requests_are_answered_right(run_engine: Run) -> None:
    outcome = run_engine(
        [requests(prompt(130, 7), prompt(160, 8), prompt(90, 9), max_tokens=48)],
        environ=ONE_PROCESS,
        kv_cache_memory_bytes=None,
        gpu_memory_utilization=0.2,
        # Room for 400 tokens; the three requests come to 524. vLLM 0.28 has pages of 16 tokens whatever is asked.
        num_gpu_blocks_override=25,
        block_size=16,
        max_model_len=256,
    )
    assert outcome.preemptions
    assert_right(outcome)


def test_bfloat16_stays_near_the_reference(run_engine: Run) -> None:
    outcome = run_engine(MIXED, environ=ONE_PROCESS, dtype="bfloat16")
    print(f"bfloat16: {outcome.equal()} of {outcome.total()} tokens equal, worst |dlogprob| {outcome.worst():.3f}")
    assert outcome.equal() >= 0.85 * outcome.total()
    assert outcome.worst() < 1.5
    assert max(gap for answer in outcome.answers for gap in answer.gaps) < 1.5


def test_glm5_with_layers_that_reuse_a_selection(run_engine: Run) -> None:
    """GLM-5's architecture: plain RoPE, neighbours rotated in the indexer too, values wider than NoPE keys."""
    outcome = run_engine(MIXED, spec=replace(SPEC, **SMALL_GLM), environ=ONE_PROCESS)
    assert_right(outcome)
    assert routes(outcome, range(1024)) == {"mha_one_shot", "sparse_prefill", "sparse_decode"}


def test_tensor_parallel(run_engine: Run) -> None:
    outcome = run_engine(MIXED, tensor_parallel_size=2, environ=TWO_RANKS)
    assert_right(outcome)
    assert {batch["rank"] for batch in outcome.trace} == {0, 1}


@pytest.mark.parametrize("stages", [1, 2])
def test_torch_compile(run_engine: Run, stages: int) -> None:
    # A layer of each kind, dense and mixture of experts: Dynamo compiles every layer again. With two stages of a
    # pipeline each has one; without torch.compile vLLM 0.32 fails on a CPU before any attention.
    outcome = run_engine(
        MIXED,
        spec=replace(SPEC, num_hidden_layers=2),
        environ={**(ONE_PROCESS if stages == 1 else TWO_RANKS), "VLLM_USE_BREAKABLE_CUDAGRAPH": "0"},
        enforce_eager=False,
        compilation_config={"mode": 3},
        pipeline_parallel_size=stages,
    )
    assert "CompilationMode.DYNAMO_TRACE_ONCE" in outcome.log
    assert_right(outcome)
    assert {batch["rank"] for batch in outcome.trace} == set(range(stages))
