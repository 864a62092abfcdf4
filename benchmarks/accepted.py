"""Tokens committed a round (accepted drafts plus one) by verify width and temperature, on the model's own text."""

from __future__ import annotations

import argparse

from benchmarks import record
from benchmarks.identity import PROMPTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command-line options."""
    parser.add_argument("--model", help="checkpoint directory (default: the demo model)")
    parser.add_argument("--tokens", type=record.at_least(1), default=128, help="new tokens a prompt (default: 128)")
    parser.add_argument("--widths", type=int, choices=range(2, 17), metavar="W", nargs="+", default=[2, 4, 8])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])


def run(args: argparse.Namespace) -> dict:
    """Generate for the 20 prompts of `identity`, mode replay, fp32."""
    from jax_ssm.engine import Generator, load

    model, cells = load(args.model, "fp32"), []
    for width in args.widths:
        generator = Generator(model, mode="replay", width=width, act_dtype="fp32", max_requests=len(PROMPTS))
        for temperature in args.temperatures:
            record.say(f"W={width} temperature {temperature}")
            made = generator.generate(list(PROMPTS), max_new_tokens=args.tokens, temperature=temperature, ignore_eos=True)
            rounds = [n for result in made["results"] for n in result["accepted"]]
            cells.append(
                {
                    "width": width,
                    "temperature": temperature,
                    "prompts": len(PROMPTS),
                    "tokens": args.tokens,
                    "mean_accepted": made["timings"]["mean_accepted"],
                    "accepted": rounds,
                }
            )
    return {"ok": True, "cells": cells}


def table(data: dict) -> tuple[list[str], list[list[str]]]:
    """Column heads and rows for a person: one row a temperature."""
    widths = sorted({c["width"] for c in data["cells"]})
    found = {(c["temperature"], c["width"]): f"{c['mean_accepted']:.2f}" for c in data["cells"]}
    temperatures = sorted({c["temperature"] for c in data["cells"]})
    rows = [["greedy" if t == 0 else f"{t:g}", *(found.get((t, w), "") for w in widths)] for t in temperatures]
    return ["temperature", *(f"W = {w}" for w in widths)], rows
