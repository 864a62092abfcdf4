"""The command line: `jax-ssm generate | bytes | describe | demo`.

Imports are inside the commands, so that `bytes` and `--help` answer without loading jax.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from jax_ssm.spec import HISTORY_LENGTHS, MODES, PROJECTIONS, RULES, SSMSpec, seed_layout_bytes, state_bytes

DTYPES = ("fp32", "bf16")


# --- bytes --------------------------------------------------------------------------------------------------------

BYTES_HELP = """\
Bytes of the recurrent state of linear-attention layers, by storage mode. Nothing is allocated and no GPU is needed.

"allocated" is what this project stores: state, records and cursors of all layers and requests. "seed layout" is what the
layout published in LightLLM PR 1585/1690 takes, which also keeps the normalised key of every record. Both are also given
per layer, request and value head. Convolution windows come on top and are listed beside.

examples:
  jax-ssm bytes --rule kda --heads 1 --k-dim 128 --v-dim 128 --act bf16 --state bf16 --width 3 --history 16
  jax-ssm bytes --rule kda --heads 1 --width 3 --state bf16 --mode replay --json
  jax-ssm bytes --rule gdn --q-heads 4 --k-heads 4 --v-heads 12 --layers 48 --width 4 --history 8 --state bf16
"""


def bytes_report(args: argparse.Namespace) -> dict:
    """What `bytes --json` prints: one entry of "results" per mode; an illegal mode has "error" instead of figures."""
    heads = {name: getattr(args, name) or args.heads for name in ("q_heads", "k_heads", "v_heads")}
    common = dict(
        rule=args.rule, layers=args.layers, slots=args.slots + 1, k_dim=args.k_dim, v_dim=args.v_dim, width=args.width,
        history=args.history, act_dtype=args.act, ssm_dtype=args.state, conv_width=args.conv_width, **heads,
    )  # fmt: skip
    if args.mode:
        SSMSpec(mode=args.mode, projection=args.projection, **common)  # an illegal request is an error, not a table row
    results = []
    for mode in MODES:
        try:
            spec = SSMSpec(mode=mode, projection=args.projection if mode == "replay" else "inline", **common)
        except ValueError as error:
            results.append({"mode": mode, "error": str(error)})
            continue
        parts, seed = state_bytes(spec), seed_layout_bytes(spec)
        allocated = parts["ssm"] + parts["history"] + parts["cursor"]
        share = spec.layers * (spec.slots - 1) * spec.v_heads
        results.append(
            {
                "mode": mode,
                "allocated": allocated,
                "seed_layout": seed,
                "allocated_per_layer_request_head": _whole(allocated / share),
                "seed_layout_per_layer_request_head": _whole(seed / share),
                "parts": parts,
            }
        )
    if all("error" in r for r in results):
        raise ValueError(results[0]["error"])
    fields = {"requests": args.slots} | {k: v for k, v in common.items() if k != "slots"}
    return {"geometry": fields | {"projection": args.projection}, "results": results}


def _whole(x: float) -> int | float:
    return int(x) if x == int(x) else round(x, 3)


def run_bytes(args: argparse.Namespace) -> int:
    report = bytes_report(args)
    if args.json:
        kept = [r for r in report["results"] if args.mode in (None, r["mode"])]
        print(json.dumps(report | {"results": kept}))
        return 0
    from rich.table import Table

    g = report["geometry"]
    table = Table(
        title=f"{g['rule'].upper()} state: {g['requests']} request(s), {g['layers']} layer(s), {g['v_heads']} value head(s) of "
        f"{g['k_dim']} x {g['v_dim']}, width {g['width']}, history {g['history']}, state {g['ssm_dtype']}, "
        f"activations {g['act_dtype']}"
    )
    columns = ("state", "records", "cursors", "allocated", "seed layout", "a layer, request\nand value head", "seed layout")
    table.add_column("mode")
    for name in columns:
        table.add_column(name, justify="right")
    table.add_column("conv window\n(not counted)", justify="right")
    for r in report["results"]:
        name = f"[bold]{r['mode']}[/bold]" if r["mode"] == args.mode else r["mode"]
        if "error" in r:
            table.add_row(name, "-", "-", "-", "[dim]not legal[/dim]", "-", "-", "-", "-")
            continue
        p = r["parts"]
        figures = (
            p["ssm"], p["history"], p["cursor"], r["allocated"], r["seed_layout"],
            r["allocated_per_layer_request_head"], r["seed_layout_per_layer_request_head"], p["conv"],
        )  # fmt: skip
        table.add_row(name, *(f"{x:,}" for x in figures))
    _console().print(table)
    for r in report["results"]:
        if "error" in r:
            print(f"{r['mode']}: {r['error']}")
    return 0


def _console(stderr: bool = False):
    """A console that does not fold tables when the output is a file."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=150)


# --- the parser ---------------------------------------------------------------------------------------------------


def positive(text: str) -> int:
    """argparse type: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not allowed: an integer of at least 1")
    return value


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="jax-ssm",
        description="Inference of hybrid models (GDN, KDA) with three ways to store the recurrent state.",
        epilog="Each command explains itself: jax-ssm COMMAND --help",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    raw = argparse.RawDescriptionHelpFormatter

    p = commands.add_parser("bytes", help="exact bytes of the state by mode", description=BYTES_HELP, formatter_class=raw)
    p.add_argument("--rule", choices=RULES, default="gdn", help="gdn: one decay per head; kda: one per key channel")
    p.add_argument("--heads", type=positive, default=1, help="query, key and value heads alike (default 1)")
    for name in ("q", "k", "v"):
        p.add_argument(f"--{name}-heads", type=positive, default=None, help=argparse.SUPPRESS if name == "q" else "overrides --heads")
    p.add_argument("--k-dim", type=positive, default=128, help="key head size (default 128)")
    p.add_argument("--v-dim", type=positive, default=128, help="value head size (default 128)")
    p.add_argument("--layers", type=positive, default=1, help="linear-attention layers, counted as executed (default 1)")
    p.add_argument("--slots", type=positive, default=1, help="requests; the padding slot is not counted (default 1)")
    p.add_argument("--act", choices=DTYPES, default="bf16", help="activations and raw records (default bf16)")
    p.add_argument("--state", choices=DTYPES, default="fp32", help="the state itself (default fp32)")
    p.add_argument("--width", type=positive, default=1, help="verify width, drafts + 1 (default 1; 1..16)")
    p.add_argument("--history", type=positive, default=16, help=f"replay history length, one of {HISTORY_LENGTHS} (default 16)")
    p.add_argument("--mode", choices=MODES, default=None, help="only this mode with --json; marked in the table")
    p.add_argument("--projection", choices=PROJECTIONS, default="inline", help="replay only; narrows the seed's records")
    p.add_argument("--conv-width", type=positive, default=4, help="taps of the short convolution (default 4)")
    p.add_argument("--json", action="store_true", help="one JSON object on standard output")
    p.set_defaults(run=run_bytes)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Entry point. Exit code 0; 2 for a request that cannot be served, with one line on standard error that says why."""
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"jax-ssm: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
