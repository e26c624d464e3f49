"""The warm-up compiles every Triton and CUDA kernel that batches launch: the first request waits for no compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.kernels import serving_variants

ROOT = Path(serving_variants.__file__).parents[2]


def test_the_warm_up_compiles_what_batches_launch() -> None:
    """A first wave of requests on an empty cache ran at less than half of stock's rate (SGLang 0.5.16)."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", serving_variants.__name__]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {}
