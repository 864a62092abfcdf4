"""Rows of K channels as the pre-kernels of KDA hold them: four neighbouring channels a lane, so a row of 128 fills a warp.

The rows of a tile then lie in different registers of a lane. A decay is loaded once for all rows, the rows that it reaches
are known when the kernel is compiled, and only sums cross lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels_triton.gates import L2NORM_EPS, decay, sigmoid
from kernels_triton.recurrence import finish

SHORT = tl.constexpr(4)  # windows up to this width are unrolled; code grows with its square
CHUNK = tl.constexpr(8)  # records whose decays are skipped together where none is live
PRODUCTS = tl.constexpr(16)  # products of window tokens that are summed together


@triton.jit
def channels(K: tl.constexpr):
    """Channel numbers [1, K], written so that a compiler sees no more than four neighbours."""
    i = tl.arange(0, K)[None, :]
    return i // 4 * 4 + i % 4


@triton.jit
def load_row(ptr, live, other, K: tl.constexpr):
    """[1, K] at `ptr`, or `other` where the scalar `live` is false."""
    c = channels(K)
    return tl.load(ptr + c, mask=(c >= 0) & live, other=other)


@triton.jit
def sums(x, LEVELS: tl.constexpr):
    """Canonical sum over the last axis of x [M, K] -> [M]."""
    for level in tl.static_range(LEVELS):
        x = tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2])
        if level < 2:
            a, b = tl.split(x)
            x = a + b
        else:
            x = tl.sum(x, axis=2)
    return finish(x)


@triton.jit
def normalise(x, LEVELS: tl.constexpr):
    """x * rsqrt(sum x^2 + 1e-6) of the rows of x [M, K], in fp32."""
    x = x.to(tl.float32)
    return x * tl.rsqrt(sums(x * x, LEVELS) + L2NORM_EPS)[:, None]


@triton.jit
def decayed(rows, alpha):
    out = ()
    for i in tl.static_range(len(rows)):
        out = out + (rows[i] * alpha,)
    return out


@triton.jit
def stack(rows, COUNT: tl.constexpr):
    """Rows [1, K] one after the other as [COUNT, K], zero beyond them. A row of a tile is known when the kernel is compiled,
    so this moves nothing."""
    i = tl.arange(0, COUNT)[:, None]
    out = tl.zeros([COUNT, rows[0].shape[1]], tl.float32)
    for r in tl.static_range(len(rows)):
        out = tl.where(i == r, rows[r], out)
    return out


# ----------------------------------------------------------------------------------------------------------- records


@triton.jit
def history(k_at, decay_at, n, ROWS: tl.constexpr, K: tl.constexpr, L: tl.constexpr, LEVELS: tl.constexpr):
    """Keys of the live records, tiles [ROWS, K], normalised and decayed to the last of them, zero where a record is not live,
    and the product of all their decays [1, K]."""
    row, c = tl.arange(0, ROWS)[:, None], channels(K)
    tiles, passed = (), tl.full([1, K], 1.0, tl.float32)
    for start in tl.static_range(0, (L + ROWS - 1) // ROWS * ROWS, CHUNK):
        if start % ROWS == 0:
            tiles = tiles + (tl.zeros([ROWS, K], tl.float32),)
        if (start == 0) | (n > start):
            alphas = ()
            for u in tl.static_range(start, start + CHUNK):
                alphas = alphas + (load_row(decay_at + u * K, u < n, 1.0, K),)
            if start % ROWS == 0:
                keys = tl.load(k_at + (start + row) * K + c, mask=(start + row < n) & (c >= 0), other=0.0)
                tiles = tiles[:-1] + (normalise(keys, LEVELS),)
            for u in tl.static_range(CHUNK):
                passed = passed * alphas[u]
                out = ()
                for p in tl.static_range(len(tiles)):
                    out = out + (tl.where(row + p * ROWS < start + u, tiles[p] * alphas[u], tiles[p]),)
                tiles = out
    return tiles, passed


# ------------------------------------------------------------------------------------------------------------ window


@triton.jit
def load_window(
    q_ptr, k_ptr, a_ptr, b_ptr, A_ptr, dt_ptr, raw_ptr, first, head, tokens,
    W: tl.constexpr, W2: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """What the prologue left of a window, or its RAW inputs; `window` makes the values of it."""
    q, k, a, raw = (), (), (), ()
    for t in tl.static_range(W):
        at, live = ((first + t) * HV + head) * K, t < tokens
        q, k = q + (load_row(q_ptr + at, live, 0.0, K),), k + (load_row(k_ptr + at, live, 0.0, K),)
        a, raw = a + (load_row(a_ptr + at, live, 0.0, K),), raw + (load_row(raw_ptr + at, live, 0.0, K),)
    t = tl.arange(0, W2)
    b = tl.load(b_ptr + (first + t) * HV + head, mask=t < tokens, other=0.0)
    if RAW:
        return q, k, a, raw, b, tl.load(A_ptr + head), load_row(dt_ptr + head * K, tokens > 0, 0.0, K)
    else:
        return q, k, a, raw, b


@triton.jit
def window(x, LEVELS: tl.constexpr, RAW: tl.constexpr, SCALE: tl.constexpr, LOWER_BOUND: tl.constexpr):
    """q^, k^, decays and raw keys, a row [1, K] a token, and beta [W2], from what `load_window` gave."""
    q, k, alphas, raw, beta = x[0], x[1], x[2], x[3], x[4]
    if RAW:
        A_log, dt_bias = x[5].to(tl.float32), x[6].to(tl.float32)
        q, k, alphas = (), (), ()
        for t in tl.static_range(len(raw)):
            k, q = k + (normalise(raw[t], LEVELS),), q + (normalise(x[0][t], LEVELS) * SCALE,)
            alphas = alphas + (decay(x[2][t].to(tl.float32), A_log, dt_bias, LOWER_BOUND),)
        beta = sigmoid(beta.to(tl.float32))
    return q, k, alphas, raw, beta


@triton.jit
def store_window(k_at, decay_at, beta_at, alphas, raw, beta, tokens, K: tl.constexpr):
    """Records k, decay and beta of the window, from the first one on."""
    c = channels(K)
    for t in tl.static_range(len(raw)):
        tl.store(k_at + t * K + c, raw[t], mask=(c >= 0) & (t < tokens))
        tl.store(decay_at + t * K + c, alphas[t], mask=(c >= 0) & (t < tokens))
    t = tl.arange(0, beta.shape[0])
    tl.store(beta_at + t, beta, mask=t < tokens)


@triton.jit
def store_products(ptr, q, k, alphas, tokens, TOKEN, COLUMN, LEVELS: tl.constexpr, W: tl.constexpr):
    """Coefficients of window tokens i for k^_t (i < t) and q^_t (i <= t): at ptr + i * TOKEN + (2t or 2t + 1) * COLUMN."""
    keys, products = (), ()
    for t in tl.static_range(W):
        keys = decayed(keys, alphas[t])
        for i in tl.static_range(t):
            products = products + (keys[i] * k[t],)
        keys = keys + (k[t],)
        for i in tl.static_range(t + 1):
            products = products + (keys[i] * q[t],)
    SIZE: tl.constexpr = min(PRODUCTS, triton.next_power_of_2(W * W))
    for start in tl.static_range(0, W * W, SIZE):
        rows = ()
        for p in tl.static_range(start, min(start + SIZE, W * W)):
            rows = rows + (products[p],)
        p = start + tl.arange(0, SIZE)
        t = tl.zeros_like(p)
        for i in tl.static_range(1, W):
            t += (p >= i * i).to(tl.int32)
        place = p - t * t  # of 2t + 1 products of token t: those of k^_t, then those of q^_t
        is_q = (place >= t).to(tl.int32)
        at = ptr + (place - is_q * t) * TOKEN + (2 * t + is_q) * COLUMN
        tl.store(at, sums(stack(rows, SIZE), LEVELS), mask=(t < tokens) & (p < W * W))


# ------------------------------------------------------------------------------------- wider windows, token by token


@triton.jit
def one_token(
    t, q_ptr, k_ptr, a_ptr, b_ptr, A_ptr, dt_ptr, raw_ptr, first, head, tokens, k_at, decay_at, beta_at, HV: tl.constexpr,
    K: tl.constexpr, LEVELS: tl.constexpr, RAW: tl.constexpr, SCALE: tl.constexpr, LOWER_BOUND: tl.constexpr,
):  # fmt: skip
    """q^, k^ and decay [1, K] and beta [1] of token t, which are left in its records."""
    x = load_window(q_ptr, k_ptr, a_ptr, b_ptr, A_ptr, dt_ptr, raw_ptr, first + t, head, tokens - t, 1, 1, HV, K, RAW)
    q, k, alphas, raw, beta = window(x, LEVELS, RAW, SCALE, LOWER_BOUND)
    store_window(k_at + t * K, decay_at + t * K, beta_at + t, alphas, raw, beta, tokens - t, K)
    return q[0], k[0], alphas[0], beta


@triton.jit
def store_token_products(ptr, t, keys, q, k, alpha, tokens, TOKEN, COLUMN, LEVELS: tl.constexpr):
    """What `store_products` does for token t; keys [W2, K] are those of the tokens before it, and those up to it after it."""
    i = tl.arange(0, keys.shape[0])
    at, keys = ptr + i * TOKEN + 2 * t * COLUMN, keys * alpha
    tl.store(at, sums(keys * k, LEVELS), mask=(i < t) & (t < tokens))
    keys = tl.where(i[:, None] == t, k, keys)
    tl.store(at + COLUMN, sums(keys * q, LEVELS), mask=(i <= t) & (t < tokens))
    return keys
