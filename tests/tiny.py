"""Tiny checkpoints and tokenizers, made with numpy alone.

BYTE    byte-level tokenizer without merges: ids 0 .. 255 are bytes, then <s>, </s>, <|eot|>, <pad>.
TINY    random Llama over BYTE that reacts to every token of its context.
MARKOV  Llama whose next-token logits are exactly row ``table[last token]``; ``write_kinds``: in TINY's shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

BOS, EOS, EOT, PAD = 256, 257, 258, 259
BYTE_VOCAB = 260
TINY_SEED = 377  # smallest top-2 margin over 200 greedy tokens after TINY_PROMPT: 0.0276, the best of 400 seeds
TINY_PROMPT = tuple(b"The lighthouse keeper climbed the spiral stairs.")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
_SAFETENSORS_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def byte_alphabet() -> list[str]:
    """Printable stand-in for each byte, as GPT-2 chose them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def byte_tokenizer_files(
    path: str | Path, *, add_bos: bool = False, words: Sequence[str] = (), chat_template: str | None = CHAT_TEMPLATE
) -> Path:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json`` of BYTE; ``words`` become ids from 260 up (BYTE+)."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    specials = ["<s>", "</s>", "<|eot|>", "<pad>"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": 256 + i, "content": text, "special": i < len(specials), **flags}
        for i, text in enumerate([*specials, *words])
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, sequence],
        "pair": [sequence, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}},
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": template if add_bos else None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {char: byte for byte, char in enumerate(byte_alphabet())},
            "merges": [],
        },
    }
    config: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """``config.json`` of TINY."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": BYTE_VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }
    return {**config, **overrides}


def tiny_tensors(config: Mapping[str, Any], seed: int = TINY_SEED) -> dict[str, np.ndarray]:
    """Weights of TINY under Hugging Face names: embedding N(0, 1), matrices N(0, 0.2^2), norms 1."""
    random = np.random.default_rng(seed)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]

    def matrix(rows: int, columns: int, std: float = 0.2) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * std).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(vocab, hidden, 1.0)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        tensors |= {
            f"{layer}.self_attn.q_proj.weight": matrix(q_size, hidden),
            f"{layer}.self_attn.k_proj.weight": matrix(kv_size, hidden),
            f"{layer}.self_attn.v_proj.weight": matrix(kv_size, hidden),
            f"{layer}.self_attn.o_proj.weight": matrix(hidden, q_size),
            f"{layer}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{layer}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{layer}.mlp.down_proj.weight": matrix(hidden, inner),
            f"{layer}.input_layernorm.weight": np.ones(hidden, np.float32),
            f"{layer}.post_attention_layernorm.weight": np.ones(hidden, np.float32),
        }
    tensors["model.norm.weight"] = np.ones(hidden, np.float32)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(vocab, hidden)
    return tensors


def write_tiny(
    path: str | Path,
    seed: int = TINY_SEED,
    *,
    num_shards: int = 1,
    dtype: str = "float32",
    add_bos: bool = False,
    words: Sequence[str] = (),
    chat_template: str | None = CHAT_TEMPLATE,
    generation_config: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """Writes TINY as a Hugging Face folder; ``overrides`` replace keys of ``config.json``."""
    config = tiny_config(**overrides)
    path = byte_tokenizer_files(path, add_bos=add_bos, words=words, chat_template=chat_template)
    return write_folder(path, config, tiny_tensors(config, seed), num_shards, dtype, generation_config)


def write_markov(path: str | Path, table: np.ndarray, **overrides: Any) -> Path:
    """Writes a Llama whose logits after token i are ``table[i]`` (Float[vocab, vocab]), to 2e-6 in float32."""
    vocab, hidden = len(table), 272
    if table.shape != (vocab, vocab) or not BYTE_VOCAB <= vocab <= hidden:
        raise ValueError(f"table must be square with {BYTE_VOCAB} .. {hidden} rows, got shape {table.shape}")
    config = tiny_config(vocab_size=vocab, hidden_size=hidden, head_dim=hidden // 4, **overrides)
    tensors = tiny_tensors(config)
    tensors["model.embed_tokens.weight"] = np.eye(vocab, hidden, dtype=np.float32)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = np.zeros_like(tensors[name])
    # The final norm divides the one-hot row by its root mean square.
    root_mean_square = np.sqrt(1 / hidden + config["rms_norm_eps"])
    head = np.zeros((vocab, hidden), np.float32)
    head[:, :vocab] = table.T * root_mean_square
    tensors["lm_head.weight"] = head
    return write_folder(byte_tokenizer_files(path), config, tensors)


def write_kinds(path: str | Path, kinds: np.ndarray, table: np.ndarray) -> Path:
    """Writes a Markov model of TINY's shape, which finds TINY's programs: logits after token i are ``table[kinds[i]]``.

    Args:
        kinds: int[260], fewer than 64 different ones, counted from 0.
        table: Float[kinds, 260].
    """
    config = tiny_config()
    hidden = config["hidden_size"]
    tensors = tiny_tensors(config)
    # A one-hot row of root mean square 1, which the final norm divides by sqrt(1 + eps).
    embed = np.sqrt(hidden) * np.eye(hidden, dtype=np.float32)[kinds]
    head = np.zeros((BYTE_VOCAB, hidden), np.float32)
    head[:, : len(table)] = table.T * np.sqrt((1 + config["rms_norm_eps"]) / hidden)
    tensors |= {"model.embed_tokens.weight": embed, "lm_head.weight": head}
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = np.zeros_like(tensors[name])
    return write_folder(byte_tokenizer_files(path), config, tensors)


def write_folder(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    num_shards: int = 1,
    dtype: str = "float32",
    generation_config: Mapping[str, Any] | None = None,
) -> Path:
    """Writes ``config.json`` and the tensors, in one file or in shards with an index."""
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if generation_config is not None:
        (path / "generation_config.json").write_text(json.dumps(generation_config), encoding="utf-8")
    tensors = {name: tensor.astype(_numpy_dtype(dtype)) for name, tensor in tensors.items()}
    if num_shards == 1:
        write_safetensors(path / "model.safetensors", tensors)
        return path
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        names = list(tensors)[shard::num_shards]
        write_safetensors(path / file_name, {name: tensors[name] for name in names})
        weight_map |= {name: file_name for name in names}
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return path


def _numpy_dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes  # not needed, nor there, where fixtures are made with torch

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes one safetensors file: header length, JSON header, data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in tensors.items():
        kind = _SAFETENSORS_NAMES[tensor.dtype.name]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, start + tensor.nbytes]}
        start += tensor.nbytes
    # Padded so that the data is aligned as JAX wants it, which makes sharing memory with the file possible.
    encoded = json.dumps(header).encode()
    encoded += b" " * (-(8 + len(encoded)) % 64)
    data = b"".join(np.ascontiguousarray(tensor).tobytes() for tensor in tensors.values())
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def write_tiny_gguf(
    path: str | Path,
    seed: int = TINY_SEED,
    *,
    storage: str = "F32",
    eos_token_id: int = EOS,
    words: Sequence[str] = (),
    num_padded_rows: int = 0,
    metadata: Mapping[str, int] | None = None,
    **overrides: Any,
) -> Path:
    """Writes TINY as a GGUF file. ``num_padded_rows`` embedding rows have no token; ``metadata`` adds uint32 keys."""
    config = tiny_config(vocab_size=BYTE_VOCAB + len(words) + num_padded_rows, **overrides)
    return write_gguf(
        path, config, tiny_tensors(config, seed), storage, eos_token_id=eos_token_id, words=words, metadata=metadata
    )


def write_gguf(
    path: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    storage: str = "F32",
    *,
    eos_token_id: int = EOS,
    words: Sequence[str] = (),
    metadata: Mapping[str, int] | None = None,
) -> Path:
    """Writes a llama GGUF file with the BYTE tokenizer, rows of q and k permuted as converters do."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = [*byte_alphabet(), "<s>", "</s>", "<|eot|>", "<pad>", *words]
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] * 4 + [4] * len(words))
    writer.add_token_merges([])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(eos_token_id)
    for key, value in (metadata or {}).items():
        writer.add_uint32(key, value)
    kind = gguf.GGMLQuantizationType[storage]
    for name, tensor in tensors.items():
        if ".q_proj." in name:
            tensor = _permute(tensor, config["num_attention_heads"])
        elif ".k_proj." in name:
            tensor = _permute(tensor, config["num_key_value_heads"])
        stored = gguf.GGMLQuantizationType.F32 if tensor.ndim == 1 else kind
        writer.add_tensor(_gguf_name(name), gguf.quantize(tensor, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def _permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows (i, i + head_dim / 2) of each head become neighbours, which is how llama.cpp pairs them."""
    head_dim = len(weight) // num_heads
    half = head_dim // 2
    order = [h * head_dim + i + j for h in range(num_heads) for i in range(half) for j in (0, half)]
    return weight[order]


def _gguf_name(name: str) -> str:
    others = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    stem, _, kind = name.rpartition(".")
    if stem in others:
        return f"{others[stem]}.{kind}"
    if not stem.startswith("model.layers."):
        return name
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{parts[part]}.{kind}"
