"""What the kernels are held to on an H200, beside what `cycle` measured: one layer, GDN 16/32 or KDA 32/32 heads, 128 x 128.

`python -m benchmarks report` draws these tables from a recorded cycle: cycle:absolute and cycle:ratios.
"""

from __future__ import annotations

IMPLEMENTATIONS = ("pallas", "triton", "jaxtriton")

# step of GDN at a batch: mode, W, accepted, state, batch, then µs: must, aim
STEPS = (
    ("native", 1, 1, "fp32", 128, 145, 134),
    ("native", 1, 1, "bf16", 128, 78, 70),
    ("native", 4, 3, "fp32", 128, 420, 360),
    ("native", 4, 3, "bf16", 128, 250, 190),
    ("replay", 1, 1, "fp32", 128, 102, 88),
    ("replay", 1, 1, "bf16", 128, 82, 68),
    ("precompute", 4, 3, "fp32", 128, 178, 150),
    ("precompute", 4, 3, "bf16", 128, 132, 110),
    ("replay", 4, 3, "fp32", 128, 235, 190),
    ("replay", 4, 3, "bf16", 128, 225, 150),
    ("native", 1, 1, "fp32", 1, 7, 4),
    ("native", 1, 1, "fp32", 8, 12, 9),
    ("replay", 1, 1, "fp32", 1, 7, 4),
    ("replay", 1, 1, "fp32", 8, 12, 9),
)
# compact W = 4, accept 3, over native W = 4 of the same implementation: state, must, aim
COMPACT = (("fp32", 1 / 1.2, 1 / 1.45), ("bf16", 1.0, 1 / 1.25))
KDA = {"fp32": (1.25, 1.12), "bf16": (1.3, 1.15)}  # over GDN, by state
OTHERS = (("pallas", "triton", 1.10, 1.04), ("jaxtriton", "triton", 1.02, 1.00))  # over its twin from PyTorch


def verdict(value: float, must: float, aim: float, digits: int) -> str:
    """The value, and which bound it keeps."""
    told = "aim" if value <= aim else "met" if value <= must else "missed"
    return f"{value:.{digits}f} ({told})"


def lookup(data: dict):
    """A function of rule, mode, W, accepted, state, batch and implementation: µs, or None where nothing was measured."""
    keys = ("rule", "mode", "width", "accepted", "ssm", "batch")
    cells = {tuple(c[key] for key in keys): c["implementations"] for c in data["cells"]}

    def found(*key) -> float | None:
        *cell, implementation = key
        return cells.get(tuple(cell), {}).get(implementation, {}).get("us")

    return found


def name_of(mode: str, width: int, accepted: int) -> str:
    """The step in words."""
    projection = {"replay": " inline", "precompute": " precompute"}.get(mode, "") if width > 1 else ""
    kind = "decode" if width == 1 else f"verify W = {width}, accept {accepted}"
    return f"{mode.replace('precompute', 'replay')} {kind}{projection}"


def absolute(data: dict) -> tuple[list[str], list[list[str]]]:
    """µs a layer and step of GDN against its bounds."""
    found, rows = lookup(data), []
    for *step, must, aim in STEPS:
        times = [found("gdn", *step, kind) for kind in IMPLEMENTATIONS]
        told = [verdict(us, must, aim, 1) if us else "-" for us in times]
        rows.append([name_of(*step[:3]), step[3], str(step[4]), f"{must} / {aim}", *told])
    return ["GDN step", "state", "B", "must / aim", *IMPLEMENTATIONS], rows


def ratios(data: dict) -> tuple[list[str], list[list[str]]]:
    """Ratios of steps at B = 128 against their bounds."""
    found, rows = lookup(data), []

    def row(name: str, state: str, must: float, aim: float, pairs: list) -> None:
        told = [verdict(a / b, must, aim, 2) if a and b else "-" for a, b in pairs]
        rows.append([name, state, f"{must:.2f} / {aim:.2f}", *told])

    for state, must, aim in COMPACT:
        pairs = [[found("gdn", mode, 4, 3, state, 128, kind) for mode in ("compact", "native")] for kind in IMPLEMENTATIONS]
        row("compact over native, W = 4, accept 3", state, must, aim, pairs)
    steps = [step[:4] for step in STEPS if step[4] == 128] + [("compact", 4, 3, "fp32"), ("compact", 4, 3, "bf16")]
    for step in steps:
        pairs = [[found(rule, *step, 128, kind) for rule in ("kda", "gdn")] for kind in IMPLEMENTATIONS]
        row(f"KDA over GDN, {name_of(*step[:3])}", step[3], *KDA[step[3]], pairs)
    for step in steps:
        for kind, base, must, aim in OTHERS:
            pair = [found("gdn", *step, 128, kind), found("gdn", *step, 128, base)]
            pairs = [pair if kind == column else [None, None] for column in IMPLEMENTATIONS]
            row(f"{kind} over {base}, {name_of(*step[:3])}", step[3], must, aim, pairs)
    return ["ratio", "state", "must / aim", *IMPLEMENTATIONS], rows
