"""Do native, compact and replay write the same greedy text? Prompts x modes x widths; where bf16 differs, by what gap.

Every run is compared with plain native decode of the same dtype. With fp32 activations and state any difference is a
failure. With bf16 activations a first difference is looked at: both candidate tokens get their logits from one teacher-
forced pass over the common prefix, and the gap between them is reported.
"""

from __future__ import annotations

import argparse

import numpy as np

from benchmarks import record

PROMPTS = (
    "def read_config(path):\n", "class Node:\n    def __init__(self, value):\n", "import os\nimport sys\n\n",
    "for name in names:\n    if name.", "try:\n    import ", "def __repr__(self):\n    return ", "# Copyright",
    "    def test_", "with open(filename) as f:\n", "return [x for x in ", "raise ValueError(", "def main():\n    parser = ",
    "async def run(", "while True:\n    line = ", "@property\ndef ", "class Error(Exception):\n", "if __name__ == ",
    "from collections import ", "def _check(self, key):\n    ", "self._lock = threading.",
)  # fmt: skip
RUNS = (("native", 1), ("replay", 1), *((mode, w) for w in (2, 4, 8) for mode in ("native", "compact", "replay")))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command-line options."""
    parser.add_argument("--model", help="checkpoint directory (default: the demo model)")
    parser.add_argument(
        "--prompts",
        type=int,
        choices=range(1, len(PROMPTS) + 1),
        metavar="N",
        default=len(PROMPTS),
        help="how many of the 20 prompts (default: all)",
    )
    parser.add_argument("--tokens", type=record.at_least(1), default=256, help="new tokens a prompt (default: 256)")
    every = [f"{mode}:{width}" for mode, width in RUNS]
    parser.add_argument(
        "--runs",
        nargs="+",
        choices=every,
        default=every,
        metavar="MODE:W",
        help="which runs; plain native always runs (default: all)",
    )
    parser.add_argument("--implementation", default="auto", help="backend of the linear layers (default: auto)")
    parser.add_argument("--act", choices=("fp32", "bf16"), nargs="+", default=["fp32", "bf16"], help="activation dtypes")


def run(args: argparse.Namespace) -> dict:
    """Generate, compare, report; `ok` is False when fp32 runs differ or a bf16 gap exceeds 0.05."""
    from jax_ssm.engine import Generator, load

    prompts = list(PROMPTS[: args.prompts])
    cells, ok = [], True
    for act in args.act:
        model, reference = load(args.model, act), None
        for mode, width in (run for run in RUNS if run == RUNS[0] or f"{run[0]}:{run[1]}" in args.runs):
            record.say(f"{act} {mode} W={width}")
            generator = Generator(
                model, mode=mode, width=width, act_dtype=act, max_requests=len(prompts), implementation=args.implementation
            )
            made = generator.generate(prompts, max_new_tokens=args.tokens, ignore_eos=True)
            tokens = [result["token_ids"] for result in made["results"]]
            if reference is None:
                reference, ids = tokens, [result["prompt_ids"] for result in made["results"]]
            splits = [
                split(model, ids[i] + a, ids[i] + b) for i, (a, b) in enumerate(zip(reference, tokens, strict=True)) if a != b
            ]
            worst = max((s["gap"] for s in splits), default=0.0)
            ok &= not splits if act == "fp32" else worst <= 0.05
            cells.append(
                {
                    "act": act,
                    "ssm": "fp32",
                    "mode": mode,
                    "width": width,
                    "prompts": len(prompts),
                    "tokens": sum(map(len, tokens)),
                    "differing_prompts": len(splits),
                    "largest_gap": worst,
                    "splits": splits,
                    "mean_accepted": made["timings"]["mean_accepted"],
                    "decode_tokens_per_s": made["timings"]["decode_tokens_per_s"],
                    "state_bytes": made["state_bytes"],
                    "compilations": made["compilations"]["total"],
                }
            )
    return {"ok": bool(ok), "implementation": args.implementation, "tokens_per_prompt": args.tokens, "cells": cells}


def split(model, a: list[int], b: list[int]) -> dict:
    """Where two sequences of one prompt part, and the gap between the logits of the two tokens there."""
    import jax.numpy as jnp

    from jax_ssm.models.qwen3_5 import forward_sequence

    at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    padded = np.zeros(1 << (max(len(a), len(b)) - 1).bit_length(), np.int32)  # one shape, so one compilation
    padded[:at] = a[:at]
    logits = forward_sequence(model.config, model.params, jnp.asarray(padded[None]))[1][0, at - 1]
    return {"position": at, "tokens": [a[at], b[at]], "gap": float(abs(logits[a[at]] - logits[b[at]]))}


def table(data: dict) -> tuple[list[str], list[list[str]]]:
    """Column heads and rows for a person."""
    heads = ["act", "mode", "W", "prompts", "tokens", "prompts that differ", "largest gap", "accepted/round", "compilations"]
    rows = [
        [c["act"], c["mode"], str(c["width"]), str(c["prompts"]), str(c["tokens"]), str(c["differing_prompts"]),
         f"{c['largest_gap']:.4f}", f"{c['mean_accepted'] or 0:.2f}", str(c["compilations"])]
        for c in data["cells"]
    ]  # fmt: skip
    return heads, rows


def brief(data: dict) -> tuple[list[str], list[list[str]]]:
    """Column heads and rows for a document: the widths of one dtype and mode together."""
    groups: dict[tuple, list[dict]] = {}
    for c in data["cells"]:
        groups.setdefault((c["act"], c["mode"]), []).append(c)
    rows = []
    for key, cells in groups.items():
        several = lambda name, form="", cells=cells: ", ".join(format(c[name] or 0, form) for c in cells)  # noqa: E731
        gap = f"{max(c['largest_gap'] for c in cells):.4f}"
        accepted, compiled = several("mean_accepted", ".2f"), str(max(c["compilations"] for c in cells))
        rows.append([*key, several("width"), str(cells[0]["prompts"]), several("differing_prompts"), gap, accepted, compiled])
    return ["act", "mode", "W", "prompts", "that differ", "largest gap", "accepted/round", "compilations"], rows
