"""The life cycle that every context follows (allocate, prepare, update, forward, accept), and writing into `out`."""

from __future__ import annotations

import jax
from jax import lax

from jax_ssm.attention.batch import DecodeBatch, PrefillBatch
from jax_ssm.attention.spec import LayerAttentionBinding, LayerSpec
from jax_ssm.state import concrete

Array = jax.Array


def check_prepare(ctx) -> None:
    """Raise RuntimeError when a context is prepared twice."""
    if ctx.prepared:
        raise RuntimeError("prepare: this context is already prepared; prepare runs once per bucket, update once per batch")


def check_update(spec: LayerSpec, ctx, batch) -> None:
    """Raise RuntimeError before prepare; ValueError when the batch has another phase or other shapes than the bucket."""
    bucket = ctx.bucket
    if not ctx.prepared:
        raise RuntimeError("update: the step prepare(spec, context) is missing")
    wanted = DecodeBatch if bucket.phase == "decode" else PrefillBatch
    if not isinstance(batch, wanted):
        raise ValueError(f"batch={type(batch).__name__} is not allowed: {bucket} needs a {wanted.__name__}")
    if bucket.phase == "prefill":
        found = {"requests": batch.slots.shape[0]}
    else:
        layout = batch.layout
        found = {"requests": layout.slots.shape[0], "tokens": layout.row_request.shape[0], "fixed": layout.fixed}
    for name, value in found.items():
        if value != getattr(bucket, name):
            raise ValueError(
                f"batch: {name}={value} does not fit {bucket} of group {spec.group_id!r} (width={spec.geometry.width})"
            )


def check_ready(verb: str, ctx) -> None:
    """Raise RuntimeError when prepare or update is missing. A traced context that was never updated has no live rows, so
    whatever reads it changes nothing and returns zeros."""
    if not ctx.prepared:
        raise RuntimeError(f"{verb}: the step prepare(spec, context) is missing")
    updated = concrete(ctx.updated)
    if updated is not None and not updated:
        raise RuntimeError(f"{verb}: the step update(spec, context, state, batch) is missing")


def check_binding(binding: LayerAttentionBinding, ctx) -> None:
    """Raise ValueError when the context belongs to another group or was allocated for another backend."""
    if binding.spec != ctx.spec:
        raise ValueError(f"binding.spec.group_id={binding.spec.group_id!r}: this context is of group {ctx.spec.group_id!r}")
    if binding.backend != ctx.config.implementation:
        raise ValueError(f"binding.backend={binding.backend!r}: this context is for {ctx.config.implementation!r}")


def check_rows(ctx, name: str, x: Array, trailing: tuple[int, ...]) -> None:
    """Raise ValueError unless x has the bucket's token axes ([T], in prefill [B, N]) and then the axes `trailing`."""
    bucket = ctx.bucket
    lead = (bucket.tokens,) if bucket.phase == "decode" else (bucket.requests, bucket.tokens)
    if x.shape != lead + trailing:
        raise ValueError(f"{name}.shape={x.shape} is not allowed: {bucket} needs {lead + trailing}")


def write_out(o: Array, out: Array | None) -> Array:
    """`o` itself, or the caller's buffer with its leading corner overwritten by `o` and the rest untouched.

    out: same rank and dtype, every axis at least as long. Donate it. Raises ValueError when it does not fit.
    """
    if out is None:
        return o
    fits = out.ndim == o.ndim and all(a >= b for a, b in zip(out.shape, o.shape, strict=True))
    if not fits or out.dtype != o.dtype:
        raise ValueError(f"out={out.dtype}{list(out.shape)} is not allowed: needs {o.dtype} and at least {list(o.shape)}")
    return lax.dynamic_update_slice(out, o, (0,) * o.ndim)
