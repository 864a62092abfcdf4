"""Drafts for the next verify window, on the device: the checkpoint's MTP head, or prompt look-up where there is none."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array

LONGEST = 4  # tokens of context that prompt look-up compares


def lookup(tokens: Array, length: Array, count: int) -> Array:
    """Drafts [R, count] by prompt look-up (as in https://github.com/apoorvumang/prompt-lookup-decoding).

    tokens [R, M] int32, of which the first length [R] are real. Finds the earlier position whose last tokens agree with
    the end of the sequence for the longest stretch (up to LONGEST tokens), the most recent one among equals, and copies
    what followed it; a copy that reaches the end of the sequence continues periodically. Without any match it repeats
    the last token. Nothing beyond `length` is looked at.
    """
    m = tokens.shape[1]
    place = jnp.arange(m)

    def one(row, n):
        last = row[jnp.maximum(n - 1 - jnp.arange(LONGEST), 0)]  # newest first
        agree, run = place < n - 1, jnp.zeros(m, jnp.int32)
        for i in range(LONGEST):
            shifted = jnp.concatenate([jnp.full(i, -1, row.dtype), row[: m - i]])
            agree = agree & (place >= i) & (shifted == last[i])
            run = run + agree
        best = jnp.argmax(run * m + place * (run > 0))
        best = jnp.where(run[best] > 0, best, n - 1)
        period = jnp.maximum(n - 1 - best, 1)
        start = jnp.where(run[best] > 0, best + 1, n - 1)
        return row[start + jnp.arange(count) % period]

    return jax.vmap(one)(tokens, length)
