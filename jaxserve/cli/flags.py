"""Engine flags: one per field of ``EngineConfig``, with the names users of other engines know."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any

from jaxserve.cli.parser import env_flag, int_list
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.speculative.json_settings import merged, parse_speculative_config


@dataclass(frozen=True)
class Flag:
    """One engine flag.

    Attributes:
        field: the field of ``EngineConfig``; ``--its-name`` is the flag.
        kind: ``"switch"`` turns a setting on; ``"no"`` is ``--no-x`` for one that is on; else how to read a value.
        help: one sentence.
        aliases: other names for the same flag.
        env: environment variable that turns a switch on.
        metavar: what stands for the value in ``--help``.
        choices: the only values there are.
    """

    field: str
    kind: Any
    help: str
    aliases: tuple[str, ...] = ()
    env: str | None = None
    metavar: str | None = None
    choices: tuple[str, ...] | None = None


FLAGS = (
    Flag("model", str, "'default', a Hugging Face folder, or a .gguf file", ("--model-path",), metavar="MODEL"),
    Flag("served_model_name", str, "name clients use; by default the model's own", metavar="NAME"),
    Flag("dtype", str, "auto is float32 on CPU, bfloat16 on GPU", choices=("auto", "float32", "bfloat16")),
    Flag("load_format", str, "dummy fills random weights", choices=("auto", "dummy")),
    Flag("page_size", int, "tokens per KV page, 1..64", metavar="N"),
    Flag("num_pages", int, "KV pages; by default as many as memory allows", metavar="N"),
    Flag(
        "mem_fraction_static",
        float,
        "most of the free memory that weights and KV pages may take",
        ("--gpu-memory-utilization",),
        metavar="F",
    ),
    Flag(
        "context_length",
        int,
        "most tokens of a sequence; by default the model's",
        ("--max-model-len",),
        metavar="N",
    ),
    Flag("max_running_requests", int, "most sequences that decode together", ("--max-num-seqs",), metavar="N"),
    Flag("max_queued_requests", int, "most requests that wait; one more is refused", metavar="N"),
    Flag("chunked_prefill_size", int, "most tokens of a prompt computed in one step", metavar="N"),
    Flag(
        "max_prefill_tokens",
        int,
        "most tokens, padding included, of a step that reads several prompts; by default as many; 0: it reads one",
        metavar="N",
    ),
    Flag(
        "max_decode_gap_ms",
        float,
        "milliseconds a prompt chunk may hold up sequences that decode, by being smaller; 0: as long as it takes",
        metavar="MS",
    ),
    Flag(
        "schedule_policy",
        str,
        "who is served first: first come, or by the priority of requests",
        ("--scheduling-policy",),
        choices=("fcfs", "priority"),
    ),
    Flag(
        "disable_radix_cache",
        "switch",
        "forget a request's KV when it ends instead of keeping it for prompts that begin alike",
        ("--no-enable-prefix-caching",),
    ),
    Flag(
        "watchdog_timeout_s",
        float,
        "longest time a step may take before the server gives up",
        ("--watchdog-timeout",),
        metavar="S",
    ),
    Flag(
        "prefill_token_buckets",
        int_list,
        "compiled prefill sizes, like 16,64,256",
        ("--precompile-token-paddings",),
        metavar="N,N",
    ),
    Flag(
        "decode_batch_buckets",
        int_list,
        "compiled decode batch sizes, like 1,2,4,8",
        ("--cuda-graph-bs", "--precompile-bs-paddings"),
        metavar="N,N",
    ),
    Flag("attention_backend", str, "a registered backend, or auto", metavar="NAME"),
    Flag("prefill_attention_backend", str, "prefill child of the hybrid backend", metavar="NAME"),
    Flag("decode_attention_backend", str, "decode child of the hybrid backend", metavar="NAME"),
    Flag(
        "graph_backend",
        str,
        "on a GPU: kernel by kernel (xla), CUDA graphs made by XLA (xla-cmdbuf), or captured by us (cuda-graph)",
        choices=("auto", "xla", "xla-cmdbuf", "cuda-graph"),
    ),
    Flag("graph_snapshot", str, "where the snapshot is with xla-cmdbuf", choices=("outside", "inside")),
    Flag(
        "disable_overlap_schedule",
        "switch",
        "collect each step before planning the next",
        env="JAXSERVE_DISABLE_OVERLAP_SCHEDULE",
    ),
    Flag(
        "force_coarse_war_barrier",
        "switch",
        "wait for whole executions instead of read-done events",
        env="JAXSERVE_FORCE_COARSE_WAR_BARRIER",
    ),
    Flag("disable_war_barrier", "switch", "no barrier at all: unsound, needs --allow-unsafe"),
    Flag("allow_unsafe", "switch", "accept settings that can corrupt output"),
    Flag("shared_read_marker", "no", "compile programs without the read-done marker; reads are hoisted instead"),
    Flag("compat_unsound_fallback", "switch", "publish before reads end when there is no marker: unsound"),
    Flag(
        "shared_updates",
        str,
        "how control rows reach the device; the others exist for comparison",
        choices=("shared", "upload", "functional"),
    ),
    Flag("speculative_algorithm", str, "who drafts tokens: NGRAM, or a registered name", metavar="NAME"),
    Flag("speculative_draft_model_path", str, "the draft model or head", metavar="PATH"),
    Flag("speculative_num_steps", int, "drafts in a row of a draft model", metavar="N"),
    Flag("speculative_eagle_topk", int, "continuations of each drafted token; more than 1 drafts trees", metavar="N"),
    Flag("speculative_token_map", str, "file with the target ids an EAGLE head may draft", metavar="FILE"),
    Flag(
        "speculative_num_draft_tokens",
        int,
        "most tokens verified per sequence and step, the newest one included",
        metavar="N",
    ),
    Flag("speculative_adaptive", "no", "always verify as many drafts as there are, whatever they bring"),
    Flag(
        "speculative_ngram_fence",
        str,
        "coarse reads drafts where they are used; relay snapshots them and uses the backend's fence",
        choices=("coarse", "relay"),
    ),
    Flag(
        "speculative_ngram_match_type",
        str.lower,
        "bfs drafts the newest continuations, prob the most frequent",
        choices=("bfs", "prob"),
    ),
    Flag("speculative_ngram_min_bfs_breadth", int, "least children of a draft node", metavar="N"),
    Flag("speculative_ngram_max_bfs_breadth", int, "most children of a draft node; 1 drafts chains", metavar="N"),
    Flag("speculative_ngram_max_match_window_size", int, "newest tokens that are looked up", metavar="N"),
    Flag(
        "speculative_ngram_max_trie_depth",
        int,
        "longest n-gram stored",
        ("--speculative-ngram-branch-length",),
        metavar="N",
    ),
    Flag("speculative_ngram_capacity", int, "nodes of the trie; least recently used go first", metavar="N"),
    Flag("speculative_ngram_external_corpus_path", str, "text to know from the start, .txt or .jsonl", metavar="FILE"),
    Flag("speculative_ngram_external_corpus_max_tokens", int, "most tokens taken from it", metavar="N"),
    Flag("grammar_backend", str.lower, "who constrains outputs to grammars", choices=("llguidance", "none")),
    Flag("seed", int, "seed of the seeds of requests that bring none", metavar="N"),
    Flag("fence_timeout_s", float, "longest wait for a record before a step fails", ("--fence-timeout",), metavar="S"),
    Flag(
        "compilation_cache_dir",
        str,
        "persistent XLA cache; '' disables it",
        metavar="DIR",
    ),
    Flag("skip_warmup", "switch", "compile programs when first used instead of at start"),
    Flag(
        "greedy_programs",
        "switch",
        "programs of their own for greedy batches on a CPU, too: half the compiling where nothing else is asked for",
    ),
    Flag("hold_points", "switch", "compile hold points into programs, for tests"),
    Flag(
        "race_check",
        "switch",
        "stop with a report at the first access to a shared row that nothing orders; slow, CPU only",
        env="JAXSERVE_RACE_CHECK",
    ),
)


SPECULATIVE_CONFIG = "--speculative-config"
_PREFIX = "engine_"  # of attributes, so that the engine's seed and a request's do not meet


def add_engine_flags(
    parser: argparse.ArgumentParser, *, positional_model: bool = False, without: tuple[str, ...] = ()
) -> None:
    """Adds every engine flag but those of the fields in ``without``.

    A flag that is not given leaves no attribute, so defaults live in one place.
    """
    group = parser.add_argument_group("engine")
    if positional_model:
        parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="same as --model")
    defaults = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    for flag in FLAGS:
        if flag.field in without:
            continue
        name = "--" + flag.field.replace("_", "-")
        default, text = defaults[flag.field], flag.help
        options: dict[str, Any] = {"dest": _PREFIX + flag.field, "default": argparse.SUPPRESS}
        if flag.kind in ("switch", "no"):
            options["action"] = "store_true" if flag.kind == "switch" else "store_false"
            name = name if flag.kind == "switch" else "--no-" + name[2:]
            text += f" (also {flag.env}=1)" if flag.env else ""
        else:
            options.update(type=flag.kind, metavar=flag.metavar, choices=flag.choices)
            text += f" (default {default})" if default is not None else ""
        group.add_argument(name, *flag.aliases, help=text.replace("%", "%%"), **options)
    group.add_argument(
        SPECULATIVE_CONFIG,
        metavar="JSON",
        help='speculation as vLLM\'s users write it, like \'{"method": "ngram", "num_speculative_tokens": 4}\'',
    )


def engine_config(arguments: argparse.Namespace, **defaults: Any) -> EngineConfig:
    """The engine's configuration from flags, then environment variables, then ``defaults``.

    Raises:
        ConfigError: a value out of range, two different models, or ``--speculative-config`` and a flag that disagree.
    """
    settings = dict(defaults)
    for flag in FLAGS:
        if hasattr(arguments, _PREFIX + flag.field):
            settings[flag.field] = getattr(arguments, _PREFIX + flag.field)
        elif flag.env and env_flag(flag.env):
            settings[flag.field] = True
    speculation = getattr(arguments, "speculative_config", None)
    if speculation is not None:
        settings = merged(settings, parse_speculative_config(speculation))
    positional = getattr(arguments, "model_argument", None)
    if positional is not None:
        if settings.get("model", positional) != positional:
            raise ConfigError(f"MODEL is {positional!r} but --model is {settings['model']!r}; give one of them")
        settings["model"] = positional
    return EngineConfig(**settings)


def given_engine_flags(arguments: argparse.Namespace) -> list[str]:
    """Names of the engine flags on the command line."""
    names = ["--" + flag.field.replace("_", "-") for flag in FLAGS if hasattr(arguments, _PREFIX + flag.field)]
    return names + [SPECULATIVE_CONFIG] * (getattr(arguments, "speculative_config", None) is not None)
