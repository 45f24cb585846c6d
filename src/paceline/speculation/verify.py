"""Verification rules by name: from what the target says at every row of a draft to the tokens that stand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.speculation.rules.coupled import coupled
from paceline.speculation.rules.sampled import multi_round, rejection, without_replacement
from paceline.speculation.rules.typical import DELTA, EPSILON, typical
from paceline.speculation.rules.verdict import Probs, Randomness, Target, Verdict, Verify, children_of
from paceline.speculation.tree import DraftTree

__all__ = ["RULES", "Probs", "Randomness", "Rule", "Target", "Verdict", "Verify", "check", "coupled", "multi_round",
           "rejection", "rule_for", "typical", "without_replacement"]


def _coupled(tree: DraftTree, p: Target, randomness: Randomness) -> Verdict:
    chosen = [randomness.target(row) for row in range(len(tree) + 1)]
    return coupled([-1, *(parent + 1 for parent in tree.parents)], [-1, *tree.tokens], chosen)


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule and what can be said of it."""

    name: str
    verify: Verify
    reads_q: bool = False
    """Needs the q that drafts were sampled from, and believes it."""
    chains_only: bool = False
    """Takes one sampled draft of a token, no branches."""
    lossy: bool = False
    """The text follows another law than the target's."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """What can be set about it, from 0 to 1: arguments of `verify` with their defaults."""


RULES: Mapping[str, Rule] = {rule.name: rule for rule in (
    Rule("coupled", _coupled),
    Rule("rejection", rejection, reads_q=True, chains_only=True),
    Rule("multi-round", multi_round, reads_q=True),
    Rule("without-replacement", without_replacement, reads_q=True),
    Rule("typical", typical, lossy=True, numbers={"epsilon": EPSILON, "delta": DELTA}),
)}


def rule_for(verify: str, samples: bool) -> Rule:
    """The rule that carries out `verify` for a drafter that samples its drafts or does not.

    For deterministic drafts the exact rules accept the same drafts with the same probability; the coupled one then
    stands for all of them, so that the text is also the one of plain decoding.
    """
    rule = RULES[verify]
    return rule if samples or not rule.reads_q else RULES["coupled"]


def check(rule: Rule, tree: DraftTree, vocab_size: int) -> None:
    """Raise a ValueError that says why `rule` cannot verify `tree`: what it takes on trust would bend the text."""
    if not rule.reads_q or tree.q is None:
        return
    if len(tree.q) != len(tree):
        raise ValueError(f"a sampled draft needs a q for each of its {len(tree)} tokens, got {len(tree.q)}")
    seen: set[int] = set()
    for token, q in zip(tree.tokens, tree.q):
        if q is None:
            continue
        if id(q) not in seen:
            seen.add(id(q))
            # The negated form catches NaN as well.
            if q.shape != (vocab_size,) or not (q.min() >= 0.0 and abs(q.sum() - 1.0) < 1e-6):
                raise ValueError(f"a draft's q must be {vocab_size} probabilities that sum to 1")
        if not q[token] > 0.0:
            raise ValueError(f"token {token} was drafted from a q that gives it no probability")
    if rule.chains_only:
        for rows in children_of(tree).values():
            if sum(tree.q[row - 1] is not None for row in rows) > 1:
                raise ValueError(f"verify={rule.name!r} takes chains of sampled drafts: use 'multi-round' for branches "
                                 "sampled independently, 'without-replacement' for distinct ones, or 'coupled'")
