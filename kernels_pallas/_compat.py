"""The only file that imports `jax.experimental.pallas`: calls, loads and stores, whatever the JAX version calls them.

Kernels use the Triton lowering of Pallas: whole arrays without block specs, static grids, in-place operands by aliasing.
On a platform without a GPU the same kernels run in interpret mode, which proves logic and, with FMA contraction
switched off (`--xla_cpu_max_isa=AVX`), bits; it does not prove memory safety.
"""

from __future__ import annotations

import functools
import warnings

import jax
from jax.experimental import pallas as pl

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas import triton as plt

__all__ = ["barrier", "call", "inline_asm", "load", "on_cpu", "program_id", "store", "when"]

program_id = pl.program_id
when = pl.when
load = plt.load
barrier = plt.debug_barrier


def store(ref, value, *, mask=None, eviction_policy=None) -> None:
    """Store `value`; interpret mode ignores the eviction policy."""
    plt.store(ref, value, mask=mask, eviction_policy=eviction_policy)


def inline_asm(code: str, x):
    """x in fp32 by PTX `code`, for a GPU: one value of fp32, $1, gives $0; two neighbours of bf16, $2, give $0 and $1."""
    pack = 4 // x.dtype.itemsize
    constraints = ",".join(["=&r"] * pack + ["r"])
    out = jax.ShapeDtypeStruct(x.shape, "float32")
    return plt.elementwise_inline_asm(code, args=[x], constraints=constraints, pack=pack, result_shape_dtypes=[out])[0]


def on_cpu() -> bool:
    """Whether kernels run in interpret mode here: every platform but a GPU."""
    return jax.default_backend() != "gpu"


def call(kernel, out_shape, *, grid, name, num_warps=1, aliases=None, interpret=None, **static):
    """`pallas_call` of `kernel(*refs, interpret=.., **static)` on whole arrays.

    grid: static, its first axis runs fastest. aliases: {operand: output} that share memory. The kernel gets one ref per
    operand and output; an aliased operand must be read through its output ref (in interpret mode the operand is a
    snapshot), and programs must not read what other programs write.
    """
    interpret = on_cpu() if interpret is None else interpret
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return pl.pallas_call(
            functools.partial(kernel, interpret=interpret, **static),
            out_shape=out_shape,
            grid=grid,
            input_output_aliases=aliases or {},
            interpret=interpret,
            name=name,
            compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
        )
