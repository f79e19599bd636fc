"""Who owns which KV page: the free list, the sequences, and the prefix cache.

Every page but the null page is at any moment in exactly one of three places: free, a sequence's own, or cached. Any
number of sequences may use a cached page; ``Sequence.page_ids`` lists what a sequence uses, cached pages first.
"""

from __future__ import annotations

from jaxserve.core.errors import JaxserveError
from jaxserve.core.sequence import Sequence
from jaxserve.core.shapes import ceil_div
from jaxserve.scheduler.logprobs import prompt_use
from jaxserve.scheduler.page_pool import PagePool
from jaxserve.scheduler.prefix_cache import CachedPage, PrefixCache


class KVMemory:
    """Pages for sequences. When none is free, cached pages that nobody uses are given up.

    Args:
        cache: None: nothing outlives its sequence.

    Attributes:
        num_queried, num_hit: prompt tokens looked up when sequences were first admitted, and those found until they
            were computed.
    """

    def __init__(self, pool: PagePool, cache: PrefixCache | None):
        self.pool = pool
        self.cache = cache
        self.num_queried = self.num_hit = 0
        self._held: dict[Sequence, list[CachedPage]] = {}

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.pool.page_size

    @property
    def num_cached(self) -> int:
        """Pages in the cache, whoever uses them."""
        return 0 if self.cache is None else self.cache.num_pages

    @property
    def num_evictable(self) -> int:
        """Cached pages that nobody uses."""
        return 0 if self.cache is None else self.cache.num_evictable

    @property
    def num_available(self) -> int:
        """Pages that can be had at once: free or evictable."""
        return self.pool.num_free + self.num_evictable

    def admit(self, sequence: Sequence) -> bool:
        """Gives a sequence that owns nothing the pages of all its tokens and one more, and sets ``num_scheduled`` to
        the tokens that need not be computed. False, and nothing taken, when there are not enough."""
        path = self._cached_prefix(sequence)
        needed = ceil_div(min(len(sequence.token_ids) + 1, sequence.max_total), self.page_size) - len(path)
        if self.cache is not None:
            self.cache.hold(path)
        pages = self._allocate(needed)
        if pages is None:
            self._let_go(path)
            return False
        if path:
            self._held[sequence] = path
        sequence.page_ids = [node.page for node in path] + pages
        sequence.num_scheduled = len(path) * self.page_size
        if self.cache is not None and sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_scheduled
            if self._may_hit(sequence):
                self.num_queried += len(sequence.token_ids)
                self.num_hit += sequence.num_scheduled
        return True

    @staticmethod
    def _may_hit(sequence: Sequence) -> bool:
        # Whoever asks about the prompt needs every position of it computed.
        return prompt_use(sequence) is None

    def _cached_prefix(self, sequence: Sequence) -> list[CachedPage]:
        if self.cache is None or not self._may_hit(sequence):
            return []
        return self.cache.match(sequence.request.cache_namespace, sequence.token_ids)

    def share(self, sequence: Sequence) -> None:
        """Lets others find the prompt of a sequence as far as its chunks are launched. What they launch runs later."""
        if self.cache is None:
            return
        path = self._held.get(sequence, [])
        taken = self.cache.adopt(
            sequence.request.cache_namespace, sequence.token_ids, sequence.num_scheduled,
            sequence.page_ids[len(path) :], path,
        )  # fmt: skip
        if taken:
            self._held[sequence] = path + taken

    def reuse(self, sequence: Sequence) -> tuple[int, list[int]]:
        """Takes what others computed of a prompt since it was admitted, in place of pages that are still empty, and
        moves ``num_scheduled`` behind it. Returns the place of the first such page, and the pages."""
        path = self._held.get(sequence, [])
        if self.cache is None or not self._may_hit(sequence) or sequence.num_scheduled != len(path) * self.page_size:
            return 0, []  # the page at hand is partly computed
        found = self.cache.match(sequence.request.cache_namespace, sequence.token_ids, path)
        if not found:
            return 0, []
        self.cache.hold(found)
        self._held[sequence] = path + found
        first, pages = len(path), [node.page for node in found]
        self.pool.free(sequence.page_ids[first : first + len(pages)])
        sequence.page_ids[first : first + len(pages)] = pages
        num_tokens = len(pages) * self.page_size
        sequence.num_scheduled += num_tokens
        if not sequence.num_preemptions:
            assert sequence.num_cached_tokens is not None
            sequence.num_cached_tokens += num_tokens
            self.num_hit += num_tokens
        return first, pages

    def would_share(self, first: Sequence, second: Sequence) -> bool:
        """Whether the second would find a page in the cache once the first has computed its prompt."""
        if self.cache is None or not (self._may_hit(first) and self._may_hit(second)):
            return False
        if first.request.cache_namespace != second.request.cache_namespace:
            return False
        end = second.num_scheduled + self.page_size  # of its next page, which is whole as long as it begins one
        lengths = len(first.token_ids), len(second.token_ids)
        if second.num_scheduled % self.page_size or end > min(lengths) - self.cache.lookahead:
            return False
        return first.token_ids[:end] == second.token_ids[:end]

    def extend(self, sequence: Sequence, num_tokens: int) -> list[int] | None:
        """The pages added so that a sequence has room for ``num_tokens``; None, and nothing taken, if there are not
        enough."""
        pages = self._allocate(ceil_div(num_tokens, self.page_size) - len(sequence.page_ids))
        if pages is not None:
            sequence.page_ids += pages
        return pages

    def release(self, sequence: Sequence, *, is_sound: bool = True) -> int:
        """Takes a sequence's pages back; returns how many. Those whose tokens are certain and computed stay cached.

        Args:
            is_sound: false: nobody may use what it computed; what was shared of it is forgotten.
        """
        page_ids, sequence.page_ids = sequence.page_ids, []
        path = self._held.pop(sequence, [])
        own = page_ids[len(path) :]
        if self.cache is not None and is_sound:
            # The newest token's KV is not computed, or not collected; drafts in flight stand behind it.
            known = min(sequence.num_scheduled, len(sequence.token_ids) - 1)
            own = self.cache.insert(sequence.request.cache_namespace, sequence.token_ids, known, own, path)
        self.pool.free(own)
        self._let_go(path)
        if self.cache is not None and not is_sound:
            self.pool.free(self.cache.forget(path))
        return len(page_ids)

    def forget_all(self) -> int:
        """Empties the cache; returns how many pages that freed. Those in use are freed when their users end."""
        if self.cache is None:
            return 0
        freed = self.cache.clear()
        self.pool.free(freed)
        return len(freed)

    def _allocate(self, count: int) -> list[int] | None:
        if count <= 0:
            return []
        missing = count - self.pool.num_free
        if missing > 0:
            if self.cache is None or missing > self.cache.num_evictable:
                return None  # without giving up anything in vain
            self.pool.free(self.cache.evict(missing))
        return self.pool.allocate(count)

    def _let_go(self, path: list[CachedPage]) -> None:
        if self.cache is not None and path:
            self.pool.free(self.cache.let_go(path))

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Raises JaxserveError if a page was lost or doubled.

        Args:
            sequences: all that may own pages.
        """
        self.pool.check_integrity()
        own = [page for s in sequences for page in s.page_ids[len(self._held.get(s, ())) :]]
        cached = [] if self.cache is None else self.cache.pages()
        in_use = self.pool.num_usable - self.pool.num_free
        if len({*own, *cached}) != len(own) + len(cached) or len(own) + len(cached) != in_use:
            raise JaxserveError(
                f"pages are lost or doubled: {in_use} in use, sequences own {len(own)}, the cache {len(cached)}"
            )
        if self.cache is not None:
            self.cache.check_integrity()
            for sequence, path in self._held.items():
                if sequence.page_ids[: len(path)] != [node.page for node in path]:
                    raise JaxserveError("a sequence uses other pages than it holds")
