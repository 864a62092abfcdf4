"""Export: which requests write which page, and the accepted convolution window of a slot into its page, all layers."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels_triton.launch import launch

CHANNELS = 256  # at most, of one program


@triton.jit
def _exists(slot, page, live_slots, pages):
    return (slot >= 0) & (slot < live_slots) & (page >= 0) & (page < pages)


@triton.jit
def writer(slots_ptr, pages_ptr, count, i, live_slots, pages, N, N2: tl.constexpr):
    """(slot, page, whether request i writes it): slot and page exist, i < count, and no later request writes that page.

    N2: N rounded up to a power of two.
    """
    j = tl.arange(0, N2)
    listed = j < tl.minimum(count, N)
    slot, page = tl.load(slots_ptr + i), tl.load(pages_ptr + i)
    slot_j, page_j = tl.load(slots_ptr + j, mask=listed, other=-1), tl.load(pages_ptr + j, mask=listed, other=-1)
    later = _exists(slot_j, page_j, live_slots, pages) & (page_j == page) & (j > i)
    writes = (i < count) & _exists(slot, page, live_slots, pages) & (tl.sum(later.to(tl.int32)) == 0)
    return slot.to(tl.int64), page.to(tl.int64), writes


@triton.jit(do_not_specialize=["S", "P"])
def _windows_kernel(
    count_ptr, slots_ptr, pages_ptr, offset_ptr, pool_ptr, target_ptr, S, P, LAYERS: tl.constexpr, C: tl.constexpr,
    WINDOW: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, N2: tl.constexpr,
):  # fmt: skip
    layer, i = tl.program_id(1), tl.program_id(2)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot, page, writes = writer(slots_ptr, pages_ptr, tl.load(count_ptr), i, S - 1, P, N, N2)
    if writes:
        source = pool_ptr + ((layer * S + slot) * C + c) * WINDOW + tl.load(offset_ptr + slot)
        target = target_ptr + ((page * LAYERS + layer) * C + c) * TAPS
        for tap in tl.static_range(TAPS):
            tl.store(target + tap, tl.load(source + tap))


def windows(pool, offset, count, slots, page_ids, target, *, num_warps: int = 1):
    """Copy the accepted window of the first count[0] of slots [N] to pages page_ids [N] of target.

    pool [layers, S, C, kw-1 + W-1]; offset [S] int32, accepted columns; count [1], slots, page_ids [N] int32; target [P,
    layers, C, kw-1], changed in place. Requests whose slot is not live or whose page does not exist are dropped; of several
    for one page the last wins. Returns target. No temporary memory.
    """
    layers, s, channels, window = pool.shape
    block, n = min(CHANNELS, channels & -channels), slots.shape[0]  # the largest power of two that divides C
    launch(
        _windows_kernel, (channels // block, layers, n),
        count, slots, page_ids, offset, pool, target, s, target.shape[0], layers, channels, window, target.shape[3], block,
        n, triton.next_power_of_2(n),
        num_warps=num_warps,
    )  # fmt: skip
    return target
