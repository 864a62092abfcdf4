"""The demo trainer: drafts are made as a decode round makes them, and the accepted length counts what a round commits."""

import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("optax")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

from demo_corpus import END, encode, held_out, stdlib_files, train_tokenizer  # noqa: E402
from demo_mtp import accepted_length, draft_logits  # noqa: E402
from train_demo import RECIPES, learning_rate  # noqa: E402

from jax_ssm.models import init_params, mtp_sequence  # noqa: E402


def test_unrolled_drafts_equal_drafting_one_base_at_a_time():
    """Oracle: for one base, splice the head's own hidden states behind the committed ones and run the plain head."""
    config, steps, n = replace(RECIPES["tiny"].model, vocab_size=64), 4, 9
    shapes = jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: 0.2 * rng.standard_normal(x.shape, np.float32), shapes)  # large: attention is uneven
    params["embed_tokens"] = jax.numpy.asarray(params["embed_tokens"])
    hidden = jax.random.normal(jax.random.key(1), (1, n, config.hidden_size))
    tokens = jax.random.randint(jax.random.key(2), (1, n), 0, config.vocab_size)
    first, later = jax.jit(draft_logits, static_argnums=(0, 4, 5))(config, params, hidden, tokens, steps, 2)
    head = jax.jit(mtp_sequence, static_argnums=0)
    for m, base in enumerate(range(0, n - steps, 2)):
        spliced = hidden[:, : n - 1]  # entries behind `base` are replaced one by one; the head is causal
        for s in range(steps):
            out, logits = head(config, params, spliced, tokens[:, 1:])
            got = first[0, base] if s == 0 else later[s - 1, 0, m]
            np.testing.assert_allclose(got, logits[0, base + s], rtol=2e-4, atol=2e-4, err_msg=f"base {base} draft {s + 1}")
            spliced = spliced.at[:, base + s + 1].set(out[:, base + s])


def test_accepted_length_walks_round_by_round():
    hits = np.zeros((1, 6, 3), bool)
    hits[0, 0] = [1, 1, 0]  # commits 3, next base 3
    hits[0, 3] = [0, 1, 1]  # a wrong first draft ends the round: commits 1, next base 4
    hits[0, 4] = [1, 1, 1]  # commits 4
    assert accepted_length(hits, 4) == pytest.approx((3 + 1 + 4) / 3)
    assert accepted_length(hits, 2) == pytest.approx((2 + 1 + 1 + 2) / 4)  # rounds at bases 0, 2, 3, 4
    assert accepted_length(hits, 1) == 1.0


def test_tokenizer_is_lossless_and_ends_every_document():
    texts = ["def f(x):\n    return 'ä€'\n\n", "class A:\n\tpass\n" * 20]
    tokenizer = train_tokenizer(texts, 300)
    tokens = encode(tokenizer, texts)
    assert tokenizer.token_to_id(END) == 0 and (tokens == 0).sum() == 2 and tokens[-1] == 0
    assert sorted(tokenizer.decode(tokens.tolist(), skip_special_tokens=False).split(END)) == sorted(["", *texts])


def test_stdlib_corpus_is_found_and_split_by_path(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n" * 50)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "b.py").write_text("x = 1\n" * 50)
    assert list(stdlib_files(tmp_path)) == ["a.py"]
    assert 10 < sum(held_out(f"pkg/m{i}.py") for i in range(1000)) < 50
    with pytest.raises(ValueError, match="stdlib="):
        stdlib_files(tmp_path / "site-packages" / "none")


def test_learning_rate_warms_up_and_ends_at_zero():
    recipe = RECIPES["demo"]
    rates = [learning_rate(recipe, p) for p in (0.0, 0.01, recipe.warmup, 0.5, 1.0)]
    assert rates[0] < rates[1] < rates[2] == pytest.approx(recipe.learning_rate) and rates[3] < rates[2] and rates[4] < 1e-9
