"""torch_ref: every verb of the recurrent state in PyTorch eager, and the normative order of its arithmetic.

Same verbs, names and argument order as jax_ssm. Slow and explicit on purpose: kernels are compared with it bit by bit.
Runs on CPU and CUDA; fp32 multiplications and additions only, each a separate operation, no library reduction.
"""

from torch_ref.acceptance import Ledger, SSMForward, StateAcceptance, check_acceptance
from torch_ref.conv import conv_forward, conv_prefill, conv_sequence
from torch_ref.executors import accept, commit, forward, forward_core, merge, prepare, snapshot
from torch_ref.gates import CoreInputs, LinearInputs, canonical_sum, pair_levels, prologue
from torch_ref.layout import DecodeLayout, build_layout
from torch_ref.pages import Pages, export_into, init_pages, restore
from torch_ref.prefill import prefill
from torch_ref.spec import KernelConfig, SSMSpec, page_bytes, seed_layout_bytes, state_bytes
from torch_ref.state import CompactWindow, ConvSSMState, ReplayHistory, clear, init_state

__all__ = [
    "CompactWindow", "ConvSSMState", "CoreInputs", "DecodeLayout", "KernelConfig", "Ledger", "LinearInputs", "Pages",
    "ReplayHistory", "SSMForward", "SSMSpec", "StateAcceptance", "accept", "build_layout", "canonical_sum",
    "check_acceptance", "clear", "commit", "conv_forward", "conv_prefill", "conv_sequence", "export_into", "forward",
    "forward_core", "init_pages", "init_state", "merge", "page_bytes", "pair_levels", "prefill", "prepare", "prologue",
    "restore", "seed_layout_bytes", "snapshot", "state_bytes",
]  # fmt: skip
