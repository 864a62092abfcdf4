"""The accepted state of a slot, to anywhere: checkpoint plus live raw records, by the recurrence, rounded once.

The one kernel behind replay's automatic fold, merge, snapshot and export, for all layers in one launch; without records
(native, compact) it is a copy. Work is a list, so a call costs what it moves: a fixed number of programs shares out the
tiles (request x layer x head x V block) of the list, and temporary memory is registers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas._compat import call, load, program_id, when
from kernels_pallas.decode import Tile, tile_of
from kernels_pallas.gates import inverse_norm
from kernels_pallas.recurrence import expand_rows, load_pieces, load_row_pieces, load_rows, pair_levels, step, store_pieces
from kernels_pallas.windows import writer

CHUNK = 16  # records whose norms are taken at once
PROGRAMS = 4224  # 32 for each of the 132 multiprocessors of an H200


def _norms(k_pool, lead, first, live, tile: Tile):
    """Inverse norms of the first `live` of the CHUNK raw keys from `first` on: one canonical sum for all of them."""
    j, levels = lax.broadcasted_iota(jnp.int32, (CHUNK, 1), 0), pair_levels(k_pool.dtype, tile.k)
    return inverse_norm(load_pieces(k_pool, lead, first + j, tile.k, levels, j < live), levels, tile.interpret)


def _load_record(pools, lead, head, key, at, rows, tile: Tile):
    """Raw record `at`: k rows, v [M] of each part, decay, beta, all in fp32; lead = (layer, slot)."""
    k_pool, v_pool, decay_pool, beta_pool = pools
    k = load_rows(k_pool, (*lead, key, at), tile.m, tile.k, tile.levels, tile.warps)
    v = [load(v_pool.at[(*lead, head, at, x)]).astype(jnp.float32) for x in rows]
    if decay_pool.shape[-1] == 1:
        decay = decay_pool[(*lead, head, at, 0)]
    else:
        decay = load_row_pieces(decay_pool, (*lead, head, at), tile.m, tile.k, tile.levels, tile.warps)
    return k, v, decay, beta_pool[(*lead, head, at)]


def _advance_kernel(
    count_ref, *refs,
    tile: Tile, items: int, tokens: int, records: bool, pages: bool, in_place: bool, programs: int, interpret: bool
):  # fmt: skip
    """Tiles program_id, program_id + programs, .. of the list."""
    item_refs, refs = refs[:items], refs[items + tokens : len(refs) - tokens]
    target_ref = refs[-1]
    state_ref = target_ref if in_place else refs[0]
    pools = refs[1:5] if records else ()
    layers, _, heads, v_dim, _ = state_ref.shape
    blocks, first = v_dim // tile.m, program_id(0)
    size = item_refs[0].shape[-1]

    def moves(item):
        """(source row, live records, first of them, target row or -1)."""
        if items == 1:
            return tuple(item_refs[0][j, item] for j in range(4))
        slots_ref, pages_ref, place_ref = item_refs
        slots = place_ref.shape[0]
        slot, page, writes = writer(slots_ref, pages_ref, count_ref[0], item, slots - 1, target_ref.shape[0 if pages else 1])
        place, target = place_ref[jnp.where(writes, slot, 0)], jnp.where(writes, page, -1)
        if records:
            length = pools[0].shape[3] // 2
            return slot, lax.rem(place, 2 * length), lax.div(place, 2 * length) * length, target
        width, none = state_ref.shape[1] // slots, jnp.zeros((), jnp.int32)
        return slot * width + (place if width > 1 else 0), none, none, target

    def one(i, _):
        i = first + i * programs
        block, head = lax.rem(i, blocks), lax.rem(lax.div(i, blocks), heads)
        layer, item = lax.rem(lax.div(i, blocks * heads), layers), lax.div(i, blocks * heads * layers)
        source, n, base, target = moves(item)

        @when((target >= 0) & ((n > 0) if in_place else (n >= 0)))
        def _():
            # a tile in parts of one row a lane: the compiler then takes few enough registers for four warps a scheduler
            sub = tile._replace(m=min(tile.m, 4 * tile.warps))
            first_row = [block * tile.m + p for p in range(0, tile.m, sub.m)]
            rows = [at + lax.iota(jnp.int32, sub.m) for at in first_row]
            columns = [at + lax.broadcasted_iota(jnp.int32, (sub.m, 1), 0) for at in first_row]
            s = [load_pieces(state_ref, (layer, source, head), column, tile.k, tile.levels) for column in columns]
            if records:
                key = lax.div(head, pools[1].shape[2] // pools[0].shape[2])

                def chunk(c, s):
                    begin, live = base + c * CHUNK, jnp.minimum(n - c * CHUNK, CHUNK)
                    norms = _norms(pools[0], (layer, source, key), begin, live, tile)

                    def record(t, s):
                        k, v, decay, beta = _load_record(pools, (layer, source), head, key, begin + t, rows, sub)
                        norm = jnp.sum(jnp.where(lax.iota(jnp.int32, CHUNK) == t, norms, 0.0))
                        k_hat = expand_rows([x * norm for x in k], sub.m)
                        return [step(x, k_hat, y, decay, beta, tile.levels, interpret)[0] for x, y in zip(s, v, strict=True)]

                    return lax.fori_loop(0, live, record, s)

                s = lax.fori_loop(0, lax.div(n + (CHUNK - 1), CHUNK), chunk, s)
            lead = (target, layer, head) if pages else (layer, target, head)
            for column, x in zip(columns, s, strict=True):
                store_pieces(target_ref, lead, column, x, tile.k, tile.levels, eviction_policy="evict_first")

        return _

    tiles = jnp.minimum(count_ref[0], size) * (layers * heads * blocks)
    lax.fori_loop(0, lax.div(jnp.maximum(tiles - first, 0) + (programs - 1), programs), one, None)


def advance(
    state, pools, count, items, *, target=None, token=None, pages: bool = False, block_v: int = 16, num_warps: int = 1
):  # fmt: skip
    """Write the accepted states of a list of slots, all layers.

    state [layers, rows, HV, V, K]; pools: replay's raw records (k [layers, S, KH, 2L, K], v [layers, S, HV, 2L, V],
    decay [layers, S, HV, 2L, G], beta [layers, S, HV, 2L]) or None; count [1] int32: how many of the items.
    items: a work list (work [4, N],) int32, with source row of the state (for replay: the slot), live records n, first live
    record, target row or -1 for none; or requests (slots [N], page_ids [N], place [S]) int32 as in `windows`, where place is
    the cursor of every slot, without records its accepted index. Sources of one call must be distinct rows, targets of a
    work list as well. target: another array in the dtype of the state, [P, layers, HV, V, K] if `pages` else [layers, rows,
    HV, V, K]; None: the state itself, where items without records are left alone.
    token: any array, returned unchanged; whoever reads it afterwards comes after the reads of this call, so that XLA need
    not copy a pool to keep both apart. Donate what is written and the token. Returns what is written, and the token if
    there is one. No temporary memory.
    """
    tile = tile_of(state, block_v, num_warps)
    in_place = target is None
    tokens = () if token is None else (token,)
    operands = (count, *items, *tokens, state, *(pools or ()), *(() if in_place else (target,)))
    written = state if in_place else target
    programs, before = PROGRAMS if not tile.interpret else 8, 1 + len(items)
    out = call(
        _advance_kernel,
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (written, *tokens)],
        grid=(programs,),
        name="ssm_advance",
        num_warps=num_warps,
        aliases={before + len(tokens) if in_place else len(operands) - 1: 0} | ({before: 1} if tokens else {}),
        tile=tile,
        items=len(items),
        tokens=len(tokens),
        records=pools is not None,
        pages=pages,
        in_place=in_place,
        programs=programs,
    )(*operands)
    return out if tokens else out[0]
