"""The whole demo against a stand-in for the engine, and the ways in which it must fail."""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from nsa_plugin.commands import demo as command
from nsa_plugin.tools.checkpoints.v32 import CheckpointSpec
from nsa_plugin.tools.compare.demo import pipeline
from nsa_plugin.tools.compare.demo.workload import demo_workload
from nsa_plugin.tools.compare.tolerance import ReferenceTolerance
from nsa_plugin.tools.serving import vllm
from nsa_plugin.tools.serving.engine import CompareError

from ...processes import alive

HERE = Path(__file__).parent
SMALL = ["--index-topk", "16", "--max-num-batched-tokens", "16"]


@pytest.fixture(scope="session")
def answers(tmp_path_factory):
    return tmp_path_factory.mktemp("answers")


def short_workload(*args, **kwargs):
    """The workload with short answers: the stand-in has no cache and computes each token from the start."""
    return [replace(request, new_tokens=min(request.new_tokens, 10)) for request in demo_workload(*args, **kwargs)]


@pytest.fixture
def demo(monkeypatch, tmp_path, answers, capsys):
    """Runs the demo: demo(defect, *flags) -> (exit code, what it printed)."""
    monkeypatch.setattr(vllm, "VLLM_COMMAND", (sys.executable, str(HERE / "fake_vllm.py")))
    monkeypatch.setattr(vllm.VllmCpuEngine, "version", lambda self: "0.32.0")
    monkeypatch.setattr(pipeline, "python_path_with_vllm_name", lambda directory: str(HERE.parents[3]))
    monkeypatch.setenv("FAKE_CACHE", str(answers))
    monkeypatch.setattr(pipeline, "demo_workload", short_workload)
    monkeypatch.setattr(pipeline, "CheckpointSpec", partial(CheckpointSpec, num_hidden_layers=2))
    monkeypatch.setenv("COLUMNS", "400")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))

    def run(defect, *flags):
        monkeypatch.setenv("FAKE_DEFECT", defect)
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        code = command.run(parser.parse_args([*SMALL, *flags]))
        return code, capsys.readouterr().out

    run.temporary = temporary
    return run


def test_all_agree(demo, tmp_path):
    code, output = demo("", "--json", str(tmp_path / "report.json"))
    assert code == 0, output
    assert "✓ All 8 requests agree with the reference: 80 of 80 tokens equal" in output
    assert "16 tokens of context against 16" in output, "the reason stands in the table"
    assert "the fake's own report" in output
    assert list(demo.temporary.iterdir()) == [], "the temporary directory is gone"

    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["schema"], report["command"], report["ok"]) == (1, "demo", True)
    requests = {request["name"]: request for request in report["requests"]}
    assert len(requests) == 8
    for request in requests.values():
        assert request["agrees"]
        assert request["equal"] == request["tokens"] == request["output_tokens"]
        assert request["max_logprob_error"] < 1e-4
        assert request["routes"][0]["phase"] == "extend"
        assert request["routes"][0]["reason"]
    assert requests["shared-again"]["cached_tokens"] == 272
    assert requests["below-topk"]["routes"][0]["attention"] == "mha_one_shot"
    assert all(check["holds"] for check in report["checks"])
    assert report["control"]["holds"]
    assert len(report["control"]["requests"]) == 4
    assert all(request["equal"] < request["tokens"] for request in report["control"]["requests"])
    assert report["engine"]["version"] == "0.32.0"
    assert "serve" in report["engine"]["command"]


def test_json_on_stdout_is_nothing_but_json(demo):
    code, output = demo("", "--json", "-", "--skip-control")
    assert code == 0
    report = json.loads(output)
    assert report["control"] == {"ran": False, "holds": None, "requests": []}


def test_a_narrow_terminal_gets_the_reasons_below_the_table(demo, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, output = demo("", "--skip-control")
    assert code == 0
    assert "below-topk:\n  extend: mha_one_shot by fake" in output
    assert max(len(line) for line in output.splitlines() if "─" in line) <= 80


def test_wrong_tokens_fail(demo, tmp_path):
    code, output = demo("wrong", "--skip-control", "--json", str(tmp_path / "report.json"))
    assert code == 1
    assert "✗ FAILED: " in output
    assert "many-chunks disagrees" in output
    assert "the reference prefers" in output
    assert "below-topk disagrees" not in output, "there was nothing to select wrongly"
    report = json.loads((tmp_path / "report.json").read_text())
    assert not report["ok"]
    assert [kept.name for kept in demo.temporary.iterdir()], "the logs are kept for the one who looks for the reason"


def test_too_many_outliers_fail(demo, monkeypatch):
    strict = ReferenceTolerance(margin=1e-3, logprob=1e-8, outlier=1e-2, outlier_share=0.02)
    monkeypatch.setitem(pipeline.TOLERANCES, "float32", strict)
    code, output = demo("", "--skip-control")
    assert code == 1
    assert "✗ FAILED: too many log probabilities differ" in output
    assert "disagrees" not in output


def test_a_control_that_is_not_noticed_fails(demo):
    code, output = demo("blind")
    assert code == 1
    assert "✗ FAILED: the control was not noticed, so the comparison is blind (80 of 80 tokens equal" in output


def test_a_route_that_was_not_taken_fails(demo):
    code, output = demo("uncached", "--skip-control")
    assert code == 1
    assert "not shown: prefix cache" in output
    assert "shared-again: 0 of 295 prompt tokens cached" in output


def test_no_preemption_fails_where_it_was_asked_for(demo, monkeypatch):
    monkeypatch.setattr(pipeline, "preemptions", lambda metrics: 0)
    code, output = demo("", "--skip-control", "--small-cache")
    assert code == 1
    assert "requests were preempted 0 times" in output


def test_no_trace_fails(demo):
    code, output = demo("untraced", "--skip-control")
    assert code == 1
    assert "✗ FAILED: the plugin wrote no trace" in output


def test_a_server_that_dies_while_it_answers_fails_with_its_reason(demo, tmp_path):
    code, output = demo("dies", "--skip-control", "--json", str(tmp_path / "report.json"))
    assert code == 1
    assert "the server died (exit code 9)" in output
    assert "RuntimeError: out of fuel" in output
    report = json.loads((tmp_path / "report.json").read_text())
    assert not report["ok"]
    assert "out of fuel" in report["error"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--index-topk", "8"], "index_topk is 8; the workload needs at least 16"),
        (["--max-num-batched-tokens", "8"], "chunk_tokens is 8; the workload needs at least index_topk, 16"),
        (["--max-num-batched-tokens", "2000"], "the model 2560 positions"),
        (["--tensor-parallel-size", "3"], "--tensor-parallel-size 3 does not divide the model's 8 heads"),
        (["--json", "/nonexistent/report.json"], "cannot write /nonexistent/report.json: No such file"),
        (["--work-dir", "/proc/demo"], "cannot write /proc/demo"),
    ],
)
def test_what_cannot_work_is_one_message(demo, flags, message):
    code, output = demo("", *flags)
    assert code == 2
    assert message in output
    assert "Traceback" not in output
    assert list(demo.temporary.iterdir()) == []


def test_a_full_disk_is_one_message(demo, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=10 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    code, output = demo("")
    assert code == 2
    assert "10 MiB free; the demo needs 500 MiB" in output


def test_a_disk_that_fills_up_is_one_message(demo, monkeypatch):
    def write(directory, spec):
        raise OSError(28, "No space left on device", str(directory / "model.safetensors"))

    monkeypatch.setattr(pipeline, "write_checkpoint", write)
    code, output = demo("")
    assert code == 2
    assert "model.safetensors: No space left on device" in output


@pytest.mark.parametrize(("family", "architecture"), [("v3.2", "DeepseekV32"), ("glm", "GlmMoeDsa")])
def test_the_family_is_that_of_the_checkpoint(family, architecture):
    _, _, spec = pipeline._plan(pipeline.DemoOptions(work_dir=Path(), family=family))
    assert spec.config()["architectures"] == [f"{architecture}ForCausalLM"]


def test_no_vllm_is_one_message(demo, monkeypatch):
    def missing(engine):
        raise CompareError("vLLM is not installed")

    monkeypatch.setattr(vllm.VllmCpuEngine, "version", missing)
    assert demo("")[0] == 2


@pytest.mark.parametrize(
    "flag", ["--port=70000", "--timeout=0", "--tensor-parallel-size=none", "--dtype=float16", "--family=v4"]
)
def test_bad_flags_are_bad_usage(demo, flag, capsys):
    with pytest.raises(SystemExit) as caught:
        demo("", flag)
    assert caught.value.code == 2
    assert flag.split("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_demo_leaves_nothing(tmp_path, number, code):
    pids, temporary = tmp_path / "pids", tmp_path / "temporary"
    temporary.mkdir()
    script = textwrap.dedent(f"""
        import signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from nsa_plugin.cli import main
        from nsa_plugin.tools.compare.demo import pipeline
        from nsa_plugin.tools.serving import vllm
        vllm.VLLM_COMMAND = (sys.executable, {str(HERE.parents[1] / "serving" / "fake_server.py")!r})
        vllm.VllmCpuEngine.version = lambda self: "0.32.0"
        pipeline.python_path_with_vllm_name = lambda directory: ""
        sys.exit(main(["demo"]))
    """)
    environ = {**os.environ, "TMPDIR": str(temporary), "FAKE_MODE": "never_healthy", "FAKE_PIDS": str(pids)}
    demo = subprocess.Popen([sys.executable, "-c", script], env=environ, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not pids.exists() or len(pids.read_text().split()) < 5:
            assert time.monotonic() < deadline
            assert demo.poll() is None
            time.sleep(0.05)
        demo.send_signal(number)
        output, _ = demo.communicate(timeout=60)
    finally:
        demo.kill()
    assert demo.returncode == code
    assert "no server is left" in output
    assert alive(pids) == []
    assert list(temporary.iterdir()) == []
