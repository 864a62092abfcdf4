"""The oracle itself, against scalar loops and against facts that need no oracle."""

import numpy as np
import oracle
from fixtures import draw_params, draw_tokens, fs_spec


def scalar_step(s, q, k, v, alpha, beta):
    """The formula of one head written out element by element; s is a list of K rows of V numbers."""
    rows, cols = len(s), len(s[0])
    s = [[alpha[i if len(alpha) > 1 else 0] * s[i][j] for j in range(cols)] for i in range(rows)]
    u = [beta * (v[j] - sum(s[i][j] * k[i] for i in range(rows))) for j in range(cols)]
    s = [[s[i][j] + k[i] * u[j] for j in range(cols)] for i in range(rows)]
    return s, [sum(s[i][j] * q[i] for i in range(rows)) for j in range(cols)]


def test_step_is_the_formula_literally_N16():
    """N16: decay first, then the correction; the other order is off by far more than any tolerance under a hard gate."""
    rng = np.random.default_rng(0)
    for gates in (1, 5):
        s, wrong = np.zeros((5, 3)), np.zeros((5, 3))
        plain = s.tolist()
        for _ in range(4):
            q, k, v = rng.standard_normal(5), oracle.l2norm(rng.standard_normal(5)), rng.standard_normal(3)
            alpha, beta = rng.uniform(0.05, 0.3, gates), rng.uniform()
            u = beta * (v - wrong.T @ k)
            wrong = alpha[:, None] * wrong + np.outer(k, u)
            s, o = oracle.step(s, q, k, v, alpha, np.asarray(beta))
            plain, want = scalar_step(plain, q.tolist(), k.tolist(), v.tolist(), alpha.tolist(), beta)
            np.testing.assert_allclose(s, plain, rtol=1e-13)
            np.testing.assert_allclose(o, want, rtol=1e-12)
        assert oracle.rel_l2(wrong, s) > 1e-2


def test_delta_rule_overwrites_a_key():
    """beta = 1, no decay: reading a stored key gives its last value exactly, orthogonal keys do not disturb it."""
    keys, values = np.eye(4), np.arange(12.0).reshape(4, 3)
    s = np.zeros((4, 3))
    for k, v in [*zip(keys, values, strict=True), (keys[1], -values[1])]:
        s, o = oracle.step(s, k, k, v, np.ones(1), np.ones(()))
        np.testing.assert_allclose(o, v, atol=1e-12)
    np.testing.assert_allclose(s[1], -values[1], atol=1e-12)
    np.testing.assert_allclose(s[2], values[2], atol=1e-12)


def test_gates_at_known_points():
    """softplus(0) = log 2, sigmoid(0) = 1/2; the bounded gate runs from 1 to exp(lower_bound)."""
    gdn = fs_spec("gdn")
    zero = oracle.decay(gdn, np.zeros(4), np.zeros(4), np.zeros(4))
    np.testing.assert_allclose(zero, 0.5)
    bounded = fs_spec("kda", lower_bound=-5.0)
    low, mid, high = (oracle.decay(bounded, np.full(32, x), np.zeros(2), np.zeros(32)) for x in (-99.0, 0.0, 99.0))
    np.testing.assert_allclose(low, 1.0)
    np.testing.assert_allclose(mid, np.exp(-2.5))
    np.testing.assert_allclose(high, np.exp(-5.0))


def test_rounding_is_to_nearest_even():
    one = 1 + 2.0**-8
    assert oracle.rounded([one, 1 + 3 * 2.0**-8, one + 1e-6], "bf16").tolist() == [1.0, 1 + 2.0**-6, 1 + 2.0**-7]
    assert oracle.rounded([one], "fp32").tolist() == [one]


def test_requests_equal_one_token_at_a_time():
    """Batched acceptance of uneven prefixes equals the plain loop over each request's own token list."""
    spec = fs_spec("kda", layers=1)
    rng, params = np.random.default_rng(1), draw_params(spec)
    batch = oracle.Requests(spec, params, 3)
    lists = [[], [], []]
    for lengths in ([2, 0, 3], [1, 3, 2], [0, 1, 3]):
        tokens = draw_tokens(spec, rng, 3, 3)
        o, _ = batch.accept([0, 1, 2], tokens, lengths)
        for i, n in enumerate(lengths):
            lists[i] += [tokens.at((i, t)) for t in range(n)]
            assert np.isfinite(o[i, :n]).all() and np.isnan(o[i, n:]).all()
    for i, tokens in enumerate(lists):
        s, window = np.zeros(batch.s.shape[1:]), np.zeros(batch.window.shape[1:])
        for token in tokens:
            s, o = oracle.step(s, *oracle.core(spec, params, token))
            window = np.concatenate([window[..., 1:], token.x.astype(float)[..., None]], axis=-1)
        np.testing.assert_array_equal(batch.s[i], s)
        np.testing.assert_array_equal(batch.window[i], window)
        assert batch.lengths[i] == len(tokens)


def test_heads_are_grouped_in_runs():
    x = np.arange(2)[:, None] * np.ones((2, 3))
    assert oracle.expand(x, 6)[:, 0].tolist() == [0, 0, 0, 1, 1, 1]


def test_relative_error_counts_nan_and_zero_references():
    assert oracle.rel_l2(np.full((1, 1), np.nan), np.ones((1, 1))) == np.inf
    assert oracle.rel_l2(np.full((1, 1), 2.0), np.zeros((1, 1))) == 2.0
