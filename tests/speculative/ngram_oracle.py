"""The n-gram trie without a trie: dictionaries of all n-grams seen, never evicted, slow and obvious."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

Ngram = tuple[int, ...]


@dataclass
class NgramOracle:
    """Answers what ``NgramTrie`` must answer while nothing has been evicted."""

    max_depth: int
    max_match: int
    min_breadth: int
    max_breadth: int
    mode: str
    num_seen: dict[Ngram, int] = field(default_factory=dict)
    last_seen: dict[Ngram, int] = field(default_factory=dict)  # number of the token that ended it last
    num_tokens: int = 0

    def append(self, context: Sequence[int], num_new: int) -> None:
        for end in range(len(context) - num_new + 1, len(context) + 1):
            self.num_tokens += 1
            for length in range(1, min(self.max_depth, end) + 1):
                ngram = tuple(context[end - length : end])
                self.num_seen[ngram] = self.num_seen.get(ngram, 0) + 1
                self.last_seen[ngram] = self.num_tokens

    def continuations(self, ngram: Ngram) -> list[int]:
        """Tokens seen behind ``ngram``, the most recent first."""
        found = [g for g in self.num_seen if len(g) == len(ngram) + 1 and g[:-1] == ngram]
        return [g[-1] for g in sorted(found, key=lambda g: -self.last_seen[g])]

    def followed_suffixes(self, context: Sequence[int]) -> list[Ngram]:
        """Suffixes of ``context`` that something followed, longest first."""
        longest = min(self.max_match, len(context))
        suffixes = [tuple(context[len(context) - length :]) for length in range(longest, 0, -1)]
        return [suffix for suffix in suffixes if self.continuations(suffix)]

    def breadth(self, level: int) -> int:
        return self.max_breadth if self.mode == "prob" else max(self.min_breadth, self.max_breadth // 2**level)

    def match(self, context: Sequence[int], num_nodes: int) -> tuple[list[int], list[int], int]:
        """What ``NgramTrie.match`` returns, as lists."""
        tokens, parents, levels = [], [], [0]
        suffixes = self.followed_suffixes(context)
        for suffix in suffixes:
            for parent, token, ngram, frontier in self._walk(suffix, tokens, parents, levels):
                node = self._drafted(tokens, parents, parent, token)
                if node is None:
                    if len(tokens) == num_nodes:
                        return tokens, parents, len(suffixes[0])
                    tokens.append(token)
                    parents.append(parent)
                    levels.append(levels[parent] + 1)
                    node = len(tokens)
                frontier(node, ngram)
        return tokens, parents, len(suffixes[0]) if suffixes else 0

    def _walk(self, suffix, tokens, parents, levels):
        """Yields (parent, token, n-gram, how to go on) in the order in which this suffix offers drafts."""
        queue, heap, found = deque(), [], 0

        def push(parent, ngram, probability):
            nonlocal found
            drafted = [t for t, p in zip(tokens, parents, strict=True) if p == parent]
            known = [t for t in self.continuations(ngram) if t in drafted]
            known.sort(key=drafted.index, reverse=True)
            others = [t for t in self.continuations(ngram) if t not in drafted]
            if self.mode == "prob":
                others.sort(key=lambda t: -self.num_seen[(*ngram, t)])
            room = max(0, self.breadth(levels[parent]) - len(drafted))
            for token in known + others[:room]:
                longer = (*ngram, token)
                # The very order of operations of the trie: equal products must tie in both.
                share = probability * (self.num_seen[longer] / self.num_seen[ngram])
                queue.append((parent, token, longer, share))
                heapq.heappush(heap, (-share, found, parent, token, longer))
                found += 1

        push(0, suffix, 1.0)
        while queue if self.mode == "bfs" else heap:
            if self.mode == "bfs":
                parent, token, ngram, probability = queue.popleft()
            else:
                negative, _, parent, token, ngram = heapq.heappop(heap)
                probability = -negative
            yield parent, token, ngram, lambda node, ngram, p=probability: push(node, ngram, p)

    @staticmethod
    def _drafted(tokens, parents, parent, token) -> int | None:
        for i, (t, p) in enumerate(zip(tokens, parents, strict=True)):
            if t == token and p == parent:
                return i + 1
        return None
