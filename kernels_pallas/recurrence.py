"""The canonical sum and the one-token recurrence on register tiles: the only definition, shared by every kernel.

A state tile [M, K] is held as a list of pieces [M, 8 << levels], where `levels` are the pair levels of the canonical sum.
Eight lanes load one row of a piece with 16 bytes each, so every pair level stays inside a lane, the halvings down to 8
values are additions between pieces, and only the last three cross lanes. A K below one piece is padded with zeros on
loading. The order is that of torch_ref: bits depend neither on M nor on the number of warps.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from kernels_pallas._compat import inline_asm, load, store

LANES = 8


def pair_levels(dtype, n: int) -> int:
    """Pair levels of the canonical sum over n values stored as `dtype`: log2 of the elements in 16 bytes, more when more
    than 32 values would remain, never more than n has."""
    log2 = (n - 1).bit_length()
    return min(max({4: 2, 2: 3}[jnp.dtype(dtype).itemsize], log2 - 5), log2)


# ---------------------------------------------------------------------------------------------------------- summation


def pair_sums(p, levels: int):
    """`levels` times p_i <- p_2i + p_2i+1 over the last axis of p [M, n]."""
    for _ in range(levels):
        m, n = p.shape
        a, b = lax.split(p.reshape(m, n // 2, 2), (1, 1), axis=2)
        p = (a + b).reshape(m, n // 2)
    return p


def finish(p, interpret: bool):
    """First half + second half until one value remains: p [M, n] -> [M].

    The library only ever adds two values, so no layout that a compiler chooses can change the order. A sum over eight is the
    butterfly of the same order while each lane holds one value of a row; a tile of few rows is laid out otherwise. Interpret
    mode adds by itself: XLA on a CPU starts a sum from +0, which loses the sign of a sum of -0.
    """
    while p.shape[1] > 1:
        m, half = p.shape[0], p.shape[1] // 2
        if interpret:
            a, b = lax.split(p, (half, half), axis=1)
            p = a + b
        else:
            p = jnp.sum(p.reshape(m, 2, half), axis=1)
    return p[:, 0] if interpret else p.reshape(p.shape[0])


def row_sums(p, levels: int, interpret: bool):
    """Canonical sum over the last axis of one tile p [M, n] -> [M]."""
    return finish(pair_sums(p, levels), interpret)


def halve(pieces):
    """First half + second half over a list of equal pieces until one remains."""
    while len(pieces) > 1:
        half = len(pieces) // 2
        pieces = [a + b for a, b in zip(pieces[:half], pieces[half:], strict=True)]
    return pieces[0]


def lane_sums(products, levels: int):
    """The canonical sum over pieces [M, 8 << levels], stopped at 8 values [M, 8]; `finish` ends it."""
    return halve([pair_sums(p, levels) for p in products])


def spread(d, levels: int):
    """d [M] as [M, 8 << levels] with equal columns; built by joins, so it gets the layout of a piece without a copy."""
    x = jnp.broadcast_to(d[:, None], (d.shape[0], LANES))
    for _ in range(levels):
        x = jnp.stack([x, x], axis=-1).reshape(x.shape[0], 2 * x.shape[1])
    return x


# ----------------------------------------------------------------------------------------------------- loads and stores


def _columns(k: int, levels: int):
    """Column numbers [1, 8 << levels] of each piece of a row of k values."""
    width = LANES << levels
    first = lax.broadcasted_iota(jnp.int32, (1, width), 1)
    return [first + p * width for p in range(max(1, k // width))]


def _within(cols, k: int, mask):
    """`mask` and, where a piece is wider than the row, cols < k; None when everything is loaded."""
    if cols.shape[1] <= k:
        return mask
    return cols < k if mask is None else mask & (cols < k)


def load_raw_pieces(ref, lead, rows, k: int, levels: int, mask=None, other: float = 0.0, **options):
    """Pieces of ref[*lead, rows [M, 1], 0:k], in its own dtype; `other` where `mask` [M, 1] is false."""
    out = []
    for cols in _columns(k, levels):
        m = _within(cols, k, mask)
        fill = None if m is None else jnp.full((), other, ref.dtype)
        out.append(load(ref.at[(*lead, rows, cols)], mask=m, other=fill, **options))
    return out


def load_pieces(*args, **options):
    """`load_raw_pieces` in fp32."""
    return to_fp32(load_raw_pieces(*args, **options))


def store_pieces(ref, lead, rows, pieces, k: int, levels: int, mask=None, **options):
    """Round once to the dtype of `ref` and store pieces to ref[*lead, rows [M, 1], 0:k] where `mask` [M, 1] is true."""
    for cols, x in zip(_columns(k, levels), pieces, strict=True):
        store(ref.at[(*lead, rows, cols)], x.astype(ref.dtype), mask=_within(cols, k, mask), **options)


def load_raw_rows(ref, lead, m: int, k: int, levels: int, num_warps: int = 1, mask=None, **options):
    """The vector ref[*lead, 0:k], in its own dtype, as pieces [rows, 8 << levels] with equal rows; rows: what one step of
    the warps covers (4 a warp), at most m. `expand_rows` repeats them; a value that a loop carries must not be expanded.

    `mask`: scalar bool; zero where it is false. Lanes take 4 or 8 neighbours as in a tile of `levels` pair levels, whatever
    the dtype of `ref`, so that no value changes lanes.
    """
    rows, width = min(m, 4 * num_warps), LANES << levels

    def tile(cols):
        cols = cols + jnp.zeros((rows, 1), jnp.int32)
        keep = _within(cols, k, None if mask is None else jnp.broadcast_to(mask, cols.shape))
        other = None if keep is None else jnp.zeros((), ref.dtype)
        return load(ref.at[(*lead, cols)], mask=keep, other=other, **options)

    out = []
    for p in range(max(1, k // width)):
        i = lax.broadcasted_iota(jnp.int32, (1, width), 1)
        if ref.dtype == jnp.float32 and levels == 3:  # two loads of 4 neighbours, woven into 8
            i = lax.broadcasted_iota(jnp.int32, (1, width // 2), 1)
            i = lax.div(i, 4) * 8 + lax.rem(i, 4) + p * width
            x = jnp.stack([tile(i), tile(i + 4)], axis=-1).reshape(rows, width // 8, 4, 2)
            x = x.transpose(0, 1, 3, 2).reshape(rows, width)
        elif ref.dtype == jnp.bfloat16 and levels == 2:  # one load of 4 neighbours where 8 would fit
            x = tile(lax.div(i, 4) * 4 + lax.rem(i, 4) + p * width)
        else:
            x = tile(i + p * width)
        out.append(x)
    return out


def to_fp32(pieces):
    return [x.astype(jnp.float32) for x in pieces]


def widen(pieces, interpret: bool):
    """`to_fp32` by one instruction a value of bf16: compilers take two for an upper half of 32 bits."""
    if interpret or pieces[0].dtype != jnp.bfloat16:
        return to_fp32(pieces)
    return [inline_asm("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", x) for x in pieces]


def load_rows(*args, **options):
    """`load_raw_rows` in fp32."""
    return to_fp32(load_raw_rows(*args, **options))


def empty_rows(m: int, k: int, levels: int, num_warps: int):
    """Zeros in the place of what `load_rows` gives."""
    width = LANES << levels
    return [jnp.zeros((min(m, 4 * num_warps), width), jnp.float32)] * max(1, k // width)


def expand_rows(pieces, m: int):
    """Pieces [rows, width] with equal rows as [m, width], by the same registers."""
    return [jnp.broadcast_to(x.reshape(1, *x.shape), (m // x.shape[0], *x.shape)).reshape(m, x.shape[1]) for x in pieces]


def load_row_pieces(ref, lead, m: int, k: int, levels: int, num_warps: int = 1, mask=None, **options):
    """The vector ref[*lead, 0:k] in fp32 as pieces [m, 8 << levels] with equal rows, in the layout of a state tile."""
    return expand_rows(load_rows(ref, lead, m, k, levels, num_warps, mask=mask, **options), m)


# --------------------------------------------------------------------------------------------------------- recurrence


def step(s, k_hat, v, decay, beta, levels: int, interpret: bool):
    """One token. s, k_hat: lists of pieces; v [M]; decay a scalar or a list of pieces; beta scalar. New s and d [M].

    S <- decay * S;  d = (v - S k^) * beta;  S <- S + d k^T, every operation rounded by itself.
    """
    decay = decay if isinstance(decay, list) else [decay] * len(s)
    s = [x * a for x, a in zip(s, decay, strict=True)]
    d = (v - read(s, k_hat, levels, interpret)) * beta
    wide = spread(d, levels)
    return [x + wide * k for x, k in zip(s, k_hat, strict=True)], d


def read(s, x, levels: int, interpret: bool):
    """S x: lists of pieces -> [M]."""
    return finish(lane_sums([a * b for a, b in zip(s, x, strict=True)], levels), interpret)


def round_state(s, dtype, interpret: bool):
    """Round every piece to `dtype`, kept as fp32. XLA may drop a pair of converts, never a reduce_precision.

    To bf16 by one instruction a value, the upper half of a pair whose lower half is zero: what compilers make of the casts
    packs pairs and takes them apart again, three to four for two values.
    """
    if jnp.dtype(dtype).itemsize == 4:
        return s
    if interpret:
        return [lax.reduce_precision(x, 8, 7) for x in s]
    return [inline_asm("cvt.rn.bf16x2.f32 $0, $1, 0f00000000;", x) for x in s]
