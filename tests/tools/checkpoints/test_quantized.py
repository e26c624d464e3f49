import fnmatch
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from nsa_plugin.tools.checkpoints.quantized import BLOCK, GROUP, INT4_EXPERTS_CONFIG, fp8_blocks, int4_groups
from nsa_plugin.tools.checkpoints.v32 import CheckpointSpec, make_weights

SPEC = CheckpointSpec(
    hidden_size=256, moe_intermediate_size=128, num_hidden_layers=2, n_routed_experts=8, num_nextn_predict_layers=1
)


@pytest.mark.parametrize("shape", [(BLOCK, BLOCK), (576, 256), (3, 130)], ids=str)
def test_fp8_blocks_are_near_the_weight(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]
    codes, scale = fp8_blocks(weight)
    assert (codes.dtype, codes.shape, scale.dtype) == (torch.float8_e4m3fn, weight.shape, torch.float32)
    assert scale.shape == tuple(-(-size // BLOCK) for size in shape)
    spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: shape[0], : shape[1]]
    # Four bits of a value, or the smallest step of fp8's subnormals.
    assert ((codes.float() * spread - weight).abs() <= weight.abs() / 16 + spread * 2**-10).all()
    assert (torch.frexp(scale).mantissa == 0.5).all(), "powers of two"


def test_int4_groups_are_what_compressed_tensors_reads() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    weight = torch.randn(64, 3 * GROUP) * torch.logspace(-3, 3, 64)[:, None]
    words, scale = int4_groups(weight)
    assert (words.dtype, words.shape) == (torch.int32, (64, 3 * GROUP // 8))
    assert (scale.dtype, scale.shape) == (torch.bfloat16, (64, 3))
    values = helpers.unpack_from_int32(words, 4, torch.Size(weight.shape))
    assert (int(values.min()), int(values.max())) == (-7, 7)
    spread = scale.float().repeat_interleave(GROUP, 1)
    # Half of a step, and what rounding the scale to bfloat16 moves the largest value.
    assert ((values * spread - weight).abs() <= spread * (0.5 + 7 / 256)).all()


def _expected(name: str, quantization: str) -> bool:
    """Whether the published checkpoints have this weight in fp8, or the routed experts in INT4."""
    if quantization == "int4":
        return fnmatch.fnmatch(name, "*.mlp.experts.*_proj.weight")
    kept = ("norm.weight", "norm.bias", "e_score_correction_bias", "embed_tokens.weight", "head.weight")
    return not name.endswith((*kept, "mlp.gate.weight", "weights_proj.weight", "eh_proj.weight"))


TENSORS = {
    "fp8": {"weight": torch.float8_e4m3fn, "weight_scale_inv": torch.float32},
    "int4": {"weight_packed": torch.int32, "weight_scale": torch.bfloat16, "weight_shape": torch.int64},
}


@pytest.mark.parametrize("quantization", TENSORS)
@pytest.mark.parametrize("glm", [False, True], ids=["v3.2", "glm"])
def test_what_is_quantised_and_the_rest_is_unchanged(quantization: str, glm: bool) -> None:
    spec = replace(SPEC, glm=glm, rope_factor=1.0) if glm else SPEC
    plain, quantised = make_weights(spec), make_weights(replace(spec, quantization=quantization))
    expected: dict[str, Any] = {}
    for name, tensor in plain.items():
        if _expected(name, quantization):
            expected |= {name.removesuffix("weight") + part: dtype for part, dtype in TENSORS[quantization].items()}
        else:
            expected[name] = tensor.dtype
            assert torch.equal(quantised[name], tensor), name
    assert {name: tensor.dtype for name, tensor in quantised.items()} == expected
    assert set(expected.values()) > set(TENSORS[quantization].values())
    config = replace(spec, quantization=quantization).config()
    method = {"fp8": "fp8", "int4": "compressed-tensors"}[quantization]
    assert config.pop("quantization_config")["quant_method"] == method
    assert config == spec.config()


def test_int4s_ignored_modules_are_all_but_the_routed_experts() -> None:
    """Of the linear layers as the engines name them, those of fused projections among them."""
    ignored = INT4_EXPERTS_CONFIG["ignore"]

    def is_ignored(name: str) -> bool:
        patterns = [entry.removeprefix("re:") if entry.startswith("re:") else re.escape(entry) for entry in ignored]
        return any(re.match(pattern + "$", name) for pattern in patterns)

    fused = ("self_attn.fused_qkv_a_proj_with_mqa", "mlp.gate_up_proj", "mlp.shared_experts.gate_up_proj")
    modules = {name.removesuffix(".weight") for name in make_weights(SPEC) if name.endswith("_proj.weight")}
    modules |= {f"model.layers.1.{name}" for name in fused} | {"lm_head"}
    experts = {name for name in modules if ".mlp.experts." in name}
    assert experts
    assert {name for name in modules if not is_ignored(name)} == experts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization": "awq"}, "quantization is 'awq'; allowed: fp8, int4, or none"),
        ({"quantization": "int4", "moe_intermediate_size": 64}, "multiples of the 128 values that share a scale"),
        ({"quantization": "fp8", "hidden_size": 192}, "multiples of the 128 values that share a scale"),
    ],
)
def test_impossible_quantisations_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(SPEC, **change)
