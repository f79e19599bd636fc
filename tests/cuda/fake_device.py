"""What the tests on the fake CUDA runtime share."""

from __future__ import annotations

import ctypes
import threading

import numpy as np

LONG_S = 20.0  # far more than any of this takes
SHORT_S = 0.05


def device_rows(buffer) -> np.ndarray:
    """The fake device's memory [rows, columns] int32, seen in place."""
    cells = (ctypes.c_int32 * (buffer.num_rows * buffer.num_columns)).from_address(buffer.address)
    return np.frombuffer(cells, np.int32).reshape(buffer.num_rows, buffer.num_columns)


def rows(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def values(*of_rows) -> np.ndarray:
    return np.array(of_rows, np.int32)


class Thread(threading.Thread):
    """Runs a call beside the test; ``is_blocked()`` polls, ``outcome()`` joins."""

    def __init__(self, call):
        super().__init__()
        self._call = call
        self._outcome = None
        self.start()

    def run(self) -> None:
        try:
            self._outcome = self._call()
        except RuntimeError as error:
            self._outcome = error

    def is_blocked(self) -> bool:
        self.join(SHORT_S)
        return self.is_alive()

    def outcome(self):
        self.join(LONG_S)
        assert not self.is_alive()
        return self._outcome
