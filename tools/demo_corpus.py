"""The demo model's text: source files of the Python standard library, a byte-level BPE made from them, and token arrays.

Nothing is downloaded and no text is shipped: every machine with CPython has the files. A file belongs to the held-out
part when the hash of its path says so, which makes the split the same on every machine and for every Python version.
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"  # ends every document; also bos and pad
HELD_OUT_ONE_IN = 40
# tables and broken-on-purpose files: not what Python source looks like
SKIPPED_PARTS = {"site-packages", "__pycache__", "encodings", "pydoc_data", "lib2to3", "turtledemo", "bin"}
SKIPPED_STARTS = ("bad_", "badsyntax", "test_codecmaps_", "test_codecencodings_", "_sysconfigdata")
LARGEST_FILE = 400_000


def stdlib_files(root: Path | None = None) -> dict[str, str]:
    """{relative path: text} of the library's *.py files under `root` (default: this interpreter's), sorted by path."""
    root = Path(root or sysconfig.get_paths()["stdlib"])
    texts = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED_PARTS & set(name.parts) or name.name.startswith(SKIPPED_STARTS):
            continue
        data = path.read_bytes()
        if not 200 < len(data) < LARGEST_FILE:
            continue
        try:
            texts[name.as_posix()] = data.decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
    if not texts:
        raise ValueError(f"stdlib={str(root)!r} holds no usable *.py file: name a directory with Python's library sources")
    return texts


def held_out(name: str) -> bool:
    """True for the files kept away from training: one in HELD_OUT_ONE_IN, by the hash of the relative path."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE: any text can be encoded, decoding is exact; id 0 is the document separator."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str], seed: int = 0) -> np.ndarray:
    """One uint16 [tokens] array: the documents in random order, each ended by the separator."""
    order = np.random.default_rng(seed).permutation(len(texts))
    end = tokenizer.token_to_id(END)
    encoded = tokenizer.encode_batch([texts[i] for i in order])
    return np.concatenate([np.asarray([*e.ids, end], np.uint16) for e in encoded])
