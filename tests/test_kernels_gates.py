"""Prologue and convolution kernels: within 2 ulp of torch_ref on a CPU, the same bits on a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from kernel_harness import ACT, Round, different, jax_leaves, make_spec, random_inputs, to_jax, to_numpy

import jax_ssm
import torch_ref
from kernels_pallas import recurrence
from torch_ref.state import leaves

RULES = [
    ("gdn", {}),
    ("kda", {}),
    ("kda", dict(lower_bound=-5.0)),
    ("gdn", dict(q_heads=3, k_heads=1, v_heads=12, act_dtype="fp32")),
]


def ulps(a, b) -> float:
    """Largest distance of two fp32 arrays in units of the last place of b."""
    a, b = (to_numpy(x).astype(np.float64) for x in (a, b))
    return float((np.abs(a - b) / np.spacing(np.abs(b).astype(np.float32)).clip(np.finfo(np.float32).tiny)).max())


def both_prologues(spec, tokens: int, device: str, kernels: str):
    inputs = random_inputs(spec, tokens, torch.Generator().manual_seed(5), device)
    jax_inputs = jax_ssm.LinearInputs(**{name: to_jax(x) for name, x in vars(inputs).items()})
    core = jax.jit(jax_ssm.gates.prologue, static_argnums=(0, 2))(spec, jax_inputs, "pallas")
    names = ("q", "k_hat", "decay", "beta")
    return inputs, {name: (getattr(torch_ref.prologue(spec, inputs, kernels), name), getattr(core, name)) for name in names}


@pytest.mark.parametrize("rule,fields", RULES, ids=str)
def test_R77_prologue_is_within_2_ulp_on_a_cpu(rule, fields):
    """R77: the norms and gates differ from torch_ref only by the libraries' exp and rsqrt.

    The gate's exponent magnifies one ulp of its argument, so decays are compared as log decays are: by absolute error.
    """
    _, arrays = both_prologues(make_spec(rule, **fields), 5, "cpu", "eager")
    assert all(ulps(*arrays[name]) <= 2 for name in ("q", "k_hat", "beta"))
    np.testing.assert_allclose(to_numpy(arrays["decay"][1]), to_numpy(arrays["decay"][0]), rtol=2e-6, atol=1e-7)


def test_N10_zero_rows_and_extreme_gates_are_finite():
    """N6, N8, N10: a zero key stays zero; logits of +-1e4 give decays 0 and 1; A_log of 200 is a clean reset."""
    spec = make_spec("gdn")
    x = random_inputs(spec, 3, torch.Generator().manual_seed(1), "cpu")
    x.k[0], x.a[1], x.a[2] = 0, 1e4, -1e4
    x.A_log[3] = 200.0
    core = jax_ssm.gates.prologue(spec, jax_ssm.LinearInputs(**{name: to_jax(y) for name, y in vars(x).items()}), "pallas")
    assert not core.k_hat[0].any() and not core.decay[1].any() and (core.decay[2, :3] == 1).all()
    assert core.decay[0, 3, 0] == 0 and jnp.isfinite(core.decay).all()


def longest_sum(f, *args) -> int:
    """The longest axis that a traced function leaves to a library sum, 0 if there is none."""
    sums = [e for e in jax.make_jaxpr(f)(*args).eqns if e.primitive.name == "reduce_sum"]
    return max((e.invars[0].aval.shape[e.params["axes"][0]] for e in sums), default=0)


@pytest.mark.parametrize("n", [1, 2, 8, 32])
def test_R75_a_canonical_sum_leaves_no_order_to_the_compiler(n):
    """R75: as compiled for a GPU, the library only ever adds two values, whatever the number of rows of the tile."""
    x = jnp.ones((1, n))
    assert longest_sum(lambda p: recurrence.finish(p, False), x) <= 2
    assert longest_sum(lambda p: recurrence.row_sums(p, 0, False), x) <= 2
    assert n <= 2 or longest_sum(lambda p: jnp.sum(p, axis=1), x) == n, "planted: a library sum over the whole row is seen"


def conv_pair(spec, windows, device: str, kernels: str):
    """One convolution in both frameworks: {name: (torch, jax)} of y and the state."""
    r = Round(spec, windows, pad=2)
    x = torch.randn(len(r.ids), spec.channels, generator=r.g).to(ACT[spec.act_dtype])
    weight, bias = torch.randn(spec.channels, spec.conv_width, generator=r.g), torch.randn(spec.channels, generator=r.g)
    for slot, _ in windows:
        window = r.state.conv[:, slot]
        window[:, :, r.state.accepted[slot] :][:, :, : spec.conv_width - 1] = 0.25 * (slot + 1)
    state = torch_ref.ConvSSMState(*(y.to(device) for y in (r.state.ssm, r.state.conv, r.state.accepted)), None)
    other = r.jax.replace(conv=to_jax(state.conv))
    layout = torch_ref.build_layout(spec, r.ids.to(device), r.at.to(device))
    receipt = torch_ref.prepare(spec, state, layout, kernels=kernels)[1]
    state, y = torch_ref.conv_forward(spec, state, receipt, 1, x.to(device), weight.to(device), bias.to(device))
    jax_layout = jax_ssm.build_layout(spec, to_jax(r.ids), to_jax(r.at))
    other, jax_receipt = jax_ssm.prepare(spec, other, jax_layout, jax_ssm.KernelConfig("pallas"))
    other, z = jax_ssm.conv_forward(spec, other, jax_receipt, 1, to_jax(x), to_jax(weight), to_jax(bias))
    theirs = jax_leaves(other)
    return {"y": (y, z)} | {name: (v, theirs[name]) for name, v in leaves(state).items()}


@pytest.mark.parametrize("width,windows", [(1, [(5, 1), (2, 1)]), (4, [(3, 2), (0, 4), (6, 1)])])
def test_conv_windows_and_outputs(width, windows):
    """R75: windows bit for bit, NaN of other slots and dead columns included; outputs up to the library's exp."""
    arrays = conv_pair(make_spec("gdn", width=width, act_dtype="fp32"), windows, "cpu", "eager")
    y, z = (to_numpy(x) for x in arrays.pop("y"))
    np.testing.assert_allclose(z, y, rtol=3e-6, atol=1e-6)
    assert not z[-2:].any() and np.isfinite(z).all()
    assert not any(different(a, b) for a, b in arrays.values())


@pytest.mark.gpu
@pytest.mark.parametrize("rule,fields", [*RULES, ("gdn", dict(q_heads=16, k_heads=16, v_heads=32, k_dim=128))], ids=str)
def test_R77_prologue_bits_on_a_gpu(rule, fields):
    """R77, N18: PyTorch eager = Triton = Pallas for q^, k^, decay and beta of 2,000 tokens."""
    spec = make_spec(rule, **fields)
    inputs, eager = both_prologues(spec, 2000, "cuda", "eager")
    wrong = {name: different(*pair) for name, pair in eager.items()}
    twin = torch_ref.prologue(spec, inputs, "triton")
    wrong |= {f"{name} (triton)": different(pair[0], getattr(twin, name)) for name, pair in eager.items()}
    assert not any(wrong.values()), wrong


@pytest.mark.gpu
@pytest.mark.parametrize("act", ["fp32", "bf16"])
def test_conv_bits_on_a_gpu(act):
    """R75: outputs and windows of the three implementations."""
    spec, windows = make_spec("gdn", width=4, act_dtype=act), [(3, 2), (0, 4), (6, 1)]
    for kernels in ("eager", "triton"):
        arrays = conv_pair(spec, windows, "cuda", kernels)
        wrong = {name: different(a, b) for name, (a, b) in arrays.items()}
        assert not any(wrong.values()), (kernels, wrong)
