"""Native decode and verify beside flash-linear-attention (package fla-core), in one run on one GPU.

Ours: the Triton kernels of mode native, called by torch_ref, on a pool with indirect slots, prologue included. Theirs:
  fla              fused_recurrent_gated_delta_rule / fused_recurrent_kda: contiguous states, no slots, returns a new fp32
                   state; a window of W tokens writes one state, not W
  fla pool         the inner fused_recurrent_kda_fwd on the same pool with slots, in place, one snapshot a token. GDN goes
                   through it with its gate repeated over K, so it reads K gates a head instead of 1
Norms, gates and sigmoid run inside their kernels. Times are sums of the durations of the kernels of a call, medians over calls
on other slots of a pool larger than the L2 cache; turns in A/B and B/A order. Of ours, PyTorch's index arithmetic is left out.
Outputs are compared first, so that the same function is timed.
"""

from __future__ import annotations

import argparse
import statistics
import time

from benchmarks import record

CLOSE = 0.02  # relative distance of bf16 outputs whose sums run in another order


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command-line options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rule", nargs="+", choices=("gdn", "kda"), default=["gdn", "kda"], help="default: both")
    parser.add_argument("--width", nargs="+", type=record.at_least(1), default=[1, 4], help="W (default: 1 4)")
    parser.add_argument("--batch", nargs="+", type=record.at_least(1), default=[1, 8, 128], help="default: 1 8 128")
    parser.add_argument("--state-dtype", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"], help="default: both")
    parser.add_argument("--calls", type=record.at_least(4), default=24, help="timed calls of each turn (default: 24)")


def run(args: argparse.Namespace) -> dict:
    """Compare outputs, then time; `ok` is False when outputs are further apart than rounding explains, or a call fails."""
    from benchmarks import device_time

    try:
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"the peer is not installed ({error}): pip install fla-core, see https://pypi.org/project/fla-core"
        ) from None
    device_time.require_gpu()
    from benchmarks.pool import Plan, make_spec

    began, copy, cells = time.time(), device_time.copy_rate(), []
    for rule in args.rule:
        for width in args.width:
            for ssm in args.state_dtype:
                for batch in args.batch:
                    fields = dict(rule=rule, width=width, ssm=ssm, batch=batch)
                    plan = Plan(make_spec(rule, "native", width, ssm, 1, 16), batch, max(1, 3 * width // 4))
                    cell = fields | measure(plan, args.calls) | {"copy_bytes_per_us": copy}
                    cells.append(cell)
                    told = " ".join(f"{name} {c['us']:.1f}" for name, c in cell["contenders"].items())
                    record.say(f"[{time.time() - began:4.0f} s] {fields} {told} {cell['errors'] or ''}")
    ok = all(not c["errors"] and all(d <= CLOSE for d in c["distance"].values()) for c in cells)
    return {"ok": ok, "cells": cells}


def measure(plan, calls: int) -> dict:
    """{contender: median, least and most microseconds of a call}, and how far outputs are from ours."""
    import gc

    import torch

    from benchmarks.device_time import OTHER, label, per_call
    from benchmarks.pool import Pool

    pool, errors, distance = Pool(plan), {}, {}
    contenders = {"ours": pool.triton()} | theirs(pool)
    first = {}
    for name, call in list(contenders.items()):
        try:
            first[name] = call(0)[0].float().reshape(-1)
            for i in range(1, 4):
                call(i)
        except Exception as error:  # a peer that does not run here must not end the run
            errors[name] = f"{error!r:.400}"
            del contenders[name]
    for name, o in first.items():
        distance[name] = float((o - first["ours"]).norm() / first["ours"].norm())
    samples = {name: [] for name in contenders}
    for turn in (list(contenders), list(reversed(contenders))):
        for name in turn:
            keep = (lambda kernel: label(kernel) != OTHER) if name == "ours" else (lambda kernel: True)
            samples[name] += per_call(contenders[name], calls, keep)
    found = {name: dict(us=statistics.median(us), spread=[min(us), max(us)], samples=us) for name, us in samples.items()}
    del pool, contenders, first
    gc.collect()
    torch.cuda.empty_cache()
    return {"contenders": found, "distance": distance, "errors": errors}


def theirs(pool) -> dict:
    """{contender: function of the round number that returns [outputs]} of the peer, on copies of the pool's states."""
    import torch
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
    from fla.ops.kda import fused_recurrent_kda
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    spec, x, batch, width = pool.spec, pool.inputs[0], pool.plan.batch, pool.spec.width
    gdn, groups = spec.rule == "gdn", len(pool.layouts)
    window = lambda y, *last: y.reshape(batch, width, *last)  # noqa: E731
    q, k, v = (window(y, *y.shape[1:]) for y in (x.q, x.k, x.v))
    a, b = window(x.a, spec.v_heads) if gdn else window(x.a, spec.v_heads, spec.k_dim), window(x.b, spec.v_heads)
    inside = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, state_v_first=True)
    slots = [layout.slots.long() for layout in pool.layouts]
    firsts = [pool.state.ssm[0, s * width].contiguous() for s in slots]
    rule = fused_recurrent_gated_delta_rule if gdn else fused_recurrent_kda

    def contiguous(i: int):
        o, _ = rule(
            q, k, v, g=a, beta=b, initial_state=firsts[i % groups], output_final_state=True, A_log=x.A_log, dt_bias=x.dt_bias,
            **inside,
        )  # fmt: skip
        return [o]

    states, out = pool.state.ssm[0].clone(), torch.empty_like(v)
    wide = a[..., None].expand(*a.shape, spec.k_dim).contiguous() if gdn else a
    bias = x.dt_bias[:, None].expand(-1, spec.k_dim).reshape(-1).contiguous() if gdn else x.dt_bias
    rows = [(s[:, None] * width + torch.arange(width, device=s.device)).int() for s in slots]
    rows = [r if width > 1 else r[:, 0].contiguous() for r in rows]
    accepted = torch.full((batch,), 1, dtype=torch.int32, device="cuda")

    def in_pool(i: int):
        verify = dict(num_accepted_tokens=accepted) if width > 1 else {}
        flat = lambda y: y.reshape(1, batch * width, *y.shape[2:])  # noqa: E731
        o, _ = fused_recurrent_kda_fwd(
            flat(q), flat(k), flat(v), flat(wide), flat(b), A_log=x.A_log, dt_bias=bias, initial_state=states,
            inplace_final_state=True, cu_seqlens=torch.arange(batch + 1, device="cuda") * width,
            ssm_state_indices=rows[i % groups], out=flat(out), **verify, **inside,
        )  # fmt: skip
        return [o]

    return {"fla": contiguous, "fla pool": in_pool}


def table(data: dict) -> tuple[list[str], list[list[str]]]:
    """Column heads and rows for a person: µs a call and layer."""
    rows = []
    for c in data["cells"]:
        row = [c["rule"], str(c["width"]), c["ssm"], str(c["batch"])]
        for name in ("ours", "fla", "fla pool"):
            found = c["contenders"].get(name)
            row.append(f"{found['us']:.1f} [{found['spread'][0]:.1f}, {found['spread'][1]:.1f}]" if found else "-")
        rows.append([*row, f"{max(c['distance'].values(), default=0):.1e}"])
    return ["rule", "W", "state", "B", "ours µs", "fla µs (contiguous)", "fla µs (pool)", "largest distance of outputs"], rows
