"""Replay kernels: the bits of torch_ref for outputs, records, checkpoints and cursors, over rounds that fold and flip."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from kernel_harness import make_spec
from replay_harness import PALLAS, Pair, assert_none, differing, forward, jit, prepare

import jax_ssm
from benchmarks import parity, twins
from jax_ssm.spec import KernelConfig, SSMSpec
from kernels_pallas import project

# rule, fields of the spec, rounds: both phases are reached, L is a multiple of nothing but itself
CASES = [
    ("gdn", dict(history=4, width=1), 10),
    ("gdn", dict(history=16, width=3, k_dim=128, v_heads=6), 12),
    ("gdn", dict(history=8, width=4, ssm_dtype="bf16", q_heads=1), 6),
    ("gdn", dict(history=4, width=2, act_dtype="fp32", ssm_dtype="bf16", k_dim=128, v_dim=32), 6),
    ("kda", dict(history=4, width=1, ssm_dtype="bf16"), 10),
    ("kda", dict(history=16, width=4, k_dim=128), 9),
    ("kda", dict(history=8, width=3, act_dtype="fp32", k_dim=16), 6),
]


@pytest.mark.parametrize("rule,fields,rounds", CASES, ids=lambda x: str(x).replace(" ", ""))
def test_R75_replay_bits(rule, fields, rounds):
    """R75, R19, R79, R15: dynamic windows, padding, permuted slots, NaN in everything that no token wrote."""
    spec = make_spec(rule, "replay", layers=1, **fields)
    pair = Pair(spec)
    assert_none(pair.rounds(rounds, [5, 0, 3], full=True))
    assert pair.phases == {0, 1}, "no slot reached the second half"


@pytest.mark.parametrize("rule,length", [("gdn", 16), ("kda", 64)])
def test_R75_replay_bits_of_the_widest_window(rule, length):
    """R75: W = 16, whose tokens run in a loop; L = 16 folds every round."""
    spec = make_spec(rule, "replay", layers=1, width=16, history=length, v_dim=16)
    assert_none(Pair(spec).rounds(3, [2, 6]))


def test_R75_a_planted_change_of_order_is_seen(monkeypatch):
    """Planted fault: one pair level less in the sum over records must change bits."""
    monkeypatch.setattr(project, "RECORD_LEVELS", 1)
    spec = make_spec("gdn", "replay", layers=1, history=16, width=2, slots=7)
    wrong = Pair(spec).rounds(6, [5, 0, 3])
    assert wrong["extra.d"] and not wrong["extra.k"] and not wrong["ssm"]


def test_R36_rows_do_not_depend_on_their_batch():
    """R36, R75: a request alone and among others, in another row and another V block size, leaves the same bits."""
    spec = make_spec("gdn", "replay", layers=1, history=8, width=2)
    outputs = []
    for slots, block_v in (([3], 8), ([1, 3, 6], 16)):
        config = KernelConfig("pallas", block_v=block_v)
        state = jax_ssm.init_state(spec)
        rng = np.random.default_rng(3)
        tokens = {s: rng.standard_normal((5, 2, 64), dtype=np.float32) for s in [3, 1, 6]}
        pad = 8 - 2 * len(slots)
        ids = jnp.asarray([s for s in slots for _ in range(2)] + [spec.hold] * pad, jnp.int32)
        layout = jax_ssm.build_layout(spec, ids, jnp.asarray([0, 1] * 4, jnp.int32).at[2 * len(slots) :].set(0))
        for i in range(5):
            rows = jnp.concatenate([jnp.asarray(tokens[s][i]) for s in slots] + [jnp.zeros((pad, 64))])
            heads = lambda n, d: jnp.broadcast_to(rows[:, None, :d], (8, n, d))  # noqa: E731, B023
            core = jax_ssm.CoreInputs(
                q=heads(2, 64), k_hat=heads(2, 64), decay=jnp.full((8, 4, 1), 0.9), beta=jnp.full((8, 4), 0.5),
                k=heads(2, 64).astype(jnp.bfloat16), v=heads(4, 16).astype(jnp.bfloat16),
                q_raw=heads(2, 64).astype(jnp.bfloat16),
            )  # fmt: skip
            state, receipt = prepare(spec, state, layout, config)
            state, o = forward(spec, state, receipt, jnp.int32(0), core)
            lengths = jnp.where(layout.verify_len > 0, 2, 0)
            state = jax_ssm.accept(spec, state, jax_ssm.StateAcceptance((receipt,), lengths))
        at = 2 * slots.index(3)
        outputs.append((o[at : at + 2], state.ssm[:, 3], state.extra.cursor[3]))
    assert_none({str(i): differing(a, b) for i, (a, b) in enumerate(zip(*outputs, strict=True))})


def test_R77_gates_inside_the_pre_kernel_equal_the_prologue():
    """R77: raw inputs through the pre-kernel, and the prologue's results through the same kernel, leave equal bits."""
    spec = make_spec("gdn", "replay", layers=1, history=8, width=2)
    rng = np.random.default_rng(0)
    act = lambda *s: jnp.asarray(rng.standard_normal(s, dtype=np.float32)).astype(jnp.bfloat16)  # noqa: E731
    small = lambda *s: jnp.asarray(rng.standard_normal(s, dtype=np.float32))  # noqa: E731
    inputs = jax_ssm.LinearInputs(act(6, 2, 64), act(6, 2, 64), act(6, 4, 16), act(6, 4), act(6, 4), small(4), small(4))
    layout = jax_ssm.build_layout(spec, jnp.asarray([4, 4, 2, 0, 0, 7], jnp.int32), jnp.asarray([0, 1, 0, 0, 1, 0], jnp.int32))
    state, receipt = prepare(spec, jax_ssm.init_state(spec), layout, PALLAS)
    core = jit(jax_ssm.gates.prologue, (0, 2))(spec, inputs, "pallas")
    a = forward(spec, state, receipt, jnp.int32(0), core)
    b = jit(jax_ssm.forward)(spec, state, receipt, jnp.int32(0), inputs)
    assert_none({str(i): differing(x, y) for i, (x, y) in enumerate(zip(*map(jax.tree.leaves, (a, b)), strict=True))})


def test_N5_padding_rows_change_nothing_and_are_zero():
    """A round of padding alone: zero outputs, no cursor moves, HOLD stays zero."""
    spec = make_spec("gdn", "replay", layers=1, history=4, width=1)
    pair = Pair(spec)
    assert_none(pair.round([], [], 4))
    assert not np.asarray(pair.jax.ssm[:, spec.hold]).any() and not np.asarray(pair.jax.extra.cursor).any()


GPU_CASES = [
    ("gdn", dict(width=1, history=16)),
    ("gdn", dict(width=4, history=16, ssm_dtype="bf16")),
    ("gdn", dict(q_heads=1, k_heads=2, v_heads=6, k_dim=64, width=3, history=8)),
    ("gdn", dict(k_dim=256, v_dim=64, width=2, history=32)),
    ("gdn", dict(k_dim=256, v_dim=64, width=2, history=64, ssm_dtype="bf16", act_dtype="fp32")),
    ("gdn", dict(width=16, history=16)),
    ("kda", dict(width=1, history=16, ssm_dtype="bf16")),
    ("kda", dict(width=4, history=16)),
    ("kda", dict(k_dim=64, width=3, history=4, act_dtype="fp32", lower_bound=-5.0)),
    ("kda", dict(v_dim=64, width=10, history=32)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("rule,fields", GPU_CASES, ids=str)
def test_R75_bits_of_three_implementations_on_a_gpu(rule, fields):
    """R75, R77, R79: PyTorch eager = Triton = Pallas in every verb, 14 rounds from raw inputs and what follows them in a cell
    of `benchmarks parity`: outputs, records, checkpoints, cursors, pages."""
    assert_none(differing_values(rule, fields, ["eager", "triton", "pallas"], 14))


def differing_values(rule: str, fields: dict, sides: list[str], rounds: int) -> dict[str, int]:
    """Differing values by array and pair of implementations over the story of a parity cell."""
    heads = dict(q_heads=2, k_heads=2, v_heads=4) if rule == "gdn" else dict(q_heads=3, k_heads=3, v_heads=3)
    common = dict(layers=2, slots=9, k_dim=128, v_dim=128, mode="replay")
    spec, device = SSMSpec(rule, **(common | heads | fields)), twins.device()
    g, count = torch.Generator().manual_seed(1), parity.Count()
    slots, state, weights = parity.setup(spec, 5, g, device)
    played = {name: twins.make_side(name, spec, state) for name in sides}
    cell = parity.Cell("twins", rule, "replay", spec.width, spec.history, spec.ssm_dtype, spec.act_dtype, 0, 0, 0, 0, 0, 5)
    parity.story(cell, spec, played, rounds, slots, weights, g, device, count)
    return {f"{array} {pair}": int(n) for array, pairs in count.differing.items() for pair, n in pairs.items()}


def test_R75_the_story_of_a_cell_on_a_cpu():
    """The same, Pallas in interpret mode, from the same prologue outputs."""
    wrong = differing_values("kda", dict(width=2, history=4, k_dim=16, v_dim=16), ["eager", "pallas"], 3)
    assert_none(wrong)
    assert len(wrong) > 10
