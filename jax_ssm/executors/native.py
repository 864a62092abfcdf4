"""Mode "native": one full state per verify position; a rejected draft is a row that nobody reads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_ssm.acceptance import SSMForward
from jax_ssm.executors.recurrence import expand_heads, read, step
from jax_ssm.gates import CoreInputs, LinearInputs, check_inputs, prologue, round_to, store
from jax_ssm.kernels import kernels
from jax_ssm.layout import in_window, to_rows, to_windows
from jax_ssm.spec import KernelConfig, SSMSpec
from jax_ssm.state import ConvSSMState, drop_index, dtype, put, read_index, take

Array = jax.Array


def prepare(spec: SSMSpec, state: ConvSSMState, layout, config: KernelConfig) -> ConvSSMState:
    """Nothing to do: the receipt already holds the row to start from."""
    return state


def window_inputs(spec: SSMSpec, receipt: SSMForward, core: CoreInputs) -> CoreInputs:
    """Core inputs as windows [R, W, heads, ..] with query and key heads repeated per value head."""
    core = jax.tree.map(lambda x: to_windows(spec, receipt.layout, x), core)
    q, k_hat = (expand_heads(x, spec.v_heads, 2) for x in (core.q, core.k_hat))
    return core.replace(q=q, k_hat=k_hat)


def run_window(spec: SSMSpec, s: Array, w: CoreInputs, carry, visit):
    """Walk the W tokens of each window from s [R, HV, V, K] fp32, rounding the running state after every token.

    visit(t, rounded_state, carry) -> carry sees each rounded state. Returns outputs [R, W, HV, V] fp32 (from the
    unrounded state) and the carry. Tokens beyond a verify length are walked too; their results are not used.
    """
    state_dtype, v32 = dtype(spec.ssm_dtype), w.v.astype(jnp.float32)

    def body(t, c):
        s, o, carry = c
        s, _ = step(s, w.k_hat[:, t], v32[:, t], w.decay[:, t], w.beta[:, t])
        o = o.at[:, t].set(read(s, w.q[:, t]))
        s = round_to(s, state_dtype)
        return s, o, visit(t, s, carry)

    o = jnp.zeros((s.shape[0], spec.width, spec.v_heads, spec.v_dim), jnp.float32)
    if spec.width == 1:
        _, o, carry = body(0, (s, o, carry))
    else:
        _, o, carry = lax.fori_loop(0, spec.width, body, (s, o, carry))
    return o, carry


def core_inputs(spec: SSMSpec, receipt: SSMForward, inputs: LinearInputs) -> CoreInputs | LinearInputs:
    """The prologue, or the raw inputs where a kernel runs it itself: single tokens of GDN, where one launch less counts, and
    replay, whose pre-kernel reads the raw rows anyway."""
    inside = spec.mode == "replay" or (spec.rule == "gdn" and spec.mode == "native" and spec.width == 1)
    if receipt.config.implementation != "xla" and inside:
        check_inputs(spec, inputs)
        return inputs
    return prologue(spec, inputs, receipt.config.implementation)


def forward(
    spec: SSMSpec, state: ConvSSMState, receipt: SSMForward, row, core: CoreInputs | LinearInputs
) -> tuple[ConvSSMState, Array]:
    """Verify T_r tokens of each request: writes state rows slot * W + t, t < T_r, and returns o [T, HV, V]."""
    if receipt.config.implementation != "xla":
        return _forward_kernel(spec, state, receipt, row, core)
    layout, w = receipt.layout, window_inputs(spec, receipt, core)
    source = read_index(spec, layout.slots) * spec.width + receipt.offset
    real = in_window(layout, spec.width)

    def snapshot(t, s, ssm):
        target = drop_index(spec, layout.slots, real[:, t]) * spec.width + t
        return put(ssm, (row, target), s)

    o, ssm = run_window(spec, take(state.ssm, (row, source)).astype(jnp.float32), w, state.ssm, snapshot)
    return state.replace(ssm=ssm), to_rows(layout, store(o, w.v.dtype))


def _forward_kernel(spec: SSMSpec, state: ConvSSMState, receipt: SSMForward, row, x) -> tuple[ConvSSMState, Array]:
    layout, config = receipt.layout, receipt.config
    if isinstance(x, CoreInputs):
        inputs = (x.q, x.k_hat, x.v, x.decay, x.beta)
    else:
        inputs = (x.q, x.k, x.v, x.a, x.b, x.A_log, x.dt_bias)
    where = (row, layout.slots, receipt.offset, layout.verify_len, layout.cu)
    native, launch = kernels(config.implementation).native, config.launch(spec)
    o, ssm = native(state.ssm, *where, inputs, width=spec.width, scale=spec.scale, **launch)
    return state.replace(ssm=ssm), o


def accept(spec: SSMSpec, state: ConvSSMState, pairs) -> ConvSSMState:
    """Nothing but the accepted index moves, and that is common to all modes."""
    return state


def merge(spec: SSMSpec, state: ConvSSMState, slots: Array, config: KernelConfig) -> ConvSSMState:
    """Move the accepted row of each slot to row 0; where a slot has one row, it is there already."""
    if spec.width == 1:
        return state
    source = read_index(spec, slots)
    rows = take(state.ssm, (slice(None), source * spec.width + state.accepted[source]))
    return state.replace(ssm=put(state.ssm, (slice(None), drop_index(spec, slots) * spec.width), rows))


def materialize(spec: SSMSpec, state: ConvSSMState, slot: Array) -> Array:
    """Canonical state [layers, HV, V, K] of one slot in ssm_dtype: its accepted row."""
    return take(state.ssm, (slice(None), slot * spec.width + state.accepted[slot]))
