"""jax_ssm: recurrent-state storage and inference for GDN and KDA layers, as pytrees through jitted steps.

The public names load on first use, so that `import jax_ssm.spec` and `jax-ssm bytes` do not import jax.
"""

import importlib
import sys
import types

__version__ = "0.1.0"

_HOMES = {
    "acceptance": ("Ledger", "SSMForward", "StateAcceptance", "check_acceptance"),
    "conv": ("conv_forward", "conv_prefill"),
    "executors": ("accept", "commit", "forward", "forward_core", "merge", "prepare", "snapshot"),
    "gates": ("CoreInputs", "LinearInputs", "prologue"),
    "layout": ("DecodeLayout", "build_layout"),
    "pages": ("Pages", "export_into", "init_pages", "restore"),
    "prefill": ("prefill",),
    "spec": ("KernelConfig", "SSMSpec", "page_bytes", "seed_layout_bytes", "state_bytes"),
    "state": ("CompactWindow", "ConvSSMState", "ReplayHistory", "clear", "init_state"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)


class _Package(types.ModuleType):
    """The package object: `jax_ssm.prefill` is the verb, also after the import system bound the file of that name."""

    def __setattr__(self, name, value):
        super().__setattr__(name, value.prefill if name == "prefill" and isinstance(value, types.ModuleType) else value)

    def __getattr__(self, name):
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        setattr(self, name, value)
        return value

    def __dir__(self):
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
