"""Run the engine matrix: every row of matrix.toml, or a selection, and record the results.

``python -m ci.matrix`` checks all seams, then starts each engine version for real, one after the other, in
the engine's virtual environment: versions other than the locked one are installed in folders and come
first on the import path. Results go to docs/compatibility.json, from which the table in the docs is made.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from rich.console import Console

from ci import docs, seams
from ci.rows import CHECKS, ROOT, Engine, Row, add_options, checked, chosen, save

ENGINES_FOLDER = ROOT / ".cache" / "engines"


def python_of(engine: Engine) -> str:
    return str(ROOT / engine.venv / "bin" / "python")


def install_beside(engine: Engine, version: str) -> Path | None:
    """The folder with this version of the engine, or None if the environment has it."""
    if version == engine.locked_version():
        return None
    folder = ENGINES_FOLDER / f"{engine.run_distribution}-{version}"
    if not folder.is_dir():
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        pip = [python_of(engine), "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
        requirement = f"{engine.run_distribution}=={version}"
        subprocess.run([*pip, "--no-deps", "--target", str(partial), requirement], check=True, cwd=ROOT)
        partial.rename(folder)
    return folder


def environment(folder: Path | None) -> dict[str, str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("NSA_PLUGIN_")}
    if folder:
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), environ.get("PYTHONPATH")]))
    return environ


def installed_version(engine: Engine, environ: dict[str, str]) -> str:
    """The version that a process of the engine's environment would import."""
    ask = f"from importlib.metadata import version; print(version({engine.run_distribution!r}))"
    command = [python_of(engine), "-c", ask]
    return subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def outcome_of(report: Path) -> tuple[bool, str]:
    """Whether a pytest run passed, from its JUnit file: at least one test passed and none failed."""
    if not report.is_file():
        return False, "pytest left no report"
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    total, *others = (int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped"))
    passed = total - sum(others)
    failures, errors, skipped = others
    counts = f"{passed} passed" + "".join(
        f", {n} {what}" for n, what in ((failures + errors, "failed"), (skipped, "skipped")) if n
    )
    return passed > 0 and failures + errors == 0, counts


def run_version(engine: Engine, version: str, console: Console) -> Row:
    """Start one version of an engine for real: its tests with the engine's marker."""
    started = time.monotonic()
    try:
        environ = environment(install_beside(engine, version))
        found = installed_version(engine, environ)
    except (subprocess.CalledProcessError, OSError) as error:
        return checked(engine, version, "run", False, f"could not be installed: {error}")
    if found != version:
        return checked(engine, version, "run", False, f"the environment imports {found} instead")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python_of(engine), "-m", "pytest", engine.tests, "-m", engine.marker, f"--junitxml={report}"]
        console.print(f"{engine.name} {version}: {' '.join(command[2:5])}")
        subprocess.run(command, env=environ, cwd=ROOT)
        ok, counts = outcome_of(report)
    return checked(engine, version, "run", ok, f"{counts} in {time.monotonic() - started:.0f} s")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ci.matrix",
        description="Run the engine matrix and record it in docs/compatibility.json.",
        epilog="exit codes: 0 if every row that ran passed, 1 if one failed, 2 on bad usage",
    )
    add_options(parser)
    parser.add_argument("--check", choices=CHECKS, help="only this check")
    parser.add_argument("--no-record", action="store_true", help="do not write docs/compatibility.json")
    args = parser.parse_args()
    console = Console(markup=False, highlight=False, soft_wrap=True)
    wanted = {check: chosen(args, check) if args.check in (None, check) else [] for check in CHECKS}
    if not any(wanted.values()):
        parser.error("no row of ci/matrix.toml is chosen")
    rows: list[Row] = []

    def record(new: list[Row]) -> None:
        rows.extend(new)
        if not args.no_record:
            save(new)
            docs.write()

    if wanted["seams"]:
        record(seams.check_all(wanted["seams"], console))
    for engine, version in wanted["run"]:
        row = run_version(engine, version, console)
        console.print(f"{row.engine} {row.version}: {row.outcome}, {row.detail}")
        record([row])  # after each: a run of an hour that is interrupted keeps what it has
    failed = [row for row in rows if row.outcome != "ok"]
    for row in failed:
        console.print(f"FAILED {row.engine} {row.version} ({row.check}): {row.detail}")
    console.print(f"{len(rows) - len(failed)} of {len(rows)} rows passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
