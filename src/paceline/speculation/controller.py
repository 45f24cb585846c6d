"""Controller: who decides how much is drafted, what it is asked and what it is told. AdaptiveController is the one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

from paceline.speculation.drafter import Budget, Drafter, Observation
from paceline.speculation.spec import Speculation
from paceline.speculation.step_cost import Load
from paceline.speculation.tree import DraftTree


class Ahead(NamedTuple):
    """The step that is being put together."""

    running: int
    """Sequences, with a row each."""
    rows: int
    """Those rows, and those of drafts that are decided already."""
    context: float = 0.0
    """Tokens before these rows, in all."""
    most: int = 1 << 30
    """Rows that drafts may have besides: none where some prompt's first token would come later than it should, few
    where a step would take too long."""


class Ask(NamedTuple):
    """A sequence that could have a draft."""

    sequence: Hashable
    context: int = 0
    """Its tokens."""
    behind: bool = False
    """It gets tokens more slowly than it should."""


class Offer(NamedTuple):
    """A draft that there is for a sequence."""

    ask: Ask
    draft: DraftTree
    chances: list[float] | None
    """Of its first nodes: how likely each is accepted. None: it is sent as it is, which was decided before it was
    made."""


class Controller(Protocol):
    """The engine asks and reports in the order of these methods."""

    def begin(self, sequence: Hashable, drafter: Drafter, wish: Speculation, tokens: int = 0,
              scope: str = "") -> None:
        """A sequence with a drafter starts, with so many tokens: a model that drafts has to read them first. What its
        text teaches may be used for sequences of the same scope alone; how long things take, for all."""

    def budgets(self, asks: Sequence[Ask], ahead: Ahead) -> list[Budget | None]:
        """How much may be drafted for each of these in the next step; None: nothing."""

    def drafted(self, sequence: Hashable, depth: int, seconds: float, weighed: float = 0.0) -> None:
        """Its drafter was asked for so deep a draft, and this was its share of the time, of which the drafter has
        `weighed` some itself."""

    def judge(self, ask: Ask, draft: DraftTree | None, ahead: Ahead) -> Offer | None:
        """What a proposal promises; None: there is none."""

    def choose(self, offers: Sequence[Offer], ahead: Ahead) -> list[DraftTree | None]:
        """What of all proposals of the step is sent to the target; of each at most its beginning."""

    def learn(self, sequence: Hashable, observation: Observation) -> None:
        """What came of it, or came without it."""

    def stepped(self, load: Load, running: int, tokens: int, drafting: float, seconds: float = 0.0) -> None:
        """A step of so many sequences gave those of them that decode so many tokens, after so many seconds of
        drafting. (What it took, the step cost has been told.) `seconds`: of all of it by the clock, drafting and what
        the host did included; 0: nobody looked."""

    def plain_cost(self, running: int, context: float = 0.0) -> float:
        """Seconds of one token of plain decoding among so many sequences, with so many tokens before them in all; 0
        while nothing is measured."""

    def release(self, sequence: Hashable) -> None:
        """The sequence is gone."""
