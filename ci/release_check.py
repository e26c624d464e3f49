"""Check a release: build it, check its metadata, and try the wheel with each engine in a clean environment.

``python -m ci.release_check`` takes the newest version of each engine of matrix.toml that runs on a CPU. The locked
requirements come from ci/setup.sh; nsa-plugin comes from the wheel by ``pip install``, as a user would type it.

The engines' builds for a GPU are not installed. For every version of matrix.toml uv resolves what ``pip install`` of
the engine and the wheel would bring, for Linux on x86-64, and nothing is downloaded but metadata.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nsa_plugin
from ci.rows import ROOT, Engine, engines

ENVIRONMENTS = ROOT / ".cache" / "release"
# Of the environment that runs this; `make release-check` installs ci/requirements-release.txt there.
SCRIPTS = sysconfig.get_path("scripts")
NO_UV = f"uv is neither in {SCRIPTS} nor on PATH"
# Placed on the import path as in tests/sglang: the package index has no torchvision for a CPU build of torch.
STUBS = {"sglang": ROOT / "ci" / "stubs" / "sglang-cpu"}
# What `doctor` has to say of an engine on a CPU.
EXPECTED = {"vllm": "ready", "sglang": "SGLang serves DeepSeek sparse attention on a GPU only"}
# Generous: the machine may be busy. What is measured is printed.
MAX_DISABLED_S = 1.0

# In a process of the engine: load the plugin as the engine does, with the kill switch on. ``heavy`` lists what only the
# plugin needs and the entry point imported; modules of the engine itself do not count.
LOAD_DISABLED = """
import json, sys, time
from importlib import import_module
module, group = sys.argv[1:]
loader = import_module(module)
found = loader.load_plugins_by_group(group)
entry = found["nsa_plugin"]
register = entry[0] if isinstance(entry, tuple) else entry
before, started = set(sys.modules), time.perf_counter()
register()
seconds = time.perf_counter() - started
new = sorted(set(sys.modules) - before)
costly = ("torch", "triton", "nsa_plugin.kernels", "nsa_plugin.tools")
heavy = [name for name in new if name.startswith(costly)]
print("RESULT " + json.dumps({"seconds": seconds, "heavy": heavy, "value": register.__module__}))
"""
LOADERS = {"vllm": ("vllm.plugins", "vllm.general_plugins"), "sglang": ("sglang.srt.plugins", "sglang.srt.plugins")}


class CheckError(Exception):
    """A check of the release failed."""


@dataclass(frozen=True)
class Environment:
    """A clean virtual environment with one version of an engine."""

    engine: Engine
    version: str
    folder: Path

    def run(self, *command: str, check: bool = True, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment outside the source tree."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "NSA_PLUGIN_"))}
        if self.engine.name in STUBS:
            clean["PYTHONPATH"] = str(STUBS[self.engine.name])
        program = str(self.folder / "bin" / command[0])
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [program, *command[1:]], cwd=folder, env=clean | environ, capture_output=True, text=True, timeout=900
            )
        if check and done.returncode:
            raise CheckError(
                f"{' '.join(command)[:80]} ended {done.returncode}: {(done.stderr or done.stdout)[-2000:]}"
            )
        return done

    def packages(self) -> dict[str, str]:
        listed = self.run("python", "-m", "pip", "list", "--format", "json").stdout
        return {package["name"]: package["version"] for package in json.loads(listed)}


def say(text: str) -> None:
    print(f"release-check: {text}", flush=True)


def build(folder: Path) -> Path:
    """Build the wheel and the sdist, and check what the package index would; the wheel."""
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder], cwd=ROOT, check=True)
    files = sorted(map(str, folder.iterdir()))
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def prepare(engine: Engine, version: str) -> Environment:
    """Make a clean environment with the engine and without the plugin."""
    environment = Environment(engine, version, ENVIRONMENTS / f"{engine.name}-{version}")
    shutil.rmtree(environment.folder, ignore_errors=True)
    command = ["ci/setup.sh", str(environment.folder.relative_to(ROOT)), "ci/requirements-build.txt", engine.lock]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PLUGIN": "none"}, check=True)
    if version != engine.locked_version():
        # As in ci/matrix.py: the other versions run with the packages of the locked one.
        requirement = f"{engine.run_distribution}=={version}"
        environment.run("python", "-m", "pip", "install", "--quiet", "--no-input", "--no-deps", requirement)
    return environment


def install(environment: Environment, wheel: Path) -> None:
    """Install the wheel as a user does; it must bring nothing else and leave every version alone.

    Raises:
        CheckError: another package was installed, changed or removed.
    """
    before = environment.packages()
    environment.run("python", "-m", "pip", "install", "--no-input", "--disable-pip-version-check", str(wheel))
    after = environment.packages()
    if after != before | {"nsa-plugin": nsa_plugin.__version__}:
        raise CheckError(f"installing the wheel changed more than itself: {sorted(before.items() ^ after.items())}")


def check_doctor(report: Mapping[str, Any], engine: Engine, version: str) -> None:
    """Check that `doctor` finds the engine and says whether it serves here.

    Raises:
        CheckError: it does not.
    """
    (state,) = [state for state in report["engines"] if state["engine"] == engine.name]
    found = (state["distribution"], state["version"], state["reason"])
    if found != (engine.run_distribution, version, EXPECTED[engine.name]):
        raise CheckError(f"doctor says {found}")
    if report["ok"] != (EXPECTED[engine.name] == "ready"):
        raise CheckError(f"doctor says ok: {report['ok']}")


def smoke(environment: Environment) -> list[str]:
    """Try the installed wheel; what was found, a line each.

    Raises:
        CheckError: the first check that failed.
    """
    engine = environment.engine
    said = environment.run("nsa-plugin", "--version").stdout.strip()
    if said != f"nsa-plugin {nsa_plugin.__version__}":
        raise CheckError(f"--version says {said!r}")
    where = environment.run("python", "-c", "import nsa_plugin; print(nsa_plugin.__file__)").stdout.strip()
    if not where.startswith(str(environment.folder)):
        raise CheckError(f"nsa_plugin is imported from {where}")
    done = environment.run("nsa-plugin", "doctor", "--json", check=False)
    check_doctor(json.loads(done.stdout), engine, environment.version)
    loaded = environment.run("python", "-c", LOAD_DISABLED, *LOADERS[engine.name], NSA_PLUGIN_ENABLED="0")
    (line,) = [line for line in loaded.stdout.splitlines() if line.startswith("RESULT ")]
    result = json.loads(line.removeprefix("RESULT "))
    if result["value"] != f"nsa_plugin.backends.{engine.name}":
        raise CheckError(f"{engine.name} loads {result['value']}")
    if result["heavy"] or result["seconds"] > MAX_DISABLED_S:
        raise CheckError(f"the entry point, turned off, takes {result['seconds']:.3f} s and imports {result['heavy']}")
    return [
        said,
        f"doctor: {EXPECTED[engine.name]}",
        f"turned off: {1000 * result['seconds']:.0f} ms",
    ]


def find_uv() -> str | None:
    """The uv of this environment, whose version and hashes are locked; without it the one on PATH."""
    return shutil.which("uv", path=SCRIPTS) or shutil.which("uv")


def resolved(*requirements: str) -> set[str]:
    """What these requirements bring, as name==version, from the package index.

    Raises:
        CheckError: they contradict each other, or there is no uv.
    """
    uv = find_uv()
    if uv is None:
        raise CheckError(NO_UV)
    # SGLang's wheels are for glibc 2.34 or later from 0.5.23 on.
    command = ["pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", "3.11"]
    done = subprocess.run(
        [uv, *command, "--python-platform", "x86_64-manylinux_2_35", "-"],
        input="\n".join(requirements),
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        raise CheckError(f"{requirements[0]} does not resolve: {' '.join(done.stderr.split())[-600:]}")
    return set(done.stdout.splitlines())


def resolve(engine: Engine, version: str, wheel: Path) -> str:
    """Check that the wheel fits the engine's build for a GPU and would bring nothing but itself; what was found.

    Raises:
        CheckError: it does not.
    """
    requirement, plugin = f"{engine.distribution}=={version}", f"nsa-plugin @ {wheel.as_uri()}"
    alone, beside = resolved(requirement), resolved(requirement, plugin)
    if beside != alone | {plugin}:
        raise CheckError(f"the wheel would change more than itself: {sorted(beside ^ (alone | {plugin}))}")
    return f"{len(alone)} packages, with the wheel one more"


def chosen(engine: str | None, versions: list[str] | None) -> list[tuple[Engine, str]]:
    """Each engine with its newest version that runs on a CPU, or the given versions."""
    return [
        (entry, version)
        for entry in engines().values()
        if engine in (None, entry.name)
        for version in (entry.run if versions else entry.run[-1:])
        if not versions or version in versions
    ]


def for_gpus(engine: str | None, versions: list[str] | None) -> list[tuple[Engine, str]]:
    """Every supported version of each engine, or the given versions."""
    return [
        (entry, version)
        for entry in engines().values()
        if engine in (None, entry.name)
        for version in entry.seams
        if not versions or version in versions
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ci.release_check",
        description="Build the release, try the wheel with each engine, and resolve it beside every supported version.",
    )
    parser.add_argument("--engine", choices=tuple(engines()), help="only this engine")
    parser.add_argument("--version", action="append", metavar="V", help="this version, not the newest; may be repeated")
    parser.add_argument("--only", choices=("install", "resolve"), help="only this part")
    parser.add_argument("--keep", action="store_true", help="keep the environments in .cache/release")
    args = parser.parse_args()
    todo = chosen(args.engine, args.version) if args.only != "resolve" else []
    rows = for_gpus(args.engine, args.version) if args.only != "install" else []
    if not todo and not rows:
        parser.error("no row of ci/matrix.toml is chosen")
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        for engine, version in todo:
            started = time.monotonic()
            try:
                environment = prepare(engine, version)
                install(environment, wheel)
                outcome = "ok: " + "; ".join(smoke(environment))
            except (CheckError, subprocess.SubprocessError, OSError) as error:
                failed += 1
                outcome = f"FAILED: {error}"
            say(f"{engine.run_distribution} {version}: {outcome} ({time.monotonic() - started:.0f} s)")
            if not args.keep:
                shutil.rmtree(ENVIRONMENTS / f"{engine.name}-{version}", ignore_errors=True)
        if rows and find_uv() is None:
            if os.environ.get("CI"):  # a green job must not hide a check that never ran
                say(f"FAILED: {NO_UV}; in CI it must resolve the wheel beside {len(rows)} engine versions")
                return 1
            say(f"NOT CHECKED: what pip would bring beside {len(rows)} versions of the engines; it needs uv")
            return 1 if failed or args.only else 0
        with ThreadPoolExecutor(4) as pool:  # uv waits for the index most of the time
            pending = [(row, pool.submit(resolve, *row, wheel)) for row in rows]
            for (engine, version), future in pending:
                try:
                    outcome = f"resolves: {future.result()}"
                except (CheckError, subprocess.SubprocessError) as error:
                    failed += 1
                    outcome = f"FAILED: {error}"
                say(f"{engine.distribution} {version} for a GPU: {outcome}; not installed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
