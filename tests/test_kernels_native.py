"""Native verify kernels: the bits of torch_ref for outputs and states, whatever the window, layout or launch."""

from __future__ import annotations

from itertools import product

import pytest
from kernel_harness import Round, assert_same_bits, make_spec

WINDOWS = {1: [(5, 1), (0, 1), (3, 1)], 2: [(5, 2), (0, 1)], 3: [(6, 2), (2, 3), (4, 1)], 4: [(3, 4), (6, 1), (1, 3)]}


@pytest.mark.parametrize("rule,ssm,act,width", list(product(("gdn", "kda"), ("fp32", "bf16"), ("fp32", "bf16"), (1, 3))))
def test_R75_native_bits(rule, ssm, act, width):
    """R75, S1: outputs and every row of the pool, untouched NaN rows included."""
    r = Round(make_spec(rule, ssm_dtype=ssm, act_dtype=act, width=width), WINDOWS[width], pad=2)
    assert_same_bits(r.run())
