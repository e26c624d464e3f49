"""The trial of SM120 libraries at start: what passes stays, what fails is taken out of the profile with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from nsa_plugin.backends.common import trial
from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.decision.dispatch import decide
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.libraries.capabilities import SPARSE_OPS, Op
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.settings import Settings

MODEL = ModelShape(num_heads=4, attn_tp_size=1, index_n_heads=32, kv_layout="v32_fp8")
CPU = torch.device("cpu")


class References(Providers):
    """Every provider is the reference; of those in `wrong` the result is changed."""

    wrong: dict[str, Callable[[Any], Any]]

    def load(self, op: str, name: str) -> Callable[..., Any]:
        found = self.registry.load(op, "reference")
        change = self.wrong.get(f"{name} {op}")

        def call(*args: Any, **given: Any) -> Any:
            given.pop("max_len", None)
            result = found(*args, **given)
            return result if change is None else change(result)

        return call


@pytest.fixture
def providers() -> References:
    made = References("v32_fp8", 120, helpers="reference")
    made.wrong = {}
    return made


def test_libraries_that_agree_with_the_plugin_are_kept(providers: References) -> None:
    device = synthetic(120)
    assert trial.tried(device, MODEL, providers, CPU) is device


def test_only_sm120_is_tried(providers: References) -> None:
    providers.wrong = {f"{name} {op}": lambda result: 1 / 0 for name in trial.TRIED for op in SPARSE_OPS}
    for sm in (86, 90, 100):
        device = synthetic(sm)
        assert trial.tried(device, MODEL, providers, CPU) is device


def raising(result: Any) -> Any:
    raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize(
    ("library", "op", "change", "reason"),
    [
        ("flashinfer_sm120", "sparse_mla_prefill", raising, "no kernel image"),
        ("flashinfer_sm120", "sparse_mla_prefill", lambda r: r._replace(out=r.out * 1.1), "prefill differs by 0.0"),
        (
            "flashinfer_sm120",
            "sparse_mla_decode",
            lambda r: r._replace(out=r.out * float("nan")),
            "decode differs by nan",
        ),
        ("deep_gemm", "indexer_topk", lambda r: r.flip(0), "a selection has"),
        ("deep_gemm", "indexer_topk_paged", lambda r: r - 1, "a selection has"),
        ("deep_gemm", "indexer_topk_paged", raising, "no kernel image"),
    ],
)
def test_a_library_that_fails_is_not_used(
    providers: References, library: str, op: str, change: Callable[[Any], Any], reason: str
) -> None:
    providers.wrong = {f"{library} {op}": change}
    device = trial.tried(synthetic(120), MODEL, providers, CPU)
    failed = device.libraries[library]
    assert not failed.available
    assert reason in failed.reason
    assert [name for name in trial.TRIED if not device.libraries[name].available] == [library]
    served = replace(MODEL, num_heads=128, attn_tp_size=8)
    batch = BatchShape.from_lengths(Phase.DECODE, [1], [8192])
    plan = decide(served, batch, device, Settings())
    if library == "deep_gemm":
        assert plan.indexer.provider == "triton"
        assert failed.reason in plan.reasons["indexer.provider"]
    else:
        assert plan.provider == "cuda"
        assert failed.reason in plan.reasons["provider"]


def test_each_library_is_tried_with_what_it_serves() -> None:
    device = synthetic(120)
    for name, ops in trial.TRIED.items():
        assert {kernel.op for kernel in device.libraries[name].capabilities} - {Op.INDEXER_METADATA} == set(ops)
