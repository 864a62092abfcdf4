"""Native and compact verify windows: outputs of W tokens from one state, with a snapshot per token or with records.

One program per (V block, value head, request), the V block fastest. A program owns its rows of the state: it reads them
once, walks the tokens of its window in registers and rounds the running state to its storage dtype after every token.
Everything that addresses depend on is loaded at once, before the first branch; the keys and values of token t+1 are loaded
before token t is computed (native) or when token t has used up its own (compact), which takes fewer registers.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas._compat import call, load, on_cpu, program_id, store, when
from kernels_pallas.gates import L2NORM_EPS, decay, power_of_two, sigmoid
from kernels_pallas.recurrence import (
    empty_rows,
    expand_rows,
    load_raw_pieces,
    load_raw_rows,
    load_rows,
    pair_levels,
    read,
    round_state,
    row_sums,
    step,
    store_pieces,
    to_fp32,
    widen,
)

SIZES = (16, 32, 64, 128, 256)


class Tile(NamedTuple):
    """Static shape of a program's work: block_v rows of K, `levels` pair levels, warps, and how sums are written."""

    m: int
    k: int
    levels: int
    warps: int
    interpret: bool


def load_vector(ref, lead, k: int):
    """ref[*lead, 0:k] as [k], in its own dtype."""
    return load(ref.at[(*lead, lax.iota(jnp.int32, k))])


def norm_of(x, tile: Tile):
    """Scalar inverse norm of a vector x [K], which has the dtype that it is stored in."""
    levels, x = pair_levels(x.dtype, tile.k), x.astype(jnp.float32)
    return lax.rsqrt(jnp.sum(row_sums((x * x)[None, :], levels, tile.interpret)) + L2NORM_EPS)


def _load_query(inputs, tok, head, tile: Tile):
    q_ref = inputs[0]
    q_head = lax.div(head, inputs[2].shape[1] // q_ref.shape[1])
    return load_rows(q_ref, (tok, q_head), tile.m, tile.k, tile.levels, tile.warps)


def _load_key(inputs, tok, head, rows, tile: Tile):
    """(k^ rows, v [M], decay, beta) of one token row, from prologue results.

    k^ and KDA's decay as `load_rows` gives them: a loop carries few registers, `expand_rows` makes tiles of them.
    """
    _, k_ref, v_ref, decay_ref, beta_ref = inputs
    k_head = lax.div(head, v_ref.shape[1] // k_ref.shape[1])
    k = load_rows(k_ref, (tok, k_head), tile.m, tile.k, tile.levels, tile.warps)
    if decay_ref.shape[-1] == 1:
        alpha = decay_ref[tok, head, 0]
    else:
        alpha = load_rows(decay_ref, (tok, head), tile.m, tile.k, tile.levels, tile.warps)
    return k, load(v_ref.at[tok, head, rows]), alpha, beta_ref[tok, head]


def _load_token(inputs, tok, head, rows, tile: Tile):
    """What one token row needs from memory, prologue results or raw inputs; of the latter `_token` makes its values."""
    if len(inputs) == 5:
        return *_load_key(inputs, tok, head, rows, tile), _load_query(inputs, tok, head, tile)
    q_ref, k_ref, v_ref, a_ref, b_ref, A_ref, dt_ref = inputs
    q_at, k_at = ((tok, lax.div(head, v_ref.shape[1] // ref.shape[1])) for ref in (q_ref, k_ref))
    k, q = (load_raw_rows(ref, at, tile.m, tile.k, tile.levels, tile.warps) for ref, at in ((k_ref, k_at), (q_ref, q_at)))
    v = load(v_ref.at[tok, head, rows])
    own = a_ref[tok, head], A_ref[head], dt_ref[head], load_vector(k_ref, k_at, tile.k), load_vector(q_ref, q_at, tile.k)
    return k, v, own, b_ref[tok, head], q


def _token(x, tile: Tile, scale: float):
    """(k^ rows, v, decay, beta, q^ rows) of a token row, from the raw inputs that `_load_token` gave."""
    k, v, (a, A, dt, k_row, q_row), b, q = x
    rk, rq = norm_of(k_row, tile), norm_of(q_row, tile)
    k, q = [x * rk for x in to_fp32(k)], [(x * rq) * scale for x in to_fp32(q)]
    a, A, dt, b = (x.astype(jnp.float32) for x in (a, A, dt, b))
    return k, v, decay(a, A, dt, None), sigmoid(b), q


def next_state(s, key, tile: Tile):
    """State pieces after one token (k^ rows, v, decay, beta), not rounded."""
    k, v, alpha, beta = key
    alpha = expand_rows(alpha, tile.m) if isinstance(alpha, list) else alpha
    return step(s, expand_rows(k, tile.m), v.astype(jnp.float32), alpha, beta, tile.levels, tile.interpret)[0]


def zero_rows(o_ref, cu_ref, head, r, rows):
    """Padding token rows are exactly zero: request row r clears rows total + r, total + r + R, .. of its head and V block."""
    requests = cu_ref.shape[0] - 1
    clear_rows(o_ref, cu_ref[requests] + r, requests, head, rows)


def clear_rows(o_ref, first, stride: int, head, rows):
    """Zero the rows first, first + stride, .. of outputs o [T, HV, V] in one head and V block."""

    def clear(i, _):
        store(o_ref.at[first + i * stride, head, rows], jnp.zeros(rows.shape, o_ref.dtype))

    lax.fori_loop(0, lax.div(jnp.maximum(o_ref.shape[0] - first, 0) + (stride - 1), stride), clear, None)


def request_tokens(slots_ref, lens_ref, r, live_slots: int):
    """(slot, tokens) of a request row; 0 tokens for padding and for ids that are not live."""
    slot = slots_ref[r]
    return slot, jnp.where((slot >= 0) & (slot < live_slots), lens_ref[r], 0)


def _native_kernel(layer_ref, slots_ref, offset_ref, lens_ref, cu_ref, *refs, width, scale, tile, interpret):
    *inputs, _, o_ref, state_ref = refs
    layer, head, r = layer_ref[0], program_id(1), program_id(2)
    rows = program_id(0) * tile.m + lax.iota(jnp.int32, tile.m)
    column = program_id(0) * tile.m + lax.broadcasted_iota(jnp.int32, (tile.m, 1), 0)
    slot, tokens = request_tokens(slots_ref, lens_ref, r, state_ref.shape[1] // width - 1)
    first, total, offset = cu_ref[r], cu_ref[cu_ref.shape[0] - 1], offset_ref[r]

    raw, fp32 = len(inputs) > 5, state_ref.dtype == jnp.float32
    known = (layer >= 0) & (first >= 0) & (offset >= 0)  # then a compiler waits for all of them once

    # which form each case takes is measured, here and below
    @when((tokens > 0) & known if fp32 or not raw else tokens > 0)
    def _():
        state = load_raw_pieces(state_ref, (layer, slot * width + offset, head), column, tile.k, tile.levels)

        def load_token(t):
            return _load_token(inputs, first + t, head, rows, tile)

        def advance(t, state, x):
            *key, q = x
            s = next_state(to_fp32(state), key, tile)
            o = read(s, expand_rows(q, tile.m), tile.levels, tile.interpret)
            state = [x.astype(state_ref.dtype) for x in s]
            store(o_ref.at[first + t, head, rows], o.astype(o_ref.dtype))
            at = (layer, slot * width + t, head)
            store_pieces(state_ref, at, column, state, tile.k, tile.levels, eviction_policy="evict_first")
            return state

        if raw and fp32:
            # A loop that runs once, since a compiler moves loads down to their first use but not past a loop: the state is on
            # its way while the token is loaded and its norms and gates are computed
            nothing = empty_rows(tile.m, tile.k, tile.levels, tile.warps)
            nothing = (nothing, jnp.zeros((tile.m,), o_ref.dtype), jnp.float32(0), jnp.float32(0), nothing)
            x = lax.fori_loop(0, tokens, lambda t, _: _token(load_token(t), tile, scale), nothing)
            advance(0, state, x)
        elif raw:
            advance(0, state, _token(load_token(0), tile, scale))
        elif width == 1 and not fp32:
            x = load_token(0)

            def one(t, _):  # in a loop for the same reason
                advance(t, state, x)

            lax.fori_loop(0, tokens, one, None)
        else:

            def body(t, carry):
                state, x = carry
                following = x if width == 1 else load_token(jnp.minimum(t + 1, tokens - 1))
                return advance(t, state, x), following

            lax.fori_loop(0, tokens, body, (state, load_token(0)))

    clear_rows(o_ref, total + r, cu_ref.shape[0] - 1, head, rows)


def _compact_kernel(layer_ref, slots_ref, lens_ref, cu_ref, *refs, width, tile, interpret):
    *inputs, k_raw, state_ref, _, _, _, _, o_ref, k_pool, v_pool, decay_pool, beta_pool = refs
    layer, block, head, r = layer_ref[0], program_id(0), program_id(1), program_id(2)
    rows = block * tile.m + lax.iota(jnp.int32, tile.m)
    column = block * tile.m + lax.broadcasted_iota(jnp.int32, (tile.m, 1), 0)
    slot, tokens = request_tokens(slots_ref, lens_ref, r, state_ref.shape[1] - 1)
    group = o_ref.shape[1] // k_raw.shape[1]
    first, total = cu_ref[r], cu_ref[cu_ref.shape[0] - 1]

    # all three are known before the branch, so that they are waited for once
    @when((tokens > 0) & (layer >= 0) & (first >= 0))
    def _():
        key, q = _load_key(inputs, first, head, rows, tile), _load_query(inputs, first, head, tile)
        stored = load_raw_pieces(state_ref, (layer, slot, head), column, tile.k, tile.levels)
        t = lax.iota(jnp.int32, power_of_two(width))
        token, used = t[:, None], (t < tokens)[:, None]
        # no load moves down past a store
        _copy(inputs[2].at[first + token, head, rows[None, :]], v_pool.at[layer, slot, head, token, rows[None, :]], used)

        def run(s, key, q):
            """State after one token, not rounded, and its output [M]."""
            s = next_state(s, key, tile)
            return s, read(s, expand_rows(q, tile.m), tile.levels, tile.interpret)

        def body(t, carry):
            s, o = run(*carry)
            store(o_ref.at[first + t, head, rows], o.astype(o_ref.dtype))
            key, q = _load_key(inputs, first + t + 1, head, rows, tile), _load_query(inputs, first + t + 1, head, tile)
            return round_state(s, state_ref.dtype, tile.interpret), key, q

        carry = lax.fori_loop(0, tokens - 1, body, (widen(stored, interpret), key, q))
        _, o = run(*carry)  # the last token's state is nobody's
        store(o_ref.at[first + tokens - 1, head, rows], o.astype(o_ref.dtype))

        def channels(n):
            return lax.broadcasted_iota(jnp.int32, (1, n), 1)

        @when(block == 0)
        def _():
            decay_ref, beta_ref = inputs[3:]
            gate = channels(decay_ref.shape[2])
            _copy(decay_ref.at[first + token, head, gate], decay_pool.at[layer, slot, head, token, gate], used)
            _copy(beta_ref.at[first + t, head], beta_pool.at[layer, slot, head, t], t < tokens)

        @when((block == 0) & (lax.rem(head, group) == 0))
        def _():
            key, k = lax.div(head, group), channels(tile.k)
            _copy(k_raw.at[first + token, key, k], k_pool.at[layer, slot, key, token, k], used)

    clear_rows(o_ref, total + r, cu_ref.shape[0] - 1, head, rows)


def _copy(source, target, mask):
    store(target, load(source, mask=mask, other=jnp.zeros((), source.dtype)), mask=mask)


def tile_of(state, block_v: int, num_warps: int) -> Tile:
    v_dim, k_dim = state.shape[-2:]
    for name, n in (("V", v_dim), ("K", k_dim)):
        if n not in SIZES:
            raise ValueError(f"{name}={n} is not allowed: the kernels take head sizes {SIZES}")
    levels = pair_levels(state.dtype, k_dim)
    return Tile(min(block_v, v_dim), k_dim, levels, num_warps, on_cpu())


def _scalar_row(row):
    return jnp.asarray(row, jnp.int32).reshape(1)


def native(
    state, row, slots, offset, verify_len, cu, inputs, *, width: int, scale: float, block_v: int = 8, num_warps: int = 1
):
    """Verify windows in mode "native".

    state [layers, S * W, HV, V, K], donated; slots, offset, verify_len [R], cu [R+1] int32; inputs: (q^, k^, v, decay,
    beta) of the prologue, or raw (q, k, v, a, b, A_log, dt_bias) of a GDN layer, whose prologue then runs inside.
    Request r starts from row slots[r] * W + offset[r] and writes rows slots[r] * W + t for t < verify_len[r]. Returns
    o [T, HV, V] in v's dtype, zero in padding rows, and the state.
    """
    tile, v = tile_of(state, block_v, num_warps), inputs[2]
    operands = (_scalar_row(row), slots, offset, verify_len, cu, *inputs, state)
    return call(
        _native_kernel,
        [jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(state.shape, state.dtype)],
        grid=(v.shape[2] // tile.m, v.shape[1], slots.shape[0]),
        name=f"ssm_native_w{width}",
        num_warps=num_warps,
        aliases={len(operands) - 1: 1},
        width=width,
        scale=scale,
        tile=tile,
    )(*operands)


def compact(state, window, row, slots, verify_len, cu, inputs, k_raw, *, width: int, block_v: int = 8, num_warps: int = 1):
    """Verify windows in mode "compact": the state is read, the raw inputs of the window are recorded.

    state [layers, S, HV, V, K]; window: pools (k [layers, S, KH, W, K], v [layers, S, HV, W, V], decay [.., HV, W, G],
    beta [.., HV, W]), donated; inputs (q^, k^, v, decay, beta) of the prologue, k_raw [T, KH, K]. Returns o [T, HV, V] and
    the pools, in which records t < verify_len[r] of live requests are written.
    """
    tile, v = tile_of(state, block_v, num_warps), inputs[2]
    operands = (_scalar_row(row), slots, verify_len, cu, *inputs, k_raw, state, *window)
    first = len(operands) - len(window)
    o, *window = call(
        _compact_kernel,
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (v, *window)],
        grid=(v.shape[2] // tile.m, v.shape[1], slots.shape[0]),
        name=f"ssm_compact_w{width}",
        num_warps=num_warps,
        aliases={first + i: 1 + i for i in range(len(window))},
        width=width,
        tile=tile,
    )(*operands)
    return o, tuple(window)
