"""A sequence as drafters see it, a toy target, and the loop between them."""

from __future__ import annotations

from collections.abc import Callable

from paceline.speculation.drafter import Budget, Drafter, Observation
from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import coupled

Model = Callable[[list[int]], int]
"""A deterministic target: what it says after some tokens."""


class FakeText:
    """Compared by identity, like the engine's sequences."""

    def __init__(self, tokens: list[int], seed: int = 7, scope: str = "", rule: str = "coupled") -> None:
        self.tokens = list(tokens)
        self.prompt_len = len(tokens)
        self.seed = seed
        self.scope = scope
        self.rule = rule


def propose(drafter: Drafter, text: FakeText, depth: int = 8, nodes: int = 64) -> DraftTree | None:
    draft = drafter.propose([text], [Budget(depth, nodes)])[0]
    if draft is not None:
        assert 0 < len(draft) <= nodes and max(draft.depths()) <= depth, "a draft must stay within its budget"
    return draft


def say(drafter: Drafter, text: FakeText, tokens: list[int]) -> None:
    """Commit tokens that no draft foresaw."""
    text.tokens += tokens
    drafter.observe(text, Observation(list(tokens)))


def verify(drafter: Drafter, text: FakeText, draft: DraftTree | None, model: Model) -> int:
    """One step as the engine does it, under the coupled rule. Returns how many tokens it committed."""
    if draft is None:
        say(drafter, text, [model(text.tokens)])
        return 1
    tokens = [text.tokens[-1], *draft.tokens]
    parents = [-1, *(parent + 1 for parent in draft.parents)]
    chosen = [model(text.tokens), *(model(text.tokens + draft.path(node)) for node in range(len(draft)))]
    verdict = coupled(parents, tokens, chosen)
    text.tokens += verdict.tokens
    drafter.observe(text, Observation(list(verdict.tokens), [row - 1 for row in verdict.path], draft, chosen))
    return len(verdict.tokens)
