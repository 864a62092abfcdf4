"""faults.md group I: slot ids, sentinels, strides, head maps. Ids inside jit cannot be checked, so they must be harmless."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from fixtures import (
    bits,
    close,
    draw_params,
    draw_tokens,
    fresh_verbs,
    fs_spec,
    layer_inputs,
    of_slots,
    quick_jit,
    recurrent_round,
    same_bits,
    single,
    small_spec,
    to_device,
    to_host,
    verbs,
    whole_round,
)
from jax.extend.core import jaxprs_in_params
from machine import Machine
from oracle import rel_l2

import jax_ssm as ssm
from jax_ssm import state as state_module
from jax_ssm.executors import native
from jax_ssm.kernels import refusal

MODES = ("native", "compact", "replay")
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)


def random_state(spec, seed=0):
    """Random bytes in every pool, HOLD zero, cursors and accepted index 0."""
    rng, host = np.random.default_rng(seed), to_host(ssm.init_state(spec))
    for leaf in jax.tree.leaves(host):
        if leaf.dtype != np.int32:
            owned = leaf[:, : leaf.shape[1] // spec.slots * spec.hold]
            owned[...] = rng.standard_normal(owned.shape, dtype=np.float32).astype(leaf.dtype)
    return host


# ----------------------------------------------------------------------------------------------------- I1: large pools


def pool_accesses(jaxpr, limit, found):
    """(primitive, operand shape) of every equation that touches an array of more than `limit` elements."""
    for eqn in jaxpr.eqns:
        for value in [*eqn.invars, *eqn.outvars]:
            shape = getattr(value.aval, "shape", ())
            if np.prod(shape, dtype=float) > limit:
                found.add((eqn.primitive.name, tuple(shape)))
        for sub in jaxprs_in_params(eqn.params):
            pool_accesses(sub, limit, found)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_I1_no_index_is_a_product_of_strides(mode):
    """I1 on a CPU, by proof: a pool of more than 2^31 elements is only ever indexed along its own axes, each far below
    2^31; it is never flattened, so no 32-bit element offset exists (XLA multiplies strides in 64 bits)."""
    spec = ssm.SSMSpec(
        "gdn", layers=2, slots=4200, q_heads=16, k_heads=16, v_heads=32, k_dim=128, v_dim=128, width=4, mode=mode
    )
    state = jax.eval_shape(partial(ssm.init_state, spec))
    assert state.ssm.size > 2**31
    t, ints = 8, lambda *s: jax.ShapeDtypeStruct(s, jnp.int32)
    act = lambda *s: jax.ShapeDtypeStruct((2, t, *s), jnp.bfloat16)  # noqa: E731
    gates = [jax.ShapeDtypeStruct((2, 32), jnp.float32)] * 2
    inputs = ssm.LinearInputs(act(16, 128), act(16, 128), act(32, 128), act(32), act(32), *gates)
    weights = tuple(jax.ShapeDtypeStruct((2, spec.channels, *s), jnp.float32) for s in ((4,), ()))
    pages = jax.eval_shape(partial(ssm.init_pages, spec, 4200))
    programs = [
        jax.make_jaxpr(partial(whole_round, spec))(state, ints(t), ints(t), act(spec.channels), inputs, weights, ints(t)),
        jax.make_jaxpr(partial(ssm.merge, spec))(state, ints(t)),
        jax.make_jaxpr(partial(ssm.clear, spec))(state, ints(t)),
        jax.make_jaxpr(partial(ssm.snapshot, spec))(state, ints(t)),
        jax.make_jaxpr(partial(ssm.export_into, spec))(state, pages, ints(t), ints(t), ints()),
        jax.make_jaxpr(partial(ssm.restore, spec))(state, pages, ints(t), ints(t), ints()),
    ]
    found = set()
    for program in programs:
        pool_accesses(program.jaxpr, 2**31, found)
    assert found, "no program touched a large pool"
    for name, shape in found:
        assert name != "reshape" and len(shape) >= 4 and max(shape) < 2**20, (name, shape)


def decode_in_a_random_pool(spec, slots, implementation):
    """One decode step of `slots` in a random pool, merged: they equal the oracle, every other slot keeps its bits (by
    checksum)."""
    slots, rng = np.array(slots, np.int32), np.random.default_rng(0)
    tokens, params = draw_tokens(spec, rng, 3), draw_params(spec)
    config = ssm.KernelConfig(implementation=implementation)

    @quick_jit
    def checksum(pool):
        return jnp.sum(jax.lax.bitcast_convert_type(pool, jnp.uint16).astype(jnp.uint32), axis=(0, 2, 3, 4))

    def step(state, ids, inputs):
        state, receipt = ssm.prepare(spec, state, ssm.build_layout(spec, ids, jnp.zeros_like(ids)), config)
        state, _ = ssm.forward(spec, state, receipt, 0, inputs)
        state = ssm.accept(spec, state, ssm.StateAcceptance((receipt,), jnp.ones_like(ids)))
        return ssm.merge(spec, state, ids, config)

    state = ssm.init_state(spec)
    state = state.replace(ssm=jax.random.normal(jax.random.key(0), state.ssm.shape, jnp.bfloat16))
    start, before = np.asarray(state.ssm[0, slots]), np.asarray(checksum(state.ssm))
    state = quick_jit(step, donate_argnums=0)(state, slots, single(layer_inputs(tokens, params)))
    core = oracle.core(spec, params, tokens)
    want, _ = oracle.step(np.swapaxes(start.astype(float), -1, -2), *(x[:, 0] for x in core))
    got = np.asarray(state.ssm[0, slots]).astype(float)
    assert rel_l2(got, np.swapaxes(want, -1, -2)).max() < 4e-3
    changed = np.flatnonzero(np.asarray(checksum(state.ssm)) != before)
    assert changed.tolist() == sorted(slots.tolist())


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["native", "replay"])
@pytest.mark.parametrize("implementation", ["xla", "pallas", "triton"])
def test_I1_slots_beyond_the_32_bit_limit(implementation, mode):
    """I1 for real: 4,100 bf16 slots of 32 heads x 128 x 128 (4.3 GB); slots 4,095, 4,096 and 4,099 around 2^31 elements."""
    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU with 10 GB")
    if (reason := refusal(implementation)) is not None:
        pytest.skip(reason)
    sizes = dict(layers=1, slots=4101, q_heads=16, k_heads=16, v_heads=32, k_dim=128, v_dim=128, mode=mode, history=4)
    decode_in_a_random_pool(ssm.SSMSpec("gdn", **sizes, ssm_dtype="bf16"), [4095, 4096, 4099], implementation)


@pytest.mark.parametrize("mode", ["native", "replay"])
def test_I1_the_same_in_a_small_pool(mode):
    decode_in_a_random_pool(small_spec(ssm_dtype="bf16", mode=mode, history=4), [7, 3, 5], "xla")


# ------------------------------------------------------------------------------------------------ ids that are no slots


@pytest.mark.parametrize("mode", MODES)
def test_I2_I4_ids_that_are_not_live_touch_nothing(mode):
    """I2, I4: merge, clear, export and restore under jit with -1, HOLD, ids past the end (several equal) and INT_MIN follow
    the rule "ignore ids < 0 or >= HOLD"; slot HOLD-1, where -1 would wrap to, stays bit-identical."""
    spec = fs_spec("gdn", mode)
    v, host = verbs(spec), random_state(spec)
    ids = np.full(spec.hold, spec.hold, np.int32)
    ids[:8] = [-1, 3, spec.slots, spec.slots, INT_MAX, INT_MIN, -spec.slots, spec.hold]
    rest = np.setdiff1d(np.arange(spec.slots), [3])
    for verb in (v.merge, v.clear):
        new = verb(to_device(host), ids)
        assert same_bits(of_slots(spec, new, rest), of_slots(spec, host, rest))
    assert not any(bits(x).any() for x in of_slots(spec, new, [3]).values())
    pages = jax.tree.map(lambda x: jnp.full_like(x, 7), ssm.init_pages(spec, spec.hold))
    page_ids = np.full(spec.hold, INT_MAX, np.int32)
    page_ids[:8] = [5, 9, 6, 6, 7, 8, 5, 4]
    new = v.export(to_device(host), pages, page_ids, ids, np.int32(spec.hold))
    kept = np.setdiff1d(np.arange(spec.hold), [9])
    assert all((np.asarray(x)[kept] == 7).all() and (np.asarray(x)[9] != 7).any() for x in jax.tree.leaves(new))
    page_ids[:8] = [0, INT_MAX, 1, 2, 3, 4, 5, 6]  # slot 3 asks for a page that does not exist
    back = v.restore(to_device(host), new, page_ids, ids, np.int32(spec.hold))
    assert same_bits(back, host)
    page_ids[1] = 9
    back = v.restore(to_device(host), new, page_ids, ids, np.int32(spec.hold))
    assert same_bits(of_slots(spec, back, rest), of_slots(spec, host, rest))


def padded_round(spec, v, host, live, padding, tokens, params):
    """A round of `live` requests of full width in the big bucket, all other token rows with id `padding`."""
    total = spec.hold * spec.width
    ids, offsets = np.full(total, padding, np.int32), np.zeros(total, np.int32)
    slots = np.array([7, 3, 11, 0, 19, 5, 23, 1], np.int32)[:live]
    ids[: live * spec.width], offsets[: live * spec.width] = np.repeat(slots, spec.width), np.tile(np.arange(spec.width), live)
    lengths = np.full(spec.hold, 2, np.int32)
    x, inputs = np.moveaxis(tokens.x, -2, 0), layer_inputs(tokens, params)
    state, out, _ = v.round(to_device(host), ids, offsets, x, inputs, (params.weight, params.bias), lengths)
    return slots, to_host(state), to_host(out)


@pytest.mark.parametrize("mode", MODES)
def test_I3_padding_ids_of_a_round(mode):
    """I3: 1 to 8 live requests, padding id HOLD, -1, N, N+1, 2^31-1: the same bits everywhere, padding rows exactly 0,
    no slot outside the call touched."""
    spec = fs_spec("gdn", mode)
    v, host, params = verbs(spec), random_state(spec), draw_params(spec)
    tokens = draw_tokens(spec, np.random.default_rng(1), spec.hold * spec.width)
    for live in (1, 3, 8):
        slots, *want = padded_round(spec, v, host, live, spec.hold, tokens, params)
        rest = np.setdiff1d(np.arange(spec.slots), slots)
        assert same_bits(of_slots(spec, want[0], rest), of_slots(spec, host, rest))
        assert not any(bits(x[:, live * spec.width :]).any() for x in want[1])
        for padding in (-1, spec.slots, spec.slots + 1, INT_MAX, INT_MIN):
            _, *got = padded_round(spec, v, host, live, padding, tokens, params)
            assert same_bits(got, want), padding


def test_I3_planted_clamp_is_seen(monkeypatch):
    """Padding clamped onto the last live slot: the comparison above fails."""
    clamp = lambda spec, slots, keep=True: jnp.clip(slots, 0, spec.hold - 1)  # noqa: E731
    monkeypatch.setattr(native, "drop_index", clamp)
    spec = fs_spec("gdn", "native", layers=1)
    host, params = random_state(spec), draw_params(spec)
    tokens = draw_tokens(spec, np.random.default_rng(1), spec.hold * spec.width)
    slots, state, _ = padded_round(spec, fresh_verbs(spec), host, 3, -1, tokens, params)
    rest = np.setdiff1d(np.arange(spec.slots), slots)
    assert not same_bits(of_slots(spec, state, rest), of_slots(spec, host, rest))


def test_I2_a_live_row_after_padding_is_padding():
    """ids = [-1, 3]: eager refused (test_bad_input); under jit rows after the first padding row are padding too."""
    spec = small_spec()
    layout = quick_jit(partial(ssm.build_layout, spec))(np.array([-1, 3], np.int32), np.zeros(2, np.int32))
    assert int(layout.count) == 0 and not np.asarray(layout.verify_len).any()
    assert (np.asarray(layout.slots) == spec.hold).all()


def test_I4_put_follows_the_numpy_rule():
    """I4: the one place that scatters: `.at[].set(mode="drop")` writes the last element for -1, this does not."""
    assert np.asarray(jnp.zeros(5).at[jnp.array([-1, 2])].set(1.0, mode="drop"))[4] == 1
    spec = small_spec(slots=5)
    ids = jnp.array([-1, 2, 9, 9, INT_MAX], jnp.int32)
    for dtype in (jnp.bfloat16, jnp.float32):
        pool = jnp.zeros((1, 5, 3), dtype)
        index = state_module.drop_index(spec, ids)
        new = np.asarray(state_module.put(pool, (slice(None), index), jnp.ones((1, 5, 3))).astype(jnp.float32))
        assert new[0, 2].all() and not new[0, [0, 1, 3, 4]].any()
    assert state_module.read_index(spec, ids).tolist() == [4, 2, 4, 4, 4]


def test_put_equals_a_scatter():
    """`put` into a bf16 pool is a loop on CPUs: every form of index that the verbs use, against plain indexing."""
    rng = np.random.default_rng(0)
    for dtype in (jnp.bfloat16, jnp.float32):
        pool = jnp.asarray(rng.standard_normal((2, 6, 3, 4, 5)), dtype)
        slots, at = np.array([4, 1, 6]), np.array([[0, 3], [2, 1], [1, 4]])
        for index, shape in (
            ((1, slots), (3, 3, 4, 5)),
            ((slice(None), slots), (2, 3, 3, 4, 5)),
            ((0, slots[:, None], slice(None), at), (3, 2, 3, 5)),
            ((slice(None), slots), ()),
        ):
            value = jnp.asarray(rng.standard_normal(shape), dtype)
            want = pool.at[index].set(value, mode="drop")
            assert same_bits(state_module.put(pool, index, value), want)
            inside = tuple(np.minimum(x, 3) if isinstance(x, np.ndarray) else x for x in index)
            assert same_bits(state_module.take(pool, inside), pool[inside])


# ------------------------------------------------------------------------------------------- which slots, which rows


@pytest.mark.parametrize("mode", MODES)
def test_I7_random_slots_of_a_random_pool(mode):
    """I7: ids [7, 3, 11, 0, 19, 5, 23, 1] on a random pool: exactly these change, each from its own content to the oracle's."""
    spec = fs_spec("gdn", mode)
    m = Machine(spec, 8, poison=None)
    m.slot = np.array([7, 3, 11, 0, 19, 5, 23, 1])
    host = random_state(spec)
    m.state = to_device(host)
    rows = host.ssm[:, m.slot * spec.rows_per_slot]
    m.oracle.s = np.swapaxes(np.moveaxis(rows, 0, 1), -1, -2).astype(float)
    m.oracle.window = np.moveaxis(host.conv[:, m.slot, :, : spec.conv_width - 1], 0, 1).astype(float)
    for accepts in (np.array([4, 3, 2, 1] * 2), np.array([1, 2, 3, 4] * 2)):
        m.round(np.full(8, 4), accepts)
        m.check()


def test_I8_layers_are_independent():
    """I8: three layers, fp32 state beside bf16 convolution and records: a forward of layer 1 changes layer 1 only."""
    for mode in MODES:
        spec = small_spec("gdn", mode, layers=3)
        host, tokens, params = random_state(spec), draw_tokens(spec, np.random.default_rng(0), 4), draw_params(spec)
        ids = np.array([7, 3, 5, 0], np.int32)

        def one(state, x, inputs, weight, spec=spec, ids=ids):
            state, receipt = ssm.prepare(spec, state, ssm.build_layout(spec, ids, jnp.zeros_like(ids)))
            state, _ = ssm.conv_forward(spec, state, receipt, jnp.int32(1), x, weight)
            return ssm.forward(spec, state, receipt, jnp.int32(1), inputs)[0]

        inputs = jax.tree.map(lambda x: x[1], layer_inputs(tokens, params))
        new = to_host(quick_jit(one)(to_device(host), tokens.x[:, 1], inputs, params.weight[1]))
        for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(host), strict=True):
            if a.ndim > 1:
                assert np.array_equal(bits(a[[0, 2]]), bits(b[[0, 2]]))
        changed = new.ssm if mode == "native" else new.extra.v
        assert not same_bits(changed[1], (host.ssm if mode == "native" else host.extra.v)[1])


@pytest.mark.parametrize("mode", MODES)
def test_I11_every_order_of_three_rows(mode):
    """I11: a batch of 3 in slots [8, 2, 5], all six orders of its rows: the same bits in the pool."""
    results = []
    for order in itertools.permutations(range(3)):
        m = Machine(fs_spec("gdn", mode), 3, seed=2)
        m.slot = np.array([8, 2, 5])
        m.state = m.verbs.clear(m.state, m.ids(np.arange(3)))
        m.order = lambda n, order=order: np.array(order)
        for accepts in ([4, 1, 3], [2, 4, 1]):
            m.round(np.full(3, 4), np.array(accepts))
        results.append(of_slots(m.spec, m.state, [8, 2, 5]))
    assert all(same_bits(results[0], other) for other in results[1:])


def test_I7_I11_planted_row_numbers_as_slots_are_seen(monkeypatch):
    """Slots 0..B-1 instead of the requested ones: what a test with identity ids cannot see."""
    rows = lambda spec, slots, keep=True: jnp.where(slots < spec.hold, jnp.arange(slots.shape[0]), spec.slots)  # noqa: E731
    monkeypatch.setattr(native, "drop_index", rows)
    m = Machine(fs_spec("gdn", "native", layers=1), 3, verbs_of=fresh_verbs)
    with pytest.raises(AssertionError):
        m.round(np.full(3, 4), np.array([4, 1, 3]))


def test_I12_seventy_thousand_programs():
    """I12: 64 heads x 1,100 requests in one call: more than a GPU's second grid axis holds; here it must simply work."""
    spec = small_spec(slots=1101, q_heads=1, k_heads=1, v_heads=64, k_dim=4, v_dim=4)
    tokens, params = draw_tokens(spec, np.random.default_rng(0), 1100), draw_params(spec)
    ids = np.random.default_rng(1).permutation(1100).astype(np.int32)
    run = quick_jit(partial(recurrent_round, spec))
    inputs, ones = single(layer_inputs(tokens, params)), np.ones(1100, np.int32)
    state, _ = run(ssm.init_state(spec), ids, 0 * ones, inputs, ones)
    batch = oracle.Requests(spec, params, 1100)
    batch.accept(np.arange(1100), oracle.Tokens(**{n: x[:, None] for n, x in vars(tokens).items()}), ones)
    assert rel_l2(np.asarray(state.ssm)[0, ids], batch.stored(slice(None))[:, 0]).max() <= 1e-5


def test_I14_index_tensors_of_any_stride_and_width():
    """I14: a column of a 2-D table, int64 and int32 ids give the same layout; an int64 id beyond 32 bits is refused."""
    spec = small_spec(width=2)
    table = np.array([[9, 7, 0], [9, 7, 1], [9, 3, 0], [9, 8, 0]], np.int64)
    want = ssm.build_layout(spec, jnp.array([7, 7, 3, 8], jnp.int32), jnp.array([0, 1, 0, 0], jnp.int32))
    for kind in (np.int32, np.int64):
        strided = table.astype(kind)
        assert same_bits(ssm.build_layout(spec, strided[:, 1], strided[:, 2]), want)
        assert same_bits(ssm.build_layout(spec, jnp.asarray(strided)[:, 1], jnp.asarray(strided)[:, 2]), want)
    host = random_state(spec)
    column = np.array([[1, 7], [1, 3]])[:, 1]
    assert same_bits(ssm.clear(spec, to_device(host), column), ssm.clear(spec, to_device(host), jnp.array([7, 3])))
    with pytest.raises(ValueError, match=str(2**32 + 3)):
        ssm.clear(spec, to_device(host), np.array([2**32 + 3]))


@pytest.mark.parametrize("mode", MODES)
def test_I15_value_heads_read_their_group(mode):
    """I15: H = 2, HV = 6, key head 0 all zero: value heads 0..2 stay zero and 3..5 do not; query head 1 zero: outputs 3..5
    are zero. Prefill likewise."""
    width = 2 if mode == "compact" else 1
    spec = small_spec("gdn", mode, v_heads=6, width=width)
    tokens, params = draw_tokens(spec, np.random.default_rng(0), 4), draw_params(spec)
    tokens.k[:, :, 0], tokens.q[:, :, 1] = 0, 0
    ids, ones = np.array([7, 3, 5, 0], np.int32), np.ones(4, np.int32)
    inputs = single(layer_inputs(tokens, params))
    state, o = quick_jit(partial(recurrent_round, spec))(ssm.init_state(spec), ids, 0 * ones, inputs, ones)
    prompt = jax.tree.map(lambda x: x[:, None] if x.ndim > 1 else x, inputs)
    filled, po = quick_jit(partial(ssm.prefill, spec))(ssm.init_state(spec), 0, ids, ones, prompt)
    written = np.asarray(ssm.snapshot(spec, state, ids)[1])[:, 0]
    prefilled = np.asarray(filled.ssm)[0, ids * spec.rows_per_slot]
    for s in (written, prefilled):
        assert not s[:, :3].any() and (np.abs(s[:, 3:]).max(axis=(2, 3)) > 0).all()
    for x in (np.asarray(o), np.asarray(po)[:, 0]):
        assert not x[:, 3:].any()  # query head 1 is zero
        assert not x[:, :3].any()  # key head 0 is zero


@pytest.mark.parametrize(("mode", "group"), [("native", 1), ("native", 2), ("replay", 3)])
def test_R12_grouped_keys_equal_redundant_ones(mode, group):
    """R12: keys stored once per key head give the state and outputs of keys repeated per value head."""
    rng, ids, ones = np.random.default_rng(0), np.array([7, 3], np.int32), np.ones(2, np.int32)
    grouped = small_spec("gdn", mode, q_heads=2, k_heads=2, v_heads=2 * group)
    repeated = small_spec("gdn", mode, q_heads=2, k_heads=2 * group, v_heads=2 * group)
    tokens, params = draw_tokens(grouped, rng, 2), draw_params(grouped)
    results = []
    for spec in (grouped, repeated):
        inputs = single(layer_inputs(tokens, params))
        inputs = inputs.replace(k=np.repeat(inputs.k, spec.k_heads // 2, axis=1))

        def run(inputs, spec=spec):
            state, o = recurrent_round(spec, ssm.init_state(spec), ids, 0 * ids, inputs, ones)
            return ssm.merge(spec, state, ids).ssm, o

        results.append(quick_jit(run)(inputs))
    assert close(*results)
