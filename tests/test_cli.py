"""The command line: exact bytes without jax, one JSON object, text as it comes, one clear line for what cannot be served."""

import io
import json
import subprocess
import sys

import numpy as np
import pytest

from jax_ssm.cli import main
from jax_ssm.models import ModelConfig, save_params
from jax_ssm.models.qwen3_5 import map_shapes, param_shapes

CONFIG = ModelConfig(
    vocab_size=32, hidden_size=32, intermediate_size=32, layer_types=("linear_attention", "full_attention"),
    num_attention_heads=2, num_key_value_heads=1, head_dim=16, linear_num_key_heads=1, linear_num_value_heads=2,
    linear_key_head_dim=16, linear_value_head_dim=16, rotary_dim=8, max_position_embeddings=256,
)  # fmt: skip
LETTERS = "abcdefghijklmnopqrstuvwxyz .,\u00e4\n?"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    """A tiny checkpoint directory without MTP head; one token per letter."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    root = tmp_path_factory.mktemp("tiny")
    rng = np.random.default_rng(1)
    save_params(root, CONFIG, map_shapes(lambda _, shape: rng.normal(0, 0.2, shape).astype(np.float32), param_shapes(CONFIG)))
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(root / "tokenizer.json"))
    return str(root)


@pytest.fixture(autouse=True)
def no_cache_at_home(monkeypatch, tmp_path):
    """Tests keep no executables in the home folder."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))


KDA = "--rule kda --heads 1 --k-dim 128 --v-dim 128 --act bf16 --state bf16 --width 3"


@pytest.mark.parametrize(
    "arguments,allocated,seed",
    [
        (f"{KDA} --mode native", 98304, 98304),
        (f"{KDA} --mode compact", 35852, 35852),
        (f"{KDA} --mode replay --history 16", 82056, 98440),
        (f"{KDA} --mode replay --history 32", 131336, 164104),
        (f"{KDA} --mode replay --history 64", 229896, 295432),
    ],
)
def test_R13_R14_R15_bytes_are_exact(arguments, allocated, seed, capsys):
    assert main(["bytes", *arguments.split(), "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert (result["allocated"], result["seed_layout"]) == (allocated, seed)
    assert (result["allocated_per_layer_request_head"], result["seed_layout_per_layer_request_head"]) == (allocated, seed)


def test_R16_bytes_of_a_rank_with_many_layers_heads_and_requests(capsys):
    arguments = "--rule gdn --q-heads 4 --k-heads 4 --v-heads 12 --layers 48 --width 4 --history 8 --state bf16 --slots 5"
    assert main(["bytes", *arguments.split(), "--projection", "precompute", "--json"]) == 0
    native, compact, replay = json.loads(capsys.readouterr().out)["results"]
    assert native["allocated"] == 5 * 72 * 2**20
    assert round(replay["seed_layout"] / 5 / 2**20, 2) == 24.07
    assert native["allocated_per_layer_request_head"] == 4 * 128 * 128 * 2


def test_bytes_table_compares_all_modes_and_says_what_is_not_legal(capsys):
    assert main(["bytes", "--width", "1"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("native", "compact", "replay", "seed layout", "98,568", "114,952"))
    assert "compact: width=1 is not allowed: at least 2" in out


def test_bytes_and_help_answer_without_importing_jax():
    code = "import sys; from jax_ssm.cli import main; main(['bytes', '--json']); assert 'jax' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).returncode == 0


def test_generate_json_is_one_object_with_every_promised_field(checkpoint, tmp_path, capsys):
    (tmp_path / "prompt.txt").write_text("the cat sat. the cat sat. the c\n")
    arguments = ["--model", checkpoint, "--prompt", "hello", "--prompt", f"@{tmp_path}/prompt.txt", "--state", "replay"]
    arguments += ["--width", "3", "--history", "8", "--max-new-tokens", "12", "--seed", "5", "--temperature", "0.5", "--json"]
    assert main(["generate", *arguments]) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert captured.out.count("\n") == 1 and "compiling" in captured.err
    assert set(record) == {"results", "state_bytes", "compilations", "timings", "settings", "versions"}
    assert [len(r["prompt_ids"]) for r in record["results"]] == [5, 31]
    for r in record["results"]:
        assert len(r["token_ids"]) == 12 and sum(r["accepted"]) == 11 and r["finish"] == "length"
        assert r["text"] == "".join(LETTERS[i] for i in r["token_ids"])
    b = record["state_bytes"]
    assert b["total"] == sum(v for k, v in b.items() if k != "total") and b["cursor"] == 2 * 8
    assert record["compilations"]["total"] == 3 and record["compilations"]["stray"] == 0
    s = record["settings"]
    assert (s["mode"], s["width"], s["history"], s["seed"]) == ("replay", 3, 8, 5)
    assert (s["drafts"], s["drafts_reason"]) == ("lookup", "the checkpoint has no MTP weights")
    assert {"jax", "jax_ssm", "numpy", "python", "device"} <= set(record["versions"])


def test_generate_streams_the_text_and_ends_with_a_table(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("abc abc abc\n"))
    arguments = ["--model", checkpoint, "--prompt", "-", "--max-new-tokens", "9", "--top-p", "0.5", "--history", "8"]
    assert main(["generate", *arguments, "--strict"]) == 0
    captured = capsys.readouterr()
    assert all(
        w in captured.out for w in ("tokens/s", "accepted a round", "state bytes", "allocate, prefill, rounds", "rounds")
    )
    assert "--top-p has no effect" in captured.err and "--history has no effect" in captured.err


def test_demo_shows_identical_tokens_and_three_state_sizes(checkpoint, capsys):
    assert main(["demo", "--model", checkpoint, "--prompt", "abc abc", "--max-new-tokens", "12", "--width", "2"]) == 0
    out = capsys.readouterr().out
    assert "tokens identical in all modes: yes" in out
    assert all(mode in out for mode in ("native", "compact", "replay"))


def test_describe_names_mode_backend_dtype_and_reason(capsys):
    assert main(["describe", "--state", "replay", "--width", "2"]) == 0
    out = capsys.readouterr().out
    assert all(
        word in out for word in ("replay, width 2", "main.gdn: xla on cpu", "fp32 recurrent state", "mtp (the checkpoint")
    )


ERRORS = [
    (["generate"], "no prompt"),
    (["generate", "--prompt", ""], "prompts[0] is empty"),
    (["generate", "--prompt", "@no/such/file"], "--prompt @no/such/file: there is no such file"),
    (["generate", "--prompt", "x", "--model", "no/such/dir"], "model='no/such/dir' is not a directory"),
    (["generate", "--prompt", "x", "--temperature", "-1"], "temperature=-1.0 is not allowed"),
    (["generate", "--prompt", "x", "--top-p", "0"], "top_p=0.0 is not allowed"),
    (["generate", "--prompt", "x", "--seed", "-3"], "seed=-3 is not allowed"),
    (["generate", "--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens=0 is not allowed"),
    (["generate", "--prompt", "x", "--max-new-tokens", "5000"], "max_len=4096"),
    (["generate", "--prompt", "x", "--state", "compact", "--width", "1"], "width=1 is not allowed"),
    (["generate", "--prompt", "x", "--width", "17"], "width=17 is not allowed"),
    (["generate", "--prompt", "x", "--state", "replay", "--history", "12"], "history=12 is not allowed"),
    (["generate", "--prompt", "x", "--state", "replay", "--history", "4", "--width", "8"], "smallest legal value is 8"),
    (["generate", "--prompt", "x", "--drafts", "mtp", "--width", "1"], "width=1 is not allowed"),
    (["generate", "--prompt", "x", "--implementation", "triton"], "implementation='triton' cannot run"),
    (["bytes", "--mode", "compact", "--width", "1"], "width=1 is not allowed"),
    (["bytes", "--rule", "kda", "--k-heads", "1", "--v-heads", "2"], "equal for rule 'kda'"),
]


@pytest.mark.parametrize("arguments,message", ERRORS, ids=[" ".join(a) for a, _ in ERRORS])
def test_U1_U9_bad_requests_end_with_code_2_and_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    line = captured.err.strip().splitlines()[-1]
    assert line.startswith("jax-ssm: error: ") and message in line


def test_prompt_files_that_are_no_text_are_refused(tmp_path, capsys):
    (tmp_path / "binary").write_bytes(b"ok\xff")
    for path, message in ((tmp_path, "that is a folder"), (tmp_path / "binary", "not UTF-8 text")):
        assert main(["generate", "--prompt", f"@{path}"]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["generate", "--state", "paged"], ["bytes", "--layers", "0"], ["nonsense"], []])
def test_unknown_values_of_options_end_with_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2 and "error:" in capsys.readouterr().err
