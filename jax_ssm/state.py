"""The persistent state as pytrees: allocation, clearing, and how a slot id addresses a pool.

Every leaf has a slot axis, so clearing a slot needs no list of fields. Slot ids that are not live (HOLD, or anything
out of range inside a jitted call) are sent to an index past the end and dropped; nothing wraps, nothing clamps onto
a live slot.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ssm.spec import SSMSpec, state_bytes

__all__ = ["CompactWindow", "ReplayHistory", "ConvSSMState", "dtype", "init_state", "clear", "state_bytes"]

Array = jax.Array


def dtype(name: str):
    """jnp dtype of "fp32" or "bf16"."""
    return {"fp32": jnp.float32, "bf16": jnp.bfloat16}[name]


def pytree(*static: str):
    """Class decorator: a frozen dataclass registered as a pytree whose fields named in `static` are metadata.

    Instances get `replace(**fields)`, a copy with some fields exchanged.
    """

    def register(cls):
        cls.replace = replace
        cls = dataclass(frozen=True)(cls)
        fields = [f for f in cls.__dataclass_fields__ if f not in static]
        return jax.tree_util.register_dataclass(cls, data_fields=fields, meta_fields=list(static))

    return register


@pytree()
class CompactWindow:
    """Raw inputs of the current verify window (mode "compact"); nothing here outlives one round.

    k [layers, S, KH, W, K] and v [layers, S, HV, W, V] in the activation dtype,
    decay [layers, S, HV, W, G] and beta [layers, S, HV, W] fp32.
    """

    k: Array
    v: Array
    decay: Array
    beta: Array


@pytree()
class ReplayHistory:
    """Records of accepted tokens since the checkpoint, in two halves of L, and their cursors (mode "replay").

    k [layers, S, KH, 2L, K] and v [layers, S, HV, 2L, V] raw, activation dtype; d [layers, S, HV, 2L, V] the corrected
    value, decay [layers, S, HV, 2L, G] = exp(g), beta [layers, S, HV, 2L], all fp32.
    cursor [S] int32 = phase * 2L + n: half `phase` is live and holds n records. forward_cursor [S] is the copy that the
    forward of this round reads, so accept may run before or after it.
    """

    k: Array
    v: Array
    d: Array
    decay: Array
    beta: Array
    cursor: Array
    forward_cursor: Array


@pytree()
class ConvSSMState:
    """Everything that a group of linear-attention layers keeps between rounds.

    ssm [layers, S * rows_per_slot, HV, V, K] in ssm_dtype, K contiguous; native keeps W rows a slot, row
    `slot * W + t` after token t. conv [layers, S, C, window] raw convolution inputs. accepted [S] int32: accepted
    length of the last round minus one, the offset of the valid native row and convolution window.
    extra: None (native), CompactWindow or ReplayHistory.
    """

    ssm: Array
    conv: Array
    accepted: Array
    extra: CompactWindow | ReplayHistory | None


def init_state(spec: SSMSpec) -> ConvSSMState:
    """Allocate the state of `spec`: all zero, HOLD and cursors included. Bytes: `state_bytes(spec)` plus HOLD."""
    act, layers, s, heads = dtype(spec.act_dtype), spec.layers, spec.slots, spec.v_heads

    def records(length: int):
        return (
            jnp.zeros((layers, s, spec.k_heads, length, spec.k_dim), act),
            jnp.zeros((layers, s, heads, length, spec.v_dim), act),
            jnp.zeros((layers, s, heads, length, spec.gates), jnp.float32),
            jnp.zeros((layers, s, heads, length), jnp.float32),
        )

    extra = None
    if spec.mode == "compact":
        extra = CompactWindow(*records(spec.width))
    elif spec.mode == "replay":
        k, v, decay, beta = records(2 * spec.history)
        d = jnp.zeros(v.shape, jnp.float32)
        extra = ReplayHistory(k, v, d, decay, beta, jnp.zeros(s, jnp.int32), jnp.zeros(s, jnp.int32))
    return ConvSSMState(
        ssm=jnp.zeros((layers, s * spec.rows_per_slot, heads, spec.v_dim, spec.k_dim), dtype(spec.ssm_dtype)),
        conv=jnp.zeros((layers, s, spec.channels, spec.window), act),
        accepted=jnp.zeros(s, jnp.int32),
        extra=extra,
    )


@lru_cache(maxsize=64)
def _state_shapes(spec: SSMSpec) -> ConvSSMState:
    return jax.eval_shape(lambda: init_state(spec))


def check_state(spec: SSMSpec, state: ConvSSMState) -> None:
    """Raise ValueError unless `state` has the parts, shapes and dtypes of `spec`; works on traced states too."""
    want = _state_shapes(spec)
    if type(state.extra) is not type(want.extra):
        has, needs = (type(x.extra).__name__ for x in (state, want))
        raise ValueError(f"state.extra={has} is not allowed: mode {spec.mode!r} needs {needs}")
    for (path, needs), has in zip(jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(state), strict=True):
        if has.shape != needs.shape or has.dtype != needs.dtype:
            name = "state" + jax.tree_util.keystr(path)
            raise ValueError(f"{name}={has.dtype}{has.shape} is not allowed: this spec needs {needs.dtype}{needs.shape}")


def concrete(x) -> np.ndarray | None:
    """Value of `x` on the host, or None when it is traced and cannot be looked at."""
    return None if isinstance(x, jax.core.Tracer) else np.asarray(x)


def as_ids(name: str, x) -> Array:
    """Ids [N] (array or list) as int32. Raises ValueError for floats, booleans and other ranks.

    Wider integers saturate, so that an id out of range stays out of range; check values before, on what was given.
    """
    x = x if hasattr(x, "dtype") else np.asarray(x, np.int32 if len(x) == 0 else None)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name}.dtype={x.dtype} is not allowed: ids are integers")
    if x.ndim != 1:
        raise ValueError(f"{name}.shape={x.shape} is not allowed: ids have one axis")
    if x.dtype.itemsize > 4 or x.dtype == jnp.uint32:
        x = x.clip(-1 if x.dtype.kind == "i" else 0, 2**31 - 1)
    return jnp.asarray(x, jnp.int32)


def check_slots(spec: SSMSpec, slots, n=None) -> None:
    """Raise ValueError unless the first n `slots` are distinct ids in 0..HOLD-1. Traced ids are not looked at."""
    ids, n = concrete(slots), concrete(len(slots) if n is None else n)
    if ids is None or n is None:
        return
    ids = ids[: int(n)]
    bad = ids[(ids < 0) | (ids >= spec.hold)]
    if bad.size:
        raise ValueError(f"slots={ids.tolist()} contains {bad.tolist()}: allowed are 0..{spec.hold - 1} ({spec.hold} is HOLD)")
    if len(set(ids.tolist())) != ids.size:
        raise ValueError(f"slots={ids.tolist()} repeats an id: slots of one call must be distinct")


def check_row(spec: SSMSpec, row) -> None:
    """Raise ValueError unless `row` is a layer row 0..layers-1. A traced row is not looked at."""
    number = concrete(row)
    if number is not None and not 0 <= number < spec.layers:
        raise ValueError(f"row={row} is not allowed: layer rows are 0..{spec.layers - 1}")


def check_prompt(spec: SSMSpec, row, slots, lengths, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """(slots [B], lengths [B]) as int32 for a prompt chunk of shape [B, N], lengths within 0..N.

    Raises ValueError for shapes that do not agree, N = 0, and where values are concrete: a row that is no layer, slots
    out of range or repeated (HOLD is padding), lengths outside 0..N. Traced lengths are clamped.
    """
    check_row(spec, row)
    ids, sizes = as_ids("slots", slots), as_ids("lengths", lengths)
    if len(shape) != 2 or not shape[1]:
        raise ValueError(f"inputs of shape [B, N] = {list(shape)} are not allowed: N is at least 1")
    for name, x in (("slots", ids), ("lengths", sizes)):
        if x.shape != shape[:1]:
            raise ValueError(f"{name}.shape={x.shape} is not allowed: the inputs have {shape[0]} rows")
    values = concrete(slots)
    if values is not None:
        check_slots(spec, values[values != spec.hold])
    values = concrete(lengths)
    if values is not None and ((values < 0) | (values > shape[1])).any():
        raise ValueError(f"lengths={values.tolist()} is not allowed: the inputs hold 0..{shape[1]} tokens a row")
    return ids, jnp.clip(sizes, 0, shape[1])


def drop_index(spec: SSMSpec, slots: Array, keep: Array | bool = True) -> Array:
    """Slot ids for a scatter with mode="drop": live ids that are kept, and S (past the end) for all others."""
    return jnp.where(keep & (slots >= 0) & (slots < spec.hold), slots, spec.slots).astype(jnp.int32)


def read_index(spec: SSMSpec, slots: Array) -> Array:
    """Slot ids for a gather: live ids, and HOLD for all others."""
    return jnp.where((slots >= 0) & (slots < spec.hold), slots, spec.hold).astype(jnp.int32)


def _bits(x: Array) -> Array:
    """bf16 as its bits in uint16, anything else as it is.

    Pools are read and written as bits: around a bf16 gather, scatter or slice update XLA for CPUs converts the whole
    pool to fp32 and back.
    """
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def _values(x: Array, like: Array) -> Array:
    return lax.bitcast_convert_type(x, like.dtype) if x.dtype != like.dtype else x


def _tied(pool: Array, index):
    """`pool` made to depend on `index`, or on a CPU a loop that reads it would begin with a copy of all its bits."""
    if pool.dtype != jnp.bfloat16 or jax.default_backend() != "cpu":
        return pool
    return lax.optimization_barrier((pool, [jnp.asarray(x) for x in index if not isinstance(x, slice)]))[0]


def take(pool: Array, index: tuple) -> Array:
    """pool[index]."""
    return _values(_bits(_tied(pool, index))[index], pool)


def put(pool: Array, index: tuple, value: Array) -> Array:
    """`pool` with pool[index] = value in the pool's dtype. index: one integer or array [..] per leading axis, or a full
    slice; value has the axes of the arrays in front, or after the slice that precedes them. Positions with an index past
    the end are dropped.
    """
    value = value.astype(pool.dtype)
    if pool.dtype != jnp.bfloat16 or jax.default_backend() != "cpu":
        return pool.at[index].set(value, mode="drop")
    # XLA for CPUs runs a scatter as such a loop anyway, but copies the pool when its values are not bits
    fixed = [isinstance(x, slice) for x in index]
    arrays = jnp.broadcast_arrays(*(jnp.asarray(x) for x in index if not isinstance(x, slice)))
    axes = arrays[0].ndim
    value = jnp.moveaxis(value, 1, 0) if fixed[0] and value.ndim else value
    shape = [n if i >= len(index) or fixed[i] else 1 for i, n in enumerate(pool.shape)]
    value = jnp.broadcast_to(value, arrays[0].shape + tuple(value.shape[axes:])).reshape((-1, *value.shape[axes:]))
    flat = [x.reshape(-1) for x in arrays]
    bounds = [n for i, n in enumerate(pool.shape[: len(index)]) if not fixed[i]]

    def one(i, pool):
        at = [x[i] for x in flat]
        inside = jnp.all(jnp.stack([x < n for x, n in zip(at, bounds, strict=True)]))
        start = [0 if i >= len(index) or fixed[i] else at.pop(0) for i in range(pool.ndim)]
        new = jnp.broadcast_to(value[i], shape) if value.ndim == 1 else value[i].reshape(shape)
        return lax.cond(inside, lambda pool: put_slice(pool, new, start), lambda pool: pool, pool)

    return lax.fori_loop(0, flat[0].size, one, pool)


def take_slice(pool: Array, start, sizes) -> Array:
    """`lax.dynamic_slice` of a pool."""
    return _values(lax.dynamic_slice(_bits(_tied(pool, start)), start, sizes), pool)


def put_slice(pool: Array, value: Array, start) -> Array:
    """`lax.dynamic_update_slice` of a pool."""
    return _values(lax.dynamic_update_slice(_bits(pool), _bits(value), start), pool)


def map_slots(spec: SSMSpec, state: ConvSSMState, fn) -> ConvSSMState:
    """Apply `fn(leaf, slot_axis, rows_per_slot)` to every leaf; the one place that knows where slot axes are."""

    def leaf(path, x):
        if x.ndim == 1:
            return fn(x, 0, 1)
        return fn(x, 1, spec.rows_per_slot if path[0].name == "ssm" else 1)

    return jax.tree_util.tree_map_with_path(leaf, state)


def clear(spec: SSMSpec, state: ConvSSMState, slots: Array) -> ConvSSMState:
    """Zero everything that the slots [N] own: state rows, convolution window, records, cursors, accepted index.

    Called on allocation and on reuse. Donate `state`. Ids that repeat or lie outside 0..HOLD-1 raise ValueError, or are
    dropped when traced.
    """
    check_state(spec, state)
    ids = as_ids("slots", slots)
    check_slots(spec, slots)
    if not ids.size:
        return state
    index = drop_index(spec, ids)

    def zero(x, axis, rows):
        at = (index[:, None] * rows + jnp.arange(rows)).reshape(-1)
        return put(x, (slice(None),) * axis + (at,), jnp.zeros((), x.dtype))

    return map_slots(spec, state, zero)
