"""Commit of mode "compact": re-run the accepted prefix of every request in every layer, rounding after each token.

One program per (V block, value head, layer x request). k^ is recomputed from the raw record by the norm of gates.py, so
the state advances exactly as native decode of the same tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels_triton.decode import check_sizes, expand_gate, load_gate, registers, request_tokens
from kernels_triton.gates import inverse_norm
from kernels_triton.launch import launch
from kernels_triton.recurrence import (
    expand_rows,
    load_raw_pieces,
    load_raw_rows,
    pair_levels,
    round_state,
    step,
    store_pieces,
    times,
    widen,
)


@triton.jit
def _norms(k_ptr, tokens, K: tl.constexpr, W2: tl.constexpr, LEVELS: tl.constexpr):
    """Inverse norms of the raw keys of a window, one a token, zero padded to a power of two: all at once, before the loop."""
    t = tl.arange(0, W2)[:, None]
    return inverse_norm(widen(load_raw_pieces(k_ptr, t, K, t < tokens, 0.0, K, LEVELS)), LEVELS)


@triton.jit
def _load_record(
    k_ptr, v_ptr, decay_ptr, beta_ptr, rows, t,
    K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, M: tl.constexpr, LEVELS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """(raw k rows, v [M], decay, beta) of record t; the pointers stand at record 0."""
    k, v = load_raw_rows(k_ptr + t * K, M, K, LEVELS, WARPS), tl.load(v_ptr + t * V + rows)
    return k, v, load_gate(decay_ptr + t * G, M, K, G, LEVELS, WARPS), tl.load(beta_ptr + t)


@triton.jit
def _next_state(s, record, norms, t, G: tl.constexpr, M: tl.constexpr, LEVELS: tl.constexpr):
    """State after record t, not rounded."""
    k, v, alpha, beta = record
    norm = tl.sum(tl.where(tl.arange(0, norms.shape[0]) == t, norms, 0.0), axis=0)
    k_hat = expand_rows(times(widen(k), (norm,)), M)
    return step(s, k_hat, v.to(tl.float32), expand_gate(alpha, M, G), beta, LEVELS)[0]


@triton.jit(do_not_specialize=["S", "R"])
def _commit_kernel(
    slots_ptr, lens_ptr, k_pool, v_pool, decay_pool, beta_pool, state_ptr, S, R,
    KH: tl.constexpr, HV: tl.constexpr, W: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, M: tl.constexpr,
    LEVELS: tl.constexpr, KEY_LEVELS: tl.constexpr, WARPS: tl.constexpr, W2: tl.constexpr,
):  # fmt: skip
    head, layer, r = tl.program_id(1), tl.program_id(2) // R, tl.program_id(2) % R
    rows = tl.program_id(0) * M + tl.arange(0, M)
    column = rows[:, None]
    slot, tokens = request_tokens(slots_ptr, lens_ptr, r, S - 1)
    if tokens > 0:
        slot += layer.to(tl.int64) * S
        state_at = state_ptr + (slot * HV + head) * (V * K)
        record, key = (slot * HV + head) * W, (slot * KH + head // (HV // KH)) * W
        k_at, v_at, decay_at, beta_at = k_pool + key * K, v_pool + record * V, decay_pool + record * G, beta_pool + record
        s = widen(load_raw_pieces(state_at, column, K, None, 0.0, K, LEVELS))
        norms = _norms(k_at, tokens, K, W2, KEY_LEVELS)
        x = _load_record(k_at, v_at, decay_at, beta_at, rows, 0, K, V, G, M, LEVELS, WARPS)
        once = (tokens + W - 1) // W  # 1, which no compiler knows
        for t in range(tokens - 1):
            y = _load_record(k_at, v_at, decay_at, beta_at, rows, t + 1, K, V, G, M, LEVELS, WARPS)
            for _ in range(once):  # the next record is on its way: a compiler moves loads down, but not past a loop
                s = round_state(_next_state(s, x, norms, t, G, M, LEVELS), state_ptr.dtype.element_ty)
            x = y
        s = _next_state(s, x, norms, tokens - 1, G, M, LEVELS)
        store_pieces(state_at, column, K, s, None, K, LEVELS, "evict_first")


def commit(state, k, v, decay, beta, slots, lengths, *, block_v: int = 8, num_warps: int = 1):
    """Advance state [layers, S, HV, V, K] of slots[r] by its first lengths[r] window records, all layers; 0 changes nothing.

    k [layers, S, KH, W, K], v [layers, S, HV, W, V] raw, decay [layers, S, HV, W, G], beta [layers, S, HV, W] fp32; slots,
    lengths [R] int32, lengths <= W; all contiguous. The state is changed in place and returned.
    """
    check_sizes(state)
    layers, slots_total, heads, v_dim, k_dim = state.shape
    m, r = min(block_v, v_dim), slots.shape[0]
    if r:
        launch(
            _commit_kernel, (v_dim // m, heads, layers * r),
            slots, lengths, k, v, decay, beta, state, slots_total, r,
            k.shape[2], heads, k.shape[3], k_dim, v_dim, decay.shape[-1], m,
            pair_levels(state.dtype, k_dim), pair_levels(k.dtype, k_dim), num_warps, triton.next_power_of_2(k.shape[3]),
            num_warps=num_warps, registers=registers(m, k_dim, num_warps),
        )  # fmt: skip
    return state
