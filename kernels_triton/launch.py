"""How every kernel is launched: at once, or handed to a recorder, by which `from_jax` runs the same launches in JAX."""

from __future__ import annotations

from contextvars import ContextVar

import triton
import triton.language as tl

# called as recorder(kernel, grid, args, num_warps, registers) instead of launching
recorder: ContextVar = ContextVar("recorder", default=None)


def launch(kernel, grid, *args, num_warps: int = 1, registers: int | None = None) -> None:
    """Launch kernel(*args) over `grid` on the current stream. Multiplications and additions do not contract. registers: the
    most that a thread may use, None for any.

    Order of arguments, which XLA's calling convention asks for: arrays that exist, then arrays that the host function
    allocates, then numbers.
    """
    record = recorder.get()
    if record is not None:
        record(kernel, grid, args, num_warps, registers)
    else:
        limit = {} if registers is None else {"maxnreg": registers}
        kernel[grid](*args, num_warps=num_warps, num_stages=1, enable_fp_fusion=False, **limit)


@triton.jit
def layer_row(layer):
    """Number of a layer row as int64: `layer` itself (PyTorch), or the value that it points to (JAX, where it is traced)."""
    if layer.dtype.is_ptr():
        return tl.load(layer).to(tl.int64)
    else:
        return layer.to(tl.int64)
