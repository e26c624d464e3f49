"""The Plan: what `decide` chose for a batch, and why."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, field
from enum import StrEnum
from typing import Any

from nsa_plugin.decision.frozen import static_frozen
from nsa_plugin.decision.shapes import Phase

Reason = str | Callable[[], str]
"""A reason's text, or a function that renders it."""


def text_of(reason: Reason) -> str:
    """Render a reason."""
    return reason if isinstance(reason, str) else reason()


class Reasons(Mapping[str, str]):
    """The reasons of a plan by field, each rendered when it is first read: a serving engine rarely reads them.

    Reading from several threads at once at most renders a text twice.

    Args:
        make: returns the reasons; called when the first one is read.
    """

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[], dict[str, Reason]]) -> None:
        self._make = make
        self._made: dict[str, Reason] | None = None

    @property
    def _reasons(self) -> dict[str, Reason]:
        made = self._made
        if made is None:
            made = self._made = self._make()
        return made

    def __getitem__(self, name: str) -> str:
        reasons = self._reasons
        reason = reasons[name]
        if not isinstance(reason, str):
            reason = reasons[name] = reason()
        return reason

    def __iter__(self) -> Iterator[str]:
        return iter(self._reasons)

    def __len__(self) -> int:
        return len(self._reasons)

    def __or__(self, other: Mapping[str, str]) -> dict[str, str]:
        return {**self, **other}

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[type[dict[str, str]], tuple[dict[str, str]]]:
        return dict, (dict(self),)  # a copy or a pickle has the texts


class Attention(StrEnum):
    """The attention path, whatever the phase: a decode kernel may run a prefill."""

    MHA_ONE_SHOT = "mha_one_shot"  # dense causal attention over the request's own keys and values
    SPARSE_PREFILL = "sparse_prefill"  # MLA over selected KV tokens, a kernel for many query tokens
    SPARSE_DECODE = "sparse_decode"  # MLA over selected KV tokens of the paged cache, a kernel split over keys
    NONE = "none"  # nothing to attend to


_READ_SELECTIONS = (Attention.SPARSE_PREFILL, Attention.SPARSE_DECODE)


class IndexerMode(StrEnum):
    TOPK = "topk"  # store the keys, score them, select
    STORE_ONLY = "store_only"  # store the keys; every token is attended, so there is nothing to select
    NONE = "none"  # no query tokens


@static_frozen
class IndexerPlan:
    """The indexer's part.

    Attributes:
        mode: see `IndexerMode`.
        provider: kernel library of the logits and the top-k; "" when nothing is selected.
        rows_per_chunk: query tokens whose logits are held at once; 0 when nothing is selected.
        metadata_provider: kernel library of the paged logits' scheduling metadata; "" where none is needed.
    """

    mode: IndexerMode
    provider: str = ""
    rows_per_chunk: int = 0
    metadata_provider: str = ""


@static_frozen
class Plan:
    """The decision for one batch. Backends read it and never derive it again.

    Attributes:
        phase: what the batch is for.
        attention: the attention path.
        provider: its kernel library; "" for `Attention.NONE`.
        dequantize_kv: copy fp8 cache rows to bf16 in a workspace first, because the kernel reads only bf16.
        head_padding: query heads that the kernel gets if it supports no fewer; 0 = the rank's own heads.
        token_shard: reshard heads to tokens over the attention group around the kernel.
        token_shard_chunks: pieces in which every rank's query tokens are exchanged and attended, one exchanged while
            another is attended; 1 without resharding, or where nothing overlaps.
        indexer: the indexer's part.
        stock_attention: the stock engine's code attends by this path.
        stock_selection: the stock engine's code selects.
        reasons: one sentence for each choice, by field name ("indexer.provider" for the indexer's own),
            naming the fact that decided it.
    """

    phase: Phase
    attention: Attention
    provider: str
    dequantize_kv: bool = False
    head_padding: int = 0
    token_shard: bool = False
    token_shard_chunks: int = 1
    indexer: IndexerPlan
    stock_attention: bool = False
    stock_selection: bool = False
    reasons: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        # vllm #52512: attention that reads a selection which the indexer did not make attends to nothing.
        if (self.attention in _READ_SELECTIONS) != (self.indexer.mode is IndexerMode.TOPK):
            raise ValueError(f"attention {self.attention} contradicts indexer mode {self.indexer.mode}")

    @functools.cached_property
    def route(self) -> str:
        """phase/attention/provider, by which batches are counted. Cached: every decode step asks for it."""
        return f"{self.phase}/{self.attention}/{self.provider or 'none'}"

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain data, for JSON."""
        data = asdict(self)
        data["reasons"] = dict(self.reasons)
        return data
