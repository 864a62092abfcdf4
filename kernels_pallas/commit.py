"""Commit of mode "compact": re-run the accepted prefix of every request in every layer, rounding after each token.

One program per (V block, value head, layer x request). k^ is recomputed from the raw record by the norm of gates.py, so
the state advances exactly as native decode of the same tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas._compat import call, load, program_id, when
from kernels_pallas.decode import Tile, next_state, request_tokens, tile_of
from kernels_pallas.gates import inverse_norm, power_of_two
from kernels_pallas.recurrence import (
    load_raw_pieces,
    load_raw_rows,
    load_rows,
    pair_levels,
    round_state,
    store_pieces,
    widen,
)


def _norms(k_pool, lead, tokens, interpret: bool):
    """Inverse norms of the raw keys of a window, one a token, zero padded to a power of two: all at once, before the loop."""
    width, k_dim = k_pool.shape[-2:]
    levels, t = pair_levels(k_pool.dtype, k_dim), lax.broadcasted_iota(jnp.int32, (power_of_two(width), 1), 0)
    keys = load_raw_pieces(k_pool, lead, t, k_dim, levels, t < tokens)
    return inverse_norm(widen(keys, interpret), levels, interpret)


def _commit_kernel(slots_ref, lens_ref, k_pool, v_pool, decay_pool, beta_pool, _, state_ref, *, tile: Tile, interpret: bool):
    requests = slots_ref.shape[0]
    head, layer, r = program_id(1), lax.div(program_id(2), requests), lax.rem(program_id(2), requests)
    # a tile in parts of one row a lane: the compiler then takes few enough registers for four warps a scheduler
    sub = tile._replace(m=min(tile.m, 4 * tile.warps))
    first_row = [program_id(0) * tile.m + p for p in range(0, tile.m, sub.m)]
    rows = [at + lax.iota(jnp.int32, sub.m) for at in first_row]
    columns = [at + lax.broadcasted_iota(jnp.int32, (sub.m, 1), 0) for at in first_row]
    slot, tokens = request_tokens(slots_ref, lens_ref, r, state_ref.shape[1] - 1)
    key = lax.div(head, v_pool.shape[2] // k_pool.shape[2])

    @when(tokens > 0)
    def _():
        s = [
            widen(load_raw_pieces(state_ref, (layer, slot, head), column, tile.k, tile.levels), interpret) for column in columns
        ]
        norms = _norms(k_pool, (layer, slot, key), tokens, interpret)

        def advance(t, s):
            """State after record t, not rounded. Loaded ahead of its turn, a record would cost registers and a warp in four."""
            k = load_raw_rows(k_pool, (layer, slot, key, t), tile.m, tile.k, tile.levels, tile.warps)
            v = [load(v_pool.at[layer, slot, head, t, x]) for x in rows]
            if decay_pool.shape[-1] == 1:
                alpha = decay_pool[layer, slot, head, t, 0]
            else:
                alpha = load_rows(decay_pool, (layer, slot, head, t), tile.m, tile.k, tile.levels, tile.warps)
            beta = beta_pool[layer, slot, head, t]
            norm = jnp.sum(jnp.where(lax.iota(jnp.int32, norms.shape[0]) == t, norms, 0.0))
            k = [x * norm for x in widen(k, interpret)]
            return [next_state(part, (k, x, alpha, beta), sub) for part, x in zip(s, v, strict=True)]

        def body(t, s):
            return [round_state(part, state_ref.dtype, interpret) for part in advance(t, s)]

        s = advance(tokens - 1, lax.fori_loop(0, tokens - 1, body, s))  # the last state is rounded when it is stored
        for column, part in zip(columns, s, strict=True):
            store_pieces(state_ref, (layer, slot, head), column, part, tile.k, tile.levels, eviction_policy="evict_first")


def commit(state, k, v, decay, beta, slots, lengths, *, block_v: int = 8, num_warps: int = 1):
    """Advance state [layers, S, HV, V, K] of slots[r] by its first lengths[r] window records, all layers; 0 changes nothing.

    k [layers, S, KH, W, K], v [layers, S, HV, W, V] raw, decay [layers, S, HV, W, G], beta [layers, S, HV, W] fp32; slots,
    lengths [R] int32, lengths <= W. Donate the state. Returns it.
    """
    tile = tile_of(state, block_v, num_warps)
    layers, _, heads, v_dim, _ = state.shape
    return call(
        _commit_kernel,
        jax.ShapeDtypeStruct(state.shape, state.dtype),
        grid=(v_dim // tile.m, heads, layers * slots.shape[0]),
        name="ssm_commit",
        num_warps=num_warps,
        aliases={6: 0},
        tile=tile,
    )(slots, lengths, k, v, decay, beta, state)
