"""vLLM's own tests of sparse attention, with the plugin's classes in the place of vLLM's.

vLLM's wheels hold no tests; its source distribution does, and `load` takes an unpacked one. Their tests make a
`VllmConfig` of a model on the Hub, ask vLLM's backend for its classes, and compare what these compute with plain torch.
`plug` takes the way of a worker with that configuration: `activation.start_serving` checks it and applies the ledger,
`GpuServing.prepare` runs the kernels, and vLLM's backend gives the plugin's classes from then on. What a worker has and
these tests have not is supplied here, each with the reason, and everything is undone with the test.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from nsa_plugin.backends.common.fault import shifted
from nsa_plugin.decision.plan import Attention
from nsa_plugin.decision.shapes import Phase
from nsa_plugin.kernels import selector as topk_selector
from nsa_plugin.patches import vllm as ledger_data
from nsa_plugin.patches.ledger import Ledger
from tests.backends.counted import Counted
from tests.gpu.calls import record

SOURCE = "TESTS_OF_VLLM"
VERSIONS = ">=0.24,<0.25"
# By the names under which vLLM's tests import each other, those first that others import.
FILES = (
    "tests.v1.attention.utils",
    "tests.v1.attention.test_mla_backends",
    "tests.v1.attention.test_sparse_mla_backends",
    "tests.v1.attention.test_indexer_deepseek_v4_slot_mapping",
    "tests.kernels.test_top_k_per_row",
)
PAGE_SIZE = 64

# vLLM's own tests take configurations from the Hub; of this one they override what they need. DeepSeek-V3.2's.
MODEL = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "torch_dtype": "bfloat16",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "index_topk": 2048,
    "index_n_heads": 64,
    "index_head_dim": 128,
}

# How far the worst row of an output may be off, as a share of the row's own length, by --kv-cache-dtype. Over bf16
# rounding makes less than 0.001, over fp8 keys 0.003; a row of wrong tokens is off by 0.008 or more, and the worst of
# several rows by 0.025. vLLM's own tolerance is one of single numbers, of about 130: 1.3 over bf16, and over fp8 8.5,
# which a row of wrong tokens of its own request may meet.
ROW_OFF = {"auto": 0.004, "fp8_ds_mla": 0.006}
# Of dense attention the outputs are means of many tokens: where contexts are long, zeros meet vLLM's tolerance of 0.5.
# Rounding makes 0.004 of them, and over fp8, for whose keys vLLM's test has no reference, 0.034.
DENSE_ROW_OFF = {"auto": 0.02, "fp8_ds_mla": 0.06}


@dataclass(frozen=True)
class Own:
    """vLLM's test modules."""

    utils: ModuleType
    mla: ModuleType
    sparse: ModuleType
    slots: ModuleType
    topk: ModuleType

    def parameters(self, test: Callable[..., Any]) -> dict[str, list[Any]]:
        """What a test of vLLM's is parametrised with."""
        marks = [mark for mark in test.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
        return {mark.args[0]: list(mark.args[1]) for mark in marks if isinstance(mark.args[0], str)}


def load() -> Own:
    """The tests of the installed vLLM; skips the test that asks for them where they are not there."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM")
    version = _version()
    if not SpecifierSet(VERSIONS, prereleases=True).contains(version):
        pytest.skip(f"knows the tests of vLLM {VERSIONS}, not those of {version}")
    how = f"unpack tests/ and PKG-INFO of the source distribution vllm-{version.base_version}.tar.gz from PyPI"
    if not os.environ.get(SOURCE):
        pytest.skip(f"needs vLLM's own tests: {how}, and name the folder in {SOURCE}")
    source = Path(os.environ[SOURCE])
    if not (source / "PKG-INFO").is_file():
        pytest.fail(f"{SOURCE} is {source}, which has no PKG-INFO: {how}")
    found = re.search(r"^Version: (\S+)$", (source / "PKG-INFO").read_text(encoding="utf-8"), re.MULTILINE)
    if found is None or Version(found[1]).base_version != version.base_version:
        pytest.skip(f"{SOURCE} has the tests of vLLM {found and found[1]}, and {version} is installed: {how}")
    return Own(**dict(zip(("utils", "mla", "sparse", "slots", "topk"), map(_module(source), FILES), strict=True)))


def _module(source: Path) -> Callable[[str], ModuleType]:
    def module(name: str) -> ModuleType:
        """By its file: the package `tests` of this process may be another one."""
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, source.joinpath(*name.split(".")).with_suffix(".py"))
            assert spec is not None
            assert spec.loader is not None
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        return sys.modules[name]

    return module


def _version() -> Version:
    import vllm

    return Version(vllm.__version__)


class Worker:
    """What a serving asks of vLLM's worker."""

    rank = 0

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config


@dataclass
class Plugged:
    """What happened under the plugin.

    Attributes:
        settings: of the plugin.
        config: vLLM's, of the running test.
        process: the plugin's state; of a worker that serves once `start` has been called.
        plans: of every part of every batch.
        kernels: whose kernel computed attention, at every call: (plugin or vllm, library).
        own_topk: calls of top-k that the plugin's kernel answered.
    """

    settings: dict[str, Any]
    config: Any = None
    worker: Worker | None = None
    process: Any = None
    plans: Counted = field(default_factory=Counted)
    kernels: list[tuple[str, str]] = field(default_factory=list)
    own_topk: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def planner(self) -> Any:
        return self.process.serving.planning()

    def start(self) -> None:
        """Serve vLLM's configuration, which is complete, as a worker would."""
        from vllm.platforms import current_platform

        from nsa_plugin.backends.vllm.startup import activation

        config, text = self.config.model_config, self.config.model_config.hf_text_config
        heads = config.get_num_attention_heads(self.config.parallel_config)
        given = {"num_attention_heads": heads, "index_topk": config.hf_config.index_topk}
        # vLLM's test puts a namespace there that has of the model only what its own classes read.
        for name, value in (MODEL | given).items():
            if name in given or not hasattr(text, name):
                setattr(text, name, value)
        self.config.additional_config = {activation.CONFIG_KEY: {"enabled": True, **self.settings}}
        serving: Any = activation.start_serving(self.config)
        self.worker = Worker(self.config)
        serving.enter(self.worker)
        serving.metrics = self.plans
        serving.prepare(torch.device(current_platform.device_type))
        serving.settle()

    def stop(self) -> None:
        self.process.serving = None
        self.process.ledger.undo()

    def check(self, phases: set[Phase], provider: str | None = None, *, rows_dense: bool = False) -> None:
        """Assert that parts of these phases were planned, for these libraries, and that these are what ran.

        Args:
            provider: every sparse part's; None: whichever the plans name.
            rows_dense: the prefills attend densely, else nothing does.
        """
        assert {plan.phase for plan in self.plans} == phases
        wanted = set()
        for plan in self.plans:
            dense = plan.attention is Attention.MHA_ONE_SHOT
            assert dense == (rows_dense and plan.phase is Phase.EXTEND), plan.reasons
            if provider is not None and not dense:
                assert plan.provider == provider, plan.reasons
            caller = "vllm" if plan.provider == "flash_mla" else "plugin"
            wanted.add((caller, f"dense {plan.provider}" if dense else plan.provider))
        assert set(self.kernels) == wanted


def plug(monkeypatch: pytest.MonkeyPatch, own: Own, folder: Path, *, drafts: int = 0, **settings: Any) -> Plugged:
    """Make the classes that vLLM's backend gives the plugin's, from `Plugged.start` to `Plugged.stop`.

    Args:
        folder: an empty one.
        drafts: speculated tokens of a request.
        settings: of the plugin.
    """
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseImpl

    from nsa_plugin.backends.vllm.startup import activation
    from nsa_plugin.backends.vllm.v32 import attention as gpu_attention
    from nsa_plugin.backends.vllm.v32 import indexer as gpu_indexer
    from nsa_plugin.backends.vllm.v32 import patches as gpu_patches

    seen = Plugged(settings)
    ledger = Ledger(
        engine=ledger_data.ENGINE, version=_version(), supported=ledger_data.SUPPORTED, patches=ledger_data.PATCHES
    )
    seen.process = activation.VllmProcess(ledger)
    for module in (activation, gpu_patches):
        monkeypatch.setattr(module, "process", lambda: seen.process)
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")

    make_config = own.utils.create_vllm_config

    def create_vllm_config(*_: Any, model_name: str = "", **kwargs: Any) -> Any:
        seen.config = make_config(model_name=str(folder), **kwargs)
        if drafts:
            from vllm.config import SpeculativeConfig

            seen.config.speculative_config = SpeculativeConfig(method="ngram", num_speculative_tokens=drafts)
        return seen.config

    for module in (own.sparse, own.mla, own.slots):
        monkeypatch.setattr(module, "create_vllm_config", create_vllm_config)

    # What both tests of attention ask for last before they ask vLLM's backend for its classes.
    prepopulate = own.mla.create_and_prepopulate_kv_cache

    def create_and_prepopulate_kv_cache(*args: Any, **kwargs: Any) -> Any:
        seen.start()
        return prepopulate(*args, **kwargs)

    for module in (own.sparse, own.mla):
        monkeypatch.setattr(module, "create_and_prepopulate_kv_cache", create_and_prepopulate_kv_cache)

    def of_plugin(args: tuple[Any, ...]) -> None:
        seen.kernels.append(("plugin", args[4].provider))

    def dense_of_plugin(args: tuple[Any, ...]) -> None:
        seen.kernels.append(("plugin", f"dense {args[4].plan.provider}"))

    record(monkeypatch, gpu_attention, "_by_provider", of_plugin)
    record(monkeypatch, gpu_attention, "_dense", dense_of_plugin)
    for function in ("_bf16_flash_mla_kernel", "_fp8_flash_mla_kernel"):
        record(monkeypatch, FlashMLASparseImpl, function, lambda args: seen.kernels.append(("vllm", "flash_mla")))

    selector = topk_selector.default_selector

    def default_selector(device: torch.device, topk: int) -> Callable[..., Any]:
        select = selector(device, topk)

        @functools.wraps(select)
        def selecting(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            seen.own_topk.append(tuple(logits.shape))
            return select(logits, *args, **kwargs)

        return selecting

    monkeypatch.setattr(gpu_indexer, "default_selector", default_selector)
    return seen


def attend(
    own: Own, monkeypatch: pytest.MonkeyPatch, batch: str, cache: str, ranks: int, scales: Any = (1.0, 1.0)
) -> None:
    """vLLM's test of a sparse backend, over FlashMLA's.

    Args:
        batch: name of one of vLLM's batches.
        cache: --kv-cache-dtype, as vLLM's test has it.
        ranks: that share 128 heads.
        scales: of queries and keys.
    """
    monkeypatch.setitem(own.sparse.SPARSE_BACKEND_BATCH_SPECS, batch, batch_of(own, batch))
    _stricter(monkeypatch, ROW_OFF[cache])
    _run(
        own.sparse.test_sparse_backend_decode_correctness,
        default_vllm_config=None,
        dist_init=None,
        backend_cls=own.sparse.FlashMLASparseBackend,
        batch_name=batch,
        kv_cache_dtype=cache,
        tensor_parallel_size=ranks,
        block_size=PAGE_SIZE,
        workspace_init=None,
        q_scale=scales[0],
        k_scale=scales[1],
    )


def batch_of(own: Own, name: str) -> Any:
    """The requests of one of vLLM's batches: their `seq_lens` and `query_lens`."""
    return {**own.mla.BATCH_SPECS, **own.sparse.SPARSE_BACKEND_BATCH_SPECS}[name]


def _stricter(monkeypatch: pytest.MonkeyPatch, most: float) -> None:
    close = torch.testing.assert_close

    def assert_close(actual: torch.Tensor, expected: torch.Tensor, **tolerance: Any) -> None:
        close(actual, expected, **tolerance)
        off = worst_row(actual, expected)
        assert off <= most, f"not close: a row is off by {off:.4f} of its length, and {most} is allowed"

    monkeypatch.setattr(torch.testing, "assert_close", assert_close)


def worst_row(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """How far the worst row is off, as a share of the expected one's length; rows of [rows, heads * v_head_dim]."""
    return float(((actual.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)).max())


def attend_all(own: Own, monkeypatch: pytest.MonkeyPatch, folder: Path, batch: str, cache: str, ranks: int) -> None:
    """vLLM's test of dense MLA backends, with FlashMLA's sparse one for a backend that has selected all tokens.

    Args:
        folder: the one that `plug` was given.
        batch: name of one of vLLM's batches, of no more tokens a request than the model selects.
        cache: --kv-cache-dtype; vLLM's test has no fp8_ds_mla, which its functions support.
        ranks: that share 128 heads.
    """
    from vllm.v1.attention.backends.mla.prefill import MLAPrefillBackendEnum
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backend = AttentionBackendEnum.FLASHMLA_SPARSE
    monkeypatch.setattr(own.mla, "BACKENDS_TO_TEST", [backend])
    monkeypatch.setattr(own.mla, "SPEC_DECODE_BACKENDS", [backend])
    monkeypatch.setattr(own.mla, "BACKEND_BLOCK_SIZES", {backend: PAGE_SIZE})
    requests = batch_of(own, batch)
    everything = _everything(requests.seq_lens, requests.query_lens, own.mla.DEVICE_TYPE)

    def classes(asked: Any) -> tuple[type, Callable[..., Any]]:
        found = asked.get_class()
        builder = found.get_builder_cls()
        # Of vLLM's layer that runs, the plugin asks for its weights; vLLM lists the layer after it has made the class.
        return builder, functools.partial(found.get_impl_cls(), topk_indices_buffer=everything)

    monkeypatch.setattr(own.mla, "try_get_attention_backend", classes)
    allclose = torch.allclose

    def stricter(actual: torch.Tensor, expected: torch.Tensor, **tolerance: Any) -> bool:
        return allclose(actual, expected, **tolerance) and worst_row(actual, expected) <= DENSE_ROW_OFF[cache]

    monkeypatch.setattr(torch, "allclose", stricter)
    _run(
        own.mla.test_backend_correctness,
        default_vllm_config=None,
        dist_init=None,
        workspace_init=None,
        batch_spec_name=batch,
        model=str(folder),
        tensor_parallel_size=ranks,
        kv_cache_dtype=cache,
        q_scale=1.0,
        k_scale=1.0,
        prefill_backend=MLAPrefillBackendEnum.FLASH_ATTN,
    )


def _everything(kv_lens: list[int], q_lens: list[int], device: str) -> torch.Tensor:
    """int32 [rows, index_topk]: for every row all positions up to its own."""
    last = torch.cat([torch.arange(kv - q, kv) for kv, q in zip(kv_lens, q_lens, strict=True)])
    positions = torch.arange(int(MODEL["index_topk"]))  # type: ignore[call-overload]
    return torch.where(positions <= last[:, None], positions, -1).int().to(device)


def shift_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault `shift_indices`, but that the wrong tokens are of the row's own request.

    The fault halves slots where a kernel of the plugin runs, and these may hold nothing.
    """
    from nsa_plugin.backends.vllm.v32 import attention as gpu_attention

    slots = gpu_attention._slots

    def wrong(impl: Any, selected: torch.Tensor, *given: Any) -> torch.Tensor:
        return slots(impl, shifted(selected), *given)

    monkeypatch.setattr(gpu_attention, "_slots", wrong)


def shift_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault `shift_indices` for dense attention: other tokens of the cache than the contexts'."""
    from nsa_plugin.backends.vllm.v32 import attention as gpu_attention

    dense = gpu_attention._dense

    def wrong(impl: Any, q: Any, latent: Any, kv_cache: Any, piece: Any) -> torch.Tensor:
        return dense(impl, q, latent, kv_cache, replace(piece, slots=shifted(piece.slots)))

    monkeypatch.setattr(gpu_attention, "_dense", wrong)


def select(own: Own, monkeypatch: pytest.MonkeyPatch, rows: int, topk: int, clean: bool) -> None:
    """vLLM's test of the top-k of a prefill's logits, through the function that vLLM's indexer calls."""
    from vllm import _custom_ops

    class Operators:
        """`torch`, but for the one operator."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        class ops:
            class _C:
                # Looked up at the call: the ledger has replaced it by then.
                top_k_per_row_prefill = staticmethod(lambda *args: _custom_ops.top_k_per_row_prefill(*args))

    monkeypatch.setattr(own.topk, "torch", Operators())
    try:
        _run(own.topk.test_top_k_per_row, num_rows=rows, top_k=topk, clean_logits=clean)
    finally:
        torch.set_default_device(None)


def _run(test: Callable[..., None], **arguments: Any) -> None:
    """A test of vLLM's. A case that it would skip is a failure: what cannot run here is left out before."""
    try:
        test(**arguments)
    except pytest.skip.Exception as reason:
        pytest.fail(f"vLLM's test skips the case: {reason}")
