"""The slotted KV state of full attention and all that happens to it: allocate, write, commit, clear, export, restore.

A slot owns positions [0, length). A round writes its tokens at length, length + 1, .. and commits by moving `length`;
rejected tokens stay behind it, are never trusted and are overwritten by the next round.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_ssm.attention.life import check_like
from jax_ssm.attention.spec import KVSpec
from jax_ssm.gates import store
from jax_ssm.layout import DecodeLayout
from jax_ssm.state import check_slots, concrete, drop_index, dtype, pytree, read_index

Array = jax.Array


@pytree()
class KVState:
    """k, v [layers, S, max_len, KVH, D] in `storage(spec)`; length [S] int32: committed tokens of each slot."""

    k: Array
    v: Array
    length: Array


@pytree()
class KVPages:
    """P exported slots: k, v [P, layers, max_len, KVH, D] in `storage(spec)`, zero beyond length [P] int32."""

    k: Array
    v: Array
    length: Array


def storage(spec: KVSpec):
    """dtype of the pools: fp32 as it is, bf16 as its bits in uint16. XLA for CPUs has no bf16 gather and scatter: around
    each it would convert the whole pool to fp32 and back."""
    return jnp.uint16 if spec.dtype == "bf16" else jnp.float32


def as_stored(spec: KVSpec, x: Array) -> Array:
    """Values rounded to the spec's dtype, in the form of the pools."""
    x = store(x, dtype(spec.dtype))
    return lax.bitcast_convert_type(x, jnp.uint16) if spec.dtype == "bf16" else x


def as_values(spec: KVSpec, x: Array) -> Array:
    """Entries of a pool as numbers in the spec's dtype."""
    return lax.bitcast_convert_type(x, jnp.bfloat16) if spec.dtype == "bf16" else x


def init_kv(spec: KVSpec) -> KVState:
    """Allocate the state of `spec`, all zero. Bytes: `kv_bytes(spec)` plus HOLD."""
    shape = (spec.layers, spec.slots, spec.max_len, spec.kv_heads, spec.head_dim)
    kind = storage(spec)
    return KVState(jnp.zeros(shape, kind), jnp.zeros(shape, kind), jnp.zeros(spec.slots, jnp.int32))


def clear_kv(spec: KVSpec, state: KVState, slots: Array) -> KVState:
    """Zero the slots [N] and their lengths, on allocation and on reuse. Donate `state`.

    Concrete ids outside 0..HOLD-1 raise ValueError; traced ones are dropped.
    """
    check_slots(spec, slots)
    index = drop_index(spec, jnp.asarray(slots, jnp.int32))

    def one(i, state):
        return lax.cond(index[i] < spec.slots, lambda s: _put_slot(s, index[i], None, None, 0), lambda s: s, state)

    return lax.fori_loop(0, index.shape[0], one, state)


def _put_slot(state: KVState, slot: Array, k: Array | None, v: Array | None, length) -> KVState:
    """Overwrite one slot: k, v [layers, max_len, KVH, D], None for zeros."""

    def put(pool, x):
        x = jnp.zeros(pool.shape[:1] + pool.shape[2:], pool.dtype) if x is None else x
        return lax.dynamic_update_slice_in_dim(pool, x[:, None], slot, axis=1)

    return KVState(put(state.k, k), put(state.v, v), state.length.at[slot].set(length))


def write_kv(spec: KVSpec, state: KVState, row, slots: Array, positions: Array, k: Array, v: Array) -> KVState:
    """Store keys and values of one layer at their positions.

    slots [R]; positions [R, N] int32, negative for nothing; k, v [R, N, KVH, D]. Slots that are not live and positions
    outside [0, max_len) are dropped.
    """
    keep = (positions >= 0) & (positions < spec.max_len)
    target = drop_index(spec, slots[:, None], keep)
    at = jnp.where(keep, positions, 0)
    k, v = (as_stored(spec, x) for x in (k, v))
    put = lambda pool, x: pool.at[row, target, at].set(x, mode="drop")  # noqa: E731
    return state.replace(k=put(state.k, k), v=put(state.v, v))


def read_kv(spec: KVSpec, state: KVState, row, slots: Array, at: Array) -> tuple[Array, Array]:
    """Keys and values [R, n, KVH, D] of one layer at positions `at` [n]; whatever is stored there, so mask it."""
    source = read_index(spec, slots)[:, None]
    at = jnp.minimum(at, spec.max_len - 1)
    return as_values(spec, state.k[row, source, at]), as_values(spec, state.v[row, source, at])


def committed(spec: KVSpec, state: KVState, slots: Array) -> Array:
    """[R] int32: committed tokens of the slots; 0 for padding."""
    live = (slots >= 0) & (slots < spec.hold)
    return jnp.where(live, state.length[read_index(spec, slots)], 0)


def advance_kv(spec: KVSpec, state: KVState, slots: Array, n: Array) -> KVState:
    """Commit n [R] more tokens of the slots [R]; slots that are not live are dropped, max_len is never passed."""
    length = jnp.minimum(committed(spec, state, slots) + jnp.maximum(n, 0), spec.max_len)
    return state.replace(length=state.length.at[drop_index(spec, slots, n > 0)].set(length, mode="drop"))


def accept_kv(spec: KVSpec, state: KVState, layout: DecodeLayout, lengths: Array) -> KVState:
    """Commit the accepted prefix of a verify: lengths [R], base token included, clamped to verify_len; 0 does nothing."""
    return advance_kv(spec, state, layout.slots, jnp.clip(lengths, 0, layout.verify_len))


def init_kv_pages(spec: KVSpec, pages: int) -> KVPages:
    """Allocate `pages` zero pages, each one slot of all layers."""
    shape = (pages, spec.layers, spec.max_len, spec.kv_heads, spec.head_dim)
    kind = storage(spec)
    return KVPages(jnp.zeros(shape, kind), jnp.zeros(shape, kind), jnp.zeros(pages, jnp.int32))


def export_kv(spec: KVSpec, state: KVState, pages: KVPages, page_ids: Array, slots: Array, n: Array) -> KVPages:
    """Write the committed tokens of the first n of slots [N] into pages page_ids [N]. Donate `pages`.

    Beyond its length a page is zero: rejected tokens and the slot's last owner do not travel. One request at a time, so
    nothing of the size of a batch is allocated. Slots that are not live and page ids out of range are dropped. Raises
    ValueError for pages of another geometry or dtype, and for page_ids and slots of different lengths.
    """
    valid, page_ids, slots = _pairs(spec, state, pages, page_ids, slots)

    def one(i, pages):
        def write(p):
            length = state.length[slots[i]]
            real = (jnp.arange(spec.max_len) < length)[:, None, None]

            def put(page, pool):
                x = lax.dynamic_index_in_dim(pool, slots[i], axis=1, keepdims=False)
                return lax.dynamic_update_index_in_dim(page, jnp.where(real, x, jnp.zeros((), x.dtype)), page_ids[i], 0)

            return KVPages(put(p.k, state.k), put(p.v, state.v), p.length.at[page_ids[i]].set(length))

        return lax.cond(valid[i], write, lambda p: p, pages)

    return lax.fori_loop(0, jnp.minimum(n, slots.shape[0]), one, pages)


def restore_kv(spec: KVSpec, state: KVState, pages: KVPages, page_ids: Array, slots: Array, n: Array) -> KVState:
    """Load pages page_ids [N] into the first n of slots [N], whole slots, so no trace of the last owner is left.

    Donate `state`. Raises ValueError for concrete slots that are not live or repeated and for concrete page ids out of
    range, while traced ones change nothing; for pages of another geometry or dtype, and for page_ids and slots of
    different lengths.
    """
    valid, page_ids, slots = _pairs(spec, state, pages, page_ids, slots)
    check_slots(spec, slots, n)
    ids, count, total = concrete(page_ids), concrete(n), pages.length.shape[0]
    bad = [] if ids is None or count is None else [p for p in ids[: int(count)].tolist() if not 0 <= p < total]
    if bad:
        raise ValueError(f"page_ids={ids.tolist()} contains {bad}: allowed are 0..{total - 1}")

    def one(i, state):
        def write(s):
            k, v, length = (lax.dynamic_index_in_dim(x, page_ids[i], keepdims=False) for x in (pages.k, pages.v, pages.length))
            return _put_slot(s, slots[i], k, v, length)

        return lax.cond(valid[i], write, lambda s: s, state)

    return lax.fori_loop(0, jnp.minimum(n, slots.shape[0]), one, state)


def _pairs(spec: KVSpec, state: KVState, pages: KVPages, page_ids: Array, slots: Array) -> tuple[Array, Array, Array]:
    """(valid [N], page_ids [N], slots [N]) after the checks: a smaller page or state would be copied in part."""
    total = pages.length.shape[0] if isinstance(pages, KVPages) else 0
    check_like("pages", pages, jax.eval_shape(lambda: init_kv_pages(spec, total)))
    check_like("state", state, jax.eval_shape(lambda: init_kv(spec)))
    slots, page_ids = jnp.asarray(slots, jnp.int32), jnp.asarray(page_ids, jnp.int32)
    if slots.ndim != 1 or page_ids.shape != slots.shape:
        raise ValueError(f"page_ids.shape={page_ids.shape}, slots.shape={slots.shape} are not allowed: [N] both, of one length")
    valid = (slots >= 0) & (slots < spec.hold) & (page_ids >= 0) & (page_ids < total)
    return valid, page_ids, slots
