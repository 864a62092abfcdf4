"""Fixtures of the kernel tests: one random round in torch_ref and in jax_ssm from the same bits, compared bit for bit."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import torch

import jax_ssm
import torch_ref
from benchmarks.twins import ACT, jax_leaves, jax_state, random_core, random_inputs, to_jax, to_numpy  # noqa: F401 - for the tests
from benchmarks.twins import differing as different
from jax_ssm.executors import forward_core
from jax_ssm.gates import CoreInputs as JaxCore
from jax_ssm.spec import KernelConfig
from torch_ref.executors import forward_core as torch_forward_core
from torch_ref.spec import SSMSpec
from torch_ref.state import leaves

torch.set_num_threads(1)


def make_spec(rule="gdn", mode="native", **changes) -> SSMSpec:
    heads = dict(q_heads=2, k_heads=2, v_heads=4) if rule == "gdn" else dict(q_heads=2, k_heads=2, v_heads=2)
    base = dict(layers=2, slots=8, k_dim=64, v_dim=16, width=1, history=4, mode=mode, act_dtype="bf16", ssm_dtype="fp32")
    return SSMSpec(rule=rule, **(base | heads | changes))


jax_forward = functools.partial(jax.jit, static_argnums=0)(forward_core)


class Round:
    """One verify round over random slots with padding: `windows` lists (slot, tokens), `pad` padding rows follow.

    Everything that the round must not read holds NaN: other slots, native rows that were not accepted, HOLD excepted.
    """

    def __init__(self, spec: SSMSpec, windows, pad: int = 1, seed: int = 0, poison: float = float("nan")):
        self.spec, self.g = spec, torch.Generator().manual_seed(seed)
        ids = [slot for slot, n in windows for _ in range(n)] + [spec.hold] * pad
        at = [t for _, n in windows for t in range(n)] + [0] * pad
        self.ids, self.at = torch.tensor(ids, dtype=torch.int32), torch.tensor(at, dtype=torch.int32)
        self.state = torch_ref.init_state(spec)
        for x in leaves(self.state).values():
            if x.ndim > 1:
                rows = spec.rows_per_slot if x is self.state.ssm else 1
                x[:, : spec.hold * rows] = poison
        for slot, _ in windows:
            self.state.accepted[slot] = int(torch.randint(spec.width, (1,), generator=self.g))
            row = slot * spec.rows_per_slot + (int(self.state.accepted[slot]) if spec.mode == "native" else 0)
            shape = self.state.ssm[:, row].shape
            self.state.ssm[:, row] = torch.randn(shape, generator=self.g).to(self.state.ssm.dtype)
        self.jax = jax_state(self.state)
        self.cores = [random_core(spec, len(ids), self.g) for _ in range(spec.layers)]

    def run(self, **config):
        """Both sides through prepare and every layer; returns {name: (torch array, jax array)} of outputs and state."""
        spec, arrays = self.spec, {}
        layout = torch_ref.build_layout(spec, self.ids, self.at)
        self.state, self.receipt = torch_ref.prepare(spec, self.state, layout)
        jax_layout = jax_ssm.build_layout(spec, to_jax(self.ids), to_jax(self.at))
        self.jax, self.jax_receipt = jax_ssm.prepare(spec, self.jax, jax_layout, KernelConfig("pallas", **config))
        for row, core in enumerate(self.cores):
            self.state, o = torch_forward_core(spec, self.state, self.receipt, row, core)
            jax_core = JaxCore(**{name: to_jax(x) for name, x in vars(core).items()})
            self.jax, jax_o = jax_forward(spec, self.jax, self.jax_receipt, jnp.int32(row), jax_core)
            arrays[f"o{row}"] = (o, jax_o)
        return arrays | self.states()

    def accept(self, lengths):
        """Both sides accept; returns the compared state."""
        lengths = torch.tensor(lengths, dtype=torch.int32)
        self.state = torch_ref.accept(self.spec, self.state, torch_ref.StateAcceptance((self.receipt,), lengths))
        acceptance = jax_ssm.StateAcceptance((self.jax_receipt,), to_jax(lengths))
        self.jax = jax_ssm.accept(self.spec, self.jax, acceptance)
        return self.states()

    def states(self):
        other = jax_leaves(self.jax)
        return {name: (x, other[name]) for name, x in leaves(self.state).items()}


def assert_same_bits(arrays) -> None:
    wrong = {name: different(a, b) for name, (a, b) in arrays.items()}
    assert not any(wrong.values()), {name: n for name, n in wrong.items() if n}


# ------------------------------------------------------------------------------------- all three on one device


def three_ways(spec: SSMSpec, rounds, device: str = "cuda", **config):
    """Rounds from raw inputs, convolution and prologue included, in PyTorch eager, Triton and Pallas.

    rounds: lists of (slot, tokens, accepted). Returns {name: (eager, triton, pallas)} of all outputs and the last state.
    """
    g = torch.Generator().manual_seed(3)
    config = KernelConfig("pallas", **config)
    states = [torch_ref.init_state(spec, device) for _ in range(2)]
    other, arrays = jax_state(states[0]), {}
    step = jax.jit(jax_step, static_argnums=0)
    for number, windows in enumerate(rounds):
        ids = torch.tensor([slot for slot, n, _ in windows for _ in range(n)] + [spec.hold], dtype=torch.int32)
        at = torch.tensor([t for _, n, _ in windows for t in range(n)] + [0], dtype=torch.int32)
        layout = torch_ref.build_layout(spec, ids.to(device), at.to(device))
        lengths = torch.tensor([a for _, _, a in windows] + [0] * (len(layout.slots) - len(windows)), dtype=torch.int32)
        receipts = [
            torch_ref.prepare(spec, s, layout, config, kernels=kind)[1]
            for s, kind in zip(states, ("eager", "triton"), strict=True)
        ]
        jax_layout = jax_ssm.build_layout(spec, to_jax(ids), to_jax(at))
        other, jax_receipt = jax_ssm.prepare(spec, other, jax_layout, config)
        for row in range(spec.layers):
            x = torch.randn(len(ids), spec.channels, generator=g).to(ACT[spec.act_dtype]).to(device)
            weight = torch.randn(spec.channels, spec.conv_width, generator=g).to(device)
            inputs = random_inputs(spec, len(ids), g, device)
            results = []
            for s, receipt in zip(states, receipts, strict=True):
                y = torch_ref.conv_forward(spec, s, receipt, row, x, weight)[1]
                results.append((y, torch_ref.forward(spec, s, receipt, row, inputs)[1]))
            jax_inputs = jax_ssm.LinearInputs(**{name: to_jax(v) for name, v in vars(inputs).items()})
            other, *jax_results = step(spec, other, jax_receipt, jnp.int32(row), to_jax(x), to_jax(weight), jax_inputs)
            for i, name in enumerate("yo"):
                arrays[f"{name}{number}.{row}"] = (*(r[i] for r in results), jax_results[i])
        for s, receipt in zip(states, receipts, strict=True):
            torch_ref.accept(spec, s, torch_ref.StateAcceptance((receipt,), lengths.to(device)))
        other = jax_ssm.accept(spec, other, jax_ssm.StateAcceptance((jax_receipt,), to_jax(lengths)))
    named = [leaves(states[0]), leaves(states[1]), jax_leaves(other)]
    return arrays | {name: tuple(x[name] for x in named) for name in named[0]}


def jax_step(spec: SSMSpec, state, receipt, row, x, weight, inputs):
    state, y = jax_ssm.conv_forward(spec, state, receipt, row, x, weight)
    state, o = jax_ssm.forward(spec, state, receipt, row, inputs)
    return state, y, o


def assert_three_same(arrays) -> None:
    wrong = {name: (different(a, b), different(a, c)) for name, (a, b, c) in arrays.items()}
    assert not any(map(any, wrong.values())), {name: n for name, n in wrong.items() if any(n)}
