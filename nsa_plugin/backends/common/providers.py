"""The registry's providers for a backend, looked up once: a layer's attention has no time to search for packages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from nsa_plugin.backends.common.fault import AttendedTokens
from nsa_plugin.libraries.registry import REFERENCE, Registry

if TYPE_CHECKING:
    import torch

    from nsa_plugin.kernels.kv_cache import PagedCache

SPARSE_OPS = ("sparse_mla_prefill", "sparse_mla_decode")


@dataclass
class Providers:
    """Loads providers that carry a device's and a cache's cases.

    Attributes:
        layout: name of the cache's layout.
        sm: the device's SM version; 0 for a CPU.
        helpers: the provider of ops that no plan names; None: Triton's on a GPU, the reference on a CPU.
        vendored: libraries that the engine carries inside itself: provider and module name -> the engine's module.
        attended: the tokens that sparse attention reads; wrong ones under the deliberate fault.
    """

    layout: str
    sm: int
    registry: Registry = field(default_factory=Registry)
    helpers: str | None = None
    vendored: Mapping[str, str] = field(default_factory=dict)
    attended: AttendedTokens = field(default_factory=AttendedTokens)
    _loaded: dict[tuple[str, str, int | None], Callable[..., Any]] = field(default_factory=dict)

    def load(self, op: str, name: str, heads: int | None = None) -> Callable[..., Any]:
        """The function of provider `name` for an op.

        Args:
            heads: query heads of the call; None where the op has none.

        Raises:
            RegistryError, NoProviderError: see `Registry.load`.
        """
        key = (op, name, heads)
        if key not in self._loaded:
            if name in self.vendored:
                use_vendored(name, self.vendored[name])
            found = self.registry.load(op, name, layout=self.layout, heads=heads, sm=self.sm or None)
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
        """Sparse attention of query tokens [n, heads, d_qk] by provider `name`, for either op: [n, heads, d_v].

        Args:
            slots: int32 [n, topk], -1 for none.
            out: where to put the output.
            arguments: `scale`, `d_v` and `attn_sink`, as in `nsa_plugin.kernels.sparse_mla`.
        """
        kernel = self.load(op, name, heads=q.shape[1])
        found: torch.Tensor
        if op == "sparse_mla_prefill":
            found = kernel(q, cache, slots, out=out, **arguments).out
        else:
            into = None if out is None else out.unsqueeze(1)
            found = kernel(q.unsqueeze(1), cache, slots.unsqueeze(1), out=into, **arguments).out.squeeze(1)
        return found

    def helper(self, op: str) -> Callable[..., Any]:
        """The function of an op that no plan names."""
        return self.load(op, self.helpers or ("triton" if self.sm else REFERENCE))


def use_vendored(library: str, inside: str) -> None:
    """Let a library that an engine carries inside itself be imported by its own name, unless it is installed besides.

    Engines look for the installed one first themselves, and get the same module object then.
    """
    if library in sys.modules or find_spec(library) is not None:
        return
    try:
        sys.modules[library] = import_module(inside)
    except ImportError:
        return  # the registry says that it is missing
