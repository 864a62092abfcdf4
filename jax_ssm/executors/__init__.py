"""The verbs: what happens to a recurrent state. A table maps each storage mode to its module of pure functions.

One round: prepare -> conv_forward and forward per layer row -> sample -> accept. Before a prompt chunk: merge.
Donate the state to every verb that returns it; a donated state must not be used again.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_ssm.acceptance import (
    Ledger,
    SSMForward,
    StateAcceptance,
    check_acceptance,
    check_receipt,
    check_structure,
    split_lengths,
)
from jax_ssm.conv import canonical_window, merge_windows
from jax_ssm.executors import compact, native, replay
from jax_ssm.executors.materialize import materialize_into
from jax_ssm.gates import CoreInputs, LinearInputs
from jax_ssm.kernels import refusal
from jax_ssm.layout import DecodeLayout
from jax_ssm.spec import KernelConfig, SSMSpec
from jax_ssm.state import ConvSSMState, as_ids, check_slots, check_state, drop_index, read_index

Array = jax.Array

MODES = {"native": native, "compact": compact, "replay": replay}


def check_config(config: KernelConfig) -> None:
    """Raise NotImplementedError for an implementation that cannot run here (`kernels.refusal`); nothing falls back silently."""
    reason = refusal(config.implementation)
    if reason is not None:
        raise NotImplementedError(f"implementation={config.implementation!r} {reason}")


def prepare(
    spec: SSMSpec, state: ConvSSMState, layout: DecodeLayout, config: KernelConfig = KernelConfig()
) -> tuple[ConvSSMState, SSMForward]:
    """Open a round: exactly once per forward, before the first layer.

    Native and compact: the state is unchanged. Replay: rows whose window does not fit into their history are folded
    (one rounding to ssm_dtype) and flipped to the other half. Returns the state and the receipt of this round.
    """
    check_config(config)
    check_state(spec, state)
    state = MODES[spec.mode].prepare(spec, state, layout, config)
    offset = state.accepted[read_index(spec, layout.slots)]
    return state, SSMForward(layout, offset, spec.mode, config, spec.state_key, spec)


def forward(spec: SSMSpec, state: ConvSSMState, receipt: SSMForward, row, inputs: LinearInputs) -> tuple[ConvSSMState, Array]:
    """Run one layer. row: logical layer row (int or traced). inputs: token rows [T, ..] after the convolution.

    Returns o [T, HV, V] in v's dtype, exactly zero in padding rows. Writes only what this round owns: native T_r state
    rows, compact T_r window records, replay T_r uncommitted records. Rows and layers are independent.
    """
    check_receipt(spec, receipt, row, inputs.k.shape[0])
    return MODES[spec.mode].forward(spec, state, receipt, row, native.core_inputs(spec, receipt, inputs))


def forward_core(spec: SSMSpec, state: ConvSSMState, receipt: SSMForward, row, core: CoreInputs) -> tuple[ConvSSMState, Array]:
    """`forward` from prologue outputs (normalised q and k, decay, beta); what bit comparisons across frameworks feed."""
    check_receipt(spec, receipt, row, core.k.shape[0])
    return MODES[spec.mode].forward(spec, state, receipt, row, core)


def accept(spec: SSMSpec, state: ConvSSMState, acceptance: StateAcceptance) -> ConvSSMState:
    """Commit the accepted prefix of each request; pure and trusted, for use inside jit.

    Lengths count the base token, 1..verify_len; larger ones are clamped, 0 leaves the row (and its accepted index)
    alone. Native moves an index, replay a cursor, compact re-runs the prefix. This function cannot know whether a
    receipt was accepted before: use `commit` where receipts cross the host. Raises ValueError when receipts are missing
    or of another state, or when the state is not of this spec.
    """
    check_state(spec, state)
    check_structure(spec, acceptance)
    pairs = [(f, jnp.clip(lengths, 0, f.layout.verify_len)) for f, lengths in split_lengths(acceptance)]
    state = MODES[spec.mode].accept(spec, state, pairs)
    accepted = state.accepted
    for receipt, lengths in pairs:
        target = drop_index(spec, receipt.layout.slots, lengths > 0)
        accepted = accepted.at[target].set(lengths - 1, mode="drop")
    return state.replace(accepted=accepted)


def commit(spec: SSMSpec, state: ConvSSMState, acceptance: StateAcceptance, ledger: Ledger) -> ConvSSMState:
    """`check_acceptance`, then `accept`, then spend the receipts. Raises ValueError before anything changes."""
    ledger.check(acceptance)
    check_acceptance(spec, acceptance)
    state = accept(spec, state, acceptance)
    ledger.spend(acceptance)
    return state


def merge(spec: SSMSpec, state: ConvSSMState, slots: Array, config: KernelConfig = KernelConfig()) -> ConvSSMState:
    """Make row 0 and window offset 0 of the slots [N] hold the accepted state, before a prompt chunk or a copy.

    Replay: the live records are folded and the cursors become 0. Native: the accepted row moves to row 0. Compact:
    the state already is. Afterwards the accepted index is 0. Raises ValueError for concrete ids that are not live.
    """
    check_config(config)
    check_state(spec, state)
    ids = as_ids("slots", slots)
    check_slots(spec, slots)
    if not ids.size:
        return state
    slots = ids
    state = MODES[spec.mode].merge(spec, state, slots, config)
    state = merge_windows(spec, state, slots)
    return state.replace(accepted=state.accepted.at[drop_index(spec, slots)].set(0, mode="drop"))


def snapshot(spec: SSMSpec, state: ConvSSMState, slots: Array, config: KernelConfig = KernelConfig()) -> tuple[Array, Array]:
    """Canonical copies (conv [N, layers, C, kw-1], ssm [N, layers, HV, V, K]) of the slots [N]; the state is unchanged.

    Allocates N states, and says so: use `pages.export_into` to write into memory you own.
    """
    check_config(config)
    check_state(spec, state)
    ids = as_ids("slots", slots)
    check_slots(spec, slots)
    slots, index = ids, read_index(spec, ids)
    if config.implementation != "xla":
        n = slots.shape[0]
        ssm = jnp.zeros((n, spec.layers) + state.ssm.shape[2:], state.ssm.dtype)
        ssm = materialize_into(spec, state, slots, jnp.arange(n), n, config.implementation, pages=ssm)
    else:
        ssm = jax.lax.map(lambda slot: MODES[spec.mode].materialize(spec, state, slot), index)
    return jax.lax.map(lambda slot: canonical_window(spec, state, slot), index), ssm
