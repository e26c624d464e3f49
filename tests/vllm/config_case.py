"""Asks vLLM for its configuration, case after case in one process, and writes what each was answered as JSON.

    python config_case.py CASES.json RESULTS.json

A case: {"arguments": {of EngineArgs}, "environ": {...}, "break": "too new" | "too old" | "target", "serve": bool}.
"break" makes this vLLM look like one that the plugin does not know. "serve" goes on to what a worker does before it
builds the model. The answer: {"error", "type", "chunked_prefill", "modules", "applied"}, after "serve" also what
/metrics shows.
"""

import functools
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

VERSIONS = {"too new": "0.99.0", "too old": "0.27.1"}


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    Path(sys.argv[2]).write_text(json.dumps([ask(EngineArgs, case) for case in cases]))


def ask(engine_args: type, case: dict) -> dict:
    from prometheus_client import generate_latest

    from nsa_plugin.backends.vllm.startup import activation

    with mock.patch.dict(os.environ, case.get("environ", {})), broken(case.get("break")):
        answer = {"error": "", "type": ""}
        try:
            config = engine_args(**case["arguments"]).create_engine_config()
            answer["chunked_prefill"] = config.scheduler_config.enable_chunked_prefill
            if case.get("serve"):
                answer["serves"] = activation.start_serving(config) is not None
                answer["metrics"] = generate_latest().decode()
        except Exception as error:
            answer |= {"error": str(error), "type": type(error).__name__}
    ledger = activation.process().ledger
    answer["applied"] = [name for name, status in ledger.statuses.items() if status.state == "applied"]
    answer["modules"] = sorted(name for name in sys.modules if name.startswith("nsa_plugin"))
    return answer


def broken(what: str | None) -> object:
    from nsa_plugin.backends.vllm.startup import activation

    if what in VERSIONS:
        import vllm

        # Read again from vLLM, as in a process that has just loaded the plugin.
        stack = ExitStack()
        stack.enter_context(mock.patch.object(vllm, "__version__", VERSIONS[what]))
        stack.enter_context(mock.patch.object(activation, "process", functools.cache(activation.process.__wrapped__)))
        return stack
    if what == "target":
        from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache

        def get_attn_backend(cache: object) -> None:
            """A changed signature, as a newer release may have."""

        return mock.patch.object(DeepseekV32IndexerCache, "get_attn_backend", get_attn_backend)
    return mock.patch.dict({})


if __name__ == "__main__":
    main()
