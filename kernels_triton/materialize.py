"""The accepted state of a slot, to anywhere: checkpoint plus live raw records, by the recurrence, rounded once.

The one kernel behind replay's automatic fold, merge, snapshot and export, for all layers in one launch; without records
(native, compact) it is a copy. Work is a list, so a call costs what it moves: a fixed number of programs shares out the
tiles (request x layer x head x V block) of the list, and temporary memory is registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels_triton.decode import check_sizes, expand_gate, load_gate, registers
from kernels_triton.gates import inverse_norm
from kernels_triton.launch import launch
from kernels_triton.recurrence import (
    INTERPRET,
    expand_rows,
    load_pieces,
    load_rows,
    pair_levels,
    step,
    store_pieces,
    times,
)
from kernels_triton.windows import writer

CHUNK = tl.constexpr(16)  # records whose norms are taken at once
PROGRAMS = 8 if INTERPRET.value else 4224  # 32 for each of the 132 multiprocessors of an H200


def tile_of(state, block_v: int) -> tuple[int, int, int]:
    """(rows of a tile, K, pair levels) of the programs of a state [.., V, K]; ValueError for sizes that are not allowed."""
    check_sizes(state)
    v_dim, k_dim = state.shape[-2:]
    return min(block_v, v_dim), k_dim, pair_levels(state.dtype, k_dim)


@triton.jit
def _load_record(
    k_ptr, v_ptr, decay_ptr, beta_ptr, at, rows, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, M: tl.constexpr,
    LEVELS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Raw record `at`: k rows, v [M], decay, beta, all in fp32; pointers: record 0 of a slot and head."""
    k, v = load_rows(k_ptr + at * K, M, K, LEVELS, WARPS), tl.load(v_ptr + at * V + rows).to(tl.float32)
    return k, v, load_gate(decay_ptr + at * G, M, K, G, LEVELS, WARPS), tl.load(beta_ptr + at)


@triton.jit
def _advance_kernel(
    count_ptr, item_ptr, pages_ptr, place_ptr, state_ptr, k_pool, v_pool, decay_pool, beta_pool, target_ptr, N, S, layers,
    targets, slots,
    KH: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, RECORDS: tl.constexpr,
    M: tl.constexpr, LEVELS: tl.constexpr, KEY_LEVELS: tl.constexpr, WARPS: tl.constexpr,
    HISTORY: tl.constexpr, PAGES: tl.constexpr, IN_PLACE: tl.constexpr, COUNT: tl.constexpr, REQUESTS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Tiles program_id, program_id + programs, .. of the list. RECORDS = 2L. IN_PLACE: the target is the state.
    REQUESTS: 0 for a work list, else N rounded up to a power of two. WIDTH: rows of a slot."""
    BLOCKS: tl.constexpr = V // M
    count = tl.minimum(tl.load(count_ptr), N)
    tiles = count * (layers * HV * BLOCKS)
    for i in range(tl.program_id(0), tiles, COUNT):
        block, head, layer, item = i % BLOCKS, i // BLOCKS % HV, i // (BLOCKS * HV) % layers, i // (BLOCKS * HV) // layers
        if REQUESTS > 0:
            slot, page, writes = writer(item_ptr, pages_ptr, count, item, slots - 1, targets, N, REQUESTS)
            place, target = tl.load(place_ptr + slot, mask=writes, other=0), tl.where(writes, page, -1)
            if HISTORY:
                source, n, base = slot, place % RECORDS, place // RECORDS * (RECORDS // 2)
            else:
                source, n, base = slot * WIDTH + (place if WIDTH > 1 else 0), 0, 0
        else:
            source, n = tl.load(item_ptr + item).to(tl.int64), tl.load(item_ptr + N + item)
            base, target = tl.load(item_ptr + 2 * N + item), tl.load(item_ptr + 3 * N + item).to(tl.int64)
        if (target >= 0) & ((n > 0) if IN_PLACE else (n >= 0)):
            rows = block * M + tl.arange(0, M)
            column = rows[:, None]
            row = layer * S + source
            source_ptr = target_ptr if IN_PLACE else state_ptr
            s = load_pieces(source_ptr + (row * HV + head) * (V * K), column, K, column < V, 0.0, K, LEVELS)
            if HISTORY:
                key = row * KH + head // (HV // KH)
                own = row * HV + head
                k_ptr, v_ptr = k_pool + (key * RECORDS + base) * K, v_pool + (own * RECORDS + base) * V
                decay_ptr, beta_ptr = decay_pool + (own * RECORDS + base) * G, beta_pool + own * RECORDS + base
                for start in range(0, n, CHUNK):
                    # the norms of a chunk at once: one canonical sum for all instead of one a record
                    j = start + tl.arange(0, CHUNK)[:, None]
                    norms = inverse_norm(load_pieces(k_ptr, j, K, j < n, 0.0, K, KEY_LEVELS), KEY_LEVELS)
                    for t in range(tl.minimum(CHUNK, n - start)):
                        k, v, decay, beta = _load_record(
                            k_ptr, v_ptr, decay_ptr, beta_ptr, start + t, rows, K, V, G, M, LEVELS, WARPS
                        )
                        norm = tl.sum(tl.where(tl.arange(0, CHUNK) == t, norms, 0.0), axis=0)
                        s, _ = step(s, expand_rows(times(k, (norm,)), M), v, expand_gate(decay, M, G), beta, LEVELS)
            to = target * layers + layer if PAGES else layer * targets + target
            store_pieces(target_ptr + (to * HV + head) * (V * K), column, K, s, column < V, K, LEVELS, "evict_first")


def advance(state, pools, count, items, *, target=None, pages: bool = False, block_v: int = 16, num_warps: int = 1):
    """Write the accepted states of a list of slots, all layers.

    state [layers, rows, HV, V, K]; pools: replay's raw records (k [layers, S, KH, 2L, K], v [layers, S, HV, 2L, V],
    decay [layers, S, HV, 2L, G], beta [layers, S, HV, 2L]) or None; count [1] int32: how many of the items.
    items: a work list (work [4, N],) int32, with source row of the state (for replay: the slot), live records n, first live
    record, target row or -1 for none; or requests (slots [N], page_ids [N], place [S]) int32 as in `windows`, where place is
    the cursor of every slot, without records its accepted index. Sources of one call must be distinct rows, targets of a
    work list as well. target: another array in the dtype of the state, [P, layers, HV, V, K] if `pages` else [layers, rows,
    HV, V, K]; None: the state itself, where items without records are left alone. Changes what is written in place and
    returns it. No temporary memory.
    """
    m, k_dim, levels = tile_of(state, block_v)
    written = state if target is None else target
    k, v, decay, beta = pools or (state, state, state, state)
    layers, rows, v_heads, v_dim, _ = state.shape
    source, listed, place = count if target is None else state, len(items) == 1, items[-1]
    n, slots = items[0].shape[-1], rows if listed else place.shape[0]
    launch(
        _advance_kernel, (PROGRAMS,),
        count, items[0], items[len(items) // 2], place, source, k, v, decay, beta, written, n, rows, layers,
        written.shape[0 if pages else 1], slots,
        k.shape[2], v_heads, k_dim, v_dim, decay.shape[-1], k.shape[3], m, levels, pair_levels(k.dtype, k_dim), num_warps,
        pools is not None, pages, target is None, PROGRAMS, 0 if listed else triton.next_power_of_2(n), rows // slots,
        num_warps=num_warps, registers=registers(m, k_dim, num_warps),
    )  # fmt: skip
    return written
