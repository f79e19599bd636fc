"""Checkpoints that load, and damaged ones that must not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from oracle import full_recompute_logits
from tiny import (
    byte_tokenizer_files,
    tiny_config,
    tiny_tensors,
    write_folder,
    write_gguf,
    write_safetensors,
    write_tiny,
    write_tiny_gguf,
)

from jaxserve.core.errors import ModelLoadError
from jaxserve.models.layers import rope_inverse_frequencies
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.safetensors_files import SafetensorsFiles
from jaxserve.models.loading.weights import dummy_model, load_model

PROMPT = list(range(60, 84))
SHARD_2 = "model-00002-of-00002.safetensors"


def logits_of(path: Path) -> np.ndarray:
    return full_recompute_logits(load_model(open_checkpoint(path), jnp.float32), PROMPT)


def edit_json(path: Path, edit: Callable[[Any], Any]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


# O-34: what must load


def test_shards_give_the_same_logits_as_one_file(tmp_path: Path) -> None:
    one, two = write_tiny(tmp_path / "one"), write_tiny(tmp_path / "two", num_shards=2)
    np.testing.assert_array_equal(logits_of(one), logits_of(two))


def test_tied_head_may_be_absent_or_present(tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=True)
    tensors = tiny_tensors(config)
    absent = write_folder(byte_tokenizer_files(tmp_path / "absent"), config, tensors)
    embedding = tensors["model.embed_tokens.weight"]
    present = write_folder(byte_tokenizer_files(tmp_path / "present"), config, {**tensors, "lm_head.weight": embedding})
    untied_config = tiny_config(tie_word_embeddings=False)
    untied = write_folder(
        byte_tokenizer_files(tmp_path / "un"), untied_config, {**tensors, "lm_head.weight": embedding}
    )
    np.testing.assert_array_equal(logits_of(absent), logits_of(present))
    np.testing.assert_allclose(logits_of(absent), logits_of(untied), atol=1e-5)


def test_bfloat16_is_read_from_raw_bytes(tmp_path: Path) -> None:
    header = b'{"w":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}'
    data = len(header).to_bytes(8, "little") + header + bytes.fromhex("803f00c0")
    (tmp_path / "model.safetensors").write_bytes(data)
    np.testing.assert_array_equal(SafetensorsFiles(tmp_path)["w"].astype(np.float32), [1.0, -2.0])


def test_bfloat16_checkpoint_loads(tmp_path: Path) -> None:
    rounded = logits_of(write_tiny(tmp_path / "bf16", dtype="bfloat16"))
    exact = logits_of(write_tiny(tmp_path / "f32"))
    assert 0 < np.abs(rounded - exact).max() < 0.5


def test_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = tiny_tensors(config)
    plain = write_folder(byte_tokenizer_files(tmp_path / "a"), config, tensors)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    np.testing.assert_array_equal(
        logits_of(plain), logits_of(write_folder(byte_tokenizer_files(tmp_path / "b"), config, tensors))
    )


# O-34: what must be refused, naming file or tensor


def drop_shard(path: Path) -> None:
    (path / SHARD_2).unlink()


def promise_too_much(path: Path) -> None:
    edit_json(path / "model.safetensors.index.json", lambda index: index["weight_map"].update(ghost=SHARD_2))


def swap_shard(path: Path) -> None:
    edit_json(
        path / "model.safetensors.index.json",
        lambda index: index["weight_map"].update({"model.embed_tokens.weight": SHARD_2}),
    )


def truncate(path: Path) -> None:
    file = path / SHARD_2
    file.write_bytes(file.read_bytes()[:-100])


def truncate_header(path: Path) -> None:
    file = path / SHARD_2
    file.write_bytes(file.read_bytes()[:50])


def empty_file(path: Path) -> None:
    (path / SHARD_2).write_bytes(b"")


def break_header(path: Path) -> None:
    file = path / SHARD_2
    file.write_bytes(file.read_bytes().replace(b'"dtype"', b'"dtyqe"', 1))


def lengthen_tensor(path: Path) -> None:
    file = path / SHARD_2
    file.write_bytes(file.read_bytes().replace(b"[64, 64]", b"[64, 65]", 1))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (drop_shard, SHARD_2),
        (promise_too_much, "ghost"),
        (swap_shard, "model.embed_tokens.weight"),
        (truncate, f"{SHARD_2}: cut short: tensor lm_head.weight|{SHARD_2}: cut short"),
        (truncate_header, SHARD_2),
        (empty_file, SHARD_2),
        (break_header, f"{SHARD_2}: damaged header entry of tensor"),
        (lengthen_tensor, f"{SHARD_2}: tensor .* needs 16640 bytes"),
    ],
)
def test_damaged_shards_are_refused_when_opened(tmp_path: Path, damage: Callable[[Path], None], named: str) -> None:
    path = write_tiny(tmp_path, num_shards=2)
    damage(path)
    with pytest.raises(ModelLoadError, match=named):
        open_checkpoint(path)


def changed_tensors(path: Path, **changes: np.ndarray | None) -> Path:
    config = tiny_config()
    tensors = {**tiny_tensors(config), **{n.replace("__", "."): t for n, t in changes.items()}}
    return write_folder(byte_tokenizer_files(path), config, {n: t for n, t in tensors.items() if t is not None})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lm_head__weight": None}, "lm_head.weight is missing"),
        ({"model__norm__weight": None}, "model.norm.weight is missing"),
        ({"model__layers__1__self_attn__k_proj__weight": None}, r"layers\.1\.self_attn\.k_proj\.weight is missing"),
        (
            {"model__layers__1__self_attn__k_proj__weight": np.zeros((33, 64), np.float32)},
            r"k_proj\.weight has shape \[33, 64\], the config asks for \[32, 64\]",
        ),
        ({"model__layers__2__mlp__up_proj__weight": np.zeros((1, 1), np.float32)}, r"does not use: model\.layers\.2"),
    ],
)
def test_tensors_must_fit_the_model(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    checkpoint = open_checkpoint(changed_tensors(tmp_path, **changes))
    with pytest.raises(ModelLoadError, match=named) as error:
        load_model(checkpoint, jnp.float32)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("prepare", "named"),
    [
        (lambda path: path.rmdir(), "no such file"),
        (lambda path: None, "config.json"),
        (lambda path: (path / "config.json").write_text("{"), "config.json: not valid JSON"),
        (lambda path: (path / "config.json").write_text("[]"), "wanted a JSON object"),
        (lambda path: (write_tiny(path) / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda path: (write_tiny(path) / "tokenizer.json").write_text("{}"), "tokenizer.json: not a readable"),
        (lambda path: (write_tiny(path) / "model.safetensors").unlink(), "no model.safetensors"),
        (lambda path: write_tiny(path, vocab_size=259), "knows 260 token ids"),
        (lambda path: write_tiny(path, eos_token_id=260), "eos_token_id 260"),
        (lambda path: write_tiny(path, quantization_config={"quant_method": "gptq"}), "gptq"),
        (
            lambda path: edit_json(write_tiny(path) / "tokenizer_config.json", lambda c: c.update(eos_token="</x>")),
            "</x>",
        ),
    ],
)
def test_folder_must_be_whole(tmp_path: Path, prepare: Callable[[Path], Any], named: str) -> None:
    path = tmp_path / "model"
    path.mkdir()
    prepare(path)
    with pytest.raises(ModelLoadError, match=named):
        open_checkpoint(path)


def test_chat_template_file_wins(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, chat_template="from config")
    assert open_checkpoint(path).chat_template == "from config"
    (path / "chat_template.jinja").write_text("from file")
    assert open_checkpoint(path).chat_template == "from file"
    assert open_checkpoint(write_tiny(tmp_path / "none", chat_template=None)).chat_template is None


def test_a_template_for_tools_is_found(tmp_path: Path) -> None:
    path = write_tiny(tmp_path)
    assert open_checkpoint(path).tool_chat_template is None
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    edit_json(path / "tokenizer_config.json", lambda config: config.update(chat_template=named))
    found = open_checkpoint(path)
    assert (found.chat_template, found.tool_chat_template) == ("plain", "tools")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text("from file")
    assert open_checkpoint(path).tool_chat_template == "from file"


def test_weights_are_copied_out_of_the_file(tmp_path: Path) -> None:
    path = write_tiny(tmp_path)
    loaded = load_model(open_checkpoint(path), jnp.float32)
    before = full_recompute_logits(loaded, PROMPT)
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(4000)
        file.write(bytes(200_000))
    np.testing.assert_array_equal(full_recompute_logits(loaded, PROMPT), before)


def test_dummy_model_has_the_same_leaves(tmp_path: Path) -> None:
    loaded = load_model(open_checkpoint(write_tiny(tmp_path)), jnp.float32)
    dummy, again = (dummy_model(loaded.config, jnp.float32, seed=3) for _ in range(2))
    assert [leaf.shape for leaf in dummy.leaves] == [leaf.shape for leaf in loaded.leaves]
    assert dummy.treedef == loaded.treedef
    np.testing.assert_array_equal(full_recompute_logits(dummy, PROMPT), full_recompute_logits(again, PROMPT))


# O-35: GGUF


@pytest.mark.parametrize(("storage", "tolerance"), [("F32", 1e-4), ("F16", 0.1), ("BF16", 0.6), ("Q8_0", 1.0)])
def test_gguf_logits_equal_safetensors(tmp_path: Path, storage: str, tolerance: float) -> None:
    expected = logits_of(write_tiny(tmp_path / "folder"))
    found = logits_of(write_tiny_gguf(tmp_path / "tiny.gguf", storage=storage))
    np.testing.assert_allclose(found, expected, atol=tolerance, rtol=0)


def test_gguf_decides_about_eos_added_tokens_and_padding(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "Tiny-1.Q8_0.gguf", eos_token_id=258, words=["Paris"], num_padded_rows=8)
    checkpoint = open_checkpoint(path)
    assert checkpoint.name == "Tiny-1"
    assert checkpoint.model_config.eos_token_ids == (258,)
    assert checkpoint.tokenizer.encode("to Paris") == [*b"to ", 260]
    assert checkpoint.tokenizer.decode([260]) == "Paris"
    # Rows without a token cannot be sampled: there is no logit for them.
    assert checkpoint.model_config.vocab_size == 261
    assert logits_of(path).shape == (len(PROMPT), 261)


def test_gguf_end_of_turn_also_ends_output(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "t.gguf", metadata={"tokenizer.ggml.eot_token_id": 258})
    assert open_checkpoint(path).model_config.eos_token_ids == (257, 258)


@pytest.mark.parametrize("key", ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.padding_token_id"])
def test_gguf_special_id_outside_the_vocabulary_names_the_key(tmp_path: Path, key: str) -> None:
    with pytest.raises(ModelLoadError, match=f"{key} is 260"):
        open_checkpoint(write_tiny_gguf(tmp_path / "t.gguf", metadata={key: 260}))


def test_gguf_eos_outside_the_vocabulary_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.eos_token_id is 300"):
        open_checkpoint(write_tiny_gguf(tmp_path / "t.gguf", eos_token_id=300))


def test_gguf_rope_factors_are_applied(tmp_path: Path) -> None:
    """A converter folds llama3 scaling into rope_freqs.weight; both spellings must give the same logits."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = tiny_config(rope_scaling=scaling)
    factors = rope_inverse_frequencies(16, 1e4, None) / rope_inverse_frequencies(16, 1e4, scaling)
    tensors = tiny_tensors(config)
    folder = write_folder(byte_tokenizer_files(tmp_path / "folder"), config, tensors)
    tensors["rope_freqs.weight"] = factors.astype(np.float32)
    found = logits_of(write_gguf(tmp_path / "t.gguf", config, tensors))
    np.testing.assert_allclose(found, logits_of(folder), atol=1e-4)
    assert np.abs(found - logits_of(write_tiny(tmp_path / "plain"))).max() > 0.01


def test_cut_gguf_is_refused_at_every_length(tmp_path: Path) -> None:
    whole = write_tiny_gguf(tmp_path / "t.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for num_bytes in (0, 3, 10, 20, 100, 1000, 3000, 6000, 9000, len(whole) // 2, len(whole) - 64):
        cut.write_bytes(whole[:num_bytes])
        with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
            open_checkpoint(cut)


def test_damaged_gguf_never_raises_anything_else(tmp_path: Path) -> None:
    whole = write_tiny_gguf(tmp_path / "t.gguf").read_bytes()
    random = np.random.default_rng(0)
    path = tmp_path / "damaged.gguf"
    num_refused = 0
    for _ in range(150):
        damaged = bytearray(whole)
        for place in random.integers(0, 9000, 4):
            damaged[place] = random.integers(0, 256)
        path.write_bytes(damaged)
        try:
            open_checkpoint(path)
        except ModelLoadError:
            num_refused += 1
    assert num_refused > 20


def test_unknown_tensor_in_gguf_is_refused(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = {**tiny_tensors(config), "surplus.weight": np.zeros((64, 64), np.float32)}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "t.gguf", config, tensors))
    with pytest.raises(ModelLoadError, match=r"does not use: surplus\.weight"):
        load_model(checkpoint, jnp.float32)


def test_single_shard_file_under_another_name(tmp_path: Path) -> None:
    path = write_tiny(tmp_path)
    (path / "model.safetensors").rename(path / "weights.safetensors")
    assert logits_of(path).shape == (len(PROMPT), 260)
    write_safetensors(path / "more.safetensors", {"w": np.zeros(1, np.float32)})
    with pytest.raises(ModelLoadError, match="2 safetensors files"):
        open_checkpoint(path)
