"""Mode "replay": one checkpoint, a bounded history of accepted records and a cursor; a rollback is a cursor that stays.

Outputs come from the checkpoint S0 and the corrected values d, without rebuilding the state (ReplaySSM, LightLLM PR 1585):
    h_t(x) = S0 (P(0->t) x) + sum_j d_j <P(j->t) k^_j, x>,   d_t = (v_t - h_t(k^_t)) beta_t,   o_t = h_t(q^_t)
where j runs over live records and earlier window tokens and P(j->t) is the product of decays after j up to t. The
checkpoint itself advances only by folding raw inputs through the recurrence (`materialize`).

The order of the fp32 operations of projection "inline" is a contract that every kernel reproduces to the bit. Each
operation rounds by itself. csum is the canonical sum over K; its pair levels follow ssm_dtype where the state is
summed (csum_S) and act_dtype where keys are summed (csum_k). x is k^_t or q^_t, x_raw the raw k_t or q_t, r the inverse
norm rsqrt(csum_k(x_raw^2) + 1e-6) of a key or query, recomputed from the raw row.

1. Decay products, by running multiplication forward in time, starting from 1:
     P(0->t)  = ((a_1 * a_2) * .. ) * a_t          over live records in history order, then window tokens
     P(j->t)  = (a_{j+1} * a_{j+2}) * .. * a_t     GDN, a scalar per value head
     kk_j     = (k^_j * a_{j+1}) * .. * a_t        KDA, the key itself is decayed, once per later token
2. Coefficients, for live records and for window tokens (i < t for k^_t, i <= t for q^_t):
     GDN      c_jt = P(j->t) * G_jt,   G_jt = (csum_k(k_j * x_raw) * r_j) * r_x      and, for queries, G_jt * scale last
     KDA      c_jt = csum_k(kk_j * x)
3. State part, 8 lanes: csum_S stopped at 8 values (zero-padded when fewer remain),
     GDN      lanes_S(S0 * x) * P(0->t)            KDA      lanes_S(S0 * (P(0->t) * x))
4. History part, 8 lanes: the L products d_j * c_jt in history order, those beyond the cursor replaced by 0; two pair
   levels; first half + second half while more than 8 remain; zero-padded when fewer.
5. h = lanes of 3 + lanes of 4, added lane by lane, then the last three halvings 8 -> 4 -> 2 -> 1.
6. Window: h = h + d_i * c_it, i ascending, one addition after the other.
7. d_t = (v_t - h_t(k^_t)) * beta_t with i < t;   o_t = h_t(q^_t) with i <= t, rounded once to the activation dtype.

Projection "precompute" (W > 1) projects the whole window first: in step 3 csum_S is carried to the end, in step 4 the
history is summed to the end by itself, and step 5 adds the two numbers. Its outputs, and the d it records, differ from
"inline" in the last bits; folds read raw inputs only, so both leave the same checkpoint.
"""

from __future__ import annotations

import torch

from torch_ref.acceptance import SSMForward
from torch_ref.executors import native
from torch_ref.executors.compact import put_records
from torch_ref.executors.materialize import materialize_into
from torch_ref.executors.recurrence import expand_heads
from torch_ref.executors.recurrence import replay as replay_records
from torch_ref.gates import CoreInputs, LinearInputs, canonical_sum, halve, inverse_norm, l2norm, lane_sums, pair_levels
from torch_ref.layout import DecodeLayout, to_rows
from torch_ref.spec import SSMSpec
from torch_ref.state import ConvSSMState

Tensor = torch.Tensor
RECORD_PAIR_LEVELS = 2


def live(spec: SSMSpec, cursor):
    """(n, phase) of a cursor c = phase * 2L + n; c is an int or a tensor."""
    return cursor % (2 * spec.history), cursor // (2 * spec.history)


def prepare(spec: SSMSpec, state: ConvSSMState, layout: DecodeLayout, kernels: str) -> ConvSSMState:
    """Once per batch, for all layers: fold the rows whose window does not fit, flip them, publish the forward cursor.

    A row folds iff T_r > 0 and n + T_r > L. The window then goes to the other half; the old half stays intact.
    """
    h = state.extra
    if kernels == "triton":
        from kernels_triton import history

        records, rows = (h.k, h.v, h.decay, h.beta), (layout.slots, layout.verify_len)
        history.prepare(state.ssm, records, h.cursor, h.forward_cursor, *rows)
        return state
    for slot, tokens in zip(layout.slots.tolist(), layout.verify_len.tolist(), strict=True):
        if tokens == 0:
            continue
        n, phase = live(spec, int(h.cursor[slot]))
        if n + tokens > spec.history:
            state.ssm[:, slot] = materialize(spec, state, slot)
            h.cursor[slot] = (1 - phase) * 2 * spec.history
        h.forward_cursor[slot] = h.cursor[slot]
    return state


def materialize(spec: SSMSpec, state: ConvSSMState, slot: int) -> Tensor:
    """Canonical state [layers, HV, V, K] of one slot in ssm_dtype: its checkpoint advanced by its live raw records.

    The one function behind automatic fold, merge, snapshot and export. The recurrence is that of native decode, k^
    is recomputed from raw k, and the result is rounded once, at the end. The state is not changed.
    """
    h = state.extra
    n, phase = live(spec, int(h.cursor[slot]))
    records = slice(phase * spec.history, phase * spec.history + n)
    k = expand_heads(h.k[:, slot, :, records], spec.v_heads, 1)
    v, decay, beta = h.v[:, slot, :, records], h.decay[:, slot, :, records], h.beta[:, slot, :, records]
    s = replay_records(spec, state.ssm[:, slot].float(), k, v, decay, beta, n, round_each=False)
    return s.to(state.ssm.dtype)


def forward(
    spec: SSMSpec, state: ConvSSMState, receipt: SSMForward, row: int, core: CoreInputs | LinearInputs
) -> tuple[ConvSSMState, Tensor]:
    """Verify: outputs o [T, HV, V] from checkpoint and history; writes T_r uncommitted records, moves no cursor."""
    if receipt.kernels == "triton":
        return state, _forward_kernel(spec, state, receipt, row, core)
    layout, w, h = receipt.layout, native.window_inputs(spec, receipt, core), state.extra
    slots = layout.slots.long()
    n, phase = live(spec, h.forward_cursor[slots].long())

    history = load_history(spec, state, row, slots, n, phase)
    o, d = window(spec, state.ssm[row, slots].float(), history, w)

    at = (phase * spec.history + n)[:, None] + torch.arange(spec.width, device=o.device)
    put_records(spec, layout, row, at, (h.k, h.v, h.d, h.decay, h.beta), (w.k, w.v, d, w.decay, w.beta))
    return state, to_rows(layout, o.to(core.v.dtype))


def _forward_kernel(spec: SSMSpec, state: ConvSSMState, receipt: SSMForward, row: int, x: CoreInputs | LinearInputs) -> Tensor:
    from kernels_triton import precompute, project

    layout, h, module = receipt.layout, state.extra, precompute if spec.precompute else project
    if isinstance(x, LinearInputs):
        tokens = (x.q, x.k, x.a, x.b, x.A_log, x.dt_bias)
    else:
        tokens = (x.q_raw, x.k, x.decay, x.beta) if spec.rule == "gdn" else (x.q, x.k_hat, x.decay, x.beta, x.k)
    tokens, v = tuple(y.contiguous() for y in tokens), x.v.contiguous()
    index = (row, layout.slots, layout.verify_len, layout.cu)
    window = module.coefficients(
        index, h.forward_cursor, tokens, (h.k, h.decay, h.beta),
        width=spec.width, scale=spec.scale, lower_bound=spec.lower_bound,
    )  # fmt: skip
    launch = receipt.config.launch(spec)
    return module.outputs(index, h.forward_cursor, v, window, state.ssm, (h.v, h.d), gdn=spec.rule == "gdn", **launch)


def load_history(spec: SSMSpec, state: ConvSSMState, row: int, slots: Tensor, n: Tensor, phase: Tensor) -> dict[str, Tensor]:
    """The live half of each slot [R], its dead records replaced on loading: they may hold anything, NaN included.

    used [R, HV, L] bool; k [R, HV, L, K] raw (act dtype), d [R, HV, L, V], decay [R, HV, L, G]. Dead records read as
    k = 0, d = 0, decay = 1.
    """
    h, position = state.extra, torch.arange(spec.history, device=slots.device)
    used = (position < n[:, None])[:, None, :].expand(-1, spec.v_heads, -1)
    at = phase[:, None] * spec.history + position

    def half(pool: Tensor, fill: float) -> Tensor:
        x = pool[row].transpose(1, 2)[slots[:, None], at].transpose(1, 2)  # [R, heads, L, ..]
        x = expand_heads(x, spec.v_heads, 1)
        return torch.where(used[..., None], x, torch.full((), fill, dtype=x.dtype, device=x.device))

    return {"used": used, "k": half(h.k, 0.0), "d": half(h.d, 0.0), "decay": half(h.decay, 1.0)}


def window(spec: SSMSpec, s0: Tensor, history: dict[str, Tensor], w: CoreInputs) -> tuple[Tensor, Tensor]:
    """Outputs and corrected values o, d [R, W, HV, V] fp32 of every window, token by token.

    s0 [R, HV, V, K] fp32 checkpoint; w as from `native.window_inputs`. Steps 1 to 7 of the module docstring.
    """
    heads, length, width = spec.v_heads, spec.history, spec.width
    gdn, whole = spec.rule == "gdn", spec.precompute
    levels_s, levels_k = pair_levels(spec.ssm_dtype, spec.k_dim), pair_levels(spec.act_dtype, spec.k_dim)

    # keys j of records, then of window tokens, as they stand at the current token: GDN raw keys, their inverse norms
    # and P(j->t); KDA normalised keys decayed in place
    window_k = expand_heads(w.k, heads, 2).transpose(1, 2)  # [R, HV, W, K]
    keys = torch.cat([history["k"], window_k], dim=2)  # [R, HV, L + W, K]
    if gdn:
        norms, keys = inverse_norm(keys), keys.float()
        passed = torch.ones_like(norms)  # P(j->t)
    else:
        keys = torch.cat([l2norm(history["k"]), w.k_hat.transpose(1, 2)], dim=2)
    passed_0 = torch.ones_like(w.decay[:, 0])  # P(0->t), [R, HV, G]
    used = history["used"]
    d_all = torch.cat([history["d"], torch.zeros_like(w.v.transpose(1, 2))], dim=2)  # [R, HV, L + W, V]

    def decay_by(a: Tensor, tokens: int) -> None:
        """Token number `tokens` (records first) decays by a [R, HV, G] everything before it."""
        nonlocal passed_0
        passed_0 = passed_0 * a
        if gdn:
            passed[:, :, :tokens] = passed[:, :, :tokens] * a
        else:
            keys[:, :, :tokens] = keys[:, :, :tokens] * a[:, :, None, :]

    def coefficients(x: Tensor, x_raw: Tensor, scale: float | None) -> Tensor:
        """c_jt [R, HV, L + W] for one query or key x of token t; entries of later tokens are not used."""
        if not gdn:
            return canonical_sum(keys * x[:, :, None, :], levels_k)
        gram = (canonical_sum(keys * x_raw.float()[:, :, None, :], levels_k) * norms) * inverse_norm(x_raw)[..., None]
        if scale is not None:
            gram = gram * scale
        return passed * gram

    def project(x: Tensor, c: Tensor, tokens: int) -> Tensor:
        """h_t(x) [R, HV, V]: checkpoint, live records, and the first `tokens` tokens of the window."""
        products = d_all[:, :, :length] * c[:, :, :length, None]
        products = torch.where(used[..., None], products, torch.zeros((), device=c.device)).transpose(2, 3)
        lanes_d = lane_sums(products, RECORD_PAIR_LEVELS)  # [R, HV, V, 8]
        if gdn:
            lanes_s = lane_sums(s0 * x[:, :, None, :], levels_s)
            lanes_s = (halve(lanes_s, 1) if whole else lanes_s) * passed_0[..., None]
        else:
            lanes_s = lane_sums(s0 * (passed_0 * x)[:, :, None, :], levels_s)
        if whole:
            h = (halve(lanes_s, 1) + halve(lanes_d, 1))[..., 0]
        else:
            h = halve(lanes_s + lanes_d, 1)[..., 0]
        for i in range(tokens):
            h = h + d_all[:, :, length + i] * c[:, :, length + i, None]
        return h

    for j in range(length):
        decay_by(history["decay"][:, :, j], j)
    outputs = []
    for t in range(width):
        decay_by(w.decay[:, t], length + t)
        c = coefficients(w.k_hat[:, t], window_k[:, :, t], None)
        d = (w.v[:, t] - project(w.k_hat[:, t], c, t)) * w.beta[:, t][..., None]
        d_all[:, :, length + t] = d
        c = coefficients(w.q[:, t], w.q_raw[:, t], spec.scale)
        outputs.append(project(w.q[:, t], c, t + 1))
    return torch.stack(outputs, dim=1), d_all[:, :, length:].transpose(1, 2)


def accept(spec: SSMSpec, state: ConvSSMState, pairs) -> ConvSSMState:
    """The cursor moves by the accepted length; no array traffic."""
    for _, _, slots, lengths in pairs:
        state.extra.cursor[slots] += lengths.int()
    return state


def merge(spec: SSMSpec, state: ConvSSMState, slots: Tensor, kernels: str) -> ConvSSMState:
    """Fold the live records of each slot [N] into its checkpoint and set its cursors to 0."""
    if kernels == "triton":
        materialize_into(spec, state, slots, slots)
    else:
        for slot in slots.tolist():
            if live(spec, int(state.extra.cursor[slot]))[0] > 0:
                state.ssm[:, slot] = materialize(spec, state, slot)
    state.extra.cursor[slots] = 0
    state.extra.forward_cursor[slots] = 0
    return state
