"""Drafts as traces keep them, and as they come back to be verified again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paceline.errors import RequestError
from paceline.sampling.cycles import Cycle, Distribution
from paceline.sampling.trace import Trace
from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import RULES, Probs, Verdict


def recorded(draft: DraftTree, verdict: Verdict, start: int, rule: str) -> Cycle:
    """A draft whose cycle began at `start`, and of its q what the rule read."""
    q = _read(draft, draft.q, verdict) if RULES[rule].reads_q and draft.q is not None else None
    return Cycle(start, list(draft.tokens), list(draft.parents), draft.drafter,
                 None if draft.sources is None else list(draft.sources), q)


def _read(draft: DraftTree, q: Sequence[Probs | None], verdict: Verdict) -> list[Distribution | None]:
    """Of an accepted token its own chance was read, and of one that nobody got to nothing; a rejected one had its whole
    q taken off the target's. Siblings that shared an array share what is kept of it, as the rules go by that."""
    whole: dict[int, Distribution] = {}
    for node in _rejected(draft, verdict):
        probs = q[node]
        if probs is not None and id(probs) not in whole:
            tokens = np.flatnonzero(probs)
            whole[id(probs)] = Distribution(tokens.astype(np.int32), probs[tokens])
    return [None if probs is None else whole.get(id(probs)) or Distribution(
        np.array([token], dtype=np.int32), probs[[token]]) for token, probs in zip(draft.tokens, q)]


def _rejected(draft: DraftTree, verdict: Verdict) -> list[int]:
    """Nodes that were drafts of a token of the text and were passed over for it."""
    accepted = [row - 1 for row in verdict.path]
    paths: list[list[int]] = []
    found: list[int] = []
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents)):
        above = paths[parent] if parent >= 0 else []
        paths.append([*above, token])
        depth = len(above)
        if depth > len(accepted) or above != verdict.tokens[:depth]:
            continue  # the text did not come there
        if depth == len(accepted) or node < accepted[depth]:
            found.append(node)
    return found


class RecordedDrafts(NamedTuple):
    """The drafts of a trace, to be verified where they were: a request that has them needs no drafter."""

    rule: str
    by_start: dict[int, Cycle]
    vocab_size: int

    @classmethod
    def of(cls, trace: Trace, vocab_size: int) -> RecordedDrafts | None:
        """None: nothing was drafted."""
        if trace.rule is None:
            return None
        if trace.rule not in RULES:
            raise RequestError(f"The trace was verified by the rule {trace.rule!r}, which this version does not have: "
                               f"it has {', '.join(RULES)}.", "trace")
        for cycle in trace.cycles:
            ids = [max(cycle.tokens), *(int(one.tokens[-1]) for one in cycle.distributions)]
            if max(ids) >= vocab_size:
                raise RequestError(f"The trace drafts token {max(ids)} and this model has {vocab_size}: it was "
                                   "recorded with another model.", "trace")
        return cls(trace.rule, {cycle.start: cycle for cycle in trace.cycles}, vocab_size)

    def at(self, start: int) -> DraftTree | None:
        """The draft of the cycle that began there. Made when it is needed: a q is as long as the vocabulary."""
        cycle = self.by_start.get(start)
        if cycle is None:
            return None
        dense = {id(one): one.dense(self.vocab_size) for one in cycle.distributions}
        q = None if cycle.q is None else [None if one is None else dense[id(one)] for one in cycle.q]
        return DraftTree(cycle.tokens, cycle.parents, cycle.drafter, q, cycle.sources)
