"""The engine on a tiny random model: one text in every mode, width, batch and call size; buckets, queue, finishing, counts.

The oracle is plain greedy decoding with the teacher-forced forward over the whole sequence, which has no state at all.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ssm.engine import Generator, LoadedModel, describe
from jax_ssm.engine.buckets import RunBucket
from jax_ssm.models import ModelConfig, forward_sequence, mtp_sequence
from jax_ssm.models.qwen3_5 import map_shapes, param_shapes

CONFIG = ModelConfig(
    vocab_size=13, hidden_size=32, intermediate_size=32, layer_types=("linear_attention", "full_attention"),
    num_attention_heads=2, num_key_value_heads=1, head_dim=16, linear_num_key_heads=1, linear_num_value_heads=2,
    linear_key_head_dim=16, linear_value_head_dim=16, rotary_dim=8, mtp_num_hidden_layers=1, tie_word_embeddings=False,
    eos_token_ids=(3,), max_position_embeddings=256,
)  # fmt: skip
PROMPTS = [[1, 2, 4, 5], [7, 8, 9] * 9, [11]]  # the second one needs two chunks
NEW = 24


@functools.cache
def model() -> LoadedModel:
    rng = np.random.default_rng(1)
    params = map_shapes(lambda _, shape: jnp.asarray(rng.normal(0, 0.12, shape), jnp.float32), param_shapes(CONFIG))
    return LoadedModel(CONFIG, params, None, CONFIG.eos_token_ids, "tiny")


@functools.cache
def generator(mode: str = "native", width: int = 1, drafts: str = "auto", **settings) -> Generator:
    return Generator(model(), mode=mode, width=width, drafts=drafts, prefill_chunk=16, strict=True, **settings)


def texts(record: dict) -> list[list[int]]:
    return [r["token_ids"] for r in record["results"]]


@functools.cache
def plain_greedy() -> list[list[int]]:
    """Greedy continuation of PROMPTS by the forward over the whole sequence, one token at a time."""
    quick = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
    logits = jax.jit(lambda tokens: forward_sequence(CONFIG, model().params, tokens)[1], compiler_options=quick)
    out = []
    for prompt in PROMPTS:
        tokens = np.zeros((1, 64), np.int32)
        tokens[0, : len(prompt)] = prompt
        for n in range(len(prompt), len(prompt) + NEW):
            tokens[0, n] = int(np.asarray(logits(tokens))[0, n - 1].argmax())
        out.append(tokens[0, len(prompt) : len(prompt) + NEW].tolist())
    return out


CASES = [
    ("native", 1, "auto"), ("native", 2, "mtp"), ("native", 4, "lookup"), ("native", 8, "lookup"),
    ("compact", 2, "lookup"), ("compact", 4, "mtp"), ("replay", 1, "auto"), ("replay", 4, "mtp"), ("replay", 8, "mtp"),
]  # fmt: skip


@pytest.mark.parametrize("mode,width,drafts", CASES)
def test_greedy_and_sampled_texts_are_those_of_plain_decoding_in_every_mode_and_width(mode, width, drafts):
    g = generator(mode, width, drafts)
    greedy = g.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True)
    assert texts(greedy) == plain_greedy()
    for result in greedy["results"]:
        assert all(1 <= n <= width for n in result["accepted"])
        assert sum(result["accepted"]) == NEW - 1  # the first token comes from the prompt
    sampled = g.generate(PROMPTS, max_new_tokens=NEW, temperature=0.9, top_p=0.95, seed=3)
    assert sampled["compilations"]["total"] == 0
    assert texts(sampled) == texts(plain_sampled())
    if width > 1:
        lengths = [n for record in (greedy, sampled) for result in record["results"] for n in result["accepted"]]
        assert max(lengths) > 1 and min(lengths) < width, "no draft was ever accepted, or none rejected: proves nothing"


@functools.cache
def plain_sampled() -> dict:
    return generator().generate(PROMPTS, max_new_tokens=NEW, temperature=0.9, top_p=0.95, seed=3)


def test_interpreted_pallas_kernels_write_the_same_text():
    g = generator("replay", 2, "lookup", implementation="pallas")
    record = g.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True)
    assert record["settings"]["backends"]["main.gdn"] == "pallas"
    assert texts(record) == plain_greedy()


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["pallas", "xla"])
@pytest.mark.parametrize("mode", ["native", "compact", "replay"])
def test_gpu_text_is_that_of_plain_decoding(mode, implementation):
    g = generator(mode, 4, "mtp", implementation=implementation, act_dtype="fp32")
    record = g.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True)
    assert record["settings"]["backends"]["main.gdn"] == implementation
    assert texts(record) == plain_greedy()
    assert g.generate(PROMPTS, max_new_tokens=NEW, temperature=1.0)["compilations"]["total"] == 0


def test_sampled_text_depends_on_the_seed_and_equal_prompts_get_different_texts():
    g = generator()
    other = g.generate(PROMPTS, max_new_tokens=NEW, temperature=0.9, top_p=0.95, seed=4)
    assert texts(other) != texts(plain_sampled())
    a, b = texts(g.generate([PROMPTS[0]] * 2 + [PROMPTS[2]], max_new_tokens=NEW, temperature=1.0, ignore_eos=True))[:2]
    assert a != b


def test_rows_finish_at_different_times_and_idle_afterwards():
    """A row ends with its first end-of-text id or at its limit; the text up to there is that of an endless run."""
    for g in (generator("native", 4, "lookup"), generator("replay", 4, "mtp")):
        endless = g.generate(PROMPTS, max_new_tokens=NEW, temperature=1.5, seed=1, ignore_eos=True)
        record = g.generate(PROMPTS, max_new_tokens=NEW, temperature=1.5, seed=1)
        finishes = set()
        for cut, full in zip(texts(record), texts(endless), strict=True):
            end = full.index(3) + 1 if 3 in full else NEW
            assert cut == full[:end]
        for result in record["results"]:
            finishes.add(result["finish"])
            assert result["finish"] == ("eos" if result["token_ids"][-1] == 3 else "length")
        assert len({len(t) for t in texts(record)}) > 1 and finishes == {"eos", "length"}
        assert record["compilations"] == {**record["compilations"], "total": 0, "stray": 0}


@pytest.mark.parametrize("new", [1, 2, 3, 5])
def test_a_text_never_passes_its_limit(new):
    record = generator("native", 4, "lookup").generate(PROMPTS, max_new_tokens=new, ignore_eos=True)
    assert texts(record) == [t[:new] for t in plain_greedy()]
    assert record["compilations"]["total"] == 0


def test_rounds_per_call_does_not_change_anything_but_the_number_of_calls():
    four, one = generator("native", 4, "lookup"), generator("native", 4, "lookup", rounds_per_call=1)
    for choice in ({}, {"temperature": 1.0, "seed": 7}):
        a, b = (g.generate(PROMPTS, max_new_tokens=NEW, **choice) for g in (four, one))
        assert a["results"] == b["results"]
    assert b["timings"]["calls"] > a["timings"]["calls"]


def test_L1_more_prompts_than_rows_wait_for_a_cleared_slot():
    """Five prompts through two rows: every slot changes its owner while its neighbour decodes."""
    prompts = [*PROMPTS, [5, 5, 6, 6], [2, 12, 2]]
    queue = generator("replay", 4, "lookup", max_requests=2).generate(prompts, max_new_tokens=NEW)
    assert queue["settings"]["bucket"]["requests"] == 2
    roomy = generator("native", 4, "lookup")
    expected = texts(roomy.generate(PROMPTS, max_new_tokens=NEW)) + texts(roomy.generate(prompts[2:], max_new_tokens=NEW))[1:]
    assert texts(queue) == expected


def test_R33_B7_compile_counts_are_three_a_bucket_and_zero_afterwards():
    """allocate, prefill and rounds once per bucket; temperature, top-p, seed, lengths, counts and eos are run-time values."""
    g = Generator(model(), width=1, prefill_chunk=16, strict=True)
    first = g.generate(PROMPTS, max_new_tokens=4)["compilations"]
    assert first["total"] == 3 and first["stray"] == 0
    assert first["buckets"] == {"4 x 128": ["allocate", "prefill", "rounds"]}
    for prompts, choices in [
        (PROMPTS, {}), ([*PROMPTS, [6]], {"temperature": 0.3, "top_p": 0.5, "seed": 9}), (PROMPTS, {"ignore_eos": True}),
        ([[1] * n for n in (1, 15, 16, 17)], {"max_new_tokens": 7}), ([[4, 5], [6], [7]], {"temperature": 1.0}),
    ]:  # fmt: skip
        again = g.generate(prompts, **{"max_new_tokens": 4, **choices})["compilations"]
        assert (again["total"], again["stray"], again["executables"]) == (0, 0, [])
    single = [g.generate([prompt], max_new_tokens=NEW, ignore_eos=True) for prompt in PROMPTS]  # and a batch equals single runs
    assert [r["compilations"]["total"] for r in single] == [3, 0, 0]
    assert [texts(r)[0] for r in single] == plain_greedy()


def test_strict_raises_when_something_compiles_beside_the_buckets():
    g, calls = generator(), []

    def eager(number, tokens, finish):
        calls.append(jnp.sin(jnp.arange(17 + len(calls)) * 1.5))  # a fresh shape every time

    with pytest.raises(RuntimeError, match="compilations happened outside"):
        g.generate(PROMPTS, max_new_tokens=2, on_tokens=eager)
    assert g.generate(PROMPTS, max_new_tokens=2)["compilations"]["stray"] == 0


def test_on_tokens_delivers_every_token_once_and_the_finish_last():
    seen = {i: [] for i in range(len(PROMPTS))}
    ends = {}

    def collect(number, tokens, finish):
        assert number not in ends
        seen[number] += tokens
        if finish:
            ends[number] = finish

    record = generator("replay", 4, "mtp").generate(PROMPTS, max_new_tokens=NEW, on_tokens=collect)
    assert [seen[i] for i in range(len(PROMPTS))] == texts(record)
    assert [ends[i] for i in range(len(PROMPTS))] == [r["finish"] for r in record["results"]]


def test_S16_mtp_drafts_are_those_of_the_head_over_the_whole_sequence():
    """The first draft of a round, as accepted lengths reveal it: position i + 2 agrees with the head's entry i or not."""
    g = generator("native", 2, "mtp")
    record = g.generate(PROMPTS, max_new_tokens=NEW, temperature=1.0, seed=2, ignore_eos=True)
    assert record["timings"]["mean_accepted"] > 1
    for prompt, result in zip(PROMPTS, record["results"], strict=True):
        sequence = prompt + result["token_ids"]
        guess = np.asarray(head_over(model().params, np.array(sequence + [0] * (64 - len(sequence)), np.int32)))
        n = len(prompt) + 1  # tokens known when the first round begins
        for accepted in result["accepted"]:
            if n + 1 < len(sequence):  # the limit did not cut the round
                assert (accepted == 2) == (guess[n - 2] == sequence[n])
            n += accepted


@jax.jit
def head_over(params, tokens):
    """The MTP head's guess of token i + 2 at every i, from the forward over the whole sequence."""
    hidden, _ = forward_sequence(CONFIG, params, tokens[None, :-1])
    return jnp.argmax(mtp_sequence(CONFIG, params, hidden, tokens[None, 1:])[1][0], axis=-1)


ILLEGAL = [
    ({"mode": "paged"}, "mode='paged'"),
    ({"mode": "compact", "width": 1}, "width=1"),
    ({"width": 17}, "width=17"),
    ({"width": 0}, "width=0"),
    ({"mode": "replay", "width": 8, "history": 4}, "history=4"),
    ({"mode": "replay", "history": 12}, "history=12"),
    ({"projection": "matmul"}, "projection='matmul'"),
    ({"projection": "precompute"}, "projection='precompute'"),
    ({"drafts": "oracle"}, "drafts='oracle'"),
    ({"drafts": "mtp", "width": 1}, "width=1"),
    ({"act_dtype": "fp16"}, "act_dtype='fp16'"),
    ({"ssm_dtype": "fp8"}, "ssm_dtype='fp8'"),
    ({"implementation": "cuda"}, "implementation='cuda'"),
    ({"implementation": "triton"}, "implementation='triton' cannot run"),
    ({"rounds_per_call": 0}, "rounds_per_call=0"),
    ({"max_len": 512}, "max_len=512"),
]


@pytest.mark.parametrize("settings,match", ILLEGAL, ids=[m for _, m in ILLEGAL])
def test_U1_R37_illegal_settings_are_named_before_anything_is_allocated(settings, match):
    with pytest.raises((ValueError, RuntimeError), match=match):
        Generator(model(), **settings)


REQUESTS = [
    ({"prompts": []}, r"prompts=\[\]"),
    ({"prompts": [[1], []]}, r"prompts\[1\] is empty"),
    ({"prompts": [[13]]}, r"prompts\[0\] has token ids \[13\]"),
    ({"prompts": [[1] * 250]}, r"prompts\[0\] has 250 tokens .* max_len=256"),
    ({"prompts": ["text"]}, "no tokenizer.json"),
    ({"max_new_tokens": 0}, "max_new_tokens=0"),
    ({"temperature": -1.0}, "temperature=-1.0"),
    ({"temperature": float("nan")}, "temperature=nan"),
    ({"top_p": 0.0}, "top_p=0.0"),
    ({"top_p": 1.5}, "top_p=1.5"),
    ({"seed": -1}, "seed=-1"),
    ({"seed": 2**32}, "seed=4294967296"),
]


@pytest.mark.parametrize("request_,match", REQUESTS, ids=[m for _, m in REQUESTS])
def test_U1_illegal_requests_are_named_and_the_engine_works_on(request_, match):
    g = generator()
    with pytest.raises(ValueError, match=match):
        g.generate(**{"prompts": PROMPTS, **request_})


def test_U4_drafts_without_an_mtp_head_fall_to_lookup_and_say_so():
    bare = replace(model(), config=replace(CONFIG, mtp_num_hidden_layers=0))
    with pytest.raises(ValueError, match="drafts='mtp'.*no MTP weights"):
        Generator(bare, drafts="mtp")
    chosen = lambda *args, **settings: (Generator(*args, **settings).plan.drafts, Generator(*args, **settings).plan.width)  # noqa: E731
    assert Generator(bare, width=4).plan.drafts_reason == "the checkpoint has no MTP weights"
    assert [chosen(bare, width=4), chosen(bare), chosen(bare, mode="compact")] == [("lookup", 4), ("none", 1), ("lookup", 2)]
    assert [chosen(model()), chosen(model(), width=1)] == [("mtp", 4), ("none", 1)]


def test_R10_the_faster_projection_is_taken_where_kernels_run_and_never_by_batch():
    """Kernels project long windows by precompute unless told otherwise; XLA stays with inline."""
    taken = lambda **s: Generator(model(), mode="replay", **s).plan.specs(RunBucket(1, 128)).ssm.projection  # noqa: E731
    assert [taken(), taken(implementation="pallas", width=1), taken(implementation="pallas")] == ["inline"] * 2 + ["precompute"]
    assert [taken(projection="precompute"), taken(implementation="pallas", projection="inline")] == ["precompute", "inline"]
    assert "projection precompute" in describe(Generator(model(), mode="replay", implementation="pallas").plan)["state"]
