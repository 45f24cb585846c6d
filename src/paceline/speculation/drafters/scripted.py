"""Two drafters that know or ignore the answer: the ceiling and the floor of what speculation can do.

`oracle` proposes a given continuation; `wrong` proposes tokens that are never right. They prove that verification
changes nothing, and in a benchmark they bound every real drafter from above and below.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.speculation.drafter import Budget, DraftContext, Drafter, Needs, Observation
from paceline.speculation.options import MAX_NODES, Options
from paceline.speculation.sequence import DraftedSequence
from paceline.speculation.tree import DraftTree


class ScriptedDrafter:
    """Drafts from a script of the whole output; branches > 1 adds siblings that differ from it.

    shift = 0 is the oracle; shift > 0 drafts (script + shift) mod vocabulary, so that a draft of the true script is
    wrong at every position.
    """

    needs = Needs()

    def __init__(self, name: str, script: Sequence[int], vocab_size: int, *, branches: int = 1,
                 shift: int = 0) -> None:
        self.name = name
        self._script = list(script)
        self._vocab = vocab_size
        self._branches = branches
        self._shift = shift

    def begin(self, sequence: DraftedSequence) -> None:
        pass

    def propose(self, sequences: Sequence[DraftedSequence], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        return [self._tree(len(s.tokens) - s.prompt_len, b) for s, b in zip(sequences, budgets)]

    def observe(self, sequence: DraftedSequence, observation: Observation) -> None:
        pass

    def release(self, sequence: DraftedSequence) -> None:
        pass

    def _tree(self, done: int, budget: Budget) -> DraftTree | None:
        """Depth by depth: decoys first, then the scripted token, which alone is continued. So the true path is
        scattered over the packed rows and has to be compacted."""
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for true in self._script[done:done + budget.depth]:
            if len(tokens) + self._branches > budget.nodes:
                break
            for branch in range(self._branches - 1, -1, -1):
                tokens.append((true + self._shift + branch) % self._vocab)
                parents.append(parent)
            parent = len(tokens) - 1
        return DraftTree(tokens, parents, self.name) if tokens else None


def build(method: str, options: Options, context: DraftContext) -> Drafter:
    script = options.tokens("tokens", context.vocab_size)
    branches = options.integer("branches", 1, 1, min(context.vocab_size // 2, MAX_NODES))
    shift = branches if method == "wrong" else 0
    return ScriptedDrafter(method, script, context.vocab_size, branches=branches, shift=shift)
