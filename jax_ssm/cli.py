"""The command line: `jax-ssm generate | bytes | describe | demo`.

Imports are inside the commands, so that `bytes` and `--help` answer without loading jax.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from jax_ssm import __version__
from jax_ssm.spec import HISTORY_LENGTHS, IMPLEMENTATIONS, MODES, PROJECTIONS, RULES, SSMSpec, seed_layout_bytes, state_bytes

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
    columns = ("state", "records", "cursors", "allocated", "seed layout", "a head*:\nallocated", "a head*:\nseed layout")
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
    print("* per layer, request and value head")
    for r in report["results"]:
        if "error" in r:
            print(f"{r['mode']}: {r['error']}")
    return 0


def _console():
    """A console that does not fold tables when the output is a file."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=150)


# --- generate -----------------------------------------------------------------------------------------------------

GENERATE_HELP = """\
Generate text with a hybrid model (Qwen3.5 checkpoints), speculatively where drafts are to be had.

The recurrent state is stored in one of three ways: "native" keeps a full state per verify position, "compact" one state
and the inputs of the round, "replay" one checkpoint and a short history. In fp32 (--act fp32) the text is the same in all
of them, and for every width, draft source and batch; what changes is memory and speed.

examples:
  jax-ssm generate --prompt "def fibonacci(n):" --max-new-tokens 64
  jax-ssm generate --model Qwen3.5-0.8B --prompt @question.txt --state replay --width 4
  jax-ssm generate --prompt "one" --prompt "two" --temperature 0.8 --top-p 0.95 --seed 7 --json
  cat notes.txt | jax-ssm generate --prompt - --drafts lookup --width 8

Progress goes to standard error. Executables are kept in ~/.cache/jax-ssm, so that the next run starts at once;
JAX_COMPILATION_CACHE_DIR=DIR names another place, JAX_ENABLE_COMPILATION_CACHE=0 keeps none.
"""


def read_prompt(text: str) -> str:
    """The text of one --prompt: itself, the contents of @FILE, or standard input for "-"; without a final newline."""
    if text == "-":
        text = sys.stdin.read()
    elif text.startswith("@"):
        path = Path(text[1:])
        if not path.is_file():
            raise ValueError(f"--prompt {text}: {'that is a folder' if path.is_dir() else 'there is no such file'}")
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"--prompt {text}: the file is not UTF-8 text ({error.reason} at byte {error.start})") from None
    else:
        return text
    return text.removesuffix("\n")


def keep_executables() -> None:
    """Let JAX keep compiled executables between runs, in ~/.cache/jax-ssm unless JAX_COMPILATION_CACHE_DIR is set."""
    import os

    import jax

    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(Path.home() / ".cache" / "jax-ssm"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def progress(message: str) -> None:
    """One line on standard error."""
    print(f"jax-ssm: {message}", file=sys.stderr, flush=True)


def engine_settings(args: argparse.Namespace) -> dict:
    """Arguments of `Settings` from parsed ones."""
    return dict(
        mode=args.state, width=args.width, history=args.history or 16, act_dtype=args.act, ssm_dtype=args.ssm_dtype,
        projection=args.projection, implementation=args.implementation, drafts=args.drafts,
        rounds_per_call=args.rounds_per_call, max_requests=args.max_requests, max_len=args.max_len, strict=args.strict,
    )  # fmt: skip


def run_generate(args: argparse.Namespace) -> int:
    prompts = [read_prompt(text) for text in args.prompt or []]
    if not prompts:
        raise ValueError('no prompt: give --prompt "TEXT", --prompt @FILE or --prompt - (standard input)')
    from jax_ssm.engine import Generator, Request

    keep_executables()
    choices = dict(
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_p=args.top_p, seed=args.seed,
        ignore_eos=args.ignore_eos,
    )  # fmt: skip
    Request(**choices)  # refused before a model is loaded
    if args.history and args.state != "replay":
        progress(f"note: --history has no effect with --state {args.state}")
    if args.top_p < 1 and args.temperature == 0:
        progress("note: --top-p has no effect at temperature 0 (greedy)")
    generator = Generator(args.model, progress=progress, **engine_settings(args))
    generator.check_prompts(prompts, args.max_new_tokens)
    on_tokens = None if args.json else stream(generator.model.decode, prompts)
    record = generator.generate(prompts, on_tokens=on_tokens, **choices)
    if args.json:
        print(json.dumps(record))
        return 0
    print()
    _console().print(summary(record))
    return 0


def stream(decode: Callable[[list[int]], str], prompts: list[str]) -> Callable:
    """Callback that prints prompt and text: of a single prompt as it comes, of several each when complete, labelled."""
    ids: dict[int, list[int]] = {}
    shown = ""

    def show(number: int, new: list[int], finish: str | None) -> None:
        nonlocal shown
        if len(prompts) == 1 and not ids:
            print(prompts[0], end="", flush=True)  # after what was said about compiling
        ids.setdefault(number, []).extend(new)
        if len(prompts) > 1:
            if finish:
                print(f"--- prompt {number} ({finish}) ---\n{prompts[number]}{decode(ids[number])}", flush=True)
            return
        text = decode(ids[number])
        if finish is None and text.endswith("\ufffd"):
            return  # half of a character: the rest comes with the next token
        print(text[len(shown) :], end="\n" if finish else "", flush=True)
        shown = text

    return show


def summary(record: dict):
    """The table below a generation."""
    from rich.table import Table

    t, s, c = record["timings"], record["settings"], record["compilations"]
    table = Table(title=f"{s['model']} on {record['versions']['device']}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    bucket = f"{s['bucket']['requests']} x {s['bucket']['max_len']}"
    rows = {
        "state": f"{s['mode']}, width {s['width']}" + (f", history {s['history']}" if s["mode"] == "replay" else ""),
        "backends": ", ".join(f"{group} {name}" for group, name in s["backends"].items()),
        "drafts": f"{s['drafts']} ({s['drafts_reason']})",
        "tokens": f"{t['tokens']} of {len(record['results'])} prompt(s) in {t['generate_s']:.2f} s",
        "tokens/s": f"{t['tokens_per_s']:,.1f}"
        + (f" ({t['decode_tokens_per_s']:,.1f} in decode)" if t["decode_tokens_per_s"] else ""),
        "rounds": f"{t['rounds']} in {t['calls']} calls",
        "accepted a round": "-" if t["mean_accepted"] is None else f"{t['mean_accepted']:.2f} tokens of {s['width']}",
        "state bytes": ", ".join(f"{k} {v:,}" for k, v in record["state_bytes"].items() if v),
        "compilations": f"{c['total']} in {t['compile_s']:.1f} s"
        + (f", {c['stray']} unexpected" if c["stray"] else "")
        + f" (bucket {bucket}: {', '.join(c['buckets'][bucket])})",
    }
    for item in rows.items():
        table.add_row(*item)
    return table


# --- describe and demo --------------------------------------------------------------------------------------------


def run_describe(args: argparse.Namespace) -> int:
    from jax_ssm.engine import Settings, describe, make_plan
    from jax_ssm.engine.load import find, read_config

    report = describe(make_plan(read_config(find(args.model)), Settings(**engine_settings(args))))
    if args.json:
        print(json.dumps(report))
        return 0
    for name, value in report.items():
        lines = value if isinstance(value, list) else [value]
        print(f"{name:<10}" + ("\n" + " " * 10).join(lines))
    return 0


DEMO_PROMPT = "class Stack:\n    def __init__(self):\n"


def run_demo(args: argparse.Namespace) -> int:
    from concurrent.futures import ThreadPoolExecutor

    from rich.table import Table

    from jax_ssm.engine import Generator, Request, Settings, load, make_plan
    from jax_ssm.engine.load import find, read_config

    keep_executables()
    prompt = DEMO_PROMPT if args.prompt is None else read_prompt(args.prompt)
    Request(args.max_new_tokens)  # refused before anything is loaded
    for mode in MODES:
        make_plan(read_config(find(args.model)), Settings(mode=mode, width=args.width, act_dtype="fp32"))
    model = load(args.model, "fp32")
    makers = {mode: Generator(model, mode=mode, width=args.width, act_dtype="fp32") for mode in MODES}
    makers[MODES[0]].check_prompts([prompt], args.max_new_tokens)
    progress(f"prompt {prompt!r}, {args.max_new_tokens} new tokens, greedy")
    progress("compiling for three state modes: about half a minute on two cores, a few seconds when it was done before")
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda g: g.warm_up([prompt], args.max_new_tokens), makers.values()))
    records = {}
    for i, (mode, generator) in enumerate(makers.items()):
        on_tokens = stream(model.decode, [prompt]) if i == 0 else None
        records[mode] = generator.generate([prompt], max_new_tokens=args.max_new_tokens, on_tokens=on_tokens)
    table = Table(title="the same prompt in three state modes", title_justify="left")
    for name in ("mode", "tokens", "identical", "rounds", "accepted a round", "tokens/s", "recurrent state", "with KV"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    reference = records[MODES[0]]["results"][0]["token_ids"]
    same = True
    for mode, record in records.items():
        ids, t, b = record["results"][0]["token_ids"], record["timings"], record["state_bytes"]
        same &= ids == reference
        recurrent = b["total"] - b["kv"] - b["mtp_kv"]
        table.add_row(
            mode, str(len(ids)), "yes" if ids == reference else "NO", str(t["rounds"]), f"{t['mean_accepted'] or 0:.2f}",
            f"{t['tokens_per_s']:,.0f}", f"{recurrent:,} B", f"{b['total']:,} B",
        )  # fmt: skip
    _console().print(table)
    plan = makers[MODES[0]].plan
    print(f"tokens identical in all modes: {'yes' if same else 'NO'} (drafts {plan.drafts}, width {plan.width})")
    return 0 if same else 1


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
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    raw = argparse.RawDescriptionHelpFormatter

    p = commands.add_parser("bytes", help="exact bytes of the state by mode", description=BYTES_HELP, formatter_class=raw)
    p.add_argument("--rule", choices=RULES, default="gdn", help="gdn: one decay per head; kda: one per key channel")
    p.add_argument("--heads", type=positive, default=1, help="query, key and value heads alike (default 1)")
    words = {"q": "query", "k": "key", "v": "value"}
    for name in words:
        p.add_argument(f"--{name}-heads", type=positive, default=None, help=f"{words[name]} heads (default: --heads)")
    p.add_argument("--k-dim", type=positive, default=128, help="key head size (default 128)")
    p.add_argument("--v-dim", type=positive, default=128, help="value head size (default 128)")
    p.add_argument("--layers", type=positive, default=1, help="linear-attention layers, counted as executed (default 1)")
    p.add_argument("--slots", type=positive, default=1, help="requests; the padding slot is not counted (default 1)")
    p.add_argument("--act", choices=DTYPES, default="bf16", help="activations and raw records (default bf16)")
    p.add_argument("--state", choices=DTYPES, default="fp32", help="the state itself (default fp32)")
    p.add_argument("--width", type=positive, default=2, help="verify width, drafts + 1 (default 2; 1..16)")
    p.add_argument("--history", type=positive, default=16, help=f"replay history length, one of {HISTORY_LENGTHS} (default 16)")
    p.add_argument("--mode", choices=MODES, default=None, help="only this mode with --json; marked in the table")
    p.add_argument("--projection", choices=PROJECTIONS, default="inline", help="replay only; narrows the seed's records")
    p.add_argument("--conv-width", type=positive, default=4, help="taps of the short convolution (default 4)")
    p.add_argument("--json", action="store_true", help="one JSON object on standard output")
    p.set_defaults(run=run_bytes)

    engine = argparse.ArgumentParser(add_help=False)
    g = engine.add_argument_group("engine")
    g.add_argument("--model", metavar="DIR", default=None, help="checkpoint directory (default: the demo model of the package)")
    g.add_argument("--state", choices=MODES, default="native", help="storage of the recurrent state (default native)")
    g.add_argument(
        "--width", type=positive, metavar="W", help="verify width, drafts + 1, 1..16 (default 4 with an MTP head, else 1)"
    )
    g.add_argument("--history", type=positive, metavar="L", help=f"replay history, one of {HISTORY_LENGTHS} (default 16)")
    text = "replay: how windows meet the state (default auto: the faster one where kernels run, else inline)"
    g.add_argument("--projection", choices=("auto", *PROJECTIONS), default="auto", help=text)
    g.add_argument("--drafts", choices=("auto", "mtp", "lookup"), default="auto", help="auto: MTP head, else prompt look-up")
    g.add_argument("--implementation", choices=("auto", *IMPLEMENTATIONS), default="auto", help="refused if it cannot run")
    g.add_argument("--act", choices=DTYPES, default=None, help="weights and activations (default bf16 on a GPU, else fp32)")
    g.add_argument("--ssm-dtype", choices=DTYPES, default="fp32", help="recurrent state (default fp32)")
    g.add_argument(
        "--rounds-per-call", type=positive, metavar="N", default=4, help="rounds between two visits of the host (default 4)"
    )
    g.add_argument(
        "--max-requests",
        type=positive,
        metavar="N",
        default=16,
        help="largest batch; more prompts wait (default 16)",
    )
    g.add_argument("--max-len", type=positive, metavar="N", help="longest prompt plus text (default: the model's)")
    g.add_argument("--strict", action="store_true", help="fail when anything compiles outside the buckets")

    p = commands.add_parser("generate", help="generate text", description=GENERATE_HELP, formatter_class=raw, parents=[engine])
    p.add_argument("--prompt", action="append", metavar="TEXT", help="text, @FILE or - for standard input; repeat for a batch")
    p.add_argument("--max-new-tokens", type=int, metavar="N", default=64, help="tokens per prompt (default 64)")
    p.add_argument("--temperature", type=float, metavar="T", default=0.0, help="0 is greedy (default)")
    p.add_argument("--top-p", type=float, metavar="P", default=1.0, help="most probable tokens up to this sum (default 1: all)")
    p.add_argument("--seed", type=int, metavar="S", default=0, help="0..4294967295 (default 0)")
    p.add_argument("--ignore-eos", action="store_true", help="do not stop at the end-of-text token")
    p.add_argument("--json", action="store_true", help="exactly one JSON object on standard output")
    p.set_defaults(run=run_generate)

    p = commands.add_parser(
        "describe", help="what would run here and why", parents=[engine],
        description="Mode, backend and dtype of every layer group, the drafts and the reason for each. Loads no weights.",
    )  # fmt: skip
    p.add_argument("--json", action="store_true", help="one JSON object on standard output")
    p.set_defaults(run=run_describe)

    p = commands.add_parser(
        "demo", help="one prompt in all three state modes", description="One prompt in all three state modes."
    )
    p.add_argument("--model", metavar="DIR", default=None, help="checkpoint directory (default: the demo model of the package)")
    p.add_argument("--prompt", metavar="TEXT", default=None, help="text to continue, @FILE or - for standard input")
    p.add_argument("--width", type=positive, metavar="W", default=3, help="verify width (default 3)")
    p.add_argument("--max-new-tokens", type=int, metavar="N", default=64, help="tokens (default 64)")
    p.set_defaults(run=run_demo)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Entry point. Exit code 0; 2 for a request that cannot be served, with one line on standard error that says why."""
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, OSError, NotImplementedError) as error:
        reason = error
    except RuntimeError as error:
        if type(error).__name__ != "BackendError":  # everything else is a fault of ours and deserves its traceback
            raise
        reason = error
    except KeyboardInterrupt:
        return 130
    print(f"jax-ssm: error: {' '.join(str(reason).split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
