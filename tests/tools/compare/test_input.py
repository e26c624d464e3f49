"""What `nsa-plugin compare` refuses before any server starts: one line that names the input, and exit code 2."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from nsa_plugin.commands import compare
from nsa_plugin.commands.compare_options import MEASURING
from nsa_plugin.tools.compare.measured import _NEEDED
from tests.tools.compare.command import Behave, arguments, call, v4

# No more than a verdict and a record need.
FACTS: dict[str, Any] = {
    **{"suite": "sglang-0.5.16-v32-16heads-bf16", "engine": "sglang 0.5.16", "command": "nsa-plugin", "kv": "bf16"},
    **{"heads": 16, "tp": 1, "dp": 1, "index_topk": 64, "context": 136, "flags": [], "model": {}, "host": {"gpu": ""}},
}


def refused(capsys: pytest.CaptureFixture[str], line: list[str]) -> str:
    """The one line on stderr of a command that ends 2 without a word on stdout."""
    code, out, err = call(capsys, line)
    assert (code, out) == (2, ""), err
    (said,) = err.splitlines()
    return said


def saved(tmp_path: Path, **changes: Any) -> Path:
    """A file of a run without answers, after these changes to its first line; a fact that is None is left out."""
    head: dict[str, Any] = {"schema": 1, "facts": FACTS, "asked": {"runs": ["stock"], "cases": ["single"]}, "runs": {}}
    facts = {name: value for name, value in (FACTS | changes.pop("facts", {})).items() if value is not None}
    path = tmp_path / "measured.jsonl"
    path.write_text(json.dumps(head | {"facts": facts} | changes) + "\n")
    return path


@pytest.mark.parametrize(
    ("engine", "variable", "value", "said"),
    [
        ("sglang", "SGLANG_PLUGINS", "another", "SGLANG_PLUGINS='another' does not list nsa_plugin"),
        ("vllm", "VLLM_PLUGINS", "another", "VLLM_PLUGINS='another' does not list nsa_plugin"),
        ("vllm", "VLLM_PLUGINS", "", "VLLM_PLUGINS='' does not list nsa_plugin"),
        ("vllm", "VLLM_PLUGINS", "x, nsa_plugin", "VLLM_PLUGINS='x, nsa_plugin' lists nsa_plugin with a space"),
    ],
)
def test_plugin_that_an_engine_would_not_load(
    engine: str,
    variable: str,
    value: str,
    said: str,
    fake: Behave,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = fake()
    monkeypatch.setenv(variable, value)
    error = refused(capsys, arguments(tmp_path, model, engine=engine))
    assert said in error
    names = [name for name in ("another", "x") if name in value]
    assert error.endswith(f"; set {variable}={','.join([*names, 'nsa_plugin'])} or unset it")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([], "config.json is not a JSON object"),
        ({"index_topk": None}, "config.json has no index_topk: compare needs a model with sparse attention"),
        ({"vocab_size": "256"}, 'config.json: vocab_size is "256"; allowed: a whole number of at least 1'),
        ({"num_attention_heads": 0}, "config.json: num_attention_heads is 0; allowed: a whole number of at least 1"),
        ({"max_position_embeddings": "4096"}, 'max_position_embeddings is "4096"; allowed: a whole number of at least'),
        ({"compress_ratios": None}, "config.json: compress_ratios is null; allowed: a list of whole numbers"),
        ({"compress_ratios": [4, "128"]}, 'compress_ratios is [4, "128"]; allowed: a list of whole numbers'),
        ({"sliding_window": None}, "config.json: sliding_window is null; allowed: a whole number of at least 1"),
    ],
)
def test_model_that_cannot_be_compared(
    changes: Any, said: str, fake: Behave, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = v4(fake()) / "config.json"
    config = changes if isinstance(changes, list) else json.loads(path.read_text()) | changes
    path.write_text(json.dumps(config))
    assert said in refused(capsys, arguments(tmp_path, path.parent))


@pytest.mark.parametrize("longest", [{}, {"max_position_embeddings": None}])
def test_model_that_does_not_say_its_longest_position(
    longest: dict[str, Any], fake: Behave, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = fake() / "config.json"
    config = json.loads(path.read_text())
    del config["max_position_embeddings"]
    path.write_text(json.dumps(config | longest))
    line = arguments(tmp_path, path.parent, "--context", "100")
    assert "selects from more than 64 tokens" in refused(capsys, line)  # no longer a matter of the model's positions


@pytest.mark.parametrize("value", ["eight", "0", "-2"])
@pytest.mark.parametrize(
    ("engine", "flag", "named"),
    [("sglang", "--tp", "--tp"), ("sglang", "--dp-size", "--dp-size"), ("vllm", "--data_parallel_size", None)],
)
def test_number_of_ranks_that_is_none(
    engine: str,
    flag: str,
    named: str | None,
    value: str,
    fake: Behave,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = refused(capsys, [*arguments(tmp_path, fake(), engine=engine), "--", flag, value])
    assert f"{named or '--data-parallel-size'} is '{value}', which is not a whole number of at least 1" in error


def test_file_with_the_needed_facts_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["compare", "sglang", "--measured", str(saved(tmp_path)), "--json", str(tmp_path), "--commit", "0123abc"]
    code, out, err = call(capsys, line)
    assert (code, err) == (1, "")
    assert "✗ FAILED" in out


@pytest.mark.parametrize("option", ["--measured", "--beside"])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(({"facts": {name: None}}, f"it has no {name}") for name in _NEEDED),
        ({"facts": {"heads": "16"}}, 'heads is "16"; allowed: a whole number'),
        ({"facts": {"host": {}, "selects_above": 64}}, "it has no gpu"),
        ({"runs": []}, "runs is []; allowed: an object"),
        ({"asked": {"runs": ["stock"]}}, "it has no cases"),
        ({"asked": {"runs": [], "cases": []}}, "it asked for no runs and no cases"),
        ({"runs": {"stock": []}}, "argument after ** must be a mapping"),
    ],
)
def test_file_that_no_run_saved(
    option: str, changes: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path, **changes)
    error = refused(capsys, ["compare", "sglang", option, str(path)])
    assert f"{option} is {path}, which is not a file that compare saved: " in error
    assert said in error


def test_file_without_what_two_engines_are_compared_by(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(saved(tmp_path))
    error = refused(capsys, ["compare", "sglang", "--measured", path, "--beside", path])
    assert "it has no selects_above" in error


def test_file_of_another_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path)
    error = refused(capsys, ["compare", "vllm", "--measured", str(path)])
    assert f"--measured is {path}, which was measured with sglang 0.5.16; compare vllm takes a file that was" in error


# A value of each option that takes one.
GIVEN = {
    **{"--model": "model", "--heads": "16", "--family": "glm", "--layers": "4", "--quantization": "fp8"},
    "--context": "32000",
    **{"--runs": "stock", "--case": "single", "--prompt-lengths": "100", "--output-tokens": "5"},
    **{"--stock-fails-at": "900", "--budget": "1500", "--start-timeout": "400"},
}


@pytest.mark.parametrize("option", MEASURING)
def test_option_that_a_saved_file_has_no_use_for(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [option, GIVEN[option]] if option in GIVEN else [option]
    error = refused(capsys, ["compare", "sglang", "--measured", str(saved(tmp_path)), *given])
    assert f"--measured cannot be combined with {option}: " in error
    assert "allowed: --beside and the output options" in error


def test_engine_flags_that_a_saved_file_has_no_use_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["compare", "sglang", "--measured", str(saved(tmp_path)), "--speed", "--", "--tp", "8"]
    assert "--measured cannot be combined with --speed, flags after --: " in refused(capsys, line)


def test_every_option_is_for_measuring_or_goes_with_a_saved_file() -> None:
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    options = {name for name in parser._option_string_actions if name.startswith("--") and name != "--help"}
    assert options - set(MEASURING) == {"--measured", "--beside", "--workdir", "--logs", "--json", "--commit"}
    assert set(MEASURING) < options
