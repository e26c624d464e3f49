"""The check that the indexer's keys came with a prefix that SGLang loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_plugin.backends.common.arrival import IndexKeysMissingError
from nsa_plugin.backends.sglang.v32 import arrival
from nsa_plugin.backends.sglang.v32.arrival import LoadedPrefixes, loaded_prefixes
from nsa_plugin.kernels.kv_cache import open_cache, reference_write
from tests.backends.fake_sglang.model_runner import decided, keep_arguments_raw
from tests.backends.fake_sglang.v32 import DsaBackend, ForwardMode, NsaBackend, forward_batch, started

PAGE, WIDTH, PAGES = 64, 132, 8


@dataclass
class CopiedBatch:
    """A batch that SGLang copies field by field, as `EagerRunner.load_batch` does."""

    forward_mode: ForwardMode
    batch_size: int
    seq_lens_cpu: torch.Tensor
    extend_seq_lens_cpu: list[int]
    extend_prefix_lens_cpu: list[int]
    rids: list[str]
    attn_cp_metadata: Any
    get_max_chunk_capacity: Any
    req_pool_indices: torch.Tensor
    token_to_kv_pool: Any


class Server:
    """A backend, the pool of its KV and its indexer's keys, and two requests in pages 1 to 3 and 4 to 6."""

    def __init__(
        self,
        original: type = DsaBackend,
        written: tuple[int, ...] = (),
        keys: torch.Tensor | None = None,
        kv: torch.Tensor | None = None,
    ):
        self.backend = started(original)
        self.backend.nsa_plugin.loaded = self.loaded = LoadedPrefixes("--enable-lmcache")
        self.keys = torch.zeros(PAGES, PAGE * WIDTH, dtype=torch.uint8) if keys is None else keys
        self.kv = torch.ones(PAGES * PAGE, 1, 8, dtype=torch.bfloat16) if kv is None else kv
        self.reads = 0
        pool = SimpleNamespace(
            start_layer=0, get_index_k_with_scale_buffer=self._read, get_key_buffer=lambda layer_id: self.kv
        )
        self.pool = pool
        if original is DsaBackend:
            self.backend.token_to_kv_pool = pool
        else:
            del self.backend.token_to_kv_pool
        self.backend.req_to_token = torch.arange(PAGE, 7 * PAGE, dtype=torch.int32).view(2, -1)
        self.write(*written)

    def _read(self, layer_id: int) -> torch.Tensor:
        assert layer_id == 0
        self.reads += 1
        return self.keys

    def write(self, *pages: int) -> None:
        for page in pages:  # a key of zeros has a scale, too
            slots = torch.arange(page * PAGE, (page + 1) * PAGE)
            reference_write(open_cache(self.keys.view(PAGES, PAGE, -1), "indexer_fp8"), torch.zeros(PAGE, 128), slots)

    def batch(self, *requests: tuple[int, int], mode: ForwardMode = ForwardMode.EXTEND, first: int = 0) -> Any:
        """Requests as (prefix, new tokens), in the table from `first` on."""
        q_lens = [rows for _, rows in requests]
        return forward_batch(
            mode,
            q_lens,
            [prefix + rows for prefix, rows in requests],
            extend_prefix_lens_cpu=[prefix for prefix, _ in requests] if mode.is_extend() else None,
            req_pool_indices=torch.arange(first, first + len(requests)),
            token_to_kv_pool=self.pool,
        )

    def prefill(self, *requests: tuple[int, int], first: int = 0) -> None:
        self.backend.init_forward_metadata(self.batch(*requests, first=first))

    def replay(self, mode: ForwardMode = ForwardMode.DECODE) -> None:
        """A captured batch."""
        if isinstance(self.backend, DsaBackend):
            self.backend._apply_cuda_graph_metadata(2, None, None, None, mode, None)
        else:
            self.backend.init_forward_metadata_replay_cuda_graph(2, None, None, 9, None, mode, None, None)


def test_a_prefix_without_keys_is_found_when_the_next_batch_is_prepared() -> None:
    """SGLang may load it layer by layer during the batch itself."""
    server = Server()
    server.prefill((100, 30))
    wrong = "--enable-lmcache.*: 100 of the 100 cached tokens of request request-0 have none.*Start without"
    with pytest.raises(IndexKeysMissingError, match=wrong):
        server.prefill((0, 10))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float8_e4m3fn])
def test_a_load_that_failed_is_left_to_sglang(dtype: torch.dtype) -> None:
    """It ends the request. KV that came without keys is found all the same, -0.0 too."""
    kv = torch.zeros(PAGES * PAGE, 1, 8, dtype=dtype)
    server = Server(kv=kv)
    server.prefill((100, 30))
    server.replay()
    kv[PAGE : 2 * PAGE].view(torch.uint8)[..., -1] = 0x80
    server.prefill((100, 30))
    with pytest.raises(IndexKeysMissingError, match="64 of the 100 cached tokens"):
        server.replay()


def test_a_load_that_failed_behind_a_prefix_that_was_computed_is_left_to_sglang() -> None:
    server = Server(written=(1,))
    server.kv[2 * PAGE :] = 0
    server.prefill((128, 30))
    server.replay()
    assert server.reads == 1


def test_a_captured_step_looks_too() -> None:
    server = Server()
    server.prefill((100, 30))
    with pytest.raises(IndexKeysMissingError):
        server.replay()


@pytest.mark.parametrize("original", [DsaBackend, NsaBackend])
def test_keys_that_came_are_left_alone(original: type) -> None:
    server = Server(original)
    server.prefill((100, 30), (70, 1))
    server.write(1, 2, 4, 5)
    for _ in range(2):
        server.replay()
    server.prefill((0, 10))
    assert server.reads == 1


def test_each_request_is_looked_up_in_its_own_pages() -> None:
    server = Server(written=(1, 2))
    server.prefill((128, 30), (70, 1))
    with pytest.raises(IndexKeysMissingError, match="70 of the 70 cached tokens of request request-1"):
        server.prefill((0, 10))


def test_a_page_without_keys_in_the_middle_is_found_and_fewer_tokens_are_not() -> None:
    server = Server(written=(1, 3))
    server.prefill((192, 1))
    with pytest.raises(IndexKeysMissingError, match="64 of the 192"):
        server.replay()
    server = Server(written=(1, 2))
    server.prefill((130, 1))  # two tokens of a third page; a batch has at most a page of scales that are zero
    server.replay()


@pytest.mark.parametrize("planned", [True, False])
def test_a_prefill_that_a_graph_may_replay_is_noted_once_and_not_looked_at_before_it_ran(planned: bool) -> None:
    server = Server()
    server.backend.nsa_plugin.plans_prefill = planned
    batch = server.batch((100, 30))
    server.backend.nsa_plugin_leaves_graph(batch)
    server.replay(ForwardMode.EXTEND)  # by its graph
    server.backend.init_forward_metadata(batch)  # or eagerly
    assert server.reads == 0
    assert len(server.loaded._noted) == 1
    with pytest.raises(IndexKeysMissingError):
        server.backend.nsa_plugin_leaves_graph(server.batch((0, 10)))


@pytest.mark.parametrize("original", [DsaBackend, NsaBackend])
def test_a_copy_of_a_batch_is_the_same_batch(original: type) -> None:
    server = Server(original)
    batch = CopiedBatch(**vars(server.batch((100, 30))))
    server.backend.nsa_plugin_leaves_graph(batch)
    server.backend.init_forward_metadata(replace(batch))
    assert server.reads == 0
    assert len(server.loaded._noted) == 1
    with pytest.raises(IndexKeysMissingError):
        server.prefill((100, 30))  # another batch with the same lengths


def test_nothing_is_noted_without_a_prefix_or_of_decode_steps() -> None:
    server = Server()
    server.prefill((0, 100))
    server.backend.init_forward_metadata(server.batch((100, 1), mode=ForwardMode.DECODE))
    server.replay()
    assert server.reads == 0


def test_only_the_first_requests_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival, "CHECKS", 3)
    server = Server(written=(1, 2, 4, 5))
    for _ in range(4):
        server.prefill((100, 30), (70, 1))
        server.replay()
    assert server.reads == 2
    server.keys.zero_()
    server.prefill((100, 30))
    server.replay()


@pytest.mark.parametrize(
    "keys", [torch.zeros(PAGES, PAGE * 68, dtype=torch.uint8), torch.zeros(0, PAGE * WIDTH, dtype=torch.uint8)]
)
def test_another_format_of_keys_is_not_read(keys: torch.Tensor) -> None:
    server = Server(keys=keys)
    for _ in range(2):
        server.prefill((100, 30))
        server.replay()
    assert server.reads == 1


def test_the_page_of_no_token_is_not_looked_at() -> None:
    """Padding points there."""
    server = Server()
    server.backend.req_to_token.zero_()
    server.prefill((100, 30))
    server.replay()
    assert server.reads == 1


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({}, ""),
        ({"enable_lmcache": False, "enable_hierarchical_cache": False}, ""),
        ({"enable_lmcache": True}, "--enable-lmcache"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"enable_unified_cache_external_linker": True}, "--enable-unified-cache-external-linker"),
    ],
)
def test_servers_that_load_kv_are_looked_at(given: dict[str, bool], flag: str) -> None:
    found = loaded_prefixes(SimpleNamespace(**given))
    assert ("" if found is None else found._flag) == flag


def test_a_loader_that_sglang_turned_off_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_arguments_raw(monkeypatch)
    assert loaded_prefixes(SimpleNamespace(**decided(enable_lmcache=False) | {"enable_lmcache": True})) is None
