"""Hugging Face checkpoints: safetensors files, memory-mapped, to and from the parameter tree.

Tensors stay lazy until their names and shapes have been checked, and are then read one by one.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jax_ssm.models.config import ModelConfig, config_json, load_config
from jax_ssm.models.qwen3_5 import FLOAT32_PARAMS, Params, map_shapes, param_shapes
from jax_ssm.state import dtype as jnp_dtype

DTYPES = ("F32", "F16", "BF16")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PREFIXES = ("model.language_model.", "model.")
VISION = ("model.visual.", "visual.")


def open_safetensors(path: Path) -> dict:
    """{name: lazy tensor} of one file, memory-mapped: `get_shape()` reads the header, `[...]` the data.

    Raises ValueError for a truncated or foreign file, and for a tensor of an unsupported dtype.
    """
    try:
        file = safe_open(path, framework="np")
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or not a safetensors file: {error}") from error
    tensors = {name: file.get_slice(name) for name in file.keys()}
    for name, tensor in tensors.items():
        if tensor.get_dtype() not in DTYPES:
            raise ValueError(f"{path}: tensor {name} has dtype {tensor.get_dtype()}; supported are {DTYPES}")
    return tensors


def open_checkpoint(directory: str | Path) -> dict:
    """{name: lazy tensor} of all shards of a checkpoint directory, memory-mapped.

    Raises ValueError when there are no weights, or when the index names a file that does not exist.
    """
    root = Path(directory)
    if (root / INDEX).is_file():
        files = sorted(set(json.loads((root / INDEX).read_text())["weight_map"].values()))
    elif (root / SINGLE).is_file():
        files = [SINGLE]
    else:
        raise ValueError(f"{directory} has no weights: neither {SINGLE} nor {INDEX} is there")
    absent = [name for name in files if not (root / name).is_file()]
    if absent:
        raise ValueError(f"{root / INDEX} names shards that do not exist: {absent}")
    arrays = {}
    for name in files:
        arrays |= open_safetensors(root / name)
    return arrays


def weight_name(path: tuple) -> str:
    """Checkpoint name of a parameter, without the prefix of the model part: layers.0.mlp.up_proj.weight."""
    name = ".".join(map(str, path))
    return name if path[-1] in FLOAT32_PARAMS else name + ".weight"


def stored_shape(path: tuple, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape in the checkpoint: a depthwise convolution [C, kw] is stored as [C, 1, kw]."""
    return (shape[0], 1, shape[1]) if path[-1] == "conv1d" else shape


def bare_names(arrays: dict) -> dict:
    """Strip `model.` or `model.language_model.`; drop the vision tower, which a text model does not use."""
    bare = {}
    for name, array in arrays.items():
        if name.startswith(VISION):
            continue
        prefix = next((p for p in PREFIXES if name.startswith(p)), "")
        bare[name.removeprefix(prefix)] = array
    return bare


def params_from(arrays: dict, config: ModelConfig, dtype: str | None = None, where: str = "checkpoint") -> Params:
    """The parameter tree from {checkpoint name: lazy tensor}; see `load_params`."""
    bare, expected = bare_names(arrays), {}
    map_shapes(lambda path, shape: expected.update({weight_name(path): stored_shape(path, shape)}), param_shapes(config))
    unused = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if not config.mtp_num_hidden_layers:
        unused |= {name for name in bare if name.startswith("mtp.")}
    problems = [f"missing {name}" for name in expected if name not in bare]
    problems += [f"unexpected {name}" for name in bare if name not in expected and name not in unused]
    problems += [
        f"{name} has shape {tuple(bare[name].get_shape())}, expected {shape}"
        for name, shape in expected.items()
        if name in bare and tuple(bare[name].get_shape()) != shape
    ]
    if problems:
        raise ValueError(f"{where} does not fit its config.json ({len(problems)} problems): " + "; ".join(problems))
    target = jnp_dtype(dtype or config.dtype)

    def leaf(path, shape):
        kept = jnp.float32 if path[-1] in FLOAT32_PARAMS else target
        return jnp.array(bare[weight_name(path)][...].reshape(shape), kept)

    return map_shapes(leaf, param_shapes(config))


def load_params(directory: str | Path, config: ModelConfig, dtype: str | None = None) -> Params:
    """Parameters of a checkpoint directory, one file or many, as arrays in `dtype` ("fp32", "bf16"; None: as stored).

    The names may start with `model.` or `model.language_model.`; vision weights, and `mtp.*` or `lm_head` that the
    config does not use, are left out. Raises ValueError naming every missing, unexpected and mis-shaped tensor.
    """
    return params_from(open_checkpoint(directory), config, dtype, str(directory))


def load_model(directory: str | Path, dtype: str | None = None) -> tuple[ModelConfig, Params]:
    """Config and parameters. A checkpoint without any `mtp.*` tensor (some exporters drop them) loads without MTP head."""
    config, arrays = load_config(directory), open_checkpoint(directory)
    if not any(name.startswith("mtp.") for name in arrays):
        config = replace(config, mtp_num_hidden_layers=0)
    if dtype is not None:
        config = replace(config, dtype=dtype)
    return config, params_from(arrays, config, dtype, str(directory))


def save_params(directory: str | Path, config: ModelConfig, params: Params) -> None:
    """Write `config.json` and `model.safetensors` in the text-only layout (names `model.*`, `lm_head`, `mtp.*`)."""
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}

    def collect(path, shape):
        array = params
        for key in path:
            array = array[key]
        array = np.asarray(jax.device_get(array))
        if array.shape != shape:
            raise ValueError(f"params {weight_name(path)} has shape {array.shape}, expected {shape}")
        prefix = "" if path[0] in ("lm_head", "mtp") else "model."
        tensors[prefix + weight_name(path)] = array.reshape(stored_shape(path, shape))

    map_shapes(collect, param_shapes(config))
    save_file(tensors, root / SINGLE, metadata={"format": "pt"})
    stored = "bf16" if tensors["model.embed_tokens.weight"].dtype == ml_dtypes.bfloat16 else "fp32"
    (root / "config.json").write_text(json.dumps(config_json(replace(config, dtype=stored)), indent=2) + "\n")
