"""How an engine is set up. Names follow the command-line flags (``--page-size`` is ``page_size``)."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Literal

from jaxserve.core.errors import ConfigError

MIB = 1 << 20
GRAPH_BACKENDS = ("auto", "xla", "xla-cmdbuf", "cuda-graph")
SharedUpdates = Literal["shared", "upload", "functional"]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _race_check_wanted() -> bool:
    return os.environ.get("JAXSERVE_RACE_CHECK", "").strip().lower() not in ("", "0", "false", "no", "off")


@dataclass
class EngineConfig:
    """Engine settings, checked on construction; everything has a default that serves the default model on a laptop.

    Attributes:
        model: ``"default"``, a Hugging Face folder, or a ``.gguf`` file.
        served_model_name: name clients use; by default the model's own name. ``"default"`` always works too.
        dtype: ``"auto"`` (float32 on CPU, bfloat16 on GPU), ``"float32"`` or ``"bfloat16"``.
        load_format: ``"auto"`` reads the checkpoint; ``"dummy"`` fills random weights of the right shapes.
        page_size: tokens per KV page, 1 .. 64.
        num_pages: KV pages in the pool; None sizes it from ``mem_fraction_static`` and the context length.
        mem_fraction_static: most of the free memory that weights and KV pool may take together.
        context_length: most tokens (prompt + output) of a sequence; None takes the model's.
        max_running_requests: most sequences that decode together; also the number of slots.
        max_queued_requests: most requests that wait; one more is refused.
        chunked_prefill_size: most prompt tokens computed in one step.
        max_prefill_tokens: most prompt tokens, padding included, of a step that reads several short prompts; None:
            ``chunked_prefill_size``; 0: a step reads one prompt.
        max_decode_gap_ms: milliseconds a prompt chunk may hold up sequences that decode: then it is smaller, down to
            the smallest prefill bucket. 0: as long as it takes.
        schedule_policy: ``"fcfs"``: first come, first served; ``"priority"``: requests may bring a priority.
        disable_radix_cache: forget a request's KV when it ends.
        watchdog_timeout_s: longest time a step may take before the server gives up.
        prefill_token_buckets: compiled prefill sizes; None derives them from ``chunked_prefill_size``.
        decode_batch_buckets: compiled decode batch sizes (``--cuda-graph-bs``); None derives powers of two.
        attention_backend: name of a registered backend, or ``"auto"``.
        prefill_attention_backend / decode_attention_backend: children of the ``hybrid`` backend.
        graph_backend: on a GPU, ``"xla"`` launches kernel by kernel, ``"xla-cmdbuf"`` as CUDA graphs that XLA makes;
            ``"auto"`` is the latter. ``"cuda-graph"``: decode and verify steps captured by our extension. On the CPU
            every one is plain jit.
        graph_snapshot: ``"outside"`` of the graph, or ``"inside"``; unproven.
        disable_overlap_schedule: collect each step before planning the next.
        force_coarse_war_barrier: always wait for the whole execution instead of the read-done event.
        disable_war_barrier: no barrier at all; unsound, for experiments. Needs ``allow_unsafe``.
        allow_unsafe: accept settings that can corrupt output.
        shared_read_marker: compile the read-done marker into programs; False hoists the reads in front instead.
        compat_unsound_fallback: with no marker, publish before the reads end, as the original does. Unsafe.
        shared_updates: how control rows reach the device: ``"shared"`` writes them in place; ``"upload"`` and
            ``"functional"`` exist to be compared with it.
        speculative_algorithm: name of a registered algorithm that drafts tokens; None: none.
        speculative_draft_model_path: the draft model or head, for algorithms that need one.
        speculative_num_steps: drafts in a row of a draft model; None: as ``speculative_num_draft_tokens`` says.
        speculative_eagle_topk: continuations of each drafted token; None or 1: chains, more: trees.
        speculative_token_map: file with the target ids an EAGLE head may draft; None: all.
        speculative_num_draft_tokens: most tokens verified per sequence and step, the newest one included; None: as the
            algorithm likes it.
        speculative_adaptive: draft as much as pays off, down to nothing; False: always as many as there are.
        speculative_ngram_fence: ``"coarse"`` reads drafts where they are used and waits for the whole execution;
            ``"relay"`` snapshots them and uses the backend's fence.
        speculative_ngram_match_type: ``"bfs"`` (newest continuations) or ``"prob"`` (most frequent).
        speculative_ngram_min_bfs_breadth / _max_bfs_breadth: children per node of draft trees; 1 and 1 are chains.
        speculative_ngram_max_match_window_size: newest tokens that are looked up.
        speculative_ngram_max_trie_depth: longest n-gram stored.
        speculative_ngram_capacity: nodes of the trie; the least recently used go first.
        speculative_ngram_external_corpus_path: text to know from the start (.txt or .jsonl).
        speculative_ngram_external_corpus_max_tokens: most tokens taken from it.
        grammar_backend: who constrains outputs to grammars; ``"none"`` for programs without token masks.
        seed: seed of the seeds drawn for requests that bring none; None draws from the system.
        fence_timeout_s: longest wait for a record before a step is failed.
        compilation_cache_dir: persistent XLA cache; ``""`` disables it, None takes the default folder.
        skip_warmup: compile programs when first used instead of at start (for tests and one-shot commands).
        greedy_programs: have programs of their own for greedy batches on a CPU, as there are on a GPU. They take half
            the time to compile, which helps where nothing else is compiled.
        hold_points: compile hold points into programs so that tests can stall them.
        race_check: check that every access to a shared row is ordered, after every step; slow, CPU only. The default is
            what ``JAXSERVE_RACE_CHECK`` says.
    """

    model: str = "default"
    served_model_name: str | None = None
    dtype: str = "auto"
    load_format: str = "auto"
    page_size: int = 16
    num_pages: int | None = None
    mem_fraction_static: float = 0.8
    context_length: int | None = None
    max_running_requests: int = 8
    max_queued_requests: int = 2048
    chunked_prefill_size: int = 256
    max_prefill_tokens: int | None = None
    max_decode_gap_ms: float = 300.0
    schedule_policy: str = "fcfs"
    disable_radix_cache: bool = False
    watchdog_timeout_s: float = 300.0
    prefill_token_buckets: tuple[int, ...] | None = None
    decode_batch_buckets: tuple[int, ...] | None = None
    attention_backend: str = "auto"
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    graph_backend: str = "auto"
    graph_snapshot: str = "outside"
    disable_overlap_schedule: bool = False
    force_coarse_war_barrier: bool = False
    disable_war_barrier: bool = False
    allow_unsafe: bool = False
    shared_read_marker: bool = True
    compat_unsound_fallback: bool = False
    shared_updates: SharedUpdates = "shared"
    speculative_algorithm: str | None = None
    speculative_draft_model_path: str | None = None
    speculative_num_steps: int | None = None
    speculative_eagle_topk: int | None = None
    speculative_token_map: str | None = None
    speculative_num_draft_tokens: int | None = None
    speculative_adaptive: bool = True
    speculative_ngram_fence: str = "coarse"
    speculative_ngram_match_type: str = "bfs"
    speculative_ngram_min_bfs_breadth: int = 1
    speculative_ngram_max_bfs_breadth: int = 1
    speculative_ngram_max_match_window_size: int = 12
    speculative_ngram_max_trie_depth: int = 18
    speculative_ngram_capacity: int = 1_000_000
    speculative_ngram_external_corpus_path: str | None = None
    speculative_ngram_external_corpus_max_tokens: int = 10_000_000
    grammar_backend: str | None = "llguidance"
    seed: int | None = None
    fence_timeout_s: float = 60.0
    compilation_cache_dir: str | None = None
    skip_warmup: bool = False
    greedy_programs: bool = False
    hold_points: bool = False
    race_check: bool = field(default_factory=_race_check_wanted)

    def __post_init__(self) -> None:
        self._check_range("page_size", 1, 64)
        for name in ("max_running_requests", "chunked_prefill_size", "max_queued_requests"):
            self._check_range(name, 1, None)
        # Of a context, a prompt token and one to answer with.
        for name, low in (("num_pages", 1), ("context_length", 2), ("max_prefill_tokens", 0)):
            if getattr(self, name) is not None:
                self._check_range(name, low, None)
        if not _is_number(self.mem_fraction_static) or not 0.0 < self.mem_fraction_static <= 1.0:
            raise ConfigError(f"--mem-fraction-static must be a number in (0, 1], got {self.mem_fraction_static!r}")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise ConfigError(f"--seed must be an integer, got {self.seed!r}")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ConfigError(f"--dtype must be auto, float32 or bfloat16, got {self.dtype!r}")
        if self.load_format not in ("auto", "dummy"):
            raise ConfigError(f"--load-format must be auto or dummy, got {self.load_format!r}")
        if self.shared_updates not in ("shared", "upload", "functional"):
            raise ConfigError(f"shared_updates must be shared, upload or functional, got {self.shared_updates!r}")
        if self.graph_backend not in GRAPH_BACKENDS:
            raise ConfigError(f"--graph-backend must be {', '.join(GRAPH_BACKENDS)}, got {self.graph_backend!r}")
        if self.graph_snapshot not in ("outside", "inside"):
            raise ConfigError(f"--graph-snapshot must be outside or inside, got {self.graph_snapshot!r}")
        if self.grammar_backend not in (None, "none", "llguidance"):
            raise ConfigError(f"--grammar-backend must be llguidance or none, got {self.grammar_backend!r}")
        if self.grammar_backend == "none":
            self.grammar_backend = None
        self._check_speculation()
        for name in ("prefill_token_buckets", "decode_batch_buckets"):
            buckets = getattr(self, name)
            if buckets is not None:
                if (
                    not isinstance(buckets, (tuple, list))
                    or not buckets
                    or any(isinstance(b, bool) or not isinstance(b, int) or b < 1 for b in buckets)
                ):
                    raise ConfigError(f"{name} must be positive integers, got {buckets!r}")
                setattr(self, name, tuple(sorted(set(buckets))))
        if self.schedule_policy not in ("fcfs", "priority"):
            raise ConfigError(f"--schedule-policy must be fcfs or priority, got {self.schedule_policy!r}")
        if not _is_number(self.max_decode_gap_ms) or self.max_decode_gap_ms < 0:
            raise ConfigError(f"--max-decode-gap-ms must be a number >= 0, got {self.max_decode_gap_ms!r}")
        if not _is_number(self.watchdog_timeout_s) or self.watchdog_timeout_s <= 0:
            raise ConfigError(f"--watchdog-timeout must be a number > 0, got {self.watchdog_timeout_s!r}")
        if not _is_number(self.fence_timeout_s) or self.fence_timeout_s <= 0:
            raise ConfigError(f"fence_timeout_s must be a number > 0, got {self.fence_timeout_s!r}")
        if not self.allow_unsafe:
            for name in ("disable_war_barrier", "compat_unsound_fallback"):
                if getattr(self, name):
                    flag = "--" + name.replace("_", "-")
                    raise ConfigError(f"{flag} can corrupt output; add --allow-unsafe if this is an experiment")

    def _check_speculation(self) -> None:
        for name, low, high in (("num_steps", 1, 63), ("num_draft_tokens", 2, 64), ("eagle_topk", 1, 16)):
            if getattr(self, f"speculative_{name}") is not None:
                self._check_range(f"speculative_{name}", low, high)
        if self.speculative_algorithm is not None and not isinstance(self.speculative_algorithm, str):
            raise ConfigError(f"--speculative-algorithm must be a name, got {self.speculative_algorithm!r}")
        for name, choices in (("fence", ("coarse", "relay")), ("match_type", ("bfs", "prob"))):
            value = getattr(self, f"speculative_ngram_{name}")
            if value not in choices:
                flag = f"--speculative-ngram-{name.replace('_', '-')}"
                raise ConfigError(f"{flag} must be {' or '.join(choices)}, got {value!r}")
        for name in ("min_bfs_breadth", "max_bfs_breadth", "capacity", "external_corpus_max_tokens"):
            self._check_range(f"speculative_ngram_{name}", 1, None)
        self._check_range("speculative_ngram_min_bfs_breadth", 1, self.speculative_ngram_max_bfs_breadth)
        self._check_range("speculative_ngram_max_match_window_size", 1, None)
        self._check_range("speculative_ngram_max_trie_depth", self.speculative_ngram_max_match_window_size + 1, None)

    def _check_range(self, name: str, low: int, high: int | None) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            wanted = f">= {low}" if high is None else f"in [{low}, {high}]"
            raise ConfigError(f"--{name.replace('_', '-')} must be an integer {wanted}, got {value!r}")
