"""Cycles: the drafts that a text was verified with, as a trace keeps them.

Under rules that sample drafts, or let them bend the text, a text depends on where cycles started and what was drafted:
both follow what paid at the time. Kept, they give the same text again whatever would be drafted now.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_NODES = 1024
"""Of one draft."""
MOST_NUMBERS = 1 << 20
"""Drafted tokens and chances that one trace keeps: a few megabytes."""


@dataclass(slots=True, eq=False)
class Distribution:
    """What of a q was read when the draft was verified: all of it after a rejection, else one token's chance."""

    tokens: NDArray[np.int32]
    """Ascending."""
    chances: NDArray[np.float64]

    def __eq__(self, other: object) -> bool:
        return (isinstance(other, Distribution) and np.array_equal(self.tokens, other.tokens)
                and np.array_equal(self.chances, other.chances))

    def dense(self, vocab_size: int) -> NDArray[np.float64]:
        """[V], zero where nothing was read."""
        chances = np.zeros(vocab_size)
        chances[self.tokens] = self.chances
        return chances


@dataclass(slots=True)
class Cycle:
    """One verification pass: the draft as the target saw it (DraftTree)."""

    start: int
    """Absolute position of the first drafted token: the cycle's key in the noise."""
    tokens: list[int]
    parents: list[int]
    drafter: str
    sources: list[str] | None = None
    q: list[Distribution | None] | None = None
    """What each node was sampled from; siblings that were sampled together share theirs. None: deterministic."""

    @property
    def numbers(self) -> int:
        """How much there is to keep, for bounds."""
        return len(self.tokens) + sum(len(one.tokens) for one in self.distributions)

    @property
    def distributions(self) -> list[Distribution]:
        """Each once, in the order of their first nodes."""
        return list({id(one): one for one in self.q or () if one is not None}.values())

    def as_dict(self) -> dict[str, Any]:
        kept = self.distributions
        place = {id(one): index for index, one in enumerate(kept)}
        return {
            "start": self.start, "tokens": list(self.tokens), "parents": list(self.parents), "drafter": self.drafter,
            "sources": None if self.sources is None else list(self.sources),
            "q": None if self.q is None else [None if one is None else place[id(one)] for one in self.q],
            "distributions": [{"tokens": _packed(one.tokens, "<i4"), "chances": _packed(one.chances, "<f8")}
                              for one in kept],
        }

    @classmethod
    def from_dict(cls, found: Any) -> Cycle:
        """A ValueError says what is wrong."""
        if not isinstance(found, dict) or set(found) != {"start", "tokens", "parents", "drafter", "sources", "q",
                                                         "distributions"}:
            raise ValueError("it must be an object with start, tokens, parents, drafter, sources, q and distributions")
        tokens, parents, sources = found["tokens"], found["parents"], found["sources"]
        if not _whole(found["start"]) or found["start"] < 1:
            raise ValueError("start must be a position from 1")
        if not isinstance(tokens, list) or not 1 <= len(tokens) <= MOST_NODES or not all(map(_whole, tokens)):
            raise ValueError(f"tokens must be 1 to {MOST_NODES} token ids")
        if not isinstance(parents, list) or len(parents) != len(tokens) or not all(
                parent == -1 or (_whole(parent) and parent < node) for node, parent in enumerate(parents)):
            raise ValueError("each token needs a parent that comes before it, or -1")
        if not isinstance(found["drafter"], str) or not (sources is None or (_one_each(sources, tokens) and all(
                isinstance(name, str) for name in sources))):
            raise ValueError("drafter and sources must be texts, a source for each token or null")
        return cls(found["start"], tokens, parents, found["drafter"], sources,
                   _read_q(found["q"], found["distributions"], tokens))


def _read_q(places: Any, packed: Any, tokens: list[int]) -> list[Distribution | None] | None:
    if not isinstance(packed, list) or len(packed) > len(tokens):
        raise ValueError("distributions must be a list, none longer than the draft")
    kept = [_distribution(one) for one in packed]
    if sum(len(one.tokens) for one in kept) > MOST_NUMBERS:
        raise ValueError("its distributions have more numbers than a trace keeps")
    if places is None:
        return None
    if not _one_each(places, tokens):
        raise ValueError("q must name a distribution for each token, or be null")
    q: list[Distribution | None] = []
    for token, place in zip(tokens, places):
        if place is not None and not (_whole(place) and place < len(kept)):
            raise ValueError(f"there is no distribution {place!r}")
        q.append(None if place is None else kept[place])
        if place is not None and token not in kept[place].tokens:
            raise ValueError(f"token {token} was drafted from a distribution that does not have it")
    return q


def _distribution(found: Any) -> Distribution:
    if not isinstance(found, dict) or set(found) != {"tokens", "chances"}:
        raise ValueError("a distribution has tokens and chances")
    tokens = _unpacked(found["tokens"], "<i4").astype(np.int32)
    chances = _unpacked(found["chances"], "<f8").astype(np.float64)
    if len(tokens) != len(chances) or not len(tokens):
        raise ValueError("a distribution needs a chance for each of its tokens")
    # The negated form catches NaN as well.
    if tokens[0] < 0 or not (np.diff(tokens) > 0).all() or not ((chances > 0.0) & (chances <= 1.0)).all():
        raise ValueError("a distribution's tokens must ascend and its chances lie above 0, up to 1")
    return Distribution(tokens, chances)


def _packed(values: NDArray[Any], kind: str) -> str:
    """As bytes: lists of many numbers would take everybody's time to write."""
    return base64.b64encode(values.astype(kind).tobytes()).decode("ascii")


def _unpacked(text: Any, kind: str) -> NDArray[Any]:
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), dtype=kind)
    except (TypeError, ValueError, binascii.Error):
        raise ValueError("a distribution's numbers must be bytes in base64") from None


def _one_each(values: Any, tokens: list[int]) -> bool:
    return isinstance(values, list) and len(values) == len(tokens)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31
