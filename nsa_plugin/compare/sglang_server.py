"""SGLang's server (0.5.11 and later): its command line, its /generate, and what the plugin leaves in its metrics.

Prompts are token ids and the server loads no tokenizer. SGLang's own ``python -m sglang.bench_serving`` cannot
measure such a server: it counts a token where an event has text, and these have none (0.5.12, `bench_serving.py`;
0.5.16, `benchmark/serving.py`, `async_request_sglang_generate`). With a tokenizer it would, but then its offline
data set, random-ids, draws from the tokenizer's few tokens in rows that repeat, and the prefix cache answers. So
`load` measures, by the same definitions.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any

from nsa_plugin.compare.engine import CompareError
from nsa_plugin.compare.measured import Answer

ENTRY_POINTS, PLUGIN = "sglang.srt.plugins", "nsa_plugin"
_COUNTER = re.compile(r"^sglang:nsa_plugin_batches_total\{(?P<labels>[^}]*)\} (?P<value>\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
# Flags that take no value, and the word that each gives a record's suite.
_SWITCHES = {
    "--disable-cuda-graph": "eager",
    "--disable-radix-cache": "noprefix",
    "--disable-overlap-schedule": "nooverlap",
    "--enable-two-batch-overlap": "tbo",
    "--enable-mixed-chunk": "mixed",
}


class SglangEngine:
    """See `engine.Engine`."""

    name = "sglang"
    generate_path = "/generate"
    flush_path = "/flush_cache"
    metrics_path = "/metrics"

    def version(self) -> str:
        try:
            version = metadata.version("sglang")
        except metadata.PackageNotFoundError:
            raise CompareError(f"SGLang is not installed in {sys.prefix}") from None
        if not metadata.entry_points(group=ENTRY_POINTS, name=PLUGIN):
            raise CompareError(
                f"SGLang would not find the plugin: no installed distribution has the entry point {PLUGIN} of "
                f"{ENTRY_POINTS}; install nsa-plugin into {sys.prefix}"
            )
        listed = os.environ.get("SGLANG_PLUGINS", "")
        if listed and PLUGIN not in (name.strip() for name in listed.split(",")):
            raise CompareError(f"SGLANG_PLUGINS is {listed!r}; it must list {PLUGIN}, or be unset")
        return version

    def command(self, model: Path, port: int, flags: Sequence[str], *, plugin: bool) -> list[str]:
        return [
            *(sys.executable, "-m", "sglang.launch_server"),
            *("--model-path", str(model)),
            *("--host", "127.0.0.1", "--port", str(port)),
            "--skip-tokenizer-init",
            # Without the library SGLang would not start; the plugin's trace in the log stands in for its counters.
            *(["--enable-metrics"] if util.find_spec("prometheus_client") else []),
            *("--random-seed", "1"),
            *flags,
            *(["--enable-nsa-plugin"] if plugin else []),
        ]

    def environ(self, *, plugin: bool) -> dict[str, str]:
        return {
            # Off is the kill switch: it wins over the plugin's flags, which both servers may be given.
            "NSA_PLUGIN_ENABLED": "1" if plugin else "0",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
        }

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
            # -1 is after the prompt.
            starts = [len(prompt) - prompt_logprobs if prompt_logprobs else -1 for prompt in prompts]
            body |= {"return_logprob": True, "top_logprobs_num": top, "logprob_start_len": starts}
        if len(prompts) == 1:
            body["input_ids"] = body["input_ids"][0]
            body |= {"logprob_start_len": body["logprob_start_len"][0]} if top else {}
        return body | ({"stream": True} if stream else {})

    def answers(self, data: Any) -> list[Answer]:
        try:
            return [self._answer(one) for one in (data if isinstance(data, list) else [data])]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise CompareError(
                f"SGLang's reply is not as expected ({type(error).__name__}: {error}): {str(data)[:300]}"
            ) from error

    @staticmethod
    def _answer(data: Mapping[str, Any]) -> Answer:
        meta = data["meta_info"]
        chosen = meta["output_token_logprobs"]
        reason = meta.get("finish_reason") or {}
        # The first of the prompt's positions has no log probability where the prompt begins there.
        prompt = [value for value, *_ in meta.get("input_token_logprobs") or () if value is not None]
        return Answer(
            token_ids=tuple(int(token) for _, token, *_ in chosen),
            logprobs=tuple(_number(value) for value, *_ in chosen),
            top=tuple(
                {int(token): _number(value) for value, token, *_ in best}
                for best in meta.get("output_top_logprobs") or ()
            ),
            prompt_logprobs=tuple(_number(value) for value in prompt),
            cached_tokens=int(meta.get("cached_tokens") or 0),
            error=str(reason.get("message", "aborted")) if reason.get("type") == "abort" else "",
        )

    def streamed(self, data: Mapping[str, Any]) -> int:
        if "error" in data:
            raise CompareError(f"SGLang answered with an error: {data['error']}")
        return int(data["meta_info"]["completion_tokens"])

    def routes(self, metrics: str) -> Counter[str]:
        counted: Counter[str] = Counter()
        for found in _COUNTER.finditer(metrics):
            labels = dict(_LABEL.findall(found["labels"]))
            counted["/".join(labels.get(name, "?") for name in ("phase", "attention", "provider"))] += int(
                float(found["value"])
            )
        return counted

    def facts(self, flags: Sequence[str]) -> dict[str, Any]:
        tp = int(_value(flags, "--tp", "--tp-size", "--tensor-parallel-size") or 1)
        dp = int(_value(flags, "--dp", "--dp-size", "--data-parallel-size") or 1)
        cache = _value(flags, "--kv-cache-dtype") or "auto"
        chunk = _value(flags, "--chunked-prefill-size")
        variant = [word for flag, word in _SWITCHES.items() if flag in flags]
        variant += ["mtp"] if _value(flags, "--speculative-algorithm", "--speculative-algo") else []
        variant += [f"chunk{chunk}"] if chunk else []
        return {
            "kv": "fp8" if cache.startswith("fp8") else "bf16",
            "tp": tp,
            "dp": dp,
            # Data-parallel attention leaves each rank the heads of tp / dp ranks.
            "attention_tp": max(1, tp // dp) if "--enable-dp-attention" in flags else tp,
            "prefix_cache": "--disable-radix-cache" not in flags,
            "variant": variant,
        }


def _number(value: float | None) -> float:
    """SGLang's JSON has null for what is no number. What is saved and read back must judge the same: five digits."""
    return math.nan if value is None else round(float(value), 5)


def _value(flags: Sequence[str], *names: str) -> str | None:
    """The last value that the flags give one of `names`, as "--name value" or "--name=value"."""
    found = None
    for position, flag in enumerate(flags):
        name, equals, value = flag.partition("=")
        if name in names:
            found = value if equals else (flags[position + 1] if position + 1 < len(flags) else None)
    return found
