"""One round of the verbs in every implementation, from the same bits: what the parity command and the kernel tests share.

A side drives one implementation (PyTorch eager, Triton, Pallas, the twins called from JAX) with PyTorch tensors as inputs
and results, so that any two of them can be compared element by element.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch

import jax_ssm
import torch_ref
from jax_ssm.executors import check_config
from jax_ssm.executors import forward_core as jax_forward_core
from jax_ssm.gates import CoreInputs as JaxCore
from jax_ssm.spec import KernelConfig
from torch_ref.executors import forward_core
from torch_ref.gates import CoreInputs, LinearInputs, canonical_sum, l2norm, pair_levels
from torch_ref.spec import L2NORM_EPS, SSMSpec
from torch_ref.state import leaves

ACT = {"fp32": torch.float32, "bf16": torch.bfloat16}
BITS = {4: torch.int32, 2: torch.int16}
FAST_COMPILE = {"xla_backend_optimization_level": 0}  # interpret mode: compiling takes longer than running
IN_JAX = {"pallas": "pallas", "jaxtriton": "triton"}  # side -> implementation of jax_ssm


# -------------------------------------------------------------------------------------------------------- conversions


def to_numpy(x) -> np.ndarray:
    """Array of either framework as numpy, bf16 kept."""
    if isinstance(x, torch.Tensor):
        x = x.detach().cpu()
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()
    return np.asarray(x)


def to_jax(x: torch.Tensor):
    """A copy of a tensor as a jax array on the same device."""
    return all_to_jax({"x": x})["x"]


def all_to_jax(tensors: dict[str, torch.Tensor]) -> dict:
    """Copies of tensors as jax arrays on the same device, with one wait for all: many processes may share a GPU."""
    if not any(x.is_cuda for x in tensors.values()):
        return {name: jnp.array(to_numpy(x)) for name, x in tensors.items()}
    torch.cuda.synchronize()
    shared = {name: jax.dlpack.from_dlpack(x.contiguous()) for name, x in tensors.items()}
    return jax.block_until_ready({name: jnp.array(x, copy=True) for name, x in shared.items()})


def to_torch(x) -> torch.Tensor:
    """A jax array as a tensor that shares its memory; drop it before the array is donated."""
    return torch.from_dlpack(jax.block_until_ready(x))


def differing(a, b) -> int:
    """How many values of two arrays, of either framework, differ in their bits; a NaN equals any NaN."""
    return int(count_differing(a, b))


def count_differing(a, b) -> torch.Tensor:
    """`differing` as a tensor on the device of `a`: nobody waits for it."""
    a, b = (x if isinstance(x, torch.Tensor) else to_torch(x) for x in (a, b))
    assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, b.shape, a.dtype, b.dtype)
    b = b.to(a.device)
    same = a.contiguous().view(BITS[a.dtype.itemsize]) == b.contiguous().view(BITS[b.dtype.itemsize])
    if a.is_floating_point():
        same |= a.isnan() & b.isnan()
    return (~same).sum()


def jax_state(state: torch_ref.ConvSSMState):
    """The same state as a jax pytree."""
    extra = None
    if state.extra is not None:
        kind = getattr(jax_ssm.state, type(state.extra).__name__)
        extra = kind(**all_to_jax({f.name: getattr(state.extra, f.name) for f in fields(state.extra)}))
    return jax_ssm.state.ConvSSMState(to_jax(state.ssm), to_jax(state.conv), to_jax(state.accepted), extra)


def jax_leaves(state) -> dict:
    """Every array of a jax state, by the names of `torch_ref.state.leaves`."""
    named = {"ssm": state.ssm, "conv": state.conv, "accepted": state.accepted}
    for name, x in vars(state.extra).items() if state.extra is not None else ():
        named[f"extra.{name}"] = x
    return named


def clone(state: torch_ref.ConvSSMState) -> torch_ref.ConvSSMState:
    """A copy that shares nothing."""
    extra = state.extra
    if extra is not None:
        extra = type(extra)(**{name: x.clone() for name, x in vars(extra).items()})
    return torch_ref.ConvSSMState(state.ssm.clone(), state.conv.clone(), state.accepted.clone(), extra)


# ------------------------------------------------------------------------------------------------------ random inputs


def random_core(spec: SSMSpec, tokens: int, g: torch.Generator) -> CoreInputs:
    """Prologue outputs of random tokens, made once and fed to both frameworks."""
    act = ACT[spec.act_dtype]

    def normal(*shape):
        return torch.randn(tokens, *shape, generator=g)

    q, k = normal(spec.q_heads, spec.k_dim).to(act), normal(spec.k_heads, spec.k_dim).to(act)
    decay = torch.rand(tokens, spec.v_heads, spec.gates, generator=g) * 0.3 + 0.7
    beta = torch.rand(tokens, spec.v_heads, generator=g)
    return CoreInputs(l2norm(q) * spec.scale, l2norm(k), decay, beta, k, normal(spec.v_heads, spec.v_dim).to(act), q)


def agreeing(shape, act: str, g: torch.Generator) -> torch.Tensor:
    """Random rows [.., K] on whose norm the rsqrt of both frameworks agrees: the kernels recompute norms from raw rows,
    and on a CPU the two differ in the last bit of some."""
    rows, k = int(np.prod(shape[:-1])), shape[-1]
    x = torch.randn(2 * rows + 64, k, generator=g).to(ACT[act])
    total = canonical_sum(x.float() * x.float(), pair_levels(act, k)) + L2NORM_EPS
    same = torch.rsqrt(total).numpy() == np.asarray(jax.lax.rsqrt(jnp.asarray(total.numpy())))
    x = x[torch.from_numpy(same)]
    assert len(x) >= rows
    return x[:rows].reshape(shape)


def agreeing_core(spec: SSMSpec, tokens: int, g: torch.Generator) -> CoreInputs:
    """Random core inputs with agreeing norms."""
    core = random_core(spec, tokens, g)
    q, k = (agreeing((tokens, heads, spec.k_dim), spec.act_dtype, g) for heads in (spec.q_heads, spec.k_heads))
    return CoreInputs(l2norm(q) * spec.scale, l2norm(k), core.decay, core.beta, k, core.v, q)


def random_inputs(spec: SSMSpec, tokens: int, g: torch.Generator, device: str) -> LinearInputs:
    """Raw inputs of random tokens, drawn on the CPU."""
    act = ACT[spec.act_dtype]

    def normal(*shape, dtype=act):
        return torch.randn(shape, generator=g).to(dtype).to(device)

    shapes = (spec.q_heads, spec.k_dim), (spec.k_heads, spec.k_dim), (spec.v_heads, spec.v_dim)
    gates = spec.v_heads * spec.gates
    q, k, v = (normal(tokens, *shape) for shape in shapes)
    parameters = normal(spec.v_heads, dtype=torch.float32), normal(gates, dtype=torch.float32)
    return LinearInputs(q, k, v, normal(tokens, gates), normal(tokens, spec.v_heads), *parameters)


# -------------------------------------------------------------------------------------------------------------- sides


def device() -> str:
    """Where torch and jax both run here."""
    return "cuda" if jax.default_backend() == "gpu" else "cpu"


def unavailable(kind: str) -> str | None:
    """Why the implementation `kind` cannot run here, None when it can."""
    if kind in ("triton", "jaxtriton") and importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if kind == "triton" and device() == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "there is no GPU and TRITON_INTERPRET=1 is not set"
    if kind in IN_JAX:
        try:
            check_config(KernelConfig(IN_JAX[kind]))
        except (NotImplementedError, ValueError, ImportError) as error:
            return str(error)
    return None


def make_side(kind: str, spec: SSMSpec, state: torch_ref.ConvSSMState, launch: tuple[int, int] | None = None):
    """A side of kind "eager", "triton", "pallas" or "jaxtriton" on a copy of `state`; launch: (block_v, num_warps)."""
    block_v, warps = launch or (None, 1)
    if kind in ("eager", "triton"):
        return TorchSide(spec, clone(state), kind, KernelConfig("xla", block_v, warps))
    return JaxSide(spec, jax_state(state), KernelConfig(IN_JAX[kind], block_v, warps))


class TorchSide:
    """The verbs of torch_ref, by eager operations or by Triton. The state is changed in place."""

    def __init__(self, spec: SSMSpec, state: torch_ref.ConvSSMState, kernels: str, config: KernelConfig):
        self.spec, self.state, self.kernels, self.config = spec, state, kernels, config

    def prepare(self, layout: torch_ref.DecodeLayout) -> None:
        made = torch_ref.prepare(self.spec, self.state, layout, self.config, kernels=self.kernels)
        self.state, self.receipt = made

    def conv(self, row: int, x, weight, bias):
        return torch_ref.conv_forward(self.spec, self.state, self.receipt, row, x, weight, bias)[1]

    def forward(self, row: int, inputs: LinearInputs | CoreInputs):
        verb = torch_ref.forward if isinstance(inputs, LinearInputs) else forward_core
        self.state, o = verb(self.spec, self.state, self.receipt, row, inputs)
        return o

    def accept(self, lengths) -> None:
        self.state = torch_ref.accept(self.spec, self.state, torch_ref.StateAcceptance((self.receipt,), lengths))

    def export(self, pages: torch_ref.Pages, page_ids, slots, n: int) -> torch_ref.Pages:
        """The canonical states in a copy of `pages`."""
        mine = torch_ref.Pages(pages.ssm.clone(), pages.conv.clone())
        return torch_ref.export_into(self.spec, self.state, mine, page_ids, slots, n, kernels=self.kernels)

    def restore(self, pages: torch_ref.Pages, page_ids, slots, n: int) -> None:
        self.state = torch_ref.restore(self.spec, self.state, pages, page_ids, slots, n)

    def merge(self, slots) -> None:
        self.state = torch_ref.merge(self.spec, self.state, slots, kernels=self.kernels)

    def snapshot(self, slots):
        return torch_ref.snapshot(self.spec, self.state, slots, kernels=self.kernels)

    def arrays(self) -> dict[str, torch.Tensor]:
        """Every tensor of the state, by name."""
        return leaves(self.state)


class JaxSide:
    """The verbs of jax_ssm, jitted, the state donated. Results are tensors; those of `arrays` share the state's memory."""

    def __init__(self, spec: SSMSpec, state, config: KernelConfig):
        self.spec, self.state, self.config = spec, state, config
        options = FAST_COMPILE if jax.default_backend() == "cpu" else None

        def jit(verb, *donate: int):
            # its own function object: a planted fault must not meet a trace of the sound kernel
            return jax.jit(lambda *args: verb(spec, *args), donate_argnums=donate, compiler_options=options)

        forward = lambda f: lambda spec, state, receipt, row, inputs: f(spec, state, receipt, row, inputs)  # noqa: E731
        self._prepare = jit(lambda spec, state, layout: jax_ssm.prepare(spec, state, layout, config), 0)
        self._conv, self._raw = jit(jax_ssm.conv_forward, 0), jit(forward(jax_ssm.forward), 0)
        self._core, self._accept = jit(forward(jax_forward_core), 0), jit(jax_ssm.accept, 0)
        self._export = jit(lambda spec, *args: jax_ssm.export_into(spec, *args, config), 1)
        self._restore = jit(jax_ssm.restore, 0)
        self._merge = jit(lambda spec, state, slots: jax_ssm.merge(spec, state, slots, config), 0)
        self._snapshot = jit(lambda spec, state, slots: jax_ssm.snapshot(spec, state, slots, config))

    def prepare(self, layout: torch_ref.DecodeLayout) -> None:
        arrays = all_to_jax({name: x for name, x in vars(layout).items() if name != "fixed"})
        self.state, self.receipt = self._prepare(self.state, jax_ssm.DecodeLayout(**arrays, fixed=layout.fixed))

    def conv(self, row: int, x, weight, bias):
        arrays = all_to_jax({"x": x, "weight": weight, "bias": bias})
        self.state, y = self._conv(self.state, self.receipt, np.int32(row), *arrays.values())
        return to_torch(y)

    def forward(self, row: int, inputs: LinearInputs | CoreInputs):
        raw = isinstance(inputs, LinearInputs)
        mine = (jax_ssm.LinearInputs if raw else JaxCore)(**all_to_jax(vars(inputs)))
        self.state, o = (self._raw if raw else self._core)(self.state, self.receipt, np.int32(row), mine)
        return to_torch(o)

    def accept(self, lengths) -> None:
        self.state = self._accept(self.state, jax_ssm.StateAcceptance((self.receipt,), to_jax(lengths)))

    def export(self, pages: torch_ref.Pages, page_ids, slots, n: int) -> torch_ref.Pages:
        """The canonical states in a copy of `pages`."""
        mine, ids = jax_ssm.Pages(to_jax(pages.ssm), to_jax(pages.conv)), (jnp.asarray(x) for x in (page_ids, slots))
        out = self._export(self.state, mine, *ids, np.int32(n))
        return torch_ref.Pages(to_torch(out.ssm), to_torch(out.conv))

    def restore(self, pages: torch_ref.Pages, page_ids, slots, n: int) -> None:
        mine, ids = jax_ssm.Pages(to_jax(pages.ssm), to_jax(pages.conv)), (jnp.asarray(x) for x in (page_ids, slots))
        self.state = self._restore(self.state, mine, *ids, np.int32(n))

    def merge(self, slots) -> None:
        self.state = self._merge(self.state, jnp.asarray(slots))

    def snapshot(self, slots):
        return tuple(to_torch(x) for x in self._snapshot(self.state, jnp.asarray(slots)))

    def arrays(self) -> dict[str, torch.Tensor]:
        """Every array of the state, by name."""
        return {name: to_torch(x) for name, x in jax_leaves(self.state).items()}


# ----------------------------------------------------------------------------------------------------- poisoned states


def poisoned_state(spec: SSMSpec, slots: list[int], g: torch.Generator, device: str) -> torch_ref.ConvSSMState:
    """A state in the middle of a run: what the requests in `slots` own is random, all else of live slots is NaN.

    Accepted indices, live counts and halves of the histories are random, so rows start at every offset and histories
    fill up at different rounds. HOLD is zero.
    """
    state = torch_ref.init_state(spec)
    for name, x in leaves(state).items():
        if x.ndim > 1:
            x[:, : spec.hold * (spec.rows_per_slot if name == "ssm" else 1)] = float("nan")

    def pick(n: int) -> int:
        return int(torch.randint(n, (), generator=g))

    def fill(x, scale: float = 1.0):
        x.copy_(torch.randn(x.shape, generator=g) * scale)

    keys = agreeing if device == "cpu" else lambda shape, act, g: torch.randn(shape, generator=g)
    for slot in slots:
        state.accepted[slot] = a = pick(spec.width)
        fill(state.ssm[:, slot * spec.rows_per_slot + (a if spec.mode == "native" else 0)], 0.3)
        fill(state.conv[:, slot, :, a : a + spec.conv_width - 1])
        if spec.mode == "replay":
            h, n, phase = state.extra, pick(spec.history + 1), pick(2)
            h.cursor[slot] = phase * 2 * spec.history + n
            at = slice(phase * spec.history, phase * spec.history + n)
            if n:
                h.k[:, slot, :, at] = keys((spec.layers, spec.k_heads, n, spec.k_dim), spec.act_dtype, g).to(h.k.dtype)
                fill(h.v[:, slot, :, at])
                fill(h.d[:, slot, :, at], 0.3)
                h.decay[:, slot, :, at] = 0.7 + 0.3 * torch.rand(h.decay[:, slot, :, at].shape, generator=g)
                h.beta[:, slot, :, at] = torch.rand(h.beta[:, slot, :, at].shape, generator=g)
    moved = [x.to(device) for x in (state.ssm, state.conv, state.accepted)]
    extra = None if state.extra is None else replace(state.extra, **{n: x.to(device) for n, x in vars(state.extra).items()})
    return torch_ref.ConvSSMState(*moved, extra)
