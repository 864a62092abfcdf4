"""The host functions of all kernels under one name; `kernels_triton.from_jax` offers the same."""

from kernels_pallas.commit import commit
from kernels_pallas.conv import conv
from kernels_pallas.decode import compact, native
from kernels_pallas.gates import prologue
from kernels_pallas.history import prepare
from kernels_pallas.materialize import advance
from kernels_pallas.precompute import coefficients as precompute_coefficients
from kernels_pallas.precompute import outputs as precompute_outputs
from kernels_pallas.project import coefficients, outputs
from kernels_pallas.windows import windows

__all__ = [
    "advance", "coefficients", "commit", "compact", "conv", "native", "outputs", "precompute_coefficients",
    "precompute_outputs", "prepare", "prologue", "windows",
]  # fmt: skip
