"""Mode "compact": one state and the raw inputs of this round; commit re-runs the accepted prefix, rounding each token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_ssm.acceptance import SSMForward
from jax_ssm.executors import native
from jax_ssm.executors.recurrence import expand_heads, replay
from jax_ssm.gates import CoreInputs, store
from jax_ssm.kernels import kernels
from jax_ssm.layout import in_window, to_rows
from jax_ssm.spec import KernelConfig, SSMSpec
from jax_ssm.state import CompactWindow, ConvSSMState, drop_index, dtype, put, read_index, take

Array = jax.Array

prepare = native.prepare


def put_records(spec: SSMSpec, layout, row, at: Array, pools, values):
    """Write window records: pools [layers, S, heads, N, ..], values [R, W, heads, ..], at [R, W] positions along N.

    Positions beyond a verify length and padding rows are dropped.
    """
    slots = drop_index(spec, layout.slots[:, None], in_window(layout, spec.width))
    return [put(pool, (row, slots, slice(None), at), x) for pool, x in zip(pools, values, strict=True)]


def forward(spec: SSMSpec, state: ConvSSMState, receipt: SSMForward, row, core: CoreInputs) -> tuple[ConvSSMState, Array]:
    """Verify: outputs o [T, HV, V] and T_r window records a request; the state is read and never written."""
    if receipt.config.implementation != "xla":
        return _forward_kernel(spec, state, receipt, row, core)
    layout, w = receipt.layout, native.window_inputs(spec, receipt, core)
    s = take(state.ssm, (row, read_index(spec, layout.slots))).astype(jnp.float32)
    o, _ = native.run_window(spec, s, w, None, lambda t, s, carry: carry)
    at = jnp.broadcast_to(jnp.arange(spec.width), (layout.slots.shape[0], spec.width))
    x = state.extra
    window = CompactWindow(*put_records(spec, layout, row, at, (x.k, x.v, x.decay, x.beta), (w.k, w.v, w.decay, w.beta)))
    return state.replace(extra=window), to_rows(layout, store(o, w.v.dtype))


def _forward_kernel(spec: SSMSpec, state: ConvSSMState, receipt: SSMForward, row, core: CoreInputs):
    layout, config, x = receipt.layout, receipt.config, state.extra
    inputs = (core.q, core.k_hat, core.v, core.decay, core.beta)
    where = (row, layout.slots, layout.verify_len, layout.cu)
    compact, launch = kernels(config.implementation).compact, config.launch(spec)
    o, window = compact(state.ssm, (x.k, x.v, x.decay, x.beta), *where, inputs, core.k, width=spec.width, **launch)
    return state.replace(extra=CompactWindow(*window)), o


def accept(spec: SSMSpec, state: ConvSSMState, pairs) -> ConvSSMState:
    """Re-run the accepted prefix of every request, all layers; rounds after every token.

    Each receipt commits with the kernel choice of its own forward; receipts with the same choice go together.
    """
    for config in dict.fromkeys(forward.config for forward, _ in pairs):
        state = _accept(spec, state, [pair for pair in pairs if pair[0].config == config], config)
    return state


def _accept(spec: SSMSpec, state: ConvSSMState, pairs, config: KernelConfig) -> ConvSSMState:
    slots = jnp.concatenate([forward.layout.slots for forward, _ in pairs])
    lengths = jnp.concatenate([lengths for _, lengths in pairs])
    if config.implementation != "xla":
        x, launch, commit = state.extra, config.launch(spec), kernels(config.implementation).commit
        return state.replace(ssm=commit(state.ssm, x.k, x.v, x.decay, x.beta, slots, lengths, **launch))
    source, target = read_index(spec, slots), drop_index(spec, slots, lengths > 0)

    def layer(row, ssm):
        x = jax.tree.map(lambda pool: take(pool, (row, source)), state.extra)
        k = expand_heads(x.k, spec.v_heads, 1)
        s = take(ssm, (row, source)).astype(jnp.float32)
        s = replay(s, k, x.v, x.decay, x.beta, lengths[:, None], dtype(spec.ssm_dtype), round_each=True)
        return put(ssm, (row, target), s)

    return state.replace(ssm=lax.fori_loop(0, spec.layers, layer, state.ssm))


def merge(spec: SSMSpec, state: ConvSSMState, slots: Array, config: KernelConfig) -> ConvSSMState:
    """The state is already canonical."""
    return state


def materialize(spec: SSMSpec, state: ConvSSMState, slot: Array) -> Array:
    """Canonical state [layers, HV, V, K] of one slot in ssm_dtype."""
    return take(state.ssm, (slice(None), slot))
