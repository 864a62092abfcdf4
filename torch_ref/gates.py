"""The prologue: canonical sums, query/key normalisation and gates, in fp32, from raw activations.

Formulas (Gated DeltaNet, arXiv:2412.06464; Kimi Delta Attention, arXiv:2510.26692):
    k^ = k * rsqrt(sum k^2 + 1e-6)          q^ = (q * rsqrt(sum q^2 + 1e-6)) * K^-0.5
    g  = -exp(A_log) * softplus(a + dt_bias)                      GDN per value head, KDA per key channel
    g  = lower_bound * sigmoid(exp(A_log) * (a + dt_bias))        KDA with a bounded gate
    decay = exp(g), beta = sigmoid(b)

One norm and one gate function, of multiplications, additions, exp and rsqrt only. No division: GPU compilers differ in
how they round it. No `torch.sigmoid`: on a CPU its vector body and its scalar tail round differently, so its bits would
depend on the batch; exp and rsqrt do not have that fault.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_ref.spec import L2NORM_EPS, SSMSpec
from torch_ref.state import dtype

Tensor = torch.Tensor
LANES = 8
ARTANH_SERIES = tuple(2.0 / n for n in (1, 3, 5, 7, 9, 11, 13, 15))
MAX_A_LOG = 88.0  # exp stays finite, so that a rate times a softplus of 0 is 0 and not inf * 0


# ---------------------------------------------------------------------------------------------------- canonical sum


def pair_levels(storage: str, n: int) -> int:
    """How many pair levels the canonical sum over n values takes.

    storage "fp32" / "bf16": the dtype that the summed operand is stored in; 2 / 3 levels, the log2 of its elements in
    16 bytes. More when n > 128 / 256, so that at most 32 values remain; never more than n has.
    """
    log2 = (n - 1).bit_length()
    return min(max({"fp32": 2, "bf16": 3}[storage], log2 - 5), log2)


def pad_last(p: Tensor, n: int) -> Tensor:
    """`p` with its last axis zero-padded to n."""
    return torch.cat([p, p.new_zeros(p.shape[:-1] + (n - p.shape[-1],))], dim=-1) if p.shape[-1] < n else p


def pair_sums(p: Tensor, levels: int) -> Tensor:
    """`levels` times p_i <- p_2i + p_2i+1 over the last axis, after zero-padding it to a power of two."""
    log2 = (p.shape[-1] - 1).bit_length()
    p = pad_last(p, 1 << log2)
    for _ in range(min(levels, log2)):
        p = p[..., 0::2] + p[..., 1::2]
    return p


def halve(p: Tensor, n: int) -> Tensor:
    """First half + second half of the last axis, repeatedly, until n values remain; fewer are zero-padded to n."""
    while p.shape[-1] > n:
        half = p.shape[-1] // 2
        p = p[..., :half] + p[..., half:]
    return pad_last(p, n)


def canonical_sum(p: Tensor, levels: int) -> Tensor:
    """Sum of fp32 `p` [.., n] over its last axis in the canonical order; returns [..].

    `levels` pair levels p_i <- p_2i + p_2i+1, then first half + second half until one value remains. An n that is no
    power of two is zero-padded to the next one. Every addition rounds by itself.
    """
    return halve(pair_sums(p, levels), 1)[..., 0]


def lane_sums(p: Tensor, levels: int) -> Tensor:
    """The canonical sum stopped at 8 values: [.., 8], zero-padded when fewer remain. `halve(.., 1)` finishes it."""
    return halve(pair_sums(p, levels), LANES)


# --------------------------------------------------------------------------------------------------------- prologue


@dataclass(frozen=True)
class LinearInputs:
    """Inputs of one layer after the convolution: q [.., H, K], k [.., KH, K], v [.., HV, V] in the activation dtype;
    a [.., HV] (GDN) or [.., HV*K] (KDA) and b [.., HV] gate logits; A_log [HV], dt_bias [HV] or [HV*K] parameters."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor


@dataclass(frozen=True)
class CoreInputs:
    """What the recurrence reads: fp32 q [.., H, K] normalised and scaled, k_hat [.., KH, K] normalised,
    decay [.., HV, G], beta [.., HV]; and the raw q_raw [.., H, K], k [.., KH, K], v [.., HV, V] in the activation
    dtype: k and v become records, q_raw enters GDN's Gram coefficients (replay)."""

    q: Tensor
    k_hat: Tensor
    decay: Tensor
    beta: Tensor
    k: Tensor
    v: Tensor
    q_raw: Tensor


def inverse_norm(x: Tensor) -> Tensor:
    """r = rsqrt(sum(x^2) + 1e-6) over the last axis, [..] fp32; pair levels by the dtype of `x`."""
    storage = "bf16" if x.dtype == torch.bfloat16 else "fp32"
    x = x.float()
    return torch.rsqrt(canonical_sum(x * x, pair_levels(storage, x.shape[-1])) + L2NORM_EPS)


def l2norm(x: Tensor) -> Tensor:
    """x * rsqrt(sum(x^2) + 1e-6) over the last axis, in fp32; a zero row stays zero. Prefill, verify and fold share it."""
    return x.float() * inverse_norm(x)[..., None]


def reciprocal(d: Tensor) -> Tensor:
    """1 / d for d in [1, 2]: a linear start (relative error 1/17) and three Newton steps r <- r (2 - d r); within 2 ulp."""
    r = 24.0 / 17.0 - d * (8.0 / 17.0)
    for _ in range(3):
        r = r * (2.0 - d * r)
    return r


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e) for x >= 0 and e / (1 + e) below, with e = exp(-|x|)."""
    e = torch.exp(-x.abs())
    r = reciprocal(1.0 + e)
    return torch.where(x >= 0.0, r, e * r)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) as max(x, 0) + log1p(exp(-|x|)), with log1p(e) = 2 artanh((e/2) / (1 + e/2)) as an explicit series.

    Library log1p differs in the last bit between GPU compilers; these multiplications and additions do not. Above 20 the
    second term is below half an ulp of x, so the function is linear there.
    """
    e = torch.exp(-x.abs())
    h = e * 0.5
    s = h * reciprocal(1.0 + h)
    z = s * s
    p = torch.full_like(x, ARTANH_SERIES[-1])
    for c in ARTANH_SERIES[-2::-1]:
        p = p * z + c
    return x.clamp(min=0.0) + s * p


def log_decay(spec: SSMSpec, a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """g [.., HV, G] <= 0 from the gate logits."""
    x = a.float() + dt_bias.float()
    x = x.reshape(a.shape[:-1] + (spec.v_heads, spec.gates))
    rate = torch.exp(A_log.float().clamp(max=MAX_A_LOG))[:, None]
    if spec.lower_bound is not None:
        return spec.lower_bound * sigmoid(rate * x)
    return -rate * softplus(x)


def gate(spec: SSMSpec, a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """decay = exp(g) [.., HV, G] fp32, in [0, 1]; g = -inf is a clean reset to 0."""
    return torch.exp(log_decay(spec, a, A_log, dt_bias))


def check_inputs(spec: SSMSpec, inputs: LinearInputs) -> None:
    """Raise ValueError for a shape or dtype that this spec cannot take. Leading axes are free but must agree."""
    lead, act = tuple(inputs.q.shape[:-2]), dtype(spec.act_dtype)
    gates = spec.v_heads * spec.gates
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
        if tuple(x.shape) != shape:
            raise ValueError(f"inputs.{name}.shape={tuple(x.shape)} is not allowed: this spec needs {shape}")
        if name in "qkv" and x.dtype != act:
            raise ValueError(f"inputs.{name}.dtype={x.dtype} is not allowed: act_dtype={spec.act_dtype!r} needs {act}")


def prologue(spec: SSMSpec, inputs: LinearInputs, kernels: str = "eager") -> CoreInputs:
    """Everything the core reads, from the raw inputs. beta is the fp32 sigmoid of the widened logit."""
    check_inputs(spec, inputs)
    if kernels == "triton":
        from kernels_triton import gates

        x = inputs
        raw = (y.contiguous() for y in (x.q, x.k, x.a, x.b, x.A_log, x.dt_bias))
        core = gates.prologue(*raw, scale=spec.scale, lower_bound=spec.lower_bound)
        return CoreInputs(*core, k=x.k, v=x.v, q_raw=x.q)
    return CoreInputs(
        q=l2norm(inputs.q) * spec.scale,
        k_hat=l2norm(inputs.k),
        decay=gate(spec, inputs.a, inputs.A_log, inputs.dt_bias),
        beta=sigmoid(inputs.b.float()),
        k=inputs.k,
        v=inputs.v,
        q_raw=inputs.q,
    )
