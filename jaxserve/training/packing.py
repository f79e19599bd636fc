"""Sequences of any length, packed into rows of one length: few programs to compile, little padding to compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.training.continuations import Sample


@dataclass(frozen=True)
class PackedRows:
    """N rows of L tokens.

    Attributes:
        ids: Int32[N, L].
        segments: Int32[N, L], number of the sequence within its row from 1, 0 for padding.
        positions: Int32[N, L], within the sequence.
        answers: Bool[N, L], tokens the model wrote: what a draft has to guess.
    """

    ids: np.ndarray
    segments: np.ndarray
    positions: np.ndarray
    answers: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_tokens(self) -> int:
        """Tokens that are no padding."""
        return int((self.segments > 0).sum())

    def __getitem__(self, rows: np.ndarray | slice) -> PackedRows:
        return PackedRows(self.ids[rows], self.segments[rows], self.positions[rows], self.answers[rows])


def pack(samples: Sequence[Sample], length: int) -> PackedRows:
    """Packs sequences, longest first, each into the first row that has room; what goes over ``length`` is cut off."""
    pieces = sorted((sample for sample in samples if len(sample.ids) > 2), key=lambda s: -min(len(s.ids), length))
    rows: list[list[Sample]] = []
    room: list[int] = []
    first_open = 0  # rows before have no room for anything
    for piece in pieces:
        size = min(len(piece.ids), length)
        row = next((i for i in range(first_open, len(rows)) if room[i] >= size), None)
        if row is None:
            rows.append([])
            room.append(length)
            row = len(rows) - 1
        rows[row].append(piece)
        room[row] -= size
        while first_open < len(rows) and room[first_open] < 3:
            first_open += 1
    shape = (len(rows), length)
    ids, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
    packed = PackedRows(ids, segments, positions, np.zeros(shape, bool))
    for number, row_pieces in enumerate(rows):
        start = 0
        for segment, (piece_ids, num_prompt_tokens) in enumerate(row_pieces, 1):
            end = min(start + len(piece_ids), length)
            size = end - start
            packed.ids[number, start:end] = piece_ids[:size]
            packed.segments[number, start:end] = segment
            packed.positions[number, start:end] = np.arange(size)
            packed.answers[number, start + min(num_prompt_tokens, size) : end] = True
            start = end
    return packed


def frequent_ids(rows: PackedRows, vocab_size: int, num_ids: int, always: Sequence[int] = ()) -> np.ndarray | None:
    """The ids a draft should know: those the model writes most often, and ``always``; rising. None: all of them.

    Among ids that never occur the lower go first, which in usual tokenizers are the more common ones.
    """
    if num_ids == 0 or num_ids >= vocab_size:
        return None
    counts = np.bincount(rows.ids[rows.answers], minlength=vocab_size).astype(np.int64)
    counts[[i for i in always if i < vocab_size]] = np.iinfo(np.int64).max
    order = np.argsort(-counts, kind="stable")
    return np.sort(order[:num_ids])
