"""The text form of the ledger's entries, which the data modules of both engines use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from textwrap import dedent

from nsa_plugin.patches.ledger import Kind, Need, Patch, Target

_HEAD = re.compile(r"(\S+)(?: \[(\S+)\])?: (.+)")
_FIELD = re.compile(r" +([a-z]+): (.*)")
_TARGET = re.compile(r"(?:(class|value) )?([^ (]+)(?:\((.*)\))?")


@dataclass(frozen=True, kw_only=True)
class Section:
    """Patches of one engine that share a need.

    Attributes:
        prefix: the prefix of their names.
        versions: the engine versions in which their targets exist, unless an entry says otherwise.
        package: the package of their targets; "" = the engine's.
        names: what `{name}` in a target stands for.
        renamed: the names that depend on the version: {versions: names}.
    """

    engine: str
    prefix: str
    need: Need
    versions: str
    package: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def patches(self, text: str) -> tuple[Patch, ...]:
        """Read entries of this form, each a patch or, without a replacement, a requirement:

            name: [class |value ]module:Owner.attribute[(parameters)]
                why the plugin changes it or builds on it
                replacement: module:function, relative to the engine's adapter
                upstream: the engine's issue or change
                until: when the patch can go

        The target's module is relative to the package. A target continues on the next line after "," or "(".
        "name [versions]: target" gives a target in other versions than the section's, and may be repeated.

        Raises:
            TypeError, ValueError, KeyError: the text has another form, or a name that is not known.
        """
        found: dict[str, tuple[list[Target], dict[str, str]]] = {}
        fields: dict[str, str] = {}
        what = "why"
        lines = iter(dedent(text).strip().splitlines())
        for line in lines:
            if line.startswith(" "):
                match = _FIELD.fullmatch(line)
                what, words = match.groups() if match else (what, line.strip())
                fields[what] = f"{fields.get(what, '')} {words}".strip()
                continue
            while line.endswith((",", "(")):
                line += " " * line.endswith(",") + next(lines).strip()
            match = _HEAD.fullmatch(line)
            if match is None:
                raise ValueError(f"{line!r} is not of the form 'name [versions]: target'")
            name, versions, target = match.groups()
            targets, fields = found.setdefault(name, ([], {}))
            if fields:
                raise ValueError(f"there are two entries {name!r}")
            targets += self._targets(target, versions)
            what = "why"
        return tuple(self._patch(name, tuple(targets), **fields) for name, (targets, fields) in found.items())

    def _patch(
        self,
        name: str,
        targets: tuple[Target, ...],
        *,
        why: str,
        replacement: str = "",
        upstream: str = "",
        until: str = "",
    ) -> Patch:
        if bool(replacement) != bool(until):
            raise ValueError(f"{name}: an entry has both a replacement and 'until', or neither")
        return Patch(
            name=f"{self.prefix}{name}",
            engine=self.engine,
            need=self.need,
            targets=targets,
            replacement=f"nsa_plugin.backends.{self.engine}.{replacement}" if replacement else "",
            why=why,
            upstream=upstream,
            remove_when=until,
        )

    def _targets(self, text: str, versions: str | None) -> list[Target]:
        is_renamed = any(f"{{{name}}}" in text for names in self.renamed.values() for name in names)
        ranges = [versions] if versions else [*self.renamed] if is_renamed else [self.versions]
        return [self._target(text.format(**self.names, **self.renamed.get(known, {})), known) for known in ranges]

    def _target(self, text: str, versions: str) -> Target:
        match = _TARGET.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not of the form '[class |value ]module:Owner.attribute[(parameters)]'")
        kind, path, params = match.groups()
        return Target(
            path=f"{self.package or self.engine}.{path}",
            kind=Kind(kind or Kind.FUNCTION),
            params=tuple(params.split(", ")) if params else (),
            versions=versions,
        )
