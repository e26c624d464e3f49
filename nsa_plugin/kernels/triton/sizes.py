"""Sizes of a launch. `triton.cdiv` and its like can run inside kernels too, and cost the host microseconds for that."""

from __future__ import annotations


def ceil_div(count: int, size: int) -> int:
    """count / size, rounded up."""
    return -(-count // size)


def power_of_2(count: int) -> int:
    """The least power of two that is not below `count`, at least 1."""
    return 1 << max(count - 1, 0).bit_length()
