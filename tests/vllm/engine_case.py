"""Run one offline vLLM engine in a separate process: reads a case as JSON, writes what came out as JSON.

    python engine_case.py CASE.json RESULT.json

The case: {"engine": {arguments of vllm.LLM}, "rounds": [[{"ids": [...], "max_tokens": n}, ...], ...]}.
Each round is one generate call; the rounds follow each other, so a later one can hit the prefix cache.
A request's "transfer" are its KV transfer parameters. With "until" the engine stays until that file exists.
"""

import json
import sys
import time
from pathlib import Path


def main() -> None:
    case = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM, SamplingParams

    llm = LLM(**case["engine"])
    rounds = []
    for requests in case["rounds"]:
        outputs = llm.generate(
            [{"prompt_token_ids": request["ids"]} for request in requests],
            [
                SamplingParams(
                    temperature=0,
                    max_tokens=request["max_tokens"],
                    ignore_eos=True,
                    logprobs=1,
                    extra_args={"kv_transfer_params": request["transfer"]} if "transfer" in request else None,
                )
                for request in requests
            ],
            use_tqdm=False,
        )
        rounds.append([answer(output) for output in outputs])
    preemptions = sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")
    Path(sys.argv[2]).with_suffix(".part").write_text(json.dumps({"rounds": rounds, "preemptions": preemptions}))
    Path(sys.argv[2]).with_suffix(".part").rename(sys.argv[2])
    deadline = time.monotonic() + 300
    while case.get("until") and not Path(case["until"]).exists() and time.monotonic() < deadline:
        time.sleep(0.1)


def answer(output: object) -> dict:
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    return {
        "ids": list(output.prompt_token_ids),
        "tokens": tokens,
        "logprobs": [step[token].logprob for step, token in zip(completion.logprobs, tokens, strict=True)],
        "cached": output.num_cached_tokens or 0,
        "transfer": output.kv_transfer_params,
    }


if __name__ == "__main__":
    main()
