"""StateManager: what it refuses before a jitted verb could change anything, and rounds that outlive their slot."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ssm import executors
from jax_ssm.acceptance import StateAcceptance
from jax_ssm.engine import StateManager
from jax_ssm.layout import build_layout
from jax_ssm.spec import SSMSpec

SPEC = SSMSpec("gdn", layers=2, slots=4, q_heads=1, k_heads=1, v_heads=2, k_dim=8, v_dim=8, width=2, mode="replay", history=4)


def layout(*ids):
    """Windows of two tokens for each slot."""
    return build_layout(SPEC, np.repeat(np.array(ids, np.int32), 2), np.tile(np.arange(2), len(ids)), fixed=True)


def accept(manager, receipt, *lengths):
    manager.commit(StateAcceptance((receipt,), jnp.array(lengths, jnp.int32)))


def fill(state, rng):
    """Random numbers everywhere but in indices and cursors."""
    return jax.tree.map(lambda x: x if x.ndim == 1 else jnp.asarray(rng.random(x.shape), x.dtype), state)


def manager_with_records():
    """A manager whose slot 0 has two live records."""
    manager = StateManager(SPEC, page_count=1)
    slot = manager.allocate()
    manager.state = fill(manager.state, np.random.default_rng(0))
    accept(manager, manager.prepare(layout(slot)), 2)
    return manager, slot


def test_a_slot_named_twice_is_refused_before_it_is_folded():
    manager, slot = manager_with_records()
    before = jax.tree.map(np.asarray, manager.state)
    with pytest.raises(ValueError, match="repeats an id"):
        manager.merge([slot, slot])
    jax.tree.map(np.testing.assert_array_equal, before, manager.state)


def test_a_traced_slot_named_twice_is_folded_once():
    manager, slot = manager_with_records()
    merge = jax.jit(lambda state, slots: executors.merge(SPEC, state, slots))
    once = merge(manager.state, jnp.array([slot], jnp.int32))
    jax.tree.map(np.testing.assert_array_equal, once, merge(manager.state, jnp.array([slot, slot], jnp.int32)))
    assert not np.array_equal(once.ssm, manager.state.ssm)


def test_R81_a_slot_with_an_open_round_is_not_released():
    """Otherwise the receipt would commit into the next owner of the slot."""
    manager = StateManager(SPEC)
    slot, other = manager.allocate(), manager.allocate()
    receipt = manager.prepare(layout(slot))
    manager.release(other)
    with pytest.raises(ValueError, match=rf"release of slot {slot} is not allowed now: rounds \[1\] .*accept"):
        manager.release(slot)
    accept(manager, receipt, 1)
    manager.release(slot)
    assert manager.slots.free() == SPEC.hold


def test_a_round_needs_allocated_slots():
    manager = StateManager(SPEC)
    slot = manager.allocate()
    with pytest.raises(ValueError, match=r"contains \[2\]: allocated are \[0\]"):
        manager.prepare(layout(slot, 2))
    assert manager.ledger.open_receipts() == 0
    accept(manager, manager.prepare(layout(slot, SPEC.hold)), 1, 0)  # padding belongs to nobody
