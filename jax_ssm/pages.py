"""Pages: the canonical, self-contained form of a slot, independent of storage mode and verify width."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from jax_ssm.conv import canonical_window
from jax_ssm.executors import MODES, check_config
from jax_ssm.executors import replay as replay_mode
from jax_ssm.executors.materialize import materialize_into
from jax_ssm.executors.recurrence import step
from jax_ssm.gates import l2norm, store
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
    n = jnp.minimum(n, slots.shape[0])
    by_kernel = config.implementation != "xla"

    def where(i):
        slot, page = slots[i], page_ids[i]
        live = (slot >= 0) & (slot < spec.hold) & (page >= 0) & (page < pages.ssm.shape[0])
        return jnp.where(live, slot, 0), jnp.where(live, page, 0), live

    def write(pool, value, page):
        return put_slice(pool, value[None], (page,) + (0,) * (pool.ndim - 1))

    def one(i, pages):
        slot, page, live = where(i)

        def copy(pages):
            pages = pages.replace(conv=write(pages.conv, canonical_window(spec, state, slot), page))
            if by_kernel or spec.mode == "replay":
                return pages
            return pages.replace(ssm=write(pages.ssm, MODES[spec.mode].materialize(spec, state, slot), page))

        return lax.cond(live, copy, lambda pages: pages, pages)

    pages = lax.fori_loop(0, n, one, pages)
    if by_kernel:
        targets = jnp.where((page_ids >= 0) & (page_ids < pages.ssm.shape[0]), page_ids, -1)
        ssm = materialize_into(spec, state, slots, targets, n, config.implementation, pages=pages.ssm)
        return pages.replace(ssm=ssm)
    return pages.replace(ssm=_fold_rows(spec, state, pages.ssm, n, where)) if spec.mode == "replay" else pages


def _fold_rows(spec: SSMSpec, state: ConvSSMState, ssm: Array, n: Array, where) -> Array:
    """Fold the slots of `export_into` straight into their pages, a few state rows [rows, K] at a time.

    The rows of V are independent, so one fp32 tile is all the memory this takes.
    """
    h = state.extra
    rows = next(r for r in range(max(1, min(spec.v_dim, 128 // spec.k_dim)), 0, -1) if spec.v_dim % r == 0)
    sizes = (spec.layers, spec.v_heads, spec.v_dim // rows)
    tiles = math.prod(sizes)
    group = spec.v_heads // spec.k_heads

    def body(carry):
        # one loop over (tile, record): i counts tiles of all requests, t the records of a tile
        i, t, s, ssm = carry
        slot, page, live = where(i // tiles)
        layer, head, v0 = jnp.unravel_index(i % tiles, sizes)
        v0 = v0 * rows
        records, phase = replay_mode.live(spec, h.cursor[slot])

        def record(pool, head, size, last=0):
            full = (layer, slot, head, phase * spec.history + t, last)[: pool.ndim]
            return take_slice(pool, full, (1, 1, 1, 1, size)[: pool.ndim]).reshape(size).astype(jnp.float32)

        start = take_slice(state.ssm, (layer, slot, head, v0, 0), (1, 1, 1, rows, spec.k_dim))
        s = jnp.where(t == 0, start.reshape(rows, spec.k_dim).astype(jnp.float32), s)
        k_hat = l2norm(record(h.k, head // group, spec.k_dim))
        new, _ = step(s, k_hat, record(h.v, head, rows, v0), record(h.decay, head, spec.gates), record(h.beta, head, 1)[0])
        s = jnp.where(t < records, new, s)
        tile = store(s, ssm.dtype)[None, None, None]
        write = lambda x: put_slice(x, tile, (page, layer, head, v0, 0))  # noqa: E731
        ssm = lax.cond(live, write, lambda x: x, ssm)
        done = t + 1 >= records
        return jnp.where(done, i + 1, i), jnp.where(done, 0, t + 1), s, ssm

    zero = jnp.zeros((rows, spec.k_dim), jnp.float32)
    return lax.while_loop(lambda c: c[0] < n * tiles, body, (jnp.int32(0), jnp.int32(0), zero, ssm))[3]


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
