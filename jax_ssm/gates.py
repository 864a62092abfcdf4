"""The prologue: query/key normalisation and gates, in fp32, from raw activations. One norm, one gate function.

Formulas (Gated DeltaNet, arXiv:2412.06464; Kimi Delta Attention, arXiv:2510.26692):
    k^ = k * rsqrt(sum k^2 + 1e-6)          q^ = q * rsqrt(sum q^2 + 1e-6) * K^-0.5
    g  = -exp(A_log) * softplus(a + dt_bias)                      GDN per value head, KDA per key channel
    g  = lower_bound * sigmoid(exp(A_log) * (a + dt_bias))        KDA with a bounded gate
    decay = exp(g), beta = sigmoid(b)
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_ssm.kernels import kernels
from jax_ssm.spec import L2NORM_EPS, SSMSpec
from jax_ssm.state import dtype, pytree

Array = jax.Array

# exp() of it is still finite, so a huge A_log is a clean reset (decay 0) and never inf * 0
MAX_A_LOG = 88.0
ARTANH_SERIES = tuple(2.0 / n for n in (1, 3, 5, 7, 9, 11, 13, 15))


@pytree()
class LinearInputs:
    """Inputs of one layer after the convolution: q [.., H, K], k [.., KH, K], v [.., HV, V] in the activation dtype;
    a [.., HV] (GDN) or [.., HV*K] (KDA) and b [.., HV] gate logits; A_log [HV], dt_bias [HV] or [HV*K] parameters."""

    q: Array
    k: Array
    v: Array
    a: Array
    b: Array
    A_log: Array
    dt_bias: Array


@pytree()
class CoreInputs:
    """What the recurrence reads: fp32 q [.., H, K] normalised and scaled, k_hat [.., KH, K] normalised,
    decay [.., HV, G], beta [.., HV]; and the raw q_raw [.., H, K], k [.., KH, K], v [.., HV, V] in the activation
    dtype: k and v become records, q_raw enters GDN's Gram coefficients (replay)."""

    q: Array
    k_hat: Array
    decay: Array
    beta: Array
    k: Array
    v: Array
    q_raw: Array


def round_to(x: Array, dtype) -> Array:
    """Round fp32 values to `dtype`, kept as fp32. XLA may drop a pair of converts, never a reduce_precision."""
    x = x.astype(jnp.float32)
    return lax.reduce_precision(x, 8, 7) if dtype == jnp.bfloat16 else x


def store(x: Array, dtype) -> Array:
    """Round once and store as `dtype`."""
    return round_to(x, dtype).astype(dtype)


row_sum = functools.partial(jnp.sum, axis=-1)


def l2norm(x: Array, total=row_sum) -> Array:
    """x * rsqrt(sum(x^2) + 1e-6) over the last axis, in fp32; a zero row stays zero. Prefill, verify and fold share it."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(total(x * x, keepdims=True) + L2NORM_EPS)


def reciprocal(d: Array) -> Array:
    """1 / d for d in [1, 2]: a linear start and three Newton steps; GPU compilers round divisions differently."""
    r = 24.0 / 17.0 - d * (8.0 / 17.0)
    for _ in range(3):
        r = r * (2.0 - d * r)
    return r


def sigmoid(x: Array) -> Array:
    """1 / (1 + e) for x >= 0 and e / (1 + e) below, with e = exp(-|x|)."""
    e = jnp.exp(-jnp.abs(x))
    r = reciprocal(1.0 + e)
    return jnp.where(x >= 0.0, r, e * r)


def softplus(x: Array) -> Array:
    """log(1 + exp(x)) as max(x, 0) + log1p(exp(-|x|)), with log1p(e) = 2 artanh((e/2) / (1 + e/2)) as an explicit series.

    Library log1p differs in the last bit between GPU compilers; these multiplications and additions do not. Above 20 the
    second term is below half an ulp of x, so the function is linear there.
    """
    e = jnp.exp(-jnp.abs(x))
    h = e * 0.5
    s = h * reciprocal(1.0 + h)
    z = s * s
    p = jnp.full_like(x, ARTANH_SERIES[-1])
    for c in ARTANH_SERIES[-2::-1]:
        p = p * z + c
    return jnp.maximum(x, 0.0) + s * p


def log_decay(spec: SSMSpec, a: Array, A_log: Array, dt_bias: Array) -> Array:
    """g [.., HV, G] <= 0 from the gate logits."""
    x = a.astype(jnp.float32) + dt_bias.astype(jnp.float32)
    x = x.reshape(a.shape[:-1] + (spec.v_heads, spec.gates))
    rate = jnp.exp(jnp.minimum(A_log.astype(jnp.float32), MAX_A_LOG))[:, None]
    if spec.lower_bound is not None:
        return spec.lower_bound * sigmoid(rate * x)
    return -rate * softplus(x)


def check_inputs(spec: SSMSpec, inputs: LinearInputs) -> None:
    """Raise ValueError for a shape or dtype that this spec cannot take. Leading axes are free but must agree."""
    lead, gates = inputs.q.shape[:-2], spec.v_heads * spec.gates
    shapes = {
        "q": lead + (spec.q_heads, spec.k_dim),
        "k": lead + (spec.k_heads, spec.k_dim),
        "v": lead + (spec.v_heads, spec.v_dim),
        "a": lead + (gates,),
        "b": lead + (spec.v_heads,),
        "A_log": (spec.v_heads,),
        "dt_bias": (gates,),
    }
    for name, shape in shapes.items():
        x = getattr(inputs, name)
        if x.shape != shape:
            raise ValueError(f"inputs.{name}.shape={x.shape} is not allowed: this spec needs {shape}")
        if name in "qkv" and x.dtype != dtype(spec.act_dtype):
            raise ValueError(f"inputs.{name}.dtype={x.dtype} is not allowed: this spec needs {spec.act_dtype!r}")


def prologue(spec: SSMSpec, inputs: LinearInputs, implementation: str = "xla") -> CoreInputs:
    """Everything the core reads, from the raw inputs [T, ..]. beta is the fp32 sigmoid of the widened logit."""
    check_inputs(spec, inputs)
    if implementation != "xla":
        x = inputs
        core = kernels(implementation).prologue(
            x.q, x.k, x.a, x.b, x.A_log, x.dt_bias, scale=spec.scale, lower_bound=spec.lower_bound
        )
        return CoreInputs(*core, k=x.k, v=x.v, q_raw=x.q)
    act = inputs.k.dtype
    k, v, q = (round_to(x, act) for x in (inputs.k, inputs.v, inputs.q))
    return CoreInputs(
        q=l2norm(q) * spec.scale,
        k_hat=l2norm(k),
        decay=jnp.exp(log_decay(spec, inputs.a, inputs.A_log, inputs.dt_bias)),
        beta=sigmoid(inputs.b.astype(jnp.float32)),
        k=k.astype(act),
        v=v.astype(act),
        q_raw=q.astype(act),
    )
