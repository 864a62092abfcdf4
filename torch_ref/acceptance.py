"""Receipts of a forward and the acceptance that spends them; the checks that run on the host, once per commit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_ref.layout import DecodeLayout
from torch_ref.spec import KernelConfig, SSMSpec

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class SSMForward:
    """Receipt of one `prepare`, valid for one acceptance.

    layout: rows and slots of the round. offset [R] int32: accepted index (accepted length - 1) at the time of prepare,
    where native and the convolution start reading. mode, config, state_key (static): what wrote it. kernels: "eager", the
    normative order of operations in PyTorch, or "triton", the kernels with the same bits.
    """

    layout: DecodeLayout
    offset: Tensor
    mode: str
    config: KernelConfig
    state_key: str
    kernels: str = "eager"


@dataclass(frozen=True, eq=False)
class StateAcceptance:
    """The single argument of `accept`.

    forwards: receipts in forward order (one per microbatch). lengths [sum of their R] integer: accepted tokens of each
    request row, base token included, 1..verify_len; rows of padding are not looked at. 0 leaves a row alone.
    """

    forwards: tuple[SSMForward, ...]
    lengths: Tensor


def check_receipt(spec: SSMSpec, receipt: SSMForward, tokens: int) -> None:
    """Raise ValueError unless the receipt belongs to this mode and state key and to `tokens` token rows."""
    if receipt.mode != spec.mode:
        raise ValueError(f"receipt.mode={receipt.mode!r}: this state is {spec.mode!r}")
    if receipt.state_key != spec.state_key:
        raise ValueError(f"receipt.state_key={receipt.state_key!r}: this state is {spec.state_key!r}")
    t = receipt.layout.row_request.shape[0]
    if tokens != t:
        raise ValueError(f"inputs have {tokens} token rows: the layout of this receipt has {t}")


def check_structure(spec: SSMSpec, acceptance: StateAcceptance) -> None:
    """Raise ValueError unless receipts are present, of this mode and state key, and `lengths` covers their rows."""
    if not acceptance.forwards:
        raise ValueError("acceptance.forwards=() is not allowed: an acceptance needs the receipts of its forwards")
    for i, forward in enumerate(acceptance.forwards):
        if forward.mode != spec.mode:
            raise ValueError(f"acceptance.forwards[{i}].mode={forward.mode!r}: this state is {spec.mode!r}")
        if forward.state_key != spec.state_key:
            raise ValueError(f"acceptance.forwards[{i}].state_key={forward.state_key!r}: this state is {spec.state_key!r}")
    total = sum(forward.layout.slots.shape[0] for forward in acceptance.forwards)
    if tuple(acceptance.lengths.shape) != (total,):
        raise ValueError(f"acceptance.lengths.shape={tuple(acceptance.lengths.shape)}: the receipts hold {total} request rows")


def split_lengths(acceptance: StateAcceptance) -> list[tuple[SSMForward, Tensor]]:
    """Pairs of receipt and its part of the lengths."""
    sizes = [forward.layout.slots.shape[0] for forward in acceptance.forwards]
    return list(zip(acceptance.forwards, acceptance.lengths.split(sizes), strict=True))


def accepted_rows(acceptance: StateAcceptance) -> list[tuple[SSMForward, Tensor, Tensor, Tensor]]:
    """Per receipt: (receipt, rows, slots, lengths) of its request rows that accept at least one token.

    The trusted path: lengths are clamped to 0..verify_len, so padding and zero-length rows drop out.
    """
    out = []
    for forward, lengths in split_lengths(acceptance):
        verify = forward.layout.verify_len.long()
        lengths = torch.minimum(lengths.to(verify.device).long().clamp(min=0), verify)
        rows = torch.nonzero(lengths > 0).flatten()
        out.append((forward, rows, forward.layout.slots.long()[rows], lengths[rows]))
    return out


def check_acceptance(spec: SSMSpec, acceptance: StateAcceptance) -> None:
    """Raise ValueError, before anything changes, unless `acceptance` fits `spec`.

    Checks the structure, 1 <= length <= verify_len on live rows, and that no slot stands in two receipts.
    """
    check_structure(spec, acceptance)
    seen: set[int] = set()
    for i, (forward, part) in enumerate(split_lengths(acceptance)):
        layout = forward.layout
        columns = zip(part.tolist(), layout.verify_len.tolist(), layout.slots.tolist(), strict=True)
        for row, (length, verify, slot) in enumerate(columns):
            if verify == 0:
                continue
            if not 1 <= length <= verify:
                raise ValueError(
                    f"acceptance.lengths={length} for row {row} of receipt {i} (slot {slot}): "
                    f"allowed are 1..{verify}, the base token included"
                )
            if slot in seen:
                raise ValueError(f"acceptance.forwards name slot {slot} twice: slots of one acceptance must be distinct")
            seen.add(slot)


class Ledger:
    """Host record of open receipts, so that each is accepted exactly once.

    The trusted `accept` cannot know whether a receipt was already spent; `commit` asks this record. Receipts are
    compared by identity: a copy, a receipt of another ledger and a spent one are all refused.
    """

    def __init__(self) -> None:
        self._rounds = 0
        self._open: dict[int, tuple[SSMForward, int]] = {}

    def issue(self, forward: SSMForward) -> SSMForward:
        """Record a fresh receipt and return it."""
        self._rounds += 1
        self._open[id(forward)] = (forward, self._rounds)
        return forward

    def open_receipts(self) -> int:
        """How many receipts wait for their acceptance; export, merge and restore are legal only at 0."""
        return len(self._open)

    def check(self, acceptance: StateAcceptance) -> None:
        """Raise ValueError when a receipt was not issued here, was already accepted, or is named twice."""
        ids = [id(forward) for forward in acceptance.forwards]
        for i, key in enumerate(ids):
            if key not in self._open:
                raise ValueError(
                    f"acceptance.forwards[{i}] is not an open receipt of this ledger: it was already accepted, or it "
                    "belongs to another state; every prepare needs its own acceptance"
                )
        if len(set(ids)) != len(ids):
            raise ValueError("acceptance.forwards names one receipt twice: each is accepted exactly once")

    def spend(self, acceptance: StateAcceptance) -> None:
        """Close the receipts of an acceptance that was checked."""
        for forward in acceptance.forwards:
            del self._open[id(forward)]

    def require_settled(self, verb: str) -> None:
        """Raise ValueError when `verb` runs between a forward and its acceptance."""
        if self._open:
            rounds = sorted(number for _, number in self._open.values())
            raise ValueError(f"{verb} is not allowed now: rounds {rounds} were prepared and not accepted; accept them first")
