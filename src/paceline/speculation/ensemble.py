"""Ensemble: several drafters behind one, each living as if it were alone.

What specinfer and merge share: the parts are built through the engine, called in turn, told of each step in terms of
their own trees, and dropped one by one when they fail.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from paceline.errors import RequestError
from paceline.speculation.drafter import Budget, DraftContext, DraftedSequence, Drafter, Needs, Observation
from paceline.speculation.growing import GrowingTree
from paceline.speculation.options import Options
from paceline.speculation.parts import MadeOfParts, Part, check_wishes, part_of
from paceline.speculation.tree import DraftTree

log = logging.getLogger("paceline.speculation")

UNKNOWN = -1
"""In Observation.chosen: this node of the part's draft did not make it into the verified tree."""


@dataclass(slots=True)
class Pack:
    """Trees packed into one. places[part][node]: where the part's node went, None if it was left out."""

    tree: GrowingTree = field(default_factory=GrowingTree)
    proposers: list[int] = field(default_factory=list)
    """Of each packed node: the part that proposed it first."""
    places: dict[int, list[int | None]] = field(default_factory=dict)
    scores: list[float] | None = None

    def take(self, part: int, draft: DraftTree, node: int) -> int:
        """Put a part's node, whose parent was taken, into the tree."""
        places = self.places.setdefault(part, [None] * len(draft))
        above = draft.parents[node]
        parent = -1 if above < 0 else places[above]
        if parent is None:
            raise ValueError("a node was packed before its parent")
        place = places[node] = self.tree.add(parent, draft.tokens[node])
        if place == len(self.proposers):
            self.proposers.append(part)
        return place

    def settle(self, drafts: dict[int, DraftTree]) -> None:
        """Find the place of every node, also of those that came after the tree was full and stand in it all the
        same, because another part proposed them too."""
        for part, draft in drafts.items():
            places: list[int | None] = []
            for token, above in zip(draft.tokens, draft.parents):
                parent = -1 if above < 0 else places[above]
                places.append(None if parent is None else self.tree.find(parent, token))
            self.places[part] = places


@dataclass(slots=True)
class _Life:
    """What an ensemble remembers of a sequence."""

    parts: list[int]
    """Those that have not failed on it."""
    drafts: dict[int, DraftTree] = field(default_factory=dict)
    """Of the last round, by part."""
    pack: Pack | None = None


class Ensemble(MadeOfParts):
    """Base of drafters made of others. A subclass says how trees are packed (`pack`) and may learn (`learn`).

    What it proposes counts as deterministic (no q), also where a part sampled: nodes are merged and chosen by their
    values, and only the rule for deterministic drafts, which draws the target's token first, is exact for that.
    """

    def __init__(self, name: str, parts: Sequence[Part]) -> None:
        self.name = name
        self.parts = list(parts)
        needs = [part.drafter.needs for part in parts]
        self.needs = Needs(host=any(need.host for need in needs), probes=any(need.probes for need in needs))
        self._lives: dict[DraftedSequence, _Life] = {}

    # ---------------------------------------------------------------- what a subclass says

    def pack(self, sequence: DraftedSequence, drafts: dict[int, DraftTree], budget: Budget) -> Pack:
        """Pack the parts' drafts (by part) into one tree within the budget; parents before children."""
        raise NotImplementedError

    def learn(self, sequence: DraftedSequence, drafts: dict[int, DraftTree], tokens: list[int]) -> None:
        """What the parts proposed (packed or not), and what was committed."""

    # ---------------------------------------------------------------- the drafter

    def drafters(self) -> Sequence[Drafter]:
        return [part.drafter for part in self.parts]

    def begin(self, sequence: DraftedSequence) -> None:
        life = self._lives[sequence] = _Life(list(range(len(self.parts))))
        for part in list(life.parts):
            self._guarded(part, [sequence], lambda drafter: drafter.begin(sequence))

    def propose(self, sequences: Sequence[DraftedSequence], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        for sequence in sequences:
            life = self._lives[sequence]
            life.drafts, life.pack = {}, None
        for index, part in enumerate(self.parts):
            chosen = [(s, part.budget(b)) for s, b in zip(sequences, budgets) if index in self._lives[s].parts]
            if not chosen:
                continue
            theirs, limits = [s for s, _ in chosen], [b for _, b in chosen]
            for sequence, draft in zip(theirs, self._proposals(index, theirs, limits)):
                if draft is not None and len(draft):
                    self._lives[sequence].drafts[index] = draft
        return [self._packed(sequence, budget) for sequence, budget in zip(sequences, budgets)]

    def observe(self, sequence: DraftedSequence, observation: Observation) -> None:
        life = self._lives[sequence]
        if life.drafts:
            self.learn(sequence, life.drafts, observation.tokens)
        for part in list(life.parts):
            self._guarded(part, [sequence], partial(_tell, sequence, self._translated(life, part, observation)))
        life.drafts, life.pack = {}, None

    def release(self, sequence: DraftedSequence) -> None:
        life = self._lives.pop(sequence, None)
        for part in () if life is None else life.parts:
            self._guarded(part, [sequence], lambda drafter: drafter.release(sequence))

    # ---------------------------------------------------------------- inside

    def _proposals(self, part: int, sequences: list[DraftedSequence], budgets: list[Budget]) -> list[DraftTree | None]:
        def ask(drafter: Drafter) -> list[DraftTree | None]:
            drafts = drafter.propose(sequences, budgets)
            if len(drafts) != len(sequences):
                raise ValueError(f"{len(drafts)} drafts for {len(sequences)} sequences")
            for draft in drafts:
                if draft is not None:
                    draft.check()
            return [draft if draft is None else draft.trimmed(budget.nodes) for draft, budget in zip(drafts, budgets)]

        if len(sequences) == 1:
            return self._guarded(part, sequences, ask) or [None]
        try:
            return ask(self.parts[part].drafter)
        except Exception:  # one of them may be what it fails on: each is asked alone
            return [draft for sequence, budget in zip(sequences, budgets)
                    for draft in self._proposals(part, [sequence], [budget])]

    def _packed(self, sequence: DraftedSequence, budget: Budget) -> DraftTree | None:
        life = self._lives[sequence]
        if not life.drafts:
            return None
        pack = life.pack = self.pack(sequence, life.drafts, budget)
        pack.settle(life.drafts)
        if not len(pack.tree):
            return None
        sources = [life.drafts[part].source(pack.places[part].index(node)) or self.parts[part].drafter.name
                   for node, part in enumerate(pack.proposers)]
        return DraftTree(pack.tree.tokens, pack.tree.parents, self.name, None, sources, pack.scores)

    def _translated(self, life: _Life, part: int, seen: Observation) -> Observation:
        """What came of a step in terms of the part's own draft: its node numbers, its rows."""
        draft = life.drafts.get(part)
        if draft is None or seen.draft is None or life.pack is None:
            return Observation(seen.tokens)
        verified = len(seen.draft)  # the engine may have cut the end off
        places = [place if place is not None and place < verified else None
                  for place in life.pack.places.get(part, [None] * len(draft))]
        accepted = [places.index(place) for place in seen.accepted if place in places]
        chosen = [seen.chosen[0], *(UNKNOWN if place is None else seen.chosen[place + 1] for place in places)] \
            if seen.chosen else []
        return Observation(seen.tokens, accepted, draft, chosen)

    def _guarded(self, part: int, sequences: list[DraftedSequence], call: Callable[[Drafter], _Answer]
                 ) -> _Answer | None:
        """Call a part; if it raises it is dropped for these sequences, and the others go on."""
        drafter = self.parts[part].drafter
        try:
            return call(drafter)
        except Exception as problem:
            if not self.parts[part].failed:
                self.parts[part].failed = True
                log.warning("%s goes on without %s, which failed: %s: %s", self.name, drafter.name,
                            type(problem).__name__, problem)
            for life in [self._lives[sequence] for sequence in sequences if sequence in self._lives]:
                life.parts.remove(part)
                life.drafts.pop(part, None)
            self.part_dropped(drafter, sequences, problem)
            return None


_Answer = TypeVar("_Answer")
_Kind = TypeVar("_Kind", bound=Ensemble)


def _tell(sequence: DraftedSequence, observation: Observation, drafter: Drafter) -> None:
    drafter.observe(sequence, observation)


def shared_ensemble(kind: type[_Kind], method: str, options: Options, context: DraftContext) -> _Kind:
    """The ensemble that an option "drafters" (a list of methods' names or dicts) describes. Requests that name the
    same parts share it while any of them lives, so that a part that drafts in batches gets its batch."""
    wishes = options.take("drafters", None)
    check_wishes(wishes, method)
    known = context.shared.setdefault(f"{method} ensembles", WeakValueDictionary())
    key = json.dumps(wishes, sort_keys=True, default=repr)
    found = known.get(key)
    if found is None:
        found = known[key] = kind(method, [_blind_part(wish, method, context) for wish in wishes])
    return found  # type: ignore[no-any-return]


def _blind_part(wish: Any, method: str, context: DraftContext) -> Part:
    part = part_of(wish, method, context)
    if part.drafter.needs.taps:
        raise RequestError(f"{method!r} cannot be made of {part.drafter.name!r}, which reads the target's hidden "
                           "states: use it alone.", "speculation")
    return part
