"""Kernels that are built after the warm-up are named in the log, those of others are not."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from triton import knobs

from nsa_plugin.backends.common import late
from nsa_plugin.kernels.cuda import build
from nsa_plugin.kernels.triton.topk import topk_rows
from nsa_plugin.tools.serving.logs import built_late


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the listener got that an engine had set before."""
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **each: given.append(each))
    monkeypatch.setattr(build, "_LISTENERS", [])
    late._watch.cache_clear()
    return given


def test_the_log_names_the_plugins_kernels_alone(
    seen: list[dict[str, Any]], caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    caplog.set_level(logging.INFO, logger="nsa_plugin")
    late.watch("off")
    assert caplog.messages == []
    late.watch("log")
    late.watch("log")  # each kernel is still named once
    assert caplog.messages == ["kernels that are built from now on are named here"]
    times = {"metadata": {}, "metadata_group": {}, "times": None, "cache_hit": True}
    theirs = SimpleNamespace(fn=SimpleNamespace(__module__="vllm.ops", __name__="fused_moe_kernel"))
    knobs.compilation.listener(src=theirs, **times)
    knobs.compilation.listener(src="a file", **times)
    assert len(caplog.messages) == 1
    knobs.compilation.listener(src=SimpleNamespace(fn=topk_rows), **times)
    assert [each["src"] for each in seen][:2] == [theirs, "a file"]
    assert [set(each) for each in seen] == [{"src", *times}] * 3
    for listener in build._LISTENERS:
        listener("topk.cu:select")
    said = [f"kernel {name} was built while serving" for name in ("topk_rows", "topk.cu:select")]
    assert caplog.messages[1:] == said

    log = tmp_path / "server.log"
    start = f"{caplog.messages[0]}\nkernel sparse_mla.cu:attend was built while serving\nready\n"  # a first request's
    log.write_text(start + "".join(f"INFO 11-26 {text}\n" for text in said * 2))
    assert built_late(log, len(start)) == ["topk_rows", "topk.cu:select"]
    log.write_text("\n".join(said))
    assert built_late(log, 0) is None


def test_a_triton_without_listeners_is_left_alone(seen: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late, "import_module", lambda name: SimpleNamespace(compilation=SimpleNamespace()))
    late.watch("log")
    assert build._LISTENERS == []
