"""Linear layers of a checkpoint in fp8 or INT4, and what config.json says of them.

fp8 has a scale for each 128 x 128 block of a weight, as in DeepSeek's checkpoints. INT4 has one for 128 values of a
row, in one of three formats: compressed-tensors (pack-quantized), GPTQ and AWQ. All three hold the same values.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FP8, INT4, GPTQ, AWQ = "fp8", "int4", "gptq", "awq"
QUANTIZATIONS = (FP8, INT4, GPTQ, AWQ)
OF_EXPERTS = (INT4, GPTQ, AWQ)
"""Those of the routed experts alone."""
# Rows and columns of a weight that share an fp8 scale.
BLOCK = 128
# Values of a row that share an INT4 scale.
GROUP = 128
_FP8_MAX = 448.0

# `quantization_config`s. Those of the routed experts alone name every other linear layer, as the engines do.
FP8_CONFIG: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "scale_fmt": "ue8m0",
}
INT4_EXPERTS_CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": GROUP,
                "dynamic": False,
            },
        }
    },
    "ignore": [
        "lm_head",
        r"re:.*self_attn.*",
        r"re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        r"re:.*eh_proj.*",
    ],
}
_OTHER_PARTS = (
    "self_attn",
    "shared_experts",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.gate_up_proj",
    "mlp.down_proj",
    "eh_proj",
)
GPTQ_EXPERTS_CONFIG: dict[str, Any] = {
    "quant_method": "gptq",
    "checkpoint_format": "gptq",
    "bits": 4,
    "group_size": GROUP,
    "sym": True,
    "desc_act": False,
    "lm_head": False,
    "dynamic": {f"-:.*{re.escape(part)}.*": {} for part in _OTHER_PARTS},
}
AWQ_EXPERTS_CONFIG: dict[str, Any] = {
    "quant_method": "awq",
    "version": "gemm",
    "bits": 4,
    "group_size": GROUP,
    "zero_point": True,
    "modules_to_not_convert": ["lm_head", *_OTHER_PARTS],
}
CONFIGS = {FP8: FP8_CONFIG, INT4: INT4_EXPERTS_CONFIG, GPTQ: GPTQ_EXPERTS_CONFIG, AWQ: AWQ_EXPERTS_CONFIG}

# Of INT4 values, which are stored with 8 added.
_ZERO = 8
# Which of eight values a word of AWQ holds at its lowest bits, at the next ones and so on.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def stored(weight: torch.Tensor, quantization: str) -> dict[str, torch.Tensor]:
    """The tensors that store a linear layer, by the last part of their names.

    Args:
        weight: [rows, columns], float32: outputs by inputs; what the format needs multiples of.
        quantization: one of `QUANTIZATIONS`.
    """
    import torch

    if quantization == FP8:
        codes, scale = fp8_blocks(weight)
        return {"weight": codes, "weight_scale_inv": scale}
    codes, scale = int4_codes(weight)
    if quantization == INT4:
        return {"weight_packed": words(codes), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
    # Both have inputs by outputs, and zero points of which every one is `_ZERO`. GPTQ's words hold neighbouring inputs,
    # AWQ's neighbouring outputs; GPTQ's zero points are stored less one.
    rows, columns = weight.shape
    zeros = torch.full((columns // GROUP, rows), _ZERO - (quantization == GPTQ), dtype=torch.uint8)
    scales = {"scales": scale.T.contiguous()}
    if quantization == GPTQ:
        group_of = torch.arange(columns, dtype=torch.int32) // GROUP
        return {"qweight": words(codes).T.contiguous(), "qzeros": words(zeros), **scales, "g_idx": group_of}
    return {"qweight": words(codes.T, _AWQ_ORDER), "qzeros": words(zeros, _AWQ_ORDER), **scales}


def fp8_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight's fp8 codes and its blocks' scales.

    Args:
        weight: [rows, columns], float32. The last blocks may be smaller than `BLOCK`.

    Returns:
        float8_e4m3fn [rows, columns], and float32 [ceil(rows / BLOCK), ceil(columns / BLOCK)].
    """
    import torch

    rows, columns = weight.shape
    whole = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = whole.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    # A power of two that leaves no element above fp8's largest: dividing by it is exact.
    least = blocks.abs().amax((1, 3)) / _FP8_MAX
    scale = torch.ldexp(torch.ones_like(least), torch.frexp(least).exponent)
    codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.reshape(whole.shape)[:rows, :columns].contiguous(), scale


def int4_codes(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight's INT4 values, each with 8 added, and its groups' scales.

    Args:
        weight: [rows, columns], float32; columns are a multiple of `GROUP`.

    Returns:
        uint8 [rows, columns], 1 to 15, and bfloat16 [rows, columns / GROUP].
    """
    import torch

    groups = weight.unflatten(1, (-1, GROUP))
    # The largest comes to 7, or 7.03 where bfloat16 rounds the scale down.
    scale = (groups.abs().amax(2) / 7).clamp_min(torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16)
    return ((groups / scale.float()[..., None]).round() + _ZERO).to(torch.uint8).flatten(1), scale


def words(codes: torch.Tensor, order: Sequence[int] = range(8)) -> torch.Tensor:
    """Eight neighbouring codes of a row in a word.

    Args:
        codes: [rows, columns], uint8 below 16; columns are a multiple of 8.
        order: of the eight, the one that a word holds at its lowest bits, at the next ones and so on.

    Returns:
        int32 [rows, columns / 8].
    """
    import torch

    eights = codes.unflatten(1, (-1, 8))[:, :, list(order)].flatten(1)
    return (eights[:, ::2] | eights[:, 1::2] << 4).contiguous().view(torch.int32)
