"""The command line, as a user meets it: output, exit codes, bad input, and what it may import."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from nsa_plugin import cli
from nsa_plugin.commands import engines, live, patches
from nsa_plugin.decision.dispatch import decide
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.libraries.architectures import evidence
from nsa_plugin.libraries.devices import emulating, synthetic
from nsa_plugin.settings import Settings
from tests.command_line import call, data, fake_patch

pytestmark = pytest.mark.usefixtures("plain_environment")

EXAMPLE = (
    "explain --model v3.2 --sm 90 --heads 16 --tp 8 --kv-dtype fp8_e4m3 --phase extend --q-tokens 13000 --max-kv 65536"
)


# ------------------------------------------------------------------------------------ help and usage


def test_help_lists_every_command_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--help")
    assert code == 0
    for word in (*cli.COMMANDS, "exit codes", "130", "examples", "when it can be removed"):
        assert word in " ".join(out.split())


@pytest.mark.parametrize("command", ["doctor", "explain", "patches"])
def test_help_of_a_command_says_its_flags_and_exit_codes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, f"{command} --help")
    assert code == 0
    assert "--json" in out
    assert "exit codes" in out


@pytest.mark.parametrize("command", ["", "doctor", "explain", "patches", "demo", "bench", "compare"])
def test_help_fits_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = call(capsys, f"{command} --help")
    assert [line for line in out.splitlines() if len(line) > 80] == []


def test_help_of_explain_has_a_flag_for_every_setting_that_a_decision_reads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, out, _ = call(capsys, "explain --help")
    for name in ("prefill-backend", "decode-backend", "mha-max-kv", "logits-budget-mb", "token-shard", "large-q-rows"):
        assert f"--{name}" in out
    assert "80, 86, 87, 89, 90, 100, 103, 110, 120, 121; 0 for a CPU" in " ".join(out.split())


def test_examples_in_the_help_run(capsys: pytest.CaptureFixture[str]) -> None:
    from nsa_plugin.commands.explain import EXAMPLES

    joined = EXAMPLES.replace("\\\n", " ")
    lines = [line.split(None, 1)[1] for line in joined.splitlines() if line.strip().startswith("nsa-plugin")]
    assert len(lines) == 4
    for line in lines:
        code, out, err = call(capsys, line)
        assert code == 0, (line, err)
        assert "attention" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from nsa_plugin import __version__

    assert call(capsys, "--version")[:2] == (0, f"nsa-plugin {__version__}\n")


BAD = {
    "": "required: COMMAND",
    "nonsense": "unknown command 'nonsense'. Commands: doctor, explain, patches",
    "doctr": "unknown command 'doctr'. Did you mean 'doctor'?",
    "patch": "Did you mean 'patches'?",
    "explain --q-token 3": "Did you mean --q-tokens?",
    "explain --enable-nsa-plugin": "Flags of an engine belong to that engine's command",
    "compare sglang --mem-fraction-static 0.5": "Flags of the engine go after --",
    "doctor more": "nsa-plugin doctor: error: unrecognized arguments: more (see nsa-plugin doctor --help)",
    "explain --q-tok 5": "unrecognized arguments: --q-tok",  # no abbreviations: a later flag could change their meaning
    "explain --sm -1": "'-1' is not a whole number",
    "explain --sm 9.0": "'9.0' is not a whole number",
    "explain --sm 900": "900 is not a known SM version; allowed: 80, 86, 87, 89, 90, 100, 103, 110, 120, 121; 0 for",
    "explain --model v5": "v3.2",
    "explain --heads 0": "'0' is not a number of heads a rank; allowed: 1 to 128",
    "explain --heads 200": "'200' is not a number of heads a rank; allowed: 1 to 128",
    "explain --tp 3": "--tp is 3; allowed: what divides the 128 heads of v3.2",
    "explain --tp 4 --dcp 3": "--dcp is 3; allowed: what divides --tp, 4",
    "explain --kv-dtype fp4": "fp8_e4m3",
    "explain --model v4 --kv-dtype bfloat16": "V4 has an fp8 cache only; allowed: fp8, fp8_e4m3, fp8_ds_mla, auto",
    "explain --phase prefill": "extend",
    "explain --libraries cutlass --sm 90": "allowed: flash_mla",
    "explain --libraries flash_mla": "--sm",
    "explain --memory-gb 80": "--sm",
    "explain --memory-gb nan --sm 90": "GiB above 0",
    "explain --memory-gb 1000000 --sm 90": "GiB above 0 and below 1,000,000",
    "explain --q-tokens 100 --max-kv 10": "--max-kv 10 for 1 request allows",
    "explain --q-tokens 10 --max-kv 10 --total-kv 5": "10 to 10",
    "explain --q-tokens 10 --max-kv 10 --total-kv 50": "10 to 10",
    "explain --requests 3 --q-tokens 3 --max-kv 9 --total-kv 10": "3 requests: 11 to 27",
    "explain --requests 4 --q-tokens 2": "each request has a query token at least: --q-tokens is 2, --requests 4",
    "explain --phase decode --requests 2 --q-tokens 5": "one query token a request",
    "explain --phase decode --lengths 1:9,300:300": "one query token a request: --lengths has one of 300",
    "explain --phase idle --q-tokens 5 --max-kv 9": "an idle batch has no requests: leave out --q-tokens, --max-kv",
    "explain --phase idle --lengths 5:5": "an idle batch has no requests: leave out --lengths",
    "explain --lengths 1:2,x": "'x' is not TOKENS:CONTEXT",
    "explain --lengths 9:9,5:2": "request 1: 5 query tokens need a context of at least 5 tokens, not 2",
    "explain --lengths 5:9 --max-kv 9": "--lengths",
    "explain --lengths 5:9 --requests 1": "--lengths",
    "explain --mha-max-kv lots": "'mha_max_kv' in the command line is 'lots'",
    "explain --mha-max-kv 4096": "index_topk 2048",
    "explain --logits-budget-mb 0": "at least 1",
    "explain --token-shard on --sm 90": "token_shard",
    "explain --portable on --sm 80": "portable is on and cannot work here: SM80 cannot emulate SM86",
    "explain --portable on --sm 0": "portable is on and cannot work here: a CPU cannot emulate SM86",
    "explain --phase decode --max-kv 9999 --sm 90 --decode-backend trtllm": "decode_backend is trtllm",
    "patches --version 0.30": "--engine",
    "patches --engine vllm --version new": "'new' is not a version",
    "patches --engine tgi": "vllm",
}


@pytest.mark.parametrize("command", BAD)
def test_bad_input_is_one_line_on_stderr_and_2(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, command)
    assert code == 2
    assert out == ""
    assert BAD[command] in err
    assert err.startswith("nsa-plugin")
    assert err.count("\n") == 1


def test_bad_environment_is_one_line_and_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NSA_PLUGIN_STRCT", "1")
    code, _, err = call(capsys, "explain --sm 90")
    assert code == 2
    assert "NSA_PLUGIN_STRCT" in err
    assert "Did you mean 'strict'?" in err


# ------------------------------------------------------------------------------------------- explain


def test_explain_is_the_decision_of_the_same_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, EXAMPLE)
    model = ModelShape(num_heads=128, attn_tp_size=8, kv_layout="v32_fp8")
    batch = BatchShape.from_lengths(Phase.EXTEND, [13000], [65536])
    plan = decide(model, batch, synthetic(90), Settings())
    assert found["plan"] == json.loads(json.dumps(plan.as_dict()))
    assert found["batch"] == json.loads(json.dumps(asdict(batch)))
    assert found["model"]["heads_per_rank"] == 16


@pytest.mark.parametrize("given", ["the environment", "the command line"])
def test_explain_takes_the_gpu_that_portable_emulates(
    given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = " --portable on" if given == "the command line" else ""
    if not flag:
        monkeypatch.setenv("NSA_PLUGIN_PORTABLE", "on")
    found = data(capsys, EXAMPLE + flag)
    assert found["sources"]["portable"].startswith(given)
    model = ModelShape(num_heads=128, attn_tp_size=8, kv_layout="v32_fp8")
    batch = BatchShape.from_lengths(Phase.EXTEND, [13000], [65536])
    plan = decide(model, batch, emulating(synthetic(90), 86), Settings(portable="on"))
    assert found["plan"] == json.loads(json.dumps(plan.as_dict()))
    assert (found["device"]["sm"], found["plan"]["provider"]) == (86, "cuda")
    assert "emulating SM86" in call(capsys, EXAMPLE + flag)[1]


def test_explain_table_shows_every_field_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    plan = data(capsys, EXAMPLE)["plan"]
    code, out, _ = call(capsys, f"{EXAMPLE} -v")
    assert code == 0
    words = " ".join(out.split())
    for name in (*(set(plan) - {"reasons", "indexer"}), "indexer.provider", "indexer.rows_per_chunk"):
        assert name in out
    for sentence in plan["reasons"].values():
        assert sentence.split()[0] in words


@pytest.mark.parametrize("sm", [0, 80, 90, 100])
def test_explain_is_short_and_fits_80_columns(
    sm: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = call(capsys, f"explain --sm {sm} --q-tokens 9000 --max-kv 9000")
    _, more, _ = call(capsys, f"explain --sm {sm} --q-tokens 9000 --max-kv 9000 -v")
    assert "attention" in out
    assert "stock_attention" not in out
    assert "stock_attention" in more
    assert ("tested: SM" in out, "tested: SM" in more) == (False, sm > 0)
    assert evidence(sm) in " ".join(more.split())
    assert len(out.splitlines()) < len(more.splitlines()) - 8
    assert max(map(len, (out + more).splitlines())) <= 80


@pytest.mark.parametrize(
    ("flags", "left"),
    [
        ("--model v4 --phase decode", True),
        ("--model v4 --phase target_verify", True),
        ("--model v4 --phase decode --sm 120", False),
        ("--model v4 --phase decode --portable on", False),
        ("--model v4 --phase decode --decode-backend cuda", False),
        ("--model v4 --phase extend", False),
        ("--model v3.2 --phase decode", False),
    ],
)
def test_explain_says_what_engines_run_by_their_own_code(
    capsys: pytest.CaptureFixture[str], flags: str, left: bool
) -> None:
    sm = "" if "--sm" in flags else "--sm 90 "
    notes = data(capsys, f"explain {sm}{flags} --requests 2 --max-kv 9000")["notes"]
    assert any("decode_backend is auto" in note for note in notes) == left


@pytest.mark.parametrize(
    ("flag", "v32", "v4"),
    [
        ("", "bf16", "v4_fp8"),
        ("--kv-dtype auto", "bf16", "v4_fp8"),
        ("--kv-dtype bf16", "bf16", None),
        ("--kv-dtype bfloat16", "bf16", None),
        *((f"--kv-dtype {name}", "v32_fp8", "v4_fp8") for name in ("fp8", "fp8_e4m3", "fp8_ds_mla", "FP8")),
    ],
)
def test_explain_takes_the_cache_dtypes_of_every_engine(
    flag: str, v32: str, v4: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    for model, layout in (("v3.2", v32), ("v4", v4)):
        if layout is not None:
            found = data(capsys, f"explain --sm 90 --model {model} {flag} --q-tokens 9 --max-kv 9000")
            assert found["model"]["kv_layout"] == layout


def test_explain_of_this_machine_uses_the_probed_device(capsys: pytest.CaptureFixture[str]) -> None:
    from nsa_plugin.libraries.probe import probe

    assert data(capsys, "explain")["device"]["name"] == probe().name


def test_explain_of_a_machine_without_torch_asks_for_a_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from nsa_plugin.commands import explain
    from nsa_plugin.libraries.probe import probe

    monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]  # makes `import torch` fail
    monkeypatch.setattr(explain, "probe", probe.__wrapped__)
    said = (
        "nsa-plugin explain: error: torch is not installed, so the device is unknown; name one: --sm 90, for example\n"
    )
    assert call(capsys, "explain") == (2, "", said)
    assert data(capsys, "explain --sm 90")["device"]["sm"] == 90


def test_explain_lengths_shows_how_a_prefill_is_split(capsys: pytest.CaptureFixture[str]) -> None:
    parts = data(capsys, "explain --sm 90 --lengths 300:300,512:9000,800:800")["parts"]
    assert [part["requests"] for part in parts] == [[0, 2], [1]]
    assert [part["plan"]["attention"] for part in parts] == ["mha_one_shot", "sparse_prefill"]
    _, out, _ = call(capsys, "explain --sm 90 --lengths 300:300,512:9000,800:800")
    assert "requests 0, 2: 1100 query tokens" in out
    assert "request 1: 512 query tokens" in out


def test_explain_settings_come_from_flags_then_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NSA_PLUGIN_LOGITS_BUDGET_MB", "64")
    monkeypatch.setenv("NSA_PLUGIN_MHA_MAX_KV", "0")
    found = data(capsys, "explain --sm 90 --logits-budget-mb 32 --q-tokens 100")
    assert found["settings"]["logits_budget_mb"] == 32
    assert found["settings"]["mha_max_kv"] == 0
    assert found["sources"]["logits_budget_mb"] == "the command line"
    assert found["notes"] == ["logits_budget_mb is 32 from the command line; 64 from the environment is ignored"]
    assert found["plan"]["attention"] != "mha_one_shot"
    _, out, _ = call(capsys, "explain --sm 90 --logits-budget-mb 32 --q-tokens 100")
    assert "64 from the environment is ignored" in " ".join(out.split())


def test_explain_v4_has_its_own_shape(capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, "explain --model v4 --sm 90 --q-tokens 9000 --max-kv 9000")["model"]
    assert (found["sliding_window"], found["kv_layout"]) == (128, "v4_fp8")
    assert (found["num_heads"], found["index_topk"]) == (64, 512)  # V4-Flash's


def test_explain_with_a_shared_kv_cache(capsys: pytest.CaptureFixture[str]) -> None:
    command = "explain --sm 90 --kv-dtype fp8_e4m3 --tp 8 --dcp 2 --q-tokens 4096 --max-kv 65536"
    found = data(capsys, command)
    assert found["model"]["dcp_size"] == 2
    assert not found["plan"]["dequantize_kv"]
    assert "gathers the heads of 2 ranks" in found["plan"]["reasons"]["token_shard"]
    _, out, _ = call(capsys, f"{command} -v")
    assert "of which 2 share the KV cache and attend 32 heads" in " ".join(out.split())
    assert "with every selected token on one rank, while 2 ranks share them" in found["plan"]["reasons"]["provider"]


@pytest.mark.parametrize("name", ["glm", "glm5", "glm-5", "GLM-5"])
def test_explain_glm_has_its_own_shape(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"explain --model {name} --sm 90 --kv-dtype fp8_e4m3 --tp 8 --q-tokens 9000 --max-kv 9000"
    assert "model:  GLM-5, attending as V3.2, 8 heads a rank" in call(capsys, command)[1]
    found = data(capsys, command)["model"]
    assert (found["family"], found["kv_layout"], found["num_heads"] // found["attn_tp_size"]) == ("v3.2", "v32_fp8", 8)
    assert (found["qk_nope_head_dim"], found["v_head_dim"], found["index_n_heads"]) == (192, 256, 32)


@pytest.mark.parametrize("sm", [60, 75])
def test_explain_says_why_a_gpu_older_than_every_kernel_has_no_route(
    sm: int, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = call(capsys, f"explain --sm {sm}")
    assert code == 1
    assert f"this device is SM{sm}" in " ".join(out.split())


def test_explain_without_a_kernel_says_why_and_ends_1(capsys: pytest.CaptureFixture[str]) -> None:
    command = "explain --sm 90 --libraries fa3 --q-tokens 10 --max-kv 5000"
    code, out, _ = call(capsys, command)
    assert code == 1
    assert "No route" in out
    assert "flash_mla sparse_prefill: not installed" in " ".join(out.split())
    code, out, _ = call(capsys, f"{command} --json")
    assert code == 1
    assert "flash_mla" in json.loads(out)["error"]


# ------------------------------------------------------------------------- errors on a terminal


class Screen(io.StringIO):
    """A stderr that is a terminal, of a width that only COLUMNS tells."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("command", ["explain --prefill-backend flashmla", f"explain --no {'flag-of-words ' * 9}"])
@pytest.mark.parametrize("columns", ["80", "40"])
def test_an_error_is_wrapped_between_words_on_a_terminal_and_one_line_elsewhere(
    command: str, columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    code, _, line = call(capsys, command)
    assert code == 2
    assert line.count("\n") == 1
    assert len(line) > 80
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    assert call(capsys, command)[0] == 2
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= int(columns)
    assert screen.getvalue()[-1] == "\n"
    assert " ".join(lines).split() == line.split()


def test_an_error_takes_the_width_of_the_terminal_at_stderr(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pty = pytest.importorskip("pty")
    import fcntl
    import struct
    import termios

    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.run(
        [sys.executable, "-m", "nsa_plugin.cli", "explain", "--prefill-backend", "flashmla"],
        stdout=subprocess.DEVNULL,
        stderr=terminal,
        env=environment,
    )
    os.close(terminal)
    said = os.read(main, 1 << 16).decode()
    os.close(main)
    assert done.returncode == 2
    lines = said.splitlines()
    assert 40 < max(map(len, lines)) <= 60
    assert len(lines) > 2


# ------------------------------------------------------------------------------------------- patches


def test_patches_lists_every_entry_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "patches --no-probe -v")
    assert code == 0
    for engine in engines.ENGINES.values():
        for patch in engine.ledger.PATCHES:
            assert patch.name in out
            assert patch.why.split()[0] in out


def test_patches_breaks_no_path_of_a_target_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = call(capsys, "patches --no-probe -v")
    ledgers = [engine.ledger for engine in engines.ENGINES.values()]
    paths = {target.path for ledger in ledgers for patch in ledger.PATCHES for target in patch.targets}
    assert paths <= set(out.split())
    # Only a path that is longer than a line runs over its end, and has the line for itself.
    long = {line.strip() for line in out.splitlines() if len(line) > 80}
    assert long == {path for path in paths if len(path) > 76}


@pytest.mark.parametrize("engine", engines.ENGINES)
def test_patches_are_counted_on_half_a_screen_of_80_columns(
    engine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    version = "0.30.0" if engine == "vllm" else "0.5.20"
    code, out, _ = call(capsys, f"patches --engine {engine} --version {version}")
    assert code == 0
    ledger = engines.ENGINES[engine].ledger
    needed = [patch for patch in ledger.PATCHES if patch.target(Version(version))]
    assert all(patch.need in out for patch in needed)
    counted = [int(number) for number in re.findall(r"(\d+) (?:changed|built on)", out)]
    assert sum(counted) == len(needed)
    assert len(out.splitlines()) <= 15
    assert max(map(len, out.splitlines())) <= 80


def test_patches_of_a_version_shows_that_versions_targets(capsys: pytest.CaptureFixture[str]) -> None:
    (engine,) = data(capsys, "patches --engine vllm --version 0.30.0")["engines"]
    assert engine["version"] == "0.30.0"
    ledger = engines.ENGINES["vllm"].ledger
    expected = {p.name: p.target(Version("0.30.0")) for p in ledger.PATCHES}
    assert {p["name"]: p["target"] for p in engine["patches"]} == {
        name: target.path if target else "" for name, target in expected.items()
    }


@pytest.mark.parametrize("engine", engines.ENGINES)
def test_patches_of_an_unsupported_version_ends_1(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, f"patches --engine {engine} --version 99")
    assert code == 1
    assert "outside the supported range" in " ".join(out.split())


@pytest.mark.parametrize("flags", ["", " -v"])
@pytest.mark.parametrize("state", ["missing", "not_needed", "found"])
def test_patches_says_why_a_patch_is_missing(
    state: str, flags: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *others = engines.ENGINES["vllm"].ledger.PATCHES
    states = {first.name: (state, "parameters [changed]")} | {patch.name: ("found", "its path") for patch in others}
    monkeypatch.setattr(patches, "_states", lambda engine, version, *, live: states)
    code, out, _ = call(capsys, f"patches --engine vllm --version 0.30.0{flags}")
    assert code == (state == "missing")
    assert out.count("parameters [changed]") == (state != "found")
    assert "its path" not in out
    if state != "found" and not flags:
        (line,) = [line for line in out.splitlines() if "parameters [changed]" in line]
        assert line.split() == [first.name, state, "parameters", "[changed]"]


def test_patches_indents_what_it_says_of_a_patch_and_writes_out_not_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = call(capsys, "patches --engine vllm --version 0.30.0 -v")
    ledger = engines.ENGINES["vllm"].ledger
    needed = {patch.name: bool(patch.target(Version("0.30.0"))) for patch in ledger.PATCHES}
    title, *lines = filter(None, map(str.rstrip, out.splitlines()))
    assert title.startswith("vllm: ")
    assert [line for line in lines if not line.startswith(" ")] == [
        f"{patch.name} ({patch.need}): {'not checked' if needed[patch.name] else 'unused'}" for patch in ledger.PATCHES
    ]
    details = [line for line in lines if line.startswith(" ")]
    assert len(details) >= 2 * len(ledger.PATCHES)
    assert all(re.match(r" {4}(?:\S| {2}\()", line) for line in details)  # versions below a long path


def test_live_state_of_each_kind() -> None:
    states = {
        patch.name: live.state_of(patch, Version("1.0"))
        for patch in (
            fake_patch("json:dumps"),
            fake_patch("json:gone"),
            fake_patch("json:loads", versions="<1"),
            fake_patch("json:load", probe="platform:node"),
            fake_patch("json:dump", probe="platform:absent"),
        )
    }
    assert states["toy.json:dumps"] == ("found", "json:dumps")
    assert states["toy.json:gone"][0] == "missing"
    assert states["toy.json:loads"] == ("unused", "not part of toy 1.0")
    assert states["toy.json:load"][0] == "not_needed"
    assert states["toy.json:dump"][0] == "missing"
    assert "platform:absent" in states["toy.json:dump"][1]


def test_engine_that_ends_the_probing_process_is_reported() -> None:
    absent = engines.Engine("absent", ("absent",), "absent.plugins", "ABSENT_PLUGINS")
    (state, detail) = patches.live_states(absent, Version("1.0"), [fake_patch("absent:serve")])["toy.absent:serve"]
    assert state == "missing"
    assert "importing absent ended the process with 1" in detail
    assert "No module named 'nsa_plugin.patches.absent'" in detail


@pytest.mark.engine_vllm
def test_installed_vllm_has_every_object(capsys: pytest.CaptureFixture[str]) -> None:
    (engine,) = data(capsys, "patches --engine vllm")["engines"]
    assert engine["installed"]
    states = {patch["state"] for patch in engine["patches"]}
    assert "found" in states
    assert states <= {"found", "unused", "elsewhere"}


# ------------------------------------------------------------------------------------------- process


def process(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "nsa_plugin.cli", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_interrupt_ends_130(tmp_path: Path) -> None:
    # A path entry that never answers stands for any slow import.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\n"
        "class Slow:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'nsa_plugin.commands.doctor':\n"
        "            print('waiting', file=sys.stderr, flush=True); time.sleep(60)\n"
        "sys.meta_path.insert(0, Slow())\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    with process("doctor", env=os.environ | {"PYTHONPATH": path}) as running:
        assert running.stderr
        assert running.stderr.readline() == "waiting\n"
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=120)
    assert running.returncode == 130
    assert err.strip() == "interrupted"


def test_reader_that_goes_away_makes_no_noise() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "nsa_plugin.cli", "explain", "--sm", "90", "--json"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == 1


def test_help_imports_neither_torch_nor_an_engine_nor_the_commands() -> None:
    code = (
        "import sys\nfrom nsa_plugin.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'vllm', 'sglang', 'rich', 'packaging'} & set(sys.modules)\n"
        "commands = [m for m in sys.modules if m.startswith('nsa_plugin.commands.')]\n"
        "assert not heavy and not commands, (heavy, commands)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=300)


@pytest.mark.parametrize(
    ("command", "forbidden"),
    [
        (EXAMPLE, {"torch", "vllm", "sglang"}),
        ("patches --no-probe", {"torch", "vllm", "sglang"}),
        ("doctor", {"vllm", "sglang"}),
    ],
)
def test_command_imports_no_more_than_it_needs(command: str, forbidden: set[str]) -> None:
    code = (
        f"import sys\nfrom nsa_plugin.cli import main\nmain({command.split()!r})\n"
        f"found = {forbidden!r} & set(sys.modules)\nassert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=300)
