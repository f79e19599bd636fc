"""Pages of KV that outlive the sequence that computed them, found again by the tokens they hold: a radix tree of pages.

A node is one whole page. Its edge is the tokens of that page and, for draft models that look ahead, the ``lookahead``
tokens behind it, on which the draft model's part of the page depends too. A path from a root is a prefix; each
namespace (a cache salt) has a root of its own, so what is cached under one is never found under another.

Pages are shared read-only: a sequence that uses cached pages writes behind them, and what it shares is whole pages.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Namespace = tuple[str | None, ...]


@dataclass(eq=False)
class CachedPage:
    """A node.

    Attributes:
        page: number of the KV page.
        edge: tokens it is found by, behind its parent.
        parent: the page before it; None behind a root.
        num_users: sequences that hold it. Whoever holds a page holds those before it.
        last_used: when the last of them let go, in counts of such events.
        is_detached: it is no longer found, and its page is free when nobody holds it any more.
    """

    page: int
    edge: tuple[int, ...]
    parent: CachedPage | None
    namespace: Namespace
    children: dict[tuple[int, ...], CachedPage] = field(default_factory=dict)
    num_users: int = 0
    last_used: int = 0
    is_detached: bool = False


class PrefixCache:
    """The tree. It owns the pages in it; whoever gets pages back owns them from then on.

    Args:
        page_size: tokens per page.
        lookahead: tokens behind a page that its content depends on.
    """

    def __init__(self, page_size: int, lookahead: int = 0):
        self.page_size = page_size
        self.lookahead = lookahead
        self._roots: dict[Namespace, dict[tuple[int, ...], CachedPage]] = {}
        self._nodes: set[CachedPage] = set()  # detached ones that are held included
        self._idle: list[tuple[int, int, CachedPage]] = []  # heap of leaves nobody holds, some of them outdated
        self._num_evictable = 0
        self._time = self._ties = 0

    @property
    def num_pages(self) -> int:
        """Pages it owns."""
        return len(self._nodes)

    @property
    def num_evictable(self) -> int:
        """Those of them that nobody holds."""
        return self._num_evictable

    def _edges(self, token_ids: Sequence[int], num_tokens: int, first: int = 0) -> Iterator[tuple[int, ...]]:
        """Edges of the whole pages from number ``first`` on among the first ``num_tokens``, as far as the tokens behind
        them are known."""
        last = min(num_tokens, len(token_ids) - self.lookahead)
        for end in range((first + 1) * self.page_size, last + 1, self.page_size):
            yield tuple(token_ids[end - self.page_size : end + self.lookahead])

    def _level_behind(self, namespace: Namespace, path: list[CachedPage]) -> dict[tuple[int, ...], CachedPage]:
        """What may follow a path; empty where that is not found any more."""
        if not path:
            return self._roots.get(namespace, {})
        return {} if path[-1].is_detached else path[-1].children

    def match(
        self, namespace: Namespace, token_ids: Sequence[int], path: list[CachedPage] | None = None
    ) -> list[CachedPage]:
        """The longest cached prefix that leaves at least one token to compute; the part of it behind ``path``."""
        path = path or []
        level, found = self._level_behind(namespace, path), []
        for edge in self._edges(token_ids, len(token_ids) - 1, len(path)):
            node = level.get(edge)
            if node is None:
                break
            found.append(node)
            level = node.children
        return found

    def hold(self, path: list[CachedPage]) -> None:
        """Keeps a path from being evicted. It must begin at a root."""
        for node in path:
            if not node.num_users:
                self._num_evictable -= 1
            node.num_users += 1

    def let_go(self, path: list[CachedPage]) -> list[int]:
        """Ends a ``hold``; returns pages that are nobody's now."""
        self._time += 1
        freed = []
        for node in path:
            node.num_users -= 1
            node.last_used = self._time
            if node.num_users:
                continue
            if node.is_detached:
                self._nodes.remove(node)
                freed.append(node.page)
            else:
                self._num_evictable += 1
                self._offer(node)
        return freed

    def adopt(
        self, namespace: Namespace, token_ids: Sequence[int], num_tokens: int, pages: list[int], path: list[CachedPage]
    ) -> list[CachedPage]:
        """As ``insert``, for a sequence that goes on: it holds what is taken, which is returned.

        It ends at the first page that is cached already, for whoever holds a page must hold those before it.
        """
        if path and path[-1].is_detached:
            return []
        taken: list[CachedPage] = []
        parent = path[-1] if path else None
        for page, edge in zip(pages, self._edges(token_ids, num_tokens, len(path)), strict=False):
            level = parent.children if parent is not None else self._roots.setdefault(namespace, {})
            if edge in level:
                break
            parent = level[edge] = CachedPage(page, edge, parent, namespace, num_users=1)
            self._nodes.add(parent)
            taken.append(parent)
        return taken

    def forget(self, path: list[CachedPage]) -> list[int]:
        """Gives up the end of a path, as far as nobody needs it; returns the pages that are nobody's now."""
        forgotten = []
        for node in reversed(path):
            if node.num_users or node.children or node.is_detached:
                break
            self._remove(node)
            forgotten.append(node.page)
        return forgotten

    def _remove(self, node: CachedPage) -> None:
        """Takes out a leaf that nobody holds."""
        level = node.parent.children if node.parent is not None else self._roots[node.namespace]
        del level[node.edge]
        self._nodes.remove(node)
        self._num_evictable -= 1
        if node.parent is None and not level:
            del self._roots[node.namespace]

    def insert(
        self, namespace: Namespace, token_ids: Sequence[int], num_tokens: int, pages: list[int], path: list[CachedPage]
    ) -> list[int]:
        """Takes the pages of a sequence that lie wholly in its first ``num_tokens``; nobody holds them.

        Args:
            pages: all of the sequence's own pages, behind those of ``path``.
            path: what it holds.

        Returns:
            The pages that were not taken: too far behind, or cached already.
        """
        if any(node.is_detached for node in path[-1:]):
            return pages
        level = path[-1].children if path else self._roots.setdefault(namespace, {})
        parent = path[-1] if path else None
        self._time += 1
        left, number = [], -len(path)
        for edge in self._edges(token_ids, num_tokens):
            if number < 0:  # of the path
                number += 1
                continue
            if number == len(pages):
                break
            node = level.get(edge)
            if node is None:
                node = level[edge] = CachedPage(pages[number], edge, parent, namespace)
                self._nodes.add(node)
                self._num_evictable += 1
            else:
                left.append(pages[number])
            node.last_used = self._time
            self._offer(node)
            parent, level, number = node, node.children, number + 1
        if not self._roots.get(namespace, True):
            del self._roots[namespace]
        return left + pages[max(number, 0) :]

    def _offer(self, node: CachedPage) -> None:
        """Puts a node among those to evict, if it is a leaf that nobody holds."""
        if node.num_users or node.children:
            return
        if len(self._idle) > 2 * len(self._nodes) + 64:
            self._idle = [entry for entry in self._idle if self._is_current(entry)]
            heapq.heapify(self._idle)
        self._ties += 1
        heapq.heappush(self._idle, (node.last_used, self._ties, node))

    def _is_current(self, entry: tuple[int, int, CachedPage]) -> bool:
        last_used, _, node = entry
        idle = not (node.num_users or node.children or node.is_detached)
        return idle and node.last_used == last_used and node in self._nodes

    def evict(self, count: int) -> list[int]:
        """Gives up at most ``count`` pages: the leaves that were used longest ago, one after the other."""
        evicted: list[int] = []
        while len(evicted) < count and self._idle:
            entry = heapq.heappop(self._idle)
            if not self._is_current(entry):
                continue
            node = entry[2]
            self._remove(node)
            evicted.append(node.page)
            if node.parent is not None:
                self._offer(node.parent)
        return evicted

    def clear(self) -> list[int]:
        """Forgets everything; returns the pages nobody holds. The others come back from ``let_go``."""
        freed = []
        for node in self._nodes:
            node.is_detached = True
            if not node.num_users:
                freed.append(node.page)
        self._nodes = {node for node in self._nodes if node.num_users}
        self._roots.clear()
        self._idle.clear()
        self._num_evictable = 0
        return freed

    def pages(self) -> list[int]:
        """Numbers of the pages it owns."""
        return [node.page for node in self._nodes]

    def check_integrity(self) -> None:
        """Raises AssertionError if counts and tree disagree."""
        idle = [node for node in self._nodes if not node.num_users]
        assert len(idle) == self._num_evictable, f"{len(idle)} pages are idle, {self._num_evictable} are counted"
        for node in self._nodes:
            assert node.num_users >= max((child.num_users for child in node.children.values()), default=0)
            if not node.is_detached:
                level = node.parent.children if node.parent is not None else self._roots[node.namespace]
                assert level[node.edge] is node
