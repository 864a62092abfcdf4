"""Where the kernels of an implementation live: one module of host functions each, with the same names and arguments."""

from __future__ import annotations

from importlib.util import find_spec

import jax

TRITON_NEEDS = ("jax_triton", "triton", "torch")
TRITON_EXTRA = "the extra 'triton' (in a clone: pip install -e '.[triton]')"


def kernels(implementation: str):
    """The module of host functions of "pallas" or "triton"; None for "xla", whose code stands beside the caller."""
    if implementation == "pallas":
        import kernels_pallas.api as module
    elif implementation == "triton":
        import kernels_triton.from_jax as module
    else:
        module = None
    return module


def refusal(implementation: str) -> str | None:
    """Why an implementation cannot run in this process, or None.

    "pallas" runs on NVIDIA GPUs, and on a CPU in interpret mode, which is for tests; "triton" on NVIDIA GPUs.
    """
    platform = jax.default_backend()
    if implementation == "triton":
        missing = [name for name in TRITON_NEEDS if find_spec(name) is None]
        if missing:
            return f"needs {', '.join(missing)}, not installed here: {TRITON_EXTRA}, or use 'pallas' or 'xla'"
        if platform != "gpu":
            return f"does not run on {platform!r}: use 'pallas' or 'xla'"
    if implementation == "pallas" and platform not in ("gpu", "cpu"):
        return f"does not run on {platform!r}: use 'xla'"
    return None
