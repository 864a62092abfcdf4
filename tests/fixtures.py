"""Shared test equipment: specs, random tokens, jitted verbs, bits and slots on the host.

Everything that a batch of requests can go through is one call with fixed shapes, so a spec compiles each verb once and
hundreds of independent cases run in one call, one case a slot.
"""

from __future__ import annotations

from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from jax import lax
from oracle import Params, Tokens

import jax_ssm as ssm

NAN, BIG = float("nan"), 3e38
GATES = {
    "slow": (-3.0, -3.0),
    "mild": (0.0, -3.0),
    "hard": (3.0, -3.0),
    "extreme": (4.6, 1.0),
    "weak": (float(np.log(0.04)), 1.0),
}
PROMPT = 5  # padded length of a prompt chunk


def fs_spec(rule: str = "gdn", mode: str = "native", **fields) -> ssm.SSMSpec:
    """The small fixture: 200 slots and HOLD, so that exhaustive cases share one executable."""
    heads = {"q_heads": 2, "k_heads": 2, "v_heads": 4 if rule == "gdn" else 2}
    sizes = {"layers": 2, "slots": 201, "k_dim": 16, "v_dim": 8, "width": 4, "history": 4}
    return ssm.SSMSpec(rule, mode=mode, **(heads | sizes | fields))


def draw_params(spec, gate: str = "slow", seed: int = 0) -> Params:
    """Gate and convolution parameters of every layer: the gate (A_log, dt_bias) with a little spread over heads."""
    rng = np.random.default_rng(seed)
    A_log, dt_bias = GATES[gate]
    small = lambda *shape: (0.1 * rng.standard_normal(shape)).astype(np.float32)  # noqa: E731
    return Params(
        A_log=A_log + small(spec.layers, spec.v_heads),
        dt_bias=dt_bias + small(spec.layers, spec.v_heads * spec.gates),
        weight=5 * small(spec.layers, spec.channels, spec.conv_width),
        bias=small(spec.layers, spec.channels),
    )


def draw_tokens(spec, rng, *lead: int) -> Tokens:
    """Random tokens with leading axes `lead`, stored in the activation dtype."""
    act = oracle.STORAGE[spec.act_dtype]

    def normal(*shape):
        return rng.standard_normal(lead + (spec.layers,) + shape, dtype=np.float32).astype(act)

    return Tokens(
        x=normal(spec.channels),
        q=normal(spec.q_heads, spec.k_dim),
        k=normal(spec.k_heads, spec.k_dim),
        v=normal(spec.v_heads, spec.v_dim),
        a=normal(spec.v_heads * spec.gates),
        b=normal(spec.v_heads),
    )


def layer_inputs(tokens: Tokens, params: Params) -> ssm.LinearInputs:
    """Tokens [.., layers, ..] as the inputs of a scan over layers: [layers, .., ..]."""
    first = {name: np.moveaxis(getattr(tokens, name), -3 if name in "qkv" else -2, 0) for name in "qkvab"}
    return ssm.LinearInputs(**first, A_log=params.A_log, dt_bias=params.dt_bias)


# ------------------------------------------------------------------------------------------------------ jitted verbs


def quick_jit(fn, **options):
    """`jax.jit` that compiles in half the time and runs slower: for programs that a test runs a few times."""
    cpu = jax.default_backend() == "cpu"
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0} if cpu else None, **options)


def run_layers(spec, state, receipt, x, inputs, params):
    """conv_forward and forward of every layer: x [layers, T, C], inputs with a leading layer axis -> state, y, o."""

    def layer(state, xs):
        row, x, weight, bias, inputs = xs
        state, y = ssm.conv_forward(spec, state, receipt, row, x, weight, bias)
        state, o = ssm.forward(spec, state, receipt, row, inputs)
        return state, (y, o)

    return lax.scan(layer, state, (jnp.arange(spec.layers), x, params[0], params[1], inputs))


def whole_round(spec, state, ids, offsets, x, inputs, params, lengths, config=ssm.KernelConfig()):
    """Layout, prepare, all layers, accept. Returns state, (y, o), receipt."""
    state, receipt = ssm.prepare(spec, state, ssm.build_layout(spec, ids, offsets), config)
    state, out = run_layers(spec, state, receipt, x, inputs, params)
    return ssm.accept(spec, state, ssm.StateAcceptance((receipt,), lengths)), out, receipt


def open_round(spec, state, ids, offsets, x, inputs, params):
    """A round up to, but without, its acceptance. Returns state, (y, o), receipt."""
    state, receipt = ssm.prepare(spec, state, ssm.build_layout(spec, ids, offsets))
    state, out = run_layers(spec, state, receipt, x, inputs, params)
    return state, out, receipt


def prompt_chunk(spec, state, slots, lengths, x, inputs, params):
    """merge, then convolution and recurrence of a prompt chunk of every layer. Returns state, (y, o)."""
    state = ssm.merge(spec, state, slots)

    def layer(state, xs):
        row, x, weight, bias, inputs = xs
        state, y = ssm.conv_prefill(spec, state, row, slots, lengths, x, weight, bias)
        state, o = ssm.prefill(spec, state, row, slots, lengths, inputs)
        return state, (y, o)

    return lax.scan(layer, state, (jnp.arange(spec.layers), x, params[0], params[1], inputs))


def fresh_verbs(spec, jit=quick_jit) -> SimpleNamespace:
    """Jitted verbs of `spec`, traced anew: use it after planting a fault. The state (export: pages) is donated."""

    def jitted(fn, donate=(0,)):
        return jit(partial(fn, spec), donate_argnums=donate)

    return SimpleNamespace(
        round=jitted(whole_round),
        open=jitted(open_round),
        accept=jitted(lambda spec, state, acceptance: ssm.accept(spec, state, acceptance)),
        merge=jitted(lambda spec, state, slots: ssm.merge(spec, state, slots)),
        clear=jitted(lambda spec, state, slots: ssm.clear(spec, state, slots)),
        snapshot=jitted(lambda spec, state, slots: ssm.snapshot(spec, state, slots), donate=()),
        export=jitted(lambda spec, state, *args: ssm.export_into(spec, state, *args), donate=(1,)),
        restore=jitted(lambda spec, state, *args: ssm.restore(spec, state, *args)),
        prompt=jitted(prompt_chunk),
    )


@cache
def verbs(spec) -> SimpleNamespace:
    """The verbs of `spec`, compiled once for all tests."""
    return fresh_verbs(spec, jax.jit)


# ----------------------------------------------------------------------------------------------------- on the host


def to_host(tree):
    """Every array as a writable numpy copy."""
    return jax.tree.map(lambda x: np.array(x), tree)


def to_device(tree):
    """Every array copied to the device, so that donation never touches numpy memory."""
    return jax.tree.map(lambda x: jnp.array(x, copy=True), tree)


def bits(x) -> np.ndarray:
    """The bit pattern of an array as unsigned integers: NaN compares equal to itself."""
    x = np.ascontiguousarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize])


def same_bits(a, b) -> bool:
    """Whether two pytrees of arrays hold the same bits."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(bits(x), bits(y)) for x, y in pairs)


def close(a, b, tolerance=1e-6) -> bool:
    """Whether two pytrees agree: integers exactly, numbers to a relative L2 of `tolerance` (bf16: 4e-3). For results of two
    executables: the XLA path promises equal bits within one executable only."""

    def leaf(x, y):
        x, y = np.asarray(x), np.asarray(y)
        if x.dtype.kind in "iub":
            return np.array_equal(x, y)
        bound = 4e-3 if x.dtype == oracle.BF16 else tolerance
        axes = tuple(range(x.ndim))
        return x.dtype == y.dtype and oracle.rel_l2(x, y, axes) <= bound

    return all(leaf(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def named_leaves(state) -> dict[str, np.ndarray]:
    """Leaves by dotted name: ssm, conv, accepted, extra.k, .."""
    flat = jax.tree_util.tree_leaves_with_path(state)
    return {".".join(str(p.name) for p in path): leaf for path, leaf in flat}


def slot_rows(spec, name: str, slots) -> np.ndarray:
    """Indices along the slot axis of leaf `name` that the slots own."""
    rows = spec.rows_per_slot if name == "ssm" else 1
    return (np.asarray(slots)[:, None] * rows + np.arange(rows)).reshape(-1)


def of_slots(spec, state, slots) -> dict[str, np.ndarray]:
    """Everything that the slots own, by leaf name."""
    return {
        name: np.take(np.asarray(leaf), slot_rows(spec, name, slots), axis=min(leaf.ndim - 1, 1))
        for name, leaf in named_leaves(state).items()
    }


def set_slots(spec, host_state, slots, value) -> None:
    """Fill everything that the slots own in a host state, in place; integer leaves become 13."""
    for name, leaf in named_leaves(host_state).items():
        at = slot_rows(spec, name, slots)
        leaf[at if leaf.ndim == 1 else (slice(None), at)] = 13 if leaf.dtype == np.int32 else value


def filled(spec, value):
    """A state of `spec` whose every byte outside HOLD is `value` (integers: 13)."""
    state = to_host(ssm.init_state(spec))
    set_slots(spec, state, np.arange(spec.hold), value)
    return state


def pad_to(x: np.ndarray, n: int, fill) -> np.ndarray:
    """Pad the first axis to n."""
    return np.concatenate([x, np.full((n - len(x),) + x.shape[1:], fill, x.dtype)])


def live_records(spec, cursor: np.ndarray) -> np.ndarray:
    """[N, 2L] bool: which history records of cursors [N] are live."""
    n, phase = cursor % (2 * spec.history), cursor // (2 * spec.history)
    at = np.arange(2 * spec.history)
    start = (phase * spec.history)[:, None]
    return (at >= start) & (at < start + n[:, None])


def poison_dead(spec, host, slots, value) -> None:
    """Overwrite, in place, all bytes of the slots that carry no accepted token: native rows and convolution columns off
    the accepted index, the compact window, history records beyond the cursor. value: scalar or one per slot."""
    slots = np.asarray(slots)
    value = np.broadcast_to(np.asarray(value, np.float32), slots.shape)
    accepted = host.accepted[slots]
    column = np.arange(spec.window)
    dead = (column < accepted[:, None]) | (column >= accepted[:, None] + spec.conv_width - 1)
    for i, slot in enumerate(slots):
        host.conv[:, slot][..., dead[i]] = value[i]
    if spec.mode == "native":
        for t in range(spec.width):
            off = accepted != t
            host.ssm[:, slots[off] * spec.width + t] = value[off][None, :, None, None, None]
    if spec.mode == "compact":
        for name, leaf in named_leaves(host.extra).items():
            leaf[:, slots] = value.reshape((1, -1) + (1,) * (leaf.ndim - 2))
            del name
    if spec.mode == "replay":
        live = live_records(spec, host.extra.cursor[slots])
        for name, leaf in named_leaves(host.extra).items():
            if "cursor" in name:
                continue
            for i, slot in enumerate(slots):
                leaf[:, slot, :, ~live[i]] = value[i]


# ------------------------------------------------------------------------- one layer without convolution, few requests

SLOTS = np.array([7, 3, 5, 0], np.int32)  # never 0, 1, 2, ..


def small_spec(rule="gdn", mode="native", **fields) -> ssm.SSMSpec:
    """One layer, nine slots, width 1 (compact: 2)."""
    width = 2 if mode == "compact" else 1
    return fs_spec(rule, mode, **(dict(layers=1, slots=9, width=width, history=16) | fields))


def recurrent_round(spec, state, ids, offsets, inputs, lengths):
    """prepare, forward of layer 0 without convolution, accept. Returns state, o [T, HV, V]."""
    state, receipt = ssm.prepare(spec, state, ssm.build_layout(spec, ids, offsets))
    state, o = ssm.forward(spec, state, receipt, 0, inputs)
    return ssm.accept(spec, state, ssm.StateAcceptance((receipt,), lengths)), o


def single(inputs):
    """Inputs of layer 0."""
    return jax.tree.map(lambda x: x[0], inputs)


def run_rounds(spec, tokens: Tokens, accepts, watch=lambda spec, state: (), params=None):
    """One round for each entry of accepts, all requests in step, in one compiled loop over rounds.

    tokens [requests, rounds, W, ..]: rejected ones included. Returns the final state and `watch` after every round.
    """
    params = params or draw_params(spec)
    n, rounds, width = tokens.x.shape[:3]
    rows = {name: np.moveaxis(x, 1, 0).reshape((rounds, n * width) + x.shape[3:]) for name, x in vars(tokens).items()}
    ids, offsets = np.repeat(SLOTS[:n], width), np.tile(np.arange(width, dtype=np.int32), n)

    @jax.jit
    def run(state, rows, accepts):
        def body(state, x):
            rows, a = x
            inputs = ssm.LinearInputs(**rows, A_log=params.A_log[0], dt_bias=params.dt_bias[0])
            lengths = jnp.broadcast_to(a, min(len(ids), spec.slots - 1))
            state, _ = recurrent_round(spec, state, jnp.asarray(ids), jnp.asarray(offsets), inputs, lengths)
            return state, watch(spec, state)

        return lax.scan(body, state, (rows, accepts))

    layer_0 = {name: rows[name][:, :, 0] for name in "qkvab"}
    return run(ssm.init_state(spec), layer_0, np.asarray(accepts, np.int32))
