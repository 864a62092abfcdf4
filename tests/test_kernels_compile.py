"""Every Triton kernel that the verbs of torch_ref launch compiles for an H200, on a machine without a GPU as well."""

from __future__ import annotations

import pytest
import torch

import torch_ref
from torch_ref.spec import SSMSpec

triton = pytest.importorskip("triton")

CASES = [
    ("gdn", "native", 1, "fp32"),
    ("gdn", "native", 4, "bf16"),
    ("gdn", "compact", 4, "bf16"),
    ("gdn", "replay", 1, "fp32"),
    ("gdn", "replay", 4, "bf16"),
    ("gdn", "precompute", 4, "fp32"),
    ("kda", "native", 1, "bf16"),
    ("kda", "compact", 4, "fp32"),
    ("kda", "replay", 1, "bf16"),
    ("kda", "replay", 4, "fp32"),
    ("kda", "replay", 6, "fp32"),
    ("kda", "precompute", 2, "bf16"),
]
COMPILED: set = set()  # launches, over all cases
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64"}


def compile_for_h200(kernel, args, num_warps: int, registers: int | None):
    """The compiled kernel of one launch; arrays count as aligned to 16 bytes, as the allocators give them."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for i, (parameter, x) in enumerate(zip(kernel.params, args, strict=False)):
        if parameter.is_constexpr:
            signature[parameter.name], constants[i,] = "constexpr", x
        elif isinstance(x, torch.Tensor):
            signature[parameter.name], attributes[i,] = TYPES[x.dtype], [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "i32"
    options = dict(num_warps=num_warps, num_stages=1, enable_fp_fusion=False)
    options |= {} if registers is None else {"maxnreg": registers}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def launches(rule: str, mode: str, width: int, ssm: str, monkeypatch) -> list:
    """What one round, an export, a merge and a snapshot launch, as `kernels_triton.launch` records it; nothing runs."""
    from kernels_triton.launch import recorder
    from torch_ref import executors, pages

    for module in (executors, pages):
        if hasattr(module, "check_kernels"):
            monkeypatch.setattr(module, "check_kernels", lambda *_: None)  # there need not be a GPU
    heads = (2, 2, 4) if rule == "gdn" else (4, 4, 4)
    projection, mode = ("precompute", "replay") if mode == "precompute" else ("inline", mode)
    spec = SSMSpec(rule, 1, 4, *heads, 128, 128, width, mode, 16, "bf16", ssm, projection=projection)
    found, tokens, gates = [], 2 * width, spec.v_heads * spec.gates
    act = lambda *shape: torch.zeros(tokens, *shape, dtype=torch.bfloat16)  # noqa: E731
    inputs = torch_ref.LinearInputs(
        act(spec.q_heads, 128), act(spec.k_heads, 128), act(spec.v_heads, 128), act(gates), act(spec.v_heads),
        torch.zeros(spec.v_heads), torch.zeros(gates),
    )  # fmt: skip
    ids, at = torch.arange(2).repeat_interleave(width).int(), torch.arange(width).repeat(2).int()
    token = recorder.set(lambda *launch: found.append(launch))
    try:
        state = torch_ref.init_state(spec)
        layout = torch_ref.build_layout(spec, ids, at, fixed=True)
        state, receipt = torch_ref.prepare(spec, state, layout, kernels="triton")
        torch_ref.conv_forward(spec, state, receipt, 0, act(spec.channels), torch.zeros(spec.channels, 4))
        state, _ = torch_ref.forward(spec, state, receipt, 0, inputs)
        lengths = torch.full((2,), width, dtype=torch.int32)
        state = torch_ref.accept(spec, state, torch_ref.StateAcceptance((receipt,), lengths))
        slots = torch.arange(2)
        torch_ref.export_into(spec, state, torch_ref.init_pages(spec, 2), slots, slots, 2, kernels="triton")
        torch_ref.merge(spec, state, slots, kernels="triton")
        torch_ref.snapshot(spec, state, slots, kernels="triton")
    finally:
        recorder.reset(token)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("rule,mode,width,ssm", CASES, ids=lambda x: str(x))
def test_every_launch_compiles(rule, mode, width, ssm, monkeypatch):
    """All launches of a round and of the page verbs compile, each of them once over all cases."""
    found = launches(rule, mode, width, ssm, monkeypatch)
    assert found
    for kernel, _, args, num_warps, registers in found:
        shapes = tuple((x.dtype,) if isinstance(x, torch.Tensor) else x for x in args)
        key = (kernel.fn.__module__, kernel.__name__, shapes, num_warps, registers)
        if key not in COMPILED:
            COMPILED.add(key)
            assert compile_for_h200(kernel, args, num_warps, registers).asm["cubin"]


def test_a_call_with_wrong_arguments_does_not_compile(monkeypatch):
    """A planted fault: a helper that takes other arguments than its callers give."""
    from kernels_triton import decode

    kernel, _, args, *launch = next(x for x in launches("gdn", "native", 1, "fp32", monkeypatch) if "native" in x[0].__name__)
    monkeypatch.setattr(decode, "_token", decode._load_token)
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")  # the cache does not see the change
    with pytest.raises(triton.CompilationError):
        compile_for_h200(kernel, args, *launch)
