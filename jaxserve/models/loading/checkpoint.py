"""A checkpoint on disk, whatever its format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.core.errors import ModelLoadError
from jaxserve.models.config import ModelConfig
from jaxserve.models.loading.gguf_file import GgufFile
from jaxserve.models.loading.safetensors_files import SafetensorsFiles
from jaxserve.models.registry import read_model_config
from jaxserve.text.gguf_tokenizer import tokenizer_from_gguf
from jaxserve.text.tokenizer import Tokenizer, read_json


@dataclass(frozen=True)
class Checkpoint:
    """What a model folder or file holds.

    Attributes:
        name: name to serve it under.
        path: folder or file.
        config: content of ``config.json`` (made from the metadata for GGUF).
        generation_config: content of ``generation_config.json``, or empty.
        tensors: Hugging Face tensor name -> array, read when asked for.
        tokenizer: its tokenizer.
        chat_template: jinja source, or None.
        tool_chat_template: the one to use with tools, where there is one of its own.
        model_config: ``config`` and ``generation_config`` in the engine's terms.
    """

    name: str
    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: Mapping[str, np.ndarray] = field(repr=False)
    tokenizer: Tokenizer = field(repr=False)
    chat_template: str | None = field(repr=False)
    tool_chat_template: str | None = field(repr=False, default=None)
    model_config: ModelConfig = field(init=False, repr=False)

    def __post_init__(self) -> None:
        config = read_model_config(self.config, self.generation_config, source=str(self.path))
        if self.tokenizer.vocab_size > config.vocab_size:
            raise ModelLoadError(
                f"{self.path}: the tokenizer knows {self.tokenizer.vocab_size} token ids, "
                f"the model only {config.vocab_size}; its tokenizer belongs to another model"
            )
        for token_id in config.eos_token_ids:
            if not 0 <= token_id < config.vocab_size:
                raise ModelLoadError(
                    f"{self.path}: eos_token_id {token_id} is outside the vocabulary of {config.vocab_size} tokens"
                )
        object.__setattr__(self, "model_config", config)


def open_model_config(path: str | Path) -> ModelConfig:
    """What ``config.json`` or GGUF metadata say about a model. Weights and tokenizer are not read and may be absent.

    Raises:
        ModelLoadError: no such path, or a missing or damaged file; names it.
    """
    path = Path(path)
    if (path / "config.json").is_file():
        generation_config = _optional_json(path / "generation_config.json")
        return read_model_config(read_json(path / "config.json"), generation_config, source=str(path))
    found = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    if len(found) != 1:
        raise ModelLoadError(f"{path}: wanted a folder with config.json (or one .gguf file), found neither")
    if not found[0].is_file():
        raise ModelLoadError(f"{path}: no such file or folder; give a Hugging Face folder, a .gguf file or 'default'")
    return read_model_config(GgufFile(found[0]).config, {}, source=str(path))


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a Hugging Face folder or a ``.gguf`` file; weights are not read yet.

    Raises:
        ModelLoadError: no such path, or a missing, damaged or contradicting file; names it.
    """
    path = Path(path)
    if path.is_dir():
        if (path / "config.json").is_file():
            return _open_folder(path)
        found = sorted(path.glob("*.gguf"))
        if len(found) == 1:
            return _open_gguf(found[0])
        raise ModelLoadError(f"{path}: wanted a folder with config.json (or one .gguf file), found neither")
    if not path.is_file():
        raise ModelLoadError(f"{path}: no such file or folder; give a Hugging Face folder, a .gguf file or 'default'")
    return _open_gguf(path)


def _open_gguf(path: Path) -> Checkpoint:
    file = GgufFile(path)
    return Checkpoint(
        name=file.model_name,
        path=path,
        config=file.config,
        generation_config={},
        tensors=file,
        tokenizer=tokenizer_from_gguf(file.metadata, str(path)),
        chat_template=file.metadata.get("tokenizer.chat_template"),
        tool_chat_template=file.metadata.get("tokenizer.chat_template.tool_use"),
    )


def _open_folder(path: Path) -> Checkpoint:
    config = read_json(path / "config.json")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        raise ModelLoadError(f"{path / 'config.json'}: quantization_config ({method}) is not supported")
    tokenizer_config = _optional_json(path / "special_tokens_map.json")
    tokenizer_config.update(_optional_json(path / "tokenizer_config.json"))
    return Checkpoint(
        name=path.resolve().name,
        path=path,
        config=config,
        generation_config=_optional_json(path / "generation_config.json"),
        tensors=SafetensorsFiles(path),
        tokenizer=Tokenizer.from_file(path / "tokenizer.json", tokenizer_config),
        chat_template=_chat_template(path, tokenizer_config),
        tool_chat_template=_named_template(path, tokenizer_config, "tool_use"),
    )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _chat_template(path: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    return _named_template(path, tokenizer_config, "default") if isinstance(template, list) else template


def _named_template(path: Path, tokenizer_config: Mapping[str, Any], name: str) -> str | None:
    """One of several templates; None if there is none of that name."""
    file = path / "additional_chat_templates" / f"{name}.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    templates = tokenizer_config.get("chat_template")
    if not isinstance(templates, list):
        return None
    return next((each.get("template") for each in templates if each.get("name") == name), None)
