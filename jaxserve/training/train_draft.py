"""From a model and some text to a draft on disk: what ``jaxserve train-draft`` does."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxserve.core.errors import ConfigError
from jaxserve.engine.assembly import enable_compilation_cache, resolve_model_path
from jaxserve.engine.llm import LLM
from jaxserve.models.loading.checkpoint import Checkpoint, open_checkpoint
from jaxserve.models.loading.weights import load_model
from jaxserve.training.continuations import Recipe, Sample, read_continuations, write_continuations
from jaxserve.training.corpus import Corpus, read_corpus
from jaxserve.training.packing import PackedRows, pack
from jaxserve.training.progress import Progress
from jaxserve.training.report import write_report
from jaxserve.training.settings import TrainSettings
from jaxserve.training.students import check_target, make_student
from jaxserve.training.target_states import compute_states
from jaxserve.training.trainer import Trainer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextSource:
    """What to train on.

    Attributes:
        data: the user's files; none: instructions that come with jaxserve.
        num_tokens: tokens the target is to write in answer to instructions.
        max_tokens, temperature: of those answers; every other one is greedy.
        batch: answers written at the same time.
    """

    data: tuple[Path, ...] = ()
    num_tokens: int = 200_000
    max_tokens: int = 192
    temperature: float = 0.7
    batch: int = 32

    def __post_init__(self) -> None:
        for name, low in (("num_tokens", 1), ("max_tokens", 2), ("batch", 1)):
            if getattr(self, name) < low:
                flag = "--data-tokens" if name == "num_tokens" else "--generate-" + name.replace("_", "-")
                raise ConfigError(f"{flag} must be at least {low}, got {getattr(self, name)}")
        if not 0 <= self.temperature <= 10:
            raise ConfigError(f"--generate-temperature must be 0 .. 10, got {self.temperature}")


def train_draft(settings: TrainSettings, model: str, source: TextSource, output: Path, *, quiet: bool = False,
                until: int | None = None) -> dict[str, Any]:  # fmt: skip
    """Trains a draft and writes it to ``output``; goes on where an earlier call with the same arguments was killed.

    ``output`` gets the checkpoint (the draft's, in bfloat16; MTP: the model's own with the layers added),
    ``training.json``, ``training.csv`` and a picture. What is needed to go on lies in ``output/work`` and may be
    deleted at the end.

    Args:
        model: ``"default"``, a Hugging Face folder or a ``.gguf`` file.
        quiet: no progress lines.
        until: stop after this step, as a kill would.

    Returns:
        What ``training.json`` holds.

    Raises:
        ConfigError: settings, text or an ``output`` that cannot work; before anything slow.
        ModelLoadError: the model.
    """
    begun = time.monotonic()
    path = resolve_model_path(model)
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output {output} is a file; give a folder")
    if output.resolve() == path.resolve():
        raise ConfigError(f"--output {output} is the folder of the model, whose files would be lost; give another")
    checkpoint = open_checkpoint(path)
    _check(settings, checkpoint)
    corpus = Corpus([], [])
    if source.data:
        eos = checkpoint.model_config.eos_token_ids
        template, name = checkpoint.chat_template, checkpoint.name
        corpus = read_corpus(source.data, checkpoint.tokenizer, template, eos[0] if eos else None, name)
    if not source.data or corpus.prompts:
        if checkpoint.chat_template is None:
            raise ConfigError(
                f"--model {model} has no chat template to answer prompts by; give --data with text of its own"
            )
        corpus = Corpus(corpus.samples + _answers(checkpoint, model, source, corpus.prompts, output, quiet), [])

    enable_compilation_cache(None)
    target = load_model(checkpoint, jnp.float32)
    train_rows, held_rows = _split(pack(corpus.samples, settings.sequence_length), settings)
    student = make_student(settings, checkpoint, target, train_rows)
    points, work = student.feature_points, output / "work"
    bar = _bar("target's states", train_rows.num_tokens + held_rows.num_tokens, quiet)
    tick = (lambda tokens: None) if bar is None else bar.add
    train = compute_states(target, train_rows, points, work / f"states-{_tag(points)}.bin", False, tick)
    held_out = compute_states(target, held_rows, points, work / f"held-out-{_tag(points)}.bin", True, tick)
    if bar is not None:
        bar.close()

    identity = {**settings.as_json(), "data": _digest(train_rows, held_rows), "model": checkpoint.name}
    trainer = Trainer(
        settings, student, train, held_out, work / f"{settings.algorithm.lower()}.safetensors", identity
    )  # fmt: skip
    _train(trainer, train_rows, settings, quiet, until)
    if trainer.step < trainer.total_steps:
        return {"step": trainer.step}
    weights = student.save(output, trainer.values)
    report = {
        "algorithm": settings.algorithm,
        "model": checkpoint.name,
        "settings": settings.as_json(),
        "training_tokens": train_rows.num_tokens,
        "held_out_tokens": held_rows.num_tokens,
        "steps": trainer.total_steps,
        "draft_bytes": weights.stat().st_size,
        "draft_vocabulary_covers": _coverage(held_rows, student.target_ids),
        "seconds": round(time.monotonic() - begun, 1),
        "history": trainer.history,
    }
    write_report(output, report)
    return report


def _check(settings: TrainSettings, checkpoint: Checkpoint) -> None:
    check_target(settings.algorithm, checkpoint)
    config = checkpoint.model_config
    if settings.sequence_length > config.max_position_embeddings:
        raise ConfigError(
            f"--sequence-length {settings.sequence_length} exceeds the model's "
            f"{config.max_position_embeddings}; lower it"
        )
    if settings.mask_token_id >= config.vocab_size:
        raise ConfigError(
            f"--mask-token-id {settings.mask_token_id} is not one of the model's {config.vocab_size} token ids"
        )
    if settings.target_layers is not None and max(settings.target_layers) >= config.num_layers:
        raise ConfigError(
            f"--target-layers {','.join(map(str, settings.target_layers))}: the model has layers 0 to "
            f"{config.num_layers - 1}"
        )


def _answers(
    checkpoint: Checkpoint, model: str, source: TextSource, prompts: Sequence[str], output: Path, quiet: bool
) -> list[Sample]:
    recipe = Recipe(checkpoint.name, source.max_tokens, source.temperature)
    path = output / "work" / "continuations.jsonl"
    there = read_continuations(path, recipe)
    have = sum(len(sample.ids) - sample.num_prompt_tokens for sample in there)
    if have >= source.num_tokens or (prompts and len(there) >= len(prompts)):
        return there
    with LLM(model, max_running_requests=source.batch, skip_warmup=True) as llm:
        bar = _bar(f"{checkpoint.name} answers", source.num_tokens, quiet, have)
        tick = (lambda tokens: None) if bar is None else bar.add
        samples = write_continuations(path, recipe, llm, source.num_tokens, prompts or None, tick)
        if bar is not None:
            bar.close()
    return samples


def _split(rows: PackedRows, settings: TrainSettings) -> tuple[PackedRows, PackedRows]:
    """Rows to train on and rows held out, at random."""
    order = np.random.default_rng(settings.seed).permutation(len(rows))
    num_held_out = max(round(len(rows) * settings.held_out), 1)
    return rows[np.sort(order[num_held_out:])], rows[np.sort(order[:num_held_out])]


def _train(trainer: Trainer, rows: PackedRows, settings: TrainSettings, quiet: bool, until: int | None) -> None:
    per_step = rows.num_tokens / max(len(rows), 1) * settings.batch_rows
    done = round(trainer.step * per_step)
    if trainer.step and not quiet:
        log.warning("taking up the training at step %d of %d", trainer.step, trainer.total_steps)
    bar = _bar(f"training {settings.algorithm}", round(trainer.total_steps * per_step), quiet, done)
    trainer.run((lambda tokens, note: None) if bar is None else bar.add, until)
    if bar is not None:
        bar.close(f"step {trainer.step}/{trainer.total_steps}")


def _bar(what: str, total: int, quiet: bool, done: int = 0) -> Progress | None:
    return None if quiet else Progress(what, total, done)


def _tag(points: tuple[int, ...]) -> str:
    return "-".join("f" if point < 0 else str(point) for point in points)


def _digest(*parts: PackedRows) -> str:
    digest = hashlib.sha256()
    for rows in parts:
        for array in (rows.ids, rows.segments, rows.answers):
            digest.update(array.tobytes())
    return digest.hexdigest()[:16]


def _coverage(rows: PackedRows, ids: np.ndarray | None) -> float:
    """Part of the held-out answers' tokens that the draft knows."""
    answers = rows.ids[rows.answers]
    return 1.0 if ids is None or not answers.size else round(float(np.isin(answers, ids).mean()), 4)
