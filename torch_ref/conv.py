"""The short causal convolution with a widened window, so that rolling back drafts is only a smaller read offset.

The pool keeps kw-1 + W-1 raw inputs per slot and channel. A round reads columns [offset, offset + kw - 1) as its past,
offset = accepted length of the last round - 1, and leaves [past without its oldest column | the T_r raw inputs | 0].
"""

from __future__ import annotations

import torch

from torch_ref.acceptance import SSMForward, check_receipt
from torch_ref.gates import sigmoid
from torch_ref.layout import to_rows, to_windows
from torch_ref.spec import SSMSpec
from torch_ref.state import ConvSSMState, check_row, dtype, slot_ids

Tensor = torch.Tensor


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, out_len: int) -> Tensor:
    """y_t = silu(sum_i w_i x_{t+i} + bias), silu(y) = y * sigmoid(y), for x [B, out_len + kw - 1, C], weight [C, kw].

    fp32; each product rounds, products are added with i ascending, the bias last.
    """
    w, x = weight.float(), x.float()
    y = x[:, :out_len] * w[:, 0]
    for i in range(1, weight.shape[1]):
        y = y + x[:, i : i + out_len] * w[:, i]
    if bias is not None:
        y = y + bias.float()
    return y * sigmoid(y)


def _check(spec: SSMSpec, row: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check_row(spec, row)
    wanted = {"x": (x, tuple(x.shape[:-1]) + (spec.channels,)), "weight": (weight, (spec.channels, spec.conv_width))}
    if bias is not None:
        wanted["bias"] = (bias, (spec.channels,))
    for name, (value, shape) in wanted.items():
        if tuple(value.shape) != shape:
            raise ValueError(f"{name}.shape={tuple(value.shape)} is not allowed: this spec needs {shape}")
    if x.dtype != dtype(spec.act_dtype):
        raise ValueError(f"x.dtype={x.dtype} is not allowed: act_dtype={spec.act_dtype!r} needs {dtype(spec.act_dtype)}")


def conv_forward(
    spec: SSMSpec, state: ConvSSMState, receipt: SSMForward, row: int, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[ConvSSMState, Tensor]:
    """Convolve the verify windows of one layer.

    x [T, C] raw inputs, weight [C, kw], bias [C]. Returns the state with this round's window and y [T, C] in x's dtype,
    zero in padding rows. The old window is gone until accept: run it once a round. Raises ValueError for a wrong shape
    and for an x that is not in the activation dtype (what is convolved must be what is stored).
    """
    _check(spec, row, x, weight, bias)
    check_receipt(spec, receipt, x.shape[0])
    layout, slots = receipt.layout, receipt.layout.slots.long()
    if receipt.kernels == "triton":
        from kernels_triton.conv import conv

        where = (row, layout.slots, receipt.offset, layout.verify_len, layout.cu)
        return state, conv(state.conv, *where, x.contiguous(), weight.contiguous(), bias, width=spec.width)
    columns = receipt.offset.long()[:, None] + torch.arange(spec.conv_width - 1, device=x.device)
    past = state.conv[row].transpose(1, 2)[slots[:, None], columns]  # [R, kw-1, C], oldest first
    fresh = to_windows(spec, layout, x)  # [R, W, C], zero beyond T_r
    y = _convolve(torch.cat([past, fresh], dim=1), weight, bias, spec.width)
    live = layout.verify_len > 0
    state.conv[row, slots[live]] = torch.cat([past[:, 1:], fresh], dim=1).transpose(1, 2)[live]
    return state, to_rows(layout, y.to(x.dtype))


def conv_prefill(
    spec: SSMSpec,
    state: ConvSSMState,
    row: int,
    slots: Tensor,
    lengths: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> tuple[ConvSSMState, Tensor]:
    """Convolve a prompt chunk from window offset 0 (`merge` first): x [B, N, C] padded on the right, lengths [B].

    Returns the state whose window holds the last kw-1 inputs in columns [0, kw-1), and y [B, N, C], zero beyond each
    length. Rows of length 0 change nothing. Raises ValueError for slots that are not live and lengths outside 0..N.
    """
    _check(spec, row, x, weight, bias)
    ids, sizes = slot_ids(spec, state, slots).tolist(), check_lengths(lengths, x.shape[1])
    y = torch.zeros_like(x)
    for b, (slot, n) in enumerate(zip(ids, sizes, strict=True)):
        if n == 0:
            continue
        past = state.conv[row, slot, :, : spec.conv_width - 1].t()  # [kw-1, C]
        full = torch.cat([past, x[b, :n]], dim=0)
        y[b, :n] = _convolve(full[None], weight, bias, n)[0].to(x.dtype)
        state.conv[row, slot] = 0
        state.conv[row, slot, :, : spec.conv_width - 1] = full[n:].t()
    return state, y


def conv_sequence(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same convolution over whole sequences from an empty window: x [B, N, C] -> y [B, N, C] in x's dtype."""
    past = x.new_zeros((x.shape[0], weight.shape[1] - 1, x.shape[2]))
    return _convolve(torch.cat([past, x], dim=1), weight, bias, x.shape[1]).to(x.dtype)


def check_lengths(lengths: Tensor, n: int) -> list[int]:
    """`lengths` [B] as a list; ValueError unless each is in 0..n."""
    sizes = torch.as_tensor(lengths).tolist()
    bad = [size for size in sizes if not 0 <= size <= n]
    if bad:
        raise ValueError(f"lengths={sizes} contains {bad}: allowed are 0..{n}, the padded length of the inputs")
    return sizes


def canonical_window(spec: SSMSpec, state: ConvSSMState, slot: int) -> Tensor:
    """[layers, C, kw-1]: the accepted window of one slot."""
    offset = int(state.accepted[slot])
    return state.conv[:, slot, :, offset : offset + spec.conv_width - 1]


def merge_windows(spec: SSMSpec, state: ConvSSMState, slots: Tensor) -> ConvSSMState:
    """Move the accepted window of each slot to offset 0; the columns after it become zero."""
    for slot in slots.tolist():
        window = canonical_window(spec, state, slot).clone()
        state.conv[:, slot] = 0
        state.conv[:, slot, :, : spec.conv_width - 1] = window
    return state
