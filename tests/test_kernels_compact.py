"""Compact kernels: verify outputs and records, and the commit that re-runs the accepted prefix, to the bit of torch_ref."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from kernel_harness import Round, assert_same_bits, assert_three_same, make_spec, three_ways

from kernels_pallas import decode
from kernels_pallas.recurrence import pair_levels, row_sums
from torch_ref.gates import inverse_norm

WINDOWS = [(6, 2), (2, 3), (4, 1)]
CASES = [
    ("gdn", dict()),
    ("gdn", dict(ssm_dtype="bf16", v_heads=6)),
    ("gdn", dict(act_dtype="fp32", ssm_dtype="bf16", q_heads=1, k_dim=16)),
    ("kda", dict(k_dim=128, v_dim=8 * 2)),
    ("kda", dict(ssm_dtype="bf16", act_dtype="fp32")),
]


def agreeing_keys(keys: torch.Tensor) -> torch.Tensor:
    """Raw keys whose inverse norms are the same bits in both frameworks on this machine, by repeating rows that agree."""
    levels = pair_levels(jnp.bfloat16 if keys.dtype == torch.bfloat16 else jnp.float32, keys.shape[-1])
    rows = keys.reshape(-1, keys.shape[-1])
    x = jnp.asarray(rows.float().numpy())
    theirs = np.asarray(jax.lax.rsqrt(row_sums(x * x, levels, True) + 1e-6))
    good = np.flatnonzero(theirs.view(np.int32) == inverse_norm(rows).numpy().view(np.int32))
    assert good.size > rows.shape[0] // 4, "too few keys agree to test anything"
    return rows[good[np.arange(rows.shape[0]) % good.size]].reshape(keys.shape)


def compact_round(rule: str, fields: dict) -> Round:
    r = Round(make_spec(rule, "compact", width=3, **fields), WINDOWS, pad=2)
    for core in r.cores:
        core.k.copy_(agreeing_keys(core.k))
        core.v.mul_(0.5)
    return r


@pytest.mark.parametrize("rule,fields", CASES, ids=str)
def test_R75_compact_bits(rule, fields):
    """R75, N12: outputs, the records of this window and nothing else, then the committed state of every layer."""
    r = compact_round(rule, fields)
    before = r.state.ssm.clone()
    arrays = r.run()
    assert_same_bits(arrays)
    assert torch.equal(r.state.ssm.nan_to_num(), before.nan_to_num()), "verify must not write the state"
    assert_same_bits(r.accept([2, 3, 0] + [0] * 4))


def test_R75_a_planted_change_of_order_is_seen(monkeypatch):
    """Planted fault: the decay applied after the sum instead of before it must change the committed bits."""

    def late_decay(s, k_hat, v, decay, beta, levels, interpret):
        d = (v - decode.read(s, k_hat, levels, interpret) * decay) * beta
        wide = jnp.broadcast_to(d[:, None], s[0].shape)
        return [x * decay + wide * k for x, k in zip(s, k_hat, strict=True)], d

    r = compact_round("gdn", {})
    assert_same_bits(r.run())
    monkeypatch.setattr(decode, "step", late_decay)
    with pytest.raises(AssertionError, match="ssm"):
        assert_same_bits(r.accept([2, 3, 1] + [0] * 4))


GPU_CASES = [
    ("gdn", dict(q_heads=16, k_heads=16, v_heads=32, k_dim=128, v_dim=128), dict()),
    ("gdn", dict(k_dim=128, v_dim=64, ssm_dtype="bf16"), dict(block_v=16)),
    ("kda", dict(k_dim=128, v_dim=128, ssm_dtype="bf16"), dict(block_v=32, num_warps=2)),
    ("kda", dict(k_dim=256, v_dim=32, act_dtype="fp32"), dict(block_v=16, num_warps=4)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("rule,fields,config", GPU_CASES, ids=str)
def test_R75_three_implementations_agree(rule, fields, config):
    """R75, R77: PyTorch eager, Triton and Pallas, prologue and convolution included."""
    spec = make_spec(rule, "compact", width=4, **fields)
    rounds = [[(5, 4, 3), (0, 1, 1), (3, 2, 2)], [(0, 4, 4), (3, 3, 1)], [(5, 2, 1), (3, 4, 3), (0, 4, 2)]]
    assert_three_same(three_ways(spec, rounds, **config))
