"""Mode "compact": one state and the raw inputs of this round; commit re-runs the accepted prefix, rounding each token."""

from __future__ import annotations

import torch

from torch_ref.acceptance import SSMForward
from torch_ref.executors import native
from torch_ref.executors.recurrence import expand_heads, replay
from torch_ref.gates import CoreInputs
from torch_ref.layout import DecodeLayout, in_window, to_rows
from torch_ref.spec import SSMSpec
from torch_ref.state import ConvSSMState

Tensor = torch.Tensor

prepare = native.prepare


def put_records(spec: SSMSpec, layout: DecodeLayout, row: int, at: Tensor, pools, values) -> None:
    """Write window records: pools [layers, S, heads, N, ..], values [R, W, heads, ..], at [R, W] positions along N.

    Positions beyond a verify length and padding rows are not written.
    """
    real = in_window(layout, spec.width)
    for t in range(spec.width):
        live = real[:, t]
        slots, position = layout.slots[live].long(), at[live, t].long()
        for pool, x in zip(pools, values, strict=True):
            pool[row].transpose(1, 2)[slots, position] = x[live, t].to(pool.dtype)


def forward(spec: SSMSpec, state: ConvSSMState, receipt: SSMForward, row: int, core: CoreInputs) -> tuple[ConvSSMState, Tensor]:
    """Verify: outputs o [T, HV, V] and T_r window records a request; the state is read and never written."""
    layout, x = receipt.layout, state.extra
    if receipt.kernels == "triton":
        from kernels_triton import decode

        *inputs, k = (y.contiguous() for y in (core.q, core.k_hat, core.v, core.decay, core.beta, core.k))
        pools, where = (x.k, x.v, x.decay, x.beta), (row, layout.slots, layout.verify_len, layout.cu)
        return state, decode.compact(state.ssm, pools, *where, inputs, k, width=spec.width, **receipt.config.launch(spec))
    w = native.window_inputs(spec, receipt, core)
    o, _ = native.run_window(spec, state.ssm[row, layout.slots.long()].float(), w)
    at = torch.arange(spec.width, device=o.device).expand(layout.slots.shape[0], spec.width)
    put_records(spec, layout, row, at, (x.k, x.v, x.decay, x.beta), (w.k, w.v, w.decay, w.beta))
    return state, to_rows(layout, o.to(core.v.dtype))


def accept(spec: SSMSpec, state: ConvSSMState, pairs) -> ConvSSMState:
    """Re-run the accepted prefix of every request in every layer, rounding to ssm_dtype after every token."""
    x = state.extra
    if pairs[0][0].kernels == "triton":
        from kernels_triton.commit import commit

        slots, lengths = (torch.cat([pair[i] for pair in pairs]).int() for i in (2, 3))
        commit(state.ssm, x.k, x.v, x.decay, x.beta, slots, lengths, **pairs[0][0].config.launch(spec))
        return state
    for _, _, slots, lengths in pairs:
        for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
            k = expand_heads(x.k[:, slot], spec.v_heads, 1)
            s = state.ssm[:, slot].float()
            s = replay(spec, s, k, x.v[:, slot], x.decay[:, slot], x.beta[:, slot], length, round_each=True)
            state.ssm[:, slot] = s.to(state.ssm.dtype)
    return state


def merge(spec: SSMSpec, state: ConvSSMState, slots: Tensor, kernels: str) -> ConvSSMState:
    """The state is already canonical."""
    return state


def materialize(spec: SSMSpec, state: ConvSSMState, slot: int) -> Tensor:
    """Canonical state [layers, HV, V, K] of one slot in ssm_dtype."""
    return state.ssm[:, slot]
