"""Float64 oracle of the recurrence, the convolution and the gates: plain numpy, no code of either package.

Per value head, from a zero state, over the accepted tokens only, in the literal form of the papers (S is [K, V]):

    S <- decay * S;   u = beta * (v - S^T k);   S <- S + k u^T;   o = S^T q

k and q are l2-normalised with 1e-6 inside the square root, q is scaled by K**-0.5, beta = sigmoid(b), value head i uses
key head i // (HV / KH). `spec` below is any object with the field names of a specification; nothing else is read from it.
Arrays may have any leading axes, so many requests run at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
STORAGE = {"fp32": np.dtype(np.float32), "bf16": BF16}


def rounded(x, name: str) -> np.ndarray:
    """`x` rounded to nearest even in storage dtype "fp32" or "bf16", as float64."""
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float64).astype(np.float32).astype(STORAGE[name]).astype(np.float64)


def l2norm(x) -> np.ndarray:
    x = np.asarray(x, np.float64)
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def sigmoid(x) -> np.ndarray:
    return np.exp(-np.logaddexp(0.0, -np.asarray(x, np.float64)))


def decay(spec, a, A_log, dt_bias) -> np.ndarray:
    """[.., HV, G] = exp(g), G = 1 (GDN) or K (KDA)."""
    x = np.asarray(a, np.float64) + np.asarray(dt_bias, np.float64)
    x = x.reshape(x.shape[:-1] + (spec.v_heads, -1))
    rate = np.exp(np.asarray(A_log, np.float64))[..., :, None]
    if spec.lower_bound is not None:
        return np.exp(spec.lower_bound * sigmoid(rate * x))
    return np.exp(-rate * np.logaddexp(0.0, x))


def expand(x, v_heads: int) -> np.ndarray:
    """[.., heads, n] -> [.., HV, n] with value head i reading head i // (HV / heads)."""
    group = v_heads // x.shape[-2]
    return x[..., np.arange(v_heads) // group, :]


def step(s, q, k, v, alpha, beta):
    """One token of the literal formula: s [.., K, V]; q, k [.., K]; v [.., V]; alpha [.., G]; beta [..] -> (s, o)."""
    s = alpha[..., :, None] * s
    u = beta[..., None] * (v - np.einsum("...kv,...k->...v", s, k))
    s = s + k[..., :, None] * u[..., None, :]
    return s, np.einsum("...kv,...k->...v", s, q)


def conv_step(window, x, weight, bias=None):
    """One token: window [.., C, kw-1] oldest first, x [.., C], weight [C, kw] -> (new window, silu(w . inputs + bias))."""
    full = np.concatenate([window, x[..., None]], axis=-1)
    y = np.sum(full * weight, axis=-1)
    if bias is not None:
        y = y + bias
    return full[..., 1:], y * sigmoid(y)


@dataclass(frozen=True)
class Tokens:
    """Raw inputs of tokens for all layers, leading axes free: x [.., layers, C] convolution input; q [.., layers, H, K],
    k [.., layers, KH, K], v [.., layers, HV, V], a [.., layers, HV * G], b [.., layers, HV] recurrence input."""

    x: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    a: np.ndarray
    b: np.ndarray

    def at(self, index) -> Tokens:
        return Tokens(**{name: value[index] for name, value in vars(self).items()})


@dataclass(frozen=True)
class Params:
    """Per layer: A_log [layers, HV], dt_bias [layers, HV * G], weight [layers, C, kw], bias [layers, C]."""

    A_log: np.ndarray
    dt_bias: np.ndarray
    weight: np.ndarray
    bias: np.ndarray


def core(spec, params: Params, tokens: Tokens):
    """(q, k, v, alpha, beta) of tokens with heads expanded: [.., layers, HV, ..], float64."""
    q = expand(l2norm(tokens.q) * spec.k_dim**-0.5, spec.v_heads)
    k = expand(l2norm(tokens.k), spec.v_heads)
    alpha = decay(spec, tokens.a, params.A_log, params.dt_bias)
    return q, k, np.asarray(tokens.v, np.float64), alpha, sigmoid(tokens.b)


@dataclass
class Requests:
    """The accepted history of N requests, as state s [N, layers, HV, K, V], conv window [N, layers, C, kw-1], lengths.

    state_dtype: round the state to it after every token ("each"), or only when `fold` is called ("fold").
    """

    spec: object
    params: Params
    count: int
    rounding: str = "each"
    s: np.ndarray = field(init=False)
    window: np.ndarray = field(init=False)
    lengths: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        sp = self.spec
        self.s = np.zeros((self.count, sp.layers, sp.v_heads, sp.k_dim, sp.v_dim))
        self.window = np.zeros((self.count, sp.layers, self.params.weight.shape[1], self.params.weight.shape[2] - 1))
        self.lengths = np.zeros(self.count, np.int64)

    def accept(self, rows, tokens: Tokens, lengths, rounding: str | None = None):
        """Append the first lengths[i] of tokens [len(rows), n, ..] to request rows[i].

        Returns o [len(rows), n, layers, HV, V] and y [len(rows), n, layers, C]; NaN where not accepted. Outputs come from
        the unrounded state. rounding overrides the batch's rule ("each" or "fold").
        """
        rows, lengths, sp = np.asarray(rows), np.asarray(lengths), self.spec
        rounding = rounding or self.rounding
        n = int(lengths.max(initial=0))
        o = np.full((len(rows), tokens.x.shape[1], sp.layers, sp.v_heads, sp.v_dim), np.nan)
        y = np.full((len(rows), tokens.x.shape[1]) + self.window.shape[1:3], np.nan)
        for t in range(n):
            live = np.flatnonzero(lengths > t)
            at, token = rows[live], tokens.at((live, t))
            s, o[live, t] = step(self.s[at], *core(sp, self.params, token))
            self.s[at] = rounded(s, sp.ssm_dtype) if rounding == "each" and sp.ssm_dtype != "fp32" else s
            x = np.asarray(token.x, np.float64)
            self.window[at], y[live, t] = conv_step(self.window[at], x, self.params.weight, self.params.bias)
        self.lengths[rows] += lengths
        return o, y

    def fold(self, rows) -> None:
        """Round the state of these requests to the state dtype."""
        self.s[rows] = rounded(self.s[rows], self.spec.ssm_dtype) if self.spec.ssm_dtype != "fp32" else self.s[rows]

    def reset(self, rows) -> None:
        """Forget these requests."""
        self.s[rows], self.window[rows], self.lengths[rows] = 0, 0, 0

    def stored(self, rows) -> np.ndarray:
        """State [len(rows), layers, HV, V, K], the order that the pools use."""
        return np.swapaxes(self.s[rows], -1, -2)


def rel_l2(got, want, axes=(-2, -1)) -> np.ndarray:
    """||got - want|| / ||want|| over `axes`; where `want` is zero, ||got||. NaN counts as infinite."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    error, norm = (np.sqrt(np.sum(x * x, axis=axes)) for x in (got - want, want))
    out = np.where(norm > 0, error / np.where(norm > 0, norm, 1), error)
    return np.where(np.isfinite(out), out, np.inf)
