"""CUDA graphs of decode and verify steps that our extension captures and replays: what they need, and their figures."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from jaxserve.attention.base import AttentionBackend
from jaxserve.attention.hybrid import HybridBackend
from jaxserve.attention.paged_cuda import HEAD_DIMS, PagedCudaBackend
from jaxserve.core.errors import ConfigError
from jaxserve.models.captured import can_be_captured
from jaxserve.models.config import ModelConfig
from jaxserve.models.registry import registered_model_for

# Where the packages that jax[cuda13] and jax[cuda12] bring along have cuBLAS, and what the loader calls it.
_PACKAGED = (("nvidia.cu13", "libcublas.so.13"), ("nvidia.cublas", "libcublas.so.12"))


@dataclass(frozen=True)
class ReplayCounts:
    """What became of the steps so far.

    Attributes:
        uncaptured: ran as they are, once for each program and whenever something had moved.
        captured: graphs made; ``moved``: of those, because an address had changed.
        replayed: launches of graphs.
        nodes: of the newest graph.
        capture_ns: spent on making them.
        arena_bytes: device memory for what steps read and write, outside of XLA's pool.
    """

    uncaptured: int
    captured: int
    moved: int
    replayed: int
    nodes: int
    capture_ns: int
    arena_bytes: int


class CapturedSteps:
    """The captured steps of one runner.

    Args:
        module: the CUDA extension; None: programs are compiled for another machine, and run nowhere.

    Attributes:
        number: by which programs name them.
        target: FFI target of a captured step.

    Raises:
        ConfigError: no cuBLAS that works, or no memory for what it needs.
    """

    target = "jaxserve_captured_step"

    def __init__(self, module: ModuleType | None):
        self._native = None if module is None else module.captured_steps
        try:
            self.number: int = 1 if self._native is None else self._native.open(cublas_libraries())
        except RuntimeError as error:
            raise ConfigError(f"--graph-backend cuda-graph cannot be used here: {error}") from error

    def reserve(self, **sizes: int) -> None:
        """Makes room for a step of these sizes, see ``csrc/cuda/decoder/bindings.cc``."""
        if self._native is not None:
            self._native.reserve(self.number, **sizes)

    def counts(self) -> ReplayCounts | None:
        """What became of the steps so far; None where none run."""
        return None if self._native is None else ReplayCounts(**self._native.counts(self.number))

    def replay_ms(self, batch: int, queries: int = 1, repeats: int = 20) -> float | None:
        """Milliseconds of one replay of the graph of steps of this many sequences and tokens; None if there is none.

        Replays follow each other, with nothing in between: what a step takes at the least. For an engine that is idle.
        """
        found = 0.0 if self._native is None else self._native.time_replays(self.number, batch, queries, repeats)
        return found or None

    def close(self) -> None:
        """Frees graphs and memory; no step may be running. Idempotent."""
        if self._native is not None:
            self._native.close(self.number)


def cublas_libraries() -> list[str]:
    """Names and paths of cuBLAS, likeliest first. A name finds the one that XLA has loaded, if it has."""
    names = [library for _, library in _PACKAGED]
    paths = []
    for package, library in _PACKAGED:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in (spec.submodule_search_locations if spec else None) or ():
            paths.append(str(Path(folder) / "lib" / library))
    return [*names, *paths]


def why_not_captured(config: ModelConfig, backend: AttentionBackend) -> str | None:
    """Why steps of a model cannot be captured; None if they can."""
    model_class = registered_model_for(config).model_class
    if not can_be_captured(model_class):
        return f"{config.architecture} has no decoder_parts of its own (Llama and Qwen3 have)"
    if isinstance(backend, HybridBackend):
        backend = backend.decode if backend.sliding is None else backend.sliding
    if type(backend) is not PagedCudaBackend:
        return f"its graphs hold the kernel of paged-cuda, and the attention backend is {backend.name!r}"
    if config.head_dim not in HEAD_DIMS:
        return f"its attention kernel has head dimensions {', '.join(map(str, HEAD_DIMS))}, not {config.head_dim}"
    for name, value in (("hidden_size", config.hidden_size), ("intermediate_size", config.intermediate_size)):
        if value % 8:
            return f"its kernels want a {name} that is a multiple of 8, got {value}"
    return None
