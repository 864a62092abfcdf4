"""Do PyTorch eager, Triton and Pallas leave the same bits? Every array of every verb, counted element by element.

A cell is one rule, mode, verify width, history length, state dtype, head layout and batch. It plays rounds of random windows
with random acceptance over permuted slots, padding rows and dead memory that hold NaN, starting from histories of random
fill, so that folds fall in different rounds; then export, merge, a round, snapshot, restore into other slots, and a round.
After every verb every array of every implementation is compared with PyTorch eager. Further checks, each a cell:

  launch      other block sizes and warps leave the same bits
  row         a request alone, in another slot of a smaller pool and another bucket, has the bits it has among the others
  checkpoint  the pages of native, compact and replay (fp32 state) after the same tokens are equal

Mode "precompute" is replay with that projection: its kernels run on tensor cores and are compared with each other, the first of
them in the place of PyTorch eager.

On a GPU the inputs are raw: convolution and prologue are part of the comparison. On a CPU Pallas runs in interpret mode and
both sides are fed the same normalised keys, gates and beta, because the exp and rsqrt of the two CPU libraries differ in
their last bits; the output of the convolution is left out for the same reason. TRITON_INTERPRET=1 adds the Triton kernels,
for fp32 state and activations. Exit status 1 unless nothing differs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import TimeoutError, get_context

from benchmarks import record

SIDES = ("eager", "triton", "pallas", "jaxtriton")
CHECKS = ("twins", "launch", "row", "checkpoint")
MODES = ("native", "compact", "replay", "precompute")
LAUNCHES = ((8, 1), (16, 1), (32, 1), (16, 2), (32, 4))
NO_FMA = "--xla_cpu_max_isa=AVX"


@dataclass(frozen=True)
class Cell:
    """One line of the matrix; history is None in modes that have none."""

    check: str
    rule: str
    mode: str
    width: int
    history: int | None
    ssm_dtype: str
    act_dtype: str
    q_heads: int
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    batch: int

    def spec(self, **changes):
        """The geometry: three slots more than requests, and HOLD."""
        from torch_ref.spec import SSMSpec

        own = {k: v for k, v in vars(self).items() if k not in ("check", "batch", "history")}
        if self.mode == "precompute":
            own |= dict(mode="replay", projection="precompute")
        return SSMSpec(**(own | dict(layers=2, slots=self.batch + 4, history=self.history or 16) | changes))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command-line options. Each takes several values; the matrix is their product, without the illegal combinations."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    pick = partial(parser.add_argument, nargs="+")
    pick("--check", choices=CHECKS, default=list(CHECKS))
    pick("--rule", choices=("gdn", "kda"), default=["gdn", "kda"])
    pick("--mode", choices=MODES, default=list(MODES))
    pick("--width", type=record.at_least(1), help="W (default: 1 2 4 8; on a CPU 1 3)")
    pick("--history", type=record.at_least(1), help="L of mode replay (default: 8 16 32; on a CPU 8)")
    pick("--state-dtype", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    pick("--act-dtype", choices=("fp32", "bf16"), default=["bf16"])
    pick("--shape", type=shape, metavar="H/KH/HV:B", help="heads and batch; KDA takes HV for all (default: 16/16/32:8 and 2/1/6:33; on a CPU 1/1/2:3)")  # noqa: E501  # fmt: skip
    pick("--dims", type=dims, metavar="KxV", help="head sizes (default: 128x128; on a CPU 64x16)")
    pick("--implementation", choices=SIDES[1:], help="what to compare with PyTorch eager (default: all that run here)")
    parser.add_argument("--rounds", type=record.at_least(1), default=4, help="rounds before the export (default: 4)")
    parser.add_argument("--quick", action="store_true", help="W = 1 and 4, L = 16, one shape")
    parser.add_argument("--jobs", type=record.at_least(1), help="processes side by side (default: 10 on a GPU, else 1)")
    parser.add_argument("--budget", type=float, help="seconds after which cells that are not done are given up, and it fails")
    parser.add_argument(
        "--plant",
        action="store_true",
        help="change the order of one product in Pallas; exit status 1 is right then",
    )


def shape(text: str) -> tuple[int, int, int, int]:
    """argparse type: H/KH/HV:B."""
    try:
        heads, batch = text.split(":")
        h, kh, hv = (int(x) for x in heads.split("/"))
        return h, kh, hv, int(batch)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: write H/KH/HV:B, such as 16/16/32:8") from None


def dims(text: str) -> tuple[int, int]:
    """argparse type: KxV."""
    try:
        k, v = (int(x) for x in text.split("x"))
        return k, v
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: write KxV, such as 128x128") from None


def exact_cpu() -> None:
    """Forbid fused multiply-add to XLA's CPU compiler; must come before jax is imported."""
    if NO_FMA not in os.environ.get("XLA_FLAGS", ""):
        if "jax" in sys.modules and os.environ.get("JAX_PLATFORMS") == "cpu":
            raise ValueError(f"XLA_FLAGS={os.environ.get('XLA_FLAGS')!r} is not allowed: jax was imported without {NO_FMA}")
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {NO_FMA}".strip()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory too


# -------------------------------------------------------------------------------------------------------------- matrix


def matrix(args: argparse.Namespace, cpu: bool, kernels: int) -> list[Cell]:
    """The cells, the longest first; kernels: how many implementations by kernel there are to compare."""
    widths = args.width or ([1, 3] if cpu else [1, 4] if args.quick else [1, 2, 4, 8])
    histories = args.history or ([8] if cpu else [16] if args.quick else [8, 16, 32])
    shapes = args.shape or ([(1, 1, 2, 3)] if cpu else [(16, 16, 32, 8), (2, 1, 6, 33)][: 1 if args.quick else 2])
    sizes = args.dims or ([(64, 16)] if cpu else [(128, 128)])
    cells = []
    axes = product(args.mode, args.rule, widths, args.state_dtype, args.act_dtype, shapes, sizes)
    for mode, rule, width, ssm, act, (h, kh, hv, batch), (k, v) in axes:
        heads = (h, kh, hv) if rule == "gdn" else (hv, hv, hv)
        for history in histories if mode in ("replay", "precompute") else [None]:
            if (mode in ("compact", "precompute") and width == 1) or (history is not None and history < width):
                continue
            if mode == "precompute" and kernels < 2:  # nothing to compare with
                continue
            make = partial(Cell, rule=rule, mode=mode, width=width, history=history, ssm_dtype=ssm, act_dtype=act,
                           q_heads=heads[0], k_heads=heads[1], v_heads=heads[2], k_dim=k, v_dim=v, batch=batch)  # fmt: skip
            wanted = ["twins"]
            if mode != "precompute" and history in (None, histories[0]) and (h, kh, hv, batch) == shapes[0]:
                if width == max(w for w in widths if w <= 4 or w == min(widths)):
                    wanted += ["launch", "row"]
                if mode == "replay" and ssm == "fp32":
                    wanted += ["checkpoint"]
            cells += [make(check) for check in wanted if check in args.check]
    if not cells:
        raise ValueError("these options leave no cell: compact needs a width of at least 2, replay a history >= width")
    for cell in cells:
        cell.spec()  # a geometry that is not legal is refused before anything runs
    return sorted(cells, key=lambda c: (c.mode not in ("replay", "precompute"), -(c.history or 0), -c.width, -c.batch))


def run(args: argparse.Namespace) -> dict:
    """Run the matrix; `ok` is False when an element differs anywhere, or a cell could not be compared."""
    exact_cpu()
    from benchmarks import twins

    cpu = twins.device() == "cpu"
    missing = {side: reason for side in SIDES[1:] if (reason := twins.unavailable(side))}
    if cpu and "triton" not in missing and "bf16" in [*args.state_dtype, *args.act_dtype]:
        missing["triton"] = "its interpreter cuts values to bf16 and does not round: use --state-dtype fp32 --act-dtype fp32"
    for side in args.implementation or ():
        if side in missing:
            raise ValueError(f"--implementation {side} cannot run here: {missing[side]}")
    sides = ["eager", *(args.implementation or [s for s in SIDES[1:] if s not in missing])]
    cells, jobs = matrix(args, cpu, len(sides) - 1), args.jobs or (1 if cpu else min(10, os.cpu_count() or 1))
    record.say(f"{len(cells)} cells, {', '.join(sides)}, {jobs} at a time")
    for side, reason in missing.items():
        record.say(f"left out: {side}: {reason}")
    work, began, results = partial(run_cell, sides=sides, rounds=args.rounds, plant=args.plant), time.time(), []

    def note(result: dict) -> None:
        results.append(result)
        told = f"{differing_total(result):,} differ" if not result["error"] else result["error"].splitlines()[-1]
        record.say(f"[{time.time() - began:4.0f} s] {len(results)}/{len(cells)} {name_of(result)}: {told}")

    if jobs == 1:
        for cell in cells:
            note(work(cell))
    else:
        with get_context("spawn").Pool(min(jobs, len(cells)), initializer=exact_cpu) as pool:  # leaving it ends the processes
            made = pool.imap_unordered(work, cells)
            try:
                for _ in cells:
                    note(made.next(args.budget and max(0.1, args.budget - (time.time() - began))))
            except TimeoutError:
                record.say(f"--budget {args.budget}: {len(cells) - len(results)} cells given up")
    results.sort(key=lambda r: [name_of(vars(c)) for c in cells].index(name_of(r)))
    ok = len(results) == len(cells) and all(not r["error"] and r["compared"] and not differing_total(r) for r in results)
    not_run = [name_of(vars(c)) for c in cells if name_of(vars(c)) not in {name_of(r) for r in results}]
    return {"ok": ok, "planted": args.plant, "sides": sides, "left_out": missing, "cells": results, "not_run": not_run}


def differing_total(result: dict) -> int:
    """Elements that differ in a cell, over all arrays and pairs."""
    return sum(n for pairs in result["differing"].values() for n in pairs.values())


def name_of(c: dict) -> str:
    """A cell in words."""
    length = f" L={c['history']}" if c["history"] else ""
    heads = f"{c['q_heads']}/{c['k_heads']}/{c['v_heads']}"
    return (
        f"{c['check']} {c['rule']} {c['mode']} W={c['width']}{length} state {c['ssm_dtype']} act {c['act_dtype']} "
        f"heads {heads} {c['k_dim']}x{c['v_dim']} B={c['batch']}"
    )


def table(data: dict) -> tuple[list[str], list[list[str]]]:
    """Column heads and rows for a person, one a cell."""
    rows = []
    for c in data["cells"]:
        bad = {f"{array} {pair}": n for array, pairs in c["differing"].items() for pair, n in pairs.items() if n}
        told = ", ".join(f"{k}: {n:,}" for k, n in bad.items()) or f"0 in {len(c['differing'])} arrays"
        pairs = {pair for pairs in c["differing"].values() for pair in pairs}
        row = [c["check"], c["rule"], c["mode"], str(c["width"]), str(c["history"] or "-"), c["ssm_dtype"], c["act_dtype"]]
        row += [f"{c['q_heads']}/{c['k_heads']}/{c['v_heads']}", f"{c['k_dim']}x{c['v_dim']}", str(c["batch"]), str(len(pairs))]
        rows.append([*row, f"{sum(c['compared'].values()):,}", c["error"].splitlines()[-1] if c["error"] else told])
    heads = ["check", "rule", "mode", "W", "L", "state", "act", "heads", "K x V", "B", "pairs", "elements", "that differ"]
    return heads, rows


def brief(data: dict) -> tuple[list[str], list[list[str]]]:
    """Column heads and rows for a document: cells of one check, rule, mode and state dtype together."""
    groups: dict[tuple, list[dict]] = defaultdict(list)
    for c in data["cells"]:
        groups[c["check"], c["rule"], c["mode"], c["ssm_dtype"]].append(c)
    rows = []
    for key, cells in sorted(groups.items(), key=lambda x: (CHECKS.index(x[0][0]), x[0][1:])):
        several = lambda values: ", ".join(map(str, sorted(set(values)))) or "-"  # noqa: E731
        widths, lengths = several(c["width"] for c in cells), several(c["history"] for c in cells if c["history"])
        elements = sum(sum(c["compared"].values()) for c in cells)
        errors = sum(bool(c["error"]) for c in cells)
        told = f"{sum(map(differing_total, cells)):,}" + (f" ({errors} cells failed)" if errors else "")
        rows.append([*key, widths, lengths, str(len(cells)), f"{elements:,}", told])
    return ["check", "rule", "mode", "state", "W", "L", "cells", "elements compared", "that differ"], rows


# --------------------------------------------------------------------------------------------------------------- cells


class Count:
    """Elements that differ, by array and pair of sides, and elements compared, by array."""

    def __init__(self) -> None:
        self.differing, self.compared = defaultdict(lambda: defaultdict(int)), defaultdict(int)

    def note(self, array: str, values: dict, wait: bool = True) -> None:
        """Compare every value with the first. Values may be memory of JAX, which must not change before they are read."""
        from benchmarks.twins import count_differing

        (first, reference), *others = values.items()
        self.compared[array] += reference.numel() * len(others)
        for name, x in others:
            self.differing[array][f"{first}-{name}"] += count_differing(reference, x)  # on the device until the end
        if wait and reference.is_cuda:
            wait_for_torch()

    def states(self, spec, sides: dict) -> None:
        """Compare every array of the states."""
        arrays = {name: side.arrays() for name, side in sides.items()}
        for leaf in arrays[next(iter(arrays))]:
            self.note(array_name(spec, leaf), {name: found[leaf] for name, found in arrays.items()}, wait=False)
        wait_for_torch()


def wait_for_torch() -> None:
    """Wait for what PyTorch runs on the GPU, if there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def array_name(spec, leaf: str) -> str:
    """Name of a leaf of the state in the report."""
    return {"ssm": "state"}.get(leaf, leaf.replace("extra.", {"compact": "window ", "replay": "history "}.get(spec.mode, "")))


@dataclass(frozen=True)
class Round:
    """windows: (slot, tokens, accepted) of each request, in row order; capacity: token rows with padding; layers: for each
    layer the inputs of its convolution and of its recurrence, NaN in padding rows."""

    windows: tuple
    capacity: int
    layers: tuple


def make_rounds(spec, slots, count: int, g, device: str, pad: int = 2) -> list[Round]:
    """Random rounds over `slots`: permuted rows, windows of 1..W tokens of which the first is full, random acceptance."""
    import torch

    from benchmarks import twins

    draw = twins.agreeing_core if device == "cpu" else partial(twins.random_inputs, device=device)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=g))

    rounds, capacity = [], len(slots) * spec.width + pad
    for _ in range(count):
        order = [slots[i] for i in torch.randperm(len(slots), generator=g).tolist()]
        widths = [spec.width, *(number(1, spec.width) for _ in order[1:])]
        windows = tuple((s, w, number(1, w)) for s, w in zip(order, widths, strict=True))
        layers, live = [], sum(widths)
        for _ in range(spec.layers):
            x = torch.randn(capacity, spec.channels, generator=g).to(twins.ACT[spec.act_dtype]).to(device)
            inputs = draw(spec, capacity, g)
            layers.append((pick_rows(x, range(live), capacity), pick_inputs(inputs, range(live), capacity)))
        rounds.append(Round(windows, capacity, tuple(layers)))
    return rounds


def pick_rows(x, rows, capacity: int):
    """Token rows `rows` of x [T, ..], then NaN up to `capacity`."""
    import torch

    out = torch.full((capacity, *x.shape[1:]), float("nan"), dtype=x.dtype, device=x.device)
    out[: len(rows)] = x[list(rows)]
    return out


def pick_inputs(inputs, rows, capacity: int):
    """`pick_rows` of every array that has token rows."""
    fixed = ("A_log", "dt_bias")
    return replace(inputs, **{n: pick_rows(x, rows, capacity) for n, x in vars(inputs).items() if n not in fixed})


def play(spec, sides: dict, rounds, weights, count: Count, compare: bool = True) -> list[dict]:
    """Every round on every side, all arrays compared after every verb; returns the outputs of each round and layer."""
    import torch

    import torch_ref

    device, outputs = weights[0][0].device, []
    for r in rounds:
        ids = [s for s, n, _ in r.windows for _ in range(n)]
        at = [t for _, n, _ in r.windows for t in range(n)]
        pad = r.capacity - len(ids)
        ids, at = (torch.tensor(x, dtype=torch.int32, device=device) for x in (ids + [spec.hold] * pad, at + [0] * pad))
        layout = torch_ref.build_layout(spec, ids, at)
        lengths = [a for _, _, a in r.windows] + [0] * (len(layout.slots) - len(r.windows))
        lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        for side in sides.values():
            side.prepare(layout)
        if compare:
            count.states(spec, sides)
        for row, ((x, inputs), weight) in enumerate(zip(r.layers, weights, strict=True)):
            y = {name: side.conv(row, x, *weight) for name, side in sides.items()}
            o = {name: side.forward(row, inputs) for name, side in sides.items()}
            outputs.append(o)
            if compare:
                count.note("output", o)
                if x.is_cuda:
                    count.note("conv output", y)
        if compare:
            count.states(spec, sides)
        for side in sides.values():
            side.accept(lengths)
        if compare:
            count.states(spec, sides)
    return outputs


def run_cell(cell: Cell, *, sides: list[str], rounds: int, plant: bool) -> dict:
    """One cell as a dictionary; an exception is part of the result, so that one cell cannot end the run."""
    exact_cpu()
    import traceback

    import torch

    from benchmarks import twins

    device, count, error, began = twins.device(), Count(), None, time.time()
    if device == "cpu":
        torch.set_num_threads(1)
    check = {"twins": check_twins, "launch": check_launch, "row": check_row, "checkpoint": check_checkpoint}[cell.check]
    try:
        with planted() if plant else contextlib.nullcontext():
            check(cell, sides, rounds, torch.Generator().manual_seed(hash_of(cell)), device, count)
    except Exception:  # reported, and the run fails
        error = traceback.format_exc()
    differing = {array: {pair: int(n) for pair, n in pairs.items()} for array, pairs in count.differing.items()}
    return vars(cell) | {
        "differing": differing, "compared": dict(count.compared), "error": error, "seconds": round(time.time() - began, 1)
    }  # fmt: skip


def hash_of(cell: Cell) -> int:
    """A seed for every cell, the same in every process."""
    import zlib

    return zlib.crc32(repr(cell).encode())


def setup(spec, batch: int, g, device: str):
    """(slots of the requests, poisoned state, convolution weights of every layer)."""
    import torch

    from benchmarks import twins

    slots = torch.randperm(spec.hold, generator=g)[:batch].tolist()
    normal = lambda *s: torch.randn(s, generator=g).to(device)  # noqa: E731
    weights = [(normal(spec.channels, spec.conv_width), normal(spec.channels)) for _ in range(spec.layers)]
    return slots, twins.poisoned_state(spec, slots, g, device), weights


def empty_pages(spec, n: int, device: str):
    """n pages full of NaN."""
    import torch_ref

    pages = torch_ref.init_pages(spec, n, device)
    pages.ssm.fill_(float("nan"))
    pages.conv.fill_(float("nan"))
    return pages


def story(cell: Cell, spec, sides: dict, rounds: int, slots, weights, g, device: str, count: Count) -> None:
    """Rounds, export, merge, a round, snapshot, restore into other slots, a round."""
    import torch

    play(spec, sides, make_rounds(spec, slots, rounds, g, device), weights, count)
    ids, empty = torch.randperm(cell.batch + 1, generator=g)[: cell.batch].tolist(), empty_pages(spec, cell.batch + 1, device)
    pages = {name: side.export(empty, ids, slots, cell.batch) for name, side in sides.items()}
    count.note("page state", {name: p.ssm for name, p in pages.items()})
    count.note("page conv", {name: p.conv for name, p in pages.items()})
    pages = next(iter(pages.values()))
    for side in sides.values():
        side.merge(slots[: (cell.batch + 1) // 2])
    count.states(spec, sides)
    play(spec, sides, make_rounds(spec, slots, 1, g, device), weights, count)
    copies = {name: side.snapshot(slots) for name, side in sides.items()}
    count.note("snapshot conv", {name: x[0] for name, x in copies.items()})
    count.note("snapshot state", {name: x[1] for name, x in copies.items()})
    others = torch.randperm(spec.hold, generator=g)[: cell.batch].tolist()
    for side in sides.values():
        side.restore(pages, ids, others, cell.batch)
    count.states(spec, sides)
    play(spec, sides, make_rounds(spec, others, 1, g, device), weights, count)


def check_twins(cell: Cell, names, rounds: int, g, device: str, count: Count) -> None:
    """Every implementation against the first."""
    from benchmarks.twins import make_side

    spec = cell.spec()
    slots, state, weights = setup(spec, cell.batch, g, device)
    names = names[1:] if cell.mode == "precompute" else names
    sides = {name: make_side(name, spec, state) for name in names}
    story(cell, spec, sides, rounds, slots, weights, g, device, count)


def check_launch(cell: Cell, names, rounds: int, g, device: str, count: Count) -> None:
    """Every kernel implementation in every launch configuration against its own default."""
    from benchmarks.twins import make_side

    spec = cell.spec()
    slots, state, weights = setup(spec, cell.batch, g, device)
    played = make_rounds(spec, slots, 2, g, device)
    # interpret mode has no warps
    launches = [(bv, warps) for bv, warps in LAUNCHES if bv <= spec.v_dim and (device == "cuda" or warps == 1)]
    for name in names[1:]:
        sides = {name: make_side(name, spec, state)}
        sides |= {f"{name} {bv}x{warps}": make_side(name, spec, state, (bv, warps)) for bv, warps in launches}
        play(spec, sides, played, weights, count)


def slot_rows(spec, arrays: dict, slot: int) -> dict:
    """What a slot owns in every array of a state."""
    out = {}
    for name, x in arrays.items():
        rows = spec.rows_per_slot if name == "ssm" else 1
        out[name] = x[slot : slot + 1] if x.ndim == 1 else x[:, slot * rows : (slot + 1) * rows]
    return out


def check_row(cell: Cell, names, rounds: int, g, device: str, count: Count) -> None:
    """One request among the others, and the same tokens alone in another slot, pool and bucket."""
    from benchmarks.twins import make_side, poisoned_state
    from torch_ref.state import leaves

    spec = cell.spec()
    small = replace(spec, slots=4)
    slots, state, weights = setup(spec, cell.batch, g, device)
    slot, other = slots[-1], 1
    lone = poisoned_state(small, [], g, device)
    for x, y in zip(slot_rows(spec, leaves(state), slot).values(), slot_rows(small, leaves(lone), other).values(), strict=True):
        y.copy_(x)
    played, alone, spans = make_rounds(spec, slots, 3, g, device), [], []
    for r in played:
        i = next(i for i, w in enumerate(r.windows) if w[0] == slot)
        first, (_, n, a) = sum(w[1] for w in r.windows[:i]), r.windows[i]
        rows, capacity = range(first, first + n), spec.width + 5
        layers = tuple((pick_rows(x, rows, capacity), pick_inputs(y, rows, capacity)) for x, y in r.layers)
        alone.append(Round(((other, n, a),), capacity, layers))
        spans += [(first, n)] * spec.layers
    for name in names:
        side, apart = make_side(name, spec, state), make_side(name, small, lone)
        among = play(spec, {name: side}, played, weights, count, compare=False)
        single = play(small, {name: apart}, alone, weights, count, compare=False)
        pair = name, f"{name} alone"
        for x, y, (first, n) in zip(among, single, spans, strict=True):
            count.note("output", dict(zip(pair, (x[name][first : first + n], y[name][:n]), strict=True)))
        mine, theirs = slot_rows(spec, side.arrays(), slot), slot_rows(small, apart.arrays(), other)
        for leaf in mine:
            count.note(array_name(spec, leaf), dict(zip(pair, (mine[leaf], theirs[leaf]), strict=True)))


def check_checkpoint(cell: Cell, names, rounds: int, g, device: str, count: Count) -> None:
    """The same tokens in every mode from the same pages; the exported pages are equal, and so are outputs of compact."""
    from benchmarks.twins import make_side, poisoned_state

    modes = ["native", *(["compact"] if cell.width > 1 else []), "replay"]
    specs = {mode: cell.spec(mode=mode) for mode in modes}
    spec = specs["native"]
    slots, _, weights = setup(spec, cell.batch, g, device)
    pages = empty_pages(spec, cell.batch, device)
    for x in (pages.ssm, pages.conv):
        x.copy_(0.3 * pick_normal(x.shape, g))
    played = make_rounds(spec, slots, cell.history // ((cell.width + 1) // 2) + 2, g, device)
    order = list(range(cell.batch))
    for name in names:
        found, outputs = {}, {}
        for mode in modes:
            side = make_side(name, specs[mode], poisoned_state(specs[mode], [], g, device))
            side.restore(pages, order, slots, cell.batch)
            outputs[mode] = play(specs[mode], {name: side}, played, weights, count, compare=False)
            found[f"{name} {mode}"] = side.export(empty_pages(spec, cell.batch, device), order, slots, cell.batch)
        count.note("page state", {key: p.ssm for key, p in found.items()})
        count.note("page conv", {key: p.conv for key, p in found.items()})
        for native, compact in zip(outputs["native"], outputs.get("compact", ()), strict=False):
            count.note("output", {f"{name} native": native[name], f"{name} compact": compact[name]})


def pick_normal(shape, g):
    """Standard normal values, drawn on the CPU."""
    import torch

    return torch.randn(shape, generator=g)


@contextlib.contextmanager
def planted():
    """In the Pallas kernels, d = (v - S k^) * beta becomes v * beta - (S k^) * beta: equal on paper, other roundings."""
    import pkgutil
    from importlib import import_module

    import kernels_pallas
    from kernels_pallas import recurrence

    sound = recurrence.step

    def step(s, k_hat, v, decay, beta, levels, interpret):
        decay = decay if isinstance(decay, list) else [decay] * len(s)
        s = [x * a for x, a in zip(s, decay, strict=True)]
        d = v * beta - recurrence.read(s, k_hat, levels, interpret) * beta
        wide = recurrence.spread(d, levels)
        return [x + wide * k for x, k in zip(s, k_hat, strict=True)], d

    modules = [import_module(f"kernels_pallas.{m.name}") for m in pkgutil.iter_modules(kernels_pallas.__path__)]
    modules = [m for m in modules if getattr(m, "step", None) is sound]
    try:
        for module in modules:
            module.step = step
        yield
    finally:
        for module in modules:
            module.step = sound
