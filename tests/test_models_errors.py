"""Checkpoints that cannot be loaded: one clear message each, naming everything that is wrong, before anything is allocated."""

import json
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jax_ssm.models import ModelConfig, init_params, load_config, load_model, load_params, save_params
from jax_ssm.models.config import config_json, parse_config
from jax_ssm.models.tokenizer import load_tokenizer

CONFIG = ModelConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    layer_types=("linear_attention", "full_attention"),
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=4,
    rotary_dim=4,
    mtp_num_hidden_layers=1,
    eos_token_ids=(3, 5),
    bos_token_id=1,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoint")
    shapes = jax.eval_shape(lambda: init_params(CONFIG, jax.random.key(0)))
    save_params(root, CONFIG, jax.tree.map(lambda x: np.full(x.shape, 0.5, x.dtype), shapes))
    return root


@pytest.fixture
def directory(saved, tmp_path):
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def edit(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_config_round_trip_text_only_and_multimodal(directory):
    assert load_config(directory) == CONFIG
    text = config_json(CONFIG)
    del text["architectures"]
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    assert parse_config(outer) == CONFIG


def test_layer_types_follow_the_interval_when_they_are_not_listed():
    raw = config_json(CONFIG) | {"layer_types": None, "num_hidden_layers": 8, "full_attention_interval": 4}
    assert parse_config(raw).kinds == ("gdn", "gdn", "gdn", "full") * 2


def test_directory_without_config(tmp_path):
    with pytest.raises(ValueError, match=r"not a model directory: it has no config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load_config(tmp_path)


def test_unsupported_architecture_lists_the_supported_ones():
    with pytest.raises(ValueError, match="LlamaForCausalLM.*Qwen3_5ForCausalLM.*Qwen3_5ForConditionalGeneration"):
        parse_config(config_json(CONFIG) | {"architectures": ["LlamaForCausalLM"]})
    with pytest.raises(ValueError, match="architectures=.*not supported"):
        parse_config({"hidden_size": 3})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "attention_bias=True"),
        ({"attn_output_gate": False}, "attn_output_gate=False"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_type='yarn'"),
        ({"num_hidden_layers": 3}, "layer_types has 2 entries, num_hidden_layers=3"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types="),
        ({"layer_types": ["linear_attention", "sliding_attention"]}, "layer_types="),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"linear_num_value_heads": 3, "linear_num_key_heads": 2}, "q_heads=2"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers=2"),
    ],
)
def test_settings_that_the_model_does_not_implement_raise(change, message):
    with pytest.raises(ValueError, match=message):
        parse_config(config_json(CONFIG) | change)


def test_missing_config_entries_are_all_named():
    raw = config_json(CONFIG)
    del raw["hidden_size"], raw["linear_num_key_heads"]
    with pytest.raises(ValueError, match=r"missing entries \['hidden_size', 'linear_num_key_heads'\]"):
        parse_config(raw)


def test_every_wrong_weight_is_named_in_one_message(directory):
    def change(tensors):
        del tensors["model.layers.0.linear_attn.A_log"], tensors["mtp.fc.weight"]
        tensors["model.layers.9.mlp.up_proj.weight"] = np.zeros((1, 1), np.float32)
        tensors["model.norm.weight"] = np.zeros(15, np.float32)

    edit(directory, change)
    with pytest.raises(ValueError) as error:
        load_params(directory, CONFIG)
    for part in (
        "4 problems",
        "missing layers.0.linear_attn.A_log",
        "missing mtp.fc.weight",
        "unexpected layers.9.mlp.up_proj.weight",
        "norm.weight has shape (15,), expected (16,)",
    ):
        assert part in str(error.value)


def test_weights_that_a_text_model_does_not_use_are_left_out(directory):
    """Vision tower; `lm_head` of a tied model; MTP head of a config without one, and the other way round."""
    edit(directory, lambda t: t.update({"model.visual.blocks.0.weight": np.zeros(3, np.float32)}))
    assert "mtp" in load_model(directory)[1]
    tied = replace(CONFIG, tie_word_embeddings=True, mtp_num_hidden_layers=0)
    params = load_params(directory, tied)
    assert "lm_head" not in params and "mtp" not in params
    edit(directory, lambda t: [t.pop(name) for name in list(t) if name.startswith("mtp.")])
    config, params = load_model(directory)
    assert config.mtp_num_hidden_layers == 0 and "mtp" not in params
    with pytest.raises(ValueError, match="missing mtp.fc.weight"):
        load_params(directory, CONFIG)


def test_no_weights_and_missing_shards(directory):
    (directory / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no weights: neither model\.safetensors nor"):
        load_params(directory, CONFIG)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors", "lm_head.weight": "b.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"shards that do not exist: \['b\.safetensors', 'model-00001-of-00002"):
        load_params(directory, CONFIG)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_file(directory, keep):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated"):
        load_params(directory, CONFIG)


def test_foreign_file_and_unsupported_dtype(directory):
    path = directory / "model.safetensors"
    path.write_bytes((4).to_bytes(8, "little") + b"abcdefgh")
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_params(directory, CONFIG)
    header = json.dumps({"x": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ValueError, match="tensor x has dtype I64"):
        load_params(directory, CONFIG)


def test_missing_and_broken_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)


def test_save_refuses_a_tree_of_other_shapes(tmp_path):
    shapes = jax.eval_shape(lambda: init_params(CONFIG, jax.random.key(0)))
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    with pytest.raises(ValueError, match=r"norm\.weight has shape \(3,\), expected \(16,\)"):
        save_params(tmp_path, CONFIG, params | {"norm": np.zeros(3, np.float32)})
    assert not (tmp_path / "model.safetensors").exists()


def test_the_loader_and_the_model_need_no_torch(directory):
    code = (
        "import sys; from jax_ssm.models import load_model, hybrid; load_model(sys.argv[1]);"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(directory)], check=True)
