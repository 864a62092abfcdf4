"""Which token row belongs to which request this round; built once, shared by every layer, rule, main and draft state."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_ref.spec import SSMSpec

Tensor = torch.Tensor


@dataclass(frozen=True)
class DecodeLayout:
    """Row maps of one round. R request rows, T token rows; both are capacities, `count` says how many are live.

    cu [R+1] int32: first token row of each request, constant after the last live one. slots [R]: physical slot, HOLD
    for padding. verify_len [R]: tokens of this round, 0 for padding. row_request [T]: request of a token row, R for
    padding rows. row_offset [T]: position inside the window. count []: live requests.
    fixed (static): every live request has exactly W tokens, so window t of request r is row r * W + t.
    """

    cu: Tensor
    slots: Tensor
    verify_len: Tensor
    row_request: Tensor
    row_offset: Tensor
    count: Tensor
    fixed: bool


def build_layout(spec: SSMSpec, b_req_idx: Tensor, b_mtp_index: Tensor, *, fixed: bool = False) -> DecodeLayout:
    """Layout of packed token rows; reads no state.

    b_req_idx [T] integer: slot of each token row; padding rows (HOLD) come last. b_mtp_index [T] integer: position
    inside its verify window, 0 starts a request. Dynamic: R = min(T, S-1), verify lengths 1..W. fixed: T must be a
    multiple of W, R = T / W, every live request has W rows and b_mtp_index is not looked at.
    Example with T = 8: rows [7,7,7,4,9,9,HOLD,HOLD] -> cu [0,3,4,6,6,..], slots [7,4,9,HOLD,..], count 3.

    Raises ValueError: ids outside 0..HOLD, a repeated slot, a live row after padding, a window longer than W or one
    whose b_mtp_index does not count 0, 1, ..; T not a multiple of W when fixed.
    """
    if b_req_idx.shape != b_mtp_index.shape or b_req_idx.ndim != 1:
        shapes = tuple(b_mtp_index.shape), tuple(b_req_idx.shape)
        raise ValueError(f"b_mtp_index.shape={shapes[0]} must equal b_req_idx.shape={shapes[1]}, one axis of token rows")
    ids, offsets = b_req_idx.tolist(), b_mtp_index.tolist()
    t, width, hold = len(ids), spec.width, spec.hold
    if fixed and t % width:
        raise ValueError(f"len(b_req_idx)={t} is not allowed: fixed verify needs a multiple of width={width}")
    bad = [i for i in ids if not 0 <= i <= hold]
    if bad:
        raise ValueError(f"b_req_idx={ids} contains {bad}: allowed are 0..{hold} ({hold} is HOLD)")
    total = next((i for i, slot in enumerate(ids) if slot == hold), t)  # live token rows
    if any(slot != hold for slot in ids[total:]):
        raise ValueError(f"b_req_idx={ids} has a live row after padding: HOLD rows must come last")
    if fixed:
        offsets = [i % width for i in range(t)]

    slots, lengths, request, offset = [], [], [], []
    for slot, position in zip(ids[:total], offsets[:total], strict=True):
        if position == 0:
            if slot in slots:
                raise ValueError(f"b_req_idx={ids} repeats slot {slot}: live requests need distinct slots")
            slots.append(slot)
            lengths.append(0)
        if not slots or slot != slots[-1] or position != lengths[-1]:
            raise ValueError(f"b_mtp_index={offsets} must count 0, 1, .. inside the rows of each slot of {ids}")
        if position >= width:
            raise ValueError(f"b_req_idx has a window of {position + 1} rows for slot {slot}: allowed are 1..width={width}")
        lengths[-1] += 1
        request.append(len(slots) - 1)
        offset.append(position)
    if fixed and any(n != width for n in lengths):
        raise ValueError(f"b_req_idx={ids} has a window of {lengths[-1]} rows: fixed verify needs width={width} for each")

    r, count, pad = t // width if fixed else min(t, spec.slots - 1), len(slots), t - total
    cu = [sum(lengths[:i]) for i in range(count)] + [total] * (r + 1 - count)

    def tensor(values: list[int] | int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=b_req_idx.device)

    return DecodeLayout(
        cu=tensor(cu),
        slots=tensor(slots + [hold] * (r - count)),
        verify_len=tensor(lengths + [0] * (r - count)),
        row_request=tensor(request + [r] * pad),
        row_offset=tensor(offset + [0] * pad),
        count=tensor(count),
        fixed=fixed,
    )


def to_windows(spec: SSMSpec, layout: DecodeLayout, x: Tensor) -> Tensor:
    """Token rows [T, ..] as windows [R, W, ..]; positions beyond a request's verify length are zero."""
    at = layout.cu[:-1, None].long() + torch.arange(spec.width, device=x.device)
    if x.shape[0] == 0:
        return x.new_zeros(tuple(at.shape) + x.shape[1:])
    windows = x[at.clamp(max=x.shape[0] - 1)]
    real = in_window(layout, spec.width)
    return torch.where(real.reshape(real.shape + (1,) * (x.ndim - 1)), windows, torch.zeros((), dtype=x.dtype, device=x.device))


def to_rows(layout: DecodeLayout, x: Tensor) -> Tensor:
    """Windows [R, W, ..] as token rows [T, ..]; padding rows are exactly zero, whatever the windows hold there."""
    r, t = layout.slots.shape[0], layout.row_request.shape[0]
    rows = x.new_zeros((t,) + x.shape[2:])
    live = layout.row_request < r
    rows[live] = x[layout.row_request[live].long(), layout.row_offset[live].long()]
    return rows


def in_window(layout: DecodeLayout, width: int) -> Tensor:
    """[R, W] bool: which window positions are real tokens."""
    return torch.arange(width, device=layout.verify_len.device) < layout.verify_len[:, None]
