"""The teacher-forced model agrees with transformers on checkpoints that transformers wrote; the MTP head with NumPy."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jax_ssm.attention import Bucket, build_batch
from jax_ssm.engine.load import DEMO
from jax_ssm.models import forward_sequence, hybrid, load_model, load_params, mtp_sequence, save_params
from jax_ssm.models.qwen3_5 import init_params

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)  # tiny matrices: threads only wait for each other

# these tests compile much and compute little
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
forward = jit(forward_sequence, static_argnums=0)
mtp_forward = jit(mtp_sequence, static_argnums=0)

TOKENS = np.random.default_rng(0).integers(0, 256, (2, 41))
BASE = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]},
    eos_token_id=7,
)
LAYOUTS = {
    "HV=KH, untied": {},
    "HV=2KH, tied": dict(linear_num_value_heads=4, tie_word_embeddings=True),
    "K!=V, half rotary, every second layer full": dict(
        linear_key_head_dim=8,
        linear_value_head_dim=24,
        linear_num_value_heads=6,
        num_key_value_heads=1,
        layer_types=["linear_attention", "full_attention"] * 2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
    ),
}


def hf_model(**fields):
    """A random transformers model, with every norm and gate away from its neutral start."""
    torch.manual_seed(3)
    model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**(BASE | fields))).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or "dt_bias" in name:
                p.add_(0.3 * torch.randn_like(p))
            elif p.ndim >= 2 and "conv1d" not in name:
                p.mul_(4.0)
    return model


def hf_logits(model):
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.float().numpy()


def assert_close(ours, theirs, rtol=1e-4):
    scale = np.abs(theirs).max()
    assert np.abs(np.asarray(ours) - theirs).max() <= rtol * scale, (np.abs(np.asarray(ours) - theirs).max(), scale)


def add_mtp(path):
    """Add the tensors of an MTP head, which transformers does not write, and say so in config.json."""
    tensors = load_file(path / "model.safetensors")
    rng = np.random.default_rng(5)
    for name, x in list(tensors.items()):
        full = "model.layers.3."
        if name.startswith(full):
            tensors["mtp.layers.0." + name.removeprefix(full)] = (rng.normal(size=x.shape) * 0.1).astype(x.dtype)
    for name, shape in (("fc", (64, 128)), ("norm", (64,)), ("pre_fc_norm_embedding", (64,)), ("pre_fc_norm_hidden", (64,))):
        tensors[f"mtp.{name}.weight"] = (rng.normal(size=shape) * 0.2).astype(np.float32)
    save_file(tensors, path / "model.safetensors")
    edit_config(path, mtp_num_hidden_layers=1)


def edit_config(path, **fields):
    raw = json.loads((path / "config.json").read_text()) | fields
    (path / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_equal_transformers_fp32(tmp_path, layout):
    model = hf_model(**LAYOUTS[layout])
    model.save_pretrained(tmp_path)
    config, params = load_model(tmp_path)
    assert config.eos_token_ids == (7,) and config.dtype == "fp32"
    _, logits = forward(config, params, TOKENS)
    theirs = hf_logits(model)
    assert_close(logits, theirs)

    # the same comparison sees one wrong norm: (1 + weight) taken as weight
    params["layers"][1]["input_layernorm"] = params["layers"][1]["input_layernorm"] - 1.0
    _, wrong = forward(config, params, TOKENS)
    assert np.abs(np.asarray(wrong) - theirs).max() > 1e-2 * np.abs(theirs).max()


def test_multimodal_layout_and_shards_load_the_same_model(tmp_path):
    """`model.language_model.*` names, `text_config`, a vision tower to leave out, several shards, an MTP head."""
    hf_model(**LAYOUTS["HV=2KH, tied"]).save_pretrained(tmp_path / "text")
    add_mtp(tmp_path / "text")
    config, params = load_model(tmp_path / "text")

    tensors = load_file(tmp_path / "text" / "model.safetensors")
    renamed = {n.replace("model.", "model.language_model.", 1) if n.startswith("model.") else n: x for n, x in tensors.items()}
    renamed["model.visual.patch_embed.weight"] = np.zeros((3, 3), np.float32)
    root = tmp_path / "multimodal"
    root.mkdir()
    names = sorted(renamed)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({n: renamed[n] for n in part}, root / file)
    index = {"weight_map": {n: file for file, part in shards.items() for n in part}}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    text = json.loads((tmp_path / "text" / "config.json").read_text())
    outer = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": {},
    }
    (root / "config.json").write_text(json.dumps(outer))

    config2, params2 = load_model(root)
    assert config2 == config and config.mtp_num_hidden_layers == 1
    assert jax.tree.structure(params) == jax.tree.structure(params2)
    assert all(bool((a == b).all()) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(params2), strict=True))


def test_bf16_checkpoint_loads_bit_for_bit_and_stays_close(tmp_path):
    model = hf_model().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    config, params = load_model(tmp_path)
    weight = params["layers"][0]["mlp"]["up_proj"]
    assert config.dtype == "bf16" and weight.dtype == jnp.bfloat16
    assert params["layers"][0]["linear_attn"]["A_log"].dtype == jnp.float32
    theirs = model.model.layers[0].mlp.up_proj.weight.detach().float().numpy()
    np.testing.assert_array_equal(np.asarray(weight, np.float32), theirs)

    _, wide = forward(config, load_params(tmp_path, config, "fp32"), TOKENS)
    _, narrow = forward(config, params, TOKENS)
    exact = hf_logits(model.float())
    assert_close(wide, exact)
    assert np.sqrt(np.mean((np.asarray(narrow) - exact) ** 2)) < 0.05 * np.sqrt(np.mean(exact**2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_reads_what_save_params_writes(tmp_path, dtype):
    """The trainer's output: saved here, read by transformers, same logits; and read back here, same bits."""
    hf_model(tie_word_embeddings=True).save_pretrained(tmp_path / "seed")
    add_mtp(tmp_path / "seed")
    config, _ = load_model(tmp_path / "seed")
    params = init_params(config, jax.random.key(1), dtype)
    save_params(tmp_path / "out", config, params)
    again, back = load_model(tmp_path / "out")
    assert again.dtype == {"float32": "fp32", "bfloat16": "bf16"}[dtype]
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(back), strict=True):
        assert a.dtype == b.dtype and bool((a == b).all())
    model = transformers.Qwen3_5ForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    _, logits = forward(config, load_params(tmp_path / "out", config, "fp32"), TOKENS)
    assert_close(logits, hf_logits(model))


# --- the MTP head, restated in NumPy ------------------------------------------------------------------------------


def np_norm(x, w):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * (1 + w)


def np_silu(x):
    return x / (1 + np.exp(-x))


def np_rope(x, theta, dim):
    n = x.shape[0]
    angle = np.arange(n)[:, None] * theta ** (-np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., : dim // 2], x[..., dim // 2 : dim]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., dim:]], -1)


def np_mtp(w, embed, hidden, next_tokens, heads, kv, dim, theta, rotary):
    """One sequence, float64, straight from the published names."""
    e = np_norm(embed[next_tokens], w["mtp.pre_fc_norm_embedding.weight"])
    h = np_norm(hidden, w["mtp.pre_fc_norm_hidden.weight"])
    x = np.concatenate([e, h], -1) @ w["mtp.fc.weight"].T
    p = {name.removeprefix("mtp.layers.0."): value for name, value in w.items()}
    y = np_norm(x, p["input_layernorm.weight"])
    qg = (y @ p["self_attn.q_proj.weight"].T).reshape(len(x), heads, 2 * dim)
    q, gate = np_norm(qg[..., :dim], p["self_attn.q_norm.weight"]), qg[..., dim:]
    k = np_norm((y @ p["self_attn.k_proj.weight"].T).reshape(len(x), kv, dim), p["self_attn.k_norm.weight"])
    v = (y @ p["self_attn.v_proj.weight"].T).reshape(len(x), kv, dim)
    q, k = np_rope(q, theta, rotary), np_rope(k, theta, rotary)
    out = np.zeros((len(x), heads, dim))
    for t in range(len(x)):
        for head in range(heads):
            s = k[: t + 1, head // (heads // kv)] @ q[t, head] / np.sqrt(dim)
            s = np.exp(s - s.max())
            out[t, head] = (s / s.sum()) @ v[: t + 1, head // (heads // kv)]
    x = x + (out / (1 + np.exp(-gate))).reshape(len(x), -1) @ p["self_attn.o_proj.weight"].T
    y = np_norm(x, p["post_attention_layernorm.weight"])
    inner = np_silu(y @ p["mlp.gate_proj.weight"].T) * (y @ p["mlp.up_proj.weight"].T)
    return np_norm(x + inner @ p["mlp.down_proj.weight"].T, w["mtp.norm.weight"])


def test_mtp_head_equals_numpy(tmp_path):
    """R96: the head reads the hidden state after the final norm, embedding first in `fc`, and shares embedding and head."""
    hf_model(tie_word_embeddings=True).save_pretrained(tmp_path)
    add_mtp(tmp_path)
    config, params = load_model(tmp_path)
    hidden, _ = forward(config, params, TOKENS)
    out, logits = mtp_forward(config, params, hidden[:, :-1], TOKENS[:, 1:])
    w = {n: x.astype(np.float64) for n, x in load_file(tmp_path / "model.safetensors").items()}
    embed = w["model.embed_tokens.weight"]
    for row in range(2):
        expected = np_mtp(w, embed, np.asarray(hidden[row, :-1], np.float64), TOKENS[row, 1:], 4, 2, 16, 1e4, 4)
        assert_close(out[row], expected)
        assert_close(logits[row], expected @ embed.T)


# --- greedy text --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """(checkpoint directory, 200 greedy tokens of transformers after the first 20 of TOKENS)."""
    root, model = tmp_path_factory.mktemp("greedy"), hf_model(**LAYOUTS["HV=2KH, tied"])
    model.save_pretrained(root)
    greedy = dict(max_new_tokens=200, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        theirs = model.generate(torch.tensor(TOKENS[:1, :20]), **greedy)[0, 20:].numpy()
    assert len(set(theirs.tolist())) > 10  # a text, not one token for ever
    return root, theirs


@pytest.mark.parametrize(("mode", "width"), [("native", 1), ("replay", 3)])
def test_greedy_tokens_equal_transformers_generate(generated, mode, width):
    """200 tokens, fp32, through the jitted verify path; with drafts that are sometimes right, so rounds roll back."""
    root, theirs = generated
    prompt, n = TOKENS[:1, :20], len(theirs)
    config, params = load_model(root)
    specs = hybrid.model_specs(config, slots=2, max_len=256, width=width, mode=mode, history=8, act_dtype="fp32")
    bucket = Bucket(1, width, fixed=True)
    ids, offsets = jnp.zeros(width, jnp.int32), jnp.arange(width)

    @partial(jit, donate_argnums=0)
    def round_(state, window):
        ctxs = hybrid.prepare_contexts(specs, hybrid.allocate_contexts(specs, bucket))
        batch = build_batch(specs.ssm, bucket, ids, b_mtp_index=offsets, b_ready_cache_len=state.kv.length)
        state, ctxs = hybrid.update_contexts(specs, ctxs, state, batch)
        state, _, logits = hybrid.verify(specs, params, ctxs, state, window, batch.positions)
        chosen = jnp.argmax(logits, -1)
        accepted = 1 + jnp.sum(jnp.cumprod(chosen[:-1] == window[1:]))
        return hybrid.accept_model(specs, ctxs, state, accepted[None]), chosen, accepted

    state, _, logits = jit(hybrid.prefill_chunk, static_argnums=0)(
        specs, params, hybrid.init_model_state(specs), np.array([0]), prompt, np.array([20])
    )
    ours, lengths, rng = [int(jnp.argmax(logits))], [], np.random.default_rng(0)
    while len(ours) < n:
        drafts = np.append(theirs[len(ours) : len(ours) + width - 1], [0] * width)[: width - 1]
        drafts = np.where(rng.random(width - 1) < 0.6, drafts, rng.integers(0, 256, width - 1))
        state, chosen, accepted = round_(state, np.append(ours[-1], drafts).astype(np.int32))
        ours += np.asarray(chosen)[: int(accepted)].tolist()
        lengths.append(int(accepted))
    np.testing.assert_array_equal(ours[:n], theirs)
    assert set(lengths) == set(range(1, width + 1))


def test_the_embedded_model_equals_transformers():
    """Logits of a text, and 200 greedy tokens of transformers, each of which is our choice after the tokens before it."""
    model = transformers.Qwen3_5ForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    prompt = tokenizer("class Node:\n    def __init__(self, value):\n")["input_ids"]
    with torch.no_grad():
        text = model.generate(torch.tensor([prompt]), max_new_tokens=200, do_sample=False, eos_token_id=None, pad_token_id=0)
        theirs = model(text).logits.numpy()
    config, params = load_model(DEMO, "fp32")
    _, logits = forward(config, params, text.numpy())
    assert_close(logits, theirs)
    np.testing.assert_array_equal(np.argmax(logits, -1)[0, len(prompt) - 1 : -1], text[0, len(prompt) :].numpy())
