"""Sampling on the device: the distribution after temperature and top-p, lossless verification, prompt look-up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ssm.engine import sampling
from jax_ssm.engine.drafts import LONGEST, lookup

choose = jax.jit(sampling.choose)

V = 4
CHAIN = np.array([[0.1, 0.2, 0.3, 0.4], [0.55, 0.05, 0.2, 0.2], [0.02, 0.9, 0.04, 0.04], [0.25, 0.25, 0.25, 0.25]])


def nucleus(p: np.ndarray, top_p: float) -> np.ndarray:
    """The distribution after top-p, written down directly: take the most probable tokens until their sum reaches it."""
    order, kept, total = np.argsort(-p, kind="stable"), np.zeros_like(p), 0.0
    for i in order:
        kept[i] = p[i]
        total += p[i]
        if total >= top_p:
            break
    return kept / kept.sum()


def too_far(counts: np.ndarray, expected: np.ndarray) -> bool:
    """Chi-square statistic more than six standard deviations above its mean, or an event of probability 0."""
    assert counts.sum() > 0
    possible = expected > 0
    if counts[~possible].any():
        return True
    e = expected[possible] * counts.sum()
    chi2, freedom = ((counts[possible] - e) ** 2 / e).sum(), possible.sum() - 1
    return chi2 > freedom + 6 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature,top_p", [(1.0, 1.0), (0.5, 1.0), (2.0, 1.0), (1.0, 0.75), (0.7, 0.9), (1.0, 1e-6)])
def test_choose_draws_from_the_distribution_after_temperature_and_top_p(temperature, top_p):
    n = 20000
    p = np.array([0.4, 0.3, 0.2, 0.1])
    logits = jnp.broadcast_to(jnp.log(p), (n, V)) + 7.0
    request, position = jnp.arange(n, dtype=jnp.int32), jnp.full(n, 5, jnp.int32)
    y = choose(logits, jnp.float32(temperature), jnp.float32(top_p), jnp.uint32(11), request, position)
    scaled = p ** (1 / temperature)
    expected = nucleus(scaled / scaled.sum(), top_p)
    assert not too_far(np.bincount(np.asarray(y), minlength=V), expected)


def test_choose_at_temperature_0_is_argmax_and_top_p_keeps_equal_maxima():
    logits = jnp.array([[0.0, 3.0, 3.0, 1.0], [5.0, 4.0, 3.0, 2.0]])
    args = jnp.uint32(0), jnp.arange(2, dtype=jnp.int32), jnp.zeros(2, jnp.int32)
    assert choose(logits, jnp.float32(0), jnp.float32(1), *args).tolist() == [1, 0]
    kept = np.isfinite(sampling.filter_logits(logits, jnp.float32(1), jnp.float32(1e-6)))
    assert kept.tolist() == [[False, True, True, False], [True, False, False, False]]


def test_noise_belongs_to_seed_request_and_position():
    logits = jnp.zeros((64, 50))
    draw = lambda seed, request, position: np.asarray(  # noqa: E731
        choose(
            logits, jnp.float32(1), jnp.float32(1), jnp.uint32(seed),
            jnp.full(64, request, jnp.int32), jnp.arange(64, dtype=jnp.int32) + position,
        )
    )  # fmt: skip
    base = draw(1, 2, 0)
    assert np.array_equal(base[1:], draw(1, 2, 1)[:-1])
    for other in (draw(2, 2, 0), draw(1, 3, 0)):
        assert (base != other).mean() > 0.8


def speculative_text(verify, rows: int, width: int, steps: int, seed: int = 3) -> np.ndarray:
    """Texts [rows, steps] of a Markov chain, decoded in verify windows with a fixed draft rule: next = (last + 1) mod V."""
    tokens = np.zeros((rows, steps + 1 + width), np.int64)
    length = np.ones(rows, np.int64)
    table, request = jnp.log(jnp.asarray(CHAIN, jnp.float32)), jnp.arange(rows, dtype=jnp.int32)
    while length.min() <= steps:
        base = tokens[np.arange(rows), length - 1]
        window = (base[:, None] + np.arange(width)) % V
        position = length[:, None] + np.arange(width)
        chosen, n = verify(table[window], jnp.asarray(window[:, 1:]), request, jnp.asarray(position, jnp.int32), seed)
        chosen, n = np.asarray(chosen), np.asarray(n)
        for i in range(width):
            use = (i < n) & (length + i <= steps)
            tokens[use, (length + i)[use]] = chosen[use, i]
        length = np.minimum(length + n, steps + 1)
    return tokens[:, 1 : steps + 1]


@jax.jit
def our_verify(logits, drafts, request, position, seed):
    request = jnp.broadcast_to(request[:, None], position.shape)
    chosen = sampling.choose(logits, jnp.float32(1), jnp.float32(1), jnp.uint32(seed), request, position)
    return chosen, sampling.accepted_length(chosen, drafts)


@jax.jit
def resamples_from_p(logits, drafts, request, position, seed):
    """Planted fault: the correction of a rejected draft is drawn from p again, the rejected token included."""
    chosen, n = our_verify(logits, drafts, request, position, seed)
    again, _ = our_verify(logits, drafts, request, position, seed + 1)
    at = jnp.arange(chosen.shape[1])
    rejected = (at == n[:, None] - 1) & (n[:, None] < chosen.shape[1])
    return jnp.where(rejected, again, chosen), n


@jax.jit
def trusts_the_draft(logits, drafts, request, position, seed):
    """Planted fault: the first draft is always accepted."""
    chosen, _ = our_verify(logits, drafts, request, position, seed)
    chosen = chosen.at[:, 0].set(drafts[:, 0])
    return chosen, sampling.accepted_length(chosen, drafts)


def joint(texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts of every text of three tokens, and its probability under the chain (from token 0)."""
    a, b, c = texts.T
    counts = np.bincount((a * V + b) * V + c, minlength=V**3)
    return counts, np.einsum("a,ab,bc->abc", CHAIN[0], CHAIN, CHAIN).reshape(-1)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_speculative_sampling_is_lossless_in_the_joint_distribution(width):
    texts = speculative_text(our_verify, 12000, width, 3)
    assert not too_far(*joint(texts))
    assert np.array_equal(texts, speculative_text(our_verify, 12000, 1, 3)), "drafts changed the sample"


@pytest.mark.parametrize("fault", [resamples_from_p, trusts_the_draft])
def test_planted_verification_fault_is_seen_by_the_statistics(fault):
    assert too_far(*joint(speculative_text(fault, 12000, 3, 3)))


def test_S1_accepted_length_counts_the_base_token_and_stops_at_the_first_disagreement():
    chosen = jnp.array([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [9, 2, 3, 4]])
    drafts = jnp.array([[1, 2, 3], [1, 0, 3], [1, 2, 0], [1, 2, 3]])
    assert sampling.accepted_length(chosen, drafts).tolist() == [4, 2, 3, 1]
    assert sampling.accepted_length(chosen[:, :1], drafts[:, :0]).tolist() == [1, 1, 1, 1]


def plain_lookup(tokens: list[int], count: int) -> list[int]:
    """Prompt look-up written as loops."""
    n = len(tokens)
    best, found = 0, None
    for j in range(n - 1):
        run = 0
        while run < LONGEST and j - run >= 0 and tokens[j - run] == tokens[n - 1 - run]:
            run += 1
        if run and run >= best:
            best, found = run, j
    if found is None:
        return [tokens[-1]] * count
    copy = tokens[found + 1 :]
    return [copy[i % len(copy)] for i in range(count)]


def test_lookup_copies_after_the_longest_most_recent_match_and_ignores_what_lies_beyond():
    rng, m = np.random.default_rng(0), 24
    cases = [rng.integers(0, 3, rng.integers(1, m + 1)).tolist() for _ in range(200)]
    cases += [[1, 2, 3, 4, 1, 2, 3], [5, 5, 5], [1], [1, 2, 3], [4, 2, 3, 9, 5, 2, 3, 8, 4, 2, 3]]
    tokens = rng.integers(0, 3, (len(cases), m)).astype(np.int32)  # what lies beyond the length would match
    for row, case in enumerate(cases):
        tokens[row, : len(case)] = case
    length = np.array([len(c) for c in cases], np.int32)
    got = np.asarray(jax.jit(lookup, static_argnums=2)(tokens, length, 5))
    assert got.tolist() == [plain_lookup(c, 5) for c in cases]
