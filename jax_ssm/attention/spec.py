"""Static geometry of attention layers: KV sizes, layer groups, bindings, buckets. Pure Python, no arrays.

Symbols beside those of `jax_ssm.spec`: KVH stored key/value heads of full attention, D its head size, B prompt rows of a
prefill batch, N their padded length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jax_ssm.spec import ITEMSIZE, KINDS, MAX_WIDTH, ExecutionPlan, SSMSpec, _require

PHASES = ("decode", "prefill")


@dataclass(frozen=True)
class KVSpec:
    """Everything static about one slotted KV state; hashable. Illegal fields raise ValueError on construction.

    layers: logical full-attention layers (executions). slots: physical rows including HOLD, the last one. max_len: token
    positions of a slot; a verify window needs length + W <= max_len. heads, kv_heads, head_dim: query heads, KVH, D.
    width: W. dtype: "fp32" or "bf16", of the stored keys and values. scale: factor on q.k, None for D**-0.5.
    """

    layers: int
    slots: int
    max_len: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int = 1
    dtype: str = "bf16"
    state_key: str = "main"
    scale: float | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "max_len", "heads", "kv_heads", "head_dim", "width"):
            value = getattr(self, name)
            _require(isinstance(value, int) and value >= 1, name, value, "a positive integer")
        _require(isinstance(self.slots, int) and self.slots >= 2, "slots", self.slots, "at least 2 (one request and HOLD)")
        _require(self.heads % self.kv_heads == 0, "kv_heads", self.kv_heads, f"a divisor of heads={self.heads}")
        _require(self.width <= MAX_WIDTH, "width", self.width, f"1..{MAX_WIDTH} (drafts + 1)")
        _require(self.width <= self.max_len, "max_len", self.max_len, f"at least width={self.width}")
        _require(self.dtype in ITEMSIZE, "dtype", self.dtype, f"one of {tuple(ITEMSIZE)}")
        _require(self.scale is None or self.scale > 0, "scale", self.scale, "None or a positive number")

    @property
    def hold(self) -> int:
        """Id of the padding slot."""
        return self.slots - 1

    @property
    def softmax_scale(self) -> float:
        """Factor on q.k before the softmax."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def position_bytes(self) -> int:
        """Bytes of one token position of one layer, key and value."""
        return 2 * self.kv_heads * self.head_dim * ITEMSIZE[self.dtype]


def kv_bytes(spec: KVSpec) -> dict[str, int]:
    """Bytes by part that `init_kv(spec)` allocates, without the HOLD slot. Keys: kv, length, total."""
    requests = spec.slots - 1
    kv = spec.layers * requests * spec.max_len * spec.position_bytes
    return {"kv": kv, "length": 4 * requests, "total": kv + 4 * requests}


@dataclass(frozen=True)
class LayerSpec:
    """What layers of one group have in common; layers with an equal LayerSpec share one context and one backend.

    kind: "gdn", "kda" (then `ssm` is set) or "full" (then `kv` is set). group_id: name of the group.
    """

    kind: str
    group_id: str
    ssm: SSMSpec | None = None
    kv: KVSpec | None = None

    def __post_init__(self) -> None:
        _require(self.kind in KINDS, "kind", self.kind, f"one of {KINDS}")
        if self.kind == "full":
            _require(self.kv is not None and self.ssm is None, "kv, ssm", (self.kv, self.ssm), "kv only, for kind 'full'")
        else:
            _require(self.ssm is not None and self.kv is None, "ssm, kv", (self.ssm, self.kv), f"ssm only: kind {self.kind!r}")
            _require(self.ssm.rule == self.kind, "ssm.rule", self.ssm.rule, f"equal to kind={self.kind!r}")

    @property
    def geometry(self) -> SSMSpec | KVSpec:
        """The spec of the state that the group reads and writes."""
        return self.kv if self.kind == "full" else self.ssm


@dataclass(frozen=True)
class LayerAttentionBinding:
    """One execution of one layer. layer: index of its parameters; row: logical state row; backend: who computes it.

    Static and hashable; the weights stay in the parameter tree.
    """

    spec: LayerSpec
    layer: int
    row: int
    state_key: str
    backend: str


@dataclass(frozen=True)
class WorkspaceRequirement:
    """Scratch that a backend needs for a bucket. scope: "group" (shared by its layers) or "layer"."""

    key: str
    bytes: int
    dtype: str
    scope: str


@dataclass(frozen=True)
class Bucket:
    """Static capacity of a batch. One bucket is one executable.

    phase "decode": requests = R request rows, tokens = T token rows in all. fixed: every live request has exactly W
    rows (then T = R * W), else rows are packed. phase "prefill": requests = B rows, tokens = N columns a row.
    """

    requests: int
    tokens: int
    phase: str = "decode"
    fixed: bool = False

    def __post_init__(self) -> None:
        _require(self.phase in PHASES, "phase", self.phase, f"one of {PHASES}")
        for name in ("requests", "tokens"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "a positive integer")
        _require(not (self.fixed and self.phase == "prefill"), "fixed", self.fixed, "False in phase 'prefill'")

    def check(self, width: int, slots: int) -> None:
        """Raise ValueError unless a state of this width and these slots can run the bucket."""
        if self.phase == "prefill":
            return
        if self.fixed:
            _require(self.tokens == self.requests * width, "tokens", self.tokens, f"requests * width = {self.requests * width}")
        else:
            most = min(self.tokens, slots - 1)
            _require(self.requests <= most, "requests", self.requests, f"at most min(tokens, slots - 1) = {most}")


def group_layers(
    plan: ExecutionPlan,
    ssm: SSMSpec | None,
    kv: KVSpec | None,
    choose: Callable[[LayerSpec], str] = lambda spec: "xla",
) -> tuple[LayerAttentionBinding, ...]:
    """One binding per step of `plan`, in order.

    ssm, kv: states of the linear and of the full-attention layers, None when the plan has none. choose: backend name of
    a group, e.g. `lambda spec: select_backend(spec, capability, constraints).backend`; called once per group.
    Raises ValueError when a state is missing, has another rule, another number of layers, or another state key.
    """
    groups: dict[str, tuple[LayerSpec, str]] = {}
    for kind in dict.fromkeys(step.kind for step in plan.steps):
        name, state = ("kv", kv) if kind == "full" else ("ssm", ssm)
        _require(state is not None, name, state, f"a spec: the plan has layers of kind {kind!r}")
        rows = plan.rows(kind)
        _require(state.layers == rows, f"{name}.layers", state.layers, f"{rows}, the executions of kind {kind!r}")
        _require(state.state_key == plan.state_key, f"{name}.state_key", state.state_key, f"the plan's {plan.state_key!r}")
        spec = LayerSpec(kind, f"{plan.state_key}.{kind}", **{name: state})
        groups[kind] = spec, choose(spec)
    return tuple(
        LayerAttentionBinding(groups[step.kind][0], step.layer, step.row, plan.state_key, groups[step.kind][1])
        for step in plan.steps
    )
