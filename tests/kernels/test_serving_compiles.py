"""The warm-up compiles every Triton and CUDA kernel that batches launch: the first request waits for no compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels import serving_variants

ROOT = Path(serving_variants.__file__).parents[2]


@pytest.mark.parametrize("sm", [86, 89, 90])
def test_the_warm_up_compiles_what_batches_launch(sm: int) -> None:
    """A first wave of requests on an empty cache ran at less than half of stock's rate (SGLang 0.5.16).

    SM86 and SM89 have the portable path; SM90 has Triton's indexer where DeepGEMM is not installed.
    """
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", serving_variants.__name__, str(sm)]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {}
