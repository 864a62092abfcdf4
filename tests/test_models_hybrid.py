"""The model on the attention runtime equals its teacher-forced forward: prompt chunks, verify, rollback, MTP, loops."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ssm.attention import BackendError, Bucket, build_batch
from jax_ssm.models import ModelConfig, forward_sequence, hybrid, mtp_sequence
from jax_ssm.models.qwen3_5 import FLOAT32_PARAMS, map_shapes, param_shapes
from jax_ssm.spec import plan_layers

CONFIG = ModelConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    layer_types=("linear_attention", "full_attention", "linear_attention"),
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=8,
    rotary_dim=8,
    tie_word_embeddings=True,
    mtp_num_hidden_layers=1,
)
LOOPED = replace(CONFIG, layer_types=CONFIG.layer_types[:2], mtp_num_hidden_layers=0)
SLOTS, MAX_LEN, HOLD, CHUNK = 5, 64, 4, 16
TOKENS = np.random.default_rng(1).integers(0, 256, (2, 48)).astype(np.int32)
DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


def make_params(dtype):
    """Random weights large enough for every layer to matter, norms away from identity."""
    rng = np.random.default_rng(2)

    def leaf(path, shape):
        if path[-1] in FLOAT32_PARAMS:
            return jnp.asarray(rng.normal(0, 0.5, shape), jnp.float32)
        scale = 0.3 if len(shape) == 1 else 0.12
        return jnp.asarray(rng.normal(1.0 if path[-2:] == ("linear_attn", "norm") else 0.0, scale, shape), DTYPES[dtype])

    return map_shapes(leaf, param_shapes(CONFIG))


# these tests compile much and compute little
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
PARAMS = {dtype: make_params(dtype) for dtype in DTYPES}
forward = jit(forward_sequence, static_argnums=(0, 3))
mtp_forward = jit(mtp_sequence, static_argnums=0)
prefill = jit(hybrid.prefill_chunk, static_argnums=0)
mtp_prefill = jit(hybrid.mtp_prefill, static_argnums=0)
mtp_draft = jit(hybrid.mtp_draft, static_argnums=(0, 6))


@partial(jit, static_argnums=(0, 1))
def round_(specs, bucket, params, state, ids, offsets, tokens, next_tokens, lengths):
    """One decode round with the acceptance given: (state, logits, MTP hidden, MTP logits, layout slots)."""
    ctxs = hybrid.prepare_contexts(specs, hybrid.allocate_contexts(specs, bucket))
    batch = build_batch(specs.ssm, bucket, ids, b_mtp_index=offsets, b_ready_cache_len=state.kv.length)
    state, ctxs = hybrid.update_contexts(specs, ctxs, state, batch)
    state, hidden, logits = hybrid.verify(specs, params, ctxs, state, tokens, batch.positions)
    state = hybrid.accept_model(specs, ctxs, state, lengths)
    if specs.mtp_kv is None:
        return state, logits, None, None
    state, *mtp = hybrid.mtp_verify(specs, params, ctxs, state, hidden, next_tokens, batch.positions)
    return state, logits, *mtp


def specs_for(mode="native", dtype="fp32", width=1, **fields):
    defaults = dict(slots=SLOTS, max_len=MAX_LEN, history=4, act_dtype=dtype)
    return hybrid.model_specs(CONFIG, width=width, mode=mode, **(defaults | fields))


def assert_close(ours, theirs, rtol):
    ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
    assert np.abs(ours - theirs).max() <= rtol * np.abs(theirs).max(), np.abs(ours - theirs).max() / np.abs(theirs).max()


@cache
def teacher(dtype):
    """Oracle: (logits, MTP logits) of TOKENS; MTP entry i has seen token i + 1."""
    hidden, logits = forward(CONFIG, PARAMS[dtype], TOKENS, None)
    return logits, mtp_forward(CONFIG, PARAMS[dtype], hidden[:, :-1], TOKENS[:, 1:])[1]


def chunks(specs, params, splits):
    """Prefill the start of TOKENS in chunks into slots 3 and 1, with a HOLD row between; the last logits of both rows."""
    state, slots = hybrid.init_model_state(specs), np.array([3, HOLD, 1])
    begin, rows = 0, 3
    for n in splits:
        tokens, following = np.full((rows, CHUNK), 7, np.int32), np.full((rows, CHUNK), 9, np.int32)
        tokens[::2, :n], following[::2, :n] = TOKENS[:, begin : begin + n], TOKENS[:, begin + 1 : begin + n + 1]
        lengths = np.array([n, 0, n])
        state, hidden, logits = prefill(specs, params, state, slots, tokens, lengths)
        if specs.mtp_kv:
            state, _, _ = mtp_prefill(specs, params, state, slots, hidden, following, lengths)
        begin += n
    return state, np.asarray(logits)[::2]


def test_prefill_whole_chunked_and_with_a_decoded_end_agree():
    """prefill(N) = prefill in ragged chunks = prefill(N-1) and one decode step = teacher-forced; HOLD rows in between."""
    specs, params, (expected, _) = specs_for(), PARAMS["fp32"], teacher("fp32")
    for splits in ((16,), (7, 8, 1), (16, 16, 3)):
        total = sum(splits)
        state, logits = chunks(specs, params, splits)
        assert_close(logits, expected[:, total - 1], 1e-5)
        assert state.kv.length.tolist() == state.mtp.length.tolist() == [0, total, 0, total, 0]
    state, _ = chunks(specs, params, (15,))
    zeros, ones, tokens = np.zeros(3, np.int32), np.ones(3, np.int32), np.append(TOKENS[:, 15], 5)
    rows = np.array([3, 1, HOLD], np.int32), zeros, tokens, np.append(TOKENS[:, 16], 5), ones
    _, logits, _, _ = round_(specs, Bucket(3, 3, fixed=True), params, state, *rows)
    assert_close(logits[:2], expected[:, 15], 1e-5)


def run_rounds(specs, params, rounds, *, splits=(10, 5), fixed=True, roll_back=True):
    """After a prompt of sum(splits) tokens, verify windows whose first a tokens are the true ones and the others wrong,
    and accept a. Returns the state, the reached length of both rows, and what the accepted rows said. roll_back=False
    plants the fault: everything is accepted."""
    width, rng = specs.ssm.width, np.random.default_rng(3)
    state = chunks(specs, params, splits)[0] if splits else hybrid.init_model_state(specs)
    at, seen = np.full(2, sum(splits)), []
    for _ in range(rounds):
        count = np.full(2, width) if fixed else rng.integers(1, width + 1, 2)
        accepted = np.array([rng.integers(1, n + 1) for n in count])
        ids, offsets, tokens, following, expect = [], [], [], [], []
        for row, slot in enumerate((3, 1)):
            for t in range(count[row]):
                true = t < accepted[row]
                ids.append(slot), offsets.append(t)
                tokens.append(TOKENS[row, at[row] + t] if true else rng.integers(256))
                following.append(TOKENS[row, at[row] + t + 1] if true else rng.integers(256))
                expect.append((row, at[row] + t) if true else None)
        requests, total = 3, 3 * width
        pad = total - len(ids)
        columns = (ids, HOLD), (offsets, 0), (tokens, 0), (following, 0)
        arrays = [np.array(x + [fill] * pad, np.int32) for x, fill in columns]
        lengths = np.append(accepted if roll_back else count, 0).astype(np.int32)
        state, *outputs = round_(specs, Bucket(requests, total, fixed=fixed), params, state, *arrays, lengths)
        seen += [(where, *(np.asarray(x[i]) for x in outputs if x is not None)) for i, where in enumerate(expect) if where]
        at += accepted
    return state, at, seen


def worst(seen, expected, which):
    scale = float(np.abs(expected).max())
    return max(float(np.abs(x[which] - expected[x[0]]).max()) for x in seen) / scale


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", ["native", "compact", "replay"])
def test_verify_with_partial_acceptance_equals_teacher_forced(mode, dtype):
    """Rejected drafts leave no trace in any state; replay folds on the way (L = 4); MTP rows agree as well (R96)."""
    specs, params = specs_for(mode, dtype, width=3), PARAMS[dtype]
    expected, expected_mtp = (np.asarray(x) for x in teacher(dtype))
    splits = (10, 5) if dtype == "fp32" else ()
    state, at, seen = run_rounds(specs, params, 7, splits=splits)
    rtol = {"fp32": 2e-5, "bf16": 6e-2}[dtype]
    assert worst(seen, expected, 1) < rtol and worst(seen, expected_mtp, 3) < rtol
    assert state.kv.length.tolist() == state.mtp.length.tolist() == [0, at[1], 0, at[0], 0]
    for leaf in (state.linear.conv[:, HOLD], state.kv.k[:, HOLD], state.mtp.v[:, HOLD]):
        assert not np.asarray(leaf, np.float32).any()
    if (mode, dtype) == ("native", "fp32"):
        _, _, wrong = run_rounds(specs, params, 7, roll_back=False)
        assert worst(wrong, expected, 1) > 1e-2


def test_packed_verify_lengths_equal_teacher_forced():
    """Windows of 1..W tokens, packed, with padding rows at the end."""
    specs = specs_for("replay", width=3)
    expected, expected_mtp = (np.asarray(x) for x in teacher("fp32"))
    _, _, seen = run_rounds(specs, PARAMS["fp32"], 8, splits=(), fixed=False)
    assert worst(seen, expected, 1) < 2e-5 and worst(seen, expected_mtp, 3) < 2e-5


def test_mtp_drafts_equal_the_recomputed_chain():
    """R96: draft j comes from the head fed with its own hidden states; nothing of the chain is committed."""
    specs, params = specs_for(width=3), PARAMS["fp32"]
    state, slots, n = hybrid.init_model_state(specs), jnp.array([2, 0, HOLD]), jnp.array([16, 16, 0])
    tokens = np.pad(TOKENS[:, :17], ((0, 1), (0, 0)))
    state, hidden, _ = prefill(specs, params, state, slots, tokens[:, :16], n)
    state, head, logits = mtp_prefill(specs, params, state, slots, hidden, tokens[:, 1:], n)
    first = jnp.argmax(logits, -1)
    before = state.mtp.length
    state, drafts = mtp_draft(specs, params, state, slots, head, first, 3)
    assert (state.mtp.length == before).all()

    def head_at(chain, tokens, i):
        grow = 18 - chain.shape[1]
        padded = jnp.pad(chain, ((0, 0), (0, grow), (0, 0))), jnp.pad(tokens, ((0, 0), (0, 18 - tokens.shape[1])))
        return tuple(x[:, i : i + 1] for x in mtp_forward(CONFIG, params, *padded))

    chain, tokens, expected = hidden[:2], tokens[:2, 1:], [first[:2]]
    for i in (15, 16):
        chain = jnp.concatenate([chain, head_at(chain, tokens, i)[0]], 1)
        tokens = jnp.concatenate([tokens, expected[-1][:, None]], 1)
        expected.append(jnp.argmax(head_at(chain, tokens, i + 1)[1][:, 0], -1))
    np.testing.assert_array_equal(drafts[:2], jnp.stack(expected, 1))


@pytest.mark.parametrize("mode", ["native", "compact", "replay"])
def test_R97_two_loops_equal_an_unrolled_model_bitwise(mode):
    """Layers [0, 2) run twice: same bits as a model with their weights duplicated, and states of its logical rows."""
    config, unrolled = LOOPED, replace(LOOPED, layer_types=LOOPED.layer_types * 2)
    params = PARAMS["fp32"] | {"layers": PARAMS["fp32"]["layers"][:2]}
    copies = params | {"layers": params["layers"] * 2}
    common = dict(slots=SLOTS, max_len=MAX_LEN, width=2, mode=mode, history=4, act_dtype="fp32")
    plan = plan_layers(config.kinds, loop=(0, 2), loop_count=2)
    a, _, seen_a = run_rounds(hybrid.model_specs(config, plan=plan, **common), params, 4, splits=())
    b, _, seen_b = run_rounds(hybrid.model_specs(unrolled, **common), copies, 4, splits=())
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)
    for x, y in zip(seen_a, seen_b, strict=True):
        assert x[0] == y[0] and np.array_equal(x[1], y[1])
    assert a.linear.ssm.shape[0] == 2 and a.kv.k.shape[0] == 2
    assert not np.array_equal(a.linear.ssm[0], a.linear.ssm[1])  # R40: the two loops of one layer keep their own rows
    _, expected = forward(config, params, TOKENS, plan)
    assert worst(seen_a, np.asarray(expected), 1) < 2e-5


def test_loop_count_one_is_the_plain_model_and_norm_between_loops_changes_it():
    assert plan_layers(CONFIG.kinds, loop_count=1) == specs_for().plan
    plan = plan_layers(LOOPED.kinds, loop=(0, 2), loop_count=2, inter_loop_norm=True)
    params = PARAMS["fp32"] | {"layers": PARAMS["fp32"]["layers"][:2]}
    specs = hybrid.model_specs(LOOPED, slots=SLOTS, max_len=MAX_LEN, act_dtype="fp32", plan=plan)
    _, logits = chunks(specs, params, (9,))
    assert_close(logits, forward(LOOPED, params, TOKENS, plan)[1][:, 8], 1e-5)
    bare = forward(LOOPED, params, TOKENS, plan_layers(LOOPED.kinds, loop=(0, 2), loop_count=2))[1][:, 8]
    assert np.abs(logits - bare).max() > 1e-2


def test_cleared_slot_is_a_fresh_one_and_others_keep_their_bits():
    specs, params = specs_for("replay", width=3), PARAMS["fp32"]
    state, _, _ = run_rounds(specs, params, 3)
    cleared = hybrid.clear_model(specs, state, jnp.array([3]))
    fresh = hybrid.init_model_state(specs)
    chunk = jnp.array([3, HOLD, HOLD]), jnp.tile(TOKENS[:1, :CHUNK], (3, 1)), jnp.array([CHUNK, 0, 0])
    _, _, expected = prefill(specs, params, fresh, *chunk)
    after, _, logits = prefill(specs, params, cleared, *chunk)
    np.testing.assert_array_equal(logits[0], expected[0])
    np.testing.assert_array_equal(after.linear.ssm[:, 1], state.linear.ssm[:, 1])
    np.testing.assert_array_equal(after.kv.k[:, 1], state.kv.k[:, 1])


@pytest.mark.parametrize("mode", ["native", "compact", "replay"])
def test_bytes_by_part_are_those_of_the_arrays(mode):
    specs = specs_for(mode, "bf16", width=2)
    state = jax.eval_shape(lambda: hybrid.init_model_state(specs))
    allocated = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    parts = hybrid.model_state_bytes(specs)
    assert parts["total"] * SLOTS == allocated * (SLOTS - 1)
    assert parts["total"] == sum(v for k, v in parts.items() if k != "total")
    assert parts["mtp_kv"] * 1 == parts["kv"]  # one full layer each


def test_illegal_specs_raise_before_any_array_exists():
    plain = replace(CONFIG, mtp_num_hidden_layers=0)
    with pytest.raises(ValueError, match="mtp=True"):
        hybrid.model_specs(plain, slots=SLOTS, max_len=MAX_LEN, mtp=True)
    with pytest.raises(ValueError, match="width=1"):
        specs_for("compact")
    with pytest.raises(BackendError, match="magic"):
        specs_for(implementation="magic")
    with pytest.raises(ValueError, match="layers"):
        specs_for(plan=plan_layers(CONFIG.kinds, loop=(2, 5)))
    specs = specs_for("native", "bf16")
    with pytest.raises(ValueError, match="act_dtype"):
        chunks(specs, PARAMS["fp32"], (4,))
