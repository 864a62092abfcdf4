"""State against a float64 recurrence after many tokens: relative L2 of the state, by rule, mode, gate and state dtype."""

from __future__ import annotations

import argparse

import numpy as np

from benchmarks import record

GATES = {"slow": (-3.0, -3.0), "mild": (0.0, -3.0)}  # (A_log, dt_bias)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command-line options."""
    parser.add_argument("--tokens", type=record.at_least(16), default=2048, help="tokens decoded (default: 2048)")
    parser.add_argument("--dim", type=record.at_least(1), default=64, help="K = V (default: 64)")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 4], help="verify widths (default: 1 4)")


def run(args: argparse.Namespace) -> dict:
    """Decode `tokens` tokens, all drafts right, bf16 activations; `ok` is False when an fp32 state misses 1e-5."""
    import jax
    import jax.numpy as jnp

    import jax_ssm as js

    uneven = [w for w in args.widths if w < 1 or args.tokens % w]
    if uneven:
        raise ValueError(f"--widths {uneven} is not allowed: each must divide --tokens {args.tokens}")
    cells, ok = [], True
    for rule in ("gdn", "kda"):
        heads = 4 if rule == "gdn" else 2
        for gate, (a_log, dt_bias) in GATES.items():
            rng = np.random.default_rng(0)
            n, k, g = args.tokens, args.dim, args.dim if rule == "kda" else 1
            draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)  # noqa: E731, B023
            x = dict(q=draw(n, 2, k), k=draw(n, 2, k), v=draw(n, heads, k), a=draw(n, heads * g), b=draw(n, heads))
            params = np.full(heads, a_log, np.float32), np.full(heads * g, dt_bias, np.float32)
            exact = recurrence({name: np.asarray(v, np.float64) for name, v in x.items()}, *params)
            for ssm in ("fp32", "bf16"):
                for mode in ("native", "compact", "replay"):
                    for width in args.widths:
                        if mode == "compact" and width == 1:
                            continue
                        record.say(f"{rule} {gate} {ssm} {mode} W={width}")
                        spec = js.SSMSpec(rule, 1, 2, 2, 2, heads, k, k, width, mode, 16, "bf16", ssm)

                        def body(state, x, spec=spec, params=params):
                            ids = jnp.zeros(spec.width, jnp.int32)
                            layout = js.build_layout(spec, ids, jnp.arange(spec.width), fixed=True)
                            state, receipt = js.prepare(spec, state, layout)
                            state, o = js.forward(
                                spec, state, receipt, 0, js.LinearInputs(**x, A_log=params[0], dt_bias=params[1])
                            )
                            lengths = jnp.full(1, spec.width, jnp.int32)
                            return js.accept(spec, state, js.StateAcceptance((receipt,), lengths)), o

                        rounds = jax.tree.map(lambda v, w=width: v.reshape(n // w, w, *v.shape[1:]), x)  # noqa: B023
                        state, _ = jax.jit(lambda s, r: jax.lax.scan(body, s, r))(js.init_state(spec), rounds)  # noqa: B023
                        _, pages = js.snapshot(spec, state, jnp.zeros(1, jnp.int32))
                        got = np.asarray(pages[0, 0], np.float64)
                        error = float(np.linalg.norm(got - exact) / np.linalg.norm(exact))
                        ok &= ssm == "bf16" or error <= 1e-5
                        cells.append(dict(rule=rule, gate=gate, ssm=ssm, mode=mode, width=width, relative_l2=error))
    return {"ok": bool(ok), "tokens": args.tokens, "k_dim": args.dim, "cells": cells}


def recurrence(x: dict, a_log: np.ndarray, dt_bias: np.ndarray) -> np.ndarray:
    """Final state [HV, V, K] of the plain float64 recurrence over tokens."""
    heads = len(a_log)
    norm = lambda y: y / np.sqrt(np.sum(y * y, -1, keepdims=True) + 1e-6)  # noqa: E731
    k = np.repeat(norm(x["k"]), heads // x["k"].shape[1], axis=1)
    g = -np.exp(np.float64(a_log))[:, None] * np.log1p(np.exp(x["a"] + np.float64(dt_bias))).reshape(len(k), heads, -1)
    decay, beta = np.exp(g), 1 / (1 + np.exp(-x["b"]))
    s = np.zeros((heads, x["v"].shape[2], k.shape[2]))
    for t in range(len(k)):
        s = s * decay[t][:, None, :]
        d = beta[t][:, None] * (x["v"][t] - np.einsum("hvk,hk->hv", s, k[t]))
        s = s + d[:, :, None] * k[t][:, None, :]
    return s


def table(data: dict) -> tuple[list[str], list[list[str]]]:
    """Column heads and rows for a person."""
    rows = [[c["rule"], c["gate"], c["ssm"], c["mode"], str(c["width"]), f"{c['relative_l2']:.1e}"] for c in data["cells"]]
    return ["rule", "gate", "state", "mode", "W", "relative L2"], rows


def brief(data: dict) -> tuple[list[str], list[list[str]]]:
    """Column heads and rows for a document: a row a rule, gate and state dtype, a column a mode, all its widths."""
    modes = list(dict.fromkeys(c["mode"] for c in data["cells"]))
    groups: dict[tuple, dict[str, list[float]]] = {}
    for c in data["cells"]:
        groups.setdefault((c["rule"], c["gate"], c["ssm"]), {}).setdefault(c["mode"], []).append(c["relative_l2"])
    told = lambda values: " – ".join(dict.fromkeys(f"{x:.1e}" for x in (min(values), max(values)))) if values else "-"  # noqa: E731
    rows = [[*key, *(told(found.get(mode)) for mode in modes)] for key, found in groups.items()]
    return ["rule", "gate", "state", *modes], rows
