"""Merge, snapshot and export by kernel: the accepted states of a list of slots, straight into where they belong."""

from __future__ import annotations

import torch

from torch_ref.spec import SSMSpec
from torch_ref.state import ConvSSMState

Tensor = torch.Tensor


def materialize_into(spec: SSMSpec, state: ConvSSMState, slots: Tensor, targets: Tensor, pages: Tensor | None = None) -> None:
    """Write the accepted state of each of slots [N] to row targets [N], all layers; -1 drops a request.

    pages [P, layers, HV, V, K] in ssm_dtype; None: the pool of states itself, where slots without live records are left
    alone. Slots are live ids.
    """
    from kernels_triton.materialize import advance

    n, base, pools = torch.zeros_like(slots), torch.zeros_like(slots), None
    if spec.mode == "replay":
        h = state.extra
        cursor, pools = h.cursor[slots], (h.k, h.v, h.decay, h.beta)
        n, base = cursor % (2 * spec.history), cursor // (2 * spec.history) * spec.history
    row = slots * spec.width + state.accepted[slots] if spec.mode == "native" else slots
    work = torch.stack([x.to(torch.int32) for x in (row, n, base, targets)])
    count = torch.full((1,), len(slots), dtype=torch.int32, device=slots.device)
    advance(state.ssm, pools, count, work, target=pages, pages=pages is not None)
