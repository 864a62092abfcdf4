"""The prologue: query/key normalisation and gates in fp32, in the order of operations of torch_ref/gates.py.

Multiplications, additions, exp and rsqrt only; no division, which GPU compilers round differently. The functions work
on tiles and on scalars, so kernels that fuse their prologue leave the same bits. exp is libdevice's: `tl.exp` is another
function.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from kernels_triton.launch import launch
from kernels_triton.recurrence import INTERPRET, finish, lane_sums, load_pieces, pair_levels, spread, store_pieces, times

L2NORM_EPS = tl.constexpr(1e-6)
MAX_A_LOG = tl.constexpr(88.0)
HEADS = tl.constexpr(8)  # heads of one program
CHANNELS = 512  # gate channels of one program


@triton.jit
def exp(x):
    if INTERPRET:
        return tl.exp(x)
    return libdevice.exp(x)


@triton.jit
def reciprocal(d):
    """1 / d for d in [1, 2]: a linear start and three Newton steps."""
    r = 24.0 / 17.0 - d * (8.0 / 17.0)
    for _ in tl.static_range(3):
        r = r * (2.0 - d * r)
    return r


@triton.jit
def sigmoid(x):
    e = exp(-tl.abs(x))
    r = reciprocal(e + 1.0)
    return tl.where(x >= 0.0, r, e * r)


@triton.jit
def softplus(x):
    """log(1 + exp(x)) as max(x, 0) + 2 artanh(h / (1 + h)), h = exp(-|x|) / 2, by its series."""
    h = exp(-tl.abs(x)) * 0.5
    s = h * reciprocal(h + 1.0)
    z = s * s
    p = z * (2.0 / 15.0) + 2.0 / 13.0
    p = p * z + 2.0 / 11.0
    p = p * z + 2.0 / 9.0
    p = p * z + 2.0 / 7.0
    p = p * z + 2.0 / 5.0
    p = p * z + 2.0 / 3.0
    p = p * z + 2.0
    return tl.maximum(x, 0.0) + s * p


@triton.jit
def decay(a, A_log, dt_bias, LOWER_BOUND: tl.constexpr):
    """exp(g) from fp32 gate logits: softplus gate, or KDA's bounded gate."""
    x = a + dt_bias
    rate = exp(tl.minimum(A_log, MAX_A_LOG))
    if LOWER_BOUND is not None:
        return exp(LOWER_BOUND * sigmoid(rate * x))
    return exp(-rate * softplus(x))


@triton.jit
def inverse_norm(pieces, LEVELS: tl.constexpr):
    """rsqrt(sum x^2 + 1e-6) of the rows of a tile, [M]; LEVELS by the dtype that x is stored in."""
    return tl.rsqrt(finish(lane_sums(times(pieces, pieces), LEVELS)) + L2NORM_EPS)


@triton.jit
def _norm(x_ptr, out_ptr, block, t, H: tl.constexpr, K: tl.constexpr, LEVELS: tl.constexpr, SCALE: tl.constexpr):
    """Normalise the heads of one block of a token row."""
    rows = block * HEADS + tl.arange(0, HEADS)[:, None]
    mask = rows < H
    x = load_pieces(x_ptr + t * (H * K), rows, K, mask, 0.0, K, LEVELS)
    r = spread(inverse_norm(x, LEVELS), LEVELS)
    y = ()
    for p in tl.static_range(len(x)):
        if SCALE is not None:
            y = y + (x[p] * r * SCALE,)
        else:
            y = y + (x[p] * r,)
    store_pieces(out_ptr + t * (H * K), rows, K, y, mask, K, LEVELS, "")


@triton.jit
def _prologue_kernel(
    q_ptr, k_ptr, a_ptr, b_ptr, A_ptr, dt_ptr, q_out, k_out, decay_out, beta_out,
    H: tl.constexpr, KH: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, GATES: tl.constexpr, LEVELS: tl.constexpr,
    SCALE: tl.constexpr, LOWER_BOUND: tl.constexpr, SIZE: tl.constexpr, HEADS2: tl.constexpr,
):  # fmt: skip
    j, t = tl.program_id(0), tl.program_id(1).to(tl.int64)
    Q_BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    K_BLOCKS: tl.constexpr = (KH + HEADS - 1) // HEADS
    if j < Q_BLOCKS:
        _norm(q_ptr, q_out, j, t, H, K, LEVELS, SCALE)
    elif j < Q_BLOCKS + K_BLOCKS:
        _norm(k_ptr, k_out, j - Q_BLOCKS, t, KH, K, LEVELS, None)
    else:
        block = j - Q_BLOCKS - K_BLOCKS
        i = block * SIZE + tl.arange(0, SIZE)
        mask = i < GATES
        a = tl.load(a_ptr + t * GATES + i, mask=mask, other=0.0).to(tl.float32)
        A = tl.load(A_ptr + i // (GATES // HV), mask=mask, other=0.0).to(tl.float32)
        dt = tl.load(dt_ptr + i, mask=mask, other=0.0).to(tl.float32)
        tl.store(decay_out + t * GATES + i, decay(a, A, dt, LOWER_BOUND), mask=mask)
        if block == 0:
            h = tl.arange(0, HEADS2)
            b = tl.load(b_ptr + t * HV + h, mask=h < HV, other=0.0).to(tl.float32)
            tl.store(beta_out + t * HV + h, sigmoid(b), mask=h < HV)


def prologue(q, k, a, b, A_log, dt_bias, *, scale: float, lower_bound: float | None = None):
    """Everything the recurrence reads, from raw token rows, in one launch.

    q [T, H, K], k [T, KH, K] activation dtype; a [T, HV*G], b [T, HV]; A_log [HV], dt_bias [HV*G]; contiguous. Returns
    fp32 q^ [T, H, K] (scaled), k^ [T, KH, K], decay [T, HV, G], beta [T, HV]. Allocates its results.
    """
    (t, heads, k_dim), key_heads, v_heads, gates = q.shape, k.shape[1], A_log.shape[0], dt_bias.shape[0]
    q_hat, k_hat, decays, beta = (
        torch.empty(shape, dtype=torch.float32, device=q.device)
        for shape in (q.shape, k.shape, (t, v_heads, gates // v_heads), (t, v_heads))
    )
    blocks = triton.cdiv(heads, HEADS.value) + triton.cdiv(key_heads, HEADS.value) + triton.cdiv(gates, CHANNELS)
    if t:
        launch(
            _prologue_kernel, (blocks, t),
            q, k, a, b, A_log, dt_bias, q_hat, k_hat, decays, beta,
            heads, key_heads, v_heads, k_dim, gates, pair_levels(q.dtype, k_dim), scale, lower_bound,
            min(CHANNELS, triton.next_power_of_2(gates)), triton.next_power_of_2(v_heads),
        )  # fmt: skip
    return q_hat, k_hat, decays, beta
