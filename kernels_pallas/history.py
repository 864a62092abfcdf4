"""Replay's prepare: the rows whose window does not fit into their history are folded and continue in the other half.

Two launches for all layers: `plan` moves the cursors and lists the folding rows, `materialize.advance` folds the list.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas._compat import call, load, store
from kernels_pallas.gates import power_of_two
from kernels_pallas.materialize import advance


def _plan_kernel(slots_ref, lens_ref, _, _fwd, cursor_ref, forward_ref, work_ref, count_ref, *, length: int, interpret: bool):
    """One program, one lane a request row."""
    requests, slots = slots_ref.shape[0], cursor_ref.shape[0]
    i = lax.iota(jnp.int32, power_of_two(requests))
    zero, row = jnp.zeros((), jnp.int32), jnp.zeros_like(i)
    slot = load(slots_ref.at[i], mask=i < requests, other=zero)
    tokens = load(lens_ref.at[i], mask=i < requests, other=zero)
    live = (tokens > 0) & (slot >= 0) & (slot < slots - 1)
    slot = jnp.where(live, slot, slots + i)  # never addressed, and different for every row
    cursor = load(cursor_ref.at[slot], mask=live, other=zero)
    n, phase = lax.rem(cursor, 2 * length), lax.div(cursor, 2 * length)
    fold = live & (n + tokens > length)
    moved = jnp.where(fold, (1 - phase) * (2 * length), cursor)
    store(cursor_ref.at[slot], moved, mask=fold)
    store(forward_ref.at[slot], moved, mask=live)
    before = jnp.cumsum(fold.astype(jnp.int32))
    at = jnp.where(fold, before - 1, requests + i)
    for j, value in enumerate((slot, n, phase * length, slot)):
        store(work_ref.at[row + j, at], value, mask=fold)
    store(count_ref.at[row + i], jnp.max(before) + row, mask=i == 0)


def plan(cursor, forward_cursor, slots, verify_len, *, length: int):
    """Cursors after a prepare, and the work list of its folds.

    cursor, forward_cursor [S] int32, donated; slots, verify_len [R] int32. A row folds iff verify_len > 0 and
    n + verify_len > L. Returns the cursors, work [4, R] as `materialize.advance` takes it, and its count [1]. Live slots
    must be distinct.
    """
    requests = slots.shape[0]
    int32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    return call(
        _plan_kernel,
        [int32(*cursor.shape), int32(*cursor.shape), int32(4, requests), int32(1)],
        grid=(1,),
        name="replay_plan",
        num_warps=4,
        aliases={2: 0, 3: 1},
        length=length,
    )(slots, verify_len, cursor, forward_cursor)


def prepare(state, pools, cursor, forward_cursor, slots, verify_len, *, block_v: int = 16, num_warps: int = 1):
    """Open a round of mode "replay": fold what must be folded, move the cursors, publish the forward's copy.

    state [layers, S, HV, V, K], pools (k, v, decay, beta) as for `materialize.advance`, cursors and rows as for `plan`.
    Donate state and cursors. Returns (state, cursor, forward_cursor).
    """
    length = pools[0].shape[3] // 2
    cursor, forward_cursor, work, count = plan(cursor, forward_cursor, slots, verify_len, length=length)
    state, forward_cursor = advance(state, pools, count, (work,), token=forward_cursor, block_v=block_v, num_warps=num_warps)
    return state, cursor, forward_cursor
