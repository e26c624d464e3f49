"""The mistakes of docs/walk.md: every command gives the message that the page shows."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest

from ci.rows import ROOT
from nsa_plugin.backends.sglang.startup.flags import add_flags
from nsa_plugin.backends.vllm.startup.activation import settings_of
from nsa_plugin.errors import SettingsError
from tests.command_line import call

pytestmark = pytest.mark.usefixtures("plain_environment")
PAGE = (ROOT / "docs" / "walk.md").read_text()
BLOCKS = re.findall(r"```console\n\$ (.+)\n((?:.+\n)+)```", PAGE)


def words(text: str) -> str:
    """A text without its line breaks."""
    return " ".join(text.split())


def said(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """(exit code, what it says) of a command. Engines are not started: what reads their options is called."""
    arguments = shlex.split(command)
    while "=" in arguments[0]:
        monkeypatch.setenv(*arguments.pop(0).split("=", 1))
    if arguments[0] == "vllm":
        config = json.loads(arguments[arguments.index("--additional-config") + 1])
        with pytest.raises(SettingsError) as raised:
            settings_of(SimpleNamespace(additional_config=config))
        return 1, f"{type(raised.value).__name__}: {raised.value}"
    if "sglang.launch_server" in arguments:
        parser = argparse.ArgumentParser()
        parser.add_argument("--model-path")
        add_flags(parser)
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(arguments[arguments.index("sglang.launch_server") + 1 :])
        return int(ended.value.code or 0), capsys.readouterr().err
    assert arguments[0] == "nsa-plugin"
    code, out, err = call(capsys, " ".join(arguments[1:]))
    return code, out + err


def test_the_page_has_the_mistakes() -> None:
    assert len(BLOCKS) == PAGE.count("```console")
    assert len(BLOCKS) >= 12


@pytest.mark.parametrize(("command", "message"), BLOCKS, ids=[command for command, _ in BLOCKS])
def test_a_mistake_gives_the_message_of_the_page(
    command: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, text = said(command, monkeypatch, capsys)
    assert code != 0
    assert words(message) in words(text)


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nsa_plugin.cli", "--version"], capture_output=True, text=True, cwd=ROOT
    )
    assert (done.returncode, done.stdout.partition(" ")[0]) == (0, "nsa-plugin")
