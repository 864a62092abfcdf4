"""The attention runtime around the arithmetic: groups, contexts and their life cycle, selector, planner, varlen, `out`."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import NAN, softmax_attention

from jax_ssm import attention, executors
from jax_ssm.acceptance import StateAcceptance, check_acceptance
from jax_ssm.attention import (
    BackendError,
    Bucket,
    Capability,
    Constraints,
    FullAttentionInputs,
    KVSpec,
    LayerSpec,
    LinearAttentionInputs,
    WorkspaceRequirement,
    full,
    linear,
    plan,
)
from jax_ssm.conv import conv_forward
from jax_ssm.gates import LinearInputs
from jax_ssm.spec import KernelConfig, SSMSpec, plan_layers
from jax_ssm.state import init_state

KINDS = ("gdn", "gdn", "full", "gdn", "full")
W, SLOTS = 2, 5
HEADS = {"q_heads": 2, "k_heads": 2, "v_heads": 4, "k_dim": 8, "v_dim": 8}


def ssm_spec(mode="native", rule="gdn", **fields) -> SSMSpec:
    heads = HEADS if rule == "gdn" else HEADS | {"v_heads": 2}
    return SSMSpec(
        rule, **{"layers": 3, "slots": SLOTS, "width": W, "history": 4, "act_dtype": "fp32"} | heads | fields, mode=mode
    )


def kv_spec(**fields) -> KVSpec:
    return KVSpec(**{"layers": 2, "slots": SLOTS, "max_len": 16, "heads": 4, "kv_heads": 2, "head_dim": 8, "width": W} | fields)


KV = kv_spec(dtype="fp32")
BINDINGS = attention.group_layers(plan_layers(KINDS), ssm_spec(), KV)
LINEAR, FULL = BINDINGS[0].spec, BINDINGS[2].spec
INIT = {"gdn": lambda spec: init_state(spec.ssm), "full": lambda spec: attention.init_kv(spec.kv)}


def draw(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def linear_inputs(spec: SSMSpec, lead: tuple[int, ...], seed: int = 0) -> LinearAttentionInputs:
    rng = np.random.default_rng(seed)
    gate = spec.v_heads * spec.gates
    return LinearAttentionInputs(
        qkv=draw(rng, *lead, spec.channels),
        conv_weight=draw(rng, spec.channels, spec.conv_width),
        conv_bias=None,
        a=draw(rng, *lead, gate),
        b=draw(rng, *lead, spec.v_heads),
        A_log=draw(rng, spec.v_heads),
        dt_bias=draw(rng, gate),
    )


def full_inputs(lead: tuple[int, ...], seed: int = 0) -> FullAttentionInputs:
    rng = np.random.default_rng(seed)
    return FullAttentionInputs(*(draw(rng, *lead, heads, 8) for heads in (4, 2, 2)))


def inputs_of(spec: LayerSpec, lead):
    return full_inputs(lead) if spec.kind == "full" else linear_inputs(spec.ssm, lead)


def decode_batch(slots, lengths, bucket: Bucket, cache_len=None):
    ids = np.repeat(slots, lengths).astype(np.int32)
    index = np.concatenate([np.arange(n) for n in lengths] + [np.zeros(0)]).astype(np.int32)
    cache_len = np.zeros(SLOTS, np.int32) if cache_len is None else cache_len
    return attention.build_batch(KV, bucket, ids, b_mtp_index=index, b_ready_cache_len=cache_len)


def ready(spec: LayerSpec, bucket: Bucket):
    return attention.prepare(spec, attention.allocate_context(spec, bucket))


# --- groups (R61, R62, R64) -----------------------------------------------------------------------------------------


def test_R62_two_groups_two_contexts_shared_inside_a_group():
    assert [b.spec.group_id for b in BINDINGS] == ["main.gdn", "main.gdn", "main.full", "main.gdn", "main.full"]
    assert [b.layer for b in BINDINGS] == [0, 1, 2, 3, 4] and [b.row for b in BINDINGS] == [0, 1, 0, 2, 1]
    assert len({b.spec for b in BINDINGS}) == 2 and len({hash(b) for b in BINDINGS}) == 5
    bucket = Bucket(2, 4)
    contexts = {spec.group_id: ready(spec, bucket) for spec in (LINEAR, FULL)}
    assert attention.context(contexts, BINDINGS[0]) is attention.context(contexts, BINDINGS[3])
    assert attention.context(contexts, BINDINGS[2]) is attention.context(contexts, BINDINGS[4])
    assert attention.context(contexts, BINDINGS[0]) is not attention.context(contexts, BINDINGS[2])


def test_looped_layers_get_their_own_rows():
    """R40: a physical layer that runs twice has two bindings with one parameter index and two rows."""
    bindings = attention.group_layers(plan_layers(("gdn", "full"), loop=(0, 2), loop_count=2), ssm_spec(layers=2), KV)
    assert [(b.layer, b.row) for b in bindings] == [(0, 0), (1, 0), (0, 1), (1, 1)]


@pytest.mark.parametrize(
    "ssm,kv,message",
    [
        (None, KV, "ssm=None is not allowed: a spec: the plan has layers of kind 'gdn'"),
        (ssm_spec(), None, "kv=None"),
        (ssm_spec(layers=2), KV, "ssm.layers=2 is not allowed: 3, the executions of kind 'gdn'"),
        (ssm_spec(rule="kda"), KV, "ssm.rule='kda' is not allowed: equal to kind='gdn'"),
        (ssm_spec(), kv_spec(state_key="draft"), "kv.state_key='draft' is not allowed: the plan's 'main'"),
    ],
)
def test_group_layers_refuses_what_does_not_fit(ssm, kv, message):
    with pytest.raises(ValueError, match=message):
        attention.group_layers(plan_layers(KINDS), ssm, kv)


def test_R64_backends_hold_no_arrays():
    for module in (linear, full):
        assert not [name for name, x in vars(module).items() if isinstance(x, (jax.Array, np.ndarray))]
        assert module.workspace(FULL if module is full else LINEAR, Bucket(2, 4)) is None
    assert hash(WorkspaceRequirement("split", 1024, "fp32", "group"))


# --- life cycle (R63) -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec,binding", [(LINEAR, BINDINGS[0]), (FULL, BINDINGS[2])], ids=["linear", "full"])
def test_R63_wrong_order_raises(spec, binding):
    bucket, state = Bucket(2, 4), INIT[spec.kind](spec)
    batch, inputs, lengths = decode_batch([3], [2], bucket), inputs_of(spec, (4,)), jnp.array([1, 0])
    raw = attention.allocate_context(spec, bucket)
    with pytest.raises(RuntimeError, match=r"update: the step prepare"):
        attention.update(spec, raw, state, batch)
    with pytest.raises(RuntimeError, match=r"forward: the step prepare"):
        attention.forward(binding, raw, state, inputs)
    ctx = attention.prepare(spec, raw)
    with pytest.raises(RuntimeError, match=r"prepare: this context is already prepared"):
        attention.prepare(spec, ctx)
    with pytest.raises(RuntimeError, match=r"forward: the step update"):
        attention.forward(binding, ctx, state, inputs)
    with pytest.raises(RuntimeError, match=r"accept: the step update"):
        attention.accept(spec, ctx, state, lengths)
    state, ctx = attention.update(spec, ctx, state, batch)
    with pytest.raises(ValueError, match="lengths=None"):
        attention.accept(spec, ctx, state)


@pytest.mark.parametrize("spec", [LINEAR, FULL], ids=["linear", "full"])
def test_R63_accept_refuses_lengths_out_of_range(spec):
    """Concrete lengths are integers, one a row, 1..verify_len in live rows; padding rows are not looked at."""
    state, ctx = attention.update(spec, ready(spec, Bucket(2, 4)), INIT[spec.kind](spec), decode_batch([3], [2], Bucket(2, 4)))
    for bad in ([0, 0], [3, 0], [-1, 0]):
        with pytest.raises(ValueError, match=r"lengths=\[.* is not allowed: row 0 needs 1..2 tokens"):
            attention.accept(spec, ctx, state, jnp.array(bad))
    for bad in (jnp.array([1.0, 0.0]), jnp.array([1]), jnp.array([True, False])):
        with pytest.raises(ValueError, match=r"lengths=.* is not allowed: integers of shape \(2,\)"):
            attention.accept(spec, ctx, state, bad)
    attention.accept(spec, ctx, state, jnp.array([2, 9]))
    chunk = attention.build_batch(KV, Bucket(2, 4, "prefill"), [3], b_q_seq_len=[3])
    state, ctx = attention.update(spec, ready(spec, Bucket(2, 4, "prefill")), state, chunk)
    with pytest.raises(ValueError, match="row 0 needs 0..3 tokens" if spec is FULL else "a prompt chunk whole"):
        attention.accept(spec, ctx, state, jnp.array([4, 0]))


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_R63_full_attention_refuses_a_second_accept(phase):
    """The lengths that a context was updated at are no longer those of the state."""
    bucket, lengths = Bucket(2, 4, phase), jnp.array([1, 0]) if phase == "decode" else None
    decode = phase == "decode"
    batch = decode_batch([3], [2], bucket) if decode else attention.build_batch(KV, bucket, [3], b_q_seq_len=[3])
    state, ctx = attention.update(FULL, ready(FULL, bucket), attention.init_kv(KV), batch)
    state = attention.accept(FULL, ctx, state, lengths)
    with pytest.raises(RuntimeError, match="row 0 was updated at 0 tokens, its slot has [13]: accepted before"):
        attention.accept(FULL, ctx, state, lengths)


def test_update_refuses_a_state_that_does_not_fit():
    """Kind, mode, geometry and dtype of the state, and the group of the context."""
    bucket = Bucket(2, 4)
    batch, cases = (
        decode_batch([3], [2], bucket),
        (
            (FULL, init_state(LINEAR.ssm), "state=ConvSSMState is not allowed: this spec needs a KVState"),
            (LINEAR, attention.init_kv(KV), "state=KVState is not allowed: this spec needs a ConvSSMState"),
            (
                FULL,
                attention.init_kv(kv_spec(dtype="fp32", max_len=8)),
                r"state.k=float32\(2, 5, 8, 2, 8\) .* float32\(2, 5, 16",
            ),
            (FULL, attention.init_kv(kv_spec()), "state.k=uint16.* needs float32"),
            (LINEAR, init_state(ssm_spec(layers=2)), r"state.ssm=float32\(2, .* needs float32\(3, "),
            (LINEAR, init_state(ssm_spec("replay")), "state.ssm=|state.extra=ReplayHistory"),
        ),
    )
    for spec, state, message in cases:
        with pytest.raises(ValueError, match=message):
            attention.update(spec, ready(spec, bucket), state, batch)
    with pytest.raises(ValueError, match=r"spec.group_id='main.gdn' \(gdn\): this context is of 'main.full'"):
        attention.update(LINEAR, ready(FULL, bucket), init_state(LINEAR.ssm), batch)


@pytest.mark.parametrize("spec,binding", [(LINEAR, BINDINGS[0]), (FULL, BINDINGS[2])], ids=["linear", "full"])
def test_a_traced_context_that_was_never_updated_is_inert(spec, binding):
    state = INIT[spec.kind](spec)

    @jax.jit
    def step(ctx, state, inputs):
        new, o = attention.forward(binding, ctx, state, inputs)
        return attention.accept(spec, ctx, new, jnp.array([2, 2])), o

    after, o = step(ready(spec, Bucket(2, 4)), state, inputs_of(spec, (4,)))
    assert not np.any(o)
    jax.tree.map(np.testing.assert_array_equal, after, state)


def test_update_refuses_a_batch_of_another_shape():
    ctx, state = ready(FULL, Bucket(2, 4)), attention.init_kv(KV)
    other = decode_batch([1, 0], [2, 2], Bucket(2, 4, "decode", fixed=True))
    with pytest.raises(ValueError, match="fixed=True does not fit"):
        attention.update(FULL, ctx, state, other)
    with pytest.raises(ValueError, match="requests=3 does not fit"):
        attention.update(FULL, ctx, state, decode_batch([1], [2], Bucket(3, 4)))
    chunk = attention.build_batch(KV, Bucket(2, 4, "prefill"), [1], b_q_seq_len=[3])
    with pytest.raises(ValueError, match="needs a DecodeBatch"):
        attention.update(FULL, ctx, state, chunk)
    with pytest.raises(ValueError, match="group 'main.full'"):
        attention.forward(BINDINGS[0], ctx.replace(updated=jnp.ones((), bool)), state, None)
    with pytest.raises(ValueError, match="backend='other'"):
        binding = BINDINGS[2].__class__(FULL, 0, 0, "main", "other")
        attention.forward(binding, ctx.replace(updated=jnp.ones((), bool)), state, None)


@pytest.mark.parametrize("fixed", [False, True])
def test_R63_one_executable_and_one_structure_over_many_updates(fixed):
    """update changes no structure, shape or dtype; any number of live requests runs the same executable."""
    bucket = Bucket(4, 8, "decode", fixed)
    specs = {"main.gdn": LINEAR, "main.full": FULL}

    @partial(jax.jit, donate_argnums=(0, 1))
    def run(states, ctxs, ids, index, linear_in, full_in, lengths):
        states, ctxs = dict(states), dict(ctxs)
        batch = attention.build_batch(KV, bucket, ids, b_mtp_index=index, b_ready_cache_len=states["main.full"].length)
        outputs = []
        for key, spec in specs.items():
            states[key], ctxs[key] = attention.update(spec, ctxs[key], states[key], batch)
        for binding in BINDINGS:
            key = binding.spec.group_id
            inputs = full_in if binding.spec.kind == "full" else linear_in
            states[key], o = attention.forward(binding, attention.context(ctxs, binding), states[key], inputs)
            outputs.append(o)
        for key, spec in specs.items():
            states[key] = attention.accept(spec, ctxs[key], states[key], lengths)
        return states, ctxs, outputs

    states = {key: INIT[spec.kind](spec) for key, spec in specs.items()}
    ctxs = {key: ready(spec, bucket) for key, spec in specs.items()}
    avals = lambda tree: (jax.tree.structure(tree), [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(tree)])  # noqa: E731
    before, rng = avals(ctxs), np.random.default_rng(0)
    for count in (1, 4, 0, 2, 3):
        slots = rng.permutation(SLOTS - 1)[:count]
        ids = np.pad(np.repeat(slots, W), (0, 8 - W * count), constant_values=SLOTS - 1).astype(np.int32)
        index = np.tile(np.arange(W), 4).astype(np.int32)
        args = linear_inputs(LINEAR.ssm, (8,)), full_inputs((8,)), np.minimum(1, np.arange(4) < count).astype(np.int32)
        states, ctxs, outputs = run(states, ctxs, ids, index, *args)
        assert avals(ctxs) == before
        assert run._cache_size() == 1
        for o in outputs:
            assert np.all(np.isfinite(o)) and not np.any(o[W * count :]) and (count == 0 or np.any(o[: W * count]))


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_forward_names_inputs_of_another_shape(phase):
    bucket = Bucket(2, 4, phase)
    lead = (4,) if phase == "decode" else (2, 4)
    for spec, binding, name in ((LINEAR, BINDINGS[0], "qkv"), (LINEAR, BINDINGS[0], "a"), (FULL, BINDINGS[2], "k")):
        ctx, inputs = ready(spec, bucket).replace(updated=jnp.ones((), bool)), inputs_of(spec, lead)
        for bad in (getattr(inputs, name)[..., :1], getattr(inputs, name)[:1]):
            with pytest.raises(ValueError, match=rf"{name}.shape=.* is not allowed: Bucket\(requests=2"):
                attention.forward(binding, ctx, INIT[spec.kind](spec), inputs.replace(**{name: bad}))


# --- linear layers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule,mode", [("gdn", "replay"), ("kda", "compact")])
def test_linear_backend_is_the_verbs_and_nothing_else(rule, mode):
    """Two rounds through the runtime and through conv_forward / executors leave the same bits."""
    ssm, bucket = ssm_spec(mode, rule, layers=1), Bucket(2, 4)
    (binding,) = attention.group_layers(plan_layers((rule,)), ssm, None)
    spec, inputs = binding.spec, jax.tree.map(jnp.asarray, linear_inputs(ssm, (4,)))

    def through_runtime(state, ctx, batch, lengths):
        state, ctx = attention.update(spec, ctx, state, batch)
        state, o = attention.forward(binding, ctx, state, inputs)
        return attention.accept(spec, ctx, state, lengths), ctx, o

    def through_verbs(state, ctx, batch, lengths):
        state, receipt = executors.prepare(ssm, state, batch.layout)
        state, y = conv_forward(ssm, state, receipt, 0, inputs.qkv, inputs.conv_weight)
        cut = ssm.q_heads * ssm.k_dim
        q, k, v = (y[:, :cut].reshape(4, -1, 8), y[:, cut : 2 * cut].reshape(4, -1, 8), y[:, 2 * cut :].reshape(4, -1, 8))
        core = LinearInputs(q, k, v, inputs.a, inputs.b, inputs.A_log, inputs.dt_bias)
        state, o = executors.forward(ssm, state, receipt, 0, core)
        return executors.accept(ssm, state, StateAcceptance((receipt,), lengths)), ctx, o

    results = []
    for run in (through_runtime, through_verbs):
        run, state, ctx = jax.jit(run), init_state(ssm), ready(spec, bucket)
        for slots, lengths, accepted in (([3, 0], [2, 1], [2, 1]), ([0, 3], [2, 2], [1, 2])):
            state, ctx, o = run(state, ctx, decode_batch(slots, lengths, bucket), jnp.array(accepted, jnp.int32))
        results.append((state, o))
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize("rule,mode", [("gdn", "replay"), ("kda", "native")])
def test_linear_prefill_resumes_after_decode_at_any_split(rule, mode):
    """R24: decode, begin_prefill, chunks in several splits, decode again: the same outputs as token by token."""
    ssm = ssm_spec(mode, rule, layers=1)
    (binding,) = attention.group_layers(plan_layers((rule,)), ssm, None)
    spec, n = binding.spec, 11
    tokens = linear_inputs(ssm, (n,))

    def part(start, stop, lead, pad):
        def cut(x):
            x = np.pad(x[start:stop], ((0, pad - (stop - start)), (0, 0)), constant_values=NAN)
            return x if lead is None else np.stack([np.full_like(x, NAN), x])

        return tokens.replace(qkv=cut(tokens.qkv), a=cut(tokens.a), b=cut(tokens.b))

    @partial(jax.jit, static_argnums=0)
    def step(bucket, state, slots, extra, inputs, lengths):
        ctx = ready(spec, bucket)
        cache = jnp.zeros(SLOTS, jnp.int32)
        names = {"decode": {"b_mtp_index": extra, "b_ready_cache_len": cache}, "prefill": {"b_q_seq_len": extra}}
        batch = attention.build_batch(ssm, bucket, slots, **names[bucket.phase])
        if bucket.phase == "prefill":
            state = attention.begin_prefill(spec, state, slots)
        state, ctx = attention.update(spec, ctx, state, batch)
        state, o = attention.forward(binding, ctx, state, inputs)
        return attention.accept(spec, ctx, state, lengths), o

    def decode(state, t):
        state, o = step(Bucket(1, 1), state, np.array([2]), np.array([0]), part(t, t + 1, None, 1), np.array([1]))
        return state, np.asarray(o[0])

    def chunk(state, start, stop):
        slots, lengths = np.array([ssm.hold, 2]), np.array([0, stop - start])
        state, o = step(Bucket(2, 8, "prefill"), state, slots, lengths, part(start, stop, 2, 8), None)
        o = np.asarray(o)
        assert not np.any(o[0]) and not np.any(o[1, stop - start :])
        return state, o[1, : stop - start]

    def run(edges):
        state, out = init_state(ssm), []
        for t in range(3):
            state, o = decode(state, t)
            out.append(o[None])
        for start, stop in zip(edges, edges[1:], strict=False):
            state, o = chunk(state, start, stop)
            out.append(o)
        for t in range(edges[-1], n):
            state, o = decode(state, t)
            out.append(o[None])
        return np.concatenate(out)

    want = run([3])
    for edges in ([3, 10], [3, 5, 10], [3, 4, 4, 9]):
        np.testing.assert_allclose(run(edges), want, atol=2e-6, rtol=2e-5)


def test_begin_prefill_skips_padding_ids():
    state = init_state(LINEAR.ssm)
    for slots in ([SLOTS - 1, SLOTS - 1], [1, SLOTS - 1]):
        attention.begin_prefill(LINEAR, state, jnp.array(slots))
    with pytest.raises(ValueError, match="99"):
        attention.begin_prefill(LINEAR, state, jnp.array([99]))


@pytest.mark.parametrize("draft_mode", ["native", "replay"])
def test_R66_main_and_draft_share_a_layout_and_read_their_own_counts(draft_mode):
    """One layout object, two states of other modes, other accepted lengths: each receipt reads its own state."""
    draft_ssm = ssm_spec(draft_mode, layers=1, state_key="draft")
    main = attention.group_layers(plan_layers(("gdn",)), ssm_spec(layers=1), None)[0].spec
    draft = attention.group_layers(plan_layers(("gdn",), state_key="draft"), draft_ssm, None)[0].spec
    bucket = Bucket(2, 4)
    batch = decode_batch([2, 0], [2, 2], bucket)
    states = {"main": init_state(main.ssm), "draft": init_state(draft.ssm)}
    accepted = {"main": jnp.array([2, 1]), "draft": jnp.array([1, 2])}
    ctxs = {}
    for key, spec in (("main", main), ("draft", draft)):
        states[key], ctx = attention.update(spec, ready(spec, bucket), states[key], batch)
        assert ctx.receipt.layout is batch.layout
        states[key] = attention.accept(spec, ctx, states[key], accepted[key])
        states[key], ctxs[key] = attention.update(spec, ctx, states[key], batch)
    assert ctxs["main"].receipt.layout is ctxs["draft"].receipt.layout
    assert ctxs["main"].receipt.offset.tolist() == [1, 0] and ctxs["draft"].receipt.offset.tolist() == [0, 1]
    assert ctxs["main"].receipt.state_key == "main" and ctxs["draft"].receipt.state_key == "draft"
    with pytest.raises(ValueError, match="state_key|mode"):
        check_acceptance(main.ssm, StateAcceptance((ctxs["draft"].receipt,), jnp.array([1, 1])))


# --- batches --------------------------------------------------------------------------------------------------------


def test_R92_build_batch_pads_cuts_and_positions():
    """Unpadded input fills the bucket with HOLD; positions are committed tokens plus window offset; request rows are cut
    to the bucket."""
    cache = np.array([10, 11, 12, 13, 99], np.int32)
    batch = decode_batch([3, 1], [2, 1], Bucket(3, 4), cache)
    assert batch.layout.cu.tolist() == [0, 2, 3, 3] and batch.layout.slots.tolist() == [3, 1, 4]
    assert batch.positions.tolist() == [13, 14, 11, 0] and batch.layout.row_request.tolist() == [0, 0, 1, 3]
    with pytest.raises(ValueError, match="names 3 requests: the bucket has 2"):
        decode_batch([3, 1, 0], [1, 1, 1], Bucket(2, 4))
    cut = jax.jit(lambda ids: attention.build_batch(KV, Bucket(2, 4), ids, b_mtp_index=[0, 0, 0], b_ready_cache_len=cache))
    layout = cut(jnp.array([3, 1, 0])).layout
    assert layout.slots.tolist() == [3, 1] and layout.row_request.tolist() == [0, 1, 2, 2] and int(layout.count) == 2


@pytest.mark.parametrize(
    "bucket,arguments,message",
    [
        (Bucket(2, 4), {"b_req_idx": [0] * 5}, "has room for 4 rows"),
        (Bucket(2, 4), {"b_req_idx": [0]}, "b_mtp_index=None"),
        (Bucket(2, 4), {"b_req_idx": [0], "b_mtp_index": [0]}, "b_ready_cache_len=None"),
        (Bucket(2, 4), {"b_req_idx": [0, 0], "b_mtp_index": [0]}, "one value for each of the 2 rows"),
        (Bucket(5, 8), {"b_req_idx": [0]}, "requests=5 is not allowed: at most"),
        (Bucket(2, 3, "decode", True), {"b_req_idx": [0]}, "tokens=3 is not allowed: requests"),
        (Bucket(2, 4, "prefill"), {"b_req_idx": [0]}, "b_q_seq_len=None"),
        (Bucket(2, 4, "prefill"), {"b_req_idx": [0], "b_q_seq_len": [5]}, "0..4 tokens"),
        (Bucket(2, 4, "prefill"), {"b_req_idx": [1, 1], "b_q_seq_len": [2, 2]}, "distinct slots in 0..3"),
    ],
)
def test_build_batch_names_what_does_not_fit(bucket, arguments, message):
    with pytest.raises(ValueError, match=message):
        attention.build_batch(KV, bucket, **arguments)


# --- selector (R68) -------------------------------------------------------------------------------------------------

GPU = Capability("gpu", "H200", frozenset({"pallas", "triton"}))
WIDE = LayerSpec("gdn", "wide", ssm_spec(k_dim=16, v_dim=32))
ODD = LayerSpec("gdn", "odd", ssm_spec(k_dim=12, v_dim=16))


@pytest.mark.parametrize(
    "spec,capability,constraints,backend",
    [
        (WIDE, Capability("cpu"), Constraints(), "xla"),
        (WIDE, Capability("cpu", features=frozenset({"pallas"})), Constraints(), "xla"),
        (WIDE, Capability("cpu", features=frozenset({"pallas"})), Constraints("pallas"), "pallas"),
        (WIDE, GPU, Constraints(), "pallas"),
        (WIDE, Capability("gpu", "H200", frozenset({"triton"})), Constraints(), "triton"),
        (WIDE, Capability("gpu", "H200"), Constraints(), "xla"),
        (WIDE, GPU, Constraints("triton"), "triton"),
        (WIDE, GPU, Constraints("xla"), "xla"),
        (WIDE, GPU, Constraints(require=frozenset({"exact_bits"})), "pallas"),
        (ODD, GPU, Constraints(), "xla"),
        (FULL, GPU, Constraints(), "xla"),
    ],
)
def test_R68_selector_table(spec, capability, constraints, backend):
    selection = attention.select_backend(spec, capability, constraints)
    assert selection.backend == backend and selection.reasons[-1] == (backend, "chosen")
    line = attention.describe(spec, selection, capability)
    assert line.startswith(f"{spec.group_id}: {backend} on {capability.platform}")
    assert all(reason in line for _, reason in selection.reasons[:-1])


@pytest.mark.parametrize(
    "spec,capability,constraints,parts",
    [
        (WIDE, Capability("tpu"), Constraints("pallas"), ["implementation='pallas' cannot run", "needs platform gpu"]),
        (WIDE, Capability("cpu"), Constraints("triton"), ["implementation='triton' cannot run", "needs platform gpu"]),
        (WIDE, Capability("cpu"), Constraints("pallas"), ["pallas kernels are not available in this installation"]),
        (WIDE, Capability("gpu"), Constraints("pallas"), ["pallas kernels are not available in this installation"]),
        (WIDE, GPU, Constraints("cuda"), ["'cuda' is unknown, allowed are ['pallas', 'triton', 'xla']"]),
        (FULL, GPU, Constraints("triton"), ["has no kernel for kind 'full'", "group 'main.full'"]),
        (ODD, GPU, Constraints("pallas"), ["k_dim=12 is not one of (16, 32"]),
        (WIDE, Capability("cpu"), Constraints(require=frozenset({"exact_bits"})), ["does not provide exact_bits"]),
    ],
)
def test_R68_refusal_lists_every_candidate_with_its_reason(spec, capability, constraints, parts):
    with pytest.raises(BackendError) as error:
        attention.select_backend(spec, capability, constraints)
    for part in parts + ["pallas: ", "triton: ", "xla: "]:
        assert part in str(error.value)


def test_the_local_default_runs_here():
    """On the machine of this test the default is a backend whose executor accepts it, and full attention is XLA."""
    capability = attention.local_capability()
    assert "xla" in capability.features
    backend = attention.select_backend(WIDE, capability).backend
    attention.prepare(WIDE, attention.allocate_context(WIDE, Bucket(2, 4), KernelConfig(backend)))
    assert attention.select_backend(FULL, capability).backend == "xla"
    with pytest.raises(NotImplementedError, match="full attention runs on 'xla' only"):
        attention.prepare(FULL, attention.allocate_context(FULL, Bucket(2, 4), KernelConfig("pallas")))


# --- planner (R69) --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [16, 512])
@pytest.mark.parametrize("layout", ["dense", "latent"])
def test_R69_one_planner_serves_two_kv_layouts(monkeypatch, layout, block):
    """Dense keys and values, and one latent vector a token (its values are the latent, its keys latent and rotary part)."""
    monkeypatch.setattr(plan, "MAX_BLOCK", block)
    rng, r, n, heads, max_len = np.random.default_rng(0), 3, 2, 4, 41
    dk, dv, kv_heads = (8, 8, 2) if layout == "dense" else (12, 8, 1)
    last = np.array([[4, 5], [-1, -1], [39, 40]])
    used = np.arange(max_len) <= last.max(axis=1)[:, None]
    keys = np.where(used[..., None, None], rng.normal(size=(r, max_len, kv_heads, dk)), NAN)
    values = keys[..., :dv] if layout == "latent" else np.where(used[..., None, None], rng.normal(size=keys.shape), NAN)
    q = rng.normal(size=(r, n, heads, dk))
    store = {"dense": (keys, values), "latent": (keys,)}[layout]
    store = tuple(jnp.asarray(x, jnp.float32) for x in store)

    def load(store, at):
        k = store[0][:, jnp.minimum(at, max_len - 1)]
        return (k, store[1][:, jnp.minimum(at, max_len - 1)]) if layout == "dense" else (k, k[..., :dv])

    chosen = attention.plan_decode(max_len, 4 * kv_heads * (dk + (dv if layout == "dense" else 0)))
    assert chosen.block == min(block, max_len) and chosen.blocks * chosen.block >= max_len
    needed = plan.blocks_needed(chosen, jnp.asarray(last))
    assert int(needed) == -(-max_len // chosen.block)
    visible = lambda at: at <= jnp.asarray(last)[..., None]  # noqa: E731
    _, o = jax.jit(lambda q, s: plan.attend(chosen, needed, q, s, load, visible, 0.4))(jnp.asarray(q, jnp.float32), store)
    for i in range(r):
        for t in range(n):
            if last[i, t] < 0:
                assert not np.any(o[i, t])
                continue
            stop = last[i, t] + 1
            np.testing.assert_allclose(o[i, t], softmax_attention(q[i, t], keys[i, :stop], values[i, :stop], 0.4), 2e-5, 2e-6)


def test_plan_does_not_depend_on_the_batch():
    assert plan.plan_decode(4096, 2048) == plan.DecodePlan(512, 8)
    assert plan.plan_decode(4096, 16384).block == 64
    assert plan.plan_decode(40, 64) == plan.DecodePlan(40, 1)
    short = plan.DecodePlan(16, 4)
    assert [int(plan.blocks_needed(short, jnp.array(x))) for x in ([-1], [0], [15], [16, 3], [99])] == [0, 1, 1, 2, 4]


# --- varlen (R65) ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [16, 512])
def test_R65_varlen_equals_softmax_of_each_sequence(monkeypatch, causal, block):
    monkeypatch.setattr(plan, "MAX_BLOCK", block)
    rng, t, cu = np.random.default_rng(0), 40, [0, 1, 18, 18, 35]
    q, k, v = (rng.normal(size=(t, heads, 8)) for heads in (4, 2, 2))
    for x in (q, k, v):
        x[cu[-1] :] = NAN
    o = jax.jit(partial(attention.varlen_attention, causal=causal))(
        *(jnp.asarray(x, jnp.float32) for x in (q, k, v)), jnp.array(cu)
    )
    assert not np.any(o[cu[-1] :])
    for start, stop in zip(cu, cu[1:], strict=False):
        for i in range(start, stop):
            end = i + 1 if causal else stop
            np.testing.assert_allclose(o[i], softmax_attention(q[i], k[start:end], v[start:end], 8**-0.5), 2e-5, 2e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_R65_varlen_keeps_sequences_apart(causal):
    """NaN and infinity in one sequence, or later in a causal one, leave the bits of every other output."""
    rng, cu = np.random.default_rng(1), jnp.array([0, 5, 9, 12])
    q, k, v = (draw(rng, 12, heads, 8) for heads in (4, 2, 2))
    run = jax.jit(partial(attention.varlen_attention, causal=causal))
    want = np.asarray(run(q, k, v, cu))
    v[7, 1, 3], v[8, 0, 0] = NAN, np.inf
    got = np.asarray(run(q, k, v, cu))
    hit = np.zeros(got.shape[:2], bool)
    hit[7 if causal else 5 : 9, 2:] = hit[8 if causal else 5 : 9, :2] = True
    np.testing.assert_array_equal(got[~hit], want[~hit])
    assert np.all(np.isnan(got[hit]))


def test_R65_varlen_checks_backend_and_cu():
    x = jnp.zeros((4, 2, 8))
    with pytest.raises(BackendError, match=r"backend='fa3' is not available for varlen attention: allowed are \('xla',\)"):
        attention.varlen_attention(x, x, x, jnp.array([0, 4]), backend="fa3")
    for cu in ([1, 4], [0, 3, 2], [0, 5]):
        with pytest.raises(ValueError, match="must start at 0 and ascend"):
            attention.varlen_attention(x, x, x, jnp.array(cu))
    with pytest.raises(ValueError, match="must have the 4 rows"):
        attention.varlen_attention(x, x[:3], x, jnp.array([0, 4]))


# --- caller-owned out (R70) -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("spec,binding", [(LINEAR, BINDINGS[1]), (FULL, BINDINGS[4])], ids=["linear", "full"])
def test_R70_out_is_a_corner_of_the_callers_buffer(spec, binding, phase):
    bucket = Bucket(2, 4, phase)
    if phase == "decode":
        batch, lead = decode_batch([3, 1], [2, 1], bucket), (4,)
    else:
        batch, lead = attention.build_batch(KV, bucket, [3, 1], b_q_seq_len=[4, 2]), (2, 4)

    def step(state, batch, inputs, out):
        state, ctx = attention.update(spec, ready(spec, bucket), state, batch)
        return attention.forward(binding, ctx, state, inputs, out)

    state, inputs = INIT[spec.kind](spec), inputs_of(spec, lead)
    _, want = jax.jit(step)(state, batch, inputs, None)
    shape = tuple(n + 3 for n in want.shape)
    corner = tuple(slice(n) for n in want.shape)
    _, got = jax.jit(step, donate_argnums=3)(state, batch, inputs, jnp.full(shape, NAN))
    np.testing.assert_array_equal(got[corner], want)
    rest = np.asarray(got).copy()
    rest[corner] = NAN
    assert np.all(np.isnan(rest))
    for bad in (jnp.zeros(want.shape, jnp.bfloat16), jnp.zeros((1,) + want.shape[1:]), jnp.zeros(want.shape[1:])):
        with pytest.raises(ValueError, match="out=.* is not allowed: needs float32 and at least"):
            jax.eval_shape(step, state, batch, inputs, bad)
