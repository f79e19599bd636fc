"""The losses against drafts run as a server runs them: one chain, one block at a time, from the model's outputs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import full_attention

from jaxserve.models.draft import FINAL
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.draft import init_draft
from jaxserve.models.loading.mtp import load_mtp_layers
from jaxserve.models.loading.token_map import with_token_map
from jaxserve.models.loading.weights import LoadedModel, load_model
from jaxserve.training.continuations import Sample
from jaxserve.training.losses import Batch, dflash_guesses, eagle3_guesses, eagle_guesses, mtp_guesses
from jaxserve.training.packing import pack
from jaxserve.training.target_states import compute_states

FIXTURES = Path(__file__).parent.parent / "fixtures"
TEXTS = [Sample([*b"one two three"], 4), Sample([*b"abcdef"], 2), Sample([*b"xyzzy!"], 0)]
KNOWN = sorted({*b"one two three abcdef xyz!"} - {ord("d")})


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return load_model(open_checkpoint(FIXTURES / "gqa"), jnp.float32)


def states_of(ids: np.ndarray, width: int) -> np.ndarray:
    """Made-up states: any will do, as long as both ways see the same."""
    return np.random.default_rng(int(ids.sum())).standard_normal((len(ids), width)).astype(np.float32)


def make_batch(captured_size: int, hidden: int) -> Batch:
    rows = pack(TEXTS, 16)
    assert len(rows) == 2 and rows.segments.max() == 2  # two texts share a row
    captured, final = (np.zeros((*rows.ids.shape, width), np.float32) for width in (captured_size, hidden))
    for row, segment, ids in texts_of(rows):
        where = rows.segments[row] == segment
        both = states_of(ids, captured_size + hidden)
        captured[row, where], final[row, where] = both[:, :captured_size], both[:, captured_size:]
    greedy = np.full_like(rows.ids, KNOWN[3])
    return Batch(
        *(jnp.asarray(x) for x in (rows.ids, rows.segments, rows.positions, rows.answers, captured, final, greedy))
    )


def texts_of(rows) -> list[tuple[int, int, np.ndarray]]:
    """(row, segment, ids) of every text."""
    return [
        (row, segment, np.asarray(rows.ids[row])[np.asarray(rows.segments[row]) == segment])
        for row in range(len(rows.ids))
        for segment in range(1, int(np.max(rows.segments[row])) + 1)
    ]


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize(("algorithm", "num_layers"), [("EAGLE3", 1), ("EAGLE3", 2), ("EAGLE", 1), ("EAGLE", 2)])
def test_unrolled_guesses_are_those_of_chains(target: LoadedModel, algorithm: str, num_layers: int) -> None:
    num_steps, is_eagle = 3, algorithm == "EAGLE"
    own_ids = None if is_eagle else KNOWN
    loaded = init_draft(algorithm, target, jnp.float32, target_ids=own_ids, num_layers=num_layers, seed=3)
    loaded = with_token_map(loaded, np.array(KNOWN)) if is_eagle else loaded
    # Larger weights than a new draft's, so that attention matters.
    loaded.leaves[:] = [leaf * 5 if leaf.ndim == 2 and "proj" in path else leaf
                        for path, leaf in zip(loaded.paths, loaded.leaves, strict=True)]  # fmt: skip
    model = loaded.bind(loaded.leaves)
    batch = make_batch(len(model.feature_points) * 48, 48)
    head = np.asarray(target.leaf("lm_head"))[KNOWN]
    if is_eagle:
        found = jax.jit(partial(eagle_guesses, num_steps=num_steps, cross_entropy_weight=0.3))(model, batch)
    else:
        found = jax.jit(partial(eagle3_guesses, num_steps=num_steps))(model, jnp.asarray(head), batch)

    padded = 16 + num_steps  # rows behind a chain change nothing in front of them, and one shape compiles once

    @jax.jit
    def run(tokens: jax.Array, fed: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden = model(tokens, jnp.arange(padded), fed, full_attention(model.config.attention_windows))
        return hidden, model.logits(hidden)

    losses: list[list[float]] = [[] for _ in range(num_steps)]
    distances: list[list[float]] = [[] for _ in range(num_steps)]
    right, tried = np.zeros(num_steps), np.zeros(num_steps)
    for row, segment, ids in texts_of(batch):
        where = np.asarray(batch.segments[row]) == segment
        features = np.asarray(model.features(batch.captured[row][where]))
        final, answers = np.asarray(batch.final[row])[where], np.asarray(batch.answers[row])[where]
        for start in range(len(ids)):
            fed, alive = features[: start + 1], True
            for step in range(num_steps):
                if start + step + 2 >= len(ids):
                    break
                tokens, last = ids[1 : start + step + 2], start + step
                hidden, all_logits = run(np.pad(tokens, (0, padded - len(tokens))), at_front(fed, padded))
                fed = np.concatenate([fed, hidden[last : last + 1]])
                logits = np.asarray(all_logits)[last]
                if answers[start + step + 2]:
                    alive &= KNOWN[int(logits.argmax())] == KNOWN[3]
                    right[step] += alive
                    tried[step] += 1
                    error = np.abs(np.asarray(hidden[last]) - final[start + step + 1])
                    distances[step].append(np.where(error < 1, error**2 / 2, error - 0.5).mean())
                    if ids[start + step + 2] in KNOWN:
                        teacher = np.exp(log_softmax(head @ final[start + step + 1]))
                        losses[step].append(-(teacher * log_softmax(logits)).sum())
                else:
                    alive &= KNOWN[int(logits.argmax())] == KNOWN[3]
    wanted = np.array([np.mean(each) for each in losses])
    wanted = np.array([np.mean(each) for each in distances]) + 0.3 * wanted if is_eagle else wanted
    np.testing.assert_allclose(found.loss, wanted, rtol=1e-4)
    np.testing.assert_array_equal(found.tried, tried)
    np.testing.assert_array_equal(found.accepted, right)


def test_guesses_of_mtp_layers_are_those_of_single_layers() -> None:
    """Each over each text alone, whose window is shorter than the texts."""
    checkpoint = open_checkpoint(FIXTURES / "mimo")
    mimo = load_model(checkpoint, jnp.float32)
    layers = load_mtp_layers(checkpoint, mimo, jnp.float32)
    models = [layer.bind(layer.leaves) for layer in layers]
    batch = make_batch(32, 32)
    head, length = np.asarray(mimo.leaf("lm_head")), batch.ids.shape[1]

    @jax.jit
    def run(leaves: list[jax.Array], tokens: jax.Array, features: jax.Array) -> jax.Array:
        model = layers[0].bind(leaves)
        return model.logits(model(tokens, jnp.arange(length), features, full_attention((5,))))

    losses: list[list[float]] = [[], []]
    texts = []
    for row, segment, ids in texts_of(batch):
        where = np.asarray(batch.segments[row]) == segment
        features = at_front(np.asarray(batch.captured[row])[where], length)
        final, answers = np.asarray(batch.final[row])[where], np.asarray(batch.answers[row])[where]
        scores = [np.asarray(run(layer.leaves, np.pad(ids[n + 1 :], (0, length - len(ids) + n + 1)), features))
                  for n, layer in enumerate(layers)]  # fmt: skip
        texts.append((row, np.flatnonzero(where), answers, scores))
        for n in range(2):
            for i in range(len(ids) - n - 2):
                if answers[i + n + 2]:
                    teacher = np.exp(log_softmax(head @ final[i + n + 1]))
                    losses[n].append(-(teacher * log_softmax(scores[n][i])).sum())
    # What the target would write is what layer 0 guesses there at two places of three, else what layer 1 does.
    greedy = np.zeros_like(batch.ids)
    for row, places, _, scores in texts:
        for i, place in enumerate(places[1:]):
            by_second = i % 3 == 2
            greedy[row, place] = scores[by_second][i - by_second].argmax()
    right, tried = np.zeros(2), np.zeros(2)
    for row, places, answers, scores in texts:
        for i in range(len(places)):
            alive = True
            for n in range(2):
                if i + n + 1 < len(places):
                    alive &= bool(scores[n][i].argmax() == greedy[row, places[i + n + 1]])
                if i + n + 2 < len(places) and answers[i + n + 2]:
                    right[n] += alive
                    tried[n] += 1
    found = jax.jit(lambda batch: mtp_guesses(models, batch))(batch._replace(greedy=jnp.asarray(greedy)))
    np.testing.assert_allclose(found.loss, [np.mean(each) for each in losses], rtol=1e-4)
    np.testing.assert_array_equal(found.tried, tried)
    np.testing.assert_array_equal(found.accepted, right)
    assert 0 < right[1] < right[0] < tried[0]


@pytest.mark.parametrize("name", ["gqa", "mimo"])
def test_states_are_those_of_each_text_alone(name: str, tmp_path: Path) -> None:
    """With windows and attention sinks, where the model has them; the final state is kept once, captured or not."""
    loaded = load_model(open_checkpoint(FIXTURES / name), jnp.float32)
    rows, last = pack(TEXTS, 16), loaded.config.num_layers
    for points in ((last, FINAL, 1), (0,)):
        found = compute_states(loaded, rows, points, tmp_path / f"{len(points)}.bin", True)
        batch, width = found.batch(np.arange(2)), loaded.config.hidden_size
        assert found.states.shape[2] == (len({*points, FINAL})) * width
        for row, segment, ids in texts_of(rows):
            where = rows.segments[row] == segment
            seen: dict[int, jax.Array] = {}
            model = loaded.bind(loaded.leaves)
            attend = full_attention(loaded.config.attention_windows)
            seen[FINAL] = model(jnp.asarray(ids), jnp.arange(len(ids)), attend, seen.__setitem__)
            captured = np.concatenate([np.asarray(seen[point]) for point in points], axis=1)
            np.testing.assert_allclose(batch.captured[row][where], captured, rtol=0.01, atol=1e-3)
            np.testing.assert_allclose(batch.final[row][where], seen[FINAL], rtol=0.01, atol=1e-3)
            np.testing.assert_array_equal(batch.greedy[row][where], model.logits(seen[FINAL]).argmax(axis=-1))


def test_guesses_of_blocks_are_those_of_single_blocks(target: LoadedModel) -> None:
    size, mask = 4, 259
    loaded = init_draft("DFLASH", target, jnp.float32, target_ids=KNOWN, num_layers=2, block_size=size,
                        mask_token_id=mask, feature_points=(1, 0), seed=3)  # fmt: skip
    loaded.leaves[:] = [leaf * 5 if leaf.ndim == 2 and "proj" in path else leaf
                        for path, leaf in zip(loaded.paths, loaded.leaves, strict=True)]  # fmt: skip
    model = loaded.bind(loaded.leaves)
    batch = make_batch(2 * 48, 48)
    # As many blocks as places: every place that can begin a block does, in some order.
    found = jax.jit(partial(dflash_guesses, num_blocks=16))(model, batch, key=jax.random.key(0))

    @jax.jit
    def run(block: jax.Array, captured: jax.Array, start: jax.Array) -> jax.Array:
        pool = model.context(captured, jnp.arange(16))
        return model.logits(model(block, start + jnp.arange(size), block_attention(pool, start)))

    losses: list[list[float]] = [[] for _ in range(size - 1)]
    right, tried = np.zeros(size - 1), np.zeros(size - 1)
    for row, segment, ids in texts_of(batch):
        where = np.asarray(batch.segments[row]) == segment
        answers = np.asarray(batch.answers[row])[where]
        captured = at_front(np.asarray(batch.captured[row])[where], 16)
        for start in range(len(ids) - 1):
            if not answers[start + 1]:
                continue
            block = np.array([ids[start], *[mask] * (size - 1)], np.int32)
            logits, alive = np.asarray(run(block, captured, start)), True
            for place in range(1, size):
                if start + place >= len(ids):
                    break
                alive &= KNOWN[int(logits[place].argmax())] == ids[start + place]
                right[place - 1] += alive
                tried[place - 1] += 1
                if ids[start + place] in KNOWN:
                    losses[place - 1].append(-log_softmax(logits[place])[KNOWN.index(ids[start + place])])
    np.testing.assert_allclose(found.loss, [np.mean(each) for each in losses], rtol=1e-4)
    np.testing.assert_array_equal(found.tried, tried)
    np.testing.assert_array_equal(found.accepted, right)


def at_front(rows: np.ndarray, size: int) -> np.ndarray:
    return np.pad(rows, ((0, size - len(rows)), (0, 0)))


def block_attention(pool, start: jax.Array):
    """The first ``start`` entries of the pool, and the whole block."""

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        keys, values = (jnp.concatenate(pair) for pair in zip(pool[layer], (k, v), strict=True))
        keys, values = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (keys, values))
        seen = (jnp.arange(len(keys)) < start) | (jnp.arange(len(keys)) >= len(pool[layer][0]))
        scores = jnp.where(seen, jnp.einsum("qhd,khd->hqk", q, keys) / np.sqrt(q.shape[2]), -jnp.inf)
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, axis=-1), values)

    return attend
