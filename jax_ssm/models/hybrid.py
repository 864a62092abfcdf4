"""The hybrid model on the attention runtime: prompt chunks, verify rounds and the MTP head, over persistent states.

One decode round, all of it inside one jit, with the state donated:
    state, ctxs = update_contexts(specs, ctxs, state, batch)
    state, hidden, logits = verify(specs, params, ctxs, state, tokens, batch.positions)
    state = accept_model(specs, ctxs, state, lengths)                       after sampling
    state, mtp_hidden, mtp_logits = mtp_verify(specs, params, ctxs, state, hidden, next_tokens, batch.positions)
    state, drafts = mtp_draft(...)                                           the tokens of the next window
Contexts are a plain dict from group id to context; `specs` is static and carries no arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jax_ssm import attention
from jax_ssm.attention import (
    Bucket,
    Constraints,
    DecodeBatch,
    FullAttentionInputs,
    KVSpec,
    KVState,
    LayerAttentionBinding,
    LayerSpec,
    LinearAttentionInputs,
    PrefillBatch,
)
from jax_ssm.models.config import ModelConfig, linear_spec
from jax_ssm.models.qwen3_5 import (
    Params,
    feed_forward,
    full_output,
    full_projections,
    gdn_output,
    gdn_projections,
    logits_of,
    mtp_input,
    rms_norm,
)
from jax_ssm.spec import ExecutionPlan, KernelConfig, SSMSpec, check_disjoint, fastest_projection, plan_layers, state_bytes
from jax_ssm.state import ConvSSMState, clear, dtype, init_state, pytree

Array = jax.Array
Contexts = dict


@dataclass(frozen=True)
class ModelSpecs:
    """Everything static about a model in service; hashable, a static argument of `jax.jit`.

    plan: the executions in order, `bindings` one per execution. ssm, kv: states of the linear and the full-attention
    layers. mtp_kv, mtp_binding: those of the MTP head, None when it is not used.
    """

    config: ModelConfig
    plan: ExecutionPlan
    ssm: SSMSpec
    kv: KVSpec
    mtp_kv: KVSpec | None
    bindings: tuple[LayerAttentionBinding, ...]
    mtp_binding: LayerAttentionBinding | None

    @property
    def groups(self) -> dict[str, tuple[LayerSpec, str]]:
        """{group id: (spec, backend)} of all layer groups, the MTP head included."""
        every = self.bindings + ((self.mtp_binding,) if self.mtp_binding else ())
        return {b.spec.group_id: (b.spec, b.backend) for b in every}


@pytree()
class ModelState:
    """linear: state of the linear-attention layers; kv: of full attention; mtp: of the MTP head's layer, or None."""

    linear: ConvSSMState
    kv: KVState
    mtp: KVState | None


def model_specs(
    config: ModelConfig,
    *,
    slots: int,
    max_len: int,
    width: int = 1,
    mode: str = "native",
    history: int = 16,
    act_dtype: str = "bf16",
    ssm_dtype: str = "fp32",
    implementation: str | None = None,
    projection: str | None = None,
    mtp: bool | None = None,
    plan: ExecutionPlan | None = None,
) -> ModelSpecs:
    """Check everything and name every state, before any array exists.

    slots: physical rows including HOLD. max_len: positions of a slot; a round needs length + width <= max_len.
    width: W, drafts + 1. act_dtype: dtype of weights, activations, keys and values. implementation: backend of the
    linear layers, None for the best that can run; full attention always takes the best. projection: of mode "replay";
    None: the faster one where kernels run (`fastest_projection`), else "inline". mtp: keep the MTP head's state (None: if
    the model has one). plan: a looped execution order (`plan_layers`), None for every layer once.
    Raises ValueError for illegal values and BackendError for an implementation that cannot run here.
    """
    mtp = bool(config.mtp_num_hidden_layers) if mtp is None else mtp
    if mtp and not config.mtp_num_hidden_layers:
        raise ValueError("mtp=True is not allowed: this model has no MTP head (mtp_num_hidden_layers=0)")
    plan = plan or plan_layers(config.kinds, mode=mode)
    ssm = linear_spec(
        config,
        layers=plan.rows("gdn"),
        slots=slots,
        width=width,
        mode=mode,
        history=history,
        act_dtype=act_dtype,
        ssm_dtype=ssm_dtype,
        projection=projection or "inline",
        state_key=plan.state_key,
    )

    def kv_spec(layers: int, state_key: str) -> KVSpec:
        heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        return KVSpec(layers, slots, max_len, *heads, width=width, dtype=act_dtype, state_key=state_key)

    capability = attention.local_capability()

    def choose(spec: LayerSpec) -> str:
        constraints = Constraints() if spec.kind == "full" else Constraints(implementation)
        return attention.select_backend(spec, capability, constraints).backend

    if projection is None and choose(LayerSpec(ssm.rule, "linear", ssm=ssm)) != "xla":
        ssm = replace(ssm, projection=fastest_projection(ssm))
    kv, mtp_kv, mtp_binding = kv_spec(plan.rows("full"), plan.state_key), None, None
    bindings = attention.group_layers(plan, ssm, kv, choose)
    if mtp:
        draft = plan_layers(("full",), state_key="draft")
        check_disjoint(plan, draft)
        mtp_kv = kv_spec(1, "draft")
        (mtp_binding,) = attention.group_layers(draft, None, mtp_kv, choose)
    return ModelSpecs(config, plan, ssm, kv, mtp_kv, bindings, mtp_binding)


# --- state --------------------------------------------------------------------------------------------------------


def init_model_state(specs: ModelSpecs) -> ModelState:
    """Allocate all states, zero. Bytes: `model_state_bytes(specs)` plus the HOLD slot."""
    mtp = attention.init_kv(specs.mtp_kv) if specs.mtp_kv else None
    return ModelState(init_state(specs.ssm), attention.init_kv(specs.kv), mtp)


def clear_model(specs: ModelSpecs, state: ModelState, slots: Array) -> ModelState:
    """Zero everything that the slots [N] own, on allocation and on reuse. Donate `state`. Ids that are not live raise
    ValueError when concrete and are dropped when traced."""
    mtp = attention.clear_kv(specs.mtp_kv, state.mtp, slots) if specs.mtp_kv else None
    return ModelState(clear(specs.ssm, state.linear, slots), attention.clear_kv(specs.kv, state.kv, slots), mtp)


def model_state_bytes(specs: ModelSpecs) -> dict[str, int]:
    """Bytes by part, HOLD not counted: those of `state_bytes`, kv, mtp_kv, total."""
    parts = state_bytes(specs.ssm)
    del parts["total"]
    parts["kv"] = attention.kv_bytes(specs.kv)["total"]
    parts["mtp_kv"] = attention.kv_bytes(specs.mtp_kv)["total"] if specs.mtp_kv else 0
    return parts | {"total": sum(parts.values())}


def part_name(spec: LayerSpec) -> str:
    """Which part of ModelState a group works on."""
    if spec.kind != "full":
        return "linear"
    return "mtp" if spec.kv.state_key == "draft" else "kv"


# --- contexts -----------------------------------------------------------------------------------------------------


def allocate_contexts(specs: ModelSpecs, bucket: Bucket) -> Contexts:
    """One unprepared context per layer group."""
    groups = specs.groups.items()
    return {key: attention.allocate_context(spec, bucket, KernelConfig(name)) for key, (spec, name) in groups}


def prepare_contexts(specs: ModelSpecs, ctxs: Contexts) -> Contexts:
    """Plan every context, once per bucket."""
    return {key: attention.prepare(specs.groups[key][0], ctx) for key, ctx in ctxs.items()}


def update_contexts(
    specs: ModelSpecs, ctxs: Contexts, state: ModelState, batch: DecodeBatch | PrefillBatch
) -> tuple[ModelState, Contexts]:
    """Open a batch in every group, once per round or chunk. Donate `state` (replay folds here) and `ctxs`."""
    fresh = {}
    for key, ctx in ctxs.items():
        spec = specs.groups[key][0]
        part = part_name(spec)
        new, fresh[key] = attention.update(spec, ctx, getattr(state, part), batch)
        state = state.replace(**{part: new})
    return state, fresh


def open_bucket(specs: ModelSpecs, bucket: Bucket, *, mtp: bool) -> Contexts:
    """Prepared contexts of one bucket, of the MTP head alone or of the model without it."""
    ctxs = prepare_contexts(specs, allocate_contexts(specs, bucket))
    return {key: ctx for key, ctx in ctxs.items() if (part_name(specs.groups[key][0]) == "mtp") == mtp}


# --- forward ------------------------------------------------------------------------------------------------------


def run_layer(
    specs: ModelSpecs,
    layer: Params,
    binding: LayerAttentionBinding,
    ctxs: Contexts,
    state: ModelState,
    x: Array,
    positions: Array,
) -> tuple[ModelState, Array]:
    """One decoder layer. x [T, D] and positions [T] (prefill [B, N, D] and [B, N])."""
    config, part = specs.config, part_name(binding.spec)
    run = lambda inputs: attention.forward(binding, attention.context(ctxs, binding), getattr(state, part), inputs)  # noqa: E731
    y = rms_norm(x, layer["input_layernorm"], config.rms_norm_eps)
    if binding.spec.kind == "full":
        p = layer["self_attn"]
        q, k, v, gate = full_projections(config, p, y, positions)
        new, o = run(FullAttentionInputs(q, k, v))
        y = full_output(p, o, gate)
    else:
        p = layer["linear_attn"]
        qkv, z, a, b = gdn_projections(p, y)
        new, o = run(LinearAttentionInputs(qkv, p["conv1d"], None, a, b, p["A_log"], p["dt_bias"]))
        y = gdn_output(config, p, o, z)
    return state.replace(**{part: new}), feed_forward(config, layer, x + y)


def run_layers(
    specs: ModelSpecs, params: Params, ctxs: Contexts, state: ModelState, tokens: Array, positions: Array
) -> tuple[ModelState, Array]:
    """All executions of the plan; hidden states after the final norm. The inter-loop norm is the final norm."""
    embedding = params["embed_tokens"]
    if embedding.dtype != dtype(specs.ssm.act_dtype):
        raise ValueError(f"params are {embedding.dtype}: these specs were made for act_dtype={specs.ssm.act_dtype!r}")
    x, eps = embedding[tokens], specs.config.rms_norm_eps
    for i, binding in enumerate(specs.bindings):
        state, x = run_layer(specs, params["layers"][binding.layer], binding, ctxs, state, x, positions)
        if i in specs.plan.loop_ends:
            x = rms_norm(x, params["norm"], eps)
    return state, rms_norm(x, params["norm"], eps)


def verify(
    specs: ModelSpecs, params: Params, ctxs: Contexts, state: ModelState, tokens: Array, positions: Array
) -> tuple[ModelState, Array, Array]:
    """Run the tokens of a round. Donate `state`.

    tokens, positions [T] int32, rows as in the layout of `update_contexts`. Returns hidden [T, D] after the final norm
    and logits [T, vocab] fp32; what padding rows hold means nothing. Nothing is committed before `accept_model`.
    """
    state, hidden = run_layers(specs, params, ctxs, state, tokens, positions)
    return state, hidden, logits_of(params, hidden)


def accept_model(specs: ModelSpecs, ctxs: Contexts, state: ModelState, lengths: Array | None = None) -> ModelState:
    """Commit the batch that `ctxs` were updated with, in every group of `ctxs`. Donate `state`.

    lengths [R] int32: accepted tokens of each request row, base token included; None for a whole prompt chunk. With an
    MTP head its length moves too, so `mtp_verify` must run in the same round, before or after.
    """
    for key, ctx in ctxs.items():
        spec = specs.groups[key][0]
        part = part_name(spec)
        state = state.replace(**{part: attention.accept(spec, ctx, getattr(state, part), lengths)})
    return state


def prefill_chunk(
    specs: ModelSpecs, params: Params, state: ModelState, slots: Array, tokens: Array, lengths: Array
) -> tuple[ModelState, Array, Array]:
    """Run and commit one chunk of prompts, resumable at any split. Donate `state`.

    slots [B] int32, HOLD for padding; tokens [B, N] int32, padded on the right; lengths [B] int32, 0..N. Returns hidden
    [B, N, D] after the final norm and the logits [B, vocab] fp32 of each row's last token. Rows of length 0 and padding
    change nothing. A slot needs room for its chunk: nothing beyond max_len is stored.
    """
    b, n = tokens.shape
    ctxs = open_bucket(specs, Bucket(b, n, "prefill"), mtp=False)
    for spec in (specs.groups[key][0] for key in ctxs):
        part = part_name(spec)
        state = state.replace(**{part: attention.begin_prefill(spec, getattr(state, part), slots)})
    start = state.kv.length[jnp.clip(slots, 0, specs.kv.hold)]
    positions = start[:, None] + jnp.arange(n, dtype=jnp.int32)
    state, ctxs = update_contexts(specs, ctxs, state, _chunk(specs.kv, slots, lengths))
    state, hidden = run_layers(specs, params, ctxs, state, tokens, positions)
    return accept_model(specs, ctxs, state), hidden, logits_of(params, _last(hidden, lengths))


def _chunk(kv: KVSpec, slots: Array, lengths: Array) -> PrefillBatch:
    live = (slots >= 0) & (slots < kv.hold)
    return PrefillBatch(jnp.where(live, slots, kv.hold).astype(jnp.int32), jnp.where(live, lengths, 0).astype(jnp.int32))


def _last(x: Array, lengths: Array) -> Array:
    """Row lengths - 1 of x [B, N, D]; row 0 for length 0."""
    return jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]


# --- MTP head -----------------------------------------------------------------------------------------------------


def mtp_layer(
    specs: ModelSpecs, params: Params, ctxs: Contexts, state: ModelState, hidden: Array, next_tokens: Array, positions: Array
) -> tuple[ModelState, Array]:
    """The head's layer on hidden states and the tokens that follow them; its hidden states after `mtp.norm`."""
    x = mtp_input(specs.config, params, hidden, next_tokens)
    state, x = run_layer(specs, params["mtp"]["layers"][0], specs.mtp_binding, ctxs, state, x, positions)
    return state, rms_norm(x, params["mtp"]["norm"], specs.config.rms_norm_eps)


def mtp_verify(
    specs: ModelSpecs, params: Params, ctxs: Contexts, state: ModelState, hidden: Array, next_tokens: Array, positions: Array
) -> tuple[ModelState, Array, Array]:
    """The MTP head on the rows of a verify round. Donate `state`.

    hidden [T, D] as `verify` returned it (after the final norm), next_tokens [T] the token that follows each row: entry i
    combines hidden state i with token i + 1 and predicts token i + 2. Rows beyond the accepted length may hold anything.
    Returns the head's hidden [T, D] and logits [T, vocab] fp32. `accept_model` commits its entries with the model's.
    """
    state, out = mtp_layer(specs, params, ctxs, state, hidden, next_tokens, positions)
    return state, out, logits_of(params, out)


def mtp_prefill(
    specs: ModelSpecs, params: Params, state: ModelState, slots: Array, hidden: Array, next_tokens: Array, lengths: Array
) -> tuple[ModelState, Array, Array]:
    """The MTP head on a prompt chunk, after `prefill_chunk` and with its slots and lengths. Donate `state`.

    hidden [B, N, D] from `prefill_chunk`, next_tokens [B, N]: the chunk shifted by one, its last entry the token that
    follows the chunk. Returns the head's hidden [B, D] and logits [B, vocab] fp32 of each row's last entry: the first
    draft is their maximum.
    """
    b, n = next_tokens.shape
    ctxs = open_bucket(specs, Bucket(b, n, "prefill"), mtp=True)
    positions = state.mtp.length[jnp.clip(slots, 0, specs.mtp_kv.hold)][:, None] + jnp.arange(n, dtype=jnp.int32)
    state, ctxs = update_contexts(specs, ctxs, state, _chunk(specs.mtp_kv, slots, lengths))
    state, out = mtp_layer(specs, params, ctxs, state, hidden, next_tokens, positions)
    last = _last(out, lengths)
    return accept_model(specs, ctxs, state), last, logits_of(params, last)


def mtp_draft(
    specs: ModelSpecs, params: Params, state: ModelState, slots: Array, hidden: Array, first: Array, count: int
) -> tuple[ModelState, Array]:
    """Greedy drafts [R, count] of each request, by feeding the MTP head its own hidden states. Donate `state`.

    slots [R] int32, HOLD for padding, last (`layout.slots`); hidden [R, D] and first [R] int32: the head's hidden state
    after its last committed entry and the token that it predicts, which is draft 0. Every further draft is one step of
    the head. Its entries are not committed: they lie beyond the length and the next round overwrites them.
    """
    length = state.mtp.length
    drafts = jnp.zeros((slots.shape[0], count), jnp.int32).at[:, 0].set(first)
    bucket = Bucket(slots.shape[0], slots.shape[0], "decode", fixed=specs.mtp_kv.width == 1)

    def step(i, loop):  # a loop, so that its compilation does not grow with the width
        state, hidden, drafts = loop
        ctxs = open_bucket(specs, bucket, mtp=True)
        batch = attention.build_batch(
            specs.mtp_kv, bucket, slots, b_mtp_index=jnp.zeros_like(slots), b_ready_cache_len=state.mtp.length
        )
        state, ctxs = update_contexts(specs, ctxs, state, batch)
        state, hidden = mtp_layer(specs, params, ctxs, state, hidden, drafts[:, i], batch.positions)
        state = accept_model(specs, ctxs, state, batch.layout.verify_len)
        best = jnp.argmax(logits_of(params, hidden), axis=-1).astype(jnp.int32)
        return state, hidden, drafts.at[:, i + 1].set(best)

    state, _, drafts = jax.lax.fori_loop(0, count - 1, step, (state, hidden, drafts))
    return state.replace(mtp=state.mtp.replace(length=length)), drafts
