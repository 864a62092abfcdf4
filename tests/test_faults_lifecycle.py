"""faults.md group L: ownership, reset, stale checkpoints, the boundary of the history. L9, L11 to L13 also need an engine."""

from dataclasses import fields
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import (
    NAN,
    bits,
    close,
    filled,
    fresh_verbs,
    fs_spec,
    named_leaves,
    of_slots,
    same_bits,
    set_slots,
    slot_rows,
    to_device,
    to_host,
)
from machine import Machine

import jax_ssm as ssm
from jax_ssm.state import CompactWindow, ConvSSMState, ReplayHistory

MODES = ("native", "compact", "replay")


def reach(m: Machine, n) -> None:
    """Bring requests to cursors n[i] in windows of the full width."""
    left = np.array(n)
    while left.any():
        step = np.minimum(left, m.spec.width)
        m.round(np.where(left > 0, m.spec.width, 0), step)
        left = left - step


def fork(m: Machine, source, target) -> None:
    """Copy requests onto other requests' slots through pages, without a clear: the targets' old content is poison."""
    m.disturb()
    count, order = len(source), np.arange(m.spec.hold, dtype=np.int32)
    pages = jax.tree.map(lambda x: jnp.full_like(x, NAN), ssm.init_pages(m.spec, m.spec.hold))
    pages = m.verbs.export(m.state, pages, order, m.ids(source), np.int32(count))
    host = to_host(m.state)
    set_slots(m.spec, host, m.slot[target], NAN)
    m.state = m.verbs.restore(to_device(host), pages, order, m.ids(target), np.int32(count))
    m.oracle.s[target], m.oracle.window[target] = m.oracle.s[source], m.oracle.window[source]
    m.oracle.lengths[target] = m.oracle.lengths[source]
    m.n[target] = m.phase[target] = m.accepted[target] = 0


def reused_slot(verbs_of, mode, first="prompt"):
    """Slots full of NaN are cleared and serve new requests of 1 and 4 prompt tokens, or decode at once."""
    m = Machine(fs_spec("gdn", mode), 8, poison=None, verbs_of=verbs_of)
    everyone = np.arange(8)
    m.state = to_device(filled(m.spec, NAN))
    m.state = m.verbs.clear(m.state, m.ids(everyone))
    if first == "prompt":
        m.prompt(everyone, np.array([1, 4] * 4))
    else:
        m.round(np.full(8, 4), np.array([1, 2, 3, 4] * 2))
    m.check()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", ["prompt", "decode"])
def test_L1_reused_slot_starts_from_zero(mode, first):
    """L1: state, window, history and cursor of all layers NaN, then clear: 1 and 4 tokens under the slow gate equal the
    oracle from zero."""
    from fixtures import verbs

    reused_slot(verbs, mode, first)


@pytest.mark.parametrize("forgotten", ["ssm", "conv", "accepted"])
def test_L1_planted_partial_clear_is_seen(monkeypatch, forgotten):
    real = ssm.clear
    lazy = lambda spec, state, slots: real(spec, state, slots).replace(**{forgotten: getattr(state, forgotten)})  # noqa: E731
    monkeypatch.setattr(ssm, "clear", lazy)
    with pytest.raises(AssertionError):
        reused_slot(fresh_verbs, "native", "decode")


@pytest.mark.parametrize("mode", MODES)
def test_L3_every_change_of_owner_resets_the_cursor(mode):
    """L3: allocation, import, fork and swap, each over a slot with a cursor at 13 and a poisoned history."""
    m = Machine(fs_spec("gdn", mode), 12, seed=1)
    everyone = np.arange(12)
    reach(m, np.array([0, 1, 2, 3, 4] * 2 + [1, 3]))
    m.move(everyone[:4])  # import into slots filled with 3e38 and integers 13
    m.check()
    fork(m, everyone[4:6], everyone[6:8])
    m.check()
    m.slot[8:10] = m.slot[[9, 8]]  # swap by handing over ids: nothing is copied, nothing may change
    for array in (m.oracle.s, m.oracle.window, m.n, m.phase, m.accepted):
        array[8:10] = array[[9, 8]]
    m.check()
    m.clear(everyone[10:])
    for _ in range(3):
        m.round(np.full(12, 4), np.array([1, 2, 3, 4] * 3))
        m.check()


def test_L4_clear_covers_every_field():
    """L4: every leaf of every mode set to a sentinel, cleared, is zero in the slot and untouched elsewhere. A field that is
    added without a slot axis, or not reached by clear, fails here by itself."""
    extras = {"native": (), "compact": fields(CompactWindow), "replay": fields(ReplayHistory)}
    for mode in MODES:
        spec = fs_spec("gdn", mode, slots=9)
        expected = {f.name for f in fields(ConvSSMState)} - {"extra"} | {f"extra.{f.name}" for f in extras[mode]}
        host = filled(spec, 2.5)
        leaves = named_leaves(host)
        assert set(leaves) == expected
        for name, leaf in leaves.items():
            rows = spec.rows_per_slot if name == "ssm" else 1
            assert leaf.shape[min(leaf.ndim - 1, 1)] == spec.slots * rows, f"{name} has no slot axis"
        state = ssm.clear(spec, to_device(host), np.array([5, 2]))
        assert not any(bits(x).any() for x in of_slots(spec, state, [5, 2, 8]).values())
        rest = [0, 1, 3, 4, 6, 7]
        assert same_bits(of_slots(spec, state, rest), of_slots(spec, host, rest))
        assert len(slot_rows(spec, "ssm", [5, 2])) == 2 * spec.rows_per_slot


def test_L5_every_reader_sees_checkpoint_and_history():
    """L5: cursors 0, 1, 7, 15, 16 (L = 16): snapshot, export and fork give checkpoint plus history, a second call the
    same bits, no cursor moves; merge then leaves the same state in the checkpoint of every layer."""
    m = Machine(fs_spec("gdn", "replay", history=16), 10, seed=2)
    reach(m, np.array([0, 1, 7, 15, 16] * 2))
    everyone, count, ids = np.arange(10), np.int32(10), m.ids(np.arange(10))
    m.disturb()
    assert np.array_equal(np.asarray(m.state.extra.cursor)[m.slot], m.n)
    conv, state = to_host(m.verbs.snapshot(m.state, ids))
    assert same_bits(to_host(m.verbs.snapshot(m.state, ids)), (conv, state))
    order = np.arange(m.spec.hold, dtype=np.int32)
    for _ in range(2):
        pages = m.verbs.export(m.state, ssm.init_pages(m.spec, m.spec.hold), order, ids, count)
        assert close(np.asarray(pages.ssm)[:10], state[:10]) and same_bits(np.asarray(pages.conv)[:10], conv[:10])
    assert same_bits(m.state, m.before)
    m.check()
    fork(m, everyone[:5], everyone[5:])
    m.check()
    m.merge(everyone[:5])
    merged = np.moveaxis(np.asarray(m.state.ssm)[:, m.slot[:5]], 0, 1)
    assert close(merged, state[:5])


@pytest.mark.parametrize(("history", "width"), [(4, 1), (4, 4), (8, 8), (16, 4)])
def test_L6_boundary_of_the_history(history, width):
    """L6: every start cursor 0..L, every accept 1..W in the first two rounds, the third in rotation; illegal pairs are
    refused in test_spec. Folds happen exactly when n + W > L (checked by the machine's model)."""
    heads = {} if width < 8 else dict(layers=1)
    spec = fs_spec("gdn", "replay", history=history, width=width, **heads)
    cases = [(n, a, b) for n in range(history + 1) for a in range(1, width + 1) for b in range(1, width + 1)]
    for start in range(0, len(cases), 196):
        n, a, b = np.resize(np.array(cases[start : start + 196]).T, (3, min(196, len(cases) - start)))
        m = Machine(spec, len(n), seed=start)
        reach(m, n)
        for accepts in (a, b, 1 + (3 * a + b + n) % width):
            m.round(np.full(len(n), width), accepts)
        m.check()
        assert m.folds > 0


def test_L6_planted_missing_fold_is_seen(monkeypatch):
    """A round that starts without the fold it needs."""
    real = ssm.prepare

    def never_folds(spec, state, layout, config):
        receipt = real(spec, state, layout, config)[1]
        return state.replace(extra=state.extra.replace(forward_cursor=state.extra.cursor)), receipt

    monkeypatch.setattr(ssm, "prepare", never_folds)
    m = Machine(fs_spec("kda", "replay", layers=1), 4, verbs_of=fresh_verbs)
    m.round(np.full(4, 4), np.array([4, 1, 3, 2]))
    with pytest.raises(AssertionError):
        m.round(np.full(4, 4), np.array([4, 1, 3, 2]))


def test_L6_reaching_L_without_overflow_does_not_fold():
    """R19: n = L is full, not over: the checkpoint moves with the next token, not before."""
    m = Machine(fs_spec("gdn", "replay"), 1)
    m.round([4], [4])
    assert (m.folds, m.n[0]) == (0, 4) and not np.asarray(m.state.ssm)[:, m.slot].any()
    m.round([1], [1])
    assert (m.folds, m.n[0], m.phase[0]) == (1, 1, 1) and np.asarray(m.state.ssm)[:, m.slot].any()


def test_R18_worked_example():
    """The table of requirements D: L = 4, verify 3, 3, 1, 1 and accept 2, 3, 1, 1 gives cursors 2, 11, 12, 1."""
    m = Machine(fs_spec("kda", "replay"), 1)
    for verify, accept, cursor in ((3, 2, 2), (3, 3, 11), (1, 1, 12), (1, 1, 1)):
        m.round([verify], [accept])
        assert np.asarray(m.state.extra.cursor)[m.slot[0]] == cursor
        m.check()


def test_L9_a_refused_import_changes_nothing():
    """L9 at this layer: restore checks pages, slots and page ids before it writes; the slot stays as clear left it."""
    spec = fs_spec("gdn", "replay", slots=9)
    state = to_device(filled(spec, 1.0))
    before = to_host(state)
    pages = ssm.init_pages(spec, 2)
    for bad in (
        partial(ssm.restore, spec, state, pages, np.array([0, 2]), np.array([3, 4]), 2),
        partial(ssm.restore, spec, state, pages, np.array([0, 1]), np.array([3, 8]), 2),
        partial(ssm.restore, spec, state, pages.replace(conv=pages.conv[:, :1]), np.array([0, 1]), np.array([3, 4]), 2),
    ):
        with pytest.raises(ValueError):
            bad()
        assert same_bits(state, before)


def test_L13_layouts_and_receipts_are_values():
    """L13, R2: a receipt keeps its slots whatever happens to the array they came from, and refuses assignment."""
    spec = fs_spec("gdn", "native", slots=9)
    ids = np.array([7, 3], np.int32)
    _, receipt = ssm.prepare(spec, ssm.init_state(spec), ssm.build_layout(spec, ids, np.zeros(2, np.int32)))
    ids[:] = 5
    assert receipt.layout.slots.tolist()[:2] == [7, 3]
    with pytest.raises(AttributeError):
        receipt.offset = 0
    assert hash((receipt.mode, receipt.config, receipt.state_key))
