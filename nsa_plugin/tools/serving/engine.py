"""What the tools need from an engine: how its server starts, takes requests and answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from nsa_plugin.errors import NsaPluginError
from nsa_plugin.tools.serving.requests import Answer

# Families of models, as `nsa_plugin.decision.shapes.ModelShape` names them.
V32, V4, GLM = FAMILIES = ("v3.2", "v4", "glm")


class CompareError(NsaPluginError):
    """The requested comparison is not possible, or a server did not behave as expected."""


class ServedEngine(Protocol):
    """One engine. Nothing of it is imported: its server runs in its own processes, in this Python environment.

    Attributes:
        name: as users call it; also the first word of a record's suite.
        generate_path, flush_path, metrics_path: of the server's HTTP interface.
    """

    name: str
    generate_path: str
    flush_path: str
    metrics_path: str

    def version(self) -> str:
        """The installed version.

        Raises:
            CompareError: the engine is not installed, or would not load the plugin.
        """
        ...

    def command(self, model: Path, port: int, flags: Sequence[str], *, plugin: bool) -> list[str]:
        """The command line of a server on 127.0.0.1. `flags` override what the tools set."""
        ...

    def environ(self, *, plugin: bool) -> dict[str, str]:
        """Variables for the server, in addition to the inherited ones."""
        ...

    def body(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        *,
        top: int = 0,
        prompt_logprobs: int = 0,
        stream: bool = False,
    ) -> dict[str, Any]:
        """The JSON of a request that decodes greedily and ignores end-of-sequence tokens.

        Args:
            top: request log probabilities of the generated and the `top` most probable tokens; 0: none.
            prompt_logprobs: request log probabilities of this many of a prompt's last tokens.
        """
        ...

    def answers(self, data: Any) -> list[Answer]:
        """The answer to each prompt of a request that does not stream.

        Raises:
            CompareError: the reply has an unexpected form.
        """
        ...

    def streamed(self, data: Mapping[str, Any]) -> int:
        """Tokens generated so far, from one event of a streaming request."""
        ...

    def routes(self, metrics: str) -> Counter[str]:
        """Batches that the plugin planned, by "phase/attention/provider", from the server's metrics."""
        ...

    def combined(self, metrics: str) -> Counter[str]:
        """Prefills with requests of two kinds that the plugin planned, by kind, from the server's metrics."""
        ...

    def resharded(self, metrics: str) -> Counter[str]:
        """Query tokens of batches that the plugin reshards, by phase, from the server's metrics."""
        ...

    def facts(self, flags: Sequence[str], family: str) -> dict[str, Any]:
        """What `flags` say about a server of a model of `family` (`FAMILIES`).

        Returns:
            kv ("bf16", "fp8"), tp, dp, attention_tp, prefix_cache, and `variant`, a list of words. `chunk` (most tokens
            of a prefill) and `max_len` (longest context) are in tokens, or None if no flag sets them. `mixed_chunk`:
            decode steps run in prefills, but not those of requests that ask for log probabilities; absent if no flag
            makes an engine do so.

        Raises:
            CompareError: a number of ranks is not a number, or below 1.
        """
        ...
