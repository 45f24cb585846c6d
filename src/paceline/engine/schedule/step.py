"""Step: what one pass runs. A prefill chunk, a plain decode and a draft tree are row groups of other lengths."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from paceline.cache.transfers import BlockCopy, SlotMove
from paceline.engine.schedule.sequence import Branch, Sequence

if TYPE_CHECKING:
    from paceline.cache.allocation import Allocation
    from paceline.speculation.tree import DraftTree


NO_TAPS: frozenset[int] = frozenset()


class Repeat(NamedTuple):
    """How a step is to run by itself."""

    times: int
    drafted_rows: int = 0
    """Of the step, those of drafts that a device finds included; 0: it finds none, there is one row per group."""
    lookahead: int = 0
    """Tokens that may be drafted for one group at a time."""
    heads: tuple[str, ...] = ()
    """Trained heads that take part in finding them."""


class Planned(NamedTuple):
    """How the next step is to run, and who takes part."""

    repeat: Repeat | None = None
    """By itself; None: once, as any other."""
    apart: bool = False
    """Of those only whose steps can be repeated; not repeated: of the others."""


class RowOwner(Protocol):
    """Whose cache some rows read and write, and what they run with besides the model."""

    @property
    def allocation(self) -> Allocation: ...

    adapter: Any


class Rows(Protocol):
    """All that running rows takes, whoever schedules them: `tokens` follow `start` tokens that are in the cache.
    A RowGroup, or what a model that drafts reads."""

    @property
    def seq(self) -> RowOwner:
        """Whose they are: a sequence, or what a model that drafts holds of one."""

    start: int
    tokens: list[int]
    parents: list[int] | None
    logits_from: int



@dataclass(slots=True)
class RowGroup:
    """Rows of one sequence: `tokens` follow `start` tokens that are already in the cache."""

    seq: Sequence
    start: int
    tokens: list[int]
    """First may be PENDING: the token the previous, uncommitted step samples for this sequence."""
    parents: list[int] | None = None
    """Parent row of each row (-1 for row 0); None: a chain. Row 0 is always a known (or pending) token;
    rows 1.. of a drafted group are draft.tokens."""
    draft: DraftTree | None = None
    logits_from: int = 0
    """Rows from this index on need logits; len(tokens): none (a prefill chunk that does not reach the end)."""
    epoch: int = 0
    siblings: Seq[Sequence] = ()
    """Further samples whose first token is sampled from this group's last row."""
    end: int = 0
    """In a repeated step: the first position that it must not write. There it rests while others go on."""
    drifts: bool = False
    """In a repeated step: how far it gets, or where it starts, is known when it is committed, because the device drafts
    for it. Until then `start` is the furthest that can be."""

    @property
    def sampled_rows(self) -> int:
        """How many of its rows are sampled from."""
        return len(self.tokens) - self.logits_from


@dataclass(slots=True)
class GroupResult:
    """What a group yielded. `tokens` are the new tokens in order (accepted drafts, then one more); `path` the rows
    of the accepted drafts (indices into the group's rows, ascending, row 0 excluded); `finish` ends the sequence."""

    tokens: list[int]
    path: Seq[int] = ()
    finish: str | None = None
    siblings: Seq[GroupResult] = ()
    moved: bool = False
    """The cache entries of `path` are where those of a chain would be already."""
    waits: bool = False
    """The sequence has done its part of a decision over several; it has nothing to run until the branches come."""
    branches: Seq[Branch] = ()
    """Come with the group that completes a decision over several sequences; it has no tokens of its own then. Of all
    branches from one source one is the source's own."""


@dataclass(slots=True)
class Step:
    """Carried out in the order moves, copies, rows; and steps in the order in which they were scheduled. Block tables
    (CacheManager.tables) are those at the moment schedule() returned: take what the step needs before calling the
    scheduler again."""

    id: int
    groups: list[RowGroup]
    copies: list[BlockCopy] = field(default_factory=list)
    moves: list[SlotMove] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    repeat: int = 0
    """0: the rows run once. Else they run so often, each time on the tokens that the time before sampled and that no
    host has seen: every group is a single token (known or pending), with positions reserved up to its end. It yields a
    token each time, and those of accepted drafts, until it comes to that end or ends its sequence."""
    drafted_rows: int = 0
    """Of a repeated step with drafts: its rows, theirs included. 0: there are none."""
    heads: tuple[str, ...] = ()
    """Trained heads that take part in finding those."""

    @property
    def taps(self) -> frozenset[int]:
        """Layers whose hidden states somebody's drafter reads, or embedding is made of."""
        return NO_TAPS.union(*(group.seq.taps for group in self.groups if group.seq.taps))

    @property
    def repeated(self) -> bool:
        return self.repeat > 0

    @property
    def prompt_rows(self) -> int:
        return sum(len(group.tokens) for group in self.groups if group.start < group.seq.prompt_len)

    @property
    def rows(self) -> int:
        return (self.drafted_rows or sum(len(group.tokens) for group in self.groups)) * max(self.repeat, 1)
