"""The options of ``nsa-plugin compare``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from nsa_plugin.commands.arguments import option, positive, positives, seconds, switch
from nsa_plugin.tools.checkpoints.quantized import QUANTIZATIONS
from nsa_plugin.tools.compare.load import SPEED_CASES, USUAL_OUTPUT
from nsa_plugin.tools.compare.measured import CONTROL, PLUGIN, STOCK
from nsa_plugin.tools.compare.model import SPEC, SPEC_GLM, SPEC_V4
from nsa_plugin.tools.compare.runner import ROLES
from nsa_plugin.tools.compare.workload import AGREEMENT_CASES
from nsa_plugin.tools.serving.engine import FAMILIES, V32, ServedEngine
from nsa_plugin.tools.serving.sglang import SglangEngine
from nsa_plugin.tools.serving.vllm import VllmEngine

ENGINES: dict[str, Callable[[], ServedEngine]] = {"sglang": SglangEngine, "vllm": VllmEngine}
# The file that a run saves in the servers' log directory.
MEASURED = "measured.jsonl"
USUAL_CONTEXT = 32000
# Options that --measured would ignore. They have no default in the parser, so that one that was given is noticed.
MEASURING = (
    *(
        "--model",
        "--heads",
        "--family",
        "--layers",
        "--full-width",
        "--quantization",
        "--mtp",
        "--context",
        "--runs",
        "--case",
        "--speed",
    ),
    *("--prompt-lengths", "--output-tokens", "--stock-fails-at", "--together", "--budget", "--start-timeout"),
)
_USUAL = {"context": USUAL_CONTEXT, "budget": 1500.0, "start_timeout": 400.0}

EPILOG = f"""cases:
  agreement  {", ".join(AGREEMENT_CASES[:6])},
             {", ".join(AGREEMENT_CASES[6:])}
  speed      {", ".join(SPEED_CASES)}

examples:
  nsa-plugin compare sglang --heads 16 --json docs/benchmarks \\
      -- --kv-cache-dtype fp8_e4m3
  nsa-plugin compare sglang --heads 16 --together --speed \\
      --runs stock,plugin,control,stock-again \\
      -- --kv-cache-dtype fp8_e4m3 --max-total-tokens 262144 \\
         --mem-fraction-static 0.8
  nsa-plugin compare sglang --family v4 --speed --context 131072 \\
      --prompt-lengths 13000,30000,128000 --json docs/benchmarks \\
      -- --chunked-prefill-size 8192 --swa-full-tokens-ratio 0.5
  nsa-plugin compare sglang --family v4 --json docs/benchmarks \\
      --stock-fails-at 32768,131072,262144,393216 \\
      -- --chunked-prefill-size 32768 --mem-fraction-static 0.9
  nsa-plugin compare sglang --model /models/DeepSeek-V3.2 --speed -- --tp 8
  nsa-plugin compare vllm --heads 16 --together --speed \\
      --runs stock,plugin,control,stock-again \\
      -- --kv-cache-dtype fp8 --kv-cache-memory-bytes 4G \\
         --gpu-memory-utilization 0.2
  judge again without measuring:
  nsa-plugin compare sglang --measured work/logs/{MEASURED} \\
      --json docs/benchmarks
  SGLang's run had fp8_e4m3 and chunks of 8192 too:
  nsa-plugin compare vllm --heads 16 --logs work/vllm \\
      --beside work/sglang/{MEASURED} --json docs/benchmarks \\
      -- --kv-cache-dtype fp8 --max-num-batched-tokens 8192

Flags after -- go to every server. Servers run one after the other on the same
devices, each with all of the memory. Timed that way, even two runs of the same
server differ by far more than a few per cent. With --together all servers run
at the same time and are timed in turns. The flags after -- must then divide
the memory, because every server sizes itself as if it were alone:
  SGLang: limit each cache with --max-total-tokens. Keep --mem-fraction-static
    high (0.8): SGLang counts memory that other servers allocate while it
    starts.
  vLLM: set the cache's size with --kv-cache-memory-bytes, because vLLM counts
    the memory of the other servers too, and a small --gpu-memory-utilization
    (0.2), the share of the device that must be free when a server starts.

vLLM on a CPU has no stock sparse attention: compare vllm says so and ends 2.

Measurements are saved after every step, in LOGS/{MEASURED} and in the
record, so that an interrupted run keeps them.

Ends 0 only if the plugin's answers match stock's as closely as stock matches
itself, the plugin was seen to serve, and deliberately wrong answers (role
{CONTROL}) were noticed; with --beside, if the two engines match as well.
Ends 143 if it is terminated."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"{EPILOG}\n\n{parser.epilog}"
    parser.usage = "nsa-plugin compare ENGINE [options] [-- ENGINE_FLAG ...]"
    parser.add_argument("engine", choices=ENGINES, help="the engine to serve with: %(choices)s")
    model = parser.add_argument_group("model")
    given = model.add_mutually_exclusive_group()
    option(given, "--model DIR", Path, "a checkpoint with sparse attention")
    heads = f"({SPEC.num_attention_heads}, for v4 {SPEC_V4.num_attention_heads})"
    option(given, "--heads N", positive, f"query heads of a checkpoint with seeded random weights, made here {heads}")
    model.add_argument(
        "--family", choices=FAMILIES, help=f"the checkpoint's shape: DeepSeek-V3.2's, DeepSeek-V4's or GLM-5's ({V32})"
    )
    ratios = f"for v4 a number or their compress ratios ({','.join(map(str, SPEC_V4.compress_ratios))})"
    layers = f"its layers ({SPEC.num_hidden_layers}, for glm {SPEC_GLM.num_hidden_layers}); {ratios}"
    option(model, "--layers N", _layers, layers)
    width = "use the model's widths outside attention too, so that attention's share of a prefill is realistic"
    switch(model, "--full-width", f"{width} (v4 has them)")
    stored = (
        "weights in fp8 as in DeepSeek-V3.2's checkpoint, or routed experts in INT4 as compressed-tensors (int4), GPTQ "
        "or AWQ store them (bf16; v4 is always fp8)"
    )
    model.add_argument("--quantization", choices=QUANTIZATIONS, help=stored)
    switch(model, "--mtp", "add a multi-token prediction layer for speculative decoding")
    option(model, "--context TOKENS", positive, f"longest prompt ({USUAL_CONTEXT})")

    what = parser.add_argument_group("what to run")
    usual = f"({STOCK},{PLUGIN},{CONTROL}; {STOCK},{PLUGIN} without agreement cases)"
    option(what, "--runs ROLE,...", _roles, f"servers to run, in this order, from {', '.join(ROLES)} {usual}")
    what.add_argument(
        "--case",
        action="append",
        choices=(*AGREEMENT_CASES, *SPEED_CASES),
        metavar="NAME",
        help="run only this case; may be given more than once (all agreement cases)",
    )
    switch(what, "--speed", "also time the servers: the speed cases")
    alone = "prompt lengths of the timed single requests (2000,8192 and the context)"
    option(what, "--prompt-lengths TOKENS,...", positives, alone, [])
    decode = f"output tokens of each request of the case decode ({USUAL_OUTPUT})"
    option(what, "--output-tokens TOKENS", positive, decode)
    limit = (
        "send only prompts of these lengths, the shortest first, until stock fails; the check passes if stock fails "
        "and the plugin answers the same prompt"
    )
    option(what, "--stock-fails-at TOKENS,...", positives, limit)
    together = "start all servers at the same time and time them in turns; the flags after -- must divide the memory"
    switch(what, "--together", together)
    option(what, "--budget SECONDS", seconds, f"total time limit ({_USUAL['budget']:g})")
    start = f"limit for a server's start ({_USUAL['start_timeout']:g})"
    option(what, "--start-timeout SECONDS", seconds, start)
    earlier = "judge what an earlier run saved; run nothing (with --beside and the output options only)"
    option(what, "--measured FILE", Path, earlier)
    other = f"also compare the answers with another engine's: {MEASURED} of its run with the same checkpoint, "
    option(what, "--beside FILE", Path, f"{other}requests, KV cache and chunk")

    output = parser.add_argument_group("output")
    option(output, "--workdir DIR", Path, "for the checkpoint (%(default)s)", Path("compare-work"))
    option(output, "--logs DIR", Path, "directory for the servers' logs (WORKDIR/logs)")
    option(output, "--json DIR", Path, "write the record to DIR/<gpu>/")
    option(output, "--commit HASH", str, "commit for the record, where the source is in no checkout")


def fill_in(args: argparse.Namespace) -> None:
    """Set the defaults of the options that the user did not give."""
    for name, usual in _USUAL.items():
        if getattr(args, name) is None:
            setattr(args, name, usual)


def _layers(text: str) -> int | tuple[int, ...]:
    if "," not in text:
        return positive(text)
    numbers = text.split(",")
    if not all(number.isdecimal() for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of compress ratios")
    return tuple(map(int, numbers))


def _roles(text: str) -> list[str]:
    roles = [role.strip() for role in text.split(",")]
    for role in roles:
        if role not in ROLES:
            raise argparse.ArgumentTypeError(f"{role!r} is not a role; allowed: {', '.join(ROLES)}")
    if len(set(roles)) != len(roles):
        raise argparse.ArgumentTypeError(f"{text!r} lists a role twice")
    return roles
