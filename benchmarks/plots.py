"""Pictures of recorded results, as SVG: what a table of many batches does not show at a glance."""

from __future__ import annotations

import json
from pathlib import Path

JAX = ("pallas", "jaxtriton")
COLOURS = {"native": "#1b6ca8", "compact": "#c8553d", "replay": "#3a7d44", "precompute": "#8a5a9e"}
STYLES = {1: "-", 2: ":", 4: "--", 8: "-."}


def draw_all(results: Path, docs: Path) -> list[Path]:
    """Draw what there is: docs/<device>-cycle.svg for every recorded cycle. Returns the paths."""
    drawn = []
    for path in sorted(results.glob("*/cycle.json")):
        out = docs / f"{path.parent.name}-cycle.svg"
        draw_cycle(json.loads(path.read_text()), out)
        drawn.append(out)
    return drawn


def draw_cycle(data: dict, out: Path) -> None:
    """Microseconds a token and layer over the batch, a panel a rule and state dtype, a line a mode and width.

    A point is the faster of the implementations that JAX calls. Colours tell modes, dashes tell widths.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "cycle", "svg.fonttype": "none"}  # the same picture gets the same bytes
    import matplotlib.pyplot as plt

    cells = [c for c in data["cells"] if any(kind in c["implementations"] for kind in JAX)]
    panels = sorted({(c["rule"], c["ssm"]) for c in cells}, key=lambda x: (x[0], x[1] != "fp32"))
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns) if panels else 0
    figure, axes = plt.subplots(rows, columns, figsize=(4.6 * columns, 3.4 * rows), squeeze=False, sharex=True)
    for axis, (rule, ssm) in zip(axes.flat, panels, strict=False):
        lines: dict[tuple, list] = {}
        for c in (c for c in cells if (c["rule"], c["ssm"]) == (rule, ssm)):
            best = min(c["implementations"][kind]["us_per_token"] for kind in JAX if kind in c["implementations"])
            lines.setdefault((c["mode"], c["width"], c["accepted"]), []).append((c["batch"], best))
        for (mode, width, accepted), points in sorted(lines.items(), key=lambda x: (x[0][1], list(COLOURS).index(x[0][0]))):
            label = f"{mode}, W = {width}" + (f", {accepted} accepted" if width > 1 else "")
            axis.loglog(
                *zip(*sorted(points), strict=True), STYLES.get(width, "-"), color=COLOURS[mode], marker=".", label=label
            )
        batches = sorted({c["batch"] for c in cells})
        axis.set_xticks(batches, [str(b) for b in batches], minor=False)
        low, high = axis.get_ylim()
        ticks = [y for y in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if low <= y <= high]
        axis.set_yticks(ticks, [f"{y:g}" for y in ticks])
        axis.minorticks_off()
        axis.set_title(f"{rule.upper()}, {ssm} state", fontsize=10)
        axis.set_xlabel("requests")
        axis.set_ylabel("µs a token and layer")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.suptitle(f"{data['device']}: device time of a whole round, folds and commits included", fontsize=10)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})
    plt.close(figure)
