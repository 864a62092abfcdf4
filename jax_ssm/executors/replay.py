"""Mode "replay": one checkpoint, a bounded history of accepted records and a cursor; a rollback is a cursor that stays.

Outputs come from the checkpoint and the corrected values d, without rebuilding the state (ReplaySSM, LightLLM PR 1585):
    h_t(x) = S0 (P(0->t) x) + sum_j d_j <P(j->t) k^_j, x>,   d_t = beta_t (v_t - h_t(k^_t)),   o_t = h_t(q^_t)
where j runs over live records and earlier window tokens and P(j->t) is the product of decays after j up to t. The
checkpoint itself advances only by folding raw inputs through the recurrence.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_ssm.acceptance import SSMForward
from jax_ssm.executors import native
from jax_ssm.executors.compact import put_records
from jax_ssm.executors.materialize import materialize_into
from jax_ssm.executors.recurrence import expand_heads, read, replay
from jax_ssm.gates import CoreInputs, LinearInputs, l2norm, store
from jax_ssm.kernels import kernels
from jax_ssm.layout import DecodeLayout, to_rows
from jax_ssm.spec import KernelConfig, SSMSpec
from jax_ssm.state import ConvSSMState, drop_index, dtype, put_slice, read_index, take, take_slice

Array = jax.Array


def live(spec: SSMSpec, cursor: Array) -> tuple[Array, Array]:
    """(n, phase) of a cursor c = phase * 2L + n."""
    return cursor % (2 * spec.history), cursor // (2 * spec.history)


def prepare(spec: SSMSpec, state: ConvSSMState, layout: DecodeLayout, config: KernelConfig) -> ConvSSMState:
    """Once per batch, for all layers: fold the rows whose window does not fit, flip them, publish the forward cursor.

    A row folds iff T_r > 0 and n + T_r > L; it continues in the other half, so the records it folded stay intact.
    """
    if config.implementation != "xla":
        return _prepare_kernel(state, layout, config)
    cursor = state.extra.cursor[read_index(spec, layout.slots)]
    n, phase = live(spec, cursor)
    fold = (layout.verify_len > 0) & (n + layout.verify_len > spec.history)
    state = fold_slots(spec, state, layout.slots, fold, (1 - phase) * 2 * spec.history)
    h = state.extra
    target = drop_index(spec, layout.slots, layout.verify_len > 0)
    published = h.forward_cursor.at[target].set(h.cursor[read_index(spec, layout.slots)], mode="drop")
    return state.replace(extra=h.replace(forward_cursor=published))


def _prepare_kernel(state: ConvSSMState, layout: DecodeLayout, config: KernelConfig) -> ConvSSMState:
    h, prepare = state.extra, kernels(config.implementation).prepare
    records, rows = (h.k, h.v, h.decay, h.beta), (layout.slots, layout.verify_len)
    ssm, cursor, forward_cursor = prepare(state.ssm, records, h.cursor, h.forward_cursor, *rows)
    return state.replace(ssm=ssm, extra=h.replace(cursor=cursor, forward_cursor=forward_cursor))


def fold_slots(spec: SSMSpec, state: ConvSSMState, slots: Array, fold: Array, cursor: Array) -> ConvSSMState:
    """Fold the slots [N] where `fold` [N]: the checkpoint takes in the live records, the cursor becomes `cursor` [N].

    Folding rows form a work list, so a call without folds touches no state. The cursor moves inside the loop: whatever
    writes records next reads it, hence comes after the fold, and XLA need not copy the history to keep both apart.
    """
    order = jnp.argsort(~fold, stable=True)
    source = read_index(spec, slots)

    def one(i, carry):
        ssm, now = carry
        slot = source[order[i]]
        # the cursor of the carry, so that a slot named twice is folded once
        s = materialize(spec, state.replace(ssm=ssm, extra=state.extra.replace(cursor=now)), slot)
        ssm = put_slice(ssm, s[:, None], (0, slot, 0, 0, 0))
        return ssm, now.at[slot].set(cursor[order[i]])

    ssm, now = lax.fori_loop(0, jnp.sum(fold), one, (state.ssm, state.extra.cursor))
    return state.replace(ssm=ssm, extra=state.extra.replace(cursor=now))


def materialize(spec: SSMSpec, state: ConvSSMState, slot: Array) -> Array:
    """Canonical state [layers, HV, V, K] of one slot in ssm_dtype: its checkpoint advanced by its live raw records."""
    h = state.extra
    n, phase = live(spec, h.cursor[slot])
    k, v, decay, beta = (_half(spec, pool, slot, phase) for pool in (h.k, h.v, h.decay, h.beta))
    s = take(state.ssm, (slice(None), slot)).astype(jnp.float32)
    s = replay(s, expand_heads(k, spec.v_heads, 1), v, decay, beta, n, dtype(spec.ssm_dtype), round_each=False)
    return s.astype(state.ssm.dtype)


def _half(spec: SSMSpec, pool: Array, slot: Array, phase: Array) -> Array:
    """The live half of one slot, all layers: [layers, heads, L, ..]."""
    start = (0, slot, 0, phase * spec.history, 0)[: pool.ndim]
    sizes = (pool.shape[0], 1, pool.shape[2], spec.history, *pool.shape[4:])
    return take_slice(pool, start, sizes)[:, 0]


def forward(
    spec: SSMSpec, state: ConvSSMState, receipt: SSMForward, row, core: CoreInputs | LinearInputs
) -> tuple[ConvSSMState, Array]:
    """Verify: outputs o [T, HV, V] from checkpoint and history; writes T_r uncommitted records, moves no cursor."""
    if receipt.config.implementation != "xla":
        return _forward_kernel(spec, state, receipt, row, core)
    layout, w, h = receipt.layout, native.window_inputs(spec, receipt, core), state.extra
    slots = read_index(spec, layout.slots)
    n, phase = live(spec, h.forward_cursor[slots])
    write = phase[:, None] * spec.history + n[:, None] + jnp.arange(spec.width)

    # raw records first: they lie beyond the live ones, and reading the written pools keeps the writes in place
    pools, raw = (h.k, h.v, h.decay, h.beta), (w.k, w.v, w.decay, w.beta)
    k, v, decay, beta = put_records(spec, layout, row, write, pools, raw)

    # live records, masked as they are loaded: what lies beyond the cursor may be anything, NaN included
    position = jnp.arange(spec.history)
    used = (position < n[:, None])[:, None, :, None]
    at = (phase[:, None] * spec.history + position)[:, None, :]

    def records(pool, fill):
        x = take(pool, (row, slots[:, None, None], jnp.arange(pool.shape[2])[:, None], at))
        return jnp.where(used, x.astype(jnp.float32), fill)

    keys = expand_heads(l2norm(records(k, 0)), spec.v_heads, 1)  # [R, HV, L, K]
    after, whole = _products_after(records(decay, 1))
    s = take(state.ssm, (row, slots)).astype(jnp.float32)
    o, d = _window(spec, s, keys * after, records(h.d, 0), whole, w)
    (d,) = put_records(spec, layout, row, write, (h.d,), (d,))
    history = h.replace(k=k, v=v, d=d, decay=decay, beta=beta)
    return state.replace(extra=history), to_rows(layout, store(o, w.v.dtype))


def _forward_kernel(spec: SSMSpec, state: ConvSSMState, receipt: SSMForward, row, x: CoreInputs | LinearInputs):
    layout, config, h = receipt.layout, receipt.config, state.extra
    module = kernels(config.implementation)
    if isinstance(x, LinearInputs):
        tokens = (x.q, x.k, x.a, x.b, x.A_log, x.dt_bias)
    else:
        tokens = (x.q_raw, x.k, x.decay, x.beta) if spec.rule == "gdn" else (x.q, x.k_hat, x.decay, x.beta, x.k)
    index = (jnp.asarray(row, jnp.int32).reshape(1), layout.slots, layout.verify_len, layout.cu)
    coefficients, outputs = module.coefficients, module.outputs
    if spec.precompute:
        coefficients, outputs = module.precompute_coefficients, module.precompute_outputs
    *window, (k, decay, beta) = coefficients(
        index, h.forward_cursor, tokens, (h.k, h.decay, h.beta),
        width=spec.width, scale=spec.scale, lower_bound=spec.lower_bound,
    )  # fmt: skip
    o, (v, d) = outputs(
        index, h.forward_cursor, x.v, window, state.ssm, (h.v, h.d),
        gdn=spec.rule == "gdn", **config.launch(spec),
    )  # fmt: skip
    return state.replace(extra=h.replace(k=k, v=v, d=d, decay=decay, beta=beta)), o


def _products_after(decay: Array) -> tuple[Array, Array]:
    """decay [.., N, G] -> products of the decays of all later records [.., N, G], and of all records [.., G]."""
    inclusive = lax.cumprod(decay, axis=decay.ndim - 2, reverse=True)
    later = jnp.concatenate([inclusive[..., 1:, :], jnp.ones_like(decay[..., :1, :])], axis=-2)
    return later, inclusive[..., 0, :]


def _window(spec: SSMSpec, s: Array, keys: Array, d_old: Array, whole: Array, w: CoreInputs) -> tuple[Array, Array]:
    """Outputs and corrected values of a window: o, d [R, W, HV, V] fp32, token by token (forward substitution).

    s [R, HV, V, K] the checkpoint; keys [R, HV, L, K] decayed to the start of the window; d_old [R, HV, L, V];
    whole [R, HV, G] the decay since the checkpoint.
    Every token decays the keys of the window tokens before it, so only forward products occur.
    """
    r, width, heads = w.beta.shape
    fresh_keys = jnp.zeros((r, heads, width, spec.k_dim), jnp.float32)
    fresh_d = jnp.zeros((r, heads, width, spec.v_dim), jnp.float32)
    passed = jnp.ones((r, heads, spec.gates), jnp.float32)  # product of decays since the window began
    v32 = w.v.astype(jnp.float32)

    def project(x, passed, fresh_keys, fresh_d):
        old = read(keys, passed * x)  # [R, HV, L]
        new = read(fresh_keys, x)  # [R, HV, W]
        return read(s, whole * passed * x) + jnp.sum(d_old * old[..., None], axis=2) + jnp.sum(fresh_d * new[..., None], axis=2)

    def body(t, carry):
        passed, fresh_keys, fresh_d, o = carry
        passed = passed * w.decay[:, t]
        fresh_keys = fresh_keys * w.decay[:, t][:, :, None, :]
        d = (v32[:, t] - project(w.k_hat[:, t], passed, fresh_keys, fresh_d)) * w.beta[:, t][..., None]
        fresh_keys = fresh_keys.at[:, :, t].set(w.k_hat[:, t])
        fresh_d = fresh_d.at[:, :, t].set(d)
        return passed, fresh_keys, fresh_d, o.at[:, t].set(project(w.q[:, t], passed, fresh_keys, fresh_d))

    carry = (passed, fresh_keys, fresh_d, jnp.zeros((r, width, heads, spec.v_dim), jnp.float32))
    carry = body(0, carry) if width == 1 else lax.fori_loop(0, width, body, carry)
    return carry[3], jnp.moveaxis(carry[2], 1, 2)


def accept(spec: SSMSpec, state: ConvSSMState, pairs) -> ConvSSMState:
    """The cursor moves by the accepted length; no array traffic."""
    cursor = state.extra.cursor
    for receipt, lengths in pairs:
        cursor = cursor.at[drop_index(spec, receipt.layout.slots, lengths > 0)].add(lengths, mode="drop")
    return state.replace(extra=state.extra.replace(cursor=cursor))


def merge(spec: SSMSpec, state: ConvSSMState, slots: Array, config: KernelConfig) -> ConvSSMState:
    """Fold the live records of each slot into its checkpoint and set its cursors to 0."""
    if config.implementation != "xla":
        state = state.replace(ssm=materialize_into(spec, state, slots, slots, slots.shape[0], config.implementation))
    else:
        pending = live(spec, state.extra.cursor[read_index(spec, slots)])[0] > 0
        state = fold_slots(spec, state, slots, pending, jnp.zeros_like(slots))
    h, target = state.extra, drop_index(spec, slots)
    cursors = {name: getattr(h, name).at[target].set(0, mode="drop") for name in ("cursor", "forward_cursor")}
    return state.replace(extra=h.replace(**cursors))
