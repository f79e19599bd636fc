"""Workers: which runners a step uses, and whose read-done event counts."""

from __future__ import annotations

from collections.abc import Callable

from jaxserve.attention.base import SharedReadEnds
from jaxserve.barrier import journal
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.runner.batch import StepBatch
from jaxserve.runner.draft_runner import DraftRunner
from jaxserve.runner.launch import Launch
from jaxserve.runner.model_runner import ModelRunner
from jaxserve.runner.phase_runner import PhaseRunner
from jaxserve.runner.program_cache import ProgramCache
from jaxserve.runner.step_runner import StepRunner


class TargetWorker:
    """Runs the target model alone: every step is one launch of one runner."""

    def __init__(self, model_runner: ModelRunner, step_runner: StepRunner):
        self.model_runner = model_runner
        self.step_runner = step_runner

    @property
    def last_shared_read_runner(self) -> ModelRunner:
        """The runner whose launch reads shared rows last in a step: the sole owner of the barrier's event."""
        return self.model_runner

    @property
    def step_runners(self) -> list[PhaseRunner]:
        """Everything that launches programs, in the order of a step; metrics add up what they count."""
        return [self.step_runner]

    @property
    def model_runners(self) -> list[ModelRunner]:
        """The models it runs, each with its own pool and fences."""
        return list(dict.fromkeys(runner.runner for runner in self.step_runners))

    @property
    def program_caches(self) -> list[ProgramCache]:
        """Every compiled program of a step."""
        return [cache for runner in self.step_runners for cache in (runner.steps, runner.preps)]

    def execute(self, batch: StepBatch, write_done: int, wants_logprobs: bool) -> Launch:
        """Launches a planned step."""
        return self.step_runner.execute(batch, write_done, wants_logprobs)

    def coarse_reason(self, mode: ForwardMode) -> str | None:
        """Why it clears the mailbox after steps of this mode, see ``Launch.coarse_reason``; None: it does not."""
        return None

    def read_ends(self, mode: ForwardMode) -> tuple[SharedReadEnds, SharedReadEnds]:
        """Where the last reads of a step of this mode end: declared, and resolved."""
        return self.step_runner.read_ends(mode)

    def warm_up(self, progress: Callable[[str, float], None]) -> None:
        """Compiles every program of every runner."""
        for runner in self.step_runners:
            runner.warm_up(progress)

    def give_up(self) -> None:
        """After a failed execution, with nothing in flight: no record is owed any more, and every mailbox is empty."""
        for runner in self.model_runners:
            runner.channel.abandon_all()
            runner.shared_read_done_event = None

    def reset_device_state(self) -> None:
        """Fresh pools and relays, after ``give_up``."""
        for runner in self.model_runners:
            runner.reset_device_state()

    def close(self) -> None:
        """Waits for the launches in flight and lets go of the fences."""
        for runner in reversed(self.model_runners):
            runner.close()


class DraftWorker(TargetWorker):
    """Runs a draft model behind every launch of the target model, or its layers one after the other.

    The programs of the last draft runner read shared rows last, so its runner owns the event; what the target's and
    those before it publish is never looked at.

    Attributes:
        draft_runners: in the order of a step.
        draft_runner: the last of them, whose drafts are verified.
    """

    def __init__(self, model_runner: ModelRunner, step_runner: StepRunner, *draft_runners: DraftRunner):
        super().__init__(model_runner, step_runner)
        self.draft_runners = draft_runners
        self.draft_runner = draft_runners[-1]
        step_runner.draft_source = self.draft_runner

    @property
    def last_shared_read_runner(self) -> ModelRunner:
        return self.draft_runner.runner

    @property
    def step_runners(self) -> list[PhaseRunner]:
        return [self.step_runner, *self.draft_runners]

    def read_ends(self, mode: ForwardMode) -> tuple[SharedReadEnds, SharedReadEnds]:
        return self.draft_runner.read_ends(self.draft_runner.mode_behind(mode))

    def execute(self, batch: StepBatch, write_done: int, wants_logprobs: bool) -> Launch:
        self.last_shared_read_runner.shared_read_done_event = None  # the step starts; its last phase may never
        shape, inputs = self.step_runner.inputs(batch)
        launch = self.step_runner.execute_inputs(batch, shape, inputs, write_done, wants_logprobs)
        try:
            for runner in self.draft_runners:
                launch = launch.followed_by(runner.execute(batch, launch, inputs, write_done))
            return launch
        except BaseException:
            # The step fails, but what was launched runs, and reads rows that whoever recovers is about to write.
            for number in (launch.number, *(phase.number for phase in launch.later)):
                journal.gave_up(number)
            launch.settle(self.model_runner.config.fence_timeout_s)
            raise


class BlockDraftWorker(DraftWorker):
    """As ``DraftWorker``, with a draft model that reads no shared row: the target's runner owns the event."""

    @property
    def last_shared_read_runner(self) -> ModelRunner:
        return self.model_runner

    def read_ends(self, mode: ForwardMode) -> tuple[SharedReadEnds, SharedReadEnds]:
        return self.step_runner.read_ends(mode)
