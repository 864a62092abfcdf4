"""Pages: the canonical, self-contained form of a slot, independent of storage mode and verify width."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_ssm.conv import canonical_window
from jax_ssm.executors import replay as replay_mode
from jax_ssm.executors.recurrence import step
from jax_ssm.gates import l2norm, store
from jax_ssm.spec import SSMSpec, page_bytes
from jax_ssm.state import ConvSSMState, check_slots, dtype, map_slots, pytree

__all__ = ["Pages", "init_pages", "export_into", "restore", "page_bytes"]

Array = jax.Array


@pytree()
class Pages:
    """P pages: ssm [P, layers, HV, V, K] in ssm_dtype, conv [P, layers, C, kw-1] raw inputs, blocks q | k | v."""

    ssm: Array
    conv: Array


def init_pages(spec: SSMSpec, pages: int) -> Pages:
    """Allocate `pages` zero pages of `page_bytes(spec)` bytes each."""
    return Pages(
        jnp.zeros((pages, spec.layers, spec.v_heads, spec.v_dim, spec.k_dim), dtype(spec.ssm_dtype)),
        jnp.zeros((pages, spec.layers, spec.channels, spec.conv_width - 1), dtype(spec.act_dtype)),
    )


def export_into(spec: SSMSpec, state: ConvSSMState, pages: Pages, page_ids: Array, slots: Array, n: Array) -> Pages:
    """Write the canonical state of the first n of slots [N] into pages page_ids [N]; one request at a time.

    Donate `pages`: nothing of the size of a batch is allocated. The state is unchanged; replay folds its live records
    on the way, with the recurrence of every other fold. Requests whose slot is not live or whose page id is out of range
    are dropped. Legal only between an accept and the next prepare.
    """
    slots, page_ids = jnp.asarray(slots, jnp.int32), jnp.asarray(page_ids, jnp.int32)
    total = pages.ssm.shape[0]
    valid = (slots >= 0) & (slots < spec.hold) & (page_ids >= 0) & (page_ids < total)

    def one(i, pages):
        return lax.cond(valid[i], lambda p: _export_one(spec, state, p, page_ids[i], slots[i]), lambda p: p, pages)

    return lax.fori_loop(0, jnp.minimum(n, slots.shape[0]), one, pages)


def _export_one(spec: SSMSpec, state: ConvSSMState, pages: Pages, page: Array, slot: Array) -> Pages:
    conv = lax.dynamic_update_slice(pages.conv, canonical_window(spec, state, slot)[None], (page, 0, 0, 0))
    if spec.mode == "replay":
        ssm = _fold_into(spec, state, pages.ssm, page, slot)
    else:
        row = slot if spec.mode == "compact" else slot * spec.width + state.accepted[slot]
        ssm = lax.dynamic_slice_in_dim(state.ssm, row, 1, axis=1)
        ssm = lax.dynamic_update_slice(pages.ssm, ssm.swapaxes(0, 1), (page, 0, 0, 0, 0))
    return Pages(ssm, conv)


def _fold_into(spec: SSMSpec, state: ConvSSMState, ssm: Array, page: Array, slot: Array) -> Array:
    """Fold one slot straight into its page, a few state rows [rows, K] at a time: the rows of V are independent, so
    the only temporary is that tile."""
    h = state.extra
    n, phase = replay_mode.live(spec, h.cursor[slot])
    rows = max(1, min(spec.v_dim, 128 // spec.k_dim))
    rows = next(r for r in range(rows, 0, -1) if spec.v_dim % r == 0)
    tiles = spec.v_dim // rows
    group = spec.v_heads // spec.k_heads

    def tile(i, ssm):
        layer, head, v0 = i // (spec.v_heads * tiles), i // tiles % spec.v_heads, i % tiles * rows
        s = lax.dynamic_slice(state.ssm, (layer, slot, head, v0, 0), (1, 1, 1, rows, spec.k_dim))[0, 0, 0]

        def record(t, s):
            at = phase * spec.history + t
            k = l2norm(h.k[layer, slot, head // group, at])
            v = lax.dynamic_slice(h.v, (layer, slot, head, at, v0), (1, 1, 1, 1, rows))[0, 0, 0, 0]
            s, _ = step(s, k, v.astype(jnp.float32), h.decay[layer, slot, head, at], h.beta[layer, slot, head, at])
            return s

        s = lax.fori_loop(0, n, record, s.astype(jnp.float32))
        return lax.dynamic_update_slice(ssm, store(s, ssm.dtype)[None, None, None], (page, layer, head, v0, 0))

    return lax.fori_loop(0, spec.layers * spec.v_heads * tiles, tile, ssm)


def restore(spec: SSMSpec, state: ConvSSMState, pages: Pages, page_ids: Array, slots: Array, n: Array) -> ConvSSMState:
    """Load pages page_ids [N] into the first n of slots [N]: row 0, window offset 0, cursor 0, accepted index 0.

    Donate `state`. Everything else that the slot owned (other native rows, records, window tail) is zeroed, so no
    trace of its last owner is left. Requests whose slot is not live or whose page id is out of range change nothing.
    Raises ValueError for concrete ids that are not live, repeated, or outside the pages.
    """
    check_slots(spec, slots, n)
    slots, page_ids = jnp.asarray(slots, jnp.int32), jnp.asarray(page_ids, jnp.int32)
    total = pages.ssm.shape[0]
    valid = (slots >= 0) & (slots < spec.hold) & (page_ids >= 0) & (page_ids < total)

    def one(i, state):
        return lax.cond(valid[i], lambda s: _restore_one(spec, s, pages, page_ids[i], slots[i]), lambda s: s, state)

    return lax.fori_loop(0, jnp.minimum(n, slots.shape[0]), one, state)


def _restore_one(spec: SSMSpec, state: ConvSSMState, pages: Pages, page: Array, slot: Array) -> ConvSSMState:
    def zero(x, axis, rows):
        shape = x.shape[:axis] + (rows,) + x.shape[axis + 1 :]
        return lax.dynamic_update_slice_in_dim(x, jnp.zeros(shape, x.dtype), slot * rows, axis)

    state = map_slots(spec, state, zero)
    ssm = lax.dynamic_index_in_dim(pages.ssm, page, keepdims=False)[:, None]
    conv = lax.dynamic_index_in_dim(pages.conv, page, keepdims=False)[:, None]
    row = slot * spec.rows_per_slot
    return state.replace(
        ssm=lax.dynamic_update_slice(state.ssm, ssm, (0, row, 0, 0, 0)),
        conv=lax.dynamic_update_slice(state.conv, conv, (0, slot, 0, 0)),
    )
