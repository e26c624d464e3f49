"""A stand-in for an installed SGLang, and a model for it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FAKE = Path(__file__).with_name("fake_sglang.py")
CONFIG = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "num_attention_heads": 16,
    "vocab_size": 256,
    "index_topk": 64,
    "max_position_embeddings": 4096,
}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Installs the stand-in; called with a mode, it makes the servers behave so."""
    site = tmp_path / "site"
    (site / "sglang").mkdir(parents=True)
    (site / "sglang" / "__init__.py").write_text("")
    shutil.copy(FAKE, site / "sglang" / "launch_server.py")
    info = site / "sglang-0.5.16.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.16\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nnsa_plugin = nsa_plugin.backends.sglang:register\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")  # no nvidia-smi and no git: the tests look the same everywhere
    pids = tmp_path / "pids"
    monkeypatch.setenv("FAKE_PIDS", str(pids))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("FAKE_MODE", "")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))

    def behave(mode: str = "") -> Path:
        monkeypatch.setenv("FAKE_MODE", mode)
        return model

    return behave


@pytest.fixture
def pids(tmp_path: Path) -> Path:
    return tmp_path / "pids"


@pytest.fixture
def read(tmp_path: Path) -> Callable[[], dict[str, Any]]:
    """The one record that was written."""

    def one() -> dict[str, Any]:
        (path,) = (tmp_path / "records").glob("*/*.json")
        return dict(json.loads(path.read_text()))

    return one
