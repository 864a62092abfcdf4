"""The short causal convolution over verify windows, with SiLU, on the widened window of every slot.

One program per (channel block, request). A program reads the columns [offset, offset + kw - 1) of its channels, convolves
the tokens of the window and leaves [past without its oldest column | T_r inputs | 0], so a rollback is a smaller offset.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels_triton.decode import request_tokens, zero_rows
from kernels_triton.gates import sigmoid
from kernels_triton.launch import launch, layer_row

CHANNELS = 128  # at most, of one program: one a lane, so that neighbours in memory are neighbours in a warp


@triton.jit(do_not_specialize=["layer", "S", "R", "T"])
def _conv_kernel(
    slots_ptr, offset_ptr, lens_ptr, cu_ptr, x_ptr, weight_ptr, bias_ptr, pool_ptr, layer, y_ptr, S, R, T,
    W: tl.constexpr, TAPS: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    WINDOW: tl.constexpr = TAPS - 1 + W - 1
    r = tl.program_id(1)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    layer = layer_row(layer)
    slot, tokens = request_tokens(slots_ptr, lens_ptr, r, S - 1)
    zero_rows(y_ptr, cu_ptr, 0, r, c, R, T, 1, C)
    if tokens > 0:
        first, offset = tl.load(cu_ptr + r).to(tl.int64), tl.load(offset_ptr + r)
        column = pool_ptr + ((layer * S + slot) * C + c) * WINDOW
        inputs = ()
        for i in tl.static_range(TAPS - 1):
            inputs = inputs + (tl.load(column + offset + i),)
        for t in tl.static_range(W):
            at = x_ptr + (first + tl.minimum(t, tokens - 1)) * C + c
            inputs = inputs + (tl.load(at, mask=tl.broadcast_to(t < tokens, [BLOCK]), other=0.0),)
        weights = ()
        for i in tl.static_range(TAPS):
            weights = weights + (tl.load(weight_ptr + c * TAPS + i).to(tl.float32),)
        for j in tl.static_range(WINDOW):
            tl.store(column + j, inputs[j + 1])
        for t in tl.static_range(W):
            y = inputs[t].to(tl.float32) * weights[0]
            for i in tl.static_range(1, TAPS):
                y = y + inputs[t + i].to(tl.float32) * weights[i]
            if BIAS:
                y = y + tl.load(bias_ptr + c).to(tl.float32)
            y = (y * sigmoid(y)).to(y_ptr.dtype.element_ty)
            at = y_ptr + (first + tl.minimum(t, tokens - 1)) * C + c
            tl.store(at, y, mask=tl.broadcast_to(t < tokens, [BLOCK]))


def conv(pool, row, slots, offset, verify_len, cu, x, weight, bias=None, *, width: int):
    """Convolve the verify windows of one layer.

    pool [layers, S, C, kw-1 + W-1], changed in place; slots, offset, verify_len [R], cu [R+1] int32; x [T, C] in the pool's
    dtype, weight [C, kw], bias [C] or None; all contiguous. Returns y [T, C] in x's dtype, zero in padding rows.
    """
    t, channels = x.shape
    block = min(CHANNELS, channels & -channels)  # the largest power of two that divides C
    if block < 16:
        raise ValueError(f"C={channels} is not allowed: the convolution kernel needs a multiple of 16 channels")
    y, r = torch.empty_like(x), slots.shape[0]
    if r:
        launch(
            _conv_kernel, (channels // block, r),
            slots, offset, verify_len, cu, x, weight, weight if bias is None else bias, pool, row, y, pool.shape[1], r, t,
            width, weight.shape[1], channels, block, bias is not None,
            num_warps=max(1, block // 32),
        )  # fmt: skip
    return y
