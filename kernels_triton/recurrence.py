"""The canonical sum and the one-token recurrence on register tiles: the only definition, shared by every kernel.

A state tile [M, K] is held as a tuple of pieces [M, 8 << LEVELS], where LEVELS are the pair levels of the canonical sum.
Eight lanes load one row of a piece with 16 bytes each, so every pair level stays inside a lane, the halvings down to 8
values are additions between pieces, and only the last three cross lanes. A K below one piece is padded with zeros on
loading. The order is that of torch_ref: bits depend neither on M nor on the number of warps. Launch with
`enable_fp_fusion=False`, or multiplications and additions contract.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

LANES = tl.constexpr(8)
WIDEN = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")  # two neighbours of bf16 to fp32
ROUND = tl.constexpr("cvt.rn.bf16x2.f32 $0, $1, 0f00000000;")  # to bf16 in the upper half, which is the value in fp32
INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


def pair_levels(dtype: torch.dtype, n: int) -> int:
    """Pair levels of the canonical sum over n values stored as `dtype`: log2 of the elements in 16 bytes, more when more
    than 32 values would remain, never more than n has."""
    log2 = (n - 1).bit_length()
    return min(max({4: 2, 2: 3}[dtype.itemsize], log2 - 5), log2)


# ---------------------------------------------------------------------------------------------------------- summation


@triton.jit
def pair_sums(p, LEVELS: tl.constexpr):
    """LEVELS times p_i <- p_2i + p_2i+1 over the last axis of p [M, n]."""
    for _ in tl.static_range(LEVELS):
        a, b = tl.split(tl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]))
        p = a + b
    return p


@triton.jit
def finish(p):
    """First half + second half until one value remains: p [M, n] -> [M].

    The library only ever adds two values, so no layout that a compiler chooses can change the order. A sum over eight is the
    butterfly of the same order while each lane holds one value of a row; a tile of few rows is laid out otherwise.
    """
    for _ in tl.static_range(5):
        if p.shape[1] > 1:
            p = tl.sum(tl.reshape(p, [p.shape[0], 2, p.shape[1] // 2]), axis=1)
    return tl.reshape(p, [p.shape[0]])


@triton.jit
def row_sums(p, LEVELS: tl.constexpr):
    """Canonical sum over the last axis of one tile p [M, n] -> [M]."""
    return finish(pair_sums(p, LEVELS))


@triton.jit
def halve(pieces):
    """First half + second half over a tuple of equal pieces until one remains."""
    for _ in tl.static_range(4):
        if len(pieces) > 1:
            sums = ()
            for i in tl.static_range(len(pieces) // 2):
                sums = sums + (pieces[i] + pieces[i + len(pieces) // 2],)
            pieces = sums
    return pieces[0]


@triton.jit
def lane_sums(products, LEVELS: tl.constexpr):
    """The canonical sum over pieces [M, 8 << LEVELS], stopped at 8 values [M, 8]; `finish` ends it."""
    sums = ()
    for i in tl.static_range(len(products)):
        sums = sums + (pair_sums(products[i], LEVELS),)
    return halve(sums)


@triton.jit
def spread(d, LEVELS: tl.constexpr):
    """d [M] as [M, 8 << LEVELS] with equal columns; built by joins, so it gets the layout of a piece without a copy."""
    x = tl.broadcast_to(d[:, None], [d.shape[0], LANES])
    for _ in tl.static_range(LEVELS):
        x = tl.reshape(tl.join(x, x), [x.shape[0], 2 * x.shape[1]])
    return x


# ----------------------------------------------------------------------------------------------------- loads and stores


@triton.jit
def cast(pieces, DTYPE: tl.constexpr):
    """Every piece rounded to DTYPE."""
    out = ()
    for i in tl.static_range(len(pieces)):
        out = out + (pieces[i].to(DTYPE),)
    return out


@triton.jit
def load_raw_pieces(ptr, rows, stride, mask, other, K: tl.constexpr, LEVELS: tl.constexpr, STREAM: tl.constexpr = False):
    """Pieces of the rows at ptr + rows [M, 1] * stride + 0..K, in their own dtype; `other` where `mask` [M, 1] (or None) is
    false. STREAM: the first to leave the L1 cache."""
    EVICT: tl.constexpr = "evict_first" if STREAM else ""
    WIDTH: tl.constexpr = LANES << LEVELS
    cols = tl.arange(0, WIDTH)[None, :]
    out = ()
    for p in tl.static_range((K + WIDTH - 1) // WIDTH):
        at = ptr + rows * stride + (cols + p * WIDTH)
        if WIDTH > K:
            x = tl.load(at, mask=(cols < K) if mask is None else mask & (cols < K), other=other, eviction_policy=EVICT)
        elif mask is None:
            x = tl.load(at, eviction_policy=EVICT)
        else:
            x = tl.load(at, mask=mask, other=other, eviction_policy=EVICT)
        out = out + (x,)
    return out


@triton.jit
def load_pieces(ptr, rows, stride, mask, other, K: tl.constexpr, LEVELS: tl.constexpr, STREAM: tl.constexpr = False):
    """`load_raw_pieces` in fp32."""
    return to_fp32(load_raw_pieces(ptr, rows, stride, mask, other, K, LEVELS, STREAM))


@triton.jit
def store_pieces(ptr, rows, stride, pieces, mask, K: tl.constexpr, LEVELS: tl.constexpr, EVICT: tl.constexpr):
    """Round once to the dtype behind `ptr` and store pieces to the rows at ptr + rows [M, 1] * stride where `mask` (or None)
    is true. EVICT: "" or "evict_first"."""
    WIDTH: tl.constexpr = LANES << LEVELS
    cols = tl.arange(0, WIDTH)[None, :]
    for p in tl.static_range(len(pieces)):
        at = ptr + rows * stride + (cols + p * WIDTH)
        x = pieces[p].to(ptr.dtype.element_ty)
        if WIDTH > K:
            tl.store(at, x, mask=(cols < K) if mask is None else mask & (cols < K), eviction_policy=EVICT)
        else:
            tl.store(at, x, mask=mask, eviction_policy=EVICT)


@triton.jit
def _row_tile(ptr, cols, ROWS: tl.constexpr, K: tl.constexpr):
    at = ptr + (cols[None, :] + tl.zeros([ROWS, 1], tl.int32))
    if K < cols.shape[0]:
        return tl.load(at, mask=cols[None, :] + tl.zeros([ROWS, 1], tl.int32) < K, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def load_raw_rows(ptr, M: tl.constexpr, K: tl.constexpr, LEVELS: tl.constexpr, NUM_WARPS: tl.constexpr):
    """The vector at ptr + 0..K, in its own dtype, as pieces [rows, 8 << LEVELS] with equal rows; rows: what one step of the
    warps covers (4 a warp), at most M. `expand_rows` repeats them; a value that a loop carries must not be expanded before.

    Lanes take 4 or 8 neighbours as in a tile of LEVELS pair levels, whatever the dtype behind `ptr`, so that no value
    changes lanes.
    """
    WIDTH: tl.constexpr = LANES << LEVELS
    ROWS: tl.constexpr = min(M, 4 * NUM_WARPS)
    BITS: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth
    out = ()
    for p in tl.static_range((K + WIDTH - 1) // WIDTH):
        if BITS == 32 and LEVELS == 3:  # two loads of 4 neighbours, woven into 8
            i = tl.arange(0, WIDTH // 2)
            i = i // 4 * 8 + i % 4 + p * WIDTH
            x = tl.join(_row_tile(ptr, i, ROWS, K), _row_tile(ptr, i + 4, ROWS, K))
            x = tl.reshape(tl.permute(tl.reshape(x, [ROWS, WIDTH // 8, 4, 2]), [0, 1, 3, 2]), [ROWS, WIDTH])
        elif BITS == 16 and LEVELS == 2:  # one load of 4 neighbours where 8 would fit
            i = tl.arange(0, WIDTH)
            x = _row_tile(ptr, i // 4 * 4 + i % 4 + p * WIDTH, ROWS, K)
        else:
            x = _row_tile(ptr, tl.arange(0, WIDTH) + p * WIDTH, ROWS, K)
        out = out + (x,)
    return out


@triton.jit
def to_fp32(pieces):
    return cast(pieces, tl.float32)


@triton.jit
def widen(pieces):
    """`to_fp32` by one instruction a value of bf16: compilers take two for an upper half of 32 bits."""
    out = ()
    for i in tl.static_range(len(pieces)):
        x = pieces[i]
        if x.dtype == tl.bfloat16 and not INTERPRET:
            x = tl.inline_asm_elementwise(WIDEN, "=&r,=&r,r", [x], tl.float32, True, 2)
        out = out + (x.to(tl.float32),)
    return out


@triton.jit
def load_rows(ptr, M: tl.constexpr, K: tl.constexpr, LEVELS: tl.constexpr, NUM_WARPS: tl.constexpr):
    """`load_raw_rows` in fp32."""
    return to_fp32(load_raw_rows(ptr, M, K, LEVELS, NUM_WARPS))


@triton.jit
def empty_rows(M: tl.constexpr, K: tl.constexpr, LEVELS: tl.constexpr, NUM_WARPS: tl.constexpr):
    """Zeros in the place of what `load_rows` gives."""
    WIDTH: tl.constexpr = LANES << LEVELS
    ROWS: tl.constexpr = min(M, 4 * NUM_WARPS)
    out = ()
    for _ in tl.static_range((K + WIDTH - 1) // WIDTH):
        out = out + (tl.zeros([ROWS, WIDTH], tl.float32),)
    return out


@triton.jit
def expand_rows(pieces, M: tl.constexpr):
    """Pieces [rows, width] with equal rows as [M, width], by the same registers."""
    out = ()
    for i in tl.static_range(len(pieces)):
        x = pieces[i]
        x = tl.reshape(x, [1, x.shape[0], x.shape[1]])
        x = tl.broadcast_to(x, [M // x.shape[1], x.shape[1], x.shape[2]])
        out = out + (tl.reshape(x, [M, x.shape[2]]),)
    return out


@triton.jit
def load_row_pieces(ptr, M: tl.constexpr, K: tl.constexpr, LEVELS: tl.constexpr, NUM_WARPS: tl.constexpr):
    """The vector at ptr + 0..K in fp32 as pieces [M, 8 << LEVELS] with equal rows, in the layout of a state tile."""
    return expand_rows(load_rows(ptr, M, K, LEVELS, NUM_WARPS), M)


# --------------------------------------------------------------------------------------------------------- recurrence


@triton.jit
def times(a, b):
    """Products of a tuple of pieces with another, or with a tuple of one scalar."""
    out = ()
    for i in tl.static_range(len(a)):
        out = out + (a[i] * b[i % len(b)],)
    return out


@triton.jit
def step(s, k_hat, v, decay, beta, LEVELS: tl.constexpr):
    """One token. s, k_hat: tuples of pieces; v [M]; decay (scalar,) or a tuple of pieces; beta scalar. New s and d [M].

    S <- decay * S;  d = (v - S k^) * beta;  S <- S + d k^T, every operation rounded by itself.
    """
    s = times(s, decay)
    d = (v - read(s, k_hat, LEVELS)) * beta
    wide = spread(d, LEVELS)
    out = ()
    for i in tl.static_range(len(s)):
        out = out + (s[i] + wide * k_hat[i],)
    return out, d


@triton.jit
def read(s, x, LEVELS: tl.constexpr):
    """S x: tuples of pieces -> [M]."""
    return finish(lane_sums(times(s, x), LEVELS))


@triton.jit
def round_state(s, DTYPE: tl.constexpr):
    """Round every piece to DTYPE, kept as fp32.

    To bf16 by one instruction a value: what compilers make of the casts packs pairs and takes them apart again, three to four
    for two values.
    """
    out = ()
    for i in tl.static_range(len(s)):
        if DTYPE == tl.bfloat16 and not INTERPRET:
            x = tl.inline_asm_elementwise(ROUND, "=r,r", [s[i]], tl.float32, True, 1)
        else:
            x = s[i].to(DTYPE).to(tl.float32)
        out = out + (x,)
    return out
