"""How programs reach a GPU: kernel by kernel, or as CUDA graphs that XLA makes of them."""

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

_MODES_IN_GRAPHS = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY)
_WHY_NO_CUDA_GRAPH = (
    "--graph-backend cuda-graph cannot serve: capturing an XLA execution would also capture what PJRT does around it "
    "(host callbacks that free buffers, events of its own), and buffers would not stay where the graph expects them; "
    "see docs/h100.md. Choose xla or xla-cmdbuf"
)


@dataclass(frozen=True)
class GraphMode:
    """What a runner's programs are compiled and launched with.

    Attributes:
        name: ``jit`` (CPU), ``xla``, or ``xla-cmdbuf``.
        options: XLA compiler options.
        channel: number of the fence channel whose fixed events graphs hold; None: the markers stay outside of graphs.
    """

    name: str = "jit"
    options: Mapping[str, str] = field(default_factory=dict)
    channel: int | None = None

    def holds_markers(self, mode: ForwardMode) -> bool:
        """Whether programs of ``mode`` have the snapshot and the end record inside their graph."""
        return self.channel is not None and mode in _MODES_IN_GRAPHS

    def tracing(self, mode: ForwardMode) -> AbstractContextManager[None]:
        """To be entered while a program of ``mode`` is traced."""
        if self.channel is None or not self.holds_markers(mode):
            return contextlib.nullcontext()
        return ops.markers_in_graph(self.channel)


def make_graph_mode(config: EngineConfig, platform: str, backend: AttentionBackend, channel: int) -> GraphMode:
    """What a configuration asks for on a platform.

    Args:
        backend: of the programs.
        channel: number of the runner's fence channel.

    Raises:
        ConfigError: it cannot work, with the reason.
    """
    inside = config.graph_snapshot == "inside"
    if config.graph_backend == "cuda-graph":
        raise ConfigError(_WHY_NO_CUDA_GRAPH)
    if ffi_platform(platform) != "CUDA":
        if inside:
            raise ConfigError(f"--graph-snapshot inside needs CUDA graphs, and this is {platform}; leave it out")
        return GraphMode()
    if config.graph_backend == "xla":
        if inside:
            raise ConfigError("--graph-snapshot inside needs --graph-backend xla-cmdbuf: xla makes no graphs")
        return GraphMode("xla", {"xla_gpu_enable_command_buffer": ""})
    if not inside:
        return GraphMode("xla-cmdbuf")
    if not config.shared_read_marker:
        raise ConfigError("--graph-snapshot inside needs the read-done marker; leave --no-shared-read-marker out")
    for mode in _MODES_IN_GRAPHS:
        if backend.shared_read_ends(mode) is not SharedReadEnds.IN_REPLAY:
            raise ConfigError(
                f"--graph-snapshot inside needs an attention backend whose reads end at the marker (IN_REPLAY) in "
                f"{mode.name}, and {backend.name!r} is not one; choose xla or paged-cuda"
            )
    return GraphMode("xla-cmdbuf", channel=channel)
