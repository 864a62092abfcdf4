"""Static geometry of the recurrent state: what is legal, how rows are numbered, how many bytes it takes.

Pure Python, no arrays. `torch_ref/spec.py` is a link to this file, so both frameworks share one definition.

Symbols (used in every docstring of the project): R request rows, T token rows, S slots, HOLD = S-1 the padding slot,
H query heads, KH stored key heads, HV value heads, K/V head sizes, W verify width (base token plus drafts),
L history length, G decay channels per value head (1 for GDN, K for KDA), C convolution channels, kw its width.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

RULES = ("gdn", "kda")
MODES = ("native", "compact", "replay")
PROJECTIONS = ("inline", "precompute")
IMPLEMENTATIONS = ("xla", "pallas", "triton")
ITEMSIZE = {"fp32": 4, "bf16": 2}
MAX_WIDTH = 16
HISTORY_LENGTHS = (4, 8, 16, 32, 64)
L2NORM_EPS = 1e-6


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name}={value!r} is not allowed: {allowed}")


def _positive(value: object) -> bool:
    """Whether `value` is an integer of at least 1; True is no integer here."""
    return type(value) is int and value >= 1


@dataclass(frozen=True)
class SSMSpec:
    """Everything static about one recurrent state; hashable, so it can be a static argument of `jax.jit`.

    Checked on construction: an illegal combination raises `ValueError` (argument, value, what is allowed) before
    any array exists.

    rule: "gdn" (one decay per value head) or "kda" (one decay per key channel).
    layers: logical linear-attention layers, i.e. executions; a looped physical layer counts once per loop.
    slots: physical rows including HOLD, the last one, which pads batches, is never written and stays zero.
    q_heads, k_heads, v_heads: H, KH, HV of this shard; value head i uses query head i // (HV/H), key head i // (HV/KH).
    k_dim, v_dim: K and V.
    width: W = drafts + 1, 1..16. mode: "native", "compact" or "replay". history: L, used by replay only.
    act_dtype: activations, raw records and conv window; ssm_dtype: the persistent state. "fp32" or "bf16".
    conv_width: kw. lower_bound: None for the softplus gate, a negative float for KDA's bounded gate.
    projection: order of replay's sums when W > 1. "inline" is the order written in torch_ref/executors/replay.py, and
    "precompute" the other one written there: the whole window is projected first, and results differ from inline in the
    last bits. Who does what: torch_ref follows both; "xla" computes both alike, within the tolerance of inline; kernels
    follow inline to the bit, and compute precompute on tensor cores, within the same tolerance of inline, with K and V of at
    least 16. When W = 1 both are the same.
    state_key: which state receipts belong to, "main" or "draft".
    """

    rule: str
    layers: int
    slots: int
    q_heads: int
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    width: int = 1
    mode: str = "native"
    history: int = 16
    act_dtype: str = "bf16"
    ssm_dtype: str = "fp32"
    conv_width: int = 4
    lower_bound: float | None = None
    projection: str = "inline"
    state_key: str = "main"

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise ValueError for the first field that breaks a start-up rule."""
        _require(self.rule in RULES, "rule", self.rule, f"one of {RULES}")
        _require(self.mode in MODES, "mode", self.mode, f"one of {MODES}")
        _require(self.act_dtype in ITEMSIZE, "act_dtype", self.act_dtype, f"one of {tuple(ITEMSIZE)}")
        _require(self.ssm_dtype in ITEMSIZE, "ssm_dtype", self.ssm_dtype, f"one of {tuple(ITEMSIZE)}")
        _require(self.projection in PROJECTIONS, "projection", self.projection, f"one of {PROJECTIONS}")
        for name in ("layers", "q_heads", "k_heads", "v_heads", "k_dim", "v_dim", "width", "history"):
            value = getattr(self, name)
            _require(_positive(value), name, value, "a positive integer")
        _require(isinstance(self.slots, int) and self.slots >= 2, "slots", self.slots, "at least 2 (one request and HOLD)")
        taps = self.conv_width
        _require(isinstance(taps, int) and taps >= 2, "conv_width", taps, "an integer of at least 2")
        _require(self.width <= MAX_WIDTH, "width", self.width, f"1..{MAX_WIDTH} (drafts + 1)")
        for name in ("q_heads", "k_heads"):
            value = getattr(self, name)
            _require(self.v_heads % value == 0, name, value, f"a divisor of v_heads={self.v_heads}")
        if self.rule == "kda":
            heads = (self.q_heads, self.k_heads, self.v_heads)
            _require(len(set(heads)) == 1, "q_heads, k_heads, v_heads", heads, "equal for rule 'kda'")
        if self.lower_bound is not None:
            _require(self.rule == "kda", "lower_bound", self.lower_bound, "None for rule 'gdn'")
            bounded = self.lower_bound < 0 and isfinite(self.lower_bound)
            _require(bounded, "lower_bound", self.lower_bound, "None or a finite negative number")
        named = isinstance(self.state_key, str) and self.state_key != ""
        _require(named, "state_key", self.state_key, "a string that is not empty, such as 'main' or 'draft'")
        if self.mode == "compact":
            _require(self.width > 1, "width", self.width, "at least 2 in mode 'compact' (use 'native' without drafts)")
        if self.mode == "replay":
            smallest = min((n for n in HISTORY_LENGTHS if n >= self.width), default=HISTORY_LENGTHS[-1])
            _require(
                self.history in HISTORY_LENGTHS and self.history >= self.width,
                "history",
                self.history,
                f"one of {HISTORY_LENGTHS} and at least width={self.width}; the smallest legal value is {smallest}",
            )
        _require(
            self.projection == "inline" or self.mode == "replay",
            "projection",
            self.projection,
            f"'inline' in mode {self.mode!r}; 'precompute' needs mode 'replay'",
        )

    @property
    def hold(self) -> int:
        """Id of the padding slot."""
        return self.slots - 1

    @property
    def gates(self) -> int:
        """G: decay channels per value head."""
        return self.k_dim if self.rule == "kda" else 1

    @property
    def rows_per_slot(self) -> int:
        """State rows of one slot: W snapshots in native mode, otherwise 1."""
        return self.width if self.mode == "native" else 1

    @property
    def channels(self) -> int:
        """C: convolution channels, laid out as the blocks q | k | v."""
        return (self.q_heads + self.k_heads) * self.k_dim + self.v_heads * self.v_dim

    @property
    def window(self) -> int:
        """Columns of the widened convolution window: kw-1 accepted inputs and W-1 that may be rejected."""
        return self.conv_width - 1 + self.width - 1

    @property
    def precompute(self) -> bool:
        """Whether windows are projected as a whole; with one token both projections are the same."""
        return self.projection == "precompute" and self.width > 1

    @property
    def scale(self) -> float:
        """Factor on the normalised query, K**-0.5."""
        return self.k_dim**-0.5


def state_bytes(spec: SSMSpec) -> dict[str, int]:
    """Bytes by part that `init_state(spec)` allocates, without the HOLD slot: all layers, slots-1 requests.

    Keys: ssm, history (records of the compact window or the replay history), cursor (two int32 per request, replay
    only), conv, accepted (one int32 per request), total.
    """
    requests = spec.slots - 1
    e, s = ITEMSIZE[spec.act_dtype], ITEMSIZE[spec.ssm_dtype]
    rows = spec.layers * requests
    key, value, decay = spec.k_heads * spec.k_dim, spec.v_heads * spec.v_dim, spec.v_heads * spec.gates
    raw = key * e + value * e + 4 * decay + 4 * spec.v_heads  # k, v, decay, beta of one token
    history = {"native": 0, "compact": spec.width * raw, "replay": 2 * spec.history * (raw + 4 * value)}[spec.mode]
    parts = {
        "ssm": rows * spec.rows_per_slot * spec.v_heads * spec.v_dim * spec.k_dim * s,
        "history": rows * history,
        "cursor": 8 * requests if spec.mode == "replay" else 0,
        "conv": rows * spec.channels * spec.window * e,
        "accepted": 4 * requests,
    }
    return parts | {"total": sum(parts.values())}


def seed_layout_bytes(spec: SSMSpec) -> int:
    """Bytes of state, history and cursor in the layout of LightLLM PR 1585/1690, for comparison; no conv.

    That layout also stores the normalised key, and keeps derived values (normalised key and corrected value) in the
    activation dtype when W > 1, projection is "precompute" and L <= 8. Same scope as `state_bytes`: all layers,
    slots-1 requests.
    """
    parts = state_bytes(spec)
    if spec.mode != "replay":
        return parts["ssm"] + parts["history"]
    e = ITEMSIZE[spec.act_dtype]
    narrow = spec.precompute and spec.history <= 8
    derived = e if narrow else 4
    key, value, decay = spec.k_heads * spec.k_dim, spec.v_heads * spec.v_dim, spec.v_heads * spec.gates
    record = (key + value) * (derived + e) + 4 * decay + 4 * spec.v_heads
    return parts["ssm"] + spec.layers * (spec.slots - 1) * 2 * spec.history * record + parts["cursor"]


def page_bytes(spec: SSMSpec) -> int:
    """Bytes of one exported page: the canonical state and the accepted convolution window of all layers."""
    ssm = spec.v_heads * spec.v_dim * spec.k_dim * ITEMSIZE[spec.ssm_dtype]
    conv = spec.channels * (spec.conv_width - 1) * ITEMSIZE[spec.act_dtype]
    return spec.layers * (ssm + conv)


# rows of V of one program by mode (replay: windows of one token, longer ones, and those of projection precompute) and
# ssm_dtype, as measured on an H200
BLOCK_V = {
    "native": {"fp32": 8, "bf16": 16},
    "compact": {"fp32": 16, "bf16": 16},
    "replay": {"fp32": 8, "bf16": 16},
    "replay verify": {"fp32": 16, "bf16": 16},
    "precompute": {"fp32": 16, "bf16": 16},
}

# the smallest verify width whose windows the kernels project faster by "precompute", by ssm_dtype, as measured there
PRECOMPUTE_WIDTH = {"fp32": 4, "bf16": 4}


def fastest_projection(spec: SSMSpec) -> str:
    """Projection with which kernels run the windows of `spec` fastest: "precompute" from PRECOMPUTE_WIDTH on, where legal.

    It depends on mode, width, dtype and head sizes, never on the batch: a request's bits must not depend on its neighbours.
    """
    pays = spec.mode == "replay" and spec.width >= PRECOMPUTE_WIDTH[spec.ssm_dtype] and min(spec.k_dim, spec.v_dim) >= 16
    return "precompute" if pays else "inline"


@dataclass(frozen=True)
class KernelConfig:
    """Static launch choice of one forward; carried by its receipt so that the commit uses the same one.

    implementation: "xla", "pallas" or "triton". block_v (None: the table BLOCK_V) and num_warps change speed,
    never bits, except those of projection "precompute".
    """

    implementation: str = "xla"
    block_v: int | None = None
    num_warps: int = 1

    def __post_init__(self) -> None:
        _require(self.implementation in IMPLEMENTATIONS, "implementation", self.implementation, f"one of {IMPLEMENTATIONS}")
        _require(self.block_v is None or _positive(self.block_v), "block_v", self.block_v, "a positive integer or None")
        _require(_positive(self.num_warps), "num_warps", self.num_warps, "a positive integer")

    def launch(self, spec: SSMSpec) -> dict[str, int]:
        """Launch arguments of the kernels that run a window."""
        kind = "precompute" if spec.precompute else "replay verify" if spec.mode == "replay" and spec.width > 1 else spec.mode
        return {"block_v": self.block_v or BLOCK_V[kind][spec.ssm_dtype], "num_warps": self.num_warps}


KINDS = ("gdn", "kda", "full")
LOOP_OPTIONS = ("sequential", "parallel")


@dataclass(frozen=True)
class ExecutionStep:
    """One execution of one physical layer: which loop pass, which kind, which row of its kind's state."""

    layer: int
    loop: int
    kind: str
    row: int


@dataclass(frozen=True)
class ExecutionPlan:
    """The executions of a model in order; states are addressed by `row`, counted per kind over executions.

    loop_ends: indices into `steps` after which the optional inter-loop norm is applied.
    """

    steps: tuple[ExecutionStep, ...]
    state_key: str = "main"
    loop_ends: tuple[int, ...] = ()

    def rows(self, kind: str) -> int:
        """Number of state rows that layers of this kind need."""
        return sum(step.kind == kind for step in self.steps)


def plan_layers(
    kinds: tuple[str, ...],
    *,
    loop: tuple[int, int] | None = None,
    loop_count: int = 1,
    loop_option: str = "sequential",
    inter_loop_norm: bool = False,
    mode: str = "native",
    state_key: str = "main",
) -> ExecutionPlan:
    """Lay out the executions of a model whose layers [start, end) run `loop_count` times.

    kinds: one of KINDS per physical layer. Raises ValueError for an unknown kind, a range outside the layers, a count
    below 1, a storage mode that no layer can use, and KDA with the "parallel" option; NotImplementedError for GDN
    with it.
    """
    for i, kind in enumerate(kinds):
        _require(kind in KINDS, f"kinds[{i}]", kind, f"one of {KINDS}")
    start, end = loop if loop is not None else (0, len(kinds))
    _require(0 <= start < end <= len(kinds), "loop", (start, end), f"0 <= start < end <= {len(kinds)} layers")
    _require(isinstance(loop_count, int) and loop_count >= 1, "loop_count", loop_count, "an integer of at least 1")
    _require(loop_option in LOOP_OPTIONS, "loop_option", loop_option, f"one of {LOOP_OPTIONS}")
    _require(mode in MODES, "mode", mode, f"one of {MODES}")
    linear = {"gdn", "kda"} & set(kinds)
    _require(mode == "native" or bool(linear), "mode", mode, "'native' for a model without GDN or KDA layers")
    if loop_option == "parallel":
        _require("kda" not in kinds[start:end], "loop_option", loop_option, "'sequential' when KDA layers loop")
        if "gdn" in kinds[start:end]:
            raise NotImplementedError("loop_option='parallel' is not implemented for GDN layers; use 'sequential'")
    order = [(i, 0) for i in range(start)]
    loop_ends = []
    for loop_index in range(loop_count):
        order += [(i, loop_index) for i in range(start, end)]
        loop_ends.append(len(order) - 1)
    order += [(i, 0) for i in range(end, len(kinds))]
    rows = dict.fromkeys(KINDS, 0)
    steps = []
    for layer, loop_index in order:
        kind = kinds[layer]
        steps.append(ExecutionStep(layer, loop_index, kind, rows[kind]))
        rows[kind] += 1
    return ExecutionPlan(tuple(steps), state_key, tuple(loop_ends[:-1]) if inter_loop_norm else ())


def check_disjoint(main: ExecutionPlan, draft: ExecutionPlan) -> None:
    """Raise ValueError when a draft plan would share the main model's state rows."""
    _require(main.state_key != draft.state_key, "draft.state_key", draft.state_key, "different from the main plan's")
