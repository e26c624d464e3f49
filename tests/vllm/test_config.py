"""Tests of vLLM's configuration checks with the plugin, before serving."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nsa_plugin.tools.checkpoints.v32 import CheckpointSpec, write_checkpoint
from nsa_plugin.tools.serving.process import Server, ServerError, ServerSpec
from nsa_plugin.tools.serving.vllm import python_path_with_vllm_name, serve_command

pytestmark = pytest.mark.engine_vllm

ON = {"enabled": True}


def arguments(model: Path, plugin: Any = None, **more: Any) -> dict[str, Any]:
    given = {} if plugin is None else {"additional_config": {"nsa_plugin": plugin}}
    return {"model": str(model), "dtype": "float32", "max_model_len": 512, "max_num_batched_tokens": 128} | given | more


def ask(tmp_path: Path, cases: dict[str, dict[str, Any]], environ: dict[str, str] | None = None) -> dict[str, Any]:
    """The answers of one vLLM process to the cases, by name."""
    (tmp_path / "cases.json").write_text(json.dumps(list(cases.values())))
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).parent / "config_case.py"),
            str(tmp_path / "cases.json"),
            str(tmp_path / "results.json"),
        ],
        env={**os.environ, "HF_HUB_OFFLINE": "1", **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    answers = dict(zip(cases, json.loads((tmp_path / "results.json").read_text()), strict=True))
    return {**answers, "log": done.stdout}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> dict[str, Any]:
    tmp_path = tmp_path_factory.mktemp("config")
    dense = write_checkpoint(tmp_path / "dense", CheckpointSpec(dtype="float32", sparse=False))
    report = tmp_path / "report.json"
    cases: dict[str, dict[str, Any]] = {
        "unknown": {"arguments": arguments(checkpoint, ON | {"enabld": 1})},
        "ill-typed": {"arguments": arguments(checkpoint, ON | {"logits_budget_mb": "lots"})},
        "not a mapping": {"arguments": arguments(checkpoint, True)},
        "unknown while off": {"arguments": arguments(checkpoint, {"enabld": True})},
        "environment unknown": {"arguments": arguments(checkpoint, ON), "environ": {"NSA_PLUGIN_TOKENSHARD": "on"}},
        "environment ill-typed": {"arguments": arguments(checkpoint, ON), "environ": {"NSA_PLUGIN_TOKEN_SHARD": "2"}},
        "dense beyond top-k": {"arguments": arguments(checkpoint, ON | {"mha_max_kv": 65})},
        "library not here": {"arguments": arguments(checkpoint, ON | {"decode_backend": "trtllm"})},
        "token shard on": {"arguments": arguments(checkpoint, ON | {"token_shard": "on"})},
        "cache dtype": {"arguments": arguments(checkpoint, ON, kv_cache_dtype="fp8"), "serve": True},
        "cache dtype, strict=full": {"arguments": arguments(checkpoint, ON | {"strict": "full"}, kv_cache_dtype="fp8")},
        "dense model": {"arguments": arguments(dense, ON)},
        "too new": {"arguments": arguments(checkpoint, ON), "break": "too new"},
        "too old": {"arguments": arguments(checkpoint, ON), "break": "too old"},
        "too new, not enabled": {"arguments": arguments(checkpoint), "break": "too new"},
        "target": {"arguments": arguments(checkpoint, ON), "break": "target"},
        "target, not strict": {
            "arguments": arguments(checkpoint, ON | {"strict": False, "report": str(report)}),
            "break": "target",
            "serve": True,
        },
        "off": {"arguments": arguments(checkpoint), "serve": True},
        "disagreement": {
            "arguments": arguments(checkpoint, ON | {"logits_budget_mb": 64}),
            "environ": {"NSA_PLUGIN_LOGITS_BUDGET_MB": "32", "NSA_PLUGIN_REPORT": str(tmp_path / "both.json")},
            "serve": True,
        },
    }
    answers = ask(tmp_path, cases)
    answers["report, not strict"] = json.loads(report.read_text())
    answers["report, disagreement"] = json.loads((tmp_path / "both.json").read_text())
    return answers


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("unknown", ["'enabld'", "--additional-config", "Did you mean 'enabled'?", "Allowed:"]),
        ("unknown while off", ["'enabld'", "Allowed:"]),
        ("ill-typed", ["'logits_budget_mb'", "'lots'", "at least 1"]),
        ("not a mapping", ["--additional-config", "mapping", "True"]),
        ("environment unknown", ["'tokenshard'", "NSA_PLUGIN_TOKENSHARD", "Did you mean 'token_shard'?"]),
        ("environment ill-typed", ["'token_shard'", "NSA_PLUGIN_TOKEN_SHARD", "auto, on, off"]),
        ("dense beyond top-k", ["mha_max_kv", "65", "64"]),
        ("library not here", ["decode_backend", "trtllm"]),
        ("token shard on", ["token_shard"]),
        ("cache dtype, strict=full", ["--kv-cache-dtype is fp8", "supports auto, bfloat16, float16"]),
        ("too new", ["vllm 0.99.0 is installed", ">=0.28,<0.34", "NSA_PLUGIN_ENABLED=0"]),
        ("too old", ["vllm 0.27.1 is installed", ">=0.28,<0.34", "NSA_PLUGIN_ENABLED=0"]),
        ("target", ["DeepseekV32IndexerCache.get_attn_backend", "parameters", "Supported:", "NSA_PLUGIN_ENABLED=0"]),
    ],
)
def test_refuses_before_serving(answers: dict[str, Any], case: str, words: list[str]) -> None:
    assert answers[case]["type"] in ("SettingsError", "PatchError", "NoProviderError", "LeftToStockError")
    for word in words:
        assert word in answers[case]["error"]


def test_a_model_without_sparse_attention_is_not_changed_and_logged_once(answers: dict[str, Any]) -> None:
    assert answers["dense model"]["error"] == ""
    assert answers["log"].count("has no sparse attention") == 1


def test_a_cache_that_the_plugin_does_not_support_is_left_to_vllm(answers: dict[str, Any]) -> None:
    assert answers["cache dtype"]["error"] == ""
    left = "--kv-cache-dtype is fp8; nsa-plugin supports auto, bfloat16, float16 here"
    assert left in answers["log"]
    assert answers["cache dtype"]["serves"] is False
    shown = [line for line in answers["cache dtype"]["metrics"].splitlines() if line.startswith("vllm:nsa_plugin")]
    assert any(left in line for line in shown), shown


@pytest.mark.regression(28)
def test_strict_off_serves_stock_and_says_so(answers: dict[str, Any]) -> None:
    assert answers["target, not strict"]["error"] == ""
    assert answers["target, not strict"]["serves"] is False
    assert not [name for name in answers["target, not strict"]["applied"] if name.startswith("vllm.cpu-attention")]
    report = answers["report, not strict"]
    assert report["active"] is False
    assert "strict is off and the stock engine serves" in report["text"]
    assert "get_attn_backend" in report["text"]


def test_installed_but_not_enabled_changes_nothing(answers: dict[str, Any]) -> None:
    for case in ("off", "too new, not enabled"):
        assert answers[case]["error"] == ""
        assert set(answers[case]["applied"]) == {"vllm.engine-config", "vllm.worker", "vllm.cpu-platform-config"}
    assert answers["off"]["serves"] is False


def test_of_two_sources_the_documented_one_wins_and_the_report_says_so(answers: dict[str, Any]) -> None:
    assert answers["disagreement"]["serves"] is True
    report = answers["report, disagreement"]
    assert report["settings"]["logits_budget_mb"] == 64
    assert any("logits_budget_mb is 64" in note and "32" in note for note in report["notes"])
    assert report["active"] is True
    assert {patch["name"]: patch["state"] for patch in report["patches"]}["vllm.cpu-attention-backend"] == "applied"


def test_vllm_keeps_chunked_prefill_for_the_plugin(answers: dict[str, Any]) -> None:
    assert answers["disagreement"]["chunked_prefill"] is True


def test_the_other_engines_code_is_never_loaded(answers: dict[str, Any]) -> None:
    loaded = answers["disagreement"]["modules"]
    assert "nsa_plugin.backends.vllm.startup.activation" in loaded
    assert not [name for name in loaded if "sglang" in name]


def test_kill_switch(tmp_path: Path, checkpoint: Path) -> None:
    cases = {"killed": {"arguments": arguments(checkpoint, ON), "serve": False}}
    answers = ask(tmp_path, cases, {"NSA_PLUGIN_ENABLED": "0"})
    assert answers["killed"]["error"] == ""
    assert answers["killed"]["applied"] == []


def test_the_server_itself_does_not_start_with_a_wrong_setting(tmp_path: Path, checkpoint: Path) -> None:
    spec = ServerSpec(
        command=lambda port: serve_command(
            checkpoint, port, ["--dtype", "float32", "--max-model-len", "512"], ON | {"prefill_backend": "fastest"}
        ),
        log=tmp_path / "server.log",
        start_timeout=600,  # only a hang reaches it
        environ={"PYTHONPATH": python_path_with_vllm_name(tmp_path / "name"), "HF_HUB_OFFLINE": "1"},
    )
    message = r"'prefill_backend'.*'fastest'; allowed: one of auto, flash_mla"
    with pytest.raises(ServerError, match=message), Server(spec):
        pass
