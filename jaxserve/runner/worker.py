"""Workers: which runners a step uses, and whose read-done event counts."""

from __future__ import annotations

from jaxserve.core.forward_mode import ForwardMode
from jaxserve.runner.batch import StepBatch
from jaxserve.runner.launch import Launch
from jaxserve.runner.model_runner import ModelRunner
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
    def step_runners(self) -> list[StepRunner]:
        """Everything that launches steps; metrics add up what they count."""
        return [self.step_runner]

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

    def close(self) -> None:
        """Waits for the launch in flight and lets go of the fences."""
        self.model_runner.close()
