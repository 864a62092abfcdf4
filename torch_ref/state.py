"""The persistent state: allocation, clearing, and how a slot id addresses a pool.

Every leaf has a slot axis, so clearing a slot needs no list of fields. Verbs change the tensors of a state in place
and return the state; slot ids that are not live (HOLD, anything out of range) are never written.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from torch_ref.spec import SSMSpec, state_bytes

__all__ = ["CompactWindow", "ReplayHistory", "ConvSSMState", "dtype", "init_state", "clear", "state_bytes"]

Tensor = torch.Tensor


def dtype(name: str) -> torch.dtype:
    """torch dtype of "fp32" or "bf16"."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[name]


@dataclass(frozen=True)
class CompactWindow:
    """Raw inputs of the current verify window (mode "compact"); nothing here outlives one round.

    k [layers, S, KH, W, K] and v [layers, S, HV, W, V] in the activation dtype,
    decay [layers, S, HV, W, G] and beta [layers, S, HV, W] fp32.
    """

    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor


@dataclass(frozen=True)
class ReplayHistory:
    """Records of accepted tokens since the checkpoint, in two halves of L, and their cursors (mode "replay").

    k [layers, S, KH, 2L, K] and v [layers, S, HV, 2L, V] raw, activation dtype; d [layers, S, HV, 2L, V] the corrected
    value, decay [layers, S, HV, 2L, G] = exp(g), beta [layers, S, HV, 2L], all fp32.
    cursor [S] int32 = phase * 2L + n: half `phase` is live and holds n records. forward_cursor [S] is the copy that the
    forward of this round reads, so accept may run before or after it.
    """

    k: Tensor
    v: Tensor
    d: Tensor
    decay: Tensor
    beta: Tensor
    cursor: Tensor
    forward_cursor: Tensor


@dataclass(frozen=True)
class ConvSSMState:
    """Everything that a group of linear-attention layers keeps between rounds.

    ssm [layers, S * rows_per_slot, HV, V, K] in ssm_dtype, K contiguous; native keeps W rows a slot, row
    `slot * W + t` after token t. conv [layers, S, C, window] raw convolution inputs. accepted [S] int32: accepted
    length of the last round minus one, the offset of the valid native row and convolution window.
    extra: None (native), CompactWindow or ReplayHistory.
    """

    ssm: Tensor
    conv: Tensor
    accepted: Tensor
    extra: CompactWindow | ReplayHistory | None


def init_state(spec: SSMSpec, device: torch.device | str = "cpu") -> ConvSSMState:
    """Allocate the state of `spec`: all zero, HOLD and cursors included. Bytes: `state_bytes(spec)` plus HOLD."""
    act, layers, s, heads = dtype(spec.act_dtype), spec.layers, spec.slots, spec.v_heads

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def records(length: int) -> tuple[Tensor, ...]:
        return (
            zeros(layers, s, spec.k_heads, length, spec.k_dim, dtype=act),
            zeros(layers, s, heads, length, spec.v_dim, dtype=act),
            zeros(layers, s, heads, length, spec.gates),
            zeros(layers, s, heads, length),
        )

    extra = None
    if spec.mode == "compact":
        extra = CompactWindow(*records(spec.width))
    elif spec.mode == "replay":
        k, v, decay, beta = records(2 * spec.history)
        cursor, forward_cursor = zeros(s, dtype=torch.int32), zeros(s, dtype=torch.int32)
        extra = ReplayHistory(k, v, zeros(*v.shape), decay, beta, cursor, forward_cursor)
    return ConvSSMState(
        ssm=zeros(layers, s * spec.rows_per_slot, heads, spec.v_dim, spec.k_dim, dtype=dtype(spec.ssm_dtype)),
        conv=zeros(layers, s, spec.channels, spec.window, dtype=act),
        accepted=zeros(s, dtype=torch.int32),
        extra=extra,
    )


def leaves(state: ConvSSMState) -> dict[str, Tensor]:
    """Every tensor of a state by name ("ssm", "conv", "accepted", "extra.k", ..)."""
    named = {"ssm": state.ssm, "conv": state.conv, "accepted": state.accepted}
    for field in fields(state.extra) if state.extra is not None else ():
        named[f"extra.{field.name}"] = getattr(state.extra, field.name)
    return named


def slot_ids(spec: SSMSpec, state: ConvSSMState, slots, n: int | None = None) -> Tensor:
    """The first n `slots` as int64 on the state's device; ValueError unless they are distinct ids in 0..HOLD-1."""
    ids = torch.as_tensor(slots, device=state.ssm.device).long()
    ids = ids if n is None else ids[: int(n)]
    listed = ids.tolist()
    bad = [i for i in listed if not 0 <= i < spec.hold]
    if bad:
        raise ValueError(f"slots={listed} contains {bad}: allowed are 0..{spec.hold - 1} ({spec.hold} is HOLD)")
    if len(set(listed)) != len(listed):
        raise ValueError(f"slots={listed} repeats an id: slots of one call must be distinct")
    return ids


def check_row(spec: SSMSpec, row: int) -> None:
    """Raise ValueError unless `row` is a logical layer of this state; a negative row would wrap onto the last one."""
    if not 0 <= int(row) < spec.layers:
        raise ValueError(f"row={row} is not allowed: layer rows are 0..{spec.layers - 1}")


def clear(spec: SSMSpec, state: ConvSSMState, slots) -> ConvSSMState:
    """Zero everything that the slots [N] own: state rows, convolution window, records, cursors, accepted index.

    Called on allocation and on reuse. Ids outside 0..HOLD-1 raise ValueError before anything changes.
    """
    ids = slot_ids(spec, state, slots)
    for name, leaf in leaves(state).items():
        rows = spec.rows_per_slot if name == "ssm" else 1
        at = (ids[:, None] * rows + torch.arange(rows, device=ids.device)).reshape(-1)
        if leaf.ndim == 1:
            leaf[at] = 0
        else:
            leaf[:, at] = 0
    return state
