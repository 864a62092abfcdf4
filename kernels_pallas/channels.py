"""Rows of K channels as the pre-kernels of KDA hold them: four neighbouring channels a lane, so a row of 128 fills a warp.

The rows of a tile then lie in different registers of a lane. A decay is loaded once for all rows, the rows that it reaches
are known when the kernel is compiled, and only sums cross lanes.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import lax

from kernels_pallas._compat import load, store
from kernels_pallas.gates import L2NORM_EPS, decay, power_of_two, sigmoid
from kernels_pallas.recurrence import finish, pair_sums

SHORT = 4  # windows up to this width are unrolled; code grows with its square
CHUNK = 8  # records whose decays are skipped together where none is live
PRODUCTS = 16  # products of window tokens that are summed together


def channels(k: int):
    """Channel numbers [1, K], written so that a compiler sees no more than four neighbours."""
    i = lax.broadcasted_iota(jnp.int32, (1, k), 1)
    return lax.div(i, 4) * 4 + lax.rem(i, 4)


def load_row(ref, lead, live, other: float, k: int):
    """[1, K] of ref[*lead], or `other` where the scalar `live` is false."""
    c = channels(k)
    return load(ref.at[(*lead, c)], mask=(c >= 0) & live, other=jnp.full((), other, ref.dtype))


def sums(x, levels: int, interpret: bool):
    """Canonical sum over the last axis of x [M, K] -> [M]."""
    if interpret:
        return finish(pair_sums(x, levels), interpret)
    x = pair_sums(x, min(levels, 2))
    for _ in range(2, levels):
        x = jnp.sum(x.reshape(x.shape[0], x.shape[1] // 2, 2), axis=2)
    return finish(x, interpret)


def normalise(x, levels: int, interpret: bool):
    """x * rsqrt(sum x^2 + 1e-6) of the rows of x [M, K], in fp32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(sums(x * x, levels, interpret) + L2NORM_EPS)[:, None]


def decayed(rows, alpha):
    return [x * alpha for x in rows]


def stack(rows, count: int):
    """Rows [1, K] one after the other as [count, K], zero beyond them. A row of a tile is known when the kernel is compiled,
    so this moves nothing."""
    i = lax.broadcasted_iota(jnp.int32, (count, 1), 0)
    out = jnp.zeros((count, rows[0].shape[1]), jnp.float32)
    for r, x in enumerate(rows):
        out = jnp.where(i == r, x, out)
    return out


# ----------------------------------------------------------------------------------------------------------- records


def history(k_ref, decay_ref, lead, base, n, rows: int, length: int, levels: int, interpret: bool):
    """Keys of the live records, tiles [rows, K], normalised and decayed to the last of them, zero where a record is not live,
    and the product of all their decays [1, K]."""
    k = k_ref.shape[-1]
    row, c, tiles, passed = lax.broadcasted_iota(jnp.int32, (rows, 1), 0), channels(k), [], jnp.ones((1, k), jnp.float32)

    def extend(start, tiles, passed):
        alphas = [load_row(decay_ref, (*lead, base + u), u < n, 1.0, k) for u in range(start, start + CHUNK)]
        if start % rows == 0:
            j = start + row
            keys = load(k_ref.at[(*lead, base + j, c)], mask=(j < n) & (c >= 0), other=jnp.zeros((), k_ref.dtype))
            tiles = [*tiles[:-1], normalise(keys, levels, interpret)]
        for u, alpha in enumerate(alphas):
            passed = passed * alpha
            tiles = [jnp.where(row + p * rows < start + u, x * alpha, x) for p, x in enumerate(tiles)]
        return tiles, passed

    for start in range(0, -(-length // rows) * rows, CHUNK):
        if start % rows == 0:
            tiles = [*tiles, jnp.zeros((rows, k), jnp.float32)]
        if start == 0:
            tiles, passed = extend(start, tiles, passed)
        else:
            keep = lambda tiles, passed: (tiles, passed)  # noqa: E731
            tiles, passed = lax.cond(n > start, partial(extend, start), keep, tiles, passed)
    return tiles, passed


# ------------------------------------------------------------------------------------------------------------ window


def by_heads(rest, heads: int):
    """a, b, A_log and dt_bias with a and dt_bias per head: [T, HV, K] and [HV, K]; other inputs as they are."""
    if len(rest) != 4:
        return rest
    a, b, A_log, dt_bias = rest
    return a.reshape(a.shape[0], heads, -1), b, A_log, dt_bias.reshape(heads, -1)


def load_window(refs, first, head, tokens, width: int):
    """What the prologue left of a window, or its raw inputs; `window` makes the values of it."""
    q_ref, k_ref, a_ref, b_ref, *rest = refs
    k = k_ref.shape[-1]

    def rows(ref):
        return [load_row(ref, (first + t, head), t < tokens, 0.0, k) for t in range(width)]

    t = jnp.arange(power_of_two(width), dtype=jnp.int32)
    b = load(b_ref.at[first + t, head], mask=t < tokens, other=jnp.zeros((), b_ref.dtype))
    if len(rest) == 1:
        return rows(q_ref), rows(k_ref), rows(a_ref), rows(rest[0]), b
    raw = rows(k_ref)
    return rows(q_ref), raw, rows(a_ref), raw, b, rest[0][head], load_row(rest[1], (head,), tokens > 0, 0.0, k)


def window(x, levels: int, scale: float, lower_bound: float | None, interpret: bool):
    """q^, k^, decays and raw keys, a row [1, K] a token, and beta [W2], from what `load_window` gave."""
    q, k, alphas, raw, beta, *gates = x
    if gates:
        A_log, dt_bias = (y.astype(jnp.float32) for y in gates)
        k, q = [normalise(y, levels, interpret) for y in k], [normalise(y, levels, interpret) * scale for y in q]
        alphas = [decay(y.astype(jnp.float32), A_log, dt_bias, lower_bound) for y in alphas]
        beta = sigmoid(beta.astype(jnp.float32))
    return q, k, alphas, raw, beta


def store_window(k_ref, decay_ref, beta_ref, lead, at, alphas, raw, beta, tokens):
    """Records k, decay and beta of the window, from record `at` on."""
    c = channels(k_ref.shape[-1])
    for t in range(len(raw)):
        store(k_ref.at[(*lead, at + t, c)], raw[t], mask=(c >= 0) & (t < tokens))
        store(decay_ref.at[(*lead, at + t, c)], alphas[t], mask=(c >= 0) & (t < tokens))
    t = jnp.arange(beta.shape[0], dtype=jnp.int32)
    store(beta_ref.at[(*lead, at + t)], beta, mask=t < tokens)


def store_products(put, q, k, alphas, tokens, levels: int, interpret: bool):
    """Coefficients of window tokens i for k^_t (i < t) and q^_t (i <= t): put(i, 2t or 2t + 1, values, mask)."""
    keys, products, width = [], [], len(q)
    for t in range(width):
        keys = decayed(keys, alphas[t])
        products += [x * k[t] for x in keys]
        keys = [*keys, k[t]]
        products += [x * q[t] for x in keys]
    size = min(PRODUCTS, power_of_two(width * width))
    for start in range(0, width * width, size):
        rows = stack(products[start : start + size], size)
        p = start + jnp.arange(size, dtype=jnp.int32)
        t = jnp.zeros_like(p)
        for i in range(1, width):
            t += (p >= i * i).astype(jnp.int32)
        place = p - t * t  # of 2t + 1 products of token t: those of k^_t, then those of q^_t
        is_q = (place >= t).astype(jnp.int32)
        mask = (t < tokens) & (p < width * width)
        column = jnp.where(mask, 2 * t + is_q, 2 * width)  # interpret mode drops what lies outside
        put(place - is_q * t, column, sums(rows, levels, interpret), mask)


# ------------------------------------------------------------------------------------- wider windows, token by token


def one_token(
    t, refs, first, head, tokens, records, lead, at, levels: int, scale: float, lower_bound: float | None, interpret: bool
):
    """q^, k^ and decay [1, K] and beta [1] of token t, which are left in its records (k, decay, beta)."""
    x = load_window(refs, first + t, head, tokens - t, 1)
    (q,), (k,), (alpha,), raw, beta = window(x, levels, scale, lower_bound, interpret)
    store_window(*records, lead, at + t, [alpha], raw, beta, tokens - t)
    return q, k, alpha, beta


def store_token_products(put, t, keys, q, k, alpha, tokens, levels: int, interpret: bool):
    """What `store_products` does for token t; keys [W2, K] are those of the tokens before it, and those up to it after it."""
    i, keys = jnp.arange(keys.shape[0], dtype=jnp.int32), keys * alpha
    put(i, 2 * t, sums(keys * k, levels, interpret), (i < t) & (t < tokens))
    keys = jnp.where(i[:, None] == t, k, keys)
    put(i, 2 * t + 1, sums(keys * q, levels, interpret), (i <= t) & (t < tokens))
    return keys
