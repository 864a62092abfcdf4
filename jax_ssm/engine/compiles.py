"""Ahead-of-time executables of a run, and a count of every compilation that happens beside them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax

EVENT = "/jax/core/compile/backend_compile_duration"

_asked = threading.local()  # .now is True while this thread compiles on behalf of a Compiler
_stray = 0


def _listen(event: str, duration: float, **_) -> None:
    global _stray
    if event == EVENT and not getattr(_asked, "now", False):
        _stray += 1


jax.monitoring.register_event_duration_secs_listener(_listen)


@dataclass(frozen=True)
class Executable:
    """A compiled function and what it was compiled for. seconds: compilation; temp_bytes: scratch of one call."""

    name: str
    bucket: str
    call: Callable
    seconds: float
    temp_bytes: int


@dataclass(frozen=True)
class Part:
    """What to compile: a function, its arguments (arrays or their avals), and which of them it donates."""

    fn: Callable
    args: tuple
    donate: tuple[int, ...] = ()


def default_options() -> dict:
    """Compiler options of this platform. On a CPU the code generator optimises less: matrix products are library calls
    anyway, and for the demo model compilation takes 14 instead of 23 CPU seconds, a decode round 16 instead of 13 ms."""
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}


class Compiler:
    """Compiles the parts of a bucket once, side by side, and remembers them.

    `stray()` counts compilations in this process since `begin()` that no Compiler was asked for, such as a jnp operation on
    the host; a run has none. options: XLA compiler options of every executable, None for the platform's default.
    """

    def __init__(self, options: dict | None = None) -> None:
        self._options = default_options() if options is None else options
        self._buckets: dict[object, dict[str, Executable]] = {}
        self.begin()

    def begin(self) -> None:
        """Start counting."""
        self._start, self.fresh = _stray, []

    def has(self, bucket: object) -> bool:
        """Whether the executables of a bucket exist already."""
        return bucket in self._buckets

    def executables(self, bucket: object, parts: Callable[[], dict[str, Part]]) -> dict[str, Executable]:
        """The executables of a bucket; `parts()` says what they are and is called at the first request only."""
        if bucket not in self._buckets:

            def finish(item) -> Executable:
                (name, lowered), start = item, time.perf_counter()
                _asked.now = True
                try:
                    call = lowered.compile(compiler_options=self._options)
                finally:
                    _asked.now = False
                temp = getattr(call.memory_analysis(), "temp_size_in_bytes", 0)
                return Executable(name, str(bucket), call, time.perf_counter() - start, temp)

            lowered = {name: jax.jit(p.fn, donate_argnums=p.donate).lower(*p.args) for name, p in parts().items()}
            with ThreadPoolExecutor(len(lowered)) as pool:
                self.fresh = list(pool.map(finish, lowered.items()))
            self._buckets[bucket] = {e.name: e for e in self.fresh}
        return self._buckets[bucket]

    def stray(self) -> int:
        """Compilations since `begin()` that nobody asked for."""
        return _stray - self._start

    def require_no_stray(self) -> None:
        """Raise RuntimeError when something compiled behind the engine's back since `begin()`."""
        if self.stray():
            raise RuntimeError(
                f"strict=True: {self.stray()} compilations happened outside the executables of the bucket; look for jnp "
                "operations on the host, or use strict=False to count them only"
            )
