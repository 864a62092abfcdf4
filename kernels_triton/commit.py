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
    load_pieces,
    load_raw_rows,
    pair_levels,
    round_state,
    step,
    store_pieces,
    times,
    to_fp32,
)


@triton.jit
def _norms(k_ptr, tokens, K: tl.constexpr, W2: tl.constexpr, LEVELS: tl.constexpr):
    """Inverse norms of the raw keys of a window, one a token, zero padded to a power of two: all at once, before the loop."""
    t = tl.arange(0, W2)[:, None]
    return inverse_norm(load_pieces(k_ptr, t, K, t < tokens, 0.0, K, LEVELS), LEVELS)


@triton.jit
def _load_record(
    k_ptr, v_ptr, decay_ptr, beta_ptr, rows, t,
    K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, M: tl.constexpr, LEVELS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """(raw k rows, v [M], decay, beta) of record t; the pointers stand at record 0."""
    k, v = load_raw_rows(k_ptr + t * K, M, K, LEVELS, WARPS), tl.load(v_ptr + t * V + rows)
    return k, v, load_gate(decay_ptr + t * G, M, K, G, LEVELS, WARPS), tl.load(beta_ptr + t)


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
        s = load_pieces(state_at, column, K, None, 0.0, K, LEVELS)
        norms = _norms(k_at, tokens, K, W2, KEY_LEVELS)
        # a record is loaded two steps before its turn
        x = _load_record(k_at, v_at, decay_at, beta_at, rows, 0, K, V, G, M, LEVELS, WARPS)
        y = _load_record(k_at, v_at, decay_at, beta_at, rows, tl.minimum(1, tokens - 1), K, V, G, M, LEVELS, WARPS)
        for t in range(tokens):
            at = tl.minimum(t + 2, tokens - 1)
            z = _load_record(k_at, v_at, decay_at, beta_at, rows, at, K, V, G, M, LEVELS, WARPS)
            norm = tl.sum(tl.where(tl.arange(0, W2) == t, norms, 0.0), axis=0)
            k_hat = expand_rows(times(to_fp32(x[0]), (norm,)), M)
            s, _ = step(s, k_hat, x[1].to(tl.float32), expand_gate(x[2], M, G), x[3], LEVELS)
            s = round_state(s, state_ptr.dtype.element_ty)
            x = y
            y = z
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
