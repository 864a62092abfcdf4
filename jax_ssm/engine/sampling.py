"""Choosing tokens on the device: greedy or sampled, and lossless verification of deterministic drafts.

Every position draws one token y from the target distribution p, with noise that depends on (seed, request, position) and
on nothing else. A draft x survives iff y = x. That is speculative sampling (arXiv:2211.17192) for drafts without
randomness of their own: x is accepted with probability p(x), and given a rejection y is distributed as p without x,
renormalised. Because the noise belongs to the position, the text of the n-th prompt is the same for every width,
draft source, storage mode and bucket: drafts change the speed, never the sample.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def filter_logits(logits: Array, temperature: Array, top_p: Array) -> Array:
    """Logits [.., V] fp32 of the distribution after temperature (> 0) and top-p; dropped tokens are -inf.

    Top-p keeps the most probable tokens until their sum reaches top_p, the token that crosses it included, and with it
    every token of equal probability. The most probable token always stays.
    """
    logits = logits.astype(jnp.float32) / temperature

    def nucleus(x):
        ordered = jnp.flip(jnp.sort(x, axis=-1), axis=-1)
        p = jax.nn.softmax(ordered, axis=-1)
        keep = (jnp.cumsum(p, axis=-1) - p < top_p).at[..., 0].set(True)
        least = jnp.min(jnp.where(keep, ordered, jnp.inf), axis=-1, keepdims=True)
        return jnp.where(x >= least, x, -jnp.inf)

    return jax.lax.cond(top_p < 1, nucleus, lambda x: x, logits)


def choose(logits: Array, temperature: Array, top_p: Array, seed: Array, request: Array, position: Array) -> Array:
    """One token per row: [..] int32 from logits [.., V].

    temperature, top_p [] fp32, seed [] uint32: traced, so another value is not another executable. temperature 0 is
    greedy (the first of equal maxima). request, position [..] int32: whose token, and its index in the sequence.
    """

    def sampled(x):
        def noise(r, i):
            key = jax.random.wrap_key_data(jnp.stack([seed, r.astype(jnp.uint32)]), impl="threefry2x32")
            return jax.random.gumbel(jax.random.fold_in(key, i), x.shape[-1:], jnp.float32)

        draw = jax.vmap(noise)(request.reshape(-1), position.reshape(-1)).reshape(x.shape)
        return jnp.argmax(filter_logits(x, jnp.maximum(temperature, 1e-6), top_p) + draw, axis=-1)

    greedy = lambda x: jnp.argmax(x, axis=-1)  # noqa: E731
    return jax.lax.cond(temperature > 0, sampled, greedy, logits.astype(jnp.float32)).astype(jnp.int32)


def accepted_length(chosen: Array, drafts: Array) -> Array:
    """[R] accepted tokens of each window, base token included: 1 and the leading drafts [R, W-1] that equal the token
    chosen [R, W] at their position. Tokens chosen[:, :length] are the new text; the last one is the correction of the
    first wrong draft, or the bonus after a fully accepted window."""
    agree = (chosen[:, : drafts.shape[1]] == drafts).astype(jnp.int32)
    return 1 + jnp.sum(jnp.cumprod(agree, axis=1), axis=1)
