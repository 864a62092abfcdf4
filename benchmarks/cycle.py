"""Whole decoding rounds over a full period of the history: device time per layer, by mode, batch, width and acceptance.

A round is prepare (with the folds that are due), every layer after its convolution, and accept (with the commit of mode
compact). Times are sums of the durations of all kernels of a round, host gaps excluded, divided by the layers: with
the default of 12 layers (fewer where the memory does not hold them; "layers" in the JSON), so many as a small model has.
Pools are larger than the L2 cache, requests stand at different phases, and every sweep covers each phase equally often.
Implementations take turns, first in one order and then in the other. Index arithmetic that XLA adds around the kernels counts
("other" in the JSON); that of torch_ref, a reference, does not count for the Triton kernels that it calls. The share is the
least number of bytes of a round, over its time, over the copy rate measured in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import product

from benchmarks import record
from benchmarks.targets import IMPLEMENTATIONS, absolute, ratios  # noqa: F401  forms of the report

MODES = ("native", "compact", "replay", "precompute")
LARGEST = 16 << 30  # bytes of one state: plans get fewer layers, down to one; what is larger still is left out, by name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command-line options; the plans are their product, without the illegal combinations."""

    def several(name, default, help=None, **options):
        parser.add_argument(name, nargs="+", default=default, help=f"{help or ''} (default: {' '.join(map(str, default))})", **options)  # noqa: E501  # fmt: skip

    several("--rule", ["gdn", "kda"], choices=("gdn", "kda"))
    several("--mode", list(MODES), "precompute: mode replay with that projection, W > 1", choices=MODES)
    several("--width", [1, 4], "W", type=record.at_least(1))
    several("--batch", [1, 8, 32, 64, 128, 256], type=record.at_least(1))
    several("--state-dtype", ["fp32", "bf16"], choices=("fp32", "bf16"))
    several("--accept", ["partial"], "full: W tokens a round; partial: three quarters of them", choices=("full", "partial"))
    parser.add_argument("--history", type=record.at_least(1), default=16, help="L (default: 16)")
    parser.add_argument("--layers", type=record.at_least(1), default=12, help="at most (default: 12)")
    parser.add_argument("--implementation", nargs="+", choices=IMPLEMENTATIONS, help="default: all that run here")
    parser.add_argument("--block-v", type=record.at_least(1), help="rows of V of a program (default: the measured table)")
    parser.add_argument("--num-warps", type=record.at_least(1), default=1, help="warps of a program (default: 1)")
    parser.add_argument("--sweeps", type=record.at_least(1), default=2, help="samples of each turn (default: 2)")
    parser.add_argument("--threads", type=record.at_least(1), default=12, help="compilations side by side (default: 12)")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no further plan starts (default: none)")


def accepted_tokens(width: int, pattern: str) -> int:
    """Tokens that each request accepts in a round of `width`."""
    return width if pattern == "full" else max(1, 3 * width // 4)


def plans(args: argparse.Namespace) -> list:
    """(fields for the report, Plan) of every legal combination."""
    from benchmarks.pool import Plan, make_spec
    from jax_ssm.spec import state_bytes

    out, seen = [], set()
    axes = product(args.rule, args.width, args.state_dtype, args.mode, args.batch, args.accept)
    for rule, width, ssm, mode, batch, pattern in axes:
        accepted = accepted_tokens(width, pattern)
        key = (rule, width, ssm, mode, batch, accepted)
        if (mode in ("compact", "precompute") and width == 1) or key in seen:
            continue
        seen.add(key)
        fields = dict(rule=rule, mode=mode, width=width, ssm=ssm, accepted=accepted, batch=batch)
        for layers in range(args.layers, 0, -1):
            spec = make_spec(rule, mode, width, ssm, layers, args.history)
            plan = Plan(spec, batch, accepted, args.block_v, args.num_warps)
            if state_bytes(plan.sized())["ssm"] <= LARGEST:
                break
        else:
            record.say(f"left out, one layer of the state takes more than {LARGEST >> 30} GiB: {fields}")
            continue
        out.append((fields | {"layers": layers}, plan))
    if not out:
        raise ValueError("these options leave no plan: compact and precompute need a width of at least 2")
    return out


def run(args: argparse.Namespace) -> dict:
    """Time every plan; `ok` is False when one of the implementations failed somewhere."""
    from benchmarks import device_time, twins

    device_time.require_gpu()
    missing = {name: reason for name in IMPLEMENTATIONS if (reason := twins.unavailable(name))}
    kinds = args.implementation or [name for name in IMPLEMENTATIONS if name not in missing]
    for name in kinds:
        if name in missing:
            raise ValueError(f"--implementation {name} cannot run here: {missing[name]}")
    from benchmarks.pool import Compilations

    began, todo = time.time(), plans(args)
    jobs = {(i, kind): (plan, kind, False) for i, (_, plan) in enumerate(todo) for kind in kinds if kind in twins.IN_JAX}
    record.say(f"{len(todo)} plans, {len(jobs)} executables, {', '.join(kinds)}")
    copy, cells = device_time.copy_rate(), []
    with Compilations(jobs, args.threads) as made:
        for i, (fields, plan) in enumerate(todo):
            executables = {kind: made.get((i, kind)) for kind in kinds}
            if time.time() - began > args.budget:
                record.say(f"budget spent: {len(todo) - i} plans left out")
                break
            cell = fields | measure(plan, executables, args.sweeps, copy)
            cells.append(cell)
            told = " ".join(f"{kind} {r['us']:.1f} ({100 * r['share']:.0f} %)" for kind, r in cell["implementations"].items())
            record.say(f"[{time.time() - began:4.0f} s] {i + 1}/{len(todo)} {fields} {told} {cell['errors'] or ''}")
    ok = not any(c["errors"] for c in cells)
    settings = dict(history=args.history, sweeps=args.sweeps)
    return {"ok": ok, "copy_bytes_per_us": copy, "left_out": missing, **settings, "cells": cells}


def measure(plan, executables: dict, sweeps: int, copy: float) -> dict:
    """Samples of every implementation on one plan, in A/B and B/A order."""
    import gc

    import torch

    from benchmarks.device_time import OTHER, by_label, durations, least_bytes
    from benchmarks.pool import Pool

    pool, runs, errors = Pool(plan), {}, {}
    layers, groups = plan.spec.layers, plan.groups
    for kind, compiled in executables.items():
        try:
            if isinstance(compiled, Exception):
                raise compiled
            runs[kind] = pool.triton() if kind == "triton" else pool.jax(compiled)
            for i in range(groups):
                runs[kind](i)  # kernels compile and load
        except Exception as error:  # one implementation that fails must not end the run
            errors[kind] = f"{error!r:.400}"
            runs.pop(kind, None)
    samples = {kind: [] for kind in runs}
    for turn in (list(runs), list(reversed(runs))):
        for kind in turn:
            for _ in range(sweeps):
                sweep = lambda f=runs[kind]: [f(i) for i in range(groups)]  # noqa: E731
                events = by_label(durations(sweep, queue=kind == "triton"))
                samples[kind].append({name: sum(us) / (groups * layers) for name, us in events.items()})
    least, found = least_bytes(plan.spec, plan.batch, plan.accepted)["round"], {}
    for kind, taken in samples.items():
        counts = [name for name in taken[0] if not (kind == "triton" and name == OTHER)]
        totals = [sum(sample.get(name, 0.0) for name in counts) for sample in taken]
        us = statistics.median(totals)
        parts = {name: statistics.median(s.get(name, 0.0) for s in taken) for name in taken[0]}
        found[kind] = dict(
            us=us, spread=[min(totals), max(totals)], samples=totals, parts=parts, other=parts.get(OTHER, 0.0),
            share=least / us / copy, us_per_token=us / (plan.batch * plan.accepted),
        )  # fmt: skip
    del pool, runs
    gc.collect()
    torch.cuda.empty_cache()
    return {"groups": groups, "least_bytes": least, "floor_us": least / copy, "implementations": found, "errors": errors}


WHERE = ["rule", "mode", "W", "accept", "state"]


def where(c: dict) -> list[str]:
    """What a cell is, under the heads WHERE."""
    return [c["rule"], c["mode"], str(c["width"]), str(c["accepted"]), c["ssm"]]


def table(data: dict) -> tuple[list[str], list[list[str]]]:
    """Column heads and rows for a person: µs a layer and round."""
    kinds = [kind for kind in IMPLEMENTATIONS if any(kind in c["implementations"] for c in data["cells"])]
    rows = []
    for c in data["cells"]:
        row = [*where(c), str(c["batch"]), f"{c['floor_us']:.1f}"]
        for kind in kinds:
            found = c["implementations"].get(kind)
            row.append(f"{found['us']:.1f} [{found['spread'][0]:.1f}, {found['spread'][1]:.1f}]" if found else "-")
        best = min((r for r in c["implementations"].values()), key=lambda r: r["us"], default=None)
        rows.append([*row, f"{100 * best['share']:.0f} %" if best else "-", f"{best['us_per_token']:.2f}" if best else "-"])
    heads = [*WHERE, "B", "floor µs", *(f"{kind} µs [least, most]" for kind in kinds)]
    return [*heads, "copy rate, best", "µs a token, best"], rows


def brief(data: dict) -> tuple[list[str], list[list[str]]]:
    """Column heads and rows for a document: the batch of 128, where acceptance is partial."""
    cells = [c for c in data["cells"] if c["batch"] == 128 and (c["accepted"] < c["width"] or c["width"] == 1)]
    heads, rows = [*WHERE, "floor µs", *IMPLEMENTATIONS, "copy rate, best"], []
    for c in cells:
        found = c["implementations"]
        times = [f"{found[kind]['us']:.1f}" if kind in found else "-" for kind in IMPLEMENTATIONS]
        share = f"{100 * max(r['share'] for r in found.values()):.0f} %"
        rows.append([*where(c), f"{c['floor_us']:.1f}", *times, share])
    return heads, rows


def batches(data: dict) -> tuple[list[str], list[list[str]]]:
    """Column heads and rows for a document: Pallas' µs a layer and round, a column a batch."""
    sizes = sorted({c["batch"] for c in data["cells"]})
    groups: dict[tuple, dict[int, str]] = {}
    for c in data["cells"]:
        if "pallas" in c["implementations"]:
            groups.setdefault(tuple(where(c)), {})[c["batch"]] = f"{c['implementations']['pallas']['us']:.1f}"
    rows = [[*key, *(found.get(n, "-") for n in sizes)] for key, found in groups.items()]
    return [*WHERE, *(f"B = {n}" for n in sizes)], rows


def parts(data: dict) -> tuple[list[str], list[list[str]]]:
    """Column heads and rows for a document: what the kernels of a round take at B = 128, Pallas / Triton."""
    names = ("prologue", "native", "compact", "commit", "coefficients", "outputs", "advance")
    cells, rows = [c for c in data["cells"] if c["batch"] == 128], []
    for c in cells:
        found = [c["implementations"].get(kind, {}).get("parts", {}) for kind in ("pallas", "triton")]
        told = [" / ".join(f"{p[name]:.1f}" if name in p else "-" for p in found) for name in names]
        rows.append([*where(c), *(x if x != "- / -" else "" for x in told)])
    return [*WHERE, *names[:-1], "fold"], rows
