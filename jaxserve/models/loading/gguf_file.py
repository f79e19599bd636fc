"""A GGUF file as a checkpoint: configuration in Hugging Face terms, tensors under Hugging Face names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.core.errors import ModelLoadError
from jaxserve.models.loading.gguf_header import GgufHeader, dequantize
from jaxserve.text.gguf_tokenizer import num_used_tokens

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
_QUANTIZATION_SUFFIX = re.compile(r"[.-](I?Q\d\w*|F16|F32|BF16)$", re.IGNORECASE)


class GgufFile(Mapping[str, np.ndarray]):
    """Tensor name -> Float32 array, dequantised when asked for.

    Rows of q and k are put back into Hugging Face order, and rows of the embedding and head beyond the tokenizer's
    vocabulary (padding) are left out, so that they can never be sampled.

    Attributes:
        path: the file.
        metadata: key -> value.
        config: what ``config.json`` would say.
    """

    def __init__(self, path: Path):
        """Reads the header.

        Raises:
            ModelLoadError: a damaged file, an architecture other than llama, or contradicting metadata (names the key).
        """
        header = GgufHeader(path)
        self.path = path
        self.metadata = header.metadata
        architecture = self._required("general.architecture")
        if architecture != "llama":
            raise ModelLoadError(
                f"{path}: general.architecture is {architecture!r}, which is not supported for GGUF files; "
                "supported: llama; others can be loaded from safetensors"
            )
        self._tensors = {_hf_name(name): tensor for name, tensor in header.tensors.items() if name != _ROPE_FACTORS}
        self._rope_factors = header.tensors.get(_ROPE_FACTORS)
        self._num_tokens = num_used_tokens(
            self.metadata.get("tokenizer.ggml.token_type") or [1] * len(self._required("tokenizer.ggml.tokens"))
        )
        self.config = self._make_config()

    @property
    def model_name(self) -> str:
        """The file's name without the quantisation."""
        return _QUANTIZATION_SUFFIX.sub("", self.path.stem)

    def __getitem__(self, name: str) -> np.ndarray:
        values = dequantize(self.path, self._tensors[name])
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            return values[: self._num_tokens]
        if ".q_proj." in name:
            return _unpermute(values, self.config["num_attention_heads"])
        if ".k_proj." in name:
            return _unpermute(values, self.config["num_key_value_heads"])
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def _required(self, key: str) -> Any:
        value = self.metadata.get(key)
        if value is None:
            raise ModelLoadError(f"{self.path}: metadata key {key} is missing")
        return value

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self.metadata.get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelLoadError(f"{self.path}: metadata key {key} must be one integer, got {value!r}")
        return value

    def _make_config(self) -> dict[str, Any]:
        num_heads = self._integer("llama.attention.head_count")
        hidden_size = self._integer("llama.embedding_length")
        head_dim = self._integer("llama.attention.key_length", hidden_size // max(num_heads, 1))
        for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
            if self._integer(key, head_dim) != head_dim:
                raise ModelLoadError(f"{self.path}: {key} is {self.metadata[key]}, wanted the head size {head_dim}")
        if self.metadata.get("llama.expert_count"):
            raise ModelLoadError(f"{self.path}: llama.expert_count is set; mixtures of experts are not supported")
        if (rows := self._embedding_rows()) < self._num_tokens:
            raise ModelLoadError(f"{self.path}: token_embd.weight has {rows} rows for {self._num_tokens} tokens")
        return {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": self._num_tokens,
            "hidden_size": hidden_size,
            "intermediate_size": self._integer("llama.feed_forward_length"),
            "num_hidden_layers": self._integer("llama.block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._integer("llama.attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "rms_norm_eps": self._required("llama.attention.layer_norm_rms_epsilon"),
            "rope_theta": self.metadata.get("llama.rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(),
            "max_position_embeddings": self._integer("llama.context_length"),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "eos_token_id": self._eos_ids(),
            "bos_token_id": self.metadata.get("tokenizer.ggml.bos_token_id"),
            "attention_bias": any(name.endswith("q_proj.bias") for name in self._tensors),
            "mlp_bias": any(name.endswith("gate_proj.bias") for name in self._tensors),
        }

    def _embedding_rows(self) -> int:
        if "model.embed_tokens.weight" not in self._tensors:
            raise ModelLoadError(f"{self.path}: tensor token_embd.weight is missing")
        return self._tensors["model.embed_tokens.weight"].shape[0]

    def _rope_scaling(self) -> dict[str, Any] | None:
        kind = self.metadata.get("llama.rope.scaling.type", "none")
        # Converters fold Llama 3's scaling into one divisor per frequency.
        if self._rope_factors is not None:
            if kind != "none":
                raise ModelLoadError(f"{self.path}: both {_ROPE_FACTORS} and llama.rope.scaling.type {kind!r} given")
            factors = dequantize(self.path, self._rope_factors).reshape(-1)
            return {"rope_type": "frequency_factors", "factors": [float(f) for f in factors]}
        if kind == "none":
            return None
        return {"rope_type": kind, "factor": self._required("llama.rope.scaling.factor")}

    def _eos_ids(self) -> list[int]:
        ids = []
        for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"):
            token_id = self.metadata.get(key)
            if token_id is None:
                continue
            if not 0 <= token_id < self._num_tokens:
                raise ModelLoadError(f"{self.path}: {key} is {token_id}, the vocabulary has {self._num_tokens} tokens")
            ids.append(token_id)
        return ids


def _hf_name(name: str) -> str:
    if match := _LAYER_NAME.fullmatch(name):
        layer, part, kind = match.groups()
        if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    stem, _, kind = name.rpartition(".")
    return f"{_OTHER_NAMES[stem]}.{kind}" if stem in _OTHER_NAMES else name


def _unpermute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Pairs (2i, 2i + 1) of each head, as llama.cpp rotates them, back to (i, i + head_dim / 2)."""
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
