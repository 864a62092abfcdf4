"""The one-token recurrence and its replay over records: the only definition, used by every mode, fold and export.

    S <- decay * S;   d = (v - S k^) * beta;   S <- S + d k^T;   o = S q^          (S is [V, K], o from the unrounded S)

Order of the fp32 operations, each rounded by itself:
    s1[v,k] = s[v,k] * decay[k]                    decay is one number per head in GDN
    h[v]    = csum_k(s1[v,k] * k^[k])              csum: the canonical sum, pair levels by ssm_dtype
    d[v]    = (v[v] - h[v]) * beta
    s2[v,k] = s1[v,k] + d[v] * k^[k]
    o[v]    = csum_k(s2[v,k] * q^[k])
"""

from __future__ import annotations

import torch

from torch_ref.gates import canonical_sum, l2norm, pair_levels
from torch_ref.spec import SSMSpec
from torch_ref.state import dtype

Tensor = torch.Tensor


def step(spec: SSMSpec, s: Tensor, k_hat: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """One token. s [.., V, K], k_hat [.., K], v [.., V], decay [.., G], beta [..], all fp32; returns new s and d [.., V]."""
    s = s * decay[..., None, :]
    d = (v - read(spec, s, k_hat)) * beta[..., None]
    s = s + d[..., :, None] * k_hat[..., None, :]
    return s, d


def read(spec: SSMSpec, s: Tensor, x: Tensor) -> Tensor:
    """S x: s [.., V, K], x [.., K] -> [.., V]."""
    return canonical_sum(s * x[..., None, :], pair_levels(spec.ssm_dtype, spec.k_dim))


def round_state(spec: SSMSpec, s: Tensor) -> Tensor:
    """Round an fp32 state to ssm_dtype, kept as fp32."""
    return s.to(dtype(spec.ssm_dtype)).float()


def expand_heads(x: Tensor, v_heads: int, axis: int) -> Tensor:
    """Repeat grouped heads along `axis` so that value head i sees head i // (HV / heads)."""
    return x.repeat_interleave(v_heads // x.shape[axis], dim=axis)


def replay(spec: SSMSpec, s: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, n: int, *, round_each: bool) -> Tensor:
    """Advance s [.., V, K] fp32 by the first n raw records k [.., N, K], v [.., N, V], decay [.., N, G], beta [.., N].

    Key heads are already expanded to value heads. k^ is recomputed from raw k by the one norm function. Rounded to
    ssm_dtype after every token (compact commit) or once at the end (fold, merge, snapshot, export); fp32 either way.
    Records at n and beyond are never read.
    """
    for j in range(n):
        k_hat = l2norm(k[..., j, :])
        s, _ = step(spec, s, k_hat, v[..., j, :].float(), decay[..., j, :], beta[..., j])
        if round_each:
            s = round_state(spec, s)
    return s if round_each else round_state(spec, s)
