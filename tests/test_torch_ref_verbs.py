"""torch_ref verb by verb: layout, acceptance and receipts, convolution, pages, prefill."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product

import numpy as np
import pytest
import torch
from torch_ref_harness import (
    DTYPES,
    MODES,
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
)

import torch_ref as ref
from torch_ref.executors.replay import live
from torch_ref.layout import to_rows, to_windows
from torch_ref.state import leaves


def ints(*values):
    return torch.tensor(values)


# ------------------------------------------------------------------------------------------------------------ layout


def test_R92_dynamic_layout_example():
    """R92: rows [7,7,7,4,9,9,H,H] -> cu [0,3,4,6,6,..], slots [7,4,9,H,..]."""
    spec = make_spec(slots=11)
    layout = ref.build_layout(spec, ints(7, 7, 7, 4, 9, 9, 10, 10), ints(0, 1, 2, 0, 0, 1, 0, 0))
    assert layout.cu.tolist() == [0, 3, 4, 6, 6, 6, 6, 6, 6]
    assert layout.slots.tolist() == [7, 4, 9] + [10] * 5 and layout.verify_len.tolist() == [3, 1, 2] + [0] * 5
    assert layout.row_request.tolist() == [0, 0, 0, 1, 2, 2, 8, 8] and layout.row_offset.tolist() == [0, 1, 2, 0, 0, 1, 0, 0]
    assert int(layout.count) == 3
    x = torch.arange(8.0)[:, None] + 1
    assert to_windows(spec, layout, x)[:4, :, 0].tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0], [0, 0, 0]]
    assert to_rows(layout, to_windows(spec, layout, x))[:, 0].tolist() == [1, 2, 3, 4, 5, 6, 0, 0]


def test_R91_fixed_layout_equals_dynamic_with_full_windows():
    """R91, R92, B9: closed form; the live requests agree with the dynamic layout, padding in whole windows."""
    spec = make_spec()
    ids = ints(7, 7, 7, 3, 3, 3, 8, 8, 8)
    offsets = ints(0, 1, 2).repeat(3)
    fixed, dynamic = ref.build_layout(spec, ids, offsets, fixed=True), ref.build_layout(spec, ids, offsets)
    assert fixed.cu.tolist() == [0, 3, 6, 6] and fixed.slots.tolist() == [7, 3, 8] and fixed.verify_len.tolist() == [3, 3, 0]
    assert int(fixed.count) == 2
    assert dynamic.cu[:4].tolist() == fixed.cu.tolist() and dynamic.slots[:3].tolist() == fixed.slots.tolist()
    assert fixed.row_request[:6].tolist() == dynamic.row_request[:6].tolist()
    assert (fixed.row_request[6:] == 3).all()


@pytest.mark.parametrize(
    "ids,offsets,fixed,message",
    [
        ([7, 9], [0, 0], False, "0..8"),
        ([7, -1], [0, 0], False, "-1"),
        ([8, 7], [0, 0], False, "after padding"),
        ([7, 3, 7], [0, 0, 0], False, "repeats slot 7"),
        ([7, 7, 7, 7], [0, 1, 2, 3], False, "1..width=3"),
        ([7, 7], [1, 2], False, "must count"),
        ([7, 7], [0, 2], False, "must count"),
        ([7, 3], [0, 1], False, "must count"),
        ([7, 7, 7, 3], [0, 1, 2, 0], True, "multiple of width=3"),
        ([7, 7, 8], [0, 1, 0], True, "needs width=3"),
        ([7, 7, 3], [0, 1, 2], True, "must count"),
        ([7, 7], [0], False, "shape"),
    ],
)
def test_U1_build_layout_refuses_bad_rows(ids, offsets, fixed, message):
    """U1, V10, I2, I3, U9: each bad input names argument, value and what is allowed."""
    with pytest.raises(ValueError, match=message):
        ref.build_layout(make_spec(), torch.tensor(ids), torch.tensor(offsets), fixed=fixed)


@pytest.mark.parametrize("mode", MODES)
def test_P3_empty_and_all_padding_batches_change_nothing(mode):
    """P3, B1: zero rows and HOLD rows only, through every verb of a round; the state keeps its bits."""
    spec = make_spec(mode=mode)
    tokens = Tokens(spec, 30)
    state, _, _ = run(spec, tokens, 4)
    before = copy_state(state)
    for rows in (0, 4):
        ids = torch.full((rows,), spec.hold, dtype=torch.long)
        layout = ref.build_layout(spec, ids, torch.zeros_like(ids))
        assert int(layout.count) == 0
        state, receipt = ref.prepare(spec, state, layout)
        inputs = tokens.take(0, [(0, -2)] * 4)
        cut = {f.name: getattr(inputs, f.name)[:rows] for f in fields(inputs) if f.name not in ("A_log", "dt_bias")}
        state, o = ref.forward(spec, state, receipt, 0, replace(inputs, **cut))
        x = torch.full((rows, spec.channels), float("nan"), dtype=torch.bfloat16)
        state, y = ref.conv_forward(spec, state, receipt, 0, x, tokens.weight[0])
        assert o.shape[0] == y.shape[0] == rows and not o.any() and not y.any()
        lengths = torch.full((layout.slots.shape[0],), 3)
        state = ref.accept(spec, state, ref.StateAcceptance((receipt,), lengths))
        assert same_state(before, state)


# -------------------------------------------------------------------------------------------------------- acceptance


def open_round(spec, state, tokens, rows, ledger=None):
    layout = ref.build_layout(spec, torch.tensor([s for s, _ in rows]), torch.tensor([t for _, t in rows]))
    state, receipt = ref.prepare(spec, state, layout)
    for layer in range(spec.layers):
        state, _ = ref.forward(spec, state, receipt, layer, tokens.take(layer, rows))
    return state, ledger.issue(receipt) if ledger else receipt


ROWS = [(7, 0), (7, 1), (7, 2), (3, 0), (5, 0), (5, 1)]


@pytest.mark.parametrize("mode", MODES)
def test_S3_length_zero_leaves_the_row_alone_and_excess_is_clamped(mode):
    """S3, R80, R88: trusted accept; 0 and negative leave state and accepted index, lengths above verify_len clamp."""
    spec = make_spec(mode=mode)
    tokens = Tokens(spec, 30)
    state, start, _ = run(spec, tokens, 4)
    zero, receipt = open_round(spec, copy_state(state), tokens, ROWS)
    prepared = copy_state(zero)
    pad = [0] * (receipt.layout.slots.shape[0] - 3)
    zero = ref.accept(spec, zero, ref.StateAcceptance((receipt,), ints(0, -1, 0, *pad)))
    assert same_state(prepared, zero)
    clamped, receipt = open_round(spec, copy_state(state), tokens, ROWS)
    clamped = ref.accept(spec, clamped, ref.StateAcceptance((receipt,), ints(9, 9, 9, *pad)))
    exact, receipt = open_round(spec, copy_state(state), tokens, ROWS)
    exact = ref.accept(spec, exact, ref.StateAcceptance((receipt,), ints(3, 1, 2, *pad)))
    assert same_state(clamped, exact)


@pytest.mark.parametrize("mode", MODES)
def test_R82_S5_commit_refuses_bad_acceptances_before_any_change(mode):
    """R30, R82, R89, S3, S5, U1: lengths, totals, receipts; every refusal leaves the state bit-identical."""
    spec = make_spec(mode=mode)
    tokens = Tokens(spec, 30)
    ledger, other = ref.Ledger(), ref.Ledger()
    state, receipt = open_round(spec, ref.init_state(spec), tokens, ROWS, ledger)
    before = copy_state(state)
    pad = [0] * (receipt.layout.slots.shape[0] - 3)
    good = ref.StateAcceptance((receipt,), ints(2, 1, 1, *pad))
    bad = [
        (replace(good, lengths=ints(0, 1, 1, *pad)), "1..3"),
        (replace(good, lengths=ints(4, 1, 1, *pad)), "1..3"),
        (replace(good, lengths=ints(2, 2, 1, *pad)), "1..1"),
        (replace(good, lengths=ints(2, 1, 1)), "request rows"),
        (replace(good, forwards=()), "forwards"),
        (replace(good, forwards=(replace(receipt),)), "not an open receipt"),
        (replace(good, forwards=(receipt, receipt), lengths=torch.cat([good.lengths] * 2)), "twice"),
    ]
    for acceptance, message in bad:
        with pytest.raises(ValueError, match=message):
            ref.commit(spec, state, acceptance, ledger)
    with pytest.raises(ValueError, match="not an open receipt"):
        ref.commit(spec, state, good, other)
    for changed, message in ((dict(mode="other"), "mode"), (dict(state_key="draft"), "state_key")):
        foreign = ledger.issue(replace(receipt, **changed))
        with pytest.raises(ValueError, match=message):
            ref.commit(spec, state, ref.StateAcceptance((foreign,), good.lengths), ledger)
        with pytest.raises(ValueError, match=message):
            ref.accept(spec, state, ref.StateAcceptance((foreign,), good.lengths))
        ledger.spend(ref.StateAcceptance((foreign,), good.lengths))
    assert same_state(before, state)
    with pytest.raises(ValueError, match="not accepted"):
        ledger.require_settled("export")
    state = ref.commit(spec, state, good, ledger)
    assert ledger.open_receipts() == 0 and not same_state(before, state)
    after = copy_state(state)
    with pytest.raises(ValueError, match="already accepted"):
        ref.commit(spec, state, good, ledger)
    assert same_state(after, state)


@pytest.mark.parametrize("mode,rule", list(product(MODES, ("gdn", "kda"))))
def test_R90_two_microbatches_equal_one_batch(mode, rule):
    """R28, R39, R90: receipts in forward order on disjoint slots; one acceptance; swapping halves changes nothing."""
    spec = make_spec(rule, mode)
    tokens = Tokens(spec, 30)
    base, _, _ = run(spec, tokens, 4)
    whole, receipt = open_round(spec, copy_state(base), tokens, ROWS)
    whole = ref.accept(spec, whole, ref.StateAcceptance((receipt,), ints(2, 1, 2, 0, 0, 0)))
    for first, second in ((ROWS[:3], ROWS[3:]), (ROWS[3:], ROWS[:3])):
        state, a = open_round(spec, copy_state(base), tokens, first)
        state, b = open_round(spec, state, tokens, second)
        lengths = {7: 2, 3: 1, 5: 2, spec.hold: 0}
        slots = torch.cat([a.layout.slots, b.layout.slots]).tolist()
        state = ref.accept(spec, state, ref.StateAcceptance((a, b), torch.tensor([lengths[s] for s in slots])))
        assert same_state(whole, state)
    a = replace(a, layout=b.layout)
    with pytest.raises(ValueError, match="twice"):
        ref.check_acceptance(spec, ref.StateAcceptance((a, b), torch.ones(2 * b.layout.slots.shape[0])))


def test_forward_refuses_a_foreign_receipt_row_and_shape():
    """U1, I2, R50: row -1 does not wrap; receipts of another state, wrong token counts and dtypes are named."""
    spec = make_spec()
    tokens, state = Tokens(spec, 4), ref.init_state(spec)
    state, receipt = ref.prepare(spec, state, ref.build_layout(spec, ints(7, 3), ints(0, 0)))
    inputs = tokens.take(0, [(7, 0), (3, 0)])
    for row in (-1, 2):
        with pytest.raises(ValueError, match="layer rows are 0..1"):
            ref.forward(spec, state, receipt, row, inputs)
    bad = [
        (replace(receipt, state_key="draft"), inputs, "state_key"),
        (replace(receipt, mode="replay"), inputs, "mode"),
        (receipt, tokens.take(0, [(7, 0)]), "token rows"),
        (receipt, replace(inputs, k=inputs.k.float()), "inputs.k.dtype"),
        (receipt, replace(inputs, a=inputs.a[:, :1]), "inputs.a.shape"),
        (receipt, replace(inputs, dt_bias=inputs.dt_bias[:1]), "inputs.dt_bias.shape"),
    ]
    for a_receipt, some_inputs, message in bad:
        with pytest.raises(ValueError, match=message):
            ref.forward(spec, state, a_receipt, 0, some_inputs)
    assert same_state(state, ref.init_state(spec))


# ------------------------------------------------------------------------------------------------------- convolution


@pytest.mark.parametrize("width,conv_width", [(5, 4), (1, 4), (2, 2), (16, 4)])
def test_R29_R30_conv_window_after_any_accepted_length(width, conv_width):
    """R29, R30, N4: every accept of a full window; then one token, equal to the whole sequence, bit by bit."""
    spec = make_spec(layers=1, width=width, conv_width=conv_width)
    tokens = Tokens(spec, 2 * width + 2)
    whole = ref.conv_sequence(tokens.x[7, 0][None], tokens.weight[0], tokens.bias[0])[0]
    np.testing.assert_allclose(whole.double().numpy(), conv_oracle(spec, tokens, 7, 0, 2 * width + 2), atol=1e-2, rtol=2**-7)
    for accepted in range(1, width + 1):
        state, outputs = ref.init_state(spec), []
        for start, n, a in ((0, width, width), (width, width, accepted), (width + accepted, 1, 1)):
            state, out = play(spec, state, tokens, {7: start}, {7: n}, {7: a})
            outputs.append(out["conv", 0, 7])
            window = state.conv[0, 7, :, a - 1 : a - 1 + conv_width - 1]
            past = torch.cat([torch.zeros_like(tokens.x[7, 0, :conv_width]), tokens.x[7, 0, : start + a]])
            assert torch.equal(window, past[past.shape[0] - conv_width + 1 :].t())
            assert not state.conv[0, 7, :, conv_width - 2 + n :].any()
        assert torch.equal(torch.cat(outputs), whole[: width + accepted + 1])


def test_conv_forward_refuses_what_it_would_round():
    """N4, U1: inputs that are not in the window's dtype are refused, shapes are named."""
    spec = make_spec()
    tokens, state = Tokens(spec, 4), ref.init_state(spec)
    state, receipt = ref.prepare(spec, state, ref.build_layout(spec, ints(7), ints(0)))
    x = tokens.conv(0, [(7, 0)])
    for bad_x, weight, message in (
        (x.float(), tokens.weight[0], "x.dtype"),
        (x[:, 1:], tokens.weight[0], "x.shape"),
        (torch.cat([x, x]), tokens.weight[0], "token rows"),
        (x, tokens.weight[0][:, 1:], "weight.shape"),
    ):
        with pytest.raises(ValueError, match=message):
            ref.conv_forward(spec, state, receipt, 0, bad_x, weight)


# ------------------------------------------------------------------------------------------------- pages and lifecycle


@pytest.mark.parametrize("source,target", list(product(MODES, MODES)))
def test_R85_pages_restore_across_modes_and_widths(source, target):
    """R8, R25, R47, R48, R85, R86, C1, S19, L1: fp32 state; restored into poisoned slots of any mode, W = 3 to W = 2."""
    spec, other = make_spec("gdn", source), make_spec("gdn", target, width=2)
    tokens = Tokens(spec, 60)
    state, start, _ = run(spec, tokens, 9)
    before = copy_state(state)
    conv, ssm = ref.snapshot(spec, state, SLOTS)
    pages = ref.init_pages(spec, 4)
    assert sum(x.nbytes for x in vars(pages).values()) == 4 * ref.page_bytes(spec)
    pages = ref.export_into(spec, state, pages, [2, 9, 0, 1], [7, 3, 5, 3], 3)  # page 9 is dropped, the 4th is beyond n
    assert same_state(before, state)
    assert torch.equal(pages.ssm[2], ssm[0]) and torch.equal(pages.ssm[0], ssm[2]) and torch.equal(pages.conv[2], conv[0])
    assert not pages.ssm[[1, 3]].any() and not pages.conv[[1, 3]].any()
    restored = ref.init_state(other)
    for leaf in leaves(restored).values():
        (leaf if leaf.ndim == 1 else leaf[:, : 2 * 4]).fill_(1 if leaf.ndim == 1 else float("nan"))
    restored = ref.restore(other, restored, pages, [2], [1], 1)
    assert int(restored.accepted[1]) == 0
    assert torch.equal(torch.stack(ref.snapshot(other, restored, [1])[1:]), ssm[:1].unsqueeze(0))
    moved = Tokens(spec, 60)
    for name in ("q", "k", "v", "a", "b", "x"):
        getattr(moved, name)[1] = getattr(moved, name)[7]
    here, a = play(spec, state, tokens, {7: start[7]}, {7: 2}, {7: 2})
    there, b = play(other, restored, moved, {1: start[7]}, {1: 2}, {1: 2})
    for (*kind, _), x in a.items():
        tolerance = dict(atol=0, rtol=0) if "replay" not in (source, target) else dict(atol=6e-3, rtol=2e-2)
        torch.testing.assert_close(x, b[(*kind, 1)], **tolerance)
    assert torch.equal(ref.snapshot(spec, here, [7])[1], ref.snapshot(other, there, [1])[1])


@pytest.mark.parametrize("mode", MODES)
def test_clear_and_restore_refuse_bad_ids_before_any_change(mode):
    """U1, I2, I3, C6: HOLD, negative, repeated slots and pages that do not exist."""
    spec = make_spec(mode=mode)
    state, _, _ = run(spec, Tokens(spec, 20), 3)
    before, pages = copy_state(state), ref.init_pages(spec, 2)
    for slots in ([8], [-1], [7, 7]):
        for call in (
            lambda s: ref.clear(spec, state, s),
            lambda s: ref.merge(spec, state, s),
            lambda s: ref.snapshot(spec, state, s),
            lambda s: ref.restore(spec, state, pages, [0] * len(s), s, len(s)),
        ):
            with pytest.raises(ValueError, match="slots="):
                call(slots)
    with pytest.raises(ValueError, match="page_ids"):
        ref.restore(spec, state, pages, [2], [7], 1)
    assert same_state(before, state)


@pytest.mark.parametrize("mode", MODES)
def test_L1_L3_L4_clear_resets_everything_a_slot_owns(mode):
    """L1, L3, L4, R48: a reused slot gives the bits of a fresh one; the others keep theirs."""
    spec = make_spec(mode=mode)
    tokens = Tokens(spec, 40)
    state, _, _ = run(spec, tokens, 7)
    poison_dead(spec, state, float("nan"))
    kept = copy_state(state)
    state = ref.clear(spec, state, [7])
    for name, leaf in leaves(state).items():
        rows = spec.rows_per_slot if name == "ssm" else 1
        pick = lambda x, s: x[s] if x.ndim == 1 else x[:, s * rows : (s + 1) * rows]  # noqa: B023, E731
        assert not pick(leaf, 7).any()
        for slot in (3, 5):
            assert pick(leaf, slot).nan_to_num(9).equal(pick(leaves(kept)[name], slot).nan_to_num(9))
    fresh = ref.init_state(spec)
    for t in (0, 3, 6):
        state, a = play(spec, state, tokens, {7: t}, {7: 3}, {7: 3})
        fresh, b = play(spec, fresh, tokens, {7: t}, {7: 3}, {7: 3})
        assert same_outputs([a], [b])


@pytest.mark.parametrize("mode,rule", list(product(MODES, ("gdn", "kda"))))
def test_R24_merge_then_prefill_equals_native_decode(mode, rule):
    """R24, S11, N14, C9: decode, merge, a prompt chunk in two pieces, decode again; fp32 state, bits of native decode."""
    spec, plain = make_spec(rule, mode), make_spec(rule, "native", width=1)
    tokens = Tokens(spec, 40)
    state, start, _ = run(spec, tokens, 5, slots=[7])
    n = start[7]
    truth = ref.init_state(plain)
    for t in range(n + 11):
        truth, last = play(plain, truth, tokens, {7: t}, {7: 1}, {7: 1})
    chunk = tokens.take(0, [(7, n)])
    if int(state.accepted[7]) or mode == "replay":
        one = {f.name: getattr(chunk, f.name)[None] for f in fields(chunk) if f.name not in ("A_log", "dt_bias")}
        with pytest.raises(ValueError, match="merge them"):
            ref.prefill(spec, state, 0, [7], ints(1), replace(chunk, **one))
    state = ref.merge(spec, state, [7, 3])
    for begin, size in ((n, 4), (n + 4, 6)):
        for layer in range(spec.layers):
            rows = [(7, begin + i) for i in range(size)] + [(7, -2)] * 2
            inputs = tokens.take(layer, rows)
            batch = {f.name: getattr(inputs, f.name)[None] for f in fields(inputs) if f.name not in ("A_log", "dt_bias")}
            both = {name: torch.cat([x, x]) for name, x in batch.items()}
            x = tokens.conv(layer, rows)[None].repeat(2, 1, 1)
            state, y = ref.conv_prefill(spec, state, layer, [7, 3], ints(size, 0), x, tokens.weight[layer], tokens.bias[layer])
            state, o = ref.prefill(spec, state, layer, [7, 3], ints(size, 0), replace(inputs, **both))
            assert not o[0, size:].any() and not o[1].any() and not y[0, size:].any() and not y[1].any()
    state, out = play(spec, state, tokens, {7: n + 10}, {7: 1}, {7: 1})
    assert same_pages(spec, state, plain, truth, [7])
    for key, value in out.items():
        torch.testing.assert_close(value, last[key], atol=6e-3 if mode == "replay" else 0, rtol=2e-2 if mode == "replay" else 0)
    assert not state.ssm[:, 3 * spec.rows_per_slot].any()


def test_prefill_matches_the_oracle_and_refuses_bad_lengths():
    """V1, U1: outputs and final state of a padded chunk against float64."""
    spec = make_spec("kda", layers=1, act_dtype="fp32")
    tokens = Tokens(spec, 20)
    inputs = tokens.take(0, [(7, i) for i in range(20)])
    batch = replace(inputs, **{n: getattr(inputs, n)[None] for n in ("q", "k", "v", "a", "b")})
    state, o = ref.prefill(spec, ref.init_state(spec), 0, [7], ints(17), batch)
    states, want = oracle(spec, tokens, 7, 0, 17)
    np.testing.assert_allclose(o[0, :17].double().numpy(), want, atol=2e-6, rtol=2e-5)
    np.testing.assert_allclose(state.ssm[0, 7 * spec.width].double().numpy(), states[-1], atol=2e-5, rtol=2e-4)
    for lengths in ([21], [-1]):
        with pytest.raises(ValueError, match="0..20"):
            ref.prefill(spec, state, 0, [7], torch.tensor(lengths), batch)


def test_state_bytes_equals_allocated_bytes():
    """R17: the pure formula is the sum over allocated tensors minus HOLD, in every mode."""
    for mode, rule in product(MODES, ("gdn", "kda")):
        spec = make_spec(rule, mode)
        state = ref.init_state(spec)
        assert sum(x.nbytes for x in leaves(state).values()) * (spec.slots - 1) // spec.slots == ref.state_bytes(spec)["total"]
        wanted = DTYPES[spec.ssm_dtype]
        assert state.ssm.dtype == wanted and (mode != "replay" or state.extra.d.dtype == torch.float32)


@pytest.mark.parametrize("mode", MODES)
def test_S2_S7_widths_change_from_round_to_round(mode):
    """S1, S2, S7, S11, L6: widths 4, 1, 1, 4, 1, 3, 2 with partial accepts; the oracle at each round, compared at once."""
    spec = make_spec("gdn", mode, act_dtype="fp32", width=4)
    tokens, state, start = Tokens(spec, 40, a_log=-3.0), ref.init_state(spec), {7: 0, 3: 0}
    for widths, accepts in (((4, 1), (3, 1)), ((1, 4), (1, 4)), ((1, 1), (1, 1)), ((4, 2), (1, 2)), ((1, 4), (1, 1)),
                            ((3, 1), (3, 1)), ((2, 3), (1, 2)), ((4, 4), (4, 1)), ((4, 4), (4, 4))):  # fmt: skip
        w, a = dict(zip((7, 3), widths, strict=True)), dict(zip((7, 3), accepts, strict=True))
        state, out = play(spec, state, tokens, start, w, a, use_conv=False)
        for i, slot in enumerate((7, 3)):
            states, want = oracle(spec, tokens, slot, 1, start[slot] + a[slot])
            np.testing.assert_allclose(out[1, slot].double().numpy(), want[start[slot] :], atol=2e-6, rtol=2e-5)
            page = ref.snapshot(spec, state, [7, 3])[1][i, 1].double().numpy()
            assert np.linalg.norm(page - states[-1]) <= 1e-5 * np.linalg.norm(states[-1])
        start = {s: start[s] + a[s] for s in start}
    if mode == "replay":
        assert all(n <= spec.history for n in live(spec, state.extra.cursor)[0].tolist())
