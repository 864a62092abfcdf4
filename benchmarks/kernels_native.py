"""Native and compact kernels on one GPU: bits against PyTorch eager, then device time, Pallas and Triton in one process.

Every case runs one layer of a round through the public verbs, prologue included: torch_ref with kernels="eager" (the
reference), torch_ref with kernels="triton", and jax_ssm with implementation="pallas" and, where jax-triton is installed,
"triton" (`jaxtriton`), all from the same bits. Then each kernel is timed by its device durations (CUPTI through the PyTorch
profiler) over calls on other random slots of a pool far larger than L2. Times are microseconds a layer call, medians,
summed over the kernels of the call.

    python -m benchmarks.kernels_native --out results.json [--budget seconds] [--batches 128 8 1]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from functools import partial

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import torch
import triton
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import jax_ssm
import torch_ref
from jax_ssm.executors import accept as jax_accept
from jax_ssm.executors import forward as jax_forward
from jax_ssm.gates import LinearInputs as JaxInputs
from jax_ssm.kernels import refusal
from jax_ssm.spec import KernelConfig, SSMSpec
from torch_ref.gates import LinearInputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAUNCHES = ((8, 1), (16, 1), (16, 2), (32, 4))
POOL_BYTES = 1.36e9
CALLS = 24
ACCEPTED = 3


def make_spec(rule: str, mode: str, ssm: str, width: int, batch: int) -> SSMSpec:
    heads = dict(q_heads=16, k_heads=16, v_heads=32) if rule == "gdn" else dict(q_heads=32, k_heads=32, v_heads=32)
    rows = width if mode == "native" else 1
    slots = max(int(POOL_BYTES / (rows * 32 * 128 * 128 * (4 if ssm == "fp32" else 2))), batch) + 1
    return SSMSpec(rule=rule, layers=1, slots=slots, k_dim=128, v_dim=128, width=width, mode=mode, ssm_dtype=ssm, **heads)


class Case:
    """Random state, inputs and slot sets of one spec and batch, in torch on the GPU."""

    def __init__(self, spec: SSMSpec, batch: int):
        self.spec, self.batch = spec, batch
        g = torch.Generator(DEVICE).manual_seed(1)
        tokens = batch * spec.width

        def normal(*shape, dtype=torch.bfloat16):
            return torch.randn(shape, generator=g, device=DEVICE).to(dtype)

        self.inputs = LinearInputs(
            normal(tokens, spec.q_heads, 128), normal(tokens, spec.k_heads, 128), normal(tokens, spec.v_heads, 128),
            normal(tokens, spec.v_heads * spec.gates), normal(tokens, spec.v_heads),
            normal(spec.v_heads, dtype=torch.float32), normal(spec.v_heads * spec.gates, dtype=torch.float32) - 3.0,
        )  # fmt: skip
        self.state = torch_ref.init_state(spec, DEVICE)
        self.state.ssm.copy_(torch.randn(self.state.ssm.shape, generator=g, device=DEVICE))
        self.state.ssm[:, spec.hold * spec.rows_per_slot :] = 0
        self.state.accepted[: spec.hold] = torch.randint(spec.width, (spec.hold,), generator=g, device=DEVICE).int()
        order = [torch.randperm(spec.hold, generator=g, device=DEVICE)[:batch] for _ in range(CALLS)]
        self.slots = torch.stack(order).int()
        at = torch.arange(spec.width, device=DEVICE).repeat(batch)
        self.layouts = [
            torch_ref.build_layout(spec, s.repeat_interleave(spec.width), at.int(), fixed=True) for s in self.slots[:CALLS]
        ]

    def fresh(self):
        extra = self.state.extra
        if extra is not None:
            extra = type(extra)(**{name: x.clone() for name, x in vars(extra).items()})
        s = self.state
        return torch_ref.ConvSSMState(s.ssm.clone(), s.conv.clone(), s.accepted.clone(), extra)

    def torch_forward(self, state, receipts, i: int):
        """One layer forward on slot set i; returns outputs."""
        return torch_ref.forward(self.spec, state, receipts[i], 0, self.inputs)[1]

    def torch_accept(self, state, receipts, i: int) -> None:
        """The commit of mode "compact"."""
        if self.spec.mode == "compact":
            lengths = torch.full((self.batch,), ACCEPTED, device=DEVICE)
            torch_ref.accept(self.spec, state, torch_ref.StateAcceptance((receipts[i],), lengths))

    def receipts(self, state, calls: int, **options):
        return [torch_ref.prepare(self.spec, state, layout, **options)[1] for layout in self.layouts[:calls]]

    def torch_rounds(self, state, receipts) -> None:
        for i in range(len(receipts)):
            self.torch_forward(state, receipts, i)
            self.torch_accept(state, receipts, i)

    def jax_rounds(self, config: KernelConfig):
        """A jitted function (state, o, n) -> (state, o): rounds on slot sets 0..n-1."""
        spec = self.spec
        inputs = JaxInputs(**{name: to_jax(x) for name, x in vars(self.inputs).items()})
        layout = self.layouts[0]
        fields = {name: to_jax(x) for name, x in vars(layout).items() if name != "fixed"}
        base = jax_ssm.DecodeLayout(**fields, fixed=True)
        table, accepted = to_jax(self.slots), to_jax(self.state.accepted)
        lengths = jnp.full(self.batch, ACCEPTED, jnp.int32)

        @partial(jax.jit, donate_argnums=(0, 1))
        def run(state, o, n, inputs, table):
            def body(i, carry):
                state, _ = carry
                slots = table[i]
                receipt = jax_ssm.SSMForward(base.replace(slots=slots), accepted[slots], spec.mode, config, spec.state_key)
                state, o = jax_forward(spec, state, receipt, jnp.int32(0), inputs)
                if spec.mode == "compact":
                    state = jax_accept(spec, state, jax_ssm.StateAcceptance((receipt,), lengths))
                return state, o

            return jax.lax.fori_loop(0, n, body, (state, o))

        return lambda state, o, n: run(state, o, jnp.int32(n), inputs, table)

    def jax_state(self):
        s = self.state
        extra = s.extra
        if extra is not None:
            extra = jax_ssm.state.CompactWindow(**{name: to_jax(x) for name, x in vars(extra).items()})
        o = jnp.zeros(self.inputs.v.shape, jnp.bfloat16)
        return jax_ssm.state.ConvSSMState(to_jax(s.ssm), to_jax(s.conv), to_jax(s.accepted), extra), o


def to_jax(x: torch.Tensor):
    torch.cuda.synchronize()
    return jnp.copy(jax.dlpack.from_dlpack(x.contiguous()))


def to_torch(x) -> torch.Tensor:
    return torch.from_dlpack(jax.block_until_ready(x))


def different(a: torch.Tensor, b: torch.Tensor) -> int:
    kind = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return int((a.contiguous().view(kind) != b.contiguous().view(kind)).sum())


def device_times(fn) -> dict[str, list[float]]:
    """Durations in microseconds of every kernel that `fn` launches, by name."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        fn()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for e in p.events():
        if e.device_type == DeviceType.CUDA:
            times.setdefault(e.name, []).append(e.time_range.elapsed_us())
    return times


def kernel_sum(times: dict[str, list[float]], parts: dict[str, str]) -> dict[str, float]:
    """Median duration of each named kernel, and their sum. parts: {label: part of the kernel's name}."""
    out = {}
    for label, part in parts.items():
        found = [t for name, ts in times.items() if part in name for t in ts]
        if found:
            out[label] = round(statistics.median(found), 2)
    out["sum"] = round(sum(out.values()), 2)
    return out


def graph_span(fn, calls: int) -> float:
    """Microseconds a call of a CUDA graph of `calls` calls fn(i), replayed."""
    fn(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            fn(i)
    times = []
    for _ in range(6):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / calls)
    return round(statistics.median(times), 2)


def copy_rate() -> float:
    """TB/s of a device-to-device copy, bytes read plus written."""
    x = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    y = torch.empty_like(x)
    times = device_times(lambda: [y.copy_(x) for _ in range(10)])
    longest = max(times.values(), key=sum)
    return 2 * x.numel() / statistics.median(longest) / 1e6


PARTS = ("prologue", "native", "compact", "commit")
TORCH_PARTS = {part: f"_{part}_kernel" for part in PARTS}
JAX_PARTS = {part: f"ssm_{part}" for part in PARTS}


def run_triton(case: Case, row: dict, want, want_state, config: KernelConfig) -> None:
    state = case.fresh()
    receipts = case.receipts(state, CALLS, kernels="triton", config=config)
    o = case.torch_forward(state, receipts, 0)
    case.torch_accept(state, receipts, 0)
    row["triton_bits"] = dict(o=different(o, want), ssm=different(state.ssm, want_state.ssm))
    times = device_times(partial(case.torch_rounds, state, receipts))
    row["triton"] = kernel_sum(times, TORCH_PARTS)
    row["raw"] |= {name: ts for name, ts in times.items() if any(part in name for part in TORCH_PARTS.values())}
    row["triton_span"] = graph_span(partial(case.torch_forward, state, receipts), CALLS)


def run_jax(name: str, implementation: str, case: Case, row: dict, want, want_state, config: KernelConfig) -> None:
    if (reason := refusal(implementation)) is not None:
        raise NotImplementedError(reason)
    start, parts = time.time(), JAX_PARTS if implementation == "pallas" else TORCH_PARTS
    run = case.jax_rounds(replace(config, implementation=implementation))
    state, o = jax.block_until_ready(run(*case.jax_state(), 1))
    row[f"{name}_first_s"] = round(time.time() - start, 2)
    row[f"{name}_bits"] = dict(o=different(to_torch(o), want), ssm=different(to_torch(state.ssm), want_state.ssm))
    times = device_times(lambda: jax.block_until_ready(run(state, o, CALLS)))
    row[name] = kernel_sum(times, parts)
    mine = {kernel: any(part in kernel for part in parts.values()) for kernel in times}
    row["raw"] |= {f"{name} {kernel}": ts for kernel, ts in times.items() if mine[kernel]}
    row[f"{name}_other"] = {kernel[:40]: round(sum(ts) / CALLS, 2) for kernel, ts in times.items() if not mine[kernel]}


def run_case(rule, mode, ssm, width, batch, launches, record) -> None:
    spec = make_spec(rule, mode, ssm, width, batch)
    case = Case(spec, batch)
    want_state = case.fresh()
    receipts = case.receipts(want_state, 1)
    want = case.torch_forward(want_state, receipts, 0)
    case.torch_accept(want_state, receipts, 0)
    for block_v, warps in launches:
        row = dict(rule=rule, mode=mode, ssm=ssm, width=width, batch=batch, block_v=block_v, num_warps=warps, raw={})
        in_jax = {name: partial(run_jax, name, kind) for name, kind in (("pallas", "pallas"), ("jaxtriton", "triton"))}
        for name, run in {"triton": run_triton, **in_jax}.items():
            try:
                run(case, row, want, want_state, KernelConfig("pallas", block_v, warps))
            except Exception as e:  # a failing variant must not end the run
                row[f"{name}_error"] = repr(e)[:400]
        record(row)


CASES = (
    ("gdn", "native", "fp32", 1), ("gdn", "native", "bf16", 1), ("gdn", "native", "fp32", 4), ("gdn", "compact", "fp32", 4),
    ("gdn", "native", "bf16", 4), ("gdn", "compact", "bf16", 4), ("kda", "native", "fp32", 1), ("kda", "native", "bf16", 1),
    ("kda", "native", "fp32", 4), ("kda", "compact", "fp32", 4), ("kda", "native", "bf16", 4), ("kda", "compact", "bf16", 4),
)  # fmt: skip


def summary(row) -> str:
    def side(name):
        bits = row.get(f"{name}_bits")
        bits = "same" if bits and not any(bits.values()) else f"BITS {bits}"
        return f"{bits} {row.get(name)} {row.get(f'{name}_error', '')}"

    key = " ".join(str(row[name]) for name in ("rule", "mode", "ssm", "width", "batch", "block_v", "num_warps"))
    return f"{key} | T {side('triton')} span {row.get('triton_span')} | P {side('pallas')} | J {side('jaxtriton')}"


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="kernels_native.json")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no further case starts")
    parser.add_argument("--batches", type=int, nargs="*", default=[128])
    parser.add_argument("--launches", nargs="*", default=[f"{b}x{w}" for b, w in LAUNCHES], help="block_v x num_warps")
    parser.add_argument("--cases", nargs="*", default=None, help="such as gdn-native-fp32-1")
    args = parser.parse_args(argv)
    start = time.time()
    launches = [tuple(int(n) for n in launch.split("x")) for launch in args.launches]
    cases = CASES if args.cases is None else [(*c.split("-")[:3], int(c.split("-")[3])) for c in args.cases]
    result = dict(
        device=torch.cuda.get_device_name(),
        versions={"jax": jax.__version__, "torch": torch.__version__, "triton": triton.__version__, "python": sys.version},
        command=" ".join(sys.argv),
        copy_tb_s=round(copy_rate(), 3),
        calls=CALLS,
        rows=[],
    )
    print("copy rate", result["copy_tb_s"], "TB/s", flush=True)

    def record(row):
        print(f"[{time.time() - start:5.0f}] " + summary(row), flush=True)
        result["rows"].append(row)
        with open(args.out, "w") as f:
            json.dump(result, f)

    for batch in args.batches:
        for case in cases:
            if time.time() - start > args.budget:
                print("budget spent before", case, batch)
                continue
            run_case(*case, batch, launches, record)


if __name__ == "__main__":
    main()
