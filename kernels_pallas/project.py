"""Replay's forward of one layer: window coefficients (pre-kernel), then outputs and records from the checkpoint.

The order of every operation is that of torch_ref/executors/replay.py; step numbers below refer to its docstring. Two
launches: `coefficients`, one program per (request, key head, block of records) or, with KDA or one token, per (request,
head), and `outputs`, one program per (V block, value head, request). The state is read once and not written.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas._compat import call, load, program_id, store, when
from kernels_pallas.channels import (
    SHORT,
    by_heads,
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
from kernels_pallas.decode import request_tokens, zero_rows
from kernels_pallas.gates import decay, inverse_norm, power_of_two, sigmoid
from kernels_pallas.recurrence import (
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
    to_fp32,
)

RECORD_LEVELS = 2
ROWS = 8  # records of one tile of a pre-kernel
LONE = 16  # history up to which one program does GDN's for one token
UNROLL = 8  # windows up to this width are unrolled
AHEAD = 1  # rows of x and c of a longer window that are in flight before the first projection


def iota(n: int, axis: int):
    """0..n-1 along `axis` of a 2-D array, the other axis having size 1."""
    return lax.broadcasted_iota(jnp.int32, (n, 1) if axis == 0 else (1, n), axis)


def scalar(i: int):
    """A Python integer as an index; interpret mode takes no plain integers."""
    return lax.full((), i, jnp.int32)


def live_half(cursor_ref, slot, length: int):
    """(n, first record) of the live half of a slot."""
    return _half(cursor_ref[slot], length)


def _half(cursor, length: int):
    """(n, first record) of the live half that a cursor points to."""
    return lax.rem(cursor, 2 * length), lax.div(cursor, 2 * length) * length


# ------------------------------------------------------------------------------------------------------- pre-kernels


def _each_token(width: int, body, carry):
    """carry <- body(t, carry) for the tokens of a window; unrolled while that is short."""
    if width > UNROLL:
        return lax.fori_loop(0, width, body, carry)
    for t in range(width):
        carry = body(scalar(t), carry)
    return carry


def _window_keys(k_pool, k_ref, where, j, n, tokens, key_head, levels):
    """Raw keys of rows j [M, 1]: record j of the live half below n, window token j - n at n and above; else zero."""
    layer, slot, base, first = where
    k_dim = k_ref.shape[2]
    old = load_pieces(k_pool, (layer, slot, key_head), base + j, k_dim, levels, mask=j < n)
    fresh = (j >= n) & (j < n + tokens)
    new = load_pieces(k_ref, (first + j - n,), key_head, k_dim, levels, mask=fresh)
    return [jnp.where(j < n, a, b) for a, b in zip(old, new, strict=True)]


def load_gates(refs, row, v_head, mask):
    """What `make_gates` makes decay and beta of: value heads v_head [N, 1] in token rows `row` [1, W]."""
    if len(refs) == 2:
        one, zero = jnp.ones((), jnp.float32), jnp.zeros((), jnp.float32)
        a = load(refs[0].at[row, v_head, jnp.zeros_like(row)], mask=mask, other=one)
        return a, load(refs[1].at[row, v_head], mask=mask, other=zero)

    def get(ref, *at):
        return load(ref.at[at], mask=mask, other=jnp.zeros((), ref.dtype))

    a, b, A_log, dt_bias = refs
    parameter = v_head + jnp.zeros_like(row)
    return get(a, row, v_head), get(b, row, v_head), get(A_log, parameter), get(dt_bias, parameter)


def make_gates(x, mask):
    """decay and beta, loaded or computed from raw logits; decay is 1 and beta 0 where `mask` is false."""
    if len(x) == 2:
        return x
    a, b, A_log, dt_bias = to_fp32(x)
    return jnp.where(mask, decay(a, A_log, dt_bias, None), 1.0), jnp.where(mask, sigmoid(b), 0.0)


def _column(x, t):
    """Column t of x [N, W] as [N, 1]; the other columns may be NaN."""
    return jnp.sum(jnp.where(iota(x.shape[1], 1) == t, x, 0.0), axis=1)[:, None]


def _gdn_kernel(
    layer_ref, slots_ref, lens_ref, cu_ref, cursor_ref, q_ref, k_ref, *refs,
    heads: int, width: int, scale: float, m: int, warps: int, interpret: bool
):  # fmt: skip
    """Steps 1 and 2 of GDN for m records of one request and key head: c_jt; one more block does k^, q^, P(0->t) and the
    records."""
    *gates, k_pool, decay_pool, _, x_ref, coef_ref, scalar_ref, k_out, decay_out, beta_out = refs
    block, head, r, layer = program_id(0), program_id(1), program_id(2), layer_ref[0]
    (_, q_heads, k_dim), key_heads, v_heads = q_ref.shape, k_ref.shape[1], decay_pool.shape[2]
    length, group = k_pool.shape[3] // 2, v_heads // heads
    blocks, levels = length // m, pair_levels(k_ref.dtype, k_dim)
    slot, tokens = request_tokens(slots_ref, lens_ref, r, k_pool.shape[1] - 1)

    @when(tokens > 0)
    def _():
        first = cu_ref[r]
        n, base = live_half(cursor_ref, slot, length)
        q_head, key_head = lax.div(head, heads // q_heads), lax.div(head, heads // key_heads)
        token, members = iota(power_of_two(width), 1), iota(power_of_two(group), 0)
        inside, v_head = members < group, head * group + members
        one = jnp.ones((), jnp.float32)

        @when((block < blocks) & (block * m < n + tokens))
        def _():
            j, later = block * m + iota(m, 0), block * m + iota(m, 1)
            keys = _window_keys(k_pool, k_ref, (layer, slot, base, first), j, n, tokens, key_head, levels)
            real = inside & (token < tokens)
            a, _ = make_gates(load_gates(gates, first + token, v_head, real), real)
            norms = inverse_norm(keys, levels, interpret)
            passed = jnp.ones((members.shape[0], m), jnp.float32)  # P(j->t); dead records and missing tokens decay by 1
            for i in range(1, length):
                at = decay_pool.at[layer, slot, v_head, base + i, jnp.zeros_like(later)]
                passed = passed * load(at, mask=inside & (later < i) & (i < n), other=one)

            def advance(t, passed):
                passed = passed * jnp.where(later < n + t, _column(a, t), 1.0)
                row = first + jnp.minimum(t, tokens - 1)
                for i, (ref, own) in enumerate(((k_ref, key_head), (q_ref, q_head))):
                    x = load_row_pieces(ref, (row, own), m, k_dim, levels, warps)
                    gram = (read(keys, x, levels, interpret) * norms) * inverse_norm(x, levels, interpret)
                    gram = gram * scale if i == 1 else gram
                    store(coef_ref.at[r, v_head, 2 * t + i, later], passed * gram[None, :], mask=inside)
                return passed

            _each_token(width, advance, passed)

        @when(block == blocks)
        def _():
            t = iota(power_of_two(width), 0)
            k, q = (
                load_pieces(ref, (first + t,), own, k_dim, levels, mask=t < tokens)
                for ref, own in ((k_ref, key_head), (q_ref, q_head))
            )
            real = inside & (token < tokens)
            a, beta = make_gates(load_gates(gates, first + token, v_head, real), real)
            passed = jnp.ones((members.shape[0], token.shape[1]), jnp.float32)  # P(0->t)
            for i in range(length):
                at = decay_pool.at[layer, slot, v_head, base + i, jnp.zeros_like(token)]
                passed = passed * load(at, mask=inside & (i < n), other=one)
            passed = lax.fori_loop(0, tokens, lambda i, p: p * jnp.where(token >= i, _column(a, i), 1.0), passed)
            k_hat, q_hat = _normalise(k, levels, interpret), [p * scale for p in _normalise(q, levels, interpret)]
            store_pieces(x_ref, (r, head), 2 * t, k_hat, k_dim, levels, mask=t < width)
            store_pieces(x_ref, (r, head), 2 * t + 1, q_hat, k_dim, levels, mask=t < width)
            store(scalar_ref.at[r, v_head, 2 * token], passed, mask=inside & (token < width))
            store(scalar_ref.at[r, v_head, 2 * token + 1], beta, mask=inside & (token < width))
            record = base + n + token
            store(decay_out.at[layer, slot, v_head, record, jnp.zeros_like(token)], a, mask=real)
            store(beta_out.at[layer, slot, v_head, record], beta, mask=real)
            owner = lax.rem(head, heads // key_heads) == 0
            store_pieces(k_out, (layer, slot, key_head), base + n + t, k, k_dim, levels, mask=(t < tokens) & owner)


def _gdn_one_kernel(
    layer_ref, slots_ref, lens_ref, cu_ref, cursor_ref, q_ref, k_ref, *refs,
    heads: int, scale: float, warps: int, interpret: bool
):  # fmt: skip
    """`_gdn_kernel` for W = 1 and all records of a short history in one program, which loads everything at once."""
    *gates, k_pool, decay_pool, _, x_ref, coef_ref, scalar_ref, k_out, decay_out, beta_out = refs
    head, r, layer = program_id(0), program_id(1), layer_ref[0]
    (_, q_heads, k_dim), key_heads, v_heads = q_ref.shape, k_ref.shape[1], decay_pool.shape[2]
    length, group = k_pool.shape[3] // 2, v_heads // heads
    levels = pair_levels(k_ref.dtype, k_dim)
    slot, tokens = request_tokens(slots_ref, lens_ref, r, k_pool.shape[1] - 1)
    first, cursor = cu_ref[r], load(cursor_ref.at[slot], mask=tokens > 0, other=jnp.zeros((), jnp.int32))
    n, base = _half(cursor, length)

    @when((tokens > 0) & (layer >= 0) & (first >= 0))
    def _():
        q_head, key_head = lax.div(head, heads // q_heads), lax.div(head, heads // key_heads)
        members, one = iota(power_of_two(group), 0), jnp.ones((), jnp.float32)
        inside, v_head, j, later = members < group, head * group + members, iota(length, 0), iota(length, 1)
        raw_keys = load_raw_pieces(k_pool, (layer, slot, key_head), base + j, k_dim, levels, mask=j < n)
        raw_k = load_raw_rows(k_ref, (first, key_head), length, k_dim, levels, warps)
        raw_q = load_raw_rows(q_ref, (first, q_head), length, k_dim, levels, warps)
        gate = load_gates(gates, first + jnp.zeros_like(members), v_head, inside)
        decays = [  # dead records decay by 1
            load(decay_pool.at[layer, slot, v_head, base + i, jnp.zeros_like(later)], mask=inside & (i < n), other=one)
            for i in range(length)
        ]

        # always true, which a compiler does not know: it would move the loads down, each to its first use
        @when(cursor >= 0)
        def _():
            passed = passed_0 = jnp.ones((members.shape[0], length), jnp.float32)
            for i, alpha in enumerate(decays):  # P(j->t) and P(0->t)
                passed, passed_0 = passed * jnp.where(later < i, alpha, 1.0), passed_0 * alpha
            a, beta = make_gates(gate, inside)
            passed, passed_0 = passed * jnp.where(later < n, a, 1.0), passed_0 * a
            keys, k_rows, q_rows = to_fp32(raw_keys), to_fp32(raw_k), to_fp32(raw_q)
            k, q = expand_rows(k_rows, length), expand_rows(q_rows, length)
            k_norm, q_norm = inverse_norm(k, levels, interpret), inverse_norm(q, levels, interpret)
            norms = jnp.where((j == n).reshape(length), k_norm, inverse_norm(keys, levels, interpret))
            keys = [jnp.where(j == n, x, y) for x, y in zip(k, keys, strict=True)]
            k_gram = (read(keys, k, levels, interpret) * norms) * k_norm
            q_gram = ((read(keys, q, levels, interpret) * norms) * q_norm) * scale
            store(coef_ref.at[r, v_head, 0, later], passed * k_gram[None, :], mask=inside)
            store(coef_ref.at[r, v_head, 1, later], passed * q_gram[None, :], mask=inside)
            line, owner = iota(k_rows[0].shape[0], 0), lax.rem(head, heads // key_heads) == 0
            only = line == 0  # rows are equal: the first is stored
            k_hat, q_hat = _normalise(k_rows, levels, interpret), _normalise(q_rows, levels, interpret)
            for i, y in enumerate((k_hat, [p * scale for p in q_hat])):
                store_pieces(x_ref, (r, head), i + line, y, k_dim, levels, mask=only)
            store_pieces(k_out, (layer, slot, key_head), base + n + line, k_rows, k_dim, levels, mask=only & owner)
            record, zeroth = base + n + jnp.zeros_like(members), jnp.zeros_like(members)
            store(scalar_ref.at[r, v_head, later], passed_0, mask=inside & (later == 0))
            store(scalar_ref.at[r, v_head, zeroth + 1], beta, mask=inside)
            store(decay_out.at[layer, slot, v_head, record, zeroth], a, mask=inside)
            store(beta_out.at[layer, slot, v_head, record], beta, mask=inside)


def _normalise(pieces, levels, interpret):
    norm = inverse_norm(pieces, levels, interpret)
    return [p * norm[:, None] for p in pieces]


def _kda_kernel(
    layer_ref, slots_ref, lens_ref, cu_ref, cursor_ref, *refs,
    width: int, scale: float, lower_bound: float | None, interpret: bool
):  # fmt: skip
    """Steps 1 and 2 of KDA for one request and head: c_jt and P(0->t) x, and the records k, decay, beta."""
    *tokens_refs, _, _, _, x_ref, coef_ref, scalar_ref, k_out, decay_out, beta_out = refs
    head, r, layer = program_id(0), program_id(1), layer_ref[0]
    k_dim, length = k_out.shape[4], k_out.shape[3] // 2
    levels = pair_levels(k_out.dtype, k_dim)
    slot, tokens = request_tokens(slots_ref, lens_ref, r, k_out.shape[1] - 1)
    first = cu_ref[r]

    @when((tokens > 0) & (first >= 0) & (layer >= 0))  # all known: a compiler waits for them once
    def _():
        n, base = live_half(cursor_ref, slot, length)
        lead = layer, slot, head
        tiles, passed = history(k_out, decay_out, lead, base, n, ROWS, length, levels, interpret)

        def put(i, column, values, mask):
            store(coef_ref.at[r, head, column, n + i], values, mask=mask)

        if width > SHORT:
            j = jnp.arange(ROWS, dtype=jnp.int32)

            def advance(t, carry):
                tiles, passed, keys = carry
                records = k_out, decay_out, beta_out
                q, k, alpha, beta = one_token(
                    t, tokens_refs, first, head, tokens, records, lead, base + n, levels, scale, lower_bound, interpret
                )
                keys = store_token_products(put, t, keys, q, k, alpha, tokens, levels, interpret)
                tiles, passed = decayed(tiles, alpha), passed * alpha
                for i, x in enumerate((k, q)):
                    for p, tile in enumerate(tiles):
                        at = p * ROWS + j
                        store(coef_ref.at[r, head, 2 * t + i, at], sums(tile * x, levels, interpret), mask=at < n)
                    store(x_ref.at[r, head, 2 * t + i, channels(k_dim)], passed * x)
                store(scalar_ref.at[r, head, 2 * t + 1 + jnp.arange(1, dtype=jnp.int32)], beta)
                return tiles, passed, keys

            keys = jnp.zeros((power_of_two(width), k_dim), jnp.float32)
            lax.fori_loop(0, width, advance, (tiles, passed, keys))
            return

        x = load_window(tokens_refs, first, head, tokens, width)
        q, k, alphas, raw, beta = window(x, levels, scale, lower_bound, interpret)
        store_window(k_out, decay_out, beta_out, lead, base + n, alphas, raw, beta, tokens)

        store_products(put, q, k, alphas, tokens, levels, interpret)
        i, is_q = jnp.arange(2 * ROWS, dtype=jnp.int32), iota(2 * ROWS, 0) >= ROWS
        for p, tile in enumerate(tiles):

            @when(n > p * ROWS)
            def _(p=p, tile=tile):
                both = jnp.stack([tile, tile], axis=-1).transpose(2, 0, 1).reshape(2 * ROWS, k_dim)
                for t in range(width):
                    both = both * alphas[t]
                    c = sums(both * jnp.where(is_q, q[t], k[t]), levels, interpret)
                    j = p * ROWS + lax.rem(i, ROWS)
                    store(coef_ref.at[r, head, 2 * t + lax.div(i, ROWS), j], c, mask=j < n)

        for t in range(width):
            passed = passed * alphas[t]
            store(x_ref.at[r, head, scalar(2 * t), channels(k_dim)], passed * k[t])
            store(x_ref.at[r, head, scalar(2 * t + 1), channels(k_dim)], passed * q[t])
        t = jnp.arange(beta.shape[0], dtype=jnp.int32)
        store(scalar_ref.at[r, head, 2 * t + 1], beta, mask=t < width)


def coefficients(
    index, cursor, tokens, pools, *, width: int, scale: float, lower_bound: float | None = None, num_warps: int = 1
):
    """Everything about a window that does not involve the state, and its records k, decay, beta.

    index: (layer [1], slots [R], verify_len [R], cu [R+1]) int32; cursor [S] int32 (the forward's copy). tokens, GDN: raw
    q [T, H, K] and k [T, KH, K], then decay [T, HV, 1] and beta [T, HV] fp32, or the raw a, b [T, HV], A_log and dt_bias
    [HV] whose gates are then computed inside. KDA: q^, k^ [T, HV, K], decay [T, HV, K], beta [T, HV] fp32 and raw k, or the
    raw q, k, a [T, HV * K], b, A_log [HV] and dt_bias [HV * K].
    pools: k [layers, S, KH, 2L, K], decay [layers, S, HV, 2L, G], beta [layers, S, HV, 2L], written at the records
    n..n+T_r-1 of each live half; donate them.

    Returns x [R, heads, 2W, K] fp32 (row 2t is k^_t, 2t+1 is q^_t scaled; KDA: times P(0->t)), c [R, HV, 2W, L] fp32
    (columns n + i are window tokens i), scalars [R, HV, 2W] fp32 (2t: P(0->t) in GDN, 2t+1: beta), and the pools. Rows of
    requests that are not live, and columns of c at n + T_r and beyond, may be left unwritten. heads is H when H = KH, else
    HV.
    """
    q, k, *rest = tokens
    requests, (v_heads, double, gates), k_dim = index[1].shape[0], pools[1].shape[2:], q.shape[2]
    length, gdn, lone = double // 2, gates == 1, gates == 1 and width == 1 and double // 2 <= LONE
    heads, rows = q.shape[1] if q.shape[1] == k.shape[1] else v_heads, min(ROWS, length)
    scratch = [
        jax.ShapeDtypeStruct((requests, heads, 2 * width, k_dim), jnp.float32),
        jax.ShapeDtypeStruct((requests, v_heads, 2 * width, length), jnp.float32),
        jax.ShapeDtypeStruct((requests, v_heads, 2 * width), jnp.float32),
    ]
    if lone:
        grid, static = (heads, requests), dict(heads=heads, warps=num_warps)
    elif gdn:
        grid, static = (length // rows + 1, heads, requests), dict(width=width, heads=heads, m=rows, warps=num_warps)
    else:
        grid, static, tokens = (heads, requests), dict(width=width, lower_bound=lower_bound), (q, k, *by_heads(rest, v_heads))
    x, coef, scalars, *pools = call(
        _gdn_one_kernel if lone else _gdn_kernel if gdn else _kda_kernel,
        (*scratch, *(jax.ShapeDtypeStruct(p.shape, p.dtype) for p in pools)),
        grid=grid,
        name=f"replay_coefficients_{'gdn' if gdn else 'kda'}_w{width}",
        num_warps=num_warps,
        aliases={len(index) + 1 + len(tokens) + i: 3 + i for i in range(3)},
        scale=scale,
        **static,
    )(*index, cursor, *tokens, *pools)
    return x, coef, scalars, pools


# ------------------------------------------------------------------------------------------------------- main kernel


def _outputs_kernel(
    layer_ref, slots_ref, lens_ref, cu_ref, cursor_ref, v_ref, x_ref, coef_ref, scalar_ref, state_ref, v_pool, d_pool,
    o_ref, v_out, d_out, *, width: int, gdn: bool, block_v: int, warps: int, interpret: bool,
):  # fmt: skip
    """Steps 3 to 7 for one request, value head and block of V, and the records v and d."""
    block, head, r, layer = program_id(0), program_id(1), program_id(2), layer_ref[0]
    x_heads, k_dim = x_ref.shape[1], x_ref.shape[3]
    v_heads, length = v_ref.shape[1], d_pool.shape[3] // 2
    levels = pair_levels(state_ref.dtype, k_dim)
    slot, tokens = request_tokens(slots_ref, lens_ref, r, state_ref.shape[1] - 1)
    x_head = lax.div(head, v_heads // x_heads)
    rows = block * block_v + iota(block_v, 0)
    lane = block * block_v + jnp.arange(block_v, dtype=jnp.int32)
    zero = jnp.zeros((), jnp.float32)

    @when(tokens > 0)
    def _():
        first = cu_ref[r]
        n, base = live_half(cursor_ref, slot, length)
        state = load_pieces(state_ref, (layer, slot, head), rows, k_dim, levels)
        # the mask hides that d is contiguous along V: the compiler then loads d in the layout of the state tile, instead of
        # loading it in another one and converting through shared memory
        d_rows = rows & 0x7FFFFFFF
        d_old = [
            load(d_pool.at[layer, slot, head, base + cols, d_rows], mask=cols < n, other=zero)
            for cols in _record_columns(length)
        ]

        def load_coefficients(i):
            """Row i of c as pieces, 0 beyond the live records, as d is: c may hold anything there."""
            columns = _record_columns(length)
            if levels == RECORD_LEVELS:
                c = load_rows(coef_ref, (r, head, i), block_v, length, RECORD_LEVELS, warps)
                return expand_rows([jnp.where(cols < n, x, 0.0) for cols, x in zip(columns, c, strict=True)], block_v)
            every = jnp.zeros_like(rows)  # a whole tile, or d and c get different layouts
            return [load(coef_ref.at[r, head, i, cols + every], mask=cols + every < n, other=zero) for cols in columns]

        def fetch(i):
            """Row i of x and of c."""
            return load_rows(x_ref, (r, x_head, i), block_v, k_dim, levels, warps), load_coefficients(i)

        def project(i, row):
            """Checkpoint and live records under row i of x and c: steps 3 to 5."""
            x, c = expand_rows(row[0], block_v), row[1]
            lanes = lane_sums([a * b for a, b in zip(state, x, strict=True)], levels)
            if gdn:
                lanes = lanes * load(scalar_ref.at[r, head, i - lax.rem(i, 2)])
            return finish(lanes + lane_sums([d * a for d, a in zip(d_old, c, strict=True)], RECORD_LEVELS), interpret)

        def window(h, i, d_new, limit=None):
            """h plus the window tokens d_new, or those below `limit`, by their coefficients in row i: step 6."""
            for t, d in enumerate(d_new):
                more = h + d * load(coef_ref.at[r, head, i, n + t], mask=t < tokens, other=zero)
                h = more if limit is None else jnp.where(t < limit, more, h)
            return h

        def load_v(t):
            return load(v_ref.at[first + t, head, lane], mask=t < tokens, other=jnp.zeros((), v_ref.dtype))

        def solve(v, h, t):
            return (v.astype(jnp.float32) - h) * load(scalar_ref.at[r, head, 2 * t + 1])

        def put(t, v, d, o):
            store(o_ref.at[first + t, head, lane], o.astype(o_ref.dtype), mask=t < tokens)
            store(d_out.at[layer, slot, head, base + n + t, lane], d, mask=t < tokens)
            store(v_out.at[layer, slot, head, base + n + t, lane], v, mask=t < tokens)

        if width > UNROLL:

            def body(t, d_new):
                v = load_v(t)
                d = solve(v, window(project(2 * t, fetch(2 * t)), 2 * t, d_new, t), t)
                d_new = [jnp.where(i == t, d, x) for i, x in enumerate(d_new)]
                o = project(2 * t + 1, fetch(2 * t + 1))
                put(t, v, d, window(o, 2 * t + 1, d_new, t + 1))
                return d_new

            lax.fori_loop(0, tokens, body, [jnp.zeros((block_v,), jnp.float32)] * width)
        else:
            ahead = AHEAD if width > 1 else 0
            # all projections before the substitution, which is a chain: the compiler then overlaps them; rows of a longer
            # window are fetched ahead of their turn, or a warp waits for every one of them
            x, h = [fetch(scalar(i)) for i in range(ahead)], []
            for i in range(2 * width):
                if len(x) < 2 * width:
                    x.append(fetch(scalar(len(x))))
                h.append(project(scalar(i), x[i]))
            v, d_new, o = [], [], []
            for t in range(width):
                v.append(load_v(scalar(t)))
                d_new.append(solve(v[t], window(h[2 * t], scalar(2 * t), d_new), scalar(t)))
                o.append(window(h[2 * t + 1], scalar(2 * t + 1), d_new))
            for t in range(width):
                put(scalar(t), v[t], d_new[t], o[t])

    zero_rows(o_ref, cu_ref, head, r, lane)


def _record_columns(length: int):
    """Record numbers [1, 32] in blocks whose two pair levels leave 8 values; those at L and beyond are never live."""
    size = LANES << RECORD_LEVELS
    return [p * size + iota(size, 1) for p in range(max(1, length // size))]


def outputs(index, cursor, v, window, state, pools, *, gdn: bool, block_v: int, num_warps: int):
    """Outputs of one layer and its records v, d.

    index, cursor as for `coefficients`; v [T, HV, V] raw; window: x, c and scalars of `coefficients`; state [layers, S,
    HV, V, K]; pools: v and d [layers, S, HV, 2L, V], written at the records n..n+T_r-1 of each live half. Returns o [T, HV,
    V] in v's dtype, zero in token rows that no live request owns, and the pools. Donate the pools.
    """
    x = window[0]
    requests, width, v_heads, v_dim = x.shape[0], x.shape[2] // 2, v.shape[1], v.shape[2]
    block_v = min(block_v, v_dim)
    o, *pools = call(
        _outputs_kernel,
        (jax.ShapeDtypeStruct(v.shape, v.dtype), *(jax.ShapeDtypeStruct(p.shape, p.dtype) for p in pools)),
        grid=(v_dim // block_v, v_heads, requests),
        name=f"replay_outputs_{'gdn' if gdn else 'kda'}_w{width}",
        num_warps=num_warps,
        aliases={10: 1, 11: 2},
        width=width,
        gdn=gdn,
        block_v=block_v,
        warps=num_warps,
    )(*index, cursor, v, *window, state, *pools)
    return o, pools
