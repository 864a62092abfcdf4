"""Merge, snapshot and export by kernel: the bits of torch_ref in every mode, straight into the target."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from kernel_harness import jax_state, make_spec
from replay_harness import PALLAS, Pair, agreeing, assert_none, differing, jit

import jax_ssm
import torch_ref
from benchmarks.twins import device, make_side, poisoned_state
from kernels_pallas import materialize, recurrence

MODES = {"native": dict(width=3), "compact": dict(width=3), "replay": dict(width=2, history=8)}
RULES = [("gdn", "fp32"), ("kda", "bf16")]
snapshot, merge = jit(jax_ssm.snapshot, (0, 3)), jit(jax_ssm.merge, (0, 3))
export = jit(jax_ssm.export_into, (0, 6))


def pair(rule, ssm, mode, seed=0, **fields):
    """A state with live records in both halves, NaN beyond them, and accepted rows of every offset."""
    spec = make_spec(rule, mode, ssm_dtype=ssm, **(MODES[mode] | fields))
    both = Pair(spec, seed)
    state, g = both.state, both.g
    state.accepted[: spec.hold] = torch.arange(spec.hold, dtype=torch.int32) % spec.width
    if mode == "replay":
        h, length = state.extra, spec.history
        h.cursor[:] = torch.tensor(
            [0, 3, 2 * length + 5, length, 2 * length, 3 * length, 1, 0][: spec.slots], dtype=torch.int32
        )
        for slot in range(spec.hold):
            n, phase = int(h.cursor[slot]) % (2 * length), int(h.cursor[slot]) // (2 * length)
            at = slice(phase * length, phase * length + n)
            if n:
                h.k[:, slot, :, at] = agreeing((spec.layers, spec.k_heads, n, spec.k_dim), spec.act_dtype, g)
                h.v[:, slot, :, at] = torch.randn(h.v[:, slot, :, at].shape, generator=g).to(h.v.dtype)
                h.decay[:, slot, :, at] = 0.5 + 0.5 * torch.rand(h.decay[:, slot, :, at].shape, generator=g)
                h.beta[:, slot, :, at] = torch.rand(h.beta[:, slot, :, at].shape, generator=g)
    both.jax = jax_state(state)
    return both


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule,ssm", RULES)
def test_R79_snapshot_and_merge(rule, ssm, mode):
    """R79, R86, N12: every live count, both halves, accepted rows other than 0; merge leaves the other slots alone."""
    both, slots = pair(rule, ssm, mode), [2, 5, 0, 3, 1]
    spec = both.spec
    want, got = torch_ref.snapshot(spec, both.state, slots), snapshot(spec, both.jax, jnp.asarray(slots), PALLAS)
    assert_none({"conv": differing(want[0], got[0]), "ssm": differing(want[1], got[1])})
    both.state = torch_ref.merge(spec, both.state, slots)
    both.jax = merge(spec, both.jax, jnp.asarray(slots), PALLAS)
    assert_none(both.compare())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule,ssm", RULES)
def test_R38_export_writes_pages_and_nothing_else(rule, ssm, mode):
    """R38, R85: dropped requests (page or slot out of range, beyond n), a page named twice, untouched NaN pages."""
    both = pair(rule, ssm, mode)
    spec = both.spec
    slots, pages = [2, spec.hold, 5, 0, 3, 1], [4, 0, 9, 1, 4, 2]
    want = torch_ref.init_pages(spec, 6)
    for x in (want.ssm, want.conv):
        x.fill_(float("nan"))
    empty = (jnp.full(x.shape, jnp.nan, like.dtype) for x, like in ((want.ssm, both.jax.ssm), (want.conv, both.jax.conv)))
    got = jax_ssm.Pages(*empty)
    want = torch_ref.export_into(spec, both.state, want, pages, slots, 5)
    got = export(spec, both.jax, got, jnp.asarray(pages), jnp.asarray(slots), jnp.int32(5), PALLAS)
    assert_none({"ssm": differing(want.ssm, got.ssm), "conv": differing(want.conv, got.conv)})
    assert np.isnan(np.asarray(got.ssm[2], np.float32)).all() and not np.isnan(np.asarray(got.ssm[4], np.float32)).any()
    assert_none(both.compare())


def test_R79_a_planted_order_of_the_decay_is_seen(monkeypatch):
    """Planted fault: the decay applied after the read, as some kernels do, must change bits."""

    def wrong(s, k_hat, v, decay, beta, levels, interpret):
        d = (v - recurrence.read(s, k_hat, levels, interpret) * decay) * beta
        wide = jnp.broadcast_to(d[:, None], s[0].shape)
        return [x * decay + wide * k for x, k in zip(s, k_hat, strict=True)], d

    monkeypatch.setattr(materialize, "step", wrong)
    both = pair("gdn", "fp32", "replay", layers=1)
    want = torch_ref.snapshot(both.spec, both.state, [3, 5])[1]
    got = jax.jit(jax_ssm.snapshot, static_argnums=(0, 3))(both.spec, both.jax, jnp.asarray([3, 5]), PALLAS)[1]
    assert differing(want, got)


def everything_materialised(kind: str, spec, state) -> dict:
    """Snapshot, export and merge of the slots of a poisoned state in one implementation: all that they leave."""
    side, slots = make_side(kind, spec, state), [2, 5, 0, 3, 1]
    pages = torch_ref.init_pages(spec, 6, state.ssm.device)
    for x in (pages.ssm, pages.conv):
        x.fill_(float("nan"))
    made = dict(zip(("snapshot conv", "snapshot ssm"), side.snapshot(slots), strict=True))
    pages = side.export(pages, [4, 0, 9, 1, 5], slots, 4)
    side.merge(slots)
    return made | {"pages ssm": pages.ssm, "pages conv": pages.conv} | side.arrays()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule,ssm", RULES)
def test_R79_bits_on_a_gpu(rule, ssm, mode):
    """R75, R79, R38: snapshot, export and merge in PyTorch eager, Triton and Pallas."""
    spec = make_spec(rule, mode, ssm_dtype=ssm, k_dim=128, v_dim=128, **MODES[mode])
    state = poisoned_state(spec, [2, 5, 0, 3, 1], torch.Generator().manual_seed(0), device())
    want, *others = (everything_materialised(kind, spec, state) for kind in ("eager", "triton", "pallas"))
    assert_none({f"{i} {name}": differing(x, other[name]) for i, other in enumerate(others) for name, x in want.items()})
