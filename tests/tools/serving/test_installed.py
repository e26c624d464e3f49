"""What a command says of an engine that is not there."""

from __future__ import annotations

from importlib import metadata

import pytest

from nsa_plugin.tools.serving import common
from nsa_plugin.tools.serving.engine import CompareError


def test_an_engine_that_is_not_installed_comes_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(CompareError, match=r"SGLang is not installed in .*: pip install sglang "):
        common.installed("sglang", "SGLang", "sglang.srt.plugins", "SGLANG_PLUGINS")
