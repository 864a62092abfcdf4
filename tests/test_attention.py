"""Full attention over slotted KV against a float64 softmax: decode, verify, rollback, prompt chunks, poison, pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import BIG, NAN, Session

from jax_ssm import attention
from jax_ssm.attention import Bucket, KVSpec, full, kv, plan

SMALL = KVSpec(layers=2, slots=6, max_len=40, heads=4, kv_heads=2, head_dim=8, width=3, dtype="fp32")


@pytest.fixture
def short_blocks(monkeypatch):
    """Walk the 40 positions of SMALL in blocks of 16, the last one ragged."""
    monkeypatch.setattr(plan, "MAX_BLOCK", 16)


def rounds(session: Session, buckets, seed: int, count: int) -> None:
    """Random rounds: prompt chunks and verifies of permuted slots with random acceptance, slots reused when full."""
    rng, spec = np.random.default_rng(seed), session.spec
    dynamic, fixed, prompt = buckets
    for i in range(count):
        for slot in range(spec.hold):
            if slot not in session.owned or session.length(slot) + 7 > spec.max_len:
                session.open(slot)
        order = rng.permutation(spec.hold)[: rng.integers(1, 4)]
        if i % 3 == 0:
            session.prefill(prompt, [(int(s), int(rng.integers(0, prompt.tokens + 1))) for s in order])
        else:
            bucket = fixed if i % 3 == 1 else dynamic
            lengths = [spec.width if bucket.fixed else int(rng.integers(1, spec.width + 1)) for _ in order]
            session.verify(bucket, [(int(s), n, int(rng.integers(1, n + 1))) for s, n in zip(order, lengths, strict=True)])


@pytest.mark.parametrize("dtype,poison", [("fp32", NAN), ("fp32", BIG), ("bf16", NAN)])
def test_random_rounds_equal_the_oracle(short_blocks, dtype, poison):
    """R62, R64: any order of chunks, verifies and rollbacks; everything that no request owns is NaN or 3e38 all along."""
    session = Session(KVSpec(**{**vars(SMALL), "dtype": dtype}), poison=poison)
    buckets = Bucket(4, 9), Bucket(3, 9, "decode", fixed=True), Bucket(3, 7, "prefill")
    rounds(session, buckets, seed=1, count=36)
    for run, _ in session.steps.values():
        assert run._cache_size() == 1


def test_ordinary_decode_in_one_block():
    """W = 1, the whole KV in one block, up to the last position."""
    session = Session(KVSpec(layers=1, slots=3, max_len=12, heads=2, kv_heads=1, head_dim=4, dtype="fp32", scale=0.3))
    session.open(1), session.open(0)
    for _ in range(12):
        session.verify(Bucket(2, 2), [(1, 1, 1), (0, 1, 1)])
    with pytest.raises(ValueError, match=r"adds 1 tokens to 12: allowed are max_len=12"):
        batch = attention.build_batch(session.spec, Bucket(2, 2), [1], b_mtp_index=[0], b_ready_cache_len=session.state.length)
        attention.update(session.layer_spec, session.steps[Bucket(2, 2)][1], session.state, batch)


def test_tokens_beyond_max_len_change_nothing_when_traced():
    """Traced values cannot raise: such tokens are not stored, their outputs are zero, the length stays."""
    spec = KVSpec(layers=1, slots=3, max_len=4, heads=2, kv_heads=1, head_dim=4, width=2, dtype="fp32")
    session = Session(spec)
    session.open(0)
    session.prefill(Bucket(1, 4, "prefill"), [(0, 3)])
    before = np.asarray(session.state.k[:, :, :3])
    outputs = session.verify(Bucket(1, 2), [(0, 2, 1)], check=False)
    assert np.any(outputs[0][0]) and not np.any(outputs[0][1])
    np.testing.assert_array_equal(before[:, 0], np.asarray(session.state.k[:, 0, :3]))
    assert int(session.state.length[0]) == 4
    outputs = session.verify(Bucket(1, 2), [(0, 1, 0)], check=False)
    assert not np.any(outputs[0]) and int(session.state.length[0]) == 4


@pytest.mark.parametrize("split", [(23,), (5, 18), (1, 16, 6), (7,) * 3 + (2,), (0, 23, 0)])
def test_prefill_resumes_at_any_split(short_blocks, split):
    """Chunks of any length leave the same bits in the pool and the oracle's outputs."""
    bucket, spec = Bucket(2, 23, "prefill"), SMALL
    whole = Session(spec).draw((1, 23), np.ones((1, 23), bool))
    session = Session(spec)
    session.open(3), session.open(0)
    start = 0
    for n in split:
        chunk = [np.full((2, 23) + x.shape[2:], NAN, x.dtype) for x in whole]
        for x, source in zip(chunk, whole, strict=True):
            x[1, :n] = source[0, start : start + n]
        session.prefill(bucket, [(0, 0), (3, n)], inputs=[chunk] * spec.layers)
        start += n
    for layer in range(spec.layers):
        np.testing.assert_array_equal(np.asarray(session.state.k)[layer, 3, :23], whole[1][0])
        np.testing.assert_array_equal(np.asarray(session.state.v)[layer, 3, :23], whole[2][0])


def test_rejected_tokens_are_overwritten_and_forward_repeats():
    """R23 for KV: after accepting 1 of 3 the next round starts at the second position; a second forward gives the same."""
    spec = SMALL
    session = Session(spec)
    session.open(2)
    bucket = Bucket(1, 3)
    session.verify(bucket, [(2, 3, 1)])
    assert int(session.state.length[2]) == 1
    session.verify(bucket, [(2, 3, 3)])
    assert int(session.state.length[2]) == 4

    ctx = session.steps[bucket][1]
    batch = attention.build_batch(spec, bucket, [2] * 3, b_mtp_index=range(3), b_ready_cache_len=session.state.length)
    state, ctx = attention.update(session.layer_spec, ctx, session.state, batch)
    inputs = attention.FullAttentionInputs(*session.draw((3,), np.ones(3, bool)))
    forward = jax.jit(lambda *a: attention.forward(session.bindings[0], *a))
    state, first = forward(ctx, state, inputs)
    again, second = forward(ctx, state, inputs)
    np.testing.assert_array_equal(first, second)
    jax.tree.map(np.testing.assert_array_equal, state, again)


def test_rows_do_not_depend_on_their_neighbours():
    """Bits of a row are its own: same bucket, other order, other company."""
    results = []
    for rows in ([(1, 2, 2), (4, 3, 3)], [(4, 3, 3), (0, 1, 1), (1, 2, 2)]):
        session = Session(SMALL, seed=5)
        for slot in range(5):
            session.open(slot)
            session.prefill(Bucket(1, 9, "prefill"), [(slot, 5 + slot)])
        session.rng = np.random.default_rng(8)
        tokens = {s: session.draw((3,), np.ones(3, bool)) for s in (4, 1, 0)}
        parts = [[tokens[s][j][:n] for s, n, _ in rows] for j in range(3)]
        inputs = [np.concatenate(x + [np.zeros((9 - sum(map(len, x)),) + x[0].shape[1:], x[0].dtype)]) for x in parts]
        session.draw = lambda lead, real, inputs=inputs: inputs
        outputs = session.verify(Bucket(4, 9), rows)
        edges = np.cumsum([0] + [n for _, n, _ in rows])
        results.append({s: [o[edges[i] : edges[i + 1]] for o in outputs] for i, (s, _, _) in enumerate(rows)})
    for slot in (1, 4):
        np.testing.assert_array_equal(results[0][slot], results[1][slot])


def naive_attend(plan, blocks, q, source, load, visible, scale):
    """A planted fault: masks the scores only, so a weight of zero meets whatever value lies beyond the length."""
    at = jnp.arange(plan.block * plan.blocks)
    k, v = load(source, at)
    group = q.shape[2] // k.shape[2]
    scores = jnp.einsum("rnhd,rphd->rhnp", q, jnp.repeat(k, group, 2)) * scale
    weights = jax.nn.softmax(jnp.where(visible(at)[:, None], scores, -1e30), axis=-1)
    return source, jnp.einsum("rhnp,rphd->rnhd", weights, jnp.repeat(v, group, 2))


@pytest.mark.parametrize("fault", ["values not masked", "mask one too wide", "no causality", "offset by one"])
def test_planted_faults_are_red(monkeypatch, fault):
    """The oracle and the poison catch each of these."""
    attend, committed = full.attend, full.committed
    if fault == "values not masked":
        monkeypatch.setattr(full, "attend", naive_attend)
    elif fault == "offset by one":
        monkeypatch.setattr(full, "committed", lambda *a: jnp.maximum(committed(*a) - 1, 0))
    else:

        def wide(plan, blocks, q, source, load, visible, scale):
            shift = 1 if fault == "mask one too wide" else 2
            return attend(plan, plan.blocks, q, source, load, lambda at: visible(at - shift), scale)

        monkeypatch.setattr(full, "attend", wide)
    session = Session(SMALL, fresh=True, poison=0.0 if fault == "no causality" else NAN)
    session.open(0)
    with pytest.raises(AssertionError):
        session.prefill(Bucket(1, 9, "prefill"), [(0, 9)])
        session.verify(Bucket(1, 3), [(0, 3, 3)])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_export_restore_carry_only_committed_tokens(dtype):
    """R64, R86: pages hold the committed tokens and zeros; a restored slot decodes to the bits of the original."""
    spec = KVSpec(**{**vars(SMALL), "dtype": dtype})
    session = Session(spec)
    for slot, n in ((1, 6), (4, 3)):
        session.open(slot)
        session.prefill(Bucket(1, 9, "prefill"), [(slot, n)])
    session.verify(Bucket(1, 3), [(1, 3, 2)])
    state = session.poisoned()
    pages = attention.init_kv_pages(spec, 4)
    export = jax.jit(lambda *a: attention.export_kv(spec, *a), donate_argnums=1)
    ids, slots = jnp.array([2, 0, 9, 1]), jnp.array([1, 4, 1, spec.hold])
    pages = export(state, pages, ids, slots, 4)
    assert np.asarray(pages.length).tolist() == [3, 0, 8, 0]
    for page, slot, n in ((2, 1, 8), (0, 4, 3)):
        for got, pool in ((pages.k, state.k), (pages.v, state.v)):
            np.testing.assert_array_equal(got[page, :, :n], pool[:, slot, :n])
            assert not np.any(np.asarray(got[page, :, n:]))
    assert not np.any(np.asarray(pages.k)[[1, 3]])

    restore = jax.jit(lambda *a: attention.restore_kv(spec, *a), donate_argnums=0)
    other = Session(spec)
    other.state = restore(other.poisoned(), pages, jnp.array([2, 0, 9]), jnp.array([3, 0, 1]), 1)
    assert np.asarray(other.state.length).tolist() == [0, 0, 0, 8, 0, 0]
    other.owned = {3: [list(x) for x in session.owned[1]]}
    for s in (session, other):
        s.rng = np.random.default_rng(3)
    np.testing.assert_array_equal(session.verify(Bucket(1, 3), [(1, 3, 3)]), other.verify(Bucket(1, 3), [(3, 3, 3)]))
    with pytest.raises(ValueError, match="HOLD"):
        attention.restore_kv(spec, other.state, pages, jnp.array([0]), jnp.array([spec.hold]), 1)


@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
def test_drafts_never_reach_the_tokens_before_them(short_blocks, part, value):
    """An output depends only on what its query sees: a draft of NaN leaves the bits of the tokens before it, and of the
    heads that read other keys; the queries that see it are not finite, so that nothing is hidden."""
    spec, bucket, at = SMALL, Bucket(2, 6), ["q", "k", "v"].index(part)
    session = Session(spec)
    for slot in (0, 3):
        session.open(slot)
        session.prefill(Bucket(1, 9, "prefill"), [(slot, 9)])
    state, ctx = session.state, session.steps.setdefault(bucket, session.step(bucket))[1]
    ids, index = [0] * 3 + [3] * 3, [0, 1, 2] * 2
    batch = attention.build_batch(spec, bucket, ids, b_mtp_index=index, b_ready_cache_len=state.length)
    state, ctx = attention.update(session.layer_spec, ctx, state, batch)
    inputs = session.draw((6,), np.ones(6, bool))
    forward = jax.jit(lambda x: attention.forward(session.bindings[1], ctx, state, attention.FullAttentionInputs(*x))[1])
    want = np.asarray(forward(inputs))
    inputs[at][1, 0, 2] = value
    got = np.asarray(forward(inputs))
    hit = np.zeros(got.shape[:2], bool)
    hit[1:3, :2] = True
    np.testing.assert_array_equal(got[~hit], want[~hit])
    if part == "v" or np.isnan(value):
        assert np.all(np.isnan(got[hit]))


def test_pages_that_do_not_fit_are_refused():
    """C6: geometry, dtype, kind, page ids and their number are checked before a slot or a page changes."""
    state, two = attention.init_kv(SMALL), jnp.array([0, 1])
    good = attention.init_kv_pages(SMALL, 2)
    for fields, message in (
        ({"max_len": 20}, r"pages.k=float32\(2, 2, 20, 2, 8\) is not allowed: this spec needs float32\(2, 2, 40, 2, 8\)"),
        ({"layers": 1}, "pages.k=.* this spec needs"),
        ({"dtype": "bf16"}, "pages.k=uint16.* this spec needs float32"),
    ):
        other = attention.init_kv_pages(KVSpec(**{**vars(SMALL), **fields}), 2)
        for call in (
            lambda p: attention.restore_kv(SMALL, state, p, two, two, 2),
            lambda p: attention.export_kv(SMALL, state, p, two, two, 2),
        ):
            with pytest.raises(ValueError, match=message):
                call(other)
            with pytest.raises(ValueError, match="pages=KVState is not allowed: this spec needs a KVPages"):
                call(state)
            with pytest.raises(ValueError, match="pages.v=float32"):
                call(good.replace(v=good.v[:1]))
    for ids in (two[:1], jnp.array([0, 1, 1])):
        with pytest.raises(ValueError, match="page_ids.shape=.* of one length"):
            attention.restore_kv(SMALL, state, good, ids, two, 1)
        with pytest.raises(ValueError, match="page_ids.shape=.* of one length"):
            attention.export_kv(SMALL, state, good, ids, two, 1)
    for bad in (2, -1):
        with pytest.raises(ValueError, match=rf"page_ids=.* contains \[{bad}\]: allowed are 0..1"):
            attention.restore_kv(SMALL, state, good, jnp.array([0, bad]), two, 2)
    attention.restore_kv(SMALL, state, good, jnp.array([0, 9]), two, 1)


def test_clear_leaves_nothing():
    """R48: a reused slot starts at length 0 with zeros; other slots keep their bits; ids that are not live are dropped."""
    session = Session(SMALL)
    for slot in (0, 2):
        session.open(slot)
        session.prefill(Bucket(1, 9, "prefill"), [(slot, 9)])
    before = session.poisoned()
    after = jax.jit(lambda s, i: attention.clear_kv(SMALL, s, i))(before, jnp.array([2, SMALL.hold, -1, 99]))
    for pool, old in ((after.k, before.k), (after.v, before.v)):
        assert not np.any(np.asarray(pool[:, 2]))
        np.testing.assert_array_equal(np.delete(pool, 2, axis=1), np.delete(old, 2, axis=1))
    assert np.asarray(after.length).tolist() == [9, 0, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="HOLD"):
        attention.clear_kv(SMALL, before, jnp.array([SMALL.hold]))


POOL = KVSpec(layers=3, slots=9, max_len=1024, heads=4, kv_heads=2, head_dim=64, width=2)


def temporary_bytes(spec: KVSpec, bucket: Bucket) -> int:
    """Temporary memory of one compiled round with a donated state."""
    session = Session(spec, fresh=True)
    run, ctx = session.step(bucket)
    prompt = bucket.phase == "prefill"
    lead = (bucket.requests, bucket.tokens) if prompt else (bucket.tokens,)
    rows = np.zeros(lead[0], np.int32)
    inputs = [session.draw(lead, np.ones(lead, bool))] * spec.layers
    compiled = run.lower(session.state, ctx, rows, rows, inputs, np.ones(bucket.requests, np.int32)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("bucket", [Bucket(2, 4, "decode", fixed=True), Bucket(2, 16, "prefill")])
def test_no_pool_sized_temporary(dtype, bucket):
    """A round needs memory for one block of its rows, not for a pool, a layer of it or the rows' whole sequences."""
    spec = KVSpec(**{**vars(POOL), "dtype": dtype})
    block = bucket.requests * plan.plan_decode(spec.max_len, spec.position_bytes).block * spec.position_bytes
    fp32_block = block * (2 if dtype == "bf16" else 1)
    assert temporary_bytes(spec, bucket) < 2 * fp32_block + (1 << 18)
    assert attention.kv_bytes(spec)["kv"] > 6 * fp32_block


def test_pool_copies_are_seen(monkeypatch):
    """The measure above is red without the barrier that keeps the pools inside the loop."""
    monkeypatch.setattr(plan.lax, "optimization_barrier", lambda x: x)
    assert temporary_bytes(POOL, Bucket(2, 4, "decode", fixed=True)) > attention.kv_bytes(POOL)["kv"]


def test_kv_spec_and_bytes():
    """Bytes equal the allocated arrays without HOLD; illegal fields raise and say what is allowed."""
    for dtype in ("fp32", "bf16"):
        spec = KVSpec(**{**vars(SMALL), "dtype": dtype})
        state = attention.init_kv(spec)
        assert attention.kv_bytes(spec)["kv"] == sum(x[:, :-1].nbytes for x in (state.k, state.v))
        assert attention.kv_bytes(spec)["total"] == sum(x[:, :-1].nbytes for x in (state.k, state.v)) + 4 * spec.hold
    legal = vars(SMALL)
    for field, value, allowed in [
        ("kv_heads", 3, "a divisor of heads=4"),
        ("slots", 1, "at least 2"),
        ("max_len", 2, "at least width=3"),
        ("width", 17, "1..16"),
        ("dtype", "fp16", "one of"),
        ("scale", 0.0, "positive"),
        ("layers", 0, "positive"),
    ]:
        with pytest.raises(ValueError, match=f"{field}=.*{allowed}"):
            KVSpec(**{**legal, field: value})


def test_stored_form_is_exact():
    """bf16 pools keep bits: round trip of every finite bf16 value, one rounding to nearest even."""
    spec = KVSpec(**{**vars(SMALL), "dtype": "bf16"})
    every = jnp.asarray(np.arange(1 << 16, dtype=np.uint16)).view(jnp.bfloat16)
    finite = np.asarray(jnp.isfinite(every.astype(jnp.float32)))
    back = kv.as_values(spec, kv.as_stored(spec, every.astype(jnp.float32)))
    normal = np.abs(np.asarray(every, np.float32)) >= 2.0**-126
    np.testing.assert_array_equal(np.asarray(back)[finite & normal], np.asarray(every)[finite & normal])
    assert float(kv.as_values(spec, kv.as_stored(spec, jnp.float32(1 + 3 * 2.0**-8)))) == 1 + 2.0**-6
