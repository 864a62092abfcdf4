"""Shared test equipment: specs, random tokens, jitted verbs, and `Machine`, which drives a state and the oracle in step.

Everything that a batch of requests can go through is one call with fixed shapes, so a spec compiles each verb once and
hundreds of independent cases run in one call, one case a slot.
"""

from __future__ import annotations

from functools import lru_cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from jax import lax
from oracle import Params, Tokens

import jax_ssm as ssm

NAN, BIG = float("nan"), 3e38
GATES = {"slow": (-3.0, -3.0), "mild": (0.0, -3.0), "hard": (3.0, -3.0), "extreme": (4.6, 1.0)}
PROMPT = 5  # padded length of a prompt chunk
STATE_TOLERANCE = {"fp32": 1e-5, "bf16": 4e-3}  # relative L2 per layer and head
OUTPUT_TOLERANCE = {"fp32": (2e-6, 2e-5), "bf16": (6e-3, 2e-2)}  # atol, rtol; "fp32" when nothing is stored as bf16


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


def run_layers(spec, state, receipt, x, inputs, params):
    """conv_forward and forward of every layer: x [layers, T, C], inputs with a leading layer axis -> state, y, o."""

    def layer(state, xs):
        row, x, weight, bias, inputs = xs
        state, y = ssm.conv_forward(spec, state, receipt, row, x, weight, bias)
        state, o = ssm.forward(spec, state, receipt, row, inputs)
        return state, (y, o)

    return lax.scan(layer, state, (jnp.arange(spec.layers), x, params[0], params[1], inputs))


def whole_round(spec, state, ids, offsets, x, inputs, params, lengths):
    """Layout, prepare, all layers, accept. Returns state, (y, o), receipt."""
    state, receipt = ssm.prepare(spec, state, ssm.build_layout(spec, ids, offsets))
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


def fresh_verbs(spec) -> SimpleNamespace:
    """Jitted verbs of `spec`, traced anew: use it after planting a fault. The state (export: pages) is donated."""

    def jit(fn, donate=(0,)):
        return jax.jit(partial(fn, spec), donate_argnums=donate)

    return SimpleNamespace(
        round=jit(whole_round),
        open=jit(open_round),
        accept=jit(lambda spec, state, acceptance: ssm.accept(spec, state, acceptance)),
        merge=jit(lambda spec, state, slots: ssm.merge(spec, state, slots)),
        clear=jit(lambda spec, state, slots: ssm.clear(spec, state, slots)),
        snapshot=jit(lambda spec, state, slots: ssm.snapshot(spec, state, slots), donate=()),
        export=jit(lambda spec, state, *args: ssm.export_into(spec, state, *args), donate=(1,)),
        restore=jit(lambda spec, state, *args: ssm.restore(spec, state, *args)),
        prompt=jit(prompt_chunk),
    )


verbs = lru_cache(maxsize=None)(fresh_verbs)


# ---------------------------------------------------------------------------------------------------- host-side helpers


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


# ----------------------------------------------------------------------------------------------------------- machine


class Machine:
    """N requests in permuted slots, driven through the verbs and through the oracle, checked after every step.

    poison: (a, b): bytes that carry no accepted token are set to a (requests with even number) or b before every step,
    and so are the contents of rejected drafts, padding rows and slots that nobody owns. None: they stay as they are.
    order_seed: the rows of a batch are shuffled by it, and nothing else is.
    """

    def __init__(self, spec, count: int, *, seed=0, gate="slow", poison=(NAN, BIG), verbs_of=verbs, order_seed=0):
        self.spec, self.count, self.poison = spec, count, poison
        self.rng, self.shuffle = np.random.default_rng(seed), np.random.default_rng(order_seed)
        self.params = draw_params(spec, gate, seed)
        self.conv_params = (self.params.weight, self.params.bias)
        self.oracle = oracle.Requests(spec, self.params, count, "fold" if spec.mode == "replay" else "each")
        self.verbs = verbs_of(spec)
        self.slot = self.rng.permutation(spec.hold)[:count]
        self.n = np.zeros(count, int)  # model of the replay cursor
        self.phase = np.zeros(count, int)
        self.accepted = np.zeros(count, int)
        self.folds = 0
        self.worst = 0.0  # largest relative error of a state so far
        fill = self.rng.standard_normal() if poison is None else poison[0]
        self.state = self.verbs.clear(to_device(filled(spec, fill)), self.ids(np.arange(count)))

    # -- helpers

    def ids(self, requests) -> np.ndarray:
        """Slots of the requests, padded with HOLD to the fixed length."""
        return pad_to(self.slot[requests].astype(np.int32), self.spec.hold, self.spec.hold)

    def unowned(self) -> np.ndarray:
        return np.setdiff1d(np.arange(self.spec.hold), self.slot)

    def values(self, requests) -> np.ndarray:
        return np.asarray(self.poison, np.float32)[np.asarray(requests) % 2]

    def draw(self, requests, n: int, keep) -> Tokens:
        """Tokens [len(requests), n, ..]; those at and beyond keep[i] are poisoned."""
        tokens = draw_tokens(self.spec, self.rng, len(requests), n)
        if self.poison is not None:
            dead = np.arange(n) >= np.asarray(keep)[:, None]
            value = np.broadcast_to(self.values(requests)[:, None], dead.shape)[dead]
            for x in vars(tokens).values():
                x[dead] = value.reshape((-1,) + (1,) * (x.ndim - 2))
        return tokens

    def disturb(self) -> None:
        """Poison everything that nobody may look at, and remember the state for comparison."""
        host = to_host(self.state)
        if self.poison is not None:
            rest = self.unowned()
            set_slots(self.spec, host, rest[::2], self.poison[0])
            set_slots(self.spec, host, rest[1::2], self.poison[1])
            poison_dead(self.spec, host, self.slot, self.values(np.arange(self.count)))
        self.before = host
        self.state = to_device(host)

    def untouched(self, slots) -> None:
        """Every byte of these slots is what it was at the last `disturb`."""
        now, old = of_slots(self.spec, self.state, slots), of_slots(self.spec, self.before, slots)
        for name in now:
            assert np.array_equal(bits(now[name]), bits(old[name])), f"{name} of slots outside the call changed"

    def hold_is_zero(self) -> None:
        for name, x in of_slots(self.spec, self.state, [self.spec.hold]).items():
            assert not bits(x).any(), f"{name} of HOLD was written"

    # -- steps

    def round(self, widths, accepts) -> None:
        """One round: request i verifies widths[i] tokens (0: not in the batch) and accepts accepts[i] of them.

        A request that accepts 0 of a verified window is aborted: nothing may move, then its slot is cleared.
        """
        spec, widths, accepts = self.spec, np.asarray(widths), np.asarray(accepts)
        rows = np.flatnonzero(widths)
        tokens, order = self.draw(rows, spec.width, accepts[rows]), self.shuffle.permutation(len(rows))
        rows, tokens = rows[order], tokens.at(order)
        w, a = widths[rows], accepts[rows]
        self.disturb()
        out = self.run_round(rows, tokens, w, a)
        self.check_round(rows, w, a)
        self.advance(rows, tokens, w, a, out)
        aborted = rows[a == 0]
        if aborted.size:
            self.clear(aborted)

    def pack(self, rows, tokens: Tokens, w):
        """(ids, offsets, x, inputs) of a round: packed token rows, padding rows filled with poison."""
        spec, total = self.spec, self.spec.hold * self.spec.width
        owner, offset = np.repeat(np.arange(len(rows)), w), np.concatenate([np.arange(n) for n in w] + [np.zeros(0, int)])
        fill = 0.0 if self.poison is None else self.poison[0]
        packed = Tokens(**{name: pad_to(x[owner, offset], total, fill) for name, x in vars(tokens).items()})
        ids = pad_to(self.slot[rows][owner].astype(np.int32), total, spec.hold)
        return ids, pad_to(offset.astype(np.int32), total, 7), np.moveaxis(packed.x, 1, 0), layer_inputs(packed, self.params)

    def run_round(self, rows, tokens: Tokens, w, a):
        """Run a packed round and return (y, o) as [len(rows), W, layers, ..], zero where no token was."""
        spec = self.spec
        ids, offsets, x, inputs = self.pack(rows, tokens, w)
        garbage = self.rng.integers(-9, 99, spec.hold - len(rows)).astype(np.int32)
        lengths = np.concatenate([np.asarray(a, np.int32), garbage])
        self.state, out, self.receipt = self.verbs.round(self.state, ids, offsets, x, inputs, self.conv_params, lengths)
        return self.unpack(out, w)

    def unpack(self, out, w):
        owner, offset = np.repeat(np.arange(len(w)), w), np.concatenate([np.arange(n) for n in w] + [np.zeros(0, int)])
        parts = []
        for x in out:
            x = np.moveaxis(np.asarray(x), 0, 1)  # [T, layers, ..]
            assert not bits(x[len(owner) :]).any(), "output of padding rows is not exactly 0"
            part = np.zeros((len(w), self.spec.width) + x.shape[1:], x.dtype)
            part[owner, offset] = x[: len(owner)]
            parts.append(part)
        return tuple(parts)

    def check_round(self, rows, w, a) -> None:
        """Integers against the model, everything outside the call, and what the mode promises about its checkpoint."""
        spec = self.spec
        in_call = self.slot[rows]
        self.untouched(np.setdiff1d(np.arange(spec.hold), in_call))
        self.hold_is_zero()
        if spec.mode == "replay":
            folds = self.n[rows] + w > spec.history
            self.oracle.fold(rows[folds])
            self.folds += int(folds.sum())
            self.phase[rows[folds]] = 1 - self.phase[rows[folds]]
            self.n[rows[folds]] = 0
            start = 2 * spec.history * self.phase[rows] + self.n[rows]
            assert np.array_equal(np.asarray(self.state.extra.forward_cursor)[in_call], start), "forward cursor"
            self.n[rows] += a
            assert np.array_equal(np.asarray(self.state.extra.cursor)[in_call], start + a), "cursor"
            kept = in_call[~folds]
            assert np.array_equal(bits(np.asarray(self.state.ssm)[:, kept]), bits(self.before.ssm[:, kept])), "checkpoint"
            self.old_half_is_intact(in_call[folds])
        self.accepted[rows] = np.where(a > 0, a - 1, self.accepted[rows])
        assert np.array_equal(np.asarray(self.state.accepted)[in_call], self.accepted[rows]), "accepted index"

    def old_half_is_intact(self, folded) -> None:
        """R20: a fold writes into the other half and leaves the records it folded where they were."""
        old = live_records(self.spec, self.before.extra.cursor[folded])
        for name, leaf in named_leaves(self.state.extra).items():
            if "cursor" not in name:
                now, before = np.asarray(leaf)[:, folded], named_leaves(self.before.extra)[name][:, folded]
                for i in range(len(folded)):
                    assert np.array_equal(bits(now[:, i][:, :, old[i]]), bits(before[:, i][:, :, old[i]])), name

    def advance(self, rows, tokens, w, a, out) -> None:
        """Take the accepted tokens into the oracle and compare outputs."""
        o, y = self.oracle.accept(rows, tokens, a)
        self.compare_outputs(out, y, o, np.arange(self.spec.width) < a[:, None])

    def compare_outputs(self, out, y, o, real) -> None:
        atol, rtol = OUTPUT_TOLERANCE[min(self.spec.act_dtype, self.spec.ssm_dtype)]
        for name, got, want in (("y", out[0], y), ("o", out[1], o)):
            got, want = got[real].astype(np.float64), want[real]
            np.testing.assert_allclose(got, want, atol=atol, rtol=rtol, err_msg=f"output {name}")

    def merge(self, requests) -> None:
        requests = np.asarray(requests)
        self.disturb()
        self.state = self.verbs.merge(self.state, self.ids(requests))
        self.settle(requests)

    def settle(self, requests) -> None:
        """The model after merge: cursors and accepted index 0, everything else of other slots untouched."""
        self.oracle.fold(requests)
        self.n[requests] = self.phase[requests] = self.accepted[requests] = 0
        self.check_integers()
        self.untouched(np.setdiff1d(np.arange(self.spec.hold), self.slot[requests]))
        self.hold_is_zero()

    def check_integers(self) -> None:
        assert np.array_equal(np.asarray(self.state.accepted)[self.slot], self.accepted), "accepted index"
        if self.spec.mode == "replay":
            cursor = 2 * self.spec.history * self.phase + self.n
            assert np.array_equal(np.asarray(self.state.extra.cursor)[self.slot], cursor), "cursor"

    def clear(self, requests) -> None:
        """Drop these requests and start new ones in the same slots."""
        requests = np.asarray(requests)
        self.disturb()
        self.state = self.verbs.clear(self.state, self.ids(requests))
        self.oracle.reset(requests)
        self.n[requests] = self.phase[requests] = self.accepted[requests] = 0
        self.check_integers()
        self.untouched(np.setdiff1d(np.arange(self.spec.hold), self.slot[requests]))
        for name, x in of_slots(self.spec, self.state, self.slot[requests]).items():
            assert not bits(x).any(), f"{name} survived clear"

    def move(self, requests) -> None:
        """Export, leave the old slots to whoever fills them with poison, restore into other slots."""
        spec, requests = self.spec, np.asarray(requests)
        self.disturb()
        count = len(requests)
        page_of = self.rng.permutation(spec.hold)
        pages = jax.tree.map(lambda x: jnp.full_like(x, NAN), ssm.init_pages(spec, spec.hold))
        pages = self.verbs.export(self.state, pages, page_of.astype(np.int32), self.ids(requests), np.int32(count))
        spare = np.setdiff1d(np.arange(spec.hold), page_of[:count])
        assert all(np.isnan(np.asarray(x)[spare]).all() for x in (pages.ssm, pages.conv)), "a foreign page was written"
        self.untouched(np.arange(spec.hold))
        free = np.concatenate([self.slot[requests], self.unowned()])
        self.slot[requests] = self.rng.permutation(free)[:count]
        self.n[requests] = self.phase[requests] = self.accepted[requests] = 0
        host = to_host(self.state)
        set_slots(spec, host, free, BIG if self.poison is None else self.poison[1])
        self.before = host
        self.state = self.verbs.restore(to_device(host), pages, page_of.astype(np.int32), self.ids(requests), np.int32(count))
        self.oracle.fold(requests)
        self.untouched(np.setdiff1d(np.arange(spec.hold), self.slot[requests]))
        self.hold_is_zero()
        self.check_integers()

    def prompt(self, requests, lengths) -> None:
        """merge, then a prompt chunk of lengths[i] tokens (0..PROMPT) for requests[i]."""
        spec, requests, lengths = self.spec, np.asarray(requests), np.asarray(lengths)
        tokens = self.draw(requests, PROMPT, lengths)
        fill = 0.0 if self.poison is None else self.poison[1]
        padded = Tokens(**{name: pad_to(x, spec.hold, fill) for name, x in vars(tokens).items()})
        self.disturb()
        sizes = pad_to(lengths.astype(np.int32), spec.hold, 0)
        x, inputs = np.moveaxis(padded.x, 2, 0), layer_inputs(padded, self.params)
        self.state, out = self.verbs.prompt(self.state, self.ids(requests), sizes, x, inputs, self.conv_params)
        self.settle(requests)
        out = tuple(np.moveaxis(np.asarray(x), 0, 2)[: len(requests)] for x in out)
        o, y = self.oracle.accept(requests, tokens, lengths, rounding="fold")
        self.oracle.fold(requests)
        real = np.arange(PROMPT) < lengths[:, None]
        assert not any(bits(x[~real]).any() for x in out), "output beyond a prompt is not exactly 0"
        self.compare_outputs(out, y, o, real)

    # -- checks

    def check(self) -> None:
        """Canonical state and window of every request against the oracle; the window exactly."""
        self.disturb()
        conv, state = (np.asarray(x) for x in self.verbs.snapshot(self.state, self.ids(np.arange(self.count))))
        window = self.oracle.window.astype(conv.dtype)
        assert np.array_equal(bits(conv[: self.count]), bits(window)), "convolution window"
        want = self.oracle.stored(slice(None))
        if self.spec.mode == "replay" and self.spec.ssm_dtype == "bf16":
            want = oracle.rounded(want, "bf16")
        error = oracle.rel_l2(state[: self.count], want)
        self.worst = max(self.worst, float(error.max()))
        assert error.max() <= STATE_TOLERANCE[self.spec.ssm_dtype], (
            f"state of request {error.max(axis=(1, 2)).argmax()}: {error.max()}"
        )
        assert not bits(state[self.count :]).any(), "snapshot of HOLD is not 0"
