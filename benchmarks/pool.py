"""A pool of requests in the middle of decoding, larger than the L2 cache, and rounds of it in every implementation.

The pool is cut into groups of `batch` requests; round i runs group i, so a round meets states that no cache holds. In mode
replay request j of group g stands at phase (j + g) of the cycle of its cursor: every sweep over all groups sees every phase
equally often, folds included, and leaves the pool as it found it, one phase on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import torch

import jax_ssm
import torch_ref
from benchmarks.device_time import live_counts
from benchmarks.twins import IN_JAX, clone, jax_state, random_inputs, to_jax
from jax_ssm.spec import KernelConfig, state_bytes
from torch_ref.spec import SSMSpec

COLD_BYTES = 512 << 20  # at least this much state between two uses of a slot; the L2 cache of an H200 holds 50 MB
HEADS = {"gdn": (16, 16, 32), "kda": (32, 32, 32)}


def make_spec(rule: str, mode: str, width: int, ssm: str, layers: int, history: int, slots: int = 2) -> SSMSpec:
    """Model-size geometry. mode "precompute": mode replay with that projection."""
    h, kh, hv = HEADS[rule]
    projection, mode = ("precompute", "replay") if mode == "precompute" else ("inline", mode)
    return SSMSpec(
        rule, layers, slots, h, kh, hv, 128, 128, width, mode, history, "bf16", ssm,
        projection=projection,
    )  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What to run: spec (slots not counted yet), requests a round, tokens that every request accepts a round, launch (rows of
    V of a program, None for the table; its warps)."""

    spec: SSMSpec
    batch: int
    accepted: int
    block_v: int | None = None
    num_warps: int = 1

    def config(self, kind: str) -> KernelConfig:
        """The launch of side `kind`; torch_ref takes the same class, whose implementation it does not read."""
        return KernelConfig(IN_JAX.get(kind, "xla"), self.block_v, self.num_warps)

    @property
    def groups(self) -> int:
        """Groups of requests: enough for a cold cache, and a multiple of the phases where one batch cannot hold each."""
        phases = len(live_counts(self.spec, self.accepted))
        slot = state_bytes(self.spec)["ssm"]  # of the one request of this spec
        groups = max(2, math.ceil(COLD_BYTES / (slot * self.batch)))
        return groups if self.batch % phases == 0 else math.ceil(groups / phases) * phases

    def sized(self) -> SSMSpec:
        """The spec with a slot for every request of every group, and HOLD."""
        return replace(self.spec, slots=self.batch * self.groups + 1)


class Pool:
    """State, layouts and inputs of a plan in PyTorch."""

    def __init__(self, plan: Plan):
        self.plan, self.spec = plan, plan.sized()
        spec, batch = self.spec, plan.batch
        g = torch.Generator("cuda").manual_seed(1)
        self.state = state = torch_ref.init_state(spec, "cuda")
        for x in (state.ssm, state.conv, *(getattr(state.extra, n, None) for n in "kvd")):
            if x is not None:
                x.normal_(generator=g)
        state.ssm[:, spec.hold * spec.rows_per_slot :] = 0
        order = torch.randperm(spec.hold, generator=g, device="cuda").int()
        at = torch.arange(spec.width, device="cuda").repeat(batch).int()
        self.layouts = []
        counts = torch.tensor(live_counts(spec, plan.accepted), device="cuda", dtype=torch.int32)
        for i in range(plan.groups):
            slots = order[i * batch : (i + 1) * batch]
            self.layouts.append(torch_ref.build_layout(spec, slots.repeat_interleave(spec.width), at, fixed=True))
            if spec.mode == "replay":
                state.extra.cursor[slots.long()] = counts[(torch.arange(batch, device="cuda") + i) % len(counts)]
        if spec.mode == "replay":
            state.extra.decay.uniform_(0.9, 1.0, generator=g)
            state.extra.beta.uniform_(0.0, 1.0, generator=g)
        draw, tokens = torch.Generator().manual_seed(2), batch * spec.width
        self.inputs = [random_inputs(spec, tokens, draw, "cuda") for _ in range(spec.layers)]
        self.raw = torch.randn(tokens, spec.channels, generator=draw).to(torch.bfloat16).cuda()
        self.weight = torch.randn(spec.channels, spec.conv_width, generator=draw).cuda()
        self.lengths = torch.full((batch,), plan.accepted, dtype=torch.int32, device="cuda")

    def triton(self, conv: bool = False) -> Callable[[int], list]:
        """A function that runs round i with torch_ref and the Triton kernels, on a state of its own; returns outputs."""
        spec, state = self.spec, clone(self.state)

        def run(i: int) -> list:
            nonlocal state
            layout, outputs = self.layouts[i % len(self.layouts)], []
            state, receipt = torch_ref.prepare(spec, state, layout, self.plan.config("triton"), kernels="triton")
            for row, inputs in enumerate(self.inputs):
                if conv:
                    torch_ref.conv_forward(spec, state, receipt, row, self.raw, self.weight)
                state, o = torch_ref.forward(spec, state, receipt, row, inputs)
                outputs.append(o)
            state = torch_ref.accept(spec, state, torch_ref.StateAcceptance((receipt,), self.lengths))
            return outputs

        return run

    def jax(self, compiled) -> Callable[[int], None]:
        """A function that starts round i of an executable of `compile_step`, on a state of its own."""
        state = jax_state(self.state)
        layouts = [
            jax_ssm.DecodeLayout(**{n: to_jax(x) for n, x in vars(lay).items() if n != "fixed"}, fixed=True)
            for lay in self.layouts
        ]
        inputs = tuple(jax_ssm.LinearInputs(**{n: to_jax(x) for n, x in vars(y).items()}) for y in self.inputs)
        raw, weight, lengths = to_jax(self.raw), to_jax(self.weight), to_jax(self.lengths)

        def run(i: int) -> None:
            nonlocal state
            state, _ = compiled(state, layouts[i % len(layouts)], inputs, raw, weight, lengths)

        return run


def compile_step(plan: Plan, kind: str, conv: bool = False):
    """The whole round (prepare, every layer, accept) of side `kind`, compiled from shapes alone; the state is donated."""
    spec, config = plan.sized(), plan.config(kind)
    tokens, gates = plan.batch * spec.width, spec.v_heads * spec.gates

    @jax.jit  # traced once for all layers
    def layer(state, receipt, row, x, raw, weight):
        y = None
        if conv:
            state, y = jax_ssm.conv_forward(spec, state, receipt, row, raw, weight)
        state, o = jax_ssm.forward(spec, state, receipt, row, x)
        return state, (y, o)

    def step(state, layout, inputs, raw, weight, lengths):
        state, receipt = jax_ssm.prepare(spec, state, layout, config)
        outputs = []
        for row, x in enumerate(inputs):
            state, o = layer(state, receipt, jnp.int32(row), x, raw, weight)
            outputs.append(o)
        return jax_ssm.accept(spec, state, jax_ssm.StateAcceptance((receipt,), lengths)), outputs

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    fp32, int32 = jnp.float32, jnp.int32
    state = jax.eval_shape(lambda: jax_ssm.init_state(spec))
    ids = array(tokens, dtype=int32)
    layout = jax.eval_shape(lambda ids, at: jax_ssm.build_layout(spec, ids, at, fixed=True), ids, ids)
    inputs = jax_ssm.LinearInputs(
        array(tokens, spec.q_heads, spec.k_dim), array(tokens, spec.k_heads, spec.k_dim),
        array(tokens, spec.v_heads, spec.v_dim), array(tokens, gates), array(tokens, spec.v_heads),
        array(spec.v_heads, dtype=fp32), array(gates, dtype=fp32),
    )  # fmt: skip
    raw, weight = array(tokens, spec.channels), array(spec.channels, spec.conv_width, dtype=fp32)
    lengths = array(plan.batch, dtype=int32)
    lowered = jax.jit(step, donate_argnums=0).lower(state, layout, (inputs,) * spec.layers, raw, weight, lengths)
    return lowered.compile()


class Compilations:
    """Executables of jobs {key: arguments of `compile_step`}, made by threads in this order while others are timed already.

    `get(key)` waits for one: the executable, or the exception that ended its compilation. Leave the `with` block to give up
    what was not begun. Durations of kernels do not mind a busy CPU.
    """

    def __init__(self, jobs: dict, threads: int):
        self._pool = ThreadPoolExecutor(threads)
        self._made = {key: self._pool.submit(compile_step, *job) for key, job in jobs.items()}

    def __enter__(self) -> Compilations:
        return self

    def __exit__(self, *_) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def get(self, key):
        """The executable of `key`, an exception, or None for a key that is no job."""
        if key not in self._made:
            return None
        return self._made[key].exception() or self._made[key].result()


def export_all(pool: Pool, kind: str) -> Callable[[], None]:
    """A function that exports the requests of the first group into pages, by side `kind`."""
    spec, slots = pool.spec, pool.layouts[0].slots[: pool.plan.batch]
    if kind == "triton":
        pages = torch_ref.init_pages(spec, pool.plan.batch, "cuda")
        order = torch.arange(pool.plan.batch)
        return lambda: torch_ref.export_into(spec, pool.state, pages, order, slots, pool.plan.batch, kernels="triton")
    state, ids = jax_state(pool.state), to_jax(slots)
    pages, order, n = jax_ssm.init_pages(spec, pool.plan.batch), jnp.arange(pool.plan.batch), jnp.int32(pool.plan.batch)
    config = KernelConfig(IN_JAX[kind])
    export = jax.jit(lambda state, pages, *ids: jax_ssm.export_into(spec, state, pages, *ids, config), donate_argnums=1)

    def run() -> None:
        nonlocal pages
        pages = export(state, pages, order, ids, n)

    return run
