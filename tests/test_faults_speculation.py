"""faults.md group S: accepted lengths, rollback, width changes, commit discipline, microbatches."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import (
    close,
    draw_params,
    draw_tokens,
    fresh_verbs,
    fs_spec,
    layer_inputs,
    of_slots,
    poison_dead,
    quick_jit,
    same_bits,
    single,
    small_spec,
    to_device,
    to_host,
)
from machine import Machine

import jax_ssm as ssm

MODES = ("native", "compact", "replay")


@pytest.mark.parametrize("mode", ["native", "replay"])
def test_S1_the_base_token_counts(mode):
    """S1, R27, R30: W = 1..8 and a = 1..W (1 is "0 drafts accepted"), compared at once, then one decode. W = 5..8 accept
    more than the convolution's 3 past inputs: nothing is clipped."""
    m = Machine(fs_spec("gdn", mode, width=8, history=8, layers=1), 36)
    windows = np.array([(t, a) for t in range(1, 9) for a in range(1, t + 1)])
    m.round(*windows.T)
    m.check()
    m.round(np.ones(36, int), np.ones(36, int))
    m.check()


def short_program(verbs_of, mode="native", **machine):
    m = Machine(fs_spec("gdn", mode), 8, verbs_of=verbs_of, **machine)
    for widths, accepts in (([4] * 8, [3, 1, 4, 2] * 2), ([1] * 8, [1] * 8), ([2] * 8, [1, 2] * 4)):
        m.round(np.array(widths), np.array(accepts))
        m.check()
    return m


# one wrong line in a verb each; every one must be red in a program of three rounds
PLANTED = {
    "S1 drafts counted, base token forgotten": ("accept", lambda real: lambda spec, state, a: real(
        spec, state, a.replace(lengths=a.lengths - 1))),
    "S9 the whole window kept": ("accept", lambda real: lambda spec, state, a: real(
        spec, state, a.replace(lengths=a.forwards[0].layout.verify_len))),
    "S2 window read from column 0": ("prepare", lambda real: lambda *args: (
        lambda state, receipt: (state, receipt.replace(offset=0 * receipt.offset)))(*real(*args))),
    "S5 acceptance applied twice": ("accept", lambda real: lambda spec, state, a: real(spec, real(spec, state, a), a)),
    "S10 commit without a forward": ("forward", lambda real: lambda spec, state, receipt, row, inputs: (
        state, real(spec, state, receipt, row, inputs)[1])),
}  # fmt: skip


@pytest.mark.parametrize(("fault", "mode"), [
    ("S1 drafts counted, base token forgotten", "compact"),
    ("S9 the whole window kept", "replay"),
    ("S2 window read from column 0", "native"),
    ("S5 acceptance applied twice", "replay"),
    ("S10 commit without a forward", "compact"),
])  # fmt: skip
def test_planted_faults_are_seen(monkeypatch, fault, mode):
    name, plant = PLANTED[fault]
    monkeypatch.setattr(ssm, name, plant(getattr(ssm, name)))
    with pytest.raises(AssertionError):
        short_program(fresh_verbs, mode)


@pytest.mark.parametrize("mode", MODES)
def test_S2_width_changes_and_neighbours(mode):
    """S2: rounds of width 4 (a=3), 1, 1, 4 (a=1), 1, 3 (a=3); rows without drafts and rows that prefill beside them; the bits
    of requests 0..3 do not depend on what the others do."""
    results = []
    for others in (0, 1):
        m = Machine(fs_spec("gdn", mode), 8, seed=4)
        for step, (w, a) in enumerate(((4, 3), (1, 1), (1, 1), (4, 1), (1, 1), (3, 3))):
            widths, accepts = np.full(8, w), np.full(8, a)
            if others:  # the neighbours skip rounds, decode plainly, abort
                widths[4:], accepts[4:] = [0, 1, 4, 2], [0, 1, step % 5, 1]
            keep = m.draw
            m.draw = partial(fixed_draw, m, step)
            m.round(widths, accepts)
            m.draw = keep
            if others and step == 2:
                m.prompt(np.array([4, 6]), np.array([3, 5]))
            m.check()
        m.poison = None
        m.merge(np.arange(8))
        results.append({name: x for name, x in of_slots(m.spec, m.state, m.slot[:4]).items() if "extra" not in name})
    rows = 1 if mode != "native" else 4
    heads = [r["ssm"][:, ::rows] for r in results]
    assert same_bits(heads[0], heads[1]) and same_bits(results[0]["conv"], results[1]["conv"])


def fixed_draw(m, step, requests, n, keep):
    """Tokens that depend on request and step only, so that two runs with other batches see the same ones."""
    rows = [draw_tokens(m.spec, np.random.default_rng([step, int(i)]), n) for i in requests]
    return type(rows[0])(**{name: np.stack([getattr(r, name) for r in rows]) for name in vars(rows[0])})


@pytest.mark.parametrize("mode", MODES)
def test_S3_accepting_nothing_leaves_everything(mode):
    """S3: a = [0, 2, 0, 4] between neighbours full of NaN: rows with 0 are bit-identical in every leaf, the others move."""
    spec = small_spec("gdn", mode, width=4)
    m = Machine(spec, 4, poison=None)
    host = to_host(m.state)
    poison_dead(spec, host, np.setdiff1d(np.arange(spec.hold), m.slot), float("nan"))
    ids, offsets = np.repeat(m.slot, 4).astype(np.int32), np.tile(np.arange(4, dtype=np.int32), 4)
    tokens = draw_tokens(spec, np.random.default_rng(0), 16)
    _, receipt = ssm.prepare(spec, to_device(host), ssm.build_layout(spec, ids, offsets))
    inputs = single(layer_inputs(tokens, m.params))

    @quick_jit
    def run(state, lengths):
        opened, _ = ssm.forward(spec, state, receipt, 0, inputs)
        return opened, ssm.accept(spec, opened, ssm.StateAcceptance((receipt,), lengths))

    opened, state = run(to_device(host), np.resize(np.array([0, 2, 0, 4], np.int32), 8))
    assert same_bits(of_slots(spec, state, m.slot[[0, 2]]), of_slots(spec, opened, m.slot[[0, 2]]))
    assert np.asarray(state.accepted)[m.slot].tolist() == [0, 1, 0, 3]


def test_S5_three_partial_rejections():
    """S5: a = 3, 1, 2 in a row, in all modes; nothing is applied twice and no plan is keyed by the length."""
    for mode in MODES:
        m = Machine(fs_spec("gdn", mode), 8, seed=6)
        for a in (3, 1, 2):
            m.round(np.full(8, 4), np.full(8, a))
            m.check()
        assert m.verbs.round._cache_size() == 1


@pytest.mark.parametrize("mode", ["compact", "replay"])
def test_R22_a_forward_can_be_repeated(mode):
    """S5, R22, R4, R5: the recurrence run twice in one round: same outputs, checkpoint and cursor untouched."""
    spec = small_spec("gdn", mode, width=4)
    ids, offsets = np.repeat(np.array([7, 3], np.int32), 4), np.tile(np.arange(4, dtype=np.int32), 2)
    inputs = single(layer_inputs(draw_tokens(spec, np.random.default_rng(0), 8), draw_params(spec)))

    @quick_jit
    def run(state):
        state, receipt = ssm.prepare(spec, state, ssm.build_layout(spec, ids, offsets))
        first, o = ssm.forward(spec, state, receipt, 0, inputs)
        second, again = ssm.forward(spec, first, receipt, 0, inputs)
        done = ssm.accept(spec, second, ssm.StateAcceptance((receipt,), jnp.full(8, 3)))
        return state, (first, o), (second, again), done

    state = ssm.init_state(spec)
    for _ in range(3):
        opened, first, second, state = run(state)
        assert same_bits(first, second)
        assert same_bits(first[0].ssm, opened.ssm)
        assert mode == "compact" or same_bits(first[0].extra.cursor, opened.extra.cursor)


def test_R21_accept_may_come_before_the_forward():
    """R21: the forward reads its own copy of the cursor: both orders give the same outputs, records, cursors, folds."""
    spec = small_spec("gdn", "replay", width=1, history=4)
    ids, zeros = np.array([7, 3], np.int32), np.zeros(2, np.int32)

    def run(early, state, inputs):
        state, receipt = ssm.prepare(spec, state, ssm.build_layout(spec, ids, zeros))
        acceptance = ssm.StateAcceptance((receipt,), jnp.ones(2, jnp.int32))
        state = ssm.accept(spec, state, acceptance) if early else state
        state, o = ssm.forward(spec, state, receipt, 0, inputs)
        return (state if early else ssm.accept(spec, state, acceptance)), o

    params, rng = draw_params(spec), np.random.default_rng(0)
    runs = [quick_jit(partial(run, early)) for early in (False, True)]
    states = [ssm.init_state(spec)] * 2
    for _ in range(10):
        inputs = single(layer_inputs(draw_tokens(spec, rng, 2), params))
        states, outputs = zip(*(fn(state, inputs) for fn, state in zip(runs, states, strict=True)), strict=True)
        assert close(states[0], states[1]) and close(outputs[0], outputs[1])


@pytest.mark.parametrize("mode", MODES)
def test_S7_full_rollback(mode):
    """S7: W = 4 with the minimum accepted, then W = 2 after it; a whole round cancelled (aborted slots start anew)."""
    m = Machine(fs_spec("gdn", mode), 8, seed=7)
    for widths, accepts in ((4, 1), (2, 1), (4, 4), (4, 1), (2, 2), (1, 1), (4, 1)):
        m.round(np.full(8, widths), np.full(8, accepts))
        m.check()
    m.round(np.full(8, 4), np.array([0, 1, 2, 3] * 2))
    m.check()


@lru_cache
def forty_tokens(mode, value):
    """40 tokens with rejections, several folds, an export and an import; rejected drafts and dead bytes hold `value`."""
    m = Machine(fs_spec("gdn", mode), 8, seed=8, poison=(value, value))
    m.compare_outputs = lambda out, y, o, real: m.trace.extend(x[real].tobytes() for x in out)
    for step in range(16):
        m.round(np.full(8, 4), 1 + (np.arange(8) + step) % 4)
        if step == 7:
            m.move(np.arange(0, 8, 2))
    m.check()
    m.trace += [np.asarray(x).tobytes() for x in m.verbs.snapshot(m.state, m.ids(np.arange(8)))]
    return m.trace


@pytest.mark.parametrize("mode", MODES)
def test_S9_rejected_drafts_leave_no_trace(mode):
    """S9, V4, R3, R23: two runs that differ in rejected drafts only (0.7, NaN, 3e38) are bit-identical for 40 tokens."""
    traces = [forty_tokens(mode, value) for value in (0.7, float("nan"), 3e38)]
    assert traces[0] == traces[1] == traces[2]


@pytest.mark.parametrize("mode", MODES)
def test_S10_no_unwritten_buffer_is_committed(mode):
    """S10: all scratch poisoned at allocation and before each round; base token only in the first round."""
    m = Machine(fs_spec("gdn", mode), 8, seed=10, poison=(float("nan"), float("nan")))
    for a in (1, 1, 4, 1):
        m.round(np.full(8, 4), np.full(8, a))
        m.check()


@pytest.mark.parametrize("mode", MODES)
def test_S11_every_next_reader_sees_the_accepted_tokens_once(mode):
    """S11: verify and accept, then plain decode, a prompt chunk, export and import, reset, a merge, or another width."""
    m = Machine(fs_spec("gdn", mode), 12, seed=11)
    row = np.arange(12)
    for _ in range(2):
        m.round(np.full(12, 4), 1 + row % 4)
        m.round(np.where(row < 2, 1, 0), np.where(row < 2, 1, 0))
        m.prompt(row[2:4], np.array([1, 4]))
        m.move(row[4:6])
        m.clear(row[6:8])
        m.merge(row[8:10])
        m.round(np.where(row >= 10, 2, 0), np.where(row >= 10, 1, 0))
        m.check()


def two_halves(spec, state, swap, ids, offsets, inputs, lengths):
    """One round as two microbatches of half the rows each, one acceptance with both receipts."""
    t = ids.shape[0] // 2
    halves = [slice(0, t), slice(t, 2 * t)][:: -1 if swap else 1]
    rows = lambda x, at: x[at] if x.ndim and x.shape[0] == 2 * t else x  # noqa: E731
    receipts, outputs = [], []
    for at in halves:
        state, receipt = ssm.prepare(spec, state, ssm.build_layout(spec, ids[at], offsets[at], fixed=True))
        state, o = ssm.forward(spec, state, receipt, 0, jax.tree.map(partial(rows, at=at), inputs))
        receipts.append(receipt)
        outputs.append(o)
    n = lengths.reshape(2, -1)[:: -1 if swap else 1].reshape(-1)
    state = ssm.accept(spec, state, ssm.StateAcceptance(tuple(receipts), n))
    return state, jnp.concatenate(outputs[:: -1 if swap else 1])


@pytest.mark.parametrize("mode", MODES)
def test_R90_two_microbatches_equal_one_batch(mode):
    """R28, R39, R90: 2 x R/2 = 1 x R, in either order of the halves; an empty second half is legal."""
    spec = small_spec("gdn", mode, width=2, history=4)
    params, rng = draw_params(spec), np.random.default_rng(0)
    offsets = np.tile(np.arange(2, dtype=np.int32), 4)

    def whole(state, ids, offsets, inputs, lengths):
        state, receipt = ssm.prepare(spec, state, ssm.build_layout(spec, ids, offsets, fixed=True))
        state, o = ssm.forward(spec, state, receipt, 0, inputs)
        return ssm.accept(spec, state, ssm.StateAcceptance((receipt,), lengths)), o

    split = lambda swap: lambda state, *args: two_halves(spec, state, swap, *args)  # noqa: E731
    runs = [quick_jit(whole), quick_jit(split(False)), quick_jit(split(True))]
    states = [ssm.init_state(spec)] * 3
    for step in range(5):
        live = [7, 3, 5, 0] if step != 3 else [7, 3, spec.hold, spec.hold]
        ids, lengths = np.repeat(np.array(live, np.int32), 2), np.array([1, 2, 2, 1], np.int32)
        inputs = single(layer_inputs(draw_tokens(spec, rng, 8), params))
        results = [fn(state, ids, offsets, inputs, lengths) for fn, state in zip(runs, states, strict=True)]
        states = [state for state, _ in results]
        assert close(results[0], results[1]) and close(results[0], results[2])


def test_R92_fixed_equals_dynamic():
    """R91, R92: all lengths W: the fixed layout and its round equal the dynamic ones; the example of the requirement."""
    spec = small_spec(width=3)
    layout = ssm.build_layout(spec, jnp.array([7, 7, 7, 4, 2, 2, 8, 8]), jnp.array([0, 1, 2, 0, 0, 1, 0, 0]))
    assert layout.cu.tolist() == [0, 3, 4, 6, 6, 6, 6, 6, 6] and layout.slots.tolist() == [7, 4, 2, 8, 8, 8, 8, 8]
    assert layout.verify_len.tolist() == [3, 1, 2, 0, 0, 0, 0, 0] and int(layout.count) == 3
    ids, offsets = np.repeat(np.array([7, 3, 8], np.int32), 3), np.tile(np.arange(3, dtype=np.int32), 3)
    inputs = single(layer_inputs(draw_tokens(spec, np.random.default_rng(0), 9), draw_params(spec)))

    def run(fixed, state, inputs):
        state, receipt = ssm.prepare(spec, state, ssm.build_layout(spec, ids, offsets, fixed=fixed))
        state, o = ssm.forward(spec, state, receipt, 0, inputs)
        r = receipt.layout.slots.shape[0]
        return ssm.accept(spec, state, ssm.StateAcceptance((receipt,), jnp.full(r, 2))), o

    state = ssm.init_state(spec)
    assert close(quick_jit(partial(run, True))(state, inputs), quick_jit(partial(run, False))(state, inputs))


def test_R96_main_and_draft_share_a_layout():
    """R42, R66, R96: one layout, two states with their own receipts and accepted lengths."""
    main = small_spec("gdn", "native", width=2)
    draft = small_spec("kda", "replay", width=2, state_key="draft")
    layout = ssm.build_layout(main, jnp.array([7, 7, 3]), jnp.array([0, 1, 0]))
    states = {}
    for spec, lengths in ((main, [2, 1, 9]), (draft, [1, 1, 9])):
        state, receipt = ssm.prepare(spec, ssm.init_state(spec), layout)
        inputs = single(layer_inputs(draw_tokens(spec, np.random.default_rng(0), 3), draw_params(spec)))
        state, _ = quick_jit(partial(ssm.forward, spec))(state, receipt, 0, inputs)
        acceptance = ssm.StateAcceptance((receipt,), jnp.array(lengths))
        states[spec.state_key] = ssm.commit(spec, state, acceptance, (ledger := ssm.Ledger(), ledger.issue(receipt))[0])
        with pytest.raises(ValueError, match="state_key"):
            ssm.check_acceptance(
                draft if spec is main else main,
                acceptance.replace(forwards=(receipt.replace(mode=(draft if spec is main else main).mode),)),
            )
    assert np.asarray(states["main"].accepted)[[7, 3]].tolist() == [1, 0]
    assert np.asarray(states["draft"].extra.cursor)[[7, 3]].tolist() == [1, 1]
