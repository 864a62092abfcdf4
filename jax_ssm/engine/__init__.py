"""The engine: prompts to text on the hybrid models, with speculative rounds that never leave the device.

from jax_ssm.engine import Generator
record = Generator("DIR", mode="replay", width=4).generate(["a prompt"], max_new_tokens=64)
"""

from jax_ssm.engine.generate import Generator
from jax_ssm.engine.load import LoadedModel, load
from jax_ssm.engine.plan import EnginePlan, describe, make_plan
from jax_ssm.engine.settings import Request, Settings
from jax_ssm.engine.slots import FreeList, StateManager

__all__ = [
    "EnginePlan", "FreeList", "Generator", "LoadedModel", "Request", "Settings", "StateManager", "describe", "load",
    "make_plan",
]  # fmt: skip
