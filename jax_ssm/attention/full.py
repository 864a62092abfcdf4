"""Backend of kind "full": causal softmax attention of one layer over a slotted KVState; queries grouped over KVH heads."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_ssm.attention import life
from jax_ssm.attention.batch import DecodeBatch, PrefillBatch, empty_chunk, empty_layout
from jax_ssm.attention.kv import KVState, accept_kv, advance_kv, committed, init_kv, read_kv, write_kv
from jax_ssm.attention.plan import DecodePlan, attend, blocks_needed, plan_decode
from jax_ssm.attention.spec import Bucket, LayerAttentionBinding, LayerSpec, WorkspaceRequirement
from jax_ssm.layout import DecodeLayout, in_window, to_rows, to_windows
from jax_ssm.spec import KernelConfig
from jax_ssm.state import concrete, pytree

Array = jax.Array


@pytree("spec", "bucket", "config", "plan", "prepared")
class Context:
    """What the layers of one full-attention group read this batch. decode: layout is set; prefill: chunk is set.

    updated [] bool. positions [R, W] (prefill [B, N]) int32: position of each window token, -1 where there is none.
    blocks [] int32: blocks of the KV that hold every position. Static: spec, bucket, config, plan, prepared.
    """

    updated: Array
    layout: DecodeLayout | None
    chunk: PrefillBatch | None
    positions: Array
    blocks: Array
    spec: LayerSpec
    bucket: Bucket
    config: KernelConfig
    plan: DecodePlan | None
    prepared: bool


@pytree()
class FullAttentionInputs:
    """Inputs of one layer after head norm and rotary embedding: q [T, heads, D], k and v [T, KVH, D].
    Prefill: [B, N] instead of [T]."""

    q: Array
    k: Array
    v: Array


def workspace(spec: LayerSpec, bucket: Bucket) -> WorkspaceRequirement | None:
    """Scratch for a bucket: none, XLA plans its own."""
    return None


def allocate_context(spec: LayerSpec, bucket: Bucket, config: KernelConfig = KernelConfig()) -> Context:
    """A context without live rows, of the bucket's shapes; its avals serve for lowering."""
    kv, decode = spec.kv, bucket.phase == "decode"
    bucket.check(kv.width, kv.slots)
    return Context(
        updated=jnp.zeros((), bool),
        layout=empty_layout(kv, bucket) if decode else None,
        chunk=None if decode else empty_chunk(kv, bucket),
        positions=jnp.full((bucket.requests, kv.width if decode else bucket.tokens), -1, jnp.int32),
        blocks=jnp.zeros((), jnp.int32),
        spec=spec,
        bucket=bucket,
        config=config,
        plan=None,
        prepared=False,
    )


def prepare(spec: LayerSpec, ctx: Context) -> Context:
    """Once per bucket: plan the walk over the KV. Raises RuntimeError when prepared twice."""
    life.check_prepare(ctx)
    if ctx.config.implementation != "xla":
        raise NotImplementedError(f"implementation={ctx.config.implementation!r}: full attention runs on 'xla' only")
    return ctx.replace(prepared=True, plan=plan_decode(spec.kv.max_len, spec.kv.position_bytes))


def update(spec: LayerSpec, ctx: Context, state: KVState, batch: DecodeBatch | PrefillBatch) -> tuple[KVState, Context]:
    """Once per batch: positions from the committed lengths of this state. The state is unchanged.

    Tokens that would pass max_len: ValueError when the values are concrete; when traced they are not stored and their
    outputs are zero, so check for room before. Tree structure, shapes and dtypes of the context are unchanged. Raises
    ValueError for a state of another kind, geometry or dtype.
    """
    life.check_update(spec, ctx, batch)
    life.check_like("state", state, jax.eval_shape(lambda: init_kv(spec.kv)))
    if ctx.bucket.phase == "decode":
        parts, real = {"layout": batch.layout}, in_window(batch.layout, spec.kv.width)
        slots, lengths = batch.layout.slots, batch.layout.verify_len
    else:
        slots, lengths = batch.slots, batch.lengths
        parts, real = {"chunk": batch}, jnp.arange(ctx.bucket.tokens) < lengths[:, None]
    start = committed(spec.kv, state, slots)
    _check_room(spec, start, lengths)
    positions = start[:, None] + jnp.arange(real.shape[1], dtype=jnp.int32)
    positions = jnp.where(real & (positions < spec.kv.max_len), positions, -1)
    blocks = blocks_needed(ctx.plan, positions)
    return state, ctx.replace(updated=jnp.ones((), bool), positions=positions, blocks=blocks, **parts)


def _check_room(spec: LayerSpec, start: Array, lengths: Array) -> None:
    begin, n = concrete(start), concrete(lengths)
    if begin is not None and n is not None and (begin + n > spec.kv.max_len).any():
        row = int((begin + n).argmax())
        raise ValueError(f"batch row {row} adds {n[row]} tokens to {begin[row]}: allowed are max_len={spec.kv.max_len} in all")


def forward(
    binding: LayerAttentionBinding, ctx: Context, state: KVState, inputs: FullAttentionInputs, out: Array | None = None
) -> tuple[KVState, Array]:
    """One layer: stores k and v after the committed tokens and attends causally over both.

    Returns o [T, heads, D] (prefill [B, N, heads, D]) in q's dtype, exactly zero in padding. The committed lengths do
    not move before accept, so running it again gives the same. Donate `state` and `out`. out: caller's buffer, at least
    as large; its leading corner is written.
    """
    life.check_ready("forward", ctx)
    life.check_binding(binding, ctx)
    spec, row, positions = binding.spec.kv, binding.row, ctx.positions
    q, k, v = inputs.q, inputs.k, inputs.v
    for name, x, heads in (("q", q, spec.heads), ("k", k, spec.kv_heads), ("v", v, spec.kv_heads)):
        life.check_rows(ctx, name, x, (heads, spec.head_dim))
    decode = ctx.bucket.phase == "decode"
    if decode:
        q, k, v = (to_windows(spec, ctx.layout, x) for x in (q, k, v))
    slots = ctx.layout.slots if decode else ctx.chunk.slots
    state = write_kv(spec, state, row, slots, positions, k, v)
    state, o = attend(
        ctx.plan,
        ctx.blocks,
        q,
        state,
        load=lambda state, at: read_kv(spec, state, row, slots, at),
        visible=lambda at: at <= positions[..., None],
        scale=spec.softmax_scale,
    )
    return state, life.write_out(to_rows(ctx.layout, o) if decode else o, out)


def accept(spec: LayerSpec, ctx: Context, state: KVState, lengths: Array | None = None) -> KVState:
    """Commit the batch: the lengths move. Decode: accepted tokens lengths [R] int32, base token included, 1..verify_len.
    Prefill: the whole chunk, or the first lengths [B] int32 tokens of it, from 0. Padding rows are not looked at. Donate
    `state`. Exactly once per update.

    Concrete lengths out of range raise ValueError; traced ones are clamped, 0 leaves a row alone. A repeated accept, or a
    state whose lengths moved since the update, raises RuntimeError when the values are concrete; under jit it is the
    caller's duty.
    """
    life.check_ready("accept", ctx)
    life.check_spec(spec, ctx)
    decode = ctx.bucket.phase == "decode"
    slots, most = (ctx.layout.slots, ctx.layout.verify_len) if decode else (ctx.chunk.slots, ctx.chunk.lengths)
    if lengths is not None:
        life.check_lengths("lengths", lengths, 1 if decode else 0, most)
    elif decode:
        raise ValueError("lengths=None is not allowed: a decode round needs its accepted lengths")
    start, now = concrete(ctx.positions[:, 0]), concrete(committed(spec.kv, state, slots))
    if start is not None and now is not None and (moved := (start >= 0) & (start != now)).any():
        row = int(moved.argmax())
        raise RuntimeError(f"accept: row {row} was updated at {start[row]} tokens, its slot has {now[row]}: accepted before?")
    if not decode:
        return advance_kv(spec.kv, state, slots, most if lengths is None else jnp.clip(jnp.asarray(lengths), 0, most))
    return accept_kv(spec.kv, state, ctx.layout, jnp.asarray(lengths, jnp.int32))


def begin_prefill(spec: LayerSpec, state: KVState, slots: Array) -> KVState:
    """Nothing to do: a prompt chunk starts at the committed length."""
    return state
