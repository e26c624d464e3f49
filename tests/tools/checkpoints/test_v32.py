import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from nsa_plugin.tools.checkpoints.common import TOKENIZER_SIZE
from nsa_plugin.tools.checkpoints.v32 import CheckpointSpec, make_weights, write_checkpoint

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def test_same_spec_gives_same_bytes(spec, checkpoint, tmp_path):
    again = write_checkpoint(tmp_path / "again", spec)
    assert sorted(path.name for path in again.iterdir()) == sorted(FILES)
    for name in FILES:
        assert (again / name).read_bytes() == (checkpoint / name).read_bytes(), name


def test_another_seed_gives_other_weights(spec):
    ours, other = make_weights(spec), make_weights(replace(spec, seed=1))
    assert ours.keys() == other.keys()
    assert not any(torch.equal(ours[name], other[name]) for name in ours)


def test_a_tensor_does_not_depend_on_the_others(spec):
    sparse, dense = make_weights(spec), make_weights(replace(spec, sparse=False))
    assert {name for name in sparse if name not in dense} == {name for name in sparse if ".indexer." in name}
    assert all(torch.equal(dense[name], sparse[name]) for name in dense)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stored_dtype(dtype, tmp_path):
    directory = write_checkpoint(tmp_path, CheckpointSpec(dtype=dtype, num_hidden_layers=2))
    weights = load_file(directory / "model.safetensors")
    biases = {name for name in weights if name.endswith("e_score_correction_bias")}
    assert biases
    assert all(weights[name].dtype == torch.float32 for name in biases)
    assert all(weights[name].dtype == getattr(torch, dtype) for name in weights.keys() - biases)
    assert json.loads((directory / "config.json").read_text())["torch_dtype"] == dtype


def test_architecture_follows_the_indexer(spec):
    sparse, dense = spec.config(), replace(spec, sparse=False).config()
    assert sparse["architectures"] == ["DeepseekV32ForCausalLM"]
    assert (sparse["index_topk"], sparse["index_n_heads"], sparse["index_head_dim"]) == (16, 32, 128)
    assert dense["architectures"] == ["DeepseekV3ForCausalLM"]
    assert not [key for key in dense if key.startswith("index_")]


GLM = {"glm": True, "rope_factor": 1.0, "num_hidden_layers": 4, "index_topk_pattern": "FSSF"}


def test_glms_config_is_what_transformers_reads():
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**CheckpointSpec(**GLM, num_nextn_predict_layers=1).config())
    assert type(config).__name__ == "GlmMoeDsaConfig"
    assert config.indexer_types == ["full", "shared", "shared", "full"]
    assert config.index_topk_pattern == "FSSF"
    assert config.indexer_rope_interleave is True
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}


def test_layers_that_share_a_selection_have_no_indexer_and_attend_alike():
    weights = make_weights(CheckpointSpec(**GLM, num_nextn_predict_layers=1))
    assert {name.split(".")[2] for name in weights if ".indexer." in name} == {"0", "3", "4"}, "4 is the MTP layer"

    def alike(one: int, other: int, part: str) -> float:
        names = [f"model.layers.{layer}.self_attn.{part}.weight" for layer in (one, other)]
        return float(torch.cosine_similarity(*(weights[name].float().flatten() for name in names), dim=0))

    for part in ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj"):
        assert alike(0, 1, part) > 0.9
        assert abs(alike(0, 3, part)) < 0.1


def test_defaults_hold_every_part_of_the_architecture():
    config = CheckpointSpec().config()
    assert 0 < config["first_k_dense_replace"] < config["num_hidden_layers"]
    assert config["kv_lora_rank"] + config["qk_rope_head_dim"] == 576
    assert config["n_group"] > config["topk_group"] > 0
    scaling = config["rope_scaling"]
    assert scaling["factor"] * scaling["original_max_position_embeddings"] == config["max_position_embeddings"]
    biases = [tensor for name, tensor in make_weights(CheckpointSpec()).items() if "e_score_correction" in name]
    assert biases
    assert all(tensor.abs().max() > 0 for tensor in biases)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float64"}, "dtype is 'float64'; allowed: float32, bfloat16"),
        ({"n_routed_experts": 10}, "n_routed_experts 10 must be n_group 4"),
        ({"n_routed_experts": 4}, "groups of at least 2"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than"),
        ({"vocab_size": 100}, "vocab_size 100 is less than"),
        ({"glm": True}, "a GLM-5 checkpoint has plain RoPE"),
        (GLM | {"index_topk_pattern": "FS"}, "index_topk_pattern is 'FS'; it has F or S for each of 4 layers"),
        (GLM | {"index_topk_pattern": "SFFF"}, "the first layer has no selection to reuse"),
        ({"index_topk_pattern": "FFFF"}, "for each of 4 layers of GLM-5"),
    ],
)
def test_impossible_specs_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        CheckpointSpec(**change)


def test_tokenizer_covers_the_vocabulary(checkpoint):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    assert len(tokenizer) == TOKENIZER_SIZE
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (509, 510, 511)
    text = "banana bread, 42 and 北京"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) < len(text.encode()), "the merges are used"
    assert tokenizer.decode(ids) == text
    assert all(isinstance(tokenizer.decode([token]), str) for token in range(TOKENIZER_SIZE))


def test_layer_for_speculative_decoding_is_added_and_changes_nothing_else(spec):
    plain, more = make_weights(spec), make_weights(replace(spec, num_nextn_predict_layers=1))
    prefix = f"model.layers.{spec.num_hidden_layers}."
    added = {name.removeprefix(prefix) for name in more if name not in plain}
    parts = {"eh_proj", "enorm", "hnorm", "shared_head.norm", "shared_head.head", "embed_tokens"}
    assert {f"{part}.weight" for part in parts} <= added
    assert {"self_attn.indexer.wk.weight", "mlp.experts.0.up_proj.weight", "self_attn.q_b_proj.weight"} <= added
    assert all(torch.equal(plain[name], more[name]) for name in plain)
    assert more[f"{prefix}eh_proj.weight"].shape == (spec.hidden_size, 2 * spec.hidden_size)
    assert replace(spec, num_nextn_predict_layers=1).config()["num_nextn_predict_layers"] == 1
    with pytest.raises(ValueError, match="num_nextn_predict_layers is 2; allowed: 0, 1"):
        replace(spec, num_nextn_predict_layers=2)
