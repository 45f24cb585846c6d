"""The texts to learn from, and in which order: those that were seen least often come first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.training.shards import Text

AT_ONCE = 8192
"""Texts that are put in order together. Among the texts of a few batches those of one length go together."""
WINDOW = 2048


@dataclass
class Pool:
    """Grows while it is used. What comes next depends on the seed and on what was there when it was planned."""

    seed: int
    batch_tokens: int
    texts: list[Text] = field(default_factory=list)
    seen: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """How often each text was planned."""
    plans: int = 0
    _plan: list[list[int]] = field(default_factory=list)
    _place: int = 0

    def add(self, texts: list[Text]) -> None:
        self.texts += texts
        self.seen = np.concatenate([self.seen, np.zeros(len(texts), np.int32)])

    @property
    def answer_tokens(self) -> int:
        return sum(text.answer for text in self.texts)

    def next(self) -> list[Text]:
        """The texts of the next step."""
        if self._place == len(self._plan):
            self._make_plan()
        batch = self._plan[self._place]
        self._place += 1
        return [self.texts[place] for place in batch]

    def _make_plan(self) -> None:
        drawn = np.random.default_rng([self.seed, 7, self.plans])
        order = drawn.permutation(len(self.texts))
        chosen = order[np.argsort(self.seen[order], kind="stable")][:AT_ONCE]
        chosen = chosen[drawn.permutation(len(chosen))]
        self.seen[chosen] += 1
        lengths = np.array([len(self.texts[place].tokens) for place in chosen])
        batches: list[list[int]] = []
        for begin in range(0, len(chosen), WINDOW):
            window = np.argsort(lengths[begin:begin + WINDOW], kind="stable") + begin
            batches += self._cut(chosen[window], lengths[window])
        self._plan = [batches[place] for place in drawn.permutation(len(batches))]
        self._place = 0
        self.plans += 1

    def _cut(self, places: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
        """Batches of at most batch_tokens, padding included; the lengths ascend."""
        batches: list[list[int]] = []
        batch: list[int] = []
        for place, length in zip(places.tolist(), lengths.tolist()):
            if batch and (len(batch) + 1) * length > self.batch_tokens:
                batches.append(batch)
                batch = []
            batch.append(place)
        return [*batches, batch]

    def state(self) -> dict[str, Any]:
        """Without the texts."""
        return {"seen": self.seen.tolist(), "plans": self.plans, "plan": self._plan, "place": self._place}

    def restore(self, state: dict[str, Any]) -> None:
        """The texts are those of then, in their order, and perhaps more."""
        seen = np.array(state["seen"], np.int32)
        self.seen = np.concatenate([seen, np.zeros(len(self.texts) - len(seen), np.int32)])
        self.plans, self._plan, self._place = state["plans"], state["plan"], state["place"]
