"""From installed to serving, with stand-ins for SGLang's objects: what a scheduler with a GPU would do."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from nsa_plugin.backends.sglang import activation, backend, hooks, model
from nsa_plugin.backends.sglang.activation import Process
from nsa_plugin.backends.sglang.flags import CARRIER, Carried
from nsa_plugin.devices import synthetic
from nsa_plugin.errors import NoProviderError, NsaPluginError, PatchError, SettingsError, ShapeError
from nsa_plugin.patches import sglang as data
from nsa_plugin.patches.ledger import Ledger
from nsa_plugin.settings import ENV_PREFIX

HF_CONFIG = SimpleNamespace(
    architectures=["DeepseekV32ForCausalLM"],
    num_attention_heads=128,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    index_topk=2048,
    index_n_heads=64,
    index_head_dim=128,
)


class StockBackend:
    """As SGLang's, as far as the plugin looks at it."""

    def __init__(self, model_runner: Any, skip_prefill: bool = False, topk: int = 0) -> None:
        self.num_q_heads = 16
        self.dsa_kv_cache_store_fp8 = model_runner.scaled_fp8
        self.topk = topk


def runner(*, device: str = "cuda", scaled_fp8: bool = False, dtype: str = "torch.bfloat16") -> SimpleNamespace:
    return SimpleNamespace(
        device=device,
        scaled_fp8=scaled_fp8,
        kv_cache_dtype=dtype,
        model_config=SimpleNamespace(num_attention_heads=128, hf_config=HF_CONFIG, hf_text_config=HF_CONFIG),
    )


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [key for key in os.environ if key.startswith(ENV_PREFIX) or key == CARRIER]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(CARRIER, "")  # so that what a test writes there is taken back


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    """The plugin in a scheduler process on an H200, with no patches to apply."""
    ledger = Ledger(engine="sglang", version=Version("0.5.16"), supported=data.SUPPORTED, patches=())
    this = Process(ledger=ledger, child=True)
    monkeypatch.setattr(backend, "process", lambda: this)
    monkeypatch.setattr(hooks, "process", lambda: this)
    monkeypatch.setattr(activation, "probe", lambda: synthetic(sm=90, libraries=("flash_mla", "fa3", "deep_gemm")))
    monkeypatch.setattr(Process, "_refuse_copies", lambda self: None)
    return this


def scheduler(config: Any = HF_CONFIG) -> SimpleNamespace:
    return SimpleNamespace(model_config=SimpleNamespace(hf_config=config))


def start(process: Process, config: Any = HF_CONFIG, build: SimpleNamespace | None = None) -> None:
    """What happens in a scheduler process, in its order."""
    process.enter_scheduler()
    if build is not None:
        backend.make(StockBackend)(build, topk=4)
    process.leave_scheduler(scheduler(config))


def read(report: Path) -> dict[str, Any]:
    return dict(json.loads(report.read_text()))


def test_a_sparse_model_on_a_gpu_is_checked_and_reported(
    process: Process, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NSA_PLUGIN_REPORT", str(tmp_path / "report.json"))
    Carried({"enabled": "true"}, {}).write()
    start(process, build=runner(scaled_fp8=True))
    report = read(tmp_path / "report.json")
    assert report["active"] is False  # the attention is still SGLang's own, and the report does not hide it
    assert activation.NOT_YET in report["notes"]
    assert "2048" in report["facts"]["model"]
    assert "16 heads a rank of 128" in report["facts"]["model"]
    assert "v32_fp8" in report["facts"]["model"]
    assert process.serving is not None
    assert process.serving.model.attn_tp_size == 8


def test_the_second_backend_of_a_process_does_not_change_what_is_served(process: Process) -> None:
    Carried({"enabled": "true"}, {}).write()
    process.enter_scheduler()
    plugin_backend = backend.make(StockBackend)
    plugin_backend(runner(scaled_fp8=True))
    first = process.serving
    plugin_backend(runner())  # a draft model's
    assert process.serving is first


def test_the_backend_is_the_engine_s_own_with_its_arguments(process: Process) -> None:
    plugin_backend = backend.make(StockBackend)
    built = plugin_backend(runner(), False, topk=7)
    assert isinstance(built, StockBackend)
    assert built.topk == 7
    assert plugin_backend.__name__ == "NsaPluginStockBackend"
    assert process.serving is None  # not enabled


def test_on_a_cpu_the_backend_says_that_it_needs_a_gpu(process: Process) -> None:
    with pytest.raises(NoProviderError, match="needs a GPU"):
        backend.make(StockBackend)(runner(device="cpu"))


@pytest.mark.parametrize("strict", [True, False])
def test_a_library_that_cannot_carry_the_model_is_refused_at_start(
    process: Process, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, strict: bool
) -> None:
    """trtllm on an H200: an error before serving, not in the first batch."""
    report = tmp_path / "report.json"
    given = {"enabled": "true", "strict": str(strict), "report": str(report)}
    Carried(given, {"decode_backend": ("--dsa-decode-backend", "trtllm")}).write()
    if strict:
        with pytest.raises(SettingsError, match="decode_backend"):
            start(process, build=runner())
        return
    start(process, build=runner())
    assert read(report)["active"] is False
    assert any("the stock engine serves" in n and "decode_backend" in n for n in read(report)["notes"])
    assert process.serving is None


@pytest.mark.parametrize("strict", [True, False])
def test_sparse_attention_by_another_backend_is_not_taken_for_the_plugin_s(
    process: Process, tmp_path: Path, strict: bool
) -> None:
    """--attention-backend other than dsa, or DeepSeek-V4: refusing must not look like running."""
    report = tmp_path / "report.json"
    Carried({"enabled": "true", "strict": str(strict), "report": str(report)}, {}).write()
    if strict:
        with pytest.raises(PatchError, match="not by SGLang's backend dsa"):
            start(process)
        return
    start(process)
    assert read(report)["active"] is False


def test_a_model_without_sparse_attention_is_left_alone(
    process: Process, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    Carried({"enabled": "true", "report": str(tmp_path / "report.json")}, {}).write()
    with caplog.at_level(logging.INFO, "nsa_plugin"):
        start(process, config=SimpleNamespace(architectures=["LlamaForCausalLM"]))
    assert read(tmp_path / "report.json")["active"] is False
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "LlamaForCausalLM has no DeepSeek sparse attention" in caplog.text


def test_only_the_first_rank_reports(process: Process, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Carried({"enabled": "true", "report": str(tmp_path / "report.json")}, {}).write()
    monkeypatch.setattr(activation, "_rank", lambda: 3)
    start(process, build=runner())
    assert not (tmp_path / "report.json").exists()
    assert process.serving is not None


def test_while_it_is_off_a_scheduler_passes_through(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    start(process)
    assert process.resolved is None
    Carried({"enabled": "true"}, {}).write()
    monkeypatch.setenv("NSA_PLUGIN_ENABLED", "0")
    start(process)
    assert process.resolved is None


def test_an_error_of_the_plugin_leaves_a_scheduler_as_a_plain_message(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang catches Exception around a scheduler's start and kills the server with a traceback."""
    monkeypatch.setenv("NSA_PLUGIN_TARCE", "log")
    started: list[str] = []
    init = hooks.wrap_scheduler_init(lambda scheduler, server_args: started.append("engine"))
    with pytest.raises(SystemExit, match=r"nsa-plugin: error: .*'tarce'"):
        init(scheduler(), None)
    assert started == []


def test_another_error_of_a_scheduler_is_left_to_the_engine(process: Process) -> None:
    def engine_fails(scheduler: Any, server_args: Any) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        hooks.wrap_scheduler_init(engine_fails)(scheduler(), None)


def test_a_copy_of_the_class_that_was_taken_before_is_refused(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    name = "sglang.srt.layers.attention.dsa_backend"
    for part in ("sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.layers.attention", name, "sglang.other"):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    live: Any = sys.modules[name]
    live.DeepseekSparseAttnBackend = backend.make(StockBackend)
    process._refuse_copies()
    other: Any = sys.modules["sglang.other"]
    other.Backend = StockBackend
    with pytest.raises(PatchError, match=r"sglang\.other\.Backend is still SGLang's own StockBackend"):
        process._refuse_copies()


@pytest.mark.parametrize(
    ("scaled_fp8", "dtype", "layout"),
    [(False, "torch.bfloat16", "bf16"), (True, "torch.float8_e4m3fn", "v32_fp8")],
)
def test_model_shape(scaled_fp8: bool, dtype: str, layout: str) -> None:
    model_runner = runner(scaled_fp8=scaled_fp8, dtype=dtype)
    shape = model.model_shape(StockBackend(model_runner), model_runner)
    assert (shape.family, shape.kv_layout) == ("v3.2", layout)
    assert (shape.num_heads, shape.attn_tp_size, shape.heads_per_rank) == (128, 8, 16)
    assert (shape.kv_lora_rank, shape.qk_nope_head_dim, shape.qk_rope_head_dim) == (512, 128, 64)
    assert (shape.v_head_dim, shape.index_topk, shape.index_n_heads, shape.index_head_dim) == (128, 2048, 64, 128)


def test_a_cache_without_scales_is_no_layout_of_the_plugin() -> None:
    model_runner = runner(dtype="torch.float8_e4m3fn")
    with pytest.raises(ShapeError, match="float8_e4m3fn without scales"):
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
def test_an_engine_that_the_plugin_cannot_read_is_stopped_only_if_it_is_asked_for(tmp_path: Path, asked: bool) -> None:
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
    environ |= {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])}
    environ |= {"NSA_PLUGIN_ENABLED": "1"} if asked else {}
    done = subprocess.run([sys.executable, "-c", program], env=environ, cwd=tmp_path, capture_output=True, text=True)
    if asked:
        assert done.returncode == 1
        assert done.stderr.startswith("nsa-plugin: error: nsa-plugin cannot apply its patch sglang.flags")
        assert done.stdout == ""
    else:
        assert (done.returncode, done.stdout) == (0, "the engine serves\n")


def test_strict_off_before_serving_is_a_warning_said_once(
    process: Process, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(version: Version) -> None:
        raise PatchError("a target is gone")

    monkeypatch.setattr(activation, "_check_files", refuse)
    arguments = SimpleNamespace(model_path="m", device="cuda")
    Carried({"enabled": "true", "strict": "off"}, {}).write()
    process.check_before_serving(arguments)
    process.check_before_serving(arguments)
    assert caplog.text.count("strict is off and the stock engine serves: a target is gone") == 1
    Carried({"enabled": "true"}, {}).write()
    with pytest.raises(NsaPluginError, match="a target is gone"):
        process.check_before_serving(arguments)


def test_what_the_user_gave_to_the_engine_is_kept_before_the_engine_fills_in_the_rest(process: Process) -> None:
    process.check_before_serving(SimpleNamespace(dsa_decode_backend="flashmla_kv", dsa_prefill_backend=None))
    assert Carried.read().engine == {"decode_backend": ("--dsa-decode-backend", "flashmla_kv")}


def test_nothing_of_the_vllm_adapter_is_loaded() -> None:
    program = (
        "import sys\n"
        "from nsa_plugin.backends.sglang import activation, backend, flags, hooks, model\n"
        "print([n for n in sys.modules if n.partition('.')[0] in ('vllm', 'sglang') or n.endswith('.vllm')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
