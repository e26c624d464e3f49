"""SGLang's own test kit of attention backends, with the plugin's backend in the place of SGLang's.

The kit (`sglang.test.kits.attention_unittest`, in the wheels from 0.5.13 on) builds a small model, a runner and a paged
cache, lets SGLang's registry build the backend, and compares what it computes with plain torch. `plug` makes that
backend the plugin's, by the way that a server takes: the class that stands in for SGLang's, which settles its duties
with `activation.Process` when it is built. What a server has and the kit has not is supplied here, each with the
reason, and everything is undone with the test.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import unittest
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from nsa_plugin.decision.plan import Attention
from nsa_plugin.decision.shapes import Phase
from nsa_plugin.patches import sglang as ledger_data
from nsa_plugin.patches.ledger import Ledger
from nsa_plugin.settings import ResolvedSettings, Settings
from tests.backends.counted import Counted
from tests.gpu.calls import record

VERSIONS = ">=0.5.16,<0.5.24"
KIT = "sglang.test.kits.attention_unittest"
# Of the kit, those that say how much a result may differ.
MODULES = (
    f"{KIT}.attention_methods.dsa_attention",
    f"{KIT}.runner_modes.cuda_graph_decode_runner",
    f"{KIT}.runner_modes.speculative_draft_runner",
)

# SGLang's functions that end in a kernel, and whose kernel it is.
SGLANGS_OWN = {
    "_forward_fa3": "fa3",
    "_forward_flashmla_kv": "flash_mla",
    "_forward_flashmla_sparse": "flash_mla",
    "_forward_standard_mha": "dense",
    "_forward_tilelang": "tilelang",
    "_forward_trtllm": "trtllm",
    "_forward_aiter": "aiter",
}

# The kit allows 0.16 over bf16 and 0.2 over fp8, but the outputs of its little model have a mean square of 0.04² and
# seldom exceed 0.1: zeros would pass, and most wrong tokens do. Rounded to bf16 they are off by less than a thousandth,
# over fp8 keys by up to three.
ATOL = {"DSA_SPARSE_ATOL": 5e-3, "DSA_SPARSE_FP8_ATOL": 1e-2}
RTOL = {"DSA_SPARSE_RTOL": 2e-2, "DSA_SPARSE_FP8_RTOL": 2e-2}

# DeepSeek-V3.2's, where the kit's dense model has others or none.
MODEL = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": 2048}


@dataclass(frozen=True)
class Kit:
    """What the kit has of sparse attention: cases, models, and their eager runs."""

    attention: ModuleType

    def case(self, name: str) -> Any:
        """The kit's case of that name."""
        return next(case for case in self.cases() if case.name == name)

    def cases(self) -> tuple[Any, ...]:
        """All that the kit lists."""
        dense, sparse = self.attention.make_dsa_dense_fallback_cases, self.attention.make_dsa_sparse_cases
        return (*dense("dsa"), *sparse("dsa"))

    def sparse_case(self, name: str, mode: str, prefixes: tuple[int, ...], rows: tuple[int, ...] = ()) -> Any:
        """One more, as the kit's callers make them.

        Args:
            mode: name of SGLang's ForwardMode.
            prefixes, rows: tokens in the cache and new ones, of each request; no rows for a decode.
        """
        return self.attention.DSAAttentionCase(
            name=name,
            backend="dsa",
            forward_mode=self.attention.ForwardMode[mode],
            num_heads=4,
            num_kv_heads=1,
            page_size=self.attention.DSA_PAGE_SIZE,
            prefix_lens=prefixes,
            extend_lens=rows,
        )


def load() -> Kit:
    """The installed SGLang's kit; skips the test that asks for it where there is none."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("needs SGLang")
    version = _version()
    if not SpecifierSet(VERSIONS, prereleases=True).contains(version):
        pytest.skip(f"knows the kit of SGLang {VERSIONS}, not that of {version}")
    if importlib.util.find_spec("sglang.test") is None or importlib.util.find_spec("sglang.test.kits") is None:
        pytest.skip(f"this SGLang {version} was installed without sglang/test/kits")
    return Kit(importlib.import_module(MODULES[0]))


def runner_mode(name: str) -> ModuleType:
    """One of the kit's other modules, each of which imports every attention method that SGLang has."""
    return importlib.import_module(f"{KIT}.runner_modes.{name}")


def strict() -> unittest.TestCase:
    """What the kit asserts with. A case that it would skip is a failure: what cannot run here is left out before."""

    class Strict(unittest.TestCase):
        def skipTest(self, reason: Any) -> None:
            pytest.fail(f"SGLang's kit skips the case: {reason}")

    return Strict()


@dataclass
class Plugged:
    """What happened under the plugin.

    Attributes:
        plans: of every batch that was prepared, graphs' included.
        kernels: whose kernel computed attention, at every call: a library that the plugin called itself, or, as in
            `SGLANGS_OWN`, SGLang's call.
        backends: that took up their duties.
    """

    plans: Counted = field(default_factory=Counted)
    kernels: list[tuple[str, str]] = field(default_factory=list)
    backends: list[Any] = field(default_factory=list)

    def check(self, phase: Phase, provider: str, *, batches: int = 1) -> None:
        """Assert that every batch had a sparse plan for `provider`, and that its kernel is what ran.

        Args:
            batches: at least so many were prepared.
        """
        assert len(self.plans) >= batches
        for plan in self.plans:
            assert plan.phase is phase
            assert plan.attention in (Attention.SPARSE_PREFILL, Attention.SPARSE_DECODE)
            assert plan.provider == provider, plan.reasons
        caller = "plugin" if provider in ("cuda", "triton", "reference") else "sglang"
        assert set(self.kernels) == {(caller, provider)}

    def check_dense(self) -> None:
        """Assert that the one batch had a plan of dense attention, and that it is what ran."""
        assert [(plan.phase, plan.attention) for plan in self.plans] == [(Phase.EXTEND, Attention.MHA_ONE_SHOT)]
        assert set(self.kernels) == {("sglang", "dense")}

    def check_left(self, kernel: str) -> None:
        """Assert that no batch had a plan, and that SGLang ran `kernel`."""
        assert self.plans == []
        assert set(self.kernels) == {("sglang", kernel)}


def plug(monkeypatch: pytest.MonkeyPatch, kit: Kit, **settings: Any) -> Plugged:
    """Make the backends that the kit builds the plugin's, until the test ends.

    Args:
        settings: of the plugin.
    """
    from nsa_plugin.backends.sglang.startup import activation, backend, serving
    from nsa_plugin.backends.sglang.v32 import attention

    seen = Plugged()
    _complete_kit(monkeypatch, kit)
    # As a scheduler's process has it after `enter_scheduler`, whose patches the kit does not need.
    process = activation.SglangProcess(
        ledger=Ledger(engine=ledger_data.ENGINE, version=_version(), supported=ledger_data.SUPPORTED, patches=()),
        child=True,
        resolved=ResolvedSettings(Settings(enabled=True, **settings), sources={}),
    )
    monkeypatch.setattr(backend, "process", lambda: process)
    # SGLang's metrics would be asked for the ranks and keep a counter a process; the kit has neither.
    monkeypatch.setattr(serving, "ranks", lambda model_runner: {"tp_rank": 0})
    monkeypatch.setattr(serving, "metrics_of", lambda server_args, labels: seen.plans)

    def of_plugin(args: tuple[Any, ...]) -> None:
        seen.kernels.append(("plugin", args[0].route.plan.provider))

    record(monkeypatch, attention, "_attend", of_plugin)

    patch = next(patch for patch in ledger_data.PATCHES if patch.name == "sglang.backend")
    target = patch.target(_version())
    assert target is not None
    module, (name,) = importlib.import_module(target.module), target.attributes
    original = getattr(module, name)
    for function, kernel in SGLANGS_OWN.items():
        if hasattr(original, function):
            record(monkeypatch, original, function, lambda _, kernel=kernel: seen.kernels.append(("sglang", kernel)))

    class Fed(backend.make(original)):  # type: ignore[misc]
        """The plugin's class as a server builds it, given slots for positions; see `_slots`."""

        @functools.wraps(original.__init__)
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            seen.backends.append(self)

        def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            return super().forward_extend(q, k, v, layer, batch, *args, **_with_slots(self, batch, kwargs))

        def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            return super().forward_decode(q, k, v, layer, batch, *args, **_with_slots(self, batch, kwargs))

    monkeypatch.setattr(module, name, Fed)
    return seen


def _complete_kit(monkeypatch: pytest.MonkeyPatch, kit: Kit) -> None:
    original = kit.attention.TinyDSAModelConfig

    def model_config(**given: Any) -> Any:
        # The kit's dense model has an index_topk of 8 and yet contexts of up to 130 tokens, which no model attends
        # densely, and no cache that a kernel of sparse attention would read. The heads stay the kit's.
        dense = "kv_lora_rank" not in given
        config = original(**(given | MODEL | {"qk_nope_head_dim": given["head_dim"]} if dense else given))
        # Every DeepSeek configuration has it, the kit's have not.
        config.hf_config.v_head_dim = given["head_dim"] if dense else config.v_head_dim
        return config

    monkeypatch.setattr(kit.attention, "TinyDSAModelConfig", model_config)
    for name, value in (ATOL | RTOL).items():
        for module in filter(None, map(sys.modules.get, MODULES)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    # As by default, and as `_slots` takes it to be.
    monkeypatch.setenv("SGLANG_DSA_FUSE_TOPK", "1")


def _with_slots(backend: Any, batch: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    positions = arguments.get("topk_indices")
    if positions is None:
        return arguments
    return arguments | {"topk_indices": _slots(backend, batch, positions)}


def _slots(backend: Any, batch: Any, positions: torch.Tensor) -> torch.Tensor:
    """Convert positions to slots, as a server's indexer does in its top-k (SGLANG_DSA_FUSE_TOPK).

    The kit has no indexer and passes positions, which the backend reads as slots. So stock SGLang attends other tokens
    than the kit compares with, and the kit's tolerance hides it.

    Args:
        positions: [rows, topk], -1 for none.
    """
    paged = backend.get_topk_transform_method(batch.forward_mode).name == "PAGED"
    assert paged, "the kit's small batches are not copied to bf16 under a plan"
    table = backend.req_to_token[batch.req_pool_indices]
    if positions.shape[0] != table.shape[0]:
        rows = torch.tensor(batch.extend_seq_lens_cpu, device=table.device)
        table = table.repeat_interleave(rows, dim=0)
    slots = table.gather(1, positions.clamp(min=0).long())
    return torch.where(positions < 0, -1, slots).to(torch.int32)


def _version() -> Version:
    from sglang.version import __version__

    return Version(__version__)
