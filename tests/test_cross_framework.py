"""jax_ssm (XLA) against torch_ref: same verbs, same programs; integers and windows exact, numbers by requirements N.

Equal bits between the exact executors are tested with the kernels; the XLA path is compared by tolerance (R78).
"""

import inspect
from functools import partial

import jax
import ml_dtypes
import numpy as np
import pytest
from fixtures import PROMPT, draw_params, draw_tokens, fs_spec, layer_inputs, named_leaves, pad_to, verbs
from oracle import BF16

import jax_ssm as ssm
from jax_ssm import gates

torch = pytest.importorskip("torch")
import torch_ref as ref  # noqa: E402
from torch_ref import gates as ref_gates  # noqa: E402
from torch_ref.spec import SSMSpec as RefSpec  # noqa: E402

STATE = {"fp32": (2e-5, 2e-4), "bf16": (2e-3, 2.0**-7)}  # atol, rtol
OUTPUT = {"fp32": (2e-6, 2e-5), "bf16": (6e-3, 2e-2)}


def to_torch(x):
    """numpy to torch with the same bits."""
    x = np.array(x)
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == BF16 else torch.from_numpy(x)


def to_numpy(x):
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def torch_inputs(inputs, row):
    """jax LinearInputs of all layers as torch_ref's inputs of one layer."""
    return ref.LinearInputs(**{name: to_torch(x[row]) for name, x in vars(inputs).items()})


class Pair:
    """The same program in both packages, compared after every verb."""

    def __init__(self, spec, seed=0):
        self.spec, self.other, self.rng = spec, RefSpec(**vars(spec)), np.random.default_rng(seed)
        self.params, self.verbs = draw_params(spec, "mild", seed), verbs(spec)
        self.weights = (self.params.weight, self.params.bias)
        self.state, self.ref = ssm.init_state(spec), ref.init_state(self.other)
        self.tolerance = STATE[spec.ssm_dtype], OUTPUT[min(spec.act_dtype, spec.ssm_dtype)]

    def padded(self, values):
        """Slots or lengths padded with HOLD (as a length: out of range, and not looked at) to the fixed size."""
        return pad_to(np.array(values, np.int32), self.spec.hold, self.spec.hold)

    def near(self, a, b, tolerance, name):
        a, b = np.asarray(a).astype(np.float64), to_numpy(b).astype(np.float64)
        np.testing.assert_allclose(a, b, atol=tolerance[0], rtol=tolerance[1], err_msg=name)

    def compare(self, live) -> None:
        """Integers and windows exact; the canonical states by tolerance."""
        for name, leaf in named_leaves(self.state).items():
            leaf = np.asarray(leaf)
            if leaf.dtype == np.int32 or name == "conv":
                other = self.ref if "." not in name else self.ref.extra
                assert np.array_equal(leaf, to_numpy(getattr(other, name.split(".")[-1]))), name
        conv, state = (np.asarray(x)[: len(live)] for x in self.verbs.snapshot(self.state, self.padded(live)))
        ref_conv, ref_state = ref.snapshot(self.other, self.ref, live)
        assert np.array_equal(conv, to_numpy(ref_conv))
        self.near(state, ref_state, self.tolerance[0], "state")

    def round(self, slots, widths, accepts) -> None:
        total = self.spec.hold * self.spec.width
        ids = pad_to(np.repeat(np.array(slots, np.int32), widths), total, self.spec.hold)
        offsets = pad_to(np.concatenate([np.arange(w, dtype=np.int32) for w in widths]), total, 0)
        tokens = draw_tokens(self.spec, self.rng, total)
        x, inputs, lengths = np.moveaxis(tokens.x, -2, 0), layer_inputs(tokens, self.params), self.padded(accepts)
        self.state, (y, o), receipt = self.verbs.round(self.state, ids, offsets, x, inputs, self.weights, lengths)

        layout = ref.build_layout(self.other, to_torch(ids), to_torch(offsets))
        for name in ("cu", "slots", "verify_len", "row_request", "row_offset", "count"):
            assert np.array_equal(np.asarray(getattr(receipt.layout, name)), to_numpy(getattr(layout, name))), name
        self.ref, ticket = ref.prepare(self.other, self.ref, layout)
        for row in range(self.spec.layers):
            weight, bias = (to_torch(p[row]) for p in self.weights)
            self.ref, ref_y = ref.conv_forward(self.other, self.ref, ticket, row, to_torch(x[row]), weight, bias)
            self.ref, ref_o = ref.forward(self.other, self.ref, ticket, row, torch_inputs(inputs, row))
            self.near(y[row], ref_y, OUTPUT[self.spec.act_dtype], "y")
            self.near(o[row], ref_o, self.tolerance[1], "o")
        self.ref = ref.accept(self.other, self.ref, ref.StateAcceptance((ticket,), to_torch(lengths)))

    def prompt(self, slots, lengths) -> None:
        tokens, n = (
            draw_tokens(self.spec, self.rng, self.spec.hold, PROMPT),
            pad_to(np.array(lengths, np.int32), self.spec.hold, 0),
        )
        x, inputs, live = np.moveaxis(tokens.x, -2, 0), layer_inputs(tokens, self.params), len(slots)
        self.state, (y, o) = self.verbs.prompt(self.state, self.padded(slots), n, x, inputs, self.weights)
        self.ref = ref.merge(self.other, self.ref, slots)
        short = layer_inputs(tokens.at(slice(0, live)), self.params)
        for row in range(self.spec.layers):
            weight, bias = (to_torch(p[row]) for p in self.weights)
            args = (row, to_torch(np.array(slots)), to_torch(n[:live]))
            self.ref, ref_y = ref.conv_prefill(self.other, self.ref, *args, to_torch(x[row, :live]), weight, bias)
            self.ref, ref_o = ref.prefill(self.other, self.ref, *args, torch_inputs(short, row))
            self.near(y[row, :live], ref_y, OUTPUT[self.spec.act_dtype], "y")
            self.near(o[row, :live], ref_o, self.tolerance[1], "o")

    def move(self, source, target) -> None:
        n, order = np.int32(len(source)), np.arange(self.spec.hold, dtype=np.int32)
        pages, ref_pages = ssm.init_pages(self.spec, self.spec.hold), ref.init_pages(self.other, len(source))
        pages = self.verbs.export(self.state, pages, order, self.padded(source), n)
        ref_pages = ref.export_into(self.other, self.ref, ref_pages, order[:n], source, len(source))
        self.near(np.asarray(pages.ssm)[:n], ref_pages.ssm, self.tolerance[0], "pages")
        assert np.array_equal(np.asarray(pages.conv)[:n], to_numpy(ref_pages.conv))
        self.state = self.verbs.clear(self.state, self.padded(source))
        self.ref = ref.clear(self.other, self.ref, source)
        self.state = self.verbs.restore(self.state, pages, order, self.padded(target), n)
        self.ref = ref.restore(self.other, self.ref, ref_pages, order[:n], target, len(source))


@pytest.mark.parametrize(
    ("rule", "mode", "fields"),
    [
        ("gdn", "native", {}),
        ("kda", "native", dict(act_dtype="fp32", ssm_dtype="bf16")),
        ("gdn", "compact", {}),
        ("gdn", "replay", {}),
        ("gdn", "replay", dict(act_dtype="fp32", ssm_dtype="bf16")),
        ("kda", "replay", {}),
    ],
)
def test_R98_the_same_program_in_both_packages(rule, mode, fields):
    """R78, R98, requirements N rows 3 to 5: prompt, decode, verify, fold, merge, export, restore, clear; cursors, layouts,
    accepted indices and convolution windows exact."""
    p = Pair(fs_spec(rule, mode, **fields))
    live = [4, 199, 5]
    if rule == "gdn" or mode == "native":
        p.prompt(live, [5, 1, 3])
    p.compare(live)
    for widths, accepts in (([4, 2, 1], [3, 2, 1]), ([4, 4, 4], [4, 1, 2]), ([1, 3, 4], [1, 3, 4])):
        p.round(live, widths, accepts)
        p.compare(live)
    p.move([4, 5], [0, 3])
    live = [0, 199, 3]
    p.compare(live)
    p.round(live, [2, 4, 4], [2, 4, 3])
    p.compare(live)


def ulps(a, b):
    """Distance in units of the last place of fp32; numbers below 1e-35 count as 0 (XLA's exp flushes denormals)."""
    a, b = (np.where(np.abs(x) < 1e-35, 0, x).astype(np.float32) for x in (np.asarray(a), np.asarray(b)))
    order = [np.where(x < 0, -(x.view(np.int32).astype(np.int64) & 0x7FFFFFFF), x.view(np.int32)) for x in (a, b)]
    return np.abs(order[0] - order[1])


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_R77_prologue_within_two_ulp(lower_bound):
    """N3, N10, N18, R77 on CPUs: g, beta and normalised keys of both packages, all 65,280 finite bf16 logits, four values of
    A_log and dt_bias each, key norms from 0 to 1e3. g holds two exps: 3 ulp in fewer than 1 logit of 10,000."""
    finite = np.arange(2**16, dtype=np.uint16)
    finite = finite[(finite & 0x7F80) != 0x7F80].view(BF16)
    n = len(finite) // 16
    spec = fs_spec("kda", slots=9, q_heads=4, k_heads=4, v_heads=4, lower_bound=lower_bound)
    a = np.tile(finite.reshape(n, 1, 16), (1, 4, 1)).reshape(n, 64)
    A_log, dt_bias = np.array([-3, 0, 2, 5], np.float32), np.repeat(np.array([-3, -1, 0, 2], np.float32), 16)
    g = jax.jit(partial(gates.log_decay, spec))(a, A_log, dt_bias)
    ref_g = ref_gates.log_decay(RefSpec(**vars(spec)), to_torch(a), to_torch(A_log), to_torch(dt_bias))
    distance = ulps(g, to_numpy(ref_g))
    assert distance.max() <= 3 and (distance > 2).mean() < 1e-4

    rng = np.random.default_rng(0)
    k = (rng.standard_normal((n, 4, 16)) * 10.0 ** rng.integers(-5, 4, (n, 4, 1))).astype(np.float32)
    k[:7] = 0
    act = k.astype(BF16)
    inputs = ssm.LinearInputs(act, act, np.zeros((n, 4, 8), BF16), a, finite[: n * 4].reshape(n, 4), A_log, dt_bias)
    core = jax.jit(partial(ssm.prologue, spec))(inputs)
    ref_core = ref.prologue(RefSpec(**vars(spec)), ref.LinearInputs(**{m: to_torch(x) for m, x in vars(inputs).items()}))
    assert ulps(core.beta, to_numpy(ref_core.beta)).max() <= 2
    # the sum of squares has another order in XLA: half an ulp per addition more
    for name in ("q", "k_hat"):
        assert ulps(getattr(core, name), to_numpy(getattr(ref_core, name))).max() <= 4, name


def test_R98_same_verbs_and_arguments():
    """R98: every public verb of torch_ref exists in jax_ssm with the same leading arguments (jax may add a kernel config)."""
    verbs = "accept build_layout check_acceptance clear commit conv_forward conv_prefill export_into forward forward_core"
    verbs += " init_pages init_state merge prefill prepare prologue restore snapshot state_bytes page_bytes"
    for verb in verbs.split():
        ours, theirs = (list(inspect.signature(getattr(package, verb)).parameters) for package in (ssm, ref))
        extra = {"config", "device", "implementation", "kernels"}
        assert [a for a in ours if a not in extra] == [a for a in theirs if a not in extra], verb
    for name in "LinearInputs CoreInputs DecodeLayout SSMForward StateAcceptance ConvSSMState ReplayHistory Pages".split():
        ours, theirs = (set(getattr(package, name).__dataclass_fields__) - {"kernels", "spec"} for package in (ssm, ref))
        assert ours == theirs, name
    assert ssm.SSMSpec.__dataclass_fields__.keys() == RefSpec.__dataclass_fields__.keys()
