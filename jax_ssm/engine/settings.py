"""What a user may choose, checked before anything is allocated: settings of an engine and of one generation."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real

from jax_ssm.spec import HISTORY_LENGTHS, IMPLEMENTATIONS, ITEMSIZE, MODES, PROJECTIONS

DRAFTS = ("auto", "mtp", "lookup")


def require(ok: bool, name: str, value: object, allowed: str) -> None:
    """Raise ValueError naming argument, value and what is allowed."""
    if not ok:
        raise ValueError(f"{name}={value!r} is not allowed: {allowed}")


def _integer(value: object, least: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= least


def _number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and abs(value) < 1e38  # finite in fp32


@dataclass(frozen=True)
class Settings:
    """Static choices of an engine: another value is another set of executables.

    mode: storage of the recurrent state. width: verify width W, drafts + 1; None: 4 with an MTP head or when drafts are
    named, else 1 (2 in mode "compact", which needs a draft). history: L of mode "replay".
    act_dtype: None is "bf16" on a GPU, where it is fast, and "fp32" elsewhere. ssm_dtype: the recurrent state.
    projection: "inline" (bits of plain decoding's sums) or "precompute" (tensor cores) for the windows of mode "replay";
    "auto": the faster one where kernels run, else "inline".
    implementation: "auto", or a name that is refused where it cannot run.
    drafts: "mtp", "lookup", or "auto": the MTP head where the checkpoint has one, else prompt look-up.
    rounds_per_call: rounds that run on the device between two visits of the host.
    max_requests: rows of the largest bucket; more prompts wait for a free row. max_len: longest prompt plus text; None:
    what the model's positions allow. prefill_chunk: prompt tokens of one prefill call.
    strict: raise when something compiles outside the buckets.
    """

    mode: str = "native"
    width: int | None = None
    history: int = 16
    act_dtype: str | None = None
    ssm_dtype: str = "fp32"
    projection: str = "auto"
    implementation: str = "auto"
    drafts: str = "auto"
    rounds_per_call: int = 4
    max_requests: int = 16
    max_len: int | None = None
    prefill_chunk: int = 64
    strict: bool = False

    def __post_init__(self) -> None:
        require(self.mode in MODES, "mode", self.mode, f"one of {MODES}")
        require(self.width is None or _integer(self.width, 1), "width", self.width, "an integer of at least 1, drafts + 1")
        require(self.history in HISTORY_LENGTHS, "history", self.history, f"one of {HISTORY_LENGTHS}")
        allowed = (None, *ITEMSIZE)
        require(self.act_dtype in allowed, "act_dtype", self.act_dtype, f"one of {allowed}")
        require(self.ssm_dtype in ITEMSIZE, "ssm_dtype", self.ssm_dtype, f"one of {tuple(ITEMSIZE)}")
        allowed = ("auto", *PROJECTIONS)
        require(self.projection in allowed, "projection", self.projection, f"one of {allowed}")
        fits = self.projection != "precompute" or self.mode == "replay"
        require(
            fits, "projection", self.projection, f"'auto' or 'inline' in mode {self.mode!r}; 'precompute' needs mode 'replay'"
        )
        allowed = ("auto", *IMPLEMENTATIONS)
        require(self.implementation in allowed, "implementation", self.implementation, f"one of {allowed}")
        require(self.drafts in DRAFTS, "drafts", self.drafts, f"one of {DRAFTS}")
        for name in ("rounds_per_call", "max_requests", "prefill_chunk"):
            require(_integer(getattr(self, name), 1), name, getattr(self, name), "an integer of at least 1")
        require(self.max_len is None or _integer(self.max_len, 2), "max_len", self.max_len, "an integer of at least 2")


def choose_drafts(settings: Settings, has_mtp: bool) -> tuple[str, int, str]:
    """(drafts, width, why) that a checkpoint with or without an MTP head gets: drafts is "none", "mtp" or "lookup"."""
    named = settings.drafts != "auto"
    require(
        settings.drafts != "mtp" or has_mtp, "drafts", settings.drafts, "'lookup' or 'auto', the checkpoint has no MTP weights"
    )
    require(
        not (named and settings.width == 1),
        "width",
        settings.width,
        f"at least 2 with drafts={settings.drafts!r}; 1 drafts nothing",
    )
    least = 2 if settings.mode == "compact" else 1
    width = settings.width or (4 if has_mtp or named else least)
    if width == 1:
        return "none", 1, "width 1: no token is drafted"
    if named:
        return settings.drafts, width, "asked for"
    if has_mtp:
        return "mtp", width, "the checkpoint has an MTP head"
    return "lookup", width, "the checkpoint has no MTP weights"


@dataclass(frozen=True)
class Request:
    """Traced choices of one generation: another value uses the same executables.

    temperature: 0 is greedy. top_p: the most probable tokens whose sum reaches it (1: all); no effect when greedy.
    ignore_eos: write max_new_tokens tokens whatever they are.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        require(_integer(self.max_new_tokens, 1), "max_new_tokens", self.max_new_tokens, "an integer of at least 1")
        require(
            _number(self.temperature) and self.temperature >= 0,
            "temperature",
            self.temperature,
            "a finite number >= 0 (0: greedy)",
        )
        require(_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1 (1: every token)")
        require(_integer(self.seed, 0) and self.seed < 2**32, "seed", self.seed, "an integer in 0..4294967295")
