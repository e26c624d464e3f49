"""The command line: ``nsa-plugin doctor | explain | patches | demo | bench | compare``.

Only the requested command is imported, so that help is instant and needs neither torch nor an engine. A command is a
module with `add_arguments(parser)` and `run(args) -> int`. A module that sets `TAKES_ENGINE_FLAGS` gets the words after
`--` in `args.engine_flags`.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from nsa_plugin import __version__
from nsa_plugin.errors import NsaPluginError

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

EXIT_CODES = """exit codes:
  0    success: the check passed
  1    the check failed; the output says what and why
  2    bad usage or bad input; an error on stderr says what is allowed
  130  interrupted"""

# Name, module, and what it answers.
COMMANDS = {
    "doctor": ("nsa_plugin.commands.doctor", "what is installed here, what works and what does not, and why"),
    "explain": ("nsa_plugin.commands.explain", "one routing decision from flags: the route and the reasons"),
    "patches": ("nsa_plugin.commands.patches", "every change to an engine: target, reason, when it can be removed"),
    "demo": ("nsa_plugin.commands.demo", "serve a small model with a real engine and compare every token"),
    "bench": ("nsa_plugin.commands.bench", "time the kernels on this machine's GPU against their floor, and report it"),
    "compare": ("nsa_plugin.commands.compare", "serve a model with the stock engine and with the plugin, and compare"),
}

EXAMPLES = """examples:
  nsa-plugin doctor
  nsa-plugin explain --model v3.2 --sm 90 --heads 16 --tp 8 --kv-dtype fp8 \\
      --phase extend --q-tokens 13000 --max-kv 65536
  nsa-plugin patches --engine vllm
  nsa-plugin demo --json result.json
  nsa-plugin bench sparse-mla-decode
  nsa-plugin compare sglang --heads 16 -- --kv-cache-dtype fp8_e4m3"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One sentence instead of the whole usage."""
        _print_error(f"{self.prog}: error: {message} (see {self.prog} --help)")
        self.exit(EXIT_USAGE)


def _print_error(message: str) -> None:
    from nsa_plugin.commands.output import print_error  # help does without

    print_error(message)


def _parser(asked: str | None) -> argparse.ArgumentParser:
    """The parser, with the arguments of the requested command."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="nsa-plugin",
        description="DeepSeek sparse attention (NSA / DSA) for SGLang and vLLM.",
        epilog=f"{EXAMPLES}\n\n{EXIT_CODES}",
        formatter_class=layout,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"nsa-plugin {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=EXIT_CODES,
            formatter_class=layout,
            allow_abbrev=False,
        )
        command.set_defaults(parser=command)
        if name == asked:
            importlib.import_module(module).add_arguments(command)
    return parser


def _hint(command: argparse.ArgumentParser, flag: str, module: str) -> str:
    """What the user may have meant by a flag that a command does not have."""
    known = [name for name in command._option_string_actions if name.startswith("--")]
    near = difflib.get_close_matches(flag.partition("=")[0], known, 1, 0.75)
    if near:
        return f". Did you mean {near[0]}?"
    if getattr(importlib.import_module(module), "TAKES_ENGINE_FLAGS", False):
        return ". Flags of the engine go after --"
    return ". Flags of an engine belong to that engine's command" if "nsa-plugin" in flag else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is one of `EXIT_CODES`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    try:
        parser = _parser(asked)
        if asked is not None and asked not in COMMANDS:
            near = difflib.get_close_matches(asked, COMMANDS, 1, 0.5)
            said = f"Did you mean {near[0]!r}?" if near else f"Commands: {', '.join(COMMANDS)}"
            parser.error(f"unknown command {asked!r}. {said}")
        args, unknown = parser.parse_known_args(arguments[:end])
        command: argparse.ArgumentParser = args.parser
        if unknown:
            hint = _hint(command, unknown[0], COMMANDS[args.command][0])
            command.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        args.engine_flags = arguments[end + 1 :]
        module = importlib.import_module(COMMANDS[args.command][0])
        if args.engine_flags and not getattr(module, "TAKES_ENGINE_FLAGS", False):
            command.error(f"{args.command} takes nothing after --, not {args.engine_flags[0]!r}")
        del args.parser
        code = module.run(args)
        sys.stdout.flush()  # a reader that has gone is noticed here rather than at exit
        return int(code)
    except NsaPluginError as error:
        _print_error(f"nsa-plugin {asked}: error: {error}")
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader, `head` for one, has gone; Python would complain again when it flushes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
