"""``nsa-plugin bench`` as a user meets it where there is no GPU, and with a clock in its place."""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nsa_plugin import cli
from nsa_plugin.commands import bench
from nsa_plugin.tools.bench import cases, record, rivals, runner
from nsa_plugin.tools.bench.cases import SUITES
from nsa_plugin.tools.bench.runner import run_suite
from nsa_plugin.tools.bench.workload import Context
from nsa_plugin.tools.pages import kernels, summary
from tests.tools.bench import fakes
from tests.tools.pages.records import ROWS, one_record


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        code = cli.main(["bench", *arguments])
    except SystemExit as error:
        code = int(error.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_list_names_every_suite(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--list")
    assert code == 0
    for name, suite in SUITES.items():
        assert name in out
        assert suite.about.split()[0] in out
    code, out, _ = call(capsys, "topk", "--list")
    assert code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "suite is 'nonsense'; allowed: sparse-mla-prefill"),
        (["sparse-mla-prefil"], "suite is 'sparse-mla-prefil'. Did you mean 'sparse-mla-prefill'?"),
        (["report", "topk"], "report takes no suites"),
        (["topk", "--plots"], "--plots belongs to"),
        (["--provider", "cutlass"], "--provider is 'cutlass'; allowed:"),
        (["--budget", "0"], "'0' is not a number of seconds above 0"),
        (["--budget", "nan"], "'nan' is not a number of seconds above 0"),
        (["--runs", "1.5"], "'1.5' is not a whole number of at least 1"),
        (["--tiny", "--json", "x"], "--tiny makes no record"),
        (["topk", "--records", "docs/benchmarks"], "--records belongs to"),
        (["report", "--list"], "report takes --records and --plots; leave out --list"),
        (["--portable", "--back-to-back"], "--portable and --back-to-back make different records"),
        (["report", "--records", "no/such/folder"], "no/such/folder, which is no directory"),
        (["report", "--records", "/"], "--records is /, which has no page beside it; allowed: a folder below it"),
    ],
)
def test_bad_usage_is_one_line_and_ends_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "option",
    [
        ["--provider", "triton"],
        ["--budget", "60"],
        ["--runs", "3"],
        ["--back-to-back"],
        ["--portable"],
        ["--tiny"],
        ["--json", "x"],
        ["--commit", "0123abc"],
    ],
)
def test_what_measures_nothing_takes_no_option_of_measuring(
    option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = "nsa-plugin bench: error:"
    said = f"{error} report takes --records and --plots; leave out {option[0]}\n"
    assert call(capsys, "report", "--records", str(tmp_path), *option) == (2, "", said)
    for suites in ([], ["topk"]):
        assert call(capsys, "--list", *suites, *option) == (
            2,
            "",
            f"{error} --list measures nothing; leave out {option[0]}\n",
        )


def test_every_option_is_known_as_one_of_measuring_or_of_the_report() -> None:
    parser = argparse.ArgumentParser(epilog="")
    bench.add_arguments(parser)
    groups = {group.title: group for group in parser._action_groups}
    for title, options in (("measuring", bench.MEASURING), (bench.REPORT, bench.REPORTING)):
        assert tuple(name for action in groups[title]._group_actions for name in action.option_strings) == options


def test_without_a_gpu_it_says_so_and_ends_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = call(capsys, "topk")
    assert (code, out) == (2, "")
    assert err == (
        "nsa-plugin bench: error: measuring needs an NVIDIA GPU, and torch sees none; "
        "--list and report work without one\n"
    )


def test_listing_and_reporting_need_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom nsa_plugin.cli import main\nmain(['bench', '--list'])\n"
        f"main(['bench', 'report', '--records', {str(tmp_path)!r}])\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=300)


def test_report_rewrites_the_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, page = tmp_path / "benchmarks", tmp_path / "benchmarks.md"
    path = record.write(one_record(ROWS), folder)
    code, _, err = call(capsys, "report", "--records", str(folder))
    assert code == 2
    assert "benchmarks.md does not exist" in err
    page.write_text("<!-- generated: kernel-highlights -->\n<!-- end of kernel-highlights -->\n")
    code, out, _ = call(capsys, "report", "--records", str(folder))
    assert code == 0
    assert set(out.splitlines()) == {
        f"rewrote {made}" for made in (page, folder / "records.md", path.with_suffix(".md"))
    }
    assert call(capsys, "report", "--records", str(folder))[:2] == (
        0,
        f"up to date: {page} and the pages in {folder}\n",
    )


def test_report_in_the_folder_of_the_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name, which has a dot, is also its page's."""
    folder, page, other = tmp_path / "b-0.1", tmp_path / "b-0.1.md", tmp_path / "b-0.md"
    record.write(one_record(ROWS), folder)
    for path in (page, other):
        path.write_text("<!-- generated: kernel-highlights -->\n<!-- end of kernel-highlights -->\n")
    monkeypatch.chdir(folder)
    code, out, err = call(capsys, "report", "--records", ".")
    assert code == 0, err
    assert f"rewrote {page}\n" in out
    assert summary.NOTHING in page.read_text()
    assert summary.NOTHING not in other.read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "not JSON: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (json.dumps(one_record(ROWS) | {"host": []}).encode(), "'host' is not an object"),
        (b'{"schema": 1, "kind": "comparison"}', "'suite' is missing"),
    ],
)
def test_a_record_that_cannot_be_reported_is_named(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "benchmarks" / "h200" / "broken.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    (tmp_path / "benchmarks.md").write_text("")
    code, out, err = call(capsys, "report", "--records", str(tmp_path / "benchmarks"))
    assert (code, out, err) == (2, "", f"nsa-plugin bench: error: {path}: {message}\n")


@pytest.fixture
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend to be an H200 with a fake clock; the suite of scalars is measured."""
    from nsa_plugin.tools.bench import timing

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(timing, "CudaTimer", functools.partial(fakes.FakeTimer, {1.0: 300.0, 3.0: 900.0}))
    monkeypatch.setattr(timing, "measure_rates", lambda timer: fakes.RATES)
    monkeypatch.setitem(cases.SUITES, "scalars", fakes.SUITE)


@pytest.mark.usefixtures("_on_a_gpu")
def test_run_prints_a_table_and_writes_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "scalars", "--json", str(tmp_path), "--commit", "0123abc", "--runs", "3")
    assert code == 0, err
    text = " ".join(out.split())
    assert "NVIDIA H200: copy 4000 GB/s, bf16 matmul 600 TFLOPS, fp8 matmul 1200 TFLOPS" in text
    assert "scalar: q 1, kv 1" in text
    assert "refused: absent for scalar: No module named 'absent' (3 cases)" in text
    made = json.loads((tmp_path / "h200" / "scalars.json").read_text())
    assert made["host"]["commit"] == "0123abc"
    assert made["host"]["l2"] == "flushed"
    assert (made["host"]["copy_gb_s"], made["host"]["matmul_tflops"]) == (4000.0, 600.0)
    assert [row["provider"] for row in made["rows"]] == ["stock", "ours", "other"] * 3
    assert {row["runs"] for row in made["rows"]} == {3}


@pytest.mark.usefixtures("_on_a_gpu")
def test_runs_back_to_back_make_a_record_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "scalars", "--json", str(tmp_path), "--commit", "0123abc", "--back-to-back")
    assert code == 0, err
    made = json.loads((tmp_path / "h200" / "scalars-back-to-back.json").read_text())
    assert (made["suite"], made["host"]["l2"]) == ("scalars-back-to-back", "back to back")
    assert not (tmp_path / "h200" / "scalars.json").exists()


@pytest.mark.usefixtures("_on_a_gpu")
def test_kernels_of_the_engines_beside_the_others_make_a_record_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is missing where the suite runs again takes no figure of its kernels away."""
    monkeypatch.setattr(rivals, "RIVALS", {"other"})
    code, _, err = call(capsys, "scalars", "--json", str(tmp_path), "--commit", "0123abc")
    assert code == 0, err
    made = json.loads((tmp_path / "h200" / "scalars-beside-rivals.json").read_text())
    assert made["suite"] == "scalars-beside-rivals"
    assert not (tmp_path / "h200" / "scalars.json").exists()


@pytest.mark.usefixtures("_on_a_gpu")
def test_the_portable_path_makes_a_record_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from nsa_plugin.kernels.triton import device

    monkeypatch.setattr(device, "_emulated", None)
    contexts: list[Context] = []
    monkeypatch.setattr(
        runner, "run_suite", lambda *args, **named: contexts.append(args[2]) or run_suite(*args, **named)
    )
    code, _, err = call(capsys, "scalars", "--json", str(tmp_path), "--commit", "0123abc", "--portable")
    assert code == 0, err
    assert [(one.sm, device.is_emulating()) for one in contexts] == [(86, True)]
    assert device._emulated == 86
    path = tmp_path / "h200" / "portable-scalars.json"
    made = json.loads(path.read_text())
    assert (made["suite"], made["host"]["emulates"]) == ("portable-scalars", 86)
    assert made["host"]["emulates_blocks"]
    assert not (tmp_path / "h200" / "scalars.json").exists()
    rates = {row["provider"]: row["tflops"] for row in made["rows"] if "tflops" in row}
    median = next(row["median_us"] for row in made["rows"] if row["provider"] == "other")
    assert rates == {"other": pytest.approx(6000 / median, rel=1e-3)}  # of 6e9 operations
    for row in made["rows"]:
        row.pop("absorb_us", None)
        row.pop("up_projection_us", None)
    page = kernels.page(path, made)
    assert "the plugin's kernels as on SM86 (99 KiB of shared memory for a block" in page


@pytest.mark.usefixtures("_on_a_gpu")
def test_an_older_gpu_cannot_emulate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    code, _, err = call(capsys, "scalars", "--portable")
    assert code == 2
    assert "--portable needs an SM86 or later GPU; this one is SM80" in err


@pytest.mark.usefixtures("_on_a_gpu")
def test_wrong_result_ends_1_and_has_no_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cases.SUITES, "scalars", fakes.suite_with_a_wrong_contender())
    code, out, _ = call(capsys, "scalars", "--json", str(tmp_path))
    assert code == 1
    assert "FAILED: far for scalar: wrong result: out: 1 of 1 sampled values" in " ".join(out.split())
    assert "✗ wrong or failed in scalars" in out
    made = json.loads((tmp_path / "h200" / "scalars.json").read_text())
    assert "far" not in {row["provider"] for row in made["rows"]}
    assert {entry["provider"] for entry in made["failed"]} == {"far"}


@pytest.mark.usefixtures("_on_a_gpu")
def test_tiny_measures_the_tiny_cases(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "scalars", "--tiny")
    assert code == 0
    assert "q 1" in out
    assert "q 2" not in out
