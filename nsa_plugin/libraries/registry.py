"""Which providers exist for an op, what each supports, and how to load it.

A provider is data: nothing of it is imported until it is loaded, and this module imports no torch.
Every op has the provider `reference`, which runs everywhere and supports everything of the op's
contract. Asking for a provider that cannot carry a case is an error that says why; none is ever
replaced by another behind the caller's back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from nsa_plugin.errors import NoProviderError, NsaPluginError

REFERENCE = "reference"

OPS: dict[str, str] = {
    "sparse_mla_prefill": "nsa_plugin.kernels.sparse_mla:reference_prefill",
    "sparse_mla_decode": "nsa_plugin.kernels.sparse_mla:reference_decode",
    "mha_one_shot": "nsa_plugin.kernels.mha:reference",
    "indexer_topk": "nsa_plugin.kernels.indexer:reference_topk",
    "indexer_topk_paged": "nsa_plugin.kernels.indexer:reference_paged_topk",
    "kv_cache_write": "nsa_plugin.kernels.kv_cache:reference_write",
    "kv_cache_read": "nsa_plugin.kernels.kv_cache:reference_read",
    "index_transform_paged": "nsa_plugin.kernels.index_transform:reference_paged",
    "index_transform_ragged": "nsa_plugin.kernels.index_transform:reference_ragged",
    "pad_topk_rows": "nsa_plugin.kernels.index_transform:reference_pad_rows",
    "swa_window_indices": "nsa_plugin.kernels.swa_indices:reference_window",
    "swa_combine_indices": "nsa_plugin.kernels.swa_indices:reference_combine",
    "topk_rows": "nsa_plugin.kernels.topk:reference_topk_rows",
}
"""Every op and where its reference is."""

# Modules that a provider needs, and the architectures that its kernels are built for where they are bound to any.
# What a kernel takes besides (heads, layouts, rows) stands in `capabilities`, for the decision, and its own
# function refuses anything else by name.
_NEEDS: dict[str, tuple[tuple[str, ...], frozenset[int] | None]] = {
    "triton": (("triton",), None),
    "cuda": (("cuda",), frozenset({90})),
    "flash_mla": (("flash_mla",), frozenset({90, 100, 103})),
    "deep_gemm": (("deep_gemm",), frozenset({90, 100, 103})),
    "fa3": ((), frozenset({90})),  # from either engine's package: the function looks for both
    "trtllm": (("flashinfer",), frozenset({100, 103})),
}

_TARGETS: dict[str, dict[str, str]] = {
    "triton": {
        "sparse_mla_prefill": "nsa_plugin.kernels.triton.sparse_mla:prefill",
        "sparse_mla_decode": "nsa_plugin.kernels.triton.sparse_mla:decode",
        "mha_one_shot": "nsa_plugin.kernels.triton.mha:mha",
        "indexer_topk": "nsa_plugin.kernels.triton.indexer:topk",
        "indexer_topk_paged": "nsa_plugin.kernels.triton.indexer:paged_topk",
        "kv_cache_write": "nsa_plugin.kernels.triton.kv_cache:write",
        "kv_cache_read": "nsa_plugin.kernels.triton.kv_cache:read",
        "index_transform_paged": "nsa_plugin.kernels.triton.index_transform:paged",
        "index_transform_ragged": "nsa_plugin.kernels.triton.index_transform:ragged",
        "pad_topk_rows": "nsa_plugin.kernels.triton.index_transform:pad_rows",
        "swa_window_indices": "nsa_plugin.kernels.triton.swa_indices:window",
        "swa_combine_indices": "nsa_plugin.kernels.triton.swa_indices:combine",
        "topk_rows": "nsa_plugin.kernels.triton.topk:topk_rows",
    },
    "cuda": {
        "sparse_mla_prefill": "nsa_plugin.kernels.cuda.sparse_mla:prefill",
        "sparse_mla_decode": "nsa_plugin.kernels.cuda.sparse_mla:decode",
        "topk_rows": "nsa_plugin.kernels.cuda.topk:topk_rows",
    },
    "flash_mla": {
        "sparse_mla_prefill": "nsa_plugin.kernels.providers.flash_mla:prefill",
        "sparse_mla_decode": "nsa_plugin.kernels.providers.flash_mla:decode",
    },
    "deep_gemm": {
        "indexer_topk": "nsa_plugin.kernels.providers.deep_gemm:topk",
        "indexer_topk_paged": "nsa_plugin.kernels.providers.deep_gemm:paged_topk",
    },
    "fa3": {
        "mha_one_shot": "nsa_plugin.kernels.providers.fa3:mha",
        "sparse_mla_decode": "nsa_plugin.kernels.providers.fa3:decode",
    },
    "trtllm": {
        "mha_one_shot": "nsa_plugin.kernels.providers.trtllm:mha",
        "sparse_mla_prefill": "nsa_plugin.kernels.providers.trtllm:prefill",
        "sparse_mla_decode": "nsa_plugin.kernels.providers.trtllm:decode",
    },
}


class RegistryError(NsaPluginError, ValueError):
    """A provider is registered twice, for an unknown op, or with a target that is not "module:function"."""


@dataclass(frozen=True, kw_only=True)
class Provider:
    """One implementation of an op's contract.

    Attributes:
        op: the op, a key of `OPS`.
        name: the provider's name: "reference", "triton", "flash_mla", "deep_gemm", "fa3", "trtllm", ...
        target: "module:function", imported when the provider is loaded.
        modules: top-level modules that must be installed; looked up without importing them.
        layouts: names of the KV-cache layouts it reads; None: every one.
        dtypes: names of the query dtypes it takes, as torch spells them; None: every one.
        heads: numbers of query heads a rank it takes; None: any.
        sms: GPU architectures it runs on (90 for SM90); None: any device, CPUs included.
    """

    op: str
    name: str
    target: str
    modules: tuple[str, ...] = ()
    layouts: frozenset[str] | None = None
    dtypes: frozenset[str] | None = None
    heads: frozenset[int] | None = None
    sms: frozenset[int] | None = None

    def refusal(
        self,
        *,
        layout: str | None = None,
        dtype: str | None = None,
        heads: int | None = None,
        sm: int | None = None,
    ) -> str | None:
        """Why it cannot carry a case, or None. What is left out (None) is not checked, except `sm`.

        Args:
            layout, dtype, heads: the case.
            sm: the device's architecture; None means a device that is no NVIDIA GPU.
        """
        missing = [module for module in self.modules if find_spec(module) is None]
        if missing:
            return f"not installed: {', '.join(missing)}"
        if self.sms is not None and sm not in self.sms:
            return f"it runs on SM {_listed(self.sms)}, not on {'a CPU' if sm is None else f'SM {sm}'}"
        for what, value, allowed in (
            ("layout", layout, self.layouts),
            ("dtype", dtype, self.dtypes),
            ("heads", heads, self.heads),
        ):
            if value is not None and allowed is not None and value not in allowed:
                return f"{what} is {value}; it supports {_listed(allowed)}"
        return None

    def load(self) -> Callable[..., Any]:
        """Import and return the function."""
        module, _, function = self.target.partition(":")
        loaded: Callable[..., Any] = getattr(import_module(module), function)
        return loaded


PROVIDERS: tuple[Provider, ...] = (
    *(Provider(op=op, name=REFERENCE, target=target) for op, target in OPS.items()),
    *(
        Provider(op=op, name=name, target=target, modules=_NEEDS[name][0], sms=_NEEDS[name][1])
        for name, targets in _TARGETS.items()
        for op, target in targets.items()
    ),
)
"""Every provider that this installation of the plugin knows."""


class Registry:
    """The providers of every op, in the order in which they were registered."""

    def __init__(self) -> None:
        self._providers: dict[str, dict[str, Provider]] = {op: {} for op in OPS}
        for provider in PROVIDERS:
            self.register(provider)

    def register(self, provider: Provider) -> None:
        """Add a provider.

        Raises:
            RegistryError: unknown op, malformed target, or the op already has one of that name.
        """
        if provider.op not in self._providers:
            raise RegistryError(f"op is {provider.op!r}; allowed: {', '.join(self._providers)}")
        module, separator, function = provider.target.partition(":")
        if not (module and separator and function):
            raise RegistryError(f"op {provider.op}: target is {provider.target!r}, not 'module:function'")
        if provider.name in self._providers[provider.op]:
            raise RegistryError(f"op {provider.op}: provider {provider.name!r} is already registered")
        self._providers[provider.op][provider.name] = provider

    def providers(self, op: str) -> tuple[Provider, ...]:
        """The providers of an op, in order.

        Raises:
            RegistryError: unknown op.
        """
        if op not in self._providers:
            raise RegistryError(f"op is {op!r}; allowed: {', '.join(self._providers)}")
        return tuple(self._providers[op].values())

    def load(
        self,
        op: str,
        name: str,
        *,
        layout: str | None = None,
        dtype: str | None = None,
        heads: int | None = None,
        sm: int | None = None,
    ) -> Callable[..., Any]:
        """The function of provider `name` for an op, for a case as in `Provider.refusal`.

        Raises:
            RegistryError: unknown op.
            NoProviderError: no such provider, or it cannot carry the case, or it fails to import; the
                message names the op, the provider and the reason.
        """
        known = {provider.name: provider for provider in self.providers(op)}
        if name not in known:
            raise NoProviderError(f"op {op}: no provider {name!r}; registered: {', '.join(known)}")
        reason = known[name].refusal(layout=layout, dtype=dtype, heads=heads, sm=sm)
        if reason is not None:
            raise NoProviderError(f"op {op}: provider {name!r} is not available: {reason}")
        try:
            return known[name].load()
        except (ImportError, AttributeError) as error:
            raise NoProviderError(f"op {op}: provider {name!r} does not load: {error}") from error


def _listed(values: frozenset[Any]) -> str:
    return ", ".join(str(value) for value in sorted(values))
