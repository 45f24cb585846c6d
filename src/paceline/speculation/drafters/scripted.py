"""Two drafters that know or ignore the answer: the ceiling and the floor of what speculation can do.

`oracle` proposes a given continuation; `wrong` proposes tokens that are never right. They prove that verification
changes nothing, and in a benchmark they bound every real drafter from above and below.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.speculation.drafter import DraftedSequence, Needs, Observation
from paceline.speculation.tree import DraftTree


class ScriptedDrafter:
    """Drafts from a script of the whole output; branches > 1 adds siblings that differ from it.

    shift = 0 is the oracle; shift > 0 drafts (script + shift) mod vocabulary, so that a draft of the true script is
    wrong at every position.
    """

    needs = Needs()

    def __init__(self, name: str, script: Sequence[int], vocab_size: int, *, k: int, branches: int = 1,
                 shift: int = 0) -> None:
        self.name = name
        self._script = list(script)
        self._vocab = vocab_size
        self._k = k
        self._branches = branches
        self._shift = shift

    def begin(self, sequence: DraftedSequence) -> None:
        pass

    def propose(self, sequences: Sequence[DraftedSequence], budget: int) -> list[DraftTree | None]:
        return [self._tree(len(s.tokens) - s.prompt_len, budget) for s in sequences]

    def observe(self, sequence: DraftedSequence, observation: Observation) -> None:
        pass

    def release(self, sequence: DraftedSequence) -> None:
        pass

    def _tree(self, done: int, budget: int) -> DraftTree | None:
        """Depth by depth: decoys first, then the scripted token, which alone is continued. So the true path is
        scattered over the packed rows and has to be compacted."""
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for true in self._script[done:done + self._k]:
            if len(tokens) + self._branches > budget:
                break
            for branch in range(self._branches - 1, -1, -1):
                tokens.append((true + self._shift + branch) % self._vocab)
                parents.append(parent)
            parent = len(tokens) - 1
        return DraftTree(tokens, parents, self.name) if tokens else None
