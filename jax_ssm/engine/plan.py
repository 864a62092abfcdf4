"""What an engine will run, decided from a config and settings before any weight is read; and the same in words."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from jax_ssm import attention
from jax_ssm.engine.buckets import RunBucket
from jax_ssm.engine.settings import Settings, choose_drafts, require
from jax_ssm.models import ModelConfig, hybrid
from jax_ssm.models.hybrid import ModelSpecs

LEAST_LEN = 128  # positions of the smallest bucket


@dataclass(frozen=True)
class EnginePlan:
    """Settings with every default resolved. drafts: "none", "mtp" or "lookup", with its reason; width: W."""

    config: ModelConfig
    settings: Settings
    act_dtype: str
    drafts: str
    drafts_reason: str
    width: int
    max_len: int

    @property
    def implementation(self) -> str | None:
        """The backend asked for by name, or None."""
        return None if self.settings.implementation == "auto" else self.settings.implementation

    def specs(self, bucket: RunBucket) -> ModelSpecs:
        """The static description of a bucket; raises ValueError or BackendError for what cannot run."""
        s = self.settings
        projection = None if s.projection == "auto" else s.projection
        return hybrid.model_specs(
            self.config, slots=bucket.requests + 1, max_len=bucket.max_len, width=self.width, mode=s.mode, history=s.history,
            act_dtype=self.act_dtype, ssm_dtype=s.ssm_dtype, implementation=self.implementation, projection=projection,
            mtp=self.drafts == "mtp",
        )  # fmt: skip


def make_plan(config: ModelConfig, settings: Settings) -> EnginePlan:
    """Resolve and check. Raises ValueError for illegal combinations, BackendError for an implementation that cannot run."""
    drafts, width, reason = choose_drafts(settings, bool(config.mtp_num_hidden_layers))
    most = config.max_position_embeddings
    require(settings.max_len is None or settings.max_len <= most, "max_len", settings.max_len, f"at most the model's {most}")
    act_dtype = settings.act_dtype or ("bf16" if jax.default_backend() == "gpu" else "fp32")
    plan = EnginePlan(config, settings, act_dtype, drafts, reason, width, settings.max_len or most)
    plan.specs(RunBucket(1, LEAST_LEN))
    return plan


def describe(plan: EnginePlan) -> dict[str, str | list[str]]:
    """What would run here, for people: state, dtypes, drafts, limits, and the backend of every layer group with reasons."""
    s, specs, capability = plan.settings, plan.specs(RunBucket(1, LEAST_LEN)), attention.local_capability()
    groups = []
    for spec, _ in specs.groups.values():
        constraints = attention.Constraints(None if spec.kind == "full" else plan.implementation)
        groups.append(attention.describe(spec, attention.select_backend(spec, capability, constraints), capability))
    kinds = plan.config.kinds
    history = f", history {s.history}, projection {specs.ssm.projection}" if s.mode == "replay" else ""
    return {
        "model": ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)) + " layers",
        "state": f"{s.mode}, width {plan.width}{history}",
        "dtypes": f"{plan.act_dtype} weights and activations, {s.ssm_dtype} recurrent state",
        "drafts": f"{plan.drafts} ({plan.drafts_reason})",
        "limits": f"{plan.max_len} positions, {s.max_requests} requests a batch",
        "backends": groups,
    }
