"""The MTP head unrolled over several drafts with known tokens: the training loss and the accepted length it predicts.

A decode round drafts like this: entries of the MTP layer's KV for committed tokens come from the model's hidden states;
draft s > 1 is made from the head's own hidden state of draft s - 1 and the token drafted there, one position further,
and sees the committed entries and the entries of this round's earlier drafts. Training here attends in exactly that way
from every base position at once, with the true tokens in place of drafted ones (as EAGLE-3 does, arXiv:2503.01840).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_ssm.models.config import ModelConfig
from jax_ssm.models.qwen3_5 import (
    Params,
    feed_forward,
    full_output,
    full_projections,
    layer_sequence,
    logits_of,
    mtp_input,
    mtp_sequence,
    rms_norm,
)

Array = jax.Array


def forward_scanned(config: ModelConfig, params: Params, tokens: Array) -> tuple[Array, Array]:
    """`forward_sequence` with the equal layers under `lax.scan`, so that each kind is compiled once and not once a layer.

    The layers must repeat one pattern of linear layers closed by a full one. tokens [B, N] -> hidden, logits.
    """
    every, layers = config.kinds.index("full") + 1, params["layers"]
    if config.kinds != (("gdn",) * (every - 1) + ("full",)) * (len(layers) // every):
        raise ValueError(f"layer_types={config.layer_types!r} is not allowed: the same run of linear layers before each full")
    stack = lambda trees: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)  # noqa: E731
    starts = range(0, len(layers), every)
    blocks = stack([(stack(layers[i : i + every - 1]), layers[i + every - 1]) for i in starts])

    def block(x, weights):
        linear_layers, full_layer = weights
        x, _ = jax.lax.scan(lambda x, p: (layer_sequence(config, p, "gdn", x), None), x, linear_layers)
        return layer_sequence(config, full_layer, "full", x), None

    x, _ = jax.lax.scan(block, params["embed_tokens"][tokens], blocks)
    hidden = rms_norm(x, params["norm"], config.rms_norm_eps)
    return hidden, logits_of(params, hidden)


def draft_logits(
    config: ModelConfig, params: Params, hidden: Array, tokens: Array, steps: int, stride: int = 1
) -> tuple[Array, Array]:
    """Logits of drafts 1 .. `steps`; draft s of base i predicts token i + 1 + s. Differentiable.

    hidden [B, N, D] after the model's final norm, tokens [B, N]. Returns draft 1 from all bases [B, N - 1, vocab] and
    the later drafts from every stride-th base [steps - 1, B, M, vocab], bases 0, stride, .. < N - steps; all fp32.
    """
    layer, eps = params["mtp"]["layers"][0], config.rms_norm_eps
    n = tokens.shape[1]
    first, logits = mtp_sequence(config, params, hidden[:, :-1], tokens[:, 1:])
    bases = jnp.arange(0, n - steps, stride)

    def project(hidden, next_tokens, positions):
        x = mtp_input(config, params, hidden, next_tokens)
        y = rms_norm(x, layer["input_layernorm"], eps)
        return x, *full_projections(config, layer["self_attn"], y, jnp.broadcast_to(positions, x.shape[:2]))

    _, _, keys, values, _ = project(hidden[:, :-1], tokens[:, 1:], jnp.arange(n - 1))
    committed = bases[:, None] >= jnp.arange(n - 1)

    def draft(carry, s):  # s = 1 .. steps - 1 drafts lie before this one
        hidden, own_keys, own_values = carry
        x, q, k, v, gate = project(hidden, jnp.take(tokens, bases + 1 + s, axis=1), bases + s)
        own_keys, own_values = own_keys.at[s - 1].set(k), own_values.at[s - 1].set(v)
        q = q.reshape(k.shape[:3] + (-1, config.head_dim))  # [B, M, KVH, group, D]
        old = jnp.einsum("bmhgd,bnhd->bmhgn", q, keys, preferred_element_type=jnp.float32)
        own = jnp.einsum("bmhgd,sbmhd->bmhgs", q, own_keys, preferred_element_type=jnp.float32)
        old = jnp.where(committed[None, :, None, None], old, -jnp.inf)
        own = jnp.where(jnp.arange(steps - 1) < s, own, -jnp.inf)
        weights = jax.nn.softmax(jnp.concatenate([old, own], axis=-1) * config.head_dim**-0.5, axis=-1).astype(v.dtype)
        o = jnp.einsum("bmhgn,bnhd->bmhgd", weights[..., : n - 1], values)
        o = o + jnp.einsum("bmhgs,sbmhd->bmhgd", weights[..., n - 1 :], own_values)
        x = x + full_output(layer["self_attn"], o.reshape(x.shape[:2] + (-1, config.head_dim)), gate)
        hidden = rms_norm(feed_forward(config, layer, x), params["mtp"]["norm"], eps)
        return (hidden, own_keys, own_values), logits_of(params, hidden)

    own = jnp.zeros((steps - 1,) + keys[:, bases].shape, keys.dtype)
    _, later = jax.lax.scan(draft, (first[:, bases], own, own), jnp.arange(1, steps))
    return logits, later


def joint_loss(
    config: ModelConfig, params: Params, tokens: Array, steps: int, stride: int, mtp_weight: float
) -> tuple[Array, dict[str, Array]]:
    """Next-token cross-entropy plus mtp_weight times that of the drafts; tokens [B, N + 1]. Returns (loss, parts).

    A draft is kept when it agrees with the model, so its target is the model's own distribution at that position (no
    gradient flows through the target), and drafts count less the further ahead they are.
    """
    inputs, n = tokens[:, :-1], tokens.shape[1] - 1
    hidden, logits = forward_scanned(config, params, inputs)
    log_p = jax.nn.log_softmax(logits)
    next_loss = -jnp.mean(jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1))
    teacher = jax.lax.stop_gradient(jnp.exp(log_p))
    cross_entropy = lambda target, x: -jnp.mean(jnp.sum(target * jax.nn.log_softmax(x), axis=-1))  # noqa: E731

    first, later = draft_logits(config, params, hidden, inputs, steps, stride)
    bases = jnp.arange(0, n - steps, stride)
    parts = [cross_entropy(teacher[:, 1:], first)]
    parts += [cross_entropy(teacher[:, bases + 1 + s], later[s - 1]) for s in range(1, steps)]
    weights = 0.8 ** jnp.arange(steps)
    mtp_loss = jnp.sum(jnp.stack(parts) * weights) / jnp.sum(weights)
    return next_loss + mtp_weight * mtp_loss, {"next": next_loss, "mtp": mtp_loss, "draft1": parts[0]}


@partial(jax.jit, static_argnums=(0, 3))
def measure(config: ModelConfig, params: Params, tokens: Array, steps: int) -> tuple[Array, Array, Array]:
    """On text tokens [B, N + 1]: next-token loss [B, N], next-token hits [B, N], draft hits [B, N - steps, steps].

    A hit is an argmax equal to the text's token; draft s is fed the text's tokens before it.
    """
    inputs, n = tokens[:, :-1], tokens.shape[1] - 1
    hidden, logits = forward_scanned(config, params, inputs)
    loss = -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)[..., 0]
    first, later = draft_logits(config, params, hidden, inputs, steps)
    bases = n - steps
    drafts = jnp.concatenate([first[None, :, :bases].argmax(-1), later.argmax(-1)])  # [steps, B, bases]
    text = jnp.stack([tokens[:, s + 2 : s + 2 + bases] for s in range(steps)])
    return loss, logits.argmax(-1) == tokens[:, 1:], jnp.moveaxis(drafts == text, 0, -1)


@partial(jax.jit, static_argnums=(0, 3))
def continue_text(config: ModelConfig, params: Params, prompts: Array, length: int, temperature: float, key: Array) -> Array:
    """Extend prompts [B, P] to [B, length] by greedy (temperature 0) or sampled decoding, without any cache."""
    tokens = jnp.pad(prompts, ((0, 0), (0, length - prompts.shape[1])))

    def step(i, tokens):
        _, logits = forward_scanned(config, params, tokens)
        logits = jax.lax.dynamic_index_in_dim(logits, i - 1, axis=1, keepdims=False)
        noise = temperature * jax.random.gumbel(jax.random.fold_in(key, i), logits.shape)
        return tokens.at[:, i].set((logits + noise).argmax(-1).astype(tokens.dtype))

    return jax.lax.fori_loop(prompts.shape[1], length, step, tokens)


def accepted_length(hits: np.ndarray, width: int, start: int = 0) -> float:
    """Mean tokens per decode round of width W on text that the model itself wrote.

    hits [B, bases, >= W - 1] from `measure`. A round at base i commits its base token and the leading correct drafts;
    the next round starts right behind. Exact for greedy decoding, and for sampling in distribution (a draft x is
    accepted with probability p(x), the probability that the sampled text has it).
    """
    run = np.cumprod(hits[..., : width - 1], axis=-1).sum(-1).astype(int)
    rounds = tokens = 0
    for row in run:
        i = start
        while i < len(row):
            rounds, tokens, i = rounds + 1, tokens + 1 + row[i], i + 1 + row[i]
    return float(tokens / rounds)
