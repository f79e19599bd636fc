"""Every program of an engine configuration, compiled and examined without weights and, for an H100, without a GPU."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.attention.base import SharedReadEnds
from jaxserve.attention.paged_kv import KVLayout
from jaxserve.attention.registry import make_backend
from jaxserve.barrier.native import native_module
from jaxserve.barrier.shared_rows import RowLayout
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.shapes import ceil_div
from jaxserve.engine.assembly import pool_pages, resolve_model_path
from jaxserve.models.loading.checkpoint import open_model_config
from jaxserve.models.loading.weights import abstract_model
from jaxserve.runner.buckets import make_buckets
from jaxserve.runner.captured_steps import CapturedSteps
from jaxserve.runner.graph_mode import make_graph_mode
from jaxserve.runner.lowering import lower_with_all_arguments
from jaxserve.runner.phase_runner import PhaseRunner
from jaxserve.runner.program_cache import ProgramCache
from jaxserve.runner.step_program import CHAIN, ProgramKey
from jaxserve.runner.step_runner import StepRunner
from jaxserve.speculative.base import AlgorithmContext
from jaxserve.speculative.draft_model import DraftModelAlgorithm
from jaxserve.speculative.registry import find_algorithm, make_algorithm, settled, verify_tokens_of
from jaxserve.testing import deviceless
from jaxserve.testing.hlo_text import parse_module
from jaxserve.testing.program_report import ProgramReport, examine, fence_of
from jaxserve.testing.step_programs import donated_parameters
from jaxserve.testing.thunk_sequence import SEQUENCE, GraphUse, graph_use, read_thunks

TARGETS = ("cpu", "h100")


@dataclasses.dataclass(frozen=True)
class Program:
    """One program of a configuration, not compiled yet."""

    runner: PhaseRunner
    cache: ProgramCache
    key: ProgramKey
    ends: SharedReadEnds | None

    @property
    def name(self) -> str:
        """``step decode[batch=8,tokens=1,width=16]``."""
        return f"{self.cache.kind} {self.key.label}"


def _donated(program: Program, num_leaves: int) -> dict[str, int]:
    if program.runner.kind == "draft":
        return {"pool": num_leaves, "drafts": num_leaves + 1}
    return donated_parameters(num_leaves, has_lengths=program.key.hands_over)


def _encode(text: str) -> list[int]:
    return []  # no tokenizer is read here


class ConfigurationPrograms:
    """The programs an engine with this configuration would compile at start.

    Args:
        config: engine settings. Of the model only ``config.json``, or the header of the GGUF file, is read.
        target: ``"cpu"`` or ``"h100"``.
        verify_tokens: tokens per row of verify programs to add; none exist without speculation.

    Raises:
        ConfigError: settings that cannot work, a native extension that is not built, or a target that cannot be
            compiled for here.
        ModelLoadError: the model's configuration.
    """

    def __init__(self, config: EngineConfig, target: str = "cpu", verify_tokens: tuple[int, ...] = ()):
        if target not in TARGETS:
            raise ConfigError(f"--target must be one of {', '.join(TARGETS)}, got {target!r}")
        if target == "h100" and (reason := deviceless.why_not()):
            raise ConfigError(f"can't compile for an H100: {reason}")
        platform = "cpu" if target == "cpu" else "cuda"
        native_module(platform)
        # Notes of the race check are reads behind the marker, by design.
        config = settled(dataclasses.replace(config, race_check=False))
        self.target = target
        model_config = open_model_config(resolve_model_path(config.model))
        dtype = ("float32" if platform == "cpu" else "bfloat16") if config.dtype == "auto" else config.dtype
        backend = make_backend(config, platform, dtype, model_config.attention_sinks)
        context_length = config.context_length or model_config.max_position_embeddings
        buckets = make_buckets(config, context_length, backend.width_buckets, verify_tokens or verify_tokens_of(config))
        name = config.speculative_algorithm
        drafts = CHAIN if name is None else find_algorithm(name).draft_form(config)
        one_page = KVLayout(
            model_config.num_layers, model_config.num_kv_heads, model_config.head_dim, 1, config.page_size,
            jnp.dtype(dtype),
        )  # fmt: skip
        self._kv = dataclasses.replace(one_page, num_pages=pool_pages(config, one_page, context_length, 1 << 62))
        model = abstract_model(model_config, jnp.dtype(dtype))
        algorithm = make_algorithm(AlgorithmContext(config, model_config.vocab_size, _encode, jnp.dtype(dtype)))
        if isinstance(algorithm, DraftModelAlgorithm):
            algorithm.load_abstract(model)
        graph = make_graph_mode(config, platform, backend, 1, model_config)
        # As much of a ModelRunner as programs are made from: sizes, and no array.
        runner: Any = SimpleNamespace(
            backend=backend,
            model=model,
            kv=self._kv,
            rows=SimpleNamespace(
                layout=RowLayout(
                    config.max_running_requests,
                    ceil_div(context_length, config.page_size),
                    num_drafts=0 if drafts.is_relayed else buckets.most_drafts,
                )
            ),
            config=config,
            has_marker=config.shared_read_marker,
            graph=graph,
            captured=CapturedSteps(None) if graph.captures else None,
        )
        self._has_marker = config.shared_read_marker
        step_runner = StepRunner(
            runner, buckets, lambda label: None, drafts=drafts,
            feature_points=() if algorithm is None else algorithm.feature_points,
        )  # fmt: skip
        self._runners: list[PhaseRunner] = [step_runner]
        if isinstance(algorithm, DraftModelAlgorithm):
            kv = algorithm.kv_layout(self._kv.num_pages, config.page_size)
            for number, draft_model in enumerate(algorithm.models):
                draft: Any = SimpleNamespace(**vars(runner) | {"model": draft_model, "kv": kv})
                self._runners.append(algorithm.make_draft_runner(draft, step_runner, number))

        for each in self._runners:
            each.has_greedy_programs = target != "cpu"

    def programs(self) -> list[Program]:
        """All of them: of each runner preps first, then steps, each as the engine orders them."""
        return [program for runner in self._runners for program in self._programs(runner)]

    @staticmethod
    def _programs(runner: PhaseRunner) -> list[Program]:
        steps, preps = runner.program_keys()
        modes = {key.shape.mode for key in steps}
        ends = {mode: runner._resolve_shared_read_ends(mode) if runner.reads_shared_rows else None for mode in modes}
        caches = [(runner.preps, preps), (runner.steps, steps)]
        return [Program(runner, cache, key, ends[key.shape.mode]) for cache, keys in caches for key in keys]

    def reports(self) -> Iterator[ProgramReport]:
        """Compiles and examines one program after the other."""
        return (self.report(program) for program in self.programs())

    def report(self, program: Program) -> ProgramReport:
        """Compiles a program and examines it."""
        is_prep = program.cache is program.runner.preps
        num_leaves = len(program.runner.runner.model.leaves)
        start = time.monotonic()
        text, graphs = self._compile(program)
        return examine(
            program.name,
            text,
            fence_of(program.key.source, program.ends, is_prep=is_prep, has_marker=self._has_marker),
            program.ends,
            donated={} if is_prep else _donated(program, num_leaves),
            pool_shape=None if is_prep else program.runner.runner.kv.shape,
            drafts=program.key.drafts,
            seconds=time.monotonic() - start,
            graphs=graphs,
        )

    def _compile(self, program: Program) -> tuple[str, GraphUse | None]:
        function, arguments = program.cache.traceable(program.key)
        donate = program.cache.donate
        if self.target == "cpu":
            with jax.default_device(jax.local_devices(backend="cpu")[0]):
                return lower_with_all_arguments(function, arguments, donate).compile().as_text() or "", None
        with tempfile.TemporaryDirectory(prefix="jaxserve-thunks-") as folder:
            graph = program.cache.graph
            options: dict[str, object] = {"xla_dump_to": folder, **graph.options}
            with graph.tracing(program.key.shape.mode):
                compiled = deviceless.compile_for_h100(function, *arguments, donate=donate, options=options)
            text = compiled.as_text() or ""
            if not list(Path(folder).glob(f"*{SEQUENCE}")):  # XLA was told to make no graphs
                return text, None
            return text, graph_use(read_thunks(Path(folder), parse_module(text)))
