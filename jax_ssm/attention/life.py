"""The life cycle that every context follows (allocate, prepare, update, forward, accept), and writing into `out`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_ssm.attention.batch import DecodeBatch, PrefillBatch
from jax_ssm.attention.spec import LayerAttentionBinding, LayerSpec
from jax_ssm.state import concrete

Array = jax.Array


def check_prepare(ctx) -> None:
    """Raise RuntimeError when a context is prepared twice."""
    if ctx.prepared:
        raise RuntimeError("prepare: this context is already prepared; prepare runs once per bucket, update once per batch")


def check_like(name: str, has, want) -> None:
    """Raise ValueError unless the pytree `has` has the type, shapes and dtypes of `want` (arrays or their avals)."""
    if type(has) is not type(want):
        raise ValueError(f"{name}={type(has).__name__} is not allowed: this spec needs a {type(want).__name__}")
    for field in () if want is None else vars(want):
        part, needs = getattr(has, field), getattr(want, field)
        if not hasattr(needs, "shape"):
            check_like(f"{name}.{field}", part, needs)
        elif (getattr(part, "shape", None), getattr(part, "dtype", None)) != (needs.shape, needs.dtype):
            given = f"{part.dtype}{part.shape}" if hasattr(part, "shape") else type(part).__name__
            raise ValueError(f"{name}.{field}={given} is not allowed: this spec needs {needs.dtype}{needs.shape}")


def check_spec(spec: LayerSpec, ctx) -> None:
    """Raise ValueError when the context is of another group."""
    if spec != ctx.spec:
        raise ValueError(f"spec.group_id={spec.group_id!r} ({spec.kind}): this context is of {ctx.spec.group_id!r}")


def check_update(spec: LayerSpec, ctx, batch) -> None:
    """Raise RuntimeError before prepare; ValueError when the context is of another group, or the batch has another phase
    or other shapes than the bucket."""
    bucket = ctx.bucket
    check_spec(spec, ctx)
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


def check_lengths(name: str, lengths: Array, lowest: int, most: Array) -> None:
    """Raise ValueError unless lengths are integers, one for each row of `most` [R], and, when concrete, `lowest`..most in
    the live rows (most > 0)."""
    lengths = jnp.asarray(lengths)
    if not jnp.issubdtype(lengths.dtype, jnp.integer) or lengths.shape != most.shape:
        raise ValueError(f"{name}={lengths.dtype}{lengths.shape} is not allowed: integers of shape {most.shape}, one a row")
    values, most = concrete(lengths), concrete(most)
    if values is None or most is None:
        return
    bad = (most > 0) & ((values < lowest) | (values > most))
    if bad.any():
        row = int(bad.argmax())
        raise ValueError(f"{name}={values.tolist()} is not allowed: row {row} needs {lowest}..{most[row]} tokens")


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
