"""Oracle and driver for attention tests: float64 softmax over plain Python lists, and a session that feeds both sides.

The oracle knows no slots, pools, masks or blocks: it keeps the accepted keys and values of each request in a list.
"""

from __future__ import annotations

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_ssm import attention
from jax_ssm.attention import Bucket, FullAttentionInputs, KVSpec, LayerSpec
from jax_ssm.attention import kv as kv_module
from jax_ssm.attention import plan as plan_module
from jax_ssm.spec import plan_layers

NAN, BIG = float("nan"), 3e38
TOLERANCE = {"fp32": (2e-6, 2e-5), "bf16": (1e-3, 2**-7)}  # atol, rtol
NUMPY = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16}


def softmax_attention(q, k, v, scale: float) -> np.ndarray:
    """One query: q [heads, D], k [n, KVH, D], v [n, KVH, Dv] -> [heads, Dv], float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[0] // k.shape[1]
    out = []
    for h in range(q.shape[0]):
        scores = k[:, h // group] @ q[h] * scale
        weights = np.exp(scores - scores.max())
        out.append(weights / weights.sum() @ v[:, h // group])
    return np.stack(out)


def bind(spec: KVSpec):
    """Bindings of a model of full-attention layers."""
    return attention.group_layers(plan_layers(("full",) * spec.layers, state_key=spec.state_key), None, spec)


def make_step(spec: KVSpec, bucket: Bucket):
    """(jitted round or chunk, prepared context): batch, update, forward of every layer, accept; the state is donated.

    rows, extra [R or T] int32 fill the bucket: slots and window positions, or slots and chunk lengths.
    """
    bindings = bind(spec)
    layer_spec = bindings[0].spec

    @partial(jax.jit, donate_argnums=0)
    def run(state, ctx, rows, extra, inputs, lengths):
        names = ("b_mtp_index", "b_q_seq_len")
        batch = attention.build_batch(
            spec, bucket, rows, b_ready_cache_len=state.length, **{names[bucket.phase == "prefill"]: extra}
        )
        state, ctx = attention.update(layer_spec, ctx, state, batch)
        outputs = []
        for binding, (q, k, v) in zip(bindings, inputs, strict=True):
            state, o = attention.forward(binding, ctx, state, FullAttentionInputs(q, k, v))
            outputs.append(o)
        return attention.accept(layer_spec, ctx, state, lengths), ctx, outputs

    return run, attention.prepare(layer_spec, attention.allocate_context(layer_spec, bucket))


@lru_cache
def shared_step(spec: KVSpec, bucket: Bucket, block: int):
    """`make_step`, compiled once per spec, bucket and block size for all tests."""
    return make_step(spec, bucket)


@lru_cache
def clear(spec: KVSpec):
    return jax.jit(partial(attention.clear_kv, spec))


class Session:
    """A KVState driven by the public functions, beside the accepted keys and values of every slot and layer.

    Before every call all that no request owns (beyond the committed tokens, free slots, HOLD, padding rows of the inputs)
    is overwritten with `poison`. fresh: compile anew (for planted faults).
    """

    def __init__(self, spec: KVSpec, seed: int = 0, poison: float = NAN, fresh: bool = False):
        self.spec, self.poison, self.rng, self.fresh = spec, poison, np.random.default_rng(seed), fresh
        self.bindings = bind(spec)
        self.layer_spec: LayerSpec = self.bindings[0].spec
        self.state = attention.init_kv(spec)
        self.owned = {}  # slot -> list over layers of lists of (k, v)
        self.steps = {}

    def open(self, slot: int) -> None:
        self.state = clear(self.spec)(self.state, np.array([slot], np.int32))
        self.owned[slot] = [[] for _ in range(self.spec.layers)]

    def length(self, slot: int) -> int:
        return len(self.owned[slot][0])

    def poisoned(self):
        """The state with everything overwritten that no request owns."""
        length = np.zeros(self.spec.slots, int)
        for slot in self.owned:
            length[slot] = self.length(slot)
        np.testing.assert_array_equal(np.asarray(self.state.length)[sorted(self.owned)], length[sorted(self.owned)])
        mine = (np.arange(self.spec.max_len) < length[:, None])[None, :, :, None, None]
        bad = np.asarray(self.poison, NUMPY[self.spec.dtype]).view(kv_module.storage(self.spec))
        k, v = (jnp.asarray(np.where(mine, x, bad)) for x in (self.state.k, self.state.v))
        return self.state.replace(k=k, v=v)

    def draw(self, lead: tuple[int, ...], real: np.ndarray):
        """Inputs of one layer in the spec's dtype, poison where `real` (shape `lead`) is false."""
        spec, kind = self.spec, NUMPY[self.spec.dtype]

        def one(heads):
            x = self.rng.normal(size=lead + (heads, spec.head_dim)).astype(kind)
            return np.where(real[..., None, None], x, np.asarray(self.poison, kind))

        return one(spec.heads), one(spec.kv_heads), one(spec.kv_heads)

    def step(self, bucket: Bucket):
        """(jitted step, context) of a bucket."""
        if bucket not in self.steps:
            self.steps[bucket] = (
                make_step(self.spec, bucket) if self.fresh else shared_step(self.spec, bucket, plan_module.MAX_BLOCK)
            )
        return self.steps[bucket]

    def verify(self, bucket: Bucket, rows: list[tuple[int, int, int]], check: bool = True):
        """One round: rows of (slot, tokens, accepted). Returns outputs per layer, compared with the oracle."""
        ids = np.concatenate([np.full(n, slot) for slot, n, _ in rows]).astype(np.int32)
        index = np.concatenate([np.arange(n) for _, n, _ in rows]).astype(np.int32)
        inputs = [self.draw((bucket.tokens,), np.arange(bucket.tokens) < ids.size) for _ in self.bindings]
        accepted = np.zeros(bucket.requests, np.int32)
        accepted[: len(rows)] = [a for _, _, a in rows]
        outputs = self.run(bucket, bucket.tokens, ids, index, inputs, accepted)
        start = 0
        for slot, n, a in rows:
            for layer, (q, k, v) in enumerate(inputs):
                self.follow(
                    slot, layer, *(x[start : start + n] for x in (q, k, v)), outputs[layer][start : start + n], a, check
                )
            start += n
        for o in outputs:
            assert not np.any(o[start:]), "padding rows must be exactly zero"
        return outputs

    def prefill(self, bucket: Bucket, rows: list[tuple[int, int]], inputs=None, check: bool = True):
        """One prompt chunk: rows of (slot, tokens). Returns outputs per layer [B, N, heads, D]."""
        slots, lengths = np.array(rows, np.int32).reshape(-1, 2).T
        real = np.arange(bucket.tokens) < np.pad(lengths, (0, bucket.requests - len(rows)))[:, None]
        inputs = inputs or [self.draw(real.shape, real) for _ in self.bindings]
        outputs = self.run(bucket, bucket.requests, slots, lengths, inputs, None)
        for row, (slot, n) in enumerate(rows):
            for layer, (q, k, v) in enumerate(inputs):
                self.follow(slot, layer, *(x[row, :n] for x in (q, k, v)), outputs[layer][row, :n], n, check)
        for o in outputs:
            assert not np.any(o[~real]), "padding must be exactly zero"
        return outputs

    def run(self, bucket: Bucket, rows: int, slots, extra, inputs, lengths):
        """Call the jitted step on the poisoned state; HOLD must come out as it went in."""
        run, ctx = self.step(bucket)
        state = self.poisoned()
        hold = [np.asarray(x[:, self.spec.hold]) for x in (state.k, state.v)]
        pad = (0, rows - len(slots))
        slots = np.pad(slots, pad, constant_values=self.spec.hold)
        self.state, ctx, outputs = run(state, ctx, slots, np.pad(extra, pad), inputs, lengths)
        self.steps[bucket] = run, ctx
        for before, after in zip(hold, (self.state.k, self.state.v), strict=True):
            np.testing.assert_array_equal(before, np.asarray(after[:, self.spec.hold]))
        return [np.asarray(o, np.float32) for o in outputs]

    def follow(self, slot, layer, q, k, v, got, accepted, check) -> None:
        """Extend the oracle by a window, compare its outputs, keep the accepted tokens."""
        mine = list(self.owned[slot][layer])
        keep = len(mine) + accepted
        for t in range(len(q)):
            mine.append((k[t], v[t]))
            if check:
                want = softmax_attention(q[t], *map(np.stack, zip(*mine, strict=True)), self.spec.softmax_scale)
                atol, rtol = TOLERANCE[self.spec.dtype]
                np.testing.assert_allclose(got[t], want, atol=atol, rtol=rtol, err_msg=f"slot {slot}, layer {layer}, token {t}")
        self.owned[slot][layer] = mine[:keep]
