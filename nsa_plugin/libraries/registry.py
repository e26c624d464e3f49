"""The registry: which providers an op has, what each supports, and how to load it.

A provider is data. Its module is imported when the provider is loaded, and this module imports no torch. Every op has
the provider `reference`, which runs on any device and supports the whole contract of the op. Loading a provider that
does not run on the device is an error with the reason; the registry never substitutes another provider. Layouts, dtypes
and head counts are limits of a library's kernels (`capabilities`); a decision respects them and the kernels check them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from nsa_plugin.errors import NoProviderError, NsaPluginError
from nsa_plugin.libraries.architectures import name_of
from nsa_plugin.libraries.capabilities import KernelLibrary
from nsa_plugin.libraries.manifest import MANIFEST

REFERENCE = "reference"

OPS: Mapping[str, str] = MANIFEST[REFERENCE].targets
"""Every op and the target of its reference."""


class RegistryError(NsaPluginError, ValueError):
    """A provider is registered twice, for an unknown op, or with a target that is not "module:function"."""


@dataclass(frozen=True, kw_only=True)
class Provider:
    """One implementation of an op's contract.

    Attributes:
        op: the op, a key of `OPS`.
        name: the name of its library in the manifest.
        target: "module:function", imported when the provider is loaded.
        modules: top-level modules that must be installed; found without importing them.
        sms: GPU architectures that it runs on (90 for SM90); None: any device, including CPUs.
    """

    op: str
    name: str
    target: str
    modules: tuple[str, ...] = ()
    sms: frozenset[int] | None = None

    def refusal(self, sm: int | None) -> str | None:
        """Why it does not run on a device, or None.

        Args:
            sm: the device's architecture; None: it is not an NVIDIA GPU.
        """
        missing = [module for module in self.modules if find_spec(module) is None]
        if missing:
            return f"not installed: {', '.join(missing)}"
        if self.sms is not None and sm not in self.sms:
            return f"it runs on {', '.join(map(name_of, sorted(self.sms)))}, not on {name_of(sm or 0)}"
        return None

    def load(self) -> Callable[..., Any]:
        """Import and return the function."""
        module, _, function = self.target.partition(":")
        loaded: Callable[..., Any] = getattr(import_module(module), function)
        return loaded


def providers_of(library: KernelLibrary) -> tuple[Provider, ...]:
    """The providers that a manifest entry declares."""
    return tuple(
        Provider(op=op, name=library.name, target=target, modules=library.requires, sms=library.architectures)
        for op, target in library.targets.items()
    )


class Registry:
    """The providers of every op, in the order in which they were registered."""

    def __init__(self) -> None:
        self._providers: dict[str, dict[str, Provider]] = {op: {} for op in OPS}
        for library in sorted(MANIFEST.values(), key=lambda library: library.name != REFERENCE):
            for provider in providers_of(library):
                self.register(provider)

    def register(self, provider: Provider) -> None:
        """Add a provider.

        Raises:
            RegistryError: unknown op, malformed target, or the op already has one of that name.
        """
        known = self._of(provider.op)
        module, separator, function = provider.target.partition(":")
        if not (module and separator and function):
            raise RegistryError(f"op {provider.op}: target is {provider.target!r}, not 'module:function'")
        if provider.name in known:
            raise RegistryError(f"op {provider.op}: provider {provider.name!r} is already registered")
        known[provider.name] = provider

    def providers(self, op: str) -> tuple[Provider, ...]:
        """The providers of an op; `reference` is first.

        Raises:
            RegistryError: unknown op.
        """
        return tuple(self._of(op).values())

    def _of(self, op: str) -> dict[str, Provider]:
        if op not in self._providers:
            raise RegistryError(f"op is {op!r}; allowed: {', '.join(self._providers)}")
        return self._providers[op]

    def load(self, op: str, name: str, *, sm: int | None = None) -> Callable[..., Any]:
        """Load the function of provider `name` for an op.

        Args:
            sm: see `Provider.refusal`.

        Raises:
            RegistryError: unknown op.
            NoProviderError: no such provider, or it does not run on the device, or it fails to import; the message
                has the op, the provider and the reason.
        """
        known = self._of(op)
        if name not in known:
            raise NoProviderError(f"op {op}: no provider {name!r}; registered: {', '.join(known)}")
        reason = known[name].refusal(sm)
        if reason is not None:
            raise NoProviderError(f"op {op}: provider {name!r} is not available: {reason}")
        try:
            return known[name].load()
        except (ImportError, AttributeError) as error:
            raise NoProviderError(f"op {op}: provider {name!r} does not load: {error}") from error
