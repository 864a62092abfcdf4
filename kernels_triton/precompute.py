"""Replay's forward of one layer, projection "precompute": the whole verify window meets the checkpoint in dot products.

The steps are those of torch_ref/executors/replay.py, with two launches as in project.py. Sums over K and over records run
on tensor cores: exact bf16 products, fp32 accumulation. An fp32 operand is cut into three bf16 parts, which is exact, and
the products that matter at fp32 precision are summed from the smallest. Windows are solved elementwise. Outputs and d are
bounded against "inline", not equal to it; their bits may depend on block_v and num_warps, on nothing else.

Columns of a window: column 2t belongs to k_t, column 2t+1 to q_t; N of them, at least 8, those beyond 2W are zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels_triton.channels import (
    SHORT,
    channels,
    history,
    load_window,
    one_token,
    stack,
    store_products,
    store_token_products,
    store_window,
    window,
)
from kernels_triton.decode import clear_rows, request_tokens
from kernels_triton.gates import inverse_norm
from kernels_triton.launch import launch, layer_row
from kernels_triton.materialize import tile_of
from kernels_triton.project import live_half, load_gates, make_gates
from kernels_triton.recurrence import pair_levels, to_fp32

PARTS = tl.constexpr(3)
DOT = tl.constexpr(16)  # the smallest side of a dot, but for its columns
COLUMNS = tl.constexpr(8)  # columns of a dot: tokens 4g..4g+3


# --------------------------------------------------------------------------------------------------- split dot products


@triton.jit
def split(x):
    """x as bf16 parts, most significant first, whose sum is x: fp32 is cut after 8, 16 and 24 bits of its significand."""
    out = ()
    if x.dtype == tl.bfloat16:
        out = (x,)
    else:
        for i in tl.static_range(PARTS):
            bits = x.to(tl.int32, bitcast=True)
            out = out + ((bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True),)
            if i < PARTS - 1:
                x = x - (bits & -65536).to(tl.float32, bitcast=True)
    return out


@triton.jit
def dot(a, b, acc):
    """acc + a b for tuples of bf16 parts a [M, K], b [K, N]; products below fp32 precision are left out."""
    for s in tl.static_range(PARTS):
        for i in tl.static_range(len(a)):
            if (i <= PARTS - 1 - s) and (PARTS - 1 - s - i < len(b)):
                acc = tl.dot(a[i], b[PARTS - 1 - s - i], acc)
    return acc


@triton.jit
def transpose(parts):
    out = ()
    for i in tl.static_range(len(parts)):
        out = out + (tl.trans(parts[i]),)
    return out


@triton.jit
def load_tiles(at, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """COUNT tiles, the first at `at`, each WIDTH columns further."""
    out = ()
    for i in tl.static_range(COUNT):
        out = out + (tl.load(at + i * WIDTH),)
    return out


@triton.jit
def spread_lanes(x):
    """x [M, n] with its columns in another order, that of the operand of a dot when four lanes hold a row in turns.

    The sum of a dot does not mind the order of its terms as long as both operands have the same. A lane that loads 8 (n a
    multiple of 32) or 4 neighbours needs 2 neighbours, and 2 more 8 columns further; so no value changes lanes.
    """
    LANE: tl.constexpr = 8 if x.shape[1] % 32 == 0 else 4
    REST: tl.constexpr = x.shape[1] // (4 * LANE)
    x = tl.permute(tl.reshape(x, [x.shape[0], REST, 4, LANE // 2, 2]), [0, 1, 3, 2, 4])
    return tl.reshape(x, [x.shape[0], REST * 4 * LANE])


@triton.jit
def store_parts(at, parts, stride):
    for i in tl.static_range(len(parts)):
        tl.store(at + i * stride, parts[i])


# ------------------------------------------------------------------------------------------------------- pre-kernels


@triton.jit
def _pieces(at, mask, K: tl.constexpr, P: tl.constexpr):
    """Rows of K values, zero where `mask` is false, in pieces of what four lanes load at once, see `spread_lanes`."""
    out = ()
    for p in tl.static_range(K // P):
        out = out + (tl.load(at + p * P, mask=mask[:, None], other=0.0),)
    return out


@triton.jit
def _twice(x):
    """x again below x, when it has fewer rows than a dot takes."""
    TIMES: tl.constexpr = 16 // x.shape[0]
    if TIMES < 2:
        return x
    elif len(x.shape) == 1:
        return tl.reshape(tl.broadcast_to(x[None], [TIMES, x.shape[0]]), [16])
    else:
        return tl.reshape(tl.broadcast_to(x[None], [TIMES, x.shape[0], x.shape[1]]), [16, x.shape[1]])


@triton.jit
def _pick(x, where):
    """The one value of x where `where`; the others may be NaN."""
    return tl.sum(tl.sum(tl.where(where, x, 0.0), axis=1), axis=0)


@triton.jit(do_not_specialize=["layer"])
def _gdn_kernel(
    slots_ptr, lens_ptr, cu_ptr, cursor_ptr, q_ptr, k_ptr, a_ptr, b_ptr, A_ptr, dt_ptr, k_pool, decay_pool, beta_pool,
    layer, x_ptr, coef_ptr, window_ptr, scalar_ptr, S, W: tl.constexpr, N: tl.constexpr, HEADS: tl.constexpr,
    H: tl.constexpr, KH: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, L: tl.constexpr, M: tl.constexpr,
    MEMBERS: tl.constexpr, LEVELS: tl.constexpr, X: tl.constexpr, P: tl.constexpr, RAW: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Steps 1 and 2 of GDN for one request and key head, and the records k, decay, beta."""
    head, r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    GROUP: tl.constexpr = HV // HEADS
    ROWS: tl.constexpr = max(DOT, N)
    slot, tokens = request_tokens(slots_ptr, lens_ptr, r, S - 1)
    first = tl.load(cu_ptr + r).to(tl.int64)
    if tokens > 0:
        row, key_head = layer_row(layer) * S + slot, head // (HEADS // KH)
        j, i, piece, rows = tl.arange(0, M), tl.arange(0, N), tl.arange(0, P)[None, :], tl.arange(0, ROWS)
        t, is_q, col = i // 2, i % 2 == 1, i[None, :]
        # all loads; gates of all value heads of this key head: one lane for each head and column
        members = tl.arange(0, MEMBERS)[:, None]
        v_head, real = head * GROUP + members, (members < GROUP) & (t < tokens)[None, :]
        gates = load_gates(a_ptr, b_ptr, A_ptr, dt_ptr, (first + t)[None, :], v_head, real, HV, RAW)
        k_at, live_k = k_ptr + (first * KH + key_head) * K + t[:, None] * (KH * K) + piece, (t < tokens) & (i % 2 == 0)
        q_at = q_ptr + (first * H + head // (HEADS // H)) * K + t[:, None] * (H * K) + piece
        x_k, x_q = _pieces(k_at, live_k, K, P), _pieces(q_at, (t < tokens) & is_q, K, P)
        n, base = live_half(cursor_ptr, slot, L)
        key_at = k_pool + ((row * KH + key_head) * (2 * L) + base) * K + piece
        keys = _pieces(key_at + j[:, None] * K, j < n, K, P)
        decay_at = decay_pool + (row * HV + head * GROUP) * (2 * L) + base
        tl.debug_barrier()  # loads stay above, and what follows below: see _outputs_kernel
        if first >= 0:
            alphas, betas = make_gates(gates, real, RAW)
            x = ()
            for p in tl.static_range(K // P):
                x = x + (tl.where(is_q[:, None], x_q[p], x_k[p]),)
            x_norm = inverse_norm(to_fp32(x), LEVELS)
            scaled = tl.where(is_q, x_norm * SCALE, x_norm)
            old, new = tl.zeros([M, N], tl.float32), tl.zeros([ROWS, N], tl.float32)
            for p in tl.static_range(K // P):
                parts, columns = (), ()
                for part in tl.static_range(X):
                    y = spread_lanes(split(x[p])[part])
                    parts, columns = parts + (_twice(y),), columns + (tl.trans(y),)
                old = dot(split(spread_lanes(keys[p])), columns, old)
                new = dot(parts, columns, new)
            old = (old * inverse_norm(to_fp32(keys), LEVELS)[:, None]) * scaled[None, :]
            new = (new * _twice(x_norm)[:, None]) * scaled[None, :]

            # row 2i of `new` belongs to k_i: it acts on q_t from t = i and on k_t from t = i + 1, that is beyond column 2i
            k_token, is_k = (rows // 2)[:, None], ((rows % 2 == 0) & (rows < 2 * tokens))[:, None]
            inside = tl.where(t < tokens, t, -1)[None, :]
            new = tl.where((col > rows[:, None]) & (inside >= 0), new, 0.0)
            for m in tl.static_range(GROUP):
                own = r * HV + head * GROUP + m
                passed, passed_0 = tl.full([M], 1.0, tl.float32), 1.0
                for u in tl.static_range(L):
                    alpha = tl.load(decay_at + (m * (2 * L) + u), mask=u < n, other=1.0)
                    passed_0 *= alpha
                    passed = tl.where(j < u, passed * alpha, passed)
                product = passed[:, None] + tl.zeros([M, N], tl.float32)  # P(j->t)
                fresh = tl.full([ROWS, N], 1.0, tl.float32)  # P(i->t)
                factor = passed_0 + tl.zeros([N], tl.float32)  # P(0->t)
                for u in tl.static_range(W):
                    alpha = _pick(alphas, (members == m) & (col == 2 * u))
                    product = tl.where((t >= u)[None, :], product * alpha, product)
                    fresh = tl.where((inside >= u) & (k_token < u), fresh * alpha, fresh)
                    factor = tl.where(t >= u, factor * alpha, factor)
                tl.store(window_ptr + own * (W * N) + k_token * N + col, new * fresh, mask=is_k)
                tl.store(coef_ptr + own * (N * M) + col * M + j[:, None], tl.where((j < n)[:, None], old * product, 0.0))
                tl.store(scalar_ptr + own * (2 * N) + i, factor * scaled)
            tl.store(scalar_ptr + (r * HV + v_head) * (2 * N) + N + col, betas, mask=members < GROUP)
            record = (row * HV + v_head) * (2 * L) + base + n + t[None, :]
            tl.store(decay_pool + record, alphas, mask=real)
            tl.store(beta_pool + record, betas, mask=real)
            x_at = x_ptr + (r * HEADS + head) * (X * N * K) + i[:, None] * K + piece
            for p in tl.static_range(K // P):
                store_parts(x_at + p * P, split(x[p]), N * K)
                if head % (HEADS // KH) == 0:
                    tl.store(key_at + p * P + (n + t)[:, None] * K, x_k[p], mask=live_k[:, None])


@triton.jit(do_not_specialize=["layer"])
def _kda_kernel(
    slots_ptr, lens_ptr, cu_ptr, cursor_ptr, q_ptr, k_ptr, a_ptr, b_ptr, A_ptr, dt_ptr, raw_ptr, k_pool, decay_pool, beta_pool,
    layer, x_ptr, coef_ptr, window_ptr, scalar_ptr, S, W: tl.constexpr, W2: tl.constexpr, N: tl.constexpr, HV: tl.constexpr,
    K: tl.constexpr, L: tl.constexpr, M: tl.constexpr, LEVELS: tl.constexpr, RAW: tl.constexpr, SCALE: tl.constexpr,
    LOWER_BOUND: tl.constexpr,
):  # fmt: skip
    """Steps 1 and 2 of KDA for one request and head, and the records k, decay, beta."""
    head, r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot, tokens = request_tokens(slots_ptr, lens_ptr, r, S - 1)
    first, layer = tl.load(cu_ptr + r).to(tl.int64), layer_row(layer)
    if (tokens > 0) & (first >= 0) & (layer >= 0):  # all known: a compiler waits for them once
        n, base = live_half(cursor_ptr, slot, L)
        record, own = ((layer * S + slot) * HV + head) * (2 * L) + base, r * HV + head
        key_at, decay_at = k_pool + record * K, decay_pool + record * K
        tiles, passed_0 = history(key_at, decay_at, n, DOT, K, M, LEVELS)
        window_at, beta_at = window_ptr + own * (W * N), scalar_ptr + own * (2 * N) + N
        i, j, passed = tl.arange(0, N), tl.arange(0, DOT)[:, None], tl.full([1, K], 1.0, tl.float32)

        # columns are decayed to the start of the window, and further to the checkpoint
        if W <= SHORT:
            x = load_window(q_ptr, k_ptr, a_ptr, b_ptr, A_ptr, dt_ptr, raw_ptr, first, head, tokens, W, W2, HV, K, RAW)
            q, k, alphas, raw, beta = window(x, LEVELS, RAW, SCALE, LOWER_BOUND)
            store_window(key_at + n * K, decay_at + n * K, beta_pool + record + n, alphas, raw, beta, tokens, K)
            store_products(window_at, q, k, alphas, tokens, N, 1, 2, W)
            tl.store(beta_at + 2 * tl.arange(0, W2), beta)
            rows = ()
            for t in tl.static_range(W):
                passed = passed * alphas[t]
                rows = rows + (k[t] * passed, q[t] * passed)
            columns = stack(rows, N)
        else:
            keys, columns = tl.zeros([W2, K], tl.float32), tl.zeros([N, K], tl.float32)
            for t in range(W):
                q, k, alpha, beta = one_token(
                    t, q_ptr, k_ptr, a_ptr, b_ptr, A_ptr, dt_ptr, raw_ptr, first, head, tokens, key_at + n * K,
                    decay_at + n * K, beta_pool + record + n, HV, K, LEVELS, RAW, SCALE, LOWER_BOUND,
                )  # fmt: skip
                keys = store_token_products(window_at, t, keys, q, k, alpha, tokens, N, 1, 2)
                tl.store(beta_at + 2 * t + tl.arange(0, 1), beta)
                passed = passed * alpha
                columns = tl.where(i[:, None] == 2 * t, k * passed, columns)
                columns = tl.where(i[:, None] == 2 * t + 1, q * passed, columns)
        store_parts(x_ptr + own * (PARTS * N * K) + i[:, None] * K + channels(K), split(columns * passed_0), N * K)
        parts = transpose(split(columns))
        for p in tl.static_range(len(tiles)):
            c = dot(split(tiles[p]), parts, tl.zeros([DOT, N], tl.float32))
            tl.store(coef_ptr + own * (N * M) + i[None, :] * M + p * DOT + j, c)


def piece_width(dtype: torch.dtype, k: int) -> int:
    """Values of a row of k that four lanes load at once, 16 bytes each: see `spread_lanes`."""
    return min(k, DOT.value if dtype == torch.float32 else 2 * DOT.value)


def columns(width: int) -> int:
    """N: columns of a window."""
    return max(COLUMNS.value, 2 * triton.next_power_of_2(width))


def coefficients(
    index, cursor, tokens, pools, *, width: int, scale: float, lower_bound: float | None = None, num_warps: int = 1
):
    """Everything about a window that does not involve the state, and its records k, decay, beta.

    Arguments as for `project.coefficients`. Returns x [R, heads, P, N, K] bf16 parts of the columns (GDN: raw rows, P = 1 or
    3 by their dtype; KDA: P(0->t) x, P = 3), c [R, HV, N, max(L, 16)] fp32, the coefficients of live records, the others
    zero, w [R, HV, W, N] fp32, the coefficients of window tokens in the columns that they reach, and scalars [R, HV, 2, N]
    fp32 (GDN: factor of a column, P(0->t) times norm and scale; then beta_t in column 2t). Rows of requests that are not
    live, w beyond T_r and its other columns may be left unwritten. heads is H when H = KH, else HV.
    """
    (q, k, *rest), (layer, slots, verify_len, cu), (k_pool, decay_pool, beta_pool) = tokens, index, pools
    requests, (s, v_heads, double, gates), k_dim = slots.shape[0], decay_pool.shape[1:], q.shape[2]
    gdn, length, key_heads = gates == 1, double // 2, k.shape[1]
    n, m, levels = columns(width), max(DOT.value, length), pair_levels(k_pool.dtype, k_dim)
    heads = q.shape[1] if q.shape[1] == key_heads else v_heads
    parts = 1 if gdn and k.dtype == torch.bfloat16 else PARTS.value
    x = torch.empty((requests, heads, parts, n, k_dim), dtype=torch.bfloat16, device=q.device)
    coef, window, scalars = (
        torch.empty((requests, v_heads, *last), dtype=torch.float32, device=q.device) for last in ((n, m), (width, n), (2, n))
    )
    if requests and gdn:
        raw = len(rest) == 4
        launch(
            _gdn_kernel, (heads, requests),
            slots, verify_len, cu, cursor, q, k, *(rest if raw else (*rest, *rest)), k_pool, decay_pool, beta_pool, layer,
            x, coef, window, scalars, s, width, n, heads, q.shape[1], key_heads, v_heads, k_dim, length, m,
            triton.next_power_of_2(v_heads // heads), levels, parts, piece_width(k.dtype, k_dim), raw, scale,
            num_warps=num_warps,
        )  # fmt: skip
    elif requests:
        raw = len(rest) == 4
        rest = (*rest, k) if raw else (*rest[:2], *rest)
        launch(
            _kda_kernel, (v_heads, requests),
            slots, verify_len, cu, cursor, q, k, *rest, k_pool, decay_pool, beta_pool, layer, x, coef, window, scalars, s,
            width, triton.next_power_of_2(width), n, v_heads, k_dim, length, m, levels, raw, scale, lower_bound,
            num_warps=num_warps,
        )  # fmt: skip
    return x, coef, window, scalars


# ------------------------------------------------------------------------------------------------------- main kernel


# The accumulator of a dot holds rows g and g + 8 of 16, columns 2t and 2t+1 in lane 4g + t: u and o of token t. Its row
# 8h + g stands for row 2g + h of V, so that a lane holds neighbours in memory. A tile [4, 8, B, 2], B = M / 16, of
# (t, g, 16 rows, h) is laid out alike when it is loaded: nothing changes lanes but d_t, which all later tokens need.


@triton.jit
def _by_token(h):
    """h [M, 8] as two tiles [4, 8, B, 2]: its even columns and its odd ones."""
    B: tl.constexpr = h.shape[0] // 16
    return tl.split(tl.permute(tl.reshape(h, [B, 2, 8, 4, 2]), [3, 2, 0, 1, 4]))


@triton.jit(do_not_specialize=["layer"])
def _outputs_kernel(
    slots_ptr, lens_ptr, cu_ptr, cursor_ptr, v_ptr, x_ptr, coef_ptr, window_ptr, scalar_ptr, state_ptr, v_pool, d_pool, layer,
    o_ptr, S, R, T, W: tl.constexpr, N: tl.constexpr, HEADS: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, L: tl.constexpr, LM: tl.constexpr, M: tl.constexpr, X: tl.constexpr, P: tl.constexpr, GDN: tl.constexpr,
):  # fmt: skip
    """Steps 3 to 7 for one request, value head and block of V, and the records v and d."""
    block, head, r = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot, tokens = request_tokens(slots_ptr, lens_ptr, r, S - 1)
    first, total = tl.load(cu_ptr + r).to(tl.int64), tl.load(cu_ptr + R).to(tl.int64)
    G: tl.constexpr = N // COLUMNS
    B: tl.constexpr = M // DOT
    if tokens > 0:
        # the state first: it is nearly all of the traffic, and depends only on the slot
        row, own = (layer_row(layer) * S + slot) * HV + head, r * HV + head
        n, base = live_half(cursor_ptr, slot, L)
        i, piece, j = tl.arange(0, COLUMNS), tl.arange(0, P)[None, :], tl.arange(0, M)[:, None]
        rows = block * M + j // DOT * DOT + j % 8 * 2 + j // 8 % 2
        t4, g8 = tl.arange(0, 4)[:, None, None, None], tl.arange(0, 8)[None, :, None, None]
        lane = block * M + (tl.arange(0, B) * DOT)[None, None, :, None] + g8 * 2 + tl.arange(0, 2)[None, None, None, :]
        column = 2 * t4 + g8 * 0
        state = load_tiles(state_ptr + row * (V * K) + rows * K + piece, K // P, P)
        x_at = x_ptr + (r * HEADS + head // (HV // HEADS)) * (X * N * K) + i[:, None] * K + piece
        scalar_at, window_at, j = scalar_ptr + own * (2 * N), window_ptr + own * (W * N), tl.arange(0, DOT)[None, :]
        coef_at = coef_ptr + own * (N * LM) + i[:, None] * LM + j
        x, coef, d_old, factor = (), (), (), ()
        for g in tl.static_range(G):
            for a in tl.static_range(X):
                x = x + load_tiles(x_at + (a * N + g * COLUMNS) * K, K // P, P)
            factor = factor + (tl.load(scalar_at + g * COLUMNS + i),)
            coef = coef + load_tiles(coef_at + g * (COLUMNS * LM), LM // DOT, DOT)
        d_at, v_at = d_pool + (row * (2 * L) + base) * V + lane, v_pool + (row * (2 * L) + base + n) * V + lane
        for p in tl.static_range(LM // DOT):
            j = p * DOT + t4[:, :, None] * 4 + tl.arange(0, 4)[None, None, :, None, None]
            old = tl.load(d_at[:, :, None] + j * V, mask=j < n, other=0.0)
            old = tl.permute(tl.reshape(old, [4, 8, 2, 2, B, 2]), [4, 5, 1, 2, 0, 3])
            d_old = d_old + (tl.reshape(old, [M, DOT]),)
        new_v, new_o, new_d = v_ptr + (first * HV + head) * V + lane, o_ptr + (first * HV + head) * V + lane, d_at + n * V
        v, beta, last, fresh = (), (), (), ()
        for g in tl.static_range(G):
            t = 4 * g + t4
            v = v + (tl.load(new_v + t * (HV * V), mask=t < tokens, other=0.0),)
            beta = beta + (tl.load(scalar_at + N + g * COLUMNS + column, mask=t < tokens, other=0.0),)
            at = window_at + t * N + g * COLUMNS + column + 1
            last = last + (tl.load(at, mask=t < tokens, other=0.0),)
        for u in tl.static_range(W - 1):
            for g in tl.static_range(G):
                at = window_at + (u * N + g * COLUMNS) + column[:, :, :, :, None] + tl.arange(0, 2)
                fresh = fresh + (tl.split(tl.load(at, mask=u < tokens, other=0.0)),)

        # A compiler moves loads down, each to its first use. It moves none beyond a barrier, and no arithmetic above a branch;
        # this one is always taken, which a compiler does not know.
        tl.debug_barrier()
        if first >= 0:
            keys, queries = (), ()
            for g in tl.static_range(G):
                acc = tl.zeros([M, COLUMNS], tl.float32)
                for p in tl.static_range(K // P):
                    parts = ()
                    for a in tl.static_range(X):
                        parts = parts + (tl.trans(spread_lanes(x[(g * X + a) * (K // P) + p])),)
                    acc = dot(split(spread_lanes(state[p])), parts, acc)
                if GDN:
                    acc *= factor[g][None, :]
                for p in tl.static_range(LM // DOT):
                    c = split(spread_lanes(coef[g * (LM // DOT) + p]))
                    acc = dot(split(d_old[p]), transpose(c), acc)
                key, query = _by_token(acc)
                keys, queries = keys + (key,), queries + (query,)

            for u in tl.static_range(W - 1):
                d = tl.where(t4 == u % 4, (v[u // 4].to(tl.float32) - keys[u // 4]) * beta[u // 4], 0.0)
                d = tl.sum(d, axis=0)[None]
                new_keys, new_queries = (), ()
                for g in tl.static_range(G):
                    key, query, later = keys[g], queries[g], 4 * g + t4 > u
                    if 4 * g + 3 > u:
                        key = tl.where(later, key + d * fresh[u * G + g][0], key)
                        query = tl.where(later, query + d * fresh[u * G + g][1], query)
                    new_keys, new_queries = new_keys + (key,), new_queries + (query,)
                keys, queries = new_keys, new_queries
            for g in tl.static_range(G):
                t = 4 * g + t4
                d = (v[g].to(tl.float32) - keys[g]) * beta[g]
                o = queries[g] + d * last[g]
                tl.store(new_o + t * (HV * V), o.to(o_ptr.dtype.element_ty), mask=t < tokens)
                tl.store(new_d + t * V, d, mask=t < tokens)
                tl.store(v_at + t * V, v[g], mask=t < tokens)
    clear_rows(o_ptr, total + r, R, head, block * M + tl.arange(0, M), T, HV, V)


def outputs(index, cursor, v, window, state, pools, *, gdn: bool, block_v: int, num_warps: int):
    """Outputs of one layer and its records v, d: arguments and result as for `project.outputs`, window from `coefficients`.

    Raises ValueError unless block_v is at least 16.
    """
    (layer, slots, verify_len, cu), (v_pool, d_pool), (x, coef, w, scalars) = index, pools, window
    requests, heads, parts, n = x.shape[:4]
    (t, v_heads, v_dim), (m, k_dim, _) = v.shape, tile_of(state, block_v)
    check_block(m)
    o = torch.empty_like(v) if requests else torch.zeros_like(v)
    if requests:
        launch(
            _outputs_kernel, (v_dim // m, v_heads, requests),
            slots, verify_len, cu, cursor, v, x, coef, w, scalars, state, v_pool, d_pool, layer, o, state.shape[1], requests,
            t, w.shape[2], n, heads, v_heads, k_dim, v_dim, v_pool.shape[3] // 2, coef.shape[3], m, parts,
            piece_width(state.dtype, k_dim), gdn, num_warps=num_warps,
        )  # fmt: skip
    return o


def check_block(block_v: int) -> None:
    if block_v < DOT.value:
        raise ValueError(f"block_v={block_v} is not allowed: projection 'precompute' needs at least {DOT.value}")
