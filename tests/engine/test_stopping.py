"""Where outputs end, and what text they leave: stop strings, stop ids, end-of-sequence ids, length."""

from __future__ import annotations

import itertools

import pytest
from rig import Collected, add, generate, greedy, markov_table, run
from tiny import EOS, EOT, PAD, write_markov

from jaxserve.core.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def script(engines, tmp_path_factory):
    """``script(text, end)`` is an engine that says ``text`` after the prompt byte 1, and then the token ``end``."""
    made = {}

    def engine(text: str, end: int = EOS):
        if (text, end) not in made:
            path = tmp_path_factory.mktemp("script")
            made[text, end] = engines(_write_script(path, [*text.encode(), end]))
        return made[text, end]

    return engine


def _write_script(path, ids: list[int]):
    """A MARKOV model whose state is the last token, so that a script must not repeat one."""
    states = [1, *ids]
    assert len(set(states)) == len(states), "a script must not repeat a byte"
    table = markov_table(*[(a, {b: 20.0}) for a, b in itertools.pairwise(states)], default={0: 20.0})
    return write_markov(path, table, eos_token_id=[EOS, EOT])


ALPHABET = "DEFGHIJKL"
HELLO = "Hero wand"  # no byte twice
WIDE = "a世bñ🌶"


def say(engine, **params):
    """The text, the delta texts, and the output of one request."""
    settings = {"max_tokens": 40, "temperature": 0.0, **params}
    request_id = add(engine, [1], SamplingParams(**settings))
    collected = run(engine)
    output = collected[request_id]
    assert "".join(d.text for d in collected.deltas) == output.text
    assert [d.finish_reason for d in collected.deltas[:-1]] == [None] * (len(collected.deltas) - 1)
    return output, [d.text for d in collected.deltas]


@pytest.mark.parametrize(
    ("stop", "max_tokens", "text", "reason", "matched"),
    [
        (("DEFGHIJ",), 40, "", "stop", "DEFGHIJ"),
        (("DEFGHIX",), 40, "DEFGHIJKL", "stop", None),
        (("DEFGHIX",), 4, "DEFG", "length", None),
        (("EF", "DEFG"), 40, "D", "stop", "EF"),
        (("L",), 40, "DEFGHIJK", "stop", "L"),
        (("KLM",), 40, "DEFGHIJKL", "stop", None),  # held back until the end of the sequence, and then given out
        ("GH", 40, "DEF", "stop", "GH"),
    ],
)
def test_stop_strings_over_several_tokens(script, stop, max_tokens, text, reason, matched):
    """O-02. Nothing of a match is ever streamed, and nothing that was held back for one is lost."""
    output, deltas = say(script(ALPHABET), stop=stop, max_tokens=max_tokens)
    assert (output.text, output.finish_reason, output.stop_reason) == (text, reason, matched)
    for i in range(len(deltas)):
        assert text.startswith("".join(deltas[:i]))


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    ("params", "end", "text", "shown", "matched"),
    [
        ({}, EOS, HELLO, HELLO + "</s>", None),
        ({}, EOT, HELLO, HELLO + "<|eot|>", None),  # either of several end-of-sequence ids
        ({"stop_token_ids": [EOT]}, EOT, HELLO, HELLO + "<|eot|>", EOT),
        ({"stop_token_ids": [PAD]}, PAD, HELLO, HELLO + "<pad>", PAD),
        ({"stop": ["wan"]}, EOS, "Hero ", "Hero ", "wan"),
        ({"stop": ["wan"], "include_stop_str_in_output": True}, EOS, "Hero wan", "Hero wan", "wan"),
        ({"stop_token_ids": [ord("d")]}, EOS, "Hero wan", "Hero wand", ord("d")),
        ({"stop_token_ids": [ord("d")], "include_stop_str_in_output": True}, EOS, HELLO, HELLO, ord("d")),
    ],
    ids=str,
)
def test_what_ends_an_output_takes_no_other_text_with_it(script, params, end, text, shown, matched, skip):
    """O-03. A stop id's own text shows where special tokens or stop strings are asked for."""
    output, _ = say(script(HELLO, end), skip_special_tokens=skip, **params)
    assert output.text == (text if skip else shown)
    assert (output.finish_reason, output.stop_reason) == ("stop", matched)
    assert output.token_ids[-1] == (end if text == HELLO and matched != ord("d") else output.token_ids[-1])
    assert bytes(t for t in output.token_ids if t < 256).decode().startswith(text)


@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_characters_of_several_tokens_are_never_split(script, max_tokens):
    output, deltas = say(script(WIDE), max_tokens=max_tokens)
    encoded = WIDE.encode()[:max_tokens]
    assert output.text == encoded.decode(errors="replace")
    assert not any("\ufffd" in delta for delta in deltas[:-1])
    assert output.finish_reason == ("stop" if max_tokens > len(WIDE.encode()) else "length")


def test_nothing_follows_an_end_of_sequence(script):
    """The step behind it was already in flight: after </s> the table goes on with zeros."""
    output, _ = say(script(ALPHABET))
    assert output.token_ids == [*ALPHABET.encode(), EOS]
    output, _ = say(script(ALPHABET), ignore_eos=True, max_tokens=12)
    assert output.token_ids == [*ALPHABET.encode(), EOS, 0, 0]
    assert output.finish_reason == "length"
    assert output.text == ALPHABET + "\0\0"


def test_ignore_eos_ignores_all_of_them_and_nothing_else(engines, tmp_path_factory):
    """O-04 (c): the last id of the vocabulary is no end-of-sequence id."""
    engine = engines(write_markov(tmp_path_factory.mktemp("pad"), markov_table(default={PAD: 20.0})))
    (output,) = generate(engine, [([1], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))])
    assert output.token_ids == [PAD] * 8 and output.finish_reason == "length"
    (output,) = generate(engine, [([1], SamplingParams(max_tokens=8, temperature=0.0))])
    assert output.token_ids == [PAD] * 8


def test_stop_ids_hold_with_ignore_eos(script):
    output, _ = say(script(ALPHABET), ignore_eos=True, stop_token_ids=(EOS,))
    assert output.token_ids[-1] == EOS and output.stop_reason == EOS


def test_outputs_of_one_request_end_at_their_own_times(engines, tmp_path_factory):
    """n outputs: a coin decides at every token whether to go on."""
    path = write_markov(tmp_path_factory.mktemp("coin"), markov_table(default={EOS: 0.0, ord("x"): 1.5}))
    engine = engines(path)
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=4, n=6)
    request_id = add(engine, [1], params)
    collected = run(engine)
    outputs = [collected.outputs[request_id, i] for i in range(6)]
    lengths = {len(o.token_ids) for o in outputs}
    assert len(lengths) > 2
    for output in outputs:
        body, last = output.token_ids[:-1], output.token_ids[-1]
        assert set(body) <= {ord("x")}
        assert (output.finish_reason == "stop") == (last == EOS)
        assert output.text == "x" * (len(body) if last == EOS else 30)


def test_stop_conditions_of_neighbours_are_their_own(script):
    engine = script(ALPHABET)
    collected = Collected()
    stops = [("EF",), ("J",), (), ("nothing",)]
    ids = [add(engine, [1], greedy(9, stop=stop)) for stop in stops]
    run(engine, collected)
    assert [collected[i].text for i in ids] == ["D", "DEFGHI", ALPHABET, ALPHABET]


@pytest.mark.parametrize(("shown", "text"), [((), "ab"), ((PAD,), "a<pad>b")])
def test_a_control_token_may_be_shown(engines, tmp_path, shown, text):
    """What parsers of outputs need: the end of sequence stays hidden all the same."""
    engine = engines(_write_script(tmp_path, [ord("a"), PAD, ord("b"), EOS]))
    assert say(engine, shown_special_ids=shown)[0].text == text
