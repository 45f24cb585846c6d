"""The texts to learn from, and in which order: those that were seen least often come first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.errors import ConfigError
from paceline.training.shards import Text

AT_ONCE = 8192
"""Texts that are put in order together. Among the texts of a few batches those of one length go together."""
WINDOW = 2048
DENSITY = 0.45
"""Anchors for each token of the answers, at most: more of them tell the same again."""


@dataclass
class Pool:
    """Grows while it is used. What comes next depends on the seed and on what was there when it was planned."""

    seed: int
    batch_tokens: int
    padded: Callable[[int], int]
    """The length that a batch is padded to, from that of its longest text."""
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
        for window in np.array_split(np.arange(len(chosen)), max(1, round(len(chosen) / WINDOW))):
            window = window[np.argsort(lengths[window], kind="stable")]
            batches += self._cut(chosen[window], lengths[window])
        self._plan = [batches[place] for place in drawn.permutation(len(batches))]
        self._place = 0
        self.plans += 1

    def _cut(self, places: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
        """Batches of at most batch_tokens, padding included; the lengths ascend. A step counts the same whatever its
        size, so texts that are left over would count too much: the last batch gets some of those before it."""
        sizes = [0]
        for length in lengths.tolist():
            if sizes[-1] and (sizes[-1] + 1) * self.padded(length) > self.batch_tokens:
                sizes.append(0)
            sizes[-1] += 1
        if len(sizes) > 1:
            room = self.batch_tokens // self.padded(int(lengths[-1]))
            last = max(sizes[-1], min(room, (sizes[-2] + sizes[-1]) // 2))
            sizes[-2:] = [sizes[-2] + sizes[-1] - last, last]
        return [part.tolist() for part in np.split(places, np.cumsum(sizes)[:-1])]

    def state(self) -> dict[str, Any]:
        """Without the texts."""
        return {"seen": self.seen.tolist(), "plans": self.plans, "plan": self._plan, "place": self._place}

    def restore(self, state: dict[str, Any]) -> None:
        """The texts are those of then, in their order, and perhaps more."""
        self.check(state)
        seen = np.array(state["seen"], np.int32)
        self.seen = np.concatenate([seen, np.zeros(len(self.texts) - len(seen), np.int32)])
        self.plans, self._plan, self._place = state["plans"], state["plan"], state["place"]

    def check(self, state: dict[str, Any]) -> None:
        """Refuse a state of texts that are not here."""
        if len(state["seen"]) > len(self.texts):
            raise ConfigError(f"The checkpoint learned from {len(state['seen']):,} texts, of which the data folder "
                              f"beside it holds {len(self.texts):,}: bring the folder back, or remove the checkpoint "
                              "(--init can begin with its head).")


def anchor_count(texts: list[Text], most: int) -> int:
    """Places of each text to draft from: as many as short answers have use for, and never more than the longest has."""
    answers = [text.answer for text in texts]
    return max(1, min(most, round(DENSITY * sum(answers) / len(answers)), max(answers) - 1))
