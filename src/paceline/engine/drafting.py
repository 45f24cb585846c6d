"""Drafting: which sequences get a draft before a step, and what their drafters learn after it."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from paceline.engine.sequence import Sequence
from paceline.speculation.drafter import Budget, Drafter, Observation
from paceline.speculation.stats import SpeculationStats
from paceline.speculation.tree import DraftTree

log = logging.getLogger("paceline.speculation")


class Drafting:
    """The drafters of the running sequences. One that raises is switched off for its sequence; the text goes on."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab = vocab_size
        self._drafters: dict[Sequence, tuple[Drafter, SpeculationStats]] = {}
        self.failures = 0

    def begin(self, seq: Sequence, drafter: Drafter, stats: SpeculationStats) -> None:
        self._drafters[seq] = (drafter, stats)
        seq.wait_for_commit = drafter.needs.host
        try:
            drafter.begin(seq)
        except Exception as problem:
            self._switch_off(seq, problem)

    def propose(self, running: Iterable[Sequence]) -> None:
        """Give every caught-up sequence with a drafter its draft for the next step."""
        if not self._drafters:
            return
        by_drafter: dict[int, tuple[Drafter, list[Sequence]]] = {}
        for seq in running:
            entry = self._drafters.get(seq)
            if entry is not None and seq.in_flight == 0 and seq.computed == len(seq.tokens) - 1:
                by_drafter.setdefault(id(entry[0]), (entry[0], []))[1].append(seq)
        for drafter, seqs in by_drafter.values():
            budgets = [Budget(seq.request.speculation.k, seq.request.speculation.nodes) for seq in seqs]
            try:
                for seq, draft in zip(seqs, drafter.propose(seqs, budgets), strict=True):
                    seq.draft = self._checked(draft)
            except Exception as problem:
                for seq in seqs:
                    self._switch_off(seq, problem)

    def _checked(self, draft: DraftTree | None) -> DraftTree | None:
        """A draft as it may enter a step: an id outside the vocabulary would break everybody in it."""
        if draft is None or not len(draft):
            return None
        if min(draft.tokens) < 0 or max(draft.tokens) >= self._vocab:
            raise ValueError(f"a drafted token lies outside the vocabulary of {self._vocab}")
        return draft

    def observe(self, seq: Sequence, observation: Observation) -> None:
        entry = self._drafters.get(seq)
        if entry is None:
            return
        try:
            entry[0].observe(seq, observation)
        except Exception as problem:
            self._switch_off(seq, problem)

    def release(self, seq: Sequence) -> None:
        entry = self._drafters.pop(seq, None)
        if entry is not None:
            try:
                entry[0].release(seq)
            except Exception as problem:
                self._report(seq, entry[0], entry[1], problem)

    def _switch_off(self, seq: Sequence, problem: Exception) -> None:
        drafter, stats = self._drafters.pop(seq)
        seq.draft = None
        seq.wait_for_commit = False
        self._report(seq, drafter, stats, problem)

    def _report(self, seq: Sequence, drafter: Drafter, stats: SpeculationStats, problem: Exception) -> None:
        self.failures += 1
        if stats.failure is None:
            stats.failure = f"{type(problem).__name__}: {problem}"
            log.warning("drafter %s failed on request %s and was switched off for it: %s",
                        drafter.name, seq.request.id, stats.failure)
