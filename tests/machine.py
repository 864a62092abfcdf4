"""`Machine` drives a state through the verbs and the float64 oracle in step, and checks both after every step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from fixtures import (
    BIG,
    NAN,
    PROMPT,
    bits,
    draw_params,
    draw_tokens,
    filled,
    layer_inputs,
    live_records,
    named_leaves,
    of_slots,
    pad_to,
    poison_dead,
    set_slots,
    to_device,
    to_host,
    verbs,
)
from oracle import Tokens

import jax_ssm as ssm

STATE_TOLERANCE = {"fp32": 1e-5, "bf16": 4e-3}  # relative L2 per layer and head
OUTPUT_TOLERANCE = {"fp32": (2e-6, 2e-5), "bf16": (6e-3, 2e-2)}  # atol, rtol; "fp32" when nothing is stored as bf16


class Machine:
    """N requests in permuted slots, driven through the verbs and through the oracle, checked after every step.

    poison: (a, b): bytes that carry no accepted token are set to a (requests with even number) or b before every step,
    and so are the contents of rejected drafts, padding rows and slots that nobody owns. None: they stay as they are.
    order_seed: the rows of a batch are shuffled by it, and nothing else is.
    """

    def __init__(self, spec, count: int, *, seed=0, gate="slow", poison=(NAN, BIG), verbs_of=verbs, order_seed=0):
        self.spec, self.count, self.poison = spec, count, poison
        self.rng, self.order = np.random.default_rng(seed), np.random.default_rng(order_seed).permutation
        self.params = draw_params(spec, gate, seed)
        self.conv_params = (self.params.weight, self.params.bias)
        self.oracle = oracle.Requests(spec, self.params, count, "fold" if spec.mode == "replay" else "each")
        self.verbs = verbs_of(spec)
        self.slot = self.rng.permutation(spec.hold)[:count]
        self.n = np.zeros(count, int)  # model of the replay cursor
        self.phase = np.zeros(count, int)
        self.accepted = np.zeros(count, int)
        self.folds = 0
        self.trace = []  # bits of all outputs at accepted tokens
        self.worst = 0.0  # largest relative error of a state so far
        fill = self.rng.standard_normal() if poison is None else poison[0]
        self.state = self.verbs.clear(to_device(filled(spec, fill)), self.ids(np.arange(count)))

    # -- slots and tokens

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
        tokens, order = self.draw(rows, spec.width, accepts[rows]), self.order(len(rows))
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
            self.trace.append(got[real].tobytes())
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
