"""Bytes of state by mode, width and dtype, per request and layer: arithmetic on the geometry, nothing is allocated.

The columns are those of `jax-ssm bytes`; "seed layout" is the same mode in the layout of LightLLM PR 1585 and 1690, without
the convolution window.
"""

from __future__ import annotations

import argparse

from benchmarks import record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command-line options."""
    parser.add_argument("--width", nargs="+", type=record.at_least(1), default=[1, 2, 4, 8], help="W (default: 1 2 4 8)")
    parser.add_argument("--history", nargs="+", type=record.at_least(1), default=[8, 16, 32], help="L (default: 8 16 32)")
    parser.add_argument("--rule", nargs="+", choices=("gdn", "kda"), default=["gdn", "kda"], help="default: both")


def run(args: argparse.Namespace) -> dict:
    """Add up; always `ok`."""
    from benchmarks.cycle import MODES
    from jax_ssm.spec import SSMSpec, seed_layout_bytes, state_bytes

    cells = []
    for rule in args.rule:
        h, kh, hv = {"gdn": (16, 16, 32), "kda": (32, 32, 32)}[rule]
        for ssm in ("fp32", "bf16"):
            for width in args.width:
                for mode in (m for m in MODES if m != "precompute"):
                    for history in args.history if mode == "replay" else [None]:
                        if (mode == "compact" and width == 1) or (history or width) < width:
                            continue
                        spec = SSMSpec(rule, 1, 2, h, kh, hv, 128, 128, width, mode, history or 16, "bf16", ssm)
                        parts = state_bytes(spec)
                        fields = dict(rule=rule, ssm=ssm, width=width, mode=mode, history=history)
                        cells.append(fields | {"bytes": parts, "seed_layout": seed_layout_bytes(spec)})
    return {"ok": True, "cells": cells}


def table(data: dict) -> tuple[list[str], list[list[str]]]:
    """Column heads and rows for a person."""
    rows = [
        [c["rule"], c["ssm"], str(c["width"]), c["mode"], str(c["history"] or "-"), f"{c['bytes']['ssm']:,}",
         f"{c['bytes']['history']:,}", f"{c['bytes']['conv']:,}", f"{c['bytes']['total']:,}", f"{c['seed_layout']:,}"]
        for c in data["cells"]
    ]  # fmt: skip
    return ["rule", "state", "W", "mode", "L", "state bytes", "history", "conv", "total", "seed layout, no conv"], rows
