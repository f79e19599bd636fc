"""Streamed text: whole characters, exact stop strings, nothing lost."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from test_gguf_tokenizer import sentencepiece_metadata
from tiny import EOS, EOT, byte_tokenizer_files

from jaxserve.text.detokenizer import IncrementalDetokenizer
from jaxserve.text.gguf_tokenizer import tokenizer_from_gguf
from jaxserve.text.tokenizer import Tokenizer, read_json

MIXED_TEXT = "A 世ab 🌶é한"
MIXED_IDS = [65, 32, 228, 184, 150, 97, 98, 32, 240, 159, 140, 182, 195, 169, 237, 149, 156]


@pytest.fixture(scope="module")
def byte_plus(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = byte_tokenizer_files(tmp_path_factory.mktemp("byte"), words=("Paris", "né"))
    return Tokenizer.from_file(path / "tokenizer.json", read_json(path / "tokenizer_config.json"))


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    return tokenizer_from_gguf(sentencepiece_metadata(), "sp.gguf")


def run(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    stop: tuple[str, ...] = (),
    step: int = 1,
    include_stop: bool = False,
    skip: bool = True,
) -> tuple[list[str], str | None]:
    """Deltas (the last from ``finish``) and the matched stop string, ``step`` tokens per push."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip, stop, include_stop)
    deltas: list[str] = []
    for start in range(0, len(ids), step):
        delta, matched = detokenizer.push(ids[start : start + step])
        deltas.append(delta)
        if matched is not None:
            break
    deltas.append(detokenizer.finish())
    return deltas, detokenizer.matched_stop


# O-01


@pytest.mark.parametrize("step", [1, 2, 4, 100])
def test_characters_are_never_split(byte_plus: Tokenizer, step: int) -> None:
    deltas, _ = run(byte_plus, [*MIXED_IDS, EOS], step=step)
    assert "".join(deltas) == MIXED_TEXT == byte_plus.decode(MIXED_IDS) == byte_plus.backend.decode(MIXED_IDS)
    assert not any("\ufffd" in delta for delta in deltas)
    if step == 1:
        assert [d for d in deltas if d] == list(MIXED_TEXT)


@pytest.mark.parametrize("step", [1, 3])
def test_cut_character_becomes_one_replacement_at_the_end(byte_plus: Tokenizer, step: int) -> None:
    deltas, _ = run(byte_plus, MIXED_IDS[:10], step=step)
    assert deltas[-1] == "\ufffd"
    assert not any("\ufffd" in delta for delta in deltas[:-1])
    assert "".join(deltas) == byte_plus.decode(MIXED_IDS[:10]) == byte_plus.backend.decode(MIXED_IDS[:10])


@pytest.mark.parametrize("step", [1, 2, 7])
def test_random_bytes_stream_as_they_decode(byte_plus: Tokenizer, step: int) -> None:
    source = random.Random(step)
    for _ in range(300):
        ids = [source.choice([*range(190, 262), 65, 128, 160]) for _ in range(source.randrange(30))]
        for skip in (True, False):
            deltas, _ = run(byte_plus, ids, step=step, skip=skip)
            assert "".join(deltas) == byte_plus.decode(ids, skip) == byte_plus.backend.decode(ids, skip)


def sentencepiece_ids(tokenizer: Tokenizer, *names: str) -> list[int]:
    return [tokenizer.backend.token_to_id(name) for name in names]


def test_sentencepiece_streams_as_it_decodes(sentencepiece: Tokenizer) -> None:
    text = f"hi there {MIXED_TEXT}"
    ids = sentencepiece.encode(text)
    for step in (1, 4):
        deltas, _ = run(sentencepiece, ids, step=step)
        assert "".join(deltas) == text == sentencepiece.decode(ids) == sentencepiece.backend.decode(ids)
        assert not any("\ufffd" in delta for delta in deltas)
        assert not deltas[1].startswith(" ")


def test_sentencepiece_strips_one_leading_space_only(sentencepiece: Tokenizer) -> None:
    for names in (["▁", "▁hi"], ["▁hi", "▁hi"], ["hi", "▁"], ["▁"], ["<s>", "▁hi"], ["<0x20>", "▁hi"]):
        ids = sentencepiece_ids(sentencepiece, *names)
        for skip in (True, False):
            expected = sentencepiece.backend.decode(ids, skip)
            assert "".join(run(sentencepiece, ids, skip=skip)[0]) == sentencepiece.decode(ids, skip) == expected


def test_sentencepiece_never_takes_back_a_character(sentencepiece: Tokenizer) -> None:
    broken = sentencepiece_ids(sentencepiece, "<0xF0>", "<0x9F>", "▁hi")
    assert "".join(run(sentencepiece, broken)[0]) == sentencepiece.backend.decode(broken) == "\ufffd\ufffd hi"
    # Where the library would turn the é it has already given out into U+FFFD, the é stays.
    after_whole = sentencepiece_ids(sentencepiece, "<0xC3>", "<0xA9>", "<0xF0>", "▁hi")
    assert "".join(run(sentencepiece, after_whole)[0]) == sentencepiece.decode(after_whole) == "é\ufffd hi"


# O-02


@pytest.mark.parametrize("step", [1, 2, 3, 9])
@pytest.mark.parametrize(
    ("stop", "num_tokens", "text", "matched"),
    [
        (("DEFGHIJ",), 9, "", "DEFGHIJ"),
        (("DEFGHIX",), 9, "DEFGHIJKL", None),
        (("DEFGHIX",), 4, "DEFG", None),
        (("EF", "DEFG"), 9, "D", "EF"),
        (("DEFG", "EF"), 9, "D", "EF"),
        (("EFG", "FG"), 9, "D", "EFG"),  # both complete with G: the longer counts
        (("L",), 9, "DEFGHIJK", "L"),
    ],
)
def test_stop_string_spread_over_tokens(
    byte_plus: Tokenizer, stop: tuple[str, ...], num_tokens: int, text: str, matched: str | None, step: int
) -> None:
    assert ["".join(run(byte_plus, b"DEFGHIJKL"[:num_tokens], stop, step)[0]), matched] == [text, matched]
    assert run(byte_plus, b"DEFGHIJKL"[:num_tokens], stop, step)[1] == matched


def test_held_text_is_released_as_soon_as_it_cannot_match(byte_plus: Tokenizer) -> None:
    deltas, _ = run(byte_plus, b"DEFGHIJKL", ("DEFGHIX",))
    assert deltas[:7] == ["", "", "", "", "", "", "DEFGHIJ"]


def test_held_text_overlapping_itself(byte_plus: Tokenizer) -> None:
    assert run(byte_plus, b"aabaab!", ("aab!",)) == (["", "", "", "aab", "", "", "", ""], "aab!")


def test_random_stops_do_not_depend_on_the_number_of_tokens_per_push(byte_plus: Tokenizer) -> None:
    source = random.Random(0)
    for _ in range(500):
        ids = [source.choice(b"ab\xc3\xa9") for _ in range(24)]
        stop = tuple("".join(source.choices("abé\ufffd", k=source.randint(1, 4))) for _ in range(source.randint(1, 3)))
        results = set()
        for step in (1, 2, 5, 24):
            deltas, matched = run(byte_plus, ids, stop, step)
            results.add(("".join(deltas), matched))
        whole = byte_plus.decode(ids)
        ends = [(whole.find(s) + len(s), whole.find(s), s) for s in stop if s in whole]
        assert results == ({(whole[: min(ends)[1]], min(ends)[2])} if ends else {(whole, None)})


# O-03


@pytest.mark.parametrize("skip", [True, False])
def test_ending_on_a_special_token_eats_no_text(byte_plus: Tokenizer, skip: bool) -> None:
    for special, text in ((EOS, "</s>"), (EOT, "<|eot|>")):
        deltas, _ = run(byte_plus, [*b"Hello world", special], skip=skip)
        assert "".join(deltas) == "Hello world" + ("" if skip else text)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(("include", "text"), [(False, "Hello "), (True, "Hello world")])
def test_matched_stop_is_kept_on_request(byte_plus: Tokenizer, skip: bool, include: bool, text: str) -> None:
    deltas, matched = run(byte_plus, [*b"Hello world", EOS], ("world",), include_stop=include, skip=skip)
    assert ("".join(deltas), matched) == (text, "world")


def test_stop_may_end_inside_a_token(byte_plus: Tokenizer) -> None:
    ids = [*b"in ", 260, *b"!"]
    assert run(byte_plus, ids, ("Par",)) == (["i", "n", " ", "", ""], "Par")
    assert "".join(run(byte_plus, ids, ("Par",), include_stop=True)[0]) == "in Par"


def test_tokens_up_to_the_stop_are_counted(byte_plus: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_plus, stop=("FG",))
    assert detokenizer.push(b"DEFGHIJKL") == ("DE", "FG")
    assert detokenizer.num_tokens == 4
    assert detokenizer.push(b"MN") == ("", "FG")
    assert detokenizer.finish() == ""


def test_finish_twice_gives_nothing_more(byte_plus: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_plus, stop=("xy",))
    assert detokenizer.push([*b"ax", 0xC3]) == ("a", None)
    assert detokenizer.finish() == "x\ufffd"
    assert detokenizer.finish() == ""


def test_empty_stop_is_a_mistake(byte_plus: Tokenizer) -> None:
    with pytest.raises(ValueError, match="non-empty"):
        IncrementalDetokenizer(byte_plus, stop=("",))


def test_work_per_token_does_not_grow(byte_plus: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    decoder = byte_plus._decoder
    original = type(decoder).piece
    monkeypatch.setattr(type(decoder), "piece", lambda self, token_id: calls.append(1) or original(self, token_id))
    run(byte_plus, MIXED_IDS * 50, ("never",))
    assert len(calls) == len(MIXED_IDS) * 50


def test_control_tokens_may_be_shown_one_by_one(byte_plus: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_plus, shown_special_ids=(EOT,))
    assert detokenizer.push([72, EOT, EOS, 105])[0] + detokenizer.finish() == "H<|eot|>i"
