"""Hugging Face checkpoints: safetensors files, memory-mapped, to and from the parameter tree.

A safetensors file is an 8-byte little-endian header length, a JSON header {name: dtype, shape, data_offsets}, then the
data (https://github.com/huggingface/safetensors). It is read here directly because its numpy reader has no bfloat16.
"""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_ssm.models.config import ModelConfig, config_json, load_config
from jax_ssm.models.qwen3_5 import FLOAT32_PARAMS, Params, map_shapes, param_shapes
from jax_ssm.state import dtype as jnp_dtype

DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
NAMES = {np.dtype(value): name for name, value in DTYPES.items()}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PREFIXES = ("model.language_model.", "model.")
VISION = ("model.visual.", "visual.")


def open_safetensors(path: Path) -> dict[str, np.ndarray]:
    """{name: array} of one file, memory-mapped and read-only. Raises ValueError for a truncated or foreign file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or 8 + length > size:
            raise ValueError(f"{path} is truncated or not safetensors: header of {length} bytes, file of {size}")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path} is not a safetensors file: its header is not JSON") from error
    header.pop("__metadata__", None)
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if end > size:
        raise ValueError(f"{path} is truncated: its header describes {end} bytes, the file has {size}")
    data, arrays = np.memmap(path, np.uint8, "r"), {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{path}: tensor {name} has dtype {entry['dtype']}; supported are {sorted(DTYPES)}")
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        arrays[name] = data[start:stop].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return arrays


def open_checkpoint(directory: str | Path) -> dict[str, np.ndarray]:
    """{name: array} of all shards of a checkpoint directory, memory-mapped.

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
    arrays: dict[str, np.ndarray] = {}
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


def bare_names(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Strip `model.` or `model.language_model.`; drop the vision tower, which a text model does not use."""
    bare = {}
    for name, array in arrays.items():
        if name.startswith(VISION):
            continue
        prefix = next((p for p in PREFIXES if name.startswith(p)), "")
        bare[name.removeprefix(prefix)] = array
    return bare


def params_from(
    arrays: dict[str, np.ndarray], config: ModelConfig, dtype: str | None = None, where: str = "checkpoint"
) -> Params:
    """The parameter tree from {checkpoint name: array}; see `load_params`."""
    bare, expected = bare_names(arrays), {}
    map_shapes(lambda path, shape: expected.update({weight_name(path): stored_shape(path, shape)}), param_shapes(config))
    unused = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if not config.mtp_num_hidden_layers:
        unused |= {name for name in bare if name.startswith("mtp.")}
    problems = [f"missing {name}" for name in expected if name not in bare]
    problems += [f"unexpected {name}" for name in bare if name not in expected and name not in unused]
    problems += [
        f"{name} has shape {bare[name].shape}, expected {shape}"
        for name, shape in expected.items()
        if name in bare and bare[name].shape != shape
    ]
    if problems:
        raise ValueError(f"{where} does not fit its config.json ({len(problems)} problems): " + "; ".join(problems))
    target = jnp_dtype(dtype or config.dtype)

    def leaf(path, shape):
        kept = jnp.float32 if path[-1] in FLOAT32_PARAMS else target
        return jnp.array(bare[weight_name(path)].reshape(shape), kept)  # a copy: the file may go away

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
    write_safetensors(root / SINGLE, tensors)
    stored = "bf16" if tensors["model.embed_tokens.weight"].dtype == ml_dtypes.bfloat16 else "fp32"
    (root / "config.json").write_text(json.dumps(config_json(replace(config, dtype=stored)), indent=2) + "\n")


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write one safetensors file; the header is padded so that the data is 8-byte aligned."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, array in tensors.items():
        size = prod(array.shape) * array.dtype.itemsize
        header[name] = {"dtype": NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())
