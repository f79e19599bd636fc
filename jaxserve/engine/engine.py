"""The engine: one step at a time, the next one dispatched before the last one is read."""

from __future__ import annotations

import collections
import logging
import random
import secrets
import time
from collections.abc import Callable, Collection
from typing import Any

from jaxserve.barrier import journal
from jaxserve.barrier.race_check import RaceCheck
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import CapacityError, EngineDead, InvalidRequest, JaxserveError
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.core.request import OutputDelta, Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.sequence import Sequence
from jaxserve.engine.assembly import assemble
from jaxserve.engine.control_checks import check_controls, constraints_of, make_grammars
from jaxserve.engine.metrics import EngineMetrics
from jaxserve.engine.output import OutputBuilder
from jaxserve.engine.request_checks import check_request
from jaxserve.runner.batch import StepBatch
from jaxserve.runner.launch import Launch
from jaxserve.scheduler.scheduler import Committed
from jaxserve.scheduler.war_barrier import fence_for
from jaxserve.speculative.registry import settled
from jaxserve.text.chat_template import encode_chat
from jaxserve.timeline.recorder import RECORDER, span

log = logging.getLogger(__name__)
SEED_MASK = 2**63 - 1


class Engine:
    """Serves one model. Not thread-safe: one thread adds, aborts and steps.

    Attributes:
        model_name: what the model is called.
        tokenizer, chat_template: from the checkpoint.
        context_length: most tokens of a sequence, prompt and output together.
        metrics: counters, kept exact whatever happens to a request.
    """

    def __init__(self, config: EngineConfig, progress: Callable[[str], None] = lambda message: None):
        self.config = config = settled(config)
        self.progress = progress
        self._late_compiles = 0
        self._race_check = _start_race_check() if config.race_check else None
        try:
            self.parts = parts = assemble(config, progress, self._on_late_compile)
        except BaseException:
            self._end_race_check()
            raise
        self.scheduler = parts.scheduler
        self.tokenizer = parts.checkpoint.tokenizer
        self.chat_template = parts.checkpoint.chat_template
        self.context_length = parts.context_length
        self.model_name = parts.checkpoint.name
        self.model_config = parts.model.config
        self._grammars = make_grammars(config, self.tokenizer, self.model_config)
        self.metrics = EngineMetrics(self)
        self._overlap = not config.disable_overlap_schedule
        self._in_flight: collections.deque[Launch] = collections.deque()  # dispatched, not committed; oldest first
        self._undelivered: list[OutputDelta] = []
        self._busy_since = 0.0
        self._closed = False
        self._outputs: dict[Sequence, OutputBuilder] = {}
        self._requests: dict[str, list[Sequence]] = {}
        self._seeds = random.Random(config.seed if config.seed is not None else secrets.randbits(64))
        if not config.skip_warmup:
            try:
                self.warm_up()
            except BaseException:
                self.close()  # nobody else can
                raise

    # -- the loop ----------------------------------------------------------------------------------------------------

    def step(self) -> list[OutputDelta]:
        """Dispatches the next step, then collects and commits the one before it.

        Never raises for a failed step: the requests it served end with an error delta.

        Raises:
            EngineDead: the engine is closed.
            RaceError: the race check is on and found an access to a shared row that nothing orders.
        """
        self._refuse_if_closed()
        deltas, self._undelivered = self._undelivered, []  # filled as outputs advance: a failure loses none of them
        try:
            if not self._in_flight and self.parts.rows.stream.error:
                # Nothing reads the rows now, so a write that failed late harms nobody.
                log.warning("row writes stopped and start anew: %s", self.parts.rows.recover())
            if not self._in_flight:
                self._busy_since = time.perf_counter()
            ahead = self._dispatch(self._plan())
            while len(self._in_flight) > (1 if ahead and self._overlap else 0):
                step, committed = self._in_flight[0].batch.step_number, self._collect()
                try:
                    if self._overlap and not self._in_flight:  # the plan wanted these tokens; delivering them can wait
                        ahead = self._dispatch(self._plan())
                finally:
                    self._deliver(step, committed, deltas)
        except BaseException as error:
            log.exception("step %d failed", self.scheduler.step_number)
            deltas += self._fail_running(error)
            if not isinstance(error, Exception):  # an interrupt goes on, and the next step delivers
                self._undelivered = deltas
                raise
        if self._race_check is not None:
            self._race_check.check()
        return deltas

    def _plan(self) -> StepBatch[Sequence] | None:
        with span("plan") as planning:
            batch = self.scheduler.plan()
            if batch is not None:
                planning.note(step=batch.step_number, mode=batch.mode.name, batch=len(batch.owners))
                if batch.mode is ForwardMode.TARGET_VERIFY:
                    planning.note(tokens_per_row=batch.queries, drafted=batch.num_drafted)
        return batch

    def _dispatch(self, batch: StepBatch[Sequence] | None) -> bool:
        if batch is None:
            return False
        with span("launch", step=batch.step_number):
            self._in_flight.append(self.scheduler.launch(batch))
        self.metrics.launched(batch)
        return True

    def _collect(self) -> list[Committed]:
        """Blocks for the oldest launch and commits its tokens."""
        launch = self._in_flight[0]
        with span("collect", step=launch.batch.step_number):
            result = launch.collect()
        committed = self.scheduler.commit(launch, result)
        self._in_flight.popleft()
        now = time.perf_counter()
        self.scheduler.timed(launch.batch, now - self._busy_since)
        self._busy_since = now  # the next step is busy from here on, if there is one
        return committed

    def _deliver(self, step: int, tokens: list[Committed], deltas: list[OutputDelta]) -> None:
        """Appends what clients get of a step's tokens, and ends the outputs that are complete."""
        with span("commit", step=step, tokens=len(tokens)) as committing:
            ended: list[Sequence] = []
            for committed in tokens:
                output = self._outputs[committed.sequence]
                if output.finish_reason is not None:
                    continue  # a verified token behind the one that ended the output
                deltas.append(output.push(committed))
                self.metrics.committed(committed, deltas[-1])
                if output.finish_reason is not None:
                    ended.append(committed.sequence)
            for sequence in ended:  # after all pushes: finishing writes rows, and a failure there must cost no token
                self._finish(sequence)
            committing.note(finished=len(ended))
            if RECORDER.on:
                verified = [each for each in tokens if each.verified is not None]
                if verified:
                    committing.note(accepted=sum(each.is_draft for each in verified))

    def _finish(self, sequence: Sequence) -> None:
        reason = self._outputs.pop(sequence).finish_reason
        assert reason is not None
        siblings = self._requests[sequence.request.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._requests[sequence.request.request_id]
        sequence.finish_reason = reason
        self.metrics.finished(sequence)
        self.scheduler.finish(sequence, reason)  # last: it writes rows, which may fail

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do."""
        return bool(self._in_flight or self._undelivered) or self.scheduler.has_work

    @property
    def open_requests(self) -> Collection[str]:
        """Ids of the requests that have an unfinished output."""
        return self._requests.keys()

    # -- requests ----------------------------------------------------------------------------------------------------

    def check(self, prompt_ids: list[int], params: SamplingParams, priority: int = 0) -> int:
        """Checks a request against the model and the pool; returns the most tokens each output may have in all.

        Raises:
            InvalidRequest: what was wanted, what came, what to do.
        """
        self.check_controls(params)
        return check_request(prompt_ids, params, priority, self.config, self.parts)

    def check_controls(self, params: SamplingParams) -> None:
        """The part of ``check`` that needs no prompt. A grammar is compiled here, on the caller's thread, and kept."""
        check_controls(params, self.model_config.vocab_size, self.model_config.eos_token_ids, self._grammars)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            InvalidRequest: it cannot be served.
            CapacityError: the queue is full.
            EngineDead: the engine is closed.
        """
        self._refuse_if_closed()
        max_total = self.check(list(request.prompt_ids), request.params, request.priority)
        if request.request_id in self._requests:
            raise InvalidRequest(f"request id {request.request_id!r} is already in use", param="request_id")
        if not self.has_room(request.params.n):
            raise CapacityError(
                f"{len(self.scheduler.waiting)} sequences are waiting, the limit is {self.config.max_queued_requests} "
                "(--max-queued-requests); try again later", status=429,
            )  # fmt: skip
        constraints = constraints_of(request, self._grammars)
        self.metrics.accepted(request)
        sequences = []
        for index in range(request.params.n):
            sequence = Sequence(request, index, self._seed(request.params.seed, index), max_total,
                                list(request.prompt_ids), constraint=constraints[index])  # fmt: skip
            self._outputs[sequence] = OutputBuilder(
                sequence, self.tokenizer, self.model_config.eos_token_ids,
                speculative=self.scheduler.speculation is not None,
            )  # fmt: skip
            self.scheduler.add(sequence)
            sequences.append(sequence)
        self._requests[request.request_id] = sequences

    def has_room(self, count: int) -> bool:
        """Whether ``count`` more sequences may be queued now."""
        room = self.config.max_queued_requests + len(self.scheduler.free_slots)
        return len(self.scheduler.waiting) + count <= room

    def _seed(self, seed: int | None, index: int) -> int:
        if seed is None:
            return self._seeds.getrandbits(63)
        # Outputs of one seeded request differ from each other and are the same every time.
        return (seed + index * 0x9E3779B97F4A7C15) & SEED_MASK if index else seed

    def abort(self, request_id: str) -> list[OutputDelta]:
        """Ends a request wherever it is; returns the last deltas of its outputs. Unknown ids are ignored."""
        deltas: list[OutputDelta] = []
        try:
            for sequence in list(self._requests.get(request_id, ())):
                deltas.append(self._outputs[sequence].end("abort"))
                self._finish(sequence)
        except Exception as error:
            log.exception("a row could not be cleared")
            deltas += self._fail_running(error)
        return deltas

    def flush_cache(self) -> int:
        """Forgets cached prefixes; returns the number of pages that are free now.

        Raises:
            CapacityError: requests are running or waiting, which would cache their pages anew.
        """
        if self.has_work:
            raise CapacityError("the prefix cache is not flushed while requests run; try again when the server is idle")
        return self.scheduler.memory.forget_all()

    def encode_chat(self, messages: list[dict], *, template: str | None = None, **options: Any) -> list[int]:
        """Token ids of a conversation by a chat template, the model's own by default; ``options`` as those of
        ``jaxserve.text.chat_template.encode_chat``. Raises InvalidRequest."""
        own = self.chat_template
        if options.get("tools"):
            own = self.parts.checkpoint.tool_chat_template or own
        return encode_chat(self.tokenizer, template or own, messages, **options)

    # -- failure -----------------------------------------------------------------------------------------------------

    def _fail_running(self, error: BaseException) -> list[OutputDelta]:
        """After a failed execution: the donated pool is gone, so every sequence that had KV in it fails. Waiting
        requests are served as if nothing had happened."""
        worker = self.parts.worker
        # Rows may not be rewritten, nor memory taken again, under a launch that still runs. It ends by itself: what it
        # waits for times out.
        deadline = time.monotonic() + self.config.fence_timeout_s
        for launch in self._in_flight:
            journal.gave_up(launch.number)
            launch.settle(deadline - time.monotonic())
        self._in_flight.clear()
        worker.give_up()
        stream_error = self.parts.rows.recover()
        worker.reset_device_state()
        self.scheduler.memory.forget_all()  # the pages are zeros now
        deltas = []
        message = f"{type(error).__name__}: {error}"
        if stream_error is not None:  # the cause; the step only met its consequence
            message = f"row writes stopped: {stream_error} ({message})"
        lost = [s for s in self._outputs if s in self.scheduler.running or s.num_in_flight]
        for sequence in lost:
            sequence.num_in_flight, sequence.awaits_verify = 0, False
            deltas.append(self._outputs[sequence].end("error", error=message))
            self._finish(sequence)
        return deltas

    # -- life --------------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Compiles every program and runs one prefill and one decode step, so that the first request is not special."""
        start = time.monotonic()
        worker = self.parts.worker
        total, done = sum(len(keys) for runner in worker.step_runners for keys in runner.program_keys()), 0

        def report(label: str, seconds: float) -> None:
            nonlocal done
            done += 1
            self.progress(f"compiling programs {done}/{total}: {label} ({seconds:.1f} s)")

        worker.warm_up(report)
        pool_tokens = self.scheduler.pool.num_usable * self.scheduler.pool.page_size
        budget = max(1, min(2, self.context_length - 1, pool_tokens - 1))
        self.add(Request("warm-up", (0,), SamplingParams(max_tokens=budget, temperature=0.0, ignore_eos=True)))
        while self.has_work:
            for delta in self.step():
                if delta.error is not None:
                    raise JaxserveError(f"the warm-up step failed: {delta.error}")
        self.scheduler.memory.forget_all()  # the warm-up's own
        self.metrics.reset()
        self.progress(f"ready after {time.monotonic() - start:.1f} s of warm-up")

    def _on_late_compile(self, label: str) -> None:
        self._late_compiles += 1
        log.warning("compiled %s while serving; requests waited for it", label)

    @property
    def num_late_compiles(self) -> int:
        """Programs compiled after warm-up. Should stay 0."""
        return self._late_compiles

    def fences_in_use(self) -> dict[str, dict[str, str]]:
        """Per forward mode: where the backend declares that reads end, where they end, and the fence of such a step."""
        worker, barrier = self.parts.worker, self.scheduler.barrier
        found = {}
        for mode in worker.step_runner.modes():
            declared, resolved = worker.read_ends(mode)
            cleared = worker.coarse_reason(mode)
            fence = fence_for(
                resolved, mode, force_coarse=barrier.force_coarse, disabled=barrier.disabled,
                published=None if cleared is None else False, coarse_reason=cleared,
            )  # fmt: skip
            found[mode.name] = {"declared": declared.name, "resolved": resolved.name, "fence": ":".join(fence)}
        return found

    def close(self) -> None:
        """Ends what is in flight and frees the fences; nothing can be served afterwards. Idempotent."""
        self._closed = True
        self._in_flight.clear()
        self.parts.worker.close()
        if self.scheduler.speculation is not None:
            self.scheduler.speculation.algorithm.close()
        self._end_race_check()

    def _end_race_check(self) -> None:
        if self._race_check is not None:
            self._race_check.close()
            self._race_check = None

    def _refuse_if_closed(self) -> None:
        if self._closed:  # its launches would be fenced by nothing
            raise EngineDead("this engine is closed; make a new one")


def _start_race_check() -> RaceCheck:
    log.warning("the race check is on: every access to a shared row is checked after each step, which takes longer")
    return RaceCheck()
