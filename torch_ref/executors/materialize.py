"""Merge, snapshot and export by kernel: the accepted states of a list of slots, straight into where they belong."""

from __future__ import annotations

import torch

from torch_ref.spec import SSMSpec
from torch_ref.state import ConvSSMState

Tensor = torch.Tensor


def materialize_into(spec: SSMSpec, state: ConvSSMState, slots: Tensor, targets: Tensor, pages: Tensor | None = None) -> None:
    """Write the accepted state of each of slots [N] to row targets [N], all layers.

    pages [P, layers, HV, V, K] in ssm_dtype; None: the pool of states itself, where slots without live records are left
    alone. Slots are live ids.
    """
    from kernels_triton.materialize import advance

    place, pools = state.accepted, None
    if spec.mode == "replay":
        h = state.extra
        place, pools = h.cursor, (h.k, h.v, h.decay, h.beta)
    count = torch.full((1,), len(slots), dtype=torch.int32, device=slots.device)
    advance(state.ssm, pools, count, (slots.int(), targets.int(), place), target=pages, pages=pages is not None)
