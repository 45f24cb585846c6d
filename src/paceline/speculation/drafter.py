"""The whole drafter interface: begin, propose, observe, release."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.speculation.tree import DraftTree


class DraftedSequence(Protocol):
    """What a drafter sees of a sequence. It must not change any of it."""

    tokens: list[int]
    prompt_len: int
    seed: int


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter asks of the engine and what kind of drafts it makes."""

    taps: tuple[int, ...] = ()
    """Layers whose incoming hidden states it wants in `observe`."""
    samples: bool = False
    """Drafts are sampled (trees carry q); otherwise they are deterministic."""
    host: bool = True
    """Runs on the host and needs the last token there."""


@dataclass(slots=True)
class Observation:
    """What came of a proposal: the tokens now committed and, of the draft's nodes, those accepted."""

    tokens: list[int]
    accepted: list[int] = field(default_factory=list)
    hidden: dict[int, Any] = field(default_factory=dict)


class Drafter(Protocol):
    name: str
    needs: Needs

    def begin(self, sequence: DraftedSequence) -> None:
        """A sequence starts; its prompt is in `tokens`."""

    def propose(self, sequences: Sequence[DraftedSequence], budget: int) -> list[DraftTree | None]:
        """At most `budget` nodes for each sequence, continuing its `tokens`; None: nothing to say."""

    def observe(self, sequence: DraftedSequence, observation: Observation) -> None:
        """New tokens of the sequence are final (already in `tokens`)."""

    def release(self, sequence: DraftedSequence) -> None:
        """The sequence is gone; forget it."""
