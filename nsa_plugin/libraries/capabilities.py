"""The types of a manifest entry: a kernel library, its kernels, and their limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from nsa_plugin.layouts import FAMILY_LAYOUTS
from nsa_plugin.libraries.architectures import SHARED_MEMORY_PER_BLOCK

LATEST_SM = 9999
"""`sm_max` of a kernel that is compiled for any device."""


class Op(StrEnum):
    """An operation for which a decision picks a kernel library."""

    MHA_ONE_SHOT = "mha_one_shot"
    SPARSE_MLA_PREFILL = "sparse_mla_prefill"
    SPARSE_MLA_DECODE = "sparse_mla_decode"
    INDEXER_TOPK = "indexer_topk"  # logits and top-k
    INDEXER_METADATA = "indexer_metadata"  # scheduling metadata of the paged logits
    SCHEDULED_LOGITS = "scheduled_logits"  # paged logits that take another library's scheduling metadata
    TOKEN_SHARD = "token_shard"  # the copies around the head/token all-to-all


SPARSE_OPS = (Op.SPARSE_MLA_PREFILL, Op.SPARSE_MLA_DECODE)
V32_ROW = (576, 512)
"""(query, value) elements of a V3.2 cache row: kv_lora_rank 512 + RoPE 64; the first 512 are the values."""
V4_ROW = (512, 512)
"""The same of a V4 cache row, whose 512 elements include RoPE."""
MHA_DIMS = ((192, 128), (128, 128), (256, 256))
"""The same of dense attention: DeepSeek (NoPE 128 + RoPE 64), its variants without RoPE, GLM-5 (NoPE 192 + RoPE 64)."""
MHA_LAYOUTS = FAMILY_LAYOUTS["v3.2"]
"""Caches from which dense attention's keys and values are made."""


@dataclass(frozen=True, kw_only=True)
class Capability:
    """The limits of one kernel of a library.

    Attributes:
        op: the operation.
        sm_min, sm_max: SM versions that it is built for, inclusive (90, 100, 103, 120; 0 is a CPU).
        layouts: KV-cache layouts that it reads; empty = it reads no KV cache.
        head_counts: supported head counts; empty = `head_multiple` alone decides. Query heads, or the
            indexer's heads for the indexer's ops.
        head_multiple: the head count must be a multiple of this.
        dims: supported (query, value) elements of a head; empty = any. The indexer has (query,).
        topk_multiple: the number of selected tokens must be a multiple of this.
        max_rows: most query rows of one call; None = no limit. Set by `kernels_on` from the library's row limits.
        not_in: (distribution, versions) of builds without this kernel.
        source: where these facts come from.
    """

    op: Op
    sm_min: int
    sm_max: int
    layouts: tuple[str, ...] = ()
    head_counts: tuple[int, ...] = ()
    head_multiple: int = 1
    dims: tuple[tuple[int, ...], ...] = ()
    topk_multiple: int = 1
    max_rows: int | None = None
    not_in: tuple[tuple[str, str], ...] = ()
    source: str = ""

    def serves(self, op: Op, layout: str | None = None) -> bool:
        """Whether it is a kernel for an op on a KV layout; None = any layout."""
        return self.op == op and (layout is None or not self.layouts or layout in self.layouts)

    def heads_given(self, heads: int) -> int | None:
        """The head count that the kernel runs with, padding included; None if it does not support `heads`."""
        if self.head_counts:
            return min((count for count in self.head_counts if count >= heads), default=None)
        return -(-heads // self.head_multiple) * self.head_multiple

    @property
    def heads_in_words(self) -> str:
        """The supported head counts: "64 or 128", "8, 16 or 32", "1 to 64 or 128", "multiples of 64"."""
        if not self.head_counts:
            return f"multiples of {self.head_multiple}"
        counts = sorted(self.head_counts)
        starts = [count for count in counts if count - 1 not in counts]
        ends = [count for count in counts if count + 1 not in counts]
        return alternatives(f"{a}" if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True))


def alternatives(words: Iterable[object]) -> str:
    """ "8", "8 or 16", "8, 16 or 32"."""
    *others, last = map(str, words)
    return f"{', '.join(others)} or {last}" if others else last


def is_build(distribution: str, versions: str, installed: str, version: str) -> bool:
    """Whether an installed distribution is the one that is meant, in one of the versions (a specifier) that are."""
    if distribution != installed:
        return False
    # Imported here because `settings` reads the manifest in every engine process.
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return SpecifierSet(versions, prereleases=True).contains(Version(version))
    except InvalidVersion:
        return False


@dataclass(frozen=True, kw_only=True)
class RowLimit:
    """The query rows that one call of a kernel supports in one build.

    The limit is the size of the kernel's working arrays: 4 * (words_per_row * rows + words) bytes of shared memory.

    Attributes:
        op: the kernel.
        distribution, versions: builds that the limit applies to; "" = any build without an earlier limit.
        sm_min, sm_max: SM versions that it applies to, inclusive.
        words_per_row, words: size of the arrays in 4-byte words; words_per_row 0 = no limit.
        static_bytes: size of statically allocated arrays; 0 = dynamic, up to the device's limit.
        multiple: rows are rounded up to this before they are counted.
        source: where these facts come from.
    """

    op: Op
    distribution: str = ""
    versions: str = ""
    sm_min: int = 0
    sm_max: int = LATEST_SM
    words_per_row: int = 0
    words: int = 0
    static_bytes: int = 0
    multiple: int = 1
    source: str = ""

    def applies_to(self, distribution: str, version: str, sm: int) -> bool:
        if not self.sm_min <= sm <= self.sm_max:
            return False
        if not self.distribution:
            return True
        return is_build(self.distribution, self.versions, distribution, version)

    def rows(self, smem_per_block: int) -> int | None:
        """Most rows of a call, or None for no limit; `smem_per_block` in bytes."""
        if not self.words_per_row:
            return None
        rows = ((self.static_bytes or smem_per_block) // 4 - self.words) // self.words_per_row
        return max(rows // self.multiple * self.multiple, 0)


@dataclass(frozen=True, kw_only=True)
class HostModule:
    """A module that contains a library's kernels.

    Attributes:
        module: dotted name.
        distributions: the distributions that may have installed it.
        problem: given the imported module, why its kernels cannot be used, or "".
        imports: whether the probe imports it to see that it loads. Modules of an engine are left to the engine.
    """

    module: str
    distributions: tuple[str, ...]
    problem: Callable[[Any], str] | None = None
    imports: bool = True


@dataclass(frozen=True, kw_only=True)
class KernelLibrary:
    """One entry of the manifest: everything the plugin knows about a kernel library.

    Attributes:
        name: the name in plans, settings, records and the docs.
        hosts: where it may be installed; the first that is installed and loads is used.
        targets: op -> "module:function", the provider of each op of the registry.
        kernels: what each kernel supports, as the library's host code checks it.
        assumed: (distribution, version) that `synthetic` assumes.
        requires: top-level modules that the provider functions import.
        row_limits: the first that applies to the installed build counts. The last of each op is the strictest
            known, so an unknown build gets the strictest limit.
        interpreted: the provider functions also run on devices that no kernel lists (Triton's interpreter).
    """

    name: str
    hosts: tuple[HostModule, ...]
    targets: Mapping[str, str] = field(default_factory=dict)
    kernels: tuple[Capability, ...]
    assumed: tuple[str, str]
    requires: tuple[str, ...] = ()
    row_limits: tuple[RowLimit, ...] = ()
    interpreted: bool = False

    def supports(self, op: Op) -> bool:
        """Whether it has a kernel for an op on any device."""
        return any(kernel.op == op for kernel in self.kernels)

    @property
    def runs_on_cpu(self) -> bool:
        return any(kernel.sm_min == 0 for kernel in self.kernels)

    @property
    def architectures(self) -> frozenset[int] | None:
        """GPU architectures with a kernel; None = the provider functions run on any device."""
        if self.interpreted or self.runs_on_cpu:
            return None
        return frozenset(sm for sm in SHARED_MEMORY_PER_BLOCK if any(k.sm_min <= sm <= k.sm_max for k in self.kernels))

    def kernels_on(
        self, sm: int, *, distribution: str, version: str, smem_per_block: int, more: Iterable[Capability] = ()
    ) -> tuple[Capability, ...]:
        """The kernels that run on a device, each with the row limit of the installed build.

        Args:
            sm: the device's SM version, 0 for a CPU.
            distribution, version: the installed build.
            smem_per_block: bytes of shared memory that a block may request.
            more: kernels in addition to `kernels`.
        """
        limits = [limit for limit in self.row_limits if limit.applies_to(distribution, version, sm)]

        def limited(kernel: Capability) -> Capability:
            limit = next((limit for limit in limits if limit.op == kernel.op), None)
            return replace(kernel, max_rows=limit.rows(smem_per_block)) if limit else kernel

        def built(kernel: Capability) -> bool:
            missing = any(is_build(*build, distribution, version) for build in kernel.not_in)
            return kernel.sm_min <= sm <= kernel.sm_max and not missing

        return tuple(limited(kernel) for kernel in (*self.kernels, *more) if built(kernel))


def spans(kernels: Iterable[Capability]) -> str:
    """The SM versions that kernels are built for: "SM90", "SM90, SM100 to SM109", "SM80 and later", "any device"."""

    def words(low: int, high: int) -> str:
        if low == high:
            return f"SM{low}"
        if (low, high) == (0, LATEST_SM):
            return "any device"
        return f"SM{low} and later" if high == LATEST_SM else f"SM{low} to SM{high}"

    merged: list[tuple[int, int]] = []
    for low, high in sorted({(kernel.sm_min, kernel.sm_max) for kernel in kernels}):
        if merged and low <= merged[-1][1] + 1:
            low, high = merged[-1][0], max(high, merged.pop()[1])
        merged.append((low, high))
    return ", ".join(words(*span) for span in merged)
