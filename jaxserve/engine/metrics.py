"""Engine metrics in Prometheus form. Names follow the field: ``jaxserve:num_requests_running`` and so on."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from jaxserve.core.request import OutputDelta, Request
from jaxserve.core.sequence import Sequence
from jaxserve.engine.fence_metrics import FenceMetrics
from jaxserve.engine.request_metrics import RequestMetrics
from jaxserve.engine.speculation_metrics import SpeculationMetrics
from jaxserve.runner.batch import StepBatch
from jaxserve.scheduler.scheduler import Committed

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine

log = logging.getLogger(__name__)


class _Marks:
    """Moments of one output, in ``time.monotonic()`` seconds, and how many tokens it was given."""

    __slots__ = ("first_step", "first_token", "newest_token", "num_tokens")

    def __init__(self, first_step: float):
        self.first_step = first_step
        self.first_token = self.newest_token = 0.0
        self.num_tokens = 0


class EngineMetrics:
    """Counters and gauges of one engine.

    Attributes:
        registry: what ``/metrics`` renders.
        requests: what requests and steps did.
        graph_splits: program -> places where its CUDA graph is interrupted, of the programs it is known of.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self.graph_splits: dict[str, int] = {}
        self.reset()

    def reset(self) -> None:
        """Starts all counts at zero (after warm-up)."""
        self.registry = CollectorRegistry()
        labels = {"model_name": self._engine.model_name}
        self._marks: dict[Sequence, _Marks] = {}  # of outputs that have been in a step and have not ended
        self.requests = RequestMetrics(self._engine, labels)
        self.registry.register(self.requests)
        self.registry.register(FenceMetrics(self._engine, labels, self.graph_splits))
        speculation = self._engine.scheduler.speculation
        if speculation is not None:
            speculation.reset_figures()
            self.registry.register(SpeculationMetrics(speculation, labels))

    def set_graph_splits(self, splits: Mapping[str, int]) -> None:
        """Takes over what a program report says of this engine's programs; warns of others, which it cannot mean."""
        own = set()
        for runner in self._engine.parts.worker.step_runners:
            for cache, keys in zip((runner.steps, runner.preps), runner.program_keys(), strict=True):
                own |= {f"{cache.kind} {key.label}" for key in keys}
        self.graph_splits.update({program: count for program, count in splits.items() if program in own})
        others = [program for program in splits if program not in own]
        if others:
            log.warning("the program report is of another configuration: this engine has no %s", ", ".join(others))

    def accepted(self, request: Request) -> None:
        """A request entered the queue."""
        self.requests.num_requests += 1
        self.requests.prompt_tokens += len(request.prompt_ids)

    def launched(self, batch: StepBatch[Sequence]) -> None:
        """A step was dispatched."""
        counts, now = self.requests, time.monotonic()
        counts.steps[batch.mode] += 1
        counts.pace.note(now, counts.generation_tokens)
        if batch.tokens is None:
            counts.step_tokens.add(len(batch.owners) * batch.queries)
            return
        counts.step_tokens.add(batch.tokens.size if batch.num_tokens is None else int(batch.num_tokens.sum()))
        for sequence in batch.owners:  # a prompt, or a part of it: it may be the first step of its output
            if sequence not in self._marks:
                self._marks[sequence] = _Marks(now)
                counts.queue_s.add(now - sequence.request.arrival_s)

    def committed(self, token: Committed, delta: OutputDelta) -> None:
        """A step gave an output a token, and its client ``delta``, which lacks the token if it could not be used."""
        if not delta.token_ids:
            return
        counts, sequence = self.requests, token.sequence
        marks = self._marks[sequence]
        counts.generation_tokens += 1
        counts.emitted_tokens += token.verified is not None
        marks.num_tokens += 1
        if token.place:
            return  # it came with the token before it
        now = time.monotonic()
        if marks.num_tokens == 1:
            marks.first_token = now
            counts.first_token_s.add(now - sequence.request.arrival_s)
            counts.prefill_s.add(now - marks.first_step)
        else:
            counts.between_steps_s.add(now - marks.newest_token)
        marks.newest_token = now

    def finished(self, sequence: Sequence) -> None:
        """An output ended."""
        counts, marks = self.requests, self._marks.pop(sequence, None)
        assert sequence.finish_reason is not None
        counts.finished[sequence.finish_reason] += 1
        counts.e2e_s.add(time.monotonic() - sequence.request.arrival_s)
        counts.prompt_lengths.add(sequence.prompt_len)
        counts.output_lengths.add(marks.num_tokens if marks is not None else 0)
        if marks is None or not marks.num_tokens:
            return
        decode_s = marks.newest_token - marks.first_token
        counts.decode_s.add(decode_s)
        counts.inference_s.add(marks.newest_token - marks.first_step)
        if marks.num_tokens > 1:
            counts.per_token_s.add(decode_s / (marks.num_tokens - 1))
