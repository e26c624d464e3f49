"""SGLang's server (0.5.11 and later): its command line, its /generate, and the plugin's counters in its metrics.

Prompts are token ids and the server loads no tokenizer. ``python -m sglang.bench_serving`` cannot measure such a
server: it counts a token only if an event has text, and these events have none (0.5.12, `bench_serving.py`; 0.5.16,
`benchmark/serving.py`, `async_request_sglang_generate`). With a tokenizer it could, but its offline data set,
random-ids, repeats the tokenizer's few tokens, and the prefix cache answers. So `compare.load` measures, with the same
definitions.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import util
from pathlib import Path
from typing import Any

from nsa_plugin.tools.serving import common
from nsa_plugin.tools.serving.allow_list import SGLANG_PLUGINS
from nsa_plugin.tools.serving.common import flag_value, installed, number
from nsa_plugin.tools.serving.engine import CompareError
from nsa_plugin.tools.serving.requests import Answer

ENTRY_POINTS = "sglang.srt.plugins"
# Flags without a value, and the word that each adds to a record's suite.
_SWITCHES = {
    "--disable-cuda-graph": "eager",
    "--disable-radix-cache": "noprefix",
    "--disable-overlap-schedule": "nooverlap",
    "--enable-two-batch-overlap": "tbo",
    "--enable-mixed-chunk": "mixed",
}


class SglangEngine:
    """SGLang; see `engine.ServedEngine`."""

    name = "sglang"
    generate_path = "/generate"
    flush_path = "/flush_cache"
    metrics_path = "/metrics"

    def version(self) -> str:
        return installed("sglang", "SGLang", ENTRY_POINTS, SGLANG_PLUGINS)

    def command(self, model: Path, port: int, flags: Sequence[str], *, plugin: bool) -> list[str]:
        return [
            *(sys.executable, "-m", "sglang.launch_server"),
            *("--model-path", str(model)),
            *("--host", "127.0.0.1", "--port", str(port)),
            "--skip-tokenizer-init",
            # SGLang would not start without the library; the plugin's trace in the log replaces its counters.
            *(["--enable-metrics"] if util.find_spec("prometheus_client") else []),
            *("--random-seed", "1"),
            # Otherwise every event of a stream repeats all tokens so far, and reading them slows down long answers.
            "--incremental-streaming-output",
            *flags,
            *(["--enable-nsa-plugin"] if plugin else []),
        ]

    def environ(self, *, plugin: bool) -> dict[str, str]:
        return common.environ(plugin=plugin)

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
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        }
        if top:
            # -1 starts after the prompt.
            starts = [len(prompt) - prompt_logprobs if prompt_logprobs else -1 for prompt in prompts]
            body |= {"return_logprob": True, "top_logprobs_num": top, "logprob_start_len": starts}
        if len(prompts) == 1:
            body["input_ids"] = body["input_ids"][0]
            body |= {"logprob_start_len": body["logprob_start_len"][0]} if top else {}
        return body | ({"stream": True} if stream else {})

    def answers(self, data: Any) -> list[Answer]:
        with common.reading("SGLang", data):
            return [self._answer(one) for one in (data if isinstance(data, list) else [data])]

    @staticmethod
    def _answer(data: Mapping[str, Any]) -> Answer:
        meta = data["meta_info"]
        chosen = meta.get("output_token_logprobs")  # None if the request asked for no log probabilities
        reason = meta.get("finish_reason") or {}
        # A prompt's first token has no log probability.
        prompt = [value for value, *_ in meta.get("input_token_logprobs") or () if value is not None]
        return Answer(
            token_ids=tuple(map(int, data["output_ids"] if chosen is None else [token for _, token, *_ in chosen])),
            logprobs=tuple(number(value) for value, *_ in chosen or ()),
            top=_tops(meta.get("output_top_logprobs")),
            prompt_logprobs=tuple(number(value) for value in prompt),
            prompt_top=_tops(meta.get("input_top_logprobs")),
            cached_tokens=int(meta.get("cached_tokens") or 0),
            error=str(reason.get("message", "aborted")) if reason.get("type") == "abort" else "",
        )

    def streamed(self, data: Mapping[str, Any]) -> int:
        if "error" in data:
            raise CompareError(f"SGLang answered with an error: {data['error']}")
        return int(data["meta_info"]["completion_tokens"])

    def routes(self, metrics: str) -> Counter[str]:
        return common.routes(metrics, "sglang")

    def combined(self, metrics: str) -> Counter[str]:
        return common.combined(metrics, "sglang")

    def resharded(self, metrics: str) -> Counter[str]:
        return common.resharded(metrics, "sglang")

    def facts(self, flags: Sequence[str], family: str) -> dict[str, Any]:
        chunk = "--chunked-prefill-size"
        variant = [word for flag, word in _SWITCHES.items() if flag in flags]
        variant += ["mtp"] if flag_value(flags, "--speculative-algorithm", "--speculative-algo") else []
        variant += [f"chunk{given}"] if (given := flag_value(flags, chunk)) else []
        made = common.facts(
            flags,
            family,
            tp=("--tp", "--tp-size", "--tensor-parallel-size"),
            dp=("--dp", "--dp-size", "--data-parallel-size"),
            chunk=chunk,
            max_len="--context-length",
        )
        return made | {
            # With data-parallel attention each rank has the heads of tp / dp ranks.
            "attention_tp": max(1, made["tp"] // made["dp"]) if "--enable-dp-attention" in flags else made["tp"],
            "prefix_cache": "--disable-radix-cache" not in flags,
            "mixed_chunk": "--enable-mixed-chunk" in flags,
            "variant": variant,
        }


def _tops(listed: Sequence[Any] | None) -> tuple[dict[int, float], ...]:
    """{token: log probability} of each position; SGLang lists None for a prompt's first token, which is left out."""
    return tuple({int(token): number(value) for value, token, *_ in best} for best in listed or () if best)
