"""faults.md N1 to N4, N18: accuracy over thousands of tokens, folds, and the same bits of gates on every path."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from fixtures import (
    SLOTS,
    bits,
    draw_params,
    draw_tokens,
    fs_spec,
    layer_inputs,
    quick_jit,
    recurrent_round,
    run_rounds,
    single,
    small_spec,
)
from jax import lax
from oracle import Tokens, rel_l2

import jax_ssm as ssm
from jax_ssm import gates
from jax_ssm.conv import conv_sequence
from jax_ssm.executors import recurrence, replay

REQUESTS = 4


def accepted_tokens(tokens: Tokens, accepts) -> Tokens:
    """[requests, rounds, W, ..] -> [requests, sum(accepts), ..]: what a request keeps."""
    keep = np.arange(tokens.x.shape[2]) < np.asarray(accepts)[:, None]
    return tokens.at((slice(None), keep))


def canonical(spec, state):
    """Canonical state of layer 0 of the requests, [requests, HV, V, K]."""
    return np.asarray(ssm.snapshot(spec, state, jnp.asarray(SLOTS))[1])[:, 0]


@lru_cache
def long_run(rule):
    """2,048 tokens of four requests under the slow gate, and the oracle's state after them."""
    spec = small_spec(rule)
    tokens, params = draw_tokens(spec, np.random.default_rng(0), REQUESTS, 2048), draw_params(spec)
    batch = oracle.Requests(spec, params, REQUESTS)
    batch.accept(np.arange(REQUESTS), tokens, np.full(REQUESTS, 2048))
    return tokens, params, batch.stored(slice(None))[:, 0]


def decode_error(rule, mode):
    spec, (tokens, params, want) = small_spec(rule, mode), long_run(rule)
    one = Tokens(**{name: x[:, :, None] for name, x in vars(tokens).items()})
    if mode == "compact":  # width 2: the second token of every window is a rejected draft
        one = Tokens(**{name: np.concatenate([x, x[::-1]], axis=2) for name, x in vars(one).items()})
    state, _ = run_rounds(spec, one, np.ones(2048), params=params)
    return rel_l2(canonical(spec, state), want).max()


@pytest.mark.parametrize(("rule", "mode"), [("gdn", "native"), ("gdn", "compact"), ("gdn", "replay"), ("kda", "replay")])
def test_N1_error_after_2048_decode_steps(rule, mode):
    """N1: slow gate, bf16 logits, fp32 state: relative L2 to float64 at most 1e-5 (honest fp32: about 2e-7)."""
    assert decode_error(rule, mode) <= 1e-5


@pytest.mark.parametrize("rule", ["gdn", "kda"])
def test_N1_error_after_2048_tokens_of_prefill(rule):
    spec, (tokens, params, want) = small_spec(rule), long_run(rule)
    inputs = single(layer_inputs(tokens, params))
    run = jax.jit(partial(ssm.prefill, spec))
    state, _ = run(ssm.init_state(spec), 0, SLOTS, np.full(REQUESTS, 2048, np.int32), inputs)
    assert rel_l2(canonical(spec, state), want).max() <= 1e-5


def test_N1_planted_beta_through_bf16_is_seen(monkeypatch):
    def forward(spec, state, receipt, row, inputs):
        core = ssm.prologue(spec, inputs)
        return ssm.forward_core(spec, state, receipt, row, core.replace(beta=lax.reduce_precision(core.beta, 8, 7)))

    monkeypatch.setattr(ssm, "forward", forward)
    assert decode_error("gdn", "native") > 5e-4


# ----------------------------------------------------------------------------------------------------------------- folds


def open_loop_fold(spec, state, slot):
    """The fault of N2: the checkpoint advances by the stored corrections, rounded to bf16, not by raw inputs."""
    h = state.extra
    n, phase = replay.live(spec, h.cursor[slot])
    used = (jnp.arange(spec.history) < n)[:, None]
    half = lambda pool: lax.dynamic_slice_in_dim(pool[:, slot], phase * spec.history, spec.history, axis=2)  # noqa: E731
    k = recurrence.expand_heads(gates.l2norm(half(h.k)), spec.v_heads, 1)
    d = jnp.where(used, lax.reduce_precision(half(h.d), 8, 7), 0)
    decay = jnp.where(used, half(h.decay), 1)
    after, whole = replay._products_after(decay)
    s = state.ssm[:, slot] * whole[..., None, :] + jnp.einsum("lhnv,lhnk->lhvk", d, jnp.where(used, k, 0) * after)
    return s.astype(state.ssm.dtype)


def fold_errors():
    """(relative L2 to float64 at folds 10, 100, 1000; worst difference to native at any round), W = 4 = L."""
    accepts = np.tile([1, 4, 2, 3], 1640 // 4)
    spec, plain = (small_spec("gdn", mode, width=4, history=4) for mode in ("replay", "native"))
    tokens, params = draw_tokens(spec, np.random.default_rng(1), 2, len(accepts), 4), draw_params(spec)
    checkpoint = lambda spec, state: state.ssm[0, SLOTS[:2]]  # noqa: E731
    state, checkpoints = run_rounds(spec, tokens, accepts, checkpoint, params)
    accepted = lambda spec, state: state.ssm[0, SLOTS[:2] * 4 + state.accepted[SLOTS[:2]]]  # noqa: E731
    _, states = run_rounds(plain, tokens, accepts, accepted, params)
    checkpoints, states = np.asarray(checkpoints), np.asarray(states)
    # L = W: every round but the first folds everything accepted before it
    to_native = rel_l2(checkpoints[1:], states[:-1]).max()
    batch = oracle.Requests(spec, params, 2)
    kept, errors, start = accepted_tokens(tokens, accepts), {}, 0
    for fold in (10, 100, 1000):
        stop = accepts[:fold].sum()
        batch.accept(np.arange(2), kept.at((slice(None), slice(start, stop))), np.full(2, stop - start))
        errors[fold], start = rel_l2(checkpoints[fold], batch.stored(slice(None))[:, 0]).max(), stop
    return errors, to_native


def test_N2_folds_do_not_accumulate_error():
    """N2: 1,640 folds, 4,100 accepted tokens: equal to native to 1e-6 after each, no trend from fold 10 to 1,000."""
    errors, to_native = fold_errors()
    assert to_native <= 1e-6
    assert max(errors.values()) <= 1e-6 and errors[1000] <= 3 * errors[100]


def test_N2_planted_open_loop_fold_is_seen(monkeypatch):
    monkeypatch.setattr(replay, "materialize", open_loop_fold)
    errors, to_native = fold_errors()
    assert to_native > 1e-4 and errors[1000] > 1e-4


# ----------------------------------------------------------------------------------------------------------------- gates

FINITE = np.arange(2**16, dtype=np.uint16)
FINITE = FINITE[(FINITE & 0x7F80) != 0x7F80].view(oracle.BF16)  # all 65,280 finite bf16 values
A_LOGS, BIASES = np.array([-3.0, 0.0, 2.0, 5.0], np.float32), np.array([-3.0, -1.0, 0.0, 2.0], np.float32)


def gate_sweep_spec(mode, lower_bound):
    """4 heads (A_log, dt_bias) x 16 channels x 4,080 requests: every finite logit in one call."""
    sizes = dict(layers=1, slots=len(FINITE) // 16 + 1, q_heads=4, k_heads=4, v_heads=4, k_dim=16, v_dim=1)
    return small_spec("kda", mode, **sizes, lower_bound=lower_bound, history=4)


def gate_sweep_inputs(shift):
    """k = v = 0, so that a state of ones becomes exactly the decay. b takes a quarter of the logits, chosen by shift."""
    n = len(FINITE) // 16
    zero = lambda *shape: np.zeros(shape, oracle.BF16)  # noqa: E731
    a, b = np.tile(FINITE.reshape(n, 1, 16), (1, 4, 1)).reshape(n, 64), np.roll(FINITE, shift)[::4].reshape(n, 4)
    k, v = zero(n, 4, 16), zero(n, 4, 1)
    return ssm.LinearInputs(zero(n, 4, 16), k, v, a, b, A_LOGS, np.repeat(np.roll(BIASES, shift), 16))


@lru_cache
def one_round_and_merge(spec):
    """Jitted: a state whose every row is `fill`, one token for every request, everything folded; returns the rows 0."""

    def run(fill, inputs):
        ids = jnp.arange(spec.hold)
        state = ssm.init_state(spec)
        state = state.replace(ssm=jnp.full_like(state.ssm, fill))
        state, _ = recurrent_round(spec, state, ids, jnp.zeros_like(ids), inputs, jnp.ones_like(ids))
        return ssm.merge(spec, state, ids).ssm[0, ids * spec.rows_per_slot, :, 0]

    return jax.jit(run)


def gate_bits_by_state(spec, inputs, name):
    """decay (a state of ones, k = 0) or beta (a zero state, k^ = e_0 exactly, v = 1), as the state shows them."""
    if name == "beta":
        k, v = np.zeros_like(inputs.k), np.ones_like(inputs.v)
        k[..., 0] = 2.0**14
        inputs = inputs.replace(k=k, v=v)
    rows = np.asarray(one_round_and_merge(spec)(float(name == "decay"), inputs))
    return rows if name == "decay" else rows[..., 0]


@pytest.mark.parametrize(("lower_bound", "shift"), [(None, 0), (-5.0, 1)])
def test_N3_N18_gate_bits_are_the_same_on_every_path(lower_bound, shift):
    """N3, N18: all 65,280 finite logits, four values of A_log and of dt_bias: prologue, native, compact commit, replay
    fold and prefill give the same bits of decay and beta."""
    spec, inputs = gate_sweep_spec("native", lower_bound), gate_sweep_inputs(shift)
    core = jax.jit(partial(gates.prologue, spec))(inputs)
    decay, beta = np.asarray(core.decay), np.asarray(core.beta)
    assert np.isfinite(decay).all() and decay.min() >= 0 and decay.max() <= 1
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(beta, oracle.sigmoid(inputs.b), rtol=5e-7, atol=1e-36)
    for mode in ("native", "compact", "replay"):
        other = gate_sweep_spec(mode, lower_bound)
        assert np.array_equal(bits(gate_bits_by_state(other, inputs, "decay")), bits(decay)), mode
        assert np.array_equal(bits(gate_bits_by_state(other, inputs, "beta")), bits(beta)), mode
    n = len(decay)
    one = jax.tree.map(lambda x: x[:, None] if x.ndim > 1 else x, inputs)
    state = ssm.init_state(spec)
    state = state.replace(ssm=jnp.ones_like(state.ssm))
    run = jax.jit(partial(ssm.prefill, spec))
    state, _ = run(state, 0, np.arange(n, dtype=np.int32), np.ones(n, np.int32), one)
    assert np.array_equal(bits(np.asarray(state.ssm)[0, :n, :, 0]), bits(decay)), "prefill"


def test_N3_planted_second_formula_is_seen(monkeypatch):
    """The gate by the library's softplus on one path only: a handful of logits in 65,280 give it away."""
    spec, inputs = gate_sweep_spec("native", None), gate_sweep_inputs(0)
    want = np.asarray(jax.jit(partial(gates.prologue, spec))(inputs).decay)
    monkeypatch.setattr(gates, "softplus", jax.nn.softplus)
    one_round_and_merge.cache_clear()
    assert not np.array_equal(bits(gate_bits_by_state(spec, inputs, "decay")), bits(want))
    one_round_and_merge.cache_clear()


def test_N3_folded_state_equals_native_decode():
    """N3: KDA, bounded gate: verify, accept all, fold, against native decode of the same tokens one at a time."""
    tokens = None
    states = []
    for mode, width in (("replay", 4), ("native", 1)):
        spec = small_spec("kda", mode, width=width, lower_bound=-5.0)
        if tokens is None:
            tokens = draw_tokens(spec, np.random.default_rng(2), REQUESTS, 24)
        shaped = Tokens(**{name: x.reshape((REQUESTS, -1, width) + x.shape[2:]) for name, x in vars(tokens).items()})
        state, _ = run_rounds(spec, shaped, np.full(24 // width, width))
        states.append(canonical(spec, state))
    assert rel_l2(states[0], states[1]).max() <= 1e-6


def test_N18_silu_is_the_same_on_every_path():
    """N18: every finite bf16 value through verify convolution, prompt convolution and whole sequences."""
    spec = fs_spec("gdn", "native", slots=len(FINITE) // 96 + 1, width=1, layers=1)
    x = FINITE.reshape(-1, spec.channels)
    weight = np.zeros((spec.channels, 4), np.float32)
    weight[:, 3] = 1
    ids, zeros = np.arange(len(x), dtype=np.int32), np.zeros(len(x), np.int32)

    def verify(state, x):
        state, receipt = ssm.prepare(spec, state, ssm.build_layout(spec, ids, zeros))
        return ssm.conv_forward(spec, state, receipt, 0, x, weight)[1]

    state = ssm.init_state(spec)
    prompt = lambda state, x: ssm.conv_prefill(spec, state, 0, ids, zeros + 1, x[:, None], weight)[1][:, 0]  # noqa: E731
    outputs = [quick_jit(verify)(state, x), quick_jit(prompt)(state, x), quick_jit(conv_sequence)(x[:, None], weight)[:, 0]]
    assert all(np.array_equal(bits(outputs[0]), bits(other)) for other in outputs[1:])
    want = x.astype(np.float64) * oracle.sigmoid(x)
    np.testing.assert_allclose(np.asarray(outputs[0]).astype(np.float64), want, rtol=2**-8, atol=1e-36)


# --------------------------------------------------------------------------------------------------- splits of a window


def split_program(mode, state_dtype="fp32"):
    """Six requests with the same 16 tokens, verified as 16, 8+8, 4+4+.., 3+.., 2+.., 1+..; returns final canonical states,
    windows, and convolution outputs in token order."""
    spec = fs_spec("gdn", mode, layers=1, slots=9, width=16, history=16, ssm_dtype=state_dtype)
    tokens, params = draw_tokens(spec, np.random.default_rng(3), 16), draw_params(spec)
    sizes = [16, 8, 4, 3, 2, 1]
    plans = [[min(size, 16 - start) for start in range(0, 16, size)] for size in sizes]
    slots, total = np.array([7, 3, 5, 0, 2, 6]), 8 * 16
    round_ = quick_jit(partial(one_layer_round, spec))
    state, done, y = ssm.init_state(spec), np.zeros(6, int), [[] for _ in sizes]
    for step in range(16):
        rows = [i for i in range(6) if step < len(plans[i])]
        at = np.concatenate([done[i] + np.arange(plans[i][step]) for i in rows])
        w = np.array([plans[i][step] for i in rows])
        ids = np.full(total, spec.hold, np.int32)
        ids[: len(at)] = np.repeat(slots[rows], w)
        offsets = np.zeros(total, np.int32)
        offsets[: len(at)] = np.concatenate([np.arange(n) for n in w])
        packed = tokens.at(np.resize(at, total))
        inputs = single(layer_inputs(packed, params))
        state, out = round_(state, ids, offsets, packed.x[:, 0], inputs, params.weight[0], np.resize(w, 8).astype(np.int32))
        for i, part in zip(rows, np.split(np.asarray(out)[: len(at)], np.cumsum(w)[:-1]), strict=True):
            y[i].append(part)
        done[rows] += w
    conv, state = ssm.snapshot(spec, state, jnp.asarray(slots))
    return np.asarray(state), np.asarray(conv), np.stack([np.concatenate(parts) for parts in y])


def one_layer_round(spec, state, ids, offsets, x, inputs, weight, lengths):
    state, receipt = ssm.prepare(spec, state, ssm.build_layout(spec, ids, offsets))
    state, y = ssm.conv_forward(spec, state, receipt, 0, x, weight)
    state, _ = ssm.forward(spec, state, receipt, 0, inputs)
    return ssm.accept(spec, state, ssm.StateAcceptance((receipt,), lengths)), y


@pytest.mark.parametrize(("mode", "state_dtype"), [("native", "bf16"), ("compact", "bf16"), ("replay", "fp32")])
def test_N4_any_split_of_a_window_gives_the_same_bits(mode, state_dtype):
    """N4, R6: convolution outputs, windows and states bit-equal for T = 1, 2, 3, 4, 8, 16, bf16 state rounded per token."""
    for x in split_program(mode, state_dtype):
        for other in x[1:]:
            assert np.array_equal(bits(other), bits(x[0]))
