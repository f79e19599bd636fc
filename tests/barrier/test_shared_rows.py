"""The rows the scheduler writes: the host never waits for them."""

from __future__ import annotations

import time

import numpy as np

from jaxserve.barrier.native import native_module
from jaxserve.barrier.shared_rows import RowLayout, SharedRows


def test_planning_for_every_slot_needs_no_free_staging_block():
    """The stream stands behind a launch that failed; only the host, once it has planned, can let it go on."""
    layout = RowLayout(num_slots=40, table_width=8)
    rows = SharedRows(layout, "cpu", timeout_s=20.0)
    ring = native_module("cpu").EventRing("owed", 2)
    rows.stream.sync()
    rows.stream.wait(ring, ring.reserve())
    start = time.monotonic()
    for slot in range(layout.num_slots):
        rows.set_pages(slot, 0, [1, 2])
        rows.set_sampling(slot, np.zeros(4, np.float32), np.zeros(4, np.int32))
        rows.set_pages(slot, 2, [3])
        rows.clear_slot(slot, 3)
    rows.set_batch(np.arange(layout.num_slots, dtype=np.int32))
    assert time.monotonic() - start < 10
    ring.record(1)
    rows.stream.sync()
    assert np.array_equal(np.asarray(rows.arrays()[0])[0], np.arange(layout.num_slots))


def test_bytes_count_from_when_they_are_handed_over():
    """Whoever counts bytes per launch need not wait for a stream that is behind."""
    rows = SharedRows(RowLayout(num_slots=4, table_width=8), "cpu", timeout_s=20.0)
    ring = native_module("cpu").EventRing("owed", 2)
    rows.stream.wait(ring, ring.reserve())
    before = rows.bytes_to_device
    rows.set_lengths(np.array([1, 2], np.int32), np.array([5, 6], np.int32))
    rows.set_pages(1, 2, [3])
    assert rows.bytes_to_device - before == 12
    ring.record(1)
    rows.stream.sync()
    assert rows.bytes_to_device - before == 12
