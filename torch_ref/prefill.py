"""Sequential prefill of both rules: a prompt chunk from the accepted state, token by token, resumable at any split.

The running state is fp32 and is rounded to ssm_dtype once, at the end of the chunk.
"""

from __future__ import annotations

import torch

from torch_ref.conv import check_lengths
from torch_ref.executors.recurrence import expand_heads, read, step
from torch_ref.executors.replay import live
from torch_ref.gates import CoreInputs, LinearInputs, prologue
from torch_ref.spec import SSMSpec
from torch_ref.state import ConvSSMState, check_row, slot_ids

Tensor = torch.Tensor


def prefill(
    spec: SSMSpec, state: ConvSSMState, row: int, slots: Tensor, lengths: Tensor, inputs: LinearInputs
) -> tuple[ConvSSMState, Tensor]:
    """Run one layer over a prompt chunk, from row 0 of each slot (`merge` first) to its rounded final state.

    slots [B]; lengths [B] integer, 0..N; inputs [B, N, ..] after the convolution, padded on the right. Returns the state
    and o [B, N, HV, V] in v's dtype, exactly zero beyond each length. Rows of length 0 change nothing. Raises ValueError
    for slots that are not live, lengths outside 0..N, and a slot that still has decode rounds to `merge`.
    """
    check_row(spec, row)
    ids, sizes = slot_ids(spec, state, slots), check_lengths(lengths, inputs.q.shape[1])
    pending = state.accepted[ids] != 0
    if spec.mode == "replay":
        pending = pending | (live(spec, state.extra.cursor[ids])[0] != 0)
    if pending.any():
        raise ValueError(f"slots={ids[pending].tolist()} hold decoded tokens: merge them before a prompt chunk")
    core = prologue(spec, inputs)
    rows = ids * spec.rows_per_slot
    s, o = prefill_core(spec, state.ssm[row, rows].float(), torch.tensor(sizes, device=ids.device), core)
    used = torch.tensor([n > 0 for n in sizes], dtype=torch.bool, device=ids.device)
    state.ssm[row, rows[used]] = s[used].to(state.ssm.dtype)
    return state, o


def prefill_core(spec: SSMSpec, s: Tensor, lengths: Tensor, core: CoreInputs) -> tuple[Tensor, Tensor]:
    """(final state [B, HV, V, K] fp32, o [B, N, HV, V]) from an initial state [B, HV, V, K] fp32 and padded inputs."""
    q, k_hat = expand_heads(core.q, spec.v_heads, 2), expand_heads(core.k_hat, spec.v_heads, 2)
    v, o = core.v.float(), torch.zeros_like(core.v)
    for t in range(core.v.shape[1]):
        real = lengths > t
        new, _ = step(spec, s, k_hat[:, t], v[:, t], core.decay[:, t], core.beta[:, t])
        s = torch.where(real[:, None, None, None], new, s)
        o[real, t] = read(spec, s, q[:, t])[real].to(o.dtype)
    return s, o
