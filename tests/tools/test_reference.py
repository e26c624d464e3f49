import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from nsa_plugin.tools import reference as reference_model
from nsa_plugin.tools.checkpoints.v32 import make_weights, write_checkpoint
from nsa_plugin.tools.reference import (
    ReferenceModel,
    quantize_fp8,
    yarn_frequencies,
    yarn_mscale,
)

YARN = {"factor": 40.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}


def model_of(spec, **config):
    return ReferenceModel({**spec.config(), **config}, make_weights(spec))


GLM = {
    "glm": True,
    "rope_factor": 1.0,
    "rope_original_positions": 2560,
    "v_head_dim": 128,
    "n_group": 1,
    "topk_group": 1,
}


@pytest.mark.parametrize(
    ("changed", "architecture"),
    [
        ({}, "DeepseekV32ForCausalLM"),
        ({"rope_mscale": 0.6}, "DeepseekV32ForCausalLM"),
        ({"sparse": False}, "DeepseekV3ForCausalLM"),
        ({"sparse": False, "rope_mscale": 0.6}, "DeepseekV3ForCausalLM"),
        (GLM, "GlmMoeDsaForCausalLM"),
        (GLM | {"index_topk_pattern": "FSF"}, "GlmMoeDsaForCausalLM"),
    ],
)
def test_agrees_with_transformers(spec, token_ids, tmp_path, changed, architecture):
    """transformers' model, written by others; it scores with unquantised keys and queries."""
    transformers = pytest.importorskip("transformers", minversion="5.19")
    directory = write_checkpoint(tmp_path, replace(spec, **changed))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert type(theirs).__name__ == architecture
    with torch.inference_mode():
        expected = theirs(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    ours = ReferenceModel.load(directory).run(token_ids, quantize_index=False)
    torch.testing.assert_close(ours.logprobs, expected, atol=2e-4, rtol=0)


def test_selecting_everything_is_dense_attention(spec, reference, token_ids):
    everything = model_of(spec, index_topk=len(token_ids)).run(token_ids)
    dense = model_of(replace(spec, sparse=False)).run(token_ids)
    torch.testing.assert_close(everything.logprobs, dense.logprobs, atol=1e-5, rtol=0)
    assert everything.index_margin.isinf().all()
    selected = reference.run(token_ids).logprobs
    difference = (selected - dense.logprobs).abs().amax(-1)
    assert difference[: spec.index_topk].max() < 1e-5
    assert (difference[spec.index_topk :] > 1e-3).float().mean() > 0.5


def test_attention_equals_its_absorbed_form(spec, reference, token_ids):
    """Attention as a serving kernel computes it: queries in the latent space against the cached latents."""
    config, weights, name = reference.config, reference._weights, "model.layers.1.self_attn"
    heads, nope, rank = config["num_attention_heads"], config["qk_nope_head_dim"], config["kv_lora_rank"]
    tokens, rope_dim = len(token_ids), config["qk_rope_head_dim"]
    generator = torch.Generator().manual_seed(0)
    normed = torch.randn(tokens, config["hidden_size"], generator=generator)
    q_latent = torch.randn(tokens, config["q_lora_rank"], generator=generator)
    rope = reference_model._RopeTable(config, tokens, torch.float32)
    topk_indices, _ = reference._select(f"{name}.indexer", normed, q_latent, rope, True, False)

    w_uk, w_uv = weights[f"{name}.kv_b_proj.weight"].view(heads, -1, rank).split([nope, config["v_head_dim"]], 1)
    q = (q_latent @ weights[f"{name}.q_b_proj.weight"].T).view(tokens, heads, -1)
    q = torch.cat([torch.einsum("thd,hdr->thr", q[..., :nope], w_uk), rope.rotate_interleaved(q[..., nope:])], -1)
    latent, k_rope = (normed @ weights[f"{name}.kv_a_proj_with_mqa.weight"].T).split([rank, rope_dim], -1)
    latent = torch.nn.functional.rms_norm(latent, (rank,), weights[f"{name}.kv_a_layernorm.weight"], eps=1e-6)
    cache = torch.cat([latent, rope.rotate_interleaved(k_rope[:, None])[:, 0]], -1)
    scale = (nope + rope_dim) ** -0.5 * (0.1 * math.log(40) + 1) ** 2
    output = torch.zeros(tokens, heads, config["v_head_dim"])
    for row in range(tokens):
        chosen = cache[topk_indices[row][topk_indices[row] >= 0]]
        attended = (q[row] @ chosen.T * scale).softmax(-1) @ chosen[:, :rank]
        output[row] = torch.einsum("hr,hvr->hv", attended, w_uv)
    expected = output.flatten(1) @ weights[f"{name}.o_proj.weight"].T

    actual = reference._attention(name, normed, q_latent, rope, topk_indices)
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


def test_yarn_frequencies_by_hand():
    """64 tokens at theta 10000: dimension 0 turns 10.2 times in the original context (between 32 and 1), and
    dimension 64 ln(64 / 2 pi) / (2 ln 10000) = 8.06, rounded up to 9, is where one turn is reached."""
    frequencies = yarn_frequencies(64, 10000.0, YARN).tolist()
    assert frequencies[0] == pytest.approx(1.0)
    assert frequencies[9] == pytest.approx(10000 ** (-18 / 64) / 40)
    assert frequencies[31] == pytest.approx(10000 ** (-62 / 64) / 40)
    plain = 10000 ** (-8 / 64)
    assert frequencies[4] == pytest.approx(plain * (5 / 9) + plain / 40 * (4 / 9))


def test_yarn_leaves_fast_dimensions_alone():
    """The published model: 4096 tokens; up to dimension floor(10.47) all turn more than 32 times."""
    scaling = {**YARN, "original_max_position_embeddings": 4096}
    frequencies, plain = yarn_frequencies(64, 10000.0, scaling), yarn_frequencies(64, 10000.0, None)
    assert torch.equal(frequencies[:11], plain[:11])
    assert (frequencies[11:] < plain[11:]).all()
    torch.testing.assert_close(frequencies[23:], plain[23:] / 40)


def test_yarn_temperature():
    assert yarn_mscale(1.0, 1.0) == 1.0
    assert yarn_mscale(40.0, 1.0) == pytest.approx(1.3688879)
    assert yarn_mscale(40.0, 0.0) == 1.0


def test_fp8_scales_are_powers_of_two():
    rows = torch.tensor([[448.0, 1.0], [449.0, 3.0], [0.0, 0.0], [3.5, -7.0]])
    quantized = quantize_fp8(rows)
    # 449 needs scale 2: 224.5 rounds to 224, and 1.5 is exact.
    torch.testing.assert_close(quantized, torch.tensor([[448.0, 1.0], [448.0, 3.0], [0.0, 0.0], [3.5, -7.0]]))
    noise = torch.randn(50, 128, generator=torch.Generator().manual_seed(1))
    once = quantize_fp8(noise)
    assert torch.equal(quantize_fp8(once), once)
    assert not torch.equal(once, noise)
    assert ((once - noise).abs() <= noise.abs() / 16 + noise.abs().amax(-1, keepdim=True) / 448 / 2).all()


def test_selection_is_causal_and_complete(spec, reference, token_ids):
    run = reference.run(token_ids)
    assert len(run.selected) == spec.num_hidden_layers
    for selected in run.selected:
        for row, indices in enumerate(selected.tolist()):
            chosen = [index for index in indices if index >= 0]
            assert len(set(chosen)) == len(chosen) == min(row + 1, spec.index_topk)
            assert max(chosen) <= row
    assert run.index_margin[:, : spec.index_topk].isinf().all()
    assert (run.index_margin[:, spec.index_topk :] >= 0).all()
    assert run.index_margin[:, spec.index_topk :].isfinite().all()


def test_indexer_scores_by_definition(reference, token_ids):
    """The selection of one row, from a loop over heads and keys."""
    config, weights, name = reference.config, reference._weights, "model.layers.0.self_attn"
    rope = reference_model._RopeTable(config, len(token_ids), torch.float32)
    embedded = weights["model.embed_tokens.weight"][token_ids]
    normed = reference._rms_norm("model.layers.0.input_layernorm", embedded)
    q_latent = reference._rms_norm(f"{name}.q_a_layernorm", normed @ weights[f"{name}.q_a_proj.weight"].T)
    heads, dim, rope_dim = config["index_n_heads"], config["index_head_dim"], config["qk_rope_head_dim"]
    row = 100

    def rotated(x, position):
        angles = position * yarn_frequencies(rope_dim, config["rope_theta"], config["rope_scaling"])
        first, second = x[: rope_dim // 2], x[rope_dim // 2 : rope_dim]
        turned = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
        return quantize_fp8(torch.cat([*turned, x[rope_dim:]]))

    keys = []
    for position in range(row + 1):
        key = weights[f"{name}.indexer.wk.weight"] @ normed[position]
        key = (key - key.mean()) / torch.sqrt(key.var(unbiased=False) + 1e-6)
        key = key * weights[f"{name}.indexer.k_norm.weight"] + weights[f"{name}.indexer.k_norm.bias"]
        keys.append(rotated(key, position))
    queries = (weights[f"{name}.indexer.wq_b.weight"] @ q_latent[row]).view(heads, dim)
    head_weights = weights[f"{name}.indexer.weights_proj.weight"] @ normed[row]
    scores = [
        sum(head_weights[head] * torch.relu(rotated(queries[head], row) @ key) for head in range(heads)) for key in keys
    ]
    expected = torch.stack(scores).topk(config["index_topk"]).indices
    actual, _ = reference._select(f"{name}.indexer", normed, q_latent, rope, True, False)
    assert set(actual[row].tolist()) == set(expected.tolist())


def test_routing_bias_steers_the_choice_but_not_the_weights(spec, reference):
    name = "model.layers.1.mlp"
    x = torch.randn(5, spec.hidden_size, generator=torch.Generator().manual_seed(2))
    # A bias above any score: groups 1 and 3 win, and in them experts 4, 5, 12 and 13.
    bias = torch.zeros(spec.n_routed_experts)
    bias[[4, 5, 12, 13]] = 10.0
    weights = {**reference._weights, f"{name}.gate.e_score_correction_bias": bias}
    actual, margin = ReferenceModel(reference.config, weights)._mixture_of_experts(name, x)

    gates = (x @ weights[f"{name}.gate.weight"].T).sigmoid()[:, [4, 5, 12, 13]]
    gates = gates / gates.sum(-1, keepdim=True) * spec.routed_scaling_factor
    expected = reference._mlp(f"{name}.shared_experts", x) + sum(
        gates[:, slot, None] * reference._mlp(f"{name}.experts.{expert}", x)
        for slot, expert in enumerate((4, 5, 12, 13))
    )
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert (margin > 8).all()


def test_rows_may_be_cut_anywhere(reference, token_ids, monkeypatch):
    whole = reference.run(token_ids)
    monkeypatch.setattr(reference_model, "_ROWS_PER_CHUNK", 7)
    cut = reference.run(token_ids)
    torch.testing.assert_close(cut.logprobs, whole.logprobs, atol=1e-4, rtol=0)


def test_later_tokens_do_not_change_earlier_rows(reference, token_ids):
    longer = reference.run(token_ids).logprobs
    shorter = reference.run(token_ids[:70]).logprobs
    torch.testing.assert_close(shorter, longer[:70], atol=1e-4, rtol=0)


def test_wrong_attention_changes_most_tokens(spec, reference, token_ids):
    """Attention decides: otherwise a comparison of tokens would say nothing about it."""
    right, wrong = reference.run(token_ids), reference.run(token_ids, broken=True)
    equal = right.logprobs.argmax(-1) == wrong.logprobs.argmax(-1)
    assert equal[: spec.index_topk].all()
    assert equal[spec.index_topk :].float().mean() < 0.5


def test_rounding_does_not_decide(spec, checkpoint, token_ids):
    """The same model in float64: what remains of float32's rounding is far below the demo's tolerance."""
    single = ReferenceModel.load(checkpoint).run(token_ids)
    double = ReferenceModel.load(checkpoint, torch.float64).run(token_ids)
    assert (single.logprobs - double.logprobs).abs().max() < 2e-4


def test_needs_neither_the_plugins_kernels_nor_an_engine():
    code = (
        "import sys, nsa_plugin.tools.reference\n"
        "forbidden = ('nsa_plugin.kernels', 'nsa_plugin.backends', 'vllm', 'sglang')\n"
        "sys.exit(', '.join(m for m in sys.modules if m.startswith(forbidden)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
