"""The short causal convolution over verify windows, with SiLU, on the widened window of every slot.

One program per (channel block, request). A program reads the columns [offset, offset + kw - 1) of its channels, convolves
the tokens of the window and leaves [past without its oldest column | T_r inputs | 0], so a rollback is a smaller offset.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas._compat import call, load, program_id, store, when
from kernels_pallas.decode import request_tokens, zero_rows
from kernels_pallas.gates import sigmoid

CHANNELS = 128  # at most, of one program: one a lane, so that neighbours in memory are neighbours in a warp


def _conv_kernel(layer_ref, slots_ref, offset_ref, lens_ref, cu_ref, x_ref, weight_ref, *refs, width, block, interpret):
    *bias_ref, _, y_ref, pool_ref = refs
    layer, r, taps = layer_ref[0], program_id(1), weight_ref.shape[1]
    c = program_id(0) * block + lax.iota(jnp.int32, block)
    slot, tokens = request_tokens(slots_ref, lens_ref, r, pool_ref.shape[1] - 1)
    zero_rows(y_ref, cu_ref, 0, r, c)

    @when(tokens > 0)
    def _():
        first, offset = cu_ref[r], offset_ref[r]
        inputs = [load(pool_ref.at[layer, slot, c, offset + i]) for i in range(taps - 1)]
        for t in range(width):
            real = jnp.broadcast_to(t < tokens, c.shape)
            zero = jnp.zeros((), x_ref.dtype)
            inputs.append(load(x_ref.at[first + jnp.minimum(t, tokens - 1), c], mask=real, other=zero))
        weights = [weight_ref[c, i].astype(jnp.float32) for i in range(taps)]
        bias = [ref[c].astype(jnp.float32) for ref in bias_ref]
        for j, x in enumerate(inputs[1:]):
            store(pool_ref.at[layer, slot, c, jnp.int32(j)], x)
        inputs = [x.astype(jnp.float32) for x in inputs]
        for t in range(width):
            y = inputs[t] * weights[0]
            for i in range(1, taps):
                y = y + inputs[t + i] * weights[i]
            for b in bias:
                y = y + b
            y = (y * sigmoid(y)).astype(y_ref.dtype)
            store(y_ref.at[first + jnp.minimum(t, tokens - 1), 0, c], y, mask=jnp.broadcast_to(t < tokens, c.shape))


def conv(pool, row, slots, offset, verify_len, cu, x, weight, bias=None, *, width: int):
    """Convolve the verify windows of one layer.

    pool [layers, S, C, kw-1 + W-1], donated; slots, offset, verify_len [R], cu [R+1] int32; x [T, C] in the pool's dtype,
    weight [C, kw], bias [C] or None. Returns y [T, C] in x's dtype, zero in padding rows, and the pool.
    """
    t, channels = x.shape
    block = min(CHANNELS, channels & -channels)  # the largest power of two that divides C
    if block < 16:
        raise ValueError(f"C={channels} is not allowed: the convolution kernel needs a multiple of 16 channels")
    extra = () if bias is None else (bias,)
    operands = (jnp.asarray(row, jnp.int32).reshape(1), slots, offset, verify_len, cu, x, weight, *extra, pool)
    y, pool = call(
        _conv_kernel,
        [jax.ShapeDtypeStruct((t, 1, channels), x.dtype), jax.ShapeDtypeStruct(pool.shape, pool.dtype)],
        grid=(channels // block, slots.shape[0]),
        name=f"ssm_conv_w{width}",
        num_warps=max(1, block // 32),
        aliases={len(operands) - 1: 1},
        width=width,
        block=block,
    )(*operands)
    return y.reshape(t, channels), pool
