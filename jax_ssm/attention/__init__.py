"""Attention runtime: compute, batch context and persistent state of attention layers, kept apart.

Layers with an equal LayerSpec form a group; a group has one context and one backend. Per bucket, once:
    ctx = prepare(spec, allocate_context(spec, bucket))
Per decode round:
    batch = build_batch(...); state, ctx = update(spec, ctx, state, batch)
    state, o = forward(binding, ctx, state, inputs)          for each layer
    state = accept(spec, ctx, state, lengths)                once, after sampling
Per prompt chunk: begin_prefill, update, forward per layer, accept (without lengths: the whole chunk).
A missing prepare or update and a repeated prepare raise RuntimeError; so does, on concrete values, a repeated accept of
full attention. A missing forward, and a repeated accept under jit or of linear layers, cannot be seen from a context: a
caller accepts each update once, after its forwards (`executors.commit` keeps a ledger of that for linear layers).
Modules hold functions only; contexts and states are pytrees.
"""

from __future__ import annotations

import jax

from jax_ssm.attention import full, linear
from jax_ssm.attention.batch import DecodeBatch, PrefillBatch, build_batch
from jax_ssm.attention.full import FullAttentionInputs
from jax_ssm.attention.kv import (
    KVPages,
    KVState,
    accept_kv,
    advance_kv,
    clear_kv,
    export_kv,
    init_kv,
    init_kv_pages,
    restore_kv,
)
from jax_ssm.attention.linear import LinearAttentionInputs
from jax_ssm.attention.plan import DecodePlan, plan_decode
from jax_ssm.attention.selector import BackendError, Capability, Constraints, Selection, describe, select_backend
from jax_ssm.attention.spec import (
    Bucket,
    KVSpec,
    LayerAttentionBinding,
    LayerSpec,
    WorkspaceRequirement,
    group_layers,
    kv_bytes,
)
from jax_ssm.attention.varlen import varlen_attention
from jax_ssm.executors import check_config
from jax_ssm.spec import IMPLEMENTATIONS, KernelConfig

BACKENDS = {"gdn": linear, "kda": linear, "full": full}


def local_capability() -> Capability:
    """Capability of the first device of this process, with the kernels that `executors.check_config` lets run here."""
    features = []
    for name in IMPLEMENTATIONS:
        try:
            check_config(KernelConfig(name))
            features.append(name)
        except NotImplementedError:
            pass
    device = jax.devices()[0]
    return Capability(device.platform, device.device_kind, frozenset(features))


def context(contexts: dict, binding: LayerAttentionBinding):
    """The context that a layer uses: the one of its group, from a dict of group_id to context."""
    return contexts[binding.spec.group_id]


def workspace(spec: LayerSpec, bucket: Bucket) -> WorkspaceRequirement | None:
    """Scratch that the group needs for a bucket, or None."""
    return BACKENDS[spec.kind].workspace(spec, bucket)


def allocate_context(spec: LayerSpec, bucket: Bucket, config: KernelConfig = KernelConfig()):
    """An unprepared context of the bucket's shapes without live rows. config.implementation is the group's backend."""
    return BACKENDS[spec.kind].allocate_context(spec, bucket, config)


def prepare(spec: LayerSpec, ctx):
    """Plan once per bucket and mark the context prepared."""
    return BACKENDS[spec.kind].prepare(spec, ctx)


def update(spec: LayerSpec, ctx, state, batch: DecodeBatch | PrefillBatch):
    """(state, context) for one batch; structure, shapes and dtypes of the context stay. Donate `state`."""
    return BACKENDS[spec.kind].update(spec, ctx, state, batch)


def forward(binding: LayerAttentionBinding, ctx, state, inputs: LinearAttentionInputs | FullAttentionInputs, out=None):
    """(state, o) of one layer; o is written into the leading corner of `out` when given. Donate `state` and `out`."""
    return BACKENDS[binding.spec.kind].forward(binding, ctx, state, inputs, out)


def accept(spec: LayerSpec, ctx, state, lengths=None):
    """Commit the batch of the last update. Decode: accepted lengths [R]; prefill: None for the whole chunk."""
    return BACKENDS[spec.kind].accept(spec, ctx, state, lengths)


def begin_prefill(spec: LayerSpec, state, slots):
    """Bring slots [B] to the form that a prompt chunk starts from; once per chunk, before update. Donate `state`."""
    return BACKENDS[spec.kind].begin_prefill(spec, state, slots)


__all__ = [
    "BACKENDS", "BackendError", "Bucket", "Capability", "Constraints", "DecodeBatch", "DecodePlan", "FullAttentionInputs",
    "KVPages", "KVSpec", "KVState", "LayerAttentionBinding", "LayerSpec", "LinearAttentionInputs", "PrefillBatch",
    "Selection", "WorkspaceRequirement", "accept", "accept_kv", "advance_kv", "allocate_context", "begin_prefill",
    "build_batch", "clear_kv", "context", "describe", "export_kv", "forward", "group_layers", "init_kv", "init_kv_pages",
    "kv_bytes", "local_capability", "plan_decode", "prepare", "restore_kv", "select_backend", "update",
    "varlen_attention", "workspace",
]  # fmt: skip
