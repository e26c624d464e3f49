"""Check that every supported FlashInfer takes the calls of the providers trtllm and flashinfer_sm120; nothing of it is
imported.

``python -m ci.flashinfer_contract`` reads the functions out of the wheel of each version that the extra
`flashinfer` of pyproject.toml allows and that the package index has, prints a table, and ends 1 if a
version lacks a parameter that is passed, requires one that is not, or no longer checks what the provider
relies on. Files that were read are kept in .cache/seams, as by ``python -m ci.seams``.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version
from rich.console import Console
from rich.table import Table

from ci.rows import ROOT
from ci.seams import JOBS
from ci.wheels import CACHE, Wheel, WheelError
from nsa_plugin.kernels.providers import flashinfer_sm120
from nsa_plugin.kernels.providers.trtllm import (
    CALLS,
    MHA_DIMS,
    MHA_FUNCTION,
    MLA_FUNCTION,
    LibraryContractError,
    arguments_of,
)

DISTRIBUTION = "flashinfer-python"
VERSIONS = CACHE / f"{DISTRIBUTION}-versions.json"

# Columns of the table, whatever the terminal: names are not cut off in a log.
WIDTH = 140

Reader = Callable[[str], str | None]

TRTLLM, SM120 = "trtllm", "flashinfer_sm120"
PROVIDERS = {TRTLLM: CALLS, SM120: flashinfer_sm120.CALLS}
SINCE = {TRTLLM: "0", SM120: "0.7.1"}
"""The first version with each provider's kernels."""


@dataclass(frozen=True, kw_only=True)
class Reliance:
    """Something that the provider takes for granted and a function's module says.

    Attributes:
        name: what it is, for the message.
        target: the function.
        pattern: regular expression that the module's normalised source (`ast.unparse`) must contain.
        since: the first version that must contain it; "" = all.
        silent: versions that do not say it; the provider keeps to it there as well.
        provider: the provider that relies on it.
    """

    name: str
    target: tuple[str, str]
    pattern: str
    since: str = ""
    silent: tuple[str, ...] = ()
    provider: str = TRTLLM

    def counts_for(self, version: Version) -> bool:
        old = bool(self.since) and version < Version(self.since)
        return not old and str(version) not in self.silent


def _dims(d_qk: int, d_v: int) -> str:
    return rf"query\.shape\[2\] == {d_qk} and key\.shape\[2\] == {d_qk} and \(?value\.shape\[2\] == {d_v}\b"


RELIANCES: tuple[Reliance, ...] = (
    *(
        Reliance(name=f"heads of {d_qk} and {d_v} values", target=MHA_FUNCTION, pattern=_dims(d_qk, d_v), since=since)
        for (d_qk, d_v), since in MHA_DIMS.items()
    ),
    Reliance(
        name="out of [tokens, heads, d_v]",
        target=MHA_FUNCTION,
        pattern=r"\(query\.shape\[0\], query\.shape\[1\], value\.shape\[2\]\)",
    ),
    Reliance(
        name="a page table of [batch, q_len, top-k]",
        target=MLA_FUNCTION,
        pattern=r"\(num_seqs, num_tokens, sparse_mla_top_k\)",
    ),
    Reliance(
        name="q of 4 dimensions",
        target=MLA_FUNCTION,
        pattern=r"query\.ndim [!=]= 4",
    ),
    Reliance(
        name="a cache of 3 dimensions",
        target=MLA_FUNCTION,
        pattern=r"kv_cache\.ndim == 3:\s+kv_cache = kv_cache\.unsqueeze\(1\)",
    ),
    Reliance(
        name="rows of kv_lora_rank + qk_rope_head_dim values",
        target=MLA_FUNCTION,
        pattern=r"qk_head_dim != expected_qk_head_dim or ckv_dim != expected_qk_head_dim",
    ),
    Reliance(
        name="out in bfloat16",
        target=MLA_FUNCTION,
        pattern=r"check_shape_dtype_device\(out, expected_out_shape, torch\.bfloat16, query\.device, 'out'\)",
    ),
    Reliance(name="backend trtllm-gen", target=MLA_FUNCTION, pattern=r"'trtllm-gen'"),
    Reliance(
        name="pages of 32 or 64 rows",
        target=MLA_FUNCTION,
        pattern=r"block_size != 32 and block_size != 64",
        silent=("0.6.13",),
    ),
    Reliance(
        name="no 65 to 127 heads",
        target=MLA_FUNCTION,
        pattern=r"64 < num_heads_q < 128",
        since="0.6.16",
    ),
    *(
        Reliance(name=name, target=MLA_FUNCTION, pattern=pattern, provider=SM120)
        for name, pattern in (
            ("records of 656 bytes", r"min_row_bytes = 528 if glm53_nope else 656"),
            ("pages of [pages, 1, page_size, 656]", r"kv_cache\.ndim == 4:\s+if kv_cache\.size\(1\) != 1"),
            ("a packed uint8 cache", r"kv_cache\.dtype != torch\.uint8"),
            (
                "bf16 queries of 576 values",
                r"qk_rope_head_dim == 64 and \(?query\.size\(-1\) == 576",
            ),
            ("up to 128 heads", r"num_heads > 128"),
            ("no lengths", r"if seq_lens is None:\s+return None"),
            ("backend sparse", r"backend == 'sparse'"),
        )
    ),
)


@dataclass(frozen=True)
class Finding:
    """One function of one version: the module that defines it, and what is wrong with it."""

    version: str
    provider: str
    target: tuple[str, str]
    defined_in: str
    problems: tuple[str, ...]


class Missing(LookupError):
    """A function cannot be found in the files."""


def parameters_of(arguments: ast.arguments) -> dict[str, inspect.Parameter]:
    """A function's parameters as `inspect.signature` would give them; defaults are the expressions' text."""
    kinds = inspect.Parameter
    found: dict[str, inspect.Parameter] = {}
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    for index, argument in enumerate(positional):
        default: Any = kinds.empty
        if index >= first_default:
            default = ast.unparse(arguments.defaults[index - first_default])
        found[argument.arg] = kinds(argument.arg, kinds.POSITIONAL_OR_KEYWORD, default=default)
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        default = kinds.empty if value is None else ast.unparse(value)
        found[argument.arg] = kinds(argument.arg, kinds.KEYWORD_ONLY, default=default)
    return found


def find_function(
    read: Reader, module: str, name: str, seen: frozenset[str] = frozenset()
) -> tuple[str, ast.Module, ast.FunctionDef]:
    """The file, its tree and the definition of what `name` means in a module; imports are followed.

    Raises:
        Missing: it cannot be found.
    """
    stem = module.replace(".", "/")
    for path in (f"{stem}.py", f"{stem}/__init__.py"):
        if path not in seen and (text := read(path)) is not None:
            break
    else:
        raise Missing(f"{module} is not there")
    tree = ast.parse(text, path)
    package = module if path.endswith("/__init__.py") else module.rpartition(".")[0]
    stars = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return path, tree, node
        if not isinstance(node, ast.ImportFrom):
            continue
        source = node.module or ""
        if node.level:
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            source = ".".join([*base, source]) if source else ".".join(base)
        for alias in node.names:
            if alias.name == "*":
                stars.append(source)
            elif (alias.asname or alias.name) == name:
                return find_function(read, source, alias.name, seen | {path})
    for source in stars:
        try:
            return find_function(read, source, name, seen | {path})
        except Missing:
            continue
    raise Missing(f"{module} has no function {name}")


def check_function(read: Reader, version: str, target: tuple[str, str], provider: str = TRTLLM) -> Finding:
    """Hold a provider's call against one function of one version."""
    calls = PROVIDERS[provider]
    keywords = calls[target]
    try:
        path, tree, function = find_function(read, *target)
    except Missing as error:
        return Finding(version, provider, target, "", (str(error),))
    parameters = parameters_of(function.args)
    problems = []
    wanted = keywords.always | keywords.if_known
    wanted |= {name for name, since in keywords.since.items() if Version(version) >= Version(since)}
    try:
        arguments_of(target, parameters, version, dict.fromkeys(wanted), calls)
    except LibraryContractError as error:
        problems.append(str(error))
    source = ast.unparse(tree)
    problems += [
        f"{path} no longer says: {reliance.name}"
        for reliance in RELIANCES
        if (reliance.provider, reliance.target) == (provider, target)
        and reliance.counts_for(Version(version))
        and not re.search(reliance.pattern, source)
    ]
    return Finding(version, provider, target, path, tuple(problems))


def check_version(version: str) -> list[Finding]:
    """The functions of one version that providers call, out of its wheel."""
    called = [
        (name, target)
        for name, calls in PROVIDERS.items()
        for target in calls
        if Version(version) >= Version(SINCE[name])
    ]
    try:
        with Wheel(DISTRIBUTION, version) as wheel:
            return [check_function(wheel.read, version, target, name) for name, target in called]
    except WheelError as error:
        return [Finding(version, name, target, "", (str(error),)) for name, target in called]


def supported_versions() -> list[str]:
    """The versions on the package index that the extra `flashinfer` allows; those of the last time if it is silent.

    Raises:
        WheelError: the index is silent and nothing was kept.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = Requirement(project["optional-dependencies"]["flashinfer"][0]).specifier
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "index", "versions"]
    done = subprocess.run([*command, DISTRIBUTION], capture_output=True, text=True)
    listed: list[str] = []
    for line in done.stdout.splitlines():
        if line.startswith("Available versions:"):
            listed = [version.strip() for version in line.partition(":")[2].split(",")]
    if listed:
        VERSIONS.parent.mkdir(parents=True, exist_ok=True)
        VERSIONS.write_text(json.dumps(listed))
    elif VERSIONS.is_file():
        listed = json.loads(VERSIONS.read_text())
    else:
        raise WheelError(f"no versions of {DISTRIBUTION}: {done.stderr.strip()}")
    return sorted((version for version in listed if allowed.contains(version)), key=Version)


def table_of(findings: Iterable[Finding]) -> Table:
    table = Table("flashinfer", "provider", "function", "defined in", "outcome")
    for finding in findings:
        outcome = "; ".join(finding.problems) or "ok"
        table.add_row(finding.version, finding.provider, finding.target[1], finding.defined_in, outcome)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.flashinfer_contract", description=__doc__.splitlines()[0])
    parser.add_argument("--version", action="append", metavar="V", help="only this version; may be repeated")
    versions = parser.parse_args().version or supported_versions()
    with ThreadPoolExecutor(JOBS) as pool:
        findings = [finding for found in pool.map(check_version, versions) for finding in found]
    Console(markup=False, highlight=False, width=WIDTH).print(table_of(findings))
    failed = {finding.version for finding in findings if finding.problems}
    print(f"{len(set(versions)) - len(failed)} of {len(set(versions))} versions take the calls")
    return 1 if failed or not versions else 0


if __name__ == "__main__":
    sys.exit(main())
