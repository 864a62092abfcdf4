"""Replay kernels on one GPU: bits of PyTorch eager, Triton and Pallas, and device times over whole cursor cycles.

`python -m benchmarks.kernels_replay OUT.json`. Times are CUPTI durations of every kernel of a round (prepare, all of one
layer's forward, accept), convolution excluded, summed over one cycle of the cursor and divided by its rounds, folds
included. State and records of other slots are used every round, so that nothing is found in the L2 cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import torch

import jax_ssm
import torch_ref
from benchmarks.device_time import durations
from benchmarks.twins import clone, differing, jax_state, to_jax, to_torch
from jax_ssm.spec import KernelConfig
from torch_ref.spec import SSMSpec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(spec: SSMSpec, tokens: int, g: torch.Generator) -> torch_ref.LinearInputs:
    act = torch_ref.state.dtype(spec.act_dtype)
    normal = lambda *shape, dtype=act: torch.randn(*shape, generator=g, device=DEVICE).to(dtype)  # noqa: E731
    gates = spec.v_heads * spec.gates
    return torch_ref.LinearInputs(
        normal(tokens, spec.q_heads, spec.k_dim), normal(tokens, spec.k_heads, spec.k_dim),
        normal(tokens, spec.v_heads, spec.v_dim), normal(tokens, gates), normal(tokens, spec.v_heads),
        normal(spec.v_heads, dtype=torch.float32) * 0.5, normal(gates, dtype=torch.float32) - 2.0,
    )  # fmt: skip


def pools(h, names="k v decay beta"):
    return tuple(getattr(h, name) for name in names.split())


def triton_prepare(spec, state, layout, launch):
    from kernels_triton import history

    h = state.extra
    history.prepare(state.ssm, pools(h), h.cursor, h.forward_cursor, layout.slots, layout.verify_len, **launch)


def triton_forward(spec, state, layout, row, x, launch, pre_warps=1):
    from kernels_triton import precompute, project

    module = precompute if spec.precompute else project
    h, index = state.extra, (row, layout.slots, layout.verify_len, layout.cu)
    tokens = (x.q, x.k, x.a, x.b, x.A_log, x.dt_bias)
    window = module.coefficients(
        index, h.forward_cursor, tokens, pools(h, "k decay beta"),
        width=spec.width, scale=spec.scale, lower_bound=spec.lower_bound, num_warps=pre_warps,
    )  # fmt: skip
    return module.outputs(index, h.forward_cursor, x.v, window, state.ssm, pools(h, "v d"), gdn=spec.rule == "gdn", **launch)


def jax_inputs(x: torch_ref.LinearInputs) -> jax_ssm.LinearInputs:
    return jax_ssm.LinearInputs(**{name: to_jax(t) for name, t in vars(x).items()})


# -------------------------------------------------------------------------------------------------------------- bits

SMALL = dict(layers=2, slots=9, mode="replay")
GDN, KDA = dict(q_heads=2, k_heads=2, v_heads=4), dict(q_heads=2, k_heads=2, v_heads=2)
CASES = [
    dict(rule="gdn", **GDN, k_dim=128, v_dim=128, width=1, history=16),
    dict(rule="gdn", **GDN, k_dim=128, v_dim=128, width=4, history=16, ssm_dtype="bf16"),
    dict(rule="gdn", q_heads=1, k_heads=2, v_heads=6, k_dim=64, v_dim=128, width=3, history=8),
    dict(rule="gdn", **GDN, k_dim=256, v_dim=64, width=2, history=32),
    dict(rule="gdn", **GDN, k_dim=256, v_dim=64, width=2, history=64, ssm_dtype="bf16", act_dtype="fp32"),
    dict(rule="gdn", **GDN, k_dim=128, v_dim=128, width=16, history=16),
    dict(rule="kda", **KDA, k_dim=128, v_dim=128, width=1, history=16, ssm_dtype="bf16"),
    dict(rule="kda", **KDA, k_dim=128, v_dim=128, width=4, history=16),
    dict(rule="kda", **KDA, k_dim=64, v_dim=128, width=3, history=4, act_dtype="fp32", lower_bound=-5.0),
    dict(rule="kda", **KDA, k_dim=128, v_dim=64, width=10, history=32),
]


def check_bits(case: dict, rounds: int = 14, seed: int = 0) -> dict:
    """Rounds of random windows in all three implementations, raw inputs, NaN in everything that no token wrote."""
    spec = SSMSpec(**SMALL, **case)
    g, rng = torch.Generator(DEVICE).manual_seed(seed), np.random.default_rng(seed)
    state = torch_ref.init_state(spec, DEVICE)
    state.ssm[:, : spec.hold] = torch.randn(state.ssm[:, : spec.hold].shape, generator=g, device=DEVICE).to(state.ssm.dtype)
    for x in vars(state.extra).values():
        if x.ndim > 1:
            x[:, : spec.hold] = float("nan")
    twin = clone(state)
    other, slots, wrong = jax_state(state), [5, 0, 3, 7], {}
    prepare = jax.jit(jax_ssm.prepare, static_argnums=(0, 3))
    forward, accept = jax.jit(jax_ssm.forward, static_argnums=0), jax.jit(jax_ssm.accept, static_argnums=0)
    config, launch = KernelConfig("pallas", block_v=16), dict(block_v=8, num_warps=1)

    def note(name, a, b):
        count = differing(a, b)
        wrong[name] = wrong.get(name, 0) + count
        if count and f"first {name}" not in wrong:
            at = (~((a == b) | (a.isnan() & b.isnan()))).nonzero()
            values = [(tuple(i), float(a[tuple(i)]), float(b[tuple(i)])) for i in at[:: max(1, len(at) // 6)].tolist()]
            wrong[f"first {name}"] = f"round {i} {windows} cursors {state.extra.cursor.tolist()}: {values}"

    for i in range(rounds):
        windows = [(int(s), int(rng.integers(1, spec.width + 1))) for s in rng.permutation(slots)]
        pad = len(slots) * spec.width + 3 - sum(n for _, n in windows)
        ids = torch.tensor([s for s, n in windows for _ in range(n)] + [spec.hold] * pad, dtype=torch.int32, device=DEVICE)
        at = torch.tensor([t for _, n in windows for t in range(n)] + [0] * pad, dtype=torch.int32, device=DEVICE)
        layout = torch_ref.build_layout(spec, ids, at)
        state, receipt = torch_ref.prepare(spec, state, layout)
        triton_prepare(spec, twin, layout, launch)
        other, jax_receipt = prepare(spec, other, jax_ssm.build_layout(spec, to_jax(ids), to_jax(at)), config)
        for row in range(spec.layers):
            x = draw(spec, len(ids), g)
            if i % 3 == 2:
                x.v[0] = float("nan")  # one request is broken; the others must not see it
            state, o = torch_ref.forward(spec, state, receipt, row, x)
            note("triton o", o, triton_forward(spec, twin, layout, row, x, launch))
            other, jax_o = forward(spec, other, jax_receipt, jnp.int32(row), jax_inputs(x))
            note("pallas o", o, to_torch(jax_o))
        lengths = torch.tensor([int(rng.integers(1, n + 1)) for _, n in windows] + [0] * (len(layout.slots) - len(windows)))
        lengths = lengths.int().to(DEVICE)
        for s in (state, twin):
            torch_ref.accept(spec, s, torch_ref.StateAcceptance((receipt,), lengths))
        other = accept(spec, other, jax_ssm.StateAcceptance((jax_receipt,), to_jax(lengths)))
        for name, a, b, c in (
            ("ssm", state.ssm, twin.ssm, other.ssm),
            *((n, getattr(state.extra, n), getattr(twin.extra, n), getattr(other.extra, n)) for n in vars(state.extra)),
        ):
            note(f"triton {name}", a, b)
            note(f"pallas {name}", a, to_torch(c))
    return wrong


def bits_of_all(cases=range(len(CASES)), jobs: int = 8) -> dict:
    """Every case in its own process, a few at a time: compiling is what takes long."""
    out, running, todo = {}, {}, list(cases)
    while todo or running:
        while todo and len(running) < jobs:
            i = todo.pop(0)
            command = [sys.executable, "-m", "benchmarks.kernels_replay", "--case", str(i)]
            running[i] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        i = next(iter(running))
        text = running.pop(i).communicate()[0]
        last = text.strip().splitlines()[-1] if text.strip() else ""
        out[i] = json.loads(last) if last.startswith("{") else {"error": text[-1500:]}
    return out


# ------------------------------------------------------------------------------------------------------------- times


def by_name(events, per: int) -> dict[str, float]:
    total: dict[str, float] = {}
    for name, us in events:
        total[name[:60]] = total.get(name[:60], 0.0) + us / per
    return dict(sorted(total.items(), key=lambda x: -x[1]))


class Bench:
    """A pool of slots in groups of `batch`; every round takes the next group, at the cursors it stands at."""

    def __init__(self, batch: int, spread: bool = False, groups: int | None = None, **fields):
        groups = groups or max(5, 160 // batch)
        self.spec = spec = SSMSpec(layers=1, slots=batch * groups + 1, mode="replay", **fields)
        self.batch, self.groups, self.g = batch, groups, torch.Generator(DEVICE).manual_seed(1)
        self.state = torch_ref.init_state(spec, DEVICE)
        for x in (self.state.ssm, *pools(self.state.extra, "k v d")):
            x.copy_(torch.randn(x.shape, generator=self.g, device=DEVICE))
        self.state.extra.decay.uniform_(0.9, 1.0, generator=self.g)
        self.state.extra.beta.uniform_(0.0, 1.0, generator=self.g)
        order = torch.randperm(spec.hold, generator=self.g, device=DEVICE).int()
        w, self.layouts = spec.width, []
        for i in range(groups):
            ids = order[i * batch : (i + 1) * batch].repeat_interleave(w)
            self.layouts.append(torch_ref.build_layout(spec, ids, torch.arange(w, device=DEVICE).repeat(batch), fixed=True))
        accepted = {1: 1, 4: 3}.get(w, max(1, w // 2))
        self.accepted = torch.full((batch,), accepted, dtype=torch.int32, device=DEVICE)
        # live records at the start of each round of a cycle; the last one folds
        self.cycle = [n for n in range(accepted, spec.history + 1, accepted) if n + w - accepted <= spec.history]
        start = torch.full((spec.slots,), len(self.cycle) - 1, device=DEVICE)
        if spread:
            start = torch.randint(len(self.cycle), (spec.slots,), generator=self.g, device=DEVICE)
        self.state.extra.cursor[:] = torch.tensor(self.cycle, device=DEVICE)[start].int()
        self.inputs = [draw(spec, batch * w, self.g) for _ in range(4)]

    @property
    def rounds(self) -> int:
        """Rounds of one whole cycle of every group."""
        return len(self.cycle) * self.groups

    def triton_round(self, i: int, outputs, fold, pre_warps: int):
        layout = self.layouts[i % self.groups]
        triton_prepare(self.spec, self.state, layout, fold)
        triton_forward(self.spec, self.state, layout, 0, self.inputs[i % 4], outputs, pre_warps)
        self.state.extra.cursor.index_add_(0, layout.slots.long(), self.accepted)

    def time_triton(self, outputs=None, fold=None, pre_warps=None) -> dict:
        outputs, fold = outputs or KernelConfig().launch(self.spec), fold or {}
        pre_warps = pre_warps or (None if self.spec.precompute else 1)
        saved = self.state.extra.cursor.clone()
        for i in range(self.groups):
            self.triton_round(i, outputs, fold, pre_warps)
        self.state.extra.cursor.copy_(saved)
        events = durations(lambda: [self.triton_round(i, outputs, fold, pre_warps) for i in range(self.rounds)])
        self.state.extra.cursor.copy_(saved)
        return by_name(events, self.rounds)

    def time_pallas(self, config: KernelConfig, fold=None) -> dict:
        from kernels_pallas import history, materialize

        spec = self.spec
        history.advance = lambda *a, **k: materialize.advance(*a, **(k | (fold or {})))

        @jax.jit
        def layout_of(ids, at):
            return jax_ssm.build_layout(spec, ids, at, fixed=True)

        def one(state, layout, x, lengths):
            state, receipt = jax_ssm.prepare(spec, state, layout, config)
            state, o = jax_ssm.forward(spec, state, receipt, 0, x)
            return jax_ssm.accept(spec, state, jax_ssm.StateAcceptance((receipt,), lengths)), o

        one = jax.jit(one, donate_argnums=0)
        state = jax_state(self.state)
        ids = [to_jax(lay.slots.repeat_interleave(spec.width)) for lay in self.layouts]
        layouts = [layout_of(x, jnp.zeros_like(x)) for x in ids]
        inputs, lengths = [jax_inputs(x) for x in self.inputs], to_jax(self.accepted)
        began = time.time()
        compiled = one.lower(state, layouts[0], inputs[0], lengths).compile()
        memory, seconds = compiled.memory_analysis(), time.time() - began

        def sweep(n):
            nonlocal state
            for i in range(n):
                state, o = compiled(state, layouts[i % self.groups], inputs[i % 4], lengths)
            jax.block_until_ready(state)

        sweep(self.rounds)  # a whole cycle: back at the cursors it began with
        out = by_name(durations(lambda: sweep(self.rounds)), self.rounds)
        return out | {"(compile s)": seconds, "(temp bytes)": getattr(memory, "temp_size_in_bytes", -1)}


def total(kernels: dict) -> float:
    return sum(us for name, us in kernels.items() if not name.startswith("("))


HEADS = {"gdn": dict(q_heads=16, k_heads=16, v_heads=32), "kda": dict(q_heads=32, k_heads=32, v_heads=32)}


def times(plan) -> list[dict]:
    rows = []
    for name, ssm, w, batch, spread, variants in plan:
        rule, *projection = name.split()
        fields = dict(rule=rule, ssm_dtype=ssm, width=w, history=16, k_dim=128, v_dim=128, **HEADS[rule])
        fields |= dict(zip(["projection"], projection, strict=False))
        bench = Bench(batch, spread, **fields)
        for implementation, *launch in variants:
            try:
                if implementation == "triton":
                    out = bench.time_triton(*launch)
                else:
                    out = bench.time_pallas(KernelConfig("pallas", **(launch[0] if launch else {})), *launch[1:])
            except Exception as error:  # noqa: BLE001 - one variant that does not build must not cost the others
                out = {"(error)": str(error)[:300]}
            row = dict(rule=name, ssm=ssm, w=w, batch=batch, spread=spread, implementation=implementation, launch=str(launch))
            rows.append(row | {"us": total(out), "kernels": out})
            short = {n.replace("_kernel", "")[:22]: round(us, 1) for n, us in list(out.items())[:6]}
            print(
                name, ssm, f"W{w} B{batch}", "spread" if spread else "sync", implementation, launch, f"{total(out):.1f}", short
            )
            sys.stdout.flush()
        del bench
        torch.cuda.empty_cache()
    return rows


def copy_rate(gib: int = 4) -> float:
    a = torch.empty(gib << 28, dtype=torch.float32, device=DEVICE).normal_()
    b = torch.empty_like(a)
    best = min(us for _ in range(5) for _, us in durations(lambda: b.copy_(a)))
    return 2 * a.numel() * 4 / best * 1e-6


def default_plan():
    """Both packages at the launches of their tables: every rule and dtype at B = 128, decode of GDN at small batches."""
    both = [("triton",), ("pallas",)]
    plan = [(rule, ssm, w, 128, False, both) for rule in ("gdn", "kda") for w in (1, 4) for ssm in ("fp32", "bf16")]
    plan += [("gdn precompute", ssm, 4, 128, False, both) for ssm in ("fp32", "bf16")]
    return plan + [("gdn", ssm, 1, batch, False, both) for ssm in ("fp32", "bf16") for batch in (8, 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--case", type=int, help="only the bits of one case, as JSON on standard output")
    parser.add_argument("--bits", default="all", help="cases, comma separated; none")
    args = parser.parse_args()
    if args.case is not None:
        print(json.dumps(check_bits(CASES[args.case])))
        return
    began = time.time()
    result = {"jax": jax.__version__, "torch": torch.__version__, "device": torch.cuda.get_device_name()}
    if args.bits != "none":
        result["bits"] = bits_of_all(range(len(CASES)) if args.bits == "all" else [int(i) for i in args.bits.split(",")])
        for i, wrong in result["bits"].items():
            print("bits", i, {n: c for n, c in wrong.items() if c} or "equal", CASES[i], flush=True)
        print(f"bits took {time.time() - began:.0f} s", flush=True)
    result["copy_TBps"] = copy_rate()
    print(f"copy {result['copy_TBps']:.2f} TB/s")
    result["times"] = times(default_plan())
    print(f"all took {time.time() - began:.0f} s")
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
