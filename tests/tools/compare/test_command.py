"""`nsa-plugin compare` from end to end, with a stand-in for the engine's server in processes of its own."""

from __future__ import annotations

import argparse
import json
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_plugin.commands import compare
from nsa_plugin.tools.checkpoints.v32 import CheckpointSpec
from nsa_plugin.tools.compare import model, runner
from nsa_plugin.tools.compare.measured import Measured
from nsa_plugin.tools.pages import site
from nsa_plugin.tools.serving.common import switches
from tests.tools.compare.command import Behave, Read, arguments, call, failed, spawn, until, v4
from tests.tools.processes import alive


def test_the_engines_variables_that_a_record_names():
    given = {
        "SGLANG_OPT_FUSED": "0",
        "SGLANG_BACKEND": "triton",
        "SGLANG_ENABLED": "",
        "SGLANG_CACHE_DIR": "/var/x",
        "SGLANG_HOST_IP": "10.0.0.1",
        "SGLANG_API_KEY": "word",
        "VLLM_DEEP_GEMM_WARMUP": "skip",
        "HOME": "x",
    }
    assert switches("sglang", given) == ["SGLANG_BACKEND=triton", "SGLANG_OPT_FUSED=0"]
    assert switches("vllm", given) == ["VLLM_DEEP_GEMM_WARMUP=skip"]


def test_agreement_and_speed_of_four_servers(
    fake: Behave,
    pids: Path,
    read: Read,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_DSV4_FP4_EXPERTS", "0")
    line = arguments(tmp_path, fake(), "--speed", "--runs", "stock,plugin,control,stock-again")
    code, out, _ = call(capsys, [*line, "--", "--kv-cache-dtype", "fp8_e4m3", "--disable-cuda-graph"])
    record = read()
    assert (code, failed(record)) == (0, []), out
    assert alive(pids) == []
    assert len(pids.read_text().split()) == 4
    assert record["suite"] == "sglang-0.5.16-v32-16heads-fp8-eager"
    assert record["host"]["commit"] == "0123abc"
    assert "SGLANG_DSV4_FP4_EXPERTS=0" in record["command"].partition("nsa-plugin")[0].split()
    assert record["engine_flags"] == ["--kv-cache-dtype", "fp8_e4m3", "--disable-cuda-graph"]

    stock, plugin = record["servers"]["stock"], record["servers"]["plugin"]
    assert "--kv-cache-dtype fp8_e4m3 --disable-cuda-graph" in stock["command"]
    assert "--enable-nsa-plugin" not in stock["command"]
    assert plugin["active"]
    assert plugin["routes"]["decode/sparse_decode/cuda"] > 0
    assert plugin["planned"] == ["extend/mha_one_shot/fa3"]

    agreement = [row for row in record["rows"] if row["op"] == "agreement"]
    right = [row for row in agreement if row["provider"] == "nsa-plugin" and "fault" not in row["case"]]
    ours = {row["case"]["requests"]: row for row in right}
    groups = {"single", "single-again", "batch", "forced", "forced-batch", "prefix", "prefix-cold"}
    groups |= {"concurrent", "concurrent-again"}
    assert groups <= ours.keys()
    own = {row["case"]["requests"] for row in agreement if row["provider"] == "stock"}
    assert {"single / batch", "concurrent / concurrent-again", "single"} <= own  # the last one is from stock-again
    # The stand-in's noise, and nothing more: one token further the next is half a nat away.
    assert 0 < ours["batch"]["max_error"] < 0.05
    assert ours["batch"]["equal"] == ours["batch"]["tokens"] > 100
    assert [row for row in agreement if row["case"].get("fault") and row["rejected"]]

    serve = [row for row in record["rows"] if row["op"] == "serve"]
    assert {row["case"]["measure"] for row in serve} == {
        "ttft_ms",
        "input_tokens_per_s",
        "itl_ms",
        "output_tokens_per_s",
        "first_output_tokens_per_s",
    }
    for row in serve:
        assert row["median"] > 0
        assert row["baseline_median"] > 0
        assert row["baseline_again_median"] > 0
        assert 0 < row["q1"] <= row["median"] <= row["q3"]
        assert "paired_speedup" not in row
    assert record["timed"] == "one after the other"
    why = "it has a prompt of 60000 tokens; --context allows 136"
    assert record["left_out"] == {"mixed-60000-40x1000": why}
    assert f"left out: mixed-60000-40x1000, {why}" in " ".join(out.split())
    assert "✓ The plugin's tokens and log probabilities agree" in out

    text = "".join(site.pages(tmp_path / "records").values())
    assert f"# {record['suite']}\n" in text
    assert "| plugin, stock | batch |" in text
    assert "| 100 × 136 in, 1 out | ttft ms |" in text
    assert f"Left out: mixed-60000-40x1000, {why}." in text

    # What was saved gives the same record again, without a server.
    kept = tmp_path / "work" / "logs" / "measured.jsonl"
    again = ["compare", "sglang", "--measured", str(kept), "--json", str(tmp_path / "again")]
    code, _, _ = call(capsys, again)
    (path,) = (tmp_path / "again").glob("*/*.json")
    assert code == 0
    assert json.loads(path.read_text()) == record


COMBINED = ("--case", "single", "--case", "interleaved", "--case", "mixed-chunk")


@pytest.mark.parametrize("mode", ["", "never combines"])
def test_prefills_with_requests_of_two_kinds_must_have_been_planned(
    mode: str,
    fake: Behave,
    read: Read,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NSA_PLUGIN_SPLIT_PREFILL", "on")
    line = arguments(tmp_path, fake(mode), *COMBINED)
    code, out, _ = call(capsys, [*line, "--", "--kv-cache-dtype", "fp8_e4m3", "--enable-mixed-chunk"])
    record = read()
    wanted = ["short prompts attended densely next to long ones", "decode steps ran in prefills"]
    assert (code, failed(record)) == ((1, wanted) if mode else (0, [])), out
    checks = {check["name"]: check["detail"] for check in record["verdict"]["checks"]}
    why = "0 prefills, counted; the start-up report: attend as the long ones: no reason"
    assert checks[wanted[0]] == (why if mode else "3 prefills, counted")
    assert record["suite"] == "sglang-0.5.16-v32-16heads-fp8-mixed-split-prefill-on"
    assert record["servers"]["plugin"].get("combined", {}) == ({} if mode else {"split": 3, "mixed": 5})
    rows = [row for row in record["rows"] if row["provider"] == "nsa-plugin" and "fault" not in row["case"]]
    found = {row["case"]["requests"]: row for row in rows}
    assert {"interleaved", "interleaved-batch", "mixed-chunk", "mixed-chunk-again"} <= found.keys()
    # Answers without log probabilities are scored, and so compared as the others are.
    assert found["mixed-chunk"]["equal"] == found["mixed-chunk"]["tokens"] > 1000
    assert 0 < found["mixed-chunk"]["max_error"] < 0.05


def test_without_the_flag_or_the_setting_nothing_must_be_combined(
    fake: Behave, read: Read, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = call(capsys, arguments(tmp_path, fake("never combines"), *COMBINED))
    assert (code, failed(read())) == (0, []), out
    assert "mixed-chunk" not in {row["case"]["requests"] for row in read()["rows"]}


SMALL = ("--case", "single", "--case", "forced")


@pytest.mark.parametrize("mode", ["", "never reshards"])
def test_a_batch_must_have_been_resharded_where_token_shard_is_on(
    mode: str,
    fake: Behave,
    read: Read,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NSA_PLUGIN_TOKEN_SHARD", "on")
    code, out, _ = call(capsys, arguments(tmp_path, fake(mode), *SMALL))
    record = read()
    assert (code, failed(record)) == ((1, ["heads were resharded"]) if mode else (0, [])), out
    checks = {check["name"]: check["detail"] for check in record["verdict"]["checks"]}
    assert checks["heads were resharded"] == f"{0 if mode else 8192} query tokens, counted"
    assert record["servers"]["plugin"].get("resharded", {}) == ({} if mode else {"extend": 8192})
    assert ("8192 resharded query tokens in extend" in checks["the plugin served"]) is (not mode)


def test_v4_is_compared_by_what_matters_to_it(
    fake: Behave, read: Read, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = fake()
    config = json.loads((directory / "config.json").read_text())
    # The stand-in selects above 64 tokens: 16 of those that are compressed 4 : 1.
    config |= {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "index_topk": 16}
    own = {"compress_ratios": [0, 4, 128], "sliding_window": 24, "head_dim": 512, "o_lora_rank": 1024, "o_groups": 8}
    (directory / "config.json").write_text(json.dumps(config | own))
    code, out, _ = call(capsys, arguments(tmp_path, directory, *SMALL))
    record = read()
    assert (code, failed(record)) == (0, []), out
    assert record["suite"] == "sglang-0.5.16-v4-16heads-fp8"
    assert own.items() <= record["model"].items()
    assert record["model"]["index_topk"] == 16
    rows = {row["case"]["requests"]: row for row in record["rows"] if "fault" in row["case"]}
    lengths = {one["prompt"] for one in rows["single"]["each"]}
    assert {23, 24, 25, 63, 64, 65, 67, 68, 69, 127, 128, 129} <= lengths
    (noticed,) = (check for check in record["verdict"]["checks"] if check["name"] == "wrong tokens are noticed")
    long = [one for row in rows.values() for one in row["each"] if one["prompt"] > 64]
    assert f"of {len(long)} requests longer than 64 tokens rejected" in noticed["detail"]


def test_rows_at_which_v4s_route_changes_are_compared_by_themselves(
    fake: Behave, read: Read, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = arguments(tmp_path, v4(fake()), "--case", "rows", "--", "--chunked-prefill-size", "128")
    code, out, _ = call(capsys, line)
    record = read()
    assert (code, failed(record)) == (0, []), out
    rows = {(row["case"]["requests"], row["provider"], "fault" in row["case"]): row for row in record["rows"]}
    assert {("rows / rows-batch", "stock", False), ("rows", "nsa-plugin", False), ("rows", "nsa-plugin", True)} <= set(
        rows
    )
    assert [one["prompt"] for one in rows["rows", "nsa-plugin", False]["each"]] == [129]
    assert record["suite"] == "sglang-0.5.16-v4-16heads-fp8-chunk128"


def test_rows_are_of_v4_alone(fake: Behave, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, arguments(tmp_path, fake(), "--case", "rows"))
    assert code == 2
    assert "--case rows has no requests for this model and these flags" in err


LONGER = ("--stock-fails-at", "900,1500,2500")


def test_a_prompt_that_stock_fails_at_is_recorded_as_such(
    fake: Behave, pids: Path, read: Read, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = call(capsys, arguments(tmp_path, v4(fake("exhausts")), *LONGER))
    record = read()
    assert (code, failed(record)) == (0, []), out
    assert alive(pids) == []
    assert len(pids.read_text().split()) == 2  # no control
    assert record["suite"] == "sglang-0.5.16-v4-16heads-fp8-limit"
    (row,) = record["rows"]
    assert (row["op"], row["baseline_answered"], row["baseline_failed_at"]) == ("limit", [900], 1500)
    assert (row["answered"], row["failed_at"]) == ([900, 1500, 2500], None)
    assert "CUDA out of memory" in row["baseline_error"]
    assert "CUDA out of memory" in record["servers"]["stock"]["fell"]
    assert record["servers"]["stock"]["error"] == ""
    assert "✓ The plugin answers a prompt at which stock fails." in out
    assert "fails at 1500" in "".join(site.pages(tmp_path / "records").values())

    kept = tmp_path / "work" / "logs" / "measured.jsonl"
    code, _, _ = call(capsys, ["compare", "sglang", "--measured", str(kept), "--json", str(tmp_path / "again")])
    (path,) = (tmp_path / "again").glob("*/*.json")
    assert (code, json.loads(path.read_text())) == (0, record)


@pytest.mark.parametrize(
    ("mode", "more", "expected"),
    [
        ("", (), ["the plugin answers a prompt that stock fails at"]),
        ("crashes", (), ["complete", "the plugin answers a prompt that stock fails at"]),
        # A server that is slow has not failed, nor has it answered.
        ("slow plugin", ("--budget", "12"), ["complete", "the plugin answers a prompt that stock fails at"]),
        ("slow stock", ("--budget", "12"), ["complete", "the plugin answers a prompt that stock fails at"]),
    ],
)
def test_a_prompt_that_stock_answers_or_the_plugin_does_not(
    mode: str,
    more: tuple[str, ...],
    expected: list[str],
    fake: Behave,
    pids: Path,
    read: Read,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, _ = call(capsys, arguments(tmp_path, v4(fake(mode)), *LONGER, *more))
    assert code == 1
    assert alive(pids) == []
    record = read()
    assert {"the plugin served"} | set(expected) == {"the plugin served"} | set(failed(record))
    (row,) = record["rows"]
    assert row["baseline_failed_at"] is None
    assert "fell" not in record["servers"]["stock"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--family v4 --heads 12", "num_attention_heads 12 does not divide among o_groups 8"),
        ("--family v4 --layers 4,8", "compress_ratios has 8; allowed: 0, 4, 128"),
        ("--layers 4,4", "--layers is 4,4; compress ratios are for --family v4, give a number"),
        ("--layers 4,x", "'4,x' is not a list of compress ratios"),
        ("--family v4 --full-width", "--full-width is not for --family v4"),
        ("--family v4 --quantization fp8", "--quantization is not for --family v4, whose checkpoint is in fp8"),
        ("--quantization nf4", "invalid choice: 'nf4'"),
        ("--family v4 --context 524000", "the model's longest position allows 523776"),
    ],
)
def test_checkpoint_that_cannot_be_made_is_named(
    more: str, message: str, fake: Behave, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake()
    code, _, err = call(capsys, ["compare", "sglang", "--workdir", str(tmp_path / "work"), *more.split()])
    assert code == 2
    assert message in err
    assert not (tmp_path / "work").exists()


def test_checkpoints_of_v4_are_told_apart() -> None:
    def name(layers: int | tuple[int, ...] | None, heads: int | None = None, *, mtp: bool = False) -> str:
        return model.checkpoint_name(model.spec_of("v4", heads, layers, mtp=mtp))

    assert name(None) == "v4-64heads-0-4-128-4-0"
    assert name(None) == name(5)
    assert name((4, 4), 16, mtp=True) == "v4-16heads-4-4-mtp"


def test_full_width_is_a_checkpoint_of_its_own() -> None:
    narrow, full = (model.spec_of("v3.2", 128, None, mtp=False, full_width=full) for full in (False, True))
    assert model.checkpoint_name(full) == "v32-full-128heads-4layers"
    config = full.config()
    assert {name: config[name] for name in model.FULL_WIDTH} == model.FULL_WIDTH
    assert config["hidden_size"] == 7168
    changed = {name for name, value in config.items() if value != narrow.config()[name]}
    assert changed == set(model.FULL_WIDTH)


@pytest.mark.parametrize("family", ["v3.2", "glm"])
@pytest.mark.parametrize(
    ("quantization", "named"), [("int4", "ignore"), ("gptq", "dynamic"), ("awq", "modules_to_not_convert")]
)
def test_quantised_weights_make_a_checkpoint_of_their_own_and_are_in_the_record(
    quantization: str, named: str, family: str
) -> None:
    plain, made = (model.spec_of(family, 16, 4, mtp=False, quantization=stored) for stored in (None, quantization))
    assert model.checkpoint_name(made) == model.checkpoint_name(plain).replace("-16heads", f"-{quantization}-16heads")
    stored = made.config()["quantization_config"]
    assert len(stored[named]) > 1
    assert model.shown(made.config())["quantization_config"] == {k: v for k, v in stored.items() if k != named}
    assert "quantization_config" not in model.shown(plain.config())


def test_a_glm_checkpoint_has_glms_attention_and_shares_selections() -> None:
    spec = model.spec_of("glm", 8, 4, mtp=True)
    assert model.checkpoint_name(spec) == "glm-8heads-4layers-mtp"
    config = spec.config()
    assert model.family_of(config) == "glm"
    assert (config["qk_nope_head_dim"], config["v_head_dim"], config["index_n_heads"]) == (192, 256, 32)
    assert model.shown(config)["index_topk_pattern"] == "FSSF"
    full = model.spec_of("glm", None, None, mtp=False, full_width=True)
    assert model.checkpoint_name(full) == "glm-full-16heads-6layers"
    assert full.config()["hidden_size"] == 6144


# Without a plugin that serves, the control is left out.
NOT_ACTIVE = ["complete", "the plugin served", "wrong tokens are noticed"]


@pytest.mark.parametrize(
    ("mode", "more", "expected"),
    [
        (
            "wrong",
            SMALL,
            ["the plugin agrees, request by request", "the plugin agrees in the mean of forced positions"],
        ),
        ("blind", SMALL, ["wrong tokens are noticed"]),
        ("uncounted", SMALL, NOT_ACTIVE),  # neither counters nor a trace show that it carried a batch
        ("inactive", SMALL, NOT_ACTIVE),
        ("uncached", ("--case", "prefix", "--case", "single"), ["the prefix cache was hit"]),
        ("refuses", SMALL, ["the plugin agrees, request by request", "stock against itself"]),
        ("dies", SMALL, [*NOT_ACTIVE, "the plugin agrees, request by request"]),
        ("crashes", SMALL, ["complete", "the plugin agrees, request by request"]),
        ("builds", SMALL, ["no kernel of the plugin was built while serving"]),
    ],
)
def test_what_must_not_pass(
    mode: str,
    more: tuple[str, ...],
    expected: list[str],
    fake: Behave,
    pids: Path,
    read: Read,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = call(capsys, arguments(tmp_path, fake(mode), *more))
    record = read()
    assert code == 1
    assert alive(pids) == []
    found = set(failed(record))
    assert found == set(expected)
    if mode == "inactive":
        assert "a note that says why" in out
    if mode == "builds":
        assert record["servers"]["plugin"]["built_late"] == ["topk_kernel"]
    if mode == "dies":
        assert "index_topk is a fruit" in record["servers"]["plugin"]["error"]
        assert "| ValueError: index_topk is a fruit" in out  # the end of the log
    if mode == "crashes":
        assert "an illegal memory access" in record["servers"]["plugin"]["error"]
    assert "✗ FAILED" in out


def test_time_that_does_not_suffice_is_kept_to_and_said(
    fake: Behave, pids: Path, read: Read, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()  # the server hangs for ten minutes
    line = arguments(tmp_path, fake("hangs"), "--case", "single", "--runs", "plugin,stock", "--budget", "3")
    code, _, _ = call(capsys, line)
    assert code == 1
    assert time.monotonic() - started < 300
    assert alive(pids) == []
    assert failed(read())[0] == "complete"


def test_answers_that_came_before_a_late_one_count(
    fake: Behave,
    pids: Path,
    read: Read,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "_STEP_S", 3.0)
    line = arguments(tmp_path, fake("late"), "--case", "single", "--runs", "stock,plugin")
    assert call(capsys, line)[0] == 1
    until(lambda: not alive(pids))
    answers = Measured.load(tmp_path / "work" / "logs" / "measured.jsonl").runs["plugin"].answers["single"]
    late = {name for name, answer in answers.items() if answer.error}
    assert late == {"p136"}
    assert "no answer after 3 s" in answers["p136"].error
    compared = next(row for row in read()["rows"] if row["provider"] == "nsa-plugin")
    assert compared["rejected"] == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_run_that_is_ended_keeps_what_it_measured(
    number: signal.Signals, fake: Behave, pids: Path, read: Read, tmp_path: Path
) -> None:
    line = arguments(tmp_path, fake("hangs"), "--case", "batch", "--case", "single")
    process = spawn(line)
    try:
        assert process.stdout is not None
        for said in process.stdout:
            if "plugin: healthy" in said:
                break
            # The plugin's settings are in a record's name, and its server has not told them yet.
            assert not list((tmp_path / "records").glob("*/*"))
        until(lambda: any((tmp_path / "records").glob("*/*.json")))
        process.send_signal(number)
        process.wait(120)
    finally:
        process.kill()
        process.stdout.close()
    until(lambda: not alive(pids))
    record = read()
    assert record["servers"]["stock"]["error"] == ""
    assert {row["provider"] for row in record["rows"]} == {"stock"}
    assert "complete" in failed(record)
    kept = Measured.load(tmp_path / "work" / "logs" / "measured.jsonl")
    assert kept.runs["stock"].done
    assert kept.runs["stock"].answers["batch"]["p136"].token_ids
    if number is not signal.SIGKILL:
        assert process.returncode == {signal.SIGTERM: 143, signal.SIGINT: 130}[number]


BAD = {
    "--context 100": "selects from more than 64 tokens, so the context needs at least twice as many: 128",
    "--context 4000": "the model's longest position allows 3584",
    "--runs stock,fruit": "'fruit' is not a role; allowed: stock, plugin, control, stock-again, plugin-again",
    "--runs stock,stock": "lists a role twice",
    "--runs stock,plugin,plugin-again": "--runs has plugin-again, which is only timed; add --speed or a speed case",
    "--budget 0": "'0' is not a number of seconds above 0",
    "--case fruit": "invalid choice: 'fruit'",
    "--context 136 --heads 16": "not allowed with argument --model",
    "--measured nowhere.json": "error: --measured is nowhere.json, which cannot be read: No such file or directory\n",
    "--measured /dev/null": "error: --measured is /dev/null, which is not a file that compare saved",
    "--stock-fails-at 200 --speed": "--stock-fails-at cannot be combined with --case, --speed, --together or --beside",
    "--stock-fails-at 200 --runs plugin,stock": "--stock-fails-at runs stock,plugin in this order, not plugin",
    "--stock-fails-at 4000": "--stock-fails-at is 4000; the model's longest position allows 3584",
    "--stock-fails-at 4,x": "'x' is not a whole number",
    "--context 136 --prompt-lengths 100,137": "--prompt-lengths has 137; --context allows 136",
    "--context 3500 -- --context-length 2k": "the longest context by the flags, 2000, allows 1488",
    "--case mixed": "--case mixed: it has a prompt of 60000 tokens; --context allows 32000",
    "--output-tokens 5": "--output-tokens is for the case decode, which is not among single",
    "--context 136 --case decode --output-tokens 4000": "the model's longest position allows 3960",
    "--beside nowhere.json": "--beside is nowhere.json, which cannot be read",
    "--logs other --beside other/measured.jsonl": "this run would overwrite it; choose another --logs",
    "--case ttft --beside nowhere.json": "--beside is nowhere.json, which cannot be read",
    "--family v4": "--family is for checkpoints made here; --model has its own",
    "--full-width": "--full-width is for checkpoints made here; --model has its own widths",
    "--quantization int4": "--quantization is for checkpoints made here; --model has its own weights",
}


@pytest.mark.parametrize("more", BAD)
def test_bad_input_is_one_line_and_2(
    more: str, fake: Behave, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["compare", "sglang", "--model", str(fake()), "--workdir", str(tmp_path / "work"), *more.split()]
    code, out, err = call(capsys, line)
    assert (code, out) == (2, "")
    assert BAD[more] in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "work").exists()


def test_other_commands_take_nothing_after_two_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, ["doctor", "--", "--tp", "8"])
    assert code == 2
    assert "doctor takes nothing after --, not '--tp'" in err


def test_checkpoint_is_made_once_and_again_where_it_is_not_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "SPEC", CheckpointSpec(hidden_size=64, num_hidden_layers=2, q_lora_rank=32))
    said: list[str] = []

    def make(*more: str) -> Path:
        parser = argparse.ArgumentParser()
        compare.add_arguments(parser)
        args = parser.parse_args(["sglang", "--heads", "4", "--layers", "1", *more])
        spec = compare._spec(args)
        directory = tmp_path / model.checkpoint_name(spec)
        model.make_checkpoint(spec, directory, said.append)
        return directory

    tiny = replace(model.SPEC_V4, vocab_size=512, hidden_size=128, moe_intermediate_size=128, n_routed_experts=4)
    monkeypatch.setattr(model, "SPEC_V4", replace(tiny, q_lora_rank=128, o_lora_rank=128, o_groups=1))
    directory = make("--family", "v4")
    config = json.loads((directory / "config.json").read_text())
    assert (config["model_type"], config["num_attention_heads"]) == ("deepseek_v4", 4)
    assert config["compress_ratios"] == [0]
    assert make("--family", "v4") == directory
    assert said[-1] == f"checkpoint: {directory} is there"

    directory = make()
    config = json.loads((directory / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_hidden_layers"]) == (4, 1)
    said.clear()
    assert make() == directory
    assert said == [f"checkpoint: {directory} is there"]
    (directory / "spec.json").unlink()  # as after a write that was cut short
    said.clear()
    make()
    assert said[0] == f"checkpoint: writing {directory}"
    # As one that was written when the configuration of the same spec said something else.
    mark = json.loads((directory / "spec.json").read_text())
    (directory / "spec.json").write_text(json.dumps(mark | {"config": {}}))
    said.clear()
    make()
    assert said[0] == f"checkpoint: writing {directory}"
    assert make("--mtp") != directory
    assert json.loads((make("--mtp") / "config.json").read_text())["num_nextn_predict_layers"] == 1
