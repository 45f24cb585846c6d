"""A cache through which random sequences go, by seed: computed, forked, rewritten, evicted, sent to the host."""

from __future__ import annotations

import random

from paceline.cache.allocation import Allocation
from paceline.cache.host import HostLimits
from paceline.cache.manager import CacheManager
from paceline.kernels.groups import CacheGroup

SIZE = 4
SCOPES = ("", "", "1 a ", "0  salt")


class RandomCache:
    def __init__(self, seed: int, cold: int = 6) -> None:
        groups = (CacheGroup("full", (0,), 1, 1), CacheGroup("window", (1,), 1, 1, window=9, lookahead=1))
        self.cache = CacheManager(groups, [25, 25], SIZE, 6, 10, host=HostLimits(cold_blocks=cold))
        self.random = random.Random(seed)
        self.live: list[tuple[Allocation, list[int], str]] = []

    def step(self) -> None:
        choice = self.random.random()
        if choice < 0.5 or not self.live:
            self._open()
        elif choice < 0.6:
            self._fork()
        elif choice < 0.7:
            self._rewrite()
        elif choice < 0.995:
            allocation, _, _ = self.live.pop(self.random.randrange(len(self.live)))
            self.cache.close(allocation)
        else:
            self.cache.forget()

    def _open(self) -> None:
        """Few tokens: many texts begin alike."""
        tokens = [self.random.randrange(2) for _ in range(self.random.randint(2, 30))]
        scope = self.random.choice(SCOPES)
        allocation = self.cache.open(tokens, salt=scope)
        if allocation is None:
            return
        if any(self.cache.needed(allocation, g, len(tokens)) > self.cache.free_blocks(g) for g in range(2)):
            self.cache.abandon(allocation, tokens)
            return
        self.cache.fetch(allocation)
        if self.cache.reserve(allocation, allocation.cached, len(tokens)) is None:
            self.cache.close(allocation)
            return
        self.cache.commit(allocation, tokens, len(tokens))
        self.live.append((allocation, tokens, scope))

    def _fork(self) -> None:
        allocation, tokens, scope = self.random.choice(self.live)
        twin = self.cache.fork(allocation)
        if twin is not None:
            self.live.append((twin, list(tokens), scope))

    def _rewrite(self) -> None:
        """Write once more what was committed, as a sequence does that is rolled back."""
        allocation, tokens, _ = self.random.choice(self.live)
        length = len(tokens) - 1
        if length < 1 or self.cache.reserve(allocation, length, length + 1) is None:
            return
        tokens[length] ^= 1
        self.cache.commit(allocation, tokens, len(tokens))
