"""Replay in torch_ref and by kernels, in step and compared bit for bit; shared by the replay and the materialise tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch

import jax_ssm
import torch_ref
from benchmarks.twins import ACT, FAST_COMPILE, agreeing, differing, jax_leaves, jax_state, to_jax  # noqa: F401 - for tests
from benchmarks.twins import agreeing_core as core_inputs
from jax_ssm.executors import forward_core
from jax_ssm.gates import CoreInputs as JaxCore
from jax_ssm.spec import KernelConfig
from torch_ref.executors import forward_core as torch_forward_core
from torch_ref.spec import SSMSpec
from torch_ref.state import leaves

PALLAS = KernelConfig("pallas")


def jit(f, static=(0,)):
    """jit for interpret mode: unoptimised code, since compiling takes longer than running."""
    return jax.jit(f, static_argnums=static, compiler_options=FAST_COMPILE)


prepare, forward, accept = jit(jax_ssm.prepare, (0, 3)), jit(forward_core), jit(jax_ssm.accept)


class Pair:
    """One replay state in both frameworks. Checkpoints are random, everything that no token wrote is NaN.

    jax_spec: what jax_ssm runs, where it differs from the spec of torch_ref.
    """

    def __init__(self, spec: SSMSpec, seed: int = 0, jax_spec: SSMSpec | None = None):
        self.jax_spec = jax_spec or spec
        self.spec, self.rng, self.g = spec, np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        self.state = torch_ref.init_state(spec)
        rows = spec.hold * spec.rows_per_slot
        shape = self.state.ssm[:, :rows].shape
        self.state.ssm[:, :rows] = torch.randn(shape, generator=self.g).to(self.state.ssm.dtype)
        self.state.conv[:, : spec.hold] = torch.randn(self.state.conv[:, : spec.hold].shape, generator=self.g).to(
            ACT[spec.act_dtype]
        )
        for x in vars(self.state.extra).values() if self.state.extra is not None else ():
            if x.ndim > 1:
                x[:, : spec.hold] = float("nan")
        self.jax, self.phases = jax_state(self.state), set()

    def round(self, windows, lengths, capacity: int):
        """One round of `windows` [(slot, tokens), ..] padded to `capacity` token rows; accepts `lengths`.

        Returns {name: number of differing values} of the outputs, and of the state after forward and after accept.
        """
        spec, jax_spec, wrong = self.spec, self.jax_spec, {}
        pad = capacity - sum(n for _, n in windows)
        ids = torch.tensor([s for s, n in windows for _ in range(n)] + [spec.hold] * pad, dtype=torch.int32)
        at = torch.tensor([t for _, n in windows for t in range(n)] + [0] * pad, dtype=torch.int32)
        self.state, receipt = torch_ref.prepare(spec, self.state, torch_ref.build_layout(spec, ids, at))
        self.jax, other = prepare(jax_spec, self.jax, jax_ssm.build_layout(jax_spec, to_jax(ids), to_jax(at)), PALLAS)
        for row in range(spec.layers):
            core = core_inputs(spec, capacity, self.g)
            self.state, o = torch_forward_core(spec, self.state, receipt, row, core)
            jax_core = JaxCore(**{name: to_jax(x) for name, x in vars(core).items()})
            self.jax, jax_o = forward(jax_spec, self.jax, other, jnp.int32(row), jax_core)
            wrong |= self.compare_outputs(row, o, jax_o, pad)
        wrong |= self.compare_forward()
        lengths = torch.tensor(lengths + [0] * (len(receipt.layout.slots) - len(lengths)), dtype=torch.int32)
        self.state = torch_ref.accept(spec, self.state, torch_ref.StateAcceptance((receipt,), lengths))
        self.jax = accept(jax_spec, self.jax, jax_ssm.StateAcceptance((other,), to_jax(lengths)))
        if spec.mode == "replay":
            self.phases |= set((self.state.extra.cursor // (2 * spec.history)).tolist())
        return wrong | self.compare()

    def rounds(self, n: int, slots, full: bool = False):
        """n random rounds over `slots`, each of random width; `full`: everything is accepted. Sums of differing values."""
        wrong: dict[str, int] = {}
        for _ in range(n):
            windows = [(s, int(self.rng.integers(1, self.spec.width + 1))) for s in self.rng.permutation(slots)]
            windows[0] = (windows[0][0], self.spec.width)
            lengths = [w if full else int(self.rng.integers(1, w + 1)) for _, w in windows]
            for name, count in self.round(windows, lengths, len(slots) * self.spec.width + 2).items():
                wrong[name] = wrong.get(name, 0) + count
        return wrong

    def compare_outputs(self, row: int, o, jax_o, pad: int):
        """Outputs of a layer; the last `pad` token rows are padding."""
        return {f"o{row}": differing(o, jax_o)}

    def compare_forward(self):
        """The state after forward."""
        return {f"forward {name}": n for name, n in self.compare().items()}

    def compare(self):
        """The state after accept."""
        other = jax_leaves(self.jax)
        return {name: differing(x, other[name]) for name, x in leaves(self.state).items()}


def assert_none(wrong: dict[str, int]) -> None:
    assert not any(wrong.values()), {name: n for name, n in wrong.items() if n}
