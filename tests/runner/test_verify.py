"""Acceptance of drafts and the geometry of draft trees, against a plain loop."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxserve.runner.verify import accept, along_path, chain_parents, tree_geometry


def test_a_tree_written_out():
    """O-30: nodes 0 root, 1 a(0), 2 b(0), 3 c(2), 4 d(1); the target says b behind the root, c behind b, e behind c.
    Where their KV goes: tests/speculative/test_lossless.py."""
    a, b, c, d, e = range(1, 6)
    parents = np.array([[0, 0, 2, 1]], np.int32)
    geometry = tree_geometry(parents)
    assert geometry.depths.tolist() == [[0, 1, 1, 2, 2]]
    seen = [np.flatnonzero(row).tolist() for row in np.asarray(geometry.seen[0])]
    assert seen == [[0], [0, 1], [0, 2], [0, 2, 3], [0, 1, 4]]
    tokens = np.array([[9, a, b, c, d]], np.int32)
    target = np.array([[b, d, c, e, a]], np.int32)
    accepted = accept(tokens, parents, target)
    assert accepted.path.tolist() == [[0, 2, 3, 0, 0]] and accepted.counts.tolist() == [3]
    assert along_path(target, accepted.path)[0, :3].tolist() == [b, c, e]


def accept_by_hand(tokens, parents, target) -> list[int]:
    path = [0]
    while True:
        children = [n for n in range(1, len(tokens)) if parents[n - 1] == path[-1] and tokens[n] == target[path[-1]]]
        if not children:
            return path
        path.append(children[0])


@pytest.mark.parametrize("shape", ["tree", "chain", "unused", "duplicates"])
def test_random_trees_equal_a_plain_loop(shape):
    random = np.random.default_rng(1)
    batch, nodes, vocab = 64, 8, 3
    tokens = random.integers(0, vocab, (batch, nodes)).astype(np.int32)
    target = random.integers(0, vocab, (batch, nodes)).astype(np.int32)
    parents = np.array([[random.integers(0, n + 1) for n in range(nodes - 1)] for _ in range(batch)], np.int32)
    if shape == "chain":
        parents = np.asarray(chain_parents(batch, nodes - 1)).copy()
        target[:, :-1] = np.where(random.random((batch, nodes - 1)) < 0.7, tokens[:, 1:], target[:, :-1])
    if shape == "unused":
        parents[:, random.integers(2, nodes - 1) :] = -1
        parents[: batch // 8] = -1
    if shape == "duplicates":
        tokens[:, 1:] = 1
        target[:] = 1
    path, counts = jax.jit(accept)(tokens, parents, target)
    right = [accept_by_hand(*rows) for rows in zip(tokens, parents, target, strict=True)]
    assert counts.tolist() == [len(r) for r in right]
    assert [row[:n] for row, n in zip(path.tolist(), counts.tolist(), strict=True)] == right
    assert len(set(counts.tolist())) > 1 or shape == "duplicates"  # the cases differ


def test_unused_entries_see_themselves_alone():
    geometry = tree_geometry(np.array([[0, -1, -1]], np.int32))
    assert geometry.depths.tolist() == [[0, 1, 0, 0]]
    assert np.asarray(geometry.seen[0, 2:]).tolist() == [[False, False, True, False], [False, False, False, True]]
