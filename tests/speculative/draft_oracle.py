"""Tiny draft models of every kind, and what they draft by a full recomputation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import make_engine
from oracle import full_attention

from jaxserve.core.sequence import Sequence
from jaxserve.engine.engine import Engine
from jaxserve.models.draft import FINAL
from jaxserve.models.loading.weights import LoadedModel
from jaxserve.runner.sampler import gumbel_noise
from jaxserve.runner.sampling_rows import SEED_HIGH, SEED_LOW, sampling_row

ALGORITHMS = ("STANDALONE", "EAGLE", "EAGLE3", "DFLASH")
SAMPLED = {"temperature": 2.0, "seed": 3}  # flat: drafts of random heads hold now and then
NUM_DRAFTS = 3
TREES = {"speculative_eagle_topk": 3, "speculative_num_steps": 3, "speculative_num_draft_tokens": 7}
PADDED = 64  # tokens the oracle computes at a time, so that it compiles once; those behind a sequence change nothing


def drafting(tiny_model: Path, heads: dict[str, Path], algorithm: str, **settings: Any) -> Engine:
    drafts = {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(heads[algorithm])}
    common = {"speculative_adaptive": False, "greedy_programs": False}  # most tests draw, too
    return make_engine(tiny_model, **{**common, **drafts, **settings})


POSITIONS = np.arange(PADDED, dtype=np.int32)


def padded(token_ids: list[int]) -> np.ndarray:
    return np.pad(np.array(token_ids, np.int32), (0, PADDED - len(token_ids)))


class Oracle:
    """Drafts behind a sequence, computed without cache, batch or block table.

    Args:
        engine: whose draft model it is.
    """

    def __init__(self, engine: Engine, target: LoadedModel, algorithm: str):
        self.target, self.algorithm = target, algorithm
        draft = engine.scheduler.speculation.algorithm.draft
        self.model: Any = draft.bind(draft.leaves)
        self._leaves = draft.leaves
        attend = full_attention(draft.config.attention_windows)

        @jax.jit
        def features_of(target_leaves: list[jax.Array], leaves: list[jax.Array], token_ids: np.ndarray) -> jax.Array:
            seen: dict[int, jax.Array] = {}
            attend = full_attention(target.config.attention_windows)
            seen[FINAL] = target.bind(target_leaves)(token_ids, POSITIONS, attend, seen.__setitem__)
            model: Any = draft.bind(leaves)
            return model.features(jnp.concatenate([seen[point] for point in model.feature_points], axis=1))

        @jax.jit
        def hidden_of(leaves: list[jax.Array], token_ids: np.ndarray, *features: jax.Array) -> jax.Array:
            return draft.bind(leaves)(token_ids, POSITIONS, *features, attend)

        @jax.jit
        def logits_of(leaves: list[jax.Array], hidden: jax.Array) -> jax.Array:
            return draft.bind(leaves).logits(hidden[None])[0]

        self._features_of, self._hidden_of, self._logits_of = features_of, hidden_of, logits_of

    def features(self, token_ids: list[int]) -> jax.Array:
        """What the draft model builds on, one row per position."""
        return self._features_of(self.target.leaves, self._leaves, padded(token_ids))

    def logits(self, hidden: jax.Array) -> np.ndarray:
        """float32[draft vocabulary]."""
        return np.asarray(self._logits_of(self._leaves, hidden))

    def target_ids(self) -> np.ndarray:
        """The target's id of each draft id."""
        ids = getattr(self.model, "target_ids", None)
        return np.arange(self.target.config.vocab_size) if ids is None else np.asarray(ids[...])

    def state_of(self, token_ids: list[int], path: tuple[int, ...]) -> jax.Array:
        """The draft model's state behind these tokens and drafts."""
        hidden_of = self._chain(token_ids)
        for length in range(len(path)):
            hidden_of(list(path[:length]))
        return hidden_of(list(path))

    def choose(self, hidden: jax.Array, sequence: Sequence, position: int) -> tuple[int, float]:
        """The draft for ``position``, and how far it is ahead of the next best."""
        vocab = self.target.config.vocab_size
        ids = self.target_ids()
        _, ints = sampling_row(sequence.request.params, sequence.seed, vocab)
        [noise] = gumbel_noise(*jnp.array([[ints[SEED_LOW]], [ints[SEED_HIGH]], [position]], jnp.int32), vocab)
        scaled = self.logits(hidden) / SAMPLED["temperature"]
        scores = scaled + np.asarray(noise)[ids]
        second, first = np.argsort(scores)[-2:]
        return int(ids[first]), float(scores[first] - scores[second])

    def drafts(self, sequence: Sequence) -> list[tuple[int, float]]:
        """The newest token of the sequence has not been computed by the target."""
        token_ids = sequence.token_ids
        hidden_of = self._block(token_ids) if self.algorithm == "DFLASH" else self._chain(token_ids)
        drafts: list[tuple[int, float]] = []
        for place in range(NUM_DRAFTS):
            hidden = hidden_of([token for token, _ in drafts])
            drafts.append(self.choose(hidden, sequence, len(token_ids) + place))
        return drafts

    def _chain(self, token_ids: list[int]) -> Any:
        features = None if self.algorithm == "STANDALONE" else self.features(token_ids)

        def hidden_of(drafts: list[int]) -> jax.Array:
            nonlocal features
            tokens = [*token_ids, *drafts]
            if features is None:
                return self._hidden_of(self._leaves, padded(tokens))[len(tokens) - 1]
            last = len(tokens) - 2  # entry i takes the features at i and the token behind it
            hidden = self._hidden_of(self._leaves, padded(tokens[1:]), features)
            features = features.at[last + 1].set(hidden[last])
            return hidden[last]

        return hidden_of

    def _block(self, token_ids: list[int]) -> Any:
        known = len(token_ids) - 1
        context = self.model.context(self.features(token_ids), POSITIONS)
        seen = np.concatenate([known > POSITIONS, np.ones(NUM_DRAFTS + 1, bool)])

        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: None = None) -> jax.Array:
            keys, values = (jnp.concatenate([old, new]) for old, new in zip(context[layer], (k, v), strict=True))
            keys, values = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (keys, values))
            scores = jnp.einsum("qhd,khd->hqk", q, keys) / np.sqrt(q.shape[2])
            weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
            return jnp.einsum("hqk,khd->qhd", weights, values)

        block = np.array([token_ids[-1]] + [self.model.mask_token_id] * NUM_DRAFTS, np.int32)
        hidden = self.model(block, np.arange(known, known + NUM_DRAFTS + 1, dtype=np.int32), attend)
        return lambda drafts: hidden[len(drafts) + 1]


def recomputed_tree(
    oracle: Oracle, token_ids: list[int], topk: int, num_steps: int, count: int
) -> set[tuple[int, ...]]:
    """The drafted paths: nodes by what leads to them."""
    scores: dict[tuple[int, ...], float] = {}
    beam: list[tuple[int, ...]] = [()]
    ids = oracle.target_ids()
    for _ in range(num_steps):
        children: dict[tuple[int, ...], float] = {}
        for path in beam:
            hidden = oracle.state_of(token_ids, path)
            likely = np.asarray(jax.nn.log_softmax(oracle.logits(hidden)))
            for place in np.argsort(-likely)[:topk]:
                children[*path, int(ids[place])] = scores.get(path, 0.0) + float(likely[place])
        scores |= children
        beam = sorted(children, key=lambda path: -children[path])[:topk]
    return set(sorted(scores, key=lambda path: -scores[path])[:count])


def paths_of(tokens: np.ndarray, parents: np.ndarray) -> list[tuple[int, ...]]:
    """What leads to each draft, itself included."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        assert parent < len(paths), "a parent stands before its children"
        paths.append((*paths[parent], token))
    return paths[1:]
