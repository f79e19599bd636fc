"""Heads that draft some of the target's ids only: by a mapping of their own, or by ``--speculative-token-map``.

The target is a Markov model, and the head knows it by heart: it drafts by the same distribution, cut to its ids.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from harness import make_engine
from safetensors.numpy import load_file, save_file
from tiny import BYTE_VOCAB, write_kinds

from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.draft import init_draft, save_draft
from jaxserve.models.loading.weights import load_model

IDS = [3, 50, 97, 98, 99, 200, 257, 259]
OFFSETS = np.array([3, 49, 95, 95, 95, 195, 251, 252])  # target id - draft id
NUM_DRAFTS = 3
A, B, C = b"abc"
KINDS = np.zeros(BYTE_VOCAB, int)  # behind "b" and "c" comes something else than behind all other ids
KINDS[B], KINDS[C] = 1, 2
NEXT = [{B: 0.5, 200: 0.2, ord("d"): 0.2, ord("e"): 0.1}, {C: 0.7, ord("d"): 0.3}, {A: 0.6, 3: 0.1, ord("x"): 0.3}]
LIMITS = {1: 15.1, 2: 18.4, 3: 21.1}  # chi-square by degrees of freedom, p = 1e-4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The target; a head that knows all ids, the same one with ``d2t``, and maps of ids."""
    folder = tmp_path_factory.mktemp("reduced")
    table = np.full((len(NEXT), BYTE_VOCAB), -40.0)
    for row, chances in zip(table, NEXT, strict=True):
        row[list(chances)] = np.log(list(chances.values()))
    target = load_model(open_checkpoint(write_kinds(folder / "target", KINDS, table)), jnp.float32)
    head = init_draft("EAGLE", target, jnp.float32)
    hidden = target.config.hidden_size
    leaves = dict(zip(head.paths, head.leaves, strict=True))
    leaves["fc"] = jnp.eye(hidden, 2 * hidden)  # the embedding of the token, which the target's head turns into logits
    leaves |= {path: 0 * leaf for path, leaf in leaves.items() if path.endswith(("o_proj", "down_proj"))}
    save_draft(folder / "whole", dataclasses.replace(head, leaves=[leaves[path] for path in head.paths]))

    config = json.loads((folder / "whole" / "config.json").read_text())
    tensors = load_file(folder / "whole" / "model.safetensors")
    (folder / "d2t").mkdir()
    (folder / "d2t" / "config.json").write_text(json.dumps(config | {"draft_vocab_size": len(IDS)}))
    more = {"lm_head.weight": np.asarray(target.leaf("lm_head"))[IDS], "d2t": OFFSETS}
    save_file(tensors | more, folder / "d2t" / "model.safetensors")
    (folder / "map.json").write_text(json.dumps(IDS[::-1]))
    (folder / "identity.json").write_text(json.dumps(list(range(BYTE_VOCAB))))
    return {name: folder / name for name in ("target", "whole", "d2t", "map.json", "identity.json")}


class Seen(NamedTuple):
    """What an engine said: outputs of the greedy request and of those that sample; every draft; figures of the first.

    Attributes:
        relays: drafts behind the newest tokens of all slots, after each step of the requests that sample.
    """

    greedy: list[int]
    sampled: list[list[int]]
    relays: list[np.ndarray]
    mean_accepted_length: float


def served(folders: dict[str, Path], head: str, **settings: Any) -> Seen:
    engine = make_engine(
        folders["target"], speculative_algorithm="EAGLE", speculative_draft_model_path=str(folders[head]),
        speculative_num_steps=NUM_DRAFTS, speculative_adaptive=False, disable_overlap_schedule=True, **settings,
    )  # fmt: skip
    relays: list[np.ndarray] = []

    def run(requests: dict[str, SamplingParams]) -> list[list[int]]:
        outputs: dict[str, list[int]] = {name: [] for name in requests}
        for name, params in requests.items():
            engine.add(Request(name, (A, B, C), params))
        while engine.has_work:
            for delta in engine.step():
                assert delta.error is None
                outputs[delta.request_id] += delta.token_ids
            relays.append(np.asarray(engine.parts.worker.draft_runner.runner.relay)[:-1].copy())
        engine.scheduler.check_integrity()
        return list(outputs.values())

    try:
        num_tokens = 1 + 12 * (NUM_DRAFTS + 1)
        [greedy] = run({"greedy": SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)})
        length = engine.scheduler.speculation.figures.mean_accepted_length
        relays.clear()
        params = [SamplingParams(max_tokens=120, temperature=1.0, seed=i, ignore_eos=True) for i in range(16)]
        return Seen(greedy, run({str(i): each for i, each in enumerate(params)}), relays, length)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def whole(folders) -> Seen:
    """With a head that knows all ids."""
    return served(folders, "whole")


@pytest.fixture(scope="module")
def mapped(folders) -> Seen:
    """With the head that knows eight ids by ``d2t``."""
    return served(folders, "d2t")


def test_a_reduced_vocabulary_drafts_the_right_ids(mapped):
    """O-29: every draft holds while the text stays among the draft's ids. Bad mappings: test_draft_loading.py."""
    assert mapped.greedy == ([A, B, C] * 17)[: len(mapped.greedy)]
    assert mapped.mean_accepted_length == NUM_DRAFTS + 1


def test_ids_that_are_never_drafted_are_sampled_as_often_as_they_should(mapped, whole):
    """O-29; and token for token what the whole head leads to."""
    assert mapped.sampled == whole.sampled
    counts = np.zeros((len(NEXT), BYTE_VOCAB), int)
    for output in mapped.sampled:
        tokens = np.array([C, *output])
        np.add.at(counts, (KINDS[tokens[:-1]], tokens[1:]), 1)
    for row, chances in zip(counts, NEXT, strict=True):
        found, expected = row[list(chances)], row.sum() * np.array(list(chances.values()))
        assert found.sum() == row.sum() > 300
        assert ((found - expected) ** 2 / expected).sum() < LIMITS[len(chances) - 1]
    assert counts[:, [ord("d"), ord("e"), ord("x")]].sum() > 300


def test_a_token_map_is_what_d2t_is(folders, mapped):
    """The same drafts and tokens; only ids of the map are drafted."""
    found = served(folders, "whole", speculative_token_map=str(folders["map.json"]))
    assert found.greedy == mapped.greedy and found.sampled == mapped.sampled
    assert found.mean_accepted_length == mapped.mean_accepted_length
    np.testing.assert_array_equal(found.relays, mapped.relays)
    drafted = np.unique(found.relays)
    assert set(drafted.tolist()) <= {0, *IDS} and len(drafted) > 4  # 0: a slot that nobody has used yet


def test_a_map_of_all_ids_drafts_what_no_map_drafts(folders, whole):
    found = served(folders, "whole", speculative_token_map=str(folders["identity.json"]))
    assert found.greedy == whole.greedy and found.sampled == whole.sampled
    np.testing.assert_array_equal(found.relays, whole.relays)
    assert not set(np.unique(whole.relays).tolist()) <= {0, *IDS}
