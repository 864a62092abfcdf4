"""jax_ssm: recurrent-state storage and inference for GDN and KDA layers, as pytrees through jitted steps."""

from jax_ssm.acceptance import Ledger, SSMForward, StateAcceptance, check_acceptance
from jax_ssm.conv import conv_forward, conv_prefill
from jax_ssm.executors import accept, commit, forward, forward_core, merge, prepare, snapshot
from jax_ssm.gates import CoreInputs, LinearInputs, prologue
from jax_ssm.layout import DecodeLayout, build_layout
from jax_ssm.pages import Pages, export_into, init_pages, restore
from jax_ssm.prefill import prefill
from jax_ssm.spec import KernelConfig, SSMSpec, page_bytes, seed_layout_bytes, state_bytes
from jax_ssm.state import CompactWindow, ConvSSMState, ReplayHistory, clear, init_state

__version__ = "0.1.0"

__all__ = [
    "CompactWindow", "ConvSSMState", "CoreInputs", "DecodeLayout", "KernelConfig", "Ledger", "LinearInputs", "Pages",
    "ReplayHistory", "SSMForward", "SSMSpec", "StateAcceptance", "accept", "build_layout", "check_acceptance", "clear",
    "commit", "conv_forward", "conv_prefill", "export_into", "forward", "forward_core", "init_pages", "init_state",
    "merge", "page_bytes", "prefill", "prepare", "prologue", "restore", "seed_layout_bytes", "snapshot", "state_bytes",
]  # fmt: skip
