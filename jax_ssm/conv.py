"""The short causal convolution with a widened window, so that rolling back drafts is only a smaller read offset.

The pool keeps kw-1 + W-1 raw inputs per slot and channel. A round reads columns [offset, offset + kw - 1) as its past,
offset = accepted length of the last round - 1, and leaves [past without its oldest column | the W raw inputs].
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_ssm.acceptance import SSMForward, check_receipt
from jax_ssm.gates import round_to, sigmoid, store
from jax_ssm.kernels import kernels
from jax_ssm.layout import in_window, to_rows, to_windows
from jax_ssm.spec import SSMSpec
from jax_ssm.state import ConvSSMState, check_prompt, drop_index, dtype, put, read_index, take, take_slice

Array = jax.Array


def _convolve(x: Array, weight: Array, bias: Array | None, out_len: int) -> Array:
    """y_t = silu(sum_i w_i x_{t+i} + bias) for x [B, out_len + kw - 1, C], weight [C, kw]; fp32, taps in order."""
    w = weight.astype(jnp.float32)
    y = x[:, :out_len] * w[:, 0]
    for i in range(1, weight.shape[1]):
        y = y + x[:, i : i + out_len] * w[:, i]
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y * sigmoid(y)


def _past(spec: SSMSpec, state: ConvSSMState, row, slots: Array, offset: Array) -> Array:
    """[N, kw-1, C] fp32: the last accepted inputs of each slot, oldest first."""
    window = take(state.conv, (row, slots))  # [N, C, window]
    columns = offset[:, None] + jnp.arange(spec.conv_width - 1)
    return jnp.take_along_axis(window, columns[:, None, :], axis=2).astype(jnp.float32).swapaxes(1, 2)


def check_channels(spec: SSMSpec, x: Array, weight: Array, bias: Array | None) -> None:
    """Raise ValueError unless x [.., C], weight [C, kw] and bias [C] fit the spec."""
    if x.shape[-1] != spec.channels or x.dtype != dtype(spec.act_dtype):
        raise ValueError(f"x={x.dtype}{x.shape} is not allowed: this spec needs {spec.channels} channels of {spec.act_dtype!r}")
    if weight.shape != (spec.channels, spec.conv_width):
        raise ValueError(f"weight.shape={weight.shape} is not allowed: this spec needs {(spec.channels, spec.conv_width)}")
    if bias is not None and bias.shape != (spec.channels,):
        raise ValueError(f"bias.shape={bias.shape} is not allowed: this spec needs {(spec.channels,)}")


def conv_forward(
    spec: SSMSpec, state: ConvSSMState, receipt: SSMForward, row, x: Array, weight: Array, bias: Array | None = None
) -> tuple[ConvSSMState, Array]:
    """Convolve the verify windows of one layer.

    x [T, C] raw inputs, weight [C, kw], bias [C]. Returns the state with this round's window and y [T, C] in x's dtype,
    zero in padding rows. The old window is gone until accept: run it once a round.
    """
    check_receipt(spec, receipt, row, x.shape[0])
    check_channels(spec, x, weight, bias)
    layout, act = receipt.layout, x.dtype
    if receipt.config.implementation != "xla":
        where = (row, layout.slots, receipt.offset, layout.verify_len, layout.cu)
        y, pool = kernels(receipt.config.implementation).conv(state.conv, *where, x, weight, bias, width=spec.width)
        return state.replace(conv=pool), y
    slots = read_index(spec, layout.slots)
    past = _past(spec, state, row, slots, receipt.offset)
    fresh = round_to(to_windows(spec, layout, x), act)  # [R, W, C]
    y = _convolve(jnp.concatenate([past, fresh], axis=1), weight, bias, spec.width)
    kept = jnp.where(in_window(layout, spec.width)[..., None], fresh, 0.0)
    window = jnp.concatenate([past[:, 1:], kept], axis=1).swapaxes(1, 2).astype(state.conv.dtype)
    target = drop_index(spec, layout.slots, layout.verify_len > 0)
    conv = put(state.conv, (row, target), window)
    return state.replace(conv=conv), to_rows(layout, store(y, act))


def conv_prefill(
    spec: SSMSpec,
    state: ConvSSMState,
    row,
    slots: Array,
    lengths: Array,
    x: Array,
    weight: Array,
    bias: Array | None = None,
) -> tuple[ConvSSMState, Array]:
    """Convolve a prompt chunk from window offset 0 (`merge` first): x [B, N, C] padded on the right, lengths [B].

    Returns the state whose window holds the last kw-1 inputs in columns [0, kw-1), and y [B, N, C], zero beyond each
    length. Rows of length 0 and slots that are not live change nothing. Raises ValueError for concrete input that
    `check_prompt` refuses.
    """
    check_channels(spec, x, weight, bias)
    slots, lengths = check_prompt(spec, row, slots, lengths, x.shape[:-1])
    act, n = x.dtype, x.shape[1]
    past = _past(spec, state, row, read_index(spec, slots), jnp.zeros_like(slots))
    real = jnp.arange(n) < lengths[:, None]
    full = jnp.concatenate([past, jnp.where(real[..., None], round_to(x, act), 0.0)], axis=1)
    y = jnp.where(real[..., None], _convolve(full, weight, bias, n), 0.0)
    last = jnp.take_along_axis(full, (lengths[:, None] + jnp.arange(spec.conv_width - 1))[..., None], axis=1)
    window = jnp.pad(last, ((0, 0), (0, spec.width - 1), (0, 0))).swapaxes(1, 2).astype(state.conv.dtype)
    target = drop_index(spec, slots, lengths > 0)
    return state.replace(conv=put(state.conv, (row, target), window)), store(y, act)


def conv_sequence(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """The same convolution over whole sequences from an empty window: x [B, N, C] -> y [B, N, C] in x's dtype."""
    full = jnp.pad(round_to(x, x.dtype), ((0, 0), (weight.shape[1] - 1, 0), (0, 0)))
    return store(_convolve(full, weight, bias, x.shape[1]), x.dtype)


def canonical_window(spec: SSMSpec, state: ConvSSMState, slot: Array) -> Array:
    """[layers, C, kw-1]: the accepted window of one slot."""
    shape = (spec.layers, 1, spec.channels, spec.conv_width - 1)
    return take_slice(state.conv, (0, slot, 0, state.accepted[slot]), shape)[:, 0]


def merge_windows(spec: SSMSpec, state: ConvSSMState, slots: Array) -> ConvSSMState:
    """Move the accepted window of each slot to offset 0; the columns after it become zero."""
    source = read_index(spec, slots)
    columns = state.accepted[source][:, None] + jnp.arange(spec.conv_width - 1)
    window = jnp.take_along_axis(take(state.conv, (slice(None), source)), columns[None, :, None, :], axis=3)
    window = jnp.pad(window, ((0, 0), (0, 0), (0, 0), (0, spec.width - 1)))
    return state.replace(conv=put(state.conv, (slice(None), drop_index(spec, slots)), window))
