"""Pages: the canonical, self-contained form of a slot, independent of storage mode and verify width."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_ref.conv import canonical_window
from torch_ref.executors import MODES, check_kernels
from torch_ref.executors.materialize import materialize_into
from torch_ref.spec import SSMSpec, page_bytes
from torch_ref.state import ConvSSMState, clear, dtype, slot_ids

__all__ = ["Pages", "init_pages", "export_into", "restore", "page_bytes"]

Tensor = torch.Tensor


@dataclass(frozen=True)
class Pages:
    """P pages: ssm [P, layers, HV, V, K] in ssm_dtype, conv [P, layers, C, kw-1] raw inputs, blocks q | k | v."""

    ssm: Tensor
    conv: Tensor


def init_pages(spec: SSMSpec, pages: int, device: torch.device | str = "cpu") -> Pages:
    """Allocate `pages` zero pages of `page_bytes(spec)` bytes each."""
    ssm = (pages, spec.layers, spec.v_heads, spec.v_dim, spec.k_dim)
    conv = (pages, spec.layers, spec.channels, spec.conv_width - 1)
    return Pages(
        torch.zeros(ssm, dtype=dtype(spec.ssm_dtype), device=device),
        torch.zeros(conv, dtype=dtype(spec.act_dtype), device=device),
    )


def export_into(spec: SSMSpec, state: ConvSSMState, pages: Pages, page_ids, slots, n: int, *, kernels: str = "eager") -> Pages:
    """Write the canonical state of the first n of slots [N] into pages page_ids [N]; one request at a time.

    `pages` is changed in place, the state is not; replay folds its live records on the way, with the recurrence of every
    other fold. Requests whose slot is not live or whose page id is out of range are dropped. Legal only between an
    accept and the next prepare.
    """
    check_kernels(state, kernels)
    slots, page_ids = torch.as_tensor(slots).tolist(), torch.as_tensor(page_ids).tolist()
    sources = {}  # page -> slot; of two requests for one page the last wins
    for slot, page in list(zip(slots, page_ids, strict=True))[: int(n)]:
        if 0 <= slot < spec.hold and 0 <= page < pages.ssm.shape[0]:
            sources[page] = slot
    for page, slot in sources.items():
        pages.conv[page] = canonical_window(spec, state, slot)
        if kernels == "eager":
            pages.ssm[page] = MODES[spec.mode].materialize(spec, state, slot)
    if kernels == "triton":
        ids = torch.tensor([list(sources.values()), list(sources)], dtype=torch.long, device=state.ssm.device)
        materialize_into(spec, state, ids[0], ids[1], pages.ssm)
    return pages


def restore(spec: SSMSpec, state: ConvSSMState, pages: Pages, page_ids, slots, n: int) -> ConvSSMState:
    """Load pages page_ids [N] into the first n of slots [N]: row 0, window offset 0, cursor 0, accepted index 0.

    Everything else that the slot owned (other native rows, records, window tail) is zeroed, so no trace of its last
    owner is left. Raises ValueError, before anything changes, for slots that are not live or repeated and for page ids
    outside the pages.
    """
    ids, page_ids = slot_ids(spec, state, slots, n), torch.as_tensor(page_ids).tolist()[: int(n)]
    bad = [page for page in page_ids if not 0 <= page < pages.ssm.shape[0]]
    if bad:
        raise ValueError(f"page_ids={page_ids} contains {bad}: allowed are 0..{pages.ssm.shape[0] - 1}")
    clear(spec, state, ids)
    for slot, page in zip(ids.tolist(), page_ids, strict=True):
        state.ssm[:, slot * spec.rows_per_slot] = pages.ssm[page]
        state.conv[:, slot, :, : spec.conv_width - 1] = pages.conv[page]
    return state
