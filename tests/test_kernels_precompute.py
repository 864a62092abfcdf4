"""Projection "precompute" by kernels: bounded against inline, the same raw records, identical checkpoints after a merge."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_harness import different, make_spec, three_ways, to_numpy
from replay_harness import PALLAS, Pair, assert_none, differing, jit, prepare

import jax_ssm
import torch_ref
from jax_ssm.spec import KernelConfig
from kernels_pallas import precompute

merge = jit(jax_ssm.merge, (0, 3))


class Bounded(Pair):
    """torch_ref inline beside the precompute kernels; the largest excess over the bound of R10 per array."""

    def __init__(self, spec, seed: int = 0):
        super().__init__(spec, seed, replace(spec, projection="precompute"))

    def compare_outputs(self, row, o, jax_o, pad):
        assert pad == 0 or not np.asarray(jax_o[-pad:].astype(jnp.float32)).any(), "padding rows"
        return excess(f"o{row}", o, jax_o, self.spec, self.spec.act_dtype)

    def compare_forward(self):
        return excess("d", self.state.extra.d, self.jax.extra.d, self.spec, "fp32")

    def compare(self):
        return {name: n for name, n in super().compare().items() if name != "extra.d"}


def excess(name: str, a, b, spec, dtype: str) -> dict[str, float]:
    """How far b is beyond R10's bound on a, 0 when within: 2e-6 + 2e-5 |a| with fp32 state, else relative L2 < eps / 2."""
    a, b = (to_numpy(x).astype(np.float64) for x in (a, b))
    assert (np.isnan(a) == np.isnan(b)).all(), f"{name}: NaN read, or written where inline writes none"
    a, b = np.nan_to_num(a), np.nan_to_num(b)
    if spec.ssm_dtype == "bf16":
        worst = np.linalg.norm(a - b) - 2**-9 * np.linalg.norm(a)
    else:  # a bf16 output may round to a neighbour
        worst = (abs(a - b) - (2e-6 + (2e-5 if dtype == "fp32" else 2**-7) * abs(a))).max()
    return {name: max(0.0, float(worst))}


# rule, fields of the spec, rounds; K and V of at least 16
CASES = [
    ("gdn", dict(history=8, width=4, k_dim=32, q_heads=1, v_heads=6, v_dim=32), 5),
    ("gdn", dict(history=4, width=2, act_dtype="fp32", k_dim=16), 5),
    ("gdn", dict(history=32, width=2, act_dtype="fp32", ssm_dtype="bf16", v_heads=2, k_dim=128), 4),
    ("kda", dict(history=8, width=4, act_dtype="fp32", k_dim=32), 5),
    ("kda", dict(history=8, width=2, ssm_dtype="bf16", k_dim=32), 6),
]


@pytest.mark.parametrize("rule,fields,rounds", CASES, ids=lambda x: str(x).replace(" ", ""))
def test_R10_precompute_kernels_are_bounded_and_fold_to_the_same_bits(rule, fields, rounds):
    """R10: dynamic windows, padding, permuted slots, NaN in everything that no token wrote; then a merge of all slots."""
    spec = make_spec(rule, "replay", layers=1, **fields)
    pair = Bounded(spec)
    assert_none(pair.rounds(rounds, [5, 0, 3], full=True))
    slots = [5, 0, 3]
    state = torch_ref.merge(spec, pair.state, slots)
    other = merge(pair.jax_spec, pair.jax, jnp.asarray(slots, jnp.int32), PALLAS)
    assert differing(state.ssm[:, slots], other.ssm[:, jnp.asarray(slots)]) == 0
    assert pair.phases == {0, 1} or spec.history > 16, "no slot reached the second half"


@pytest.mark.parametrize("rule,width,length,ssm", [("gdn", 16, 16, "bf16"), ("kda", 6, 64, "fp32")])
def test_R10_wide_windows(rule, width, length, ssm):
    """R10: W = 16, four groups of columns, folds every round; L = 64 sums records in four dots."""
    heads = dict(q_heads=2, k_heads=2, v_heads=2)
    spec = make_spec(rule, "replay", layers=1, width=width, history=length, ssm_dtype=ssm, k_dim=32, **heads)
    assert_none(Bounded(spec).rounds(2 if length == 16 else 5, [2, 6], full=True))


def test_R10_a_dropped_part_of_the_state_is_seen(monkeypatch):
    """Planted fault: fp32 values as two bf16 parts instead of three leave the bound."""
    split = precompute.split
    monkeypatch.setattr(precompute, "split", lambda x: [*split(x)[:2], *map(jnp.zeros_like, split(x)[2:])])
    spec = make_spec("gdn", "replay", layers=1, history=8, width=2, act_dtype="fp32", k_dim=32, v_heads=2, slots=7)
    wrong = Bounded(spec).rounds(2, [5, 0, 3])
    assert wrong["o0"] > 0 and wrong["d"] > 0
    assert not wrong["extra.k"] and not wrong["ssm"]


def test_R36_precompute_rows_do_not_depend_on_their_batch():
    """R36, R10: a request alone and among others, in another row, leaves the same bits."""
    spec = make_spec("gdn", "replay", layers=1, history=8, width=2, projection="precompute")
    outputs = []
    for slots in ([3], [1, 3, 6]):
        state, rng = jax_ssm.init_state(spec), np.random.default_rng(3)
        tokens = {s: rng.standard_normal((3, 2, 64), dtype=np.float32) for s in [3, 1, 6]}
        pad = 8 - 2 * len(slots)
        ids = jnp.asarray([s for s in slots for _ in range(2)] + [spec.hold] * pad, jnp.int32)
        layout = jax_ssm.build_layout(spec, ids, jnp.asarray([0, 1] * 4, jnp.int32).at[2 * len(slots) :].set(0))
        for i in range(3):
            rows = jnp.concatenate([jnp.asarray(tokens[s][i]) for s in slots] + [jnp.zeros((pad, 64))])
            act = lambda n, d: jnp.broadcast_to(rows[:, None, :d], (8, n, d)).astype(jnp.bfloat16)  # noqa: E731, B023
            inputs = jax_ssm.LinearInputs(
                act(2, 64), act(2, 64), act(4, 16), act(1, 4)[:, 0], act(1, 4)[:, 0], jnp.zeros(4), jnp.zeros(4)
            )
            state, receipt = prepare(spec, state, layout, PALLAS)
            state, o = jit(jax_ssm.forward)(spec, state, receipt, jnp.int32(0), inputs)
            lengths = jnp.where(layout.verify_len > 0, 2, 0)
            state = jax_ssm.accept(spec, state, jax_ssm.StateAcceptance((receipt,), lengths))
        at = 2 * slots.index(3)
        outputs.append((o[at : at + 2], state.ssm[:, 3], state.extra.d[:, 3], state.extra.cursor[3]))
    assert_none({str(i): differing(a, b) for i, (a, b) in enumerate(zip(*outputs, strict=True))})


def test_a_tile_too_small_for_a_dot_is_refused():
    spec = make_spec("gdn", "replay", layers=1, width=2, projection="precompute")
    state, config = jax.eval_shape(lambda: jax_ssm.init_state(spec)), KernelConfig("pallas", block_v=8)
    layout = jax_ssm.build_layout(spec, jnp.asarray([1, 1], jnp.int32), jnp.asarray([0, 1], jnp.int32))
    shapes = ((2, 2, 64), jnp.bfloat16), ((2, 2, 64), jnp.bfloat16), ((2, 4, 16), jnp.bfloat16), ((2, 4), jnp.bfloat16)
    inputs = jax_ssm.LinearInputs(*(jax.ShapeDtypeStruct(*x) for x in (*shapes, shapes[3], *2 * [((4,), jnp.float32)])))

    def run(state, inputs):
        state, receipt = jax_ssm.prepare(spec, state, layout, config)
        return jax_ssm.forward(spec, state, receipt, 0, inputs)

    with pytest.raises(ValueError, match="block_v=8 .*at least 16"):
        jax.eval_shape(run, state, inputs)


HEADS = dict(q_heads=16, k_heads=16, v_heads=32)
GPU_CASES = [
    ("gdn", dict(HEADS, width=4, history=16)),
    ("gdn", dict(HEADS, width=4, history=16, ssm_dtype="bf16")),
    ("gdn", dict(q_heads=1, k_heads=2, v_heads=6, k_dim=64, width=2, ssm_dtype="bf16")),
    ("gdn", dict(k_dim=256, v_dim=64, width=8, history=32)),
    ("gdn", dict(width=16, history=16, ssm_dtype="bf16")),
    ("gdn", dict(k_dim=64, width=3, history=8, act_dtype="fp32")),
    ("kda", dict(width=4, history=8)),
    ("kda", dict(v_dim=64, width=3, history=32, ssm_dtype="bf16")),
    ("kda", dict(width=8, history=16)),
    ("kda", dict(width=16, history=16, ssm_dtype="bf16")),
]


@pytest.mark.gpu
@pytest.mark.parametrize("rule,fields", GPU_CASES, ids=str)
def test_R10_triton_and_pallas_leave_the_same_bits(rule, fields):
    """R10: equal bits of Triton and Pallas at the table's settings; of PyTorch, too, in all but outputs and d."""
    spec = make_spec(rule, "replay", projection="precompute", **(dict(k_dim=128, v_dim=128) | fields))
    w = spec.width
    windows = [[(4, w, w), (0, 1, 1), (3, min(2, w), 1)], [(0, w, 1), (4, w, w)], [(3, w, w), (4, min(2, w), 1), (0, w, w)]]
    arrays = three_ways(spec, windows * 2)
    wrong = {name: different(b, c) for name, (_, b, c) in arrays.items()}
    wrong |= {f"eager {n}": different(a, b) for n, (a, b, _) in arrays.items() if n[0] != "o" and n != "extra.d"}
    assert_none(wrong)
    d, other = (x.double().cpu() for x in arrays["extra.d"][:2])
    assert (d - other).norm() < 1e-5 * d.norm()
