"""Which token row belongs to which request this round; built once, shared by every layer, rule, main and draft state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_ssm.spec import SSMSpec
from jax_ssm.state import as_ids, concrete, pytree

Array = jax.Array


@pytree("fixed")
class DecodeLayout:
    """Row maps of one round. R request rows, T token rows; both are capacities, `count` says how many are live.

    cu [R+1] int32: first token row of each request, constant after the last live one. slots [R]: physical slot, HOLD
    for padding. verify_len [R]: tokens of this round, 0 for padding. row_request [T]: request of a token row, R for
    padding rows. row_offset [T]: position inside the window. count []: live requests.
    fixed (static): every live request has exactly W tokens, so window t of request r is row r * W + t.
    """

    cu: Array
    slots: Array
    verify_len: Array
    row_request: Array
    row_offset: Array
    count: Array
    fixed: bool


def build_layout(spec: SSMSpec, b_req_idx: Array, b_mtp_index: Array, *, fixed: bool = False) -> DecodeLayout:
    """Layout of packed token rows.

    b_req_idx [T] int32: slot of each token row; padding rows (HOLD) come last. b_mtp_index [T] int32: position inside
    its verify window, 0 starts a request. Dynamic: R = min(T, S-1), verify lengths 1..W. fixed: T must be a multiple of
    W, R = T / W, every live request has W rows and b_mtp_index is not looked at.

    Concrete input is checked (ValueError: ids outside 0..HOLD, a repeated slot, a live row after padding, a window
    longer than W or not starting at 0). Traced input cannot be: there, ids that are not live count as padding, and rows
    after the first padding row are padding.
    """
    ids, offsets = as_ids("b_req_idx", b_req_idx), as_ids("b_mtp_index", b_mtp_index)
    if ids.shape != offsets.shape:
        raise ValueError(f"b_mtp_index.shape={offsets.shape} must equal b_req_idx.shape={ids.shape}, one axis of token rows")
    t = ids.shape[0]
    if fixed and t % spec.width:
        raise ValueError(f"len(b_req_idx)={t} is not allowed: fixed verify needs a multiple of width={spec.width}")
    _check_rows(spec, b_req_idx, b_mtp_index, fixed)
    live = jnp.cumprod((ids >= 0) & (ids < spec.hold)).astype(bool)
    if fixed:
        r = t // spec.width
        count = jnp.sum(live[:: spec.width], dtype=jnp.int32)
        request = jnp.arange(t, dtype=jnp.int32) // spec.width
        offset = jnp.arange(t, dtype=jnp.int32) % spec.width
        cu = jnp.minimum(jnp.arange(r + 1, dtype=jnp.int32), count) * spec.width
        first = ids[:: spec.width]
    else:
        r = min(t, spec.slots - 1)
        start = live & ((offsets == 0) | (jnp.arange(t) == 0))
        request = jnp.cumsum(start, dtype=jnp.int32) - 1
        count = jnp.minimum(jnp.sum(start, dtype=jnp.int32), r)
        total = jnp.sum(live, dtype=jnp.int32)
        begin = jnp.where(start, request, r + 1)
        cu = jnp.full(r + 1, total).at[begin].set(jnp.arange(t, dtype=jnp.int32), mode="drop")
        offset = jnp.arange(t, dtype=jnp.int32) - cu[jnp.clip(request, 0, r)]
        first = ids[jnp.clip(cu[:-1], 0, t - 1)]
    real = jnp.arange(r) < count
    return DecodeLayout(
        cu=cu,
        slots=jnp.where(real, first, spec.hold).astype(jnp.int32),
        verify_len=jnp.where(real, jnp.minimum(cu[1:] - cu[:-1], spec.width), 0).astype(jnp.int32),
        row_request=jnp.where(live & (request < count) & (offset < spec.width), request, r).astype(jnp.int32),
        row_offset=jnp.where(live, offset, 0).astype(jnp.int32),
        count=count,
        fixed=fixed,
    )


def _check_rows(spec: SSMSpec, b_req_idx, b_mtp_index, fixed: bool) -> None:
    ids, offsets = concrete(b_req_idx), concrete(b_mtp_index)
    if ids is None or offsets is None:
        return
    bad = ids[(ids < 0) | (ids > spec.hold)]
    if bad.size:
        raise ValueError(f"b_req_idx={ids.tolist()} contains {bad.tolist()}: allowed are 0..{spec.hold} ({spec.hold} is HOLD)")
    live = ids[ids != spec.hold]
    if not np.array_equal(ids[: live.size], live):
        raise ValueError(f"b_req_idx={ids.tolist()} has a live row after padding: HOLD rows must come last")
    if fixed:
        offsets = np.arange(ids.size) % spec.width
    runs = np.flatnonzero(offsets[: live.size] == 0)
    owners = live[runs]
    if fixed and not np.array_equal(live, np.repeat(owners, spec.width)):
        raise ValueError(f"b_req_idx={ids.tolist()} is not allowed: fixed verify needs width={spec.width} rows of each slot")
    if len(set(owners.tolist())) != owners.size:
        raise ValueError(f"b_req_idx={ids.tolist()} repeats a slot: live requests need distinct slots")
    lengths = np.diff(np.append(runs, live.size))
    expected = np.concatenate([np.arange(n) for n in lengths]) if lengths.size else np.zeros(0)
    if not np.array_equal(offsets[: live.size], expected) or not np.array_equal(live, np.repeat(owners, lengths)):
        raise ValueError(f"b_mtp_index={offsets.tolist()} must count 0, 1, .. inside the rows of each slot of {ids.tolist()}")
    if lengths.size and lengths.max() > spec.width:
        raise ValueError(f"b_req_idx has a window of {lengths.max()} rows: allowed are 1..width={spec.width}")


def to_windows(spec: SSMSpec, layout: DecodeLayout, x: Array) -> Array:
    """Token rows [T, ..] as windows [R, W, ..]; positions beyond a request's verify length repeat some row."""
    r = layout.slots.shape[0]
    if layout.fixed:
        return x.reshape((r, spec.width) + x.shape[1:])
    rows = layout.cu[:-1, None] + jnp.arange(spec.width)
    return x[jnp.minimum(rows, x.shape[0] - 1)]


def to_rows(layout: DecodeLayout, x: Array) -> Array:
    """Windows [R, W, ..] as token rows [T, ..]; padding rows are exactly zero, whatever the windows hold there."""
    r = layout.slots.shape[0]
    rows = x[jnp.minimum(layout.row_request, r - 1), layout.row_offset]
    live = (layout.row_request < r).reshape((-1,) + (1,) * (rows.ndim - 1))
    return jnp.where(live, rows, jnp.zeros((), x.dtype))


def in_window(layout: DecodeLayout, width: int) -> Array:
    """[R, W] bool: which window positions are real tokens."""
    return jnp.arange(width) < layout.verify_len[:, None]
