"""Ensemble: several drafters as one, each living as if it were alone.

What specinfer and merge share: the parts are built through the engine, called in turn, told of each step in terms of
their own trees, and dropped one by one when they fail.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import WeakValueDictionary

from paceline.errors import RequestError
from paceline.speculation.drafter import Budget, DraftContext, Drafter, Needs, Observation
from paceline.speculation.guard import Guard, reason
from paceline.speculation.options import Options
from paceline.speculation.packing import Pack
from paceline.speculation.parts import MadeOfParts, Part, all_taps, check_wishes, fitted, part_of
from paceline.speculation.sequence import DraftedSequence
from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import RULES


@dataclass(slots=True)
class _Life:
    """What an ensemble remembers of a sequence."""

    parts: list[int]
    """Those that have not failed on it."""
    drafts: dict[int, DraftTree] = field(default_factory=dict)
    """Of the last round, by part."""
    pack: Pack | None = None


class Ensemble(MadeOfParts, Guard[DraftedSequence]):
    """Base of drafters made of others. A subclass says how trees are packed (`pack`) and may learn (`learn`).

    What it proposes counts as deterministic (no q), also where a part sampled: nodes are merged and chosen by their
    values, and only the rule for deterministic drafts, which samples the target's token first, is exact for that.
    """

    def __init__(self, name: str, parts: Sequence[Part]) -> None:
        super().__init__()
        self.name = name
        self.parts = list(parts)
        needs = [part.drafter.needs for part in parts]
        self.needs = Needs(taps=all_taps(needs), host=any(need.host for need in needs),
                           runs_model=any(need.runs_model for need in needs),
                           probes=any(need.probes for need in needs))
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
            drafter = self.parts[part].drafter
            self.guarded(drafter, sequence, drafter.begin, sequence)

    def propose(self, sequences: Sequence[DraftedSequence], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        for sequence in sequences:
            life = self._lives[sequence]
            life.drafts, life.pack = {}, None
        for index, part in enumerate(self.parts):
            chosen = [(s, part.budget(b)) for s, b in zip(sequences, budgets) if index in self._lives[s].parts]
            if not chosen:
                continue
            theirs, limits = [s for s, _ in chosen], [b for _, b in chosen]
            for sequence, limit, proposed, *_ in self.proposals(part.drafter, theirs, limits):
                draft = self.guarded(part.drafter, sequence, fitted, proposed, limit)
                if draft is not None:
                    self._lives[sequence].drafts[index] = draft
        return [self._packed(sequence, budget) for sequence, budget in zip(sequences, budgets)]

    def observe(self, sequence: DraftedSequence, observation: Observation) -> None:
        life = self._lives[sequence]
        if life.drafts:
            self.learn(sequence, life.drafts, observation.tokens)
        for part in list(life.parts):
            drafter = self.parts[part].drafter
            self.guarded(drafter, sequence, drafter.observe, sequence, self._translated(life, part, observation))
        life.drafts, life.pack = {}, None

    def release(self, sequence: DraftedSequence) -> None:
        life = self._lives.pop(sequence, None)
        for part in () if life is None else life.parts:
            drafter = self.parts[part].drafter
            self.guarded(drafter, sequence, drafter.release, sequence)

    # ---------------------------------------------------------------- inside

    def _packed(self, sequence: DraftedSequence, budget: Budget) -> DraftTree | None:
        life = self._lives[sequence]
        if not life.drafts:
            return None
        pack = life.pack = self.pack(sequence, life.drafts, budget)
        pack.settle(life.drafts)
        if not len(pack.tree):
            return None
        names = {part: self.parts[part].drafter.name for part in life.drafts}
        return pack.draft(self.name, life.drafts, names)

    def _translated(self, life: _Life, part: int, seen: Observation) -> Observation:
        """What came of a step in terms of the part's own draft: its node numbers, its rows."""
        draft = life.drafts.get(part)
        if draft is None or seen.draft is None or life.pack is None:
            return Observation(seen.tokens, hidden=seen.hidden)
        return life.pack.translated(part, draft, seen)

    def lose(self, drafter: Drafter, sequences: Sequence[DraftedSequence], problem: Exception) -> None:
        """A part failed on these sequences, and is asked about them no more; the others go on."""
        self.say_once(id(drafter), "%s goes on without %s, which failed: %s", self.name, drafter.name, reason(problem),
                      problem=problem)
        for life in [self._lives[sequence] for sequence in sequences if sequence in self._lives]:
            for part in [part for part in life.parts if self.parts[part].drafter is drafter]:
                life.parts.remove(part)
                life.drafts.pop(part, None)
        self.tell(drafter, sequences, problem)


_Kind = TypeVar("_Kind", bound=Ensemble)


def shared_ensemble(kind: type[_Kind], method: str, options: Options, context: DraftContext) -> _Kind:
    """The ensemble that an option "drafters" (a list of methods' names or dicts) describes. Requests that name the
    same parts share it while any of them lives, so that a part that drafts in batches gets its batch."""
    wishes = options.take("drafters", None)
    check_wishes(wishes, method)
    known = context.shared.setdefault(f"{method} ensembles", WeakValueDictionary())
    key = json.dumps(wishes, sort_keys=True, default=repr)
    found = known.get(key)
    if found is None:
        found = known[key] = kind(method, [part_of(wish, method, context) for wish in wishes])
    if RULES[options.verify].reads_q and any(part.drafter.needs.samples for part in found.parts):
        raise RequestError(f"verify={options.verify!r} goes by what drafts were sampled from, and {method!r} merges "
                           "them by their values: use 'coupled', or one of its drafters alone.", "speculation")
    return found  # type: ignore[no-any-return]
