"""Chunked prefill of both rules: a prompt chunk from an initial state, resumable at any split.

Inside a chunk of N tokens the recurrence is one triangular system (the WY form of the delta rule):
    (I + A) D = B (V - P k^ S0),   A_ti = beta_t <P(i->t) k^_i, k^_t>  for i < t
Products of decays are taken forward only, never as a quotient of two prefixes, so no gate can overflow. fp32 inside.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_ssm.executors.recurrence import expand_heads
from jax_ssm.gates import CoreInputs, LinearInputs, check_inputs, prologue, store
from jax_ssm.spec import SSMSpec
from jax_ssm.state import ConvSSMState, check_prompt, drop_index, put, read_index, take

Array = jax.Array

CHUNK = {"gdn": 32, "kda": 16}


def prefill(
    spec: SSMSpec, state: ConvSSMState, row, slots: Array, lengths: Array, inputs: LinearInputs
) -> tuple[ConvSSMState, Array]:
    """Run one layer over a prompt chunk, from row 0 of each slot (`merge` first) to its rounded final state.

    slots [B]; lengths [B] int32, 0..N; inputs [B, N, ..] after the convolution, padded on the right. Returns the state
    and o [B, N, HV, V] in v's dtype, exactly zero beyond each length. Rows of length 0 and slots that are not live
    change nothing. Raises ValueError for concrete input that `check_prompt` refuses.
    """
    check_inputs(spec, inputs)
    slots, lengths = check_prompt(spec, row, slots, lengths, inputs.k.shape[:-2])
    rows = read_index(spec, slots) * spec.rows_per_slot
    s, o = prefill_core(spec, take(state.ssm, (row, rows)).astype(jnp.float32), lengths, prologue(spec, inputs))
    target = drop_index(spec, slots, lengths > 0) * spec.rows_per_slot
    return state.replace(ssm=put(state.ssm, (row, target), store(s, state.ssm.dtype))), o


def prefill_core(spec: SSMSpec, s: Array, lengths: Array, core: CoreInputs) -> tuple[Array, Array]:
    """(final state [B, HV, V, K] fp32, o [B, N, HV, V]) from an initial state [B, HV, V, K] fp32 and padded inputs."""
    b, n = core.beta.shape[:2]
    size = min(CHUNK[spec.rule], n)
    real = jnp.arange(n) < lengths[:, None]

    def masked(x, fill):
        x = expand_heads(x, spec.v_heads, 2).astype(jnp.float32)
        x = jnp.where(real.reshape(b, n, *(1,) * (x.ndim - 2)), x, fill)
        x = jnp.pad(x, ((0, 0), (0, -n % size)) + ((0, 0),) * (x.ndim - 2), constant_values=fill)
        x = x.reshape((b, -1, size) + x.shape[2:])
        return jnp.moveaxis(x, (1, 3), (0, 2))  # [chunks, B, HV, size, ..]

    chunks = masked(core.q, 0), masked(core.k_hat, 0), masked(core.v, 0), masked(core.decay, 1), masked(core.beta, 0)
    s, o = lax.scan(lambda s, x: _chunk(s, *x), s, chunks)
    o = jnp.moveaxis(o, (0, 2), (1, 3)).reshape((b, -1) + (spec.v_heads, spec.v_dim))
    return s, store(o[:, :n], core.v.dtype)


def _chunk(s: Array, q: Array, k: Array, v: Array, decay: Array, beta: Array) -> tuple[Array, Array]:
    """One chunk: s [.., V, K], q k [.., N, K], v [.., N, V], decay [.., N, G], beta [.., N] -> new s, o [.., N, V]."""
    n = q.shape[-2]
    t, i = jnp.arange(n)[:, None], jnp.arange(n)
    # after[.., t, i, G] = P(i -> t): product of the decays of tokens i+1 .. t; 0 above the diagonal
    after = jnp.cumprod(jnp.where((t > i)[..., None], decay[..., :, None, :], 1.0), axis=-3)
    after = jnp.where((t >= i)[..., None], after, 0.0)
    passed = jnp.cumprod(decay, axis=-2)  # P(0 -> t), [.., N, G]

    dot = lambda *args: jnp.einsum(*args, precision=lax.Precision.HIGHEST)  # noqa: E731
    if decay.shape[-1] == 1:
        a = dot("...tk,...ik->...ti", k, k) * after[..., 0]
        qk = dot("...tk,...ik->...ti", q, k) * after[..., 0]
    else:
        a = dot("...tk,...tik,...ik->...ti", k, after, k)
        qk = dot("...tk,...tik,...ik->...ti", q, after, k)
    a = jnp.where(t > i, a * beta[..., None], 0.0)
    rhs = beta[..., None] * (v - dot("...tk,...vk->...tv", passed * k, s))
    d = dot("...ti,...iv->...tv", unit_lower_inverse(a), rhs)
    o = dot("...tk,...vk->...tv", passed * q, s) + dot("...ti,...iv->...tv", qk, d)
    tail = after[..., -1, :, :]  # P(i -> end), [.., N, G]
    s = s * passed[..., -1:, :] + dot("...iv,...ik->...vk", d, tail * k)
    return s, o


def unit_lower_inverse(a: Array) -> Array:
    """(I + a)^-1 of a strictly lower triangular a [.., N, N], by doubling the diagonal blocks that are inverted:
    [[P, 0], [B, Q]]^-1 = [[P^-1, 0], [-Q^-1 B P^-1, Q^-1]]. This is substitution by blocks, as accurate as row by row.

    A library solve is not used: on a busy CPU its threads wait for each other for longer than all the rest takes.
    """
    n, lead = a.shape[-1], a.shape[:-2]
    size = 1 << (n - 1).bit_length()
    a = jnp.pad(a, [(0, 0)] * len(lead) + [(0, size - n)] * 2)
    inverse, block = jnp.ones(lead + (size, 1, 1), a.dtype), 1  # [.., blocks, block, block]
    while block < size:
        pairs = size // (2 * block)
        tiles = jnp.diagonal(a.reshape(lead + (pairs, 2 * block, pairs, 2 * block)), axis1=-4, axis2=-2)
        corner = jnp.moveaxis(tiles, -1, -3)[..., block:, :block]
        p, q = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -jnp.einsum("...ij,...jk,...kl->...il", q, corner, p, precision=lax.Precision.HIGHEST)
        top = jnp.concatenate([p, jnp.zeros_like(p)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, q], axis=-1)], axis=-2)
        block *= 2
    return inverse[..., 0, :n, :n]


__all__ = ["prefill", "prefill_core", "LinearInputs"]
