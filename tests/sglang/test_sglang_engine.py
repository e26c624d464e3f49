"""The plugin in a really started SGLang: loaded, configured, in place, verified, and refusing where it should.

SGLang cannot serve sparse attention on a CPU; the engines here serve a small GPT-2 and the plugin stays out
of its attention, with all its patches applied and verified in the scheduler process.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from sglang_case import Place, needs_engine, post

from tests.backends.sglang.startup.light import ENTERED, READS_FLAGS

pytestmark = [pytest.mark.engine_sglang, pytest.mark.timeout(900), needs_engine()]
BACKEND = "DeepseekSparseAttnBackend"
GENERATE = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}}


def chosen(report: dict[str, Any], name: str) -> tuple[Any, str]:
    """Value and source of a setting."""
    return report["settings"][name], report["sources"][name]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_flags_reach_the_scheduler_and_the_backend_is_replaced_there(place: Place) -> None:
    flags = ["--enable-nsa-plugin", "--nsa-plugin-trace", "log", "--nsa-plugin-mha-max-kv", "-1"]
    flags += ["--nsa-plugin-report", str(place.report_file)]
    flags += ["--dsa-prefill-backend", "tilelang", "--dsa-decode-backend", "flashmla_kv"]
    with place.server(*flags, NSA_PLUGIN_TRACE="off", NSA_PLUGIN_LOGITS_BUDGET_MB="64") as url:
        assert len(post(f"{url}/generate", GENERATE)["output_ids"]) == 4
        report = place.report()

    main, scheduler = place.seen("loaded")[0], place.seen("scheduler")[0]
    assert any(seen["scheduler"] and seen["pid"] == scheduler["pid"] for seen in place.seen("loaded"))
    assert scheduler["parent"] == main["pid"]
    assert report["pid"] == scheduler["pid"]

    assert report["engine_version"] == metadata.version("sglang")
    assert report["settings"]["enabled"] is True
    assert chosen(report, "trace") == ("log", "the command line")
    assert chosen(report, "mha_max_kv") == (-1, "the command line")
    assert chosen(report, "decode_backend") == ("flash_mla", "--dsa-decode-backend")
    assert chosen(report, "prefill_backend") == ("auto", "default")
    assert chosen(report, "logits_budget_mb") == (64, "the environment")
    notes = "\n".join(report["notes"])
    assert "trace is 'log' from the command line; 'off' from the environment is ignored" in notes
    assert "--dsa-prefill-backend tilelang names no kernel library" in notes

    assert scheduler["backend"][:3] == [f"NsaPlugin{BACKEND}", f"Planned{BACKEND}", BACKEND]
    states = {patch["name"]: patch["state"] for patch in report["patches"]}
    assert states["sglang.backend"] == "applied"
    assert states["sglang.scheduler"] == "applied"
    assert states["sglang.registered"] == states["sglang.registered-alias"] == "required"

    assert report["active"] is False
    assert place.log().count("GPT2LMHeadModel has no DeepSeek sparse attention") == 1
    assert all(seen["vllm"] == [] for seen in place.seen("loaded") + place.seen("scheduler"))


def test_the_environment_alone_enables_an_offline_engine(place: Place) -> None:
    status, tokens = place.run_engine(
        {"dsa_decode_backend": "fa3"}, NSA_PLUGIN_ENABLED="1", NSA_PLUGIN_REPORT=str(place.report_file)
    )
    assert (status, len(tokens or ())) == (0, 4), place.log()[-4000:]
    report = place.report()
    assert report["sources"]["enabled"] == "the environment"
    assert chosen(report, "decode_backend") == ("fa3", "--dsa-decode-backend")
    (scheduler,) = place.seen("scheduler")
    assert report["pid"] == scheduler["pid"]
    assert scheduler["backend"][0] == f"NsaPlugin{BACKEND}"


def test_the_kill_switch_wins_over_the_flag(place: Place) -> None:
    flags = ["--enable-nsa-plugin", "--nsa-plugin-report", str(place.report_file)]
    with place.server(*flags, NSA_PLUGIN_ENABLED="0") as url:
        assert len(post(f"{url}/generate", GENERATE)["output_ids"]) == 4
    (scheduler,) = place.seen("scheduler")
    assert (scheduler["backend"] or [BACKEND])[0] == BACKEND  # SGLang 0.5.18 and 0.5.19 have not even loaded it
    assert not place.report_file.exists()
    assert "NSA_PLUGIN_ENABLED=0 overrides its flags" in place.log()


def test_a_missing_target_in_the_scheduler_stops_the_engine(place: Place) -> None:
    status, tokens = place.run_engine(NSA_PLUGIN_ENABLED="1", WITNESS_BREAK="1")
    assert status != 0
    assert tokens is None
    (message,) = re.findall("nsa-plugin: error: .*", place.log())
    assert "sglang.registered" in message
    assert "ATTENTION_BACKENDS[dsa]: no entry 'dsa'" in message
    assert f"sglang {metadata.version('sglang')}" in message
    assert "Supported: sglang >=0.5.11,<0.5.24" in message
    assert "NSA_PLUGIN_ENABLED=0" in message


def test_with_strict_off_the_stock_engine_serves_and_the_report_says_so(place: Place) -> None:
    status, tokens = place.run_engine(
        NSA_PLUGIN_ENABLED="1", NSA_PLUGIN_STRICT="0", NSA_PLUGIN_REPORT=str(place.report_file), WITNESS_BREAK="1"
    )
    assert (status, len(tokens or ())) == (0, 4), place.log()[-4000:]
    report = place.report()
    assert report["active"] is False
    assert any("the stock engine serves" in note and "ATTENTION_BACKENDS[dsa]" in note for note in report["notes"])
    (scheduler,) = place.seen("scheduler")
    # Put back, or never loaded: what the plugin requires is looked at before it loads anything, and SGLang itself loads
    # the module from 0.5.20 on.
    assert scheduler["backend"] is None or scheduler["backend"][0] == BACKEND


@pytest.mark.parametrize(
    ("arguments", "environment", "status", "words"),
    [
        (["--enable-nsa-plugin", "--nsa-plugin-trace", "maybe"], {}, 2, ["--nsa-plugin-trace", "off, log"]),
        ([], {"NSA_PLUGIN_TARCE": "log"}, 1, ["NSA_PLUGIN_TARCE", "Did you mean 'trace'?"]),
        ([], {"NSA_PLUGIN_ENABLED": "perhaps"}, 1, ["NSA_PLUGIN_ENABLED", "true or false"]),
        (
            ["--enable-nsa-plugin"],
            {"WITNESS_VERSION": "0.5.99"},
            1,
            ["sglang 0.5.99 is installed", ">=0.5.11,<0.5.24", "NSA_PLUGIN_ENABLED=0"],
        ),
        (
            ["--enable-nsa-plugin"],
            {"WITNESS_VERSION": "0.5.10"},
            1,
            ["sglang 0.5.10 is installed", ">=0.5.11,<0.5.24", "NSA_PLUGIN_ENABLED=0"],
        ),
        (
            ["--enable-nsa-plugin", "--model-path", "sparse"],
            {},
            1,
            ["sparse: DeepSeek sparse attention", "needs a GPU"],
        ),
        (["--enable-nsa-plugin", "--nsa-plugin-strict", "full", "--use-ray"], {}, 1, ["Ray actors", "--use-ray"]),
    ],
    ids=["flag-value", "environment-name", "environment-value", "too-new", "too-old", "sparse-model-on-cpu", "ray"],
)
def test_an_impossible_configuration_ends_the_command_before_serving(
    place: Place, arguments: list[str], environment: dict[str, str], status: int, words: list[str]
) -> None:
    assert place.run_command_line(*arguments, **environment) == status
    last = place.log().strip().splitlines()[-1]
    assert all(word in last for word in words), last
    assert not any(seen["scheduler"] for seen in place.seen("loaded"))


def test_an_unknown_setting_is_an_exception_for_the_caller_of_an_offline_engine(place: Place) -> None:
    status, tokens = place.run_engine(NSA_PLUGIN_PREFIL_BACKEND="triton")
    assert (status, tokens) == (1, None)
    assert "SettingsError: unknown nsa-plugin setting 'prefil_backend'" in place.log()
    assert not any(seen["scheduler"] for seen in place.seen("loaded"))


LIVE = """
import json
from packaging.version import Version
from sglang.version import __version__
from nsa_plugin.patches import sglang as data
from nsa_plugin.patches.ledger import Ledger, Need
import sglang.srt.managers.scheduler  # in a scheduler it is there before the plugin
from sglang.srt.layers.attention import dsa_backend
from sglang.srt.layers.attention.dsa import dsa_indexer

for module in (dsa_backend, dsa_indexer):
    vars(module).setdefault("deep_gemm", None)  # SGLang before 0.5.22 imports it here only where there is a GPU
ledger = Ledger(engine=data.ENGINE, version=Version(__version__), supported=data.SUPPORTED, patches=data.PATCHES)
ledger.check(*Need)
with open("result.json", "w") as file:
    json.dump([patch.name for patch in data.PATCHES if patch.target(ledger.version) is None], file)
"""


@pytest.mark.regression(27)
def test_every_target_of_the_ledger_is_there_live_those_of_a_gpu_too(place: Place) -> None:
    # In 0.5.13 one method took the place of these. Which versions have the others: tests/patches/test_sglang.py.
    renamed = {"sglang.graph-capture", "sglang.graph-replay"}
    others = ("sglang.v4-", "sglang.portable-")
    assert {name for name in place.run_program(LIVE) if not name.startswith(others)} == renamed


V4 = """
import json, sys
from types import SimpleNamespace
from packaging.version import Version
from sglang.version import __version__
from nsa_plugin.backends.sglang.startup import activation, hooks
from nsa_plugin.errors import NsaPluginError
from nsa_plugin.patches import sglang as data
from nsa_plugin.patches.ledger import Ledger, Need
from nsa_plugin.settings import ResolvedSettings, Settings
import sglang.srt.managers.scheduler
import sglang.srt.models.deepseek_v4
from sglang.srt.layers.attention import attention_registry as registry

def build(make):
    try:
        make(SimpleNamespace(device="cpu"))
    except NsaPluginError as error:
        return str(error)
    except ValueError as error:  # SGLang's: its entry looks at the flags of a server, which is not there
        return f"SGLang goes on: {error}"

ledger = Ledger(engine=data.ENGINE, version=Version(__version__), supported=data.SUPPORTED, patches=data.PATCHES)
process = activation.SglangProcess(ledger=ledger, child=True, resolved=ResolvedSettings(Settings(enabled=True), {}))
hooks.process = lambda: process
ledger.install(Need.ENABLED, Need.GPU)
name = "sglang.srt.layers.attention.deepseek_v4_backend"
entry = registry.ATTENTION_BACKENDS["dsv4"]
seen = {"before": name in sys.modules, "entry": build(entry)}
cls = sys.modules[name].DeepseekV4AttnBackend
seen |= {"class": cls.__name__, "served": build(cls)}
with open("result.json", "w") as file:
    json.dump(seen, file)
"""


def test_the_class_of_v4_is_replaced_where_sglang_builds_one(place: Place) -> None:
    """SGLang's own registry and class; the backend itself says that it needs a GPU."""
    seen = place.run_program(V4)
    assert seen["before"] is False
    # From 0.5.20 on SGLang's entry looks at the flags of a server first; before, it builds the backend at once.
    assert seen["entry"].startswith("SGLang goes on") or "needs a GPU" in seen["entry"]
    assert "needs a GPU" in seen["served"]
    assert seen["class"] == "NsaPluginDeepseekV4AttnBackend"


COMPARE = """
import argparse, json, os, sys
from sglang.srt.plugins import load_plugins
load_plugins()
if "nsa_plugin" in os.environ["SGLANG_PLUGINS"]:
    from nsa_plugin.backends.sglang import register
    register()  # again: a second flag of the same name would be an error of argparse
from sglang.srt.server_args import ServerArgs, prepare_server_args
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
server_args = prepare_server_args(["--model-path", "model", "--device", "cpu", "--random-seed", "1"])
names = server_args.__struct_fields__ if hasattr(server_args, "__struct_fields__") else vars(server_args)
seen = {
    "flag": "--enable-nsa-plugin" in parser.format_help(),
    "arguments": {name: repr(getattr(server_args, name)) for name in names if name != "model_config"},
    "modules": sorted(name for name in sys.modules if name.partition(".")[0] in ("sglang", "torch")),
    "plugin": sorted(name for name in sys.modules if name.partition(".")[0] == "nsa_plugin"),
}
with open("result.json", "w") as file:
    json.dump(seen, file)
"""


def test_installed_and_not_enabled_changes_nothing(place: Place) -> None:
    """SGLang's arguments and the modules it has loaded by then are the same with and without the plugin."""
    (place.folder / "compare.py").write_text(COMPARE)
    without = place.run_program(COMPARE, SGLANG_PLUGINS="witness")
    installed = place.run_program(COMPARE, SGLANG_PLUGINS="witness,nsa_plugin")
    assert (without["flag"], installed["flag"]) == (False, True)
    assert installed["arguments"] == without["arguments"]
    assert installed["modules"] == without["modules"]
    assert without["plugin"] == []
    assert installed["plugin"] == sorted([*ENTERED, *READS_FLAGS])
