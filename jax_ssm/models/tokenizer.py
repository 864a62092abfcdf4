"""The checkpoint's tokenizer, from `tokenizer.json`."""

from __future__ import annotations

from pathlib import Path


def load_tokenizer(directory: str | Path):
    """`tokenizers.Tokenizer` of a checkpoint directory. Raises ValueError when tokenizer.json is absent or broken."""
    from tokenizers import Tokenizer

    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{directory} has no tokenizer.json: give prompts as token ids, or add the file")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} cannot be read: {error}") from error
