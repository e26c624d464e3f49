"""Models of a shape that the kernels are not for, on a fake SGLang: everything is left to it, with the reason."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nsa_plugin.backends.sglang.startup import backend, model
from nsa_plugin.backends.sglang.startup.activation import SglangProcess
from nsa_plugin.backends.sglang.startup.flags import PassedFlags
from nsa_plugin.errors import LeftToStockError
from nsa_plugin.libraries.devices import synthetic
from tests.backends.fake_sglang.scheduler import HF_CONFIG, V4_CONFIG, StockBackend, picking, read, runner, scheduler
from tests.backends.fake_sglang.v4 import Engine

pytestmark = pytest.mark.usefixtures("clean_environment")

OTHER_SHAPES = pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"kv_lora_rank": 256}, "kv_lora_rank of DeepseekV32ForCausalLM is 256; nsa-plugin supports 512"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim of DeepseekV32ForCausalLM is 32; nsa-plugin supports 64"),
        ({"index_head_dim": 64}, "index_head_dim of DeepseekV32ForCausalLM is 64; nsa-plugin supports 128"),
        ({"architectures": None, "kv_lora_rank": 256}, "kv_lora_rank of the model is 256; nsa-plugin supports 512"),
    ],
)
NARROW = {"kv_lora_rank": 256}
NARROW_REASON = "kv_lora_rank of DeepseekV32ForCausalLM is 256; nsa-plugin supports 512"


class StockV4Backend(Engine):
    def __init__(self, model_runner: Any, skip_prefill: bool = False, speculative_step_id: int = 0) -> None: ...


def changed_config(changed: dict[str, Any], config: Any = HF_CONFIG) -> SimpleNamespace:
    return SimpleNamespace(**vars(config) | changed)


def serve(
    process: SglangProcess, config: Any, prefill: str = "flashmla_kv", decode: str = "flashmla_kv", v4: bool = False
) -> Any:
    """Start a scheduler whose backend has the kernels that SGLang or the user picked."""
    process.enter_scheduler()
    make: Any = backend.make_v4(StockV4Backend) if v4 else backend.make(picking(prefill, decode))
    built = make(runner(scaled_fp8="trtllm" not in (prefill, decode), dtype="torch.float8_e4m3fn", config=config))
    process.leave_scheduler(scheduler(config))
    return built


@OTHER_SHAPES
def test_a_model_of_another_shape_is_left_to_sglang(
    process: SglangProcess, tmp_path: Path, changed: dict[str, Any], reason: str
) -> None:
    PassedFlags({"enabled": "true", "report": str(tmp_path / "report.json")}, {}).write()
    built = serve(process, changed_config(changed))
    assert built.nsa_plugin is None
    assert (built.dsa_prefill_impl, built.dsa_decode_impl) == ("flashmla_kv", "flashmla_kv")
    assert process.serving is None
    report = read(tmp_path / "report.json")
    assert (report["active"], report["notes"], report["left_to_stock"]) == (False, [], [reason])


@OTHER_SHAPES
def test_strict_full_refuses_it(process: SglangProcess, changed: dict[str, Any], reason: str) -> None:
    PassedFlags({"enabled": "true", "strict": "full"}, {}).write()
    with pytest.raises(LeftToStockError, match=f"^{reason}$"):
        serve(process, changed_config(changed))


def asks(name: str, value: str) -> dict[str, tuple[str, str]]:
    return {name: (f"--dsa-{name.replace('_', '-')}", value)}


@pytest.mark.parametrize(
    ("settings", "engine", "prefill", "decode"),
    [
        ({}, asks("prefill_backend", "tilelang"), "tilelang", "flashmla_kv"),
        ({}, asks("decode_backend", "trtllm"), "flashmla_kv", "trtllm"),
        ({"decode_backend": "cuda"}, {}, "flashmla_kv", "flashmla_kv"),
        ({"token_shard": "on"}, {}, "flashmla_kv", "flashmla_kv"),
        ({"portable": "on"}, {}, "flashmla_kv", "flashmla_kv"),
    ],
)
def test_whatever_the_user_asks_for_the_shape_decides(
    process: SglangProcess,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    settings: dict[str, str],
    engine: dict[str, tuple[str, str]],
    prefill: str,
    decode: str,
) -> None:
    """SGLang's kernels stay those that the user asked it for."""
    monkeypatch.setattr(model, "device_sm", lambda: 0)  # no patch of the portable path is looked up
    monkeypatch.setattr("nsa_plugin.libraries.probe.probe", lambda: synthetic(75))  # on which portable=on is refused
    PassedFlags({"enabled": "true", "report": str(tmp_path / "report.json")} | settings, engine).write()
    built = serve(process, changed_config(NARROW), prefill, decode)
    assert built.nsa_plugin is None
    assert (built.dsa_prefill_impl, built.dsa_decode_impl) == (prefill, decode)
    assert read(tmp_path / "report.json")["left_to_stock"] == [NARROW_REASON]


def test_with_tilelang_for_a_phase_a_model_of_the_supported_shape_is_served_in_the_other(
    process: SglangProcess, tmp_path: Path
) -> None:
    flag = asks("prefill_backend", "tilelang")
    PassedFlags({"enabled": "true", "report": str(tmp_path / "report.json")}, flag).write()
    built = serve(process, HF_CONFIG, prefill="tilelang")
    assert (built.nsa_plugin.plans_prefill, built.nsa_plugin.plans_steps) == (False, True)
    report = read(tmp_path / "report.json")
    assert report["active"] is True
    assert report["left_to_stock"] == [
        "SGLang's --dsa-prefill-backend is tilelang: prefills fall back to the stock path"
    ]


def test_a_draft_of_another_shape_leaves_the_target_with_the_plugin(process: SglangProcess) -> None:
    PassedFlags({"enabled": "true"}, {}).write()
    process.enter_scheduler()
    plugin_backend = backend.make(StockBackend)
    target = plugin_backend(runner(scaled_fp8=True))
    draft = plugin_backend(runner(scaled_fp8=True, config=changed_config(NARROW)))
    assert target.nsa_plugin is not None
    assert draft.nsa_plugin is None
    assert process.left == [NARROW_REASON]


@pytest.mark.parametrize("strict", [True, "full"])
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"head_dim": 256}, "head_dim of DeepseekV4ForCausalLM is 256; nsa-plugin supports 512"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim of DeepseekV4ForCausalLM is 32; nsa-plugin supports 64"),
        ({"index_head_dim": 64}, "index_head_dim of DeepseekV4ForCausalLM is 64; nsa-plugin supports 128"),
    ],
)
def test_v4_of_another_shape_is_left_to_sglang(
    process: SglangProcess, changed: dict[str, Any], reason: str, strict: bool | str
) -> None:
    PassedFlags({"enabled": "true", "strict": str(strict)}, {}).write()
    config = changed_config(changed, V4_CONFIG)
    if strict == "full":
        with pytest.raises(LeftToStockError, match=f"^{reason}$"):
            serve(process, config, v4=True)
        return
    assert serve(process, config, v4=True).nsa_plugin is None
    assert process.left == [reason]
