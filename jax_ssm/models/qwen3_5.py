"""Qwen3.5 as pure functions on a parameter tree, and its teacher-forced forward over whole sequences.

The tree has the names of the published checkpoints without `model.` and `.weight`, nested at the dots, e.g.
params["layers"][0]["linear_attn"]["in_proj_qkv"]; matrices are [out, in] as stored. Shapes: `param_shapes`.
A layer is  x + mixer(norm(x)),  then  x + mlp(norm(x)).  Norms multiply by (1 + weight), the gated norm by weight.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_ssm.conv import conv_sequence
from jax_ssm.gates import LinearInputs, prologue, store
from jax_ssm.models.config import ModelConfig, linear_spec
from jax_ssm.prefill import prefill_core
from jax_ssm.spec import ExecutionPlan, SSMSpec, plan_layers

Array = jax.Array
Params = dict

FLOAT32_PARAMS = ("A_log", "dt_bias")  # the gate parameters stay fp32 whatever the weights are


# --- parameters ---------------------------------------------------------------------------------------------------


def layer_shapes(config: ModelConfig, kind: str) -> dict:
    """Shapes of one decoder layer of kind "gdn" or "full"."""
    d, inner = config.hidden_size, config.intermediate_size
    if kind == "gdn":
        heads, v_dim = config.linear_num_value_heads, config.linear_value_head_dim
        channels = linear_spec(config).channels
        mixer = {
            "in_proj_qkv": (channels, d),
            "in_proj_z": (heads * v_dim, d),
            "in_proj_a": (heads, d),
            "in_proj_b": (heads, d),
            "conv1d": (channels, config.linear_conv_kernel_dim),
            "A_log": (heads,),
            "dt_bias": (heads,),
            "norm": (v_dim,),
            "out_proj": (d, heads * v_dim),
        }
    else:
        q, kv, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        mixer = {
            "q_proj": (q * dim * 2, d),
            "k_proj": (kv * dim, d),
            "v_proj": (kv * dim, d),
            "o_proj": (d, q * dim),
            "q_norm": (dim,),
            "k_norm": (dim,),
        }
    return {
        "linear_attn" if kind == "gdn" else "self_attn": mixer,
        "mlp": {"gate_proj": (inner, d), "up_proj": (inner, d), "down_proj": (d, inner)},
        "input_layernorm": (d,),
        "post_attention_layernorm": (d,),
    }


def param_shapes(config: ModelConfig) -> Params:
    """The parameter tree with a shape tuple at every leaf. `lm_head` only if untied, `mtp` only if configured."""
    d = config.hidden_size
    tree = {
        "embed_tokens": (config.vocab_size, d),
        "layers": [layer_shapes(config, kind) for kind in config.kinds],
        "norm": (d,),
    }
    if not config.tie_word_embeddings:
        tree["lm_head"] = (config.vocab_size, d)
    if config.mtp_num_hidden_layers:
        tree["mtp"] = {
            "fc": (d, 2 * d),
            "pre_fc_norm_embedding": (d,),
            "pre_fc_norm_hidden": (d,),
            "layers": [layer_shapes(config, "full")],
            "norm": (d,),
        }
    return tree


def map_shapes(fn, tree: Params) -> Params:
    """Apply fn(path, shape) to every leaf of a tree of shape tuples; path is a tuple of keys and list indices."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, tuple))
    plain = [tuple(getattr(k, "key", getattr(k, "idx", None)) for k in path) for path, _ in leaves]
    return jax.tree_util.tree_unflatten(treedef, [fn(p, shape) for p, (_, shape) in zip(plain, leaves, strict=True)])


def init_params(config: ModelConfig, key: Array, dtype=jnp.float32) -> Params:
    """Random parameters for training from scratch, weights in `dtype`, gate parameters fp32.

    Matrices normal(0.02); norms at identity; decay rates exp(A_log) uniform in 1..16 and time steps softplus(dt_bias)
    log-uniform in 1e-3..1e-1, so that memories from a few to a thousand tokens exist at the start.
    """

    def leaf(path, shape):
        nonlocal key
        key, sub = jax.random.split(key)
        name = path[-1]
        if name == "A_log":
            return jnp.log(jax.random.uniform(sub, shape, minval=1.0, maxval=16.0))
        if name == "dt_bias":
            step = jnp.exp(jax.random.uniform(sub, shape, minval=jnp.log(1e-3), maxval=jnp.log(1e-1)))
            return step + jnp.log(-jnp.expm1(-step))  # inverse of softplus
        if len(shape) == 1:
            gated = len(path) > 1 and path[-2] == "linear_attn"
            return jnp.full(shape, 1.0 if gated else 0.0, dtype)
        if name == "conv1d":
            return jax.random.uniform(sub, shape, minval=-(shape[1] ** -0.5), maxval=shape[1] ** -0.5).astype(dtype)
        return (0.02 * jax.random.normal(sub, shape)).astype(dtype)

    return map_shapes(leaf, param_shapes(config))


# --- building blocks ----------------------------------------------------------------------------------------------


def linear(x: Array, weight: Array, out_dtype=None) -> Array:
    """x [.., in] times weight [out, in] -> [.., out]; fp32 weights are multiplied in full fp32."""
    out_dtype = out_dtype or x.dtype
    return jnp.einsum("...i,oi->...o", x, weight, precision=lax.Precision.HIGHEST, preferred_element_type=out_dtype)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Root mean square norm over the last axis, scaled by (1 + weight), in fp32; rounded once to x's dtype."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return store(y * (1.0 + weight.astype(jnp.float32)), x.dtype)


def gated_norm(x: Array, gate: Array, weight: Array, eps: float) -> Array:
    """rms(x) * weight * silu(gate) over the last axis; the normalised value is rounded to x's dtype before the gate."""
    y = x.astype(jnp.float32)
    y = store(y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps), x.dtype)
    y = store(weight * y, x.dtype).astype(jnp.float32)
    return store(y * jax.nn.silu(gate.astype(jnp.float32)), x.dtype)


def rotate(x: Array, positions: Array, theta: float, rotary_dim: int) -> Array:
    """Rotary embedding of the first rotary_dim channels. x [.., heads, D], positions [..] int32; fp32 inside.

    Multimodal rope gives a text token the same position on its three grids, so it is this plain rope.
    """
    half = rotary_dim // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) * 2 / rotary_dim)
    angle = (positions.astype(jnp.float32)[..., None] * frequency)[..., None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b, rest = x[..., :half], x[..., half:rotary_dim], x[..., rotary_dim:]
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.concatenate([store(a * cos - b * sin, x.dtype), store(b * cos + a * sin, x.dtype), rest], axis=-1)


def mlp(p: Params, x: Array) -> Array:
    """down(silu(gate(x)) * up(x))."""
    return linear(jax.nn.silu(linear(x, p["gate_proj"])) * linear(x, p["up_proj"]), p["down_proj"])


def feed_forward(config: ModelConfig, layer: Params, x: Array) -> Array:
    """Second half of a decoder layer, with its residual."""
    return x + mlp(layer["mlp"], rms_norm(x, layer["post_attention_layernorm"], config.rms_norm_eps))


def full_projections(config: ModelConfig, p: Params, x: Array, positions: Array) -> tuple[Array, Array, Array, Array]:
    """q [.., H, D], k and v [.., KVH, D] after head norm and rope, and the output gate [.., H * D].

    q_proj holds query and gate interleaved per head.
    """
    heads, dim, eps = x.shape[:-1], config.head_dim, config.rms_norm_eps
    q, gate = jnp.split(linear(x, p["q_proj"]).reshape(heads + (-1, 2 * dim)), 2, axis=-1)
    k = linear(x, p["k_proj"]).reshape(heads + (-1, dim))
    v = linear(x, p["v_proj"]).reshape(heads + (-1, dim))
    q = rotate(rms_norm(q, p["q_norm"], eps), positions, config.rope_theta, config.rotary_dim)
    k = rotate(rms_norm(k, p["k_norm"], eps), positions, config.rope_theta, config.rotary_dim)
    return q, k, v, gate.reshape(heads + (-1,))


def full_output(p: Params, o: Array, gate: Array) -> Array:
    """Gate and output projection of o [.., H, D]."""
    return linear(o.reshape(gate.shape) * jax.nn.sigmoid(gate), p["o_proj"])


def gdn_projections(p: Params, x: Array) -> tuple[Array, Array, Array, Array]:
    """qkv [.., C] before the convolution, z [.., HV * V] the output gate, a and b [.., HV] the gate logits."""
    return tuple(linear(x, p[name]) for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"))


def gdn_inputs(spec: SSMSpec, p: Params, qkv: Array, a: Array, b: Array) -> LinearInputs:
    """Split the convolved channels q | k | v into heads."""
    keys = spec.k_heads * spec.k_dim
    q, k, v = jnp.split(qkv, [keys, 2 * keys], axis=-1)
    split = lambda x, dim: x.reshape(x.shape[:-1] + (-1, dim))  # noqa: E731
    return LinearInputs(split(q, spec.k_dim), split(k, spec.k_dim), split(v, spec.v_dim), a, b, p["A_log"], p["dt_bias"])


def gdn_output(config: ModelConfig, p: Params, o: Array, z: Array) -> Array:
    """Gated norm per head and output projection of o [.., HV, V]."""
    y = gated_norm(o, z.reshape(o.shape), p["norm"], config.rms_norm_eps)
    return linear(y.reshape(z.shape), p["out_proj"])


def logits_of(params: Params, hidden: Array) -> Array:
    """fp32 logits [.., vocab] of hidden states after the final norm; the embedding serves as head when tied."""
    return linear(hidden, params.get("lm_head", params["embed_tokens"]), jnp.float32)


def mtp_input(config: ModelConfig, params: Params, hidden: Array, next_tokens: Array) -> Array:
    """Input of the MTP layer: fc of [norm(embedding of the next token), norm(hidden after the final norm)]."""
    p, eps = params["mtp"], config.rms_norm_eps
    embedding = rms_norm(params["embed_tokens"][next_tokens], p["pre_fc_norm_embedding"], eps)
    return linear(jnp.concatenate([embedding, rms_norm(hidden, p["pre_fc_norm_hidden"], eps)], axis=-1), p["fc"])


# --- whole sequences ----------------------------------------------------------------------------------------------


def _full_sequence(config: ModelConfig, p: Params, x: Array) -> Array:
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    q, k, v, gate = full_projections(config, p, x, positions)
    b, n, heads, dim = q.shape
    q = q.reshape(b, n, k.shape[2], -1, dim)
    scores = jnp.einsum("bnhgd,bmhd->bhgnm", q, k, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    causal = jnp.arange(n)[:, None] >= jnp.arange(n)
    weights = jax.nn.softmax(jnp.where(causal, scores * dim**-0.5, -jnp.inf), axis=-1)
    o = jnp.einsum("bhgnm,bmhd->bnhgd", weights.astype(v.dtype), v, precision=lax.Precision.HIGHEST)
    return full_output(p, o.reshape(b, n, heads, dim), gate)


def _gdn_sequence(config: ModelConfig, p: Params, x: Array) -> Array:
    b, n = x.shape[:2]
    spec = linear_spec(config, act_dtype="bf16" if x.dtype == jnp.bfloat16 else "fp32")
    qkv, z, gate_a, gate_b = gdn_projections(p, x)
    core = prologue(spec, gdn_inputs(spec, p, conv_sequence(qkv, p["conv1d"]), gate_a, gate_b))
    empty = jnp.zeros((b, spec.v_heads, spec.v_dim, spec.k_dim), jnp.float32)
    _, o = prefill_core(spec, empty, jnp.full(b, n), core)
    return gdn_output(config, p, o, z)


def layer_sequence(config: ModelConfig, layer: Params, kind: str, x: Array) -> Array:
    """One decoder layer over whole sequences x [B, N, D], from an empty state."""
    y = rms_norm(x, layer["input_layernorm"], config.rms_norm_eps)
    y = _gdn_sequence(config, layer["linear_attn"], y) if kind == "gdn" else _full_sequence(config, layer["self_attn"], y)
    return feed_forward(config, layer, x + y)


def forward_sequence(
    config: ModelConfig, params: Params, tokens: Array, plan: ExecutionPlan | None = None
) -> tuple[Array, Array]:
    """Teacher-forced forward from an empty state, differentiable: training and parity tests.

    tokens [B, N] int32. Returns hidden [B, N, D] after the final norm, in the weights' dtype, and logits [B, N, vocab]
    fp32. Causal, so positions after a padded end change nothing before it. plan: a looped execution order; its
    inter-loop norm is the model's final norm.
    """
    plan = plan or plan_layers(config.kinds)
    x = params["embed_tokens"][tokens]
    for i, step in enumerate(plan.steps):
        x = layer_sequence(config, params["layers"][step.layer], step.kind, x)
        if i in plan.loop_ends:
            x = rms_norm(x, params["norm"], config.rms_norm_eps)
    hidden = rms_norm(x, params["norm"], config.rms_norm_eps)
    return hidden, logits_of(params, hidden)


def mtp_sequence(config: ModelConfig, params: Params, hidden: Array, next_tokens: Array) -> tuple[Array, Array]:
    """The MTP head over whole sequences: entry i sees hidden state i and token i + 1, and predicts token i + 2.

    hidden [B, N, D] after the final norm (of the model, or of this head to draft further), next_tokens [B, N].
    Returns its own hidden [B, N, D] after `mtp.norm` and logits [B, N, vocab] fp32.
    """
    x = layer_sequence(config, params["mtp"]["layers"][0], "full", mtp_input(config, params, hidden, next_tokens))
    out = rms_norm(x, params["mtp"]["norm"], config.rms_norm_eps)
    return out, logits_of(params, out)
