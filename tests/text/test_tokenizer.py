"""Token ids: against reference cases, and the roles of special tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import BOS, EOS, EOT, byte_tokenizer_files

from jaxserve.core.errors import InvalidRequest, ModelLoadError
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.text.tokenizer import Tokenizer, read_json

REFERENCE = Path(__file__).parent.parent / "reference"


def byte_tokenizer(path: Path, add_bos: bool = False, words: tuple[str, ...] = (), **config: object) -> Tokenizer:
    byte_tokenizer_files(path, add_bos=add_bos, words=words)
    return Tokenizer.from_file(path / "tokenizer.json", {**read_json(path / "tokenizer_config.json"), **config})


@pytest.fixture(scope="module")
def smollm2(default_model: Path) -> Tokenizer:
    return open_checkpoint(default_model).tokenizer


def test_400_cases_of_the_real_model(smollm2: Tokenizer) -> None:
    cases = json.loads((REFERENCE / "tokenizer_cases.json").read_text())
    assert len(cases) == 400
    assert [(text, smollm2.encode(text)) for text, _ in cases] == [(text, ids) for text, ids in cases]
    assert [smollm2.decode(ids) for _, ids in cases] == [text for text, _ in cases]


def test_roles_of_the_real_model(smollm2: Tokenizer) -> None:
    roles = (smollm2.bos_token_id, smollm2.eos_token_id, smollm2.pad_token_id, smollm2.vocab_size, smollm2.adds_bos)
    assert roles == (1, 2, 2, 49152, False)
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.encode("") == []
    assert smollm2.encode("<|im_end|>") == [2]
    assert 2 not in smollm2.encode("<|im_end|>", parse_special=False)
    assert smollm2.decode(smollm2.encode("<|im_end|>", parse_special=False)) == "<|im_end|>"


@pytest.mark.parametrize("name", sorted(p.stem for p in REFERENCE.glob("0*.json")))
def test_output_text_of_the_real_model(smollm2: Tokenizer, name: str) -> None:
    case = json.loads((REFERENCE / f"{name}.json").read_text())
    assert smollm2.encode(case["prompt"]) == case["prompt_ids"]
    assert smollm2.decode(case["output_ids"], skip_special_tokens=False) == case["output_text"]


def test_bos_is_added_only_as_configured(tmp_path: Path) -> None:
    plain = byte_tokenizer(tmp_path / "plain")
    assert (plain.encode("a"), plain.adds_bos) == ([97], False)
    adding = byte_tokenizer(tmp_path / "adding", add_bos=True)
    assert (adding.encode("a"), adding.encode(""), adding.adds_bos) == ([BOS, 97], [BOS], True)
    assert adding.encode("a", add_special_tokens=False) == [97]
    # tokenizer_config.json overrules the post-processor, both ways.
    assert byte_tokenizer(tmp_path / "off", add_bos=True, add_bos_token=False).encode("a") == [97]
    assert byte_tokenizer(tmp_path / "on", add_bos_token=True).encode("a") == [BOS, 97]


def test_text_that_begins_with_bos_gets_no_second(tmp_path: Path) -> None:
    by_post_processor = byte_tokenizer(tmp_path / "processor", add_bos=True)
    by_config = byte_tokenizer(tmp_path / "config", add_bos_token=True)
    for tokenizer in (by_post_processor, by_config):
        assert tokenizer.encode("<s>a") == [BOS, 97]
        assert tokenizer.encode("<s><s>a") == [BOS, BOS, 97]
        assert tokenizer.encode("<s>a", parse_special=False) == [BOS, *b"<s>a"]


def test_lone_surrogates_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate at character 1"):
        byte_tokenizer(tmp_path).encode("a\ud800")


def test_bytes_and_text_of_single_tokens(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path, words=("Paris", "né à"))
    assert tokenizer.token_bytes(0xF0) == b"\xf0"
    assert tokenizer.token_text(0xF0) == "\ufffd"
    assert tokenizer.token_text(32) == " "
    assert tokenizer.token_bytes(EOT) == b"<|eot|>"
    assert tokenizer.encode("Paris né à") == [260, 32, 261]
    assert tokenizer.token_bytes(261) == "né à".encode()
    assert tokenizer.token_bytes(9999) == b""
    assert tokenizer.vocab_size == 262


def test_words_are_not_special_but_controls_are(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path, words=("Paris",))
    assert tokenizer.special_ids == {256, 257, 258, 259}
    assert tokenizer.decode([97, EOS, 260, 5000]) == "aParis"
    assert tokenizer.decode([97, EOS, 260], skip_special_tokens=False) == "a</s>Paris"


def test_eos_is_special_even_if_the_file_forgot(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path, words=("STOP",), eos_token={"content": "STOP"})
    assert tokenizer.eos_token_id == 260
    assert 260 in tokenizer.special_ids


def test_refusals_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: no such file"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
    with pytest.raises(ModelLoadError, match="bos_token '<x>'"):
        byte_tokenizer(tmp_path, bos_token="<x>")
    broken = json.loads((tmp_path / "tokenizer.json").read_text())
    broken["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(broken))
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: tokenizer decoder WordPiece"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text(json.dumps({**broken, "decoder": None}))
    with pytest.raises(ModelLoadError, match="no decoder"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
