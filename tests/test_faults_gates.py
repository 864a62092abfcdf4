"""faults.md N6 to N17: extreme gates, small norms, stale history, dtypes, order of the rule, gate parameters."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from fixtures import (
    SLOTS,
    draw_params,
    draw_tokens,
    fresh_verbs,
    fs_spec,
    layer_inputs,
    prompt_chunk,
    quick_jit,
    recurrent_round,
    single,
    small_spec,
    verbs,
    whole_round,
)
from machine import Machine
from oracle import Tokens, rel_l2

import jax_ssm as ssm
from jax_ssm import gates
from jax_ssm.executors import native, recurrence, replay

REQUESTS = 4


def extreme_tokens(spec, case):
    """16 tokens a request; the gate logits and parameters of the case."""
    tokens, params = draw_tokens(spec, np.random.default_rng(4), REQUESTS, 1, 16), draw_params(spec)
    A_log, dt_bias = np.zeros_like(params.A_log), np.zeros_like(params.dt_bias)
    if case == "g = -8":
        tokens.a[:] = 8.0  # softplus(8) = 8.0003
    elif case == "one reset":
        A_log[:], tokens.a[:] = 100.0, -1e4  # decay 1 everywhere ..
        tokens.a[:, :, 9] = 1.0  # .. and 0 at token 9
    elif case == "g = 0":
        tokens.a[:] = -1e4
    elif case == "half 0, half -2":
        tokens.a[:] = np.where(np.random.default_rng(5).integers(0, 2, tokens.a.shape), -1e4, 1.854)
    return tokens, oracle.Params(A_log, dt_bias, params.weight, params.bias)


CASES = ["g = -8", "one reset", "g = 0", "half 0, half -2"]


@lru_cache
def wide_window(rule, mode):
    """A jitted round of one window of 16 and its fold; parameters are arguments."""
    spec = small_spec(rule, mode, width=16)

    def run(inputs, ids, offsets):
        state, o = recurrent_round(spec, ssm.init_state(spec), ids, offsets, inputs, jnp.full(8, 16))
        return ssm.snapshot(spec, state, SLOTS)[1][:, 0], o

    return spec, quick_jit(run)


@pytest.mark.parametrize(("rule", "mode"), [("gdn", "native"), ("kda", "compact"), ("gdn", "replay"), ("kda", "replay")])
def test_N6_N8_extreme_gates_in_a_window(rule, mode):
    """N6, N8: decay below 1e-3 per token for 16 tokens, an exact reset, a gate of exactly 1: no NaN, equal to the oracle."""
    spec, run = wide_window(rule, mode)
    for case in CASES:
        tokens, params = extreme_tokens(spec, case)
        batch = oracle.Requests(spec, params, REQUESTS)
        want, _ = batch.accept(np.arange(REQUESTS), tokens.at((slice(None), 0)), np.full(REQUESTS, 16))
        flat = Tokens(**{name: x.reshape((-1,) + x.shape[3:]) for name, x in vars(tokens).items()})
        ids, offsets = np.repeat(SLOTS, 16), np.tile(np.arange(16, dtype=np.int32), REQUESTS)
        state, o = run(single(layer_inputs(flat, params)), ids, offsets)
        o = np.asarray(o).astype(float).reshape(want[:, :, 0].shape)
        np.testing.assert_allclose(o, want[:, :, 0], atol=6e-3, rtol=2e-2, err_msg=case)
        assert rel_l2(np.asarray(state), batch.stored(slice(None))[:, 0]).max() <= 1e-5, case


@pytest.mark.parametrize("rule", ["gdn", "kda"])
def test_N6_N8_extreme_gates_in_prefill(rule):
    """The same gates at lengths 1, 15, 16, 17, 63, 64, 65, padded to 65."""
    spec = small_spec(rule)
    lengths = np.array([1, 15, 16, 17, 63, 64, 65, 65], np.int32)
    run = quick_jit(partial(ssm.prefill, spec))
    for case in CASES:
        tokens, params = extreme_tokens(spec, case)
        index = np.resize(np.arange(16), 65)
        long = tokens.at((np.resize(np.arange(REQUESTS), 8)[:, None], 0, index))
        batch = oracle.Requests(spec, params, 8)
        want, _ = batch.accept(np.arange(8), long, lengths)
        slots = np.array([7, 3, 5, 0, 2, 6, 1, 4], np.int32)
        state, o = run(ssm.init_state(spec), 0, slots, lengths, single(layer_inputs(long, params)))
        real = np.arange(65) < lengths[:, None]
        got = np.asarray(o).astype(float)
        np.testing.assert_allclose(got[real], want[real][:, 0], atol=6e-3, rtol=2e-2, err_msg=case)
        assert not got[~real].any()
        state = np.asarray(state.ssm)[0, slots]
        assert rel_l2(state, batch.stored(slice(None))[:, 0]).max() <= 1e-5, case


NORMS = np.array([0.0, 1e-4, 1e-3, 1e-1, 1.0])


def small_norms(x):
    """Scale consecutive tokens [.., n, layers, heads, K] to the five norms in turn."""
    x = x.astype(np.float64)
    scale = np.resize(NORMS, x.shape[-4])[:, None, None, None]
    return (x / np.linalg.norm(x, axis=-1, keepdims=True) * scale).astype(np.float32)


def norm_errors(mode, verbs_of):
    """Worst relative error of states whose queries and keys have norms from 0 to 1: prompt, decode, verify, fold."""
    m = Machine(fs_spec("gdn", mode, act_dtype="fp32", layers=1), 4, verbs_of=verbs_of)
    draw = m.draw

    def scaled(requests, n, keep):
        tokens = draw(requests, n, keep)
        live = np.arange(n) < np.asarray(keep)[:, None]
        for name in "qk":
            x = getattr(tokens, name)
            x[live] = small_norms(x)[live]
        return tokens

    m.draw = scaled
    m.round(np.ones(4, int), np.ones(4, int))
    m.round(np.full(4, 4), np.array([4, 3, 4, 2]))
    m.prompt(np.arange(4), np.full(4, 5))
    m.round(np.full(4, 4), np.array([4, 3, 4, 2]))
    m.check()
    return m.worst


def test_N10_one_norm_with_eps_inside(monkeypatch):
    """N10: eps = 1e-6 inside the square root, in prefill, decode, verify and fold; a key of norm 1e-3 becomes 0.707."""
    assert norm_errors("replay", fresh_verbs) <= 1e-5
    assert abs(float(jnp.linalg.norm(gates.l2norm(jnp.zeros(16).at[3].set(1e-3)))) - 0.5**0.5) < 1e-3
    assert not np.asarray(gates.l2norm(jnp.zeros((2, 16)))).any()
    outside = lambda x: x.astype(jnp.float32) / (jnp.linalg.norm(x.astype(jnp.float32), axis=-1, keepdims=True) + 1e-6)  # noqa: E731
    monkeypatch.setattr(gates, "l2norm", outside)
    with pytest.raises(AssertionError):
        norm_errors("native", fresh_verbs)


def leak_trace(mode, value, verbs_of):
    """Everything observable of a program whose dead bytes hold `value`: outputs, states, pages; cursors 0, 1, L-1, L."""
    m = Machine(fs_spec("gdn", mode), 8, seed=9, poison=(value, value), verbs_of=verbs_of)
    m.compare_outputs = lambda out, y, o, real: m.trace.extend(x[real].tobytes() for x in out)
    start = np.array([0, 1, 3, 4] * 2)
    m.round(np.where(start > 0, 4, 0), start)
    m.round(np.full(8, 4), np.array([1, 2, 3, 4, 4, 3, 2, 1]))
    m.move(np.arange(0, 8, 3))
    m.round(np.full(8, 2), np.array([2, 1] * 4))
    m.disturb()
    m.trace += [np.asarray(x).tobytes() for x in m.verbs.snapshot(m.state, m.ids(np.arange(8)))]
    return m.trace


@pytest.mark.parametrize("mode", ["replay", "compact"])
def test_N12_stale_history_is_never_read(mode):
    """N12: history beyond the cursor as zero, NaN or 3e38: outputs, states and pages are bit-identical."""
    traces = [leak_trace(mode, value, verbs) for value in (0.0, float("nan"), 3e38)]
    assert traces[0] == traces[1] == traces[2]


def test_N12_planted_masked_coefficient_is_seen(monkeypatch):
    """A coefficient of 0 instead of a masked load: stale NaN gets through, and the comparison fails."""
    real = replay.forward

    def masked_coefficient(spec, state, receipt, row, core):
        stale = jnp.sum(jnp.where(jnp.isnan(state.extra.d[row]), jnp.nan, 0.0) * 0.0)
        state, o = real(spec, state, receipt, row, core)
        return state, jnp.where(o == 0, o, o + stale.astype(o.dtype))

    monkeypatch.setattr(replay, "forward", masked_coefficient)
    planted = lru_cache(fresh_verbs)
    assert leak_trace("replay", 0.0, planted) != leak_trace("replay", float("nan"), planted)


# ------------------------------------------------------------------------------------------------------ dtypes and order


@pytest.mark.parametrize("mode", ["native", "compact", "replay"])
def test_N14_pools_keep_their_dtype(mode):
    """N14: whatever the dtype of gate logits and activations, every leaf leaves a round and a prompt as declared."""
    for act, state_dtype in (("bf16", "fp32"), ("fp32", "bf16")):
        spec = fs_spec("gdn", mode, act_dtype=act, ssm_dtype=state_dtype, slots=9)
        state, params, rng = ssm.init_state(spec), draw_params(spec), np.random.default_rng(0)
        weights = (params.weight, params.bias)
        declared = [x.dtype for x in jax.tree.leaves(state)]
        assert state.ssm.dtype == oracle.STORAGE[state_dtype] and state.conv.dtype == oracle.STORAGE[act]
        for logits in (np.float16, np.float32, oracle.BF16):
            flat, prompt = draw_tokens(spec, rng, 32), draw_tokens(spec, rng, 8, 5)
            ids = np.zeros(32, np.int32)
            for tokens, fn, args in ((flat, whole_round, (ids, ids)), (prompt, prompt_chunk, (ids[:8], ids[:8]))):
                inputs = layer_inputs(tokens, params)
                inputs = inputs.replace(a=inputs.a.astype(logits), b=inputs.b.astype(logits))
                x = np.moveaxis(tokens.x, -2, 0)
                rest = (ids[:8],) if fn is whole_round else ()
                new = jax.eval_shape(partial(fn, spec), state, *args, x, inputs, weights, *rest)[0]
                assert [x.dtype for x in jax.tree.leaves(new)] == declared


def hard_gate_program(verbs_of, gate="hard"):
    m = Machine(fs_spec("gdn", "native", width=2, layers=1), 4, gate=gate, verbs_of=verbs_of)
    for _ in range(3):
        m.round(np.full(4, 2), np.array([2, 1, 2, 1]))
        m.check()


def test_N16_decay_comes_before_the_correction(monkeypatch):
    """N16: the formula of the documentation, under a hard gate; the other order is seen."""
    hard_gate_program(verbs)

    def wrong_order(s, k_hat, v, decay, beta):
        d = (v - recurrence.read(s, k_hat)) * beta[..., None]
        return s * decay[..., None, :] + d[..., :, None] * k_hat[..., None, :], d

    monkeypatch.setattr(native, "step", wrong_order)
    with pytest.raises(AssertionError):
        hard_gate_program(fresh_verbs)


def two_tokens(verbs_of, count):
    m = Machine(fs_spec("gdn", "native", width=2, layers=1), 4, gate="weak", verbs_of=verbs_of)
    for _ in range(count):
        m.round(np.ones(4, int), np.ones(4, int))
        m.check()


def test_N17_A_log_is_exponentiated_once(monkeypatch):
    """N17: A_log = log(0.04) with one token (which cannot show the fault) and with two (which must)."""
    two_tokens(verbs, 2)
    real = gates.log_decay
    twice = lambda spec, a, A_log, dt_bias: real(spec, a, -jnp.exp(A_log), dt_bias)  # noqa: E731
    monkeypatch.setattr(gates, "log_decay", twice)
    two_tokens(fresh_verbs, 1)
    with pytest.raises(AssertionError):
        two_tokens(fresh_verbs, 2)
