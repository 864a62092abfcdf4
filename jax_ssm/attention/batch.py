"""Batches as attention sees them: which rows belong to which slot, and at which positions; one pure builder."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_ssm.attention.spec import Bucket, KVSpec
from jax_ssm.layout import DecodeLayout, build_layout
from jax_ssm.spec import SSMSpec
from jax_ssm.state import concrete, pytree, read_index

Array = jax.Array


@pytree()
class DecodeBatch:
    """One verify round. layout: shared by all layers, main and draft. positions [T] int32: sequence position of each
    token row (for rotary embedding), 0 in padding rows."""

    layout: DecodeLayout
    positions: Array


@pytree()
class PrefillBatch:
    """One prompt chunk, right-padded: slots [B] int32 (HOLD for padding), lengths [B] int32 tokens of each row."""

    slots: Array
    lengths: Array


def build_batch(
    spec: SSMSpec | KVSpec,
    bucket: Bucket,
    b_req_idx: Array,
    *,
    b_mtp_index: Array | None = None,
    b_ready_cache_len: Array | None = None,
    b_q_seq_len: Array | None = None,
) -> DecodeBatch | PrefillBatch:
    """The batch of a bucket; shorter input is padded with HOLD. Pure; works on concrete and on traced ids.

    Decode: b_req_idx, b_mtp_index [<= T] as in `build_layout`; b_ready_cache_len [S]: committed tokens of every slot
    (`KVState.length`), from which positions follow. Prefill: b_req_idx [<= B] slots, b_q_seq_len [<= B] chunk lengths.
    Raises ValueError for input that does not fit the bucket, and as `build_layout` does. Traced requests beyond the
    bucket's request rows count as padding.
    """
    bucket.check(spec.width, spec.slots)
    ids = jnp.asarray(b_req_idx, jnp.int32)
    rows = bucket.tokens if bucket.phase == "decode" else bucket.requests
    if ids.ndim != 1 or ids.shape[0] > rows:
        raise ValueError(f"b_req_idx.shape={ids.shape} is not allowed: {bucket} has room for {rows} rows")
    ids, n = jnp.pad(ids, (0, rows - ids.shape[0]), constant_values=spec.hold), ids.shape[0]
    if bucket.phase == "prefill":
        lengths = _rows("b_q_seq_len", b_q_seq_len, n, bucket)
        _check_prompt(spec, bucket, ids, lengths)
        live = (ids >= 0) & (ids < spec.hold)
        return PrefillBatch(jnp.where(live, ids, spec.hold), jnp.where(live, jnp.clip(lengths, 0, bucket.tokens), 0))
    offsets = _rows("b_mtp_index", b_mtp_index, n, bucket)
    if b_ready_cache_len is None:
        raise ValueError("b_ready_cache_len=None is not allowed: positions follow from the committed tokens of every slot")
    layout = _fit(build_layout(spec, ids, offsets, fixed=bucket.fixed), bucket.requests, spec.hold)
    live = layout.row_request < bucket.requests
    start = jnp.asarray(b_ready_cache_len, jnp.int32)[read_index(spec, ids)]
    return DecodeBatch(layout, jnp.where(live, start + layout.row_offset, 0))


def _rows(name: str, values, n: int, bucket: Bucket) -> Array:
    """One int32 per row of b_req_idx, padded to the bucket with zeros."""
    if values is None:
        raise ValueError(f"{name}=None is not allowed: phase {bucket.phase!r} needs it")
    values = jnp.asarray(values, jnp.int32)
    if values.shape != (n,):
        raise ValueError(f"{name}.shape={values.shape} is not allowed: one value for each of the {n} rows of b_req_idx")
    return jnp.pad(values, (0, (bucket.tokens if bucket.phase == "decode" else bucket.requests) - n))


def _check_prompt(spec, bucket: Bucket, ids: Array, lengths: Array) -> None:
    slots, n = concrete(ids), concrete(lengths)
    if slots is None or n is None:
        return
    live = slots[slots != spec.hold]
    if ((slots < 0) | (slots > spec.hold)).any() or len(set(live.tolist())) != live.size:
        raise ValueError(f"b_req_idx={slots.tolist()} is not allowed: distinct slots in 0..{spec.hold - 1} ({spec.hold} pads)")
    if ((n < 0) | (n > bucket.tokens)).any():
        raise ValueError(f"b_q_seq_len={n.tolist()} is not allowed: 0..{bucket.tokens} tokens a chunk")


def _fit(layout: DecodeLayout, requests: int, hold: int) -> DecodeLayout:
    """The layout with its request rows cut to `requests`; requests beyond become padding."""
    r = layout.slots.shape[0]
    if r == requests:
        return layout
    count = concrete(layout.count)
    if count is not None and count > requests:
        raise ValueError(f"b_req_idx names {int(count)} requests: the bucket has {requests} request rows")
    gone = layout.row_request >= requests
    return layout.replace(
        cu=layout.cu[: requests + 1],
        slots=layout.slots[:requests],
        verify_len=layout.verify_len[:requests],
        row_request=jnp.where(gone, requests, layout.row_request),
        row_offset=jnp.where(gone, 0, layout.row_offset),
        count=jnp.minimum(layout.count, requests),
    )


def empty_layout(spec: SSMSpec | KVSpec, bucket: Bucket) -> DecodeLayout:
    """A layout without live rows, of the bucket's shapes: everything that reads it is inert."""
    r, t, i32 = bucket.requests, bucket.tokens, jnp.int32
    return DecodeLayout(
        cu=jnp.zeros(r + 1, i32),
        slots=jnp.full(r, spec.hold, i32),
        verify_len=jnp.zeros(r, i32),
        row_request=jnp.full(t, r, i32),
        row_offset=jnp.zeros(t, i32),
        count=jnp.zeros((), i32),
        fixed=bucket.fixed,
    )


def empty_chunk(spec: SSMSpec | KVSpec, bucket: Bucket) -> PrefillBatch:
    """A prompt chunk without live rows, of the bucket's shapes."""
    return PrefillBatch(jnp.full(bucket.requests, spec.hold, jnp.int32), jnp.zeros(bucket.requests, jnp.int32))
