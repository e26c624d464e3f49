"""Kernel providers of a backend, looked up once: searching for packages is too slow for every layer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from nsa_plugin.backends.common.fault import AttendedTokens
from nsa_plugin.errors import SettingsError
from nsa_plugin.libraries.architectures import EMULATED
from nsa_plugin.libraries.devices import DeviceProfile, emulating
from nsa_plugin.libraries.registry import REFERENCE, Registry
from nsa_plugin.settings import Settings

if TYPE_CHECKING:
    import torch

    from nsa_plugin.kernels.kv_cache import PagedCache

SPARSE_OPS = ("sparse_mla_prefill", "sparse_mla_decode")


@dataclass
class Providers:
    """Loads providers that support a device and a cache layout.

    Attributes:
        layout: name of the cache's layout.
        sm: the device's SM version; 0 for a CPU.
        helpers: the provider of ops that no plan names; None: Triton on a GPU, the reference on a CPU.
        vendored: libraries bundled with the engine: provider and module name -> the engine's module.
        attended: the tokens that sparse attention reads; wrong ones with the deliberate fault.
        indexer: the provider of the portable path's selections.
    """

    layout: str
    sm: int
    registry: Registry = field(default_factory=Registry)
    helpers: str | None = None
    vendored: Mapping[str, str] = field(default_factory=dict)
    attended: AttendedTokens = field(default_factory=AttendedTokens)
    indexer: str = "triton"
    _loaded: dict[tuple[str, str], Callable[..., Any]] = field(default_factory=dict)

    def load(self, op: str, name: str) -> Callable[..., Any]:
        """Return the function of provider `name` for an op.

        Raises:
            RegistryError, NoProviderError: see `Registry.load`.
        """
        key = (op, name)
        if key not in self._loaded:
            if name in self.vendored:
                use_vendored(name, self.vendored[name])
            found = self.registry.load(op, name, sm=self.sm or None)
            self._loaded[key] = self.attended.kernel(found) if op in SPARSE_OPS else found
        return self._loaded[key]

    def attend(
        self,
        op: str,
        name: str,
        q: torch.Tensor,
        cache: PagedCache,
        slots: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        **arguments: Any,
    ) -> torch.Tensor:
        """Attend query tokens q [n, heads, d_qk] with provider `name`, for either sparse op: [n, heads, d_v].

        Args:
            slots: int32 [n, topk], -1 for none.
            out: tensor for the output; None = a new one.
            arguments: `scale`, `d_v`, `attn_sink` and `topk_length`, as in `nsa_plugin.kernels.sparse_mla`.
        """
        found: torch.Tensor = self._attended(op, name, q, cache, slots, out, arguments).out
        return found if op == "sparse_mla_prefill" else found.squeeze(1)

    def attend_part(
        self,
        op: str,
        name: str,
        q: torch.Tensor,
        cache: PagedCache,
        slots: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        **arguments: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `attend`, with the lse float32 [n, heads]: natural log, +inf for a query token without a key."""
        found = self._attended(op, name, q, cache, slots, out, arguments)
        if op == "sparse_mla_prefill":
            return found.out, found.lse
        return found.out.squeeze(1), found.lse.squeeze(-1)

    def _attended(
        self,
        op: str,
        name: str,
        q: torch.Tensor,
        cache: PagedCache,
        slots: torch.Tensor,
        out: torch.Tensor | None,
        arguments: Mapping[str, Any],
    ) -> Any:
        """Return a kernel's `PrefillOutput`, or its `DecodeOutput` of one query token a sequence."""
        kernel = self.load(op, name)
        if op == "sparse_mla_prefill":
            return kernel(q, cache, slots, out=out, **arguments)
        into = None if out is None else out.unsqueeze(1)
        return kernel(q.unsqueeze(1), cache, slots.unsqueeze(1), out=into, **arguments)

    def helper(self, op: str) -> Callable[..., Any]:
        """Return the function of an op that no plan names."""
        return self.load(op, self.helpers or ("triton" if self.sm else REFERENCE))


def device_in_use(device: DeviceProfile, settings: Settings) -> DeviceProfile:
    """Return the device's profile; with `portable` on, that of the GPU that it emulates.

    Raises:
        SettingsError: `portable` is on, and the GPU is older than the one that it emulates.
    """
    if settings.portable != "on" or device.kind != "cuda":
        return device
    if device.sm < EMULATED:
        served = f"auto, which serves {device.where} as it is" if device.sm >= 80 else "auto"
        raise SettingsError(
            f"portable is on, which emulates SM{EMULATED}, and cannot work on {device.where}; allowed here: {served}"
        )
    from nsa_plugin.kernels.triton.device import emulate  # imports torch

    emulate(EMULATED)
    return emulating(device, EMULATED)


def use_vendored(library: str, inside: str) -> None:
    """Make a library bundled with an engine importable by its usual name, unless it is also installed.

    Engines also prefer the installed library, so both get the same module object.
    """
    if library in sys.modules or find_spec(library) is not None:
        return
    try:
        sys.modules[library] = import_module(inside)
    except ImportError:
        return  # the registry says that it is missing
