"""The verbs: what happens to a recurrent state. A table maps each storage mode to its module of pure functions.

One round: prepare -> conv_forward and forward per layer row -> sample -> accept. Before a prompt chunk: merge.
Verbs that return the state change its tensors in place; checks come first, so a verb that raises changed nothing.
"""

from __future__ import annotations

import os

import torch

from torch_ref.acceptance import (
    Ledger,
    SSMForward,
    StateAcceptance,
    accepted_rows,
    check_acceptance,
    check_receipt,
    check_structure,
)
from torch_ref.conv import canonical_window, merge_windows
from torch_ref.executors import compact, native, replay
from torch_ref.executors.materialize import materialize_into
from torch_ref.gates import CoreInputs, LinearInputs
from torch_ref.layout import DecodeLayout
from torch_ref.spec import KernelConfig, SSMSpec
from torch_ref.state import ConvSSMState, check_row, slot_ids

Tensor = torch.Tensor

MODES = {"native": native, "compact": compact, "replay": replay}


def prepare(
    spec: SSMSpec, state: ConvSSMState, layout: DecodeLayout, config: KernelConfig = KernelConfig(), *, kernels: str = "eager"
) -> tuple[ConvSSMState, SSMForward]:
    """Open a round: exactly once per forward, before the first layer.

    Native and compact: the state is unchanged. Replay: rows whose window does not fit into their history are folded
    (one rounding to ssm_dtype) and flipped to the other half. Returns the state and the receipt of this round.
    kernels: "eager" or "triton" (same bits; block_v and num_warps of config set its launches); the whole round uses it.
    Raises ValueError when the layout is on another device than the state, and for kernels that cannot run there.
    """
    check_kernels(state, kernels)
    if layout.slots.device != state.ssm.device:
        raise ValueError(f"layout is on {layout.slots.device}: this state needs it on {state.ssm.device}")
    state = MODES[spec.mode].prepare(spec, state, layout, kernels)
    offset = state.accepted[layout.slots.long()].clone()
    return state, SSMForward(layout, offset, spec.mode, config, spec.state_key, kernels)


def check_kernels(state: ConvSSMState, kernels: str) -> None:
    """Raise ValueError for an unknown implementation, and for Triton kernels away from a GPU; nothing falls back."""
    if kernels not in ("eager", "triton"):
        raise ValueError(f"kernels={kernels!r} is not allowed: 'eager' or 'triton'")
    if kernels == "triton" and not state.ssm.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"kernels='triton' is not allowed on {state.ssm.device}: it needs a CUDA device")


def forward(
    spec: SSMSpec, state: ConvSSMState, receipt: SSMForward, row: int, inputs: LinearInputs
) -> tuple[ConvSSMState, Tensor]:
    """Run one layer. row: logical layer row. inputs: token rows [T, ..] after the convolution.

    Returns o [T, HV, V] in v's dtype, exactly zero in padding rows. Writes only what this round owns: native T_r state
    rows, compact T_r window records, replay T_r uncommitted records. Rows and layers are independent.
    """
    check_row(spec, row)
    check_receipt(spec, receipt, inputs.k.shape[0])
    return MODES[spec.mode].forward(spec, state, receipt, row, native.core_inputs(spec, receipt, inputs))


def forward_core(
    spec: SSMSpec, state: ConvSSMState, receipt: SSMForward, row: int, core: CoreInputs
) -> tuple[ConvSSMState, Tensor]:
    """`forward` from prologue outputs (normalised q and k, decay, beta); what bit comparisons across frameworks feed."""
    check_row(spec, row)
    check_receipt(spec, receipt, core.k.shape[0])
    return MODES[spec.mode].forward(spec, state, receipt, row, core)


def accept(spec: SSMSpec, state: ConvSSMState, acceptance: StateAcceptance) -> ConvSSMState:
    """Commit the accepted prefix of each request; trusted.

    Lengths count the base token, 1..verify_len; larger ones are clamped, 0 leaves the row (and its accepted index)
    alone. Native moves an index, replay a cursor, compact re-runs the prefix. This function cannot know whether a
    receipt was accepted before: use `commit`. Raises ValueError when receipts are missing or of another state.
    """
    check_structure(spec, acceptance)
    pairs = accepted_rows(acceptance)
    state = MODES[spec.mode].accept(spec, state, pairs)
    for _, _, slots, lengths in pairs:
        state.accepted[slots] = (lengths - 1).int()
    return state


def commit(spec: SSMSpec, state: ConvSSMState, acceptance: StateAcceptance, ledger: Ledger) -> ConvSSMState:
    """`check_acceptance`, then `accept`, then spend the receipts. Raises ValueError before anything changes."""
    ledger.check(acceptance)
    check_acceptance(spec, acceptance)
    state = accept(spec, state, acceptance)
    ledger.spend(acceptance)
    return state


def merge(spec: SSMSpec, state: ConvSSMState, slots, *, kernels: str = "eager") -> ConvSSMState:
    """Make row 0 and window offset 0 of the slots [N] hold the accepted state, before a prompt chunk or a copy.

    Replay: the live records are folded and the cursors become 0. Native: the accepted row moves to row 0. Compact:
    the state already is. Afterwards the accepted index is 0. Raises ValueError for ids that are not live.
    """
    check_kernels(state, kernels)
    ids = slot_ids(spec, state, slots)
    state = MODES[spec.mode].merge(spec, state, ids, kernels)
    state = merge_windows(spec, state, ids)
    state.accepted[ids] = 0
    return state


def snapshot(spec: SSMSpec, state: ConvSSMState, slots, *, kernels: str = "eager") -> tuple[Tensor, Tensor]:
    """Canonical copies (conv [N, layers, C, kw-1], ssm [N, layers, HV, V, K]) of the slots [N]; the state is unchanged.

    Allocates N states, and says so: use `pages.export_into` to write into memory you own.
    """
    check_kernels(state, kernels)
    ids = slot_ids(spec, state, slots)
    conv = state.conv.new_zeros((len(ids),) + (spec.layers, spec.channels, spec.conv_width - 1))
    ssm = state.ssm.new_zeros((len(ids), spec.layers) + state.ssm.shape[2:])
    for i, slot in enumerate(ids.tolist()):
        conv[i] = canonical_window(spec, state, slot)
        if kernels == "eager":
            ssm[i] = MODES[spec.mode].materialize(spec, state, slot)
    if kernels == "triton":
        materialize_into(spec, state, ids, torch.arange(len(ids), device=ids.device), ssm)
    return conv, ssm
