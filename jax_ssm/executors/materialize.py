"""Merge, snapshot and export by kernel: the accepted states of a list of slots, straight into where they belong."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_ssm.kernels import kernels
from jax_ssm.spec import SSMSpec
from jax_ssm.state import ConvSSMState

Array = jax.Array


def materialize_into(
    spec: SSMSpec, state: ConvSSMState, slots: Array, targets: Array, count, implementation: str, *, pages: Array | None = None
) -> Array:
    """Write the accepted state of the first `count` of slots [N] to rows `targets` [N], all layers.

    pages [P, layers, HV, V, K], donated, in ssm_dtype; None: the pool of states itself, where slots without live records
    are left alone. Requests whose slot is not live or whose target does not exist are dropped; of several for one target the
    last wins. Returns what was written.
    """
    place, pools = state.accepted, None
    if spec.mode == "replay":
        h = state.extra
        place, pools = h.cursor, (h.k, h.v, h.decay, h.beta)
    count, items = jnp.asarray(count, jnp.int32).reshape(1), (slots, targets, place)
    return kernels(implementation).advance(state.ssm, pools, count, items, target=pages, pages=pages is not None)
