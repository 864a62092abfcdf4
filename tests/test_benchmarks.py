"""The benchmark commands on a CPU: help, refused arguments, tables, and the cheap paths; no times are judged here."""

from __future__ import annotations

import importlib
import json

import pytest

from benchmarks import cycle, device_time, parity, plots, record, targets
from benchmarks.__main__ import COMMANDS, main

GPU_ONLY = ("cycle", "kernel")


def run(capsys, *arguments: str) -> tuple[int, dict]:
    """Exit status and JSON of a command."""
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(capsys, command):
    """--help prints the module's docstring and every option with a word of help; the three functions exist."""
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    module = importlib.import_module(f"benchmarks.{command}")
    assert stopped.value.code == 0 and "--json" in text and "--out" in text
    assert " ".join(module.__doc__.split())[:60] in text and callable(module.run) and callable(module.table)


@pytest.mark.parametrize(
    "arguments,match",
    [
        (["parity", "--shape", "2/2"], "H/KH/HV:B"),
        (["parity", "--dims", "128"], "KxV"),
        (["parity", "--rule", "rwkv"], "invalid choice"),
        (["compile", "--bucket", "1"], "at least 2"),
        (["cycle", "--batch", "0"], "at least 1"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else x,
)
def test_bad_arguments_name_what_is_allowed(capsys, arguments, match):
    """A value that argparse can judge: exit status 2 and what is allowed."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2 and match in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments,match",
    [
        (["parity", "--mode", "compact", "--width", "1"], "no cell"),
        (["parity", "--mode", "replay", "--history", "5", "--width", "1"], "history=5"),
        (["parity", "--shape", "2/3/4:1", "--rule", "gdn"], "k_heads=3"),
        (["compile", "--mode", "compact", "--width", "1"], "at least 2"),
        *(([command], "NVIDIA GPU") for command in GPU_ONLY),
        (["peers"], "fla-core|NVIDIA GPU"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else x,
)
def test_what_cannot_run_is_refused_in_one_line(capsys, arguments, match):
    """Exit status 2, one line on standard error, nothing on standard output."""
    import re

    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out and re.search(match, err.splitlines()[-1]) and "Traceback" not in err


def test_R33_first_seen_counts_compile_nothing(capsys):
    """R33, R35: both ways of a round, every first count of a warmed bucket without a compilation; entering compiles."""
    options = [
        "--bucket",
        "16",
        "--dim",
        "16",
        "--heads",
        "2",
        "--rule",
        "gdn",
        "--width",
        "2",
        "--counts",
        "6",
        "--steady",
        "1",
    ]
    _, data = run(capsys, "compile", *options)
    assert [c["way"] for c in data["cells"]] == ["stages", "whole"]
    for c in data["cells"]:
        assert c["compilations"] == 0 and len(c["first_ms"]) == len(c["counts"]) >= 4
        assert c["crossing_ms"] > 5 * c["steady_ms"] and c["ratio"] == max(c["first_ms"]) / c["steady_ms"]


def test_R101_bytes_agree_with_the_spec(capsys):
    """R101: the table is `state_bytes`, and replay is smaller than native from W = 2 on."""
    code, data = run(capsys, "bytes", "--rule", "gdn", "--width", "4", "--history", "16")
    by_mode = {(c["mode"], c["ssm"]): c["bytes"]["total"] for c in data["cells"]}
    assert code == 0 and by_mode["native", "fp32"] > 2 * by_mode["replay", "fp32"] > 2 * by_mode["compact", "fp32"]


def test_R38_export_takes_no_copy_of_the_batch(capsys):
    """R38: at most 1,024 bytes besides the pages, whatever the batch; a small geometry of all modes."""
    code, data = run(capsys, "export", "--layers", "2", "--heads", "2", "--dim", "16", "--requests", "3", "--threads", "1")
    assert code == 0 and {c["mode"] for c in data["cells"]} == {"native", "compact", "replay"}
    assert all(c["temp_bytes"] <= data["limit_bytes"] and c["pages_in_place"] for c in data["cells"])


# ------------------------------------------------------------------------------------------------ tables and pictures


def cycle_data() -> dict:
    """A recorded cycle with made-up figures."""
    found = dict(us=10.0, spread=[9.0, 12.0], samples=[9.0, 10.0, 12.0], parts={}, other=0.0, share=0.5, us_per_token=0.4)
    cells = [
        dict(rule="gdn", mode=mode, width=w, ssm="fp32", accepted=max(1, w - 1), batch=batch, floor_us=5.0, errors={},
             implementations={"pallas": found} | ({"jaxtriton": found | {"us": 8.0}} if w > 1 else {}))
        for mode, w in (("native", 1), ("replay", 4)) for batch in (1, 8)
    ]  # fmt: skip
    return dict(name="cycle", device="nvidia-test", cells=cells, ok=True)


def test_tables_have_a_column_for_every_head():
    """Every row has as many entries as there are heads, absent implementations included."""
    data = cycle_data()
    one = parity.Cell("twins", "gdn", "replay", 2, 8, "fp32", "bf16", 1, 1, 2, 64, 16, 3)
    good = vars(one) | {"differing": {"state": {"eager-pallas": 0}}, "compared": {"state": 5}, "error": None, "seconds": 1.0}
    bad = good | {"differing": {"state": {"eager-pallas": 2, "eager-triton": 0}}}
    failed = good | {"differing": {}, "compared": {}, "error": "Traceback\nValueError: no"}
    cells = {"cells": [good, bad, failed]}
    for c in data["cells"]:
        c["batch"] *= 128 if c["batch"] == 1 else 1
    forms = (cycle.table, cycle.brief, cycle.batches, cycle.parts, cycle.absolute, cycle.ratios)
    for heads, rows in (*(form(data) for form in forms), parity.table(cells), parity.brief(cells)):
        assert rows and all(len(row) == len(heads) for row in rows)
    told = [row[-1] for row in parity.table(cells)[1]]
    assert told == ["0 in 1 arrays", "state eager-pallas: 2", "ValueError: no"]
    assert parity.brief(cells)[1][0][-1] == "2 (1 cells failed)"


def test_targets_say_which_bound_is_kept():
    """A value is at its aim, within its bound or neither; a step that was not measured is a dash."""
    data = cycle_data()
    for c in data["cells"]:
        c["batch"] = 128 if c["batch"] == 1 else 8
    rows = cycle.absolute(data)[1]
    assert rows[0][:4] == ["native decode", "fp32", "128", "145 / 134"] and rows[0][4:] == ["10.0 (aim)", "-", "-"]
    told = [targets.verdict(x, 2.0, 1.0, 1) for x in (1.0, 1.5, 2.5)]
    assert told == ["1.0 (aim)", "1.5 (met)", "2.5 (missed)"]
    assert ["jaxtriton over triton, native decode", "fp32", "1.02 / 1.00", "-", "-", "-"] in cycle.ratios(data)[1]


def test_report_draws_what_was_recorded(tmp_path):
    """A picture for every recorded cycle, the same bytes each time."""
    (tmp_path / "nvidia-test").mkdir()
    (tmp_path / "nvidia-test" / "cycle.json").write_text(json.dumps(cycle_data()))
    (drawn,) = plots.draw_all(tmp_path, tmp_path)
    first = drawn.read_bytes()
    assert drawn.name == "nvidia-test-cycle.svg" and b"replay, W = 4" in first
    plots.draw_all(tmp_path, tmp_path)
    assert drawn.read_bytes() == first


def test_recorded_results_have_tables():
    """Every form of every recorded result has as many entries in a row as there are heads."""
    for path in sorted(record.RESULTS.glob("*/*.json")):
        data = json.loads(path.read_text())
        if data.get("name") not in COMMANDS:
            continue
        module = importlib.import_module(f"benchmarks.{data['name']}")
        for form in ("table", "brief", "batches", "parts", "absolute", "ratios"):
            if hasattr(module, form):
                heads, rows = getattr(module, form)(data)
                assert rows and all(len(row) == len(heads) for row in rows), (path, form)


def test_record_names_command_versions_and_device(tmp_path, monkeypatch):
    """A result file says how it was made; the folder it was written to is no part of that."""
    monkeypatch.setattr("sys.argv", ["benchmarks", "bytes", "--out", str(tmp_path)])
    data = json.loads(record.write("bytes", {"ok": True}, tmp_path).read_text())
    assert data["command"] == "python -m benchmarks bytes --out DIR" and data["device"] == "cpu"
    assert "jax" in data["versions"] and data["ok"] and "commit" in data


def test_least_bytes_of_a_round():
    """B = 128, W = 4: native moves 5 states a request, compact 3, replay 1 and its share of a fold."""
    from benchmarks.pool import make_spec

    state = 32 * 128 * 128 * 4
    moved = {m: device_time.least_bytes(make_spec("gdn", m, 4, "fp32", 1, 16), 128, 3) for m in ("native", "compact", "replay")}
    states = {mode: found["round"] / (128 * state) for mode, found in moved.items()}
    assert 5 < states["native"] < 5.1 and 3 < states["compact"] < 3.2 and 1.4 < states["replay"] < 1.7
    assert device_time.live_counts(make_spec("gdn", "replay", 4, "fp32", 1, 16), 3) == [3, 6, 9, 12, 15]


def test_kernel_names_of_all_packages_have_labels():
    """Pallas names its kernels, Triton by the function's name; what is neither is index arithmetic."""
    names = {"ssm_native_w4": "native", "_native_kernel": "native", "ssm_advance": "advance", "_gdn_kernel": "coefficients",
             "replay_precompute_coefficients_kda_w4": "coefficients", "replay_outputs_gdn_w1": "outputs",
             "void at::native::elementwise_kernel": "other", "loop_fusion_2": "other"}  # fmt: skip
    assert {name: device_time.label(name) for name in names} == names
