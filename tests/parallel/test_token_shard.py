"""`TokenShard` on real process groups. One start of the processes runs many cases; see `shard_cases`."""

from pathlib import Path

import pytest
import torch

from . import shard_cases
from .ranks import on_ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sharded_is_unsharded_bit_for_bit(ranks: int, tmp_path: Path) -> None:
    # PyTorch never releases the group that a dispatch mode in Python has seen (`shard_cases.nothing_is_allocated`).
    on_ranks(ranks, shard_cases.on_cpus, tmp_path, group_stays=True)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_sharded_is_unsharded_on_gpus(ranks: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    on_ranks(ranks, shard_cases.on_gpus, tmp_path, device="cuda")
