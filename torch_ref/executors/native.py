"""Mode "native": one full state per verify position; a rejected draft is a row that nobody reads."""

from __future__ import annotations

from dataclasses import replace

import torch

from torch_ref.acceptance import SSMForward
from torch_ref.executors.recurrence import expand_heads, read, round_state, step
from torch_ref.gates import CoreInputs, LinearInputs, check_inputs, prologue
from torch_ref.layout import DecodeLayout, in_window, to_rows, to_windows
from torch_ref.spec import SSMSpec
from torch_ref.state import ConvSSMState

Tensor = torch.Tensor


def prepare(spec: SSMSpec, state: ConvSSMState, layout: DecodeLayout, kernels: str) -> ConvSSMState:
    """Nothing to do: the receipt already holds the row to start from."""
    return state


def window_inputs(spec: SSMSpec, receipt: SSMForward, core: CoreInputs) -> CoreInputs:
    """Core inputs as windows [R, W, heads, ..]; q, q_raw and k_hat with their heads repeated per value head, v fp32."""
    w = CoreInputs(**{name: to_windows(spec, receipt.layout, x) for name, x in vars(core).items()})
    q, q_raw, k_hat = (expand_heads(x, spec.v_heads, 2) for x in (w.q, w.q_raw, w.k_hat))
    return replace(w, q=q, q_raw=q_raw, k_hat=k_hat, v=w.v.float())


def run_window(spec: SSMSpec, s: Tensor, w: CoreInputs) -> tuple[Tensor, list[Tensor]]:
    """Walk the W tokens of each window from s [R, HV, V, K] fp32, rounding the running state after every token.

    Returns outputs o [R, W, HV, V] fp32, taken from the unrounded state, and the W rounded states. Tokens beyond a
    verify length are walked too; their results are not used.
    """
    outputs, states = [], []
    for t in range(spec.width):
        s, _ = step(spec, s, w.k_hat[:, t], w.v[:, t], w.decay[:, t], w.beta[:, t])
        outputs.append(read(spec, s, w.q[:, t]))
        s = round_state(spec, s)
        states.append(s)
    return torch.stack(outputs, dim=1), states


def core_inputs(spec: SSMSpec, receipt: SSMForward, inputs: LinearInputs) -> CoreInputs | LinearInputs:
    """The prologue, or the raw inputs where a kernel runs it itself: single tokens of GDN, where one launch less counts, and
    replay, whose pre-kernel reads the raw rows anyway."""
    inside = spec.mode == "replay" or (spec.rule == "gdn" and spec.mode == "native" and spec.width == 1)
    if receipt.kernels == "triton" and inside:
        check_inputs(spec, inputs)
        return inputs
    return prologue(spec, inputs, receipt.kernels)


def forward(
    spec: SSMSpec, state: ConvSSMState, receipt: SSMForward, row: int, core: CoreInputs | LinearInputs
) -> tuple[ConvSSMState, Tensor]:
    """Verify T_r tokens of each request: writes state rows slot * W + t, t < T_r, and returns o [T, HV, V]."""
    if receipt.kernels == "triton":
        return _forward_kernel(spec, state, receipt, row, core)
    layout, w = receipt.layout, window_inputs(spec, receipt, core)
    first = layout.slots.long() * spec.width
    s = state.ssm[row, first + receipt.offset.long()].float()
    o, states = run_window(spec, s, w)
    real = in_window(layout, spec.width)
    for t in range(spec.width):
        live = real[:, t]
        state.ssm[row, first[live] + t] = states[t][live].to(state.ssm.dtype)
    return state, to_rows(layout, o.to(core.v.dtype))


def _forward_kernel(spec: SSMSpec, state: ConvSSMState, receipt: SSMForward, row: int, x) -> tuple[ConvSSMState, Tensor]:
    from kernels_triton import decode

    layout = receipt.layout
    if isinstance(x, CoreInputs):
        inputs = (x.q, x.k_hat, x.v, x.decay, x.beta)
    else:
        inputs = (x.q, x.k, x.v, x.a, x.b, x.A_log, x.dt_bias)
    inputs = tuple(x.contiguous() for x in inputs)
    where = (row, layout.slots, receipt.offset, layout.verify_len, layout.cu)
    return state, decode.native(state.ssm, *where, inputs, width=spec.width, scale=spec.scale, **receipt.config.launch(spec))


def accept(spec: SSMSpec, state: ConvSSMState, pairs) -> ConvSSMState:
    """Nothing but the accepted index moves, and that is common to all modes."""
    return state


def merge(spec: SSMSpec, state: ConvSSMState, slots: Tensor, kernels: str) -> ConvSSMState:
    """Move the accepted row of each slot [N] to row 0."""
    first = slots * spec.width
    state.ssm[:, first] = state.ssm[:, first + state.accepted[slots].long()]
    return state


def materialize(spec: SSMSpec, state: ConvSSMState, slot: int) -> Tensor:
    """Canonical state [layers, HV, V, K] of one slot in ssm_dtype: its accepted row."""
    return state.ssm[:, slot * spec.width + int(state.accepted[slot])]
