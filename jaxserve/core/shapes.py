"""Buckets: the few sizes programs are compiled for."""

from __future__ import annotations

from collections.abc import Sequence


def powers_of_two(largest: int, smallest: int = 1) -> tuple[int, ...]:
    """Powers of two from ``smallest``, closed by ``largest`` itself: 1, 2, 4, 6 for ``largest`` 6."""
    sizes = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= 2
    return (*sizes, largest)


def bucket_for(size: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds ``size``. Buckets are rising; the last one must hold every size asked for."""
    for bucket in buckets:
        if size <= bucket:
            return bucket
    raise ValueError(f"no bucket holds {size}; the largest is {buckets[-1]}")


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)
