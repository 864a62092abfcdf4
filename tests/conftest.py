"""Test configuration: the CPU backend without fused multiply-add, so that comparisons of bits mean something."""

import os

if os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    flag = "--xla_cpu_max_isa=AVX"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
