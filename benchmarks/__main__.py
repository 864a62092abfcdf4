"""`python -m benchmarks COMMAND`: every figure of the README and docs comes from one of these commands."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from benchmarks import record

COMMANDS = {
    "parity": "PyTorch eager, Triton and Pallas compared element by element in every verb",
    "compile": "first-seen request counts in a warmed bucket: compilations and the cost of the first round",
    "cycle": "whole decoding rounds: device time by mode, batch, width and acceptance",
    "kernel": "every kernel alone: device time beside the bytes it must move",
    "peers": "the native kernels beside those of flash-linear-attention, in one run",
    "identity": "greedy text of native, compact and replay, plain and speculative, token by token",
    "accepted": "tokens committed a round, by verify width and temperature",
    "accuracy": "state against a float64 recurrence after 2,048 tokens",
    "report": "rewrite the tables of README and docs from the recorded results",
    "bytes": "bytes of state by mode, width and dtype",
    "export": "temporary memory of an export into caller-owned pages",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; exit 1 when what it checks does not hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        module = importlib.import_module(f"benchmarks.{name}")
        sub = commands.add_parser(name, help=text, description=module.__doc__)
        module.add_arguments(sub)
        sub.add_argument("--json", action="store_true", help="one JSON object on standard output")
        sub.add_argument("--save", action="store_true", help="write benchmarks/results/<device>/<command>.json")
        sub.add_argument("--out", type=Path, help="write below this folder instead (implies --save)")
    args = parser.parse_args(argv)
    module = importlib.import_module(f"benchmarks.{args.command}")
    try:
        data = module.run(args)
    except (ValueError, OSError) as error:
        print(f"python -m benchmarks: error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(data))
    else:
        show(*module.table(data))
        print("holds" if data["ok"] else "DOES NOT HOLD")
    if args.save or args.out:
        record.say(f"wrote {record.write(args.command, data, args.out)}")
    return 0 if data["ok"] else 1


def show(heads: list[str], rows: list[list[str]]) -> None:
    """Print a table."""
    from rich.console import Console
    from rich.table import Table

    grid = Table()
    for head in heads:
        grid.add_column(head)
    for row in rows:
        grid.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 200).print(grid)


if __name__ == "__main__":
    sys.exit(main())
