"""A checkpoint directory as something that can be run: config, parameters, tokenizer, end-of-text ids."""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jax_ssm.models import ModelConfig, load_config, load_params
from jax_ssm.models.tokenizer import load_tokenizer
from jax_ssm.models.weights import open_checkpoint

DEMO = Path(__file__).parent.parent / "models" / "demo"


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """tokenizer: a `tokenizers.Tokenizer`, or None when the directory has none (prompts are then lists of ids)."""

    config: ModelConfig
    params: Any
    tokenizer: Any
    eos: tuple[int, ...]
    name: str

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt, which may already be ids. ValueError for text without a tokenizer."""
        if not isinstance(prompt, str):
            try:
                return [operator.index(x) for x in prompt]
            except TypeError:
                raise ValueError(f"prompt={prompt!r} is not allowed: a text or a list of token ids") from None
        if self.tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer.json: give prompts as lists of token ids")
        return self.tokenizer.encode(prompt).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; without a tokenizer the ids themselves, separated by spaces."""
        return " ".join(map(str, ids)) if self.tokenizer is None else self.tokenizer.decode(list(ids))


def find(directory: str | Path | None) -> Path:
    """The checkpoint directory, None for the model that comes with the package. ValueError when it does not exist."""
    root = Path(DEMO if directory is None else directory)
    if not root.is_dir():
        raise ValueError(f"model={str(root)!r} is not a directory: give one with config.json and *.safetensors")
    return root


def read_config(root: Path) -> ModelConfig:
    """Config of a checkpoint, without its MTP head where the weights have none. Reads headers only, no weights."""
    config = load_config(root)
    has_mtp = any(name.startswith("mtp.") for name in open_checkpoint(root))
    return config if has_mtp else replace(config, mtp_num_hidden_layers=0)


def load(directory: str | Path | None, act_dtype: str) -> LoadedModel:
    """Load a checkpoint directory, None for the model that comes with the package; weights in act_dtype.

    Raises ValueError when something that it needs is missing or does not fit.
    """
    root = find(directory)
    config = read_config(root)
    params = load_params(root, config, act_dtype)
    tokenizer = load_tokenizer(root) if (root / "tokenizer.json").is_file() else None
    return LoadedModel(config, params, tokenizer, end_of_text(root, config), "demo" if directory is None else str(directory))


def end_of_text(root: Path, config: ModelConfig) -> tuple[int, ...]:
    """Ids that end a text: those of generation_config.json where it names any, else those of config.json."""
    path = root / "generation_config.json"
    ids = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    if ids is None:
        return config.eos_token_ids
    return tuple(ids) if isinstance(ids, list) else (ids,)
