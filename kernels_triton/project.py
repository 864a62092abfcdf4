"""Replay's forward of one layer: window coefficients (pre-kernel), then outputs and records from the checkpoint.

The order of every operation is that of torch_ref/executors/replay.py; step numbers below refer to its docstring. Two
launches: `coefficients`, one program per (request, key head, block of records) or, with KDA or one token, per (request,
head), and `outputs`, one program per (V block, value head, request). The state is read once and not written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels_triton.channels import (
    SHORT,
    channels,
    decayed,
    history,
    load_window,
    one_token,
    store_products,
    store_token_products,
    store_window,
    sums,
    window,
)
from kernels_triton.decode import registers, request_tokens, zero_rows
from kernels_triton.gates import decay, inverse_norm, sigmoid
from kernels_triton.launch import launch, layer_row
from kernels_triton.materialize import tile_of
from kernels_triton.recurrence import (
    LANES,
    expand_rows,
    finish,
    lane_sums,
    load_pieces,
    load_raw_pieces,
    load_raw_rows,
    load_row_pieces,
    load_rows,
    pair_levels,
    read,
    store_pieces,
    times,
    to_fp32,
)

RECORD_LEVELS = tl.constexpr(2)
ROWS = tl.constexpr(8)  # records of one tile of a pre-kernel
LONE = 16  # history up to which one program does GDN's for one token
PLACE = tl.constexpr(4)  # numbers of `_place`
UNROLL = tl.constexpr(8)  # windows up to this width are unrolled
AHEAD = tl.constexpr(2)  # rows of x and c that are in flight


@triton.jit
def _place(slots_ptr, lens_ptr, cu_ptr, cursor_ptr, r, S):
    """(slot, tokens, first token row, cursor) of request row r: what addresses need; 0 tokens where it is not live."""
    slot, tokens = request_tokens(slots_ptr, lens_ptr, r, S - 1)
    first = tl.load(cu_ptr + r).to(tl.int64)
    return slot, tokens, first, tl.load(cursor_ptr + slot, mask=tokens > 0, other=0)


@triton.jit
def _put_place(place_ptr, slot, tokens, first, cursor):
    """Leave `_place` for the main kernel, which then waits for memory once less."""
    tl.store(place_ptr, slot)
    tl.store(place_ptr + 1, tokens)
    tl.store(place_ptr + 2, first)
    tl.store(place_ptr + 3, cursor)


@triton.jit
def live_half(cursor_ptr, slot, L: tl.constexpr):
    """(n, first record) of the live half of a slot."""
    return _half(tl.load(cursor_ptr + slot), L)


@triton.jit
def _half(cursor, L: tl.constexpr):
    """(n, first record) of the live half that a cursor points to."""
    return cursor % (2 * L), cursor // (2 * L) * L


# ------------------------------------------------------------------------------------------------------- pre-kernels


@triton.jit
def normalise(pieces, LEVELS: tl.constexpr):
    return times(pieces, (inverse_norm(pieces, LEVELS)[:, None],))


@triton.jit
def _where(condition, a, b):
    """Tuples of pieces: `a` where the condition [M, 1] holds, else `b`."""
    out = ()
    for i in tl.static_range(len(a)):
        out = out + (tl.where(condition, a[i], b[i]),)
    return out


@triton.jit
def _window_keys(old_ptr, new_ptr, j, n, tokens, KH: tl.constexpr, K: tl.constexpr, LEVELS: tl.constexpr):
    """Raw keys of rows j [M, 1]: record j of the live half below n, window token j - n at n and above; else zero."""
    old = load_pieces(old_ptr, j, K, j < n, 0.0, K, LEVELS)
    new = load_pieces(new_ptr, j - n, KH * K, (j >= n) & (j < n + tokens), 0.0, K, LEVELS)
    return _where(j < n, old, new)


@triton.jit
def load_gates(a_ptr, b_ptr, A_ptr, dt_ptr, row, v_head, mask, HV: tl.constexpr, RAW: tl.constexpr):
    """What `make_gates` makes decay and beta of: value heads v_head [N, 1] in token rows `row` [1, W]."""
    at = row * HV + v_head
    if RAW:
        a, b = tl.load(a_ptr + at, mask=mask, other=0.0), tl.load(b_ptr + at, mask=mask, other=0.0)
        A_log = tl.load(A_ptr + v_head + row * 0, mask=mask, other=0.0)
        return a, b, A_log, tl.load(dt_ptr + v_head + row * 0, mask=mask, other=0.0)
    else:
        return tl.load(a_ptr + at, mask=mask, other=1.0), tl.load(b_ptr + at, mask=mask, other=0.0)


@triton.jit
def make_gates(x, mask, RAW: tl.constexpr):
    """decay and beta, loaded or computed from raw logits; decay is 1 and beta 0 where `mask` is false."""
    if RAW:
        a, b, A_log, dt_bias = to_fp32(x)
        return tl.where(mask, decay(a, A_log, dt_bias, None), 1.0), tl.where(mask, sigmoid(b), 0.0)
    else:
        return x


@triton.jit
def _column(x, t):
    """Column t of x [N, W] as [N, 1]; the other columns may be NaN."""
    return tl.sum(tl.where(tl.arange(0, x.shape[1])[None, :] == t, x, 0.0), axis=1)[:, None]


@triton.jit
def _gdn_token(
    t, passed, keys, norms, a, q_ptr, k_ptr, coef_ptr, tokens, n, v_head, later, inside, M: tl.constexpr, W: tl.constexpr,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, L: tl.constexpr, LEVELS: tl.constexpr, WARPS: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    """Coefficients of token t; returns the decay products up to t."""
    passed = passed * tl.where(later < n + t, _column(a, t), 1.0)
    row, out = tl.minimum(t, tokens - 1), coef_ptr + (v_head * (2 * W) + 2 * t) * L + later
    x = load_row_pieces(k_ptr + row * (KH * K), M, K, LEVELS, WARPS)
    gram = (read(keys, x, LEVELS) * norms) * inverse_norm(x, LEVELS)
    tl.store(out, passed * gram[None, :], mask=inside)
    x = load_row_pieces(q_ptr + row * (H * K), M, K, LEVELS, WARPS)
    gram = ((read(keys, x, LEVELS) * norms) * inverse_norm(x, LEVELS)) * SCALE
    tl.store(out + L, passed * gram[None, :], mask=inside)
    return passed


@triton.jit(do_not_specialize=["layer"])
def _gdn_kernel(
    slots_ptr, lens_ptr, cu_ptr, cursor_ptr, q_ptr, k_ptr, a_ptr, b_ptr, A_ptr, dt_ptr, k_pool, decay_pool, beta_pool,
    layer, x_ptr, coef_ptr, scalar_ptr, place_ptr, S, W: tl.constexpr, W2: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr,
    KH: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, L: tl.constexpr, M: tl.constexpr, MEMBERS: tl.constexpr,
    LEVELS: tl.constexpr, WARPS: tl.constexpr, RAW: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Steps 1 and 2 of GDN for M records of one request and key head: c_jt; one more block does k^, q^, P(0->t) and the
    records."""
    block, head, r = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    BLOCKS: tl.constexpr = L // M
    layer = layer_row(layer)
    slot, tokens, first, cursor = _place(slots_ptr, lens_ptr, cu_ptr, cursor_ptr, r, S)
    n, base = _half(cursor, L)
    if tokens > 0:
        row, key_head, GROUP = layer * S + slot, head // (HEADS // KH), HV // HEADS
        key_at = k_pool + ((row * KH + key_head) * (2 * L) + base) * K
        q_ptr, k_ptr = q_ptr + (first * H + head // (HEADS // H)) * K, k_ptr + (first * KH + key_head) * K
        token = tl.arange(0, W2)[None, :]
        members = tl.arange(0, MEMBERS)[:, None]
        inside, v_head = members < GROUP, head * GROUP + members
        decay_at, beta_at = decay_pool + row * (HV * 2 * L) + base, beta_pool + row * (HV * 2 * L) + base
        if (block < BLOCKS) & (block * M < n + tokens):
            j, later = block * M + tl.arange(0, M)[:, None], block * M + tl.arange(0, M)[None, :]
            keys = _window_keys(key_at, k_ptr, j, n, tokens, KH, K, LEVELS)
            real = inside & (token < tokens)
            a, _ = make_gates(load_gates(a_ptr, b_ptr, A_ptr, dt_ptr, first + token, v_head, real, HV, RAW), real, RAW)
            norms = inverse_norm(keys, LEVELS)
            passed = tl.full([MEMBERS, M], 1.0, tl.float32)  # P(j->t); dead records and missing tokens decay by 1
            for i in tl.static_range(1, L):
                at = decay_at + v_head * (2 * L) + i + tl.zeros([1, M], tl.int32)
                passed = passed * tl.load(at, mask=inside & (later < i) & (i < n), other=1.0)
            coef_ptr += r * (HV * 2 * W * L)
            if W <= UNROLL:
                for t in tl.static_range(W):
                    passed = _gdn_token(
                        t, passed, keys, norms, a, q_ptr, k_ptr, coef_ptr, tokens, n, v_head, later, inside,
                        M, W, H, KH, K, L, LEVELS, WARPS, SCALE,
                    )  # fmt: skip
            else:
                for t in range(W):
                    passed = _gdn_token(
                        t, passed, keys, norms, a, q_ptr, k_ptr, coef_ptr, tokens, n, v_head, later, inside,
                        M, W, H, KH, K, L, LEVELS, WARPS, SCALE,
                    )  # fmt: skip
        if block == BLOCKS:
            t = tl.arange(0, W2)[:, None]
            k = load_pieces(k_ptr, t, KH * K, t < tokens, 0.0, K, LEVELS)
            q = load_pieces(q_ptr, t, H * K, t < tokens, 0.0, K, LEVELS)
            real = inside & (token < tokens)
            a, beta = make_gates(load_gates(a_ptr, b_ptr, A_ptr, dt_ptr, first + token, v_head, real, HV, RAW), real, RAW)
            passed = tl.full([MEMBERS, W2], 1.0, tl.float32)  # P(0->t)
            for i in tl.static_range(L):
                passed = passed * tl.load(decay_at + v_head * (2 * L) + i + token * 0, mask=inside & (i < n), other=1.0)
            for i in range(tokens):
                passed = passed * tl.where(token >= i, _column(a, i), 1.0)
            x_ptr += (r * HEADS + head) * (2 * W * K)
            store_pieces(x_ptr, 2 * t, K, normalise(k, LEVELS), t < W, K, LEVELS, "")
            store_pieces(x_ptr, 2 * t + 1, K, times(normalise(q, LEVELS), (SCALE,)), t < W, K, LEVELS, "")
            scalar_at = scalar_ptr + (r * HV + v_head) * (2 * W) + 2 * token
            tl.store(scalar_at, passed, mask=inside & (token < W))
            tl.store(scalar_at + 1, beta, mask=inside & (token < W))
            record = v_head * (2 * L) + n + token
            tl.store(decay_at + record, a, mask=real)
            tl.store(beta_at + record, beta, mask=real)
            if head % (HEADS // KH) == 0:
                store_pieces(key_at + n * K, t, K, k, t < tokens, K, LEVELS, "")
    if (block == BLOCKS) & (head == 0):
        _put_place(place_ptr + r * PLACE, slot, tokens, first, cursor)


@triton.jit(do_not_specialize=["layer"])
def _gdn_one_kernel(
    slots_ptr, lens_ptr, cu_ptr, cursor_ptr, q_ptr, k_ptr, a_ptr, b_ptr, A_ptr, dt_ptr, k_pool, decay_pool, beta_pool,
    layer, x_ptr, coef_ptr, scalar_ptr, place_ptr, S, HEADS: tl.constexpr, H: tl.constexpr,
    KH: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, L: tl.constexpr, MEMBERS: tl.constexpr,
    LEVELS: tl.constexpr, WARPS: tl.constexpr, RAW: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """`_gdn_kernel` for W = 1 and all records of a short history in one program, which loads everything at once."""
    head, r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    layer = layer_row(layer)
    slot, tokens, first, cursor = _place(slots_ptr, lens_ptr, cu_ptr, cursor_ptr, r, S)
    n, base = _half(cursor, L)
    if (tokens > 0) & (layer >= 0) & (first >= 0):
        row, key_head, GROUP = layer * S + slot, head // (HEADS // KH), HV // HEADS
        key_at = k_pool + ((row * KH + key_head) * (2 * L) + base) * K
        q_ptr, k_ptr = q_ptr + (first * H + head // (HEADS // H)) * K, k_ptr + (first * KH + key_head) * K
        members = tl.arange(0, MEMBERS)[:, None]
        inside, v_head = members < GROUP, head * GROUP + members
        decay_at, beta_at = decay_pool + row * (HV * 2 * L) + base, beta_pool + row * (HV * 2 * L) + base
        j, later = tl.arange(0, L)[:, None], tl.arange(0, L)[None, :]
        raw_keys = load_raw_pieces(key_at, j, K, j < n, 0.0, K, LEVELS)
        raw_k, raw_q = load_raw_rows(k_ptr, L, K, LEVELS, WARPS), load_raw_rows(q_ptr, L, K, LEVELS, WARPS)
        gates = load_gates(a_ptr, b_ptr, A_ptr, dt_ptr, first, v_head, inside, HV, RAW)
        decays = ()
        for i in tl.static_range(L):  # dead records decay by 1
            decays = decays + (tl.load(decay_at + v_head * (2 * L) + i + later * 0, mask=inside & (i < n), other=1.0),)
        if cursor >= 0:  # always true, which a compiler does not know: it would move the loads down, each to its first use
            passed, passed_0 = tl.full([MEMBERS, L], 1.0, tl.float32), tl.full([MEMBERS, L], 1.0, tl.float32)
            for i in tl.static_range(L):  # P(j->t) and P(0->t)
                passed, passed_0 = passed * tl.where(later < i, decays[i], 1.0), passed_0 * decays[i]
            a, beta = make_gates(gates, inside, RAW)
            passed, passed_0 = passed * tl.where(later < n, a, 1.0), passed_0 * a
            keys, k_rows, q_rows = to_fp32(raw_keys), to_fp32(raw_k), to_fp32(raw_q)
            k, q = expand_rows(k_rows, L), expand_rows(q_rows, L)
            k_norm, q_norm = inverse_norm(k, LEVELS), inverse_norm(q, LEVELS)
            norms = tl.where(tl.reshape(j == n, [L]), k_norm, inverse_norm(keys, LEVELS))
            keys = _where(j == n, k, keys)
            out = coef_ptr + (r * HV + v_head) * (2 * L) + later
            tl.store(out, passed * ((read(keys, k, LEVELS) * norms) * k_norm)[None, :], mask=inside)
            tl.store(out + L, passed * (((read(keys, q, LEVELS) * norms) * q_norm) * SCALE)[None, :], mask=inside)
            line, at = tl.arange(0, k_rows[0].shape[0])[:, None], x_ptr + (r * HEADS + head) * (2 * K)
            one = line == 0  # rows are equal: the first is stored
            store_pieces(at, line, 0, normalise(k_rows, LEVELS), one, K, LEVELS, "")
            store_pieces(at + K, line, 0, times(normalise(q_rows, LEVELS), (SCALE,)), one, K, LEVELS, "")
            store_pieces(key_at + n * K, line, 0, k_rows, one & (head % (HEADS // KH) == 0), K, LEVELS, "")
            scalar_at, record = scalar_ptr + (r * HV + v_head) * 2, v_head * (2 * L) + n
            tl.store(scalar_at + later * 0, passed_0, mask=inside & (later == 0))
            tl.store(scalar_at + 1, beta, mask=inside)
            tl.store(decay_at + record, a, mask=inside)
            tl.store(beta_at + record, beta, mask=inside)
    if head == 0:
        _put_place(place_ptr + r * PLACE, slot, tokens, first, cursor)


@triton.jit(do_not_specialize=["layer"])
def _kda_kernel(
    slots_ptr, lens_ptr, cu_ptr, cursor_ptr, q_ptr, k_ptr, a_ptr, b_ptr, A_ptr, dt_ptr, raw_ptr, k_pool, decay_pool, beta_pool,
    layer, x_ptr, coef_ptr, scalar_ptr, place_ptr, S, W: tl.constexpr, W2: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    L: tl.constexpr, LEVELS: tl.constexpr, RAW: tl.constexpr, SCALE: tl.constexpr, LOWER_BOUND: tl.constexpr,
):  # fmt: skip
    """Steps 1 and 2 of KDA for one request and head: c_jt and P(0->t) x, and the records k, decay, beta."""
    head, r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot, tokens, first, cursor = _place(slots_ptr, lens_ptr, cu_ptr, cursor_ptr, r, S)
    layer = layer_row(layer)
    if (tokens > 0) & (first >= 0) & (layer >= 0):  # all known: a compiler waits for them once
        n, base = _half(cursor, L)
        record, own = ((layer * S + slot) * HV + head) * (2 * L) + base, r * HV + head
        key_at, decay_at, coef_at = k_pool + record * K, decay_pool + record * K, coef_ptr + own * (2 * W * L)
        tiles, passed = history(key_at, decay_at, n, ROWS, K, L, LEVELS)
        x_at, scalar_at = x_ptr + own * (2 * W * K) + channels(K), scalar_ptr + own * (2 * W)
        if W <= SHORT:
            x = load_window(q_ptr, k_ptr, a_ptr, b_ptr, A_ptr, dt_ptr, raw_ptr, first, head, tokens, W, W2, HV, K, RAW)
            q, k, alphas, raw, beta = window(x, LEVELS, RAW, SCALE, LOWER_BOUND)
            store_window(key_at + n * K, decay_at + n * K, beta_pool + record + n, alphas, raw, beta, tokens, K)
            store_products(coef_at + n, q, k, alphas, tokens, 1, L, LEVELS, W)
            i = tl.arange(0, 2 * ROWS)
            is_q = i[:, None] >= ROWS
            for p in tl.static_range(len(tiles)):
                j = p * ROWS + i % ROWS
                if n > p * ROWS:
                    both = tl.reshape(tl.permute(tl.join(tiles[p], tiles[p]), [2, 0, 1]), [2 * ROWS, K])
                    for t in tl.static_range(W):
                        both = both * alphas[t]
                        c = sums(both * tl.where(is_q, q[t], k[t]), LEVELS)
                        tl.store(coef_at + (2 * t + i // ROWS) * L + j, c, mask=j < n)
            for t in tl.static_range(W):
                passed = passed * alphas[t]
                tl.store(x_at + 2 * t * K, passed * k[t])
                tl.store(x_at + (2 * t + 1) * K, passed * q[t])
            t = tl.arange(0, W2)
            tl.store(scalar_at + 2 * t + 1, beta, mask=t < W)
        else:
            j, keys = tl.arange(0, ROWS), tl.zeros([W2, K], tl.float32)
            for t in range(W):
                q, k, alpha, beta = one_token(
                    t, q_ptr, k_ptr, a_ptr, b_ptr, A_ptr, dt_ptr, raw_ptr, first, head, tokens, key_at + n * K,
                    decay_at + n * K, beta_pool + record + n, HV, K, LEVELS, RAW, SCALE, LOWER_BOUND,
                )  # fmt: skip
                keys = store_token_products(coef_at + n, t, keys, q, k, alpha, tokens, 1, L, LEVELS)
                tiles, passed = decayed(tiles, alpha), passed * alpha
                for p in tl.static_range(len(tiles)):
                    at, live = coef_at + 2 * t * L + p * ROWS + j, p * ROWS + j < n
                    tl.store(at, sums(tiles[p] * k, LEVELS), mask=live)
                    tl.store(at + L, sums(tiles[p] * q, LEVELS), mask=live)
                tl.store(x_at + 2 * t * K, passed * k)
                tl.store(x_at + (2 * t + 1) * K, passed * q)
                tl.store(scalar_at + 2 * t + 1 + tl.arange(0, 1), beta)
    if head == 0:
        _put_place(place_ptr + r * PLACE, slot, tokens, first, cursor)


def coefficients(
    index, cursor, tokens, pools, *, width: int, scale: float, lower_bound: float | None = None, num_warps: int = 1
):
    """Everything about a window that does not involve the state, and its records k, decay, beta.

    index: (layer, slots [R], verify_len [R], cu [R+1]) int32, layer an int; cursor [S] int32 (the forward's copy). tokens,
    GDN: raw q [T, H, K] and k [T, KH, K], then decay [T, HV, 1] and beta [T, HV] fp32, or the raw a, b [T, HV], A_log and
    dt_bias [HV] whose gates are then computed inside. KDA: q^, k^ [T, HV, K], decay [T, HV, K], beta [T, HV] fp32 and raw
    k, or the raw q, k, a [T, HV * K], b, A_log [HV] and dt_bias [HV * K]. pools: k [layers, S, KH, 2L, K], decay [layers, S,
    HV, 2L, G], beta [layers, S, HV, 2L], written in place at the records n..n+T_r-1 of each live half.

    Returns x [R, heads, 2W, K] fp32 (row 2t is k^_t, 2t+1 is q^_t scaled; KDA: times P(0->t)), c [R, HV, 2W, L] fp32
    (columns n + i are window tokens i), scalars [R, HV, 2W] fp32 (2t: P(0->t) in GDN, 2t+1: beta) and places [R, 4] int32
    (slot, tokens, first token row, cursor). Rows of requests that are not live, except those of places, and columns of c at
    n + T_r and beyond, may be left unwritten. heads is H when H = KH, else HV.
    """
    (q, k, *rest), (layer, slots, verify_len, cu), (k_pool, decay_pool, beta_pool) = tokens, index, pools
    requests, (s, v_heads, double, gates), k_dim = slots.shape[0], decay_pool.shape[1:], q.shape[2]
    length, key_heads, levels = double // 2, k.shape[1], pair_levels(k_pool.dtype, k_dim)
    rows, w2 = min(ROWS.value, length), triton.next_power_of_2(width)
    heads = q.shape[1] if q.shape[1] == key_heads else v_heads
    x, coef, scalars = (
        torch.empty((requests, h, 2 * width, *last), dtype=torch.float32, device=q.device)
        for h, last in ((heads, (k_dim,)), (v_heads, (length,)), (v_heads, ()))
    )
    places = torch.empty((requests, PLACE.value), dtype=torch.int32, device=q.device)
    grid, gdn, raw = (length // rows + 1, heads, requests), gates == 1, len(rest) == 4
    group = triton.next_power_of_2(v_heads // heads)
    if requests and gdn:
        rest = rest if raw else (*rest, *rest)
    if requests and gdn and width == 1 and length <= LONE:
        launch(
            _gdn_one_kernel, grid[1:],
            slots, verify_len, cu, cursor, q, k, *rest, k_pool, decay_pool, beta_pool, layer, x, coef, scalars, places, s,
            heads, q.shape[1], key_heads, v_heads, k_dim, length, group, levels, num_warps, raw, scale,
            num_warps=num_warps, registers=registers(length, k_dim, num_warps),
        )  # fmt: skip
    elif requests and gdn:
        launch(
            _gdn_kernel, grid,
            slots, verify_len, cu, cursor, q, k, *rest, k_pool, decay_pool, beta_pool, layer, x, coef, scalars, places, s,
            width, w2, heads, q.shape[1], key_heads, v_heads, k_dim, length, rows, group, levels, num_warps, raw, scale,
            num_warps=num_warps,
        )  # fmt: skip
    elif requests:
        rest = (*rest, k) if raw else (*rest[:2], *rest)
        launch(
            _kda_kernel, grid[1:],
            slots, verify_len, cu, cursor, q, k, *rest, k_pool, decay_pool, beta_pool, layer, x, coef, scalars, places, s,
            width, w2, v_heads, k_dim, length, levels, raw, scale, lower_bound, num_warps=num_warps,
        )  # fmt: skip
    return x, coef, scalars, places


# ------------------------------------------------------------------------------------------------------- main kernel


@triton.jit
def _record_columns(p, L: tl.constexpr):
    """Record numbers [1, 32] of block p, whose two pair levels leave 8 values; those at L and beyond are never live."""
    return p * (LANES << RECORD_LEVELS) + tl.arange(0, LANES << RECORD_LEVELS)[None, :]


@triton.jit
def _load_records(ptr, column, n, M: tl.constexpr, V: tl.constexpr, L: tl.constexpr):
    """d of the first n records as pieces [M, 32], the others 0; ptr: row 0 of record 0.

    Records are loaded by fours and joined, and a mask hides that d is contiguous along V: the compiler then loads them in the
    layout of the state tile, instead of loading them in another one and converting through shared memory.
    """
    column = column & 0x7FFFFFFF
    out = ()
    for p in tl.static_range((L + (LANES << RECORD_LEVELS) - 1) // (LANES << RECORD_LEVELS)):
        x = ()
        for i in tl.static_range(4):  # two pair levels
            j = p * (LANES << RECORD_LEVELS) + (tl.arange(0, LANES)[None, :] << RECORD_LEVELS) + i
            x = x + (tl.load(ptr + (j * V + column), mask=j < n, other=0.0),)
        x = tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3]))
        out = out + (tl.reshape(x, [M, LANES << RECORD_LEVELS]),)
    return out


@triton.jit
def _fetch(x_ptr, coef_ptr, i, M: tl.constexpr, K: tl.constexpr, L: tl.constexpr, LEVELS: tl.constexpr, WARPS: tl.constexpr):
    """Row i of x and of c."""
    return load_rows(x_ptr + i * K, M, K, LEVELS, WARPS), load_rows(coef_ptr + i * L, M, L, RECORD_LEVELS, WARPS)


@triton.jit
def _project(state, d_old, row, p0, n, M: tl.constexpr, L: tl.constexpr, LEVELS: tl.constexpr, GDN: tl.constexpr):
    """Checkpoint and live records under one row of x and c: steps 3 to 5."""
    lanes = lane_sums(times(state, expand_rows(row[0], M)), LEVELS)
    if GDN:
        lanes = lanes * p0
    live = ()
    for p in tl.static_range(len(d_old)):  # 0 * 0 beyond the live records: d is 0 there, c may be anything
        live = live + (tl.where(_record_columns(p, L) < n, row[1][p], 0.0),)
    return finish(lanes + lane_sums(times(d_old, expand_rows(live, M)), RECORD_LEVELS))


@triton.jit
def _window(h, d_new, limit, coef_ptr, tokens, LOOP: tl.constexpr):
    """h plus the window tokens d_new, in LOOP only those below `limit`: step 6; coef_ptr: coefficient of token 0."""
    for i in tl.static_range(len(d_new)):
        more = h + d_new[i] * tl.load(coef_ptr + i, mask=i < tokens, other=0.0)
        h = tl.where(i < limit, more, h) if LOOP else more
    return h


@triton.jit
def _put(t, v, d, o, o_ptr, v_at, d_at, rows, tokens, HV: tl.constexpr, V: tl.constexpr):
    """Output and records v, d of token t."""
    tl.store(o_ptr + t * (HV * V) + rows, o.to(o_ptr.dtype.element_ty), mask=(rows < V) & (t < tokens))
    tl.store(d_at + t * V + rows, d, mask=(rows < V) & (t < tokens))
    tl.store(v_at + t * V + rows, v, mask=(rows < V) & (t < tokens))


@triton.jit(do_not_specialize=["layer"])
def _outputs_kernel(
    place_ptr, cu_ptr, v_ptr, x_ptr, coef_ptr, scalar_ptr, state_ptr, v_pool, d_pool, layer,
    o_ptr, S, R, T, W: tl.constexpr, HEADS: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    M: tl.constexpr, LEVELS: tl.constexpr, WARPS: tl.constexpr, GDN: tl.constexpr,
):  # fmt: skip
    """Steps 3 to 7 for one request, value head and block of V, and the records v and d."""
    LONE: tl.constexpr = W == 1 and state_ptr.dtype.element_ty == tl.float32
    block, head, r = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows = block * M + tl.arange(0, M)
    column = rows[:, None]
    layer = layer_row(layer)
    place_ptr += r * PLACE
    slot, tokens = tl.load(place_ptr).to(tl.int64), tl.load(place_ptr + 1)
    first, cursor = tl.load(place_ptr + 2).to(tl.int64), tl.load(place_ptr + 3)
    x_ptr += (r * HEADS + head // (HV // HEADS)) * (2 * W * K)
    coef_ptr += (r * HV + head) * (2 * W * L)
    scalar_ptr += (r * HV + head) * (2 * W)
    # all that addresses need, in one condition: a compiler then waits for it once
    if (tokens > 0) & (first >= 0) & (slot >= 0) & (cursor >= 0) & (layer >= 0):
        n, base = _half(cursor, L)
        row = (layer * S + slot) * HV + head
        state = load_pieces(state_ptr + row * (V * K), column, K, None if LONE else column < V, 0.0, K, LEVELS, LONE)
        d_at, v_at = d_pool + (row * (2 * L) + base) * V, v_pool + (row * (2 * L) + base + n) * V
        if LONE:
            d_old = _load_records(d_at, column, n, M, V, L)
        else:
            d_old = ()
            for p in tl.static_range((L + (LANES << RECORD_LEVELS) - 1) // (LANES << RECORD_LEVELS)):
                j = _record_columns(p, L)
                d_old = d_old + (tl.load(d_at + j * V + column, mask=j < n, other=0.0),)
        d_at += n * V
        v_ptr += (first * HV + head) * V
        o_at = o_ptr + (first * HV + head) * V
        if LONE:
            k, q = _fetch(x_ptr, coef_ptr, 0, M, K, L, LEVELS, WARPS), _fetch(x_ptr, coef_ptr, 1, M, K, L, LEVELS, WARPS)
            v, own = tl.load(v_ptr + rows), tl.load(coef_ptr + L + n)
            p0, beta = tl.load(scalar_ptr), tl.load(scalar_ptr + 1)
            # a loop for one token: a compiler moves loads down to their first use, but not into a loop that changes what
            # they loaded
            for t in range(tokens):
                d = (v.to(tl.float32) - _project(state, d_old, k, p0, n - t, M, L, LEVELS, GDN)) * beta
                o = _project(state, d_old, q, p0, n - t, M, L, LEVELS, GDN) + d * own
                _put(t, v, d, o, o_at, v_at, d_at, rows, tokens, HV, V)
                state = times(state, expand_rows(q[0], M))
        elif W <= UNROLL:
            # all projections before the substitution, which is a chain: the compiler then overlaps them; rows of a longer
            # window are fetched ahead of their turn, or a warp waits for every one of them
            x, hs, vs, ds, outs = (), (), (), (), ()
            for i in tl.static_range(AHEAD if W > 1 else 0):
                x = x + (_fetch(x_ptr, coef_ptr, i, M, K, L, LEVELS, WARPS),)
            for i in tl.static_range(2 * W):
                if len(x) < 2 * W:
                    x = x + (_fetch(x_ptr, coef_ptr, len(x), M, K, L, LEVELS, WARPS),)
                p0 = tl.load(scalar_ptr + i // 2 * 2)
                hs = hs + (_project(state, d_old, x[i], p0, n, M, L, LEVELS, GDN),)
            for t in tl.static_range(W):
                vs = vs + (tl.load(v_ptr + t * (HV * V) + rows, mask=(rows < V) & (t < tokens), other=0.0),)
                h = _window(hs[2 * t], ds, t, coef_ptr + 2 * t * L + n, tokens, False)
                ds = ds + ((vs[t].to(tl.float32) - h) * tl.load(scalar_ptr + 2 * t + 1),)
                outs = outs + (_window(hs[2 * t + 1], ds, t, coef_ptr + (2 * t + 1) * L + n, tokens, False),)
            for t in tl.static_range(W):
                _put(t, vs[t], ds[t], outs[t], o_at, v_at, d_at, rows, tokens, HV, V)
        else:
            ds = ()
            for _ in tl.static_range(W):
                ds = ds + (tl.zeros([M], tl.float32),)
            for t in range(tokens):
                v = tl.load(v_ptr + t * (HV * V) + rows, mask=rows < V, other=0.0)
                p0 = tl.load(scalar_ptr + 2 * t)
                c_row, x = coef_ptr + 2 * t * L, _fetch(x_ptr, coef_ptr, 2 * t, M, K, L, LEVELS, WARPS)
                h = _window(_project(state, d_old, x, p0, n, M, L, LEVELS, GDN), ds, t, c_row + n, tokens, True)
                d = (v.to(tl.float32) - h) * tl.load(scalar_ptr + 2 * t + 1)
                new = ()
                for i in tl.static_range(W):
                    new = new + (tl.where(i == t, d, ds[i]),)
                ds = new
                x = _fetch(x_ptr, coef_ptr, 2 * t + 1, M, K, L, LEVELS, WARPS)
                o = _window(_project(state, d_old, x, p0, n, M, L, LEVELS, GDN), ds, t + 1, c_row + L + n, tokens, True)
                _put(t, v, d, o, o_at, v_at, d_at, rows, tokens, HV, V)
    zero_rows(o_ptr, cu_ptr, head, r, rows, R, T, HV, V)


def outputs(index, cursor, v, window, state, pools, *, gdn: bool, block_v: int, num_warps: int):
    """Outputs of one layer and its records v, d.

    index, cursor as for `coefficients`; v [T, HV, V] raw; window: what `coefficients` returned; state [layers, S,
    HV, V, K]; pools: v and d [layers, S, HV, 2L, V], written in place at the records n..n+T_r-1 of each live half. Returns
    o [T, HV, V] in v's dtype, zero in token rows that no live request owns.
    """
    (layer, _, _, cu), (v_pool, d_pool), (x, coef, scalars, places) = index, pools, window
    requests, heads, width = x.shape[0], x.shape[1], x.shape[2] // 2
    (t, v_heads, v_dim), (m, k_dim, levels) = v.shape, tile_of(state, block_v)
    o = torch.empty_like(v) if requests else torch.zeros_like(v)
    if requests:
        launch(
            _outputs_kernel, (v_dim // m, v_heads, requests),
            places, cu, v, x, coef, scalars, state, v_pool, d_pool, layer, o, state.shape[1], requests, t,
            width, heads, v_heads, k_dim, v_dim, v_pool.shape[3] // 2, m, levels, num_warps, gdn,
            num_warps=num_warps, registers=registers(m, k_dim, num_warps) if 1 < width <= 4 else None,
        )  # fmt: skip
    return o
