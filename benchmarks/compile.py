"""First-seen request counts in a warmed bucket: how often something compiles, and what the first round costs.

The setup of the seed system's figures: 2 layers, 4 value heads, 128 x 128, bf16 activations, fp32 state, history 8, GDN and
KDA, W = 1 and 4, 14 counts in 1..511. There a first-seen count inside a block cost 288-353 ms before its repair and
0.21-0.37 ms after it. Two ways to run a round are timed, "stages" (layout, prepare, each layer, accept: one jitted call each)
and "whole" (one jitted call); neither stands for the other. A round counts from the host's list of slots to the finished state.
Crossing into a bucket that nobody warmed compiles, and is reported on its own, as is a round compiled for one count alone.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from benchmarks import record

WAYS = ("stages", "whole")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command-line options; smaller sizes are for machines without a GPU."""
    parser.add_argument("--rule", nargs="+", choices=("gdn", "kda"), default=["gdn", "kda"], help="default: both")
    parser.add_argument(
        "--mode", nargs="+", choices=("native", "compact", "replay"), default=["replay"], help="default: replay"
    )
    parser.add_argument("--width", nargs="+", type=record.at_least(1), default=[1, 4], help="W (default: 1 4)")
    parser.add_argument("--bucket", type=record.at_least(2), default=512, help="requests (default: 512)")
    parser.add_argument("--dim", type=record.at_least(1), default=128, help="K = V (default: 128)")
    parser.add_argument("--heads", type=record.at_least(1), default=4, help="value heads (default: 4)")
    parser.add_argument("--counts", type=record.at_least(1), default=14, help="how many first-seen counts (default: 14)")
    parser.add_argument("--steady", type=record.at_least(1), default=5, help="later rounds of each count (default: 5)")
    parser.add_argument("--implementation", choices=("xla", "pallas", "triton"), help="default: pallas on a GPU, else xla")
    parser.add_argument("--alone", action="store_true", help="also compile a round for one count alone, without a bucket")


def run(args: argparse.Namespace) -> dict:
    """Warm, then see each count once; `ok` is False when something compiled or a first round took over twice the median."""
    import jax

    implementation = args.implementation or ("pallas" if jax.default_backend() == "gpu" else "xla")
    cells = []
    for rule in args.rule:
        for mode in args.mode:
            for width in args.width:
                if mode == "compact" and width == 1:
                    continue
                for way in WAYS:
                    cell = dict(rule=rule, mode=mode, width=width, way=way) | first_seen(
                        make_spec(args, rule, mode, width), way, implementation, args
                    )
                    cells.append(cell)
                    record.say(
                        f"{rule} {mode} W={width} {way}: {cell['compilations']} compilations, first at most "
                        f"{max(cell['first_ms']):.2f} ms, steady {cell['steady_ms']:.2f} ms"
                    )
    if not cells:
        raise ValueError("mode compact needs a width of at least 2")
    ok = all(c["compilations"] == 0 and c["ratio"] <= 2.0 for c in cells)
    return {"ok": ok, "implementation": implementation, "bucket": args.bucket, "cells": cells}


def make_spec(args: argparse.Namespace, rule: str, mode: str, width: int):
    """The geometry; GDN groups two value heads on a key head."""
    from jax_ssm.spec import SSMSpec

    keys = max(1, args.heads // 2) if rule == "gdn" else args.heads
    slots = args.bucket + 1
    return SSMSpec(rule, 2, slots, keys, keys, args.heads, args.dim, args.dim, width, mode, 8, "bf16", "fp32")


def make_round(spec, way: str, implementation: str, capacity: int):
    """A function that runs one round of the first `count` slots, given as a host list, and waits for it."""
    import jax
    import jax.numpy as jnp

    import jax_ssm as js

    config, key = js.KernelConfig(implementation), jax.random.key(0)
    tokens, gates = capacity * spec.width, spec.v_heads * spec.gates
    act = lambda *shape: jax.random.normal(key, (tokens, *shape)).astype(jnp.bfloat16)  # noqa: E731
    small = lambda n: jax.random.normal(key, (n,))  # noqa: E731
    inputs = js.LinearInputs(
        act(spec.q_heads, spec.k_dim), act(spec.k_heads, spec.k_dim), act(spec.v_heads, spec.v_dim), act(gates),
        act(spec.v_heads), small(spec.v_heads), small(gates),
    )  # fmt: skip
    state = js.init_state(spec)
    layout = lambda ids, at: js.build_layout(spec, ids, at)  # noqa: E731
    prepare = lambda state, layout: js.prepare(spec, state, layout, config)  # noqa: E731
    forward = lambda state, receipt, row, x: js.forward(spec, state, receipt, row, x)  # noqa: E731

    def accept(state, receipt):
        return js.accept(spec, state, js.StateAcceptance((receipt,), receipt.layout.verify_len))

    if way == "stages":
        layout = jax.jit(layout)
        prepare, forward, accept = (jax.jit(f, donate_argnums=0) for f in (prepare, forward, accept))

    def stages(state, ids, at):
        state, receipt = prepare(state, layout(ids, at))
        for row in range(spec.layers):
            state, o = forward(state, receipt, np.int32(row), inputs)
        return accept(state, receipt), o

    step = jax.jit(stages, donate_argnums=0) if way == "whole" else stages

    def one(count: int) -> None:
        nonlocal state
        ids, at = np.full(tokens, spec.hold, np.int32), np.zeros(tokens, np.int32)
        ids[: count * spec.width] = np.repeat(np.arange(count), spec.width)
        at[: count * spec.width] = np.tile(np.arange(spec.width), count)
        state, o = step(state, jax.device_put(ids), jax.device_put(at))
        jax.block_until_ready((state, o))

    return one


def first_seen(spec, way: str, implementation: str, args: argparse.Namespace) -> dict:
    """Compilations and times of every count's first round, and of the later ones."""
    from jax_ssm.engine.compiles import Compiler

    def timed(f, *x) -> float:
        began = time.perf_counter()
        f(*x)
        return 1000 * (time.perf_counter() - began)

    one = make_round(spec, way, implementation, args.bucket)
    crossing = timed(one, args.bucket)  # the bucket is entered: this compiles
    for _ in range(3):
        one(args.bucket)
    counts = sorted({round(float(x)) for x in np.geomspace(1, args.bucket - 1, args.counts)})
    counts = [int(count) for count in np.random.default_rng(0).permutation(counts)]
    compiler = Compiler()
    first = [timed(one, count) for count in counts]
    compilations = compiler.stray()
    steady = statistics.median(timed(one, count) for _ in range(args.steady) for count in counts)
    out = dict(counts=counts, first_ms=first, steady_ms=steady, compilations=compilations, crossing_ms=crossing)
    out |= dict(ratio=max(first) / steady, alone_ms=None)
    if args.alone:
        alone = make_round(spec, way, implementation, counts[0])
        out["alone_ms"] = timed(alone, counts[0])
    return out


def table(data: dict) -> tuple[list[str], list[list[str]]]:
    """Column heads and rows for a person."""
    rows = [
        [c["rule"], c["mode"], str(c["width"]), c["way"], str(len(c["counts"])), str(c["compilations"]),
         f"{min(c['first_ms']):.2f}–{max(c['first_ms']):.2f}", f"{c['steady_ms']:.2f}", f"{c['ratio']:.2f}",
         f"{c['crossing_ms']:,.0f}", "-" if c["alone_ms"] is None else f"{c['alone_ms']:,.0f}"]
        for c in data["cells"]
    ]  # fmt: skip
    heads = ["rule", "mode", "W", "jitted", "counts", "compilations", "first round ms", "steady ms", "largest ratio"]
    return [*heads, "entering the bucket ms", "count alone ms"], rows
