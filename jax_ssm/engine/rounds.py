"""What runs on the device: a prompt chunk, and rounds of decoding, each a pure function with a donated carry.

A round is: complete the drafts, build the layout, update the contexts, verify, choose, accept, record, first draft of the
next window. It never visits the host. Rows that have finished are padding (HOLD) from then on.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_ssm.attention import Bucket, build_batch
from jax_ssm.engine.drafts import lookup
from jax_ssm.engine.sampling import accepted_length, choose
from jax_ssm.models import hybrid
from jax_ssm.models.hybrid import Contexts, ModelSpecs, ModelState
from jax_ssm.models.qwen3_5 import logits_of
from jax_ssm.state import dtype, pytree

Array = jax.Array


@pytree()
class Rows:
    """The requests of a bucket, one a row: R rows, M = max_len positions.

    slot [R] int32: HOLD for an empty row. request [R] int32: number of the prompt, part of its noise. tokens [R, M] int32
    and length [R] int32: prompt and text so far; the state holds the first length - 1 of them, the last one is the base
    token of the next window. limit [R] int32: length at which the text ends. live [R] bool: decoding.
    draft [R] int32 and hidden [R, D]: first draft of the next window and the MTP head's hidden state behind it; None
    without MTP drafts.
    """

    slot: Array
    request: Array
    tokens: Array
    length: Array
    limit: Array
    live: Array
    draft: Array | None
    hidden: Array | None


@pytree()
class Carry:
    """All that a call donates and returns: model state, contexts of the decode bucket, rows."""

    state: ModelState
    contexts: Contexts
    rows: Rows


@pytree()
class Choices:
    """Traced choices of a generation: temperature [] (0: greedy) and top_p [] fp32, seed [] uint32; eos [E] int32, the
    tokens that end a text (-1: none)."""

    temperature: Array
    top_p: Array
    seed: Array
    eos: Array


@pytree()
class Chunk:
    """One prompt chunk of N columns; rows with count 0 are left alone.

    fresh [R] bool: a new request begins here; its slot [R], request [R] and limit [R] int32 replace those of the row, and
    the slot is cleared. tokens [R, N] int32, padded on the right; count [R] int32, 0..N; following [R] int32: the prompt
    token after this chunk; last [R] bool: there is none, the first text token is chosen.
    """

    fresh: Array
    slot: Array
    request: Array
    limit: Array
    tokens: Array
    count: Array
    following: Array
    last: Array


@pytree()
class Emitted:
    """What the host fetches, once a call: tokens [n, R, W] int32, count [n, R] int32: new tokens of each row in each of
    the n rounds (0: idle); live [R] bool: rows that go on."""

    tokens: Array
    count: Array
    live: Array


def decode_bucket(specs: ModelSpecs, requests: int) -> Bucket:
    """Every live request verifies exactly W tokens a round."""
    return Bucket(requests, requests * specs.ssm.width, "decode", fixed=True)


def allocate(specs: ModelSpecs, requests: int, mtp: bool) -> Carry:
    """A carry of empty rows. Allocates the whole model state: `model_state_bytes(specs)` plus HOLD."""
    zeros = jnp.zeros(requests, jnp.int32)
    rows = Rows(
        slot=jnp.full(requests, specs.ssm.hold, jnp.int32),
        request=zeros,
        tokens=jnp.zeros((requests, specs.kv.max_len), jnp.int32),
        length=zeros + 1,
        limit=zeros + 1,
        live=jnp.zeros(requests, bool),
        draft=zeros if mtp else None,
        hidden=jnp.zeros((requests, specs.config.hidden_size), dtype(specs.ssm.act_dtype)) if mtp else None,
    )
    contexts = hybrid.prepare_contexts(specs, hybrid.allocate_contexts(specs, decode_bucket(specs, requests)))
    return Carry(hybrid.init_model_state(specs), contexts, rows)


def prefill(specs: ModelSpecs, params, carry: Carry, chunk: Chunk, choices: Choices) -> tuple[Carry, Emitted]:
    """Admit new requests, run one chunk of their prompts, and where it is the last one choose the first text token.

    Donate `carry`. Emits one round of one token (count 1) for rows whose prompt is complete. Rows that decode are not
    touched.
    """
    hold, rows = specs.ssm.hold, carry.rows
    busy = chunk.count > 0
    take = lambda new, old: jnp.where(chunk.fresh, new, old)  # noqa: E731
    rows = rows.replace(
        slot=take(chunk.slot, rows.slot), request=take(chunk.request, rows.request), limit=take(chunk.limit, rows.limit),
        length=take(0, rows.length), live=rows.live & ~chunk.fresh,
    )  # fmt: skip
    state = hybrid.clear_model(specs, carry.state, jnp.where(chunk.fresh, rows.slot, hold))
    slots = jnp.where(busy, rows.slot, hold)
    state, hidden, logits = hybrid.prefill_chunk(specs, params, state, slots, chunk.tokens, chunk.count)

    length = rows.length + jnp.where(busy, chunk.count, 0)
    first = choose(logits, choices.temperature, choices.top_p, choices.seed, rows.request, length)
    done = busy & chunk.last
    n = chunk.tokens.shape[1]
    tokens = record(rows.tokens, rows.length, chunk.tokens, jnp.where(busy, chunk.count, 0))
    tokens = record(tokens, length, first[:, None], done.astype(jnp.int32))
    ended = is_in(first, choices.eos) | (length + 1 >= rows.limit)
    rows = rows.replace(tokens=tokens, length=length + done, live=jnp.where(done, ~ended, rows.live))

    if rows.draft is not None:
        behind = jnp.where(chunk.last, first, chunk.following)  # the token after the chunk
        shifted = jnp.concatenate([chunk.tokens[:, 1:], jnp.zeros_like(behind)[:, None]], axis=1)
        shifted = jnp.where(jnp.arange(n) == chunk.count[:, None] - 1, behind[:, None], shifted)
        state, own, logits = hybrid.mtp_prefill(specs, params, state, slots, hidden, shifted, chunk.count)
        rows = rows.replace(
            draft=jnp.where(done, jnp.argmax(logits, axis=-1).astype(jnp.int32), rows.draft),
            hidden=jnp.where(done[:, None], own, rows.hidden),
        )
    return carry.replace(state=state, rows=rows), Emitted(first[None, :, None], done[None].astype(jnp.int32), rows.live)


def decode_round(specs: ModelSpecs, params, carry: Carry, choices: Choices) -> tuple[Carry, Array, Array]:
    """One whole round. Donate `carry`. Returns the new tokens [R, W] and how many of them each row really got [R]."""
    hold, w, rows, state = specs.ssm.hold, specs.ssm.width, carry.rows, carry.state
    r = rows.slot.shape[0]
    order = jnp.argsort(~rows.live, stable=True)  # a layout wants its live rows in front
    live, length, limit, request = (x[order] for x in (rows.live, rows.length, rows.limit, rows.request))
    slots = jnp.where(live, rows.slot[order], hold)

    base = jnp.take_along_axis(rows.tokens, rows.length[:, None] - 1, axis=1)[order]
    if w == 1:
        window = base
    elif rows.draft is None:
        window = jnp.concatenate([base, lookup(rows.tokens, rows.length, w - 1)[order]], axis=1)
    else:
        state, more = hybrid.mtp_draft(specs, params, state, slots, rows.hidden[order], rows.draft[order], w - 1)
        window = jnp.concatenate([base, more], axis=1)

    offsets = jnp.tile(jnp.arange(w, dtype=jnp.int32), r)
    batch = build_batch(
        specs.ssm,
        decode_bucket(specs, r),
        jnp.repeat(slots, w),
        b_mtp_index=offsets,
        b_ready_cache_len=state.kv.length,
    )
    state, contexts = hybrid.update_contexts(specs, carry.contexts, state, batch)
    state, hidden, logits = hybrid.verify(specs, params, contexts, state, window.reshape(-1), batch.positions)

    place = length[:, None] + jnp.arange(w)
    logits = logits.reshape(r, w, -1)
    who = jnp.broadcast_to(request[:, None], place.shape)
    chosen = choose(logits, choices.temperature, choices.top_p, choices.seed, who, place)
    n = jnp.minimum(accepted_length(chosen, window[:, 1:]), limit - length)
    ends = is_in(chosen, choices.eos)
    n = jnp.minimum(n, jnp.where(ends.any(axis=1), jnp.argmax(ends, axis=1) + 1, w))  # the text ends with its first eos
    n = jnp.where(live, n, 0).astype(jnp.int32)
    goes_on = live & (length + n < limit) & ~jnp.any(ends & (jnp.arange(w) < n[:, None]), axis=1)

    back = jnp.argsort(order)
    draft = own = None
    if rows.draft is not None:
        state, own = hybrid.mtp_layer(specs, params, contexts, state, hidden, chosen.reshape(-1), batch.positions)
        own = own[jnp.arange(r) * w + jnp.maximum(n - 1, 0)][back]  # the entry of the last accepted token
        draft = jnp.argmax(logits_of(params, own), axis=-1).astype(jnp.int32)
    state = hybrid.accept_model(specs, contexts, state, n)

    chosen, n = chosen[back], n[back]
    tokens = record(rows.tokens, rows.length, chosen, n)
    rows = rows.replace(tokens=tokens, length=rows.length + n, live=goes_on[back], draft=draft, hidden=own)
    return Carry(state, contexts, rows), chosen, n


def decode_rounds(specs: ModelSpecs, rounds: int, params, carry: Carry, choices: Choices) -> tuple[Carry, Emitted]:
    """`rounds` rounds in one call (static trip count; finished rows idle). Donate `carry`."""
    r, w = carry.rows.slot.shape[0], specs.ssm.width
    if rounds == 1:
        carry, chosen, n = decode_round(specs, params, carry, choices)
        return carry, Emitted(chosen[None], n[None], carry.rows.live)

    def body(i, loop):
        carry, tokens, count = loop
        carry, chosen, n = decode_round(specs, params, carry, choices)
        return carry, tokens.at[i].set(chosen), count.at[i].set(n)

    empty = jnp.zeros((rounds, r, w), jnp.int32), jnp.zeros((rounds, r), jnp.int32)
    carry, tokens, count = lax.fori_loop(0, rounds, body, (carry, *empty))
    return carry, Emitted(tokens, count, carry.rows.live)


def record(tokens: Array, start: Array, new: Array, count: Array) -> Array:
    """Write the first count [R] of new [R, N] into tokens [R, M] from position start [R]."""
    r, m = tokens.shape
    at = jnp.where(jnp.arange(new.shape[1]) < count[:, None], start[:, None] + jnp.arange(new.shape[1]), m)
    return tokens.at[jnp.arange(r)[:, None], at].set(new, mode="drop")


def is_in(tokens: Array, ids: Array) -> Array:
    """Which of the tokens are among ids [E]."""
    return jnp.any(tokens[..., None] == ids, axis=-1)
