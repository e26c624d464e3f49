"""vLLM's connector of files, made to leave the indexer's keys out or to transfer them.

vLLM's `ExampleConnector` stores the caches that its hooks are called with, and to load a prompt opens a file of every
cache. `FileConnector` stores the indexer's keys beside them, under another name, and loads the attention layers' files,
and the keys only if `kv_connector_extra_config` has `keys`. Both compute as usual a prompt that has no files yet.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

INDEXER = ".indexer."


class FileConnector(ExampleConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.keys = vllm_config.kv_transfer_config.kv_connector_extra_config["keys"]

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        # Where the metadata is not vLLM's MLA it expects [pages, heads, tokens, width]; earlier versions have no heads.
        caches = {name: cache if cache.dim() == 4 else cache.unsqueeze(1) for name, cache in kv_caches.items()}
        self.caches = {f"{name}.keys" if INDEXER in name else name: cache for name, cache in caches.items()}

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        super().save_kv_layer(layer_name, self.caches[layer_name], None, **kwargs)

    def wait_for_save(self) -> None:
        for name in self.caches:
            if INDEXER in name:
                self.save_kv_layer(name, None, None)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        loaded = {name: cache for name, cache in self.caches.items() if self.keys or INDEXER not in name}
        layers = {name: SimpleNamespace(kv_cache=cache) for name, cache in loaded.items()}
        super().start_load_kv(SimpleNamespace(attn_metadata=dict.fromkeys(layers), no_compile_layers=layers), **kwargs)
