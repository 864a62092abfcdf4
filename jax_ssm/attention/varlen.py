"""Packed variable-length attention without a state, for encoders (vision, audio)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_ssm.attention.plan import attend, plan_decode
from jax_ssm.attention.selector import BackendError
from jax_ssm.state import concrete

Array = jax.Array

BACKENDS = ("xla",)


def varlen_attention(
    q: Array, k: Array, v: Array, cu: Array, scale: float | None = None, causal: bool = False, backend: str = "xla"
) -> Array:
    """Softmax attention inside each of the packed sequences.

    q [T, heads, D]; k, v [T, KVH, D]; cu [n+1] int32: sequence i is rows cu[i]..cu[i+1]-1. Returns [T, heads, D] in q's
    dtype; rows from cu[-1] on are padding: never read, exactly zero. scale: None for D**-0.5. Softmax in fp32.
    Raises BackendError for a backend that is not available, ValueError for a concrete cu that is not ascending in 0..T.
    """
    if backend not in BACKENDS:
        raise BackendError(f"backend={backend!r} is not available for varlen attention: allowed are {BACKENDS}")
    t = q.shape[0]
    if k.shape[0] != t or v.shape[0] != t:
        raise ValueError(f"k.shape={k.shape}, v.shape={v.shape} must have the {t} rows of q.shape={q.shape}")
    edges = concrete(cu)
    if edges is not None and (edges[0] != 0 or (edges[1:] < edges[:-1]).any() or edges[-1] > t):
        raise ValueError(f"cu={edges.tolist()} is not allowed: it must start at 0 and ascend to at most {t} rows")
    cu = jnp.asarray(cu, jnp.int32)
    sequence = lambda at: jnp.searchsorted(cu, at, side="right")  # noqa: E731
    mine = jnp.arange(t, dtype=jnp.int32)

    def visible(at):
        seen = (sequence(at) == sequence(mine)[:, None]) & (at < cu[-1]) & (mine < cu[-1])[:, None]
        return (seen & (at <= mine[:, None]) if causal else seen)[None]

    def load(source, at):
        return tuple(x[jnp.minimum(at, t - 1)][None] for x in source)

    plan = plan_decode(t, (k.shape[1] * k.shape[2] + v.shape[1] * v.shape[2]) * k.dtype.itemsize)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return attend(plan, plan.blocks, q[None], (k, v), load, visible, scale)[1][0]
