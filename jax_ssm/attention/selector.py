"""Which backend computes a layer group, and why: a pure function of spec, capability and constraints."""

from __future__ import annotations

from dataclasses import dataclass

from jax_ssm.attention.spec import LayerSpec
from jax_ssm.kernels import TRITON_EXTRA


class BackendError(RuntimeError):
    """No backend fits; the message lists every candidate with its reason."""


@dataclass(frozen=True)
class Capability:
    """What a machine can do. platform: "cpu", "gpu", ..; device_kind: its name; features: installed kernel packages that
    work there, e.g. {"pallas", "triton"}."""

    platform: str
    device_kind: str = ""
    features: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Constraints:
    """What the caller insists on. implementation: a backend by name, or None. require: properties that the backend must
    have, e.g. {"exact_bits"}: outputs and state equal to the bit across frameworks."""

    implementation: str | None = None
    require: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Selection:
    """backend: who computes; reasons: (candidate, why it was refused or chosen), in the order of the candidates."""

    backend: str
    reasons: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Candidate:
    """A backend, what it can compute and what it promises.

    platforms: where it is a default, None for everywhere; by_name: where it also runs when asked for by name. feature:
    what must be installed, None for nothing; install: how, for the message. head_sizes: legal K and V, None for any.
    """

    name: str
    kinds: tuple[str, ...]
    platforms: tuple[str, ...] | None
    feature: str | None
    by_name: tuple[str, ...] = ()
    properties: frozenset[str] = frozenset()
    head_sizes: tuple[int, ...] | None = None
    install: str = ""


TRITON_INSTALL = f": they need jax-triton, triton and torch, {TRITON_EXTRA}"
KERNEL_HEAD_SIZES = (16, 32, 64, 128, 256)

CANDIDATES = (
    Candidate("pallas", ("gdn", "kda"), ("gpu",), "pallas", ("cpu",), frozenset({"exact_bits"}), KERNEL_HEAD_SIZES),
    Candidate("triton", ("gdn", "kda"), ("gpu",), "triton", (), frozenset({"exact_bits"}), KERNEL_HEAD_SIZES, TRITON_INSTALL),
    Candidate("xla", ("gdn", "kda", "full"), None, None),
)


def select_backend(spec: LayerSpec, capability: Capability, constraints: Constraints = Constraints()) -> Selection:
    """The first candidate that fits. Raises BackendError, listing all of them, when none does; a backend asked for by
    name is taken or refused, never replaced."""
    reasons = []
    for candidate in CANDIDATES:
        reason = _refusal(candidate, spec, capability, constraints)
        reasons.append((candidate.name, reason or "chosen"))
        if reason is None:
            return Selection(candidate.name, tuple(reasons))
    names = [candidate.name for candidate in CANDIDATES]
    wanted = "" if constraints.implementation is None else f"implementation={constraints.implementation!r} cannot run: "
    if constraints.implementation not in (None, *names):
        wanted = f"implementation={constraints.implementation!r} is unknown, allowed are {names}: "
    listed = "; ".join(f"{name}: {reason}" for name, reason in reasons)
    raise BackendError(f"{wanted}no backend for kind {spec.kind!r} (group {spec.group_id!r}). {listed}")


def _refusal(candidate: Candidate, spec: LayerSpec, capability: Capability, constraints: Constraints) -> str | None:
    """Why a candidate cannot serve, or None."""
    if constraints.implementation not in (None, candidate.name):
        return f"{constraints.implementation!r} was asked for by name"
    if spec.kind not in candidate.kinds:
        return f"has no kernel for kind {spec.kind!r}"
    if candidate.platforms is not None and capability.platform not in candidate.platforms:
        if capability.platform not in candidate.by_name:
            return f"needs platform {' or '.join(candidate.platforms)}, this is {capability.platform!r}"
        if constraints.implementation is None:
            return f"runs on {capability.platform!r} only when asked for by name (interpreted, for tests)"
    if candidate.feature is not None and candidate.feature not in capability.features:
        return f"{candidate.feature} kernels are not available in this installation{candidate.install}"
    if candidate.head_sizes is not None:
        for name in ("k_dim", "v_dim"):
            if (value := getattr(spec.ssm, name)) not in candidate.head_sizes:
                return f"{name}={value} is not one of {candidate.head_sizes}"
    missing = sorted(constraints.require - candidate.properties)
    return f"does not provide {', '.join(missing)}" if missing else None


def describe(spec: LayerSpec, selection: Selection, capability: Capability) -> str:
    """One line for people: what runs a group, where, and why the candidates before it do not."""
    refused = [f"{name} {reason}" for name, reason in selection.reasons if name != selection.backend]
    where = f"{capability.platform} ({capability.device_kind})" if capability.device_kind else capability.platform
    why = f"; {'; '.join(refused)}" if refused else ""
    return f"{spec.group_id}: {selection.backend} on {where}{why}"
