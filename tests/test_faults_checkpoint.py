"""faults.md group C: pages between slots, modes, widths and shards. C6 (broken bytes), C8, C10, C11, C15 need an engine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import (
    NAN,
    PROMPT,
    bits,
    filled,
    fresh_verbs,
    fs_spec,
    named_leaves,
    same_bits,
    to_device,
    to_host,
    verbs,
)
from machine import Machine

import jax_ssm as ssm
from jax_ssm.conv import conv_sequence

MODES = ("native", "compact", "replay")


def journey(verbs_of, cursors, *, history=16, tokens=20):
    """Cursors as given (both halves), export, import elsewhere, twice in a row, then `tokens` more tokens; all checked."""
    m = Machine(fs_spec("gdn", "replay", history=history), len(cursors), seed=12, verbs_of=verbs_of)
    everyone = np.arange(m.count)
    for target in (np.full(m.count, history) * (everyone % 2), np.array(cursors)):
        left = target.copy()
        while left.any():
            step = np.minimum(left, 4)
            m.round(np.where(left > 0, 4, 0), step)
            left = left - step
    m.move(everyone)
    m.check()
    m.move(everyone)
    m.check()
    for _ in range(tokens // 4):
        m.round(np.full(m.count, 4), np.full(m.count, 4))
        m.check()


def test_C1_history_survives_export():
    """C1: cursor 0, 1, 7, 15 in either half; two journeys, 20 more tokens: equal to the uninterrupted oracle to 1e-5."""
    journey(verbs, [0, 1, 7, 15, 1, 2, 8, 16])


def test_C1_planted_export_without_history_is_seen(monkeypatch):
    real = ssm.export_into

    def checkpoint_only(spec, state, *args):
        h = state.extra
        half = 2 * spec.history
        return real(spec, state.replace(extra=h.replace(cursor=h.cursor // half * half)), *args)

    monkeypatch.setattr(ssm, "export_into", checkpoint_only)
    with pytest.raises(AssertionError):
        journey(fresh_verbs, [1, 2, 3, 4], history=4)


# ---------------------------------------------------------------------------------------------- shards of the page layout


def shard_spec(tp):
    """One of tp ranks of H = KH = 4, HV = 8; eight slots."""
    heads = dict(q_heads=4 // tp, k_heads=4 // tp, v_heads=8 // tp)
    return fs_spec("gdn", "native", slots=9, **heads)


def blocks(spec):
    """Sizes of the q, k and v blocks of the channel axis."""
    return spec.q_heads * spec.k_dim, spec.k_heads * spec.k_dim, spec.v_heads * spec.v_dim


def split(spec, pages, tp):
    """Pages of the whole as pages of tp ranks: value heads in runs, and each of the blocks q | k | v by head."""
    parts = np.split(pages.conv, np.cumsum(blocks(spec))[:-1], axis=2)
    convs = [np.split(part, tp, axis=2) for part in parts]
    states = np.split(pages.ssm, tp, axis=2)
    return [ssm.Pages(states[r], np.concatenate([c[r] for c in convs], axis=2)) for r in range(tp)]


def join(spec, ranks):
    """The inverse of `split`; spec is that of one rank."""
    parts = [np.split(p.conv, np.cumsum(blocks(spec))[:-1], axis=2) for p in ranks]
    conv = np.concatenate([np.concatenate([p[i] for p in parts], axis=2) for i in range(3)], axis=2)
    return ssm.Pages(np.concatenate([p.ssm for p in ranks], axis=2), conv)


def test_C3_pages_are_cut_by_head_in_three_blocks():
    """C3, R94: TP 1, 2, 4 in every direction with conv content = channel index, state content = value head: every rank gets
    exactly its channels of q, k and v, a restore and a new export keep them, and joining gives the page back."""
    whole = shard_spec(1)
    ids = np.array([5, 2], np.int32)
    pages = to_host(ssm.init_pages(whole, 2))
    pages.conv[:] = np.arange(whole.channels)[:, None]
    pages.ssm[:] = np.arange(8)[:, None, None]

    def pass_through(spec, pages):
        v = verbs(spec)
        state = v.restore(ssm.init_state(spec), pages, np.arange(2, dtype=np.int32), ids, np.int32(2))
        return to_host(v.export(state, ssm.init_pages(spec, 2), np.arange(2, dtype=np.int32), ids, np.int32(2)))

    for source in (1, 2, 4):
        ranks = [pass_through(shard_spec(source), p) for p in split(whole, pages, source)]
        for r, page in enumerate(ranks):
            spec = shard_spec(source)
            q, k, v = np.split(page.conv[0, 0, :, 0].astype(int), np.cumsum(blocks(spec))[:-1])
            assert q.tolist() == list(range(r * len(q), (r + 1) * len(q)))
            assert k.tolist() == [64 + i for i in range(r * len(k), (r + 1) * len(k))]
            assert v.tolist() == [128 + i for i in range(r * len(v), (r + 1) * len(v))]
            assert page.ssm[0, 0, :, 0, 0].astype(int).tolist() == list(range(r * spec.v_heads, (r + 1) * spec.v_heads))
        assert same_bits(join(shard_spec(source), ranks), pages)


def test_C3_planted_flat_slice_is_seen():
    """One flat slice of the channels a rank takes channels of several blocks: not what `split` gives."""
    whole = shard_spec(1)
    pages = ssm.Pages(np.zeros((1, 2, 8, 8, 16)), np.tile(np.arange(whole.channels)[:, None], (1, 2, 1, 3)))
    flat = np.split(pages.conv, 2, axis=2)
    assert not any(np.array_equal(a, b.conv) for a, b in zip(flat, split(whole, pages, 2), strict=True))


def test_C3_the_convolution_reads_the_blocks_in_order():
    """C3: channel c of y depends on channel c of x and of the window only, so a cut by blocks cuts the computation."""
    whole, half = shard_spec(1), shard_spec(2)
    m = Machine(whole, 1, poison=None)
    tokens = m.draw([0], 4, [4])
    x, weight = jnp.asarray(tokens.x[0, :, 0])[None], jnp.asarray(m.params.weight[0])
    y = np.asarray(conv_sequence(x, weight))
    for rank in range(2):
        at = np.concatenate([np.arange(n // 2) + rank * n // 2 + sum(blocks(whole)[:i]) for i, n in enumerate(blocks(whole))])
        assert len(at) == half.channels
        assert same_bits(np.asarray(conv_sequence(x[..., at], weight[at])), y[..., at])


# ------------------------------------------------------------------------------------------------------- across modes


def adopt(m: Machine, other: Machine, pages) -> None:
    """Load the first pages into all requests of m and take over what the oracle of `other` knows."""
    order = np.arange(m.spec.hold, dtype=np.int32)
    host = filled(m.spec, NAN)
    m.state = m.verbs.restore(to_device(host), pages, order, m.ids(np.arange(m.count)), np.int32(m.count))
    m.oracle.s, m.oracle.window = other.oracle.s.copy(), other.oracle.window.copy()
    m.oracle.lengths = other.oracle.lengths.copy()
    m.n[:] = m.phase[:] = m.accepted[:] = 0


def export_all(m: Machine):
    order = np.arange(m.spec.hold, dtype=np.int32)
    m.disturb()
    return m.verbs.export(m.state, ssm.init_pages(m.spec, m.spec.hold), order, m.ids(np.arange(m.count)), np.int32(m.count))


@pytest.mark.parametrize("source", MODES)
def test_C4_R85_pages_do_not_know_their_mode(source):
    """C4, R85, R86: all 3 x 3 pairs of modes; the exporter has drafts rejected in its last round (accepted row 0..3)."""
    a = Machine(fs_spec("gdn", source), 8, seed=13)
    a.round(np.full(8, 4), np.array([4, 3, 2, 1] * 2))
    a.round(np.full(8, 4), np.array([1, 2, 3, 4] * 2))
    pages = export_all(a)
    for target in MODES:
        b = Machine(fs_spec("gdn", target), 8, seed=13)
        adopt(b, a, pages)
        b.check()
        for n in (4, 2):
            b.round(np.full(8, 4), np.full(8, n))
            b.check()


def test_C4_prefill_node_without_drafts_feeds_a_replay_node():
    """C4, S19: prefill with W = 1, native; decode with W = 4, replay: window and state arrive, the window is not zero."""
    a = Machine(fs_spec("gdn", "native", width=1), 8, seed=14)
    a.prompt(np.arange(8), np.array([1, 2, 3, 4, 5, 5, 3, 1]))
    pages = export_all(a)
    assert np.asarray(pages.conv[:8]).astype(float).any(axis=(1, 2, 3)).all()
    b = Machine(fs_spec("gdn", "replay"), 8, seed=14)
    adopt(b, a, pages)
    b.check()
    b.round(np.full(8, 4), np.array([4, 3, 2, 1] * 2))
    b.check()


def test_C6_a_foreign_page_is_refused_as_a_whole():
    """C6 at this layer: pages whose state or window part is of another geometry are refused before anything is written."""
    spec = fs_spec("gdn", "replay", slots=9)
    state, good = to_device(filled(spec, 1.0)), ssm.init_pages(spec, 2)
    before = to_host(state)
    for name in ("ssm", "conv"):
        for bad in (getattr(good, name)[:, :1], getattr(good, name)[:1], getattr(good, name)[..., :-1]):
            with pytest.raises(ValueError, match="pages"):
                ssm.restore(spec, state, good.replace(**{name: bad}), np.arange(2), np.array([3, 4]), 2)
            assert same_bits(state, before)


# ------------------------------------------------------------------------------------------------- order and labels


def test_C7_an_export_in_flight_is_not_disturbed():
    """C7, L11: export, then decode at once on the donated state, then look: the bytes are those of the call, 50 times."""
    m = Machine(fs_spec("gdn", "native"), 4, seed=15, poison=None)
    everyone, order = np.arange(4), np.arange(m.spec.hold, dtype=np.int32)
    tokens = m.draw(everyone, 4, np.full(4, 4))
    args = m.pack(everyone, tokens, np.full(4, 4))
    lengths = np.resize(np.array([4, 3, 2, 1], np.int32), m.spec.hold)
    pages = []
    for _ in range(50):
        conv, state = to_host(m.verbs.snapshot(m.state, m.ids(everyone)))
        new = m.verbs.export(m.state, ssm.init_pages(m.spec, m.spec.hold), order, m.ids(everyone), np.int32(4))
        m.state = m.verbs.round(m.state, *args, m.conv_params, lengths)[0]
        pages.append((new, conv[:4], state[:4]))
    for new, conv, state in pages:
        assert same_bits(np.asarray(new.conv)[:4], conv) and same_bits(np.asarray(new.ssm)[:4], state)


@pytest.mark.parametrize("mode", MODES)
def test_C8_C9_a_page_is_the_state_after_exactly_the_accepted_tokens(mode):
    """C9: label = accepted tokens, boundaries with pending drafts, a = 1..W: an import that is fed the tokens from the label
    on equals the oracle at once. C8: a second export to the same page supersedes the first."""
    m = Machine(fs_spec("gdn", mode), 8, seed=16)
    m.round(np.full(8, 4), np.array([1, 2, 3, 4] * 2))
    export_all(m)
    m.round(np.full(8, 4), np.array([4, 1, 2, 3] * 2))
    label, pages = m.oracle.lengths.copy(), export_all(m)
    b = Machine(m.spec, 8, seed=17)
    adopt(b, m, pages)
    assert np.array_equal(b.oracle.lengths, label) and label.tolist() == [5, 3, 5, 7] * 2
    b.check()
    b.round(np.ones(8, int), np.ones(8, int))
    b.check()


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
def test_R8_R48_restore_after_live_history(state_dtype):
    """R8, R48: replay with live history: after restore the cursor and accepted index are 0, no trace of the old owner is
    left in any leaf; the state is close to the uninterrupted run (bf16: one more rounding, a tolerance only)."""
    act = "fp32" if state_dtype == "bf16" else "bf16"
    m = Machine(fs_spec("gdn", "replay", ssm_dtype=state_dtype, act_dtype=act), 8, seed=18)
    m.round(np.full(8, 4), np.array([1, 2, 3, 4] * 2))
    m.move(np.arange(8))
    for name, leaf in named_leaves(m.state).items():
        if name not in ("ssm", "conv"):
            x = np.asarray(leaf)
            assert not bits(x[m.slot] if x.ndim == 1 else x[:, m.slot]).any(), name
    window = np.asarray(m.state.conv)[:, m.slot]
    assert not bits(window[..., m.spec.conv_width - 1 :]).any()
    m.check()


def test_R24_prompt_after_decode_is_the_same_in_every_mode():
    """R24: decode, then a prompt chunk on the same slots: replay and compact equal native from the same tokens."""
    states = []
    for mode in MODES:
        m = Machine(fs_spec("gdn", mode), 8, seed=19)
        m.round(np.full(8, 4), np.array([1, 2, 3, 4] * 2))
        m.prompt(np.arange(8), 1 + np.arange(8) % PROMPT)
        m.check()
        conv, state = to_host(m.verbs.snapshot(m.state, m.ids(np.arange(8))))
        states.append((conv[:8], state[:8]))
    for conv, state in states[1:]:
        assert same_bits(conv, states[0][0])
        np.testing.assert_allclose(state, states[0][1], rtol=2e-4, atol=2e-5)


def test_pages_of_many_requests_at_once():
    """R38: batch export of all 196 requests in permuted slots and pages, half of the page ids out of range."""
    m = Machine(fs_spec("gdn", "compact"), 196, seed=20)
    m.round(np.full(196, 4), 1 + np.arange(196) % 4)
    page_ids = np.random.default_rng(0).permutation(m.spec.hold).astype(np.int32)
    page_ids[1::2] += m.spec.hold
    pages = jax.tree.map(lambda x: jnp.full_like(x, NAN), ssm.init_pages(m.spec, m.spec.hold))
    pages = m.verbs.export(m.state, pages, page_ids, m.ids(np.arange(196)), np.int32(196))
    conv, state = to_host(m.verbs.snapshot(m.state, m.ids(np.arange(196))))
    written = page_ids[:196:2]
    assert same_bits(np.asarray(pages.ssm)[written], state[:196:2])
    assert same_bits(np.asarray(pages.conv)[written], conv[:196:2])
    rest = np.setdiff1d(np.arange(m.spec.hold), written)
    assert all(np.isnan(np.asarray(x).astype(float)[rest]).all() for x in jax.tree.leaves(pages))
