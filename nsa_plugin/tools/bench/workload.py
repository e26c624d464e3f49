"""A case ready to run: its inputs, the calls that compete on it, and how a result is judged."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from nsa_plugin.errors import NsaPluginError
from nsa_plugin.libraries.registry import REFERENCE, Registry, RegistryError
from nsa_plugin.tools.bench.floors import Work

TimedCall = Callable[[], Any]
T = TypeVar("T")

# Number of shared inputs to keep: caches and indices of the last few shapes.
_KEPT = 6


class WrongResultError(NsaPluginError):
    """A provider's result differs from the reference by more than the tolerance."""


@dataclass(frozen=True)
class Contender:
    """One way to run the case.

    Attributes:
        name: the provider's name, or the stock path's.
        load: makes the call; raises if this contender does not support the case.
        judge: the largest error of a result; raises `WrongResultError`. None: the workload's judge.
        extra_call: name and call of what the engine must also run for this contender, timed as a field of its own.
        work: what this contender needs at least, if it computes something other than the case's op.
        output_bytes: of the output that the call allocates, which is not extra memory.
        kept_bytes: of what a loaded call keeps between calls, which is extra memory.
    """

    name: str
    load: Callable[[], TimedCall]
    judge: Callable[[Any], float] | None = None
    extra_call: tuple[str, TimedCall] | None = None
    work: Work | None = None
    output_bytes: int = 0
    kept_bytes: Callable[[Any], int] = lambda call: 0


@dataclass(frozen=True)
class Workload:
    """A case ready to run.

    Attributes:
        work: what the case needs at least.
        contenders: in the order in which they run.
        judge: the largest error of a result against the float32 reference; raises `WrongResultError`.
        baselines: names of stock contenders; the first one measured is the baseline.
        graph: time replays of a CUDA graph, as decode steps run.
        memory: also report the peak memory that a call needs besides its inputs and output.
    """

    work: Work
    contenders: tuple[Contender, ...]
    judge: Callable[[Any], float]
    baselines: tuple[str, ...] = ()
    graph: bool = False
    memory: bool = False


@dataclass
class Context:
    """Where a suite runs and what it measures.

    Attributes:
        device: of the inputs.
        sm: SM version, None if the device is not an NVIDIA GPU.
        registry: the plugin's providers.
        wanted: names of providers to measure; empty: all but the reference.
    """

    device: torch.device
    sm: int | None
    registry: Registry
    wanted: Collection[str] = ()
    _shared: dict[Any, Any] = field(default_factory=dict)

    def shared(self, key: Any, make: Callable[[], T]) -> T:
        """The result of `make`, kept for the next cases that ask with the same key."""
        if key in self._shared:
            self._shared[key] = self._shared.pop(key)
        else:
            while len(self._shared) >= _KEPT:
                del self._shared[next(iter(self._shared))]
            self._shared[key] = make()
        found: T = self._shared[key]
        return found

    def forget(self) -> None:
        self._shared.clear()

    def contenders(
        self,
        op: str,
        bind: Callable[[Callable[..., Any]], TimedCall],
        *,
        label: str = "{}",
        judge: Callable[[Any], float] | None = None,
        extra_call: tuple[str, TimedCall] | None = None,
        work: Work | None = None,
    ) -> list[Contender]:
        """A contender for each wanted provider of `op`. One that does not run here says why when it is loaded.

        Args:
            bind: makes the call from a provider's function.
            label: name in the record, with "{}" for the provider.
        """
        try:
            names = [provider.name for provider in self.registry.providers(op)]
        except RegistryError as error:
            # Not installed: list the op as refused instead of leaving it out.
            return [Contender(label.format("nsa_plugin"), _refuse(error))]

        def loader(name: str) -> Callable[[], TimedCall]:
            return lambda: bind(self.registry.load(op, name, sm=self.sm))

        return [
            Contender(label.format(name), loader(name), judge, extra_call, work)
            for name in names
            if (name in self.wanted if self.wanted else name != REFERENCE)
        ]


def into(out: torch.Tensor, *arguments: Any, **keywords: Any) -> Callable[[Callable[..., Any]], TimedCall]:
    """A `bind` of `Context.contenders`: the provider gets these arguments and `out`, which starts poisoned."""
    return lambda function: with_poisoned(out, lambda: function(*arguments, **keywords, out=out))


def with_poisoned(out: torch.Tensor, call: TimedCall) -> TimedCall:
    """The call, after filling `out` with an invalid value: whatever the call does not write shows."""
    out.fill_(float("nan") if out.is_floating_point() else torch.iinfo(out.dtype).min)
    return call


def _refuse(error: Exception) -> Callable[[], TimedCall]:
    def load() -> TimedCall:
        raise error

    return load
