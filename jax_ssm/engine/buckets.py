"""Buckets: the padded capacities that one set of executables serves. Pure Python, no arrays."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunBucket:
    """Static capacities of a run: request rows and token positions per row, both powers of two. How many rows are live,
    and how long each sequence is, are run-time values."""

    requests: int
    max_len: int

    def __str__(self) -> str:
        return f"{self.requests} x {self.max_len}"


def power_of_two(n: int) -> int:
    """Smallest power of two that is at least n (n >= 1)."""
    return 1 << (n - 1).bit_length()


def choose_bucket(requests: int, positions: int, *, max_requests: int, least_len: int) -> RunBucket:
    """The bucket of a run: `requests` prompts (those beyond max_requests wait), `positions` tokens in the longest one."""
    return RunBucket(power_of_two(min(requests, max_requests)), power_of_two(max(positions, least_len)))
