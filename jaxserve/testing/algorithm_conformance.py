"""Does a speculative algorithm keep the promises serving relies on?

    from jaxserve.testing import algorithm_conformance
    def test_my_algorithm():
        algorithm_conformance(MyAlgorithm)

What it proposes is examined by itself; then a small random model is served with it, and must say, token for token, what
it says without: several page sizes, with and without overlap, greedy and sampled. Behind every barrier all shared rows
are overwritten, with drafts that would hold where others were read: a worker that lets the scheduler write before its
verify step has read its drafts changes tokens.

Draft models fit one target, so their algorithms are examined with a target and a draft of the caller's choice:

    algorithm_conformance("EAGLE3", settings={"model": target, "speculative_draft_model_path": head})
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxserve.barrier.native import native_module
from jaxserve.bench.models import MODELS, NUM_WORDS, write_model
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import JaxserveError
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.runner.step_program import DraftRows
from jaxserve.speculative.base import AlgorithmContext, SpeculativeAlgorithm
from jaxserve.speculative.registry import find_algorithm, temporarily_registered
from jaxserve.speculative.trees import depths_of
from jaxserve.testing.poison import Poison, known_future

NUM_DRAFT_TOKENS = 6
CONTEXT, SLOTS = 128, 3
STALL_US = 6000  # long enough for the schedule stream to wake and write on a busy machine
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 5},
    "controlled": {
        "temperature": 0.0, "frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.2,
        "logit_bias": {3: 2.0, 5: -4.0}, "min_tokens": 1,
    },
}  # fmt: skip
LATE_ACCEPTANCE = "drafts.before_acceptance", STALL_US
LATE_READS = "snapshot.before_reads", STALL_US // 3  # passed by every launch of a step, those of draft models too


class AlgorithmConformanceError(JaxserveError, AssertionError):
    """An algorithm breaks its contract; the message says where."""


@dataclass
class AlgorithmReport:
    """What ``algorithm_conformance`` saw.

    Attributes:
        algorithm: its name.
        violations: everything wrong; empty for an algorithm that conforms.
        notes: what its author may want to know.
        num_drafted, num_accepted: over all runs.
    """

    algorithm: str
    violations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_drafted: int = 0
    num_accepted: int = 0


def algorithm_conformance(
    algorithm: type[SpeculativeAlgorithm] | str,
    *,
    page_sizes: Sequence[int] = (1, 4),
    settings: dict[str, Any] | None = None,
) -> AlgorithmReport:
    """Examines an algorithm and raises if it breaks its contract.

    Args:
        algorithm: a class, or the name of a built-in or registered one.
        page_sizes: tokens per KV page to serve with.
        settings: further fields of ``EngineConfig``; those of speculation hold where there is some. ``model``: serve
            this one, of at least 250 ids, instead of a random one.

    Raises:
        AlgorithmConformanceError: it does; the message lists every violation.
        ConfigError: an unknown name, or a class that cannot be registered.
    """
    report = examine_algorithm(algorithm, page_sizes=page_sizes, settings=settings)
    if report.violations:
        raise AlgorithmConformanceError(f"{report.algorithm}: " + "; ".join(report.violations))
    return report


def examine_algorithm(
    algorithm: type[SpeculativeAlgorithm] | str,
    *,
    page_sizes: Sequence[int] = (1, 4),
    settings: dict[str, Any] | None = None,
) -> AlgorithmReport:
    """As ``algorithm_conformance``, but returns what is wrong instead of raising it."""
    with contextlib.ExitStack() as stack:
        if not isinstance(algorithm, str):
            algorithm = stack.enter_context(temporarily_registered(algorithm))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxserve-conformance-")))
        settings = dict(settings or {})
        if "model" not in settings:
            settings |= {"model": str(write_model(folder / "model", MODELS["tiny"], CONTEXT)), "load_format": "dummy"}
        suite = _Suite(algorithm, settings)
        suite.check_proposals()
        if not suite.report.violations:  # an engine would only say the same, less clearly
            suite.check_tokens(page_sizes)
        return suite.report


class _Suite:
    """One examination."""

    def __init__(self, name: str, settings: dict[str, Any]):
        self.report = AlgorithmReport(name)
        self._name = name
        speculative = {field for field in settings if field.startswith("speculative_")}
        self._settings: dict[str, Any] = {
            "context_length": CONTEXT, "max_running_requests": SLOTS, "decode_batch_buckets": (SLOTS,),
            "chunked_prefill_size": 16, "prefill_token_buckets": (16,), "skip_warmup": True, "hold_points": True,
            "fence_timeout_s": 20.0, **{field: settings[field] for field in settings if field not in speculative},
        }  # fmt: skip
        self._speculative: dict[str, Any] = {
            "speculative_algorithm": name, "speculative_num_draft_tokens": NUM_DRAFT_TOKENS,
            "speculative_adaptive": False, **{field: settings[field] for field in speculative},
        }  # fmt: skip
        self._drafts = find_algorithm(name).draft_form(EngineConfig(**{**self._settings, **self._speculative}))

    def _wrong(self, message: str) -> None:
        self.report.violations.append(message)

    # -- proposals ---------------------------------------------------------------------------------------------------

    def check_proposals(self) -> None:
        """Shapes, kinds and order of what it proposes for odd contexts."""
        config = EngineConfig(**self._settings, **self._speculative)
        made = find_algorithm(self._name)(
            AlgorithmContext(config, NUM_WORDS, lambda text: [ord(c) % NUM_WORDS for c in text])
        )
        random = np.random.default_rng(1)
        try:
            for length, most in ((1, 1), (2, 5), (40, 5), (120, 3), (40, 1)):
                contexts = [
                    np.full(length, 7, np.int32),
                    np.arange(length, dtype=np.int32) % NUM_WORDS,
                    random.integers(0, NUM_WORDS, length).astype(np.int32),
                ]
                for context in contexts:
                    made.observe(context.tolist(), length)
                self._check_proposal(made, contexts, most)
        finally:
            made.close()

    def _check_proposal(self, made: SpeculativeAlgorithm, contexts: list[np.ndarray], most: int) -> None:
        kept = [context.copy() for context in contexts]
        try:
            tokens, parents, counts = made.propose(contexts, most)
        except Exception as error:  # whatever it raises, requests would fail
            self._wrong(f"propose() raised {type(error).__name__} for contexts of {len(contexts[0])} tokens: {error}")
            return
        if any(not np.array_equal(a, b) for a, b in zip(contexts, kept, strict=True)):
            self._wrong("propose() changes the contexts it is given")
        wanted = (len(contexts), most)
        for name, values, shape in (("tokens", tokens, wanted), ("parents", parents, wanted)):
            if np.shape(values) != shape or np.asarray(values).dtype != np.int32:
                found = np.asarray(values)
                self._wrong(f"propose() returns {name} {found.dtype}{list(found.shape)}, wanted int32{list(shape)}")
                return
        if np.shape(counts) != wanted[:1] or np.min(counts) < 0 or np.max(counts) > most:
            self._wrong(f"propose() returns counts {np.asarray(counts).tolist()}, wanted {wanted[0]} of 0 .. {most}")
            return
        if self._drafts.is_relayed and np.any(counts):
            self._wrong("propose() returns drafts, but draft_form() says RELAYED: they would never be looked at")
            return
        for row, count in enumerate(np.asarray(counts).tolist()):
            own = np.asarray(parents)[row, :count].tolist()
            if any(not 0 <= parent <= node for node, parent in enumerate(own)):
                self._wrong(f"propose() returns parents {own}: a parent is the root, 0, or an earlier draft")
                return
            if not self._drafts.is_tree and own != list(range(count)):
                self._wrong(f"propose() returns a tree (parents {own}), but draft_form() says chains")
                return
            siblings = list(zip(own, np.asarray(tokens)[row, :count].tolist(), strict=True))
            if len(set(siblings)) < len(siblings):
                self.report.notes.append(f"siblings repeat a token (depths {depths_of(own)}): the second never holds")

    # -- tokens ------------------------------------------------------------------------------------------------------

    def check_tokens(self, page_sizes: Sequence[int]) -> None:
        """What a small model says with the algorithm is what it says without."""
        plain = self._serve({"page_size": page_sizes[0]}, None)
        for number, page_size in enumerate(page_sizes):
            for disable_overlap in (False, True) if number == 0 else (False,):
                how = {"page_size": page_size, "disable_overlap_schedule": disable_overlap, **self._speculative}
                found = self._serve(how, plain)
                text = f"page size {page_size}, overlap {'off' if disable_overlap else 'on'}"
                for kind, got, want in zip(KINDS, found, plain, strict=True):
                    wrong = [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b]
                    if wrong:
                        self._wrong(f"{kind} output differs from plain decoding in requests {wrong} ({text})")
        if not self.report.num_accepted:
            self.report.notes.append("no draft held, so nothing is known of what happens when one does")

    def _serve(self, how: dict[str, Any], plain: list[list[list[int]]] | None) -> list[list[list[int]]]:
        """Outputs of the workload, greedy and sampled."""
        engine = Engine(EngineConfig(**{**self._settings, **how}))
        points = native_module(jax.default_backend()).hold_points
        try:
            if plain is not None:
                known = [p + o for outputs in plain for (p, _), o in zip(_workload(), outputs, strict=True)]
                Poison(engine, lambda token_ids: known_future(known, token_ids))
                points.delay(*LATE_READS if self._drafts.is_relayed else LATE_ACCEPTANCE)
                self._check_owner(engine)
                self._watch_mailbox(engine)
            outputs = [_run(engine, name, params) for name, params in KINDS.items()]
            if engine.scheduler.speculation is not None:
                self.report.num_drafted += engine.scheduler.speculation.figures.num_drafted
                self.report.num_accepted += engine.scheduler.speculation.figures.num_accepted
            return outputs
        finally:
            points.clear()
            engine.close()

    def _check_owner(self, engine: Engine) -> None:
        """Only the runner whose launch reads shared rows last can say when a step has read them."""
        worker: Any = engine.parts.worker
        owner = worker.last_shared_read_runner
        last = [runner.runner for runner in worker.step_runners if runner.reads_shared_rows][-1]
        message = f"last_shared_read_runner is {owner.name!r}, but the launch of {last.name!r} reads shared rows last"
        if owner is not last and message not in self.report.violations:
            self._wrong(message)

    def _watch_mailbox(self, engine: Engine) -> None:
        """Notes a worker that publishes an event for a verify step whose drafts are read behind it."""
        worker: Any = engine.parts.worker
        execute = worker.execute
        reads_live = worker.step_runner.drafts.rows is DraftRows.LIVE

        def watched(batch: Any, *arguments: Any) -> Any:
            launch = execute(batch, *arguments)
            published = worker.last_shared_read_runner.shared_read_done_event is not None
            message = "draft_form() says LIVE, but its worker leaves the read-done event in the mailbox after verify"
            late = reads_live and batch.mode is ForwardMode.TARGET_VERIFY
            if late and published and message not in self.report.violations:
                self._wrong(message)
            return launch

        worker.execute = watched


def _workload() -> list[tuple[list[int], int]]:
    """(prompt, output length) of five requests; some repeat themselves."""
    random = np.random.default_rng(8)
    prompts = [random.integers(0, NUM_WORDS, n).tolist() for n in (5, 22, 9)]
    prompts += [(random.integers(0, NUM_WORDS, 4).tolist() * 6)[:21], [3] * 7]
    return list(zip(prompts, (18, 30, 1, 25, 40), strict=True))


def _run(engine: Engine, kind: str, params: dict[str, Any]) -> list[list[int]]:
    names = [f"{kind}-{i}" for i in range(len(_workload()))]
    outputs: dict[str, list[int]] = {name: [] for name in names}
    for name, (prompt, length) in zip(names, _workload(), strict=True):
        engine.add(Request(name, tuple(prompt), SamplingParams(max_tokens=length, ignore_eos=True, **params)))
    for request_id, tokens in _deltas(engine):
        outputs[request_id] += tokens
    engine.scheduler.check_integrity()
    return list(outputs.values())


def _deltas(engine: Engine) -> Iterator[tuple[str, tuple[int, ...]]]:
    while engine.has_work:
        for delta in engine.step():
            if delta.error is not None:
                raise AlgorithmConformanceError(f"a request failed: {delta.error}")
            yield delta.request_id, delta.token_ids
