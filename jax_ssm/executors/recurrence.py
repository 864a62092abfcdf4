"""The one-token recurrence and its replay over records: the only definition, used by every mode, fold and export.

S <- decay * S;   d = beta * (v - S k^);   S <- S + d k^T;   o = S q^          (S is [V, K], o from the unrounded S)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_ssm.gates import l2norm, round_to, row_sum

Array = jax.Array


def step(s: Array, k_hat: Array, v: Array, decay: Array, beta: Array, total=row_sum) -> tuple[Array, Array]:
    """One token. s [.., V, K], k_hat [.., K], v [.., V], decay [.., G], beta [..], all fp32; returns new s and d [.., V]."""
    s = s * decay[..., None, :]
    d = (v - read(s, k_hat, total)) * beta[..., None]
    return s + d[..., :, None] * k_hat[..., None, :], d


def read(s: Array, x: Array, total=row_sum) -> Array:
    """S x: s [.., V, K], x [.., K] -> [.., V]. Elementwise product and sum, so no matrix unit rounds it."""
    return total(s * x[..., None, :])


def expand_heads(x: Array, v_heads: int, axis: int) -> Array:
    """Repeat grouped heads along `axis` so that value head i sees head i // (HV / heads)."""
    return jnp.repeat(x, v_heads // x.shape[axis], axis=axis) if x.shape[axis] != v_heads else x


def replay(s: Array, k: Array, v: Array, decay: Array, beta: Array, n: Array, state_dtype, *, round_each: bool) -> Array:
    """Advance s [.., V, K] fp32 by the first n of the raw records k [.., N, K], v [.., N, V], decay [.., N, G], beta [.., N].

    n: scalar, or broadcastable to the leading axes of s. Rounded to `state_dtype` after every token (compact commit) or
    once at the end (fold, merge, snapshot, export); the result is fp32 either way. Records at n and beyond are never
    used: the loop stops at the largest n, and rows that are done keep their state by selection.
    """
    n = jnp.broadcast_to(n, s.shape[:-2])

    def body(t, s):
        at = [lax.dynamic_index_in_dim(x, t, axis=s.ndim - 2, keepdims=False) for x in (k, v, decay, beta)]
        new, _ = step(s, l2norm(at[0]), at[1].astype(jnp.float32), at[2], at[3])
        if round_each:
            new = round_to(new, state_dtype)
        return jnp.where((t < n)[..., None, None], new, s)

    s = lax.fori_loop(0, jnp.max(n, initial=0), body, s)
    return s if round_each else round_to(s, state_dtype)
