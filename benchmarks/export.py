"""Temporary memory of `export_into` compiled with donated pages, by mode and batch, and what a gather would take."""

from __future__ import annotations

import argparse

from benchmarks import record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command-line options; the defaults are the shape for which the seed system published its figures."""
    parser.add_argument("--layers", type=record.at_least(1), default=30)
    parser.add_argument("--heads", type=record.at_least(1), default=4)
    parser.add_argument("--dim", type=record.at_least(1), default=128, help="K = V")
    parser.add_argument(
        "--requests", type=record.at_least(1), nargs="+", default=[1, 16, 157], help="requests exported in one call"
    )


def run(args: argparse.Namespace) -> dict:
    """Compile only, nothing is allocated; `ok` is False when native or compact take more than 1,024 bytes."""
    import jax
    import jax.numpy as jnp

    import jax_ssm as js

    cells, ok = [], True
    for mode in ("native", "compact", "replay"):
        for ssm in ("fp32", "bf16"):
            for n in args.requests:
                record.say(f"{mode} {ssm} {n} requests")
                heads = args.heads
                spec = js.SSMSpec("gdn", args.layers, n + 1, heads, heads, heads, args.dim, args.dim, 2, mode, 16, "bf16", ssm)
                state = jax.eval_shape(lambda spec=spec: js.init_state(spec))
                pages = jax.eval_shape(lambda spec=spec, n=n: js.init_pages(spec, n))
                ids, count = jax.ShapeDtypeStruct((n,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
                step = jax.jit(js.export_into, static_argnums=0, donate_argnums=2)
                memory = step.lower(spec, state, pages, ids, ids, count).compile().memory_analysis()
                in_place = memory.alias_size_in_bytes == n * js.page_bytes(spec)
                ok &= in_place and (mode == "replay" or memory.temp_size_in_bytes <= 1024)
                cells.append(
                    dict(mode=mode, ssm=ssm, requests=n, temp_bytes=memory.temp_size_in_bytes, page_bytes=js.page_bytes(spec),
                         pages_in_place=in_place)
                )  # fmt: skip
    return {"ok": bool(ok), "layers": args.layers, "heads": args.heads, "dim": args.dim, "cells": cells}


def table(data: dict) -> tuple[list[str], list[list[str]]]:
    """Column heads and rows for a person."""
    rows = [
        [c["mode"], c["ssm"], str(c["requests"]), f"{c['page_bytes']:,}", f"{c['temp_bytes']:,}", str(c["pages_in_place"])]
        for c in data["cells"]
    ]
    return ["mode", "state", "requests", "bytes a page", "temporary bytes", "pages in place"], rows
