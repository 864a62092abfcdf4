"""Pages: the canonical, self-contained form of a slot, independent of storage mode and verify width."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ssm.conv import canonical_window
from jax_ssm.executors import MODES, check_config
from jax_ssm.executors.materialize import materialize_into
from jax_ssm.executors.recurrence import step
from jax_ssm.gates import l2norm, store
from jax_ssm.kernels import kernels
from jax_ssm.spec import KernelConfig, SSMSpec, page_bytes
from jax_ssm.state import (
    ConvSSMState,
    as_ids,
    check_slots,
    check_state,
    concrete,
    dtype,
    map_slots,
    put_slice,
    pytree,
    take,
    take_slice,
)

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


def check_pages(spec: SSMSpec, pages: Pages) -> None:
    """Raise ValueError unless the pages have the geometry and dtypes of `spec`: a smaller page would restore in part."""
    want = jax.eval_shape(lambda: init_pages(spec, pages.ssm.shape[0]))
    for name in ("ssm", "conv"):
        has, needs = getattr(pages, name), getattr(want, name)
        if has.shape != needs.shape or has.dtype != needs.dtype:
            raise ValueError(f"pages.{name}={has.dtype}{has.shape} is not allowed: this spec needs {needs.dtype}{needs.shape}")


def check_transfer(spec: SSMSpec, state: ConvSSMState, pages: Pages, page_ids, slots) -> tuple[Array, Array]:
    """(page_ids [N], slots [N]) as int32. Raises ValueError when they differ in length, are no integer ids, or pages or
    state are of another geometry."""
    check_state(spec, state)
    check_pages(spec, pages)
    page_ids, slots = as_ids("page_ids", page_ids), as_ids("slots", slots)
    if page_ids.shape != slots.shape:
        raise ValueError(f"page_ids.shape={page_ids.shape} must equal slots.shape={slots.shape}")
    return page_ids, slots


def export_into(
    spec: SSMSpec,
    state: ConvSSMState,
    pages: Pages,
    page_ids: Array,
    slots: Array,
    n: Array,
    config: KernelConfig = KernelConfig(),
) -> Pages:
    """Write the canonical state of the first n of slots [N] into pages page_ids [N].

    Donate `pages`: temporary memory is a few kilobytes at most, whatever the batch. The state is unchanged; replay folds
    its live records on the way, by the recurrence of every other fold. Requests whose slot is not live or whose page id
    is out of range are dropped. Legal only between an accept and the next prepare. Raises ValueError for pages of another
    geometry or dtype.
    """
    page_ids, slots = check_transfer(spec, state, pages, page_ids, slots)
    check_config(config)
    if not slots.size:
        return pages
    if config.implementation != "xla":
        count = jnp.asarray(n, jnp.int32).reshape(1)
        copy = kernels(config.implementation).windows
        return Pages(
            ssm=materialize_into(spec, state, slots, page_ids, n, config.implementation, pages=pages.ssm),
            conv=copy(state.conv, state.accepted, count, slots, page_ids, pages.conv),
        )
    write = _fold_rows if spec.mode == "replay" else _copy_slots
    return write(spec, state, pages, page_ids, slots, n)


def _copy_slots(spec: SSMSpec, state: ConvSSMState, pages: Pages, page_ids: Array, slots: Array, n: Array) -> Pages:
    """Modes without records: one slot after the other."""

    def write(pool, value, page):
        return put_slice(pool, value[None], (page,) + (0,) * (pool.ndim - 1))

    def one(i, pages):
        slot, page = slots[i], page_ids[i]
        live = (slot >= 0) & (slot < spec.hold) & (page >= 0) & (page < pages.ssm.shape[0])

        def copy(pages):
            ssm = write(pages.ssm, MODES[spec.mode].materialize(spec, state, slot), page)
            return Pages(ssm, write(pages.conv, canonical_window(spec, state, slot), page))

        return lax.cond(live, copy, lambda pages: pages, pages)

    return lax.fori_loop(0, jnp.minimum(n, slots.shape[0]), one, pages)


def _fold_rows(spec: SSMSpec, state: ConvSSMState, pages: Pages, page_ids: Array, slots: Array, n: Array) -> Pages:
    """Mode "replay": fold slots straight into their pages, one row [K] of V after the other (rows are independent).

    Written for its temporary memory. XLA for CPUs keeps 64 bytes for every value that passes from one fusion to the next,
    so there is one loop with one counter, whose digits are unsigned (signed division takes corrections, which are kept).
    What is written is carried: a page that is read and written by one fusion would be copied. A dropped request writes
    back what its page holds, since a branch needs tables of its own. A few channels of the window go along with every row.
    """
    h, zero, one = state.extra, np.uint32(0), np.uint32(1)
    digits = tuple(np.uint32(x) for x in (spec.layers, spec.v_heads, spec.v_dim, spec.history))
    row_shape = (1, 1, 1, 1, spec.k_dim)
    channels = -(-spec.channels // (spec.v_heads * spec.v_dim))
    piece_shape = (1, 1, channels, spec.conv_width - 1)

    def at(x, i):
        value = lax.dynamic_slice(x, (i,), (1,))[0]
        if x.shape[0] == 1:  # what no step changes would be kept: an addition of zero that depends on the counter
            value += lax.div(i, np.uint32(2**31)).astype(jnp.int32)
        return value.astype(jnp.uint32)

    def body(carry):
        i, row, piece, ssm, conv = carry
        request, layer, head, v, t = _digits(i, *digits)
        slot, page = at(slots, request), at(page_ids, request)
        live = (slot < np.uint32(spec.hold)) & (page < np.uint32(ssm.shape[0]))
        phase, n_records = _digits(at(h.cursor, slot), 2 * spec.history)
        records = jnp.where(live, n_records, zero)

        def record(pool, head, size=1, last=zero):
            start = (layer, slot, head, phase * np.uint32(spec.history) + t, last)[: pool.ndim]
            return take_slice(pool, start, (1, 1, 1, 1, size)[: pool.ndim]).reshape(size).astype(jnp.float32)

        def first(now, pool, start, shape, page_pool, page_start):
            """`now` after the first step of a row; in it the values of the slot, or of the page where it is dropped."""
            fresh, held = (take_slice(*x, shape).astype(now.dtype) for x in ((pool, start), (page_pool, page_start)))
            return jnp.where(t == zero, jnp.where(live, fresh, held), now)

        target = (page, layer, head, v, zero)
        row = first(row, state.ssm, (layer, slot, head, v, zero), row_shape, ssm, target)
        k_hat = l2norm(record(h.k, _digits(head, spec.v_heads // spec.k_heads)[0], spec.k_dim), _row_sum)
        beta = record(h.beta, head)[0]
        new, _ = step(row[0, 0, 0], k_hat, record(h.v, head, last=v), record(h.decay, head, spec.gates), beta, _row_sum)
        row = jnp.where(t < records, new.reshape(row_shape), row)
        ssm = put_slice(ssm, store(row, ssm.dtype), target)

        channel = (head * np.uint32(spec.v_dim) + v) * np.uint32(channels)
        channel = jnp.minimum(channel, np.uint32(spec.channels - channels))  # the last pieces overlap
        offset = at(state.accepted, slot)
        piece = first(piece, state.conv, (layer, slot, channel, offset), piece_shape, conv, (page, layer, channel, zero))
        conv = put_slice(conv, piece, (page, layer, channel, zero))

        following = (lax.div(i, digits[-1]) + one) * digits[-1]
        return jnp.where(t + one < records, i + one, following), row, piece, ssm, conv

    def more(carry):
        return lax.div(carry[0], np.uint32(math.prod(digits))).astype(jnp.int32) < jnp.minimum(n, slots.shape[0])

    empty = (zero, jnp.zeros(row_shape, jnp.float32), jnp.zeros(piece_shape, pages.conv.dtype))
    return Pages(*lax.while_loop(more, body, (*empty, pages.ssm, pages.conv))[3:])


def _digits(i: Array, *sizes: int) -> list[Array]:
    """i as a number whose lower digits have these bases, highest digit first."""
    whole = np.uint32(math.prod(sizes))
    high = lax.div(i, whole)
    rest, low = i - high * whole, []
    for size in reversed(sizes[1:]):
        low.append(lax.rem(rest, np.uint32(size)))
        rest = lax.div(rest, np.uint32(size))
    return [high, rest, *reversed(low)]


def _row_sum(x: Array, keepdims: bool = False) -> Array:
    """Sum over the last axis in two steps of at most 32 values, or XLA for CPUs keeps the terms of longer ones in memory."""
    width = 32 if x.shape[-1] % 32 == 0 else 1
    columns = jnp.sum(lax.optimization_barrier(x.reshape(*x.shape[:-1], -1, width)), axis=-2)
    return jnp.sum(columns, axis=-1, keepdims=keepdims)


def restore(spec: SSMSpec, state: ConvSSMState, pages: Pages, page_ids: Array, slots: Array, n: Array) -> ConvSSMState:
    """Load pages page_ids [N] into the first n of slots [N]: row 0, window offset 0, cursor 0, accepted index 0.

    Donate `state`. Everything else that the slot owned (other native rows, records, window tail) is zeroed, so no
    trace of its last owner is left. Requests whose slot is not live or whose page id is out of range change nothing.
    Raises ValueError for concrete ids that are not live, repeated, or outside the pages, and for pages of another
    geometry or dtype.
    """
    given, (page_ids, slots) = (page_ids, slots), check_transfer(spec, state, pages, page_ids, slots)
    check_slots(spec, given[1], n)
    ids, count = concrete(given[0]), concrete(n)
    bad = [] if ids is None or count is None else [int(p) for p in ids[:count] if not 0 <= p < pages.ssm.shape[0]]
    if bad:
        raise ValueError(f"page_ids={ids.tolist()} contains {bad}: allowed are 0..{pages.ssm.shape[0] - 1}")
    if not slots.size:
        return state
    total = pages.ssm.shape[0]
    valid = (slots >= 0) & (slots < spec.hold) & (page_ids >= 0) & (page_ids < total)

    def one(i, state):
        return lax.cond(valid[i], lambda s: _restore_one(spec, s, pages, page_ids[i], slots[i]), lambda s: s, state)

    return lax.fori_loop(0, jnp.minimum(n, slots.shape[0]), one, state)


def _restore_one(spec: SSMSpec, state: ConvSSMState, pages: Pages, page: Array, slot: Array) -> ConvSSMState:
    def zero(x, axis, rows):
        shape = x.shape[:axis] + (rows,) + x.shape[axis + 1 :]
        return put_slice(x, jnp.zeros(shape, x.dtype), (0,) * axis + (slot * rows,) + (0,) * (x.ndim - axis - 1))

    state = map_slots(spec, state, zero)
    ssm, conv = (take(pool, (page,))[:, None] for pool in (pages.ssm, pages.conv))
    row = slot * spec.rows_per_slot
    return state.replace(
        ssm=put_slice(state.ssm, ssm, (0, row, 0, 0, 0)),
        conv=put_slice(state.conv, conv, (0, slot, 0, 0)),
    )
