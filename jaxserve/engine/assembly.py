"""Puts an engine's parts together from a configuration: model, backend, shared rows, pool, runners, scheduler."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.attention.base import AttentionBackend
from jaxserve.attention.paged_kv import KVLayout
from jaxserve.attention.registry import make_backend
from jaxserve.barrier.cuda_settings import check_cuda_settings
from jaxserve.barrier.native import native_module
from jaxserve.barrier.shared_rows import RowLayout, SharedRows
from jaxserve.core.config import MIB, EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.shapes import ceil_div
from jaxserve.models.loading.checkpoint import Checkpoint, open_checkpoint
from jaxserve.models.loading.default_model import cache_folder, default_model_path
from jaxserve.models.loading.weights import LoadedModel, dummy_model, load_model
from jaxserve.runner.buckets import make_buckets
from jaxserve.runner.graph_mode import make_graph_mode
from jaxserve.runner.model_runner import ModelRunner, plain_relay, relay_with_lengths
from jaxserve.runner.step_program import CHAIN, DraftForm
from jaxserve.runner.step_runner import StepRunner
from jaxserve.runner.worker import TargetWorker
from jaxserve.scheduler.kv_memory import KVMemory
from jaxserve.scheduler.page_pool import PagePool
from jaxserve.scheduler.prefix_cache import PrefixCache
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.war_barrier import WarBarrier
from jaxserve.speculative.base import AlgorithmContext, SpeculativeAlgorithm
from jaxserve.speculative.registry import make_algorithm, verify_tokens_of
from jaxserve.speculative.speculation import Speculation

log = logging.getLogger(__name__)

DEFAULT_POOL_TOKENS = 32_768  # KV tokens when nothing is said: enough for a laptop, a few percent of a card


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made of."""

    checkpoint: Checkpoint
    model: LoadedModel
    context_length: int
    rows: SharedRows
    worker: TargetWorker
    scheduler: Scheduler
    platform: str


def resolve_model_path(model: str) -> Path:
    """``"default"`` fetches the default model; anything else is a path.

    Raises:
        ModelLoadError: nothing is there.
    """
    return default_model_path() if model == "default" else Path(model).expanduser()


def enable_compilation_cache(folder: str | None) -> None:
    """Sets the folder of the persistent XLA cache.

    Args:
        folder: None: that of ``JAX_COMPILATION_CACHE_DIR``, or the default one; "": no cache. Holds for the whole
            process, from the next compilation on.
    """
    if folder == "":
        chosen = None
    else:
        chosen = folder or os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(cache_folder() / "xla")
    if chosen != jax.config.values["jax_compilation_cache_dir"]:
        jax.config.update("jax_compilation_cache_dir", chosen)
        compilation_cache.reset_cache()  # jax looks at the folder once, when it first compiles
    # The default keeps only programs that took over a second to compile, and starts most of ours from nothing.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def available_memory_bytes(platform: str) -> int:
    """Free memory of the device, or of the host for the CPU."""
    if platform == "cpu":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    stats = jax.local_devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit", 0)) - int(stats.get("bytes_in_use", 0))


def pool_pages(
    config: EngineConfig, kv: KVLayout, context_length: int, free_bytes: int, draft_bytes_per_page: int = 0
) -> int:
    """Pages of the pool, the null page included: as configured, or what the context, slots and memory call for.

    Args:
        draft_bytes_per_page: KV of draft models that belongs to each page.
    """
    bytes_per_page = kv.bytes_per_page + draft_bytes_per_page
    if config.num_pages is not None:
        if config.num_pages * config.page_size < 2:
            raise ConfigError(f"--num-pages {config.num_pages} of 1 token holds no prompt and output; raise it")
        num_pages = config.num_pages + 1
        if bytes_per_page * num_pages > free_bytes:
            raise ConfigError(
                f"--num-pages {config.num_pages} needs {bytes_per_page * num_pages // MIB} MiB of KV, "
                f"{free_bytes // MIB} MiB are free; lower it"
            )
        return num_pages
    tokens = min(config.max_running_requests * context_length, max(context_length, DEFAULT_POOL_TOKENS))
    wanted = ceil_div(tokens, config.page_size) + 1
    affordable = int(free_bytes * config.mem_fraction_static) // bytes_per_page
    one_sequence = ceil_div(context_length, config.page_size) + 1
    if affordable < one_sequence:
        raise ConfigError(
            f"{free_bytes // MIB} MiB are free, but one sequence of {context_length} tokens needs "
            f"{one_sequence * bytes_per_page // MIB} MiB of KV; lower --context-length"
        )
    return min(wanted, affordable)


def _checked_form(algorithm: SpeculativeAlgorithm, config: EngineConfig, backend: AttentionBackend) -> DraftForm:
    drafts = algorithm.draft_form(config)
    if drafts.hands_rows and not backend.supports_trees:
        raise ConfigError(
            f"{algorithm.name} drafts blocks whose tokens see each other, but the attention backend {backend.name!r} "
            "only lets tokens see those before them; choose another backend"
        )
    if drafts.is_tree and not backend.supports_trees:
        raise ConfigError(
            f"{algorithm.name} drafts trees, but the attention backend {backend.name!r} only verifies chains; "
            "choose another backend, or --speculative-ngram-max-bfs-breadth 1"
        )
    return drafts


def make_prefix_cache(config: EngineConfig, algorithm: SpeculativeAlgorithm | None) -> PrefixCache | None:
    """The prefix cache; None where it is off."""
    if config.disable_radix_cache:
        return None
    lookahead = 0 if algorithm is None else algorithm.kv_lookahead
    if lookahead is None:
        log.warning(
            "the prefix cache is off: the drafts of %s cannot begin behind cached pages, see docs/prefix_cache.md",
            algorithm and algorithm.name,
        )
        return None
    return PrefixCache(config.page_size, lookahead)


def assemble(
    config: EngineConfig, progress: Callable[[str], None], on_late_compile: Callable[[str], None]
) -> EngineParts:
    """Loads the model and builds everything around it; compiles nothing yet.

    Raises:
        ConfigError: settings that cannot work together or on this machine.
        ModelLoadError: the checkpoint.
    """
    enable_compilation_cache(config.compilation_cache_dir)
    platform = jax.default_backend()
    if platform != "cpu":
        check_cuda_settings(os.environ)
    if config.race_check and platform != "cpu":
        raise ConfigError(f"--race-check follows programs on the CPU only, and this is {platform}; turn it off")
    native_module(platform)  # a missing or unfit extension is found before anything slow
    path = resolve_model_path(config.model)
    checkpoint = open_checkpoint(path)
    model_config = checkpoint.model_config
    dtype = ("float32" if platform == "cpu" else "bfloat16") if config.dtype == "auto" else config.dtype
    backend = make_backend(config, platform, dtype, model_config.attention_sinks)
    make_graph_mode(config, platform, backend, 0, model_config)  # what it refuses is refused before anything slow
    context_length = config.context_length or model_config.max_position_embeddings
    if context_length > model_config.max_position_embeddings:
        raise ConfigError(
            f"--context-length {context_length} exceeds the model's {model_config.max_position_embeddings}; lower it"
        )
    buckets = make_buckets(config, context_length, backend.width_buckets, verify_tokens_of(config))

    progress(f"loading {checkpoint.name} ({dtype}, {platform})")
    if config.load_format == "dummy":
        model = dummy_model(model_config, jnp.dtype(dtype), seed=0)
    else:
        model = load_model(checkpoint, jnp.dtype(dtype))
    kv = KVLayout(
        model_config.num_layers, model_config.num_kv_heads, model_config.head_dim, 1, config.page_size, jnp.dtype(dtype)
    )
    num_ids = min(checkpoint.tokenizer.vocab_size, model_config.vocab_size)
    algorithm = make_algorithm(AlgorithmContext(config, num_ids, checkpoint.tokenizer.encode, jnp.dtype(dtype)))
    drafts, draft_kv = CHAIN, 0
    if algorithm is not None:
        drafts = _checked_form(algorithm, config, backend)
        algorithm.load(model, checkpoint.tokenizer)
        draft_kv = algorithm.kv_bytes_per_page(config.page_size)
    num_pages = pool_pages(config, kv, context_length, available_memory_bytes(platform), draft_kv)
    kv = KVLayout(kv.num_layers, kv.num_kv_heads, kv.head_dim, num_pages, kv.page_size, kv.dtype)
    kv_mib = (kv.bytes_per_page + draft_kv) * num_pages // MIB
    progress(f"KV pool: {num_pages - 1} pages of {kv.page_size} tokens, {kv_mib} MiB")

    layout = RowLayout(
        config.max_running_requests, ceil_div(context_length, config.page_size),
        num_drafts=0 if drafts.is_relayed else buckets.most_drafts,
    )  # fmt: skip
    rows = SharedRows(layout, platform, config.fence_timeout_s, config.shared_updates)
    runner = ModelRunner(
        model, backend, rows, kv, config, platform, make_relay=relay_with_lengths if drafts.is_relayed else plain_relay
    )
    worker: TargetWorker | None = None
    try:
        step_runner = StepRunner(
            runner, buckets, on_late_compile, num_ids=checkpoint.tokenizer.vocab_size, drafts=drafts,
            feature_points=() if algorithm is None else algorithm.feature_points,
        )  # fmt: skip
        worker = TargetWorker(runner, step_runner) if algorithm is None else algorithm.make_worker(runner, step_runner)
        speculation = None
        if algorithm is not None:
            depth = (config.speculative_num_steps if drafts.is_tree else buckets.most_drafts) or 0
            speculation = Speculation(
                algorithm,
                buckets,
                num_ids,
                config.speculative_adaptive,
                relayed_depth=depth if drafts.is_relayed else 0,
            )
        barrier = WarBarrier(
            rows, worker, force_coarse=config.force_coarse_war_barrier, disabled=config.disable_war_barrier
        )
        if config.disable_war_barrier:
            log.warning("the write-after-read barrier is disabled: output may be corrupt")
        cache = make_prefix_cache(config, algorithm)
        scheduler = Scheduler(
            worker, rows, KVMemory(PagePool(num_pages, config.page_size), cache), barrier,
            buckets=buckets, longest_gap_s=config.max_decode_gap_ms / 1000, vocab_size=model_config.vocab_size,
            eos_token_ids=model_config.eos_token_ids, speculation=speculation,
        )  # fmt: skip
    except BaseException:
        (worker or runner).close()  # its channel and its thread would outlive everything else
        raise
    return EngineParts(checkpoint, model, context_length, rows, worker, scheduler, platform)
