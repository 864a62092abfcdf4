"""Static geometry: bytes to the byte, start-up legality, execution plans (requirements C, L, R17, R37, R41, R97)."""

from itertools import product

import jax
import numpy as np
import pytest

import jax_ssm as ssm
from jax_ssm.spec import check_disjoint, plan_layers

BASE = dict(rule="gdn", layers=2, slots=5, q_heads=2, k_heads=2, v_heads=4, k_dim=16, v_dim=8)
KIB, MIB = 1024, 1024**2


def one_head_kda(**fields):
    """The seed's byte case: KDA, one layer, one head, 128 x 128, bf16 everywhere, W = 3; one request."""
    sizes = dict(layers=1, slots=2, q_heads=1, k_heads=1, v_heads=1, k_dim=128, v_dim=128, width=3, ssm_dtype="bf16")
    return ssm.SSMSpec("kda", **(sizes | fields))


def legal_specs():
    """A grid over every static field."""
    for rule, mode, width, history, act, state in product(
        ("gdn", "kda"), ("native", "compact", "replay"), (1, 3, 16), (4, 16), ("bf16", "fp32"), ("bf16", "fp32")
    ):
        if (mode == "compact" and width == 1) or (mode == "replay" and history < width):
            continue
        heads = dict(q_heads=2, k_heads=4, v_heads=4) if rule == "gdn" else dict(q_heads=4, k_heads=4, v_heads=4)
        fields = BASE | heads | dict(rule=rule, mode=mode, width=width, history=history, act_dtype=act, ssm_dtype=state)
        yield ssm.SSMSpec(**fields)


def test_R17_state_bytes_is_what_is_allocated():
    """Each part equals the summed nbytes of its arrays without the HOLD slot, over the whole grid."""
    for spec in legal_specs():
        parts = ssm.state_bytes(spec)
        shapes = jax.tree_util.tree_leaves_with_path(jax.eval_shape(lambda spec=spec: ssm.init_state(spec)))
        found = dict.fromkeys(parts, 0)
        for path, leaf in shapes:
            name = path[-1].name
            part = "cursor" if "cursor" in name else "history" if len(path) > 1 else name
            size = leaf.size * leaf.dtype.itemsize
            assert size % spec.slots == 0, name
            found[part] += size // spec.slots * spec.hold
        found["total"] = sum(found.values())
        assert found == parts, spec
        page = jax.eval_shape(lambda spec=spec: ssm.init_pages(spec, 1))
        assert ssm.page_bytes(spec) == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(page))


def test_R17_state_bytes_of_real_arrays():
    for mode in ("native", "compact", "replay"):
        spec = ssm.SSMSpec(**BASE, mode=mode, width=3)
        state = ssm.init_state(spec)
        hold = sum(x.nbytes // spec.slots for x in jax.tree.leaves(state))
        assert sum(x.nbytes for x in jax.tree.leaves(state)) - hold == ssm.state_bytes(spec)["total"]
        assert all(not np.asarray(x).any() for x in jax.tree.leaves(state))


def test_R13_native_bytes():
    assert ssm.state_bytes(one_head_kda())["ssm"] == 98_304 == 96 * KIB


def test_R14_compact_bytes():
    parts = ssm.state_bytes(one_head_kda(mode="compact"))
    assert parts["ssm"] + parts["history"] == 35_852 and parts["cursor"] == 0
    assert f"{35_852 / KIB:.2f}" == "35.01"


@pytest.mark.parametrize(
    ("history", "seed", "kib", "own"),
    [(16, 98_440, "96.13", 82_056), (32, 164_104, "160.26", 131_336), (64, 295_432, "288.51", 229_896)],
)
def test_R15_replay_bytes(history, seed, kib, own):
    """The seed's published figures and ours, to the byte; a record here is 1,540 B (seed: 2,052 B)."""
    spec = one_head_kda(mode="replay", history=history)
    parts = ssm.state_bytes(spec)
    assert parts["ssm"] + parts["history"] + parts["cursor"] == own
    assert ssm.seed_layout_bytes(spec) == seed and f"{seed / KIB:.2f}" == kib
    assert parts["history"] == 2 * history * 1_540 and parts["cursor"] == 8
    assert seed == parts["ssm"] + 2 * history * 2_052 + 8


def test_R16_published_cross_checks():
    """MiB per request of the predecessor's table: checkpoint, native, replay in the seed's layout."""

    def figures(w, **fields):
        native = ssm.SSMSpec(**fields, slots=2, k_dim=128, v_dim=128, width=w)
        projection = "precompute" if fields["rule"] == "gdn" else "inline"
        replay = ssm.SSMSpec(**fields, slots=2, k_dim=128, v_dim=128, width=w, mode="replay", history=8, projection=projection)
        ours = ssm.state_bytes(native)["ssm"]
        return [f"{x / MIB:.2f}" for x in (ours / w, ours, ssm.seed_layout_bytes(replay))]

    gdn = dict(rule="gdn", layers=48, q_heads=4, k_heads=4, v_heads=12, ssm_dtype="bf16")
    kda = dict(rule="kda", layers=34, q_heads=8, k_heads=8, v_heads=8)
    assert figures(4, **gdn) == ["18.00", "72.00", "24.07"]
    assert figures(3, **kda, ssm_dtype="fp32") == ["17.00", "51.00", "25.52"]
    assert figures(3, **kda, ssm_dtype="bf16") == ["8.50", "25.50", "17.02"]
    single = [one_head_kda(mode="replay", history=8, projection=p) for p in ("inline", "precompute")]
    assert [f"{ssm.seed_layout_bytes(s) / KIB:.2f}" for s in single] == ["64.07", "56.07"]


def test_R17_replay_is_not_always_smaller():
    native, replay = one_head_kda(), one_head_kda(mode="replay", history=32)
    assert ssm.state_bytes(replay)["total"] > ssm.state_bytes(native)["total"]


# fields that break one rule of the start-up table (requirements L), the name and the remedy that the message must hold
ILLEGAL = [
    (dict(mode="compact", width=1), "width=1", "at least 2"),
    (dict(mode="replay", history=3), "history=3", "4, 8, 16"),
    (dict(mode="replay", history=12), "history=12", "4, 8, 16"),
    (dict(mode="replay", history=128), "history=128", "4, 8, 16"),
    (dict(mode="replay", history=4, width=5), "history=4", "smallest legal value is 8"),
    (dict(mode="replay", history=8, width=9), "history=8", "smallest legal value is 16"),
    (dict(mode="snapshot"), "mode='snapshot'", "native"),
    (dict(rule="mamba"), "rule='mamba'", "gdn"),
    (dict(ssm_dtype="fp16"), "ssm_dtype='fp16'", "bf16"),
    (dict(act_dtype="fp8"), "act_dtype='fp8'", "bf16"),
    (dict(projection="precompute"), "projection='precompute'", "replay"),
    (dict(projection="auto"), "projection='auto'", "inline"),
    (dict(width=0), "width=0", "positive"),
    (dict(width=17), "width=17", "16"),
    (dict(width=-1), "width=-1", "positive"),
    (dict(width=2.0), "width=2.0", "integer"),
    (dict(conv_width=1), "conv_width=1", "at least 2"),
    (dict(conv_width=4.0), "conv_width=4.0", "integer"),
    (dict(slots=1), "slots=1", "at least 2"),
    (dict(layers=0), "layers=0", "positive"),
    (dict(k_heads=3), "k_heads=3", "divisor of v_heads=4"),
    (dict(q_heads=3), "q_heads=3", "divisor of v_heads=4"),
    (dict(rule="kda"), "(2, 2, 4)", "equal for rule 'kda'"),
    (dict(lower_bound=-5.0), "lower_bound=-5.0", "None for rule 'gdn'"),
    (dict(rule="kda", q_heads=4, k_heads=4, lower_bound=0.5), "lower_bound=0.5", "negative"),
]


@pytest.mark.parametrize(("fields", "given", "allowed"), ILLEGAL, ids=lambda x: str(x) if isinstance(x, dict) else None)
def test_R37_start_up_legality(fields, given, allowed):
    """Each violation raises ValueError with argument, value and what is allowed, before any array exists."""
    before = len(jax.live_arrays())
    with pytest.raises(ValueError) as error:
        ssm.SSMSpec(**(BASE | fields))
    assert given in str(error.value) and allowed in str(error.value)
    assert len(jax.live_arrays()) == before


def test_L6_impossible_history_and_width_are_refused():
    """L6: every (L, W): legal exactly when L is one of the lengths and holds a window; else the smallest legal L is named."""
    for history, width in product(range(1, 70), range(1, 17)):
        fields = BASE | dict(mode="replay", history=history, width=width)
        if history in (4, 8, 16, 32, 64) and history >= width:
            assert ssm.SSMSpec(**fields).history == history
        else:
            smallest = next(n for n in (4, 8, 16) if n >= width)
            with pytest.raises(ValueError, match=f"smallest legal value is {smallest}"):
                ssm.SSMSpec(**fields)


def test_precompute_is_legal_for_one_token():
    """Section L: with W = 1 it equals inline, so it is not refused."""
    assert ssm.SSMSpec(**BASE, mode="replay", projection="precompute").width == 1


def test_R1_defaults_and_R2_hashable():
    spec = ssm.SSMSpec(**BASE)
    assert (spec.mode, spec.width, spec.history) == ("native", 1, 16)
    assert hash(spec) == hash(ssm.SSMSpec(**BASE)) and spec == ssm.SSMSpec(**BASE)
    with pytest.raises(AttributeError):
        spec.width = 2


def test_kernel_config_names_what_is_allowed():
    with pytest.raises(ValueError, match="implementation='cuda'.*xla"):
        ssm.KernelConfig(implementation="cuda")


# ------------------------------------------------------------------------------------------------------ execution plans

KINDS = ("gdn", "gdn", "full", "gdn")


def test_R97_plan_counts_executions():
    plan = plan_layers(KINDS, loop=(1, 3), loop_count=2, inter_loop_norm=True)
    assert [(s.layer, s.loop, s.kind, s.row) for s in plan.steps] == [
        (0, 0, "gdn", 0), (1, 0, "gdn", 1), (2, 0, "full", 0), (1, 1, "gdn", 2), (2, 1, "full", 1), (3, 0, "gdn", 3),
    ]  # fmt: skip
    assert plan.rows("gdn") == 4 and plan.rows("full") == 2 and plan.rows("kda") == 0
    assert plan.loop_ends == (2,)


def test_R97_one_loop_is_the_plain_model():
    assert plan_layers(KINDS, loop=(0, 4), loop_count=1) == plan_layers(KINDS)
    assert [s.row for s in plan_layers(KINDS).steps] == [0, 1, 0, 2]


def test_R40_every_execution_has_its_own_row():
    """The mapping layer - layer // interval of a predecessor collides when a layer runs twice; rows here never do."""
    for count in (1, 2, 5):
        plan = plan_layers(KINDS, loop=(0, 4), loop_count=count)
        rows = [(s.kind, s.row) for s in plan.steps]
        assert len(set(rows)) == len(rows) == 4 * count


def test_R97_page_bytes_scale_with_logical_rows():
    sizes = [
        ssm.page_bytes(ssm.SSMSpec(**(BASE | dict(layers=plan_layers(KINDS, loop=(0, 4), loop_count=n).rows("gdn")))))
        for n in (1, 3)
    ]
    assert sizes[1] == 3 * sizes[0]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (dict(loop=(0, 5)), ValueError, r"loop=\(0, 5\).*4 layers"),
        (dict(loop=(2, 2)), ValueError, r"loop=\(2, 2\)"),
        (dict(loop=(-1, 2)), ValueError, r"loop=\(-1, 2\)"),
        (dict(loop_count=0), ValueError, "loop_count=0.*at least 1"),
        (dict(loop_count=1.5), ValueError, "loop_count=1.5"),
        (dict(loop_option="fast"), ValueError, "loop_option='fast'.*sequential"),
        (dict(loop_option="parallel"), NotImplementedError, "parallel.*GDN.*sequential"),
        (dict(kinds=("kda", "full"), loop_option="parallel"), ValueError, "parallel.*sequential"),
        (dict(kinds=("gdn", "mamba")), ValueError, r"kinds\[1\]='mamba'.*gdn"),
        (dict(kinds=("full", "full"), mode="replay"), ValueError, "mode='replay'.*native"),
        (dict(mode="fast"), ValueError, "mode='fast'"),
    ],
)
def test_R97_illegal_plans_raise(fields, error, message):
    with pytest.raises(error, match=message):
        plan_layers(**(dict(kinds=KINDS) | fields))


def test_R41_parallel_is_fine_outside_the_linear_layers():
    assert plan_layers(KINDS, loop=(2, 3), loop_count=2, loop_option="parallel").rows("full") == 2


def test_R97_draft_must_not_share_main_rows():
    main = plan_layers(KINDS)
    with pytest.raises(ValueError, match="draft.state_key='main'.*different"):
        check_disjoint(main, plan_layers(KINDS))
    check_disjoint(main, plan_layers(KINDS, state_key="draft"))
