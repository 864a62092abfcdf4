"""Exhaustive state machine: every window, acceptance and start cursor, with every other verb in between, against the oracle.

Each case is one slot of a batch. A case reaches a start cursor, verifies and accepts a first window, lets one other verb
happen, then verifies two more windows; state, convolution window, cursors and untouched bytes are checked after every step.
All bytes that carry no accepted token hold NaN or 3e38 (see `machine.Machine`). Covers L5, L6, S1, S2, S3, S5, S7, S9,
S10, S11 and C1 at this layer, and R18 to R25, R27 to R31.
"""

import jax
import numpy as np
import pytest
from fixtures import PROMPT, fresh_verbs, fs_spec
from machine import Machine

from jax_ssm import executors

WINDOWS = [(t, a) for t in range(1, 5) for a in range(t + 1)]  # verified, accepted: 14 pairs, 0 accepted = aborted
VERBS_BETWEEN = ("nothing", "merge", "move", "decode", "clear", "prompt", "merge and prompt")


def reach(m: Machine, n, phase) -> None:
    """Bring every request from an empty slot to cursor n[i] in half phase[i], in windows of the full width."""
    n, phase = np.broadcast_to(n, m.count), np.broadcast_to(phase, m.count)
    for target in (phase * m.spec.history, n):
        left = target.copy()
        while left.any():
            step = np.minimum(left, m.spec.width)
            m.round(np.where(left > 0, m.spec.width, 0), step)
            left = left - step
    if m.spec.mode == "replay":
        assert np.array_equal(m.n, n) and np.array_equal(m.phase, phase)


def between(m: Machine, kind: np.ndarray) -> None:
    """Apply verb number kind[i] of VERBS_BETWEEN to request i, all requests of one verb in one call.

    Prompts are left out where they would only compile once more what the other rules and modes have shown.
    """
    prompts = m.spec.rule == "gdn" and m.spec.history == 4 or m.spec.mode == "native"
    for number, name in enumerate(VERBS_BETWEEN):
        rows = np.flatnonzero(kind == number)
        if not rows.size or name == "nothing":
            continue
        if "merge" in name:
            m.merge(rows)
        if name == "move":
            m.move(rows)
        if name == "decode":
            m.round(*np.isin(np.arange(m.count), rows)[None].repeat(2, 0).astype(int))
        if name == "clear":
            m.clear(rows)
        if "prompt" in name and prompts:
            m.prompt(rows, rows % (PROMPT + 1))


def sweep(m: Machine, starts) -> None:
    """All pairs of two windows for each start (cursor, half); the verb in between and the third window rotate."""
    case = np.arange(m.count)
    windows = np.array(WINDOWS)
    for turn, (n, phase) in enumerate(starts):
        m.clear(case)
        reach(m, n, phase)
        m.round(*windows[case // 14 % 14].T)
        m.check()
        between(m, (case // 14 + case + turn) % len(VERBS_BETWEEN))
        m.check()
        for number in (case, 5 * case + case // 14 + turn):
            m.round(*windows[number % 14].T)
            m.check()


@pytest.mark.parametrize("mode", ["native", "compact", "replay"])
@pytest.mark.parametrize("rule", ["gdn", "kda"])
def test_every_cursor_window_and_verb(rule, mode):
    """L = 4: cursors 0..4 in both halves, 14 x 14 windows, seven verbs in between; fp32 state, bf16 activations."""
    m = Machine(fs_spec(rule, mode), 196)
    starts = [(n, 0) for n in range(5)] + [(n, 1) for n in range(1, 5)]
    sweep(m, starts if mode == "replay" else starts[:5:2])
    assert mode != "replay" or m.folds > 1000


@pytest.mark.parametrize(
    ("rule", "mode", "state", "act"),
    [("kda", "native", "bf16", "fp32"), ("gdn", "replay", "bf16", "fp32")],
)
def test_state_and_activation_dtypes(rule, mode, state, act):
    """bf16 states against an oracle that rounds where the mode rounds (R6, R7): each token, or at folds."""
    m = Machine(fs_spec(rule, mode, ssm_dtype=state, act_dtype=act), 196)
    sweep(m, [(0, 0), (3, 1)])


def test_history_of_16():
    """L = 16: every cursor 0..16 in both halves against every window, then moves and more windows."""
    m = Machine(fs_spec("gdn", "replay", history=16), 196)
    case, windows = np.arange(m.count), np.array(WINDOWS)
    for turn in range(3):
        m.clear(case)
        number = case + 196 * turn
        n = number // 14 % 17
        reach(m, n, np.where(n > 0, number // (14 * 17) % 2, 0))
        m.round(*windows[number % 14].T)
        m.check()
        between(m, (case // 14 + turn) % len(VERBS_BETWEEN))
        m.round(*windows[(3 * number + turn) % 14].T)
        m.check()


@pytest.mark.parametrize("mode", ["native", "compact", "replay"])
def test_surroundings_cannot_be_seen(mode):
    """The same program with clean, NaN and 3e38 surroundings gives the same bits everywhere that counts (V4, N12, S9)."""
    results = []
    for poison in ((0.0, 0.0), (float("nan"), float("nan")), (3e38, 3e38)):
        m = Machine(fs_spec("gdn", mode), 196, seed=3, poison=poison)
        case, windows = np.arange(m.count), np.array([w for w in WINDOWS if w[1] > 0])
        for turn in range(5):
            m.round(*windows[(case + 3 * turn) % len(windows)].T)
            if turn == 2:
                m.move(case[::2])
        conv, state = m.verbs.snapshot(m.state, m.ids(case))
        results.append([np.asarray(x).tobytes() for x in jax.tree.leaves((conv, state))])
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("mode", ["native", "compact", "replay"])
def test_batch_order_permutes_results_only(mode):
    """V5: the same requests in another row order leave the same bits in every slot."""
    results = []
    for order_seed in (0, 1):
        m = Machine(fs_spec("gdn", mode), 196, seed=5, order_seed=order_seed)
        for width in (4, 2, 3, 4):
            m.round(np.full(m.count, width), 1 + np.arange(m.count) % width)
        results.append([np.asarray(x).tobytes() for x in jax.tree.leaves(m.state)])
    assert results[0] == results[1]


def test_machine_sees_a_lost_base_token(monkeypatch):
    """The equipment itself: an acceptance that counts drafts instead of tokens fails at the first check."""
    real = executors.accept
    monkeypatch.setattr("jax_ssm.accept", lambda spec, state, a: real(spec, state, a.replace(lengths=a.lengths - 1)))
    m = Machine(fs_spec("gdn", "native"), 196, verbs_of=fresh_verbs)
    with pytest.raises(AssertionError):
        m.round(np.full(m.count, 4), np.full(m.count, 3))
