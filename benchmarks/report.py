"""Tables and pictures of the README and docs, from the recorded results.

Tables stand between `<!-- table NAME -->` and `<!-- end -->`, NAME being <device>/<command>, a file below benchmarks/results,
or <device>/<command>:<form>, the form being a function of the command's module that makes heads and rows (default: `brief`,
else `table`).
Pictures are docs/<device>-<command>.svg, for the commands that benchmarks/plots.py can draw.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
from pathlib import Path

from benchmarks import record

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command-line options."""
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a table is out of date")
    parser.add_argument("files", type=Path, nargs="*", default=None, help="default: README.md and docs/*.md")


def run(args: argparse.Namespace) -> dict:
    """Rewrite every block in the files, then draw; `ok` is False when --check finds a table that is out of date."""
    from benchmarks import plots

    cells, stale = [], False
    for path in args.files or [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text()
        fresh = BLOCK.sub(lambda m: m[1] + markdown(m[2]) + m[3], text)
        stale |= fresh != text
        cells.append({"file": str(path), "tables": len(BLOCK.findall(text)), "changed": fresh != text})
        if not args.check:
            path.write_text(fresh)
    drawn = [] if args.check or args.files else [str(path) for path in plots.draw_all(record.RESULTS, ROOT / "docs")]
    return {"ok": not (args.check and stale), "cells": cells, "pictures": drawn}


def markdown(name: str) -> str:
    """The table of one result file in Markdown, with the line that says where it comes from."""
    name, _, form = name.partition(":")
    path = record.RESULTS / f"{name}.json"
    if not path.is_file():
        raise ValueError(f"table {name}: there is no result {path}; measure it with --save first")
    data = json.loads(path.read_text())
    module = importlib.import_module(f"benchmarks.{data['name'].replace('-', '_')}")
    heads, rows = (getattr(module, form) if form else getattr(module, "brief", module.table))(data)
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *(f"| {' | '.join(row)} |" for row in rows)]
    commit = f", commit {data['commit']}" if data.get("commit") else ""
    source = f"`{data['command']}`, {data['device']}, jax {data['versions']['jax']}, {data['date']}{commit}"
    return "\n".join([*lines, "", f"({source})", ""])


def table(data: dict) -> tuple[list[str], list[list[str]]]:
    """Column heads and rows for a person."""
    rows = [[c["file"], str(c["tables"]), str(c["changed"])] for c in data["cells"]]
    return ["file", "tables", "changed"], rows + [[path, "picture", "drawn"] for path in data["pictures"]]
