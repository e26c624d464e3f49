"""The shapes of models that the kernels and the caches' layouts are for, for both engines."""

from __future__ import annotations

from typing import Any

from nsa_plugin.errors import LeftToStockError
from nsa_plugin.layouts import INDEXER_FP8, V4_FP8, V32_FP8

_INDEXER = {"index_head_dim": INDEXER_FP8.fp8_dim}
V4_ROW = V4_FP8.fp8_dim + V4_FP8.bf16_dim
"""Values of a V4 cache entry, and of a query head."""
SHAPES = {
    "v3.2": {"kv_lora_rank": V32_FP8.fp8_dim, "qk_rope_head_dim": V32_FP8.bf16_dim} | _INDEXER,
    "v4": {"head_dim": V4_ROW, "qk_rope_head_dim": V4_FP8.bf16_dim} | _INDEXER,
}
"""By model family, the keys of a model's configuration that have one supported value each."""


def check_shape(config: Any, family: str, name: str) -> None:
    """Check a model's shape by its configuration.

    Args:
        config: the Hugging Face configuration of the text model, with its keys as attributes.
        family: one of `SHAPES`.
        name: of the model, for the message.

    Raises:
        LeftToStockError: the kernels or the caches' layouts are for another shape.
    """
    for key, value in SHAPES[family].items():
        if (found := getattr(config, key, None)) != value:
            raise LeftToStockError(f"{key} of {name} is {found}; nsa-plugin supports {value}")


def architectures(config: Any) -> list[str]:
    """Return the architectures in a Hugging Face configuration; an empty list if it names none."""
    return getattr(config, "architectures", None) or []
