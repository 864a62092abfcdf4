"""Fixtures of the torch_ref tests: token streams, rounds, an independent float64 oracle, poison."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import torch

import torch_ref as ref
from torch_ref.executors.replay import live
from torch_ref.spec import SSMSpec
from torch_ref.state import leaves

torch.set_num_threads(1)
SLOTS = [7, 3, 5]  # never 0..B-1 in order
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MODES = ("native", "compact", "replay")
RULES = ("gdn", "kda", "kda_bounded")


def make_spec(rule="gdn", mode="native", **changes) -> SSMSpec:
    heads = dict(q_heads=2, k_heads=2, v_heads=4) if rule == "gdn" else dict(q_heads=2, k_heads=2, v_heads=2)
    base = dict(layers=2, slots=9, k_dim=16, v_dim=8, width=3, history=4, mode=mode, act_dtype="bf16", ssm_dtype="fp32")
    bound = dict(lower_bound=-5.0) if rule == "kda_bounded" else {}
    return SSMSpec(rule=rule[:3], **(base | heads | bound | changes))


# ------------------------------------------------------------------------------------------------------------ inputs


class Tokens:
    """A fixed random token stream per (slot, layer): token number i always has the same raw inputs."""

    def __init__(self, spec: SSMSpec, count: int, seed: int = 0, a_log: float = 0.0, bias: float = -3.0):
        g = torch.Generator().manual_seed(seed)
        act = DTYPES[spec.act_dtype]
        lead = (spec.slots, spec.layers, count)

        def normal(*shape):
            return torch.randn(*lead, *shape, generator=g).to(act)

        self.q, self.k = normal(spec.q_heads, spec.k_dim), normal(spec.k_heads, spec.k_dim)
        self.v, self.a = normal(spec.v_heads, spec.v_dim), normal(spec.v_heads * spec.gates)
        self.b, self.x = normal(spec.v_heads), normal(spec.channels)
        self.A_log = a_log + 0.3 * torch.randn(spec.layers, spec.v_heads, generator=g)
        self.dt_bias = bias + 0.3 * torch.randn(spec.layers, spec.v_heads * spec.gates, generator=g)
        self.weight = torch.randn(spec.layers, spec.channels, spec.conv_width, generator=g)
        self.bias = torch.randn(spec.layers, spec.channels, generator=g)

    def take(self, layer: int, rows: list[tuple[int, int]]) -> ref.LinearInputs:
        """Inputs of one layer for token rows [(slot, token number), ..]; number -1 is zero padding, -2 is NaN."""
        picked = []
        for x in (self.q, self.k, self.v, self.a, self.b):
            fill = {-1: torch.zeros_like(x[0, 0, 0]), -2: torch.full_like(x[0, 0, 0], float("nan"))}
            picked.append(torch.stack([fill[i] if i < 0 else x[s, layer, i] for s, i in rows]))
        return ref.LinearInputs(*picked, self.A_log[layer], self.dt_bias[layer])

    def conv(self, layer: int, rows: list[tuple[int, int]]) -> torch.Tensor:
        zero = torch.zeros_like(self.x[0, 0, 0])
        nan = torch.full_like(zero, float("nan"))
        return torch.stack([{-1: zero, -2: nan}[i] if i < 0 else self.x[s, layer, i] for s, i in rows])


def play(spec, state, tokens, start, widths, accepts, *, slots=None, pad=0, poison=None, use_conv=True, poison_rejected=False):
    """One round. start/widths/accepts: per slot. Returns state, outputs {(layer, slot): [T_r, HV, V]} and conv outputs.

    poison: a callable run on the state between the forward and the accept. poison_rejected: rejected drafts are NaN.
    """
    slots = list(start) if slots is None else slots
    rows = [(s, start[s] + t) for s in slots for t in range(widths[s])]
    if poison_rejected:
        rows = [(s, -2 if i - start[s] >= accepts[s] else i) for s, i in rows]
    ids = torch.tensor([s for s, _ in rows] + [spec.hold] * pad)
    offsets = torch.tensor([t for s in slots for t in range(widths[s])] + [0] * pad)
    rows = rows + [(spec.hold, -2)] * pad
    layout = ref.build_layout(spec, ids, offsets)
    state, receipt = ref.prepare(spec, state, layout)
    outputs = {}
    for layer in range(spec.layers):
        if use_conv:
            x = tokens.conv(layer, rows)
            state, y = ref.conv_forward(spec, state, receipt, layer, x, tokens.weight[layer], tokens.bias[layer])
        state, o = ref.forward(spec, state, receipt, layer, tokens.take(layer, rows))
        if pad:
            assert not o[len(rows) - pad :].any(), "padding rows must be exactly zero"
        at = 0
        for s in slots:
            outputs[layer, s] = o[at : at + accepts[s]]
            if use_conv:
                outputs["conv", layer, s] = y[at : at + accepts[s]]
            at += widths[s]
    if poison:
        poison(state)
    lengths = torch.tensor([accepts[s] for s in slots] + [0] * (layout.slots.shape[0] - len(slots)))
    state = ref.accept(spec, state, ref.StateAcceptance((receipt,), lengths))
    return state, outputs


def run(spec, tokens, rounds, seed=0, slots=SLOTS, **options):
    """Random rounds: returns the state, per slot the number of accepted tokens, and all accepted outputs."""
    g = np.random.default_rng(seed)
    state, start, outputs = ref.init_state(spec), dict.fromkeys(slots, 0), []
    for _ in range(rounds):
        widths = {s: int(g.integers(1, spec.width + 1)) for s in SLOTS}
        accepts = {s: int(g.integers(1, widths[s] + 1)) for s in SLOTS}
        state, out = play(spec, state, tokens, start, widths, accepts, slots=slots, **options)
        start = {s: start[s] + accepts[s] for s in slots}
        outputs.append(out)
    return state, start, outputs


def same_outputs(a, b) -> bool:
    return all(torch.equal(x[key], y[key]) for x, y in zip(a, b, strict=True) for key in x)


def same_pages(spec_a, a, spec_b, b, slots=SLOTS) -> bool:
    return all(torch.equal(x, y) for x, y in zip(ref.snapshot(spec_a, a, slots), ref.snapshot(spec_b, b, slots), strict=True))


def copy_state(state):
    extra = None
    if state.extra is not None:
        extra = type(state.extra)(**{f.name: getattr(state.extra, f.name).clone() for f in fields(state.extra)})
    return ref.ConvSSMState(state.ssm.clone(), state.conv.clone(), state.accepted.clone(), extra)


def same_state(a, b, skip=()) -> bool:
    x, y = leaves(a), leaves(b)
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.int32: torch.int32}
    return all(torch.equal(x[n].view(bits[x[n].dtype]), y[n].view(bits[y[n].dtype])) for n in x if n not in skip)


# ------------------------------------------------------------------------------------------------- float64 oracle


def oracle(spec, tokens, slot, layer, count, state=None):
    """numpy float64 recurrence over the first `count` tokens: returns states [count+1, HV, V, K] and o [count, HV, V]."""
    f = lambda x: x[slot, layer, :count].double().numpy()  # noqa: E731
    q, k, v, a, b = f(tokens.q), f(tokens.k), f(tokens.v), f(tokens.a), f(tokens.b)
    A, bias = tokens.A_log[layer].double().numpy(), tokens.dt_bias[layer].double().numpy()
    s = np.zeros((spec.v_heads, spec.v_dim, spec.k_dim)) if state is None else state
    states, outputs = [s.copy()], []
    for t in range(count):
        x = (a[t] + bias).reshape(spec.v_heads, spec.gates)
        if spec.lower_bound is not None:
            g = spec.lower_bound / (1 + np.exp(-np.exp(A)[:, None] * x))
        else:
            g = -np.exp(A)[:, None] * np.logaddexp(0, x)
        s, o = s.copy(), np.zeros((spec.v_heads, spec.v_dim))
        for head in range(spec.v_heads):
            kn = k[t, head // (spec.v_heads // spec.k_heads)]
            qn = q[t, head // (spec.v_heads // spec.q_heads)]
            kn, qn = kn / np.sqrt(kn @ kn + 1e-6), qn / np.sqrt(qn @ qn + 1e-6) * spec.k_dim**-0.5
            s[head] = s[head] * np.exp(g[head])
            u = (v[t, head] - s[head] @ kn) / (1 + np.exp(-b[t, head]))
            s[head] += np.outer(u, kn)
            o[head] = s[head] @ qn
        states.append(s)
        outputs.append(o)
    return np.stack(states), np.stack(outputs) if outputs else np.zeros((0, spec.v_heads, spec.v_dim))


def conv_oracle(spec, tokens, slot, layer, count):
    x = np.concatenate([np.zeros((spec.conv_width - 1, spec.channels)), tokens.x[slot, layer, :count].double().numpy()])
    w, bias = tokens.weight[layer].double().numpy(), tokens.bias[layer].double().numpy()
    y = np.stack([sum(w[:, i] * x[t + i] for i in range(spec.conv_width)) + bias for t in range(count)])
    return y / (1 + np.exp(-y))


def poison_dead(spec, state, value):
    """Fill everything that no accepted token owns, in every slot that is in use."""
    for slot in SLOTS:
        kept = int(state.accepted[slot])
        state.conv[:, slot, :, kept + spec.conv_width - 1 :] = value
        if spec.mode == "native":
            rows = [slot * spec.width + t for t in range(spec.width) if t != kept]
            state.ssm[:, rows] = value
        elif spec.mode == "compact":
            for x in vars(state.extra).values():
                x[:, slot] = value
        else:
            n, phase = live(spec, int(state.extra.cursor[slot]))
            dead = [j for j in range(2 * spec.history) if not phase * spec.history <= j < phase * spec.history + n]
            for name in ("k", "v", "d", "decay", "beta"):
                getattr(state.extra, name)[:, slot, :, dead] = value
