"""Linear layers of a checkpoint in fp8 or INT4, and what config.json says of them.

fp8 has a scale for each 128 x 128 block of a weight, as in DeepSeek's checkpoints. INT4 has one for 128 values of a
row, in the format of compressed-tensors (pack-quantized), for which both engines have a loader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FP8, INT4 = "fp8", "int4"
# Rows and columns of a weight that share an fp8 scale.
BLOCK = 128
# Values of a row that share an INT4 scale.
GROUP = 128
_FP8_MAX = 448.0

# `quantization_config`s. The second is of the routed experts alone: it names everything else in `ignore`.
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


def int4_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight's INT4 values, eight to a word, and its groups' scales.

    Args:
        weight: [rows, columns], float32; columns are a multiple of `GROUP`.

    Returns:
        int32 [rows, columns / 8], whose lowest bits have the first value plus 8, and bfloat16 [rows, columns / GROUP].
    """
    import torch

    groups = weight.unflatten(1, (-1, GROUP))
    # The largest comes to 7, or 7.03 where bfloat16 rounds the scale down.
    scale = (groups.abs().amax(2) / 7).clamp_min(torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16)
    codes = ((groups / scale.float()[..., None]).round() + 8).to(torch.uint8).flatten(1)
    return (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int32), scale
