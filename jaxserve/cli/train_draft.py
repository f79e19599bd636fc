"""``jaxserve train-draft``: train a draft model for speculative decoding, on the model's own answers or your text."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxserve.training.settings import ALGORITHMS, TrainSettings, flag_of

_HELP = {
    "num_layers": "layers of the draft; mtp: how many, each of which drafts one token",
    "intermediate_size": "eagle, eagle3, dflash: width of its MLP (default: the model's)",
    "target_layers": "eagle3, dflash: layers of the model whose outputs the draft is given, such as 1,14,26 "
    "(default: the algorithm's usual ones)",
    "draft_vocab_size": "eagle, eagle3, dflash: token ids it learns to guess, the most frequent; 0: all",
    "sequence_length": "tokens of a training row",
    "batch_rows": "rows of a step",
    "epochs": "times all text is used",
    "learning_rate": "its peak",
    "warmup": "part of the steps over which it rises",
    "weight_decay": "of AdamW",
    "clip_norm": "largest norm of a gradient",
    "draft_steps": "eagle, eagle3: guesses unrolled in training",
    "step_decay": "eagle, eagle3: weight of each further guess",
    "cross_entropy_weight": "eagle: of the cross-entropy in the loss, beside the distance of features",
    "block_size": "dflash: tokens of a block, the known one included",
    "mask_token_id": "dflash: token that stands for one to be guessed",
    "anchors": "dflash: blocks drawn per row and step",
    "block_decay": "dflash: tokens after which a place counts 1/e",
    "held_out": "part of the rows kept for evaluation",
    "eval_every": "steps between evaluations",
    "checkpoint_every": "steps between checkpoints",
    "seed": "of weights, order and anchors",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    known = ", ".join(name.lower() for name in ALGORITHMS)
    parser.add_argument("--algorithm", required=True, metavar="NAME", help=f"what to train: {known}")
    parser.add_argument("--model", default="default",
                        help="'default', a Hugging Face folder or a .gguf file; mtp: a MiMo-V2-Flash folder, with or "
                        "without MTP layers")  # fmt: skip
    parser.add_argument("--output", required=True, type=Path, metavar="FOLDER",
                        help="where the draft goes (mtp: the model with it); the same command takes a killed training "
                        "up again")  # fmt: skip
    parser.add_argument("--data", type=Path, nargs="+", default=[], metavar="FILE",
                        help=".txt, or .jsonl with a text, messages, or a prompt for the model to answer per line, or "
                        "the answers another training left in work/continuations.jsonl; by default instructions that "
                        "come with jaxserve, answered by the model")  # fmt: skip
    parser.add_argument("--data-tokens", type=int, default=200_000, metavar="N",
                        help="tokens of answers to have the model write (default 200000)")  # fmt: skip
    parser.add_argument("--generate-max-tokens", type=int, default=192, metavar="N", help="of an answer (default 192)")
    parser.add_argument("--generate-temperature", type=float, default=0.7, metavar="T",
                        help="of every other answer, the rest are greedy (default 0.7)")  # fmt: skip
    parser.add_argument("--generate-batch", type=int, default=32, metavar="N",
                        help="answers written at the same time (default 32)")  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="no progress lines")
    for setting in dataclasses.fields(TrainSettings):
        if setting.name == "algorithm":
            continue
        kind: Callable[[str], Any] = float if isinstance(setting.default, float) else int
        metavar = "X" if kind is float else "N"
        if setting.name == "target_layers":
            kind, metavar = _layers, "N,N"
        default = "" if setting.default is None else f" (default {setting.default:g})"
        parser.add_argument(flag_of(setting.name), type=kind, default=setting.default, metavar=metavar,
                            help=_HELP[setting.name] + default)  # fmt: skip


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted layer numbers such as 1,14,26, got {text!r}") from None


def run(arguments: argparse.Namespace) -> int:
    """Trains, and says where the draft is and how well it does.

    Raises:
        ConfigError, ModelLoadError: see ``training.train_draft``.
    """
    names = [setting.name for setting in dataclasses.fields(TrainSettings) if setting.name != "algorithm"]
    settings = TrainSettings(arguments.algorithm.upper(), **{name: getattr(arguments, name) for name in names})

    from jaxserve.training.train_draft import TextSource, train_draft  # imports jax

    source = TextSource(
        tuple(arguments.data), arguments.data_tokens, arguments.generate_max_tokens, arguments.generate_temperature,
        arguments.generate_batch,
    )  # fmt: skip
    report = train_draft(settings, arguments.model, source, arguments.output, quiet=arguments.quiet)
    last = report["history"][-1]
    accepted = ", ".join(f"{part:.0%}" for part in last["accepted"])
    print(
        f"{arguments.output}: {report['draft_bytes'] / 1e6:.1f} MB, {report['steps']} steps in "
        f"{report['seconds']:.0f} s; "
        f"on held-out text: loss {last['held_out_loss']}, accepted up to each guess {accepted}, "
        f"{last['mean_length']:.2f} tokens per step"
    )
    print(f"serve with: {_serve_flags(settings.algorithm, arguments.output)}", file=sys.stderr)
    return 0


def _serve_flags(algorithm: str, output: Path) -> str:
    """How ``jaxserve serve`` is told of what was trained."""
    from jaxserve.models.loading.token_map import TOKEN_MAP_FILE  # imports jax

    if algorithm == "MTP":
        return f"--model {output} --speculative-algorithm MTP"
    flags = f"--speculative-algorithm {algorithm} --speculative-draft-model-path {output}"
    if algorithm == "EAGLE" and (output / TOKEN_MAP_FILE).is_file():
        flags += f" --speculative-token-map {output / TOKEN_MAP_FILE}"
    return flags
