"""The model of a comparison: lengths that matter for its requests, and checkpoints made locally."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from nsa_plugin.tools.checkpoints.v4 import V4CheckpointSpec, compress_ratios, write_v4_checkpoint
from nsa_plugin.tools.checkpoints.v32 import CheckpointSpec, write_checkpoint
from nsa_plugin.tools.compare.lifecycle import Say
from nsa_plugin.tools.serving.engine import GLM, V4, V32, CompareError

Spec = CheckpointSpec | V4CheckpointSpec

# DeepSeek-V3.2's ranks and dimensions in attention, with the heads per rank on eight GPUs, and as few layers, experts
# and tokens as still show everything.
SPEC = CheckpointSpec(
    seed=2,
    dtype="bfloat16",
    vocab_size=4096,
    hidden_size=2048,
    intermediate_size=4096,
    moe_intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=16,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    v_head_dim=128,
    index_topk=2048,
    index_n_heads=64,
    rope_factor=40.0,
    rope_original_positions=4096,
)
# V3.2's widths outside attention too, for times to which they contribute. Few of its 256 experts, but as many per
# token.
FULL_WIDTH: dict[str, Any] = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
}
# GLM-5's ranks and dimensions in attention, and one layer in three that selects, as GLM-5.2 has them (IndexShare).
GLM_SHARES = "FSS"
SPEC_GLM = replace(
    SPEC,
    glm=True,
    num_hidden_layers=6,
    index_topk_pattern=GLM_SHARES * 2,
    q_lora_rank=2048,
    qk_nope_head_dim=192,
    v_head_dim=256,
    index_n_heads=32,
    n_group=1,
    topk_group=1,
    rope_theta=1000000.0,
    rope_factor=1.0,
    rope_original_positions=202752,
)
# GLM-5's widths outside attention.
GLM_FULL_WIDTH: dict[str, Any] = {
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
}
# DeepSeek-V4-Flash's widths and all of its heads, with as few layers, experts and tokens as still show everything.
SPEC_V4 = V4CheckpointSpec(seed=2)

# Compression ratio of the tokens that V4's indexer selects from.
_SELECTED_RATIO = 4
_SHOWN = (
    *("architectures", "num_hidden_layers", "hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_topk", "index_n_heads", "index_head_dim"),
    *("n_routed_experts", "num_experts_per_tok", "num_nextn_predict_layers", "vocab_size", "torch_dtype"),
)
# Of a `quantization_config`: the names of modules, which may be hundreds.
_MODULES = ("ignore", "modules_to_not_convert", "dynamic")
_SHOWN_MORE = {
    V4: ("head_dim", "o_lora_rank", "o_groups", "sliding_window", "compress_ratios"),
    GLM: ("index_topk_pattern",),
}


# Numbers without which a model has no sparse attention, or no prompts.
_COUNTS = ("num_attention_heads", "vocab_size", "index_topk")


def check(config: Any, path: Path) -> None:
    """Check that the content of a config.json at `path` has what a comparison reads.

    Raises:
        CompareError: it is of a model without sparse attention, or a value is not of its type.
    """
    if not isinstance(config, dict):
        raise CompareError(f"{path} is not a JSON object")
    for name in _COUNTS:
        if config.get(name) is None:
            raise CompareError(f"{path} has no {name}: compare needs a model with sparse attention")
    counts = {name: config[name] for name in _COUNTS}
    if (longest := config.get("max_position_embeddings")) is not None:
        counts["max_position_embeddings"] = longest
    if family_of(config) == V4:
        ratios = config["compress_ratios"]
        if not isinstance(ratios, list) or not all(type(ratio) is int for ratio in ratios):
            raise CompareError(f"{path}: compress_ratios is {json.dumps(ratios)}; allowed: a list of whole numbers")
        counts["sliding_window"] = config.get("sliding_window")
    for name, value in counts.items():
        if type(value) is not int or value < 1:
            raise CompareError(f"{path}: {name} is {json.dumps(value)}; allowed: a whole number of at least 1")


def family_of(config: Mapping[str, Any]) -> str:
    """`V4`, `GLM` or `V32`."""
    if "compress_ratios" in config:
        return V4
    return GLM if str(config.get("model_type", "")).startswith("glm") else V32


def selects_above(config: Mapping[str, Any]) -> int:
    """Tokens of the longest context that is attended to completely. V4's indexer selects tokens compressed 4 : 1."""
    return int(config["index_topk"]) * (_SELECTED_RATIO if family_of(config) == V4 else 1)


def edges(config: Mapping[str, Any]) -> list[int]:
    """More lengths in tokens at which V4's behaviour changes.

    The window's length; the first tokens compressed by each ratio; the first length at which not all of the compressed
    tokens are selected.
    """
    if family_of(config) != V4:
        return []
    ratios = {ratio for ratio in config["compress_ratios"] if ratio > _SELECTED_RATIO}
    return sorted({config["sliding_window"], *ratios, selects_above(config) + _SELECTED_RATIO})


# Query tokens of a prefill around which a kernel or a rule changes: the most that FlashMLA's scheduling kernel supports
# with its first layout of 4 * (5 * rows + 1) bytes in the 227 KiB of an H200's block (11622), the number above which
# SGLang uses another path and another scheduling kernel (11673), then whole chunks.
_ROW_EDGES = (11622, 11623, 11673, 11674, 16384, 32768)


def row_edges(config: Mapping[str, Any], chunk: int | None) -> list[int]:
    """Lengths in tokens of prompts whose prefills have a number of query tokens at which V4's path may change.

    Args:
        chunk: most tokens of a prefill; longer prompts would be split and are left out. None: unknown.

    Returns:
        Each is one prefill of that size. The last one, if the chunk is known, is a full chunk and one token more.
    """
    if family_of(config) != V4:
        return []
    return list(_ROW_EDGES) if chunk is None else [*(rows for rows in _ROW_EDGES if rows <= chunk), chunk + 1]


def shown(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a model's configuration that a record keeps."""
    names = _SHOWN + _SHOWN_MORE.get(family_of(config), ())
    shown = {name: config[name] for name in names if name in config}
    if stored := config.get("quantization_config"):
        shown["quantization_config"] = {name: value for name, value in stored.items() if name not in _MODULES}
    return shown


def spec_of(
    family: str,
    heads: int | None,
    layers: int | Sequence[int] | None,
    *,
    mtp: bool,
    full_width: bool = False,
    quantization: str | None = None,
) -> Spec:
    """The checkpoint to make.

    Args:
        heads, layers: None: as in `SPEC`, `SPEC_GLM` and `SPEC_V4`. For V4, layers may be the compress ratios.
        full_width: with `FULL_WIDTH` or `GLM_FULL_WIDTH`; not V4.
        quantization: of `QUANTIZATIONS`; not V4, which is in fp8.

    Raises:
        CompareError: there is no such checkpoint.
    """
    nextn = int(mtp)
    try:
        if family == V4:
            if full_width:
                raise CompareError(f"--full-width is not for --family {V4}, whose checkpoint has its model's widths")
            if quantization:
                raise CompareError(f"--quantization is not for --family {V4}, whose checkpoint is in fp8")
            ratios = compress_ratios(layers) if isinstance(layers, int) else layers or SPEC_V4.compress_ratios
            heads = heads or SPEC_V4.num_attention_heads
            return replace(
                SPEC_V4, compress_ratios=tuple(ratios), num_attention_heads=heads, num_nextn_predict_layers=nextn
            )
        if layers is not None and not isinstance(layers, int):
            raise CompareError(
                f"--layers is {','.join(map(str, layers))}; compress ratios are for --family {V4}, give a number"
            )
        spec, widths = (SPEC_GLM, GLM_FULL_WIDTH) if family == GLM else (SPEC, FULL_WIDTH)
        count = layers or spec.num_hidden_layers
        return replace(
            spec,
            **(widths if full_width else {}),
            num_hidden_layers=count,
            index_topk_pattern=(GLM_SHARES * count)[:count] if family == GLM else "",
            num_attention_heads=heads or spec.num_attention_heads,
            num_nextn_predict_layers=nextn,
            quantization=quantization or "",
        )
    except ValueError as error:
        raise CompareError(f"cannot make such a checkpoint: {error}") from error


def checkpoint_name(spec: Spec) -> str:
    """The name of the checkpoint's directory."""
    if isinstance(spec, V4CheckpointSpec):
        kind, layers = "v4", "-".join(map(str, spec.compress_ratios))
    else:
        kind, layers = "glm" if spec.glm else "v32", f"{spec.num_hidden_layers}layers"
        kind += "-full" if spec.hidden_size in (FULL_WIDTH["hidden_size"], GLM_FULL_WIDTH["hidden_size"]) else ""
        kind += f"-{spec.quantization}" if spec.quantization else ""
    return f"{kind}-{spec.num_attention_heads}heads-{layers}{'-mtp' if spec.num_nextn_predict_layers else ''}"


def make_checkpoint(spec: Spec, directory: Path, say: Say) -> None:
    """Write the checkpoint, unless a complete one of the same spec exists.

    Raises:
        CompareError: it cannot be written.
    """
    mark = directory / "spec.json"
    # The configuration too: it may change for a spec while the weights do not.
    wanted = json.dumps({"spec": asdict(spec), "config": spec.config()})
    if mark.is_file() and mark.read_text() == wanted:
        say(f"checkpoint: {directory} is there")
        return
    started = time.monotonic()
    say(f"checkpoint: writing {directory}")
    try:
        mark.unlink(missing_ok=True)
        if isinstance(spec, V4CheckpointSpec):
            write_v4_checkpoint(directory, spec)
        else:
            write_checkpoint(directory, spec)
        mark.write_text(wanted)  # last: it says that the rest is whole
    except OSError as error:
        raise CompareError(f"{directory} cannot be written: {error}") from error
    say(f"checkpoint: written in {time.monotonic() - started:.1f} s")


_ENDS = 1 << 20


def digest(directory: Path) -> str:
    """SHA-256 of a checkpoint: config.json, and each weight file's name, size, first MiB and last MiB.

    The first MiB has the tensors' names and shapes. Reading all weights would take too long.

    Raises:
        CompareError: it cannot be read.
    """
    found = hashlib.sha256()
    try:
        found.update((directory / "config.json").read_bytes())
        for path in sorted(directory.glob("*.safetensors")):
            size = path.stat().st_size
            found.update(f"\n{path.name} {size}\n".encode())
            with path.open("rb") as file:
                found.update(file.read(_ENDS))
                file.seek(max(0, size - _ENDS))
                found.update(file.read())
    except OSError as error:
        raise CompareError(f"the checkpoint {directory} cannot be read: {error}") from error
    return found.hexdigest()
