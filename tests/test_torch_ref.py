"""torch_ref against an independent float64 loop and a scalar emulation of its written order; modes against each other."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product

import numpy as np
import pytest
import torch
from torch_ref_harness import (
    MODES,
    RULES,
    SLOTS,
    Tokens,
    conv_oracle,
    copy_state,
    make_spec,
    oracle,
    play,
    poison_dead,
    run,
    same_outputs,
    same_pages,
    same_state,
)  # fmt: skip

import torch_ref as ref
from torch_ref.state import leaves


@pytest.mark.parametrize("rule,mode", list(product(RULES, MODES)))
def test_V1_every_mode_equals_the_float64_oracle(rule, mode):
    """V1, R5, N14, N16: fp32 activations and state, random accepted lengths, folds included; hard gates."""
    spec = make_spec(rule, mode, act_dtype="fp32")
    tokens = Tokens(spec, 40, a_log=1.0)
    state, start, outputs = run(spec, tokens, 12)
    conv, ssm = ref.snapshot(spec, state, SLOTS)
    for i, slot in enumerate(SLOTS):
        for layer in range(spec.layers):
            states, o = oracle(spec, tokens, slot, layer, start[slot])
            got = torch.cat([out[layer, slot] for out in outputs]).double().numpy()
            np.testing.assert_allclose(got, o, atol=2e-6, rtol=2e-5)
            np.testing.assert_allclose(ssm[i, layer].double().numpy(), states[-1], atol=2e-5, rtol=2e-4)
            y = torch.cat([out["conv", layer, slot] for out in outputs]).double().numpy()
            np.testing.assert_allclose(y, conv_oracle(spec, tokens, slot, layer, start[slot]), atol=2e-6, rtol=2e-5)
            window = tokens.x[slot, layer, start[slot] - spec.conv_width + 1 : start[slot]].t()
            assert torch.equal(conv[i, layer], window)
    assert not any(leaf[spec.hold].any() for leaf in leaves(state).values() if leaf.ndim == 1)
    untouched = [s for s in range(spec.slots) if s not in SLOTS]
    rows = [s * spec.rows_per_slot + i for s in untouched for i in range(spec.rows_per_slot)]
    assert not state.ssm[:, rows].any() and not state.conv[:, untouched].any()


def test_V1_oracle_is_sensitive_to_one_lost_token():
    """Planted fault: the tolerance of the test above must notice a single missing token."""
    spec = make_spec()
    tokens = Tokens(spec, 20)
    with_all, _ = oracle(spec, tokens, 7, 0, 20)
    without_last = oracle(spec, tokens, 7, 0, 19)[0][-1]
    assert np.abs(with_all[-1] - without_last).max() > 1e-2


def test_N1_long_slow_prefill_stays_at_fp32_accuracy():
    """N1, N14: 1024 tokens, slow gates, bf16 logits, fp32 state: relative L2 below 1e-5."""
    spec = make_spec(layers=1)
    tokens = Tokens(spec, 1024, a_log=-3.0)
    inputs = tokens.take(0, [(7, i) for i in range(1024)])
    batched = {f.name: getattr(inputs, f.name)[None] for f in fields(inputs) if f.name not in ("A_log", "dt_bias")}
    state, _ = ref.prefill(spec, ref.init_state(spec), 0, [7], torch.tensor([1024]), replace(inputs, **batched))
    want = oracle(spec, tokens, 7, 0, 1024)[0][-1]
    got = state.ssm[0, 7 * spec.width].double().numpy()
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 1e-5


# ------------------------------------------------------------------------------------- the written order, in scalars


F = np.float32


def scalar_sum(values, levels):
    """The canonical sum over a list of float32, written with Python lists."""
    values = [F(x) for x in values]
    while len(values) & (len(values) - 1):
        values.append(F(0))
    for _ in range(levels):
        if len(values) > 1:
            values = [F(values[2 * i] + values[2 * i + 1]) for i in range(len(values) // 2)]
    while len(values) > 1:
        half = len(values) // 2
        values = [F(values[i] + values[half + i]) for i in range(half)]
    return values[0]


def scalar_lanes(values, levels):
    values = [F(x) for x in values]
    for _ in range(levels):
        if len(values) > 1:
            values = [F(values[2 * i] + values[2 * i + 1]) for i in range(len(values) // 2)]
    while len(values) > 8:
        half = len(values) // 2
        values = [F(values[i] + values[half + i]) for i in range(half)]
    return values + [F(0)] * (8 - len(values))


@pytest.mark.parametrize("n,levels", [(1, 2), (3, 2), (16, 2), (16, 3), (48, 3), (128, 2), (128, 3), (256, 3)])
def test_canonical_sum_is_the_written_order(n, levels):
    """kernel-shapes: pair levels, then halving; and the choice of levels leaves at most 32 values."""
    p = torch.randn(5, n, generator=torch.Generator().manual_seed(n))
    want = [scalar_sum(row, levels) for row in p.numpy()]
    assert ref.canonical_sum(p, levels).tolist() == [float(x) for x in want]


def test_pair_levels_leave_at_most_32_values():
    """kernel-shapes section 2: 2 levels for fp32 storage, 3 for bf16, more where more than 32 values would remain."""
    assert [ref.pair_levels("fp32", n) for n in (1, 2, 4, 48, 128, 192, 256)] == [0, 1, 2, 2, 2, 3, 3]
    assert [ref.pair_levels("bf16", n) for n in (1, 2, 4, 48, 128, 256, 512)] == [0, 1, 2, 3, 3, 3, 4]


def test_canonical_sum_differs_from_the_library_sum():
    """Planted fault: a library reduction does not pass for the canonical sum."""
    p = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    assert not torch.equal(ref.canonical_sum(p, 2), p.sum(-1))


@pytest.mark.parametrize("rule,ssm,k_dim", [("gdn", "fp32", 16), ("gdn", "bf16", 128), ("kda", "fp32", 64), ("kda", "bf16", 4)])
def test_R75_native_step_equals_a_scalar_emulation(rule, ssm, k_dim):
    """R75, N16: decay first, then d = (v - h) * beta, then S + d k^, each operation rounded by itself."""
    spec = make_spec(rule, "native", layers=1, slots=3, k_dim=k_dim, v_dim=3, width=1, ssm_dtype=ssm)
    state, g = ref.init_state(spec), torch.Generator().manual_seed(5)
    state.ssm[:, 1] = torch.randn(state.ssm[:, 1].shape, generator=g).to(state.ssm.dtype)
    s0, core = state.ssm[0, 1].clone().float().numpy(), ref.prologue(spec, Tokens(spec, 1).take(0, [(1, 0)]))
    state, receipt = ref.prepare(spec, state, ref.build_layout(spec, torch.tensor([1]), torch.tensor([0])))
    state, o = ref.forward_core(spec, state, receipt, 0, core)
    levels, c = ref.pair_levels(ssm, k_dim), {name: x[0].float().numpy() for name, x in vars(core).items()}
    for head, i in product(range(spec.v_heads), range(spec.v_dim)):
        k_hat, q = (c[n][head // (spec.v_heads // h)] for n, h in (("k_hat", spec.k_heads), ("q", spec.q_heads)))
        s = s0[head, i] * c["decay"][head]
        d = F(F(c["v"][head, i] - scalar_sum(s * k_hat, levels)) * c["beta"][head])
        s = s + d * k_hat
        assert torch.equal(o[0, head, i], torch.tensor(scalar_sum(s * q, levels)).to(o.dtype))
        assert torch.equal(state.ssm[0, 1, head, i], torch.tensor(s).to(state.ssm.dtype))


@pytest.mark.parametrize(
    "rule,ssm,length,k_dim,phase,n",
    [("gdn", "fp32", 4, 16, 0, 1), ("gdn", "bf16", 16, 32, 1, 13), ("kda", "fp32", 8, 64, 1, 3), ("kda", "bf16", 64, 16, 0, 0),
     ("gdn", "fp32", 64, 16, 1, 9), ("kda", "fp32", 4, 4, 0, 1)],
)  # fmt: skip
def test_R75_replay_inline_order_equals_a_scalar_emulation(rule, ssm, length, k_dim, phase, n):
    """R75: steps 1-7 of executors/replay.py, redone value by value in numpy float32, give the same bits."""
    spec = make_spec(rule, "replay", layers=1, slots=3, history=length, k_dim=k_dim, v_dim=2, width=3, ssm_dtype=ssm)
    tokens, state, g = Tokens(spec, 3), ref.init_state(spec), torch.Generator().manual_seed(5)
    for name, leaf in leaves(state).items():
        if leaf.ndim > 1:
            leaf.copy_(
                torch.rand(leaf.shape, generator=g)
                if name in ("extra.decay", "extra.beta")
                else torch.randn(leaf.shape, generator=g)
            )
    state.extra.cursor[1] = phase * 2 * length + n
    h = copy_state(state).extra
    core = ref.prologue(spec, tokens.take(0, [(1, t) for t in range(3)]))
    layout = ref.build_layout(spec, torch.tensor([1, 1, 1]), torch.arange(3))
    state, receipt = ref.prepare(spec, state, layout)
    s0 = state.ssm[0, 1].float().numpy()
    state, o = ref.forward_core(spec, state, receipt, 0, core)

    c = {name: x.float().numpy() for name, x in vars(core).items()}
    act = tokens.k.dtype
    levels_s, levels_k = ref.pair_levels(ssm, k_dim), ref.pair_levels(spec.act_dtype, k_dim)

    def rnorm(x):
        return F(torch.rsqrt(torch.tensor(F(scalar_sum([F(e * e) for e in x], levels_k) + F(1e-6)))).item())

    for head in range(spec.v_heads):
        kh, qh = head // (spec.v_heads // spec.k_heads), head // (spec.v_heads // spec.q_heads)
        at = [phase * length + j for j in range(n)]
        keys = [h.k[0, 1, kh, j].float().numpy() for j in at] + list(c["k"][:, kh])
        alphas = [h.decay[0, 1, head, j].numpy() for j in at] + list(c["decay"][:, head])
        d_of = [h.d[0, 1, head, j].numpy() for j in at]

        def decay_product(j, t, alphas=alphas):  # product of the decays of tokens j+1 .. t
            p = np.ones_like(alphas[0])
            for m in range(j + 1, t + 1):
                p = p * alphas[m]
            return p

        def coefficient(j, t, x, x_raw, query, keys=keys, product=decay_product):
            if spec.rule == "gdn":
                g = F(
                    F(scalar_sum([F(a * b) for a, b in zip(keys[j], x_raw, strict=True)], levels_k) * rnorm(keys[j]))
                    * rnorm(x_raw)
                )
                return F(product(j, t)[0] * (F(g * F(spec.scale)) if query else g))
            hat = keys[j] * rnorm(keys[j])
            for m in range(j + 1, t + 1):
                hat = hat * alphas[m]  # noqa: B023
            return scalar_sum([F(a * b) for a, b in zip(hat, x, strict=True)], levels_k)

        for t in range(3):
            now, d_t = n + t, None
            for query in (False, True):
                x, x_raw = (c["q"][t, qh], c["q_raw"][t, qh]) if query else (c["k_hat"][t, kh], c["k"][t, kh])
                coefficients = [coefficient(j, now, x, x_raw, query) for j in range(now + 1)]
                p0, result = decay_product(-1, now), []
                for i in range(spec.v_dim):
                    row = s0[head, i]
                    if spec.rule == "gdn":
                        lanes = [F(e * p0[0]) for e in scalar_lanes([F(a * b) for a, b in zip(row, x, strict=True)], levels_s)]
                    else:
                        lanes = scalar_lanes([F(a * F(p * b)) for a, p, b in zip(row, p0, x, strict=True)], levels_s)
                    records = [F(d_of[j][i] * coefficients[j]) if j < n else F(0) for j in range(length)]
                    hist = scalar_lanes(records, 2)
                    value = scalar_sum([F(a + b) for a, b in zip(lanes, hist, strict=True)], 0)
                    for m in range(t + 1 if query else t):
                        value = F(value + F(d_of[n + m][i] * coefficients[n + m]))
                    result.append(value)
                if not query:
                    d_t = np.array([F(F(c["v"][t, head, i] - result[i]) * c["beta"][t, head]) for i in range(spec.v_dim)])
                    d_of.append(d_t)
                    stored = state.extra.d[0, 1, head, phase * length + n + t].numpy()
                    np.testing.assert_array_equal(stored, d_t)
                else:
                    np.testing.assert_array_equal(
                        o[t, head].float().numpy(), torch.tensor(np.array(result)).to(act).float().numpy()
                    )


# ------------------------------------------------------------------------------------------------ modes and widths


@pytest.mark.parametrize("rule,ssm", list(product(RULES, ("fp32", "bf16"))))
def test_R4_compact_equals_native_bitwise(rule, ssm):
    """R4, S7: outputs, states and windows of compact and native agree to the bit at any accepted length."""
    native, compact = make_spec(rule, "native", ssm_dtype=ssm), make_spec(rule, "compact", ssm_dtype=ssm)
    tokens = Tokens(native, 40)
    (a, _, out_a), (b, _, out_b) = run(native, tokens, 10), run(compact, tokens, 10)
    assert same_outputs(out_a, out_b) and same_pages(native, a, compact, b)


@pytest.mark.parametrize("rule,act", list(product(RULES, ("fp32", "bf16"))))
def test_R79_replay_after_merge_equals_native_bitwise(rule, act):
    """R79, N2, N3: fp32 state; the fold of raw inputs leaves native's very bits, and snapshot equals merge."""
    native, spec = make_spec(rule, "native", act_dtype=act), make_spec(rule, "replay", act_dtype=act)
    tokens = Tokens(native, 60)
    (a, _, out_a), (b, _, out_b) = run(native, tokens, 14), run(spec, tokens, 14)
    assert same_pages(native, a, spec, b)
    _, before = ref.snapshot(spec, b, SLOTS)
    b = ref.merge(spec, b, SLOTS)
    assert torch.equal(b.ssm[:, SLOTS].transpose(0, 1), before)
    assert not b.extra.cursor.any() and not b.accepted.any()
    for x, y in zip(out_a, out_b, strict=True):
        for key in x:
            torch.testing.assert_close(
                x[key], y[key], atol=6e-3 if act == "bf16" else 2e-6, rtol=2e-2 if act == "bf16" else 2e-5
            )


@pytest.mark.parametrize("rule,ssm,mode", list(product(("gdn", "kda"), ("fp32", "bf16"), ("native", "compact"))))
def test_R6_N4_one_window_equals_single_tokens_bitwise(rule, ssm, mode):
    """R6, N4, R27, S1: one call of W tokens = W calls of one token, and accepting n of W = n single tokens."""
    wide = make_spec(rule, mode, ssm_dtype=ssm, width=4)
    single = make_spec(rule, "native", ssm_dtype=ssm, width=1)
    tokens = Tokens(wide, 8)
    for accept in range(1, 5):
        a, b, start = ref.init_state(wide), ref.init_state(single), {7: 0}
        a, out = play(wide, a, tokens, start, {7: 4}, {7: accept})
        outs = []
        for t in range(accept):
            b, one = play(single, b, tokens, {7: t}, {7: 1}, {7: 1})
            outs.append(one)
        for key in out:
            assert torch.equal(out[key], torch.cat([one[key] for one in outs]))
        assert same_pages(wide, a, single, b, [7])
        a, out = play(wide, a, tokens, {7: accept}, {7: 1}, {7: 1})
        b, one = play(single, b, tokens, {7: accept}, {7: 1}, {7: 1})
        assert same_outputs([out], [one])


@pytest.mark.parametrize("rule,ssm", list(product(("gdn", "kda"), ("fp32", "bf16"))))
def test_R10_precompute_is_bounded_by_inline_and_folds_to_the_same_bits(rule, ssm):
    """R10: outputs within 2e-6 / 2e-5 in fp32; after merge the checkpoints are identical."""
    act = "fp32" if ssm == "fp32" else "bf16"
    inline = make_spec(rule, "replay", ssm_dtype=ssm, act_dtype=act, history=16)
    whole = replace(inline, projection="precompute")
    tokens = Tokens(inline, 60)
    (a, _, out_a), (b, _, out_b) = run(inline, tokens, 14), run(whole, tokens, 14)
    assert same_pages(inline, a, whole, b)
    for x, y in zip(out_a, out_b, strict=True):
        for key in x:
            torch.testing.assert_close(
                x[key], y[key], atol=2e-6 if act == "fp32" else 2e-3, rtol=2e-5 if act == "fp32" else 2**-7
            )


@pytest.mark.parametrize("ssm", ("fp32", "bf16"))
def test_R7_replay_rounds_the_state_only_at_folds(ssm):
    """R5, R7, R19: the checkpoint is untouched between folds; a fold equals merge; reaching n = L does not fold."""
    spec = make_spec("gdn", "replay", ssm_dtype=ssm, width=1)
    tokens = Tokens(spec, 12)
    state = ref.init_state(spec)
    for t in range(4):
        state, _ = play(spec, state, tokens, {7: t}, {7: 1}, {7: 1})
        assert not state.ssm.any()
    assert int(state.extra.cursor[7]) == 4
    merged = ref.merge(spec, copy_state(state), [7])
    state, _ = play(spec, state, tokens, {7: 4}, {7: 1}, {7: 1})
    assert int(state.extra.cursor[7]) == 9
    assert torch.equal(state.ssm, merged.ssm)


@pytest.mark.parametrize("rule", ("gdn", "kda"))
def test_R7_bf16_fold_is_one_rounding_of_the_fp32_state(rule):
    """R7, R79: the first fold into a bf16 checkpoint is native's fp32 state rounded once, not once per token."""
    spec, exact = (make_spec(rule, mode, ssm_dtype=ssm, width=1) for mode, ssm in (("replay", "bf16"), ("native", "fp32")))
    per_token = replace(exact, ssm_dtype="bf16")
    # k_dim 4: the sums of 2 and of 3 pair levels over 4 values are the same sum, so only the rounding differs
    spec, exact, per_token = (replace(x, k_dim=4) for x in (spec, exact, per_token))
    tokens, states = Tokens(spec, 4), [ref.init_state(x) for x in (spec, exact, per_token)]
    for t in range(4):
        for i, x in enumerate((spec, exact, per_token)):
            states[i], _ = play(x, states[i], tokens, {7: t}, {7: 1}, {7: 1}, use_conv=False)
    folded, fp32, bf16 = (ref.snapshot(x, y, [7])[1] for x, y in zip((spec, exact, per_token), states, strict=True))
    assert torch.equal(folded, fp32.bfloat16())
    assert not torch.equal(folded, bf16)


def test_R18_worked_example_of_the_cursor():
    """R18, R19, R20: L = 4, W = 3; cursors 0 -> 2 -> 11 -> 12 -> 1, records in the stated places, old half intact."""
    spec = make_spec("gdn", "replay", layers=1)
    tokens, state, start = Tokens(spec, 12), ref.init_state(spec), {7: 0}
    written = []
    for tokens_in, accepted, end in ((3, 2, 2), (3, 3, 11), (1, 1, 12), (1, 1, 1)):
        before = copy_state(state)
        state, _ = play(spec, state, tokens, start, {7: tokens_in}, {7: accepted})
        start = {7: start[7] + accepted}
        assert int(state.extra.cursor[7]) == end
        written.append(np.flatnonzero((state.extra.beta != before.extra.beta)[0, 7, 0].numpy()).tolist())
    assert written == [[0, 1, 2], [4, 5, 6], [7], [0]]


@pytest.mark.parametrize("mode", ("compact", "replay"))
def test_R22_forward_twice_is_idempotent(mode):
    """R22: a second verify of the same round gives the same outputs and leaves checkpoint and cursor alone."""
    spec = make_spec("gdn", mode)
    tokens = Tokens(spec, 30)
    state, start, _ = run(spec, tokens, 5)
    layout = ref.build_layout(spec, torch.tensor([7, 7, 3]), torch.tensor([0, 1, 0]))
    rows = [(7, start[7]), (7, start[7] + 1), (3, start[3])]
    state, receipt = ref.prepare(spec, state, layout)
    before = copy_state(state)
    state, first = ref.forward(spec, state, receipt, 0, tokens.take(0, rows))
    middle = copy_state(state)
    state, second = ref.forward(spec, state, receipt, 0, tokens.take(0, rows))
    assert torch.equal(first, second) and same_state(middle, state)
    assert torch.equal(before.ssm, state.ssm) and torch.equal(before.accepted, state.accepted)


def test_R21_accept_may_run_before_forward_in_replay():
    """R21: the forward reads its own copy of the cursor, so both orders agree."""
    spec = make_spec("gdn", "replay", width=1)
    tokens = Tokens(spec, 12)
    late, early = ref.init_state(spec), ref.init_state(spec)
    for t in range(9):
        late, out = play(spec, late, tokens, {7: t}, {7: 1}, {7: 1}, use_conv=False)
        layout = ref.build_layout(spec, torch.tensor([7]), torch.tensor([0]))
        early, receipt = ref.prepare(spec, early, layout)
        early = ref.accept(spec, early, ref.StateAcceptance((receipt,), torch.tensor([1])))
        for layer in range(spec.layers):
            early, o = ref.forward(spec, early, receipt, layer, tokens.take(layer, [(7, t)]))
            assert torch.equal(o, out[layer, 7])
    assert same_state(late, early)


# --------------------------------------------------------------------------------------------------- leaks, neighbours


@pytest.mark.parametrize("mode,rule,value", list(product(MODES, ("gdn", "kda"), (float("nan"), 3e38))))
def test_N12_stale_memory_is_never_read(mode, rule, value):
    """N12, R3, S10, I18: dead records, rows and columns hold NaN or 3e38 before every round; no bit changes."""
    spec = make_spec(rule, mode)
    tokens = Tokens(spec, 40)
    results = []
    for fill in (0.0, value):
        g = np.random.default_rng(3)
        state, start, outputs = ref.init_state(spec), dict.fromkeys(SLOTS, 0), []
        for _ in range(9):
            poison_dead(spec, state, fill)
            widths = {s: int(g.integers(1, 4)) for s in SLOTS}
            accepts = {s: int(g.integers(1, widths[s] + 1)) for s in SLOTS}
            state, out = play(spec, state, tokens, start, widths, accepts)
            start = {s: start[s] + accepts[s] for s in SLOTS}
            outputs.append(out)
            poison_dead(spec, state, fill)
            outputs.append(dict(enumerate(ref.snapshot(spec, state, SLOTS))))
        results.append((outputs, state))
    assert same_outputs(results[0][0], results[1][0])
    assert all(torch.isfinite(x).all() for out in results[1][0] for x in out.values())


@pytest.mark.parametrize("mode,rule", list(product(MODES, ("gdn", "kda"))))
def test_S9_rejected_drafts_cannot_be_observed(mode, rule):
    """S9, V4, R23: rejected drafts of NaN instead of numbers leave accepted outputs and pages bit-identical."""
    spec = make_spec(rule, mode)
    tokens = Tokens(spec, 60)
    clean_state, _, clean = run(spec, tokens, 12)
    dirty_state, _, dirty = run(spec, tokens, 12, poison_rejected=True)
    assert same_outputs(clean, dirty) and same_pages(spec, clean_state, spec, dirty_state)


def test_S9_planted_fault_accepting_a_rejected_draft_is_seen():
    """Planted fault: one wrongly accepted NaN draft shows in the page."""
    spec = make_spec("gdn", "replay")
    tokens = Tokens(spec, 9)
    state, _ = play(spec, ref.init_state(spec), tokens, {7: 0}, {7: 3}, {7: 2}, poison_rejected=True)
    assert torch.isfinite(ref.snapshot(spec, state, [7])[1]).all()
    state.extra.cursor[7] += 1
    assert torch.isnan(ref.snapshot(spec, state, [7])[1]).any()


@pytest.mark.parametrize("mode,rule", list(product(MODES, ("gdn", "kda"))))
def test_V5_V6_rows_do_not_depend_on_order_padding_or_neighbours(mode, rule):
    """V3, V5, V6, B8: permuted slots, NaN padding rows and a batch of one give each row the same bits; HOLD stays zero."""
    spec = make_spec(rule, mode)
    tokens = Tokens(spec, 40)
    state, _, base = run(spec, tokens, 8)
    padded_state, _, padded = run(spec, tokens, 8, pad=3)
    permuted_state, _, permuted = run(spec, tokens, 8, slots=[5, 7, 3])
    alone_state, _, alone = run(spec, tokens, 8, slots=[3])
    assert same_outputs(base, padded) and same_outputs(base, permuted) and same_state(state, padded_state)
    assert same_state(state, permuted_state)
    assert all(torch.equal(x[key], y[key]) for x, y in zip(alone, base, strict=True) for key in x)
    for name, leaf in leaves(padded_state).items():
        rows = spec.rows_per_slot if name == "ssm" else 1
        hold = leaf[spec.hold :] if leaf.ndim == 1 else leaf[:, spec.hold * rows :]
        assert not hold.any(), name


@pytest.mark.parametrize("group,mode", list(product((1, 2, 3), MODES)))
def test_R12_I15_grouped_keys_equal_redundant_keys_bitwise(group, mode):
    """R12, I15: keys stored once per key head against keys repeated for every value head."""
    grouped = make_spec("gdn", mode, q_heads=2, k_heads=2, v_heads=2 * group)
    redundant = replace(grouped, q_heads=2 * group, k_heads=2 * group)
    tokens = Tokens(grouped, 40)
    wide = Tokens(redundant, 40)
    for name in ("v", "a", "b", "A_log", "dt_bias"):
        setattr(wide, name, getattr(tokens, name))
    wide.q, wide.k = tokens.q.repeat_interleave(group, 3), tokens.k.repeat_interleave(group, 3)
    a, _, out_a = run(grouped, tokens, 8, use_conv=False)
    b, _, out_b = run(redundant, wide, 8, use_conv=False)
    assert same_outputs(out_a, out_b)
    assert torch.equal(ref.snapshot(grouped, a, SLOTS)[1], ref.snapshot(redundant, b, SLOTS)[1])
