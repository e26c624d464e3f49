import fnmatch
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from nsa_plugin.tools.checkpoints.quantized import (
    AWQ_EXPERTS_CONFIG,
    BLOCK,
    GPTQ_EXPERTS_CONFIG,
    GROUP,
    INT4_EXPERTS_CONFIG,
    fp8_blocks,
    int4_codes,
    stored,
)
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


def some_weight(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns) * torch.logspace(-3, 3, rows)[:, None]


def test_int4_codes_are_near_the_weight() -> None:
    weight = some_weight(64, 3 * GROUP)
    codes, scale = int4_codes(weight)
    assert (scale.dtype, scale.shape) == (torch.bfloat16, (64, 3))
    assert (codes.dtype, int(codes.min()), int(codes.max())) == (torch.uint8, 1, 15)
    spread = scale.float().repeat_interleave(GROUP, 1)
    # Half of a step, and what rounding the scale to bfloat16 moves the largest value.
    assert (((codes.float() - 8) * spread - weight).abs() <= spread * (0.5 + 7 / 256)).all()


def test_compressed_tensors_reads_int4() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    weight = some_weight(64, 3 * GROUP)
    tensors, (codes, scale) = stored(weight, "int4"), int4_codes(weight)
    packed = tensors["weight_packed"]
    assert (packed.dtype, packed.shape) == (torch.int32, (64, 3 * GROUP // 8))
    values = helpers.unpack_from_int32(packed, 4, torch.Size(tensors["weight_shape"]))
    assert torch.equal(values + 8, codes)
    assert torch.equal(tensors["weight_scale"], scale)


@pytest.mark.engine_vllm
@pytest.mark.parametrize(("quantization", "zero"), [("gptq", 7), ("awq", 8)])
def test_vllm_packs_inputs_by_outputs_the_same(quantization: str, zero: int) -> None:
    from vllm.model_executor.layers.quantization.utils import quant_utils

    rows, columns = 64, 3 * GROUP
    weight = some_weight(rows, columns)
    tensors, (codes, scale) = stored(weight, quantization), int4_codes(weight)
    pack = getattr(quant_utils, f"{quantization}_pack")
    assert torch.equal(tensors["qweight"], pack(codes.T.int().contiguous(), 4, columns, rows))
    zeros = torch.full((3, rows), zero, dtype=torch.int32)
    assert torch.equal(tensors["qzeros"], quant_utils.pack_cols(zeros, 4, 3, rows))
    assert torch.equal(tensors["scales"], scale.T)
    if quantization == "gptq":
        assert torch.equal(tensors["g_idx"], torch.arange(3, dtype=torch.int32).repeat_interleave(GROUP))


def _expected(name: str, quantization: str) -> bool:
    """Whether the published checkpoints have this weight in fp8, or the routed experts in INT4."""
    if quantization != "fp8":
        return fnmatch.fnmatch(name, "*.mlp.experts.*_proj.weight")
    kept = ("norm.weight", "norm.bias", "e_score_correction_bias", "embed_tokens.weight", "head.weight")
    return not name.endswith((*kept, "mlp.gate.weight", "weights_proj.weight", "eh_proj.weight"))


TENSORS = {
    "fp8": {"weight": torch.float8_e4m3fn, "weight_scale_inv": torch.float32},
    "int4": {"weight_packed": torch.int32, "weight_scale": torch.bfloat16, "weight_shape": torch.int64},
    "gptq": {"qweight": torch.int32, "qzeros": torch.int32, "scales": torch.bfloat16, "g_idx": torch.int32},
    "awq": {"qweight": torch.int32, "qzeros": torch.int32, "scales": torch.bfloat16},
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
    method = "compressed-tensors" if quantization == "int4" else quantization
    assert config.pop("quantization_config")["quant_method"] == method
    assert config == spec.config()


def linear_modules() -> set[str]:
    """As the engines name them, those of fused projections among them."""
    fused = ("self_attn.fused_qkv_a_proj_with_mqa", "mlp.gate_up_proj", "mlp.shared_experts.gate_up_proj")
    modules = {name.removesuffix(".weight") for name in make_weights(SPEC) if name.endswith("_proj.weight")}
    return modules | {f"model.layers.1.{name}" for name in fused} | {"lm_head", "model.layers.1.mlp.experts"}


def check_left_out(is_left_out: Callable[[str], bool]) -> None:
    experts = {name for name in linear_modules() if ".mlp.experts" in name}
    assert len(experts) > 1
    assert {name for name in linear_modules() if not is_left_out(name)} == experts


def test_int4_ignores_all_but_the_routed_experts() -> None:
    ignored = INT4_EXPERTS_CONFIG["ignore"]
    patterns = [entry.removeprefix("re:") if entry.startswith("re:") else re.escape(entry) for entry in ignored]
    check_left_out(lambda name: any(re.match(pattern + "$", name) for pattern in patterns))


@pytest.mark.engine_vllm
def test_vllm_converts_none_but_the_routed_experts_of_gptq_and_awq() -> None:
    from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
    from vllm.model_executor.layers.quantization.utils.gptq_utils import get_dynamic_override
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    awq, gptq = AutoAWQConfig.from_config(AWQ_EXPERTS_CONFIG), AutoGPTQConfig.from_config(GPTQ_EXPERTS_CONFIG)
    fused = {"gate_up_proj": ["gate_proj", "up_proj"]}
    check_left_out(lambda name: is_layer_skipped(name, awq.modules_to_not_convert, fused, match_mode="substring"))
    # GPTQ converts lm_head if its config says so, and this one does not.
    assert gptq.lm_head_quantized is False
    check_left_out(lambda name: name == "lm_head" or get_dynamic_override(gptq, name) is False)
    assert (awq.zero_point, awq.group_size, gptq.desc_act, gptq.group_size) == (True, GROUP, False, GROUP)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization": "bitsandbytes"}, "quantization is 'bitsandbytes'; allowed: fp8, int4, gptq, awq, or none"),
        ({"quantization": "int4", "moe_intermediate_size": 64}, "multiples of the 128 values that share a scale"),
        ({"quantization": "fp8", "hidden_size": 192}, "multiples of the 128 values that share a scale"),
    ],
)
def test_impossible_quantisations_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(SPEC, **change)
