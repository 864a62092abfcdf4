"""Train the embedded demo model: Qwen3.5's architecture at five million parameters, on Python's standard library.

The model learns the next token and, through its MTP head, the tokens after it. See docs/demo-model.md.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from demo_corpus import END, encode, held_out, stdlib_files, train_tokenizer  # noqa: E402
from demo_mtp import accepted_length, continue_text, joint_loss, measure  # noqa: E402

from jax_ssm.models import ModelConfig, init_params, save_params  # noqa: E402
from jax_ssm.models.qwen3_5 import FLOAT32_PARAMS  # noqa: E402

DRAFTS = 7  # the MTP head is unrolled this far, for verify widths up to 8


@dataclass(frozen=True)
class Recipe:
    """A model and how it is trained. files: limit on the number of source files, None for all."""

    model: ModelConfig
    sequence: int
    batch: int
    files: int | None = None
    learning_rate: float = 3e-3
    weight_decay: float = 0.3  # the text is read a dozen times: strong decay against memorising it
    mtp_weight: float = 0.4
    mtp_stride: int = 4  # drafts after the first are trained from every fourth position
    warmup: float = 0.02  # share of the run
    eval_windows: int = 64  # for the continuations that the accepted length is measured on


RECIPES = {
    "demo": Recipe(
        ModelConfig(
            vocab_size=2560, hidden_size=256, intermediate_size=320,
            layer_types=("linear_attention", "linear_attention", "linear_attention", "full_attention") * 2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=64, rotary_dim=32,
            linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
            tie_word_embeddings=True, mtp_num_hidden_layers=1, max_position_embeddings=4096,
            bos_token_id=0, eos_token_ids=(0,),
        ),
        sequence=512, batch=64,
    ),
    "tiny": Recipe(
        ModelConfig(
            vocab_size=512, hidden_size=64, intermediate_size=96,
            layer_types=("linear_attention",) * 3 + ("full_attention",),
            num_attention_heads=2, num_key_value_heads=1, head_dim=32, rotary_dim=16,
            linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=32, linear_value_head_dim=32,
            tie_word_embeddings=True, mtp_num_hidden_layers=1, max_position_embeddings=1024,
            bos_token_id=0, eos_token_ids=(0,),
        ),
        sequence=64, batch=4, files=80, eval_windows=2,
    ),
}  # fmt: skip


def cast(params, dtype):
    """Weights in `dtype`; the gate parameters stay fp32."""
    keep = lambda path: path[-1].key in FLOAT32_PARAMS  # noqa: E731
    return jax.tree_util.tree_map_with_path(lambda path, x: x if keep(path) else x.astype(dtype), params)


def make_optimizer(recipe: Recipe):
    """AdamW with clipping; decay on matrices only. The learning rate is set per step by `train_step`."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.95),
        optax.add_decayed_weights(recipe.weight_decay, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    )


def learning_rate(recipe: Recipe, progress: float) -> float:
    """Linear warm-up, then a cosine to zero; progress is the share of the run that is over, 0..1."""
    if progress < recipe.warmup:
        return recipe.learning_rate * (progress + 1e-3) / recipe.warmup
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * min((progress - recipe.warmup) / (1 - recipe.warmup), 1)))


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def train_step(recipe: Recipe, params, opt_state, corpus, key, rate):
    """One step on random windows of the corpus [tokens] uint16. Masters are fp32, the model computes in bf16.

    params and opt_state are donated. Returns (params, opt_state, losses).
    """
    starts = jax.random.randint(key, (recipe.batch, 1), 0, corpus.shape[0] - recipe.sequence - 1)
    tokens = corpus[starts + jnp.arange(recipe.sequence + 1)].astype(jnp.int32)

    def loss(params):
        half = cast(params, jnp.bfloat16)
        return joint_loss(recipe.model, half, tokens, DRAFTS, recipe.mtp_stride, recipe.mtp_weight)

    (_, parts), grads = jax.value_and_grad(loss, has_aux=True)(params)
    updates, opt_state = make_optimizer(recipe).update(grads, opt_state, params)
    parts["grad_norm"] = optax.global_norm(grads)
    return jax.tree.map(lambda p, u: p - rate * u, params, updates), opt_state, parts


def windows(tokens: np.ndarray, length: int) -> np.ndarray:
    """Cut [tokens] into consecutive windows [n, length], dropping the rest."""
    count = len(tokens) // length
    return tokens[: count * length].reshape(count, length).astype(np.int32)


def evaluate(recipe: Recipe, params, text: np.ndarray) -> dict:
    """Held-out loss and draft accuracy of the weights as they are shipped (bf16); text [tokens]."""
    params, parts = cast(params, jnp.bfloat16), []
    rows = windows(text, recipe.sequence + 1)
    for i in range(0, len(rows) - recipe.batch + 1, recipe.batch):
        parts.append(jax.device_get(measure(recipe.model, params, rows[i : i + recipe.batch], DRAFTS)))
    loss, hit, drafts = (np.concatenate(x) for x in zip(*parts, strict=True))
    survival = np.cumprod(drafts, axis=-1).mean((0, 1))
    return {
        "loss": round(float(loss.mean()), 4),
        "accuracy": round(float(hit.mean()), 4),
        "draft_accuracy": [round(float(x), 4) for x in drafts.mean((0, 1))],
        "all_drafts_up_to": [round(float(x), 4) for x in survival],
        "expected_length_on_text": {w: round(1 + float(survival[: w - 1].sum()), 3) for w in (2, 4, 8)},
    }


def measure_acceptance(recipe: Recipe, params, text: np.ndarray, temperature: float) -> tuple[dict, np.ndarray]:
    """Mean accepted length by W on continuations of held-out text, and the continuations [B, N]."""
    params, prompt = cast(params, jnp.bfloat16), recipe.sequence // 4
    rows = windows(text, recipe.sequence)
    rows = rows[np.linspace(0, len(rows) - 1, recipe.eval_windows).astype(int)]
    tokens = continue_text(
        recipe.model, params, rows[:, :prompt], recipe.sequence * 3 // 4, temperature, jax.random.key(int(1000 * temperature))
    )
    _, _, hits = jax.device_get(measure(recipe.model, params, tokens, DRAFTS))
    return {w: round(accepted_length(hits, w, start=prompt), 3) for w in (2, 4, 8)}, np.asarray(tokens)


def save(out: Path, recipe: Recipe, params, tokenizer, record: dict) -> None:
    """The whole model directory: weights in bf16, config, tokenizer, generation defaults, and how it was made."""
    save_params(out, recipe.model, cast(params, jnp.bfloat16))
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    named = {"bos_token": END, "eos_token": END, "pad_token": END}
    write = lambda name, value: (out / name).write_text(json.dumps(value, indent=1) + "\n")  # noqa: E731
    write("generation_config.json", ids)
    write("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **named})
    write("training.json", {key: value for key, value in record.items() if key != "log"})


def train(recipe: Recipe, minutes: float, out: Path, stdlib: Path | None, log_every: int, seed: int) -> dict:
    """Everything from source files to a saved, measured model; returns the record. Weights are saved even on failure."""
    began = time.perf_counter()
    elapsed = lambda: time.perf_counter() - began  # noqa: E731
    say = lambda *words: print(f"[{elapsed():6.1f} s]", *words, flush=True)  # noqa: E731
    out.mkdir(parents=True, exist_ok=True)

    files = stdlib_files(stdlib)
    files = dict(list(files.items())[:: max(1, len(files) // recipe.files)]) if recipe.files else files
    texts = [text for name, text in files.items() if not held_out(name)]
    kept_away = [text for name, text in files.items() if held_out(name)] or texts[:2]
    tokenizer = train_tokenizer(texts, recipe.model.vocab_size)
    corpus, unseen = encode(tokenizer, texts, seed), encode(tokenizer, kept_away, seed)
    characters = sum(map(len, texts))
    say(f"{len(texts)} files, {characters} characters, {len(corpus)} tokens ({characters / len(corpus):.2f} per token)")

    params = jax.jit(init_params, static_argnums=0)(recipe.model, jax.random.key(seed))
    size = sum(x.size for x in jax.tree.leaves(params))
    mtp_size = sum(x.size for x in jax.tree.leaves(params["mtp"]))
    opt_state, corpus_on_device = make_optimizer(recipe).init(params), jnp.asarray(corpus)
    device = jax.devices()[0]
    say(f"{size} parameters, {mtp_size} of them in the MTP head, on {device.device_kind}")
    record = {
        "parameters": size, "mtp_parameters": mtp_size, "device": device.device_kind, "seed": seed, "minutes": minutes,
        "python": platform.python_version(), "jax": jax.__version__, "optax": optax.__version__,
        "corpus": {"files": len(texts), "characters": characters, "tokens": len(corpus), "held_out_files": len(kept_away),
                   "held_out_tokens": len(unseen), "held_out_characters_per_token": sum(map(len, kept_away)) / len(unseen)},
        "recipe": {k: v for k, v in vars(recipe).items() if k != "model"} | {"drafts": DRAFTS},
        "log": [],
    }  # fmt: skip

    budget, key, step, losses = 60 * minutes, jax.random.key(seed + 1), 0, None
    next_eval, first_done = math.inf, None
    try:
        while (now := elapsed()) < budget or step == 0:
            start = first_done[0] if first_done else now  # the schedule starts after compilation
            rate = learning_rate(recipe, (now - start) / max(budget - start, 1e-9))
            previous = losses
            params, opt_state, losses = train_step(
                recipe, params, opt_state, corpus_on_device, jax.random.fold_in(key, step), rate
            )
            step += 1
            if previous is not None:
                jax.block_until_ready(previous)  # keeps one step in flight, so that the clock is the device's
                if first_done is None:
                    first_done = elapsed(), step
                    next_eval = first_done[0] + (budget - first_done[0]) / 3
            if step % log_every == 0 or step in (2, 10, 25):
                row = {"step": step, "seconds": round(elapsed(), 1), "rate": round(rate, 6)}
                row |= {name: round(float(x), 4) for name, x in losses.items()}
                speed = (step - first_done[1]) / max(elapsed() - first_done[0], 1e-9)
                row["tokens_per_second"] = round(speed * recipe.batch * recipe.sequence)
                record["log"].append(row)
                say(json.dumps(row))
                if not math.isfinite(row["next"]):
                    raise FloatingPointError(f"the loss is {row['next']} at step {step}")
            if elapsed() > next_eval:
                next_eval += (budget - first_done[0]) / 3
                record["log"].append({"step": step, "held_out": evaluate(recipe, params, unseen)})
                say(json.dumps(record["log"][-1]))
                save(out, recipe, params, tokenizer, record)
    finally:
        seen = step * recipe.batch * recipe.sequence
        record |= {"steps": step, "training_seconds": round(elapsed(), 1), "tokens_seen": seen}
        record["epochs"] = round(seen / len(corpus), 2)
        save(out, recipe, params, tokenizer, record)
        say("saved")

    record["held_out"] = evaluate(recipe, params, unseen)
    say(json.dumps(record["held_out"]))
    record["accepted_length"] = {}
    for name, temperature in (("greedy", 0.0), ("temperature_0.7", 0.7), ("temperature_1", 1.0)):
        record["accepted_length"][name], tokens = measure_acceptance(recipe, params, unseen, temperature)
        say(name, record["accepted_length"][name], "\n" + tokenizer.decode(tokens[0].tolist()))
    save(out, recipe, params, tokenizer, record)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Smoke test on a CPU:  python tools/train_demo.py --config tiny --minutes 0.2 --out build/tiny\n"
        "The shipped model:    python tools/train_demo.py --minutes 5.1 --out build/demo   (one H200)",
    )
    add = parser.add_argument
    add("--config", choices=RECIPES, default="demo", help="the shipped model, or a tiny one for a smoke test (default: demo)")
    add("--minutes", type=float, default=5.1, help="wall time from start to the last training step, compilation included; "
        "the learning rate reaches zero there. A final evaluation of about half a minute follows (default: 5.1)")  # fmt: skip
    add("--out", type=Path, required=True, help="model directory to write; saved on the way and at the end")
    add("--stdlib", type=Path, help="directory of the Python library sources to learn from (default: this interpreter's)")
    add("--log", type=Path, help="write the full record with the loss curve to this JSON file")
    add("--log-every", type=int, default=100, metavar="N", help="steps between log lines (default: 100)")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    record = train(RECIPES[args.config], args.minutes, args.out, args.stdlib, args.log_every, args.seed)
    if args.log:
        args.log.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
