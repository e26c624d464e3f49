"""Check that a demo run took every execution path it is meant to show."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from nsa_plugin.tools.compare.demo.trace import RequestTrace
from nsa_plugin.tools.compare.verdict import Check
from nsa_plugin.tools.serving.requests import Answer, PromptRequest


def coverage(
    requests: Sequence[PromptRequest],
    answers: Mapping[str, Answer],
    trace: RequestTrace,
    *,
    chunk: int,
    preempted: int | None = None,
    compilation: str | None = None,
) -> list[Check]:
    """One check for each execution path.

    Args:
        chunk: most tokens of a batch.
        preempted: preemptions counted by the server; None: none are expected.
        compilation: vLLM's name of its compilation mode, "" if unknown; None: the server runs eager.
    """
    counts = trace.attention_counts()
    checks = [
        Check(name=name, holds=counts[attention] > 0, detail=f"{counts[attention]} request steps as {attention}")
        for name, attention in (
            ("dense attention for short prompts", "mha_one_shot"),
            ("sparse prefill", "sparse_prefill"),
            ("sparse decode", "sparse_decode"),
        )
    ]
    mixed = trace.mixed_batches
    checks.append(Check(name="prefill and decode in one batch", holds=mixed > 0, detail=f"{mixed} batches with both"))
    for request in requests:
        cached, prompt = answers[request.name].cached_tokens, len(request.prompt)
        if prompt - cached > 2 * chunk:
            chunks = trace.prefill_chunks(request.name)
            detail = f"{request.name}: {prompt - cached} prompt tokens in {chunks} batches of up to {chunk}"
            checks.append(Check(name="chunked prefill", holds=chunks >= 3, detail=detail))
        if request.cached_tokens:
            detail = f"{request.name}: {cached} of {prompt} prompt tokens cached"
            checks.append(Check(name="prefix cache", holds=cached >= request.cached_tokens, detail=detail))
    if preempted is not None:
        detail = f"requests were preempted {preempted} times"
        checks.append(Check(name="preemption", holds=preempted > 0, detail=detail))
    if compilation is not None:
        detail = f"the server's mode is {compilation or 'not in its log'}"
        checks.append(Check(name="torch.compile", holds=compilation not in ("", "NONE"), detail=detail))
    return checks


def compilation_mode(log: str) -> str:
    """vLLM's compilation mode as the engine logs it at its start, or ""."""
    found = re.search(r"compilation_config=\{'mode': <CompilationMode\.(\w+)", log)
    return found[1] if found else ""


def preemptions(metrics: str) -> int:
    values = re.findall(r"^vllm:num_preemptions_total(?:\{[^}]*\})? ([\d.e+]+)$", metrics, re.MULTILINE)
    return int(sum(map(float, values)))
