"""Owner of the free KV pages."""

from __future__ import annotations

from jaxserve.core.errors import JaxserveError


class PagePool:
    """Pages 1 .. num_pages - 1; page 0 is the null page and belongs to nobody.

    Invariant: free + in use == num_pages - 1, and no page is both.
    """

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, 0, -1))  # low numbers first
        self._in_use: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages nobody owns."""
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Pages there are, the null page not counted."""
        return self.num_pages - 1

    def allocate(self, count: int) -> list[int] | None:
        """``count`` pages, or None (and nothing taken) when fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        self._in_use.update(pages)
        return pages

    def free(self, pages: list[int]) -> None:
        """Returns pages. Raises JaxserveError on a page that is not in use: freeing twice would share it."""
        for page in pages:
            if page not in self._in_use:
                raise JaxserveError(f"page {page} was freed but is not in use")
            self._in_use.remove(page)
            self._free.append(page)

    def check_integrity(self) -> None:
        """Raises JaxserveError if a page was lost or doubled."""
        if len(self._free) + len(self._in_use) != self.num_usable or self._in_use & set(self._free):
            raise JaxserveError(
                f"page pool is inconsistent: {len(self._free)} free + {len(self._in_use)} in use, of {self.num_usable}"
            )
