"""What the commands that start servers of stock and the plugin share: their arguments, the checkpoint, the servers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nsa_plugin.commands.arguments import positive, seconds
from nsa_plugin.commands.compare_options import ENGINES
from nsa_plugin.tools.compare import model
from nsa_plugin.tools.compare.measured import PLUGIN
from nsa_plugin.tools.serving.engine import FAMILIES, V32, ServedEngine
from nsa_plugin.tools.serving.process import ServerSpec


def add_arguments(parser: argparse.ArgumentParser, *, heads: int, workdir: str) -> None:
    """The engine, the model, and where files go; with these defaults."""
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--heads", type=positive, default=heads, help="attention heads of the model (%(default)s)")
    parser.add_argument("--family", choices=FAMILIES, default=V32, help="model family (%(default)s)")
    parser.add_argument("--workdir", type=Path, default=Path(workdir), help="checkpoint and logs (%(default)s)")
    parser.add_argument(
        "--start-timeout", type=seconds, default=600.0, metavar="SECONDS", help="for each start (%(default)g)"
    )
    parser.add_argument("--json", type=Path, metavar="DIR", help="write a record into DIR")
    parser.add_argument("--commit", help="source commit, where the source is in no checkout")


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The arguments, and the engine's flags behind ``--``."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    return parser.parse_args(words[:end]), words[end + 1 :]


def checkpoint_of(given: argparse.Namespace) -> tuple[Path, int]:
    """The model's checkpoint, made unless it is there, and the size of its vocabulary."""
    spec = model.spec_of(given.family, given.heads, None, mtp=False)
    checkpoint = (given.workdir / model.checkpoint_name(spec)).resolve()
    given.workdir.mkdir(parents=True, exist_ok=True)
    model.make_checkpoint(spec, checkpoint, print)
    return checkpoint, int(spec.config()["vocab_size"])


def server_spec(
    engine: ServedEngine, role: str, checkpoint: Path, flags: Sequence[str], given: argparse.Namespace
) -> ServerSpec:
    """How to start the server of a role."""
    plugin = role == PLUGIN
    return ServerSpec(
        command=lambda port: engine.command(checkpoint, port, flags, plugin=plugin),
        environ={**engine.environ(plugin=plugin), "NSA_PLUGIN_REPORT": str(report_file(given.workdir))},
        log=given.workdir / f"{role}.log",
        start_timeout=given.start_timeout,
    )


def report_file(work: Path) -> Path:
    """The plugin's start-up report, which stock servers do not write."""
    return (work / "plugin-report.json").resolve()
