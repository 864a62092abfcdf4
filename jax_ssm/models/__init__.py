"""Hybrid language models: configuration, weights, the teacher-forced forward, and inference on the attention runtime."""

from jax_ssm.models.config import ModelConfig, load_config
from jax_ssm.models.qwen3_5 import forward_sequence, init_params, mtp_sequence
from jax_ssm.models.weights import load_model, load_params, save_params

__all__ = [
    "ModelConfig", "forward_sequence", "init_params", "load_config", "load_model", "load_params", "mtp_sequence", "save_params",
]  # fmt: skip
