"""implementation="triton": the Triton kernels called from JAX leave the bits of Pallas, and are refused by name elsewhere."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_harness import different, make_spec

import jax_ssm
from jax_ssm import attention
from jax_ssm import kernels as lookup
from jax_ssm.spec import KernelConfig

ROOT = Path(jax_ssm.__file__).parents[1]
MODES = {"native": dict(width=3), "compact": dict(width=3), "replay": dict(width=3, history=8)}
RULES = [("gdn", "bf16"), ("gdn", "fp32"), ("kda", "bf16")]  # with the dtype of activations
missing = [name for name in lookup.TRITON_NEEDS if find_spec(name) is None]
needs_jax_triton = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def random_layer(spec, tokens: int, rng):
    act = jnp.bfloat16 if spec.act_dtype == "bf16" else jnp.float32

    def normal(*shape, dtype=act):
        return jnp.asarray(rng.standard_normal(shape, dtype=np.float32)).astype(dtype)

    gates = spec.v_heads * spec.gates
    inputs = jax_ssm.LinearInputs(
        normal(tokens, spec.q_heads, spec.k_dim), normal(tokens, spec.k_heads, spec.k_dim),
        normal(tokens, spec.v_heads, spec.v_dim), normal(tokens, gates), normal(tokens, spec.v_heads),
        normal(spec.v_heads, dtype=jnp.float32), normal(gates, dtype=jnp.float32),
    )  # fmt: skip
    return normal(tokens, spec.channels), normal(spec.channels, spec.conv_width), inputs


def run(spec, implementation: str, rounds: int = 4):
    """Rounds of dynamic windows, then snapshot, export and merge, all jitted: every array on the way."""
    config, rng = KernelConfig(implementation), np.random.default_rng(0)
    jit = jax.jit
    state, arrays, build = jax_ssm.init_state(spec), {}, jit(lambda ids, at: jax_ssm.build_layout(spec, ids, at))
    prepare = jit(lambda state, layout: jax_ssm.prepare(spec, state, layout, config))
    accept = jit(lambda state, acceptance: jax_ssm.accept(spec, state, acceptance))

    @jit
    def step(state, receipt, row, x, weight, inputs):
        state, y = jax_ssm.conv_forward(spec, state, receipt, row, x, weight)
        state, o = jax_ssm.forward(spec, state, receipt, row, inputs)
        return state, y, o

    for i in range(rounds):
        windows = [(4, spec.width), (0, 1), (2, min(2, spec.width))][: 2 + i % 2]
        ids = [slot for slot, n in windows for _ in range(n)] + [spec.hold]
        layout = build(jnp.asarray(ids), jnp.asarray([t for _, n in windows for t in range(n)] + [0]))
        state, receipt = prepare(state, layout)
        for row in range(spec.layers):
            x, weight, inputs = random_layer(spec, len(ids), rng)
            state, y, o = step(state, receipt, jnp.int32(row), x, weight, inputs)
            arrays |= {f"y{i}.{row}": y, f"o{i}.{row}": o}
        lengths = jnp.asarray([max(1, n - i % 2) for _, n in windows] + [0] * (len(layout.slots) - len(windows)))
        state = accept(state, jax_ssm.StateAcceptance((receipt,), lengths))
        arrays |= {f"{i}{jax.tree_util.keystr(p)}": x for p, x in jax.tree_util.tree_leaves_with_path(state)}
    slots = jnp.asarray([2, 0, 4])

    @jit
    def close(state):
        pages = jax_ssm.export_into(spec, state, jax_ssm.init_pages(spec, 4), jnp.asarray([3, 0, 1]), slots, 2, config)
        return jax_ssm.snapshot(spec, state, slots, config), pages, jax_ssm.merge(spec, state, slots[:2], config)

    return arrays | {str(i): x for i, x in enumerate(jax.tree.leaves(close(state)))}


@pytest.mark.gpu
@needs_jax_triton
@pytest.mark.parametrize("mode,rule,ssm", [(m, r, s) for m, r, s in product(MODES, RULES, ("fp32", "bf16"))], ids=str)
def test_R75_triton_from_jax_leaves_the_bits_of_pallas(mode, rule, ssm):
    """R75, R77: outputs, states, records and cursors of every round, snapshot, export and merge, of both from JAX."""
    spec = make_spec(rule[0], mode, act_dtype=rule[1], ssm_dtype=ssm, k_dim=128, v_dim=64, **MODES[mode])
    a, b = run(spec, "pallas"), run(spec, "triton")
    wrong = {name: n for name in a if (n := different(a[name], b[name]))}
    assert not wrong, wrong


@pytest.mark.gpu
@needs_jax_triton
@pytest.mark.parametrize("mode", MODES)
def test_triton_from_jax_one_token_and_wide_windows(mode):
    """Width 1 (compact: 2) and 16, whose windows run in loops, and the fused prologue of native decode."""
    for width in (2 if mode == "compact" else 1, 16):
        spec = make_spec("gdn", mode, k_dim=64, width=width, history=16, layers=1)
        a, b = run(spec, "pallas", 2), run(spec, "triton", 2)
        wrong = {name: n for name in a if (n := different(a[name], b[name]))}
        assert not wrong, (width, wrong)


def test_refused_by_name_with_what_to_install():
    """M2: on this machine a named implementation runs, or the error says what is missing; nothing falls back."""
    spec = make_spec()
    layout = jax_ssm.build_layout(spec, jnp.array([0]), jnp.array([0]))
    if jax.default_backend() == "gpu" and not missing:
        assert lookup.refusal("triton") is None
        return
    match = missing[0] if missing else "does not run on"
    with pytest.raises(NotImplementedError, match=match):
        jax_ssm.prepare(spec, jax_ssm.init_state(spec), layout, KernelConfig("triton"))


def test_the_selector_says_what_triton_needs():
    """R39: the pure selector refuses "triton" without its packages and names them; with them it is taken."""
    layer, wanted = attention.LayerSpec("gdn", "g", ssm=make_spec()), attention.Constraints("triton")
    without = attention.Capability("gpu", features=frozenset({"pallas"}))
    with pytest.raises(attention.BackendError, match="jax-triton, triton and torch, the extra 'triton'"):
        attention.select_backend(layer, without, wanted)
    selection = attention.select_backend(layer, attention.Capability("gpu", features=frozenset({"triton"})), wanted)
    assert selection.backend == "triton"


def test_import_directions():
    """Each framework's files import neither the other framework nor its kernels; from_jax.py alone joins both."""
    torch_side, jax_side = {"torch", "triton", "torch_ref", "kernels_triton"}, {"jax", "jaxlib", "jax_ssm", "kernels_pallas"}
    joins = {"kernels_triton/from_jax.py": {"jax", "jax_triton"}, "jax_ssm/kernels.py": {"kernels_triton"}}
    banned = {
        "jax_ssm": torch_side | {"jax_triton"}, "kernels_pallas": torch_side | {"jax_triton", "jax_ssm"},
        "torch_ref": jax_side | {"jax_triton"}, "kernels_triton": jax_side | {"jax_triton", "torch_ref"},
    }  # fmt: skip
    for package, names in banned.items():
        for file in sorted((ROOT / package).rglob("*.py")):
            where = file.relative_to(ROOT).as_posix()
            for node in ast.walk(ast.parse(file.read_text())):
                found = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                found += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
                wrong = {name.split(".")[0] for name in found} & names - joins.get(where, set())
                assert not wrong, (where, wrong)
