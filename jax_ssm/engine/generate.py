"""The host loop: prompts in, tokens out. Chooses a bucket, admits prompts to free rows, runs chunks and rounds, keeps count."""

from __future__ import annotations

import platform
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import jax
import numpy as np

import jax_ssm
from jax_ssm.engine import rounds
from jax_ssm.engine.buckets import RunBucket, choose_bucket
from jax_ssm.engine.compiles import Compiler, Executable, Part
from jax_ssm.engine.load import LoadedModel, find, load, read_config
from jax_ssm.engine.plan import LEAST_LEN, make_plan
from jax_ssm.engine.settings import Request, Settings, require
from jax_ssm.engine.slots import FreeList
from jax_ssm.models import hybrid


@dataclass
class Sequenced:
    """One prompt on its way: what it asked for and what it has got. `accepted` has one entry per round."""

    number: int
    prompt: list[int]
    limit: int
    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    finish: str | None = None


class Generator:
    """A model with its executables, ready to generate. Arguments are those of `Settings`.

    model: checkpoint directory, None for the demo model, or a LoadedModel. Raises ValueError (BackendError for a named
    implementation that cannot run here) before anything is allocated. The first `generate` in a bucket compiles three
    executables (allocate, prefill, rounds); later ones compile nothing. compiler_options: for XLA; None on a CPU means
    quick compilation, {} full optimisation.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel | None = None,
        *,
        progress: Callable[[str], None] = lambda message: None,
        compiler_options: dict | None = None,
        **settings,
    ) -> None:
        self.progress = progress
        settings = Settings(**settings)
        config = model.config if isinstance(model, LoadedModel) else read_config(find(model))
        self.plan = make_plan(config, settings)
        start = time.perf_counter()
        self.model = model if isinstance(model, LoadedModel) else load(model, self.plan.act_dtype)
        self.load_seconds = time.perf_counter() - start
        self.compiler = Compiler(compiler_options)

    def check_prompts(self, prompts: Sequence[str | Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Token ids of every prompt. Raises ValueError naming the first that is empty, too long or not of this model."""
        listed = isinstance(prompts, Sequence) and not isinstance(prompts, str)
        require(listed and len(prompts) > 0, "prompts", prompts, "a list of at least one prompt, each a text or token ids")
        encoded = [self.model.encode(prompt) for prompt in prompts]
        for i, ids in enumerate(encoded):
            if not ids:
                raise ValueError(f"prompts[{i}] is empty: a prompt needs at least one token")
            bad = [x for x in ids if not 0 <= x < self.plan.config.vocab_size]
            if bad:
                raise ValueError(f"prompts[{i}] has token ids {bad[:5]}: allowed are 0..{self.plan.config.vocab_size - 1}")
            most = self.plan.max_len
            if len(ids) + max_new_tokens > most:
                room = most - len(ids)
                advice = (
                    f"ask for at most {room} new tokens" if room > 0 else f"shorten the prompt by {1 - room} tokens or more"
                )
                raise ValueError(
                    f"prompts[{i}] has {len(ids)} tokens and max_new_tokens={max_new_tokens}: together at most "
                    f"max_len={most}; {advice}"
                )
        return encoded

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        ignore_eos: bool = False,
        on_tokens: Callable[[int, list[int], str | None], None] | None = None,
    ) -> dict:
        """Generate for every prompt (text, or token ids) and return the record that `jax-ssm generate --json` prints.

        on_tokens(prompt number, new token ids, finish) is called as text arrives; finish is None, "eos" or "length".
        Greedy at temperature 0, and given a seed also otherwise, the text of a prompt does not depend on mode, width,
        drafts, rounds_per_call or bucket, as far as fp32 rounding does not decide between two tokens. With bf16
        activations or states that is not promised. The noise of sampling belongs to the number of a prompt in its list, so
        that equal prompts get different texts; the other prompts do not matter.
        """
        request = Request(max_new_tokens, temperature, top_p, seed, ignore_eos)
        encoded = self.check_prompts(prompts, max_new_tokens)
        s, clock = self.plan.settings, time.perf_counter
        bucket = self.bucket(encoded, max_new_tokens)
        self.compiler.begin()
        start = clock()
        ready = self.executables(bucket)
        allocate, prefill, decode = (ready[name].call for name in ("allocate", "prefill", "rounds"))
        compile_seconds = clock() - start

        start, decode_seconds, calls = clock(), 0.0, 0
        texts = [Sequenced(i, ids, len(ids) + max_new_tokens) for i, ids in enumerate(encoded)]
        waiting, free = deque(texts), FreeList(bucket.requests)
        rows: list[tuple[Sequenced, int] | None] = [None] * bucket.requests  # text and slot of each row
        eos = () if ignore_eos else self.model.eos
        choices = self._choices(request, eos)
        carry = allocate()
        while waiting or any(rows):
            fresh = []
            for row, owner in enumerate(rows):
                if owner is None and waiting:
                    rows[row] = waiting.popleft(), free.take()
                    fresh.append((row, *rows[row]))
            for chunk in self._chunks(fresh, bucket):
                carry, emitted = prefill(self.model.params, carry, chunk, choices)
                if chunk.last.any():
                    self._collect(rows, free, jax.device_get(emitted), eos, on_tokens, first=True)
            if any(rows):
                began = clock()
                carry, emitted = decode(self.model.params, carry, choices)
                self._collect(rows, free, jax.device_get(emitted), eos, on_tokens)
                decode_seconds += clock() - began
                calls += 1
        total = clock() - start
        if s.strict:
            self.compiler.require_no_stray()
        return self._report(texts, request, bucket, calls, compile_seconds, total, decode_seconds)

    def bucket(self, encoded: Sequence[Sequence[int]], max_new_tokens: int) -> RunBucket:
        """The bucket that serves these prompts."""
        longest = max(map(len, encoded)) + max_new_tokens + self.plan.width
        return choose_bucket(len(encoded), longest, max_requests=self.plan.settings.max_requests, least_len=LEAST_LEN)

    def warm_up(self, prompts: Sequence[str | Sequence[int]], max_new_tokens: int) -> None:
        """Compile what `generate` with these prompts will use."""
        Request(max_new_tokens)
        self.executables(self.bucket(self.check_prompts(prompts, max_new_tokens), max_new_tokens))

    def executables(self, bucket: RunBucket) -> dict[str, Executable]:
        """allocate, prefill and rounds for a bucket, compiled at the first use."""
        if not self.compiler.has(bucket):
            self.progress(f"compiling for bucket {bucket} (requests x positions)")
        return self.compiler.executables(bucket, partial(self._parts, bucket))

    def _parts(self, bucket: RunBucket) -> dict[str, Part]:
        specs = self.plan.specs(bucket)
        allocate = partial(rounds.allocate, specs, bucket.requests, self.plan.drafts == "mtp")
        carry, params = jax.eval_shape(allocate), self.model.params
        choices, chunk = self._choices(Request()), self._empty_chunk(bucket)
        several = partial(rounds.decode_rounds, specs, self.plan.settings.rounds_per_call)
        return {
            "allocate": Part(allocate, ()),
            "prefill": Part(partial(rounds.prefill, specs), (params, carry, chunk, choices), (1,)),
            "rounds": Part(several, (params, carry, choices), (1,)),
        }

    def _choices(self, request: Request, eos: tuple[int, ...] = ()) -> rounds.Choices:
        ids = np.full(max(len(self.model.eos), 1), -1, np.int32)
        ids[: len(eos)] = eos
        return rounds.Choices(np.float32(request.temperature), np.float32(request.top_p), np.uint32(request.seed), ids)

    def _empty_chunk(self, bucket: RunBucket) -> rounds.Chunk:
        r, n = bucket.requests, self.plan.settings.prefill_chunk
        flags, numbers = lambda: np.zeros(r, bool), lambda: np.zeros(r, np.int32)
        return rounds.Chunk(
            fresh=flags(), slot=np.full(r, r, np.int32), request=numbers(), limit=numbers(),
            tokens=np.zeros((r, n), np.int32), count=numbers(), following=numbers(), last=flags(),
        )  # fmt: skip

    def _chunks(self, fresh: list[tuple[int, Sequenced, int]], bucket: RunBucket) -> Iterator[rounds.Chunk]:
        """The prompt chunks of newly admitted (row, text, slot), side by side."""
        n = self.plan.settings.prefill_chunk
        for begin in range(0, max((len(text.prompt) for _, text, _ in fresh), default=0), n):
            chunk = self._empty_chunk(bucket)
            for row, text, slot in fresh:
                part, rest = text.prompt[begin : begin + n], text.prompt[begin + n : begin + n + 1]
                if not part:
                    continue
                chunk.fresh[row], chunk.last[row] = begin == 0, not rest
                chunk.slot[row], chunk.request[row], chunk.limit[row] = slot, text.number, text.limit
                chunk.tokens[row, : len(part)], chunk.count[row] = part, len(part)
                chunk.following[row] = rest[0] if rest else 0
            yield chunk

    def _collect(self, rows, free: FreeList, emitted: rounds.Emitted, eos, on_tokens, first: bool = False) -> None:
        """Hand out what one call emitted, and free the rows that are done."""
        for row, owner in enumerate(rows):
            if owner is None or not emitted.count[:, row].any():
                continue
            text, slot = owner
            new = []
            for tokens, count in zip(emitted.tokens[:, row], emitted.count[:, row], strict=True):
                new += tokens[:count].tolist()
                if count and not first:
                    text.accepted.append(int(count))
            text.tokens += new
            if not emitted.live[row]:
                text.finish = "eos" if new[-1] in eos else "length"
                rows[row] = None
                free.give(slot)
            if on_tokens is not None:
                on_tokens(text.number, new, text.finish)

    def _report(self, texts, request, bucket, calls, compile_seconds, total, decode_seconds) -> dict:
        accepted = [n for text in texts for n in text.accepted]
        made = sum(len(text.tokens) for text in texts)
        device, fresh = jax.devices()[0], self.compiler.fresh
        return {
            "results": [
                {
                    "prompt_ids": text.prompt,
                    "token_ids": text.tokens,
                    "text": self.model.decode(text.tokens),
                    "accepted": text.accepted,
                    "finish": text.finish,
                }
                for text in texts
            ],
            "state_bytes": hybrid.model_state_bytes(self.plan.specs(bucket)),
            "compilations": {
                "total": len(fresh),
                "stray": self.compiler.stray(),
                "buckets": {str(bucket): list(self.compiler.executables(bucket, dict))},
                "executables": [
                    {"name": e.name, "bucket": e.bucket, "seconds": round(e.seconds, 4), "temp_bytes": e.temp_bytes}
                    for e in fresh
                ],
            },
            "timings": {
                "load_s": round(self.load_seconds, 4),
                "compile_s": round(compile_seconds, 4),
                "generate_s": round(total, 4),
                "decode_s": round(decode_seconds, 4),
                "tokens": made,
                "tokens_per_s": round(made / total, 2),
                "decode_tokens_per_s": round(sum(accepted) / decode_seconds, 2) if accepted else None,
                "rounds": len(accepted),
                "calls": calls,
                "mean_accepted": round(sum(accepted) / len(accepted), 4) if accepted else None,
            },
            "settings": asdict(self.plan.settings)
            | asdict(request)
            | {
                "model": self.model.name,
                "act_dtype": self.plan.act_dtype,
                "width": self.plan.width,
                "drafts": self.plan.drafts,
                "drafts_reason": self.plan.drafts_reason,
                "bucket": {"requests": bucket.requests, "max_len": bucket.max_len},
                "backends": {key: name for key, (_, name) in self.plan.specs(bucket).groups.items()},
            },
            "versions": {
                "jax_ssm": jax_ssm.__version__,
                "jax": jax.__version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
                "device": f"{device.platform} ({device.device_kind})",
            },
        }
