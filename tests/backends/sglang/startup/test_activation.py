"""Activation in a scheduler process with a GPU, on a fake SGLang."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from nsa_plugin.backends.sglang.startup import activation, backend, hooks, model, serving
from nsa_plugin.backends.sglang.startup.activation import SglangProcess
from nsa_plugin.backends.sglang.startup.flags import PassedFlags
from nsa_plugin.errors import LeftToStockError, NoProviderError, NsaPluginError, PatchError, SettingsError
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.patches import static
from nsa_plugin.patches.ledger import Ledger, Need
from nsa_plugin.settings import ENV_PREFIX
from tests.backends.fake_sglang.scheduler import HF_CONFIG, StockBackend, read, runner, scheduler, start

pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.mark.regression(28)
def test_a_sparse_model_on_a_gpu_is_checked_and_reported(
    process: SglangProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NSA_PLUGIN_REPORT", str(tmp_path / "report.json"))
    PassedFlags({"enabled": "true"}, {}).write()
    start(process, build=runner(scaled_fp8=True))
    report = read(tmp_path / "report.json")
    assert report["active"] is True
    assert report["notes"] == []
    facts = report["facts"]
    assert "2048" in facts["model"]
    assert "16 of 128 heads per rank" in facts["model"]
    assert "v32_fp8" in facts["model"]
    assert facts["prefill, 1024 of 1024 tokens"].startswith("mha_one_shot by fa3; the longest context of 1024 tokens")
    assert " by flash_mla" in facts["prefill, 4096 of 32768 tokens"]
    assert facts["warm-up"].startswith("the plugin's kernels ran once, in ")
    assert "on SGLang's path flashmla_" in facts["prefill, 4096 of 32768 tokens"]
    assert "selection by deep_gemm" in facts["prefill, 4096 of 32768 tokens"]
    assert "flash_mla" in facts["decode, 1 request"]
    assert "decode, 64 requests: sparse_decode by flash_mla" in report["text"]
    assert process.serving is not None
    assert process.serving.model.attn_tp_size == 8


def test_a_backend_of_the_plugin_takes_its_routes_from_plans(process: SglangProcess) -> None:
    PassedFlags({"enabled": "true"}, {}).write()
    process.enter_scheduler()
    plugin_backend = backend.make(StockBackend)
    target, draft = plugin_backend(runner(scaled_fp8=True)), plugin_backend(runner(scaled_fp8=True))
    assert process.serving is not None
    assert process.serving.backends == [target, draft]
    assert target.nsa_plugin.planner.trace is draft.nsa_plugin.planner.trace
    assert target.nsa_plugin.planner is not draft.nsa_plugin.planner


def test_free_memory_is_read_again_after_the_start(process: SglangProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "free_device_memory", lambda: 1)
    PassedFlags({"enabled": "true"}, {}).write()
    process.enter_scheduler()
    built = backend.make(StockBackend)(runner(scaled_fp8=True))
    built.nsa_plugin.planner.free_memory = None  # a graph of a prefill was captured
    process.leave_scheduler(scheduler())
    assert built.nsa_plugin.planner.free_memory() == 1


@pytest.mark.parametrize("strict", [True, "full"])
def test_a_draft_left_to_sglang_leaves_the_target_with_the_plugin(
    process: SglangProcess, tmp_path: Path, strict: bool | str
) -> None:
    report = tmp_path / "report.json"
    PassedFlags({"enabled": "true", "strict": str(strict), "report": str(report)}, {}).write()
    process.enter_scheduler()
    plugin_backend = backend.make(StockBackend)
    target = plugin_backend(runner(scaled_fp8=True))
    draft = runner(dtype="torch.float8_e4m3fn")  # without scales
    if strict == "full":
        with pytest.raises(LeftToStockError, match="float8_e4m3fn without scales"):
            plugin_backend(draft)
        return
    assert plugin_backend(draft).nsa_plugin is None
    assert target.nsa_plugin is not None
    process.leave_scheduler(scheduler())
    assert read(report)["active"] is True
    assert any("without scales" in reason for reason in read(report)["left_to_stock"])


@pytest.mark.parametrize("strict", [True, False])
def test_a_kernel_that_does_not_run_is_refused_at_start(
    process: SglangProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, strict: bool
) -> None:
    def broken(*arguments: Any) -> None:
        raise NoProviderError("cuda's sparse_mla_decode: it does not compile")

    monkeypatch.setattr(serving, "warm", broken)
    report = tmp_path / "report.json"
    PassedFlags({"enabled": "true", "strict": str(strict), "report": str(report)}, {}).write()
    if strict:
        with pytest.raises(NoProviderError, match="does not compile"):
            start(process, build=runner())
        return
    start(process, build=runner())
    assert read(report)["active"] is False
    assert any("the stock engine serves" in note and "does not compile" in note for note in read(report)["notes"])


def test_a_feature_left_to_sglang_is_reported(process: SglangProcess, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    PassedFlags({"enabled": "true", "report": str(report)}, {}).write()
    start(process, build=runner(enable_deterministic_inference=True))
    assert read(report)["active"] is False
    assert read(report)["left_to_stock"] == [
        "deterministic inference is on, which the plugin does not support: every batch falls back to the stock path"
    ]


def test_a_second_backend_does_not_change_the_first(process: SglangProcess) -> None:
    PassedFlags({"enabled": "true"}, {}).write()
    process.enter_scheduler()
    plugin_backend = backend.make(StockBackend)
    plugin_backend(runner(scaled_fp8=True))
    first = process.serving
    plugin_backend(runner())  # a draft model's
    assert process.serving is first


def test_the_backend_subclasses_the_engines_and_keeps_its_arguments(process: SglangProcess) -> None:
    plugin_backend = backend.make(StockBackend)
    built = plugin_backend(runner(), False, topk=7)
    assert isinstance(built, StockBackend)
    assert built.topk == 7
    assert plugin_backend.__name__ == "NsaPluginStockBackend"
    assert process.serving is None  # not enabled


def test_on_a_cpu_the_backend_says_that_it_needs_a_gpu(process: SglangProcess) -> None:
    with pytest.raises(NoProviderError, match="needs a GPU"):
        backend.make(StockBackend)(runner(device="cpu"))


@pytest.mark.regression(5, "`trtllm` on a device that lacks it")
@pytest.mark.parametrize("strict", [True, False])
def test_a_library_that_does_not_support_the_model_is_refused_at_start(
    process: SglangProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, strict: bool
) -> None:
    """trtllm on an H200 is an error before serving, not in the first batch."""
    report = tmp_path / "report.json"
    given = {"enabled": "true", "strict": str(strict), "report": str(report)}
    PassedFlags(given, {"decode_backend": ("--dsa-decode-backend", "trtllm")}).write()
    if strict:
        with pytest.raises(SettingsError, match="decode_backend"):
            start(process, build=runner())
        return
    start(process, build=runner())
    assert read(report)["active"] is False
    assert any("the stock engine serves" in n and "decode_backend" in n for n in read(report)["notes"])
    assert process.serving is None


class TrtllmBackend(StockBackend):
    """SGLang's default on SM100, and elsewhere its flags."""

    def __init__(self, model_runner: Any, skip_prefill: bool = False, topk: int = 0) -> None:
        super().__init__(model_runner, skip_prefill, topk)
        self.dsa_prefill_impl = self.dsa_decode_impl = "trtllm"


@pytest.mark.parametrize("dtype", ["torch.float8_e4m3fn", "torch.bfloat16"])
def test_sglangs_trtllm_serves_on_a_device_that_supports_it(
    process: SglangProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str
) -> None:
    """Also over an fp8 cache, which is in TRT-LLM's format; several backends give one note."""
    monkeypatch.setattr("nsa_plugin.libraries.probe.probe", lambda: synthetic(sm=100))
    PassedFlags({"enabled": "true", "report": str(tmp_path / "report.json")}, {}).write()
    process.enter_scheduler()
    for _ in range(2):
        built = backend.make(TrtllmBackend)(runner(dtype=dtype))
        assert built.nsa_plugin is None
    process.leave_scheduler(scheduler())
    report = read(tmp_path / "report.json")
    assert report["active"] is False
    assert any("trtllm" in reason for reason in report["left_to_stock"])
    assert len(report["left_to_stock"]) == len(set(report["left_to_stock"]))


def test_trtllm_over_fp8_is_refused_where_the_device_lacks_it(process: SglangProcess) -> None:
    PassedFlags({"enabled": "true"}, {"decode_backend": ("--dsa-decode-backend", "trtllm")}).write()
    process.enter_scheduler()
    with pytest.raises(NsaPluginError, match=r"--dsa-prefill-backend is trtllm, .* need SM100"):
        backend.make(TrtllmBackend)(runner(dtype="torch.float8_e4m3fn"))


@pytest.mark.regression(28)
@pytest.mark.parametrize("strict", [True, "full"])
def test_sparse_attention_by_another_backend_is_not_reported_as_the_plugins(
    process: SglangProcess, tmp_path: Path, strict: bool | str
) -> None:
    """With --attention-backend other than dsa, the report must not look as if the plugin served."""
    report = tmp_path / "report.json"
    PassedFlags({"enabled": "true", "strict": str(strict), "report": str(report)}, {}).write()
    if strict == "full":
        with pytest.raises(LeftToStockError, match="with another attention backend than dsa"):
            start(process)
        return
    start(process)
    assert read(report)["active"] is False
    assert any(reason.startswith("SGLang serves") for reason in read(report)["left_to_stock"])


def test_a_model_without_sparse_attention_is_not_changed(
    process: SglangProcess, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    PassedFlags({"enabled": "true", "report": str(tmp_path / "report.json")}, {}).write()
    with caplog.at_level(logging.INFO, "nsa_plugin"):
        start(process, config=SimpleNamespace(architectures=["LlamaForCausalLM"]))
    assert read(tmp_path / "report.json")["active"] is False
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "LlamaForCausalLM has no DeepSeek sparse attention" in caplog.text


def test_only_the_first_rank_reports(process: SglangProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    PassedFlags({"enabled": "true", "report": str(tmp_path / "report.json")}, {}).write()
    monkeypatch.setattr(activation, "_rank", lambda: 3)
    start(process, build=runner())
    assert not (tmp_path / "report.json").exists()
    assert process.serving is not None


def test_while_off_a_scheduler_starts_unchanged(process: SglangProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    start(process)
    assert process.resolved is None
    PassedFlags({"enabled": "true"}, {}).write()
    monkeypatch.setenv("NSA_PLUGIN_ENABLED", "0")
    start(process)
    assert process.resolved is None


def test_a_plugin_error_ends_a_scheduler_with_its_message_alone(
    process: SglangProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang catches Exception around a scheduler's start and kills the server with a traceback."""
    monkeypatch.setenv("NSA_PLUGIN_TARCE", "log")
    started: list[str] = []
    init = hooks.wrap_scheduler_init(lambda scheduler, server_args: started.append("engine"))
    with pytest.raises(SystemExit, match=r"nsa-plugin: error: .*'tarce'"):
        init(scheduler(), None)
    assert started == []


def test_another_error_of_a_scheduler_is_left_to_the_engine(process: SglangProcess) -> None:
    def engine_fails(scheduler: Any, server_args: Any) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        hooks.wrap_scheduler_init(engine_fails)(scheduler(), None)


def test_a_class_imported_before_the_patch_is_refused(process: SglangProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    name = "sglang.srt.layers.attention.dsa_backend"
    for part in ("sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.layers.attention", name, "sglang.other"):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    live: Any = sys.modules[name]
    live.DeepseekSparseAttnBackend = backend.make(StockBackend)
    assert StockBackend not in live.DeepseekSparseAttnBackend.__mro__[:2]  # it is not the direct base
    process._refuse_copies()
    other: Any = sys.modules["sglang.other"]
    other.Backend = StockBackend
    with pytest.raises(PatchError, match=r"sglang\.other\.Backend is still the stock StockBackend"):
        process._refuse_copies()


@pytest.mark.parametrize(
    ("scaled_fp8", "dtype", "layout"), [(False, "torch.bfloat16", "bf16"), (True, "torch.float8_e4m3fn", "v32_fp8")]
)
def test_model_shape(scaled_fp8: bool, dtype: str, layout: str) -> None:
    model_runner = runner(scaled_fp8=scaled_fp8, dtype=dtype)
    shape = model.model_shape(StockBackend(model_runner), model_runner)
    assert (shape.family, shape.kv_layout) == ("v3.2", layout)
    assert (shape.num_heads, shape.attn_tp_size, shape.heads_per_rank) == (128, 8, 16)
    assert (shape.kv_lora_rank, shape.qk_nope_head_dim, shape.qk_rope_head_dim) == (512, 128, 64)
    assert (shape.v_head_dim, shape.index_topk, shape.index_n_heads, shape.index_head_dim) == (128, 2048, 64, 128)


def test_a_cache_without_scales_is_not_supported() -> None:
    model_runner = runner(dtype="torch.float8_e4m3fn")
    with pytest.raises(LeftToStockError, match="float8_e4m3fn without scales"):
        model.model_shape(StockBackend(model_runner), model_runner)


@pytest.mark.parametrize(
    ("config", "sparse"),
    [
        ({"index_topk": 2048}, True),
        ({"index_topk": None}, False),
        ({"text_config": {"index_topk": 512}}, True),
        ({}, False),
        (HF_CONFIG, True),
        (SimpleNamespace(architectures=["LlamaForCausalLM"]), False),
    ],
)
def test_has_sparse_attention(config: Any, sparse: bool) -> None:
    assert model.has_sparse_attention(config) is sparse


@pytest.mark.parametrize("asked", [True, False])
def test_an_unsupported_engine_is_stopped_only_if_the_plugin_is_enabled(tmp_path: Path, asked: bool) -> None:
    """SGLang swallows every Exception of `register`: only SystemExit gets through."""
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "version.py").write_text("__version__ = '0.5.21'")
    program = (
        "from nsa_plugin.backends.sglang import register\n"
        "try:\n    register()\nexcept Exception as error:\n    print('swallowed', error)\n"
        "print('the engine serves')\n"
    )
    environ = {key: value for key, value in os.environ.items() if not key.startswith(ENV_PREFIX)}
    environ |= {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[4])])}
    environ |= {"NSA_PLUGIN_ENABLED": "1"} if asked else {}
    done = subprocess.run([sys.executable, "-c", program], env=environ, cwd=tmp_path, capture_output=True, text=True)
    if asked:
        assert done.returncode == 1
        assert done.stderr.startswith("nsa-plugin: error: nsa-plugin cannot apply its patch sglang.flags")
        assert done.stdout == ""
    else:
        assert (done.returncode, done.stdout) == (0, "the engine serves\n")


def test_strict_off_before_serving_warns_once(
    process: SglangProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(version: Version) -> None:
        raise PatchError("a target is gone")

    monkeypatch.setattr(activation, "_check_files", refuse)
    arguments = SimpleNamespace(model_path="m", device="cuda")
    PassedFlags({"enabled": "true", "strict": "off"}, {}).write()
    process.check_before_serving(arguments)
    process.check_before_serving(arguments)
    assert caplog.text.count("strict is off and the stock engine serves: a target is gone") == 1
    PassedFlags({"enabled": "true"}, {}).write()
    with pytest.raises(NsaPluginError, match="a target is gone"):
        process.check_before_serving(arguments)


def test_sglangs_files_are_read_once_although_its_arguments_pass_twice(
    process: SglangProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As parsed and as SGLang's object: to read the files took a second of a start, each time."""
    checked: list[str] = []

    def check(ledger: Ledger, *needs: Need) -> None:
        assert set(needs) == set(Need), "a target of V4 or of the portable path may be missing"
        checked.append(str(ledger.version))

    monkeypatch.setattr(static, "check_installed", check)
    activation._check_files.cache_clear()
    PassedFlags({"enabled": "true"}, {}).write()
    for _ in range(2):
        process.check_before_serving(SimpleNamespace(model_path="m", device="cuda"))
    activation._check_files.cache_clear()
    assert checked == ["0.5.16"]


def test_a_target_that_is_missing_is_refused_each_time(process: SglangProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "installed", lambda package: static.SourceTree(lambda path: None))
    activation._check_files.cache_clear()
    PassedFlags({"enabled": "true"}, {}).write()
    for _ in range(2):
        with pytest.raises(PatchError, match=r"cannot apply its patch sglang\.flags"):
            process.check_before_serving(SimpleNamespace(model_path="m", device="cuda"))


def test_a_trace_that_cannot_be_written_is_refused_before_serving(
    process: SglangProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(activation, "_check_files", lambda version: None)
    PassedFlags({"enabled": "true", "trace": str(tmp_path / "absent" / "t.jsonl")}, {}).write()
    with pytest.raises(SettingsError, match=r"'trace' is .*which cannot be written"):
        process.check_before_serving(SimpleNamespace(model_path="m", device="cuda"))


def test_the_users_engine_flags_are_kept_before_the_engine_fills_in_defaults(process: SglangProcess) -> None:
    process.check_before_serving(SimpleNamespace(dsa_decode_backend="flashmla_kv", dsa_prefill_backend=None))
    assert PassedFlags.read().engine == {"decode_backend": ("--dsa-decode-backend", "flashmla_kv")}


@pytest.mark.parametrize(("sm", "value"), [(100, "trtllm"), (90, None)])
def test_trtllm_as_a_setting_reaches_sglangs_arguments_on_sm100(
    process: SglangProcess,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    sm: int,
    value: str | None,
) -> None:
    """Field defect 2. The arguments pass twice, as parsed and as SGLang's object. Not run on SM100 here."""
    monkeypatch.setattr(activation, "_check_files", lambda version: None)
    monkeypatch.setattr(model, "device_sm", lambda: sm)
    PassedFlags({"enabled": "true", "decode_backend": "trtllm"}, {}).write()
    caplog.set_level(logging.INFO)
    arguments = SimpleNamespace(model_path="m", device="cuda", dsa_decode_backend=None, dsa_prefill_backend=None)
    for _ in range(2):
        process.check_before_serving(arguments)
    assert (arguments.dsa_decode_backend, arguments.dsa_prefill_backend) == (value, None)
    assert PassedFlags.read().engine == {}, "the user gave no flag of SGLang's"
    said = "a setting asks for trtllm, which SGLang runs: --dsa-decode-backend trtllm"
    assert caplog.text.count(said) == (value is not None)


def test_nothing_of_the_vllm_adapter_is_loaded() -> None:
    program = (
        "import sys\n"
        "from nsa_plugin.backends.sglang.startup import activation, backend, flags, hooks, model\n"
        "print([n for n in sys.modules if n.partition('.')[0] in ('vllm', 'sglang') or n.endswith('.vllm')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
