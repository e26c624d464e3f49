"""What SECURITY.md says of a serving engine: no port, no pickle, no download, and files only where a setting says."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nsa_plugin"
NOT_SERVING = ("tools", "commands")

LOADED_BY_NAME = "importlib.import_module"
"""An import whose module is not a literal. One with a literal counts as that import."""

# Modules and functions that serving code does not refer to, with everything below them, by what they do.
RULED_OUT = {
    "unpickles, or runs what it reads": """
        pickle _pickle cPickle cloudpickle dill joblib shelve marshal copyreg yaml.load yaml.unsafe_load numpy.load
        torch.load torch.jit.load torch.export.load torch.hub torch.package torch.distributed.rpc
        torch.ops.load_library torch.classes.load_library torch.utils.cpp_extension
        builtins.eval builtins.exec builtins.compile builtins.__import__ code codeop runpy imp zipimport
        importlib.import_module importlib.__import__ importlib.reload importlib.machinery
        importlib.util.spec_from_file_location importlib.util.module_from_spec
        ctypes.CDLL ctypes.PyDLL ctypes.cdll ctypes.pydll""",
    "listens, connects or downloads": """
        socket _socket socketserver ssl select selectors http aiohttp asyncio urllib urllib3 requests httpx httpcore
        websockets uvicorn fastapi starlette flask grpc zmq xmlrpc ftplib smtplib poplib imaplib telnetlib wsgiref
        webbrowser huggingface_hub fsspec boto3 torch.distributed.init_process_group torch.distributed.TCPStore
        prometheus_client logging.handlers logging.config""",
    "starts processes": """
        subprocess pty multiprocessing concurrent.futures.ProcessPoolExecutor os.system os.popen os.fork os.forkpty
        os.posix_spawn os.posix_spawnp os.execl os.execle os.execlp os.execlpe os.execv os.execve os.execvp os.execvpe
        os.spawnl os.spawnle os.spawnlp os.spawnlpe os.spawnv os.spawnve os.spawnvp os.spawnvpe""",
    # open() for writing and the methods of a path are found by their calls
    "writes files": """
        os.open os.mkdir os.makedirs os.remove os.unlink os.rename os.renames os.replace os.rmdir os.link os.symlink
        os.chmod os.chown os.truncate os.mkfifo shutil tempfile sqlite3 dbm mmap torch.save torch.jit.save
        numpy.save numpy.savez numpy.savetxt numpy.memmap logging.FileHandler""",
    "reads settings": """
        nsa_plugin.settings.resolve nsa_plugin.settings.parse_source os.environ os.environb os.getenv os.putenv""",
    "has what only commands do": "nsa_plugin.tools nsa_plugin.commands",
}
FORBIDDEN = frozenset(name for names in RULED_OUT.values() for name in names.split())
BUILTINS = {name.removeprefix("builtins.") for name in FORBIDDEN if name.startswith("builtins.")}
OPENED = "open for writing"
PATH_METHODS = frozenset(
    {"write_text", "write_bytes", "mkdir", "touch", "unlink", "rmdir", "rename", "symlink_to", "hardlink_to", "chmod"}
)
"""Methods of a path that change files; `replace` too, which has one argument."""
PICKLED = re.compile(r"\w+_object(_list)?")
"""Methods of a process group that exchange pickled objects."""

COMMAND_LINE = "`nsa-plugin`, which no engine imports"
OWN_TABLE = "modules come from the plugin's own tables"
ENGINE_MODULE = "a module of the engine, by a constant of this file"
LIBRARY = "a kernel library, by a constant of this file"
START = "read when the engine starts"
# Every reference of serving code to one of these, by file: what it is for.
ALLOWED: dict[str, dict[str, str]] = {
    "backends/common/providers.py": {LOADED_BY_NAME: "a kernel library that an engine bundles"},
    "backends/common/token_shard.py": {LOADED_BY_NAME: "the engine's module of process groups"},
    "backends/sglang/__init__.py": {
        "multiprocessing.parent_process": "whether SGLang started this process; starts none",
        "os.environ": START,
    },
    "backends/sglang/startup/activation.py": {
        "multiprocessing.parent_process": "whether SGLang started this process; starts none",
        "os.environ": START,
    },
    "backends/sglang/startup/flags.py": {
        "nsa_plugin.settings.parse_source": "SGLang's command line",
        "nsa_plugin.settings.resolve": START,
        "os.environ": START,
    },
    "backends/sglang/startup/metrics.py": {
        "os.environ": START,
        "prometheus_client.Gauge": "in SGLang's /metrics",
        "prometheus_client.Counter": "in SGLang's /metrics",
        "prometheus_client.Histogram": "in SGLang's /metrics",
    },
    "backends/sglang/v32/attention.py": {LOADED_BY_NAME: "the module of the class that is replaced"},
    "backends/sglang/v32/token_shard.py": {LOADED_BY_NAME: ENGINE_MODULE},
    "backends/sglang/v4/flash_mla.py": {LOADED_BY_NAME: LIBRARY},
    "backends/vllm/__init__.py": {"os.environ": "names the settings among those that vLLM copies to Ray's processes"},
    "backends/vllm/startup/activation.py": {
        "nsa_plugin.settings.resolve": START,
        "os.environ": START,
        "tempfile.TemporaryDirectory": "the type of the folder that counters.py makes",
    },
    "backends/vllm/startup/counters.py": {
        "os.environ": START,
        "prometheus_client.REGISTRY": "vLLM's registry",
        "prometheus_client.multiprocess.MultiProcessCollector": "shows the workers' files in vLLM's /metrics",
        "prometheus_client.mmap_dict.MmapedDict": "writes those files",
        "prometheus_client.mmap_dict.mmap_key": "names a sample in them",
        "tempfile.TemporaryDirectory": "their folder, if vLLM has none",
    },
    "backends/vllm/startup/model.py": {"os.environ": "a switch of vLLM's, read when it starts"},
    "backends/vllm/v32/attention.py": {LOADED_BY_NAME: ENGINE_MODULE},
    "backends/vllm/v32/dcp.py": {LOADED_BY_NAME: ENGINE_MODULE},
    "backends/vllm/v32/token_shard.py": {LOADED_BY_NAME: LIBRARY},
    "cli.py": {
        LOADED_BY_NAME: COMMAND_LINE,
        "nsa_plugin.commands": COMMAND_LINE,
        "os.open": "/dev/null, for a reader that has gone",
    },
    "decision/__init__.py": {LOADED_BY_NAME: "its own modules, when a name is first used"},
    "kernels/cuda/build.py": {
        "os.environ": "XDG_CACHE_HOME",
        "mkdir": "the folder of compiled kernels",
        "replace": "a compiled kernel gets its name",
        "unlink": "of a compiled kernel that could not be written completely",
        "write_bytes": "a compiled kernel",
    },
    "kernels/cuda/nvrtc.py": {"ctypes.CDLL": "NVRTC, by the path that cuda.pathfinder gives"},
    "kernels/providers/fa3.py": {LOADED_BY_NAME: LIBRARY},
    "kernels/providers/flashinfer_sm120.py": {LOADED_BY_NAME: LIBRARY},
    "kernels/providers/trtllm.py": {LOADED_BY_NAME: LIBRARY},
    "kernels/triton/device.py": {"os.environ": "Triton's variable that an emulated GPU sets"},
    "libraries/probe.py": {LOADED_BY_NAME: "a kernel library of the manifest"},
    "libraries/registry.py": {LOADED_BY_NAME: "a kernel provider of the manifest"},
    "patches/ledger.py": {LOADED_BY_NAME: OWN_TABLE},
    "settings.py": {"os.environ": START},
    "switch.py": {"os.environ": "the kill switch"},
    "telemetry.py": {
        OPENED: "the trace, where the setting says",
        "replace": "the report gets its name",
        "write_text": "the report, where the setting says",
    },
}


def forbidden(name: str) -> str:
    """The entry of FORBIDDEN that a dotted name falls under, or the whole name below a forbidden module; else ""."""
    parts = name.split(".")
    entry = next((e for e in (".".join(parts[: count + 1]) for count in range(len(parts))) if e in FORBIDDEN), "")
    if parts[-1] == "*" and not entry:  # `from os import *` has everything that is forbidden below os
        return name if any(one.startswith(name[:-1]) for one in FORBIDDEN) else ""
    return entry if "." in entry else name if entry else ""


def names_of(tree: ast.Module, package: str) -> dict[str, str]:
    """What each imported name stands for, dotted; all scopes together."""
    found = {name: f"builtins.{name}" for name in (*BUILTINS, "open", "getattr")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found |= {alias.asname: alias.name} if alias.asname else {(top := alias.name.partition(".")[0]): top}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name] = f"{_source(node, package)}.{alias.name}"
    return found


def _source(node: ast.ImportFrom, package: str) -> str:
    """The module that is imported from, without leading dots."""
    if not node.level:
        return str(node.module)
    above = package.split(".")
    return ".".join([*above[: len(above) - node.level + 1], *([node.module] if node.module else [])])


def dotted(node: ast.AST, names: dict[str, str]) -> str:
    """The dotted name of an expression, "" if it has none."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value, names)
        return f"{inner}.{node.attr}" if inner else ""
    if isinstance(node, ast.Call) and dotted(node.func, names) == "builtins.getattr" and len(node.args) > 1:
        inner, attribute = dotted(node.args[0], names), node.args[1]
        if inner and isinstance(attribute, ast.Constant):
            return f"{inner}.{attribute.value}"
    return ""


def _opens_for_writing(node: ast.Call, mode_at: int) -> bool:
    """Whether a call of open() writes, or may."""
    modes = [*node.args[mode_at : mode_at + 1], *(word.value for word in node.keywords if word.arg == "mode")]
    return any(not isinstance(mode, ast.Constant) or set(str(mode.value)) & set("wax+") for mode in modes)


def _called(node: ast.Call, names: dict[str, str]) -> Iterator[str]:
    """What a call does that its name alone does not say."""
    name = dotted(node.func, names)
    if name in ("builtins.open", "io.open") and _opens_for_writing(node, 1):
        yield OPENED
    if isinstance(node.func, ast.Attribute):
        method = node.func.attr
        own = name.startswith("nsa_plugin.")
        if method in PATH_METHODS and not own:
            yield method
        if method == "replace" and not name and len(node.args) == 1 and not node.keywords:
            yield method  # of a path; that of a text has two arguments
        if method == "open" and not name and _opens_for_writing(node, 0):
            yield OPENED
        if PICKLED.fullmatch(method):
            yield method


def findings(text: str, package: str = "nsa_plugin") -> set[str]:
    """Every reference of a source to something forbidden, by the name that `ALLOWED` has."""
    tree = ast.parse(text)
    names = names_of(tree, package)
    said: set[str] = set()
    found: set[str] = set()
    literal: set[ast.AST] = set()
    for node in ast.walk(tree):  # a call comes before the function that it calls
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{_source(node, package)}.{alias.name}" for alias in node.names} - {LOADED_BY_NAME}
        elif isinstance(node, ast.Call):
            said |= set(_called(node, names))
            if dotted(node.func, names) == LOADED_BY_NAME and node.args and isinstance(node.args[0], ast.Constant):
                literal.add(node.func)
                found.add(str(node.args[0].value))
        if isinstance(node, ast.Name | ast.Attribute | ast.Call) and node not in literal:
            found.add(dotted(node, names))
    found = set(map(forbidden, found)) - {""}
    # Of `import a` and `a.b()` the longer name says what is used.
    return said | {one for one in found if not any(other.startswith(f"{one}.") for other in found)}


def package_findings() -> dict[str, set[str]]:
    """The findings in each file of serving code that has any."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE)
        if inside.parts[0] not in NOT_SERVING:
            package = ".".join((PACKAGE.name, *inside.parts[:-1]))
            found[str(inside)] = findings(path.read_text(), package)
    return {name: names for name, names in found.items() if names}


def test_serving_code_has_no_call_that_security_md_rules_out() -> None:
    found = package_findings()
    new = {name: sorted(names - ALLOWED.get(name, {}).keys()) for name, names in found.items()}
    assert not {name: names for name, names in new.items() if names}, "SECURITY.md says that serving code does not"
    gone = {name: sorted(names.keys() - found.get(name, set())) for name, names in ALLOWED.items()}
    assert not {name: names for name, names in gone.items() if names}, "no longer needs to be allowed"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import pickle\npickle.loads(data)", "pickle.loads"),
        ("import pickle", "pickle"),
        ("def f():\n    from pickle import loads as read", "pickle.loads"),
        ("from importlib import import_module\nimport_module('dill')", "dill"),
        ("import importlib as i\ni.import_module(name)", LOADED_BY_NAME),
        ("import importlib.util\nimportlib.util.spec_from_file_location", "importlib.util.spec_from_file_location"),
        ("import torch\ntorch.load(path)", "torch.load"),
        ("import torch as t\nread = t.load", "torch.load"),
        ("import torch\ngetattr(torch, 'load')(path)", "torch.load"),
        ("import torch.hub", "torch.hub"),
        ("import torch.distributed as dist\ndist.broadcast_object_list(found)", "broadcast_object_list"),
        ("group.all_gather_object(found)", "all_gather_object"),
        ("import numpy as np\nnp.load(path, allow_pickle=True)", "numpy.load"),
        ("import marshal\nmarshal.loads(data)", "marshal.loads"),
        ("import shelve", "shelve"),
        ("import socket\nsocket.socket()", "socket.socket"),
        ("from http.server import HTTPServer", "http.server.HTTPServer"),
        ("import urllib.request\nurllib.request.urlopen(address)", "urllib.request.urlopen"),
        ("import aiohttp", "aiohttp"),
        ("import requests\nrequests.get(address)", "requests.get"),
        ("import httpx", "httpx"),
        ("from prometheus_client import start_http_server", "prometheus_client.start_http_server"),
        ("import torch\ntorch.distributed.init_process_group()", "torch.distributed.init_process_group"),
        ("import subprocess\nsubprocess.run(words)", "subprocess.run"),
        ("import os\nos.system(text)", "os.system"),
        ("from os import popen", "os.popen"),
        ("from os import *", "os.*"),
        ("eval(text)", "builtins.eval"),
        ("run = exec", "builtins.exec"),
        ("import builtins\nbuiltins.compile(text, '', 'exec')", "builtins.compile"),
        ("__import__(name)", "builtins.__import__"),
        ("import ctypes\nctypes.CDLL(path)", "ctypes.CDLL"),
        ("open(path, 'w')", OPENED),
        ("open(path, mode='ab')", OPENED),
        ("open(path, mode)", OPENED),
        ("path.open('r+')", OPENED),
        ("path.write_text('')", "write_text"),
        ("path.replace(other)", "replace"),
        ("import os\nos.replace(a, b)", "os.replace"),
        ("import tempfile\ntempfile.mkdtemp()", "tempfile.mkdtemp"),
        ("import os\nos.environ.get('NSA_PLUGIN_TRACE')", "os.environ"),
        ("from nsa_plugin.settings import resolve\nresolve(config=request)", "nsa_plugin.settings.resolve"),
        ("from nsa_plugin import settings\nsettings.resolve(config=request)", "nsa_plugin.settings.resolve"),
        ("from ..settings import resolve", "nsa_plugin.settings.resolve"),
        ("from nsa_plugin.tools.serving import client", "nsa_plugin.tools"),
    ],
)
def test_such_a_call_is_found(text: str, name: str) -> None:
    assert findings(text, "nsa_plugin.kernels") == {name}


@pytest.mark.parametrize(
    "text",
    [
        "requests = [1]\nrequests.append(2)",
        "import torch\ntorch.empty(1)\ntl.load(pointer)",
        "from importlib import import_module\nimport_module('flash_mla').run()",
        "import re\nre.compile('a')",
        "model.eval()",
        "open(path)\npath.open()\npath.read_text()\nopen(path, 'rb')",
        "text.replace('a', 'b')",
        "from dataclasses import replace\nreplace(plan, reasons={})",
        "import json\njson.loads(text)",
        "import os\nos.getpid()",
        "signature.bind(1)",
    ],
)
def test_other_calls_are_not(text: str) -> None:
    assert findings(text) == set()


HOOK = """
import json, os, sys

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}
STARTS = {"os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "subprocess.Popen"}
CONNECTS = {"socket.bind", "socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "urllib.Request"}
seen = []

def hook(event, args):
    if event == "open":
        path, _, flags = args
        if isinstance(path, (str, bytes)) and isinstance(flags, int) and flags & WRITES:
            seen.append((event, os.path.abspath(os.fsdecode(path))))
    elif event in CHANGES:
        seen.extend((event, os.path.abspath(os.fsdecode(path))) for path in args if isinstance(path, (str, bytes)))
    elif event in STARTS | CONNECTS or event == "pickle.find_class":
        seen.append((event, repr(args)))
"""
DECIDE = """
sys.addaudithook(hook)
import nsa_plugin.backends.sglang, nsa_plugin.backends.vllm
from nsa_plugin.decision import BatchShape, Decider, ModelShape, Phase
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.settings import resolve
from nsa_plugin.telemetry import StartupReport, Trace, check_files

resolved = resolve()
check_files(resolved.settings)
trace = Trace(mode=resolved.settings.trace)
decider = Decider(ModelShape(attn_tp_size=8), synthetic(90), resolved.settings)
StartupReport(engine="toy", engine_version="1", active=True, resolved=resolved, facts={}).publish()
for phase, tokens, context in ((Phase.EXTEND, 4096, 65536), (Phase.DECODE, 1, 65536), (Phase.EXTEND, 100, 100)):
    batch = BatchShape.from_lengths(phase, [tokens], [context])
    trace.record([(decider.decide(batch), [("a request", tokens, context)])])
print(json.dumps([seen, sorted(sys.modules.keys() & {"torch", "vllm", "sglang"})]))
"""
IMPORT_ALL = """
import importlib, pkgutil
import numpy, torch  # what importing them does is theirs
try:
    import triton.language
except ImportError:
    pass
sys.modules |= dict.fromkeys(("vllm", "sglang"))  # not installed
sys.addaudithook(hook)
import nsa_plugin

imported, failed = [], []
for found in pkgutil.walk_packages(nsa_plugin.__path__, "nsa_plugin."):
    if found.name.split(".")[1] not in ("tools", "commands"):
        try:
            importlib.import_module(found.name)
            imported.append(found.name)
        except ImportError:
            failed.append(found.name)
print(json.dumps([seen, imported, failed]))
"""


def audited(program: str, root: Path = ROOT, **environ: str) -> list[Any]:
    """What a program of its own process prints as JSON: first the events that the audit hook has seen."""
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith("NSA_PLUGIN_")}
    done = subprocess.run(
        [sys.executable, "-c", HOOK + program],
        env=kept | {"PYTHONPATH": str(root)} | environ,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    printed: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return printed


def not_allowed(events: list[list[str]], *files: Path) -> list[list[str]]:
    """The events that are neither about the named files (or their temporary names) nor the interpreter's own."""
    named = "|".join(rf"{re.escape(str(file))}(\.\d+)?" for file in files)
    own = re.compile(rf"/(proc|dev(?!/shm))/.*|.*/__pycache__(/[^/]*\.pyc(\.\d+)?)?{'|' * bool(named)}{named}")
    return [
        [event, what]
        for event, what in events
        if event.partition(".")[0] not in ("open", "os") or not own.fullmatch(what)
    ]


def test_a_decision_writes_the_named_files_only_and_opens_no_socket(tmp_path: Path) -> None:
    trace, report = tmp_path / "trace.jsonl", tmp_path / "report.json"
    environ = {"NSA_PLUGIN_ENABLED": "1", "NSA_PLUGIN_TRACE": str(trace), "NSA_PLUGIN_REPORT": str(report)}
    events, engines = audited(DECIDE, **environ)
    assert not_allowed(events, trace, report) == []
    assert engines == []
    assert len(trace.read_text().splitlines()) == 3
    assert json.loads(report.read_text())["settings"]["trace"] == str(trace)
    written = {Path(what).name.partition(".json.")[0] for event, what in events if what.startswith(str(tmp_path))}
    assert {"trace.jsonl", "report"} <= written, "the hook has not seen them"
    assert {path.name for path in tmp_path.iterdir()} == {"trace.jsonl", "report.json"}


def test_without_files_in_the_settings_a_decision_writes_none() -> None:
    events, _ = audited(DECIDE)
    assert not_allowed(events) == []


def test_imports_of_serving_code_write_nothing_and_open_no_socket() -> None:
    events, imported, failed = audited(IMPORT_ALL)
    assert not_allowed(events) == []
    assert {"nsa_plugin.kernels.triton.indexer", "nsa_plugin.kernels.cuda.build"} <= {*imported}
    assert len(imported) > 100, failed


@pytest.mark.parametrize(
    ("call", "event"),
    [
        ("open('{folder}/other.txt', 'w').close()", "open"),
        ("os.close(os.open('{folder}/other.txt', os.O_CREAT))", "open"),
        ("os.mkdir('{folder}/other')", "os.mkdir"),
        ("import socket; socket.socket().bind(('127.0.0.1', 0))", "socket.bind"),
        ("import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('127.0.0.1', 9))", "socket.connect"),
        ("import subprocess; subprocess.run(['true'])", "subprocess.Popen"),
        ("import pickle; pickle.loads(pickle.dumps(json.JSONDecoder))", "pickle.find_class"),
    ],
)
def test_the_audit_hook_sees_such_a_call(call: str, event: str, tmp_path: Path) -> None:
    program = f"sys.addaudithook(hook)\n{call.format(folder=tmp_path)}\nprint(json.dumps([seen]))"
    (events,) = audited(program)
    assert event in {event for event, _ in not_allowed(events, tmp_path / "trace.jsonl")}
