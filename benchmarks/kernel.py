"""Every kernel alone: microseconds a launch by device, beside the bytes it must move.

The rounds of `cycle`, convolution included, on a pool larger than the L2 cache; then all requests of one group exported into
pages ("materialise") and merged. The time of a kind of kernel is the median over its launches; folds, whose cost
depends on how many requests fold, are averaged over a cycle. The share is bytes over time over the copy rate of the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import product

from benchmarks import cycle, record

KERNELS = (
    "conv",
    "prologue",
    "native",
    "compact",
    "commit",
    "plan",
    "fold",
    "coefficients",
    "outputs",
    "materialise",
    "windows",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command-line options: those of `cycle`."""
    cycle.add_arguments(parser)
    parser.set_defaults(batch=[128], layers=1)


def run(args: argparse.Namespace) -> dict:
    """Time every kernel of every plan; `ok` is False when one of the implementations failed somewhere."""
    from benchmarks import device_time, twins

    device_time.require_gpu()
    missing = {name: reason for name in cycle.IMPLEMENTATIONS if (reason := twins.unavailable(name))}
    kinds = args.implementation or [name for name in cycle.IMPLEMENTATIONS if name not in missing]
    from benchmarks.pool import Compilations

    began, todo = time.time(), cycle.plans(args)
    jobs = {(i, kind): (plan, kind, True) for i, (_, plan) in enumerate(todo) for kind in kinds if kind in twins.IN_JAX}
    record.say(f"{len(todo)} plans, {len(jobs)} executables, {', '.join(kinds)}")
    copy, cells = device_time.copy_rate(), []
    with Compilations(jobs, args.threads) as made:
        for (i, (fields, plan)), kind in product(enumerate(todo), kinds):
            compiled = made.get((i, kind))
            if time.time() - began > args.budget:
                record.say(f"budget spent: plans from {i + 1} of {len(todo)} left out")
                break
            kernels, error = measure(plan, kind, compiled, copy)
            cells.append(fields | {"implementation": kind, "kernels": kernels, "error": error})
            told = " ".join(f"{name} {k['us']:.1f}" for name, k in kernels.items())
            record.say(f"[{time.time() - began:4.0f} s] {i + 1}/{len(todo)} {fields} {kind}: {error or told}")
    return {"ok": not any(c["error"] for c in cells), "copy_bytes_per_us": copy, "layers": args.layers, "cells": cells}


def measure(plan, kind: str, compiled, copy: float) -> tuple[dict, str | None]:
    """({kernel: microseconds, bytes, share, launches}, error) of one implementation on one plan."""
    import gc

    import torch

    from benchmarks.device_time import OTHER, by_label, durations, least_bytes
    from benchmarks.pool import Pool, export_all

    try:
        if isinstance(compiled, Exception):
            raise compiled
        pool = Pool(plan)
        step = pool.triton(conv=True) if kind == "triton" else pool.jax(compiled)
        for i in range(plan.groups):
            step(i)
        rounds = by_label(durations(lambda: [step(i) for i in range(plan.groups)], queue=kind == "triton"))
        del step
        export = export_all(pool, kind)
        export()
        pages = by_label(durations(lambda: [export() for _ in range(5)], queue=kind == "triton"))
    except Exception as error:  # one implementation that fails must not end the run
        return {}, f"{error!r:.400}"
    finally:
        pool = step = export = None
        gc.collect()
        torch.cuda.empty_cache()
    found = {name: us for name, us in rounds.items() if name not in ("advance", OTHER)}
    kernels, least = {}, least_bytes(plan.spec, plan.batch, plan.accepted)
    times = {name: (statistics.median(us), len(us)) for name, us in found.items()}
    if "advance" in rounds:
        times["fold"] = sum(rounds["advance"]) / (plan.groups * plan.spec.layers), len(rounds["advance"])
    if "advance" in pages:
        times["materialise"] = statistics.median(pages["advance"]) / plan.spec.layers, len(pages["advance"])
        state = plan.spec.v_heads * plan.spec.v_dim * plan.spec.k_dim * {"fp32": 4, "bf16": 2}[plan.spec.ssm_dtype]
        least["materialise"] = 2 * plan.batch * state
    if "windows" in pages:
        times["windows"] = statistics.median(pages["windows"]) / plan.spec.layers, len(pages["windows"])
    for name in KERNELS:
        if name in times:
            us, launches = times[name]
            size = least.get(name)
            kernels[name] = dict(us=us, launches=launches, bytes=size, share=size and size / us / copy)
    other = sum(rounds.get(OTHER, ())) / (plan.groups * plan.spec.layers)
    return kernels | {OTHER: dict(us=other, launches=len(rounds.get(OTHER, ())), bytes=None, share=None)}, None


def table(data: dict) -> tuple[list[str], list[list[str]]]:
    """Column heads and rows for a person."""
    rows = []
    for c in data["cells"]:
        for name, k in c["kernels"].items():
            where = [c["rule"], c["mode"], str(c["width"]), c["ssm"], str(c["batch"]), c["implementation"]]
            size = [f"{k['bytes'] / 1e6:.1f}", f"{100 * k['share']:.0f} %"] if k["bytes"] else ["-", "-"]
            rows.append([*where, name, f"{k['us']:.2f}", *size])
    return ["rule", "mode", "W", "state", "B", "implementation", "kernel", "µs", "MB", "copy rate"], rows


def brief(data: dict) -> tuple[list[str], list[list[str]]]:
    """Column heads and rows for a document: a row a kernel and geometry, a column an implementation."""
    kinds = [kind for kind in cycle.IMPLEMENTATIONS if any(c["implementation"] == kind for c in data["cells"])]
    groups: dict[tuple, dict] = {}
    for c in data["cells"]:
        for name, k in c["kernels"].items():
            if name in KERNELS:
                groups.setdefault((c["rule"], c["mode"], str(c["width"]), c["ssm"], name), {})[c["implementation"]] = k
    rows = []
    for key, found in groups.items():
        size = next(iter(found.values()))["bytes"]
        share = f"{100 * max(k['share'] for k in found.values()):.0f} %" if size else "-"
        times = [f"{found[kind]['us']:.1f}" if kind in found else "-" for kind in kinds]
        rows.append([*key, f"{size / 1e6:.1f}" if size else "-", *times, share])
    return ["rule", "mode", "W", "state", "kernel", "MB", *(f"{kind} µs" for kind in kinds), "copy rate, best"], rows
