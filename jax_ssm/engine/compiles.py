"""Ahead-of-time executables of a run, and a count of every compilation that happens beside them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import jax

EVENT = "/jax/core/compile/backend_compile_duration"
_events = 0


def _listen(event: str, duration: float, **_) -> None:
    global _events
    _events += event == EVENT


jax.monitoring.register_event_duration_secs_listener(_listen)


def backend_compilations() -> int:
    """Compilations by the backend in this process since this module was imported, wherever they came from."""
    return _events


@dataclass(frozen=True)
class Executable:
    """A compiled function and what it was compiled for. seconds: lowering and compilation."""

    name: str
    bucket: str
    call: Callable
    seconds: float
    temp_bytes: int


class Compiler:
    """Compiles each (name, bucket) once and remembers it.

    `stray()` is how many compilations happened since the last `begin()` that this object did not ask for; a run has none.
    """

    def __init__(self) -> None:
        self._done: dict[tuple, Executable] = {}
        self._expected = 0
        self.begin()

    def begin(self) -> None:
        """Start counting."""
        self._start, self._own, self._fresh = backend_compilations(), 0, []

    def executable(self, name: str, bucket: object, fn: Callable, args: tuple, donate: tuple[int, ...] = ()) -> Callable:
        """The executable of `fn` for `args` (arrays or their avals), compiled at the first request for (name, bucket)."""
        key = (name, bucket)
        if key not in self._done:
            before, start = backend_compilations(), time.perf_counter()
            compiled = jax.jit(fn, donate_argnums=donate).lower(*args).compile()
            self._own += backend_compilations() - before
            memory = compiled.memory_analysis()
            temp = int(getattr(memory, "temp_size_in_bytes", 0) or 0)
            self._done[key] = Executable(name, str(bucket), compiled, time.perf_counter() - start, temp)
            self._fresh.append(self._done[key])
        return self._done[key].call

    def has(self, name: str, bucket: object) -> bool:
        """Whether this executable exists already."""
        return (name, bucket) in self._done

    def fresh(self) -> list[Executable]:
        """Executables compiled since `begin()`."""
        return list(self._fresh)

    def all(self) -> list[Executable]:
        """Every executable that this object holds."""
        return list(self._done.values())

    def stray(self) -> int:
        """Compilations since `begin()` that nobody asked for here."""
        return backend_compilations() - self._start - self._own

    def require_no_stray(self) -> None:
        """Raise RuntimeError when something compiled behind the engine's back since `begin()`."""
        if self.stray():
            raise RuntimeError(
                f"strict=True: {self.stray()} compilations happened outside the executables of the bucket; "
                "run with strict=False to only count them, and look for jnp operations on the host"
            )
