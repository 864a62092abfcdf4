"""The prologue: query/key normalisation and gates in fp32, in the order of operations of torch_ref/gates.py.

Multiplications, additions, exp and rsqrt only; no division, which GPU compilers round differently. The functions work
on tiles and on scalars, so kernels that fuse their prologue leave the same bits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas._compat import call, load, program_id, store, when
from kernels_pallas.recurrence import finish, lane_sums, load_pieces, pair_levels, spread, store_pieces

L2NORM_EPS = 1e-6
MAX_A_LOG = 88.0
ARTANH_SERIES = tuple(2.0 / n for n in (1, 3, 5, 7, 9, 11, 13, 15))
HEADS = 8  # heads of one program
CHANNELS = 512  # gate channels of one program


def reciprocal(d):
    """1 / d for d in [1, 2]: a linear start and three Newton steps."""
    r = 24.0 / 17.0 - d * (8.0 / 17.0)
    for _ in range(3):
        r = r * (2.0 - d * r)
    return r


def sigmoid(x):
    e = jnp.exp(-jnp.abs(x))
    r = reciprocal(e + 1.0)
    return jnp.where(x >= 0.0, r, e * r)


def softplus(x):
    """log(1 + exp(x)) as max(x, 0) + 2 artanh(h / (1 + h)), h = exp(-|x|) / 2, by its series."""
    h = jnp.exp(-jnp.abs(x)) * 0.5
    s = h * reciprocal(h + 1.0)
    z = s * s
    p = z * ARTANH_SERIES[-1] + ARTANH_SERIES[-2]
    for c in ARTANH_SERIES[-3::-1]:
        p = p * z + c
    return jnp.maximum(x, 0.0) + s * p


def decay(a, A_log, dt_bias, lower_bound: float | None):
    """exp(g) from fp32 gate logits: softplus gate, or KDA's bounded gate."""
    x = a + dt_bias
    rate = jnp.exp(jnp.minimum(A_log, MAX_A_LOG))
    if lower_bound is not None:
        return jnp.exp(lower_bound * sigmoid(rate * x))
    return jnp.exp(-rate * softplus(x))


def inverse_norm(pieces, levels: int, interpret: bool):
    """rsqrt(sum x^2 + 1e-6) of the rows of a tile, [M]; `levels` by the dtype that x is stored in."""
    return lax.rsqrt(finish(lane_sums([x * x for x in pieces], levels), interpret) + L2NORM_EPS)


def _norm(x_ref, out_ref, block, t, scale: float | None, interpret: bool):
    """Normalise the heads of one block of a token row."""
    _, heads, k_dim = x_ref.shape
    levels = pair_levels(x_ref.dtype, k_dim)
    rows = block * HEADS + lax.broadcasted_iota(jnp.int32, (HEADS, 1), 0)
    mask = rows < heads
    x = load_pieces(x_ref, (t,), rows, k_dim, levels, mask)
    r = spread(inverse_norm(x, levels, interpret), levels)
    x = [p * r for p in x]
    if scale is not None:
        x = [p * scale for p in x]
    store_pieces(out_ref, (t,), rows, x, k_dim, levels, mask)


def _prologue_kernel(
    q_ref, k_ref, a_ref, b_ref, A_ref, dt_ref, q_out, k_out, decay_out, beta_out, *, scale, lower_bound, interpret
):  # fmt: skip
    j, t = program_id(0), program_id(1)
    q_blocks, k_blocks = cdiv(q_ref.shape[1], HEADS), cdiv(k_ref.shape[1], HEADS)
    (gates,), (heads,) = dt_ref.shape, A_ref.shape

    @when(j < q_blocks)
    def _():
        _norm(q_ref, q_out, j, t, scale, interpret)

    @when((j >= q_blocks) & (j < q_blocks + k_blocks))
    def _():
        _norm(k_ref, k_out, j - q_blocks, t, None, interpret)

    @when(j >= q_blocks + k_blocks)
    def _():
        block, size = j - q_blocks - k_blocks, min(CHANNELS, power_of_two(gates))

        def get(ref, at, mask):
            return load(ref.at[at], mask=mask, other=jnp.zeros((), ref.dtype)).astype(jnp.float32)

        i = block * size + lax.iota(jnp.int32, size)
        mask = i < gates
        value = decay(
            get(a_ref, (t, i), mask), get(A_ref, (lax.div(i, gates // heads),), mask), get(dt_ref, (i,), mask), lower_bound
        )
        store(decay_out.at[t, i], value, mask=mask)

        @when(block == 0)
        def _():
            h = lax.iota(jnp.int32, power_of_two(heads))
            store(beta_out.at[t, h], sigmoid(get(b_ref, (t, h), h < heads)), mask=h < heads)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def prologue(q, k, a, b, A_log, dt_bias, *, scale: float, lower_bound: float | None = None):
    """Everything the recurrence reads, from raw token rows, in one launch.

    q [T, H, K], k [T, KH, K] activation dtype; a [T, HV*G], b [T, HV]; A_log [HV], dt_bias [HV*G]. Returns fp32
    q^ [T, H, K] (scaled), k^ [T, KH, K], decay [T, HV, G], beta [T, HV]. Allocates its results.
    """
    t, heads, gates = q.shape[0], A_log.shape[0], dt_bias.shape[0]
    blocks = cdiv(q.shape[1], HEADS) + cdiv(k.shape[1], HEADS) + cdiv(gates, CHANNELS)
    shapes = (q.shape, k.shape, (t, gates), (t, heads))
    q_hat, k_hat, decays, beta = call(
        _prologue_kernel,
        [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        grid=(blocks, t),
        name="ssm_prologue",
        scale=scale,
        lower_bound=lower_bound,
    )(q, k, a, b, A_log, dt_bias)
    return q_hat, k_hat, decays.reshape(t, heads, gates // heads), beta
