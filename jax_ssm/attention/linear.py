"""Backend of kinds "gdn" and "kda": convolution and recurrence of one layer, on a ConvSSMState."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_ssm import executors
from jax_ssm.acceptance import SSMForward, StateAcceptance
from jax_ssm.attention import life
from jax_ssm.attention.batch import DecodeBatch, PrefillBatch, empty_chunk, empty_layout
from jax_ssm.attention.spec import Bucket, LayerAttentionBinding, LayerSpec, WorkspaceRequirement
from jax_ssm.conv import conv_forward, conv_prefill
from jax_ssm.gates import LinearInputs
from jax_ssm.prefill import prefill
from jax_ssm.spec import KernelConfig, SSMSpec
from jax_ssm.state import ConvSSMState, concrete, init_state, pytree

Array = jax.Array


@pytree("spec", "bucket", "config", "prepared")
class Context:
    """What the layers of one linear group read this batch. decode: receipt is set; prefill: chunk is set.

    updated [] bool. Static: spec, bucket, config (kernel choice), prepared.
    """

    updated: Array
    receipt: SSMForward | None
    chunk: PrefillBatch | None
    spec: LayerSpec
    bucket: Bucket
    config: KernelConfig
    prepared: bool


@pytree()
class LinearAttentionInputs:
    """Inputs of one layer: qkv [T, C] before the convolution (blocks q | k | v), conv_weight [C, kw], conv_bias [C] or
    None, gate logits a [T, HV or HV*K] and b [T, HV], A_log [HV], dt_bias [HV or HV*K]. Prefill: [B, N] instead of [T]."""

    qkv: Array
    conv_weight: Array
    conv_bias: Array | None
    a: Array
    b: Array
    A_log: Array
    dt_bias: Array


def workspace(spec: LayerSpec, bucket: Bucket) -> WorkspaceRequirement | None:
    """Scratch for a bucket: none, XLA plans its own."""
    return None


def allocate_context(spec: LayerSpec, bucket: Bucket, config: KernelConfig = KernelConfig()) -> Context:
    """A context without live rows, of the bucket's shapes; its avals serve for lowering."""
    ssm = spec.ssm
    bucket.check(ssm.width, ssm.slots)
    receipt = chunk = None
    if bucket.phase == "decode":
        offset = jnp.zeros(bucket.requests, jnp.int32)
        receipt = SSMForward(empty_layout(ssm, bucket), offset, ssm.mode, config, ssm.state_key, ssm)
    else:
        chunk = empty_chunk(ssm, bucket)
    return Context(jnp.zeros((), bool), receipt, chunk, spec, bucket, config, prepared=False)


def prepare(spec: LayerSpec, ctx: Context) -> Context:
    """Once per bucket: checks that the kernel choice can run here. Raises RuntimeError when prepared twice."""
    life.check_prepare(ctx)
    executors.check_config(ctx.config)
    return ctx.replace(prepared=True)


def update(
    spec: LayerSpec, ctx: Context, state: ConvSSMState, batch: DecodeBatch | PrefillBatch
) -> tuple[ConvSSMState, Context]:
    """Once per batch. Decode opens a round of the state (`executors.prepare`; replay folds here) and keeps its receipt.

    Tree structure, shapes and dtypes of the context are unchanged. Donate `state`. Raises ValueError for a state of
    another kind, mode, geometry or dtype.
    """
    life.check_update(spec, ctx, batch)
    life.check_like("state", state, jax.eval_shape(lambda: init_state(spec.ssm)))
    updated = jnp.ones((), bool)
    if ctx.bucket.phase == "prefill":
        return state, ctx.replace(updated=updated, chunk=batch)
    state, receipt = executors.prepare(spec.ssm, state, batch.layout, ctx.config)
    return state, ctx.replace(updated=updated, receipt=receipt)


def forward(
    binding: LayerAttentionBinding, ctx: Context, state: ConvSSMState, inputs: LinearAttentionInputs, out: Array | None = None
) -> tuple[ConvSSMState, Array]:
    """One layer: o [T, HV, V] (prefill [B, N, HV, V]) in qkv's dtype, exactly zero in padding. Donate `state` and `out`.

    out: caller's buffer, at least as large; its leading corner is written. Prefill needs `begin_prefill` before.
    """
    life.check_ready("forward", ctx)
    life.check_binding(binding, ctx)
    spec, row = binding.spec.ssm, binding.row
    for name, x, size in (
        ("qkv", inputs.qkv, spec.channels),
        ("a", inputs.a, spec.v_heads * spec.gates),
        ("b", inputs.b, spec.v_heads),
    ):
        life.check_rows(ctx, name, x, (size,))
    conv = inputs.qkv, inputs.conv_weight, inputs.conv_bias
    if ctx.bucket.phase == "decode":
        state, y = conv_forward(spec, state, ctx.receipt, row, *conv)
        state, o = executors.forward(spec, state, ctx.receipt, row, _split(spec, y, inputs))
    else:
        chunk = ctx.chunk
        state, y = conv_prefill(spec, state, row, chunk.slots, chunk.lengths, *conv)
        state, o = prefill(spec, state, row, chunk.slots, chunk.lengths, _split(spec, y, inputs))
    return state, life.write_out(o, out)


def _split(spec: SSMSpec, y: Array, inputs: LinearAttentionInputs) -> LinearInputs:
    """Channels [.., C] after the convolution as heads."""
    lead, n_q, n_k = y.shape[:-1], spec.q_heads * spec.k_dim, spec.k_heads * spec.k_dim
    q, k, v = y[..., :n_q], y[..., n_q : n_q + n_k], y[..., n_q + n_k :]
    return LinearInputs(
        q.reshape(lead + (spec.q_heads, spec.k_dim)),
        k.reshape(lead + (spec.k_heads, spec.k_dim)),
        v.reshape(lead + (spec.v_heads, spec.v_dim)),
        inputs.a, inputs.b, inputs.A_log, inputs.dt_bias,
    )  # fmt: skip


def accept(spec: LayerSpec, ctx: Context, state: ConvSSMState, lengths: Array | None = None) -> ConvSSMState:
    """Commit the batch. Decode: accepted tokens lengths [R] int32, base token included, 1..verify_len; padding rows are
    not looked at. Prefill: the chunk is already in, whole, so lengths must be None.

    Donate `state`. Exactly once per update in decode: a state does not show that a receipt was spent, so a repeated accept
    is not seen here; `executors.commit` with a Ledger refuses it. Concrete lengths out of range raise ValueError; traced
    ones are clamped, 0 leaves a row alone.
    """
    life.check_ready("accept", ctx)
    life.check_spec(spec, ctx)
    if ctx.bucket.phase == "prefill":
        if lengths is not None:
            raise ValueError("lengths is not allowed: linear layers commit a prompt chunk whole, in forward; give None")
        return state
    if lengths is None:
        raise ValueError("lengths=None is not allowed: a decode round needs its accepted lengths")
    life.check_lengths("lengths", lengths, 1, ctx.receipt.layout.verify_len)
    return executors.accept(spec.ssm, state, StateAcceptance((ctx.receipt,), jnp.asarray(lengths, jnp.int32)))


def begin_prefill(spec: LayerSpec, state: ConvSSMState, slots: Array) -> ConvSSMState:
    """Bring the slots [B] to the form that a prompt chunk starts from (`executors.merge`); padding ids are skipped."""
    ids = concrete(slots)
    if ids is not None:
        slots = ids[ids != spec.ssm.hold]
    return executors.merge(spec.ssm, state, slots) if slots.size else state
