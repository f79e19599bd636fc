"""Makes small engines, runs requests through them, and makes the checks every test shares.

PARITY: the caller compares with the oracle. PAGES: ``check_idle``. ALIVE: ``check_alive``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tiny import BYTE_VOCAB

from jaxserve.core.config import EngineConfig
from jaxserve.core.request import CompletionOutput, OutputDelta, Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine

SETTINGS: dict[str, Any] = {
    "context_length": 128,
    "page_size": 4,
    "max_running_requests": 4,
    "chunked_prefill_size": 16,
    "prefill_token_buckets": (16,),
    "decode_batch_buckets": (4,),
    "skip_warmup": True,
    "greedy_programs": True,  # most tests are greedy
    "seed": 1,
}
LOW = -40.0
_ids = itertools.count()


def make_engine(model: Path, **overrides: Any) -> Engine:
    """A small engine; ``overrides`` replace ``SETTINGS``."""
    return Engine(EngineConfig(model=str(model), **{**SETTINGS, **overrides}))


def greedy(max_tokens: int | None, **others: Any) -> SamplingParams:
    """Greedy parameters that run to ``max_tokens``."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **{"ignore_eos": True, **others})


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A prompt of random bytes."""
    return [int(t) for t in np.random.default_rng(1000 * seed + length).integers(0, 250, length)]


def add(engine: Engine, prompt: Sequence[int], params: SamplingParams, request_id: str | None = None) -> str:
    """Queues a request; returns its id."""
    request_id = request_id or f"t{next(_ids)}"
    engine.add(Request(request_id, tuple(prompt), params))
    return request_id


class Collected:
    """Deltas put together by (request id, output index)."""

    def __init__(self) -> None:
        self.outputs: dict[tuple[str, int], CompletionOutput] = {}
        self.deltas: list[OutputDelta] = []

    def take(self, deltas: Iterable[OutputDelta]) -> None:
        """Adds deltas. Nothing may come after an output's last one."""
        for delta in deltas:
            key = (delta.request_id, delta.index)
            output = self.outputs.setdefault(key, CompletionOutput(delta.index, logprobs=[]))
            assert output.finish_reason is None, f"{delta} came after the output had ended"
            output.append(delta)
            self.deltas.append(delta)

    def __getitem__(self, request_id: str) -> CompletionOutput:
        return self.outputs[request_id, 0]

    def ids(self, request_id: str, index: int = 0) -> list[int]:
        """Token ids of an output."""
        return self.outputs[request_id, index].token_ids


def run(engine: Engine, collected: Collected | None = None, each_step: Callable[[int], Any] | None = None) -> Collected:
    """Steps until the engine is idle; ``each_step(i)`` is called ahead of step i. Then PAGES must hold."""
    collected = collected or Collected()
    for i in itertools.count():
        assert i < 20_000, "the engine does not come to rest"
        if each_step is not None:
            collected.take(each_step(i) or ())
        if not engine.has_work:
            break
        collected.take(engine.step())
    check_idle(engine)
    return collected


def generate(engine: Engine, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[CompletionOutput]:
    """First outputs of requests that arrive together."""
    ids = [add(engine, prompt, params) for prompt, params in requests]
    collected = run(engine)
    return [collected[request_id] for request_id in ids]


def check_idle(engine: Engine) -> None:
    """PAGES: no page, slot, or queue entry is left behind."""
    scheduler = engine.scheduler
    scheduler.check_integrity()
    assert scheduler.memory.num_available == scheduler.pool.num_usable
    assert sorted(scheduler.free_slots) == list(range(scheduler.rows.layout.num_slots))
    assert not scheduler.running and not scheduler.waiting and not engine.open_requests
    assert not scheduler.rows.mirror("block_tables").any(), "a stale row names a page"


def check_alive(engine: Engine, oracle: Callable[..., list[int]]) -> None:
    """ALIVE: a plain request is answered, and rightly."""
    prompt = prompt_of(9, seed=99)
    (output,) = generate(engine, [(prompt, greedy(8))])
    assert output.token_ids == oracle(prompt, 8)


def markov_table(*rows: tuple[int, dict[int, float]], default: dict[int, float] | None = None) -> np.ndarray:
    """A table of logits: ``LOW`` but for what ``rows`` (token, {next: logit}) and ``default`` say."""
    table = np.full((BYTE_VOCAB, BYTE_VOCAB), LOW, np.float32)
    for token, logit in (default or {}).items():
        table[:, token] = logit
    for token, entries in rows:
        table[token] = LOW
        for following, logit in entries.items():
            table[token, following] = logit
    return table


def log_softmax(row: np.ndarray) -> np.ndarray:
    """In float64."""
    row = row.astype(np.float64)
    return row - row.max() - np.log(np.exp(row - row.max()).sum())
