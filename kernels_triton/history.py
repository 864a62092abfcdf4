"""Replay's prepare: the rows whose window does not fit into their history are folded and continue in the other half.

Two launches for all layers: `plan` moves the cursors and lists the folding rows, `materialize.advance` folds the list.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels_triton.launch import launch
from kernels_triton.materialize import advance


@triton.jit
def _plan_kernel(slots_ptr, lens_ptr, cursor_ptr, forward_ptr, work_ptr, count_ptr, R, S, L: tl.constexpr, SIZE: tl.constexpr):
    """One program, one lane a request row."""
    i = tl.arange(0, SIZE)
    slot = tl.load(slots_ptr + i, mask=i < R, other=0)
    tokens = tl.load(lens_ptr + i, mask=i < R, other=0)
    live = (tokens > 0) & (slot >= 0) & (slot < S - 1)
    cursor = tl.load(cursor_ptr + slot, mask=live, other=0)
    n, phase = cursor % (2 * L), cursor // (2 * L)
    fold = live & (n + tokens > L)
    moved = tl.where(fold, (1 - phase) * (2 * L), cursor)
    tl.store(cursor_ptr + slot, moved, mask=fold)
    tl.store(forward_ptr + slot, moved, mask=live)
    before = tl.cumsum(fold.to(tl.int32), axis=0)
    at = work_ptr + before - 1
    tl.store(at, slot, mask=fold)
    tl.store(at + R, n, mask=fold)
    tl.store(at + 2 * R, phase * L, mask=fold)
    tl.store(at + 3 * R, slot, mask=fold)
    tl.store(count_ptr, tl.max(before, axis=0))


def plan(cursor, forward_cursor, slots, verify_len, *, length: int):
    """Cursors after a prepare, and the work list of its folds.

    cursor, forward_cursor [S] int32, changed in place; slots, verify_len [R] int32. A row folds iff verify_len > 0 and
    n + verify_len > L. Returns work [4, R] as `materialize.advance` takes it, and its count [1]. Live slots must be
    distinct.
    """
    requests = slots.shape[0]
    work = torch.empty((4, requests), dtype=torch.int32, device=cursor.device)
    count = torch.zeros((1,), dtype=torch.int32, device=cursor.device)
    if requests:
        size = triton.next_power_of_2(requests)
        arrays = slots, verify_len, cursor, forward_cursor, work, count
        launch(_plan_kernel, (1,), *arrays, requests, cursor.shape[0], length, size, num_warps=4)
    return work, count


def prepare(state, pools, cursor, forward_cursor, slots, verify_len, *, block_v: int = 16, num_warps: int = 1) -> None:
    """Open a round of mode "replay": fold what must be folded, move the cursors, publish the forward's copy.

    state [layers, S, HV, V, K], pools (k, v, decay, beta) as for `materialize.advance`, cursors and rows as for `plan`.
    State and cursors are changed in place.
    """
    work, count = plan(cursor, forward_cursor, slots, verify_len, length=pools[0].shape[3] // 2)
    advance(state, pools, count, (work,), block_v=block_v, num_warps=num_warps)
