"""Replay's forward of one layer, projection "precompute": the whole verify window meets the checkpoint in dot products.

The steps are those of torch_ref/executors/replay.py, with two launches as in project.py. Sums over K and over records run
on tensor cores: exact bf16 products, fp32 accumulation. An fp32 operand is cut into three bf16 parts, which is exact, and
the products that matter at fp32 precision are summed from the smallest. Windows are solved elementwise. Outputs and d are
bounded against "inline", not equal to it; their bits may depend on block_v and num_warps, on nothing else.

Columns of a window: column 2t belongs to k_t, column 2t+1 to q_t; N of them, at least 8, those beyond 2W are zero.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas._compat import barrier, call, load, program_id, store, when
from kernels_pallas.channels import (
    SHORT,
    by_heads,
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
from kernels_pallas.decode import clear_rows, request_tokens
from kernels_pallas.gates import inverse_norm, power_of_two
from kernels_pallas.project import iota, live_half, load_gates, make_gates, scalar
from kernels_pallas.recurrence import pair_levels, to_fp32

PARTS = 3
DOT = 16  # the smallest side of a dot, but for its columns
COLUMNS = 8  # columns of a dot: tokens 4g..4g+3


# --------------------------------------------------------------------------------------------------- split dot products


def split(x):
    """x as bf16 parts, most significant first, whose sum is x: fp32 is cut after 8, 16 and 24 bits of its significand."""
    if x.dtype == jnp.bfloat16:
        return [x]
    out = []
    for _ in range(PARTS):
        bits = lax.bitcast_convert_type(x, jnp.int32)
        out.append(lax.bitcast_convert_type((bits >> 16).astype(jnp.int16), jnp.bfloat16))
        x = x - lax.bitcast_convert_type(bits & -65536, jnp.float32)
    return out


def dot(a, b, acc):
    """acc + a b^T for lists of bf16 parts a [M, K], b [N, K]; products below fp32 precision are left out."""
    for s in reversed(range(PARTS)):
        for i in range(len(a)):
            if 0 <= s - i < len(b):
                acc = acc + lax.dot_general(a[i], b[s - i], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return acc


def spread_lanes(x):
    """x [M, n] with its columns in another order, that of the operand of a dot when four lanes hold a row in turns.

    The sum of a dot does not mind the order of its terms as long as both operands have the same. A lane that loads 8 (n a
    multiple of 32) or 4 neighbours needs 2 neighbours, and 2 more 8 columns further; so no value changes lanes.
    """
    m, n = x.shape
    lane = 8 if n % 32 == 0 else 4
    return x.reshape(m, n // (4 * lane), 4, lane // 2, 2).transpose(0, 1, 3, 2, 4).reshape(m, n)


# ------------------------------------------------------------------------------------------------------- pre-kernels


def _piece_columns(dtype, k: int):
    """Column numbers [1, P] of the pieces of a row of k values: what four lanes load at once, 16 bytes each; `spread_lanes`."""
    width = min(k, DOT if dtype == jnp.float32 else 2 * DOT)
    return [p * width + iota(width, 1) for p in range(k // width)]


def _pieces(ref, rows, lead, last, mask, k: int):
    """[len(rows), K] of ref[*lead, rows, last, 0:k] (`last` a tuple) in pieces; zero where `mask` [rows, 1] is false."""
    zero = jnp.zeros((), ref.dtype)
    return [load(ref.at[(*lead, rows, *last, c)], mask=mask, other=zero) for c in _piece_columns(ref.dtype, k)]


def _twice(x):
    """x again below x, when it has fewer rows than a dot takes."""
    rows = DOT // x.shape[0]
    return x if rows < 2 else jnp.broadcast_to(x[None], (rows, *x.shape)).reshape(DOT, *x.shape[1:])


def _pick(x, where):
    """The one value of x where `where`; the others may be NaN."""
    return jnp.sum(jnp.sum(jnp.where(where, x, 0.0), axis=1), axis=0)


def _gdn_kernel(
    layer_ref, slots_ref, lens_ref, cu_ref, cursor_ref, q_ref, k_ref, *refs,
    heads: int, width: int, scale: float, interpret: bool
):  # fmt: skip
    """Steps 1 and 2 of GDN for one request and key head, and the records k, decay, beta."""
    *gates, _, _, _, x_ref, coef_ref, window_ref, scalar_ref, k_out, decay_out, beta_out = refs
    head, r, layer = program_id(0), program_id(1), layer_ref[0]
    (_, q_heads, k_dim), key_heads, v_heads = q_ref.shape, k_ref.shape[1], decay_out.shape[2]
    length, group, n_cols, m = k_out.shape[3] // 2, v_heads // heads, x_ref.shape[3], coef_ref.shape[3]
    levels, one = pair_levels(k_ref.dtype, k_dim), jnp.ones((), jnp.float32)
    slot, tokens = request_tokens(slots_ref, lens_ref, r, k_out.shape[1] - 1)
    first = cu_ref[r]

    @when(tokens > 0)
    def _():
        q_head, key_head = lax.div(head, heads // q_heads), lax.div(head, heads // key_heads)
        j, i, col, rows = iota(m, 0), iota(n_cols, 0), iota(n_cols, 1), iota(max(DOT, n_cols), 0)
        t, token, is_q = lax.div(i, 2), lax.div(col, 2), lax.rem(i, 2) == 1
        # all loads; gates of all value heads of this key head: one lane for each head and column
        members = iota(power_of_two(group), 0)
        v_head, real = head * group + members, (members < group) & (token < tokens)
        own = v_head + jnp.zeros_like(token)
        raw = load_gates(gates, first + token + jnp.zeros_like(members), own, real)
        live_k = (t < tokens) & ~is_q
        x_k = _pieces(k_ref, first + t, (), (key_head,), live_k, k_dim)
        x_q = _pieces(q_ref, first + t, (), (q_head,), (t < tokens) & is_q, k_dim)
        n, base = live_half(cursor_ref, slot, length)
        keys = _pieces(k_out, base + j, (layer, slot, key_head), (), j < n, k_dim)
        if not interpret:
            barrier()  # loads stay above, and what follows below: see _outputs_kernel

        @when(first >= 0)
        def _():
            a, beta = make_gates(raw, real)
            x = [jnp.where(is_q, y, z) for y, z in zip(x_q, x_k, strict=True)]
            x_norm = inverse_norm(to_fp32(x), levels, interpret)
            column, lane_j = jnp.arange(n_cols, dtype=jnp.int32), jnp.arange(m, dtype=jnp.int32)
            scaled = jnp.where(lax.rem(column, 2) == 1, x_norm * scale, x_norm)
            x_parts = [split(y) for y in x]
            old, new = jnp.zeros((m, n_cols), jnp.float32), jnp.zeros((rows.shape[0], n_cols), jnp.float32)
            for y, parts in zip(keys, x_parts, strict=True):
                b = [spread_lanes(part) for part in parts]
                old = dot(split(spread_lanes(y)), b, old)
                new = dot([_twice(part) for part in b], b, new)
            old = (old * inverse_norm(to_fp32(keys), levels, interpret)[:, None]) * scaled[None, :]
            new = (new * _twice(x_norm)[:, None]) * scaled[None, :]

            # row 2i of `new` belongs to k_i: it acts on q_t from t = i and on k_t from t = i + 1, that is beyond column 2i
            k_token, is_k = lax.div(rows, 2), (lax.rem(rows, 2) == 0) & (rows < 2 * tokens)
            inside = jnp.where(col < 2 * tokens, token, -1)
            new = jnp.where((col > rows) & (inside >= 0), new, 0.0)
            for g in range(group):
                v = head * group + g
                passed, passed_0 = jnp.ones((m,), jnp.float32), one
                for u in range(length):
                    alpha = load(decay_out.at[layer, slot, v, base + u, scalar(0)], mask=u < n, other=one)
                    passed_0 = passed_0 * alpha
                    passed = jnp.where(lane_j < u, passed * alpha, passed)
                product = passed[:, None] + jnp.zeros((m, n_cols), jnp.float32)  # P(j->t)
                fresh = jnp.ones(new.shape, jnp.float32)  # P(i->t)
                factor = passed_0 + jnp.zeros((n_cols,), jnp.float32)  # P(0->t)
                for u in range(width):
                    alpha = _pick(a, (members == g) & (col == 2 * u))
                    product = jnp.where(token >= u, product * alpha, product)
                    fresh = jnp.where((inside >= u) & (k_token < u), fresh * alpha, fresh)
                    factor = jnp.where(column >= 2 * u, factor * alpha, factor)
                store(window_ref.at[r, v, jnp.where(is_k, k_token, width), col], new * fresh, mask=is_k)
                store(coef_ref.at[r, v, col, j], jnp.where(j < n, old * product, 0.0))
                store(scalar_ref.at[r, v, scalar(0), column], factor * scaled)
            store(scalar_ref.at[r, own, jnp.ones_like(own), col + jnp.zeros_like(own)], beta, mask=members < group)
            record = base + n + token + jnp.zeros_like(own)
            store(decay_out.at[layer, slot, own, record, jnp.zeros_like(own)], a, mask=real)
            store(beta_out.at[layer, slot, own, record], beta, mask=real)
            for c, parts in zip(_piece_columns(k_ref.dtype, k_dim), x_parts, strict=True):
                for p, part in enumerate(parts):
                    store(x_ref.at[r, head, scalar(p), i, c], part)

            @when(lax.rem(head, heads // key_heads) == 0)
            def _():
                for c, y in zip(_piece_columns(k_ref.dtype, k_dim), x_k, strict=True):
                    store(k_out.at[layer, slot, key_head, jnp.where(live_k, base + n + t, 2 * length), c], y, mask=live_k)


def _kda_kernel(
    layer_ref, slots_ref, lens_ref, cu_ref, cursor_ref, *refs,
    width: int, scale: float, lower_bound: float | None, interpret: bool
):  # fmt: skip
    """Steps 1 and 2 of KDA for one request and head, and the records k, decay, beta."""
    *tokens_refs, _, _, _, x_ref, coef_ref, window_ref, scalar_ref, k_out, decay_out, beta_out = refs
    head, r, layer = program_id(0), program_id(1), layer_ref[0]
    k_dim, length, n_cols, m = k_out.shape[4], k_out.shape[3] // 2, x_ref.shape[3], coef_ref.shape[3]
    levels = pair_levels(k_out.dtype, k_dim)
    slot, tokens = request_tokens(slots_ref, lens_ref, r, k_out.shape[1] - 1)
    first = cu_ref[r]

    @when((tokens > 0) & (first >= 0) & (layer >= 0))  # all known: a compiler waits for them once
    def _():
        n, base = live_half(cursor_ref, slot, length)
        lead = layer, slot, head
        tiles, passed_0 = history(k_out, decay_out, lead, base, n, DOT, m, levels, interpret)
        i, passed = iota(n_cols, 0), jnp.ones((1, k_dim), jnp.float32)

        def put(i, column, values, mask):
            store(window_ref.at[r, head, i, column], values, mask=mask)

        def advance(t, carry):
            keys, cols, passed = carry
            records = k_out, decay_out, beta_out
            q, k, alpha, beta = one_token(
                t, tokens_refs, first, head, tokens, records, lead, base + n, levels, scale, lower_bound, interpret
            )
            keys = store_token_products(put, t, keys, q, k, alpha, tokens, 2, interpret)
            store(scalar_ref.at[r, head, scalar(1), 2 * t + jnp.arange(1, dtype=jnp.int32)], beta)
            passed = passed * alpha
            cols = jnp.where(i == 2 * t, k * passed, cols)
            return keys, jnp.where(i == 2 * t + 1, q * passed, cols), passed

        # columns are decayed to the start of the window, and further to the checkpoint
        if width <= SHORT:
            x = load_window(tokens_refs, first, head, tokens, width)
            q, k, alphas, raw, beta = window(x, levels, scale, lower_bound, interpret)
            store_window(k_out, decay_out, beta_out, lead, base + n, alphas, raw, beta, tokens)
            store_products(put, q, k, alphas, tokens, 2, interpret)
            t, rows = jnp.arange(beta.shape[0], dtype=jnp.int32), []
            store(scalar_ref.at[r, head, scalar(1), 2 * t], beta)
            for t in range(width):
                passed = passed * alphas[t]
                rows += [k[t] * passed, q[t] * passed]
            cols = stack(rows, n_cols)
        else:
            keys, cols = (jnp.zeros((rows, k_dim), jnp.float32) for rows in (power_of_two(width), n_cols))
            _, cols, _ = lax.fori_loop(0, width, advance, (keys, cols, passed))
        for p, part in enumerate(split(cols * passed_0)):
            store(x_ref.at[r, head, scalar(p), i, channels(k_dim)], part)
        parts = split(cols)
        for p, tile in enumerate(tiles):
            c = dot(split(tile), parts, jnp.zeros((DOT, n_cols), jnp.float32))
            store(coef_ref.at[r, head, iota(n_cols, 1), p * DOT + iota(DOT, 0)], c)


def columns(width: int) -> int:
    """N: columns of a window."""
    return max(COLUMNS, 2 * power_of_two(width))


def coefficients(
    index, cursor, tokens, pools, *, width: int, scale: float, lower_bound: float | None = None, num_warps: int = 1
):
    """Everything about a window that does not involve the state, and its records k, decay, beta.

    Arguments as for `project.coefficients`. Returns x [R, heads, P, N, K] bf16 parts of the columns (GDN: raw rows, P = 1 or
    3 by their dtype; KDA: P(0->t) x, P = 3), c [R, HV, N, max(L, 16)] fp32, the coefficients of live records, the others
    zero, w [R, HV, W, N] fp32, the coefficients of window tokens in the columns that they reach, scalars [R, HV, 2, N] fp32
    (GDN: factor of a column, P(0->t) times norm and scale; then beta_t in column 2t), and the pools. Rows of requests that
    are not live, w beyond T_r and its other columns may be left unwritten. heads is H when H = KH, else HV.
    """
    q, k, *rest = tokens
    requests, (v_heads, double, gates), k_dim = index[1].shape[0], pools[1].shape[2:], q.shape[2]
    gdn, n = gates == 1, columns(width)
    heads = q.shape[1] if q.shape[1] == k.shape[1] else v_heads
    parts = 1 if gdn and k.dtype == jnp.bfloat16 else PARTS
    scratch = [
        jax.ShapeDtypeStruct((requests, heads, parts, n, k_dim), jnp.bfloat16),
        jax.ShapeDtypeStruct((requests, v_heads, n, max(DOT, double // 2)), jnp.float32),
        jax.ShapeDtypeStruct((requests, v_heads, width, n), jnp.float32),
        jax.ShapeDtypeStruct((requests, v_heads, 2, n), jnp.float32),
    ]
    if gdn:
        static = dict(heads=heads)
    else:
        static, tokens = dict(lower_bound=lower_bound), (q, k, *by_heads(rest, v_heads))
    *coef, k, decays, beta = call(
        _gdn_kernel if gdn else _kda_kernel,
        (*scratch, *(jax.ShapeDtypeStruct(p.shape, p.dtype) for p in pools)),
        grid=(heads, requests),
        name=f"replay_precompute_coefficients_{'gdn' if gdn else 'kda'}_w{width}",
        num_warps=num_warps,
        aliases={len(index) + 1 + len(tokens) + i: len(scratch) + i for i in range(3)},
        width=width,
        scale=scale,
        **static,
    )(*index, cursor, *tokens, *pools)
    return *coef, [k, decays, beta]


# ------------------------------------------------------------------------------------------------------- main kernel

# The accumulator of a dot holds rows g and g + 8 of 16, columns 2t and 2t+1 in lane 4g + t: those of token t. Its row 8h + g
# stands for row 2g + h of V, so that a lane holds neighbours in memory. A tile [B, 8, 2, 4], B = block_v / 16, of (16 rows,
# g, h, t) is laid out alike when it is loaded: nothing changes lanes but d_t, which all later tokens need.


def _along(axis: int, n: int, dims: int = 4):
    """0..n-1 along `axis` of an array of `dims` dimensions, the others having size 1."""
    return lax.broadcasted_iota(jnp.int32, tuple(n if i == axis else 1 for i in range(dims)), axis)


def _halves(x):
    """x [.., 2] as its two columns."""
    return [y.reshape(x.shape[:-1]) for y in lax.split(x, (1, 1), axis=x.ndim - 1)]


def _by_token(h, block_v: int):
    """h [M, 8] as two tiles [B, 8, 2, 4]: its even columns and its odd ones."""
    return _halves(h.reshape(block_v // DOT, 2, 8, 4, 2).transpose(0, 2, 1, 3, 4))


def _outputs_kernel(
    layer_ref, slots_ref, lens_ref, cu_ref, cursor_ref, v_ref, x_ref, coef_ref, window_ref, scalar_ref, state_ref, v_pool,
    d_pool, o_ref, v_out, d_out, *, gdn: bool, block_v: int, interpret: bool,
):  # fmt: skip
    """Steps 3 to 7 for one request, value head and block of V, and the records v and d."""
    block, head, r, layer = program_id(0), program_id(1), program_id(2), layer_ref[0]
    (_, x_heads, parts, n_cols, k_dim), width = x_ref.shape, window_ref.shape[2]
    v_heads, m, b = v_ref.shape[1], coef_ref.shape[3], block_v // DOT
    slot, tokens = request_tokens(slots_ref, lens_ref, r, state_ref.shape[1] - 1)
    first, total = cu_ref[r], cu_ref[cu_ref.shape[0] - 1]
    zero, groups = jnp.zeros((), jnp.float32), range(n_cols // COLUMNS)

    @when((tokens > 0) & (layer >= 0))  # layer: so that it is loaded before the branch
    def _():
        # the state first: it is nearly all of the traffic, and depends only on the slot
        n, base = live_half(cursor_ref, slot, d_pool.shape[3] // 2)
        x_head, i, j, spot = lax.div(head, v_heads // x_heads), iota(COLUMNS, 0), iota(block_v, 0), (layer, slot, head)
        rows = block * block_v + lax.div(j, DOT) * DOT + lax.rem(j, 8) * 2 + lax.rem(lax.div(j, 8), 2)
        lane, t4 = block * block_v + _along(0, b) * DOT + _along(1, 8) * 2 + _along(2, 2), _along(3, 4)
        pieces = _piece_columns(state_ref.dtype, k_dim)
        state = [load(state_ref.at[(*spot, rows, p)]) for p in pieces]
        x = [[[load(x_ref.at[r, x_head, scalar(a), g * COLUMNS + i, p]) for a in range(parts)] for p in pieces] for g in groups]
        factor = [load(scalar_ref.at[r, head, scalar(0), g * COLUMNS + jnp.arange(COLUMNS, dtype=jnp.int32)]) for g in groups]
        coef = [[load(coef_ref.at[r, head, g * COLUMNS + i, p * DOT + iota(DOT, 1)]) for p in range(m // DOT)] for g in groups]
        d_old, v, beta, last, fresh = [], [], [], [], []
        for p in range(m // DOT):
            j = p * DOT + _along(4, 4, 5) * 4 + _along(0, 4, 5)
            d = load(d_pool.at[(*spot, base + j, lane[None])], mask=j < n, other=zero)
            d_old.append(d.reshape(2, 2, b, 8, 2, 4).transpose(2, 4, 3, 0, 5, 1).reshape(block_v, DOT))
        for g in groups:
            t, wide = 4 * g + t4, _along(1, 8) * 0
            v.append(load(v_ref.at[first + t, head, lane], mask=t < tokens, other=jnp.zeros((), v_ref.dtype)))
            beta.append(load(scalar_ref.at[r, head, scalar(1), 2 * t + wide], mask=t < tokens, other=zero))
            last.append(load(window_ref.at[r, head, t, 2 * t + 1 + wide], mask=t < tokens, other=zero))
        for u in range(width - 1):
            at = [g * COLUMNS + 2 * t4[..., None] + wide[..., None] + _along(4, 2, 5) for g in groups]
            fresh.append([_halves(load(window_ref.at[r, head, scalar(u), c], mask=u < tokens, other=zero)) for c in at])

        # A compiler moves loads down, each to its first use. It moves none beyond a barrier, and no arithmetic above a branch;
        # this one is always taken, which a compiler does not know.
        if not interpret:
            barrier()

        @when(first >= 0)
        def _():
            h = []
            for g in groups:
                acc = jnp.zeros((block_v, COLUMNS), jnp.float32)
                for s, x_parts in zip(state, x[g], strict=True):
                    acc = dot(split(spread_lanes(s)), [spread_lanes(y) for y in x_parts], acc)
                if gdn:
                    acc = acc * factor[g][None, :]
                for d, c in zip(d_old, coef[g], strict=True):
                    acc = dot(split(d), split(spread_lanes(c)), acc)
                h.append(_by_token(acc, block_v))

            def corrected(g):
                return (v[g].astype(jnp.float32) - h[g][0]) * beta[g]

            for u in range(width - 1):
                d = jnp.sum(jnp.where(t4 == u % 4, corrected(u // 4), 0.0), axis=3)[..., None]
                for g in groups[u // 4 :]:
                    later = 4 * g + t4 > u
                    h[g] = [jnp.where(later, y + d * w, y) for y, w in zip(h[g], fresh[u][g], strict=True)]
            for g in groups:
                t, d = 4 * g + t4, corrected(g)
                store(o_ref.at[first + t, head, lane], (h[g][1] + d * last[g]).astype(o_ref.dtype), mask=t < tokens)
                store(d_out.at[(*spot, base + n + t, lane)], d, mask=t < tokens)
                store(v_out.at[(*spot, base + n + t, lane)], v[g], mask=t < tokens)

    clear_rows(o_ref, total + r, cu_ref.shape[0] - 1, head, block * block_v + jnp.arange(block_v, dtype=jnp.int32))


def outputs(index, cursor, v, window, state, pools, *, gdn: bool, block_v: int, num_warps: int):
    """Outputs of one layer and its records v, d: arguments and results as for `project.outputs`, window from `coefficients`.

    Raises ValueError unless block_v is at least 16.
    """
    requests, (_, v_heads, v_dim) = index[1].shape[0], v.shape
    block_v = min(block_v, v_dim)
    check_block(block_v)
    o, *pools = call(
        _outputs_kernel,
        (jax.ShapeDtypeStruct(v.shape, v.dtype), *(jax.ShapeDtypeStruct(p.shape, p.dtype) for p in pools)),
        grid=(v_dim // block_v, v_heads, requests),
        name=f"replay_precompute_outputs_{'gdn' if gdn else 'kda'}_w{window[2].shape[2]}",
        num_warps=num_warps,
        aliases={11: 1, 12: 2},
        gdn=gdn,
        block_v=block_v,
    )(*index, cursor, v, *window, state, *pools)
    return o, pools


def check_block(block_v: int) -> None:
    if block_v < DOT:
        raise ValueError(f"block_v={block_v} is not allowed: projection 'precompute' needs at least {DOT}")
