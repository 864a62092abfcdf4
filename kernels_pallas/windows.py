"""Export: which requests write which page, and the accepted convolution window of a slot into its page, all layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas._compat import call, load, program_id, store, when
from kernels_pallas.gates import power_of_two

CHANNELS = 256  # at most, of one program


def writer(slots_ref, pages_ref, count, i, live_slots: int, pages: int):
    """(slot, page, whether request i writes it): slot and page exist, i < count, and no later request writes that page."""

    def exists(slot, page):
        return (slot >= 0) & (slot < live_slots) & (page >= 0) & (page < pages)

    j, none = lax.iota(jnp.int32, power_of_two(slots_ref.shape[0])), jnp.full((), -1, jnp.int32)
    listed = j < jnp.minimum(count, slots_ref.shape[0])
    slot, page = slots_ref[i], pages_ref[i]
    slot_j, page_j = (load(ref.at[j], mask=listed, other=none) for ref in (slots_ref, pages_ref))
    later = exists(slot_j, page_j) & (page_j == page) & (j > i)
    return slot, page, (i < count) & exists(slot, page) & (jnp.sum(later.astype(jnp.int32)) == 0)


def _windows_kernel(count_ref, slots_ref, pages_ref, offset_ref, pool_ref, _, target_ref, *, block: int, interpret: bool):
    layer, i = program_id(1), program_id(2)
    c = program_id(0) * block + lax.iota(jnp.int32, block)
    slot, page, writes = writer(slots_ref, pages_ref, count_ref[0], i, pool_ref.shape[1] - 1, target_ref.shape[0])

    @when(writes)
    def _():
        offset = offset_ref[slot]
        for tap in range(target_ref.shape[3]):
            store(target_ref.at[page, layer, c, jnp.int32(tap)], load(pool_ref.at[layer, slot, c, offset + tap]))


def windows(pool, offset, count, slots, page_ids, target, *, num_warps: int = 1):
    """Copy the accepted window of the first count[0] of slots [N] to pages page_ids [N] of target.

    pool [layers, S, C, kw-1 + W-1]; offset [S] int32, accepted columns; count [1], slots, page_ids [N] int32; target [P,
    layers, C, kw-1], donated. Requests whose slot is not live or whose page does not exist are dropped; of several for one
    page the last wins. Returns target. No temporary memory.
    """
    layers, _, channels, _ = pool.shape
    block = min(CHANNELS, channels & -channels)  # the largest power of two that divides C
    return call(
        _windows_kernel,
        jax.ShapeDtypeStruct(target.shape, target.dtype),
        grid=(channels // block, layers, slots.shape[0]),
        name="ssm_windows",
        num_warps=num_warps,
        aliases={5: 0},
        block=block,
    )(count, slots, page_ids, offset, pool, target)
