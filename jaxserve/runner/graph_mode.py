"""How programs reach a GPU: kernel by kernel, as CUDA graphs that XLA makes of them, or as graphs that we capture."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from jaxserve.attention.base import AttentionBackend, SharedReadEnds
from jaxserve.barrier import ops
from jaxserve.barrier.native import ffi_platform
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.models.config import ModelConfig
from jaxserve.runner.captured_steps import why_not_captured

_MODES_IN_GRAPHS = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY)
_NO_COMMAND_BUFFERS = {"xla_gpu_enable_command_buffer": ""}
# By default XLA launches kernel by kernel while its profiler is on, and a profile shows what otherwise never runs.
_COMMAND_BUFFERS = {"xla_enable_command_buffers_during_profiling": True}


@dataclass(frozen=True)
class GraphMode:
    """What a runner's programs are compiled and launched with.

    Attributes:
        name: ``jit`` (CPU), ``xla``, ``xla-cmdbuf``, or ``cuda-graph``.
        options: XLA compiler options.
        channel: number of the fence channel whose fixed events graphs hold; None: the markers stay outside of graphs.
    """

    name: str = "jit"
    options: Mapping[str, str | bool] = field(default_factory=dict)
    channel: int | None = None

    @property
    def captures(self) -> bool:
        """Whether our extension captures decode and verify steps."""
        return self.name == "cuda-graph"

    def holds_markers(self, mode: ForwardMode) -> bool:
        """Whether programs of ``mode`` have the snapshot and the end record inside their graph."""
        return self.channel is not None and mode in _MODES_IN_GRAPHS

    def tracing(self, mode: ForwardMode) -> AbstractContextManager[None]:
        """To be entered while a program of ``mode`` is traced."""
        if self.channel is None or not self.holds_markers(mode):
            return contextlib.nullcontext()
        return ops.markers_in_graph(self.channel)


def make_graph_mode(
    config: EngineConfig, platform: str, backend: AttentionBackend, channel: int, model: ModelConfig
) -> GraphMode:
    """What a configuration asks for on a platform.

    Args:
        backend: of the programs.
        channel: number of the runner's fence channel.
        model: what the programs compute.

    Raises:
        ConfigError: it cannot work, with the reason.
    """
    inside = config.graph_snapshot == "inside"
    if ffi_platform(platform) != "CUDA":
        if inside:
            raise ConfigError(f"--graph-snapshot inside needs CUDA graphs, and this is {platform}; leave it out")
        return GraphMode()
    if config.graph_backend in ("xla", "cuda-graph"):
        if inside:
            raise ConfigError(
                f"--graph-snapshot inside needs --graph-backend xla-cmdbuf: with {config.graph_backend} XLA makes no "
                "graphs"
            )
        if config.graph_backend == "xla":
            return GraphMode("xla", _NO_COMMAND_BUFFERS)
        if reason := why_not_captured(model, backend):
            raise ConfigError(
                f"--graph-backend cuda-graph cannot capture decode steps of this model: {reason}; choose xla or "
                "xla-cmdbuf"
            )
        return GraphMode("cuda-graph", _NO_COMMAND_BUFFERS)
    if not inside:
        return GraphMode("xla-cmdbuf", _COMMAND_BUFFERS)
    if not config.shared_read_marker:
        raise ConfigError("--graph-snapshot inside needs the read-done marker; leave --no-shared-read-marker out")
    for mode in _MODES_IN_GRAPHS:
        if backend.shared_read_ends(mode) is not SharedReadEnds.IN_REPLAY:
            raise ConfigError(
                f"--graph-snapshot inside needs an attention backend whose reads end at the marker (IN_REPLAY) in "
                f"{mode.name}, and {backend.name!r} is not one; choose xla or paged-cuda"
            )
    return GraphMode("xla-cmdbuf", _COMMAND_BUFFERS, channel)
