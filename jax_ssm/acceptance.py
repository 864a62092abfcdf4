"""Receipts of a forward and the acceptance that spends them; the checks that run on the host, once per commit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_ssm.layout import DecodeLayout
from jax_ssm.spec import KernelConfig, SSMSpec
from jax_ssm.state import check_row, concrete, pytree

Array = jax.Array


@pytree("mode", "config", "state_key", "spec")
class SSMForward:
    """Receipt of one `prepare`, valid for one acceptance.

    layout: rows and slots of the round. offset [R] int32: accepted index (accepted length - 1) at the time of prepare,
    where native and the convolution start reading. mode, config, state_key, spec (static): what wrote it; without a spec
    only mode and key are compared.
    """

    layout: DecodeLayout
    offset: Array
    mode: str
    config: KernelConfig
    state_key: str
    spec: SSMSpec | None = None


@pytree()
class StateAcceptance:
    """The single argument of `accept`.

    forwards: receipts in forward order (one per microbatch). lengths [sum of their R] int32: accepted tokens of each
    request row (array or list of integers), base token included, 1..verify_len; rows of padding are not looked at. 0
    leaves a row alone.
    """

    forwards: tuple[SSMForward, ...]
    lengths: Array


def live_slots(layout: DecodeLayout) -> list[int]:
    """Slots of the live requests of a concrete layout, on the host."""
    return np.asarray(layout.slots)[np.asarray(layout.verify_len) > 0].tolist()


def as_array(lengths) -> Array:
    """Lengths as an array, in the integer type they were given in."""
    return lengths if hasattr(lengths, "dtype") else jnp.asarray(lengths)


def split_lengths(acceptance: StateAcceptance) -> list[tuple[SSMForward, Array]]:
    """Pairs of receipt and its part of the lengths."""
    lengths, pairs, start = as_array(acceptance.lengths), [], 0
    for forward in acceptance.forwards:
        stop = start + forward.layout.slots.shape[0]
        pairs.append((forward, lengths[start:stop]))
        start = stop
    return pairs


def _check_origin(spec: SSMSpec, name: str, receipt: SSMForward) -> None:
    """Raise ValueError unless the receipt was written for this state."""
    for field in ("mode", "state_key"):
        value, own = getattr(receipt, field), getattr(spec, field)
        if value != own:
            raise ValueError(f"{name}.{field}={value!r}: this state is {own!r}")
    if receipt.spec not in (None, spec):
        differs = {k: (v, getattr(spec, k)) for k, v in vars(receipt.spec).items() if v != getattr(spec, k)}
        raise ValueError(f"{name}.spec is not this state's: fields that differ (receipt, state) are {differs}")


def check_receipt(spec: SSMSpec, receipt: SSMForward, row, tokens: int) -> None:
    """Raise ValueError unless the receipt is of this spec and of `tokens` rows, and `row` is a layer."""
    _check_origin(spec, "receipt", receipt)
    if tokens != receipt.layout.row_request.shape[0]:
        raise ValueError(f"inputs have {tokens} token rows: the receipt's layout has {receipt.layout.row_request.shape[0]}")
    check_row(spec, row)


def check_structure(spec: SSMSpec, acceptance: StateAcceptance) -> None:
    """Raise ValueError unless receipts are present and of this spec, and `lengths` are integers that cover their rows."""
    if not acceptance.forwards:
        raise ValueError("acceptance.forwards=() is not allowed: an acceptance needs the receipts of its forwards")
    for i, forward in enumerate(acceptance.forwards):
        _check_origin(spec, f"acceptance.forwards[{i}]", forward)
    total = sum(forward.layout.slots.shape[0] for forward in acceptance.forwards)
    lengths = as_array(acceptance.lengths)
    if lengths.shape != (total,):
        raise ValueError(f"acceptance.lengths.shape={lengths.shape}: the receipts hold {total} request rows")
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"acceptance.lengths.dtype={lengths.dtype} is not allowed: accepted lengths are integers")


def check_acceptance(spec: SSMSpec, acceptance: StateAcceptance) -> None:
    """Raise ValueError, before anything changes, unless `acceptance` fits `spec`.

    Structure (receipts present and of this spec, number and type of lengths) is always checked. Values are checked when
    they are concrete: 1 <= length <= verify_len on live rows, no slot in two receipts.
    """
    check_structure(spec, acceptance)
    seen: list[int] = []
    for i, (forward, lengths) in enumerate(split_lengths(acceptance)):
        values, verify, slots = concrete(lengths), concrete(forward.layout.verify_len), concrete(forward.layout.slots)
        if values is None or verify is None or slots is None:
            continue
        live = verify > 0
        bad = live & ((values < 1) | (values > verify))
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise ValueError(
                f"acceptance.lengths={int(values[row])} for row {row} of receipt {i} (slot {int(slots[row])}): "
                f"allowed are 1..{int(verify[row])}, the base token included"
            )
        seen += slots[live].tolist()
    if len(set(seen)) != len(seen):
        raise ValueError(f"acceptance.forwards name a slot twice: {sorted(s for s in set(seen) if seen.count(s) > 1)}")


class Ledger:
    """Host record of open receipts, so that each is accepted exactly once.

    The pure `accept` cannot know whether a receipt was already spent; `commit` asks this record. Receipts are compared
    by identity: a copy, a receipt of another ledger and a spent one are all refused.
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

    def require_closed(self, verb: str, slot: int) -> None:
        """Raise ValueError when `verb` would take `slot` away from a round that was not accepted yet."""
        rounds = sorted(number for forward, number in self._open.values() if slot in live_slots(forward.layout))
        if rounds:
            raise ValueError(
                f"{verb} of slot {slot} is not allowed now: rounds {rounds} on it are open; accept them first (length 1 aborts)"
            )
