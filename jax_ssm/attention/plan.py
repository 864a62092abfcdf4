"""Planning and arithmetic of attention over a stored sequence, shared by every KV layout (dense, latent, packed).

Keys and values are visited in blocks with a running maximum and sum (online softmax, arXiv:1805.02867), so the work is
proportional to the longest live sequence and never to max_len, and the only temporary is one block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ssm.gates import store

Array = jax.Array

BLOCK_BYTES = 1 << 20
MAX_BLOCK = 512


@dataclass(frozen=True)
class DecodePlan:
    """block: positions visited at once; blocks: how many cover max_len. Independent of the batch, so that a row's
    result does not depend on its bucket."""

    block: int
    blocks: int


def plan_decode(max_len: int, position_bytes: int) -> DecodePlan:
    """Plan for a layout that keeps `max_len` positions of `position_bytes` bytes a layer and request."""
    block = MAX_BLOCK
    while block > 16 and block * position_bytes > BLOCK_BYTES:
        block //= 2
    block = min(block, max_len)
    return DecodePlan(block, -(-max_len // block))


def blocks_needed(plan: DecodePlan, positions: Array) -> Array:
    """[] int32: blocks that hold every position up to the largest of `positions`; negative ones need none."""
    return jnp.clip(jnp.max(positions) // plan.block + 1, 0, plan.blocks).astype(jnp.int32)


def attend(
    plan: DecodePlan,
    blocks: Array | int,
    q: Array,
    source: Any,
    load: Callable[[Any, Array], tuple[Array, Array]],
    visible: Callable[[Array], Array],
    scale: float,
) -> tuple[Any, Array]:
    """Softmax attention of q [R, N, heads, Dk] over the first `blocks` blocks; returns (source, o [R, N, heads, Dv]).

    source: pytree that holds the stored sequence; go on with the returned one, it spares a copy when it is donated.
    load(source, at [n]) -> keys [R, n, KVH, Dk], values [R, n, KVH, Dv] at these positions. visible(at [n]) -> [R, N, n]
    bool. o has q's dtype.
    Scores, softmax and sums are fp32. A query that sees nothing gives exactly zero. An output depends only on what its
    own query sees: all else may hold anything, NaN included. A query that sees a value vector that is not finite gives
    NaN in all Dv entries of the heads that read it.
    """
    r, n, heads, dk = q.shape
    at = jnp.arange(plan.block, dtype=jnp.int32)
    kv_heads, dv = (lambda v: (v.shape[2], v.shape[3]))(jax.eval_shape(load, source, at)[1])
    q_grouped = q.reshape(r, n, kv_heads, heads // kv_heads, dk)

    def body(i, carry):
        source, top, total, acc = carry
        here = i * plan.block + at
        # read through a barrier, the stored sequence looks changed by the loop; as a constant of the loop XLA would copy it
        source = lax.optimization_barrier(source)
        k, v = load(source, here)
        seen = visible(here)  # [R, N, n]
        # a weight of 0 must not meet NaN or infinity: such a value counts as 0, and the score of whoever sees it is NaN
        v = v.astype(jnp.float32)
        finite = jnp.isfinite(v)
        v = jnp.where(finite, v, 0.0)
        sound = jnp.moveaxis(jnp.all(finite, axis=-1), 2, 1)[:, :, None, None]  # [R, KVH, 1, 1, n]
        scores = _dot("rnhgd,rphd->rhgnp", q_grouped, k) * scale
        scores = jnp.where(seen[:, None, None], jnp.where(sound, scores, jnp.nan), -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        # a query that has seen nothing yet has top = -inf; any finite reference makes its weights exp(-inf) = 0
        shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        weights = jnp.exp(scores - shift[..., None])
        keep = jnp.exp(top - shift)
        total = total * keep + jnp.sum(weights, axis=-1)
        acc = acc * keep[..., None] + _dot("rhgnp,rphd->rhgnd", weights, v)
        return source, new_top, total, acc

    shape = (r, kv_heads, heads // kv_heads, n)
    carry = source, jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros(shape + (dv,))
    source, _, total, acc = body(0, carry) if plan.blocks == 1 else lax.fori_loop(0, blocks, body, carry)
    any_seen = total[..., None] != 0
    o = jnp.where(any_seen, acc / jnp.where(any_seen, total[..., None], 1.0), 0.0)
    return source, store(jnp.moveaxis(o, 3, 1).reshape(r, n, heads, dv), q.dtype)


def _dot(equation: str, a: Array, b: Array) -> Array:
    """Contraction with fp32 products and sums."""
    if a.dtype != b.dtype:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.einsum(equation, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
