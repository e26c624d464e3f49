"""The ledger: patches to an engine as data, and the code that probes, applies, verifies and undoes them.

A patch replaces one attribute of an engine (or one entry of a dict) by the object that `Patch.replacement` builds from
the original. Engines swallow the errors of their plugins, so a patch counts as applied only when the live object has
the patch's mark. If one cannot be applied, all others are undone and a `PatchError` lists the target, the installed
version and the supported ones.

Reading the entries needs no engine: `nsa-plugin patches` lists them anywhere, and the compatibility matrix checks their
targets in unpacked wheels.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from nsa_plugin.errors import PatchError

MARK = "__nsa_plugin_patch__"
TURN_OFF = (
    "Turn the plugin off with NSA_PLUGIN_ENABLED=0, or serve the stock engine in such cases with NSA_PLUGIN_STRICT=0."
)
_MISSING: Any = object()


class Kind(StrEnum):
    FUNCTION = "function"
    CLASS = "class"
    VALUE = "value"


@dataclass(frozen=True, kw_only=True)
class Target:
    """One object of an engine, as it must be found.

    Attributes:
        path: "package.module:Owner.attribute", or "package.module:MAPPING[key]" for an entry of a dict.
        kind: what the object is.
        params: names that its parameters must include, in this order; for a class, those of `__init__`.
        versions: the engine versions that have it, as a version specifier.
    """

    path: str
    kind: Kind = Kind.FUNCTION
    params: tuple[str, ...] = ()
    versions: str = ""

    @property
    def module(self) -> str:
        return self.path.partition(":")[0]

    @property
    def attributes(self) -> list[str]:
        return self.path.partition(":")[2].partition("[")[0].split(".")

    @property
    def key(self) -> str | None:
        match = re.search(r"\[(.+)\]$", self.path)
        return match.group(1) if match else None


class Need(StrEnum):
    """When a patch is part of what the plugin does."""

    BOOTSTRAP = "bootstrap"  # reads the settings; passes through while the plugin is off
    ENABLED = "enabled"  # wherever the plugin serves
    CPU = "cpu"  # only where the engine runs on a CPU
    GPU = "gpu"
    PORTABLE = "gpu, portable path"  # only on a GPU that the engine's kernels for sparse attention do not support
    GPU_V4 = "gpu, DeepSeek-V4"  # only where the engine builds a DeepSeek-V4 model's attention on a GPU


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One change to an engine.

    Attributes:
        name: unique, "<engine>.<what>".
        targets: the objects to change; the first whose versions include the installed engine is used.
        replacement: "module:function" of a function that makes the new object from the original. "" for a
            requirement: an object that the plugin builds on and does not change.
        why, upstream, remove_when: for people: the reason, the engine's issue or change, and when this entry can go.
        probe: "module:function" returning None if the engine still needs the patch, else the reason why not.
    """

    name: str
    engine: str
    need: Need
    targets: tuple[Target, ...]
    replacement: str = ""
    why: str
    upstream: str = ""
    remove_when: str = ""
    probe: str = ""

    def target(self, version: Version) -> Target | None:
        for target in self.targets:
            if SpecifierSet(target.versions, prereleases=True).contains(version):
                return target
        return None


@dataclass(frozen=True, kw_only=True)
class PatchStatus:
    """State of one patch: applied, required (checked, not changed), not_needed, or unused."""

    patch: Patch
    state: str
    detail: str = ""


@dataclass
class _Applied:
    patch: Patch
    owner: Any
    name: str
    key: str | None
    original: Any
    replacement: Any


def load(reference: str) -> Any:
    """Return the object at "module:attribute"."""
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)


def params_missing(expected: Iterable[str], found: list[str]) -> str | None:
    """Return None if `found` includes `expected` in this order, else what is missing."""
    position = 0
    for name in expected:
        if name not in found[position:]:
            return f"its parameters are ({', '.join(found)}); expected {name!r} among them in the known order"
        position = found.index(name, position) + 1
    return None


def find(target: Target) -> tuple[Any, str, Any]:
    """Find the owner, attribute name and live object of a target.

    Raises:
        LookupError: it does not exist or differs from what is expected; says what differs.
    """
    try:
        owner: Any = importlib.import_module(target.module)
    except Exception as error:  # an engine's module may raise anything: a missing library, an absent device
        raise LookupError(f"module {target.module} cannot be imported: {error!r}") from error
    *path, name = target.attributes
    for part in path:
        owner = getattr(owner, part, _MISSING)
        if owner is _MISSING:
            raise LookupError(f"{part!r} of {target.path} is not there")
    live = getattr(owner, name, _MISSING)
    if live is _MISSING:
        raise LookupError(f"{name!r} of {target.path} is not there")
    if target.key is not None:
        if not isinstance(live, Mapping):
            raise LookupError(f"{name!r} of {target.path} is a {type(live).__name__}, not a mapping")
        if target.key not in live:
            raise LookupError(f"{target.path}: no entry {target.key!r}, only {sorted(map(str, live))}")
        _check_kind(target, live[target.key])
        return live, name, live[target.key]
    _check_kind(target, live)
    return owner, name, live


def _check_kind(target: Target, live: Any) -> None:
    if target.kind is Kind.VALUE:
        return
    if target.kind is Kind.CLASS and not inspect.isclass(live):
        raise LookupError(f"{target.path} is a {type(live).__name__}, not a class")
    if target.kind is Kind.FUNCTION and not callable(live):
        raise LookupError(f"{target.path} is a {type(live).__name__}, not callable")
    if target.params:
        function = live.__init__ if target.kind is Kind.CLASS else live
        try:
            parameters = list(inspect.signature(function).parameters)
        except (TypeError, ValueError) as error:
            raise LookupError(f"{target.path}: its parameters cannot be read: {error}") from error
        if missing := params_missing(target.params, parameters):
            raise LookupError(f"{target.path}: {missing}")


def mark(replacement: Any, name: str) -> Any:
    """Put the patch's mark on a replacement, so that `verify` can recognise it in the engine."""
    inner = replacement.__func__ if isinstance(replacement, (classmethod, staticmethod)) else replacement
    setattr(inner, MARK, name)
    return replacement


def is_marked(live: Any, name: str) -> bool:
    inner = getattr(live, "__func__", live)
    # A subclass inherits attributes, but not the mark.
    return bool(vars(inner).get(MARK) == name) if hasattr(inner, "__dict__") else False


@dataclass
class Ledger:
    """The patches of one engine at one installed version, and their states.

    Each engine's adapter has one ledger per process.
    """

    engine: str
    version: Version
    supported: str
    patches: tuple[Patch, ...]
    statuses: dict[str, PatchStatus] = field(default_factory=dict)
    _applied: list[_Applied] = field(default_factory=list)

    def _refuse(self, patch: Patch, target: Target | None, reason: str) -> PatchError:
        where = target.path if target else " or ".join(t.path for t in patch.targets)
        return PatchError(
            f"nsa-plugin cannot apply its patch {patch.name} to {self.engine} {self.version}: {where}: {reason}. "
            f"Supported: {self.engine} {self.supported}. {TURN_OFF}"
        )

    def check_version(self) -> None:
        """Raise PatchError if the installed engine is outside the supported range."""
        if not SpecifierSet(self.supported, prereleases=True).contains(self.version):
            raise PatchError(
                f"nsa-plugin supports {self.engine} {self.supported}; {self.engine} {self.version} is installed. "
                f"{TURN_OFF}"
            )

    def check(self, *needs: Need, look: Callable[[Target], object] = find) -> None:
        """Raise PatchError unless every target of the given needs is as expected. Changes nothing.

        Args:
            look: raises LookupError for a target that is not. `find` imports the live engine,
                `static.SourceTree.check` reads its files.
        """
        self.check_version()
        for patch in self.patches:
            target = patch.target(self.version)
            if patch.need in needs and target is not None:
                try:
                    look(target)
                except LookupError as error:
                    raise self._refuse(patch, target, str(error)) from error

    def install(self, *needs: Need) -> list[PatchStatus]:
        """Probe, apply and verify every patch of the given needs; all or none. Idempotent.

        Raises:
            PatchError: a target is missing, changed, or did not take the replacement; this call is undone.
        """
        already, known = len(self._applied), dict(self.statuses)
        try:
            if set(needs) != {Need.BOOTSTRAP}:
                self.check_version()
            for patch in self.patches:
                if patch.need in needs and patch.name not in self.statuses:
                    self.statuses[patch.name] = self._install_one(patch)
            self.verify()
        except BaseException:  # engines swallow a plugin's errors: leave nothing half done
            self._undo_to(already)
            self.statuses = known
            raise
        return [self.statuses[p.name] for p in self.patches if p.name in self.statuses]

    def _install_one(self, patch: Patch) -> PatchStatus:
        target = patch.target(self.version)
        if target is None:
            return PatchStatus(patch=patch, state="unused", detail=f"not part of {self.engine} {self.version}")
        try:
            owner, name, original = find(target)
        except LookupError as error:
            raise self._refuse(patch, target, str(error)) from error
        if not patch.replacement:
            return PatchStatus(patch=patch, state="required", detail=target.path)
        try:
            if patch.probe and (reason := load(patch.probe)()):
                return PatchStatus(patch=patch, state="not_needed", detail=reason)
            if target.key is None:
                # The raw attribute, so that undo restores a classmethod or staticmethod.
                original = vars(owner).get(name, _MISSING)
                replacement = load(patch.replacement)(getattr(owner, name) if original is _MISSING else original)
                setattr(owner, name, mark(replacement, patch.name))
            else:
                replacement = load(patch.replacement)(original)
                owner[target.key] = mark(replacement, patch.name)
        except Exception as error:
            raise self._refuse(patch, target, f"the patch itself failed: {error!r}") from error
        self._applied.append(_Applied(patch, owner, name, target.key, original, replacement))
        return PatchStatus(patch=patch, state="applied", detail=target.path)

    def verify(self) -> None:
        """Raise PatchError unless every applied patch is still on the live object."""
        for item in self._applied:
            target = item.patch.target(self.version)
            assert target is not None
            try:
                _, _, live = find(target)
            except LookupError as error:
                raise self._refuse(item.patch, target, f"gone after it was applied: {error}") from error
            if not is_marked(live, item.patch.name):
                raise self._refuse(item.patch, target, "the live object is not the plugin's; something replaced it")

    def undo(self) -> None:
        """Put every original back, last first."""
        self._undo_to(0)
        self.statuses.clear()

    def _undo_to(self, count: int) -> None:
        while len(self._applied) > count:
            item = self._applied.pop()
            if item.key is not None:
                item.owner[item.key] = item.original
            elif item.original is _MISSING:
                delattr(item.owner, item.name)
            else:
                setattr(item.owner, item.name, item.original)


def wrap(original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `around(original, *args, **kwargs)` and looks like the original."""

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return wrapped


def replacement(around: Callable[..., Any]) -> Callable[[Any], Any]:
    """Decorate `around(original, *args, **kwargs)`: make it the replacement of a function or classmethod."""

    @functools.wraps(around)
    def make(original: Any) -> Any:
        if isinstance(original, classmethod) or inspect.ismethod(original):
            return classmethod(wrap(original.__func__, around))
        return wrap(original, around)

    return make
