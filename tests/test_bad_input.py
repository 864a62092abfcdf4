"""Bad input: each is refused by a message with argument, value and what is allowed, and no state has changed.

faults.md U1, S3, S5, R80 to R82, R88, R89, V10. Values inside jit cannot be looked at; what happens there is safe and
tested in test_faults_indexing.py (slot ids) and here (accepted lengths).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import same_bits, to_device, to_host

import jax_ssm as ssm

SPEC = ssm.SSMSpec("gdn", layers=2, slots=6, q_heads=2, k_heads=2, v_heads=4, k_dim=16, v_dim=8, width=4)
HOLD = SPEC.hold
MODES = ("native", "compact", "replay")


def spec_of(mode, **fields):
    return ssm.SSMSpec(**(vars(SPEC) | {"mode": mode} | fields))


def random_state(spec, seed=0):
    """A state of random bytes with HOLD zero, accepted index and cursors legal."""
    rng = np.random.default_rng(seed)
    host = to_host(ssm.init_state(spec))
    for x in jax.tree.leaves(host):
        if x.dtype == np.int32:
            x[: spec.hold] = rng.integers(0, spec.width, spec.hold)
        else:
            x[:, : x.shape[1] // spec.slots * spec.hold] = rng.standard_normal(1)
    return to_device(host)


def layout(spec, rows=((3, 4), (1, 2))):
    """Layout of windows (slot, length), padded to 8 token rows."""
    ids = [slot for slot, n in rows for _ in range(n)]
    offsets = [t for _, n in rows for t in range(n)]
    pad = 8 - len(ids)
    return ssm.build_layout(spec, jnp.array(ids + [spec.hold] * pad, jnp.int32), jnp.array(offsets + [0] * pad, jnp.int32))


def opened(spec, ledger, state, rows=((3, 4), (1, 2))):
    state, receipt = ssm.prepare(spec, state, layout(spec, rows))
    return state, ledger.issue(receipt)


def lengths(*values):
    """Accepted lengths of the two live rows, padded with garbage to R = 5."""
    return jnp.array(list(values) + [77] * (5 - len(values)), jnp.int32)


def refused(state, call, *words):
    """`call` raises ValueError with all words; the state is alive and bit-identical."""
    before = to_host(state)
    with pytest.raises(ValueError) as error:
        call()
    for word in words:
        assert word in str(error.value), f"{word!r} is missing in {error.value}"
    assert same_bits(state, before)


# ---------------------------------------------------------------------------------------------------------- acceptance


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((0, 1), ("lengths=0", "slot 3", "1..4", "base token")),
        ((-1, 1), ("lengths=-1", "slot 3", "1..4")),
        ((5, 1), ("lengths=5", "1..4")),
        ((4, 3), ("lengths=3", "slot 1", "1..2")),
        ((4, 0), ("lengths=0", "slot 1", "1..2")),
    ],
)
def test_S3_accepted_length_outside_the_window(mode, values, words):
    """S3, R30: 0, negative and above verify_len are refused by name; the receipt stays open and can still be accepted."""
    spec, ledger = spec_of(mode), ssm.Ledger()
    state, receipt = opened(spec, ledger, random_state(spec))
    bad = ssm.StateAcceptance((receipt,), lengths(*values))
    refused(state, lambda: ssm.commit(spec, state, bad, ledger), *words)
    assert ledger.open_receipts() == 1
    ssm.commit(spec, state, ssm.StateAcceptance((receipt,), lengths(4, 2)), ledger)
    assert ledger.open_receipts() == 0


@pytest.mark.parametrize("mode", MODES)
def test_R88_lengths_that_cannot_be_seen_are_clamped(mode):
    """Inside jit: above verify_len counts as verify_len, 0 and below leave the row alone bit by bit; padding is ignored."""
    spec = spec_of(mode)
    state, receipt = ssm.prepare(spec, random_state(spec), layout(spec))
    accept = jax.jit(lambda state, values: ssm.accept(spec, state, ssm.StateAcceptance((receipt,), values)))
    assert same_bits(accept(state, lengths(99, 7)), accept(state, lengths(4, 2)))
    assert same_bits(accept(state, lengths(0, -3)), state)


def test_lengths_are_integers_in_an_array_or_a_list():
    ledger = ssm.Ledger()
    state, receipt = opened(SPEC, ledger, random_state(SPEC))
    taken = lambda x: ssm.StateAcceptance((receipt,), x)  # noqa: E731
    for bad in (np.array([1.9, 1, 1, 1, 1]), [1.9, 1, 1, 1, 1], np.ones(5, bool)):
        refused(state, lambda b=bad: ssm.commit(SPEC, state, taken(b), ledger), "acceptance.lengths.dtype", "integers")
    refused(state, lambda: ssm.commit(SPEC, state, taken(np.array([2**32 + 1] * 5)), ledger), "lengths=4294967297")
    want = ssm.accept(SPEC, state, taken(lengths(3, 2)))
    assert same_bits(ssm.commit(SPEC, state, taken([3, 2, 77, 77, 77]), ledger), want)
    assert same_bits(jax.jit(lambda s, a: ssm.accept(SPEC, s, a))(state, taken([3, 2, 77, 77, 77])), want)


@pytest.mark.parametrize("mode", MODES)
def test_receipts_of_another_geometry(mode):
    """Same mode and key, same number of rows, other width: neither a forward nor an acceptance takes it."""
    spec, wide = spec_of(mode, width=2), spec_of(mode, width=3)
    state, rows = random_state(spec), [(3, 2), (1, 2)]
    _, foreign = ssm.prepare(wide, random_state(wide), layout(wide, rows))
    core = ssm.LinearInputs(*(jnp.zeros(8) for _ in range(7)))
    refused(state, lambda: ssm.accept(spec, state, ssm.StateAcceptance((foreign,), lengths(1, 1))), "spec", "'width': (3, 2)")
    refused(state, lambda: ssm.forward(spec, state, foreign, 0, core), "spec", "'width': (3, 2)")
    x = jnp.zeros((8, 96), jnp.bfloat16), jnp.zeros((96, 4))
    refused(state, lambda: ssm.conv_forward(spec, state, foreign, 0, *x), "spec", "'width': (3, 2)")


@pytest.mark.parametrize("mode", MODES)
def test_states_of_another_spec(mode):
    """Another width, layer count or storage mode, eager and traced, in every verb that takes a whole state."""
    spec = spec_of(mode)
    state, receipt = ssm.prepare(spec, random_state(spec), layout(spec))
    pages, ids, good = ssm.init_pages(spec, 2), jnp.array([1]), ssm.StateAcceptance((receipt,), lengths(1, 1))
    for other in (spec_of(mode, width=3), spec_of(mode, layers=1), spec_of("replay" if mode != "replay" else "native")):
        foreign = random_state(other)
        for call in (
            lambda s: ssm.prepare(spec, s, receipt.layout),
            lambda s: ssm.accept(spec, s, good),
            lambda s: ssm.merge(spec, s, ids),
            lambda s: ssm.snapshot(spec, s, ids),
            lambda s: ssm.clear(spec, s, ids),
            lambda s: ssm.export_into(spec, s, pages, ids, ids, 1),
            lambda s: ssm.restore(spec, s, pages, ids, ids, 1),
        ):
            refused(foreign, lambda c=call, f=foreign: c(f), "state.", "needs")
            with pytest.raises(ValueError, match="state.* is not allowed"):
                jax.eval_shape(call, foreign)


def test_R28_each_receipt_commits_with_its_own_configuration(monkeypatch):
    """Compact: one commit per kernel choice, and the result of committing the receipts one by one."""
    from jax_ssm.executors import compact

    spec, used, whole = spec_of("compact"), [], compact._accept
    state, first = ssm.prepare(spec, random_state(spec), layout(spec, [(3, 4)]))
    state, second = ssm.prepare(spec, state, layout(spec, [(1, 2)]), ssm.KernelConfig(num_warps=2))
    monkeypatch.setattr(compact, "_accept", lambda *args: used.append(args[3]) or whole(*args))
    got = ssm.accept(spec, state, ssm.StateAcceptance((first, second), [3] + [0] * 4 + [2] + [0] * 4))
    assert used == [first.config, second.config]
    want = ssm.accept(spec, state, ssm.StateAcceptance((first,), [3] + [0] * 4))
    assert same_bits(got, ssm.accept(spec, want, ssm.StateAcceptance((second,), [2] + [0] * 4)))


def test_S5_receipts_are_spent_once():
    """S5, R82: a second acceptance, a receipt of another ledger, one never issued and a copy are refused."""
    ledger, other = ssm.Ledger(), ssm.Ledger()
    state, receipt = opened(SPEC, ledger, random_state(SPEC))
    take = lambda r, book=ledger: ssm.commit(SPEC, state, ssm.StateAcceptance((r,), lengths(1, 1)), book)  # noqa: E731
    refused(state, lambda: take(receipt, other), "forwards[0]", "not an open receipt")
    refused(state, lambda: take(receipt.replace(mode="native")), "not an open receipt")
    refused(state, lambda: take(ssm.prepare(SPEC, state, layout(SPEC))[1]), "not an open receipt")
    take(receipt)
    refused(state, lambda: take(receipt), "already accepted")
    twice = ssm.StateAcceptance((receipt, receipt), jnp.ones(10, jnp.int32))
    ledger.issue(receipt)
    refused(state, lambda: ssm.commit(SPEC, state, twice, ledger), "twice")


def test_R80_no_export_between_forward_and_acceptance():
    """S11, R81: `require_settled` names the verb and the open rounds, in order, until each is accepted."""
    ledger = ssm.Ledger()
    ledger.require_settled("export_into")
    state, first = opened(SPEC, ledger, random_state(SPEC), [(3, 4)])
    state, second = opened(SPEC, ledger, state, [(1, 2)])
    refused(state, lambda: ledger.require_settled("export_into"), "export_into", "[1, 2]", "accept")
    state = ssm.commit(SPEC, state, ssm.StateAcceptance((first,), lengths(2)), ledger)
    refused(state, lambda: ledger.require_settled("merge"), "merge", "[2]")
    ssm.commit(SPEC, state, ssm.StateAcceptance((second,), lengths(1)), ledger)
    ledger.require_settled("merge")


@pytest.mark.parametrize("mode", MODES)
def test_R39_structure_of_an_acceptance(mode):
    """Missing receipts, another mode or state key, a wrong total, one slot in two microbatches; eager and traced."""
    spec = spec_of(mode)
    state, receipt = ssm.prepare(spec, random_state(spec), layout(spec))
    other_mode = receipt.replace(mode="replay" if mode != "replay" else "native")
    cases = [
        (ssm.StateAcceptance((), jnp.zeros(0, jnp.int32)), ("forwards=()", "receipts")),
        (ssm.StateAcceptance((other_mode,), lengths(1, 1)), ("forwards[0].mode", repr(mode))),
        (ssm.StateAcceptance((receipt.replace(state_key="draft"),), lengths(1, 1)), ("state_key='draft'", "'main'")),
        (ssm.StateAcceptance((receipt,), jnp.ones(4, jnp.int32)), ("lengths.shape=(4,)", "5 request rows")),
        (ssm.StateAcceptance((receipt,), jnp.ones((5, 1), jnp.int32)), ("lengths.shape=(5, 1)",)),
    ]
    for bad, words in cases:
        refused(state, lambda bad=bad: ssm.check_acceptance(spec, bad), *words)
        with pytest.raises(ValueError, match="acceptance"):
            jax.eval_shape(lambda state, bad=bad: ssm.accept(spec, state, bad), state)
    both = ssm.StateAcceptance((receipt, receipt), jnp.ones(10, jnp.int32))
    refused(state, lambda: ssm.check_acceptance(spec, both), "name a slot twice", "[1, 3]")


# --------------------------------------------------------------------------------------------------------------- slots

BAD_SLOTS = [
    ([HOLD], ("[5]", "0..4", "HOLD")),
    ([2, -1], ("[-1]", "0..4")),
    ([2, 6], ("[6]", "0..4")),
    ([0, 2**31 - 1], ("[2147483647]", "0..4")),
    ([2, 3, 2], ("repeats", "distinct")),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("slots", "words"), BAD_SLOTS)
def test_slots_that_are_not_live(mode, slots, words):
    """clear, merge, snapshot and restore refuse HOLD, ids out of range and repetitions."""
    spec, ids, n = spec_of(mode), jnp.array(slots, jnp.int32), len(slots)
    state, pages = random_state(spec), ssm.init_pages(spec, 4)
    for call in (
        lambda: ssm.clear(spec, state, ids),
        lambda: ssm.merge(spec, state, ids),
        lambda: ssm.snapshot(spec, state, ids),
        lambda: ssm.restore(spec, state, pages, jnp.arange(n), ids, n),
    ):
        refused(state, call, "slots=", *words)


NOT_IDS = [
    (np.array([1.7]), ("dtype=float64", "integers")),
    (np.array([True, False]), ("dtype=bool", "integers")),
    (jnp.array([1.0]), ("dtype=float32", "integers")),
    ([1.7], ("dtype=float64", "integers")),
    (np.array([[1, 2]]), ("shape=(1, 2)", "one axis")),
    (np.array([2**32 + 1]), ("[4294967297]", "0..4")),
    ([2**32 + 1], ("[4294967297]", "0..4")),
]


@pytest.mark.parametrize(("ids", "words"), NOT_IDS)
def test_ids_that_a_cast_would_change(ids, words):
    """Floats, booleans, other ranks, and 64-bit ids that wrap onto a live slot: the argument is named."""
    state, pages, n = random_state(SPEC), ssm.init_pages(SPEC, 5), len(ids)
    good = np.arange(n)
    for name, call in (
        ("slots", lambda: ssm.clear(SPEC, state, ids)),
        ("slots", lambda: ssm.merge(SPEC, state, ids)),
        ("slots", lambda: ssm.snapshot(SPEC, state, ids)),
        ("slots", lambda: ssm.restore(SPEC, state, pages, good, ids, n)),
        ("page_ids", lambda: ssm.restore(SPEC, state, pages, ids, good, n)),
    ):
        refused(state, call, name, *words)
    if words[-1] != "0..4":
        refused(state, lambda: ssm.export_into(SPEC, state, pages, good, ids, n), "slots", *words)
        refused(state, lambda: ssm.export_into(SPEC, state, pages, ids, good, n), "page_ids", *words)
        refused(state, lambda: ssm.build_layout(SPEC, ids, [0] * n), "b_req_idx", *words)
        refused(state, lambda: ssm.build_layout(SPEC, [0] * n, ids), "b_mtp_index", *words)
    else:
        assert same_bits(ssm.export_into(SPEC, state, pages, ids, good, n), pages)  # dropped, like every id out of range
        assert same_bits(ssm.export_into(SPEC, state, pages, good, ids, n), pages)
        refused(state, lambda: ssm.build_layout(SPEC, ids, [0]), "b_req_idx", "[4294967297]", "0..5")


@pytest.mark.parametrize("kind", [list, np.int64, np.uint8])
def test_ids_of_any_integer_type(kind):
    """Lists and other integer types mean the same as int32 arrays."""
    cast = lambda *x: list(x) if kind is list else np.array(x, kind)  # noqa: E731
    state, pages = random_state(SPEC), ssm.init_pages(SPEC, 4)
    a, b = np.array([3, 1], np.int32), np.array([0, 2], np.int32)
    assert same_bits(ssm.clear(SPEC, state, cast(3, 1)), ssm.clear(SPEC, state, a))
    assert same_bits(ssm.merge(SPEC, state, cast(3, 1)), ssm.merge(SPEC, state, a))
    want = ssm.export_into(SPEC, state, pages, b, a, 2)
    assert same_bits(ssm.export_into(SPEC, state, pages, cast(0, 2), cast(3, 1), 2), want)
    assert same_bits(ssm.restore(SPEC, state, want, cast(0, 2), cast(3, 1), 2), ssm.restore(SPEC, state, want, b, a, 2))
    assert same_bits(ssm.build_layout(SPEC, cast(3, 3), cast(0, 1)), ssm.build_layout(SPEC, np.array([3, 3]), np.array([0, 1])))


@pytest.mark.parametrize("mode", MODES)
def test_no_slots_at_all_is_no_work(mode):
    spec = spec_of(mode)
    state, pages = random_state(spec), ssm.init_pages(spec, 2)
    assert same_bits(ssm.clear(spec, state, []), state) and same_bits(ssm.merge(spec, state, []), state)
    assert same_bits(ssm.restore(spec, state, pages, [], [], 0), state)
    assert same_bits(ssm.export_into(spec, state, pages, [], [], 0), pages)
    assert [x.shape[0] for x in ssm.snapshot(spec, state, [])] == [0, 0]


def test_pages_and_slots_of_different_length():
    state, pages = random_state(SPEC), ssm.init_pages(SPEC, 4)
    for verb in (ssm.restore, ssm.export_into):
        refused(state, lambda v=verb: v(SPEC, state, pages, [0, 1, 2], [1, 2], 2), "page_ids.shape=(3,)", "slots.shape=(2,)")


def test_restore_looks_only_at_the_first_n():
    """Slots beyond n are padding and may be anything."""
    state, pages = random_state(SPEC), ssm.init_pages(SPEC, 4)
    new = ssm.restore(SPEC, state, pages, jnp.array([1, 9, 9]), jnp.array([2, HOLD, HOLD]), 1)
    assert not np.asarray(new.ssm)[:, 2 * SPEC.width].any()


@pytest.mark.parametrize("mode", MODES)
def test_restore_of_bad_pages(mode):
    """C4, C6: page ids outside the pages, and pages of another geometry or dtype, are refused by name."""
    spec = spec_of(mode)
    state, pages, slots = random_state(spec), ssm.init_pages(spec, 4), jnp.array([2, 3])
    for bad in (-1, 4, 2**31 - 1):
        refused(state, lambda b=bad: ssm.restore(spec, state, pages, jnp.array([0, b]), slots, 2), f"[{bad}]", "0..3")
    for fields, words in (
        (dict(layers=3), ("pages.ssm", "(4, 3, 4, 8, 16)", "(4, 2, 4, 8, 16)")),
        (dict(k_dim=8, v_dim=16), ("pages.ssm", "(4, 2, 4, 16, 8)", "(4, 2, 4, 8, 16)")),
        (dict(layers=1), ("pages.ssm", "(4, 1, 4, 8, 16)", "(4, 2, 4, 8, 16)")),
        (dict(ssm_dtype="bf16"), ("pages.ssm", "bfloat16", "float32")),
        (dict(act_dtype="fp32"), ("pages.conv", "float32", "bfloat16")),
        (dict(conv_width=3), ("pages.conv", "(4, 2, 96, 2)", "(4, 2, 96, 3)")),
    ):
        foreign = ssm.init_pages(spec_of(mode, **fields), 4)
        refused(state, lambda p=foreign: ssm.restore(spec, state, p, jnp.array([0, 1]), slots, 2), *words)
        with pytest.raises(ValueError, match="pages"):
            ssm.export_into(spec, state, foreign, jnp.array([0, 1]), slots, 2)


# -------------------------------------------------------------------------------------------------------------- layout


@pytest.mark.parametrize(
    ("ids", "offsets", "words"),
    [
        ([3, 3, 6], [0, 1, 0], ("b_req_idx", "[6]", "0..5")),
        ([3, -1, 5], [0, 0, 0], ("[-1]", "0..5")),
        ([3, 5, 2], [0, 0, 0], ("live row after padding", "HOLD")),
        ([3, 2, 3], [0, 0, 0], ("repeats a slot", "distinct")),
        ([3, 3, 3, 3, 3], [0, 1, 2, 3, 4], ("window of 5", "width=4")),
        ([3, 3, 2], [0, 2, 0], ("b_mtp_index", "count 0, 1")),
        ([3, 3, 2], [1, 2, 0], ("b_mtp_index", "count 0, 1")),
        ([3, 2, 2], [0, 1, 2], ("b_mtp_index", "count 0, 1")),
        ([[3, 2]], [[0, 0]], ("shape=(1, 2)", "one axis")),
        ([3, 2], [0], ("shape=(1,)", "(2,)")),
    ],
)
def test_layout_errors(ids, offsets, words):
    with pytest.raises(ValueError) as error:
        ssm.build_layout(SPEC, jnp.array(ids, jnp.int32), jnp.array(offsets, jnp.int32))
    for word in words:
        assert word in str(error.value), f"{word!r} is missing in {error.value}"


@pytest.mark.parametrize("spec", [SPEC, spec_of("compact", act_dtype="fp32")], ids=["native", "compact"])
def test_prompt_chunks_are_checked_before_anything_changes(spec):
    """Rows that would wrap onto another layer, lengths beyond the chunk, slots, shapes and empty chunks."""
    state, act = random_state(spec), jnp.float32 if spec.act_dtype == "fp32" else jnp.bfloat16

    def calls(row=0, slots=(3, 1), lengths=(2, 3), n=3):
        x = ssm.LinearInputs(
            jnp.ones((2, n, 2, 16), act), jnp.ones((2, n, 2, 16), act), jnp.ones((2, n, 4, 8), act),
            jnp.ones((2, n, 4), act), jnp.ones((2, n, 4), act), jnp.zeros(4), jnp.zeros(4),
        )  # fmt: skip
        conv = jnp.ones((2, n, 96), act), jnp.ones((96, 4))
        return (
            lambda slots=slots, lengths=lengths: ssm.prefill(spec, state, row, slots, lengths, x),
            lambda slots=slots, lengths=lengths: ssm.conv_prefill(spec, state, row, slots, lengths, *conv),
        )

    for fields, words in (
        (dict(row=-1), ("row=-1", "0..1")),
        (dict(row=2), ("row=2", "0..1")),
        (dict(lengths=[2, 4]), ("lengths=[2, 4]", "0..3")),
        (dict(lengths=[-1, 2]), ("lengths=[-1, 2]", "0..3")),
        (dict(lengths=[1.0, 2.0]), ("lengths.dtype", "integers")),
        (dict(lengths=[2]), ("lengths.shape=(1,)", "2 rows")),
        (dict(slots=[1, 1]), ("slots=[1, 1]", "repeats")),
        (dict(slots=[1, -1]), ("[-1]", "0..4")),
        (dict(slots=[1, 6]), ("[6]", "0..4")),
        (dict(slots=[1, 2, 3]), ("slots.shape=(3,)", "2 rows")),
        (dict(lengths=[0, 0], n=0), ("[2, 0]", "at least 1")),
    ):
        for call in calls(**fields):
            refused(state, call, *words)
    for call, padded in zip(calls(), calls(slots=[HOLD, HOLD]), strict=True):
        assert same_bits(padded()[0], state)
        traced = jax.jit(lambda lengths, call=call: call(jnp.array([3, 1]), lengths))
        assert same_bits(traced(jnp.array([9, -2])), traced(jnp.array([3, 0])))


def test_R91_fixed_layout_errors():
    """Rows that W does not divide, and windows of more than one slot."""
    rows = lambda *ids: (jnp.array(ids, jnp.int32), jnp.zeros(len(ids), jnp.int32))  # noqa: E731
    with pytest.raises(ValueError, match="len.*=6.*multiple of width=4"):
        ssm.build_layout(SPEC, *rows(1, 1, 1, 1, 2, 2), fixed=True)
    with pytest.raises(ValueError, match="b_req_idx"):
        ssm.build_layout(SPEC, *rows(1, 1, 1, 2), fixed=True)
    with pytest.raises(ValueError, match="b_req_idx"):
        ssm.build_layout(SPEC, *rows(1, 1, 1, 1, 2, 2, HOLD, HOLD), fixed=True)


# ------------------------------------------------------------------------------------------------------ inputs of a layer


def test_inputs_of_a_wrong_shape_or_dtype():
    """U1: each tensor in turn; a receipt of another state; a row that is no layer; token rows that do not match."""
    state, receipt = ssm.prepare(SPEC, random_state(SPEC), layout(SPEC))
    act = jnp.bfloat16
    good = ssm.LinearInputs(
        jnp.zeros((8, 2, 16), act), jnp.zeros((8, 2, 16), act), jnp.zeros((8, 4, 8), act),
        jnp.zeros((8, 4), act), jnp.zeros((8, 4), act), jnp.zeros(4), jnp.zeros(4),
    )  # fmt: skip
    call = lambda **fields: ssm.forward(SPEC, state, receipt, 0, good.replace(**fields))  # noqa: E731
    for name in ("q", "k", "v", "a", "b", "A_log", "dt_bias"):
        x = getattr(good, name)
        refused(state, lambda n=name, x=x: call(**{n: x[..., :-1]}), f"inputs.{name}.shape", str(x.shape))
    for name in "qkv":
        refused(state, lambda n=name: call(**{n: getattr(good, n).astype(jnp.float32)}), f"inputs.{name}.dtype", "bf16")
    for row in (-1, 2):
        refused(state, lambda r=row: ssm.forward(SPEC, state, receipt, r, good), f"row={row}", "0..1")
    short = jax.tree.map(lambda x: x[:4] if x.shape[0] == 8 else x, good)
    refused(state, lambda: ssm.forward(SPEC, state, receipt, 0, short), "4 token rows", "8")
    refused(state, lambda: ssm.forward(SPEC, state, receipt.replace(state_key="draft"), 0, good), "state_key='draft'")
    refused(state, lambda: ssm.forward(SPEC, state, receipt.replace(mode="replay"), 0, good), "mode='replay'")
    x, weight = jnp.zeros((8, 96), act), jnp.zeros((96, 4))
    conv = lambda x, w: ssm.conv_forward(SPEC, state, receipt, 0, x, w)  # noqa: E731
    refused(state, lambda: conv(x[:, :-1], weight), "95", "96")
    refused(state, lambda: conv(x.astype(jnp.float32), weight), "float32", "bf16")
    refused(state, lambda: conv(x, weight[:, :3]), "(96, 3)", "(96, 4)")
    refused(state, lambda: conv(x[:4], weight), "4 token rows", "8")
    for bias in (jnp.zeros(1), jnp.zeros((8, 96)), jnp.zeros(())):
        refused(state, lambda b=bias: ssm.conv_forward(SPEC, state, receipt, 0, x, weight, b), "bias.shape", "(96,)")
    prompt = lambda b: ssm.conv_prefill(SPEC, state, 0, [1], [8], x[None], weight, b)  # noqa: E731
    refused(state, lambda: prompt(jnp.zeros(1)), "bias.shape=(1,)", "(96,)")


@pytest.mark.parametrize(
    "fields",
    [dict(layers=True), dict(width=True), dict(state_key=""), dict(state_key=3), dict(rule="kda", lower_bound=-np.inf)],
)
def test_fields_of_a_spec(fields):
    heads = dict(q_heads=4, k_heads=4) if "rule" in fields else {}
    with pytest.raises(ValueError, match=f"^{list(fields)[-1]}="):
        spec_of("native", **heads, **fields)


@pytest.mark.parametrize("fields", [dict(block_v=-1), dict(block_v=0), dict(block_v=8.0), dict(num_warps=True)])
def test_fields_of_a_kernel_choice(fields):
    with pytest.raises(ValueError, match=f"^{list(fields)[0]}=.*positive integer"):
        ssm.KernelConfig(**fields)


def test_U4_an_implementation_that_cannot_run_raises():
    """Nothing falls back silently: a named implementation is in the receipt, or prepare raises and names it."""
    for name in ("xla", "pallas", "triton"):
        state = random_state(SPEC)
        try:
            _, receipt = ssm.prepare(SPEC, state, layout(SPEC), ssm.KernelConfig(implementation=name))
        except NotImplementedError as error:
            assert name in str(error)
        else:
            assert receipt.config.implementation == name
