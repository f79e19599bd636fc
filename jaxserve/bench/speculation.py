"""The speculation bench: tokens a second with and without drafts, on text that repeats itself and on text that doesn't.

plain   decoding, overlapped
NGRAM   speculation as configured by default
relay   the same with ``--speculative-ngram-fence relay``
EAGLE3, DFLASH  with the head that comes with the default model
NAME=FOLDER     the algorithm NAME with a draft model of one's own, and the token map beside an EAGLE head

Beside it, what a step costs that verifies 2, 4 or 8 tokens per sequence, with drafts that never hold.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxserve.bench.machine import machine
from jaxserve.bench.stepping import run_greedily
from jaxserve.bench.texts import KINDS
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError, JaxserveError
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.shapes import ceil_div
from jaxserve.engine.engine import Engine
from jaxserve.models.loading.draft import has_default_draft
from jaxserve.models.loading.token_map import TOKEN_MAP_FILE
from jaxserve.speculative.base import Proposals, SpeculativeAlgorithm
from jaxserve.speculative.ngram import NgramAlgorithm
from jaxserve.speculative.registry import temporarily_registered

SCHEMA = 1  # of the JSON
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "NGRAM": {"speculative_algorithm": "NGRAM"},
    "relay": {"speculative_algorithm": "NGRAM", "speculative_ngram_fence": "relay"},
    "NGRAM-tree": {"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 4},
    "EAGLE3": {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "default"},
    "EAGLE3-tree": {
        "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "default", "speculative_eagle_topk": 3,
        "speculative_num_steps": 2, "speculative_num_draft_tokens": 5,
    },
    "DFLASH": {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": "default"},
}  # fmt: skip
HEADS = ("EAGLE3", "DFLASH")  # ways that need a head
LONGEST_PROMPT = 384  # tokens
VERIFY_PROMPT = 64  # tokens, of the sequences whose steps are timed
VERIFY_OUTPUT = 24
SERIAL = 1  # tokens of a step that verifies nothing, but is planned when the one before it is known


@dataclass(frozen=True)
class Sweep:
    """What to measure.

    Attributes:
        model: ``"default"``, a Hugging Face folder or a ``.gguf`` file; it should have a chat template.
        batches: sequences that decode together, at most 4.
        kinds: of text, keys of ``texts.KINDS``.
        ways: keys of ``WAYS``, or ``NAME=FOLDER``.
        verify_tokens: sizes of the verify steps that are timed.
        rounds: measurements of each way; one more goes ahead for warming up.
        max_tokens: of each answer, which may end earlier.
        max_seconds: after this no further kind is begun; the result names what was left out.
        settings: further fields of ``EngineConfig``, of all ways.

    Raises:
        ConfigError: a combination that cannot be measured.
    """

    model: str = "default"
    batches: tuple[int, ...] = (1, 4)
    kinds: tuple[str, ...] = tuple(KINDS)
    ways: tuple[str, ...] = ("plain", "NGRAM", "relay")
    verify_tokens: tuple[int, ...] = (2, 4, 8)
    rounds: int = 4
    max_tokens: int = 128
    max_seconds: float = 900.0
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown or not self.kinds:
            raise ConfigError(f"--kinds: unknown {', '.join(unknown)}; known are {', '.join(KINDS)}")
        most = len(next(iter(KINDS.values())).prompts)
        if not self.batches or min(self.batches) < 1 or max(self.batches) > most:
            raise ConfigError(f"--batches must be 1 .. {most}, which is how many prompts there are, got {self.batches}")
        unknown = [way for way in self.ways if settings_of(way) is None]
        if unknown or self.ways[:1] != ("plain",):
            raise ConfigError(
                f"--ways must begin with plain; known are {', '.join(WAYS)} and ALGORITHM=FOLDER of a draft model, "
                f"got {', '.join(self.ways)}"
            )
        if self.rounds < 1:
            raise ConfigError(f"--rounds must be at least 1, got {self.rounds}")
        if self.max_tokens < 16:
            raise ConfigError(f"--tokens must be at least 16, got {self.max_tokens}: shorter answers say nothing")


def settings_of(way: str) -> dict[str, Any] | None:
    """The fields of ``EngineConfig`` that a way sets; None: it is none."""
    algorithm, equals, folder = way.partition("=")
    if equals and algorithm and folder:
        token_map = Path(folder).expanduser() / TOKEN_MAP_FILE
        takes_map = algorithm.upper() == "EAGLE" and token_map.is_file()
        own_ids = {"speculative_token_map": str(token_map)} if takes_map else {}
        return {"speculative_algorithm": algorithm, "speculative_draft_model_path": folder, **own_ids}
    return WAYS.get(way)


def ways_with_heads(model: str, ways: tuple[str, ...]) -> tuple[str, ...]:
    """These ways, and for the default model those with the heads that come with it."""
    return (*ways, *(name for name in HEADS if has_default_draft(name))) if model == "default" else ways


QUICK = Sweep(ways=("plain", "NGRAM"), rounds=2, max_tokens=64, max_seconds=120.0)


@dataclass(frozen=True)
class Answered:
    """Prompts that were answered together.

    Attributes:
        tokens: per prompt.
        rate: tokens a second, from when every answer had begun until the last one ended.
        num_steps: launches in all.
        num_drafted, num_accepted: drafts verified, and those that held.
    """

    tokens: list[list[int]]
    rate: float
    num_steps: int
    num_drafted: int
    num_accepted: int


class NeverRight(SpeculativeAlgorithm):
    """Drafts the last id of the vocabulary, or nothing while ``is_on`` is false."""

    is_on = True

    def propose(self, contexts: list[np.ndarray], num_drafts: int) -> Proposals:
        batch = len(contexts)
        tokens = np.full((batch, num_drafts), self.context.vocab_size - 1, np.int32)
        parents = np.tile(np.arange(num_drafts, dtype=np.int32), (batch, 1))
        return Proposals(tokens, parents, np.full(batch, num_drafts if self.is_on else 0, np.int32))


def measure(sweep: Sweep, progress: Callable[[str], None] = lambda message: None) -> dict[str, Any]:
    """Measures every kind, batch and way; the ways take turns, and the order turns too.

    Returns:
        JSON values: ``machine``, ``settings``, ``cells`` (see ``_cell``), ``verify`` (see ``_verify_costs``),
        ``left_out`` and ``seconds``.

    Raises:
        JaxserveError: the ways disagree about tokens.
    """
    start = time.monotonic()
    found: dict[str, Any] = {
        "schema": SCHEMA, "machine": machine() | {"jax": jax.__version__, "platform": jax.default_backend()},
        "settings": dataclasses.asdict(sweep) | {"settings": dict(sweep.settings)}, "cells": [], "left_out": [],
    }  # fmt: skip

    def say(message: str) -> None:
        progress(f"{time.monotonic() - start:4.0f} s: {message}")

    with contextlib.ExitStack() as stack:
        engines = {way: stack.enter_context(_opened(sweep, settings_of(way) or {}, say)) for way in sweep.ways}
        found["model"] = engines["plain"].model_name
        say(f"{found['model']} is ready, {len(engines)} times")
        for kind in sweep.kinds:
            for batch in sweep.batches:
                if time.monotonic() - start > sweep.max_seconds:
                    found["left_out"].append(f"{kind}, batch {batch}")
                    continue
                cell = _cell(sweep, kind, batch, engines)
                found["cells"].append(cell)
                ratio = statistics.median(cell["ways"][sweep.ways[-1]]["ratio"])
                say(f"{kind}, batch {batch}: {sweep.ways[-1]} {ratio:.2f} times plain")
    gc.collect()  # pools and weights go before the next ones come
    found["verify"] = _verify_costs(sweep, say)
    return found | {"seconds": time.monotonic() - start}


@contextlib.contextmanager
def _opened(
    sweep: Sweep, settings: Mapping[str, Any], progress: Callable[[str], None] = lambda message: None
) -> Iterator[Engine]:
    context = LONGEST_PROMPT + sweep.max_tokens
    most = max(sweep.batches)
    base: dict[str, Any] = {
        "model": sweep.model, "context_length": context, "max_running_requests": most,
        "decode_batch_buckets": sweep.batches, "chunked_prefill_size": 128, "prefill_token_buckets": (128,),
        "num_pages": most * ceil_div(context, EngineConfig.page_size) + 1,
    }  # fmt: skip
    engine = Engine(EngineConfig(**{**base, **sweep.settings, **settings}), progress)
    try:
        yield engine
    finally:
        engine.close()


def answer(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Answered:
    """Answers the prompts together, on an engine that is idle and has forgotten what it drafted from."""
    speculation = engine.scheduler.speculation
    if speculation is not None and isinstance(speculation.algorithm, NgramAlgorithm):
        speculation.algorithm.corpus.clear()  # or the next round would draft this one's answers
    drafted, accepted = _figures(engine)
    step = engine.scheduler.step_number
    tokens: dict[str, list[int]] = {f"bench-{i}": [] for i in range(len(prompts))}
    for name, prompt in zip(tokens, prompts, strict=True):
        engine.add(Request(name, tuple(prompt), params))
    begun, begun_count = 0.0, 0
    while engine.has_work:
        for delta in engine.step():
            if delta.error:
                raise JaxserveError(f"a step failed: {delta.error}")
            tokens[delta.request_id] += delta.token_ids
        if not begun and all(tokens.values()):
            begun, begun_count = time.perf_counter(), sum(map(len, tokens.values()))
    seconds = time.perf_counter() - begun
    now_drafted, now_accepted = _figures(engine)
    return Answered(
        tokens=list(tokens.values()),
        rate=(sum(map(len, tokens.values())) - begun_count) / seconds,
        num_steps=engine.scheduler.step_number - step,
        num_drafted=now_drafted - drafted,
        num_accepted=now_accepted - accepted,
    )


def _figures(engine: Engine) -> tuple[int, int]:
    speculation = engine.scheduler.speculation
    return (0, 0) if speculation is None else (speculation.figures.num_drafted, speculation.figures.num_accepted)


def _cell(sweep: Sweep, kind: str, batch: int, engines: Mapping[str, Engine]) -> dict[str, Any]:
    """All rounds of one kind and batch. A round takes the next prompts of the kind.

    Returns:
        ``kind``, ``repeats``, ``temperature``, ``batch``, ``num_tokens``, and per way under ``ways`` a value per round:
        ``rate`` (tokens a second), ``ratio`` (over plain's in the same round), ``steps``, ``drafted``, ``accepted``.
    """
    text = KINDS[kind]
    ids = [engines["plain"].encode_chat([{"role": "user", "content": prompt}]) for prompt in text.prompts]
    params = SamplingParams(temperature=text.temperature, max_tokens=sweep.max_tokens, seed=7)
    rounds: list[dict[str, Answered]] = []
    for number in range(sweep.rounds + 1):
        first = number % len(sweep.ways)
        turn = sweep.ways[first:] + sweep.ways[:first]
        prompts = [ids[(number * batch + i) % len(ids)] for i in range(batch)]
        runs = {way: answer(engines[way], prompts, params) for way in turn}
        for way, run in runs.items():
            if run.tokens != runs["plain"].tokens:
                raise JaxserveError(
                    f"tokens of {way!r} differ from those of plain decoding: {kind}, batch {batch}, round {number}; "
                    "jaxserve check-lossless says where, and whether it is a tie"
                )
        if number:  # the first is for warming up
            rounds.append(runs)
    cell: dict[str, Any] = {
        "kind": kind, "repeats": text.repeats, "temperature": text.temperature, "batch": batch,
        "num_tokens": sum(len(one) for runs in rounds for one in runs["plain"].tokens), "ways": {},
    }  # fmt: skip
    for way in sweep.ways:
        cell["ways"][way] = {
            "rate": [runs[way].rate for runs in rounds],
            "ratio": [runs[way].rate / runs["plain"].rate for runs in rounds],
            "steps": [runs[way].num_steps for runs in rounds],
            "drafted": [runs[way].num_drafted for runs in rounds],
            "accepted": [runs[way].num_accepted for runs in rounds],
        }
    return cell


def _verify_costs(sweep: Sweep, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Step times with drafts that never hold.

    Returns:
        Per batch and size: ``batch``, ``tokens`` per sequence (0: plain decoding, overlapped; 1: a step that waits for
        the one before it), and a value per round: ``step_ms``, ``ratio`` (over tokens 0 in the same round).
    """
    found = []
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(temporarily_registered(NeverRight))
        engines = {0: stack.enter_context(_opened(sweep, {"skip_warmup": True}))}
        for tokens in sweep.verify_tokens:
            settings = {"speculative_algorithm": name, "speculative_num_draft_tokens": tokens,
                        "speculative_adaptive": False, "skip_warmup": True}  # fmt: skip
            engines[tokens] = stack.enter_context(_opened(sweep, settings))
        prompt = engines[0].encode_chat([{"role": "user", "content": KINDS["open text"].prompts[0]}])[:VERIFY_PROMPT]
        for batch in sweep.batches:
            rounds = []
            for number in range(sweep.rounds + 1):
                steps = _step_times(engines, [prompt] * batch)
                if number:
                    rounds.append(steps)
            for tokens in rounds[0]:
                found.append({
                    "batch": batch, "tokens": tokens, "step_ms": [1e3 * steps[tokens] for steps in rounds],
                    "ratio": [steps[tokens] / steps[0] for steps in rounds],
                })  # fmt: skip
            say(f"verify steps, batch {batch}")
    return found


def _step_times(engines: Mapping[int, Engine], prompts: Sequence[Sequence[int]]) -> dict[int, float]:
    """Seconds of a step, by tokens per sequence."""
    times: dict[int, float] = {}
    for tokens, engine in engines.items():
        times[tokens] = statistics.median(run_greedily(engine, prompts, VERIFY_OUTPUT).steps)
        if tokens and SERIAL not in times:
            algorithm = engine.scheduler.speculation.algorithm  # type: ignore[union-attr]
            assert isinstance(algorithm, NeverRight)
            algorithm.is_on = False
            times[SERIAL] = statistics.median(run_greedily(engine, prompts, VERIFY_OUTPUT).steps)
            algorithm.is_on = True
    return dict(sorted(times.items()))
