"""Merge, snapshot and export by kernel: the accepted states of a list of slots, straight into where they belong."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_ssm.kernels import kernels
from jax_ssm.spec import SSMSpec
from jax_ssm.state import ConvSSMState, read_index

Array = jax.Array


def materialize_into(
    spec: SSMSpec, state: ConvSSMState, slots: Array, targets: Array, count, implementation: str, *, pages: Array | None = None
) -> Array:
    """Write the accepted state of the first `count` of slots [N] to rows `targets` [N], all layers; -1 drops a request.

    pages [P, layers, HV, V, K], donated, in ssm_dtype; None: the pool of states itself, where slots without live records
    are left alone. Slots that are not live are dropped. Returns what was written.
    """
    source, zero = read_index(spec, slots), jnp.zeros_like(slots)
    n, base, pools = zero, zero, None
    if spec.mode == "replay":
        h = state.extra
        cursor, pools = h.cursor[source], (h.k, h.v, h.decay, h.beta)
        n, base = cursor % (2 * spec.history), cursor // (2 * spec.history) * spec.history
    row = source * spec.width + state.accepted[source] if spec.mode == "native" else source
    order = jnp.arange(slots.shape[0])
    live = (source < spec.hold) & (order < count)
    replaced = jnp.any((targets[:, None] == targets) & live & (order > order[:, None]), axis=1)  # the last of two wins
    work = jnp.stack([row, n, base, jnp.where(live & ~replaced, targets, -1)]).astype(jnp.int32)
    count = jnp.asarray(count, jnp.int32).reshape(1)
    return kernels(implementation).advance(state.ssm, pools, count, work, target=pages, pages=pages is not None)
