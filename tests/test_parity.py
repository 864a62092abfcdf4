"""`python -m benchmarks parity` on a CPU: no element differs, and a planted order of one product is caught.

R36, R75, R79, R85, R86, N5, N12: every verb over random rounds, acceptance and folds; dead memory and padding hold NaN. The
inputs are chosen so that a few cells meet every rule, mode and state dtype: compiling interpret mode takes the time.
"""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import main

CELLS = [
    ("twins", "gdn", "replay", "fp32", 2),
    ("twins", "kda", "replay", "bf16", 1),
    ("twins", "gdn", "native", "bf16", 1),
    ("twins", "kda", "native", "fp32", 3),
    ("twins", "gdn", "compact", "bf16", 3),
    ("twins", "kda", "compact", "fp32", 2),
    ("launch", "gdn", "native", "fp32", 2),
    ("row", "gdn", "replay", "bf16", 2),
    ("row", "kda", "native", "bf16", 1),
    ("checkpoint", "gdn", "replay", "fp32", 2),
]


def parity(capsys, check: str, rule: str, mode: str, ssm: str, width: int, *more: str) -> tuple[int, dict]:
    """Exit status and JSON of one cell, Pallas against PyTorch eager."""
    options = ["--check", check, "--rule", rule, "--mode", mode, "--state-dtype", ssm, "--width", str(width), "--json"]
    code = main(["parity", *options, "--implementation", "pallas", "--rounds", "3", "--history", "4", *more])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: "-".join(map(str, c)))
def test_R75_no_element_differs(capsys, cell):
    """R75: exit status 0, every array was compared and no element of it differs."""
    code, data = parity(capsys, *cell)
    (result,) = data["cells"]
    assert code == 0 and data["ok"], (result["error"], result["differing"])
    assert {"output"} <= set(result["compared"]) and all(result["compared"].values())
    if cell[0] == "twins":
        assert {"state", "conv", "accepted", "page state", "page conv", "snapshot state"} <= set(result["compared"])
        assert cell[2] != "replay" or {"history d", "history cursor"} <= set(result["compared"])


def test_R75_a_planted_order_of_one_product_is_caught(capsys):
    """Planted fault: v * beta - (S k^) * beta instead of (v - S k^) * beta, in the Pallas kernels only."""
    code, data = parity(capsys, "twins", "gdn", "native", "fp32", 1, "--plant")
    (result,) = data["cells"]
    assert code == 1 and not data["ok"] and not result["error"]
    assert result["differing"]["state"]["eager-pallas"] and not result["differing"]["conv"]["eager-pallas"]
