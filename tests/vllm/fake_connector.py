"""A KV connector that keeps the pages of answered prompts, and loads those of the caches it is told to.

Options (`kv_connector_extra_config`): `loads`, "all" or "main" (without the indexer's keys); `seen`, a file that gets
what vLLM tells a worker: the registered caches, and the layers of the hooks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

INDEXER = "indexer"


@dataclass
class Pages(KVConnectorMetadata):
    """By prompt, the blocks to keep after this step and those to load before it."""

    keep: list[tuple[tuple[int, ...], list[int]]] = field(default_factory=list)
    load: list[tuple[tuple[int, ...], list[int]]] = field(default_factory=list)


class FakeConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.loads, self.seen = options["loads"], Path(options["seen"])
        self.block = vllm_config.cache_config.block_size
        self.known: set[tuple[int, ...]] = set()
        self.loading: set[str] = set()
        self.caches: dict[str, torch.Tensor] = {}
        self.kept: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}
        self.told: dict[str, list[str]] = {"registered": [], "loaded": [], "saved": []}

    def _tell(self, what: str, names: list[str]) -> None:
        self.told[what] += [name for name in names if name not in self.told[what]]
        self.seen.write_text(json.dumps(self.told))

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        prompt = tuple(request.prompt_token_ids)
        found = (len(prompt) - 1) // self.block * self.block if prompt in self.known else 0
        return max(0, found - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.loading.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Pages:
        pages = Pages()
        for request in scheduler_output.scheduled_new_reqs:
            prompt = tuple(request.prompt_token_ids)
            blocks = list(request.block_ids[0])[: (len(prompt) - 1) // self.block]
            if request.req_id in self.loading:
                pages.load.append((prompt, blocks))
            else:
                pages.keep.append((prompt, blocks))
                self.known.add(prompt)
        return pages

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = kv_caches
        self._tell("registered", list(kv_caches))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for prompt, blocks in self._get_connector_metadata().load:
            for name, cache in self.caches.items():
                if self.loads == "all" or INDEXER not in name:
                    cache[blocks] = self.kept[prompt][name]

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._tell("loaded", [layer_name])

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._tell("saved", [layer_name])

    def wait_for_save(self) -> None:
        for prompt, blocks in self._get_connector_metadata().keep:
            self.kept[prompt] = {name: cache[blocks].clone() for name, cache in self.caches.items()}
