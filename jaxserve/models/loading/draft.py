"""Draft models: loaded from disk, made anew, and saved. Arrays a draft shares with its target are the target's own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from jaxserve.core.errors import ConfigError, ModelLoadError
from jaxserve.models.config import ModelConfig
from jaxserve.models.dflash import DflashModel, default_target_layers, dflash_tensors, dflash_weight_map
from jaxserve.models.draft import FINAL, DraftConfig, target_ids_of
from jaxserve.models.eagle import EagleModel, eagle_tensors, eagle_weight_map
from jaxserve.models.eagle3 import Eagle3Model, default_feature_points, eagle3_tensors, eagle3_weight_map
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.draft_config import ARCHITECTURES, TRAINED_STEPS, read_draft_config, write_draft_config
from jaxserve.models.loading.draft_files import KINDS, DraftFiles, open_draft_files
from jaxserve.models.loading.weights import (
    IGNORED_SUFFIX,
    LoadedModel,
    RecordedTensors,
    abstract_parameters,
    fill_parameters,
    load_model,
    refuse_names,
)
from jaxserve.models.weight_map import take


@dataclass(frozen=True)
class _Kind:
    model_class: Callable[..., Any]
    weight_map: Callable[..., Iterable[tuple[str, np.ndarray]]]
    tensors: Callable[..., Iterable[tuple[str, jax.Array]]]


_KINDS = {
    "EAGLE": _Kind(EagleModel, eagle_weight_map, eagle_tensors),
    "EAGLE3": _Kind(Eagle3Model, eagle3_weight_map, eagle3_tensors),
    "DFLASH": _Kind(DflashModel, dflash_weight_map, dflash_tensors),
}
HEAD_ALGORITHMS = tuple(_KINDS)
_HEADS = Path(__file__).parents[1] / "heads"  # package data: heads for the default model


def load_draft(path: str | Path, algorithm: str, target: LoadedModel, dtype: Any) -> LoadedModel:
    """The draft model for ``algorithm``, bound to ``target``.

    Args:
        path: a draft checkpoint; for ``"STANDALONE"`` any model checkpoint.
        algorithm: ``"EAGLE"``, ``"EAGLE3"``, ``"DFLASH"`` or ``"STANDALONE"``.
        target: the model whose tokens are to be guessed. Its embedding and head appear among the draft's leaves as the
            same arrays where they are shared, or where the checkpoint's copies are equal to them.
        dtype: of the draft's own weights.

    Raises:
        ConfigError: an algorithm without a draft model.
        ModelLoadError: a checkpoint of another kind, one that is damaged or contradicts itself, or one made for another
            target; says what was wanted, what came and what to do.
    """
    if algorithm not in (*_KINDS, "STANDALONE"):
        raise ConfigError(
            f"--speculative-algorithm {algorithm} takes no draft checkpoint; those that do: "
            f"{', '.join((*_KINDS, 'STANDALONE'))}"
        )
    files = open_draft_files(Path(path))
    check_kind(files, algorithm)
    if algorithm == "STANDALONE":
        return _load_standalone(files.path, target, dtype)
    try:
        return _load_head(files, algorithm, target, dtype)
    except ModelLoadError as error:
        text = str(error)
        raise ModelLoadError(text if text.startswith(str(files.path)) else f"{files.path}: {text}") from error


def abstract_draft(path: str | Path, algorithm: str, target: LoadedModel, dtype: Any) -> LoadedModel:
    """A head whose leaves are shapes and dtypes alone: enough to compile its programs.

    Raises:
        ModelLoadError: as ``load_draft``, as far as its configuration goes.
    """
    files = open_draft_files(Path(path))
    check_kind(files, algorithm)
    draft = read_draft_config(files, target.config)
    graphdef, treedef, wanted = abstract_parameters(_KINDS[algorithm].model_class, draft, dtype)
    return LoadedModel(graphdef, treedef, list(wanted.values()), draft.decoder)  # type: ignore[arg-type]


def has_default_draft(algorithm: str) -> bool:
    """Whether a head for the default model comes with the package."""
    return (_HEADS / algorithm.lower() / "config.json").is_file()


def default_draft_path(algorithm: str) -> Path:
    """The draft checkpoint for the default model that comes with the package.

    Raises:
        ConfigError: there is none for this algorithm; lists those there are.
    """
    if has_default_draft(algorithm):
        return _HEADS / algorithm.lower()
    there = sorted(found.parent.name.upper() for found in _HEADS.glob("*/config.json"))
    raise ConfigError(
        f"no default draft model for --speculative-algorithm {algorithm}; there is one for: "
        f"{', '.join(there) or 'none'}; "
        "give --speculative-draft-model-path a folder, or train one with jaxserve train-draft"
    )


def check_kind(files: DraftFiles, algorithm: str) -> None:
    """Raises ModelLoadError if the checkpoint is of another kind than the algorithm wants."""
    if files.kind == algorithm:
        return
    if files.kind == "STANDALONE":
        remedy = "give the head that was trained for the target, or use --speculative-algorithm STANDALONE"
    else:
        remedy = f"use --speculative-algorithm {files.kind}, or give {KINDS[algorithm]}"
    raise ModelLoadError(
        f"{files.path}: --speculative-algorithm {algorithm} wants {KINDS[algorithm]}, this is "
        f"{KINDS[files.kind]}; {remedy}"
    )


def _load_standalone(path: Path, target: LoadedModel, dtype: Any) -> LoadedModel:
    checkpoint = open_checkpoint(path)
    if checkpoint.model_config.vocab_size != target.config.vocab_size:
        raise ModelLoadError(
            f"{path}: the draft model knows {checkpoint.model_config.vocab_size} token ids, the target "
            f"{target.config.vocab_size}; STANDALONE wants a model with the target's tokenizer, such "
            "as a smaller one of "
            "its family"
        )
    return load_model(checkpoint, dtype)


def _load_head(files: DraftFiles, algorithm: str, target: LoadedModel, dtype: Any) -> LoadedModel:
    kind = _KINDS[algorithm]
    tensors = RecordedTensors(files.tensors)
    draft = read_draft_config(files, target.config)
    maps = {name: tensors[name] for name in ("d2t", "t2d") if name in tensors}
    target_ids = target_ids_of(maps.get("d2t"), maps.get("t2d"), draft.draft_vocab_size, target.config.vocab_size)
    draft, shared = _shared_arrays(draft, files, tensors, target, dtype)
    graphdef, treedef, wanted = abstract_parameters(kind.model_class, draft, dtype)
    found = {**shared, **fill_parameters(wanted, kind.weight_map(draft, tensors), algorithm)}
    if target_ids is not None:
        found["target_ids"] = jnp.asarray(target_ids)
    refuse_names("parameters without a tensor", [path for path in wanted if path not in found])
    unused = [n for n in tensors if n not in tensors.read and not n.endswith(IGNORED_SUFFIX)]
    refuse_names(f"tensors that {KINDS[algorithm]} does not have here", [n for n in unused if not _of_verifier(n)])
    return LoadedModel(graphdef, treedef, [found[path] for path in wanted], draft.decoder)


def _of_verifier(name: str) -> bool:
    """Copies of the target's weights that *speculators* keeps for training."""
    return name.startswith("verifier_")


def _shared_arrays(
    draft: DraftConfig, files: DraftFiles, tensors: Mapping[str, np.ndarray], target: LoadedModel, dtype: Any
) -> tuple[DraftConfig, dict[str, jax.Array]]:
    """Embedding and head, from the checkpoint or the target, and the configuration that says which."""
    decoder, arrays, own = draft.decoder, {}, []
    target_embed, target_head = _target_arrays(target)
    same_width = decoder.hidden_size == draft.target_hidden_size

    embed = target_embed if same_width else None
    if "embed_tokens.weight" in tensors:
        embed = _unless_equal(
            take(tensors, "embed_tokens.weight", (decoder.vocab_size, decoder.hidden_size)), embed, dtype
        )
    if embed is None:
        raise ModelLoadError(
            f"tensor embed_tokens.weight is missing: the draft's hidden size {decoder.hidden_size} differs from the "
            f"target's {draft.target_hidden_size}, so it cannot use the target's embedding"
        )
    if embed is not target_embed:
        own.append("embed_tokens")
    arrays["embed_tokens"] = embed

    head = target_head if same_width and draft.draft_vocab_size == decoder.vocab_size else None
    if "lm_head.weight" in tensors:
        head = _unless_equal(
            take(tensors, "lm_head.weight", (draft.draft_vocab_size, decoder.hidden_size)), head, dtype
        )
    elif decoder.tie_word_embeddings and "embed_tokens" in own and draft.draft_vocab_size == decoder.vocab_size:
        head = embed
    if head is None:
        raise ModelLoadError(
            f"tensor lm_head.weight is missing: the draft's {draft.draft_vocab_size} ids of width "
            f"{decoder.hidden_size} are "
            f"not the target's {decoder.vocab_size} of width {draft.target_hidden_size}, so it cannot "
            "use the target's head"
        )
    if head is not target_head and head is not embed:
        own.append("lm_head")
    tied = head is embed
    if not tied:
        arrays["lm_head"] = head
    return dataclasses.replace(draft, tied_head=tied, own=tuple(own)), arrays


def _target_arrays(target: LoadedModel) -> tuple[jax.Array, jax.Array]:
    embed, head = target.leaf("embed_tokens"), target.leaf("lm_head")
    if embed is None:
        raise ModelLoadError(
            f"target {target.config.architecture} has no parameter embed_tokens, which its drafts "
            "share; draft models work "
            "with targets that name their embedding so"
        )
    return embed, embed if head is None else head


def _unless_equal(tensor: np.ndarray, shared: jax.Array | None, dtype: Any) -> jax.Array:
    """The shared array when the checkpoint's is a copy of it, else the checkpoint's."""
    if shared is not None and np.array_equal(np.asarray(tensor, dtype), np.asarray(shared)):
        return shared
    return jax.device_put(np.array(tensor, dtype=dtype, order="C"))


# -- made anew ---------------------------------------------------------------------------------------------------------


def init_draft(
    algorithm: str,
    target: LoadedModel,
    dtype: Any,
    *,
    num_layers: int = 1,
    intermediate_size: int | None = None,
    target_ids: Sequence[int] | np.ndarray | None = None,
    feature_points: Sequence[int] | None = None,
    block_size: int = 8,
    mask_token_id: int = 0,
    seed: int = 0,
) -> LoadedModel:
    """A draft with random weights, for a training to start from and for tests.

    Args:
        algorithm: ``"EAGLE"``, ``"EAGLE3"`` or ``"DFLASH"``.
        target: the model whose tokens are to be guessed; the draft has its width, heads and rotary embedding.
        num_layers, intermediate_size: of the draft; by default one layer with an MLP as wide as the target's.
        target_ids: which target ids the draft knows, rising; None: all. EAGLE always knows all.
        feature_points: states of the target to be given; None: the algorithm's usual ones.
        block_size, mask_token_id: of DFLASH.

    Raises:
        ConfigError: a setting that cannot work with this target.
    """
    if algorithm not in _KINDS:
        raise ConfigError(f"draft algorithm {algorithm!r} is not known; known: {', '.join(_KINDS)}")
    base = target.config
    vocab = base.vocab_size
    ids = None if target_ids is None else np.asarray(target_ids, np.int64)
    if ids is not None:
        if algorithm == "EAGLE":
            raise ConfigError("EAGLE uses the target's own head and has no vocabulary of its own; give no target_ids")
        try:
            target_ids_of(ids - np.arange(ids.size), np.isin(np.arange(vocab), ids), ids.size, vocab)
        except ModelLoadError as error:
            raise ConfigError(f"target_ids: {error}") from error
        ids = None if ids.size == vocab else ids
    decoder = ModelConfig(
        architecture=ARCHITECTURES[algorithm],
        vocab_size=vocab,
        hidden_size=base.hidden_size,
        intermediate_size=intermediate_size or base.intermediate_size,
        num_layers=num_layers,
        num_heads=base.num_heads,
        num_kv_heads=base.num_kv_heads,
        head_dim=base.head_dim,
        rms_norm_eps=base.rms_norm_eps,
        rope_theta=base.rope_theta,
        rope_scaling=base.rope_scaling,
        max_position_embeddings=base.max_position_embeddings,
        extra={"num_target_layers": base.num_layers},
    )
    points = (
        _default_points(algorithm, base.num_layers, num_layers) if feature_points is None else tuple(feature_points)
    )
    if algorithm == "EAGLE3" and FINAL in points:
        raise ConfigError(
            f"feature_points of EAGLE3: its published layout has no name for the final norm, got {points}"
        )
    last = base.num_layers - (
        algorithm == "DFLASH"
    )  # whose published layout calls the last layer's state the normed one
    if any(not (point == FINAL or 0 <= point <= last) for point in points):
        raise ConfigError(f"feature_points must be 0 .. {last} or {FINAL} (the final norm), got {points}")
    if not 0 <= mask_token_id < vocab or block_size < 2:
        raise ConfigError(
            f"wanted a mask token in 0 .. {vocab - 1} and blocks of >= 2, got {mask_token_id}, {block_size}"
        )
    embed, head = _target_arrays(target)
    draft = DraftConfig(
        algorithm,
        decoder,
        base.hidden_size,
        points,
        vocab if ids is None else ids.size,
        tied_head=ids is None and algorithm != "EAGLE3" and head is embed,
        block_size=block_size if algorithm == "DFLASH" else 0,
        mask_token_id=mask_token_id if algorithm == "DFLASH" else None,
        own=("lm_head",) if algorithm == "EAGLE3" or ids is not None else (),
    )
    module = _KINDS[algorithm].model_class(draft, dtype, nnx.Rngs(seed))
    graphdef, state = nnx.split(module)
    leaves, treedef = jax.tree.flatten(state)
    loaded = LoadedModel(graphdef, treedef, leaves, decoder)
    replaced: dict[str, jax.Array] = {"embed_tokens": embed}
    if "lm_head" in draft.own:
        # Rows of the target's head are where training ends up near anyway.
        replaced["lm_head"] = (head if ids is None else head[ids]).astype(dtype)
    elif not draft.tied_head:
        replaced["lm_head"] = head
    if ids is not None:
        replaced["target_ids"] = jnp.asarray(ids, jnp.int32)
    return dataclasses.replace(
        loaded, leaves=[replaced.get(path, leaf) for path, leaf in zip(loaded.paths, leaves, strict=True)]
    )


def _default_points(algorithm: str, num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    if algorithm == "EAGLE":
        return (FINAL,)
    if algorithm == "EAGLE3":
        return default_feature_points(num_target_layers)
    ids = default_target_layers(num_target_layers, num_layers)
    points = (min(max(i, 0) + 1, num_target_layers) for i in ids)
    return tuple(FINAL if point == num_target_layers else point for point in points)


def save_draft(path: str | Path, draft: LoadedModel, dtype: Any = None, *, trained_steps: int | None = None) -> None:
    """Writes a draft as a folder that ``load_draft`` and other engines read: ``config.json``, ``model.safetensors``.

    Args:
        dtype: of the weights on disk; by default as they are.
        trained_steps: guesses in a row it was trained for; served with as many, unless told otherwise.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    module = draft.bind(draft.leaves)
    config: DraftConfig = module.draft
    tensors = dict(_KINDS[config.algorithm].tensors(module))
    for name in config.own:
        tensors[f"{name}.weight"] = getattr(module, name)[...]
    arrays = {name: np.ascontiguousarray(np.asarray(tensor if dtype is None else tensor.astype(dtype)))
              for name, tensor in tensors.items()}  # fmt: skip
    if module.target_ids is not None:
        ids = np.asarray(module.target_ids[...], np.int64)
        arrays["d2t"] = ids - np.arange(ids.size)
        arrays["t2d"] = np.isin(np.arange(config.decoder.vocab_size), ids)
    partial = path / "model.safetensors.partial"
    save_file(arrays, partial, metadata={"format": "pt"})
    partial.replace(path / "model.safetensors")
    written = write_draft_config(config)
    if trained_steps is not None:
        written[TRAINED_STEPS] = trained_steps
    (path / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
