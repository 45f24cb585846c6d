"""What the engine needs of a trained draft head.

What a head keeps of a token lies in planes beside the target's cache, in the very slot of that token, and depends on
that token and the ones before it alone. Whenever the target has computed rows, `store` writes what is kept of them.

A round drafts for S sequences. Of each, n tokens are known and n - 1 computed; the newest, at position n - 1, is its
anchor. Passes of a round write to the slots from n - 1 on, which the step that verifies the draft writes again.

Nothing in `store`, `open` and `Round.logits` is decided on the host by what a tensor holds, so all of them can be
captured (where `capturable`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from paceline.kernels.device.head_rounds import DraftSlot
from paceline.kernels.interface import Kernels
from paceline.kernels.layout import GroupView, Layout
from paceline.models.heads.config import HeadConfig
from paceline.models.heads.further import Further, FurtherTokens

Planes = Mapping[str, torch.Tensor]
"""By the names of Head.planes: [slots, *shape] each, as many slots as the target's cache group has."""


@dataclass(frozen=True, slots=True)
class Plane:
    """What is kept of each token under one name."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass over the same number of rows of each sequence: a Layout with a group of so many rows for each, in their
    order, and one GroupView, the one that the planes lie under."""

    first: int
    """Position of the first row, counted from the anchor's."""
    rows: int
    mutual: bool = False
    """Layout.mutual: the rows see each other, whatever their order."""


@dataclass(slots=True)
class StoredRows:
    """Rows that the target has just computed. Their positions are layout.positions, their slots view.slots."""

    tokens: torch.Tensor
    """[N] int64."""
    layout: Layout
    view: GroupView
    """Of the cache group that the planes lie under."""
    before: torch.Tensor
    """[N] int64: slot of the token that each row follows (rows.slots_before), 0 for the first of a text."""


@dataclass(frozen=True, slots=True)
class Opened:
    """What a round starts from."""

    anchors: torch.Tensor
    """[S] int64: the newest tokens, at position n - 1."""
    before: torch.Tensor
    """[S] int64: slots of the tokens before them, the newest ones computed."""
    passes: Sequence[Layout]
    """For Head.passes(depth). A pass of a block kind may have fewer rows than that says, where there is no room."""
    depth: int
    """Tokens to draft; Round.logits will be called at most so often."""
    further: Further | None = None
    """What to draft from beside the draft vocabulary, where the head can (Head.drafts_further); None: nothing."""


class Best(NamedTuple):
    """Of each line."""

    tokens: Sequence[int]
    """The target's ids."""
    chances: Sequence[float]
    """That the target will accept them, as Round.logits has it."""


class Draw(NamedTuple):
    """How a line's tokens are drawn: by the target's own noise (sampling.noise), as the target will draw."""

    temperature: float
    """0: they are the likeliest, and there is no noise."""
    seed: int
    """The sample's, 64 bits."""
    position: int
    """Of the first of them, in the text."""


GREEDY = Draw(0.0, 0, 0)


class Round(Protocol):
    """Lines of drafted tokens that go on together, at first one of each sequence."""

    def logits(self, previous: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of the next token: [S, draft vocabulary] float32, behind it what Opened.further has, and the probability [S]
        float32 that the target will accept what is drafted here if it accepts everything before, where the head can
        tell. `previous` [S] int64, ids of the TARGET's: the tokens drafted last; at the first call the anchors."""
        ...

    def slot(self, previous: torch.Tensor) -> DraftSlot:
        """In place of a call of `logits`, for who can draw tokens from less than that (HeadRounds.draw), and from the
        draft vocabulary alone."""
        ...

    def chain(self, previous: Sequence[int], least: Sequence[float],
              draws: Sequence[Draw] = ()) -> list[Best] | None:
        """In place of all calls of `logits`, where one token of each is wanted: step after step what is drawn from
        those logits after each line, as its `draws` say (by default the likeliest). It may end where no line is likely
        to be accepted so far any more, that is with a probability of its `least`. None: nothing was done, there is no
        way to it but through the logits."""
        ...

    def fork(self, lines: torch.Tensor, layout: Layout | None) -> None:
        """Go on with other lines, S of them from now on: the i-th is what line lines[i] [S] int64 was at the last call
        of `logits`, of which each may go on several times, or not at all. `layout`: the next pass, a row for each,
        whose keys lie where its view says; None where the head runs none after its first. Lines that parted need a
        fork before every pass."""
        ...


class Head(Protocol):
    """A trained draft head, its weights loaded."""

    @property
    def config(self) -> HeadConfig:
        """`config.taps` is what to tap, `config.depth` how many tokens a round can draft."""
        ...

    @property
    def target_ids(self) -> torch.Tensor | None:
        """[draft vocabulary] int64, ascending: the target's id of each draft id. None: they are the same."""
        ...

    @property
    def capturable(self) -> bool:
        """Its passes can be captured: nothing in them is decided or planned on the host."""
        ...

    @property
    def drafts_further(self) -> bool:
        """Whether rounds may be opened with tokens beside the draft vocabulary (Opened.further)."""
        ...

    def further_tokens(self) -> FurtherTokens:
        """None so far, for one sequence."""
        ...

    def planes(self, cache: torch.dtype, activations: torch.dtype) -> tuple[Plane, ...]:
        """What it keeps of a token, for a cache of this type under a model that computes in `activations`."""
        ...

    def passes(self, depth: int) -> tuple[Pass, ...]:
        """What a round of `depth` tokens runs; () where it needs no rows."""
        ...

    def store(self, tapped: Mapping[int, torch.Tensor], rows: StoredRows, planes: Planes, kernels: Kernels) -> None:
        """Write what is kept of rows that the target has just computed. tapped[i] [N, h] for i in config.taps: of all
        rows, in their order."""
        ...

    def open(self, opened: Opened, planes: Planes, kernels: Kernels) -> Round:
        """Begin a round. What it needs of the tokens before the anchors has been stored."""
        ...
