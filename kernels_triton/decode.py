"""Native and compact verify windows: outputs of W tokens from one state, with a snapshot per token or with records.

One program per (V block, value head, request), the V block fastest. A program owns its rows of the state: it reads them
once, walks the tokens of its window in registers and rounds the running state to its storage dtype after every token.
Everything that addresses depend on is loaded at once, before the first branch; the keys and values of token t+1 are loaded
before token t is computed (native) or when token t has used up its own (compact), which takes fewer registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels_triton.gates import L2NORM_EPS, decay, sigmoid
from kernels_triton.launch import launch, layer_row
from kernels_triton.recurrence import (
    cast,
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
    times,
    to_fp32,
    widen,
)

SIZES = (16, 32, 64, 128, 256)


@triton.jit
def norm_of(x, LEVELS: tl.constexpr):
    """Scalar inverse norm of a vector x [K]; LEVELS by the dtype that it is stored in."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(row_sums((x * x)[None, :], LEVELS), axis=0) + L2NORM_EPS)


@triton.jit
def load_gate(ptr, M: tl.constexpr, K: tl.constexpr, G: tl.constexpr, LEVELS: tl.constexpr, WARPS: tl.constexpr):
    """Decay of one token and head: a tuple of one scalar (G = 1) or of rows."""
    if G == 1:
        return (tl.load(ptr),)
    else:
        return load_rows(ptr, M, K, LEVELS, WARPS)


@triton.jit
def expand_gate(alpha, M: tl.constexpr, G: tl.constexpr):
    """What `load_gate` gave, for `step`: the scalar, or tiles [M, ..]."""
    if G == 1:
        return alpha
    else:
        return expand_rows(alpha, M)


@triton.jit
def _load_token(
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, A_ptr, dt_ptr, tok, head, rows,
    H: tl.constexpr, KH: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr,
    M: tl.constexpr, LEVELS: tl.constexpr, WARPS: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """What one token row needs from memory, prologue results or raw inputs (`native`); `_token` makes its values of it.

    Keys, queries and KDA's decay as `load_rows` gives them: a loop carries few registers, `expand_rows` makes tiles of them.
    """
    q_at, k_at = q_ptr + (tok * H + head // (HV // H)) * K, k_ptr + (tok * KH + head // (HV // KH)) * K
    k = load_raw_rows(k_at, M, K, LEVELS, WARPS)
    q = load_raw_rows(q_at, M, K, LEVELS, WARPS)
    v = tl.load(v_ptr + (tok * HV + head) * V + rows)
    gate = tok * HV + head
    if RAW:
        lane = tl.arange(0, K)
        own = tl.load(decay_ptr + gate), tl.load(A_ptr + head), tl.load(dt_ptr + head), tl.load(beta_ptr + gate)
        alpha, beta = own[:3] + (tl.load(k_at + lane), tl.load(q_at + lane)), own[3]
    else:
        alpha, beta = load_gate(decay_ptr + gate * G, M, K, G, LEVELS, WARPS), tl.load(beta_ptr + gate)
    return k, q, v, alpha, beta


@triton.jit
def _load_key(
    k_ptr, v_ptr, decay_ptr, beta_ptr, t, rows,
    KH: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr,
    M: tl.constexpr, LEVELS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """(k^ rows, v [M], decay, beta) of the token row t after those that the pointers stand at."""
    k, v = load_rows(k_ptr + t * (KH * K), M, K, LEVELS, WARPS), tl.load(v_ptr + t * (HV * V) + rows)
    return k, v, load_gate(decay_ptr + t * (HV * G), M, K, G, LEVELS, WARPS), tl.load(beta_ptr + t * HV)


@triton.jit
def _token(x, K: tl.constexpr, G: tl.constexpr, KEY_LEVELS: tl.constexpr, RAW: tl.constexpr, SCALE: tl.constexpr):
    """(k^ rows, q^ rows, v [M], decay, beta) of a token row, from what `_load_token` gave."""
    k, q, v, alpha, beta = to_fp32(x[0]), to_fp32(x[1]), x[2].to(tl.float32), x[3], x[4]
    if RAW:
        a, A, dt, k_row, q_row = alpha
        k = times(k, (norm_of(k_row, KEY_LEVELS),))
        q = times(times(q, (norm_of(q_row, KEY_LEVELS),)), (SCALE,))
        alpha, beta = (decay(a.to(tl.float32), A.to(tl.float32), dt.to(tl.float32), None),), sigmoid(beta.to(tl.float32))
    return k, q, v, alpha, beta


@triton.jit
def zero_rows(o_ptr, cu_ptr, head, r, rows, R, T, HV: tl.constexpr, V: tl.constexpr):
    """Padding token rows are exactly zero: request row r clears rows total + r, total + r + R, .. of its head and V block."""
    clear_rows(o_ptr, tl.load(cu_ptr + R).to(tl.int64) + r, R, head, rows, T, HV, V)


@triton.jit
def clear_rows(o_ptr, first, stride, head, rows, T, HV: tl.constexpr, V: tl.constexpr):
    """Zero the rows first, first + stride, .. of outputs o [T, HV, V] in one head and V block."""
    for row in range(first, T, stride):
        tl.store(o_ptr + (row * HV + head) * V + rows, tl.zeros(rows.shape, o_ptr.dtype.element_ty))


@triton.jit
def request_tokens(slots_ptr, lens_ptr, r, live_slots):
    """(slot, tokens) of a request row; 0 tokens for padding and for ids that are not live."""
    slot = tl.load(slots_ptr + r).to(tl.int64)
    return slot, tl.where((slot >= 0) & (slot < live_slots), tl.load(lens_ptr + r), 0)


@triton.jit(do_not_specialize=["layer", "S", "R", "T"])
def _native_kernel(
    slots_ptr, offset_ptr, lens_ptr, cu_ptr, q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, A_ptr, dt_ptr, state_ptr,
    layer, o_ptr, S, R, T, W: tl.constexpr,
    H: tl.constexpr, KH: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr,
    M: tl.constexpr, LEVELS: tl.constexpr, KEY_LEVELS: tl.constexpr, WARPS: tl.constexpr,
    RAW: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    block, head, r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = block * M + tl.arange(0, M)
    column = rows[:, None]
    layer = layer_row(layer)
    slot, tokens = request_tokens(slots_ptr, lens_ptr, r, S - 1)
    first, total = tl.load(cu_ptr + r).to(tl.int64), tl.load(cu_ptr + R).to(tl.int64)
    offset = tl.load(offset_ptr + r)
    if (tokens > 0) & (layer >= 0) & (first >= 0) & (offset >= 0):  # all known: a compiler then waits for them once
        base = layer * S * W + slot * W
        state = load_raw_pieces(state_ptr + ((base + offset) * HV + head) * (V * K), column, K, None, 0.0, K, LEVELS)
        STAGED: tl.constexpr = RAW and state_ptr.dtype.element_ty == tl.float32  # as measured; likewise what is carried below
        if STAGED:
            # A loop that runs once, since a compiler moves loads down to their first use but not past a loop: the state is on
            # its way while the token is loaded and its norms and gates are computed
            row, zero = empty_rows(M, K, LEVELS, WARPS), tl.zeros([], tl.float32)
            x = row, row, tl.zeros([M], tl.float32), (zero,), zero
            for t in range(tokens):
                following = _load_token(
                    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, A_ptr, dt_ptr, first + t, head, rows,
                    H, KH, HV, K, V, G, M, LEVELS, WARPS, RAW,
                )  # fmt: skip
                x = _token(following, K, G, KEY_LEVELS, RAW, SCALE)
        else:
            following = _load_token(
                q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, A_ptr, dt_ptr, first, head, rows,
                H, KH, HV, K, V, G, M, LEVELS, WARPS, RAW,
            )  # fmt: skip
        for t in range(1 if RAW else tokens):
            if not STAGED:
                x = _token(following, K, G, KEY_LEVELS, RAW, SCALE)
            if W > 1:
                following = _load_token(
                    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, A_ptr, dt_ptr, first + tl.minimum(t + 1, tokens - 1), head, rows,
                    H, KH, HV, K, V, G, M, LEVELS, WARPS, RAW,
                )  # fmt: skip
            k, q, v, alpha, beta = x
            s, _ = step(to_fp32(state), expand_rows(k, M), v, expand_gate(alpha, M, G), beta, LEVELS)
            o = read(s, expand_rows(q, M), LEVELS)
            rounded = cast(s, state_ptr.dtype.element_ty)
            tl.store(o_ptr + ((first + t) * HV + head) * V + rows, o.to(o_ptr.dtype.element_ty))
            at = state_ptr + ((base + t) * HV + head) * (V * K)
            store_pieces(at, column, K, rounded, None, K, LEVELS, "evict_first")
            if W > 1 or (not RAW and state_ptr.dtype.element_ty == tl.float32):
                state = rounded
    clear_rows(o_ptr, total + r, R, head, rows, T, HV, V)


@triton.jit
def _verify_token(s, key, q, G: tl.constexpr, M: tl.constexpr, LEVELS: tl.constexpr):
    """State after one token, not rounded, and its output [M]."""
    k, v, alpha, beta = key
    s, _ = step(s, expand_rows(k, M), v.to(tl.float32), expand_gate(alpha, M, G), beta, LEVELS)
    return s, read(s, expand_rows(q, M), LEVELS)


@triton.jit(do_not_specialize=["layer", "S", "R", "T"])
def _compact_kernel(
    slots_ptr, lens_ptr, cu_ptr, q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, k_raw_ptr, state_ptr,
    k_pool, v_pool, decay_pool, beta_pool, layer, o_ptr, S, R, T, W: tl.constexpr, W2: tl.constexpr,
    H: tl.constexpr, KH: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr,
    M: tl.constexpr, LEVELS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    block, head, r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = block * M + tl.arange(0, M)
    column = rows[:, None]
    layer = layer_row(layer)
    slot, tokens = request_tokens(slots_ptr, lens_ptr, r, S - 1)
    first, total = tl.load(cu_ptr + r).to(tl.int64), tl.load(cu_ptr + R).to(tl.int64)
    if (tokens > 0) & (layer >= 0) & (first >= 0):  # all known: a compiler then waits for them once
        slot += layer * S
        record = (slot * HV + head) * W  # of token 0 in the pools per value head
        # all of token 0, whose row is `first`; a token on is a constant number of elements on
        q_at, k_at = q_ptr + (first * H + head // (HV // H)) * K, k_ptr + (first * KH + head // (HV // KH)) * K
        gate = first * HV + head
        v_at, o_at, decay_at, beta_at = v_ptr + gate * V, o_ptr + gate * V, decay_ptr + gate * G, beta_ptr + gate
        key = _load_key(k_at, v_at, decay_at, beta_at, 0, rows, KH, HV, K, V, G, M, LEVELS, WARPS)
        q = load_rows(q_at, M, K, LEVELS, WARPS)
        stored = load_raw_pieces(state_ptr + (slot * HV + head) * (V * K), column, K, None, 0.0, K, LEVELS)
        i = tl.arange(0, W2)[:, None]
        v = tl.load(v_at + i * (HV * V) + rows[None, :], mask=i < tokens, other=0.0)
        tl.store(v_pool + (record + i) * V + rows[None, :], v, mask=i < tokens)  # no load moves down past a store
        s = widen(stored)
        for t in range(tokens - 1):
            s, o = _verify_token(s, key, q, G, M, LEVELS)
            tl.store(o_at + t * (HV * V) + rows, o.to(o_ptr.dtype.element_ty))
            key = _load_key(k_at, v_at, decay_at, beta_at, t + 1, rows, KH, HV, K, V, G, M, LEVELS, WARPS)
            q = load_rows(q_at + (t + 1) * (H * K), M, K, LEVELS, WARPS)
            s = round_state(s, state_ptr.dtype.element_ty)
        _, o = _verify_token(s, key, q, G, M, LEVELS)  # the last token's state is nobody's
        tl.store(o_at + (tokens - 1) * (HV * V) + rows, o.to(o_ptr.dtype.element_ty))
        t = tl.arange(0, W2)
        token, used = first + t, t < tokens
        if block == 0:
            channel = tl.arange(0, G)[None, :]
            alpha = tl.load(decay_ptr + (token * HV + head)[:, None] * G + channel, mask=used[:, None], other=0.0)
            tl.store(decay_pool + (record + t)[:, None] * G + channel, alpha, mask=used[:, None])
            beta = tl.load(beta_ptr + token * HV + head, mask=used, other=0.0)
            tl.store(beta_pool + record + t, beta, mask=used)
            if head % (HV // KH) == 0:
                k_head, k = head // (HV // KH), tl.arange(0, K)[None, :]
                raw = tl.load(k_raw_ptr + (token * KH + k_head)[:, None] * K + k, mask=used[:, None], other=0.0)
                tl.store(k_pool + ((slot * KH + k_head) * W + t)[:, None] * K + k, raw, mask=used[:, None])
    clear_rows(o_ptr, total + r, R, head, rows, T, HV, V)


def registers(m: int, k_dim: int, num_warps: int) -> int | None:
    """Limit on the registers of a thread for kernels that compute on a tile for several tokens: 128, with which 16 warps fit a
    multiprocessor, while the tile leaves room for it."""
    return 128 if m * k_dim <= 2048 * num_warps else None


def check_sizes(state: torch.Tensor) -> None:
    """ValueError unless head sizes K and V are among the supported ones."""
    for name, n in zip("VK", state.shape[-2:], strict=True):
        if n not in SIZES:
            raise ValueError(f"{name}={n} is not allowed: the kernels take head sizes {SIZES}")


def native(
    state, row, slots, offset, verify_len, cu, inputs, *, width: int, scale: float, block_v: int = 8, num_warps: int = 1
):
    """Verify windows in mode "native".

    state [layers, S * W, HV, V, K], changed in place; slots, offset, verify_len [R], cu [R+1] int32; inputs: (q^, k^, v,
    decay, beta) of the prologue, or raw (q, k, v, a, b, A_log, dt_bias) of a GDN layer, whose prologue then runs inside;
    all contiguous. Request r starts from row slots[r] * W + offset[r] and writes rows slots[r] * W + t for
    t < verify_len[r]. Returns o [T, HV, V] in v's dtype, zero in padding rows.
    """
    check_sizes(state)
    q, k, v, decays, betas = inputs[:5]
    A_log, dt_bias = inputs[5:] if len(inputs) == 7 else (decays, decays)
    heads, v_dim, k_dim = state.shape[2:]
    m, o, r = min(block_v, v_dim), torch.empty_like(v), slots.shape[0]
    if r:
        launch(
            _native_kernel, (v_dim // m, heads, r),
            slots, offset, verify_len, cu, q, k, v, decays, betas, A_log, dt_bias, state, row, o,
            state.shape[1] // width, r, v.shape[0], width,
            q.shape[1], k.shape[1], heads, k_dim, v_dim, decays.numel() // (v.shape[0] * heads),
            m, pair_levels(state.dtype, k_dim), pair_levels(k.dtype, k_dim), num_warps, len(inputs) == 7, scale,
            num_warps=num_warps,
        )  # fmt: skip
    return o


def compact(state, window, row, slots, verify_len, cu, inputs, k_raw, *, width: int, block_v: int = 8, num_warps: int = 1):
    """Verify windows in mode "compact": the state is read, the raw inputs of the window are recorded.

    state [layers, S, HV, V, K]; window: pools (k [layers, S, KH, W, K], v [layers, S, HV, W, V], decay [.., HV, W, G],
    beta [.., HV, W]), changed in place; inputs (q^, k^, v, decay, beta) of the prologue, k_raw [T, KH, K]; all contiguous.
    Returns o [T, HV, V]; records t < verify_len[r] of live requests are written.
    """
    check_sizes(state)
    q, k, v, decays, betas = inputs
    _, slots_total, heads, v_dim, k_dim = state.shape
    m, o, r = min(block_v, v_dim), torch.empty_like(v), slots.shape[0]
    fits = decays.shape[-1] == 1  # with decays as vectors registers would spill
    if r:
        launch(
            _compact_kernel, (v_dim // m, heads, r),
            slots, verify_len, cu, q, k, v, decays, betas, k_raw, state, *window, row, o,
            slots_total, r, v.shape[0], width, triton.next_power_of_2(width),
            q.shape[1], k.shape[1], heads, k_dim, v_dim, decays.shape[-1], m, pair_levels(state.dtype, k_dim), num_warps,
            num_warps=num_warps, registers=registers(m, k_dim, num_warps) if fits else None,
        )  # fmt: skip
    return o
