"""Who owns which slot and which page, on the host: free lists, and the verbs of a state behind their checks.

Whole-round executables need only `FreeList`. `StateManager` is for callers that run the verbs stage by stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from jax_ssm import executors, pages
from jax_ssm import state as states
from jax_ssm.acceptance import Ledger, SSMForward, StateAcceptance, check_acceptance, live_slots
from jax_ssm.layout import DecodeLayout
from jax_ssm.spec import KernelConfig, SSMSpec


class FreeList:
    """Ids 0..count-1, each owned by at most one party. Plain integers on the host: never a leaf of a donated pytree."""

    def __init__(self, count: int, what: str = "slot") -> None:
        self._free, self._what, self.count = list(range(count - 1, -1, -1)), what, count

    def take(self) -> int:
        """Hand out a free id; RuntimeError when there is none."""
        if not self._free:
            raise RuntimeError(f"no free {self._what}: all {self.count} are in use; release one first")
        return self._free.pop()

    def give(self, number: int) -> None:
        """Take an id back; ValueError when it is not in use."""
        if number in self._free or not 0 <= number < self.count:
            used = sorted(set(range(self.count)) - set(self._free))
            raise ValueError(f"{self._what}={number} is not in use: in use are {used}")
        self._free.append(number)

    def free(self) -> int:
        """How many ids are free."""
        return len(self._free)


@dataclass(frozen=True)
class PageHandle:
    """A page and the export that filled it; a handle of an earlier export of the same page is refused."""

    page: int
    serial: int


_donating = partial(jax.jit, static_argnums=0, donate_argnums=1)
_clear = _donating(states.clear)
_merge = _donating(executors.merge)
_accept = _donating(executors.accept)
_prepare = partial(jax.jit, static_argnums=(0, 3), donate_argnums=1)(executors.prepare)
_restore = _donating(pages.restore)
_export = partial(jax.jit, static_argnums=0, donate_argnums=2)(pages.export_into)


class StateManager:
    """One recurrent state, its slots, its pages and its open receipts.

    Every method checks first and changes afterwards. Slots are cleared when they are handed out. Merge, export and
    restore are refused between a prepare and its commit. `state` is the current pytree: layer forwards run outside on it
    and assign their result back.
    """

    def __init__(self, spec: SSMSpec, page_count: int = 0) -> None:
        self.spec = spec
        self.state = states.init_state(spec)
        self.slots = FreeList(spec.hold)
        self.page_ids = FreeList(page_count, "page")
        self.pages = pages.init_pages(spec, page_count) if page_count else None
        self.ledger = Ledger()
        self._serial = 0
        self._handles: dict[int, int] = {}
        self._owned: set[int] = set()

    def allocate(self) -> int:
        """A cleared slot."""
        slot = self.slots.take()
        self.state = _clear(self.spec, self.state, np.array([slot], np.int32))
        self._owned.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back; its contents are cleared when it is handed out again. ValueError while a round on it is open."""
        self.ledger.require_closed("release", slot)
        self.slots.give(slot)
        self._owned.discard(slot)

    def prepare(self, layout: DecodeLayout, config: KernelConfig = KernelConfig()) -> SSMForward:
        """Open a round on allocated slots and return its receipt, to be committed exactly once."""
        self._require_owned(live_slots(layout))
        self.state, receipt = _prepare(self.spec, self.state, layout, config)
        return self.ledger.issue(receipt)

    def commit(self, acceptance: StateAcceptance) -> None:
        """Accept a round. ValueError for an unknown, spent or foreign receipt and for illegal lengths."""
        check_acceptance(self.spec, acceptance)
        self.commit_validated(acceptance)

    def commit_validated(self, acceptance: StateAcceptance) -> None:
        """`commit` for an acceptance that `check_acceptance` has already passed."""
        self.ledger.check(acceptance)
        self.state = _accept(self.spec, self.state, acceptance)
        self.ledger.spend(acceptance)

    def merge(self, slots: list[int]) -> None:
        """Make the accepted state canonical, before a prompt chunk."""
        self.ledger.require_settled("merge")
        self._require_owned(slots)
        self.state = _merge(self.spec, self.state, np.asarray(slots, np.int32))

    def export(self, slot: int) -> PageHandle:
        """Write the canonical state of a slot into a free page."""
        self.ledger.require_settled("export")
        self._require_owned([slot])
        page = self.page_ids.take()
        try:
            args = np.array([page], np.int32), np.array([slot], np.int32), np.int32(1)
            self.pages = _export(self.spec, self.state, self.pages, *args)
        except BaseException:
            self.page_ids.give(page)
            raise
        self._serial += 1
        self._handles[page] = self._serial
        return PageHandle(page, self._serial)

    def restore(self, handle: PageHandle) -> int:
        """Load a page into a fresh slot and return the slot; on failure the slot is free again."""
        self.ledger.require_settled("restore")
        self._require_handle(handle)
        slot = self.slots.take()
        try:
            args = np.array([handle.page], np.int32), np.array([slot], np.int32), np.int32(1)
            self.state = _restore(self.spec, self.state, self.pages, *args)
        except BaseException:
            self.slots.give(slot)
            raise
        self._owned.add(slot)
        return slot

    def drop(self, handle: PageHandle) -> None:
        """Free a page; the handle is void from here on."""
        self._require_handle(handle)
        del self._handles[handle.page]
        self.page_ids.give(handle.page)

    def _require_owned(self, slots: list[int]) -> None:
        missing = [s for s in slots if s not in self._owned]
        if missing:
            raise ValueError(f"slots={slots} contains {missing}: allocated are {sorted(self._owned)}")
        states.check_slots(self.spec, slots)  # here, because the jitted verbs cannot look at values

    def _require_handle(self, handle: PageHandle) -> None:
        if self._handles.get(handle.page) != handle.serial:
            raise ValueError(f"{handle} is void: its page was dropped or holds a later export; export the slot again")
