"""Model configuration from a Hugging Face `config.json`: what is supported, and the state geometry that follows from it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from jax_ssm.spec import SSMSpec

ARCHITECTURES = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
LAYER_KINDS = {"linear_attention": "gdn", "full_attention": "full"}

# Settings that a checkpoint may carry and that change the arithmetic: this is the only value that the model implements.
FIXED = {
    "attention_bias": False,
    "attn_output_gate": True,
    "hidden_act": "silu",
    "mtp_use_dedicated_embeddings": False,
}


@dataclass(frozen=True)
class ModelConfig:
    """Static description of one Qwen3.5 text model; field names are those of `config.json`.

    layer_types: "linear_attention" or "full_attention" per layer. rotary_dim: leading channels of each head that are
    rotated. eos_token_ids: every id that ends a text. dtype: how the checkpoint stores its weights, "fp32" or "bf16".
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int = 4
    rope_theta: float = 10000.0
    rotary_dim: int = 0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    mtp_num_hidden_layers: int = 0
    max_position_embeddings: int = 32768
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "fp32"

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                raise ValueError(f"{name}={getattr(self, name)!r} is not allowed: {allowed}")

        require(set(self.layer_types) == set(LAYER_KINDS), "layer_types", f"both kinds of {tuple(LAYER_KINDS)}, no other")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "num_attention_heads"):
            require(getattr(self, name) >= 1, name, "a positive integer")
        require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_key_value_heads",
            f"a divisor of num_attention_heads={self.num_attention_heads}",
        )
        require(
            0 < self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0,
            "rotary_dim",
            f"an even number in 2..head_dim={self.head_dim}",
        )
        require(self.mtp_num_hidden_layers in (0, 1), "mtp_num_hidden_layers", "0 or 1")
        linear_spec(self)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Layer kinds as `plan_layers` names them: "gdn" or "full"."""
        return tuple(LAYER_KINDS[t] for t in self.layer_types)


def linear_spec(config: ModelConfig, **fields) -> SSMSpec:
    """SSMSpec of the linear-attention layers; `fields` override or complete it (slots, width, mode, dtypes, layers).

    The defaults (2 slots, width 1) serve the teacher-forced forward, which needs the geometry only.
    """
    defaults = dict(
        rule="gdn",
        layers=config.kinds.count("gdn"),
        slots=2,
        q_heads=config.linear_num_key_heads,
        k_heads=config.linear_num_key_heads,
        v_heads=config.linear_num_value_heads,
        k_dim=config.linear_key_head_dim,
        v_dim=config.linear_value_head_dim,
        conv_width=config.linear_conv_kernel_dim,
    )
    return SSMSpec(**(defaults | fields))


def parse_config(raw: dict, where: str = "config.json") -> ModelConfig:
    """ModelConfig from the decoded JSON, text-only layout or with a `text_config` beside a vision part.

    Raises ValueError for an architecture or a setting that is not supported, and for missing entries.
    """
    architectures = tuple(raw.get("architectures") or ())
    if not set(architectures) & set(ARCHITECTURES):
        raise ValueError(f"{where}: architectures={list(architectures)} is not supported; supported are {list(ARCHITECTURES)}")
    text = raw.get("text_config", raw)
    for name, value in FIXED.items():
        if text.get(name, value) != value:
            raise ValueError(f"{where}: {name}={text[name]!r} is not supported: only {value!r} is")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"{where}: rope_type={rope['rope_type']!r} is not supported: only 'default' is")

    required = [
        f for f in ModelConfig.__dataclass_fields__ if f.startswith(("num_", "linear_num", "linear_key", "linear_value"))
    ]
    required += ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"]
    missing = sorted(name for name in required if name not in text)
    if missing:
        raise ValueError(f"{where}: missing entries {missing}")

    layers, every = text["num_hidden_layers"], text.get("full_attention_interval", 4)
    types = text.get("layer_types") or ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    if len(types) != layers:
        raise ValueError(f"{where}: layer_types has {len(types)} entries, num_hidden_layers={layers}")
    partial = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
    eos = text.get("eos_token_id", raw.get("eos_token_id"))
    stored = str(text.get("dtype") or text.get("torch_dtype") or raw.get("dtype") or raw.get("torch_dtype") or "bfloat16")
    copied = [
        "linear_conv_kernel_dim",
        "rms_norm_eps",
        "mtp_num_hidden_layers",
        "max_position_embeddings",
        "bos_token_id",
    ]
    return ModelConfig(
        **{name: text[name] for name in required if name != "num_hidden_layers"},
        **{name: text[name] for name in copied if name in text},
        layer_types=tuple(types),
        rope_theta=float(rope.get("rope_theta", text.get("rope_theta", 10000.0))),
        rotary_dim=int(text["head_dim"] * partial),
        tie_word_embeddings=bool(text.get("tie_word_embeddings", raw.get("tie_word_embeddings", False))),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        dtype="fp32" if "float32" in stored else "bf16",
    )


def load_config(directory: str | Path) -> ModelConfig:
    """Read `config.json` of a checkpoint directory. Raises ValueError when it is absent, broken or not supported."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory} is not a model directory: it has no config.json")
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    return parse_config(raw, str(path))


def config_json(config: ModelConfig) -> dict:
    """The text-only `config.json` of this model, as other readers of the format expect it."""
    out = asdict(config)
    rotary, eos = out.pop("rotary_dim"), list(out.pop("eos_token_ids"))
    out["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": out.pop("rope_theta"),
        "partial_rotary_factor": rotary / config.head_dim,
    }
    return (
        out
        | FIXED
        | {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "layer_types": list(config.layer_types),
            "num_hidden_layers": len(config.layer_types),
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
            "dtype": {"fp32": "float32", "bf16": "bfloat16"}[config.dtype],
        }
    )
