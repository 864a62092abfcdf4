"""Native verify kernels: the bits of torch_ref for outputs and states, whatever the window, layout or launch."""

from __future__ import annotations

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_harness import Round, assert_same_bits, assert_three_same, make_spec, three_ways

import jax_ssm
from jax_ssm.spec import KernelConfig
from kernels_pallas import decode, recurrence

WINDOWS = {1: [(5, 1), (0, 1), (3, 1)], 2: [(5, 2), (0, 1)], 4: [(6, 2), (2, 4), (4, 1)], 16: [(2, 16), (5, 9)]}
TYPES = product(("gdn", "kda"), ("fp32", "bf16"), ("fp32", "bf16"))
CASES = [
    *((rule, dict(ssm_dtype=ssm, act_dtype=act, width=4)) for rule, ssm, act in TYPES),
    ("gdn", dict(width=1)),
    ("gdn", dict(width=1, ssm_dtype="bf16", q_heads=1, v_heads=6, k_dim=128)),
    ("kda", dict(width=1, ssm_dtype="bf16")),
    ("gdn", dict(width=2, k_dim=256, v_dim=32)),
    ("kda", dict(width=2, k_dim=16, v_dim=64)),
    ("gdn", dict(width=16, layers=1)),
]


@pytest.mark.parametrize("rule,fields", CASES, ids=str)
def test_R75_native_bits(rule, fields):
    """R75, S1: outputs and every row of the pool, untouched NaN rows included; padding rows are zero."""
    r = Round(make_spec(rule, **fields), WINDOWS[fields["width"]], pad=2)
    assert_same_bits(r.run())


@pytest.mark.parametrize("block_v", [16, 32])
def test_R75_bits_do_not_depend_on_the_block(block_v):
    """R75, R36: other V blocks, the same bits."""
    r = Round(make_spec("gdn", width=2, v_dim=32), WINDOWS[2])
    assert_same_bits(r.run(block_v=block_v))


def test_R75_a_planted_change_of_order_is_seen(monkeypatch):
    """Planted fault: a plain halving without pair levels must change bits."""

    def plain(products, levels):
        return recurrence.halve([p.reshape(p.shape[0], 8, -1).sum(axis=2) for p in products])

    monkeypatch.setattr(recurrence, "lane_sums", plain)
    r = Round(make_spec("gdn", width=1, layers=1, slots=7), WINDOWS[1])
    with pytest.raises(AssertionError, match="ssm"):
        assert_same_bits(r.run())


def test_fused_prologue_leaves_the_bits_of_the_separate_one():
    """R77: raw inputs through the fused kernel equal the prologue kernel followed by the core kernel."""
    spec = make_spec("gdn", width=1, layers=1)
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=jnp.bfloat16):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    raw = jax_ssm.LinearInputs(
        normal(3, 2, 64), normal(3, 2, 64), normal(3, 4, 16), normal(3, 4), normal(3, 4),
        normal(4, dtype=jnp.float32), normal(4, dtype=jnp.float32),
    )  # fmt: skip
    state = jax_ssm.init_state(spec)
    state = state.replace(ssm=normal(*state.ssm.shape, dtype=jnp.float32))
    layout = jax_ssm.build_layout(spec, jnp.array([5, 2, 4]), jnp.zeros(3, jnp.int32))
    state, receipt = jax_ssm.prepare(spec, state, layout, KernelConfig("pallas"))
    fused, o_fused = jax_ssm.forward(spec, state, receipt, 0, raw)
    core = jax_ssm.gates.prologue(spec, raw, "pallas")
    apart, o_apart = jax_ssm.executors.forward_core(spec, state, receipt, 0, core)
    assert jnp.array_equal(o_fused, o_apart) and jnp.array_equal(fused.ssm, apart.ssm)


def test_unsupported_head_sizes_and_implementations_raise():
    """L1, M2: a clear ValueError names the size; an implementation that cannot run here is refused."""
    state = jnp.zeros((1, 2, 1, 24, 64))
    with pytest.raises(ValueError, match="V=24"):
        decode.tile_of(state, 8, 1)
    spec = make_spec()
    layout = jax_ssm.build_layout(spec, jnp.array([0]), jnp.array([0]))
    with pytest.raises(NotImplementedError, match="triton"):
        jax_ssm.prepare(spec, jax_ssm.init_state(spec), layout, KernelConfig("triton"))


def test_the_state_is_updated_in_place():
    """M1, R84: donated, the pool is aliased: no temporary of its size."""
    spec = make_spec(width=1, layers=1, slots=64)
    state = jax_ssm.init_state(spec)
    layout = jax_ssm.build_layout(spec, jnp.array([5]), jnp.array([0]))
    state, receipt = jax_ssm.prepare(spec, state, layout, KernelConfig("pallas"))
    core = jax_ssm.gates.CoreInputs(
        jnp.zeros((1, 2, 64)), jnp.zeros((1, 2, 64)), jnp.ones((1, 4, 1)), jnp.ones((1, 4)),
        jnp.zeros((1, 2, 64), jnp.bfloat16), jnp.zeros((1, 4, 16), jnp.bfloat16), jnp.zeros((1, 2, 64), jnp.bfloat16),
    )  # fmt: skip
    run = jax.jit(jax_ssm.executors.forward_core, static_argnums=0, donate_argnums=1)
    memory = run.lower(spec, state, receipt, jnp.int32(0), core).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= state.ssm.nbytes


GPU_CASES = [
    ("gdn", dict(q_heads=16, k_heads=16, v_heads=32, k_dim=128, v_dim=128, width=1), dict()),
    ("gdn", dict(k_dim=128, v_dim=128, width=1, ssm_dtype="bf16"), dict(block_v=16)),
    ("gdn", dict(k_dim=64, v_dim=64, width=1, act_dtype="fp32"), dict(block_v=32, num_warps=4)),
    ("gdn", dict(k_dim=128, v_dim=64, width=4), dict(block_v=16)),
    ("gdn", dict(k_dim=256, v_dim=32, width=4, ssm_dtype="bf16"), dict(num_warps=2)),
    ("gdn", dict(k_dim=128, v_dim=128, width=16, slots=6), dict()),
    ("kda", dict(k_dim=128, v_dim=128, width=1), dict()),
    ("kda", dict(k_dim=128, v_dim=128, width=4, ssm_dtype="bf16", lower_bound=-5.0), dict(block_v=16)),
    ("kda", dict(k_dim=64, v_dim=64, width=4, act_dtype="fp32"), dict(block_v=32, num_warps=2)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("rule,fields,config", GPU_CASES, ids=str)
def test_R75_three_implementations_agree(rule, fields, config):
    """R75, R77: PyTorch eager, Triton and Pallas, prologue and convolution included, dynamic windows and padding."""
    spec = make_spec(rule, **fields)
    w = spec.width
    rounds = [[(4, w, 1), (0, 1, 1), (3, min(2, w), min(2, w))], [(0, w, w), (3, min(3, w), 1)], [(4, min(2, w), 1), (0, w, w)]]
    assert_three_same(three_ways(spec, rounds, **config))
