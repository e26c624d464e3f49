"""Stand-ins for an installed SGLang and vLLM, and a model for them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
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
    """Installs the stand-ins; called with a mode, it makes the servers behave so."""
    site = tmp_path / "site"
    _install(site, "sglang-0.5.16", "sglang.srt.plugins", "fake_sglang.py", "sglang/launch_server.py")
    _install(site, "vllm-0.24.0", "vllm.general_plugins", "fake_vllm.py", "vllm/entrypoints/cli/main.py")
    shutil.copy(HERE / "fake_toy.py", site)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    for variable in ("SGLANG_PLUGINS", "VLLM_PLUGINS"):
        monkeypatch.delenv(variable, raising=False)
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


def _install(site: Path, distribution: str, entry_points: str, source: str, module: str) -> None:
    """A distribution "name-version" that has the module, with the plugin among its entry points."""
    target = site / module
    target.parent.mkdir(parents=True)
    shutil.copy(HERE / source, target)
    while (target := target.parent) != site:
        (target / "__init__.py").write_text("")
    name, _, version = distribution.partition("-")
    info = site / f"{distribution}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[{entry_points}]\nnsa_plugin = nsa_plugin.backends.{name}:register\n")


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
