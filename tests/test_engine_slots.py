"""Ownership on the host: free lists, page handles, receipts that are spent once, slots cleared when handed out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ssm import executors
from jax_ssm.acceptance import StateAcceptance
from jax_ssm.engine import FreeList, StateManager, slots
from jax_ssm.engine.buckets import RunBucket, choose_bucket, power_of_two
from jax_ssm.layout import build_layout
from jax_ssm.spec import SSMSpec

SPEC = SSMSpec("gdn", layers=2, slots=4, q_heads=1, k_heads=1, v_heads=2, k_dim=8, v_dim=8, width=2, mode="replay", history=4)


def poisoned(x):
    return jnp.full(x.shape, 5, x.dtype) if jnp.issubdtype(x.dtype, jnp.integer) else jnp.full(x.shape, jnp.nan, x.dtype)


def round_on(manager: StateManager, ids: list[int]):
    """Open a round of two tokens for each slot; its receipt."""
    rows, offsets = np.repeat(np.array(ids, np.int32), 2), np.tile(np.arange(2, dtype=np.int32), len(ids))
    return manager.prepare(build_layout(SPEC, rows, offsets, fixed=True))


def accept(manager: StateManager, receipt, lengths: list[int]):
    manager.commit(StateAcceptance((receipt,), jnp.array(lengths, jnp.int32)))


def test_L13_ids_are_plain_integers_that_do_not_change():
    free = FreeList(3)
    first = [free.take() for _ in range(3)]
    assert first == [0, 1, 2] and all(type(i) is int for i in first)
    free.give(1)
    assert free.take() == 1 and first == [0, 1, 2]
    with pytest.raises(RuntimeError, match="no free slot: all 3 are in use"):
        free.take()
    free.give(2)
    for wrong in (2, 3, -1):
        with pytest.raises(ValueError, match=rf"slot={wrong} is not in use: in use are \[0, 1\]"):
            free.give(wrong)


@pytest.mark.parametrize("handed_out_by", ["allocate", "restore"])
def test_L1_L3_L4_a_slot_is_handed_out_without_a_trace_of_its_last_owner(handed_out_by):
    """Every leaf of the state, so a field that is added later is covered."""
    manager = StateManager(SPEC, page_count=1)
    empty = manager.export(manager.allocate())  # a page of the zero state, from slot 0
    manager.state = jax.tree.map(poisoned, manager.state)
    slot = manager.allocate() if handed_out_by == "allocate" else manager.restore(empty)
    assert slot == 1
    for leaf in jax.tree.leaves(manager.state):
        mine = leaf[slot] if leaf.ndim == 1 else leaf[:, slot]
        assert not np.asarray(mine, np.float32).any()


def test_S5_R82_a_receipt_is_accepted_exactly_once_and_only_by_its_own_manager():
    manager, other = StateManager(SPEC), StateManager(SPEC)
    slot = manager.allocate()
    receipt = round_on(manager, [slot])
    with pytest.raises(ValueError, match="not an open receipt"):
        accept(other, receipt, [1])
    accept(manager, receipt, [2])
    assert int(manager.state.extra.cursor[slot]) == 2
    with pytest.raises(ValueError, match="not an open receipt"):
        accept(manager, receipt, [2])
    assert int(manager.state.extra.cursor[slot]) == 2


@pytest.mark.parametrize("length", [0, -1, 3])
def test_S3_lengths_outside_the_window_are_refused_and_the_round_stays_open(length):
    manager = StateManager(SPEC)
    slot = manager.allocate()
    receipt = round_on(manager, [slot])
    with pytest.raises(ValueError, match=rf"acceptance.lengths={length} .* allowed are 1..2"):
        accept(manager, receipt, [length])
    accept(manager, receipt, [1])
    assert int(manager.state.extra.cursor[slot]) == 1


def test_R80_merge_export_and_restore_wait_for_open_rounds():
    manager = StateManager(SPEC, page_count=2)
    slot = manager.allocate()
    handle = manager.export(slot)
    receipt = round_on(manager, [slot])
    for verb, argument in (("merge", [slot]), ("export", slot), ("restore", handle)):
        with pytest.raises(ValueError, match=f"{verb} is not allowed now: rounds"):
            getattr(manager, verb)(argument)
    accept(manager, receipt, [1])
    manager.merge([slot])
    assert int(manager.state.extra.cursor[slot]) == 0


def test_verbs_refuse_slots_that_nobody_owns():
    manager = StateManager(SPEC, page_count=1)
    slot = manager.allocate()
    for verb, argument in (("merge", [slot, 2]), ("export", 2), ("merge", [SPEC.hold])):
        with pytest.raises(ValueError, match="allocated are"):
            getattr(manager, verb)(argument)
    manager.release(slot)
    with pytest.raises(ValueError, match="allocated are"):
        manager.merge([slot])


def test_L9_a_failed_restore_or_export_leaves_nothing_taken(monkeypatch):
    manager = StateManager(SPEC, page_count=1)
    slot = manager.allocate()

    def fails(*args):
        raise OSError("no memory on the host")

    with monkeypatch.context() as patch:
        patch.setattr(slots, "_export", fails)
        with pytest.raises(OSError):
            manager.export(slot)
    assert manager.page_ids.free() == 1
    handle = manager.export(slot)
    before = jax.tree.map(np.asarray, manager.state)
    with monkeypatch.context() as patch:
        patch.setattr(slots, "_restore", fails)
        with pytest.raises(OSError):
            manager.restore(handle)
    assert manager.slots.free() == SPEC.hold - 1
    jax.tree.map(np.testing.assert_array_equal, before, manager.state)
    assert manager.restore(handle) == 1


def test_L12_a_handle_is_void_after_its_page_was_dropped_or_filled_again():
    manager = StateManager(SPEC, page_count=1)
    slot = manager.allocate()
    first = manager.export(slot)
    with pytest.raises(RuntimeError, match="no free page"):
        manager.export(slot)
    manager.drop(first)
    second = manager.export(slot)
    assert second.page == first.page
    for verb in (manager.restore, manager.drop):
        with pytest.raises(ValueError, match="is void"):
            verb(first)
    assert manager.slots.free() == SPEC.hold - 1
    manager.restore(second)


def test_export_and_restore_carry_the_accepted_state():
    manager = StateManager(SPEC, page_count=1)
    slot = manager.allocate()
    rng = np.random.default_rng(0)
    fill = lambda x: x if x.ndim == 1 else jnp.asarray(rng.random(x.shape), x.dtype)  # noqa: E731
    manager.state = jax.tree.map(fill, manager.state)
    accept(manager, round_on(manager, [slot]), [2])
    expected = executors.snapshot(SPEC, manager.state, np.array([slot], np.int32))
    copy = manager.restore(manager.export(slot))
    found = executors.snapshot(SPEC, manager.state, np.array([copy], np.int32))
    jax.tree.map(np.testing.assert_array_equal, expected, found)


def test_buckets_are_powers_of_two_and_prompts_beyond_the_largest_wait():
    assert [power_of_two(n) for n in (1, 2, 3, 4, 5, 127, 128, 129)] == [1, 2, 4, 4, 8, 128, 128, 256]
    assert choose_bucket(5, 300, max_requests=16, least_len=128) == RunBucket(8, 512)
    assert choose_bucket(50, 20, max_requests=16, least_len=128) == RunBucket(16, 128)
    assert str(RunBucket(8, 512)) == "8 x 512"
