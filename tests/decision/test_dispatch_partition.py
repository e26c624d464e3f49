"""The decision for empty batches, for split prefills, and before serving."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nsa_plugin.decision import timings
from nsa_plugin.decision.dispatch import BatchPart, decide, partition, validate
from nsa_plugin.decision.plan import Attention, IndexerMode, IndexerPlan
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.errors import NoProviderError, SettingsError, ShapeError
from nsa_plugin.libraries.capabilities import Op
from nsa_plugin.libraries.devices import DeviceProfile, synthetic
from nsa_plugin.settings import Settings
from tests.decision.dispatch_cases import (
    AFTER_PREFILL,
    B200,
    CPU,
    FULL_B200,
    FULL_H200,
    H200,
    OLD_FLASH_MLA,
    OLD_H200,
    V4,
    V32,
    V32_FP8,
    batch,
    choose,
    route,
)

pytestmark = pytest.mark.usefixtures("nothing_measured")

# ---------------------------------------------------------------------------------------------------
# Empty batches


@pytest.mark.parametrize(
    "shape",
    [
        BatchShape(phase=Phase.IDLE),
        BatchShape(phase=Phase.EXTEND),  # vllm #51486: no rows reached the kernel
        batch(Phase.EXTEND, [0], [500]),
        BatchShape(phase=Phase.DECODE, cuda_graph=True),
    ],
)
@pytest.mark.parametrize("device", [H200, synthetic(90, libraries=())], ids=["H200", "bare H200"])
def test_no_rows_no_kernels(shape: BatchShape, device: DeviceProfile) -> None:
    plan = choose(V32, shape, device)
    assert route(plan) == ("none", "", False, 0)
    assert plan.indexer == IndexerPlan(mode=IndexerMode.NONE)


def test_query_tokens_without_a_context_are_supported() -> None:
    # vllm #51970: a graph is captured with lengths of 0; nothing may divide by them.
    shape = BatchShape(phase=Phase.DECODE, num_requests=8, num_tokens=8, cuda_graph=True)
    assert choose(V32_FP8, shape).indexer.rows_per_chunk == 8


# ---------------------------------------------------------------------------------------------------
# Splitting a prefill


def split(parts: tuple[BatchPart, ...]) -> list[tuple[tuple[int, ...], str]]:
    return [(part.requests, str(part.plan.attention)) for part in parts]


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "flags", "expected"),
    [
        ([100, 4000, 200], [100, 4000, 300], {}, [((0, 2), "mha_one_shot"), ((1,), "sparse_prefill")]),
        ([100, 200], [100, 300], {}, [((0, 1), "mha_one_shot")]),
        ([4000, 5000], [4000, 5000], {}, [((0, 1), "sparse_prefill")]),
        ([1, 1], [2048, 2049], {}, [((0,), "mha_one_shot"), ((1,), "sparse_prefill")]),
        (
            [900, 900, 900, 1500],
            [900, 900, 900, 1500],
            {"attention_workspace_tokens": 1800},
            [((0, 1), "mha_one_shot"), ((2,), "mha_one_shot"), ((3,), "mha_one_shot")],
        ),
        (
            [1900, 900, 1801, 5000],
            [1900, 900, 1801, 5000],
            {"attention_workspace_tokens": 1800},
            [((1,), "mha_one_shot"), ((0, 2, 3), "sparse_prefill")],
        ),
        (
            [1, 100, 1, 4000],
            [90, 100, 1, 4000],
            {"selecting": (0, 2)},
            [((1,), "mha_one_shot"), ((0, 2, 3), "sparse_prefill")],
        ),
        ([100, 4000], [100, 4000], {"context_parallel": True}, [((0, 1), "sparse_prefill")]),
        ([100, 4000], [100, 4000], {"cuda_graph": True}, [((0, 1), "sparse_prefill")]),
        ([0, 100, 0], [50, 100, 9000], {}, [((1,), "mha_one_shot"), ((0, 2), "none")]),
        ([0, 0], [50, 0], {}, [((0, 1), "none")]),
        ([], [], {}, []),
    ],
    ids=[
        "mixed",
        "short",
        "long",
        "boundary",
        "workspace groups",
        "workspace too small for one",
        "decode steps",
        "context parallel",
        "graph",
        "rows missing",
        "no rows",
        "no requests",
    ],
)
def test_partition(
    q_lens: list[int], kv_lens: list[int], flags: dict[str, Any], expected: list[tuple[tuple[int, ...], str]]
) -> None:
    parts = partition(V32, q_lens, kv_lens, Phase.EXTEND, H200, Settings(), **flags)
    assert split(parts) == expected
    for part in parts:
        assert part.plan == decide(V32, part.batch, H200, Settings())


@pytest.mark.parametrize("phase", [*AFTER_PREFILL, Phase.IDLE])
def test_only_a_prefill_is_split(phase: Phase) -> None:
    parts = partition(V32, [1, 1, 0], [100, 9000, 5], phase, H200, Settings())
    assert [part.requests for part in parts] == [(0, 1, 2)]
    assert parts[0].plan.attention is not Attention.MHA_ONE_SHOT


def test_without_a_dense_kernel_nothing_is_split() -> None:
    device = synthetic(90, libraries=("flash_mla", "deep_gemm"))
    parts = partition(V32, [100, 4000], [100, 4000], Phase.EXTEND, device, Settings())
    assert split(parts) == [((0, 1), "sparse_prefill")]


def test_partition_refuses_impossible_lengths() -> None:
    with pytest.raises(ShapeError, match="request 1 has 9 rows and a context of 3"):
        partition(V32, [1, 9], [1, 3], Phase.EXTEND, H200, Settings())


# ---------------------------------------------------------------------------------------------------
# Before serving


@pytest.mark.parametrize("model", [V32, V32_FP8, V4], ids=["v3.2 bf16", "v3.2 fp8", "v4"])
@pytest.mark.parametrize(
    "device",
    [H200, B200, CPU, OLD_H200, FULL_H200, FULL_B200, synthetic(80)],
    ids=["H200", "B200", "CPU", "old H200", "H200 and own", "B200 and own", "A100 and own"],
)
def test_what_is_installed_serves(model: ModelShape, device: DeviceProfile) -> None:
    validate(model, device, Settings(), max_tokens=32768, cuda_graph=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mha_max_kv": 4096}, "mha_max_kv is 4096"),
        ({"decode_backend": "trtllm"}, "decode_backend is trtllm"),
        ({"prefill_backend": "trtllm"}, "prefill_backend is trtllm"),
        ({"token_shard": "on"}, "token_shard is on"),
        (
            {"prefill_backend": "trtllm", "decode_backend": "triton"},
            "prefill_backend is trtllm.* decode_backend is triton",
        ),
    ],
)
def test_settings_that_no_batch_satisfies_are_found_at_start_up(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        validate(V32, H200, Settings(**settings))


def test_an_error_is_reported_once() -> None:
    with pytest.raises(SettingsError) as error:
        validate(V32, H200, Settings(mha_max_kv=4096))
    assert str(error.value).count("mha_max_kv is 4096") == 1


def test_missing_libraries_are_found_at_start_up() -> None:
    with pytest.raises(NoProviderError, match=r"supports extend: .*supports decode: "):
        validate(V32, synthetic(90, libraries=("deep_gemm",)), Settings())
    # Rows that only a prefill of this size has.
    old = synthetic(90, libraries=("flash_mla", "deep_gemm"), versions=OLD_FLASH_MLA)
    named = Settings(prefill_backend="flash_mla", decode_backend="flash_mla")
    validate(V32_FP8, old, named, max_tokens=32768)
    validate(V32_FP8, old, named, max_decode_tokens=20000)
    with pytest.raises(NoProviderError, match="20000 query tokens exceed the 11622"):
        validate(V32_FP8, old, Settings(), max_decode_tokens=20000, cuda_graph=True)
    with pytest.raises(NoProviderError, match="supports 64 or 128 heads; there are 256"):
        validate(replace(V32_FP8, num_heads=2048), old, Settings())


def test_the_longest_dense_context_is_the_same_for_a_batch_and_for_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose limit the whole batch exceeds may still be faster for one of its requests."""
    times = {
        "fa3 mha_one_shot": {128: ((2, 1.0), (1024, 500.0))},
        "flash_mla sparse_decode": {128: ((2, 9.0), (1024, 99.0))},
    }
    monkeypatch.setattr(timings, "TIMINGS", {(90, "mha_one_shot", "v32_fp8"): times})
    device = OLD_H200
    capability = device.capability("flash_mla", Op.SPARSE_MLA_DECODE, "v32_fp8")
    assert capability is not None
    assert capability.max_rows is not None
    lengths = [100, capability.max_rows]
    parts = partition(V32_FP8, lengths, lengths, Phase.EXTEND, device, Settings())
    assert [part.requests for part in parts] == [(0, 1)]
    assert parts[0].plan.attention is not Attention.MHA_ONE_SHOT
