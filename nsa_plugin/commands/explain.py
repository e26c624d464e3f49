"""``nsa-plugin explain``: print the plan that `decide` makes for a batch described by flags, with its reasons."""

from __future__ import annotations

import argparse
from dataclasses import asdict, fields
from typing import Any

from nsa_plugin.backends.vllm.startup.model import is_portable
from nsa_plugin.commands.arguments import above_zero, given, natural, option, positive, switch
from nsa_plugin.commands.output import add_json, add_verbose, print_json
from nsa_plugin.commands.starts import in_use
from nsa_plugin.decision.case import count
from nsa_plugin.decision.constraints import SHARED_CONTEXT, UNCONSTRAINED, Constraints, steps_left_to_engine
from nsa_plugin.decision.dispatch import decide, partition
from nsa_plugin.decision.plan import Plan
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.errors import NoProviderError, SettingsError, ShapeError
from nsa_plugin.libraries.architectures import SHARED_MEMORY_PER_BLOCK, evidence
from nsa_plugin.libraries.devices import GIB, DeviceProfile, synthetic
from nsa_plugin.libraries.manifest import MANIFEST
from nsa_plugin.libraries.probe import probe
from nsa_plugin.settings import ResolvedSettings, Settings, resolve
from nsa_plugin.tools.terminal import console, table

EXAMPLES = """examples:
  a long prefill on eight H200s, 16 heads a rank, fp8 cache:
    nsa-plugin explain --model v3.2 --sm 90 --heads 16 --tp 8 --kv-dtype fp8 \\
        --phase extend --q-tokens 13000 --max-kv 65536
  a decode batch of 64 requests on this machine:
    nsa-plugin explain --phase decode --requests 64 --q-tokens 64 --max-kv 8192
  a mixed prefill, each request as query tokens:context, and how it is split:
    nsa-plugin explain --sm 90 --lengths 300:300,512:9000,800:800
  a smaller budget for logits, and FA3 not installed:
    nsa-plugin explain --sm 90 --libraries flash_mla,deep_gemm \\
        --logits-budget-mb 128 --q-tokens 4096 --max-kv 131072"""

# Settings that do not change the plan of a batch.
_NOT_ABOUT_BATCHES = ("enabled", "strict", "trace", "report", "split_prefill", "fault")

# The engines' spellings of --kv-cache-dtype. `auto` is the cache of most GPUs: bf16 for V3.2, fp8 for V4.
_KV_DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_ds_mla"), "fp8"),
    "auto": "auto",
}
# Other spellings of --model.
_SPELLINGS = {"glm-5": "glm", "glm5": "glm"}
# Models as they are printed.
_NAMES = {"v3.2": "V3.2", "glm": "GLM-5, attending as V3.2", "v4": "V4"}
_MOST_HEADS = 128  # of a rank, that a kernel supports
# Dimensions of the released models, where they differ from ModelShape's defaults; those of V4 are V4-Flash's.
FAMILY_DIMS: dict[str, dict[str, int]] = {
    "v3.2": {},
    "glm": {"num_heads": 64, "qk_nope_head_dim": 192, "v_head_dim": 256, "index_n_heads": 32},
    "v4": {"num_heads": 64, "qk_nope_head_dim": 448, "v_head_dim": 512, "index_topk": 512, "sliding_window": 128},
}


def _family(text: str) -> str:
    return _SPELLINGS.get(text.lower(), text.lower())


def _heads(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_HEADS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of heads a rank; allowed: 1 to {_MOST_HEADS}")
    return int(text)


def _sm(text: str) -> int:
    """A known SM version, or one older than every kernel, for which the decision says so."""
    sm = natural(text)
    if sm >= min(SHARED_MEMORY_PER_BLOCK) and sm not in SHARED_MEMORY_PER_BLOCK:
        known = ", ".join(map(str, SHARED_MEMORY_PER_BLOCK))
        raise argparse.ArgumentTypeError(f"{sm} is not a known SM version; allowed: {known}; 0 for a CPU")
    return sm


def _gigabytes(text: str) -> int:
    return int(above_zero(text, "GiB", 1e6) * GIB)


def _libraries(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in MANIFEST]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown library {', '.join(unknown)}; allowed: {', '.join(MANIFEST)}")
    return names


def _kv_dtype(text: str) -> str:
    """A KV cache dtype in any engine's spelling: "bf16", "fp8" or "auto"."""
    if text.lower() not in _KV_DTYPES:
        allowed = ", ".join(_KV_DTYPES)
        raise argparse.ArgumentTypeError(f"{text!r} is not a KV cache dtype of these models; allowed: {allowed}")
    return _KV_DTYPES[text.lower()]


def _lengths(text: str) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    for part in text.split(","):
        tokens, colon, context = part.strip().partition(":")
        if not (colon and tokens.isdecimal() and context.isdecimal()):
            raise argparse.ArgumentTypeError(f"{part!r} is not TOKENS:CONTEXT, two whole numbers")
        if (least := int(tokens)) > int(context):
            needed = f"{count(least, 'query token')} {'needs' if least == 1 else 'need'}"
            raise argparse.ArgumentTypeError(
                f"request {len(pairs)}: {needed} a context of at least {count(least, 'token')}, not {int(context)}"
            )
        pairs.append((int(tokens), int(context)))
    return pairs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"{EXAMPLES}\n\n{parser.epilog}"
    add_json(parser)
    add_verbose(parser, "what was tested for this GPU, and the parts of the plan that are off, with their reasons")
    model = parser.add_argument_group("model on one rank")
    model.add_argument(
        "--model",
        type=_family,
        choices=FAMILY_DIMS,
        default="v3.2",
        help="DeepSeek-V3.2's shape, GLM-5's (also: glm-5, glm5) or DeepSeek-V4-Flash's (default: %(default)s)",
    )
    option(model, "--heads N", _heads, f"query heads of a rank, 1 to {_MOST_HEADS} (default: the model's over --tp)")
    option(model, "--tp N", positive, "attention TP size (default: %(default)s)", 1)
    shared = "ranks that share each request's KV cache, with decode context parallelism (default: %(default)s)"
    option(model, "--dcp N", positive, shared, 1)
    dtypes = (
        "KV cache dtype in any engine's spelling: bf16, bfloat16; fp8, fp8_e4m3 or fp8_ds_mla for the family's fp8 "
        "layout; auto for bf16 with v3.2 and glm, and fp8 with v4, which has no other (default: %(default)s)"
    )
    option(model, "--kv-dtype DTYPE", _kv_dtype, dtypes, "auto")
    option(model, "--index-topk N", positive, "KV tokens that the indexer selects (default: the model's)")

    batch = parser.add_argument_group("batch")
    batch.add_argument(
        "--phase",
        choices=[str(p) for p in Phase],
        default=str(Phase.EXTEND),
        metavar="PHASE",
        help=f"phase of the batch: {', '.join(map(str, Phase))} (default: %(default)s)",
    )
    option(batch, "--requests N", positive, "requests (default: 1; for decode, one for each query token)")
    option(batch, "--q-tokens N", natural, "query tokens of all requests (default: --requests)")
    option(batch, "--max-kv N", natural, "longest context in tokens (default: --q-tokens)")
    option(batch, "--total-kv N", natural, "sum of the contexts in tokens (default: --max-kv for each request)")
    lengths = "query tokens and context of each request, instead of the four flags above; shows how the batch is split"
    option(batch, "--lengths TOKENS:CONTEXT,...", _lengths, lengths)
    switch(batch, "--cuda-graph", "the batch is captured in a CUDA graph")
    switch(batch, "--context-parallel", "the prefill is split over a context-parallel group")
    workspace = "most context tokens that dense attention may gather at once; 0: no limit (default: %(default)s)"
    option(batch, "--workspace-tokens N", natural, workspace, 0)

    device = parser.add_argument_group("device (default: this machine)")
    option(
        device,
        "--sm N",
        _sm,
        f"SM version of another device: {', '.join(map(str, SHARED_MEMORY_PER_BLOCK))}; 0 for a CPU",
    )
    libraries = f"kernel libraries of that device: {', '.join(MANIFEST)} (default: all)"
    option(device, "--libraries A,B", _libraries, libraries)
    option(device, "--memory-gb GIB", _gigabytes, "free memory of that device in GiB (default: 70.5)")

    settings = parser.add_argument_group(
        "settings (default: NSA_PLUGIN_* of the environment, then the plugin's defaults)"
    )
    for field in fields(Settings):
        if field.name not in _NOT_ABOUT_BATCHES:
            settings.add_argument(
                f"--{field.name.replace('_', '-')}",
                dest=f"setting_{field.name}",
                metavar="VALUE",
                help=f"{Settings.allowed(field.name)} (default: {field.default})".replace("%", "%%"),
            )


def _model(args: argparse.Namespace) -> ModelShape:
    dims = dict(FAMILY_DIMS[args.model])
    if args.index_topk:
        dims["index_topk"] = args.index_topk
    if args.heads:
        dims["num_heads"] = args.heads * args.tp
    heads = dims.get("num_heads", ModelShape.num_heads)
    if heads % args.tp:
        raise SettingsError(f"--tp is {args.tp}; allowed: what divides the {heads} heads of {args.model}")
    if args.tp % args.dcp:
        raise SettingsError(f"--dcp is {args.dcp}; allowed: what divides --tp, {args.tp}")
    v4 = args.model == "v4"
    if v4 and args.kv_dtype == "bf16":
        allowed = ", ".join(name for name, dtype in _KV_DTYPES.items() if dtype != "bf16")
        raise SettingsError(f"--kv-dtype is bf16, and DeepSeek-V4 has an fp8 cache only; allowed: {allowed}")
    fp8 = args.kv_dtype == "fp8" or (args.kv_dtype == "auto" and v4)
    layout = ("v4_fp8" if v4 else "v32_fp8") if fp8 else "bf16"
    return ModelShape(family="v4" if v4 else "v3.2", attn_tp_size=args.tp, dcp_size=args.dcp, kv_layout=layout, **dims)


def _batch(args: argparse.Namespace) -> BatchShape:
    if Phase(args.phase) is Phase.IDLE:
        if found := given(args, ("--requests", "--q-tokens", "--max-kv", "--total-kv")):
            raise ShapeError(f"an idle batch has no requests: leave out {', '.join(found)}")
        return BatchShape(phase=Phase.IDLE)
    decode = Phase(args.phase) is Phase.DECODE
    requests = args.requests or ((args.q_tokens or 1) if decode else 1)
    q_tokens = requests if args.q_tokens is None else args.q_tokens
    if decode and q_tokens not in (0, requests):
        raise ShapeError(
            f"a decode batch has one query token a request: --q-tokens is {q_tokens}, --requests {requests}"
        )
    if 0 < q_tokens < requests:
        raise ShapeError(f"each request has a query token at least: --q-tokens is {q_tokens}, --requests {requests}")
    max_kv = q_tokens if args.max_kv is None else args.max_kv
    total_kv = max_kv * requests if args.total_kv is None else args.total_kv
    if max_kv * requests < q_tokens:
        raise ShapeError(
            f"--max-kv {max_kv} for {count(requests, 'request')} allows fewer tokens than --q-tokens {q_tokens}"
        )
    # One request has the most, and the others their query tokens, of which each has one.
    least = max(q_tokens, max_kv + requests - 1) if q_tokens else max_kv
    if not least <= total_kv <= max_kv * requests:
        raise ShapeError(
            f"--total-kv is {total_kv}; allowed with --q-tokens {q_tokens}, --max-kv {max_kv} and "
            f"{count(requests, 'request')}: {least} to {max_kv * requests}"
        )
    return BatchShape(
        phase=Phase(args.phase),
        # As if all requests were alike.
        scored=q_tokens * total_kv // requests - q_tokens * max(0, q_tokens // requests - 1) // 2,
        num_requests=min(requests, q_tokens),
        num_tokens=q_tokens,
        max_kv_len=max_kv,
        total_kv_len=total_kv,
        has_prefix=total_kv > q_tokens,
        cuda_graph=args.cuda_graph,
        context_parallel=args.context_parallel,
        attention_workspace_tokens=args.workspace_tokens,
    )


def _device(args: argparse.Namespace) -> DeviceProfile:
    if args.sm is None:
        if args.libraries is not None or args.memory_gb is not None:
            raise SettingsError("--libraries and --memory-gb describe another device: give its --sm too")
        device = probe()
        if device.kind == "unknown":
            raise SettingsError(f"{device.name}; name one: --sm 90, for example")
        return device
    memory = {} if args.memory_gb is None else {"memory_free": args.memory_gb, "memory_total": args.memory_gb}
    return synthetic(args.sm, libraries=args.libraries, **memory)


def _settings(args: argparse.Namespace) -> ResolvedSettings:
    given = {name: value for name in Settings.names() if (value := getattr(args, f"setting_{name}", None)) is not None}
    return resolve(flags=given, flag_source="the command line")


def _parts(
    args: argparse.Namespace, model: ModelShape, device: DeviceProfile, settings: Settings
) -> list[tuple[tuple[int, ...] | None, BatchShape, Plan]]:
    """(requests, shape, plan) of each part of the batch; requests is None without --lengths."""
    constraints = Constraints(no_copy=SHARED_CONTEXT) if model.dcp_size > 1 else UNCONSTRAINED
    if args.lengths is None:
        batch = _batch(args)
        return [(None, batch, decide(model, batch, device, settings, constraints))]
    if any(getattr(args, name) is not None for name in ("requests", "q_tokens", "max_kv", "total_kv")):
        raise SettingsError("--lengths replaces --requests, --q-tokens, --max-kv and --total-kv: give one or the other")
    most = max((tokens for tokens, _ in args.lengths), default=0)
    if Phase(args.phase) is Phase.DECODE and most > 1:
        raise ShapeError(f"a decode batch has one query token a request: --lengths has one of {most}")
    if Phase(args.phase) is Phase.IDLE and most:
        raise ShapeError("an idle batch has no requests: leave out --lengths")
    parts = partition(
        model,
        [tokens for tokens, _ in args.lengths],
        [context for _, context in args.lengths],
        Phase(args.phase),
        device,
        settings,
        cuda_graph=args.cuda_graph,
        context_parallel=args.context_parallel,
        attention_workspace_tokens=args.workspace_tokens,
        constraints=constraints,
    )
    return [(part.requests, part.batch, part.plan) for part in parts]


def _plan_fields(plan: Plan) -> list[tuple[str, str, str]]:
    """(field, choice, reason) of each field; the indexer's fields follow its mode."""
    data = plan.as_dict()
    indexer = data.pop("indexer")
    reasons = data.pop("reasons")
    choices = {**data, "indexer": indexer.pop("mode"), **{f"indexer.{k}": v for k, v in indexer.items()}}
    return [(name, "-" if value == "" else str(value), reasons.get(name, "")) for name, value in choices.items()]


def _matters(name: str, choice: str, model: ModelShape) -> bool:
    """Whether a field is something that is done, not left out. Resharding needs several ranks."""
    if name == "token_shard":
        return model.attn_tp_size > 1
    return name != "phase" and choice not in ("False", "-", "0") and (name, choice) != ("token_shard_chunks", "1")


def _left_steps(model: ModelShape, phase: Phase, device: DeviceProfile, settings: Settings) -> list[str]:
    """What both adapters leave to their engine whatever the plan says, as a note; none elsewhere."""
    why = steps_left_to_engine(model.family, settings, portable=is_portable(device.sm))
    if not why or phase not in (Phase.DECODE, Phase.TARGET_VERIFY, Phase.DRAFT_EXTEND):
        return []
    return [f"{why}; the plan is what the plugin would do if decode_backend named its provider"]


def run(args: argparse.Namespace) -> int:
    model, resolved = _model(args), _settings(args)
    device = in_use(_device(args), resolved.settings)
    notes = [*resolved.notes, *_left_steps(model, Phase(args.phase), device, resolved.settings)]
    inputs: dict[str, Any] = {
        "model": asdict(model) | {"heads_per_rank": model.heads_per_rank},
        "device": device.as_dict(),
        "settings": asdict(resolved.settings),
        "sources": dict(resolved.sources),
        "notes": notes,
    }
    try:
        parts = _parts(args, model, device, resolved.settings)
    except NoProviderError as error:
        if args.json:
            print_json({**inputs, "error": str(error)})
        else:
            console().print(f"No route: {error}")
        return 1
    if args.json:
        routed = [
            {"requests": requests, "batch": asdict(batch), "plan": plan.as_dict()} for requests, batch, plan in parts
        ]
        print_json({**inputs, **(routed[0] if args.lengths is None else {"parts": routed})})
        return 0
    out = console()
    heads = f"{count(model.heads_per_rank, 'head')} a rank, {count(model.attn_tp_size, 'rank')}"
    if model.dcp_size > 1:
        heads += f", of which {model.dcp_size} share the KV cache and attend {model.attended_heads} heads"
    out.print(f"model:  {_NAMES[args.model]}, {heads}, {model.kv_layout} cache, index_topk {model.index_topk}")
    out.print(f"device: {device.describe()}")
    if args.verbose and (known := evidence(device.sm)):
        out.print(f"tested: {known}")
    for note in notes:
        out.print(f"note:   {note}")
    for requests, batch, plan in parts:
        which = ""
        if requests is not None:
            which = f"request{'s' * (len(requests) != 1)} {', '.join(map(str, requests))}: "
        size = f"{count(batch.num_tokens, 'query token')} over {count(batch.total_kv_len, 'context token')}"
        rows = [row for row in _plan_fields(plan) if args.verbose or _matters(row[0], row[1], model)]
        out.print(table(f"{which}{size}", "field", "choice", "why", rows=rows))
    if not args.verbose:
        out.print("-v adds what is off, with the reasons")
    return 0
