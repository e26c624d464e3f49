"""List the licence of every direct requirement that is installed, and fail if one is not allowed.

``python -m ci.audit`` reads the metadata of its environment, without an index. Known vulnerabilities are looked up in
.github/workflows/audit.yml, which has a network.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement

from ci.rows import ROOT

# SPDX identifiers, and the classifiers of packages that declare none. MPL-2.0 is for tools, which are not distributed.
ALLOWED = {
    "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "ISC", "LLVM-exception", "MIT",
    "MPL-2.0", "PSF-2.0", "Zlib",
    "Apache Software License", "BSD License", "ISC License (ISCL)", "MIT License", "Python Software Foundation License",
}  # fmt: skip


def direct() -> list[str]:
    """Names of the requirements in pyproject.toml, all extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    return sorted({Requirement(text).name for text in texts})


def licences(name: str) -> list[str]:
    """Every licence that an installed distribution declares; a long text, which is a whole licence, does not count."""
    found: Any = metadata.metadata(name)
    expression = found.get("License-Expression", "")
    if expression:
        return sorted(set(re.split(r"[\s()]+", expression)) - {"AND", "OR", "WITH", ""})
    classifiers = [text for text in found.get_all("Classifier") or [] if text.startswith("License :: OSI Approved :: ")]
    text = found.get("License", "")
    return [c.rpartition(" :: ")[2] for c in classifiers] or ([text] if text and "\n" not in text else [])


def refused(names: Iterable[str]) -> dict[str, list[str]]:
    """The distributions with a licence that is not allowed, or without any, and their licences."""
    found = {name: licences(name) for name in names}
    return {name: found for name, found in found.items() if not found or not set(found) <= ALLOWED}


def installed(names: Iterable[str]) -> list[str]:
    present = {distribution.name for distribution in metadata.distributions()}
    return [name for name in names if name in present]


def main() -> int:
    names = installed(direct())
    for name in names:
        print(f"{name} {metadata.version(name)}: {', '.join(licences(name)) or 'no licence declared'}")
    bad = refused(names)
    for name, found in bad.items():
        print(f"REFUSED {name}: {', '.join(found) or 'no licence declared'}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
