"""What a comparison needs of an engine: how its server starts, is asked and answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from nsa_plugin.errors import NsaPluginError
from nsa_plugin.tools.serving.requests import Answer

# Families of models, as `nsa_plugin.decision.shapes.ModelShape` names them.
V32, V4 = FAMILIES = ("v3.2", "v4")


class CompareError(NsaPluginError):
    """The comparison cannot be made as asked."""


class ServedEngine(Protocol):
    """One engine. Nothing of it is imported: its server runs in processes of its own, in this Python.

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
        """The command line of a server on 127.0.0.1, in which `flags` win over what the comparison sets."""
        ...

    def environ(self, *, plugin: bool) -> dict[str, str]:
        """Variables of a server beside those that are inherited."""
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
        """The JSON of a request that decodes greedily and does not stop at an end-of-sequence token.

        Args:
            top: log probabilities of the chosen and of the `top` best tokens are asked for; 0: none.
            prompt_logprobs: log probabilities of so many of a prompt's last tokens are asked for.
        """
        ...

    def answers(self, data: Any) -> list[Answer]:
        """What came back for each prompt of a request that does not stream.

        Raises:
            CompareError: the reply is not as expected.
        """
        ...

    def streamed(self, data: Mapping[str, Any]) -> int:
        """Tokens generated so far, from one event of a request that streams."""
        ...

    def routes(self, metrics: str) -> Counter[str]:
        """Batches that the plugin planned, by "phase/attention/provider", from the server's metrics."""
        ...

    def facts(self, flags: Sequence[str], family: str) -> dict[str, Any]:
        """What `flags` say of a server of a model of `family` (`FAMILIES`).

        Returns:
            kv ("bf16", "fp8"), tp, dp, attention_tp, prefix_cache, `variant`, a list of words; and in tokens, None
            where no flag says it, `chunk`, the most of a prefill, and `max_len`, the longest context.
        """
        ...
