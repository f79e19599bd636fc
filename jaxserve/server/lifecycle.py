"""Where the server is in its life: loading, ready, draining, or failed. Shared by all endpoints of an app."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from jaxserve.server.engine_protocol import EngineLike
from jaxserve.server.errors import NotServing

if TYPE_CHECKING:
    from jaxserve.server.generation import Generation

Stage = Literal["loading", "ready", "draining", "failed"]


class Lifecycle:
    """Holds the engine once there is one. Only the server's event loop touches it.

    Attributes:
        stage: ``loading`` until ``serve_with``; ``draining`` once asked to stop.
        active: generations whose client still waits.
        failure: why loading failed, when it did.
    """

    def __init__(self, engine: EngineLike | None = None):
        self.stage: Stage = "loading"
        self.active: set[Generation] = set()
        self.failure: str | None = None
        self._engine: EngineLike | None = None
        if engine is not None:
            self.serve_with(engine)

    def serve_with(self, engine: EngineLike) -> None:
        """From here on requests are answered by this engine."""
        self._engine = engine
        self.stage = "ready"

    def fail(self, reason: str) -> None:
        """Loading did not work; nothing will ever be served."""
        self.stage = "failed"
        self.failure = reason

    def begin_drain(self) -> None:
        """New requests are refused; running ones go on."""
        self.stage = "draining"

    def end_active(self) -> int:
        """Ends every running generation with a "shutting down" error; says how many there were."""
        ending = list(self.active)
        for generation in ending:
            generation.end_for_shutdown()
        return len(ending)

    @property
    def loaded_engine(self) -> EngineLike | None:
        """The engine whatever the stage, or None while there is none."""
        return self._engine

    def engine(self) -> EngineLike:
        """The engine, for a new request.

        Raises:
            NotServing: still loading, shutting down, or loading failed.
        """
        if self.stage == "ready":
            assert self._engine is not None
            return self._engine
        if self.stage == "loading":
            raise NotServing("the model is still loading; retry when /health/ready says 200", code="loading")
        if self.stage == "draining":
            raise NotServing("the server is shutting down; send the request elsewhere", code="shutting_down")
        raise NotServing(f"the model could not be loaded: {self.failure}", code="load_failed", retry_after_s=60)

    def why_not_ready(self) -> str | None:
        """None when a request sent now would be answered at normal speed."""
        try:
            state = self.engine().state()
        except NotServing as error:
            return error.message
        if state.get("dead"):
            return f"the engine has stopped: {state['dead']}"
        return None if state.get("ready", True) else "the engine is warming up"
