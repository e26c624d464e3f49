"""SM120, where the plugin sets SGLang's flags for the paths that the portable path extends."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from nsa_plugin.backends.common import trial
from nsa_plugin.backends.sglang.startup import activation, backend, flags, model, serving
from nsa_plugin.backends.sglang.startup.activation import SglangProcess
from nsa_plugin.backends.sglang.startup.flags import PassedFlags
from nsa_plugin.decision.dispatch import decide
from nsa_plugin.decision.shapes import BatchShape, Phase
from nsa_plugin.errors import LeftToStockError, SettingsError
from nsa_plugin.libraries.devices import synthetic
from tests.backends.fake_sglang.scheduler import picking, runner, scheduler, start

V32 = {"index_topk": 2048, "architectures": ["DeepseekV32ForCausalLM"]}
GLM = {"index_topk": 2048, "architectures": ["GlmMoeDsaForCausalLM"]}
PACKED = {"dsa_prefill_backend": "flashmla_kv", "dsa_decode_backend": "flashmla_kv"}
ROWS = {"dsa_prefill_backend": "flashmla_sparse", "dsa_decode_backend": "fa3"}
NONE: dict[str, Any] = dict.fromkeys(PACKED)


def arguments(**more: Any) -> SimpleNamespace:
    """SGLang's, as a user may give them."""
    given = {"model_path": "checkpoint", "device": "cuda", "use_ray": False, "kv_cache_dtype": "auto"}
    return SimpleNamespace(**given | NONE | more)


def chosen(server_args: SimpleNamespace) -> dict[str, Any]:
    return {name: getattr(server_args, name) for name in PACKED}


@pytest.fixture(autouse=True)
def sm120(clean_environment: None, process: SglangProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang 0.5.23 on an RTX PRO 6000."""
    process.ledger.version = Version("0.5.23")
    monkeypatch.setattr(model, "device_sm", lambda: 120)
    monkeypatch.setattr(activation, "_check_files", lambda version: None)
    configured(monkeypatch, V32)
    PassedFlags({"enabled": "true"}, {}).write()


def configured(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]) -> None:
    monkeypatch.setattr("transformers.PretrainedConfig.get_config_dict", lambda *given, **more: (config, {}))


@pytest.mark.parametrize(
    ("config", "given", "expected"),
    [
        (V32, {}, PACKED),  # SGLang makes an fp8 cache of `auto` there
        (V32, {"kv_cache_dtype": "fp8_e4m3"}, PACKED),
        (V32, {"kv_cache_dtype": "bfloat16"}, ROWS),
        (V32, {"kv_cache_dtype": "bf16"}, ROWS),
        (GLM, {"kv_cache_dtype": "bfloat16"}, ROWS),
        # What SGLang serves by itself, or would not with these paths.
        (GLM, {}, NONE),
        (GLM, {"kv_cache_dtype": "fp8_e4m3"}, NONE),
        (V32, {"kv_cache_dtype": "fp8_e5m2"}, NONE),
        (V32, {"enable_hisparse": True}, NONE),
        (V32, {"dcp_size": 2}, NONE),
        (V32 | {"learnable_sink": True}, {"kv_cache_dtype": "bfloat16"}, NONE),
        (V32 | {"architectures": ["DeepseekV4ForCausalLM"]}, {}, NONE),
        (V32 | {"architectures": None}, {"kv_cache_dtype": None, "dcp_size": 1}, PACKED),
        ({"architectures": ["LlamaForCausalLM"]}, {}, NONE),
    ],
)
def test_the_flags_are_set_where_sglang_has_no_kernels(
    process: SglangProcess,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    given: dict[str, Any],
    expected: dict[str, Any],
) -> None:
    configured(monkeypatch, config)
    server_args = arguments(**given)
    process.check_before_serving(server_args)
    assert chosen(server_args) == expected


def test_they_are_said_once_and_do_not_count_as_the_users(
    process: SglangProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(activation.logger, "propagate", True)
    server_args = arguments()
    with caplog.at_level(logging.INFO, "nsa_plugin"):
        for _ in range(2):  # as parsed and as SGLang's object
            process.check_before_serving(server_args)
    assert [one.getMessage() for one in caplog.records] == [
        f"nsa-plugin: the portable path on SM120 extends --dsa-{phase}-backend flashmla_kv"
        for phase in ("prefill", "decode")
    ]
    assert PassedFlags.read().engine == {}


def test_the_users_flag_stays(process: SglangProcess) -> None:
    server_args = arguments(dsa_prefill_backend="triton_sparse_mla")
    for _ in range(2):
        process.check_before_serving(server_args)
    assert chosen(server_args) == PACKED | {"dsa_prefill_backend": "triton_sparse_mla"}
    assert PassedFlags.read().engine == {"prefill_backend": ("--dsa-prefill-backend", "triton_sparse_mla")}


def test_a_later_server_s_flag_is_its_users(process: SglangProcess) -> None:
    for _ in range(3):
        server_args = arguments()
        process.check_before_serving(server_args)
        process.check_before_serving(server_args)
        assert PassedFlags.read().engine == {}
    process.check_before_serving(arguments(dsa_decode_backend="triton_sparse_mla"))
    assert PassedFlags.read().engine == {"decode_backend": ("--dsa-decode-backend", "triton_sparse_mla")}


def test_arguments_without_the_flags_stay_without(process: SglangProcess) -> None:
    server_args = arguments()
    for name in PACKED:
        delattr(server_args, name)
    process.check_before_serving(server_args)
    assert not any(hasattr(server_args, name) for name in PACKED)


def test_a_server_that_the_plugin_leaves_keeps_its_flags(
    process: SglangProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    server_args = arguments(use_ray=True)
    process.check_before_serving(server_args)
    assert chosen(server_args) == NONE

    def unreadable(*given: Any, **more: Any) -> Any:
        raise OSError("no such checkpoint")

    monkeypatch.setattr("transformers.PretrainedConfig.get_config_dict", unreadable)
    process.check_before_serving(server_args := arguments())
    assert chosen(server_args) == NONE


@pytest.mark.parametrize("revision", [None, "v2"])
def test_the_configuration_is_that_of_the_revision_which_is_served(
    monkeypatch: pytest.MonkeyPatch, revision: str | None
) -> None:
    """Two revisions of a model may differ in whether they have sparse attention."""
    asked: list[tuple[str, str | None]] = []

    def configured(path: str, *, revision: str | None = None) -> Any:
        asked.append((path, revision))
        return {"index_topk": 2048}, {}

    monkeypatch.setattr("transformers.PretrainedConfig.get_config_dict", configured)
    assert model.is_sparse(SimpleNamespace(model_path="name/model", revision=revision))
    assert asked == [("name/model", revision)]


@pytest.mark.parametrize("path", ["flashmla_kv", "flashmla_auto"])
def test_the_user_may_give_the_paths_that_are_extended(
    process: SglangProcess, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    for name in ("warm_portable", "warm_dense", "warm", "_warm_selection"):
        monkeypatch.setattr(serving, name, lambda *given: None)
    monkeypatch.setattr("nsa_plugin.libraries.probe.probe", lambda: synthetic(120, libraries=("triton", "cuda")))
    engine = {"prefill_backend": ("--dsa-prefill-backend", path)}
    PassedFlags({"enabled": "true", "strict": "full"}, engine).write()
    start(process, build=runner(scaled_fp8=True))
    assert process.serving is not None
    assert f"--dsa-prefill-backend {path}: the portable path attends in its place" in process.notes


@pytest.mark.parametrize("strict", ["true", "full"])
@pytest.mark.parametrize(("version", "sm"), [("0.5.22", 120), ("0.5.15", 86)])
def test_a_model_without_sparse_attention_does_not_need_the_portable_path(
    process: SglangProcess, monkeypatch: pytest.MonkeyPatch, version: str, sm: int, strict: str
) -> None:
    process.ledger.version = Version(version)
    monkeypatch.setattr(model, "device_sm", lambda: sm)
    PassedFlags({"enabled": "true", "strict": strict}, {}).write()
    process.enter_scheduler()
    process.leave_scheduler(scheduler(SimpleNamespace(architectures=["LlamaForCausalLM"])))
    assert (process.left, process.statuses) == ([], ())


@pytest.mark.parametrize("sm", [0, 86, 90, 100])
def test_no_flag_is_set_on_another_gpu(process: SglangProcess, monkeypatch: pytest.MonkeyPatch, sm: int) -> None:
    monkeypatch.setattr(model, "device_sm", lambda: sm)
    server_args = arguments()
    process.check_before_serving(server_args)
    assert chosen(server_args) == NONE


def test_no_flag_is_set_while_the_plugin_is_off(process: SglangProcess) -> None:
    PassedFlags({}, {}).write()
    server_args = arguments()
    process.check_before_serving(server_args)
    assert chosen(server_args) == NONE


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (
            {"strict": "full"},
            LeftToStockError,
            r"portable path on SM120 supports SGLang >=0\.5\.23,<0\.5\.24; this is 0",
        ),
        ({"portable": "on"}, SettingsError, r"cannot work with SGLang 0\.5\.22 on SM120: it is for SGLang >=0\.5\.23"),
    ],
)
def test_an_older_sglang_is_left_to_itself(
    process: SglangProcess, given: dict[str, str], error: type[Exception], said: str
) -> None:
    process.ledger.version = Version("0.5.22")
    server_args = arguments()
    process.check_before_serving(server_args)
    assert chosen(server_args) == NONE
    PassedFlags({"enabled": "true", **given}, {}).write()
    with pytest.raises(error, match=said):
        process.check_before_serving(server_args)


@pytest.mark.parametrize("fails", [(), ("deep_gemm",), ("flashinfer_sm120", "deep_gemm")])
def test_other_projects_kernels_are_tried(
    process: SglangProcess, monkeypatch: pytest.MonkeyPatch, fails: tuple[str, ...]
) -> None:
    tried: list[str] = []
    monkeypatch.setattr(
        trial, "trial", lambda name, *given: tried.append(name) or ("it differs" if name in fails else "")
    )
    for name in ("warm_portable", "warm_dense", "warm", "_warm_selection"):
        monkeypatch.setattr(serving, name, lambda *given: None)
    libraries = ("triton", "cuda", "deep_gemm", "flashinfer_sm120")
    monkeypatch.setattr("nsa_plugin.libraries.probe.probe", lambda: synthetic(120, libraries=libraries))
    start(process, build=runner(scaled_fp8=True))
    assert tried == ["flashinfer_sm120", "deep_gemm"]
    assert process.serving is not None
    (built,) = process.serving.backends
    planner = built.nsa_plugin.planner
    attends = "cuda" if "flashinfer_sm120" in fails else "flashinfer_sm120"
    selects = "triton" if "deep_gemm" in fails else "deep_gemm"
    for phase, rows in ((Phase.EXTEND, 4096), (Phase.DECODE, 1)):
        batch = BatchShape.from_lengths(phase, [rows], [65536])
        constraints = planner.constraints(prefill=phase is Phase.EXTEND)
        plan = decide(planner.model, batch, planner.device, planner.settings, constraints=constraints)
        assert (plan.provider, plan.indexer.provider) == (attends, selects)


def test_nothing_is_tried_where_sglang_keeps_its_kernels(
    process: SglangProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    monkeypatch.setattr(trial, "trial", lambda name, *given: tried.append(name) or "")
    libraries = ("triton", "cuda", "deep_gemm", "flashinfer_sm120")
    monkeypatch.setattr("nsa_plugin.libraries.probe.probe", lambda: synthetic(120, libraries=libraries))
    process.enter_scheduler()
    own = "flashinfer_sparse_mla"
    built = backend.make(picking(own, own))(runner(scaled_fp8=True))
    process.leave_scheduler(scheduler())
    assert (built.nsa_plugin, tried) == (None, [])
    assert any(own in reason for reason in process.left)


def test_every_dtype_and_path_is_one_of_sglangs() -> None:
    assert set(flags.SM120_DTYPES.values()) == set(flags.SM90_PATHS)
    assert {path for paths in flags.SM90_PATHS.values() for path in paths} <= set(flags.LIBRARY_OF)
