"""The DeepSeek-V4 checkpoint: what a loader finds in it, and that it is the same everywhere."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nsa_plugin.tools.checkpoints.v4 import (
    BLOCK,
    V4CheckpointSpec,
    _quantized,
    compress_ratios,
    make_v4_weights,
    write_v4_checkpoint,
)

SPEC = V4CheckpointSpec(
    vocab_size=512,
    hidden_size=128,
    compress_ratios=(0, 4, 128),
    num_attention_heads=4,
    head_dim=256,
    q_lora_rank=128,
    o_lora_rank=128,
    o_groups=2,
    index_n_heads=2,
    n_routed_experts=3,
    num_experts_per_tok=2,
    moe_intermediate_size=128,
    num_nextn_predict_layers=1,
)
FP8, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32


def linear(name: str, rows: int, columns: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {f"{name}.weight": (FP8, (rows, columns)), f"{name}.scale": (F32, (rows // BLOCK, columns // BLOCK))}


def hyper_connection(name: str, mixed: int, scales: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {f"{name}_fn": (F32, (mixed, 512)), f"{name}_base": (F32, (mixed,)), f"{name}_scale": (F32, (scales,))}


def compressor(name: str, ratio: int, dim: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    dims = 2 * dim if ratio == 4 else dim
    return {
        f"{name}.ape": (F32, (ratio, dims)),
        f"{name}.wkv.weight": (BF16, (dims, 128)),
        f"{name}.wgate.weight": (BF16, (dims, 128)),
        f"{name}.norm.weight": (F32, (dim,)),
    }


def expected() -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Names, dtypes and shapes of `SPEC` as SGLang's `models/deepseek_v4.py` reads them."""
    found = {name: (BF16, (512, 128)) for name in ("embed.weight", "head.weight")}
    found |= {"norm.weight": (BF16, (128,)), **hyper_connection("hc_head", 4, 1)}
    for layer, ratio in (("layers.0", 0), ("layers.1", 4), ("layers.2", 128), ("mtp.0", 0)):
        attn, ffn = f"{layer}.attn", f"{layer}.ffn"
        found |= {f"{layer}.{norm}.weight": (BF16, (128,)) for norm in ("attn_norm", "ffn_norm", "attn.q_norm")}
        found |= {f"{attn}.kv_norm.weight": (BF16, (256,)), f"{attn}.attn_sink": (F32, (4,))}
        found |= linear(f"{attn}.wq_a", 128, 128) | linear(f"{attn}.wq_b", 4 * 256, 128)
        found |= linear(f"{attn}.wkv", 256, 128)
        found |= linear(f"{attn}.wo_a", 2 * 128, 4 * 256 // 2) | linear(f"{attn}.wo_b", 128, 2 * 128)
        if ratio:
            found |= compressor(f"{attn}.compressor", ratio, 256)
        if ratio == 4:
            found |= linear(f"{attn}.indexer.wq_b", 2 * 128, 128) | compressor(f"{attn}.indexer.compressor", 4, 128)
            found[f"{attn}.indexer.weights_proj.weight"] = (BF16, (2, 128))
        found |= {f"{ffn}.gate.weight": (BF16, (3, 128)), f"{ffn}.gate.bias": (F32, (3,))}
        for expert in ("experts.0", "experts.1", "experts.2", "shared_experts"):
            for part in ("w1", "w2", "w3"):
                found |= linear(f"{ffn}.{expert}.{part}", 128, 128)
        found |= hyper_connection(f"{layer}.hc_attn", 24, 3) | hyper_connection(f"{layer}.hc_ffn", 24, 3)
    found |= (
        linear("mtp.0.e_proj", 128, 128) | linear("mtp.0.h_proj", 128, 128) | hyper_connection("mtp.0.hc_head", 4, 1)
    )
    return found | {f"mtp.0.{norm}.weight": (BF16, (128,)) for norm in ("enorm", "hnorm", "norm")}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_v4_checkpoint(tmp_path_factory.mktemp("v4"), SPEC)


def test_names_dtypes_and_shapes(written: Path) -> None:
    found = {name: (one.dtype, tuple(one.shape)) for name, one in load_file(written / "model.safetensors").items()}
    assert found == expected()


def test_same_spec_gives_same_bytes_with_any_number_of_threads(written: Path, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(3 - min(threads, 2))
    try:
        again = write_v4_checkpoint(tmp_path, SPEC)
    finally:
        torch.set_num_threads(threads)
    names = sorted(path.name for path in written.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    for name in names:
        assert (again / name).read_bytes() == (written / name).read_bytes(), name


def test_another_seed_gives_other_weights_and_the_layer_for_speculation_changes_nothing_else() -> None:
    ours, other = make_v4_weights(SPEC), make_v4_weights(replace(SPEC, seed=1))
    plain = make_v4_weights(replace(SPEC, num_nextn_predict_layers=0))
    constant = {name for name in ours if name.endswith(("_scale", ".scale"))}
    assert not any(torch.equal(ours[name].float(), other[name].float()) for name in ours.keys() - constant)
    assert plain.keys() == {name for name in ours if not name.startswith("mtp.")}
    assert all(torch.equal(plain[name].float(), ours[name].float()) for name in plain)


def test_config(written: Path) -> None:
    config = json.loads((written / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["DeepseekV4ForCausalLM"], "deepseek_v4")
    assert (config["num_hidden_layers"], config["compress_ratios"]) == (3, [0, 4, 128, 0])
    assert (config["head_dim"], config["qk_rope_head_dim"], config["num_key_value_heads"]) == (256, 64, 1)
    assert (config["o_lora_rank"], config["o_groups"], config["sliding_window"]) == (128, 2, 128)
    assert (config["index_topk"], config["index_n_heads"], config["index_head_dim"]) == (512, 2, 128)
    assert config["quantization_config"]["weight_block_size"] == [BLOCK, BLOCK]
    assert config["num_nextn_predict_layers"] == 1
    assert replace(SPEC, num_nextn_predict_layers=0).config()["compress_ratios"] == [0, 4, 128]


def test_defaults_are_the_published_widths_with_all_compress_ratios() -> None:
    spec = V4CheckpointSpec()
    assert spec.compress_ratios == (0, 4, 128, 4, 0)
    assert (spec.hidden_size, spec.num_attention_heads, spec.head_dim, spec.group_width) == (4096, 64, 512, 4096)
    assert compress_ratios(2) == (0, 4)


def test_quantised_weights_are_near_their_own_and_scales_are_powers_of_two() -> None:
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 384)
    weight[:128, :128] = 0
    made = _quantized("x", weight)
    scale = made["x.scale"]
    assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))
    codes = made["x.weight"].float()
    assert codes.isfinite().all()
    back = codes * scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    largest = weight.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).abs().amax((1, 3))
    # Three bits of mantissa; below fp8's normal numbers steps of 2 ** -9, and the largest is at least 224 of them.
    least = (largest * 2.0**-9 / 224).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    assert ((back - weight).abs() <= torch.maximum(weight.abs() / 16, least)).all()


def test_the_indexer_scores_as_attention_does() -> None:
    """The indexer's queries and compressed keys are attention's last dimensions, the largest part of a query."""
    spec = replace(SPEC, num_attention_heads=2, head_dim=512, o_groups=1, compress_ratios=(4,), index_n_heads=4)
    made = make_v4_weights(spec)

    def weight(name: str) -> torch.Tensor:
        scale = made[f"layers.0.attn.{name}.scale"].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return made[f"layers.0.attn.{name}.weight"].float() * scale

    generator = torch.Generator().manual_seed(0)
    latent, keys = torch.randn(128, 64, generator=generator), torch.randn(512, 400, generator=generator)
    scores = (weight("wq_b").unflatten(0, (2, 512)) @ latent).mean(0).T @ keys
    queries = (weight("indexer.wq_b").unflatten(0, (4, 128)) @ latent).permute(2, 0, 1)
    sign = torch.tensor([1.0, -1, 1, -1])
    index_scores = ((queries @ keys[-128:]).relu() * sign[:, None]).sum(1)
    correlation = torch.corrcoef(torch.stack([scores.flatten(), index_scores.flatten()]))[0, 1]
    assert correlation > 0.85

    for part, dim in (("ape", 1), ("wkv.weight", 0), ("wgate.weight", 0)):
        theirs = made[f"layers.0.attn.compressor.{part}"].unflatten(dim, (2, 512)).narrow(dim + 1, 384, 128)
        ours = made[f"layers.0.attn.indexer.compressor.{part}"].unflatten(dim, (2, 128))
        assert torch.equal(ours, theirs)
    signs = made["layers.0.attn.indexer.weights_proj.weight"].float() @ _shared_direction(made)
    assert torch.equal(signs.sign(), sign)


def _shared_direction(made: dict[str, torch.Tensor]) -> torch.Tensor:
    """The part that all embeddings share, with about unit variance."""
    mean = made["embed.weight"].float().mean(0)
    return mean / mean.square().mean().sqrt()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compress_ratios": (0, 8)}, "compress_ratios has 8; allowed: 0, 4, 128"),
        ({"compress_ratios": ()}, "compress_ratios is empty"),
        ({"num_attention_heads": 3}, "num_attention_heads 3 does not divide among o_groups 2"),
        ({"hidden_size": 192}, "hidden_size is 192, which is no multiple of the 128"),
        ({"head_dim": 128, "index_head_dim": 256}, "index_head_dim 256 is more than head_dim 128"),
        ({"num_experts_per_tok": 4}, "num_experts_per_tok is 4 of 3 experts"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2; allowed: 0, 1"),
        ({"vocab_size": 100}, "vocab_size 100 is less than"),
    ],
)
def test_impossible_specs_are_named(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SPEC, **change)


def test_weights_are_of_the_size_that_keeps_activations() -> None:
    made = make_v4_weights(SPEC)
    wkv = made["layers.0.attn.wkv.weight"].float() * made["layers.0.attn.wkv.scale"].repeat_interleave(BLOCK, 0)
    assert wkv.std() * math.sqrt(SPEC.hidden_size) == pytest.approx(1, rel=0.05)
