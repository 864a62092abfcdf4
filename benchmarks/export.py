"""Temporary memory of `export_into` compiled with donated pages, by mode, state dtype and batch; on a GPU also its time.

The default shape is the one for which the seed system published its figures: 157 requests, 30 layers, 4 heads, 128 x 128. It
takes the compiler's word for memory (nothing is allocated for that), and holds when every export needs at most 1,024 bytes
besides the pages it was given. A copy of the batch first would need "bytes a page" times the requests. On a GPU the
largest batch is then exported for real: microseconds on the device, and bytes read and written over them.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

from benchmarks import record

LIMIT = 1024  # bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command-line options; the defaults are the shape for which the seed system published its figures."""
    parser.add_argument("--layers", type=record.at_least(1), default=30, help="default: 30")
    parser.add_argument("--heads", type=record.at_least(1), default=4, help="default: 4")
    parser.add_argument("--dim", type=record.at_least(1), default=128, help="K = V (default: 128)")
    parser.add_argument(
        "--requests", type=record.at_least(1), nargs="+", default=[1, 16, 157], help="exported in one call (default: 1 16 157)"
    )
    parser.add_argument("--implementation", choices=("xla", "pallas", "triton"), help="default: pallas on a GPU, else xla")
    parser.add_argument("--threads", type=record.at_least(1), default=8, help="compilations side by side (default: 8)")


def run(args: argparse.Namespace) -> dict:
    """Compile every case; `ok` is False when one needs more than LIMIT bytes or does not write its pages in place."""
    import jax

    gpu = jax.default_backend() == "gpu"
    implementation = args.implementation or ("pallas" if gpu else "xla")
    cases = list(product(("native", "compact", "replay"), ("fp32", "bf16"), args.requests))
    with ThreadPoolExecutor(args.threads) as pool:
        made = list(pool.map(partial(one, args, implementation), cases))
    cells = [cell for cell, _ in made]
    for cell, executable in made:
        if gpu and cell["requests"] == max(args.requests):
            cell |= timed(args, executable, cell)
    ok = all(c["pages_in_place"] and c["temp_bytes"] <= LIMIT for c in cells)
    shape = dict(layers=args.layers, heads=args.heads, dim=args.dim)
    return {"ok": ok, "implementation": implementation, "limit_bytes": LIMIT, **shape, "cells": cells}


def make_spec(args: argparse.Namespace, mode: str, ssm: str, requests: int):
    """The geometry: W = 2, L = 16."""
    from jax_ssm.spec import SSMSpec

    heads = (args.heads,) * 3
    return SSMSpec("gdn", args.layers, requests + 1, *heads, args.dim, args.dim, 2, mode, 16, "bf16", ssm)


def compiled(spec, implementation: str, requests: int):
    """The executable of an export of `requests` slots into donated pages."""
    import jax
    import jax.numpy as jnp

    import jax_ssm as js

    config = js.KernelConfig(implementation)
    state = jax.eval_shape(lambda: js.init_state(spec))
    pages = jax.eval_shape(lambda: js.init_pages(spec, requests))
    ids, count = jax.ShapeDtypeStruct((requests,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    step = jax.jit(lambda state, pages, *ids: js.export_into(spec, state, pages, *ids, config), donate_argnums=1)
    return step.lower(state, pages, ids, ids, count).compile()


def one(args: argparse.Namespace, implementation: str, case) -> tuple:
    """(what the compiler says about one case, the executable)."""
    from jax_ssm.spec import page_bytes

    mode, ssm, requests = case
    spec = make_spec(args, mode, ssm, requests)
    executable = compiled(spec, implementation, requests)
    memory = executable.memory_analysis()
    record.say(f"{mode} {ssm} {requests} requests: {memory.temp_size_in_bytes:,} bytes")
    cell = dict(
        mode=mode, ssm=ssm, requests=requests, temp_bytes=memory.temp_size_in_bytes, page_bytes=page_bytes(spec),
        pages_in_place=memory.alias_size_in_bytes == requests * page_bytes(spec), us=None, bytes_per_us=None,
    )  # fmt: skip
    return cell, executable


def timed(args: argparse.Namespace, export, cell: dict) -> dict:
    """Device time of one export, median of 5; every slot holds as many live records as its number allows."""
    import statistics

    import jax
    import jax.numpy as jnp

    import jax_ssm as js
    from benchmarks.device_time import durations

    n = cell["requests"]
    spec = make_spec(args, cell["mode"], cell["ssm"], n)
    state, ids = js.init_state(spec), jnp.arange(n, dtype=jnp.int32)
    if spec.mode == "replay":
        state = state.replace(extra=state.extra.replace(cursor=jnp.arange(spec.slots, dtype=jnp.int32) % (spec.history + 1)))
    pages, samples = js.init_pages(spec, n), []

    def call() -> None:
        nonlocal pages
        pages = jax.block_until_ready(export(state, pages, ids, ids, jnp.int32(n)))

    for _ in range(6):
        samples.append(sum(us for _, us in durations(call)))
    us = statistics.median(samples[1:])
    record.say(f"{cell['mode']} {cell['ssm']} {n} requests: {us:.0f} µs on the device")
    return dict(us=us, samples=samples[1:], bytes_per_us=2 * n * cell["page_bytes"] / us)


def table(data: dict) -> tuple[list[str], list[list[str]]]:
    """Column heads and rows for a person."""
    rows = [
        [c["mode"], c["ssm"], str(c["requests"]), f"{c['page_bytes']:,}", f"{c['temp_bytes']:,}", str(c["pages_in_place"]),
         *([f"{c['us']:,.0f}", f"{c['bytes_per_us'] / 1e6:.2f}"] if c.get("us") else ["-", "-"])]
        for c in data["cells"]
    ]  # fmt: skip
    heads = ["mode", "state", "requests", "bytes a page", "temporary bytes", "pages in place", "µs", "TB/s read and written"]
    timed = any(c.get("us") for c in data["cells"])
    return heads if timed else heads[:6], rows if timed else [row[:6] for row in rows]


def brief(data: dict) -> tuple[list[str], list[list[str]]]:
    """Column heads and rows for a document: the batches of one mode and state dtype together, times of the largest."""
    groups: dict[tuple, list[dict]] = {}
    for c in data["cells"]:
        groups.setdefault((c["mode"], c["ssm"]), []).append(c)
    timed, rows = any(c.get("us") for c in data["cells"]), []
    for key, cells in groups.items():
        requests, most = ", ".join(str(c["requests"]) for c in cells), max(c["temp_bytes"] for c in cells)
        last = max(cells, key=lambda c: c["requests"])
        time = [f"{last['us']:,.0f}", f"{last['bytes_per_us'] / 1e6:.2f}"] if last.get("us") else ["-", "-"]
        rows.append([*key, requests, f"{last['page_bytes']:,}", f"{most:,}", *(time if timed else ())])
    heads = ["mode", "state", "requests", "bytes a page", "most temporary bytes"]
    return [*heads, *(("µs of the largest", "TB/s read and written") if timed else ())], rows
