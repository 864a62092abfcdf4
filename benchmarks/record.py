"""Results on disk: one JSON file a measurement, with versions, command, device and raw samples, under results/<device>/."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "numpy", "torch", "triton", "transformers", "jax-triton", "fla-core")


def versions() -> dict[str, str]:
    """Version of Python and of every installed package that a figure may depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def device_name() -> str:
    """Folder name of this machine's device, e.g. "nvidia-h200" or "cpu"."""
    import jax

    device = jax.devices()[0]
    return "cpu" if device.platform == "cpu" else re.sub(r"[^a-z0-9]+", "-", device.device_kind.lower()).strip("-")


def commit() -> str | None:
    """Short id of the commit that runs, with a + when files differ from it; JAX_SSM_COMMIT where it is set, since a copy of the
    files may lie in another repository or in none."""
    if named := os.environ.get("JAX_SSM_COMMIT"):
        return named
    git = ["git", "-C", str(RESULTS.parent.parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed.strip() else "")


def write(name: str, data: dict, out: Path | None = None) -> Path:
    """Write results/<device>/<name>.json (or below `out`) and return its path. `data` is the measurement itself."""
    device = device_name()
    arguments = [a if a != str(out) else "DIR" for a in sys.argv[1:]]  # a folder of this machine means nothing elsewhere
    path = (out or RESULTS) / device / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {
        "name": name,
        "device": device,
        "command": " ".join(["python -m benchmarks", *arguments]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "versions": versions(),
    }
    path.write_text(json.dumps(header | data, indent=1) + "\n")
    return path


def say(message: str) -> None:
    """Progress, on standard error."""
    print(message, file=sys.stderr, flush=True)


def at_least(least: int):
    """argparse type: an integer of at least `least`."""

    def parse(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is not allowed: at least {least}")
        return int(text)

    return parse
