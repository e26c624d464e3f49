"""`TokenShard` on real process groups. One start of the processes runs many cases; see `shard_cases`."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nsa_plugin.parallel.token_shard import TokenShard, buffer_bytes

from . import shard_cases
from .ranks import on_ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sharded_is_unsharded_bit_for_bit(ranks: int, tmp_path: Path) -> None:
    # PyTorch never releases the group that a dispatch mode in Python has seen (`shard_cases.nothing_is_allocated`).
    on_ranks(ranks, shard_cases.on_cpus, tmp_path, group_stays=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("ranks", "max_tokens", "d_v"), [(1, 5, 3), (2, 7, 3), (4, 64, 20)])
def test_the_buffers_take_what_is_said(
    ranks: int, max_tokens: int, d_v: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group: ranks)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    sizes = {"heads": 2, "d_qk": 5, "d_v": d_v, "dtype": dtype, "max_tokens": max_tokens}
    shard = TokenShard(object(), device="cpu", **sizes)  # type: ignore[arg-type]
    assert sum(buffer.nbytes for buffer in shard_cases.buffers(shard)) == buffer_bytes(ranks=ranks, **sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_sharded_is_unsharded_on_gpus(ranks: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    on_ranks(ranks, shard_cases.on_gpus, tmp_path, device="cuda")
