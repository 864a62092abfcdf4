"""Device time of kernels, of PyTorch and JAX alike: durations that CUPTI records, so that host gaps do not count."""

from __future__ import annotations

import re
import statistics

from jax_ssm.spec import ITEMSIZE, SSMSpec

# what a kernel is, by its name in any of the packages; "advance" is a fold or a materialisation
LABELS = {
    "conv": r"ssm_conv|^_conv_kernel",
    "windows": r"ssm_windows|^_windows_kernel",
    "prologue": r"ssm_prologue|^_prologue_kernel",
    "native": r"ssm_native|^_native_kernel",
    "compact": r"ssm_compact|^_compact_kernel",
    "commit": r"ssm_commit|^_commit_kernel",
    "plan": r"replay_plan|^_plan_kernel",
    "coefficients": r"replay_\w*coefficients|^_(gdn|kda)_(\w+_)?kernel",
    "outputs": r"replay_\w*outputs|^_outputs_kernel",
    "advance": r"ssm_advance|^_advance_kernel",
}
OTHER = "other"  # index arithmetic of XLA or PyTorch around the kernels


def label(name: str) -> str:
    """What the kernel called `name` does: a key of LABELS, or OTHER."""
    return next((key for key, pattern in LABELS.items() if re.search(pattern, name)), OTHER)


def require_gpu() -> None:
    """Raise ValueError where there is no GPU to time."""
    import jax

    if jax.default_backend() != "gpu":
        raise ValueError(f"this command times kernels and needs an NVIDIA GPU; jax runs on {jax.default_backend()!r} here")


HEAD_START = 20_000_000  # clock cycles, about 11 ms


def durations(run, queue: bool = False) -> list[tuple[str, float]]:
    """(name, microseconds) of every kernel and copy on the device while `run()` runs.

    queue: PyTorch's stream sleeps first, so that its launches queue up and its kernels follow each other as they do in one
    executable of JAX. In a gap the cache writes back what the last kernel left in it, time that the next one then saves.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        if queue:
            torch.cuda._sleep(HEAD_START)
        run()
        torch.cuda.synchronize()
    events = [e for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA and "spin_kernel" not in e.name]
    return [(e.name, e.time_range.elapsed_us()) for e in sorted(events, key=lambda e: e.time_range.start)]


def per_call(call, n: int, keep=lambda name: True) -> list[float]:
    """Microseconds of each of call(0) .. call(n - 1), PyTorch's kernels that `keep` accepts; all calls launch the same."""
    times = [us for name, us in durations(lambda: [call(i) for i in range(n)], queue=True) if keep(name)]
    each = len(times) // n
    if each * n != len(times):
        raise RuntimeError(f"{n} calls launched {len(times)} kernels: the calls differ, their times cannot be told apart")
    return [sum(times[i * each : (i + 1) * each]) for i in range(n)]


def by_label(events) -> dict[str, list[float]]:
    """Durations of each kind of kernel."""
    out: dict[str, list[float]] = {}
    for name, us in events:
        out.setdefault(label(name), []).append(us)
    return out


def copy_rate() -> float:
    """Bytes per microsecond of a device-to-device copy of 1 GiB, bytes read plus bytes written, median of 10."""
    import torch

    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").fill_(1)
    y = torch.empty_like(x)
    events = durations(lambda: [y.copy_(x) for _ in range(10)])
    return 2 * x.numel() / statistics.median(us for _, us in events if us > 10)


def live_counts(spec: SSMSpec, accepted: int) -> list[int]:
    """Live records n at the start of each round of a steady replay cycle in which every round accepts `accepted` tokens of a
    full window; the last round folds, so the next begins a half with its accepted tokens. [0] in other modes."""
    if spec.mode != "replay":
        return [0]
    return [n for n in range(accepted, spec.history + 1, accepted) if n + spec.width - accepted <= spec.history]


def least_bytes(spec: SSMSpec, batch: int, accepted: int) -> dict[str, float]:
    """Bytes that each kind of kernel must move for one layer and round: every input read once, every output written once.

    Folds are shared out over the rounds of a cycle. "round": the same for the whole round, in which what one kernel hands to
    the next does not count.
    """
    e, s, tokens = ITEMSIZE[spec.act_dtype], ITEMSIZE[spec.ssm_dtype], batch * spec.width
    state = spec.v_heads * spec.v_dim * spec.k_dim * s
    key, value = spec.k_heads * spec.k_dim, spec.v_heads * spec.v_dim
    gate = spec.v_heads * (spec.gates + 1)
    raw = (key + value) * e + 4 * gate  # one record: k, v, decay, beta
    inputs = (spec.q_heads * spec.k_dim + key + value + gate) * e  # one token after the convolution
    core = 4 * (spec.q_heads * spec.k_dim + key + gate) + value * e  # one token after the prologue
    output, counts = value * e, live_counts(spec, accepted)
    mean, last, rounds = sum(counts) / len(counts), counts[-1], len(counts)
    conv = spec.channels * e
    out = {
        "conv": batch * conv * (spec.conv_width - 1 + spec.window) + tokens * 2 * conv,
        "prologue": tokens * (inputs - value * e + core - value * e),
    }
    if spec.mode == "native":
        fused = spec.rule == "gdn" and spec.width == 1
        out["native"] = batch * state * (1 + spec.width) + tokens * ((inputs if fused else core) + output)
        out["round"] = batch * state * (1 + spec.width) + tokens * (inputs + output)
    elif spec.mode == "compact":
        out["compact"] = batch * state + tokens * (core + output + raw + key * e)
        out["commit"] = 2 * batch * state + batch * accepted * raw
        out["round"] = 3 * batch * state + tokens * (inputs + output + raw) + batch * accepted * raw
    else:
        d, records = 4 * value, batch * mean
        window = 2 * tokens * 4 * (spec.v_heads * spec.history + key)  # coefficients and vectors of the pre-kernel
        out["fold"] = batch / rounds * (2 * state + last * raw)
        out["coefficients"] = records * (key * e + 4 * spec.v_heads * spec.gates) + tokens * (inputs + raw) + window
        out["outputs"] = batch * state + records * d + tokens * (2 * value * e + d + output) + window
        history = records * (key * e + 4 * spec.v_heads * spec.gates + d) + tokens * (raw + d)
        out["round"] = batch * state + history + tokens * (inputs + output) + out["fold"]
    return out
